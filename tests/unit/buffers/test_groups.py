"""Groups of episodes: which episodes are a group, its status, and draws of whole groups."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expstore
from expstore import GroupSampler
from expstore.core import tuning
from expstore.errors import (
    ArgumentError,
    NotFoundError,
    NotReadyError,
    QueryError,
    RowsChangedError,
    SchemaError,
    StateError,
)
from tests.support.forks import in_child
from tests.support.refusals import check_refusals

pytestmark = pytest.mark.usefixtures("no_syncs")

SIZE = 3
KEYS = {"group": "prompt", "group_size": SIZE, "traj": "traj"}
NUMPY = {"as_numpy": True}


def steps(
    *parts: tuple[int, int | str, int, bool], rewards: Sequence[float] | None = None, version: int = 0
) -> dict[str, Any]:
    """Return rows of episodes, each given as (trajectory id, key, number of rows, whether it ends)."""
    counts = [count for _, _, count, _ in parts]
    ends = np.zeros(sum(counts), bool)
    ends[np.cumsum(counts) - 1] = [end for *_, end in parts]
    reward = np.repeat(np.zeros(len(parts)) if rewards is None else rewards, counts)
    return {
        "prompt": np.repeat([key for _, key, _, _ in parts], counts),
        "traj": np.repeat([name for name, *_ in parts], counts),
        "policy_version": np.full(sum(counts), version),
        "next": {"reward": reward[:, None], "terminated": ends[:, None], "done": ends[:, None]},
    }


def whole(
    start: int, key: int | str, count: int = SIZE, *, length: int = 2, **options: Any
) -> dict[str, Any]:
    """Return the rows of ended episodes of one key."""
    return steps(*[(start + n, key, length, True) for n in range(count)], **options)


def opened(path: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"episodes": KEYS, "batches": NUMPY, "seed": 1}
    return expstore.open(path, **given | options)


def statuses(rb: Any) -> dict[int, tuple[str, str | None, list[int]]]:
    rows = rb.groups().arrow().to_pylist()
    return {row["group_id"]: (row["status"], row["reason"], row["members"]) for row in rows}


# -- which episodes are a group ------------------------------------------------------------------------


def test_a_group_completes_when_all_members_have_ended(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        rb.extend(steps((1, 5, 2, False), (2, 5, 2, True), (3, 6, 1, True), (4, 5, 1, True)))
        assert statuses(rb) == {1: ("open", None, [1, 2, 4]), 3: ("open", None, [3])}
        rb.extend(steps((5, 5, 1, True), (1, 5, 1, True)))  # a fourth member begins another group
        assert statuses(rb) == {
            1: ("complete", None, [1, 2, 4]), 3: ("open", None, [3]), 5: ("open", None, [5]),
        }  # fmt: skip
        rb.extend(steps((6, 5, 1, True), (7, 5, 1, True), (8, 5, 1, True)))
        assert statuses(rb)[5] == ("complete", None, [5, 6, 7])
        assert statuses(rb)[8] == ("open", None, [8])


def test_the_relation_has_returns_versions_and_times(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        rb.extend(steps((1, 5, 2, True), (2, 5, 2, True), rewards=[1.0, 3.0], version=4))
        rb.extend(steps((3, 5, 1, True), (4, 6, 1, False), rewards=[3.0, 0.0], version=6))
        first, second = (
            rb.sql(
                "SELECT g.*, min(_time) AS begun, max(_time) AS over FROM groups g "
                "JOIN transitions ON list_contains(members, _episode) GROUP BY ALL ORDER BY group_id"
            )
            .arrow()
            .to_pylist()
        )
        assert {name: first[name] for name in ("key", "size", "ended", "min_version", "max_version")} == {
            "key": "5", "size": 3, "ended": 3, "min_version": 4, "max_version": 6,
        }  # fmt: skip
        assert first["mean_return"] == pytest.approx(np.mean([2, 6, 3]))
        assert first["std_return"] == pytest.approx(np.std([2, 6, 3]))
        assert (first["start_time"], first["end_time"]) == (first["begun"], first["over"])
        assert (second["ended"], second["end_time"]) == (0, None)
        with opened(tmp_path / "a.exp", mode="r", episodes=None) as reader:
            assert reader.sql("FROM groups").arrow().num_rows == 2


@pytest.mark.parametrize("facts", [False, True])
def test_a_key_may_be_text_and_a_fact(facts: bool, tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", layout="arrow") as rb:
        for key, start in (("what is 2 + 2?", 1), ("why?", 11), ("what is 2 + 2?", 21)):
            data = steps((start, 0, 1, True), (start + 1, 0, 1, True))
            del data["prompt"], data["policy_version"]
            if facts:
                rb.extend(data, episode_info={"prompt": key, "policy_version": 3})
            else:
                rb.extend([{"prompt": key, "traj": start, "next": {"done": True}}])
                rb.extend([{"prompt": key, "traj": start + 1, "next": {"done": True}}])
        (one,) = rb.groups("status = 'complete'").arrow().to_pylist()
        assert (one["key"], one["members"]) == ("what is 2 + 2?", [1, 2, 5])
        assert one["min_version"] == (3 if facts else None)


def test_the_first_row_decides_and_no_later_fact(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        data = steps((1, 0, 1, False), (2, 0, 1, False))
        del data["prompt"]
        rb.extend(data, episode_info={"prompt": 5})
        rb.extend(data, episode_info={"prompt": 6})
        rb.episodes.annotate(2, prompt=7)
        assert [row["key"] for row in rb.groups().arrow().to_pylist()] == ["5"]
        with pytest.raises(SchemaError, match="_group"):
            rb.episodes.annotate(2, _group={"key": 9})
        with pytest.raises(SchemaError, match="names a group"):
            rb.extend(steps_without_prompt(3), episode_info={"prompt": [1]})
        rb.extend(steps_without_prompt(4), episode_info={"my_group": 1})
        assert statuses(rb) == {1: ("open", None, [1, 2])}


def steps_without_prompt(name: int) -> dict[str, Any]:
    data = steps((name, 0, 1, True))
    del data["prompt"]
    return data


def test_a_cut_member_fails_a_group_until_it_is_closed(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        rb.extend(steps((1, 5, 2, True), (2, 5, 1, False), (3, 5, 1, True)))
        rb.episodes.end()
        assert statuses(rb) == {1: ("failed", "cut", [1, 2, 3])}
        rb.groups.close(1)
        assert statuses(rb) == {1: ("complete", None, [1, 3])}
        rb.extend(whole(11, 5))
        assert statuses(rb)[4] == ("complete", None, [4, 5, 6])


def test_without_a_size_groups_complete_when_they_are_closed(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", episodes={"group": "prompt", "traj": "traj"}) as rb:
        rb.extend(steps(*[(n, 5, 1, n != 4) for n in range(1, 8)]))
        with pytest.raises(NotFoundError, match="no group 2"):
            rb.groups.close(2)
        rb.groups.close(1)
        assert statuses(rb) == {1: ("complete", None, [1, 2, 3, 5, 6, 7])}
        rb.extend(steps((4, 5, 1, True), (9, 5, 1, False)))  # the fourth was left out
        assert statuses(rb)[8] == ("open", None, [8])
        with pytest.raises(StateError, match="no member of group 8 has ended"):
            rb.groups.close(8)
        with pytest.raises(StateError, match="is complete, and cannot be closed"):
            rb.groups.close(1)


def test_a_discarded_group_says_why_and_is_never_drawn(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", sampler=GroupSampler(1)) as rb:
        rb.extend(whole(1, 5))
        rb.extend(whole(11, 6))
        rb.extend(steps((21, 7, 1, True)))
        rb.groups.discard(1, reason="no signal")
        rb.groups.discard(7, reason="stale")
        assert statuses(rb)[1] == ("discarded", "no signal", [1, 2, 3])
        with pytest.raises(StateError, match="discarded already: no signal"):
            rb.groups.discard(1, reason="again")
        with pytest.raises(ArgumentError, match="reason must be text"):
            rb.groups.discard(4, reason="")
        assert set(rb.sample()["prompt"]) == {6}
        with pytest.raises(NotReadyError, match="and 0 are complete, not drawn"):
            rb.sample()
        rb.extend(whole(31, 7))
        assert statuses(rb)[8] == ("complete", None, [8, 9, 10])
        rb.flush()
        with opened(tmp_path / "a.exp", mode="r") as reader:
            assert statuses(reader) == statuses(rb)
            with pytest.raises(StateError):
                reader.groups.discard(4, reason="x")


# -- rows that are gone --------------------------------------------------------------------------------


def test_a_group_that_loses_a_row_fails_and_is_never_smaller(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with opened(path, capacity=12, sampler=GroupSampler(1)) as rb:
        for key in range(6):
            rb.extend(whole(10 * key, key))
            expected = {
                3 * n + 1: ("complete", None) if n > key - 2 else ("failed", "evicted")
                for n in range(key + 1)
            }
            assert {id: one[:2] for id, one in statuses(rb).items()} == expected
        rb.extend(steps((90, 9, 1, True)))  # evicts one row of the older one
        assert rb.sample()["prompt"].tolist() == [5] * 6
        with pytest.raises(NotReadyError):
            rb.sample()
        before = statuses(rb)
    with opened(path, sampler=GroupSampler(1)) as rb:
        assert statuses(rb) == before
        rb.extend(whole(100, 0, count=2))  # the evicted group of this key is not continued
        assert statuses(rb)[20] == ("open", None, [20, 21])


def test_a_deleted_member_fails_a_group(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", sampler=GroupSampler(1)) as rb:
        rb.extend(whole(1, 5))
        rb.extend(whole(11, 6))
        assert statuses(rb)[1][0] == "complete"
        rb.episodes.delete("episode_id = 2")
        assert statuses(rb)[1][:2] == ("failed", "evicted")
        assert set(rb.sample()["prompt"]) == {6}


# -- a model -------------------------------------------------------------------------------------------


class Model:
    """What groups should be, by the rules: computed from all episodes each time."""

    def __init__(self) -> None:
        self.episodes: list[tuple[int, int]] = []  # episode id and key, in order
        self.status: dict[int, str] = {}
        self.ended: dict[int, tuple[str, list[int], int]] = {}  # group: how, members, the last one before

    def groups(self) -> dict[int, tuple[str, list[int]]]:
        found: dict[int, list[int]] = {}
        newest: dict[int, int] = {}
        for number, key in self.episodes:
            group = newest.get(key)
            if group is not None and group in self.ended:
                if number <= self.ended[group][2]:
                    continue
                group = None
            if group is None or len(found[group]) == SIZE:
                group = newest[key] = number
                found[group] = []
                if group in self.ended:
                    found[group] = self.ended[group][1]
                    continue
            found[group].append(number)
        return {group: (self.state(group, members), members) for group, members in found.items()}

    def state(self, group: int, members: list[int]) -> str:
        states = {self.status[one] for one in members}
        if group in self.ended:
            return self.ended[group][0]
        if "cut" in states:
            return "failed"
        return "complete" if len(members) == SIZE and "open" not in states else "open"


@pytest.mark.guarantee(
    "rows/groups",
    "Which episodes make a group is the same while a program writes, after a kill, and in a reader.",
)
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.torture)])
def test_groups_are_those_of_a_model(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, path, model = random.Random(seed), tmp_path / "a.exp", Model()
    monkeypatch.setattr(tuning, "CUT_EPISODES", 0)
    running: dict[int, int] = {}  # trajectory -> episode
    keys: dict[int, int] = {}
    names = iter(range(1, 10_000))

    def write(rb: Any) -> None:
        parts = []
        for _ in range(chance.randint(1, 5)):
            name = chance.choice([*running, None, None])
            if name is None:
                name = next(names)
                keys[name] = chance.randint(1, 4)
                running[name] = len(model.episodes) + 1
                model.episodes.append((running[name], keys[name]))
            end = chance.random() < 0.6
            model.status[running[name]] = "terminated" if end else "open"
            parts.append((name, keys[name], chance.randint(1, 3), end))
            if end:
                del running[name]
        rb.extend(steps(*parts))

    def act(rb: Any) -> None:
        groups = model.groups()
        number = chance.choice(list(groups))
        status, members = groups[number]
        if chance.random() < 0.5 and status in ("open", "failed"):
            keeps = [one for one in members if model.status[one] == "terminated"]
            if keeps and number not in model.ended:
                rb.groups.close(number)
                model.ended[number] = ("complete", keeps, max(members))
        elif status != "discarded" and number not in model.ended:
            rb.groups.discard(number, reason="x")
            model.ended[number] = ("discarded", members, max(members))

    def compare(rb: Any) -> None:
        assert {id: (one[0], one[2]) for id, one in statuses(rb).items()} == model.groups()

    rb = opened(path)
    reader = None
    for number in range(60):
        write(rb)
        if chance.random() < 0.3:
            act(rb)
        if chance.random() < 0.5:
            compare(rb)
        if number % 10 == 5:
            rb.flush()
            reader = reader or opened(path, mode="r")
            compare(reader)
        if number % 20 == 19:
            rb.close()
            for one in running.values():
                model.status[one] = "cut"
            running.clear()
            rb = opened(path)
            compare(rb)
    assert len({status for status, _ in model.groups().values()}) == 4
    rb.close()


# -- draws ---------------------------------------------------------------------------------------------


def fill(rb: Any, first: int, count: int, **options: Any) -> None:
    """Write groups whose keys are numbers from `first` on, with interleaved members."""
    for key in range(first, first + count):
        parts = [(100 * key + n, key, 1 + (key + n) % 3, False) for n in range(SIZE)]
        rb.extend(steps(*parts, **options))
        rb.extend(steps(*[(name, key, 1, True) for name, *_ in parts], **options))


def check_batch(batch: Any) -> list[int]:
    """Check that a batch has whole groups, each in one piece, by member and step; return their keys."""
    keys: list[int] = batch["prompt"][np.flatnonzero(np.diff(batch["group_id"], prepend=0))].tolist()
    for key in keys:
        rows = batch["prompt"] == key
        assert rows.sum() == sum(2 + (key + n) % 3 for n in range(SIZE))
        assert (np.diff(batch["traj"][rows]) >= 0).all()
        assert len(set(batch["group_id"][rows])) == 1
    assert len(set(keys)) == len(keys)
    return keys


@pytest.mark.guarantee(
    "consumers/groups", "A `GroupSampler` draws whole complete groups, each once, whatever is killed."
)
@pytest.mark.parametrize("order", ["oldest", "random"])
def test_each_group_is_drawn_once_also_after_restarts(order: Any, tmp_path: Path) -> None:
    path, keys = tmp_path / "a.exp", []
    for start in range(0, 24, 8):
        with opened(path, sampler=GroupSampler(2, order)) as rb:
            fill(rb, start, 8)
            for _ in range(3):
                batch = rb.sample()
                keys.append(check_batch(batch))
    with opened(path, sampler=GroupSampler(2, order)) as rb:
        keys += [check_batch(batch) for batch in rb]
        with pytest.raises(NotReadyError, match="and 0 are complete, not drawn"):
            rb.sample()
        assert not rb.can_sample()
    drawn = [key for some in keys for key in some]
    assert sorted(drawn) == list(range(24))
    assert (drawn == list(range(24))) == (order == "oldest")


@pytest.mark.parametrize("reads", [False, True])
def test_consumers_have_draws_of_their_own_and_go_back(reads: bool, tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with opened(path) as rb:
        fill(rb, 0, 6)
        rb.flush()
        source = opened(path, mode="r") if reads else rb
        with source.consumer("one", sampler=GroupSampler(2, "random")) as one:
            first = check_batch(one.sample())
            position = one.position
            second = one.sample()
            one.seek(position)
            again = one.sample()
            assert all((again[name] == second[name]).all() for name in ("prompt", "traj", "group_id"))
            keys = first + check_batch(again) + check_batch(one.sample())
            assert sorted(keys) == list(range(6))
            with pytest.raises(NotReadyError):
                one.sample()
        with source.consumer("two", sampler=GroupSampler(6)) as two:
            assert check_batch(two.sample()) == list(range(6))
        fill(rb, 6, 1)
        rb.flush()
        with source.consumer("one", sampler=GroupSampler(1), at="end") as one:
            assert check_batch(one.sample()) == [6]


@pytest.mark.guarantee("consumers/groups")
def test_a_lease_keeps_the_rows_of_drawn_groups(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        fill(rb, 0, 4)
        with rb.consumer("one", sampler=GroupSampler(2), lease_rows=100) as one:
            one.sample()
            rb.retention.set(expstore.Retain(where="false"))
            rb.retention.apply()
            assert rb.sql("SELECT count(DISTINCT prompt) FROM transitions").fetchone() == (2,)
            one.seek("committed")
            assert check_batch(one.sample()) == [0, 1]


def test_ranks_share_a_batch_by_groups(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp") as rb:
        fill(rb, 0, 5)
        rb.flush()
        shares = []

        def follow() -> None:
            with opened(tmp_path / "a.exp", mode="r") as other:
                with other.consumer("c", sampler=GroupSampler(5), rank=1, world=2) as consumer:
                    shares.append(consumer.sample())

        with rb.consumer("c", sampler=GroupSampler(5), rank=0, world=2) as consumer:
            thread = threading.Thread(target=follow)
            thread.start()
            shares.append(consumer.sample())
            thread.join()
        assert sorted(map(check_batch, shares)) == [[0, 1, 2], [3, 4]]


def test_groups_that_lag_are_passed_over_and_discarded(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", sampler=GroupSampler(1, max_lag=2)) as rb:
        for version in (1, 2, 3, 5):
            fill(rb, version, 1, version=version)
        assert check_batch(rb.sample()) == [3]
        assert [one[:2] for one in statuses(rb).values()] == [
            ("discarded", "lag"), ("discarded", "lag"), ("complete", None), ("complete", None),
        ]  # fmt: skip
        rb.flush()
        with opened(tmp_path / "a.exp", mode="r") as reader:
            with reader.consumer("c", sampler=GroupSampler(1, max_lag=1)) as consumer:
                assert check_batch(consumer.sample()) == [5]
        assert statuses(rb)[7][:2] == ("complete", None)  # a reader writes nothing down


def test_where_selects_groups(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", sampler=GroupSampler(1, where="std_return > 0")) as rb:
        rb.extend(whole(1, 5, rewards=[1, 1, 1]))
        rb.extend(whole(11, 6, rewards=[1, 0, 1]))
        assert set(rb.sample()["prompt"]) == {6}
        with pytest.raises(NotReadyError, match="match where='std_return > 0'"):
            rb.sample()
        assert statuses(rb)[1][0] == "complete"


def test_no_group_is_drawn_in_part_beside_a_writer(tmp_path: Path) -> None:
    """A ring that is overwritten while groups are read."""
    with opened(tmp_path / "a.exp", capacity=200, sampler=GroupSampler(2, "random")) as rb:
        fill(rb, 0, 10)
        drawn: Counter[int] = Counter(check_batch(rb.sample()))
        over = threading.Event()

        def write() -> None:
            start = 10
            while not over.is_set():
                fill(rb, start, 1)
                start += 1

        thread = threading.Thread(target=write)
        thread.start()
        try:
            while len(drawn) < 60:
                try:
                    drawn.update(check_batch(rb.sample()))
                except NotReadyError:
                    continue
        finally:
            over.set()
            thread.join()
        assert set(drawn.values()) == {1}


def test_a_refused_draw_does_not_look_at_every_group(tmp_path: Path) -> None:
    """A learner asks again and again, and a store has many groups."""
    with opened(tmp_path / "a.exp", sampler=GroupSampler(5)) as rb:
        fill(rb, 0, 1)
        groups = rb._store.catalog.groups
        with pytest.raises(NotReadyError, match="a batch has 5 groups, and 1 are complete"):
            rb.sample()
        groups.by_id[99] = None  # it has neither status nor versions
        with pytest.raises(NotReadyError, match="a batch has 5 groups, and 1 are complete"):
            rb.sample()


def test_a_recorded_draw_whose_group_is_evicted_does_not_come_again_smaller(tmp_path: Path) -> None:
    with opened(tmp_path / "a.exp", capacity=30) as rb:
        fill(rb, 0, 2)
        with rb.consumer("c", sampler=GroupSampler(1)) as consumer:
            position = consumer.position
            consumer.sample()
            fill(rb, 2, 3)
            with pytest.raises(RowsChangedError):
                consumer.seek(position)


def test_the_groups_of_a_killed_writer_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"

    def write() -> None:
        rb = opened(path, sampler=GroupSampler(1))
        fill(rb, 0, 3)
        rb.groups.discard(1, reason="x")
        assert check_batch(rb.sample()) == [1]
        rb.extend(steps((900, 9, 1, True), (901, 9, 1, False)))

    in_child(write)
    with opened(path, sampler=GroupSampler(1)) as rb:
        assert [one[:2] for one in statuses(rb).values()] == [
            ("discarded", "x"), ("complete", None), ("complete", None), ("failed", "cut"),
        ]  # fmt: skip
        assert check_batch(rb.sample()) == [2]
        with pytest.raises(NotReadyError):
            rb.sample()


# -- what is refused -----------------------------------------------------------------------------------


def test_wrong_arguments() -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: GroupSampler(0), ArgumentError, "groups_per_batch"),
        (lambda: GroupSampler(1, "newest"), ArgumentError, "order must be"),  # type: ignore[arg-type]
        (lambda: GroupSampler(1, max_lag=-1), ArgumentError, "max_lag"),
        (lambda: GroupSampler(1, where="no_such > 0"), QueryError, "no_such"),
        (lambda: GroupSampler(1, where="1; DROP TABLE x"), QueryError, "where="),
        (lambda: GroupSampler(1, where=3), ArgumentError, "SQL expression"),  # type: ignore[arg-type]
        (lambda: expstore.open("x", episodes={"group_size": 3}), ArgumentError, "group_size"),
        (lambda: expstore.open("x", episodes={"group": "a", "group_size": 0}), ArgumentError, "group_size"),
        (lambda: expstore.open("x", episodes={"group": 3}), ArgumentError, "group"),
    ]
    check_refusals(cases, absent=Path("x"))


def test_wrong_uses(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "plain.exp", sampler=GroupSampler(1)) as rb:
        rb.extend(whole(1, 5))
        assert rb.groups().arrow().num_rows == 0
        for act in (rb.sample, rb.can_sample, lambda: rb.groups.close(1)):
            with pytest.raises(StateError, match="no groups"):
                act()
    with opened(tmp_path / "a.exp", sampler=GroupSampler(1)) as rb:
        with pytest.raises(NotReadyError):
            rb.sample()
        with pytest.raises(SchemaError, match="names groups"):
            rb.extend({"prompt": np.zeros((2, 3)), "traj": np.arange(2)})
        rb.extend(whole(1, 5))
        with pytest.raises(ArgumentError, match="decides how many rows"):
            rb.sample(4)
        with pytest.raises(ArgumentError, match="decides how many rows"):
            rb.consumer("c", sampler=GroupSampler(1), batch_size=4)
    with pytest.raises(StateError, match="group_size=3"):
        opened(tmp_path / "a.exp", episodes=KEYS | {"group_size": 4})
    with pytest.raises(ArgumentError, match="Prefetching"):
        opened(tmp_path / "a.exp", sampler=GroupSampler(1), batches={"prefetch": 2})
