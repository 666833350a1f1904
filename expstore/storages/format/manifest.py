"""expstore.json: the description of a store, in one small file with a checksum.

Used by storages to open a store, and by `expstore.open` and the command line to inspect one. It contains
nothing that changes with every row.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import os
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.core.geometry import RingGeometry
from expstore.core.id_set import NO_IDS, IdSet
from expstore.core.parsing import MOST_IDS, parsing
from expstore.core.retention_policy import Retain
from expstore.core.values import Key, Ranking, to_key
from expstore.disk.files import Disk
from expstore.errors import (
    ArgumentError,
    CorruptionError,
    MigrationError,
    NotFoundError,
    SchemaError,
    StateError,
    StorageError,
)
from expstore.schema.field_roles import Keys, find_keys
from expstore.schema.schema import Schema
from expstore.storages.format.lineage import NO_STEPS, Lineage

#: The format that is written. The library reads this format, and older formats that `UPGRADES` can convert to
#: it; it refuses all others.
FORMAT = 1
#: How older manifests are read: format -> function that converts the JSON to that of the next format. A
#: change that raises `FORMAT` adds the step from the format before, and a fixture of that format
#: (tests/fixtures/README.md). The next opening for writing saves the converted manifest.
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
MANIFEST = "expstore.json"
#: Fields whose key in expstore.json differs from their name.
_KEYS = {"deleted": "gaps"}
#: Up to this many runs of deleted rows are written as readable pairs.
_LISTED = 64
_STORES_LISTED = 10
#: The largest number of runs of deleted rows; a text of 64 KiB could otherwise claim any number of them.
_MOST_RUNS = 1 << 22
#: The largest number of rows of a ring.
_MOST_ROWS = 1 << 48


def _stores_in(disk: Disk, folder: Path) -> str:
    """Return the hint for a folder that is not a store, but has stores in it."""
    names = disk.names(folder) if disk.is_dir(folder) else []
    stores = sorted(name for name in names if disk.exists(folder / name / MANIFEST))
    return f"the stores in it are {', '.join(stores[:_STORES_LISTED])}" if stores else ""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The settings of a store.

    Args:
        uuid: 32 hex digits, which never change.
        generation: How often the store was opened for writing.
        storage: Kind of storage, "zarr" or "arrow".
        capacity: Most readable rows; None for an unbounded store.
        spare: Slots beyond the capacity; 0 before the first rows.
        seed: Key of all draws.
        schema: The fields; None before the first rows.
        created: Seconds since 1970.
        traj_key: Field with the collector's trajectory ids, if any.
        done_keys: Fields that end an episode: terminated, truncated, done; missing fields are ignored.
        reward_key: Field whose sum is an episode's return.
        reward_reduce: How several rewards of a row are reduced to one; None: no reward was specified.
        done_reduce: How several flags of a row are reduced to one; None: as "any".
        group_key: Field or fact that says which episodes are a group; None: there are no groups.
        group_size: How many episodes a group has; None: as many as have ended when it is closed.
        flatten: Whether all dims of a batch are rows (otherwise only the first is).
        meta: The user's own metadata.
        deleted: Rows that were deleted by a repair or retention, between readable rows.
        ndim: How many dims of a batch are rows.
        dims: Sizes of these dims after the first; () before the first rows.
        ranking: How rows are ranked, if only the best are kept; None: the newest are kept.
        specs: The specs of the fields' values, in the form of `expstore.schema.spec_text`; "": unknown.
        layout: How columns are stored, in the form of `expstore.storages.format.layout`; {}: flat.
        reach: Slots beyond capacity and spare: rows of packed fields may refer to rows this far before them.
        column_set: How often fields were added or dropped after the first rows; in every commit record.
        compression: Compression of variable-length rows: "lz4" or "zstd"; None: not compressed.
        retain: Which rows are kept, in the form of `expstore.core.retention_policy`; {}: all of them.
        keyed: Whether rows were written under idempotency keys.
        window: How many of the newest rows samplers see in a store without a capacity; None: all of them.
        lineage: By which steps the store got its rows.
    """

    uuid: str
    generation: int
    storage: str
    capacity: int | None
    spare: int
    seed: int
    created: float
    schema: Schema | None = None
    traj_key: Key | None = None
    done_keys: tuple[Key, ...] | None = None
    reward_key: Key = ("next", "reward")
    reward_reduce: str | None = None
    done_reduce: str | None = None
    group_key: Key | None = None
    group_size: int | None = None
    flatten: bool = True
    meta: dict[str, Any] = field(default_factory=dict)
    deleted: IdSet = NO_IDS
    ndim: int = 1
    dims: tuple[int, ...] = ()
    ranking: Ranking | None = None
    specs: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    reach: int = 0
    column_set: int = 0
    compression: str | None = None
    retain: dict[str, Any] = field(default_factory=dict)
    keyed: bool = False
    window: int | None = None
    lineage: Lineage = NO_STEPS

    @property
    def geometry(self) -> RingGeometry:
        """How ids, slots and indices correspond."""
        return RingGeometry(self.capacity, self.ndim, self.dims, self.spare, self.reach)

    @property
    def slots(self) -> int | None:
        """The number of rows for which the columns have room; None for an unbounded store."""
        return None if self.capacity is None else self.capacity + self.spare + self.reach

    @property
    def key_settings(self) -> dict[str, Any]:
        """The fields of `Settings` with which a new store finds the same keys."""
        return {
            "traj_key": self.traj_key,
            "done_keys": self.done_keys,
            "reward_key": None if self.reward_reduce is None else self.reward_key,  # found by its usual name
            "reward_reduce": self.reward_reduce,
            "done_reduce": self.done_reduce,
            "group_key": self.group_key,
            "group_size": self.group_size,
        }

    def find_keys(self, schema: Schema) -> Keys:
        """Find the fields that mark trajectories, ends and rewards.

        Raises:
            SchemaError: A key that was specified is not such a field.
        """
        return find_keys(
            schema,
            trajectory=self.traj_key,
            ends=self.done_keys,
            reward=self.reward_key,
            reward_reduce=self.reward_reduce,
            done_reduce=self.done_reduce,
            group=self.group_key,
            group_size=self.group_size,
        )

    def replace(self, **changes: Any) -> Manifest:
        """Return a copy with some settings changed."""
        return dataclasses.replace(self, **changes)

    def pack(self) -> bytes:
        """Return the content of expstore.json."""
        data = {_KEYS.get(f.name, f.name): getattr(self, f.name) for f in dataclasses.fields(self)}
        data["schema"] = self.schema.to_json() if self.schema else None
        data["ranking"] = dataclasses.asdict(self.ranking) if self.ranking else None
        data["specs"] = json.loads(self.specs) if self.specs else None
        data["lineage"] = self.lineage.to_text() if self.lineage.steps else None
        for name in _OPTIONAL:
            if data[name] is None:
                del data[name]
        data["format"] = FORMAT
        data["gaps"] = pack_ids(self.deleted)
        data["crc32c"] = _checksum(data)
        return json.dumps(data, indent=1).encode()

    def save(self, disk: Disk, folder: Path) -> None:
        """Write the file atomically; a power failure leaves the former content or this one."""
        disk.write_whole(folder / MANIFEST, self.pack())

    @classmethod
    def load(cls, disk: Disk, folder: Path) -> Manifest:
        """Read a store's manifest.

        Raises:
            NotFoundError: There is no store in this folder.
            MigrationError: The manifest has a format that this version of the library cannot read.
            CorruptionError: The file is damaged.
        """
        cls.check_exists(disk, folder)
        path = folder / MANIFEST
        return cls.unpack(disk.read_whole(path), str(path))

    @staticmethod
    def check_exists(disk: Disk, folder: Path) -> None:
        """Raise NotFoundError unless a folder has a manifest."""
        if not disk.exists(folder / MANIFEST):
            raise NotFoundError(
                f"{folder} is not a store: it has no {MANIFEST}"
                if disk.exists(folder)
                else f"{folder} is not a store: there is no such folder",
                hint=_stores_in(disk, folder),
            )

    @classmethod
    def unpack(cls, packed: bytes, name: str) -> Manifest:
        """Parse the bytes that `pack` returned.

        Args:
            packed: The bytes.
            name: Name of the file for messages.

        Raises:
            MigrationError: The manifest has a format that this version of the library cannot read.
            CorruptionError: The bytes are damaged.
        """
        version, data = _parse(packed, name)
        while version < FORMAT:
            if version not in UPGRADES:
                raise MigrationError(
                    f"{name} has format {version}, which this library cannot read: it reads format {FORMAT}",
                    hint="read the store with the expstore that made it, and export its rows",
                )
            data, version = UPGRADES[version](data), version + 1
        if version > FORMAT:
            raise MigrationError(
                f"{name} has format {version}, but this library reads formats up to {FORMAT}",
                hint="install a newer expstore",
            )
        with parsing(name):
            try:
                return cls(**_values_of(data))
            except (SchemaError, ArgumentError, CorruptionError) as exc:
                raise CorruptionError(f"{name} is damaged: {exc.message}") from exc


