"""Stores whose flat observations lie with next ones: read, changed on either side, dumped, repaired."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import SchemaError, StateError, TensorDictMaxValueWriter
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.cli import info
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.maintenance import repair, verify
from expstore.maintenance.disk_usage import store_size
from expstore.storages.columns import flat
from expstore.storages.format.layout import ColumnLayout
from expstore.storages.format.manifest import Manifest
from expstore.storages.memory import MemoryStorage
from expstore.storages.zarr import ZarrStorage
from tests.support.damaged_stores import Broken, flip, in_child, lost_ids
from tests.support.stores import extend_all
from tests.support.tuned import set_spare_slots
from tests.support.two_lanes import CAPACITY, TwoLanes, after

pytestmark = pytest.mark.usefixtures("no_syncs")

SHARED = ColumnLayout(share_next=True)


@pytest.fixture(autouse=True)
def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Let narrow rows be shared in short rings, and their space be given back byte by byte."""
    patch.setattr(tuning, "PACKED_LOOKBACK_ROWS", (4, 8))
    set_spare_slots(patch, 20)
    patch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)
    patch.setattr(tuning, "DEDUP_ROW_BYTES", 64)
    patch.setattr(tuning, "DEDUP_PAGE_BYTES", 1)
    patch.setattr(tuning, "DEDUP_FREE_BYTES", 256)


def frames(numbers: Any) -> torch.Tensor:
    """Rows of noise that follow from a running number."""
    mixed = np.asarray(numbers, np.uint64).reshape(-1, 1) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed + np.arange(1, 17, dtype=np.uint64)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    return torch.from_numpy(mixed.view(np.uint8).reshape(-1, 8, 16).copy())


ROWS = TwoLanes(frames, SHARED)
batch, buffer, right, numbers_in = ROWS.batch, ROWS.buffer, ROWS.right, ROWS.numbers_in


def lent(rb: Any) -> list[int]:
    """The readable rows that lie with others, by their ids."""
    storage, ids = rb.storage, rb.storage.window.ids()
    storage.drain()
    (column,) = storage.shared_columns.values()
    return ids[column.distances.take(storage.slot_of(ids)) > 0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("capacity", [None, CAPACITY])
def test_both_read_as_they_were_given(tmp_path: Path, capacity: int | None) -> None:
    path, first = tmp_path / "a.exp", 0
    for life in range(4):
        with buffer(path, capacity) as rb:
            for count in (3, 10, 1, 20, 7):
                rb.extend(batch(first, count))
                first += count
                wanted = list(range(0 if capacity is None else max(0, first - capacity), first))
                assert numbers_in(rb) == wanted
                if life % 2:
                    with expstore.open(path, mode="r") as follower:
                        assert numbers_in(follower) == wanted
            assert len(lent(rb)) > len(rb) // 2
        with expstore.open(path, mode="r") as follower:
            assert numbers_in(follower) == wanted
    assert verify(path) == []
    assert rb.storage.slots == (None if capacity is None else 60 + 20 + 9)


def test_a_batch_longer_than_the_spare(tmp_path: Path) -> None:
    """It gives up rows before it overwrites what others lie with."""
    with buffer(tmp_path / "a.exp") as rb:
        first = 0
        for count in (30, 21, 35, 61, 50, 200, 79, 25):
            rb.extend(batch(first, count))
            first += count
            found = numbers_in(rb)
            assert found == list(range(first - len(found), first))
            assert len(found) >= min(first, 50)
    assert verify(tmp_path / "a.exp") == []


@pytest.mark.parametrize("mode", ["r", "a"])
@pytest.mark.parametrize("capacity", [None, CAPACITY])
def test_distances_that_the_power_took_cost_the_rows_that_were_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capacity: int | None, mode: str
) -> None:
    with buffer(tmp_path / "a.exp", capacity) as rb:
        rb.extend(batch(0, 20))
        rb.storage.drain()
        shutil.copytree(tmp_path / "a.exp", tmp_path / "cut.exp")
    (tmp_path / "cut.exp" / "columns" / "_row" / "distance" / "frame" / "c" / "0").unlink()
    monkeypatch.setattr(Disk, "boot_id", lambda self: b"another start...")
    with expstore.open(tmp_path / "cut.exp", mode=mode) as found:  # type: ignore[arg-type]
        assert len(found) == 0


