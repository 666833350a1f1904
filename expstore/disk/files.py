"""The only module that touches files: open, pwrite, sync, rename, unlink, allocate, map, lock.

Used by everything that keeps bytes on disk; tests put a `Disk` of their own in its place to stop or
fail the N-th act. It knows nothing of stores, records or rows.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from expstore.errors import StorageError
from expstore.kernels.loader import compiling, load_in_background

__all__ = ["Disk", "File", "ReadingDisk", "address_of", "link_error", "link_if"]

_Ints = NDArray[np.int64]

#: Above this many bytes a write gives the GIL away: the copy then takes longer than a thread switch.
KEEP_GIL_BYTES = 256 * 1024
_SYNC_GROUPS = 4
#: What a file system says that has no hard links, or none of this file.
_CANNOT_LINK = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES, errno.ENOENT}
_CAREFULLY = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_RANGE_WRITE = 2  # SYNC_FILE_RANGE_WRITE
_KINDS = {errno.ENOSPC: "disk_full", errno.EDQUOT: "disk_full", errno.EROFS: "read_only"}
_HINTS = {
    "disk_full": "free space on this disk, then try again",
    "read_only": "mount the file system for writing; open(mode='r') reads a store and writes nothing",
}
#: Acts whose failure leaves nobody knowing what is on the disk.
_SYNCS = {"sync", "sync_dir"}

_F_FULLFSYNC = 51  # macOS: fsync alone leaves data in the drive's cache

_libc = ctypes.CDLL(None, use_errno=True)
# PyDLL keeps the GIL: beside a busy Python thread each os.pwrite would wait 5 ms to get it back.
_pwrite = ctypes.PyDLL(None, use_errno=True).pwrite
_pwrite.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_longlong]
_pwrite.restype = ctypes.c_ssize_t


def _sync_data(fd: int) -> None:
    if sys.platform == "darwin":
        fcntl.fcntl(fd, _F_FULLFSYNC)
    else:
        os.fdatasync(fd)


def _failed(act: str, path: Path, exc: OSError) -> StorageError:
    """Return our error for the system's; one of ours, from a gate, stays as it is."""
    if isinstance(exc, StorageError):
        error = exc
    else:
        kind = _KINDS.get(exc.errno or 0, "storage")
        hint = _HINTS.get(kind, "")
        error = StorageError(f"cannot {act} {path}: {exc.strerror or exc}", kind=kind, hint=hint)
        error.errno = exc.errno
    error.lost = act in _SYNCS
    return error


def _irregular(path: Path) -> StorageError:
    """Return the error for what is neither a file nor a folder."""
    what = "a symbolic link" if path.is_symlink() else "neither a file nor a folder"
    return StorageError(
        f"{path} is {what}",
        kind="not_regular",
        hint="move the file itself to its place; only the store's own folder may be a link",
    )


def _open_regular(path: Path, flags: int) -> int:
    """Return a descriptor of a file or folder; links are not followed, and pipes not waited for.

    Raises:
        OSError: As `os.open`; a StorageError if it is something else.
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


def address_of(array: NDArray[Any]) -> int:
    """Return where an array's bytes begin. `ctypes.data` says the same in four times the time."""
    buffer: Any = array
    if array.flags.writeable and array.nbytes:
        return ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    return int(array.ctypes.data)


def link_if(name: str, old: File, new: File, size: int) -> int:
    """Do for one name what `file_loops.link_files` does for many; return its code."""
    try:
        if os.stat(name, dir_fd=old.fd).st_size != size:
            return -1
        os.link(name, name, src_dir_fd=old.fd, dst_dir_fd=new.fd)
    except OSError as exc:
        return exc.errno or errno.EIO
    return 0


def link_error(path: Path, code: int) -> StorageError | None:
    """Return what is to be raised for the code of a link; None: it is there, or there are none to be had."""
    return _failed("link", path, _system_error(code)) if code > 0 and code not in _CANNOT_LINK else None


