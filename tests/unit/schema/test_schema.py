"""The schema: accepted names and dtypes, and matching batches."""

from __future__ import annotations

import json

import numpy as np
import pytest

from expstore.errors import CorruptionError, SchemaError
from expstore.schema.schema import DTYPES, Field, Schema

BASIC = Schema(
    [
        Field(("observation",), "float32", (3,)),
        Field(("action",), "int64", ()),
        Field(("next", "reward"), "bfloat16", (1,)),
    ]
)


def columns(n: int = 2) -> dict[tuple[str, ...], tuple[str, np.ndarray]]:
    return {
        ("observation",): ("float32", np.ones((n, 3), np.float32)),
        ("action",): ("int64", np.arange(n)),
        ("next", "reward"): ("bfloat16", np.zeros((n, 1), np.uint16)),
    }


def arrange(given: dict[tuple[str, ...], tuple[str, np.ndarray]], **options: bool) -> list[np.ndarray]:
    return BASIC.arrange(
        list(given), [d for d, _ in given.values()], [a for _, a in given.values()], **options
    )


def test_names_that_are_not_paths_are_refused() -> None:
    for key in [
        ("",), ("a/b",), ("..",), (".",), ("zarr.json",), ("_row",), ("_rows", "x"), ("__x",), (" a",),
        ("a ",), ("ä",), ("a\n",), ("a\0",), ("x" * 101,), ("next", ".."), ("next", "a\\b"),
    ]:  # fmt: skip
        with pytest.raises(SchemaError, match="key ") as caught:
            Schema([Field(key, "int8", ())])
        assert repr(key) in str(caught.value)
        assert caught.value.hint


def test_names_that_are_paths() -> None:
    for key in [("a",), ("A-b_c.d",), ("_x",), ("next", "__y"), ("x" * 100,), ("0",), ("c",)]:
        assert Schema([Field(key, "int8", ())]).keys == (key,)


def test_names_that_clash_are_refused() -> None:
    for first, second in [
        (("Obs",), ("obs",)), (("next", "A"), ("Next", "a")), (("a.b",), ("a", "b")),
        (("a",), ("a", "b")), (("a", "b", "c"), ("a", "b")), (("A",), ("a", "b")),
    ]:  # fmt: skip
        for keys in ((first, second), (second, first)):
            with pytest.raises(SchemaError, match=r"one name|both a field and a group"):
                Schema(Field(key, "int8", ()) for key in keys)


def test_fields_that_cannot_be_stored() -> None:
    with pytest.raises(SchemaError, match="complex128.*supported are bool"):
        Schema([Field(("a",), "complex128", ())])
    with pytest.raises(SchemaError, match="at least one field"):
        Schema([])
    with pytest.raises(SchemaError, match=r"'a'.*\[2, 0\]"):
        Schema([Field(("a",), "int8", (2, 0))])


def test_sizes() -> None:
    assert [field.row_bytes for field in BASIC.fields] == [12, 8, 2]
    assert BASIC.row_bytes == 22
    assert Field(("a",), "complex64", (3, 84, 84)).row_items == 3 * 84 * 84
    assert Field(("next", "reward"), "int8", ()).path == "next/reward"
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()}["bfloat16"] == 2


def test_json_keeps_it() -> None:
    text = json.dumps(BASIC.to_json())
    assert Schema.from_json(json.loads(text)) == BASIC
    assert Schema.from_json(json.loads(text)).keys == BASIC.keys
    for damaged in ([{"key": ["a"]}], [{"key": ["a"], "dtype": "int3", "shape": []}], 5, [[]]):
        with pytest.raises(CorruptionError, match="schema"):
            Schema.from_json(damaged)


def test_order_of_fields_does_not_make_another_schema() -> None:
    turned = Schema(reversed(BASIC.fields))
    assert turned == BASIC
    assert hash(turned) == hash(BASIC)
    assert turned != Schema(BASIC.fields[:2])
    assert BASIC != 3
    assert BASIC.place(("action",)) == 1
    assert BASIC.place(("nothing",)) == -1
    assert ("action",) in BASIC
    assert "action" not in BASIC


