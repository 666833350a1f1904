"""Integers of variable-length fields, stored in a segment of an Arrow store in as few bytes as they need.

Used by segments. In each segment every integer node has one width, which the stream's schema specifies, so
that any program can read it. The schema's metadata names the fields' own types, and has a crc32c of the
schema: a flipped bit could turn a type into another valid one. This module uses no files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from expstore.core.values import IntArray
from expstore.storages.columns.arrow.gather import Plan

__all__ = ["Bounds", "Widths", "bounds_of", "own_widths", "read_widths", "together", "widths_for"]

#: The smallest and the largest value of each integer node, depth first; 0 is always between them.
Bounds = tuple[tuple[int, int], ...]

_CRC, _TYPES = b"expstore", b"expstore.types"
_MARK, _DIGITS = b"crc32c ", 8
_SMALLER = (pa.uint8(), pa.int8(), pa.uint16(), pa.int16(), pa.uint32(), pa.int32())


@dataclass(frozen=True)
class Widths:
    """The types of the values of some fields in a segment; equal if the streams begin with the same bytes.

    Args:
        schema: The stream's schema, without metadata.
        head: The first bytes of the stream.
        kinds: The fields' types in the segment.
        codes: For each node, depth first: bytes of an integer, negative for a signed one; 0: the field's own
            type. Shape `(nodes,)`.
    """

    schema: pa.Schema
    head: bytes
    kinds: tuple[pa.DataType, ...]
    codes: IntArray = field(compare=False)

    @cached_property
    def plan(self) -> Plan:
        """The positions of nodes and buffers in a batch."""
        return Plan(self.kinds)

    @cached_property
    def limits(self) -> Bounds:
        """The range of each integer type."""
        return tuple(_limits(leaf) for kind in self.kinds for leaf in _integers(kind))

    def holds(self, bounds: Bounds) -> bool:
        """Return whether values in these ranges fit."""
        pairs = zip(self.limits, bounds, strict=True)
        return all(low <= least and most <= high for (low, high), (least, most) in pairs)

    def narrow(self, columns: Sequence[pa.Array]) -> list[pa.Array]:
        """Convert columns of the fields' own types, with values that fit, to the types in the segment."""
        pairs = zip(columns, self.kinds, strict=True)
        # Values at null positions can be anything, and are truncated.
        return [one if one.type == kind else one.cast(kind, safe=False) for one, kind in pairs]


def own_widths(schema: pa.Schema) -> Widths:
    """Return the widths of segments in which all values have the fields' own types."""
    kinds = tuple(schema.types)
    return Widths(schema, schema.serialize().to_pybytes(), kinds, _codes(kinds, kinds))


def widths_for(own: Widths, bounds: Bounds) -> Widths:
    """Return the narrowest widths for values in these ranges.

    Args:
        own: The widths of the fields' own types.
        bounds: The ranges of the integers.
    """
    left = iter(bounds)
    kinds = tuple(_narrow(kind, left) for kind in own.kinds)
    if kinds == own.kinds:
        return own
    schema = pa.schema([part.with_type(kind) for part, kind in zip(own.schema, kinds, strict=True)])
    types = json.dumps([str(kind) for kind in own.kinds]).encode()
    nothing = _MARK + b"0" * _DIGITS
    head = schema.with_metadata({_TYPES: types, _CRC: nothing}).serialize().to_pybytes()
    said = _MARK + f"{google_crc32c.value(head):0{_DIGITS}x}".encode()
    return Widths(schema, head.replace(nothing, said), kinds, _codes(kinds, own.kinds))


def read_widths(head: bytes, own: Widths) -> Widths | None:
    """Read the widths at the beginning of a stream; None if it is not one of a store, or is damaged.

    Args:
        head: The first message of the stream.
        own: The widths of the fields' own types.
    """
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(head))
        if len(head) == len(own.head) and schema.equals(own.schema) and not schema.metadata:
            return own
        said = (schema.metadata or {}).get(_CRC, b"")
    except (pa.ArrowException, OSError, ValueError):  # the errors that a damaged message can cause
        return None
    crc = google_crc32c.value(head.replace(said, _MARK + b"0" * _DIGITS)) if said else None
    if crc is None or said != _MARK + f"{crc:0{_DIGITS}x}".encode() or schema.names != own.schema.names:
        return None
    kinds = tuple(schema.types)
    if not all(_widens(kind, wanted) for kind, wanted in zip(kinds, own.kinds, strict=True)):
        return None
    return Widths(schema.remove_metadata(), head, kinds, _codes(kinds, own.kinds))


