"""A run: the programs, each in its own process, and the file that collects their figures.

Used by `__main__.py`, `tables.py` and the tests. This module measures nothing.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.report import describe_machine

ROOT = Path(__file__).resolve().parents[1]
FORMAT = 2
#: The programs in the order of a run, with the seconds after which each is stopped.
PROGRAMS = {
    "vs_torchrl": 600,
    "samplers": 360,
    "slices": 180,
    "recording": 180,
    "remote": 180,
    "images": 600,
}
#: A program begins when the load is below this, or after so many seconds.
IDLE_LOAD, IDLE_SECONDS = 2.0, 20


def run_program(name: str, folder: Path, *, cache: Path, smoke: bool) -> dict[str, Any]:
    """Run a program to its end or its time limit; return how it ended, and its results up to then.

    Args:
        name: A module of this folder.
        folder: Folder for the program's log and figures.
        cache: Folder for what later runs use again.
        smoke: Whether everything runs once, tiny.
    """
    figures, log = folder / f"{name}.json", folder / f"{name}.log"
    if not smoke:
        _wait_until_idle()
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stores-", dir=folder) as stores, log.open("w") as out:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(figures)]
        command += ["--folder", stores, "--cache", str(cache), *["--smoke"] * smoke]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(PROGRAMS[name])
        finally:
            with suppress(ProcessLookupError):  # all of its processes have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    part = {"name": name, "state": "done", "message": "", "seconds": time.monotonic() - started}
    part |= {"load": "", "skipped": {}, "results": []}
    if figures.exists():
        written = json.loads(figures.read_text())
        part |= {key: written[key] for key in ("skipped", "results")}
        part["load"] = written["about"].get("load", "")
        if written["whole"]:
            return part
    if code is None:
        return part | {"state": "cut", "message": "it exceeded its time limit"}
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    message = f"exit code {code}: {lines[-1].strip() if lines else 'no output'}"
    return part | {"state": "failed", "message": message[:300]}


def _wait_until_idle() -> None:
    """Wait until the previous program's writes have reached the disk, but not for long."""
    deadline = time.monotonic() + IDLE_SECONDS
    while os.getloadavg()[0] > IDLE_LOAD and time.monotonic() < deadline:
        time.sleep(1)


def gather(parts: list[dict[str, Any]], effort: str) -> dict[str, Any]:
    """Return the figures of all programs, in the format of `run.json`."""
    results = [{"part": part["name"]} | row for part in parts for row in part["results"]]
    return {
        "format": FORMAT,
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _describe_commit(),
        "effort": effort,
        "about": describe_machine(),
        "parts": [{key: value for key, value in part.items() if key != "results"} for part in parts],
        "results": results,
    }


def _describe_commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def write(run: Mapping[str, Any], path: Path) -> None:
    """Write `run.json`, with one line per result."""
    lines = [json.dumps(row, ensure_ascii=False) for row in run["results"]]
    head = json.dumps({**run, "results": []}, indent=1, ensure_ascii=False)
    path.write_text(head.replace('"results": []', '"results": [\n' + ",\n".join(lines) + "\n]") + "\n")


def load(path: Path) -> dict[str, Any]:
    """Read `run.json` of a run."""
    run: dict[str, Any] = json.loads(path.read_text())
    if run.get("format") != FORMAT:
        raise SystemExit(f"{path} has format {run.get('format')}, not {FORMAT}: run `make bench` again")
    return run


def find_worse(new: dict[str, Any], old: dict[str, Any], slack: float) -> Iterator[str]:
    """Yield a line for each ratio of a run that is lower than in another run by more than `slack` of it.

    Only results that compare expstore with one other side count. Results that the new run lacks are named
    too. Bars that the other run met must be met.
    """
    rows = {(row["part"], row["name"]): row for row in new["results"]}
    for row in old["results"]:
        name = f"{row['part']}:{row['name']}"
        now = rows.get((row["part"], row["name"]))
        if now is None:
            yield f"{name} was not measured"
        elif row["ok"] and not now["ok"]:
            yield f"{name} misses its bar: {now['value']:.3g}, bar {now['bar']}"
        elif (before := find_ratio(row)) and (after := find_ratio(now) or 0.0) < before * (1 - slack):
            yield f"{name}: {after:.2f}x, it was {before:.2f}x"


def find_ratio(row: dict[str, Any]) -> float | None:
    """Return the ratio of the other side's time to ours for the same call; None without another side."""
    medians = {side: data["median"] for side, data in row["data"].items() if _is_series(data)}
    ours = medians.pop("expstore", None)
    if ours is None or len(medians) != 1:
        return None
    return float(medians.popitem()[1] / ours)


def _is_series(data: object) -> bool:
    return isinstance(data, dict) and "median" in data
