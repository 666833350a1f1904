"""Repair a damaged store so that it can be opened and written to again, and report what was lost.

Used by `expstore repair`. Derived and predictable files are rebuilt without loss. Rows and records whose
bytes are lost are dropped only with `drop_damaged`. A repair that was killed can be run again: rows are
recorded as deleted before the files that contained them are rewritten. It never changes an intact row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from expstore.core.id_set import IdSet
from expstore.core.values import Runs, key_name, merge_runs
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.disk.writer_lock import WriterLock
from expstore.errors import CorruptionError, LockedError, StateError
from expstore.maintenance.blocks import metadata_of
from expstore.maintenance.episode_log import restore_log
from expstore.maintenance.findings import Finding, Inspection, Progress
from expstore.maintenance.packed import PackedFiles
from expstore.maintenance.verify import inspect
from expstore.sql.sync import Catalog
from expstore.storages.columns.checksums import BLOCK_ROWS
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.store import Store
from expstore.storages.factory import open_storage
from expstore.storages.format.journal import cut_off, segment_faults
from expstore.storages.format.manifest import MANIFEST, Manifest, refuse_archive
from expstore.storages.format.paths import JOURNAL, LOCK, LOG, REPAIR, SEGMENTS, STATE, VERSION
from expstore.storages.format.write_key_file import KEYS
from expstore.storages.format.zarr_metadata import shard_footer

_INDEX = ("index.duckdb", "index.duckdb.wal")
#: Kinds of findings whose repair drops rows.
_COSTLY = {"payload", "ids", "missing", "length"}


@dataclass(slots=True)
class Outcome:
    """What a repair did, or would do.

    Args:
        acts: What was done, one line each.
        lost: Rows that were dropped: first and last id of each run.
        left: Findings that were not repaired.
    """

    acts: list[str] = field(default_factory=list)
    lost: Runs = ()
    left: list[Finding] = field(default_factory=list)

    @property
    def lost_rows(self) -> int:
        """Number of rows that were dropped."""
        return sum(last + 1 - first for first, last in self.lost)


def repair(
    path: Path,
    *,
    drop_damaged: bool = False,
    dry_run: bool = False,
    disk: Disk | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Repair a store that no process has open.

    Without `drop_damaged` only repairs without loss are made: the index is rebuilt, and zarr.json files and
    shard indexes are rewritten. With it, rows in damaged blocks are deleted (their ids are never used
    again, all other rows keep theirs), lost entries of episodes.log are rebuilt from the columns as far as
    possible, and a damaged journal is truncated at the damage.

    Processes: it is the store's one writer from the first change to the last; readers continue to work. A
    process that opens the store for writing while the files are checked makes the repair fail before it has
    changed anything.

    Args:
        path: The store's folder.
        drop_damaged: Whether rows and records may be dropped.
        dry_run: Whether only to report what would be done.
        disk: Access to files.
        progress: Called with the number of bytes checked so far, and the number of bytes to check.

    Raises:
        NotFoundError: There is no store.
        MigrationError: The store has an archive, as earlier versions made it.
        StateError: `path` is a snapshot. Snapshots are never changed: they share files with one another and
            with their store.
        LockedError: A process has the store open for writing, or had while the files were checked.
        CorruptionError: The store cannot be opened even after the repair.
        StorageError: The disk failed; run the repair again.
    """
    disk, path = disk or Disk(), local_path(path)
    path = disk.follow_link(path)
    if disk.exists(path / VERSION):
        raise StateError(
            f"{path} is a snapshot, which is read-only",
            hint="make a new snapshot of the store, or load another one; intact rows of this one can be read",
        )
    inspection = inspect(path, progress=progress)
    if any(finding.kind == "manifest" and finding.fatal for finding in inspection.found):
        return Outcome(left=inspection.found)
    refuse_archive(disk, path)
    if dry_run:
        return _repair_files(disk, inspection, progress, drop_damaged=drop_damaged, dry_run=True)[0]
    lock = WriterLock(disk, path / LOCK)
    try:
        if Manifest.load(disk, path) != inspection.manifest:  # every opening for writing changes it
            raise LockedError(f"{path} was opened while it was checked", hint="repair it again")
        outcome, blocks = _repair_files(disk, inspection, progress, drop_damaged=drop_damaged, dry_run=False)
        if blocks is not None:
            _open_again(disk, path, outcome, blocks, lock)
    finally:
        lock.release()
    return outcome


