"""Files with tokens, which the commands that serve or use stores over HTTP read."""

from __future__ import annotations

import shlex
from pathlib import Path

import typer

from expstore.errors import NotFoundError, StateError

__all__ = ["read_token"]


def read_token(path: Path | None) -> str | None:
    """Return the token in a file; None without a file.

    Raises:
        NotFoundError: There is no such file.
        StateError: The file contains no token.
        StorageError: The file cannot be read.
    """
    from expstore.disk.files import Disk

    if path is None:
        return None
    disk = Disk()
    if not disk.exists(path):
        raise NotFoundError(
            f"there is no file {path} with a token",
            hint=f"make one: openssl rand -base64 32 > {shlex.quote(str(path))}",
        )
    token = disk.read_whole(path.resolve()).strip()  # Kubernetes mounts secrets as links
    if not token or any(byte <= 32 or byte >= 127 for byte in token):
        raise StateError(
            f"{path} does not contain a token",
            kind="token",
            hint="write one line of letters and digits into it",
        )
    if disk.is_shared(path):  # only a warning: secrets of Docker and Kubernetes are readable by others
        typer.echo(f"warning: other users of this machine can read {path}: chmod 600 {path}", err=True)
    return token.decode()
