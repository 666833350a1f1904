"""Transforms that read other steps: which rows they see, when they run, and stale reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import (
    ListStorage,
    PrioritizedSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from expstore.errors import SchemaError, StateError
from expstore.storages.memory import MemoryStorage
from expstore.trajectories import traj
from expstore.transforms import Compose, StepTransform, StepView, compose
from expstore.transforms.base import Overtaken
from tests.support.batches import trajectory_rows

X = ("x",)


class Around(StepTransform):
    """Write what stands one step before and two steps after, and whether there is such a step."""

    def look(self, view: StepView) -> Any:
        ids, valid = view.at(view.ids, [-1, 2])
        return view.read(ids, [X])[0], valid

    def apply(self, batch: Any, seen: Any) -> Any:
        values, valid = (torch.from_numpy(part) for part in seen)
        return batch.update({"before": values[:, 0], "after": values[:, 1], "there": valid})


class Once(StepTransform):
    """Do something the first time that rows are looked at."""

    def __init__(self, act: Any) -> None:
        self.act = act
        self.looks = 0

    def look(self, view: StepView) -> Any:
        ids, _ = view.at(view.ids, [-1])
        found = view.read(ids, [X])[0][:, 0]
        self.looks += 1
        if self.looks == 1:
            self.act(view)
        return found

    def apply(self, batch: Any, seen: Any) -> Any:
        return batch.set("before", torch.from_numpy(seen))


def interleaved(rb: Any, cycles: int = 40, at: dict[int, int] | None = None) -> dict[int, int]:
    """Extend with rows of three trajectories that take turns, a few rows at a time."""
    at = {1: 0, 2: 0, 3: 0} if at is None else at
    for cycle in range(cycles):
        trajectory, count = 1 + cycle % 3, 1 + cycle % 4
        rb.extend(trajectory_rows(trajectory, count, at[trajectory]))
        at[trajectory] += count
    return at


def held(rb: Any) -> dict[int, set[int]]:
    """Return the steps of each trajectory that can be read."""
    storage = rb.storage
    (values,) = storage.read(storage.window.ids(), [storage.require_schema().place_of(X)])
    found: dict[int, set[int]] = {}
    for value in values.tolist():
        found.setdefault(value // 1000, set()).add(value % 1000)
    return found


def check(batch: Any, steps: dict[int, set[int]]) -> None:
    """Compare what `Around` has written with what there is."""
    batch = batch.reshape(-1)
    for x, before, after, there in zip(
        *(batch[name].tolist() for name in ("x", "before", "after", "there")), strict=True
    ):
        own = steps[x // 1000]
        wanted = [x % 1000 - 1, x % 1000 + 2]
        assert there == [step in own for step in wanted]
        clipped = [min(max(step, min(own)), max(own)) + x // 1000 * 1000 for step in wanted]
        assert [before, after] == clipped


# -- what is seen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("capacity", [None, 1000, 40])
def test_other_steps_are_found_wherever_they_lie(capacity: int | None) -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(capacity))
    interleaved(rb)
    steps, ids = held(rb), rb.storage.window.ids()
    view = StepView(rb.storage, ids)
    offsets = np.arange(-60, 61)
    found, valid = view.at(ids, offsets)
    (own,), (other,) = view.read(ids, [X]), view.read(found, [X])
    back, ahead = view.reach(ids)
    for row, x in enumerate(own.tolist()):
        there = steps[x // 1000]
        assert (back[row], ahead[row]) == (x % 1000 - min(there), max(there) - x % 1000)
        for column, offset in enumerate(offsets.tolist()):
            wanted = x % 1000 + offset
            assert valid[row, column] == (wanted in there)
            assert other[row, column] == min(max(wanted, min(there)), max(there)) + x // 1000 * 1000
    assert view.intact
    assert view.oldest == ids[0]


def test_offsets_may_be_of_each_row() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(20))
    rb.extend(trajectory_rows(1, 10))
    view = StepView(rb.storage, np.array([3, 5]))
    found, valid = view.at(view.ids, np.array([[1], [-2]]))
    assert found.tolist() == [[4], [3]]
    assert valid.all()
    far, there = view.at(found[:, 0], [2**40])
    assert far.tolist() == [[10], [10]]
    assert not there.any()


def test_a_field_that_is_not_there_is_named() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(20))
    rb.extend(trajectory_rows(1, 10))
    with pytest.raises(SchemaError, match="no field 'next.y'"):
        StepView(rb.storage, np.array([3])).read(np.array([3]), [("next", "y")])


def test_rows_that_have_left_are_looked_for_no_further() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(10))
    rb.extend(trajectory_rows(1, 30))
    for look in (lambda view: view.at(view.ids, [0]), lambda view: view.reach(view.ids)):
        view = StepView(rb.storage, np.array([3, 30]))
        with pytest.raises(Overtaken):
            look(view)
        assert not view.intact
    view = compose.Compose(Around()).look(rb.storage, np.array([3, 30]))
    assert view is not None
    assert not view.intact


def test_rows_from_some_on() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(40))
    interleaved(rb)
    steps, ids = held(rb), rb.storage.window.ids()
    view = StepView(rb.storage, ids)
    for most in (None, 4):
        found, lengths = view.ahead(ids, most)
        (own,), (all_of_them,) = view.read(ids, [X]), view.read(found, [X])
        for x, values in zip(own.tolist(), np.split(all_of_them, np.cumsum(lengths)[:-1]), strict=True):
            there = [x // 1000 * 1000 + step for step in sorted(steps[x // 1000]) if step >= x % 1000]
            assert values.tolist() == there[:most]


def test_a_row_given_up_between_parts_an_episode() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(20))
    rb.extend(trajectory_rows(1, 10))
    rb.storage._retire(4)
    view = StepView(rb.storage, np.array([5, 9]))
    found, valid = view.at(view.ids, [-3, 0])
    assert found.tolist() == [[5, 5], [6, 9]]
    assert valid.tolist() == [[False, True], [True, True]]


# -- where it acts ----------------------------------------------------------------------------------------

SAMPLERS: dict[str, Any] = {
    "random": RandomSampler,
    "without-replacement": SamplerWithoutReplacement,
    "prioritized": PrioritizedSampler,
    "slices": lambda: SliceSampler(slice_len=2, strict_length=False),
}


@pytest.mark.some(4)
@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_batch_is_looked_around(name: str, prefetch: int) -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(40, seed=1),
        sampler=SAMPLERS[name](),
        transform=Around(),
        batch_size=8,
        prefetch=prefetch,
    )
    at: dict[int, int] | None = None
    for _ in range(6):
        at = interleaved(rb, 9, at)
        rb._sampling.drop_prefetched()  # what was made before these rows came has seen what was there then
        for _ in range(2):
            check(rb.sample(), held(rb))


def test_rows_read_by_index_are_looked_around() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(40), transform=Around())
    interleaved(rb)
    steps = held(rb)
    several = torch.tensor([5, 5, 0]), torch.tensor([[1, 2], [3, 4]])
    assert rb[:0].shape == (0,)
    for index in (slice(None), slice(3, 9), *several, 7, -1):
        batch = rb[index]
        assert batch.shape == torch.empty(40)[index].shape
        check(batch, steps)
    check(rb.read_all_in_order(), steps)
    assert rb["before"].shape == (40,)


def test_several_dims_of_rows_are_looked_around() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(40, ndim=2), transform=Around(), batch_size=8)
    lanes = torch.stack([torch.arange(1000 * lane, 1000 * lane + 25) for lane in (1, 2)])
    rb.extend(TensorDict({"x": lanes}, [2, 25]))
    batch = rb[:]
    assert batch.shape == (2, 20)
    check(batch, held(rb))
    check(rb[1, 3:9], held(rb))
    check(rb.sample(), held(rb))


def test_trajectories_are_looked_around(tmp_path: Path) -> None:
    rb = expstore.open(
        tmp_path / "run.exp",
        capacity=40,
        batches=expstore.Batches(transform=Around()),
        episodes=expstore.EpisodeKeys(traj="episode"),
    )
    interleaved(rb)
    steps = held(rb)
    for episode in rb.sql("SELECT DISTINCT _episode FROM transitions").fetchall():
        batch = rb.trajectory(episode[0])
        assert batch.names == ["time"]
        check(batch, steps)
    found = rb.query(trajectory_key="episode")
    assert sorted(len(one.data) for one in found) == sorted(map(len, steps.values()))
    for one in found:
        check(one.data, steps)
    (second,) = rb.query(traj["before"].max() >= 2000 + max(steps[2]) - 1, trajectory_key="episode")[:1]
    assert second.data["x"][0] // 1000 in (2, 3)
    rb.close()


def test_steps_act_first_whatever_stands_before_them() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(20, seed=2), batch_size=4)
    rb.append_transform(lambda batch: batch.set("double", batch["before"] * 2))
    rb.append_transform(lambda batch: batch.set("x", batch["x"] + 5))
    rb.append_transform(Around())
    rb.extend(trajectory_rows(0, 10))
    batch = rb.sample()
    assert (batch["double"] == 2 * batch["before"]).all()
    batch["x"] -= 5
    check(batch, held(rb))
    assert [type(part).__name__ for part in rb.transform.acting] == ["Around", "function", "function"]


class Moved(StepTransform):
    """Have a field taken from the row after."""

    def look(self, view: StepView) -> Any:
        view.next_ids = view.at(view.ids, [1])[0][:, 0]
        view.moved = frozenset({view.storage.require_schema().place_of(("next", "x"))})

    def apply(self, batch: Any, seen: Any) -> Any:
        return batch


def test_fields_are_taken_from_other_rows() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(20), transform=Moved())
    rb.extend(TensorDict({"a": torch.zeros(5), "next": {"x": torch.arange(5)}, "x": torch.arange(5)}, [5]))
    assert rb[:]["next", "x"].tolist() == [1, 2, 3, 4, 4]
    assert rb[:]["x"].tolist() == [0, 1, 2, 3, 4]
    found = rb.query(traj["next", "x"].first() == 1, trajectory_key="a")
    assert [len(one.data) for one in found] == [5]


# -- in time ----------------------------------------------------------------------------------------------


def test_a_batch_is_drawn_again_when_a_neighbouring_row_is_overwritten() -> None:
    storage = MemoryStorage(10, seed=3)
    # A row is read, and then that before it overwritten: the ring has no row to spare.
    rb = ReplayBuffer(storage=storage, batch_size=1)
    rb.extend(trajectory_rows(1, 10))
    spare = 0 if storage.geometry.slots is None else storage.geometry.slots - 10

    def overwrite(view: StepView) -> None:
        first = int(view.ids[0])
        count = first - 1 - (storage.last - 10) + spare  # all up to the one before it
        rb.extend(trajectory_rows(2, max(count, 0)))

    once = Once(overwrite)
    rb.append_transform(once)
    batch = rb.sample()
    assert once.looks == 2
    assert storage.counters.redraws == 1
    assert int(batch["before"]) in {x * 1000 + step for x, own in held(rb).items() for step in own}


@pytest.mark.guarantee("draw/whole")
def test_a_batch_is_drawn_again_when_rows_were_changed() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(10, seed=3), batch_size=2)
    rb.extend(trajectory_rows(1, 10))

    def change(view: StepView) -> None:
        rb.set_("x", torch.arange(10) + 5000)

    once = Once(change)
    rb.append_transform(once)
    batch = rb.sample()
    assert once.looks == 2
    assert (batch["before"] >= 5000).all()
    once.looks = 0
    once.act = lambda view: rb.set_("x", torch.arange(10) + 7000)
    assert (rb[:]["before"] >= 7000).all()


def test_neighbours_read_by_prefetching_are_still_stored_on_delivery() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(12, seed=4), transform=Around(), batch_size=1, prefetch=3
    )
    rb.extend(trajectory_rows(1, 12))
    first, there = 12, 0
    for _ in range(60):
        rb.extend(trajectory_rows(1, 1, first))
        first += 1
        batch = rb.sample()
        there += int(batch["there"][0, 0])
        (own,) = held(rb).values()
        assert not batch["there"][0, 0] or int(batch["before"]) % 1000 in own
    assert there


class Drawing(StepTransform):
    """Take a step that is drawn from all later ones."""

    def look(self, view: StepView) -> Any:
        if view.generator is None:
            return np.full(view.ids.size, -1)
        _, ahead = view.reach(view.ids)
        offset = view.generator.integers(0, ahead + 1)
        return view.read(view.at(view.ids, offset[:, None])[0], [X])[0][:, 0]

    def apply(self, batch: Any, seen: Any) -> Any:
        return batch.set("goal", torch.from_numpy(seen))


def goals(path: Path, count: int, **options: Any) -> list[list[int]]:
    with expstore.open(path, batch_size=6, **options) as rb:
        rb.append_transform(Drawing())
        if not len(rb):
            interleaved(rb)
        return [rb.sample()["goal"].tolist() for _ in range(count)]


def test_goals_drawn_by_transforms_continue_after_a_restart(tmp_path: Path) -> None:
    whole = goals(tmp_path / "a.exp", 6, seed=7, episodes={"traj": "episode"})
    assert goals(tmp_path / "b.exp", 2, seed=7, episodes={"traj": "episode"}) == whole[:2]
    assert goals(tmp_path / "b.exp", 4) == whole[2:]
    assert (
        goals(tmp_path / "c.exp", 6, seed=7, episodes={"traj": "episode"}, batches={"prefetch": 3}) == whole
    )
    assert len({tuple(one) for one in whole}) == 6


def test_rows_read_by_index_have_no_numbers_to_draw_by() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(20), transform=Drawing())
    rb.extend(trajectory_rows(1, 5))
    assert rb[:]["goal"].tolist() == [-1] * 5


def test_a_follower_looks_around(tmp_path: Path) -> None:
    with expstore.open(
        tmp_path / "run.exp", capacity=40, episodes=expstore.EpisodeKeys(traj="episode")
    ) as writer:
        at = interleaved(writer, 9)
        reader = expstore.open(
            tmp_path / "run.exp", mode="r", batch_size=16, batches=expstore.Batches(transform=Around())
        )
        for _ in range(5):
            at = interleaved(writer, 6, at)
            writer.flush()  # what a follower sees of the last few rows comes a moment later
            check(reader.sample(), held(writer))
            check(reader[:], held(writer))
        reader.close()


# -- what is refused --------------------------------------------------------------------------------------


def test_without_a_buffer_it_is_refused() -> None:
    for chain in (Compose(Around()), Around()):
        with pytest.raises(StateError, match="works inside a buffer only") as caught:
            chain(TensorDict({"x": torch.zeros(2)}, [2]))
        assert "transform=" in str(caught.value)


def test_no_store_is_created_for_an_invalid_transform(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="must be either a Transform instance or a callable"):
        expstore.open(tmp_path / "run.exp", batches=expstore.Batches(transform=3))
    assert not (tmp_path / "run.exp").exists()


def test_it_is_not_inverted() -> None:
    rb = ReplayBuffer(storage=MemoryStorage(20))
    with pytest.raises(ValueError, match="data to be written has none yet"):
        rb.append_transform(Around(), invert=True)
    assert len(rb.transform) == 0
    rb.extend(trajectory_rows(1, 3))
    assert "before" not in rb[:]


def test_ensembles_send_it_to_their_members() -> None:
    members = [ReplayBuffer(storage=MemoryStorage(20, seed=n)) for n in (1, 2)]
    with pytest.raises(ValueError, match="give it to the members"):
        ReplayBufferEnsemble(*members, transform=Around())
    ensemble = ReplayBufferEnsemble(*members, batch_size=4)
    for add in (ensemble.append_transform, lambda part: ensemble.insert_transform(0, part)):
        with pytest.raises(ValueError, match="give it to the members"):
            add(Around())
    for member in members:
        member.extend(trajectory_rows(1, 5))
        member.append_transform(Around())
    batch = ensemble.sample()
    check(batch, held(members[0]))


def test_rows_without_steps_are_refused() -> None:
    trees = ReplayBuffer(storage=MemoryStorage(20), transform=Around())
    trees.extend((torch.zeros(3), torch.ones(3)))
    with pytest.raises(SchemaError, match="need named fields"):
        trees[:]
    pieces = ReplayBuffer(storage=MemoryStorage(20), transform=Around(), batch_size=2)
    pieces.extend(TensorDict({"x": torch.zeros(3, 4)}, [3, 4]))
    with pytest.raises(SchemaError, match="has several steps"):
        pieces.sample()
    objects = ReplayBuffer(storage=ListStorage(20), transform=Around(), batch_size=2)
    objects.extend([trajectory_rows(1, 3)[n] for n in range(3)])
    for read in (objects.sample, objects.query, lambda: objects[:]):
        with pytest.raises(SchemaError, match="need named fields"):
            read()


def test_a_store_that_keeps_the_best_rows_is_refused() -> None:
    rb = TensorDictReplayBuffer(
        storage=MemoryStorage(5), writer=TensorDictMaxValueWriter(rank_key="x"), transform=Around()
    )
    rb.extend(trajectory_rows(1, 8))
    with pytest.raises(StateError, match="replaces rows by better ones"):
        rb[:]


def test_a_transform_that_returns_nothing_is_named() -> None:
    class Nothing(Around):
        def apply(self, batch: Any, seen: Any) -> Any:
            return None

    rb = ReplayBuffer(storage=MemoryStorage(5), transform=Nothing())
    rb.extend(trajectory_rows(1, 3))
    with pytest.raises(TypeError, match="returned None"):
        rb[:]
