"""`expstore.resize`: change the capacity of a store.

Used by the command line. It opens the store and calls the storage, which moves the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from expstore.core.arguments import check_capacity
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import open_storage
from expstore.storages.format.manifest import Manifest
from expstore.storages.snapshots.resize import Progress, capacity_for, surplus


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """The result of resizing a store.

    Args:
        path: The store's folder.
        former: The capacity before; None if it was unbounded.
        capacity: The new capacity; None if it is unbounded.
        rows: Number of readable rows afterwards.
        given_up: Number of rows dropped because they do not fit.
        recovered: What the recovery at opening reported; None if the store had been closed.
    """

    path: Path
    former: int | None
    capacity: int | None
    rows: int
    given_up: int
    recovered: str | None = None


def resize(
    path: str | Path, *, capacity: int | None, progress: Progress | None = None, disk: Disk | None = None
) -> Resized:
    """Change the capacity of a closed store.

    Rows keep their ids, episodes, priorities and counts. The store keeps its draws, settings, specs, sources
    and snapshots. Rows that do not fit are dropped, the oldest first. A store that keeps the best rows drops
    the worst, and its remaining rows get new ids, which recorded draws of consumers follow. TorchRL's
    `index`, which is (id - 1) modulo the capacity, changes. Later draws by priority choose other rows than
    they would have, because the rows are in other slots. Until it is done, the rows need twice their disk
    space.

    Crashes: the new columns are built in the store's folder; the store has its former capacity until all of
    them are on the disk, and the new capacity afterwards. If the process ends while the files are moved to
    their places, the next opening for writing completes the move; until then readers are refused.
    Processes: it is the store's one writer; readers continue to work.

    Args:
        path: The store's folder.
        capacity: Most readable rows, rounded up to whole steps if the store has several dims (`ndim`); None:
            unbounded.
        progress: Called between two pieces with the bytes copied and the bytes in total.
        disk: Access to files.

    Returns:
        The capacity before and after, and how many rows were dropped.

    Raises:
        NotFoundError: There is no store.
        LockedError: A process has the store open for writing.
        StateError: `path` is a snapshot, which is read-only; or the store has a `retain=` policy instead.
        SchemaError: A packed field does not fit into the chunks.
        ArgumentError: The capacity is below 1.
        CorruptionError: The store is damaged; rows that are copied are compared with their checksums.
        StorageError: The disk failed or is full; the store is as it was.

    Example:
        >>> expstore.open("demo.exp", capacity=1000).close()
        >>> expstore.resize("demo.exp", capacity=5000).given_up
        0
    """
    with open_for_resize(path, capacity=capacity, disk=disk) as (outcome, run):
        run(progress)
    return outcome


@contextmanager
def open_for_resize(
    path: str | Path, *, capacity: int | None, disk: Disk | None = None
) -> Iterator[tuple[Resized, Callable[[Progress | None], None]]]:
    """Open a store for resizing, as a context manager.

    Args:
        path: The store's folder.
        capacity: The new capacity, as in `resize`.
        disk: Access to files.

    Yields:
        The result that a resize would have, and a function that resizes. Nothing is changed before it is
        called.
    """
    disk, path = disk or Disk(), local_path(path)
    capacity = None if capacity is None else check_capacity(capacity)
    Manifest.load(disk, path)  # raises if there is no store: resizing must not create one
    storage = open_storage(path, settings=Settings(on_sigterm="ignore"), disk=disk)
    try:
        asked = capacity_for(storage, capacity)
        given_up = surplus(storage, asked)
        outcome = Resized(
            path=path,
            former=storage.capacity,
            capacity=asked,
            rows=storage.stored.rows - given_up,
            given_up=given_up,
            recovered=storage.counters.recovered,
        )

        def run(progress: Progress | None) -> None:
            if asked != storage.capacity:
                storage.snapshots.resize(asked, progress)

        yield outcome, run
    finally:
        storage.close()
