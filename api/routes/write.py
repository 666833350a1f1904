"""Routes that change stores: make one, add rows, set priorities, flush.

Used by the application unless it only reads.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Annotated, Any

import anyio.to_thread
import torch
from fastapi import APIRouter, Header, Query, Request
from pydantic import BaseModel, Field

from expstore.api.bodies import content_type, read_body
from expstore.api.dependencies import ARROW_BODY, Known, Limits, Session, Store, problems
from expstore.api.errors import Refusal
from expstore.api.rows import checked_ids, taken_rows
from expstore.api.stores import Served
from expstore.errors import SchemaError

router = APIRouter(tags=["writing"])

_KEY_BYTES = 128

#: What the metadata of rows may ask for, and what is a value of it.
_WISHES: dict[str, Callable[[Any], bool]] = {
    "episode_info": lambda value: isinstance(value, dict),
    "update_priority": lambda value: isinstance(value, bool),
    "validate": lambda value: value in ("schema", "domain"),
}


class Written(BaseModel):
    """What became of rows: ids are one row's for ever within a generation of the store."""

    first_id: int | None = Field(description="Of the first row that was taken in; null: none was.")
    count: int = Field(description="How many were; those after the first have the ids that follow.")
    ids: list[int] | None = Field(
        None,
        description="Of each row, -1 for those that were not taken in; left out: all were, and their ids "
        "follow one another.",
    )
    generation: int


class NewStore(BaseModel):
    """What a new store is to be."""

    model_config = {"extra": "forbid"}

    capacity: int | None = Field(None, ge=1, le=1 << 40, description="Most readable rows; null: no bound.")
    fields: dict[str, Any] | None = Field(
        None,
        description="Types by key: a dtype, or a dtype and a row shape, null where rows differ. Without it "
        "the first batch fixes them.",
        examples=[{"observation": ["float32", [4]], "action": "int64", "next.reward": ["float32", [1]]}],
    )
    storage: str | None = Field(None, pattern="^(zarr|arrow)$")
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    meta: dict[str, Any] | None = None


class Created(BaseModel):
    """A store that was made."""

    name: str


@router.put("/stores/{name}", status_code=201, responses=problems())
async def create(stores: Known, name: str, asked: NewStore) -> Created:
    """Make a store."""
    options: dict[str, Any] = {
        key: value for key in ("capacity", "seed", "meta") if (value := getattr(asked, key)) is not None
    }
    if asked.storage is not None:
        options["layout"] = asked.storage
    if asked.fields is not None:
        options["schema"] = {
            tuple(key.split(".")): _type_of(key, value) for key, value in asked.fields.items()
        }
    await anyio.to_thread.run_sync(lambda: stores.create(name, options))
    return Created(name=name)


class Deleted(BaseModel):
    """A store that was deleted."""

    name: str


@router.delete("/stores/{name}", responses=problems())
async def delete(stores: Known, name: str, confirm: Annotated[str, Query(max_length=200)]) -> Deleted:
    """Delete a store."""
    if confirm != name:
        raise Refusal(400, f"confirm is {confirm[:120]!r}, and the store is {name[:120]!r}", kind="confirm",
                      hint="repeat the name of the store: ?confirm=NAME")  # fmt: skip
    await stores.delete(name)
    return Deleted(name=name)


def _type_of(key: str, value: Any) -> Any:
    if isinstance(value, str):
        return {"string": str, "binary": bytes}.get(value, value)
    shaped = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
    if not shaped or not isinstance(value[1], list):
        raise Refusal(
            422, f"field {key!r}: give a dtype, or a dtype and a row shape, such as ['float32', [4]]"
        )
    return value[0], tuple(value[1])


