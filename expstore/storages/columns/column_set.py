"""All columns of a store, which are read together.

Used by the storages on disk, followers and checks; `expstore.storages.columns.column_set_writer` adds
writing. The schema and each array's zarr.json determine the kind of each column, once, when a set is created.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Array, IntArray, Key, key_name
from expstore.disk.files import Disk
from expstore.disk.filesystem import fills_holes
from expstore.errors import StorageError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Field
from expstore.storages.columns.annotated import AnnotatedColumn, AnnotationReader, Annotations
from expstore.storages.columns.cold_rows import SLOW_COPY, ColdRows
from expstore.storages.columns.column import (
    AppendedPart,
    Column,
    FollowedPart,
    Part,
    ReadPart,
    ReadTogether,
    Run,
)
from expstore.storages.columns.flat import FlatColumn, find_flat
from expstore.storages.columns.packed.column import PackedRows, holds_chunks
from expstore.storages.columns.packed.pairs import pair_columns
from expstore.storages.columns.packed.reader import PackedReader
from expstore.storages.columns.prefetching import RowPrefetcher
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.paths import SEGMENTS
from expstore.storages.format.zarr_metadata import read_packing

if TYPE_CHECKING:
    from expstore.storages.columns.arrow.column import SegmentFields
    from expstore.storages.columns.arrow.reader import SegmentReader
    from expstore.storages.columns.arrow.segments import Segments


class ColumnSet:
    """The columns of a store: the user's fields, then the row fields, priority last.

    Threads: any number read.

    Args:
        disk: The disk on which files are accessed.
        folder: The folder `columns/`.
        slots: Number of slots of a ring; None: the store is unbounded.
        flat: The flat columns, by position.
        packed: The packed columns, by position.
        variable: The variable-length fields: one object for all of them, or none.
        annotated: The annotated fields, by position.
    """

    #: The values of annotated fields; None: no field is annotated.
    annotations: Annotations | None = None

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        slots: int | None,
        *,
        flat: Mapping[int, FlatColumn],
        packed: Mapping[int, PackedRows],
        variable: Sequence[SegmentFields],
        annotated: Mapping[int, AnnotatedColumn],
    ) -> None:
        self._disk, self.folder, self.slots = disk, folder, slots
        self._arrange(flat, packed, variable, annotated)

    def _arrange(
        self,
        flat: Mapping[int, FlatColumn],
        packed: Mapping[int, PackedRows],
        variable: Sequence[SegmentFields],
        annotated: Mapping[int, AnnotatedColumn],
    ) -> None:
        #: The columns whose rows have fixed places in files, and the packed columns, by position.
        self.flat, self.packed = flat, packed
        self._variable = variable
        #: The annotated columns, by position: what is written to rows has no bytes of them.
        self.annotated = annotated
        arrays: dict[int, FlatColumn | PackedRows] = {**flat, **packed}
        columns: dict[int, Column] = {**arrays, **annotated}
        for fields in variable:
            columns |= fields.columns(self.folder)
        #: All columns, by position.
        self.columns: list[Column] = [columns[place] for place in sorted(columns)]
        #: The columns that are Zarr arrays of their own.
        self.arrays = [arrays[place] for place in sorted(arrays)]
        #: The columns of ids, episodes, steps, times and priorities.
        self.row_fields = list(flat.values())[-len(ROW_FIELDS) :]
        #: The segments that variable-length fields share.
        self.shared: Sequence[Segments] = [fields.segments for fields in variable]
        #: Positions of the variable-length fields among the columns.
        self.variable_places = tuple(place for fields in variable for place in fields.places)
        #: All objects with files, in the order in which rows are summed.
        self.parts: list[Part] = [*self.arrays, *self.shared]
        #: Positions of the columns whose rows cannot be viewed.
        self.unviewed_places = frozenset((*packed, *self.variable_places, *annotated))
        self.row_bytes = sum(column.row_bytes for column in self.columns)
        self._appended: list[AppendedPart] = [*packed.values(), *self.shared]
        #: The packed columns that store rows in another column.
        self.pairs = pair_columns(packed)
        self._together: list[ReadTogether] = [*self.pairs, *variable]
        self._prefetcher = RowPrefetcher()
        self._cold = ColdRows()

    def read_parents(self, values: Sequence[Any]) -> dict[Key, Any]:
        """Return the values of the fields that name the rows that other rows continue, by key.

        Args:
            values: An array per column.
        """
        wanted = {key for segments in self.shared for key in segments.parents.values() if key}
        named = zip(self.columns, values, strict=False)
        return {column.entry.key: rows for column, rows in named if column.entry.key in wanted}

    def gather_rows(self, slots: IntArray, places: Sequence[int]) -> list[Any]:
        """Copy rows out of columns; a file that has rows of two of them is read once.

        Args:
            slots: Slots of the rows. Shape `(n,)`.
            places: Positions of the columns.

        Returns:
            One array per column. Shapes `(n, *row shape)`.

        Raises:
            CorruptionError: A row is in a damaged file.
        """
        if self._cold.active:
            flat = [self.flat[place] for place in places if place in self.flat]
            self._cold.load(slots, [column.view for column in flat if column.is_mapped])
        self._prefetcher.ask(slots, places, self._narrow_views)
        started = perf_counter()
        together: dict[int, Any] = {}
        for columns in self._together:
            together |= columns.gather_together(slots, places)
        rows = []
        for place in places:
            rows.append(together[place] if place in together else self.columns[place].gather(slots))
        if (seconds := perf_counter() - started) > SLOW_COPY:
            self._cold.note_slow_copy(seconds, slots.size * sum(self.columns[p].row_bytes for p in places))
        return rows

    def _narrow_views(self, places: Sequence[int]) -> list[Array]:
        """Return the narrow columns among those at some positions: their rows are copied one by one."""
        flat = [self.flat[place] for place in places if place in self.flat]
        return [column.view for column in flat if column.is_narrow]

    def sizes(self, slots: IntArray) -> IntArray:
        """Return the bytes of rows in variable-length fields. Shapes `(n,)`.

        Raises:
            CorruptionError: Rows are damaged.
        """
        found = np.zeros(slots.size, np.int64)
        for segments in self.shared:
            found += segments.sizes(segments.ids_of(slots))
        return found

    @property
    def ready(self) -> int:
        """The number of slots that have a place in a shard of every column."""
        return min(column.ready for column in self.flat.values())

    @property
    def summed(self) -> list[Column]:
        """The columns that have checksums, in the order of the checksums."""
        return self.columns[:-1]

    @property
    def mean_bytes(self) -> int:
        """The average size of a row in memory, bytes."""
        return sum(part.mean_bytes for part in self.parts)

    def measure_row_bytes(self, rows: int) -> float:
        """Return the average disk space of a row, bytes, if there are `rows` rows."""
        return sum(part.measure_row_bytes(rows) for part in self.parts)

    @property
    def damaged(self) -> list[str]:
        """Descriptions of the shards that cannot be read."""
        return sorted({found for column in self.arrays for found in column.damaged.values()})

    def compression_ratios(self) -> dict[str, float | None]:
        """Return the compression ratio of each packed field (raw bytes per stored byte), by name."""
        ids = self.row_fields[0].peek
        return {
            key_name(column.entry.key): column.measure_compression(ids)[0] for column in self.packed.values()
        }

    def do_without_threads(self) -> None:
        """Never copy rows with torch: a forked process lacks the threads that torch may wait for."""
        for column in self.flat.values():
            column.wide_row = column.row_bytes + 1

    def note_last(self, last: int) -> None:
        """Record the newest id: a slot means its newest id that is not above it."""
        if self.annotations is not None:
            self.annotations.last = last

    def require(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Raise CorruptionError if these slots have no place in a shard."""
        for slot, _, n in pieces:
            for column in self.flat.values():
                column.require(slot + n if n else 0)

    def require_rows(self, first_id: int, count: int) -> None:
        """Check that rows are present.

        Raises:
            CorruptionError: Rows are missing.
        """
        for part in (*self.shared, *self.arrays):
            part.require_rows(first_id, count)

    def lacks(self, first_id: int, count: int) -> bool:
        """Return whether rows of appended parts are missing or damaged."""
        return any(part.lacks(first_id, count) for part in self._appended)

    def checksum(self, first_id: int, count: int) -> int:
        """Compute from the disk the crc32c that `write` returned for these rows; -1 if rows are missing."""
        crc, priorities = 0, self.row_fields[-1]
        for part in self.parts:
            if part is not priorities:
                extended = part.extend_checksum(crc, first_id, count)
                if extended is None:
                    return -1
                crc = extended
        return crc

    def close(self) -> None:
        """Close all files."""
        for part in self.parts:
            part.close()
        if self.annotations is not None:
            self.annotations.close()


