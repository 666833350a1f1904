"""Memory that two processes of one machine share: nameless, freed with the last process that maps it.

Used by a buffer that other processes write through. Linux only (`memfd_create`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Self

import numpy as np
from numpy.typing import NDArray

from expstore.errors import StorageError


class SharedMemory:
    """A mapping of anonymous memory that a descriptor passes to another process.

    The memory cannot shrink: if it could, a process that reads it would be killed by SIGBUS. Pages take
    memory once they are written to. A forked child inherits the mapping, and should drop this object. (Not to
    let it inherit the mapping, by MADV_DONTFORK, would be worse: when the object is freed there, it unmaps
    addresses at which the child may have other memory by then.)

    Args:
        descriptor: Of the memory; it is closed when this returns. None: make new memory.
        size: Bytes of new memory.

    Raises:
        StorageError: The descriptor is not of memory that keeps its size, or the system refuses the memory.
    """

    def __init__(self, descriptor: int | None = None, *, size: int = 0) -> None:
        self._descriptor = -1
        try:
            fd = _create(size) if descriptor is None else descriptor
            try:
                _check_sealed(fd)
                memory = mmap.mmap(fd, os.fstat(fd).st_size)
            except BaseException:
                os.close(fd)
                raise
        except (OSError, ValueError) as exc:
            raise StorageError(f"cannot map shared memory: {exc}") from exc
        if descriptor is None:
            self._descriptor = fd
        else:
            os.close(fd)
        #: All bytes. Shape `(size,)`.
        self.memory: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)

    def pass_descriptor(self) -> int:
        """Return the descriptor of new memory, for one other process; call `forget_descriptor` after that."""
        return self._descriptor

    def forget_descriptor(self) -> None:
        """Close the descriptor; the mapping stays."""
        fd, self._descriptor = self._descriptor, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.forget_descriptor()

    @classmethod
    def create(cls, size: int) -> Self:
        """Make memory of `size` bytes, all zero."""
        return cls(size=size)


def _create(size: int) -> int:
    fd = os.memfd_create("expstore", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_sealed(fd: int) -> None:
    """Raise ValueError unless no process can shrink the memory."""
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ValueError("another process could truncate it")