_Source = Annotated[str | None, Query(max_length=200, description="Name of the stream.")]
_Wait = Annotated[float, Query(ge=0, description="Seconds to wait for others to sample.")]
_Key = Annotated[
    str | None,
    Header(
        description="Names this write: sent again, with the same body, it is answered as before and adds "
        "nothing. At most 128 bytes."
    ),
]
_SessionId = Annotated[
    str | None,
    Header(
        description="Id of the client's session: one writer's life. Rows of two sessions never share an "
        "episode. Writes without it share one session per run of the server. 1 to 128 printable ASCII "
        "characters.",
    ),
]


@router.post(
    "/stores/{name}/extend",
    responses=problems(408, 413, 415, 507),
    openapi_extra=ARROW_BODY,
    response_model_exclude_unset=True,
)
async def extend(
    request: Request,
    store: Store,
    limits: Limits,
    source: _Source = None,
    wait: _Wait = 0.0,
    idempotency_key: _Key = None,
    x_session: _SessionId = None,
) -> Written:
    """Append rows, all of them or none: an Arrow stream, or JSON with a list per column."""
    seconds = min(wait, limits.wait_seconds)
    return await _written(request, store, limits.max_rows, source, seconds, idempotency_key, x_session)


@router.post(
    "/stores/{name}/add",
    responses=problems(408, 413, 415, 507),
    openapi_extra=ARROW_BODY,
    response_model_exclude_unset=True,
)
async def add(
    request: Request,
    store: Store,
    limits: Limits,
    source: _Source = None,
    wait: _Wait = 0.0,
    idempotency_key: _Key = None,
    x_session: _SessionId = None,
) -> Written:
    """Append one row: an Arrow stream, or JSON with a list of one value per column."""
    seconds = min(wait, limits.wait_seconds)
    return await _written(request, store, 1, source, seconds, idempotency_key, x_session)


async def _written(
    request: Request,
    store: Served,
    rows: int,
    source: str | None,
    seconds: float,
    header: str | None,
    session: str | None,
) -> Written:
    """Append the rows of a request: at most so many, within so many seconds."""
    kind, key = content_type(request), _key_of(header)
    body = await read_body(request)
    written = await store.run_patiently(
        lambda: _extended(store, kind, body, source, rows, key, session), seconds
    )
    request.scope["expstore.rows_in"] = written.count
    return written


def _key_of(header: str | None) -> bytes | None:
    """Return the key that a write has.

    Raises:
        Refusal: 400: it is none.
    """
    if header is None:
        return None
    key = header.encode("latin-1")
    if not 0 < len(key) <= _KEY_BYTES:
        raise Refusal(400, f"the idempotency key has {len(key)} bytes", hint=f"send 1 to {_KEY_BYTES}")
    return key


def _extended(
    store: Served,
    kind: str,
    body: bytearray,
    source: str | None,
    rows: int,
    key: bytes | None,
    session: str | None,
) -> Written:
    digest = None if key is None else _digest(kind, body, source)
    data, wishes = taken_rows(store, kind, body, rows=rows)
    ids = store.rb.extend(
        data,
        source=source,
        session=session,
        return_ids=True,
        idempotency_key=key,
        digest=digest,
        **_checked(wishes),
    )
    if session is not None:
        store.heard.note(session, has_written=True)
    store.drawers.written()
    kept = ids[ids > 0]
    first = int(kept.min()) if kept.numel() else None
    run = first is not None and torch.equal(ids, torch.arange(first, first + ids.numel()))
    return Written(
        first_id=first,
        count=kept.numel(),
        generation=store.generation,
        **({} if run else {"ids": ids.tolist()}),
    )


def _digest(kind: str, body: bytearray, source: str | None) -> bytes:
    """Return what stands for all that a write says."""
    found = hashlib.blake2b(json.dumps([kind, source]).encode(), digest_size=16)
    found.update(body)
    return found.digest()


