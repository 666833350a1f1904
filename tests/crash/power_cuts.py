"""Cut the power under a writer: the store must have a state that is not older than its last sync.

Run through harness.py. A life of a store is recorded once, operation by operation (recording_disk.py). For
many points of it, some of the disks that a power cut may leave are built (disk_states.py), and a fresh
process opens each and compares it with the ledger. Some of these openings are recorded in turn, and cut
again. The library's own code runs on real files; only the effect of syncs is simulated. This module never
reads the journal.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import expstore
from expstore.core import tuning
from expstore.errors import StorageError
from expstore.storages.columns import column_set_writer
from expstore.storages.engine import store
from tests.crash import ledger as facts
from tests.crash.checks import Wrong, check_info, check_rows, check_versions
from tests.crash.children import (
    Look,
    Report,
    ask_child,
    candidates,
    fit_constants,
    look_at,
    matching,
    new_ledger,
    open_store,
    perform,
    place_of,
    snapshots,
)
from tests.crash.disk_states import Platter, Tree, write_tree
from tests.crash.killing_disks import machine
from tests.crash.ledger import Ledger, Op, Spec
from tests.crash.recording_disk import Event, RecordingDisk
from tests.support.stores import NoKeeper

POWER_SPECS = {
    spec.name: spec
    for spec in (
        Spec("lean", 24, 8, frame=64, segment_bytes=4096, longest=12, lean=True),
        Spec("deep", 20, 60, frame=64, segment_bytes=4096, longest=30, overlong=False, lean=True),
        Spec("filed", 60, 20, frame=64, segment_bytes=4096, longest=20, redo_bytes=1, lean=True),
        Spec("wide", 60, 20, frame=3000, segment_bytes=4096, longest=30),
        Spec("small", 60, 20, frame=64, segment_bytes=4096, longest=20),
        Spec("synced", 60, 20, frame=64, segment_bytes=4096, longest=20, durability="sync"),
        Spec("dumped", 60, 20, frame=64, segment_bytes=4096, longest=20, lean=True, dumped=True),
        Spec("counted", 60, 20, frame=64, segment_bytes=4096, longest=20, lean=True, dumped=True, consume=2),
        Spec("best", 24, 8, frame=64, segment_bytes=4096, longest=20, overlong=False, lean=True, best=True),
        Spec("packed", 24, 12, frame=64, segment_bytes=4096, longest=30, packed=True),
        Spec("frames", None, 60, frame=64, segment_bytes=8192, longest=60, lean=True, packed=True),
        Spec("kept", 60, 20, frame=64, segment_bytes=4096, longest=30, lean=True, dumped=True, packed=True),
        Spec("durable", 40, 16, frame=64, segment_bytes=4096, longest=24, durability="sync", packed=True),
        Spec("ragged", 24, 12, frame=64, segment_bytes=4096, longest=30, lean=True, ragged=True),
        Spec("texts", None, 60, frame=64, segment_bytes=8192, longest=60, ragged=True, compression="lz4"),
        Spec("told", 40, 16, frame=64, segment_bytes=4096, longest=24, durability="sync", ragged=True),
        Spec(
            "tales",
            60,
            20,
            frame=64,
            segment_bytes=4096,
            longest=30,
            dumped=True,
            ragged=True,
            lean=True,
            compression="lz4",
        ),
        Spec("keyed", 24, 12, frame=64, segment_bytes=4096, longest=14, lean=True, keyed=True),
        Spec("keyed kept", 60, 20, frame=64, segment_bytes=4096, longest=20, dumped=True, keyed=True),
        Spec("late", 24, 12, frame=64, segment_bytes=4096, longest=12, lean=True, late=True),
        Spec(
            "late kept", 24, 12, frame=64, segment_bytes=4096, longest=12, lean=True, dumped=True, late=True
        ),
        Spec("late wide", None, 60, frame=3000, segment_bytes=4096, longest=30, late=True),
        Spec(
            "late best",
            24,
            8,
            frame=64,
            segment_bytes=4096,
            lean=True,
            longest=20,
            overlong=False,
            best=True,
            late=True,
        ),
        Spec("endless", None, 120, frame=64, segment_bytes=8192, shard_rows=4096, longest=160, lean=True),
    )
}
#: Operations in a life, with their frequencies: see ledger.KINDS.
WEIGHTS = {
    "extend": 10,
    "change": 2,
    "priority": 1,
    "sample": 1,
    "annotate": 1.5,
    "flush": 1,
    "empty": 0.2,
    "tick": 1,
}
ROUND_STATES = 40
#: One in this many openings is cut too.
CUT_AGAIN = 5
#: Number of disks that one process checks.
TOGETHER = 15
#: Share of the disks that a follower reads first.
FOLLOWED = 0.2
#: One in this many rounds has an index.
INDEXED = 5


@dataclass
class Job:
    """A life to be recorded: a disk, the possible states of its store, and the operations."""

    spec: Spec
    states: list[Ledger]
    ops: Sequence[Op]
    tree: Tree = field(default_factory=dict)
    need: list[int] = field(default_factory=list)  # snapshots that exist
    known: dict[int, Ledger] = field(default_factory=dict)  # contents of all snapshots that may exist
    current: int = 0  # the oldest snapshot that may be the newest
    boot: int = 0
    index: bool = False
    free: bool = False  # whether the background thread runs freely
    busy: float = 0.0  # otherwise: how often it runs before a write
    close: bool = False

    @property
    def again(self) -> bool:
        """Whether the life begins after a power cut."""
        return self.boot > 0


@dataclass
class Taken:
    """A recording: the operations, and the state of the store at opening."""

    base: Path
    events: list[Event]
    found: Ledger | None
    failure: str = ""


@dataclass
class State:
    """A disk after a power cut, and the expected content."""

    label: str
    tree: Tree
    states: list[Ledger]
    newest: Ledger  # includes everything that had returned
    need: list[int]  # snapshots that must exist
    known: dict[int, Ledger]  # contents of all snapshots that may exist
    current: int  # the oldest snapshot that may be the newest
    opening: bool  # the power was cut during a reopening
    clean: bool  # the store had been closed


# -- recording -------------------------------------------------------------------------------------------


def _record(job: Job, base: Path) -> Taken:
    machine.boot = job.boot
    write_tree(job.tree, base)
    if not job.free:
        store.Keeper = NoKeeper  # type: ignore[assignment,misc]
    disk = RecordingDisk(base / "run.exp", serial=not job.free)
    taken = Taken(base, disk.events, None)
    try:
        _live(job, disk, taken)
    except Exception:
        taken.failure = traceback.format_exc()
    with disk.lock:
        taken.events = list(disk.events)
    return taken


def _live(job: Job, disk: RecordingDisk, taken: Taken) -> None:
    rb = open_store(job.spec, taken.base / "run.exp", disk, index=job.index)
    kept = rb.storage
    state = matching(rb, job.states, cut=True)
    state.versions = check_versions(place_of(kept.path), job.need, job.known, current=job.current)
    state.largest = (kept.priorities.largest,)
    taken.found = state.copy()
    done = 0
    checkpoint = kept.checkpoints._checkpoint

    def noted(store: Any) -> Any:
        floor = done
        keep = checkpoint(store)
        disk.say(f"floor {floor}")
        return keep

    kept.checkpoints._checkpoint = noted  # type: ignore[method-assign]
    if job.busy:
        disk.meanwhile = _make_sync(kept, job.busy)
    disk.say("open")
    for op in job.ops:
        disk.say("about")
        perform(rb, state, op)
        state.apply(op)
        done += 1
        disk.say("ack")
    if job.close:
        disk.say("closing")
        (rb if job.index else kept).close()
        disk.say("closed")
    elif job.free:
        with disk.lock:
            taken.events = list(disk.events)
        kept.background.stop()


def _make_sync(kept: Any, share: float) -> Callable[[], None]:
    """Return a function that lets the background thread sync before some writes of the calling thread."""
    chance = random.Random(share)

    def sync_sometimes() -> None:
        if chance.random() < share and threading.current_thread() is threading.main_thread():
            # No other thread runs: a held lock belongs to this thread, and the background thread would wait
            # for it.
            held = kept.priorities.lock._is_owned() or any(
                lock.locked() for lock in (kept.checkpoints.lock, kept.locks.episodes)
            )
            if not held and not kept.locks.sampled._is_owned():
                thread = threading.Thread(target=kept.sync)
                thread.start()
                thread.join()

    return sync_sometimes


# -- states ----------------------------------------------------------------------------------------------


def cuts(job: Job, taken: Taken, chance: random.Random, count: int, label: str) -> Iterator[State]:
    """Build disks that a power cut may leave, at random points of a recording."""
    events = taken.events
    opened = next((n for n, event in enumerate(events) if event.data == "open"), len(events))
    whole = range(1, len(events) + 1)
    # Half of the points of a life that begins with a recovery are in the recovery.
    early = range(1, opened + 1) if job.again else whole
    points = sorted(chance.choice(early if n % 2 else whole) for n in range(count))
    history = _History(job, taken)
    platter = Platter(taken.base, job.tree)
    at = 0
    for number, point in enumerate(points):
        for event in events[at:point]:
            platter.replay(event)
            if event.act == "say":
                history.hear(event.data)
        at = point
        yield State(
            f"{label}, act {point} of {len(events)}, state {number}",
            platter.choose(chance),
            history.states(),
            history.newest.copy(),
            *history.versions(),
            history.current,
            opening=job.again and not history.opened,
            clean=history.where == "closed",
        )


class _History:
    """Follow a life by the child's messages: what had returned, and what had reached the disk."""

    def __init__(self, job: Job, taken: Taken) -> None:
        self._job = job
        self.opened = False
        self.where = "open"
        self.newest = job.states[0]
        self._ledgers = [] if taken.found is None else [taken.found]
        for op in job.ops if self._ledgers else ():
            then = self._ledgers[-1].copy()
            then.apply(op)
            self._ledgers.append(then)
        self._acked = self._floor = 0
        self.current = job.current

    def hear(self, word: str) -> None:
        """Process a message of the child."""
        self.where = word
        if word == "open":
            self.opened, self.newest = True, self._ledgers[0]
        elif word == "ack":
            op, before = self._job.ops[self._acked], self._ledgers[self._acked]
            self._acked += 1
            self.newest = self._ledgers[self._acked]
            lasting = op.kind in (
                "flush",
                "change",
                "empty",
                "loads",
                "add",
                "drop",
            ) or before.copy().retire_for(op)
            if op.kind == "dumps":
                self.current = max(self.newest.versions)
            if lasting or (op.kind in ("extend", "annotate") and self._job.spec.durability == "sync"):
                self._floor = self._acked
        elif word.startswith("floor "):
            self._floor = max(self._floor, int(word[6:]))
        elif word == "closed":
            self._floor = self._acked

    def states(self) -> list[Ledger]:
        """Return the states that a power cut may leave, the newest first."""
        if not self.opened:
            return [state.copy() for state in self._job.states]
        states = candidates(self.newest.copy(), self._op)
        for number in range(self._acked - 1, self._floor - 1, -1):
            before = self._ledgers[number]
            half = before.half_best(self._job.ops[number]) or before.half_add(self._job.ops[number])
            states += [before.copy()] if half is None else [half, before.copy()]
        # Priorities and counts have no promise before a flush, and may be ahead of the rows.
        for name in ("priorities", "sampled"):
            ahead: dict[int, set[float]] = {}
            for then in states:
                for i, held in getattr(then, name).items():
                    ahead.setdefault(i, set()).update(held)
                setattr(then, name, {i: tuple(sorted(ahead[i])) for i in getattr(then, name)})
        largest: set[float] = set()
        for then in states:
            largest.update(then.largest)
            then.largest = tuple(sorted(largest))
        return states

    def versions(self) -> tuple[list[int], dict[int, Ledger]]:
        """Return the snapshots that must exist, and all that may exist."""
        if not self.opened:
            return self._job.need, self._job.known
        return snapshots(self.newest, self._op)

    @property
    def _op(self) -> Op | None:
        """The call under way."""
        return self._job.ops[self._acked] if self.where == "about" or self._in_call else None

    @property
    def _in_call(self) -> bool:
        return self.where.startswith("floor") and self._acked < len(self._job.ops)


