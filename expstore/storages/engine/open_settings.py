"""Settings of an opening: compare them with the store in a folder, or make a new store there.

Used by stores on disk. This module takes the writer's lock and creates or reads expstore.json. It never
touches rows.
"""

from __future__ import annotations

import dataclasses
import json
import math
import operator
import os
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from expstore.core.arguments import check_capacity
from expstore.core.geometry import check_ndim, round_up
from expstore.core.retention_policy import Retain
from expstore.core.values import Key, to_key
from expstore.disk.files import Disk
from expstore.disk.filesystem import probe
from expstore.disk.writer_lock import WriterLock
from expstore.errors import ArgumentError, CorruptionError, SchemaError, StateError, StorageError
from expstore.schema.field_roles import DONE_REDUCTIONS, REWARD, REWARD_REDUCTIONS
from expstore.schema.schema import Schema
from expstore.schema.spec_text import check_specs, same_specs
from expstore.storages.format.layout import ColumnLayout, refuse_objects
from expstore.storages.format.manifest import MANIFEST, Manifest, check_outside, refuse_archive
from expstore.storages.format.paths import REPAIR, VERSION
from expstore.storages.format.swap import finish_swap
from expstore.storages.snapshots.catalog import OWN_FOLDER

Mode = Literal["a", "r", "x", "w"]
Durability = Literal["process", "sync"]
KeyLike = str | tuple[str, ...]

