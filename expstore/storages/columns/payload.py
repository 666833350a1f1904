"""The rows of a batch as bytes, as the journal's records carry them, and back.

Used by whoever writes or applies such records. Column by column, in the order of the columns without
priorities; the rows of all fields without a fixed size stand behind them together, each batch as an Arrow IPC
message behind its u32 length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Array, IntArray
from expstore.errors import CorruptionError

if TYPE_CHECKING:
    from expstore.storages.columns.column_set import ColumnGroup

__all__ = ["join_segments", "mix_rows", "payload_parts", "split_payload"]

_LENGTH_BYTES = 4


def payload_parts(group: ColumnGroup, columns: Sequence[Any], numbers: Array) -> list[bytes]:
    """Return a batch as bytes, a part per column, and one behind them for fields without a fixed size.

    Args:
        group: The columns.
        columns: The values, one array per field. Shapes `(n, *row shape)`.
        numbers: Ids, episodes, steps, times. Shape `(4, n)`.
    """
    apart = group.segment_places
    parts = [b"" if place in apart else column.tobytes() for place, column in enumerate(columns)]
    parts += [values.tobytes() for values in numbers]
    if group.segments is not None:
        import pyarrow as pa

        batch = pa.record_batch([columns[place] for place in apart], schema=group.segments.schema)
        message = batch.serialize().to_pybytes()
        parts.append(len(message).to_bytes(_LENGTH_BYTES, "little") + message)
    return parts


def split_payload(group: ColumnGroup, payload: bytes, count: int) -> list[bytes]:
    """Return the parts of a payload of so many rows, as `payload_parts` made them."""
    parts = []
    at = 0
    for column in group.columns[:-1]:
        size = column.row_bytes * count
        parts.append(payload[at : at + size])
        at += size
    if group.segments is not None:
        parts.append(payload[at:])
    return parts


def join_segments(group: ColumnGroup, data: bytes) -> list[Any]:
    """Return the rows of fields without a fixed size: the last parts of batches, one behind another.

    Returns:
        One pyarrow Array per field.

    Raises:
        CorruptionError: They are damaged.
    """
    import pyarrow as pa

    assert group.segments is not None
    schema, batches, at = group.segments.schema, [], 0
    try:
        while at < len(data):
            size = int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
            at += _LENGTH_BYTES
            batch = pa.ipc.read_record_batch(pa.py_buffer(data[at : at + size]), schema)
            batch.validate()
            batches.append(batch)
            at += size
    except (pa.ArrowInvalid, OSError) as exc:
        raise CorruptionError(f"rows in the journal cannot be read: {exc}") from exc
    return [pa.concat_arrays([batch.column(number) for batch in batches]) for number in range(len(schema))]


def mix_rows(
    group: ColumnGroup, place: int, slots: IntArray, kept_back: Array, offsets: IntArray, data: bytes
) -> Any:
    """Return rows of a field without a fixed size, some from segments and some from the journal.

    Args:
        group: The columns.
        place: The field's.
        slots: Shape `(n,)`.
        kept_back: Which of them are in the journal alone. Shape `(n,)`.
        offsets: Which of its rows each is. Shape `(n,)`.
        data: These, as `join_segments` takes them.
    """
    import pyarrow as pa

    written = group.columns[place].take(slots[~kept_back])
    rest: Any = join_segments(group, data)[group.segment_places.index(place)]
    places = np.empty(slots.size, np.int64)
    places[~kept_back] = np.arange(len(written))
    places[kept_back] = len(written) + offsets[kept_back]
    return pa.concat_arrays([written, rest]).take(pa.array(places))
