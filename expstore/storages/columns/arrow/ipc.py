"""Arrow IPC messages: convert a batch of rows to bytes, and parse the header of a message.

Used by segments. The format is Arrow's, "Encapsulated message format": ff ff ff ff, u32 length of a
flatbuffer, the flatbuffer, the body. The flatbuffer's custom metadata has, under "expstore", the identity of
the rows in hex digits: 16 first id, 8 rows, 8 generation, 8 crc32c of the message with zeros in this place.
This module uses no files.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa

from expstore.core.values import Array, IntArray

#: Marks the end of a stream.
END = b"\xff\xff\xff\xff\0\0\0\0"
#: Length of the prefix with the size of a message's flatbuffer.
HEAD_BYTES = 8
_KEY = b"expstore"
_CRC_DIGITS = 8
_VALUE_DIGITS = 40
#: Upper bound of the size of a message without columns, not counting its body.
_ROOM = 4096
_BATCH = 3  # MessageHeader.RecordBatch


class Header(NamedTuple):
    """The header of a message.

    Args:
        first: Id of its first row.
        rows: Number of rows.
        generation: Generation of its writer.
        crc: crc32c of the whole message, with zeros in its place.
        crc_at: Offset of the crc32c in the message.
        body: Offset of the body in the message.
        size: Length of the message, bytes.
        lengths: Number of values of each node of its columns, depth first.
        buffers: Offset of each buffer in the body, and its length, bytes. Shape `(m, 2)`.
        compressed: Whether the buffers are compressed.
    """

    first: int
    rows: int
    generation: int
    crc: int
    crc_at: int
    body: int
    size: int
    lengths: IntArray
    buffers: IntArray
    compressed: bool

    @property
    def last(self) -> int:
        """Id of its last row."""
        return self.first + self.rows - 1


def encode(
    schema: pa.Schema, columns: Sequence[pa.Array], *, first: int, generation: int, compression: str | None
) -> Array:
    """Return a batch of rows as a message.

    Args:
        schema: Schema of the batch.
        columns: One array per field.
        first: Id of the first row.
        generation: Generation of the writer.
        compression: "lz4" or "zstd"; None: no compression.
    """
    batch = pa.record_batch(columns, schema=schema)
    prefix = schema.serialize().size
    # A compressed buffer can be longer than the original, because of its frame.
    room = (
        prefix
        + pa.ipc.get_record_batch_size(batch)
        + _ROOM
        + (batch.nbytes // 8 + _ROOM if compression else 0)
    )
    data = np.empty(room, np.uint8)
    sink = pa.FixedSizeBufferWriter(pa.py_buffer(data))
    value = f"{first:016x}{batch.num_rows:08x}{generation:08x}{0:08x}".encode()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={_KEY: value})
        end = sink.tell()
    message = data[prefix:end]
    size = int.from_bytes(message[4:8].tobytes(), "little")
    at = message[: HEAD_BYTES + size].tobytes().index(value) + _VALUE_DIGITS - _CRC_DIGITS
    crc: int = google_crc32c.value(message)
    message[at : at + _CRC_DIGITS] = np.frombuffer(f"{crc:08x}".encode(), np.uint8)
    return message


def crc_of(message: bytes | Array, header: Header) -> int:
    """Return the crc32c that a message must have."""
    data = np.frombuffer(message, np.uint8) if isinstance(message, bytes) else message
    at = header.crc_at
    crc = google_crc32c.value(data[:at])
    crc = google_crc32c.extend(crc, b"0" * _CRC_DIGITS)
    found: int = google_crc32c.extend(crc, data[at + _CRC_DIGITS : header.size])
    return found


def read_header(data: bytes) -> Header | None:
    """Parse a message up to its body; return None if it is not one that a store has written.

    Args:
        data: The first bytes of the message, up to its body.
    """
    try:
        return _read(data)
    except (struct.error, ValueError, IndexError, OverflowError):
        return None


def _read(data: bytes) -> Header | None:
    if data[:4] != END[:4]:
        return None
    size = _u32(data, 4)
    if size == 0 or HEAD_BYTES + size > len(data):
        return None
    root = HEAD_BYTES + _u32(data, HEAD_BYTES)
    batch, about = _table(data, root, 2), _table(data, root, 4)
    if data[_field(data, root, 1)] != _BATCH or not batch or not about:
        return None
    (length,) = struct.unpack_from("<q", data, _field(data, root, 3))
    found = _own_value(data, about)
    if found is None:
        return None
    at, value = found
    first, rows, generation = int(value[:16], 16), int(value[16:24], 16), int(value[24:32], 16)
    nodes, buffers = _table(data, batch, 1), _table(data, batch, 2)
    if first < 1 or rows < 1 or length < 0 or not nodes or not buffers:
        return None
    lengths = _longs(data, nodes)[:, 0]
    return Header(
        first=first,
        rows=rows,
        generation=generation,
        crc=int(value[32:], 16),
        crc_at=at + _VALUE_DIGITS - _CRC_DIGITS,
        body=HEAD_BYTES + size,
        size=HEAD_BYTES + size + length,
        lengths=lengths,
        buffers=_longs(data, buffers),
        compressed=_field(data, batch, 3) > 0,
    )


def _own_value(data: bytes, about: int) -> tuple[int, bytes] | None:
    """Return the offset of the store's value in a vector of key-value tables, and the value."""
    for number in range(_u32(data, about)):
        place = about + 4 + 4 * number
        pair = place + _u32(data, place)
        key, value = _table(data, pair, 0), _table(data, pair, 1)
        if key and value and data[key + 4 : key + 4 + _u32(data, key)] == _KEY:
            text = data[value + 4 : value + 4 + _u32(data, value)]
            return (value + 4, text) if len(text) == _VALUE_DIGITS else None
    return None


# -- flatbuffers -------------------------------------------------------------------------------------


def _u32(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, number: int) -> int:
    """Return the offset of a field of a table; 0 if the field has its default."""
    (back,) = struct.unpack_from("<i", data, table)
    entries = table - back
    if entries < 0:
        raise ValueError(entries)
    (size,) = struct.unpack_from("<H", data, entries)
    if 4 + 2 * number + 2 > size:
        return 0
    (offset,) = struct.unpack_from("<H", data, entries + 4 + 2 * number)
    return table + offset if offset else 0


def _table(data: bytes, table: int, number: int) -> int:
    """Return the offset of the table, vector or string that a field points to; 0 if the field is absent."""
    at = _field(data, table, number)
    return at + _u32(data, at) if at else 0


def _longs(data: bytes, vector: int) -> Any:
    """Return a vector of structs of two int64. Shape `(n, 2)`."""
    return np.frombuffer(data, "<i8", 2 * _u32(data, vector), vector + 4).reshape(-1, 2)
