"""All packed columns of a store together, as rows are appended to them.

Used by the set of columns. Columns that have rows of others are written first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from expstore.core.id_set import IdSet
from expstore.core.values import key_name
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

__all__ = ["PackedAppender"]


class PackedAppender(Appender):
    """Appends rows to packed columns.

    Threads: one writes; the one that runs checkpoints says when. Crashes: as `PackedColumn`.

    Args:
        columns: By place.
        pairs: What `pair_columns` returned for them.
        reach: How many rows before the oldest one that can be read stay as they are; None: all do.
    """

    def __init__(
        self, columns: Mapping[int, PackedColumn], pairs: Sequence[PackedPair], reach: int | None
    ) -> None:
        self.fields = [column.entry for column in columns.values()]
        self._pairs = pairs
        self._partners = {pair.place: pair.partner for pair in pairs}
        #: In the order in which they are written: what others keep rows in comes first.
        self._columns = sorted(columns.items(), key=lambda item: item[0] in self._partners)
        self._finders: dict[int, NextRows] = {}
        self._unnamed: list[tuple[PackedColumn, list[Filling]]] = []  # shards of the checkpoint that runs
        each = max((column.packing.rows for column in columns.values()), default=0)
        for column in columns.values():
            column.lent = 0
        for place, partner in self._partners.items():
            entry = columns[place].entry
            columns[partner].lent = max(columns[partner].lent, reach_for(entry))
            near = reach_for(entry) if reach is None else min(reach - each, reach_for(entry))
            if near > 0:
                self._finders[place] = NextRows(entry.row_bytes, near)

    def change_error(self, fields: Sequence[Field]) -> SchemaError:
        """Return the error that packed rows cannot be changed."""
        return _build_packed_error(fields, "rows cannot be changed")

    def ranking_error(self, fields: Sequence[Field]) -> SchemaError:
        """Return the error that packed rows cannot give way to better ones."""
        return _build_packed_error(fields, "rows cannot give way to better ones")

    def check_removable(self, entry: Field) -> None:
        """Raise SchemaError if another column keeps rows in that of a field."""
        columns = dict(self._columns)
        for place, partner in self._partners.items():
            if columns[partner].entry == entry:
                name, kept = key_name(columns[place].entry.key), key_name(entry.key)
                raise SchemaError(
                    f"rows of field {name!r} are kept with those of {kept!r}, which has to stay",
                    hint="make the store with Layout(share_next=False) for fields that may go",
                )

    def warm(self) -> None:
        """Load the compiled loops, in the background."""
        for _, column in self._columns:
            column.warm()

    # -- rows ------------------------------------------------------------------------------------

    def write(self, run: Run) -> list[int]:
        """Append rows; chunks have checksums of their own."""
        for _, offset, n in run.pieces:
            for place, column in self._columns:
                rows, finder, distances = (
                    run.values[place][offset : offset + n],
                    self._finders.get(place),
                    None,
                )
                if finder is not None:
                    following = run.values[self._partners[place]][offset : offset + n]
                    distances = finder.find(run.first_id + offset - 1, rows, following)
                column.append(run.first_id + offset, rows, distances)
        return []

    def write_again(self, run: Run, synced: int) -> None:
        """Append rows that are not there, when a store is opened."""
        before = run.first_id - 1
        if not all(column.ends_with(before) for _, column in self._columns):
            if self._has(run):
                return  # then perhaps later ones, too, which stay
            self.settle(before, synced)
        self.write(run)

    def _has(self, run: Run) -> bool:
        """Return whether these very rows are there."""
        return not any(column.lacks(run.first_id, run.count) for _, column in self._columns) and all(
            np.array_equal(
                column.part(slot, n).reshape(-1).view(np.uint8),
                run.values[place][offset : offset + n].reshape(-1).view(np.uint8),
            )
            for place, column in self._columns
            for slot, offset, n in run.pieces
        )

    def settle(self, last: int, synced: int) -> None:
        """Continue behind a row; see `Appender`."""
        for _, column in reversed(self._columns):
            column.settle(last, synced)

    def capture(self) -> PackedCapture:
        """Return the columns as they are now, for a snapshot; no row may be added meanwhile."""
        return PackedCapture(dict(self._columns), self._pairs)

    # -- checkpoints -----------------------------------------------------------------------------

    @property
    def touched_files(self) -> set[File]:
        """The files that were written to since the last checkpoint began."""
        return {file for _, column in self._columns for file in column.touched.copy()}

    def take_new_folders(self) -> set[Path]:
        """Return, once, the folders with new names in them."""
        return set[Path]().union(*(take_all(column.new_folders) for _, column in self._columns))

    def begin_opening(self, low: int, deleted: IdSet) -> Dirty:
        """Return what was written; finished shards get their names once it is synced."""
        self._unnamed = [(column, column.note_mark()) for _, column in self._columns]
        files = set[File]().union(*(take_all(column.touched) for _, column in self._columns))
        return Dirty(files, self.take_new_folders())

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return what no checkpoint covers."""
        return self.begin_opening(checkpoint.low, checkpoint.deleted)

    def synced(self) -> None:
        """Give finished shards their names, after the fsync of what `begin` returned."""
        finished, self._unnamed = self._unnamed, []
        for column, fillings in finished:
            column.name(fillings)

    def completed(self, *, tidy: bool) -> None:
        """Reuse what only the former checkpoint needed, after the fsync of the record of this one."""
        for _, column in self._columns:
            column.note_marked()

    def abort(self, dirty: Dirty) -> None:
        """Take back the shards that `begin` has finished: they were not synced."""
        for column, fillings in self._unnamed:
            column.put_back(fillings)
        self._unnamed = []

    def give_back(self) -> None:
        """Give back the disk space that only further writing needs."""
        for _, column in self._columns:
            column.give_back()


def _build_packed_error(fields: Sequence[Field], what: str) -> SchemaError:
    names = ", ".join(sorted(repr(key_name(entry.key)) for entry in fields))
    return SchemaError(
        f"{'fields' if fields[1:] else 'field'} {names} {'are' if fields[1:] else 'is'} packed: {what}",
        hint="make the store with layout='flat', or with Layout(fields={name: 'flat'}) for single fields",
    )