def format_of(disk: Disk, folder: Path) -> int:
    """Return the format in which a store's manifest was written; errors as `Manifest.load`."""
    path = folder / MANIFEST
    Manifest.load(disk, folder)
    return _parse(disk.read_whole(path), str(path))[0]


def refuse_archive(disk: Disk, folder: Path) -> None:
    """Refuse to write to a ring that has an archive: earlier versions copied the rows that left it there.

    Raises:
        MigrationError: The ring has an archive. The message says how to join both in one store.
    """
    path = folder / MANIFEST
    archive = _parse(disk.read_whole(path), str(path))[1].get("archive")
    if archive:
        place = os.path.normpath(folder.resolve() / archive)
        raise MigrationError(
            f"{folder} has an archive, {place}, to which this version would not copy the rows that leave",
            hint=f"join both in a store that grows: `expstore drop-column {place} archived.id`, then "
            f"`expstore merge {place} {folder} --out NEW`",
        )


def _parse(packed: bytes, name: str) -> tuple[int, dict[str, Any]]:
    """Return the format of a manifest and its JSON, without format and checksum."""
    with parsing(name):
        data = json.loads(packed)
        checksum = data.pop("crc32c")
        version = int(data["format"])
        fits = checksum == _checksum(data)  # first: all formats have it, and a flipped bit is not a format
    if not fits:
        raise CorruptionError(f"{name} is damaged: its checksum does not match")
    del data["format"]
    return version, data


