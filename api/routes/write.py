"""Routes that change stores: create and delete them, append rows, set priorities, end episodes, sync.

Used by the application unless it is read-only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import torch
from fastapi import Header, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.bodies import content_type, read_body
from expstore.api.dependencies import (
    EpisodeId,
    Known,
    Limits,
    Session,
    Store,
    StoreName,
    annotations_body,
    create_router,
    problems,
    rows_body,
)
from expstore.api.errors import Refusal
from expstore.api.examples import FIELDS
from expstore.api.request_models import Items, RequestModel
from expstore.api.rows import annotate_from, check_ids, take_rows
from expstore.api.samplers import Limited
from expstore.api.stores import Served
from expstore.core.arguments import MOST_ROWS
from expstore.errors import SchemaError

router = create_router("writing")

_KEY_BYTES = 128
#: Most bytes of the facts of one request, as JSON, and how deep they may be nested.
_FACT_BYTES, _FACT_DEPTH = 1 << 16, 32

#: The options in the metadata of rows, and a check of their values.
_WISHES: dict[str, Callable[[Any], bool]] = {
    "episode_info": lambda value: isinstance(value, dict),
    "split": lambda value: isinstance(value, str),
    "update_priority": lambda value: isinstance(value, bool),
    "validate": lambda value: value in ("schema", "domain"),
}


class Written(BaseModel):
    """The result of a write."""

    model_config = {
        "json_schema_extra": {
            "examples": [{"first_id": 1, "count": 2, "generation": 1, "largest_priority": 1.0}]
        }
    }

    first_id: int | None = Field(description="Id of the first row that was stored; null: none was stored.")
    count: int = Field(description="Number of rows that were stored.")
    ids: list[int] | None = Field(
        None,
        description="Id of each row, -1 for a row that was not stored. Missing if all rows were stored with "
        "consecutive ids.",
    )
    generation: int = Field(description="Ids name the same rows within one generation of the store.")
    largest_priority: float = Field(description="The priority that new rows of the store get.")
    limits: Limited | None = Field(None, description="What the rate limiter counts. Missing without one.")


class NewStore(RequestModel):
    """The settings of a new store."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"capacity": 1000, "fields": FIELDS, "seed": 3}]}
    )

    capacity: int | None = Field(None, ge=1, le=MOST_ROWS, description="Most readable rows; null: no bound.")
    fields: dict[str, Any] | None = Field(
        None,
        description="Type of each field by its key: a dtype, or a dtype and a row shape with null where rows "
        "differ. Without it the first batch decides.",
        examples=[FIELDS],
    )
    storage: str | None = Field(
        None, pattern="^(zarr|arrow)$", description="Layout on disk: `zarr` (also without it) or `arrow`."
    )
    seed: int | None = Field(
        None, ge=0, lt=1 << 63, description="Seed of the store's draws; null: a random one."
    )
    meta: dict[str, Any] | None = Field(
        None, description="Facts to keep with the store.", examples=[{"env": "CartPole-v1"}]
    )


class Created(BaseModel):
    """The created store."""

    model_config = {"json_schema_extra": {"examples": [{"name": "demo"}]}}

    name: str = Field(description="Its name.")


@router.put("/stores/{name}", status_code=201, summary="Create a store", responses=problems())
async def create(stores: Known, name: StoreName, asked: NewStore) -> Created:
    """Create an empty store in the served folder. Status 409 with kind `exists`: the name is in use."""
    options: dict[str, Any] = {
        key: value for key in ("capacity", "seed", "meta") if (value := getattr(asked, key)) is not None
    }
    if asked.storage is not None:
        options["layout"] = asked.storage
    if asked.fields is not None:
        options["schema"] = {
            tuple(key.split(".")): _type_of(key, value) for key, value in asked.fields.items()
        }
    await stores.run_queued(name, lambda: stores.create(name, options))
    return Created(name=name)


class Deleted(BaseModel):
    """The deleted store."""

    model_config = {"json_schema_extra": {"examples": [{"name": "demo"}]}}

    name: str = Field(description="Its former name.")


