"""The storages on disk: rows of fixed size, rows of variable length, and a function that chooses by the path.

The implementation is in `expstore.storages.engine.store`; these classes are constructors. `ZarrStorage` is
behind `expstore.open`, `ArrowStorage` behind `expstore.open(layout="arrow")`: strings, lists, tensors of any
length, structs, None. Fixed-size fields are Zarr columns in both; the variable-length fields of the second
are stored in Arrow segments, and the same journal commits both. This module itself opens no file except
expstore.json.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from expstore.core.retention_policy import Retain
from expstore.disk.files import Disk, ReadingDisk
from expstore.disk.local_path import local_path
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.store import Store
from expstore.storages.format.layout import LayoutName, ask_layout
from expstore.storages.format.manifest import MANIFEST, Manifest


class ZarrStorage(Store):
    """Store rows in a folder.

    Crashes: rows survive the end of the process once `write` returns, and a power failure after the next
    `sync` (about one second later, or `flush`). A batch is stored completely or not at all. Threads: as
    `Storage`. Processes: one writer, the next one gets LockedError; a forked child cannot write.

    Args:
        path: The store's folder; created if it is missing.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        settings: All other options; see `expstore.open`.
        ndim: How many dims of a batch are rows; the first is time; None: as stored, 1 for a new store.
        layout: As `columns` of `expstore.Layout`; None: as stored, "flat" for a new store.
        fields: Options of single fields, as in `expstore.Layout`, as dicts.
        retain: As in `expstore.open`.
        share_next: As in `expstore.Layout`; None: as stored, True for a new store.
        disk: Access to files.
        segment_bytes: Length of a journal segment; None: 4 MiB, or 64 MiB if records contain their rows.

    Raises:
        LockedError: Another buffer has the store open.
        StateError: A setting contradicts the store.
        CorruptionError: The store is damaged.
        SchemaError: There is no such layout, codec or option.

    Example:
        >>> from expstore import TensorDictReplayBuffer, ZarrStorage
        >>> rb = TensorDictReplayBuffer(storage=ZarrStorage("run.exp", 100_000), batch_size=256)
    """

    def __init__(
        self,
        path: str | Path,
        capacity: int | None = None,
        *,
        settings: Settings | None = None,
        ndim: int | None = None,
        layout: LayoutName | None = None,
        fields: Mapping[str, Mapping[str, Any]] | None = None,
        retain: Retain | Mapping[str, Any] | None = None,
        share_next: bool | None = None,
        disk: Disk | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        settings = (settings or Settings()).with_retention(retain)
        asked: dict[str, Any] = {"ndim": ndim, "layout": ask_layout(layout, fields, share_next)}
        given = {name: value for name, value in asked.items() if value is not None}
        settings = dataclasses.replace(settings, storage=settings.storage or "zarr", **given)
        super().__init__(path, capacity, settings=settings, disk=disk, segment_bytes=segment_bytes)


Compression = Literal["lz4", "zstd"]


class ArrowStorage(Store):
    """Store rows of any length in a folder.

    Fixed-size fields are stored as in a `ZarrStorage`. Rows of variable-length fields are appended and never
    changed; when rows leave a ring, their disk space is freed by whole segments of about 64 MiB. `segments/`
    contains Arrow IPC streams, which other programs can read at any time.

    Crashes, threads, processes: as `ZarrStorage`.

    Args:
        path: The store's folder; created if it is missing.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        compression: Compression of variable-length fields: "lz4" or "zstd", as in `expstore.Layout`;
            None: as stored, no compression for a new store.
        settings: All other options; see `expstore.open`.
        ndim: How many dims of a batch are rows; the first is time; None: as stored, 1 for a new store.
        layout: Layout of fixed-size fields, as `columns` of `expstore.Layout`; None: as stored, "flat" for a
            new store.
        fields: Options of single fields, as in `expstore.Layout`, as dicts.
        disk: Access to files.
        segment_bytes: Length of a journal segment; None: 4 MiB, or 64 MiB if records contain their rows.

    Raises:
        LockedError: Another buffer has the store open.
        StateError: A setting contradicts the store.
        CorruptionError: The store is damaged.
        SchemaError: There is no such compression, layout, codec or option.

    Example:
        >>> from expstore import ArrowStorage, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(storage=ArrowStorage("rollouts.exp", 100_000), batch_size=256)
    """

    def __init__(
        self,
        path: str | Path,
        capacity: int | None = None,
        *,
        compression: Compression | None = None,
        settings: Settings | None = None,
        ndim: int | None = None,
        layout: LayoutName | None = None,
        fields: Mapping[str, Mapping[str, Any]] | None = None,
        disk: Disk | None = None,
        segment_bytes: int | None = None,
    ) -> None:
        asked: dict[str, Any] = {
            "compression": compression,
            "ndim": ndim,
            "layout": ask_layout(layout, fields, None),
        }
        given = {name: value for name, value in asked.items() if value is not None}
        settings = dataclasses.replace(settings or Settings(), storage="arrow", **given)
        super().__init__(path, capacity, settings=settings, disk=disk, segment_bytes=segment_bytes)


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
        return ArrowStorage(path, capacity, settings=settings, disk=disk)
    return ZarrStorage(path, capacity, settings=settings, disk=disk)
