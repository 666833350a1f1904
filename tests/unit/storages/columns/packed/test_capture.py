"""Snapshots of packed fields share the store's shards, and have the rows of one moment for every reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from tensordict import TensorDict

import expstore
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, StateError
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import ZarrStorage
from expstore.storages.format.layout import ColumnLayout
from expstore.writers.writers import TensorDictMaxValueWriter
from tests.support.batches import counted_frames, numbered_rows
from tests.support.stores import open_zarr

pytestmark = pytest.mark.usefixtures("no_syncs")

PACKED = ColumnLayout(fields={"frame": {"layout": "packed", "rows": 4}})


@pytest.fixture(autouse=True)
def short_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of four chunks."""
    monkeypatch.setattr(tuning, "PACKED_SHARD_ROWS", 16)
    monkeypatch.setattr(tuning, "UNBOUNDED_PACKED_SHARD_ROWS", 16)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "backup"


def make(path: Path, capacity: int | None = None, layout: ColumnLayout = PACKED, **options: Any) -> Any:
    return open_zarr(path, capacity, layout=layout, **options)


def rows(count: int, start: int = 0) -> TensorDict:
    return numbered_rows(count, start, frame=lambda number: counted_frames(7 * number, 64))


def content(rb: ReplayBuffer) -> tuple[list[int], np.ndarray]:
    window = rb.storage.window
    ids = window.ids()
    number, frame = rb.storage.read(ids) if ids.size else (np.zeros(0, int), np.zeros((0, 64)))
    return number.tolist(), np.asarray(frame)


def holds(rb: ReplayBuffer, first: int, count: int) -> bool:
    number, frame = content(rb)
    return number == list(range(first, first + count)) and bool(
        (frame == rows(count, first)["frame"].numpy()).all()
    )


def shards(version: Path) -> dict[str, int]:
    folder = version / "columns" / "frame"
    return {p.name: p.stat().st_ino for p in folder.iterdir() if p.name != "zarr.json"}


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("capacity", "count"), [(None, 3), (None, 64), (None, 75), (40, 39), (40, 75), (40, 333)]
)
def test_a_version_is_the_store_as_it_was(
    tmp_path: Path, place: Path, capacity: int | None, count: int
) -> None:
    with make(tmp_path / "store", capacity) as rb:
        for start in range(0, count, 11):
            rb.extend(rows(min(11, count - start), start))
        first = max(0, count - (capacity or count))
        assert holds(rb, first, count - first)
        made = rb.dumps(place)
        rb.extend(rows(90, count))
        assert holds(rb, max(0, count + 90 - (capacity or 1000)), min(count + 90, capacity or 1000))
    assert made.rows == count - first
    with expstore.open(place, mode="r") as old:
        assert holds(old, first, count - first)
    # All shards are finished: whoever reads Zarr sees the rows, too.
    assert {name.split(".")[0] for name in shards(made.path)} == {"c"}
    group = zarr.open_group(made.path / "columns", mode="r")
    ids = np.arange(first + 1, count + 1)
    slots = ids - 1 if capacity is None else (ids - 1) % group["_row/id"].shape[0]
    assert (group["_row/id"][:][slots] == ids).all()
    assert (group["frame"][:][slots] == rows(count - first, first)["frame"].numpy()).all()


def test_finished_shards_are_the_stores_own_files(tmp_path: Path, place: Path) -> None:
    with make(tmp_path / "store") as rb:
        rb.extend(rows(70))
        one = rb.dumps(place)
        own = shards(tmp_path / "store")
        assert {name: own[name] for name in ("c.0.0", "c.1.0", "c.2.0", "c.3.0")}.items() <= shards(
            one.path
        ).items()
        two = rb.dumps(place)  # and what is not finished is shared by versions
        assert shards(two.path) == shards(one.path)
        rb.extend(rows(12, 70))
        three = rb.dumps(place)
        assert shards(three.path)["c.4.0"] != shards(one.path)["c.4.0"]
        rb.flush()
        assert shards(three.path)["c.4.0"] == shards(tmp_path / "store")["c.4.0"]
        assert two.new_bytes < one.new_bytes


class NoLinks(Disk):
    """A disk where no file has two names."""

    def link(self, old: Path, new: Path) -> bool:
        return False


class Replacing(Disk):
    """A disk on which another turn of the ring takes a shard's name just before it is linked."""

    victim: Path | None = None

    def link(self, old: Path, new: Path) -> bool:
        if self.victim is not None and old.name == "c.0.0":
            data = self.victim.read_bytes()
            old.unlink()
            old.write_bytes(data)
        return super().link(old, new)


