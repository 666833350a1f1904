"""Write runs of rows to all columns at once, and sync the columns.

Used by the storages on disk. The storage decides in which order rows and their records are written.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np

from expstore.core.id_set import NO_IDS, IdSet
from expstore.core.values import Array, IntArray
from expstore.disk.atomic_build import build_folder
from expstore.disk.bulk_files import sync_paths
from expstore.disk.checkpointed import Checkpoint, Checkpointed, Dirty, take_all
from expstore.disk.files import Disk, File
from expstore.disk.filesystem import fills_holes
from expstore.disk.threads import Threads, finish
from expstore.schema.schema import Field
from expstore.storages.columns.annotated import AnnotatedColumn, AnnotationCapture, AnnotationLog
from expstore.storages.columns.capture import Capture
from expstore.storages.columns.column import Appender, Deleted, RowWriter, Run, WrittenPart, add_batches
from expstore.storages.columns.column_set import ColumnSet
from expstore.storages.columns.flat import FlatColumn, FlatWriter, shard_rows
from expstore.storages.columns.packed.appender import PackedAppender
from expstore.storages.columns.packed.column import PackedRows
from expstore.storages.columns.packed.writer import PackedColumn
from expstore.storages.columns.payload import join_payload
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.paths import SEGMENTS
from expstore.storages.format.zarr_metadata import check_metadata, make_metadata, read_packing

if TYPE_CHECKING:
    from expstore.storages.columns.arrow.column import SegmentFields
    from expstore.storages.columns.arrow.writer import SegmentWriter

#: From so many fields on, the file system is synced as a whole when the columns are created, as syncing each
#: small file takes longer.
MANY_FIELDS = 256
#: Threads that write long runs of rows.
WRITERS = 2
#: Rows among which the earlier rows of an episode are looked for that the writer does not have in memory.
_NEAR_ROWS = 65_536


class WritableColumns(ColumnSet, Checkpointed):
    """Columns that rows are written to, by one thread at a time.

    Args:
        disk: The disk on which files are accessed.
        folder: The folder `columns/`.
        fields: The user's fields, then the row fields, priority last.
        slots: Number of slots of a ring; None: the store is unbounded.
        reach: In a ring, how many rows before the oldest readable one must not be overwritten.
        compression: Compression of variable-length rows: "lz4" or "zstd"; None: no compression.
        generation: The number of the opening, which is stored with variable-length rows.
        packings: How each field is packed, where `create` was called just before; None: read each zarr.json.

    Raises:
        CorruptionError: A zarr.json cannot be read.
    """

    shared: Sequence[SegmentWriter]
    packed: Mapping[int, PackedColumn]
    annotations: AnnotationLog | None

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        fields: Sequence[Field],
        slots: int | None,
        *,
        reach: int = 0,
        compression: str | None = None,
        generation: int = 0,
        packings: Sequence[Packing | None] | None = None,
    ) -> None:
        #: Whether reading a hole through a map allocates space in this file system.
        self.fills = fills_holes(disk, folder)
        #: Files that were changed in place, and folders with new names, that no checkpoint covers.
        self.touched: set[File] = set()
        self.new_folders: set[Path] = set()
        self._threads = Threads(WRITERS)
        self._reach = reach
        flat: dict[int, FlatColumn] = {}
        packed: dict[int, PackedColumn] = {}
        loose: dict[int, Field] = {}
        annotated: dict[int, AnnotatedColumn] = {}
        if any(entry.annotated for entry in fields):
            self.annotations = AnnotationLog(disk, folder.parent, slots)
        for place, entry in enumerate(fields):
            array = folder.joinpath(*entry.key)
            if entry.annotated and self.annotations is not None:
                annotated[place] = AnnotatedColumn(entry, self.annotations, array)
            elif entry.variable:
                loose[place] = entry
            elif (packing := packings[place] if packings else read_packing(disk, array, entry)) is None:
                flat[place] = FlatColumn(disk, array, entry, slots, fills=self.fills)
            else:
                packed[place] = PackedColumn(disk, array, entry, slots, packing)
        variable: list[SegmentFields] = []
        if loose:
            from expstore.storages.columns.arrow.column import SegmentFields  # it loads pyarrow
            from expstore.storages.columns.arrow.writer import SegmentWriter

            how: Any = {"compression": compression, "generation": generation}
            segments = SegmentWriter(disk, folder.parent / SEGMENTS, [*loose.values()], slots, **how)
            variable.append(SegmentFields(segments, tuple(loose)))
        super().__init__(
            disk, folder, slots, flat=flat, packed=packed, variable=variable, annotated=annotated
        )

    def _arrange(
        self,
        flat: Mapping[int, FlatColumn],
        packed: Mapping[int, PackedRows],
        variable: Sequence[SegmentFields],
        annotated: Mapping[int, AnnotatedColumn],
    ) -> None:
        super()._arrange(flat, packed, variable, annotated)
        reach = None if self.slots is None else self._reach
        self._packers = [PackedAppender(self.packed, self.pairs, reach)] if packed else []
        writer = FlatWriter(self._disk, flat, self.row_bytes, self._threads)
        #: In the order in which they write.
        self._writers: list[RowWriter] = [*self._packers, writer, *self.shared]
        self._appenders: list[Appender] = [*self._packers, *self.shared]
        written: dict[int, WrittenPart] = {**flat, **self.packed}
        self._written = [written[place] for place in sorted(written)]
        for segments in self.shared:
            segments.find_rows = self._find_episode_rows
        self._ready = self.ready

    @staticmethod
    def create(
        disk: Disk,
        folder: Path,
        fields: Sequence[Field],
        slots: int | None,
        pool: Threads | None,
        attributes: dict[str, Any],
        packings: Sequence[Packing | None] = (),
    ) -> None:
        """Create the Zarr metadata of empty columns in a temporary folder, sync it, and rename the folder."""
        disk.remove_tree(folder)
        folders: set[Path] = set()
        paths = []
        kept = [not entry.annotated for entry in fields]
        packings = [*itertools.compress(packings or [None] * len(fields), kept)]
        fields = [*itertools.compress(fields, kept)]
        if any(entry.variable for entry in fields):
            segments = folder.parent / SEGMENTS
            disk.remove_tree(segments)
            disk.make_dir(segments)
            folders.add(segments)
        packings = [packing for entry, packing in zip(fields, packings, strict=True) if not entry.variable]
        fields = [entry for entry in fields if not entry.variable]
        rows = [shard_rows(entry.row_bytes, slots) for entry in fields]
        with (
            build_folder(disk, folder) as temporary,
            contextlib.closing(disk.open(temporary, write=False)) as here,
        ):
            folders.add(temporary)
            for name, data in make_metadata(fields, rows, slots, attributes, packings=packings).items():
                path = temporary / name
                if path.parent not in folders:
                    disk.make_dir(path.parent)
                    folders.update(itertools.takewhile(lambda parent: parent not in folders, path.parents))
                with contextlib.closing(disk.open(path, create=True)) as file:
                    file.write(data, 0)
                paths.append(path)
            if len(paths) < MANY_FIELDS or not here.sync_file_system():
                sync_paths(disk, paths, sorted(folders), pool)

    def check_metadata(self) -> None:
        """Check that each zarr.json describes its column, as reading rows and other programs require.

        Raises:
            CorruptionError: A zarr.json is missing or describes something else.
        """
        entries = [column.entry for column in self.arrays]
        check_metadata(self._disk, self.folder, entries, [column.rows for column in self.arrays])

    def open_shards(self) -> None:
        """Open the existing files."""
        for part in (*self.shared, *self._written):
            part.open_files()
        self._ready = self.ready

    def warm(self) -> None:
        """Load the compiled loops that some kinds of column need, in the background."""
        for appender in self._appenders:
            appender.warm()

    def _find_episode_rows(self, episode: int, row: int) -> IntArray:
        """Return the stored rows of an episode among the rows just before a row."""
        near = np.arange(max(1, row - _NEAR_ROWS), row)
        slots = near - 1 if self.slots is None else (near - 1) % self.slots
        ids, episodes = (column.gather(slots) for column in self.row_fields[:2])
        found: IntArray = near[(ids == near) & (episodes == episode)]
        return found

    # -- adding and dropping fields --------------------------------------------------------------

    def with_column(self, place: int, column: FlatColumn | AnnotatedColumn) -> WritableColumns:
        """Return a set with one more column; this set must not be written to afterwards.

        Args:
            place: The position of the new column.
            column: The column, with room for as many rows as the other columns.
        """
        return self._renumber(lambda n: n + (n >= place), {place: column})

    def require_annotations(self) -> AnnotationLog:
        """Return the values of annotated fields, also if there is no such field yet."""
        if self.annotations is None:
            self.annotations = AnnotationLog(self._disk, self.folder.parent, self.slots)
        return self.annotations

    def without(self, place: int) -> WritableColumns:
        """Return a set without a column; this set must not be written to afterwards."""
        return self._renumber(lambda n: None if n == place else n - (n > place), {})

    def _renumber(
        self, number: Callable[[int], int | None], added: dict[int, FlatColumn | AnnotatedColumn]
    ) -> WritableColumns:
        twin = copy.copy(self)
        flat = {new: one for n, one in self.flat.items() if (new := number(n)) is not None}
        packed = {new: one for n, one in self.packed.items() if (new := number(n)) is not None}
        annotated = {new: one for n, one in self.annotated.items() if (new := number(n)) is not None}
        for place, column in added.items():
            if isinstance(column, AnnotatedColumn):
                annotated[place] = column
            else:
                flat[place] = column
        variable = [fields.renumber(number) for fields in self._variable]
        twin._arrange(dict(sorted(flat.items())), packed, variable, annotated)
        return twin

    def close_dropped(self, kept: ColumnSet) -> None:
        """Close the columns that are not in another set."""
        for column in self.arrays:
            if column not in kept.arrays:
                touched = self.touched.copy()
                self.touched -= {file for file in touched if file.path.is_relative_to(column.folder)}
                column.close()

    def check_removable(self, place: int) -> None:
        """Check that a column can be dropped from the store.

        Raises:
            SchemaError: Its files contain rows of other fields, or the reverse.
        """
        for appender in self._appenders:
            appender.check_removable(self.columns[place].entry)

    # -- immutable columns -----------------------------------------------------------------------

    def check_changeable(self, places: Sequence[int]) -> None:
        """Check that rows of some columns can be changed.

        Raises:
            SchemaError: A column is packed, or has variable length.
        """
        # In reverse order, because another layout would not help for variable-length fields.
        for appender in reversed(self._appenders):
            entries = [self.columns[place].entry for place in places]
            fields = [entry for entry in entries if entry in appender.fields]
            if fields:
                raise appender.change_error(fields)

    def gather_recent(self, place: int, ids: IntArray) -> Array | None:
        """Copy rows of a packed column that are still in memory; see `PackedAppender.gather_recent`."""
        return self._packers[0].gather_recent(place, ids)

    def check_replaceable(self) -> None:
        """Check that rows can be replaced by better ones.

        Raises:
            SchemaError: A field is packed, or has variable length.
        """
        if self._appenders:
            appender = self._appenders[-1]
            raise appender.ranking_error(appender.fields)

    # -- opening ---------------------------------------------------------------------------------

    def settle(self, last: int, synced: int) -> None:
        """Continue appended columns after a row; the next sync makes their state durable.

        Args:
            last: Id of the last valid row.
            synced: The newest id that a checkpoint covers.
        """
        for appender in self._appenders:
            appender.settle(last, synced)
        self.note_last(last)

    def rewrite(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Write rows again as they read, so that a sync makes them durable for certain; see `settle`."""
        for slot, _, n in pieces:
            for column in self.flat.values():
                column.rewrite(slot, n)

    def begin_opening(self, low: int = 0, deleted: IdSet = NO_IDS) -> set[File]:
        """Return the appended files that an opening has written; call `synced` and `completed` afterwards.

        Args:
            low: All rows up to this id are removed.
            deleted: Rows above `low` that are removed.
        """
        dirty = [appender.begin_opening(low, deleted) for appender in self._appenders]
        self.new_folders.update(*(one.folders for one in dirty))
        return set[File]().union(*(one.files for one in dirty))

    # -- checkpoints -----------------------------------------------------------------------------

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return the files and folders that no checkpoint covers."""
        dirty = [appender.begin(checkpoint) for appender in self._appenders]
        files = take_all(self.touched) | self.files_of(checkpoint.runs)
        return Dirty(
            files.union(*(one.files for one in dirty)),
            take_all(self.new_folders).union(*(one.folders for one in dirty)),
        )

    def synced(self) -> None:
        """Rename finished shards, after the fsync of the files and folders that `begin` returned."""
        for appender in self._appenders:
            appender.synced()

    def completed(self, *, tidy: bool) -> None:
        """Reuse what only the former checkpoint needed, after the fsync of the new checkpoint record."""
        for appender in self._appenders:
            appender.completed(tidy=tidy)

    def abort(self, dirty: Dirty) -> None:
        """Undo `begin` after a failed sync."""
        self.touched |= dirty.files
        self.new_folders |= dirty.folders
        for appender in self._appenders:
            appender.abort(dirty)

    def files_of(self, pieces: Iterable[tuple[int, int, int]]) -> set[File]:
        """Return the files of these slots, as far as the slots were ever written."""
        return {
            file
            for slot, _, n in pieces
            for column in self.flat.values()
            for file, _, _, _ in column.spans(slot, min(n, column.ready - slot))
        }

    def find_unsynced_files(self, pieces: Iterable[tuple[int, int, int]]) -> set[File]:
        """Return the files of these slots, and those that were appended to since the last checkpoint."""
        return self.files_of(pieces).union(*(appender.touched_files for appender in self._appenders))

    def note_rows_synced(self) -> None:
        """Keep all rows written so far, after the fsync of their files and folders; see `Appender`."""
        for appender in self._appenders:
            appender.note_rows_synced()

    def take_new_folders(self) -> set[Path]:
        """Return the folders with new names, each only once; the caller syncs them or calls `put_back`."""
        taken = [take_all(self.new_folders), *(one.take_new_folders() for one in self._appenders)]
        return set[Path]().union(*taken)

    def put_back(self, folders: set[Path]) -> None:
        """Make the next checkpoint sync folders that `take_new_folders` returned."""
        self.new_folders |= folders

    @property
    def unsynced_bytes(self) -> int:
        """Bytes of variable-length rows that were written since the last checkpoint began."""
        return sum(segments.unsynced_bytes for segments in self.shared)

    def free(self, deleted: Deleted, *others: WrittenPart) -> set[File]:
        """Free the space of deleted rows; return the files that were changed in place.

        Args:
            deleted: The rows.
            others: Columns outside this set whose space is freed, too.
        """
        return set[File]().union(*[part.free(deleted) for part in (*self._written, *others)])

    def free_shared(self, deleted: Deleted) -> set[File]:
        """Call `free` of the files that fields share. No checkpoint may run: it could merge segments."""
        return set[File]().union(*[part.free(deleted) for part in self.shared])

    def capture(self, low: int) -> list[Capture]:
        """Capture, for a snapshot, the columns whose rows cannot be viewed.

        No row may be added meanwhile.

        Args:
            low: Rows up to this id need not be kept.
        """
        captures: list[Capture] = [fields.capture(low) for fields in self._variable]
        if self.annotations is not None and self.annotated:
            captures.append(AnnotationCapture(self.annotations, self.annotated))
        return [*captures, *(packer.capture() for packer in self._packers)]

    def give_back(self) -> None:
        """Free the disk space that is only needed for further writes."""
        for appender in self._appenders:
            appender.give_back()

    # -- rows ------------------------------------------------------------------------------------

    def ensure(self, slots: int) -> None:
        """Create shards until slots 0 to `slots` - 1 have a place."""
        if slots <= self._ready:
            return
        for column in self.flat.values():
            while column.ready < slots:
                made = column.add_shard()  # slow; the set may be emptied meanwhile
                self.new_folders.update(made)
        self._ready = self.ready

    def write(
        self,
        pieces: Sequence[tuple[int, int, int]],
        columns: Sequence[Array],
        numbers: IntArray,
        priorities: Array,
    ) -> int:
        """Write a run of rows to all columns; return the crc32c of all columns except the priorities.

        Args:
            pieces: Where the run is written: (first slot, offset in the run, number of rows).
            columns: One array per field, C-contiguous. Shapes `(n, *row shape)`.
            numbers: Ids, episodes, steps, times; C-contiguous. Shape `(4, n)`.
            priorities: Shape `(n,)`.
        """
        for slot, _, n in pieces:
            self.ensure(slot + n)
        apart, crc, batches = self.variable_places, 0, list[int]()
        values = [*columns, *numbers, priorities]
        variable = [columns[place] for place in apart] if apart else []
        parents = self.read_parents(columns) if self.shared else {}
        run = Run(
            int(numbers[0, 0]),
            numbers.shape[1],
            pieces,
            values,
            variable,
            [],
            numbers[1],
            numbers[2],
            parents,
        )
        try:
            for writer in self._writers:
                batches += writer.write(run)
            for place, column in enumerate(columns):
                if place not in apart and place not in self.annotated:
                    crc = google_crc32c.extend(crc, column)
            crc = google_crc32c.extend(crc, numbers)
        finally:
            if run.jobs:
                finish(run.jobs)
        return add_batches(crc, batches) if batches else crc

    def bytes_of(self, columns: Sequence[Any], count: int) -> int:
        """Return the size of a batch's rows, bytes.

        Args:
            columns: One array per field.
            count: How many rows.
        """
        return count * self.row_bytes + self.variable_bytes(columns)

    def variable_bytes(self, columns: Sequence[Any]) -> int:
        """Return the size of a batch's rows in variable-length fields, bytes."""
        return sum(int(columns[place].nbytes) for place in self.variable_places)

    def write_parts(
        self,
        pieces: Sequence[tuple[int, int, int]],
        parts: Sequence[bytes],
        priorities: Array | None,
        *,
        synced: int | None = None,
    ) -> None:
        """Write a run of rows passed as bytes, priorities first.

        Args:
            pieces: Where the run is written: (first slot, offset in the run, number of rows).
            parts: The bytes of every column except priority, in the form of `payload`.
            priorities: Shape `(n,)`; None: priorities are not written.
            synced: While a store is opened, the newest id that a checkpoint covers: these rows may exist
                already.
        """
        run = join_payload(self, parts, pieces)
        for slot, offset, n in pieces:
            self.ensure(slot + n)
            if priorities is not None:
                for file, at, row, rows in self.row_fields[-1].spans(slot, n):
                    file.write(priorities[offset + row : offset + row + rows].copy(), at)
        self.write_run(run, synced=synced)

    def append_run(self, run: Run) -> None:
        """Write rows only to the columns whose rows other rows may refer to."""
        for appender in self._appenders:
            appender.write(run)

    def write_run(self, run: Run, *, synced: int | None = None) -> None:
        """Write rows for whose slots there is room; `synced` as for `write_parts`."""
        try:
            for writer in self._writers:
                if synced is None:
                    writer.write(run)
                else:
                    writer.write_again(run, synced)
        finally:
            finish(run.jobs)

    def rest(self) -> bool:
        """Close the descriptors of all columns, if everything is synced; return whether it is.

        The next write opens the files again. The caller excludes writes, syncs and checkpoints.
        """
        if self.touched or any(appender.touched_files for appender in self._appenders):
            return False
        for writer in self._writers:
            writer.rest()
        for part in self._written:
            part.rest()
        return True

    def do_without_threads(self) -> None:
        """Write and read only on the calling thread."""
        super().do_without_threads()
        self._threads.refuse()
