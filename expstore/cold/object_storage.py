"""`ObjectStorage`: where versions are on an object storage, and the local cache for reading them.

Used by all functions of `expstore.cold` and by `expstore.open`. Nothing here sends a request.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expstore.core.arguments import check_whole
from expstore.core.retention_policy import parse_bytes
from expstore.disk.local_path import hide_credentials, local_path
from expstore.errors import ArgumentError, RemoteError, StateError

if TYPE_CHECKING:
    from expstore.cold.bucket import Bucket

_SCHEME = re.compile(r"s3://", re.IGNORECASE)
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_URL = re.compile(rf"s3://({_BUCKET})((?:/[^/?#\s]+)*)/?", re.IGNORECASE)
#: A URL whose bucket cannot exist.
_WRONG_BUCKET = re.compile(rf"s3://(?!{_BUCKET}(?:/|$))(?P<bucket>[^/]+)(?:/.*)?", re.IGNORECASE)
_RETRIES = 8
#: Variables with credentials, and groups of variables with which obstore gets them elsewhere.
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
_OTHER_CREDENTIALS = (
    ("AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_ROLE_ARN"),
    ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",),
    ("AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"),
)
#: First and longest pause between two attempts, and how long a request is repeated, seconds.
_FIRST_PAUSE_SECONDS, _PAUSE_SECONDS, _REPEAT_SECONDS = 0.2, 5, 60


class ObjectStorage:
    """The address of versions on an object storage, and how they are read.

    All functions that take an `s3://` URL also take this object. Credentials come from the environment
    (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_REGION`, `AWS_ENDPOINT_URL` for other servers than
    Amazon's) or from a credential provider of obstore, never from the URL.

    A machine's or a container's own role is used if `AWS_EC2_METADATA_DISABLED` is "false": only then is the
    cloud's metadata address asked for credentials. Profiles in `~/.aws` are not read.

    Args:
        where: A URL such as `s3://bucket/run`, or a store of obstore (`obstore.store.S3Store`, ...), whose
            prefix is the address.
        cache: Folder of the local cache of `expstore.open`; None: `expstore` in `$XDG_CACHE_HOME` or
            `~/.cache`. Processes and stores may share it.
        cache_bytes: Most disk space of the cache, in bytes or as text such as "20GB". A version that does not
            fit is refused.
        retries: How often a request is repeated after a 5xx answer, throttling or a lost connection, with
            growing pauses, for at most a minute; None: 8 times. A store of obstore has its own setting.

    Raises:
        StateError: The URL is not one of an object storage, or contains credentials or options.
        ArgumentError: A setting has the wrong type or value.

    Example:
        >>> runs = expstore.cold.ObjectStorage("s3://bucket/run", cache="/scratch/cache", cache_bytes="100GB")
        >>> rb = expstore.open(runs, mode="r", batch_size=256)
    """

    def __init__(
        self,
        where: Any,
        *,
        cache: str | Path | None = None,
        cache_bytes: int | str = "20GB",
        retries: int | None = None,
    ) -> None:
        try:
            most = parse_bytes(cache_bytes)
        except (TypeError, ValueError):
            most = None
        if most is None:
            raise ArgumentError(
                f"cache_bytes must be a number of bytes or text such as '20GB', got {cache_bytes!r}"
            )
        if isinstance(where, os.PathLike | bytes) or where is None:
            raise ArgumentError(
                f"{where!r} is not the address of an object storage",
                hint="pass a URL such as s3://bucket/run as text, or a store of obstore",
            )
        if isinstance(where, str):
            where = _check_url(where)
        elif retries is not None:
            raise ArgumentError(
                "retries= cannot be used with a store of obstore, which has a setting of its own",
                hint="pass retry_config= to the store",
            )
        count = _RETRIES if retries is None else check_whole("retries", retries)
        if count < 0:
            raise ArgumentError(f"retries must be at least 0, got {count}")
        self.where = where
        self.cache = local_path(os.path.join(_cache_home(), "expstore") if cache is None else cache)
        self.cache_bytes = most
        self.retries = count

    def __repr__(self) -> str:
        return f"ObjectStorage({self.name!r})"

    @classmethod
    def of(cls, given: Any) -> ObjectStorage:
        """Convert a URL or a store of obstore to an `ObjectStorage`."""
        return given if isinstance(given, cls) else cls(given)

    @property
    def name(self) -> str:
        """The address, for messages; without credentials."""
        if isinstance(self.where, str):
            return self.where
        text = repr(self.where)
        return type(self.where).__name__ if text.startswith("<") else text

    def connect(self) -> Bucket:
        """Return the objects below the address. Sends no request.

        Raises:
            RemoteError: The environment has no credentials.
            MissingExtraError: obstore is not installed.
        """
        from expstore.cold.bucket import Bucket

        if not isinstance(self.where, str):
            return Bucket(self.where, self.name)
        _check_credentials(self.where)
        from obstore.store import S3Store

        store = S3Store.from_url(
            self.where,
            retry_config={
                "max_retries": self.retries,
                "backoff": {
                    "init_backoff": timedelta(seconds=_FIRST_PAUSE_SECONDS),
                    "max_backoff": timedelta(seconds=_PAUSE_SECONDS),
                },
                "retry_timeout": timedelta(seconds=_REPEAT_SECONDS),
            },
        )
        return Bucket(store, self.name)


def is_object_url(given: Any) -> bool:
    """Return whether a value is a URL of an object storage (not whether it is a valid one)."""
    return isinstance(given, str) and _SCHEME.match(given) is not None


def _cache_home() -> str:
    return os.environ.get("XDG_CACHE_HOME") or os.path.join("~", ".cache")


def _check_credentials(url: str) -> None:
    """Raise RemoteError unless the environment says where credentials come from.

    Without them obstore would ask the cloud's metadata address, which outside of a cloud takes minutes to
    fail.
    """
    get = os.environ.get
    if (
        get("AWS_SKIP_SIGNATURE", "").lower() == "true"
        or get("AWS_EC2_METADATA_DISABLED", "").lower() == "false"
    ):
        return
    missing = [name for name in _KEYS if not get(name)]
    if missing and not any(all(map(get, names)) for names in _OTHER_CREDENTIALS):
        raise RemoteError(
            f"there are no credentials for {url}: {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set",
            kind="unauthorized",
            hint="set both variables; AWS_EC2_METADATA_DISABLED=false uses the role of this machine",
        )


def _check_url(url: str) -> str:
    """Return a URL without slashes at its end.

    Raises:
        StateError: It is not an s3:// URL, or has credentials, options or empty names.
    """
    if "://" in url and ("@" in url or "?" in url or "#" in url):
        raise StateError(
            f"the URL of {hide_credentials(url)} contains credentials or options",
            kind="path",
            hint="set them in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, "
            "AWS_ENDPOINT_URL), or pass a store of obstore",
        )
    if wrong := _WRONG_BUCKET.fullmatch(url):
        raise StateError(
            f"{url!r} is not the address of an object storage: it names the bucket {wrong['bucket']!r}",
            kind="path",
            hint="names of buckets have 3 to 63 letters, digits, dots and hyphens, and begin and end with a "
            "letter or digit",
        )
    found = _URL.fullmatch(url)
    if found is None or any(part in (".", "..") for part in found[2].split("/")):
        raise StateError(
            f"{url!r} is not the address of an object storage",
            kind="path",
            hint="use s3://bucket/prefix, or pass ObjectStorage a store of obstore; for a version in a local "
            "folder there are expstore versions create and restore",
        )
    return f"s3://{found[1]}{found[2]}"
