"""Compiled loop that takes rows out of blosc frames, many at a time, without the GIL.

Used by packed columns. Loading this module loads numba and makes numcodecs' own blosc known to it, so it is
imported in the background when rows come; until then numcodecs unpacks frame by frame. It reads addresses
it is given, and allocates nothing but 16 bytes.
"""

from __future__ import annotations

import importlib
from typing import Any

import llvmlite.binding
import numcodecs.blosc
import numpy as np
from numba.core import types
from numpy.typing import NDArray

from expstore.kernels import compiled

__all__ = ["take_rows"]

Ints = NDArray[np.int64]

# The very libraries that pack: their functions are found by name when the loop is linked.
llvmlite.binding.load_library_permanently(numcodecs.blosc.__file__)
llvmlite.binding.load_library_permanently(importlib.import_module("google_crc32c._crc32c").__file__)
if llvmlite.binding.address_of_symbol("crc32c_extend") is None:
    raise ImportError("google_crc32c does not show its functions")  # then numcodecs goes on unpacking
_unpack: Any = types.ExternalFunction(
    "blosc_decompress_ctx", types.int32(types.intp, types.intp, types.uintp, types.int32)
)
_crc32c: Any = types.ExternalFunction("crc32c_extend", types.uint32(types.uint32, types.intp, types.uintp))
_copy: Any = types.ExternalFunction("memcpy", types.intp(types.intp, types.intp, types.uintp))


@compiled(
    "int64(int64[::1], int64[::1], int64[::1], int64[::1], int64[::1], int64, int64, int64, int64)",
    nogil=True,
)
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
    """Copy rows out of frames, each of which is unpacked once.

    The 4 bytes behind a frame are its crc32c, which must fit: blosc trusts what it unpacks. Its first 16
    bytes say how long it is, packed and unpacked (Blosc chunk format, version 2); they must say what is
    known of it.

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
    header = np.empty(4, np.uint32)
    held = -1
    for row in range(which.size):
        frame = which[row]
        if frame != held:
            if sizes[frame] < 16:
                return int(frame)
            _copy(header.ctypes.data, sources[frame] + sizes[frame], 4)
            if _crc32c(np.uint32(0), sources[frame], np.uint64(sizes[frame])) != header[0]:
                return int(frame)
            _copy(header.ctypes.data, sources[frame], 16)
            if header[1] != chunk_bytes or np.int64(header[3]) != sizes[frame]:
                return int(frame)
            if _unpack(sources[frame], scratch, chunk_bytes, 1) != chunk_bytes:
                return int(frame)
            held = frame
        _copy(out + goals[row] * row_bytes, scratch + inside[row] * row_bytes, row_bytes)
    return -1
