"""Consumers: recorded draws come again, after going back, restarts and kills; nothing is drawn twice."""

from __future__ import annotations

import copy
import gc
import json
import linecache
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import transforms
from expstore.core.values import Mark, Selection
from expstore.disk.files import Disk, File
from expstore.errors import (
    ArgumentError,
    CorruptionError,
    LockedError,
    NotFoundError,
    NotReadyError,
    RowsChangedError,
    StateError,
    StorageError,
)
from expstore.storages.format import draw_log
from expstore.storages.format.draw_log import DrawLog
from tests.support.batches import observed_episode as rows
from tests.support.batches import same
from tests.support.draw_sequences import BATCH, CAPACITY, SAMPLERS, sampler_rows, short_rings
from tests.support.forks import in_child
from tests.support.threads import in_threads

pytestmark = [
    pytest.mark.usefixtures("no_syncs", "no_index_on_close"),
    pytest.mark.filterwarnings("ignore:.*completing the draw with replacement"),
]

KINDS = SAMPLERS


@pytest.fixture
def rb(tmp_path: Path) -> Iterator[Any]:
    with expstore.open(tmp_path / "run.exp", batch_size=4, seed=1) as rb:
        rb.extend(rows(100))
        yield rb


def draw(consumer: Any, count: int) -> list[Any]:
    return [consumer.sample() for _ in range(count)]


def numbers(batch: Any) -> list[int]:
    found: list[int] = batch["observation"].reshape(-1).long().tolist()
    return found


# -- going back ------------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "consumers/again", "After `seek` a consumer's recorded draws come again, then new ones."
)
def test_recorded_draws_come_again_and_then_those_that_would_have_come(tmp_path: Path) -> None:
    """With every kind of sampler: after going back, after a restart, and in a reader that opens again.

    A store has a consumer of each kind.
    """
    expected: dict[str, list[Any]] = {}
    for life in ("never", "back", "reopened", "reader"):
        path = tmp_path / f"{life}.exp"
        with short_rings(), ExitStack() as stack:
            rb = stack.enter_context(expstore.open(path, batch_size=BATCH, capacity=CAPACITY, seed=5))
            rb.extend(sampler_rows(CAPACITY, 0))
            if life == "reader":
                rb.flush()
                rb = stack.enter_context(expstore.open(path, mode="r", batch_size=BATCH))
            begun: dict[str, tuple[Any, list[Any], Any, list[Any]]] = {}
            for kind, make in KINDS.items():
                c = rb.consumer(kind, seed=9, sampler=make())
                batches, position = draw(c, 2), json.loads(json.dumps(c.position))
                batches += draw(c, 3)
                again = []
                if life == "back":
                    c.seek(position)
                    assert c.replaying
                    again = draw(c, 3)
                elif life != "never":
                    c.close()
                begun[kind] = c, batches, position, again
            if life == "reader":
                rb.close()
                rb = stack.enter_context(expstore.open(path, mode="r", batch_size=BATCH))
            for kind, (c, batches, position, again) in begun.items():
                if life in ("reopened", "reader"):
                    c = rb.consumer(kind, seed=9, sampler=KINDS[kind](), at=position)
                    again = draw(c, 3)
                assert all(map(same, again, batches[2:])), (kind, life)
                assert not c.replaying
                batches += draw(c, 4)
                assert all(map(same, batches, expected.setdefault(kind, batches))), (kind, life)
                c.close()


def test_rows_that_were_appended_since_make_no_difference(rb: Any) -> None:
    c = rb.consumer("learner", sampler="without_replacement")
    position, before = c.position, [c.sample(return_info=True) for _ in range(3)]
    rb.extend(rows(100, 100))
    c.seek(position)
    for batch, info in before:
        again, info_again = c.sample(return_info=True)
        assert same(again, batch)
        assert (info_again["id"] == info["id"]).all()
    # The pass of the smaller store has ended, and a new one has all rows.
    assert sorted(number for _ in range(50) for number in numbers(c.sample())) == list(range(200))


def test_the_stores_own_draws_and_other_consumers_are_not_touched(tmp_path: Path) -> None:
    found = []
    for used in (False, True):
        with expstore.open(tmp_path / f"{used}.exp", batch_size=4, seed=1) as rb:
            rb.extend(rows(100))
            other = rb.consumer("other", seed=3)
            if used:
                c = rb.consumer("learner", sampler="without_replacement")
                assert not same(c.sample(), c.sample())
            found.append((rb.sample(), other.sample(), rb.stats()["draws"]))
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])
    assert found[0][2] == found[1][2]


