"""What commands print to a terminal: tables that fit, and colours and progress bars only there."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import expstore
from tests.support.paths import ROOT

#: Escape sequences that set a colour.
COLOR = re.compile(r"\x1b\[(?:\d+;)*(?:[34][0-9]|9[0-7]|10[0-7])(?:;\d+)*m")
ESCAPE = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a plain terminal: nothing asks for colours or a width, except `more`."""
    unset = ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "CI", "GITHUB_ACTIONS", "TTY_COMPATIBLE")
    known = {name: value for name, value in os.environ.items() if name not in unset}
    return known | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color"} | more


def on_terminal(*arguments: object, columns: int = 80, **more: str) -> str:
    """Run a command on a terminal of its own; return what it prints there, also to standard error."""
    screen, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    command = [sys.executable, "-m", "expstore", *map(str, arguments)]
    process = subprocess.Popen(command, env=environment(**more), stdin=end, stdout=end, stderr=end)
    os.close(end)
    found = b""
    try:
        while part := os.read(screen, 65536):
            found += part
    except OSError:  # EIO: the last process has closed the terminal
        pass
    finally:
        os.close(screen)
        assert process.wait(60) == 0, found
    return found.decode().replace("\r\n", "\n")


def in_pipe(*arguments: object, **more: str) -> tuple[str, str]:
    """Run a command whose output is read by a program; return its standard output and error."""
    command = [sys.executable, "-m", "expstore", *map(str, arguments)]
    done = subprocess.run(command, env=environment(**more), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("columns", [30, 80])
def test_tables_are_cut_to_the_width_of_the_terminal(columns: int, store: Path) -> None:
    query = "SELECT repeat('x', 50) AS a, repeat('y', 20) AS b, repeat('z', 20) AS c"
    lines = ESCAPE.sub("", on_terminal("sql", store, query, columns=columns)).splitlines()
    table = [line for line in lines if not line.startswith("too narrow")]
    assert max(map(len, table)) <= columns
    assert any("xxx" in line for line in table)
    missing = {30: "b, c", 80: "c"}[columns]
    assert f"too narrow for {missing}; name the columns you want" in lines


@pytest.mark.slow
def test_the_width_of_a_pipe_is_unlimited(store: Path) -> None:
    query = "SELECT repeat('x', 50) AS a, repeat('y', 50) AS b, repeat('z', 50) AS c"
    out, err = in_pipe("sql", store, query)
    assert out.splitlines()[1].split() == ["x" * 50, "y" * 50, "z" * 50]
    assert err == ""


@pytest.mark.slow
def test_no_color_is_respected(store: Path) -> None:
    assert not ESCAPE.search(on_terminal("sql", "--help")), "help is plain text"
    assert COLOR.search(on_terminal("verify", store)), "the progress bar has colours"
    assert not COLOR.search(on_terminal("verify", store, NO_COLOR="1"))


@pytest.mark.slow
def test_only_terminals_get_a_progress_bar(store: Path) -> None:
    assert "checking" in on_terminal("verify", store)
    for more in ({}, {"FORCE_COLOR": "1"}):
        out, err = in_pipe("verify", store, **more)
        assert "checking" not in out + err
        assert not ESCAPE.search(out + err)


@pytest.mark.torture
def test_collecting_shows_progress(tmp_path: Path) -> None:
    output = on_terminal("collect", "CartPole-v1", tmp_path / "a.exp", "--steps", 64)
    assert "collecting" in output.split("\n", 1)[1]


@pytest.mark.slow
def test_filling_shows_progress(store: Path) -> None:
    assert "filling" in on_terminal("add-column", store, "weight", "--fill", "1.0")
    with expstore.open(store, mode="r") as rb:
        assert set(rb[:]["weight"].tolist()) == {1.0}
