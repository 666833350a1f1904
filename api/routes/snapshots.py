"""Routes for a store's snapshots: make one, list them, restore one.

Used by the application. Snapshots are in the store's own folder; no path from a client is used.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

import expstore
from expstore.api.dependencies import Store, create_router, problems
from expstore.api.request_models import RequestModel
from expstore.storages.snapshots.catalog import OWN_FOLDER, Version

router = create_router("versions")
changing = create_router("versions")


_EXAMPLE: dict[str, Any] = {
    "number": 1, "tag": "best", "time": 1.7e9, "rows": 1000, "episodes": 5, "new_bytes": 65536
}  # fmt: skip


class Made(BaseModel):
    """A snapshot."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    number: int = Field(description="Its number; snapshots are counted from 1.")
    tag: str | None = Field(description="Its name; null: it has none.")
    time: float = Field(description="When it was made, seconds since 1970.")
    rows: int = Field(description="Number of its rows.")
    episodes: int = Field(description="Number of its episodes.")
    new_bytes: int = Field(description="How many bytes were written for it.")


class Versions(BaseModel):
    """The snapshots of a store."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"versions": [_EXAMPLE]}]})

    versions: list[Made] = Field(description="The oldest snapshot first.")


class Loaded(BaseModel):
    """The store after a snapshot was restored."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"rows": 1000, "generation": 2}]})

    rows: int = Field(description="Number of its rows.")
    generation: int = Field(description="Ids name the same rows within one generation.")


class Tag(RequestModel):
    """The name of a new snapshot."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"tag": "best"}]})

    tag: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]{1,100}$",
        description="A name; a snapshot with a name is never removed to save space.",
    )


class Which(RequestModel):
    """The snapshot to restore."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"version": "best"}]})

    version: int | str | None = Field(None, description="Number or tag; null: the newest.")


def _to_model(version: Version) -> Made:
    return Made(**{name: getattr(version, name) for name in Made.model_fields})


@router.get("/stores/{name}/versions", summary="List snapshots", responses=problems())
async def versions(store: Store) -> Versions:
    """List the snapshots in the store's own folder, the oldest first."""
    found = await store.run(lambda: expstore.versions(store.path))
    return Versions(versions=[_to_model(version) for version in found])


@changing.post(
    "/stores/{name}/dumps",
    status_code=201,
    summary="Make a snapshot",
    responses=problems(408, 413, 415, 507),
)
async def dumps(store: Store, asked: Tag) -> Made:
    """Save the store's current content as a snapshot, while other requests write and sample."""

    def make() -> Version:
        tag = asked.tag
        return store.rb.dumps(store.path / OWN_FOLDER) if tag is None else store.rb.snapshots.tag(tag)

    return _to_model(await store.run(make))


@changing.post("/stores/{name}/loads", summary="Restore a snapshot", responses=problems(408, 413, 415, 507))
async def loads(store: Store, asked: Which) -> Loaded:
    """Replace the store's content by a snapshot's. Its rows get new ids, in a new generation."""

    def load() -> Loaded:
        store.rb.loads(store.path, asked.version)
        return Loaded(rows=len(store.rb), generation=store.generation)

    return await store.run(load)
