"""Columns that come, or go, when a store has rows already: how that is made one act on the disk.

Used by the Zarr storage. What the act needs is built aside, in `late.tmp`; its new name, `late`, says what is
going on, and expstore.json with the other fields is the commit. Whoever opens the store next brings an act
to its end that was committed, and takes back one that was not. It never touches the columns of other fields.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import google_crc32c

from expstore.core.values import Key
from expstore.disk.bulk_files import sync_paths
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, StateError
from expstore.schema.schema import Schema
from expstore.storages.format.manifest import MANIFEST, Manifest
from expstore.storages.format.paths import CHECKSUMS, COLUMNS

__all__ = ["ASIDE", "COLUMN", "LATE", "Plan", "begin_late", "commit_late", "finish_late", "sums_path"]

LATE, ASIDE = "late", "late.tmp"
#: In it: what is to be done; the new column; the checksums of all columns afterwards; what goes.
_PLAN, COLUMN, _OLD = "plan", "column", "old"


@dataclass(frozen=True, slots=True)
class Plan:
    """Say what is being done to the columns of a store.

    Args:
        act: Whether a field comes or goes.
        key: Which one.
        top: The first part of its path below `columns/` that holds nothing else: so much comes or goes.
        column_set: As expstore.json has it afterwards.
    """

    act: Literal["add", "drop"]
    key: Key
    top: str
    column_set: int

    @classmethod
    def of(cls, act: Literal["add", "drop"], key: Key, others: Schema, column_set: int) -> Plan:
        """Return the plan for a field beside these others."""
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
        """Read it.

        Raises:
            CorruptionError: It is damaged.
        """
        path = folder / _PLAN
        try:
            found = json.loads(disk.read_whole(path))
            data = found["plan"]
            crc = google_crc32c.value(json.dumps(data, sort_keys=True).encode())
            if crc != found["crc32c"]:
                raise CorruptionError(f"{path} is damaged: its checksum does not fit")
            return cls(data["act"], tuple(data["key"]), data["top"], data["column_set"])
        except (ValueError, KeyError, TypeError) as exc:
            raise CorruptionError(f"{path} is damaged: {exc}") from exc


def begin_late(
    disk: Disk,
    path: Path,
    plan: Plan,
    sums: bytes,
    *,
    built: Sequence[Path] = (),
    folders: Sequence[Path] = (),
    pool: ThreadPoolExecutor | None = None,
) -> None:
    """Bring what was built aside to the disk, and give it its name; a field that comes gets its place.

    Args:
        disk: Where files are touched.
        path: The store's folder.
        plan: What is to be done.
        sums: The file `checksums` as it is afterwards.
        built: Files in `late.tmp` that are not on the disk yet.
        folders: Folders there whose names are not.
        pool: To sync with.

    Raises:
        StateError: Something that is no column of the store has its name.
    """
    aside, late, place = path / ASIDE, path / LATE, path / COLUMNS / plan.top
    if plan.act == "add" and disk.exists(place):
        raise StateError(f"{place} is in the way: it is no column of the store", hint="move it away")
    disk.make_dir(aside)
    disk.put(aside / _PLAN, plan.pack())
    disk.put(aside / CHECKSUMS, sums)
    sync_paths(disk, [aside / _PLAN, aside / CHECKSUMS, *built], sorted({aside, *folders}), pool)
    disk.rename(aside, late)
    disk.sync_dir(path)
    if plan.act == "add":
        disk.rename(late / COLUMN, place)
        disk.sync_dir(place.parent)
        disk.sync_dir(late)


def commit_late(disk: Disk, path: Path, manifest: Manifest) -> None:
    """Let the store have the fields of this manifest; from here on `finish_late` must follow."""
    manifest.save(disk, path)


def finish_late(disk: Disk, path: Path) -> bool:
    """Bring what `begin_late` began to its end, or take it back; whoever has the writer's lock may, again.

    Returns:
        Whether there was something.

    Raises:
        CorruptionError: What says what it is, is damaged.
    """
    late = path / LATE
    if not disk.exists(late):
        disk.remove_tree(path / ASIDE)
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
    disk.rename(late, path / ASIDE)
    disk.sync_dir(path)
    disk.remove_tree(path / ASIDE)
    return True


def _is_committed(disk: Disk, path: Path, plan: Plan) -> bool:
    return disk.exists(path / MANIFEST) and Manifest.load(disk, path).column_set >= plan.column_set


def sums_path(disk: Disk, path: Path) -> Path:
    """Return where the checksums of a store's columns are, also of one that was left in the middle."""
    late = path / LATE
    if disk.exists(late / CHECKSUMS) and _is_committed(disk, path, Plan.load(disk, late)):
        return late / CHECKSUMS
    return path / CHECKSUMS
