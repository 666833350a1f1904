"""Write segments: append batches, seal and merge segments, and remove segments without remaining rows.

Used by the Arrow storage. Rows are appended in the order of their ids. The storage decides which rows are
published, covered by a checkpoint or deleted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from expstore.core import tuning
from expstore.core.id_set import NO_IDS, IdSet
from expstore.core.values import Array, IntArray, key_name
from expstore.disk.checkpointed import Checkpoint, Dirty, take_all
from expstore.disk.files import Disk, File
from expstore.disk.mapped_files import AddressRange
from expstore.errors import CorruptionError, SchemaError, StorageError
from expstore.schema.schema import Field
from expstore.storages.columns.arrow.column import in_place
from expstore.storages.columns.arrow.ipc import END, Header, encode, read_header
from expstore.storages.columns.arrow.pieces import Piece, split_elements
from expstore.storages.columns.arrow.prefixes import Links, PrefixFinder, Source
from expstore.storages.columns.arrow.segments import Segment, Segments
from expstore.storages.columns.column import Appender, Deleted, Run, WrittenPart

_logger = logging.getLogger("expstore")

#: Temporary name of a segment that is written again, until it is complete.
AGAIN = "again"
#: Number of segments of about the same length that are merged into one.
_TOGETHER = 8
_LEAST = 4096
_NONE = np.zeros(0, np.int64)


class SegmentWriter(Segments, WrittenPart, Appender):
    """Write variable-length rows.

    Threads: one appends; one other may remove and merge meanwhile; any number take rows. Crashes: a batch
    that was written can be found again after a kill; after a power failure, all synced batches can.

    Args:
        disk: Access to files.
        folder: The folder `segments/`.
        fields: The variable-length fields, in the order of the schema.
        slots: Number of slots of a ring; None: the store is unbounded.
        compression: "lz4" or "zstd"; None: no compression.
        generation: Generation of the writer, which is stored in batches.
    """

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        fields: Sequence[Field],
        slots: int | None,
        *,
        compression: str | None = None,
        generation: int = 0,
    ) -> None:
        super().__init__(disk, folder, fields, slots, compression=compression)
        self.compression, self.generation = compression, generation
        self._open: Segment | None = None
        self._torn = False  # whether a write after the end of the open segment has failed
        self._finished: list[Segment] = []  # sealed, but not synced yet
        self._marking: list[Segment] = []  # segments that the running checkpoint syncs
        self._marked = 0
        self._low, self._deleted = 0, NO_IDS  # all rows up to this id were removed, and these
        self._gone: IdSet | None = NO_IDS  # removed rows, without those that remaining rows continue
        self._owners: dict[Path, tuple[int, IntArray]]
        #: Returns the ids of the newest stored rows of an episode, before a row, ascending.
        self.find_rows: Callable[[int, int], IntArray] = lambda episode, row: np.zeros(0, np.int64)
        self._forget_prefixes()
        self._unsound: set[Path] = set()  # segments with damaged batches, which are kept for a repair
        self.touched: set[File] = set()
        self.new_folders: set[Path] = set()
        #: Bytes that were written since the last sync began.
        self.unsynced_bytes = 0

    # -- opening ---------------------------------------------------------------------------------

    def open_files(self) -> None:
        """Find all segments; `settle` then decides which rows are valid."""
        self._disk.unlink(self.folder / AGAIN)  # left over from an opening or a merge that was killed
        found: list[Segment] = []
        top = 0
        for path in self.paths():
            segment = self._open_segment(path, write=False)
            if not segment.sealed:  # sealed segments may be hard links of snapshots, and do not change
                self._close_file(segment)
                segment = self._open_segment(path)
            if segment.last <= top:  # merged into another segment, or without a whole batch
                self._close_file(segment)
                self._disk.unlink(path)
                self.new_folders.add(self.folder)
                continue
            top = segment.last
            found.append(segment)
        self.show_all(found)

    def _open_segment(self, path: Path, *, write: bool = True) -> Segment:
        """Open the file of a segment and find its batches."""
        file = self._disk.open(path, write=write)
        segment = self.scan(path, file, size=file.size())
        segment.file = file
        return segment

    def _close_file(self, segment: Segment) -> None:
        """Close the file of a segment; its bytes need not be synced any more."""
        if segment.file is not None:
            self.touched.discard(segment.file)
            segment.file.close()
            segment.file = None

    def settle(self, last: int, synced: int) -> None:
        """Continue after the last valid row; see `Appender`. Bytes that a checkpoint covers are kept."""
        with self.changing:
            self._forget_prefixes()
            self._cut(last)
            for segment in self.segments:
                if segment.last > synced and segment.file is not None:
                    newer = [header.last > synced for header in segment.headers].index(True)
                    start = segment.offsets[newer] if newer else 0
                    if segment.sealed:  # it was opened for reading
                        self._close_file(segment)
                        segment.file = self._disk.open(segment.path)
                    segment.file.write(segment.read(start, segment.end - start), start)
                    self.touched.add(segment.file)
            if last > synced:
                self.new_folders.add(self.folder)
            self._go_on()
            self._set_top(last)

    def _cut(self, last: int) -> None:
        """Drop the rows after this one."""
        kept = [segment for segment in self.segments if 0 < segment.first <= last]
        for segment in self.segments[len(kept) :]:
            self._remove(segment)
        if kept and kept[-1].last > last:
            kept[-1] = self._cut_segment(kept[-1], last)
            if not kept[-1].headers:
                self._remove(kept.pop())
        self._open = None
        self._set_top(0)
        self.show_all(kept)

    def _remove(self, segment: Segment) -> None:
        self._close_file(segment)
        self._disk.unlink(segment.path)
        self.new_folders.add(self.folder)

    def _cut_segment(self, segment: Segment, last: int) -> Segment:
        """Drop the rows of a segment after this one; snapshots and readers keep the former file."""
        number = next(i for i, header in enumerate(segment.headers) if header.last > last)
        at, torn = segment.offsets[number], segment.headers[number]
        messages: list[Array] = []
        if torn.first <= last:  # the journal has committed only some rows of this batch
            rows = self.gather_stored(np.arange(torn.first, last + 1), range(len(self.fields)))
            messages = self.encode(torn.first, rows)
        return self._write_again(
            segment, [np.frombuffer(segment.read(0, at), np.uint8), *messages], ends=False
        )

    def rewrite(self, path: Path, batches: Sequence[tuple[int, bytes]]) -> None:
        """Write a segment with these batches; it is durable when this returns. No file may be open meanwhile.

        Args:
            path: The segment's path.
            batches: Id of the first row of each batch, and its message.
        """
        parts = [self.head, *(message for _, message in sorted(batches))]
        self._put_again(path, [np.frombuffer(part, np.uint8) for part in parts], ends=True)

    def _write_again(self, segment: Segment, parts: Sequence[Array], *, ends: bool) -> Segment:
        """Replace the file of a segment by one with these bytes, which is durable when this returns."""
        self._put_again(segment.path, parts, ends=ends)
        self._close_file(segment)
        return self._open_segment(segment.path)

    def _put_again(self, place: Path, parts: Sequence[Array], *, ends: bool) -> None:
        with self._disk.build_file(place, self.folder / AGAIN) as file:
            end = 0
            for part in parts:
                file.write(part, end)
                end += part.nbytes
            if ends:
                file.write(END, end)
        self._disk.sync_dir(self.folder)

    def _go_on(self) -> None:
        """Append to the last segment if it is not sealed yet; seal and close the others."""
        for segment in self.segments[:-1]:
            if not segment.sealed:
                self._end(segment)
            else:
                self._let_go(segment)
        if not self.segments:
            return
        newest = self.segments[-1]
        if newest.sealed or newest.end + len(END) >= tuning.ARROW_SEGMENT_BYTES or newest.file is None:
            if not newest.sealed:
                self._end(newest)
            else:
                self._let_go(newest)
            return
        newest.file.truncate(newest.end)  # bytes after it were never published
        newest.file.truncate(tuning.ARROW_SEGMENT_BYTES)
        longer = AddressRange(tuning.ARROW_SEGMENT_BYTES)
        longer.attach(newest.file, at=0, size=tuning.ARROW_SEGMENT_BYTES)
        newest.addresses = longer
        self.touched.add(newest.file)
        self._open = newest
        self.show_all(self.segments)

    def _let_go(self, segment: Segment) -> None:
        """Close the file of a sealed segment, after the next sync if it has unsynced bytes."""
        if segment.file is None:
            return
        if segment.file in self.touched:
            self._finished.append(segment)
        else:
            segment.file.close()
            segment.file = None

    # -- writing ---------------------------------------------------------------------------------

    def write(self, run: Run) -> list[int]:
        """Append rows; return the checksums of their batches."""
        if run.is_stored:
            return self._append_all(run.first_id, run.variable)
        if not self.parents:
            return self.append(run.first_id, run.variable)
        with self.changing:  # no row may be dropped between the choice and the write of pieces
            return self.append(run.first_id, run.variable, run)

    def write_again(self, run: Run, synced: int) -> None:
        """Append rows that are missing, when a store is opened."""
        if self.lacks(run.first_id, run.count):
            if self.top >= run.first_id:
                self.settle(run.first_id - 1, synced)
            self.write(run)

    def change_error(self, fields: Sequence[Field]) -> SchemaError:
        """Return the error that variable-length rows cannot be changed."""
        return in_place(fields, "their rows cannot be changed")

    def ranking_error(self, fields: Sequence[Field]) -> SchemaError:
        """Return the error that variable-length rows cannot be replaced by better ones."""
        return in_place(fields, "rows cannot be replaced by better ones")

    def check_removable(self, entry: Field) -> None:
        """Raise SchemaError if a field has variable length."""
        if entry in self.fields:
            raise SchemaError(
                f"field {key_name(entry.key)!r} has variable length: it shares files with other such "
                "fields and cannot be dropped",
                hint="create another store for rows without it",
            )

    def append(self, first_id: int, columns: Sequence[pa.Array], run: Run | None = None) -> list[int]:
        """Write a run of rows; rows that already exist, after a failure, are skipped.

        Args:
            first_id: Id of the first row.
            columns: One array per field. Length n.
            run: The rows with their other columns. None: no row continues another one.

        Returns:
            The checksums of their batches.
        """
        done = max(0, self.top + 1 - first_id)
        if done:
            columns = [column.slice(done) for column in columns]

        def split(number: int, first: int, column: pa.Array) -> pa.Array:
            return self._split(number, first, column, run)

        return self._append_all(first_id + done, columns, split)

    def _append_all(
        self,
        first_id: int,
        columns: Sequence[pa.Array],
        split: Callable[[int, int, pa.Array], pa.Array] | None = None,
    ) -> list[int]:
        """Write a run of rows in pieces; `split` returns rows of a continued field as they are stored."""
        checksums = []
        at, count = 0, len(columns[0])
        rows = self._rows_of_batch(columns, tuning.ARROW_WRITE_BYTES)
        while at < count:
            some = [column.slice(at, min(rows, count - at)) for column in columns]
            if split is not None:
                for number in self.parents:
                    some[number] = split(number, first_id + at, some[number])
            checksums += self._append(first_id + at, some)
            at += rows
        return checksums

    # -- rows that continue other rows -----------------------------------------------------------

    def _forget_prefixes(self) -> None:
        """Forget the rows in memory that new rows are compared with, and which segments were looked at."""
        #: Of each segment: how many batches were looked at, and which rows their rows continue.
        self._owners = {}
        self._finders = {
            number: PrefixFinder(
                self.kinds[number],
                read=partial(self._read_sources, number),
                find_rows=partial(self._name_rows, number),
                may_use=lambda ids: ~self.have_left(ids),
            )
            for number in self.parents
        }

    def _split(self, number: int, first_id: int, column: pa.Array, run: Run | None) -> pa.Array:
        """Return rows of a continued field as they are stored."""
        if run is None:
            return self.store_whole(first_id, number, column)
        here = slice(first_id - run.first_id, first_id - run.first_id + len(column))
        parents = run.parents.get(self.parents[number])
        none = np.zeros(len(column), np.int64)
        links = Links(run.episodes[here], run.steps[here], none if parents is None else parents[here])
        return self._finders[number].split(first_id, column, links)

    def _read_sources(self, number: int, ids: IntArray) -> list[Source]:
        """Return stored rows that can be continued."""
        ids = ids[self._find(self._locations, ids)[0] >= 0]
        if not ids.size:
            return []
        try:
            pieces, whole = self.read_pieces(ids, number), self._gather_whole(ids, number)
        except CorruptionError:
            return []  # new rows do not depend on rows that cannot be read
        found = []
        for at, value in enumerate(split_elements(whole)):
            parts, row = pieces.of_row(at), int(ids[at])
            if (own := len(value) - sum(part.size for part in parts)) > 0:
                parts.append(Piece(row, own))
            if pieces.some[at]:
                found.append(Source(row, parts, value, int(pieces.crcs[at])))
        return found

    def _name_rows(self, number: int, episode: int, row: int) -> list[tuple[int, int, int]]:
        """Return the newest rows of an episode: number of elements, checksum, id."""
        ids = self.find_rows(episode, row)
        ids = ids[self._find(self._locations, ids)[0] >= 0]
        try:
            pieces, counts = self.count_elements(ids, number)
        except CorruptionError:
            return []
        rows = zip(counts.tolist(), pieces.crcs.tolist(), ids.tolist(), strict=True)
        return [one for one, some in zip(rows, pieces.some, strict=True) if some]

    def _rows_of_batch(self, columns: Sequence[pa.Array], size: int) -> int:
        """Return how many rows make about `size` bytes."""
        held = sum(column.nbytes for column in columns)
        return max(1, len(columns[0]) * size // max(1, int(held)))

    def encode(self, first_id: int, columns: Sequence[pa.Array]) -> list[Array]:
        """Return rows as messages."""
        rows = self._rows_of_batch(
            columns, tuning.ARROW_COMPRESSED_BATCH_BYTES if self.compression else tuning.ARROW_BATCH_BYTES
        )
        return [
            encode(
                self.schema,
                [column.slice(at, rows) for column in columns],
                first=first_id + at,
                generation=self.generation,
                compression=self.compression,
            )
            for at in range(0, len(columns[0]), rows)
        ]

    def _append(self, first_id: int, columns: Sequence[pa.Array]) -> list[int]:
        """Write rows at once, as batches of one segment."""
        segment, messages = self._open, self.encode(first_id, columns)
        if segment is None or not _has_room(segment, messages):
            segment = self._begin(first_id, sum(message.nbytes for message in messages))
        return self._write_batches(segment, messages)

    def _write_batches(self, segment: Segment, messages: Sequence[Array]) -> list[int]:
        headers, offsets, size = [], [], 0
        for message in messages:
            header = read_header(_head_of(message))
            assert header is not None
            headers.append(header)
            offsets.append(size)
            size += message.nbytes
        assert segment.file is not None
        at = segment.end
        if self._torn:
            length = segment.file.size()
            segment.file.truncate(at)
            segment.file.truncate(length)
        self._torn = True
        segment.file.write(messages[0] if len(messages) == 1 else np.concatenate(messages), at)
        self._torn = False
        self.touched.add(segment.file)
        self.unsynced_bytes += size
        with self.changing:
            for header, offset in zip(headers, offsets, strict=True):
                segment.add(header, at + offset)
            if segment not in self.segments:
                self.segments.append(segment)
            self.show(segment, headers, [at + offset for offset in offsets])
        return [header.crc for header in headers]

    def _begin(self, first_id: int, size: int) -> Segment:
        """Create a segment with room for `size` bytes, and seal the one before."""
        if self._open is not None and self._open.headers:
            self._end(self._open)
            self._open = None
        bound = max(tuning.ARROW_SEGMENT_BYTES, len(self.head) + size + len(END))
        path = self.path_of(first_id)
        if self._open is not None:  # a segment without rows that was too short; readers may have its schema
            self._disk.unlink(path)
        file = self._disk.open(path, create=True)
        try:
            file.truncate(0)
            file.truncate(bound)
            file.write(self.head, 0)
            addresses = AddressRange(bound)
            addresses.attach(file, at=0, size=bound)
        except BaseException:
            file.close()
            raise
        if self._open is not None and self._open.file is not None:
            self._open.file.close()
        self.new_folders.add(self.folder)
        self._torn = False
        self._open = Segment(path, addresses, end=len(self.head), file=file)
        return self._open

    def _end(self, segment: Segment) -> None:
        """Seal a segment: it is never written to again."""
        if segment.file is not None:
            segment.file.write(END, segment.end)
            segment.file.truncate(segment.end + len(END))
            self.touched.add(segment.file)
            self._finished.append(segment)
        segment.sealed = True

    # -- checkpoints -----------------------------------------------------------------------------

    def note_left(self, low: int, deleted: IdSet) -> None:
        """Record which rows are removed, on disk already or with the next checkpoint.

        Args:
            low: All rows up to this id are removed.
            deleted: Rows above `low` that are removed.
        """
        with self.changing:  # rows that are appended from now on continue none of them
            if (low, deleted) != (self._low, self._deleted):
                self._low, self._deleted, self._gone = low, deleted, None

    def _find_gone(self) -> IdSet:
        """Return the rows whose space can be freed: removed rows that no remaining row continues."""
        gone = self._gone
        if gone is None:
            gone = self._deleted.join(IdSet.of([(1, self._low)] if self._low else []))
            needed = self._find_needed() if self.parents else NO_IDS
            if needed:
                gone = gone.intersect(IdSet(*needed.others(0, self.top)))
            self._gone = gone
        return gone

    def _find_needed(self) -> IdSet:
        """Return the removed rows that remaining rows continue; all rows if that cannot be read."""
        found = [_NONE]
        try:
            for segment in list(self.segments):
                if segment.last > self._low:
                    owners = self._list_owners(segment)
                    found.append(owners[self.have_left(owners)])
        except CorruptionError as exc:
            _logger.warning("no space of removed rows of %s is freed: %s", self.folder.parent, exc)
            return IdSet.of([(1, self.top)])
        return IdSet.of_ids(np.unique(np.concatenate(found)))

    def _list_owners(self, segment: Segment) -> IntArray:
        """Return the rows that rows of a segment continue; if one of them was removed, of remaining rows."""
        with self.changing:  # a batch is readable once it is in the list
            headers = list(segment.headers)
        done, owners = self._owners.get(segment.path, (0, _NONE))
        if headers[done:]:
            owners = np.union1d(owners, self._read_owners(_ids_of(headers[done:])))
            self._owners[segment.path] = len(headers), owners
        ids = _ids_of(headers) if self.have_left(owners).any() else _NONE
        left = self.have_left(ids)
        return self._read_owners(ids[~left]) if left.any() else owners

    def _read_owners(self, ids: IntArray) -> IntArray:
        """Return the rows that some rows continue."""
        return np.unique(np.concatenate([self.read_pieces(ids, number).owners for number in self.parents]))

    def have_left(self, ids: IntArray) -> Array:
        """Return which rows were removed from the store, so that they may be missing here. Shapes `(n,)`."""
        left: Array = (ids <= self._low) | self._deleted.holds(ids)
        return left

    @property
    def touched_files(self) -> set[File]:
        """The files that were written to since the last checkpoint began."""
        return self.touched.copy()

    def take_new_folders(self) -> set[Path]:
        """Return the folders with new names in them, each only once."""
        return take_all(self.new_folders)

    def begin_opening(self, low: int, deleted: IdSet) -> Dirty:
        """Return the files and folders with changes since the last checkpoint began."""
        self.note_left(low, deleted)
        return Dirty(take_all(self.touched), self.take_new_folders())

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return the files and folders that no checkpoint covers."""
        self._marking += self._finished
        self._finished = []
        self._marked = checkpoint.last
        self.unsynced_bytes = 0
        return self.begin_opening(checkpoint.low, checkpoint.deleted)

    def abort(self, dirty: Dirty) -> None:
        """Mark the segments that `begin` has returned as unsynced again."""
        self._finished = [*self._marking, *self._finished]
        self._marking = []

    def completed(self, *, tidy: bool) -> None:
        """Close synced segments; merge and remove segments if files may be removed."""
        for segment in self._marking:
            if segment.file is not None and segment.file not in self.touched:
                segment.file.close()
                segment.file = None
        self._marking = []
        if not tidy:
            return
        try:
            self._drop()
            self._merge(self._marked)
        except StorageError as exc:
            if exc.lost:
                raise
            # No row was moved: the next checkpoint tries again.
            _logger.warning("segments of %s are not merged: %s", self.folder.parent, exc)

    def free(self, deleted: Deleted) -> set[File]:
        """Free the space of removed rows; no file is changed in place.

        No checkpoint may run meanwhile, because it could merge segments.
        """
        self.note_left(deleted.low, deleted.above)
        self.give_up()
        return set()

    def give_up(self) -> None:
        """Free the space of rows whose removal is durable; no sync may be running.

        Segments without remaining rows are removed. A segment with at least half of its rows removed is
        written again without them.
        """
        self._drop()
        settled = self._find_settled()
        for segment, live in zip(settled, self._live(settled), strict=True):
            rows = sum(header.rows for header in segment.headers)
            if 2 * live <= rows and self._is_whole(segment):
                self._put_for([segment], _compact_segment(self, segment, self._find_gone()))

    def _find_settled(self) -> list[Segment]:
        """Return the segments that are sealed and synced."""
        with self.changing:
            return [segment for segment in self.segments if segment.sealed and segment.file is None]

    def _live(self, segments: Sequence[Segment]) -> list[int]:
        """Return the number of rows of each segment that remain, or that remaining rows continue."""
        first = np.array([segment.first for segment in segments], np.int64)
        last = np.array([segment.last for segment in segments], np.int64)
        gone = self._find_gone()
        live: list[int] = (last + 1 - first - gone.counts(last) + gone.counts(first - 1)).tolist()
        return live

    def _is_whole(self, segment: Segment) -> bool:
        """Return whether a segment has no damaged batch, which would be written again with a new checksum."""
        if segment.path in self._unsound:
            return False
        with self.reading(segment) as read:
            whole = all(segment.is_sound(number, read) for number in range(len(segment.headers)))
        if not whole:
            self._unsound.add(segment.path)
        return whole

    def _drop(self) -> None:
        """Remove the segments without remaining rows."""
        settled = self._find_settled()
        gone = [one for one, live in zip(settled, self._live(settled), strict=True) if not live]
        with self.changing:
            for segment in gone:
                self.replace(self._number(segment), 1, [])
        for segment in gone:
            self._disk.unlink(segment.path)

    def _number(self, segment: Segment) -> int:
        return next(number for number, one in enumerate(self.segments) if one is segment)

    def _merge(self, marked: int) -> None:
        """Merge short batches into long ones, and short segments into long ones."""
        settled = [segment for segment in self._find_settled() if segment.last <= marked]
        settled = [segment for segment in settled if segment.path not in self._unsound]
        size = self._merged_bytes
        chosen = _worth_merging(settled, segment_bytes=tuning.ARROW_SEGMENT_BYTES, batch_bytes=size)
        if chosen and all(self._is_whole(segment) for segment in chosen):
            self._put_for(chosen, _merge_segments(self, chosen, size))

    @property
    def _merged_bytes(self) -> int:
        """Length of the batches that short ones are merged into, bytes."""
        if not self.compression:
            return tuning.ARROW_COMPACTED_BYTES
        return tuning.ARROW_COMPRESSED_BATCH_BYTES // (1 if self.parents else 2)

    def _put_for(self, chosen: Sequence[Segment], parts: Sequence[Array]) -> None:
        """Replace some neighbouring segments by one with these bytes."""
        again = self._write_again(chosen[0], parts, ends=True)
        self._let_go(again)
        for segment in chosen:
            self._owners.pop(segment.path, None)
        with self.changing:
            self.replace(self._number(chosen[0]), len(chosen), [again])
        for segment in chosen[1:]:
            self._disk.unlink(segment.path)

    def give_back(self) -> None:
        """Free the disk space that is only needed for further writes."""
        segment = self._open
        if segment is None or segment.file is None or not segment.headers:
            return
        size = self._merged_bytes
        if self.parents and _has_short_batches(segment, size) and self._is_whole(segment):
            self._put_for([segment], _merge_segments(self, [segment], size))  # each message costs 300 bytes
            self._open = None
        else:
            segment.file.truncate(segment.end)

    def close(self) -> None:
        """Close the files; a map is removed with the last array over it."""
        super().close()
        if self._open is not None and self._open.file is not None:
            self._open.file.close()


