"""Everything that one opening of a store for writing has opened.

`expstore.storages.engine.opening` creates it; the storage replaces it as a whole. This module finds rows; the
store and its services decide when rows are committed, changed or synced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import google_crc32c
import numpy as np

from expstore.core.geometry import RingGeometry
from expstore.core.id_set import NO_IDS, IdSet
from expstore.core.values import Array, IntArray
from expstore.disk.checkpointed import Checkpointed, Pin, take_all
from expstore.disk.files import File
from expstore.episodes.log import EpisodeLog
from expstore.errors import StateError
from expstore.storages.batch import Payload, Rows
from expstore.storages.columns.checksums import BLOCK_ROWS, Checksums
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.memtable import Memtable
from expstore.storages.columns.payload import payload_parts
from expstore.storages.columns.priorities import StoredPriorities
from expstore.storages.columns.sample_counts_column import SampledColumn
from expstore.storages.format.journal import Journal
from expstore.storages.format.row_changes import RowChanges
from expstore.storages.format.write_key_file import KeyFile
from expstore.storages.row_state import RowState
from expstore.storages.snapshots.capture import base_of


class _Part(Protocol):
    def close(self) -> None:
        """Close the part's files."""


@dataclass(eq=False, kw_only=True)
class OpenStore(RowState):
    """The rows of a store that is open for writing, and the files that contain them.

    Invariant: all attributes are from one opening. If an opening fails, the storage keeps the object that it
    has.

    Crashes: everything that is only in memory is also in the journal.

    Args:
        journal: The journal of commit records.
        log: Facts about episodes that have ended.
        columns: The columns; None: there are no fields yet.
        checksums: Checksums of blocks of the columns; None if `columns` is None.
        memtable: Rows that the columns lack.
        row_changes: Which rows were changed in place.
    """

    journal: Journal
    log: EpisodeLog
    columns: WritableColumns | None
    checksums: Checksums | None
    memtable: Memtable[Pin]
    priorities: StoredPriorities
    write_keys: KeyFile
    sampled: SampledColumn | None
    row_changes: RowChanges

    def replace_columns(self, columns: WritableColumns) -> None:
        """Use other columns; former columns that are among them stay open."""
        self.columns = columns
        self.annotations = columns.annotations if columns.annotated else None

    def replace_checksums(self, checksums: Checksums) -> None:
        """Use the checksums of other columns; the caller closes the former checksums."""
        self.checksums = checksums

    def tombstones(self, slots: int | None) -> tuple[int, IdSet]:
        """Return which rows were removed permanently: all rows up to an id, and a set of rows above it.

        Args:
            slots: Number of slots of a ring; None: the store is unbounded.
        """
        if slots is None:
            return self.stored.low, self.stored.deleted
        return max(self.retired, self.last - slots), NO_IDS

    def base_record(self, generation: int, *, opening: bool) -> dict[str, Any]:
        """Return the base record that begins a segment of the journal: the state before its other records.

        Args:
            generation: The number of this opening.
            opening: Whether the segment is the first one of an opening.
        """
        own = {"opening": opening, "generation": generation, "log_length": self.log.length}
        if self.annotated:
            own["annotated"] = self.annotated
        # The number of keys shows an opening whether the file of keys was lost.
        return base_of(self) | own | {"randomness": None, "write_keys": self.write_keys.number}

    # -- appending ---------------------------------------------------------------------------------

    def keep(self, columns: WritableColumns, rows: Rows, geometry: RingGeometry, priority: float) -> Payload:
        """Add a few rows to the memtable, which has room; their commit record will contain their bytes."""
        inline = b"".join(payload_parts(columns, rows.columns, rows.assignment.numbers))
        self.priorities.start(geometry.runs(rows.first_id, rows.count), geometry.slots, priority)
        self.memtable.add(rows.first_id, rows.count, inline)
        return Payload(google_crc32c.value(inline), inline, in_columns=False)

    def put(
        self, columns: WritableColumns, rows: Rows, skipped: int, geometry: RingGeometry, priority: float
    ) -> Payload:
        """Write the rows of a batch to the columns; the memtable is empty.

        Args:
            columns: The columns.
            rows: The batch.
            skipped: How many of its first rows get no slot.
            geometry: How ids and slots correspond.
            priority: The first priority of the rows, as in their commit record.

        Returns:
            The checksum of the bytes, for the commit record.

        Raises:
            StorageError: The disk failed.
        """
        priorities, count = self.priorities, rows.count
        arrays, numbers = rows.columns, rows.assignment.numbers
        if skipped:
            arrays = [array[skipped:] for array in arrays]
            numbers = np.ascontiguousarray(numbers[:, skipped:])
        runs = geometry.runs(rows.first_id + skipped, count - skipped)
        with priorities.lock:  # a page of older priorities must not be written after these
            priorities.start(runs, geometry.slots, priority)
            first = np.full(count - skipped, priority, np.float32)
            return Payload(columns.write(runs, arrays, numbers, first))

    # -- changing ----------------------------------------------------------------------------------

    @property
    def is_append_only(self) -> bool:
        """Whether some columns can only be appended to: after a failed write, their state is unknown."""
        return self.columns is not None and bool(self.columns.unviewed_places)

    def write_column(self, place: int, slots: IntArray, values: Array) -> set[File]:
        """Write rows of one column in place; return the files that were written to.

        Args:
            place: Position of the column.
            slots: Slots of the rows. Shape `(n,)`.
            values: Their values. Shape `(n, *row shape)`.
        """
        return set(self.require_columns().columns[place].write_rows(slots, values))

    def overwrite(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> set[File]:
        """Write single rows of columns in place; return the files that were written to.

        Args:
            slots: Slots of the rows. Shape `(n,)`.
            places: Positions of the columns.
            columns: The values of each column. Shapes `(n, *row shape)`.
        """
        touched: set[File] = set()
        priorities = len(self.require_columns().columns) - 1
        for place, values in zip(places, columns, strict=True):
            if place == priorities:
                with self.priorities.lock:  # a page of older priorities must not be written after these
                    self.priorities.values[slots] = values
                    touched |= self.write_column(place, slots, values)
            else:
                touched |= self.write_column(place, slots, values)
        return touched

    def note_touched(self, files: set[File], slots: IntArray) -> None:
        """Make the next checkpoint sync files and sum the blocks of slots; the lock of the episodes is held.

        Args:
            files: Files that were written to.
            slots: Slots of the rows that were written. Shape `(n,)`.
        """
        if self.columns is not None and self.checksums is not None:
            self.columns.touched |= files
            self.checksums.note_changed((slots // BLOCK_ROWS).tolist())

    # -- reading -----------------------------------------------------------------------------------

    def require_columns(self) -> WritableColumns:
        """Return the columns.

        Raises:
            StateError: There are no fields yet.
        """
        if self.columns is None:
            raise StateError("the store has no columns yet", hint="extend() it first")
        return self.columns

    def holds_back(self, slots: IntArray) -> bool:
        """Return whether a row of these slots is in the memtable. Shape `(n,)`."""
        memtable, columns = self.memtable, self.columns
        return bool(memtable.count) and columns is not None and memtable.holds(columns, slots)

    def read_recent(self, ids: Sequence[int], places: Sequence[int]) -> list[Array] | None:
        """Copy a few rows without draining the memtable or unpacking chunks; see `RowState.read_recent`."""
        columns, memtable = self.columns, self.memtable
        if columns is None:
            return None
        if memtable.count:
            return memtable.copy_recent(columns, ids, places)
        rows: dict[int, Array] = {}
        numbers = np.array(ids)
        for place in columns.packed.keys() & set(places):
            recent = columns.gather_recent(place, numbers)  # no thread drains the memtable: it is empty
            if recent is None:
                return None
            rows[place] = recent
        flat = [place for place in places if place not in rows]
        slots = numbers - 1 if columns.slots is None else (numbers - 1) % columns.slots
        rows |= zip(flat, memtable.replaced.read_rows(columns, slots, flat), strict=True)
        return [rows[place] for place in places]

    def sizes_of(self, slots: IntArray) -> IntArray:
        """Return the bytes of rows in variable-length fields; the rows must not be in the memtable.

        Args:
            slots: Slots of the rows. Shape `(n,)`.

        Returns:
            Shape `(n,)`, int64.
        """
        return np.zeros(slots.size, np.int64) if self.columns is None else self.columns.sizes(slots)

    # -- files -------------------------------------------------------------------------------------

    @property
    def annotated(self) -> int:
        """The address after the newest record of annotations; 0 without annotations."""
        annotations = None if self.columns is None else self.columns.annotations
        return 0 if annotations is None else annotations.end

    def parts(self) -> list[Checkpointed]:
        """Return all parts that a checkpoint syncs."""
        annotations = None if self.columns is None else self.columns.annotations
        possible = (self.columns, self.checksums, self.sampled, annotations)
        parts: list[Checkpointed] = [part for part in possible if part is not None]
        return [*parts, self.log, self.write_keys, self.row_changes]

    def take_new_folders(self) -> set[Path]:
        """Return the folders with new names in them, each only once."""
        folders = self.columns.take_new_folders() if self.columns is not None else set()
        return folders if self.sampled is None else folders | take_all(self.sampled.new_folders)

    def rest(self) -> bool:
        """Close the descriptors of the columns if everything is synced; return whether it is.

        The next use opens the files again. The caller excludes writes, counts, syncs and checkpoints.
        """
        if self.memtable.count or self.memtable.replaced:
            return False
        resting = [part.rest() for part in (self.columns, self.sampled) if part is not None]
        return all(resting)

    def _parts(self) -> Iterator[_Part]:
        parts = (self.journal, self.log, self.write_keys, self.columns, self.checksums, self.sampled)
        for part in (*parts, self.row_changes):
            if part is not None:
                yield part

    def close(self) -> None:
        """Close all files; rows that were mapped can still be read."""
        for part in self._parts():
            part.close()
