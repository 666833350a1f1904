"""Which group an episode belongs to: a fact of its first row, under a name that users cannot set.

The fact is committed with the row, so a group is the same after a restart, in a reader, and after its rows
were evicted. `sql/groups.py` makes groups of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from expstore.core.values import Array, key_name
from expstore.episodes.facts import GROUP
from expstore.episodes.segmentation import NEW
from expstore.episodes.table import Segment
from expstore.errors import SchemaError
from expstore.schema.field_roles import Keys
from expstore.schema.row_selection import pick
from expstore.schema.schema import Schema


def add_groups(
    info: str, keys: Keys, schema: Schema, columns: Sequence[Array], segments: Sequence[Segment]
) -> str:
    """Add the groups of the episodes that begin in a batch to its info.

    Args:
        info: The info of all episodes of the batch, as JSON text.
        keys: The fields with a role in episodes; without `group` the info is returned as it is.
        schema: The fields.
        columns: The batch. Shapes `(n, *row shape)`.
        segments: The batch cut into runs.

    Raises:
        SchemaError: The fact that names the group is neither an integer nor text.
    """
    first = [one.start for one in segments if one.flags & NEW]
    if keys.group is None or not first:
        return info
    facts = json.loads(info) if info else {}
    versions: Any = [facts.get("policy_version")] * len(first)
    if keys.version is not None:
        versions = _read(schema, keys.version, columns, first)
    if keys.group in schema:
        values = _read(schema, keys.group, columns, first)
    else:
        value = facts.get(key_name(keys.group))
        if isinstance(value, bool) or not isinstance(value, int | str | None):
            raise SchemaError(
                f"the fact {key_name(keys.group)!r} names a group, and cannot be {value!r:.100}",
                hint="use an integer or text",
            )
        values = [value] * len(first)
    facts[GROUP] = [
        None if value is None else {"key": value} | ({"version": version} if type(version) is int else {})
        for value, version in zip(values, versions, strict=True)
    ]
    return json.dumps(facts, ensure_ascii=False)


def _read(schema: Schema, key: Any, columns: Sequence[Array], rows: Sequence[int]) -> list[Any]:
    column = pick(columns[schema.place(key)], np.array(rows))
    values: list[Any] = column.reshape(-1).tolist() if isinstance(column, np.ndarray) else column.to_pylist()
    return values
