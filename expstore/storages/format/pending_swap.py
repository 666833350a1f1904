"""Add or drop a column of a store with existing rows, as one atomic change on disk.

Used by stores on disk. The files of the change are built in `late.tmp`. Renaming it to `late` announces the
change; writing expstore.json with the new fields commits it. The next opening of the store completes a
committed change, and undoes one that was not committed. The columns of other fields are never modified.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import google_crc32c

from expstore.core.parsing import INVALID
from expstore.core.values import Key
from expstore.disk.bulk_files import sync_paths
from expstore.disk.files import Disk
from expstore.disk.threads import Threads
from expstore.errors import CorruptionError, StateError
from expstore.schema.schema import Schema
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.format.paths import CHECKSUMS, COLUMNS

LATE, TEMPORARY = "late", "late.tmp"
#: Names in that folder: the plan; the new column; the dropped column.
_PLAN, COLUMN, _OLD = "plan", "column", "old"


@dataclass(frozen=True, slots=True)
class Plan:
    """A change of the columns of a store.

    Args:
        act: Whether a field is added or dropped.
        key: The field's key.
        top: The shortest path below `columns/` that contains nothing but this field; it is moved as a whole.
        column_set: The `column_set` of expstore.json afterwards.
    """

    act: Literal["add", "drop"]
    key: Key
    top: str
    column_set: int

    @classmethod
    def of(cls, act: Literal["add", "drop"], key: Key, others: Schema, column_set: int) -> Plan:
        """Return the plan for adding or dropping a field; `others` are the remaining fields."""
        arrays = [entry.key for entry in others.fields if not entry.variable]
        groups = {other[:n] for other in arrays for n in range(1, len(other))}
        depth = next(n for n in range(1, len(key) + 1) if key[:n] not in groups)
        return cls(act, key, "/".join(key[:depth]), column_set)

    def pack(self) -> bytes:
        """Return the content of the file `plan`."""
        data = json.dumps(asdict(self), sort_keys=True)
        return json.dumps({"plan": asdict(self), "crc32c": google_crc32c.value(data.encode())}).encode()

    @classmethod
    def load(cls, disk: Disk, folder: Path) -> Plan:
        """Read the plan.

        Raises:
            CorruptionError: The plan is damaged.
        """
        path = folder / _PLAN
        try:
            found = json.loads(disk.read_whole(path))
            data = found["plan"]
            crc = google_crc32c.value(json.dumps(data, sort_keys=True).encode())
            if crc != found["crc32c"]:
                raise CorruptionError(f"{path} is damaged: its checksum does not match")
            return cls(data["act"], tuple(data["key"]), data["top"], data["column_set"])
        except INVALID as exc:
            raise CorruptionError(f"{path} is damaged: {exc}") from exc


def begin_late(
    disk: Disk,
    path: Path,
    plan: Plan,
    sums: bytes,
    *,
    built: Sequence[Path] = (),
    folders: Sequence[Path] = (),
    pool: Threads | None = None,
) -> None:
    """Sync the files that were built, rename their folder to `late`, and move an added field to its place.

    Args:
        disk: The disk on which files are accessed.
        path: The store's folder.
        plan: The change.
        sums: Content of the file `checksums` afterwards.
        built: Files in `late.tmp` that are not synced yet.
        folders: Folders in `late.tmp` that are not synced yet.
        pool: Threads that fsync.

    Raises:
        StateError: A file or folder that is not a column of the store has the column's name.
    """
    temporary, late, place = path / TEMPORARY, path / LATE, path / COLUMNS / plan.top
    if plan.act == "add" and disk.exists(place):
        raise StateError(f"{place} is in the way: it is not a column of the store", hint="move it away")
    disk.make_dir(temporary)
    disk.put(temporary / _PLAN, plan.pack())
    disk.put(temporary / CHECKSUMS, sums)
    sync_paths(disk, [temporary / _PLAN, temporary / CHECKSUMS, *built], sorted({temporary, *folders}), pool)
    disk.rename(temporary, late)
    disk.sync_dir(path)
    if plan.act == "add":
        disk.rename(late / COLUMN, place)
        disk.sync_dir(place.parent)
        disk.sync_dir(late)


def commit_late(disk: Disk, path: Path, manifest: Manifest) -> None:
    """Commit the fields of this manifest; the caller then calls `finish_late`."""
    manifest.save(disk, path)


def finish_late(disk: Disk, path: Path) -> bool:
    """Complete the change that `begin_late` announced, or undo it if it was not committed.

    The caller holds the writer's lock. May be repeated after a crash.

    Returns:
        Whether there was an unfinished change.

    Raises:
        CorruptionError: The plan is damaged.
    """
    late = path / LATE
    if not disk.exists(late):
        disk.remove_tree(path / TEMPORARY)
        return False
    plan = Plan.load(disk, late)
    committed = _is_committed(disk, path, plan)
    if committed and disk.exists(late / CHECKSUMS):
        disk.rename(late / CHECKSUMS, path / CHECKSUMS)
    place = path / COLUMNS / plan.top
    if committed == (plan.act == "drop") and disk.exists(place):
        disk.rename(place, late / _OLD)
        disk.sync_dir(place.parent)
    disk.sync_dir(path)
    disk.sync_dir(late)
    disk.rename(late, path / TEMPORARY)
    disk.sync_dir(path)
    disk.remove_tree(path / TEMPORARY)
    return True


def _is_committed(disk: Disk, path: Path, plan: Plan) -> bool:
    return disk.exists(path / MANIFEST) and Manifest.load(disk, path).column_set >= plan.column_set


def sums_path(disk: Disk, path: Path) -> Path:
    """Return the path of the checksums of a store's columns, also during an unfinished change."""
    late = path / LATE
    if disk.exists(late / CHECKSUMS) and _is_committed(disk, path, Plan.load(disk, late)):
        return late / CHECKSUMS
    return path / CHECKSUMS
