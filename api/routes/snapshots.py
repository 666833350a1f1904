"""Routes for a store's versions: make one, list them, go back to one.

Used by the application. They lie in the store's own folder; no path of a client is used.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

import expstore
from expstore.api.dependencies import Store, problems
from expstore.api.request_models import RequestModel
from expstore.storages.snapshots.catalog import OWN_FOLDER, Version

router = APIRouter(tags=["versions"])
changing = APIRouter(tags=["versions"])


class Made(BaseModel):
    """A version."""

    number: int
    tag: str | None
    time: float = Field(description="When it was made, seconds since 1970.")
    rows: int
    episodes: int
    new_bytes: int = Field(description="How many bytes were written for it.")


class Tag(RequestModel):
    """What a version is to be called."""

    tag: str | None = Field(
        None, pattern=r"^[A-Za-z0-9._-]{1,100}$", description="A name; such a version is kept for good."
    )


class Which(RequestModel):
    """Which version."""

    version: int | str | None = Field(None, description="Number or tag; null: the newest.")


def _made(version: Version) -> Made:
    return Made(**{name: getattr(version, name) for name in Made.model_fields})


@router.get("/stores/{name}/versions", responses=problems())
async def versions(store: Store) -> dict[str, list[Made]]:
    """List the versions, the oldest first."""
    found = await store.run(lambda: expstore.versions(store.path))
    return {"versions": [_made(version) for version in found]}


@changing.post("/stores/{name}/dumps", status_code=201, responses=problems(408, 413, 415, 507))
async def dumps(store: Store, asked: Tag) -> Made:
    """Make a version of the store as it is now; others go on writing and sampling."""

    def make() -> Version:
        tag = asked.tag
        return store.rb.dumps(store.path / OWN_FOLDER) if tag is None else store.rb.snapshots.tag(tag)

    return _made(await store.run(make))


@changing.post("/stores/{name}/loads", responses=problems(408, 413, 415, 507))
async def loads(store: Store, asked: Which) -> dict[str, Any]:
    """Put a version's content in the place of the store's; ids of its rows are others then."""

    def load() -> dict[str, Any]:
        store.rb.loads(store.path, asked.version)
        return {"rows": len(store.rb), "generation": store.generation}

    return await store.run(load)
