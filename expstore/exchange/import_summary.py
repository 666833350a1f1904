"""Summarize an import: which fields have which role, how episodes ended, and what seems wrong.

Used by imports of files and of data sets. It needs only the schema and counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from expstore.core.values import Key, key_name
from expstore.exchange.base import Imported, names_of
from expstore.schema.field_roles import Keys
from expstore.schema.schema import Schema

#: Counts the episodes by status; an open episode is cut when the store is closed.
STATUSES = (
    "SELECT replace(status, 'open', 'cut') AS how, count(*) FROM episodes WHERE live_rows > 0 "
    "GROUP BY how ORDER BY how = 'cut', how"
)
_OBSERVATION, _NEXT = ("observation",), ("next", "observation")


def summarize_import(
    path: Path,
    *,
    rows: int,
    kept: int,
    statuses: Iterable[tuple[str, int]],
    schema: Schema,
    keys: Keys,
    notes: Sequence[str],
    names: Mapping[str, str],
    warnings: Sequence[str] = (),
) -> Imported:
    """Return the result of an import.

    Args:
        path: The store.
        rows: Number of rows read.
        kept: Number of readable rows.
        statuses: The result of the query `STATUSES`.
        schema: The fields of the store.
        keys: The fields with a role in episodes.
        notes: Descriptions of what was left out or changed.
        names: Columns of the source that became fields of another name; "": an episode's info has the values.
        warnings: What in the rows seems wrong.
    """
    counts = dict(statuses)
    episodes = sum(counts.values())
    roles = _find_roles(schema, keys, names)
    found = list(warnings)
    if not roles["reward"]:
        found.append("there is no reward: returns are 0")
    if not roles["end flags"]:
        found.append("there is no end flag: episodes that ended count as cut")
    if episodes == 1 and kept == rows > 1:
        found.append(f"one episode holds all {rows:,} rows")
    return Imported(
        path=path,
        rows=rows,
        kept=kept,
        episodes=episodes,
        fields=names_of(schema.keys),
        notes=tuple(notes),
        statuses=counts,
        roles=roles,
        warnings=tuple(found),
    )


def _find_roles(schema: Schema, keys: Keys, names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the fields of each role, each with its name in the source."""
    ends = {keys.terminated, keys.truncated, keys.done}
    found: dict[str, list[str]] = {
        role: []
        for role in (
            *("observation", "next observation", "action", "reward"),
            *("end flags", "episode", "plain fields"),
        )
    }
    origins: dict[str, list[str]] = {}
    for theirs, ours in names.items():
        if ours:
            origins.setdefault(ours, []).append(theirs)
        else:
            found["episode"].append(f"{theirs} (in the info of episodes)")
    for key in schema.keys:
        name = key_name(key)
        text = f"{name} ({', '.join(origins[name])})" if name in origins else name
        found[_role_of(key, keys, ends)].append(text)
    return {role: tuple(texts) for role, texts in found.items()}


def _role_of(key: Key, keys: Keys, ends: set[Key | None]) -> str:
    if key == keys.reward:
        return "reward"
    if key in ends:
        return "end flags"
    if key == keys.trajectory:
        return "episode"
    if key[:2] == _NEXT:
        return "next observation"
    if key[:1] == _OBSERVATION:
        return "observation"
    return "action" if key[0] == "action" else "plain fields"
