"""Fields whose rows continue earlier rows, such as the tokens of a conversation: type and notation.

Used by schemas and by the columns of the Arrow storage, which store elements once. This module handles types,
never values.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from expstore.core.values import Key, check_key, key_name
from expstore.errors import SchemaError

#: Name of the type in the notation of `expstore.schema.arrow_types`.
CONTINUED = "continued"


@dataclass(frozen=True, slots=True)
class Continued:
    """The type of a field whose rows continue earlier rows, such as the tokens of a conversation.

    Readers, SQL and exports see whole values: lists of any length. If the value of a row begins with elements
    of an earlier row of its episode, or of the row that it names as its parent, a store with the layout
    "arrow" stores only the elements that follow. The store finds this by comparing values, floats by their
    bits, and checks the whole value against its checksum whenever it is read.

    Args:
        dtype: Dtype of an element, such as "int32"; `str` for a list of texts, `bytes` for a list of bytes.
        parent: Key of a field with the id of a row (int64) that the row continues, in any episode; an id that
            is not in the store, such as 0, names no row. None: rows continue rows of their episode only.

    Example:
        >>> from expstore.specs import Continued
        >>> fields = {"tokens": Continued("int32"), "messages": Continued(str), "reward": "float32"}
        >>> with expstore.open("talks.exp", layout="arrow", schema=fields) as rb:
        ...     rb.storage.schema
        Schema(tokens: continued int32[?], messages: continued list<string>, reward: float32[])
    """

    dtype: Any
    parent: str | tuple[str, ...] | None = None

    def text(self, list_text: str) -> str:
        """Return the type as text; `list_text` is the type of a whole value."""
        parent = [] if self.parent is None else list(check_key("parent=", self.parent))
        return json.dumps({CONTINUED: [json.loads(list_text), parent]}, separators=(",", ":"))


@lru_cache(maxsize=256)
def parent_of(text: str) -> Key | None:
    """Return the key of the field that names parents; () without such a field, None for other types.

    >>> from expstore.schema.continued import parent_of
    >>> parent_of('{"continued":[{"list":"string"},["parent"]]}'), parent_of('"string"')
    (('parent',), None)
    """
    data = json.loads(text) if text else None
    return tuple(data[CONTINUED][1]) if isinstance(data, dict) and CONTINUED in data else None


def check_parent(key: Key, parent: Key, dtype: str, shape: tuple[int, ...]) -> None:
    """Raise SchemaError unless a field can name parents.

    Args:
        key: Key of the field that continues.
        parent: Key of the field that names parents.
        dtype: Its dtype; "" if there is no such field.
        shape: Its row shape.
    """
    if (dtype, shape) != ("int64", ()):
        found = f"is {dtype}{list(shape)}" if dtype else "is missing"
        raise SchemaError(
            f"field {key_name(key)!r} continues rows whose ids are in {key_name(parent)!r}, which {found}",
            hint=f'declare {key_name(parent)!r} as "int64", or leave parent= out',
        )
