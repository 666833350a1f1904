"""Kill a writer before its 1st, 2nd, 3rd ... file operation, until it finishes.

Run through harness.py. Without the background thread the operations have the same order every time, so that
every gap between two of them is tested. The ledger decides what must be in the store.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from expstore.storages.engine import store
from tests.crash.checks import Wrong
from tests.crash.children import (
    Look,
    Report,
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
    snapshots,
)
from tests.crash.killing_disks import KillingDisk
from tests.crash.ledger import Ledger, Op, Spec
from tests.support.stores import NoKeeper, copy_folder

LEAN = Spec("lean", 24, 8, frame=64, lean=True, segment_bytes=4096, tail=False)
NARROW = Spec("narrow", 24, 8, frame=64, lean=True, segment_bytes=1536)
FILED = Spec("filed", 24, 8, frame=64, lean=True, segment_bytes=4096, redo_bytes=1)
BARE = Spec("bare", 24, 0, frame=64, lean=True, tail=False)
#: Number of stores that one process checks.
TOGETHER = 8
STORE = "run.exp"
BEST = Spec("best", 24, 8, frame=64, lean=True, segment_bytes=4096, best=True)
BEST_FILED = Spec("best filed", 24, 8, frame=64, lean=True, segment_bytes=4096, best=True, redo_bytes=1)
COUNTED = Spec("counted", 24, 8, frame=64, lean=True, segment_bytes=4096, consume=2)
GROWING = Spec("growing", None, None, frame=64, lean=True, shard_rows=4096)
#: Chunks of 4 rows, shards of 16; 32 slots are two shards.
PACKED = Spec("packed", 24, 8, frame=64, lean=True, segment_bytes=4096, tail=False, packed=True)
PACKED_NARROW = Spec("packed narrow", 24, 8, frame=64, lean=True, segment_bytes=1536, packed=True)
RAGGED = Spec("ragged", 24, 8, frame=64, lean=True, segment_bytes=4096, tail=False, ragged=True)
KEYED = Spec("keyed", 24, 8, frame=64, lean=True, segment_bytes=1536, keyed=True)
PACKED_GROWING = Spec("packed growing", None, 24, frame=64, lean=True, shard_rows=4096, packed=True)


@dataclass(frozen=True)
class Phase:
    """A store in some state, and the operations during which it may be killed."""

    name: str
    spec: Spec
    before: Sequence[Op] = ()
    ops: Sequence[Op] = ()
    part: str = "ops"  # part that is killed: "open", "ops" or "close"
    closed: bool = False  # whether the store was closed before
    must: str = "write"  # an operation that must occur in the phase
    index: bool = False
    tooth: bool = False  # exists to show a fault


def _extend(count: int, source: str | None = None, lanes: int = 1, key: str | None = None) -> Op:
    return Op("extend", count=count, source=source, lanes=lanes, key=key)


def _keyed(first: int, *counts: int) -> list[Op]:
    """Return extends, each under its own key."""
    return [_extend(count, "a", key=str(first + n)) for n, count in enumerate(counts)]


def _note(episode: int, value: int) -> Op:
    return Op("annotate", episode=episode, info={"x": value})


def _end(source: str | None = None) -> Op:
    return Op("end", source=source)


def _resume(source: str) -> Op:
    return Op("resume", source=source)


def _change(first: int, last: int, version: int, step: int = 1) -> Op:
    return Op("change", ids=np.arange(first, last + 1, step, dtype=np.int64), version=version)


def _add(name: str, version: int, count: int = 0, *, fill: bool = False) -> Op:
    return Op("add", source=name, version=version, count=count, fill=fill)


def _drop(name: str) -> Op:
    return Op("drop", source=name)


def _priority(first: int, last: int, value: float) -> Op:
    ids = np.arange(first, last + 1, dtype=np.int64)
    return Op("priority", ids=ids, priorities=np.full(ids.size, value, np.float32))


FLUSH, EMPTY, DUMPS, LOADS, SAMPLE = (Op(kind) for kind in ("flush", "empty", "dumps", "loads", "sample"))
FEW = [_extend(20, "a")]

PHASES = (
    Phase("new store", LEAN, part="open", must="rename expstore.json"),
    Phase("first extend", LEAN, ops=[_extend(5, "a")], must="rename columns"),
    Phase("extend", LEAN, FEW, [_extend(6, "a"), _extend(8), _priority(12, 20, 2.0), FLUSH]),
    Phase("change", LEAN, [_extend(30)], [_change(8, 28, 1, 10), _extend(3), _change(12, 14, 2)]),
    Phase("long extend", LEAN, [_extend(24, "a")], [_extend(13, "a"), _extend(41, "a"), _extend(3)]),
    Phase("annotate", NARROW, [*FEW, _note(1, 1)], [_note(1, 2), _note(2, 3), FLUSH, _note(1, 4)]),
    Phase(
        "end episodes",
        NARROW,
        [*FEW, _extend(6, "b", lanes=2), _extend(3)],
        [_end("a"), _extend(3, "a"), FLUSH, _end("b"), _extend(2, "b"), _end(), _extend(1, "a")],
        index=True,
    ),
    Phase(
        "resume episodes",
        NARROW,
        [*FEW, _extend(6, "b", lanes=2), _extend(3)],
        [_resume("a"), _extend(3, "a"), FLUSH, _resume("b"), _end("a"), _extend(2, "b"), _extend(1, "a")],
        index=True,
    ),
    Phase("empty", LEAN, FEW, [EMPTY, _extend(4, "a"), _extend(3, lanes=3)]),
    Phase("journal cut", NARROW, FEW, [*[_extend(1, "a")] * 5, FLUSH, _extend(2)], must="unlink"),
    Phase("few rows", NARROW, FEW, [_extend(1), _extend(2), FLUSH, _extend(8, "a"), FLUSH]),
    Phase(
        "change in a file",
        FILED,
        [_extend(20)],
        [_change(2, 20, 1), _change(3, 9, 2), _extend(2), _change(5, 5, 3)],
        must="unlink",
    ),
    Phase("close", LEAN, FEW, [_extend(2), _change(3, 7, 1)], part="close"),
    Phase("open what was closed", LEAN, [*FEW, _extend(3)], part="open", closed=True, must="unlink 000001"),
    Phase("open what was killed", LEAN, [*FEW, _change(4, 9, 1), _extend(8, "a")], part="open"),
    Phase("open few rows", NARROW, [*FEW, _extend(3), _extend(1, "a"), _extend(8)], part="open"),
    Phase(
        "new shard",
        GROWING,
        [_extend(4000), FLUSH],
        [_extend(90), _extend(200), FLUSH],
        must="write zarr.json",
    ),
    Phase("commit to the index", NARROW, FEW, [*[_extend(1)] * 5, FLUSH], must="unlink", index=True),
    Phase("dumps", LEAN, [*FEW, DUMPS, _extend(9)], [*[DUMPS, _extend(4, "a")] * 3], must="link"),
    Phase("loads", LEAN, [*FEW, DUMPS, _extend(9)], [LOADS, _extend(4, "a")], must="rename swap"),
    Phase("first extend of a store that counts", COUNTED, ops=[_extend(5)], must="rename sampled"),
    Phase("count", COUNTED, [_extend(24), SAMPLE], [SAMPLE, FLUSH, _extend(3), SAMPLE]),
    Phase("slots of counted rows", COUNTED, [_extend(24), SAMPLE, _extend(8)], [_extend(2), _extend(2)]),
    Phase("best rows", BEST, FEW, [_extend(9), _priority(3, 9, 2.0), _extend(12, "a"), FLUSH]),
    Phase("best rows in a file", BEST_FILED, FEW, [_extend(30), _extend(12), FLUSH], must="unlink"),
    Phase("open best rows", BEST, [_extend(30), _priority(1, 9, 2.0), _extend(20)], part="open"),
    Phase("first packed rows", PACKED, ops=[_extend(5, "a")], must="write partial"),
    Phase(
        "fill a chunk", PACKED, FEW, [_extend(3), _extend(2), FLUSH, _extend(3, "a")], must="write open.1.0"
    ),
    Phase(
        "fill a shard",
        PACKED_GROWING,
        FEW,
        [_extend(9, "a"), _extend(5), FLUSH, _extend(6)],
        must="rename c.1.0",
    ),
    Phase(
        "turn of the ring",
        PACKED,
        [_extend(22), _extend(6, "a"), FLUSH],
        [_extend(7), FLUSH, _extend(8, "a"), _extend(3), FLUSH],
        must="create open.0.1",
    ),
    Phase("long packed extend", PACKED, [_extend(22)], [_extend(13), _extend(41, "a"), _extend(3)]),
    Phase("few packed rows", PACKED_NARROW, FEW, [_extend(1), _extend(2), FLUSH, _extend(8, "a")]),
    Phase("empty packed", PACKED, [_extend(22)], [EMPTY, _extend(4, "a"), EMPTY, _extend(3)]),
    Phase(
        "close packed",
        PACKED,
        [_extend(26), FLUSH],
        [_extend(7)],
        part="close",
        must="rename c.1.0",
    ),
    Phase("open packed", PACKED, [*FEW, FLUSH, _extend(5), _extend(2)], part="open", must="write partial"),
    Phase(
        "packed rows in a later turn",
        PACKED,
        [_extend(24), FLUSH, _extend(8), FLUSH, _extend(8, "a")],
        [_extend(7), _extend(8, "a"), FLUSH, _extend(8)],
    ),
    Phase(
        "open packed in its second turn",
        PACKED,
        [_extend(24), FLUSH, _extend(8), FLUSH, _extend(7, "a"), _extend(8)],
        part="open",
        must="write open.0.1",
    ),
    Phase("open few packed rows", PACKED_NARROW, [*FEW, _extend(3), _extend(1), _extend(8)], part="open"),
    Phase("open packed that was closed", PACKED, [*FEW, _extend(3)], part="open", closed=True, must="unlink"),
    Phase(
        "dumps packed",
        PACKED,
        [*FEW, DUMPS, _extend(9)],
        [*[DUMPS, _extend(5, "a")] * 2],
        must="link c.0.0",
    ),
    Phase(
        "dumps packed in its second turn",
        PACKED,
        [_extend(24), FLUSH, _extend(8), DUMPS, _extend(7, "a")],
        [DUMPS, _extend(5), DUMPS],
        must="link c.0.0",
    ),
    Phase(
        "loads packed",
        PACKED,
        [*FEW, DUMPS, _extend(9)],
        [LOADS, _extend(5, "a")],
        must="rename swap",
    ),
    Phase("rows in segments", RAGGED, FEW, [_extend(6, "a"), _extend(8), FLUSH], tooth=True),
    Phase(
        "add columns",
        LEAN,
        [*FEW, _change(4, 9, 1)],
        [
            _add("late", 3, 5),
            _extend(6, "a"),
            _add("group.deep.late", 4, fill=True),
            _extend(3),
            _change(20, 25, 2),
        ],
        must="rename late",
    ),
    Phase(
        "drop columns",
        LEAN,
        [*FEW, _add("group.late", 3), _add("late", 5), _extend(3)],
        [_drop("group.late"), _extend(6, "a"), _drop("late"), _extend(2)],
        must="rename late",
    ),
    Phase("add a column to packed ones", PACKED, [_extend(22)], [_add("late", 2, 5), _extend(7)]),
    Phase("add a column to what grows", GROWING, [_extend(4000)], [_add("late", 2, 120), _extend(9)]),
    Phase("add a column to few rows", NARROW, [_extend(3)], [_add("late", 2, 2), _extend(1), FLUSH]),
    Phase("add a column to counted rows", COUNTED, [_extend(24), SAMPLE], [_add("late", 2, 3), SAMPLE]),
    Phase(
        "add a column to best rows",
        BEST,
        [_extend(30)],
        [_add("late", 2), _extend(20), _drop("late")],
    ),
    Phase(
        "loads other fields",
        LEAN,
        [*FEW, _add("late", 2), DUMPS, _extend(9), _drop("late"), _add("group.late", 5)],
        [LOADS, _extend(4, "a"), DUMPS],
        must="rename swap",
    ),
    Phase(
        "open columns that were added",
        LEAN,
        [*FEW, _add("late", 3, 5), _extend(6), _change(20, 25, 2), _drop("late")],
        part="open",
    ),
    Phase(
        "first keys",
        KEYED,
        FEW,
        [*_keyed(0, 6, 1), FLUSH, *_keyed(2, 8, 2), _extend(1), *_keyed(4, 3)],
        must="rename keys",
    ),
    Phase("ring of keys", KEYED, _keyed(0, *[2] * 11), [*_keyed(11, 1, 1, 3), FLUSH, *_keyed(14, 9)]),
    Phase("open keys", KEYED, [*_keyed(0, 6, 2), FLUSH, *_keyed(2, 1, 7, 2)], part="open", must="write keys"),
    Phase(
        "loads with keys",
        KEYED,
        [*_keyed(0, 6), DUMPS, *_keyed(1, 7, 2)],
        [LOADS, *_keyed(3, 4)],
    ),
    Phase("extend without spare", BARE, [_extend(24)], [_extend(6)], tooth=True),
    Phase("change new rows", LEAN, FEW, [_extend(4), _change(20, 24, 1, 2)], tooth=True),
    Phase("close with an index", LEAN, FEW, [_extend(2)], part="close", index=True),
)


def _live(
    phase: Phase, path: Path, state: Ledger, ops: Sequence[Op], disk: KillingDisk, pipe: int, at: int
) -> None:
    """Run one life that ends at operation number `at` of the phase's part."""
    say = saying(pipe)
    state = state.copy()
    with say.failures():
        if phase.part == "open":
            disk.arm(at)
        rb = open_store(phase.spec, path, disk, index=phase.index)
        say(f"open {rb.storage.priorities.largest!r}")
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
    pid, pipe = in_child(lambda out: _live(life, path, state, phase.before, KillingDisk(serial=True), out, 0))
    lines = read_lines(pipe, lambda _: None, pid)
    ended, _, _ = outcome(lines, state, phase.before)
    if not lines[-1].startswith("done"):
        raise Wrong(f"{phase.name} could not be prepared: {lines[-1]}")
    return ended


