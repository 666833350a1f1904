"""Rows on disk with fixed-size fields: Zarr v3 columns, flat or packed.

The storage behind `expstore.open`. The implementation is in `expstore.storages.engine.store`; this class is a
constructor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from expstore.core.retention_policy import Retain
from expstore.disk.files import Disk
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.store import Store
from expstore.storages.format.layout import LayoutName, ask_layout


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