def test_rows_after_an_empty_store(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with buffer(path) as rb:
        for first in (0, 45, 78, 100):
            rb.extend(batch(first, 20))
            assert numbers_in(rb) == list(range(first, first + 20))
            rb.empty()
        rb.extend(batch(200, 20))
    with buffer(path) as rb:
        assert numbers_in(rb) == list(range(200, 220))
    assert verify(path) == []


def test_autoreset_and_lanes_are_found_by_their_bytes(tmp_path: Path) -> None:
    """Eight lanes, time first, each of which begins anew at another step."""
    lanes, steps = 8, 40
    count = itertools.count()
    now = [next(count) for _ in range(lanes)]
    here, there = np.zeros((steps, lanes), np.int64), np.zeros((steps, lanes), np.int64)
    for step, lane in itertools.product(range(steps), range(lanes)):
        here[step, lane], there[step, lane] = now[lane], next(count)
        now[lane] = next(count) if (step + lane) % 9 == 8 else int(there[step, lane])
    both = {"frame": frames(here).reshape(steps, lanes, 8, 16)}
    both["next"] = {"frame": frames(there).reshape(steps, lanes, 8, 16)}  # type: ignore[assignment]
    data = TensorDict(both, [steps, lanes], names=["time", None])
    with buffer(tmp_path / "a.exp", None) as rb:
        rb.extend(data, source="lanes")
        alike = np.isin(here, there).sum()
        assert len(lent(rb)) == alike > 250
        assert torch.equal(rb[:]["frame"], frames(here))


# -- changes ---------------------------------------------------------------------------------------


def change(rb: Any, numbers: dict[int, int], keys: list[Any]) -> None:
    """Give some fields of rows, by their places, the frames of these numbers."""
    ids, values = rb.storage.window.ids()[list(numbers)], frames(list(numbers.values())).numpy()
    rb.storage.change(ids, [rb.storage.place_of(key) for key in keys], [values] * len(keys))


@pytest.mark.some(2)
@pytest.mark.parametrize("capacity", [None, CAPACITY])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.torture) for n in (2, 3))])
def test_either_side_can_be_changed(tmp_path: Path, capacity: int | None, seed: int) -> None:
    """Whichever rows are changed, the others stay as they are, for a follower and another opening, too."""
    rng, path = np.random.default_rng(seed), tmp_path / "a.exp"
    rb, follower = buffer(path, capacity), None
    held: list[list[int]] = []  # number of each row's frame, and of its next one
    written, extra = 0, 5_000_000
    for act in range(40):
        if act % 10 == 9:
            rb.close()
            rb = buffer(path, capacity)
        count = int(rng.integers(1, 12))
        rb.extend(batch(written, count))
        held += [[one, int(after(one))] for one in range(written, written + count)]
        held, written = held if capacity is None else held[-capacity:], written + count
        places = np.unique(rng.integers(0, len(held), int(rng.integers(1, 5)))).tolist()
        sides = [(0,), (1,), (0, 1)][act % 3]
        keys = [[("frame",), ("next", "frame")][side] for side in sides]
        new = {place: extra + place for place in places}
        extra += 1000
        change(rb, new, keys)
        for place, side in itertools.product(places, sides):
            held[place][side] = new[place]
        wanted = [frames([row[side] for row in held]) for side in (0, 1)]
        if follower is None:
            follower = expstore.open(path, mode="r")
        follower.refresh()
        for reader in (rb, follower):
            ids = reader.storage.window.ids()
            found = reader.storage.read(ids)
            both = [found[reader.storage.place_of(key)] for key in (("frame",), ("next", "frame"))]
            assert torch.equal(torch.from_numpy(both[0]), wanted[0]), act
            assert torch.equal(torch.from_numpy(both[1]), wanted[1]), act
    rb.close()
    if follower is not None:
        follower.close()
    assert verify(path) == []


