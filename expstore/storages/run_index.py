"""An index of a storage's runs: ranges of readable, consecutive steps of one episode.

Used by samplers that need more than single rows. The index follows the storage: `Runs.look` adds new steps
and removes steps that can no longer be read. It contains no rows, and does not use DuckDB.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray, Window
from expstore.episodes.fragments import last_ids
from expstore.errors import StateError
from expstore.kernels.loader import compiling

if TYPE_CHECKING:
    from expstore.kernels.step_runs import RunTable
    from expstore.storages.read_view import ReadView

#: Number of updates for which `changed_since` knows the changed runs.
_REMEMBERED = 64
#: Attempts of a follower to find readable rows whose episodes are known.
_TRIES = 10


class Taken(NamedTuple):
    """The input of an update of the index.

    Args:
        of: The episode table to which the fragments belong.
        window: The readable rows.
        touched: Fragments that are new or longer since the last update. Shape `(5, n)`. None: unknown.
        whole: All fragments, if they were requested or are needed; otherwise None. Shape `(5, m)`.
        low: The newest id that is no longer stored.
    """

    of: object
    window: Window
    touched: IntArray | None
    whole: IntArray | None
    low: int = 0


class Runs:
    """The runs of a storage, numbered in the order of their episodes' ids.

    A run is a range of consecutive, readable steps of one episode. An episode has one run, or several if rows
    between them were deleted. Runs without readable rows keep their numbers for a while. The cost of `look`
    is proportional to what changed since the last call.

    Threads: hold `lock` from `look` until its results are no longer used. Processes: each has its own index.
    Crashes: the index is built from the episodes.

    Args:
        storage: The storage; the reference is weak.

    Example:
        >>> with storage.runs.lock:
        ...     window = storage.runs.look()
        ...     storage.runs.rows(np.array([0]), storage.runs.first[:1], np.array([1]))
    """

    def __init__(self, storage: ReadView) -> None:
        # In a follower, `look` may take the storage's lock, and other threads call `look` while they hold
        # that lock.
        self.lock: threading.RLock = (
            storage.lock if storage.follows else storage.locks.order.rank_lock("runs", threading.RLock())
        )
        self._storage = weakref.ref(storage)
        self._window = Window(0, 0)
        self._table: RunTable | None = None
        self._known: object | None = None  # the episode table whose fragments `_table` contains
        self._changes: deque[IntArray] = deque(maxlen=_REMEMBERED)
        self._stored: StoredRuns | None = None
        #: Incremented by each update of the index.
        self.moves = 0

    def look(self) -> Window:
        """Update the index; return the window of the rows in it.

        In a follower these are the rows with known episodes.

        Raises:
            StateError: The writer overwrites rows before a follower has read their episodes.
        """
        storage = self._require_storage()
        if not storage.follows:
            return self._look(storage)
        for _ in range(_TRIES):
            if storage.query_window != storage.stored:
                storage.follow()
            window = self._look(storage)
            if window.rows or not storage.window.rows:
                return window
        raise StateError(
            "the writer overwrites rows faster than they can be read",
            hint="give the store a larger capacity",
        )

    def _look(self, storage: ReadView) -> Window:
        if self._is_current(storage):
            return self._window
        with self.lock:
            known = self._take(storage)
            followed = self._known is not None and known.of is self._known
            self._known = None  # until all is done: after an interruption the table is rebuilt
            stored = self._stored
            if (
                known.touched is None
                or not followed
                or not self._follow(known.touched, known.window.low)
                or (stored is not None and not stored._follow(known.touched, known.low))
            ):
                if known.whole is None:
                    known = self._take(storage, whole=True)
                with compiling:
                    from expstore.kernels.step_runs import RunTable
                assert known.whole is not None
                low = known.window.low
                whole = known.whole
                if storage.description.window_rows is not None:
                    whole = np.ascontiguousarray(whole[:, last_ids(whole) > low])
                self._number_anew(RunTable(whole, low))
                if stored is not None:
                    stored._number_anew(RunTable(known.whole, known.low))
            self._known, self._window = known.of, known.window
            return known.window

    def with_stored(self) -> Runs:
        """Return the runs of all stored rows, also of those before the window."""
        storage = self._require_storage()
        if storage.description.window_rows is None:
            return self
        with self.lock:
            if self._stored is None:
                self._stored = StoredRuns(storage, self)
                self._known = None  # the next look builds both tables
            return self._stored

    def _require_storage(self) -> ReadView:
        storage = self._storage()
        if storage is None:
            raise StateError("the storage no longer exists")
        return storage

    def _is_current(self, storage: ReadView) -> bool:
        """Return whether nothing has changed since the last update."""
        episodes, window = storage.episodes, window_of_runs(storage)
        return episodes is self._known and window == self._window and episodes.fragments.quiet

    def _take(self, storage: ReadView, *, whole: bool = False) -> Taken:
        """Copy the fragments that are new since the last call, or all of them."""
        with storage.locks.episodes:
            episodes, window, low = storage.episodes, window_of_runs(storage), storage.query_window.low
            touched = episodes.fragments.take_touched()
            whole = whole or touched is None or episodes is not self._known
            fragments = episodes.fragments.capture() if whole else None
        return Taken(episodes, window, touched, None if fragments is None else fragments.columns(), low)

    def _follow(self, touched: IntArray, low: int) -> bool:
        table = self._table
        changed = None if table is None else table.take_in(touched, low)
        if table is None or changed is None:
            return False
        if table.wasteful:
            table.compact()
            self._number_anew(table)
        else:
            self.moves += 1
            self._changes.append(changed)
        return True

    def _number_anew(self, table: RunTable) -> None:
        self._table = table
        self._changes.clear()
        self.moves += 1

    def find_changed(self, moves: int) -> IntArray | None:
        """Return the runs that have changed since `moves` had this value.

        Returns:
            Shape `(n,)`, int64; a run may occur more than once. None: any run may have changed, and runs may
            have other numbers.
        """
        behind = self.moves - moves
        if behind > len(self._changes):
            return None
        if behind == 1:
            return self._changes[-1]
        found = [self._changes[number] for number in range(len(self._changes) - behind, len(self._changes))]
        return np.concatenate(found) if found else np.empty(0, np.int64)

    @property
    def table(self) -> RunTable:
        """The table of runs as of the last update."""
        if self._table is None:
            self.look()
        table = self._table
        if table is None:
            raise StateError("the storage no longer exists")
        return table

    @property
    def episode(self) -> IntArray:
        """Episode id of each run, ascending. Shape `(count,)`; a view, like `first` and `stop`."""
        return self.table.episode

    @property
    def first(self) -> IntArray:
        """First readable step of each run. Shape `(count,)`."""
        return self.table.first

    @property
    def stop(self) -> IntArray:
        """Step after the last one of each run; `first` if no row is readable. Shape `(count,)`."""
        return self.table.stop

    def rows(self, runs: IntArray, starts: IntArray, lengths: IntArray) -> IntArray:
        """Return the ids of the rows of slices, concatenated; 0 for steps after a run's end.

        Args:
            runs: The run of each slice. Shape `(n,)`, int64.
            starts: The first step of each slice. Shape `(n,)`, int64.
            lengths: The number of rows of each slice. Shape `(n,)`, int64.
        """
        return self.table.rows(runs, starts, lengths)

    def ids(self, runs: IntArray, steps: IntArray) -> IntArray:
        """Return the ids of steps of runs. All shapes are equal, int64."""
        flat = self.table.rows(runs.reshape(-1), steps.reshape(-1), np.ones(steps.size, np.int64))
        return flat.reshape(steps.shape)

    def near(self, runs: IntArray, steps: IntArray, offsets: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the ids of the rows at step offsets from rows; see `RunTable.near`."""
        return self.table.near(runs, steps, offsets)

    def locate(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return run and step of rows; run -1 for rows that are not in the index. Shapes `(n,)`.

        Rows may be overwritten meanwhile: call the storage's `intact` afterwards.
        """
        storage = self._require_storage()
        # Not `read`, which may wait for the storage's lock: the thread that holds it may be waiting for this
        # lock.
        (names,) = storage.take(storage.geometry.slot_of(ids), [self._names_place()])
        return self.table.locate(as_names(names.reshape(-1)), ids)

    def _names_place(self) -> int:
        """Return the position of the field by whose values runs are ordered."""
        return len(self._require_storage().require_schema().fields) + 1


class StoredRuns(Runs):
    """The runs of all stored rows of a storage with a window, for transforms that read earlier steps.

    Args:
        storage: The storage.
        runs: The runs of the window, which update this object, too.
    """

    def __init__(self, storage: ReadView, runs: Runs) -> None:
        super().__init__(storage)
        self.lock, self._runs = runs.lock, runs

    def look(self) -> Window:
        """Update both indices; return the window of the stored rows."""
        self._runs.look()
        return self._require_storage().query_window


def window_of_runs(storage: ReadView) -> Window:
    """Return the rows that an index of runs has: those that samplers see and whose episodes are known."""
    return storage.query_window.newest(storage.description.window_rows)


def as_names(values: Array) -> IntArray:
    """Return integers that are equal where values are equal. Shapes `(n,)`."""
    if values.dtype.kind in "iub":
        return values.astype(np.int64, copy=False)
    return (values.astype(np.float64) + 0.0).view(np.int64)  # 0.0 and -0.0 are equal
