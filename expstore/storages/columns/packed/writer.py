"""A wide field, packed: chunks of a few rows in Zarr shards that are never changed once finished.

Used by stores on disk together with flat columns. Rows arrive in the order of their slots. A chunk is
packed as soon as it is full, and appended to the shard that is being filled. The rows of a chunk that is not
full are in the file `partial`, and in memory. The column knows slots and laps of the ring, not which rows are
readable.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core import tuning
from expstore.core.id_set import IdSet
from expstore.core.values import Array, IntArray
from expstore.disk.files import Disk, File
from expstore.errors import StateError
from expstore.kernels.loader import compiling
from expstore.schema.schema import Field
from expstore.storages.columns.column import Deleted, WrittenPart
from expstore.storages.columns.packed.column import Filling, PackedPiece, PackedRows, Source
from expstore.storages.columns.packed.parts import Frame
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.chunk_file import (
    ANY_LAP,
    Chunks,
    no_chunks,
    pack_chunk,
    pack_index,
    read_index,
    scan_chunks,
)
from expstore.storages.format.zarr_metadata import grow_shape

#: Temporary name of a shard that is written again, until it is complete.
AGAIN = "again"
#: A shard is rewritten when at least one in this many of its bytes is unused.
_PART = 8


class PackedColumn(PackedRows, WrittenPart):
    """Store one wide field of all rows, packed.

    Rows are written in the order of their slots, by one thread. After the writer was killed, all written rows
    can be found again by opening the files; after a power failure, all synced rows.

    Crashes: a chunk's bytes are written to its shard before its rows are removed from `partial`. Rows that
    the last checkpoint depends on stay in `partial` until another checkpoint covers the chunk.

    Args:
        disk: The disk on which files are accessed.
        folder: The Zarr array's folder.
        entry: The field.
        slots: Number of slots of a ring, a multiple of the rows of a chunk; None: the column is unbounded.
        packing: How the field is packed.
    """

    def __init__(self, disk: Disk, folder: Path, entry: Field, slots: int | None, packing: Packing) -> None:
        super().__init__(disk, folder, entry, slots, packing)
        self._lap = self._next = 0  # lap and slot of the next row
        self._filling: Filling | None = None
        self._finished: list[Filling] = []
        self._sources: list[Source] = []
        self._sources_new = False  # whether `settle` has not run since the files were opened
        self._scrap: list[Path] = []  # shards of rows that were never committed
        #: By part of the rows of the chunk that is not full, how many parts before it its bytes are; 0: here.
        self._away = np.zeros((packing.rows, packing.parts), np.int64)
        self._former = 0  # length of the previous frame, bytes
        self._pack_chunks: Any = None
        #: How many rows after a row may be stored by reference to it.
        self.lent = 0
        self.touched: set[File] = set()
        self.new_folders: set[Path] = set()

    def _load(self) -> None:
        super()._load()
        with compiling:
            from expstore.kernels.blosc_encode import pack_chunks
        self._pack_chunks = pack_chunks

    # -- writing ---------------------------------------------------------------------------------

    def append(self, first_id: int, rows: Array, distances: IntArray | None = None) -> None:
        """Write a run of rows that does not cross the ring's end.

        Args:
            first_id: Id of the first row.
            rows: C-contiguous. Shape `(n, *row shape)`.
            distances: For each part, how many parts before it the same bytes are stored, which stay as long
                as this row is readable; 0: nowhere. None: all are 0. Shape `(n, parts)`.
        """
        if distances is None:
            distances = np.zeros((len(rows), self.packing.parts), np.int64)
        lap, slot = self.place_behind(first_id - 1)
        done = self._count_written(lap, slot, rows)
        if not done and (lap, slot) != (self._lap, self._next):
            self._move_to(lap, slot)
        each = self.packing.rows
        packed: list[bytes] = []  # chunks that come next
        while done < len(rows):
            inside = self._next % each
            some = min(each - inside, len(rows) - done)
            part = rows[done : done + some]
            self._away[inside : inside + some] = distances[done : done + some]
            if some == each:
                packed = packed or self._pack_some(rows[done:])
                self._add_chunk(part, packed.pop(0) if packed else b"")
            else:
                self._add_rows(inside, part)
            done += some
            self._next += some
            if self._next == self.slots:
                self._lap, self._next = self._lap + 1, 0

    def append_stored(self, pieces: Sequence[PackedPiece]) -> None:
        """Write rows as another column of this kind has them stored; those that they refer to come before."""
        for piece in pieces:
            if not piece.is_chunk:
                rows: Array = np.frombuffer(piece.data, self.entry.numpy_dtype)
                self.append(piece.first, rows.reshape(piece.rows, *self.entry.shape))
                continue
            lap, slot = self.place_behind(piece.first - 1)
            if (lap, slot) != (self._lap, self._next):
                self._move_to(lap, slot)
            self._add_chunk(self._locations.rows, piece.data)
            self._next += piece.rows
            if self._next == self.slots:
                self._lap, self._next = self._lap + 1, 0

    def _count_written(self, lap: int, slot: int, rows: Array) -> int:
        """Return how many of these rows are already written: after a failed write, rows are written again.

        Raises:
            StateError: Other rows were written there.
        """
        behind = self._next - slot + (0 if self.slots is None else (self._lap - lap) * self.slots)
        count = min(behind, len(rows))
        if count > 0 and self.part(slot, count).tobytes() != rows[:count].tobytes():
            raise StateError(f"{self.folder} already has other rows in these slots")
        return max(count, 0)

    def _move_to(self, lap: int, slot: int) -> None:
        """Seek to (lap, slot). Skipped slots have no readable rows."""
        each = self.packing.rows
        if self._locations.held and (lap, slot // each) != (self._lap, self._next // each):
            self._away[self._next % each :] = 0
            self._next -= self._next % each
            self._add_chunk(self._locations.rows)
            self._end_partial()
        filling = self._filling
        if filling is not None and (filling.shard, filling.lap) != (slot // self.packing.shard, lap):
            self._end_shard(filling)
        inside = slot % each
        held = min(self._locations.held, inside)
        self._lap, self._next = lap, slot - inside + held
        if held < inside:  # a follower reads a chunk's raw rows only if all of them are there
            self._away[held:inside] = 0
            self._add_rows(held, self._new_rows()[held:inside])
            self._next = slot

    def _add_rows(self, inside: int, rows: Array) -> None:
        """Add rows to the chunk that is not full."""
        locations, each = self._locations, self.packing.rows
        base, count = self._next - inside, inside + len(rows)
        if not locations.held:
            if self._partial.file is None:
                self.new_folders.add(self.folder)
            self._partial.begin(self._lap, base // each)
            locations = locations._replace(rows=self._new_rows())
        locations.rows[inside:count] = rows
        self._partial.write(inside, rows)
        self._touch_partial()
        if count == each:
            self._next = base  # `_add_chunk` expects the chunk's first slot
            self._add_chunk(locations.rows)
            self._next = base + inside
            self._end_partial()
        else:
            self._set_locations(locations._replace(base=base, held=count))

    def _touch_partial(self) -> None:
        if self._partial.file is not None:
            self.touched.add(self._partial.file)

    def _end_partial(self) -> None:
        self._partial.end()
        # A new state is set; readers that have the former one keep reading it.
        self._set_locations(self._locations._replace(base=0, held=0))

    def _pack_some(self, rows: Array) -> list[bytes]:
        """Pack the first chunks of some rows on all cores; return [] if that is not possible."""
        some = min(len(rows) // self.packing.rows, tuning.PACKED_CHUNKS_TOGETHER)
        how = self.packing.means.unshuffled
        if self._pack_chunks is None or self.packing.shares or how is None:
            return []
        block = self.packing.block_bytes(self.chunk_bytes, self._former)
        chunks: list[bytes] = self._pack_chunks(rows[: some * self.packing.rows], some, *how, block=block)
        return chunks

    def _add_chunk(self, rows: Array, chunk: bytes = b"") -> None:
        """Write a full chunk, which begins at the next slot; pack it unless its bytes are given."""
        shard, number = divmod(self._next // self.packing.rows, self.packing.chunks)
        filling = self._filling = self._filling or self._begin(shard, self._lap)
        chunk = chunk or self.packing.pack(rows, self._away, former=self._former)
        self._former = len(chunk) - self.packing.table_bytes or self._former
        offset = filling.add(number, pack_chunk(number, self._lap, chunk), self.head)
        self.touched.add(filling.file)
        locations, place = self._locations, self._next // self.packing.rows
        locations.sizes[place] = len(chunk) - self.packing.table_bytes - 4
        locations.laps[place] = self._lap
        locations.where[place] = filling.addresses.address + offset
        if number == self.packing.chunks - 1 or self._next + self.packing.rows == self.slots:
            self._end_shard(filling)

    def _begin(self, shard: int, lap: int) -> Filling:
        """Create a shard."""
        path = self.open_path(shard, lap)
        file = self._disk.open(path, create=True)
        try:
            file.truncate(self._bound)
            addresses = self._map(file, self._bound)
            if self.slots is None and shard:
                grow_shape(self._disk, self.folder, (shard + 1) * self.packing.shard)
        except BaseException:
            file.close()
            raise
        chunks = no_chunks(self.packing.chunks)
        self._show(shard, lap, addresses, chunks)
        self.new_folders.add(self.folder)
        return Filling(shard, lap, file, addresses, chunks)

    def _end_shard(self, filling: Filling) -> None:
        self._finish(filling)
        self._leave_former(filling)
        self._filling = None

    def _finish(self, filling: Filling) -> None:
        """Finish a shard; it gets its final name with the next sync."""
        index, end = pack_index(filling.chunks, table=self.packing.table_bytes), filling.chunks.end
        filling.file.write(index, end)
        filling.file.truncate(end + len(index))
        self.touched.add(filling.file)
        self._finished.append(filling)

    def ends_with(self, last: int) -> bool:
        """Return whether the column is settled and this row is its last one."""
        return not self._sources_new and self.place_behind(last) == (self._lap, self._next)

    # -- sync ------------------------------------------------------------------------------------

    def note_mark(self) -> list[Filling]:
        """Begin a checkpoint; return the completed shards, which are renamed once their bytes are durable."""
        self._partial.note_mark()
        finished, self._finished = self._finished, []
        return finished

    def note_marked(self) -> None:
        """Note that the checkpoint record is on the disk."""
        self._partial.note_marked()

    def note_synced(self) -> None:
        """Note that the touched files and new folders are synced; called by the thread that writes."""
        self._partial.note_synced()

    def name(self, finished: list[Filling]) -> None:
        """Give finished shards, whose bytes are durable, their final names, and remove them from the list.

        After an exception the list has the shards without a final name; `put_back` keeps them for a retry.
        """
        while self._scrap:
            self._disk.unlink(self._scrap[-1])
            self._scrap.pop()
            self.new_folders.add(self.folder)
        while finished:
            filling = finished[0]
            # An interrupted call may have renamed the file without removing the shard from the list.
            if self._disk.exists(filling.file.path):
                self._disk.rename(filling.file.path, self.shard_path(filling.shard))
            self.new_folders.add(self.folder)
            filling.file.close()
            del finished[0]

    def give_back(self) -> None:
        """Free disk space that only a writer needs."""
        self._partial.give_back()

    def put_back(self, finished: Sequence[Filling]) -> None:
        """Undo `note_mark`: the next call returns its shards again, and all files are synced again."""
        self._finished[:0] = finished  # in place: the writing thread may be appending
        self.touched.update(filling.file for filling in self._unnamed)
        self._touch_partial()

    # -- opening ---------------------------------------------------------------------------------

    def open_files(self) -> None:
        """Find all files and the newest rows of each slot; `settle` then decides which rows are valid."""
        self._disk.unlink(self.folder / AGAIN)  # left by an opening that was killed
        named = []
        for kind, shard, lap in self.shards():
            if kind == "open":
                self._finished.append(self._open_shard(shard, lap))
            elif (looked := self._read_shard(shard)) is not None:
                named.append(looked)
        again = {(filling.shard, filling.lap) for filling in self._finished}  # see `_fill_again`
        named = [source for source in named if (source.shard, source.lap) not in again]
        self._sources, self._sources_new = [*self._areas(), *named], True
        self._show_all([*self._sources, *self._unnamed])
        if self.slots is None and (last := max((one.shard for one in self._list_sources()), default=0)):
            grow_shape(self._disk, self.folder, (last + 1) * self.packing.shard)

    def _list_sources(self) -> list[Source | Filling]:
        return [*self._sources, *self._unnamed]

    @property
    def _unnamed(self) -> list[Filling]:
        return [*self._finished, *([] if self._filling is None else [self._filling])]

    def _open_shard(self, shard: int, lap: int) -> Filling:
        file = self._disk.open(self.open_path(shard, lap))
        chunks = scan_chunks(file, self.packing.chunks, lap, table=self.packing.table_bytes)
        if file.size() < self._bound:
            file.truncate(self._bound)
        return Filling(shard, lap, file, self._map(file, self._bound), chunks)

    def settle(self, last: int, synced: int) -> None:
        """Continue after the last valid row; see `Appender`."""
        place, each = self.place_behind(last), self.packing.rows
        (lap, slot), covered = place, self.place_behind(synced)
        shard, inside = slot // self.packing.shard, slot % each
        if self._sources_new:
            self._show_up_to(lap, shard)
        rows = self.part(slot - inside, inside)
        dead = [s for s in self._sources if s.named and (s.lap, s.shard) >= (lap, shard)]
        self._scrap += [self.shard_path(source.shard) for source in dead]
        kept = [source for source in self._sources if not any(source is one for one in dead)]
        self._sources = [source for source in kept if source.cut(lap, slot // each)]
        opening, self._sources_new = self._sources_new, False
        if opening:
            self._partial.adopt(covered[0], covered[1] // each, covered[1] % each)
        if inside:  # before the chunk is cut off: it may be the only copy of these rows
            self._keep_rest(lap, slot // each, rows)
            if opening and place != covered:  # without a checkpoint, these rows may be synced
                self._partial.keep()
        self._settle_files(place, again=dead)
        self._show_all([*self._sources, *self._unnamed])
        self._lap, self._next = lap, slot
        self._away[:inside] = 0  # these rows are stored as they are
        if inside:
            self._show_rest(slot // each, rows)

    def _keep_rest(self, lap: int, chunk: int, rows: Array) -> None:
        """Make sure that the rows of the chunk that is not full are in `partial`."""
        if not self._partial.go_on(lap, chunk, rows):
            made = self._partial.begin(lap, chunk)
            self._partial.write(0, rows)
            if self._partial.file is not None:
                self._partial.file.sync()
            if made:
                self._disk.sync_dir(self.folder)
        self._touch_partial()

    def _show_rest(self, chunk: int, rows: Array) -> None:
        """Make the rows of the chunk that is not full readable."""
        held = self._new_rows()
        held[: len(rows)] = rows
        self._set_locations(
            self._locations._replace(rows=held, base=chunk * self.packing.rows, held=len(rows))
        )

    def _settle_files(self, place: tuple[int, int], *, again: Sequence[Source]) -> None:
        """Find the shard to be filled, finish the shards before it, and remove those after it."""
        (lap, slot), each = place, self.packing.rows
        goal = lap, slot // self.packing.shard
        current = slot // each - goal[1] * self.packing.chunks
        found, self._finished, self._filling = self._unnamed, [], None
        named = {source.shard: source.lap for source in self._sources if source.named}
        # In the order of laps, because they are renamed in this order.
        for filling in sorted(found, key=lambda filling: filling.lap):
            # A shard that was never renamed is obsolete if a later lap has its final name.
            if (filling.lap, filling.shard) > goal or filling.lap < named.get(filling.shard, -1) < ANY_LAP:
                self._disk.unlink(filling.file.path)
                filling.file.close()
                continue
            if (filling.lap, filling.shard) < goal:
                self._finished.append(filling)
            else:
                filling = self._filling = self._forget(filling, current)
            end = filling.chunks.end
            filling.file.truncate(end)  # bytes after it were never synced
            filling.file.truncate(self._bound)
            filling.file.write(filling.file.read(0, end), 0)
            self.touched.add(filling.file)
        if current and any((source.lap, source.shard) == goal for source in again):
            former = self._disk.open(self.shard_path(goal[1]), write=False)
            self._filling = self._fill_again(former, self._read_index(former), goal, current)
            self.touched.add(self._filling.file)
        self._add_full(goal)
        older, self._finished = self._finished, []
        for filling in older:
            self._finish(filling)

    def _add_full(self, current: tuple[int, int]) -> None:
        """Add full chunks that exist only as raw rows to the files in which they are missing."""
        fillings = {(filling.lap, filling.shard): filling for filling in self._unnamed}
        newest: dict[int, int] = {}
        shards: list[Filling | Source] = [*self._unnamed]
        shards += [source for source in self._sources if source.named]
        for known in shards:
            newest[known.shard] = max(known.lap, newest.get(known.shard, -1))
        for source in self._sources:
            place, frame = (source.lap, source.shard), source.addresses
            outdone = newest.get(source.shard, -1) >= source.lap and place not in fillings
            if not isinstance(frame, Frame) or outdone or newest.get(source.shard, -1) > source.lap:
                continue
            for number in np.flatnonzero(source.chunks.offsets >= 0).tolist():
                if place not in fillings:
                    fillings[place] = self._begin(source.shard, source.lap)
                    if place == current:
                        self._filling = fillings[place]
                    else:
                        self._finished.append(fillings[place])
                filling = fillings[place]
                if filling.chunks.offsets[number] < 0:
                    filling.add(number, pack_chunk(number, source.lap, frame.data.tobytes()), self.head)
                    self.touched.add(filling.file)

    def _read_index(self, file: File) -> Chunks:
        return read_index(file, self.packing.chunks, table=self.packing.table_bytes)

    def _fill_again(self, former: File, chunks: Chunks, place: tuple[int, int], first: int) -> Filling:
        """Continue a shard from chunk `first` in a new file; the former file is not changed.

        Snapshots may share a shard that got its final name with rows that were never committed. If both files
        exist, the new one is used: it gets its name when all chunks copied to it are synced.
        """
        (lap, shard), end = place, 0
        path = self.open_path(shard, lap)
        with contextlib.closing(former), self._disk.build_file(path, self.folder / AGAIN) as file:
            for number in np.flatnonzero(chunks.offsets[:first] >= 0).tolist():
                start, size = int(chunks.offsets[number]) - self.head, int(chunks.sizes[number]) + self.head
                file.write(former.read(start, size), end)
                end += size
        self.new_folders.add(self.folder)
        return self._open_shard(shard, lap)

    def _forget(self, filling: Filling, first: int) -> Filling:
        """Drop the chunks of a file from one on, because some of their rows were never committed.

        Readers of its other chunks, and a handle that could not write them all, keep using the former file.
        """
        if not (filling.chunks.offsets[first:] >= 0).any():
            return filling
        return self._fill_again(filling.file, filling.chunks, (filling.lap, filling.shard), first)

    # -- space -----------------------------------------------------------------------------------

    def free(self, deleted: Deleted) -> set[File]:
        """Free the space of chunks without a readable row; no file is changed in place.

        A finished shard never changes, because a snapshot may share it (a hard link). A smaller file takes
        its name, and readers that have the former file open keep using it.
        """
        near = deleted.rows.intersect(deleted.near.widen(self.packing.rows + self.lent))
        shard = self.packing.shard
        numbers = IdSet.merge((near.first - 1) // shard, (near.last - 1) // shard)
        for first, last in numbers:
            for number in range(first, last + 1):
                if self._disk.exists(self.shard_path(number)):
                    self._free_shard(number, self._unread(number, deleted.rows))
        return set()

    def _unread(self, number: int, dead: IdSet) -> IntArray:
        """Return which chunks of a shard have no readable row. Shape `(chunks,)`, bool."""
        each, lent = self.packing.rows, self.lent
        before = number * self.packing.shard + each * np.arange(self.packing.chunks)
        unread: IntArray = dead.counts(before + each + lent) - dead.counts(before) == each + lent
        return unread

    def _free_shard(self, number: int, unread: IntArray) -> None:
        path, first = self.shard_path(number), number * self.packing.chunks
        self.new_folders.add(self.folder)
        if unread.all():
            self._disk.unlink(path)
            self._locations.where[first : first + unread.size] = 0
            maps = {shard: held for shard, held in self._locations.maps.items() if shard != number}
            self._set_locations(self._locations._replace(maps=maps))
            self._sources = [source for source in self._sources if source.shard != number]
            return
        file = self._disk.open(path, write=False)
        try:
            chunks = read_index(file, self.packing.chunks, table=self.packing.table_bytes)
            there = chunks.offsets >= 0
            sizes = np.where(there, chunks.sizes + self.head, 0)
            if sizes[unread].sum() * _PART < sizes.sum():
                return
            self._write_anew(file, path, chunks, np.flatnonzero(there & ~unread))
        finally:
            file.close()
        self._read_anew(number)

    def _write_anew(self, former: File, path: Path, chunks: Chunks, kept: IntArray) -> None:
        """Replace a shard by a file with only the kept chunks."""
        found, end = no_chunks(self.packing.chunks), 0
        with self._disk.build_file(path, self.folder / AGAIN) as file:
            for number in kept.tolist():
                start, size = int(chunks.offsets[number]) - self.head, int(chunks.sizes[number]) + self.head
                file.write(former.read(start, size), end)
                found.offsets[number], found.sizes[number] = end + self.head, chunks.sizes[number]
                end += size
            file.write(pack_index(found, table=self.packing.table_bytes), end)

    def _read_anew(self, number: int) -> None:
        """Make the rows of a shard readable in its new file."""
        found = self._read_shard(number)
        if found is None:
            return
        self._show(number, found.lap, found.addresses, found.chunks)
        self._leave_former(found)
        self._sources = [source for source in self._sources if not (source.named and source.shard == number)]
        self._sources.append(found)

    def rest(self) -> None:
        """Close the descriptors; see `WrittenPart`."""
        self._partial.rest()
        for filling in self._unnamed:
            filling.file.rest()

    def close(self) -> None:
        """Close the files; a map is removed with the last array over it."""
        for filling in self._unnamed:
            filling.file.close()
        self._finished, self._filling = [], None
        super().close()
