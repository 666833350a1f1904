"""Shards are added, retired, moved and removed while clients are connected."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore.cluster.buffer import ShardedReplayBuffer
from expstore.cluster.members import ClusterFile, FileMembers, MemberList, ShardEntry
from expstore.cluster.routing import Place, choose_shard, find_earlier_shards
from expstore.errors import NotFoundError, QueryError, RemoteError, StateError
from expstore.remote import Retries
from expstore.remote.connect_options import ConnectOptions
from tests.support.arrow_bodies import batch_of
from tests.support.servers import Serving
from tests.support.tcp_proxy import BreakableProxy
from tests.support.waits import wait_until

SOON = Retries(seconds=60, first=0.01, longest=0.05, seed=3)


class Cluster:
    """Stores of one server, of which some are the shards of a cluster file."""

    def __init__(self, path: Path, root: str, stores: list[tuple[str, str]]) -> None:
        self.path, self.root, self._left = path, root, stores[2:]
        ClusterFile.create(path, stores[:2])

    def connect(self, **options: Any) -> ShardedReplayBuffer:
        options = {"batch_size": 32, "seed": 5, "retries": SOON, "ahead": 1} | options
        return expstore.connect(self.path, **options)

    def add(self) -> int:
        """Add a store; return its number."""
        url, store = self._left.pop(0)
        return ClusterFile.change(self.path, lambda known: known.add(url, store)).list.members[-1].number

    def retire(self, number: int) -> None:
        ClusterFile.change(self.path, lambda known: known.retire(number))

    def remove(self, number: int) -> None:
        ClusterFile.change(self.path, lambda known: known.remove(number))

    def move(self, number: int, url: str, store: str | None) -> None:
        ClusterFile.change(self.path, lambda known: known.move(number, url, str(store)))

    def member(self, number: int) -> ShardEntry:
        return ClusterFile.load(self.path).find(number)


@pytest.fixture
def cluster(server: Serving, folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Cluster:
    """Return a cluster of two shards, and two more stores."""
    name = "".join(letter for letter in request.node.name if letter.isalnum())[:60]
    stores = []
    for shard in range(4):
        with expstore.open(folder / f"{name}{shard}.exp", mode="x", seed=shard) as rb:
            stores.append((f"{server.url}/{name}{shard}", rb.storage.description.uuid))
    return Cluster(tmp_path / "cluster.json", server.url, stores)


@pytest.mark.slow
def test_draws_begin_without_a_shard_that_does_not_answer(cluster: Cluster) -> None:
    """A cluster file says which store is missing, so the others need not wait for it."""
    with cluster.connect() as rb:
        pairs = torch.cat([rb.extend(batch_of(10, 10 * n), source=f"actor-{n}") for n in range(20)])
        assert set(pairs[:, 0].tolist()) == {0, 1}
    known = [cluster.member(number) for number in (0, 1)]
    cluster.move(1, "http://127.0.0.1:9/gone", known[1].uuid)
    quick = {"wait": 0.1, "retries": None}
    with pytest.raises(RemoteError, match=r"shard 1 \(.*:9/gone\)"):
        cluster.connect(**quick)
    with cluster.connect(down="partial", **quick) as rb:
        batch = rb.sample()
        assert batch["shards_missing"] == [1]
        assert set(batch["id"][:, 0].tolist()) == {0}
        cluster.move(1, known[1].url, known[1].uuid)
        wait_until(lambda: not rb.shards_missing and set(rb.sample()["id"][:, 0].tolist()) == {0, 1})
    for number in (0, 1):
        cluster.move(number, f"http://127.0.0.1:9/gone{number}", known[number].uuid)
    with pytest.raises(RemoteError, match="none of the 2 shards answers"):
        cluster.connect(down="partial", **quick)
    with pytest.raises(RemoteError, match="shard 1"):  # nothing says which store is there
        expstore.connect([known[0].url, "http://127.0.0.1:9/gone"], down="partial", wait=0.1)


class Late:
    """Members that show an old list until they are told to look."""

    named = True

    def __init__(self, path: Path) -> None:
        self._members = FileMembers(path)
        self._list = self._members.read()

    def read(self) -> MemberList:
        return self._list

    def look(self) -> None:
        self._list = self._members.read()


def name_of(shard: int, shards: dict[int, str], taken: set[str]) -> str:
    """Return the name of a source that goes to a shard, and is not taken yet."""
    places = {number: Place(uuid) for number, uuid in shards.items()}
    names = (f"actor-{n}" for n in range(1000))
    found = next(name for name in names if name not in taken and choose_shard(name, places) == shard)
    taken.add(found)
    return found


def shards_of(rb: ShardedReplayBuffer) -> dict[int, str]:
    return {number: shard.uuid for number, shard in rb._shards.by_number.items()}


def test_a_new_shard_gets_new_sources_and_is_sampled(cluster: Cluster) -> None:
    with cluster.connect() as rb, cluster.connect() as other:
        old = {f"actor-{n}": rb.extend(batch_of(10, 10 * n), source=f"actor-{n}") for n in range(12)}
        before = set(rb.sample()["id"][:, 0].tolist())
        assert before == {0, 1}
        number = cluster.add()
        rb.sample()  # takes the new list up; the shard is empty
        assert list(rb.shards) == [0, 1, number]
        for source, ids in old.items():
            assert rb.extend(batch_of(3), source=source)[0, 0] == ids[0, 0]
        taken = set(old)
        new = name_of(number, shards_of(rb), taken)
        ids = rb.extend(batch_of(200, 1000), source=new)
        assert set(ids[:, 0].tolist()) == {number}
        for _ in range(2):  # the first draw asks the shard for its mass
            batch = rb.sample(2000)
        share = (batch["id"][:, 0] == number).float().mean()
        assert abs(share - 200 / len(rb)) < 0.06
        assert (rb.by_id(batch["id"])["action"] == batch["action"]).all()
        # a client that has not looked at the list reads rows of the shard all the same
        assert other.by_id(ids)["action"].tolist() == list(range(1000, 1200))
        assert other.extend(batch_of(2), source=new)[0, 0] == number


def test_a_shard_that_was_added_changes_no_batch_before_it_has_rows(cluster: Cluster) -> None:
    def ids_of(count: int) -> list[Any]:
        return [rb.sample()["id"].tolist() for _ in range(count)]

    with cluster.connect() as rb:
        for n in range(12):
            rb.extend(batch_of(10, 10 * n), source=f"actor-{n}")
        wanted = ids_of(6)
        rb.load_state_dict(rb.state_dict() | {"draw": 0})
        assert ids_of(3) == wanted[:3]
        state = rb.state_dict()
        cluster.add()
        assert ids_of(3) == wanted[3:]
    with cluster.connect() as rb:  # a state from before the shard was added
        rb.load_state_dict(state)
        assert ids_of(3) == wanted[3:]


def episodes_of(rb: ShardedReplayBuffer) -> dict[int, set[tuple[int, int]]]:
    """Return the shard and id of each episode of which a row is stored, by the number that its rows have."""
    rows = rb.sql_each("SELECT action // 10 AS number, _episode FROM transitions").fetchall()
    found: dict[int, set[tuple[int, int]]] = {}
    for number, episode, shard in rows:
        found.setdefault(number, set()).add((shard, episode))
    return found


@pytest.mark.slow
def test_a_shard_without_rows_adds_none_to_a_query(cluster: Cluster) -> None:
    query = "SELECT action FROM transitions"
    with cluster.connect() as rb:
        with pytest.raises(QueryError, match="no column action"):
            rb.sql_each(query)
        rb.extend(batch_of(3), source=name_of(0, shards_of(rb), set()))
        assert rb.sql_each(query).fetchall() == [(0, 0), (1, 0), (2, 0)]
        assert rb.sql_each("SELECT count(*) AS n FROM transitions").fetchall() == [(3, 0), (0, 1)]
        with pytest.raises(QueryError, match=r"shard 0 .* no column actoin"):
            rb.sql_each("SELECT actoin FROM transitions")


@pytest.mark.guarantee(
    "cluster/episodes",
    "No episode is divided among shards while shards are added, moved and retired.",
)
@pytest.mark.slow
def test_no_episode_is_divided_although_a_client_is_late(cluster: Cluster) -> None:
    """Two clients write parts of episodes, also of each other's sources, while shards come and go."""
    rng = np.random.default_rng(7)
    late = Late(cluster.path)
    late_rb = ShardedReplayBuffer(late, ConnectOptions(batch_size=32, seed=1), retries=SOON)
    with cluster.connect() as rb, late_rb:
        clients = [rb, late_rb]
        grown, taken = shards_of(rb) | {2: cluster._left[0][1]}, set[str]()
        names = [name_of(number % 3, grown, taken) for number in range(10)]
        open_steps: dict[tuple[int, str], tuple[int, int]] = {}
        numbers = iter(range(10_000))

        def write(count: int) -> None:
            """Write the next part of some episode, each of 10 steps."""
            for _ in range(count):
                key = int(rng.integers(2)), names[rng.integers(10)]
                number, step = open_steps.pop(key, (-1, 0))
                number = next(numbers) if number < 0 else number
                size = int(rng.integers(1, 11 - step))
                clients[key[0]].extend(batch_of(size, 10 * number + step), source=key[1])
                if step + size < 10:
                    open_steps[key] = number, step + size

        write(40)
        cluster.add()
        rb.sample()
        write(40)  # one client knows the new shard, the other does not
        assert len(late_rb.shards) == 2
        late.look()
        late_rb.sample()
        assert len(late_rb.shards) == 3
        write(40)
        cluster.retire(0)
        rb.sample()
        write(40)
        late.look()
        late_rb.sample()
        write(60)
        found = episodes_of(rb)
        assert len(found) > 30
        assert all(len(places) == 1 for places in found.values())


