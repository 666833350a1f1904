"""The list of versions at one address, and what each version consists of.

Used by all modules that change or read versions. `versions.json` is replaced only if nobody else has
replaced it meanwhile: that is the commit of every change. Each push has an id of its own, and its objects
have the id in their names: `manifests/ID/SHA256.json` lists the files of the version, `parts/ID/SHA256` has
the bytes of a file. So no object but the list is ever written twice with other bytes. A version of a store
that is shipped to the address has no files: it names a shipped state (`expstore.cold.ship_log`). This module
deletes nothing.

A version may refer to a part of another push, so that bytes are sent once. When parts may be deleted follows
from two rules:

- A part is deleted only after a list was committed in which its push is retired and no version refers to it.
- A new version refers only to parts that a version of the list before refers to, or whose push is not retired
  there.

So a part that may be deleted is never referred to again, however late a program deletes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from expstore.cold.object_storage import ObjectStorage
from expstore.core.parsing import INVALID, MOST_IDS, check_number
from expstore.errors import CorruptionError, MigrationError, SnapshotError

if TYPE_CHECKING:
    from expstore.cold.bucket import Bucket

LIST, PARTS, MANIFESTS = "versions.json", "parts", "manifests"
#: Where the states of a shipped store are.
STATES = "manifest"
#: Newest format of the objects that `seal` makes. Lists of files, and lists of versions that all have files,
#: are in the first one.
FORMAT, _FIRST_FORMAT = 2, 1
_DAMAGED = "pull another version, or push the version again to another address"
_PART = re.compile(r"[0-9a-f]{22}/[0-9a-f]{64}")
_STATE = re.compile(r"(\d{8}-\d{10})?")
#: The most folders above a file of a version; a store has the parts of its fields' names and a few more.
_DEPTH = 100


def make_push_id(seconds: float | None = None) -> str:
    """Return a new id of a push: the time in milliseconds and random digits, 22 hexadecimal digits.

    Args:
        seconds: Return the lowest id of a push at this time instead, in seconds since 1970.
    """
    if seconds is not None:
        return f"{max(0, int(seconds * 1000)):012x}" + "0" * 10
    return f"{int(time.time() * 1000):012x}{os.urandom(5).hex()}"


def part_key(part: str) -> str:
    """Return the key of the object with a part's bytes."""
    return f"{PARTS}/{part}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteVersion:
    """Description of one version on an object storage.

    Args:
        number: 1, 2, 3, ... in the order in which the versions were committed at this address.
        tag: The name that `rb.snapshots.tag` gave it, or None; `prune` keeps a version with a tag.
        time: When the version was made, seconds since 1970.
        rows: How many rows it has.
        episodes: How many episodes have rows in it.
        files: How many files it has; 0 if it is a state of a shipped store.
        bytes: How many bytes its files have, without holes; of a shipped state, its parts.
        new_parts: How many parts were sent for it; it shares the others with earlier versions, or with the
            shipped store.
        new_bytes: How many bytes these parts have.
        store: `rb.stats()["uuid"]` of the store that it was made from.
        push: The id of the push that sent it.
        source: SHA-256 of its `version.json`; of a shipped state, that of `manifest`.
        manifest: SHA-256 of the list of its files, or of the object with the shipped state.
        state: The shipped state, as `expstore.cold.ship_log` numbers it; "": the version has files.
    """

    number: int
    tag: str | None
    time: float
    rows: int
    episodes: int
    files: int
    bytes: int
    new_parts: int
    new_bytes: int
    store: str
    push: str
    source: str
    manifest: str
    state: str = ""

    def pack(self) -> dict[str, Any]:
        """Return its entry in the list of versions."""
        return {name: value for name, value in asdict(self).items() if name != "state" or value}


def manifest_key(version: RemoteVersion) -> str:
    """Return the key of the object that lists the files of a version, or that has its state."""
    if version.state:
        return f"{STATES}/{version.state}"
    return f"{MANIFESTS}/{version.push}/{version.manifest}.json"


