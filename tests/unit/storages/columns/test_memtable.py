"""The memtable: recent rows, and rows that replace others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from expstore.core.lock_order import LockOrder
from expstore.disk.checkpointed import Pin
from expstore.errors import StorageError
from expstore.storages.columns.memtable import Memtable, Overlay, ReplacedRows, RowBatch
from expstore.storages.columns.payload import payload_parts
from expstore.storages.columns.priorities import StoredPriorities
from tests.unit.storages.columns.test_column import KINDS, Kind, Store

SLOTS = 8


class Columns:
    """Two columns: a priority in place 1, a number in place 0."""

    def __init__(self) -> None:
        self.columns = [self, self]
        self.values = [np.arange(SLOTS), np.zeros(SLOTS)]

    def gather_rows(self, slots: Any, places: Any) -> list[Any]:
        return [self.values[place][slots] for place in places]


@pytest.fixture
def rows() -> ReplacedRows:
    return ReplacedRows()


def put(rows: ReplacedRows, slots: list[int], numbers: list[int]) -> None:
    columns = [np.full(len(slots), 2.0), np.array(numbers)]
    rows.add(np.array(slots), columns, lambda: RowBatch(SLOTS, [1, 0], Pin(0)))


def seen(rows: ReplacedRows) -> list[int]:
    (numbers,) = rows.read_rows(Columns(), np.arange(SLOTS), [0])  # type: ignore[arg-type]
    return [int(number) for number in numbers]


def test_the_newest_row_of_a_slot_is_read(rows: ReplacedRows) -> None:
    put(rows, [1, 3], [10, 30])
    put(rows, [3], [31])
    assert seen(rows) == [0, 10, 2, 31, 4, 5, 6, 7]
    assert rows.waiting_bytes == 3 * 16


def test_rows_are_read_while_they_are_written_and_newer_ones_over_them(rows: ReplacedRows) -> None:
    put(rows, [1, 3], [10, 30])
    batch = rows.begin()
    put(rows, [3], [31])
    assert rows.begin() is batch, "an attempt that failed is made again first"
    slots, (_, numbers) = batch.columns()
    assert (slots.tolist(), numbers.tolist()) == ([1, 3], [10, 30])
    assert seen(rows) == [0, 10, 2, 31, 4, 5, 6, 7]
    over = rows.overlay()
    values = np.arange(SLOTS)
    over.lay_onto(0, values)
    assert values.tolist() == [0, 10, 2, 31, 4, 5, 6, 7]
    rows.end()
    assert seen(rows) == [0, 1, 2, 31, 4, 5, 6, 7]
    assert rows


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    """A ring of 24 slots, in which rows 7 to 30 are."""
    made = Store.make(tmp_path, KINDS[request.param], 24)
    yield made
    made.columns.close()


def memtable_of(store: Store, count: int) -> Memtable[Pin]:
    """Rows that come behind those of the columns, one by one."""
    priorities = StoredPriorities(LockOrder())
    priorities.load(np.arange(24, dtype=np.float32), dirty=False)
    memtable: Memtable[Pin] = Memtable(LockOrder(), priorities)
    for one in range(31, 31 + count):
        ids = np.array([one])
        parts = payload_parts(store.columns, [store.kind.values(ids)], np.stack([ids] * 4))
        memtable.add(one, 1, b"".join(parts))
    return memtable


def check_rows(store: Store, memtable: Memtable[Pin], ids: Any) -> None:
    found = memtable.read_rows(store.columns, store.slots_of(ids), [0, 1, 5])
    store.kind.same(found[0], ids)
    np.testing.assert_array_equal(found[1], ids)


def test_recent_rows_are_read_from_memory_until_they_are_drained(store: Store) -> None:
    memtable = memtable_of(store, 20)  # around the end of the ring
    ids = [27, 31, 50, 48, 29, 49]
    assert memtable.holds(store.columns, store.slots_of([31]))
    assert not memtable.holds(store.columns, store.slots_of([27, 30]))
    check_rows(store, memtable, ids)
    told: list[int] = []
    memtable.drain(store.columns, told.append)
    assert (memtable.count, told) == (0, [50])
    check_rows(store, memtable, ids)
    store.kind.same(store.columns.columns[0].gather(store.slots_of(ids)), ids)
    memtable.drain(store.columns, told.append)
    assert told == [50]


def test_recent_rows_stay_where_the_columns_cannot_be_written(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    memtable = memtable_of(store, 3)

    def fail(*_: Any) -> None:
        raise StorageError("the disk is full")

    monkeypatch.setattr(store.columns, "write_parts", fail)
    with pytest.raises(StorageError):
        memtable.drain(store.columns, fail)
    check_rows(store, memtable, [33, 30, 31])
    (priorities,) = memtable.read_rows(store.columns, store.slots_of([31, 30]), [5])
    np.testing.assert_array_equal(priorities, [6, 1])  # that of row 30 from the column


@pytest.mark.parametrize("kind", [KINDS["flat"], KINDS["packed"]], ids=["flat", "packed"])
def test_rows_lie_over_a_column(tmp_path: Path, kind: Kind) -> None:
    store = Store.make(tmp_path, kind, 24)
    over = Overlay()
    kind.same(over.read_rows(store.columns, store.slots_of([8, 30]), [0])[0], [8, 30])
    over.put(0, store.slots_of([28, 8]), kind.values([3, 4]))
    over.put(0, store.slots_of([29, 8]), kind.values([5, 6]))
    assert over
    kind.same(over.read_rows(store.columns, store.slots_of([8, 27, 29, 28]), [0])[0], [6, 27, 5, 3])
    kind.same(np.concatenate(over.views(store.columns, 0, 7, 24)), [7, 6, *range(9, 28), 3, 5, 30])
    np.testing.assert_array_equal(np.concatenate(over.views(store.columns, 1, 7, 24)), np.arange(7, 31))
    store.columns.close()


@pytest.mark.parametrize("slots", [None, 8])
def test_a_slot_is_held_if_a_recent_row_lies_in_it(slots: int | None) -> None:
    """Also where the recent rows lie at both ends of the ring."""
    columns: Any = SimpleNamespace(slots=slots)
    for first_id in (1, 5, 7, 8, 9, 14):
        order = LockOrder()
        memtable: Memtable[Pin] = Memtable(order, StoredPriorities(order))
        memtable.add(first_id, 3, b"")
        recent = {number if slots is None else number % slots for number in range(first_id - 1, first_id + 2)}
        held = [slot for slot in range(slots or 20) if memtable.holds(columns, np.array([slot]))]
        assert held == sorted(recent), first_id
