"""Cut the power under a writer: what was flushed must be there, as it was at one moment since.

Run through killing.py. Pages, lengths and names that were never synced are lost by chance; the library's
own code runs, only the disk below it is simulated. It never looks into the journal.
"""

from __future__ import annotations

import itertools
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import ledger as facts
import numpy as np
from children import (
    Look,
    Report,
    Wrong,
    candidates,
    check_one,
    fit_constants,
    in_child,
    new_ledger,
    open_store,
    outcome,
    read_lines,
    saying,
    write_life,
)
from disks import PowerDisk, cut_power
from gaps import NoKeeper
from ledger import Ledger, Op, Spec

from expstore.storages import journaled, keeper

__all__ = ["POWER_SPECS", "power_cuts"]

POWER_SPECS = {
    spec.name: spec
    for spec in (
        Spec("small", 60, 20, frame=64, segment_bytes=4096, longest=20),
        Spec("wide", 60, 20, segment_bytes=4096, longest=30),
        Spec("deep", 20, 60, frame=64, segment_bytes=4096, longest=30, overlong=False),
        Spec("filed", 60, 20, frame=64, segment_bytes=4096, longest=20, redo_bytes=1),
        Spec("endless", None, 500, frame=64, segment_bytes=8192, shard_rows=4096, longest=700),
    )
}
#: extend, change, priority, sample, flush, empty, sql
WEIGHTS = (10, 3, 1, 1, 2, 0.3, 0)


def power_cuts(
    cuts: int,
    seed: int,
    folder: Path,
    *,
    names: Sequence[str] = (),
    background: bool = True,
    stop: bool = False,
) -> Report:
    """Cut the power at random acts of writers and of recoveries.

    Args:
        cuts: How many.
        seed: Of everything.
        folder: Where stores may be made.
        names: Which kinds of stores; none: all of them.
        background: Whether the thread that syncs runs.
        stop: Whether the first failure is enough.
    """
    if not background:
        journaled.Keeper = NoKeeper  # type: ignore[assignment,misc]
    # The background thread is to come between the calls of these short lives, too.
    keeper.SYNC_SECONDS, keeper.PRIORITY_SECONDS = 0.02, 0.005
    report, started = Report(), time.monotonic()
    chance = random.Random(seed)
    for number, name in enumerate(itertools.cycle(names or list(POWER_SPECS))):
        if report.kills >= cuts or (stop and report.failures):
            break
        path = folder / f"{name}-{number}"
        _lives(POWER_SPECS[name], path, chance, report, min(8, cuts - report.kills))
        shutil.rmtree(path, ignore_errors=True)
    report.seconds = round(time.monotonic() - started, 1)
    return report


def _lives(spec: Spec, path: Path, chance: random.Random, report: Report, lives: int) -> None:
    fit_constants(spec)
    state = new_ledger(spec)
    aside = path.with_name("aside")
    for life in range(lives):
        seed = chance.randrange(1 << 30)
        rng = np.random.default_rng(seed)
        after = state.copy()
        after.reopen()
        ops = facts.plan(after, rng, 25, weights=WEIGHTS)
        kill_first = chance.random() < 0.2  # then the cut comes while the next process recovers
        disk = PowerDisk(aside, chance.randrange(1, 400))
        try:
            index = chance.random() < 0.2
            pid, pipe = in_child(lambda out: write_life(path, state, ops, out, disk, index=index))  # noqa: B023
            lines = read_lines(pipe, lambda _: None, pid)
            states, where = _since_flush(lines, state, ops)
            if where == "closed":
                shutil.rmtree(aside)
            else:
                report.count(where)
                if not kill_first:
                    cut_power(aside, seed)
            if (kill_first and where != "closed") or chance.random() < 0.2:
                _open_and_stop(spec, path, aside, chance.randrange(1, 80))
                cut_power(aside, seed + 1)
            look = Look(path, states, facts.extends(state, rng, 2), sql=chance.random() < 0.1, leave="close")
            state = check_one(look)
        except Wrong as exc:
            report.failures.append(f"{spec.name}, life {life}, seed {seed}: {exc}")
            break
    shutil.rmtree(aside, ignore_errors=True)


def _open_and_stop(spec: Spec, path: Path, aside: Path, at: int) -> None:
    """Begin to recover; stop in the middle of it or just after."""

    def life(pipe: int) -> None:
        with saying(pipe).failures():
            disk = PowerDisk(aside, at)
            open_store(spec, path, disk, index=False)
            disk.end()

    pid, pipe = in_child(life)
    lines = read_lines(pipe, lambda _: None, pid)
    outcome(lines, new_ledger(spec), ())


def _since_flush(lines: Sequence[str], state: Ledger, ops: Sequence[Op]) -> tuple[list[Ledger], str]:
    """Return the states that a power cut may leave, the newest first, and what was under way."""
    last, op, where = outcome(lines, state, ops)
    states = candidates(last, op)
    done = states[0]
    opened = [number for number, line in enumerate(lines) if line.startswith("open")]
    acked = sum(line.startswith("ack") for line in lines)
    if opened:
        start, _, _ = outcome(lines[: opened[0] + 1], state, ops)
        then, floor = start.copy(), 0
        for count, op in enumerate(ops[:acked]):
            lasting = op.kind == "flush" or then.copy().retire_for(op)
            then.apply(op)
            floor = count + 1 if lasting else floor
        older = []
        for count, op in enumerate(ops[:acked]):
            if count >= floor:
                older.append(start.copy())
            start.apply(op)
        states += reversed(older)
    for then in states:
        # Priorities have no promise before a flush, and may be ahead of the rows.
        for i, held in then.priorities.items():
            then.priorities[i] = sorted({*held, *done.priorities.get(i, ())})
        then.max_priorities = sorted({*then.max_priorities, *done.max_priorities, *state.max_priorities})
    return states, where
