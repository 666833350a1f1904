"""The episodes API: list of episodes, their rows, and their annotations."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.cli.app import run
from expstore.errors import NotFoundError, QueryError, SchemaError, StateError
from expstore.storages.memory import MemoryStorage
from expstore.transforms import StepView
from tests.support.batches import steps
from tests.support.forks import in_child

pytestmark = pytest.mark.index


def infos(rb: ReplayBuffer) -> dict[int, Any]:
    """What is noted, by episode, as SQL shows it."""
    rows = rb.sql("SELECT episode_id, info::VARCHAR FROM episodes ORDER BY 1").fetchall()
    return {episode: None if text is None else json.loads(text) for episode, text in rows}


@pytest.fixture(params=["zarr", "memory"])
def rb(request: pytest.FixtureRequest, store_path: Path) -> Any:
    """A ring of 12 rows with three episodes: 1 has ended, 2 and 3 are open and interleaved."""
    if request.param == "memory":
        made: Any = TensorDictReplayBuffer(storage=MemoryStorage(12), with_ids=True, batch_size=4)
    else:
        made = expstore.open(store_path, capacity=12, batch_size=4)
    with made:
        made.extend(steps(4, 0, end="terminated"), source="a")
        for cycle in range(2):
            made.extend(steps(2, 10 + 2 * cycle), source="a")
            made.extend(steps(1, 20 + cycle), source="b")
        yield made


# -- episodes ----------------------------------------------------------------------------------------


def test_episodes_are_the_relation_or_some_of_it(rb: Any) -> None:
    everything = rb.episodes()
    assert everything.fetchall() == rb.sql("SELECT * FROM episodes ORDER BY episode_id").fetchall()
    assert [row[0] for row in everything] == [1, 2, 3]
    assert [row[0] for row in rb.episodes("status = 'open'")] == [2, 3]
    assert [row[0] for row in rb.episodes(order_by='"return", episode_id DESC')] == [3, 2, 1]
    assert [row[0] for row in rb.episodes("length > ?", "length", 1, params=[2])] == [1]
    assert [row[0] for row in rb.episodes("source = $who -- b's", params={"who": "b"})] == [3]
    assert [row[0] for row in rb.episodes(order_by="length -- shortest first", limit=2)] == [3, 1]
    assert len(rb.episodes(limit=0)) == 0


def test_invalid_expressions_are_refused_with_a_message(rb: Any) -> None:
    for where in ("true; DROP TABLE episodes", "true) OR (true", "true GROUP BY 1", ""):
        with pytest.raises(QueryError, match="where="):
            rb.episodes(where)
    for order_by in ("length; SELECT 1", "length LIMIT 1", ""):
        with pytest.raises(QueryError, match="order_by="):
            rb.episodes(order_by=order_by)
    for unknown in ({"where": "lenght > 2"}, {"order_by": "nowhere"}):
        with pytest.raises(QueryError, match="episodes has .*episode_id, source"):
            rb.episodes(**unknown)
    with pytest.raises(ValueError):
        rb.episodes(limit=-1)
    assert len(rb.episodes()) == 3


# -- a trajectory ------------------------------------------------------------------------------------


def test_a_trajectory_is_in_step_order_though_its_rows_are_interleaved(rb: Any) -> None:
    found = rb.trajectory(2)
    assert (found.batch_size, found.names) == (torch.Size([4]), ["time"])
    assert found["number"].tolist() == [10, 11, 12, 13]
    assert found["id"].tolist() == [5, 6, 8, 9]
    assert torch.equal(rb[found["index"]]["number"], found["number"])
    assert rb.trajectory(np.int64(3))["number"].tolist() == [20, 21]
    assert rb.trajectory(1)["next", "terminated"].flatten().tolist() == [False] * 3 + [True]


def test_a_trajectory_is_cut_where_its_rows_have_left(rb: Any) -> None:
    rb.extend(steps(4, 14), source="a")  # 14 rows for 12 places: 1 and 2 have left
    assert rb.trajectory(1)["number"].tolist() == [2, 3]
    assert rb.trajectory(2)["number"].tolist() == [*range(10, 18)]
    rb.extend(steps(8, 18, end="truncated"), source="a")
    assert rb.trajectory(2)["id"].tolist() == [*range(11, 23)]
    with pytest.raises(NotFoundError, match="no row of episode 1 is left"):
        rb.trajectory(1)
    rb.empty()
    with pytest.raises(NotFoundError, match="no row of episode 2 is left"):
        rb.trajectory(2)


def test_a_missing_episode_is_refused_with_a_list_of_episodes(rb: Any) -> None:
    for wrong in (0, 4, -1):
        with pytest.raises(NotFoundError, match=f"no episode {wrong}: their ids are 1 to 3"):
            rb.trajectory(wrong)
        with pytest.raises(NotFoundError, match=f"no episode {wrong}: their ids are 1 to 3"):
            rb.episodes.annotate(wrong, x=1)
    with pytest.raises(TypeError, match="an integer, got str"):
        rb.trajectory("1")
    with pytest.raises(TypeError, match="an integer, got float"):
        rb.episodes.annotate(1.0, x=1)
    with pytest.raises(NotFoundError, match="the store has no episodes yet"):
        ReplayBuffer(storage=MemoryStorage(5)).trajectory(1)


@pytest.mark.slow
def test_every_trajectory_of_random_interleavings_is_what_was_written(
    store_path: Path, rng: np.random.Generator
) -> None:
    """Lanes of random lengths, a ring that wraps, restarts: beside a list of what each source wrote."""
    written: dict[int, list[tuple[int, int]]] = {}
    number = 0
    for _ in range(3):
        with expstore.open(store_path, capacity=60) as rb:
            for _ in range(40):
                count = int(rng.integers(1, 7))
                end = rng.choice(["", "", "terminated", "truncated"])
                batch = steps(count, number, end=str(end) or None)
                ids = rb.extend(batch, source=str(rng.choice(["a", "b", "c"])), return_ids=True).tolist()
                episodes = rb.sql("SELECT _episode FROM transitions WHERE _id >= ?", [ids[0]]).fetchall()
                for (episode,), i, n in zip(episodes, ids, range(number, number + count), strict=True):
                    written.setdefault(episode, []).append((i, n))
                number += count
                low = rb.storage.window.low
                for episode in rng.choice(list(written), 3):
                    left = [(i, n) for i, n in written[episode] if i > low]
                    if left:
                        found = rb.trajectory(episode)
                        assert list(zip(found["id"].tolist(), found["number"].tolist(), strict=True)) == left


def test_rows_that_are_overwritten_while_they_are_read_are_read_again(
    rb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb.extend(steps(4, 14), source="a")
    read, cycles = rb.storage.read, iter(range(100))

    def slow(*asked: Any) -> Any:
        if next(cycles) < 2:
            rb.extend(steps(5000, 18), source="a")  # longer than the ring and its spare slots
        return read(*asked)

    monkeypatch.setattr(rb.storage, "read", slow)
    found = rb.trajectory(2)
    assert found["number"].tolist() == [*range(5006, 5018)]
    assert found["id"].tolist() == [*range(10003, 10015)]


def test_followers_find_trajectories_and_what_is_noted(store_path: Path) -> None:
    with expstore.open(store_path, capacity=12) as rb, expstore.open(store_path, mode="r") as other:
        rb.extend(steps(4, 0), source="a", episode_info={"site": 1})
        rb.flush()
        assert other.trajectory(1)["number"].tolist() == [0, 1, 2, 3]
        assert infos(other) == {1: {"site": 1}}
        rb.episodes.annotate(1, good=True)
        rb.extend(steps(2, 4, end="terminated"), source="a")
        rb.episodes.annotate(1, site=None)
        rb.flush()
        assert infos(other) == {1: {"good": True}}
        rb.extend(steps(11, 6), source="b")
        rb.episodes.annotate(1, late=[1, {"x": None}])
        rb.flush()
        assert infos(other) == {1: {"good": True, "late": [1, {"x": None}]}, 2: None}
        assert other.trajectory(1)["number"].tolist() == [5]
        rb.extend(steps(1, 17), source="b")
        rb.flush()
        with pytest.raises(NotFoundError, match="no row of episode 1 is left"):
            other.trajectory(1)
        assert infos(other)[1] == {"good": True, "late": [1, {"x": None}]}
        rb.episodes.annotate(1, late=None)
        assert infos(other)[1] == {"good": True}
        with pytest.raises(StateError, match="open for reading only"):
            other.episodes.annotate(1, x=1)


def test_rows_that_were_given_up_are_left_out(store_path: Path) -> None:
    with expstore.open(store_path, capacity=None) as rb:
        rb.extend(steps(9000, 0, end="terminated"))
    shard = store_path / "columns" / "number" / "c" / "0"
    data = bytearray(shard.read_bytes())
    data[4096 * 8 + 100] ^= 1
    shard.write_bytes(bytes(data))
    assert run(["repair", "--drop-damaged", str(store_path)]) == 0
    with expstore.open(store_path) as rb:
        assert rb.trajectory(1)["number"].tolist() == [*range(4096), *range(8192, 9000)]


# -- what is noted -----------------------------------------------------------------------------------


def test_notes_are_merged_and_none_removes(rb: Any) -> None:
    assert rb.episodes.annotate(2, success=True, tags=["a", "ß"]) == {"success": True, "tags": ["a", "ß"]}
    assert rb.episodes.annotate(2, success=None, score=1.5) == {"tags": ["a", "ß"], "score": 1.5}
    assert rb.episodes.annotate(2) == {"tags": ["a", "ß"], "score": 1.5}
    assert infos(rb) == {1: None, 2: {"tags": ["a", "ß"], "score": 1.5}, 3: None}
    assert rb.episodes.annotate(2, tags=None, score=None, nothing=None) == {}
    assert rb.episodes.annotate(1, episode_id=7, self="me") == {"episode_id": 7, "self": "me"}
    assert infos(rb) == {1: {"episode_id": 7, "self": "me"}, 2: None, 3: None}
    assert rb.sql("SELECT info->>'$.self' FROM episodes WHERE episode_id = 1").fetchall() == [("me",)]
    assert [row[0] for row in rb.episodes("info->>'$.self' = ?", params=["me"])] == [1]


def test_open_ended_and_evicted_episodes_keep_all_else_when_they_are_noted(rb: Any) -> None:
    """Also those of which the index has heard long ago, and again after more rows."""
    rb.extend(steps(2, 14, end="truncated"), source="a")
    before = rb.sql("SELECT * EXCLUDE (info) FROM episodes ORDER BY 1").fetchall()
    for episode in (1, 2, 3):
        rb.episodes.annotate(episode, n=episode)
    assert rb.sql("SELECT * EXCLUDE (info) FROM episodes ORDER BY 1").fetchall() == before
    rb.extend(steps(12, 30), source="b")
    before = rb.sql("SELECT * EXCLUDE (info) FROM episodes ORDER BY 1").fetchall()
    facts = rb.episodes.annotate_each({episode: {"more": [episode]} for episode in (3, 1, 2)})
    assert facts == {episode: {"n": episode, "more": [episode]} for episode in (3, 1, 2)}
    assert rb.sql("SELECT * EXCLUDE (info) FROM episodes ORDER BY 1").fetchall() == before
    assert infos(rb) == {episode: {"n": episode, "more": [episode]} for episode in (1, 2, 3)}


def test_facts_about_several_episodes_are_written_by_one_record_or_none_is(rb: Any) -> None:
    before = rb.storage.state.content[1]
    assert rb.episodes.annotate_each({2: {"a": 1}, 1: {"a": None}, 3: {}}) == {2: {"a": 1}, 1: {}, 3: {}}
    rb.episodes.annotate_each({2: {"a": 2}, 3: {"b": [1]}})
    assert rb.storage.state.content[1] == before + 2
    for wrong in ({1: {"a": 1}, 77: {"a": 1}}, {1: {"a": 1}, 2: {"a": float("nan")}}, {"2": {"a": 1}}):
        with pytest.raises((expstore.errors.ExpStoreError, TypeError)):
            rb.episodes.annotate_each(wrong)
    assert rb.episodes.annotate_each({}) == {}
    assert rb.storage.state.content[1] == before + 2
    assert infos(rb) == {1: None, 2: {"a": 2}, 3: {"b": [1]}}


def test_info_that_comes_with_rows_is_merged_into_every_episode_they_touch(rb: Any) -> None:
    rb.episodes.annotate(2, a=1, b=2)
    rb.extend(steps(2, 30, end="terminated"), source="a", episode_info={"b": None, "c": {"d": [1]}})
    assert infos(rb) == {1: None, 2: {"a": 1, "c": {"d": [1]}}, 3: None}
    both = torch.cat([steps(1, 22, end="terminated"), steps(1, 0)])
    rb.extend(both, source="b", episode_info={"late": True})
    assert infos(rb) == {1: None, 2: {"a": 1, "c": {"d": [1]}}, 3: {"late": True}, 4: {"late": True}}
    rb.add(steps(1, 1)[0], source="b", episode_info={"late": False})
    assert infos(rb)[4] == {"late": False}
    assert infos(rb)[3] == {"late": True}


def test_annotations_without_json_form_change_nothing(rb: Any) -> None:
    rb.episodes.annotate(2, x=0)
    before = rb.storage.state.content, rb.storage.last
    for value in (
        *(torch.tensor(1), np.float32(1), np.array([1]), {1, 2}, b"bytes", "\ud800"),
        *(float("nan"), [1, {"y": float("inf")}], {1: 2}),
    ):
        with pytest.raises(SchemaError, match="info"):
            rb.episodes.annotate(2, x=value)
        with pytest.raises(SchemaError, match="info"):
            rb.extend(steps(1, 0), source="a", episode_info={"x": value})
    for info in ({5: 1}, [{"a": 1}], "a", 5, torch.zeros(1)):
        with pytest.raises(SchemaError):
            rb.extend(steps(1, 0), source="a", episode_info=info)
    assert (rb.storage.state.content, rb.storage.last) == before
    assert infos(rb)[2] == {"x": 0}
    empty = TensorDictReplayBuffer(storage=MemoryStorage(5))
    with pytest.raises(SchemaError):
        empty.extend(steps(1, 0), episode_info={"x": {1}})
    assert empty.schema is None  # the refused rows have not fixed the fields


def test_notes_survive_reopening_and_the_loss_of_the_index(store_path: Path) -> None:
    wanted = {1: {"n": 1}, 2: {"late": True, "n": 2}, 3: {"n": 3}}
    with expstore.open(store_path, capacity=6) as rb:
        rb.extend(steps(3, 0, end="terminated"), source="a")
        rb.extend(steps(3, 0, end="truncated"), source="b", episode_info={"late": True})
        rb.extend(steps(6, 0), source="c")
        for episode in (1, 2, 3):
            rb.episodes.annotate(episode, n=episode)
    with expstore.open(store_path) as rb:
        assert infos(rb) == wanted
    (store_path / "index.duckdb").unlink()
    with expstore.open(store_path) as rb:
        assert infos(rb) == wanted
        assert rb.episodes.annotate(3, n=None) == {}
        assert rb.episodes.annotate(1, m=1) == {"n": 1, "m": 1}
    with expstore.open(store_path, mode="r") as rb:
        assert infos(rb) == wanted | {1: {"n": 1, "m": 1}, 3: None}


def test_notes_go_into_versions_and_come_back_with_them(store_path: Path, tmp_path: Path) -> None:
    with expstore.open(store_path, capacity=20) as rb:
        rb.extend(steps(3, 0, end="terminated"), source="a", episode_info={"n": 1})
        rb.extend(steps(3, 3), source="b")
        rb.episodes.annotate(2, n=2)
        rb.dumps(tmp_path / "versions")
        rb.episodes.annotate(1, n=None)
        rb.episodes.annotate(2, n=7)
        rb.loads(tmp_path / "versions")
        loaded = [episode for episode, info in infos(rb).items() if info in ({"n": 1}, {"n": 2})]
        assert len(loaded) == 2
        assert rb.trajectory(loaded[1])["number"].tolist() == [3, 4, 5]
        rb.episodes.annotate(loaded[0], again=True)
    with expstore.open(tmp_path / "versions", mode="r") as rb:
        assert infos(rb) == {1: {"n": 1}, 2: {"n": 2}}
    with expstore.open(store_path) as rb:
        assert infos(rb) == {loaded[0]: {"n": 1, "again": True}, loaded[1]: {"n": 2}}
    assert run(["verify", str(store_path)]) == 0


@pytest.mark.guarantee("kill/rows")
@pytest.mark.some(1)
@pytest.mark.parametrize("durability", ["process", "sync"])
def test_a_kill_loses_nothing_that_was_noted(store_path: Path, durability: Any) -> None:
    def live() -> None:
        rb = expstore.open(store_path, capacity=8, durability=durability)
        rb.extend(steps(3, end="terminated"), source="a")
        rb.extend(steps(2), source="b", episode_info={"with": "rows"})
        rb.episodes.annotate(1, ended=True)
        rb.flush()
        rb.episodes()
        rb.episodes.annotate(1, more=1)
        rb.episodes.annotate(2, open=True)
        rb.extend(steps(9), source="c")
        rb.episodes.annotate(1, evicted=[1])
        rb.add(steps(1)[0], source="b", episode_info={"with": None, "added": 1})
        rb.episodes()
        rb.episodes.annotate(3, last=True)

    in_child(live)
    wanted = {1: {"ended": True, "more": 1, "evicted": [1]}, 2: {"open": True, "added": 1}, 3: {"last": True}}
    twin = store_path.with_name("twin.exp")
    shutil.copytree(store_path, twin)
    with expstore.open(store_path, mode="r") as rb:
        assert infos(rb) == wanted
    with expstore.open(store_path) as rb:
        assert infos(rb) == wanted
        rb.episodes.annotate(2, open=None)
    with expstore.open(store_path) as rb:
        assert infos(rb) == wanted | {2: {"added": 1}}
    (twin / "index.duckdb").unlink(missing_ok=True)
    with expstore.open(twin) as rb:
        assert infos(rb) == wanted


def test_a_note_that_the_disk_refuses_is_not_there(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(steps(2, 0), source="a", episode_info={"a": 1})

        def refuse(*_: Any) -> int:
            raise expstore.errors.StorageError("the disk refuses")

        with monkeypatch.context() as patch:
            patch.setattr(rb.storage.state.journal, "append", refuse)
            with pytest.raises(expstore.errors.StorageError, match="the disk refuses"):
                rb.episodes.annotate(1, b=2)
        assert infos(rb) == {1: {"a": 1}}
        assert rb.episodes.annotate(1, c=3) == {"a": 1, "c": 3}
    with expstore.open(store_path) as rb:
        assert infos(rb) == {1: {"a": 1, "c": 3}}


# -- which rows end an episode -----------------------------------------------------------------------


def ended(*ends: str, number: int = 0) -> TensorDict:
    """Rows of which the last one is done, by the flags that are named."""
    made = steps(3, number)
    for name in ("done", "terminated", "truncated"):
        flags = torch.zeros(3, 1, dtype=torch.bool)
        flags[-1] = name in ends
        made["next", name] = flags
    return made


@pytest.mark.parametrize("kind", ["zarr", "memory"])
def test_an_end_that_is_not_terminated_is_truncated(store_path: Path, kind: str) -> None:
    if kind == "memory":
        rb: Any = TensorDictReplayBuffer(storage=MemoryStorage(100), with_ids=True)
    else:
        rb = expstore.open(store_path)
    with rb:
        for number, ends in enumerate([("done",), ("done", "terminated"), ("done", "truncated")]):
            rb.extend(ended(*ends, number=10 * number))
        assert [row[0] for row in rb.sql("SELECT status FROM episodes ORDER BY episode_id")] == [
            "truncated",
            "terminated",
            "truncated",
        ]
    if kind == "zarr":
        (store_path / "index.duckdb").unlink()  # it is made again out of episodes.log
        with expstore.open(store_path) as rb:
            assert rb.episodes("status = 'truncated'").df()["episode_id"].tolist() == [1, 3]


def test_done_alone_terminates(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(ended("done").exclude(("next", "terminated"), ("next", "truncated")))
        assert rb.sql("SELECT status FROM episodes").fetchall() == [("terminated",)]


# -- several agents ----------------------------------------------------------------------------------

AGENTS = ("next", "agents", "reward")
REWARDS = torch.tensor([[[1.0], [2.0], [6.0]], [[0.5], [0.5], [2.0]]])


def agents(*ends: str) -> TensorDict:
    """Two rows of three agents, whose rewards are REWARDS; of the last row each agent's end is given."""
    flags = {name: torch.zeros(2, 3, 1, dtype=torch.bool) for name in ("terminated", "truncated")}
    for agent, end in enumerate(ends):
        if end:
            flags[end][-1, agent] = True
    after = TensorDict({"reward": REWARDS, **flags}, [2, 3])
    return TensorDict({"number": torch.arange(2), "next": TensorDict({"agents": after}, [2])}, [2])