@router.delete("/stores/{name}", summary="Delete a store", responses=problems())
async def delete(
    stores: Known,
    name: StoreName,
    confirm: Annotated[
        str,
        Query(
            max_length=200,
            description="The store's name again, as protection from mistakes.",
            examples=["demo"],
        ),
    ],
) -> Deleted:
    """Delete a store with all its rows and snapshots. This cannot be undone.

    Status 409 with kind `in_use`: requests, streams or open sessions use the store.
    """
    if confirm != name:
        raise Refusal(400, f"confirm is {confirm[:120]!r}, but the store is {name[:120]!r}", kind="confirm",
                      hint="repeat the name of the store: ?confirm=NAME")  # fmt: skip
    await stores.delete(name)
    return Deleted(name=name)


def _type_of(key: str, value: Any) -> Any:
    if isinstance(value, str):
        return {"string": str, "binary": bytes}.get(value, value)
    shaped = isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)
    if not shaped or not isinstance(value[1], list):
        raise Refusal(
            422, f"field {key!r}: use a dtype, or a dtype and a row shape, such as ['float32', [4]]"
        )
    return value[0], tuple(value[1])


_Source = Annotated[
    str | None,
    Query(
        max_length=200,
        description="Name of the source, such as an environment: each source writes its own episodes.",
        examples=["actor-7"],
    ),
]
_Wait = Annotated[
    float, Query(ge=0, description="Seconds to wait for other clients to sample, if writes are too fast.")
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        description="Id of this write. If the same request is sent again with the same key, it adds nothing "
        "and gets the same answer. At most 128 bytes.",
        examples=["5f2c9d-1"],
    ),
]


@router.post(
    "/stores/{name}/extend",
    summary="Append rows",
    responses=problems(408, 413, 415, 507),
    openapi_extra=rows_body(2),
    response_model_exclude_unset=True,
)
async def extend(
    request: Request,
    store: Store,
    limits: Limits,
    source: _Source = None,
    wait: _Wait = 0.0,
    idempotency_key: IdempotencyKey = None,
    session: Session = None,
) -> Written:
    """Append rows, all of them or none: an Arrow stream, or JSON with a list of values per field.

    The response is sent when the rows survive a crash of the server's process.
    """
    seconds = min(wait, limits.wait_seconds)
    return await _write(request, store, limits.max_rows, source, seconds, idempotency_key, session)


@router.post(
    "/stores/{name}/add",
    summary="Append one row",
    responses=problems(408, 413, 415, 507),
    openapi_extra=rows_body(1),
    response_model_exclude_unset=True,
)
async def add(
    request: Request,
    store: Store,
    limits: Limits,
    source: _Source = None,
    wait: _Wait = 0.0,
    idempotency_key: IdempotencyKey = None,
    session: Session = None,
) -> Written:
    """Append one row: an Arrow stream of one row, or JSON with a list of one value per field."""
    seconds = min(wait, limits.wait_seconds)
    return await _write(request, store, 1, source, seconds, idempotency_key, session)


async def _write(
    request: Request,
    store: Served,
    rows: int,
    source: str | None,
    seconds: float,
    header: str | None,
    session: str | None,
) -> Written:
    """Append the rows of a request: at most `rows`, waiting at most `seconds`."""
    kind, key = content_type(request), read_key(header)
    body = await read_body(request)
    written = await store.run_patiently(
        lambda: _extend(store, kind, body, source, rows, key, session), seconds
    )
    request.scope["expstore.rows_in"] = written.count
    return written


def read_key(header: str | None) -> bytes | None:
    """Return the idempotency key of a write.

    Raises:
        Refusal: 400: the key is too long or empty.
    """
    if header is None:
        return None
    key = header.encode("latin-1")
    if not 0 < len(key) <= _KEY_BYTES:
        raise Refusal(400, f"the idempotency key has {len(key)} bytes", hint=f"send 1 to {_KEY_BYTES}")
    return key


def _extend(
    store: Served,
    kind: str,
    body: bytearray,
    source: str | None,
    rows: int,
    key: bytes | None,
    session: str | None,
) -> Written:
    digest = None if key is None else _digest(kind, body, source)
    data, wishes = take_rows(store, kind, body, rows=rows)
    ids = store.rb.extend(
        data,
        source=source,
        session=session,
        return_ids=True,
        idempotency_key=key,
        digest=digest,
        **_check_wishes(wishes),
    )
    if session is not None:
        store.heard.note(session, has_written=True)
    store.member.note_write()
    kept = ids[ids > 0]
    first = int(kept.min()) if kept.numel() else None
    run = first is not None and torch.equal(ids, torch.arange(first, first + ids.numel()))
    limits = Limited.of(store.member.read_limits())
    more: dict[str, Any] = {} if run else {"ids": ids.tolist()}
    if limits is not None:
        more["limits"] = limits
    return Written(
        first_id=first,
        count=kept.numel(),
        generation=store.generation,
        largest_priority=float(store.rb.storage.priorities.largest),
        **more,
    )


