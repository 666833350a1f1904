"""Rows evicted from a ring go to its archive: each once, unchanged, through any events."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import expstore
from expstore import SchemaError, StateError, StorageError, TensorDictMaxValueWriter
from expstore.cli.app import run
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.maintenance import verify
from expstore.sql.sandbox.pool import SqlLimits, SqlWorker
from expstore.storages import base
from expstore.storages.engine.archive import Archive
from expstore.storages.format.manifest import Manifest
from tests.support.forks import in_child
from tests.support.tuned import set_spare_slots

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("checked_locks")]

CAPACITY, SPARE = 60, 24
KINDS = ("flat", "packed", "arrow", "texts")


def rows(ids: np.ndarray, versions: np.ndarray, kind: str) -> TensorDict:
    """Return rows that follow from their ids, and from how often they were changed."""
    i, v = torch.from_numpy(ids), torch.from_numpy(versions)
    frames = ((i[:, None] * 7 + torch.arange(1200)) % 251 + v[:, None]).to(torch.uint8)
    following = ((i[:, None] * 7 + 7 + torch.arange(1200)) % 251 + v[:, None]).to(torch.uint8)
    found = TensorDict(
        {
            "observation": torch.stack([i, v, i * 3], 1).float(),
            "frame": frames,
            "next": {"frame": following, "reward": i[:, None].float(), "done": (i % 10 == 9)[:, None]},
        },
        [len(ids)],
    )
    if kind == "texts":
        found["text"] = NonTensorStack(*(f"row {n}" * (n % 3) for n in ids.tolist()))
    return found


def options(kind: str) -> dict[str, Any]:
    """Return what makes a store of a kind."""
    return {
        "flat": {"layout": "flat"},
        "packed": {"layout": {"columns": "auto", "fields": {"frame": {"layout": "packed", "rows": 4}}}},
        "arrow": {"layout": "arrow"},
        "texts": {"layout": {"kind": "arrow", "compression": "lz4"}},
    }[kind]


@pytest.fixture(autouse=True)
def short_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a ring have few spare slots, so that they are needed all the time."""
    monkeypatch.setattr(tuning, "SPARE_SLOTS", SPARE)
    monkeypatch.setattr(tuning, "PACKED_LOOKBACK_ROWS", (4, 8))


class World:
    """A ring with an archive, and what must be in them."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.path, self.archive, self.kind = folder / "run.exp", folder / "archive.exp", kind
        self.versions: dict[int, int] = {}  # of the rows that must be there, by id
        self.last = self.low = 0

    def open(self) -> Any:
        return expstore.open(
            self.path, capacity=CAPACITY, archive=self.archive, batch_size=4, seed=1, **options(self.kind)
        )

    def extend(self, rb: Any, count: int) -> None:
        """Add rows."""
        ids = np.arange(self.last + 1, self.last + count + 1)
        given = rb.extend(rows(ids, np.zeros_like(ids), self.kind), return_ids=True)
        assert np.array_equal(given.numpy(), ids)
        self.versions |= dict.fromkeys(ids.tolist(), 0)
        self.last += count
        self.low = max(self.low, self.last - CAPACITY)

    def change(self, rb: Any, ids: np.ndarray) -> None:
        """Change rows in place."""
        if self.kind == "flat" and ids.size:
            for i in ids.tolist():
                self.versions[i] += 1
            versions = np.array([self.versions[i] for i in ids.tolist()])
            rb[torch.from_numpy((ids - 1) % CAPACITY)] = rows(ids, versions, self.kind)

    def empty(self, rb: Any) -> None:
        """Delete the rows of the ring."""
        if self.last > self.low:
            rb.empty()
            for i in range(self.low + 1, self.last + 1):
                self.versions.pop(i, None)
            self.low = self.last = -(-self.last // CAPACITY) * CAPACITY

    def check(self, rb: Any) -> None:
        """Hold all rows against what must be there."""
        found = rb.sql("SELECT * FROM history ORDER BY _id").arrow()
        ids = np.array(sorted(self.versions))
        assert np.array_equal(found["_id"].to_numpy(), ids)
        assert np.array_equal(found["_archived"].to_numpy(), ids <= self.low)
        if not ids.size:
            return
        wanted = rows(ids, np.array([self.versions[i] for i in ids.tolist()]), self.kind)
        for name in ("observation", "frame"):
            visible = np.array(found[name].combine_chunks().flatten()).reshape(ids.size, -1)
            assert np.array_equal(visible, wanted[name].numpy()), name
        following = found["next"].combine_chunks()
        frames = np.array(following.field("frame").flatten()).reshape(ids.size, -1)
        assert np.array_equal(frames, wanted["next", "frame"].numpy())
        assert np.array_equal(np.array(following.field("reward")), ids)
        if self.kind == "texts":
            assert found["text"].to_pylist() == list(wanted["text"])
        assert rb.sql("SELECT count(*) FROM history JOIN episodes ON _episode = episode_id").fetchall() == [
            (ids.size,)
        ]

    def steps(self, chance: random.Random) -> Iterator[Callable[[Any], None]]:
        """Yield things to do."""
        while True:
            what = chance.random()
            if what < 0.6:
                count = chance.choice([1, 1, 3, 8, 20, 25, chance.randint(1, 59), chance.randint(60, 700)])
                yield lambda rb, count=count: self.extend(rb, count)
            elif what < 0.75:
                wanted = [chance.randint(self.low + 1, max(self.low + 1, self.last)) for _ in range(9)]
                ids = np.unique([i for i in wanted if i <= self.last])
                yield lambda rb, ids=ids: self.change(rb, ids)
            elif what < 0.8:
                yield self.empty
            elif what < 0.9:
                yield copy_left
            else:
                yield lambda rb: rb.flush()


def copy_left(rb: Any) -> None:
    """Bring what has left to the archive."""
    if not isinstance(rb, Onlooker):
        rb.storage.engine.archive_left()


class Onlooker:
    """Stand for a store in the parent of who writes to it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.storage = self

    def extend(self, batch: TensorDict, return_ids: bool) -> torch.Tensor:
        return torch.arange(self._world.last + 1, self._world.last + len(batch) + 1)

    def __setitem__(self, index: torch.Tensor, batch: TensorDict) -> None: ...

    def empty(self) -> None: ...

    def flush(self) -> None: ...


