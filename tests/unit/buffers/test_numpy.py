"""Rows in and out as NumPy arrays: the same rows, episodes and batches as with TensorDicts, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import SchemaError
from expstore.samplers import PrioritizedSampler, RandomSampler, SamplerWithoutReplacement, SliceSampler
from expstore.storages.memory import MemoryStorage


def rows(first: int, count: int) -> dict[str, Any]:
    """Rows that follow from their number; an episode has seven steps."""
    numbers = np.arange(first, first + count)
    ends = numbers % 7 == 6
    return {
        "observation": np.stack([numbers, -numbers], 1).astype(np.float32),
        "action": numbers,
        "next": {
            "observation": np.stack([numbers + 1, -numbers - 1], 1).astype(np.float32),
            "reward": numbers.astype(np.float64)[:, None],
            "done": ends[:, None],
            "terminated": ends[:, None],
            "truncated": np.zeros((count, 1), bool),
        },
    }


def one(data: dict[str, Any], place: int = 0) -> dict[str, Any]:
    return {
        name: one(value, place) if isinstance(value, dict) else value[place] for name, value in data.items()
    }


def tensordict(data: dict[str, Any], count: int) -> TensorDict:
    found = {
        name: tensordict(value, count) if isinstance(value, dict) else torch.from_numpy(value)
        for name, value in data.items()
    }
    return TensorDict(found, [count])


def same(found: Any, expected: Any, where: str = "") -> None:
    """Hold nested dicts of arrays against a TensorDict."""
    assert set(found) == set(expected.keys()), where
    for name, values in found.items():
        if isinstance(values, dict):
            same(values, expected[name], f"{where}.{name}")
        else:
            wanted = expected[name].numpy()
            assert isinstance(values, np.ndarray)
            assert (values.dtype, values.shape) == (wanted.dtype, wanted.shape), name
            np.testing.assert_array_equal(values, wanted, err_msg=name)


def open_store(path: Path, **options: Any) -> TensorDictReplayBuffer:
    return expstore.open(path, capacity=100, batch_size=8, seed=3, **options)


@pytest.fixture
def rb(tmp_path: Path) -> Iterator[TensorDictReplayBuffer]:
    with open_store(tmp_path / "a.exp") as found:
        found.extend(rows(0, 40))
        yield found


@pytest.fixture
def no_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a TensorDict is built, or an array becomes a tensor."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a tensor was made")

    monkeypatch.setattr(TensorDict, "_new_unsafe", refuse)
    monkeypatch.setattr(TensorDict, "__init__", refuse)


# -- in ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["flat", "auto"])
def test_dicts_are_stored_as_tensordicts_are(tmp_path: Path, layout: str) -> None:
    with open_store(tmp_path / "a.exp", layout=layout) as ours:
        with open_store(tmp_path / "b.exp", layout=layout) as theirs:
            for first in range(0, 150, 30):
                data = rows(first, 30)
                assert ours.extend(data).tolist() == theirs.extend(tensordict(data, 30)).tolist()
                data = one(rows(first + 1000, 1))
                ours.add(data)
                theirs.add(tensordict(rows(first + 1000, 1), 1)[0])
            assert ours.schema == theirs.schema
            assert (ours[:] == theirs[:]).all()
            asked = "SELECT episode_id, length, return FROM episodes ORDER BY episode_id"
            assert ours.sql(asked).fetchall() == theirs.sql(asked).fetchall()


def test_no_tensordict_is_built_of_a_dict(rb: TensorDictReplayBuffer, no_tensors: None) -> None:
    rb.extend(rows(40, 5))
    rb.add(one(rows(45, 1)))


@pytest.mark.parametrize("keeps", [MemoryStorage(100), MemoryStorage(100, ndim=2)], ids=["one dim", "two"])
def test_dims_that_make_rows(keeps: MemoryStorage) -> None:
    rb = TensorDictReplayBuffer(storage=keeps, batch_size=4)
    if keeps.ndim == 1:
        rb.extend(rows(0, 6))
        assert rb.storage.shape == (6,)
        return
    data = {"a": np.arange(24).reshape(4, 3, 2), "b": np.arange(12).reshape(4, 3)}
    assert rb.extend(data).shape == (12, 2)
    np.testing.assert_array_equal(rb[:]["a"].numpy(), data["a"])


def test_rows_one_by_one_and_in_lists(rb: TensorDictReplayBuffer) -> None:
    data = rows(40, 3)
    rb.extend([one(data, place) for place in range(3)])
    rb.add(one(data, 0))
    np.testing.assert_array_equal(rb["action"].numpy(), [*range(43), 40])


def test_names_with_dots_are_paths(tmp_path: Path) -> None:
    flat = {name: values for name, values in rows(0, 3).items() if name != "next"}
    flat |= {f"next.{name}": values for name, values in rows(0, 3)["next"].items()}
    with open_store(tmp_path / "a.exp") as rb:
        rb.extend(flat)
        rb.extend(flat | {"next": {}})
        rb.add(one(flat))
        assert set(rb.sample(as_numpy=True)["next"]) == set(rows(0, 1)["next"])
        assert len(rb) == 7
    with open_store(tmp_path / "b.exp") as rb:  # a field whose name has a dot keeps it
        rb.extend(TensorDict({"a.b": torch.arange(3)}, [3]))
        rb.extend({"a.b": np.arange(3, 5)})
        rb.extend(rb.sample(as_numpy=True))
        assert rb.schema.keys == (("a.b",),)


def test_pythons_own_numbers_take_the_dtype_of_the_field(rb: TensorDictReplayBuffer) -> None:
    row = one(rows(40, 1))
    row["next"] |= {"reward": [0.1], "done": [False]}
    row["action"] = 7
    for data in (row, dict(reversed(row.items()))):  # the second needs the longer way
        rb.add(data)
        last = rb[len(rb) - 1]
        assert last["next", "reward"].tolist() == [0.1]  # not the next float32
        assert int(last["action"]) == 7
    rb.add(row | {"action": torch.tensor(8)})
    rb.extend(rows(5, 1) | {"action": [9]})
    assert rb["action"].tolist()[-2:] == [8, 9]


def test_a_number_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "a.exp") as rb:
        rb.add({"a": 1.0, "b": 1})
        for value in (1e300, 2**63 + 1, "text", None):
            for field in ("a", "b"):
                with pytest.raises(SchemaError):
                    rb.add({"a": 2.0, "b": 2} | {field: value})
        rb.add({"a": float("inf"), "b": 3})
        assert rb["a"].tolist() == [1.0, float("inf")]


@pytest.mark.parametrize("single", [True, False])
def test_the_bits_of_bfloat16_are_no_values_of_it(tmp_path: Path, single: bool) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=10) as rb:
        for _ in range(2):  # the first rows fix what later ones are compared with
            rb.extend(TensorDict({"a": torch.ones(2, 3, dtype=torch.bfloat16)}, [2]))
        bits = torch.ones((3,) if single else (1, 3), dtype=torch.uint16)
        write = rb.add if single else rb.extend
        for data in ({"a": bits.numpy()}, TensorDict({"a": bits}, [] if single else [1])):
            with pytest.raises(SchemaError, match="uint16"):
                write(data)
        assert rb[:]["a"].tolist() == [[1.0] * 3] * 4


def test_the_first_batch_fixes_the_fields(tmp_path: Path) -> None:
    with open_store(tmp_path / "a.exp") as rb:
        rb.add({"a": 1, "b": 2.5, "c": True, "d": np.float64(1), "e": np.arange(3, dtype=">i2")})
        found = {field.key[0]: (field.dtype, field.shape) for field in rb.schema.fields}
        np.testing.assert_array_equal(rb[0]["e"].numpy(), [0, 1, 2])  # though its bytes came the other way
    assert found == {
        "a": ("int64", ()),
        "b": ("float32", ()),
        "c": ("bool", ()),
        "d": ("float64", ()),
        "e": ("int16", (3,)),
    }


def test_rows_are_replaced_by_dicts(rb: TensorDictReplayBuffer) -> None:
    rb[3:5] = rows(90, 2)
    rb[7] = one(rows(99, 1))
    assert rb["action"].tolist()[:8] == [0, 1, 2, 90, 91, 5, 6, 99]


def test_transforms_see_tensordicts(tmp_path: Path) -> None:
    class Double:
        def inv(self, data: TensorDict) -> TensorDict:
            return data.set("action", 2 * data["action"])

        def forward(self, data: TensorDict) -> TensorDict:
            return data.set("half", data["action"] / 2)

        __call__ = forward

    with open_store(tmp_path / "a.exp", batches={"transform": Double()}) as rb:
        rb.extend(rows(0, 5))
        rb.add(one(rows(5, 1)))
        batch = rb.sample(as_numpy=True)
        assert set(batch["action"].tolist()) <= {0, 2, 4, 6, 8, 10}
        np.testing.assert_array_equal(batch["half"], batch["action"] / 2)


def test_fields_without_a_fixed_size(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", layout="arrow", capacity=50, batch_size=6, seed=1) as rb:
        rb.extend(
            {"text": ["a", None, "ccc"], "tokens": [np.arange(n) for n in (1, 2, 3)], "n": np.arange(3)}
        )
        rb.extend(
            {"text": np.array(["x", "y"]), "tokens": [np.arange(4), np.arange(0)], "n": np.arange(3, 5)}
        )
        rb.add({"text": "last", "tokens": np.arange(2), "n": 5})
        batch = rb.sample(64, as_numpy=True)
        texts, sizes = ["a", None, "ccc", "x", "y", "last"], [1, 2, 3, 4, 0, 2]
        assert batch["text"].tolist() == [texts[n] for n in batch["n"]]
        assert [row.tolist() for row in batch["tokens"]] == [[*range(sizes[n])] for n in batch["n"]]


#: First batches that cannot be stored, and a word of the reason.
WRONG: list[tuple[Any, str]] = [
    ({}, "has no fields"),
    ({3: np.arange(2)}, "name 3"),
    ({"a": np.float32(1), "b": np.arange(2)}, r"'a' has shape \[\].*add\(\)"),
    ({"a": np.arange(2), "b": {"c": np.arange(3)}}, "'b.c' has 3 rows, 'a' has 2 rows"),
    ({"a": np.arange(2, dtype=np.complex128)}, "'a' has dtype complex128"),
    ({"a": "text"}, r"'a' has type str: extend\(\) takes one value per row"),
    ({"a": 2**70}, "'a' has type int: extend"),
    ({"a": [2**70]}, "'a' has objects"),
    ([{"a": [[1], [1, 2]]}, {"a": [[1], [1, 2]]}], "'a' has objects"),
    ({"a": [1.0, 1e300]}, "'a' is float32, and .* does not fit"),
    ({"a.b": np.arange(2), "a": {"b": np.arange(2)}}, "'a.b' occurs twice"),
    ([{"a": 1}, 5], "row 1 has type int, row 0 is a dict"),
    ([{"a": 1, "b": 2}, {"a": 1}], "row 1 has other fields than row 0"),
]


def test_unstorable_batches_change_nothing(tmp_path: Path) -> None:
    with open_store(tmp_path / "a.exp") as rb:
        for data, message in WRONG:
            with pytest.raises(SchemaError, match=message):
                rb.extend(data)
            assert rb.schema is None
        rb.extend({"a": np.arange(2), "b": np.arange(2)})


def test_rows_that_do_not_fit_are_refused(rb: TensorDictReplayBuffer) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"action": np.arange(3) / 2}, "'action': expected int64.* got float64, which may lose values"),
        ({"more": np.arange(3)}, "unknown 'more'"),
        ({"next": np.arange(3)}, "'next'"),
        ({"action": [1.5, 2, 3]}, "'action': expected int64"),
        ({"observation": np.zeros((3, 4), np.float32)}, r"'observation': expected float32\[2\]"),
    ]
    for change, message in wrong:
        with pytest.raises(SchemaError, match=message):
            rb.extend(rows(0, 3) | change)
    assert len(rb) == 40


def test_transforms_see_the_dims_that_make_rows() -> None:
    seen: list[tuple[int, ...]] = []

    class Look:
        def inv(self, data: TensorDict) -> TensorDict:
            seen.append(tuple(data.batch_size))
            return data

        def forward(self, data: TensorDict) -> TensorDict:
            return data

        __call__ = forward

    data = np.arange(24).reshape(4, 3, 2)
    stored: list[Any] = []
    for make in (dict, lambda rows: TensorDict({"a": torch.from_numpy(rows["a"])}, rows["a"].shape[:-1])):
        storage = MemoryStorage(24, ndim=2)
        rb = TensorDictReplayBuffer(storage=storage, transform=Look(), dim_extend=0)
        rb.extend(make({"a": data}))
        rb.add(make({"a": data[0]}))
        rb[1:3] = make({"a": -data[1:3]})
        stored.append(rb[:]["a"].tolist())
    assert seen[:3] == seen[3:]
    assert stored == [[data[0].tolist(), *(-data[1:3]).tolist(), data[3].tolist(), data[0].tolist()]] * 2


class Foreign:
    """An array of another library, as JAX has them."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self._values, dtype)