def _repair_files(
    disk: Disk, inspection: Inspection, progress: Progress | None, *, drop_damaged: bool, dry_run: bool
) -> tuple[Outcome, set[int] | None]:
    """Repair everything that is repaired without opening the store. Unless `dry_run`, the lock is held.

    Returns:
        What was done, and the blocks whose checksums must be computed again; None: it cannot be opened yet.
    """
    path, outcome = inspection.path, Outcome()
    half_cut = disk.exists(path / REPAIR)
    drop_damaged |= half_cut  # an interrupted repair with drop_damaged must be finished
    if drop_damaged and (half_cut or any(f.kind == "journal" and f.fatal for f in inspection.found)):
        cut = _cut_journal(disk, inspection, outcome, dry_run=dry_run)
        if cut and dry_run:
            return outcome, None  # the lost rows are known only after the journal was truncated
        if cut:
            inspection = inspect(path, progress=progress, locked=True)
    if any(finding.fatal for finding in inspection.found):
        outcome.left = inspection.found
        return outcome, None
    outcome.lost = merge_runs(_costs(inspection, outcome, drop_damaged))
    if outcome.lost and not dry_run:
        for name in _INDEX:  # the index contains the dropped rows
            disk.unlink(path / name)
        deleted = inspection.manifest.deleted.join(IdSet.of(outcome.lost))
        inspection.manifest = inspection.manifest.replace(deleted=deleted)
        # This commits the deletion: files with deleted rows may be rewritten only afterwards.
        inspection.manifest.save(disk, path)
    for finding in inspection.found:
        if finding.kind == "torn" and drop_damaged:
            outcome.acts.append("incomplete batches after the last sync dropped")
            if not dry_run:
                disk.unlink(path / STATE)  # with it, an opening would report the batches as damage
        elif finding.kind == "torn":
            outcome.left.append(finding)
    blocks = _rewrite(disk, inspection, outcome, drop_damaged=drop_damaged, dry_run=dry_run)
    if not dry_run:
        disk.unlink(path / REPAIR)
        disk.sync_dir(path)
    return outcome, blocks


def _costs(inspection: Inspection, outcome: Outcome, drop_damaged: bool) -> list[tuple[int, int]]:
    """Return the rows that cannot be kept; if dropping them is not allowed, record their findings as left."""
    deleted: list[tuple[int, int]] = []
    for finding in inspection.found:
        in_shard = finding.shard is not None and finding.kind in {*_COSTLY, "episodes"}
        if in_shard and finding.column not in ("_row.priority", "_row.sampled"):
            if drop_damaged:
                deleted += finding.ids
            elif finding.slots is not None:  # packed columns and segments are handled by `_rewrite`
                outcome.left.append(finding)
        elif finding.kind in {"missing", "length", "episodes.log"} and not _is_free(finding):
            if not drop_damaged:
                outcome.left.append(finding)
        elif finding.kind == "episodes":
            outcome.left.append(finding)
    return deleted


def _costs_rows(inspection: Inspection, column: str | None) -> bool:
    """Return whether damage in a column means that rows are lost."""
    return any(finding.ids for finding in inspection.found if finding.column == column)


def _is_free(finding: Finding) -> bool:
    """Return whether a missing file, or one of wrong length, can be rebuilt without loss."""
    return finding.path.endswith("zarr.json") or finding.path == "checksums"


