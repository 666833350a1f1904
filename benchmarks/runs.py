"""A run: its folder, the results of its parts, and the file that collects them.

Used by `__main__.py`, `tables.py` and `plots.py`, and by the tests. An interrupted run can be continued:
finished parts are not run again. This module measures nothing.
"""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import machine
from benchmarks.suite import Outcome, Part

FORMAT = 1


@dataclass(frozen=True)
class Run:
    """Locate the files of one run.

    Args:
        folder: Folder of the run.
    """

    folder: Path

    @classmethod
    def new(cls, out: Path) -> Run:
        """Create a folder for a new run."""
        stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        folder = out / f"run-{stamp}"
        (folder / "parts").mkdir(parents=True)
        return cls(folder)

    @classmethod
    def last(cls, out: Path, *, whole: bool) -> Run | None:
        """Return the newest run, of the complete ones or of the interrupted ones."""
        for folder in sorted(out.glob("run-*"), reverse=True):
            if cls(folder).file.exists() == whole and (folder / "parts").is_dir():
                return cls(folder)
        return None

    @property
    def file(self) -> Path:
        """The file that collects the results; it exists when all parts have run."""
        return self.folder / "run.json"

    def figures(self, part: Part) -> Path:
        """Return the path of a part's figures."""
        return self.folder / "parts" / f"{part.name}.json"

    def log(self, part: Part) -> Path:
        """Return the path of a part's log."""
        return self.folder / "parts" / f"{part.name}.log"

    def outcome(self, part: Part) -> Outcome | None:
        """Return how a part ended; None if it has not run to its end."""
        path = self.folder / "parts" / f"{part.name}.outcome.json"
        return Outcome(**json.loads(path.read_text())) if path.exists() else None

    def note(self, part: Part, outcome: Outcome) -> None:
        """Save how a part ended."""
        path = self.folder / "parts" / f"{part.name}.outcome.json"
        path.write_text(json.dumps(asdict(outcome)))

    def gather(self, parts: Sequence[Part], *, effort: str) -> dict[str, Any]:
        """Return the results of all parts in the format of `run.json`."""
        told: dict[str, Any] = {
            "format": FORMAT,
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "commit": _commit(),
            "effort": effort,
            "about": machine() | {"threads": "2, with @1: 1"},
            "parts": [],
            "skipped": {},
            "missed": [],
            "results": [],
        }
        for part in parts:
            outcome = self.outcome(part) or Outcome("not run", 0.0)
            found = json.loads(path.read_text()) if (path := self.figures(part)).exists() else {}
            load = found.get("about", {}).get("load", "")
            told["parts"].append({"name": part.name, **asdict(outcome), "load": load, "note": part.note})
            told["skipped"] |= found.get("skipped", {})
            told["results"] += [{"part": part.name} | row for row in found.get("results", ())]
        told["seconds"] = sum(part["seconds"] for part in told["parts"])
        told["missed"] = [f"{row['part']}:{row['name']}" for row in told["results"] if not row["ok"]]
        return told

    def write(self, told: dict[str, Any]) -> None:
        """Write `run.json`, with one line per result."""
        lines = [json.dumps(row, ensure_ascii=False) for row in told["results"]]
        head = json.dumps(told | {"results": []}, indent=1, ensure_ascii=False)
        text = head.replace('"results": []', '"results": [\n' + ",\n".join(lines) + "\n]")
        self.file.write_text(text + "\n")


def load(path: Path) -> dict[str, Any]:
    """Read `run.json` of a run."""
    told: dict[str, Any] = json.loads(path.read_text())
    if told.get("format") != FORMAT:
        raise SystemExit(
            f"{path} has format {told.get('format')}; this reads {FORMAT}: run `make bench` again"
        )
    return told


def broken(new: dict[str, Any], old: dict[str, Any], slack: float) -> Iterator[str]:
    """Yield a line for each ratio of a run that is lower than in another run by more than `slack` of it.

    Only results that compare expstore with another side count, and only if they have a bar or are in both
    runs. Results that the new run lacks are named too. Bars that the other run met must be met.
    """
    found = {(row["part"], row["name"]): row for row in new["results"]}
    for row in old["results"]:
        name = f"{row['part']}:{row['name']}"
        mine = found.get((row["part"], row["name"]))
        if mine is None:
            yield f"{name} was not measured"
        elif row["ok"] and not mine["ok"]:
            yield f"{name} misses its bar: {mine['value']:.3g}, bar {mine['bar']}"
        elif (before := ratio(row)) and (now := ratio(mine) or 0.0) < before * (1 - slack):
            yield f"{name}: {now:.2f}x, it was {before:.2f}x"


def ratio(row: dict[str, Any]) -> float | None:
    """Return the ratio of the other side's time to ours for the same call; None without another side."""
    sides = row["data"]
    others = [key for key, value in sides.items() if key != "expstore" and _timed(value)]
    if not _timed(sides.get("expstore")) or len(others) != 1:
        return None
    return float(sides[others[0]]["median"] / sides["expstore"]["median"])


def _timed(value: object) -> bool:
    return isinstance(value, dict) and "median" in value


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip() or "unknown"