def test_arrays_of_other_libraries_are_taken(rb: TensorDictReplayBuffer) -> None:
    rb.extend(rows(40, 2) | {"action": Foreign(np.array([40, 41]))})
    assert rb["action"].tolist() == [*range(42)]


def test_a_dict_may_contain_tensordicts_and_tensors(rb: TensorDictReplayBuffer) -> None:
    data = rows(40, 3)
    rb.extend(data | {"next": tensordict(data["next"], 3), "action": torch.arange(40, 43)})
    np.testing.assert_array_equal(rb["next", "reward"].numpy()[:, 0], np.arange(43))


def test_a_buffer_of_trees_keeps_dicts_as_trees() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(10), batch_size=2)
    rb.extend({"a": np.arange(3), 1: (np.arange(3), np.arange(3))})
    assert isinstance(rb.sample(), dict)
    found = rb.sample(as_numpy=True)
    assert isinstance(found["a"], np.ndarray)
    assert isinstance(found[1], tuple)


def test_a_buffer_of_trees_over_a_store_of_tensordicts_takes_dicts(rb: TensorDictReplayBuffer) -> None:
    ReplayBuffer(storage=rb.storage, batch_size=2).extend(rows(40, 2))
    assert rb["action"].tolist() == [*range(42)]


# -- tables of Arrow's ------------------------------------------------------------------------------------


