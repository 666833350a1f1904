"""`Ship`: where a store is shipped to while it is open, and how; and what its folder knows of it.

Nothing here sends a request.
"""

from __future__ import annotations

import json
import math
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expstore.cold.object_storage import ObjectStorage
from expstore.core.arguments import check_whole
from expstore.core.parsing import INVALID
from expstore.core.retention_policy import parse_bytes
from expstore.disk.files import Disk
from expstore.errors import ArgumentError, CorruptionError
from expstore.storages.format.paths import SHIPPED

if TYPE_CHECKING:
    from expstore.cold.bucket import Bucket

#: How often obstore repeats a request; the thread that ships repeats everything.
_RETRIES = 5
_LEAST_PART_BYTES = 64 << 10


@dataclass(frozen=True)
class Ship:
    """Where a store is shipped to while it is open, and how.

    `expstore.open` also accepts the URL alone. The settings are not stored.

    Args:
        url: A URL such as `s3://bucket/run`, an `expstore.cold.ObjectStorage`, or a store of obstore. One
            address has one store.
        every: Seconds between two uploads. What an `extend` has returned is shipped after so many seconds and
            the time of an upload.
        bandwidth: Most bytes a second that are uploaded, as a number or text such as "20MB"; None: no limit.
        requests: Most requests a minute; an upload takes three or more. None: no limit.
        part_bytes: Most bytes of an object.

    Raises:
        ArgumentError: A setting has the wrong type or value.
        StateError: The URL is not one of an object storage, or contains credentials.

    Example:
        >>> ship = expstore.Ship("s3://bucket/run", every=10.0, bandwidth="20MB")
        >>> rb = expstore.open("run.exp", ship=ship)
    """

    url: Any
    _: KW_ONLY
    every: float = 5.0
    bandwidth: int | str | None = None
    requests: int | None = None
    part_bytes: int | str = 8 << 20

    def __post_init__(self) -> None:
        if isinstance(self.url, str):
            ObjectStorage(self.url)
        try:
            every = float(self.every)
        except (TypeError, ValueError):
            every = math.nan
        if not (every > 0 and math.isfinite(every)):
            raise ArgumentError(f"every must be a number of seconds above 0, got {self.every!r}")
        bandwidth, part_bytes = parse_bytes(self.bandwidth), parse_bytes(self.part_bytes)
        if part_bytes is None or part_bytes < _LEAST_PART_BYTES:
            raise ArgumentError(f"part_bytes must be at least {_LEAST_PART_BYTES}, got {self.part_bytes!r}")
        if self.requests is not None and check_whole("requests", self.requests) < 1:
            raise ArgumentError(f"requests must be at least 1 a minute, got {self.requests}")
        for name, value in (("every", every), ("bandwidth", bandwidth), ("part_bytes", part_bytes)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(cls, given: Any) -> Ship:
        """Convert a URL, an `ObjectStorage` or a store of obstore to a `Ship`."""
        return given if isinstance(given, cls) else cls(given)

    def connect(self) -> Bucket:
        """Return the objects at the address. Sends no request."""
        url = self.url
        return (
            ObjectStorage(url, retries=_RETRIES) if isinstance(url, str) else ObjectStorage.of(url)
        ).connect()


@dataclass(frozen=True)
class Origins:
    """Which shipped states a folder's store contains: the file SHIPPED. Without it, none.

    Args:
        url: Where they were shipped to last; "" if the store was never shipped.
        nonces: The nonces of the claims under which they were captured, the oldest first.
    """

    url: str = ""
    nonces: tuple[str, ...] = ()

    @classmethod
    def load(cls, disk: Disk, path: Path) -> Origins:
        """Read the file of a store's folder.

        Raises:
            CorruptionError: It is damaged.
        """
        if not disk.exists(path / SHIPPED):
            return cls()
        try:
            content = json.loads(disk.read_whole(path / SHIPPED))
            return cls(str(content["url"]), tuple(map(str, content["nonces"])))
        except INVALID as exc:
            raise CorruptionError(
                f"{path / SHIPPED} is damaged: {exc!r}",
                hint="remove it, and ship the store to another address",
            ) from exc

    def save(self, disk: Disk, path: Path) -> None:
        """Replace the file; it is durable when this returns."""
        disk.write_whole(path / SHIPPED, json.dumps({"url": self.url, "nonces": self.nonces}).encode())
