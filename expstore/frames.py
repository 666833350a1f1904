"""Record batches as they lie in a stream: where each buffer is, without an object of Arrow's for each column.

Used by framing and the codec. Where things are is told by a message's metadata, a flatbuffer
(https://github.com/apache/arrow/blob/main/format/Message.fbs; https://flatbuffers.dev/internals). It copies
nothing, and never looks at values.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from expstore.types import Array, IntArray

__all__ = ["HEAD_BYTES", "Frame", "frame_of", "is_packed", "size_of_body"]

#: What comes before a message: the mark, and the length of its metadata.
HEAD_BYTES = 8
# Fields of the tables Message and RecordBatch, by number.
_HEADER, _BODY_SIZE = 2, 3
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3


class Frame(NamedTuple):
    """A record batch in the memory that it came into.

    Args:
        schema: Arrow's.
        rows: How many.
        memory: The whole message: head, metadata, body. uint8.
        body: Where its body begins.
        bounds: Offset in the body, and length, of each buffer. Shape `(buffers, 2)`, int64.
        plain: Whether no value is missing, and no buffer is packed: each lies there as it is.
    """

    schema: Any
    rows: int
    memory: Array
    body: int
    bounds: IntArray
    plain: bool

    def batch(self) -> Any:
        """Return it as Arrow's record batch, in the same memory."""
        message = pa.ipc.read_message(pa.BufferReader(pa.py_buffer(self.memory)))
        return pa.ipc.read_record_batch(message, self.schema)


def frame_of(schema: Any, memory: Array, body: int) -> Frame:
    """Return the record batch of a message.

    Args:
        schema: Of the stream.
        memory: The message. uint8.
        body: Where its body begins.

    Raises:
        ValueError, struct.error: The message is none, or holds no record batch.
    """
    metadata = memory.data[HEAD_BYTES:body]
    header = _header(metadata)
    nodes, bounds = (_pairs(metadata, _field(metadata, header, number)) for number in (_NODES, _BUFFERS))
    at = _field(metadata, header, _LENGTH)
    rows = int(struct.unpack_from("<q", metadata, at)[0]) if at else 0
    plain = not (nodes[:, 1].any() or _field(metadata, header, _COMPRESSION))
    return Frame(schema, rows, memory, body, bounds, plain)


def size_of_body(metadata: Any) -> int:
    """Return how many bytes follow a message's metadata."""
    at = _field(metadata, _root(metadata), _BODY_SIZE)
    return int(struct.unpack_from("<q", metadata, at)[0]) if at else 0


def is_packed(metadata: Any) -> bool:
    """Say whether the buffers of a record batch are compressed."""
    return _field(metadata, _header(metadata), _COMPRESSION) != 0


def _root(metadata: Any) -> int:
    return int(struct.unpack_from("<I", metadata, 0)[0])


def _header(metadata: Any) -> int:
    """Return where the message's own table is."""
    at = _field(metadata, _root(metadata), _HEADER)
    return at + int(struct.unpack_from("<I", metadata, at)[0])


def _field(metadata: Any, table: int, number: int) -> int:
    """Return where a field of a table is; 0: it has its default."""
    (back,) = struct.unpack_from("<i", metadata, table)
    fields = table - back
    (size,) = struct.unpack_from("<H", metadata, fields)
    slot = 4 + 2 * number
    step = struct.unpack_from("<H", metadata, fields + slot)[0] if slot < size else 0
    return table + int(step) if step else 0


def _pairs(metadata: Any, at: int) -> IntArray:
    """Return a vector of structs of two int64. Shape `(n, 2)`."""
    if not at:
        return np.zeros((0, 2), np.int64)
    at += struct.unpack_from("<I", metadata, at)[0]
    (count,) = struct.unpack_from("<I", metadata, at)
    return np.frombuffer(metadata, "<i8", 2 * count, at + 4).reshape(count, 2)
