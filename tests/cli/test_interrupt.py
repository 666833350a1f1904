"""Ctrl-C at any time of a command, also before it has begun and after its end.

Run with the other tests. Commands run in processes of their own where the whole process is tested.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expstore.cli import app
from expstore.cli.interrupt import stoppable
from tests.support.commands import Cli

#: Raises the signal when the command line imports typer.
WHILE_IMPORTING = """
import signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder())
"""

#: Raises the signal when Python ends.
AT_EXIT = """
import atexit, signal

atexit.register(signal.raise_signal, signal.SIGINT)
"""

RUN = """
import sys
from expstore.__main__ import main

sys.argv = ["expstore", "--version"]
main()
"""


def run(before: str) -> tuple[int, str, str]:
    """Run `expstore --version` after some code; return exit code, output and errors."""
    done = subprocess.run([sys.executable, "-c", before + RUN], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_ctrl_c_while_the_command_line_is_imported_ends_without_a_traceback() -> None:
    assert run(WHILE_IMPORTING) == (-signal.SIGINT, "", "")  # 130 in a shell


def test_ctrl_c_at_the_exit_of_python_ends_without_a_traceback() -> None:
    code, out, errors = run(AT_EXIT)
    assert (code, errors) == (-signal.SIGINT, "")
    assert out.strip()


def test_ctrl_c_is_ignored_where_the_shell_ignores_it() -> None:
    ignored = "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    code, out, errors = run(ignored + WHILE_IMPORTING + AT_EXIT)
    assert (code, errors) == (0, "")
    assert out.strip()


def test_work_goes_on_where_ctrl_c_is_ignored() -> None:
    told = []
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with stoppable(lambda done, total: told.append(done)) as progress:
            for done in (1, 2):
                signal.raise_signal(signal.SIGINT)
                progress(done, 2)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)
    assert told == [1, 2]


@pytest.mark.parametrize("error", [ImportError("Encountered an error"), ValueError("bad")])
def test_an_error_that_a_library_makes_of_ctrl_c_is_an_interruption(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    assert cli("merge", tmp_path / "a", tmp_path / "b").code == 2  # the command line works here

    def fail(*arguments: Any) -> Callable[..., Any]:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise error from None
        raise AssertionError("the signal was not seen")

    former = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(app, "stores_in", fail)
    monkeypatch.setattr(app, "facts_of", fail)
    done = cli("info", tmp_path)
    assert (done.code, done.out, done.err) == (130, "", "error: interrupted\n")
    assert signal.getsignal(signal.SIGINT) is former
