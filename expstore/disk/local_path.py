"""Paths as users give them: folders of this machine, and nothing else.

Used by `expstore.open`, before anything is touched.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from expstore.errors import StateError

__all__ = ["local_path"]

#: A text that names a scheme; and a Path made of one, which has lost a slash.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_MANGLED = re.compile(
    r"(https?|file|s3a?|gs|gcs|az|abfss?|adl|hdfs|ftp|sftp|ssh|r2|hf|memory):/(?!/)", re.IGNORECASE
)


def local_path(given: str | Path) -> Path:
    """Return a path with `~` expanded.

    Args:
        given: What a user calls a store.

    Raises:
        StateError: It is a URL, or no path that a file system can have (kind "path").
    """
    text = os.fspath(given)
    if found := _URL.match(text) or (_MANGLED.match(text) if isinstance(given, Path) else None):
        raise StateError(f"{text} is no folder on this machine", kind="path", hint=_instead(found[1].lower()))
    if "\0" in text:
        raise StateError(f"{text!r} has a NUL character", kind="path", hint="give the path of a folder")
    try:
        return Path(given).expanduser()
    except RuntimeError as exc:
        raise StateError(f"{text}: {exc}", kind="path", hint="write the path without ~") from exc


def _instead(scheme: str) -> str:
    if scheme in ("http", "https"):
        return "expstore.connect(url) uses a store that `expstore serve` serves"
    if scheme == "file":
        return "leave out file://"
    return f"{scheme}:// is not supported; copy the store to a local folder, and open it there"