# -- the check -------------------------------------------------------------------------------------------


def _check(states: Sequence[State], folder: Path, *, boot: int, seed: int, sql: float) -> list[Ledger | str]:
    """Open stores, check them, write, close, reopen; a share of them is checked in SQL."""
    machine.boot = boot
    store.Keeper = NoKeeper  # type: ignore[assignment,misc]
    found = []
    for number, state in enumerate(states):
        base = folder / str(number)
        write_tree(state.tree, base)
        rng = np.random.default_rng(seed + number)
        look = Look(
            base / "run.exp",
            state.states,
            facts.extends(state.newest, rng, 2),
            sql=bool(rng.random() < sql),
            leave="close",
            clean=state.clean,
            cut=True,
            need=state.need,
            known=state.known,
            current=state.current,
        )
        # A follower must read what the next writer finds, without changing files.
        seen = _follow(look) if rng.random() < FOLLOWED else None
        result = look_at(look)
        if isinstance(result, Ledger):
            result.write_count = result.found
            if seen not in (None, result.write_count):
                result = f"a follower had found {seen}, the writer {result.write_count} rows written"
        found.append(result)
        shutil.rmtree(base)
    return found


def _follow(look: Look) -> int | str | None:
    """Read a store that no writer has opened since; return its number of written rows, or what is wrong."""
    if not (look.path / "expstore.json").exists():
        return None
    reasons = []
    try:
        with expstore.open(look.path, mode="r") as rb:
            for state in look.states:
                try:
                    check_rows(rb, state.copy())
                    check_info(rb, state)
                except Wrong as exc:
                    reasons.append(str(exc))
                else:
                    return state.write_count
    except StorageError as exc:
        # Only the next writer can finish a load.
        half = exc.kind == "half_loaded" and (look.path / "swap").exists()
        return None if half else traceback.format_exc()
    except Exception:
        return traceback.format_exc()
    return " | ".join(reasons)


