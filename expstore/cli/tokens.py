"""Files with tokens, which the commands that serve or use stores over HTTP read."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from expstore.errors import ArgumentError, NotFoundError, StateError

TokenHosts = Annotated[
    list[str] | None,
    typer.Option(
        "--token-host",
        metavar="HOST",
        help="Host of the cluster file that gets the token, such as trainer or *.example.com; repeat it. "
        "Without it only this machine gets it.",
    ),
]


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


def read_tokens(path: Path | None, hosts: list[str] | None) -> str | dict[str, str] | None:
    """Return the token in a file, by host if hosts are named.

    Raises:
        ArgumentError: Hosts are named, and there is no token.
        ExpStoreError: As `read_token`.
    """
    token = read_token(path)
    if not hosts:
        return token
    if token is None:
        raise ArgumentError(
            "--token-host names who gets a token, but no token was given", hint="add --token-file"
        )
    return dict.fromkeys([*hosts, "localhost", "127.0.0.1", "::1"], token)
