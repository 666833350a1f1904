"""Statistics of fields, updated by reading only new and changed rows.

Rows are summed in blocks of ids. A block is read again after rows were added to it, removed from it, or
changed in place. Each call merges the results of all blocks. Nothing is written.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from expstore.buffers.store_handle import StoreHandle, StorePart
from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.moments import Moments
from expstore.core.values import Array, IntArray, Key, Window, key_name, to_key
from expstore.errors import ArgumentError, NotReadyError, SchemaError, StateError
from expstore.schema.schema import ARROW, OBJECT, Field, Schema
from expstore.storages.indexing import read_present
from expstore.storages.read_view import ReadView, read_stable

__all__ = ["FieldStats", "StatsKeeper"]

#: Rows of a block, until blocks are merged in pairs because there are too many.
_BLOCK_ROWS = 4096
#: Limits of a field's blocks: their number and bytes; but at least `_FEWEST` blocks are kept.
_BLOCKS, _BYTES, _FEWEST = 4096, 32 << 20, 16
#: Largest number of values that are read at a time.
_VALUES = 1 << 21
#: Fields with more values per row are skipped unless they are named.
_WIDE = 4096
#: Number of attempts if the store's content is replaced during the call.
_TRIES = 3
#: Dtypes whose values have no order, or no fixed size.
_UNORDERED = frozenset({ARROW, OBJECT, "complex64"})


@dataclass(frozen=True, slots=True, eq=False)
class FieldStats:
    """Statistics of one field over the readable rows, for each element of the field.

    Args:
        count: Number of rows.
        mean: Mean. Shape the field's, float64.
        std: Standard deviation of the population (`ddof=0`). Shape the field's, float64.
        min: Smallest value. Shape and dtype the field's; float32 for bfloat16.
        max: Largest value. Shape and dtype as `min`.
    """

    count: int
    mean: NDArray[np.float64]
    std: NDArray[np.float64]
    min: Array
    max: Array

    @classmethod
    def of(cls, moments: Moments) -> Self:
        """Return the statistics for moments, as new arrays."""
        std = np.sqrt(moments.squares / moments.count)
        parts = moments.mean, std, moments.smallest, moments.largest
        return cls(moments.count, *(np.array(part) for part in parts))


class _Seen(NamedTuple):
    """State of the store when rows were read. If it differs, rows with known ids may have changed.

    Args:
        content: As in `Epochs`.
        fields: As in `Epochs`.
        changes: Number of the last completed change in place.
    """

    content: int
    fields: int
    changes: int


class _Block(NamedTuple):
    """The result of one block.

    Args:
        last: The newest id that the block could have when it was read.
        moments: Moments of the rows that were readable.
    """

    last: int
    moments: Moments


class StatsKeeper(StorePart):
    """Cache statistics of the fields of a store.

    Memory: per field at most 32 MiB, or 16 blocks if these are larger. Threads: one thread computes at a
    time, the others wait; rows may be appended and changed meanwhile. Processes: each has its own results.
    Crashes: nothing is stored.

    Args:
        store: The store.
    """

    def __init__(self, store: StoreHandle) -> None:
        self._store = store
        self.leave_parent()

    def attach(self, storage: ReadView) -> None:
        """Drop the results of the previous storage or content."""
        # A call that runs in another thread fills the previous dict, which later calls do not read.
        self._known: dict[Field, _FieldBlocks] = {}

    def leave_parent(self) -> None:
        """Drop all results and the lock, which another thread of the parent may hold."""
        self._lock = threading.Lock()
        self._known = {}

    def compute(self, names: list[str | tuple[str, ...]] | None) -> dict[str | Key, FieldStats]:
        """Return the statistics of fields; see `Columns.stats`."""
        if names is not None and not isinstance(names, list):
            raise ArgumentError(f"fields= is a list of names, got {names!r}")
        with self._lock:
            known = self._known  # read before the storage: `attach` runs after a swap
            storage = self._store.check_open()
            storage.follow()
            return read_stable(storage, lambda: _compute(storage, known, names))

    def __getstate__(self) -> StoreHandle:
        """Return the state of a copy; the copy reads all rows again."""
        return self._store

    def __setstate__(self, store: StoreHandle) -> None:
        """Restore the result of `__getstate__`."""
        self._store = store
        self.leave_parent()


def _compute(
    storage: ReadView, known: dict[Field, _FieldBlocks], names: list[str | tuple[str, ...]] | None
) -> dict[str | Key, FieldStats]:
    schema = storage.schema
    if schema is None:
        raise _no_rows()
    entries = _choose(schema, names)
    for entry in known.keys() - set(schema.fields):  # dropped
        del known[entry]
    epochs = storage.epochs
    for _ in range(_TRIES):
        # Read before the window: later changes are handled by the next call.
        seen = _Seen(epochs.content, epochs.fields, storage.changes.number & ~1)
        window = storage.window
        found: dict[str | Key, Moments | None] = {}
        for entry in entries:
            blocks = known.setdefault(entry, _FieldBlocks(entry))
            name = entry.key if len(entry.key) > 1 else entry.key[0]
            found[name] = blocks.update(storage, schema.place(entry.key), window, seen)
        if epochs.content == seen.content:
            stats = {name: FieldStats.of(moments) for name, moments in found.items() if moments is not None}
            if not window.rows or len(stats) < len(found):
                raise _no_rows()
            return stats
    raise StateError("the content of the store was replaced while it was read", hint="try again")


def _choose(schema: Schema, names: list[str | tuple[str, ...]] | None) -> Sequence[Field]:
    """Return the fields to summarize.

    Raises:
        SchemaError: A named field does not exist, or has no statistics.
    """
    if names is None:
        return [
            entry for entry in schema.fields if entry.dtype not in _UNORDERED and entry.row_items <= _WIDE
        ]
    chosen = [schema.fields[schema.place_of(to_key(name))] for name in names]
    for entry in chosen:
        if entry.dtype in _UNORDERED:
            raise SchemaError(
                f"field {key_name(entry.key)!r} is {entry}; only bools and real numbers of a fixed size "
                "have statistics",
                hint="leave it out, or use sql()",
            )
    return chosen


def _no_rows() -> NotReadyError:
    return NotReadyError("the store has no rows to compute statistics of", hint="extend() it first")


class _FieldBlocks:
    """The results of one field by block: block k has the ids from k * rows + 1 to (k + 1) * rows.

    A block is up to date while it has as many readable rows as before, and no newer ones: a row that becomes
    unreadable never becomes readable again.
    """

    def __init__(self, entry: Field) -> None:
        self._entry = entry
        self._piece = max(1, min(_BLOCK_ROWS, _VALUES // entry.row_items))
        size = entry.row_items * (16 + 2 * entry.numpy_dtype.itemsize)
        self._most = max(_FEWEST, min(_BLOCKS, _BYTES // size))
        self._clear()

    def _clear(self) -> None:
        self._rows = _BLOCK_ROWS
        self._blocks: dict[int, _Block] = {}
        self._seen: _Seen | None = None
        self._last = 0

    def update(self, storage: ReadView, place: int, window: Window, seen: _Seen) -> Moments | None:
        """Read the blocks that are not up to date; return the moments of all rows, or None without rows.

        Args:
            storage: Storage of the rows.
            place: Position of the field in the schema.
            window: The rows to read; rows that are removed meanwhile may be missing.
            seen: The store's state, read before the window.
        """
        self._drop_changed(storage, seen)
        self._seen, self._last = seen, window.last
        first, last = window.low // self._rows, (window.last - 1) // self._rows
        while last - first >= self._most:
            self._merge_pairs()
            first, last = window.low // self._rows, (window.last - 1) // self._rows
        numbers = np.arange(first, last + 1)
        ends = np.minimum((numbers + 1) * self._rows, window.last)
        begins = np.maximum(numbers * self._rows, window.low)
        counts = ends - begins - (window.deleted.counts(ends) - window.deleted.counts(begins))
        blocks: dict[int, _Block] = {}
        former, self._blocks = self._blocks, blocks
        for number, begin, end, count in zip(
            numbers.tolist(), begins.tolist(), ends.tolist(), counts.tolist(), strict=True
        ):
            block = former.get(number)
            if block is None or (block.last, block.moments.count) != (end, count):
                moments = (
                    self._read(storage, place, Window(begin, end, window.deleted).ids()) if count else None
                )
                block = None if moments is None else _Block(end, moments)
            if block is not None:
                blocks[number] = block
        return Moments.merge([block.moments for block in blocks.values()]) if blocks else None

    def _drop_changed(self, storage: ReadView, seen: _Seen) -> None:
        """Drop the blocks with rows that were changed in place since the last call."""
        before = self._seen
        if before is None or (before.content, before.fields) != (seen.content, seen.fields):
            self._clear()
        elif before.changes != seen.changes:
            slots = storage.changes.since(before.changes)
            if slots is None:
                self._clear()
            else:
                ids = storage.geometry.ids_in(slots, self._last)
                for number in np.unique((ids - 1) // self._rows).tolist():
                    self._blocks.pop(number, None)

    def _merge_pairs(self) -> None:
        """Halve the number of blocks by merging neighbours."""
        merged: dict[int, _Block] = {}
        for number, block in self._blocks.items():  # ascending
            other = merged.get(number // 2)
            parts = [block.moments] if other is None else [other.moments, block.moments]
            merged[number // 2] = _Block(block.last, Moments.merge(parts))
        self._blocks, self._rows = merged, 2 * self._rows

    def _read(self, storage: ReadView, place: int, ids: IntArray) -> Moments | None:
        """Return the moments of the given rows that still exist, or None if none does."""
        moments: Moments | None = None
        for start in range(0, ids.size, self._piece):
            found, (rows,) = read_present(storage, ids[start : start + self._piece], [place])
            if found.size:
                part = Moments.of(widen_bfloat16(rows) if self._entry.dtype == "bfloat16" else rows)
                moments = part if moments is None else Moments.merge([moments, part])
        return moments
