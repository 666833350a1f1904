"""What the shell suggests for arguments, after `expstore --install-completion`.

Used by the commands as `autocompletion` of their arguments and options. A shell runs these functions on every
press of Tab, so that they import nothing slow; they suggest nothing where a folder cannot be read.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import typer

from expstore.errors import ExpStoreError


def complete_store(incomplete: str) -> list[str]:
    """Return the stores and other folders whose path begins with a text; folders end with a slash.

    Args:
        incomplete: The text before the cursor.
    """
    from expstore.disk.files import Disk
    from expstore.storages.format.manifest import MANIFEST

    disk = Disk()
    before, begin = os.path.split(incomplete)
    folder = Path(before or ".").expanduser()
    found = []
    with contextlib.suppress(ExpStoreError):
        for name in disk.names(folder):
            is_hidden = name.startswith(".") and not begin
            if name.startswith(begin) and not is_hidden and disk.is_dir(folder / name):
                end = "" if disk.exists(folder / name / MANIFEST) else "/"
                found.append(os.path.join(before, name) + end)
    return found


def complete_version(ctx: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the numbers and tags of the snapshots in the second argument of `loads`, with their rows.

    Args:
        ctx: The command, with the words before the cursor.
        incomplete: The text before the cursor.
    """
    from expstore.disk.files import Disk
    from expstore.storages.snapshots.catalog import list_versions, place_of

    words = ctx.args  # the parser assigns no arguments while the last option has no value
    if len(words) < 2:
        return []
    disk, found = Disk(), []
    with contextlib.suppress(ExpStoreError):
        for version in list_versions(disk, place_of(disk, Path(words[1]).expanduser())):
            names = [name for name in (version.tag, str(version.number)) if name]
            found += [(name, f"{version.rows:,} rows") for name in names if name.startswith(incomplete)]
    return found