def _digest(kind: str, body: bytearray, source: str | None) -> bytes:
    """Return a digest of everything that a write contains."""
    found = hashlib.blake2b(json.dumps([kind, source]).encode(), digest_size=16)
    found.update(body)
    return found.digest()


def _check_wishes(wishes: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a body as keywords of `extend`.

    Raises:
        SchemaError: An option is unknown, or its value is invalid.
    """
    for name, value in wishes.items():
        if name not in _WISHES or not _WISHES[name](value):
            raise SchemaError(
                f"the metadata has the option {name[:40]}={str(value)[:40]!r}",
                hint=f"use {', '.join(_WISHES)}",
            )
    return wishes


class Priorities(RequestModel):
    """Priorities of rows, by id."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"ids": [1, 2], "priorities": [0.5, 2.0]}]})

    ids: Items[int] = Field(description="Ids of the rows.")
    priorities: Items[float] = Field(description="The priority of each row, 0 or above.")


class Updated(BaseModel):
    """How many rows were updated."""

    model_config = {"json_schema_extra": {"examples": [{"updated": 2}]}}

    updated: int = Field(description="Number of ids whose rows are in the store.")


class Done(BaseModel):
    """The request was executed."""

    model_config = {"json_schema_extra": {"examples": [{"status": "ok"}]}}

    status: str = Field(default="ok", description="Always `ok`.")


@router.post("/stores/{name}/priorities", summary="Set priorities", responses=problems(408, 413, 415))
async def priorities(store: Store, asked: Priorities, idempotency_key: IdempotencyKey = None) -> Updated:
    """Set the priorities of rows. Ids whose rows are not in the store any more are ignored.

    A request that is repeated with its key sets nothing, so that it does not undo what others have set since;
    the server remembers keys of priorities until it ends.
    """
    ids, key = check_ids(asked.ids), read_key(idempotency_key)
    if len(asked.priorities) != len(asked.ids):
        raise Refusal(422, f"{len(asked.ids)} ids have {len(asked.priorities)} priorities",
                      hint="send one priority for each id")  # fmt: skip
    values = torch.tensor(asked.priorities, dtype=torch.float64)

    def update() -> int:
        return store.updates.once(key, lambda: int(store.rb.update_priority(id=ids, priority=values)))

    return Updated(updated=await store.run(update))


@router.post(
    "/stores/{name}/annotations",
    summary="Add values to rows",
    responses=problems(408, 413, 415, 507),
    openapi_extra=annotations_body(),
)
async def annotate_rows(
    request: Request, store: Store, limits: Limits, idempotency_key: IdempotencyKey = None
) -> Updated:
    """Add values that were computed after the rows, such as advantages, to stored rows: all or none.

    A field that does not exist is added. Nothing is overwritten: the newest value of a row is in batches and
    SQL, the older ones are in the relation `annotations`. A request that is repeated with its key writes
    nothing; the server remembers these keys until it ends. Status 404: a row is not in the store.
    """
    kind, key = content_type(request), read_key(idempotency_key)
    body = await read_body(request)

    def update() -> int:
        act = partial(annotate_from, store, kind, body, rows=limits.max_rows)
        return store.updates.once(key and b"annotations " + key, act)

    return Updated(updated=await store.run(update))


@router.post("/stores/{name}/flush", summary="Sync a store to disk", responses=problems(504, 507))
async def flush(
    store: Store,
    shipped: Annotated[
        bool, Query(description="Whether to wait until all of it is shipped to object storage, too.")
    ] = False,
    timeout: Annotated[
        float, Query(gt=0, le=600, description="How many seconds to wait for that.", examples=[5.0])
    ] = 60.0,
) -> Done:
    """Sync all files of the store to the disk. Rows that were written before survive a power failure.

    With `shipped` they also survive the loss of the machine. Status 504, kind `not_shipped`: they were not
    shipped in time, and will be later.
    """
    await store.run(partial(store.rb.flush, shipped=shipped, timeout=timeout))
    return Done()


class Ending(RequestModel):
    """A selection of open episodes to end."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"source": "actor-7"}]})

    source: str | None = Field(None, max_length=200, description="Name of the source; null: all sources.")
    unnamed: bool = Field(False, description="Without a source: end only episodes without a source.")


class Facts(RequestModel):
    """Facts about an episode."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"info": {"success": True, "note": "a fall", "draft": None}}]}
    )

    info: dict[str, Any] = Field(
        description="Facts by name: text, numbers, booleans, lists and objects. A fact replaces the former "
        "one of its name, null removes it."
    )


