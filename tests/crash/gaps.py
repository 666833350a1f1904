"""Kill a writer before its 1st, 2nd, 3rd ... act on the file system, until none is left to be killed at.

Run through killing.py. Without the background thread the acts come in the same order every time, so that
every gap between two of them is met. It never decides what must be there: the ledger does.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from children import (
    KillingDisk,
    Report,
    Wrong,
    candidates,
    check,
    fit_constants,
    in_child,
    new_ledger,
    open_store,
    outcome,
    perform,
    read_lines,
    saying,
)
from ledger import Ledger, Op, Spec

from expstore.storages import journaled

__all__ = ["PHASES", "Phase", "enumerate_gaps"]

LEAN = Spec("lean", 24, 8, lean=True, segment_bytes=4096)
NARROW = Spec("narrow", 24, 8, frame=64, lean=True, segment_bytes=4096)
FILED = Spec("filed", 24, 8, frame=64, lean=True, segment_bytes=4096, redo_bytes=1)
GROWING = Spec("growing", None, None, frame=64, lean=True, shard_rows=4096)


@dataclass(frozen=True)
class Phase:
    """A store in some state, and what is done to it while it may be killed."""

    name: str
    spec: Spec
    before: Sequence[Op] = ()
    ops: Sequence[Op] = ()
    part: str = "ops"  # which part is killed: "open", "ops" or "close"
    closed: bool = False  # whether what came before was closed
    must: str = "write"  # an act without which the phase is not what it says
    index: bool = False


def _extend(count: int, source: str | None = None, lanes: int = 1) -> Op:
    return Op("extend", count=count, source=source, lanes=lanes)


def _change(first: int, last: int, version: int, step: int = 1) -> Op:
    return Op("change", ids=np.arange(first, last + 1, step, dtype=np.int64), version=version)


def _priority(first: int, last: int, value: float) -> Op:
    ids = np.arange(first, last + 1, dtype=np.int64)
    return Op("priority", ids=ids, priorities=np.full(ids.size, value, np.float32))


FLUSH, EMPTY = Op("flush"), Op("empty")
FEW = [_extend(20, "a")]

PHASES = (
    Phase("new store", LEAN, part="open", must="rename expstore.json"),
    Phase("first extend", LEAN, ops=[_extend(5, "a")], must="rename columns"),
    Phase("extend", LEAN, FEW, [_extend(6, "a"), _extend(8), _priority(12, 20, 2.0), FLUSH]),
    Phase("change", LEAN, [_extend(30)], [_change(8, 30, 1, 2), _change(9, 11, 2), _extend(3), _change(12, 12, 3)]),
    Phase("long extend", LEAN, [_extend(24, "a")], [_extend(13, "a"), _extend(41, "a", 1), _extend(3)]),
    Phase("empty", LEAN, FEW, [EMPTY, _extend(4, "a"), _extend(3, lanes=3)]),
    Phase("journal cut", NARROW, [_extend(1)] * 11, [*[_extend(1, "a")] * 4, FLUSH, _extend(2)], must="unlink 00000"),
    Phase("few rows", NARROW, FEW, [_extend(1), _extend(2), FLUSH, _extend(8, "a"), _extend(3, lanes=3), FLUSH]),
    Phase("change in a file", FILED, [_extend(20)], [_change(2, 20, 1), _change(3, 9, 2), _extend(2), _change(5, 5, 3)], must="unlink"),
    Phase("close", LEAN, FEW, [_extend(2), _change(3, 7, 1)], part="close"),
    Phase("open what was closed", LEAN, [*FEW, _extend(3)], part="open", closed=True, must="unlink 000001"),
    Phase("open what was killed", LEAN, [*FEW, _extend(3), _change(4, 9, 1), _extend(8, "a")], part="open", must="unlink 000001"),
    Phase("open few rows", NARROW, [*FEW, _extend(3), _extend(1, "a"), _extend(8)], part="open", must="unlink 000001"),
    Phase("new shard", GROWING, [_extend(4000), FLUSH], [_extend(90), _extend(200), FLUSH], must="write zarr.json"),
)  # fmt: skip


class _NoKeeper:
    """Stand in for the background thread."""

    def __init__(self, storage: object) -> None:
        pass

    def note(self) -> None: ...

    def hurry(self) -> None: ...

    def stop(self) -> None: ...


def _copy(source: Path, target: Path) -> None:
    """Copy a folder, holes as holes: shard files are mostly hole."""
    for folder, _, names in os.walk(source):
        here = target / Path(folder).relative_to(source)
        here.mkdir(parents=True)
        for name in names:
            with open(Path(folder) / name, "rb") as old, open(here / name, "wb") as new:
                size, at = os.fstat(old.fileno()).st_size, 0
                new.truncate(size)
                while at < size:
                    try:
                        at = os.lseek(old.fileno(), at, os.SEEK_DATA)
                    except OSError:
                        break
                    end = os.lseek(old.fileno(), at, os.SEEK_HOLE)
                    os.pwrite(new.fileno(), os.pread(old.fileno(), end - at, at), at)
                    at = end


def _live(
    phase: Phase, path: Path, state: Ledger, ops: Sequence[Op], disk: KillingDisk, pipe: int, at: int
) -> None:
    """Live one life in which act number `at` of the phase's part is the last."""
    say = saying(pipe)
    state = state.copy()
    with say.failures():
        if phase.part == "open":
            disk.arm(at)
        rb = open_store(phase.spec, path, disk, index=phase.index)
        say(f"open {rb.storage.max_priority!r}")
        state.reopen()
        if phase.part == "ops":
            disk.arm(at)
        for number, op in enumerate(ops):
            say(f"about {number}")
            perform(rb, state, op)
            state.apply(op)
            say(f"ack {number}")
        if phase.part == "close":
            disk.arm(at)
            say("closing")
            (rb if phase.index else rb.storage).close()
        say("done " + json.dumps(disk.trace))


