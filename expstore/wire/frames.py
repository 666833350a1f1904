"""Record batches in the bytes of a stream: where each buffer is, without an Arrow object for each column.

Used by `expstore.wire.stream` and `expstore.wire.codec`. The positions are in a message's metadata, a
flatbuffer (https://github.com/apache/arrow/blob/main/format/Message.fbs; https://flatbuffers.dev/internals):
batches that differ only in their values have the same metadata. This module never reads values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from expstore.core.values import Array, IntArray

#: Bytes before a message's metadata: a marker, and the length of the metadata.
HEAD_BYTES = 8
#: Bytes of the end mark of a stream.
_END_BYTES = 8
# Fields of the tables Message, RecordBatch and KeyValue, by number.
_HEADER, _BODY_SIZE, _NOTES = 2, 3, 4
_LENGTH, _NODES, _BUFFERS, _COMPRESSION = 0, 1, 2, 3
_KEY, _VALUE = 0, 1


class Frame(NamedTuple):
    """A record batch in the memory that received it.

    Args:
        schema: The Arrow schema.
        rows: Number of rows.
        memory: The whole message: head, metadata, body. uint8.
        body: Offset of the body, in bytes.
        bounds: Offset in the body, and length, of each buffer. Shape `(buffers, 2)`, int64.
        plain: Whether no value is missing and no buffer is compressed.
    """

    schema: Any
    rows: int
    memory: Array
    body: int
    bounds: IntArray
    plain: bool

    @property
    def notes(self) -> dict[bytes, bytes]:
        """The metadata of the message itself, which differs from batch to batch."""
        metadata = self.memory.data[HEAD_BYTES : self.body]
        at = _field(metadata, _root(metadata), _NOTES)
        if not at:
            return {}
        at += struct.unpack_from("<I", metadata, at)[0]
        places = range(at + 4, at + 4 + 4 * struct.unpack_from("<I", metadata, at)[0], 4)
        tables = [place + struct.unpack_from("<I", metadata, place)[0] for place in places]
        return {_text(metadata, table, _KEY): _text(metadata, table, _VALUE) for table in tables}

    def batch(self) -> Any:
        """Return the frame as an Arrow record batch in the same memory."""
        message = pa.ipc.read_message(pa.BufferReader(pa.py_buffer(self.memory)))
        return pa.ipc.read_record_batch(message, self.schema)


class FrameForm:
    """Write the bytes of record batches that differ only in their values, without Arrow objects.

    Threads may share a form.

    Args:
        frame: One of these batches; `plain` must be True.
        buffers: For each column, the buffer with its values. All other buffers must be empty.
        note: A text in the metadata that differs from batch to batch, always of this length; None if there is
            none.
    """

    def __init__(self, frame: Frame, buffers: Sequence[int], note: bytes | None = None) -> None:
        at = 0 if note is None else frame.memory[: frame.body].tobytes().index(note)
        self._note = None if note is None else slice(at, at + len(note))
        begins, sizes = frame.body + frame.bounds[buffers, 0], frame.bounds[buffers, 1]
        self._head = frame.memory[: frame.body].copy()
        self._size = frame.memory.size
        self._places = list(zip(begins.tolist(), (begins + sizes).tolist(), strict=True))
        ends = [frame.body, *(end for _, end in sorted(self._places))]
        nexts = [*(begin for begin, _ in sorted(self._places)), self._size]
        self._padding = [(end, begin) for end, begin in zip(ends, nexts, strict=True) if end < begin]

    def write(self, columns: Sequence[Array], note: bytes | None = None) -> Array:
        """Return the message of a batch. Shape `(bytes,)`, uint8.

        Args:
            columns: The values in Arrow's layout, except booleans, one byte each. Shapes `(n, *row shape)`.
            note: The text in the metadata of this batch; None if the form has none.
        """
        message = np.empty(self._size, np.uint8)
        message[: self._head.size] = self._head
        if self._note is not None and note is not None:
            message[self._note] = np.frombuffer(note, np.uint8)
        for end, begin in self._padding:
            message[end:begin] = 0  # do not send old memory contents
        for (begin, end), column in zip(self._places, columns, strict=True):
            if column.dtype == np.bool_:  # Arrow stores a boolean in one bit
                message[begin:end] = np.packbits(column, bitorder="little")
            else:
                message[begin:end].view(column.dtype).reshape(column.shape)[...] = column
        return message


def message_of(
    batch: Any, notes: Mapping[bytes, bytes] | None = None, *, compression: str | None = None
) -> Any:
    """Return a record batch as a message. A pyarrow Buffer.

    Args:
        batch: The batch.
        notes: Metadata of the message.
        compression: Compression of the buffers: "lz4", "zstd" or None.
    """
    if notes is None and compression is None:
        return batch.serialize()
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata=notes)
    whole, head = sink.getvalue(), len(batch.schema.serialize())
    return whole.slice(head, len(whole) - head - _END_BYTES)


def frame_of(schema: Any, memory: Array, body: int) -> Frame:
    """Return the record batch of a message.

    Args:
        schema: Schema of the stream.
        memory: The message. uint8.
        body: Offset of the message's body, in bytes.

    Raises:
        ValueError, struct.error: The message is invalid, or holds no record batch.
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
    """Return whether the buffers of a record batch are compressed."""
    return _field(metadata, _header(metadata), _COMPRESSION) != 0


def _root(metadata: Any) -> int:
    return int(struct.unpack_from("<I", metadata, 0)[0])


def _header(metadata: Any) -> int:
    """Return the position of the table inside the message."""
    at = _field(metadata, _root(metadata), _HEADER)
    return at + int(struct.unpack_from("<I", metadata, at)[0])


def _field(metadata: Any, table: int, number: int) -> int:
    """Return the position of a table's field; 0 if it has its default value."""
    (back,) = struct.unpack_from("<i", metadata, table)
    fields = table - back
    (size,) = struct.unpack_from("<H", metadata, fields)
    slot = 4 + 2 * number
    step = struct.unpack_from("<H", metadata, fields + slot)[0] if slot < size else 0
    return table + int(step) if step else 0


def _text(metadata: Any, table: int, number: int) -> bytes:
    """Return a table's field that is a string."""
    at = _field(metadata, table, number)
    if not at:
        return b""
    at += struct.unpack_from("<I", metadata, at)[0]
    return bytes(metadata[at + 4 : at + 4 + struct.unpack_from("<I", metadata, at)[0]])


def _pairs(metadata: Any, at: int) -> IntArray:
    """Return a vector of structs of two int64. Shape `(n, 2)`."""
    if not at:
        return np.zeros((0, 2), np.int64)
    at += struct.unpack_from("<I", metadata, at)[0]
    (count,) = struct.unpack_from("<I", metadata, at)
    return np.frombuffer(metadata, "<i8", 2 * count, at + 4).reshape(count, 2)
