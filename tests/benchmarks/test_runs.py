"""Output of a run: generated blocks of documents, missed bars, comparison with an earlier run, failures.

The figures in the documents are compared here with the stored results.
"""

from __future__ import annotations

import copy
import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import runs, suite, tables
from benchmarks.profiles import shares
from tests.support.paths import ROOT

entry = importlib.import_module("benchmarks.__main__")
RESULTS = ROOT / "benchmarks" / "results" / "run.json"

#: A ratio, a time or a rate of something that was measured.
FIGURE = re.compile(r"\d[\d.,]*M?\s?(?:x\b|times as fast|times faster|µs|us\b|ms\b|%(?!')|rows/s|GB/s|fps)")
#: Figures outside of the blocks: promises of the design, and sizes, that no benchmark measures.
DECLARED = {
    "docs/durability.md": {"4 ms"},  # what an fsync takes, depending on the disk
    "docs/benchmarks.md": {"84 x", "2 x"},  # the shape of an image, and two fields
}


def series(median: float) -> dict[str, Any]:
    return {"calls": 1, "median": median, "p10": median / 2, "p90": median * 2, "mean": median, "max": median}


def result(part: str, name: str, ours: float, theirs: float, **more: Any) -> dict[str, Any]:
    data = {"expstore": series(ours), "torchrl": series(theirs)}
    row = {
        "part": part,
        "name": name,
        "value": theirs / ours,
        "ours": "",
        "theirs": "",
        "ratio": "",
        "note": "",
    }
    return row | {"data": data, "bar": "", "ok": True} | more


@pytest.fixture
def told() -> dict[str, Any]:
    rows = [result(part, name, 1e-4, 3.5e-4) for _, part, name in tables.HEADLINES]
    ended = {
        "name": "core",
        "state": "done",
        "seconds": 60.0,
        "message": "",
        "load": "",
        "note": "",
        "cpu": 1.0,
    }
    about = {"machine": "2 x a processor", "versions": "Python 3", "threads": "2"}
    return {
        "format": runs.FORMAT,
        "date": "2026-01-02T00:00:00+00:00",
        "commit": "abc",
        "effort": "full",
        "about": about,
        "parts": [ended],
        "skipped": {},
        "missed": [],
        "seconds": 60.0,
        "results": rows,
    }


# -- documents ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", tables.DOCUMENTS)
def test_documents_contain_the_figures_of_the_stored_results(document: str) -> None:
    if not RESULTS.exists():
        pytest.skip("no run has been put into the documents")
    text = (ROOT / document).read_text()
    assert tables.embed(document, text, runs.load(RESULTS)) == text, "make bench-embed"


@pytest.mark.parametrize("document", sorted({*tables.DOCUMENTS, *DECLARED}))
def test_documents_contain_only_declared_figures(document: str) -> None:
    text = (ROOT / document).read_text()
    for name in tables.DOCUMENTS.get(document, ()):
        text = re.sub(
            f"<!-- benchmarks: {name} -->.*?<!-- end of benchmarks: {name} -->", "", text, flags=re.S
        )
    found = {match[0] for match in FIGURE.finditer(text)}
    assert found == DECLARED.get(document, set()), "measure it in `make bench`, or say here what it is"


def test_blocks_say_what_a_run_says(told: dict[str, Any]) -> None:
    page, names = "docs/benchmarks.md", tables.DOCUMENTS["docs/benchmarks.md"]
    before = "".join(f"a\n<!-- benchmarks: {n} -->\nold\n<!-- end of benchmarks: {n} -->\nb\n" for n in names)
    text = tables.embed(page, before, told)
    assert "old" not in text
    assert text.count("a\n<!-- benchmarks") == len(names)
    assert "| sample 256 rows | 100 µs [50 µs–200 µs] | 350 µs [175 µs–700 µs] | 3.5x | – |" in text
    assert tables.embed(page, text, told) == text
    told["results"][0]["data"]["torchrl"]["median"] = 9e-4
    assert "| 9.0x | – |" in tables.embed(page, text, told)
    del told["results"][0]
    assert "| sample 256 rows | not measured | | | |" in tables.embed(page, text, told)


def test_a_busy_machine_is_reported(told: dict[str, Any]) -> None:
    def text() -> str:
        return " ".join("\n".join(tables.table(tables.Told(told))).split())

    assert "not idle" not in text()
    told["parts"][0]["load"] = "load 9.5 before, 2.0 after"
    assert "The machine was not idle before core" in text()


def test_all_buffers_share_one_table(told: dict[str, Any]) -> None:
    ours = {"expstore": series(1e-3), "side": "expstore-flat"}
    sides = {"expstore-default": 4e-3, "torchrl-list": 6e-3, "torchrl-memmap": 2e-3}
    told["results"] = [
        result("peers-wide", f"wide/sample/{side}", 1, 1, data=ours | {side: series(median)})
        for side, median in sides.items()
    ]
    lines = [*tables.peers(tables.Told(told))]
    assert "| expstore (disk; images packed) | – | – | – | – | 4,000 µs |  | 1.50x |" in lines
    assert '| expstore (disk, `layout="flat"`) | – | – | – | – | 1,000 µs |  | 6.00x |' in lines
    assert "| TorchRL `LazyMemmapStorage` (disk) | – | – | – | – | 2,000 µs | 3.44x | 3.00x |" in lines
    assert len(lines) == 2 + 4


