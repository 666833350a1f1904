"""A buffer over a storage under test, together with a model of it.

Every operation is applied to the buffer and to the model; `compare` compares them. `machine_of` makes a state
machine of the operations for Hypothesis, which is imported when it is made.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import NoRowError
from expstore.storages.read_view import ReadView
from expstore.testing.assertions import expect, raises, same
from expstore.testing.model import Cell, Model, Row
from expstore.testing.model_rows import check_rows, make_batch, patch_of

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

    from expstore.testing.suite import StorageSuite

SQL_ROWS = "SELECT _id, number, _episode, _step FROM transitions ORDER BY _id"
SQL_EPISODES = (
    "SELECT episode_id, CASE WHEN source NOT LIKE '@%' THEN source END, length, status, live_rows "
    "FROM episodes ORDER BY episode_id"  # a handle's own stream has a number as its name
)


class Life:
    """Apply operations to a buffer and to a model of it.

    Args:
        suite: Creates the storage.
        path: An empty folder for the storage.
        capacity: Maximum number of readable rows; None for an unbounded storage.
        lanes: Number of rows per time step; with 2 or more the storage has two dims.
        trajectories: Whether rows have trajectory ids.
        seed: Seed of the draws.
        buffer: Keywords of the buffer; samplers and writers as functions that create them.
    """

    def __init__(
        self,
        suite: StorageSuite,
        path: Path,
        capacity: int | None = 20,
        *,
        lanes: int = 1,
        trajectories: bool = True,
        seed: int = 5,
        **buffer: Any,
    ) -> None:
        self.suite, self.path, self.seed = suite, path, seed
        self.model = Model(capacity, lanes, trajectories)
        self.keywords = {"batch_size": 6} | buffer
        self.rb = self.begin()

    def begin(self) -> TensorDictReplayBuffer:
        """Return a buffer over the storage in the folder."""
        ndim = 1 if self.model.lanes == 1 else 2
        storage = self.suite.make(self.path, self.model.capacity, ndim=ndim, seed=self.seed)
        return TensorDictReplayBuffer(storage=storage, **self.keywords)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.storage.close()  # closing the buffer would first update an index that no test reads

    @property
    def storage(self) -> ReadView:
        """The storage of the buffer."""
        return self.rb.storage

    @property
    def ids(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Ids of the readable rows, the oldest first. Shape `(n,)`."""
        return np.array(list(self.model.rows), np.int64)

    def batch(self, rows: Sequence[Row]) -> Any:
        """Return rows as a batch for this buffer."""
        return make_batch(rows, lanes=self.model.lanes, trajectories=self.model.trajectories)

    # -- operations ------------------------------------------------------------------------------

    def extend(self, cells: int | Sequence[Cell], source: str | None = None) -> None:
        """Write rows, and check the ids that the buffer returns.

        Args:
            cells: One cell per row, or a number of time steps, which continue one trajectory.
            source: Name of the source.
        """
        cells = [Cell()] * cells * self.model.lanes if isinstance(cells, int) else cells
        rows = self.model.extend(cells, source)
        ids = self.rb.extend(self.batch(rows), source=source, return_ids=True)
        same(sorted(ids.tolist()), [row.id for row in rows], "what extend returns")

    def add(self, cell: Cell | None = None, source: str | None = None) -> None:
        """Write one row."""
        (row,) = self.model.extend([cell or Cell()], source)
        index = self.rb.add(self.batch([row])[0], source=source)
        same(index, self.model.index_of(row.id), "the index that add returns")

    def lap(self, short_of: int = 0) -> None:
        """Write up to the end of the ring's slots, or `short_of` rows less; nothing if there is no ring."""
        slots, lanes = self.storage.geometry.slots, self.model.lanes
        if slots is not None and self.model.rows:
            left = -self.model.last % slots - short_of
            if left >= lanes:
                self.extend(left // lanes)

    def patch(self, ids: Sequence[int]) -> None:
        """Change fields of rows, and check that ids of deleted rows change nothing."""
        rows = self.model.change([id for id in ids if id in self.model.rows])
        gone = [id for id in ids if id not in self.model.rows]
        if rows:
            filled = rows + rows[:1] * len(gone)
            named = torch.tensor([row.id for row in rows] + gone)
            done = self.rb.update_if_present(id=named, patch=patch_of(filled))
            same(done.updated.tolist(), [True] * len(rows) + [False] * len(gone), "which rows were changed")

    def set_priorities(self, values: dict[int, float]) -> None:
        """Set priorities by id, and check that ids of deleted rows set nothing."""
        given = torch.tensor(list(values.values()), dtype=torch.float32)
        expected = self.model.set_priorities(dict(zip(values, given.tolist(), strict=True)))
        self.model.mark_written()
        found = self.rb.update_priority(id=torch.tensor(list(values)), priority=given)
        same(found, expected, "the number of priorities that were set")

    def empty(self) -> None:
        """Delete all rows."""
        self.rb.empty()
        self.model.empty()

    def reopen(self) -> None:
        """Close the storage and open it again."""
        self.rb.close()
        self.rb = self.begin()
        self.model.reopen()

    def kill(self, act: Callable[[], object]) -> None:
        """Open the storage in a child process that runs `act` and is killed; open it again here.

        Changes that `act` makes to the model are lost with the child: apply them after.
        """
        self.rb.close()
        self.model.reopen()
        child = multiprocessing.get_context("fork").Process(target=self._run_and_die, args=(act,))
        child.start()
        child.join()
        expect(child.exitcode == -signal.SIGKILL, "the child failed before it was killed")
        self.rb = self.begin()

    def _run_and_die(self, act: Callable[[], object]) -> None:
        self.rb = self.begin()
        act()
        os.kill(os.getpid(), signal.SIGKILL)

    def write_and_be_killed(self, *batches: Sequence[Cell], source: str | None = None) -> None:
        """Write these batches in a child process that is killed afterwards; none may be lost."""

        def write() -> None:
            for cells in batches:
                self.extend(cells, source)

        self.kill(write)
        for cells in batches:
            self.model.extend(cells, source)
        self.model.reopen()

    # -- comparisons -----------------------------------------------------------------------------

    def compare(self, rb: TensorDictReplayBuffer | None = None, *, episodes: bool = False) -> None:
        """Compare everything that can be read with the model.

        Args:
            rb: The buffer that reads; None for the writer's.
            episodes: Whether to check rows and episodes in SQL too.
        """
        model, reader = self.model, rb or self.rb
        storage = reader.storage
        same(len(reader), len(model.rows), "len")
        same(storage.window.ids(), self.ids, "the ids that can be read")
        same(storage.last, model.last, "the newest id")
        same(storage.write_count, model.write_count, "write_count of the storage")
        same(reader.write_count, model.write_count // storage.geometry.lanes, "write_count of the buffer")
        if model.rows:
            self.compare_rows(reader)
            self._compare_columns(storage)
            batch, info = reader.sample(return_info=True)
            expect(set(info["id"].tolist()) <= model.rows.keys(), f"{info['id']} were sampled")
            drawn = [model.rows[id] for id in info["id"].tolist()]
            check_rows(batch, drawn, "a draw", trajectories=model.trajectories)
        if episodes and storage.schema is not None:
            same(reader.sql(SQL_ROWS).fetchall(), model.sql_rows(), "the relation transitions")
            same(reader.sql(SQL_EPISODES).fetchall(), model.sql_episodes(), "the relation episodes")

    def compare_rows(self, rb: TensorDictReplayBuffer) -> None:
        """Check all rows by index, and single rows."""
        model, ordered = self.model, self.model.by_index
        found = rb[:] if model.lanes == 1 else rb[:].transpose(0, 1)  # with two dims time is the last one
        check_rows(found, ordered, "[:]", trajectories=model.trajectories)
        if model.lanes == 1:
            for row in (ordered[0], ordered[len(ordered) // 2], ordered[-1]):
                index = model.index_of(row.id)
                one = rb[index].unsqueeze(0)
                check_rows(one, [row], f"[{index}]", trajectories=model.trajectories)

    def _compare_columns(self, storage: ReadView) -> None:
        """Check rows by id, and the columns that every row has besides the user's fields."""
        rows, ids, model = self.model.live, self.ids, self.model
        schema, geometry = storage.require_schema(), storage.geometry
        (number,) = storage.read(ids[::-1].copy(), [schema.place_of(("number",))])
        same(number, np.array([row.serial for row in rows[::-1]], np.int64), "rows by id")
        expect(storage.intact(ids), "rows that can be read are not intact")
        index = geometry.index_of(ids)
        same(index, np.array([model.index_of(row.id) for row in rows], np.int64), "index_of")
        same(geometry.ids_at(index, storage.window), ids, "ids_at")
        if model.capacity is None or len(rows) < model.capacity:
            with raises(NoRowError, what="the index of a row that is not written yet"):
                geometry.ids_at(np.array([model.index_of(model.last + 1)]), storage.window)
        own = len(schema.fields)
        columns = [[row.id, row.episode, row.step] for row in rows]
        views = storage.views([own, own + 1, own + 2, own + 4], int(ids[0]), ids.size)
        *found, priorities = (np.concatenate(parts) for parts in views)
        same(np.stack(found, 1), np.array(columns, np.int64), "ids, episodes and steps of rows")
        same(priorities, np.array([model.priorities[id][-1] for id in model.rows], np.float32), "priorities")


class _Acts:
    """Operations on a storage and its model; the storage's abilities decide which of them become rules."""

    suite: StorageSuite
    folder: Path
    life: Life

    def begin(self, capacity: int | None) -> None:
        self.life = self.suite.life(self.folder, capacity)

    def extend(self, cells: list[Cell], source: str | None) -> None:
        self.life.extend(self.life.model.name_cells(cells), source)

    def add(self, source: str | None) -> None:
        (cell,) = self.life.model.name_cells([Cell()])
        self.life.add(cell, source)

    def lap(self, short: int, beyond: int) -> None:
        self.life.lap(short)
        self.life.extend(1 + short + beyond)

    def prioritise(self, places: set[int], value: float) -> None:
        if self.life.storage.schema is not None:
            self.life.set_priorities({id: value + n for n, id in enumerate(self._ids(places))})

    def patch(self, places: set[int]) -> None:
        self.life.patch(self._ids(places))

    def empty(self) -> None:
        self.life.empty()

    def reopen(self) -> None:
        self.life.reopen()

    def kill(self, batches: list[list[Cell]], source: str | None) -> None:
        named = [self.life.model.name_cells(cells) for cells in batches]
        self.life.write_and_be_killed(*named, source=source)

    def compare(self) -> None:
        self.life.compare()

    def teardown(self) -> None:
        if hasattr(self, "life"):
            try:
                self.life.compare(episodes=True)
            finally:
                self.life.storage.close()

    def _ids(self, places: set[int]) -> list[int]:
        """Return ids near the oldest readable row; some of them are deleted."""
        first = next(iter(self.life.model.rows), self.life.model.last) - 3
        return [first + place for place in sorted(places)]


def machine_of(suite: StorageSuite, folder: Path) -> type[RuleBasedStateMachine]:
    """Return a state machine that tests the storages of a suite.

    Args:
        suite: Creates the storages and declares what they can do.
        folder: A folder for their files.
    """
    from hypothesis import stateful
    from hypothesis import strategies as st

    marks = st.sampled_from(["", "", "", "t", "T"])
    cells = st.lists(st.builds(Cell, st.integers(0, 2), marks), min_size=1, max_size=30)
    places, values = st.sets(st.integers(0, 24), min_size=1, max_size=6), st.floats(0, 8, width=32)
    source, rule = st.sampled_from([None, "a", "b"]), stateful.rule
    rules: dict[str, Any] = {
        "suite": suite,
        "folder": folder,
        "begin": stateful.initialize(capacity=st.sampled_from([None, 1, 7, 20, 20]))(_Acts.begin),
        "extend": rule(cells=cells, source=source)(_Acts.extend),
        "add": rule(source=source)(_Acts.add),
        "lap": rule(short=st.integers(0, 9), beyond=st.integers(0, 15))(_Acts.lap),
        "prioritise": rule(places=places, value=values)(_Acts.prioritise),
        "empty": rule()(_Acts.empty),
        "compare": stateful.invariant()(_Acts.compare),
    }
    if suite.patches:
        rules["patch"] = rule(places=places)(_Acts.patch)
    if suite.persistent:
        batches = st.lists(cells, min_size=1, max_size=3)
        rules["reopen"] = rule()(_Acts.reopen)
        rules["kill"] = rule(batches=batches, source=source)(_Acts.kill)
    return type("Machine", (_Acts, stateful.RuleBasedStateMachine), rules)