#: Kinds of storage on disk, and the compressions for variable-length rows.
STORAGES = ("zarr", "arrow")
COMPRESSIONS = ("lz4", "zstd")
#: Layout of columns when neither the caller nor the store names one.
_FLAT = ColumnLayout("flat")
#: Folders with other stores (snapshots), which are checked when they are opened.
_OTHER_STORES = {OWN_FOLDER}
#: How several values of a row are reduced to one.
_REDUCTIONS = {"reward_reduce": REWARD_REDUCTIONS, "done_reduce": DONE_REDUCTIONS}
#: Settings with another public name: the names in `Layout` and `EpisodeKeys`.
_PUBLIC_NAMES = {
    "storage": "layout", "traj_key": "traj", "done_keys": "done", "reward_key": "reward",
    "group_key": "group",
}  # fmt: skip
#: Maximum nesting of `meta`: deeper values are not shown by the server, nor by DuckDB.
META_LEVELS = 100
#: Files that may be in a folder in which the creation of a store was interrupted.
_BEGINNINGS = {"LOCK", "STATE", "journal", "episodes.log", "PROBE.tmp", MANIFEST + ".tmp"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Options of `expstore.open`; None: as stored, or the default for a new store.

    `mode`, `durability`, `min_free_bytes` and `on_sigterm` apply to this handle only and are not stored.
    `new_layout` has the defaults of `layout` for a new store. `lock` is the writer's lock if the
    caller already holds it: the storage takes it over, and releases it when it closes or cannot be opened.
    `window` is 0 for a store without a window.
    """

    mode: Mode = "a"
    storage: str | None = None
    compression: str | None = None
    seed: int | None = None
    traj_key: KeyLike | None = None
    done_keys: Sequence[KeyLike] | None = None
    reward_key: KeyLike | None = None
    reward_reduce: str | None = None
    done_reduce: str | None = None
    group_key: KeyLike | None = None
    group_size: int | None = None
    meta: dict[str, Any] | None = None
    flatten: bool = False
    schema: Schema | None = None
    specs: str = ""
    ndim: int | None = None
    layout: ColumnLayout | None = None
    new_layout: ColumnLayout = field(default_factory=ColumnLayout)
    durability: Durability = "process"
    min_free_bytes: int = 0
    on_sigterm: Literal["flush", "ignore"] = "flush"
    retain: Retain | None = None
    window: int | None = None
    lock: WriterLock | None = None

    def with_retention(self, retain: Retain | Mapping[str, Any] | None) -> Settings:
        """Return a copy with this retention policy; None keeps the current value."""
        return self if retain is None else dataclasses.replace(self, retain=Retain.of(retain))


def enter(
    disk: Disk, path: Path, capacity: int | None, settings: Settings, kind: str
) -> tuple[WriterLock, Manifest]:
    """Lock the folder and return its manifest; create both for a new store.

    Args:
        disk: The disk on which files are accessed.
        path: The store's folder.
        capacity: Most readable rows; None: as stored, unbounded for a new store.
        settings: The options of the opening.
        kind: The kind of storage that opens the folder.

    Raises:
        LockedError: Another buffer has the store open.
        StateError: The folder holds something else, or a setting contradicts the store.
    """
    if settings.mode not in ("a", "x", "w"):
        raise ArgumentError(f"mode {settings.mode!r} is unknown; use 'a', 'x' or 'w', or 'r' to read only")
    if settings.durability not in ("process", "sync"):
        raise ArgumentError(f"durability {settings.durability!r} is unknown; use 'process' or 'sync'")
    if settings.on_sigterm not in ("flush", "ignore"):
        raise ArgumentError(f"on_sigterm {settings.on_sigterm!r} is unknown; use 'flush' or 'ignore'")
    if settings.min_free_bytes < 0:
        raise ArgumentError(f"min_free_bytes must not be negative, got {settings.min_free_bytes}")
    capacity, settings = _plain(capacity, dataclasses.replace(settings, storage=settings.storage or kind))
    for name, known in _REDUCTIONS.items():
        if (value := getattr(settings, name)) not in (None, *known):
            raise ArgumentError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    _check_meta(settings.meta)
    if disk.exists(path / VERSION):
        raise StateError(
            f"{path} is a snapshot, which is read-only", hint="open it with mode='r', or loads() it"
        )
    if settings.mode == "w" or not disk.exists(path / MANIFEST):
        check_outside(disk, path)
    disk.check_tree(path, but=_OTHER_STORES)
    exists = _look(disk, path)
    if exists and settings.mode == "x":
        raise _exists(path)
    new = not exists or settings.mode == "w"
    if not new:
        refuse_archive(disk, path)
    if new:
        _new_layout(settings)  # raises before any file is created or moved
    if exists and new:
        _move_old_store(disk, path)
    disk.make_dir(path)
    lock = settings.lock or WriterLock(disk, path / "LOCK")
    try:
        finish_swap(disk, path)
        # Not before: files that a restore has moved away must stay there until the restore is finished.
        disk.make_dir(path / "journal")
        if disk.exists(path / MANIFEST):
            if settings.mode == "x":
                raise _exists(path)  # made by another process just now
            manifest = Manifest.load(disk, path)
            _compare(path, manifest, capacity, settings)
            _refuse_half_repaired(disk, path)
            manifest = _with_policy(disk, path, manifest, settings.retain)
            manifest = _with_window(disk, path, manifest, settings.window)
            probe(disk, path, new=False)
        else:
            probe(disk, path, new=True)
            manifest = _new(capacity, settings)
            manifest.save(disk, path)
            disk.sync_dir(path.absolute().parent)
    except BaseException:
        lock.release()
        raise
    return lock, manifest


def _with_policy(disk: Disk, path: Path, manifest: Manifest, retain: Retain | None) -> Manifest:
    """Return the manifest with the policy `retain`; write it to the disk if it has changed."""
    if retain is None or retain.to_json() == manifest.retain:
        return manifest
    if retain and manifest.capacity is not None:
        raise StateError(
            f"{path} keeps its newest {manifest.capacity} rows and cannot have a policy",
            kind="mismatch",
            hint="leave retain out",
        )
    manifest = manifest.replace(retain=retain.to_json())
    manifest.save(disk, path)
    return manifest


def _with_window(disk: Disk, path: Path, manifest: Manifest, window: int | None) -> Manifest:
    """Return the manifest with a window of this many rows; write it to the disk if it has changed."""
    if window is None or (window or None) == manifest.window:
        return manifest
    if window and manifest.capacity is not None:
        raise StateError(
            f"{path} keeps its newest {manifest.capacity} rows, and cannot have window={window}",
            kind="mismatch",
            hint="leave window out; a window is for stores that are created without a capacity",
        )
    if window and manifest.ranking is not None:
        raise StateError(
            f"{path} keeps the best rows by {manifest.ranking}, and cannot have window={window}",
            kind="mismatch",
            hint="leave window out: a window is for stores that keep all rows in their order",
        )
    manifest = manifest.replace(window=window or None)
    manifest.save(disk, path)
    return manifest


def look_up(disk: Disk, path: Path, capacity: int | None, settings: Settings) -> Manifest:
    """Return the manifest of a store that is opened for reading only; a reader has its own seed.

    Raises:
        NotFoundError: There is no store.
        StateError: A setting contradicts the store.
    """
    capacity, settings = _plain(capacity, settings)
    Manifest.check_exists(disk, path)  # first, so that other folders are not searched for links
    disk.check_tree(path, but=_OTHER_STORES)
    manifest = Manifest.load(disk, path)
    _compare(path, manifest, capacity, dataclasses.replace(settings, seed=None))
    _refuse_half_repaired(disk, path)
    return manifest


def _refuse_half_repaired(disk: Disk, path: Path) -> None:
    if disk.exists(path / REPAIR):
        raise CorruptionError(f"a repair of {path} was interrupted", hint="run `expstore repair` again")


def _plain(capacity: int | None, settings: Settings) -> tuple[int | None, Settings]:
    """Check what can be checked without a store; convert numbers to Python's own, which JSON can store."""
    if settings.storage not in (None, *STORAGES):
        raise ArgumentError(
            f"storage {settings.storage!r} is unknown; there are {', '.join(map(repr, STORAGES))}"
        )
    if settings.compression not in (None, *COMPRESSIONS):
        raise SchemaError(
            f"there is no compression {settings.compression!r}", hint="there are " + ", ".join(COMPRESSIONS)
        )
    if settings.ndim is not None:
        settings = dataclasses.replace(settings, ndim=check_ndim(settings.ndim))
    if settings.schema is not None:
        refuse_objects(settings.schema)
        check_specs(settings.specs, settings.schema)
    if capacity is not None:
        capacity = check_capacity(capacity)
        if settings.retain:
            raise ArgumentError(
                "capacity and retain exclude each other: a store with a capacity keeps the newest rows"
            )
    if settings.seed is not None:
        settings = dataclasses.replace(settings, seed=operator.index(settings.seed))
    if settings.compression is not None and settings.storage == "zarr":
        raise SchemaError(
            "compression= is for variable-length fields, which a zarr storage does not support",
            hint='omit it, or create the store with layout="arrow"; layout="packed" compresses fixed-size '
            "fields",
        )
    return capacity, settings


def _exists(path: Path) -> StateError:
    return StateError(f"{path} exists already", hint="open it with mode='a', or choose another path")


def _look(disk: Disk, path: Path) -> bool:
    """Return whether the folder is a store; raise an error if it is something else."""
    if disk.exists(path / MANIFEST):
        return True
    if disk.exists(path) and not disk.is_dir(path):
        raise StateError(f"{path} is a file, a store is a folder", hint="choose another path")
    foreign = [name for name in disk.names(path) if name not in _BEGINNINGS]
    if not {"columns", "checksums", "segments"}.isdisjoint(foreign):
        raise CorruptionError(f"{path} has columns but no {MANIFEST}")
    if foreign:
        raise StateError(
            f"{path} is not empty and not a store: it holds {', '.join(foreign[:3])}",
            hint="choose a new or empty folder",
        )
    return False


def _move_old_store(disk: Disk, path: Path) -> None:
    WriterLock(disk, path / "LOCK").release()  # check that no process has the store open
    number = 1
    while disk.exists(path.with_name(f"{path.name}.old-{number}")):
        number += 1
    disk.rename(path, path.with_name(f"{path.name}.old-{number}"))


def _check_meta(meta: dict[str, Any] | None) -> None:
    if meta is not None and not isinstance(meta, dict):
        raise SchemaError(f"meta must be a dict of facts, got {meta!r}")
    try:
        text = json.dumps(meta, allow_nan=False, ensure_ascii=False)
        same = json.loads(text.encode()) == meta  # DuckDB and HTTP clients get it in UTF-8
    except (TypeError, ValueError, RecursionError):
        same = False
    if not same:
        raise SchemaError("meta has values that JSON cannot store", hint="use numbers, text, lists, dicts")
    values: list[Any] = [meta]
    for _ in range(META_LEVELS):
        values = [inner for value in values for inner in _inner_values(value)]
    if any(isinstance(value, dict | list) for value in values):
        raise SchemaError(
            f"meta is nested more than {META_LEVELS} levels deep",
            hint="store the inner part as JSON text",
        )


def _inner_values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _new(capacity: int | None, settings: Settings) -> Manifest:
    seed = settings.seed
    if seed is None:
        # Stored, so that every draw can be repeated.
        seed = int.from_bytes(os.urandom(8), "little")
    return Manifest(
        uuid=uuid.uuid4().hex,
        generation=0,
        storage=settings.storage or STORAGES[0],
        compression=settings.compression,
        capacity=capacity,
        spare=0,
        seed=seed,
        created=time.time(),
        traj_key=None if settings.traj_key is None else to_key(settings.traj_key),
        done_keys=_keys(settings.done_keys),
        reward_key=REWARD if settings.reward_key is None else to_key(settings.reward_key),
        reward_reduce=settings.reward_reduce or (None if settings.reward_key is None else "sum"),
        done_reduce=settings.done_reduce,
        group_key=None if settings.group_key is None else to_key(settings.group_key),
        group_size=settings.group_size,
        flatten=settings.flatten,
        ndim=settings.ndim or 1,
        meta=settings.meta or {},
        specs=settings.specs,
        retain=settings.retain.to_json() if settings.retain else {},
        window=settings.window or None,
        layout=_new_layout(settings).to_json(),
    )


def _new_layout(settings: Settings) -> ColumnLayout:
    """Return the column layout of a new store; raise SchemaError if an option has no effect there."""
    return (settings.layout or ColumnLayout()).fill_from(settings.new_layout).fill_from(_FLAT)


def _layout(settings: Settings, manifest: Manifest) -> dict[str, Any] | None:
    """Return the layout that the settings require, completed by the stored one; None if they require none."""
    if settings.layout is None:
        return None
    return settings.layout.fill_from(ColumnLayout(**manifest.layout)).fill_from(_FLAT).to_json()


def _keys(names: Sequence[KeyLike] | None) -> tuple[Key, ...] | None:
    return None if names is None else tuple(to_key(name) for name in names)


def _compare(path: Path, manifest: Manifest, capacity: int | None, settings: Settings) -> None:
    asked: dict[str, Any] = {
        "storage": settings.storage,
        "compression": settings.compression,
        "capacity": None if capacity is None else round_up(capacity, math.prod(manifest.dims)),
        "seed": settings.seed,
        "traj_key": None if settings.traj_key is None else to_key(settings.traj_key),
        "done_keys": _keys(settings.done_keys),
        "reward_key": None if settings.reward_key is None else to_key(settings.reward_key),
        "reward_reduce": settings.reward_reduce,
        "done_reduce": settings.done_reduce,
        "group_key": None if settings.group_key is None else to_key(settings.group_key),
        "group_size": settings.group_size,
        "meta": settings.meta,
        "ndim": settings.ndim,
        "layout": _layout(settings, manifest),
        "schema": settings.schema if manifest.schema is not None else None,
    }
    if manifest.storage not in STORAGES:
        raise StorageError(f"{path} has storage {manifest.storage!r}, which this version does not know")
    for name, value in asked.items():
        stored = getattr(manifest, name)
        if name in _REDUCTIONS:
            stored = stored or _REDUCTIONS[name][0]
        if name == "schema" and manifest.schema is not None:
            stored = manifest.schema.written
        if value is not None and value != stored:
            if name == "layout":
                raise StateError(
                    f"{path} was made with {ColumnLayout.words(stored, value)}, "
                    f"opened with {ColumnLayout.words(value, stored)}",
                    kind="mismatch",
                    hint="leave the layout out to take it as stored, or use another path",
                )
            said = _PUBLIC_NAMES.get(name, name)
            raise StateError(
                f"{path} was made with {said}={stored!r}, opened with {said}={value!r}",
                kind="mismatch",
                hint=f"leave {said} out to take it as stored, or use another path",
            )
    _compare_specs(path, manifest, settings)


def _compare_specs(path: Path, manifest: Manifest, settings: Settings) -> None:
    """Raise an error if specs differ from the store's, or do not fit its rows if the store has none yet."""
    if not settings.specs:
        return
    if manifest.specs:
        if not same_specs(settings.specs, manifest.specs):
            raise StateError(
                f"the specs of {path} differ from those that were passed",
                kind="mismatch",
                hint="leave the specs out to take them as stored; set_specs of the buffer changes them",
            )
    elif settings.mode == "r":
        raise StateError(f"{path} has no specs, and a reader cannot set them", hint="leave the specs out")
    elif manifest.schema is not None:
        check_specs(settings.specs, manifest.schema)