# -- rounds ----------------------------------------------------------------------------------------------


def power_cuts(
    states: int,
    seed: int,
    folder: Path,
    *,
    names: Sequence[str] = (),
    first: int = 0,
    free: float = 0.0,
    log: Path | None = None,
    stop: bool = False,
) -> Report:
    """Check disks after power cuts.

    Args:
        states: Minimum number of disks.
        seed: Seed of everything but the timing of the background thread.
        folder: Folder for stores.
        names: Kinds of stores; empty for all.
        first: Number of the first round.
        free: Share of the rounds in which the background thread runs freely.
        log: File with one line per round; a run continues after the last round in it.
        stop: Whether to stop at the first failure.
    """
    report = Report()
    lines = log.read_text().splitlines() if log is not None and log.exists() else []
    for line in lines:
        report.add(json.loads(line))
    kinds = names or list(POWER_SPECS)
    for number in itertools.count(first + len(lines)):
        if report.kills >= states or (stop and report.failures):
            break
        part, begun = Report(), time.monotonic()
        fills = random.Random(f"holes {seed}/{number}").random() < 0.5  # independent of the file system
        with patch.object(column_set_writer, "fills_holes", lambda *_, fills=fills: fills):
            _round(POWER_SPECS[kinds[number % len(kinds)]], number, seed, folder, part, free, stop)
        part.seconds = round(time.monotonic() - begun, 1)
        report.add(vars(part))
        if log is not None:
            with log.open("a") as out:
                out.write(json.dumps(vars(part)) + "\n")
    return report


