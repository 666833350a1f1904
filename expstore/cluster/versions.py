"""The file CLUSTER.json, which says which versions of the shards belong together.

Used by the buffer over several shards. The versions themselves are in the folders of the shards.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from expstore.core.parsing import INVALID
from expstore.disk.files import Disk
from expstore.errors import SnapshotError

_FILE, _FORMAT = "CLUSTER.json", 1


@dataclass(frozen=True)
class ClusterVersion:
    """A version of several shards.

    Args:
        tag: The name of the version of each shard.
        shards: Uuids of the shards, in their order.
        rows: Number of rows of each shard.
        time: When it was made, seconds since 1970.
        draws: Where the draws of the buffer were: the result of its `state_dict`.
    """

    tag: str
    shards: list[str]
    rows: list[int]
    time: float
    draws: dict[str, Any]


def write_version(
    folder: Path, tag: str, shards: list[str], rows: list[int], draws: dict[str, Any]
) -> ClusterVersion:
    """Write the file: the former one is replaced by a rename, so that there is always a complete one.

    Raises:
        StorageError: The disk failed.
    """
    version, disk = ClusterVersion(tag, shards, rows, time.time(), draws), Disk()
    disk.make_dir(folder)
    with disk.build_file(folder / _FILE, folder / f"{_FILE}.{tag}.tmp") as file:
        file.write(json.dumps({"format": _FORMAT} | asdict(version), indent=1).encode(), 0)
    disk.sync_dir(folder)
    return version


def read_version(folder: Path) -> ClusterVersion:
    """Return what the file says.

    Raises:
        SnapshotError: There is no such file, or it cannot be read.
        StorageError: The disk failed.
    """
    disk, path = Disk(), folder / _FILE
    if not disk.exists(path):
        raise SnapshotError(f"there is no {_FILE} in {folder}", hint="pass the folder that dumps() was given")
    try:
        facts = json.loads(disk.read_whole(path))
        if facts["format"] > _FORMAT:
            raise SnapshotError(
                f"{path} is of format {facts['format']}, this version reads format {_FORMAT}",
                hint="upgrade expstore",
            )
        return ClusterVersion(**{field.name: facts[field.name] for field in fields(ClusterVersion)})
    except INVALID as exc:
        raise SnapshotError(f"{path} cannot be read: {exc}") from exc
