"""Columns that cannot be shown to DuckDB as they lie: 16-bit floats, objects, and those that are damaged.

Used by `relations` for stores that have such fields. It copies no column whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from expstore.errors import CorruptionError
from expstore.types import Array

__all__ = ["ShownDataset"]

_BATCH_ROWS = 65_536


class ShownDataset(ds.InMemoryDataset):  # type: ignore[misc]
    """Show 16-bit floats, which DuckDB does not know, as 32-bit ones, objects as text, nothing damaged.

    Values are converted while DuckDB reads, only in the columns the query needs, batch by batch: memory
    for the copy of a whole column of images may not be there.

    Args:
        raw: The columns that can be read, at least one.
        half: Which of them are converted: name -> "float16" or "bfloat16".
        lost: The others: their types, and why they cannot be read.
        texts: Columns of objects, which `raw` lacks: their parts. Shapes `(n,)`.
        refused: Is given what a query was refused for; DuckDB has errors of its own.
    """

    def __init__(
        self,
        raw: pa.Table,
        half: Mapping[str, str],
        lost: Mapping[str, tuple[pa.DataType, CorruptionError]],
        texts: Mapping[str, Sequence[Array]],
        refused: list[CorruptionError],
    ) -> None:
        super().__init__(raw)
        self._raw = raw
        self._half = half
        self._lost = lost
        self._texts = texts
        self._refused = refused

    @property
    def schema(self) -> pa.Schema:
        """Name the columns with the types they are shown with."""
        shown = [pa.field(f.name, _as_float(f.type)) if f.name in self._half else f for f in self._raw.schema]
        shown += [pa.field(name, pa.string()) for name in self._texts]
        return pa.schema([*shown, *(pa.field(name, kind) for name, (kind, _) in self._lost.items())])

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None, **options: Any) -> ds.Scanner:
        """Read `columns` of the rows that pass `filter`."""
        names = set(self._raw.column_names if columns is None else columns)
        # The filter may name columns that are not read. A word too many only costs time.
        names |= set(re.findall(r"\w+", str(filter))) if filter is not None else set()
        for name, (_, fault) in self._lost.items():
            if name in names:
                self._refused.append(fault)
                raise fault
        kept = [name for name in self._raw.column_names if name in names] or self._raw.column_names[:1]
        raw = self._raw.select(kept)
        for name in [name for name in self._texts if name in names]:
            raw = raw.append_column(name, pa.chunked_array(map(_as_texts, self._texts[name]), pa.string()))
        schema = pa.schema([self.schema.field(name) for name in raw.column_names])
        return ds.Scanner.from_batches(
            self._batches(raw, schema), schema=schema, columns=columns, filter=filter, **options
        )

    def _batches(self, raw: pa.Table, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for batch in raw.to_batches(max_chunksize=_BATCH_ROWS):
            arrays = [
                _widen(column, self._half[name]) if name in self._half else _from_start(column)
                for name, column in zip(raw.column_names, batch.columns, strict=True)
            ]
            yield pa.record_batch(arrays, schema=schema)


def _as_texts(values: Array) -> pa.Array:
    return pa.array(map(_as_text, values), pa.string())


def _as_text(value: Any) -> str | None:
    """Return text as it is, JSON of what JSON can keep, None of everything else and of None."""
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return text


def _widen(column: pa.Array, dtype: str) -> pa.Array:
    """Turn (nested lists of) the bits of 16-bit floats into 32-bit floats."""
    if pa.types.is_fixed_size_list(column.type):
        return pa.FixedSizeListArray.from_arrays(_widen(column.flatten(), dtype), column.type.list_size)
    bits = column.to_numpy(zero_copy_only=True)
    if dtype == "float16":
        return pa.array(bits.view("<f2").astype("<f4"))
    return pa.array((bits.astype("<u4") << np.uint32(16)).view("<f4"))


def _from_start(column: pa.Array) -> pa.Array:
    """See lists as ones that begin with their first: Arrow's filters take wrong ones of nested slices."""
    if not pa.types.is_fixed_size_list(column.type):
        return column
    return pa.FixedSizeListArray.from_arrays(_from_start(column.flatten()), column.type.list_size)


def _as_float(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_as_float(kind.value_type), kind.list_size)
    return pa.float32()
