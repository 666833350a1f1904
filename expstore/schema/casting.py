"""Convert columns of a batch to the types of variable-length fields if no value is lost.

Used by schemas. Tensors are widened by the rules for dtypes, as in fixed-size fields. Python values have no
width: they fit if each value does, and floats are rounded. pyarrow is imported with the first column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.casts import find_lost
from expstore.core.values import Array, Key, key_name
from expstore.errors import SchemaError
from expstore.schema.arrow_types import Ragged, describe, ragged_of, to_type
from expstore.schema.arrow_values import column_of
from expstore.schema.continued import parent_of
from expstore.schema.variable_tensors import convert, join

if TYPE_CHECKING:
    import pyarrow as pa

_ARROW = "arrow:"


def fit_arrow(key: Key, text: str, column: Any, dtype: str = "") -> pa.Array:
    """Return a column as an Arrow array of a field's type.

    Args:
        key: Key of the field, for messages.
        text: Text of the field's Arrow type.
        column: A pyarrow.Array, or an array of shape `(n, *row shape)`: rows of one size, or objects.
        dtype: Dtype of the column: a dtype of `Field`, or the result of `expstore.schema.arrow_dtype`.
            "" uses the array's own dtype.

    Raises:
        SchemaError: The column has another type, or values would be lost.
    """
    import pyarrow as pa

    kind, wanted = to_type(text), ragged_of(text)
    source = dtype.removeprefix(_ARROW) if dtype.startswith(_ARROW) else ""
    given = describe(source) if source else ""
    try:
        if isinstance(column, np.ndarray):
            given = f"{dtype or column.dtype}{list(column.shape[1:])}"
            if column.dtype.hasobject:
                column = column_of(key, column.tolist())
            else:
                column = _from_numpy(column, wanted, dtype or str(column.dtype))
        if isinstance(column, pa.ChunkedArray):
            column = column.combine_chunks()
        if isinstance(column, pa.Array):
            given = given or str(column.type)
            fitted = _cast(column, ragged_of(source) if source else None, kind, wanted)
            if parent_of(text) is not None and fitted.flatten().null_count:
                raise ValueError("an element is None, and elements of continued rows are values")
            return fitted
        given = f"a {type(column).__name__}"
    except (pa.ArrowException, ValueError) as exc:
        if isinstance(exc, SchemaError):
            raise
        reason = str(exc).splitlines()[0]
        raise SchemaError(
            f"field {key_name(key)!r}: expected {describe(text)}, got {given}", hint=reason
        ) from exc
    raise SchemaError(f"field {key_name(key)!r}: expected {describe(text)}, got {given}")


def _cast(column: pa.Array, found: Ragged | None, kind: pa.DataType, wanted: Ragged | None) -> pa.Array:
    """Return a column converted to a type.

    Raises:
        ValueError: The type does not fit.
    """
    if found is not None and wanted is not None:
        return convert(column, found, wanted)
    if found is not None and found.dtype in ("bfloat16", "complex64"):
        raise ValueError(f"Arrow has no {found.dtype}")
    if not column.type.equals(kind):
        if not fits(column.type, kind):
            raise ValueError(f"{column.type} is neither {kind} nor a type that can be widened to it")
        cast = column.cast(kind)
        if (lost := _find_lost(column, cast)) is not None:
            raise ValueError(f"{kind} cannot hold {lost}")
        column = cast
    if wanted is not None:
        _check_ragged(column, wanted)
    return column


def fits(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Return whether values of one type can be converted to another one, judging by the types.

    Integers fit integers of any width and floats; the cast checks each value. Nothing becomes text, and text
    becomes nothing else. A struct may lack members.

    >>> from expstore.schema.casting import fits
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


def _find_lost(column: pa.Array, cast: pa.Array) -> Any:
    """Return a number that a cast has lost without an error of pyarrow, or None.

    pyarrow makes infinities of floats that are too large, and rounds integers in float16.
    """
    import pyarrow as pa

    if column.type == cast.type or pa.types.is_null(column.type):
        return None
    if pa.types.is_struct(cast.type):
        parts = {part.name: values for part, values in zip(cast.type, cast.flatten(), strict=True)}
        named = zip(column.type, column.flatten(), strict=True)
        found = (_find_lost(values, parts[part.name]) for part, values in named)
        return next((lost for lost in found if lost is not None), None)
    if isinstance(cast, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray)):
        return _find_lost(column.flatten(), cast.flatten())
    if not pa.types.is_floating(cast.type):
        return None
    before, after = (part.drop_null().to_numpy(zero_copy_only=False) for part in (column, cast))
    return find_lost(before, after)


def _from_numpy(column: Array, found: Ragged | None, dtype: str) -> pa.Array:
    """Return an array of rows of one shape as a column whose rows may differ in shape.

    Raises:
        ValueError: The rows do not fit the type.
    """
    if found is not None:
        return _to_ragged(column, found, dtype)
    if dtype in ("bfloat16", "complex64"):
        raise ValueError(f"Arrow has no {dtype}")
    shape = column.shape[1:]
    if not shape:
        import pyarrow as pa

        return pa.array(column.copy())  # the user may change the array later
    return _to_ragged(column, Ragged(dtype, (None, *shape[1:])), dtype)


def _to_ragged(column: Array, wanted: Ragged, dtype: str) -> pa.Array:
    shape = column.shape[1:]
    if not shape:
        raise ValueError("a row is one number, not a tensor with dims")
    found = Ragged(dtype, (None, *(size or None for size in shape[1:])))
    shapes = np.tile(np.array(shape, np.int64), (len(column), 1))
    flat = np.array(column, order="C").reshape(-1)  # the user may change the array later
    return convert(join(found, flat, shapes), found, wanted)


def _check_ragged(column: pa.Array, found: Ragged) -> None:
    """Raise ValueError unless rows are tensors without nulls whose shapes match their numbers of values."""
    import pyarrow as pa

    values = column.flatten() if found.is_list else column.field(0).flatten()
    while isinstance(values, pa.FixedSizeListArray):
        values = values.flatten()
    if values.null_count:
        raise ValueError("a tensor contains a null")
    if found.is_list or not len(column):
        return
    valid = column.drop_null()
    data, shapes = valid.flatten()
    if data.null_count or shapes.null_count:
        raise ValueError("a tensor has no values, or no shape")
    sizes = shapes.flatten().to_numpy().reshape(len(valid), len(found.shape))
    if (sizes < 0).any() or (sizes.prod(axis=1) != data.value_lengths().to_numpy()).any():
        raise ValueError("a tensor's shape does not match its number of values")
    for place, size in enumerate(found.shape):
        if size is not None and (sizes[:, place] != size).any():
            raise ValueError(f"dim {place} of a tensor is not {size}")
