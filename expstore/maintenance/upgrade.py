"""Bring a store to the form that this version of the library writes, and keep what it was.

Used by the command line. Opening a store does what is needed by itself; this says beforehand what that
is, and keeps the old index. It never goes backwards.
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
    """Say in which form a store is, and what was done about it.

    Args:
        format_found: Of the files, as expstore.json says.
        format_known: The newest that this version knows.
        index_found: How many steps the index has been through; None: there is no index.
        index_known: How many there are.
        acts: What was done, or would be.
    """

    format_found: int
    format_known: int
    index_found: int | None
    index_known: int
    acts: tuple[str, ...] = ()


def upgrade(path: Path, *, dry_run: bool = False, disk: Disk | None = None) -> Upgrade:
    """Bring a store to the present form. Where there is nothing to do, nothing is touched.

    The index is built anew from the store; the old file stays beside it as `index.duckdb.old-1` (or the
    next number that is free), and is put back if that fails.

    Args:
        path: The store's folder.
        dry_run: Only say what would be done.
        disk: Where files are touched.

    Raises:
        NotFoundError: There is no store.
        MigrationError: It has a format that this version of the library cannot read.
        LockedError: Somebody has it open for writing, or the index open in another program.
        CorruptionError: It is damaged.
    """
    disk, path = disk or Disk(), local_path(path)
    written, steps, index = format_of(disk, path), migrations(), index_path(path)
    found = steps_in(index, steps) if index is not None and disk.exists(index) else None
    acts: tuple[str, ...] = ()
    if written < FORMAT:
        acts = (f"{MANIFEST}: written again in format {FORMAT}",)
    kept = None
    if index is not None and found is not None and found < len(steps):
        kept = _free_name(disk, index)
        new = ", ".join(map(str, steps[found:]))
        acts = (*acts, f"{INDEX}: built anew with {new}; the old one is kept as {kept.name}")
    if acts and not dry_run:
        _do(disk, path, kept)
    return Upgrade(written, FORMAT, found, len(steps), acts)


def _do(disk: Disk, path: Path, kept: Path | None) -> None:
    # Nobody else writes now, and expstore.json is written again, as with every opening for writing.
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
