"""Look at a store without opening it: what it holds, who has it open, how it was left.

Used by the command line. It takes no lock that outlasts the look and never changes a file, so a store
that another process writes to, and one whose recovery is still to come, can be looked at.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from expstore.episodelog import EpisodeLog, LogEntry
from expstore.episodes import STATUS, EpisodeTable
from expstore.errors import CorruptionError, StorageError
from expstore.files import Disk, File
from expstore.journal import Kind, read_journal
from expstore.manifest import Manifest
from expstore.storages.records import Publish
from expstore.storages.recovery import Past, read_past

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

    Rows that opening it would find torn after a power cut are counted, since no row is read.

    Args:
        path: Its folder.
        disk: Where files are touched; only read.

    Raises:
        NotFoundError: There is no store.
        CorruptionError: It is damaged.
        MigrationError: A newer version of the library made it.
    """
    disk = disk or _ReadingDisk()
    manifest = Manifest.load(disk, path)
    for _ in range(_TRIES):
        writer = find_writer(disk, path / "LOCK")
        try:
            found = _read(disk, path, manifest, writer)
        except StorageError:
            if writer is None and find_writer(disk, path / "LOCK") is None:
                raise
            continue  # a running writer has removed between two looks what the first one saw
        if not found.unclean or find_writer(disk, path / "LOCK") is None:
            return found
    return _read(disk, path, manifest, writer)


class _ReadingDisk(Disk):
    """Refuse whatever would change a file."""

    def gate(self, act: str, path: Path) -> None:
        raise StorageError(f"{path} changed while it was looked at", hint="try again")

    def open(self, path: Path, *, create: bool = False, write: bool = False) -> File:
        return Disk.open(self, path, write=False)


def find_writer(disk: Disk, path: Path) -> Writer | None:
    """Return who holds a lock file; None: nobody does."""
    if not disk.exists(path):
        return None
    text = b""
    for _ in range(_TRIES):
        file = disk.open(path, write=False)
        try:
            if file.try_lock():
                return None
            text = file.read(0, 4096)
        finally:
            file.close()
        time.sleep(0.005)  # whoever has it may only be looking, too
    try:
        owner = json.loads(text)
        return Writer(int(owner["pid"]), str(owner["host"]), float(owner["since"]))
    except (ValueError, KeyError, TypeError):
        return Writer()


def _read(disk: Disk, path: Path, manifest: Manifest, writer: Writer | None) -> Survey:
    """Follow the journal from its base record, as opening would, and count in episodes.log."""
    counts = dict.fromkeys(STATUS, 0)
    records = read_journal(disk, path / "journal")
    if not records:
        if manifest.schema is not None:
            raise CorruptionError(f"{path / 'journal'} is empty, though rows have been written")
        return Survey(manifest=manifest, episodes=counts, writer=writer)
    past = read_past(records)
    table = EpisodeTable()
    table.load_base(past.base["episodes"])
    written, newest = int(past.base["write_count"]), 0
    recent: list[LogEntry] = []
    for record in past.records:
        if record.kind is Kind.PUBLISH:
            publish = Publish.unpack(record.body)
            past.last, newest, written = publish.last_id, publish.time, written + publish.count
            recent += table.commit(
                publish.segments,
                publish.sources,
                first_id=publish.first_id,
                time=publish.time,
                sequence=record.sequence,
            )
        elif record.kind is Kind.RETIRE:
            past.retired = max(past.retired, record.json()["through"])
        elif record.kind is Kind.DELETE:
            past.retired = past.last = record.json()["last"]
    status: dict[int, int] = {}
    for entries in (_logged(disk, path, past, writer), recent, table.open_entries()):
        for entry in entries:
            status[entry.episode] = entry.status
            newest = max(newest, entry.end)
    status.pop(0, None)  # sources have entries, too
    for number in status.values():
        counts[STATUS[number]] += 1
    return Survey(
        manifest=manifest,
        rows=past.last - past.window_low(manifest.capacity),
        written=written,
        episodes=counts,
        last_write=newest / 1e6 if newest else None,
        writer=writer,
        unclean=None if writer else not past.clean,
    )


def _logged(disk: Disk, path: Path, past: Past, writer: Writer | None) -> Iterator[LogEntry]:
    """Yield the entries of episodes.log, up to one that is still being written."""
    path = path / "episodes.log"
    if (size := disk.size(path)) < 0:
        return
    log = EpisodeLog(disk, path, length=size)
    try:
        yield from log.read()
    except CorruptionError:
        if past.clean and writer is None:
            raise
    finally:
        log.close()
