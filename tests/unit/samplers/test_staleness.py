"""Sampling by staleness: versions follow rows through all changes, and draws follow from the rows."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import MemoryStorage, StalenessAwareSampler, TensorDictReplayBuffer, ZarrStorage
from expstore.core.draws import Draws
from expstore.core.id_set import IdSet
from expstore.errors import NotReadyError, SchemaError


def rows(versions: Any, first: int = 0) -> TensorDict:
    versions = torch.as_tensor(versions)
    count = versions.shape[0]
    return TensorDict({"policy_version": versions, "number": torch.arange(first, first + count)}, [count])


def buffer(storage: Any, size: int = 8, consumer: int = 0, **keywords: Any) -> TensorDictReplayBuffer:
    sampler = StalenessAwareSampler(**keywords)
    sampler.consumer_version = consumer
    return TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=size, with_ids=True)


def sampler_of(rb: TensorDictReplayBuffer) -> StalenessAwareSampler:
    assert isinstance(rb.sampler, StalenessAwareSampler)
    return rb.sampler


def test_batches_say_how_stale_their_rows_are() -> None:
    rb = buffer(MemoryStorage(20), size=9, consumer=7)
    rb.extend(rows([[5], [5], [5], [2], [2], [2], [7], [7], [7]]))  # of shape (1,), as collectors write
    batch = rb.sample()
    assert batch["staleness"].dtype == torch.float32
    assert batch["staleness"].tolist() == (7 - batch["policy_version"][:, 0]).tolist()
    assert sorted(batch["number"].tolist()) == list(range(9)), "no row comes twice where there are enough"
    assert rb.sample(10)["number"].unique().numel() < 10


def test_stale_rows_are_left_out() -> None:
    rb = buffer(MemoryStorage(20), size=100, consumer=9, max_staleness=3)
    rb.extend(rows([9, 5, 6, 5, 7, 4]))
    assert set(rb.sample()["policy_version"].tolist()) == {9, 6, 7}
    sampler_of(rb).max_staleness = 0
    assert set(rb.sample()["policy_version"].tolist()) == {9}
    sampler_of(rb).max_staleness = -1
    assert set(rb.sample(1000)["policy_version"].tolist()) == {9, 5, 6, 7, 4}
    sampler_of(rb).max_staleness = 3
    for _ in range(4):
        sampler_of(rb).increment_consumer_version()
    with pytest.raises(
        NotReadyError,
        match=r"All 6 entries in the buffer exceed max_staleness=3 \(consumer_version=13\).* Increase",
    ):
        rb.sample()


def test_a_version_ahead_of_the_consumer_is_as_fresh_as_can_be() -> None:
    rb = buffer(MemoryStorage(20), size=300, consumer=1, max_staleness=0)
    rb.extend(rows([0, 1, 2, 50]))
    batch = rb.sample()
    assert set(batch["policy_version"].tolist()) == {1, 2, 50}
    assert batch["staleness"].tolist() == [0.0] * 300


def test_custom_weights() -> None:
    seen: list[torch.Tensor] = []

    def weights(staleness: torch.Tensor) -> torch.Tensor:
        seen.append(staleness)
        return torch.where(staleness == 2, 0.0, 1e200 * (staleness + 1).double())

    rb = buffer(MemoryStorage(9), size=4, consumer=3, staleness_weight_fn=weights)
    rb.extend(rows([3, 3, 1, 0, 0]))
    assert sorted(rb.sample()["policy_version"].tolist()) == [0, 0, 3, 3]
    assert seen[0].dtype == torch.float32
    assert seen[0].tolist() == [0, 2, 3], "once per run of rows of one version"
    rb.sample()
    assert len(seen) == 2, "it is asked anew: its answer may be another one"


@pytest.mark.parametrize(
    "weights", [lambda s: s - 1, lambda s: s / 0, lambda s: s[:1], lambda s: s[:, None] + 1, lambda s: 1.0]
)
def test_wrong_weights_are_refused(weights: Any) -> None:
    rb = buffer(MemoryStorage(9), staleness_weight_fn=weights)
    rb.extend(rows([0, 1, 0]))
    sampler_of(rb).consumer_version = 1
    with pytest.raises(ValueError, match="staleness_weight_fn must return 3 finite weights"):
        rb.sample()


def test_invalid_arguments_are_refused() -> None:
    for wrong, error in (
        ({"max_staleness": -2}, ValueError),
        ({"max_staleness": 1.5}, TypeError),
    ):
        with pytest.raises(error):
            StalenessAwareSampler(**wrong)  # type: ignore[arg-type]
    sampler = StalenessAwareSampler()
    for value, error in ((-1, ValueError), (2**63, ValueError), (0.5, TypeError)):
        with pytest.raises(error):
            sampler.consumer_version = value  # type: ignore[assignment]
    assert (sampler.consumer_version, sampler.max_staleness) == (0, -1)
    rb = buffer(MemoryStorage(9), version_key=("collector", "version"))
    rb.extend(rows([1]))
    with pytest.raises(SchemaError, match=r"Could not find key 'collector.version' in the replay buffer"):
        rb.sample()
    for versions in (torch.zeros(3, 2), torch.zeros(3, dtype=torch.bool), torch.zeros(3).bfloat16()):
        rb = buffer(MemoryStorage(9))
        rb.extend(rows(versions))
        with pytest.raises(SchemaError, match="a policy's version is one number, but field"):
            rb.sample()
    rb = buffer(MemoryStorage(9), staleness_weight_fn=torch.zeros_like)
    rb.extend(rows([1, 1, 1]))
    with pytest.raises(NotReadyError, match="weight 0 for all 3 rows"):
        rb.sample()


class Counting(MemoryStorage):
    """Counts the rows whose versions are read, and lets something happen meanwhile."""

    taken = 0
    meanwhile: Callable[[], object] | None = None
    late = True  # what is read is what is in the slots afterwards

    def read(self, ids: Any, places: Any = None) -> Any:
        found = super().read(ids, places)
        if places is not None:
            self.taken += ids.size
            if self.meanwhile is not None:
                act, self.meanwhile = self.meanwhile, None
                act()
                found = super().read(ids, places) if self.late else found
        return found


def test_every_version_is_read_once() -> None:
    storage = Counting(1000)
    rb = buffer(storage)
    for step in range(30):
        rb.extend(rows(torch.full((100,), step), 100 * step))
        for _ in range(3):
            rb.sample()
    assert storage.taken == 3000
    assert sampler_of(rb)._known.versions.first.size == 10


def test_versions_of_rows_that_are_overwritten_while_they_are_read_are_not_used() -> None:
    storage = Counting(5000)
    rb = buffer(storage, size=200, consumer=9)
    rb.extend(rows(torch.ones(5000)))

    def overwrite() -> None:
        for step in range(4):
            rb.extend(rows(torch.full((2000,), 8.0), 5000 + 2000 * step))

    storage.meanwhile = overwrite
    batch = rb.sample()
    assert storage.counters.redraws == 1
    assert storage.meanwhile is None
    assert batch["id"].tolist() == (batch["number"] + 1).tolist()
    assert batch["staleness"].tolist() == (9 - batch["policy_version"]).tolist()


def test_a_change_while_versions_are_read_is_seen_by_the_next_batch() -> None:
    storage = Counting(10)
    storage.late = False
    rb = buffer(storage, size=10, consumer=9)
    rb.extend(rows([1] * 10))

    def change() -> None:
        rb[3:6] = rows([5, 5, 5])

    storage.meanwhile = change
    rb.sample()
    batch = rb.sample()
    assert batch["staleness"].tolist() == (9 - batch["policy_version"]).tolist()
    assert batch["staleness"].unique().tolist() == [4, 8]


def find_distribution(rb: TensorDictReplayBuffer) -> list[tuple[int, int, float]]:
    """Runs of one version among the readable rows, found by looking at each."""
    found: list[tuple[int, int, float]] = []
    window = rb.storage.window
    for number in window.ids().tolist():
        (column,) = rb.storage.read(np.array([number]), [0])
        version = float(column[0])
        if found and found[-1][1] == number - 1 and found[-1][2] == version:
            found[-1] = found[-1][0], number, version
        else:
            found.append((number, number, version))
    return found


STORAGES: dict[str, Callable[[Path], Any]] = {
    "memory": lambda path: MemoryStorage(60),
    "zarr": lambda path: ZarrStorage(path / "a.exp", 60),
    "unbounded": lambda path: ZarrStorage(path / "a.exp"),
}


@pytest.mark.parametrize("kind", STORAGES)
def test_versions_follow_the_rows(kind: str, tmp_path: Path) -> None:
    """Extend, add, change, empty and give up rows; a sampler that has seen it all draws as a new one."""
    rb, rng = buffer(STORAGES[kind](tmp_path), size=40, consumer=5), np.random.default_rng(4)
    storage: Any = rb.storage
    for step in range(60):
        if step % 20 == 13:
            rb.empty()
        elif step % 7 == 3:
            index = storage.geometry.index_of(rng.choice(storage.window.ids(), 5))
            changed = rb[index]
            changed["policy_version"] = torch.from_numpy(rng.integers(0, 3, 5))
            rb[index] = changed
        elif step % 9 == 4 and storage.window.size > 20:
            first = storage.window.low + int(rng.integers(1, 10))
            storage._state.stored = replace(storage.window, deleted=IdSet.of([(first, first + 4)]))
        count = int(rng.integers(1, 30))
        rb.extend(rows(torch.from_numpy(np.sort(rng.integers(0, 4, count)))))
        rb.add(rows([3])[0])
        batch = rb.sample()
        assert batch["staleness"].tolist() == (5 - batch["policy_version"]).tolist()
        assert storage.window.holds(batch["id"].numpy()).all()
        known = sampler_of(rb)._known.versions
        runs = zip(known.first.tolist(), known.last.tolist(), known.version.tolist(), strict=True)
        assert list(runs) == find_distribution(rb)
        other = StalenessAwareSampler()
        other.consumer_version = 5
        one = sampler_of(rb).sample(storage, 40, Draws(1).generator(step))
        two = other.sample(storage, 40, Draws(1).generator(step))
        np.testing.assert_array_equal(one.ids, two.ids)
    rb.close()


def test_few_fresh_rows_among_many_stale_ones() -> None:
    """A batch that takes nearly all of the weight, and far more rows than have it."""
    rb = buffer(MemoryStorage(3000), size=500, consumer=1, staleness_weight_fn=lambda s: 1e-12**s)
    rb.extend(rows([0] * 1490 + [1] * 20 + [0] * 1490))
    for _ in range(5):
        batch = rb.sample()
        assert batch["id"].unique().numel() == 500
        assert batch["staleness"].tolist() == [0] * 20 + [1] * 480


def test_threads_sample_while_one_extends_and_changes() -> None:
    rb = buffer(MemoryStorage(500), size=64, consumer=20_000)
    rb.extend(rows(torch.zeros(500, dtype=torch.int64)))
    stop, faults = threading.Event(), []

    def sample() -> None:
        try:
            while not stop.is_set():
                batch = rb.sample()
                # A row that was changed between drawing and reading may have moved on by one change.
                off = (20_000 - batch["staleness"].long() - batch["policy_version"]) % 1000
                if (off != 0).any() or (batch["id"] - 1 != batch["number"]).any():
                    faults.append(batch)
        except BaseException as exc:
            faults.append(exc)

    threads = [threading.Thread(target=sample) for _ in range(4)]
    for thread in threads:
        thread.start()
    for step in range(300):
        rb.extend(rows(torch.full((40,), step % 1000), 500 + 40 * step))
        if step % 5 == 0:
            changed = rb[7:9]
            changed["policy_version"] += 1000
            rb[7:9] = changed
    stop.set()
    for thread in threads:
        thread.join()
    assert not faults


# -- across restarts ------------------------------------------------------------------------------------


def opened(path: Path, **keywords: Any) -> TensorDictReplayBuffer:
    sampler = StalenessAwareSampler(max_staleness=30)
    return expstore.open(path, sampler=sampler, batch_size=16, seed=5, **keywords)


def live(path: Path, capacity: int | None) -> TensorDictReplayBuffer:
    rb = opened(path, capacity=capacity)
    for step in range(12):
        rb.extend(rows(torch.full((9,), step // 2), 9 * step))
        sampler_of(rb).consumer_version = step // 2 + 1
        rb.sample()
    return rb


@pytest.mark.some(2)
@pytest.mark.parametrize("capacity", [50, None])
@pytest.mark.parametrize("end", ["close", "kill after flush", "kill"])
def test_a_restart_continues_with_the_next_batch(capacity: int | None, end: str, tmp_path: Path) -> None:
    with live(tmp_path / "whole.exp", capacity) as whole:
        expected = [whole.sample() for _ in range(50)]
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)
        rb = live(tmp_path / "parts.exp", capacity)
        if end == "close":
            rb.close()
        elif end == "kill after flush":
            rb.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    if end == "kill after flush":  # what a restart of the machine leaves of it
        (tmp_path / "parts.exp" / "STATE").write_bytes(bytes(4096))
    with opened(tmp_path / "parts.exp") as again:
        assert sampler_of(again).consumer_version == 6
        for batch in expected:
            assert (again.sample() == batch).all()


def test_a_snapshot_brings_its_version_and_one_that_was_set_before_opening_counts(tmp_path: Path) -> None:
    with live(tmp_path / "a.exp", 50) as rb:
        rb.dumps(tmp_path / "versions")
        expected = [rb.sample()["number"].tolist() for _ in range(20)]
        sampler_of(rb).consumer_version = 40
        rb.extend(rows([40] * 20))
        rb.sample()
        rb.loads(tmp_path / "versions")
        assert sampler_of(rb).consumer_version == 6
        assert [rb.sample()["number"].tolist() for _ in range(20)] == expected
    ahead = StalenessAwareSampler()
    ahead.consumer_version = 9
    with expstore.open(tmp_path / "a.exp", sampler=ahead, batch_size=4) as rb:
        assert ahead.consumer_version == 9
        rb.loads(tmp_path / "versions")
        assert ahead.consumer_version == 6
        ahead.consumer_version = 9
    with opened(tmp_path / "a.exp") as rb:
        assert sampler_of(rb).consumer_version == 9


def test_state_dict_goes_to_another_sampler() -> None:
    one, other = StalenessAwareSampler(max_staleness=4), StalenessAwareSampler()
    one.consumer_version = 11
    other.load_state_dict(one.state_dict())
    assert one.state_dict() == other.state_dict() == {"consumer_version": 11, "max_staleness": 4}
    assert repr(other) == "StalenessAwareSampler(consumer_version=11, max_staleness=4)"


def test_a_reader_and_its_copies_have_versions_of_their_own(tmp_path: Path) -> None:
    with live(tmp_path / "a.exp", 50) as writer:
        sampler = StalenessAwareSampler(max_staleness=1)
        sampler.consumer_version = 5
        path = tmp_path / "a.exp"
        with expstore.open(path, mode="r", sampler=sampler, batch_size=200, seed=1) as reader:
            assert set(reader.sample()["policy_version"].tolist()) == {4, 5}
            copy = pickle.loads(pickle.dumps(reader))
            assert sampler_of(copy).consumer_version == 5
            sampler.consumer_version = 4
            assert set(reader.sample()["policy_version"].tolist()) == {3, 4, 5}
            assert set(copy.sample()["policy_version"].tolist()) == {4, 5}
            writer.extend(rows([9] * 45))
            writer.flush()
            sampler.consumer_version = 9
            assert set(reader.sample()["policy_version"].tolist()) == {9}
            copy.close()
            assert sampler_of(writer).consumer_version == 6
            writer.close()
            reader.sample()
            before = reader.storage.epochs.deleted
            with opened(path):  # after a power cut ids may come again
                reader.sample()
                assert reader.storage.epochs.deleted > before
