"""A flat field of which rows may lie in the column of the next ones.

Used by the columns of a store, beside flat and packed ones. A column of its own says of each row how many
rows before it the one is whose next bytes it has; 0: its own slot has them. It never finds such rows: it is
told.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expstore.core import tuning
from expstore.core.values import Array, IntArray
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError
from expstore.schema.schema import Field
from expstore.storages.columns.flat import Column
from expstore.storages.format.zarr_metadata import Layout

__all__ = ["SharedColumn", "runs_of"]

#: So many bytes at a time are summed.
_PIECE_BYTES = 1 << 20


class SharedColumn(Column):
    """Keep one field of all rows, but for those that lie with the partner.

    Slots of these hold nothing: they are holes, or what an older row has left there. In later turns of a
    ring the space of older ones is given back, by whole pages. Threads: one writes, any number take rows.
    Crashes: space that was not given back when a process ended stays taken for a turn.

    Args:
        disk: Where files are touched.
        folder: The Zarr array's folder.
        entry: The field.
        slots: How many rows a ring has; None: the column grows.
        distances: How far before each row the one is that has its bytes; uint16.
        layout: As of `Column`, and so are the others.
        write: See there.
        fills: See there.
    """

    viewed = False

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        entry: Field,
        slots: int | None,
        distances: Column,
        *,
        layout: Layout | None = None,
        write: bool = True,
        fills: bool = False,
    ) -> None:
        super().__init__(disk, folder, entry, slots, layout=layout, write=write, fills=fills)
        self.distances, self.slots = distances, slots
        #: The column in which some rows lie; None: it cannot be read.
        self.partner: Column | None = None
        self._left = 0, 0  # slots that were left out last, and hold older rows: the first, and the one behind
        self._given_back = 0  # the byte up to which their space was given back

    # -- reading ---------------------------------------------------------------------------------

    def take(self, slots: IntArray) -> Array:
        """Copy rows out. `slots` has shape `(n,)`, the result `(n, *row shape)`.

        Raises:
            CorruptionError: They, or those with which they lie, are in a damaged shard.
        """
        distances = self.distances.take(slots)
        if not distances.any():
            return super().take(slots)
        return self._fill_in(self._lender().take(self._places(slots, distances)), slots, distances)

    def take_pair(self, slots: IntArray) -> tuple[Array, Array]:
        """Copy rows out of this column and of its partner; all that lie there in one pass.

        Args:
            slots: Shape `(n,)`.

        Returns:
            Rows of this one and of that one. Shapes `(n, *row shape)`.

        Raises:
            CorruptionError: As `take`.
        """
        distances, partner = self.distances.take(slots), self._lender()
        if not distances.any():
            return super().take(slots), partner.take(slots)
        both = partner.take(np.concatenate([self._places(slots, distances), slots]))
        return self._fill_in(both[: slots.size], slots, distances), both[slots.size :]

    def _places(self, slots: IntArray, distances: Array) -> IntArray:
        """Return where rows lie at the partner's; in the place of those that do not, one that does."""
        places: IntArray = slots - distances
        if self.slots is not None:
            places %= self.slots
        away = distances > 0
        if not away.all():
            places[~away] = places[np.argmax(away)]
        if places.min() < 0 or places.max() >= self._lender().ready:
            raise CorruptionError(f"rows of {self.folder} lie with rows that are not there")
        return places

    def _fill_in(self, rows: Array, slots: IntArray, distances: Array) -> Array:
        """Put the rows that lie here into those that were taken from the partner."""
        own = np.flatnonzero(distances == 0)
        if own.size:
            rows[own] = super().take(slots[own])
        return rows

    def _lender(self) -> Column:
        if self.partner is None:
            raise CorruptionError(f"rows of {self.folder} lie in a column that cannot be read")
        return self.partner

    def part(self, slot: int, count: int) -> Array:
        """Copy a run of slots out."""
        return self.take(np.arange(slot, slot + count))

    def copy(self, slot: int, count: int) -> Array:
        """Copy a run of slots out, some of which may never have been written to."""
        if not self.fills:
            return self.part(slot, count)
        self._check_run(slot, count)
        rows, distances = self.read(slot, count).copy(), self.distances.copy(slot, count)
        away = np.flatnonzero(distances)
        if away.size:
            rows[away] = self._lender().take(self._places(slot + away, distances[away]))
        return rows

    def raw(self, slot: int, count: int) -> Array:
        """View a run of slots as they are: of rows that lie elsewhere there is nothing in it, or anything."""
        return super().part(slot, count)

    def reaches(self, slot: int, count: int) -> bool:
        """Say whether the rows with which those of a run lie have places: after a power cut perhaps not."""
        if slot + count > self.distances.ready:
            return False
        try:
            distances = self.distances.copy(slot, count)
            away = np.flatnonzero(distances)
            return not away.size or self._places(slot + away, distances[away]).size > 0
        except CorruptionError:
            return False

    def stored(self, slot: int, count: int) -> Iterator[tuple[int, int, bool]]:
        """Cut a run of slots into those that hold their rows and others: (first, slots, whether they do)."""
        return runs_of(self.distances.copy(slot, count), slot)

    def parts_to_sum(self, slot: int, count: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the bytes of a run of slots, with zeros for rows that lie elsewhere, piece by piece."""
        each = max(1, _PIECE_BYTES // self.row_bytes)
        zeros = np.zeros(min(each, count) * self.row_bytes, np.uint8)
        for first, n, own in self.stored(slot, count):
            for start in range(first, first + n, each):
                some = min(each, first + n - start)
                if own:
                    rows = self.read(start, some) if self.fills else self.raw(start, some)
                    yield rows.reshape(-1).view(np.uint8)
                else:
                    yield zeros[: some * self.row_bytes]

    # -- writing ---------------------------------------------------------------------------------

    def append(
        self,
        slot: int,
        rows: Array,
        distances: IntArray,
        write: Callable[[File, Array, int], None],
        *,
        again: bool,
    ) -> None:
        """Write a run of rows.

        Args:
            slot: Of the first of them.
            rows: C-contiguous. Shape `(n, *row shape)`.
            distances: How many rows before each the partner has the same bytes, which stay as long as this
                row can be read; 0: nowhere. Shape `(n,)`.
            write: Writes an array to a file at an offset, now or later.
            again: Whether older rows may have been in these slots.
        """
        for first, n, own in runs_of(distances, slot):
            if not own:
                self._leave_out(first, n, again=again)
                continue
            self._end_run()
            for file, at, row, some in self.spans(first, n):
                start = first - slot + row
                write(file, rows[start : start + some], at)
        how_far = distances.astype(np.uint16)
        for file, at, row, some in self.distances.spans(slot, len(rows)):
            file.write(how_far[row : row + some], at)

    def _leave_out(self, slot: int, count: int, *, again: bool) -> None:
        """Note that a run of rows lies elsewhere; give back the space of older ones in their slots."""
        if slot != self._left[1]:
            self._end_run()
            self._left = slot, slot
        if not again:
            self._left = slot + count, slot + count
            return
        self._left = self._left[0], slot + count
        start, end = self._unneeded()
        if end - start >= tuning.DEDUP_FREE_BYTES:
            self.give_back()

    def _unneeded(self) -> tuple[int, int]:
        """Return the first byte, of all shards, that can be given back, and the one behind."""
        (first, stop), width = self._left, self.row_bytes
        return max(
            self._given_back, -(-first * width // tuning.DEDUP_PAGE_BYTES) * tuning.DEDUP_PAGE_BYTES
        ), stop * width // tuning.DEDUP_PAGE_BYTES * tuning.DEDUP_PAGE_BYTES

    def give_back(self) -> None:
        """Give back the space of older rows in the slots that were left out last."""
        start, end = self._unneeded()
        size = self.rows * self.row_bytes  # whole pages
        for number in range(start // size, -(-end // size)) if end > start else ():
            base = number * size
            self.files[number].punch(max(start, base) - base, min(end, base + size) - base)
        self._given_back = max(start, end)

    def _end_run(self) -> None:
        """Take the next slot that is left out for the first one."""
        self.give_back()
        self._left, self._given_back = (0, 0), 0

    def write_rows(self, slots: IntArray, values: Array) -> list[File]:
        """Write single rows, which lie here from now on; return the files touched."""
        self._end_run()  # they may be among those
        touched = super().write_rows(slots, values)  # first: until then the partner has them
        return [*touched, *self.distances.write_rows(slots, np.zeros(slots.size, np.uint16))]


def runs_of(distances: Array, slot: int) -> Iterator[tuple[int, int, bool]]:
    """Cut a run of slots: (first, slots, whether these hold their rows). Shape `(n,)`."""
    away = distances > 0
    cuts = np.flatnonzero(away[1:] != away[:-1]) + 1
    for start, stop in itertools.pairwise([0, *cuts.tolist(), len(away)]):
        if stop > start:
            yield slot + start, stop - start, not away[start]
