"""The benchmarks run; bars, blocks of documents and the comparison with an earlier run do what they say.

Sizes are tiny and figures meaningless. The figures in the documents are compared with the stored results.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report, runs, tables, timing
from benchmarks.profiles import shares
from tests.support.paths import ROOT

entry = importlib.import_module("benchmarks.__main__")
RESULTS = ROOT / "benchmarks" / "results"
STORED = runs.load(RESULTS / "run.json")


@pytest.fixture
def run() -> dict[str, Any]:
    """The stored run, to be changed."""
    return copy.deepcopy(STORED)


def find(run: dict[str, Any], name: str) -> dict[str, Any]:
    return next(row for row in run["results"] if row["name"] == name)


# -- the programs -------------------------------------------------------------------------------------


@pytest.mark.torture
@pytest.mark.timeout(1100)
def test_a_tiny_run_has_every_result_of_the_stored_run(tmp_path: Path) -> None:
    """Run what `make bench-smoke` runs. It takes a minute of CPU, so it belongs to the long run."""
    command = [sys.executable, "-m", "benchmarks", "--smoke", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (folder,) = tmp_path.iterdir()
    run = runs.load(folder / "run.json")
    assert {part["name"]: part["state"] for part in run["parts"]} == dict.fromkeys(runs.PROGRAMS, "done")
    files = {f"{name}.{ending}" for name in runs.PROGRAMS for ending in ("json", "log")}
    assert {path.name for path in folder.iterdir()} == files | {"run.json", "table.md"}
    skipped = {side for part in run["parts"] for side in part["skipped"]}
    marks = {"torchrl": "prioritized/", "cpprb": "/cpprb", "stable-baselines3": "recording/sb3-"}
    wanted = {
        (row["part"], row["name"])
        for row in STORED["results"]
        if not any(mark in row["name"] for side, mark in marks.items() if side in skipped)
        or row["name"] == "prioritized/reopen"
    }
    found = {(row["part"], row["name"]): row for row in run["results"]}
    assert wanted <= found.keys()
    assert skipped or found.keys() == wanted
    assert all(row["value"] > 0 for row in found.values() if row["name"] != "memory/growth")
    compared = {(row["part"], row["name"]) for row in STORED["results"] if runs.find_ratio(row)}
    assert {name for name in wanted & compared if not runs.find_ratio(found[name])} == set()
    with pytest.raises(SystemExit, match="meaningless"):
        entry.main(["embed", "--out", str(tmp_path)])


PROGRAMS = {
    "good": """
import json, sys
file = sys.argv[sys.argv.index("--json") + 1]
row = dict(name="a", value=1.0, ours="", theirs="", ratio="", note="", data={}, bar=">= 2x", ok=False)
json.dump({"whole": True, "about": {}, "skipped": {"cpprb": "gone"}, "results": [row]}, open(file, "w"))
sys.exit(1)
""",
    "bad": "raise RuntimeError('no disk')",
    "slow": """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
