"""Compiled loops that run with the GIL held.

Used by `files`. Loading this module loads numba, so it is imported in the background, once a store is
open; until then, and where numba cannot compile, plain Python does the same work.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

__all__ = ["write_pieces"]

Ints = NDArray[np.int64]

# libc's, found by name when the loop is linked.
_pwrite: Any = types.ExternalFunction("pwrite", types.intp(types.int32, types.intp, types.intp, types.int64))


@numba.njit("int64(int64[::1], int64[::1], int64[::1], int64[::1], int64)", cache=True)
def write_pieces(fds: Ints, starts: Ints, sizes: Ints, offsets: Ints, base: int) -> int:
    """Write parts of a buffer to several files.

    Args:
        fds: Descriptors. Shape `(n,)`.
        starts: Where each part begins in the buffer, in bytes.
        sizes: Bytes of each part.
        offsets: Where it goes in its file.
        base: Address of the buffer.

    Returns:
        The number of the first part that was not written whole, or n.
    """
    for i in range(fds.size):
        if _pwrite(np.int32(fds[i]), base + starts[i], sizes[i], offsets[i]) != sizes[i]:
            return i
    return fds.size
