"""Types of variable-length fields: their text, and which columns fit them."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

from expstore.errors import SchemaError
from expstore.schema.arrow_types import (
    Ragged,
    check_text,
    describe,
    ragged_of,
    ragged_text,
    to_type,
    type_text,
)
from expstore.schema.casting import fit_arrow
from expstore.schema.schema import ARROW, Field, Schema, arrow_dtype

TYPES = [
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.bool_(),
    pa.float16(),
    pa.int64(),
    pa.list_(pa.int32()),
    pa.large_list(pa.large_binary()),
    pa.list_(pa.list_(pa.float32(), 3)),
    pa.struct([("a", pa.int8()), ("b c", pa.list_(pa.string()))]),
    pa.map_(pa.string(), pa.int64()),
    pa.timestamp("us"),
    pa.timestamp("us", "Europe/Berlin"),
    pa.time32("s"),
    pa.time64("us"),
    pa.duration("ns"),
    pa.date32(),
    pa.decimal128(10, 2),
    pa.decimal256(50, -3),
    pa.binary(16),
]


def test_the_text_of_a_type_stands_for_it() -> None:
    for kind in TYPES:
        text = type_text(kind)
        check_text(text)
        assert to_type(text).equals(kind)
        assert type_text(to_type(text)) == text
        assert ragged_of(text) is None


def test_types_that_no_field_can_have_are_refused() -> None:
    for kind in [
        pa.null(),
        pa.list_(pa.null()),
        pa.dictionary(pa.int8(), pa.string()),
        pa.string_view(),
        pa.struct([("a", pa.null())]),
    ]:
        with pytest.raises(SchemaError) as caught:
            type_text(kind)
        assert caught.value.hint


def test_texts_that_stand_for_no_type_are_refused() -> None:
    for text in [
        "", "int32", '"int3"', '{"list":"bool_"}', '{"pair":"int8"}', '{"list":"int8","map":1}',
        '{"fixed":["int8",0]}', '{"ragged":["int32",[3]]}', '{"ragged":["string",[null]]}',
        '{"ragged":["int32",[null,-1]]}', '"timestamp[min]"', "[]", "7",
    ]:  # fmt: skip
        with pytest.raises(SchemaError, match="no type of a field"):
            check_text(text)
        with pytest.raises(SchemaError):
            Schema([Field(("a",), ARROW, (), text)])


def test_tensors_of_any_length_lie_as_lists_or_with_their_shapes() -> None:
    for dtype, shape, kind, words in [
        ("int32", (None,), pa.list_(pa.int32()), "int32[?]"),
        ("bool", (None,), pa.list_(pa.bool_()), "bool[?]"),
        ("uint8", (None, 84, 3), pa.list_(pa.list_(pa.list_(pa.uint8(), 3), 84)), "uint8[?, 84, 3]"),
        ("bfloat16", (None,), pa.list_(pa.uint16()), "bfloat16[?]"),
        ("complex64", (None, 5), pa.list_(pa.list_(pa.list_(pa.float32(), 2), 5)), "complex64[?, 5]"),
        (
            "float32",
            (3, None),
            pa.struct([("data", pa.list_(pa.float32())), ("shape", pa.list_(pa.int32(), 2))]),
            "float32[3, ?]",
        ),
        (
            "int64",
            (None, None, 2),
            pa.struct([("data", pa.list_(pa.int64())), ("shape", pa.list_(pa.int32(), 3))]),
            "int64[?, ?, 2]",
        ),
    ]:
        text = ragged_text(dtype, shape)
        assert to_type(text).equals(kind)
        assert describe(text) == words
        assert ragged_of(text) == Ragged(dtype, shape)


@pytest.mark.some(4)
@pytest.mark.parametrize("shape", [(None,), (None, 3), (None, None), (2, None)])
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float16"])
def test_rows_of_one_shape_fit_tensors_of_any(dtype: str, shape: tuple[int | None, ...]) -> None:
    sizes = tuple(4 if size is None else size for size in shape)
    rows = np.random.default_rng(0).integers(0, 2, (5, *sizes)).astype(dtype)
    text = ragged_text(dtype, shape)
    fitted = fit_arrow(("a",), text, rows)
    fitted.validate(full=True)
    assert fitted.type.equals(to_type(text))
    assert len(fitted) == 5
    flat = (fitted if ragged_of(text).is_list else fitted.field("data")).flatten()
    while isinstance(flat, pa.FixedSizeListArray):
        flat = flat.flatten()
    values = flat.to_numpy(zero_copy_only=False)
    expected = rows.reshape(-1)
    np.testing.assert_array_equal(values, expected.view(np.float32) if dtype == "complex64" else expected)
    if not ragged_of(text).is_list:
        assert fitted.field("shape").to_pylist() == [list(sizes)] * 5


def struct(data: list[list[float]], shapes: list[list[int]]) -> pa.Array:
    return pa.StructArray.from_arrays(
        [pa.array(data, pa.list_(pa.float32())), pa.array(shapes, pa.list_(pa.int32(), 2))],
        ["data", "shape"],
    )


def test_columns_that_do_not_fit_are_refused_by_name() -> None:
    for text, column in [
        ('{"list":"int32"}', pa.array(["a"])),
        ('{"list":"int8"}', pa.array([[300]])),
        ('"int64"', pa.array([1.5])),
        ('"string"', np.zeros((2, 3))),
        ('{"list":"float32"}', np.zeros((2,), object)),
        (ragged_text("int32", (None,)), pa.array([[1, None]], pa.list_(pa.int32()))),
        (ragged_text("int32", (None, 3)), np.zeros((2, 4, 2), np.int32)),
        (ragged_text("int32", (None,)), np.zeros((2, 4, 2), np.int32)),
        (ragged_text("float32", (None, None)), struct([[1.0, 2.0]], [[1, 3]])),
        (ragged_text("float32", (None, 3)), struct([[1.0, 2.0]], [[1, 2]])),
        (ragged_text("float32", (3, None)), struct([[1.0, 2.0]], [[1, 2]])),
        (ragged_text("float32", (None, None)), struct([[1.0, 2.0]], [[-1, -2]])),
        (ragged_text("float32", (None, None)), struct([[]], [[-1, 0]])),
        (ragged_text("float32", (2, None)), np.zeros((2, 3, 4), np.float32)),
        ('"string"', ["a"]),
    ]:
        with pytest.raises(SchemaError, match=r"next\.text"):
            fit_arrow(("next", "text"), text, column)


def test_columns_are_cast_where_nothing_is_lost() -> None:
    fitted = fit_arrow(("a",), '{"list":"int64"}', pa.array([[1], None, []], pa.list_(pa.int16())))
    assert fitted.to_pylist() == [[1], None, []]
    assert fit_arrow(("a",), '"string"', pa.nulls(2)).to_pylist() == [None, None]
    assert fit_arrow(("a",), '"string"', pa.chunked_array([["a"], ["b"]])).to_pylist() == ["a", "b"]


def test_bits_of_bfloat16_fit_that_alone() -> None:
    bits = np.arange(6, dtype=np.uint16).reshape(2, 3)
    fitted = fit_arrow(("a",), ragged_text("bfloat16", (None,)), bits, "bfloat16")
    assert fitted.to_pylist() == bits.tolist()
    assert fit_arrow(("a",), ragged_text("uint16", (None,)), bits).to_pylist() == bits.tolist()
    for text, dtype in (
        (ragged_text("bfloat16", (None,)), "uint16"),
        (ragged_text("uint16", (None,)), "bfloat16"),
        ('{"list":"uint16"}', "bfloat16"),
    ):
        with pytest.raises(SchemaError):
            fit_arrow(("a",), text, bits, dtype)


TEXT = type_text(pa.string())
SCHEMA = Schema.infer({("a",): ("float32", (2,)), ("text",): (arrow_dtype(TEXT), ())})


def test_a_schema_keeps_the_type_and_fits_columns_to_it() -> None:
    field = SCHEMA[("text",)]
    assert (field.dtype, field.arrow, field.variable, field.row_bytes, field.shape) == (
        ARROW,
        TEXT,
        True,
        0,
        (),
    )
    assert str(field) == "string"
    assert SCHEMA.variable == (("text",),)
    assert SCHEMA.row_bytes == 8
    again = Schema.from_json(json.loads(json.dumps(SCHEMA.to_json())))
    assert again == SCHEMA
    assert again != Schema.infer({("a",): ("float32", (2,)), ("text",): (arrow_dtype('"binary"'), ())})
    rows = pa.array(["x", None])
    for keys in ([("a",), ("text",)], [("text",), ("a",)]):
        given = {("a",): ("float32", np.zeros((2, 2), np.float32)), ("text",): (arrow_dtype(TEXT), rows)}
        found = SCHEMA.arrange(keys, [given[key][0] for key in keys], [given[key][1] for key in keys])
        assert found[1].equals(rows)
    with pytest.raises(SchemaError, match="'a': expected float32"):
        SCHEMA.arrange(SCHEMA.keys, [arrow_dtype('{"list":"float32"}')] * 2, [rows, rows])


def test_fields_that_contradict_themselves_are_refused() -> None:
    for field in [
        Field(("a",), ARROW, (2,), TEXT),
        Field(("a",), "int8", (), TEXT),
        Field(("a",), ARROW, ()),
    ]:
        with pytest.raises(SchemaError):
            Schema([field])


def test_schemas_with_such_fields_are_read_without_pyarrow() -> None:
    code = (
        "import sys; from expstore.schema.schema import Schema; "
        f"schema = Schema.from_json({SCHEMA.to_json()!r}); print(schema); "
        "assert 'pyarrow' not in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "Schema(a: float32[2], text: string)"
