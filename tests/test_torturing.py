"""The driver of the long run: what was cut short goes on, what fails is shown, counts are right.

Units are small programs here; one is the harness itself.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torture_suites
import torturing
from torture_reports import kind_of
from torture_suites import Suite, Unit

TESTS = Path(__file__).parent
FINE = {"task": "random", "kills": 60, "lost": 0, "inside": {"extend": 30}, "failures": [], "gaps": {}}
#: Notes that it ran, waits for somebody who opens the pipe, if there is one, and says what it found.
UNIT = """
import os, sys
with open(sys.argv[1], "a") as out:
    out.write(sys.argv[2] + "\\n")
if os.path.exists(sys.argv[1] + ".fifo"):
    open(sys.argv[1] + ".fifo").close()
print(sys.argv[3])
"""
DRIVER = """
import argparse, json, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torturing
from torture_suites import Suite, Unit
ran, fine, code = {ran!r}, {fine!r}, {code!r}
units = [Unit("kills/%d" % n, ["-c", code, ran, str(n), fine], n, "harness") for n in range(3)]
given = argparse.Namespace(
    seed=None, scale=None, suites=None, folder=Path({folder!r}), jobs=1, new=False, again=None, list=False
)
sys.exit(torturing.main(given, [Suite("kills", units[:2]), Suite("gaps", units[2:])]))
"""


def asked(folder: Path, **more: Any) -> argparse.Namespace:
    """What the command line says."""
    usual = {"seed": 5, "scale": None, "suites": None, "jobs": 2, "new": False, "again": None, "list": False}
    return argparse.Namespace(folder=folder, **{**usual, **more})


def printing(name: str, text: str, *, code: int = 0) -> Unit:
    """Return a unit of the harness that prints this and ends with this code."""
    return Unit(name, ["-c", f"import sys\nprint({text!r})\nsys.exit({code})"], 7, "harness")


def summary_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_cut_short_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    """The unit that was under way is run again, those before it are not; a line cut in half is no line."""
    ran, folder, pipe = tmp_path / "ran", tmp_path / "noted", tmp_path / "ran.fifo"
    settings = {"tests": str(TESTS), "ran": str(ran), "fine": json.dumps(FINE), "code": UNIT}
    command = [sys.executable, "-c", DRIVER.format(folder=str(folder), **settings)]
    os.mkfifo(pipe)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        open(pipe, "w").close()  # the first unit goes on
        for line in driver.stdout:
            if line.startswith("[1/3]"):
                break
        driver.send_signal(how)
        driver.wait()
    held = os.open(pipe, os.O_RDWR)  # what was begun, and nobody ended, waits no longer
    assert driver.returncode == (torturing.INTERRUPTED if how == signal.SIGTERM else -how)
    pipe.unlink()
    first = torturing.read_lines(folder / "run.jsonl")[1]
    with (folder / "run.jsonl").open("a") as out:
        out.write('{"unit": "kills/1", "cas')
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "going on: 1 of 3 units are done" in ended.stdout
    begun = ran.read_text().split()
    name = first["unit"].partition("/")[2]
    assert begun.count(name) == 1
    assert set(begun) == {"0", "1", "2"}
    found = summary_in(folder)
    assert [row["cases"] for row in found["rows"]] == [120, 60]
    assert (found["cases"], found["bound"], found["failures"]) == (180, 3 / 180, [])
    # It is over: the next one is another run.
    assert "going on" not in subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert len(ran.read_text().split()) >= len(begun) + 3
    os.close(held)


def test_what_fails_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Failures by what they mean, a process that dies, tests that fail; with how to run each once more."""
    lost = "best, seed 5, store 22, life 3: window (0, 3], expected (0, 4] | write_count 3, expected 4"
    test = tmp_path / "test_some.py"
    test.write_text(
        "def test_fine(record_property):\n    record_property('cases', 40)\n"
        "def test_wrong():\n    assert 1 == 2, 'a sentence'\n"
    )
    units = [
        printing("kills/0", json.dumps({**FINE, "failures": [lost]})),
        printing("kills/1", json.dumps(FINE), code=3),
        printing("kills/2", ""),
        Unit(
            "lives/0",
            ["-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "-W", "error", str(test)],
            7,
        ),
        printing("teeth/0", json.dumps({**FINE, "task": "journal first"})),
    ]
    suites = [Suite("kills", units[:3]), Suite("lives", units[3:4]), Suite("teeth", units[4:])]
    assert torturing.main(asked(tmp_path / "noted"), suites) == 1
    found = summary_in(tmp_path / "noted")
    assert [row["cases"] for row in found["rows"]] == [120, 41, 1]
    assert [row["wrong"] for row in found["rows"]] == [
        {"lost": 1, "torn": 0, "unopenable": 0, "other": 2},
        {"lost": 0, "torn": 0, "unopenable": 0, "other": 1},
        {"lost": 0, "torn": 0, "unopenable": 0, "other": 1},
    ]
    assert found["bound"] is None
    texts = {unit: text for unit, _, text in found["failures"]}
    assert texts["kills/0"] == lost
    assert "ended with 3" in texts["kills/1"]
    assert "has tried nothing" in texts["kills/2"]
    assert "a sentence" in texts["lives/0"]
    assert "journal first" in texts["teeth/0"]
    written = (tmp_path / "noted" / "summary.md").read_text()
    assert "| 120 | 1 | 0 | 0 | 2 |  |" in written
    assert 'torturing.py --again "kills/0"' in written
    assert written in capsys.readouterr().out
    assert torturing.main(asked(tmp_path / "noted", again="kills/0"), suites) == 1
    assert torturing.main(asked(tmp_path / "noted", again="teeth/0"), suites) == 1
    assert "SEED=7 python -c" in capsys.readouterr().out


def test_other_sources_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found with other code says nothing of this; nor does another seed."""
    suites = [Suite("gaps", [printing("gaps/0", json.dumps(FINE))])]
    assert torturing.main(asked(tmp_path), suites) == 0
    (lines := torturing.read_lines(tmp_path / "run.jsonl")).pop()
    (tmp_path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert torturing.settle(asked(tmp_path, seed=None), ["gaps"]).seed == 5
    assert torturing.settle(asked(tmp_path, seed=6), ["gaps"]).seed == 6
    assert torturing.settle(asked(tmp_path, seed=None, new=True), ["gaps"]).seed != 5
    monkeypatch.setattr(torturing, "fingerprint", lambda: "others")
    assert torturing.settle(asked(tmp_path, seed=None), ["gaps"]).sources == "others"


def test_cases_that_prove_nothing_fail(tmp_path: Path) -> None:
    """Power cuts that cost no row, kills that meet no extend."""
    cuts = {**FINE, "task": "power", "lost": 5, "inside": {"recovery": 30, "life": 30}}
    kills = {**FINE, "inside": {"between": 60}}
    suites = [
        Suite("cuts", [printing("cuts/0", json.dumps(cuts))]),
        Suite("kills", [printing("kills/0", json.dumps(kills))]),
    ]
    assert torturing.main(asked(tmp_path), suites) == 1
    assert [unit for unit, _, _ in summary_in(tmp_path)["failures"]] == ["cuts", "kills"]


def test_the_harness_itself(tmp_path: Path) -> None:
    unit = Unit(
        "kills/0", [torture_suites.HARNESS, "random", "--kills", "1", "--names", "tiny"], 1, "harness"
    )
    torturing.main(asked(tmp_path), [Suite("kills", [unit])])
    (row,) = summary_in(tmp_path)["rows"]
    assert (row["cases"], set(row["wrong"].values())) == (1, {0})


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("ring, seed 1, store 3, life 2: len 3, expected 4", "lost"),
        ("lean, seed 1, round 3, life 1.0, act 5 of 80, state 7: frame differs in 2 rows: ids [3 4]", "torn"),
        ("extend, seed 1, act 3, cut None: window (0, 3], expected (0, 4] | frame differs in 2 rows", "torn"),
        ("dumps, seed 1, act 3, cut None: version 2: write_count 3, expected 4", "lost"),
        ("ring, seed 1, store 3, life 2: draw 3, expected 4 to 4", "other"),
        (
            "ring, seed 1, store 3, life 2: Traceback (most recent call last):\n"
            '  File "children.py", line 7, in open_store\nexpstore.errors.CorruptionError: a file is gone',
            "unopenable",
        ),
        (
            "ring, seed 1, store 3, life 2: the writer failed: Traceback (most recent call last):\n"
            '  File "children.py", line 7, in open_store\nexpstore.errors.StorageError: no',
            "other",
        ),
        ("the process died", "other"),
    ],
)
def test_failures_are_told_apart(text: str, kind: str) -> None:
    assert kind_of(text) == kind


def test_groups_name_tests_that_are_there() -> None:
    for name in torture_suites.GROUPS:
        module, function = name.split("::")
        (path,) = TESTS.rglob(f"{module}.py")
        defined = [
            node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
        ]
        assert function in defined, name


def test_suites_that_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """More is tried where another seed means other cases; tests that nobody has grouped are run, too."""
    named = json.dumps({"phases": [f"phase {n}" for n in range(9)], "power": ["lean"]})
    collected = "\n".join(
        [
            "tests/crash/test_faults.py::test_every_act[ring-EIO]",
            "tests/crash/test_faults.py::test_every_act[ring-full]",
            *[f"tests/test_damage.py::test_many_files_that_are_cut_or_gone[{n}]" for n in range(6)],
            "tests/test_new.py::test_a_long_form",
            "8 tests collected",
        ]
    )
    monkeypatch.setattr(torture_suites, "_ask", lambda command: named if "names" in command else collected)
    names = ["kills", "gaps", "cuts", "faults", "damage", "long", "sql", "rest", "examples", "teeth"]
    counts = {}
    for scale in (0.01, 1.0, 2.0):
        suites = torture_suites.all_suites(3, scale, names)
        counts[scale] = {suite.name: len(suite.units) for suite in suites}
        units = [unit.name for suite in suites for unit in suite.units]
        assert len(units) == len(set(units))
    usual = {"kills": 20, "gaps": 3, "cuts": 30, "faults": 1, "damage": 2, "long": 1, "teeth": 1}
    usual |= {"rest": 3, "examples": 3}  # one for each file
    assert counts[1.0] == usual
    assert counts[2.0] == {**usual, "kills": 40, "cuts": 60, "damage": 4, "examples": 6}
    assert counts[0.01] == dict.fromkeys(usual, 1)
    again = torture_suites.all_suites(3, 1.0, names)
    assert again == torture_suites.all_suites(3, 1.0, names)
    assert again != torture_suites.all_suites(4, 1.0, names)
    (cut,) = [unit for unit in again[2].units if unit.name == "cuts/3"]
    assert cut.command[cut.command.index("--first") + 1] == "30"
