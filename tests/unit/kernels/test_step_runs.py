"""Runs of steps compared with a plain dict: every row is found, in any order of writes and deletions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from expstore.core.values import IntArray
from expstore.episodes.fragments import Fragments
from expstore.kernels.step_runs import RunTable


class Model:
    """Fragments as an episode table makes them, and where each step of each episode lies."""

    def __init__(self) -> None:
        self.fragments = Fragments()
        self.fragments.take_touched()
        self.rows: dict[int, list[int]] = {}
        self.newest: dict[int, int] = {}
        self.last = 0

    def add(self, episode: int, rows: int, stride: int, *, start: int) -> None:
        known = self.rows.setdefault(episode, [])
        ids = [start + k * stride for k in range(rows)]
        number = self.newest.get(episode, -1)
        values = (episode, len(known), rows, ids[0], stride if rows > 1 else 1)
        self.newest[episode] = self.fragments.add(number, values)
        known += ids
        self.last = max(self.last, ids[-1])

    def batch(self, lanes: int, rows: int, episodes: list[int]) -> None:
        """Add rows of some lanes that come in turn."""
        first = self.last + 1
        for lane in range(lanes):
            self.add(episodes[lane], rows, lanes, start=first + lane)

    def runs(self, low: int) -> dict[int, list[tuple[int, int]]]:
        """Return episode -> (step, id) of its readable rows."""
        found = {
            episode: [(step, id_) for step, id_ in enumerate(ids) if id_ > low]
            for episode, ids in self.rows.items()
        }
        return {episode: rows for episode, rows in sorted(found.items()) if rows}


def check(table: RunTable, model: Model, low: int) -> None:
    expected = model.runs(low)
    live = np.flatnonzero(table.first < table.stop)
    assert table.episode[live].tolist() == list(expected)
    assert (np.diff(table.episode) >= 0).all()
    for run, rows in zip(live.tolist(), expected.values(), strict=True):
        steps = [step for step, _ in rows]
        assert (table.first[run], table.stop[run]) == (steps[0], steps[-1] + 1)
        for start in {0, len(rows) // 2, len(rows) - 1}:
            ids = table.rows(*(np.array([n]) for n in (run, steps[start], len(rows) - start)))
            assert ids.tolist() == [id_ for _, id_ in rows[start:]]
        episode = np.full(len(rows), table.episode[run])
        assert (table.find(episode, np.array(steps)) == run).all()


@given(st.data())
def test_every_readable_step_is_found(data: st.DataObject) -> None:
    model, low, table = Model(), 0, None
    next_episode = 1
    lanes = data.draw(st.integers(1, 4), label="lanes")
    current: list[int] = []
    for _ in range(data.draw(st.integers(1, 12), label="batches")):
        current = current[:lanes] + list(range(next_episode, next_episode + lanes - len(current)))
        next_episode = max(next_episode, *(e + 1 for e in current))
        for lane in range(lanes):
            if data.draw(st.booleans(), label="a new episode"):
                current[lane], next_episode = next_episode, next_episode + 1
        model.batch(lanes, data.draw(st.integers(1, 5), label="rows"), current)
        low = data.draw(st.integers(low, model.last), label="low")
        if data.draw(st.booleans(), label="look"):
            touched = model.fragments.take_touched()
            assert touched is not None
            if table is None or table.take_in(touched, low) is None:
                table = RunTable(model.fragments.rows.copy(), low)
            if data.draw(st.booleans(), label="compact"):
                table.compact()
            check(table, model, low)
    check(RunTable(model.fragments.rows.copy(), low), model, low)


def test_a_change_is_reported_once() -> None:
    table = RunTable(columns((1, 0, 3, 1, 1), (2, 0, 2, 4, 1)), 0)
    changed = table.take_in(columns((2, 0, 5, 4, 1), (3, 0, 1, 9, 1)), 2)
    assert sorted(changed.tolist()) == [0, 1, 2]
    assert (table.first.tolist(), table.stop.tolist()) == ([2, 0, 0], [3, 5, 1])
    again = table.take_in(columns(), 2)
    assert again.size == 0


def test_an_episode_continues_after_all_its_rows_have_left() -> None:
    table = RunTable(columns((1, 0, 3, 1, 1), (2, 0, 3, 4, 1)), 5)
    assert table.first.tolist() == [3, 2]
    for more in (columns((1, 0, 4, 1, 1)), columns((1, 4, 2, 8, 1))):  # it grows where it was, and elsewhere
        table.take_in(more, 5)
    # Step 3 would be id 4, which has left.
    assert (table.first[0], table.stop[0]) == (4, 6)
    assert table.rows(np.array([0]), np.array([4]), np.array([2])).tolist() == [8, 9]
    table.take_in(columns(), 8)
    assert table.first[0] == 5


def test_rows_that_were_given_up_part_an_episode() -> None:
    table = RunTable(columns((1, 0, 3, 1, 1), (1, 5, 3, 6, 1), (2, 0, 1, 9, 1)), 0)
    assert table.episode.tolist() == [1, 1, 2]
    assert (table.first.tolist(), table.stop.tolist()) == ([0, 5, 0], [3, 8, 1])
    assert table.find(np.array([1, 1, 1, 2, 3]), np.array([2, 4, 6, 0, 0])).tolist() == [0, -1, 1, 2, -1]
    # What comes between runs that are there would need other numbers.
    assert table.take_in(columns((1, 12, 1, 30, 1)), 0) is None


def test_rows_are_located_by_episode_and_id() -> None:
    table = RunTable(columns((1, 0, 3, 1, 2), (2, 0, 2, 2, 2), (1, 9, 2, 20, 1)), 1)
    episodes, ids = np.array([1, 1, 1, 1, 1, 1, 2, 2, 3]), np.array([1, 3, 4, 5, 21, 22, 4, 5, 3])
    found, steps = table.locate(episodes, ids)
    assert found.tolist() == [-1, 0, -1, 0, 1, -1, 2, -1, -1]  # 4 lies between rows of episode 1
    assert steps[found >= 0].tolist() == [1, 2, 10, 1]


def test_no_row_exists_beyond_the_end() -> None:
    table = RunTable(columns((1, 0, 3, 1, 2)), 0)
    assert table.rows(np.array([0]), np.array([1]), np.array([4])).tolist() == [3, 5, 0, 0]


def test_a_long_life_takes_no_more_room(rng: np.random.Generator) -> None:
    model = Model()
    table = RunTable(model.fragments.rows, 0)
    widths = []
    for episode in range(1, 10_001):
        model.add(episode, int(rng.integers(1, 4)), 1, start=model.last + 1)
        touched = model.fragments.take_touched()
        assert touched is not None
        table.take_in(touched, model.last - 100)
        model.fragments.evict(model.last - 100)
        if table.wasteful:
            table.compact()
            widths.append((table._runs.shape[1], table._pool.shape[1]))
    assert len(widths) > 2
    assert max(widths) < (2048, 8192)
    model.rows = {episode: ids for episode, ids in model.rows.items() if ids[-1] > model.last - 100}
    check(table, model, model.last - 100)


def columns(*fragments: tuple[int, int, int, int, int]) -> IntArray:
    return np.ascontiguousarray(np.array(fragments, np.int64).reshape(-1, 5).T)


@pytest.mark.parametrize("episode", [0, 2**40])
def test_episodes_may_have_any_ids(episode: int) -> None:
    assert RunTable(columns((episode, 7, 1, 1, 1)), 0).episode.tolist() == [episode]
