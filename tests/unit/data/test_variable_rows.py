"""Variable-length rows in every accepted form, and as they are returned."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorClass,
    TensorDict,
    lazy_stack,
)

from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.data.batch import Layout
from expstore.data.containers import take
from expstore.data.leaves import column_of_rows
from expstore.data.mappings import take_mapping
from expstore.errors import SchemaError, StackError
from expstore.schema.arrow_types import ragged_text, type_text
from expstore.schema.schema import ARROW, Field, Schema
from expstore.storages.memory import MemoryStorage
from expstore.storages.read_view import keys_for
from tests.support.flat_storages import flatten_dims
from tests.support.variable_length import TypedMemory, buffer, jagged, plain, rollouts


def typed(schema: Schema | None = None) -> TensorDictReplayBuffer:
    storage = TypedMemory(100)
    if schema is not None:
        storage.prepare(schema, keys_for(storage, schema))
    return TensorDictReplayBuffer(storage=storage, batch_size=4)


def trees() -> ReplayBuffer:
    return ReplayBuffer(storage=TypedMemory(100), batch_size=4)


# -- TensorDicts --------------------------------------------------------------------------------------


def test_extended_rows_are_read_back() -> None:
    rb = buffer()
    assert repr(rb.storage.schema) == (
        "Schema(prompt: string, tokens: int32[?], image: int64[?, ?], "
        "facts: struct<n: int64, tags: list<string>>,"
        " number: int64[], version: int64[], next.text: binary, next.reward: float32[1], next.done: bool[1])"
    )
    assert plain(rb[:]) == plain(rollouts(0, 40))
    assert plain(rb[7:9]) == plain(rollouts(7, 2))
    assert plain(rb[7].unsqueeze(0)) == plain(rollouts(7, 1))
    sample = rb.sample(16)
    assert plain(sample) == [plain(rollouts(n, 1))[0] for n in sample["number"].tolist()]


def test_samples_are_what_torchrl_users_have() -> None:
    sample = buffer().sample(6)
    assert isinstance(sample, TensorDict)
    assert isinstance(sample.get("prompt"), NonTensorStack)
    assert list(sample["prompt"]) == sample.get("prompt").tolist()
    tokens = sample["tokens"]
    assert tokens.layout is torch.jagged
    assert tokens.dtype is torch.int32
    lengths = tokens.offsets().diff()
    padded = tokens.to_padded_tensor(-1)
    assert padded.shape == (6, int(lengths.max()))
    for row, part, length in zip(padded, tokens.unbind(), lengths.tolist(), strict=True):
        assert row[:length].tolist() == part.tolist()
        assert (row[length:] == -1).all()
    assert [tuple(image.shape) for image in sample["image"].unbind()] == [
        (1 + n % 2, 2 + n % 3) for n in sample["number"].tolist()
    ]
    assert sample["image"].to_padded_tensor(-1).shape[0] == 6


FORMATS: dict[str, Any] = {
    "tensordict": lambda n: rollouts(0, n),
    "lazy stack": lambda n: lazy_stack([rollouts(i, 1)[0] for i in range(n)]),
    "list": lambda n: [rollouts(i, 1)[0] for i in range(n)],
    "nested lazy stack": lambda n: rollouts(0, n).set(
        "next", lazy_stack(list(rollouts(0, n)["next"].unbind(0)))
    ),
}


@pytest.mark.parametrize("form", FORMATS)
def test_rows_may_come_in_several_formats(form: str) -> None:
    rb = typed()
    rb.extend(FORMATS[form](9))
    assert plain(rb[:]) == plain(rollouts(0, 9))
    rb.add(rollouts(9, 1)[0])
    rb.extend(rollouts(10, 1))  # all of one shape: they fit what is there
    assert plain(rb[:]) == plain(rollouts(0, 11))


def test_time_and_lanes_of_lazy_stacks_are_rows() -> None:
    lanes = [rollouts(0, 3), rollouts(3, 3)]
    storage = TypedMemory(100)
    flatten_dims(storage)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=4)
    rb.extend(lazy_stack([lazy_stack(list(lane.unbind(0))) for lane in lanes]))
    assert plain(rb[:]) == plain(rollouts(0, 6))
    assert rb.sql("SELECT count(*) FROM sources").fetchall() == [(2,)]
    before = plain(rb[:])
    with pytest.raises(SchemaError, match="different batch sizes"):
        rb.extend(lazy_stack([rollouts(0, 3), rollouts(0, 2)]))
    assert plain(rb[:]) == before


def test_one_value_for_all_rows_and_lists_in_rows() -> None:
    rb = typed()
    batch = TensorDict({"a": "same", "tags": [["x", "y"], ["z", "w"], ["", "é"]], "b": torch.zeros(3)}, [3])
    rb.extend(batch)
    assert rb["a"] == ["same"] * 3
    assert rb["tags"] == [["x", "y"], ["z", "w"], ["", "é"]]
    rb.add(TensorDict({"a": "other", "tags": ["one"], "b": torch.zeros(())}))
    assert rb["tags"][3] == ["one"]
    row = rb[3]
    assert (row["a"], row["tags"]) == ("other", ["one"])


class Message(TensorClass):
    prompt: str
    tokens: torch.Tensor


def test_tensorclasses() -> None:
    rb = ReplayBuffer(storage=TypedMemory(100), batch_size=4)
    rb.extend(
        Message(
            prompt=NonTensorStack("a", None), tokens=jagged([torch.ones(2), torch.ones(3)]), batch_size=[2]
        )
    )
    rb.extend([Message(prompt=p, tokens=torch.ones(n), batch_size=[]) for n, p in enumerate("bc", 1)])
    found = rb[:]
    assert isinstance(found, Message)
    assert found.prompt == ["a", None, "b", "c"]
    assert found.tokens.offsets().tolist() == [0, 2, 5, 6, 8]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_both_layouts(layout: torch.layout) -> None:
    rows = [torch.arange(n * 3.0).reshape(n, 3) for n in (2, 0, 4)]
    rb = typed()
    rb.extend(TensorDict({"a": torch.nested.nested_tensor(rows, layout=layout)}, [3]))
    assert rb.storage.require_schema()[("a",)].arrow == ragged_text("float32", (None, 3))
    assert [row.tolist() for row in rb["a"].unbind()] == [row.tolist() for row in rows]
    kept = torch.nested.nested_tensor([torch.ones(1, 3)] * 2, layout=layout)
    rb.extend(TensorDict({"a": kept}, [2]))
    assert len(rb) == 5


@pytest.mark.some(4)
@pytest.mark.parametrize(
    "dtype",
    ["bool", "uint8", "int16", "int64", "uint16", "uint64", "float16", "bfloat16", "float64", "complex64"],
)
def test_tensors_of_every_dtype(dtype: str) -> None:
    kind = getattr(torch, dtype)
    rows = [torch.arange(n).to(kind) for n in (3, 1, 2)]
    images = [torch.arange(n * (n + 1)).reshape(n, n + 1).to(kind) for n in (3, 1, 2)]
    rb = typed()
    rb.extend(TensorDict({"a": NonTensorStack(*rows), "b": NonTensorStack(*images)}, [3]))
    for key, expected in (("a", rows), ("b", images)):
        found = rb[key].unbind()
        assert all(one.dtype is kind for one in found)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_samples_own_their_memory_and_so_does_the_store() -> None:
    rb = typed()
    tokens, numbers = torch.arange(6), torch.arange(4).reshape(2, 2)
    rb.extend(TensorDict({"a": torch.nested.nested_tensor_from_jagged(tokens, torch.tensor([0, 2, 6]))}, [2]))
    tokens += 100
    rb.extend(TensorDict({"a": numbers}, [2]))
    numbers += 100
    expected = [[0, 1], [2, 3, 4, 5], [0, 1], [2, 3]]
    assert [row.tolist() for row in rb["a"].unbind()] == expected
    for found in (rb[0]["a"], rb[:]["a"].values(), rb[1:3]["a"].values(), rb.sample()["a"].values()):
        found += 100
    assert [row.tolist() for row in rb["a"].unbind()] == expected


# -- trees --------------------------------------------------------------------------------------------


def test_a_list_in_a_tree_is_a_column() -> None:
    rb = trees()
    rb.extend(
        {
            "prompt": ["a", None, "c"],
            "tokens": [torch.arange(2), torch.arange(3), torch.arange(0)],
            "image": [np.zeros((1, 2)), np.ones((2, 1)), np.ones((1, 1))],
            "same": [np.zeros(2), np.ones(2), np.ones(2)],
            "number": [1, 2, 3],
            "pair": (torch.zeros(3), ["x", "y", "z"]),
            "tags": [["a"], [], None],
        }
    )
    assert [str(field) for field in rb.storage.require_schema().fields] == [
        *(
            "string",
            "int64[?]",
            "float64[?, ?]",
            "float64[2]",
            "int64[]",
            "float32[]",
            "string",
            "list<string>",
        )
    ]
    rows = [
        {
            "prompt": "d",
            "tokens": torch.arange(n),
            "image": np.zeros((n, n)),
            "same": np.zeros(2),
            "number": n,
        }
        | {"pair": (torch.tensor(1.0), "w"), "tags": ["b"] * n}
        for n in (1, 2)
    ]
    rb.extend(rows)
    rb.add(rows[0])
    found = rb[:]
    assert found["prompt"] == ["a", None, "c", "d", "d", "d"]
    assert found["tokens"].offsets().diff().tolist() == [2, 3, 0, 1, 2, 1]
    assert [tuple(one.shape) for one in found["image"].unbind()] == [
        (1, 2),
        (2, 1),
        (1, 1),
        (1, 1),
        (2, 2),
        (1, 1),
    ]
    assert found["number"].tolist() == [1, 2, 3, 1, 2, 1]
    assert found["pair"][1] == ["x", "y", "z", "w", "w", "w"]
    assert found["tags"] == [["a"], [], None, ["b"], ["b", "b"], ["b"]]
    one = rb[4]
    assert (one["prompt"], one["tags"], one["tokens"].tolist()) == ("d", ["b", "b"], [0, 1])
    assert rb[np.array([[0, 1], [2, 3]])]["prompt"] == [["a", None], ["c", "d"]]


def test_rows_may_be_texts_alone() -> None:
    rb = trees()
    rb.extend(["a", None])
    rb.add("é")
    assert rb[:] == ["a", None, "é"]
    assert rb[2] == "é"


def test_trees_that_are_not_rows_are_refused() -> None:
    for data, words in [
        ({"a": ["x", "y"], "b": torch.zeros(3)}, "field 'a' has 2 rows, 'b' has 3 rows"),
        ({"a": ["x", "y"], "b": ["z"]}, "field 'b' has 1 rows, 'a' has 2 rows"),
        ({"a": "x", "b": torch.zeros(3)}, "got str at 'a'"),
        ({"a": ["x", object()]}, "'a' has values that cannot be kept"),
        ({"a": [torch.zeros(2), None]}, "tensors in some rows and NoneType"),
        ({"a": [torch.zeros(2), torch.zeros(2, 2)]}, "tensors of different kinds"),
        ({"a": [torch.zeros(2), torch.zeros(3, dtype=torch.int64)]}, "tensors of different kinds"),
        ([{"a": "x"}, {"a": "y", "b": 1}], "not all rows have"),
    ]:
        rb = trees()
        with pytest.raises((SchemaError, StackError), match=words):
            rb.extend(data)
        assert len(rb) == 0
        assert rb.storage.schema is None


def test_without_types_a_list_in_a_tree_is_still_a_tree() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(10), batch_size=2)
    rb.extend({"a": [torch.zeros(3), torch.ones(3)]})
    assert [one.tolist() for one in rb[0]["a"]] == [0.0, 1.0]
    with pytest.raises(SchemaError, match="expected a TensorDict"):
        rb.extend({"a": ["x", "y", "z"]})


def test_without_types_values_stay_objects() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(10), batch_size=2)
    thing = object()
    rb.extend(TensorDict({"a": NonTensorStack(thing, "x"), "b": jagged([torch.ones(1), torch.ones(2)])}, [2]))
    assert [str(field) for field in rb.storage.require_schema().fields] == ["object[]", "float32[?]"]
    assert rb[0]["a"] is thing
    schema = Schema([Field(("a",), ARROW, (), '"string"')])
    kept = MemoryStorage(10)
    kept.prepare(schema, keys_for(kept, schema))
    rb = TensorDictReplayBuffer(storage=kept, batch_size=2)
    rb.extend(TensorDict({"a": NonTensorStack("y", None)}, [2]))
    assert rb["a"] == ["y", None]


# -- what types are inferred, and what does not fit ----------------------------------------------------


def test_a_first_batch_of_nothing_says_what_to_do() -> None:
    for values in [[None, None], [[], []], [{"a": None}, {"a": None}]]:
        rb = typed()
        batch = TensorDict(
            {"x": torch.zeros(2), "next": {"a": NonTensorStack(*map(NonTensorData, values))}}, [2]
        )
        with pytest.raises(SchemaError, match=r"'next\.a' has only None") as found:
            rb.extend(batch)
        assert "schema=" in found.value.hint
        assert rb.storage.schema is None
        full = (
            {"a": "b"}
            if values[0] and isinstance(values[0], dict)
            else ["b"]
            if values[0] is not None
            else "b"
        )
        rb.extend(TensorDict({"x": torch.zeros(1), "next": {"a": NonTensorStack(NonTensorData(full))}}, [1]))
        rb.extend(batch)
        assert list(rb["next", "a"])[1:] == values


def test_a_schema_says_what_batches_cannot() -> None:
    schema = Schema(
        [
            Field(("a",), ARROW, (), '{"list":"string"}'),
            Field(("tokens",), ARROW, (), ragged_text("int64", (None,))),
            Field(("n",), ARROW, (), type_text(__import__("pyarrow").float32())),
        ]
    )
    rb = typed(schema)
    rb.extend(
        TensorDict(
            {"a": NonTensorStack(None), "tokens": torch.zeros(1, 3, dtype=torch.int32), "n": [None]}, [1]
        )
    )
    rb.extend(
        TensorDict({"a": NonTensorStack(NonTensorData([])), "tokens": torch.zeros(1, 5), "n": [2]}, [1]).set(
            "tokens", torch.zeros(1, 5, dtype=torch.int64)
        )
    )
    assert rb["a"] == [None, []]
    assert rb["tokens"].offsets().tolist() == [0, 3, 8]
    assert rb["n"] == [None, 2.0]


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prompt", [1, 2], r"'prompt': expected string, got int64"),
        ("prompt", NonTensorStack(b"x", b"y"), r"'prompt': expected string, got binary"),
        (
            "facts",
            NonTensorStack({"n": 1, "new": 2}, {"n": 1}),
            r"'facts': expected struct<.*got struct<.*new",
        ),
        ("facts", NonTensorStack({"n": "x"}, None), r"'facts': expected struct<"),
        ("facts", NonTensorStack(object(), None), r"'facts' has values that cannot be kept"),
        ("tokens", torch.zeros(2, 4), r"'tokens': expected int32\[\?\], got float32\[4\]"),
        (
            "tokens",
            jagged([torch.zeros(1, 2), torch.zeros(2, 2)]),
            r"'tokens': expected int32\[\?\], got float32",
        ),
        ("tokens", NonTensorStack("x", "y"), r"'tokens': expected int32\[\?\], got string"),
        (
            "number",
            jagged([torch.zeros(1), torch.zeros(2)]),
            r"'number': expected int64\[\], got float32\[\?\]",
        ),
        ("number", NonTensorStack("x", "y"), r"'number': expected int64\[\], got string"),
        ("number", NonTensorStack(None, None), r"'number': expected int64\[\], got None"),
    ],
)
def test_refused_calls_change_nothing(field: str, value: Any, words: str) -> None:
    rb = buffer()
    before, bad = plain(rb[:]), rollouts(40, 2).exclude(field).set(field, value)
    for act in (lambda: rb.extend(bad), lambda: rb.__setitem__(slice(0, 2), bad)):
        with pytest.raises(SchemaError, match=words):
            act()
    assert plain(rb[:]) == before
    rb.extend(rollouts(40, 2))
    assert plain(rb[:]) == plain(rollouts(0, 42))


@pytest.mark.parametrize("lazy", [False, True])
def test_rows_of_other_fields_are_refused(lazy: bool) -> None:
    rows = [rollouts(0, 1)[0], rollouts(1, 1)[0]]
    del rows[1]["next", "text"]
    rb = typed()
    with pytest.raises(SchemaError, match=r"next\.text"):
        rb.extend(lazy_stack(rows) if lazy else rows)
    assert len(rb) == 0


def test_storages_of_fixed_size_say_where_others_go(store_path: Any) -> None:
    import expstore

    with expstore.open(store_path, capacity=10) as rb:
        for batch in (
            TensorDict({"a": jagged([torch.ones(1), torch.ones(2)])}, [2]),
            lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (1, 2)]),
            [TensorDict({"a": torch.ones(n)}) for n in (1, 2)],
            TensorDict({"a": ["x", "y"]}, [2]),
        ):
            with pytest.raises(SchemaError, match="no fixed size|objects") as found:
                rb.extend(batch)
            assert "arrow" in found.value.hint
        rb.extend(TensorDict({"a": torch.ones(1, 2)}, [1]))
        with pytest.raises(SchemaError, match=r"expected float32\[2\], got float32\[\?\]"):
            rb.extend(lazy_stack([TensorDict({"a": torch.ones(n)}) for n in (1, 2)]))


# -- laws ---------------------------------------------------------------------------------------------

VALUES = {
    "text": st.none() | st.text(max_size=5),
    "bytes": st.none() | st.binary(max_size=5),
    "float": st.none() | st.floats(),
    "ints": st.none() | st.lists(st.integers(-(2**40), 2**40), max_size=4),
    "nested": st.none()
    | st.fixed_dictionaries({"é": st.lists(st.none() | st.text(max_size=2), max_size=2), "n": st.booleans()}),
}


def alike(first: Any, second: Any) -> bool:
    if isinstance(first, float) and isinstance(second, float):
        return first == second or (math.isnan(first) and math.isnan(second))
    return type(first) is type(second) and first == second


@pytest.mark.slow
@given(st.data())
def test_batches_of_any_values_come_back(data: st.DataObject) -> None:
    storage = TypedMemory(64)
    rb = TensorDictReplayBuffer(storage=storage, batch_size=4)
    first = {"text": "a", "bytes": b"a", "float": 0.5, "ints": [1], "nested": {"é": ["a"], "n": True}}
    expected: list[tuple[dict[str, Any], list[float]]] = [(first, [0.5])]
    pending = [expected[0]]
    for _ in range(data.draw(st.integers(1, 3))):
        stacked = {name: NonTensorStack(*[NonTensorData(row[name]) for row, _ in pending]) for name in VALUES}
        tokens = jagged([torch.tensor(numbers, dtype=torch.float64) for _, numbers in pending])
        rb.extend(TensorDict({**stacked, "tokens": tokens}, [len(pending)]))
        rows = st.tuples(st.fixed_dictionaries(VALUES), st.lists(st.floats(), max_size=4))
        pending = data.draw(st.lists(rows, min_size=1, max_size=5))
        expected += pending
    expected = expected[: len(expected) - len(pending)]
    found = rb[:]
    for row, (values, numbers) in zip(found.unbind(0), expected, strict=True):
        assert all(alike(row.get(name).data, value) for name, value in values.items())
        assert row["tokens"].numpy().tobytes() == np.array(numbers, np.float64).tobytes()
    assert not isinstance(found, LazyStackedTensorDict)


def test_rows_in_two_dims() -> None:
    rb = TensorDictReplayBuffer(storage=TypedMemory(12, ndim=2), batch_size=4)
    prompts = [[f"{time} {lane}" for lane in range(3)] for time in range(2)]
    batch = TensorDict({"prompt": prompts, "n": torch.arange(6).reshape(2, 3)}, [2, 3])
    rb.extend(batch.transpose(0, 1))  # time is the last dim
    rb.add(TensorDict({"prompt": ["2 0", None, "2 2"], "n": torch.arange(6, 9)}, [3]))
    assert [list(row) for row in rb[:].transpose(0, 1)["prompt"]] == [*prompts, ["2 0", None, "2 2"]]
    sample = rb.sample()
    texts = [None if n == 7 else f"{n // 3} {n % 3}" for n in sample["n"].tolist()]
    assert list(sample["prompt"]) == texts
    rb = typed()
    with pytest.raises(SchemaError, match="nested tensor, whose first dim is rows"):
        rb.add(TensorDict({"n": jagged([torch.ones(1)] * 2)}))


def test_leaves_of_dicts_and_trees_share_their_rows() -> None:
    words, frames, tokens = list("abcdef"), torch.zeros(3, 2), jagged([torch.ones(1)] * 2)
    layout = Layout(ndim=2, typed=True)
    for take_leaves in (take_mapping, take):
        for data in ({"words": words, "frames": frames}, {"frames": frames, "words": words}):
            batch = take_leaves(data, layout)
            assert (batch.count, batch.dims, batch.lane_count) == (6, (2,), 2)
        with pytest.raises(SchemaError, match=r"'words' has 5 rows, 'frames' has rows of shape \[3, 2\]"):
            take_leaves({"words": words[1:], "frames": frames}, layout)
        with pytest.raises(SchemaError, match="'tokens' has 2 rows, 'words' has 6 rows"):
            take_leaves({"words": words, "tokens": tokens}, layout)
        with pytest.raises(SchemaError, match=r"'a' has shape \[3\], and dim 1 is time"):
            take_leaves({"a": torch.zeros(3)}, Layout(dim=1))
        with pytest.raises(SchemaError, match="'tokens' is a nested tensor, whose first dim is rows"):
            take_leaves({"tokens": tokens}, Layout(typed=True), single=True)


def test_objects_keep_their_masks() -> None:
    masked = np.ma.masked_array([1, 2], [False, True])
    column, dtype = column_of_rows(("a",), [masked, "text"], typed=False)
    assert dtype == "object"
    assert column[0] is masked
    with pytest.raises(SchemaError, match="masked elements"):
        column_of_rows(("a",), [masked, masked], typed=True)
