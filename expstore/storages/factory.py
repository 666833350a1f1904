"""Which class opens a store for writing: what it was made as says its expstore.json.

Used by whoever is given a path alone. It opens nothing itself.
"""

from __future__ import annotations

from pathlib import Path

from expstore.disk.files import Disk, ReadingDisk
from expstore.disk.local_path import local_path
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.store import Store
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.zarr import ZarrStorage

__all__ = ["open_storage"]


def open_storage(
    path: Path, capacity: int | None = None, *, settings: Settings | None = None, disk: Disk | None = None
) -> Store:
    """Open a store for writing, or make one.

    Args:
        path: Its folder.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        settings: As of `expstore.open`; where they do not say which storage, a new store has Zarr columns.
        disk: Where files are touched.

    Raises:
        LockedError: Another buffer has it open.
        StateError: A setting contradicts the store.
        CorruptionError: The store is damaged.
    """
    settings, _disk = settings or Settings(), ReadingDisk()
    path = _disk.follow_link(local_path(path))
    kind = settings.storage
    if kind is None and settings.mode != "w" and _disk.exists(path / MANIFEST):
        kind = Manifest.load(_disk, path).storage
    if kind == "arrow":
        from expstore.storages.arrow import ArrowStorage

        return ArrowStorage(path, capacity, settings=settings, disk=disk)
    return ZarrStorage(path, capacity, settings=settings, disk=disk)
