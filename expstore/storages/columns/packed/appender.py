"""Append rows to all packed columns of a store.

Used by the set of columns. Columns in which other columns store rows are written first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from expstore.core.id_set import IdSet
from expstore.core.values import Array, IntArray, key_name
from expstore.disk.checkpointed import Checkpoint, Dirty, take_all
from expstore.disk.files import File
from expstore.errors import SchemaError
from expstore.schema.schema import Field
from expstore.storages.columns.column import Appender, Run
from expstore.storages.columns.dedup_finder import NextRows
from expstore.storages.columns.packed.capture import PackedCapture
from expstore.storages.columns.packed.column import Filling
from expstore.storages.columns.packed.pairs import PackedPair
from expstore.storages.columns.packed.writer import PackedColumn
from expstore.storages.format.chunk_encoding import reach_for


class PackedAppender(Appender):
    """Append rows to packed columns.

    Threads: one writes; the thread that runs checkpoints decides when to sync. Crashes: as `PackedColumn`.

    Args:
        columns: The columns, by position.
        pairs: The result of `pair_columns` for them.
        reach: How many rows before the oldest readable one are kept; None: all of them.
    """

    def __init__(
        self, columns: Mapping[int, PackedColumn], pairs: Sequence[PackedPair], reach: int | None
    ) -> None:
        self.fields = [column.entry for column in columns.values()]
        self._pairs = pairs
        self._partners = {pair.place: pair.partner for pair in pairs}
        #: In the order of writing: columns in which others store rows come first.
        self._columns = sorted(columns.items(), key=lambda item: item[0] in self._partners)
        self._finders: dict[int, NextRows] = {}
        self._unnamed: list[tuple[PackedColumn, list[Filling]]] = []  # shards of the running checkpoint
        each = max((column.packing.rows for column in columns.values()), default=0)
        for column in columns.values():
            column.lent = 0
        for place, partner in self._partners.items():
            entry = columns[place].entry
            columns[partner].lent = max(columns[partner].lent, reach_for(entry))
            near = reach_for(entry) if reach is None else min(reach - each, reach_for(entry))
            if near > 0:
                parts = columns[place].packing.parts
                self._finders[place] = NextRows(entry.row_bytes, near, parts)

    def change_error(self, fields: Sequence[Field]) -> SchemaError:
        """Return the error that packed rows cannot be changed."""
        return _build_packed_error(fields, "rows cannot be changed")

    def ranking_error(self, fields: Sequence[Field]) -> SchemaError:
        """Return the error that packed rows cannot be replaced by better ones."""
        return _build_packed_error(fields, "rows cannot be replaced by better ones")

    def check_removable(self, entry: Field) -> None:
        """Raise SchemaError if another column stores rows in the column of a field."""
        columns = dict(self._columns)
        for place, partner in self._partners.items():
            if columns[partner].entry == entry:
                name, kept = key_name(columns[place].entry.key), key_name(entry.key)
                raise SchemaError(
                    f"rows of field {name!r} are stored with those of {kept!r}, which cannot be dropped",
                    hint="create the store with Layout(share_next=False) for fields that may be dropped",
                )

    def warm(self) -> None:
        """Load the compiled loops, in the background."""
        for _, column in self._columns:
            column.warm()

    # -- rows ------------------------------------------------------------------------------------

    def write(self, run: Run) -> list[int]:
        """Append rows; chunks have checksums of their own."""
        if run.is_stored:
            for place, column in self._columns:
                column.append_stored(run.values[place])
            return []
        for _, offset, n in run.pieces:
            part, distances = slice(offset, offset + n), dict[int, IntArray]()
            for place, finder in self._finders.items():
                partner = self._partners[place]
                first, pair = run.first_id + offset - 1, (run.values[place][part], run.values[partner][part])
                distances[place], distances[partner] = finder.find_parts(first, *pair)
            for place, column in self._columns:
                column.append(run.first_id + offset, run.values[place][part], distances.get(place))
        return []

    def gather_recent(self, place: int, ids: IntArray) -> Array | None:
        """Copy rows of a column in which another one stores rows, without unpacking chunks.

        No row may be appended meanwhile.

        Args:
            place: Position of the column.
            ids: Ids of the rows. Shape `(n,)`.

        Returns:
            Shape `(n, *row shape)`; None: not all of the rows are in memory.
        """
        for own, partner in self._partners.items():
            if partner == place and own in self._finders:
                rows = self._finders[own].copy_next(ids - 1)
                entry = dict(self._columns)[own].entry
                return None if rows is None else rows.view(entry.numpy_dtype).reshape(-1, *entry.shape)
        return None

    def write_again(self, run: Run, synced: int) -> None:
        """Append rows that are missing, when a store is opened."""
        before = run.first_id - 1
        if not all(column.ends_with(before) for _, column in self._columns):
            if self._has(run):
                return  # if one row is missing, later ones may exist, and are kept
            self.settle(before, synced)
        self.write(run)

    def _has(self, run: Run) -> bool:
        """Return whether exactly these rows exist."""
        return not any(column.lacks(run.first_id, run.count) for _, column in self._columns) and all(
            np.array_equal(
                column.part(slot, n).reshape(-1).view(np.uint8),
                run.values[place][offset : offset + n].reshape(-1).view(np.uint8),
            )
            for place, column in self._columns
            for slot, offset, n in run.pieces
        )

    def settle(self, last: int, synced: int) -> None:
        """Continue after a row; see `Appender`."""
        for _, column in reversed(self._columns):
            column.settle(last, synced)

    def capture(self) -> PackedCapture:
        """Return the columns as they are now, for a snapshot; no row may be added meanwhile."""
        return PackedCapture(dict(self._columns), self._pairs)

    # -- checkpoints -----------------------------------------------------------------------------

    def note_rows_synced(self) -> None:
        """Keep the areas of incomplete chunks until another sync covers their rows elsewhere."""
        for _, column in self._columns:
            column.note_synced()

    @property
    def touched_files(self) -> set[File]:
        """The files that were written to since the last checkpoint began."""
        return {file for _, column in self._columns for file in column.touched.copy()}

    def take_new_folders(self) -> set[Path]:
        """Return the folders with new names in them, each only once."""
        return set[Path]().union(*(take_all(column.new_folders) for _, column in self._columns))

    def begin_opening(self, low: int, deleted: IdSet) -> Dirty:
        """Return the written files and folders; finished shards are renamed once these are synced."""
        self._unnamed = [(column, column.note_mark()) for _, column in self._columns]
        files = set[File]().union(*(take_all(column.touched) for _, column in self._columns))
        return Dirty(files, self.take_new_folders())

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return the files and folders that no checkpoint covers."""
        return self.begin_opening(checkpoint.low, checkpoint.deleted)

    def synced(self) -> None:
        """Rename finished shards, after the fsync of the files and folders that `begin` returned."""
        try:
            for column, fillings in self._unnamed:
                column.name(fillings)
        except BaseException:
            self._put_back()  # the next checkpoint renames the others
            raise
        self._unnamed = []

    def completed(self, *, tidy: bool) -> None:
        """Reuse areas that only the former checkpoint needed, when the new record is synced."""
        for _, column in self._columns:
            column.note_marked()

    def abort(self, dirty: Dirty) -> None:
        """Undo `begin` after a failed sync: its finished shards were not synced."""
        self._put_back()

    def _put_back(self) -> None:
        for column, fillings in self._unnamed:
            column.put_back(fillings)
        self._unnamed = []

    def give_back(self) -> None:
        """Free the disk space that is only needed for further writes."""
        for _, column in self._columns:
            column.give_back()


def _build_packed_error(fields: Sequence[Field], what: str) -> SchemaError:
    names = ", ".join(sorted(repr(key_name(entry.key)) for entry in fields))
    return SchemaError(
        f"{'fields' if fields[1:] else 'field'} {names} {'are' if fields[1:] else 'is'} packed: {what}",
        hint="make the store with layout='flat', or with Layout(fields={name: 'flat'}) for single fields",
    )
