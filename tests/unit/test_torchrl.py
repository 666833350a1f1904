"""TorchRL's own buffers over a store: the same rows, indices and batches, and persistence."""

from __future__ import annotations

import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import set_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.storages.engine.open_settings import Settings
from expstore.storages.memory import MemoryStorage
from expstore.torchrl import ExpStorage
from tests.support import warm_processes
from tests.support.paths import ROOT
from tests.support.torchrl_names import module
from tests.support.tuned import few_rows_in_memory

theirs = module("torchrl.data")
ConsumingSampler = module("torchrl.data.replay_buffers.samplers").ConsumingSampler

CAPACITY = 40

#: A TorchRL buffer's keywords.
Made = dict[str, Any]


def rows(count: int, first: int = 0, length: int = 7) -> TensorDict:
    """Return steps of episodes of this length, which follow one another. Batch size `[count]`."""
    number = torch.arange(first, first + count)
    done = ((number + 1) % length == 0)[:, None]
    return TensorDict(
        {
            "observation": torch.stack([number, number % length], -1),
            "collector": {"traj_ids": number // length},
            "next": {"done": done, "terminated": done.clone(), "reward": torch.ones(count, 1)},
        },
        [count],
    )


@pytest.fixture(params=["disk", "memory"])
def storage(request: pytest.FixtureRequest, store_path: Path) -> Iterator[ExpStorage]:
    if request.param == "disk":
        kept = ExpStorage(store_path, capacity=CAPACITY, seed=1)
    else:
        kept = ExpStorage(MemoryStorage(CAPACITY, seed=1))
    with kept.buffer:
        yield kept


# -- beside a storage of TorchRL's ------------------------------------------------------------------------

SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": theirs.RandomSampler,
    "without-replacement": theirs.SamplerWithoutReplacement,
    "slices": lambda: theirs.SliceSampler(slice_len=3, traj_key=("collector", "traj_ids")),
    "slices-by-end": lambda: theirs.SliceSampler(num_slices=4, end_key=("next", "done")),
    "slices-strict": lambda: theirs.SliceSampler(slice_len=4, strict_length=False, cache_values=True),
    "slices-without-replacement": lambda: theirs.SliceSamplerWithoutReplacement(
        slice_len=2, strict_length=False
    ),
    "streaming": lambda: theirs.StreamingSliceSampler(slice_len=2),
}


def equal(ours: Any, other: Any) -> None:
    """Check that two batches, or infos, are alike."""
    keys = set(ours.keys(True, True))
    assert keys == set(other.keys(True, True))
    for key in keys:
        assert torch.equal(ours[key], other[key]), key


@pytest.mark.some(2)
@pytest.mark.filterwarnings("ignore::UserWarning:torchrl")
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("tracks", [False, True])
def test_random_programs_return_the_same(storage: ExpStorage, sampler: str, tracks: bool) -> None:
    def made(kept: Any) -> Any:
        writer = theirs.TensorDictRoundRobinWriter(track_generations=tracks)
        return theirs.TensorDictReplayBuffer(
            storage=kept, sampler=SAMPLERS[sampler](), writer=writer, batch_size=12
        )

    both = made(storage), made(theirs.LazyTensorStorage(CAPACITY))
    chance, written = random.Random(5), 0
    for step in range(60):
        act = (
            chance.choice(["extend", "add", "sample", "sample", "read", "write"])
            if written > 15
            else "extend"
        )
        if act == "extend":
            count = chance.choice([1, 5, 13, 20])
            assert torch.equal(*[rb.extend(rows(count, written)) for rb in both])
            written += count
        elif act == "add":
            first, second = (rb.add(rows(1, written)[0]) for rb in both)
            assert int(first) == int(second)
            written += 1
        elif act == "sample":
            samples = []
            for rb in both:
                torch.manual_seed(step)
                samples.append(rb.sample(return_info=True))
            equal(samples[0][0], samples[1][0])
            assert samples[0][1].keys() == samples[1][1].keys()
        elif act == "read":
            index = torch.tensor(chance.sample(range(len(both[0])), 3))
            for at in (index, 2, slice(1, 9, 2), slice(None)):
                equal(*[rb[at].exclude("index", "index_generation") for rb in both])
        else:
            index = torch.tensor(chance.sample(range(len(both[0])), 2))
            for rb in both:
                new = rb[index]
                new["next", "reward"] = new["next", "reward"] + step
                rb[index] = new
        assert len(both[0]) == len(both[1])
        assert both[0].write_count == both[1].write_count == written
        assert both[0].writer._cursor == both[1].writer._cursor