def test_readme_has_six_rows(told: dict[str, Any]) -> None:
    lines = [*tables.summary(tables.Told(told))]
    assert len(lines) == 2 + 6
    assert lines[2] == "| sample 256 rows | 100 µs | 350 µs | 3.5x |"


def test_a_document_without_its_markers_is_refused(told: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"README\.md has 0 blocks between the markers of summary"):
        tables.embed("README.md", "nothing", told)


def test_missed_bars_come_first_in_the_table(told: dict[str, Any]) -> None:
    told["results"][1] |= {"bar": "≥ 8x", "ok": False}
    told["skipped"] = {"cpprb": "not installed"}
    text = tables.whole_table(told)
    assert "| prioritized: prioritized/sample+update | 3.5 | ≥ 8x |" in text.split("## Left out")[0]
    assert "- cpprb: not installed" in text


# -- a new run beside an old one ----------------------------------------------------------------------


def test_ratios_that_are_no_longer_met_are_named(told: dict[str, Any]) -> None:
    new = copy.deepcopy(told)
    assert [*runs.broken(new, told, 0.3)] == []
    new["results"][0]["data"]["torchrl"]["median"] = 3.5e-4 * 0.75
    assert [*runs.broken(new, told, 0.3)] == []
    new["results"][0]["data"]["torchrl"]["median"] = 3.5e-4 * 0.6
    new["results"][1]["ok"] = False
    del new["results"][2]
    names = [line.split(" ")[0].rstrip(":") for line in runs.broken(new, told, 0.3)]
    assert names == [f"{part}:{name}" for _, part, name in tables.HEADLINES[:3]]


# -- parts --------------------------------------------------------------------------------------------

SCRIPTS = {
    "good": """
import json, sys
file = sys.argv[sys.argv.index("--json") + 1]
row = dict(name="a", value=1.0, ours="", theirs="", ratio="", note="", data={}, bar="", ok=False)
told = {"whole": True, "about": {}, "skipped": {}, "results": [row]}
open(file, "w").write(json.dumps(told))
sys.exit(1)
""",
    "bad": "raise RuntimeError('no disk')",
    "slow": """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
""",
}


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[suite.Part]:
    (tmp_path / "benchmarks").mkdir()
    for name, text in SCRIPTS.items():
        (tmp_path / "benchmarks" / f"{name}.py").write_text(text)
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    some = [suite.Part(name, name, limit=2 if name == "slow" else 60) for name in SCRIPTS]
    monkeypatch.setattr(entry, "PARTS", tuple(some))
    return some


@pytest.mark.slow
def test_failed_parts_stop_no_others_and_a_cut_run_continues(
    scripts: list[suite.Part],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(entry, "IDLE_SECONDS", 0)
    out = tmp_path / "out"
    assert entry.main(["--only", "bad,slow,good", "--out", str(out)]) == 2
    said = capsys.readouterr().out
    assert "incomplete: bad: failed exit code 1: RuntimeError: no disk" in said
    assert "incomplete: slow: cut it exceeded its time limit" in said
    assert "missed: good: a: 1.0" in said
    (folder,) = out.iterdir()
    told = runs.load(folder / "run.json")
    states = {part["name"]: part["state"] for part in told["parts"]}
    assert states == {"good": "done", "bad": "failed", "slow": "cut"}
    assert told["missed"] == ["good:a"]
    assert not [*folder.glob("stores-*")]

    (folder / "run.json").unlink()  # as if it had been cut off
    (tmp_path / "benchmarks" / "bad.py").write_text(SCRIPTS["good"].replace("ok=False", "ok=True"))
    assert entry.main(["--only", "bad,good", "--resume", "--out", str(out)]) == 1
    assert "good: done before" in capsys.readouterr().out
    assert {part["state"] for part in runs.load(folder / "run.json")["parts"]} == {"done"}
    with pytest.raises(SystemExit, match="no interrupted run"):
        entry.main(["--resume", "--out", str(out)])


def test_a_part_waits_for_an_idle_machine_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    loads = [5.0, 3.0, 1.0]
    pauses: list[float] = []
    monkeypatch.setattr(entry.os, "getloadavg", lambda: (loads.pop(0), 0.0, 0.0))
    monkeypatch.setattr(entry.time, "sleep", pauses.append)
    entry._wait_until_idle()
    assert len(pauses) == 2
    monkeypatch.setattr(entry.os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    monkeypatch.setattr(entry, "IDLE_SECONDS", 0)
    entry._wait_until_idle()
    assert len(pauses) == 2


def test_figures_of_a_smoke_run_are_not_put_into_readme(told: dict[str, Any], tmp_path: Path) -> None:
    run = runs.Run(tmp_path)
    run.write(told | {"effort": "smoke"})
    assert json.loads(run.file.read_text())["results"] == told["results"]
    with pytest.raises(SystemExit, match="meaningless"):
        entry.main(["embed", "--run", str(tmp_path)])


def test_profiles_count_what_is_below_the_loop() -> None:
    loop = "main (x/benchmarks/profiles.py:9);repeat_calls (x/benchmarks/profiles.py:5)"
    draw = f"{loop};draw (x/expstore/a.py:3)"
    raw = f"{draw};read (x/expstore/b.py:8) 3\n{draw} 1\nidle (y) 9\n"
    own, whole, total = shares(raw)
    assert total == 4
    assert own == {"expstore/b.py: read": 3, "expstore/a.py: draw": 1}
    assert whole["expstore/a.py: draw"] == 4
