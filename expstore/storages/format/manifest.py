"""expstore.json: what a store is, in one small file that says whether it is whole.

Used by storages to open a store and by `expstore.open` and the command line to look at one. Nothing that
changes with every row is kept here.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.core.id_set import NO_GAPS, Gaps
from expstore.core.values import Key, Ranking, key_name, to_key
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, MigrationError, NotFoundError, StateError
from expstore.schema.schema import Schema

__all__ = ["FORMAT", "MANIFEST", "Manifest", "check_target"]

#: The newest format that this library knows; it opens this one and older ones. 1: the first. 2: fields came
#: or went after the first rows, which older versions would not notice. 3: rows without a fixed size. 4: rows
#: leave by a policy, or flat ones lie with others. 5: integers of rows without a fixed size lie in fewer
#: bytes. 6: idempotency keys in a file that older versions would not keep up to date. 7: rows that leave go
#: to an archive. 8: flags are kept where they do not follow from others.
FORMAT = 8
MANIFEST = "expstore.json"
#: So many gaps are written as pairs that somebody can read.
_LISTED = 64


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Hold the settings of a store.

    Args:
        uuid: 32 hex digits, for ever the same.
        generation: How often the store was opened for writing.
        storage: Kind of storage, "zarr" or "arrow".
        capacity: Most readable rows; None for an unbounded store.
        spare: Slots beyond the capacity; 0 until the first rows have come.
        seed: Key of all draws.
        schema: The fields; None until the first rows have come.
        created: Seconds since 1970.
        traj_key: Field with the collector's trajectory ids, if any.
        done_keys: Fields that end an episode: terminated, truncated, done; those that exist count.
        reward_key: Field that is summed up to an episode's return.
        flatten: Whether a batch's dims are all rows (else only the first one is).
        meta: The user's own facts.
        gaps: Rows that a repair or retention gave up, between others.
        ndim: How many dims of a batch are rows.
        dims: Sizes of those beyond the first; () until the first rows have come.
        ranking: By what rows are ranked, if only the best stay; None: the newest do.
        specs: What values the fields have, as `expstore.schema.spec_text` keeps it; "": nobody has said.
        layout: How columns are made, as `expstore.storages.format.layout` reads it; {}: flat.
        reach: Slots beyond capacity and spare: rows of packed fields may lie with rows so far before them.
        column_set: How often fields came or went after the first rows; in every record that publishes rows.
        compression: Of rows without a fixed size: "narrow", "lz4" or "zstd"; None: none.
        narrow: Whether their integers lie in as few bytes as they need; in all new stores with a compression.
        retain: Which rows stay, as `expstore.core.retention_policy` keeps it; {}: all of them.
        keyed: Whether rows were written under idempotency keys.
        archive: Where rows go that leave a ring, as seen from the store's folder; "": nowhere.
        implied: Flags of which is kept where they do not follow from others, see
            `expstore.storages.format.derived`.
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
    flatten: bool = True
    meta: dict[str, Any] = field(default_factory=dict)
    gaps: Gaps = NO_GAPS
    ndim: int = 1
    dims: tuple[int, ...] = ()
    ranking: Ranking | None = None
    specs: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    reach: int = 0
    column_set: int = 0
    compression: str | None = None
    narrow: bool = False
    retain: dict[str, Any] = field(default_factory=dict)
    keyed: bool = False
    archive: str = ""
    implied: tuple[Key, ...] = ()

    @property
    def format(self) -> int:
        """The oldest format that can say all this: what is written."""
        if self.implied:
            return FORMAT
        if self.archive:
            return 7
        if self.keyed:
            return 6
        if self.narrow:
            return 5
        if self.retain or len(self.gaps) > _LISTED or self._lends:
            return 4
        if self.storage == "arrow":
            return 3
        return 2 if self.column_set else 1

    @property
    def _lends(self) -> bool:
        """Whether rows of a flat field may lie with its next ones: older libraries read nothing there."""
        fields = () if self.schema is None else self.schema.fields
        kinds = {entry.key: (entry.dtype, entry.shape) for entry in fields}
        for key, kind in kinds.items():
            asked = {**self.layout, **self.layout.get("fields", {}).get(key_name(key), {})}
            shares = asked.get("layout") == "flat" and asked.get("share_next")
            if shares and kinds.get(("next", *key)) == kind:
                return True
        return False

    @property
    def slots(self) -> int | None:
        """How many rows the columns have room for; None for an unbounded store."""
        return None if self.capacity is None else self.capacity + self.spare + self.reach

    def replace(self, **changes: Any) -> Manifest:
        """Return a copy with some settings changed."""
        return dataclasses.replace(self, **changes)

    def pack(self) -> bytes:
        """Return the content of expstore.json."""
        data = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data["schema"] = self.schema.to_json() if self.schema else None
        data["ranking"] = dataclasses.asdict(self.ranking) if self.ranking else None
        data["specs"] = json.loads(self.specs) if self.specs else None
        data["format"] = self.format
        data["gaps"] = _pack_gaps(self.gaps)
        for name in ("column_set", "narrow", "retain", "keyed", "archive", "implied"):
            if not data[name]:
                del data[name]
        data["crc32c"] = _checksum(data)
        return json.dumps(data, indent=1).encode()

    def save(self, disk: Disk, folder: Path) -> None:
        """Write it as a whole; a power cut leaves the former one or this one."""
        disk.write_whole(folder / MANIFEST, self.pack())

    @classmethod
    def load(cls, disk: Disk, folder: Path) -> Manifest:
        """Read a store's manifest.

        Raises:
            NotFoundError: There is no store in this folder.
            MigrationError: A newer version of the library made it.
            CorruptionError: The file is damaged.
        """
        path = folder / MANIFEST
        if not disk.exists(path):
            raise NotFoundError(f"{folder} is not a store: it has no {MANIFEST}")
        return cls.unpack(disk.read_whole(path), str(path))

    @classmethod
    def unpack(cls, packed: bytes, name: str) -> Manifest:
        """Read what `pack` returned.

        Args:
            packed: It.
            name: What to call it in a message.

        Raises:
            MigrationError: A newer version of the library made it.
            CorruptionError: It is damaged.
        """
        try:
            data = json.loads(packed)
            checksum = data.pop("crc32c")
            version = int(data["format"])
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CorruptionError(f"{name} is damaged: {exc}") from exc
        if checksum != _checksum(data):  # first: every format is to keep it, and a flipped bit is no format
            raise CorruptionError(f"{name} is damaged: its checksum does not fit")
        if version > FORMAT:
            raise MigrationError(
                f"{name} has format {version}, this library knows formats up to {FORMAT}",
                hint="install a newer expstore",
            )
        del data["format"]
        data["schema"] = Schema.from_json(data["schema"]) if data["schema"] else None
        data["traj_key"] = to_key(data["traj_key"]) if data["traj_key"] else None
        data["done_keys"] = tuple(map(to_key, data["done_keys"])) if data["done_keys"] else None
        data["reward_key"] = to_key(data["reward_key"])
        data["gaps"] = _unpack_gaps(data.get("gaps", []))
        data["dims"] = tuple(map(int, data.get("dims", ())))
        data["implied"] = tuple(map(to_key, data.get("implied", ())))
        ranked = data.get("ranking")
        data["ranking"] = Ranking(to_key(ranked["key"]), ranked["reduction"]) if ranked else None
        specs = data.get("specs")
        data["specs"] = json.dumps(specs, separators=(",", ":")) if specs else ""
        return cls(**data)


def _pack_gaps(gaps: Gaps) -> Any:
    """Return runs as JSON keeps them: pairs, or, of many, the text of their compressed distances."""
    if len(gaps) <= _LISTED:
        return list(gaps)
    bounds = np.stack([gaps.first, gaps.last], axis=1).reshape(-1)
    return base64.b64encode(zlib.compress(np.diff(bounds, prepend=0).astype("<i8").tobytes(), 1)).decode()


def _unpack_gaps(kept: Any) -> Gaps:
    if not isinstance(kept, str):
        return Gaps.of((first, last) for first, last in kept)
    bounds = np.cumsum(np.frombuffer(zlib.decompress(base64.b64decode(kept)), "<i8")).reshape(-1, 2)
    return Gaps(np.ascontiguousarray(bounds[:, 0]), np.ascontiguousarray(bounds[:, 1]))


def _checksum(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return f"{google_crc32c.value(text.encode()):08x}"


def check_target(disk: Disk, target: Path) -> None:
    """Refuse a path at which nothing can be made.

    Raises:
        StateError: Something is there, or it would lie inside a store.
        NotFoundError: There is no folder for it.
    """
    if disk.exists(target):
        raise StateError(f"{target} exists already", hint="choose another path")
    folder = target.resolve().parent
    if not disk.is_dir(folder):
        raise NotFoundError(f"there is no folder {folder} in which to make {target.name}", hint="make it")
    for above in (folder, *folder.parents):
        if disk.exists(above / MANIFEST):
            raise StateError(f"{target} would lie inside the store {above}", hint="choose another path")
