"""Repositories as in the cache of huggingface_hub: the files of a snapshot are links to blobs."""

from __future__ import annotations

import shutil
from pathlib import Path


def link_files(source: Path, cache: Path) -> Path:
    """Move the files of a folder to a repository in a cache; return the snapshot, in which all are links."""
    repository = cache / "datasets--user--name"
    snapshot, blobs = repository / "snapshots" / "5f1c", repository / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in source.rglob("*") if path.is_file())):
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(file, blobs / f"{number:064x}")
        up = "../" * (len(link.relative_to(repository).parts) - 1)
        link.symlink_to(f"{up}blobs/{number:064x}")
    return snapshot
