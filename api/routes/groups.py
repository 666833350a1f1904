"""Routes for groups of episodes: start one, close or discard one.

Used by the application unless it is read-only. SQL reads groups.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.dependencies import Session, Store, create_router, problems
from expstore.api.request_models import RequestModel
from expstore.api.routes.write import Done, IdempotencyKey, read_key
from expstore.buffers.episodes import remote_session
from expstore.buffers.groups import Ending

router = create_router("writing")


class Starting(RequestModel):
    """A group that is to be started."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"version": 0, "consumer": "learner"}]}
    )

    version: int = Field(
        ge=0,
        lt=1 << 62,
        description="The policy version of its rollouts: how many batches the consumer had drawn when the "
        "weights were saved.",
    )
    consumer: str | None = Field(
        None, description="The consumer that draws it; null: the only one with a limit of the lag."
    )


class Started(BaseModel):
    """Whether the group was started."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"id": 1796040781530347, "lag": 0}]})

    id: int | None = Field(
        description="The value that its episodes must have in the field of the group; null: it was not "
        "started, because it or a group after it would lag too much. Try again with a newer version."
    )
    lag: int = Field(
        description="How many versions it, or a group after it, will be behind when it is drawn."
    )


class EndingRequest(RequestModel):
    """How a group is ended."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"status": "discarded", "reason": "no signal"}]}
    )

    status: Literal["complete", "discarded", "abandoned"] = Field(
        description="`complete`: with the members that have ended. `discarded`: it is never drawn. "
        "`abandoned`: discarded, unless it is complete."
    )
    reason: str = Field("", max_length=1000, description="Why it is discarded.")
    started: bool = Field(
        False, description="Whether the number is the `id` of a group that was started, and no `group_id`."
    )


@router.post("/stores/{name}/groups", summary="Start a group", responses=problems(408, 413, 415))
async def start_group(
    store: Store, asked: Starting, idempotency_key: IdempotencyKey = None, session: Session = None
) -> Started:
    """Start a group, unless it or one after it would lag too much when the consumer draws it.

    Its place is freed when it is complete, fails or is discarded, and at the end of the session. Status 409
    with kind `not_ready`: no such consumer with a limit of the lag is open on this server.
    """
    key = read_key(idempotency_key)
    holder = None if session is None else remote_session(session)

    def start() -> tuple[int | None, int]:
        return store.rb.groups.start_for(holder, asked.version, asked.consumer)

    id, lag = await store.run(lambda: store.group_acts.once(key, start))
    if session is not None:
        store.heard.note(session, has_written=True)
    return Started(id=id, lag=lag)


@router.post(
    "/stores/{name}/groups/{group}/end",
    summary="Close or discard a group",
    responses=problems(408, 413, 415, 507),
)
async def end_group(
    store: Store,
    group: Annotated[int, Path(ge=0, lt=1 << 63, description="Id of the group.", examples=[1])],
    asked: EndingRequest,
    idempotency_key: IdempotencyKey = None,
) -> Done:
    """Close or discard a group. Status 409 with kind `state`: its status does not allow it."""
    key, ending = read_key(idempotency_key), Ending(group, asked.status, asked.reason, asked.started)
    await store.run(lambda: store.group_acts.once(key, lambda: store.rb.groups.end(ending)))
    return Done()
