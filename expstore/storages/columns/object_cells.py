"""A variable-length column in RAM: one small Arrow array per row.

Used by storages in RAM together with fixed-size columns, and has the same few methods. Values are not
inspected.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from expstore.core.values import IntArray, key_name
from expstore.errors import SchemaError
from expstore.schema.arrow_types import to_type
from expstore.schema.schema import Field


class Cells:
    """One field of all rows.

    A row shares the memory of the batch it was written with; the memory is freed with the batch's last row.
    Threads: one writes, any number take rows; a row that is taken is never half written.

    Args:
        entry: The field.
        size: Number of slots.
    """

    def __init__(self, entry: Field, size: int) -> None:
        self._kind = to_type(entry.arrow)
        self._rows = np.empty(size, object)
        self._rows[:] = [pa.nulls(1, self._kind)] * size

    def __len__(self) -> int:
        return self._rows.size

    def grow(self, size: int) -> Cells:
        """Return a longer column that begins with these rows."""
        longer = Cells.__new__(Cells)
        longer._kind = self._kind
        longer._rows = np.empty(size, object)
        longer._rows[:] = [pa.nulls(1, self._kind)] * size
        longer._rows[: self._rows.size] = self._rows
        return longer

    def put(self, slots: IntArray, values: pa.Array) -> None:
        """Write rows to slots. Shapes `(n,)`."""
        for place, slot in enumerate(slots.tolist()):
            self._rows[slot] = values.slice(place, 1)

    def gather(self, slots: IntArray) -> pa.Array:
        """Return rows as one array. `slots` has shape `(n,)`."""
        return self._join(self._rows[slots])

    def part(self, slot: int, count: int) -> pa.Array:
        """Return a run of slots as one array."""
        return self._join(self._rows[slot : slot + count])

    def forget(self, count: int) -> None:
        """Forget the rows of the first `count` slots."""
        self._rows[:count] = [pa.nulls(1, self._kind)] * count

    def _join(self, rows: Any) -> pa.Array:
        return pa.concat_arrays(rows.tolist()) if len(rows) else pa.nulls(0, self._kind)


def to_bytes(entry: Field, parts: Sequence[pa.Array]) -> bytes:
    """Return the rows of a field as an Arrow IPC stream."""
    kind = to_type(entry.arrow)
    values = pa.concat_arrays(parts) if parts else pa.nulls(0, kind)
    sink = pa.BufferOutputStream()
    batch = pa.record_batch([values], names=["rows"])
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def from_bytes(entry: Field, data: bytes) -> pa.Array:
    """Return the rows that were passed to `to_bytes`.

    Raises:
        SchemaError: The bytes are not an Arrow stream of this field's rows.
    """
    try:
        with pa.ipc.open_stream(data) as reader:
            values = reader.read_next_batch().column(0)
        values.validate(full=True)
    except (pa.ArrowInvalid, StopIteration, IndexError, OSError) as exc:
        raise SchemaError(f"the rows of {key_name(entry.key)!r} are not an Arrow stream: {exc}") from exc
    if not values.type.equals(to_type(entry.arrow)):
        raise SchemaError(f"the rows of {key_name(entry.key)!r} are {values.type}, expected {entry}")
    return values
