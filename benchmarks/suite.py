"""The parts of a run: scripts, their arguments, and their time limits.

Used by `__main__.py`. A part is one script in its own process. This module does not handle results.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Part:
    """Describe one part of a run.

    Args:
        name: Name in a run's file.
        script: A module of this folder.
        arguments: Arguments in addition to those that every script has.
        limit: Seconds after which the part is stopped; results up to then are kept.
        note: Sizes that are smaller than the script's defaults.
        smoke: Additional arguments in a smoke run. None leaves the part out, because it starts many
            processes or repeats another part.
    """

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    limit: int = 240
    note: str = ""
    smoke: tuple[str, ...] | None = ()


@dataclass(frozen=True)
class Outcome:
    """Describe how a part ended.

    Args:
        state: "done" (also below a bar), "cut" at its limit, or "failed".
        seconds: Duration.
        message: Last line of its log, if it failed.
        cpu: CPU seconds.
    """

    state: str
    seconds: float
    message: str = ""
    cpu: float = 0.0


_THREADS = ("--threads", "2,1")
PARTS = (
    Part("core", "vs_torchrl", _THREADS, 720, smoke=("--only", "locomotion")),
    Part("peers-locomotion", "peers", (*_THREADS, "--only", "locomotion"), 300),
    Part("peers-atari", "peers", (*_THREADS, "--only", "atari"), 360),
    Part("peers-mixed", "peers", (*_THREADS, "--only", "mixed"), 240, smoke=None),
    Part("peers-wide", "peers", (*_THREADS, "--only", "wide"), 420),
    Part("prioritized", "samplers", _THREADS, 480),
    Part("slices", "slices", _THREADS, 300),
    Part("filters", "filters", _THREADS, 300),
    Part("trajectories", "trajectories", _THREADS, 420),
    Part("growth", "growth", (), 600),
    Part("snapshots", "snapshots", (), 240),
    Part("remote", "remote", (), 240, smoke=None),
    Part("durability", "durability", (), 240),
    Part("tokens", "tokens", (), 240),
    Part("topk", "topk", (), 300),
    Part("steps", "steps", (), 180),
    Part("recording", "recording", (), 240),
    Part("offered", "offered", (), 420),
    Part("many-writers", "many_writers", (), 420, smoke=None),
    Part("larger-than-memory", "larger_than_memory", (), 420, smoke=None),
    Part("followers", "followers", ("--seconds", "12"), 120, "12 seconds a phase, not 30", smoke=None),
    Part(
        "images",
        "images",
        ("--only", "frame-8/,Breakout/frame-1/,extend-64/,offered"),
        900,
        "lane by lane only Breakout, no stacks of frames, of writes only those of 64 rows",
        smoke=("--only", "Breakout/frame-8/,Breakout/extend-64,offered/tmpfs"),
    ),
    Part(
        "datasets",
        "datasets",
        ("--rows", "250000"),
        900,
        "250,000 rows of each game, not a million",
        smoke=("--rows", "600", "--only", "Pong"),
    ),
)


def start_part(part: Part, arguments: Sequence[str], log: Path, figures: Path) -> Outcome:
    """Run a part to its end or its time limit; all its processes have ended afterwards."""
    command = [sys.executable, str(ROOT / "benchmarks" / f"{part.script}.py"), *arguments]
    started = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code: int | None = process.wait(part.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process.pid)
            process.wait()
    return _outcome(code, time.monotonic() - started, log, figures)


def fork_part(part: Part, arguments: Sequence[str], log: Path, figures: Path) -> Outcome:
    """Run a part in a fork of this process, which has imported everything; this saves seconds per part."""
    started = time.monotonic()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _run_forked(part, arguments, log)
    code: int | None = None
    while time.monotonic() - started < part.limit:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            code = os.waitstatus_to_exitcode(status)
            _end(child)
            break
        time.sleep(0.02)
    else:
        _end(child)
        os.waitpid(child, 0)
    return _outcome(code, time.monotonic() - started, log, figures)


def _run_forked(part: Part, arguments: Sequence[str], log: Path) -> None:
    """Run a part in the child process: redirect output to the log, and exit."""
    code = 70
    try:
        os.setsid()
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(out, number)
        code = importlib.import_module(f"benchmarks.{part.script}").main(list(arguments))
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else 70
        print(exc.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end(leader: int) -> None:
    """Kill the remaining processes of a session that was started here."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(leader, signal.SIGKILL)


def _outcome(code: int | None, seconds: float, log: Path, figures: Path) -> Outcome:
    if code is None:
        return Outcome("cut", seconds, "it exceeded its time limit")
    if figures.exists() and json.loads(figures.read_text())["whole"]:
        return Outcome("done", seconds)
    words = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return Outcome("failed", seconds, f"exit code {code}: {words[-1] if words else 'no output'}"[:300])
