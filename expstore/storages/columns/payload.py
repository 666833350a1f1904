"""Convert the rows of a batch to the bytes of a journal record, and back.

Used by code that writes or applies such records. The bytes are stored column by column, in the order of the
columns without priorities. The rows of all variable-length fields follow together, each batch as an Arrow IPC
message after its u32 length.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np

from expstore.core.values import Array
from expstore.storages.columns.column import Run
from expstore.storages.columns.column_set import ColumnSet


def payload_parts(group: ColumnSet, columns: Sequence[Any], numbers: Array) -> list[bytes]:
    """Return a batch as bytes: a part per column, then one part for the variable-length fields.

    Args:
        group: The columns.
        columns: The values, one array per field. Shapes `(n, *row shape)`.
        numbers: Ids, episodes, steps, times. Shape `(4, n)`.
    """
    apart = group.variable_places
    parts = [b"" if place in apart else column.tobytes() for place, column in enumerate(columns)]
    parts += [values.tobytes() for values in numbers]
    return parts + [segments.pack([columns[place] for place in apart]) for segments in group.shared]


def split_payload(group: ColumnSet, payload: bytes, count: int) -> list[bytes]:
    """Return the parts of a payload of `count` rows, as `payload_parts` made them."""
    parts = []
    at = 0
    for column in group.summed:
        size = column.row_bytes * count
        parts.append(payload[at : at + size])
        at += size
    return parts + [payload[at:] for _ in group.shared]


def split_payloads(group: ColumnSet, payloads: Sequence[tuple[int, bytes]]) -> list[bytes]:
    """Return the parts of several payloads, concatenated per column.

    Args:
        group: The columns.
        payloads: The number of rows and the bytes of each payload.
    """
    if group.shared:
        split = [split_payload(group, payload, count) for count, payload in payloads]
        return [b"".join(parts) for parts in zip(*split, strict=True)]
    parts: list[list[bytes]] = [[] for _ in group.summed]
    for count, run in groupby(payloads, key=itemgetter(0)):  # usually all are single rows: split them at once
        data = b"".join([payload for _, payload in run])
        width = count * sum(column.row_bytes for column in group.summed)
        table = np.frombuffer(data, np.uint8).reshape(-1, width)
        at = 0
        for place, column in enumerate(group.summed):
            size = column.row_bytes * count
            parts[place].append(table[:, at : at + size].tobytes())
            at += size
    return [b"".join(part) for part in parts]


def join_payload(group: ColumnSet, parts: Sequence[bytes], pieces: Sequence[tuple[int, int, int]]) -> Run:
    """Return the rows with these bytes, without their priorities.

    Args:
        group: The columns.
        parts: The result of `payload_parts`; for several batches, concatenated per column.
        pieces: Where the rows are: (first slot, offset in the run, rows).

    Raises:
        CorruptionError: Rows of variable-length fields are damaged.
    """
    count = sum(n for _, _, n in pieces)
    variable: list[Any] = []
    for segments, part in zip(group.shared, parts[len(group.summed) :], strict=True):
        variable += segments.unpack(part)
    values: dict[int, Any] = dict(zip(group.variable_places, variable, strict=True))
    for place, (column, part) in enumerate(zip(group.summed, parts, strict=False)):
        if column.entry.annotated:
            values[place] = np.empty((count, 0), np.uint8)
        elif place not in values:
            rows: Array = np.frombuffer(part, column.entry.numpy_dtype)
            values[place] = rows.reshape(count, *column.entry.shape)
    ordered = [values[place] for place in range(len(values))]
    ids, episodes, steps, _ = ordered[-4:]
    parents = group.read_parents(ordered) if group.shared else {}
    return Run(int(ids[0]), count, pieces, ordered, variable, [], episodes, steps, parents)
