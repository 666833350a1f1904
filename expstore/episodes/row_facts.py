"""Read from columns which rows end an episode, and what each row adds to its episode's return.

Used by whatever cuts rows into episodes: writes, archives, imports, samplers that follow other fields. It
looks at one batch alone and knows no storages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array
from expstore.schema.field_roles import Keys
from expstore.schema.schema import Schema

__all__ = ["RowFacts", "find_ends"]

BoolArray = NDArray[np.bool_]


def find_ends(
    terminated: Array | None, truncated: Array | None, done: Array | None, reduction: str | None = None
) -> tuple[BoolArray | None, BoolArray | None]:
    """Return which rows terminate an episode and which truncate it.

    Where rows say whether they terminate, every other end is a truncation: `done` is `terminated` or
    `truncated`. Without such a field `done` terminates, unless `truncated` is set.

    Args:
        terminated: The field of that name. Shape `(n, *row shape)`, as the others; None: there is none.
        truncated: The field of that name.
        done: The field that says that there is an end, but not why.
        reduction: How several values of a row, one per agent, become one: "any" (as None) or "all".

    Returns:
        Two arrays of shape `(n,)`; None: no row says so. Rows that are in both are terminated.
    """
    given = [None if column is None else _flags(column) for column in (terminated, truncated, done)]
    several = any(flags is not None and flags.ndim > 1 for flags in given)
    if several and reduction == "all":
        known = [flags if flags.ndim > 1 else flags[:, None] for flags in given if flags is not None]
        over = known[0]
        for flags in known[1:]:
            over = over | flags
        given[2] = over  # some agents may have terminated, and the others been truncated
    ends, stops, rest = (_reduced(flags, reduction) for flags in given)
    if rest is None:
        return ends, stops
    if ends is None:
        return (rest if stops is None else rest & ~stops), stops
    rest = rest & ~ends
    return ends, rest if stops is None else stops | rest


def _flags(column: Array) -> BoolArray:
    flags = column if column.dtype == np.bool_ else column.astype(np.bool_)
    return flags.reshape(-1) if flags.size == len(flags) else flags.reshape(len(flags), -1)


def _reduced(flags: BoolArray | None, reduction: str | None) -> Any:
    if flags is None or flags.ndim == 1:
        return flags
    return flags.all(axis=1) if reduction == "all" else flags.any(axis=1)


class RowFacts:
    """Read ends and rewards of rows.

    Args:
        schema: Of the columns.
        keys: Which fields say so.
    """

    def __init__(self, schema: Schema, keys: Keys) -> None:
        ends = (keys.terminated, keys.truncated, keys.done)
        self._ends = [None if key is None else schema.place(key) for key in ends]
        self._reward = None if keys.reward is None else schema.place(keys.reward)
        self._bits = keys.reward is not None and schema[keys.reward].dtype == "bfloat16"
        self._keys = keys

    def ends(self, columns: Sequence[Array]) -> tuple[BoolArray | None, BoolArray | None]:
        """Return which rows terminate an episode and which truncate it, as `find_ends` does.

        Args:
            columns: In the schema's order.
        """
        terminated, truncated, done = (None if place is None else columns[place] for place in self._ends)
        return find_ends(terminated, truncated, done, self._keys.done_reduce)

    def rewards(self, columns: Sequence[Array]) -> Array | None:
        """Return what each row adds to its episode's return; None: rows have no reward.

        Args:
            columns: In the schema's order.

        Returns:
            Numbers of shape `(n,)`: several rewards of a row are made one.
        """
        if self._reward is None:
            return None
        values = columns[self._reward]
        if self._bits:
            values = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if values.size == len(values):
            return values.reshape(-1)
        several = values.reshape(len(values), -1).astype(np.float64)
        rewards: Array = getattr(several, self._keys.reward_reduce or "sum")(axis=1)
        return rewards
