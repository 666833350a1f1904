"""A file of packed chunks: appended one by one while it grows, with an index once it is a Zarr shard.

Used by packed columns. Each chunk follows a header of 16 bytes that identifies it, so that the contents of an
unfinished file can be found. A finished file ends with the index of Zarr's sharding codec, which skips the
headers. If rows may be stored in another column, a table precedes each chunk's frame, the frame may be
missing, and Zarr's index is preceded by a second index of all chunks. Chunks are not unpacked here.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from expstore.disk.files import File
from expstore.errors import CorruptionError

#: u32 length, u32 number in the shard, u32 lap of the ring, u32 crc32c of these and of the chunk.
_HEADER = struct.Struct("<IIII")
HEADER_BYTES = _HEADER.size
#: Lap number of copied chunks in a snapshot; readers accept them for every lap.
ANY_LAP = (1 << 32) - 1
#: Offset of a missing chunk in the index.
_MISSING = (1 << 64) - 1
#: Bytes read at a time.
_STEP = 4 << 20


class Chunks(NamedTuple):
    """The positions of the chunks in a file.

    Args:
        offsets: Offsets of their frames, bytes; -1 for a missing chunk. Shape `(chunks,)`, int64.
        sizes: Lengths of their frames, bytes; 0 for a chunk that has only a table. Shape `(chunks,)`, int64.
        end: Offset at which the next chunk is appended, bytes.
    """

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    end: int


def pack_chunk(number: int, lap: int, chunk: bytes) -> bytes:
    """Return the bytes of a chunk in the file: header, then chunk."""
    head = struct.pack("<III", len(chunk), number, lap)
    return head + sum_chunk(head, chunk).to_bytes(4, "little") + chunk


def sum_chunk(head: bytes, chunk: bytes) -> int:
    """Return the crc32c of a header, of a chunk's last 4 bytes, and of the rest of the chunk, in this order.

    A chunk ends with the crc32c of its other bytes. Summed in file order, all chunks of one length would have
    the same crc32c.
    """
    ended = google_crc32c.extend(google_crc32c.value(head), chunk[-4:])
    crc: int = google_crc32c.extend(ended, chunk[:-4])
    return crc


def scan_chunks(file: File, count: int, lap: int, start: Chunks | None = None, *, table: int = 0) -> Chunks:
    """Find the chunks of an unfinished file, up to the first bytes that are not a chunk.

    If two chunks have the same number, the later one is used.

    Args:
        file: The file.
        count: How many chunks a shard has.
        lap: The lap of the ring that the chunks must have.
        start: Result of an earlier scan, to continue from there; its arrays are modified.
        table: Length of the table before each frame, bytes.
    """
    found = start or no_chunks(count)
    offsets, sizes, end = found
    data, base = b"", end
    while True:
        at = end - base
        if at + HEADER_BYTES > len(data):
            data, base, at = file.read(end, _STEP), end, 0
            if len(data) < HEADER_BYTES:
                break
        size, number, told, crc = _HEADER.unpack_from(data, at)
        if not size or size < table or number >= count or told != lap:
            break
        if at + HEADER_BYTES + size > len(data):
            data, base, at = file.read(end, max(_STEP, HEADER_BYTES + size)), end, 0
            if len(data) < HEADER_BYTES + size:
                break
        body = data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        if sum_chunk(data[at : at + 12], body) != crc:
            break
        offsets[number], sizes[number] = end + HEADER_BYTES + table, size - table
        end += HEADER_BYTES + size
    return Chunks(offsets, sizes, end)


def find_lap(file: File, chunks: Chunks, *, table: int = 0) -> int:
    """Return the lap of the ring of a finished file's chunks; -1 if the file has no chunks.

    Raises:
        CorruptionError: Every chunk is damaged, so that the lap is unknown.
    """
    there = np.flatnonzero(chunks.offsets >= 0).tolist()
    for number in there:
        start, size = int(chunks.offsets[number]) - HEADER_BYTES - table, int(chunks.sizes[number]) + table
        if start >= 0 and (lap := _read_lap(file.read(start, HEADER_BYTES + size), number, size)) >= 0:
            return lap
    if there:
        raise CorruptionError(f"all chunks of {file.path} are damaged")
    return -1


def _read_lap(data: bytes, number: int, size: int) -> int:
    """Return the lap in a chunk's header; -1 if the chunk is damaged."""
    if len(data) < HEADER_BYTES + size:
        return -1
    told, what, lap, crc = _HEADER.unpack_from(data)
    chunk = data[HEADER_BYTES:]
    whole = sum_chunk(data[:12], chunk) == crc
    return int(lap) if whole and (told, what) == (size, number) else -1


def no_chunks(count: int) -> Chunks:
    """Return the chunks of an empty file."""
    return Chunks(np.full(count, -1, np.int64), np.zeros(count, np.int64), 0)


def index_bytes(count: int, *, table: int = 0) -> int:
    """Return the length of the index of `count` chunks, bytes."""
    return (16 * count + 4) * (2 if table else 1)


def pack_index(chunks: Chunks, *, table: int = 0) -> bytes:
    """Return the index that makes the file a shard (Zarr v3 sharding codec, at the end, with crc32c).

    With tables, a second index comes first, which also has the chunks without a frame.
    """
    if table:
        return _pack_index(chunks, chunks.offsets >= 0) + _pack_index(chunks, chunks.sizes > 0)
    return _pack_index(chunks, chunks.offsets >= 0)


def _pack_index(chunks: Chunks, there: NDArray[np.bool_]) -> bytes:
    index = np.full((chunks.offsets.size, 2), _MISSING, "<u8")
    index[there, 0], index[there, 1] = chunks.offsets[there], chunks.sizes[there]
    data = index.tobytes()
    crc: int = google_crc32c.value(data)
    return data + crc.to_bytes(4, "little")


def read_index(file: File, count: int, *, table: int = 0) -> Chunks:
    """Read the index of a finished file.

    Raises:
        CorruptionError: The index is damaged.
    """
    size, length = file.size(), index_bytes(count, table=table)
    end = size - length
    data = file.read(end, length) if end >= 0 else b""
    own = data[: 16 * count + 4]
    if end < 0 or google_crc32c.value(own[:-4]) != int.from_bytes(own[-4:], "little"):
        raise CorruptionError(f"the index of {file.path} is damaged")
    chunks = _unpack_index(own, count, end, file)
    if table and data != pack_index(chunks, table=table):
        raise CorruptionError(f"the second index of {file.path} is damaged")
    return chunks


def _unpack_index(data: bytes, count: int, end: int, file: File) -> Chunks:
    index = np.frombuffer(data[:-4], "<u8").reshape(count, 2)
    there = index[:, 0] != _MISSING
    stops = np.where(there, index[:, 0] + index[:, 1], 0)
    if (stops > end).any():
        raise CorruptionError(f"the index of {file.path} names bytes beyond its end")
    offsets = np.where(there, index[:, 0], _MISSING).view(np.int64)  # all ones are -1
    return Chunks(offsets, np.where(there, index[:, 1], 0).astype(np.int64), end)
