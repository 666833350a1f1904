"""Check paths that users pass: only files and folders of this machine are accepted.

Used wherever a user names a file or a folder, before any file is touched.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from expstore.disk.files import ReadingDisk
from expstore.errors import StateError

#: A URL, also one from which `Path` removed a slash. A drive, as in c:/x, has one letter.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|([A-Za-z][A-Za-z0-9+.-]+):/(?=.)")


def local_path(given: str | os.PathLike[str]) -> Path:
    """Return a path with `~` expanded.

    Args:
        given: The path that the user passed.

    Raises:
        StateError: The value is a URL, neither text nor a path, or invalid on every file system, or a
            circle of links (kind "path").
    """
    try:
        text = os.fspath(given)
    except TypeError:
        text = None
    if not isinstance(text, str):
        raise StateError(
            f"{given!r} is a {type(given).__name__}, not a path",
            kind="path",
            hint="pass a str or a pathlib.Path; os.fsdecode(path) converts bytes to a str",
        )
    if not text:
        raise StateError("the path is empty", kind="path", hint="pass one such as 'run.exp'")
    if found := _URL.match(text):
        url = text if found[1] or isinstance(given, str) else text.replace(":/", "://", 1)
        raise StateError(
            f"{hide_credentials(url)} is a URL, not a path on this machine",
            kind="path",
            hint=_suggest_instead((found[1] or found[2]).lower()),
        )
    if "\0" in text:
        raise StateError(f"{text!r} contains a NUL character", kind="path", hint="pass the path of a folder")
    try:
        path = Path(text).expanduser()
    except RuntimeError as exc:
        raise StateError(f"{text}: {exc}", kind="path", hint="write the path without ~") from exc
    if ReadingDisk().leads_to_itself(path):
        raise StateError(f"{path} is a link that leads to itself", kind="path", hint="remove it")
    return path


def hide_credentials(url: str) -> str:
    """Return a URL for a message: without user, password, options and fragment.

    >>> from expstore.disk.local_path import hide_credentials
    >>> hide_credentials("s3://key:a/b@bucket/run?token=c")
    's3://bucket/run'
    """
    # Up to the last "@": a secret may contain "/", "?" and "#".
    return re.sub(r"[?#].*", "", re.sub(r"//.*@", "//", url))


def _suggest_instead(scheme: str) -> str:
    if scheme in ("http", "https"):
        return "expstore.connect(url) uses a store that `expstore serve` serves"
    if scheme == "file":
        return "leave out file://"
    if scheme == "s3":
        return (
            "s3:// is for versions: expstore.open(url, mode='r') reads one, `expstore versions push` and "
            "`pull` copy one; otherwise give a local path"
        )
    return (
        f"{scheme}:// is not supported; give a local path, and copy the files to or from it "
        f"(for a folder called '{scheme}:' give the absolute path)"
    )
