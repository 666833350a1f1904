"""Check every file of a store for damage: its checksums, and whether it agrees with the other files.

Used by `expstore verify`, and by `repair` to find what to repair. It changes nothing, and refuses to check a
store that a process has open for writing.
"""

from __future__ import annotations

import json
from pathlib import Path

import google_crc32c

from expstore.core import tuning
from expstore.disk.files import Disk, ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import CorruptionError, LockedError, StorageError
from expstore.maintenance.blocks import check_blocks, check_metadata, read_column
from expstore.maintenance.findings import Finding, Inspection, Progress
from expstore.maintenance.inspection import find_writer
from expstore.maintenance.packed import PackedFiles
from expstore.maintenance.rows import check_ids, check_index, check_log, check_rows
from expstore.schema.row_fields import ROW_FIELDS
from expstore.storages.columns.checksums import BLOCK_ROWS, DAMAGED, read_entries, state_of
from expstore.storages.columns.column_set import ReadColumns
from expstore.storages.columns.flat import FlatColumn
from expstore.storages.columns.sample_counts_column import find_sampled
from expstore.storages.format.control_page import PAGE, StatePage
from expstore.storages.format.journal import Record, no_records, read_journal, segment_faults
from expstore.storages.format.layout import ColumnLayout
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.format.paths import (
    ANNOTATIONS,
    CHECKSUMS,
    COLUMNS,
    INDEX,
    JOURNAL,
    LOCK,
    LOG,
    ORIGIN,
    REDO,
    REPAIR,
    STATE,
    VERSION,
)
from expstore.storages.format.records import Publish, Redo, fetch_body
from expstore.storages.format.write_key_file import KEYS, read_keys
from expstore.storages.recovery.recover import Past, explain_lost_records, find_unsettled_blocks, read_past
from expstore.storages.recovery.recover import verify as walk
from expstore.storages.snapshots.catalog import OWN_FOLDER, Version

#: How many files a message lists.
_LISTED = 4


def verify(path: Path, *, disk: Disk | None = None, progress: Progress | None = None) -> list[Finding]:
    """Check a store that no process has open for writing, closed cleanly or not.

    Checked are expstore.json, the journal, every block of 4096 rows of every column but `_row/priority` and
    `_row/sampled`, shard lengths and indexes, zarr.json, ids, episodes and steps, episodes.log, keys, the
    index, STATE of a closed store, and hard links of files that are written in place. Not checked are LOCK,
    priorities, and the counts of how often rows were sampled: both columns change all the time, and any
    value may be right.
    Leftovers of an unclean stop, which the next opening removes, are not reported, but batches that it will
    drop are.

    Args:
        path: The store's folder.
        disk: Access to files; it only reads.
        progress: Called now and then with the number of bytes checked so far, and the number of bytes to
            check.

    Returns:
        The problems found; an empty list if the store is sound.

    Raises:
        NotFoundError: There is no store.
        LockedError: A process has the store open for writing.
        MigrationError: A newer version of the library wrote the store.
    """
    return inspect(path, disk=disk, progress=progress).found


def inspect(
    path: Path, *, disk: Disk | None = None, progress: Progress | None = None, locked: bool = False
) -> Inspection:
    """Check a store as `verify` does, and return the whole state of the check.

    With `locked`, the caller holds the writer's lock.
    """
    disk, path = disk or ReadingDisk(), local_path(path)
    path = disk.follow_link(path)
    Manifest.check_exists(disk, path)  # first, so that other folders are not searched for links
    disk.check_tree(path, but={OWN_FOLDER})
    if not locked:
        _refuse_writer(disk, path)
    try:
        manifest = Manifest.load(disk, path)
    except CorruptionError as exc:
        empty = Manifest(uuid="", generation=0, storage="", capacity=None, spare=0, seed=0, created=0.0)
        inspection = Inspection(disk, path, empty)
        text = exc.message.replace(str(path / MANIFEST), MANIFEST)
        inspection.note(Finding(kind="manifest", path=MANIFEST, message=text, fatal=True))
        return inspection
    inspection = Inspection(disk, path, manifest)
    if disk.exists(path / REPAIR):
        text = "a repair was interrupted; run it again"
        inspection.note(Finding(kind="repair", path=REPAIR, message=text))
    _check_manifest(inspection)
    if manifest.schema is not None:
        fields = (*manifest.schema.fields, *ROW_FIELDS)
        inspection.group = ReadColumns(
            disk,
            path / COLUMNS,
            fields,
            manifest.slots,
            packings=ColumnLayout(**manifest.layout).packings(fields, manifest.slots, manifest.reach),
            compression=manifest.compression,
        )
        _look_at_appended(inspection, inspection.group)
        inspection.sampled = find_sampled(disk, path / COLUMNS, manifest.slots)
    _check_version(inspection)
    _check_links(inspection)
    unsettled = _check_journal(inspection)
    check_metadata(inspection)
    check_blocks(inspection, unsettled, progress)
    if inspection.group is not None and inspection.group.shared:
        from expstore.maintenance.segments import check_segments  # loads pyarrow

        check_segments(inspection)
    annotations = None if inspection.group is None else inspection.group.annotations
    if annotations is not None and (damage := annotations.find_damage()) is not None:
        text = f"{ANNOTATIONS}: {damage}"
        inspection.note(Finding(kind="annotations", path=ANNOTATIONS, message=text))
    if inspection.past is not None and inspection.group is not None:
        check_ids(inspection)
        check_rows(inspection)
        check_log(inspection)
        _check_keys(inspection)
        check_index(inspection)
    if not locked:
        _refuse_writer(disk, path)
    if Manifest.load(disk, path) != manifest:
        raise LockedError(f"{path} was opened while it was checked", hint="check it again")
    return inspection


