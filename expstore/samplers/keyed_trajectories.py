"""Trajectories defined by other fields than the store's own.

Used by slice samplers that were given such a field. It reads these fields of each new row once and remembers
where the rows of each trajectory are. It reads rows again only after they were changed.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray, Key, Window, key_name
from expstore.episodes.fragments import Fragments, find_fragments
from expstore.episodes.segmentation import find_ends
from expstore.errors import SchemaError
from expstore.samplers.filter import Filter
from expstore.samplers.row_trajectories import RowTrajectories
from expstore.schema.schema import OBJECT
from expstore.storages.run_index import Runs, Taken, as_names, window_of_runs

if TYPE_CHECKING:
    from expstore.schema.schema import Schema
    from expstore.storages.read_view import ReadView

_log = logging.getLogger("expstore")
_CHUNK = 1 << 18
_TRIES = 3


class Trajectories:
    """Find the trajectories of a storage, as runs of steps, by the fields that the user named.

    Threads: any number may call. Processes, crashes: it stores nothing; it caches the last result.

    Args:
        name: The field that identifies trajectories; None for the store's episodes. If it is not stored,
            trajectories end by `ends`.
        ends: The fields that end trajectories; None for the store's own.
        by_row: Trajectories by row, which must be the store's episodes; they are compared when the runs of a
            storage are first needed.
    """

    def __init__(
        self,
        name: Key | None = None,
        ends: Sequence[Key] | None = None,
        by_row: RowTrajectories | None = None,
    ) -> None:
        self.name, self.ends, self._by_row = name, ends, by_row
        self._known: tuple[weakref.ref[ReadView], Schema, Runs] | None = None

    @property
    def keys(self) -> frozenset[Key]:
        """The fields that the user named."""
        return frozenset(() if self.name is None else (self.name,)) | frozenset(self.ends or ())

    def of(self, storage: ReadView) -> Runs:
        """Return the runs of a storage; the same object as long as the storage has the same schema.

        Raises:
            SchemaError: A field does not exist, or has more than one value per row.
            StateError: Trajectories that were given by row are not the store's episodes.
        """
        known, schema = self._known, storage.require_schema()
        if known is None or known[0]() is not storage or known[1] is not schema:
            if self._by_row is not None:
                self._by_row.check(storage)
            known = self._known = weakref.ref(storage), schema, _runs_by(storage, self.name, self.ends)
        return known[2]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which finds runs for itself, and compares rows unless this one has."""
        by_row = self._by_row if self._known is None else None
        return {"name": self.name, "ends": self.ends, "_by_row": by_row, "_known": None}


def _runs_by(storage: ReadView, trajectory: Key | None, ends: Sequence[Key] | None) -> Runs:
    """Return the runs of a storage by these fields; the storage's own runs if the fields are its own.

    Args:
        storage: The storage with the rows.
        trajectory: The field that identifies trajectories; None for the store's episodes. It need not be
            stored if a field that ends trajectories is.
        ends: The fields that end trajectories, at least one of them stored; None for the store's own.

    Raises:
        SchemaError: A field does not exist, or has more than one value per row.
    """
    keys, schema = storage.keys, storage.require_schema()
    if trajectory is not None and trajectory not in schema and _has_others(storage, ends):
        _log.warning("no field is named %r: trajectories end by the end keys", key_name(trajectory))
        trajectory = None
    if trajectory is not None:
        _check(storage, trajectory)
    stored = None if ends is None else [key for key in ends if key in schema]
    if ends is not None and not stored:
        names = ", ".join(key_name(key) for key in ends)
        raise SchemaError(f"none of the end keys {names} is a field", hint=f"the store has {schema!r}")
    for key in stored or ():
        _check(storage, key)
    own = {keys.terminated, keys.truncated, keys.done}
    if stored is not None and own.issuperset(stored):
        stored = None
    if trajectory in (None, keys.trajectory) and stored is None:
        return storage.runs
    return KeyedRuns(storage, trajectory, stored)


def _has_others(storage: ReadView, ends: Sequence[Key] | None) -> bool:
    """Return whether other fields than one that is missing define trajectories."""
    keys = storage.keys
    own = (keys.trajectory, keys.terminated, keys.truncated, keys.done, keys.start)
    known = own if ends is None else ends
    return any(key is not None and key in storage.require_schema() for key in known)


def _check(storage: ReadView, key: Key) -> None:
    field = storage.require_schema().fields[storage.require_schema().place_of(key)]
    if field.row_items != 1 or field.dtype in ("bfloat16", "complex64", OBJECT):
        raise SchemaError(
            f"{key_name(key)!r} must be one number per row, but it is {field}",
            hint="if each row is a whole trajectory, store its steps: extend(batch.reshape(-1)), or ndim=2",
        )


