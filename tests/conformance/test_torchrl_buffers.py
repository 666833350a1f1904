"""Buffers behave like TorchRL's: the same programs report the same with both libraries.

Sampled values differ, so only their shapes are compared; everything else must be equal.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch.utils._pytree import tree_map

from tests.support.torchrl_pair import OURS, Teller, numbers, same

TENSOR_STORAGES = ("LazyTensorStorage", "LazyMemmapStorage")
STORAGES = (*TENSOR_STORAGES, "ListStorage")
BUFFERS = ("ReplayBuffer", "TensorDictReplayBuffer")


def as_taken(data: TensorDict, storage: str, buffer: str = "ReplayBuffer") -> Any:
    """Return rows as a buffer of that kind takes many of them in TorchRL."""
    return list(data.unbind(0)) if storage == "ListStorage" and buffer == "ReplayBuffer" else data


def made(lib: Any, storage: str, size: int, buffer: str = "ReplayBuffer", **more: Any) -> Any:
    if storage == "ListStorage":
        more.setdefault("collate_fn", torch.stack)
    return getattr(lib, buffer)(storage=getattr(lib, storage)(size), **more)


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("size", [3, 5, 100])
def test_extending_goes_round(tmp_path: Path, size: int, storage: str, buffer: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = made(lib, storage, size, buffer)
        tell(len(rb), rb.write_count)
        for first, count in ((0, 5), (5, 1), (6, 4), (10, 2)):
            tell(rb.extend(as_taken(numbers(first, count), storage, buffer)))
            tell(len(rb), rb.write_count, rb[:]["x"], len(rb.storage))

    same(program, tmp_path)


@pytest.mark.parametrize("storage", STORAGES)
def test_adding_goes_round(tmp_path: Path, storage: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = made(lib, storage, 3)
        for row in numbers(0, 5):
            tell(rb.add(row), len(rb), rb.write_count)
        tell(rb[:]["x"], rb.sample(2).batch_size)

    same(program, tmp_path)


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize("storage", STORAGES)
def test_emptying_begins_anew(tmp_path: Path, storage: str, buffer: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = made(lib, storage, 4, buffer, batch_size=2)
        tell.fails(rb.sample, "Cannot sample from an empty storage")
        for first in (0, 10):
            rb.extend(as_taken(numbers(first, 3), storage, buffer))
            tell(len(rb), rb[:]["x"])
            rb.empty()
            tell(len(rb))
            tell.fails(rb.sample, "Cannot sample from an empty storage")

    same(program, tmp_path)


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_are_read_by_index(tmp_path: Path, storage: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = made(lib, storage, 10)
        rb.extend(as_taken(numbers(0, 6), storage))
        tell(rb[2], rb[:4], rb[3:], rb[1:5:2], rb[5:], rb[:])
        tell(rb[torch.tensor([4, 0, 4])], rb[[1, 2]], rb[range(2)])
        tell(rb[:]["deep", "y"])

    same(program, tmp_path)


@pytest.mark.parametrize("storage", TENSOR_STORAGES)
def test_rows_are_replaced_by_index(tmp_path: Path, storage: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = made(lib, storage, 10)
        rb.extend(numbers(0, 6))
        rb[1] = numbers(100, 1)[0]
        rb[2:4] = numbers(200, 2)
        rb[torch.tensor([5, 0])] = numbers(300, 2)
        tell(rb[:], len(rb), rb.write_count)
        tell(rb.extend(numbers(6, 4)))
        rb[:] = numbers(400, 10)
        tell(rb["x"], rb["deep", "y"], len(rb))

    same(program, tmp_path)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize("size", [9, 10, 11])
def test_iterations_have_as_many_batches(tmp_path: Path, size: int, prefetch: int, drop_last: bool) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(
            storage=lib.LazyTensorStorage(size),
            sampler=lib.SamplerWithoutReplacement(drop_last=drop_last),
            batch_size=2,
            prefetch=prefetch,
        )
        rb.extend(torch.arange(size))
        for _ in range(3):
            batches = list(rb)
            tell(sorted(len(batch) for batch in batches))  # TorchRL's threads pass one another
            seen = torch.cat(batches).sort().values
            tell(len(seen.unique()), seen if not drop_last or size % 2 == 0 else len(seen))

    same(program, tmp_path)


def test_iterations_end_where_one_breaks_off(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(
            storage=lib.ListStorage(10), sampler=lib.SamplerWithoutReplacement(), batch_size=3
        )
        rb.extend(list(torch.arange(10)))
        for wanted in (2, 9):
            count = 0
            for count, batch in enumerate(rb, 1):
                tell(len(batch))
                if count == wanted:
                    break
            tell(count)
        endless = lib.ReplayBuffer(storage=lib.ListStorage(10), batch_size=3)
        endless.extend(list(torch.arange(10)))
        tell(sum(1 for _, _ in zip(range(50), endless, strict=False)))

    same(program, tmp_path)


def test_batch_sizes_that_are_missing_or_contradict(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.ListStorage(10), sampler=lib.SamplerWithoutReplacement())
        rb.extend(list(torch.zeros(10)))
        tell(len(rb.sample(3)))
        tell.fails(lambda: next(iter(rb)), "Batch_size was not specified")
        tell.fails(rb.sample, "batch_size not specified")
        strict = lib.SamplerWithoutReplacement(drop_last=True)
        tell.fails(
            lambda: lib.ReplayBuffer(storage=lib.ListStorage(10), sampler=strict),
            "Samplers with drop_last=True must work with a predictable batch-size",
        )
        rb = lib.ReplayBuffer(
            storage=lib.ListStorage(10), sampler=lib.SamplerWithoutReplacement(drop_last=True), batch_size=11
        )
        rb.extend(list(torch.zeros(10)))
        tell.fails(rb.sample, "is greater than the storage capacity")
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=4)
        rb.extend(torch.arange(10))
        tell(len(rb.sample()), rb.batch_size)

    same(program, tmp_path)


def test_empty_batches_add_nothing(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10))
        rb.extend(numbers(0, 2))
        tell(rb.extend(numbers(0, 0)).numel(), len(rb), rb.write_count)

    same(program, tmp_path)


#: Rows of every form: what one extends by, and what one adds.
FORMATS: dict[str, tuple[Any, Any]] = {
    "tensor": (torch.arange(12).reshape(4, 3), torch.arange(3)),
    "numbers": (torch.arange(4.0), torch.tensor(7.0)),
    "dict": ({"a": torch.arange(4), 30: torch.ones(4, 2)}, {"a": torch.tensor(9), 30: torch.zeros(2)}),
    "tuple": (
        (torch.arange(4), [torch.zeros(4, 1), {"b": torch.ones(4)}]),
        (torch.tensor(9), [torch.zeros(1), {"b": torch.tensor(1.0)}]),
    ),
    "tensordict": (numbers(0, 4), numbers(9, 1)[0]),
}


@pytest.mark.parametrize("storage", TENSOR_STORAGES)
@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_any_form_come_back(tmp_path: Path, form: str, storage: str) -> None:
    many, one = FORMATS[form]

    def program(lib: Any, tell: Teller) -> None:
        rb = made(lib, storage, 6)
        tell(rb.extend(many), rb.add(one), len(rb))
        tell(rb[0], rb[1:4], rb[:])
        sample = rb.sample(5)
        tell(
            tree_map(lambda leaf: (leaf.shape, str(leaf.dtype)), sample)
            if form != "tensordict"
            else sample.shape
        )

    same(program, tmp_path)


def test_lists_are_rows_and_tuples_are_trees(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10))
        tell(rb.extend([torch.full((2,), number) for number in range(3)]), rb[:])
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10))
        tell(rb.extend((torch.zeros(3, 2), torch.ones(3))), rb[:], rb[1])
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10))
        rows = [(torch.full((2,), n), {"a": torch.tensor(n)}, [torch.tensor([n])]) for n in range(4)]
        tell(rb.extend(rows), rb[:], rb[3])
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(100))
        tell(rb.extend([TensorDict({"a": torch.ones(2, 3)}, [2])]), len(rb), rb[:].shape)
        tell.fails(
            lambda: lib.ReplayBuffer(storage=lib.LazyTensorStorage(10)).extend(
                [torch.zeros(4), torch.zeros(1)]
            ),
            "Stacking the elements of the list resulted in an error",
        )

    same(program, tmp_path)


@pytest.mark.parametrize("storage", TENSOR_STORAGES)
@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    ],
)
def test_dtypes_are_kept(tmp_path: Path, dtype: torch.dtype, storage: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = made(lib, storage, 10, "TensorDictReplayBuffer")
        rb.extend(TensorDict({"a": torch.tensor([[0, 1], [1, 0], [1, 1]]).to(dtype)}, [3]))
        tell(rb["a"], rb.sample(4)["a"].dtype, rb[0]["a"])

    same(program, tmp_path)


@pytest.mark.parametrize("buffer", BUFFERS)
def test_samples_carry_what_they_carry(tmp_path: Path, buffer: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = made(lib, "LazyTensorStorage", 10, buffer, batch_size=4)
        rb.extend(numbers(0, 10))
        batch, info = rb.sample(return_info=True)
        tell(sorted(batch.keys(True, True), key=str), batch.shape, sorted(set(info) - {"id"}))
        tell(info["index"].dtype, info["index"].shape, bool((info["index"] == batch["x"]).all()))
        tell(rb.sample(7).shape)

    same(program, tmp_path)


def test_what_samples_carry_can_be_left_out(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=4)
        rb.extend(TensorDict({"x": torch.arange(10)}, [10]))
        tell("index" in rb.sample(include_info=True), sorted(rb.sample(include_info=None).keys()))
        if lib.name == "expstore":  # TorchRL's rows have an index as a field
            batch, info = rb.sample(3, return_info=True, include_info=False)
            assert (sorted(batch.keys()), batch.shape, set(info)) == (["x"], (3,), {"index", "id"})
            assert sorted(rb.sample(include_info=False).keys()) == ["x"]

    same(program, tmp_path)


@pytest.mark.parametrize("storage", ["ListStorage", "LazyTensorStorage"])
def test_rows_may_be_trajectories(tmp_path: Path, storage: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(storage=getattr(lib, storage)(5), batch_size=3)
        rb.extend(TensorDict({"x": torch.arange(12).reshape(3, 4)}, [3, 4]))
        batch = rb.sample()
        tell(batch.shape, batch["index"].shape, bool((batch["index"] == batch["x"] // 4).all()), len(rb))

    same(program, tmp_path)
    rb = OURS.TensorDictPrioritizedReplayBuffer(
        alpha=0.7, beta=0.9, storage=getattr(OURS, storage)(5), batch_size=3
    )
    rb.extend(TensorDict({"x": torch.arange(12).reshape(3, 4)}, [3, 4]))
    batch = rb.sample()
    assert batch["priority_weight"].shape == (3, 4)
    rb.update_tensordict_priority(batch.set("td_error", torch.rand(3, 4)))
    assert rb.sample().shape == (3, 4)


def test_parts_are_exchanged(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        storages = lib.LazyTensorStorage(10), lib.LazyTensorStorage(10)
        samplers = lib.RandomSampler(), lib.SamplerWithoutReplacement()
        writers = lib.RoundRobinWriter(), lib.RoundRobinWriter()
        rb = lib.ReplayBuffer(storage=storages[0], sampler=samplers[0], writer=writers[0], batch_size=2)
        rb.extend(torch.arange(4))
        tell(rb.set_sampler(samplers[1]) is samplers[0], rb.sampler is samplers[1])
        tell(rb.set_writer(writers[1]) is writers[0], rb.writer is writers[1])
        tell(rb.set_storage(storages[1]) is storages[0], rb.storage is storages[1], len(rb))
        rb.extend(torch.arange(3))
        if lib.name == "expstore":  # TorchRL's writer goes on writing into the storage before
            assert (len(rb), len(storages[0]), len(storages[1])) == (3, 4, 3)

    same(program, tmp_path)


def test_figures_of_a_buffer(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=2)
        names = ("size", "write_count", "prefetch_queue_size", "initialized", "capacity", "utilization")
        for count in (0, 4, 9):
            if count:
                rb.extend(torch.arange(count))
            stats = rb.stats()
            tell({name: stats[name] for name in names})
        rb.empty()
        stats = (
            rb.stats()
        )  # the rows that were ever written are counted on here: rate limits follow from them
        tell({name: stats[name] for name in names if name != "write_count"})

    same(program, tmp_path)


def test_what_can_be_sampled(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=4)
        tell(rb.can_sample(), rb.can_sample(1))
        rb.extend(torch.arange(2))
        tell(rb.can_sample(), rb.can_sample(3))
        without = lib.ReplayBuffer(
            storage=lib.LazyTensorStorage(10), sampler=lib.SamplerWithoutReplacement(), batch_size=4
        )
        without.extend(torch.arange(6))
        tell(without.can_sample(), without.can_sample(100))

    same(program, tmp_path)


def test_next_gives_batches_until_there_is_none(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(
            storage=lib.LazyTensorStorage(10), sampler=lib.SamplerWithoutReplacement(), batch_size=4
        )
        rb.extend(numbers(0, 10))
        tell([None if (batch := rb.next()) is None else len(batch) for _ in range(7)])

    same(program, tmp_path)


def test_all_rows_in_order(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10))
        rb.extend(numbers(0, 6))
        every = rb.read_all_in_order()
        tell(every["x"], rb.read_all_in_order(end=3)["x"])
        every["x"] += 10
        rb.write_all(every)
        tell(rb[:]["x"])
        part = rb.read_all_in_order(end=2)
        part["x"] += 100
        rb.write_all(part, end=2)
        tell(rb[:]["x"], len(rb))

    same(program, tmp_path)


def test_fields_are_set_in_place(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=5)
        rb.extend(numbers(0, 10))
        rb.set_at_("x", torch.tensor([99, 98]), torch.tensor([2, 5]))
        tell(rb[:])
        rb.set_("x", torch.arange(10, 20))
        tell(rb[:])
        rb.update_(TensorDict({"x": torch.zeros(10, dtype=torch.int64)}, [10]))
        tell(rb[:], len(rb), rb.write_count)

    same(program, tmp_path)


def test_a_buffer_is_its_own_service(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.ListStorage(4), batch_size=2, service_backend="direct")
        rb.extend(list(torch.arange(3)))
        tell(rb.client() is rb, rb.start() is rb, rb.service_backend, rb.is_alive, len(rb.sample()))
        rb.synchronize()
        rb.shutdown()
        tell(rb.is_alive)
        rb.shutdown()
        tell.fails(rb.start, "shut down replay buffer cannot be restarted")

    same(program, tmp_path)
    with pytest.raises(ValueError, match="leave timeout out"):
        OURS.ReplayBuffer().shutdown(timeout=1.0)
    members = [OURS.ReplayBuffer(storage=OURS.LazyTensorStorage(4)) for _ in range(2)]
    ensemble = OURS.ReplayBufferEnsemble(*members)
    assert ensemble.is_alive
    ensemble.shutdown()
    assert not any(member.is_alive for member in (ensemble, *members))
