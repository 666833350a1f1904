"""How rows are numbered for users: by TorchRL's index, or by one number per dim, time being the first.

Base of every storage. Where a store has more than one dim a row is a cell of a grid; the sizes of the dims
beyond time are fixed with the fields. It does arithmetic on numbers only, and never touches a row.
"""

from __future__ import annotations

import math

import numpy as np

from expstore.core.values import Array, IntArray, Window
from expstore.errors import NoRowError, NotFoundError, SchemaError

__all__ = ["UNBOUNDED", "Grid", "check_ndim", "round_up"]

#: What `max_size` says of a storage without bound.
UNBOUNDED = 2**63 - 1


def round_up(number: int, multiple: int) -> int:
    """Return the next multiple from a number on.

    >>> round_up(100, 3)
    102
    """
    return -(-number // multiple) * multiple


def check_ndim(ndim: int) -> int:
    """Return the number of dims of a storage.

    Raises:
        ValueError: It has none.
    """
    if ndim < 1:
        raise ValueError(f"ndim must be at least 1, got {ndim}")
    return ndim


class Grid:
    """Number the rows of a storage.

    In one with several dims, of which the first is time, cells are numbered in C order: those of one step of
    time are neighbours, and are written together. A storage with one dim is the case of one lane.

    Threads: nothing changes after the first rows but by a load. Processes, crashes: as the storage.

    Example:
        >>> storage = MemoryStorage(100, ndim=2)  # after rows of shape [T, 3]: 34 steps of 3 lanes
    """

    capacity: int | None
    #: How many dims of a batch are rows; TorchRL's word.
    ndim: int = 1
    #: Sizes of the dims beyond the first; () until the first rows have come.
    dims: tuple[int, ...] = ()
    #: How many rows a step of time has.
    lanes: int = 1
    #: How many slots a ring has beyond its capacity, for rows on their way.
    spare: int = 0
    #: Slots beyond those: how far rows of packed fields may lie before their own places.
    reach: int = 0

    @property
    def window(self) -> Window:
        """The ids that can be read now."""
        raise NotImplementedError

    @property
    def max_size(self) -> int:
        """How many rows can be read at most; 2^63 - 1 in a storage without bound."""
        return UNBOUNDED if self.capacity is None else self.capacity

    @property
    def shape(self) -> tuple[int, ...]:
        """How many rows there are along each dim: steps of time so far, then `dims`."""
        return (-(-self.window.size // self.lanes), *self.dims)

    @property
    def slots(self) -> int | None:
        """How many physical places a ring has."""
        return None if self.capacity is None else self.capacity + self.spare + self.reach

    @property
    def depth(self) -> int | None:
        """How many rows up to the write horizon are as they were written; None: all."""
        return None if self.capacity is None else self.capacity + self.spare

    def slot_of(self, ids: IntArray) -> IntArray:
        """Return the physical places of ids. Shapes `(n,)`."""
        return ids - 1 if self.slots is None else (ids - 1) % self.slots

    def ids_in(self, places: IntArray, window: Window) -> IntArray:
        """Return the newest ids up to a window's last that lie in these slots. Shapes `(n,)`."""
        slots = self.slots
        return places + 1 if slots is None else window.last - (window.last - 1 - places) % slots

    def take_grid(self, ndim: int, dims: tuple[int, ...]) -> None:
        """Have these dims from now on; the capacity becomes a multiple of a step's rows.

        Args:
            ndim: How many dims of a batch are rows.
            dims: Sizes of those beyond the first, or () if they are not known yet.
        """
        self.ndim, self.dims, self.lanes = ndim, dims, math.prod(dims)
        if self.capacity is not None:
            self.capacity = round_up(self.capacity, self.lanes)

    def check_dims(self, dims: tuple[int, ...]) -> None:
        """Raise SchemaError for the dims of a batch whose rows are no cells of this storage.

        Args:
            dims: Sizes of the batch's dims beyond the first.
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
        """Raise SchemaError for a batch that is no whole number of steps of time."""
        if count % self.lanes or (first_id - 1) % self.lanes:
            raise SchemaError(
                f"{count} rows are no whole steps of dims {list(self.dims)}",
                hint="with ndim > 1 every cell is a row: none can be left out",
            )

    def index_of(self, ids: IntArray) -> IntArray:
        """Return TorchRL's numbers (0 to capacity-1) of ids. Shapes `(n,)`."""
        return ids - 1 if self.capacity is None else (ids - 1) % self.capacity

    def numbers_of(self, ids: IntArray, *, run: bool) -> IntArray:
        """Return the indices of a batch just written; -1 for id -1. Shapes `(n,)`.

        Args:
            ids: Theirs.
            run: Whether they follow one another.
        """
        if not run:
            return np.where(ids == -1, -1, self.index_of(ids))
        if self.capacity is None:
            return ids - 1
        start = (int(ids[0]) - 1) % self.capacity
        numbers = np.arange(start, start + ids.size, dtype=np.int64)
        if start + ids.size > self.capacity:  # division is the slowest thing a processor does
            numbers %= self.capacity
        return numbers

    def ids_at(self, index: IntArray) -> IntArray:
        """Return the ids of the readable rows with these numbers. Shapes `(n,)`.

        Raises:
            NotFoundError: There is no readable row of that number.
        """
        window = self.window
        if self.capacity is None:
            ids, end = index + 1, window.last
        else:
            ids, end = window.last - (window.last - 1 - index) % self.capacity, self.capacity
        if index.size == 0 or (
            index.min() >= 0 and index.max() < end and ids.min() > window.low and not window.gaps
        ):
            return ids
        wrong = ~window.holds(ids) | (index < 0) | (index >= end)
        if wrong.any():
            first = int(index[np.argmax(wrong)])
            raise NoRowError(f"no row with index {first}: the store holds {window.rows} rows")
        return ids

    def generations_of(self, ids: IntArray) -> IntArray:
        """Return how many rows had the places of rows before them. Shapes `(n,)`, int64."""
        return np.zeros_like(ids) if self.capacity is None else (ids - 1) // self.capacity

    def generations_at(self, numbers: IntArray) -> IntArray:
        """Return the same of the rows that are at these indices now; -1: there is none. Any shape, int64."""
        window = self.window
        if self.capacity is None:
            ids = numbers + 1
        else:
            ids = window.last - (window.last - 1 - numbers) % self.capacity
        here = window.holds(ids) & (numbers >= 0) & (numbers < self.max_size)
        return np.where(here, self.generations_of(ids), -1)

    def unravel(self, numbers: IntArray) -> IntArray:
        """Return the places of indices along each dim; -1 everywhere for -1.

        Args:
            numbers: Shape `(n,)`.

        Returns:
            Shape `(n, ndim)`, int64.
        """
        time, lane = np.divmod(numbers, self.lanes)
        places = np.empty((numbers.size, self.ndim), np.int64)
        places[:, 0] = time
        for dim in range(self.ndim - 1, 0, -1):
            size = self.dims[dim - 1] if self.dims else 1
            lane, places[:, dim] = np.divmod(lane, size)
        places[numbers < 0] = -1
        return places

    def ravel(self, places: Array) -> IntArray:
        """Return the indices of cells.

        Args:
            places: Along each dim; negative ones count from the end of what is there. Shape `(..., ndim)`.

        Returns:
            Shape `(...)`, int64.

        Raises:
            NotFoundError: One lies outside the grid.
        """
        if places.ndim < 2 or places.shape[-1] != self.ndim:
            raise NotFoundError(f"rows are found by {self.ndim} numbers each, got shape {places.shape}")
        shape = np.array(self.shape if len(self.dims) == self.ndim - 1 else (0,) * self.ndim)
        wrapped: IntArray = np.where(places < 0, places + shape, places).astype(np.int64)
        ends = shape.copy()
        ends[0] = self.max_size // self.lanes  # which of these are there, `ids_at` knows
        wrong = ((wrapped < 0) | (wrapped >= ends)).any(axis=-1)
        if wrong.any():
            raise NoRowError(f"no row at {places[wrong][0].tolist()}: the storage has shape {shape.tolist()}")
        numbers: IntArray = wrapped[..., 0]
        for dim, size in enumerate(self.dims, 1):
            numbers = numbers * size + wrapped[..., dim]
        return numbers
