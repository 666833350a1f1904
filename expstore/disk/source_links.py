"""Refuse symbolic links that lead out of the folder of a data set.

A data set from elsewhere could otherwise name any file that the process may read. Used by all readers of
folders.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from expstore.disk.files import ReadingDisk
from expstore.errors import StorageError

#: A repository in the cache of Hugging Face: files of `snapshots/REVISION` are links to its `blobs`.
_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")


def check_links(root: Path) -> None:
    """Check the links below a folder. The folder itself may be a link.

    Links may lead to files and folders in the folder; in a snapshot in the cache of Hugging Face, also to
    others of its repository.

    Args:
        root: The folder of a data set; a file is not checked.

    Raises:
        StorageError: A link leads out of the folder (kind "outside"); or the disk failed.
    """
    links = ReadingDisk().links(root)
    allowed = [root.resolve(), *_repositories(root)] if links else []
    for link, target in links:
        if not any(target == one or one in target.parents for one in allowed):
            raise StorageError(
                f"{link} is a link to {target}, outside of the data set {root}",
                kind="outside",
                hint="if you trust it, put a copy of the file in its place; `cp -rL` copies folders so",
            )


def _repositories(root: Path) -> list[Path]:
    """Return the repository of Hugging Face's cache in whose snapshot a folder lies, if any."""
    parts = (root.absolute(), *root.absolute().parents)
    for snapshots, repository in itertools.pairwise(parts):
        if snapshots.name == "snapshots" and _REPOSITORY.fullmatch(repository.name):
            return [repository.resolve()]
    return []