def test_rows_of_other_kinds(storage: ExpStorage) -> None:
    """Tensors, and trees of them."""
    both = [theirs.ReplayBuffer(storage=kept) for kept in (storage, theirs.LazyTensorStorage(CAPACITY))]
    for first in (0, 30):
        number = torch.arange(first, first + 30)
        for rb in both:
            rb.extend({"a": number, "b": (number[:, None] * 2.0,)})
    whole, other = (rb[:] for rb in both)
    assert torch.equal(whole["a"], other["a"])
    assert torch.equal(whole["b"][0], other["b"][0])


@pytest.mark.parametrize("by_path", [False, True])
def test_time_and_lanes(store_path: Path, by_path: bool) -> None:
    own = expstore.ZarrStorage(store_path, CAPACITY, ndim=2, settings=Settings(seed=1))
    if by_path:
        own.close()
    storage = ExpStorage(store_path) if by_path else ExpStorage(own)
    both = [
        theirs.TensorDictReplayBuffer(storage=kept, batch_size=16, dim_extend=1)
        for kept in (storage, theirs.LazyTensorStorage(CAPACITY, ndim=2))
    ]
    with storage.buffer:
        for first in (0, 8, 16):
            batch = torch.stack([rows(8, first + 100 * lane) for lane in range(3)])
            index = [rb.extend(batch.clone()) for rb in both]
            assert torch.equal(*index)
            samples = []
            for rb in both:
                torch.manual_seed(first)
                samples.append(rb.sample())
            equal(*samples)
            equal(*[rb[:].exclude("index") for rb in both])
        assert len(both[0]) == len(both[1]) == 42


def test_transforms_and_prefetching_are_torchrls_affair(storage: ExpStorage) -> None:
    rb = theirs.TensorDictReplayBuffer(
        storage=storage, batch_size=6, prefetch=2, transform=lambda data: data.exclude("collector")
    )
    rb.extend(rows(30))
    for _ in range(5):
        sample = rb.sample()
        assert sample.shape == (6,)
        assert "collector" not in sample.keys()  # noqa: SIM118 - a TensorDict yields values
    rb.shutdown()


# -- rows stay --------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
from tests.unit import test_torchrl as test
from torchrl import data as theirs
from expstore.torchrl import ExpStorage
rb = theirs.TensorDictReplayBuffer(storage=ExpStorage(sys.argv[1], capacity=40, seed=1, source="w"))
for first in range(0, 60, 12):
    rb.extend(test.rows(12, first))
