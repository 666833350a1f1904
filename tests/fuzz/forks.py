"""Run small cases in forked processes: a case that crashes, hangs or takes memory ends only its process."""

from __future__ import annotations

import os
import resource
import signal
import struct
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from expstore.errors import ExpStoreError

CPU_SECONDS = 2.0
MEMORY_BYTES = 200 << 20
_HEAD = struct.Struct("<IBI")


@dataclass
class Report:
    """What cases did.

    Args:
        read: Number of cases that were read.
        refused: Number of cases that raised an error of expstore, by class.
        faults: What breaks the law: number of the case, and what it did.
    """

    read: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[int, str]] = field(default_factory=list)


def run_cases(
    numbers: Sequence[int], act: Callable[[int], None], warm: Callable[[], object], *, inside: Sequence[Path]
) -> Report:
    """Run `act(number)` for each case in a forked process, and return what happened.

    A case may raise errors of expstore. It must not raise others, use over 2 s of CPU time or 200 MB of
    memory, end the process, or open a file outside of the folders in `inside` and of Python's own. Each
    process calls `warm` first, which imports libraries.
    """
    report, left = Report(), list(numbers)
    while left:
        done = _run_in_child(left, act, warm, inside, report)
        left = left[done:]
    return report


def _run_in_child(
    left: Sequence[int],
    act: Callable[[int], None],
    warm: Callable[[], object],
    inside: Sequence[Path],
    report: Report,
) -> int:
    """Run cases until one ends the process; return how many were run."""
    here, there = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(here)
        code = 1
        try:
            _child(left, act, warm, inside, there)
            code = 0
        finally:
            os._exit(code)
    os.close(there)
    done = 0
    with os.fdopen(here, "rb") as pipe:
        while head := pipe.read(_HEAD.size):
            _, kind, size = _HEAD.unpack(head)
            text = pipe.read(size).decode()
            if kind == 0:
                report.read += 1
            elif kind == 1:
                report.refused[text] += 1
            else:
                report.faults.append((left[done], text))
            done += 1
    _, status = os.waitpid(pid, 0)
    if done < len(left) and status != 0:
        signalled = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status}"
        what = "over 2 s of CPU time" if signalled == "SIGPROF" else f"the process ended by {signalled}"
        report.faults.append((left[done], what))
        done += 1
    return done


def _child(
    left: Sequence[int],
    act: Callable[[int], None],
    warm: Callable[[], object],
    inside: Sequence[Path],
    pipe: int,
) -> None:
    opened: list[str] = []
    allowed = tuple(
        str(path)
        for path in (
            *inside, sys.prefix, sys.base_prefix, Path(__file__).parents[2],
            *("/usr", "/proc", "/sys", "/dev/null", "/dev/urandom", "/etc", "/lib"),
        )
    )  # fmt: skip

    def listen(event: str, args: tuple[object, ...]) -> None:
        if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith(allowed):
                opened.append(path)

    sys.addaudithook(listen)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warm()
    peak = 0
    for number in left:
        opened.clear()
        _reset_peak()
        before = _memory("VmRSS")
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        kind, text = 0, ""
        try:
            act(number)
        except ExpStoreError as exc:
            kind, text = 1, type(exc).__name__
        except BaseException as exc:
            where = traceback.extract_tb(exc.__traceback__)
            places = [
                f"{Path(one.filename).name}:{one.lineno}" for one in where if "expstore" in one.filename
            ]
            kind, text = 2, f"{type(exc).__name__}: {str(exc)[:120]} at {' '.join(places[-3:])}"
        signal.setitimer(signal.ITIMER_PROF, 0)
        peak = _memory("VmHWM") - before
        if opened:
            kind, text = 2, f"opened {opened[0]}"
        elif peak > MEMORY_BYTES:
            kind, text = 2, f"{peak >> 20} MB of memory"
        data = text.encode(errors="replace")
        os.write(pipe, _HEAD.pack(number, kind, len(data)) + data)


def _reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def _memory(name: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name + ":"):
                return int(line.split()[1]) << 10
    return 0
