"""Change the fields of a store, and the settings of its rows, while it is in use.

Two services of the store. Fields are added and dropped: `expstore.storages.format.swap` has the order of the
steps on disk, `expstore.storages.engine.backfill` the values of a new field; this module assembles the
columns. Files of other fields are neither opened nor written to. Settings are the ranking of rows and their
specs, in expstore.json.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Array, IntArray, Key, cut_run, key_name
from expstore.disk.bulk_files import sync_paths
from expstore.disk.files import File
from expstore.errors import SchemaError, StateError, StorageError
from expstore.schema.schema import Field, Schema
from expstore.storages.batch import now_us
from expstore.storages.columns.annotated import AnnotatedColumn
from expstore.storages.columns.checksums import Checksums
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.flat import FlatColumn
from expstore.storages.description import Description
from expstore.storages.engine.backfill import Filler, check_droppable, places_without
from expstore.storages.format.annotation_log import Part
from expstore.storages.format.layout import ColumnLayout, refuse_objects
from expstore.storages.format.lineage import ADD_COLUMN
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.format.paths import CHECKSUMS, COLUMNS
from expstore.storages.format.swap import TEMPORARY, Swap, finish_swap
from expstore.storages.format.zarr_metadata import make_metadata
from expstore.storages.new_field import NewField, build_ranked_error, check_new_field, check_present
from expstore.storages.row_settings import RowSettings

if TYPE_CHECKING:
    from expstore.storages.engine.store import Store


class StoredFields:
    """Add and drop the fields of a store.

    Threads: one field is added or dropped at a time. Other threads write and read meanwhile, and wait at the
    end of the change. Crashes: a change takes effect completely or not at all.

    Args:
        store: The store.
        replace: Replaces the store's fields in memory; called with the new manifest and the columns.
    """

    __slots__ = ("_replace", "_store")

    def __init__(self, store: Store, replace: Callable[[Manifest, WritableColumns], None]) -> None:
        self._store, self._replace = store, replace

    def add(self, new_field: NewField) -> None:
        """Add a field; the change is durable when this returns.

        Args:
            new_field: The field, and its values for existing rows.

        Raises:
            SchemaError: Rows cannot have such a field.
            StateError: The store is closed or cannot be written, or its content was replaced meanwhile.
            StorageError: The disk failed; nothing was changed.
        """
        store, health = self._store, self._store.health
        with self._store.locks.reshaping.act(), self._clean_up_on_error():
            with store.lock:
                store.writer()
                check_new_field(store, new_field.entry)
                schema = store.require_schema().grow(new_field.entry, new_field.default)
                refuse_objects(schema)
                if new_field.entry.annotated:
                    self._add_annotated(schema, new_field)
                    return
                with health.guard():
                    building = _Building(store, new_field.entry)
            with contextlib.closing(building):
                filler = Filler(store, new_field, building)
                with health.guard():
                    filler.run_ahead()
                    building.sync()  # most of the bytes: other threads wait for the sync of the rest
                with store.lock:
                    store.writer()
                    if store.require_schema() is not building.schema:
                        raise StateError("the store's fields have changed", hint="add the field again")
                    with health.guard():
                        building.reach()
                        filler.finish()
                    with self._act_at_once():
                        building.sync()
                        self._add(schema, building, new_field)

    def _add(self, schema: Schema, building: _Building, new_field: NewField) -> None:
        group, column, place = self._columns(), building.column, len(schema.fields) - 1
        path = self._store.path / building.name
        if self._store.disk.exists(path):
            raise StateError(f"{path} is in the way: it is not a column of the store", hint="move it away")
        sums = self._checksums().rearrange([*range(place), -1, *range(place, len(group.summed))], column)
        swap = Swap(added=(building.name,), replaced=(CHECKSUMS,))
        manifest = self._commit(
            swap, schema, new_field.specs, sums, building.about, building.folders, new_field
        )
        building.take_place()
        self._finish(manifest, group.with_column(place, column))

    def _add_annotated(self, schema: Schema, new_field: NewField) -> None:
        entry, place = new_field.entry, len(schema.fields) - 1
        # First: what a dropped field of this name had is void, and a crash leaves no field with some values.
        self.annotate(None, np.empty(0, np.int64), (), declared=entry.key)
        for ids, part in new_field.annotations:
            self.annotate(None, ids, [part])
        with self._act_at_once():
            self._commit_annotated(schema, new_field, entry, place)

    def _commit_annotated(self, schema: Schema, new_field: NewField, entry: Field, place: int) -> None:
        group = self._columns()
        folder = (self._store.path / COLUMNS).joinpath(*entry.key)
        column = AnnotatedColumn(entry, group.require_annotations(), folder)
        sums = self._checksums().rearrange([*range(place), -1, *range(place, len(group.summed))], column)
        swap = Swap(replaced=(CHECKSUMS,))
        manifest = self._commit(swap, schema, new_field.specs, sums, new_field=new_field)
        self._finish(manifest, group.with_column(place, column))

    def annotate(
        self, by: str | None, ids: IntArray, parts: Sequence[Part], declared: Key | None = None
    ) -> None:
        """Add values of annotated fields to rows; see `FieldChanges.annotate`.

        Args:
            by: Who adds them; None: unknown.
            ids: Ids of the rows. Shape `(n,)`.
            parts: The values.
            declared: A field that is about to be added, whose former values are void; then there are no rows.
        """
        store = self._store
        with store.lock:
            store.writer()
            check_present(store, ids)
            columns = self._columns()
            log = columns.require_annotations()
            columns.note_last(store.last)
            size = sum(part.values.nbytes for part in parts)
            store.space.check_bytes(size, max(1, ids.size), -(-size // max(1, ids.size)))
            store.health.check_in_place()
            with store.health.guard():
                show = log.add(now_us(), by, ids, parts, declared)
                if store.checkpoints.durable:
                    with store.checkpoints.lock:
                        log.sync()
            slots = store.geometry.slot_of(ids)
            store.changes.begin()
            try:
                store.shared.begin_change(slots)
                show()
                store.shared.end_change()
            finally:
                store.changes.end(slots)
            store.background.note()

    def drop(self, key: Key, specs: str) -> None:
        """Drop a field; the change is durable when this returns.

        Args:
            key: The field.
            specs: The specs of the remaining fields.

        Raises:
            SchemaError: There is no such field, or rows cannot be without it.
            StateError: The store is closed or cannot be written, or its rows are ranked by the field.
            StorageError: The disk failed; the store must be opened again.
        """
        store = self._store
        with store.locks.reshaping.act(), self._clean_up_on_error(), store.lock:
            store.writer()
            check_droppable(store, key)
            schema = store.require_schema().without(key)
            place = store.require_schema().place_of(key)
            group, sums = self._columns(), self._checksums()
            group.check_removable(place)
            with self._act_at_once():
                kept, summed = group.without(place), places_without(len(group.summed), place)
                is_annotated = group.columns[place].entry.annotated
                removed = () if is_annotated else (_own_folder(key, schema),)
                swap = Swap(replaced=(CHECKSUMS,), removed=removed)
                self._finish(self._commit(swap, schema, specs, sums.rearrange(summed)), kept)
                group.close_dropped(kept)

    def _columns(self) -> WritableColumns:
        return self._store.state.require_columns()

    def _checksums(self) -> Checksums:
        checksums = self._store.state.checksums
        assert checksums is not None, "a store with columns has checksums"
        return checksums

    @contextlib.contextmanager
    def _clean_up_on_error(self) -> Iterator[None]:
        """Remove the new files if the block fails."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(StorageError):
                if self._store.lock_file.held:
                    self._store.disk.remove_tree(self._store.path / TEMPORARY)
            raise

    @contextlib.contextmanager
    def _act_at_once(self) -> Iterator[None]:
        """Run the block while no record after the newest checkpoint refers to the former columns.

        The caller holds the storage's lock. Later readers of the journal see only new columns.
        """
        store = self._store
        store.sync()
        with store.checkpoints.lock, store.health.guard():
            if (
                store.health.needs_recovery
                or store.checkpoints.is_pinned
                or store.last > store.checkpoints.covered
            ):
                raise StateError(f"{store.path} could not be synced", hint="try again")
            try:
                yield
            except BaseException:
                # Then the journal is read again, and the interrupted change is completed or undone.
                store.health.note_interruption()
                raise

    def _commit(
        self,
        swap: Swap,
        schema: Schema,
        specs: str,
        sums: bytes,
        built: Iterable[Path] = (),
        folders: Iterable[Path] = (),
        new_field: NewField | None = None,
    ) -> Manifest:
        """Commit the change on disk; return the new content of expstore.json.

        Args:
            swap: The entries that change.
            schema: The fields afterwards.
            specs: Their specs.
            sums: Content of the file `checksums` afterwards.
            built: Files in `swap.tmp` that are not synced yet.
            folders: Folders in `swap.tmp` that are not synced yet.
            new_field: The field that is added, for the lineage.
        """
        store, disk, path = self._store, self._store.disk, self._store.path
        manifest = store.manifest.replace(
            schema=schema, specs=specs, column_set=store.manifest.column_set + 1
        )
        if new_field is not None:
            facts = {"field": key_name(new_field.entry.key), **new_field.origin}
            step = manifest.lineage.add(ADD_COLUMN, now_us(), store.stored, manifest.uuid, **facts)
            manifest = manifest.replace(lineage=step)
        temporary = path / TEMPORARY
        disk.make_dir(temporary)
        disk.put(temporary / MANIFEST, manifest.pack())
        disk.put(temporary / CHECKSUMS, sums)
        written = [temporary / MANIFEST, temporary / CHECKSUMS, swap.save(disk, path), *built]
        sync_paths(disk, written, sorted({temporary, *folders}), None)
        swap.commit(disk, path)
        return manifest

    def _finish(self, manifest: Manifest, columns: WritableColumns) -> None:
        """Replace the fields in memory, and finish the change on disk."""
        store, sums = self._store, self._checksums()
        self._replace(manifest, columns)
        finish_swap(store.disk, store.path)
        checksums = Checksums(store.disk, store.path / CHECKSUMS, columns)
        store.state.replace_checksums(checksums)
        checksums.note_changed(sums.changed)
        sums.close()


