"""Paths on the command line: files and folders of this machine.

Used by the commands as the callback of their arguments and options.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from expstore.cli.completion import complete_store
from expstore.disk.local_path import local_path


def to_local(value: Path | list[Path] | None) -> Path | list[Path] | None:
    """Return a path, or paths, with `~` expanded.

    Raises:
        StateError: The path is a URL.
    """
    if value is None:
        return None
    return [local_path(path) for path in value] if isinstance(value, list) else local_path(value)


Store = Annotated[
    Path,
    typer.Argument(
        callback=to_local, autocompletion=complete_store, metavar="STORE", help="The store's folder."
    ),
]
