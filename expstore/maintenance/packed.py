"""The part of `verify` that checks packed columns: it decompresses every chunk and sums every raw row.

Used by the checks of columns, and by `repair` to rewrite files with their intact chunks. It reads with pread,
so that a file that is truncated meanwhile causes a finding and not a signal.
"""

from __future__ import annotations

import itertools
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
        #: For intact chunks with rows that are stored in `partner`: how many rows before their own position.
        self._lent: dict[tuple[int, int], IntArray] = {}
        self._raw: dict[tuple[int, int], tuple[Array, NDArray[np.bool_]]] = {}
        self._last: tuple[tuple[int, int], Array, NDArray[np.bool_]] | None = None
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
            step = next((n for n in range(1, len(data) - HEADER_BYTES) if self._begins(data, n, lap)), 0)
            after = file.next_data(at + len(data)) - HEADER_BYTES - self._most
            at += step or max(1, len(data) - HEADER_BYTES, after - at)

    def _begins(self, data: bytes, at: int, lap: int) -> bool:
        """Return whether a chunk's header may be at this position."""
        size, number, told = struct.unpack_from("<III", data, at)
        return 16 < size <= self._most and number < self.packing.chunks and lap in (-1, told)

    @property
    def _most(self) -> int:
        return self.packing.most_bytes(self.column.chunk_bytes)

    def _unpacks(self, chunk: bytes) -> IntArray | None:
        """Return the distances of a chunk's rows, as `_unpack` does, or None if the chunk is damaged."""
        try:
            return self._unpack(chunk)[1]
        except CorruptionError:
            return None

    def _unpack(self, chunk: bytes) -> tuple[Array, IntArray]:
        """Return the rows of a chunk as bytes, and how many rows before their own position they are stored.

        The distance is 0 for rows in the chunk itself; for other rows the returned bytes are not valid.

        Raises:
            CorruptionError: The chunk is damaged.
        """
        each, distances = self.packing.rows, np.zeros(self.packing.rows, np.int64)
        if self.packing.shares:
            distances = self.packing.unpack_table(chunk)
        frame = chunk[self.packing.table_bytes :]
        if not frame and distances.all():
            return np.zeros((each, self.column.row_bytes), np.uint8), distances
        return self.packing.unpack(frame, self.column.chunk_bytes).reshape(each, -1), distances

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
        out = np.zeros((count, self.column.row_bytes), np.uint8)
        whole, done, each = np.zeros(count, bool), 0, self.packing.rows
        while done < count:
            chunk, inside = divmod(slot + done, each)
            n = min(each - inside, count - done)
            rows, there = self._chunk(lap, chunk)
            out[done : done + n], whole[done : done + n] = (
                rows[inside : inside + n],
                there[inside : inside + n],
            )
            done += n
        return out, whole

    def find(self, lap: int, slot: int, count: int) -> NDArray[np.bool_]:
        """Return whether each row is intact. Shape `(count,)`."""
        each, none = self.packing.rows, (None, np.zeros(self.packing.rows, bool))
        first, last = slot // each, (slot + count - 1) // each
        whole = [
            self._raw.get((lap, chunk), none)[1]
            if self._place(lap, chunk) is None
            else self._finds(lap, chunk)
            for chunk in range(first, last + 1)
        ]
        return np.concatenate(whole)[slot - first * each :][:count] if count else none[1][:0]

    def _finds(self, lap: int, chunk: int) -> NDArray[np.bool_]:
        """Return which rows of an intact chunk are intact where they are stored."""
        whole = np.ones(self.packing.rows, bool)
        for part, (there, slot) in self._find_shared_rows(lap, chunk):
            whole[part] = self.partner is not None and self.partner.find(there, slot, part.stop - part.start)
        return whole

    def _find_shared_rows(self, lap: int, chunk: int) -> Iterator[tuple[slice, tuple[int, int]]]:
        """Yield runs of a chunk's rows that the partner stores, and lap and slot of the first one there."""
        each, slots = self.packing.rows, self.column.slots
        distances = self._lent.get(self._name(lap, chunk), np.zeros(each, np.int64))
        first = chunk * each + (0 if slots is None else lap * slots)
        places = first + np.arange(each) - distances
        wraps = np.zeros(each, bool) if slots is None else places % slots == 0
        new = np.flatnonzero((np.diff(distances, prepend=-1) != 0) | wraps)
        for start, stop in itertools.pairwise([*new.tolist(), each]):
            if distances[start]:
                at = int(places[start])
                yield slice(start, stop), (0, at) if slots is None else divmod(at, slots)

    def lender_of(self, lap: int, chunk: int) -> Path | None:
        """Return the partner's file in which rows of an intact chunk are lost, or None if none are lost."""
        for part, (there, slot) in self._find_shared_rows(lap, chunk) if self._place(lap, chunk) else ():
            if self.partner is not None:
                lost = np.flatnonzero(~self.partner.find(there, slot, part.stop - part.start))
                if lost.size:
                    return self.partner.file_of(there, (slot + int(lost[0])) // self.partner.packing.rows)
        return None

    def _chunk(self, lap: int, chunk: int) -> tuple[Array, NDArray[np.bool_]]:
        each, name = self.packing.rows, (lap, chunk)
        place = self._place(lap, chunk)
        if place is None:
            nothing = np.zeros((each, self.column.row_bytes), np.uint8), np.zeros(each, bool)
            return self._raw.get(name, nothing)
        if self._last is None or self._last[0] != name:
            rows = self._unpack(self._read(place))[0].copy()
            whole = np.ones(each, bool)
            for part, (there, slot) in self._find_shared_rows(lap, chunk):
                if self.partner is None:
                    whole[part] = False
                else:
                    rows[part], whole[part] = self.partner.rows(there, slot, part.stop - part.start)
            self._last = name, rows, whole
        return self._last[1:]

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
        return self.packing.pack(np.ascontiguousarray(self._chunk(*name)[0]))

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