def _values_of(data: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a manifest from the JSON of the current format.

    The checksum says that the text was not changed by accident, not that the values make sense: this is the
    only place that checks their types and ranges.
    """
    data.pop("archive", None)  # `refuse_archive` looks at it
    for name in _OPTIONAL:
        data.setdefault(name, None)
    for name, is_valid in _CHECKS.items():
        if not is_valid(data[name]):
            raise ValueError(f"{_KEYS.get(name, name)!r} is {str(data[name])[:80]!r}")
    ranked, specs = data["ranking"], data["specs"]
    slots = (data["capacity"] or 0) + data["spare"] + data["reach"]
    if math.prod(data["dims"]) > _MOST_ROWS or slots > _MOST_ROWS:
        raise ValueError(f"a ring of {slots} rows in dims {data['dims']}")
    return data | {
        "schema": Schema.from_json(data["schema"]) if data["schema"] else None,
        "traj_key": to_key(data["traj_key"]) if data["traj_key"] else None,
        "done_keys": tuple(map(to_key, data["done_keys"])) if data["done_keys"] else None,
        "group_key": to_key(data["group_key"]) if data["group_key"] else None,
        "reward_key": to_key(data["reward_key"]),
        "deleted": unpack_ids(data.pop("gaps")),
        "dims": tuple(map(int, data["dims"])),
        "ranking": Ranking(to_key(ranked["key"]), ranked["reduction"]) if ranked else None,
        "specs": json.dumps(specs, separators=(",", ":")) if specs else "",
        "lineage": Lineage.from_text(data["lineage"] or "[]"),
    }


def _is_whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _is_key(value: Any) -> bool:
    return isinstance(value, str) or (
        isinstance(value, list) and bool(value) and all(isinstance(part, str) for part in value)
    )


def _is_uuid(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32}", value) is not None


#: Settings that expstore.json has only if they are set.
_OPTIONAL = ("window", "group_key", "group_size", "lineage")
#: What the values of expstore.json may be, by key; the schema, gaps and specs have parsers of their own.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "uuid": _is_uuid,
    "generation": lambda value: _is_whole(value, 0, _MOST_ROWS),
    "storage": lambda value: value in ("zarr", "arrow"),
    "capacity": lambda value: value is None or _is_whole(value, 1, _MOST_ROWS),
    "spare": lambda value: _is_whole(value, 0, _MOST_ROWS),
    "reach": lambda value: _is_whole(value, 0, _MOST_ROWS),
    "column_set": lambda value: _is_whole(value, 0, 2**32 - 1),
    "seed": lambda value: _is_whole(value, -(2**128), 2**128),
    "created": lambda value: type(value) in (int, float) and 0 <= value < 1 << 40,
    "schema": lambda value: value is None or isinstance(value, dict | list),
    "traj_key": lambda value: value is None or _is_key(value),
    "done_keys": lambda value: value is None or (isinstance(value, list) and all(map(_is_key, value))),
    "reward_key": _is_key,
    "reward_reduce": lambda value: value is None or isinstance(value, str),
    "done_reduce": lambda value: value is None or isinstance(value, str),
    "group_key": lambda value: value is None or _is_key(value),
    "group_size": lambda value: value is None or _is_whole(value, 1, _MOST_ROWS),
    "flatten": lambda value: isinstance(value, bool),
    "keyed": lambda value: isinstance(value, bool),
    "window": lambda value: value is None or _is_whole(value, 1, _MOST_ROWS),
    "meta": lambda value: isinstance(value, dict),
    "retain": lambda value: isinstance(value, dict) and Retain.of(value) is not None,
    "layout": lambda value: (
        isinstance(value, dict)
        and value.keys() <= {"layout", "fields", "share_next"}
        and isinstance(value.get("fields", {}), dict)
        and all(isinstance(options, dict) for options in value.get("fields", {}).values())
    ),
    "ndim": lambda value: _is_whole(value, 1, 64),
    "dims": lambda value: isinstance(value, list) and all(_is_whole(size, 1, _MOST_ROWS) for size in value),
    "ranking": lambda value: (
        value is None
        or (isinstance(value, dict) and _is_key(value["key"]) and isinstance(value["reduction"], str))
    ),
    "specs": lambda value: value is None or isinstance(value, dict),
    "lineage": lambda value: value is None or isinstance(value, str),
    "compression": lambda value: value in (None, "lz4", "zstd"),
}


def pack_ids(deleted: IdSet) -> Any:
    """Return runs in their JSON form: pairs, or for many runs the text of their compressed distances.

    Raises:
        StorageError: There are more runs than a manifest may have.
    """
    if len(deleted) > _MOST_RUNS:
        raise StorageError(
            f"the deleted rows form {len(deleted):,} separate runs, and a store can have {_MOST_RUNS:,}",
            hint="delete longer runs of rows, or copy the rows that remain into a new store",
        )
    if len(deleted) <= _LISTED:
        return list(deleted)
    bounds = np.stack([deleted.first, deleted.last], axis=1).reshape(-1)
    return base64.b64encode(zlib.compress(np.diff(bounds, prepend=0).astype("<i8").tobytes(), 1)).decode()


def unpack_ids(kept: Any) -> IdSet:
    """Return the set that `pack_ids` packed.

    Raises:
        ValueError: The runs are not ascending ids, or there are more than a store can have.
    """
    if isinstance(kept, str):
        # One byte more than the longest list has is enough to refuse it: zlib can blow up a text 1000 times.
        decoder = zlib.decompressobj()
        distances = decoder.decompress(base64.b64decode(kept, validate=True), 16 * _MOST_RUNS + 1)
        if not decoder.eof or len(distances) > 16 * _MOST_RUNS:
            raise ValueError(f"the list of deleted rows is cut off, or has over {_MOST_RUNS:,} runs")
        bounds = np.frombuffer(distances, "<i8").reshape(-1, 2)
        if bounds.size and (bounds[:, 0].min() < 1 or bounds[:, 1].min() < 0 or bounds.max() > MOST_IDS):
            raise ValueError("the runs of deleted rows do not ascend")
        ends = np.cumsum(bounds, dtype=np.int64).reshape(-1, 2)
        first, last = np.ascontiguousarray(ends[:, 0]), np.ascontiguousarray(ends[:, 1])
    else:
        if any(type(id) is not int or not 0 < id <= MOST_IDS for pair in kept for id in pair):
            raise ValueError("the runs of deleted rows are not pairs of ids")
        pairs = np.array(kept, np.int64).reshape(-1, 2)
        first, last = pairs[:, 0].copy(), pairs[:, 1].copy()
    if (last < first).any() or (first[1:] <= last[:-1]).any() or (last > MOST_IDS).any():
        raise ValueError("the runs of deleted rows do not ascend")
    return IdSet.merge(first, last)


def _checksum(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return f"{google_crc32c.value(text.encode()):08x}"


def check_target(disk: Disk, target: Path) -> None:
    """Refuse a path at which nothing can be created.

    Raises:
        StateError: The path exists, or is inside a store.
        NotFoundError: The parent folder does not exist.
    """
    if disk.exists(target):
        raise StateError(f"{target} exists already", hint="choose another path")
    folder = target.resolve().parent
    if not disk.is_dir(folder):
        raise NotFoundError(f"cannot create {target.name}: there is no folder {folder}", hint="create it")
    check_outside(disk, target)


def check_outside(disk: Disk, target: Path) -> None:
    """Refuse a path inside a store, which would take what is created there for damage, or for snapshots.

    Raises:
        StateError: The path is inside a store (kind "path").
    """
    if above := store_around(disk, target):
        raise StateError(
            f"{target} would lie inside the store {above}",
            kind="path",
            hint="choose a path outside the store",
        )


def store_around(disk: Disk, target: Path) -> Path | None:
    """Return the store or snapshot whose folder contains a path, or None."""
    return next((above for above in target.resolve().parents if disk.exists(above / MANIFEST)), None)
