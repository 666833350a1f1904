"""Convert columns that DuckDB cannot read directly: 16-bit floats, objects, packed and variable-length ones.

Used by `expstore.sql.views` for stores that have such fields. It never copies a whole column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.acero import Declaration, FilterNodeOptions, TableSourceNodeOptions

from expstore.core import tuning
from expstore.core.values import Array, IntArray
from expstore.errors import CorruptionError, ExpStoreError, QueryError

_NUMBER = "__number"
_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Packed:
    """How to read rows of a column that cannot be viewed.

    Args:
        name: Dotted name of the field.
        kind: Type of the result.
        take: Copies rows, given their numbers.
    """

    name: str
    kind: pa.DataType
    take: Callable[[IntArray], pa.ChunkedArray]


class ViewDataset(ds.InMemoryDataset):  # type: ignore[misc]
    """An Arrow dataset that converts columns while DuckDB reads them.

    16-bit floats, which DuckDB does not support, are converted to 32-bit floats, objects to text. Reading a
    damaged column raises its error. Packed rows are unpacked if they pass the conditions that DuckDB pushes
    down.

    Only the columns that a query needs are converted, batch by batch, because a whole column of images may
    not fit in memory.

    Args:
        raw: The columns that can be read directly, at least one.
        half: Columns of 16-bit floats, in `raw` or `packed`: name -> "float16" or "bfloat16".
        lost: Columns that cannot be read: name -> type and error.
        texts: Columns of objects, which are not in `raw`: name -> parts. Shapes `(n,)`.
        packed: Packed and variable-length columns, which are not in `raw` either: name -> how to read rows.
        refused: A list to which errors of columns are appended; DuckDB would replace them by its own.
    """

    def __init__(
        self,
        raw: pa.Table,
        half: Mapping[str, str],
        lost: Mapping[str, tuple[pa.DataType, CorruptionError]],
        texts: Mapping[str, Sequence[Array]],
        packed: Mapping[str, Packed],
        refused: list[ExpStoreError],
    ) -> None:
        super().__init__(raw)
        self._raw = raw
        self._half = half
        self._lost = lost
        self._texts = texts
        self._packed = packed
        self._refused = refused

    @property
    def schema(self) -> pa.Schema:
        """The columns with the types that DuckDB sees."""
        raw = [*self._raw.schema, *(pa.field(name, one.kind) for name, one in self._packed.items())]
        visible = [pa.field(f.name, _as_float(f.type)) if f.name in self._half else f for f in raw]
        visible += [pa.field(name, pa.string()) for name in self._texts]
        return pa.schema([*visible, *(pa.field(name, kind) for name, (kind, _) in self._lost.items())])

    def scanner(self, columns: Sequence[str] | None = None, filter: Any = None) -> _Scan:
        """Return a scan of `columns` over the rows that pass `filter`."""
        visible = self.schema
        columns = visible.names if columns is None else columns
        names = set(columns)
        # The filter may name further columns. A word that is not a column name only costs time.
        asked = set(re.findall(r"\w+", str(filter))) if filter is not None else set()
        names |= asked
        for name, (_, fault) in self._lost.items():
            if name in names:
                self._refused.append(fault)
                raise fault
        kept = [name for name in self._raw.column_names if name in names] or self._raw.column_names[:1]
        raw = self._raw.select(kept)
        for name in [name for name in self._texts if name in names]:
            raw = raw.append_column(name, pa.chunked_array(map(_as_texts, self._texts[name]), pa.string()))
        batches = self._batches(raw, pa.schema([visible.field(name) for name in raw.column_names]))
        packed = [name for name in self._packed if name in names]
        if packed and asked & set(packed):
            batches = _filter_batches(self._add_packed(batches, packed, None), filter)
        elif packed:
            batches = self._add_packed(batches, packed, filter)
        elif filter is not None:
            batches = _filter_batches(batches, filter)
        schema = pa.schema([visible.field(name) for name in columns])
        return _Scan(schema, (batch.select(schema.names) for batch in batches))

    def _batches(self, raw: pa.Table, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for batch in raw.to_batches(max_chunksize=tuning.SQL_BATCH_ROWS):
            arrays = [
                _widen(column, self._half[name]) if name in self._half else _from_start(column)
                for name, column in zip(raw.column_names, batch.columns, strict=True)
            ]
            yield pa.record_batch(arrays, schema=schema)

    def _add_packed(
        self, batches: Iterator[pa.RecordBatch], packed: Sequence[str], filter: Any
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that pass `filter`, with the packed columns added."""
        pace = _Pace([self._packed[name] for name in packed])
        first = 0
        for batch in batches:
            chosen = np.arange(len(batch)) if filter is None else _find_passing(batch, filter)
            while chosen.size:
                part, chosen = chosen[: pace.rows], chosen[pace.rows :]
                try:
                    pace.check(part.size)
                except QueryError as exc:
                    raise self._refuse(exc) from None
                arrays = [self._take_rows(name, first + part) for name in packed]
                pace.count(part.size, arrays)
                yield _add_columns(batch.take(pa.array(part)), packed, arrays)
            first += len(batch)

    def _take_rows(self, name: str, numbers: IntArray) -> pa.Array:
        try:
            rows = self._packed[name].take(numbers).chunk(0)
        except ExpStoreError as exc:
            raise self._refuse(exc) from exc
        return _widen(rows, self._half[name]) if name in self._half else rows

    def _refuse(self, error: ExpStoreError) -> ExpStoreError:
        self._refused.append(error)
        return error


