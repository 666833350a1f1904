"""Stores with deduplicated observations: read, emptied, dumped, damaged and repaired."""

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
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.errors import SchemaError
from expstore.maintenance import repair, verify
from expstore.storages.engine.store import _BatchWrite
from expstore.storages.format.chunk_file import scan_chunks
from expstore.storages.format.layout import ColumnLayout
from expstore.storages.memory import MemoryStorage
from tests.support.damaged_stores import Broken, flip, in_child, lost_ids
from tests.support.framed_rows import half_noise_frames
from tests.support.stores import extend_all
from tests.support.tuned import set_spare_slots
from tests.support.two_lanes import CAPACITY, TwoLanes, after

pytestmark = pytest.mark.usefixtures("no_syncs")

FIELDS = {"frame": {"layout": "packed", "rows": 4}, "next.frame": {"layout": "packed", "rows": 8}}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Let stores have short shards and a short ring: 60 readable rows of 96."""
    patch.setattr(tuning, "PACKED_SHARD_ROWS", 32)
    patch.setattr(tuning, "UNBOUNDED_PACKED_SHARD_ROWS", 32)
    patch.setattr(tuning, "PACKED_LOOKBACK_ROWS", (4, 8))
    set_spare_slots(patch, 20)


ROWS = TwoLanes(half_noise_frames, ColumnLayout(fields=FIELDS))
batch, buffer, right, numbers_in = ROWS.batch, ROWS.buffer, ROWS.right, ROWS.numbers_in


def shared(path: Path) -> int:
    """How many bytes the frames take that are not next ones."""
    return sum(file.stat().st_size for file in (path / "columns/frame").glob("c.*"))


@pytest.mark.guarantee("rows/bits")
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("rows", "capacity"),
    [
        *[(71, None), (333, CAPACITY)],
        *(
            pytest.param(rows, capacity, marks=pytest.mark.torture)
            for rows, capacity in [(9, None), (333, None), (9, CAPACITY), (71, CAPACITY)]
        ),
    ],
)
def test_versions_contain_what_rows_lie_with(tmp_path: Path, capacity: int | None, rows: int) -> None:
    path, place = tmp_path / "a.exp", tmp_path / "backup"
    wanted = list(range(0 if capacity is None else max(0, rows - capacity), rows))
    with buffer(path, capacity) as rb:
        for first in range(0, rows, 11):
            rb.extend(batch(first, min(11, rows - first)))
        first_made = rb.dumps(place)
        rb.extend(batch(rows, 20))
        made = rb.dumps(place)
        rb.extend(batch(rows + 20, 120))
    shutil.rmtree(path)
    for version, numbers in (
        (first_made, wanted),
        (made, [*wanted, *range(rows, rows + 20)][-len(wanted) - 20 :]),
    ):
        numbers = numbers if capacity is None else numbers[-capacity:]
        with expstore.open(place, version=version.number, mode="r") as rb:
            assert numbers_in(rb) == numbers
    for number, size in enumerate((None, 60, 25)):
        with buffer(tmp_path / f"{number}.exp", size) as rb:
            rb.extend(batch(5000, 30))
            rb.loads(place)
            loaded = numbers if size is None else numbers[-size:]
            assert numbers_in(rb) == loaded
            rb.extend(batch(rows + 20, 15))
            assert numbers_in(rb)[-15:] == list(range(rows + 20, rows + 35))
        assert verify(tmp_path / f"{number}.exp") == []
    with TensorDictReplayBuffer(storage=MemoryStorage(), batch_size=8) as rb:
        rb.loads(place)
        assert numbers_in(rb) == numbers


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "sound.exp"
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        with buffer(path) as rb:
            extend_all(rb, *ROWS.parts(150, 10), flush_every=5)
    return path


@pytest.fixture
def broken(sound: Path) -> Broken:
    return Broken(sound, ["frame", "next/frame"], right, range(90, 150))


@pytest.mark.parametrize("count", [10, pytest.param(30, marks=pytest.mark.torture)])
def test_damage_anywhere_is_an_error_and_never_other_rows(broken: Broken, tmp_path: Path, count: int) -> None:
    assert in_child(lambda: broken.faults(tmp_path, count, 1)) == []


def test_verify_names_the_rows_that_lie_with_damaged_ones_and_repair_costs_these(
    sound: Path, tmp_path: Path
) -> None:
    """Next rows 104 to 111 are damaged; 106 to 113 lie with them, but for one after the end of an episode."""
    store = Path(shutil.copytree(sound, tmp_path / "broken.exp"))
    assert verify(store) == []
    path = store / "columns/next/frame/c.0.0.0"
    index = np.frombuffer(path.read_bytes()[-4 - 16 * 4 : -4], "<u8").reshape(4, 2)
    flip(path, int(index[1, 0]) + 30, 3)
    lost = {*range(104, 112), *range(106, 114)}
    found = verify(store)
    assert {(finding.kind, finding.path) for finding in found} == {("payload", "columns/next/frame/c.0.0.0")}
    assert {finding.column for finding in found} == {"frame", "next.frame"}
    assert lost_ids(store) == {n for n in lost if n < 112 or (n - 2) % 17 != 5}
    assert repair(store).left
    named = lost_ids(store)
    assert repair(store, drop_damaged=True).lost_rows == len(named)
    assert verify(store) == []
    with buffer(store) as rb:
        assert numbers_in(rb) == sorted(set(range(90, 150)) - named)
        rb.extend(batch(150, 30))
        assert numbers_in(rb) == sorted(set(range(120, 180)) - named)
        rb.dumps(tmp_path / "backup")
    with expstore.open(tmp_path / "backup", mode="r") as rb:
        assert numbers_in(rb) == sorted(set(range(120, 180)) - named)


@pytest.mark.guarantee("damage/repair")
@pytest.mark.slow
@pytest.mark.parametrize("count", [4, pytest.param(12, marks=pytest.mark.torture)])
def test_a_repair_costs_the_rows_that_were_named_and_no_others(
    broken: Broken, tmp_path: Path, count: int
) -> None:
    assert in_child(lambda: broken.repairs(tmp_path, count, 3)) == []


def test_share_next_can_be_left_out(tmp_path: Path) -> None:
    sizes = []
    for name, layout in {
        "shared": ColumnLayout(fields=FIELDS),
        "whole": ColumnLayout(fields=FIELDS, share_next=False),
        "field": ColumnLayout(fields=FIELDS | {"frame": FIELDS["frame"] | {"share_next": False}}),
        "other": ColumnLayout(
            fields=FIELDS | {"frame": FIELDS["frame"] | {"share_next": True}}, share_next=False
        ),
    }.items():
        with buffer(tmp_path / name, None, layout) as rb:
            rb.extend(batch(0, 64))
        with expstore.open(tmp_path / name, batch_size=8) as rb:  # what it was made with counts
            rb.extend(batch(64, 32))
            assert numbers_in(rb) == list(range(96))
        sizes.append(shared(tmp_path / name))
    assert sizes[1] == sizes[2] > 2 * sizes[0]
    assert sizes[3] == sizes[0]
    with pytest.raises(SchemaError, match="True or False"):
        ColumnLayout(fields={"frame": {"share_next": "yes"}})


def test_autoreset_and_lanes_are_found_by_their_bytes(tmp_path: Path) -> None:
    """Eight lanes, time first, each of which begins anew at another step."""
    lanes, steps = 8, 40
    count = itertools.count()
    now = [next(count) for _ in range(lanes)]
    here, there = np.zeros((steps, lanes), np.int64), np.zeros((steps, lanes), np.int64)
    for step, lane in itertools.product(range(steps), range(lanes)):
        here[step, lane], there[step, lane] = now[lane], next(count)
        now[lane] = next(count) if (step + lane) % 9 == 8 else int(there[step, lane])
    both = {"frame": half_noise_frames(here.reshape(-1)).reshape(steps, lanes, 8, 16)}
    both["next"] = {"frame": half_noise_frames(there.reshape(-1)).reshape(steps, lanes, 8, 16)}  # type: ignore[assignment]
    data = TensorDict(both, [steps, lanes], names=["time", None])
    with buffer(tmp_path / "a.exp", None) as rb:
        rb.extend(data, source="lanes")
        column = rb.storage.state.columns.columns[rb.storage.require_schema().place_of(("frame",))]
        alike = np.isin(here, there).sum()
        assert (column.distances(np.arange(steps * lanes)) > 0).sum() == alike > 250
        assert torch.equal(rb[:]["frame"], half_noise_frames(here.reshape(-1)))


def test_a_field_that_shares_can_be_dropped_but_not_its_source(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with buffer(path) as rb:
        extend_all(rb, *ROWS.parts(75))
        with pytest.raises(SchemaError, match=r"'frame' are stored with those of 'next\.frame'"):
            rb.columns.drop(("next", "frame"))
        rb.columns.add("more", fill=7, dtype="int64")
        assert numbers_in(rb) == list(range(15, 75))
        rb.extend(batch(75, 5).set("more", torch.zeros(5, dtype=torch.int64)))
        assert numbers_in(rb) == list(range(20, 80))
        rb.columns.drop("frame")
        assert torch.equal(rb[:]["next", "frame"], half_noise_frames(after(rb[:]["number"])))
    assert verify(path) == []
    with buffer(path) as rb:
        assert torch.equal(rb[:]["next", "frame"], half_noise_frames(after(rb[:]["number"])))


@pytest.mark.guarantee("rows/bits")
def test_rows_that_stay_outlive_those_with_which_they_lie(tmp_path: Path) -> None:
    """Next rows that have left stay as long as others, even later ones, may lie there."""
    length = 24

    def played(number: int) -> TensorDict:
        numbers = np.arange(length * (number - 1), length * number)
        done = torch.zeros(length, 1, dtype=torch.bool)
        done[-1] = True
        following = {"frame": half_noise_frames(numbers + 1), "done": done, "terminated": done}
        return TensorDict({"frame": half_noise_frames(numbers), "next": following}, [length])

    with buffer(tmp_path / "run.exp", None) as rb:
        for number in range(1, 7):
            rb.extend(played(number))
        assert rb.storage.retention.delete(np.array([2, 4, 6])).rows == 3 * length
        for number in (7, 8):
            rb.extend(played(number))
        rb.storage.retention.delete(np.array([7]))
        kept = np.concatenate([np.arange(length * (n - 1), length * n) for n in (1, 3, 5, 8)])
        for _ in range(2):
            rows = rb[:]
            assert (rows["frame"] == half_noise_frames(kept)).all()
            assert (rows["next", "frame"] == half_noise_frames(kept + 1)).all()
            rb.flush()
    assert verify(tmp_path / "run.exp") == []
    with expstore.open(tmp_path / "run.exp") as rb:
        assert (rb[:]["frame"] == half_noise_frames(kept)).all()


def test_frames_that_never_change_cost_no_store_in_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chunk is lost, and the one of the turn before has the very same bytes: its rows are not there."""
    still = TensorDict({"frame": torch.zeros(20, 8, 16, dtype=torch.uint8)}, [20])
    path, layout = tmp_path / "a.exp", ColumnLayout(fields={"frame": {"layout": "packed", "rows": 4}})
    monkeypatch.setattr(tuning, "MEMTABLE_BATCH_BYTES", 0)  # records do not carry the rows
    rb = buffer(path, CAPACITY, layout)
    for _ in range(6):
        rb.extend(still)
    rb.flush()
    rb.storage.background.stop()  # no mark covers what is extended now
    rb.extend(still)  # ids 121 to 140 of a ring of 80: the turn before had all of their slots
    rb.storage.drain()
    cut = Path(shutil.copytree(path, tmp_path / "cut.exp"))
    rb.close()
    (cut / "STATE").unlink()
    (filling,) = (cut / "columns/frame").glob("open.*")
    file = Disk().open(filling, write=False)
    chunks = scan_chunks(file, 8, 1)
    file.close()
    filling.write_bytes(filling.read_bytes()[: int(chunks.offsets[2]) - 10])  # slots 32 to 39 had been synced
    assert newest(cut, "r") == newest(cut, "a") == 120


