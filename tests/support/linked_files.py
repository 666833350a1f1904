"""Folders of links, as in the cache of huggingface_hub."""

from __future__ import annotations

from pathlib import Path

__all__ = ["link_files"]


def link_files(source: Path, target: Path) -> Path:
    """Make a folder with the tree of another one, in which every file is a link; return it."""
    for file in sorted(source.rglob("*")):
        if file.is_file():
            link = target / file.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())
    return target
