"""Choose the class that opens a store for writing, by the kind of storage in its expstore.json.

Used by callers that only have a path. This module itself opens no file except expstore.json.
"""

from __future__ import annotations

from pathlib import Path

from expstore.disk.files import Disk, ReadingDisk
from expstore.disk.local_path import local_path
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.store import Store
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.zarr import ZarrStorage


def open_storage(
    path: Path, capacity: int | None = None, *, settings: Settings | None = None, disk: Disk | None = None
) -> Store:
    """Open a store for writing, or create it.

    Args:
        path: The store's folder.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        settings: The options of `expstore.open`; by default a new store has Zarr columns.
        disk: The disk on which files are accessed.

    Raises:
        LockedError: Another buffer has the store open.
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