def newest(path: Path, mode: Any) -> int:
    """The newest row, all of which are read."""
    with expstore.open(path, mode=mode) as rb:
        assert not rb[:]["frame"].any()
        return rb.storage.last


def test_a_version_holds_older_rows_of_a_shard_that_is_being_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest row that can be read is the first of its chunk, and lies with one of the chunk before."""
    monkeypatch.setattr(tuning, "PACKED_SHARD_ROWS", 64)
    with buffer(tmp_path / "a.exp") as rb:
        for first in range(0, 100, 10):
            rb.extend(batch(first, 10))
        made = rb.dumps(tmp_path / "backup")
    with expstore.open(made.path, mode="r") as rb:
        assert numbers_in(rb) == list(range(40, 100))


def test_a_long_batch_that_ends_early_leaves_what_older_rows_lie_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cut = tmp_path / "a.exp", tmp_path / "cut.exp"
    put = _BatchWrite.put

    def leave(write: _BatchWrite, state: Any) -> bool:
        in_columns = put(write, state)
        shutil.copytree(path, cut)
        return in_columns

    with buffer(path) as rb:
        for first in range(0, 90, 10):
            rb.extend(batch(first, 10))
        with monkeypatch.context() as patch:
            patch.setattr(_BatchWrite, "put", leave)
            rb.extend(batch(90, 48))
    with expstore.open(cut) as rb:  # rows 91 to 138 were never published, and had 58 older ones given up
        assert numbers_in(rb) == list(range(58, 90))


@pytest.mark.some(2)
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("over", [0, 1, 4, 7])
def test_rows_in_flight_hide_none_that_can_be_read(tmp_path: Path, shares: bool, over: int) -> None:
    """As many as there are spare slots, and the newest chunk of the next turn has begun."""
    fields = {**FIELDS, "frame": {**FIELDS["frame"], "share_next": shares}}
    with buffer(tmp_path / "a.exp", layout=ColumnLayout(fields=fields)) as rb:
        storage, last = rb.storage, 0
        rb.extend(batch(0, 1))
        for last in range(1, 2 * storage.geometry.slots + over - storage.geometry.spare, 1):
            rb.extend(batch(last, 1))
        rb.flush()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_BatchWrite, "append_record", stop)
            with pytest.raises(InterruptedError):
                rb.extend(batch(last + 1, storage.geometry.spare))
        with expstore.open(tmp_path / "a.exp", mode="r") as reader:
            assert numbers_in(reader) == list(range(last + 1 - CAPACITY, last + 1))


def test_rows_before_the_spare_are_not_taken_for_whole(tmp_path: Path) -> None:
    """Their own slots are as they were for longer, but not what they may lie with."""
    with buffer(tmp_path / "a.exp") as rb:
        for first in range(0, 150, 10):
            rb.extend(batch(first, 10))
        with expstore.open(tmp_path / "a.exp", mode="r") as reader:
            for storage in (rb.storage, reader.storage):
                assert storage.geometry.slots == CAPACITY + 20 + 16
                assert not storage.intact(np.array([150 - CAPACITY - 20, 150]))
                assert storage.intact(np.array([150 - CAPACITY - 20 + 1, 150]))


def stop(*_: Any, **__: Any) -> None:
    raise InterruptedError
