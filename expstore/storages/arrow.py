"""Rows on disk some of whose fields have no fixed size: strings, lists, tensors of any length, structs, None.

The storage behind `expstore.open(layout="arrow")`. Fields of fixed size are Zarr columns; the others lie in
Arrow segments, which the same journal publishes. What it does is in `expstore.storages.engine.store`; this is
a constructor.
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

__all__ = ["ArrowStorage"]

Compression = Literal["narrow", "lz4", "zstd"]


class ArrowStorage(Store):
    """Keep rows of any length in a folder, for as long as the experiment lives.

    Fields of fixed size are as in a `ZarrStorage`. Rows of the others are appended and never changed; those
    that leave a ring free their disk space by whole segments, of about 64 MiB. `segments/` holds Arrow IPC
    streams, which other programs can read at any time.

    Crashes, threads, processes: as `ZarrStorage`.

    Args:
        path: The store's folder; made if it is missing.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        compression: Of fields without a fixed size: "narrow", "lz4" or "zstd", as in `expstore.Layout`; None:
            as stored, none for a new store.
        settings: Everything else; see `expstore.open`.
        ndim: As `ZarrStorage`.
        layout: As `ZarrStorage`, of the fields of fixed size.
        fields: As `ZarrStorage`.
        disk: Where files are touched.
        segment_bytes: As `ZarrStorage`: of the journal's segments.

    Raises:
        LockedError: Another buffer has it open.
        StateError: A setting contradicts the store.
        CorruptionError: The store is damaged.
        SchemaError: There is no such compression, layout, codec or option.

    Example:
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