class _Scan:
    """A single pass over the columns, batch by batch, in the thread that requests a batch.

    pyarrow's own scanner is not used: its threads read ahead and still run after a query with a LIMIT has its
    rows. If the interpreter ends before they do, the process crashes.

    Args:
        schema: Schema of the batches.
        batches: The batches; they are iterated once.
    """

    def __init__(self, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
        self._schema, self._batches = schema, batches

    def to_reader(self) -> pa.RecordBatchReader:
        """Return a reader for DuckDB; no further batch is read once DuckDB drops it."""
        return pa.RecordBatchReader.from_batches(self._schema, self._batches)


class _Pace:
    """Choose how many rows to read from columns at a time, and reject queries that read too many.

    Args:
        columns: The columns.
    """

    def __init__(self, columns: Sequence[Packed]) -> None:
        self._names = [column.name for column in columns]
        widths = [_bytes_of(column.kind) for column in columns]
        self._open = [place for place, width in enumerate(widths) if width is None]
        self._width = sum(width for width in widths if width is not None)
        self._done = self._found = 0
        #: Rows to read next. For variable-length columns it depends on the size of the previous rows.
        self.rows = max(1, tuning.SQL_BATCH_BYTES // self._width) if not self._open else tuning.SQL_FIRST_ROWS

    def check(self, rows: int) -> None:
        """Raise QueryError if reading this many more rows would exceed the limit."""
        fixed = (self._done + rows) * self._width
        if fixed + self._found > tuning.SQL_PACKED_BYTES:
            fits = self._done if self._open else tuning.SQL_PACKED_BYTES // self._width
            raise _build_size_error(self._names, fits, packed=not self._open)

    def count(self, rows: int, arrays: Sequence[pa.Array]) -> None:
        """Record rows that were read."""
        self._done += rows
        if self._open:
            self._found += sum(arrays[place].nbytes for place in self._open)
            width = self._width + self._found // self._done
            self.rows = max(
                1, min(2 * self.rows, tuning.SQL_BATCH_BYTES // max(1, width), tuning.SQL_BATCH_ROWS)
            )


def _find_passing(batch: pa.RecordBatch, filter: Any) -> IntArray:
    """Return the positions of the rows that pass a filter."""
    numbered = batch.append_column(_NUMBER, pa.array(np.arange(len(batch))))
    found = _filter(numbered, filter)
    return np.sort(np.concatenate([_NO_ROWS, *(part.column(_NUMBER).to_numpy() for part in found)]))


def _filter_batches(batches: Iterator[pa.RecordBatch], filter: Any) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield from _filter(batch, filter)


def _filter(batch: pa.RecordBatch, filter: Any) -> list[pa.RecordBatch]:
    """Return the rows that pass a filter, computed in this thread only."""
    steps = [
        Declaration("table_source", TableSourceNodeOptions(pa.Table.from_batches([batch]))),
        Declaration("filter", FilterNodeOptions(filter)),
    ]
    found: list[pa.RecordBatch] = Declaration.from_sequence(steps).to_table(use_threads=False).to_batches()
    return found


def _add_columns(batch: pa.RecordBatch, names: Sequence[str], arrays: Sequence[pa.Array]) -> pa.RecordBatch:
    return pa.record_batch([*batch.columns, *arrays], names=[*batch.schema.names, *names])


def _build_size_error(fields: Sequence[str], rows: int, *, packed: bool) -> QueryError:
    why, done = ("are packed", "unpacked") if packed else ("have variable length", "read")
    return QueryError(
        f"the query needs more than {rows} rows of {', '.join(fields)}, which {why}: more than "
        f"{tuning.SQL_PACKED_BYTES >> 20} MiB would have to be {done}",
        hint="ask for fewer rows (WHERE _id ..., LIMIT), or for their _index and read them with rb[index]",
    )


def _bytes_of(kind: pa.DataType) -> int | None:
    """Return the size of a row in bytes, or None if rows differ in size."""
    if pa.types.is_fixed_size_list(kind):
        inner = _bytes_of(kind.value_type)
        return None if inner is None else int(kind.list_size) * inner
    return max(1, int(kind.bit_width) // 8) if pa.types.is_primitive(kind) else None


def _as_texts(values: Array) -> pa.Array:
    return pa.array(map(_as_text, values), pa.string())


def _as_text(value: Any) -> str | None:
    """Return text unchanged, JSON for values that JSON can represent, and None for others and for None."""
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return text


def _widen(column: pa.Array, dtype: str) -> pa.Array:
    """Convert the bits of 16-bit floats, possibly in nested lists, to 32-bit floats."""
    if pa.types.is_fixed_size_list(column.type):
        return pa.FixedSizeListArray.from_arrays(_widen(column.flatten(), dtype), column.type.list_size)
    bits = column.to_numpy(zero_copy_only=True)
    if dtype == "float16":
        return pa.array(bits.view("<f2").astype("<f4"))
    return pa.array((bits.astype("<u4") << np.uint32(16)).view("<f4"))


def _from_start(column: pa.Array) -> pa.Array:
    """Remove the offset of sliced lists: Arrow's filters select wrong items from nested slices."""
    if not pa.types.is_fixed_size_list(column.type):
        return column
    return pa.FixedSizeListArray.from_arrays(_from_start(column.flatten()), column.type.list_size)


def _as_float(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_as_float(kind.value_type), kind.list_size)
    return pa.float32()
