"""Rows on disk some of whose fields have no fixed size: strings, lists, tensors of any length, structs, None.

The storage behind `expstore.open(storage="arrow")`. Fields of fixed size are the columns of `ZarrStorage`;
the others lie in segments, which the same journal publishes.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from expstore.core.values import Array, IntArray, Ranking
from expstore.disk.files import Disk
from expstore.errors import SchemaError
from expstore.schema.schema import Schema
from expstore.storages.batch import Rows
from expstore.storages.columns.arrow.column import in_place
from expstore.storages.engine.open_settings import Settings
from expstore.storages.format.layout import LayoutName
from expstore.storages.zarr import ZarrStorage

__all__ = ["ArrowStorage"]

Compression = Literal["narrow", "lz4", "zstd"]

_logger = logging.getLogger("expstore")
#: So many bytes may be unsynced before who extends waits for the disk: rows can be of any length.
UNSYNCED_BYTES = 256 << 20


class ArrowStorage(ZarrStorage):
    """Keep rows of any length in a folder, for as long as the experiment lives.

    Fields of fixed size are as in a `ZarrStorage`. Rows of the others are appended and never changed; those
    that leave a ring free their disk space by whole segments, of about 64 MiB. `segments/` holds Arrow IPC
    streams, which other programs can read at any time.

    Crashes, threads, processes: as `ZarrStorage`.

    Args:
        path: The store's folder; made if it is missing.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        compression: Of rows without a fixed size: "narrow", "lz4" or "zstd", as `expstore.open`; None: as
            stored, none for a new store.
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

    kind = "arrow"
    keeps_variable = True

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
        settings = settings or Settings()
        if compression is not None:
            settings = dataclasses.replace(settings, compression=compression)
        super().__init__(
            path,
            capacity,
            settings=dataclasses.replace(settings, storage="arrow"),
            ndim=ndim,
            layout=layout,
            fields=fields,
            disk=disk,
            segment_bytes=segment_bytes,
        )

    # -- what is refused -------------------------------------------------------------------------

    def check_described(self, schema: Schema) -> None:
        """Raise SchemaError if fields are not those of the specs, or none that this storage keeps."""
        super().check_described(schema)
        if self.ranking is not None and schema.variable:
            raise _no_ranking(schema)

    def _note_ranking(self, ranking: Ranking | None) -> None:
        if ranking is not None and self.schema is not None and self.schema.variable:
            raise _no_ranking(self.schema)
        super()._note_ranking(ranking)

    def _change(
        self, ids: IntArray, places: Sequence[int], columns: Sequence[Array], *, replaces: bool
    ) -> None:
        fields = self.require_schema().fields
        apart = [fields[place] for place in places if place < len(fields) and fields[place].variable]
        if apart:
            raise in_place(apart, "their rows cannot be changed")
        super()._change(ids, places, columns, replaces=replaces)

    # -- extend ----------------------------------------------------------------------------------

    def write(self, rows: Rows) -> None:
        """Make rows readable, all of them or none.

        Raises:
            StateError: The store is closed, not open for writing, or poisoned.
            StorageError: The disk failed, or would have less than `min_free_bytes`; nothing is published.
        """
        self.check_writable()
        group = self.columns
        if group is not None and group.segments is not None:
            size = sum(int(rows.columns[place].nbytes) for place in group.segment_places)
            self.engine.space.check_bytes(size, rows.count, -(-size // max(1, rows.count)))
            self._pace(group.segments.unsynced_bytes + size)
        super().write(rows)

    def _pace(self, size: int) -> None:
        """Wait for the disk, or hurry whoever syncs, if so many bytes would be unsynced."""
        if size > UNSYNCED_BYTES:
            started = time.monotonic()
            self.sync()
            self.counters.waits += 1
            self.counters.wait_seconds += time.monotonic() - started
        elif 2 * size > UNSYNCED_BYTES:
            self.engine.background.hurry()


def _no_ranking(schema: Schema) -> SchemaError:
    fields = [entry for entry in schema.fields if entry.variable]
    return in_place(fields, "rows cannot give way to better ones")
