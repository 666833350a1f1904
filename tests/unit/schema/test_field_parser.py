"""Fields given by dtypes, shapes and Arrow types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.errors import SchemaError
from expstore.schema.field_parser import schema_of
from expstore.schema.schema import Field, Schema


def test_types_by_key_are_a_schema() -> None:
    schema = schema_of(
        {
            "prompt": str,
            "blob": bytes,
            "tokens": ("int32", (None,)),
            "image": (torch.uint8, (3, None, None)),
            "state": (torch.float32, [4]),
            ("next", "reward"): float,
            "flag": bool,
            "info": {"n": "int64", "when": pa.timestamp("us"), ("deep", "er"): pa.list_(pa.string())},
            "half": torch.bfloat16,
            "count": np.dtype("uint16"),
        }
    )
    assert repr(schema) == (
        "Schema(prompt: string, blob: binary, tokens: int32[?], image: uint8[3, ?, ?], state: float32[4], "
        "next.reward: float64[], flag: bool[], info.n: int64[], info.when: timestamp[us], "
        "info.deep.er: list<string>, half: bfloat16[], count: uint16[])"
    )
    assert schema_of(schema) is schema


def test_invalid_types_are_refused() -> None:
    for given, words in [
        ("text", "'next.a': 'text' is no type"),
        (object, "is no type"),
        ("object", "is no type"),
        (("int32", (0,)), "no values"),
        (("int32", (None, "x")), "no type"),
        (("int32", (None, -1)), "no type"),
        (("int32", (None, True)), "no type"),
        (("int32", (None, 1.5)), "no type"),
        (("int32", (None, [1])), "no type"),
        (("int32", (None, 1 << 70)), "no type"),
        (("int32", (None,) * 70), "no type"),
        (("int32", (1.5,)), "'next.a' has '1.5' in its row shape; use integers"),
        (("int32", ("x",)), "has 'x' in its row shape"),
        (("int32", (-1,)), "has '-1' in its row shape"),
        (("int32", (True,)), "has 'True' in its row shape"),
        (("int32", ([1],)), r"has '\[1\]' in its row shape"),
        (("int32", (1,) * 64), "has 64 dims, and a row has at most 63"),
        (("int32", (1 << 15, (1 << 15) + 1)), "has 1,073,774,592 values per row, and 1,073,741,824 are"),
        (("int32", (10**20,)), "values per row"),
        (("text", (None,)), "is no type"),
        (pa.null(), "'next.a'"),
        (pa.uuid(), "'next.a'.*Arrow type"),
        (None, "is no type"),
        (3, "is no type"),
    ]:
        with pytest.raises(SchemaError, match=words):
            schema_of({"b": "int8", "next": {"a": given}})


def test_invalid_schemas_are_refused() -> None:
    with pytest.raises(TypeError, match="schema= takes"):
        schema_of([Field(("a",), "int8", ())])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="key of schema="):
        schema_of({3: "int8"})
    with pytest.raises(SchemaError):
        schema_of({})
    assert schema_of({"a": "int8"}) == Schema([Field(("a",), "int8", ())])


def test_stores_are_made_with_types(store_path: Path) -> None:
    with expstore.open(store_path, schema={"a": ("float32", (3,)), "next": {"reward": "float32"}}) as rb:
        assert repr(rb.storage.schema) == "Schema(a: float32[3], next.reward: float32[])"
        with pytest.raises(SchemaError, match="lacks 'next.reward'"):
            rb.extend(TensorDict({"a": torch.zeros(2, 3)}, [2]))
    with expstore.open(store_path, schema={"a": ("float32", (3,)), ("next", "reward"): torch.float32}) as rb:
        assert len(rb) == 0
