"""Flags that follow from others: kept as what does not, read as they were given, in every way there is."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr as zarr_python
from tensordict import TensorDict

import expstore
from expstore import (
    LazyMemmapStorage,
    MemoryStorage,
    RandomSampler,
    SchemaError,
    StateError,
    TensorDictReplayBuffer,
)
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.exchange import export_zarr
from expstore.maintenance import repair, verify
from expstore.maintenance.disk_usage import store_size
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import Field, Schema
from expstore.storages import zarr
from expstore.storages.columns import column_set, flat
from expstore.storages.format import layout
from expstore.storages.format.derived import Implied, causes_of, implied_keys
from expstore.storages.format.manifest import Manifest
from tests.support.damaged_stores import flip
from tests.support.tuned import set_spare_slots

pytestmark = pytest.mark.usefixtures("no_syncs")

DONE = ("next", "done")
FLAGS = [("next", "terminated"), ("next", "truncated"), DONE]
CAPACITY = 60


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    set_spare_slots(monkeypatch, 20)
    monkeypatch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)


def batch(first: int, count: int, *, lawless: bool = False) -> TensorDict:
    """Rows that follow from their numbers; `lawless`: some are done for no reason, and some are not."""
    number = torch.arange(first, first + count)
    terminated, truncated = number % 5 == 4, number % 7 == 4
    done = (terminated | truncated) ^ (number % 3 == 1 if lawless else torch.zeros_like(terminated))
    following = {"terminated": terminated[:, None], "truncated": truncated[:, None], "done": done[:, None]}
    return TensorDict({"number": number, "next": following}, [count])


def flags_of(data: TensorDict) -> Any:
    """The three flags of rows. Shape `(n, 3)`."""
    return torch.cat([data[key] for key in FLAGS], dim=1).numpy()


def read(storage: Any) -> Any:
    """Return the numbers and the flags of all rows, by their ids, read together, one by one, and viewed."""
    ids, places = storage.window.ids(), [storage.place_of(key) for key in FLAGS]
    together = storage.read(ids, places)
    for place, column in zip(places, together, strict=True):
        assert np.array_equal(storage.read(ids, [place])[0], column)
        viewed = [storage.views([place], first, count)[0] for first, count in storage.window.runs()]
        assert np.array_equal(
            np.concatenate([column[:0], *(part for parts in viewed for part in parts)]), column
        )
    return storage.read(ids, [storage.place_of(("number",))])[0], np.concatenate(together, axis=1)


def kept(path: Path, key: tuple[str, ...] = DONE) -> Any:
    """What zarr-python finds in a column."""
    return np.asarray(zarr_python.open_array(path / "columns" / "/".join(key))[:])


# -- which flags, and what is kept -----------------------------------------------------------------


def schema_of(**changed: Any) -> Schema:
    fields = {key: Field(key, "bool", (1,)) for key in FLAGS}
    fields |= {("next", name): entry for name, entry in changed.items()}
    return Schema([Field(("x",), "float32", (3,)), *(entry for entry in fields.values() if entry)])


def test_which_flags_are_implied() -> None:
    def found(schema: Schema, packed: Any = None, **asked: Any) -> Any:
        packings = [packed if entry.key == DONE else None for entry in schema.fields]
        return implied_keys(schema.fields, find_keys(schema, **asked), packings)

    assert found(schema_of()) == (DONE,)
    assert found(schema_of(), packed="chunks") == ()
    assert found(schema_of(truncated=None)) == found(schema_of(done=None)) == ()
    assert found(schema_of(terminated=Field(FLAGS[0], "uint8", (1,)))) == ()
    assert found(schema_of(done=Field(DONE, "bool", ()))) == ()  # of another shape
    stop = Field(("next", "stop"), "bool", (1,))
    assert found(schema_of(stop=stop), ends=[*FLAGS[:2], stop.key]) == ()
    root = Schema([Field((name,), "bool", ()) for name in ("done", "terminated", "truncated")])
    assert found(root) == (("done",),)
    assert causes_of(("a", "b", "done")) == (("a", "b", "terminated"), ("a", "b", "truncated"))


def test_what_is_kept_of_every_combination() -> None:
    bits = np.array([[n & 4, n & 2, n & 1] for n in range(8)], bool).T
    rows = [bits[0], np.arange(8), bits[1], bits[2]]
    implied = Implied({0: (2, 3)})
    held = implied.kept(rows)
    assert [int(value) for value in held[0]] == [0, 1, 1, 1, 1, 0, 0, 0]
    assert all(one is other for one, other in zip(held[1:], rows[1:], strict=True))
    asked: list[Any] = []

    def take(places: Any) -> Any:
        asked.append(list(places))
        return [held[place] for place in places]

    assert np.array_equal(implied.values(range(4), take)[0], rows[0])
    (alone,) = implied.values([0], take)
    assert np.array_equal(alone, rows[0])
    assert len(implied.values([3, 1], take)) == 2
    assert asked == [[0, 1, 2, 3], [0, 2, 3], [3, 1]]
    cut = {0: [held[0][:3], held[0][3:]], 2: [rows[2]], 3: [rows[3][:5], rows[3][5:]]}
    (parts,) = implied.views([0], lambda places: [cut[place] for place in places])
    assert np.array_equal(np.concatenate(parts), rows[0])
    assert not Implied({})
    assert Implied({}).kept(rows) is rows


# -- stores ----------------------------------------------------------------------------------------


def test_it_takes_no_space_while_it_follows(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with expstore.open(path, capacity=500) as rb:
        for first in range(0, 900, 100):
            rb.extend(batch(first, 100))
        for number in range(900, 920):  # rows that ride in the journal
            rb.extend(batch(number, 1))
        rb.flush()
        place = rb.storage.place_of(DONE)
        assert rb.storage.columns.columns[place].blank or rb.storage.columns.fills
        sizes = store_size(Disk(), path, rb.storage.manifest, 500).fields
        if not rb.storage.columns.fills:
            assert sizes[place].disk_bytes < sizes[rb.storage.place_of(FLAGS[0])].disk_bytes
        assert not kept(path).any()
        rb.extend(batch(920, 20, lawless=True))
        rb.flush()
        assert not rb.storage.columns.columns[place].blank
        assert kept(path).sum() == sum(number % 3 == 1 for number in range(920, 940))
        _, found = read(rb.storage)
        assert np.array_equal(found[:-20], flags_of(batch(440, 480)))
        assert np.array_equal(found[-20:], flags_of(batch(920, 20, lawless=True)))
    manifest = Manifest.load(Disk(), path)
    assert manifest.implied == (DONE,)
    assert verify(path) == []


@pytest.mark.some(1)
@pytest.mark.parametrize("holes", [True, False])
@pytest.mark.parametrize("capacity", [None, CAPACITY])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.torture) for n in (1, 2))])
def test_whatever_is_done_it_reads_as_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int | None, seed: int, holes: bool
) -> None:
    """Rows come, some lawless, the ring turns, each flag is changed alone and with others, rows go."""
    if not holes:  # as on tmpfs, where reading them takes space
        monkeypatch.setattr(column_set, "fills_holes", lambda disk, folder: True)
    rng, path = np.random.default_rng(seed), tmp_path / "a.exp"
    how: dict[str, Any] = {"capacity": capacity, "storage": ("zarr", "arrow")[seed % 2]}
    rb, follower = expstore.open(path, **how), None
    numbers, held, written = np.zeros(0, np.int64), np.zeros((0, 3), bool), 0
    for act in range(40):
        if act % 11 == 10:
            rb.close()
            rb = expstore.open(path)
        if act % 13 == 12:
            rb.empty()
            numbers, held = numbers[:0], held[:0]
        count = int(rng.integers(1, 30))
        data = batch(written, count, lawless=act % 4 == 3)
        rb.extend(data)
        written += count
        numbers = np.append(numbers, data["number"].numpy())[-capacity if capacity else None :]
        held = np.concatenate([held, flags_of(data)])[-capacity if capacity else None :]
        rows = np.unique(rng.integers(0, len(held), int(rng.integers(1, 25))))
        some = [key for key in FLAGS if rng.random() < 0.5]
        values = {key: torch.from_numpy(rng.random((rows.size, 1)) < 0.4) for key in some}
        if some:
            ids = torch.from_numpy(rb.storage.window.ids()[rows])
            assert rb.update_if_present(id=ids, patch=values).updated_count == rows.size
        for key, column in values.items():
            held[rows, FLAGS.index(key)] = column[:, 0].numpy()
        follower = follower or expstore.open(path, mode="r")
        follower.refresh()
        for reader in (rb, follower):
            found, flags = read(reader.storage)
            assert np.array_equal(found, numbers)
            assert np.array_equal(flags, held), act
        answer = rb.sql("SELECT number, next.done FROM transitions ORDER BY number").fetchall()
        assert answer == list(zip(numbers.tolist(), held[:, 2].tolist(), strict=True))
    rb.close()
    if follower is not None:
        follower.close()
    assert verify(path) == []


def test_whole_rows_by_index_and_the_best_ones(tmp_path: Path) -> None:
    """Rows that are replaced, and rows that wait in memory for the place of another."""
    with expstore.open(tmp_path / "a.exp", capacity=30) as rb:
        rb.extend(batch(0, 30))
        rb[[3, 4, 20]] = batch(100, 3, lawless=True)
        numbers, flags = read(rb.storage)
        assert np.array_equal(flags[[3, 4, 20]], flags_of(batch(100, 3, lawless=True)))
        rest = np.setdiff1d(np.arange(30), [3, 4, 20])
        assert np.array_equal(flags[rest], flags_of(batch(0, 30))[rest])
    best = expstore.TensorDictMaxValueWriter(rank_key="number")
    storage = zarr.ZarrStorage(tmp_path / "b.exp", 30)
    with TensorDictReplayBuffer(storage=storage, writer=best, batch_size=4) as rb:
        for first in (0, 30, 40, 55):
            rb.extend(batch(first, 15, lawless=True))
            numbers, flags = read(rb.storage)
            for number, row in zip(numbers.tolist(), flags, strict=True):
                assert np.array_equal(row, flags_of(batch(number, 1, lawless=True))[0])
    assert verify(tmp_path / "a.exp") == verify(tmp_path / "b.exp") == []


@pytest.mark.some(2)
@pytest.mark.parametrize("broken", FLAGS)
def test_a_change_half_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...]
) -> None:
    """One record has what changes and what is kept of the flag: whoever opens next, or reads, finds both."""
    path, cut = tmp_path / "a.exp", tmp_path / "cut.exp"
    wanted = flags_of(batch(0, 20))
    wanted[:, :2] = ~wanted[:, :2]
    rb = expstore.open(path, capacity=CAPACITY)
    rb.extend(batch(0, 20))
    write = flat.Column.write_rows

    def fail(column: Any, *given: Any) -> Any:
        if column.entry.key == broken:
            raise InterruptedError
        return write(column, *given)

    with monkeypatch.context() as patch:
        patch.setattr(flat.Column, "write_rows", fail)
        values = {key: torch.from_numpy(wanted[:, place, None]) for place, key in enumerate(FLAGS[:2])}
        with pytest.raises(InterruptedError):
            rb.update_if_present(id=torch.arange(1, 21), patch=values)
        assert np.array_equal(read(rb.storage)[1], wanted)  # from memory
        shutil.copytree(path, cut)
    with expstore.open(cut, mode="r") as reader:
        assert np.array_equal(read(reader.storage)[1], wanted)
        assert reader.sql("SELECT count(*) FROM transitions WHERE next.done").fetchone() == (
            wanted[:, 2].sum(),
        )
    with expstore.open(cut) as again:
        assert np.array_equal(read(again.storage)[1], wanted)
    rb.close()
    assert verify(cut) == verify(path) == []


def test_nobody_reads_it_while_what_it_follows_from_changes(tmp_path: Path) -> None:
    """A flag that nobody changes never reads as another, however its columns change meanwhile."""
    path, stop, wrong = tmp_path / "a.exp", threading.Event(), []
    wanted = flags_of(batch(0, 50))[:, 2]
    with expstore.open(path, capacity=50) as rb, expstore.open(path, mode="r") as follower:
        rb.extend(batch(0, 50))
        follower.refresh()

        def look(reader: Any) -> None:
            place, ids = reader.storage.place_of(DONE), np.arange(1, 51)
            while not stop.is_set():
                try:
                    found = reader.storage.read(ids, [place])[0][:, 0]
                    told = reader.sql("SELECT next.done FROM transitions ORDER BY _id").fetchall()
                except StateError:  # the writer is in another process and does not pause for a follower
                    assert reader is follower
                    continue
                if not np.array_equal(found, wanted) or [one for (one,) in told] != wanted.tolist():
                    wrong.append((found, told))

        threads = [threading.Thread(target=look, args=(reader,)) for reader in (rb, follower)]
        for thread in threads:
            thread.start()
        rng = np.random.default_rng(1)
        for _ in range(150):
            rb.update_if_present(
                id=torch.arange(1, 51), patch={FLAGS[0]: torch.from_numpy(rng.random((50, 1)) < 0.5)}
            )
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong


# -- other readers ---------------------------------------------------------------------------------


def test_arrays_say_how_their_values_are_found(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with expstore.open(path, capacity=CAPACITY) as rb:
        rb.extend(batch(0, 50, lawless=True))
        version = rb.dumps(tmp_path / "backup").path
    for folder in (path, version):
        group = zarr_python.open_group(folder / "columns", mode="r")
        about = group["next/done"].attrs["expstore"]["implied"]
        assert about == {"by": ["next/terminated", "next/truncated"], "value": "this array XOR any of those"}
        for key in FLAGS[:2]:
            assert "implied" not in group["/".join(key)].attrs["expstore"]
        one, other = (group[name][:50] for name in about["by"])
        assert np.array_equal(group["next/done"][:50] ^ (one | other), batch(0, 50, lawless=True)[DONE])
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path / "columns/next/done")}}
    assert np.array_equal(tensorstore.open(spec).result().read().result(), kept(path))
    with expstore.open(path, mode="r") as rb:
        export_zarr(rb, tmp_path / "plain.zarr")
    plain = zarr_python.open_group(tmp_path / "plain.zarr", mode="r")
    assert np.array_equal(plain["next/done"][:], batch(0, 50, lawless=True)[DONE])


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("SELECT sum(number) FROM transitions", False),
        ("SELECT number, next.terminated FROM transitions", False),
        ("SELECT count(*) FROM transitions WHERE next.done", True),
        ("SELECT next FROM transitions", True),
        ("SELECT * FROM transitions", True),
        ("FROM transitions", True),
        ("SELECT t FROM transitions t", True),
        ("SELECT status FROM episodes", False),
    ],
)
def test_sql_puts_it_together_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, needs: bool
) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=CAPACITY) as rb:
        for first in range(0, 100, 20):
            rb.extend(batch(first, 20, lawless=first > 50))
        with TensorDictReplayBuffer(storage=MemoryStorage(CAPACITY)) as plain:
            for first in range(0, 100, 20):
                plain.extend(batch(first, 20, lawless=first > 50))
            query = text.replace("*", "* EXCLUDE (_time)") if text.startswith("SELECT *") else text
            if text not in ("FROM transitions", "SELECT t FROM transitions t"):  # these have times
                assert rb.sql(query).fetchall() == plain.sql(query).fetchall()
        asked: list[Any] = []
        values = Implied.values

        def copied(self: Implied, wanted: Any, take: Any, *mix: Any) -> list[Any]:
            if not mix:  # else they are viewed
                asked.append(wanted)
            return values(self, wanted, take, *mix)

        monkeypatch.setattr(Implied, "values", copied)
        rb.sql(text).fetchall()
        place = rb.storage.place_of(DONE)
        assert any(place in wanted for wanted in asked) is needs


def test_root_flags_and_queries_over_them(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=CAPACITY) as rb:
        data = batch(0, 50, lawless=True)
        rb.extend(TensorDict({"number": data["number"], **data["next"]}, [50]))
        assert rb.storage.manifest.implied == (("done",),)
        answer = rb.sql("SELECT number FROM transitions WHERE done ORDER BY 1").fetchall()
        assert [n for (n,) in answer] == data["number"][data[DONE][:, 0]].tolist()
        assert rb.sql("SELECT max(number) FROM transitions").fetchone() == (49,)


def test_samplers_filter_by_it(tmp_path: Path) -> None:
    with expstore.open(
        tmp_path / "a.exp", capacity=CAPACITY, sampler=RandomSampler(where="next.done"), batch_size=64
    ) as rb:
        rb.extend(batch(0, 60, lawless=True))
        assert rb.sample()[DONE].all()
        rb.update_if_present(id=torch.arange(1, 61), patch={FLAGS[0]: torch.ones(60, 1, dtype=torch.bool)})
        drawn = rb.sample()
        assert drawn[DONE].all()
        assert drawn[FLAGS[0]].all()


@pytest.mark.parametrize("plain", [False, True])
def test_rows_that_go_to_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    """Theirs are as those in the ring, also where the ring keeps flags as a former library did."""
    path = tmp_path / "a.exp"
    lawless(path, plain=plain).close()
    with expstore.open(path, archive=tmp_path / "old.exp") as rb:
        for first in range(90, 240, 15):
            rb.extend(batch(first, 15, lawless=True))
        rb.flush()
        text = "SELECT number, next.done FROM history WHERE number >= 90 ORDER BY number"
        assert rb.sql(text).fetchall() == list(
            zip(range(90, 240), batch(90, 150, lawless=True)[DONE][:, 0].tolist(), strict=True)
        )
        assert rb.sql("SELECT sum(next.terminated::int) FROM history WHERE number >= 90").fetchone() == (30,)
    for store in (path, tmp_path / "old.exp"):
        assert verify(store) == []


# -- stores that go elsewhere ----------------------------------------------------------------------


def lawless(path: Path, *, plain: bool = False, capacity: int | None = CAPACITY) -> Any:
    """Make a store of 90 rows, of which 75 are changed after; `plain` as a former library would."""
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setattr(zarr, "implied_keys", lambda *given: ())
        rb = expstore.open(path, capacity=capacity)
        for first in range(0, 90, 15):
            rb.extend(batch(first, 15, lawless=first % 2 == 1))
        rb.update_if_present(id=torch.tensor([80, 81]), patch={FLAGS[1]: torch.ones(2, 1, dtype=torch.bool)})
    return rb


@pytest.mark.some(1)
@pytest.mark.parametrize("plain", [False, True])
def test_versions_loads_and_resizes(tmp_path: Path, plain: bool) -> None:
    path, place = tmp_path / "a.exp", tmp_path / "backup"
    with lawless(path, plain=plain) as rb:
        _, flags = read(rb.storage)
        made = [rb.dumps(place, keep=9).path, rb.dumps(place, keep=9).path]
        rb.storage.resize(40)
        assert np.array_equal(read(rb.storage)[1], flags[-40:])
        assert rb.storage.manifest.implied == (() if plain else (DONE,))
        rb.loads(place)
        assert np.array_equal(read(rb.storage)[1], flags[-40:])
    for version in made:
        assert verify(version) == []
        with expstore.open(version, mode="r") as reader:
            assert np.array_equal(read(reader.storage)[1], flags)
    for other in (False, True):  # into stores that keep it otherwise, and into a new one
        with lawless(tmp_path / f"{other}.exp", plain=other, capacity=None) as rb:
            rb.loads(place)
            assert rb.storage.manifest.implied == (() if other else (DONE,))
            assert np.array_equal(read(rb.storage)[1], flags)
        assert verify(tmp_path / f"{other}.exp") == []
    with expstore.open(tmp_path / "new.exp") as rb:
        rb.loads(place)
        assert rb.storage.manifest.implied == (DONE,)
        assert np.array_equal(read(rb.storage)[1], flags)
    with TensorDictReplayBuffer(storage=MemoryStorage(CAPACITY)) as rb:
        rb.loads(place)
        assert np.array_equal(read(rb.storage)[1], flags)
        rb.dumps(tmp_path / "of memory")
    with expstore.open(tmp_path / "back.exp") as rb:
        rb.loads(tmp_path / "of memory")
        assert np.array_equal(read(rb.storage)[1], flags)
        assert rb.storage.manifest.implied == (DONE,)
    merged = expstore.merge([path, tmp_path / "new.exp"], out=tmp_path / "all.exp")
    assert merged is not None
    with expstore.open(tmp_path / "all.exp", mode="r") as rb:
        assert np.array_equal(read(rb.storage)[1], np.concatenate([flags[-40:], flags]))
    assert verify(tmp_path / "all.exp") == verify(path) == []


def test_a_version_shares_what_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with expstore.open(path, capacity=None) as rb:
        rb.extend(batch(0, 9000, lawless=True))
        rb.dumps(tmp_path / "backup")
        first = rb.dumps(tmp_path / "backup", keep=9)
        rb.update_if_present(id=torch.tensor([8500]), patch={FLAGS[0]: torch.ones(1, 1, dtype=torch.bool)})
        second = rb.dumps(tmp_path / "backup", keep=9)
        shards = [made.path / "columns/next/done/c.0.0" for made in (first, second)]
        assert shards[0].stat().st_ino == shards[1].stat().st_ino
        wanted = read(rb.storage)[1]
    with expstore.open(second.path, mode="r") as reader:
        assert np.array_equal(read(reader.storage)[1], wanted)
    assert verify(second.path) == []


def test_a_state_holds_values(tmp_path: Path) -> None:
    storage = LazyMemmapStorage(CAPACITY, scratch_dir=tmp_path / "scratch")
    with TensorDictReplayBuffer(storage=storage, batch_size=4) as rb:
        rb.extend(batch(0, 50, lawless=True))
        state = rb.storage.state_dict()
    assert torch.equal(state["rows"]["next.done"], batch(0, 50, lawless=True)[DONE])


def test_what_it_follows_from_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    data = batch(0, 30, lawless=True)
    with expstore.open(path, capacity=CAPACITY) as rb:
        rb.extend(data)
        for key in FLAGS:
            with pytest.raises(SchemaError, match="has to stay"):
                rb.drop_column(key)
        rb.add_column("more", fill=2)
        rb.drop_column("number")
        assert torch.equal(rb[:][DONE], data[DONE])  # its place is another now
        rb.extend(batch(30, 20).exclude("number").set("more", torch.full((20,), 2)))
        assert torch.equal(rb[-20:][DONE], batch(30, 20)[DONE])
    assert verify(path) == []


# -- damage ----------------------------------------------------------------------------------------


def test_damage_is_found_and_mended(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with lawless(path) as rb:
        numbers, flags = read(rb.storage)
    about = path / "columns/next/done/zarr.json"
    sound = about.read_text()
    about.write_text(sound.replace("this array XOR any of those", "this array"))
    (finding,) = verify(path)
    assert finding.kind == "metadata"
    repair(path)
    assert about.read_text() == sound
    assert verify(path) == []
    flip(path / "columns/next/done/c/0/0", 3, 0)
    (finding,) = verify(path)
    assert finding.column == "next.done"
    repair(path, drop_damaged=True)
    assert verify(path) == []
    with expstore.open(path, mode="r") as rb:
        left, found = read(rb.storage)
        assert set(left) <= set(numbers)
        assert np.array_equal(found, flags[np.isin(numbers, left)])


def test_layouts_that_pack_flags_keep_them_as_they_are(tmp_path: Path) -> None:
    packed = {"next.done": {"layout": "packed"}}
    with expstore.open(tmp_path / "a.exp", capacity=CAPACITY, fields=packed) as rb:
        rb.extend(batch(0, 50, lawless=True))
        assert rb.storage.manifest.implied == layout.implied_of(rb.storage.manifest) == ()
        assert torch.equal(rb[:][DONE], batch(0, 50, lawless=True)[DONE])