def table(first: int, count: int) -> pa.Table:
    numbers = np.arange(first, first + count)
    floats = pa.array(np.stack([numbers, -numbers], 1).astype(np.float32).reshape(-1))
    ends = pa.array(numbers % 7 == 6)
    return pa.table(
        {
            "observation": pa.FixedSizeListArray.from_arrays(floats, 2),
            "action": numbers,
            "next.observation": pa.FixedSizeListArray.from_arrays(floats, 2),
            "next.reward": numbers.astype(np.float64),
            "next.done": ends,
            "next.terminated": ends,
            "next.truncated": pa.array(np.zeros(count, bool)),
        }
    )


@pytest.mark.parametrize("kind", ["table", "batch", "reader", "chunks"])
def test_arrow_tables(rb: TensorDictReplayBuffer, kind: str) -> None:
    data = table(40, 10)
    made = {
        "table": lambda: data,
        "batch": lambda: data.to_batches()[0],
        "reader": lambda: data.to_reader(),
        "chunks": lambda: pa.concat_tables([data.slice(0, 4), data.slice(4)]),
    }[kind]()
    assert rb.extend(made, return_ids=True).tolist() == [*range(41, 51)]
    assert rb["action"].tolist() == [*range(50)]
    assert rb[45]["observation"].tolist() == [45, -45]
    assert rb.sql("SELECT count(*) FROM episodes").fetchall() == [(8,)]


