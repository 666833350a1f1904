"""Slices of episodes: lengths, first steps, and flags at their ends."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import ReplayBuffer, Schema, TensorDictReplayBuffer
from expstore.errors import NotReadyError, SchemaError, StateError
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


def test_slices_follow_one_trajectory() -> None:
    rb = trajectory_buffer(5, 9, 4, sampler=SliceSampler(num_slices=2), batch_size=8)
    seen = set()
    for _ in range(200):
        found = slices(rb.sample())
        assert [len(one) for one in found] == [4, 4]
        assert all(is_slice(one) for one in found)
        seen.update(one[0] for one in found)
    assert seen == {1000, 1001, *range(2000, 2006), 3000}


def test_the_length_may_be_given_instead() -> None:
    rb = trajectory_buffer(5, 9, 4, sampler=SliceSampler(slice_len=2), batch_size=8)
    assert [len(one) for one in slices(rb.sample(6))] == [2, 2, 2]


def test_a_length_of_its_own_in_each_call() -> None:
    rb = trajectory_buffer(5, 9, sampler=SliceSampler(num_slices=2), batch_size=8)
    assert [[len(one) for one in slices(rb.sample(size))] for size in (4, 10, 4)] == [[2, 2], [5, 5], [2, 2]]


def test_short_trajectories_make_short_slices_if_that_is_wanted() -> None:
    rb = trajectory_buffer(2, 9, sampler=SliceSampler(num_slices=2, strict_length=False), batch_size=8)
    lengths = {len(one) for _ in range(50) for one in slices(rb.sample())}
    assert lengths == {2, 4}


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


@pytest.mark.parametrize(
    ("span", "first", "last"),
    [(False, {4}, {4}), (True, {1, 2, 3, 4}, {1, 2, 3, 4}), ((2, 0), {2, 3, 4}, {4}), ((0, 1), {4}, {3, 4})],
)
def test_a_span_lets_slices_reach_beyond(span: Any, first: set[int], last: set[int]) -> None:
    rb = trajectory_buffer(9, sampler=SliceSampler(num_slices=2, span=span), batch_size=8)
    found = [one for _ in range(200) for one in slices(rb.sample())]
    assert all(is_slice(one) for one in found)
    assert {len(one) for one in found if one[0] == 1000} == first
    assert {len(one) for one in found if one[-1] == 1008} == last
    assert {len(one) for one in found if one[0] > 1000 and one[-1] < 1008} == {4}


@pytest.mark.parametrize("by", ["trajectory", "start"])
def test_each_rule_gives_each_place_its_chance(by: Any) -> None:
    rb = trajectory_buffer(4, 5, 12, sampler=SliceSampler(slice_len=4, by=by), batch_size=400)
    counts: dict[int, int] = {}
    for _ in range(60):
        for one in slices(rb.sample()):
            counts[one[0]] = counts.get(one[0], 0) + 1
    total = sum(counts.values())
    places = {1000: 1, 2000: 2, 2001: 2, **{3000 + k: 9 for k in range(9)}}
    assert counts.keys() == places.keys()
    for place, beside in places.items():
        chance = 1 / 12 if by == "start" else 1 / 3 / beside
        assert abs(counts[place] - total * chance) < 5 * (total * chance) ** 0.5


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


def test_nothing_is_marked_if_that_is_wanted() -> None:
    rb = trajectory_buffer(
        6, sampler=SliceSampler(num_slices=2, truncated_key=None, init_key=None), batch_size=8
    )
    assert sorted(rb.sample().keys(True, True), key=str) == ["episode", "index", "x"]


def test_other_names_for_marks() -> None:
    rb = trajectory_buffer(6, sampler=SliceSampler(num_slices=2, truncated_key="cut"), batch_size=8)
    assert rb.sample()["cut"].view(-1).tolist() == [False, False, False, True] * 2
    assert rb.sample().get("done") is not None


def test_plain_buffers_report_marks_in_the_info() -> None:
    rb = trajectory_buffer(6, sampler=SliceSampler(num_slices=2), kind=ReplayBuffer, batch_size=8)
    batch, info = rb.sample(return_info=True)
    assert batch.get("next") is None
    assert info["next", "truncated"].view(-1).tolist() == [False, False, False, True] * 2
    assert info["next", "terminated"].any().item() is False


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


def test_fields_that_are_not_there_are_named(two_names: TensorDictReplayBuffer) -> None:
    for options, match in (
        ({"traj_key": "nobody", "end_key": "b"}, "no field 'nobody'"),
        ({"end_keys": ["a", ("next", "b")]}, "none of the end keys a, next.b is a field"),
    ):
        sampler = SliceSampler(slice_len=2, **options)  # type: ignore[arg-type]
        rb = TensorDictReplayBuffer(storage=two_names.storage, sampler=sampler)
        with pytest.raises(SchemaError, match=match):
            rb.sample(4)
    wide = TensorDictReplayBuffer(
        storage=MemoryStorage(10), sampler=SliceSampler(slice_len=2, traj_key="w"), batch_size=2
    )
    wide.extend(TensorDict({"w": torch.zeros(4, 2)}, [4]))
    with pytest.raises(SchemaError, match="must be one number per row"):
        wide.sample()


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


@pytest.mark.parametrize(
    ("by_row", "match"),
    [
        ({"trajectories": torch.zeros(17, dtype=torch.int64)}, "has 17 values, but the store has 18 rows"),
        ({"trajectories": torch.arange(18) // 9}, "does not end at row 4, but the store's episode does;"),
        ({"trajectories": torch.arange(18)}, "does end at row 0, but the store's episode does not;"),
        ({"ends": torch.arange(18) == 4}, "ends a trajectory does not end at row 13"),
    ],
)
def test_trajectories_by_row_that_are_not_the_episodes(by_row: dict[str, Any], match: str) -> None:
    rb = trajectory_buffer(5, 9, 4, sampler=SliceSampler(slice_len=4, **by_row), batch_size=8)
    for _ in range(2):
        with pytest.raises(StateError, match=match):
            rb.sample()


# -- what is refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({}, TypeError, "Either num_slices or slice_len must be not None, and not both"),
        ({"num_slices": 2, "slice_len": 2}, TypeError, "not both"),
        ({"num_slices": 0}, ValueError, "num_slices must be at least 1"),
        ({"slice_len": 2, "pad_output": True}, ValueError, "incompatible with strict_length=True"),
        ({"slice_len": 2, "span": -1}, ValueError, "span must be"),
        ({"slice_len": 2, "span": (1,)}, ValueError, "span must be"),
        ({"slice_len": 2, "span": 1.0}, ValueError, "span must be"),
        ({"slice_len": 2.0}, TypeError, "slice_len must be an integer, got 2.0"),
        ({"num_slices": True}, TypeError, "num_slices must be an integer"),
        ({"slice_len": 2, "end_keys": "done"}, ValueError, "pass a single key as end_key"),
        ({"slice_len": 2, "end_keys": []}, ValueError, "end_keys must be a list of keys"),
        ({"slice_len": 2, "by": "row"}, ValueError, "by must be 'trajectory' or 'start'"),
        ({"slice_len": 2, "compile": True}, ValueError, "SliceSampler does not support compile=True"),
        ({"slice_len": 2, "ends": torch.ones(2)}, ValueError, "ends must be a 1-dim tensor of booleans"),
        (
            {"slice_len": 2, "trajectories": torch.zeros(2, 1)},
            ValueError,
            "trajectories must be a 1-dim tensor",
        ),
        ({"slice_len": 2, "trajectories": [0], "ends": [True]}, ValueError, "are exclusive arguments"),
        ({"slice_len": 2, "trajectories": [0], "traj_key": "a"}, ValueError, "are exclusive arguments"),
        ({"slice_len": 2, "end_key": "a", "end_keys": ["b"]}, RuntimeError, "exclusive"),
        ({"slice_len": 2, "traj_key": "a", "trajectory_key": "a"}, ValueError, "pass one of them"),
    ],
)
def test_settings_that_make_no_sense(options: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        SliceSampler(**options)


def test_batches_that_cannot_be_cut() -> None:
    with pytest.raises(
        StateError, match="divisible by the number of slices, got batch_size=8 and num_slices=3"
    ):
        trajectory_buffer(5, sampler=SliceSampler(num_slices=3), batch_size=8).sample()
    with pytest.raises(StateError, match="divisible by the slice length, got batch_size=8 and slice_len=3"):
        trajectory_buffer(5, sampler=SliceSampler(slice_len=3), batch_size=8).sample()
    with pytest.raises(ValueError, match="strictly lower than the sequence length: 4 is not below 4"):
        trajectory_buffer(5, sampler=SliceSampler(num_slices=2, span=4), batch_size=8).sample()


def test_no_trajectory_is_long_enough() -> None:
    with pytest.raises(NotReadyError, match=r"length \(length range: 2 - 3 / required=4\)"):
        trajectory_buffer(2, 3, sampler=SliceSampler(num_slices=2), batch_size=8).sample()
    with pytest.raises(NotReadyError, match="Cannot sample from an empty storage"):
        trajectory_buffer(sampler=SliceSampler(num_slices=2), batch_size=8).sample()


# -- copies and restarts ---------------------------------------------------------------------------------


def test_a_copy_draws_the_same() -> None:
    rb = trajectory_buffer(5, 9, 4, sampler=SliceSampler(num_slices=2), batch_size=8)
    rb.sample()
    copied = pickle.loads(pickle.dumps(copy.copy(rb.sampler)))
    numbers = [np.random.default_rng(1) for _ in range(2)]
    first, second = (
        one.sample(rb.storage, 8, generator)
        for one, generator in zip((rb.sampler, copied), numbers, strict=True)
    )
    assert first.ids.tolist() == second.ids.tolist()
    assert repr(copied) == "SliceSampler(num_slices=2, strict_length=True, by='trajectory')"


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


def test_a_restart_and_a_reader_draw_what_would_have_come(store_path: Path) -> None:
    def opened(**options: Any) -> TensorDictReplayBuffer:
        return expstore.open(store_path, sampler=SliceSampler(num_slices=2), batch_size=8, **options)

    def batches(rb: TensorDictReplayBuffer) -> list[list[int]]:
        return [rb.sample()["x"].tolist() for _ in range(20)]

    with opened(capacity=40, seed=3) as rb:
        for first in range(0, 24, 4):
            for trajectory in (1, 2, 3):
                rb.extend(trajectory_rows(trajectory, 4, first), source=f"w{trajectory}")
                rb.sample()  # so that it follows what comes
        draw = rb.storage.draws.number
        expected = batches(rb)
        rb.storage.draws.set(draw, rb.storage.draws.progress)
    with opened() as rb:
        assert batches(rb) == expected


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