def test_rows_that_lay_with_a_changed_one_have_their_own_copies(tmp_path: Path) -> None:
    with buffer(tmp_path / "a.exp") as rb:
        rb.extend(batch(0, 20))
        rb.extend(batch(20, 5))
        before = lent(rb)
        assert {9, 11, 13} <= set(before)
        rb[[8]] = batch(500, 1)  # row 9: 11 lies with it, and it with 7
        assert set(before) - set(lent(rb)) == {9, 11}
        data = rb[:]
        assert data["number"].tolist() == [*range(8), 500, *range(9, 25)]
        assert right(data)
        rb.extend(batch(25, 4))  # none of them lies with what was told before the change
        assert set(lent(rb)) == {*before, 28, 29} - {9, 11}


def test_a_change_half_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has the change and the copies; whoever opens next, or only reads, finds both."""
    for broken in (("next", "frame"), ("frame",)):
        path = tmp_path / "-".join(broken)
        rb = buffer(path)
        rb.extend(batch(0, 20))
        write = flat.Column.write_rows
        with monkeypatch.context() as patch:

            def fail(column: Any, *given: Any, broken: Any = broken, write: Any = write) -> Any:
                if column.entry.key == broken:
                    raise InterruptedError
                return write(column, *given)

            patch.setattr(flat.Column, "write_rows", fail)
            with pytest.raises(InterruptedError):
                rb[[8]] = batch(500, 1)
            cut = Path(shutil.copytree(path, tmp_path / ("cut-" + "-".join(broken))))
        wanted = sorted([*range(8), 500, *range(9, 20)])
        assert numbers_in(rb) == wanted
        with expstore.open(cut, mode="r") as reader:
            assert numbers_in(reader) == wanted
        with buffer(cut) as again:
            assert numbers_in(again) == wanted
        rb.close()
        assert verify(cut) == verify(path) == []


def test_sql_reads_rows_where_they_lie(tmp_path: Path) -> None:
    with buffer(tmp_path / "a.exp") as rb:
        extend_all(rb, *ROWS.parts(75))
        text = "SELECT number, frame, next.frame AS following FROM transitions ORDER BY number"
        data = rb.sql(text).fetchall()
        assert [row[0] for row in data] == list(range(15, 75))
        for number, frame, following in data:
            assert np.array_equal(frame, frames([number])[0])
            assert np.array_equal(following, frames(after([number]))[0])


# -- versions --------------------------------------------------------------------------------------


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("rows", "capacity"),
    [
        *[(71, None), (333, CAPACITY), (333, 5000)],
        *(
            pytest.param(rows, capacity, marks=pytest.mark.torture)
            for rows, capacity in [(333, None), (71, CAPACITY), (71, 5000)]
        ),
        *(pytest.param(9, capacity, marks=pytest.mark.torture) for capacity in (None, CAPACITY, 5000)),
    ],
)
def test_versions_hold_what_rows_lie_with(tmp_path: Path, capacity: int | None, rows: int) -> None:
    path, place = tmp_path / "a.exp", tmp_path / "backup"
    with buffer(path, capacity) as rb:
        extend_all(rb, *ROWS.parts(rows))
        made = [(rb.dumps(place, keep=99).path, numbers_in(rb))]
        made.append((rb.dumps(place, keep=99).path, numbers_in(rb)))  # nothing has changed
        rb[[3]] = batch(10_000, 1)
        rb[[-1, -2]] = batch(20_000, 2)
        made.append((rb.dumps(place, keep=99).path, numbers_in(rb)))
        for first in range(rows, rows + 140, 20):
            rb.extend(batch(first, 20))
            made.append((rb.dumps(place, keep=99).path, numbers_in(rb)))
    shutil.rmtree(path)
    for version, numbers in made:
        assert verify(version) == []
        with expstore.open(version, mode="r") as rb:
            assert numbers_in(rb) == numbers
    for number, size in enumerate((None, 60, 25)):
        with buffer(tmp_path / f"{number}.exp", size) as rb:
            rb.extend(batch(5000, 20))
            rb.loads(place)
            last = made[-1][1]
            assert set(numbers_in(rb)) <= set(last)
            assert len(rb) == min(len(last), size or len(last))
            assert len(lent(rb)) > len(rb) // 2
            rb.extend(batch(rows + 140, 15))
            assert set(range(rows + 140, rows + 155)) <= set(numbers_in(rb))
        assert verify(tmp_path / f"{number}.exp") == []
    with TensorDictReplayBuffer(storage=MemoryStorage(), batch_size=8) as rb:
        rb.loads(place)
        assert numbers_in(rb) == made[-1][1]


def test_a_version_is_taken_while_rows_are_added(tmp_path: Path) -> None:
    """Rows that lie with some that are no longer read are whole in it, and in no version after it."""
    with buffer(tmp_path / "a.exp") as rb:
        extend_all(rb, *ROWS.parts(100))
        first = rb.dumps(tmp_path / "backup")
        rb.extend(batch(100, 2))
        second = rb.dumps(tmp_path / "backup")
        oldest = rb.storage.window.low + 1
        assert oldest in lent(rb)  # in the store it lies with one that cannot be read
    for version, numbers in ((first, range(40, 100)), (second, range(42, 102))):
        with expstore.open(version.path, mode="r") as rb:
            assert numbers_in(rb) == list(numbers)
            column = next(iter(rb.storage._source.columns.shared.values()))
            assert not column.distances.take(rb.storage.slot_of(rb.storage.window.ids()[:2])).any()


# -- damage ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ring of three shards that has turned: ids 7001 to 12,000."""
    path = tmp_path_factory.mktemp("sound") / "sound.exp"
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        set_spare_slots(patch, 4096)
        with buffer(path, 5000) as rb:
            extend_all(rb, *ROWS.parts(12_000, 500))
    return path