class File:
    """Hold one open file.

    Threads may write disjoint ranges at once. After a fork the child shares the descriptor; the owner
    of the file decides what a child may do.
    """

    def __init__(self, disk: Disk, path: Path, fd: int) -> None:
        self.disk = disk
        self.path = path
        self.fd = fd

    def write(self, data: bytes | NDArray[Any], offset: int) -> None:
        """Write all of `data` at `offset`; C-contiguous arrays are written as they lie."""
        size = len(data) if isinstance(data, bytes) else data.nbytes
        try:
            self.disk.gate("write", self.path)
            done = self.write_some(data, size, offset)
            if done < size:
                view = memoryview(data) if isinstance(data, bytes) else data.reshape(-1).view(np.uint8).data
                while done < size:
                    done += self.write_some(view[done:], size - done, offset + done)
        except OSError as exc:
            raise _failed("write to", self.path, exc) from exc

    def write_some(self, data: Any, size: int, offset: int) -> int:
        """Write as much of `data` as the system takes at once; return how many bytes.

        Raises:
            OSError: It takes nothing.
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
            raise _system_error(errno.EIO)  # else this would go on for ever
        return done

    def read(self, offset: int, size: int) -> bytes:
        """Read up to `size` bytes at `offset`."""
        parts = []
        try:
            while size > 0:
                part = os.pread(self.fd, size, offset)
                if not part:
                    break
                parts.append(part)
                offset, size = offset + len(part), size - len(part)
        except OSError as exc:
            raise _failed("read", self.path, exc) from exc
        return b"".join(parts)

    def size(self) -> int:
        """Return the length in bytes."""
        try:
            return os.fstat(self.fd).st_size
        except OSError as exc:
            raise _failed("look at", self.path, exc) from exc

    def next_data(self, offset: int) -> int:
        """Return where, from `offset` on, bytes begin that take disk space; the length if none do.

        What lies before are zeros. Where the system cannot tell, `offset` itself is returned.
        """
        try:
            return os.lseek(self.fd, offset, os.SEEK_DATA)
        except (OSError, AttributeError) as exc:
            return self.size() if getattr(exc, "errno", None) == errno.ENXIO else offset

    def inode(self) -> int:
        """Return the number by which the file system knows the file."""
        return os.fstat(self.fd).st_ino

    def sync(self) -> None:
        """Bring the file's bytes and length to the disk."""
        try:
            self.disk.gate("sync", self.path)
            self.disk.count_syncs()
            _sync_data(self._descriptor())
        except OSError as exc:
            raise _failed("sync", self.path, exc) from exc

    def start_sync(self) -> None:
        """Let the system begin to write; then the syncs of many files share their waiting."""
        if sys.platform == "linux":
            _libc.sync_file_range(self.fd, ctypes.c_longlong(0), ctypes.c_longlong(0), _RANGE_WRITE)

    def truncate(self, size: int) -> None:
        """Set the length; what lies beyond the old one reads as zeros and takes no space."""
        try:
            self.disk.gate("truncate", self.path)
            os.ftruncate(self.fd, size)
        except OSError as exc:
            raise _failed("resize", self.path, exc) from exc

    def allocate(self, size: int) -> None:
        """Reserve disk blocks for the first `size` bytes and set the length."""
        try:
            self.disk.gate("allocate", self.path)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fd, 0, size)
            else:
                os.ftruncate(self.fd, size)
        except OSError as exc:
            raise _failed("reserve space for", self.path, exc) from exc

    def release(self, start: int, stop: int) -> None:
        """Give back disk blocks that were reserved and not written to, where the system can.

        Their bytes read as zeros, before and afterwards.
        """
        if sys.platform == "linux" and stop > start:
            punch = 3  # FALLOC_FL_PUNCH_HOLE and FALLOC_FL_KEEP_SIZE
            _libc.fallocate(self.fd, punch, ctypes.c_longlong(start), ctypes.c_longlong(stop - start))

    def punch(self, start: int, stop: int) -> None:
        """Give back disk blocks whose bytes nobody needs any more, where the system can; they are zeros then.

        Args:
            start: The first of these bytes; a multiple of 4096.
            stop: The first one behind; the same.
        """
        self.disk._do("punch", self.path, lambda: self.release(start, stop))

    def map_writable(self, size: int) -> mmap.mmap:
        """Map the first `size` bytes for reading and writing, shared with other processes."""
        return self._map(size, mmap.PROT_READ | mmap.PROT_WRITE)

    def map_readable(self, size: int) -> mmap.mmap:
        """Map the first `size` bytes for reading; other processes' stores show."""
        return self._map(size, mmap.PROT_READ)

    def _descriptor(self) -> int:
        """Return the descriptor; for that of a closed file Python raises ValueError, or maps no file."""
        if self.fd < 0:
            raise _system_error(errno.EBADF)
        return self.fd

    def _map(self, size: int, access: int) -> mmap.mmap:
        try:
            return mmap.mmap(self._descriptor(), size, prot=access)
        except ValueError as exc:
            raise StorageError(f"cannot map {self.path}: {exc}") from exc
        except OSError as exc:
            raise _failed("map", self.path, exc) from exc

    def try_lock(self) -> bool:
        """Take the advisory lock (flock) on this descriptor; say whether it was free."""
        try:
            fcntl.flock(self._descriptor(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as exc:
            raise _failed("lock", self.path, exc) from exc
        return True

    def close(self) -> None:
        """Close the descriptor; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)


class _ReadFile(File):
    """A file that is open for reading: closed at the latest when nothing refers to it."""

    def __del__(self) -> None:
        self.close()


class Disk:
    """Act on the file system.

    Every act that changes something passes `gate` first: the one place where tests stop or fail it.
    """

    def __init__(self) -> None:
        self.syncs = 0
        #: How many of them each thread asked for, by its id.
        self.syncs_of: dict[int, int] = {}
        self._warmed = False
        self._kernel: Any = None
        self.kernels: ModuleType | None = None  # set once they are compiled

    def gate(self, act: str, path: Path) -> None:
        """Be told what is about to be done to `path`; does nothing outside tests."""

    def open(self, path: Path, *, create: bool = False, write: bool = True) -> File:
        """Open a file, or a folder for reading; with `create`, make it if it is missing.

        Raises:
            StorageError: It cannot be opened, or is a link or something else.
        """
        flags = (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        try:
            if create and not path.exists():
                self.gate("create", path)
            kind = File if write or create else _ReadFile
            return kind(self, path, _open_regular(path, flags))
        except OSError as exc:
            raise _failed("open", path, exc) from exc

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
        """Write arrays to one file each, keeping the GIL.

        Args:
            arrays: C-contiguous. `n` of them, or one that holds them all along its first axis.
            files: Where each goes.
            fds: Their descriptors. Shape `(n,)`, int64, as the rest.
            addresses: Where each array's bytes begin. Shape `(n,)`.
            sizes: How many bytes it has. Shape `(n,)`.
            offsets: Where they go in the file. Shape `(n,)`.
        """
        done = 0 if self._kernel is None else self._kernel(fds, addresses, sizes, offsets)
        for at in range(done, len(files)):
            files[at].write(arrays[at], int(offsets[at]))

    def write_beside(
        self, pool: ThreadPoolExecutor, file: File, data: NDArray[Any], offset: int
    ) -> Future[None] | None:
        """Write all of `data` on another thread; return None if it was done here at once."""
        try:
            return pool.submit(file.write, data, offset)
        except RuntimeError:  # the interpreter is going: no more jobs are taken
            file.write(data, offset)
            return None

    def rename(self, old: Path, new: Path) -> None:
        """Give `old` the name `new`, replacing a file of that name."""
        self._do("rename", new, lambda: os.replace(old, new))

    def link(self, old: Path, new: Path) -> bool:
        """Give a file a second name; say whether the file system could do so."""
        self.gate("link", new)
        try:
            os.link(old, new)
        except OSError as exc:
            if exc.errno in _CANNOT_LINK:
                return False
            raise _failed("link", new, exc) from exc
        return True

    @property
    def in_bulk(self) -> bool:
        """Whether many files may be linked or removed by one act: not where tests watch each."""
        return type(self).link is Disk.link and type(self).gate is Disk.gate

    def unlink(self, path: Path) -> None:
        """Remove a file; a missing one is fine."""
        self._do("unlink", path, lambda: path.unlink(missing_ok=True))

    def make_dir(self, path: Path) -> None:
        """Make a folder and those above it; an existing one is fine."""
        if not self.is_dir(path):
            self._do("mkdir", path, lambda: path.mkdir(parents=True, exist_ok=True))

    def make_temp_dir(self, prefix: str) -> Path:
        """Make a folder of a new name, nobody else's, where the system keeps temporary files."""
        self.gate("mkdir", Path(prefix))
        return Path(tempfile.mkdtemp(prefix=prefix))

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all in it; a missing one is fine."""
        if self.exists(path):
            self._do("rmtree", path, lambda: shutil.rmtree(path))

    def sync_dir(self, path: Path) -> None:
        """Bring the names in a folder to the disk."""

        def act() -> None:
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)

        self._do("sync_dir", path, act)
        self.count_syncs()

    def count_syncs(self, number: int = 1, *, of_all: bool = True) -> None:
        """Note syncs that this thread has made, or, if not `of_all`, has had others make."""
        me = threading.get_ident()
        self.syncs += number * of_all
        self.syncs_of[me] = self.syncs_of.get(me, 0) + number

    def sync_path(self, path: Path) -> None:
        """Bring a closed file's bytes to the disk."""
        with contextlib.closing(self.open(path)) as file:
            file.sync()

    def sync_all(
        self, files: Iterable[File], folders: Iterable[Path], pool: ThreadPoolExecutor | None
    ) -> None:
        """Sync files and folders, side by side where a pool is given; raise the first failure."""
        names = list(folders)
        groups = list(files)
        acts: list[Callable[[], None]]
        if self.kernels is not None and sys.platform == "linux" and len(groups) > _SYNC_GROUPS:
            # Each return from a sync takes the GIL for a moment: a few groups take it less often.
            acts = [partial(self._sync_group, groups[start::_SYNC_GROUPS]) for start in range(_SYNC_GROUPS)]
        else:
            acts = [file.sync for file in groups]
        acts += [partial(self.sync_dir, name) for name in names]
        if pool is None or len(acts) < 2:
            for act in acts:
                act()
            return
        try:
            jobs = [pool.submit(act) for act in acts]
        except RuntimeError:  # the interpreter is going: no more jobs are taken
            return self.sync_all(groups, names, None)
        self.count_syncs(len(groups) + len(names), of_all=False)
        failures = [job.exception() for job in jobs]
        for failure in failures:
            if failure is not None:
                raise failure

    def _sync_group(self, files: list[File]) -> None:
        self.count_syncs(len(files))
        if self.kernels is not None:
            failed, code = self.kernels.sync_files(np.array([file.fd for file in files]))
            if code:
                raise _failed("sync", files[failed].path, _system_error(code))

    def write_whole(self, path: Path, data: bytes) -> None:
        """Replace a file by one with these bytes: all of it or nothing, also across a power cut."""
        temp = path.with_name(path.name + ".tmp")
        self.put(temp, data, sync=True)
        self.rename(temp, path)
        self.sync_dir(path.parent)

    def put(self, path: Path, data: bytes, *, sync: bool = False) -> None:
        """Write a new file in place, without a promise for crashes in the middle."""
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
            raise _failed("read", path, exc) from exc
        return parts[0] if len(parts) == 2 else b"".join(parts)

    def read_named(self, folder: File, name: str, size: int) -> bytes:
        """Return the bytes of a file in an open folder, of a longer one the first `size` + 1."""
        try:
            fd = os.open(name, os.O_RDONLY | _CAREFULLY, dir_fd=folder.fd)
            try:
                return os.pread(fd, size + 1, 0)
            finally:
                os.close(fd)
        except OSError as exc:
            raise _failed("read", folder.path / name, exc) from exc

    def exists(self, path: Path) -> bool:
        """Return whether there is something of this name."""
        return bool(self._look(path, path.exists))

    def is_link(self, path: Path) -> bool:
        """Return whether this is a symbolic link."""
        return bool(self._look(path, path.is_symlink))

    def follow_link(self, path: Path) -> Path:
        """Return where a folder lies that may be a link: followed once, it cannot change any more."""
        return path.resolve() if self.is_link(path) else path

    def check_tree(self, root: Path, *, but: Collection[str] = ()) -> None:
        """Raise StorageError unless all below a folder are regular files and folders, and no links.

        Args:
            root: The folder; it may be missing.
            but: Names of folders in it that are not looked into.
        """
        folders = [str(root)]
        while folders:
            folder = folders.pop()
            with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name not in but or folder != str(root):
                            folders.append(entry.path)
                    elif not entry.is_file(follow_symlinks=False) and os.path.lexists(entry.path):
                        raise _irregular(Path(entry.path))

    def is_dir(self, path: Path) -> bool:
        """Return whether this is a folder."""
        return bool(self._look(path, path.is_dir))

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
            raise _failed("look at", path, exc) from exc

    def modified(self, path: Path) -> int:
        """Return when a file was last modified, in nanoseconds since 1970."""
        return int(self._look(path, lambda: path.stat().st_mtime_ns))

    def used(self, path: Path) -> int:
        """Return the bytes that a file or a folder with all in it takes on the disk."""
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

    def boot_id(self) -> bytes:
        """Return 16 bytes that change with every start of the machine."""
        try:
            return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
        except (OSError, ValueError):
            # Elsewhere the time at which the machine started serves.
            started = int((time.time() - time.monotonic()) // 60)
            return hashlib.blake2b(str(started).encode(), digest_size=16).digest()

    def process_start(self, pid: int) -> float | None:
        """Return when a process of this machine began, seconds since 1970; None: there is none."""
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except OSError:
            pass  # somebody else's
        try:
            # The name may hold spaces and brackets; the fields are counted behind its end.
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
        """Return a folder and all those in it, each with the names of its files."""
        return [(Path(folder), names) for folder, _, names in os.walk(path)]

    def names(self, path: Path) -> list[str]:
        """Return the sorted names in a folder; none if it is missing."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise _failed("list", path, exc) from exc

    def mounts(self) -> str:
        """Return the system's table of mounted file systems, one per line; "" where it has none."""
        try:
            return Path("/proc/self/mounts").read_text()
        except OSError:
            return ""

    def _look(self, path: Path, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except OSError as exc:
            raise _failed("look at", path, exc) from exc

    def _do(self, act: str, path: Path, call: Callable[[], object]) -> None:
        try:
            self.gate(act, path)
            call()
        except OSError as exc:
            raise _failed(act, path, exc) from exc


class ReadingDisk(Disk):
    """Refuse whatever would change a file."""

    def gate(self, act: str, path: Path) -> None:
        """Refuse."""
        raise StorageError(f"cannot {act} {path}: it is open for reading only")

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        """Open a file for reading."""
        return super().open(path, create=create, write=False)