def test_arrange_puts_columns_in_order_and_copies_nothing_that_fits() -> None:
    given = columns()
    turned = dict(reversed(given.items()))
    for batch in (given, turned):
        found = arrange(batch)
        assert all(np.shares_memory(a, b) for a, (_, b) in zip(found, given.values(), strict=True))


@pytest.mark.parametrize("fast", [True, False])
def test_arrange_makes_columns_contiguous(fast: bool) -> None:
    given = columns(4)
    given["observation",] = ("float32", np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2])
    if not fast:
        given = dict(reversed(given.items()))
    observation = arrange(given)[0]
    assert observation.flags.c_contiguous
    np.testing.assert_array_equal(observation[1], [6, 8, 10])


def test_arrange_names_missing_and_unknown_fields() -> None:
    given = columns()
    del given["action",]
    given["next", "done"] = ("bool", np.zeros((2, 1), bool))
    with pytest.raises(
        SchemaError, match=r"lacks 'action' and has unknown 'next.done'.*observation: float32\[3\]"
    ):
        arrange(given)
    given = columns()
    given["extra",] = ("bool", np.zeros(2, bool))
    with pytest.raises(SchemaError, match="has unknown 'extra'"):
        arrange(given)


def test_arrange_takes_a_part() -> None:
    given = {("action",): columns()["action",]}
    assert np.shares_memory(arrange(given, partial=True)[0], given["action",][1])
    with pytest.raises(SchemaError, match="lacks 'observation', 'next.reward'"):
        arrange(given)


def test_arrange_refuses_what_does_not_fit() -> None:
    observation, action, reward = ("observation",), ("action",), ("next", "reward")
    for key, dtype, values, message in [
        (observation, "float32", np.ones((2, 4), np.float32), r"float32\[3\], got float32\[4\]"),
        (observation, "float32", np.ones((2,), np.float32), r"got float32\[\]"),
        (observation, "float64", np.ones((2, 3)), "got float64.*lose.*convert it to float32"),
        (action, "int64", np.ones((2, 1), np.int64), r"int64\[\], got int64\[1\]"),
        (action, "float32", np.ones(2, np.float32), "got float32"),
        (action, "uint64", np.ones(2, np.uint64), "got uint64"),
        (reward, "uint16", np.ones((2, 1), np.uint16), "bfloat16.*got uint16"),
        (reward, "float16", np.ones((2, 1), np.float16), "got float16"),
    ]:
        given = columns() | {key: (dtype, values)}
        for batch in (given, dict(reversed(given.items()))):
            with pytest.raises(SchemaError, match=f"'{'.'.join(key)}'.*{message}"):
                arrange(batch)


def test_arrange_widens_without_loss() -> None:
    given = columns()
    given["observation",] = ("uint8", np.full((2, 3), 200, np.uint8))
    given["action",] = ("int32", np.array([-5, 7], np.int32))
    observation, action, _ = arrange(given)
    assert observation.dtype == np.float32
    assert action.dtype == np.int64
    np.testing.assert_array_equal(observation[0], [200, 200, 200])
    np.testing.assert_array_equal(action, [-5, 7])
    given["action",] = ("bfloat16", np.zeros(2, np.uint16))
    with pytest.raises(SchemaError, match="got bfloat16"):
        arrange(given)


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_integers_that_floats_would_round_are_refused(dtype: str) -> None:
    schema = Schema([Field(("x",), "float64", ())])
    exact = np.array([2**53, 2**60, 3], dtype)
    assert schema.arrange([("x",)], [dtype], [exact])[0].tolist() == [2.0**53, 2.0**60, 3.0]
    with pytest.raises(SchemaError, match=rf"'x': expected float64\[\], got {dtype} with 9007199254740993"):
        schema.arrange([("x",)], [dtype], [np.array([1, 2**53 + 1], dtype)])
