"""Read the conversation of an episode: of each row, the messages that no row before it has.

Used by the route that reads messages. Rows of an agent's loop repeat all messages before, so their whole
lists would be a hundred times as long as the conversation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from expstore.core.values import IntArray, key_name
from expstore.errors import SchemaError
from expstore.schema.arrow_types import describe
from expstore.schema.schema import Schema
from expstore.storages.episode_lookup import steps_of_episode
from expstore.storages.read_view import ReadView, read_present, read_stable

#: Bytes of rows that are read at a time.
_PIECE_BYTES = 16 << 20
#: An answer ends with the row that reaches this number of characters.
_CHARACTERS = 4 << 20
_LISTS = frozenset({"list<string>", "large_list<string>", "list<large_string>", "large_list<large_string>"})


class RowMessages(BaseModel):
    """The messages of a row."""

    step: int = Field(description="Its step.")
    shared: int = Field(description="How many of its first messages an earlier row has; they are left out.")
    like: int | None = Field(description="The step of the newest such row; null: it shares none.")
    messages: list[str | None] = Field(description="The messages that follow, usually each as JSON.")


class Conversation(BaseModel):
    """Messages of an episode."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "rows": [
                        {"step": 0, "shared": 0, "like": None, "messages": ['{"role":"user","content":"Hi"}']}
                    ],
                    "next": None,
                }
            ]
        }
    )

    rows: list[RowMessages] = Field(description="Rows that are in the store, by step.")
    next: int | None = Field(
        description="The step with which the next request starts; null: this was the last one."
    )


def read_conversation(
    storage: ReadView, episode: int, name: str, start: int, count: int, known: int | None
) -> Conversation:
    """Return the messages of rows that no earlier one of these rows has.

    Args:
        storage: Storage of the rows.
        episode: Id of the episode.
        name: Name of a field of lists of texts.
        start: The first step.
        count: Most rows.
        known: The step of a row whose messages the client has; None: it has none.

    Raises:
        NotFoundError: There is no such episode, or none of its rows is left.
        SchemaError: There is no such field, or it has no lists of texts.
    """

    def read() -> Conversation:
        place = _place_of(storage.require_schema(), name)
        ids, steps = steps_of_episode(storage, episode)
        first = int(np.searchsorted(steps, start))
        tree, rows, size = _Tree(), list[RowMessages](), 0
        earlier = np.flatnonzero(steps[:first] == known)
        for row, texts in _read_lists(storage, ids[earlier], place):
            tree.add(int(steps[earlier][row]), texts)
        chosen, following = steps[first : first + count], steps[first + count :]
        for row, texts in _read_lists(storage, ids[first : first + count], place):
            step = int(chosen[row])
            if size >= _CHARACTERS:
                return Conversation(rows=rows, next=step)
            shared, like = tree.add(step, texts)
            rows.append(RowMessages(step=step, shared=shared, like=like, messages=texts[shared:]))
            size += sum(len(text or "") for text in texts[shared:])
        return Conversation(rows=rows, next=int(following[0]) if following.size else None)

    return read_stable(storage, read)


def _place_of(schema: Schema, name: str) -> int:
    """Return the position of a field of lists of texts."""
    fitting = [
        place
        for place, entry in enumerate(schema.fields)
        if entry.variable and describe(entry.arrow).removeprefix("continued ") in _LISTS
    ]
    for place in fitting:
        if key_name(schema.keys[place]) == name:
            return place
    known = ", ".join(key_name(schema.keys[place]) for place in fitting)
    raise SchemaError(
        f"no field {name[:100]!r} of lists of texts",
        hint=f"there are {known}" if known else "it has no such field",
    )


def _read_lists(storage: ReadView, ids: IntArray, place: int) -> Iterator[tuple[int, list[str | None]]]:
    """Yield the texts of rows that are in the store, with the position of each.

    A few rows are read at a time: whole lists of all may take more memory than the answer by far.
    """
    ends = np.cumsum(storage.sizes_of(ids))
    start = 0
    while start < ids.size:
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _PIECE_BYTES, side="right")))
        held, (column,) = read_present(storage, ids[start:stop], [place])
        places = dict(zip(ids[start:stop].tolist(), range(start, stop), strict=True))
        for row, value in zip(held.tolist(), column, strict=True):
            yield places[row], value.as_py() or []
        start = stop


class _Tree:
    """The lists of texts of rows, as paths from one root: lists that begin equally share the begin."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, str | None], int] = {}
        #: The newest row through each node.
        self._rows: list[int] = [0]

    def add(self, row: int, texts: list[str | None]) -> tuple[int, int | None]:
        """Add a row; return how many of its first texts earlier rows have, and the newest such row."""
        node = shared = 0
        like: int | None = None
        for text in texts:
            following = self._nodes.setdefault((node, text), len(self._rows))
            if following == len(self._rows):
                self._rows.append(row)
            else:
                shared, like = shared + 1, self._rows[following]
                self._rows[following] = row
            node = following
        return shared, like
