"""Priorities in RAM and the pages to be written, with a column that only records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from expstore.core.geometry import RingGeometry
from expstore.core.lock_order import LockOrder
from expstore.core.values import Array, Window
from expstore.errors import StorageError
from expstore.storages.columns.priorities import PAGE_ROWS, Priorities, StoredPriorities


class Column:
    """A column in one file, which may fail."""

    def __init__(self, ready: int) -> None:
        self.ready, self.values, self.fails = ready, np.ones(ready, np.float32), False
        self.path = "column"

    def spans(self, slot: int, count: int) -> list[tuple[Any, int, int, int]]:
        return [(self, slot, 0, count)]

    def write(self, values: Array, at: int) -> None:
        if self.fails:
            raise StorageError("the disk is full")
        self.values[at : at + values.size] = values


def stored(size: int) -> StoredPriorities:
    priorities = StoredPriorities(LockOrder())
    priorities.load(np.ones(size, np.float32), dirty=False)
    return priorities


def test_new_rows_start_at_the_largest() -> None:
    priorities = Priorities()
    priorities.start([(0, 0, 3)], None, priorities.largest)
    priorities.set(np.array([2]), np.array([1]), np.array([5.0], np.float32))
    priorities.start([(3, 0, 2)], None, priorities.largest)
    assert priorities.values[:5].tolist() == [1.0, 5.0, 1.0, 5.0, 5.0]
    assert priorities.were_set
    assert priorities.largest == 5.0


@pytest.mark.parametrize(("within", "largest"), [(True, 2.0), (False, 5.0)])
def test_the_largest_leaves_with_its_row_where_readable_rows_count(within: bool, largest: float) -> None:
    priorities, ring = Priorities(), RingGeometry(4, spare=4)
    priorities.within = within
    priorities.start([(0, 0, 4)], ring.slots, priorities.largest)
    priorities.set(np.array([1, 3]), np.array([0, 2]), np.array([5.0, 2.0], np.float32))
    if within:
        priorities.lower_largest(1, Window(0, 4), ring)
    assert priorities.largest == largest


def test_reopening_keeps_watchers_and_requests() -> None:
    class Watcher:
        def on_priorities(self, storage: Any, places: Any) -> None:
            seen.append((storage, places.tolist()))

    seen: list[Any] = []
    watcher = Watcher()
    former = stored(8)
    former.watch(watcher)
    former.within = True
    former.set(np.array([4]), np.array([3]), np.array([9.0], np.float32))
    priorities = StoredPriorities(LockOrder(), former)
    priorities.tell("store", np.array([1]))
    assert seen == [("store", [1])]
    assert (priorities.within, priorities.largest, priorities.lock) == (True, 9.0, former.lock)


def test_a_column_gets_the_pages_that_it_lacks_and_no_others() -> None:
    size = 3 * PAGE_ROWS
    priorities, column = stored(size), Column(size)
    slots = np.array([0, 2 * PAGE_ROWS + 1])
    priorities.set(slots + 1, slots, np.array([2.0, 3.0], np.float32))
    priorities.values[PAGE_ROWS] = 7.0  # not noted
    assert priorities.write(column)  # type: ignore[arg-type]
    assert column.values[slots].tolist() == [2.0, 3.0]
    assert column.values[PAGE_ROWS] == 1.0
    assert not priorities.write(column)  # type: ignore[arg-type]


def test_pages_that_were_not_written_stay_dirty() -> None:
    priorities, column = stored(PAGE_ROWS), Column(PAGE_ROWS)
    priorities.set(np.array([1]), np.array([0]), np.array([2.0], np.float32))
    column.fails = True
    with pytest.raises(StorageError):
        priorities.write(column)  # type: ignore[arg-type]
    column.fails = False
    priorities.write(column)  # type: ignore[arg-type]
    assert column.values[0] == 2.0


def test_an_array_that_grows_has_its_pages() -> None:
    priorities, column = StoredPriorities(LockOrder()), Column(4 * PAGE_ROWS)
    priorities.start([(0, 0, 2 * PAGE_ROWS + 1)], None, priorities.largest)
    slot = np.array([2 * PAGE_ROWS])
    priorities.set(slot + 1, slot, np.array([4.0], np.float32))
    priorities.write(column)  # type: ignore[arg-type]
    assert column.values[slot].tolist() == [4.0]