def _round(spec: Spec, number: int, seed: int, folder: Path, report: Report, free: float, stop: bool) -> None:
    """Record a life and cut it; unless one level is enough, record what follows some cuts, and cut that."""
    fit_constants(spec)
    # The background thread must run between the calls of these short lives too.
    tuning.CHECKPOINT_SECONDS, tuning.PRIORITY_SECONDS = 0.02, 0.005
    chance = random.Random(f"{seed}/{number}")
    rng = np.random.default_rng([seed, number])
    label = f"{spec.name}, seed {seed}, round {number}"
    index = number % INDEXED == INDEXED - 1
    loose = chance.random() < free
    new = new_ledger(spec)
    after = new.copy()
    after.reopen()
    weights = WEIGHTS | ({"sql": 1} if index else {}) | ({"dumps": 3, "loads": 3} if spec.dumped else {})
    weights |= {"sample": 6} if spec.consume else {}
    weights |= {"add": 3} if spec.late else {}
    job = Job(
        spec,
        [new],
        facts.plan(after, rng, 25, weights=weights),
        index=index,
        free=loose and not index,
        busy=0.0 if loose else chance.choice([0.0, 0.01, 0.05]),
        close=chance.random() < 0.5,
    )
    run = _Run(folder / f"round-{number}", report, label, chance, rng, stop)
    run.folder.mkdir(parents=True)
    cut = run.life([job], [ROUND_STATES // 2])
    later = [
        Job(
            spec,
            state.states,
            [*facts.extends(state.newest, rng, 2), *([Op("dumps")] if spec.dumped else [])],
            tree=state.tree,
            need=state.need,
            known=state.known,
            current=state.current,
            boot=1,
            index=index,
            close=chance.random() < 0.3,
        )
        for state in chance.sample(cut, min(CUT_AGAIN, len(cut)))
    ]
    if not run.ended:
        run.life(later, [ROUND_STATES // 2 // CUT_AGAIN] * len(later))
    shutil.rmtree(run.folder)


@dataclass
class _Run:
    folder: Path
    report: Report
    label: str
    chance: random.Random
    rng: np.random.Generator
    stop: bool
    lives: int = 0

    @property
    def ended(self) -> bool:
        """Whether to stop after the first failure."""
        return self.stop and bool(self.report.failures)

    def life(self, jobs: list[Job], counts: list[int]) -> list[State]:
        """Record lives, cut each several times, and check; return the correct disks."""
        self.lives += 1
        taken = (
            self._ask(lambda at: [_record(job, at / str(n)) for n, job in enumerate(jobs)]) if jobs else []
        )
        states: list[State] = []
        for n, (job, life, count) in enumerate(zip(jobs, taken, counts, strict=True)):
            if life.failure:
                self.report.failures.append(f"{self.label}: the writer failed: {life.failure}")
                continue
            label = f"{self.label}, life {self.lives}.{n}"
            states += cuts(job, life, self.chance, count, label)
        sql = 0.3 if any(job.index for job in jobs) else 0.01
        boot = jobs[0].boot + 1 if jobs else 0
        good: list[State] = []
        for start in range(0, len(states), TOGETHER):
            if self.ended:
                break
            some = states[start : start + TOGETHER]
            check = partial(_check, boot=boot, seed=self.chance.randrange(1 << 30), sql=sql)
            good += [s for s, f in zip(some, self._all(check, some), strict=True) if self._judge(s, f)]
        return good

    def _all(self, check: Callable[..., list[Ledger | str]], states: list[State]) -> list[Ledger | str]:
        """Check states in one process; if it dies, each in its own."""
        try:
            return self._ask(partial(check, states))
        except Wrong as exc:
            return [str(exc)] if len(states) == 1 else [self._all(check, [state])[0] for state in states]

    def _judge(self, state: State, found: Ledger | str) -> bool:
        self.report.count("recovery" if state.opening else "life")
        if isinstance(found, str):
            self.report.failures.append(f"{state.label}: {found}")
            return False
        self.report.lost += found.write_count < state.newest.write_count
        return True

    def _ask(self, work: Callable[[Path], list[Any]]) -> list[Any]:
        """Run work in a fresh process, with its own folder."""
        at = self.folder / "child"
        at.mkdir()
        try:
            found: list[Any] = ask_child(lambda: work(at))
            return found
        finally:
            shutil.rmtree(at)
