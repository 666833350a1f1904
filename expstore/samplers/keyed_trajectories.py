"""Trajectories by other fields than the store's own.

Used by samplers of slices that were given such a field. It reads those fields of new rows once, keeps where
each trajectory's rows lie, and never reads a row twice unless rows were changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray, Key, Window, key_name
from expstore.episodes.fragments import Fragments, find_fragments
from expstore.episodes.segmentation import find_ends
from expstore.errors import SchemaError
from expstore.schema.schema import OBJECT
from expstore.storages.run_index import Runs, Taken, as_names

if TYPE_CHECKING:
    from expstore.schema.schema import Schema
    from expstore.storages.read_view import ReadView

__all__ = ["KeyedRuns", "Trajectories"]

_CHUNK = 1 << 18
_TRIES = 3


class Trajectories:
    """Find the runs of whichever storage is asked about, by the fields that a user has named.

    Threads: any number may ask. Processes, crashes: it keeps nothing but the last answer.

    Args:
        name: The field that names trajectories; None: the store's episodes.
        ends: Fields that end them; None: as the store has it.
    """

    def __init__(self, name: Key | None = None, ends: Sequence[Key] | None = None) -> None:
        self.name, self.ends = name, ends
        self._known: tuple[weakref.ref[ReadView], Schema, Runs] | None = None

    @property
    def keys(self) -> frozenset[Key]:
        """The fields that a user has named."""
        return frozenset(() if self.name is None else (self.name,)) | frozenset(self.ends or ())

    def of(self, storage: ReadView) -> Runs:
        """Return the runs of a storage, the same object while its fields are the same.

        Raises:
            SchemaError: There is no such field, or it has more than one value per row.
        """
        known, schema = self._known, storage.require_schema()
        if known is None or known[0]() is not storage or known[1] is not schema:
            known = self._known = weakref.ref(storage), schema, _runs_by(storage, self.name, self.ends)
        return known[2]

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; it finds runs by itself."""
        return {"name": self.name, "ends": self.ends, "_known": None}


def _runs_by(storage: ReadView, trajectory: Key | None, ends: Sequence[Key] | None) -> Runs:
    """Return the runs of a storage by these fields: the storage's own where they are its own.

    Args:
        storage: What holds the rows.
        trajectory: The field that names trajectories; None: the store's episodes.
        ends: Fields that end trajectories, of which some are stored; None: as the store has it.

    Raises:
        SchemaError: There is no such field, or it has more than one value per row.
    """
    keys, schema = storage.keys, storage.require_schema()
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


def _check(storage: ReadView, key: Key) -> None:
    field = storage.require_schema().fields[storage.require_schema().place_of(key)]
    if field.row_items != 1 or field.dtype in ("bfloat16", "complex64", OBJECT):
        raise SchemaError(f"{key_name(key)!r} must be one number per row, but it is {field}")


class KeyedRuns(Runs):
    """Number runs of steps that have one value in a field, in the order in which they came.

    After a row that ends a trajectory, and before one that begins one, the value stands for another
    trajectory. Without a field of names, episodes of the store are parted at their ends.

    Threads, processes, crashes: as `Runs`.

    Args:
        storage: Whose rows they are; held weakly.
        trajectory: The field that names trajectories; None: the episodes of the store.
        ends: Fields that end them; None: as the store does, an end that is not only a truncation.
    """

    def __init__(self, storage: ReadView, trajectory: Key | None, ends: Sequence[Key] | None) -> None:
        super().__init__(storage)
        self.lock = storage.lock  # which reading rows may take
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
        self._next: dict[int, int] = {}  # the next step of each trajectory's name
        self._newest: dict[int, int] = {}  # its newest fragment
        self._read = 0  # the newest id that was read
        self._held_back = 64  # fragments from which on those of rows that have left are dropped
        self._state: tuple[object, int] | None = None

    def _names_place(self) -> int:
        return self._names

    def _is_current(self, storage: ReadView) -> bool:
        return self._state == self._state_of(storage) and storage.query_window == self._window

    def _state_of(self, storage: ReadView) -> tuple[object, int]:
        return storage.episodes, storage.changes.number

    def _take(self, storage: ReadView, *, whole: bool = False) -> Taken:
        for _ in range(_TRIES):
            state, window = self._state_of(storage), storage.query_window
            if state != self._state:
                self._forget()
            if self._read_on(storage, window):
                break
            self._forget()
        self._state = state
        fragments = self._fragments
        if fragments.rows.shape[1] > self._held_back:
            fragments.evict(window.low)
            self._held_back = 64 + 2 * fragments.rows.shape[1]
            alive = set(np.unique(fragments.rows[0]).tolist())
            self._next, self._newest = (
                {name: value for name, value in table.items() if name in alive}
                for table in (self._next, self._newest)
            )
        touched = fragments.take_touched()
        whole = whole or touched is None or fragments is not self._known
        return Taken(fragments, window, touched, fragments.rows.copy() if whole else None)

    def _read_on(self, storage: ReadView, window: Window) -> bool:
        """Read rows up to the window's last; say whether all of them were still there."""
        for first, count in Window(max(self._read, window.low), window.last, window.deleted).runs():
            for start in range(first, first + count, _CHUNK):
                ids = np.arange(start, min(start + _CHUNK, first + count))
                columns = storage.read(ids, [self._names, *self._flags])
                if not storage.intact(ids):
                    return False
                self._add(start, as_names(columns[0].reshape(-1)), *self._cuts(columns[1:], ids.size))
        self._read = max(self._read, window.last)
        return True

    def _cuts(self, columns: Sequence[Array], rows: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows end a trajectory, and which begin one. Shapes `(rows,)`."""
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
        # A step is left out at every cut, so that what follows is a run of its own.
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
