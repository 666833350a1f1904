"""The only module that touches files: open, pwrite, sync, rename, unlink, allocate, map, lock.

Used by everything that stores bytes on disk. Tests replace `Disk` to stop or fail the N-th operation. It does
not know about stores, records or rows.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import resource
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.disk.threads import Job, Threads, finish
from expstore.errors import StorageError
from expstore.kernels.loader import compiling, load_in_background

_Ints = NDArray[np.int64]

#: A write of more bytes releases the GIL: its copy takes longer than a thread switch.
KEEP_GIL_BYTES = 256 * 1024
#: A file that is written through a map is reserved and mapped in pieces of this length, bytes.
MAP_BYTES = 256 * 1024
_SYNC_GROUPS = 4
#: Instead of so many folders, the file system is synced as a whole.
MANY_FOLDERS = 256
#: Bytes that `Disk.unshare` copies at a time.
_COPY_BYTES = 8 << 20
#: Errors of a file system that does not support hard links, or not of this file.
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES, errno.ENOENT}
_CAREFULLY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_RANGE_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_KINDS = {errno.ENOSPC: "disk_full", errno.EDQUOT: "disk_full", errno.EROFS: "read_only"}
_HINTS = {
    "disk_full": "free space on this disk, then try again",
    "read_only": "mount the file system for writing; open(mode='r') reads a store and writes nothing",
}
#: Operations after whose failure the content of the disk is unknown.
_SYNCS = {"sync", "sync_dir"}

_F_FULLFSYNC = 51  # macOS: fsync alone leaves data in the drive's cache

_libc = ctypes.CDLL(None, use_errno=True)
# PyDLL keeps the GIL: while another Python thread is busy, each os.pwrite would wait 5 ms to get it back.
_pwrite = ctypes.PyDLL(None, use_errno=True).pwrite
_pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong]
_pwrite.restype = ctypes.c_ssize_t
_pread = ctypes.PyDLL(None, use_errno=True).pread
_pread.argtypes = _pwrite.argtypes
_pread.restype = ctypes.c_ssize_t


def _sync_data(fd: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(fd, _F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def _to_error(act: str, path: Path, exc: OSError) -> StorageError:
    """Return a StorageError for a system error; return a StorageError (raised by a gate) unchanged."""
    if isinstance(exc, StorageError):
        error = exc
    else:
        kind = _KINDS.get(exc.errno or 0, "storage")
        hint = _HINTS.get(kind, "")
        error = StorageError(f"cannot {act} {path}: {exc.strerror or exc}", kind=kind, hint=hint)
        error.errno = exc.errno
    error.lost = act in _SYNCS
    return error


def build_deleted_error(path: Path) -> StorageError:
    """Return the error for a store whose files were deleted, moved or replaced while it was open."""
    error = StorageError(
        f"{path} was deleted, moved or replaced while its store was open",
        hint="close the store, and restore the folder or use another",
    )
    error.errno, error.lost = errno.ENOENT, True
    return error


def _irregular(path: Path) -> StorageError:
    """Return the error for a path that is neither a file nor a folder."""
    what = "a symbolic link" if path.is_symlink() else "neither a file nor a folder"
    return StorageError(
        f"{path} is {what}",
        kind="not_regular",
        hint="move the file itself to its place; only the store's own folder may be a link",
    )


def _open_regular(path: Path, flags: int) -> int:
    """Return a descriptor of a file or folder. It does not follow links and does not block on pipes.

    Raises:
        OSError: `os.open` failed; a StorageError if the path is neither a file nor a folder.
    """
    try:
        fd = os.open(path, flags | _CAREFULLY, 0o644)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):  # a link; a pipe or a socket
            raise _irregular(path) from exc
        raise
    if not _is_regular(os.fstat(fd).st_mode):
        os.close(fd)
        raise _irregular(path)
    return fd


def _is_regular(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _system_error(code: int) -> OSError:
    return OSError(code, os.strerror(code))


def _copy(old: File, new: File) -> None:
    """Copy the content of a file into an empty file; holes remain holes."""
    size, at = old.size(), 0
    new.truncate(size)
    while (at := old.next_data(at)) < size:
        end = old.next_hole(at)
        while at < end:
            part = old.read(at, min(_COPY_BYTES, end - at))
            if not part:
                raise StorageError(f"{old.path} was truncated while it was copied", hint="try again")
            new.write(part, at)
            at += len(part)


def address_of(array: NDArray[Any]) -> int:
    """Return the address of an array's first byte, four times as fast as `ctypes.data`."""
    buffer: Any = array
    if array.flags.writeable and array.nbytes:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return int(array.ctypes.data)