def live(world: World, chance: random.Random, *, killed: bool, onlooker: bool = False) -> None:
    """Open the store, do some things, and leave it, or close it."""
    rb = Onlooker(world) if onlooker else world.open()
    if not onlooker:
        world.check(rb)
    for _, act in zip(range(chance.randint(2, 8)), world.steps(chance), strict=False):
        act(rb)
    if not killed:
        world.check(rb)
        rb.close()


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.torture)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_found_once(tmp_path: Path, kind: str, seed: int) -> None:
    """Of extends of 1 to 700 rows, changes, deletes, reopenings and kills, each with what comes before it."""
    find_all(tmp_path, kind, seed, lives=6)


@pytest.mark.torture
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
def test_every_row_is_found_once_in_long_lives(
    tmp_path: Path, kind: str, long_seed: int, count_cases: Callable[..., None]
) -> None:
    for number in range(20):
        count_cases()
        (tmp_path / str(number)).mkdir()
        find_all(tmp_path / str(number), kind, 1000 * long_seed + number, lives=12)


def find_all(folder: Path, kind: str, seed: int, *, lives: int) -> None:
    """Live several lives of a ring with an archive, some of which are killed, and look for all rows."""
    chance, world = random.Random(seed), World(folder, kind)
    for _ in range(lives):
        killed = chance.random() < 0.5
        if killed:
            twin = copy.deepcopy((world, chance))
            in_child(lambda twin=twin: live(*twin, killed=True))
        live(world, chance, killed=killed, onlooker=killed)
    with world.open() as rb:
        world.check(rb)
        with expstore.open(world.path, mode="r") as follower:
            world.check(follower)
    assert verify(world.path) == []
    assert verify(world.archive) == []


def filled(path: Path, count: int, *, kind: str = "flat", step: int = 20, **more: Any) -> Any:
    """Make a ring, and give it rows."""
    rb = expstore.open(path, capacity=CAPACITY, batch_size=4, seed=1, **options(kind), **more)
    more_rows(rb, 1, count, kind=kind, step=step)
    return rb


def more_rows(rb: Any, first: int, count: int, *, kind: str = "flat", step: int = 20) -> None:
    """Add the rows with these ids."""
    for start in range(first, first + count, step):
        ids = np.arange(start, min(start + step, first + count))
        rb.extend(rows(ids, np.zeros_like(ids), kind))


