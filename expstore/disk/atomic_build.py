"""Build a folder under a temporary name: it gets its name when it is complete, and is removed on failure.

`build_folder` is for a caller that holds a lock, so that nothing else builds this folder. `build_atomically`
has a lock of its own; exports, imports and merges use it for the paths that users choose. Neither depends on
what is built. `expstore.disk.files.Disk.build_file` writes a file in this way, and
`expstore.storages.format.swap` changes several entries of a store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import LockedError, StateError, StorageError

#: Suffix of the temporary folder's name.
SCRAP = ".tmp"
#: The lock file in the temporary folder, which is not part of the result.
LOCK = "LOCK"


@contextmanager
def build_folder(disk: Disk, path: Path) -> Iterator[Path]:
    """Create an empty folder under a temporary name; rename it at the end, remove it on an error.

    After a crash the path names the complete folder or nothing, and the temporary folder may be left over;
    the next build removes it. The caller prevents that two builds of the same folder run at once.

    Args:
        disk: Access to files.
        path: The path; it must not exist.

    Yields:
        The temporary folder. The caller must have synced its content at the end of the block.
    """
    temporary = path.with_name(path.name + SCRAP)
    disk.remove_tree(temporary)
    disk.make_dir(temporary)
    try:
        yield temporary
        disk.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(StorageError):
            disk.remove_tree(temporary)
        raise
    disk.sync_dir(path.parent)


@contextmanager
def build_atomically(
    disk: Disk, target: Path, *, single: bool = False, doing: str = "exports to"
) -> Iterator[Path]:
    """Create a temporary folder next to a target; rename it to the target at the end, remove it on an error.

    Args:
        disk: Access to files.
        target: The path to create, completely or not at all. It must not exist yet.
        single: Whether the result is the entry of the folder with the target's name (a file or a store)
            instead of the whole folder.
        doing: What the caller does with the target, for error messages.

    Yields:
        The temporary folder. The caller must have synced its content at the end of the block.

    Raises:
        LockedError: Another process or thread builds this target at the moment.
        StateError: Another process or thread has created the target meanwhile.
    """
    temporary = target.with_name(target.name + SCRAP)
    disk.make_dir(temporary)
    try:
        lock = WriterLock(disk, temporary / LOCK)
    except LockedError as exc:
        raise LockedError(
            f"another process or thread {doing} {target} at the moment", hint="choose another path"
        ) from exc
    try:
        for name in disk.names(temporary):  # left over from a process that was killed
            if name != LOCK:
                _remove(disk, temporary / name)
        yield temporary
        if disk.exists(target):
            raise StateError(
                f"another process or thread has created {target} meanwhile", hint="choose another path"
            )
        if single:
            disk.rename(temporary / target.name, target)
            disk.remove_tree(temporary)
        else:
            disk.unlink(temporary / LOCK)
            disk.rename(temporary, target)
        disk.sync_dir(target.absolute().parent)
    except BaseException:
        with contextlib.suppress(StorageError):
            disk.remove_tree(temporary)
        raise
    finally:
        lock.release()


def _remove(disk: Disk, path: Path) -> None:
    disk.remove_tree(path) if disk.is_dir(path) else disk.unlink(path)
