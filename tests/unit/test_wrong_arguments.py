"""What a program written for TorchRL gets wrong is answered by errors of expstore that say what to do."""

from __future__ import annotations

import builtins
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    ArgumentError,
    ExpStoreError,
    LazyMemmapStorage,
    LazyStackStorage,
    LazyTensorStorage,
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBufferEnsemble,
    SliceSampler,
    TensorDictReplayBuffer,
)
from expstore.errors import NoRowError, QueryError, SchemaError, SnapshotError, StateError


def rows(*shape: int) -> TensorDict:
    return TensorDict({"observation": torch.zeros(*shape, 2)}, shape)


def filled() -> TensorDictReplayBuffer:
    rb = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=4)
    rb.extend(rows(4))
    return rb


WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: TensorDictReplayBuffer(batch_size=4).sample(0), "batch_size must be at least 1, got 0"),
    (lambda: LazyMemmapStorage(0), "capacity must be at least 1, got 0"),
    (lambda: LazyMemmapStorage(10, device="cuda"), "Memory map device other than CPU"),
    (lambda: LazyTensorStorage("1000"), "max_size must be an integer, got '1000'; use a number such as"),
    (lambda: LazyTensorStorage(10, ndim="x"), "ndim must be an integer, got 'x'; use 1 for rows, or 2 for"),
    (lambda: LazyTensorStorage(10, seed="x"), "seed must be an integer, got 'x'; leave it out"),
    (lambda: ListStorage("ten"), "max_size must be an integer, got 'ten'"),
    (lambda: LazyStackStorage(10, stack_dim="x"), "stack_dim must be an integer, got 'x'; use 0, 1 or -1"),
    (
        lambda: LazyMemmapStorage(10, layout="arrow"),
        "unexpected keyword argument 'layout'; it has max_size, ",
    ),
    (
        lambda: RandomSampler(whera="a"),
        "RandomSampler got an unexpected keyword argument 'whera'; use where='a'",
    ),
    (lambda: PrioritizedSampler(10, alpha=0.7, beta=0.5, betta=1), "use beta=1"),
    (lambda: SliceSampler(slice_length=5), "use slice_len=5"),
    (lambda: TensorDictReplayBuffer(prefetch="x"), "prefetch must be an integer, got 'x'; use a number such"),
    (
        lambda: TensorDictReplayBuffer(dim_extend="x"),
        "dim_extend must be an integer, got 'x'; use the number",
    ),
    (lambda: PrioritizedSampler(10, "x", 0.5), "alpha must be a number >= 0, got 'x'"),
    (lambda: PrioritizedSampler("x", 0.5, 0.5), "max_capacity must be an integer, got 'x'"),
    (lambda: expstore.MinSize("x"), "min_size_to_sample must be an integer, got 'x'"),
    (lambda: filled().update_priority([1], "x"), "priority must be numbers, got 'x'; pass a tensor or a"),
    (
        lambda: filled().update_tensordict_priority(5),
        r"takes a sample, got int; pass the TensorDict that sample\(\)",
    ),
    (lambda: filled().set_rng(5), "generator must be a torch.Generator, got 5"),
    (lambda: filled().insert_transform("x", torch.nn.Identity()), "index must be an integer, got 'x'; use a"),
    (lambda: TensorDictReplayBuffer(storage="x"), "a storage of expstore or a function .*, got 'x'"),
    (lambda: expstore.RecencySampler("x"), "half_life must be a number of rows > 0, or None, got 'x'"),
    (lambda: filled().sql(5), "the query must be a string of SQL, got 5"),
    (lambda: filled().sql("SELECT ?", 5), r"params must be a list of values .* got 5; use params=\[5\]"),
    (lambda: filled().episodes(limit="x"), "limit must be an integer, got 'x'"),
    (lambda: filled().episodes(where=5), "where must be a string of SQL, got 5; give one SQL expression"),
    (lambda: expstore.connect(5), "url must be the address of a store, .* got 5; pass an address such as"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message for _, message in WRONG])
def test_arguments_are_refused_by_an_error_of_expstore(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ExpStoreError, match=message) as refused:
        call()
    assert isinstance(refused.value, TypeError)
    assert isinstance(refused.value, ValueError)


def test_sizes_may_be_floats_with_whole_values() -> None:
    assert LazyTensorStorage(1e3).capacity == 1000
    assert ListStorage(1e3).capacity == 1000


