"""Packed fields of a snapshot: hard links to the store's finished shards, and copies of unfinished ones.

Used by snapshots. All shards of a snapshot are finished, so every Zarr reader finds all rows. This module
decompresses no chunk and changes no file of the store.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from expstore.core import tuning
from expstore.core.values import Array, IntArray, cut_run
from expstore.disk.files import Disk
from expstore.disk.mapped_files import AddressRange
from expstore.errors import CorruptionError
from expstore.storages.columns.capture import Capture, Target
from expstore.storages.columns.packed.column import PackedRows
from expstore.storages.columns.packed.pairs import PackedPair
from expstore.storages.format.chunk_file import (
    ANY_LAP,
    HEADER_BYTES,
    no_chunks,
    pack_chunk,
    pack_index,
    read_index,
)
from expstore.storages.format.paths import COLUMNS


class _ColumnSnapshot:
    """Write the rows of a packed field to a snapshot.

    Args:
        disk: The disk on which files are accessed.
        rows: The rows to keep, from `PackedRows.as_now`.
        pieces: Where the readable rows are: (first slot, offset in the run, number of rows).
        folder: The folder of the array in the snapshot.
        former: The folder of the array in the previous snapshot; None: there is no previous one that fits.
    """

    def __init__(
        self,
        disk: Disk,
        rows: PackedRows,
        pieces: Sequence[tuple[int, int, int]],
        *,
        folder: Path,
        former: Path | None,
    ) -> None:
        self._disk, self._rows, self._folder, self._former = disk, rows, folder, former
        self._pieces = pieces
        packing, locations = rows.packing, rows.locations
        each = packing.rows
        shards = -(-max((slot + n for slot, _, n in pieces), default=0) // packing.shard)
        wanted = np.zeros(shards * packing.chunks, bool)
        for slot, _, n in pieces:
            if n:
                wanted[slot // each : (slot + n - 1) // each + 1] = True
        self._rest = locations.base // each if locations.held else -1
        known = min(wanted.size, locations.where.size)
        self._where, self._sizes = np.zeros(wanted.size, np.int64), np.zeros(wanted.size, np.int64)
        self._where[:known], self._sizes[:known] = locations.where[:known], locations.sizes[:known]
        wanted &= self._where > 0
        if 0 <= self._rest < wanted.size:
            wanted[self._rest] = True
        #: Which chunks to keep, by shard. Shape `(shards, chunks)`, bool.
        self._wanted = wanted.reshape(shards, packing.chunks)
        #: Which shards are in the snapshot already. Shape `(shards,)`, bool.
        self._done = np.array([not chunks.any() for chunks in self._wanted], bool)

    def link(self) -> None:
        """Add hard links to the store's finished shards, whose bytes never change."""
        for shard in np.flatnonzero(~self._done).tolist():
            self._done[shard] = self._link(shard)

    def _numbers(self, shard: int) -> tuple[IntArray, IntArray]:
        """Return the kept chunks of a shard: their numbers in the shard, and in the column."""
        numbers = np.flatnonzero(self._wanted[shard])
        return numbers, shard * self._rows.packing.chunks + numbers

    def _link(self, shard: int) -> bool:
        numbers, places = self._numbers(shard)
        if self._rest in places:
            return False
        where = self._where[places]
        for part in self._rows.locations.maps.get(shard, ()):
            if not isinstance(part, AddressRange) or where.min() < part.address:
                continue
            if where.max() < part.address + part.size:
                at, size = int(where[0]), int(self._sizes[places[0]]) + 4
                data = ctypes.string_at(at - self._rows.head, self._rows.head + size)
                path = self._rows.shard_path(shard)
                return self._share(
                    path, numbers, where - part.address, self._sizes[places] + 4, [self._mark(data)]
                )
        return False

    def _share(
        self, old: Path, numbers: IntArray, offsets: IntArray, sizes: IntArray, marks: Sequence[bytes]
    ) -> bool:
        """Add a hard link to a file if it holds the expected chunks; return whether it does.

        The file may be replaced at any moment, so the new link is checked, not the old path.

        Args:
            old: The file.
            numbers: Numbers of the chunks in the shard. Shape `(n,)`.
            offsets: Their offsets in the file, bytes. Shape `(n,)`.
            sizes: Their lengths, bytes. Shape `(n,)`.
            marks: Results of `_mark` for the first of the chunks, or for all.
        """
        new = self._folder / old.name
        if not self._disk.exists(old) or not self._disk.link(old, new):
            return False
        file = self._disk.open(new, write=False)
        try:
            found = read_index(file, self._rows.packing.chunks, table=self._rows.packing.table_bytes)
            same = np.array_equal(found.offsets[numbers], offsets)
            same = same and np.array_equal(found.sizes[numbers], sizes)
            places = zip(offsets.tolist(), sizes.tolist(), marks, strict=False)
            if same and all(
                file.read(at - self._rows.head, self._rows.head) + file.read(at + size - 4, 4) == mark
                for at, size, mark in places
            ):
                return True
        except CorruptionError:
            pass  # the file does not hold the expected chunks
        finally:
            file.close()
        self._disk.unlink(new)
        return False

    def copy(self) -> list[tuple[Path, int]]:
        """Write the missing shards; return their files and lengths in bytes."""
        written = []
        for shard in np.flatnonzero(~self._done).tolist():
            found = self._copy(shard)
            if found is not None:
                written.append(found)
            self._done[shard] = True
        return written

    def _copy(self, shard: int) -> tuple[Path, int] | None:
        """Write a shard; return None if the previous snapshot's file could be linked instead."""
        numbers, places = self._numbers(shard)
        rest = self._rest_chunk() if self._rest in places else b""
        chunks = no_chunks(self._rows.packing.chunks)
        marks, head, table = [], self._rows.head, self._rows.packing.table_bytes
        for number, place in zip(numbers.tolist(), places.tolist(), strict=True):
            data = pack_chunk(number, ANY_LAP, self._chunk(place, rest))
            marks.append(self._mark(data))
            chunks.offsets[number], chunks.sizes[number] = chunks.end + head, len(data) - head
            chunks = chunks._replace(end=chunks.end + len(data))
        name = self._rows.shard_path(shard).name
        facts = chunks.offsets[numbers], chunks.sizes[numbers], marks
        if self._former is not None and self._share(self._former / name, numbers, *facts):
            return None
        path = self._folder / name
        file = self._disk.open(path, create=True)
        try:
            for number, place, mark in zip(numbers.tolist(), places.tolist(), marks, strict=True):
                data = mark[:HEADER_BYTES] + self._chunk(place, rest)
                file.write(data, int(chunks.offsets[number]) - head)
            index = pack_index(chunks, table=table)
            file.write(index, chunks.end)
        finally:
            file.close()
        return path, chunks.end + len(index)

    def _chunk(self, place: int, rest: bytes) -> bytes:
        if place == self._rest:
            return rest
        table = self._rows.packing.table_bytes
        return ctypes.string_at(int(self._where[place]) - table, table + int(self._sizes[place]) + 4)

    def _mark(self, data: bytes) -> bytes:
        """Return bytes that identify a chunk: everything before its frame, and the frame's checksum.

        The header's own checksum is not enough: a crc32c over a frame and the frame's crc32c depends only on
        their length.
        """
        return data[: self._rows.head] + data[-4:]

    def _rest_chunk(self) -> bytes:
        """Pack the chunk that is not full, followed by rows of the previous lap that are still readable."""
        locations = self._rows.locations
        rows, first = np.zeros_like(locations.rows), locations.base + locations.held
        rows[: locations.held] = locations.rows[: locations.held]
        for slot, _, n in self._pieces:
            low, high = max(slot, first), min(slot + n, locations.base + len(rows))
            if low < high:
                rows[low - locations.base : high - locations.base] = self._rows.part(low, high - low)
        return self._rows.packing.pack(rows)


