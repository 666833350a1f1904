"""Read Arrow tables as columns of a store: input for `extend` from pyarrow, polars, DuckDB or Parquet files.

Column names are dotted field names (`next.reward`); the types are those of the HTTP API.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from expstore.errors import SchemaError
from expstore.schema.schema import Schema
from expstore.wire.codec import Codec, Coded, meaning_of


def is_table(data: Any) -> bool:
    """Return whether `data` is a pyarrow Table, RecordBatch or RecordBatchReader."""
    return isinstance(data, (pa.Table, pa.RecordBatch, pa.RecordBatchReader))


def to_table(data: Any) -> Any:
    """Return what `is_table` accepts as a pyarrow Table. It reads a reader to its end."""
    if isinstance(data, pa.RecordBatchReader):
        return data.read_all()
    return pa.Table.from_batches([data]) if isinstance(data, pa.RecordBatch) else data


def find_names(data: Any, names: frozenset[str]) -> list[str]:
    """Return which of these names rows of any kind, or a list of rows, have at their root."""
    rows = data[0] if isinstance(data, list) and data else data
    found = rows.schema.names if is_table(rows) else getattr(rows, "keys", tuple)()
    return sorted(names.intersection(name for name in found if isinstance(name, str)))


def describe_left_out(names: Sequence[str]) -> str:
    """Return a warning about names of the first rows that a store leaves out, because samples add them."""
    return (
        f"the first rows have {', '.join(map(repr, names))}, which the store leaves out, because samples "
        "have entries of these names; rename them before you write rows, if they are fields of yours"
    )


class TableReader:
    """Read tables as the fields and columns of a store. It caches what the last schema means.

    Threads may share a reader.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, Schema | None, Coded, Codec] | None = None

    def read(
        self, data: Any, known: Schema | None, *, skip: frozenset[str] = frozenset()
    ) -> tuple[Coded, list[Any]]:
        """Return the fields of a table, and their columns.

        Args:
            data: The table.
            known: The fields of the store; None: the table decides.
            skip: Columns to leave out.

        Returns:
            The fields, and a column for each. Shapes `(n, *row shape)`; pyarrow Arrays for variable-length
            fields.

        Raises:
            SchemaError: A field is missing, unknown or of another type, or a value is missing.
        """
        batches = [data] if isinstance(data, pa.RecordBatch) else _batches_of(to_table(data))
        schema = batches[0].schema
        if not skip.isdisjoint(schema.names):
            batches = [batch.select([name for name in schema.names if name not in skip]) for batch in batches]
            schema = batches[0].schema
        last = self._last
        if last is None or last[1] is not known or not last[0].equals(schema, check_metadata=True):
            if not schema.names:
                raise SchemaError("the table has no columns", hint="give a column for each field")
            codec = None if known is None else Codec(known).with_fields(schema.names)
            told = meaning_of(schema, codec)
            last = self._last = schema, known, told, Codec(told.schema)
        _, _, told, codec = last
        return told, codec.decode_all(batches)


def _batches_of(table: Any) -> list[Any]:
    """Return the rows of a table as few record batches, at least one."""
    batches: list[Any] = table.to_batches()
    if len(batches) != 1:
        batches = table.combine_chunks().to_batches()
    if not batches:
        empty = [pa.array([], entry.type) for entry in table.schema]
        batches = [pa.RecordBatch.from_arrays(empty, schema=table.schema)]
    return batches
