"""Tests that run in several processes are reported as in one, also when a process dies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.slow  # each runs pytest

#: The third test ends its process while a child of it has the pipe of reports open.
DYING = """
import os, time
import pytest

@pytest.fixture(scope="module")
def here():
    yield os.getpid()

def test_first(here):
    assert here == os.getpid()

def test_second(tmp_path, record_property):
    record_property("cases", 3)
    assert tmp_path.is_dir()

def test_third():
    if not os.fork():
        time.sleep(2)
        os._exit(0)
    os._exit(3)

def test_fourth(here):
    assert here == os.getpid()

def test_fifth():
    print("words")
    assert 1 == 2

@pytest.mark.timeout(1)
def test_sixth():
    time.sleep(60)
"""
OTHER = """
import os
import pytest

@pytest.mark.parametrize("number", range(40))
def test_it(number):
    pass

@pytest.mark.skip(reason="it is")
def test_skipped():
    pass
"""


def run(folder: Path, *arguments: str) -> tuple[int, str, dict[str, str]]:
    """Run the tests of a folder in two processes; return exit code, output, and the outcomes."""
    report = folder / "report.xml"
    command = [
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:schemathesis",
        "-p",
        "tests.support.jobs",
        "--jobs",
        "2",
        f"--junitxml={report}",
    ]
    done = subprocess.run(
        [sys.executable, *command, f"--rootdir={folder}", *arguments, str(folder)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    outcomes = {
        f"{case.get('classname')}.{case.get('name')}": case[-1].tag if len(case) else "passed"
        for case in ElementTree.parse(report).iter("testcase")
    }
    return done.returncode, done.stdout, outcomes


def test_a_process_that_dies_fails_its_test_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "test_dying.py").write_text(DYING)
    (tmp_path / "test_other.py").write_text(OTHER)
    code, text, outcomes = run(tmp_path)
    dying = {name.partition(".")[2]: how for name, how in outcomes.items() if "dying" in name}
    assert dying == {
        "test_first": "passed",
        "test_second": "properties",
        "test_third": "failure",
        "test_fourth": "passed",
        "test_fifth": "failure",
        "test_sixth": "failure",
    }
    assert "the process that ran this test ended with code 3" in text
    assert "Timeout (>1.0s)" in text
    assert text.count("\nwords\n") == 1
    assert code == pytest.ExitCode.TESTS_FAILED
    assert len(outcomes) == 6 + 41
    assert [*outcomes.values()].count("skipped") == 1
