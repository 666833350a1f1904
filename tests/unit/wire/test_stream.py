"""Arrow streams message by message: what is accepted, what is refused, and truncated streams."""

from __future__ import annotations

import io
import random
from typing import Any

import pyarrow as pa
import pytest

from expstore.errors import SchemaError
from expstore.wire.stream import (
    END,
    StreamWriter,
    batches_of,
    frames_in,
    read_batches,
    read_each,
    write_stream,
)

BATCH = pa.RecordBatch.from_pydict({"n": [1, 2, 3], "text": ["a", "bc", ""]})
OTHER = pa.RecordBatch.from_pydict({"m": [1]})


def stream_of(*batches: pa.RecordBatch, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema, **options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def taken(body: bytes, rows: int = 100) -> int:
    return sum(batch.num_rows for batch in read_batches(body, lambda schema: None, rows=rows)[1])


def test_whole_streams_are_taken() -> None:
    assert taken(stream_of(BATCH, BATCH)) == 6
    assert taken(write_stream(BATCH).to_pybytes()) == 3
    assert taken(stream_of(BATCH.slice(0, 0))) == 0


def test_streams_that_end_early_are_refused_wherever_that_is() -> None:
    body = stream_of(BATCH, BATCH)
    for length in range(len(body)):
        with pytest.raises(SchemaError, match="not an Arrow IPC stream"):
            taken(body[:length])
    with pytest.raises(SchemaError, match="1 bytes follow"):
        taken(body + b"x")


def test_damaged_bytes_are_refused_or_harmless() -> None:
    body, seen = stream_of(BATCH, BATCH), 0
    for seed in range(400):
        choice = random.Random(seed)
        damaged = bytearray(body)
        for _ in range(choice.randint(1, 4)):
            damaged[choice.randrange(len(body))] = choice.randrange(256)
        try:
            assert taken(bytes(damaged)) <= 100
        except SchemaError:
            seen += 1
    assert seen > 100


def test_a_stream_begins_with_its_schema() -> None:
    # Arrow's reader would take the batch's metadata for a schema's, and read wherever it points.
    body = stream_of(BATCH)
    with pytest.raises(SchemaError, match="begins with a message of type 'record batch'"):
        taken(body[len(BATCH.schema.serialize()) :])


def test_compressed_or_oversized_streams_are_refused() -> None:
    for compression in ("zstd", "lz4"):
        with pytest.raises(SchemaError, match="compressed"):
            taken(stream_of(BATCH, options=pa.ipc.IpcWriteOptions(compression=compression)))
    encoded = pa.RecordBatch.from_arrays([pa.array(["a", "b"]).dictionary_encode()], names=["d"])
    with pytest.raises(SchemaError, match="dictionary"):
        taken(stream_of(encoded))
    with pytest.raises(SchemaError, match="more than 5 rows") as refused:
        taken(stream_of(BATCH, BATCH), rows=5)
    assert refused.value.kind == "too_large"
    deep: pa.DataType = pa.int8()
    for _ in range(3000):
        deep = pa.list_(deep)
    with pytest.raises(SchemaError, match="bytes of metadata"):
        taken(pa.schema({"deep": deep}).serialize().to_pybytes() + END)


def test_the_schema_is_looked_at_before_any_batch() -> None:
    def refuse(schema: pa.Schema) -> None:
        raise SchemaError("not this one")

    with pytest.raises(SchemaError, match="not this one"):
        read_batches(stream_of(BATCH)[:-20], refuse, rows=10)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_a_stream_is_written_part_by_part(compression: str | None) -> None:
    writer, parts = StreamWriter(compression), []
    for number in range(3):
        if number == 1 and compression is None:
            writer.write_message(BATCH.schema, BATCH.serialize())
        else:
            writer.write(BATCH)
        assert writer.pending > 0
        parts.append(bytes(writer.take()))
        assert writer.pending == 0
    writer.end()
    body = b"".join([*parts, bytes(writer.take())])
    names, batches = batches_of(body)
    assert names == ["n", "text"]
    assert batches == [BATCH] * 3
    with pytest.raises(SchemaError, match="changed"):
        writer.write(OTHER)
    with pytest.raises(SchemaError, match="changed"):
        writer.write_message(OTHER.schema, OTHER.serialize())


def test_streams_are_read_as_they_come() -> None:
    body = stream_of(BATCH, BATCH)
    assert [frame.batch() for frame in read_each(io.BytesIO(body).readinto)] == [BATCH, BATCH]
    for length in (0, 5, len(body) // 2, len(body) - 8, len(body) - 1):
        with pytest.raises((EOFError, OSError)):
            list(read_each(io.BytesIO(body[:length]).readinto))


def test_frames_lie_in_the_bytes_that_came() -> None:
    body = bytearray(stream_of(BATCH, BATCH.slice(1)))
    frames = frames_in(body)
    assert [frame.rows for frame in frames] == [3, 2]
    assert [frame.batch() for frame in frames] == [BATCH, BATCH.slice(1)]
    begin, size = frames[0].bounds[1]
    frames[0].memory[frames[0].body + begin :][:size].view("<i8")[0] = 77
    assert frames_in(body)[0].batch()["n"].to_pylist() == [77, 2, 3]
    for length in (0, 5, len(body) // 2, len(body) - 8, len(body) - 1):
        with pytest.raises(SchemaError, match="not an Arrow IPC stream"):
            frames_in(body[:length])
