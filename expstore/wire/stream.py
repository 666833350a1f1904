"""Arrow IPC streams, message by message; untrusted streams are validated before they are read.

Used by the callers of `expstore.wire.codec` at both ends of a connection. It handles frames, not fields.

Arrow's own reader accepts a stream that was cut between two messages as complete, decompresses compressed
buffers, and trusts lengths. So the end mark, the message types and the buffers of each batch are checked here
(https://arrow.apache.org/docs/format/Columnar.html: "Encapsulated message format", "IPC Streaming Format").
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from expstore.errors import SchemaError
from expstore.wire.frames import HEAD_BYTES, Frame, frame_of, is_packed, message_of, size_of_body

#: The end mark of a stream.
END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
#: Largest metadata of a schema, and of a batch: deeply nested types would overflow the stack of Arrow's
#: reader.
_SCHEMA_BYTES = 64 * 1024
_BATCH_BYTES = 1024 * 1024


def _bad(reason: str, hint: str = "") -> SchemaError:
    return SchemaError(
        f"the body is not an Arrow IPC stream that can be read: {reason}", kind="arrow", hint=hint
    )


def write_stream(batch: Any, *, compression: str | None = None) -> Any:
    """Return a record batch as a complete stream: schema, batch, end mark. A pyarrow Buffer."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


class StreamWriter:
    """Write record batches of one schema as a stream that is returned piece by piece.

    Args:
        compression: Compression of the buffers: "lz4", "zstd" or None.
    """

    def __init__(self, compression: str | None = None) -> None:
        self._compression = compression
        self._schema: Any = None
        self._parts: list[Any] = []
        self.pending = 0

    def write(self, batch: Any, notes: Mapping[bytes, bytes] | None = None) -> None:
        """Append a record batch.

        Args:
            batch: The batch.
            notes: Metadata of its message.

        Raises:
            SchemaError: Its schema differs from that of the first batch (kind "changed").
        """
        self._begin(batch.schema)
        self._add(message_of(batch, notes, compression=self._compression))

    def write_message(self, schema: Any, message: Any) -> None:
        """Append a record batch that is serialized already; its buffers are not compressed.

        Args:
            schema: Schema of the batch.
            message: The bytes of the message.

        Raises:
            SchemaError: Its schema differs from that of the first batch (kind "changed").
        """
        self._begin(schema)
        self._add(message)

    def _begin(self, schema: Any) -> None:
        if self._schema is None:
            self._schema = schema
            self._add(schema.serialize())
        elif schema is not self._schema and not schema.equals(self._schema):
            raise SchemaError("the fields have changed since the stream began", kind="changed",
                              hint="open a new stream")  # fmt: skip

    def end(self) -> None:
        """Append the end mark."""
        self._add(END)

    def _add(self, part: Any) -> None:
        self._parts.append(part)
        self.pending += len(part)

    def take(self) -> bytes | memoryview:
        """Return the bytes appended since the last call."""
        parts, self._parts, self.pending = [memoryview(part) for part in self._parts], [], 0
        return parts[0] if len(parts) == 1 else b"".join(parts)


def batches_of(data: Any) -> tuple[list[str], list[Any]]:
    """Return the names of the columns, and the record batches, of a trusted stream."""
    with pa.ipc.open_stream(data) as reader:
        return list(reader.schema.names), list(reader)


def read_batches(body: Any, check: Callable[[Any], None], *, rows: int) -> tuple[Any, list[Any]]:
    """Return the schema and the record batches of an untrusted stream.

    Args:
        body: The bytes; the batches are views of them.
        check: Called with the schema before any batch is read; raises if the schema is not acceptable.
        rows: The highest number of rows that is accepted.

    Raises:
        SchemaError: `body` is not an Arrow IPC stream, ends early, has bytes after its end mark, or holds
            messages other than batches, compressed buffers, or inconsistent lengths.
    """
    view = memoryview(body)
    source = pa.BufferReader(pa.py_buffer(body))
    schema, batches, count = None, [], 0
    while True:
        at = source.tell()
        size = _metadata_size(view, at)
        if size == 0:
            if len(view) != at + HEAD_BYTES:
                raise _bad(f"{len(view) - at - HEAD_BYTES} bytes follow its end mark")
            break
        if size > (_SCHEMA_BYTES if schema is None else _BATCH_BYTES):
            raise _bad(f"a message has {size} bytes of metadata")
        try:
            message = pa.ipc.read_message(source)
            if schema is None:
                if message.type != "schema":  # Arrow does not check this
                    raise _bad(f"it begins with a message of type {message.type!r}")
                schema = pa.ipc.read_schema(message)
                check(schema)
                continue
            _check_message(message)
            batch = pa.ipc.read_record_batch(message, schema)
            batch.validate(full=True)
        except (pa.ArrowException, EOFError, OSError, ValueError) as exc:
            if isinstance(exc, SchemaError):
                raise
            raise _bad(str(exc).splitlines()[0][:200] if str(exc) else type(exc).__name__) from exc
        count += batch.num_rows
        if count > rows:
            raise SchemaError(
                f"the body has more than {rows:,} rows", kind="too_large", hint="send them in several calls"
            )
        batches.append(batch)
    if schema is None:
        raise _bad("it has no schema")
    return schema, batches


