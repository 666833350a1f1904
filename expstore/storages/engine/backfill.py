"""Compute and write the values of a new field for rows that already exist; check fields to add or drop.

Used by storages. Most values are computed while other threads read and write. Only the newest rows, and rows
that were changed meanwhile, are filled while writes are blocked. The caller decides where values are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from expstore.core.values import Array, IntArray, Key, key_name
from expstore.errors import SchemaError, StateError
from expstore.storages.new_field import NewField, inner_dims

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

#: The most rows, and approximate bytes, computed at a time.
_ROWS, _BYTES = 4096, 8 << 20
#: The most passes over new rows while others write, and how few rows may be left for `finish`.
_PASSES, _FEW = 20, 512


class Place(Protocol):
    """Where the values of a field are written."""

    def lay(self, first_id: int, values: Array) -> None:
        """Write the values of a run of rows."""

    def lay_rows(self, ids: IntArray, values: Array) -> None:
        """Write the values of single rows."""


class Filler:
    """Compute the values of a new field for all rows of a storage.

    Args:
        storage: The storage with the rows.
        new_field: The new field.
        place: Where the values are written.
    """

    def __init__(self, storage: ReadView, new_field: NewField, place: Place) -> None:
        self._storage, self._new_field, self._place = storage, new_field, place
        self._done = 0  # the newest id that has its value
        self._changes = storage.changes.number & ~1
        self._content = storage.epochs.content
        self._step = max(1, _BYTES // new_field.entry.row_bytes)
        if new_field.fill is None:
            self._step = min(self._step, new_field.rows)

    def run_ahead(self) -> None:
        """Fill the rows that exist, while other threads read and write."""
        for _ in range(_PASSES):
            self._run()
            if self._storage.stored.last - self._done <= _FEW:
                return

    def finish(self) -> None:
        """Fill the remaining rows. The caller holds the storage's lock.

        Raises:
            StateError: The storage's content was replaced meanwhile.
        """
        storage = self._storage
        if storage.epochs.content != self._content:
            raise StateError("the content of the store was replaced meanwhile", hint="add the field again")
        if self._new_field.compute is not None and storage.changes.number & ~1 != self._changes:
            window = storage.stored
            slots = storage.changes.since(self._changes)
            ids = window.ids() if slots is None else np.unique(storage.geometry.ids_in(slots, window.last))
            ids = ids[window.holds(ids) & (ids <= self._done)]
            for start in range(0, ids.size, self._step):
                found, values = self._values(ids[start : start + self._step])
                self._place.lay_rows(found, values)
        self._run()
        if storage.stored.last > self._done or storage.epochs.content != self._content:
            raise StateError("rows were written while the values of a field were computed", hint="only read")

    def _run(self) -> None:
        storage, new_field = self._storage, self._new_field
        window = storage.stored
        for first, count in replace(window, low=max(window.low, min(self._done, window.last))).runs():
            for start in range(first, first + count, self._step):
                n = min(self._step, first + count - start)
                self._place.lay(start, self._run_of(start, n))
                if new_field.progress is not None:
                    new_field.progress(start + n - 1 - window.low, window.size)
        self._done = max(self._done, window.last)

    def _run_of(self, first_id: int, count: int) -> Array:
        """Return the values of a run of rows; zeros for rows that are no longer in the store."""
        entry, fill = self._new_field.entry, self._new_field.fill
        if fill is not None:
            return np.ascontiguousarray(np.broadcast_to(fill, (count, *entry.shape)))
        ids = np.arange(first_id, first_id + count)
        found, values = self._values(ids)
        if found.size == count:
            return values
        whole = np.zeros((count, *entry.shape), entry.numpy_dtype)
        whole[found - first_id] = values
        return whole

    def _values(self, ids: IntArray) -> tuple[IntArray, Array]:
        assert self._new_field.compute is not None
        return self._new_field.compute(ids)


def check_droppable(storage: ReadView, key: Key) -> None:
    """Check that a field can be dropped from a storage.

    Raises:
        SchemaError: There is no such field, it is the only one, rows are split into episodes by it, or rows
            are not TensorDicts.
        StateError: Rows are ranked by the field.
    """
    schema, name = storage.require_schema(), key_name(key)
    storage.require_schema().place_of(key)
    if inner_dims(schema.form) is None:
        raise SchemaError(f"rows of this store are not TensorDicts: field {name!r} cannot be dropped")
    roles = storage.keys
    for role in roles.__dataclass_fields__:
        if getattr(roles, role) == key:
            raise SchemaError(
                f"field {name!r} has the role {role!r} for episodes: it cannot be dropped",
                hint="create another store for rows without it",
            )
    if storage.ranking is not None and storage.ranking.key == key:
        raise StateError(
            f"rows are ranked by {name!r}: it cannot be dropped", hint="set another writer first"
        )
    schema.without(key)


def places_without(count: int, place: int) -> Sequence[int]:
    """Return the positions of the fields that remain when the one at `place` is dropped.

    >>> from expstore.storages.engine.backfill import places_without
    >>> places_without(4, 1)
    [0, 2, 3]
    """
    return [number for number in range(count) if number != place]
