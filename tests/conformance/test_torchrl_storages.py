"""Storages behave like TorchRL's: the same programs report the same with both libraries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, tensorclass

from expstore.errors import SchemaError, StateError
from tests.support.torchrl_pair import OURS, Teller, numbers, same

LAZY = ("LazyTensorStorage", "LazyMemmapStorage")


def grid(steps: int, lanes: int, first: int = 0) -> TensorDict:
    """Rows of lanes, time last as collectors make it: x is lane * 1000 + time."""
    x = torch.arange(lanes)[:, None] * 1000 + torch.arange(first, first + steps)
    return TensorDict({"x": x, "deep": {"y": x[..., None].float()}}, [lanes, steps])


@tensorclass
class Pair:
    a: torch.Tensor
    b: torch.Tensor


def formats(rows: int) -> dict[str, Any]:
    a, b = torch.arange(rows * 2).reshape(rows, 2), torch.arange(rows).float()
    return {
        "tensor": a,
        "tensordict": TensorDict({"a": a, "deep": {"b": b}}, [rows]),
        "tensorclass": Pair(a=a, b=b, batch_size=[rows]),
        "tree": {"a": a, "b": (b, [a + 1])},
    }


@pytest.mark.parametrize("form", ["tensor", "tensordict", "tensorclass", "tree"])
@pytest.mark.parametrize("kind", LAZY)
def test_rows_are_set_and_got(tmp_path: Path, kind: str, form: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        storage = getattr(lib, kind)(10)
        tell(len(storage), storage.max_size, storage.ndim)
        storage.set(range(4), formats(4)[form])
        tell(len(storage), storage.get(range(4)), storage.get(2), storage.get(torch.tensor([3, 0])))
        storage.set(range(4, 6), formats(2)[form])
        tell(len(storage), storage[:], storage[1:5], storage[4])

    same(program, tmp_path)


@pytest.mark.parametrize("form", ["tensor", "tensordict", "tensorclass", "tree"])
def test_a_storage_of_rows_that_are_there(tmp_path: Path, form: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        storage = lib.TensorStorage(formats(5)[form])
        tell(len(storage), storage.max_size, storage.get(range(5)), storage[2])
        rb = lib.ReplayBuffer(storage=lib.TensorStorage(formats(5)[form]), batch_size=3)
        tell(len(rb), rb[:], rb[4])
        rb.sample()

    same(program, tmp_path)


def test_storages_that_cannot_be(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        tell.fails(lambda: lib.TensorStorage(None), "Expected storage to be non-null")
        tell.fails(
            lambda: lib.TensorStorage(torch.randn(3), max_size=4),
            "The max-size and the storage shape mismatch",
        )
        tell.fails(lambda: lib.LazyMemmapStorage(10, device="meta"), "Memory map device other than CPU")

    same(program, tmp_path)


def test_a_folder_is_taken_only_if_one_says_so(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        folder = tell.folder / "rows"
        rb = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(10, scratch_dir=folder))
        rb.extend(TensorDict({"a": torch.arange(3)}, [3]))
        if lib.name == "expstore":
            rb.close()

        def write_anew() -> None:  # TorchRL's fails at the first write, ours when it is made
            other = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(10, scratch_dir=folder))
            other.extend(TensorDict({"a": torch.arange(3)}, [3]))

        tell.fails(write_anew, "exist")
        more = lib.ReplayBuffer(storage=lib.LazyMemmapStorage(10, scratch_dir=folder, existsok=True))
        more.extend(TensorDict({"a": torch.arange(3)}, [3]))
        tell(more[:]["a"][-3:])

    same(program, tmp_path)


@pytest.mark.parametrize("kind", LAZY)
def test_capacities_are_rounded_up_to_whole_steps(tmp_path: Path, kind: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        storage = getattr(lib, kind)(100, ndim=2)
        rb = lib.ReplayBuffer(storage=storage)
        tell(storage.ndim)
        rb.extend(grid(5, 3))
        tell(storage.max_size, len(rb), len(storage))
        rb.extend(grid(40, 3))
        tell(len(rb), rb[:].shape, storage.shape)

    same(program, tmp_path)


@pytest.mark.parametrize("kind", LAZY)
def test_grids_are_written_and_read(tmp_path: Path, kind: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(storage=getattr(lib, kind)(24, ndim=2), batch_size=6)
        tell(rb.dim_extend)
        tell(rb.extend(grid(5, 3)), len(rb))
        tell(rb[:].exclude("index"))  # TorchRL cannot take a row of it
        tell(rb.extend(grid(5, 3, 5)), len(rb), rb[:]["x"])
        sample = rb.sample()
        tell(sample.shape, sample["index"].shape, sample["deep", "y"].shape)

    same(program, tmp_path)


@pytest.mark.parametrize("kind", LAZY)
def test_cells_of_grids_are_replaced(tmp_path: Path, kind: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=getattr(lib, kind)(102, ndim=2), dim_extend=0)
        rb.extend(grid(50, 2))
        tell(len(rb), rb[:].shape)
        zero = TensorDict({"x": torch.zeros(1, dtype=torch.int64), "deep": {"y": torch.zeros(1, 1)}}, [1])
        rb[0, 3:4] = zero
        tell(rb[:]["x"])
        rb[:, 7:8] = zero.expand(2, 1)
        tell(rb[:]["x"], len(rb))

    same(program, tmp_path)


def test_dims_of_extending(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        data = torch.arange(12).reshape(3, 4)
        one = lib.ReplayBuffer(storage=lib.LazyTensorStorage(24, ndim=2), dim_extend=1)
        two = lib.ReplayBuffer(storage=lib.LazyTensorStorage(24, ndim=2), dim_extend=0)
        three = lib.ReplayBuffer(storage=lib.LazyTensorStorage(24, ndim=2))
        for rb in (one, two, three):
            tell(rb.dim_extend, rb.extend(data), rb[:])
        for column in data.unbind(1):
            one.add(column)
        tell(len(one), one[:])
        flat = lib.ReplayBuffer(storage=lib.LazyTensorStorage(24))
        tell(flat.dim_extend, flat.extend(data), flat[:], len(flat))

    same(program, tmp_path)


def test_objects_of_any_kind_in_a_list(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.ListStorage(4), collate_fn=lambda rows: rows)
        tell(rb.extend(["a", 1, None]), len(rb), rb.add({"b": (2.0, "c")}), rb.extend([5, 6]))
        tell(rb[:], rb[1], rb[1:3], [type(row).__name__ for row in rb.storage.get(range(4))])
        tell(all(row in ("a", 1, None, 5, 6) or isinstance(row, dict) for row in rb.sample(9)))
        unbounded = lib.ReplayBuffer(storage=lib.ListStorage(), collate_fn=lambda rows: rows)
        unbounded.extend(list(range(2000)))
        tell(len(unbounded))

    same(program, tmp_path)


def test_lists_that_are_too_short(tmp_path: Path) -> None:
    def program(lib: Any, tell: Teller) -> None:
        storage = lib.ListStorage(3)
        storage.set(range(3), [1, 2, 3])
        tell(len(storage), storage.get(1), storage.get([0, 2]))
        with pytest.raises((RuntimeError, KeyError)):
            storage.set(5, 7)
        with pytest.raises(LookupError):
            storage.get(3)
        tell(list(storage))

    same(program, tmp_path)


@pytest.mark.parametrize("max_size", [1000, None])
@pytest.mark.parametrize("stack_dim", [-1, 0])
def test_rows_of_different_lengths_are_stacked(tmp_path: Path, stack_dim: int, max_size: int | None) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=lib.LazyStackStorage(max_size=max_size, stack_dim=stack_dim))
        rb.add(TensorDict({"a": torch.zeros(10), "b": torch.zeros(4), "c": "a string!"}))
        rb.add(TensorDict({"a": torch.zeros(11), "b": torch.zeros(4), "c": "another string!"}))
        sample = rb.sample(10)
        tell(isinstance(sample, LazyStackedTensorDict), sample.batch_size, sample["b"].shape)
        tell({"a string!", "another string!"} >= set(sample["c"]), len(rb))

    same(program, tmp_path)


@pytest.mark.parametrize("kind", LAZY)
def test_lazy_stacks_are_rows_like_others(tmp_path: Path, kind: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.ReplayBuffer(storage=getattr(lib, kind)(100), batch_size=10)
        rows = [TensorDict({"a": torch.full((2, 3), float(n))}, []) for n in range(10)]
        tell(rb.extend(LazyStackedTensorDict.lazy_stack(rows, dim=0)), rb[:], rb.sample(5)["a"].shape)

    same(program, tmp_path)


@pytest.mark.parametrize("form", ["tensor", "tensordict"])
@pytest.mark.parametrize("kind", LAZY)
def test_states_of_storages_go_round(tmp_path: Path, kind: str, form: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        storage = getattr(lib, kind)(10)
        lib.ReplayBuffer(storage=storage).extend(formats(4)[form])
        state = storage.state_dict()
        other = getattr(lib, kind)(10)
        other.load_state_dict(state)
        tell(len(other), other.get(range(4)))
        before, other_first = storage.get(3), other.get(0)
        storage.set(0, before)
        if lib.name == "expstore":  # TorchRL's state of a LazyMemmapStorage shares its memory
            assert (other.get(0) == other_first).all()

    same(program, tmp_path)


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("ready", [False, True])
def test_states_of_buffers_go_round(tmp_path: Path, kind: str, ready: bool) -> None:
    def program(lib: Any, tell: Teller) -> None:
        def buffer() -> Any:
            return lib.TensorDictReplayBuffer(storage=getattr(lib, kind)(10), batch_size=3)

        rb = buffer()
        rb.extend(formats(12)["tensordict"])
        state = rb.state_dict()
        other = buffer()
        if ready:
            other.extend(formats(2)["tensordict"])
        other.load_state_dict(state)
        tell(len(other), other.write_count, other[:].exclude("index"), other.sample().shape)
        tell(other.extend(formats(2)["tensordict"]), other[:]["a"])

    same(program, tmp_path)


@pytest.mark.parametrize("kind", LAZY)
def test_dumps_are_loaded(tmp_path: Path, kind: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        def buffer() -> Any:
            return lib.TensorDictReplayBuffer(storage=getattr(lib, kind)(10), batch_size=3)

        rb = buffer()
        rb.extend(formats(12)["tensordict"])
        place = tell.folder / "dump"
        rb.dumps(place)
        rb.dumps(place)
        other = buffer()
        other.loads(place)
        tell(len(other), other.write_count, other[:].exclude("index"), other.sample().shape)
        tell(other.extend(formats(2)["tensordict"]), other[:]["a"])

    same(program, tmp_path)


@pytest.mark.parametrize("act", ["extend", "write_all", "rows"])
def test_fields_that_written_rows_have_more_are_added(tmp_path: Path, act: str) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=4)
        rb.extend(numbers(0, 6))
        more = rb[:] if act != "extend" else numbers(6, 2)
        more = more.exclude("index").set("value", more["x"] + 1.0).set(("deep", "z"), more["x"])
        if act == "extend":
            rb.extend(more)
        elif act == "write_all":
            rb.write_all(more)
        else:
            rb[:3] = more[:3]
        tell(rb[:].exclude("index"))
        tell("value" in rb.sample())

    same(program, tmp_path)


def test_rows_that_do_not_fit_add_no_field(tmp_path: Path) -> None:
    rb = OURS.TensorDictReplayBuffer(storage=OURS.LazyTensorStorage(10), batch_size=4)
    rb.extend(numbers(0, 6))
    rows = numbers(6, 2).set("value", torch.ones(2))
    for wrong in (rows.exclude("x"), rows.clone().set("x", torch.ones(2, 3))):
        with pytest.raises(SchemaError):
            rb.extend(wrong)
        with pytest.raises(SchemaError):
            rb[:2] = wrong
    with pytest.raises(SchemaError, match="cannot replace 3 rows by 2"):
        rb[:3] = rows
    rb.set_writer(OURS.ImmutableDatasetWriter())
    with pytest.raises(StateError, match="doesn't allow writing"):
        rb.extend(rows)
    assert "value" not in rb[:]
    rb.storage.set(torch.arange(2), rows)
    assert rb["value"].tolist() == [1, 1, 0, 0, 0, 0]
    disk = OURS.TensorDictReplayBuffer(storage=OURS.LazyMemmapStorage(10, scratch_dir=tmp_path / "s"))
    disk.extend(numbers(0, 6))
    with pytest.raises(SchemaError, match=r"columns.add\(name, fill"):
        disk.extend(rows)
    disk.close()


@pytest.mark.parametrize("count", [0, 3, 10, 13, 25])
def test_private_names_that_programs_read(tmp_path: Path, count: int) -> None:
    def program(lib: Any, tell: Teller) -> None:
        rb = lib.TensorDictReplayBuffer(storage=lib.LazyTensorStorage(10), batch_size=4)
        if count:
            rb.extend(numbers(0, min(count, 9)))
        for number in range(9, count):
            rb.add(numbers(number, 1)[0])
        tell(rb._writer._cursor, rb._writer is rb.writer, rb._sampler is rb.sampler)
        tell(rb._storage is rb.storage)

    same(program, tmp_path)