@pytest.mark.parametrize("kind", [LazyTensorStorage, ListStorage, LazyStackStorage])
@pytest.mark.parametrize("device", ["cuba", 3.5, torch.device("xpu", 7)])
def test_a_device_that_torch_lacks_is_refused_when_the_storage_is_made(
    kind: Callable[..., Any], device: Any
) -> None:
    with pytest.raises(
        StateError, match=r"rows cannot be returned on device .*; leave device out"
    ) as refused:
        kind(10, device=device)
    assert refused.value.kind == "device"


def test_parts_and_buffers_of_torchrl_are_named() -> None:
    data = pytest.importorskip("torchrl.data")
    with pytest.raises(
        ArgumentError, match="a storage of expstore .* torchrl LazyTensorStorage; use the class of"
    ):
        TensorDictReplayBuffer(storage=data.LazyTensorStorage(10))
    with pytest.raises(
        ArgumentError, match="a writer of expstore .* torchrl TensorDictRoundRobinWriter; use"
    ):
        TensorDictReplayBuffer(writer=data.TensorDictRoundRobinWriter())
    theirs = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(5))
    with pytest.raises(ArgumentError, match="got a TensorDictReplayBuffer; use the class of the same name"):
        ReplayBufferEnsemble(theirs, batch_size=4)


def test_another_max_size_is_refused_in_the_words_of_the_class(tmp_path: Path) -> None:
    path = tmp_path / "g.exp"
    rb = TensorDictReplayBuffer(storage=LazyMemmapStorage(10, scratch_dir=path))
    rb.extend(rows(4))
    rb.close()
    with pytest.raises(
        StateError, match=r"max_size=10, opened with max_size=20; pass max_size=10, or run `expstore resize"
    ):
        LazyMemmapStorage(20, scratch_dir=path, existsok=True)
    LazyMemmapStorage(10, scratch_dir=path, existsok=True).close()


def test_the_state_of_something_else_is_refused() -> None:
    for state in (5, {}, {"_storage": {}}):
        with pytest.raises(StateError, match=r"not a state of .*; pass what state_dict\(\) of a buffer with"):
            filled().load_state_dict(state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("query", "params", "message"),
    [
        ("SELECT $x", None, r"takes values for \$x, params is None; use params={'x': \.\.\.}"),
        ("SELECT $x, $y", {"z": 1}, r"takes values for \$x, \$y, params is a dict with z; use params={'x'"),
        ("SELECT $x", {}, "params is an empty dict"),
        ("SELECT $x", [1], r"takes values for \$x, params is a list of length 1; use params={'x': "),
        (
            "SELECT ?, ?",
            [1],
            r"takes a list of length 2, one value for each \?, params is a list of length 1",
        ),
        ("SELECT ?", {"x": 1}, r"params is a dict with x; use params=\[\.\.\.\]"),
        (
            "SELECT 1",
            {"x": 1},
            r"takes no values, params is a dict with x; leave params out, or write \$name",
        ),
    ],
)
def test_parameters_that_a_query_does_not_have_are_named(query: str, params: Any, message: str) -> None:
    rb = filled()
    with pytest.raises(QueryError, match=message):
        rb.sql(query, params)
    assert rb.sql("SELECT $x + $y", {"X": 1, "y": 2}).fetchone() == (3,)
    with pytest.raises(QueryError, match="Could not convert string 'a'"):
        rb.sql("SELECT $x / 'a' FROM transitions", {"x": 1})


def test_an_index_without_a_row_is_named_as_it_was_passed() -> None:
    rb = filled()
    for index in (-5, [1, -5], torch.tensor([-5, 3])):
        with pytest.raises(
            NoRowError, match="no row with index -5: the store holds 4 rows; use an index from"
        ):
            rb[index]
    with pytest.raises(
        NoRowError, match="no row with index 4: the store holds 4 rows; use an index from 0 to 3"
    ):
        rb[4]
    with pytest.raises(NoRowError, match=r"no row with index 0: the store holds 0 rows; extend\(\) it first"):
        TensorDictReplayBuffer()[0]


def test_an_index_of_a_deleted_row_is_told_where_the_others_are(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "g.exp") as rb:
        ends = (torch.arange(20) % 10 == 9)[:, None]
        after = {"reward": torch.ones(20, 1), "terminated": ends, "truncated": torch.zeros_like(ends)}
        rb.extend(TensorDict({"observation": torch.zeros(20, 2), "next": after}, [20]))
        rb.episodes.delete("episode_id = 1")
        with pytest.raises(NoRowError, match="no row with index 3: .* SELECT _index FROM transitions lists"):
            rb[3]
        first = rb.sql("SELECT min(_index) FROM transitions").fetchone()[0]
        assert rb[first]["observation"].shape == (2,)