def bounds_of(columns: Sequence[pa.Array]) -> Bounds:
    """Return the ranges of the integers of some columns."""
    return tuple(pair for column in columns for pair in _bounds(column))


def together(first: Bounds, second: Bounds) -> Bounds:
    """Return ranges that contain both ranges."""
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(first, second, strict=True))


# -- types -------------------------------------------------------------------------------------------


def _inner(kind: pa.DataType) -> list[pa.Field]:
    """Return the children of a type with integers that can be narrowed; those of maps keep their types."""
    if isinstance(kind, pa.StructType):
        return list(kind)
    if isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType)):
        return [kind.value_field]
    return []


def _integers(kind: pa.DataType) -> Iterator[pa.DataType]:
    if pa.types.is_integer(kind):
        yield kind
    for part in _inner(kind):
        yield from _integers(part.type)


def _limits(kind: pa.DataType) -> tuple[int, int]:
    info = np.iinfo(kind.to_pandas_dtype())
    return int(info.min), int(info.max)


def _narrow(kind: pa.DataType, bounds: Iterator[tuple[int, int]]) -> pa.DataType:
    if pa.types.is_integer(kind):
        least, most = next(bounds)
        for smaller in _SMALLER:
            low, high = _limits(smaller)
            if smaller.bit_width < kind.bit_width and low <= least and most <= high:
                return smaller
        return kind
    parts = [part.with_type(_narrow(part.type, bounds)) for part in _inner(kind)]
    if isinstance(kind, pa.StructType):
        return pa.struct(parts)
    if isinstance(kind, pa.FixedSizeListType):
        return pa.list_(parts[0], kind.list_size)
    if isinstance(kind, pa.LargeListType):
        return pa.large_list(parts[0])
    return pa.list_(parts[0]) if isinstance(kind, pa.ListType) else kind


def _widens(kind: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether all values of one type are values of another, with the same nodes and buffers."""
    if kind == wanted:
        return True
    if pa.types.is_integer(kind) and pa.types.is_integer(wanted):
        (low, high), (least, most) = _limits(kind), _limits(wanted)
        return bool(kind.bit_width < wanted.bit_width and least <= low and high <= most)
    inner, others = _inner(kind), _inner(wanted)
    alike = type(kind) is type(wanted) and len(inner) == len(others) > 0
    if isinstance(kind, pa.FixedSizeListType) and alike:
        alike = kind.list_size == wanted.list_size
    return alike and all(
        a.name == b.name and _widens(a.type, b.type) for a, b in zip(inner, others, strict=True)
    )


def _codes(kinds: Sequence[pa.DataType], own: Sequence[pa.DataType]) -> IntArray:
    codes: list[int] = []

    def add(kind: pa.DataType, wanted: pa.DataType) -> None:
        size = kind.bit_width // 8 if pa.types.is_integer(kind) and kind != wanted else 0
        codes.append(-size if size and pa.types.is_signed_integer(kind) else size)
        for part, other in zip(_inner(kind), _inner(wanted), strict=True):
            add(part.type, other.type)
        if isinstance(kind, pa.MapType):
            nodes = Plan([kind]).nodes - 1
            codes.extend([0] * nodes)

    for kind, wanted in zip(kinds, own, strict=True):
        add(kind, wanted)
    return np.array(codes, np.int64)


def _bounds(column: pa.Array) -> Iterator[tuple[int, int]]:
    kind = column.type
    if pa.types.is_integer(kind):
        found = pc.min_max(column)
        least, most = found["min"].as_py(), found["max"].as_py()
        yield min(0, least or 0), max(0, most or 0)
    elif isinstance(kind, pa.StructType):
        for part in column.flatten():
            yield from _bounds(part)
    elif _inner(kind):
        yield from _bounds(column.flatten())
