"""All columns of a store: made, opened, looked at and read together.

Used by `ZarrStorage`, followers and checks; `expstore.storages.columns.column_set_writer` adds writing. Which
of them are packed says each array's own zarr.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import google_crc32c
import numpy as np

from expstore.core import tuning
from expstore.core.values import Array, IntArray, cut_run
from expstore.disk.files import Disk, File
from expstore.disk.filesystem import fills_holes
from expstore.errors import StorageError
from expstore.schema.schema import Field
from expstore.storages.columns.flat import REWRITE_BYTES, Column, shard_rows
from expstore.storages.columns.packed.column import PackedRows
from expstore.storages.columns.packed.reader import PackedReader
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.chunk_file import ANY_TURN
from expstore.storages.format.paths import SEGMENTS
from expstore.storages.format.zarr_metadata import make_metadata, read_layout, read_packing

if TYPE_CHECKING:
    from expstore.storages.columns.arrow.segments import Segments

__all__ = ["ColumnGroup", "add_batches", "taken"]

_Thing = TypeVar("_Thing")

_ID = ("_row", "id")
#: Slots that are looked at to learn how many rows a column's chunks hold.
_SAMPLE = 65_536


class ColumnGroup:
    """Keep all columns of a store below one folder.

    Args:
        disk: Where files are touched.
        folder: `columns/`.
        fields: The user's fields, then the row fields, priority last.
        slots: How many rows a ring has; None: it grows.
        write: Whether rows are written; see `Column`. Else shards are as long as zarr.json says.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        fields: Sequence[Field],
        slots: int | None,
        *,
        write: bool = True,
    ) -> None:
        self._disk = disk
        self.folder = folder
        self.slots = slots
        #: Whether reading a hole through a map takes space here.
        self.fills = fills_holes(disk, folder)
        #: Which fields have no fixed size, and where their rows are.
        self.segment_places = tuple(place for place, entry in enumerate(fields) if entry.variable)
        self.segments = self._find_segments([fields[p] for p in self.segment_places], write=write)
        make = self._make if write else self._find
        self.columns: list[Column] = [make(folder.joinpath(*entry.key), entry, slots) for entry in fields]
        self.new_folders: set[Path] = set()
        self._ready = 0
        self.link_partners()
        self.row_bytes = sum(column.row_bytes for column in self.columns)

    def _find_segments(self, fields: Sequence[Field], *, write: bool) -> Segments | None:
        """Return where the rows of fields without a fixed size are; None: there are no such fields."""
        if not fields:
            return None
        from expstore.storages.columns.arrow.reader import SegmentReader

        return SegmentReader(self._disk, self.folder.parent / SEGMENTS, fields, self.slots)

    def link_partners(self) -> None:
        """Tell packed columns where the next ones are, with which rows may lie."""
        #: Rows of the first one may lie with the second one: their places.
        self.pairs: dict[int, int] = {}
        packed = {c.entry.key: (p, c) for p, c in enumerate(self.columns) if isinstance(c, PackedRows)}
        for key, (place, column) in packed.items():
            other, partner = packed.get(("next", *key), (-1, None))
            if partner is None or not column.packing.shares:
                continue
            if (partner.entry.dtype, partner.entry.shape) == (column.entry.dtype, column.entry.shape):
                column.partner, self.pairs[place] = partner, other

    def take(self, slots: IntArray, places: Sequence[int]) -> list[Array]:
        """Copy rows of columns out as they are kept; what has rows of two of them is read once.

        Args:
            slots: Shape `(n,)`.
            places: Of the columns.

        Returns:
            One array per column. Shapes `(n, *row shape)`.

        Raises:
            CorruptionError: They lie in a damaged file.
        """
        taken: dict[int, Array] = {}
        for place, other in self.pairs.items():
            column = self.columns[place]
            if isinstance(column, PackedRows) and place in places and other in places:
                taken[place], taken[other] = column.take_pair(slots)
        apart = [place for place in places if place in self.segment_places]
        if self.segments is not None and apart:
            numbers = [self.segment_places.index(place) for place in apart]
            found: Any = self.segments.take(self.segments.ids_of(slots), numbers)
            taken |= dict(zip(apart, found, strict=True))
        return [taken[p] if p in taken else self.columns[p].take(slots) for p in places]

    def _make(self, folder: Path, entry: Field, slots: int | None) -> Column:
        if entry.variable:
            return self._segment_column(folder, entry)
        return Column(self._disk, folder, entry, slots, fills=self.fills)

    def _find(self, folder: Path, entry: Field, slots: int | None) -> Column:
        """Return a column for reading; one whose metadata cannot be read is damaged as a whole."""
        if entry.variable:
            return self._segment_column(folder, entry)
        try:
            packing = read_packing(self._disk, folder, entry)
            if packing is not None:
                return PackedReader(self._disk, folder, entry, slots, packing)
            layout, fault = read_layout(self._disk, folder, entry), None
        except StorageError as exc:
            layout, fault = None, exc.message
        how: Any = {"layout": layout, "write": False, "fills": self.fills}
        column = Column(self._disk, folder, entry, slots, **how)
        column.fault = fault
        return column

    def _segment_column(self, folder: Path, entry: Field) -> Column:
        from expstore.storages.columns.arrow.column import SegmentColumn

        assert self.segments is not None
        return SegmentColumn(entry, self.segments, self.segments.fields.index(entry), folder)

    @staticmethod
    def create(
        disk: Disk,
        folder: Path,
        fields: Sequence[Field],
        slots: int | None,
        pool: ThreadPoolExecutor | None,
        attributes: dict[str, Any],
        packings: Sequence[Packing | None] = (),
    ) -> None:
        """Make the Zarr metadata of empty columns aside, sync it, and rename it in."""
        aside = folder.with_name(folder.name + ".tmp")
        disk.remove_tree(aside)
        disk.remove_tree(folder)
        folders = {aside}
        files = []
        if any(entry.variable for entry in fields):
            segments = folder.parent / SEGMENTS
            disk.remove_tree(segments)
            disk.make_dir(segments)
            folders.add(segments)
        packings = [
            packing
            for entry, packing in zip(fields, packings or [None] * len(fields), strict=True)
            if not entry.variable
        ]
        fields = [entry for entry in fields if not entry.variable]
        rows = [shard_rows(entry.row_bytes, slots) for entry in fields]
        try:
            made = make_metadata(fields, rows, slots, attributes, packings=packings)
            for name, data in made.items():
                path = aside / name
                disk.make_dir(path.parent)
                folders.update(p for p in path.parents if p.is_relative_to(aside))
                file = disk.open(path, create=True)
                files.append(file)
                file.write(data, 0)
            disk.sync_all(files, sorted(folders), pool)
        finally:
            for file in files:
                file.close()
        disk.rename(aside, folder)
        disk.sync_dir(folder.parent)

    @property
    def ready(self) -> int:
        """How many slots have a place in a shard of every column."""
        return self._ready

    def open_shards(self) -> None:
        """Open what is there."""
        if self.segments is not None:
            self.segments.open_all()
        for column in self.columns:
            column.open_shards()
        for column in self.columns:
            column.look_for_true()
        self._ready = min(column.ready for column in self.columns)

    def look(self, slots: int, *, due: bool = True) -> None:
        """Open, for reading only, what slots 0 to `slots` - 1 need; note what is damaged."""
        if self.segments is not None:
            self.segments.open_all()
        for column in self.columns:
            column.look(slots, due=due)
        self._ready = min(column.ready for column in self.columns)

    def look_to(self, last: int) -> None:
        """Find the rows up to this id that are packed or in segments, beside who has written them."""
        if self.segments is not None:
            self.segments.look_to(last)
        for column in self.columns:
            if isinstance(column, PackedReader):
                column.look_to(*self.place_behind(last))

    def end_at(self, last: int) -> None:
        """Let only packed rows up to this id be found, and those in segments; there is no writer any more."""
        if self.segments is not None:
            self.segments.end_at(last)
        for column in self.columns:
            if isinstance(column, PackedReader):
                column.end_at(*self.place_behind(last))

    @property
    def summed(self) -> list[Column]:
        """Columns that have checksums, in the order of these."""
        return self.columns[:-1]

    @property
    def unviewed_places(self) -> frozenset[int]:
        """Columns whose rows cannot be viewed: packed, or in segments."""
        return frozenset(place for place, column in enumerate(self.columns) if not column.viewed)

    def place_behind(self, last: int) -> tuple[int, int]:
        """Return turn of the ring and slot of the row behind this one."""
        return (0, last) if self.slots is None else divmod(last, self.slots)

    def packed_size(self, column: PackedRows) -> tuple[float | None, IntArray]:
        """Return how a packed column is compressed, by its chunks in the files, whatever turn they are of.

        Returns:
            How many times more the rows in them would take as they are; None: there are none. And the slots
            of those rows, or of a sample. A chunk can have gaps, where rows were skipped that nobody would
            ever have read.
        """
        chunks, turns, used = column.packed_chunks()
        if not chunks.size:
            return None, np.empty(0, np.int64)
        each = column.packing.rows
        picked = np.arange(chunks.size * each)
        if picked.size > _SAMPLE:
            picked = np.unique(np.random.default_rng(0).integers(0, picked.size, _SAMPLE))
        slots = chunks[picked // each] * each + picked % each
        held = slots
        if self.slots is not None:
            (column_of_ids,) = [one for one in self.columns if one.entry.key == _ID]
            ready = slots < column_of_ids.ready
            slots, turn = slots[ready], turns[picked // each][ready]
            # Not `take`: rows may be holes. Nothing else is read, but where holes must not be mapped.
            ids = column_of_ids.copy(0, int(slots.max(initial=-1)) + 1)[slots] - 1
            there = (ids >= 0) & (ids % self.slots == slots)
            held = slots[there & ((ids // self.slots == turn) | (turn == ANY_TURN))]
        raw = chunks.size * column.chunk_bytes * held.size / picked.size
        return (round(raw / used, 2) or None), held

    def do_without_threads(self) -> None:
        """Never copy rows with torch: a forked process lacks the threads that it may wait for."""
        for column in self.columns:
            column.wide_row = column.row_bytes + 1

    @property
    def damaged(self) -> list[str]:
        """What is wrong with shards that cannot be read."""
        return sorted({found for column in self.columns for found in column.damaged.values()})

    def require(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Check that these slots have a place; raise CorruptionError if not."""
        for slot, _, n in pieces:
            for column in self.columns:
                column.require(slot + n if n else 0)

    def require_rows(self, first_id: int, count: int) -> None:
        """Check that rows have a place, and that packed ones and those in segments are there.

        Raises:
            CorruptionError: They are not.
        """
        if self.segments is not None and count:
            self.segments.require(first_id, count)
        pieces = cut_run(first_id, count, self.slots)
        self.require(pieces)
        for slot, offset, n in pieces:
            turn, _ = self.place_behind(first_id + offset - 1)
            for column in self.columns if n else ():
                column.require_rows(slot, n, turn)
        for place, other in self.pairs.items():
            older = self._older(place, first_id, count)
            for slot, offset, n in cut_run(int(older[0]), older.size, self.slots) if older.size else ():
                turn, _ = self.place_behind(int(older[0]) + offset - 1)
                self.columns[other].require_rows(slot, n, turn)

    def _older(self, place: int, first_id: int, count: int) -> IntArray:
        """Return ids of rows before a run, up to which from the first one on rows of it may lie."""
        column = self.columns[place]
        if not isinstance(column, PackedRows) or not count:
            return np.empty(0, np.int64)
        ids = np.arange(first_id, first_id + min(count, tuning.PACKED_LOOKBACK_ROWS[1]))
        lent = ids - column.distances(ids - 1 if self.slots is None else (ids - 1) % self.slots)
        oldest = int(lent.min())
        return np.arange(oldest, max(oldest, int(lent[lent < first_id].max(initial=oldest - 1)) + 1))

    def lacks(self, first_id: int, count: int) -> bool:
        """Return whether rows that are packed, or in segments, are not there as they were written."""
        if self.segments is not None and count and not self.segments.is_whole(first_id, count):
            return True
        return any(
            isinstance(column, PackedRows)
            and column.lacks(slot, n, self.place_behind(first_id + offset - 1)[0])
            for slot, offset, n in cut_run(first_id, count, self.slots)
            for column in (self.columns if n else ())
        )

    def ensure(self, slots: int) -> None:
        """Make shards so that slots 0 to `slots` - 1 have a place."""
        if slots <= self._ready:
            return
        for column in self.columns:
            while column.ready < slots:
                made = column.add_shard()  # takes a while, in which the set may be emptied
                self.new_folders.update(made)
        self._ready = min(column.ready for column in self.columns)

    def checksum(self, first_id: int, count: int) -> int:
        """Return the crc32c that `write` returned for these rows, from what stands on disk; -1: none does."""
        runs = cut_run(first_id, count, self.slots)
        crc = 0
        for column in self.columns[:-1]:
            if column.entry.variable:
                continue
            for slot, _, n in runs:
                if slot + n > column.ready:
                    return -1
                # What cannot be viewed is copied for it: piece by piece.
                step = n if column.viewed else max(1, REWRITE_BYTES // column.row_bytes)
                for start in range(slot, slot + n, step):
                    rows = column.copy(start, min(step, slot + n - start))
                    crc = google_crc32c.extend(crc, rows.reshape(-1).view(np.uint8))
        if self.segments is None or not count:
            return crc
        batches = self.segments.checksums(first_id, count)
        return -1 if batches is None else add_batches(crc, batches)

    def rewrite(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Write rows again as they read, so that a sync brings them to the disk for sure."""
        for slot, _, n in pieces:
            for column in self.columns:
                if column.packed:
                    continue  # settling does it
                step = max(1, REWRITE_BYTES // column.row_bytes)
                for start in range(slot, slot + n, step):
                    for file, at, row, rows in column.spans(start, min(step, slot + n - start)):
                        file.write(column.view[start + row : start + row + rows].copy(), at)

    def files_of(self, pieces: Iterable[tuple[int, int, int]]) -> set[File]:
        """Return the files that hold these slots, as far as they were ever written to."""
        return {
            file
            for slot, _, n in pieces
            for column in self.columns
            for file, _, _, _ in column.spans(slot, min(n, column.ready - slot))
        }

    def close(self) -> None:
        """Close all files."""
        for column in self.columns:
            column.close()
        if self.segments is not None:
            self.segments.close()


def add_batches(crc: int, checksums: Sequence[int]) -> int:
    """Return the crc32c of rows that go on in batches with these."""
    for checksum in checksums:
        crc = google_crc32c.extend(crc, checksum.to_bytes(4, "little"))
    return crc


def taken(things: set[_Thing]) -> set[_Thing]:
    """Empty a set to which another thread may be adding; return what was in it."""
    found: set[_Thing] = set()
    while things:
        found.add(things.pop())
    return found
