"""The fields of a call to a language model, and a row of them as an Arrow table.

Used by the server, which records calls. This module knows no bodies of requests or answers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pyarrow as pa

from expstore.schema.continued import Continued

#: Kinds of fields: the type of the field, its Arrow type, and its value if there is nothing to store.
_TEXT = (str, pa.string(), None)
_TEXTS: tuple[Any, pa.DataType, Any] = (Continued(str), pa.list_(pa.string()), [])
_FLAG = ("bool", pa.bool_(), False)
#: The fields of a row, which is a call, a reward, or the end of an episode.
FIELDS: Mapping[str | tuple[str, ...], tuple[Any, pa.DataType, Any]] = {
    "event": _TEXT,
    "call": _TEXT,
    "outcome": _TEXT,
    "status": (pa.int32(), pa.int32(), None),
    "path": _TEXT,
    "model": _TEXT,
    "messages": _TEXTS,
    "tools": _TEXTS,
    "finish_reason": _TEXT,
    "request": _TEXT,
    "response": _TEXT,
    "error": _TEXT,
    "input_tokens": (pa.int64(), pa.int64(), None),
    "output_tokens": (pa.int64(), pa.int64(), None),
    "prompt_token_ids": (Continued("int32"), pa.list_(pa.int32()), []),
    "token_ids": (("int32", (None,)), pa.list_(pa.int32()), []),
    "logprobs": (("float32", (None,)), pa.list_(pa.float32()), []),
    "token_texts": (pa.list_(pa.string()), pa.list_(pa.string()), []),
    "started": (pa.timestamp("us"), pa.timestamp("us"), None),
    "first_byte": (pa.float64(), pa.float64(), None),
    "seconds": (pa.float64(), pa.float64(), None),
    "retry": (pa.int32(), pa.int32(), None),
    "digest": _TEXT,
    "group": _TEXT,
    "policy_version": ("int64", pa.int64(), 0),
    ("next", "reward"): ("float32", pa.float32(), 0.0),
    ("next", "terminated"): _FLAG,
    ("next", "truncated"): _FLAG,
}
_SCHEMA = pa.schema(
    [(name if isinstance(name, str) else ".".join(name), kind) for name, (_, kind, _) in FIELDS.items()]
)


def build_row(values: Mapping[Any, Any], omit: Collection[str] = ()) -> pa.Table:
    """Return a table of one row. Characters that UTF-8 does not have, halves of pairs, become U+FFFD.

    Args:
        values: Values by field; fields without one are empty.
        omit: Fields that are left empty.
    """
    columns = []
    for name, (_, kind, empty) in FIELDS.items():
        value = empty if name in omit else values.get(name, empty)
        try:
            columns.append(pa.array([value], kind))
        except UnicodeEncodeError:
            cleaned = list(map(_clean, value)) if isinstance(value, list) else _clean(value)
            columns.append(pa.array([cleaned], kind))
    return pa.table(columns, _SCHEMA)


def _clean(text: str) -> str:
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def describe_fields() -> dict[Any, Any]:
    """Return the type of each field, as `schema=` of `expstore.open` takes them."""
    return {name: kind for name, (kind, _, _) in FIELDS.items()}
