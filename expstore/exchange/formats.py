"""The formats by name: their functions, what they cannot store, and how to recognize the format of a path.

Used by exports, and by the command line. A format's module is loaded when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from expstore.disk.files import ReadingDisk
from expstore.errors import NotFoundError, SchemaError, StateError
from expstore.exchange.base import open_to_read
from expstore.storages.format.manifest import MANIFEST

#: The formats that can be exported, and those that can be imported.
EXPORTS = ("arrow", "hdf5", "lerobot", "minari", "npz", "parquet")
IMPORTS = ("arrow", "csv", "hdf5", "jsonl", "npz", "parquet", "rollouts", "sb3")
#: Formats of one array per field, which some data sets have too.
ARRAYS = ("hdf5", "npz")
#: Formats that support variable-length rows.
TABLES = ("arrow", "csv", "jsonl", "parquet")

_SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".arrows": "arrow",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".hdf": "hdf5",
    ".npz": "npz",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
}
#: The first bytes of files.
_HEADS = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"\x89HDF\r\n\x1a\n": "hdf5",
    b"PK\x03\x04": "npz",
    **{bytes((0x80, protocol)): "sb3" for protocol in range(2, 6)},  # pickles
}


def format_of(path: Path, choices: Sequence[str] = IMPORTS) -> str:
    """Return the format of a file or folder, from its content or else from its name.

    Args:
        path: The file or folder.
        choices: The formats that the error lists if none is recognized.

    Raises:
        NotFoundError: The path does not exist.
        SchemaError: No format is recognized.
        StateError: The path is a store.
    """
    disk = ReadingDisk()
    if not disk.exists(path):
        raise NotFoundError(f"there is nothing at {path}")
    if disk.is_dir(path):
        names = set(disk.names(path))
        if MANIFEST in names:
            raise StateError(
                f"{path} is a store already, so that there is nothing to import",
                hint=f"open it, or copy its rows into another store: expstore merge {path} --out NEW",
            )
        if "rows.arrow" in names:
            return "arrow"
        if "rows" in names or any(name.endswith(".parquet") for name in names):
            return "parquet"
        if any(name.endswith(".jsonl") for name in names):
            return "jsonl"
    elif (found := file_format(path)) is not None:
        return found
    hint = "name its format with --format: " + ", ".join(choices)
    if path.suffix.lower() == ".json":
        hint = f"write an object a line: jq -c '.[]' {path.name} > rows.jsonl"
    raise SchemaError(f"{path} looks like none of the formats that can be imported", hint=hint)


def file_format(path: Path) -> str | None:
    """Return the format of a file, from its first bytes or else from its suffix; None if it is unknown."""
    with open_to_read(path) as file:
        head = file.read(8) or b""
    for begin, name in _HEADS.items():
        if head.startswith(begin):
            return name
    return _SUFFIXES.get(path.suffix.lower())


# -- what they cannot store ---------------------------------------------------------------------------

#: What no format stores, and what each format does not store in addition.
LOST_BY_ALL = "row ids, how often rows were sampled, the number of the next draw, layouts, versions"
_OF_FLAT_FORMATS = "the order of rows of different episodes; fields of variable length, which it refuses"
_OF_ARRAYS = "priorities, times, sources, trajectory ids, facts about episodes except splits, groups, specs"
LOSSES = {
    "arrow": "which groups of episodes had been ended",
    "hdf5": f"{_OF_ARRAYS}; {_OF_FLAT_FORMATS}",
    "lerobot": "next observations; exact pixels of videos; episodes that have not ended; priorities, times, "
    "sources, trajectory ids, facts about episodes except tasks and splits, specs; the order of rows of "
    "different episodes; numbers of variable length",
    "minari": f"priorities, times, sources, trajectory ids, groups, specs except spaces; {_OF_FLAT_FORMATS}",
    "npz": f"{_OF_ARRAYS}; {_OF_FLAT_FORMATS}",
    "parquet": "which groups of episodes had been ended",
}


def describe_losses(form: str) -> str:
    """Return a description of what a format cannot store."""
    return "; ".join(filter(None, [LOST_BY_ALL, LOSSES[form]]))
