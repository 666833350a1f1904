"""Rows on disk with variable-length fields: strings, lists, tensors of any length, structs, None.

The storage behind `expstore.open(layout="arrow")`. Fixed-size fields are Zarr columns; the variable-length
fields are stored in Arrow segments, and the same journal commits both. The implementation is in
`expstore.storages.engine.store`; this class is a constructor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from expstore.disk.files import Disk
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.store import Store
from expstore.storages.format.layout import LayoutName, ask_layout

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
