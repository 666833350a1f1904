"""Inspect a store without opening it: its content, its writer, and whether it was closed cleanly.

Used by the command line. It holds no lock after it returns and never changes a file. So it can inspect a
store that another process writes to, and a store that needs a recovery.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from expstore.disk.files import Disk
from expstore.disk.writer_lock import is_locked, read_owner
from expstore.episodes.table import STATUS
from expstore.storages.follower import FollowerStorage
from expstore.storages.format.manifest import Manifest

_TRIES = 3


@dataclass(frozen=True, slots=True)
class Writer:
    """The process that has a store open for writing; attributes are None if LOCK does not contain them.

    Args:
        pid: The process id.
        host: The name of its machine.
        since: When it opened the store, in seconds since 1970.
    """

    pid: int | None = None
    host: str | None = None
    since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The result of inspecting a store.

    Args:
        manifest: The store's manifest.
        rows: Number of readable rows.
        written: Number of rows ever written.
        episodes: Number of episodes that it ever had, by status.
        last_write: Time of the last write, in seconds since 1970; None if there was none.
        writer: The process that has it open for writing, if any.
        unclean: Whether the last writer did not close it; None while a writer has it open.
    """

    manifest: Manifest
    rows: int = 0
    written: int = 0
    episodes: dict[str, int]
    last_write: float | None = None
    writer: Writer | None = None
    unclean: bool | None = None


def survey(path: Path, *, disk: Disk | None = None) -> Survey:
    """Inspect a store.

    While a writer has the store open, rows that it added one by one are counted once they are in the columns,
    up to 0.1 s later. Rows that opening the store would drop after a power cut are not counted.

    Args:
        path: The store's folder.
        disk: Access to files; it only reads.

    Raises:
        NotFoundError: There is no store.
        CorruptionError: The store is damaged.
        MigrationError: A newer version of the library wrote the store.
    """
    storage = FollowerStorage(path, disk=disk)
    try:
        storage.follow(priorities=True)
        counts = dict.fromkeys(STATUS, 0)
        status: dict[int, int] = {}
        newest = 0
        for entries in (storage.state.log.read(), storage.episodes.open_entries()):
            for entry in entries:
                status[entry.episode] = entry.status
                newest = max(newest, entry.end)
        status.pop(0, None)  # sources have entries, too
        for number in status.values():
            counts[STATUS[number]] += 1
        owner = storage.owner
        return Survey(
            manifest=storage.manifest,
            rows=storage.query_window.rows,
            written=storage.write_count,
            episodes=counts,
            last_write=newest / 1e6 if newest else None,
            writer=None if owner is None else Writer(owner.pid, owner.host, owner.since),
            unclean=None if owner is not None else storage.counters.recovered is not None,
        )
    finally:
        storage.close()


def find_writer(disk: Disk, path: Path) -> Writer | None:
    """Return the process that holds a lock file or its folder; None if both are free."""
    for _ in range(_TRIES):
        if not is_locked(disk, path):
            return None
        time.sleep(0.005)  # another process may hold it briefly, to test whether it is free
    owner = read_owner(disk, path)
    return Writer() if owner is None else Writer(owner.pid, owner.host, owner.since)
