"""Python values as columns are returned unchanged, or refused."""

from __future__ import annotations

import datetime
import functools
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.errors import SchemaError
from expstore.schema.arrow_types import to_type, type_text
from expstore.schema.arrow_values import column_of

UTC = datetime.UTC
LEAVES = {
    "text": st.text(max_size=6),
    "bytes": st.binary(max_size=6),
    "int": st.integers(-(2**63), 2**63 - 1),
    "float": st.floats(),
    "flag": st.booleans(),
    "date": st.dates(),
    "time": st.datetimes(min_value=datetime.datetime(1700, 1, 1), max_value=datetime.datetime(2200, 1, 1)),
}


@functools.cache
def shapes(depth: int) -> st.SearchStrategy[Any]:
    """Return strategies for the values of one field: all of one kind, None among them."""
    leaf = st.sampled_from(sorted(LEAVES)).map(lambda name: st.none() | LEAVES[name])
    if depth == 0:
        return leaf
    inner = shapes(depth - 1)
    lists = inner.map(lambda one: st.none() | st.lists(one, max_size=3))
    names = st.lists(st.text("abä ", min_size=1, max_size=2), min_size=1, max_size=3, unique=True)
    dicts = names.flatmap(
        lambda keys: st.tuples(*(inner for _ in keys)).map(
            lambda parts: st.none() | st.fixed_dictionaries(dict(zip(keys, parts, strict=True)))
        )
    )
    return leaf | lists | dicts


def same(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return (first == second and math.copysign(1, first) == math.copysign(1, second)) or (
            math.isnan(first) and math.isnan(second)
        )
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    return type(first) is type(second) and first == second


@given(st.data())
def test_values_come_back_as_they_were(data: st.DataObject) -> None:
    values = data.draw(st.lists(data.draw(shapes(2)), max_size=6))
    column = column_of(("field",), values)
    assert same(column.to_pylist(), values)
    try:
        text = type_text(column.type)
    except SchemaError:
        return  # nothing but None somewhere
    assert to_type(text).equals(column.type)


@pytest.mark.guarantee("rows/refused")
def test_lossy_values_are_refused() -> None:
    for values, words in [
        ([object()], "object"),
        (["a", 1], "cannot be kept"),
        ([1, "a"], "cannot be kept"),
        ([True, 1], "cannot be kept"),
        ([1, True], "cannot be kept"),
        (["a", b"a"], "bytes in others"),
        ([b"a", "a"], "bytes in others"),
        ([["a"], [b"a"]], "bytes in others"),
        ([{"n": ["a"]}, {"n": [b"a"]}], "bytes in others"),
        ([{1, 2}], "set has no order"),
        ([[{"n": frozenset({1})}]], "frozenset has no order"),
        ([{}], "empty dict"),
        ([[{}]], "empty dict"),
        ([{1: 2}], "cannot be kept"),
        ([[1], 1], "cannot be kept"),
        ([2**64], "cannot be kept"),
        ([2**53 + 1, 0.5], "cannot be kept"),
        (["\ud800"], "cannot be kept"),
        ([1j], "cannot be kept"),
        ([np.zeros((2, 2))], "cannot be kept"),
        ([{b"n": 1}], "names in a dict must be text"),
        ([[{"n": 1, b"n": 2}]], "names in a dict must be text"),
        ([datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1, 12)], "dates in some rows, datetimes in"),
        ([datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 1, tzinfo=UTC)], "with a time zone and"),
        ([datetime.datetime(2020, 1, 1, tzinfo=UTC), datetime.datetime(2020, 1, 1)], "with a time zone and"),
        (
            [{"n": [datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 1, tzinfo=UTC)]}],
            "with a time zone and without",
        ),
        ([datetime.time(12, tzinfo=UTC)], "a time of day with a time zone"),
        ([{"n": np.ma.masked_array([1, 2], [0, 1])}], "masked elements"),
    ]:
        with pytest.raises(SchemaError, match=words) as found:
            column_of(("next", "text"), values)
        assert "next.text" in str(found.value)


def test_lists_without_end_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(SchemaError, match="deep"):
        column_of(("a",), [endless])


def test_moments_are_kept_whatever_their_zones() -> None:
    zone = datetime.timezone(datetime.timedelta(hours=2))
    moments = [
        datetime.datetime(2020, 1, 1, 12, tzinfo=UTC),
        datetime.datetime(2020, 1, 1, 12, tzinfo=zone),
        None,
    ]
    assert column_of(("a",), moments).to_pylist() == moments
    rows = [
        {
            "a": datetime.datetime(2020, 1, 1),
            "b": datetime.datetime(2020, 1, 1, tzinfo=UTC),
            "c": datetime.date(2020, 1, 1),
        }
    ]
    assert column_of(("a",), rows).to_pylist() == rows


def test_missing_values_of_pandas_are_refused() -> None:
    missing = pytest.importorskip("pandas").NaT
    for value in (datetime.date(2020, 1, 1), datetime.datetime(2020, 1, 1)):
        with pytest.raises(SchemaError, match="cannot be kept"):
            column_of(("a",), [value, missing])


def test_tuples_missing_members_and_numbers_are_converted() -> None:
    assert column_of(("a",), [(1, 2), None]).to_pylist() == [[1, 2], None]
    assert column_of(("a",), [{"x": 1}, {"y": "b"}]).to_pylist() == [
        {"x": 1, "y": None},
        {"x": None, "y": "b"},
    ]
    assert column_of(("a",), [1, 2.5]).to_pylist() == [1.0, 2.5]
    assert column_of(("a",), [np.arange(2, dtype=np.int16)]).type == pa.list_(pa.int16())
    assert column_of(("a",), [None, None]).type == pa.null()
    assert column_of(("a",), []).to_pylist() == []