rb.add(test.rows(1, 60)[0])
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.guarantee(
    "torchrl/storages",
    "Rows that a TorchRL buffer over an `ExpStorage` has written survive its process, and a new buffer "
    "appends to them.",
)
@pytest.mark.slow
def test_a_new_buffer_continues_where_a_killed_one_stopped(store_path: Path) -> None:
    done = warm_processes.run([sys.executable, "-c", KILLED, str(store_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    with ExpStorage(store_path, source="w").buffer as kept:
        storage = ExpStorage(kept, source="w")
        rb = theirs.TensorDictReplayBuffer(storage=storage, batch_size=8)
        assert rb.write_count == 61
        assert len(rb) == 40
        numbers = rb[:]["observation"][:, 0]
        assert (
            numbers.tolist() == [n if n > 20 else n + 40 for n in range(21, 61)][-21:] + numbers.tolist()[21:]
        )
        assert sorted(numbers.tolist()) == list(range(21, 61))
        assert rb.extend(rows(3, 61)).tolist() == [21, 22, 23]
        lengths = kept.sql("SELECT trajectory_id, length, status FROM episodes ORDER BY 1").fetchall()
        # Trajectory 8 was open: a killed session's episodes are cut, and its next rows begin another one.
        ended = [(n, 7, "terminated") for n in range(8)]
        assert sorted(lengths) == sorted([*ended, (8, 5, "cut"), (8, 2, "terminated"), (9, 1, "open")])


def test_a_state_that_is_loaded_leaves_the_cursor_to_the_store(storage: ExpStorage) -> None:
    rb = theirs.TensorDictReplayBuffer(storage=storage, batch_size=8)
    rb.extend(rows(10))
    state = rb.state_dict()
    rb.extend(rows(10, 10))
    rb.load_state_dict(state)
    on_disk = storage.buffer.storage.kind == "zarr"
    there = 20 if on_disk else 10  # a state in RAM brings its rows
    assert len(rb) == there
    assert rb.extend(rows(2, there)).tolist() == [there, there + 1]
    assert rb.writer.state_dict()["_cursor"] == there + 2


def test_versions_are_saved_and_restored(storage: ExpStorage, tmp_path: Path) -> None:
    rb = theirs.TensorDictReplayBuffer(storage=storage, batch_size=8)
    rb.extend(rows(30))
    rb.dumps(tmp_path / "kept")
    rb.extend(rows(25, 30))
    rb.loads(tmp_path / "kept")
    assert rb[:]["observation"][:, 0].tolist() == list(range(30))
    assert rb.extend(rows(3, 30)).tolist() == [30, 31, 32]
    fresh = theirs.TensorDictReplayBuffer(storage=ExpStorage(MemoryStorage(CAPACITY)), batch_size=8)
    fresh.loads(tmp_path / "kept")
    assert fresh[:]["observation"][:, 0].tolist() == list(range(30))
    assert fresh.extend(rows(1, 30)).tolist() == [30]


def test_a_ring_is_emptied(storage: ExpStorage) -> None:
    rb = theirs.TensorDictReplayBuffer(storage=storage, batch_size=8)
    rb.extend(rows(17))
    rb.empty()
    assert len(rb) == 0
    assert rb.extend(rows(5)).tolist() == [0, 1, 2, 3, 4]
    assert rb.sample().shape == (8,)


def test_written_rows_can_be_queried_and_sampled_by_own_samplers(storage: ExpStorage) -> None:
    rb = theirs.TensorDictReplayBuffer(storage=storage)
    rb.extend(rows(21))
    counted = storage.buffer.sql("SELECT count(*), sum(length) FROM episodes").fetchall()
    assert counted == [(3, 21)]
    storage.buffer.set_sampler(expstore.SliceSampler(slice_len=7))
    steps = storage.buffer.sample(14)["observation"][:, 1]
    assert steps.tolist() == list(range(7)) * 2
    storage.buffer.extend(rows(4, 21))
    assert rb.extend(rows(1, 25)).tolist() == [25], "the cursor is the store's, whoever writes"


def test_own_samplers_are_notified_of_new_rows(storage: ExpStorage) -> None:
    told: list[int] = []

    class Listening(expstore.RandomSampler):
        def on_write(self, ids: Any) -> None:
            told.extend(ids.tolist())

    storage.buffer.set_sampler(Listening())
    rb = theirs.TensorDictReplayBuffer(storage=storage)
    rb.extend(rows(3))
    rb.add(rows(1, 3)[0])
    assert told == [1, 2, 3, 4]


def test_another_process_reads(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows_in_memory(monkeypatch)
    with ExpStorage(store_path, capacity=CAPACITY).buffer as kept:
        rb = theirs.TensorDictReplayBuffer(storage=ExpStorage(kept), batch_size=8)
        rb.extend(rows(10))
        follower = ExpStorage(store_path, mode="r")
        other = theirs.TensorDictReplayBuffer(storage=follower, batch_size=8)
        assert other[:]["observation"][:, 0].tolist() == list(range(10))
        revision = follower._mutation_revision
        rb.extend(rows(10, 10))
        assert follower._mutation_revision != revision
        assert len(other) == 20
        with pytest.raises(expstore.errors.StateError, match="read"):
            other.extend(rows(1))
        copied = pickle.loads(pickle.dumps(rb))
        assert copied.sample().shape == (8,)
        follower.buffer.close()


# -- what is refused --------------------------------------------------------------------------------------


def test_a_writer_that_was_set_later_is_aligned(storage: ExpStorage) -> None:
    rb = theirs.TensorDictReplayBuffer(storage=storage)
    rb.extend(rows(10))
    rb.set_writer(theirs.TensorDictRoundRobinWriter())
    with pytest.raises(expstore.errors.StateError, match="at 0, but the store's next rows are at 10"):
        rb.add(rows(1, 10)[0])
    assert len(rb) == 10
    storage.align(rb)
    assert rb.extend(rows(2, 10)).tolist() == [10, 11]


def test_batches_of_more_dims_are_refused_where_all_dims_are_rows(store_path: Path) -> None:
    with ExpStorage(store_path, capacity=CAPACITY).buffer as kept:
        rb = theirs.TensorDictReplayBuffer(storage=ExpStorage(kept))
        batch = torch.stack([rows(5), rows(5, 7)])
        with pytest.raises(
            expstore.errors.SchemaError, match=r"2 rows were to be written, and the batch has 10"
        ):
            rb.extend(batch)
        assert len(rb) == 0
        rb.extend(batch.reshape(-1))
        assert len(rb) == 10


def test_changes_that_would_reach_copies_only_are_refused(storage: ExpStorage) -> None:
    rb = theirs.TensorDictReplayBuffer(storage=storage)
    rb.extend(rows(10))
    zeros = torch.zeros(10, 1)
    for change in (
        lambda: rb.set_(("next", "reward"), zeros),
        lambda: rb.set_at_(("next", "reward"), zeros[:2], torch.arange(2)),
        lambda: rb.update_(TensorDict({"next": {"reward": zeros}}, [10])),
    ):
        with pytest.raises(expstore.errors.StateError, match="returns copies: the store was not changed"):
            change()
    assert (rb[:]["next", "reward"] == 1).all()


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda: {"writer": theirs.TensorDictMaxValueWriter(rank_key="key")}, "places rows at other indices"),
        (lambda: {"writer": theirs.RoundRobinWriter(compilable=True)}, "not compilable"),
        (lambda: {"sampler": ConsumingSampler()}, "expstore.ConsumingSampler"),
        (lambda: {"checkpointer": theirs.TensorStorageCheckpointer()}, "dumps.. writes snapshots"),
    ],
)
def test_parts_that_mean_nothing_here_are_refused(
    storage: ExpStorage, made: Callable[[], Made], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        theirs.TensorDictReplayBuffer(storage=storage, **made())


def test_a_data_set_may_be_read_only(storage: ExpStorage) -> None:
    storage.buffer.extend(rows(10))
    rb = theirs.TensorDictReplayBuffer(storage=storage, writer=theirs.ImmutableDatasetWriter(), batch_size=4)
    assert rb.sample().shape == (4,)
    with pytest.raises(RuntimeError, match="doesn't allow writing"):
        rb.extend(rows(1))


def test_unsuitable_stores_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="not int"):
        ExpStorage(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="capacity: settings are only allowed with a folder"):
        ExpStorage(MemoryStorage(3), capacity=3)
    with pytest.raises(expstore.errors.StateError, match="keeps objects"):
        ExpStorage(expstore.ListStorage(3))
    best = expstore.open(tmp_path / "best.exp", capacity=3, writer=expstore.TensorDictMaxValueWriter("a"))
    best.extend(TensorDict({"a": torch.ones(2)}, [2]))
    with best, pytest.raises(expstore.errors.StateError, match="the best rows only"):
        ExpStorage(best)


def test_a_store_without_bound_is_not_emptied(store_path: Path) -> None:
    with ExpStorage(store_path).buffer as kept:
        rb = theirs.TensorDictReplayBuffer(storage=ExpStorage(kept), batch_size=4)
        rb.empty()
        assert rb.extend(rows(10)).tolist() == list(range(10))
        assert rb.sample().shape == (4,)
        with pytest.raises(expstore.errors.StateError, match="never reuses indices"):
            rb.empty()


def test_indices_without_rows_are_not_drawn() -> None:
    kept = MemoryStorage(CAPACITY)
    rb = theirs.TensorDictReplayBuffer(storage=ExpStorage(kept), batch_size=4)
    rb.extend(rows(10))
    kept._retire(3)  # as an extend that was killed leaves it
    with pytest.raises(expstore.errors.StateError, match="without gaps"):
        rb.sample()
    rb.extend(rows(33, 10))
    assert rb.sample().shape == (4,)


def test_a_process_that_is_started_to_write_is_refused_before(store_path: Path) -> None:
    with ExpStorage(store_path, capacity=CAPACITY).buffer as kept:
        rb = theirs.TensorDictReplayBuffer(storage=ExpStorage(kept))
        rb.extend(rows(3))
        set_spawning_popen(object())
        try:
            with pytest.raises(expstore.errors.StateError, match="a store has one writer"):
                pickle.dumps(rb.storage)
        finally:
            set_spawning_popen(None)


def test_torchrls_properties_describe_the_size(storage: ExpStorage) -> None:
    assert not storage.initialized
    assert storage.shape == (0,) or storage.shape is None
    storage.set(range(4), rows(4))
    assert storage.initialized
    assert storage.shape == (4,)
    assert storage.max_size == CAPACITY
    assert storage._last_cursor_index == 3
    assert [int(row["observation"][0]) for row in storage] == [0, 1, 2, 3]
    assert 3 in storage
    assert 4 not in storage
    assert storage.contains(torch.tensor([0, 9])).tolist() == [True, False]
    assert storage.device == torch.device("cpu")
    assert "ExpStorage" in repr(storage)


@pytest.mark.parametrize("cut", [np.arange(4), torch.arange(4), slice(0, 4)])
def test_cursors_of_any_kind(storage: ExpStorage, cut: Any) -> None:
    storage.set(cut, rows(4))
    assert len(storage) == 4


@pytest.mark.slow
def test_without_torchrl_the_reason_is_given() -> None:
    code = "import sys; sys.modules['torchrl'] = None\nimport expstore\nexpstore.torchrl.ExpStorage"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 1
    reason = "torchrl is not installed; pip install torchrl (expstore's own buffers do not need it)"
    assert reason in done.stderr