@dataclass(frozen=True, slots=True)
class VersionList:
    """The versions at one address.

    Args:
        versions: Oldest first.
        next_number: Number of the next version.
        retired_before: All pushes with lower ids are retired.
        retired: Ids of other retired pushes.
    """

    versions: tuple[RemoteVersion, ...] = ()
    next_number: int = 1
    retired_before: str = ""
    retired: frozenset[str] = frozenset()

    @classmethod
    def load(cls, bucket: Bucket) -> tuple[VersionList, dict[str, str] | None]:
        """Read the list, and the tag that `commit` takes; an empty list and None if it does not exist.

        Raises:
            CorruptionError: The list is damaged.
            MigrationError: A newer version of expstore wrote it.
        """
        found = bucket.read_tagged(LIST)
        if found is None:
            return cls(), None
        return cls.unpack(found[0], f"{LIST} in {bucket.name}"), found[1]

    def commit(self, bucket: Bucket, tag: dict[str, str] | None) -> bool:
        """Write the list if it has not changed since it was read; return whether it was written."""
        return bucket.create(LIST, self.pack()) if tag is None else bucket.replace(LIST, self.pack(), tag)

    def pack(self) -> bytes:
        """Return the bytes of the list."""
        return seal(
            {
                "format": FORMAT if any(version.state for version in self.versions) else _FIRST_FORMAT,
                "versions": [version.pack() for version in self.versions],
                "next_number": self.next_number,
                "retired_before": self.retired_before,
                "retired": sorted(self.retired),
            }
        )

    @classmethod
    def unpack(cls, data: bytes, name: str) -> VersionList:
        """Read the bytes of a list."""
        with_sum = unseal(data, name)
        try:
            return cls(
                tuple(_check_version(RemoteVersion(**version)) for version in with_sum["versions"]),
                check_number("next_number", with_sum["next_number"]),
                str(with_sum["retired_before"]),
                frozenset(map(str, with_sum["retired"])),
            )
        except INVALID as exc:
            raise CorruptionError(f"{name} is damaged: {exc!r}", hint=_DAMAGED) from exc

    def is_retired(self, push: str) -> bool:
        """Return whether parts of a push may be deleted as soon as no version refers to them."""
        return push < self.retired_before or push in self.retired

    def add(self, version: RemoteVersion) -> VersionList:
        """Return the list with one more version."""
        return replace(self, versions=(*self.versions, version), next_number=version.number + 1)

    def find(self, version: int | str | None, name: str) -> RemoteVersion:
        """Return a version by number or tag; None: the newest.

        Raises:
            SnapshotError: There is no such version; the message lists the versions that exist.
        """
        for known in reversed(self.versions):
            text = str(known.number)
            if version is None or (version in (known.tag, known.number, text, f"v{text}")):
                return known
        listed = ", ".join(str(v.number) + (f" ({v.tag})" if v.tag else "") for v in self.versions)
        asked = "version" if version is None else f"version {version!r}"
        raise SnapshotError(
            f"{name} has no {asked}: " + (f"there are {listed}" if listed else "it has no versions"),
            hint="" if listed else "make one with `expstore versions push`",
        )