def link_if(name: str, old: File, new: File, size: int) -> int:
    """Hard-link one file from folder `old` to folder `new` if it has `size` bytes.

    Returns:
        As `file_loops.link_files` for each name: 0 if linked, -1 for another size, or the error number.
    """
    try:
        if os.stat(name, dir_fd=old.fd).st_size != size:
            return -1
        os.link(name, name, src_dir_fd=old.fd, dst_dir_fd=new.fd)
    except OSError as exc:
        return exc.errno or errno.EIO
    return 0


def link_error(path: Path, code: int) -> StorageError | None:
    """Return the error for a code of `link_if`; None if the link was made or links are not supported."""
    return _to_error("link", path, _system_error(code)) if code > 0 and code not in _CANNOT_LINK else None


class File:
    """An open file.

    Threads may write disjoint ranges at the same time. After a fork the child shares the descriptor; the
    owner of the file decides what a child may do.
    """

    _resting = (0, 0, 0)  # access mode, device and inode of a file without a descriptor
    _view: mmap.mmap | None = None  # of `write_mapped`

    def __init__(self, disk: Disk, path: Path, fd: int) -> None:
        self.disk = disk
        self.path = path
        self.fd = fd

    @cached_property
    def fd(self) -> int:
        """The descriptor, -1 if the file is closed; the first use after `rest` opens the file again.

        Raises:
            StorageError: It cannot be opened, or another file has its path.
        """
        mode, *identity = self._resting
        try:
            fd = _open_regular(self.path, mode)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise build_deleted_error(self.path) from exc
        except OSError as exc:
            raise _to_error("open", self.path, exc) from exc
        status = os.fstat(fd)
        if [status.st_dev, status.st_ino] != identity:
            os.close(fd)
            raise build_deleted_error(self.path)
        # Of two threads that open it at the same time, both use the first one's descriptor.
        first: int = vars(self).setdefault("fd", fd)
        if first != fd:
            os.close(fd)
        return first

    def rest(self) -> None:
        """Close the descriptor until the file is used again.

        No other thread may be using the file. Its bytes must be synced: without a descriptor, the system may
        forget that it could not write them.
        """
        fd = vars(self).get("fd", -1)
        if fd >= 0:
            status = os.fstat(fd)
            mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
            self._resting = mode, status.st_dev, status.st_ino
            del self.fd
            os.close(fd)

    def use(self) -> contextlib.AbstractContextManager[File]:
        """Return a context in which the file has a descriptor."""
        return contextlib.nullcontext(self)

    def write(self, data: bytes | NDArray[Any], offset: int) -> None:
        """Write all of `data` at `offset`; arrays must be C-contiguous."""
        size = len(data) if isinstance(data, bytes) else data.nbytes
        try:
            self.disk.gate("write", self.path)
            done = self.write_some(data, size, offset)
            if done < size:
                view = memoryview(data) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data
                while done < size:
                    done += self.write_some(view[done:], size - done, offset + done)
        except OSError as exc:
            raise _to_error("write to", self.path, exc) from exc

    def write_mapped(self, data: bytes, offset: int) -> None:
        """Write `data` at `offset` by a copy to a map, most times without a system call.

        Up to `MAP_BYTES` zeros follow in the file until `truncate`: their blocks are reserved, so that a full
        disk is an error here, and not a signal (SIGBUS) that ends the process. One thread at a time.
        """
        self.disk.gate("write", self.path)
        view, end = self._view, offset + len(data)
        if view is None or end > len(view):
            view = self._map_more(end)
        view[offset:end] = data

    def _map_more(self, size: int) -> mmap.mmap:
        """Reserve and map at least the first `size` bytes, for `write_mapped`."""
        former, size = self.size(), size + MAP_BYTES - size % MAP_BYTES
        if hasattr(os, "posix_fallocate"):
            self.allocate(size)
        else:
            self.write(bytes(max(0, size - former)), former)
        self._view = view = self.map_writable(size)
        return view

    def write_some(self, data: Any, size: int, offset: int) -> int:
        """Write as much of `data` as one system call does; return the number of bytes written.

        Raises:
            OSError: Nothing was written.
        """
        if size <= KEEP_GIL_BYTES and not isinstance(data, memoryview):
            address: Any = data if isinstance(data, bytes) else address_of(data)
            done: int = _pwrite(self.fd, address, size, offset)
            if done < 0:
                raise _system_error(ctypes.get_errno())
        else:
            view = data if isinstance(data, bytes | memoryview) else data.reshape(-1).view(np.uint8).data
            done = os.pwrite(self.fd, view, offset)
        if done == 0 < size:
            raise _system_error(errno.EIO)  # otherwise `write` would loop forever
        return done

    def read(self, offset: int, size: int) -> bytes:
        """Read up to `size` bytes at `offset`; memory is allocated only for bytes that the file has."""
        parts = []
        if size > KEEP_GIL_BYTES:  # a length from a file may be any number
            size = min(size, self.size() - offset)
        try:
            while size > 0:
                part = os.pread(self.fd, size, offset)
                if not part:
                    break
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
        except OSError as exc:
            raise _to_error("read", self.path, exc) from exc
        return b"".join(parts)

    def read_cached(self, offset: int, out: NDArray[Any]) -> bool:
        """Fill a C-contiguous array with bytes that are probably in memory, without releasing the GIL.

        Returns:
            Whether the file has as many bytes and the array has them now.
        """
        return bool(_pread(self.fd, address_of(out), out.nbytes, offset) == out.nbytes)

    def size(self) -> int:
        """Return the length in bytes."""
        try:
            return os.fstat(self.fd).st_size
        except OSError as exc:
            raise _to_error("look at", self.path, exc) from exc

    def next_data(self, offset: int) -> int:
        """Return the position of the first byte from `offset` on that is not in a hole, or the length.

        Bytes in a hole are zeros. Returns `offset` itself if the system cannot tell.
        """
        try:
            return os.lseek(self.fd, offset, os.SEEK_DATA)
        except (OSError, AttributeError) as exc:
            return self.size() if getattr(exc, "errno", None) == errno.ENXIO else offset

    def check_linked(self) -> None:
        """Raise StorageError if the file was deleted while it was open: what is written to it is lost."""
        try:
            is_linked = os.fstat(self.fd).st_nlink > 0
        except OSError as exc:
            raise _to_error("look at", self.path, exc) from exc
        if not is_linked:
            raise build_deleted_error(self.path)

    def is_at(self, path: Path) -> bool:
        """Return whether a path leads to this file or folder, and to no other that replaced it."""
        try:
            return os.path.samestat(os.fstat(self.fd), os.stat(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as exc:
            raise _to_error("look at", path, exc) from exc

    def next_hole(self, offset: int) -> int:
        """Return the position of the first hole from `offset` on, or the length if the system cannot tell."""
        try:
            return os.lseek(self.fd, offset, os.SEEK_HOLE)
        except (OSError, AttributeError):
            return self.size()

    def inode(self) -> int:
        """Return the file's inode number."""
        return os.fstat(self.fd).st_ino

    def links(self) -> int:
        """Return how many names the file has; 1 for a folder."""
        found = os.fstat(self.fd)
        return found.st_nlink if stat.S_ISREG(found.st_mode) else 1

    def sync(self) -> None:
        """Bring the file's bytes and length to the disk."""
        try:
            self.disk.gate("sync", self.path)
            self.disk.count_syncs()
            _sync_data(self._descriptor())
        except OSError as exc:
            raise _to_error("sync", self.path, exc) from exc

    def start_sync(self) -> None:
        """Make the system start writing, without waiting, so that later syncs of many files overlap."""
        if sys.platform == "linux":
            _libc.sync_file_range(self.fd, ctypes.c_longlong(0), ctypes.c_longlong(0), _RANGE_WRITE)

    def sync_file_system(self) -> bool:
        """Sync everything on the file system of this file; return False, without a sync, if it cannot.

        It takes as long as syncing a few files, also if there are thousands, but other programs' files are
        synced, too. Linux reports failures since 5.8, of writes after this file was opened.

        Raises:
            StorageError: The disk failed.
        """
        if sys.platform != "linux" or not self.disk.in_bulk:
            return False
        self.disk.count_syncs()
        if _libc.syncfs(self.fd) != 0:
            raise _to_error("sync", self.path, _system_error(ctypes.get_errno()))
        return True

    def truncate(self, size: int) -> None:
        """Set the length; bytes beyond the old length read as zeros and take no space."""
        self._view = None  # a store after the end of the file would end the process
        try:
            self.disk.gate("truncate", self.path)
            os.ftruncate(self.fd, size)
        except OSError as exc:
            raise _to_error("resize", self.path, exc) from exc

    def allocate(self, size: int) -> None:
        """Reserve disk blocks for the first `size` bytes and set the length."""
        try:
            self.disk.gate("allocate", self.path)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, size)
            else:
                os.ftruncate(self.fd, size)
        except OSError as exc:
            raise _to_error("reserve space for", self.path, exc) from exc

    def release(self, start: int, stop: int) -> None:
        """Free disk blocks that were reserved and not written to, if the system supports it.

        Their bytes read as zeros, before and afterwards.
        """
        if sys.platform == "linux" and stop > start:
            punch = 3  # FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE
            _libc.fallocate(self.fd, punch, ctypes.c_longlong(start), ctypes.c_longlong(stop - start))

    def punch(self, start: int, stop: int) -> None:
        """Free disk blocks, if the system supports it. Afterwards their bytes read as zeros.

        Args:
            start: Position of the first byte; a multiple of 4096.
            stop: Position after the last byte; a multiple of 4096.
        """
        self.disk._do("punch", self.path, lambda: self.release(start, stop))

    def map_writable(self, size: int) -> mmap.mmap:
        """Map the first `size` bytes for reading and writing, shared with other processes."""
        return self._map(size, mmap.PROT_READ | mmap.PROT_WRITE)

    def map_readable(self, size: int) -> mmap.mmap:
        """Map the first `size` bytes for reading; writes of other processes are visible."""
        return self._map(size, mmap.PROT_READ)

    def _descriptor(self) -> int:
        """Return the descriptor; raise EBADF if the file is closed, where Python may raise ValueError."""
        if self.fd < 0:
            raise _system_error(errno.EBADF)
        return self.fd

    def _map(self, size: int, access: int) -> mmap.mmap:
        try:
            return mmap.mmap(self._descriptor(), size, prot=access)
        except ValueError as exc:
            raise StorageError(f"cannot map {self.path}: {exc}") from exc
        except OSError as exc:
            raise _to_error("map", self.path, exc) from exc

    def try_lock(self, *, shared: bool = False) -> bool:
        """Try to take the advisory lock (flock) of this descriptor; return whether it was free.

        Args:
            shared: Whether others may also take it shared, instead of one owner alone.
        """
        try:
            fcntl.flock(self._descriptor(), (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise _to_error("lock", self.path, exc) from exc
        return True

    @contextlib.contextmanager
    def keep_lock(self, *, shared: bool = False) -> Iterator[None]:
        """Wait for the advisory lock (flock) of this descriptor, and keep it for a while.

        Args:
            shared: Whether others may also hold it shared, instead of one owner alone.
        """
        try:
            fcntl.flock(self._descriptor(), fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        except OSError as exc:
            raise _to_error("lock", self.path, exc) from exc
        try:
            yield
        finally:
            fcntl.flock(self.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd = vars(self).get("fd", -1)  # not `self.fd`, which would open a resting file
        self.fd, self._view = -1, None
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class ReopenedFile(File):
    """A file that is opened whenever it is used, because a process may have a limited number of files open.

    Any number of threads may use it: each use has a descriptor of its own.

    Args:
        file: The open file, which is closed.
    """

    def __init__(self, file: File) -> None:
        super().__init__(file.disk, file.path, -1)
        self._inode = file.inode()
        file.close()

    @contextlib.contextmanager
    def use(self) -> Iterator[File]:
        """Open the file for a while.

        Raises:
            StorageError: It cannot be opened, or another file has its path.
        """
        with contextlib.closing(self.disk.open(self.path)) as file:
            if file.inode() != self._inode:
                raise build_deleted_error(self.path)
            yield file

    def write(self, data: bytes | NDArray[Any], offset: int) -> None:
        """Write all of `data` at `offset`; arrays must be C-contiguous."""
        with self.use() as file:
            file.write(data, offset)

    def read(self, offset: int, size: int) -> bytes:
        """Read up to `size` bytes at `offset`."""
        with self.use() as file:
            return file.read(offset, size)

    def read_cached(self, offset: int, out: NDArray[Any]) -> bool:
        """Fill an array; see `File`."""
        with self.use() as file:
            return file.read_cached(offset, out)

    def size(self) -> int:
        """Return the length in bytes."""
        with self.use() as file:
            return file.size()

    def next_data(self, offset: int) -> int:
        """Return the position of the first byte that is not in a hole; see `File`."""
        with self.use() as file:
            return file.next_data(offset)

    def sync(self) -> None:
        """Bring the file's bytes and length to the disk."""
        with self.use() as file:
            file.sync()

    def start_sync(self) -> None:
        """Do nothing: `sync` writes the file."""

    def truncate(self, size: int) -> None:
        """Set the length."""
        with self.use() as file:
            file.truncate(size)

    def release(self, start: int, stop: int) -> None:
        """Free disk blocks; see `File`."""
        with self.use() as file:
            file.release(start, stop)


class _ReadFile(File):
    """A file that is open for reading; it is closed when it is garbage-collected."""

    def __del__(self) -> None:
        self.close()


class Disk:
    """Operations on the file system.

    Every operation that changes something calls `gate` first, where tests stop or fail it.
    """

    def __init__(self) -> None:
        self.syncs = 0
        #: Number of syncs that each thread requested, by thread id.
        self.syncs_of: dict[int, int] = {}
        self._kept_open = 0  # files that `keep_open` has left open
        self._warmed = False
        self._kernel: Any = None
        self.kernels: ModuleType | None = None  # set after the loops were compiled

    def gate(self, act: str, path: Path) -> None:
        """Do nothing. Tests override this hook, which each operation that changes `path` calls first."""

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> File:
        """Open a file, or a folder for reading; with `create`, make it if it is missing.

        A file that is opened for writing and has hard links is copied first (`unshare`): a copy of a folder
        that `cp -al` or `rsync --link-dest` made shares its files with the folder.

        Raises:
            StorageError: The path cannot be opened, or is neither a file nor a folder.
        """
        flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        try:
            if create and not self.in_bulk and not path.exists():
                self.gate("create", path)
            kind = File if write or create else _ReadFile
            file = kind(self, path, _open_regular(path, flags))
            if not write or file.links() < 2:
                return file
        except OSError as exc:
            raise _to_error("open", path, exc) from exc
        file.close()
        self.unshare(path)
        try:
            return kind(self, path, _open_regular(path, flags))
        except OSError as exc:
            raise _to_error("open", path, exc) from exc

    def keep_open(self, file: File) -> File:
        """Return an open file itself, or closed and opened again for each use if many others are open.

        Files that stay open take up to a quarter of the descriptors that the process may have.
        """
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        if most != resource.RLIM_INFINITY and self._kept_open >= most // 4:
            return ReopenedFile(file)
        self._kept_open += 1
        return file

    def close_kept(self, files: Iterable[File]) -> None:
        """Close files that `keep_open` has returned."""
        for file in files:
            self._kept_open -= not isinstance(file, ReopenedFile)
            file.close()

    def unshare(self, path: Path) -> None:
        """Replace a file that has hard links by a copy, so that a write does not change the linked files.

        Does nothing if the file is missing or has one name. Holes remain holes. The copy is durable when this
        returns; after a crash the path names the former file or the copy.

        Raises:
            StorageError: The disk failed or is full; the path names the former file.
        """
        if not self.exists(path) or self.count_links(path) < 2:
            return
        temp = path.with_name(f".{path.name}.tmp")
        self.unlink(temp)  # left over from a process that was killed; it may have links, too
        try:
            with contextlib.closing(self.open(path, write=False)) as old, self.build_file(path, temp) as new:
                os.fchmod(new.fd, os.fstat(old.fd).st_mode & 0o777)
                _copy(old, new)
        except BaseException as exc:
            with contextlib.suppress(StorageError):
                self.unlink(temp)
            if isinstance(exc, StorageError):
                exc.message = f"cannot copy {path}, which has hard links, before writing to it: {exc.message}"
            raise
        self.sync_dir(path.parent)

    def warm(self) -> None:
        """Load the compiled loop for small writes, in the background."""
        if self._warmed:
            return
        self._warmed = True
        if type(self).gate is Disk.gate:
            load_in_background(self._load_kernel)

    def _load_kernel(self) -> None:
        with compiling:
            from expstore.kernels import file_loops
        self.kernels = file_loops
        self._kernel = file_loops.write_pieces

    def scatter(
        self,
        arrays: Sequence[NDArray[Any]] | NDArray[Any],
        files: Sequence[File],
        fds: _Ints,
        addresses: _Ints,
        sizes: _Ints,
        offsets: _Ints,
    ) -> None:
        """Write `n` arrays to one file each, without releasing the GIL.

        Args:
            arrays: `n` C-contiguous arrays, or one array with `n` entries along its first axis.
            files: The file of each array.
            fds: The files' descriptors. Shape `(n,)`, int64, like the following arguments.
            addresses: Address of each array's first byte. Shape `(n,)`.
            sizes: Number of bytes of each array. Shape `(n,)`.
            offsets: Position of each array in its file. Shape `(n,)`.
        """
        done = 0 if self._kernel is None else self._kernel(fds, addresses, sizes, offsets)
        for at in range(done, len(files)):
            files[at].write(arrays[at], int(offsets[at]))

    def write_beside(self, pool: Threads, file: File, data: NDArray[Any], offset: int) -> Job | None:
        """Write all of `data` in a thread of the pool; None if it is already written."""
        return pool.submit(partial(file.write, data, offset))

    def rename(self, old: Path, new: Path) -> None:
        """Rename `old` to `new`, replacing a file of that name."""
        self._do("rename", new, lambda: os.replace(old, new))

    def link(self, old: Path, new: Path) -> bool:
        """Hard-link a file; return whether the file system supports it."""
        self.gate("link", new)
        try:
            os.link(old, new)
        except OSError as exc:
            if exc.errno in _CANNOT_LINK:
                return False
            raise _to_error("link", new, exc) from exc
        return True

    @property
    def in_bulk(self) -> bool:
        """Whether many files may be linked or removed in one call; not if a test observes each operation."""
        return type(self).link is Disk.link and type(self).gate is Disk.gate

    def unlink(self, path: Path) -> None:
        """Remove a file, if it exists."""
        self._do("unlink", path, lambda: path.unlink(missing_ok=True))

    def make_dir(self, path: Path) -> None:
        """Create a folder and its parents, if they do not exist."""
        if self.in_bulk or not self.is_dir(path):
            self._do("mkdir", path, lambda: path.mkdir(parents=True, exist_ok=True))

    def make_temp_dir(self, prefix: str) -> Path:
        """Create a new, private folder with a unique name in the system's folder for temporary files."""
        self.gate("mkdir", Path(prefix))
        return Path(tempfile.mkdtemp(prefix=prefix))

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and its content, if it exists."""
        if self.exists(path):
            self._do("rmtree", path, lambda: shutil.rmtree(path))

    def sync_dir(self, path: Path) -> None:
        """Sync the names in a folder to the disk."""

        def act() -> None:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

        self._do("sync_dir", path, act)
        self.count_syncs()

    def count_syncs(self, number: int = 1) -> None:
        """Count syncs of this thread."""
        me = threading.get_ident()
        self.syncs += number
        self.syncs_of[me] = self.syncs_of.get(me, 0) + number

    def sync_path(self, path: Path) -> None:
        """Sync a file that is not open."""
        with contextlib.closing(self.open(path, write=False)) as file:
            file.sync()

    def sync_all(self, files: Iterable[File], folders: Iterable[Path], pool: Threads | None) -> None:
        """Sync files and folders, in parallel if there is a pool; raise the first failure."""
        names = list(folders)
        groups = list(files)
        number = len(groups) + len(names)
        if len(names) >= MANY_FOLDERS:
            with contextlib.closing(self.open(names[0], write=False)) as folder:
                if folder.sync_file_system():
                    names = []
        acts: list[Callable[[], None]]
        if self.kernels is not None and sys.platform == "linux" and len(groups) > _SYNC_GROUPS:
            reopened = [file for file in groups if file.fd < 0]
            groups = [file for file in groups if file.fd >= 0]
            # Each return from a sync takes the GIL for a moment; a few groups take it less often.
            starts = range(min(_SYNC_GROUPS, len(groups)))
            acts = [partial(self._sync_group, groups[start::_SYNC_GROUPS]) for start in starts]
            acts += [file.sync for file in reopened]
        else:
            acts = [file.sync for file in groups]
        acts += [partial(self.sync_dir, name) for name in names]
        if pool is None or len(acts) < 2:
            for act in acts:
                act()
            return
        me = threading.get_ident()
        own = self.syncs_of.get(me, 0)
        jobs: list[Job] = []
        try:
            jobs.append(Job(acts[0]))  # this thread runs it
            for act in acts[1:]:
                jobs.append(pool.submit(act))
        finally:
            finish(jobs)
            self.syncs_of[me] = own + number  # whichever threads made the syncs

    def _sync_group(self, files: list[File]) -> None:
        self.count_syncs(len(files))
        if self.kernels is not None:
            failed, code = self.kernels.sync_files(np.array([file.fd for file in files]))
            if code:
                raise _to_error("sync", files[failed].path, _system_error(code))

    @contextlib.contextmanager
    def build_file(self, path: Path, temporary: Path | None = None) -> Iterator[File]:
        """Write a new file under a temporary name; sync it and rename it at the end of the block.

        It replaces a file of that name. After a crash the path names the former file or the new one, and the
        temporary file may be left over. The caller syncs the folder.

        Args:
            path: The path.
            temporary: The temporary path, in the same file system; None: the path with the suffix ".tmp".

        Yields:
            The empty file.

        Raises:
            StorageError: The disk failed or is full.
        """
        temporary = temporary or path.with_name(path.name + ".tmp")
        with contextlib.closing(self.open(temporary, create=True)) as file:
            file.truncate(0)
            yield file
            file.sync()
        self.rename(temporary, path)

    def write_whole(self, path: Path, data: bytes) -> None:
        """Replace the content of a file atomically, also across a power cut."""
        with self.build_file(path) as file:
            file.write(data, 0)
        self.sync_dir(path.parent)

    def put(self, path: Path, data: bytes, *, sync: bool = False) -> None:
        """Write a file in place, without protection against a crash meanwhile."""
        with contextlib.closing(self.open(path, create=True)) as file:
            file.truncate(0)
            file.write(data, 0)
            if sync:
                file.sync()

    def read_whole(self, path: Path) -> bytes:
        """Return all bytes of a file."""
        try:
            fd = _open_regular(path, os.O_RDONLY)
            try:
                parts = [os.read(fd, os.fstat(fd).st_size + 1)]
                while parts[-1]:
                    parts.append(os.read(fd, 1 << 20))
            finally:
                os.close(fd)
        except OSError as exc:
            raise _to_error("read", path, exc) from exc
        return parts[0] if len(parts) == 2 else b"".join(parts)

    def read_named(self, folder: File, name: str, size: int) -> bytes:
        """Return the bytes of a file in an open folder, at most the first `size` + 1."""
        try:
            fd = os.open(name, os.O_RDONLY | _CAREFULLY, dir_fd=folder.fd)
            try:
                return os.pread(fd, size + 1, 0)
            finally:
                os.close(fd)
        except OSError as exc:
            raise _to_error("read", folder.path / name, exc) from exc

    def exists(self, path: Path) -> bool:
        """Return whether a path exists."""
        return bool(self._look(path, path.exists))

    def is_link(self, path: Path) -> bool:
        """Return whether this is a symbolic link."""
        return bool(self._look(path, path.is_symlink))

    def follow_link(self, path: Path) -> Path:
        """Return the target of a folder that may be a link, so that a change of the link has no effect."""
        return path.resolve() if self.is_link(path) else path

    def check_tree(self, root: Path, *, but: Collection[str] = ()) -> None:
        """Raise StorageError unless everything below a folder is a regular file or a folder, and no link.

        Args:
            root: The folder; it may be missing.
            but: Names of folders in it that are not checked.
        """
        folders = [str(root)]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            if entry.name not in but or folder != str(root):
                                folders.append(entry.path)
                        elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):
                            raise _irregular(Path(entry.path))
            except StorageError:
                raise
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as exc:
                raise _to_error("list", Path(folder), exc) from exc

    def links(self, root: Path) -> list[tuple[Path, Path]]:
        """Return all links below a folder, each with the real path that it leads to; none is followed.

        Raises:
            StorageError: A folder cannot be listed.
        """
        found: list[tuple[Path, Path]] = []
        folders = [str(root)]
        while folders:
            folder = folders.pop()
            try:
                with os.scandir(folder) as entries:
                    for entry in entries:
                        if entry.is_symlink():
                            found.append((Path(entry.path), Path(os.path.realpath(entry.path))))
                        elif entry.is_dir():
                            folders.append(entry.path)
            except (FileNotFoundError, NotADirectoryError):
                pass
            except OSError as exc:
                raise _to_error("list", Path(folder), exc) from exc
        return found

    def leads_to_itself(self, path: Path) -> bool:
        """Return whether a path cannot be followed because it contains a circle of links."""
        try:
            path.stat()
        except OSError as exc:
            return exc.errno == errno.ELOOP
        return False

    def is_dir(self, path: Path) -> bool:
        """Return whether this is a folder."""
        return bool(self._look(path, path.is_dir))

    def is_same_file(self, first: Path, second: Path) -> bool:
        """Return whether two paths are hard links to one file; False if one is missing."""
        try:
            return os.path.samestat(first.lstat(), second.lstat())
        except FileNotFoundError:
            return False
        except OSError as exc:
            raise _to_error("look at", first, exc) from exc

    def count_links(self, path: Path) -> int:
        """Return how many names a file has."""
        return int(self._look(path, lambda: path.lstat().st_nlink))

    def is_shared(self, path: Path) -> bool:
        """Return whether users other than its owner may read a file."""
        return bool(self._look(path, lambda: path.stat().st_mode & 0o044))

    def size(self, path: Path) -> int:
        """Return the length of a file in bytes, -1 if it is missing."""
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return -1
        except OSError as exc:
            raise _to_error("look at", path, exc) from exc

    def read_mtime(self, path: Path) -> int:
        """Return when a file was last modified, in nanoseconds since 1970."""
        return int(self._look(path, lambda: path.stat().st_mtime_ns))

    def read_stamp(self, path: Path) -> tuple[int, ...]:
        """Return numbers that change with a file: its inode, size and time; () if it is missing."""
        try:
            found = path.stat()
        except FileNotFoundError:
            return ()
        except OSError as exc:
            raise _to_error("look at", path, exc) from exc
        return found.st_ino, found.st_size, found.st_mtime_ns

    def measure_space(self, path: Path) -> int:
        """Return the disk space of a file, or of a folder with its content, in bytes."""
        names = [path, *path.rglob("*")] if path.is_dir() else [path]
        sizes: dict[tuple[int, int], int] = {}  # a file with several names counts once
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = name.stat()
                sizes[found.st_dev, found.st_ino] = found.st_blocks * 512
        return sum(sizes.values())

    def free(self, path: Path) -> int:
        """Return the bytes that are free on the disk of `path`."""
        return int(self._look(path, lambda: shutil.disk_usage(path).free))

    def space(self, path: Path) -> int:
        """Return the size of the disk of `path` in bytes, free or not."""
        return int(self._look(path, lambda: shutil.disk_usage(path).total))

    def boot_id(self) -> bytes:
        """Return 16 bytes that change with every start of the machine."""
        try:
            return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
        except (OSError, ValueError):
            # On other systems, use the time at which the machine started.
            started = int((time.time() - time.monotonic()) // 60)
            return hashlib.blake2b(str(started).encode(), digest_size=16).digest()

    def count_threads(self) -> int:
        """Return the number of threads of this process; except on Linux, of those that Python has started."""
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return threading.active_count()
        return int(status.split("Threads:")[1].split()[0])

    def process_start(self, pid: int) -> float | None:
        """Return the start time of a process of this machine, in seconds since 1970.

        Returns:
            None if there is no such process; 0.0 if its start time is unknown.
        """
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass  # it is a process of another user
        try:
            # The process name may contain spaces and brackets; the fields are counted after its end.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                return None
            up = float(Path("/proc/uptime").read_text().split()[0])
            return time.time() - up + int(fields[19]) / os.sysconf("SC_CLK_TCK")
        except FileNotFoundError:
            return None if Path("/proc/self/stat").exists() else 0.0
        except (OSError, ValueError, IndexError):
            return 0.0

    def tree(self, path: Path) -> list[tuple[Path, list[str]]]:
        """Return a folder and all folders below it, each with the names of its files."""
        return [(Path(folder), names) for folder, _, names in os.walk(path)]

    def names(self, path: Path) -> list[str]:
        """Return the sorted names in a folder; an empty list if it does not exist."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise _to_error("list", path, exc) from exc

    def mounts(self) -> str:
        """Return the system's table of mounted file systems, one per line; "" if there is no table."""
        try:
            return Path("/proc/self/mounts").read_text()
        except OSError:
            return ""

    def _look(self, path: Path, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except OSError as exc:
            raise _to_error("look at", path, exc) from exc

    def _do(self, act: str, path: Path, call: Callable[[], object]) -> None:
        try:
            self.gate(act, path)
            call()
        except OSError as exc:
            raise _to_error(act, path, exc) from exc


class ReadingDisk(Disk):
    """A `Disk` that refuses to change files."""

    def gate(self, act: str, path: Path) -> None:
        """Raise StorageError."""
        raise StorageError(f"cannot {act} {path}: it is open for reading only")

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        """Open a file for reading."""
        return super().open(path, create=create, write=False)
