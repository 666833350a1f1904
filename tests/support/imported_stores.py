"""Stores that the import of a data set makes, for tests of readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tensordict import TensorDict

import expstore
from expstore.datasets import Reader, import_dataset


class ImportedStore(NamedTuple):
    """What a store holds: its rows, `(length, status)` and facts of its episodes, and its metadata."""

    rows: TensorDict
    ends: list[tuple[int, str]]
    facts: list[dict[str, Any] | None]
    meta: dict[str, Any]


def import_rows(reader: Reader, folder: Path) -> ImportedStore:
    """Import a data set to a new store in a folder, and return what the store holds."""
    target = folder / f"{len(list(folder.iterdir()))}.exp"
    import_dataset(reader, target)
    return read_store(target)


def read_store(path: Path) -> ImportedStore:
    """Return what a store holds."""
    with expstore.open(path, mode="r") as rb:
        found = rb.sql("SELECT length, status, info FROM episodes ORDER BY episode_id").fetchall()
        facts = [None if info is None else json.loads(info) for *_, info in found]
        return ImportedStore(rb[:], [(length, status) for length, status, _ in found], facts, rb.meta)
