"""The protocol with single faults: a useful harness must detect each of them.

Run through harness.py before it forks, so that every child has the fault. Functions are replaced in memory;
the library's files are never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import google_crc32c
import numpy as np

from expstore.core.id_set import IdSet
from expstore.disk.checkpointed import Checkpoint, Dirty, Pin
from expstore.episodes.log import NewFacts
from expstore.episodes.sessions import End, Resume
from expstore.storages.batch import Payload, Rows
from expstore.storages.columns import dedup_finder
from expstore.storages.columns.arrow.writer import SegmentWriter
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.packed import appender
from expstore.storages.columns.packed.appender import PackedAppender
from expstore.storages.columns.packed.open_chunk import PartialFile
from expstore.storages.columns.packed.writer import PackedColumn
from expstore.storages.columns.sample_counts_column import SampledColumn
from expstore.storages.engine import alter
from expstore.storages.engine.checkpointer import Checkpointer
from expstore.storages.engine.open_store import OpenStore
from expstore.storages.engine.opening import Opening
from expstore.storages.engine.store import Store, _BatchWrite
from expstore.storages.format import write_key_file
from expstore.storages.format.journal import Kind
from expstore.storages.format.records import Publish
from expstore.storages.snapshots import create, restore


def _record_first(kept: Any, rows: Rows, checksum: Callable[[int], int]) -> None:
    """Append the record, and let a sync cover it, before the rows are written."""
    state, write = kept.state, _BatchWrite(kept, rows)
    skipped = write._skipped = kept._reserve(rows)
    priority = write._priority = state.priorities.largest
    for slot, _, n in kept.geometry.runs(rows.first_id + skipped, rows.count - skipped):
        state.columns.ensure(slot + n)  # a sync computes checksums of the columns
    write._payload = Payload(checksum(skipped))
    with kept.locks.episodes:
        sequence = write.append_record(state)
        write.commit(state, (kept.manifest.generation, sequence))
    kept.shared.publish(rows.last_id, sequence, drained=True)
    kept.sync()
    state.put(state.columns, rows, skipped, kept.geometry, priority)


def break_journal_first() -> None:
    def append(self: Any, rows: Rows) -> None:
        def checksum(skipped: int) -> int:
            found = 0
            extra = (rows.ids, rows.assignment.episodes, rows.assignment.steps)
            for array in (*rows.columns, *extra, np.full(rows.count, rows.time, np.int64)):
                found = google_crc32c.extend(found, np.ascontiguousarray(array[skipped:]).tobytes())
            return found

        _record_first(self, rows, checksum)

    Store._append = append  # type: ignore[method-assign]


def break_waiting() -> None:
    """Reuse slots although no durable mark covers the eviction of their rows."""

    def make_room(self: Any, count: int) -> None:
        pass

    Store._make_room = make_room  # type: ignore[method-assign]


def break_redo() -> None:
    """Change rows in place although no checkpoint covers their commit record."""
    Store._is_behind = property(lambda self: False)  # type: ignore[assignment, method-assign]


def break_sync() -> None:
    """Record a checkpoint without a sync of the columns."""
    begin = WritableColumns.begin

    def nothing(self: Any, checkpoint: Checkpoint) -> Dirty:
        begin(self, checkpoint)
        return Dirty()

    WritableColumns.begin = nothing  # type: ignore[method-assign]


def break_recovery() -> None:
    """Do not sync recovered data before a new base record refers to it."""
    Opening._make_durable = lambda self, past, store: None  # type: ignore[method-assign]


def break_marks() -> None:
    """Let a checkpoint cover a change in place before all its columns are written."""
    Checkpointer.pin = lambda self, lsn, segment=None: Pin(lsn, segment)  # type: ignore[method-assign]


def break_sync_mode() -> None:
    """With durability="sync", return before the record is on the disk."""
    Checkpointer.sync_record = lambda self, journal: None  # type: ignore[method-assign]


def break_dumps() -> None:
    """Give a snapshot its name before its files are on the disk."""
    create._Build.note = lambda self, path, size: None  # type: ignore[method-assign]


def break_loads() -> None:
    """Give loaded data its name before its files are on the disk."""
    restore.sync_paths = lambda disk, paths, folders, pool: None


def break_counts() -> None:
    """Return a batch before it is counted on disk."""
    SampledColumn._keep = lambda self, slots, values: None  # type: ignore[method-assign]


def break_renewal() -> None:
    """Let a new row take over the count of its slot on disk."""
    SampledColumn._keep_run = lambda self, slot, values: None  # type: ignore[method-assign]


def break_count_syncs() -> None:
    """Write counts without syncing them."""
    begin = SampledColumn.begin

    def folders(self: Any, checkpoint: Checkpoint) -> Dirty:
        return Dirty(set(), begin(self, checkpoint).folders)

    SampledColumn.begin = folders  # type: ignore[method-assign]


def break_notes() -> None:
    """Keep annotations of an episode in memory, without a record."""
    _unrecorded(NewFacts)


def break_adoptions() -> None:
    """Keep adoptions of episodes in memory, without a record."""
    _unrecorded(Resume)


def _unrecorded(kind: type) -> None:
    record = Store._annotate

    def annotate(self: Any, change: NewFacts | End | Resume) -> None:
        if isinstance(change, kind):
            self.state.log.append(self.episodes.apply(change, self.state.journal.sequence))
        else:
            record(self, change)

    Store._annotate = annotate  # type: ignore[method-assign]


def break_changes() -> None:
    """Change rows in place, or replace them, without a record."""
    append = Checkpointer.append_record

    def others(self: Any, store: Any, kind: Kind, *body: bytes) -> int:
        return store.state.journal.sequence if kind is Kind.REDO else append(self, store, kind, *body)

    Checkpointer.append_record = others  # type: ignore[method-assign]


def break_packed_syncs() -> None:
    """Write a mark without a sync of packed columns."""
    begin = PackedAppender.begin_opening

    def nothing(self: Any, low: int, deleted: IdSet) -> Dirty:
        return Dirty(set(), begin(self, low, deleted).folders)

    PackedAppender.begin_opening = nothing  # type: ignore[method-assign]


def break_packed_names() -> None:
    """Give a finished shard its name before its bytes are on the disk."""
    note_mark = PackedColumn.note_mark

    def name_at_once(self: Any) -> Any:
        finished = note_mark(self)
        for filling in finished:
            self._disk.rename(filling.file.path, self.shard_path(filling.shard))
            self._disk.sync_dir(self.folder)
        return finished

    def close(self: Any, finished: Any) -> None:
        while finished:
            finished.pop().file.close()

    PackedColumn.note_mark = name_at_once  # type: ignore[method-assign]
    PackedColumn.name = close  # type: ignore[method-assign]


def break_packed_areas() -> None:
    """Overwrite raw rows that the last mark covers."""
    PartialFile.note_mark = PartialFile.note_marked = lambda self: None  # type: ignore[method-assign]


def break_packed_rows() -> None:
    """Keep rows of an incomplete chunk only in memory."""
    PartialFile.write = lambda self, first, rows: None  # type: ignore[method-assign]


def break_packed_recovery() -> None:
    """Do not sync recovered packed columns."""
    settle = PackedColumn.settle

    def settle_only(self: Any, last: int, synced: int) -> None:
        settle(self, last, synced)
        self.touched.clear()

    PackedColumn.settle = settle_only  # type: ignore[method-assign]


def break_segment_syncs() -> None:
    """Write a mark without a sync of segments."""
    begin = SegmentWriter.begin_opening

    def nothing(self: Any, low: int, deleted: IdSet) -> Dirty:
        return Dirty(set(), begin(self, low, deleted).folders)

    SegmentWriter.begin_opening = nothing  # type: ignore[method-assign]


def break_segment_cuts() -> None:
    """Leave rows that were never committed in the segments when a store is opened."""

    def keep(self: Any, last: int) -> None:
        self._open = None
        self.show_all(self.segments)

    SegmentWriter._cut = keep  # type: ignore[method-assign]


def break_segments_first() -> None:
    """Append the record, and let a sync cover it, before variable-length rows are written."""
    Store._append = lambda self, rows: _record_first(self, rows, lambda skipped: 0)  # type: ignore[method-assign]


def break_late() -> None:
    """Name another field in expstore.json before its column is on the disk."""
    alter._Building.sync = lambda self: None  # type: ignore[method-assign]


def break_reach() -> None:
    """Deduplicate rows with rows that are overwritten before them."""

    geometry_for = Store.geometry_for

    def with_short_reach(self: Any, schema: Any, ring: Any) -> Any:
        found = geometry_for(self, schema, ring)
        return found.with_slots(found.spare, 0 if found.capacity is None else found.lanes)

    Store.geometry_for = with_short_reach  # type: ignore[method-assign]
    appender.NextRows = lambda row_bytes, reach: dedup_finder.NextRows(row_bytes, 24)  # type: ignore[assignment,misc]


def break_lenders() -> None:
    """Write a mark without a sync of the rows with which others are deduplicated."""
    begin = WritableColumns.begin

    def others(self: Any, checkpoint: Checkpoint) -> Dirty:
        dirty = begin(self, checkpoint)
        return Dirty({file for file in dirty.files if "/next/frame/" not in str(file.path)}, dirty.folders)

    WritableColumns.begin = others  # type: ignore[method-assign]


def break_key_records() -> None:
    """Leave the key out of the publish record of its rows."""
    parts = Publish.parts

    def keyless(self: Publish) -> tuple[bytes, bytes]:
        self.key = None
        return parts(self)

    Publish.parts = keyless  # type: ignore[method-assign]


def break_key_order() -> None:
    """Write a key to the file, and use it, before there is a record of its rows."""
    admit = Store._admit

    def note(self: Any, rows: Rows) -> None:
        admit(self, rows)
        if rows.key is not None:
            self.state.write_keys.note(rows.key, rows.first_id, rows.count, rows.time)
            self.state.write_keys.flush()

    Store._admit = note  # type: ignore[method-assign]
    OpenStore.note_key = lambda self, rows, key: None  # type: ignore[method-assign]
    break_key_cuts()


def break_key_cuts() -> None:
    """Keep keys of rows that a power cut removed."""
    read = write_key_file.read_keys
    write_key_file.read_keys = lambda data, **how: read(data, **how | {"covered": 1 << 62})


def break_key_syncs() -> None:
    """Write a mark without a sync of the file of keys."""
    write_key_file.KeyFile.unsynced = property(lambda self: set())  # type: ignore[assignment, method-assign]


#: Fault -> function that injects it.
BREAKS: dict[str, Callable[[], None]] = {
    "journal first": break_journal_first,
    "no waiting": break_waiting,
    "redo without sync": break_redo,
    "mark without sync": break_sync,
    "recovery without sync": break_recovery,
    "mark over half a change": break_marks,
    "sync mode without sync": break_sync_mode,
    "snapshot without sync": break_dumps,
    "loads without sync": break_loads,
    "counted after": break_counts,
    "counts of older rows": break_renewal,
    "counts without sync": break_count_syncs,
    "notes without a record": break_notes,
    "adoptions without a record": break_adoptions,
    "change without a record": break_changes,
    "packed without sync": break_packed_syncs,
    "packed shards named before a sync": break_packed_names,
    "raw rows written over": break_packed_areas,
    "raw rows in memory": break_packed_rows,
    "packed recovery without sync": break_packed_recovery,
    "segments without sync": break_segment_syncs,
    "segments not cut": break_segment_cuts,
    "segments last": break_segments_first,
    "rows too far away": break_reach,
    "lenders without sync": break_lenders,
    "late column without sync": break_late,
    "keys in no record": break_key_records,
    "keys before rows": break_key_order,
    "keys not cut": break_key_cuts,
    "keys without sync": break_key_syncs,
}


def break_protocol(names: Sequence[str]) -> None:
    """Inject the faults of these names."""
    for name in names:
        BREAKS[name]()