@pytest.mark.parametrize("count", [4, pytest.param(12, marks=pytest.mark.torture)])
def test_a_repair_costs_the_rows_that_were_named_and_no_others(
    sound: Path, tmp_path: Path, count: int
) -> None:
    parts = [*(f"frame/c/{n}/0" for n in range(3)), *(f"next/frame/c/{n}/0" for n in range(3))]
    broken = Broken(sound, [*parts, "_row/distance/frame/c"], right, range(7000, 12_000))
    assert in_child(lambda: broken.repairs(tmp_path, count, 3)) == []


def test_verify_names_the_rows_that_lie_with_damaged_ones(sound: Path, tmp_path: Path) -> None:
    """Slots 4096 to 8191 of the next frames are damaged; rows 8192 and 8193 lie with the last of them."""
    store = Path(shutil.copytree(sound, tmp_path / "broken.exp"))
    assert verify(store) == []
    flip(store / "columns/next/frame/c/1/0/0", 1000, 3)
    found = verify(store)
    assert {(finding.kind, finding.path) for finding in found} == {("payload", "columns/next/frame/c/1/0/0")}
    assert {finding.column for finding in found} == {"frame", "next.frame"}
    named = lost_ids(store)
    slots = 5000 + 4096 + 9
    assert slots == 9105
    low, high = 7000, 8191  # by number: ids less one
    assert set(range(low, high + 1)) <= named
    beyond = named - set(range(low, high + 1))
    assert beyond == {n for n in (8192, 8193) if (n - 2) % 17 != 5}
    assert repair(store).left
    assert repair(store, drop_damaged=True).lost_rows == len(named)
    assert verify(store) == []
    with buffer(store, 5000) as rb:
        assert numbers_in(rb) == sorted(set(range(7000, 12_000)) - named)


def test_damage_to_what_is_left_in_slots_costs_nothing(sound: Path, tmp_path: Path) -> None:
    store = Path(shutil.copytree(sound, tmp_path / "broken.exp"))
    with buffer(store, 5000) as rb:
        column = next(iter(rb.storage.shared_columns.values()))
        away = np.flatnonzero(column.distances.view[:4096])
        own = np.flatnonzero(column.distances.view[:2000] == 0)
    path = store / "columns/frame/c/0/0/0"
    flip(path, int(away[7]) * 128 + 5, 1)
    assert verify(store) == []
    flip(path, int(own[3]) * 128 + 5, 1)
    (finding,) = verify(store)
    assert finding.column == "frame"
    named = lost_ids(store)
    assert named <= set(range(7000, 12_000))
    assert len(named) < 4096 // 10
    assert repair(store, drop_damaged=True).lost_rows == len(named)
    with buffer(store, 5000) as rb:
        assert numbers_in(rb) == sorted(set(range(7000, 12_000)) - named)


