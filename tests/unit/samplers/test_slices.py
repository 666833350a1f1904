"""Slices of episodes: lengths, first steps, and flags at their ends."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from expstore import Schema, TensorDictReplayBuffer
from expstore.errors import StateError
from expstore.samplers import PrioritizedSliceSampler, SliceSampler, SliceSamplerWithoutReplacement
from expstore.samplers.slice_options import Slicing
from expstore.storages.memory import MemoryStorage
from expstore.storages.read_view import keys_for
from tests.support.batches import trajectory_buffer, trajectory_rows


def slices(batch: TensorDict) -> list[list[int]]:
    """Cut a batch at its marks."""
    ends = np.flatnonzero(batch["next", "truncated"].numpy().reshape(-1)) + 1
    x = batch["x"].tolist()
    return [x[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def is_slice(found: list[int]) -> bool:
    return found == list(range(found[0], found[0] + len(found)))


# -- where and how long ----------------------------------------------------------------------------------


def test_short_slices_are_filled_up_if_that_is_wanted() -> None:
    rb = trajectory_buffer(
        2, 9, sampler=SliceSampler(num_slices=2, strict_length=False, pad_output=True), batch_size=8
    )
    filled = 0
    for _ in range(50):
        batch = rb.sample()
        assert batch.shape == (8,)
        mask, x = batch["collector", "mask"].view(2, 4), batch["x"].view(2, 4)
        ends = batch["next", "truncated"].view(2, 4)
        for row in range(2):
            count = int(mask[row].sum())
            assert mask[row].tolist() == [True] * count + [False] * (4 - count)
            assert is_slice(x[row, :count].tolist())
            assert (x[row, count:] == x[row, count - 1]).all()
            assert ends[row].nonzero().tolist() == [[count - 1]]
            filled += count == 2
    assert filled
    assert ("collector", "mask") not in trajectory_buffer(
        9, sampler=SliceSampler(num_slices=2, strict_length=False, pad_output=True), batch_size=8
    ).sample().keys(True)


def test_prioritized_slices_of_another_length_begin_elsewhere() -> None:
    rb = trajectory_buffer(6, 3, sampler=PrioritizedSliceSampler(1000, 0.7, 0.5, num_slices=100))
    for length in (4, 2, 4):
        firsts = {one[0] for one in slices(rb.sample(100 * length))}
        assert firsts == {*range(1000, 1007 - length), *range(2000, 2004 - length)}


def test_prioritized_slices_have_no_span_at_their_beginning() -> None:
    with pytest.warns(UserWarning, match="Left spanning is disabled"):
        sampler = PrioritizedSliceSampler(10, 1.0, 1.0, slice_len=2, span=True)
    assert sampler.slicing.span == (False, True)


# -- what batches say ------------------------------------------------------------------------------------


def test_ends_are_marked() -> None:
    done = torch.zeros(6, 1, dtype=torch.bool)
    done[5] = True
    rb = TensorDictReplayBuffer(storage=MemoryStorage(100), sampler=SliceSampler(slice_len=3), batch_size=3)
    stored = {"done": done, "truncated": torch.zeros(6, 1, dtype=torch.bool), "terminated": done}
    rb.extend(trajectory_rows(1, 6, next=TensorDict(stored, [6]), is_init=(torch.arange(6) == 2)[:, None]))
    seen = set()
    for _ in range(30):
        batch = rb.sample()
        first = batch["x"][0].item() - 1000
        seen.add(first)
        assert batch["next", "truncated"].view(-1).tolist() == [False, False, True]
        assert batch["next", "done"].view(-1).tolist() == [False, False, True]
        assert batch["next", "terminated"].view(-1).tolist() == [False, False, first == 3]
        # Step 2 is a beginning, which makes it an episode's first.
        assert batch["is_init"].view(-1).tolist() == [True, False, False]
    assert seen == {2, 3}


def test_a_truncation_that_continues_does_not_end_a_slice() -> None:
    """As where a collector marks the ends of its batches: the trajectory goes on in the next one."""
    rb = TensorDictReplayBuffer(storage=MemoryStorage(100), sampler=SliceSampler(slice_len=6), batch_size=6)
    cut = (torch.arange(6) % 3 == 2)[:, None]
    rb.extend(trajectory_rows(1, 6, next=TensorDict({"truncated": cut, "done": cut}, [6])))
    batch = rb.sample()
    assert batch["x"].tolist() == list(range(1000, 1006))
    assert batch["next", "truncated"].view(-1).tolist() == [False] * 5 + [True]
    assert batch["next", "done"].view(-1).tolist() == [False, False, True, False, False, True]


def test_marks_have_the_shape_and_dtype_of_what_is_stored() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(100), sampler=SliceSampler(slice_len=2), batch_size=4)
    rb.extend(trajectory_rows(1, 6, next=TensorDict({"truncated": torch.zeros(6, dtype=torch.uint8)}, [6])))
    batch = rb.sample()
    assert batch["next", "truncated"].dtype is torch.uint8
    assert batch["next", "truncated"].tolist() == [0, 1, 0, 1]
    assert batch["next", "done"].tolist() == [[False], [True], [False], [True]]
    assert batch.get("is_init") is None


# -- other fields ----------------------------------------------------------------------------------------


@pytest.fixture
def two_names() -> TensorDictReplayBuffer:
    """Episodes of 6 steps, of which each half has a name of its own, under floats; two come in turn."""
    rb = TensorDictReplayBuffer(storage=MemoryStorage(30))
    for step in range(6):
        for trajectory in (1, 2):
            half = torch.tensor([trajectory + (0.5 if step >= 3 else 0.0)])
            rb.extend(trajectory_rows(trajectory, 1, step, half=half, cut=torch.tensor([[step == 1]])))
    return rb


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [list(range(t, t + 6)) for t in (1000, 2000)]),
        ({"traj_key": "episode"}, [list(range(t, t + 6)) for t in (1000, 2000)]),
        ({"traj_key": "half"}, [list(range(t, t + 3)) for t in (1000, 1003, 2000, 2003)]),
        (
            {"end_key": "cut"},
            [[t, t + 1] for t in (1000, 2000)] + [[t, t + 1, t + 2, t + 3] for t in (1002, 2002)],
        ),
        (
            {"trajectory_key": "half", "end_keys": ["cut", "not there"]},
            [[t, t + 1] for t in (1000, 2000)]
            + [[t + 2] for t in (1000, 2000)]
            + [[t + 3, t + 4, t + 5] for t in (1000, 2000)],
        ),
    ],
)
def test_trajectories_by_other_fields(
    two_names: TensorDictReplayBuffer, options: dict[str, Any], expected: list[list[int]]
) -> None:
    rb = TensorDictReplayBuffer(
        storage=two_names.storage, sampler=SliceSampler(slice_len=9, strict_length=False, **options)
    )
    found = {tuple(one) for _ in range(60) for one in slices(rb.sample(9))}
    assert sorted(found) == sorted(tuple(one) for one in expected)


def test_they_are_kept_current(two_names: TensorDictReplayBuffer) -> None:
    sampler = SliceSampler(slice_len=9, strict_length=False, traj_key="half")
    rb = TensorDictReplayBuffer(storage=two_names.storage, sampler=sampler)

    def found() -> list[int]:
        return sorted({len(one) for _ in range(80) for one in slices(rb.sample(9))})

    assert found() == [3]
    rb.extend(
        trajectory_rows(1, 2, 6, half=torch.tensor([1.5, 7.0]), cut=torch.zeros(2, 1, dtype=torch.bool))
    )
    assert found() == [1, 3, 4]
    everything = rb[:]
    everything["half"][:] = 4.0
    rb[:] = everything
    assert found() == [9]
    rb.empty()
    rb.extend(
        trajectory_rows(3, 2, 0, half=torch.tensor([4.0, 4.0]), cut=torch.zeros(2, 1, dtype=torch.bool))
    )
    assert found() == [2]
    for number in range(200):
        rb.extend(
            trajectory_rows(
                4, 1, number, half=torch.tensor([float(number // 7)]), cut=torch.tensor([[False]])
            )
        )
        rb.sample(9)
    assert found() == [4, 5, 7]  # of the 30 newest rows


def test_a_missing_trajectory_field_falls_back_to_the_ends(caplog: pytest.LogCaptureFixture) -> None:
    for kind in (SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler):
        sampler = kind(slice_len=4, traj_key="nobody")
        rb = trajectory_buffer(5, 9, 4, sampler=sampler, batch_size=8)
        for _ in range(5):
            found = slices(rb.sample())
            assert all(is_slice(one) and len(one) == 4 for one in found)
        assert sum("no field is named 'nobody'" in message for message in caplog.messages) == 1
        caplog.clear()


# -- trajectories by row ---------------------------------------------------------------------------------

BY_ROW = [
    {"trajectories": torch.tensor([7] * 5 + [8] * 9 + [7] * 4)},
    {"ends": torch.isin(torch.arange(18), torch.tensor([4, 13]))},
]


@pytest.mark.parametrize("by_row", BY_ROW)
@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_trajectories_by_row_that_are_the_episodes(kind: Any, by_row: dict[str, torch.Tensor]) -> None:
    rb = trajectory_buffer(5, 9, 4, sampler=kind(slice_len=4, **by_row), batch_size=8)
    assert all(is_slice(one) for _ in range(5) for one in slices(rb.sample()))
    rb.extend(trajectory_rows(9, 6))  # as in a buffer without these arguments
    seen = {one[0] // 1000 for _ in range(50) for one in slices(rb.sample())}
    assert seen == {1, 2, 3, 9}
    other = pickle.loads(pickle.dumps(rb.sampler))  # which need not compare again
    assert TensorDictReplayBuffer(storage=rb.storage, sampler=other, batch_size=8).sample().batch_size == (8,)


def test_trajectories_by_row_in_a_ring_and_across_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expstore.samplers.row_trajectories._CHUNK", 3)
    ends = [False] * 3 + [True, True] + [False] * 5
    for given in (ends, [False] * 10):
        sampler = SliceSampler(slice_len=4, ends=given, cache_values=True)
        rb = TensorDictReplayBuffer(storage=MemoryStorage(10), sampler=sampler, batch_size=4)
        rb.extend(trajectory_rows(1, 5))
        rb.extend(trajectory_rows(2, 9))  # the end of which is at the beginning of the ring
        if given is ends:
            assert all(is_slice(one) for one in slices(rb.sample()))
    with pytest.raises(StateError, match="does not end at row 3, but the store's episode does"):
        rb.sample()


# -- what is refused -------------------------------------------------------------------------------------


# -- copies and restarts ---------------------------------------------------------------------------------


@pytest.mark.parametrize("filter", [{}, {"where": "x >= 0"}])
@pytest.mark.parametrize("kind", [SliceSampler, SliceSamplerWithoutReplacement, PrioritizedSliceSampler])
def test_buffers_may_share_a_sampler(kind: type[Any], filter: dict[str, str]) -> None:
    sampler = kind(slice_len=4, **filter)
    schema = Schema.infer({("x",): ("int64", ()), ("episode",): ("int64", ())})
    one, other = (
        TensorDictReplayBuffer(storage=MemoryStorage(1000), sampler=sampler, batch_size=8) for _ in range(2)
    )
    for rb in (one, other):
        rb.storage.prepare(schema, keys_for(rb.storage, schema))
    one.extend(trajectory_rows(1, 100))
    other.extend(trajectory_rows(2, 30))
    for _ in range(3):
        assert (one.sample()["x"] // 1000 == 1).all()
        assert (other.sample()["x"] // 1000 == 2).all()


def test_every_place_is_where_it_was_counted() -> None:
    """Every number of steps, every span: as many places as `starts` says, each with its slice."""
    for strict in (True, False):
        for span in ((0, 0), (1, 0), (0, 2), (True, True), (2, 1)):
            slicing = Slicing.of(
                num_slices=None, slice_len=3, strict_length=strict, pad_output=False, span=span,
                truncated_key=None, init_key=None,
            )  # fmt: skip
            for have in range(1, 8):
                count = int(slicing.starts(np.array([have]), 3)[0])
                share = (np.arange(count) + 0.5) / max(count, 1)
                begins, lengths = slicing.place(np.full(count, have), 3, share)
                found = list(zip(begins.tolist(), lengths.tolist(), strict=True))
                full = min(have, 3)
                left, right = (full - 1 if side is True else min(side, full - 1) for side in span)
                expected = [
                    (max(place, 0), min(place + full, have) - max(place, 0))
                    for place in range(-left, have - full + right + 1)
                ]
                assert found == (expected if have >= 3 or not strict else [])