def _own_folder(key: Key, others: Schema) -> str:
    """Return the shortest path of a store that contains nothing but the column of a field.

    Args:
        key: The field.
        others: The other fields.
    """
    arrays = [entry.key for entry in others.written.fields if not entry.variable]
    groups = {other[:n] for other in arrays for n in range(1, len(other))}
    depth = next(n for n in range(1, len(key) + 1) if key[:n] not in groups)
    return "/".join((COLUMNS, *key[:depth]))


class _Building:
    """A column that is built in a temporary folder; implements `backfill.Place` for a new field.

    Args:
        storage: The store.
        entry: The field.
    """

    def __init__(self, storage: Store, entry: Field) -> None:
        self._storage, self._entry = storage, entry
        self.schema = storage.require_schema()
        disk, slots = storage.disk, storage.geometry.slots
        #: The path in the store that is moved to its place as a whole.
        self.name = _own_folder(entry.key, self.schema)
        temporary = storage.path / TEMPORARY
        disk.remove_tree(temporary)
        folder = (temporary / COLUMNS).joinpath(*entry.key)
        disk.make_dir(folder)
        self.column = FlatColumn(disk, folder, entry, slots, fills=storage.state.require_columns().fills)
        #: Metadata files and folders with new names, to be synced before the change is committed.
        self.about: list[Path] = []
        self.folders = {p for p in (folder, *folder.parents) if p.is_relative_to(temporary / self.name)}
        made = make_metadata([entry], [self.column.rows], slots, {})
        for name, data in made.items():
            if f"{COLUMNS}/{name}".startswith(f"{self.name}/"):
                self.about.append(temporary / COLUMNS / name)
                disk.put(self.about[-1], data)
        self._touched: set[File] = set()
        self.reach()

    def reach(self, slots: int = 0) -> None:
        """Add shards for at least this number of slots, and for as many as the other columns have."""
        group = self._storage.state.require_columns()
        while self.column.ready < max(slots, group.ready):
            self.folders.update(self.column.add_shard())
            self._touched.add(self.column.files[-1])

    def lay(self, first_id: int, values: Array) -> None:
        """Write the values of a run of rows."""
        column, pieces = self.column, cut_run(first_id, len(values), self._storage.geometry.slots)
        self.reach(max((slot + n for slot, _, n in pieces), default=0))
        self._touched |= column.fill(pieces, values)

    def lay_rows(self, ids: IntArray, values: Array) -> None:
        """Write the values of single rows."""
        if ids.size:
            self._touched.update(self.column.write_rows(self._storage.geometry.slot_of(ids), values))

    def sync(self) -> None:
        """Sync what was written."""
        touched, self._touched = self._touched, set()
        self._storage.disk.sync_all(touched, [], None)

    def take_place(self) -> None:
        """Record that the column is in its final place."""
        former, column = self.column.folder, self.column
        column.folder = (self._storage.path / COLUMNS).joinpath(*self._entry.key)
        for file in column.files:
            file.path = column.folder / file.path.relative_to(former)
        self._kept = True

    _kept = False

    def close(self) -> None:
        """Close the files of a column that was not moved to its final place."""
        if not self._kept:
            self.column.close()