class ReadColumns(ColumnSet):
    """Columns that are opened for reading only; a writer may append to them meanwhile.

    A column whose metadata cannot be read counts as damaged as a whole; the others can be read.

    Args:
        disk: The disk on which files are accessed.
        folder: The folder `columns/`.
        fields: The user's fields, then the row fields, priority last.
        slots: Number of slots of a ring; None: the store is unbounded.
        packings: How the store's settings pack each field, for fields whose zarr.json cannot be read. Empty:
            rely on zarr.json.
        compression: How the store's settings compress variable-length rows.
    """

    packed: Mapping[int, PackedReader]
    shared: Sequence[SegmentReader]
    annotations: AnnotationReader | None

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        fields: Sequence[Field],
        slots: int | None,
        *,
        packings: Sequence[Packing | None] = (),
        compression: str | None = None,
    ) -> None:
        fills = fills_holes(disk, folder)
        flat: dict[int, FlatColumn] = {}
        packed: dict[int, PackedReader] = {}
        loose: dict[int, Field] = {}
        annotated: dict[int, AnnotatedColumn] = {}
        if any(entry.annotated for entry in fields):
            self.annotations = AnnotationReader(disk, folder.parent, slots)
        for place, entry in enumerate(fields):
            if entry.annotated and self.annotations is not None:
                annotated[place] = AnnotatedColumn(entry, self.annotations, folder.joinpath(*entry.key))
                continue
            if entry.variable:
                loose[place] = entry
                continue
            array, packing, fault = folder.joinpath(*entry.key), None, None
            try:
                packing = read_packing(disk, array, entry)
            except StorageError as exc:
                fault = exc.message
            if fault is not None and packings and holds_chunks(disk, array):
                packing = packings[place]
            if packing is None:
                flat[place] = find_flat(disk, array, entry, slots, fills=fills, fault=fault)
            else:
                packed[place] = PackedReader(disk, array, entry, slots, packing)
        variable: list[SegmentFields] = []
        if loose:
            from expstore.storages.columns.arrow.column import SegmentFields  # it loads pyarrow
            from expstore.storages.columns.arrow.reader import SegmentReader

            where = folder.parent / SEGMENTS
            reader = SegmentReader(disk, where, [*loose.values()], slots, compression=compression)
            variable.append(SegmentFields(reader, tuple(loose)))
        super().__init__(
            disk, folder, slots, flat=flat, packed=packed, variable=variable, annotated=annotated
        )
        self._followed: list[FollowedPart] = [*self.shared, *packed.values()]
        self._looked: list[ReadPart] = [*self._followed, *flat.values()]

    def lay(self, run: Run) -> list[int]:
        """Make rows that are only in memory readable, in the variable-length fields.

        Returns:
            The positions of the other columns.
        """
        for segments in self.shared:
            if segments.lacks(run.first_id, run.count):
                segments.lay(run.first_id, run.variable)
        others = {*self.variable_places, *self.annotated}
        return [place for place in range(len(run.values)) if place not in others]

    def look(self, slots: int, *, due: bool = True) -> None:
        """Open the files of slots 0 to `slots` - 1 for reading only; note which are damaged."""
        for part in self._looked:
            part.look(slots, due=due)

    def look_briefly(self, slots: int) -> None:
        """Find the rows that exist, while a writer may be creating the first files."""
        for part in self._looked:
            with contextlib.suppress(StorageError):  # damaged, or a file that the writer is renaming
                part.look(slots, due=False)

    def look_to(self, last: int) -> None:
        """Find the rows up to this id in the appended parts, after those known so far."""
        for part in self._followed:
            part.look_to(last)
        self.note_last(last)

    def end_at(self, last: int) -> None:
        """End the appended parts at this id. Called when there is no writer any more."""
        for part in self._followed:
            part.end_at(last)
        self.note_last(last)
