"""Packed fields of a snapshot: shards that are the store's own, and copies of what is not finished there.

Used by snapshots. All shards of a snapshot are finished, so every reader of Zarr finds all rows. It unpacks
no chunk and changes no file of the store.
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
    ANY_TURN,
    HEADER_BYTES,
    no_chunks,
    pack_chunk,
    pack_index,
    read_index,
)
from expstore.storages.format.paths import COLUMNS

__all__ = ["PackedCapture"]


class _ColumnSnapshot:
    """Bring the rows of a packed field into a snapshot.

    Args:
        disk: Where files are touched.
        rows: As they are to be kept, see `PackedRows.as_now`.
        pieces: Where those that can be read lie: (first slot, offset in the run, rows).
        folder: Of the array in the snapshot.
        former: The same of the snapshot before; None: there is none that fits.
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
        packing, shown = rows.packing, rows.shown
        each = packing.rows
        shards = -(-max((slot + n for slot, _, n in pieces), default=0) // packing.shard)
        wanted = np.zeros(shards * packing.chunks, bool)
        for slot, _, n in pieces:
            if n:
                wanted[slot // each : (slot + n - 1) // each + 1] = True
        self._rest = shown.base // each if shown.held else -1
        known = min(wanted.size, shown.where.size)
        self._where, self._sizes = np.zeros(wanted.size, np.int64), np.zeros(wanted.size, np.int64)
        self._where[:known], self._sizes[:known] = shown.where[:known], shown.sizes[:known]
        wanted &= self._where > 0
        if 0 <= self._rest < wanted.size:
            wanted[self._rest] = True
        #: Chunks to be kept, by shard.
        self._wanted = wanted.reshape(shards, packing.chunks)
        #: Shards that are there already.
        self._done = np.array([not chunks.any() for chunks in self._wanted], bool)

    def link(self) -> None:
        """Give the store's finished shards second names: their bytes never change."""
        for shard in np.flatnonzero(~self._done).tolist():
            self._done[shard] = self._link(shard)

    def _numbers(self, shard: int) -> tuple[IntArray, IntArray]:
        """Return which chunks of a shard are kept: their numbers in it, and in the column."""
        numbers = np.flatnonzero(self._wanted[shard])
        return numbers, shard * self._rows.packing.chunks + numbers

    def _link(self, shard: int) -> bool:
        numbers, places = self._numbers(shard)
        if self._rest in places:
            return False
        where = self._where[places]
        for part in self._rows.shown.maps.get(shard, ()):
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
        """Give a file a second name in the snapshot if it holds these chunks; say whether it does.

        It may have been replaced just now: the second name is what is looked at.

        Args:
            old: The file.
            numbers: Of the chunks in the shard. Shape `(n,)`.
            offsets: Where they are. Shape `(n,)`.
            sizes: Their lengths. Shape `(n,)`.
            marks: What tells the first of them, or all, from others.
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
            pass  # not what is known to be there
        finally:
            file.close()
        self._disk.unlink(new)
        return False

    def copy(self) -> list[tuple[Path, int]]:
        """Write the shards that are missing; return their files and lengths."""
        written = []
        for shard in np.flatnonzero(~self._done).tolist():
            found = self._copy(shard)
            if found is not None:
                written.append(found)
            self._done[shard] = True
        return written

    def _copy(self, shard: int) -> tuple[Path, int] | None:
        """Write a shard; None: the snapshot before has it."""
        numbers, places = self._numbers(shard)
        rest = self._rest_chunk() if self._rest in places else b""
        chunks = no_chunks(self._rows.packing.chunks)
        marks, head, table = [], self._rows.head, self._rows.packing.table_bytes
        for number, place in zip(numbers.tolist(), places.tolist(), strict=True):
            data = pack_chunk(number, ANY_TURN, self._chunk(place, rest))
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
        """Return what tells a chunk in a file from others: what comes before its frame, and its checksum.

        The header's own checksum does not: a crc32c over a frame and its crc32c depends on their length
        alone.
        """
        return data[: self._rows.head] + data[-4:]

    def _rest_chunk(self) -> bytes:
        """Pack the chunk that is not full, with rows of the turn before behind if they can be read."""
        shown = self._rows.shown
        rows, first = np.zeros_like(shown.rows), shown.base + shown.held
        rows[: shown.held] = shown.rows[: shown.held]
        for slot, _, n in self._pieces:
            low, high = max(slot, first), min(slot + n, shown.base + len(rows))
            if low < high:
                rows[low - shown.base : high - shown.base] = self._rows.part(low, high - low)
        return self._rows.packing.pack(rows)


class PackedCapture(Capture):
    """Packed columns as they are at one moment.

    No row may be added while this is made.

    Args:
        columns: By place, in the order in which they are to be written.
        pairs: Which of them keep rows in others.
    """

    def __init__(self, columns: Mapping[int, PackedRows], pairs: Sequence[PackedPair]) -> None:
        self.places = [*columns]
        self.packings = {place: column.packing for place, column in columns.items()}
        #: By place, as they were then.
        self.columns = {place: column.as_now() for place, column in columns.items()}
        self._lent = {pair.partner for pair in pairs}
        for pair in pairs:
            self.columns[pair.place].partner = self.columns[pair.partner]
        self._snapshots: list[_ColumnSnapshot] = []

    def rows(self, place: int, first_id: int, count: int) -> list[Array]:
        """Return a run of rows of a column in pieces."""
        return self.columns[place].views(first_id, count)

    def begin(self, target: Target) -> list[tuple[Path, int]]:
        """Give the store's finished shards second names in a snapshot; nothing is written."""
        slots, window = target.slots, target.window
        pieces = [piece for first, n in window.runs() for piece in cut_run(first, n, slots)]
        # Rows of others may lie with those that cannot be read any more, or were given up.
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