def ids_in(rb: Any, relation: str = "history") -> list[int]:
    """Return the ids of all rows of a relation."""
    return [i for (i,) in rb.sql(f"SELECT _id FROM {relation} ORDER BY 1").fetchall()]


def test_an_archive_is_a_store(tmp_path: Path) -> None:
    """It has the episodes of the ring under their ids, and gives slices of them."""
    with filled(tmp_path / "run.exp", 400, archive=tmp_path / "old.exp") as rb:
        assert rb.stats()["archived_through"] <= 340
        own = rb.sql("SELECT episode_id, length, status, return FROM episodes ORDER BY 1").fetchall()
    with expstore.open(tmp_path / "old.exp", mode="r") as old:
        assert [i + 1 for i in old[:]["archived", "id"].tolist()] == list(range(2, 342))
        found = old.sql("SELECT episode_id, length, status, return FROM episodes ORDER BY 1").fetchall()
        assert found[:-1] == own[: len(found) - 1]
        assert found[-1][2] == "open"
        sampler = expstore.samplers.SliceSampler(slice_len=5)
        old.set_sampler(sampler)
        drawn = old.sample(20)["archived", "id"].reshape(-1, 5)
        assert (drawn.diff(dim=1) == 1).all()


@pytest.mark.slow
def test_rows_stay_in_the_ring_until_they_are_on_the_archives_disk(tmp_path: Path) -> None:
    with filled(tmp_path / "run.exp", 300, archive=tmp_path / "old.exp", step=10) as rb:
        storage = rb.storage
        for start in range(301, 500, 3):
            more_rows(rb, start, 3)
            assert storage.engine.archive.archive.settled >= storage.state.horizon - storage.geometry.depth
            assert ids_in(rb) == list(range(1, start + 3))


def test_a_reader_next_to_the_writer_sees_both(tmp_path: Path) -> None:
    with filled(tmp_path / "run.exp", 130, archive=tmp_path / "old.exp") as rb:
        with expstore.open(tmp_path / "run.exp", mode="r") as follower:
            for first in (131, 250, 400):
                more_rows(rb, first, 100 if first > 131 else 119)
                last = rb.storage.last
                rb.storage.drain()
                assert ids_in(follower) == list(range(1, last + 1))
                assert ids_in(follower, "transitions") == list(range(last - CAPACITY + 1, last + 1))


def test_a_query_reads_only_what_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with filled(tmp_path / "run.exp", 300, kind="packed", archive=tmp_path / "old.exp") as rb:
        rb.storage.engine.archive_left()
        read: list[int] = []
        own = base.Storage.read

        def noted(storage: Any, ids: np.ndarray, places: Any = None) -> Any:
            read.extend(list(places) if storage.require_schema().place_of(("frame",)) in places else [])
            return own(storage, ids, places)

        monkeypatch.setattr(base.Storage, "read", noted)
        assert rb.sql("SELECT sum(next.reward), count(*) FROM history").fetchall() == [(45150.0, 300)]
        assert rb.sql("SELECT max(_index), count(_priority) FROM history").fetchall() == [(59, 60)]
        assert not read
        rb.sql("SELECT frame FROM history")
        assert read


@pytest.mark.slow
def test_deleted_and_replaced_rows_are_not_archived(tmp_path: Path) -> None:
    with filled(tmp_path / "run.exp", 150, archive=tmp_path / "old.exp") as rb:
        rb.snapshots.tag("before")
        rb.empty()
        assert ids_in(rb) == list(range(1, 91))
        more_rows(rb, 181, 70)
        assert ids_in(rb) == [*range(1, 91), *range(181, 251)]
        rb.loads(tmp_path / "run.exp", "before")
        ids = ids_in(rb)
        assert ids[:100] == [*range(1, 91), *range(181, 191)]
        assert len(ids) == 160
        with expstore.open(tmp_path / "run.exp", version="before") as version:
            with pytest.raises(expstore.QueryError, match="history"):
                ids_in(version)
            assert len(version) == CAPACITY


def test_another_capacity_sends_rows_there(tmp_path: Path) -> None:
    filled(tmp_path / "run.exp", 150, archive=tmp_path / "old.exp").close()
    expstore.resize(tmp_path / "run.exp", capacity=25)
    with expstore.open(tmp_path / "run.exp") as rb:
        assert ids_in(rb) == list(range(1, 151))
        assert ids_in(rb, "transitions") == list(range(126, 151))
    with pytest.raises(StateError, match="requires a capacity: otherwise no row leaves"):
        expstore.resize(tmp_path / "run.exp", capacity=None)


