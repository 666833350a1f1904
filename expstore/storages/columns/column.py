"""Interfaces of all kinds of columns, which the set of columns uses.

A `Column` is one field of all rows. A `Part` is an object with its own files: a column, or the segments that
several fields share. A `RowWriter` writes runs of rows to the columns of one kind. This module uses no files.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.core.id_set import IdSet
from expstore.core.values import Array, IntArray, Key, cut_run
from expstore.disk.checkpointed import Checkpointed, Dirty
from expstore.disk.files import File
from expstore.disk.threads import Job
from expstore.errors import SchemaError
from expstore.schema.schema import Field


@dataclass(slots=True, eq=False)
class Run:
    """Consecutive rows to be written to the columns.

    Args:
        first_id: Id of the first row.
        count: The number of rows.
        pieces: Where the rows are written: (first slot, offset in the run, number of rows).
        values: One array per column, in the order of the columns; priorities may be omitted.
        variable: The values of variable-length fields: pyarrow Arrays.
        jobs: Writes that other threads have not finished yet.
        episodes: Episode of each row. Shape `(n,)`.
        steps: Step of each row in its episode. Shape `(n,)`.
        parents: The fields that name the rows that other rows continue, by key.
        is_stored: Whether `variable`, and the values of packed columns, are rows as they are stored, which
            may refer to rows of earlier runs.
    """

    first_id: int
    count: int
    pieces: Sequence[tuple[int, int, int]]
    values: Sequence[Any]
    variable: Sequence[Any] = ()
    jobs: list[Job] = field(default_factory=list)
    episodes: Any = ()
    steps: Any = ()
    parents: Mapping[Key, Any] = field(default_factory=dict)
    is_stored: bool = False


@dataclass(frozen=True, slots=True)
class Deleted:
    """Rows deleted from an unbounded store, whose disk space is to be freed.

    Args:
        rows: All deleted rows.
        near: The rows among them around which there may be space to free.
        low: All rows up to this id are deleted.
        above: Rows above `low` that are deleted.
    """

    rows: IdSet
    near: IdSet
    low: int
    above: IdSet


@dataclass(frozen=True, slots=True)
class FieldSize:
    """How a field is stored on disk.

    Args:
        layout: "flat", "packed" or "segments"; None: its zarr.json cannot be read.
        codec: The codec of compressed rows; None: rows are not compressed.
        chunk_rows: How many rows are packed together; None: rows are not packed.
        disk_bytes: Size of its files, bytes.
        compression: Compression ratio of the rows in its chunks (raw bytes per stored byte); None: it has no
            chunks, or is not packed.
        shared: Share of its rows, or of the images of stacks, that are stored as the next observations of
            earlier rows, 0 to 1, estimated from a sample of 4096 packed rows; None: rows cannot be shared, or
            its files are damaged.
        row_bytes: Average size on disk of a row that is not shared, bytes.
    """

    layout: str | None
    codec: str | None
    chunk_rows: int | None
    disk_bytes: int
    compression: float | None
    shared: float | None
    row_bytes: float


class Column(ABC):
    """One field of all rows, found by slot.

    Threads: one writes, any number read.

    Args:
        entry: The field.
        folder: The folder of its Zarr array, or where it would be.
        slots: Number of slots of a ring; None: the column is unbounded.
        row_bytes: Size of a row; 0 for a variable-length field.
    """

    def __init__(self, entry: Field, folder: Path, slots: int | None, row_bytes: int) -> None:
        self.entry, self.folder, self.slots, self.row_bytes = entry, folder, slots, row_bytes

    @abstractmethod
    def gather(self, slots: IntArray) -> Any:
        """Copy rows out.

        Args:
            slots: Slots of the rows. Shape `(n,)`.

        Returns:
            Shape `(n, *row shape)`; a pyarrow Array for a variable-length field.

        Raises:
            CorruptionError: Rows are damaged.
        """

    @abstractmethod
    def part(self, slot: int, count: int) -> Any:
        """Return a run of slots, as `gather` does, without copying them if that is possible.

        Raises:
            CorruptionError: Rows are damaged.
        """

    def views(self, first_id: int, count: int) -> list[Any]:
        """Return a run of rows in pieces, without copying them if that is possible."""
        return [self.part(slot, n) for slot, _, n in cut_run(first_id, count, self.slots)]

    def mix(self, slots: IntArray, newer: Array, rows: Any) -> Any:
        """Return rows of which some are only in memory.

        Args:
            slots: Slots of the rows. Shape `(n,)`.
            newer: The position of each row in `rows`; negative: the row is in the column. Shape `(n,)`.
            rows: The rows in memory. Shape `(m, *row shape)`.
        """
        here = newer >= 0
        found = np.empty((slots.size, *self.entry.shape), self.entry.numpy_dtype)
        found[~here] = self.gather(slots[~here])
        found[here] = rows[newer[here]]
        return found

    @abstractmethod
    def write_rows(self, slots: IntArray, values: Array) -> list[File]:
        """Change single rows; return the changed files.

        Args:
            slots: Slots of the rows. Shape `(n,)`.
            values: Shape `(n, *row shape)`.

        Raises:
            SchemaError: Rows of this kind of column cannot be changed.
        """

    @abstractmethod
    def size(self, held: int, ids: Callable[[IntArray], IntArray]) -> FieldSize:
        """Return how the field is stored on disk, as far as the files were read.

        Args:
            held: Number of rows in the columns, readable or not.
            ids: Returns the ids that slots have, 0 where none was written.
        """

    @abstractmethod
    def sum_run(self, slot: int, count: int) -> int:
        """Return the crc32c of a run of slots, written or not; 0 if its files have checksums of their own."""


class ReadTogether(ABC):
    """Columns whose rows are read together, so that each file is read once."""

    @abstractmethod
    def gather_together(self, slots: IntArray, places: Sequence[int]) -> dict[int, Any]:
        """Copy rows out of some of its columns, if reading these columns together is faster.

        Args:
            slots: Slots of the rows. Shape `(n,)`.
            places: Positions of all columns to read.

        Returns:
            The rows, by position of the column.

        Raises:
            CorruptionError: Rows are damaged.
        """


class Part(ABC):
    """An object with its own files: a column, or the segments that several fields share.

    Threads: one thread opens, looks and frees; any number read meanwhile.
    """

    @abstractmethod
    def require_rows(self, first_id: int, count: int) -> None:
        """Check that rows are present.

        Raises:
            CorruptionError: A file is missing, or has lost rows.
        """

    @abstractmethod
    def extend_checksum(self, crc: int, first_id: int, count: int) -> int | None:
        """Extend a crc32c by a run of rows as they are on disk; return None if rows are missing."""

    @abstractmethod
    def paths(self) -> list[Path]:
        """Return the files with rows."""

    @property
    @abstractmethod
    def mean_bytes(self) -> int:
        """The average size of a row in memory, bytes."""

    @abstractmethod
    def measure_row_bytes(self, rows: int) -> float:
        """Return the average disk space of a row, bytes, if there are `rows` rows."""

    @abstractmethod
    def close(self) -> None:
        """Close the files; a map is removed with the last array over it."""


class AppendedPart(Part):
    """A part whose rows are appended in the order of their ids, not written to fixed places."""

    @abstractmethod
    def lacks(self, first_id: int, count: int) -> bool:
        """Return whether rows are missing or damaged. Called when a store is opened."""


class ReadPart(Part):
    """A part that is opened for reading only."""

    @abstractmethod
    def look(self, slots: int, *, due: bool = True) -> None:
        """Find the rows of slots 0 to `slots` - 1; note which are damaged.

        Args:
            slots: How many slots to look for.
            due: Whether all of them must be present; otherwise the look ends at the first missing one.
        """


class FollowedPart(AppendedPart, ReadPart):
    """An appended part that is opened for reading only; a writer may append to it meanwhile."""

    @abstractmethod
    def look_to(self, last: int) -> None:
        """Find the rows up to this id, which the writer has written.

        Raises:
            StorageError: The rows are missing, because another writer has opened the store.
        """

    @abstractmethod
    def end_at(self, last: int) -> None:
        """Make only rows up to this id readable. Called when there is no writer any more."""


class WrittenPart(Part):
    """A part that is opened for writing."""

    @abstractmethod
    def open_files(self) -> None:
        """Open the existing files."""

    @abstractmethod
    def free(self, deleted: Deleted) -> set[File]:
        """Free the space of deleted rows; return the files that were changed in place."""

    def rest(self) -> None:
        """Close the descriptors that each field has until its files are used again. All is synced."""


class RowWriter(ABC):
    """Writes runs of rows to the columns of one kind.

    Threads: one writes.
    """

    @abstractmethod
    def write(self, run: Run) -> list[int]:
        """Write rows.

        Returns:
            Checksums of the written batches. The checksum of the run is extended by them after its arrays.

        Raises:
            StorageError: The disk failed.
        """

    @abstractmethod
    def write_again(self, run: Run, synced: int) -> None:
        """Write rows of which some may already be on disk. Called when a store is opened.

        Args:
            run: The rows.
            synced: The newest id that a checkpoint covers.
        """

    def rest(self) -> None:
        """Forget descriptors: those of its columns are going to be closed."""


class Appender(RowWriter, Checkpointed):
    """Appends rows to columns in the order of their ids."""

    fields: Sequence[Field]

    @abstractmethod
    def change_error(self, fields: Sequence[Field]) -> SchemaError:
        """Return the error for changing rows of some of its fields in place. At least one field is given."""

    @abstractmethod
    def ranking_error(self, fields: Sequence[Field]) -> SchemaError:
        """Return the error for replacing rows of some of its fields by better ones. At least one is given."""

    @abstractmethod
    def check_removable(self, entry: Field) -> None:
        """Check that a field can be dropped from the store.

        Raises:
            SchemaError: Files of other fields contain rows of this field, or the reverse.
        """

    @abstractmethod
    def warm(self) -> None:
        """Load compiled loops in the background."""

    @abstractmethod
    def settle(self, last: int, synced: int) -> None:
        """Continue appending after a row; the next sync makes the state durable.

        All bytes that rows depend on are written again: after a failed sync, the system may report pages as
        clean that are not on the disk.

        Args:
            last: Id of the last valid row.
            synced: The newest id that a checkpoint covers.
        """

    @property
    @abstractmethod
    def touched_files(self) -> set[File]:
        """The files that were written to since the last checkpoint began."""

    @abstractmethod
    def take_new_folders(self) -> set[Path]:
        """Return the folders with new names in them, each only once; the caller syncs them."""

    def note_rows_synced(self) -> None:
        """Keep the rows written so far: their files and folders were synced, without a checkpoint.

        Called by the thread that writes.
        """

    @abstractmethod
    def begin_opening(self, low: int, deleted: IdSet) -> Dirty:
        """Return the files and folders that an opening has written, each only once.

        The caller syncs them, then calls `synced` and `completed`.

        Args:
            low: All rows up to this id are removed.
            deleted: Rows above `low` that are removed.
        """

    @abstractmethod
    def give_back(self) -> None:
        """Free the disk space that is only needed for further writes."""


def add_batches(crc: int, checksums: Sequence[int]) -> int:
    """Extend a crc32c by the checksums of batches."""
    for checksum in checksums:
        crc = google_crc32c.extend(crc, checksum.to_bytes(4, "little"))
    return crc
