"""Routes for selections of episodes: create one, change or drop one.

Used by the application unless it is read-only. SQL reads selections.
"""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.dependencies import Limits, Store, check_sql, create_router, problems
from expstore.api.errors import Refusal
from expstore.api.request_models import Items, RequestModel
from expstore.api.routes.write import Done, IdempotencyKey, read_key
from expstore.buffers.selections import select_ended, version_of
from expstore.episodes.selections import SelectionChange
from expstore.wire.stream import read_table

router = create_router("writing")
_TEXT = 1000


class Naming(RequestModel):
    """A selection, and who changes it and why."""

    name: str = Field(max_length=200, description="Its name: printable text without `/`.")
    episodes: Items[int] = Field([], description="Ids of episodes.")
    reason: str = Field("", max_length=_TEXT, description="Why; stored with the episodes.")
    by: str = Field("", max_length=200, description="Who; stored with the episodes.")


class NewSelection(Naming):
    """A selection that is to be created of the episodes that meet a condition, or of given ones."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"name": "clean-v1", "where": "length > 1", "reason": "demos", "by": "ada"}]
        },
    )

    where: str | None = Field(
        None,
        min_length=1,
        max_length=4000,
        description="An SQL condition over the columns of `episodes`, which episodes that have ended must "
        "meet. It is evaluated in the sandbox of `/sql`. null: `episodes` has the ids.",
    )


class ChangedSelection(Naming):
    """A selection that is to be changed or dropped."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={
            "examples": [{"name": "clean-v1", "episodes": [1], "reason": "wrong labels", "by": "ada"}]
        },
    )


class CreatedSelection(BaseModel):
    """The selection that was created."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"name": "clean-v1", "episodes": 1}]})

    name: str = Field(description="Its name.")
    episodes: int = Field(description="How many episodes it has.")


@router.post(
    "/stores/{name}/selections",
    summary="Create a selection",
    responses=problems(403, 408, 413, 415, 504, 507),
)
async def create_selection(
    store: Store, limits: Limits, asked: NewSelection, idempotency_key: IdempotencyKey = None
) -> CreatedSelection:
    """Create a selection: all of it is stored, or nothing.

    Status 404: no episode that has ended meets the condition. Status 409 with kind `state`: there is a
    selection of this name.
    """
    if (asked.where is None) != bool(asked.episodes):
        raise Refusal(422, "pass either where, a condition, or episodes, their ids")
    if asked.where is not None:
        check_sql(limits)
    key = read_key(idempotency_key)

    def create() -> int:
        version, episodes = version_of(store.rb.storage), asked.episodes
        if asked.where is not None:
            found = store.query(select_ended(asked.where), {}, rows=1, size=limits.max_answer)
            episodes = read_table(found.data)[0][0].as_py() or []
        change = SelectionChange("create", asked.name, episodes, asked.reason, asked.by, asked.where, version)
        store.rb.selections.change(change)
        return len(set(episodes))

    count = await store.run(lambda: store.group_acts.once(key, create))
    return CreatedSelection(name=asked.name, episodes=count)


@router.post(
    "/stores/{name}/selections/{act}",
    summary="Change or drop a selection",
    responses=problems(408, 413, 415, 507),
)
async def change_selection(
    store: Store,
    act: Annotated[Literal["include", "exclude", "drop"], Path(description="What is done.")],
    asked: ChangedSelection,
    idempotency_key: IdempotencyKey = None,
) -> Done:
    """Include or exclude episodes by hand, or drop a selection. Status 404: there is no such selection."""
    key = read_key(idempotency_key)
    change = SelectionChange(act, asked.name, asked.episodes, asked.reason, asked.by)
    await store.run(lambda: store.group_acts.once(key, lambda: store.rb.selections.change(change)))
    return Done()