def _checked(wishes: dict[str, Any]) -> dict[str, Any]:
    """Return what a body asks for, as keywords of `extend`.

    Raises:
        SchemaError: It asks for what is not known here.
    """
    for name, value in wishes.items():
        if name not in _WISHES or not _WISHES[name](value):
            raise SchemaError(
                f"the metadata asks for {name[:40]}={str(value)[:40]!r}",
                hint=f"there are {', '.join(_WISHES)}",
            )
    return wishes


class Priorities(BaseModel):
    """Priorities of rows, by id."""

    model_config = {"extra": "forbid"}

    ids: list[int] = Field(max_length=1_000_000)
    priorities: list[float] = Field(max_length=1_000_000)


class Updated(BaseModel):
    """How many rows were still there."""

    updated: int


@router.post("/stores/{name}/priorities", responses=problems(408, 413, 415))
async def priorities(store: Store, asked: Priorities) -> Updated:
    """Set priorities of rows that are still there: one for each id."""
    ids = checked_ids(asked.ids)
    if len(asked.priorities) != len(asked.ids):
        raise Refusal(422, f"{len(asked.ids)} ids are given {len(asked.priorities)} priorities",
                      hint="send one priority for each id")  # fmt: skip
    values = torch.tensor(asked.priorities, dtype=torch.float64)
    return Updated(updated=await store.run(lambda: store.rb.update_priority(id=ids, priority=values)))


@router.post("/stores/{name}/flush", responses=problems(507))
async def flush(store: Store) -> dict[str, str]:
    """Bring everything to the disk: what is acknowledged now survives a power cut."""
    await store.run(store.rb.flush)
    return {"status": "ok"}


class Ending(BaseModel):
    """Which open episodes are to end."""

    model_config = {"extra": "forbid"}

    source: str | None = Field(None, max_length=200, description="Name of the stream; null: all of them.")
    unnamed: bool = Field(False, description="Without a source: end only the unnamed stream.")


class Resuming(BaseModel):
    """Which episodes to adopt."""

    model_config = {"extra": "forbid"}

    source: str = Field(max_length=200, description="Name of the stream.")
    check: bool = Field(True, description="Whether the first row of each episode must continue it.")


class Resumed(BaseModel):
    """The adopted episodes."""

    episodes: list[int]


@router.post("/stores/{name}/episodes/end", responses=problems(507))
async def end_episodes(store: Store, session: Session, asked: Ending) -> dict[str, str]:
    """End open episodes of the session: they become `cut`. Without a session: those of the server's own."""
    if asked.unnamed and asked.source is not None:
        raise Refusal(422, "unnamed=true and a source exclude each other", hint="leave one of them out")
    await store.run(lambda: store.rb.episodes.end_of(session, asked.source, unnamed=asked.unnamed))
    return {"status": "ok"}


@router.post("/stores/{name}/episodes/resume", responses=problems(507))
async def resume_episodes(store: Store, session: Session, asked: Resuming) -> Resumed:
    """Adopt the open episodes of the newest ended session that wrote to a source of this name."""
    episodes = store.rb.episodes
    found = await store.run(lambda: episodes.resume(asked.source, check=asked.check, session=session))
    if session is not None:
        store.heard.note(session, has_written=True)
    return Resumed(episodes=found.tolist())


@router.post("/stores/{name}/session", responses=problems())
async def keep_session(store: Store, session: Session) -> dict[str, str]:
    """Tell the server that the client of the session in the header X-Session is still there."""
    _named(session)
    return {"status": "ok"}


@router.post("/stores/{name}/session/end", responses=problems(507))
async def end_session(store: Store, session: Session) -> dict[str, str]:
    """End the session of the header X-Session: its open episodes become `cut`. Later rows open it again."""
    name = _named(session)
    await store.run(lambda: store.rb.episodes.end_session([name]))
    return {"status": "ok"}


def _named(session: str | None) -> str:
    """Return the session that a request names.

    Raises:
        Refusal: 422: it names none.
    """
    if session is None:
        raise Refusal(422, "the request names no session", hint="send its id in the header X-Session")
    return session