def test_without_a_reward_the_return_is_null(store_path: Path) -> None:
    with expstore.open(store_path, capacity=4) as rb:
        rb.extend(agents(), source="a")
        assert rb.episodes().df()["return"].isna().tolist() == [True]
        assert rb.sql('SELECT "return" FROM episodes').fetchall() == [(None,)]
        rb.episodes.annotate(1, seen=True)
        rb.extend(agents("terminated"), source="a")
        for _ in range(4):
            rb.extend(agents(), source="b")
        rb.flush()
        assert rb.sql('SELECT "return" FROM episodes').fetchall() == [(None,), (None,)]
    (store_path / "index.duckdb").unlink()
    with expstore.open(store_path) as rb:
        assert rb.sql('SELECT "return" FROM episodes').fetchall() == [(None,), (None,)]
    with TensorDictReplayBuffer(storage=MemoryStorage(10)) as rb:
        rb.extend(agents())
        assert rb.sql('SELECT "return" FROM episodes').fetchall() == [(None,)]


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("reduction", "wanted"), [(None, 12.0), ("sum", 12.0), ("mean", 4.0), ("min", 1.5), ("max", 8.0)]
)
def test_rewards_of_several_agents_become_one(
    store_path: Path, reduction: Any, wanted: float, tmp_path: Path
) -> None:
    with expstore.open(
        store_path, episodes=expstore.EpisodeKeys(reward=AGENTS, reward_reduce=reduction)
    ) as rb:
        rb.extend(agents(), source="a")
        assert rb.sql('SELECT "return" FROM episodes').fetchall() == [(wanted,)]
        rb.dumps(tmp_path / "versions")
    with expstore.open(store_path) as rb:
        rb.extend(agents(), source="a")
        assert rb.sql('SELECT sum("return") FROM episodes').fetchall() == [(2 * wanted,)]
    with pytest.raises(StateError, match="made with reward_reduce="):
        expstore.open(
            store_path, episodes=expstore.EpisodeKeys(reward_reduce="min" if reduction != "min" else "max")
        )
    expstore.open(store_path, episodes=expstore.EpisodeKeys(reward_reduce=reduction or "sum")).close()
    expstore.merge([store_path], out=tmp_path / "merged.exp")
    with TensorDictReplayBuffer(storage=MemoryStorage(10)) as rb:
        rb.loads(tmp_path / "versions")
        rb.extend(agents(), source="a")
        assert rb.sql('SELECT sum("return") FROM episodes').fetchall() == [(2 * wanted,)]
    with expstore.open(tmp_path / "merged.exp") as rb:
        rb.extend(agents(), source="b")
        assert rb.sql('SELECT sum("return") FROM episodes').fetchall() == [(3 * wanted,)]


