"""Selections of episodes: named lists of episodes, which are stored in the facts of their members.

Used by buffers, exports and SQL. The fact `_selections` of an episode is a JSON object with up to three
members, each of which has names of selections as keys:

- `members`: the selections that the episode belongs to, each with its changes by hand, oldest first;
- `excluded`: the selections that it was excluded from by hand, in the same way;
- `definitions`: what the selection is. Every selection has its definition in one of its episodes.

This module never sees a store, only texts of facts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from expstore.episodes.facts import SELECTIONS, merge_info

#: What a definition says.
DEFINITION = ("condition", "store", "version", "time", "by", "reason")
_MEMBERS, _EXCLUDED, _DEFINITIONS = "members", "excluded", "definitions"


class SelectionChange(NamedTuple):
    """A change of a selection.

    Args:
        act: "create", "include" or "exclude" episodes, or "drop" the selection.
        name: Name of the selection.
        episodes: Ids of the episodes; of none to drop it.
        reason: Why.
        by: Who.
        condition: The condition that the episodes of a new selection met; None: they were named.
        version: The version of the store at which they met it, as `version_of` returns it.
    """

    act: Literal["create", "include", "exclude", "drop"]
    name: str
    episodes: Sequence[int] = ()
    reason: str = ""
    by: str = ""
    condition: str | None = None
    version: str = ""


def selections_of(info: str) -> list[str]:
    """Return the names of the selections that an episode with these facts belongs to."""
    return list(json.loads(info)[SELECTIONS].get(_MEMBERS, ())) if SELECTIONS in info else []


def make_edit(change: SelectionChange, time: int, store: str) -> Callable[[str], str]:
    """Return the function from the facts of an episode to those after a change of its selection.

    Call it for the episodes in their order: the first one of a new selection gets its definition.

    Args:
        change: The change.
        time: When it is made, in microseconds since 1970.
        store: UUID of the store.
    """
    name, noted = change.name, {"time": time, "by": change.by, "reason": change.reason}
    values = (change.condition, store, change.version, time, change.by, change.reason)
    definition = dict(zip(DEFINITION, values, strict=True)) if change.act == "create" else None

    def edit(info: str) -> str:
        nonlocal definition
        marks = _read(info)
        members, excluded = marks.setdefault(_MEMBERS, {}), marks.setdefault(_EXCLUDED, {})
        if change.act == "create":
            members[name] = []
            if definition is not None:
                marks.setdefault(_DEFINITIONS, {})[name] = definition
                definition = None
        elif change.act == "drop":
            for part in marks.values():
                part.pop(name, None)
        else:
            former, new = (excluded, members) if change.act == "include" else (members, excluded)
            if name not in new:
                new[name] = [*former.pop(name, []), {"act": change.act, **noted}]
        return _write(info, marks)

    return edit


def add_definitions(infos: Iterable[str | None], find: Callable[[], Mapping[str, Any]]) -> list[str | None]:
    """Return the facts of some episodes with the definitions of all their selections.

    Of these episodes, the first one of each selection gets its definition, if no other one has it.

    Args:
        infos: The facts of each episode; None: it has none.
        find: Returns the definitions of the store's selections by name. Called only if one is needed.
    """
    texts = list(infos)
    first: dict[str, int] = {}
    defined: set[str] = set()
    for place, text in enumerate(texts):
        if text and SELECTIONS in text:
            marks = _read(text)
            defined.update(marks.get(_DEFINITIONS, ()))
            for name in (*marks.get(_MEMBERS, ()), *marks.get(_EXCLUDED, ())):
                first.setdefault(name, place)
    if missing := [name for name in first if name not in defined]:
        definitions = find()
        for name in missing:
            text = texts[first[name]] or ""
            marks = _read(text)
            marks.setdefault(_DEFINITIONS, {})[name] = definitions[name]
            texts[first[name]] = _write(text, marks)
    return texts


def definitions_of(infos: Iterable[str]) -> dict[str, Any]:
    """Return the definitions that facts of episodes have, by the names of the selections."""
    found: dict[str, Any] = {}
    for text in infos:
        if SELECTIONS in text:
            for name, definition in _read(text).get(_DEFINITIONS, {}).items():
                found.setdefault(name, definition)
    return found


def _read(info: str) -> dict[str, dict[str, Any]]:
    return dict(json.loads(info)[SELECTIONS]) if SELECTIONS in info else {}


def _write(info: str, marks: Mapping[str, Mapping[str, Any]]) -> str:
    """Return facts with other marks; without marks the fact is removed."""
    kept = {part: names for part, names in marks.items() if names}
    return merge_info(info, json.dumps({SELECTIONS: kept or None}, ensure_ascii=False))
