"""Upgrade a store to the format of this version of the library, and keep the old index.

Used by the command line. Opening a store upgrades what is needed anyway; this module reports it beforehand
and keeps a copy of the old index. It never downgrades.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.errors import ExpStoreError
from expstore.sql.migrate import migrations, steps_in
from expstore.sql.sync import Catalog
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import open_storage
from expstore.storages.format.manifest import FORMAT, MANIFEST, format_of
from expstore.storages.format.paths import INDEX, index_path

__all__ = ["Upgrade", "upgrade"]


@dataclass(frozen=True, slots=True)
class Upgrade:
    """The formats of a store, and what was done to upgrade them.

    Args:
        format_found: Format of the files, from expstore.json.
        format_known: The newest format that this version of the library knows.
        index_found: Number of migrations that the index has had; None if there is no index.
        index_known: Number of migrations that this version of the library knows.
        acts: What was done, or would be done, one line each.
    """

    format_found: int
    format_known: int
    index_found: int | None
    index_known: int
    acts: tuple[str, ...] = ()


def upgrade(path: Path, *, dry_run: bool = False, disk: Disk | None = None) -> Upgrade:
    """Upgrade a store to the current format. A store that has it is not changed.

    The index is rebuilt from the store. The old file is kept as `index.duckdb.old-1` (or the next free
    number) in the same folder, and is restored if the rebuild fails.

    Args:
        path: The store's folder.
        dry_run: Whether only to report what would be done.
        disk: Access to files.

    Raises:
        NotFoundError: There is no store.
        MigrationError: The store has a format that this version of the library cannot read.
        LockedError: A process has the store open for writing, or another program has the index open.
        CorruptionError: The store is damaged.
    """
    disk, path = disk or Disk(), local_path(path)
    written, steps, index = format_of(disk, path), migrations(), index_path(path)
    found = steps_in(index, steps) if index is not None and disk.exists(index) else None
    acts: tuple[str, ...] = ()
    if written < FORMAT:
        acts = (f"{MANIFEST}: rewritten in format {FORMAT}",)
    kept = None
    if index is not None and found is not None and found < len(steps):
        kept = _free_name(disk, index)
        new = ", ".join(map(str, steps[found:]))
        acts = (*acts, f"{INDEX}: rebuilt with {new}; the old one is kept as {kept.name}")
    if acts and not dry_run:
        _do(disk, path, kept)
    return Upgrade(written, FORMAT, found, len(steps), acts)


def _do(disk: Disk, path: Path, kept: Path | None) -> None:
    # This is the one writer now; every opening for writing rewrites expstore.json.
    storage = open_storage(path, settings=Settings(on_sigterm="ignore"), disk=disk)
    try:
        if kept is None:
            return
        index = path / INDEX
        names = [name for name in disk.names(path) if name.startswith(INDEX) and ".old-" not in name]
        moved = [(path / name, path / (kept.name + name.removeprefix(INDEX))) for name in names]
        for old, new in moved:
            disk.rename(old, new)
        disk.sync_dir(path)
        catalog = Catalog(storage)
        try:
            catalog.catch_up()
            catalog.drop()
        except BaseException:
            with contextlib.suppress(ExpStoreError):
                catalog.drop()
            disk.unlink(index)
            for old, new in reversed(moved):
                disk.rename(new, old)
            raise
    finally:
        storage.close()


def _free_name(disk: Disk, index: Path) -> Path:
    number = 1
    while disk.exists(kept := index.with_name(f"{index.name}.old-{number}")):
        number += 1
    return kept
