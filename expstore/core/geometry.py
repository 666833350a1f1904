"""How the rows of a storage are numbered: by id, by slot, by TorchRL's index, or by one number per dim.

Pure arithmetic, without access to rows or files.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from expstore.core.arguments import check_whole
from expstore.core.values import Array, IntArray, Window, cut_run
from expstore.errors import ArgumentError, NoRowError, NotFoundError, SchemaError

#: The `max_size` of a storage without a capacity.
UNBOUNDED = 2**63 - 1


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not less than a number.

    >>> from expstore.core.geometry import round_up
    >>> round_up(100, 3)
    102
    """
    return -(-number // multiple) * multiple


def check_ndim(ndim: int) -> int:
    """Return the number of dims of a storage.

    Raises:
        ArgumentError: `ndim` is not an integer, or less than 1.
    """
    number = check_whole("ndim", ndim, hint="use 1 for rows, or 2 for steps of several lanes")
    if number < 1:
        raise ArgumentError(f"ndim must be at least 1, got {number}")
    return number


@dataclass(frozen=True)
class RingGeometry:
    """Map ids to slots and indices, and back.

    Ids are 1, 2, 3, ... and never reused. A ring keeps the newest `capacity` of them readable in `slots`
    physical places; a storage without a capacity has a slot for every id. With several dims, of which the
    first is time, a row is a cell of a grid: cells are numbered in C order, and the cells of one step of time
    are written together. With one dim, each step of time has one cell.

    Immutable: a storage whose dims become known, or whose capacity changes, replaces the whole object.
    Threads may share it.

    Args:
        capacity: The largest number of readable rows, rounded up to whole steps of time; None: unbounded.
        ndim: How many dims of a batch are rows; the first is time.
        dims: Sizes of the dims after the first; () until the first rows are written.
        spare: Slots of a ring beyond its capacity, for rows that are written before a checkpoint.
        reach: Further slots, which keep overwritten rows that packed rows may refer to.

    Example:
        >>> from expstore.core.geometry import RingGeometry
        >>> ring = RingGeometry(100, spare=28)
        >>> ring.slots, ring.slot_of(np.array([1, 129])).tolist(), ring.index_of(np.array([101])).tolist()
        (128, [0, 0], [0])
    """

    capacity: int | None = None
    ndim: int = 1
    dims: tuple[int, ...] = ()
    spare: int = 0
    reach: int = 0
    #: Number of rows of one step of time.
    lanes: int = field(init=False)
    #: Number of physical places of a ring; None: unbounded.
    slots: int | None = field(init=False)
    #: A row with an id above `write horizon - depth` has not been overwritten; None: no row is ever
    #: overwritten.
    depth: int | None = field(init=False)

    def __post_init__(self) -> None:
        lanes = math.prod(self.dims)
        capacity = None if self.capacity is None else round_up(self.capacity, lanes)
        depth = None if capacity is None else capacity + self.spare
        derived = {
            "capacity": capacity,
            "lanes": lanes,
            "depth": depth,
            "slots": None if depth is None else depth + self.reach,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def with_dims(self, dims: tuple[int, ...]) -> RingGeometry:
        """Return the same ring with these dims after time; the capacity becomes a multiple of a step."""
        return replace(self, dims=dims)

    def with_slots(self, spare: int, reach: int) -> RingGeometry:
        """Return the same ring with other numbers of slots beyond its capacity."""
        return replace(self, spare=spare, reach=reach)

    @property
    def max_size(self) -> int:
        """The largest number of readable rows; 2^63 - 1 without a capacity."""
        return UNBOUNDED if self.capacity is None else self.capacity

    def shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of a grid with this number of rows: steps of time, then `dims`."""
        return (-(-rows // self.lanes), *self.dims)

    # -- ids and slots ---------------------------------------------------------------------------

    def slot_of(self, ids: IntArray) -> IntArray:
        """Return the slots of ids. Shapes `(n,)`."""
        return ids - 1 if self.slots is None else (ids - 1) % self.slots

    def ids_in(self, slots: IntArray, last: int) -> IntArray:
        """Return the newest id, at most `last`, in each of these slots. Shapes `(n,)`."""
        return slots + 1 if self.slots is None else last - (last - 1 - slots) % self.slots

    def runs(self, first_id: int, count: int) -> list[tuple[int, int, int]]:
        """Split a run of ids at the end of the ring: (first slot, offset in the run, rows) of each part."""
        return cut_run(first_id, count, self.slots)

    # -- TorchRL's index ---------------------------------------------------------------------------

    def index_of(self, ids: IntArray) -> IntArray:
        """Return TorchRL's indices (0 to capacity-1) of ids. Shapes `(n,)`."""
        return ids - 1 if self.capacity is None else (ids - 1) % self.capacity

    def indices_of(self, ids: IntArray, *, run: bool) -> IntArray:
        """Return the indices of a batch that was just written; -1 for id -1. Shapes `(n,)`.

        Args:
            ids: The ids of the batch.
            run: Whether the ids are consecutive, which allows a faster computation.
        """
        if not run:
            return np.where(ids == -1, -1, self.index_of(ids))
        if self.capacity is None:
            return ids - 1
        start = (int(ids[0]) - 1) % self.capacity
        indices = np.arange(start, start + ids.size, dtype=np.int64)
        if start + ids.size > self.capacity:  # division is the slowest operation of a processor
            indices %= self.capacity
        return indices

    def ids_at(self, indices: IntArray, window: Window) -> IntArray:
        """Return the ids of the readable rows with these indices. Shapes `(n,)`.

        Raises:
            NotFoundError: An index has no readable row.
        """
        if self.capacity is None:
            ids, end = indices + 1, window.last
        else:
            ids, end = window.last - (window.last - 1 - indices) % self.capacity, self.capacity
        if indices.size == 0 or (
            indices.min() >= 0 and indices.max() < end and ids.min() > window.low and not window.deleted
        ):
            return ids
        wrong = ~window.holds(ids) | (indices < 0) | (indices >= end)
        if wrong.any():
            raise self.build_missing_error(int(indices[np.argmax(wrong)]), window)
        return ids

    def build_missing_error(self, index: int, window: Window) -> NoRowError:
        """Return the error for an index without a readable row."""
        if not window.rows:
            hint = "extend() it first"
        elif window.deleted or (window.low and (self.capacity is None or window.rows < self.capacity)):
            hint = "SELECT _index FROM transitions lists the indices of all rows"
        else:
            hint = f"use an index from 0 to {window.rows - 1}"
        return NoRowError(f"no row with index {index}: the store holds {window.rows} rows", hint=hint)

    def generations_of(self, ids: IntArray) -> IntArray:
        """Return, for each row, how many earlier rows had the same index. Shapes `(n,)`, int64."""
        return np.zeros_like(ids) if self.capacity is None else (ids - 1) // self.capacity

    def generations_at(self, indices: IntArray, window: Window) -> IntArray:
        """Return the generation of the row that each index has now; -1 without a row. Any shape, int64."""
        if self.capacity is None:
            ids = indices + 1
        else:
            ids = window.last - (window.last - 1 - indices) % self.capacity
        readable = window.holds(ids) & (indices >= 0) & (indices < self.max_size)
        return np.where(readable, self.generations_of(ids), -1)

    # -- cells of a grid ---------------------------------------------------------------------------

    def unravel(self, indices: IntArray) -> IntArray:
        """Return the position of indices along each dim; an index of -1 gives -1 for every dim.

        Args:
            indices: Shape `(n,)`.

        Returns:
            Shape `(n, ndim)`, int64.
        """
        time, lane = np.divmod(indices, self.lanes)
        cells = np.empty((indices.size, self.ndim), np.int64)
        cells[:, 0] = time
        for dim in range(self.ndim - 1, 0, -1):
            size = self.dims[dim - 1] if self.dims else 1
            lane, cells[:, dim] = np.divmod(lane, size)
        cells[indices < 0] = -1
        return cells

    def ravel(self, cells: Array, window: Window) -> IntArray:
        """Return the indices of cells.

        Args:
            cells: Positions along each dim; negative ones count from the end. Shape `(..., ndim)`.
            window: The readable rows.

        Returns:
            Shape `(...)`, int64.

        Raises:
            NotFoundError: A cell lies outside the grid.
        """
        if cells.ndim < 2 or cells.shape[-1] != self.ndim:
            raise NotFoundError(f"rows are found by {self.ndim} numbers each, got shape {cells.shape}")
        known = len(self.dims) == self.ndim - 1
        shape = np.array(self.shape(window.size) if known else (0,) * self.ndim)
        wrapped: IntArray = np.where(cells < 0, cells + shape, cells).astype(np.int64)
        ends = shape.copy()
        ends[0] = self.max_size // self.lanes  # `ids_at` checks which of these are readable
        wrong = ((wrapped < 0) | (wrapped >= ends)).any(axis=-1)
        if wrong.any():
            raise NoRowError(f"no row at {cells[wrong][0].tolist()}: the storage has shape {shape.tolist()}")
        indices: IntArray = wrapped[..., 0]
        for dim, size in enumerate(self.dims, 1):
            indices = indices * size + wrapped[..., dim]
        return indices

    # -- checks ----------------------------------------------------------------------------------------

    def check_dims(self, dims: tuple[int, ...]) -> None:
        """Check the dims of a batch.

        Args:
            dims: Sizes of the batch's dims beyond the first.

        Raises:
            SchemaError: The rows of the batch are not cells of this storage.
        """
        if len(dims) != self.ndim - 1 or 0 in dims:
            raise SchemaError(
                f"a storage with ndim={self.ndim} takes batches of {self.ndim} dims, got [time"
                + "".join(f", {size}" for size in dims)
                + "]"
            )
        if self.dims and dims != self.dims:
            raise SchemaError(
                f"the storage has rows of dims [time, {', '.join(map(str, self.dims))}], the batch has "
                f"[time, {', '.join(map(str, dims))}]"
            )

    def check_steps(self, first_id: int, count: int) -> None:
        """Raise SchemaError unless a batch consists of whole steps of time."""
        if count % self.lanes or (first_id - 1) % self.lanes:
            raise SchemaError(
                f"{count} rows are not a whole number of steps of dims {list(self.dims)}",
                hint="with ndim > 1 every cell is a row: write all cells of a step",
            )