def _open_and_die(phase: Phase, path: Path, at: int) -> None:
    """Start to recover, and be killed during it."""
    life = Phase(phase.name, phase.spec, part="open")
    state = new_ledger(phase.spec)
    pid, pipe = in_child(lambda out: _live(life, path, state, (), KillingDisk(serial=True), out, at))
    read_lines(pipe, lambda _: None, pid)


def enumerate_kill_points(
    folder: Path,
    *,
    names: Sequence[str] = (),
    seed: int = 1,
    torn: str = "half",
    again: float = 0.2,
    syncs: bool = True,
    stop: bool = False,
    most: int | None = None,
    act: int | None = None,
) -> Report:
    """Kill in the gaps of phases.

    Args:
        folder: Folder for stores.
        names: Phases; empty for all but those that exist to show a fault.
        seed: Seed of torn writes and killed recoveries.
        torn: "no" kills before each operation; "also" in addition in the middle of each write; "half" chooses
            randomly.
        again: Share of the gaps after which the recovery is killed too.
        syncs: Whether syncs count as operations.
        stop: Whether to stop at the first failure.
        most: Maximum number of operations per phase, spread evenly, half of them changes of names; None for
            all.
        act: The only operation to kill at; None for all.
    """
    store.Keeper = NoKeeper  # type: ignore[assignment,misc]
    started = time.monotonic()
    run = _Run(folder, seed, torn, again, syncs, stop, most, act)
    for phase in PHASES:
        if phase.name in names or not (names or phase.tooth):
            run.enumerate(phase)
    run.report.seconds = round(time.monotonic() - started, 1)
    return run.report


