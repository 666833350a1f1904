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


@numba.njit("int64(int64[::1], int64[::1], int64[::1], int64[::1])", cache=True)
def write_pieces(fds: Ints, addresses: Ints, sizes: Ints, offsets: Ints) -> int:
    """Write arrays to one file each.

    Args:
        fds: Descriptors. Shape `(n,)`.
        addresses: Where each array's bytes begin. Shape `(n,)`.
        sizes: How many bytes it has. Shape `(n,)`.
        offsets: Where they go in the file. Shape `(n,)`.

    Returns:
        The number of the first array that was not written whole, or n.
    """
    for i in range(fds.size):
        if _pwrite(np.int32(fds[i]), addresses[i], sizes[i], offsets[i]) != sizes[i]:
            return i
    return fds.size
