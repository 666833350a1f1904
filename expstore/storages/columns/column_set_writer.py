"""How a run of rows gets into all columns at once.

Used by the Zarr storage. Small batches are written by one compiled loop, long ones by
several threads. It decides nothing about order: payload and record are the storage's business.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from expstore.core.values import Array, IntArray
from expstore.disk.checkpointed import Checkpoint, Checkpointed, Dirty
from expstore.disk.files import KEEP_GIL_BYTES, Disk, File, address_of
from expstore.disk.threads import Threads
from expstore.errors import StorageError
from expstore.schema.schema import Field
from expstore.storages.columns.column_set import ColumnGroup, add_batches, taken
from expstore.storages.columns.dedup_finder import NextRows
from expstore.storages.columns.flat import Column
from expstore.storages.columns.packed.column import Filling, PackedRows
from expstore.storages.columns.packed.writer import PackedColumn
from expstore.storages.columns.payload import join_segments
from expstore.storages.format.chunk_encoding import reach_for
from expstore.storages.format.paths import SEGMENTS
from expstore.storages.format.zarr_metadata import read_packing

if TYPE_CHECKING:
    from expstore.storages.columns.arrow.writer import SegmentWriter

__all__ = ["Unnamed", "WritableColumns"]

_logger = logging.getLogger("expstore")
#: Batches up to this many bytes are written by one compiled loop, which keeps the GIL.
DIRECT_BYTES = 512 * 1024
#: Longer writes are cut into pieces of so many bytes, for several threads.
WRITE_BYTES = 2 << 20
WRITERS = 2
#: The row fields: id, episode, step, time, priority.
NUMBERS = 5
#: Shards of packed columns that are finished, and have no names yet.
Unnamed = list[tuple[PackedColumn, list[Filling]]]


@dataclass(frozen=True, slots=True)
class _Span:
    """Slots `low` to `high` - 1, which lie in one shard of every column that is written.

    Columns that hold nothing but False are not: a hole in a file reads as False already.
    """

    low: int
    high: int
    places: list[int]
    files: list[File]
    fds: IntArray
    widths: IntArray
    bases: IntArray  # first slot of each shard
    blank: list[int]
    wanted: int  # how many columns it was made for

    @classmethod
    def around(cls, columns: Sequence[Column], slot: int, blank: list[int], wanted: int) -> _Span:
        places = [place for place in range(wanted) if place not in blank and columns[place].viewed]
        chosen = [columns[place] for place in places]
        numbers = [slot // column.rows for column in chosen]
        files = [column.files[number] for column, number in zip(chosen, numbers, strict=True)]
        bases = np.array([number * column.rows for column, number in zip(chosen, numbers, strict=True)])
        return cls(
            low=int(bases.max()),
            high=min(int(base) + column.rows for column, base in zip(chosen, bases, strict=True)),
            places=places,
            files=files,
            fds=np.array([file.fd for file in files]),
            widths=np.array([column.row_bytes for column in chosen]),
            bases=bases,
            blank=blank,
            wanted=wanted,
        )


class WritableColumns(ColumnGroup, Checkpointed):
    """Columns that rows are written to, one thread at a time.

    Args:
        disk: Where files are touched.
        folder: `columns/`.
        fields: The user's fields, then the row fields, priority last.
        slots: How many rows a ring has; None: it grows.
        reach: How many rows before the oldest one that can be read stay as they are, in a ring.
        compression: Of rows without a fixed size: "narrow", "lz4" or "zstd"; None: none.
    """

    segments: SegmentWriter | None

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        fields: Sequence[Field],
        slots: int | None,
        *,
        reach: int = 0,
        compression: str | None = None,
    ) -> None:
        self._compression = compression
        super().__init__(disk, folder, fields, slots)
        self._threads = Threads(WRITERS, "expstore-write")
        self._reach = reach
        self._next_rows: dict[int, NextRows] = {}
        #: Files that were changed in place and that no checkpoint covers.
        self.touched: set[File] = set()
        self._unnamed: Unnamed = []  # finished shards of the checkpoint that runs
        self._look_through()

    def _look_through(self) -> None:
        """Find out which columns are packed, or flags."""
        self._flags = [(p, column) for p, column in enumerate(self.columns) if column.entry.dtype == "bool"]
        self._span: _Span | None = None
        #: Those that are packed, and their places.
        self.packed = [
            (p, column) for p, column in enumerate(self.columns) if isinstance(column, PackedColumn)
        ]
        # What others lean on comes first.
        self.packed.sort(key=lambda found: found[0] in self.pairs)
        each = max((column.packing.rows for _, column in self.packed), default=0)
        for place in self.pairs:
            entry = self.columns[place].entry
            near = reach_for(entry) if self.slots is None else min(self._reach - each, reach_for(entry))
            if near > 0:
                self._next_rows[place] = NextRows(entry.row_bytes, near)

    def reshaped(self, columns: Sequence[Column]) -> WritableColumns:
        """Return a group of other columns, of which some are these; this one is not to be written to then.

        Args:
            columns: The user's fields, then the row fields, priority last.
        """
        twin = copy.copy(self)
        twin.columns = list(columns)
        twin.segment_places = tuple(p for p, column in enumerate(columns) if column.entry.variable)
        twin.link_partners()
        twin.row_bytes = sum(column.row_bytes for column in twin.columns)
        twin._ready = min(column.ready for column in twin.columns)
        twin._next_rows = {}
        twin._look_through()
        return twin

    def _find_segments(self, fields: Sequence[Field], *, write: bool) -> SegmentWriter | None:
        if not fields:
            return None
        from expstore.storages.columns.arrow.writer import SegmentWriter

        folder = self.folder.parent / SEGMENTS
        return SegmentWriter(
            self._disk,
            folder,
            fields,
            self.slots,
            compression=self._compression,
        )

    def _make(self, folder: Path, entry: Field, slots: int | None) -> Column:
        if entry.variable:
            return super()._make(folder, entry, slots)
        packing = read_packing(self._disk, folder, entry)
        if packing is None:
            return super()._make(folder, entry, slots)
        return PackedColumn(self._disk, folder, entry, slots, packing)

    def warm(self) -> None:
        """Load the compiled loops of packed columns, in the background."""
        for _, column in self.packed:
            column.warm()
        if self.segments is not None:
            self.segments.warm()

    # -- packed columns --------------------------------------------------------------------------

    def settle(self, last: int, synced: int) -> None:
        """Let packed columns go on behind a row; the next sync brings that to the disk.

        Args:
            last: Id of the last row that counts.
            synced: The newest one that a mark covers.
        """
        self._settle_packed(last, synced)
        if self.segments is not None:
            self.segments.settle(last, synced)

    def _settle_packed(self, last: int, synced: int) -> None:
        for _, column in reversed(self.packed):
            column.settle(self.place_behind(last), self.place_behind(synced))

    @property
    def packed_files(self) -> set[File]:
        """The files of packed columns, and the segments, that were written to since the last sync."""
        segments = set() if self.segments is None else self.segments.touched.copy()
        return segments | {file for _, column in self.packed for file in column.touched.copy()}

    def take_packed(self) -> tuple[set[File], Unnamed]:
        """Return what packed columns have written, and the shards that are to be named once it is synced."""
        finished = [(column, column.note_mark()) for _, column in self.packed]
        files = {file for _, column in self.packed for file in taken(column.touched)}
        for _, column in self.packed:
            self.new_folders |= taken(column.new_folders)
        if self.segments is not None:
            files |= taken(self.segments.touched)
            self.new_folders |= taken(self.segments.new_folders)
        return files, finished

    # -- checkpoints -----------------------------------------------------------------------------

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return the files and folders that no checkpoint covers."""
        if self.segments is not None:
            self.segments.note_left(checkpoint.low, checkpoint.gaps)
            self.segments.begin_mark(checkpoint.last)
        files = taken(self.touched) | self.files_of(checkpoint.runs)
        packed, self._unnamed = self.take_packed()
        return Dirty(files | packed, taken(self.new_folders))

    def synced(self) -> None:
        """Give finished shards their names, after the fsync of what `begin` returned."""
        finished, self._unnamed = self._unnamed, []
        for column, fillings in finished:
            column.name(fillings)

    def completed(self, *, tidy: bool) -> None:
        """Reuse what only the former checkpoint needed, after the fsync of the record of this one."""
        for _, column in self.packed:
            column.note_marked()
        if self.segments is None:
            return
        try:
            self.segments.note_marked(tidy=tidy)
        except StorageError as exc:
            if exc.lost:
                raise
            # Rows are where they were: the next checkpoint tries again.
            _logger.warning("segments of %s are not merged: %s", self.folder.parent, exc)

    def abort(self, dirty: Dirty) -> None:
        """Take back what `begin` returned: it was not synced."""
        self.touched |= dirty.files
        self.new_folders |= dirty.folders
        for column, fillings in self._unnamed:
            column.put_back(fillings)
        self._unnamed = []
        if self.segments is not None:
            self.segments.put_back()

    def begin_opening(self) -> set[File]:
        """Return the packed files that an opening has written; `synced` and `completed` follow."""
        packed, self._unnamed = self.take_packed()
        return packed

    def take_new_folders(self) -> set[Path]:
        """Return, once, the folders with names that no checkpoint covers."""
        return taken(self.new_folders)

    def give_back(self) -> None:
        """Give back the disk space that only further writing needs."""
        for _, column in self.packed:
            column.give_back()
        if self.segments is not None:
            self.segments.give_back()

    def packed_now(self) -> dict[int, PackedRows]:
        """Return packed rows as they are at this moment, by place."""
        now = {place: column.as_now() for place, column in self.packed}
        for place, other in self.pairs.items():
            if place in now:
                now[place].partner = now[other]
        return now

    # -- rows ------------------------------------------------------------------------------------

    def write(
        self,
        pieces: Sequence[tuple[int, int, int]],
        columns: Sequence[Array],
        numbers: IntArray,
        priorities: Array,
    ) -> int:
        """Write a run of rows to all columns; return the crc32c of all but their priorities.

        Args:
            pieces: Where the run lies: (first slot, offset in the run, rows).
            columns: One per field, C-contiguous. Shapes `(n, *row shape)`.
            numbers: Ids, episodes, steps, times; C-contiguous. Shape `(4, n)`.
            priorities: Shape `(n,)`.
        """
        for slot, _, n in pieces:
            self.ensure(slot + n)
        jobs = self._begin_writing(pieces, columns, numbers, priorities)
        try:
            crc: int = 0
            for place, column in enumerate(columns):
                if place not in self.segment_places:
                    crc = google_crc32c.extend(crc, column)
            crc = google_crc32c.extend(crc, numbers)
            crc = add_batches(crc, self._append(int(numbers[0, 0]), columns))
        finally:
            _finish(jobs)
        return crc

    def _append(self, first_id: int, columns: Sequence[Any]) -> list[int]:
        """Write what has no fixed size of a run of rows; return the checksums of its batches."""
        if self.segments is None:
            return []
        return self.segments.append(first_id, [columns[place] for place in self.segment_places])

    def bytes_of(self, columns: Sequence[Any], count: int) -> int:
        """Return how many bytes the rows of a batch take.

        Args:
            columns: One array per field.
            count: How many rows.
        """
        return count * self.row_bytes + sum(int(columns[place].nbytes) for place in self.segment_places)

    def write_parts(
        self,
        pieces: Sequence[tuple[int, int, int]],
        parts: Sequence[bytes],
        priorities: Array | None,
        *,
        synced: int | None = None,
    ) -> None:
        """Write a run of rows given as bytes, priorities first.

        Args:
            pieces: Where the run lies: (first slot, offset in the run, rows).
            parts: The bytes of every column but priority, as `payload` has them.
            priorities: Shape `(n,)`; None leaves them as they are.
            synced: When a store is opened, the newest id that a mark covers: these rows may be there.
        """
        arrays: list[Any] = []
        count = sum(n for _, _, n in pieces)
        apart = [] if self.segments is None else join_segments(self, parts[-1])
        parts = parts[: len(self.columns) - 1]
        for column, part in zip(self.columns[:-NUMBERS], parts[: 1 - NUMBERS], strict=True):
            if column.entry.variable:
                arrays.append(apart[self.segment_places.index(len(arrays))])
                continue
            values = np.frombuffer(part, column.entry.numpy_dtype)
            arrays.append(values.reshape(count, *column.entry.shape))
        for slot, offset, n in pieces:
            self.ensure(slot + n)
            if priorities is not None:
                for file, at, row, rows in self.columns[-1].spans(slot, n):
                    file.write(priorities[offset + row : offset + row + rows].copy(), at)
        numbers = np.frombuffer(b"".join(parts[1 - NUMBERS :]), np.int64).reshape(NUMBERS - 1, count)
        before, there = int(numbers[0, 0]) - 1, False
        if synced is not None and not self._goes_on_behind(before):
            there = self._has_packed(before + 1, pieces, arrays)
            if not there:
                self._settle_packed(before, synced)
        _finish(self._begin_writing(pieces, arrays, numbers, None, but_packed=there))
        if self.segments is None or (synced is not None and self.segments.is_whole(before + 1, count)):
            return
        if synced is not None and self.segments.top > before:
            self.segments.settle(before, synced)
        self._append(before + 1, arrays)

    def _goes_on_behind(self, last: int) -> bool:
        """Return whether packed columns are settled, and this is the last row that they have."""
        return all(column.goes_on_at(self.place_behind(last)) for _, column in self.packed)

    def _has_packed(
        self, first_id: int, pieces: Sequence[tuple[int, int, int]], arrays: Sequence[Array]
    ) -> bool:
        """Return whether packed columns hold these very rows: then perhaps later ones, too, which stay."""
        return not self.lacks(first_id, sum(n for _, _, n in pieces)) and all(
            np.array_equal(
                column.part(slot, n).reshape(-1).view(np.uint8),
                arrays[place][offset : offset + n].reshape(-1).view(np.uint8),
            )
            for place, column in self.packed
            for slot, offset, n in pieces
        )

    def _begin_writing(
        self,
        pieces: Sequence[tuple[int, int, int]],
        columns: Sequence[Array],
        numbers: IntArray,
        priorities: Array | None,
        *,
        but_packed: bool = False,
    ) -> list[Future[None]]:
        """Write all columns, or all but priority; return what other threads still write."""
        blank = []
        for place, column in self._flags:
            if column.blank:
                # Never set again: a change in place may have written a True meanwhile.
                if np.count_nonzero(columns[place]):
                    column.blank = False
                else:
                    blank.append(place)
        arrays = [*columns, *numbers] if priorities is None else [*columns, *numbers, priorities]
        count = numbers.shape[1]
        for slot, offset, n in pieces if self.packed and not but_packed else ():
            first = int(numbers[0, offset]) - 1
            for place, packed in self.packed:
                rows, known = columns[place][offset : offset + n], self._next_rows.get(place)
                distances = None
                if known is not None:
                    distances = known.find(first, rows, columns[self.pairs[place]][offset : offset + n])
                packed.append(self.place_behind(first)[0], slot, rows, distances)
        return self._write_viewed(pieces, arrays, blank, count)

    def _write_viewed(
        self,
        pieces: Sequence[tuple[int, int, int]],
        arrays: Sequence[Array],
        blank: list[int],
        count: int,
    ) -> list[Future[None]]:
        """Write the columns of which all rows lie in their own slots."""
        if count * self.row_bytes > DIRECT_BYTES:
            return self._write_each(pieces, arrays, blank)
        wanted = len(arrays)
        span = self._span
        for slot, offset, n in pieces:
            if (
                span is None
                or span.wanted != wanted
                or span.blank != blank
                or not span.low <= slot <= slot + n <= span.high
            ):
                self._span = span = _Span.around(self.columns, slot, blank, wanted)
            if slot + n > span.high:
                _finish(self._write_each([(slot, offset, n)], arrays, blank))
                continue
            starts = np.array([address_of(arrays[place]) for place in span.places])
            if offset:
                starts += span.widths * offset
            sizes = span.widths if n == 1 else span.widths * n
            keep = arrays if not offset and n == count else [array[offset : offset + n] for array in arrays]
            parts = [keep[place] for place in span.places]
            self._disk.scatter(parts, span.files, span.fds, starts, sizes, (slot - span.bases) * span.widths)
        return []

    def _write_each(
        self, pieces: Sequence[tuple[int, int, int]], arrays: Sequence[Array], blank: Sequence[int]
    ) -> list[Future[None]]:
        """Write column by column: long runs, on several threads, and those that cross a shard's end."""
        jobs: list[Future[None]] = []
        try:
            for place, array in enumerate(arrays):
                column = self.columns[place]
                if place in blank or not column.viewed:
                    continue
                rows = max(1, WRITE_BYTES // column.row_bytes)
                for slot, offset, n in pieces:
                    for start in range(0, n, rows):
                        for file, at, row, some in column.spans(slot + start, min(rows, n - start)):
                            first = offset + start + row
                            self._write_some(file, array[first : first + some], at, jobs)
        except BaseException:
            _finish(jobs)
            raise
        return jobs

    def _write_some(self, file: File, part: Array, at: int, jobs: list[Future[None]]) -> None:
        if part.nbytes <= KEEP_GIL_BYTES:
            file.write(part, at)
        elif (job := self._disk.write_beside(self._threads, file, part, at)) is not None:
            jobs.append(job)

    def do_without_threads(self) -> None:
        """Write and read on the calling thread alone."""
        super().do_without_threads()
        self._threads.refuse()

    def close(self) -> None:
        """Close all files."""
        self._threads.shutdown()
        super().close()


def _finish(jobs: Sequence[Future[None]]) -> None:
    """Wait for writes, whatever comes in between; raise the first failure."""
    if not jobs:
        return
    interruption = None
    while True:
        try:
            wait(jobs)
            break
        except BaseException as exc:  # a write that goes on would reach the slots of later rows
            interruption = exc
    for job in jobs:
        if (failure := job.exception()) is not None:
            raise failure
    if interruption is not None:
        raise interruption
