"""What is made stands aside until it is whole, and goes if it does not become so.

Used by exports, imports and merges. It knows folders, not what is in them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import LockedError, StateError, StorageError

__all__ = ["LOCK", "making"]

#: What stands aside is called like what it becomes, and this.
SCRAP = ".tmp"
#: A file in it that is no part of what is made.
LOCK = "LOCK"


@contextmanager
def making(disk: Disk, target: Path, *, single: bool = False, doing: str = "exports to") -> Iterator[Path]:
    """Make a folder beside a target, which becomes that, or goes if there is an error.

    Args:
        disk: Where files are touched.
        target: What is to be there, whole or not at all. Nothing is there yet.
        single: It is to be what bears its name in the folder: a file, or a store.
        doing: What is being done with the target, for messages.

    Yields:
        The folder. What is in it must be synced by the end.

    Raises:
        LockedError: Somebody else makes this target just now.
        StateError: Somebody else has made it meanwhile.
    """
    aside = target.with_name(target.name + SCRAP)
    disk.make_dir(aside)
    try:
        lock = WriterLock(disk, aside / LOCK)
    except LockedError as exc:
        raise LockedError(f"somebody else {doing} {target} just now", hint="choose another path") from exc
    try:
        for name in disk.names(aside):  # of one that was killed
            if name != LOCK:
                _remove(disk, aside / name)
        yield aside
        if disk.exists(target):
            raise StateError(f"{target} was made by somebody else meanwhile", hint="choose another path")
        if single:
            disk.rename(aside / target.name, target)
            disk.remove_tree(aside)
        else:
            disk.unlink(aside / LOCK)
            disk.rename(aside, target)
        disk.sync_dir(target.absolute().parent)
    except BaseException:
        with contextlib.suppress(StorageError):
            disk.remove_tree(aside)
        raise
    finally:
        lock.release()


def _remove(disk: Disk, path: Path) -> None:
    disk.remove_tree(path) if disk.is_dir(path) else disk.unlink(path)
