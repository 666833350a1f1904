"""Fetch the files of a data set over HTTP, and list the files of a data set on the Hugging Face Hub.

Used by the data set classes. Interrupted downloads can be continued.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx

from expstore.core.parsing import INVALID
from expstore.disk.files import Disk, File
from expstore.errors import NotFoundError, RemoteError, StorageError
from expstore.exchange.base import Progress, no_progress, open_to_read

HUGGING_FACE = "https://huggingface.co"

_ATTEMPTS = 5
_READ_BYTES = 1 << 20
_TIMEOUT = httpx.Timeout(30.0, connect=15.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """Describe a file of a data set at its public address.

    Args:
        url: Address of the file.
        name: Path relative to the download folder, with "/" between names.
        size: Size in bytes. None: as the server reports.
        sha256: Hash in hexadecimal, checked after the download. None if it is unknown.
    """

    url: str
    name: str
    size: int | None = None
    sha256: str | None = None


def fetch_files(
    files: Sequence[RemoteFile],
    folder: Path,
    *,
    progress: Progress = no_progress,
    pause: Callable[[float], object] = time.sleep,
) -> None:
    """Download files to a folder. Files that are complete there are not fetched again.

    A file has the suffix `.part` until it is complete and its length and hash are checked. A broken
    connection is retried from the byte at which it broke, up to five times in a row without progress. A later
    call continues a partial download if the server still has the same file.

    Args:
        files: The files to fetch.
        folder: Target folder; created if it does not exist.
        progress: Called with the bytes done and the total bytes, 0 if the total is unknown.
        pause: Function that waits for a number of seconds between two attempts.

    Raises:
        NotFoundError: The server does not have a file.
        RemoteError: The server does not answer, or its answers are invalid; the message names the address.
        StorageError: The disk failed, or a file has another length or hash than expected.
    """
    disk = Disk()
    total = sum(file.size or 0 for file in files) if all(file.size for file in files) else 0
    done = 0
    with httpx.Client(follow_redirects=True, timeout=_TIMEOUT) as client:
        for file in files:
            target = folder.joinpath(*file.name.split("/"))
            if not disk.exists(target):
                disk.make_dir(target.parent)

                def tell(here: int, before: int = done) -> None:
                    progress(before + here, total)

                _Download(client, disk, file, target, tell, pause, fetched=done).run()
            done += disk.size(target)
            progress(done, total)


class _Download:
    """Download one file."""

    def __init__(
        self,
        client: httpx.Client,
        disk: Disk,
        file: RemoteFile,
        target: Path,
        tell: Callable[[int], None],
        pause: Callable[[float], object],
        *,
        fetched: int,
    ) -> None:
        self._fetched = fetched
        self._client, self._disk, self._remote, self._target = client, disk, file, target
        self._tell, self._pause = tell, pause
        self._part = target.with_name(target.name + ".part")
        self._tag = target.with_name(target.name + ".etag")

    def run(self) -> None:
        """Download the file, check it and rename it."""
        failures = 0
        while True:
            before = self._have()
            try:
                expected = self._receive(before)
                break
            except httpx.TransportError as exc:
                failures = 1 if self._have() > before else failures + 1
                if failures >= _ATTEMPTS:
                    raise RemoteError(
                        f"cannot fetch {self._remote.url}: {exc or type(exc).__name__}",
                        hint="the same call continues the download"
                        if self._fetched or self._have()
                        else "check the address",
                    ) from exc
                self._pause(min(8.0, 0.5 * 2**failures))
        self._check(expected)
        self._disk.rename(self._part, self._target)
        if self._disk.exists(self._tag):
            self._disk.unlink(self._tag)

    def _have(self) -> int:
        return self._disk.size(self._part) if self._disk.exists(self._part) else 0

    def _receive(self, have: int) -> int | None:
        """Append the missing bytes; return the file's length as the server reports it."""
        headers = {"Accept-Encoding": "identity"}
        if have:
            headers["Range"] = f"bytes={have}-"
            if self._disk.exists(self._tag):
                headers["If-Range"] = self._disk.read_whole(self._tag).decode()
        with self._client.stream("GET", self._remote.url, headers=headers) as answer:
            if answer.status_code == 416:  # nothing is missing, or the file has changed
                return have if self._size_of(answer) == have else self._begin_anew()
            _check_answer(answer, self._remote.url)
            start = have if answer.status_code == 206 else 0
            if tag := answer.headers.get("ETag"):
                self._disk.write_whole(self._tag, tag.encode())
            length = answer.headers.get("Content-Length")
            expected = start + int(length) if length is not None else None
            file = self._disk.open(self._part, create=True)
            try:
                file.truncate(start)
                self._write(answer, file, start)
            finally:
                file.close()
        return expected

    def _write(self, answer: httpx.Response, file: File, place: int) -> None:
        for data in answer.iter_raw():
            file.write(data, place)
            place += len(data)
            self._tell(place)
        file.sync()

    def _size_of(self, answer: httpx.Response) -> int | None:
        size = answer.headers.get("Content-Range", "").rpartition("/")[2]
        return int(size) if size.isdecimal() else None

    def _begin_anew(self) -> int | None:
        self._disk.unlink(self._part)
        return self._receive(0)

    def _check(self, expected: int | None) -> None:
        have = self._have()
        for size in (expected, self._remote.size):
            if size is not None and have != size:
                self._disk.unlink(self._part)
                raise StorageError(f"{self._remote.url} has {have} bytes; {size} are expected")
        if self._remote.sha256 is None:
            return
        digest = hashlib.sha256()
        with open_to_read(self._part) as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
        if digest.hexdigest() != self._remote.sha256.lower():
            self._disk.unlink(self._part)
            raise StorageError(
                f"{self._remote.url} has the SHA-256 {digest.hexdigest()}; {self._remote.sha256} is expected",
                hint="try again; if the error remains, the file at this address was replaced",
            )