def test_lost_metadata_is_made_again(sound: Path, tmp_path: Path) -> None:
    for number, name in enumerate(("frame", "_row/distance/frame", "next/frame")):
        store = Path(shutil.copytree(sound, tmp_path / f"{number}.exp"))
        (store / "columns" / name / "zarr.json").unlink()
        assert [finding.kind for finding in verify(store)] == ["missing"]
        repair(store)
        assert verify(store) == []
        with buffer(store, 5000) as rb:
            assert numbers_in(rb) == list(range(7000, 12_000))


def test_info_says_which_part_is_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.exp"
    with buffer(path, 20_000) as rb:
        for first in range(0, 4000, 500):
            rb.extend(batch(first, 500))
        alike = len(lent(rb)) / 4000
    disk = Disk()
    size = store_size(disk, path, Manifest.load(disk, path), 4000)
    fields = dict(zip(("frame", "next.frame"), size.fields, strict=False))
    assert fields["frame"].shared == pytest.approx(alike)
    assert alike > 0.9
    assert fields["frame"].layout == "flat"
    assert fields["next.frame"].shared is None
    info.show_facts(info.facts_of(path))
    assert f"flat, {alike:.0%} shared" in capsys.readouterr().out


def test_a_field_that_shares_can_go_and_one_that_lends_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with buffer(path) as rb:
        extend_all(rb, *ROWS.parts(75))
        with pytest.raises(SchemaError, match=r"'frame' are kept with those of 'next\.frame'"):
            rb.drop_column(("next", "frame"))
        rb.add_column("more", fill=7, dtype="int64")
        assert numbers_in(rb) == list(range(15, 75))
        rb.extend(batch(75, 5).set("more", torch.zeros(5, dtype=torch.int64)))
        assert numbers_in(rb) == list(range(20, 80))
        rb.flush()
        rb.drop_column("frame")
        assert not (path / "columns/_row/distance/frame").exists()
        assert torch.equal(rb[:]["next", "frame"], frames(after(rb[:]["number"])))
    assert verify(path) == []
    with buffer(path) as rb:
        assert torch.equal(rb[:]["next", "frame"], frames(after(rb[:]["number"])))


# -- what is asked for -----------------------------------------------------------------------------


def shares(path: Path) -> bool:
    return (path / "columns/_row/distance/frame").exists()


def test_who_shares(tmp_path: Path) -> None:
    """Stores of `open` whose rows are wide and flat, and others that ask for it."""
    flat, asks = {"layout": "flat"}, {"frame": {"share_next": True}}
    whole = {"frame": flat | {"share_next": False}, "next.frame": flat}
    best: dict[str, Any] = {"capacity": 40, "layout": "flat", "writer": TensorDictMaxValueWriter("number")}
    made: dict[str, Any] = {
        "open": lambda path: expstore.open(path, layout="flat"),
        "open, no": lambda path: expstore.open(path, layout="flat", share_next=False),
        "open, packed": lambda path: expstore.open(path, layout="packed"),
        "open, no field": lambda path: expstore.open(path, fields=whole),
        "open, field": lambda path: expstore.open(path, layout="flat", fields=asks, share_next=False),
        "storage": lambda path: TensorDictReplayBuffer(storage=ZarrStorage(path)),
        "storage, yes": lambda path: TensorDictReplayBuffer(storage=ZarrStorage(path, share_next=True)),
        "best": lambda path: expstore.open(path, **best),
    }
    for name, make in made.items():
        with make(tmp_path / name) as rb:
            rb.extend(batch(0, 30))
            assert right(rb[:])
        with expstore.open(tmp_path / name) as rb:  # what it was made with counts
            rb.extend(batch(30, 5))
            assert right(rb[:])
    assert [name for name in made if shares(tmp_path / name)] == ["open", "open, field", "storage, yes"]


