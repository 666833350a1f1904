"""Compiled loop that takes rows out of blosc frames, many at a time, without the GIL.

Used by packed columns. Loading this module loads numba and makes numcodecs' own blosc known to it, so it is
imported in the background when rows come; until then numcodecs unpacks frame by frame. It reads addresses
it is given; threads that help with many frames end before a call returns, and never run Python.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import llvmlite.binding
import numba
import numcodecs.blosc
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from expstore.kernels import compiled, compiled_for_c

__all__ = ["take_distances", "take_rows"]

Ints = NDArray[np.int64]

# The very libraries that pack: their functions are found by name when the loop is linked.
llvmlite.binding.load_library_permanently(numcodecs.blosc.__file__)
llvmlite.binding.load_library_permanently(importlib.import_module("google_crc32c._crc32c").__file__)
for _name in ("crc32c_extend", "blosc_decompress_ctx", "LZ4_decompress_safe_partial"):
    if llvmlite.binding.address_of_symbol(_name) is None:  # then numcodecs goes on unpacking
        raise ImportError(f"google_crc32c or numcodecs does not show {_name}")
_unpack: Any = types.ExternalFunction(
    "blosc_decompress_ctx", types.int32(types.intp, types.intp, types.uintp, types.int32)
)
_unpack_lz4: Any = types.ExternalFunction(
    "LZ4_decompress_safe_partial",
    types.int32(types.intp, types.intp, types.int32, types.int32, types.int32),
)
_crc32c: Any = types.ExternalFunction("crc32c_extend", types.uint32(types.uint32, types.intp, types.uintp))
_copy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.uintp))
_start: Any = types.ExternalFunction(
    "pthread_create", types.int32(types.intp, types.intp, types.intp, types.intp)
)
_join: Any = types.ExternalFunction("pthread_join", types.int32(types.intp, types.intp))

#: A thread more for so many bytes that are to be unpacked: it costs 30 us.
EACH_BYTES = 8 << 20
MOST_THREADS = 4
_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_THREADS = min(MOST_THREADS, _CORES)
#: Of a blosc frame that is one block of LZ4 (lz4hc writes the same), neither shuffled nor split.
_LZ4 = 32


@compiled("boolean(int64, int64, int64, int64, int64)", nogil=True)
def _unpack_some(source: int, size: int, scratch: int, chunk_bytes: int, wanted: int) -> bool:
    """Unpack a frame whose checksum fits, at least so many of its bytes; say whether that went well.

    Bytes 0 to 15: version, version of the compressor, flags, bytes per item, then u32 length unpacked, length
    of a block, length packed (Blosc chunk format, version 2). Then comes where each block begins; a block
    begins with its length, which is that of its bytes where they are not packed.
    """
    header, block = np.empty(5, np.uint32), np.empty(1, np.uint32)
    _copy(header.ctypes.data, source, min(size, 20))
    if header[1] != chunk_bytes or np.int64(header[3]) != size:
        return False
    if (header[0] >> 16) & 255 == _LZ4 and header[0] >> 24 == 1 and header[2] >= chunk_bytes and size >= 24:
        start = np.int64(header[4])
        if start + 4 <= size:
            _copy(block.ctypes.data, source + start, 4)
            length = np.int64(block[0])
            if length < chunk_bytes and start + 4 + length <= size:
                done = _unpack_lz4(
                    source + start + 4, scratch, np.int32(length), np.int32(wanted), np.int32(chunk_bytes)
                )
                return bool(done >= wanted)
    return bool(_unpack(source, scratch, chunk_bytes, 1) == chunk_bytes)


def _fetch_add(_: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address, at once for all threads; return what it was."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        pointer = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, given[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


_take: Any = intrinsic(_fetch_add)


@compiled("int64(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64[::1])", nogil=True)
def _take_some(sources: Ints, sizes: Ints, which: Ints, inside: Ints, goals: Ints, told: Ints) -> int:
    """Do what `take_rows` does for a run of rows: of the frames that begin there, all rows.

    `told` holds row_bytes, chunk_bytes, out, scratch, the first row and the one behind the last.
    """
    row_bytes, chunk_bytes, out, scratch, row, stop = told
    crc = np.empty(1, np.uint32)
    while 0 < row < which.size and which[row] == which[row - 1]:
        row += 1
    while row < min(stop, which.size):
        frame = which[row]
        if sizes[frame] < 16:
            return int(frame)
        _copy(crc.ctypes.data, sources[frame] + sizes[frame], 4)
        if _crc32c(np.uint32(0), sources[frame], np.uint64(sizes[frame])) != crc[0]:
            return int(frame)
        behind, farthest = row, 0
        while behind < which.size and which[behind] == frame:
            farthest = max(farthest, inside[behind])
            behind += 1
        if not _unpack_some(sources[frame], sizes[frame], scratch, chunk_bytes, (farthest + 1) * row_bytes):
            return int(frame)
        while row < behind:
            _copy(out + goals[row] * row_bytes, scratch + inside[row] * row_bytes, row_bytes)
            row += 1
    return -1


#: What several threads are told, in one array: how many frames and rows there are; how many threads have
#: begun, and rows were taken by one; row_bytes, chunk_bytes, out, scratch with room for all of them; places
#: for what comes of each; then the first five arguments of `take_rows`.
_FRAMES, _ROWS, _BEGUN, _TAKEN, _ARGUMENTS, _RESULT = 0, 1, 2, 3, 4, 8
_HEAD = _RESULT + MOST_THREADS
#: So many rows are taken at a time: a thread that has to wait for a core keeps few from the others.
_GRAIN = 8


@compiled("void(int64[::1])", nogil=True)
def _help(task: Ints) -> None:
    """Take rows as long as there are any that nobody has taken."""
    frames, rows = task[_FRAMES], task[_ROWS]
    number = _take(task.ctypes.data + 8 * _BEGUN, 1)
    told = np.empty(6, np.int64)
    told[:4] = task[_ARGUMENTS : _ARGUMENTS + 4]
    told[3] += number * told[1]
    first = _HEAD + 2 * frames
    while True:
        told[4] = _take(task.ctypes.data + 8 * _TAKEN, _GRAIN)
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
    """Do the same in a thread that knows nothing of Python."""
    sizes = numba.carray(address, 2)  # type: ignore[attr-defined]
    _help(numba.carray(address, _HEAD + 2 * sizes[0] + 3 * sizes[1]))  # type: ignore[attr-defined]
    return 0


@compiled("void(int64[::1], int64, int64)", nogil=True)
def _take_together(task: Ints, others: int, helper: int) -> None:
    """Have other threads help, as far as they can be begun, and end with the last of them."""
    threads = np.zeros(others, np.int64)
    begun = 0
    while begun < others and _start(threads.ctypes.data + 8 * begun, 0, helper, task.ctypes.data) == 0:
        begun += 1
    _help(task)
    for i in range(begun):
        _join(threads[i], 0)


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
    """Copy rows out of frames, each of which is unpacked once, as far as rows are wanted of it.

    The 4 bytes behind a frame are its crc32c, which must fit: blosc trusts what it unpacks. What its first
    16 bytes say of its length, packed and unpacked, must be what is known of it.

    Args:
        sources: Addresses of the frames. Shape `(m,)`.
        sizes: Their lengths. Shape `(m,)`.
        which: In which of them each row is, ascending. Shape `(n,)`.
        inside: Which of its rows. Shape `(n,)`.
        goals: Which row of `out` it becomes. Shape `(n,)`.
        row_bytes: Length of a row.
        chunk_bytes: Length of an unpacked frame.
        out: Address of the rows.
        scratch: Address of `chunk_bytes` bytes.

    Returns:
        The first frame that is damaged; -1: none.
    """
    threads = min(_THREADS, sources.size * chunk_bytes // EACH_BYTES)
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
    """Read what the tables before frames say of rows.

    A table is a u32, the crc32c of the rest, which must fit, and a u16 for each row of the chunk.

    Args:
        sources: Addresses of the frames; 0: there is none, and nothing is read. Shape `(m,)`.
        which: Before which of them each row's table is, ascending. Shape `(n,)`.
        inside: Which of its rows. Shape `(n,)`.
        rows: Of a chunk.
        out: Gets what they say. Shape `(n,)`.

    Returns:
        The first frame whose table is damaged; -1: none.
    """
    crc, distance = np.empty(1, np.uint32), np.empty(1, np.uint16)
    held = -1
    for row in range(which.size):
        frame = which[row]
        if sources[frame] <= 0:
            continue
        table = sources[frame] - 2 * rows
        if frame != held:
            _copy(crc.ctypes.data, table - 4, 4)
            if _crc32c(np.uint32(0), table, np.uint64(2 * rows)) != crc[0]:
                return int(frame)
            held = frame
        _copy(distance.ctypes.data, table + 2 * inside[row], 2)
        out[row] = np.int64(distance[0])
    return -1