def test_new_goals_come_again(tmp_path: Path) -> None:
    count = torch.arange(40)[:, None].float()
    goal, done = torch.full((40, 1), 99.0), (torch.arange(40) % 10 == 9)[:, None]
    seen = {"observation": count, "achieved_goal": count, "desired_goal": goal}
    after = {name: value + (name != "desired_goal") for name, value in seen.items()}
    step = {"reward": torch.zeros(40, 1), "done": done, "terminated": done}
    data = TensorDict(seen | {"action": torch.zeros(40, 1), "next": after | step}, [40])
    storage = expstore.ZarrStorage(tmp_path / "run.exp")
    rb = expstore.HERReplayBuffer(
        storage=storage, reward_fn=lambda batch: batch["next", "reward"] + 1, batch_size=16
    )
    with rb:
        rb.extend(data)
        c = rb.consumer("learner", sampler="prioritized")
        position, before = c.position, draw(c, 4)
        assert any(bool((batch["desired_goal"] != 99).any()) for batch in before)
        c.seek(position)
        assert all(map(same, draw(c, 4), before))


class Noise:
    """Adds the first random number of the draw."""

    draws = True

    def __call__(self, batch: Any, numbers: Any = None) -> Any:
        batch["observation"] = batch["observation"] + numbers.random()
        return batch


