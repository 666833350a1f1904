"""The part of `verify` that checks packed columns: it decompresses every chunk and sums every raw row.

Used by the checks of columns, and by `repair` to rewrite files with their intact chunks. It reads with pread,
so that a file that is truncated meanwhile causes a finding and not a signal.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError
from expstore.storages.columns.packed.column import PARTIAL
from expstore.storages.columns.packed.open_chunk import PartialFile
from expstore.storages.columns.packed.reader import PackedReader
from expstore.storages.format.chunk_file import (
    ANY_LAP,
    HEADER_BYTES,
    Chunks,
    no_chunks,
    pack_chunk,
    pack_index,
    read_index,
    sum_chunk,
)


class Fault(NamedTuple):
    """A problem with a file of a packed column.

    Args:
        kind: The kind of the finding: footer or payload.
        path: The file.
        shard: Number of the shard.
        text: Description of the problem.
    """

    kind: str
    path: Path
    shard: int
    text: str


class PackedFiles:
    """Index the intact chunks and rows in the files of a packed column.

    Threads: one. Crashes: only `mend` changes files, and can be called again.

    Args:
        disk: Access to files.
        column: The column.
    """

    def __init__(self, disk: Disk, column: PackedReader) -> None:
        self.column, self.packing = column, column.packing
        #: The files of the column that stores the rows shared with this column (`share_next`), if any.
        self.partner: PackedFiles | None = None
        self.faults: list[Fault] = []
        #: Intact chunks after damaged bytes, which a reader does not find: file, shard, lap, number in the
        #: shard.
        self.hidden: list[tuple[Path, int, int, int]] = []
        self._disk = disk
        #: Positions of intact chunks, by lap of the ring and number: file, offset and length.
        self._places: dict[tuple[int, int], tuple[Path, int, int]] = {}
        #: For intact chunks with parts that are stored elsewhere: how many parts before their own position.
        self._lent: dict[tuple[int, int], IntArray] = {}
        self._raw: dict[tuple[int, int], tuple[Array, NDArray[np.bool_]]] = {}
        self._last: tuple[tuple[Path, int, int], Array] | None = None
        for kind, shard, lap in sorted(column.shards()):
            self._look(
                column.open_path(shard, lap) if kind == "open" else column.shard_path(shard), shard, lap
            )
        partial = PartialFile(disk, column.folder / PARTIAL, self.packing.rows, column.row_bytes, write=False)
        try:
            for area in partial.areas():
                fresh = np.zeros_like(area.rows), np.zeros_like(area.whole)
                rows, whole = self._raw.setdefault((area.lap, area.chunk), fresh)
                rows[area.whole] = area.rows[area.whole]
                whole |= area.whole
        finally:
            partial.close()

    # -- indexing --------------------------------------------------------------------------------

    def _look(self, path: Path, shard: int, lap: int) -> None:
        """Index the chunks of a shard; `lap` is -1 if the shard is finished and has its final name."""
        file = self._disk.open(path, write=False)
        try:
            named = self._index_of(file, path, shard) if lap < 0 else None
            found = self._list_chunks(file, named) if named is not None else self._scan(file, shard, lap)
            known = list(found)
            laps = [told for _, told, _, _ in known if told >= 0]
            usual = max(laps, key=laps.count, default=-1)
            for number, told, offset, size in known:
                distances = self._unpacks(file.read(offset, size))
                whole = distances is not None
                name = usual if told < 0 else told, shard * self.packing.chunks + number
                if distances is not None and usual >= 0:
                    self._places[name] = path, offset, size
                    self._lent.pop(name, None)
                    if distances.any():
                        self._lent[name] = distances
                if told < 0 or not whole:
                    what = "the header" if whole else "the checksum"
                    text = f"is damaged: {what} of its chunk {number} is wrong"
                    self.faults.append(Fault("payload", path, shard, text))
        finally:
            file.close()

    def _index_of(self, file: File, path: Path, shard: int) -> Chunks | None:
        try:
            return read_index(file, self.packing.chunks, table=self.packing.table_bytes)
        except CorruptionError:
            text = "has a damaged index (the bytes after its chunks)"
            self.faults.append(Fault("footer", path, shard, text))
            return None

    def _list_chunks(self, file: File, chunks: Chunks) -> Iterator[tuple[int, int, int, int]]:
        """Yield number, lap (-1 if damaged), offset and length of the chunks that a shard's index names.

        The offset is that of the chunk's table, after its header.
        """
        table = self.packing.table_bytes
        for number in np.flatnonzero(chunks.offsets >= 0).tolist():
            offset, size = int(chunks.offsets[number]) - table, int(chunks.sizes[number]) + table
            head = _head(file.read(max(0, offset - HEADER_BYTES), HEADER_BYTES + size))
            lap = -1
            if head is not None and head[:2] == (size, number):
                lap = head[2]
            yield number, lap, offset, size

    def _scan(self, file: File, shard: int, lap: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield number, turn, offset and length of the intact chunks in a file without an index."""
        at, stop, broken = 0, file.size(), False
        while at + HEADER_BYTES < stop:
            data = file.read(at, HEADER_BYTES + self._most)
            head = _head(data)
            if head is not None and head[1] < self.packing.chunks and lap in (-1, head[2]):
                if broken:
                    self.hidden.append((file.path, shard, head[2], head[1]))
                yield head[1], head[2], at + HEADER_BYTES, head[0]
                at += HEADER_BYTES + head[0]
                continue
            broken = True
            step = self._find_header(data, lap)
            after = file.next_data(at + len(data)) - HEADER_BYTES - self._most
            at += step or max(1, len(data) - HEADER_BYTES, after - at)

    def _find_header(self, data: bytes, lap: int) -> int:
        """Return the first position after 0 at which a chunk's header may be, or 0."""
        count = max(0, len(data) - HEADER_BYTES - 1)
        size, number, told = (np.ndarray((count,), "<u4", data, 1 + at, (1,)) for at in (0, 4, 8))
        may = (size > 16) & (size <= self._most) & (number < self.packing.chunks)
        if lap >= 0:
            may &= told == lap
        return int(may.argmax()) + 1 if may.any() else 0

    @property
    def _most(self) -> int:
        return self.packing.most_bytes(self.column.chunk_bytes)

    def _unpacks(self, chunk: bytes) -> IntArray | None:
        """Return the distances of a chunk's parts, as `_unpack` does, or None if the chunk is damaged."""
        try:
            return self._unpack(chunk)[1]
        except CorruptionError:
            return None

    def _unpack(self, chunk: bytes) -> tuple[Array, IntArray]:
        """Return the parts of a chunk's rows as bytes, and how many parts before their own position they are.

        The distance is 0 for parts in the chunk itself; for other parts the returned bytes are not valid.

        Raises:
            CorruptionError: The chunk is damaged.
        """
        each, distances = self.packing.chunk_parts, np.zeros(self.packing.chunk_parts, np.int64)
        if self.packing.shares:
            distances = self.packing.unpack_table(chunk)
        frame = chunk[self.packing.table_bytes :]
        if not frame and distances.all():
            return np.zeros((each, self._part_bytes), np.uint8), distances
        parts = self.packing.unpack(frame, self.column.chunk_bytes).reshape(each, -1)
        return parts[self.packing.places_in_frame(np.arange(each))], distances

    def note_hidden(self, runs: Sequence[tuple[int, int]]) -> None:
        """Record a fault for each file with intact but unreachable chunks that contain some of these rows.

        Args:
            runs: Rows that must be readable: (first id, number of rows).
        """
        each, slots = self.packing.rows, self.column.slots or 0
        for path, shard, lap, number in self.hidden:
            low = lap * slots + shard * self.packing.shard + number * each + 1
            if any(first < low + each and low < first + count for first, count in runs):
                self.faults.append(Fault("payload", path, shard, f"is damaged before its chunk {number}"))

    # -- rows ------------------------------------------------------------------------------------

    def rows(self, lap: int, slot: int, count: int) -> tuple[Array, NDArray[np.bool_]]:
        """Return rows as bytes, and whether each is intact. Shapes `(count, row bytes)`, `(count,)`."""
        parts = self._number_parts(lap, slot, count)
        out, whole = self._read_stored(parts)
        away, places = self._find_shared_parts(parts)
        if away.size and self._lender is not None:
            out[away], whole[away] = self._lender._read_stored(places)
        return out.reshape(count, self.column.row_bytes), self._join(whole)

    def find(self, lap: int, slot: int, count: int) -> NDArray[np.bool_]:
        """Return whether each row is intact. Shape `(count,)`."""
        parts = self._number_parts(lap, slot, count)
        whole = self._find_stored(parts)
        away, places = self._find_shared_parts(parts)
        if away.size and self._lender is not None:
            whole[away] = self._lender._find_stored(places)
        return self._join(whole)

    def _join(self, whole: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Return which rows have only intact parts. Shape `(rows,)`."""
        rows: NDArray[np.bool_] = np.all(whole.reshape(-1, self.packing.parts), axis=1)
        return rows

    @property
    def _lender(self) -> PackedFiles | None:
        """The files of the column that stores parts which this column refers to."""
        return self if self.packing.within else self.partner

    @property
    def _part_bytes(self) -> int:
        return self.column.row_bytes // self.packing.parts

    def _number_parts(self, lap: int, slot: int, count: int) -> IntArray:
        """Return the numbers of the parts of rows, which are counted through all laps."""
        each, first = self.packing.parts, lap * (self.column.slots or 0) + slot
        return np.arange(first * each, (first + count) * each)

    def _list_chunks_of(self, parts: IntArray) -> Iterator[tuple[tuple[int, int], IntArray, IntArray]]:
        """Yield lap and number of each chunk of some parts, which parts are in it, and their places in it."""
        each, slots = self.packing.chunk_parts, self.column.slots
        chunks = parts // each
        order = np.argsort(chunks, kind="stable")
        numbers, starts = np.unique(chunks[order], return_index=True)
        for number, mine in zip(numbers.tolist(), np.split(order, starts[1:]), strict=False):
            name = (0, number) if slots is None else divmod(number, slots // self.packing.rows)
            yield name, mine, parts[mine] % each

    def _find_stored(self, parts: IntArray) -> NDArray[np.bool_]:
        """Return whether parts are stored in this column itself, intact. Shape `(n,)`."""
        whole = np.zeros(parts.size, bool)
        for (lap, chunk), mine, inside in self._list_chunks_of(parts):
            if self._place(lap, chunk) is not None:
                distances = self._lent.get(self._name(lap, chunk))
                whole[mine] = True if distances is None else distances[inside] == 0
            elif (lap, chunk) in self._raw:
                whole[mine] = self._raw[lap, chunk][1][inside // self.packing.parts]
        return whole

    def _read_stored(self, parts: IntArray) -> tuple[Array, NDArray[np.bool_]]:
        """Return parts as bytes, and whether each is stored in this column itself, intact."""
        out = np.zeros((parts.size, self._part_bytes), np.uint8)
        for (lap, chunk), mine, inside in self._list_chunks_of(parts):
            place = self._place(lap, chunk)
            if place is not None:
                if self._last is None or self._last[0] != place:
                    self._last = place, self._unpack(self._read(place))[0]
                out[mine] = self._last[1][inside]
            elif (lap, chunk) in self._raw:
                out[mine] = self._raw[lap, chunk][0].reshape(-1, self._part_bytes)[inside]
        return out, self._find_stored(parts)

    def _find_shared_parts(self, parts: IntArray) -> tuple[IntArray, IntArray]:
        """Return which of some parts are stored elsewhere, and the numbers of these there. Shapes `(m,)`."""
        distances = np.zeros(parts.size, np.int64)
        for (lap, chunk), mine, inside in self._list_chunks_of(parts):
            if (known := self._lent.get(self._name(lap, chunk))) is not None:
                distances[mine] = known[inside]
        away = np.flatnonzero(distances)
        return away, parts[away] - distances[away]

    def lender_of(self, lap: int, chunk: int) -> Path | None:
        """Return the file in which parts of an intact chunk are lost, or None if none are lost."""
        if self._place(lap, chunk) is None or self._lender is None:
            return None
        each = self.packing.rows
        _, places = self._find_shared_parts(self._number_parts(lap, chunk * each, each))
        lost = places[~self._lender._find_stored(places)]
        return next((self._lender.file_of(*name) for name, _, _ in self._lender._list_chunks_of(lost)), None)

    def _place(self, lap: int, chunk: int) -> tuple[Path, int, int] | None:
        """Return the file, offset and length of an intact chunk, or None if it is missing."""
        return self._places.get(self._name(lap, chunk))

    def _name(self, lap: int, chunk: int) -> tuple[int, int]:
        """Return the key of a chunk: turn and number. In a snapshot a chunk may have any lap."""
        name = lap, chunk
        return name if name in self._places else (ANY_LAP, chunk)

    def _read(self, place: tuple[Path, int, int]) -> bytes:
        path, offset, size = place
        file = self._disk.open(path, write=False)
        try:
            return file.read(offset, size)
        finally:
            file.close()

    def file_of(self, lap: int, chunk: int) -> Path:
        """Return the file that contains a chunk, or should contain it."""
        shard = chunk // self.packing.chunks
        if (lap, chunk) in self._raw:
            return self.column.folder / PARTIAL
        path = self.column.open_path(shard, lap)
        return path if self._disk.exists(path) else self.column.shard_path(shard)

    # -- repair ----------------------------------------------------------------------------------

    def mend(self, disk: Disk, synced: int) -> None:
        """Repair all files: lost rows become zeros, in chunks that can be read.

        Args:
            disk: Where files are written.
            synced: The newest id that a checkpoint covers.
        """
        place = self.column.place_behind(synced)
        (lap, slot), each, chunks = place, self.packing.rows, self.packing.chunks
        current, inside = slot // self.packing.shard, slot % each
        if inside and not self.rows(lap, slot - inside, inside)[1].all():
            self._mend_rest(disk, place)
        shards = dict.fromkeys(range(current + 1), lap)
        slots = self.column.slots
        if lap and slots is not None:
            shards |= dict.fromkeys(range(current + 1, -(-slots // self.packing.shard)), lap - 1)
        for shard, told in shards.items():
            stop = slot // each - shard * chunks if shard == current else chunks
            if slots is not None:
                stop = min(stop, slots // each - shard * chunks)
            self._mend_shard(disk, shard, told, stop, filling=shard == current)
        if lap:
            # The rest of this shard still has chunks of the previous turn.
            self._mend_shard(disk, current, lap - 1, 0, filling=False)

    def _mend_shard(self, disk: Disk, shard: int, lap: int, stop: int, *, filling: bool) -> None:
        """Repair one shard: it gets all chunks before `stop`, and the later chunks that are intact."""
        first = shard * self.packing.chunks
        known = {
            chunk - first
            for told, chunk in self._places
            if told == lap and chunk // self.packing.chunks == shard
        }
        raw = {
            chunk - first
            for told, chunk in self._raw
            if told == lap and chunk // self.packing.chunks == shard
        }
        lost = set(range(stop)) - known
        bad = {fault.path for fault in self.faults if fault.shard == shard}
        path = self.column.open_path(shard, lap)
        is_open = filling or disk.exists(path)
        if not is_open:
            path = self.column.shard_path(shard)
        # A shard without intact or needed chunks must have an index, too.
        if not (bad and (known or lost)) and not lost - raw and path not in bad:
            return
        found, data = no_chunks(self.packing.chunks), b""
        for number in sorted(known | lost):
            name = (lap, first + number)
            chunk = self._read(self._places[name]) if number in known else self._build_chunk(name)
            found.offsets[number] = len(data) + self.column.head
            found.sizes[number] = len(chunk) - self.packing.table_bytes
            data += pack_chunk(number, lap, chunk)
        if not is_open:
            data += pack_index(found, table=self.packing.table_bytes)
        disk.write_whole(path, data)

    def _build_chunk(self, name: tuple[int, int]) -> bytes:
        """Return a packed chunk of the raw rows that are intact, and zeros for the others."""
        lap, chunk = name
        return self.packing.pack(self.rows(lap, chunk * self.packing.rows, self.packing.rows)[0])

    def _mend_rest(self, disk: Disk, place: tuple[int, int]) -> None:
        """Write the rows of the incomplete last chunk again."""
        (lap, slot), each = place, self.packing.rows
        rows, _ = self.rows(lap, slot - slot % each, slot % each)
        partial = PartialFile(disk, self.column.folder / PARTIAL, each, self.column.row_bytes)
        try:
            partial.adopt(lap, slot // each, slot % each)
            partial.begin(lap, slot // each)
            partial.write(0, rows)
            if partial.file is not None:
                partial.file.sync()
            disk.sync_dir(self.column.folder)
        finally:
            partial.close()


def _head(data: bytes) -> tuple[int, int, int] | None:
    """Return length, number and lap of the chunk that begins here; None without an intact chunk."""
    if len(data) <= HEADER_BYTES:
        return None
    size, number, lap, crc = struct.unpack_from("<IIII", data)
    body = data[HEADER_BYTES : HEADER_BYTES + size]
    if len(body) != size or sum_chunk(data[:12], body) != crc:
        return None
    return size, number, lap