class StoreSettings(RowSettings):
    """Change the settings of a store's rows.

    Threads and crashes: as `RowSettings`.

    Args:
        store: The store.
        describe: Replaces the description of the storage in memory.
        count: Begins to count how often rows are sampled, from the first row on.
        save: Writes expstore.json.
    """

    __slots__ = ("_save_manifest",)
    _storage: Store

    def __init__(
        self,
        store: Store,
        describe: Callable[[Description], None],
        count: Callable[[], None],
        save: Callable[[Manifest], None],
    ) -> None:
        super().__init__(store, describe, count)
        self._save_manifest = save

    def check(self, schema: Schema) -> None:
        """Check that rows may have these fields; see `RowSettings.check`."""
        super().check(schema)
        if self._storage.ranking is not None and schema.variable:
            raise _no_ranking_of(schema)

    def record_lineage(self, facts: Mapping[str, Any], kind: str | None = None) -> None:
        """Add facts to the lineage; see `RowSettings.record_lineage`."""
        store = self._storage
        with store.lock:
            store.writer()
            lineage = store.manifest.lineage.add_facts(now_us(), store.last, facts, kind)
            if lineage != store.manifest.lineage:
                self._save_manifest(store.manifest.replace(lineage=lineage))

    def _save(self, description: Description) -> None:
        store = self._storage
        if description.ranking not in (None, store.ranking):
            self._check_ranking()
        self._save_manifest(store.manifest.replace(ranking=description.ranking, specs=description.specs))

    def _check_ranking(self) -> None:
        """Raise an error if better rows cannot replace others in this store."""
        store = self._storage
        columns, schema = store.state.columns, store.schema
        if schema is not None and schema.annotated:
            raise build_ranked_error(schema.annotated[0])
        if schema is not None and schema.variable:
            raise _no_ranking_of(schema)
        if columns is not None:
            columns.check_replaceable()
        if ColumnLayout(**store.manifest.layout).asks_packed:
            raise StateError(
                "this store has packed fields, whose rows cannot be replaced by better ones",
                hint="create a store with layout='flat', or use a writer that keeps the newest rows",
            )


def _no_ranking_of(schema: Schema) -> SchemaError:
    from expstore.storages.columns.arrow.column import in_place  # imported here, because it loads pyarrow

    fields = [entry for entry in schema.fields if entry.variable]
    return in_place(fields, "rows cannot be replaced by better ones")
