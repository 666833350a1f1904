"""Rows that replace others, over columns in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from expstore.storages.engine.checkpointer import Pin
from expstore.storages.engine.replaced_rows import ReplacedRows, RowBatch

SLOTS = 8


class Columns:
    """Two columns: a priority in place 1, a number in place 0."""

    def __init__(self) -> None:
        self.columns = [self, self]
        self.values = [np.arange(SLOTS), np.zeros(SLOTS)]

    def take(self, slots: Any, places: Any) -> list[Any]:
        return [self.values[place][slots] for place in places]


@pytest.fixture
def rows() -> ReplacedRows:
    return ReplacedRows()


def put(rows: ReplacedRows, slots: list[int], numbers: list[int]) -> None:
    columns = [np.full(len(slots), 2.0), np.array(numbers)]
    rows.add(np.array(slots), columns, lambda: RowBatch(SLOTS, [1, 0], Pin(0)))


def seen(rows: ReplacedRows) -> list[int]:
    (numbers,) = rows.take(Columns(), np.arange(SLOTS), [0])  # type: ignore[arg-type]
    return [int(number) for number in numbers]


def test_nothing_lies_over_the_columns_at_first(rows: ReplacedRows) -> None:
    assert not rows
    assert rows.overlay() is None
    assert (rows.begin(), rows.waiting_bytes) == (None, 0)
    assert seen(rows) == list(range(SLOTS))


def test_the_newest_row_of_a_slot_is_read(rows: ReplacedRows) -> None:
    put(rows, [1, 3], [10, 30])
    put(rows, [3], [31])
    assert seen(rows) == [0, 10, 2, 31, 4, 5, 6, 7]
    assert rows.waiting_bytes == 3 * 16


def test_rows_are_read_while_they_are_written_and_newer_ones_over_them(rows: ReplacedRows) -> None:
    put(rows, [1, 3], [10, 30])
    batch = rows.begin()
    assert batch is not None
    put(rows, [3], [31])
    assert rows.begin() is batch, "an attempt that failed is made again first"
    slots, (_, numbers) = batch.columns()
    assert (slots.tolist(), numbers.tolist()) == ([1, 3], [10, 30])
    assert seen(rows) == [0, 10, 2, 31, 4, 5, 6, 7]
    over = rows.overlay()
    assert over is not None
    values = np.arange(SLOTS)
    over.lay_onto(0, values)
    assert values.tolist() == [0, 10, 2, 31, 4, 5, 6, 7]
    rows.end()
    assert seen(rows) == [0, 1, 2, 31, 4, 5, 6, 7]
    assert rows