def test_a_shard_that_is_replaced_meanwhile_is_copied(tmp_path: Path, place: Path) -> None:
    disk = Replacing()
    with make(tmp_path / "store", disk=disk) as rb:
        rb.extend(rows(64))
        rb.flush()
        disk.victim = tmp_path / "store" / "columns" / "frame" / "c.1.0"
        made = rb.dumps(place)
    with expstore.open(place, mode="r") as old:
        assert holds(old, 0, 64)
    assert shards(made.path)["c.0.0"] != shards(tmp_path / "store")["c.0.0"]


class Meanwhile(Disk):
    """A disk that lets something be done once the moment of a version is chosen."""

    act: Any = None

    def link(self, old: Path, new: Path) -> bool:
        self._do_it()
        return super().link(old, new)

    def _do_it(self) -> None:
        act, self.act = self.act, None
        if act is not None:
            act()


def test_rows_that_come_meanwhile_are_not_in_the_version(tmp_path: Path, place: Path) -> None:
    disk = Meanwhile()
    with make(tmp_path / "store", disk=disk) as rb:
        rb.extend(rows(70))

        def go_on() -> None:
            for start in range(70, 150, 10):
                rb.extend(rows(10, start))

        disk.act = go_on
        made = rb.dumps(place)
        assert len(rb) == 150
    assert made.rows == 70
    with expstore.open(place, mode="r") as old:
        assert holds(old, 0, 70)
    with make(tmp_path / "again") as rb:
        rb.loads(place)
        assert holds(rb, 0, 70)


LAYOUTS = {"flat": ColumnLayout(), "packed": PACKED}


@pytest.mark.some(2)
@pytest.mark.parametrize("other", LAYOUTS)
@pytest.mark.parametrize("own", LAYOUTS)
@pytest.mark.parametrize("before", [57, pytest.param(0, marks=pytest.mark.torture)])
@pytest.mark.parametrize("capacity", [None, 40])
def test_versions_are_restored_between_all_layouts(
    tmp_path: Path, place: Path, own: str, other: str, before: int, capacity: int | None
) -> None:
    with make(tmp_path / "store", 40, LAYOUTS[other]) as rb:
        rb.extend(rows(30))
        rb.extend(rows(37, 30))
        rb.dumps(place)
    with make(tmp_path / "target", capacity, LAYOUTS[own]) as rb:
        if before:
            rb.extend(rows(before, 1000))
        rb.loads(place)
        assert holds(rb, 27, 40)
        assert bool(rb.storage.snapshots.captures(0)) == (own == "packed")
        rb.extend(rows(25, 67))
    for _ in range(2):  # the second time what the first one left
        with make(tmp_path / "target", capacity, LAYOUTS[own]) as rb:
            first = 52 if capacity else 27
            assert holds(rb, first, 92 - first)
            assert bool(rb.storage.snapshots.captures(0)) == (own == "packed")
            rb.flush()
    with expstore.open(tmp_path / "target", mode="r") as seen:
        assert holds(seen, first, 92 - first)


def test_the_best_rows_are_not_put_into_packed_fields(tmp_path: Path, place: Path) -> None:
    writer = TensorDictMaxValueWriter(rank_key="number")
    storage = ZarrStorage(tmp_path / "best", 20, settings=Settings(flatten=True, seed=0))
    with TensorDictReplayBuffer(storage=storage, writer=writer, batch_size=8) as rb:
        rb.extend(rows(30))
        rb.dumps(place)
    with make(tmp_path / "store", 40) as rb:
        rb.extend(rows(3, 500))
        with pytest.raises(StateError, match="cannot be replaced by better ones"):
            rb.loads(place)
        assert holds(rb, 500, 3)


@pytest.mark.parametrize("disk", [Disk, NoLinks])
def test_damage_stays_damage(tmp_path: Path, place: Path, disk: type[Disk]) -> None:
    with make(tmp_path / "store") as rb:
        rb.extend(rows(64))
    path = tmp_path / "store" / "columns" / "frame" / "c.1.0"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with make(tmp_path / "store", disk=disk()) as rb:
        rb.dumps(place)
    with expstore.open(place, mode="r") as old:
        with pytest.raises(CorruptionError):
            old.storage.read(np.arange(17, 18))
        kept = np.r_[1:17, 21:65]
        frame = rows(64)["frame"].numpy()[kept - 1]
        assert (old.storage.read(kept)[1] == frame).all()
    with make(tmp_path / "other") as rb:
        rb.extend(rows(3, 500))
        with pytest.raises(CorruptionError):
            rb.loads(place)
        assert holds(rb, 500, 3)