def test_random_transforms_come_again(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", batch_size=4, batches={"transform": Noise()}) as rb:
        rb.extend(rows(100))
        c = rb.consumer("learner")
        position, before = c.position, draw(c, 4)
        assert len({float(batch["observation"][0] % 1) for batch in before}) == 4
        c.seek(position)
        assert all(map(same, draw(c, 4), before))


def test_iteration_ends_with_the_pass_and_not_while_it_repeats(rb: Any) -> None:
    c = rb.consumer("learner", sampler="without_replacement", batch_size=30)
    position = c.position
    assert [len(batch) for batch in c] == [30, 30, 30, 10]
    c.sample()
    for again in (c, None):
        if again is None:
            c.close()
            c = rb.consumer("learner", sampler="without_replacement", batch_size=30)
        c.seek(position)
        assert [len(batch) for batch in c] == [30, 30, 30, 10]
        assert c.replaying
    draw(c, 2)
    assert [len(batch) for batch in c] == [30, 10]


def test_replay_changes_nothing(rb: Any) -> None:
    c = rb.consumer("learner", keep="all")
    before, position = draw(c, 5), c.position
    assert all(map(same, c.replay(1, 3), before[1:4]))
    assert all(map(same, c.replay(0), before))
    assert c.position == position
    with pytest.raises(NotFoundError, match="draw 5 "):
        list(c.replay(4, 5))
    assert c.position == position


def test_sql_says_which_draws_saw_a_row(rb: Any) -> None:
    assert rb.sql("SELECT * FROM draws").fetchall() == []
    c = rb.consumer("learner", keep="all")
    batches = draw(c, 3)
    weighed = rb.consumer("weighed", sampler="prioritized")
    batch = weighed.sample()
    found = rb.sql(
        "SELECT draw, place, id FROM draws WHERE consumer = 'learner' ORDER BY draw, place"
    ).fetchall()
    ids = [[int(number) for number in one["id"]] for one in batches]
    assert found == [(number, place, id) for number, row in enumerate(ids) for place, id in enumerate(row)]
    found = rb.sql(
        "SELECT id, weight, epoch(now()) - epoch(time) < 3600 FROM draws WHERE weight IS NOT NULL"
    ).fetchall()
    weights = batch["priority_weight"].reshape(-1).tolist()
    assert found == [(int(id), weight, True) for id, weight in zip(batch["id"], weights, strict=True)]
    (seen,) = rb.sql(
        "SELECT list(DISTINCT draw ORDER BY draw) FROM draws JOIN transitions ON id = _id "
        "WHERE consumer = 'learner' AND _step < 50"
    ).fetchone()
    assert seen == [number for number, row in enumerate(ids) if min(row) <= 50]
    with expstore.TensorDictReplayBuffer(batch_size=2) as ram:
        ram.extend(rows(4))
        assert ram.sql("SELECT count(*) FROM draws").fetchone() == (0,)


# -- positions and commits -------------------------------------------------------------------------------


def test_a_commit_drops_what_came_before(rb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", 400)
    c = rb.consumer("learner")
    start = c.position
    draw(c, 20)
    middle = c.position
    assert c.committed == 0
    rest = draw(c, 20)
    c.commit(middle)
    c.commit(middle)
    assert c.committed == 20
    (found,) = rb.consumers.list()
    assert (found.name, found.draws, found.committed, found.is_open) == ("learner", 40, 20, True)
    assert 15 <= found.first <= 20
    with pytest.raises(StateError, match="cannot go back to draw 0"):
        c.seek(start)
    with pytest.raises(StateError, match="20 draws are committed"):
        c.commit(start)
    c.seek(middle)
    assert all(map(same, draw(c, 20), rest))
    c.close()
    assert rb.consumer("learner").committed == 20


@pytest.mark.parametrize(("keep", "first"), [("all", 0), (12, 8), ("uncommitted", 20)])
def test_how_many_draws_are_kept(rb: Any, keep: Any, first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", 1)
    c = rb.consumer("learner", keep=keep)
    draw(c, 20)
    c.commit()
    assert max(0, first - 1) <= rb.consumers.list()[0].first <= first


def test_positions_of_others_are_refused(rb: Any) -> None:
    c, other = rb.consumer("learner"), rb.consumer("other")
    draw(c, 2)
    for position, message in (
        (other.position, "another consumer \\('other'"),
        ({"draw": 1}, "is not a position"),
        ("begin", "'begin' is not a position"),
        (1, "is not a position"),
        (c.position | {"draw": "x"}, "draw must be an integer"),
    ):
        with pytest.raises(ArgumentError, match=message):
            c.seek(position)
        with pytest.raises(ArgumentError, match=message):
            c.commit(position)
    with pytest.raises(ArgumentError, match="'end' is not a position"):
        c.commit("end")
    for number in (-1, 3):
        with pytest.raises(StateError, match=f"cannot go back to draw {number}"):
            c.seek(c.position | {"draw": number})
    with pytest.raises(StateError, match="2 were recorded"):
        c.commit(c.position | {"draw": 3})
    other.close()
    with pytest.raises(ArgumentError, match="another consumer"):
        rb.consumer("other", at=c.position)
    rb.consumer("other").close()  # the failed one is not open


def test_a_dropped_consumer_begins_again(rb: Any) -> None:
    c = rb.consumer("learner")
    position, first = c.position, c.sample()
    with pytest.raises(LockedError, match="one process draws"):
        rb.consumer("learner")
    with pytest.raises(LockedError):
        rb.consumers.drop("learner")
    with pytest.raises(ArgumentError, match="already draws"):
        rb.consumer("other", sampler=c.sampler)
    c.close()
    rb.consumers.drop("learner")
    assert rb.consumers.list() == []
    with pytest.raises(NotFoundError, match="no consumer 'learner'"):
        rb.consumers.drop("learner")
    new = rb.consumer("learner")
    assert same(new.sample(), first)
    with pytest.raises(ArgumentError, match="another consumer"):
        new.seek(position)


# -- rows that are gone ----------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", ["evicted", "deleted", "restored"])
def test_rows_that_are_gone(gone: str, tmp_path: Path) -> None:
    capacity = 64 if gone == "evicted" else None
    with expstore.open(tmp_path / "run.exp", capacity=capacity, batch_size=8, seed=1) as rb:
        rb.extend(rows(32))
        if gone == "restored":
            rb.snapshots.tag("start")
        rb.extend(rows(32, 32), source="other")
        c = rb.consumer("learner")
        position, batch = c.position, c.sample()
        if gone == "evicted":
            rb.extend(rows(32, 64))
            left = [number for number in numbers(batch) if number >= 32]
        elif gone == "deleted":
            rb.episodes.delete("episode_id = 1")
            left = [number for number in numbers(batch) if number >= 32]
        else:
            rb.snapshots.restore(version="start")  # its rows get new ids
            left = [number for number in numbers(batch) if number < 32]
        c.seek(position)
        for _ in range(2):
            with pytest.raises(RowsChangedError, match="draw 0 had rows") as caught:
                c.sample()
            assert caught.value.kind == "rows_changed"
        c.close()
        c = rb.consumer("learner", at=position, missing="skip")
        assert left
        assert numbers(c.sample()) == left


@pytest.mark.guarantee("consumers/restore")
@pytest.mark.parametrize("capacity", [None, 64])
def test_draws_follow_their_rows_through_restores(capacity: int | None, tmp_path: Path) -> None:
    path, versions = tmp_path / "run.exp", tmp_path / "versions"
    with expstore.open(path, capacity=capacity, batch_size=8, seed=1) as rb:
        rb.extend(rows(48))
        rb.snapshots.create(versions)
        rb.flush()
        with expstore.open(path, mode="r", batch_size=8) as reader:
            open_here, open_elsewhere = rb.consumer("a", seed=3), reader.consumer("b")
            before = [[numbers(batch) for batch in draw(c, 3)] for c in (open_here, open_elsewhere)]
            rb.extend(rows(32, 48))  # in the ring it evicts rows of the version
            for number in (1, 1, 2, 1, 2):
                rb.snapshots.restore(versions, version=number)
                reader.refresh()
                found = [[numbers(batch) for batch in c.replay(0)] for c in (open_here, open_elsewhere)]
                assert found == before
                ids = rb.sql("SELECT id FROM draws WHERE consumer = 'a'").fetchall()
                assert min(ids)[0] > rb.storage.stored.low
                rb.extend(rows(8, 100))
                rb.snapshots.create(versions)


def test_a_version_of_a_copy_is_followed_up_to_the_copying(rb: Any, tmp_path: Path) -> None:
    copied = tmp_path / "copy.exp"
    rb.flush()
    shutil.copytree(rb.storage.path, copied)
    with expstore.open(copied, batch_size=4) as copy_of:
        copy_of.extend(rows(10, 500))
        copy_of.snapshots.create(tmp_path / "versions")
    rb.extend(rows(10, 100))
    c = rb.consumer("learner", batch_size=200, sampler="without_replacement")
    position = c.position
    c.sample()
    rb.snapshots.restore(tmp_path / "versions")
    with pytest.raises(RowsChangedError, match=r"10 \(id 10"):
        c.seek(position)
    c.close()
    c = rb.consumer("learner", at=position, missing="skip")
    assert sorted(numbers(c.sample())) == list(range(100))


def test_a_version_without_a_common_row_is_not_followed(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", capacity=16, batch_size=4) as rb:
        rb.extend(rows(16))
        rb.snapshots.tag("start")
        c = rb.consumer("learner")
        position = c.position
        c.sample()
        rb.extend(rows(16, 16))
        rb.snapshots.restore(version="start")
        c.seek(position)
        with pytest.raises(RowsChangedError):
            c.sample()


# -- restarts and kills ----------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "consumers/kill", "A consumer's draw whose batch was returned is recorded after `kill -9` of the learner."
)
@pytest.mark.parametrize("mode", ["a", "r"])
def test_draws_that_returned_survive_a_kill(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    with expstore.open(path, batch_size=4, seed=1) as rb:
        rb.extend(rows(100))
        expected = draw(rb.consumer("other", sampler="without_replacement"), 12)

    def learn() -> None:
        rb = expstore.open(path, batch_size=4, mode=mode)
        c = rb.consumer("learner", sampler="without_replacement", at="end")
        for _ in range(3):
            c.sample()

    for life in range(3):
        in_child(learn)
        with expstore.open(path, batch_size=4, mode=mode) as rb, rb.consumer("learner") as c:
            assert c.position["draw"] == 0
            c.seek("end")
            assert c.position["draw"] == 3 * (life + 1)
            assert all(map(same, c.replay(0), expected))
    with expstore.open(path, batch_size=4) as rb:
        c = rb.consumer("learner", sampler="without_replacement", at="end")
        assert same(c.sample(), expected[9])


def test_threads_share_the_draws(rb: Any) -> None:
    c = rb.consumer("learner", sampler="without_replacement", batch_size=5)
    found: list[int] = []

    def work(_: int) -> None:
        for _ in range(5):
            found.extend(numbers(c.sample()))

    in_threads(4, work)
    assert sorted(found) == list(range(100))
    assert sorted(number for batch in c.replay(0) for number in numbers(batch)) == list(range(100))


def test_it_belongs_to_one_process(rb: Any) -> None:
    c = rb.consumer("learner")
    c.sample()

    def child() -> None:
        with pytest.raises(StateError, match="from which this one was forked"):
            c.sample()
        c.close()  # which does not release the parent's lock

    in_child(child)
    c.sample()
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match="cannot be copied"):
            make(c)
    pickle.loads(pickle.dumps(rb)).close()  # a buffer with consumers can be copied, without them


def test_closing_the_buffer_closes_its_consumers(tmp_path: Path) -> None:
    rb = expstore.open(tmp_path / "run.exp", batch_size=4)
    c = rb.consumer("learner")
    with pytest.raises(NotReadyError):
        c.sample()
    rb.extend(rows(10))
    c.sample()
    rb.flush()
    rb.close()
    for use in (c.sample, c.commit, c.flush, lambda: c.seek(c.position), lambda: next(c.replay(0))):
        with pytest.raises(StateError, match="closed"):
            use()
    c.close()
    assert "closed" in repr(c)


def test_one_that_is_dropped_lets_another_begin(rb: Any) -> None:
    with expstore.open(rb.storage.path, mode="r", batch_size=4) as reader:
        reader.consumer("learner").sample()
        reader._consumers.clear()
        gc.collect()
        assert rb.consumer("learner", at="end").position["draw"] == 1


# -- failures and damage ---------------------------------------------------------------------------------


def test_a_draw_that_cannot_be_recorded_comes_again(rb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c = rb.consumer("learner", sampler="without_replacement")
    expected = draw(rb.consumer("other", sampler="without_replacement"), 4)
    c.sample()
    write = File.write_mapped

    def fail(file: File, data: Any, offset: int) -> None:
        if file.path.parent.name == "learner":
            write(file, data[: len(data) // 2], offset)
            raise StorageError("the disk is full", kind="disk_full")
        write(file, data, offset)

    monkeypatch.setattr(File, "write_mapped", fail)
    for _ in range(2):
        with pytest.raises(StorageError, match="full"):
            c.sample()
    monkeypatch.setattr(File, "write_mapped", write)
    assert all(map(same, draw(c, 3), expected[1:]))
    c.close()
    assert all(map(same, rb.consumer("learner").replay(0), expected))


# -- other steps than those of the batch -----------------------------------------------------------------


def episode_part(start: int, count: int) -> TensorDict:
    """Rows of one long episode."""
    number = torch.arange(start, start + count)[:, None]
    flags = torch.zeros(count, 1, dtype=torch.bool)
    following = {"observation": number + 1.0, "reward": number * 1.0, "done": flags, "terminated": flags}
    return TensorDict({"observation": number * 1.0, "next": following}, [count])


STEP_TRANSFORMS: dict[str, Callable[[], Any]] = {
    "multi_step": lambda: transforms.MultiStepTransform(n_steps=5, gamma=0.9),
    "reward_to_go": lambda: transforms.Reward2GoTransform(gamma=0.9),
    "next_state": lambda: transforms.NextStateReconstructor(),
}


@pytest.mark.guarantee("consumers/again")
@pytest.mark.parametrize("kind", STEP_TRANSFORMS)
def test_steps_that_came_later_are_not_read_by_a_recorded_draw(kind: str, tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", batch_size=8, seed=1) as rb:
        rb.append_transform(STEP_TRANSFORMS[kind]())
        rb.extend(episode_part(0, 10))
        with rb.consumer("learner", keep="all") as learner:
            before = []
            for start in range(10, 60, 10):
                before += draw(learner, 2)
                rb.extend(episode_part(start, 10))
            assert all(map(same, learner.replay(0), before))
            fresh = draw(learner, 4)
        with expstore.open(tmp_path / "run.exp", mode="r", batch_size=8) as reader:
            reader.append_transform(STEP_TRANSFORMS[kind]())
            with reader.consumer("learner", at="end", keep="all") as learner:
                assert all(map(same, learner.replay(0), before + fresh))


@pytest.mark.parametrize("strategy", ["future", "final", "episode", "random"])
def test_goals_that_came_later_are_not_taken_by_a_recorded_draw(strategy: str, tmp_path: Path) -> None:
    def goals(start: int) -> TensorDict:
        data = episode_part(start, 10)
        data["achieved_goal"] = data["observation"].clone()
        data["desired_goal"] = torch.zeros(10, 1)
        data["next", "achieved_goal"] = data["next", "observation"].clone()
        return data

    rb = expstore.HERReplayBuffer(
        storage=expstore.ZarrStorage(tmp_path / "run.exp"),
        batch_size=8,
        her_ratio=1.0,
        strategy=strategy,
        reward_fn=lambda rows: (rows["achieved_goal"] == rows["desired_goal"]).float(),
    )
    with rb:
        rb.extend(goals(0))
        with rb.consumer("learner", keep="all", seed=1) as learner:
            before = []
            for start in range(10, 60, 10):
                before += draw(learner, 2)
                rb.extend(goals(start))
            assert all(map(same, learner.replay(0), before))


# -- batches prepared ahead ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["without_replacement", "slices", "prioritized", "random_where"])
def test_prefetched_batches_are_those_of_direct_draws(kind: str, tmp_path: Path) -> None:
    with (
        short_rings(),
        expstore.open(tmp_path / "run.exp", capacity=CAPACITY, batch_size=BATCH, seed=3) as rb,
    ):
        rb.extend(sampler_rows(CAPACITY, 0))
        with rb.consumer("alone", sampler=KINDS[kind]()) as alone:
            expected = draw(alone, 12)
        with rb.consumer("learner", sampler=KINDS[kind](), prefetch=3) as learner:
            position = learner.position
            assert all(map(same, draw(learner, 5), expected))
            assert learner.position["draw"] == 5
            learner.seek(position)
            assert learner.replaying
            assert all(map(same, draw(learner, 7), expected))
            learner.commit()
        with rb.consumer("learner", sampler=KINDS[kind](), prefetch=2) as learner:
            assert learner.position["draw"] == 7
            assert all(map(same, draw(learner, 5), expected[7:]))


def test_batches_that_were_prepared_and_not_returned_come_next(rb: Any) -> None:
    with rb.consumer("learner", prefetch=2) as learner:
        learner.sample()
        learner.sample()
    assert rb.consumers.list()[0].draws > 2
    rb.extend(rows(50, 100))
    with rb.consumer("learner", at="committed") as learner, rb.consumer("other") as other:
        again = draw(learner, 4)
        assert all(map(same, again, learner.replay(0, 3)))
        assert max(numbers(again[2])) < 100  # drawn before the rows came
        other.sample()


def test_prefetched_passes_end_where_direct_ones_do(rb: Any) -> None:
    with rb.consumer("learner", sampler="without_replacement", batch_size=30, prefetch=3) as learner:
        assert [len(batch) for batch in learner] == [30, 30, 30, 10]
        assert [len(batch) for batch in learner] == [30, 30, 30, 10]


def test_an_error_of_a_prefetched_draw_comes_when_it_is_asked_for(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", batch_size=4, seed=1) as rb:
        with rb.consumer("learner", prefetch=2) as learner:
            with pytest.raises(NotReadyError):
                learner.sample()
            rb.extend(rows(8))
            assert len(learner.sample()) == 4
            assert learner.position["draw"] == 1


# -- interrupts ------------------------------------------------------------------------------------------

_INTERRUPTED = tuple(
    f"/{name}.py" for name in ("consumer", "recorded_draws", "draw_log", "consuming", "sample_counts")
)


class Interrupt:
    """Raise KeyboardInterrupt at the n-th line that runs in the modules of consumers."""

    def __init__(self, at: int) -> None:
        self.at, self.lines, self.raised = at, 0, False

    def __enter__(self) -> Self:
        self._former = sys.gettrace()  # of a measurement of coverage
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._former)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.endswith(_INTERRUPTED):
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event != "line" or "with self._using" in line or "with self._building" in line:
            return self._trace  # Python releases a lock that it leaves before it looks for signals
        self.lines += 1
        if self.lines == self.at:
            self.raised = True
            raise KeyboardInterrupt
        return self._trace


@pytest.mark.parametrize("prefetch", [None, 2])
def test_a_batch_without_its_info_comes_again(
    rb: Any, prefetch: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may come when the draw is recorded and its info is not there yet."""
    expected = draw(rb.consumer("other", sampler="without_replacement"), 3)
    c = rb.consumer("learner", sampler="without_replacement", prefetch=prefetch)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(c._batches), "info", interrupt)
        with pytest.raises(KeyboardInterrupt):
            c.sample(return_info=True)
    assert c.position["draw"] == 0
    for batch in expected:
        found, info = c.sample(return_info=True)
        assert same(found, batch)
        assert (info["id"] == batch["id"]).all()


@pytest.mark.some(4)
@pytest.mark.parametrize("sampler", ["without_replacement", "consuming"])
@pytest.mark.parametrize("before", [0, 1, 2, 3])  # draws; a file has three
def test_an_interrupt_at_any_line_loses_no_draw_and_repeats_none(
    rb: Any, before: int, sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", 420)
    expected = draw(rb.consumer("other", sampler=sampler), 20)
    at = 1
    while True:
        c = rb.consumer("learner", sampler=sampler, keep="all")
        draw(c, before)
        with Interrupt(at) as interrupt, suppress(KeyboardInterrupt):
            c.sample()
        found = c.position["draw"]
        assert found - before in (0, 1), at  # 1 if only `return` was left
        assert all(map(same, draw(c, 3), expected[found:])), at
        assert all(map(same, c.replay(0), expected)), at
        c.close()
        with rb.consumer("learner", at="end", keep="all") as c:
            assert c.position["draw"] == found + 3, at
            assert all(map(same, c.replay(0), expected)), at
        rb.consumers.drop("learner")
        if not interrupt.raised:
            break
        at += 1
    assert found == before + 1
    assert at > 40


def test_a_torn_end_is_cut_and_damage_is_named(rb: Any, tmp_path: Path) -> None:
    c = rb.consumer("learner")
    before = draw(c, 5)
    c.close()
    folder = tmp_path / "run.exp" / "consumers" / "learner"
    (log,) = (path for path in folder.iterdir() if path.name.isdigit())
    log.write_bytes(log.read_bytes()[:-7])
    with rb.consumer("learner") as c:
        c.seek("end")
        assert c.position["draw"] == 4
        assert same(c.sample(), before[4])
        assert all(map(same, c.replay(0), before))
    with rb.consumer("learner") as c:
        data = bytearray(log.read_bytes())
        data[-1] ^= 1
        log.write_bytes(data)
        with pytest.raises(CorruptionError, match="draw 4 is damaged"):
            list(c.replay(4))
    (folder / "consumer.json").write_text("{}")
    with pytest.raises(CorruptionError, match="consumer.json"):
        rb.consumer("learner")
    (folder / "consumer.json").write_text('{"format": 2, "id": "a", "seed": 1, "store": "b"}')
    with pytest.raises(StateError, match="format 2"):
        rb.consumer("learner")


@pytest.mark.parametrize("file", ["consumer.json", "ranks.json"])
def test_a_damaged_consumer_is_listed_with_the_others(rb: Any, file: str, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        with rb.consumer(name) as c:
            c.sample()
    (tmp_path / "run.exp" / "consumers" / "b" / file).write_text("{")
    a, b, c = rb.consumers.list()
    assert [(one.name, one.draws, one.damage) for one in (a, c)] == [("a", 1, None), ("c", 1, None)]
    assert (b.name, b.draws) == ("b", 0)
    assert file in b.damage
    rb.consumers.drop("a")
    with pytest.raises(CorruptionError, match=file):
        rb.consumer("b")


def test_arguments(rb: Any, tmp_path: Path) -> None:
    rb.consumer("seeded", seed=3).close()
    for name, options, message in (
        ("", {}, "not a name of a consumer"),
        ("../x", {}, "not a name of a consumer"),
        ("a" * 101, {}, "not a name of a consumer"),
        ("a", {"missing": "x"}, "missing must be"),
        ("a", {"keep": "x"}, "keep must be"),
        ("a", {"keep": -1}, "keep must be"),
        ("a", {"seed": "x"}, "seed must be"),
        ("a", {"lease_rows": -1}, "lease_rows must be at least 0"),
        ("a", {"lease_rows": 0.5}, "lease_rows must be an integer"),
        *(("a", {"prefetch": prefetch}, "prefetch") for prefetch in (-1, "two", 1.5)),
        ("a", {"sampler": rb.sampler}, "already draws for the buffer"),
        ("a", {"at": {"draw": 1}}, "is not a position"),
        ("a", {"at": "begin"}, "'begin' is not a position"),
        ("a", {"at": {"consumer": "a", "id": "b", "draw": 0}}, "no consumer 'a' yet"),
        ("a", {"batch_size": 0}, "batch_size must be"),
        ("seeded", {"seed": 4}, "draws with seed 3, not 4"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rb.consumer(name, **options)
    assert [one.name for one in rb.consumers.list()] == ["seeded"]
    rb.consumer("a").close()
    with pytest.raises(StateError, match="need a store on disk"):
        expstore.TensorDictReplayBuffer(batch_size=4).consumer("a")
    limited = expstore.TensorDictReplayBuffer(batch_size=4, rate_limiter=expstore.MinSize(1))
    with pytest.raises(StateError, match="sample unit or a rate limiter"):
        limited.consumer("a")
    rb.snapshots.tag("one")
    with (
        expstore.open(tmp_path / "run.exp", version="one", batch_size=4) as old,
        pytest.raises(StateError, match="is a version"),
    ):
        old.consumer("a")


# -- the log ---------------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DrawLog]:
    monkeypatch.setattr(draw_log, "SEGMENT_BYTES", 600)
    log = DrawLog(Disk(), tmp_path, "a")
    yield log
    log.close()


SELECTIONS = [
    Selection(np.array([3, 1, 1])),
    Selection(np.arange(40)),
    Selection(np.concatenate([np.arange(7, 17), np.arange(2, 12), [5]]), asked=32),
    Selection(np.array([2, 3])),
    Selection(np.array([], np.int64)),
    Selection(
        np.array([9, 8]),
        info={
            ("priority_weight",): np.array([0.5, 1], np.float32),
            ("next", "x"): np.arange(6).reshape(2, 3),
        },
        marks=(Mark(("next", "truncated"), np.array([True, False]), new=False),),
    ),
]


@pytest.mark.parametrize("reopened", [False, True])
def test_what_is_recorded_is_read(log: DrawLog, reopened: bool, tmp_path: Path) -> None:
    for number in range(30):
        selection = SELECTIONS[number % len(SELECTIONS)]
        log.append(
            selection,
            changes=number,
            low=number - 1,
            last=100 + number,
            progress=(number, 1, 2, 3),
            ends=number % 4 == 0,
        )
    if reopened:
        log.close()
        log = DrawLog(Disk(), tmp_path, "a")
    assert (log.count, log.first, log.progress) == (30, 0, (29, 1, 2, 3))
    assert len(list(tmp_path.iterdir())) > 3
    for number in reversed(range(30)):
        found, expected = log.read(number), SELECTIONS[number % len(SELECTIONS)]
        assert found[0] == number
        assert found[2:] == (number, number - 1, 100 + number, (number, 1, 2, 3), number % 4 == 0, found.at)
        assert abs(found.at / 1e6 - time.time()) < 600
        selection = found.selection
        np.testing.assert_array_equal(selection.ids, expected.ids)
        assert selection.ids.dtype == np.int64
        assert (selection.asked, selection.info.keys()) == (expected.asked, expected.info.keys())
        for key, values in expected.info.items():
            np.testing.assert_array_equal(selection.info[key], values)
            assert selection.info[key].dtype == values.dtype
        for mark, other in zip(selection.marks, expected.marks, strict=True):
            assert (mark.key, mark.joins, mark.new, mark.flat) == (
                other.key,
                other.joins,
                other.new,
                other.flat,
            )
            np.testing.assert_array_equal(mark.flags, other.flags)
    for number in (-1, 30):
        with pytest.raises(NotFoundError, match="draws 0 to 29"):
            log.read(number)
    every = list(log)
    assert [one.number for one in every] == list(range(30))
    assert all((one.selection.ids == log.read(one.number).selection.ids).all() for one in every)
    first, second, *_ = sorted(tmp_path.iterdir())
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(CorruptionError, match=f"damaged before draw {int(second.name) - 1}"):
        list(DrawLog(Disk(), tmp_path, "a", writes=False))


def test_it_takes_few_bytes(tmp_path: Path) -> None:
    log, chance = DrawLog(Disk(), tmp_path, "a"), np.random.default_rng(1)
    written, size = [], 0
    for last, most in (((1 << 32) - 1, 4.5), (1 << 40, 8.5), (None, 1)):
        for _ in range(100):
            ids = np.arange(256) if last is None else chance.integers(last - 1000, last + 1, 256)
            log.append(Selection(ids), changes=0, low=0, last=int(ids.max()), progress=(0, 0, 0, 0))
            written.append(ids)
        assert log.size - size < 25600 * most
        size = log.size
    log.close()
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) == size
    log = DrawLog(Disk(), tmp_path, "a")
    assert all((draw.selection.ids == ids).all() for draw, ids in zip(log, written, strict=True))


@pytest.mark.guarantee("consumers/kill")
def test_the_reserved_end_of_a_log_is_removed_after_a_kill(log: DrawLog, tmp_path: Path) -> None:
    """A former record that a power cut left after a gap does not look like a new one."""

    def append(log: DrawLog) -> None:
        log.append(SELECTIONS[0], changes=0, low=0, last=9, progress=(0, 0, 0, 0))

    append(log)
    append(log)
    (path,) = tmp_path.iterdir()
    end, size = log.size, path.stat().st_size
    assert size == 256 * 1024
    append(log)
    record = path.read_bytes()[end : log.size]
    append(log)
    log.close()
    with path.open("r+b") as file:  # what a power cut left of the third and the fourth draw, and of the zeros
        file.truncate(end + len(record) + len(record))
        file.seek(end)
        file.write(bytes(len(record)))
        file.truncate(size)
    again = DrawLog(Disk(), tmp_path, "a")
    assert again.count == 2
    append(again)
    assert (again.count, DrawLog(Disk(), tmp_path, "a", writes=False).count) == (3, 3)
    assert path.read_bytes()[again.size :].strip(b"\0") == b""
    again.close()
    assert path.stat().st_size == again.size


def test_another_process_finds_draws_while_they_are_recorded(log: DrawLog, tmp_path: Path) -> None:
    reader, chance = DrawLog(Disk(), tmp_path, "a", writes=False), np.random.default_rng(2)
    for number in range(40):
        ids = chance.integers(1, 1000, int(chance.choice([3, 700, 9000])))  # up to nine pieces that are read
        log.append(Selection(ids), changes=0, low=0, last=1000, progress=(0, 0, 0, 0))
        if chance.random() < 0.5:
            assert reader.follow() == number + 1
            assert (reader.read(number).selection.ids == ids).all()
            assert reader.follow() == number + 1


@pytest.mark.parametrize("last", [0, 3, 12, 29, 40])
def test_draws_that_saw_lost_rows_are_cut(log: DrawLog, last: int, tmp_path: Path) -> None:
    for number in range(30):
        log.append(SELECTIONS[0], changes=0, low=0, last=number, progress=(number, 0, 0, 0))
    log.commit(30)
    log.close()
    log = DrawLog(Disk(), tmp_path, "a")
    assert log.cut_after(last, 0) == (last < 29)
    count = min(last + 1, 30)
    for _ in range(2):
        # The commit came after what was cut.
        assert (log.count, log.committed, log.progress[0]) == (count, 30 if last >= 29 else 0, count - 1)
        assert log.read(count - 1).last == count - 1
        log = DrawLog(Disk(), tmp_path, "a")
    log.append(SELECTIONS[1], changes=0, low=0, last=0, progress=(7, 0, 0, 0))
    assert DrawLog(Disk(), tmp_path, "a").count == count + 1
    log.close()


def test_another_consumers_log_of_the_same_name_is_not_read(log: DrawLog, tmp_path: Path) -> None:
    log.append(SELECTIONS[0], changes=0, low=0, last=1, progress=(0, 0, 0, 0))
    log.close()
    assert DrawLog(Disk(), tmp_path, "b", writes=False).count == 0
    assert DrawLog(Disk(), tmp_path, "a").count == 1
    new = DrawLog(Disk(), tmp_path, "b")
    assert (new.count, list(tmp_path.iterdir())) == (0, [])


def test_a_segment_without_a_beginning_is_removed(log: DrawLog, tmp_path: Path) -> None:
    for _ in range(8):
        log.append(SELECTIONS[1], changes=0, low=0, last=1, progress=(1, 0, 0, 0))
    log.close()
    (tmp_path / f"{8:016d}").write_bytes(b"\0" * 10)
    log = DrawLog(Disk(), tmp_path, "a")
    assert log.count == 8
    log.append(SELECTIONS[0], changes=0, low=0, last=1, progress=(2, 0, 0, 0))
    log.close()
    assert DrawLog(Disk(), tmp_path, "a").read(8).progress[0] == 2
