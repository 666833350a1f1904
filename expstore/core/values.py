"""Small shared types: keys, windows of ids, and what a sampler selects.

Used by all other packages; only simple arithmetic on ids.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expstore.core.id_set import NO_IDS, IdSet
from expstore.errors import ArgumentError

Array = NDArray[Any]
IntArray = NDArray[np.int64]

#: A field's name: the path of its leaf in the TensorDict, always a tuple.
Key = tuple[str, ...]


def to_key(name: str | tuple[str, ...] | list[str]) -> Key:
    """Return a nested key as a tuple.

    Raises:
        ArgumentError: The value is not a key.

    >>> from expstore.core.values import to_key
    >>> to_key("reward"), to_key(("next", "reward"))
    (('reward',), ('next', 'reward'))
    """
    if isinstance(name, str):
        return (name,)
    if not isinstance(name, tuple | list) or not all(isinstance(part, str) for part in name):
        raise ArgumentError(f"a key is a name or a tuple of names, got {name!r}")
    return tuple(name)


def check_key(argument: str, value: Any) -> Key:
    """Check a key passed by a user and return it as a tuple.

    Args:
        argument: Name of the argument, for error messages.
        value: The value that the user passed.

    Raises:
        ArgumentError: The value is not a key.
    """
    if not isinstance(value, str | tuple | list) or not value or not all(isinstance(p, str) for p in value):
        raise ArgumentError(f"{argument} is the key of a field, a name or a tuple of names, got {value!r}")
    return to_key(value)


def key_name(key: Key) -> str:
    """Return a key in the notation of messages and of SQL.

    >>> from expstore.core.values import key_name
    >>> key_name(("next", "reward"))
    'next.reward'
    """
    return ".".join(key)


@dataclass(frozen=True, slots=True)
class Ranking:
    """The criterion by which a store that keeps the best rows ranks them.

    Args:
        key: The field.
        reduction: How several values of a row are reduced to one: sum, max, min, mean or median.
    """

    key: Key
    reduction: str

    def __str__(self) -> str:
        return f"{self.reduction} of {key_name(self.key)}"


def to_finite(value: float) -> float | None:
    """Return a number for JSON, which has neither NaN nor infinities: they are None."""
    return value if math.isfinite(value) else None


def cut_run(first_id: int, count: int, slots: int | None) -> list[tuple[int, int, int]]:
    """Split a run of ids at the end of a ring. Returns (first slot, offset in the run, rows) of each part.

    Args:
        first_id: First id of the run.
        count: Number of rows.
        slots: Number of slots of the ring; None: unbounded.
    """
    if slots is None:
        return [(first_id - 1, 0, count)]
    start = (first_id - 1) % slots
    if start + count <= slots:
        return [(start, 0, count)]
    head = slots - start
    return [(start, 0, head), (0, head, count - head)]


#: Runs of ids, ascending: (first, last) of each.
Runs = tuple[tuple[int, int], ...]


def merge_runs(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return the same ids as ascending runs that neither overlap nor adjoin.

    >>> from expstore.core.values import merge_runs
    >>> merge_runs([(8, 9), (1, 3), (3, 5), (6, 6)])
    ((1, 6), (8, 9))
    """
    merged: list[tuple[int, int]] = []
    for first, last in sorted(runs):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


@dataclass(frozen=True, slots=True)
class Window:
    """The readable ids: those in (`low`, `last`] that are not in `deleted`.

    Args:
        low: The newest id that can no longer be read; 0 at first.
        last: The newest id that is published; 0 in an empty store.
        deleted: Ids deleted by a repair or by retention; it may also have ids up to `low`.
    """

    low: int
    last: int
    deleted: IdSet = NO_IDS

    @property
    def size(self) -> int:
        """Number of ids between `low` and `last`, including deleted ones."""
        return self.last - self.low

    @property
    def rows(self) -> int:
        """Number of readable rows."""
        deleted = self.deleted
        if deleted is NO_IDS:
            return self.last - self.low
        return self.last - self.low - deleted.upto(self.last) + deleted.upto(self.low)

    def newest(self, count: int | None) -> Window:
        """Return the part with the newest `count` ids, deleted ones included; None: the whole window."""
        if count is None or self.last - count <= self.low:
            return self
        return Window(self.last - count, self.last, self.deleted)

    def until(self, last: int | None) -> Window:
        """Return the part with ids up to `last`; None: the whole window."""
        return self if last is None or last >= self.last else Window(min(self.low, last), last, self.deleted)

    def runs(self) -> list[tuple[int, int]]:
        """Return the readable ids as runs (first id, rows); for an empty window one run of 0 rows."""
        if not self.deleted:
            return [(self.low + 1, max(0, self.size))]
        first, last = self.deleted.others(self.low, self.last)
        if not first.size:
            return [(self.last + 1, 0)]
        return list(zip(first.tolist(), (last + 1 - first).tolist(), strict=True))

    def ids(self) -> IntArray:
        """Return the readable ids, ascending. Shape `(rows,)`."""
        ids = np.arange(self.low + 1, self.last + 1)
        return ids[~self.deleted.holds(ids)] if self.deleted else ids

    def holds(self, ids: IntArray) -> NDArray[np.bool_]:
        """Return whether each id can be read. Shapes `(n,)`."""
        found: NDArray[np.bool_] = (ids > self.low) & (ids <= self.last)
        if self.deleted:
            found &= ~self.deleted.holds(ids)
        return found

    def nth(self, numbers: IntArray) -> IntArray:
        """Return the readable ids with these numbers, counted from 0 at the oldest. Shapes `(n,)`."""
        return self.deleted.nth(numbers + (self.low - self.deleted.upto(self.low)))


