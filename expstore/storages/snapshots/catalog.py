"""The snapshots in a folder: list them, find one, and remove old ones.

Used by buffers, `expstore.open` and the command line; `expstore.storages.snapshots.create` makes the
snapshots. A snapshot (also called a version) is a folder `vNNNN` with a complete, closed store and
`version.json`. A folder whose name ends in `.tmp` is not a snapshot. This module never changes a file of a
snapshot.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import google_crc32c

from expstore.core.arguments import check_whole
from expstore.core.parsing import INVALID
from expstore.disk.bulk_files import remove_files
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.disk.threads import Threads
from expstore.errors import CorruptionError, NotFoundError, SnapshotError
from expstore.storages.format.manifest import MANIFEST
from expstore.storages.format.paths import VERSION

#: Folder inside a store's folder for the snapshots that `tag` makes.
OWN_FOLDER = "versions"
SCRAP = ".tmp"
#: Lock file that is held while a snapshot is made.
LOCK = "LOCK"

_NAME = re.compile(r"v(\d{4,})")
_TAG = re.compile(r"(?!v?\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Description of one snapshot.

    Args:
        number: 1, 2, 3, ... in the order in which the snapshots were made.
        tag: Its name, if it has one; a snapshot with a tag is never removed.
        time: When it was made, seconds since 1970.
        rows: How many rows it holds.
        episodes: How many episodes have rows in it.
        new_bytes: How many bytes were written for it; it shares the other bytes with the previous snapshot.
        disk_bytes: How many bytes it takes on the disk, including shared bytes; 0 if this was not measured.
        path: Its folder.
        sampler: Settings of the buffer's sampler that a program changes at run time; `loads` restores them.
    """

    number: int
    tag: str | None
    time: float
    rows: int
    episodes: int
    new_bytes: int
    disk_bytes: int = 0
    path: Path = Path()
    sampler: dict[str, Any] = field(default_factory=dict, hash=False)

    def pack(self) -> bytes:
        """Return the contents of version.json."""
        data = dataclasses.asdict(self)
        del data["disk_bytes"], data["path"]
        data["crc32c"] = _checksum(data)
        return json.dumps(data, indent=1).encode()

    @classmethod
    def load(cls, disk: Disk, folder: Path) -> Version:
        """Read a snapshot's description.

        Raises:
            CorruptionError: The description is damaged or missing.
        """
        path = folder / VERSION
        try:
            data = json.loads(disk.read_whole(path))
            checksum = data.pop("crc32c")
            if checksum != _checksum(data):
                raise ValueError("its checksum does not match")
            return cls(**data, path=folder)
        except (OSError, *INVALID) as exc:
            raise CorruptionError(f"{path} is damaged: {exc}", hint="open another version") from exc