def _prepare(phase: Phase, path: Path) -> Ledger:
    """Bring a new store into the state in which the phase begins."""
    state = new_ledger(phase.spec)
    if not phase.before:
        return state
    life = Phase(phase.name, phase.spec, part="close" if phase.closed else "ops")
    pid, pipe = in_child(
        lambda out: _live(life, path, state, phase.before, KillingDisk(in_turn=True), out, 0)
    )
    lines = read_lines(pipe, lambda _: None, pid)
    ended, _, _ = outcome(lines, state, phase.before)
    if not lines[-1].startswith("done"):
        raise Wrong(f"{phase.name} could not be prepared: {lines[-1]}")
    return ended


def _open_and_die(phase: Phase, path: Path, at: int) -> None:
    """Begin to recover, and be killed in the middle of it."""
    life = Phase(phase.name, phase.spec, part="open")
    state = new_ledger(phase.spec)
    pid, pipe = in_child(lambda out: _live(life, path, state, (), KillingDisk(in_turn=True), out, at))
    read_lines(pipe, lambda _: None, pid)


def enumerate_gaps(folder: Path, *, names: Sequence[str], seed: int, torn: str, again: float) -> Report:
    """Enumerate the gaps of phases.

    Args:
        folder: Where stores may be made.
        names: Which phases; none: all of them.
        seed: Of where writes are torn and recoveries killed.
        torn: "no" kills before each act; "also" once more in the middle of each write; "half" takes turns.
        again: Share of the gaps after which the recovery, too, is killed somewhere.
    """
    journaled.Keeper = _NoKeeper  # type: ignore[assignment,misc]
    report, started = Report(), time.monotonic()
    chance = random.Random(seed)
    for phase in PHASES:
        if not names or phase.name in names:
            _enumerate(phase, folder, report, chance, torn, again)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def _enumerate(
    phase: Phase, folder: Path, report: Report, chance: random.Random, torn: str, again: float
) -> None:
    fit_constants(phase.spec)
    model, path = folder / "model", folder / "store"
    state = _prepare(phase, model)
    trace: list[str] | None = None
    for at in itertools.count(1):
        cuts = (
            [None, chance.random()]
            if torn == "also"
            else [chance.random() if torn == "half" and at % 2 else None]
        )
        for cut in cuts:
            if model.exists():
                _copy(model, path)
            try:
                trace = _kill(phase, path, state, report, chance, at, cut, again)
            except Wrong as exc:
                report.failures.append(f"{phase.name}, act {at}, cut {cut}: {exc}")
            shutil.rmtree(path, ignore_errors=True)
            if trace is not None:
                break
        if trace is not None or len(report.failures) > 20:
            break
    shutil.rmtree(model, ignore_errors=True)
    trace = trace or []
    if not any(act.startswith(phase.must) for act in trace):
        report.failures.append(f"{phase.name} never came to {phase.must}: {Counter(trace)}")
    report.gaps[phase.name] = len(trace)


def _kill(
    phase: Phase,
    path: Path,
    state: Ledger,
    report: Report,
    chance: random.Random,
    at: int,
    cut: float | None,
    again: float,
) -> list[str] | None:
    """Kill at one act and check; return all acts if there is no such act any more."""
    disk = KillingDisk(torn=cut, in_turn=True)
    pid, pipe = in_child(lambda out: _live(phase, path, state, phase.ops, disk, out, at))
    lines = read_lines(pipe, lambda _: None, pid)
    ended, op, where = outcome(lines, state, phase.ops)
    if lines and lines[-1].startswith("done"):
        trace: list[str] = json.loads(lines[-1][5:])
        return trace
    report.count(where)
    if chance.random() < again:
        _open_and_die(phase, path, chance.randrange(1, 50))
    check(path, candidates(ended, op), [_extend(3, "a"), _extend(2)], index=phase.index)
    return None
