"""Map many files into one address range, so that a column is one flat array over all of its shards.

Used by columns. It maps files that `expstore.disk.files` has opened, for reading only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.disk.files import File
from expstore.errors import StorageError

#: Size of a page of memory, bytes.
PAGE_BYTES = resource.getpagesize()

_PROT_READ = 1
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED = 0x01, 0x02, 0x10
_MAP_NORESERVE, _MAP_ANONYMOUS = (0x40, 0x1000) if sys.platform == "darwin" else (0x4000, 0x20)

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_longlong,
]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class AddressRange:
    """A reserved range of addresses into which the data parts of files are mapped one after another.

    The range exists as long as an array over it. Unmapped parts must not be read (SIGSEGV); therefore the
    library never returns an array over it to users.
    """

    def __init__(self, size: int) -> None:
        flags = _MAP_PRIVATE | _MAP_NORESERVE | _MAP_ANONYMOUS
        address = _mmap(None, size, 0, flags, -1, 0)
        if address is None or address == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise StorageError(f"cannot reserve {size} bytes of addresses: {os.strerror(code)}")
        self.address = int(address)
        self.size = size
        # Not at exit: a thread may still be reading when the interpreter shuts down.
        weakref.finalize(self, _munmap, ctypes.c_void_p(self.address), size).atexit = False

    def attach(self, file: File, *, at: int, size: int, may_shrink: bool = False) -> None:
        """Map the first `size` bytes of `file` for reading at offset `at` of the range.

        Args:
            file: An open file.
            at: Offset of its first byte in the range.
            size: Number of bytes to map.
            may_shrink: Whether the file's writer may truncate unused bytes at its end meanwhile. They must
                not be read: reading a page after the end of the file ends the process (SIGBUS).
        """
        if not may_shrink and file.size() < size:
            raise StorageError(f"{file.path} is shorter than the {size} bytes to be mapped")
        want = self.address + at
        got = _mmap(want, size, _PROT_READ, _MAP_SHARED | _MAP_FIXED, file.fd, 0)
        if got != want:
            raise StorageError(f"cannot map {file.path}: {os.strerror(ctypes.get_errno())}")

    def array(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], *, writable_flag: bool = False
    ) -> NDArray[Any]:
        """Return an array over the whole range.

        `writable_flag` only sets the array's flag (torch warns about arrays without it); the pages are
        read-only.
        """
        return np.asarray(_View(self, dtype, shape, writable_flag))


class _View:
    """Implements NumPy's array interface and keeps the range alive."""

    def __init__(
        self, owner: AddressRange, dtype: np.dtype[Any], shape: tuple[int, ...], writable_flag: bool
    ) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "version": 3,
            "data": (owner.address, not writable_flag),
            "typestr": dtype.str,
            "shape": shape,
        }
