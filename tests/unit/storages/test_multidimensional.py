"""Storages with more than one dim: every cell is a row with an id and a position along each dim."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from expstore._open import open as open_store
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.core.id_set import NO_IDS, IdSet
from expstore.episodes.segmentation import Steps
from expstore.errors import NotFoundError, SchemaError, StateError, StorageError
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import Field, Schema
from expstore.storages.base import Storage
from expstore.storages.factory import ZarrStorage
from expstore.storages.follower import FollowerStorage
from expstore.storages.memory import MemoryStorage
from expstore.writers.writers import RoundRobinWriter
from tests.support.batches import closing_factory
from tests.support.forks import in_child
from tests.support.tuned import set_spare_slots

SCHEMA = Schema([Field(("n",), "int64", ())])
KEYS = find_keys(SCHEMA)


@pytest.fixture(params=["memory", "zarr"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Storage]]:
    """A factory of storages of both kinds."""
    names = itertools.count()

    def create(capacity: int | None = None, **options: Any) -> Storage:
        if request.param == "memory":
            return MemoryStorage(capacity, **options)
        return ZarrStorage(tmp_path / f"{next(names)}.exp", capacity, **options)

    with closing_factory(create) as factory:
        yield factory


def kept_in(path: Path, *given: Any, **options: Any) -> contextlib.closing[ZarrStorage]:
    """Return a storage on disk, for the length of a block."""
    return contextlib.closing(ZarrStorage(path, *given, **options))


def put(storage: Storage, count: int) -> np.ndarray:
    """Append rows whose values are their ids."""
    with storage.lock:
        ids = np.arange(storage.last + 1, storage.last + 1 + count)
        found = RoundRobinWriter().write(storage, [ids.copy()], Steps(count), source=None, info="")
    np.testing.assert_array_equal(found, ids)
    return ids


@pytest.mark.parametrize("capacity", [20, None])
def test_places_against_numpy(
    make: Callable[..., Storage], capacity: int | None, rng: np.random.Generator
) -> None:
    storage = make(capacity, ndim=3)
    storage.prepare(SCHEMA, KEYS, (2, 3))
    visible = np.zeros((4, 2, 3), int)  # 24 cells
    for step in range(11):
        ids = put(storage, 6)
        if capacity is None and step >= 4:
            break
        visible[step % 4] = ids.reshape(2, 3)
        filled = min(step + 1, 4)
        assert storage.shape == (filled, 2, 3)
        places = np.stack([rng.integers(0, size, 50) for size in (filled, 2, 3)], axis=1)
        numbers = storage.geometry.ravel(places, storage.window)
        np.testing.assert_array_equal(storage.geometry.unravel(numbers), places)
        expected = visible[tuple(places.T)]
        np.testing.assert_array_equal(storage.geometry.ids_at(numbers, storage.window), expected)
        np.testing.assert_array_equal(
            storage.read(storage.geometry.ids_at(numbers, storage.window))[0], expected
        )
        from_the_end = storage.geometry.ravel(places - [filled, 2, 3], storage.window)
        np.testing.assert_array_equal(from_the_end, numbers)
    np.testing.assert_array_equal(storage.geometry.unravel(np.array([-1, 5])), [[-1, -1, -1], [0, 1, 2]])


def test_missing_cells_are_refused(make: Callable[..., Storage]) -> None:
    storage = make(12, ndim=2)
    with pytest.raises(NotFoundError, match=r"\[0, 0\].*shape \[0, 0\]"):
        storage.geometry.ravel(np.array([[0, 0]]), storage.window)
    storage.prepare(SCHEMA, KEYS, (3,))
    put(storage, 6)
    for place in ([0, 3], [-3, 0], [0, -4], [4, 0]):
        with pytest.raises(NotFoundError, match="no row at") as caught:
            storage.geometry.ravel(np.array([[0, 0], place]), storage.window)
        assert str(place) in str(caught.value)
    with pytest.raises(NotFoundError, match="index 6"):  # a cell that no row has come to yet
        storage.geometry.ids_at(storage.geometry.ravel(np.array([[2, 0]]), storage.window), storage.window)
    with pytest.raises(NotFoundError, match="2 numbers each"):
        storage.geometry.ravel(np.array([0, 1]), storage.window)


def test_batches_of_other_dims_change_nothing(make: Callable[..., Storage]) -> None:
    storage = make(10, ndim=2)
    for dims, message in (
        ((), r"ndim=2 takes batches of 2 dims, got \[time\]"),
        ((3, 4), "time, 3, 4"),
        ((0,), "0"),
    ):
        with pytest.raises(SchemaError, match=message):
            storage.prepare(SCHEMA, KEYS, dims)
    assert (storage.schema, storage.geometry.dims, storage.capacity) == (None, (), 10)
    storage.prepare(SCHEMA, KEYS, (3,))
    with pytest.raises(SchemaError, match=r"\[time, 3\], the batch has \[time, 4\]"):
        storage.geometry.check_dims((4,))
    storage.geometry.check_dims((3,))
    put(storage, 3)
    with pytest.raises(SchemaError, match=r"4 rows are not a whole number of steps of dims \[3\]"):
        put(storage, 4)
    assert storage.last == 3
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="ndim must be at least 1"):
            make(10, ndim=wrong)


def test_columns_that_could_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise StorageError("no space")

    with kept_in(tmp_path / "run.exp", 10, ndim=2) as storage:
        with monkeypatch.context() as patch:
            patch.setattr("expstore.storages.columns.column_set_writer.WritableColumns.create", fail)
            with pytest.raises(StorageError):
                storage.prepare(SCHEMA, KEYS, (3,))
        assert (storage.geometry.dims, storage.capacity, storage.geometry.lanes) == ((), 10, 1)
        storage.prepare(SCHEMA, KEYS, (4,))
        assert (storage.geometry.dims, storage.capacity) == ((4,), 12)


def test_a_store_keeps_its_dims(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    with kept_in(path, 100, ndim=2) as storage:
        follower = FollowerStorage(path)
        assert (follower.ndim, follower.geometry.dims, follower.capacity) == (2, (), 100)
        storage.prepare(SCHEMA, KEYS, (3,))
        ids = put(storage, 99)
        follower.follow(priorities=True)
        assert (follower.geometry.dims, follower.capacity, follower.shape) == ((3,), 102, (33, 3))
        np.testing.assert_array_equal(follower.read(ids)[0], ids)
        follower.close()
    for options in ({}, {"capacity": 100}, {"capacity": 102, "ndim": 2}):
        with kept_in(path, **options) as storage:
            assert (storage.ndim, storage.geometry.dims) == (2, (3,))
            assert (storage.capacity, storage.shape) == (102, (33, 3))
    for options in ({"capacity": 99}, {"capacity": 103}, {"ndim": 1}, {"ndim": 3}):
        with pytest.raises(StateError, match=next(iter(options))):
            ZarrStorage(path, **options)
    with open_store(path, mode="r") as rb:
        assert rb.sql("SELECT max(n), count(*) FROM transitions").fetchall() == [(99, 99)]
        assert rb.storage.geometry.unravel(np.array([98])).tolist() == [[32, 2]]


@pytest.mark.some(2)
@pytest.mark.parametrize("capacity", [100, 30, None])
def test_versions_keep_dims(make: Callable[..., Storage], tmp_path: Path, capacity: int | None) -> None:
    first = make(50, ndim=2)
    first.prepare(SCHEMA, KEYS, (3,))
    put(first, 42)
    ReplayBuffer(storage=first).dumps(tmp_path / "versions")
    second = make(capacity)  # what it has is the version's
    rb = ReplayBuffer(storage=second)
    for _ in range(2):
        rb.loads(tmp_path / "versions")
        rounded = None if capacity is None else -(-capacity // 3) * 3
        assert (second.ndim, second.geometry.dims, second.capacity) == (2, (3,), rounded)
        kept = 42 if capacity != 30 else 30
        assert second.window.size == kept
        cells = second.geometry.unravel(second.geometry.index_of(second.window.ids()))
        np.testing.assert_array_equal(cells[:, 1], np.tile([0, 1, 2], kept // 3))
        np.testing.assert_array_equal(second.read(second.window.ids())[0], np.arange(43 - kept, 43))
        put(second, 3)
        assert second.last % 3 == 0
    other = make(50, ndim=2)
    other.prepare(SCHEMA, KEYS, (2,))
    with pytest.raises(SchemaError, match=r"\[time, 3\].*\[time, 2\]"):
        ReplayBuffer(storage=other).loads(tmp_path / "versions")


def test_rows_are_given_up_by_whole_steps(
    make: Callable[..., Storage], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_spare_slots(monkeypatch, 4)
    storage = make(20, ndim=2)
    storage.prepare(SCHEMA, KEYS, (3,))
    assert (storage.capacity, storage.geometry.spare) == (21, 6)
    put(storage, 21)
    put(storage, 12)  # longer than the spare
    assert storage.window.size == 21 - 6 + 6 == 21
    assert storage.window.low % 3 == 0
    put(storage, 63)  # longer than the ring
    np.testing.assert_array_equal(storage.read(storage.window.ids())[0], np.arange(76, 97))
    storage.clear()
    put(storage, 6)
    np.testing.assert_array_equal(
        storage.geometry.unravel(storage.geometry.index_of(storage.window.ids()))[:, 0], [0, 0, 0, 1, 1, 1]
    )


def test_a_kill_leaves_whole_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.exp"

    def write() -> None:
        storage = ZarrStorage(path, 100, ndim=3)
        storage.prepare(SCHEMA, KEYS, (2, 3))
        for count in (6, 240, 12):
            put(storage, count)

    in_child(write)
    with kept_in(path, 100, ndim=3) as storage:
        assert (storage.geometry.dims, storage.capacity, storage.shape) == ((2, 3), 102, (17, 2, 3))
        ids = storage.window.ids()
        np.testing.assert_array_equal(ids, np.arange(258 - 102 + 1, 259))
        np.testing.assert_array_equal(storage.read(ids)[0], ids)
        places = storage.geometry.unravel(storage.geometry.index_of(ids))
        np.testing.assert_array_equal(places[:6, 1:], [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]])


def test_steps_of_which_a_repair_gave_up_cells(make: Callable[..., Storage]) -> None:
    storage = make(30, ndim=2)
    storage.set(range(4), TensorDict({"n": torch.arange(12).reshape(4, 3)}, [4, 3]))
    storage._state.stored = dataclasses.replace(storage.window, deleted=IdSet.of([(5, 5)]))
    assert storage.get(0)["n"].tolist() == [0, 1, 2]
    assert len(storage) == 11
    assert storage.get(slice(None))["n"].tolist() == [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
    assert storage.get((1, 2))["n"] == 8
    assert [row["n"].tolist() for row in storage] == [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
    storage._state.stored = dataclasses.replace(storage.window, deleted=NO_IDS)
    assert len(list(storage)) == 4
