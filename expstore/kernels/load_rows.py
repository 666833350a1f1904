"""Load rows of mapped files into memory before they are copied.

Used by columns of a store that is larger than memory. A copy that touches a page which is not in memory waits
for the disk, page after page, and the kernel reads what surrounds the page, too: 8 MB on disks with that much
readahead (`/sys/block/*/queue/read_ahead_kb`). Asking first for exactly the pages of all rows reads no more
than these, and many at a time. Linux only.

The calls are described in madvise(2) and mincore(2).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import types
from numpy.typing import NDArray

from expstore.kernels.file_loops import compiled

Ints = NDArray[Any]

_madvise: Any = types.ExternalFunction("madvise", types.int32(types.intp, types.intp, types.int32))
_mincore: Any = types.ExternalFunction("mincore", types.int32(types.intp, types.intp, types.intp))
_WILLNEED = 3
#: Since Linux 5.14; refused by older kernels, where the copy waits instead.
_POPULATE_READ = 22
#: Pages per call of mincore.
_PAGES = 64


@compiled("int64(int64[::1], int64[::1], int64[::1], int64)", nogil=True)
def load_rows(columns: Ints, sizes: Ints, slots: Ints, page: int) -> int:
    """Ask the kernel for the rows that are not in memory, then wait for them without the GIL.

    Args:
        columns: Address of the first row of each column. Shape `(columns,)`.
        sizes: Bytes per row of each column. Shape `(columns,)`.
        slots: The rows, each of which has a place in a file. Shape `(n,)`.
        page: Bytes of a page of memory.

    Returns:
        How many parts of up to 64 pages were not wholly in memory. Always 0 for files that this user neither
        owns nor may write to: the kernel does not tell.
    """
    missing = 0
    resident = np.empty(_PAGES, np.uint8)
    for wait in (False, True):
        for column in range(columns.size):
            row = 0
            while row < slots.size:
                first = last = slots[row]
                row += 1
                while row < slots.size and slots[row] == last + 1:
                    last += 1
                    row += 1
                at = (columns[column] + first * sizes[column]) // page * page
                end = columns[column] + (last + 1) * sizes[column]
                if wait:
                    _madvise(at, end - at, np.int32(_POPULATE_READ))
                    continue
                while at < end:
                    pages = min(_PAGES, (end - at + page - 1) // page)
                    known = _mincore(at, pages * page, resident.ctypes.data) == 0
                    if known and not (resident[:pages] & 1).all():
                        _madvise(at, pages * page, np.int32(_WILLNEED))
                        missing += 1
                    at += pages * page
        if not missing:
            break
    return missing
