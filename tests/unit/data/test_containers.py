"""Containers of users are returned unchanged: TensorDicts, tensors, trees, tensorclasses, objects."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict, lazy_stack, tensorclass

import expstore
from expstore import ReplayBuffer, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer
from expstore.errors import SchemaError, StackError, StateError
from expstore.samplers import SamplerWithoutReplacement
from expstore.storages import LazyTensorStorage, ListStorage, MemoryStorage, Storage, ZarrStorage


@tensorclass
class Step:
    """A row of a class of its own."""

    observation: torch.Tensor
    reward: torch.Tensor


KINDS = ("memory", "zarr")


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return MemoryStorage(20) if request.param == "memory" else ZarrStorage(tmp_path / "run.exp", 20)


def tree(size: int, start: int = 0) -> dict[Any, Any]:
    numbers = torch.arange(start, start + size)
    return {
        "a": numbers[:, None],
        "with a space": (numbers + 0.5, [numbers.bool(), {"deep": numbers.to(torch.bfloat16)}]),
        30: torch.stack([numbers, -numbers], 1),
        "30": numbers.double(),
    }


def same(a: Any, b: Any) -> None:
    """Compare trees: containers, dtypes, shapes and values."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        [same(a[key], b[key]) for key in a]
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        [same(x, y) for x, y in zip(a, b, strict=True)]
    else:
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_batches_of_another_form_are_refused() -> None:
    tensors, pair = torch.arange(5).float(), (torch.zeros(2), torch.zeros(2))
    for first, other, words in (
        (tensors, TensorDict({"_data": torch.zeros(2)}, [2]), "keeps tensors, the batch is TensorDicts"),
        (tensors, torch.tensor(1.0), "use add"),
        (tree(6), pair, r"keeps trees \{'a': \., .*, the batch is trees \(\., \.\)"),
        (tree(6), {**tree(6), "30": torch.zeros(5)}, "field '30' has 5 rows, 'a' has 6 rows"),
        (tree(6), {"a": "text"}, "got str at 'a'; a ListStorage stores other kinds"),
        (tree(6), {1.5: torch.zeros(2)}, r"a tree has the key 1\.5; use text or integers"),
    ):
        with ReplayBuffer(storage=MemoryStorage(9)) as rb:
            rb.extend(first)
            with pytest.raises(SchemaError, match=words):
                rb.extend(other)
            same(rb[:], first)


def test_rows_with_other_fields_are_refused(storage: Storage) -> None:
    zero = torch.zeros(())
    one, other = TensorDict({"a": zero, "b": zero}), TensorDict({"a": zero, "c": zero})
    with TensorDictReplayBuffer(storage=storage) as rb:
        for batch in ([one, other], lazy_stack([one, other]), [one, one, other]):
            with pytest.raises(SchemaError, match="row [12] of the batch has no field 'b', row 0 has one"):
                rb.extend(batch)
        nested = [TensorDict({"n": one}), TensorDict({"n": other})]
        with pytest.raises(SchemaError, match=r"field 'n\.b'"):
            rb.extend(nested)
        assert len(rb) == 0


def test_fields_that_samples_of_other_buffers_carry_are_kept() -> None:
    data = TensorDict({"id": torch.arange(3), "priority_weight": torch.ones(3), "z": torch.zeros(3)}, [3])
    with TensorDictReplayBuffer(storage=MemoryStorage(9), batch_size=2) as rb:
        rb.extend(data)
        assert set(rb[:].keys()) == {"id", "priority_weight", "z"}
        rb.extend(rb.sample())  # its index is not taken in
    with TensorDictPrioritizedReplayBuffer(
        alpha=1, beta=1, storage=lambda: MemoryStorage(9), batch_size=2
    ) as rb:
        rb.extend(data)
        assert set(rb[:].keys()) == {"id", "z"}
        with pytest.raises(SchemaError, match="no 'index', which identifies its rows"):
            rb.update_tensordict_priority(TensorDict({"td_error": torch.ones(2)}, [2]))


def test_named_tuples_are_stacked() -> None:
    pair = namedtuple("pair", "x y")
    with ReplayBuffer(storage=ListStorage(9), batch_size=4) as rb:
        rb.extend([pair(torch.tensor(n), torch.ones(2)) for n in range(3)])
        batch = rb[:]
        assert isinstance(batch, pair)
        same(batch.x, torch.arange(3))


def test_a_tensorclass_comes_back_where_its_module_is_known(tmp_path: Path) -> None:
    data = Step(observation=torch.randn(5, 3), reward=torch.arange(5.0), batch_size=[5])
    with ReplayBuffer(storage=ZarrStorage(tmp_path / "run.exp", 20), batch_size=4) as rb:
        rb.extend(data)
        assert isinstance(rb.sample(), Step)
        assert isinstance(rb[2], Step)
        assert (rb[:] == data).all()
    # Read again by the name that the store keeps; nothing is imported for it.
    with ReplayBuffer(storage=ZarrStorage(tmp_path / "run.exp"), batch_size=4) as rb:
        assert isinstance(rb[0], Step) == (Step.__module__ in __import__("sys").modules)
    with expstore.open(tmp_path / "run.exp", batch_size=4) as again:
        again.extend(data.to_tensordict())  # a TensorDict may stand for it
        assert len(again) == 10


