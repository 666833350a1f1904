"""What a storage knows of episodes as samplers need it: which steps can be read, and where they lie.

Samplers that look beyond single rows ask the storage for it; it follows the storage's episodes as they grow
and its rows as they leave. It keeps no rows, and never asks DuckDB.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray, Window
from expstore.errors import StateError
from expstore.kernels.loader import compiling

if TYPE_CHECKING:
    from expstore.kernels.step_runs import RunTable
    from expstore.storages.read_view import ReadView

__all__ = ["Runs", "Taken", "as_names"]

#: So many looks are remembered for those who ask what has changed.
_REMEMBERED = 64
#: Looks of a follower that may find all rows gone of which it knows episodes.
_TRIES = 10


class Taken(NamedTuple):
    """What a look has to take in.

    Args:
        of: Whose fragments they are.
        window: The rows that are shown.
        touched: Those that came or grew since the last look. Shape `(5, n)`. None: all did.
        whole: All of them, where that was asked for or is needed. Shape `(5, m)`.
    """

    of: object
    window: Window
    touched: IntArray | None
    whole: IntArray | None


class Runs:
    """Number the runs of a storage: stretches of readable steps of one episode that follow one another.

    An episode has one run, or several where rows of it were given up. Runs are in the order of their
    episodes' ids, those whose rows have left among them. A look costs what has changed since the last one.

    Threads: hold `lock` from `look` to the last use of what it has shown. Processes: each has its own.
    Crashes: it follows from the episodes.

    Args:
        storage: Whose runs they are; held weakly.

    Example:
        >>> with storage.runs.lock:
        ...     window = storage.runs.look()
        ...     storage.runs.rows(np.array([0]), storage.runs.first[:1], np.array([1]))
    """

    def __init__(self, storage: ReadView) -> None:
        # A follower's look may take the storage's lock, under which other threads look.
        self.lock: threading.RLock = (
            storage.lock if storage.follows else storage.locks.order.rank_lock("runs", threading.RLock())
        )
        self._storage = weakref.ref(storage)
        self._window = Window(0, 0)
        self._table: RunTable | None = None
        self._known: object | None = None  # whose fragments the table shows
        self._changes: deque[IntArray] = deque(maxlen=_REMEMBERED)
        #: Grows with every look that has found something.
        self.moves = 0

    def look(self) -> Window:
        """Take in what has changed; return the rows that are shown.

        A follower's are those of which episodes are known.

        Raises:
            StateError: The writer is so fast that a follower never sees episodes of rows that are left.
        """
        storage = self._require_storage()
        if not storage.follows:
            return self._look(storage)
        for _ in range(_TRIES):
            if storage.query_window != storage.window:
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
            self._known = None  # until all is done: an interruption has the table made anew
            if known.touched is None or not followed or not self._follow(known.touched, known.window.low):
                if known.whole is None:
                    known = self._take(storage, whole=True)
                with compiling:
                    from expstore.kernels.step_runs import RunTable
                assert known.whole is not None
                self._number_anew(RunTable(known.whole, known.window.low))
            self._known, self._window = known.of, known.window
            return known.window

    def _require_storage(self) -> ReadView:
        storage = self._storage()
        if storage is None:
            raise StateError("the storage is gone")
        return storage

    def _is_current(self, storage: ReadView) -> bool:
        """Return whether nothing has changed since the last look."""
        episodes = storage.episodes
        return episodes is self._known and storage.query_window == self._window and episodes.fragments.quiet

    def _take(self, storage: ReadView, *, whole: bool = False) -> Taken:
        """Copy what came since the last time, or all there is."""
        with storage.locks.episodes:
            episodes, window = storage.episodes, storage.query_window
            touched = episodes.fragments.take_touched()
            whole = whole or touched is None or episodes is not self._known
            return Taken(episodes, window, touched, episodes.fragments.rows.copy() if whole else None)

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
            Shape `(n,)`, int64; some perhaps twice. None: all, and they have other numbers perhaps.
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
        """The runs as of the last look."""
        if self._table is None:
            self.look()
        table = self._table
        if table is None:
            raise StateError("the storage is gone")
        return table

    @property
    def episode(self) -> IntArray:
        """Episode id of each run, ascending. Shape `(count,)`; a view, as are the others."""
        return self.table.episode

    @property
    def first(self) -> IntArray:
        """First readable step of each run. Shape `(count,)`."""
        return self.table.first

    @property
    def stop(self) -> IntArray:
        """Step after the last one of each run; `first` where no row is left. Shape `(count,)`."""
        return self.table.stop

    def rows(self, runs: IntArray, starts: IntArray, lengths: IntArray) -> IntArray:
        """Return the ids of the rows of slices, one slice behind another; 0 beyond a run's end.

        Args:
            runs: Of each slice. Shape `(n,)`, int64.
            starts: Its first step. Shape `(n,)`, int64.
            lengths: How many rows it has. Shape `(n,)`, int64.
        """
        return self.table.rows(runs, starts, lengths)

    def ids(self, runs: IntArray, steps: IntArray) -> IntArray:
        """Return the ids of steps. Shapes all the same, int64."""
        flat = self.table.rows(runs.reshape(-1), steps.reshape(-1), np.ones(steps.size, np.int64))
        return flat.reshape(steps.shape)

    def near(self, runs: IntArray, steps: IntArray, offsets: IntArray) -> tuple[IntArray, NDArray[np.bool_]]:
        """Return the ids of steps so far from others; see `RunTable.near`."""
        return self.table.near(runs, steps, offsets)

    def locate(self, ids: IntArray) -> tuple[IntArray, IntArray]:
        """Return run and step of rows; run -1 for those that are not shown. Shapes `(n,)`.

        Rows may be overwritten while they are looked up: ask the storage's `intact` afterwards.
        """
        storage = self._require_storage()
        # Not `read`, which may wait for the storage's lock: who has that may wait for this one's.
        (names,) = storage.take(storage.geometry.slot_of(ids), [self._names_place()])
        return self.table.locate(as_names(names.reshape(-1)), ids)

    def _names_place(self) -> int:
        """Return the position of the field whose values runs are ordered by."""
        return len(self._require_storage().require_schema().fields) + 1


def as_names(values: Array) -> IntArray:
    """Return whole numbers that are equal where values are. Shapes `(n,)`."""
    if values.dtype.kind in "iub":
        return values.astype(np.int64, copy=False)
    return (values.astype(np.float64) + 0.0).view(np.int64)  # 0.0 and -0.0 are equal
