"""Make stores on disk: opened with settings of a test, or filled and closed.

- `build_store`: a path in, a filled closed store out.
- `open_zarr`: a buffer over a Zarr store with settings that `expstore.open` does not take.
- `extend_all`: append several batches to a buffer.
- `prepare`: give a storage its schema.
- `window_ids`: the ids of the rows that a storage holds.
- `read_columns`: all rows that a storage holds, by field.
- `read_files`: the bytes of every file of a folder.
- `copy_folder`: copy a store, or any folder.
- `NoKeeper`: replaces the thread that writes checkpoints in the background.
- `NoIndex`: replaces the index.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from tensordict import TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.disk.files import Disk
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import Schema
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import ZarrStorage


class NoKeeper:
    """A background thread that does nothing, for tests that decide when a store writes."""

    running = True

    def __init__(self, storage: object) -> None: ...
    def start(self) -> None: ...
    def note(self) -> None: ...
    def hurry(self) -> None: ...
    def stop(self) -> None: ...


class NoIndex:
    """A replacement for the index, which is derived and slow to make."""

    def keep_up(self) -> None: ...

    def busy(self) -> bool:
        return False


def extend_all(rb: Any, *batches: TensorDict, flush_every: int = 0, **options: Any) -> Any:
    """Append batches to a buffer and return the buffer.

    Args:
        rb: The buffer.
        batches: Appended one after another.
        flush_every: Flush after the first of every so many batches; 0 never flushes.
        options: Options of `extend`.
    """
    for number, batch in enumerate(batches):
        rb.extend(batch, **options)
        if flush_every and number % flush_every == 0:
            rb.flush()
    return rb


def build_store(path: Path, *batches: TensorDict, source: str | None = None, **options: Any) -> Path:
    """Make a store, append batches, close the store and return its path.

    Args:
        path: Path of the new store.
        batches: Appended one after another.
        source: Source name of every batch.
        options: Options of `expstore.open`.
    """
    with expstore.open(path, **options) as rb:
        extend_all(rb, *batches, source=source)
    return path


def open_zarr(
    path: Path, capacity: int | None = None, *, disk: Disk | None = None, seed: int = 0, **settings: Any
) -> TensorDictReplayBuffer:
    """Open a buffer over a Zarr store; lanes are stored row by row, batches have 8 rows.

    Args:
        path: The store.
        capacity: Number of rows; None for an unbounded store.
        disk: The file layer.
        seed: Seed of a new store.
        settings: More `Settings` of a new store, such as `layout=ColumnLayout("packed")`.
    """
    kept = ZarrStorage(path, capacity, settings=Settings(flatten=True, seed=seed, **settings), disk=disk)
    return TensorDictReplayBuffer(storage=kept, batch_size=8)


def prepare(storage: Any, schema: Schema) -> Any:
    """Give a storage its schema, unless it has one, and return the storage."""
    if storage.schema is None:
        storage.prepare(schema, find_keys(schema))
    return storage


def window_ids(storage: Any) -> np.ndarray:
    """Return the ids of the rows that a storage holds."""
    return np.arange(storage.window.low + 1, storage.window.last + 1)


def read_columns(storage: Any) -> dict[str, np.ndarray]:
    """Return all rows that a storage holds, the oldest first, by field; with those of the store itself."""
    names = [*map(".".join, storage.schema.keys), "id", "episode", "step", "time", "priority"]
    return dict(zip(names, storage.read(storage.window.ids(), range(len(names))), strict=True))


def read_files(folder: Path, *skipped: str) -> dict[str, bytes]:
    """Return the bytes of all files below a folder, by relative path; skip files of these names."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in skipped)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def copy_folder(source: Path, target: Path) -> Path:
    """Copy a folder and preserve holes; return the copy. Files of an unbounded store are 50 MB of holes."""
    return Path(shutil.copytree(source, target, copy_function=_copy_file))


def _copy_file(source: str, target: str) -> None:
    with open(source, "rb") as old, open(target, "wb") as new:
        size, at = os.fstat(old.fileno()).st_size, 0
        new.truncate(size)
        while at < size:
            try:
                at = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:
                break  # the rest is a hole
            end = os.lseek(old.fileno(), at, os.SEEK_HOLE)
            os.pwrite(new.fileno(), os.pread(old.fileno(), end - at, at), at)
            at = end
    shutil.copystat(source, target)
