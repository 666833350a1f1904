"""Compiled loop that compresses many chunks into blosc frames without the GIL.

Used by packed columns. Importing it loads numba; it is imported in the background when rows are read or
written, and until then numcodecs compresses chunk by chunk into the same frames. The loop works on addresses.
Helper threads end before a call returns and never run Python.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from expstore.kernels import native
from expstore.kernels.file_loops import compiled, compiled_for_c
from expstore.kernels.native import copy_bytes, crc32c, fetch_add, join_helpers, pack_blosc, start_helpers

#: Bytes that a frame may be longer than its rows, and bytes of the crc32c after it.
_MORE, _CRC = 16, 4
#: The task that threads share, as one array: number of chunks, number of chunks claimed by a thread, address
#: of the rows, bytes per chunk and per block, level, address of the compressor's name, address of the frames;
#: then the length of each frame with its crc32c, 0 if compression failed.
_CHUNKS, _TAKEN, _ROWS, _BYTES, _BLOCK, _LEVEL, _NAME, _FRAMES, _HEAD = range(9)


@compiled("void(int64[::1])", nogil=True)
def _help(task: NDArray[np.int64]) -> None:
    """Claim and compress chunks until all are claimed."""
    size = task[_BYTES]
    crc = np.empty(1, np.uint32)
    while True:
        chunk = fetch_add(task.ctypes.data + 8 * _TAKEN, 1)
        if chunk >= task[_CHUNKS]:
            return
        source, goal = task[_ROWS] + chunk * size, task[_FRAMES] + chunk * (size + _MORE + _CRC)
        most, block = np.uint64(size + _MORE), np.uint64(task[_BLOCK])
        length = pack_blosc(
            np.int32(task[_LEVEL]), 0, 1, np.uint64(size), source, goal, most, task[_NAME], block, 1
        )
        if length > 0:
            crc[0] = crc32c(np.uint32(0), goal, np.uint64(length))
            copy_bytes(goal + length, crc.ctypes.data, _CRC)
            task[_HEAD + chunk] = length + _CRC


@compiled_for_c("intp(CPointer(int64))")
def _help_in_c(address: Any) -> int:
    """Run `_help` in a thread without Python."""
    chunks = numba.carray(address, 1)[0]  # type: ignore[attr-defined]
    _help(numba.carray(address, _HEAD + chunks))  # type: ignore[attr-defined]
    return 0


@compiled("void(int64[::1], int64, int64)", nogil=True)
def _pack_together(task: NDArray[np.int64], others: int, helper: int) -> None:
    """Run `_help` here and in as many of `others` helper threads as can be started; wait for all of them."""
    threads = start_helpers(others, helper, task.ctypes.data)
    _help(task)
    join_helpers(threads)


def pack_chunks(
    rows: NDArray[Any], count: int, compressor: str, level: int, *, block: int = 0
) -> list[bytes]:
    """Return the frames of chunks, not shuffled, each followed by its crc32c; b"" if compression failed.

    Args:
        rows: The rows of all chunks, C-contiguous. Shape `(count * n, *row shape)`.
        count: Number of chunks.
        compressor: Blosc's name of the compressor.
        level: Compression level, 1 to 9.
        block: Block size in bytes, as in `Codec.pack`.
    """
    size = rows.nbytes // count
    room = np.empty((count, size + _MORE + _CRC), np.uint8)
    name = np.frombuffer(compressor.encode() + b"\0", np.uint8)
    numbers = [count, 0, rows.ctypes.data, size, block, level, name.ctypes.data, room.ctypes.data]
    task = np.array(numbers + [0] * count)
    _pack_together(task, min(native.THREADS, count) - 1, _help_in_c.address)
    return [room[chunk, :length].tobytes() for chunk, length in enumerate(task[_HEAD:].tolist())]
