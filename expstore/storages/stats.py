"""Facts about a storage: those that `stats` returns, and its metadata.

Used by buffers, SQL and exports. It changes nothing.
"""

from __future__ import annotations

from typing import Any

from expstore.storages.read_view import ReadView


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
