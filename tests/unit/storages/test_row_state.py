"""The state of a storage's rows: which ids can be read after each operation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from expstore.core.id_set import IdSet
from expstore.core.values import Window
from expstore.storages.row_state import RowState


def test_rows_leave_by_age() -> None:
    state = RowState()
    state.horizon = 8
    state.commit(8, 8, 5, (1, 4))
    assert (state.stored, state.last, state.horizon, state.write_count) == (Window(3, 8), 8, 8, 8)
    assert (state.retired, state.content) == (0, (1, 4))


@pytest.mark.parametrize("capacity", [None, 100])
def test_rows_leave_otherwise(capacity: int | None) -> None:
    state = RowState()
    state.commit(8, 8, capacity, (1, 1))
    state.retire(3)
    assert (state.stored, state.retired) == (Window(3, 8), 3)
    state.retire(2)
    assert (state.stored, state.retired) == (Window(3, 8), 3)
    state.commit(10, 2, capacity, (1, 2))
    assert state.stored == Window(3, 10)


def test_rows_between_others_leave() -> None:
    state = RowState()
    state.commit(8, 8, None, (1, 1))
    state.delete(Window(2, 8, IdSet.of([(5, 6)])))
    assert (state.retired, state.stored.rows) == (2, 4)
    state.commit(9, 1, None, (1, 2))
    assert state.stored == Window(2, 9, IdSet.of([(5, 6)]))


def test_all_rows_leave() -> None:
    state = RowState()
    state.commit(8, 8, None, (1, 1))
    state.forget(10)
    assert (state.stored, state.horizon, state.retired) == (Window(10, 10), 10, 10)
    assert state.write_count == 8


def test_rows_are_recovered() -> None:
    state = RowState()
    found = SimpleNamespace(retired=1, write_count=9, content=(3, 4), index_floor=(3, 2), max_priority=5.0)
    state.recover(found, Window(2, 7))
    assert (state.stored, state.horizon, state.retired, state.write_count) == (Window(2, 7), 7, 1, 9)
    assert (state.content, state.index_floor, state.priorities.largest) == ((3, 4), (3, 2), 5.0)


def test_two_states_share_nothing() -> None:
    one, other = RowState(), RowState()
    assert one.episodes is not other.episodes
    assert one.episodes.session != other.episodes.session
    assert one.priorities is not other.priorities
    assert one.write_keys is not other.write_keys
