"""Sets of deleted id runs equal sets of single ids."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from expstore.core.id_set import NO_IDS, IdSet
from expstore.core.values import Window

RUNS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 9)), max_size=8)


def ids_of(deleted: IdSet) -> set[int]:
    return {id for first, last in deleted for id in range(first, last + 1)}


@given(runs=RUNS, others=RUNS, low=st.integers(0, 80), count=st.integers(0, 80))
def test_they_are_sets_of_ids(
    runs: list[tuple[int, int]], others: list[tuple[int, int]], low: int, count: int
) -> None:
    one, other = (IdSet.of((first, first + n) for first, n in some) for some in (runs, others))
    dead = {first + k for first, n in runs for k in range(n + 1)}
    assert ids_of(one) == dead
    assert one.ids == len(dead)
    assert (one.first[1:] > one.last[:-1] + 1).all()
    assert ids_of(one.join(other)) == dead | ids_of(other)
    assert ids_of(one.intersect(other)) == dead & ids_of(other)
    assert ids_of(one.shift(7)) == {id + 7 for id in dead}
    assert IdSet.of_ids(np.array(sorted(dead), np.int64)) == one
    assert hash(IdSet.of(list(one))) == hash(one)
    at = np.arange(90)
    assert at[one.holds(at)].tolist() == sorted(dead)
    assert one.counts(at).tolist() == [len([id for id in dead if id <= k]) for k in at.tolist()]
    assert [one.upto(k) for k in at.tolist()] == one.counts(at).tolist()
    last = low + count
    assert one.meets(at, at + 3).tolist() == [bool({k, k + 1, k + 2, k + 3} & dead) for k in at.tolist()]
    assert {id for id in ids_of(one.between(low, last)) if id > low} == {
        id for id in dead if low < id <= last
    }
    window, alive = Window(low, last, one), [id for id in range(low + 1, last + 1) if id not in dead]
    assert window.ids().tolist() == alive
    assert window.rows == len(alive)
    assert window.nth(np.arange(len(alive))).tolist() == alive
    assert [id for first, n in window.runs() for id in range(first, first + n)] == alive
    assert alive or window.runs() == [(last + 1, 0)]
    assert window.holds(at).nonzero()[0].tolist() == [id for id in alive if id < 90]


def test_none_are_nothing() -> None:
    assert not NO_IDS
    assert IdSet.of([]) == NO_IDS
    assert NO_IDS.holds(np.arange(3)).tolist() == [False] * 3
    assert NO_IDS.upto(9) == 0
    assert repr(IdSet.of([(3, 5)])) == "IdSet.of([(3, 5)])"
