"""Survey the rows of a foreign table: the lengths of lists, and whether a value is missing.

Used by imports of Parquet and Arrow files, whose types do not tell this. It reads batches one by one and
keeps two numbers per level of a list.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from expstore.core.values import Key
from expstore.exchange.variable_rows import plain_array


@dataclass(slots=True)
class Seen:
    """The values found in a column.

    Args:
        lacks: Whether a value, a list or an item is missing somewhere.
        rows: Number of rows that were read.
        filled: Whether a row has a value.
        lengths: The shortest and the longest list of each level, outermost first.
    """

    lacks: bool = False
    rows: int = 0
    filled: bool = False
    lengths: list[tuple[int, int]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there are rows, and none has a value."""
        return self.rows > 0 and not self.filled

    def size(self, depth: int) -> int | None:
        """Return the length of all lists of a level; None without lists, or if it is 0 or varies."""
        if depth >= len(self.lengths):
            return None
        shortest, longest = self.lengths[depth]
        return shortest if shortest == longest > 0 else None


class Survey:
    """Collects facts about columns, batch by batch; a column never seen counts as having no missing value."""

    def __init__(self) -> None:
        self._seen: dict[Key, Seen] = {}

    def look(self, batch: Any) -> None:
        """Add a record batch to the survey."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            self._look((name,), column)

    def note_full(self, name: str) -> None:
        """Add rows of a column that all have a value, without reading them."""
        self._seen.setdefault((name,), Seen()).filled = True

    def of(self, key: Key) -> Seen:
        """Return what was found in a column, or in a member of a struct column."""
        return self._seen.get(key, Seen())

    def _look(self, key: Key, array: Any) -> None:
        array = plain_array(array)
        seen = self._seen.setdefault(key, Seen())
        seen.lacks |= bool(array.null_count)
        seen.rows += len(array)
        seen.filled |= array.null_count < len(array)
        if pa.types.is_struct(array.type):
            for number, part in enumerate(array.type):
                self._look((*key, part.name), array.field(number))
            return
        depth = 0
        while hasattr(array.type, "list_size") or pa.types.is_list(array.type) or _is_large(array.type):
            found = pc.min_max(array.value_lengths()).as_py()
            if found["min"] is not None:
                if depth == len(seen.lengths):
                    seen.lengths.append((found["min"], found["max"]))
                shortest, longest = seen.lengths[depth]
                seen.lengths[depth] = min(shortest, found["min"]), max(longest, found["max"])
            array, depth = array.flatten(), depth + 1
            seen.lacks |= bool(array.null_count)


def _is_large(kind: Any) -> bool:
    return bool(pa.types.is_large_list(kind))
