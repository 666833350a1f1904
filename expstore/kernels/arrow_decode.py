"""Compiled loops that decompress many buffers of Arrow batches (LZ4 or zstd) without the GIL.

Used by segments. Importing it loads numba; it is imported in the background when rows are read or written,
and until then pyarrow decompresses batch by batch. The loops work on addresses. Helper threads end before a
call returns and never run Python. Formats: Arrow's "Compressed buffer", the LZ4 frame format 1.6, RFC 8878.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from expstore.kernels import native
from expstore.kernels.file_loops import compiled, compiled_for_c
from expstore.kernels.native import copy_bytes, crc32c, fetch_add, join_helpers, start_helpers

Ints = NDArray[np.int64]

_INT, _SIZE, _ADDRESS = types.int32, types.uintp, types.intp
# Functions of numcodecs' libraries, which `expstore.kernels.native` has loaded.
for _name in ("LZ4_decompress_safe_usingDict", "ZSTD_createDCtx", "ZSTD_decompressDCtx", "ZSTD_freeDCtx"):
    if llvmlite.binding.address_of_symbol(_name) is None:  # then pyarrow keeps decompressing
        raise ImportError(f"numcodecs does not export {_name}")
#: Source, target, length, room in the target, data decompressed before (the dictionary), its length.
_unpack_lz4: Any = types.ExternalFunction(
    "LZ4_decompress_safe_usingDict", _INT(_ADDRESS, _ADDRESS, _INT, _INT, _ADDRESS, _INT)
)
_new_context: Any = types.ExternalFunction("ZSTD_createDCtx", _ADDRESS())
_free_context: Any = types.ExternalFunction("ZSTD_freeDCtx", _SIZE(_ADDRESS))
#: Context, target, room in it, source, length.
_unpack_zstd: Any = types.ExternalFunction(
    "ZSTD_decompressDCtx", _SIZE(_ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE)
)

_LZ4, _ZSTD = 0x184D2204, 0xFD2FB528
#: Bytes before a block to which LZ4 may refer.
_WINDOW = 65536
_MOST = (1 << 31) - 1
#: Each buffer begins with its decompressed length, -1 if it is not compressed.
_HEAD_BYTES = 8
#: Decompressed bytes per helper thread, which costs 30 us.
EACH_BYTES = 256 << 10


@compiled("int64(int64[::1], int64[::1], int64[::1], int64[::1])", nogil=True)
def find_damaged(sources: Ints, sizes: Ints, places: Ints, crcs: Ints) -> int:
    """Return the number of the first message that does not match its crc32c; -1 if all match.

    Args:
        sources: Addresses of the messages. Shape `(n,)`, like the following arguments.
        sizes: Lengths of the messages in bytes.
        places: Positions of the 8 digits of the crc32c in each message; they count as the digit 0.
        crcs: The expected values.
    """
    zeros = np.full(8, 48, np.uint8)
    for number in range(sources.size):
        source, at = sources[number], places[number]
        crc = crc32c(np.uint32(0), source, np.uint64(at))
        crc = crc32c(crc, zeros.ctypes.data, np.uint64(8))
        crc = crc32c(crc, source + at + 8, np.uint64(sizes[number] - at - 8))
        if np.int64(crc) != crcs[number]:
            return number
    return -1


@compiled("void(int64[::1], int64[::1], int64[::1])", nogil=True)
def find_lengths(sources: Ints, sizes: Ints, lengths: Ints) -> None:
    """Find the decompressed lengths of buffers.

    Args:
        sources: Addresses of the buffers. Shape `(n,)`, like the following arguments.
        sizes: Compressed lengths in bytes; 0 if a buffer does not exist.
        lengths: Receives the decompressed lengths; -1 for a damaged buffer.
    """
    said = np.empty(1, np.int64)
    for number in range(sources.size):
        lengths[number] = -1 if sizes[number] else 0
        if sizes[number] >= _HEAD_BYTES:
            copy_bytes(said.ctypes.data, sources[number], _HEAD_BYTES)
            lengths[number] = sizes[number] - _HEAD_BYTES if said[0] == -1 else max(said[0], -1)


@compiled("boolean(int64, int64, int64, int64)", nogil=True)
def _unpack_frame(source: int, size: int, goal: int, length: int) -> bool:
    """Decompress an LZ4 frame; return whether it is sound and has this length."""
    word, flags = np.zeros(1, np.uint32), np.zeros(1, np.uint8)
    copy_bytes(flags.ctypes.data, source + 4, 1)
    if flags[0] >> 6 != 1:
        return False
    at: Any = 7 + (8 if flags[0] & 8 else 0) + (4 if flags[0] & 1 else 0)
    done: Any = 0
    while at + 4 <= size:
        copy_bytes(word.ctypes.data, source + at, 4)
        at += 4
        if word[0] == 0:
            return bool(done == length)
        block, plain = np.int64(word[0]) & _MOST, np.int64(word[0]) >> 31
        if at + block > size:
            return False
        room = min(length - done, _MOST)
        if plain:
            if block > room:
                return False
            copy_bytes(goal + done, source + at, block)
            done += block
        else:
            before = min(done, _WINDOW)
            got = _unpack_lz4(
                source + at,
                goal + done,
                np.int32(block),
                np.int32(room),
                goal + done - before,
                np.int32(before),
            )
            if got < 0:
                return False
            done += np.int64(got)
        at += block + (4 if flags[0] & 16 else 0)
    return False


@compiled("boolean(int64, int64, int64, int64, int64)", nogil=True)
def _unpack(source: int, size: int, goal: int, length: int, context: int) -> bool:
    """Decompress a buffer; return whether it is sound."""
    said, magic = np.empty(1, np.int64), np.zeros(1, np.uint32)
    copy_bytes(said.ctypes.data, source, _HEAD_BYTES)
    source, size = source + _HEAD_BYTES, size - _HEAD_BYTES
    if said[0] == -1:
        copy_bytes(goal, source, length)
        return True
    if size < 7:
        return False
    copy_bytes(magic.ctypes.data, source, 4)
    if magic[0] == _ZSTD and context:
        got = _unpack_zstd(context, goal, np.uint64(length), source, np.uint64(size))
        return bool(got == np.uint64(length))
    return bool(magic[0] == _LZ4 and _unpack_frame(source, size, goal, length))


#: The task that threads share, as one array: number of buffers, number of buffers claimed by a thread, number
#: of a damaged buffer (-1: no buffer); then the four arguments of `unpack_buffers`.
_COUNT, _TAKEN, _BAD, _FIRST = 0, 1, 2, 3
#: Buffers claimed at a time: few, because a thread may have to wait for a core.
_GRAIN = 8


@compiled("void(int64[::1])", nogil=True)
def _help(task: Ints) -> None:
    """Claim and decompress buffers until all are claimed."""
    count = task[_COUNT]
    context = _new_context()
    while True:
        first = fetch_add(task.ctypes.data + 8 * _TAKEN, _GRAIN)
        if first >= count:
            break
        for number in range(first, min(first + _GRAIN, count)):
            at = _FIRST + number
            goal, length = task[at + 2 * count], task[at + 3 * count]
            if not _unpack(task[at], task[at + count], goal, length, context):
                task[_BAD] = number
    _free_context(context)


@compiled_for_c("intp(CPointer(int64))")
def _help_in_c(address: Any) -> int:
    """Run `_help` in a thread without Python."""
    count = numba.carray(address, 1)[0]  # type: ignore[attr-defined]
    _help(numba.carray(address, _FIRST + 4 * count))  # type: ignore[attr-defined]
    return 0


@compiled("void(int64[::1], int64, int64)", nogil=True)
def _unpack_together(task: Ints, others: int, helper: int) -> None:
    """Run `_help` here and in as many of `others` helper threads as can be started; wait for all of them."""
    threads = start_helpers(others, helper, task.ctypes.data)
    _help(task)
    join_helpers(threads)


def unpack_buffers(sources: Ints, sizes: Ints, goals: Ints, lengths: Ints) -> int:
    """Decompress buffers.

    Args:
        sources: Addresses of the buffers. Shape `(n,)`, like the following arguments.
        sizes: Compressed lengths in bytes, at least 8.
        goals: Addresses for the decompressed bytes.
        lengths: Decompressed lengths, as `find_lengths` returned them.

    Returns:
        The number of a damaged buffer; -1 if all are sound.
    """
    threads = max(1, min(native.THREADS, int(lengths.sum()) // EACH_BYTES))
    task = np.concatenate([[sources.size, 0, -1], sources, sizes, goals, lengths])
    _unpack_together(task, threads - 1, _help_in_c.address)
    return int(task[_BAD])