def _look_at_appended(inspection: Inspection, group: ReadColumns) -> None:
    """Index the files of packed columns and the segments."""
    for segments in group.shared:
        segments.look()
    for place, column in group.packed.items():
        inspection.packed[place] = PackedFiles(inspection.disk, column)
    for pair in group.pairs:
        inspection.packed[pair.place].partner = inspection.packed[pair.partner]


def _refuse_writer(disk: Disk, path: Path) -> None:
    writer = find_writer(disk, path / "LOCK")
    if writer is not None:
        who = "another process" if writer.pid is None else f"process {writer.pid} on {writer.host}"
        raise LockedError(f"{path} cannot be checked: {who} has it open for writing", hint="close it there")


def _check_manifest(inspection: Inspection) -> None:
    data = inspection.disk.read_whole(inspection.path / MANIFEST)
    if (
        data != json.dumps(json.loads(data), indent=1).encode()
    ):  # the checksum covers the values, not the bytes
        text = f"{MANIFEST} has bytes that were not written there, though it can be read"
        inspection.note(Finding(kind="manifest", path=MANIFEST, message=text))


def _check_version(inspection: Inspection) -> None:
    """Check the files that only a snapshot has: `version.json` and `origin`."""
    disk, path, group = inspection.disk, inspection.path, inspection.group
    if not disk.exists(path / VERSION):
        return
    try:
        if disk.read_whole(path / VERSION) != Version.load(disk, path).pack():
            raise CorruptionError(f"{VERSION} has bytes that were not written there, though it can be read")
    except CorruptionError as exc:
        text = exc.message.replace(f"{path}/", "")
        inspection.note(Finding(kind="version", path=VERSION, message=text))
    if group is None or not disk.exists(path / ORIGIN):
        return  # a snapshot of a store in memory, or without rows
    try:
        entries = read_entries(disk.read_whole(path / ORIGIN), len(group.summed), path / ORIGIN)
        damaged = [number for number, entry in enumerate(entries) if state_of(entry) == DAMAGED]
    except CorruptionError:
        damaged = [0]
    if damaged:
        text = f"{ORIGIN} is damaged at entry {damaged[0]}; the next snapshot will share less"
        inspection.note(Finding(kind="version", path=ORIGIN, message=text))


