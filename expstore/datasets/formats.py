"""The formats of data sets by name, and the detection of a source's format.

Used by the command line.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from expstore.datasets.episode import Reader
from expstore.datasets.recognition import Source
from expstore.datasets.registry import find_kind, list_kinds
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.errors import StateError
from expstore.exchange.formats import file_format


def list_formats() -> list[str]:
    """Return the names of the formats that are always data sets; "hdf5" files may have plain rows."""
    return [kind.format for kind in list_kinds() if not kind.is_general]


def make_reader(name: str, source: Path, **options: Any) -> Reader:
    """Return a reader of a source.

    Args:
        name: Name of the format.
        source: File or folder.
        options: Options of the reader.

    Raises:
        NotFoundError: The source does not exist.
        SchemaError: The source does not have this format.
    """
    make: Callable[..., Reader] = find_kind(name).reader
    return make(source, **options)


def recognize(path: Path) -> tuple[str | None, list[str]]:
    """Return the format of a data set, judging by its content, and notes for the user.

    Returns:
        The format, or None if the source is a plain file of arrays or unknown; a note for each format that
        the source may have, without proof.

    Raises:
        StorageError: A file cannot be read, or a link leads out of the folder.
    """
    source = Source(path)
    notes: list[str] = []
    for kind in list_kinds():
        found = kind.recognize(source)
        if found is True:
            return kind.format, notes
        if found:
            notes.append(found)
    return None, notes


def has_format(name: str, path: Path) -> bool:
    """Return whether a source is recognized as a data set of a format."""
    return find_kind(name).recognize(Source(path)) is True


def find_plain_format(path: Path) -> str | None:
    """Return the format by which a file of a data set can be read as plain rows, too; None if it cannot."""
    source = Source(path)
    has_rows = not source.is_dir and source.file is not None and not has_format("hdf5", path)
    return file_format(path) if has_rows else None


def make_sample(kind: str, path: str | Path) -> Path:
    """Write a small data set: three random walks, in files of a format. Return the path, a source.

    Args:
        kind: A format such as "atari-dqn", or a prefix such as "atari".
        path: The source, which must not exist: a file if the format has one file, otherwise a folder.

    Raises:
        ArgumentError: There is no such format.
        StateError: The path exists.
        MissingExtraError: The format needs a library that is not installed.

    Example:
        >>> from expstore.datasets import MinariReader, import_dataset, make_sample
        >>> source = make_sample("minari", "walk/random-v0")
        >>> import_dataset(MinariReader(source), "walk.exp").episodes
        3
    """
    found, target, disk = find_kind(kind), local_path(path), Disk()
    if disk.exists(target):
        raise StateError(f"{target} exists", hint="choose a path that does not exist")
    disk.make_dir(target.parent)
    found.make_sample(target)
    return target
