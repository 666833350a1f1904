"""Convert tensors of different shapes to an Arrow column, from flat values and shapes, and back.

Used where batches are read and built, and where a column is checked against a schema. This module handles
arrays, not tensors; pyarrow is imported with the first column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.casts import find_lost
from expstore.core.values import Array, IntArray
from expstore.errors import SchemaError
from expstore.schema.arrow_types import Ragged

if TYPE_CHECKING:
    import pyarrow as pa


def shape_of(shapes: IntArray, *, jagged: bool = False) -> tuple[int | None, ...]:
    """Return the common shape of tensors: a size, or None for dims that differ or are 0.

    Args:
        shapes: One per row. Shape `(n, dims)`, with at least one row.
        jagged: Make the first dim None even if it is equal in all tensors while another dim differs.

    >>> from expstore.schema.variable_tensors import shape_of
    >>> shape_of(np.array([[2, 3], [5, 3]])), shape_of(np.array([[2, 3], [2, 4]]))
    ((None, 3), (2, None))
    """
    same = (shapes == shapes[0]).all(0) & (shapes[0] > 0)
    if jagged or same[1:].all():
        same[0] = False
    return tuple(int(size) if alike else None for size, alike in zip(shapes[0], same, strict=True))


def join(found: Ragged, flat: Array, shapes: IntArray) -> pa.Array:
    """Return tensors as a column.

    Args:
        found: Their type.
        flat: Their values in C order, tensor after tensor; bfloat16 as uint16 bits. Shape `(m,)`.
        shapes: Their shapes. Shape `(n, dims)`.

    Raises:
        SchemaError: There are more than 2^31 values.
    """
    import pyarrow as pa

    values = pa.array(flat.view(np.float32) if flat.dtype == np.complex64 else flat)
    if flat.dtype == np.complex64:
        values = pa.FixedSizeListArray.from_arrays(values, 2)
    if not found.is_list:
        sizes = pa.array(shapes.astype(np.int32).reshape(-1))
        lists = pa.FixedSizeListArray.from_arrays(sizes, len(found.shape))
        data = pa.ListArray.from_arrays(_offsets(shapes.prod(1)), values)
        return pa.StructArray.from_arrays([data, lists], ["data", "shape"])
    for size in reversed(found.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    return pa.ListArray.from_arrays(_offsets(shapes[:, 0]), values)


def _offsets(lengths: IntArray) -> Any:
    import pyarrow as pa

    ends = np.cumsum(lengths)
    if ends.size and ends[-1] > np.iinfo(np.int32).max:
        raise SchemaError(
            "the tensors of one field have more than 2^31 values in one batch", hint="extend by fewer rows"
        )
    return pa.array(np.concatenate([np.zeros(1, np.int32), ends.astype(np.int32)]))


def part(column: pa.Array, found: Ragged) -> tuple[pa.Array, IntArray]:
    """Return the values of tensors, not copied, and where each tensor begins; the last offset is the end."""
    import pyarrow as pa

    lists = column if found.is_list else column.field("data")
    offsets: IntArray = lists.offsets.to_numpy().astype(np.int64)
    flat = lists.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    while pa.types.is_fixed_size_list(flat.type):
        flat = flat.flatten()
    return flat, offsets - offsets[0]


def shapes_in(column: pa.Array, found: Ragged) -> IntArray:
    """Return the shapes of tensors. Shape `(n, dims)`."""
    rows = len(column)
    if found.is_list:
        lengths = column.value_lengths().to_numpy().astype(np.int64)
        return np.stack([lengths, *(np.full(rows, size) for size in found.shape[1:])], 1)
    sizes: IntArray = column.field("shape").flatten().to_numpy().astype(np.int64)
    return sizes.reshape(rows, len(found.shape))


def convert(column: pa.Array, found: Ragged, wanted: Ragged) -> pa.Array:
    """Return tensors as a column of another type.

    Raises:
        ValueError: The tensors do not fit the type: values may be lost, or sizes differ.
    """
    import pyarrow as pa

    if found == wanted:
        return column
    kinds = {"bfloat16", "complex64"} & {found.dtype, wanted.dtype}
    if found.dtype != wanted.dtype and (kinds or not np.can_cast(found.dtype, wanted.dtype, "safe")):
        raise ValueError(f"{found.dtype} may lose values as {wanted.dtype}")
    shapes = shapes_in(column, found)
    if len(found.shape) != len(wanted.shape):
        raise ValueError(f"tensors have {len(found.shape)} dims, not {len(wanted.shape)}")
    for dim, size in enumerate(wanted.shape):
        if size is not None and (shapes[:, dim] != size).any():
            raise ValueError(f"dim {dim} of a tensor is not {size}")
    flat, _ = part(column, found)
    if pa.types.is_boolean(flat.type):
        values: Array = flat.to_numpy(zero_copy_only=False)
    else:
        values = flat.to_numpy()
    if found.dtype == "complex64":
        values = values.view(np.complex64)
    elif found.dtype != wanted.dtype:
        cast = values.astype(wanted.dtype)
        if (lost := find_lost(values, cast)) is not None:
            raise ValueError(f"{wanted.dtype} would round {lost}")
        values = cast
    return join(wanted, values, shapes)
