"""What a storage counts while it runs, and the facts that `stats` shows of it.

Used by storages and by buffers. It changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expstore.storages.base import Storage

__all__ = ["Counters", "describe"]


@dataclass(slots=True)
class Counters:
    """Count what users ask `stats` for."""

    extends: int = 0
    samples: int = 0
    redraws: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    syncs: int = 0
    sync_seconds: float | None = None  # how long the last sync took
    synced_at: float | None = None  # when it ended, on the monotonic clock
    recovered: str | None = field(default=None)


def describe(storage: Storage) -> dict[str, Any]:
    """Return the facts about a storage that `stats` shows."""
    counters = storage.counters
    return {
        "storage": storage.kind,
        "size": len(storage),
        "capacity": storage.capacity,
        "spare": storage.geometry.spare,
        "write_count": storage.write_count,
        "last_id": storage.last,
        "draws": storage.draws.number,
        "extends": counters.extends,
        "redraws": counters.redraws,
        "waits": counters.waits,
        "wait_seconds": round(counters.wait_seconds, 3),
        "syncs": counters.syncs,
        "write_keys": len(storage.write_keys),
    }
