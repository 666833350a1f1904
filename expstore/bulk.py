"""Many closed files at once: given second names, brought to the disk.

Used to make versions and to put them back. It goes through a `Disk`, act by act.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from expstore.files import Disk, link_if

__all__ = ["link_all", "sync_paths"]

#: So many closed files are opened together to be synced.
_TOGETHER = 256


def link_all(disk: Disk, old: Path, new: Path, names: Sequence[str], *, size: int) -> list[str]:
    """Give files of one folder a second name in another; return those that could not be.

    Args:
        disk: Where files are touched.
        old: Where they are.
        new: Where they are to be, under the same names.
        names: Which ones.
        size: Their length: one of another length, or a missing one, is left out.
    """
    if type(disk).link is not Disk.link or type(disk).gate is not Disk.gate or not disk.exists(old):
        return [n for n in names if disk.size(old / n) != size or not disk.link(old / n, new / n)]
    # They are thousands, and making a Path takes as long as making a link.
    here, there = disk.open(old, write=False), disk.open(new, write=False)
    try:
        return [name for name in names if not link_if(name, here, there, size)]
    finally:
        here.close()
        there.close()


def sync_paths(
    disk: Disk, paths: Sequence[Path], folders: Iterable[Path], pool: ThreadPoolExecutor | None
) -> None:
    """Bring files that are closed to the disk, however many, then folders."""
    for start in range(0, len(paths), _TOGETHER):
        files = [disk.open(path) for path in paths[start : start + _TOGETHER]]
        try:
            for file in files:
                file.start_sync()
            disk.sync_all(files, [], pool)
        finally:
            for file in files:
                file.close()
    disk.sync_all([], folders, pool)
