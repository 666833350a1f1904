"""Cut batches into pieces of one episode each, and read the ends and rewards of rows.

Used by `expstore.episodes.table`, which numbers the pieces, and by code that reads steps from columns. It
uses one batch alone, without sources; of earlier rows only the next observations, in `is_new_episode`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.values import Array, IntArray, Key, key_name
from expstore.episodes.fragments import cut_uneven
from expstore.episodes.sessions import SessionKey
from expstore.errors import SchemaError
from expstore.schema.field_roles import Keys
from expstore.schema.schema import Schema

#: Status of an episode after a row.
OPEN, TERMINATED, TRUNCATED, CUT = range(4)

#: Flags of the rows of one episode in a batch: they begin it, they have a trajectory id, they have no reward.
#: The bytes of a record may have 4, which has no meaning any more.
NEW, HAS_TRAJECTORY, NO_REWARD = 1, 2, 8

BoolArray = NDArray[np.bool_]


@dataclass(slots=True)  # not frozen, which would take ten times as long for every added row
class Steps:
    """The episode fields of a batch's rows. Arrays have one entry per row.

    Args:
        count: Number of rows.
        lanes: Lane of each row, rows of a lane in time order; None: one lane.
        lane_count: Number of lanes.
        trajectories: The collector's trajectory ids, or None.
        terminated: Whether the episode ends after the row.
        truncated: Whether the episode is stopped from outside after the row.
        starts: Whether the row begins an episode, regardless of earlier rows.
        rewards: The values that are summed up to the return.
        session: The writing session; None: the session of the storage.
        linked: Whether observations may show that a run begins another episode. False if the caller says
            where episodes begin, and for rows that are single facts.
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
#: Lane, trajectory, whether a field says that it begins an episode (None: there is no field), first row,
#: number of rows, stride, status, return (0.0 without rewards).
Piece = tuple[int, int | None, bool | None, int, int, int, int, float]
#: Consecutive rows of one source and one episode: number of the first row in the batch, number of rows, sum
#: of their rewards (0.0 without rewards), the episode's status after the last one, and the trajectory id.
Run = tuple[int, int, float, int, int | None]


def find_runs(steps: Steps, kernels: ModuleType) -> tuple[IntArray, Array]:
    """Cut a batch of one lane as `cut_batch` does, by a compiled loop.

    Returns:
        First row, number of rows, status, trajectory and `starts` of each run, and its sum of rewards. Shapes
        `(runs, 5)` and `(runs,)`.
    """
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
    return table[:runs], sums[:runs]


