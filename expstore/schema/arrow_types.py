"""Types of variable-length fields as text: strings, lists, structs, tensors whose shapes differ.

Used by schemas, which store the text, and by code that needs the Arrow type. This module handles types, never
values; pyarrow is imported when an Arrow type is first needed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from expstore.core.parsing import INVALID
from expstore.core.values import Key, key_name
from expstore.errors import SchemaError
from expstore.schema.continued import CONTINUED

if TYPE_CHECKING:
    import pyarrow as pa

#: Most dims of a row: NumPy's limit, without the dim of the batch.
MOST_DIMS = 63
#: Names of types without parameters: the names of pyarrow's functions.
_PLAIN = frozenset({
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32",
    "float64", "string", "large_string", "binary", "large_binary", "date32", "date64",
})  # fmt: skip
#: Types with parameters.
_MORE = re.compile(
    r"(timestamp)\[(s|ms|us|ns)(?:, (.+))?\]|(time32|time64|duration)\[(s|ms|us|ns)\]|"
    r"(decimal128|decimal256)\((\d+), (-?\d+)\)|(fixed_size_binary)\[(\d+)\]"
)
#: Dtypes of tensors that Arrow lacks, with the Arrow type that represents one value.
_STAND_INS = {"bfloat16": "uint16", "complex64": {"fixed": ["float32", 2]}}
_DTYPES = frozenset({
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "bfloat16",
    "float32", "float64", "complex64",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ragged:
    """Describe a field whose rows are tensors of different shapes.

    If only the first dim differs, a row is an Arrow list. Its items are values, or nested fixed-size lists
    for the other dims (the last dim is the innermost list). Otherwise a row is a variable shape tensor in
    Arrow's sense: a struct of `data` (a list of the values in C order) and `shape` (a fixed-size list of
    int32).

    Args:
        dtype: A dtype of `Field`. bfloat16 is stored as its uint16 bits, complex64 as two float32.
        shape: Shape of a row, with None for each dim that differs between rows.
    """

    dtype: str
    shape: tuple[int | None, ...]

    @property
    def is_list(self) -> bool:
        """Whether a row is an Arrow list; otherwise it is a struct of `data` and `shape`."""
        return self.shape[0] is None and None not in self.shape[1:]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if size is None else str(size) for size in self.shape)}]"


def ragged_text(dtype: str, shape: tuple[int | None, ...]) -> str:
    """Return the text of the type of tensors whose shapes differ.

    Args:
        dtype: A dtype of `Field`.
        shape: Shape of a row, with None for each dim that differs between rows.

    Raises:
        SchemaError: The dtype does not exist, or no dim is None.

    >>> from expstore.schema.arrow_types import ragged_text
    >>> ragged_text("int32", (None, 3))
    '{"ragged":["int32",[null,3]]}'
    """
    text = _dumps({"ragged": [dtype, list(shape)]})
    check_text(text)
    return text


@lru_cache(maxsize=256)
def ragged_of(text: str) -> Ragged | None:
    """Return the type of a field's tensors, or None if its rows are not tensors."""
    data = _whole(json.loads(text))
    if isinstance(data, dict) and "ragged" in data:
        dtype, shape = data["ragged"]
        return Ragged(dtype, tuple(shape))
    return None


def ragged_type(found: Ragged) -> pa.DataType:
    """Return the Arrow type of tensors whose shapes differ."""
    import pyarrow as pa

    item = _build(_STAND_INS.get(found.dtype, found.dtype))
    if not found.is_list:
        return pa.struct([("data", pa.list_(item)), ("shape", pa.list_(pa.int32(), len(found.shape)))])
    for size in reversed(found.shape[1:]):
        item = pa.list_(item, size)
    return pa.list_(item)


def type_text(kind: pa.DataType, key: Key = ()) -> str:
    """Return the text of an Arrow type; `to_type` is the inverse.

    Args:
        kind: The type.
        key: Key of the field, for messages.

    Raises:
        SchemaError: Fields cannot have this type.

    >>> from expstore.schema.arrow_types import type_text
    >>> import pyarrow as pa
    >>> type_text(pa.list_(pa.string()))
    '{"list":"string"}'
    """
    try:
        return _dumps(_tell(kind))
    except SchemaError as exc:
        if not key:
            raise
        raise SchemaError(f"field {key_name(key)!r}: {exc.message}", hint=exc.hint) from exc


@lru_cache(maxsize=256)
def to_type(text: str) -> pa.DataType:
    """Return the Arrow type for a text that `check_text` has accepted."""
    return _build(json.loads(text))


def check_text(text: str) -> None:
    """Raise SchemaError if a text does not describe a type."""
    try:
        _describe(json.loads(text))
    except INVALID as exc:
        raise SchemaError(
            f"{text[:200]!r} is no type of a field", hint="see expstore.schema.arrow_types"
        ) from exc


@lru_cache(maxsize=256)
def describe(text: str) -> str:
    """Return a readable description of a type given as text, for messages.

    >>> from expstore.schema.arrow_types import describe
    >>> describe('{"list":{"fixed":["int32",2]}}'), describe('{"ragged":["int32",[null,3]]}')
    ('list<int32[2]>', 'int32[?, 3]')
    """
    return _describe(json.loads(text))