@dataclass(frozen=True, slots=True)
class Mark:
    """A flag of each row of a batch, set by a sampler, in an additional field or in a stored one.

    Args:
        key: The field.
        flags: One flag per row. Shape `(n,)`.
        joins: Whether flags that are set in a stored field stay set; otherwise the field is replaced.
        new: Whether the field is added if it is not stored.
        flat: Whether an added field has shape `(n,)` instead of `(n, 1)`.
    """

    key: Key
    flags: NDArray[np.bool_]
    joins: bool = True
    new: bool = True
    flat: bool = False

    def on(self, stored: Array) -> Array:
        """Return the values of a stored field with the flags applied. Shapes `(n, *row shape)`."""
        flags = self.flags.reshape(-1, *(1,) * (stored.ndim - 1))
        if stored.dtype == np.bool_ and stored.shape == flags.shape:
            return flags | stored if self.joins else flags.copy()
        if self.joins:
            flags = flags | stored.astype(np.bool_, copy=False)
        return np.broadcast_to(flags, stored.shape).astype(stored.dtype)

    def alone(self) -> Array:
        """Return the values of the field if it is not stored."""
        return self.flags if self.flat else self.flags[:, None]


class Mass(NamedTuple):
    """What a sampler draws from at one moment: the chance of a row is its weight divided by `total`.

    Buffers over several stores draw from each in proportion to `total`.

    Args:
        total: The sum of the weights of everything that can be drawn.
        rows: Number of readable rows.
        smallest: The smallest weight above 0; 1 if batches have no `priority_weight`.
        beta: Exponent of `priority_weight`; None if batches have none.
        unit: Number of rows that are drawn together: the length of a slice, otherwise 1.
        left: Number of rows that can be drawn before any row comes again: the rest of a pass, or rows that
            are not used up. 0 at the end of a pass, when `total` is the number of rows of the next one.
            None: every draw chooses from all rows.
    """

    total: float
    rows: int
    smallest: float = 1.0
    beta: float | None = None
    unit: int = 1
    left: int | None = None


#: The column of a batch that says to which group each row belongs.
GROUP_ID: Key = ("group_id",)


@dataclass(frozen=True, slots=True)
class Selection:
    """The rows that a sampler drew.

    Args:
        ids: Row ids. Shape `(n,)`, int64; an id that was drawn more than once is repeated.
        info: Additional columns of the batch, each of length n (weights, for instance).
        progress: The progress of the sampler after this draw; the sampler defines its meaning.
        marks: Flags to write into the batch.
        asked: The number of rows that were requested, if it differs from the number of `ids`; otherwise 0.
        anchors: The sampler's own selection, if a sample unit has replaced its rows by `ids`.
        notes: Information that is not one number per row; only part of the info that `sample` returns.
        oldest: The smallest id of other rows that were read for the batch; 0 without such rows.
        around: Ids of these other rows, in any shapes; some may be those of the batch.
        newest: The largest id that other rows have which are read for the batch; None: no limit.
        mass: What the rows were drawn from; None if the sampler has no mass.
    """

    ids: IntArray
    info: dict[Key, Array] = field(default_factory=dict)
    progress: tuple[int, ...] = ()
    marks: tuple[Mark, ...] = ()
    asked: int = 0
    anchors: Selection | None = None
    notes: dict[Any, Any] = field(default_factory=dict)
    oldest: int = 0
    around: Sequence[IntArray] = ()
    newest: int | None = None
    mass: Mass | None = None

    def take(self, which: Any) -> Selection:
        """Return a part of the rows. `which`: what NumPy takes as an index, such as a mask or a slice."""
        info = {key: values[which] for key, values in self.info.items()}
        marks = tuple(replace(mark, flags=mark.flags[which]) for mark in self.marks)
        return replace(self, ids=self.ids[which], info=info, marks=marks)