def _rewrite(
    disk: Disk, inspection: Inspection, outcome: Outcome, *, drop_damaged: bool, dry_run: bool
) -> set[int]:
    """Rewrite damaged files; return the blocks whose checksums must be computed again."""
    blocks: set[int] = set()
    wanted: dict[str, bytes] | None = None
    packed: dict[str | None, PackedFiles] = {
        key_name(files.column.entry.key): files for files in inspection.packed.values()
    }
    mended: set[str | None] = set()
    in_segments = [
        finding
        for finding in inspection.found
        if finding.path.startswith(f"{SEGMENTS}/") and finding.kind != "links"
    ]
    _mend_segments(disk, inspection, outcome, in_segments, drop_damaged=drop_damaged, dry_run=dry_run)
    for finding in [finding for finding in inspection.found if finding not in in_segments]:
        file = inspection.path / finding.path
        act: str | None = None
        if finding.kind == "links":
            act = "files that had hard links copied"  # when the store is opened below
        elif finding.path == MANIFEST:
            act = f"{MANIFEST} rewritten"
            if not dry_run:
                inspection.manifest.save(disk, inspection.path)
        elif finding.path.endswith("zarr.json"):
            act = f"{finding.path} rewritten from the schema"
            wanted = metadata_of(inspection) if wanted is None else wanted
            if not dry_run:
                disk.make_dir(file.parent)
                disk.write_whole(file, wanted[finding.path.removeprefix("columns/")])
        elif finding.column in packed:
            if drop_damaged or not _costs_rows(inspection, finding.column):
                act = f"{finding.path} repaired"
                if not dry_run and finding.column not in mended:
                    _mend(disk, inspection, packed[finding.column])
                    mended.add(finding.column)
            elif finding not in outcome.left:
                outcome.left.append(finding)
        elif finding.shard is not None and (drop_damaged or finding.kind in {"footer", "unwritten"}):
            if finding.kind in {"footer", "missing", "length"}:
                act = f"{finding.path} repaired"
                if not dry_run:
                    _make_whole(disk, inspection, finding)
            if finding.slots is not None and finding.kind != "footer":
                blocks |= set(range(finding.slots[0] // BLOCK_ROWS, finding.slots[1] // BLOCK_ROWS + 1))
        elif finding.path == LOG and finding.kind != "episodes" and drop_damaged:
            restored = restore_log(inspection)
            act = f"{LOG} restored: {restored.summary}"
            if not dry_run:
                disk.write_whole(file, restored.data)
        elif finding.path == KEYS or finding.kind == "state":
            act = f"{finding.path} rebuilt"  # when the store is opened below
        if act is not None and act not in outcome.acts:
            outcome.acts.append(act)
    return blocks


def _mend_segments(
    disk: Disk,
    inspection: Inspection,
    outcome: Outcome,
    found: list[Finding],
    *,
    drop_damaged: bool,
    dry_run: bool,
) -> None:
    """Repair segments if that loses no rows, or if rows may be dropped."""
    mended = [finding for finding in found if drop_damaged or not finding.ids]
    outcome.acts += [f"{finding.path} repaired" for finding in mended]
    outcome.left += [finding for finding in found if finding not in mended]
    if mended and not dry_run:
        from expstore.maintenance.segments import mend_segments

        mend_segments(disk, inspection, outcome.lost)


def _mend(disk: Disk, inspection: Inspection, files: PackedFiles) -> None:
    """Repair the files of a packed column."""
    if inspection.past is not None:
        files.mend(disk, min(inspection.stored.last, inspection.past.synced))


def _make_whole(disk: Disk, inspection: Inspection, finding: Finding) -> None:
    """Give a shard its correct length and index; its intact rows do not change."""
    if inspection.group is None:
        return
    column = next(c for c in inspection.flat if key_name(c.entry.key) == finding.column)
    path = inspection.path / finding.path
    new = not disk.exists(path)
    disk.make_dir(path.parent)
    file = disk.open(path, create=True)
    try:
        rows_end = column.rows * column.row_bytes
        cut = file.size() < rows_end
        if finding.kind != "footer":
            file.truncate(min(file.size(), rows_end))
            file.truncate(column.file_bytes)
        if column.entry.key == ("_row", "priority") and (new or cut):
            # Lost priorities become the largest one, as new rows get it.
            largest = 1.0 if inspection.past is None else inspection.past.state.max_priority
            file.write(np.full(column.rows, largest, np.float32), 0)
        file.write(shard_footer(column.rows, column.row_bytes), rows_end)
        file.sync()
    finally:
        file.close()
    for folder in (path.parent, *path.parent.parents):
        disk.sync_dir(folder)
        if folder == column.folder:
            break


def _cut_journal(disk: Disk, inspection: Inspection, outcome: Outcome, *, dry_run: bool) -> bool:
    """Truncate the journal at the damage, if the records before it describe a complete state."""
    folder = inspection.path / JOURNAL
    faults = segment_faults(disk, folder)
    if not faults and _is_short(inspection):
        outcome.acts.append(f"{STATE} rebuilt: it listed records that the journal has lost")
        if not dry_run:
            disk.write_whole(inspection.path / REPAIR, b"")
            disk.unlink(inspection.path / STATE)
        return True
    if not faults:
        return False
    path, at, _ = min(faults, key=lambda fault: (int(fault[0].name), fault[1]))
    if at == 0:
        return False  # even its first record is damaged
    outcome.acts.append(f"{inspection.relative(path)} truncated at byte {at}: later records are lost")
    if not dry_run:
        # Rows whose records are dropped may have overwritten older rows. REPAIR prevents an opening until
        # these older rows are known.
        disk.write_whole(inspection.path / REPAIR, b"")
        disk.unlink(inspection.path / STATE)  # it counts records that are about to be dropped
        cut_off(disk, folder, path, at)
    return True


def _is_short(inspection: Inspection) -> bool:
    """Return whether the journal can be read, but ends before the last record that STATE lists."""
    return inspection.past is not None and any(
        finding.kind == "journal" and finding.fatal for finding in inspection.found
    )


def _sum_again(storage: Store, blocks: set[int]) -> None:
    """Sum blocks again, which the repair has written to or gives up, and run a checkpoint."""
    state = storage.state
    if state.columns is not None and state.checksums is not None:
        ready = state.columns.ready
        with storage.locks.episodes:
            state.checksums.note_changed(block for block in blocks if (block + 1) * BLOCK_ROWS <= ready)
        storage.sync()


def _open_again(disk: Disk, path: Path, outcome: Outcome, blocks: set[int], lock: WriterLock) -> None:
    """Open the store without the dropped rows, compute new checksums, and rebuild the index.

    The storage takes over the lock: no other process can open the store before the checksums are right.
    """
    for name in _INDEX:
        disk.unlink(path / name)
    try:
        storage = open_storage(path, settings=Settings(lock=lock), disk=disk)
    except CorruptionError:
        if outcome.left:
            return  # it cannot be opened yet: the repair that would help was not requested
        raise
    try:
        _sum_again(storage, blocks)
        Catalog(storage).close()
        outcome.acts.append("index.duckdb rebuilt")
    finally:
        storage.close()