class PackedCapture(Capture):
    """Packed columns as they are at one moment.

    No row may be added while this object is created.

    Args:
        columns: Columns by position, in the order in which they are written.
        pairs: Which of them store rows in another column.
    """

    def __init__(self, columns: Mapping[int, PackedRows], pairs: Sequence[PackedPair]) -> None:
        self.places = [*columns]
        self.packings = {place: column.packing for place, column in columns.items()}
        #: The captured columns, by position.
        self.columns = {place: column.as_now() for place, column in columns.items()}
        self._lent = {pair.partner for pair in pairs}
        for pair in pairs:
            self.columns[pair.place].partner = self.columns[pair.partner]
        self._snapshots: list[_ColumnSnapshot] = []

    def rows(self, place: int, first_id: int, count: int) -> list[Array]:
        """Return a run of rows of a column in pieces."""
        return self.columns[place].views(first_id, count)

    def begin(self, target: Target) -> list[tuple[Path, int]]:
        """Link the store's finished shards into a snapshot; nothing is written."""
        slots, window = target.slots, target.stored
        pieces = [piece for first, n in window.runs() for piece in cut_run(first, n, slots)]
        # Rows of another column may be stored with rows that are no longer readable, or were deleted.
        back = tuning.PACKED_LOOKBACK_ROWS[1] if slots is None else target.reach
        before = max(0, window.low - back)
        older = cut_run(before + 1, window.last - before, slots)
        for place, rows in self.columns.items():
            below = Path(COLUMNS, rows.entry.path)
            snapshot = _ColumnSnapshot(
                target.disk,
                rows,
                older if place in self._lent else pieces,
                folder=target.folder / below,
                former=None if target.former is None else target.former / below,
            )
            snapshot.link()
            self._snapshots.append(snapshot)
        return []

    def complete(self) -> list[tuple[Path, int]]:
        """Write the shards that are not finished in the store."""
        return [written for snapshot in self._snapshots for written in snapshot.copy()]