def _has_room(segment: Segment, messages: Sequence[Array]) -> bool:
    """Return whether a segment has room for batches."""
    room = segment.addresses.size - segment.end - len(END)
    return (
        sum(message.nbytes for message in messages) <= room
        and len(segment.headers) < tuning.ARROW_SEGMENT_BATCHES
    )


def _head_of(message: Array) -> bytes:
    """Return a message up to its body."""
    size = 8 + int.from_bytes(message[4:8].tobytes(), "little")
    return message[:size].tobytes()


# -- compaction: which segments are merged, and the bytes of the merged segment ---------------------------

# Short batches are merged into long ones, and removed rows are left out, for rows that a checkpoint covers.


def _worth_merging(segments: Sequence[Segment], *, segment_bytes: int, batch_bytes: int) -> list[Segment]:
    """Return neighbouring segments that should be merged, or [].

    Each row is written again at most once for its batch, and once for each time its segment's length grows
    eightfold.

    Args:
        segments: Sealed segments, in the order of their ids.
        segment_bytes: Maximum length of a merged segment, bytes.
        batch_bytes: Maximum length of a merged batch, bytes.
    """
    for segment in reversed(segments):
        if len(segment.headers) > tuning.ARROW_COMPACTION_BATCHES and _has_short_batches(
            segment, batch_bytes
        ):
            return [segment]
    levels = [_level(segment.size) for segment in segments]
    for end in range(len(segments), _TOGETHER - 1, -1):
        run = segments[end - _TOGETHER : end]
        alike = len(set(levels[end - _TOGETHER : end])) == 1
        if alike and sum(segment.size for segment in run) <= segment_bytes:
            return list(run)
    return []


