"""`push`: send a version of a store to an object storage.

Used by programs and by the command line. What the server has is not sent again: files that are hard links to
files of the version pushed before are not even read. A version of a store that is shipped to the address
names a shipped state, and shares all parts with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expstore.cold.object_storage import ObjectStorage
from expstore.cold.parts import LocalPart, read_part, run_all
from expstore.cold.ship import Pinned, Shipper
from expstore.cold.ship_settings import Origins, Ship
from expstore.cold.version_list import (
    PARTS,
    Manifest,
    PartFile,
    RemoteVersion,
    VersionList,
    make_push_id,
    manifest_key,
    part_key,
)
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.errors import ArgumentError, CorruptionError, SnapshotError, StateError
from expstore.storages.factory import open_storage
from expstore.storages.format.manifest import MANIFEST
from expstore.storages.format.manifest import Manifest as StoreManifest
from expstore.storages.format.paths import VERSION
from expstore.storages.snapshots.catalog import OWN_FOLDER, Version, check_tag, find_version, version_name
from expstore.storages.snapshots.create import dump
from expstore.storages.snapshots.rebuild import bytes_of

if TYPE_CHECKING:
    from expstore.buffers.replay_buffer import ReplayBuffer
    from expstore.cold.bucket import Bucket
    from expstore.storages.engine.store import Store

#: Versions without a tag that a push leaves in a store's folder: its own, and the one before, whose files the
#: next push compares with.
_KEEP = 2
#: Most attempts to commit while other programs change the list.
_ROUNDS = 100


def push(
    source: ReplayBuffer | str | Path,
    where: str | ObjectStorage | Any,
    *,
    version: int | str | None = None,
    tag: str | None = None,
    any_store: bool = False,
) -> RemoteVersion:
    """Send a version of a store to an object storage, completely or not at all.

    Parts that the server has from earlier versions, or from a push that was interrupted, are not sent again.
    The version exists once its entry in the list of versions is written, which is one conditional request;
    repeat a push that failed. A version that is there already is returned, not sent twice.

    If the store is shipped to the same address, a new version is a shipped state: what is not shipped yet is
    sent, and nothing is written to `versions/`. A path of such a store claims the address, as an opening with
    `ship=` does.

    Threads: `source` may be sampled and extended meanwhile. Processes: any number may push to one address;
    each commits its own version. Crashes: after a kill at any request the address has whole versions only.

    Args:
        source: A buffer that has its store open for writing, the folder of a store that is not open, or a
            folder of versions that `dumps` made.
        where: A URL such as `s3://bucket/run`, an `ObjectStorage`, or a store of obstore.
        version: Number or tag of an existing version of the source. None: the newest of a folder of versions;
            of a store, a new version in `versions/` in its folder. The last two stay there, so that the next
            push only reads what has changed.
        tag: Name of the new version, which `prune` keeps; None: it has none. Not with `version`, which may
            have a tag of its own.
        any_store: Whether the address may have versions of another store, as after a `pull`.

    Returns:
        The version on the object storage; `new_parts` and `new_bytes` say what was sent for it.

    Raises:
        ArgumentError: `source` is neither a buffer nor a path, or both `version` and `tag` are passed.
        StateError: The store has no folder, the address has versions of another store, the
            server ignores conditional writes, or the URL contains credentials.
        SnapshotError: There is no such version, the tag is invalid, or another version at the address has it.
        LockedError: Another process has the store open: pass a version that its `dumps` has made. Or another
            writer has claimed the address to which the store is shipped.
        RemoteError: The server does not answer, or refuses a request. Nothing was committed, unless the
            answer to the last request was lost; repeat the call in both cases.
        StorageError: A file cannot be read.

    Example:
        >>> version = expstore.cold.push(rb, "s3://bucket/run")
        >>> version.rows
        200
    """
    storage, sampler = _find_storage(source)
    path = local_path(source) if isinstance(source, str | os.PathLike) else _find_folder(storage)
    bucket, disk = ObjectStorage.of(where).connect(), Disk()
    if version is not None or not disk.exists(path / MANIFEST) or disk.exists(path / VERSION):
        if tag is not None:
            raise ArgumentError(f"tag={tag!r} is for a new version", hint="leave tag or version out")
        bucket.check_conditions()
        return _FilePush(bucket, any_store, disk, find_version(disk, path, version)).run()
    if tag is not None:
        check_tag(tag)
    opened = contextlib.closing(open_storage(path)) if storage is None else contextlib.nullcontext(storage)
    with opened as writable:
        if (shipper := _find_shipper(writable.writer(), where, bucket)) is not None:
            bucket.check_replaces()
            return _StatePush(bucket, any_store, shipper, tag, writable.manifest.uuid).run()
        bucket.check_conditions()
        # Refuse another store's address before making a version.
        _check_store(bucket, VersionList.load(bucket)[0], writable.manifest.uuid, any_store)
        local = dump(writable, path / OWN_FOLDER, keep=_KEEP, tag=tag, sampler=sampler)
        return _FilePush(bucket, any_store, disk, local.path).run()


def _find_storage(source: Any) -> tuple[Any, dict[str, Any] | None]:
    """Return the storage of a buffer, and the sampler's settings; (None, None) for a path."""
    if isinstance(source, str | os.PathLike):
        return None, None
    if not hasattr(source, "snapshots"):
        raise ArgumentError(
            f"cannot push a {type(source).__name__}", hint="pass a buffer that has a store open, or a path"
        )
    return source.storage, source.sampler.settings()