@pytest.mark.guarantee("cluster/episodes")
def test_a_source_follows_its_open_episode_to_another_client(cluster: Cluster) -> None:
    with cluster.connect() as rb:
        shards = shards_of(rb)
        grown = shards | {2: cluster._left[0][1]}
        places = {number: Place(uuid) for number, uuid in grown.items()}
        # a source that would go to the new shard, if it had no open episode
        names = (f"actor-{n}" for n in range(1000))
        moved = [name for name in names if choose_shard(name, places) == 2][:3]
        homes = [int(rb.extend(batch_of(5), source=name)[0, 0]) for name in moved]
        rb.extend(batch_of(5, 5), source=moved[2])  # its episode has ended
        cluster.add()
        with cluster.connect() as other:
            assert [int(other.extend(batch_of(5), source=name)[0, 0]) for name in moved] == [*homes[:2], 2]
            assert rb.episodes.find_open(moved[0])[:, 0].tolist() == [homes[0]] * 2


@pytest.mark.guarantee("cluster/episodes")
@pytest.mark.slow
def test_a_retired_shard_gives_its_sources_away_as_their_episodes_end(cluster: Cluster) -> None:
    with cluster.connect() as rb:
        shards, taken = shards_of(rb), set[str]()
        held, ended = name_of(0, shards, taken), name_of(0, shards, taken)
        rb.extend(batch_of(5), source=held)
        rb.extend(batch_of(10), source=ended)
        cluster.retire(0)
        rb.sample()
        assert rb.extend(batch_of(3, 5), source=held)[0, 0] == 0  # the episode is still open
        assert rb.extend(batch_of(5), source=ended)[0, 0] == 1
        assert rb.extend(batch_of(5), source=name_of(0, shards, taken))[0, 0] == 1
        assert rb.extend(batch_of(2, 8), source=held)[0, 0] == 0
        assert rb.extend(batch_of(5), source=held)[0, 0] == 1
        assert rb.extend(batch_of(5, 5), source=ended)[0, 0] == 1
        for _ in range(2):  # the first draw asks for the masses
            batch = rb.sample(200)
        assert set(batch["id"][:, 0].tolist()) == {0, 1}  # it is still sampled
        cluster.remove(0)
        assert set(rb.sample(200)["id"][:, 0].tolist()) == {1}
        with pytest.raises(NotFoundError, match="no shard 0; there are 1"):
            rb.by_id([(0, 1)])
        assert cluster.add() == 2
        rb.sample()
        assert list(rb.shards) == [1, 2]
        assert list(rb.meta) == list(rb.stats()["shards"]) == [1, 2]
        assert set(rb.sql_each("SELECT 1 AS one").fetchall()) == {(1, 1), (1, 2)}