class KeyedRuns(Runs):
    """Trajectories defined by a field: rows with the same value, in the order in which they were written.

    A row that ends a trajectory, or one that begins one, splits rows with the same value into two
    trajectories. Without such a field the store's episodes are split at their ends.

    Threads, processes, crashes: as `Runs`.

    Args:
        storage: The storage with the rows; referenced weakly.
        trajectory: The field that identifies trajectories; None for the store's episodes.
        ends: The fields that end trajectories; None for the store's own, where rows that are only truncated
            do not end a trajectory.
    """

    def __init__(self, storage: ReadView, trajectory: Key | None, ends: Sequence[Key] | None) -> None:
        super().__init__(storage)
        self.lock = storage.lock  # because reading rows may take it
        self._splits = Filter(None, None)
        keys = storage.keys
        fields = len(storage.require_schema().fields)
        self._names = fields + 1 if trajectory is None else storage.require_schema().place_of(trajectory)
        self._ends = None if ends is None else [storage.require_schema().place_of(key) for key in ends]
        if ends is not None:
            self._flags = list(self._ends or ())
        else:
            own = (keys.terminated, keys.truncated, keys.done, keys.start)
            self._own = [-1 if key is None else storage.require_schema().place_of(key) for key in own]
            self._flags = [place for place in self._own if place >= 0]
        self._counts_steps = keys.start == ("step_count",)
        self._reduction = keys.done_reduce
        self._forget()

    def _forget(self) -> None:
        self._fragments = Fragments()
        self._next: dict[int, int] = {}  # the next step, by value of the field
        self._newest: dict[int, int] = {}  # the newest fragment, by value of the field
        self._read = 0  # the newest id that was read
        self._held_back = 64  # with more fragments than this, fragments of evicted rows are dropped
        self._state: tuple[object, int] | None = None

    def _names_place(self) -> int:
        return self._names

    def _is_current(self, storage: ReadView) -> bool:
        return self._state == self._state_of(storage) and window_of_runs(storage) == self._window

    def _state_of(self, storage: ReadView) -> tuple[object, int]:
        return storage.episodes, storage.changes.number

    def _take(self, storage: ReadView, *, whole: bool = False) -> Taken:
        for _ in range(_TRIES):
            state, window = self._state_of(storage), window_of_runs(storage)
            if state != self._state:
                self._forget()
            if self._read_on(storage, window):
                break
            self._forget()
        self._state = state
        fragments = self._fragments
        if len(fragments) > self._held_back:
            fragments.evict(window.low)
            self._held_back = 64 + 2 * len(fragments)
            alive = set(np.unique(fragments.rows[0]).tolist())
            self._next, self._newest = (
                {name: value for name, value in table.items() if name in alive}
                for table in (self._next, self._newest)
            )
        touched = fragments.take_touched()
        whole = whole or touched is None or fragments is not self._known
        return Taken(fragments, window, touched, fragments.rows if whole else None)

    def _read_on(self, storage: ReadView, window: Window) -> bool:
        """Read rows up to the end of the window; return whether all of them were still there."""
        for first, count in Window(max(self._read, window.low), window.last, window.deleted).runs():
            for start in range(first, first + count, _CHUNK):
                ids = np.arange(start, min(start + _CHUNK, first + count))
                columns = storage.read(ids, [self._names, *self._flags])
                splits = self._splits.number_splits(storage, ids)
                if not storage.intact(ids):
                    return False
                names = as_names(columns[0].reshape(-1)) ^ splits  # no trajectory has rows of two splits
                self._add(start, names, *self._cuts(columns[1:], ids.size))
        self._read = max(self._read, window.last)
        return True

    def _cuts(self, columns: Sequence[Array], rows: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows end a trajectory, and which rows begin one. Shapes `(rows,)`."""
        none = np.zeros(rows, np.bool_)
        if self._ends is not None:
            return np.logical_or.reduce([column.reshape(-1).astype(np.bool_) for column in columns]), none
        found = dict(zip(self._flags, columns, strict=True))
        terminated, truncated, done, start = (found.get(place) for place in self._own)
        ends, _ = find_ends(terminated, truncated, done, self._reduction)
        starts = none if start is None else start.reshape(-1).astype(np.bool_)
        if start is not None and self._counts_steps:
            starts = ~starts
        return none if ends is None else ends, starts

    def _add(
        self, first_id: int, names: IntArray, ends: NDArray[np.bool_], starts: NDArray[np.bool_]
    ) -> None:
        order = np.argsort(names, kind="stable")
        named, ended, begun = names[order], ends[order], starts[order]
        new = np.flatnonzero(np.append(True, named[1:] != named[:-1]))
        # Skip a step at every cut, so that a new run begins there.
        cuts = np.append(False, ended[:-1]) | begun
        cuts[new] = begun[new] & np.isin(named[new], np.fromiter(self._next, np.int64, len(self._next)))
        counts = np.diff(np.append(new, named.size))
        steps = np.arange(named.size) + np.cumsum(cuts)
        before = np.repeat(steps[new] - cuts[new], counts)
        base = np.array([self._next.get(name, 0) for name in named[new].tolist()])
        steps += np.repeat(base, counts) - before
        last = new + counts - 1
        following = (steps[last] + 1 + ended[last]).tolist()
        self._next.update(zip(named[new].tolist(), following, strict=True))
        placed = np.empty_like(steps)
        placed[order] = steps
        for fragment in find_fragments(names, placed, np.arange(first_id, first_id + names.size)).T.tolist():
            number = self._newest.get(fragment[0], -1)
            goes_on = number >= 0 and self._fragments.step_after(number) == fragment[1]
            self._newest[fragment[0]] = self._fragments.add(number if goes_on else -1, tuple(fragment))
