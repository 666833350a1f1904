"""Replace a store's content by that of a snapshot: completely or not at all.

Used by storages. The rows of the snapshot are read and get new ids. A store on disk builds the new content in
a separate folder and swaps it in, as `expstore.storages.format.swap` describes. A snapshot is never changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from expstore.core.geometry import round_up
from expstore.core.values import Array, IntArray, Window, cut_run, key_name
from expstore.disk.bulk_files import sync_paths
from expstore.disk.files import Disk
from expstore.disk.threads import Threads
from expstore.episodes.log import LogEntry, read_log
from expstore.episodes.sessions import End, SessionKey
from expstore.episodes.table import EpisodeTable
from expstore.errors import CorruptionError, SchemaError, StateError, StorageError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Schema
from expstore.schema.spec_text import check_specs
from expstore.storages.base import Storage
from expstore.storages.batch import now_us
from expstore.storages.columns.annotated import Annotations
from expstore.storages.columns.checksums import BLOCK_ROWS, BlockCheck, Checksums, blocks_of, read_entries
from expstore.storages.columns.column import Column, Deleted
from expstore.storages.columns.column_set import ReadColumns
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.flat import FlatColumn
from expstore.storages.columns.sample_counts_column import SampledColumn, find_sampled
from expstore.storages.format.journal import ALIGN, Journal, Kind, read_journal
from expstore.storages.format.layout import ColumnLayout, layout_of
from expstore.storages.format.lineage import RESTORE
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.format.paths import (
    ANNOTATIONS,
    CHECKSUMS,
    COLUMNS,
    JOURNAL,
    LOG,
    RENUMBERED,
    SEGMENTS,
)
from expstore.storages.format.renumbering import Renumbering
from expstore.storages.format.swap import TEMPORARY, Swap, is_half_replaced
from expstore.storages.snapshot_access import SnapshotAccess
from expstore.storages.snapshots.capture import manifest_of
from expstore.storages.snapshots.catalog import Version
from expstore.storages.snapshots.common_rows import CommonRows

#: What belongs to the content of a store, besides expstore.json.
CONTENT = Swap(replaced=(COLUMNS, SEGMENTS, ANNOTATIONS, CHECKSUMS, LOG, JOURNAL, RENUMBERED))
#: Settings in expstore.json that a storage keeps when its content is replaced.
_OWN = (
    *("uuid", "created", "capacity", "ndim", "dims", "layout", "storage", "compression", "keyed"),
    "retain",
    "window",
)
#: Upper bound of the id shift that keeps slot positions (avoids int64 overflow).
_FURTHEST = 1 << 50
#: Bytes copied at a time.
STEP_BYTES = 8 << 20


class ContentLike(Protocol):
    """Content that a storage can adopt."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    @property
    def manifest(self) -> Manifest:
        """The manifest of the content."""

    @property
    def base(self) -> dict[str, Any]:
        """Its state, as a journal's base record stores it."""

    @property
    def entries(self) -> Sequence[LogEntry]:
        """The entries of episodes.log."""

    @property
    def low(self) -> int:
        """The newest id that cannot be read."""

    @property
    def row_bytes(self) -> int:
        """The size of a row, bytes."""

    @property
    def counted(self) -> bool:
        """Whether it has sample counts."""

    def rows(self, first_id: int, count: int) -> list[Array]:
        """Copy a run of rows: one array per column."""

    def counts(self, first_id: int, count: int) -> Array:
        """Copy how often each of a run of rows was sampled. Shape `(count,)`, uint32."""

    def annotations(self) -> Iterable[tuple[Annotations, Callable[[IntArray], IntArray]]]:
        """Yield records of annotations, each with a function from ids in them to ids of rows.

        The function returns 0 for a row that is not in the content.
        """


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a snapshot.

    Args:
        folder: The snapshot's folder.
        manifest: Its manifest.
        base: Its state, as a journal's base record stores it.
        entries: Entries of episodes.log.
        columns: The columns, opened for reading; None: the snapshot has no fields.
        sampled: The column of sample counts, opened for reading; None: the snapshot has none.
        sums: Compares rows with the checksums; None: the snapshot has no fields.
    """

    folder: Path
    manifest: Manifest
    base: dict[str, Any]
    entries: Sequence[LogEntry]
    columns: ReadColumns | None
    sampled: FlatColumn | None
    sums: BlockCheck | None

    @property
    def name(self) -> str:
        """The path of the snapshot's folder."""
        return str(self.folder)

    @property
    def row_bytes(self) -> int:
        """The approximate size of a row, bytes."""
        if self.columns is None:
            return 1
        return self.columns.mean_bytes

    @property
    def counted(self) -> bool:
        """Whether the snapshot has sample counts."""
        return self.sampled is not None

    @property
    def low(self) -> int:
        """The newest id that cannot be read."""
        capacity, last, retired = self.manifest.capacity, self.base["last"], self.base["retired"]
        return int(retired if capacity is None else max(retired, last - capacity))

    def rows(self, first_id: int, count: int) -> list[Array]:
        """Copy a run of rows: one array per column.

        Raises:
            CorruptionError: A shard is damaged, or rows do not have their checksum.
        """
        if self.columns is None or self.sums is None:
            return []
        self.sums.check(np.arange(first_id, first_id + count))
        return self._parts(self.columns.columns, first_id, count)

    def counts(self, first_id: int, count: int) -> Array:
        """Copy how often each of a run of rows was sampled. Shape `(count,)`, uint32.

        Raises:
            CorruptionError: A shard is damaged.
        """
        if self.sampled is None:
            return np.zeros(count, np.uint32)
        return self._parts([self.sampled], first_id, count)[0]

    def annotations(self) -> Iterable[tuple[Annotations, Callable[[IntArray], IntArray]]]:
        """Yield the records of annotations; see `ContentLike`."""
        found = None if self.columns is None else self.columns.annotations
        return [] if found is None else [(found, lambda ids: ids)]

    def _parts(self, columns: Sequence[Column], first_id: int, count: int) -> list[Array]:
        pieces = cut_run(first_id, count, self.manifest.slots)
        return [join_parts([column.part(slot, n) for slot, _, n in pieces]) for column in columns]