def _find_folder(storage: Any) -> Path:
    """Return the folder of a store."""
    if storage.path is None or storage.manifest is None:
        raise StateError(
            "this buffer has no folder, so that it cannot be pushed",
            hint="write a version with rb.dumps(path), then push(path, ...)",
        )
    return Path(storage.path)


def _find_shipper(storage: Store, where: Any, bucket: Bucket) -> Shipper | None:
    """Return what ships a store to an address; None if it is shipped elsewhere, or not at all."""
    shipper = storage.holders.shipping
    if shipper is None and Origins.load(storage.disk, storage.path).url == bucket.name:
        shipper = Shipper(Ship(where))
        shipper.start(storage)
    return shipper if isinstance(shipper, Shipper) and shipper.ships_to(where) else None


def _check_store(bucket: Bucket, known: VersionList, store: str, any_store: bool) -> None:
    """Raise StateError if an address has versions of another store and may not."""
    others = {version.store for version in known.versions} - {store}
    if others and not any_store:
        raise StateError(
            f"{bucket.name} has versions of another store ({min(others)}, not {store})",
            kind="mismatch",
            hint="choose another address; any_store=True or --any-store pushes there nevertheless",
        )


class _Push(ABC):
    """Send one version, and add it to the list.

    Args:
        bucket: Where to send it.
        any_store: Whether the address may have versions of another store.
        tag: The version's tag, or None.
        store: The uuid of the store.
    """

    def __init__(self, bucket: Bucket, any_store: bool, tag: str | None, store: str) -> None:
        self._bucket, self._any_store, self._tag, self._store = bucket, any_store, tag, store
        self._id = make_push_id()
        #: `RemoteVersion.source`; "" as long as it is not known.
        self._source = ""

    @abstractmethod
    def _send(self, known: VersionList, tag: dict[str, str] | None) -> RemoteVersion | None:
        """Send what the server lacks; return the version, or None if the list has changed meanwhile.

        Args:
            known: The list.
            tag: What `VersionList.commit` takes.
        """

    @abstractmethod
    def _forget(self) -> None:
        """Forget what was sent under the former id."""

    def run(self) -> RemoteVersion:
        """Send what the server lacks, and commit; again if another push or a prune was faster."""
        for _ in range(_ROUNDS):
            known, tag = VersionList.load(self._bucket)
            if done := self._find_done(known):
                return done
            self._check(known)
            if known.is_retired(self._id):
                self._take_new_id(known)
            version = self._send(known, tag)
            if version is not None and known.add(version).commit(self._bucket, tag):
                return version
        raise StateError(
            f"other processes changed the versions in {self._bucket.name} {_ROUNDS} times meanwhile",
            hint="run the push again",
        )

    def _find_done(self, known: VersionList) -> RemoteVersion | None:
        """Return the version if it is in the list: it was pushed before, or an answer was lost."""
        found = (version for version in known.versions if self._source and version.source == self._source)
        return next(found, None)

    def _check(self, known: VersionList) -> None:
        _check_store(self._bucket, known, self._store, self._any_store)
        if self._tag is not None and self._tag in [version.tag for version in known.versions]:
            raise SnapshotError(
                f"{self._bucket.name} already has a version {self._tag!r}",
                hint="choose another tag or another address",
            )

    def _take_new_id(self, known: VersionList) -> None:
        """Continue under a new id: a prune has given up what this push has sent."""
        self._id = make_push_id()
        self._forget()
        if known.is_retired(self._id):
            raise StateError(
                f"the clock of this machine ({time.strftime('%Y-%m-%d %H:%M:%S')}) is more than a day "
                "behind that "
                f"of a machine that pruned {self._bucket.name}",
                hint="set the clock",
            )


class _StatePush(_Push):
    """Push the present state of a store that is shipped to the address.

    Args:
        bucket: The address.
        any_store: Whether the address may have versions of another store.
        shipper: Ships the store.
        tag: The version's tag, or None.
        store: The uuid of the store.
    """

    def __init__(
        self, bucket: Bucket, any_store: bool, shipper: Shipper, tag: str | None, store: str
    ) -> None:
        super().__init__(bucket, any_store, tag, store)
        self._shipper = shipper
        self._pinned: Pinned | None = None

    def _forget(self) -> None:
        self._pinned = None

    def _send(self, known: VersionList, tag: dict[str, str] | None) -> RemoteVersion:
        if self._pinned is None:
            self._pinned = self._shipper.pin(self._id)
            self._source = self._pinned.state.checksum
        shipped, episodes, parts, size = self._pinned
        state = shipped.state or {}
        return RemoteVersion(
            number=known.next_number,
            tag=self._tag,
            time=shipped.time,
            rows=state["rows"],
            episodes=episodes,
            files=0,
            bytes=bytes_of(state),
            new_parts=parts,
            new_bytes=size,
            store=self._store,
            push=self._id,
            source=self._source,
            manifest=self._source,
            state=shipped.name,
        )


