"""Look at a store without opening it: what it holds, who has it open, how it was left.

Used by the command line. It takes no lock that outlasts the look and never changes a file, so a store
that another process writes to, and one whose recovery is still to come, can be looked at.
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

__all__ = ["Survey", "Writer", "find_writer", "survey"]

_TRIES = 3


@dataclass(frozen=True, slots=True)
class Writer:
    """Name who has a store open for writing; None where LOCK does not say.

    Args:
        pid: The process.
        host: Its machine.
        since: Seconds since 1970.
    """

    pid: int | None = None
    host: str | None = None
    since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Hold what a look at a store found.

    Args:
        manifest: Its settings.
        rows: How many rows can be read.
        written: How many were ever written.
        episodes: How many episodes it ever held, by status.
        last_write: Seconds since 1970; None: never.
        writer: Who has it open for writing.
        unclean: Whether the last writer did not close it; None while one is at it.
    """

    manifest: Manifest
    rows: int = 0
    written: int = 0
    episodes: dict[str, int]
    last_write: float | None = None
    writer: Writer | None = None
    unclean: bool | None = None


def survey(path: Path, *, disk: Disk | None = None) -> Survey:
    """Look at a store.

    Beside a running writer, rows that came one by one are counted when they stand in the columns, 0.1 s
    later. Rows that opening would drop after a power cut are not counted.

    Args:
        path: Its folder.
        disk: Where files are touched; only read.

    Raises:
        NotFoundError: There is no store.
        CorruptionError: It is damaged.
        MigrationError: A newer version of the library made it.
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
    """Return who holds a lock file or its folder; None: both are free."""
    for _ in range(_TRIES):
        if not is_locked(disk, path):
            return None
        time.sleep(0.005)  # whoever has it may only be looking, too
    owner = read_owner(disk, path)
    return Writer() if owner is None else Writer(owner.pid, owner.host, owner.since)
