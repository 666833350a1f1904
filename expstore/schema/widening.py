"""Check whether an Arrow type can be widened to another one.

Used to check columns of variable-length fields against a schema. This module compares types, never values;
pyarrow is imported with the first call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


def fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether values of one type can be converted to another one, judging by the types.

    Integers fit integers of any width and floats; the cast checks each value. Nothing becomes text, and text
    becomes nothing else. A struct may lack members.

    >>> from expstore.schema.widening import fits
    >>> import pyarrow as pa
    >>> fits(pa.int64(), pa.float64()), fits(pa.float64(), pa.int64()), fits(pa.int64(), pa.string())
    (True, False, False)
    """
    import pyarrow as pa

    is_a = pa.types
    if found == wanted or is_a.is_null(found):
        return True
    if _is_list(found) and _is_list(wanted):
        return fits(found.value_type, wanted.value_type)
    if is_a.is_struct(found) and is_a.is_struct(wanted):
        members = {part.name: part.type for part in wanted}
        return all(part.name in members and fits(part.type, members[part.name]) for part in found)
    if is_a.is_integer(found):
        return bool(is_a.is_integer(wanted) or is_a.is_floating(wanted))
    if is_a.is_timestamp(found) and is_a.is_timestamp(wanted):
        # A time without a zone is not a moment; moments do not depend on the zone.
        return (found.tz is None) == (wanted.tz is None)
    pairs = (
        is_a.is_floating,
        is_a.is_decimal,
        is_a.is_time,
        is_a.is_duration,
        is_a.is_date,
    )
    return any(one(found) and one(wanted) for one in (*pairs, _is_text, _is_bytes))


def _is_list(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType))


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    import pyarrow as pa

    is_a = pa.types
    return bool(is_a.is_binary(kind) or is_a.is_large_binary(kind) or is_a.is_fixed_size_binary(kind))
