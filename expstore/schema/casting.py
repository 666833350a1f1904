"""Columns of a batch held against the types of fields without a fixed size, and cast where nothing is lost.

Used by schemas. Tensors are widened as fields of fixed size are, by what dtypes say; Python's own values have
no width, and fit where each of them does. pyarrow is imported when there is a column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Array, Key, key_name
from expstore.errors import SchemaError
from expstore.schema.arrow_types import Ragged, describe, ragged_of, to_type
from expstore.schema.arrow_values import column_of
from expstore.schema.variable_tensors import convert, join
from expstore.schema.widening import fits

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["fit_arrow"]

_ARROW = "arrow:"


def fit_arrow(key: Key, text: str, column: Any, dtype: str = "") -> pa.Array:
    """Return a column as an Arrow array of the type that a field has.

    Args:
        key: The field's, for messages.
        text: Of its type.
        column: A pyarrow.Array; or an array of shape `(n, *row shape)`: of rows that are all of one size, or
            of objects.
        dtype: Of such an array, as of a `Field` of fixed size, or as `expstore.schema.arrow_dtype` names it;
            "": as NumPy or Arrow calls it.

    Raises:
        SchemaError: It is something else, or values would be lost.
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
            return _cast(column, ragged_of(source) if source else None, kind, wanted)
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
    """Return a column with a type.

    Raises:
        ValueError: It does not fit.
    """
    if found is not None and wanted is not None:
        return convert(column, found, wanted)
    if found is not None and found.dtype in ("bfloat16", "complex64"):
        raise ValueError(f"Arrow has no {found.dtype}")
    if not column.type.equals(kind):
        if not fits(column.type, kind):
            raise ValueError(f"{column.type} is not {kind}, nor one that can be widened to it")
        column = column.cast(kind)
    if wanted is not None:
        _check_ragged(column, wanted)
    return column


def _from_numpy(column: Array, found: Ragged | None, dtype: str) -> pa.Array:
    """Return rows of one shape as rows of any shape.

    Raises:
        ValueError: They do not fit.
    """
    if found is not None:
        return _to_ragged(column, found, dtype)
    if dtype in ("bfloat16", "complex64"):
        raise ValueError(f"Arrow has no {dtype}")
    shape = column.shape[1:]
    if not shape:
        import pyarrow as pa

        return pa.array(column.copy())  # what the user does to it later is not to reach the store
    return _to_ragged(column, Ragged(dtype, (None, *shape[1:])), dtype)


def _to_ragged(column: Array, wanted: Ragged, dtype: str) -> pa.Array:
    shape = column.shape[1:]
    if not shape:
        raise ValueError("a row is one number, not a tensor with dims")
    found = Ragged(dtype, (None, *shape[1:]))
    shapes = np.tile(np.array(shape, np.int64), (len(column), 1))
    flat = np.array(column, order="C").reshape(-1)  # what the user does to it later is not to reach the store
    return convert(join(found, flat, shapes), found, wanted)


def _check_ragged(column: pa.Array, found: Ragged) -> None:
    """Raise ValueError unless rows are tensors: without gaps, of as many values as their shapes say."""
    import pyarrow as pa

    values = column.flatten() if found.is_list else column.field(0).flatten()
    while isinstance(values, pa.FixedSizeListArray):
        values = values.flatten()
    if values.null_count:
        raise ValueError("a tensor has no value in some place")
    if found.is_list or not len(column):
        return
    valid = column.drop_null()
    data, shapes = valid.flatten()
    if data.null_count or shapes.null_count:
        raise ValueError("a tensor has no values, or no shape")
    sizes = shapes.flatten().to_numpy().reshape(len(valid), -1)
    if (sizes.prod(axis=1) != data.value_lengths().to_numpy()).any():
        raise ValueError("a tensor has not as many values as its shape says")
    for place, size in enumerate(found.shape):
        if size is not None and (sizes[:, place] != size).any():
            raise ValueError(f"dim {place} of a tensor is not {size}")