def test_tables_that_do_not_fit(rb: TensorDictReplayBuffer) -> None:
    data = table(40, 2)
    for wrong, message in (
        (data.drop_columns(["action"]), "column 'action' is missing"),
        (data.append_column("more", pa.array([1, 2])), "column 'more' is not a field"),
        (data.set_column(1, "action", pa.array([1.5, 2])), "column 'action' is double"),
        (data.set_column(1, "action", pa.array([1, None])), "'action' has rows without a value"),
        (data.select([]), "no columns"),
    ):
        with pytest.raises(SchemaError, match=message):
            rb.extend(wrong)
    with pytest.raises(SchemaError, match="add\\(\\) takes a single row"):
        rb.add(data)
    assert len(rb) == 40


# -- out -------------------------------------------------------------------------------------------------

SAMPLERS = {
    "uniform": RandomSampler,
    "prioritized": lambda: PrioritizedSampler(100, 0.7, 0.5),
    "without replacement": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=4),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_batches_are_the_same(tmp_path: Path, name: str, prefetch: int) -> None:
    found: list[list[Any]] = []
    for as_numpy in (True, False):
        with open_store(
            tmp_path / f"{as_numpy}.exp", sampler=SAMPLERS[name](), batches={"prefetch": prefetch}
        ) as rb:
            rb.extend(rows(0, 40))
            found.append([rb.sample(8, return_info=True, as_numpy=as_numpy) for _ in range(5)])
    for (arrays, info), (batch, told) in zip(*found, strict=True):
        same(arrays, batch)
        assert list(info) == list(told)
        for key, values in info.items():
            np.testing.assert_array_equal(values, told[key])
            assert not isinstance(values, torch.Tensor)