def _level(size: int) -> int:
    level = 0
    while size >= _LEAST * _TOGETHER ** (level + 1):
        level += 1
    return level


def _has_short_batches(segment: Segment, batch_bytes: int) -> bool:
    """Return whether batches are short, and merging would at least halve their number."""
    if segment.size >= len(segment.headers) * batch_bytes // 4:
        return False
    groups = list(_groups([segment], batch_bytes))
    return 2 * len(groups) <= len(segment.headers)


def _groups(segments: Sequence[Segment], batch_bytes: int) -> list[list[tuple[Segment, Header, int]]]:
    """Return the groups of consecutive batches that fit into one batch together."""
    found: list[list[tuple[Segment, Header, int]]] = []
    size = 0
    for segment in segments:
        for header, at in zip(segment.headers, segment.offsets, strict=True):
            follows = found and found[-1][-1][1].last + 1 == header.first
            if follows and size + header.size <= batch_bytes:
                found[-1].append((segment, header, at))
                size += header.size
            else:
                found.append([(segment, header, at)])
                size = header.size
    return found


def _merge_segments(writer: SegmentWriter, segments: Sequence[Segment], batch_bytes: int) -> list[Array]:
    """Return the bytes of a segment with the rows of these segments, without the end mark."""
    parts = [np.frombuffer(writer.head, np.uint8)]
    for group in _groups(segments, batch_bytes):
        segment, header, at = group[0]
        if len(group) == 1:
            parts.append(np.frombuffer(segment.read(at, header.size), np.uint8))
        else:
            first, last = group[0][1].first, group[-1][1].last
            rows = writer.gather_stored(np.arange(first, last + 1), range(len(writer.fields)))
            parts += writer.encode(first, rows)
    return parts


def _ids_of(headers: Sequence[Header]) -> IntArray:
    """Return the ids of the rows of batches; there is at least one batch."""
    return np.concatenate([np.arange(header.first, header.last + 1) for header in headers])


def _compact_segment(writer: SegmentWriter, segment: Segment, gone: IdSet) -> list[Array]:
    """Return the bytes of a segment without some rows, and without the end mark.

    Args:
        writer: Writes the segments.
        segment: One of them.
        gone: The rows to leave out.
    """
    parts = [np.frombuffer(writer.head, np.uint8)]
    near = gone.between(segment.first - 1, segment.last)
    for header, at in zip(segment.headers, segment.offsets, strict=True):
        firsts, lasts = near.others(header.first - 1, header.last)
        for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
            if (first, last) == (header.first, header.last):
                parts.append(np.frombuffer(segment.read(at, header.size), np.uint8))
            else:
                rows = writer.gather_stored(np.arange(first, last + 1), range(len(writer.fields)))
                parts += writer.encode(first, rows)
    return parts