class _FilePush(_Push):
    """Push the files of a local version.

    Args:
        bucket: Where to send it.
        any_store: Whether the address may have versions of another store.
        disk: Access to files.
        folder: The version's folder.
    """

    def __init__(self, bucket: Bucket, any_store: bool, disk: Disk, folder: Path) -> None:
        self._disk, self._folder = disk, folder
        self._version = Version.load(disk, folder)
        super().__init__(bucket, any_store, self._version.tag, StoreManifest.load(disk, folder).uuid)
        self._source = hashlib.sha256(disk.read_whole(folder / VERSION)).hexdigest()
        self._lock = threading.Lock()
        self._read: dict[str, LocalPart] = {}
        #: The parts that this push has sent, by checksum.
        self._sent: dict[str, str] = {}

    def _forget(self) -> None:
        self._sent.clear()

    def _send(self, known: VersionList, tag: dict[str, str] | None) -> RemoteVersion | None:
        base = self._load_base(known, tag)
        if base is None:
            return None
        manifest = self._send_files(known, base)
        data = manifest.pack()
        version = self._describe(known, manifest, data)
        self._bucket.write(manifest_key(version), data)
        return version

    def _load_base(self, known: VersionList, tag: dict[str, str] | None) -> Manifest | None:
        """Return the files of the newest version with files; None if the list has changed meanwhile."""
        versions = [version for version in known.versions if not version.state]
        if not versions:
            return Manifest({})
        try:
            return Manifest.load(self._bucket, versions[-1])
        except CorruptionError:
            # A prune has removed the version. Or it is damaged, and its parts must be sent again.
            return Manifest({}) if VersionList.load(self._bucket)[1] == tag else None

    def _send_files(self, known: VersionList, base: Manifest) -> Manifest:
        """Send the files that the server lacks; return the files of the version."""
        tree = self._disk.tree(self._folder)
        names = [folder.relative_to(self._folder) for folder, _ in tree]
        paths = [
            (name / file).as_posix() for name, (_, files) in zip(names, tree, strict=True) for file in files
        ]
        there = {file.sha256: file.part for file in base.files.values() if file.part}
        there |= self._find_interrupted(known)
        there |= self._sent
        linked = self._find_links(base, paths)
        rest = [path for path in paths if path not in linked]
        sent = run_all("push", [partial(self._send_file, path, there) for path in rest])
        files = linked | dict(zip(rest, sent, strict=True))
        return Manifest(files, tuple(name.as_posix() for name in names if name.parts))

    def _find_interrupted(self, known: VersionList) -> dict[str, str]:
        """Return the parts of pushes that have not committed a version, by checksum."""
        committed = {version.push for version in known.versions} | {self._id}
        found: dict[str, str] = {}
        for push_id in self._bucket.folders(PARTS):
            if push_id not in committed and not known.is_retired(push_id):
                for key, _ in self._bucket.keys(f"{PARTS}/{push_id}"):
                    found[key.rpartition("/")[2]] = f"{push_id}/{key.rpartition('/')[2]}"
        return found

    def _find_links(self, base: Manifest, paths: list[str]) -> dict[str, PartFile]:
        """Return the files that are hard links to files of the newest version on the server."""
        pushed, place = base.files.get(VERSION), self._folder.parent
        for number in range(self._version.number - 1, 0, -1):
            former = place / version_name(number)
            if pushed is None or not self._disk.exists(former / VERSION):
                continue
            if hashlib.sha256(self._disk.read_whole(former / VERSION)).hexdigest() == pushed.sha256:
                return {
                    path: base.files[path]
                    for path in paths
                    if path in base.files and self._disk.is_same_file(self._folder / path, former / path)
                }
        return {}

    def _send_file(self, path: str, there: dict[str, str]) -> PartFile:
        local = self._read.get(path)
        if local is None:
            local = self._read[path] = read_part(self._disk, self._folder / path)
        if not local.sha256:
            return local.file
        with self._lock:
            part = there.get(local.sha256)
            missing = part is None
            if part is None:
                part = there[local.sha256] = f"{self._id}/{local.sha256}"
        if missing:
            self._bucket.write(part_key(part), local.read(self._disk))
            self._sent[local.sha256] = part
        return PartFile(part, local.file.size, local.file.runs)

    def _describe(self, known: VersionList, manifest: Manifest, data: bytes) -> RemoteVersion:
        version, new = (
            self._version,
            [size for part, size in manifest.parts.items() if part.startswith(self._id)],
        )
        return RemoteVersion(
            number=known.next_number,
            tag=version.tag,
            time=version.time,
            rows=version.rows,
            episodes=version.episodes,
            files=len(manifest.files),
            bytes=sum(file.data_bytes for file in manifest.files.values()),
            new_parts=len(new),
            new_bytes=sum(new),
            store=self._store,
            push=self._id,
            source=self._source,
            manifest=hashlib.sha256(data).hexdigest(),
        )
