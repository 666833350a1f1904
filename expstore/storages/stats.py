"""Counters of a running storage, and the facts that `stats` returns.

Used by storages and by buffers. It changes nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView


@dataclass(slots=True)
class Counters:
    """The counters that `stats` returns."""

    extends: int = 0
    samples: int = 0
    redraws: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    syncs: int = 0
    sync_seconds: float | None = None  # duration of the last sync
    synced_at: float | None = None  # its end, on the monotonic clock
    recovered: str | None = field(default=None)

    def note_wait(self, since: float) -> None:
        """Count a wait that began at this time of the monotonic clock."""
        self.waits += 1
        self.wait_seconds += time.monotonic() - since

    def note_sync(self, since: float) -> None:
        """Count a checkpoint that began at this time of the monotonic clock."""
        self.syncs += 1
        self.synced_at = time.monotonic()
        self.sync_seconds = self.synced_at - since


def describe(storage: ReadView) -> dict[str, Any]:
    """Return the facts about a storage for `stats`."""
    counters = storage.counters
    return {
        "storage": storage.kind,
        "uuid": None if storage.manifest is None else storage.manifest.uuid,
        "size": len(storage),
        "capacity": storage.capacity,
        "spare": storage.geometry.spare,
        "write_count": storage.write_count // storage.geometry.lanes,
        "last_id": storage.last,
        "draws": storage.draws.number,
        "extends": counters.extends,
        "redraws": counters.redraws,
        "waits": counters.waits,
        "wait_seconds": round(counters.wait_seconds, 3),
        "syncs": counters.syncs,
        "write_keys": len(storage.state.write_keys),
    }


def meta_of(storage: ReadView) -> dict[str, Any]:
    """Return the metadata that the user passed when the store was created; empty in RAM."""
    return {} if storage.manifest is None else dict(storage.manifest.meta)


def meta_relation(storage: ReadView) -> dict[str, Any]:
    """Return the content of the SQL relation `meta`."""
    manifest = storage.manifest
    dims = {} if storage.ndim == 1 else {"dims": list(storage.geometry.dims)}
    made = {} if manifest is None else {"uuid": manifest.uuid, "created": manifest.created, **manifest.meta}
    return {"storage": storage.kind, "capacity": storage.capacity, "seed": storage.seed} | dims | made
