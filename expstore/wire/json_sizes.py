"""How large the values of Arrow arrays become as JSON, without converting them.

Used by the HTTP layer for results of SQL, which may have any type: names of members, texts of an ENUM and
booleans take many times their bytes in Arrow.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

#: Most bytes of one byte of a text (`\\u0000`), or of a number, a time or an interval, with its comma.
_BYTE = 6
#: Most bytes of the quotes, brackets and commas around a value; also of null.
_FRAME = 5


def json_bytes(array: Any) -> int:
    """Return the most bytes that the values of an Arrow array can take as JSON.

    Args:
        array: Values of any type that DuckDB has, which excludes float16.
    """
    kind, count = array.type, len(array)
    if isinstance(array, pa.ExtensionArray):
        return json_bytes(array.storage) + _FRAME * count
    if isinstance(array, pa.DictionaryArray):
        return _text_bytes(pc.binary_length(array.dictionary).take(array.indices))
    if isinstance(array, pa.UnionArray):
        return sum(json_bytes(array.field(number)) for number in range(kind.num_fields))
    if isinstance(array, pa.MapArray):  # a list of pairs
        pairs = len(array.keys)
        return _FRAME * (count + pairs) + json_bytes(array.keys) + json_bytes(array.items)
    if isinstance(array, pa.StructArray):
        names = sum(_BYTE * len(field.name.encode()) + _FRAME for field in kind)
        return (names + _FRAME) * count + sum(map(json_bytes, array.flatten()))
    if pa.types.is_nested(kind):  # all kinds of lists
        return _FRAME * count + json_bytes(array.flatten())
    if pa.types.is_null(kind):
        return _FRAME * count
    if pa.types.is_primitive(kind) or pa.types.is_decimal(kind):
        width: int = -(-kind.bit_width // 8)
        return _BYTE * width * count
    return _text_bytes(pc.binary_length(array))


def _text_bytes(lengths: Any) -> int:
    total: int = pc.sum(lengths).as_py() or 0
    return _BYTE * total + _FRAME * len(lengths)
