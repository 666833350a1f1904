"""`expstore.resize`: a store gets another capacity.

Used by the command line. It only opens the store and asks; how rows get other places is the storage's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from expstore.core.arguments import check_whole
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import open_storage
from expstore.storages.format.manifest import Manifest
from expstore.storages.snapshots.resize import Progress, capacity_for, surplus

__all__ = ["Resized", "planned", "resize"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """Say what becomes of a store.

    Args:
        path: Its folder.
        former: The capacity that it had; None: it was unbounded.
        capacity: The one that it gets.
        rows: How many rows can be read then.
        given_up: How many there is no room for.
        recovered: What opening it had to say; None: it had been closed.
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
    """Give a closed store another capacity.

    Rows keep their ids, episodes, priorities and counts, the store its draws, settings, specs, sources and
    versions. Rows that do not fit are given up, the oldest first; of a store that keeps the best rows the
    worst, and the others get new ids then. TorchRL's `index`, which is (id - 1) modulo the capacity, changes;
    draws by priority go on with other rows, since these lie elsewhere. The room that the rows take is needed
    twice meanwhile.

    Crashes: built aside, in the store's folder; the store has its former capacity until all of it is on the
    disk, and the new one then. If the process ends while the parts are moved to their places, the next
    opening for writing brings that to its end, and readers are refused until then. Processes: as the one
    writer; readers go on.

    Args:
        path: The store's folder.
        capacity: Most readable rows, rounded up to whole steps where a row is a cell of several dims; None:
            unbounded.
        progress: Is told bytes done and bytes in all, between two pieces.
        disk: Where files are touched.

    Returns:
        What became of it.

    Raises:
        NotFoundError: There is no store.
        LockedError: Somebody has it open for writing.
        StateError: It is a version, which is only read; or `retain=` says which rows stay.
        SchemaError: Fields were to be packed in chunks that do not fit.
        ValueError: The capacity is below 1.
        StorageError: The disk failed or is full; the store is as it was.

    Example:
        >>> expstore.resize("runs/demo.exp", capacity=500_000).given_up
        0
    """
    with planned(path, capacity=capacity, disk=disk) as (outcome, run):
        run(progress)
    return outcome


@contextmanager
def planned(
    path: str | Path, *, capacity: int | None, disk: Disk | None = None
) -> Iterator[tuple[Resized, Callable[[Progress | None], None]]]:
    """Open a store that is to get another capacity, for the block's length.

    Args:
        path: As of `resize`, and so are the others.
        capacity: See there.
        disk: See there.

    Yields:
        What would become of it, and what does so; nothing has changed before.
    """
    disk, path = disk or Disk(), local_path(path)
    if capacity is not None and (capacity := check_whole("capacity", capacity)) < 1:
        raise ValueError(f"capacity must be at least 1, got {capacity}")
    Manifest.load(disk, path)  # a new store is not what is asked for
    storage = open_storage(path, settings=Settings(on_sigterm="ignore"), disk=disk)
    try:
        asked = capacity_for(storage, capacity)
        given_up = surplus(storage, asked)
        outcome = Resized(
            path=path,
            former=storage.capacity,
            capacity=asked,
            rows=len(storage) - given_up,
            given_up=given_up,
            recovered=storage.counters.recovered,
        )

        def run(progress: Progress | None) -> None:
            if asked != storage.capacity:
                storage.snapshots.resize(asked, progress)

        yield outcome, run
    finally:
        storage.close()
