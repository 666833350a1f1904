"""Calls in shared memory: what is written is read, in place, and what is no call is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from expstore.data.batch import Batch, batch_of
from expstore.errors import SchemaError, StorageError
from expstore.schema.arrow_types import type_text
from expstore.schema.schema import Field, Schema
from expstore.wire.slots import (
    BatchReader,
    Call,
    Slot,
    columns_of,
    describe_batch,
    describe_layouts,
    layouts_of,
    read_layouts,
    write_tail,
)

FIELDS = [
    Field(("observation",), "float32", (3, 2)),
    Field(("action",), "int64", ()),
    Field(("next", "done"), "bool", (1,)),
    Field(("half",), "bfloat16", (2,)),
]


def columns(count: int, seed: int = 0) -> list[np.ndarray[Any, Any]]:
    numbers = np.random.default_rng(seed)
    return [
        (numbers.integers(0, 2 if entry.dtype == "bool" else 100, (count, *entry.shape))).astype(
            entry.numpy_dtype
        )
        for entry in FIELDS
    ]


def memory(size: int = 1 << 16) -> Any:
    return np.zeros(size, np.uint8)


def test_columns_are_read_in_place() -> None:
    for count in [1, 7, 64]:
        values = columns(count)
        layouts = layouts_of(values)
        call = Call(b'{"do": "append"}', count)
        shared = memory()
        length = Slot(shared).write_call(5, call, layouts, values)
        other = Slot(shared)
        assert other.read_call(5, length) == call
        again = read_layouts(describe_layouts(layouts))
        assert again == layouts
        found = other.columns(call, again)
        for wanted, view in zip(values, found, strict=True):
            assert np.array_equal(wanted, view)
            assert view.dtype == wanted.dtype
            assert np.shares_memory(view, shared)
            assert view.ctypes.data % 8 == 0
        assert (found[1].ctypes.data - shared.ctypes.data) % 64 == 0
        assert length <= Slot.space_for(call, layouts) <= shared.size


def test_a_slot_has_space_for_the_ids_of_small_rows() -> None:
    flags = [np.zeros(1000, np.bool_)]
    call, layouts = Call(b"{}", 1000), layouts_of(flags)
    slot = Slot(memory(Slot.space_for(call, layouts)))
    slot.write_call(1, call, layouts, flags)
    assert slot.numbers_answer(1000).shape == (1000,)


def test_calls_of_other_sizes_and_texts_follow_one_another() -> None:
    slot, other = Slot(shared := memory()), None
    other = Slot(shared)
    known: dict[bytes, Any] = {}
    for number, (count, text) in enumerate([(3, b"a"), (3, b"b"), (9, b"b"), (9, b"c" * 500), (3, b"a")], 1):
        values = columns(count, number)
        layouts = known.setdefault(text, layouts_of(values))
        length = slot.write_call(number, Call(text, count), layouts, values)
        call = other.read_call(number, length)
        assert all(map(np.array_equal, other.columns(call, layouts), values))


def test_a_damaged_header_or_text_is_refused() -> None:
    for place in [0, 8, 12, 16, 24, 32, 40, 48, 79, 130]:
        shared = memory()
        slot = Slot(shared)
        length = slot.write_call(1, Call(b'{"do": "flush"}', 0))
        shared[place] ^= 1
        with pytest.raises(StorageError, match="does not hold call 1"):
            slot.read_call(1, length)


def test_a_call_that_is_not_the_announced_one_is_refused() -> None:
    slot = Slot(memory())
    length = slot.write_call(3, Call(b"{}"))
    for number, size in ((4, length), (3, length + 1)):
        with pytest.raises(StorageError, match="does not hold"):
            slot.read_call(number, size)


def test_columns_that_cannot_be_shared_are_refused() -> None:
    for told in [[("O", [])], [("<f4", [-1])], [("<f4", [2, 0])], [("<f4",)], 5, [("x", [])]]:
        with pytest.raises((ValueError, TypeError)):
            read_layouts(told)


def test_columns_beyond_the_memory_are_refused() -> None:
    slot = Slot(memory(4096))
    with pytest.raises(StorageError, match="do not fit"):
        slot.columns(Call(b"{}", 10_000), layouts_of(columns(1)))


def test_answers_take_the_place_of_the_call() -> None:
    slot = Slot(memory())
    numbers = np.arange(500)[::2]
    assert slot.answer_numbers(numbers) == 250
    assert np.array_equal(slot.numbers_answer(250), numbers)
    assert slot.answer_text("ünï".encode()) == 5
    assert slot.text_answer(5).decode() == "ünï"
    with pytest.raises(StorageError, match="does not fit"):
        slot.answer_text(bytes(1 << 17))


def through_a_slot(batch: Batch, schema: Schema | None) -> Batch:
    """Return a batch as the other side reads it."""
    keys, dtypes, fixed, loose = columns_of(batch)
    if batch.lanes is not None:
        fixed = [*fixed, batch.lanes]
    layouts, tail = layouts_of(fixed), write_tail(loose)
    call = Call(b"{}", batch.count, len(tail))
    slot = Slot(memory())
    slot.write_call(1, call, layouts, fixed, tail)
    told = describe_batch(batch, keys, dtypes)
    reader = BatchReader(told, layouts)
    return reader.read(slot.columns(call, layouts), slot.tail(call, layouts), schema)


def test_a_batch_is_of_the_schema_if_its_fields_are_the_same() -> None:
    schema = Schema(FIELDS)
    found = through_a_slot(Batch([], [], columns(5), 5, arranged=schema), schema)
    assert found.arranged is schema
    assert all(map(np.array_equal, found.columns(schema), columns(5)))
    others = [
        Schema(FIELDS[:3]),
        Schema([*FIELDS[1:], FIELDS[0]]),
        Schema([Field(("observation",), "float32", (6,)), *FIELDS[1:]]),
        Schema([Field(("observation",), "float64", (3, 2)), *FIELDS[1:]]),
        Schema(FIELDS, form='{"names": ["time"]}'),
    ]
    for other in (*others, None):
        found = through_a_slot(Batch([], [], columns(5), 5, arranged=schema), other)
        assert found.arranged is None
        assert found.keys == [entry.key for entry in FIELDS]
        assert all(map(np.array_equal, found.arrays, columns(5)))


def test_lanes_and_dims_come_along() -> None:
    batch = Batch(
        [entry.key for entry in FIELDS], [entry.dtype for entry in FIELDS], columns(6), 6,
        np.array([0, 1, 2, 0, 1, 2]), 3, form='{"batch_size": [2]}', dims=(3,), linked=False,
    )  # fmt: skip
    found = through_a_slot(batch, Schema(FIELDS))
    assert (found.lane_count, found.form, found.dims, found.linked) == (3, batch.form, (3,), False)
    assert np.array_equal(found.lanes, batch.lanes)
    assert found.arranged is None
    assert found.signature() == batch.signature()


def test_columns_without_a_fixed_size_are_copies() -> None:
    texts, lists = pa.array(["a", None, "ccc"]), pa.array([[1], [], [2, 3]], pa.list_(pa.int64()))
    schema = Schema(
        [
            Field(("text",), "arrow", (), type_text(texts.type)),
            FIELDS[1],
            Field(("list",), "arrow", (), type_text(lists.type)),
        ]
    )
    batch = batch_of(schema, [texts, np.arange(3), lists])
    found = through_a_slot(batch, schema)
    back = dict(zip(found.keys, found.arrays, strict=True))
    assert back[("text",)].equals(texts)
    assert back[("list",)].equals(lists)
    assert back[("action",)].tolist() == [0, 1, 2]


def test_objects_are_refused() -> None:
    values = np.array([{}, []], object)
    with pytest.raises(SchemaError, match="'thing' holds objects"):
        columns_of(Batch([("thing",)], ["object"], [values], 2))