def _checksum(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return f"{google_crc32c.value(text.encode()):08x}"


def version_name(number: int) -> str:
    """Return the name of a snapshot's folder.

    >>> from expstore.storages.snapshots.catalog import version_name
    >>> version_name(7)
    'v0007'
    """
    return f"v{number:04d}"


def check_tag(tag: str) -> None:
    """Raise SnapshotError if a snapshot cannot have this name."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag):
        raise SnapshotError(
            f"{tag!r} is not a valid tag",
            hint="use 1 to 100 letters, digits or . _ -, but not a number",
        )


def _numbers(disk: Disk, path: Path) -> list[int]:
    found = [_NAME.fullmatch(name) for name in disk.names(path)]
    return sorted(int(match[1]) for match in found if match)


def next_number(disk: Disk, place: Path) -> int:
    """Return the number of the next snapshot."""
    return max(_numbers(disk, place), default=0) + 1


def foreign_names(disk: Disk, place: Path) -> list[str]:
    """Return the names in a folder that do not belong to snapshots."""
    names = [name for name in disk.names(place) if name != LOCK]
    return [name for name in names if not _NAME.fullmatch(name.removesuffix(SCRAP))]


def is_snapshots(disk: Disk, path: Path) -> bool:
    """Return whether a folder has snapshots, as `dumps` creates it."""
    return disk.is_dir(path) and bool(_numbers(disk, path)) and not disk.exists(path / MANIFEST)


def list_versions(disk: Disk, path: Path) -> list[Version]:
    """Return the snapshots in a folder, the oldest first, without those whose description is damaged."""
    found = []
    for number in _numbers(disk, path):
        try:
            found.append(Version.load(disk, path / version_name(number)))
        except CorruptionError:
            continue
    return found


def versions(path: str | Path) -> list[Version]:
    """List the snapshots that `dumps` or `tag` have made.

    Args:
        path: The folder that was passed to `dumps`, or a store, whose tagged snapshots are listed.

    Returns:
        The snapshots, the oldest first; an empty list if the folder has no snapshots.

    Raises:
        NotFoundError: There is no such folder.

    Example:
        >>> version = rb.dumps("backup")
        >>> for version in expstore.versions("backup"):
        ...     print(version.number, version.rows)
        1 200
    """
    disk, path = Disk(), local_path(path)
    if not disk.exists(path):
        raise NotFoundError(f"{path} does not exist")
    found = list_versions(disk, place_of(disk, path))
    return [dataclasses.replace(version, disk_bytes=disk.measure_space(version.path)) for version in found]


def place_of(disk: Disk, path: Path) -> Path:
    """Return the folder with the snapshots: `path`, or the one inside the store at `path`."""
    return path / OWN_FOLDER if disk.exists(path / MANIFEST) else path


def find_version(disk: Disk, path: Path, version: int | str | None = None) -> Path:
    """Return the folder of one snapshot.

    Args:
        disk: The disk on which files are accessed.
        path: The folder passed to `dumps`; a store with tagged snapshots; or a snapshot itself.
        version: The snapshot's number or tag; None: the newest.

    Raises:
        SnapshotError: There is no such snapshot; the message lists the existing ones.
        ArgumentError: `version` is neither a number nor text.
    """
    if disk.exists(path / VERSION) and version is None:
        return path
    if not disk.is_dir(path):
        found = "is a file, versions are in a folder" if disk.exists(path) else "does not exist"
        raise SnapshotError(f"{path} {found}", hint="pass the folder that was passed to dumps(), or a store")
    place = place_of(disk, path)
    numbers = _numbers(disk, place)
    if version is None:
        number = max(numbers, default=0)
    elif isinstance(version, str) and not re.fullmatch(r"v?\d+", version):
        tags = {known.tag: known.number for known in list_versions(disk, place)}
        number = tags.get(version, 0)
    elif isinstance(version, str):
        number = int(version.removeprefix("v"))
    else:
        number = check_whole("version", version, hint="use the number of a snapshot, or its tag")
    if number not in numbers:
        raise _build_missing_error(disk, path, place, version)
    return place / version_name(number)


def store_meant(disk: Disk, path: Path) -> Path:
    """Return `path`, or the newest snapshot in it if it is a folder of snapshots."""
    return find_version(disk, path) if is_snapshots(disk, path) else path


def _build_missing_error(disk: Disk, path: Path, place: Path, version: int | str | None) -> SnapshotError:
    known = [str(v.number) + (f" ({v.tag})" if v.tag else "") for v in list_versions(disk, place)]
    listed = f"there are {', '.join(known)}" if known else "it holds no snapshots"
    asked = "version" if version is None else f"version {version!r}"
    hint = "" if known else "make one with dumps() or tag()"
    if not known and disk.exists(path / "buffer_metadata.json"):
        hint = "torchrl has written it: load it with loads() of a buffer, or import it by `expstore import`"
    return SnapshotError(f"{path} has no {asked}: {listed}", hint=hint)


# -- removing --------------------------------------------------------------------------------------


def remove_scraps(disk: Disk, place: Path) -> None:
    """Remove snapshots that were not finished, or whose removal was interrupted."""
    for name in disk.names(place):
        if name.endswith(SCRAP):
            path = place / name
            (disk.remove_tree if _NAME.match(name) else disk.unlink)(path)


def prune(disk: Disk, place: Path, keep: int, pool: Threads) -> None:
    """Remove the oldest snapshots without a tag so that `keep` of them remain; never the newest snapshot.

    After a crash each snapshot is complete, or has a name that is not a snapshot's.
    """
    known = [version for version in list_versions(disk, place) if version.tag is None]
    newest = max(_numbers(disk, place), default=0)
    old = [version for version in known[:-keep] if version.number != newest]
    if not old:
        return
    scraps = [version.path.with_name(version.path.name + SCRAP) for version in old]
    for version, scrap in zip(old, scraps, strict=True):
        disk.rename(version.path, scrap)
    disk.sync_dir(place)  # otherwise a power failure could restore the name without its contents
    for scrap in scraps:
        remove_files(disk, scrap, pool)
        disk.remove_tree(scrap)