@dataclass(frozen=True, slots=True)
class PartFile:
    """One file of a version.

    Args:
        part: The part with its bytes, `PUSH/SHA256`; "" if it has none.
        size: Length of the file, bytes.
        runs: Where the part's bytes belong, as (start, stop); zeros lie between. None: the part is the file.
    """

    part: str
    size: int
    runs: tuple[tuple[int, int], ...] | None = None

    @property
    def sha256(self) -> str:
        """The checksum of the part."""
        return self.part.rpartition("/")[2]

    @property
    def push(self) -> str:
        """The push that sent the part."""
        return self.part.partition("/")[0]

    @property
    def data_bytes(self) -> int:
        """The length of the part, bytes."""
        return self.size if self.runs is None else sum(stop - start for start, stop in self.runs)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Where the part's bytes belong, as (start, stop)."""
        return ((0, self.size),) if self.runs is None else self.runs

    def check(self) -> None:
        """Raise ValueError if the description is impossible."""
        at = 0
        for start, stop in self.runs or ():
            if not at <= start < stop <= self.size:
                raise ValueError(f"{self.part!r} has impossible runs")
            at = stop
        if not 0 <= self.size <= MOST_IDS:
            raise ValueError(f"{self.part!r} has an impossible size")
        if bool(self.part) != bool(self.data_bytes) or (self.part and not _PART.fullmatch(self.part)):
            raise ValueError(f"{self.part!r} is not the name of a part")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The files and folders of a version.

    Args:
        files: By path in the version's folder, with slashes.
        folders: All folders, parents first.
    """

    files: dict[str, PartFile]
    folders: tuple[str, ...] = ()

    def pack(self) -> bytes:
        """Return the bytes of the manifest."""
        files = {path: [file.part, file.size, file.runs] for path, file in sorted(self.files.items())}
        return seal({"format": _FIRST_FORMAT, "files": files, "folders": list(self.folders)})

    @classmethod
    def load(cls, bucket: Bucket, version: RemoteVersion) -> Manifest:
        """Read the manifest of a version.

        Raises:
            CorruptionError: It is missing or damaged, or names files outside the version's folder.
        """
        name, data = read_manifest(bucket, version)
        content = unseal(data, name)
        try:
            files = {
                _check_inside(path): PartFile(
                    part, int(size), None if runs is None else tuple((int(a), int(b)) for a, b in runs)
                )
                for path, (part, size, runs) in content["files"].items()
            }
            for file in files.values():
                file.check()
            return cls(files, tuple(map(_check_inside, content["folders"])))
        except INVALID as exc:
            raise CorruptionError(f"{name} is damaged: {exc}", hint=_DAMAGED) from exc

    @property
    def parts(self) -> dict[str, int]:
        """The parts that the files refer to, with their lengths in bytes."""
        return {file.part: file.data_bytes for file in self.files.values() if file.part}


def read_manifest(bucket: Bucket, version: RemoteVersion) -> tuple[str, bytes]:
    """Return a name for messages, and the bytes of the object that `manifest_key` names.

    Raises:
        CorruptionError: It is missing or damaged.
    """
    what = "state" if version.state else "list of files"
    name = f"the {what} of version {version.number} in {bucket.name} ({manifest_key(version)})"
    data = bucket.read(manifest_key(version))
    if data is None:
        raise CorruptionError(f"{name} is missing", hint=_DAMAGED)
    if hashlib.sha256(data).hexdigest() != version.manifest:
        raise CorruptionError(f"{name} is damaged: its SHA-256 does not match", hint=_DAMAGED)
    return name, data


def _check_version(version: RemoteVersion) -> RemoteVersion:
    """Return a version of a list; raise ValueError if a value has another type or form."""
    for name in ("number", "rows", "episodes", "files", "bytes", "new_parts", "new_bytes"):
        check_number(name, getattr(version, name))
    if not _PART.fullmatch(f"{version.push}/{version.manifest}"):
        raise ValueError(f"{version.push!r} and {version.manifest!r} do not name a list of files")
    if not _STATE.fullmatch(version.state):
        raise ValueError(f"{version.state!r} is not the name of a state")
    texts = (version.store, version.source, version.tag or "")
    if not all(isinstance(text, str) for text in texts) or type(version.time) not in (int, float):
        raise ValueError(f"version {version.number} has values of other types")
    return version


def _check_inside(path: str) -> str:
    """Return a path; raise ValueError if it may lie outside the folder it is relative to."""
    pure = PurePosixPath(path)
    if len(pure.parts) > _DEPTH:
        raise ValueError(f"{path[:80]!r}... is more than {_DEPTH} folders deep")
    if not path or "\\" in path or "\0" in path or pure.is_absolute() or ".." in pure.parts:
        raise ValueError(f"{path!r} is not a path inside a version")
    return path


def seal(content: dict[str, Any]) -> bytes:
    """Return JSON with a checksum of its content."""
    return json.dumps(content | {"sha256": _checksum(content)}, indent=1).encode()


def unseal(data: bytes, name: str) -> dict[str, Any]:
    """Return the content of such JSON.

    Raises:
        CorruptionError: It is damaged.
        MigrationError: A newer version of expstore wrote it.
    """
    try:
        content: dict[str, Any] = json.loads(data)
        checksum = content.pop("sha256")
        if checksum != _checksum(content):
            raise ValueError("its checksum does not match")
        version = int(content["format"])
    except INVALID as exc:
        raise CorruptionError(f"{name} is damaged: {exc}", hint=_DAMAGED) from exc
    if version > FORMAT:
        raise MigrationError(f"{name} has format {version}, this version of expstore knows {FORMAT}")
    return content


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@contextlib.contextmanager
def note_removal(bucket: Bucket, version: RemoteVersion) -> Iterator[None]:
    """Say that a version was removed while it was read, where a part would be reported as missing.

    Raises:
        SnapshotError: The block has raised CorruptionError, and the version is no longer in the list.
    """
    try:
        yield
    except CorruptionError as exc:
        if version in VersionList.load(bucket)[0].versions:
            raise
        raise SnapshotError(
            f"version {version.number} was removed from {bucket.name} while it was read",
            hint="use a version that is in the list",
        ) from exc


def find_references(bucket: Bucket, known: Iterable[RemoteVersion]) -> dict[str, int]:
    """Return the parts to which the files of versions refer, with their lengths in bytes."""
    found: dict[str, int] = {}
    for version in known:
        if not version.state:
            found |= Manifest.load(bucket, version).parts
    return found


def versions(where: str | ObjectStorage | Any) -> list[RemoteVersion]:
    """List the versions on an object storage.

    Args:
        where: A URL such as `s3://bucket/run`, an `ObjectStorage`, or a store of obstore.

    Returns:
        The versions, the oldest first; an empty list if there are none.

    Raises:
        StateError: The URL is not one of an object storage, or contains credentials.
        RemoteError: The server does not answer, or refuses the request.
        CorruptionError: The list is damaged.

    Example:
        >>> for version in expstore.cold.versions("s3://bucket/run"):
        ...     print(version.number, version.tag, version.rows)
    """
    return list(VersionList.load(ObjectStorage.of(where).connect())[0].versions)
