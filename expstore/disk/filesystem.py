"""Detect the file system of a folder, and whether a store is safe there.

Used by storages when they open a store for writing.
"""

from __future__ import annotations

import re
from pathlib import Path

from expstore.disk.files import Disk
from expstore.errors import StorageError

#: File systems on which locks or maps of two machines, or of two processes, do not work, even if a trial
#: does.
_UNSAFE = {
    "9p", "afs", "ceph", "cifs", "coda", "davfs", "ncpfs", "nfs", "nfs4", "smb2", "smb3", "smbfs",
    "fuse.curlftpfs", "fuse.davfs2", "fuse.gcsfuse", "fuse.goofys", "fuse.rclone", "fuse.s3fs", "fuse.sshfs",
}  # fmt: skip
#: File systems in memory: reading a hole of a file through a map allocates a page, or raises SIGBUS.
_MEMORY = {"devtmpfs", "hugetlbfs", "ramfs", "tmpfs"}


def file_system(disk: Disk, folder: Path) -> str:
    """Return the system's name of a folder's file system type; "" if it is unknown."""
    place, found, length = folder.resolve(), "", -1
    for line in disk.mounts().splitlines():
        parts = line.split(" ")
        if len(parts) < 3:
            continue
        # Spaces and some other characters are written as octal numbers.
        mount = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), parts[1]))
        if place.is_relative_to(mount) and len(mount.parts) >= length:  # a later mount hides an earlier one
            found, length = parts[2], len(mount.parts)
    return found


def fills_holes(disk: Disk, folder: Path) -> bool:
    """Return whether reading a hole of a file through a map takes space."""
    return file_system(disk, folder) in _MEMORY


def probe(disk: Disk, folder: Path, *, new: bool) -> None:
    """Refuse a file system on which a store is not safe: by its type, then by a trial.

    The trial tests whether two locks conflict, and whether a write is visible in a map.

    Args:
        disk: Access to files.
        folder: The store's folder.
        new: Whether the store is being created. An existing store can be opened even if the disk is too full
            for the trial.

    Raises:
        StorageError: The store would not be safe in this folder.
    """
    kind = file_system(disk, folder)
    if kind in _UNSAFE:
        raise _unsafe(
            f"{folder} is on {kind}, a network file system, where file locks and memory maps are unreliable"
        )
    try:
        sound = _try_out(disk, folder / "PROBE.tmp")
    except StorageError as exc:
        if new or exc.kind != "disk_full":
            raise
        return
    if not sound:
        raise _unsafe(
            f"the file system of {folder} ({kind or 'unknown'}) has unreliable locks or memory maps"
        )


def _try_out(disk: Disk, path: Path) -> bool:
    first = disk.open(path, create=True)
    second = disk.open(path)
    try:
        first.write(b"\0" * 4096, 0)
        view = second.map_writable(4096)
        first.write(b"probe", 0)
        seen = bytes(view[:5])
        view.close()
        return first.try_lock() and not second.try_lock() and seen == b"probe"
    finally:
        first.close()
        second.close()
        disk.unlink(path)


def _unsafe(message: str) -> StorageError:
    return StorageError(message, kind="unsafe_filesystem", hint="keep the store on a local disk")