def describe_version(disk: Disk, folder: Path) -> dict[str, Any]:
    """Return what the lineage says about a snapshot that is restored."""
    version = Version.load(disk, folder)
    return {"source": str(folder.absolute()), "version": version.number, "tag": version.tag}


def join_parts(parts: Sequence[Any]) -> Any:
    """Concatenate the parts of a column."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import pyarrow as pa

    return pa.concat_arrays(parts)


def read_content(disk: Disk, folder: Path) -> Content:
    """Read a snapshot; its rows are read when they are needed.

    Raises:
        CorruptionError: The snapshot is damaged.
    """
    manifest = Manifest.load(disk, folder)
    records = read_journal(disk, folder / JOURNAL)
    if [record.kind for record in records] != [Kind.BASE, Kind.CLOSE]:
        raise CorruptionError(f"{folder / JOURNAL} is not a snapshot's journal", hint="load another snapshot")
    base = records[0].json()
    entries = list(read_log(disk, folder / LOG, base["log_length"]))
    columns, sampled, sums = None, None, None
    if manifest.schema is not None:
        fields = (*manifest.schema.fields, *ROW_FIELDS)
        columns = ReadColumns(disk, folder / COLUMNS, fields, manifest.slots)
        last: int = base["last"]
        used = last if manifest.slots is None else min(last, manifest.slots)
        columns.look(used)
        columns.end_at(last)
        sums = BlockCheck(columns, _read_sums(disk, folder / CHECKSUMS, len(columns.summed), used))
        sampled = find_sampled(disk, folder / COLUMNS, manifest.slots)
        if sampled is not None:
            sampled.look(used)
    return Content(folder, manifest, base, entries, columns, sampled, sums)


def _read_sums(disk: Disk, path: Path, columns: int, slots: int) -> Array:
    """Return the entries of a snapshot's checksums.

    Raises:
        CorruptionError: The file is missing or damaged, or has no entries for some of these slots.
    """
    if not disk.exists(path):
        raise CorruptionError(f"{path} is missing", hint="load another snapshot")
    entries = read_entries(disk.read_whole(path), columns, path)
    if entries.size * BLOCK_ROWS < slots:
        raise CorruptionError(f"{path} has no checksums of the newest rows", hint="load another snapshot")
    return entries


class Arrival:
    """A snapshot's content with the ids that it gets in a storage.

    If the storage has had rows, ids and episode ids continue above those of the storage and of the snapshot,
    so that no id that a caller still has names another row. Otherwise they are not changed. Ids are shifted
    by a multiple of the capacity. In a ring the shift is so large that all former ids of the storage count as
    overwritten, and a caller that has just drawn some draws again.

    Args:
        content: The snapshot.
        manifest: The manifest of the storage afterwards.
        session: The storage's own session.
        low: The newest id of the content that is left out.
        count: Number of rows that are restored.
        id_shift: Added to ids.
        episode_shift: Added to episode ids.
        common: Finds rows that the storage has had; None: their former ids are not needed.
    """

    def __init__(
        self,
        content: ContentLike,
        manifest: Manifest,
        session: SessionKey,
        *,
        low: int,
        count: int,
        id_shift: int,
        episode_shift: int,
        common: CommonRows | None = None,
    ) -> None:
        self.content, self.manifest, self.session, self.count = content, manifest, session, count
        self._low, self._ids, self._episodes, self._common = low, id_shift, episode_shift, common

    @classmethod
    def of(cls, content: ContentLike, storage: Storage) -> Arrival:
        """Return a snapshot's content with the ids that it gets in a storage. The storage's lock is held.

        Raises:
            SchemaError: The storage has other fields, or rows of other dims.
            StateError: The content keeps the best rows, and the storage is too small for all of them or has
                packed fields, whose rows cannot be replaced.
        """
        base, own = content.base, manifest_of(storage)
        schema = _fit(content.manifest, own, storage, content.name)
        others = storage.schema is not None and schema is not None and not schema.same(storage.schema)
        _fit_layout(own, content)
        own = _fit_dims(own, content)
        ring = own.geometry
        if storage.schema is None and schema is not None:
            ring = storage.geometry_for(schema, ring)
        manifest = content.manifest.replace(
            generation=max(own.generation, content.manifest.generation) + 1,
            spare=ring.spare,
            reach=ring.reach,
            schema=schema,
            specs=_fit_specs(content.manifest.specs, storage.description.specs, schema, storage.schema),
            column_set=max(own.column_set, content.manifest.column_set) + others,
            **{name: getattr(own, name) for name in _OWN},
        )
        last = base["last"]
        low: int = content.low if own.capacity is None else max(content.low, last - own.capacity)
        if content.manifest.ranking is not None and low > content.low:
            raise StateError(
                f"{content.name} has the best {last - content.low} rows by {content.manifest.ranking}; "
                f"there is room for {own.capacity}, and the oldest rows would be lost, not the worst",
                hint="load it into a store with a sufficient capacity",
            )
        former = max(storage.last, storage.state.horizon)
        # In a storage that never had rows all ids are kept: no caller knows them as ids of other rows.
        shift: int = max(former, last) - low if former else 0
        if own.capacity is not None:
            slots = ring.slots or 0
            if former:
                shift = max(shift, former + slots - last)
            step = own.capacity
            if (content.manifest.capacity, content.manifest.slots) == (own.capacity, slots):
                # Slots are the same too, and with them the rows that a sum tree finds for a random number.
                both = math.lcm(step, slots)
                step = both if both <= _FURTHEST else step
            shift = round_up(shift, step)
        steps = content.manifest.lineage.move(lambda id: min(max(id - low, 0), last - low), low + shift, last)
        table = storage.episodes
        return cls(
            content,
            manifest.replace(
                deleted=content.manifest.deleted.shift(shift),
                lineage=own.lineage.adopt(steps, storage.last, own.uuid),
            ),
            table.session,
            low=low,
            count=last - low,
            id_shift=shift,
            episode_shift=max(table.next_episode, base["episodes"]["next_episode"]) - 1 if former else 0,
            common=CommonRows.of(content.manifest, storage, low) if isinstance(content, Content) else None,
        )

    @property
    def low(self) -> int:
        """The newest id that cannot be read, in the storage."""
        return self._low + self._ids

    @property
    def last(self) -> int:
        """The newest id, in the storage."""
        return self.low + self.count

    def base(self, content: tuple[int, int]) -> dict[str, Any]:
        """Return the state for a base record; `content` is (generation, LSN) of the restore."""
        episodes = dict(self.content.base["episodes"])
        episodes["next_episode"] += self._episodes
        # No writer has seen these rows: only the storage's own session stays live, if it wrote some of them.
        episodes["open"] = []
        own = (session for session in episodes["sessions"] if SessionKey(*session["key"]) == self.session)
        episodes["sessions"] = [session | {"cut": []} for session in own]
        numbers = {"content": content, "last": self.last, "retired": self.low, "episodes": episodes}
        return self.content.base | numbers

    def entries(self) -> Iterator[LogEntry]:
        """Yield the entries of episodes.log, which end open episodes and all sessions but the storage's."""
        table = EpisodeTable(generation=self.content.base.get("generation", 0), session=self.session.id)
        table.load_base(self.content.base["episodes"])
        live = [key for key in table.live_sessions() if key != self.session]
        ended = table.apply(End(now_us(), None, tuple(live)), 0)
        for entry in (*self.content.entries, *ended):
            if entry.episode:
                moved, last = entry.episode + self._episodes, entry.last_id + self._ids
                entry = dataclasses.replace(entry, episode=moved, last_id=last)
            yield entry

    def runs(self) -> Iterator[tuple[int, list[Array]]]:
        """Yield all rows, oldest first: (first id, one array per field and row field)."""
        if self.manifest.schema is None:
            return
        step = max(1, STEP_BYTES // self.content.row_bytes)
        for start in range(0, self.count, step):
            arrays = self.content.rows(self._low + 1 + start, min(step, self.count - start))
            if self._common is not None:
                self._common.compare(arrays)
            arrays[-5] += self._ids
            arrays[-4] += self._episodes
            yield self.low + 1 + start, arrays

    def renumber(self) -> IntArray:
        """Return which rows get new ids, after `runs`: first id in the storage, rows, first new id.

        Shape `(n, 3)`.
        """
        return np.empty((0, 3), np.int64) if self._common is None else self._common.shift(self._ids)

    def copy_annotations(self, log: Annotations) -> None:
        """Write the annotations of the rows, after `runs`."""
        for found, locate in self.content.annotations():
            log.write_copy(found, self.manifest.schema or (), partial(self._rename, locate))

    def _rename(self, locate: Callable[[IntArray], IntArray], named: IntArray) -> IntArray:
        """Return the ids that rows of the content get, 0 for rows that are left out. Shapes `(n,)`."""
        ids = locate(named)
        new = ids + self._ids
        kept = (new > self.low) & (new <= self.last) & ~self.manifest.deleted.holds(new)
        return np.where(kept & (ids > 0), new, 0)

    @property
    def counted(self) -> bool:
        """Whether the snapshot has sample counts."""
        return self.content.counted

    def counts(self) -> Array:
        """Return how often each row was sampled, oldest first. Shape `(count,)`, uint32."""
        return self.content.counts(self._low + 1, self.count) if self.count else np.zeros(0, np.uint32)


def _fit(there: Manifest, here: Manifest, storage: Storage, name: str) -> Schema | None:
    """Return the schema of the storage afterwards; a snapshot of the same store also restores its fields."""
    offered = there.schema
    own = storage.schema
    if offered is not None:
        dataclasses.replace(storage.row_traits, undecided=False).check(offered, storage.kind)
    if offered is None or own is None:
        return offered or own
    if there.uuid == here.uuid and int(here.uuid, 16):
        return offered
    asked, found = ({entry.key: entry for entry in schema.fields} for schema in (own, offered))
    if asked != found:
        differ = [
            f"{key_name(key)}: {found.get(key, 'missing')}, expected {asked.get(key, 'no such field')}"
            for key in sorted(asked | found)
            if asked.get(key) != found.get(key)
        ]
        raise SchemaError(
            f"{name} has other fields than this store ({', '.join(differ[:3])})",
            hint="load it into another store",
        )
    return offered


def _fit_layout(own: Manifest, content: ContentLike) -> None:
    """Raise StateError if the content keeps the best rows and the storage has packed fields."""
    if content.manifest.ranking is not None and ColumnLayout(**own.layout).asks_packed:
        raise StateError(
            f"{content.name} has the best rows, but this store has packed fields, whose rows "
            "cannot be replaced by better ones",
            hint="load it into a store with layout='flat'",
        )


def _fit_specs(offered: str, own: str, schema: Schema | None, former: Schema | None) -> str:
    """Return the specs of the storage afterwards: those of the snapshot, or else the storage's own."""
    if schema is not None and former is not None and schema != former:
        return offered  # the storage's own specs describe other fields
    if not offered and own and schema is not None:
        check_specs(own, schema)
    return offered or own


def _fit_dims(own: Manifest, content: ContentLike) -> Manifest:
    """Return the storage's manifest with the dims of its rows afterwards."""
    there = content.manifest
    if own.schema is None and there.schema is not None:
        lanes = math.prod(there.dims)
        capacity = None if own.capacity is None else round_up(own.capacity, lanes)
        return own.replace(capacity=capacity, ndim=there.ndim, dims=there.dims)
    if there.schema is not None and own.dims != there.dims:
        found, asked = _more(there.dims), _more(own.dims)
        raise SchemaError(
            f"{content.name} has rows of dims [time{found}], but this store has dims [time{asked}]",
            hint="load it into another store",
        )
    return own


def _more(dims: tuple[int, ...]) -> str:
    return "".join(f", {size}" for size in dims)


class ContentAccess(SnapshotAccess):
    """Read the content of a storage, and replace it: completely or not at all.

    Threads and crashes: as the storage.

    Args:
        storage: The storage.
        check: Called before a snapshot is made; raises SnapshotError if none can be made.
        convert: Applies load hooks to the content of a snapshot; None: there are no hooks.
    """

    __slots__ = ("_convert",)

    def __init__(
        self,
        storage: Storage,
        check: Callable[[], None] | None = None,
        convert: Callable[[ContentLike], ContentLike] | None = None,
    ) -> None:
        super().__init__(storage, check)
        self._convert = convert

    def restore(self, folder: Path, kind: str = RESTORE, **facts: Any) -> None:
        """Replace the content by that of the snapshot in a folder.

        Args:
            folder: The snapshot's folder.
            kind: The kind of step that the lineage gets.
            facts: What the step says; by default the path, number and tag of the snapshot.

        Raises:
            SchemaError: The storage has other fields.
            CorruptionError: The snapshot is damaged.
            StateError: The storage is closed, or cannot be written.
        """
        storage = self._storage.writer()
        content = read_content(storage.disk, folder)
        facts = facts or describe_version(storage.disk, folder)
        manifest = content.manifest
        window = Window(content.low, content.base["last"])
        lineage = manifest.lineage.add(kind, now_us(), window, uuid=manifest.uuid, **facts)
        content = dataclasses.replace(content, manifest=manifest.replace(lineage=lineage))
        self.adopt(content if self._convert is None else self._convert(content))

    @abstractmethod
    def adopt(self, content: ContentLike) -> None:
        """Replace the content.

        Raises:
            SchemaError: The storage has other fields.
            StateError: The storage is closed, or cannot be written.
        """


# -- on disk ---------------------------------------------------------------------------------------


def build_load(storage: Storage, path: Path, arrival: Arrival, *, sequence: int, ready: int) -> None:
    """Build a store's new content in a separate folder, and sync it.

    Args:
        storage: The store's storage.
        path: The store's folder.
        arrival: The new content.
        sequence: LSN of the last record in the store's journal.
        ready: How many slots the store's columns have room for. Readers need as many in the new columns.
    """
    disk, temporary = storage.disk, path / TEMPORARY
    disk.remove_tree(temporary)
    try:
        _build(disk, temporary, arrival, sequence=sequence, ready=ready)
    except BaseException:
        with contextlib.suppress(StorageError):  # if this fails, the next opening removes it
            disk.remove_tree(temporary)
        raise


def _build(disk: Disk, temporary: Path, arrival: Arrival, *, sequence: int, ready: int) -> None:
    manifest = arrival.manifest
    disk.make_dir(temporary)
    written, folders = [temporary / MANIFEST, temporary / LOG], {temporary, temporary / JOURNAL}
    stamp = (manifest.generation, sequence + 1)
    pool, annotated = Threads(), 0
    if manifest.schema is not None:
        paths, more, annotated = _build_columns(disk, temporary, arrival, manifest.schema, stamp, ready, pool)
        written += paths
        folders |= more
    runs = arrival.renumber()
    if runs.size:
        disk.put(temporary / RENUMBERED, Renumbering.load(disk, temporary.parent).then(runs).pack())
        written.append(temporary / RENUMBERED)
    disk.put(temporary / MANIFEST, manifest.pack())
    log = b"".join(entry.pack() for entry in arrival.entries())
    disk.put(temporary / LOG, log)
    disk.make_dir(temporary / JOURNAL)
    written += _build_journal(disk, temporary / JOURNAL, arrival, stamp, len(log), annotated)
    written.append(CONTENT.save(disk, temporary.parent))
    sync_paths(disk, written, sorted(folders), pool)


def _build_columns(
    disk: Disk,
    temporary: Path,
    arrival: Arrival,
    schema: Schema,
    stamp: tuple[int, int],
    ready: int,
    pool: Threads,
) -> tuple[list[Path], set[Path], int]:
    """Write the rows; return the files and folders to be synced, and where the annotations end."""
    manifest = arrival.manifest
    group = create_columns(disk, temporary, manifest, schema, pool)
    try:
        group.ensure(ready)
        blocks: set[int] = set()
        for first, arrays in arrival.runs():
            pieces = cut_run(first, len(arrays[0]), manifest.slots)
            group.write(pieces, arrays[:-5], np.stack(arrays[-5:-1]), arrays[-1])
            blocks |= blocks_of(pieces)
        annotated = 0
        if group.annotations is not None:
            arrival.copy_annotations(group.annotations)
            annotated = group.annotations.end
            group.new_folders |= {path.parent for path in group.annotations.paths()}
        written = finish_columns(disk, temporary, group, blocks, stamp)
        written += [] if group.annotations is None else group.annotations.paths()
        written += _build_sampled(disk, temporary / COLUMNS, arrival, group.ready, pool)
        return written, group.new_folders, annotated
    finally:
        group.close()


def create_columns(
    disk: Disk, folder: Path, manifest: Manifest, schema: Schema, pool: Threads
) -> WritableColumns:
    """Create the empty columns of a store that is built in a folder; return them, open for writing."""
    fields, slots = (*schema.fields, *ROW_FIELDS), manifest.slots
    attributes = {"expstore": {"capacity": manifest.capacity, "slots": slots}}
    packings = layout_of(manifest).packings(fields, slots, manifest.reach)
    WritableColumns.create(disk, folder / COLUMNS, fields, slots, pool, attributes, packings)
    return WritableColumns(
        disk,
        folder / COLUMNS,
        fields,
        slots,
        reach=manifest.reach,
        compression=manifest.compression,
        packings=packings,
    )


def finish_columns(
    disk: Disk,
    folder: Path,
    group: WritableColumns,
    blocks: set[int],
    stamp: tuple[int, int],
    deleted: Deleted | None = None,
) -> list[Path]:
    """Sum the written blocks of columns that were built, and finish their files; return the files.

    The caller syncs them, and `group.new_folders`, before a reader can find the columns. The space of
    `deleted` rows is freed.
    """
    if deleted is not None:
        group.free(deleted)  # of flat fields, before their blocks are summed
    sums = Checksums(disk, folder / CHECKSUMS, group)
    try:
        sums.update(blocks, generation=stamp[0], sequence=stamp[1])
    finally:
        sums.close()
    group.begin_opening()
    group.synced()
    for segments in group.shared:
        segments.give_back()
    if deleted is not None:
        group.free(deleted)  # of packed fields, whose shards are finished
        group.free_shared(deleted)
    return [folder / CHECKSUMS, *(path for part in group.parts for path in part.paths())]


def _build_sampled(disk: Disk, folder: Path, arrival: Arrival, ready: int, pool: Threads) -> list[Path]:
    """Write how often each row was sampled, if the snapshot has counts; return the files to be synced."""
    if not arrival.counted:
        return []
    slots = arrival.manifest.slots
    SampledColumn.make(disk, folder, slots, ready=ready, pool=pool)
    sampled = SampledColumn(disk, folder, slots)
    try:
        sampled.put(cut_run(arrival.low + 1, arrival.count, slots), arrival.counts())
        return [file.path for file in sampled.column.files]
    finally:
        sampled.close()


def _build_journal(
    disk: Disk, folder: Path, arrival: Arrival, stamp: tuple[int, int], log_length: int, annotated: int
) -> list[Path]:
    """Write a journal with the state and a close record."""
    manifest = arrival.manifest
    journal = Journal(
        disk,
        folder,
        uuid=manifest.uuid,
        generation=manifest.generation,
        sequence=stamp[1],
        segment_bytes=ALIGN,
    )
    try:
        extra = {"opening": True, "generation": manifest.generation, "log_length": log_length}
        if annotated:
            extra["annotated"] = annotated
        journal.start_segment(arrival.base(stamp) | extra)
        journal.append(Kind.CLOSE, b"{}")
        return [file.path for file in journal.sync_files()]
    finally:
        journal.close()


def refuse_half_loaded(disk: Disk, path: Path) -> None:
    """Raise StorageError if a restore was interrupted while its files were moved to their places."""
    if is_half_replaced(disk, path, JOURNAL):
        raise StorageError(
            f"loads() or a change of the capacity of {path} was interrupted",
            kind="half_loaded",
            hint="open it for writing once, which completes the operation",
        )