def test_flags_that_the_rows_lack_are_in_the_batch(tmp_path: Path) -> None:
    found: list[Any] = []
    for as_numpy in (True, False):
        with open_store(tmp_path / f"{as_numpy}.exp", sampler=SliceSampler(slice_len=4)) as rb:
            data = rows(0, 40)
            data["next"] = {name: data["next"][name] for name in ("observation", "reward", "done")}
            rb.extend(data)
            found.append(rb.sample(8, as_numpy=as_numpy))
    assert "truncated" in found[0]["next"]
    same(*found)


def test_a_change_of_kind_skips_no_draw(tmp_path: Path) -> None:
    drawn: list[list[int]] = []
    for kinds in ((False, True, True, False, True), (False,) * 5):
        with open_store(tmp_path / f"{len(drawn)}.exp", batches={"prefetch": 2}) as rb:
            rb.extend(rows(0, 40))
            batches = [rb.sample(as_numpy=kind) for kind in kinds]
        assert [isinstance(batch, dict) for batch in batches] == [*kinds]
        drawn.append([n for batch in batches for n in batch["action"].tolist()])
    assert drawn[0] == drawn[1]


def test_no_tensor_is_made_for_a_batch(rb: TensorDictReplayBuffer, no_tensors: None) -> None:
    batch = rb.sample(as_numpy=True)
    np.testing.assert_array_equal(batch["observation"][:, 0], batch["action"])
    assert rb.sample(as_numpy=True, return_info=True)[1]["id"].dtype == np.int64


def test_arrays_own_their_memory(rb: TensorDictReplayBuffer) -> None:
    first = rb.sample(as_numpy=True)
    copy = {name: values.copy() for name, values in first.items() if name != "next"}
    for _ in range(20):
        rb.sample(as_numpy=True)["action"][:] = -1
    for name, values in copy.items():
        np.testing.assert_array_equal(first[name], values)
    assert -1 not in rb["action"].tolist()


def test_info_can_be_left_out(rb: TensorDictReplayBuffer) -> None:
    assert list(rb.sample(as_numpy=True, include_info=False)) == ["observation", "action", "next"]


def test_bfloat16_becomes_float32(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.25, 3.0, 1e30]).bfloat16()
    with open_store(tmp_path / "a.exp") as rb:
        rb.extend(TensorDict({"a": values, "n": torch.arange(4)}, [4]))
        batch = rb.sample(as_numpy=True)
        assert batch["a"].dtype == np.float32
        np.testing.assert_array_equal(batch["a"], values.float().numpy()[batch["n"]])
        seen = ReplayBuffer(storage=rb.storage, batch_size=4, transform=lambda batch: batch)
        batch = seen.sample(as_numpy=True)
        np.testing.assert_array_equal(batch["a"], values.float().numpy()[batch["n"]])


def test_collation_is_done_before(rb: TensorDictReplayBuffer) -> None:
    own = ReplayBuffer(storage=rb.storage, batch_size=4, collate_fn=lambda batch: (batch["action"], "text"))
    actions, text = own.sample(as_numpy=True)
    assert isinstance(actions, np.ndarray)
    assert text == "text"
