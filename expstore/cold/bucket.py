"""Requests to an object storage: read, write, conditional write, list, delete.

The only module that sends requests; it uses obstore, which repeats requests that failed. Tests replace
`gate` to stop the N-th request. It does not know what the objects contain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from expstore.errors import MissingExtraError, RemoteError, StateError

try:
    import obstore
    from obstore import exceptions
except ModuleNotFoundError as exc:
    raise MissingExtraError(
        "object storage needs obstore, which is not installed", hint="pip install 'expstore[s3]'"
    ) from exc

#: Object that `check_conditions` tries to create and to replace.
PROBE = "probe"
_WRONG_TAG = '"00000000000000000000000000000000"'
#: Bytes that are sent in one request; larger objects take several.
CHUNK_BYTES = 16 << 20
#: Requests of one object that are under way at the same time.
_CHUNKS = 2
#: Most objects that one request deletes.
_DELETE_KEYS = 1000
_MESSAGE_CHARS = 300
_NO_BUCKET = "NoSuchBucket"


class Bucket:
    """The objects below one address.

    Threads: any number may send requests at the same time. A request that fails after it was repeated raises
    RemoteError; the object then has its former or its new content.

    Args:
        store: A store of obstore; keys are relative to its prefix.
        name: Its address, for messages.
    """

    def __init__(self, store: Any, name: str) -> None:
        self._store = store
        self.name = name
        #: Called before each request, to count and to limit requests.
        self.pace: Callable[[], None] = lambda: None

    def gate(self, act: str, key: str) -> None:
        """Do nothing. Tests override this hook, which each request calls first."""

    def _begin(self, act: str, key: str) -> None:
        self.pace()
        self.gate(act, key)

    def read(self, key: str) -> bytes | None:
        """Return the bytes of an object; None if there is no such object."""
        found = self.read_tagged(key)
        return None if found is None else found[0]

    def read_tagged(self, key: str) -> tuple[bytes, dict[str, str]] | None:
        """Return the bytes of an object and the tag that `replace` takes; None if there is no such object."""
        self._begin("get", key)
        with self._translate_errors("get", key):
            try:
                found = obstore.get(self._store, key)
                data = bytes(found.bytes())
            except (exceptions.NotFoundError, FileNotFoundError) as exc:
                _check_bucket(exc)
                return None
        names = ("e_tag", "version")
        return data, {name: found.meta[name] for name in names if found.meta.get(name)}  # type: ignore[literal-required]

    def stream(self, key: str) -> Iterator[bytes] | None:
        """Return the bytes of an object piece by piece; None if there is no such object."""
        self._begin("get", key)
        with self._translate_errors("get", key):
            try:
                found = obstore.get(self._store, key)
            except (exceptions.NotFoundError, FileNotFoundError) as exc:
                _check_bucket(exc)
                return None
        return self._read_pieces(found, key)

    def _read_pieces(self, found: Any, key: str) -> Iterator[bytes]:
        pieces = iter(found.stream(min_chunk_size=1 << 20))
        while True:
            with self._translate_errors("get", key):
                try:
                    piece = next(pieces)
                except StopIteration:
                    return
            yield bytes(piece)

    def write(self, key: str, data: bytes | Iterator[bytes]) -> None:
        """Write an object, replacing one of that name. An iterator's bytes are sent in several requests."""
        self._begin("put", key)
        with self._translate_errors("put", key):
            obstore.put(self._store, key, data, chunk_size=CHUNK_BYTES, max_concurrency=_CHUNKS)

    def create(self, key: str, data: bytes) -> bool:
        """Create an object unless one of that name exists; return whether it was created."""
        self._begin("create", key)
        with self._translate_errors("create", key):
            try:
                obstore.put(self._store, key, data, mode="create")
            except exceptions.AlreadyExistsError:
                return False
        return True

    def replace(self, key: str, data: bytes, tag: dict[str, str]) -> bool:
        """Write an object if it still has the tag of `read_tagged`; return whether it was written."""
        self._begin("replace", key)
        with self._translate_errors("replace", key):
            try:
                obstore.put(self._store, key, data, mode=tag)  # type: ignore[arg-type]
            except (exceptions.PreconditionError, exceptions.NotFoundError, FileNotFoundError):
                return False
        return True

    def check_conditions(self) -> None:
        """Raise StateError unless the server supports conditional writes.

        Two writers could otherwise replace each other's list of versions. Takes two requests, and a third at
        the first use of an address.
        """
        self.check_creates()
        self.check_replaces()

    def check_replaces(self) -> None:
        """Raise StateError unless the server refuses to replace an object that has changed: one request.

        `check_creates` was called at this address before.
        """
        if self.replace(PROBE, b"expstore", {"e_tag": _WRONG_TAG}):
            raise self._build_unfit_error("If-Match")

    def check_creates(self) -> None:
        """Raise StateError unless the server refuses to create an object that exists: a request or two."""
        if self.create(PROBE, b"expstore") and self.create(PROBE, b"expstore"):
            raise self._build_unfit_error("If-None-Match")

    def _build_unfit_error(self, header: str) -> StateError:
        return StateError(
            f"the server of {self.name} ignores conditional writes ({header}), so that two programs could "
            "replace each other's objects",
            kind="no_conditional_put",
            hint="use a server that supports them, such as S3, MinIO, Ceph or R2",
        )

    def keys(self, prefix: str, after: str | None = None) -> Iterator[tuple[str, int]]:
        """Yield the objects below a prefix whose keys follow `after`: (key, length in bytes)."""
        pages = iter(obstore.list(self._store, prefix, offset=after))
        while True:
            self._begin("list", prefix)
            with self._translate_errors("list", prefix):
                try:
                    page = next(pages)
                except StopIteration:
                    return
            for found in page:
                if after is None or found["path"] > after:  # not all servers know this option
                    yield found["path"], found["size"]

    def folders(self, prefix: str) -> list[str]:
        """Return the names directly below a prefix that contain objects."""
        self._begin("list", prefix)
        with self._translate_errors("list", prefix):
            found = obstore.list_with_delimiter(self._store, prefix)["common_prefixes"]
        return [path.rpartition("/")[2] for path in found]

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects in requests of up to 1,000; missing ones are ignored."""
        for start in range(0, len(keys), _DELETE_KEYS):
            self._delete(keys[start : start + _DELETE_KEYS])

    def _delete(self, keys: Sequence[str]) -> None:
        self._begin("delete", keys[0])
        with self._translate_errors("delete", keys[0]):
            try:
                obstore.delete(self._store, list(keys))
                return
            except (exceptions.NotFoundError, FileNotFoundError):
                pass
        for key in keys:
            self._begin("delete", key)
            with self._translate_errors("delete", key):
                with contextlib.suppress(exceptions.NotFoundError, FileNotFoundError):
                    obstore.delete(self._store, key)

    @contextlib.contextmanager
    def _translate_errors(self, act: str, key: str) -> Iterator[None]:
        try:
            yield
        except (exceptions.UnauthenticatedError, exceptions.PermissionDeniedError, PermissionError) as exc:
            raise RemoteError(
                f"{self.name} refused to {act} {key}: {_shorten(exc)}",
                kind="unauthorized",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or pass ObjectStorage a store of "
                "obstore "
                "with a credential provider",
            ) from exc
        except exceptions.NotSupportedError as exc:
            raise StateError(
                f"{self.name} does not support conditional writes: {_shorten(exc)}",
                kind="no_conditional_put",
                hint="use a server that supports them, such as S3, MinIO, Ceph or R2",
            ) from exc
        except (exceptions.BaseError, FileNotFoundError) as exc:
            if _NO_BUCKET in str(exc):
                raise RemoteError(
                    f"there is no bucket for {self.name}", hint="create it, or correct the address"
                ) from exc
            raise RemoteError(
                f"cannot {act} {key} in {self.name}: {_shorten(exc)}",
                hint="check the address and the connection, then run the call again",
            ) from exc


def _check_bucket(exc: Exception) -> None:
    """Raise the error for a missing object again if its bucket is missing, too."""
    if _NO_BUCKET in str(exc):
        raise exc


def _shorten(exc: Exception) -> str:
    """Return the first line of an error of obstore, which is followed by pages of details."""
    return str(exc).strip().partition("\n")[0][:_MESSAGE_CHARS]