def test_an_unnamed_source_leaves_a_retired_shard_after_its_episode(cluster: Cluster) -> None:
    with cluster.connect() as rb:
        home = int(rb.extend(batch_of(5))[0, 0])
        cluster.add()
        cluster.retire(home)
        rb.sample()
        assert rb.extend(batch_of(5, 5))[0, 0] == home
        assert rb.extend(batch_of(5))[0, 0] != home


def test_copies_take_new_lists_up(cluster: Cluster) -> None:
    with cluster.connect() as rb:
        rb.extend(batch_of(50), source="actor")
        text = pickle.dumps(rb)
        cluster.add()
        with pickle.loads(text) as copied:
            copied.sample()
            assert list(copied.shards) == [0, 1, 2]


def test_lists_that_contradict_are_refused(cluster: Cluster) -> None:
    late = Late(cluster.path)
    with ShardedReplayBuffer(late, ConnectOptions(batch_size=8), retries=SOON) as rb:
        rb.extend(batch_of(50), source="actor")
        members = late._list.members
        late._list = MemberList(2, (members[0], ShardEntry(1, members[1].url, "other", accepts=True)))
        with pytest.raises(StateError, match="shard 1 is store .* and the new list has store other"):
            rb.sample()
    with cluster.connect(by="member", p=[1, 1]) as rb:
        rb.extend(batch_of(50), source="a")
        cluster.add()
        with pytest.raises(StateError, match="shares of 2 shards, and there are 3"):
            rb.sample()
    facts = cluster.path.read_text().replace(cluster.member(0).uuid or "", "0" * 32)
    other = cluster.path.with_name("other.json")
    other.write_text(facts)
    with pytest.raises(StateError, match="shard 0"):
        expstore.connect(str(other))