def test_versions_that_are_nowhere_are_not_looked_for(tmp_path: Path) -> None:
    rb, file = filled(), tmp_path / "file"
    file.write_text("x")
    with pytest.raises(SnapshotError, match=r"nope does not exist; pass the folder that was passed to dumps"):
        rb.loads(tmp_path / "nope")
    with pytest.raises(SnapshotError, match=r"file is a file, versions are in a folder; pass the folder"):
        rb.loads(file)
    with pytest.raises(SnapshotError, match=r"file is a file, versions are in a folder; use a new or empty"):
        rb.dumps(file)
    assert file.read_text() == "x"
    assert len(rb) == 4


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ({"storage": None}, r"use expstore.TensorDictReplayBuffer\(storage=\.\.\.\)"),
        ({"collate_fn": list}, r"use expstore.TensorDictReplayBuffer\(storage=\.\.\., collate_fn=\.\.\.\)"),
        ({"priority_key": "a"}, r"use expstore.TensorDictReplayBuffer\(storage=\.\.\., priority_key="),
        ({"ndim": 2}, r"storage=expstore.LazyMemmapStorage\(\.\.\., ndim=\.\.\.\)\)"),
        ({"existsok": True}, "use mode='a', which continues with the rows of a store"),
        ({"scratch_dir": "a"}, "use path='a'"),
    ],
)
def test_arguments_of_torchrl_that_open_lacks_have_a_place(
    argument: dict[str, Any], hint: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=f"unexpected keyword argument .*; .*{hint}"):
        expstore.open(tmp_path / "new.exp", **argument)
    assert not list(tmp_path.iterdir())


def test_meta_is_a_dict(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="meta must be a dict of facts, got 5"):
        expstore.open(tmp_path / "new.exp", meta=5)  # type: ignore[arg-type]


def test_a_write_through_a_copy_is_told_of_share(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb, expstore.open(tmp_path / "run.exp", mode="r") as reader:
        rb.extend(rows(3))
        with pytest.raises(
            StateError, match=r"a copy of a buffer; .* or call rb.share\(\) there before the copy"
        ):
            pickle.loads(pickle.dumps(rb)).extend(rows(3))
        with pytest.raises(StateError, match="copy of a buffer; write with the buffer that has it open with"):
            pickle.loads(pickle.dumps(reader)).extend(rows(3))


def test_rows_of_more_dims_are_told_how_to_be_stored() -> None:
    rb = TensorDictReplayBuffer(storage=expstore.LazyTensorStorage(10))
    rb.extend(rows(4))
    with pytest.raises(
        SchemaError, match=r"got float32\[3, 2\]; extend\(\) stores the rows of a batch of one dim"
    ):
        rb.add(rows(3))
    assert len(rb) == 4


def test_whole_trajectories_have_no_trajectory_id() -> None:
    rb = TensorDictReplayBuffer(
        storage=expstore.LazyTensorStorage(10),
        sampler=SliceSampler(slice_len=5, traj_key="trajectory"),
        batch_size=10,
    )
    rb.extend(rows(3, 30).set("trajectory", torch.zeros(3, 30, dtype=torch.int64)))
    with pytest.raises(
        SchemaError, match=r"one number per row, .* store its steps: extend\(batch.reshape\(-1\)\)"
    ):
        rb.sample()


def test_importing_all_names_keeps_the_function_open() -> None:
    names: dict[str, Any] = {}
    exec("from expstore import *", names)
    assert "open" not in names
    assert "ReplayBuffer" in names
    assert not set(expstore.__all__) & set(vars(builtins))
    assert expstore.errors.ExpStoreError is ExpStoreError


def test_the_hint_after_a_sentence_is_another_sentence() -> None:
    error = StateError("This dataset doesn't allow writing.", hint="call set_writer()")
    assert str(error) == "This dataset doesn't allow writing. Call set_writer()"
    assert str(StateError("A sentence.")) == "A sentence."


def test_a_limiter_that_timed_out_is_named() -> None:
    rb = TensorDictReplayBuffer(
        storage=LazyTensorStorage(10), batch_size=4, rate_limiter=expstore.MinSize(5, timeout=0.0)
    )
    rb.extend(rows(4))
    with pytest.raises(
        expstore.errors.NotReadyError, match=r"extend\(\) .*, or give the limiter a longer timeout"
    ):
        rb.sample()