def test_a_contradiction_is_refused(tmp_path: Path) -> None:
    expstore.open(tmp_path / "a.exp", layout="flat").close()
    expstore.open(tmp_path / "a.exp", share_next=True).close()
    with pytest.raises(StateError, match="share_next=True, opened with layout='flat', share_next=False"):
        expstore.open(tmp_path / "a.exp", share_next=False)
    with pytest.raises(StateError, match="share_next"):
        ZarrStorage(tmp_path / "a.exp", share_next=False)
    with pytest.raises(SchemaError, match="True or False"):
        expstore.open(tmp_path / "b.exp", share_next="yes")  # type: ignore[arg-type]
    assert not (tmp_path / "b.exp").exists()


def test_rows_that_are_too_narrow_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "DEDUP_ROW_BYTES", 129)
    how = ColumnLayout(fields={"frame": {"layout": "flat", "share_next": True}})
    with buffer(tmp_path / "a.exp", layout=how) as rb:
        with pytest.raises(SchemaError, match="'frame': share_next=True .* of rows of 128 bytes .* need 129"):
            rb.extend(batch(0, 3))
        assert rb.storage.schema is None
    with buffer(tmp_path / "b.exp") as rb:  # asked of all fields, it is of those that gain by it
        rb.extend(batch(0, 3))
    assert not shares(tmp_path / "b.exp")


def test_the_best_rows_are_not_shared(tmp_path: Path) -> None:
    path, writer = tmp_path / "a.exp", TensorDictMaxValueWriter("number")
    with expstore.open(path, capacity=40, layout="flat") as rb:
        rb.extend(batch(0, 30))
        rb.empty()
    with (
        expstore.open(path, writer=writer) as rb,
        pytest.raises(SchemaError, match="'frame' lie with .* share_next=False"),
    ):
        rb.extend(batch(0, 30))
    how, writer = {"frame": {"layout": "flat", "share_next": True}}, TensorDictMaxValueWriter("number")
    with (
        expstore.open(tmp_path / "b.exp", capacity=40, layout="flat", fields=how, writer=writer) as rb,
        pytest.raises(StateError, match="share_next=True for a flat field"),
    ):
        rb.extend(batch(0, 30))


def test_a_store_that_was_made_without_goes_on_without(tmp_path: Path) -> None:
    """What expstore.json said before there was `share_next`."""
    path = tmp_path / "a.exp"
    with buffer(path, layout=ColumnLayout("flat", fields={"number": {"layout": "flat"}})) as rb:
        rb.extend(batch(0, 20))
        assert "share_next" not in rb.storage.manifest.layout
        rb.dumps(tmp_path / "backup")
        rb.loads(tmp_path / "backup")
        assert numbers_in(rb) == list(range(20))
    assert not shares(path)


def test_rows_that_stay_outlive_those_with_which_they_lie(tmp_path: Path) -> None:
    """The space of next rows that have left stays taken as long as others, even later ones, may lie there."""
    length = 96  # three pages of rows

    def played(number: int) -> TensorDict:
        numbers = np.arange(length * (number - 1), length * number)
        done = torch.zeros(length, 1, dtype=torch.bool)
        done[-1] = True
        following = {"frame": frames(numbers + 1), "done": done, "terminated": done}
        return TensorDict({"frame": frames(numbers), "next": following}, [length])

    with expstore.open(tmp_path / "run.exp", layout="flat", share_next=True) as rb:
        for number in range(1, 7):
            rb.extend(played(number))
        assert rb.storage.give_up(np.array([2, 4, 6])).rows == 3 * length
        for number in (7, 8):
            rb.extend(played(number))
        rb.storage.give_up(np.array([7]))
        kept = np.concatenate([np.arange(length * (n - 1), length * n) for n in (1, 3, 5, 8)])
        for _ in range(2):
            rows = rb[:]
            assert (rows["frame"] == frames(kept)).all()
            assert (rows["next", "frame"] == frames(kept + 1)).all()
            rb.flush()
        place = rb.storage.columns.pairs[0]
        first = rb.storage.columns.columns[place].copy(length, length).reshape(length, -1).any(1)
        assert first.tolist() == [False] * 64 + [True] * 32  # of the second episode two pages are free
    assert verify(tmp_path / "run.exp") == []
    with expstore.open(tmp_path / "run.exp") as rb:
        assert (rb[:]["frame"] == frames(kept)).all()