def _spread(acts: list[int], count: int) -> list[int]:
    """Return at most `count` operations, spread evenly from the first to the last."""
    count = min(count, len(acts))
    return [acts[n * (len(acts) - 1) // max(count - 1, 1)] for n in range(count)]


@dataclass
class _Run:
    folder: Path
    seed: int
    torn: str
    again: float
    syncs: bool
    stop: bool
    most: int | None
    act: int | None
    chance: random.Random = field(default_factory=random.Random)
    report: Report = field(default_factory=Report)
    looks: list[tuple[str, Look]] = field(default_factory=list)

    def enumerate(self, phase: Phase) -> None:
        """Kill at operation 1, 2, 3 ... of a phase."""
        fit_constants(phase.spec)
        model = self.folder / "model"
        model.mkdir()
        state = _prepare(phase, model / STORE)
        trace = self._trace(phase, model, state)
        self.report.acts[phase.name] = len(trace)
        if not any(act.startswith(phase.must) for act in trace):
            self.report.failures.append(f"{phase.name} never came to {phase.must}: {Counter(trace)}")
        for at in [self.act] if self.act else self._acts(trace):
            self.chance = random.Random(f"{self.seed}/{phase.name}/{at}")
            for cut in self._cuts():
                base = self.folder / f"{at}-{cut}"
                copy_folder(model, base)
                self._kill(phase, base / STORE, state, at, cut)
            if len(self.looks) >= TOGETHER:
                self.look()
            if len(self.report.failures) > (0 if self.stop else 20):
                break
        self.look()
        shutil.rmtree(model)

    def _trace(self, phase: Phase, model: Path, state: Ledger) -> list[str]:
        """Return all operations of a phase in their order."""
        base = self.folder / "whole"
        copy_folder(model, base)
        disk = KillingDisk(serial=True, syncs=self.syncs)
        pid, pipe = in_child(lambda out: _live(phase, base / STORE, state, phase.ops, disk, out, 0))
        lines = read_lines(pipe, lambda _: None, pid)
        shutil.rmtree(base)
        try:
            outcome(lines, state, phase.ops)
        except Wrong as exc:
            self.report.failures.append(f"{phase.name}: {exc}")
            return []
        trace: list[str] = json.loads(lines[-1].removeprefix("done "))
        return trace

    def _acts(self, trace: list[str]) -> list[int]:
        """Return the numbers of the operations to kill at."""
        acts = list(range(1, len(trace) + 1))
        if self.most is None:
            return acts
        naming = _spread(
            [at for at in acts if trace[at - 1].startswith(("rename", "unlink"))], self.most // 2
        )
        others = [at for at in acts if at not in naming]
        return sorted([*naming, *_spread(others, self.most - len(naming))])

    def _cuts(self) -> list[float | None]:
        """Return how much of a write is done in each trial; None if it is not started."""
        if self.torn == "also":
            return [None, self.chance.random()]
        return [self.chance.random() if self.torn == "half" and self.chance.random() < 0.5 else None]

    def _kill(self, phase: Phase, path: Path, state: Ledger, at: int, cut: float | None) -> None:
        """Kill at one operation."""
        label = f"{phase.name}, seed {self.seed}, act {at}, cut {cut}"
        disk = KillingDisk(torn=cut, serial=True, syncs=self.syncs)
        pid, pipe = in_child(lambda out: _live(phase, path, state, phase.ops, disk, out, at))
        lines = read_lines(pipe, lambda _: None, pid)
        try:
            ended, op, where = outcome(lines, state, phase.ops)
        except Wrong as exc:
            self.report.failures.append(f"{label}: {exc}")
            return
        self.report.count(where)
        if self.chance.random() < self.again:
            _open_and_die(phase, path, self.chance.randrange(1, 40))
        leave = self.chance.choice(["reopen", "kill"])
        ops = [_extend(3, "a"), _extend(2)]
        need, known = snapshots(ended, op)
        look = Look(
            path,
            candidates(ended, op),
            ops,
            sql=phase.index,
            leave=leave,
            need=need,
            known=known,
            current=max(ended.versions, default=0),
        )
        self.looks.append((label, look))

    def look(self) -> None:
        """Check the killed stores in one process that has opened none of them before."""
        labels, looks = [label for label, _ in self.looks], [look for _, look in self.looks]
        for label, found in zip(labels, check(looks), strict=True):
            if isinstance(found, str):
                self.report.failures.append(f"{label}: {found}")
        for look in looks:
            shutil.rmtree(look.path.parent)
        self.looks.clear()
