"""Convert the fields that users pass as `schema=` (dtypes, shapes, Arrow types) to a `Schema`.

Used by `expstore.open`. This module never reads values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from expstore.core.values import Key, check_key, key_name
from expstore.errors import SchemaError
from expstore.schema.arrow_types import ragged_text, type_text
from expstore.schema.continued import Continued
from expstore.schema.schema import ARROW, DTYPES, OBJECT, Field, Schema

_PLAIN = {str: '"string"', bytes: '"binary"', bool: "bool", int: "int64", float: "float64"}
_HINT = (
    "give a dtype ('float32', torch.float32), a dtype and a row's shape ('int32', (None, 3)) with None where "
    "rows differ, str, bytes, or an Arrow type"
)


def schema_of(types: Mapping[Any, Any] | Schema | None) -> Schema | None:
    """Return a schema with these fields; None for None.

    Args:
        types: The type of each field by its key: a dtype (a name or a torch dtype) for one number; a pair of
            a dtype and a row shape for a tensor, with None for dims that differ between rows; str or bytes
            for nullable text or bytes; a pyarrow type for nullable values of that type; a `Continued`. A
            nested mapping is a group of fields.

    Raises:
        SchemaError: A type does not exist, or an Arrow type is not supported.
        TypeError: `types` is not a mapping, or a key is not a string or a tuple of strings.

    Example:
        >>> from expstore.schema.field_parser import schema_of
        >>> schema_of({"prompt": str, "tokens": ("int32", (None,)), "next": {"reward": "float32"}})
        Schema(prompt: string, tokens: int32[?], next.reward: float32[])
    """
    if types is None or isinstance(types, Schema):
        return types
    if not isinstance(types, Mapping):
        raise TypeError(f"schema= takes a Schema, or types by key, got {types!r}")
    return Schema(_fields(types, ()))


def _fields(types: Mapping[Any, Any], path: Key) -> Iterator[Field]:
    for name, given in types.items():
        key = (*path, *check_key("each key of schema=", name))
        if isinstance(given, Mapping):
            yield from _fields(given, key)
        else:
            yield _field(key, given)


def _field(key: Key, given: Any) -> Field:
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], (tuple, list)):
        dtype, shape = _dtype(key, given[0]), tuple(given[1])
        if None in shape:
            return Field(key, ARROW, (), ragged_text(dtype, shape))
        return Field(key, dtype, shape)
    if isinstance(given, Continued):
        item = _PLAIN[given.dtype] if given.dtype in (str, bytes) else None
        whole = f'{{"list":{item}}}' if item else ragged_text(_dtype(key, given.dtype), (None,))
        return Field(key, ARROW, (), given.text(whole))
    if given in (str, bytes):
        return Field(key, ARROW, (), _PLAIN[given])
    if type(given).__module__.startswith("pyarrow"):
        return Field(key, ARROW, (), type_text(given, key))
    return Field(key, _dtype(key, given), ())


def _dtype(key: Key, given: Any) -> str:
    name = _PLAIN.get(given) if isinstance(given, type) else str(given).removeprefix("torch.")
    if name not in DTYPES or name == OBJECT:
        raise SchemaError(f"field {key_name(key)!r}: {given!r} is no type of a field", hint=_HINT)
    return name
