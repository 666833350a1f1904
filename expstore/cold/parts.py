"""Read files of a version as parts, and write parts back to files; build a version of a shipped store.

Used by push, pull, the cache, and shipping. Blocks of zeros are left out of the part of a file and become
holes again. Its name is the SHA-256 of its bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from expstore.cold.ship_log import ShippedState, state_part_key
from expstore.cold.version_list import Manifest, PartFile, RemoteVersion, part_key
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError
from expstore.storages.format.paths import VERSION
from expstore.storages.snapshots.catalog import Version
from expstore.storages.snapshots.rebuild import build

if TYPE_CHECKING:
    from expstore.cold.bucket import Bucket

_BLOCK_BYTES = 1 << 16
_ZEROS = bytes(_BLOCK_BYTES)
_PIECE_BYTES = 8 << 20
_THREADS = 8
T = TypeVar("T")


def make_pool(name: str) -> ThreadPoolExecutor:
    """Return a pool of threads that send requests and hash bytes."""
    return ThreadPoolExecutor(_THREADS, thread_name_prefix=f"expstore-{name}")


def run_all(name: str, calls: Iterable[Callable[[], T]]) -> list[T]:
    """Return what functions return, in their order; after the first error none that waits is called."""
    with make_pool(name) as pool:
        jobs = [pool.submit(call) for call in calls]
        try:
            return [job.result() for job in jobs]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


@dataclass(frozen=True, slots=True)
class LocalPart:
    """A file of a local version, as a part.

    Args:
        path: The file.
        sha256: The checksum of its bytes without zeros; "" if there are none.
        file: The file's description, with the checksum as its part.
    """

    path: Path
    sha256: str
    file: PartFile

    def read(self, disk: Disk) -> bytes | Iterator[bytes]:
        """Return the part's bytes, piece by piece if there are many."""
        pieces = _read_pieces(disk, self.path, self.file.places)
        return b"".join(pieces) if self.file.data_bytes <= _PIECE_BYTES else pieces


def read_part(disk: Disk, path: Path) -> LocalPart:
    """Read a file; find its zeros and compute its checksum.

    Raises:
        StorageError: The file cannot be read.
    """
    digest, runs, at = hashlib.sha256(), list[tuple[int, int]](), 0
    with contextlib.closing(disk.open(path, write=False)) as file:
        size = file.size()
        while at < size:
            data_start = file.next_data(at) // _BLOCK_BYTES * _BLOCK_BYTES
            at = max(at, data_start)
            block = file.read(at, min(_BLOCK_BYTES, size - at)) if at < size else b""
            if block and block != _ZEROS[: len(block)]:
                digest.update(block)
                stop = at + len(block)
                if runs and runs[-1][1] == at:
                    runs[-1] = (runs[-1][0], stop)
                else:
                    runs.append((at, stop))
            at += _BLOCK_BYTES
    whole = runs == [(0, size)] or not size
    sha256 = digest.hexdigest() if runs else ""
    return LocalPart(path, sha256, PartFile(sha256, size, None if whole else tuple(runs)))


def _read_pieces(disk: Disk, path: Path, places: tuple[tuple[int, int], ...]) -> Iterator[bytes]:
    with contextlib.closing(disk.open(path, write=False)) as file:
        for start, stop in places:
            for at in range(start, stop, _PIECE_BYTES):
                yield file.read(at, min(_PIECE_BYTES, stop - at))


def fetch_file(bucket: Bucket, disk: Disk, entry: PartFile, path: Path, name: str) -> None:
    """Write a file from its part, and check it. The file's folder exists.

    Args:
        bucket: Where the part is.
        disk: Access to files.
        entry: The file.
        path: The file to write.
        name: What the file is, for error messages.

    Raises:
        CorruptionError: The part is missing, or its bytes are not those that were pushed.
        RemoteError: The server does not answer, or refuses the request.
        StorageError: The disk failed or is full.
    """
    with contextlib.closing(disk.open(path, create=True)) as file:
        file.truncate(0)
        file.truncate(entry.size)
        if entry.part:
            _fill(bucket, entry, file, name)
        file.sync()


def _fill(bucket: Bucket, entry: PartFile, file: File, name: str) -> None:
    pieces = bucket.stream(part_key(entry.part))
    if pieces is None:
        raise _build_damaged_error(bucket, entry, name, "is missing")
    digest, places = hashlib.sha256(), list(entry.places)
    start, stop = places.pop(0)
    for piece in pieces:
        digest.update(piece)
        view = piece
        while view:
            if start == stop:
                if not places:
                    raise _build_damaged_error(bucket, entry, name, "is too long")
                start, stop = places.pop(0)
            part = view[: stop - start]
            file.write(part, start)
            start += len(part)
            view = view[len(part) :]
    if start < stop or places:
        raise _build_damaged_error(bucket, entry, name, "is too short")
    if digest.hexdigest() != entry.sha256:
        raise _build_damaged_error(bucket, entry, name, f"has SHA-256 {digest.hexdigest()}")


def _build_damaged_error(bucket: Bucket, entry: PartFile, name: str, found: str) -> CorruptionError:
    return CorruptionError(
        f"{name} is damaged in {bucket.name}: {part_key(entry.part)} {found}",
        hint="pull another version, or push a version again to another address",
    )


def fetch_version(bucket: Bucket, disk: Disk, version: RemoteVersion, folder: Path) -> None:
    """Write a version into a new folder, as a snapshot.

    Raises:
        CorruptionError: A part is missing or damaged; the message names it.
        RemoteError: The server does not answer, or refuses the request.
        StorageError: The disk failed or is full.
    """
    if version.state:
        build_state(bucket, disk, version, ShippedState.of_version(bucket, version), folder)
        return
    manifest = Manifest.load(bucket, version)
    make_folders(disk, manifest, folder)
    run_all(
        "pull",
        [
            partial(fetch_file, bucket, disk, entry, folder / path, f"{path} of version {version.number}")
            for path, entry in manifest.files.items()
        ],
    )


def build_state(
    bucket: Bucket, disk: Disk, version: RemoteVersion, shipped: ShippedState, folder: Path
) -> None:
    """Write a version of a shipped store into a new folder, as a snapshot; raises what `fetch_version` does.

    Args:
        bucket: Where the parts are.
        disk: Access to files.
        version: The version.
        shipped: Its state.
        folder: The folder, missing or empty.
    """
    about = Version(
        number=version.number, tag=version.tag, time=version.time, rows=version.rows,
        episodes=version.episodes, new_bytes=version.new_bytes,
    )  # fmt: skip
    files = {VERSION: about.pack()}
    build(folder, shipped.state or {}, partial(fetch_part, bucket), disk=disk, files=files)


def fetch_part(bucket: Bucket, name: str) -> bytes:
    """Return a part of a shipped state.

    Raises:
        CorruptionError: It is missing.
        RemoteError: The server does not answer, or refuses the request.
    """
    data = bucket.read(state_part_key(name))
    if data is None:
        raise CorruptionError(
            f"{state_part_key(name)} is missing in {bucket.name}",
            hint="use another version, or the folder of the store itself if there is one: "
            "ship it to another address",
        )
    return data


def make_folders(disk: Disk, manifest: Manifest, folder: Path) -> None:
    """Create the folders of a version."""
    disk.make_dir(folder)
    for name in manifest.folders:
        disk.make_dir(folder / name)
