"""Delete a store's folder so that a crash cannot bring the store back.

Used by `expstore.api.stores`. A folder is first renamed to a name that no store has, and then removed. If a
crash interrupts the removal, the next server of the same folder completes it.
"""

from __future__ import annotations

import logging
import re
import uuid
from pathlib import Path

from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import StorageError
from expstore.storages.format.paths import LOCK

_log = logging.getLogger("expstore.api")
#: Names of stores begin with a letter or a digit, so a folder with such a name is never served.
_DELETED = re.compile(r"\.expstore-deleted-[0-9a-f]{32}")


def rename_for_deletion(disk: Disk, path: Path) -> Path:
    """Rename a store's folder, so that no process can open the store any more.

    Args:
        disk: Access to the file system.
        path: The folder.

    Returns:
        The new path: pass it to `remove_folder`.

    Raises:
        LockedError: Another process writes to the store.
        StorageError: The folder cannot be renamed.
    """
    lock = WriterLock(disk, path / LOCK)
    try:
        deleted = path.with_name(f".expstore-deleted-{uuid.uuid4().hex}")
        disk.rename(path, deleted)
        disk.sync_dir(path.parent)
    finally:
        lock.release()
    return deleted


def remove_folder(disk: Disk, deleted: Path) -> None:
    """Remove a folder that `rename_for_deletion` returned; log a failure, which the next start retries."""
    try:
        disk.remove_tree(deleted)
    except StorageError as exc:
        _log.warning("files of a deleted store remain until the next start: %s", exc)


def remove_leftovers(disk: Disk, root: Path) -> None:
    """Remove folders of deleted stores whose removal a crash interrupted."""
    for name in disk.names(root):
        path = root / name
        if _DELETED.fullmatch(name) and disk.is_dir(path) and not disk.is_link(path):
            remove_folder(disk, path)
