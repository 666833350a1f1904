"""The column `_row/sampled`: how often each row was sampled, on disk.

Used by stores on disk, and by code that restores and checks stores. The column is created when a sampler
first counts, and is not part of any checksum. The storage decides which counts are valid after a crash.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import IntArray
from expstore.disk.atomic_build import build_folder
from expstore.disk.checkpointed import Checkpoint, Checkpointed, Dirty, take_all
from expstore.disk.files import Disk, File, address_of
from expstore.disk.filesystem import fills_holes
from expstore.disk.threads import Threads
from expstore.errors import CorruptionError, StorageError
from expstore.storages.columns.flat import FlatColumn, find_flat
from expstore.storages.columns.sample_counts import SAMPLED, Sampled
from expstore.storages.format.zarr_metadata import make_metadata, read_layout

_WIDTH = SAMPLED.row_bytes


class SampledColumn(Sampled, Checkpointed):
    """Count in RAM and in a column, which is written before a batch is returned.

    Threads: as `Sampled`; a sync takes `touched` and `new_folders` without the lock. Processes: only the
    store's writer. Crashes: counts survive the process at once, and a power failure after the next sync. If
    the process is killed in between, rows may have been counted that no caller received.

    Args:
        disk: The disk on which files are accessed.
        folder: The folder `columns/`, which contains the column.
        slots: Number of slots of a ring; None: the store is unbounded.
        changed: Called after rows were counted.

    Raises:
        CorruptionError: zarr.json is missing or describes another column.

    Example:
        >>> from pathlib import Path
        >>> from expstore.disk.files import Disk
        >>> from expstore.storages.columns.sample_counts_column import SampledColumn
        >>> disk, folder = Disk(), Path("columns")
        >>> folder.mkdir()
        >>> SampledColumn.make(disk, folder, 1000, ready=0)
        >>> sampled = SampledColumn(disk, folder, 1000)
    """

    def __init__(
        self, disk: Disk, folder: Path, slots: int | None, *, changed: Callable[[], None] | None = None
    ) -> None:
        self._disk, self._changed = disk, changed
        self.column = FlatColumn(disk, _place(folder), SAMPLED, slots)
        if read_layout(disk, self.column.folder, SAMPLED).rows != self.column.rows:
            raise CorruptionError(
                f"{self.column.folder / 'zarr.json'} does not describe a column in shards of "
                f"{self.column.rows} rows"
            )
        self.column.open_files()
        #: Files, and folders with new names, that the next sync makes durable.
        self.touched: set[File] = set()
        self.new_folders: set[Path] = set()
        #: Slots whose count on disk may be too high, because `add` failed.
        self._owed: list[IntArray] = []
        super().__init__(0)
        self._take_over()

    @classmethod
    def make(
        cls,
        disk: Disk,
        folder: Path,
        slots: int | None,
        *,
        ready: int,
        pool: Threads | None = None,
    ) -> None:
        """Create the column: completely or, after any crash, not at all. All counts are 0, and take no space.

        Args:
            disk: The disk on which files are accessed.
            folder: The folder `columns/`.
            slots: Number of slots of a ring; None: the store is unbounded.
            ready: How many slots the column must have room for.
            pool: Threads that fsync.
        """
        place = _place(folder)
        with build_folder(disk, place) as temporary:
            column = FlatColumn(disk, temporary, SAMPLED, slots)
            made = make_metadata([SAMPLED], [column.rows], slots, {})
            disk.put(temporary / "zarr.json", made[f"{SAMPLED.path}/zarr.json"])
            folders = {temporary}
            try:
                while column.ready < ready:
                    folders.update(column.add_shard())
                about = disk.open(temporary / "zarr.json")
                try:
                    disk.sync_all([about, *column.files], sorted(folders), pool)
                finally:
                    about.close()
            finally:
                column.close()

    def _take_over(self) -> None:
        """Read the counts of slots that are in the column but not in memory yet."""
        known, ready = self.values.size, self.column.ready
        if ready > known:
            found = self.column.read(known, ready - known).astype(np.uint32)
            self._extend(found)

    def require(self, slots: int) -> None:
        """Check that slots 0 to `slots` - 1 have a place.

        Raises:
            CorruptionError: A shard is missing or has another length.
        """
        self.column.require(slots)

    def rewrite(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Write the counts of runs of rows from memory; create missing shards."""
        for slot, _, n in pieces:
            self._reach(slot + n)
            self._keep_run(slot, self.values[slot : slot + n].copy())

    def forget(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Set the counts of these rows to 0 in memory; `rewrite` writes them to the column."""
        for slot, _, n in pieces:
            self.values[slot : slot + n] = 0

    def add(self, slots: IntArray) -> None:
        """Increment the counts of rows, on disk first."""
        self._owed.append(slots)
        super().add(slots)
        self._owed.pop()
        if self._changed is not None:
            self._changed()

    @property
    def owes(self) -> bool:
        """Whether counts on disk may be higher than in memory. Check again under the lock."""
        return bool(self._owed)

    def settle(self) -> None:
        """Write the counts again after a failed `add`; if that fails, the next call retries."""
        if self._owed:
            slots = np.unique(np.concatenate(self._owed))
            self._owed = [slots]
            with contextlib.suppress(StorageError):
                self._keep(slots, self.values[slots])
                self._owed = []

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return the files and folders that no checkpoint covers."""
        return Dirty(take_all(self.touched), take_all(self.new_folders))

    def abort(self, dirty: Dirty) -> None:
        """Undo `begin` after a failed sync."""
        self.touched |= dirty.files
        self.new_folders |= dirty.folders

    def rest(self) -> bool:
        """Close the descriptors until they are used again, if everything is synced; return whether it is."""
        if self.touched or self._owed:
            return False
        self.column.rest()
        return True

    def close(self) -> None:
        """Close the files."""
        self.column.close()

    def _reach(self, size: int) -> None:
        while self.column.ready < size:
            self.new_folders.update(self.column.add_shard())
            self.touched.add(self.column.files[-1])
        self._take_over()

    def _is_counted(self, slot: int, n: int) -> bool:
        owed = any(bool(((slots >= slot) & (slots < slot + n)).any()) for slots in self._owed)
        return owed or super()._is_counted(slot, n)

    def _keep(self, slots: IntArray, values: NDArray[np.uint32]) -> None:
        column, count = self.column, slots.size
        numbers = slots // column.rows
        held = np.array([file.fd for file in column.files])
        files = [column.files[number] for number in numbers.tolist()]
        self._disk.scatter(
            values.reshape(-1, 1),
            files,
            held[numbers],
            address_of(values) + _WIDTH * np.arange(count),
            np.full(count, _WIDTH),
            (slots - numbers * column.rows) * _WIDTH,
        )
        self.touched.update(files)

    def _keep_run(self, slot: int, values: NDArray[np.uint32]) -> None:
        for file, offset, row, n in self.column.spans(slot, values.size):
            file.write(values[row : row + n], offset)
            self.touched.add(file)


def has_sampled(disk: Disk, folder: Path) -> bool:
    """Return whether `columns/` contains this column."""
    return disk.is_dir(_place(folder))


def find_sampled(disk: Disk, folder: Path, slots: int | None) -> FlatColumn | None:
    """Return the column for reading; None if the store or snapshot does not have it.

    Args:
        disk: The disk on which files are accessed.
        folder: The folder `columns/`.
        slots: Number of slots of a ring; None: the store is unbounded.
    """
    if not has_sampled(disk, folder):
        return None
    return find_flat(disk, _place(folder), SAMPLED, slots, fills=fills_holes(disk, folder))


def _place(folder: Path) -> Path:
    return folder.joinpath(*SAMPLED.key)
