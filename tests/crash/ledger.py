"""The expected content of a store: rows that are functions of their id, and a ledger of operations.

Used by harness.py on both sides of the pipe: the child runs the plan, and the parent computes the expected
content from the same plan. This module never reads a store. The ledger is the model of expstore.testing;
it adds what plans need.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import NonTensorStack, TensorDict

from expstore.core.draws import Draws
from expstore.testing.model import CUT, OPEN, Cell, Model, Stream

Ints = NDArray[np.int64]

SEED = 20_260_101
#: Rows of a batch.
SAMPLE = 32


@dataclass(frozen=True)
class Spec:
    """The shape of one store, and the lengths of its batches."""

    name: str
    capacity: int | None
    spare: int | None  # None: the library's own choice
    frame: int = 2048
    segment_bytes: int = 16_384
    longest: int = 700
    redo_bytes: int = 64 << 20
    shard_rows: int = 1 << 20
    overlong: bool = True  # includes batches longer than the spare, and than the ring
    lean: bool = False  # three fields only
    durability: Literal["process", "sync"] = "process"
    dumped: bool = False  # snapshots are made of it
    tail: bool = True  # whether small batches are written into the journal
    consume: int | None = None  # maximum number of times that each row is returned
    best: bool = False  # whether the best rows are kept instead of the newest
    late: bool = False  # fields are added and dropped
    ragged: bool = False  # whether there are variable-length fields, in short segments
    compression: Literal["lz4", "zstd"] | None = None  # of these segments
    keyed: bool = False  # whether rows are written under idempotency keys, few of which are remembered
    packed: bool = (
        False  # whether frames, next ones too, are packed, in chunks of a few rows and short shards
    )

    @property
    def follows(self) -> bool:
        """Whether there are next frames."""
        return self.packed


@dataclass(frozen=True)
class Op:
    """One call, decided completely beforehand."""

    kind: str
    count: int = 0
    lanes: int = 1
    time_first: bool = False
    source: str | None = None
    ids: Ints | None = None
    version: int = 0
    priorities: NDArray[np.float32] | None = None
    episode: int = 0
    info: Mapping[str, int | None] | None = None
    fill: bool = False  # an added field has one value in all rows
    key: str | None = None  # idempotency key of an extend


# -- rows ------------------------------------------------------------------------------------------------

_noise = np.random.default_rng(SEED).integers(0, 256, (1 << 16) + (1 << 18), dtype=np.uint8)


def _mix(ids: Ints, versions: Ints) -> Ints:
    return (ids * 2_654_435_761 + versions * 40_503 + 12_345) & 0xFFFF_FFFF


def _ends(ids: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    terminated = _mix(ids, ids) % 29 == 3
    return terminated, ~terminated & (_mix(ids, ids) % 47 == 5)


def _rewards(ids: Ints, versions: Ints) -> NDArray[np.float32]:
    return ((_mix(ids, versions) % 1001 - 500) / 4).astype(np.float32)


def values(spec: Spec, ids: Ints, versions: Ints) -> dict[tuple[str, ...], np.ndarray]:
    """Return all fields of rows; the version distinguishes a row from the one before `[]=`."""
    mixed, frame = _mix(ids, versions), _frames(spec, ids, versions)
    # Most rows are followed by the next row, some by the third next one, and some by none.
    after = np.where(ids % 16 < 11, 1, np.where(ids % 16 < 14, 3, 1 << 20))
    following = {}
    if spec.follows:
        # Ticks prevent rows from continuing one another: episodes follow from sources alone.
        following = {
            ("next", "frame"): _frames(spec, ids + after, versions),
            ("tick",): 2 * ids,
            ("next", "tick"): 2 * ids + 1,
        }
    terminated, truncated = _ends(ids)
    if spec.lean:
        return following | {
            ("observation",): ((mixed[:, None] + np.arange(4) * 7) & 0xFFFFFF).astype(np.float32),
            ("frame",): frame,
            ("next", "done") if spec.follows else ("done",): (terminated | truncated)[:, None],
        }
    return following | {
        ("observation",): ((mixed[:, None] + np.arange(4) * 7) & 0xFFFFFF).astype(np.float32),
        ("frame",): frame,
        ("action",): ids * 1_000_003 + versions,
        ("next", "reward"): _rewards(ids, versions)[:, None],
        ("next", "terminated"): terminated[:, None],
        ("next", "truncated"): truncated[:, None],
    }


def _frames(spec: Spec, ids: Ints, versions: Ints) -> np.ndarray:
    windows = np.lib.stride_tricks.sliding_window_view(_noise, spec.frame)
    frame = windows[_mix(ids, versions) % (1 << 16)]
    frame[:, :8] = ids.astype("<i8").view(np.uint8).reshape(-1, 8)
    frame[:, -8:] = versions.astype("<i8").view(np.uint8).reshape(-1, 8)
    return frame


def ranks(spec: Spec, origins: Ints, versions: Ints) -> NDArray[np.float32]:
    """Return the rank of rows in a store that keeps the best."""
    found: NDArray[np.float32] = values(spec, origins, versions)[("observation",)].max(axis=1)
    return found


def ragged_values(ids: Ints) -> dict[str, list[Any]]:
    """Return the variable-length fields of rows: token ids, and texts or None."""
    sizes = (_mix(ids, ids) % 40).tolist()
    pairs = list(zip(ids.tolist(), sizes, strict=True))
    starts = [i * (-5000 if i % 31 == 4 else 100) for i in ids.tolist()]  # some rows need more bytes
    return {
        "tokens": [list(range(start, start + n)) for start, n in zip(starts, sizes, strict=True)],
        "text": [None if n % 7 == 3 else f"é{i}" * (n % 9) for i, n in pairs],
    }


def batch(spec: Spec, op: Op, ids: Ints) -> TensorDict:
    """Return the TensorDict of an extend or a `[]=`."""
    versions = np.full(ids.size, op.version, np.int64)
    shape, names = [ids.size], None
    if op.lanes > 1:
        steps = ids.size // op.lanes
        shape = [steps, op.lanes] if op.time_first else [op.lanes, steps]
        names = ["time", None] if op.time_first else None
    data = TensorDict({}, batch_size=shape, names=names)
    for key, column in values(spec, ids, versions).items():
        data[key] = torch.from_numpy(column).reshape(*shape, *column.shape[1:])
    if spec.ragged:
        found = ragged_values(ids)
        rows = [torch.tensor(tokens, dtype=torch.int32) for tokens in found["tokens"]]
        data["tokens"] = torch.nested.nested_tensor(rows, layout=torch.jagged)
        data["text"] = NonTensorStack(*found["text"])
    return data


#: Fields that may be added and dropped.
LATE = ("late", "group.late", "group.deep.late")


def late_values(ids: Ints, version: int) -> Ints:
    """Return the values of rows in an added field."""
    return _mix(ids, np.full(ids.size, version, np.int64))


# -- the ledger ------------------------------------------------------------------------------------------


@dataclass
class Ledger(Model):
    """The state of a store from its users' view; rows are functions of the id that they were written with.

    A row's serial number is that id minus one.
    """

    spec: Spec = field(kw_only=True)
    spare: int = 0
    reach: int = 0
    found: int = 0  # rows written, when the store was last opened for a check
    noted_draw: int = 0  # in the newest record that survives a power cut
    offered: int = 0  # rows that were offered to a store that keeps the best
    written: set[str] = field(default_factory=set)  # named streams that this session has written or adopted
    # By named stream: the episodes that its newest session left open.
    adoptable: dict[str, dict[Stream, int]] = field(default_factory=dict)
    # Possible sample counts of a row after a power cut, as for priorities; after a kill only the last one.
    sampled: dict[int, tuple[int, ...]] = field(default_factory=dict)
    taking: Collection[int] = ()  # rows of a batch under way: perhaps counted already
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)  # key -> first id, rows; in their order
    lost: frozenset[str] = frozenset()  # keys of writes that were never made, or were lost in a power cut

    def copy(self) -> Self:
        """Return an independent copy of the ledger."""
        twin = super().copy()
        twin.written, twin.adoptable = set(self.written), dict(self.adoptable)
        twin.sampled, twin.keys = dict(self.sampled), dict(self.keys)
        return twin

    @property
    def low(self) -> int:
        return next(iter(self.rows)) - 1 if self.rows else self.last

    @property
    def slots(self) -> int:
        """Number of slots of a ring."""
        return (self.spec.capacity or 0) + self.spare + self.reach

    @property
    def ids(self) -> Ints:
        return np.array(list(self.rows), np.int64)

    @property
    def left(self) -> Ints:
        """The rows that can still be sampled."""
        limit = self.spec.consume
        if limit is None:
            return self.ids
        return np.array([i for i in self.rows if self.sampled[i][-1] < limit], np.int64)

    def column(self, name: str, ids: Ints) -> Ints:
        """Return a column of readable rows: "version", "origin", "episode", "step" or an added field."""
        if name in self.late:
            values = self.late[name][1]
            return np.array([values[i] for i in ids.tolist()], np.int64)
        attribute = "serial" if name == "origin" else name
        found = np.array([getattr(self.rows[i], attribute) for i in ids.tolist()], np.int64)
        return found + 1 if name == "origin" else found

    def fields(self, ids: Ints) -> dict[tuple[str, ...], np.ndarray]:
        """Return all fields of fixed size of readable rows."""
        found = values(self.spec, self.column("origin", ids), self.column("version", ids))
        return found | {tuple(name.split(".")): self.column(name, ids) for name in self.late}

    def ragged_fields(self, ids: Ints) -> dict[str, list[Any]]:
        """Return the variable-length fields of readable rows."""
        return ragged_values(self.column("origin", ids)) if self.spec.ragged else {}

    def apply(self, op: Op) -> None:
        """Apply one call that returned."""
        getattr(self, f"_{op.kind}")(op)

    def place_best(self, op: Op) -> tuple[Ints, Ints, Ints]:
        """Insert rows one after the other, as documented.

        Returns:
            Id of each row, -1 if it is not stored; the appended rows in their order; the rows that replace
            stored ones.
        """
        spec, stored = self.spec, self.ids
        assert spec.capacity is not None
        origins = self.offered + 1 + np.arange(op.count)
        offered = ranks(spec, origins, np.zeros_like(origins)).tolist()
        ranked = ranks(spec, self.column("origin", stored), self.column("version", stored))
        held = dict(zip(stored.tolist(), ranked, strict=True))
        owner: dict[int, int] = {}
        for row, rank in enumerate(offered):
            i = self.last + 1 + row
            if len(held) == spec.capacity:
                i = min(held, key=lambda i: (held[i], (i - 1) % spec.capacity))
                if not rank > held[i]:
                    continue
            held[i], owner[i] = rank, row
        given = np.full(op.count, -1)
        given[list(owner.values())] = list(owner)
        appended = np.array([owner[i] for i in sorted(owner) if i > self.last], np.int64)
        winners = np.array([owner[i] for i in sorted(owner) if i <= self.last], np.int64)
        return given, appended, winners

    def _best(self, op: Op, *, displace: bool = True) -> None:
        given, appended, winners = self.place_best(op)
        if appended.size:
            if op.source is not None:
                self.written.add(op.source)
            self.extend([Cell()] * appended.size, op.source)
            self.noted_draw = self.draw
        winners = winners if displace else winners[:0]
        self.write_count += winners.size
        for row in [*appended.tolist(), *winners.tolist()]:
            i = int(given[row])
            self.rows[i] = replace(self.rows[i], serial=self.offered + row, version=0)
            self.priorities[i], self.sampled[i] = self.largest[-1:], (0,)
            for default, column in self.late.values():
                column[i] = default
        self.offered += op.count

    def half_best(self, op: Op) -> Self | None:
        """Return the state between an extend's appends and replacements; None if it has only one."""
        if op.kind != "extend" or not self.spec.best:
            return None
        _, appended, winners = self.place_best(op)
        if not (appended.size and winners.size):
            return None
        half = self.copy()
        half._best(op, displace=False)
        return half

    def retire_for(self, op: Op) -> bool:
        """Delete rows in advance for an extend longer than the spare; return whether there were any."""
        capacity = None if self.spec.best else self.spec.capacity
        if op.kind != "extend" or capacity is None or op.count <= self.spare:
            return False
        through = min(self.last, self.last + op.count - capacity - self.spare)
        if through <= self.low:
            return False
        self.forget([i for i in self.rows if i <= through])
        return True

    def _extend(self, op: Op) -> None:
        if self.spec.best:
            self._best(op)
            return
        if op.source is not None:
            self.written.add(op.source)
        if op.key is not None:
            self.keys[op.key] = self.last + 1, op.count
        self.retire_for(op)
        self.serial, self.noted_draw = self.last, self.draw
        steps = op.count // op.lanes
        lanes = [
            range(lane, op.count, op.lanes) if op.time_first else range(lane * steps, (lane + 1) * steps)
            for lane in range(op.lanes)
        ]
        new = self.extend(self._cells(op.count), op.source, lanes=lanes)
        if op.info:
            for number in {row.episode for row in new}:
                self._note(number, op.info)
        self.sampled |= {row.id: (0,) for row in new}

    def _cells(self, count: int) -> list[Cell]:
        """Return the ends and rewards of the next rows."""
        ids = np.arange(self.last + 1, self.last + count + 1, dtype=np.int64)
        terminated, truncated = _ends(ids)
        if self.spec.lean:  # "done" alone marks an end, and there are no rewards
            return [Cell(0, "t" if end else "") for end in terminated | truncated]
        marks = np.select([terminated, truncated], ["t", "T"], "").tolist()
        rewards = _rewards(ids, np.zeros_like(ids)).tolist()
        return [Cell(0, *end) for end in zip(marks, rewards, strict=True)]

    def _note(self, number: int, info: Mapping[str, int | None]) -> None:
        """Merge annotations of an episode."""
        merged = {**self.episodes[number].info, **info}
        stored = {name: value for name, value in merged.items() if value is not None}
        self.episodes[number] = replace(self.episodes[number], info=stored)

    def _annotate(self, op: Op) -> None:
        self._note(op.episode, op.info or {})

    def _end(self, op: Op) -> None:
        """End the open episodes of a named stream, or of all streams."""
        for stream in [one for one in self.open if op.source in (None, one[0])]:
            self._set_status(self.open.pop(stream), CUT)

    def _resume(self, op: Op) -> None:
        """Adopt the episodes that a stream's newest session left open, before the stream's first row."""
        source = str(op.source)
        assert source not in self.written
        if source in self.adoptable:
            self.written.add(source)
            self.open |= self.adoptable[source]
            for number in self.adoptable[source].values():
                self._set_status(number, OPEN)

    def _set_status(self, number: int, status: int) -> None:
        self.episodes[number] = replace(self.episodes[number], status=status)

    def _change(self, op: Op) -> None:
        assert op.ids is not None
        for i in op.ids.tolist():
            self.rows[i] = replace(self.rows[i], serial=i - 1, version=op.version)

    def _add(self, op: Op) -> None:
        """Add a field; rows may be written while its values are computed."""
        if op.count:
            self._extend(Op("extend", count=op.count))
        ids = self.ids
        column = [op.version] * ids.size if op.fill else late_values(ids, op.version).tolist()
        self.late[str(op.source)] = op.version, dict(zip(self.rows, column, strict=True))

    def half_add(self, op: Op) -> Self | None:
        """Return the state with these rows and without the field; None if no rows are written."""
        if op.kind != "add" or not op.count:
            return None
        half = self.copy()
        half._extend(Op("extend", count=op.count))
        return half

    def _drop(self, op: Op) -> None:
        self.drop_column(str(op.source))

    def _empty(self, op: Op) -> None:
        self.adoptable = {source: {} for source in self.adoptable}
        self.empty()

    def _priority(self, op: Op) -> None:
        assert op.ids is not None
        assert op.priorities is not None
        self.set_priorities(dict(zip(op.ids.tolist(), op.priorities.tolist(), strict=True)))

    def _sample(self, op: Op) -> None:
        if not self.left.size:
            return
        if self.spec.consume is not None:
            for i in self.next_sample(SAMPLE).tolist():
                self.sampled[i] = (*self.sampled[i], self.sampled[i][-1] + 1)
        self.draw += 1

    def _flush(self, op: Op) -> None:
        self.mark_written()
        self.noted_draw = self.draw

    def mark_written(self, *, largest: bool = True) -> None:
        super().mark_written(largest=largest)
        self.sampled = {i: self.sampled[i][-1:] for i in self.rows}

    def _sql(self, op: Op) -> None:
        pass

    def _tick(self, op: Op) -> None:
        """Do the periodic work of the background thread."""

    def _dumps(self, op: Op) -> None:
        self.dumps()

    def _loads(self, op: Op) -> None:
        """Load the newest snapshot: its rows and episodes get numbers above all earlier ones."""
        number = max(self.versions)
        kept, capacity = self.versions[number], self.spec.capacity
        shift = max(self.last, kept.last) - kept.low
        if capacity is not None:
            if self.last:
                shift = max(shift, self.last + self.slots - kept.last)
            step = math.lcm(capacity, self.slots)
            shift = -(-shift // step) * step
        loaded = self.loads(number, kept.last + shift)
        loaded.sampled = {i + shift: counts for i, counts in kept.sampled.items()}
        loaded.noted_draw = loaded.draw
        loaded.offered, loaded.keys, loaded.lost = self.offered, self.keys, self.lost
        vars(self).update(vars(loaded))

    def reopen(self) -> None:
        """Begin a session: cut the open episodes of the previous one, which can be adopted."""
        for source in self.written:
            self.adoptable[source] = {
                stream: number for stream, number in self.open.items() if stream[0] == source
            }
        self.written = set()
        super().reopen()

    def next_sample(self, size: int) -> Ints:
        """Return the ids of the next batch by the documented algorithm: Philox, draw by draw."""
        generator = Draws(SEED).generator(self.draw)
        if self.spec.consume is not None:
            ids = self.left
            by_slot = ids if self.spec.capacity is None else ids[np.argsort((ids - 1) % self.slots)]
            return by_slot[generator.choice(ids.size, min(size, ids.size), replace=False)]
        drawn: Ints = generator.integers(self.low + 1, self.last + 1, size)
        return drawn

    def live_rows(self) -> dict[int, int]:
        """Return episode -> readable rows."""
        return dict(Counter(row.episode for row in self.rows.values()))


# -- the plan --------------------------------------------------------------------------------------------


def plan(ledger: Ledger, rng: np.random.Generator, count: int, *, weights: Mapping[str, float]) -> list[Op]:
    """Plan the next calls on a store in the ledger's state, with frequencies from `weights`."""
    state = ledger.copy()
    ops = []
    for _ in range(count):
        op = _next(state, rng, weights)
        state.apply(op)
        ops.append(op)
    return ops


def _next(state: Ledger, rng: np.random.Generator, weights: Mapping[str, float]) -> Op:
    ids = state.ids
    kind = rng.choice(list(weights), p=np.array(list(weights.values())) / sum(weights.values()))
    if kind == "extend" or not ids.size or (kind == "loads" and not state.versions):
        return _next_extend(state, rng)
    if kind == "change" and (state.spec.packed or state.spec.ragged):
        kind = "flush"  # packed columns and segments cannot be changed
    if kind in ("add", "drop"):
        return _next_field(state, rng)
    if kind == "change":
        some = ids[rng.random(ids.size) < rng.choice([0.01, 0.2])]
        some = some if some.size else ids[-1:]
        return Op("change", ids=some, version=max(row.version for row in state.rows.values()) + 1)
    if kind == "priority":
        some = rng.choice(ids, min(ids.size, 50), replace=False)
        drawn = np.round(rng.random(some.size) * state.largest[-1] * 1.2, 3).astype(np.float32)
        return Op("priority", ids=some, priorities=drawn)
    if kind == "annotate":
        newest = list(state.open.values()) if rng.random() < 0.5 else []
        return Op("annotate", episode=int(rng.choice(newest or list(state.episodes))), info=_next_info(rng))
    return Op(str(kind), count=SAMPLE)


def _next_field(state: Ledger, rng: np.random.Generator) -> Op:
    """Plan to add a field, or to drop one if there are many."""
    if len(state.late) and rng.random() < len(state.late) / len(LATE):
        return Op("drop", source=str(rng.choice(list(state.late))))
    name = str(rng.choice([name for name in LATE if name not in state.late]))
    fill, most = bool(rng.random() < 0.3), 0 if state.spec.best else min(8, state.spare or 8)
    count = 0 if fill or rng.random() < 0.5 else int(rng.integers(0, most + 1))
    return Op("add", source=name, version=int(rng.integers(0, 1000)), fill=fill, count=count)


def _next_info(rng: np.random.Generator) -> dict[str, int | None]:
    """Return annotations; each call's replace or remove earlier ones."""
    return {str(rng.choice(["x", "y"])): int(rng.integers(1000)) if rng.random() < 0.8 else None}


def _next_extend(state: Ledger, rng: np.random.Generator) -> Op:
    spec = state.spec
    longest = spec.longest
    if spec.capacity is not None and not spec.overlong:
        longest = min(longest, state.spare or longest)
    count = int(rng.integers(1, longest + 1)) if rng.random() < 0.7 else int(rng.integers(1, 9))
    if spec.overlong and spec.capacity is not None and rng.random() < 0.12:
        count = spec.capacity + state.spare + int(rng.integers(1, 60))  # longer than the whole ring
    source = rng.choice(["", "a", "b"])
    key = str(rng.integers(1 << 60)) if spec.keyed else None
    if spec.best or spec.ragged:
        return Op("extend", count=count, source=str(source) or None, key=key)
    lanes = int(rng.choice([1, 1, 1, 3])) if count >= 3 else 1
    return Op(
        "extend",
        count=count // lanes * lanes,
        lanes=lanes,
        time_first=bool(rng.random() < 0.5),
        source=str(source) or None,
        info=_next_info(rng) if rng.random() < 0.2 else None,
        key=key,
    )


def extends(state: Ledger, rng: np.random.Generator, count: int) -> list[Op]:
    """Plan calls that are valid in any state of a store."""
    return [_next_extend(state, rng) for _ in range(count)]