def _metadata_size(view: memoryview, at: int) -> int:
    """Return the number of metadata bytes of the message at `at`; 0 if the stream ends there."""
    if len(view) < at + HEAD_BYTES:
        raise _bad("it has no end mark, so rows may be missing", "close the writer before you send")
    mark, size = struct.unpack_from("<Ii", view, at)
    if mark != 0xFFFFFFFF or size < 0:
        raise _bad("a message does not begin with its marker")
    return int(size)


def _check_message(message: Any) -> None:
    """Raise SchemaError unless a message is a batch with uncompressed buffers."""
    if message.type != "record batch":
        raise _bad(f"it holds a message of type {message.type!r}", "send plain columns, no dictionaries")
    try:
        packed = is_packed(memoryview(message.metadata))  # Arrow has verified the flatbuffer
    except struct.error as exc:
        raise _bad("a message's metadata cannot be read") from exc
    if packed:
        raise _bad("its buffers are compressed", "send it without compression")


def read_each(readinto: Callable[[Any], int]) -> Iterator[Frame]:
    """Read a trusted stream as it arrives.

    Args:
        readinto: Fills the given memory and returns the number of bytes read; fewer bytes mean the end.

    Yields:
        Record batches, each in memory of its own.

    Raises:
        EOFError, OSError: The stream ends early, or its source fails.
    """

    def fill(piece: Any) -> Any:
        if len(piece) and readinto(piece) != len(piece):
            raise EOFError("the stream ends early")
        return piece

    schema, head = None, bytearray(HEAD_BYTES)
    try:
        while size := _metadata_size(memoryview(fill(head)), 0):
            metadata = fill(bytearray(size))
            body = HEAD_BYTES + size
            # Not zeroed: a batch may have many MiB.
            message = np.empty(body + size_of_body(metadata), np.uint8)
            view = message.data
            view[:HEAD_BYTES], view[HEAD_BYTES:body] = head, metadata
            fill(view[body:])
            if schema is None:
                schema = pa.ipc.read_schema(pa.py_buffer(message))
            else:
                yield frame_of(schema, message, body)
    except (pa.ArrowInvalid, struct.error, ValueError) as exc:
        raise EOFError(str(exc).splitlines()[0]) from exc


def frames_in(body: bytearray) -> list[Frame]:
    """Return the record batches of a complete trusted stream, as views of its memory.

    Raises:
        SchemaError: `body` is not such a stream.
    """
    schema, found, memory, at = None, [], np.frombuffer(body, np.uint8), 0
    try:
        while size := _metadata_size(memory.data, at):
            begin = HEAD_BYTES + size
            whole = begin + size_of_body(memory.data[at + HEAD_BYTES : at + begin])
            message = memory[at : at + whole]
            if schema is None:
                schema = pa.ipc.read_schema(pa.py_buffer(message))
            else:
                found.append(frame_of(schema, message, begin))
            at += whole
    except (pa.ArrowInvalid, struct.error, ValueError) as exc:
        if isinstance(exc, SchemaError):
            raise
        raise _bad(str(exc).splitlines()[0][:200]) from exc
    return found


def read_table(body: Any) -> Any:
    """Return a trusted stream as one table, which shares the memory of `body`.

    Raises:
        SchemaError: `body` is not such a stream.
    """
    try:
        with pa.ipc.open_stream(pa.py_buffer(body)) as reader:
            return reader.read_all()
    except (pa.ArrowException, OSError) as exc:
        raise _bad(str(exc).splitlines()[0][:200]) from exc