def _check_answer(answer: httpx.Response, url: str) -> None:
    if answer.status_code in (404, 410, 412):  # 412: OpenML's answer if nothing is found
        raise NotFoundError(f"there is no file at {url} (HTTP {answer.status_code})")
    if answer.is_error:
        raise RemoteError(f"{url} answers HTTP {answer.status_code} {answer.reason_phrase}")


def fetch_json(address: str) -> Any:
    """Return a JSON document.

    Raises:
        NotFoundError: The server does not have it.
        RemoteError: The server does not answer, or its answer is not JSON.
    """
    with httpx.Client(follow_redirects=True, timeout=_TIMEOUT) as client:
        return _read_json(_get(client, address), address)


def _get(client: httpx.Client, address: str) -> httpx.Response:
    try:
        answer = client.get(address)
    except httpx.TransportError as exc:
        raise RemoteError(
            f"cannot fetch {address}: {exc or type(exc).__name__}", hint="check the address"
        ) from exc
    _check_answer(answer, address)
    return answer


def _read_json(answer: httpx.Response, address: str) -> Any:
    try:
        return json.loads(answer.content)
    except INVALID as exc:
        raise RemoteError(f"{address} is not JSON: {exc}") from exc


def list_hub(
    repository: str,
    folder: str,
    mirror: str,
    *,
    keep: Callable[[str], bool],
    missing: str,
    is_flat: bool = True,
) -> list[RemoteFile]:
    """List the files of a data set in a repository on the Hugging Face Hub.

    Args:
        repository: Name of the repository.
        folder: Folder of the files; "" for all.
        mirror: Address of the hub.
        keep: Function that returns whether the file of a path is needed.
        missing: End of the message if there is no such file, after the address of the repository.
        is_flat: Whether to download the files to one folder. False keeps their folders below `folder`.

    Raises:
        NotFoundError: The repository or the folder does not exist, or no file is needed.
        RemoteError: The hub does not answer.
    """
    found = [
        replace(file, name=file.name.rpartition("/")[2] if is_flat else file.name.removeprefix(f"{folder}/"))
        for file in list_hugging_face(repository, folder, endpoint=mirror)
        if keep(file.name)
    ]
    if not found:
        raise NotFoundError(f"{mirror}/datasets/{repository} {missing}")
    return found


def list_hugging_face(
    repository: str,
    prefix: str = "",
    *,
    endpoint: str = HUGGING_FACE,
    revision: str = "main",
) -> list[RemoteFile]:
    """List the files below a folder of a data set repository on the Hugging Face Hub.

    Source of the interface: https://huggingface.co/docs/hub/api (`/api/datasets/REPO/tree/REVISION`).

    Args:
        repository: Name, for instance "jdvakil/RoboSet_Sim".
        prefix: The folder; "" for all files.
        endpoint: Address of the hub, or of a mirror of it.
        revision: Branch, tag or commit.

    Returns:
        The files in the order of their paths; `name` is the path in the repository. Large files have a hash.

    Raises:
        NotFoundError: The repository or the folder does not exist.
        RemoteError: The hub does not answer.
    """
    base = endpoint.rstrip("/")
    address: str | None = f"{base}/api/datasets/{repository}/tree/{quote(revision)}"
    if prefix:
        address = f"{address}/{quote(prefix)}"
    address = f"{address}?recursive=true&expand=false"
    found: list[RemoteFile] = []
    with httpx.Client(follow_redirects=True, timeout=_TIMEOUT) as client:
        while address:
            answer = _get(client, address)
            for item in _read_json(answer, address):
                if item.get("type") == "file" and _is_safe(item["path"]):
                    path = item["path"]
                    found.append(
                        RemoteFile(
                            url=f"{base}/datasets/{repository}/resolve/{quote(revision)}/{quote(path)}",
                            name=path,
                            size=item.get("size"),
                            sha256=(item.get("lfs") or {}).get("oid"),
                        )
                    )
            address = answer.links.get("next", {}).get("url")
            if address is not None and not urlsplit(address).netloc:
                address = base + address
    return sorted(found, key=lambda file: file.name)


def _is_safe(path: str) -> bool:
    """Return whether a path from a server stays below the download folder."""
    parts = path.split("/")
    return not path.startswith("/") and not any(part in ("", ".", "..") for part in parts)
