"""Versions of a served store.

Used by the client, and by `expstore versions create` of a store that a server has open. It does not load
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from expstore.errors import RemoteError
from expstore.storages.snapshots.catalog import Version

_Versions: TypeAlias = list[Version]  # in `RemoteSnapshots` `list` is a method


class RemoteSnapshots:
    """Create, tag, list and restore versions of a served store. They are in the store's own folder.

    Args:
        request: Sends a request with a JSON body and returns the answer.
    """

    def __init__(self, request: Callable[..., Any]) -> None:
        self._request = request

    def create(self, path: None = None) -> Version:
        """Make the server create a version: a complete, closed copy of the store as it is now.

        Args:
            path: Must be None: versions are in the store's own folder.

        Raises:
            StateError: The server opened the store for reading only.
        """
        _refuse_path("dumps", path)
        return Version(**self._request("POST", "dumps", {"tag": None}, once=True))

    def tag(self, name: str, path: None = None) -> Version:
        """Make the server create a version with a name. Named versions are kept until they are removed.

        Args:
            name: 1 to 100 letters, digits or `. _ -`; not a number.
            path: Must be None: versions are in the store's own folder.

        Raises:
            SnapshotError: There is a version of this name.
        """
        _refuse_path("snapshots.tag", path)
        return Version(**self._request("POST", "dumps", {"tag": name}, once=True))

    def list(self) -> _Versions:
        """Return the versions in the store's folder, the oldest first."""
        return [Version(**entry) for entry in self._request("GET", "versions")["versions"]]

    def restore(self, path: None = None, version: int | str | None = None) -> None:
        """Make the server replace the store's content by a version's, for all users of the store.

        Args:
            path: Must be None: versions are in the store's own folder.
            version: Number or tag; None for the newest.

        Raises:
            SnapshotError: There is no such version.
        """
        _refuse_path("loads", path)
        self._request("POST", "loads", {"version": version}, once=True)


def _refuse_path(name: str, path: object) -> None:
    if path is not None:
        raise RemoteError(
            f"{name} of a served store takes no path", kind="local_only",
            hint="versions are in the store's own folder: leave the path out",
        )  # fmt: skip
