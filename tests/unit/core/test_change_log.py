"""The log of slots changed in place: counters that are odd during a change, and changes since a counter."""

from __future__ import annotations

import numpy as np

from expstore.core.change_log import ChangeLog


def test_a_change_that_goes_on_is_not_among_them() -> None:
    changed = ChangeLog()
    changed.begin()
    assert changed.number == 1
    assert changed.since(0) is None  # of none is known which slots it changes
    changed.end(np.array([7, 8]))
    assert changed.number == 2
    found = changed.since(0)
    assert found is not None
    assert found.tolist() == [7, 8]
    assert changed.since(2) is None or changed.since(2).size == 0


def test_changes_that_are_whole_at_once_add_up() -> None:
    changed = ChangeLog()
    for slot in (3, 5, 3):
        changed.note(np.array([slot]))
    assert changed.number == 6
    found = changed.since(2)
    assert found is not None
    assert found.tolist() == [5, 3]


def test_one_that_may_be_anywhere_makes_all_unknown() -> None:
    changed = ChangeLog()
    changed.note(np.array([3]))
    changed.begin()
    changed.end(None)
    assert changed.since(0) is None
    changed.note(np.arange(5000))  # so many that all are looked at
    assert changed.since(4) is None


def test_what_was_long_ago_is_forgotten() -> None:
    changed = ChangeLog()
    for slot in range(300):
        changed.note(np.array([slot]))
    assert changed.since(0) is None
    found = changed.since(2 * 290)
    assert found is not None
    assert found.tolist() == list(range(290, 300))
