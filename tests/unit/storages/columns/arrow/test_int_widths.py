"""Integers in as few bytes as needed: types, values through cast and compiled loop, damaged headers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.kernels import gather_runs
from expstore.storages.columns.arrow import int_widths
from expstore.storages.columns.arrow.gather import Gather
from expstore.storages.columns.arrow.int_widths import (
    bounds_of,
    own_widths,
    read_widths,
    together,
    widths_for,
)

KIND = pa.struct(
    [
        ("tokens", pa.list_(pa.int32())),
        ("pairs", pa.list_(pa.int64(), 2)),
        ("said", pa.list_(pa.struct([("who", pa.string()), ("n", pa.uint64()), ("f", pa.float32())]))),
        ("facts", pa.map_(pa.string(), pa.int64())),
        ("many", pa.large_list(pa.int16())),
    ]
)
OWN = own_widths(pa.schema([("row", KIND), ("n", pa.int64()), ("byte", pa.uint8())]))


def integers(bits: int, *, signed: bool = True) -> Any:
    """Values of which few need all bits."""
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    edges = [
        n for e in (7, 8, 15, 16, 31, 32, 63, 64) for n in (1 << e, (1 << e) - 1, -(1 << e), -(1 << e) - 1)
    ]
    few = [n for n in edges if low <= n <= high]
    return st.one_of(
        st.integers(max(low, -100), 200 if bits > 8 else high), st.sampled_from([*few, low, high])
    )


def maybe(values: Any) -> Any:
    return st.one_of(values, values, values, st.none())


said = st.fixed_dictionaries(
    {"who": maybe(st.text(max_size=3)), "n": maybe(integers(64, signed=False)), "f": maybe(st.just(0.5))}
)
row = st.fixed_dictionaries(
    {
        "tokens": maybe(st.lists(maybe(integers(32)), max_size=5)),
        "pairs": maybe(st.lists(maybe(integers(64)), min_size=2, max_size=2)),
        "said": maybe(st.lists(maybe(said), max_size=3)),
        "facts": maybe(st.dictionaries(st.text(max_size=2), integers(64), max_size=2)),
        "many": maybe(st.lists(integers(16), max_size=4)),
    }
)
tables = st.lists(
    st.tuples(maybe(row), maybe(integers(64)), maybe(st.integers(0, 255))), min_size=1, max_size=8
)


def columns_of(rows: list[tuple[Any, ...]]) -> list[pa.Array]:
    return [pa.array(values, kind) for values, kind in zip(zip(*rows, strict=True), OWN.kinds, strict=True)]


@given(first=tables, second=tables, data=st.data())
def test_values_come_back_from_the_narrowest_types(first: Any, second: Any, data: st.DataObject) -> None:
    batches, kept = [], []
    for rows in (first, second):
        start = data.draw(st.integers(0, len(rows) - 1))
        columns = [column.slice(start) for column in columns_of(rows)]
        bounds = bounds_of(columns)
        widths = widths_for(OWN, bounds)
        assert widths.holds(bounds)
        assert read_widths(widths.head, OWN) == widths
        narrow = widths.narrow(columns)
        for was, now, kind in zip(columns, narrow, widths.kinds, strict=True):
            assert now.type == kind
            now.validate(full=True)
            assert now.cast(was.type).to_pylist() == was.to_pylist()
        # As a reader of the file has it, whose buffers begin with the first row.
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, widths.schema) as writer:
            writer.write_batch(pa.record_batch(narrow, schema=widths.schema))
        batches.append((widths, pa.ipc.open_stream(sink.getvalue()).read_all().to_batches()[0]))
        kept.append([column.to_pylist() for column in columns])
    plan = OWN.plan
    where, sizes, lengths = [], [], []
    for _, batch in batches:
        buffers = [b for column in batch.columns for b in column.buffers()]
        where.append([0 if b is None or not b.size else b.address for b in buffers])
        sizes.append([0 if b is None else b.size for b in buffers])
        lengths.append([n for column in batch.columns for n in _lengths(column)])
    codes = np.stack([widths.codes for widths, _ in batches])
    assert codes.shape == (2, plan.nodes)
    gather = Gather(gather_runs, np.array(where), np.array(sizes), np.array(lengths), np.arange(2), codes)
    count = data.draw(st.integers(1, 12))
    which = np.array([data.draw(st.integers(0, 1)) for _ in range(count)])
    inside = np.array([data.draw(st.integers(0, batches[b][1].num_rows - 1)) for b in which.tolist()])
    for number, column in enumerate(plan.columns):
        found = gather.take(column, which, inside, np.ones(count, np.int64))
        found.validate(full=True)
        assert found.type == OWN.kinds[number]
        pairs = zip(which.tolist(), inside.tolist(), strict=True)
        assert found.to_pylist() == [kept[b][number][place] for b, place in pairs]


def _lengths(column: pa.Array) -> list[int]:
    kind = column.type
    found = [len(column)]
    if isinstance(kind, pa.StructType):
        for place in range(kind.num_fields):
            found += _lengths(column.field(place))
    elif isinstance(kind, pa.MapType):
        found += [len(column.keys), len(column.keys), len(column.items)]
    elif isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType)):
        found += _lengths(column.values)
    return found


@pytest.mark.parametrize(
    ("least", "most", "kind"),
    [
        (0, 255, pa.uint8()),
        (0, 256, pa.uint16()),
        (-1, 127, pa.int8()),
        (-1, 128, pa.int16()),
        (-129, 0, pa.int16()),
        (0, 65_535, pa.uint16()),
        (-1, 65_535, pa.int32()),
        (0, 65_536, pa.uint32()),
        (0, 2**32 - 1, pa.uint32()),
        (-1, 2**31, pa.int64()),
        (0, 2**32, pa.int64()),
    ],
)
def test_the_narrowest_type_that_holds_both_ends(least: int, most: int, kind: pa.DataType) -> None:
    own = own_widths(pa.schema([("n", pa.list_(pa.int64()))]))
    widths = widths_for(own, ((least, most),))
    assert widths.kinds == (pa.list_(kind),)
    assert widths.holds(((least, most),))
    low, high = widths.limits[0]
    assert not widths.holds(((low, high + 1),))
    assert not widths.holds(((low - 1, high),))
    assert together(((-3, 5),), ((0, 9),)) == ((-3, 9),)


def test_what_stands_where_nothing_is_counts_for_nothing() -> None:
    numbers = pa.array([1, 1 << 40, 3], pa.int64())
    hidden = pa.Array.from_buffers(pa.int64(), 3, [pa.py_buffer(b"\x05"), numbers.buffers()[1]])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, None, 3]), pa.array([1, 1 << 40, 3], pa.int64()))
    columns = [hidden, lists.slice(0, 1)]
    own = own_widths(pa.schema([("a", pa.int64()), ("b", pa.list_(pa.int64()))]))
    widths = widths_for(own, bounds_of(columns))
    assert widths.kinds == (pa.uint8(), pa.list_(pa.uint8()))
    assert [one.to_pylist() for one in widths.narrow(columns)] == [[1, None, 3], [[1]]]


def test_a_head_with_a_flipped_bit_is_nobodys() -> None:
    widths = widths_for(OWN, bounds_of(columns_of([(None, 300, 3)])))
    assert read_widths(widths.head, OWN) == widths
    for head in (widths.head, OWN.head):
        for at in range(len(head)):
            for bit in (1, 4, 128):
                flipped = bytearray(head)
                flipped[at] ^= bit
                found = read_widths(bytes(flipped), OWN)
                # Without metadata the schema must be the fields' own, as ever.
                assert found is None or found is OWN, at


def test_heads_of_others_are_not_read() -> None:
    widths = widths_for(OWN, bounds_of(columns_of([(None, 300, 3)])))
    for fields in (
        [("row", KIND), ("n", pa.int32()), ("byte", pa.uint8())],
        [("row", KIND), ("m", pa.int64()), ("byte", pa.uint8())],
        [("row", KIND), ("n", pa.float64()), ("byte", pa.uint8())],
        [("row", KIND), ("n", pa.int64())],
    ):
        other = own_widths(pa.schema(fields))
        narrow = widths_for(other, tuple((0, 0) for _ in other.limits))
        assert read_widths(narrow.head, OWN) is None or fields[1] == ("n", pa.int32())
        assert read_widths(other.head, OWN) is None
    assert read_widths(b"", OWN) is None
    assert read_widths(widths.head[:-8], OWN) is None
    assert int_widths.read_widths(OWN.head, OWN) is OWN
    with pa.ipc.open_stream(widths.head + b"\xff\xff\xff\xff\0\0\0\0") as reader:
        assert reader.schema.metadata[b"expstore.types"].startswith(b'["struct<')