def test_the_earlier_shards_of_a_source_are_all_found() -> None:
    rng = np.random.default_rng(3)
    for trial in range(300):
        shards: dict[int, Place] = {}
        homes = set()
        for _ in range(int(rng.integers(1, 12))):
            accepting = [number for number, place in shards.items() if place.accepts]
            if len(accepting) < 2 or rng.random() < 0.6:
                shards[len(shards)] = Place(f"uuid-{trial}-{len(shards)}")
            else:
                number = int(rng.choice(accepting))
                shards[number] = shards[number]._replace(accepts=False)
            homes.add(choose_shard("actor", shards))
        found = find_earlier_shards("actor", shards)
        assert homes <= set(found)
        assert next(number for number in found if shards[number].accepts) == choose_shard("actor", shards)


# -- shards that do not answer ---------------------------------------------------------------------


@pytest.fixture
def broken(cluster: Cluster, server: Serving) -> Iterator[BreakableProxy]:
    """A proxy in front of shard 1."""
    member = cluster.member(1)
    with BreakableProxy(server.port) as proxy:
        cluster.move(1, f"http://127.0.0.1:{proxy.port}/{member.url.rpartition('/')[2]}", member.uuid)
        yield proxy


@pytest.mark.slow
def test_priorities_of_a_shard_that_was_removed_are_skipped(cluster: Cluster, broken: BreakableProxy) -> None:
    with cluster.connect(down="wait") as rb, ThreadPoolExecutor(1) as pool:
        shards, taken = shards_of(rb), set[str]()
        pairs = torch.cat([rb.extend(batch_of(50), source=name_of(k, shards, taken)) for k in (0, 1)])
        broken.stop()
        number = broken.connections
        waits = pool.submit(rb.update_priority, id=pairs, priority=2.0)
        wait_until(lambda: broken.connections > number)
        cluster.retire(1)
        cluster.remove(1)
        assert waits.result(60) == 50
        assert rb.update_priority(id=pairs, priority=3.0) == 50
        assert rb.shards[0].sql("SELECT DISTINCT _priority FROM transitions").fetchall() == [(3.0,)]
        with pytest.raises(NotFoundError, match="no shard 1"):
            rb.by_id(pairs)


@pytest.mark.guarantee("cluster/episodes")
@pytest.mark.slow
def test_requests_follow_a_shard_that_moves(
    cluster: Cluster, server: Serving, broken: BreakableProxy
) -> None:
    with cluster.connect(down="wait") as rb, ThreadPoolExecutor(2) as pool:
        source = name_of(1, shards_of(rb), set())
        rb.extend(batch_of(5), source=source)
        rb.sample()
        broken.stop()
        drawn, written = pool.submit(rb.sample), pool.submit(rb.extend, batch_of(5, 5), source=source)
        assert not (drawn.done() and written.done())
        member = cluster.member(1)
        cluster.move(1, member.url.replace(f":{broken.port}/", f":{server.port}/"), member.uuid)
        assert written.result(60)[:, 0].tolist() == [1] * 5
        assert drawn.result(60)["id"].shape == (32, 2)
        assert rb.sql_each("SELECT count(DISTINCT _episode) FROM transitions").fetchall()[1] == (1, 1)


@pytest.mark.guarantee("cluster/episodes")
@pytest.mark.slow
def test_requests_do_not_wait_for_a_shard_that_was_removed(cluster: Cluster, broken: BreakableProxy) -> None:
    with cluster.connect(down="wait") as rb, ThreadPoolExecutor(2) as pool:
        shards, taken = shards_of(rb), set[str]()
        source = name_of(1, shards, taken)
        rb.extend(batch_of(50), source=name_of(0, shards, taken))
        rb.extend(batch_of(55), source=source)
        rb.sample()
        broken.stop()
        drawn, written = pool.submit(rb.sample), pool.submit(rb.extend, batch_of(5), source=source)
        cluster.retire(1)
        cluster.remove(1)
        assert set(drawn.result(60)["id"][:, 0].tolist()) == {0}
        with pytest.raises(StateError, match="shard 1 .* was removed from the cluster"):
            written.result(60)
        assert rb.extend(batch_of(5), source=source)[0, 0] == 0
        wait_until(lambda: rb.shards_missing == ())