class Noted(BaseModel):
    """An annotated episode."""

    model_config = {"json_schema_extra": {"examples": [{"episode_id": 1, "info": {"success": True}}]}}

    episode_id: int = Field(description="Its id.")
    info: dict[str, Any] = Field(description="All facts about it.")


class Resuming(RequestModel):
    """A selection of open episodes to adopt."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"source": "actor-7"}]})

    source: str = Field(max_length=200, description="Name of the source.")
    check: bool = Field(True, description="Whether the first row of each episode must continue it.")


class Resumed(BaseModel):
    """The adopted episodes."""

    model_config = {"json_schema_extra": {"examples": [{"episodes": [12]}]}}

    episodes: list[int] = Field(description="Their ids.")


@router.patch(
    "/stores/{name}/episodes/{episode}",
    summary="Annotate an episode",
    responses=problems(408, 413, 415, 507),
)
async def annotate(store: Store, episode: EpisodeId, asked: Facts) -> Noted:
    """Attach facts to an episode; it may be open, ended, or without rows.

    They survive a crash of the server's process, and a power failure after the next sync. Repeating the
    request changes nothing. Status 404: there never was such an episode.
    """

    def note() -> Noted:
        _check_facts(asked.info)
        return Noted(episode_id=episode, info=store.rb.episodes.annotate(episode, **asked.info))

    return await store.run(note)


def _check_facts(info: dict[str, Any]) -> None:
    """Raise Refusal if facts are too large (413) or nested too deeply (422)."""
    level: list[Any] = [info]
    for _ in range(_FACT_DEPTH):
        parts = [part for part in level if isinstance(part, dict | list)]
        level = [item for part in parts for item in (part.values() if isinstance(part, dict) else part)]
    if level:
        raise Refusal(422, f"the facts are nested more than {_FACT_DEPTH} levels deep")
    size = len(json.dumps(info))
    if size > _FACT_BYTES:
        raise Refusal(413, f"the facts have {size:,} bytes, and {_FACT_BYTES:,} are allowed",
                      hint="note less, or write it as rows")  # fmt: skip


@router.post("/stores/{name}/episodes/end", summary="End open episodes", responses=problems(507))
async def end_episodes(store: Store, asked: Ending, session: Session = None) -> Done:
    """End open episodes of a session: their status becomes `cut`. Without a session: the server's own."""
    if asked.unnamed and asked.source is not None:
        raise Refusal(422, "unnamed=true and a source exclude each other", hint="leave one of them out")
    await store.run(lambda: store.rb.episodes.end_of(session, asked.source, unnamed=asked.unnamed))
    return Done()


@router.post("/stores/{name}/episodes/resume", summary="Resume open episodes", responses=problems(507))
async def resume_episodes(store: Store, asked: Resuming, session: Session = None) -> Resumed:
    """Adopt the open episodes of the newest ended session that wrote to a source of this name."""
    episodes = store.rb.episodes
    found = await store.run(lambda: episodes.resume(asked.source, check=asked.check, session=session))
    if session is not None:
        store.heard.note(session, has_written=True)
    return Resumed(episodes=found.tolist())


@router.post("/stores/{name}/session", summary="Keep a session open", responses=problems())
async def keep_session(store: Store, session: Session = None) -> Done:
    """Restart the timeout of the session in the header `X-Session`."""
    _require_session(session)
    return Done()


@router.post("/stores/{name}/session/end", summary="End a session", responses=problems(507))
async def end_session(store: Store, session: Session = None) -> Done:
    """End the session in the header `X-Session`: its open episodes become `cut`. Later rows open it again."""
    name = _require_session(session)
    await store.run(lambda: store.rb.episodes.end_session([name]))
    return Done()


def _require_session(session: str | None) -> str:
    """Return the session that a request names.

    Raises:
        Refusal: 422: the header is missing.
    """
    if session is None:
        raise Refusal(422, "the request names no session", hint="send its id in the header X-Session")
    return session
