"""New slices are returned once each, in order, through rings, lanes, kills and copies; then any slices."""

from __future__ import annotations

import pickle
import threading
from functools import partial
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from expstore import MemoryStorage, StreamingSliceSampler, TensorDictReplayBuffer
from expstore.core import tuning
from tests.support.batches import memory_buffer, steps
from tests.support.flat_storages import flatten_dims

values = partial(steps, key="value")


def slices(batch: Any, length: int = 3) -> list[list[int]]:
    found: list[list[int]] = batch["value"].reshape(-1, length).tolist()
    return found


def test_new_slices_come_in_order_and_once() -> None:
    rb = memory_buffer(seed=4, sampler=StreamingSliceSampler(slice_len=3), batch_size=6)
    rb.extend(values(13))
    assert slices(rb.sample()) == [[0, 1, 2], [3, 4, 5]]
    batch = rb.sample()
    assert slices(batch) == [[6, 7, 8], [9, 10, 11]]
    assert batch["next", "truncated"].flatten().tolist() == [False, False, True] * 2
    rb.extend(values(2, 13))  # completes 12 to 14
    first, second = slices(rb.sample())
    assert first == [12, 13, 14]
    assert second[0] + 2 == second[2]
    seen = {tuple(one) for _ in range(200) for one in slices(rb.sample())}
    assert len(seen) == 13  # all places in 15 rows


def test_slices_do_not_cross_episodes_and_leave_what_is_over() -> None:
    rb = memory_buffer(seed=4, sampler=StreamingSliceSampler(slice_len=3))
    rb.extend(values(5, end="terminated"))
    rb.extend(values(7, 10, end="terminated"))
    rb.extend(values(3, 20))
    assert slices(rb.sample(12)) == [[0, 1, 2], [10, 11, 12], [13, 14, 15], [20, 21, 22]]


def test_interleaved_lanes_are_told_apart() -> None:
    storage = MemoryStorage(100, seed=4)
    flatten_dims(storage)
    rb = TensorDictReplayBuffer(storage=storage, sampler=StreamingSliceSampler(slice_len=3))
    for start in (0, 2, 4):
        rb.extend(torch.stack([values(2, start), values(2, 100 + start)]))
    assert sorted(slices(rb.sample(12))) == [[0, 1, 2], [3, 4, 5], [100, 101, 102], [103, 104, 105]]


def test_slices_that_began_to_leave_are_left_out() -> None:
    rb = memory_buffer(10, seed=4, sampler=StreamingSliceSampler(slice_len=3))
    rb.extend(values(9))
    rb.extend(values(5, 9))  # 0 to 3 have left
    assert slices(rb.sample(6)) == [[6, 7, 8], [9, 10, 11]]


def test_many_rows_are_looked_through_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SLICE_SEARCH_ROWS", 4)
    rb = memory_buffer(seed=4, sampler=StreamingSliceSampler(slice_len=3))
    rb.extend(values(30))
    found = [one for _ in range(5) for one in slices(rb.sample(6))]
    assert found == [[start, start + 1, start + 2] for start in range(0, 30, 3)]


def test_rows_from_before_are_not_new() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(100, seed=4))
    rb.extend(values(30))
    rb.set_sampler(StreamingSliceSampler(slice_len=3))
    assert rb.sampler.state_dict() == {"written": 30}
    rb.extend(values(3, 30))
    assert [30, 31, 32] in slices(rb.sample(6))


def test_batches_made_ahead_and_given_back_come_again() -> None:
    rb = memory_buffer(seed=4, sampler=StreamingSliceSampler(slice_len=3), batch_size=3, prefetch=2)
    rb.extend(values(12))
    assert slices(rb.sample()) == [[0, 1, 2]]
    rb.sampler.rewind(rb.storage)  # what a change of the generator does, for instance
    rb.set_rng(torch.Generator().manual_seed(0))
    assert [slices(rb.sample()) for _ in range(3)] == [[[3, 4, 5]], [[6, 7, 8]], [[9, 10, 11]]]


def test_rows_after_empty_are_new() -> None:
    rb = memory_buffer(seed=4, sampler=StreamingSliceSampler(slice_len=3), batch_size=3)
    rb.extend(values(11, end="terminated"))
    rb.sample()
    rb.empty()
    rb.extend(values(6, 20))
    assert [slices(rb.sample())[0] for _ in range(2)] == [[20, 21, 22], [23, 24, 25]]
    again = pickle.loads(pickle.dumps(rb.sampler))
    rb.extend(values(3, 30))
    rb.set_sampler(again)
    assert slices(rb.sample()) == [[30, 31, 32]]


def test_during_writes_every_slice_is_whole_and_drawn_at_most_once() -> None:
    rb = memory_buffer(400, seed=4, sampler=StreamingSliceSampler(slice_len=4), batch_size=8)
    rb.extend(values(40))

    def write() -> None:
        for start in range(40, 6000, 10):
            rb.extend(values(10, start))

    def draw() -> list[int]:
        found = slices(rb.sample(), 4)
        assert all(one == list(range(one[0], one[0] + 4)) for one in found)
        return [one[0] for one in found]

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        draw()  # if the writer has overwritten new slices meanwhile, others replace them
    writer.join()
    rb.extend(values(12, 6000))
    rest = [start for _ in range(400 // 8) for start in draw()]
    new = rest[: rest.index(6008) + 1]
    assert new == list(range(new[0], 6012, 4))


def keyed(capacity: int = 100, **options: Any) -> Any:
    sampler = StreamingSliceSampler(slice_len=3, **options)
    return TensorDictReplayBuffer(storage=MemoryStorage(capacity, seed=4), sampler=sampler, batch_size=3)


def test_trajectories_by_other_names_are_cut_from_their_beginning() -> None:
    rb = keyed(traj_key="env")
    env = torch.tensor([0, 1, 0, 0, 1, 1, 0, 0, 0])
    rb.extend(values(9, env=env))
    assert [slices(rb.sample())[0] for _ in range(3)] == [[0, 2, 3], [1, 4, 5], [6, 7, 8]]


def test_other_ends_cut_trajectories() -> None:
    rb = keyed(end_key=("flags", "end"))
    end = torch.zeros(10, 1, dtype=torch.bool)
    end[3] = True
    rb.extend(values(10, flags=TensorDict({"end": end}, [10])))
    assert [slices(rb.sample())[0] for _ in range(3)] == [[0, 1, 2], [4, 5, 6], [7, 8, 9]]


def test_slices_stay_aligned_after_first_rows_have_left() -> None:
    rb = keyed(capacity=8, traj_key="env")
    for start in range(0, 20, 5):
        rb.extend(values(5, start, env=torch.zeros(5, dtype=torch.int64)))
        rb.sample()  # [0, 1, 2], [3, 4, 5], ...: some are overtaken, none shifted
    rb.extend(values(4, 20, env=torch.zeros(4, dtype=torch.int64)))
    assert slices(rb.sample())[0] == [18, 19, 20]
    assert slices(rb.sample())[0] == [21, 22, 23]
