"""Batches cut into pieces that lie in one episode each.

Used by `expstore.episodes.table`, which numbers them. It looks at one batch alone: it knows neither sources
nor what came before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray
from expstore.episodes.fragments import cut_uneven

__all__ = ["CUT", "OPEN", "TERMINATED", "TRUNCATED", "Piece", "Steps", "cut_batch", "cut_lane"]

#: How an episode stands after a row.
OPEN, TERMINATED, TRUNCATED, CUT = range(4)

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
    """

    count: int
    lanes: IntArray | None = None
    lane_count: int = 1
    trajectories: IntArray | None = None
    terminated: BoolArray | None = None
    truncated: BoolArray | None = None
    starts: BoolArray | None = None
    rewards: Array | None = None


_NO_FLAGS, _NO_INTS, _NO_FLOATS = np.empty(0, np.bool_), np.empty(0, np.int64), np.empty(0)
#: lane, trajectory, begins an episode, row, count, stride, status, return (0.0 where rows have no reward)
Piece = tuple[int, int | None, bool | None, int, int, int, int, float]


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
