"""Make a snapshot: copy a storage as it is at one moment, while other threads read and write.

Used by buffers. Files that have not changed since the previous snapshot are hard links, so a snapshot costs
only the changes. It is built under a temporary name, synced, and renamed. This module opens no file of the
store itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from expstore.core import tuning
from expstore.core.values import Array, key_name
from expstore.disk.atomic_build import build_folder
from expstore.disk.bulk_files import Links, read_all, start_links, sync_paths
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.disk.threads import Threads
from expstore.disk.writer_lock import WriterLock
from expstore.errors import ArgumentError, CorruptionError, LockedError, SnapshotError
from expstore.storages.base import Storage
from expstore.storages.columns.capture import Target
from expstore.storages.columns.checksums import (
    BLOCK_ROWS,
    SUMMED,
    blocks_of,
    entry_dtype,
    pack_entries,
    seal_entry,
    state_of,
)
from expstore.storages.columns.flat import zeros_sum
from expstore.storages.format.journal import ALIGN, Journal, Kind
from expstore.storages.format.manifest import MANIFEST, store_around
from expstore.storages.format.paths import CHECKSUMS, COLUMNS, JOURNAL, LOG, ORIGIN, VERSION
from expstore.storages.format.zarr_metadata import make_metadata, shard_footer, shard_name
from expstore.storages.snapshots.capture import Frozen, freeze
from expstore.storages.snapshots.catalog import (
    LOCK,
    OWN_FOLDER,
    Version,
    check_tag,
    foreign_names,
    list_versions,
    next_number,
    prune,
    remove_scraps,
    version_name,
)
from expstore.storages.snapshots.previous_snapshot import Former, find_former

SHARD_ROWS = 8192
#: Separator of the numbers in a shard's name: all shards of an array are in one folder, which is synced once.
SEPARATOR = "."

BoolArray = NDArray[np.bool_]


def dump(
    storage: Storage,
    path: str | Path,
    *,
    keep: int | None = None,
    tag: str | None = None,
    sampler: Mapping[str, Any] | None = None,
) -> Version:
    """Make a snapshot of a storage.

    Args:
        storage: The storage to copy.
        path: The folder of snapshots; created if it is missing.
        keep: How many snapshots without a tag remain; None: all of them.
        tag: A name for the snapshot.
        sampler: Settings of a buffer's sampler that its `loads` restores. They must be JSON values.

    Raises:
        SnapshotError: The folder has other content, the tag is taken or invalid, or rows have objects.
        LockedError: Another snapshot is being made in the folder.
        StateError: The storage is closed, or open for reading only.
        CorruptionError: Rows that would be copied do not have their checksum.
        StorageError: The disk failed or is full; existing snapshots are unchanged.
    """
    if keep is not None and keep < 1:
        raise ArgumentError(f"keep must be at least 1, got {keep}")
    if tag is not None:
        check_tag(tag)
    storage.writer()
    _refuse_objects(storage)
    storage.snapshots.prepare()
    disk, place = storage.disk, local_path(path)
    _make_place(disk, place)
    pool = Threads()
    with _lock_folder(disk, place):
        remove_scraps(disk, place)
        known = list_versions(disk, place)
        if tag is not None and tag in [version.tag for version in known]:
            raise SnapshotError(f"{place} already has a snapshot {tag!r}", hint="choose another tag")
        number = next_number(disk, place)
        name = version_name(number)
        with build_folder(disk, place / name) as scrap:  # its end commits the snapshot
            build = _Build(disk, scrap, pool)
            state = _copy(build, storage, known)
            version = Version(
                number=number,
                tag=tag,
                time=time.time(),
                rows=state.stored.rows,
                episodes=state.episodes,
                new_bytes=build.new_bytes,
                path=place / name,
                sampler=dict(sampler or {}),
            )
            build.put(VERSION, version.pack())
            sync_paths(disk, [*build.written], sorted(build.folders), pool)
        if keep is not None:
            prune(disk, place, keep, pool)
    return version


def _refuse_objects(storage: Storage) -> None:
    schema = storage.schema
    if schema is not None and schema.variable and storage.manifest is None:
        raise SnapshotError(
            f"field {key_name(schema.variable[0])!r} has variable length: only a store on disk can make "
            "snapshots of it",
            hint="use state_dict()",
        )
    if schema is not None and schema.objects:
        what = "the storage" if storage.row_traits.whole else f"field {key_name(schema.objects[0])!r}"
        raise SnapshotError(
            f"{what} has objects, which cannot be written to files",
            hint="convert them to tensors, or save rb.state_dict() by torch.save",
        )


def _copy(build: _Build, storage: Storage, known: Sequence[Version]) -> Frozen:
    """Copy a storage into a folder; return the captured state."""
    with freeze(storage) as state:
        former = find_former(build.disk, known[-1].path, state) if known else None
        _Copy(build, state, former).run()
    return state


def _make_place(disk: Disk, place: Path) -> None:
    """Create the folder of snapshots, or check that it is one."""
    new = [folder for folder in (place, *place.parents) if not disk.exists(folder)]
    if (above := store_around(disk, place)) and place.resolve() != above / OWN_FOLDER:
        raise SnapshotError(
            f"{place} would lie inside the store {above}",
            hint="use a folder outside it, or rb.snapshots.tag(name), which stores the snapshot in the store",
        )
    if not new:
        if not disk.is_dir(place):
            raise SnapshotError(
                f"{place} is a file, versions are in a folder", hint="use a new or empty folder"
            )
        if disk.exists(place / MANIFEST):
            raise SnapshotError(f"{place} is a store or a snapshot", hint="use another folder, or tag()")
        # A store may be in the same folder: users of TorchRL dump into the folder above the scratch_dir.
        foreign = [name for name in foreign_names(disk, place) if not disk.exists(place / name / MANIFEST)]
        if foreign:
            raise SnapshotError(
                f"{place} is not a folder of snapshots: it has {', '.join(foreign[:3])}",
                hint="use a new or empty folder",
            )
    disk.make_dir(place)
    for folder in reversed(new):
        disk.sync_dir(folder.parent)


@contextmanager
def _lock_folder(disk: Disk, place: Path) -> Iterator[None]:
    """Hold the lock for making snapshots in a folder."""
    try:
        lock = WriterLock(disk, place / LOCK)
    except LockedError as exc:
        raise LockedError(f"another snapshot is being made in {place}", hint="try again later") from exc
    try:
        yield
    finally:
        lock.release()


class _Build:
    """Write files into a folder that becomes a snapshot, and track what must be synced."""

    def __init__(self, disk: Disk, folder: Path, pool: Threads) -> None:
        self.disk = disk
        self.folder = folder
        self.pool = pool
        self.written: list[Path] = []
        self.folders: set[Path] = set()
        self.new_bytes = 0
        self.make_folder(folder)

    def make_folder(self, folder: Path) -> None:
        """Create a folder inside, and its parents."""
        self.disk.make_dir(folder)
        while folder not in self.folders and folder.is_relative_to(self.folder):
            self.folders.add(folder)
            folder = folder.parent

    def put(self, name: str, data: bytes) -> None:
        """Write a whole file."""
        path = self.folder / name
        self.disk.put(path, data)
        self.note(path, len(data))

    def note(self, path: Path, size: int) -> None:
        """Record a file that was written: it has `size` bytes of data, the rest is holes."""
        self.written.append(path)
        self.new_bytes += size


def _shard_rows(columns: int, slots: int) -> int:
    """Return the rows per shard of a snapshot with this number of columns and slots."""
    rows = SHARD_ROWS
    while columns * -(-slots // rows) > tuning.SNAPSHOT_FILES:
        rows *= 2
    return rows


class _Copy:
    """Copy the rows of a captured storage, or link files that the previous snapshot already has."""

    def __init__(self, build: _Build, state: Frozen, former: Former | None) -> None:
        self.build, self.state = build, state
        self.disk = build.disk
        self.fields = state.fields
        slots = state.manifest.slots
        last = state.stored.last
        used = last if slots is None else min(last, slots)
        self.rows = _shard_rows(len(self.fields), used if slots is None else slots)
        self.shards = -(-used // self.rows)
        #: Length of the arrays, rows.
        self.length = max(1, self.shards) * self.rows if slots is None else slots
        fits = former is not None and former.layout.rows == self.rows and former.layout.separator == SEPARATOR
        self.former = former if fits else None
        self._widths = [entry.row_bytes for entry in self.fields]
        self.footers = [shard_footer(self.rows, width) for width in self._widths]
        #: Length of a shard file, bytes, per column.
        self._sizes = [self.rows * w + len(f) for w, f in zip(self._widths, self.footers, strict=True)]
        blocks = self.shards * self.rows // BLOCK_ROWS
        #: The blocks with readable rows.
        self.blocks = blocks_of(state.pieces)
        #: A checksum per block and column, for the columns that have checksums.
        self.sums = np.zeros(blocks, entry_dtype(state.summed))

    def run(self) -> None:
        """Copy all rows, oldest first, and release the slots of copied rows to the writer."""
        state = self.state
        if not self.fields:
            _describe(self.build, state)
            return
        self._make_arrays()
        target = Target(
            disk=self.disk,
            folder=self.build.folder,
            former=None if self.former is None else self.former.folder,
            make_folder=self.build.make_folder,
            stored=state.stored,
            slots=state.manifest.slots,
            reach=state.manifest.reach,
        )
        for capture in state.captures:
            for path, size in capture.begin(target):
                self.build.note(path, size)
        linked = self._link_unchanged()
        start = state.pieces[0][0]
        first = start // self.rows
        ahead = (state.manifest.slots or 0) - start
        for shard in (*range(first, self.shards), *range(min(first, self.shards))):
            passed = shard * self.rows + (ahead if shard < first else -start)
            if passed > 0:
                state.snapshot_pin.move(state.stored.low + 1 + passed)
            for place in range(len(self.fields)):
                if not linked[place, shard]:
                    self._write_shard(place, shard)
        state.snapshot_pin.move(0)
        for capture in state.captures:
            for path, size in capture.complete():
                self.build.note(path, size)
        stamp = state.base["content"]
        for entry in self.sums:
            seal_entry(entry, generation=stamp[0], sequence=max(1, stamp[1]))
        self.build.put(CHECKSUMS, pack_entries(self.sums))
        if state.sums is not None:
            self.build.put(ORIGIN, pack_entries(state.sums))

    def _make_arrays(self) -> None:
        """Create the folders and zarr.json of all arrays."""
        top, former = self.build.folder / COLUMNS, self.former
        arrays = self.state.arrays
        fields = [self.fields[place] for place in arrays]
        for entry in fields:
            self.build.make_folder(top / entry.path)
        if (
            former is not None
            and former.shared.all()
            and former.layout.length == self.length
            and former.counted >= self.state.counted
        ):
            paths = {Path(entry.path) for entry in fields}
            names = {Path(), *paths, *(parent for path in paths for parent in path.parents)}
            links = [Path(COLUMNS) / name / "zarr.json" for name in sorted(names)]
            if all(self.disk.link(former.folder / link, self.build.folder / link) for link in links):
                return
        slots = self.state.manifest.slots
        attributes = {"expstore": {"capacity": self.state.manifest.capacity, "slots": slots}}
        packings = self.state.packings
        made = make_metadata(
            fields,
            [self.rows] * len(fields),
            self.length,
            attributes,
            separator=SEPARATOR,
            packings=[packings[place] for place in arrays],
        )
        for name, data in made.items():
            self.build.put(f"{COLUMNS}/{name}", data)

    def _find_unchanged(self) -> BoolArray:
        """Return which shards have the same rows in the previous snapshot. Shape `(shards,)`."""
        former, now = self.former, self.state.sums
        same = np.zeros(self.sums.size, bool)
        if former is None or now is None:
            return np.zeros(self.shards, bool)
        both = min(same.size, now.size, former.origin.size)
        at, then = now[:both], former.origin[:both]
        same[:both] = at["sequence"] != 0
        for name in ("generation", "sequence"):
            same[:both] &= at[name] == then[name]
        same[:both] &= (at["sums"] == then["sums"])[:, former.shared].all(axis=1)
        same[[block for block in range(same.size) if block not in self.blocks]] = True  # no readable rows
        known = min(same.size, former.whole.size)
        same[:known] &= former.whole[:known]
        same[known:] = False
        by_shard = same.reshape(self.shards, self.rows // BLOCK_ROWS)
        return np.array([blocks.all() for blocks in by_shard], bool)

    def _parts(self, place: int, slot: int, count: int) -> Iterator[tuple[int, Array]]:
        """Yield the readable parts of a run of slots: (offset in the run, rows)."""
        for (start, _, n), rows in zip(self.state.pieces, self.state.columns[place], strict=True):
            low, high = max(slot, start), min(slot + count, start + n)
            if low < high:
                yield low - slot, rows[low - start : high - start]

    def _link_unchanged(self) -> BoolArray:
        """Link unchanged files of the previous snapshot; return which. Shape `(columns, shards)`."""
        former, summed = self.former, self.state.summed
        done = np.zeros((len(self.fields), self.shards), bool)
        if former is None:
            _describe(self.build, self.state)
            done[list(self.state.apart)] = True
            return done
        same = self._find_unchanged()
        done[:summed] = same & former.shared[:, None]
        done[list(self.state.apart)] = True  # these columns have files of their own
        blocks = np.flatnonzero(np.repeat(same, self.rows // BLOCK_ROWS))
        self.sums["sums"][blocks] = former.sums["sums"][blocks]
        end = start_links(self.disk, self._links(former, done, range(summed)), self.build.pool)
        others = range(summed, len(self.fields))
        try:
            _describe(self.build, self.state)  # while links are made in the background
            for place in others:
                done[place] = self._compare_values(former, place)
        finally:
            left = end()
        left += start_links(self.disk, self._links(former, done, others), self.build.pool)()
        for place, names in enumerate(left):
            done[place, [self._number(name) for name in names]] = False
        return done

    def _links(self, former: Former, done: BoolArray, places: Iterable[int]) -> list[Links]:
        """Return the shards of some columns that are to be linked."""
        groups = []
        for place in places:
            folder = Path(COLUMNS, self.fields[place].path)
            shards = [] if place in self.state.apart else np.flatnonzero(done[place]).tolist()
            names = [self._name(place, shard) for shard in shards]
            groups.append(
                Links(former.folder / folder, self.build.folder / folder, names, self._sizes[place])
            )
        return groups

    def _number(self, name: str) -> int:
        return int(name.split(SEPARATOR)[1])

    def _name(self, place: int, shard: int) -> str:
        return shard_name(shard, len(self.fields[place].shape), SEPARATOR)

    def _compare_values(self, former: Former, place: int) -> BoolArray:
        """Return which shards of a column without checksums are unchanged. Shape `(shards,)`."""
        same = np.zeros(self.shards, bool)
        known = min(self.shards, former.sums.size * BLOCK_ROWS // self.rows)
        names = [self._name(place, shard) for shard in range(known)]
        folder = former.folder / COLUMNS / self.fields[place].path
        for shard, found in enumerate(read_all(self.disk, folder, names, size=self._sizes[place])):
            wanted = self._block(place, shard * self.rows, self.rows)
            same[shard] = found[: wanted.nbytes] == wanted.tobytes()
        return same

    def _block(self, place: int, slot: int, count: int) -> Array:
        """Return the rows of a run of slots, with zeros for unreadable rows. Shape `(count, *row shape)`."""
        parts = list(self._parts(place, slot, count))
        if len(parts) == 1 and len(parts[0][1]) == count:
            return parts[0][1]
        entry = self.fields[place]
        block = np.zeros((count, *entry.shape), entry.numpy_dtype)
        for at, rows in parts:
            block[at : at + len(rows)] = rows
        return block

    def _write_shard(self, place: int, shard: int) -> None:
        """Write a shard of a column, and compute the checksums of its blocks."""
        entry, width, footer = self.fields[place], self._widths[place], self.footers[place]
        path = self.build.folder / COLUMNS / entry.path / self._name(place, shard)
        written = len(footer)
        file = self.disk.open(path, create=True)
        try:
            file.truncate(self._sizes[place])
            for number in range(self.rows // BLOCK_ROWS):
                slot = shard * self.rows + number * BLOCK_ROWS
                hole = slot // BLOCK_ROWS not in self.blocks
                block = None if hole else self._block(place, slot, BLOCK_ROWS)
                if block is None or (entry.dtype == "bool" and not block.any()):
                    crc = zeros_sum(BLOCK_ROWS * width)  # a hole reads as zeros
                else:
                    file.write(block, number * BLOCK_ROWS * width)
                    crc = google_crc32c.value(block.reshape(-1).view(np.uint8))
                    written += block.nbytes
                if place < self.state.summed:
                    if not hole:
                        self._compare_sum(place, slot, crc)
                    self.sums["sums"][slot // BLOCK_ROWS, place] = crc
            file.write(footer, self.rows * width)
        finally:
            file.close()
        self.build.note(path, written)

    def _compare_sum(self, place: int, slot: int, crc: int) -> None:
        """Raise CorruptionError if the block at a slot does not have the store's own checksum.

        Not compared are blocks with unreadable slots, which other threads may be writing to, and blocks that
        have changed since the last sync.
        """
        state, block = self.state, slot // BLOCK_ROWS
        if state.sums is None or block >= state.sums.size or state_of(state.sums[block]) != SUMMED:
            return
        whole = any(start <= slot and slot + BLOCK_ROWS <= start + n for start, _, n in state.pieces)
        if whole and int(state.sums[block]["sums"][place]) != crc:
            name = key_name(self.fields[place].key)
            raise CorruptionError(
                f"column {name} is damaged in slots {slot} to {slot + BLOCK_ROWS - 1}: "
                "they do not have their checksum, and no version of them is made"
            )


def _describe(build: _Build, state: Frozen) -> None:
    """Write the files of a closed store other than its columns."""
    manifest, disk = state.manifest, build.disk
    build.put(MANIFEST, manifest.pack())
    build.put(LOG, state.log)
    folder = build.folder / JOURNAL
    build.make_folder(folder)
    journal = Journal(
        disk,
        folder,
        uuid=manifest.uuid,
        generation=manifest.generation,
        sequence=state.base["content"][1],
        segment_bytes=ALIGN,
    )
    try:
        extra = {"opening": True, "generation": manifest.generation, "log_length": len(state.log)}
        if state.annotated:
            extra["annotated"] = state.annotated
        journal.start_segment(state.base | extra)
        journal.append(Kind.CLOSE, b"{}")
        for file in journal.sync_files():
            build.note(file.path, file.size())
    finally:
        journal.close()
