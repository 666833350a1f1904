"""Python values as a column of a variable-length field.

Used to read incoming batches. Only values that can be returned unchanged are accepted: text never becomes
bytes, and numbers never become text. This module does not handle tensors; pyarrow is imported with the first
values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, time
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Key, key_name
from expstore.errors import SchemaError

if TYPE_CHECKING:
    import pyarrow as pa

#: Names of the types in which pyarrow mixes values of different kinds.
_MIXED = ("binary", "date", "time")
#: Deepest nesting of lists and dicts that is accepted.
_DEPTH = 32
_LISTS: tuple[type, ...] = (list, tuple, np.ndarray)
_HINT = "rows are texts, bytes, numbers, flags, dates, None, or lists and dicts of these, all of one kind"


def column_of(key: Key, values: Sequence[Any]) -> pa.Array:
    """Return Python values as one column.

    A dict becomes a struct; members that a row lacks are None. A tuple becomes a list. If a field has
    integers and floats, all become floats.

    Args:
        key: Key of the field, for messages.
        values: One value per row; None for a row without a value.

    Raises:
        SchemaError: Arrow cannot represent a value, or the values have no common type.

    >>> from expstore.schema.arrow_values import column_of
    >>> column_of(("tags",), [["a", "b"], [], None]).to_pylist()
    [['a', 'b'], [], None]
    """
    import pyarrow as pa

    _check_kinds(key, values)
    try:
        found = pa.array(values)
    except (ValueError, TypeError, OverflowError, NotImplementedError, RecursionError) as exc:
        raise _refuse(key, str(exc).splitlines()[0]) from exc
    if isinstance(found, pa.ChunkedArray):
        raise SchemaError(
            f"field {key_name(key)!r} has more than 2 GiB in one batch", hint="extend by fewer rows at a time"
        )
    if reason := _find_mix(values, found.type):
        raise _refuse(key, reason)
    return found


def _refuse(key: Key, reason: str) -> SchemaError:
    return SchemaError(f"field {key_name(key)!r} has values that cannot be kept: {reason}", hint=_HINT)


def _check_kinds(key: Key, values: Iterable[Any]) -> None:
    """Raise SchemaError for values that Arrow accepts but would not return unchanged."""
    level = list(values)
    for _ in range(_DEPTH):
        kinds = set(map(type, level))
        if wrong := [kind for kind in kinds if issubclass(kind, (set, frozenset))]:
            raise _refuse(key, f"a {wrong[0].__name__} has no order")
        if not any(issubclass(kind, (*_LISTS, Mapping)) for kind in kinds):
            return
        dicts = [value for value in level if isinstance(value, Mapping)]
        if any(not value for value in dicts):
            raise _refuse(key, "an empty dict does not say what it would hold")
        if any(not isinstance(name, str) for value in dicts for name in value):
            raise _refuse(key, "the names in a dict must be text")
        if any(isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value) for value in level):
            raise _refuse(key, "an array with masked elements; use None for a missing value")
        inside: list[Any] = [value for value in level if isinstance(value, _LISTS) and not _is_plain(value)]
        level = list(chain.from_iterable([*inside, *(value.values() for value in dicts)]))
    raise _refuse(key, f"lists or dicts more than {_DEPTH} deep")


def _is_plain(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def _find_mix(values: Iterable[Any], kind: pa.DataType) -> str:
    """Return why values would not come back from a type as they were; "" if they would.

    pyarrow makes bytes of text, dates of datetimes, and UTC of times without a zone, if the first values are
    of that kind.
    """
    import pyarrow as pa

    is_a = pa.types
    if is_a.is_list(kind):
        if not _has(kind, _MIXED):
            return ""
        lists = (value for value in values if value is not None)
        return _find_mix(chain.from_iterable(lists), kind.value_type)
    if is_a.is_struct(kind):
        rows = [value for value in values if value is not None] if _has(kind, _MIXED) else []
        found = (_find_mix((row.get(part.name) for row in rows), part.type) for part in kind if rows)
        return next((reason for reason in found if reason), "")
    if is_a.is_binary(kind) or is_a.is_large_binary(kind):
        mixed = any(isinstance(value, str) for value in values)
        return "text in some rows, bytes in others" if mixed else ""
    if is_a.is_date(kind):
        # Also pandas' missing value, of which pyarrow makes the year 1.
        mixed = any(isinstance(value, datetime) for value in values)
        return "dates in some rows, datetimes in others" if mixed else ""
    if is_a.is_timestamp(kind):
        moments = [value for value in values if isinstance(value, datetime)]
        mixed = any((value.utcoffset() is None) != (kind.tz is None) for value in moments)
        return "datetimes with a time zone and without one" if mixed else ""
    if is_a.is_time(kind):
        zoned = any(isinstance(value, time) and value.tzinfo is not None for value in values)
        return "a time of day with a time zone; use datetimes" if zoned else ""
    return ""


def _has(kind: pa.DataType, words: Sequence[str]) -> bool:
    text = str(kind)
    return any(word in text for word in words)