def _check_links(inspection: Inspection) -> None:
    """Find files that are written in place and have hard links, such as those of a copy by `cp -al`."""
    disk, path, group = inspection.disk, inspection.path, inspection.group
    if disk.exists(path / VERSION):
        return  # never written to; versions share files with one another
    files = [path / name for name in (STATE, LOCK, LOG, CHECKSUMS, KEYS, INDEX, f"{INDEX}.wal")]
    files += [path / JOURNAL / name for name in disk.names(path / JOURNAL)]
    for column in inspection.flat:
        files += [column.shard_path(number) for number in range(_reach_of(inspection, column) // column.rows)]
    if group is not None:
        packed = [file for column in group.packed.values() for file in column.paths()]
        files += [file for file in packed if not file.name.startswith("c.")]
        files += [one.path for segments in group.shared for one in segments.segments if not one.sealed]
    linked = [inspection.relative(file) for file in files if disk.exists(file) and disk.count_links(file) > 1]
    if linked:
        names = ", ".join(linked[:_LISTED]) + (
            f" and {len(linked) - _LISTED} more" if linked[_LISTED:] else ""
        )
        text = f"{names} have hard links; the next opening for writing copies them before it writes to them"
        inspection.note(Finding(kind="links", path=linked[0], message=text))


def _check_journal(inspection: Inspection) -> set[int]:
    """Check the journal; return the blocks whose checksums an unclean stop left unsettled."""
    folder = inspection.path / JOURNAL
    for path, at, text in segment_faults(inspection.disk, folder):
        name = inspection.relative(path)
        inspection.note(Finding(kind="journal", path=name, message=f"{name} at byte {at}: {text}"))
    try:
        records = read_journal(inspection.disk, folder)
        if not records and inspection.manifest.schema is not None:
            raise no_records(inspection.disk, folder)
    except (CorruptionError, StorageError) as exc:
        text = exc.message.replace(f"{inspection.path}/", "")
        inspection.note(Finding(kind="journal", path=JOURNAL, message=text, fatal=True))
        return set()
    if not records:
        return set()
    return _walk(inspection, records)


def _walk(inspection: Inspection, records: list[Record]) -> set[int]:
    manifest, group = inspection.manifest, inspection.group
    past = inspection.past = read_past(records, manifest.deleted)
    _check_state(inspection, past)
    try:
        walk(past, lambda publish: bool(publish.payload) or _stands(inspection, publish), manifest.column_set)
    except CorruptionError as exc:
        inspection.note(Finding(kind="journal", path=JOURNAL, message=exc.message, fatal=True))
        inspection.past = None
        return set()
    inspection.stored = past.find_stored(manifest.capacity)
    if past.cut:
        text = f"{past.cut} batches after the last sync are incomplete: opening the store will drop them"
        inspection.note(Finding(kind="torn", path=JOURNAL, message=text))
    schema = manifest.schema
    if past.clean or group is None or schema is None:
        return set()
    limit = max(_reach_of(inspection, column) for column in group.flat.values())
    try:
        return find_unsettled_blocks(
            past,
            slots=manifest.slots,
            spare=manifest.spare,
            horizon=None,
            limit=limit,
            load=lambda body: Redo.unpack(fetch_body(inspection.disk, inspection.path / REDO, body), schema),
        )
    except CorruptionError as exc:
        text = exc.message.replace(f"{inspection.path}/", "")
        inspection.note(Finding(kind="journal", path=text.split(" ")[0], message=text))
        return set(range(limit // BLOCK_ROWS))


def _check_state(inspection: Inspection, past: Past) -> None:
    """Check STATE, if there is one, against its checksum and the journal, as an opening does."""
    disk, path = inspection.disk, inspection.path / STATE
    if disk.exists(inspection.path / VERSION) or disk.size(path) < PAGE:
        return
    page = StatePage(disk, path, write=False)
    try:
        if past.clean and not page.intact:
            text = f"{STATE} does not have its checksum; the next opening rebuilds it from the journal"
            inspection.note(Finding(kind="state", path=STATE, message=text))
            return
        manifest = inspection.manifest
        fits = page.fits(bytes.fromhex(manifest.uuid), disk.boot_id(), manifest.generation)
        lost = explain_lost_records(page, past, fits=fits)
        if lost:
            text = f"{JOURNAL} {lost}"
            inspection.note(Finding(kind="journal", path=JOURNAL, message=text, fatal=True))
    finally:
        page.close()


def _reach_of(inspection: Inspection, column: FlatColumn) -> int:
    """Return how many slots the existing shards of a column cover."""
    number = 0
    while inspection.disk.exists(column.shard_path(number)):
        number += 1
    return number * column.rows


def _stands(inspection: Inspection, publish: Publish) -> bool:
    """Return whether the columns contain the rows of a record."""
    group = inspection.group
    if group is None:
        return False
    first, count, crc = publish.first_id + publish.skipped, publish.count - publish.skipped, 0
    for place in range(len(group.summed)):
        if place not in group.variable_places and place not in group.annotated:
            for _, rows in read_column(inspection, place, first, count):
                crc = google_crc32c.extend(crc, rows.tobytes())
    for segments in group.shared:
        extended = segments.extend_checksum(crc, first, count)
        if extended is None:
            return False
        crc = extended
    return crc == publish.checksum


def _check_keys(inspection: Inspection) -> None:
    """Check the idempotency keys against their checksums, and their number against the journal."""
    past, disk, path = inspection.past, inspection.disk, inspection.path / KEYS
    if past is None or not inspection.manifest.keyed:
        return
    found = read_keys(
        disk.read_whole(path) if disk.exists(path) else None,
        slots=tuning.IDEMPOTENCY_SLOTS,
        kept=tuning.IDEMPOTENCY_KEYS,
        covered=min(past.synced, past.state.last),
        known=past.base.get("write_keys", 0),
    )
    if found.damage:
        text = f"{KEYS} {found.damage}; a write that is retried under such a key is stored again"
        inspection.note(Finding(kind="keys", path=KEYS, message=text))