def test_an_unknown_class_is_read_as_a_tensordict(tmp_path: Path) -> None:
    @tensorclass
    class Local:
        a: torch.Tensor

    with ReplayBuffer(storage=ZarrStorage(tmp_path / "run.exp", 20)) as rb:
        rb.extend(Local(a=torch.arange(3), batch_size=[3]))
        assert isinstance(rb[:], Local)
    with ReplayBuffer(storage=ZarrStorage(tmp_path / "run.exp")) as rb:
        assert isinstance(rb[:], TensorDict)
        same(rb[:]["a"], torch.arange(3))


def test_values_other_than_tensors_are_stored() -> None:
    with TensorDictReplayBuffer(storage=MemoryStorage(10), batch_size=4) as rb:
        rb.extend(TensorDict({"a": torch.arange(3), "text": NonTensorData("all", batch_size=[3])}, [3]))
        rb.extend([TensorDict({"a": torch.tensor(3 + n), "text": text}) for n, text in enumerate("xy")])
        rb.add(TensorDict({"a": torch.tensor(5), "text": NonTensorData({"json": [1, 2]})}))
        assert list(rb[:]["text"]) == ["all", "all", "all", "x", "y", {"json": [1, 2]}]
        assert rb[4]["text"] == "y"
        batch = rb.sample()
        assert list(batch["text"]) == [rb[:]["text"][i] for i in batch["index"]]


def test_values_other_than_tensors_are_refused_on_disk(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        with pytest.raises(SchemaError, match="'text'.*ListStorage"):
            rb.extend(TensorDict({"a": torch.arange(2), "text": NonTensorData("all", batch_size=[2])}, [2]))
        rb.extend(TensorDict({"a": torch.arange(2)}, [2]))


@pytest.mark.some(4)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda rb: pickle.loads(pickle.dumps(rb))])
@pytest.mark.parametrize("generator", [None, 5])
@pytest.mark.parametrize("storage", [LazyTensorStorage, ListStorage, MemoryStorage])
def test_a_buffer_in_ram_is_copied_with_its_rows(
    storage: Callable[[int], Storage], generator: int | None, copied: Callable[[Any], Any]
) -> None:
    drawn = None if generator is None else torch.Generator().manual_seed(generator)
    first = ReplayBuffer(
        storage=storage(20), sampler=SamplerWithoutReplacement(), batch_size=4, prefetch=2, generator=drawn
    )
    first.extend([torch.tensor(number) for number in range(23)])
    first.sample()
    second = copied(first)
    assert type(second.storage) is type(first.storage)
    for _ in range(9):
        same(second.sample(), first.sample())
    second.extend([torch.tensor(50)])
    assert 50 in second[:]
    assert 50 not in first[:]  # each has rows of its own
    second.close()
    with pytest.raises(StateError, match="the store is closed"):
        pickle.dumps(second)


def test_rows_of_which_a_part_would_be_lost_are_refused() -> None:
    for rows in [
        [{"a": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.ones(1)}],
        [(torch.zeros(2),), (torch.ones(2), torch.ones(1))],
        [{"a": (torch.zeros(2),)}, {"a": (torch.ones(2), torch.ones(1))}],
        [torch.tensor(2**53 + 1), torch.tensor(0.5)],
        [np.int64(2**53 + 1), np.float64(0.5)],
    ]:
        rb = ReplayBuffer(storage=MemoryStorage(10))
        with pytest.raises(StackError, match="Stacking the elements of the list"):
            rb.extend(rows)
        assert len(rb) == 0


def test_rows_of_different_dtypes_are_stacked_if_nothing_is_lost() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(10))
    rb.extend([torch.tensor(2), torch.tensor(0.5)])
    assert rb[:].tolist() == [2, 0.5]


def test_keys_that_are_no_paths_have_names_of_their_own() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(10))
    tree = {
        "a/b": torch.zeros(2),
        "key0": torch.ones(2),
        1: torch.full((2,), 2.0),
        "1": torch.full((2,), 3.0),
    }
    rb.extend(tree)
    found = rb[:]
    assert {key: values.tolist() for key, values in found.items()} == {
        key: values.tolist() for key, values in tree.items()
    }


def test_arrays_that_torch_cannot_view_are_stored() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(10))
    rb.extend(np.arange(3)[::-1])
    rb.extend(np.array([7], ">i8"))
    rb.extend([np.array(8, ">i8"), np.int64(9)])
    assert rb[:].tolist() == [2, 1, 0, 7, 8, 9]
    with pytest.raises(SchemaError, match="masked elements"):
        rb.extend(np.ma.masked_array([1, 2], [True, False]))
