"""Compiled loop that decompresses many rows of blosc frames without the GIL.

Used by packed columns. Importing it loads numba; it is imported in the background when rows are read or
written, and until then numcodecs decompresses frame by frame. The loop works on addresses. Helper threads end
before a call returns and never run Python.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from expstore.core import tuning
from expstore.kernels import native
from expstore.kernels.file_loops import compiled, compiled_for_c
from expstore.kernels.native import (
    MOST_THREADS,
    copy_bytes,
    crc32c,
    fetch_add,
    join_helpers,
    start_helpers,
    unpack_blosc,
    unpack_lz4,
)

Ints = NDArray[np.int64]

#: Flags of a blosc frame whose blocks are LZ4 (also written by lz4hc), neither shuffled nor split.
_LZ4 = 32
#: Frames with more blocks are decompressed completely.
_MOST_BLOCKS = 64


@compiled("boolean(int64, int64, int64, int64, int64[::1])", nogil=True)
def _unpack_some(source: int, size: int, scratch: int, chunk_bytes: int, wanted: Ints) -> bool:
    """Decompress the wanted parts of a frame whose checksum matches; return whether that succeeded.

    Bytes 0 to 15: version, version of the compressor, flags, bytes per item, then u32 decompressed length,
    length of a block, compressed length (Blosc chunk format, version 2). Then follows the position of each
    block. A block begins with its length; if it is the block's decompressed length, the block is not
    compressed.

    `wanted` is the number of bytes wanted of each block; it has room for the largest number of blocks.
    """
    header, block = np.empty(4, np.uint32), np.empty(1, np.uint32)
    copy_bytes(header.ctypes.data, source, 16)
    each = np.int64(header[2])
    blocks = -(-chunk_bytes // each) if each > 0 else _MOST_BLOCKS + 1
    if header[1] != chunk_bytes or np.int64(header[3]) != size:
        return False
    plain = (header[0] >> 16) & 255 == _LZ4 and header[0] >> 24 == 1
    if not plain or blocks > _MOST_BLOCKS or size < 16 + 4 * blocks:
        return bool(unpack_blosc(source, scratch, chunk_bytes, 1) == chunk_bytes)
    for number in range(blocks):
        if not wanted[number]:
            continue
        copy_bytes(block.ctypes.data, source + 16 + 4 * number, 4)
        start, whole = np.int64(block[0]), min(each, chunk_bytes - number * each)
        if start + 4 > size:
            return False
        copy_bytes(block.ctypes.data, source + start, 4)
        length, start = np.int64(block[0]), start + 4
        if length > whole or start + length > size:
            return False
        goal = scratch + number * each
        if length == whole:
            copy_bytes(goal, source + start, whole)
        elif (
            unpack_lz4(source + start, goal, np.int32(length), np.int32(wanted[number]), np.int32(whole))
            < wanted[number]
        ):
            return False
    return True


@compiled("void(int64[::1], int64, int64, int64)", nogil=True)
def _want(wanted: Ints, each: int, first: int, stop: int) -> None:
    """Mark bytes `first` to `stop` of a chunk as wanted; its blocks have `each` bytes."""
    for number in range(first // each, min((stop - 1) // each + 1, _MOST_BLOCKS)):
        wanted[number] = max(wanted[number], min(stop - number * each, each))


@compiled("int64(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])", nogil=True)
def _take_some(sources: Ints, sizes: Ints, which: Ints, inside: Ints, goals: Ints, told: Ints) -> int:
    """Do the work of `take_rows` for a range of rows: for all rows of the frames whose first row is in it.

    `told` has row_bytes, chunk_bytes, out, scratch, the first row, and the row after the last one.
    """
    row_bytes, chunk_bytes, out, scratch, row, stop = told
    crc, each, wanted = np.empty(1, np.uint32), np.empty(1, np.uint32), np.empty(_MOST_BLOCKS, np.int64)
    while 0 < row < which.size and which[row] == which[row - 1]:
        row += 1
    while row < min(stop, which.size):
        frame = which[row]
        if sizes[frame] < 16:
            return int(frame)
        copy_bytes(crc.ctypes.data, sources[frame] + sizes[frame], 4)
        if crc32c(np.uint32(0), sources[frame], np.uint64(sizes[frame])) != crc[0]:
            return int(frame)
        copy_bytes(each.ctypes.data, sources[frame] + 8, 4)
        wanted[:] = 0
        behind = row
        while behind < which.size and which[behind] == frame:
            first = inside[behind] * row_bytes
            _want(wanted, max(np.int64(each[0]), 1), first, first + row_bytes)
            behind += 1
        if not _unpack_some(sources[frame], sizes[frame], scratch, chunk_bytes, wanted):
            return int(frame)
        while row < behind:
            copy_bytes(out + goals[row] * row_bytes, scratch + inside[row] * row_bytes, row_bytes)
            row += 1
    return -1


#: The task that threads share, as one array: number of frames, of rows, of threads that have started, of rows
#: claimed by a thread; row_bytes, chunk_bytes, out, scratch with room for all threads; a result of each
#: thread; then the first five arguments of `take_rows`.
_FRAMES, _ROWS, _BEGUN, _TAKEN, _ARGUMENTS, _RESULT = 0, 1, 2, 3, 4, 8
_HEAD = _RESULT + MOST_THREADS
#: Rows claimed at a time: few, because a thread may have to wait for a core.
_GRAIN = 8


@compiled("void(int64[::1])", nogil=True)
def _help(task: Ints) -> None:
    """Claim and decompress rows until all are claimed."""
    frames, rows = task[_FRAMES], task[_ROWS]
    number = fetch_add(task.ctypes.data + 8 * _BEGUN, 1)
    told = np.empty(6, np.int64)
    told[:4] = task[_ARGUMENTS : _ARGUMENTS + 4]
    told[3] += number * told[1]
    first = _HEAD + 2 * frames
    while True:
        told[4] = fetch_add(task.ctypes.data + 8 * _TAKEN, _GRAIN)
        told[5] = told[4] + _GRAIN
        if told[4] >= rows:
            return
        bad = _take_some(
            task[_HEAD : _HEAD + frames],
            task[_HEAD + frames : first],
            task[first : first + rows],
            task[first + rows : first + 2 * rows],
            task[first + 2 * rows : first + 3 * rows],
            told,
        )
        if bad >= 0 and (task[_RESULT + number] < 0 or bad < task[_RESULT + number]):
            task[_RESULT + number] = bad


@compiled_for_c("intp(CPointer(int64))")
def _help_in_c(address: Any) -> int:
    """Run `_help` in a thread without Python."""
    sizes = numba.carray(address, 2)  # type: ignore[attr-defined]
    _help(numba.carray(address, _HEAD + 2 * sizes[0] + 3 * sizes[1]))  # type: ignore[attr-defined]
    return 0


@compiled("void(int64[::1], int64, int64)", nogil=True)
def _take_together(task: Ints, others: int, helper: int) -> None:
    """Run `_help` here and in as many of `others` helper threads as can be started; wait for all of them."""
    threads = start_helpers(others, helper, task.ctypes.data)
    _help(task)
    join_helpers(threads)


def take_rows(
    sources: Ints,
    sizes: Ints,
    which: Ints,
    inside: Ints,
    goals: Ints,
    row_bytes: int,
    chunk_bytes: int,
    out: int,
    scratch: int,
) -> int:
    """Copy rows out of frames. Each frame is decompressed once, and only the blocks with requested rows.

    The 4 bytes after a frame are its crc32c, which must match, because blosc does not check its input. The
    compressed and decompressed lengths in a frame's first 16 bytes must be the expected ones.

    Args:
        sources: Addresses of the frames. Shape `(m,)`.
        sizes: Lengths of the frames in bytes. Shape `(m,)`.
        which: Number of the frame of each row, ascending. Shape `(n,)`.
        inside: Number of each row in its frame. Shape `(n,)`.
        goals: Number of each row in `out`. Shape `(n,)`.
        row_bytes: Bytes of a row.
        chunk_bytes: Bytes of a decompressed frame.
        out: Address at which the rows are written.
        scratch: Address of `chunk_bytes` bytes of working memory.

    Returns:
        The number of the first damaged frame; -1 if all are sound.
    """
    threads = min(native.THREADS, sources.size * chunk_bytes // tuning.DECOMPRESS_THREAD_BYTES)
    if threads < 2:
        told = np.array([row_bytes, chunk_bytes, out, scratch, 0, which.size])
        return int(_take_some(sources, sizes, which, inside, goals, told))
    room = np.empty(threads * chunk_bytes, np.uint8)
    numbers = [sources.size, which.size, 0, 0, row_bytes, chunk_bytes, out, int(room.ctypes.data)]
    task = np.concatenate([numbers, [-1] * MOST_THREADS, sources, sizes, which, inside, goals])
    _take_together(task, threads - 1, _help_in_c.address)
    bad = task[_RESULT:_HEAD]
    return int(min(bad[bad >= 0], default=-1))


@compiled("int64(int64[::1], int64[::1], int64[::1], int64, int64[::1])", nogil=True)
def take_distances(sources: Ints, which: Ints, inside: Ints, rows: int, out: Ints) -> int:
    """Read the distances of rows from the tables before their frames.

    A table is a u32, the crc32c of the rest, which must match, and a u16 for each row of the chunk.

    Args:
        sources: Addresses of the frames; 0 if there is no frame, and its rows are skipped. Shape `(m,)`.
        which: Number of the frame of each row, ascending. Shape `(n,)`.
        inside: Number of each row in its chunk. Shape `(n,)`.
        rows: Number of rows of a chunk.
        out: Receives the distances. Shape `(n,)`.

    Returns:
        The number of the first frame whose table is damaged; -1 if all are sound.
    """
    crc, distance = np.empty(1, np.uint32), np.empty(1, np.uint16)
    held = -1
    for row in range(which.size):
        frame = which[row]
        if sources[frame] <= 0:
            continue
        table = sources[frame] - 2 * rows
        if frame != held:
            copy_bytes(crc.ctypes.data, table - 4, 4)
            if crc32c(np.uint32(0), table, np.uint64(2 * rows)) != crc[0]:
                return int(frame)
            held = frame
        copy_bytes(distance.ctypes.data, table + 2 * inside[row], 2)
        out[row] = np.int64(distance[0])
    return -1