@pytest.mark.slow
def test_it_can_be_moved_and_left(tmp_path: Path) -> None:
    path, old, new = tmp_path / "run.exp", tmp_path / "old.exp", tmp_path / "deep" / "new.exp"
    filled(path, 150, archive=old).close()
    new.parent.mkdir()
    old.rename(new)
    with pytest.raises(StateError, match="is not at"):
        expstore.open(path)
    with pytest.raises(StateError, match="is not at"):
        expstore.open(path, archive=tmp_path / "other.exp")
    with expstore.open(path, archive=new) as rb:
        more_rows(rb, 151, 50)
    with expstore.open(path) as rb:
        assert ids_in(rb) == list(range(1, 201))
    with expstore.open(path, archive=False) as rb:
        assert Manifest.load(Disk(), path).archive == ""
        more_rows(rb, 201, 200)
    with expstore.open(path, archive=new) as rb:  # what left in between is gone, but for spare slots
        more_rows(rb, 401, 100)
        found = ids_in(rb)
        assert found[:140] == list(range(1, 141))
        assert found[-160:] == list(range(341, 501))
        assert len(set(found)) == len(found)


def test_rows_that_had_left_before_do_not_come(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    filled(path, 150).close()
    with expstore.open(path, archive=tmp_path / "old.exp") as rb:
        more_rows(rb, 151, 100)
        assert ids_in(rb) == list(range(91, 251))


def test_a_long_batch_passes_through_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.exp"
    with filled(path, 100, archive=tmp_path / "old.exp") as rb:
        own = rb.storage._commit_record

        def fail(*_: Any) -> None:
            assert (
                rb.storage.engine.archive.archive.through == 100 + 500 - CAPACITY
            )  # they have come too early
            raise StorageError("the disk is full")

        monkeypatch.setattr(rb.storage, "_commit_record", fail)
        with pytest.raises(StorageError, match="full"):
            more_rows(rb, 101, 500, step=500)
        monkeypatch.setattr(rb.storage, "_commit_record", own)
        assert ids_in(rb) == list(range(1, 101))
        more_rows(rb, 101, 500, step=500)
        assert ids_in(rb) == list(range(1, 601))
    assert verify(tmp_path / "old.exp") == []


@pytest.mark.some(2)
@pytest.mark.parametrize("count", [CAPACITY, CAPACITY + 3, CAPACITY + 40, 500])
def test_a_batch_as_long_as_the_ring_is_synced_before_it_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Else a power cut takes it back, and the archive has rows that the ring does not know."""
    met: list[bool] = []
    own = Archive.meet
    set_spare_slots(monkeypatch, 200)

    def meet(archive: Archive, *given: Any) -> None:
        met.append(rb.storage.engine.checkpointer.covered == rb.storage.last == 100 + count)
        own(archive, *given)

    with filled(tmp_path / "run.exp", 100, archive=tmp_path / "old.exp") as rb:
        monkeypatch.setattr(Archive, "meet", meet)
        more_rows(rb, 101, count, step=count)
        assert met == ([True] if count > CAPACITY else [])


def test_rows_that_came_too_early_may_be_changed_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long batch sends rows to the archive; if it is not written after all, the ring has them still."""
    world = World(tmp_path, "flat")
    with world.open() as rb:
        for _ in range(5):
            world.extend(rb, 20)

        def fail(through: int) -> None:
            assert rb.storage.engine.archive.archive.through > rb.storage.window.low
            raise StorageError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(rb.storage, "_retire", fail)
            with pytest.raises(StorageError, match="full"):
                rb.extend(rows(np.arange(101, 151), np.zeros(50, np.int64), "flat"))
        world.change(rb, np.arange(41, 60))
        for _ in range(5):
            world.extend(rb, 20)
        world.check(rb)
    assert verify(world.archive) == []


def test_a_failing_archive_stops_who_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is lost, and all goes on when the disk does."""
    with filled(tmp_path / "run.exp", 100, archive=tmp_path / "old.exp") as rb:
        archive = rb.storage.engine.archive.storage
        own = archive._append

        def fail(*_: Any) -> int:
            raise StorageError("the archive's disk is full")

        monkeypatch.setattr(archive, "_append", fail)
        with pytest.raises(StorageError, match="archive's disk"):
            more_rows(rb, 101, 200)
        last = rb.storage.last
        monkeypatch.setattr(archive, "_append", own)
        assert ids_in(rb) == list(range(1, last + 1))
        more_rows(rb, last + 1, 200)
        assert ids_in(rb) == list(range(1, last + 201))


def test_invalid_archive_paths_are_refused(tmp_path: Path) -> None:
    path, old = tmp_path / "run.exp", tmp_path / "old.exp"
    with pytest.raises(ValueError, match="archive= requires a capacity"):
        expstore.open(path, archive=old)
    with pytest.raises(ValueError, match="path of a store, or False"):
        expstore.open(path, capacity=60, archive=True)  # type: ignore[arg-type]
    for place in (path, path / "old.exp", tmp_path):
        with pytest.raises(StateError, match="is inside the other"):
            expstore.open(path, capacity=60, archive=place)
    assert not path.exists()
    filled(path, 100, archive=old).close()
    with pytest.raises(StateError, match="cannot be the archive of a new one"):
        expstore.open(tmp_path / "new.exp", capacity=60, archive=old)
    filled(tmp_path / "second.exp", 10).close()
    with pytest.raises(StateError, match="archive of another store"):
        expstore.open(tmp_path / "second.exp", archive=old)
    with pytest.raises(StateError, match="but not an archive"):
        expstore.open(tmp_path / "second.exp", archive=path)
    with pytest.raises(ValueError, match="mode='r'"):
        expstore.open(path, mode="r", archive=old)
    expstore.open(tmp_path / "grows.exp").close()
    with pytest.raises(StateError, match="no capacity"):
        expstore.open(tmp_path / "grows.exp", archive=tmp_path / "more.exp")
    assert not (tmp_path / "more.exp").exists()


def test_changes_that_an_archive_cannot_follow_are_refused(tmp_path: Path) -> None:
    path, old = tmp_path / "run.exp", tmp_path / "old.exp"
    with filled(path, 100, archive=old) as rb:
        with pytest.raises(StateError, match="cannot add or drop field"):
            rb.columns.add("more", fill=1)
        with pytest.raises(StateError, match="cannot add or drop field"):
            rb.columns.drop("frame")
    best = TensorDictMaxValueWriter("score")
    batch = TensorDict({"score": torch.rand(8)}, [8])
    with expstore.open(tmp_path / "best.exp", capacity=60, writer=best, archive=tmp_path / "x.exp") as rb:
        with pytest.raises(StateError, match="keeps the best rows"):
            rb.extend(batch)
    with expstore.open(tmp_path / "named.exp", capacity=60, archive=tmp_path / "y.exp") as rb:
        with pytest.raises(SchemaError, match="archived.id"):
            rb.extend(TensorDict({"archived": torch.rand(8)}, [8]))
        rb.extend(batch)


def test_an_older_copy_is_refused(tmp_path: Path) -> None:
    path, old, copied = tmp_path / "run.exp", tmp_path / "old.exp", tmp_path / "copy.exp"
    filled(path, 100, archive=old).close()
    shutil.copytree(path, copied)
    with expstore.open(path) as rb:
        more_rows(rb, 101, 20)
    with pytest.raises(StateError, match="is newer than"):
        expstore.open(copied)
    with expstore.open(copied, archive=False) as rb:
        assert len(rb) == CAPACITY
    with expstore.open(path) as rb:
        assert ids_in(rb) == list(range(1, 121))


def test_it_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, old = tmp_path / "run.exp", tmp_path / "old.exp"
    filled(path, 100, archive=old).close()
    assert run(["info", str(path)]) == 0
    assert f"{old}, 40 rows" in capsys.readouterr().out.replace("\n", "")
    assert run(["info", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["stores"][0]["archive"] == {"path": str(old), "rows": 40}
    assert run(["sql", str(path), "SELECT count(*), sum(_archived::INT) FROM history", "--csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "100,40"


@pytest.mark.slow
def test_untrusted_sql_sees_both(tmp_path: Path) -> None:
    filled(tmp_path / "run.exp", 100, archive=tmp_path / "old.exp").close()
    with SqlWorker(tmp_path / "run.exp", limits=SqlLimits(seconds=20.0)) as worker:
        answer = worker.query("SELECT count(*), sum(_archived::INT) FROM history")
        found = pa.ipc.open_stream(answer.data).read_all()
        assert [list(row.values()) for row in found.to_pylist()] == [[100, 40]]