""",
}


@pytest.mark.slow
def test_a_program_that_fails_stops_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    for name, text in {"__init__": "", **PROGRAMS}.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(runs, "IDLE_SECONDS", 0)
    limits = {"bad": 60, "slow": 2, "good": 60}
    for module in (runs, entry):
        monkeypatch.setattr(module, "PROGRAMS", limits)
    out = tmp_path / "out"
    assert entry.main(["--out", str(out)]) == 2
    lines = capsys.readouterr().out
    assert "incomplete: bad: failed: exit code 1: RuntimeError: no disk" in lines
    assert "incomplete: slow: cut: it exceeded its time limit" in lines
    assert "missed: good: a: 1.0 (bar >= 2x)" in lines
    assert "left out: good: cpprb: gone" in lines
    (folder,) = out.iterdir()
    states = {part["name"]: part["state"] for part in runs.load(folder / "run.json")["parts"]}
    assert states == {"bad": "failed", "slow": "cut", "good": "done"}
    assert not [*folder.glob("stores-*")]
    assert entry.main(["--only", "good", "--out", str(out)]) == 1


def test_a_run_without_all_programs_is_not_embedded(run: dict[str, Any], tmp_path: Path) -> None:
    del run["parts"][0]
    runs.write(run, tmp_path / "run.json")
    with pytest.raises(SystemExit, match="no figures of vs_torchrl"):
        entry.main(["embed", "--run", str(tmp_path)])


def test_a_result_below_its_bar_fails_a_program(tmp_path: Path) -> None:
    bars = {"fast": report.at_least(3), "small": report.Bar(300, " MB"), "other": report.at_least(1)}

    def measure(setup: report.Setup) -> Iterator[report.Result]:
        setup.skip("cpprb", "gone")
        for name, value in (("fast", 2.9), ("fast@1", 3.0), ("small", 301), ("other", 1), ("free", 0)):
            yield report.Result(name, value, "ours")

    figures = tmp_path / "figures.json"
    arguments = ["--folder", str(tmp_path / "stores"), "--json", str(figures)]
    lines: list[str] = []

    def run_program(*more: str) -> int:
        lines.clear()
        return report.run_program(
            measure, bars, gigabytes=0, argv=[*arguments, *more], out=lambda line: lines.append(str(line))
        )

    assert run_program() == 1
    table = "\n".join(lines)
    assert "| fast | ours | – | – | ≥ 3x | **no** |" in table
    assert "| fast@1 | ours | – | – | ≥ 3x | yes |" in table
    assert "| free | ours | – | – | – | – |" in table
    assert "cpprb is left out: gone" in table
    assert "Below their bars: fast, small." in table
    written = json.loads(figures.read_text())
    assert written["whole"]
    assert [row["name"] for row in written["results"] if not row["ok"]] == ["fast", "small"]
    assert run_program("--smoke") == 0  # without bars
    assert not [*(tmp_path / "stores").iterdir()]


def test_sides_alternate() -> None:
    calls: list[str] = []
    cases = [timing.Case(lambda _, side=side: calls.append(side), iter(range(9)), 2) for side in "ab"]  # type: ignore[misc]
    series = timing.alternate(cases, rounds=3, warm=1)
    assert "".join(calls) == "ab" + "aabb" + "bbaa" + "aabb"
    assert [one.calls for one in series] == [6, 6]


def test_profiles_count_what_is_below_the_loop() -> None:
    loop = "main (x/benchmarks/profiles.py:9);repeat_calls (x/benchmarks/profiles.py:5)"
    draw = f"{loop};draw (x/expstore/a.py:3)"
    raw = f"{draw};read (x/expstore/b.py:8) 3\n{draw} 1\nidle (y) 9\n"
    own, whole, total = shares(raw)
    assert total == 4
    assert own == {"expstore/b.py: read": 3, "expstore/a.py: draw": 1}
    assert whole == {"expstore/a.py: draw": 4, "expstore/b.py: read": 3}


# -- documents ----------------------------------------------------------------------------------------

#: A ratio, a time or a rate of something that was measured.
FIGURE = re.compile(r"\d[\d.,]*M?\s?(?:x\b|times as fast|times faster|µs|us\b|ms\b|%(?!')|rows/s|GB/s|fps)")
#: Figures outside of the blocks: promises of the design, and sizes, that no benchmark measures.
DECLARED = {
    "README.md": set(),
    "docs/durability.md": {"4 ms"},  # what an fsync takes, depending on the disk
    "docs/benchmarks.md": {"84 x"},  # the shape of an image
    "docs/images.md": set(),
    "docs/server.md": set(),
}
#: A figure without a program says when it was measured.
ONCE = re.compile(r"<!-- measured once, on \d{4}-\d\d-\d\d -->.*?<!-- end of measured once -->", re.DOTALL)


def test_documents_contain_the_figures_of_the_stored_results() -> None:
    for path in tables.find_documents():
        assert tables.embed(path.read_text(), STORED) == path.read_text(), f"{path}: make bench-embed"
    assert tables.whole_table(STORED) == (RESULTS / "table.md").read_text()


@pytest.mark.parametrize("document", sorted(DECLARED))
def test_documents_contain_only_declared_figures(document: str) -> None:
    text = ONCE.sub("", tables.BLOCK.sub("", (ROOT / document).read_text()))
    figures = {match[0] for match in FIGURE.finditer(text)}
    assert figures == DECLARED[document], "measure it in `make bench`, or say here what it is"


def test_blocks_have_the_figures_of_a_run(run: dict[str, Any]) -> None:
    text = "".join(
        f"a\n<!-- benchmarks: {name} -->\nold\n<!-- end of benchmarks: {name} -->\nb\n"
        for name in tables.BLOCKS
    )
    changed = tables.embed(text, run)
    assert "old" not in changed
    assert changed.count("a\n<!-- benchmarks") == len(tables.BLOCKS)
    assert tables.embed(changed, run) == changed
    sides = find(run, "locomotion/sample")["data"]
    sides["expstore"] |= {"median": 1e-4, "p10": 5e-5, "p90": 2e-4}
    sides["torchrl"] |= {"median": 3.5e-4, "p10": 1.75e-4, "p90": 7e-4}
    changed = tables.embed(changed, run)
    assert "| sample 256 rows | 100 µs [50 µs–200 µs] | 350 µs [175 µs–700 µs] | 3.5x |" in changed
    assert "| sample 256 rows | 100 µs | 350 µs | 3.5x |" in changed
    run["parts"][0]["load"] = "load 9.5 before, 2.0 after"
    assert "The machine was not idle before vs_torchrl" in " ".join(tables.embed(text, run).split())
    run["results"] = []
    assert "| sample 256 rows | not measured | | | |" in tables.embed(text, run)


def test_a_block_that_no_document_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tables.BLOCKS, "new", tables.summary)
    with pytest.raises(ValueError, match="need .*'new'"):
        tables.find_documents()


# -- a new run and the stored one ---------------------------------------------------------------------


def test_ratios_that_are_no_longer_met_are_named(run: dict[str, Any]) -> None:
    assert [*runs.find_worse(run, STORED, 0.3)] == []
    row = find(run, "locomotion/add-full")
    row["data"]["torchrl"]["median"] *= 0.75
    assert [*runs.find_worse(run, STORED, 0.3)] == []
    row["data"]["torchrl"]["median"] *= 0.75
    find(run, "cli/info")["ok"] = False
    run["results"].remove(find(run, "limit"))
    names = {line.split(" ")[0].rstrip(":") for line in runs.find_worse(run, STORED, 0.3)}
    assert names == {"vs_torchrl:locomotion/add-full", "vs_torchrl:cli/info", "remote:limit"}
