"""Rows as record batches and back: every dtype and shape, slices, shared memory, other programs' columns."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from expstore.errors import SchemaError
from expstore.schema.schema import DTYPES, OBJECT, Field, Schema
from expstore.wire.codec import Codec, Decoder, Encoder, columns_of, meaning_of, note_of, write_note
from expstore.wire.frames import HEAD_BYTES, frame_of
from expstore.wire.stream import frames_in, write_stream
from tests.support.case_selection import in_full, share
from tests.support.tensor_bits import bits, random_bits

PLAIN = sorted(set(DTYPES) - {OBJECT})


@given(
    dtype=st.sampled_from(PLAIN),
    shape=st.sampled_from([(), (1,), (3,), (2, 3), (1, 1)]),
    count=st.integers(0, 9),
    seed=st.integers(0, 1000),
    way=st.sampled_from(["copied", "shared", "read"]),
)
def test_bits_come_back(dtype: str, shape: tuple[int, ...], count: int, seed: int, way: str) -> None:
    data = TensorDict(
        {
            "x": random_bits(getattr(torch, dtype), (count, *shape), np.random.default_rng(seed)),
            "id": torch.arange(count),
        },
        [count],
    )
    memory = bytearray(write_stream(Encoder().encode(data)))
    if way == "read":
        told = Decoder().read(frames_in(memory)[0])
    else:
        with pa.ipc.open_stream(memory) as reader:
            told = Decoder().decode(reader.read_next_batch(), memory if way == "shared" else None)
    assert told.batch_size == data.batch_size
    assert told["x"].dtype == data["x"].dtype
    assert told["x"].shape == data["x"].shape
    assert bits(told["x"]) == bits(data["x"])
    told["id"] += 1  # it can be written to
    assert told["id"].tolist() == list(range(1, count + 1))


@share(0.3, of=150)
@given(
    kinds=st.lists(st.tuples(st.sampled_from(PLAIN), st.sampled_from([(), (1,), (3,), (2, 3)])), max_size=4),
    size=st.sampled_from([(0,), (1,), (5,), (9,), (2, 3), (64,)]),
    seed=st.integers(0, 1000),
)
def test_messages_are_what_arrow_sends(kinds: list[Any], size: tuple[int, ...], seed: int) -> None:
    """The second one is written by what the first has taught, whatever its values."""
    encoder = Encoder()
    for number in range(3):
        data = TensorDict({"id": torch.arange(math.prod(size)).reshape(size) + number}, size)
        for place, (dtype, shape) in enumerate(kinds):
            rng = np.random.default_rng(seed + number)
            data["next", str(place)] = random_bits(getattr(torch, dtype), (*size, *shape), rng)
        message, batch = encoder.message(data), encoder.encode(data)
        assert message.schema.equals(batch.schema, check_metadata=True)
        assert bytes(message.data) == batch.serialize().to_pybytes()


test_messages_are_what_arrow_sends_in_full = pytest.mark.torture(in_full(test_messages_are_what_arrow_sends))


def test_messages_have_notes_of_any_length() -> None:
    for digits in [1, 300, 600]:
        encoder, data = Encoder(), TensorDict({"x": torch.arange(4)}, [4])
        for facts in ({"sampled": 0}, {"sampled": 10**digits}, {"sampled": 0}):
            schema, message = encoder.message(data, write_note(facts))
            memory = np.frombuffer(bytearray(message), np.uint8)
            frame = frame_of(schema, memory, HEAD_BYTES + int(memory[4:8].view("<i4")[0]))
            assert note_of(frame) == facts
            assert Decoder().read(frame)["x"].tolist() == [0, 1, 2, 3]


def test_messages_of_what_has_no_fixed_size_are_what_arrow_sends() -> None:
    encoder = Encoder()
    for texts in (["a", "bcd"], ["", "efg"]):
        data = TensorDict({"text": NonTensorStack(*texts), "n": torch.arange(2)}, [2])
        assert bytes(encoder.message(data).data) == encoder.encode(data).serialize().to_pybytes()


def test_slices_of_a_batch_are_its_rows() -> None:
    for start, count in [(0, 4), (3, 4), (9, 1), (0, 10)]:
        data = TensorDict({"x": torch.arange(30.0).reshape(10, 3), "done": torch.arange(10) % 2 == 0}, [10])
        memory = bytearray(write_stream(Encoder().encode(data)))
        with pa.ipc.open_stream(memory) as reader:
            part = reader.read_next_batch().slice(start, count)
        for base in (None, memory):
            told = Decoder().decode(part, base)
            assert (told == data[start : start + count]).all()


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "batch",
    [
        pa.RecordBatch.from_pydict({"x": [1, 2], "text": ["a", None]}),
        pa.RecordBatch.from_pydict(
            {"x": pa.array([[[1.0, 2.0]], [[3.0, 4.0]]], pa.list_(pa.list_(pa.float32(), 2), 1))}
        ),
        pa.RecordBatch.from_pydict({"b": [True, False, True], "x": [1.5, 2.5, 3.5]}).slice(1),
        pa.RecordBatch.from_pydict({"x": pa.array([], pa.int8())}),
    ],
)
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_frames_are_read_as_arrow_reads_them(batch: pa.RecordBatch, compression: str | None) -> None:
    memory = bytearray(write_stream(batch, compression=compression))
    (frame,) = frames_in(memory)
    assert frame.batch() == batch
    told, other = Decoder().read(frame), Decoder().decode(batch)
    for name in batch.schema.names:
        assert told.get(name).tolist() == other.get(name).tolist()


def test_columns_come_in_any_order() -> None:
    data = TensorDict({"x": torch.arange(6.0).reshape(3, 2), "n": torch.arange(3)}, [3])
    batch = Encoder().encode(data).select(["n", "x"])
    (frame,) = frames_in(bytearray(write_stream(batch)))
    for told in (Decoder().read(frame), Decoder().decode(batch)):
        assert (told == data).all()


def test_frames_without_all_values_are_refused() -> None:
    missing = pa.RecordBatch.from_pydict({"x": [1, None]})
    with pytest.raises(SchemaError, match="without a value"):
        Decoder().read(frames_in(bytearray(write_stream(missing)))[0])
    (frame,) = frames_in(bytearray(write_stream(pa.RecordBatch.from_pydict({"b": [True] * 9, "x": [1] * 9}))))
    with pytest.raises(SchemaError, match="'b' end before"):
        Decoder().read(frame._replace(rows=600))


def test_dims_and_their_names_come_back() -> None:
    data = TensorDict({"a": {"b": torch.arange(24).reshape(2, 3, 4)}}, [2, 3], names=["lane", "time"])
    told = Decoder().decode(Encoder().encode(data))
    assert told.batch_size == torch.Size([2, 3])
    assert told.names == ["lane", "time"]
    assert (told == data).all()


def test_an_encoder_knows_several_kinds_of_batches() -> None:
    encoder = Encoder()
    for count in (3, 5, 3):
        for extra in ({}, {"y": torch.zeros(count, 2)}):
            data = TensorDict({"x": torch.rand(count), **extra}, [count])
            assert (Decoder().decode(encoder.encode(data)) == data).all()


def test_others_read_it_unaided() -> None:
    data = TensorDict({"image": torch.arange(12).reshape(2, 2, 3), "next": {"reward": torch.rand(2, 1)}}, [2])
    frame = pl.read_ipc_stream(write_stream(Encoder().encode(data)).to_pybytes())
    assert frame.columns == ["image", "next.reward"]
    assert frame["next.reward"].to_list() == data["next", "reward"][:, 0].tolist()


def test_columns_of_others_are_fields() -> None:
    schema = pa.schema({"next.reward": pa.float32(), "x": pa.list_(pa.float64(), 3), "name": pa.string()})
    told = meaning_of(schema).schema
    assert [entry.key for entry in told.fields] == [("next", "reward"), ("x",), ("name",)]
    assert [str(entry) for entry in told.fields] == ["float32[]", "float64[3]", "string"]


def test_tensors_in_another_order_are_refused() -> None:
    kind = pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=[1, 0])
    with pytest.raises(SchemaError, match="column 'x' is of type .*; send its values in C order"):
        meaning_of(pa.schema({"x": kind}))


CODEC = Codec(Schema([Field(("x",), "float32", (2, 3)), Field(("n",), "int64", ())]))


def test_columns_that_are_not_the_fields() -> None:
    for columns, trouble in [
        ({"x": pa.list_(pa.float32(), 6)}, "column 'n' is missing"),
        ({"x": pa.list_(pa.float32(), 6), "n": pa.int64(), "y": pa.int8()}, "column 'y' is not a field"),
        ({"x": pa.list_(pa.float32(), 5), "n": pa.int64()}, "column 'x' is"),
        ({"x": pa.list_(pa.float64(), 6), "n": pa.int64()}, "column 'x' is"),
        ({"x": pa.list_(pa.float32(), 6), "n": pa.int32()}, "column 'n' is"),
        ({"x": pa.list_(pa.float32()), "n": pa.int64()}, "column 'x' is"),
        ({"x": pa.list_(pa.list_(pa.float32(), 2), 3), "n": pa.int64()}, "column 'x' is"),
        ({"x": pa.fixed_shape_tensor(pa.float32(), (3, 2)), "n": pa.int64()}, "column 'x' is"),
        (
            {"x": pa.fixed_shape_tensor(pa.float32(), (2, 3), permutation=[1, 0]), "n": pa.int64()},
            "column 'x' is",
        ),
        (
            {"x": pa.fixed_shape_tensor(pa.float32(), [5]), "n": pa.int64()},
            r"column 'x' is float32\[5\]; the field is float32\[2, 3\], its Arrow type ",
        ),
        (
            {"x": pa.fixed_shape_tensor(pa.month_day_nano_interval(), [6]), "n": pa.int64()},
            "column 'x' is extension<arrow.fixed_shape_tensor",
        ),
    ]:
        with pytest.raises(SchemaError, match=trouble):
            CODEC.check(pa.schema(columns))


def test_lists_of_a_fixed_size_are_tensors() -> None:
    for kind in [
        pa.fixed_shape_tensor(pa.float32(), (2, 3)),
        pa.list_(pa.float32(), 6),
        pa.list_(pa.list_(pa.float32(), 3), 2),
        pa.fixed_shape_tensor(pa.float32(), (2, 1, 3), permutation=[0, 1, 2]),
    ]:
        schema = pa.schema({"n": pa.int64(), "x": kind})
        CODEC.check(schema)
        values = [[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]] * 2
        if isinstance(kind, pa.FixedShapeTensorType):
            column = pa.ExtensionArray.from_storage(kind, pa.array([[*range(6)]] * 2, kind.storage_type))
        else:
            nested = pa.types.is_fixed_size_list(kind.value_type)
            column = pa.array(values if nested else [[*range(6)]] * 2, kind)
        batch = pa.RecordBatch.from_arrays([pa.array([7, 8]), column], schema=schema)
        x, n = CODEC.decode(batch)  # in the schema's order
        assert (x.tolist(), n.tolist()) == (values, [7, 8])


def test_unsendable_batches_are_refused() -> None:
    missing = pa.RecordBatch.from_pydict({"x": [[0.0] * 6, None], "n": [1, 2]}, _plain_schema())
    with pytest.raises(SchemaError, match="'x' has rows without a value"):
        CODEC.decode(missing)
    narrow = Codec(Schema([Field(("b",), "bfloat16", ())]))
    with pytest.raises(SchemaError, match="bfloat16 cannot hold"):
        narrow.decode(pa.RecordBatch.from_pydict({"b": pa.array([0.1], pa.float32())}))
    with pytest.raises(SchemaError, match="batch size is"):
        CODEC.build(columns_of(TensorDict({"x": torch.zeros(4, 2, 3), "n": torch.arange(4)}, [4]))[1], (5,))


def _plain_schema() -> pa.Schema:
    return pa.schema({"x": pa.list_(pa.float32(), 6), "n": pa.int64()})


def test_metadata_that_does_not_fit_is_refused() -> None:
    for facts in [
        "no JSON",
        "{}",
        json.dumps({"format": 9, "fields": []}),
        json.dumps({"format": 1, "fields": [{"key": ["x"], "dtype": "float32", "shape": [7]}]}),
        json.dumps({"format": 1, "fields": [{"key": ["../x"], "dtype": "float32", "shape": []}]}),
        json.dumps(
            {"format": 1, "fields": [{"key": ["n"], "dtype": "int64", "shape": []}], "batch_size": [-1]}
        ),
    ]:
        with pytest.raises(SchemaError):
            meaning_of(pa.schema({"n": pa.int64()}, metadata={"expstore": facts}))


def test_metadata_of_known_fields_describes_only_the_batch() -> None:
    told = CODEC.arrow_schema((2, 3), ("lane", None))
    found = meaning_of(told, CODEC)
    assert (found.schema, found.batch_size, found.names) == (CODEC.schema, (2, 3), ("lane", None))
    plain = meaning_of(told.remove_metadata(), CODEC)
    assert (plain.schema, plain.batch_size) == (CODEC.schema, ())
    with pytest.raises(SchemaError, match="column 'n' is missing"):
        meaning_of(pa.schema([told.field("x")]), CODEC)


def test_metadata_that_makes_no_sense() -> None:
    for text in (
        "", "7", "[]", '{"format": 9}', '{"format": "x"}', '{"format": 1, "fields": [], "batch_size": 7}',
        '{"format": 1, "fields": 3, "batch_size": [-1]}', "[" * 50_000,
    ):  # fmt: skip
        schema = CODEC.arrow_schema().with_metadata({b"expstore": text.encode()})
        for known in (None, CODEC):
            with pytest.raises(SchemaError):
                meaning_of(schema, known)
