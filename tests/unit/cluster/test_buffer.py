"""The buffer over several shards against real servers: reads, writes, queries, restarts, missing shards."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.api import Settings
from expstore.buffers.member import Draw
from expstore.cluster.routing import Place, choose_shard
from expstore.errors import (
    NotFoundError,
    NotReadyError,
    QueryError,
    RemoteError,
    SchemaError,
    SnapshotError,
    StateError,
)
from expstore.remote import Retries
from tests.support.arrow_bodies import batch_of
from tests.support.forks import forked
from tests.support.servers import Serving
from tests.support.tcp_proxy import BreakableProxy
from tests.support.waits import wait_until

SOON = Retries(seconds=20, first=0.01, longest=0.05, seed=3)


def connect(urls: list[str], **options: Any) -> expstore.cluster.ShardedReplayBuffer:
    options = {"batch_size": 32, "seed": 5, "retries": SOON} | options
    return expstore.connect(urls, **options)


def fill(rb: expstore.cluster.ShardedReplayBuffer, sources: int = 12) -> torch.Tensor:
    """Write ten rows of each source; return their shards and ids."""
    found = [rb.extend(batch_of(10, 10 * n), source=f"actor-{n}") for n in range(sources)]
    return torch.cat(found)


def ids_of(batches: Any) -> list[list[list[int]]]:
    return [batch["id"].tolist() for batch in batches]


def test_rows_that_are_not_there_are_named(urls: list[str]) -> None:
    with connect(urls) as rb:
        fill(rb)
        with pytest.raises(NotFoundError, match="no shard 9"):
            rb.by_id([(9, 1)])
        with pytest.raises(NotFoundError, match=r"shard 1 \(http.*"):
            rb.by_id([(1, 999)])
        with pytest.raises(SchemaError):
            rb.by_id([1, 2])


@pytest.mark.slow
def test_samples_are_updated_and_stored_again(urls: list[str]) -> None:
    with connect(urls, sampler={"kind": "prioritized"}) as rb:
        pairs = fill(rb)
        assert rb.update_priority(id=pairs, priority=torch.arange(1.0, 121.0)) == 120
        batch = rb.sample()
        assert batch["id"].shape == (32, 2)
        assert (batch["action"] == rb.by_id(batch["id"])["action"]).all()
        batch["td_error"] = torch.full((32,), 0.5)
        count = len({tuple(pair) for pair in batch["id"].tolist()})
        assert rb.update_priority(batch) >= count
        priorities = rb.sql_each("SELECT _id, _priority FROM transitions").fetchall()
        changed = {(shard, row) for row, priority, shard in priorities if priority == 0.5}
        assert changed == {tuple(pair) for pair in batch["id"].tolist()}
        assert len(rb.extend(batch.exclude("td_error"), source="again")) == 32
        arrays, info = rb.sample(as_numpy=True, return_info=True)
        assert type(arrays["next"]["reward"]) is type(info["id"]) is np.ndarray
        assert not {"id", "index"} & set(rb.sample(include_info=False).keys())
        with pytest.raises(RemoteError, match="by index"):
            rb.update_priority(batch["index"], 1.0)


def test_queries_have_parameters_and_one_statement(urls: list[str]) -> None:
    with connect(urls) as rb:
        fill(rb)
        count = "SELECT count(*) AS n FROM transitions"
        assert rb.sql("SELECT sum(n) + $more FROM parts", {"more": 1}, each=count).fetchone() == (121,)
        for query in (
            "SELECT * FROM transitions",
            "SELECT 1; SELECT 2",
            "FROM read_csv('/etc/passwd')",
        ):
            with pytest.raises(QueryError):
                rb.sql(query, each=count)


@pytest.mark.guarantee(
    "cluster/draws",
    "Draws of shards at rest follow from the seed, and continue after a restart and from a version of all"
    " shards.",
)
def test_draws_follow_from_the_seed_and_continue(urls: list[str]) -> None:
    with connect(urls) as rb:
        fill(rb)
        first = [rb.sample() for _ in range(11)]
        state = rb.state_dict()
        after = [rb.sample() for _ in range(3)]
        rb.load_state_dict(state)
        assert ids_of(rb.sample() for _ in range(3)) == ids_of(after)
    with connect(urls) as rb:
        stream = rb.stream(8)
        found = [next(stream), rb.sample(), *stream, *(rb.sample() for _ in range(2))]
        assert ids_of(found) == ids_of(first)
        assert rb.draw == 11
    with connect(urls, draw=6) as rb:  # in the middle of batches that were drawn together
        assert ids_of(rb.stream(8)) == ids_of([*first[6:], *after])
    with connect(urls, ahead=2) as rb, pytest.raises(StateError, match="ahead"):
        rb.load_state_dict(state)
    with connect(urls, seed=6) as rb:
        assert ids_of([rb.sample()]) != ids_of(first[:1])
        other = rb.sample(7)
        assert other["id"].shape == (7, 2)
        assert rb.draw == 1


@pytest.mark.guarantee("cluster/draws")
@pytest.mark.slow
def test_draws_continue_after_a_restart_of_the_servers(tmp_path: Path) -> None:
    settings = Settings(path=tmp_path)
    for shard in range(2):
        expstore.open(tmp_path / f"run{shard}.exp", mode="x", seed=shard).close()
    with Serving(settings) as server, connect([f"{server.url}/run{shard}" for shard in range(2)]) as rb:
        fill(rb)
        wanted = [rb.sample() for _ in range(9)]
    with Serving(settings) as server:
        with connect([f"{server.url}/run{shard}" for shard in range(2)], draw=3) as rb:
            assert ids_of(rb.sample() for _ in range(6)) == ids_of(wanted[3:])


def test_shards_do_not_draw_by_the_same_random_numbers(urls: list[str]) -> None:
    with connect(urls, batch_size=600) as rb:
        for url in urls:
            with expstore.connect(url) as one:
                one.extend(batch_of(1000))
        batch = rb.sample()
        rows = [batch["id"][batch["id"][:, 0] == shard, 1] for shard in range(3)]
        least = min(map(len, rows))
        assert (rows[0][:least] == rows[1][:least]).float().mean() < 0.1


def test_an_empty_shard_takes_part_as_soon_as_it_has_rows(urls: list[str]) -> None:
    with connect(urls, ahead=1) as rb:
        with pytest.raises(NotReadyError, match="none of the 3 shards"):
            rb.sample()
        for number, url in enumerate(urls):
            with expstore.connect(url) as one:
                one.extend(batch_of(50))
            for _ in range(2):  # the first draw asks the empty shards for their masses
                batch = rb.sample()
            assert set(batch["id"][:, 0].tolist()) == set(range(number + 1))


def test_fields_of_variable_length_are_joined(urls: list[str], folder: Path) -> None:
    names = [url.rpartition("/")[2] for url in urls]
    for name in names:
        schema = {"text": str, "n": "int64"}
        with expstore.open(folder / f"{name}words.exp", schema=schema, layout="arrow") as rb:
            rb.extend({"text": np.array([f"{name[-1]}{n}" * (n % 5) for n in range(40)]), "n": np.arange(40)})
    with connect([f"{url}words" for url in urls]) as rb:
        batch = rb.sample(as_numpy=True)
        shards, numbers = batch["id"][:, 0], batch["n"]
        assert batch["text"].tolist() == [f"{s}{n}" * (n % 5) for s, n in zip(shards, numbers, strict=True)]


def test_shares_of_shards_may_be_given(urls: list[str]) -> None:
    with connect(urls, by="member", p=[1, 1, 2], batch_size=4000) as rb:
        fill(rb)
        shares = np.bincount(rb.sample()["id"][:, 0].numpy()) / 4000
        np.testing.assert_allclose(shares, [0.25, 0.25, 0.5], atol=0.04)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["slices_without_replacement", "streaming_slices"])
def test_slices_are_drawn_once_by_member(urls: list[str], kind: str) -> None:
    name = f"once-{kind}"
    with connect(urls) as rb:
        rb.name_sampler(name, {"kind": kind, "slice_len": 4, "strict_length": False})
        for shard in rb.shards.values():
            for n in range(40):
                shard.extend(batch_of(3 if n % 4 == 0 else 8, 10 * n), source=f"actor-{n}")
    with connect(urls, sampler=name, by="member", ahead=2) as rb:
        batches = [rb.sample() for _ in range(4)]
        with pytest.raises(StateError, match="multiple of the length of slices, got 30 and 4"):
            rb.sample(30)
    slices = []
    for batch in batches:
        stops = (torch.nonzero(batch["next", "truncated"][:, 0])[:, 0] + 1).tolist()
        assert len(stops) == 8
        assert stops[-1] == len(batch)
        for start, stop in itertools.pairwise([0, *stops]):
            shards, actions = batch["id"][start:stop, 0].unique(), batch["action"][start:stop].tolist()
            assert len(shards) == 1
            assert len(actions) == (3 if actions[0] // 10 % 4 == 0 else 4)
            assert actions == list(range(actions[0], actions[0] + len(actions)))
            slices.append((int(shards), actions[0] // 10, actions[0]))
    drawn = [one[:2] if kind == "slices_without_replacement" else one for one in slices]
    assert len(set(drawn)) == len(drawn) == 32


def test_named_samplers_of_slices_need_their_length(urls: list[str]) -> None:
    with connect(urls) as rb:
        fill(rb)
        for kind in ("slices", "slices_without_replacement"):
            rb.name_sampler(f"four-{kind}", {"kind": kind, "num_slices": 4})
    for kind in ("slices", "slices_without_replacement"):
        with connect(urls, sampler=f"four-{kind}", by="member") as rb:
            with pytest.raises(StateError, match="has num_slices.* name one with slice_len"):
                rb.sample()


def test_arguments_are_checked(urls: list[str]) -> None:
    for places, options, match in (
        (urls, {"ahead": 0}, "ahead"),
        (urls, {"down": "never"}, "down"),
        (urls, {"by": "rows"}, "by must"),
        (urls, {"p": [1, 1, 1]}, "by="),
        (urls, {"by": "member", "p": [1]}, "3 numbers"),
        (urls, {"draw": 3, "seed": None}, "seed"),
        (urls, {"down": "wait", "wait": 3}, "without limit"),
        (urls, {"prefetch": 3}, "ahead="),
        ([urls[0], urls[1], urls[0]], {}, "same store"),
        ([], {}, "at least one"),
        (urls[0], {"down": "wait"}, "list of addresses"),
    ):
        with pytest.raises(ValueError, match=match):
            connect(places, **options)  # type: ignore[arg-type]
    with pytest.raises(NotFoundError, match="shard 1"):
        connect([urls[0], f"{urls[1]}x"])
    for options in ({"batch_size": None}, {"sampler": {"kind": "slices", "slice_len": 3}}):
        with connect(urls, **options) as rb, pytest.raises(StateError):
            rb.sample()
    with connect(urls) as rb:
        for act in (
            lambda: rb.snapshots,
            lambda: rb.groups,
            lambda: rb.selections,
            lambda: rb.consumers,
            lambda: rb.consumer("learner"),
        ):
            with pytest.raises(RemoteError) as caught:
                act()
            assert caught.value.kind == "local_only"


def test_different_fields_are_named(urls: list[str]) -> None:
    with expstore.connect(urls[0]) as one, expstore.connect(urls[1]) as other:
        one.extend({"x": np.zeros(50, np.float32)})
        other.extend({"x": np.zeros((50, 2), np.float32)})
    with connect(urls) as rb, pytest.raises(SchemaError, match="field 'x' of shard 0 is .* shard 1"):
        rb.sample()


def test_every_name_of_the_buffer_is_there() -> None:
    one, several = (
        {name for name in dir(cls) if not name.startswith("_")}
        for cls in (expstore.remote.RemoteReplayBuffer, expstore.cluster.ShardedReplayBuffer)
    )
    assert one - several == {"largest_priority"}


def test_few_sources_move_if_a_shard_is_added() -> None:
    shards = {number: Place(f"uuid-{number}") for number in range(5)}
    before = [choose_shard(f"actor-{n}", {k: shards[k] for k in range(4)}) for n in range(400)]
    after = [choose_shard(f"actor-{n}", shards) for n in range(400)]
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {4}
    assert 40 < len(moved) < 130
    assert min(np.bincount(before)) > 60


# -- shards that do not answer ---------------------------------------------------------------------


@pytest.fixture
def broken(server: Serving, urls: list[str]) -> Iterator[tuple[list[str], BreakableProxy]]:
    """Return addresses, the last of a proxy."""
    with BreakableProxy(server.port) as proxy:
        yield [*urls[:2], f"http://127.0.0.1:{proxy.port}/{urls[2].rpartition('/')[2]}"], proxy


@pytest.mark.slow
def test_a_shard_that_does_not_answer_is_named(broken: Any) -> None:
    urls, proxy = broken
    with connect(urls, wait=0.1, ahead=1) as rb:
        fill(rb)
        rb.sample()
        proxy.stop()
        with pytest.raises(RemoteError, match=r"shard 2 \(http.*does not answer"):
            list(rb.stream(3))
        proxy.resume()
        assert rb.sample()["id"].shape == (32, 2)


@pytest.mark.slow
def test_a_draw_waits_for_a_shard(broken: Any) -> None:
    urls, proxy = broken
    with connect(urls, down="wait", ahead=1) as rb:
        fill(rb)
        wanted = [rb.sample() for _ in range(3)]
        rb.load_state_dict(rb.state_dict() | {"draw": 0})
        proxy.stop()
        asked = proxy.connections
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(lambda: ids_of(rb.sample() for _ in range(3)))
            wait_until(lambda: proxy.connections > asked)
            assert not found.done()
            assert rb.shards[0].sql("SELECT 1 AS one").fetchall() == [(1,)]  # another shard answers
            proxy.resume()
            assert found.result(60) == ids_of(wanted)


@pytest.mark.slow
def test_priorities_of_a_shard_that_does_not_answer_are_not_waited_for(broken: Any) -> None:
    urls, proxy = broken
    with connect(urls, down="partial", wait=30.0) as rb:
        pairs = fill(rb)
        here = int((pairs[:, 0] != 2).sum())
        proxy.stop()
        assert rb.update_priority(id=pairs, priority=2.0) == here
        wait_until(lambda: rb.sample()["shards_missing"] == [2])
        assert rb.update_priority(id=pairs, priority=3.0) == here
        proxy.resume()
        wait_until(lambda: rb.shards_missing == ())
        assert rb.update_priority(id=pairs, priority=4.0) == len(pairs)


@pytest.mark.slow
def test_draws_go_without_a_shard_and_say_so(broken: Any) -> None:
    urls, proxy = broken
    with connect(urls, down="partial", ahead=1) as rb:
        fill(rb)
        assert rb.sample()["shards_missing"] == []
        proxy.stop()
        batches = [rb.sample() for _ in range(5)]
        assert [batch["shards_missing"] for batch in batches[1:]] == [[2]] * 4
        assert rb.shards_missing == (2,)
        assert set(batches[-1]["id"][:, 0].tolist()) == {0, 1}
        assert rb.sample(as_numpy=True)["shards_missing"] == [2]
        proxy.resume()
        wait_until(lambda: rb.shards_missing == ())
        assert rb.sample()["shards_missing"] == []
        for number in range(3):
            rb._shards.find(number).note_down(Draw(), 1)
        with pytest.raises(RemoteError, match="none of the 3 shards"):
            rb.sample()


@pytest.mark.slow
def test_a_forked_child_draws_although_its_parent_waits_for_a_shard(broken: Any) -> None:
    urls, proxy = broken
    with connect(urls) as rb:
        fill(rb)
        wanted = ids_of(rb.stream(10))
        rb.load_state_dict(rb.state_dict() | {"draw": 0})
        batches = rb.stream()
        next(batches)
        proxy.stop()
        next(batches)  # a thread draws the next ones, and waits
        with forked(lambda: ids_of([rb.sample() for _ in range(4)] + list(rb.stream(4)))) as drawn:
            proxy.resume()
            assert drawn() == wanted[2:]
        assert ids_of(next(batches) for _ in range(8)) == wanted[2:]


@pytest.mark.slow
def test_a_forked_child_asks_shards_that_did_not_answer(broken: Any) -> None:
    urls, proxy = broken

    def wait_for_shards() -> tuple[int, ...]:
        wait_until(lambda: rb.sample()["shards_missing"] == [])
        return rb.shards_missing

    with connect(urls, down="partial", ahead=1) as rb:
        fill(rb)
        proxy.stop()
        wait_until(lambda: rb.sample()["shards_missing"] == [2])
        with forked(wait_for_shards) as missing:
            proxy.resume()
            assert missing() == ()


@pytest.mark.guarantee("cluster/draws")
@pytest.mark.slow
def test_a_version_of_all_shards_is_restored(urls: list[str], tmp_path: Path) -> None:
    def actions_of(count: int) -> list[list[int]]:
        return [rb.sample()["action"].tolist() for _ in range(count)]

    with connect(urls, sampler={"kind": "prioritized"}) as rb:
        pairs = fill(rb)
        rb.update_priority(id=pairs, priority=torch.arange(1.0, 121.0))
        actions_of(6)
        version = rb.dumps(tmp_path / "versions")
        assert version.rows == [int((pairs[:, 0] == shard).sum()) for shard in range(3)]
        wanted = actions_of(5)
        rb.extend(batch_of(50, 900), source="late")
        rb.dumps(tmp_path / "later")
        assert rb.loads(tmp_path / "versions") == version
        assert len(rb) == 120
        assert actions_of(5) == wanted
        with pytest.raises(SnapshotError, match="CLUSTER.json"):
            rb.loads(tmp_path)
    with connect(urls[::-1]) as rb, pytest.raises(SnapshotError, match="same order"):
        rb.loads(tmp_path / "versions")
    with connect(urls, seed=9) as rb:
        rb.sample()
        rb.loads(tmp_path / "later")
        assert (len(rb), rb.draw) == (170, 1)
    file = tmp_path / "later" / "CLUSTER.json"
    for text in ("{", "{}", '{"format": 2}'):
        file.write_text(text)
        with connect(urls) as rb, pytest.raises(SnapshotError, match="CLUSTER.json"):
            rb.loads(tmp_path / "later")


def test_another_store_under_the_name_of_a_shard_is_refused(tmp_path: Path) -> None:
    for shard in range(2):
        expstore.open(tmp_path / f"run{shard}.exp", mode="x").close()
    settings = Settings(path=tmp_path)
    with Serving(settings) as server:
        rb = connect([f"{server.url}/run{shard}" for shard in range(2)], ahead=1)
        fill(rb)
        rb.sample()
        with expstore.connect(f"{server.url}/run1"):
            rb.close()
    (tmp_path / "run1.exp").rename(tmp_path / "former")
    expstore.open(tmp_path / "run1.exp", mode="x").close()
    state = pickle.dumps(rb)
    with Serving(settings) as server:
        again = pickle.loads(state)
        for shard in again._shards.all:
            for connection in shard._reach.connections:
                connection._closed = False
                connection.address = type(connection.address)(server.url, connection.address.name)
        with pytest.raises(StateError, match="shard 1.*is for"):
            again.sample()
        with pytest.raises(StateError, match="shard 1.*is for"):
            again._shards.find(1).call(lambda buffer: buffer.extend(batch_of(3)))
        again.close()


@pytest.mark.slow
def test_episodes_are_resumed_by_another_buffer(urls: list[str]) -> None:
    with connect(urls) as rb:
        rb.extend(batch_of(5), source="actor")
        assert rb.episodes("status = 'open'").shape[0] == 1
    with connect(urls) as rb:
        (pair,) = rb.episodes.resume("actor").tolist()
        rb.extend(batch_of(5, 5), source="actor")
        assert rb.trajectory(tuple(pair))["action"].tolist() == list(range(10))
        rb.extend(batch_of(5), source="actor")
        rb.episodes.end("actor")
        rb.episodes.end()
        assert rb.episodes("status = 'open'").shape[0] == 0
        first = rb._route("actor").number
    others = [url for number, url in enumerate(urls) if number != first]
    with connect(others) as rb:  # the list of shards was a different one
        rb.extend(batch_of(5), source="actor")
    with connect([*others, urls[first]]) as rb:
        assert rb._route("actor").number == 2
        (pair,) = rb.episodes.resume("actor").tolist()
        assert pair[0] != 2
        rb.extend(batch_of(5, 5), source="actor")
        assert rb.trajectory(tuple(pair))["action"].tolist() == list(range(10))


def test_rows_are_tensordicts(urls: list[str]) -> None:
    with connect(urls) as rb:
        fill(rb)
        assert isinstance(rb.sample(), TensorDict)
        assert rb.schema is not None
        assert rb.meta == {0: {}, 1: {}, 2: {}}
        rb.flush()
        assert len(rb.stats()["shards"]) == len(rb.shards) == 3
        assert "ShardedReplayBuffer" in repr(rb)