@pytest.mark.some(4)
@pytest.mark.parametrize(
    ("rule", "ends", "status"),
    [
        (None, ("", "", ""), "open"),
        (None, ("terminated", "", ""), "terminated"),
        ("any", ("", "truncated", ""), "truncated"),
        ("any", ("terminated", "truncated", ""), "terminated"),
        ("all", ("terminated", "truncated", ""), "open"),
        ("all", ("terminated", "truncated", "truncated"), "truncated"),
        ("all", ("terminated", "terminated", "terminated"), "terminated"),
    ],
)
def test_an_episode_ends_when_any_or_all_agents_are_done(
    store_path: Path, rule: Any, ends: tuple[str, ...], status: str
) -> None:
    keys = [("next", "agents", "terminated"), ("next", "agents", "truncated")]
    with expstore.open(store_path, episodes=expstore.EpisodeKeys(done=keys, done_reduce=rule)) as rb:
        rb.extend(agents(*ends), source="a")
        assert rb.sql("SELECT status FROM episodes").fetchall() == [(status,)]
        assert StepView(rb.storage, np.array([1, 2])).ends(np.array([[1], [2]])).tolist() == [
            [False],
            [status != "open"],
        ]
    with pytest.raises(StateError, match="made with done_reduce="):
        expstore.open(
            store_path, episodes=expstore.EpisodeKeys(done_reduce="any" if rule == "all" else "all")
        )


def test_a_reduction_that_is_unknown_is_refused(store_path: Path) -> None:
    with pytest.raises(ValueError, match="reward_reduce must be one of sum, mean, min, max, got 'median'"):
        expstore.open(store_path, episodes=expstore.EpisodeKeys(reward_reduce="median"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="done_reduce must be one of any, all, got 'most'"):
        expstore.open(store_path, episodes=expstore.EpisodeKeys(done_reduce="most"))  # type: ignore[arg-type]
    assert not store_path.exists()
