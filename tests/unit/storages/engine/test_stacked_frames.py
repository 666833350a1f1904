"""Stores whose observations are stacks of images: each image is stored once, and no byte of a row changes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore.core import tuning
from expstore.maintenance import verify
from expstore.storages.format.layout import ColumnLayout
from tests.support.damaged_stores import Broken, in_child
from tests.support.framed_rows import half_noise_frames
from tests.support.stores import extend_all
from tests.support.tuned import set_spare_slots
from tests.support.two_lanes import CAPACITY, TwoLanes

pytestmark = pytest.mark.usefixtures("no_syncs")

FIELDS = {"frame": {"layout": "packed", "rows": 4}, "next.frame": {"layout": "packed", "rows": 8}}
PARTS = 4


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Let stores have short shards and a short ring."""
    patch.setattr(tuning, "PACKED_SHARD_ROWS", 32)
    patch.setattr(tuning, "UNBOUNDED_PACKED_SHARD_ROWS", 32)
    patch.setattr(tuning, "PACKED_LOOKBACK_ROWS", (24, 24))
    patch.setattr(tuning, "MEMTABLE_BATCH_BYTES", 512)  # the payload of a row that is added is compressed
    patch.setattr(tuning, "MEMTABLE_BYTES", 9000)
    set_spare_slots(patch, 20)


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def stacks(numbers: Any) -> torch.Tensor:
    """Return for frames of two lanes the stacks that end with them. uint8 `[n, 4, 8, 16]`."""
    numbers = np.asarray(numbers)
    return torch.stack([half_noise_frames(numbers + 100 - 2 * back) for back in (3, 2, 1, 0)], 1)


ROWS = TwoLanes(stacks, ColumnLayout(fields=FIELDS))


@pytest.mark.guarantee("rows/bits")
@pytest.mark.parametrize("capacity", [None, CAPACITY])
def test_versions_and_smaller_stores_have_the_stacks(tmp_path: Path, capacity: int | None) -> None:
    path, place = tmp_path / "a.exp", tmp_path / "backup"
    with ROWS.buffer(path, capacity) as rb:
        extend_all(rb, *ROWS.parts(133, 11))
        columns = rb.storage.state.columns.packed.values()
        stored = [int((column.distances(np.arange(32, 64)) == 0).sum()) for column in columns]
        made = rb.dumps(place)
        extend_all(rb, *[ROWS.batch(first, 10) for first in range(133, 213, 10)])
    assert verify(path) == []
    # Each row adds an image, a next one. At two ends all of the next stack is new; then the newest image is
    # stored with the observation, and once more with the next stack.
    assert capacity is not None or stored == [2, 32 + 2 * (PARTS - 1 + 1)]
    wanted = list(range(0 if capacity is None else 133 - capacity, 133))
    with expstore.open(place, version=made.number, mode="r") as rb:
        assert ROWS.numbers_in(rb) == wanted
    for size in (None, 60, 25):
        with ROWS.buffer(tmp_path / f"{size}.exp", size) as rb:
            rb.extend(ROWS.batch(5000, 30))
            rb.loads(place)
            assert ROWS.numbers_in(rb) == (wanted if size is None else wanted[-size:])
            rb.extend(ROWS.batch(133, 15))
            assert ROWS.numbers_in(rb)[-15:] == list(range(133, 148))
        assert verify(tmp_path / f"{size}.exp") == []


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "sound.exp"
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        with ROWS.buffer(path) as rb:
            extend_all(rb, *ROWS.parts(150, 10), flush_every=5)
    return path


@pytest.fixture
def broken(sound: Path) -> Broken:
    return Broken(sound, ["frame", "next/frame"], ROWS.right, range(90, 150))


@pytest.mark.parametrize("count", [8, pytest.param(30, marks=pytest.mark.torture)])
def test_damage_anywhere_is_an_error_and_never_other_rows(broken: Broken, tmp_path: Path, count: int) -> None:
    assert in_child(lambda: broken.faults(tmp_path, count, 1)) == []


@pytest.mark.guarantee("damage/repair")
@pytest.mark.slow
@pytest.mark.parametrize("count", [4, pytest.param(12, marks=pytest.mark.torture)])
def test_a_repair_costs_the_rows_that_were_named_and_no_others(
    broken: Broken, tmp_path: Path, count: int
) -> None:
    assert in_child(lambda: broken.repairs(tmp_path, count, 3)) == []


def play(steps: int, lanes: int, seed: int, *, last_axis: bool) -> tuple[Any, Any]:
    """Return observations and next ones of lanes in turn, with resets, masked next ones and changed bytes."""
    random = np.random.default_rng(seed)
    now: dict[int, Any] = {}
    pairs = []
    for row in range(steps):
        lane = row % lanes
        fresh = random.integers(0, 256, (2, 16, 16), dtype=np.uint8)
        before = now.get(lane, np.stack([fresh[0]] * PARTS))
        both = np.stack([before, np.concatenate([before[1:], fresh[1:]])])
        now[lane] = both[1].copy()
        kind = random.integers(0, 12)
        if kind == 0:
            del now[lane]
        elif kind == 1:
            both[1] = 0
            del now[lane]
        elif kind < 4:  # in any of the eight images
            both[random.integers(0, 2), random.integers(0, PARTS), 3, 7] ^= 64
        pairs.append(np.moveaxis(both, 1, -1) if last_axis else both)
    found = np.ascontiguousarray(np.stack(pairs, 1))
    return found[0], found[1]


def copy_running(path: Path, target: Path) -> None:
    """Copy a store that a thread may be packing: a file that leaves meanwhile begins the copy anew."""
    while True:
        try:
            shutil.copytree(path, target)
        except shutil.Error:
            shutil.rmtree(target)
        else:
            return


@pytest.mark.guarantee("rows/bits")
@settings(deadline=None, max_examples=4)
@given(
    steps=st.integers(1, 120),
    lanes=st.integers(1, 8),
    size=st.integers(5, 60),
    capacity=st.sampled_from([None, CAPACITY]),
    last_axis=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_byte_of_stacks_is_kept(
    tmp_path_factory: pytest.TempPathFactory,
    steps: int,
    lanes: int,
    size: int,
    capacity: int | None,
    last_axis: bool,
    seed: int,
) -> None:
    path = tmp_path_factory.mktemp("stacks") / "a.exp"
    observed, following = play(steps, lanes, seed, last_axis=last_axis)

    def check(rb: Any) -> None:
        rows, most = rb[:], capacity or steps
        held = sorted(
            range(max(0, steps - most), steps), key=lambda row: row % most
        )  # in the order of indices
        np.testing.assert_array_equal(rows["frame"], observed[held])
        np.testing.assert_array_equal(rows["next", "frame"], following[held])

    with ROWS.buffer(path, capacity) as rb:
        for first in range(0, steps, size):
            part = slice(first, first + size)
            values = {"frame": torch.from_numpy(observed[part])}
            after = {"frame": torch.from_numpy(following[part])}
            rows = TensorDict({**values, "next": after}, [len(observed[part])])
            if first // size % 2:
                rb.extend(rows)
            else:
                for row in rows.unbind(0):
                    rb.add(row)
        copy_running(path, path.parent / "killed.exp")
        check(rb)
        with expstore.open(path, mode="r") as reader:
            check(reader)
    for one in (path, path.parent / "killed.exp"):
        assert verify(one) == []
        with ROWS.buffer(one, capacity) as rb:
            check(rb)
