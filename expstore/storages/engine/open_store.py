"""Everything that one opening of a store for writing has opened.

`expstore.storages.engine.opening` makes it; the storage swaps it as one. It says where rows are; when they
are committed, changed or synced is said by the store and its services.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import google_crc32c
import numpy as np

from expstore.core import tuning
from expstore.core.geometry import RingGeometry
from expstore.core.id_set import NO_GAPS, Gaps
from expstore.core.values import Array, IntArray, cut_run
from expstore.disk.checkpointed import Checkpointed
from expstore.disk.files import File
from expstore.episodes.log import EpisodeLog
from expstore.errors import StateError
from expstore.storages.batch import Payload, Rows
from expstore.storages.columns.checksums import BLOCK_ROWS, Checksums
from expstore.storages.columns.column_set import taken
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.memtable import TAIL_ROWS, Tail
from expstore.storages.columns.payload import payload_parts
from expstore.storages.columns.priorities import StoredPriorities
from expstore.storages.columns.sample_counts_column import SampledColumn
from expstore.storages.engine.replaced_rows import ReplacedRows
from expstore.storages.engine.shared_state import SharedState
from expstore.storages.format.journal import Journal
from expstore.storages.format.write_key_file import KeyFile
from expstore.storages.row_state import RowState
from expstore.storages.snapshots.capture import base_of

__all__ = ["OpenStore"]


class _Part(Protocol):
    def close(self) -> None:
        """Close its files."""


@dataclass(eq=False, kw_only=True)
class OpenStore(RowState):
    """The rows of a store that is open for writing, and the files that they are in.

    Invariant: all of it is of one opening. An opening that fails makes none, and the storage keeps the one
    that it has; no attribute is ever taken back by itself.

    Crashes: what is in memory alone is in the journal, too.

    Args:
        journal: Gets the commit records.
        log: Facts about episodes that have ended.
        columns: The rows; None: there are no fields yet.
        checksums: Of blocks of the columns; None with `columns`.
        memtable: Rows that the columns do not hold yet.
        replaced: Rows that took the places of others, which the columns do not hold yet.
    """

    journal: Journal
    log: EpisodeLog
    columns: WritableColumns | None
    checksums: Checksums | None
    memtable: Tail
    replaced: ReplacedRows
    priorities: StoredPriorities
    write_keys: KeyFile
    sampled: SampledColumn | None

    def replace_columns(self, columns: WritableColumns) -> None:
        """Have other columns; the former ones stay open where they are among these."""
        self.columns = columns

    def replace_checksums(self, checksums: Checksums) -> None:
        """Have the checksums of other columns; the caller closes the former."""
        self.checksums = checksums

    def tombstones(self, slots: int | None) -> tuple[int, Gaps]:
        """Return which rows have left for good: all up to an id, and some above it.

        Args:
            slots: How many a ring has; None: the store grows.
        """
        if slots is None:
            return self.window.low, self.window.gaps
        return max(self.retired, self.last - slots), NO_GAPS

    def base_record(self, generation: int, *, opening: bool) -> dict[str, Any]:
        """Return what a segment of the journal begins with: the state before its first record.

        Args:
            generation: The number of this opening.
            opening: Whether the segment is the first one of an opening.
        """
        own = {"opening": opening, "generation": generation, "log_length": self.log.length}
        # By the number of keys a lost file of keys is noticed.
        return base_of(self) | own | {"write_keys": self.write_keys.number}

    # -- appending ---------------------------------------------------------------------------------

    def put(self, rows: Rows, skipped: int, geometry: RingGeometry, shared: SharedState) -> Payload:
        """Write the rows of a batch to the columns, or keep few of them in the memtable.

        Args:
            rows: The batch.
            skipped: So many of its first rows get no slot.
            geometry: Says which slots the others get.
            shared: Is told when the memtable was drained.

        Returns:
            What the commit record says of them.

        Raises:
            StorageError: The disk failed.
        """
        columns, priorities, count = self.columns, self.priorities, rows.count
        if columns is None:
            raise StateError("the store has no columns yet", hint="extend() it first")
        # The memtable finds rows by their slots, so it cannot hold a batch that needs one slot twice.
        if count <= min(TAIL_ROWS, geometry.spare) and (
            columns.bytes_of(rows.columns, count) <= tuning.MEMTABLE_BATCH_BYTES
        ):
            return self._keep(columns, rows, geometry, shared)
        if self.memtable.count:
            self.drain(shared)
        arrays, numbers = rows.columns, rows.assignment.numbers
        if skipped:
            arrays = [array[skipped:] for array in arrays]
            numbers = np.ascontiguousarray(numbers[:, skipped:])
        runs = geometry.runs(rows.first_id + skipped, count - skipped)
        with priorities.lock:  # a page of older priorities must not be written after these
            priorities.start(runs, geometry.slots)
            largest = np.full(count - skipped, priorities.largest, np.float32)
            return Payload(columns.write(runs, arrays, numbers, largest))

    def _keep(
        self, columns: WritableColumns, rows: Rows, geometry: RingGeometry, shared: SharedState
    ) -> Payload:
        """Keep few rows in the memtable: their commit record will carry their bytes."""
        if self.memtable.full:
            self.drain(shared)
        parts = payload_parts(columns, rows.columns, rows.assignment.numbers)
        inline = b"".join(parts)
        self.priorities.start(geometry.runs(rows.first_id, rows.count), geometry.slots)
        self.memtable.add(rows.first_id, rows.count, parts)
        return Payload(google_crc32c.value(inline), inline, in_columns=False)

    def drain(self, shared: SharedState) -> None:
        """Write the rows that the memtable holds to the columns.

        Raises:
            StorageError: The disk failed; the memtable still holds them.
        """
        memtable, columns = self.memtable, self.columns
        if not memtable.count or columns is None or not shared.owned:
            return  # a forked child must not write: the parent may have given their slots to other rows
        with memtable.lock, self.priorities.lock:
            if memtable.count:
                runs = cut_run(memtable.first_id, memtable.count, columns.slots)
                values = self.priorities.values
                priorities = np.concatenate([values[slot : slot + n] for slot, _, n in runs])
                memtable.write(columns, runs, priorities)
                # Before others see an empty memtable: they write newer rows then, and set this further.
                shared.drain(memtable.first_id + memtable.count - 1)
                memtable.drop()

    # -- changing ----------------------------------------------------------------------------------

    @property
    def is_append_only(self) -> bool:
        """Whether a column can only be appended to, so that a write that failed leaves it in doubt."""
        return self.columns is not None and (bool(self.columns.packed) or self.columns.segments is not None)

    def write_column(self, place: int, slots: IntArray, values: Array) -> set[File]:
        """Write rows of one column in place; return the files that were written to.

        Args:
            place: Of the column.
            slots: Which rows. Shape `(n,)`.
            values: Shape `(n, *row shape)`.
        """
        return set(self.require_columns().columns[place].write_rows(slots, values))

    def overwrite(self, slots: IntArray, places: Sequence[int], columns: Sequence[Array]) -> set[File]:
        """Write columns of single rows in place; return the files that were written to.

        Args:
            slots: Which rows. Shape `(n,)`.
            places: Of the columns.
            columns: Their values. Shapes `(n, *row shape)`.
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
        """Have the next checkpoint sync files, and sum the blocks of slots; the lock of the episodes is held.

        Args:
            files: They were written to.
            slots: Of the rows that were. Shape `(n,)`.
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

    def in_memtable(self, slots: IntArray) -> bool:
        """Return whether a row of these slots is in the memtable. Shape `(n,)`."""
        memtable = self.memtable
        return bool(
            memtable.count and self.columns is not None and memtable.holds(slots, self.columns.slots).any()
        )

    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids, none of which is in the memtable; see `ReadView.views`."""
        group = self.columns
        if group is None:
            return [[] for _ in places]
        runs, columns = cut_run(first_id, count, group.slots), group.columns
        found: list[list[Any]] = []
        over, segments = self.replaced.overlay(), group.segments
        for place in places:
            if segments is not None and place in group.segment_places:
                number = group.segment_places.index(place)
                found.append(segments.views(number, first_id, count))
                continue
            if over is not None and place < len(columns) - 1:
                parts = [over.parts(place, columns[place], slot, n) for slot, _, n in runs]
                found.append([part[0] if len(part) == 1 else np.concatenate(part) for part in parts])
                continue
            if not columns[place].viewed:
                found.append([columns[place].part(slot, n) for slot, _, n in runs])
                continue
            is_priority = place == len(columns) - 1
            source = self.priorities.values if is_priority else columns[place].view
            found.append([source[slot : slot + n] for slot, _, n in runs])
        return found

    def sizes_of(self, slots: IntArray) -> IntArray:
        """Return how many bytes the fields without a fixed size take in rows that are not in the memtable.

        Args:
            slots: Which rows. Shape `(n,)`.

        Returns:
            Shape `(n,)`, int64.
        """
        segments = None if self.columns is None else self.columns.segments
        if segments is None:
            return np.zeros(slots.size, np.int64)
        return segments.sizes(segments.ids_of(slots))

    @property
    def variable_bytes(self) -> int:
        """How many bytes the fields without a fixed size take per row, on average."""
        segments = None if self.columns is None else self.columns.segments
        return 0 if segments is None else int(segments.mean_bytes)

    # -- files -------------------------------------------------------------------------------------

    def parts(self) -> list[Checkpointed]:
        """Return all that a checkpoint brings to the disk."""
        parts = [part for part in (self.columns, self.checksums, self.sampled) if part is not None]
        return [*parts, self.log, self.write_keys]

    def take_new_folders(self) -> set[Path]:
        """Return the folders with new names in them, once."""
        folders = taken(self.columns.new_folders) if self.columns is not None else set()
        return folders if self.sampled is None else folders | taken(self.sampled.new_folders)

    def _parts(self) -> Iterator[_Part]:
        for part in (self.journal, self.log, self.write_keys, self.columns, self.checksums, self.sampled):
            if part is not None:
                yield part

    def close(self) -> None:
        """Close all files; rows that were mapped can still be read."""
        for part in self._parts():
            part.close()
