"""Batches cut into pieces that lie in one episode each, and what rows say of ends and rewards.

Used by `expstore.episodes.table`, which numbers the pieces, and by what reads steps out of columns. It looks
at one batch alone: it knows neither sources nor what came before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.values import Array, IntArray, Key
from expstore.episodes.fragments import cut_uneven
from expstore.episodes.sessions import SessionKey
from expstore.schema.field_roles import Keys
from expstore.schema.schema import Schema

__all__ = [
    "CUT",
    "OPEN",
    "TERMINATED",
    "TRUNCATED",
    "Piece",
    "RowFacts",
    "Run",
    "RunReader",
    "Steps",
    "cut_batch",
    "cut_lane",
    "find_ends",
]

#: How an episode stands after a row.
OPEN, TERMINATED, TRUNCATED, CUT = range(4)

#: Of rows of one episode in a batch. LAST: no row of the episode comes any more, whatever its status says.
#: NO_REWARD: the rows have no reward.
NEW, HAS_TRAJECTORY, LAST, NO_REWARD = 1, 2, 4, 8

BoolArray = NDArray[np.bool_]


@dataclass(slots=True)  # made anew for every row that is added: frozen ones take ten times as long
class Steps:
    """Say what a batch's rows are in the eyes of their collector. Arrays have one entry per row.

    Args:
        count: How many rows.
        lanes: Lane of each row, rows of a lane in time order; None: one lane.
        lane_count: How many lanes.
        trajectories: The collector's trajectory ids, or None.
        terminated: Rows after which the episode is over.
        truncated: Rows after which it was stopped from outside.
        starts: Rows that begin an episode whatever came before.
        rewards: What is summed up to the return.
        session: Who writes them; None: the session of the storage.
        linked: Whether a row follows the one before it in its episode. Rows that are single facts do not.
    """

    count: int
    lanes: IntArray | None = None
    lane_count: int = 1
    trajectories: IntArray | None = None
    terminated: BoolArray | None = None
    truncated: BoolArray | None = None
    starts: BoolArray | None = None
    rewards: Array | None = None
    session: SessionKey | None = None
    linked: bool = True


_NO_FLAGS, _NO_INTS, _NO_FLOATS = np.empty(0, np.bool_), np.empty(0, np.int64), np.empty(0)
#: lane, trajectory, begins an episode, row, count, stride, status, return (0.0 where rows have no reward)
Piece = tuple[int, int | None, bool | None, int, int, int, int, float]
#: Rows of one source and one episode that follow one another: number of the first row in the batch, how many,
#: the sum of their rewards (0.0 where rows have none), how the last one leaves the episode, and the
#: trajectory id.
Run = tuple[int, int, float, int, int | None]


def cut_lane(steps: Steps, kernels: ModuleType) -> list[Piece]:
    """Do as `cut_batch` for a batch of one lane, by a compiled loop."""
    n = steps.count
    rewards = _NO_FLOATS if steps.rewards is None else steps.rewards
    if rewards.dtype != np.float32:
        rewards = rewards.astype(np.float64, copy=False)
    table, sums = np.empty((n, 5), np.int64), np.empty(n)
    runs = kernels.find_runs(
        _NO_FLAGS if steps.terminated is None else np.ascontiguousarray(steps.terminated),
        _NO_FLAGS if steps.truncated is None else np.ascontiguousarray(steps.truncated),
        _NO_INTS if steps.trajectories is None else np.ascontiguousarray(steps.trajectories),
        _NO_FLAGS if steps.starts is None else np.ascontiguousarray(steps.starts),
        np.ascontiguousarray(rewards),
        table,
        sums,
    )
    named = steps.trajectories is not None
    return [
        (0, trajectory if named else None, start, row, count, 1, status, ret)
        for (row, count, status, trajectory, start), ret in zip(
            table[:runs].tolist(), sums[:runs].tolist(), strict=True
        )
    ]


def cut_batch(steps: Steps) -> tuple[list[Piece], IntArray | None]:
    """Cut a batch into runs: (lane, trajectory, starts, row, count, stride, status, return)."""
    n = steps.count
    order = None
    if steps.lanes is not None and steps.lane_count > 1 and (np.diff(steps.lanes) < 0).any():
        order = np.argsort(steps.lanes, kind="stable")

    def of(values: Any) -> Any:
        return values if order is None or values is None else values[order]

    lanes, trajectories, rewards = of(steps.lanes), of(steps.trajectories), of(steps.rewards)
    terminated, truncated, starts = of(steps.terminated), of(steps.truncated), of(steps.starts)
    cut = np.zeros(n, bool)
    cut[0] = True
    for ends in (terminated, truncated):
        if ends is not None:
            cut[1:] |= ends[:-1]
    for names in (lanes, trajectories):
        if names is not None:
            cut[1:] |= names[1:] != names[:-1]
    if starts is not None:
        cut |= starts
    if order is not None:
        cut_uneven(cut, order)
    at = cut.nonzero()[0]
    first = at.tolist()
    last = [place - 1 for place in [*first[1:], n]]
    none: list[Any] = [None] * len(first)
    over = none if terminated is None else terminated[last].tolist()
    stopped = none if truncated is None else truncated[last].tolist()
    strides = [1] * len(first)
    if order is not None:
        strides = [int(order[b] - order[b - 1]) if b > a else 1 for a, b in zip(first, last, strict=True)]
    pieces: Iterable[Any] = zip(
        [0] * len(first) if lanes is None else lanes[at].tolist(),
        none if trajectories is None else trajectories[at].tolist(),
        none if starts is None else starts[at].tolist(),
        first if order is None else order[at].tolist(),
        [b - a + 1 for a, b in zip(first, last, strict=True)],
        strides,
        [TERMINATED if t else TRUNCATED if s else OPEN for t, s in zip(over, stopped, strict=True)],
        [0.0] * len(first) if rewards is None else np.add.reduceat(rewards, at, dtype=np.float64).tolist(),
        strict=True,
    )
    return list(pieces), order


def find_ends(
    terminated: Array | None, truncated: Array | None, done: Array | None, reduction: str | None = None
) -> tuple[BoolArray | None, BoolArray | None]:
    """Return which rows terminate an episode and which truncate it.

    Where rows say whether they terminate, every other end is a truncation: `done` is `terminated` or
    `truncated`. Without such a field `done` terminates, unless `truncated` is set.

    Args:
        terminated: The field of that name. Shape `(n, *row shape)`, as the others; None: no such field.
        truncated: The field of that name.
        done: The field that says that there is an end, but not why.
        reduction: How several values of a row, one per agent, become one: "any" (as None) or "all".

    Returns:
        Two arrays of shape `(n,)`; None: no row says so. Rows that are in both are terminated.
    """
    for column in (terminated, truncated, done):
        if column is not None and column.size != len(column):
            terminated, truncated, done = _ends_of_agents(terminated, truncated, done, reduction == "all")
            break
    if terminated is not None:
        terminated = terminated.reshape(-1).astype(np.bool_, copy=False)
    if truncated is not None:
        truncated = truncated.reshape(-1).astype(np.bool_, copy=False)
    if done is None:
        return terminated, truncated
    done = done.reshape(-1).astype(np.bool_, copy=False)
    if terminated is None:
        return (done if truncated is None else done & ~truncated), truncated
    stopped = done & ~terminated
    return terminated, stopped if truncated is None else truncated | stopped


def _ends_of_agents(
    terminated: Array | None, truncated: Array | None, done: Array | None, whole: bool
) -> tuple[Array | None, Array | None, Array | None]:
    """Return the same for whole rows: an end of any agent, or, if `whole`, only one of all of them."""
    given: list[Any] = [
        None if column is None else column.reshape(len(column), -1).astype(np.bool_)
        for column in (terminated, truncated, done)
    ]
    if not whole:
        ends, stops, rest = (None if flags is None else flags.any(axis=1) for flags in given)
        return ends, stops, rest
    ends, stops, _ = (None if flags is None else flags.all(axis=1) for flags in given)
    known = [flags for flags in given if flags is not None]
    over = known[0]
    for flags in known[1:]:
        over = over | flags  # some agents may have terminated, and the others been truncated
    return ends, stops, over.all(axis=1)


class RowFacts:
    """Read ends and rewards of rows.

    Args:
        schema: Of the columns.
        keys: Which fields say so.
    """

    def __init__(self, schema: Schema, keys: Keys) -> None:
        ends = (keys.terminated, keys.truncated, keys.done)
        self._ends = [-1 if key is None else schema.place(key) for key in ends]
        self._reward = -1 if keys.reward is None else schema.place(keys.reward)
        self._bits = keys.reward is not None and schema[keys.reward].dtype == "bfloat16"
        self._keys = keys

    def read(self, columns: Sequence[Array]) -> tuple[BoolArray | None, BoolArray | None, Array | None]:
        """Return which rows terminate an episode, which truncate it, and what each adds to its return.

        Args:
            columns: In the schema's order.

        Returns:
            Arrays of shape `(n,)`; None: rows do not say so, or have no reward. Several rewards of a row are
            made one.
        """
        terminated, truncated, done = self._ends
        ends = find_ends(
            columns[terminated] if terminated >= 0 else None,
            columns[truncated] if truncated >= 0 else None,
            columns[done] if done >= 0 else None,
            self._keys.done_reduce,
        )
        if self._reward < 0:
            return *ends, None
        rewards = columns[self._reward]
        if self._bits:
            rewards = widen_bfloat16(rewards)
        if rewards.size == len(rewards):
            return *ends, rewards.reshape(-1)
        several = rewards.reshape(len(rewards), -1).astype(np.float64)
        return *ends, getattr(several, self._keys.reward_reduce or "sum")(axis=1)


class RunReader:
    """Cut rows of one lane into runs; their columns are filled again and again.

    Args:
        schema: Of the columns.
        keys: Which fields say what a row is to its episode: each has one value per row, and is not bfloat16.
        columns: One per field. Shapes `(n, *row shape)`. Of several rows none is a trajectory id.
    """

    def __init__(self, schema: Schema, keys: Keys, columns: Sequence[Array]) -> None:
        def of(key: Key | None) -> Array | None:
            return None if key is None else columns[schema.place(key)].reshape(-1)

        self._count = len(columns[0])
        none = np.zeros(self._count, np.bool_)
        self._ends = of(keys.terminated), of(keys.truncated), of(keys.done)
        # Of a single row flags that rows do not have are False.
        self._terminated, self._truncated, self._done = (
            none if column is None else column for column in self._ends
        )
        self._says_why = keys.terminated is not None
        rewards = of(keys.reward)
        self._rewards: Array = np.zeros(self._count) if rewards is None else rewards
        self._trajectory = of(keys.trajectory)

    def read(self) -> list[Run]:
        """Return the runs of the rows that are in the columns; all but the last end their episode."""
        if self._count == 1:  # as `find_ends` says it
            stopped, done = self._truncated.item(0), self._done.item(0)
            over = self._terminated.item(0) if self._says_why else done and not stopped
            status = TERMINATED if over else TRUNCATED if stopped or done else OPEN
            trajectory = None if self._trajectory is None else self._trajectory.astype(np.int64).item(0)
            return [(0, 1, float(self._rewards.item(0)), status, trajectory)]
        terminated, truncated = find_ends(*self._ends)
        rewards, runs, start = self._rewards.tolist(), list[Run](), 0
        stopped = [] if truncated is None else truncated.nonzero()[0].tolist()
        over = [] if terminated is None else terminated.nonzero()[0].tolist()
        ends = dict.fromkeys(stopped, TRUNCATED) | dict.fromkeys(over, TERMINATED)
        for last in sorted({*ends, self._count - 1}):
            total = 0.0
            for reward in rewards[start : last + 1]:  # in the order in which `cut_lane` adds
                total += reward
            runs.append((start, last + 1 - start, total, ends.get(last, OPEN), None))
            start = last + 1
        return runs