def _whole(data: Any) -> Any:
    """Return the type of whole values of a parsed type."""
    return data[CONTINUED][0] if isinstance(data, dict) and CONTINUED in data else data


def _dumps(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"))


def _tell(kind: pa.DataType) -> Any:
    """Return the JSON value that describes a type."""
    import pyarrow as pa

    is_a = pa.types
    if is_a.is_null(kind):
        raise SchemaError(
            "rows of nothing but None, or empty lists, do not say what they would hold",
            hint="give schema= when the store is made, or let the first rows hold a value",
        )
    if isinstance(kind, pa.ListType):
        return {"list": _tell(kind.value_type)}
    if isinstance(kind, pa.LargeListType):
        return {"large_list": _tell(kind.value_type)}
    if isinstance(kind, pa.FixedSizeListType):
        return {"fixed": [_tell(kind.value_type), kind.list_size]}
    if isinstance(kind, pa.MapType):
        return {"map": [_tell(kind.key_type), _tell(kind.item_type)]}
    if isinstance(kind, pa.StructType):
        return {"struct": [[part.name, _tell(part.type)] for part in kind]}
    return _tell_leaf(kind)


def _tell_leaf(kind: pa.DataType) -> str:
    import pyarrow as pa

    if isinstance(kind, pa.TimestampType):
        return f"timestamp[{kind.unit}, {kind.tz}]" if kind.tz else f"timestamp[{kind.unit}]"
    if isinstance(kind, (pa.Time32Type, pa.Time64Type)):
        return f"time{kind.bit_width}[{kind.unit}]"
    if isinstance(kind, pa.DurationType):
        return f"duration[{kind.unit}]"
    if isinstance(kind, (pa.Decimal128Type, pa.Decimal256Type)):
        return f"decimal{kind.bit_width}({kind.precision}, {kind.scale})"
    if isinstance(kind, pa.FixedSizeBinaryType):
        return f"fixed_size_binary[{kind.byte_width}]"
    for name in sorted(_PLAIN):
        if kind.equals(_build(name)):
            return name
    raise SchemaError(f"fields cannot have the Arrow type {kind}", hint="cast it to one of plain values")


def _build(data: Any) -> pa.DataType:
    import pyarrow as pa

    if isinstance(data, str):
        return getattr(pa, "bool_" if data == "bool" else data)() if data in _PLAIN else _build_leaf(data)
    ((name, of),) = data.items()
    if name == CONTINUED:
        return _build(of[0])
    if name == "ragged":
        return ragged_type(Ragged(of[0], tuple(of[1])))
    if name == "struct":
        return pa.struct([(part, _build(kind)) for part, kind in of])
    if name == "map":
        return pa.map_(_build(of[0]), _build(of[1]))
    if name == "fixed":
        return pa.list_(_build(of[0]), of[1])
    return (pa.list_ if name == "list" else pa.large_list)(_build(of))


def _build_leaf(text: str) -> pa.DataType:
    import pyarrow as pa

    found = _MORE.fullmatch(text)
    assert found is not None  # checked by `check_text`
    stamp, stamp_unit, zone, time, unit, decimal, digits, scale, binary, width = found.groups()
    if stamp:
        return pa.timestamp(stamp_unit, zone)
    if time:
        return getattr(pa, time)(unit)
    if decimal:
        return getattr(pa, decimal)(int(digits), int(scale))
    assert binary
    return pa.binary(int(width))


def _describe(data: Any) -> str:
    """Return a readable description of a parsed type; any exception means that it is not a type."""
    if isinstance(data, str):
        if data not in _PLAIN and _MORE.fullmatch(data) is None:
            raise ValueError(data)
        return data
    ((name, of),) = data.items()
    if name == CONTINUED:
        whole, parent = of
        is_list = whole in ({"list": "string"}, {"list": "binary"}) or whole["ragged"][1] == [None]
        if not is_list or not all(isinstance(part, str) for part in parent):
            raise ValueError(data)
        return f"{CONTINUED} {_describe(whole)}"
    if name == "ragged":
        dtype, shape = of
        are_sizes = all(_is_size(n) for n in shape if n is not None)
        if dtype not in _DTYPES or None not in shape or not are_sizes or len(shape) > MOST_DIMS:
            raise ValueError(data)
        return str(Ragged(dtype, tuple(shape)))
    if name == "struct":
        return "struct<" + ", ".join(f"{part}: {_describe(kind)}" for part, kind in of) + ">"
    if name == "map":
        return f"map<{_describe(of[0])}, {_describe(of[1])}>"
    if name == "fixed":
        if not _is_size(of[1]):
            raise ValueError(data)
        return f"{_describe(of[0])}[{of[1]}]"
    if name not in ("list", "large_list"):
        raise KeyError(name)
    return f"{name}<{_describe(of)}>"


def _is_size(number: Any) -> bool:
    return type(number) is int and 0 < number < 1 << 31  # what Arrow's lists of fixed size can have
