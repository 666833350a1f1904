"""A buffer over a storage, together with a model of it.

Every operation is applied to the buffer and to the model; `look` compares them. `Life` keeps no files of its
own.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch

from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import NoRowError
from expstore.storages.read_view import ReadView
from expstore.testing.assertions import expect, raises, same
from expstore.testing.model import Cell, Model, Row
from expstore.testing.model_rows import check_rows, make_batch, patch_of

_SQL_ROWS = "SELECT _id, number, _episode, _step FROM transitions ORDER BY _id"
_SQL_EPISODES = (
    "SELECT episode_id, CASE WHEN source NOT LIKE '@%' THEN source END, length, status, live_rows "
    "FROM episodes ORDER BY episode_id"  # a handle's own stream has a number as its name
)


class Maker(Protocol):
    """Interface of a suite: it creates storages."""

    def make(self, path: Path, capacity: int | None, *, ndim: int, seed: int) -> ReadView:
        """Create a storage, or open the one in the folder."""


class Life:
    """Apply operations to a buffer and to a model of it.

    Args:
        maker: Creates the storage.
        path: An empty folder for the storage.
        capacity: Maximum number of readable rows; None for an unbounded storage.
        lanes: Number of rows per time step; with 2 or more the storage has two dims.
        trajectories: Whether rows have trajectory ids.
        seed: Seed of the draws.
        buffer: Keywords of the buffer; samplers and writers as functions that create them.

    Example:
        >>> from pathlib import Path
        >>> from expstore import MemoryStorage
        >>> from expstore.testing.buffer_and_model import Life
        >>> from expstore.testing.suite import StorageSuite
        >>> class TestMine(StorageSuite):
        ...     def make(self, path, capacity, *, ndim, seed):
        ...         return MemoryStorage(capacity, ndim=ndim, seed=seed)
        >>> with Life(TestMine(), Path("rows"), 20) as life:
        ...     life.extend(7)
        ...     life.look()
    """

    def __init__(
        self,
        maker: Maker,
        path: Path,
        capacity: int | None = 20,
        *,
        lanes: int = 1,
        trajectories: bool = True,
        seed: int = 5,
        **buffer: Any,
    ) -> None:
        self.maker, self.path, self.seed = maker, path, seed
        self.model = Model(capacity, lanes, trajectories)
        self.keywords = {"batch_size": 6} | buffer
        self.rb = self.begin()

    def begin(self) -> TensorDictReplayBuffer:
        """Return a buffer over the storage in the folder."""
        ndim = 1 if self.model.lanes == 1 else 2
        storage = self.maker.make(self.path, self.model.capacity, ndim=ndim, seed=self.seed)
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
        return np.fromiter(self.model.rows, np.int64, len(self.model.rows))

    # -- acts ------------------------------------------------------------------------------------

    def extend(self, cells: int | Sequence[Cell], source: str | None = None) -> list[Row]:
        """Write rows, and check the ids that the buffer returns.

        Args:
            cells: One cell per row, or a number of time steps, which continue one trajectory.
            source: Name of the source.
        """
        model = self.model
        cells = [Cell()] * cells * model.lanes if isinstance(cells, int) else cells
        rows = model.extend(cells, source)
        ids = self.rb.extend(self.batch(rows), source=source, return_ids=True)
        same(sorted(ids.tolist()), [row.id for row in rows], "what extend returns")
        return rows

    def batch(self, rows: Sequence[Row]) -> Any:
        """Return rows as a batch for this buffer."""
        return make_batch(rows, lanes=self.model.lanes, trajectories=self.model.trajectories)

    def add(self, cell: Cell | None = None, source: str | None = None) -> None:
        """Write one row."""
        (row,) = self.model.extend([Cell() if cell is None else cell], source)
        index = self.rb.add(self.batch([row])[0], source=source)
        same(index, self.model.index_of(row.id), "the index that add returns")

    def lap(self, short_of: int = 0) -> None:
        """Write up to the end of the ring's slots, or `short_of` rows less; nothing if there is no ring."""
        storage, lanes = self.storage, self.model.lanes
        if storage.geometry.slots is not None and self.model.rows:
            left = -self.model.last % storage.geometry.slots - short_of
            if left >= lanes:
                self.extend(left // lanes)

    def patch(self, ids: Sequence[int]) -> None:
        """Change fields of rows, and check that ids of deleted rows change nothing."""
        model = self.model
        rows = model.change([id for id in ids if id in model.rows])
        gone = [id for id in ids if id not in model.rows]
        fields = patch_of(rows)
        more = {name: torch.cat([values, values[:1].repeat(len(gone), *[1] * (values.ndim - 1))])
                for name, values in fields.items()} if rows else {}  # fmt: skip
        if more:
            named = torch.tensor([row.id for row in rows] + gone)
            done = self.rb.update_if_present(id=named, patch=more)
            same(done.updated.tolist(), [True] * len(rows) + [False] * len(gone), "which rows were changed")

    def set_priorities(self, values: dict[int, float]) -> None:
        """Set priorities by id, and check that ids of deleted rows set nothing."""
        given = torch.tensor(list(values.values()), dtype=torch.float32)
        expected = self.model.set_priorities(dict(zip(values, given.tolist(), strict=True)))
        same(self.rb.update_priority(id=torch.tensor(list(values)), priority=given), expected, "how many")

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

        Changes that `act` makes to the model are lost with the child: apply them before or after.
        """
        self.rb.close()
        child = multiprocessing.get_context("fork").Process(target=self._live_and_die, args=(act,))
        child.start()
        child.join()
        expect(child.exitcode == -signal.SIGKILL, "the child failed before it was killed")
        self.rb = self.begin()

    def _live_and_die(self, act: Callable[[], object]) -> None:
        self.rb = self.begin()
        act()
        os.kill(os.getpid(), signal.SIGKILL)

    def write_and_be_killed(self, batches: Sequence[Sequence[Cell]], source: str | None = None) -> None:
        """Write these batches in a child process that is killed afterwards; none may be lost."""
        self.model.reopen()
        made = [self.batch(self.model.extend(cells, source)) for cells in batches]

        def write() -> None:
            for batch in made:
                self.rb.extend(batch, source=source)

        self.kill(write)
        self.model.reopen()

    # -- looks -----------------------------------------------------------------------------------

    def look(self, rb: TensorDictReplayBuffer | None = None, *, episodes: bool = False) -> None:
        """Compare everything that can be read with the model.

        Args:
            rb: The buffer that reads; None for the writer's.
            episodes: Whether to check rows and episodes in SQL too.
        """
        model, looking = self.model, self.rb if rb is None else rb
        storage = looking.storage
        rows, ids = model.live, self.ids
        same(len(looking), len(rows), "len")
        same(storage.window.ids(), ids, "the ids that can be read")
        same(storage.last, model.last, "the newest id")
        same(storage.write_count, model.written, "write_count of the storage")
        same(looking.write_count, model.written // storage.geometry.lanes, "write_count of the buffer")
        if rows:
            self.look_at_rows(looking)
            self.look_at_columns(storage)
            self.look_at_draw(looking)
        if episodes and storage.schema is not None:
            self.look_at_sql(looking)

    def look_at_rows(self, rb: TensorDictReplayBuffer) -> None:
        """Check all rows by index, and single rows."""
        model, ordered = self.model, self.model.by_index
        found = rb[:] if model.lanes == 1 else rb[:].transpose(0, 1)  # with two dims time is the last one
        check_rows(found, ordered, "[:]", trajectories=model.trajectories)
        if model.lanes == 1:
            for place in {0, len(ordered) // 2, len(ordered) - 1}:
                index = model.index_of(ordered[place].id)
                one = rb[index]
                check_rows(one.unsqueeze(0), [ordered[place]], f"[{index}]", trajectories=model.trajectories)

    def look_at_columns(self, storage: ReadView) -> None:
        """Check rows by id, and the columns that every row has besides the user's fields."""
        rows, ids, model = self.model.live, self.ids, self.model
        (number,) = storage.read(ids[::-1].copy(), [storage.require_schema().place_of(("number",))])
        same(number, np.array([row.serial for row in rows[::-1]], np.int64), "rows by id")
        expect(storage.intact(ids), "rows that can be read are not intact")
        same(
            storage.geometry.index_of(ids),
            np.array([model.index_of(row.id) for row in rows], np.int64),
            "index_of",
        )
        same(storage.geometry.ids_at(storage.geometry.index_of(ids), storage.window), ids, "ids_at")
        if model.capacity is None or len(rows) < model.capacity:
            with raises(NoRowError, what="the index of a row that is not written yet"):
                storage.geometry.ids_at(np.array([model.index_of(model.last + 1)]), storage.window)
        fields = len(storage.require_schema().fields)
        places = [fields, fields + 1, fields + 2, fields + 4]
        views = [np.concatenate(parts) for parts in storage.views(places, int(ids[0]), ids.size)]
        same(views[0], ids, "_row.id")
        same(views[1], np.array([row.episode for row in rows], np.int64), "_row.episode")
        same(views[2], np.array([row.step for row in rows], np.int64), "_row.step")
        priorities = np.array([model.priorities[row.id] for row in rows], np.float32)
        same(views[3], priorities, "priorities")

    def look_at_draw(self, rb: TensorDictReplayBuffer) -> None:
        """Check that a batch consists of whole readable rows."""
        batch, info = rb.sample(return_info=True)
        drawn = info["id"].tolist()
        expect(set(drawn) <= self.model.rows.keys(), f"sample returned deleted rows: {drawn}")
        rows = [self.model.rows[id] for id in drawn]
        check_rows(batch, rows, "a draw", trajectories=self.model.trajectories)

    def look_at_sql(self, rb: TensorDictReplayBuffer) -> None:
        """Check rows and episodes in SQL."""
        model = self.model
        same(
            rb.sql(_SQL_ROWS).fetchall(),
            [(row.id, row.serial, row.episode, row.step) for row in model.live],
            "the relation transitions",
        )
        live = [row.episode for row in model.live]
        expected = [
            (told.number, told.source, told.length, told.status, live.count(told.number))
            for told in model.episodes.values()
        ]
        same(rb.sql(_SQL_EPISODES).fetchall(), expected, "the relation episodes")