def list_pieces(table: IntArray, sums: Array, *, named: bool) -> list[Piece]:
    """Return the result of `find_runs` as pieces; `named`: rows have trajectory ids."""
    return [
        (0, trajectory if named else None, start, row, count, 1, status, ret)
        for (row, count, status, trajectory, start), ret in zip(table.tolist(), sums.tolist(), strict=True)
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


def is_new_episode(
    columns: Sequence[Array],
    pairs: Sequence[tuple[int, int]],
    piece: Piece,
    former: Sequence[Array],
    *,
    required: bool = False,
) -> bool:
    """Return whether observations show that a run does not continue an open episode.

    They do if its first observation is not the episode's last next observation, although each row of the run
    continues the row before it. A run of one row cannot show it, nor can rows of n steps, which do not chain.

    Args:
        columns: The batch, in the schema's order. Shapes `(n, *row shape)`.
        pairs: Positions of each observation and of its next observation, of fixed size.
        piece: The run.
        former: The last next observations of the episode, one for each pair. Shapes `row shape`.
        required: Whether the run must continue the episode: only its first row is compared.
    """
    _, _, _, first, count, stride, _, _ = piece
    # Values are compared as bytes, so that NaN equals NaN.
    if all(
        columns[before][first].tobytes() == value.tobytes()
        for (before, _), value in zip(pairs, former, strict=True)
    ):
        return False
    if required or count == 1:
        return required
    second, end = first + stride, first + count * stride
    return all(  # the second row alone first: where rows do not chain, it shows so without a copy of all
        columns[before][second:stop:stride].tobytes()
        == columns[after][first : stop - stride : stride].tobytes()
        for stop in (second + 1, end)
        for before, after in pairs
    )


def find_ends(
    terminated: Array | None, truncated: Array | None, done: Array | None, reduction: str | None = None
) -> tuple[BoolArray | None, BoolArray | None]:
    """Return which rows terminate an episode and which truncate it.

    If rows have a `terminated` field, every other end is a truncation: `done` is `terminated` or `truncated`.
    Without such a field `done` terminates, unless `truncated` is set.

    Args:
        terminated: The field of that name. Shape `(n, *row shape)`, as the others; None: no such field.
        truncated: The field of that name.
        done: The field that marks ends without their reason.
        reduction: How several values of a row, one per agent, are reduced to one: "any" (also for None) or
            "all".

    Returns:
        Two arrays of shape `(n,)`; None: rows have no such field. Rows that are in both are terminated.
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
    """Reduce the flags of agents to flags of rows: an end of any agent or, if `whole`, of all agents."""
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
        over = over | flags  # an agent is over if it has terminated or was truncated
    return ends, stops, over.all(axis=1)


class RowFacts:
    """Read ends and rewards of rows.

    Args:
        schema: The schema of the columns.
        keys: The fields' keys.
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
            columns: The columns, in the schema's order.

        Returns:
            Arrays of shape `(n,)`; None: rows have no such field. Several rewards of a row are reduced to
            one.
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


def to_trajectory_ids(keys: Keys, column: Array) -> IntArray:
    """Return the trajectory ids of rows as int64. Shape `(n,)`.

    Args:
        keys: The fields' keys, for the message.
        column: Its values, one per row. Shape `(n, ...)`.

    Raises:
        SchemaError: An id is not an integer, or larger than an int64: two trajectories could become one.
    """
    values = column.reshape(-1)
    if values.dtype.kind in "fc" or values.dtype == np.uint64:
        with np.errstate(invalid="ignore"):
            ids = values.real.astype(np.int64)
        # A cast wraps large unsigned integers, and is undefined for floats that are too large.
        wrong = ids < 0 if values.dtype.kind == "u" else (ids != values) | (values.real >= 2.0**63)
        if wrong.any():
            row, field = int(wrong.argmax()), key_name(keys.trajectory or ())
            raise SchemaError(
                f"row {row}: the trajectory id in {field!r} is {values[row]}, which is no int64",
                hint="give trajectory ids as integers, or name another field in EpisodeKeys(traj=...)",
            )
        return ids
    return values.astype(np.int64, copy=False)


class RunReader:
    """Cut rows of one lane into runs; the same columns are refilled for each batch.

    Args:
        schema: The schema of the columns.
        keys: The fields' keys; each field has one value per row, and is not bfloat16.
        columns: One array per field. Shapes `(n, *row shape)`. Of several rows none is a trajectory id.
    """

    def __init__(self, schema: Schema, keys: Keys, columns: Sequence[Array]) -> None:
        def of(key: Key | None) -> Array | None:
            return None if key is None else columns[schema.place(key)].reshape(-1)

        self._count = len(columns[0])
        none = np.zeros(self._count, np.bool_)
        self._ends = of(keys.terminated), of(keys.truncated), of(keys.done)
        # For a single row, flags that rows do not have are False.
        self._terminated, self._truncated, self._done = (
            none if column is None else column for column in self._ends
        )
        self._says_why = keys.terminated is not None
        rewards = of(keys.reward)
        self._rewards: Array = np.zeros(self._count) if rewards is None else rewards
        self._trajectory, self._keys = of(keys.trajectory), keys

    def read(self) -> list[Run]:
        """Return the runs of the rows in the columns; all but the last end their episode."""
        if self._count == 1:  # the same rules as `find_ends`
            stopped, done = self._truncated.item(0), self._done.item(0)
            over = self._terminated.item(0) if self._says_why else done and not stopped
            status = TERMINATED if over else TRUNCATED if stopped or done else OPEN
            trajectory = None
            if self._trajectory is not None:
                trajectory = to_trajectory_ids(self._keys, self._trajectory).item(0)
            return [(0, 1, float(self._rewards.item(0)), status, trajectory)]
        terminated, truncated = find_ends(*self._ends)
        rewards, runs, start = self._rewards.tolist(), list[Run](), 0
        stopped = [] if truncated is None else truncated.nonzero()[0].tolist()
        over = [] if terminated is None else terminated.nonzero()[0].tolist()
        ends = dict.fromkeys(stopped, TRUNCATED) | dict.fromkeys(over, TERMINATED)
        for last in sorted({*ends, self._count - 1}):
            total = 0.0
            for reward in rewards[start : last + 1]:  # summed in the same order as `cut_lane`
                total += reward
            runs.append((start, last + 1 - start, total, ends.get(last, OPEN), None))
            start = last + 1
        return runs
