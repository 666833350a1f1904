"""Readable rows of a storage as a plain Zarr v3 group, which every reader of Zarr knows.

Used by `expstore export`. It holds one piece of the rows in memory at a time, and never changes the storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expstore.bulk import sync_paths
from expstore.errors import LockedError, NotFoundError, SchemaError, StateError, StorageError
from expstore.files import Disk
from expstore.lock import WriterLock
from expstore.manifest import MANIFEST
from expstore.schema import Field
from expstore.storages.access import read_present
from expstore.storages.base import ROW_FIELDS, Storage
from expstore.types import Array, IntArray, key_name

__all__ = ["Exported", "export_zarr"]

#: Rows are read and written in pieces of about so many bytes, which are the shards of all arrays;
PIECE_BYTES = 64 << 20
PIECE_ROWS = 65_536
#: and packed in chunks of so many.
CHUNK_BYTES = 128 * 1024
_SCRAP = ".tmp"
_LOCK = "LOCK"


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """Say what was exported.

    Args:
        path: The group.
        rows: How many.
        left_out: How many a writer in another process overwrote before they were read.
        fields: Names of the arrays but for those of the store's own.
        disk_bytes: What the files take.
    """

    path: Path
    rows: int
    left_out: int
    fields: tuple[str, ...]
    disk_bytes: int


def export_zarr(
    storage: Storage,
    target: str | Path,
    *,
    fields: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    disk: Disk | None = None,
) -> Exported:
    """Write the rows that can be read now as a plain Zarr group, the oldest first.

    Every field is an array below its name, `next/reward` for instance, of shape `(rows, *row shape)`;
    `_row/id`, `episode`, `step`, `time` (us since 1970) and `priority` stand beside. bfloat16 is written as
    the uint16 that it is made of. Codecs are of Zarr v3's core. Rows that come meanwhile are not in it; a row
    that another process overwrites meanwhile is left out, in all arrays. The group is there whole or not at
    all.

    Args:
        storage: Whose rows.
        target: The group's folder, which must not be there yet.
        fields: Only these, by name; None: all.
        progress: Is told bytes done and bytes in all.
        disk: Where files are touched.

    Raises:
        StateError: The target is there, or would lie inside a store; or the storage has no fields yet.
        NotFoundError: There is no folder for it.
        SchemaError: There is no such field, or fields hold objects.
        LockedError: Somebody else exports to this target just now.
        StorageError: The disk failed or is full; nothing is left of it.

    Example:
        >>> done = export_zarr(rb.storage, "plain.zarr", fields=["observation", "next.reward"])
        >>> zarr.open_group("plain.zarr", mode="r")["next/reward"].shape == (done.rows, 1)
        True
    """
    disk, target = disk or Disk(), Path(target)
    chosen = _choose(storage, fields)
    if disk.exists(target):
        raise StateError(f"{target} exists already", hint="choose another path")
    folder = target.resolve().parent
    if not disk.is_dir(folder):
        raise NotFoundError(f"there is no folder {folder} in which to make {target.name}", hint="make it")
    for above in (folder, *folder.parents):
        if disk.exists(above / MANIFEST):
            raise StateError(f"{target} would lie inside the store {above}", hint="choose another path")
    with _aside(disk, target) as aside, ThreadPoolExecutor(8, thread_name_prefix="expstore-export") as pool:
        writer = _Group(disk, aside, chosen, storage)
        left_out = _copy(storage, chosen, writer, progress or (lambda done, total: None))
        writer.finish()
        sync_paths(disk, writer.written, sorted(writer.folders), pool)
    names = tuple(key_name(entry.key) for entry in chosen.values() if entry.key[0] != "_row")
    return Exported(
        path=target, rows=writer.rows, left_out=left_out, fields=names, disk_bytes=disk.used(target)
    )


def _choose(storage: Storage, names: Sequence[str] | None) -> dict[int, Field]:
    """Return the fields that are wanted, those of the store's own behind them, by place."""
    schema = storage.require_schema()
    known = {key_name(entry.key): place for place, entry in enumerate(schema.fields)}
    if unknown := [name for name in names or () if name not in known]:
        raise SchemaError(f"no field {unknown[0]!r}", hint="there are " + ", ".join(known))
    wanted = [place for name, place in known.items() if names is None or name in names]
    if objects := [entry for place in wanted if (entry := schema.fields[place]).key in schema.objects]:
        raise SchemaError(
            f"field {key_name(objects[0].key)!r} holds objects, for which Zarr has no form",
            hint="name the other fields",
        )
    if variable := [entry for place in wanted if (entry := schema.fields[place]).variable]:
        name = key_name(variable[0].key)
        raise SchemaError(
            f"field {name!r} is {variable[0]}: Zarr has no form for rows without a fixed size",
            hint="name the other fields",
        )
    every = (*schema.fields, *ROW_FIELDS)
    return {place: every[place] for place in (*wanted, *range(len(schema.fields), len(every)))}


@contextmanager
def _aside(disk: Disk, target: Path) -> Iterator[Path]:
    """Make a folder beside the target, which becomes it, or goes if there is an error."""
    aside = target.with_name(target.name + _SCRAP)
    disk.make_dir(aside)
    try:
        lock = WriterLock(disk, aside / _LOCK)
    except LockedError as exc:
        raise LockedError(f"somebody else exports to {target} just now", hint="choose another path") from exc
    try:
        for name in disk.names(aside):  # of one that was killed
            if name != _LOCK:
                disk.remove_tree(aside / name) if disk.is_dir(aside / name) else disk.unlink(aside / name)
        yield aside
        disk.unlink(aside / _LOCK)
        disk.rename(aside, target)
        disk.sync_dir(target.absolute().parent)
    except BaseException:
        with contextlib.suppress(StorageError):
            disk.remove_tree(aside)
        raise
    finally:
        lock.release()


def _copy(
    storage: Storage, fields: dict[int, Field], writer: _Group, progress: Callable[[int, int], None]
) -> int:
    """Hand all rows that can be read now to the writer; return how many have left meanwhile."""
    window = storage.window
    total, each, done = window.rows, sum(entry.row_bytes for entry in fields.values()), 0
    left_out = 0
    while done < total:
        ids: IntArray = window.nth(np.arange(done, min(done + writer.wanted, total)))
        try:
            found, columns = read_present(storage, ids, list(fields))
        except NotFoundError:
            found, columns = ids[:0], []
        if found.size:
            writer.add(columns)
        left_out += ids.size - found.size
        done += ids.size
        progress(done * each, total * each)
    return left_out


class _Group:
    """Write arrays piece by piece. zarr-python makes the bytes, in memory.

    Threads: one. Crashes: what is written is a scrap until `finish` returned.

    Args:
        disk: Where files are touched.
        folder: The group's.
        fields: What is to come, by place.
        storage: Where from.
    """

    def __init__(self, disk: Disk, folder: Path, fields: dict[int, Field], storage: Storage) -> None:
        import zarr
        from zarr.storage import MemoryStore

        self._disk, self._folder = disk, folder
        self.rows = 0
        self.written: list[Path] = []
        self.folders = {folder}
        self._piece = _power(PIECE_BYTES // sum(entry.row_bytes for entry in fields.values()), PIECE_ROWS)
        self._held = [np.empty((self._piece, *e.shape), e.numpy_dtype) for e in fields.values()]
        self._count = 0
        self._made: dict[str, Any] = {}  # what zarr-python has made, by name
        about = {"uuid": storage.facts().get("uuid")}
        group = zarr.create_group(store=MemoryStore(self._made), attributes={"expstore": about})
        self._arrays = [self._make(group, entry) for entry in fields.values()]

    def _make(self, group: Any, entry: Field) -> Any:
        from zarr.codecs import BloscCodec

        chunk = min(self._piece, _power(CHUNK_BYTES // max(1, entry.row_bytes), PIECE_ROWS))
        size = entry.numpy_dtype.itemsize
        return group.create_array(
            entry.path,
            shape=(0, *entry.shape),
            chunks=(chunk, *entry.shape),
            shards=(self._piece, *entry.shape),
            dtype=entry.numpy_dtype,
            filters=None,
            compressors=BloscCodec(
                typesize=size, cname="zstd", clevel=3, shuffle="shuffle" if size > 1 else "noshuffle"
            ),
            attributes={"expstore": {"dtype": entry.dtype}},
            config={"write_empty_chunks": True},  # -0.0 would not come back
        )

    @property
    def wanted(self) -> int:
        """How many rows make up the piece that has begun."""
        return self._piece - self._count

    def add(self, columns: Sequence[Array]) -> None:
        """Take at most `wanted` rows, one array per field. Shapes `(n, *row shape)`."""
        stop = self._count + len(columns[0])
        for held, values in zip(self._held, columns, strict=True):
            held[self._count : stop] = values
        self._count = stop
        if not self.wanted:
            self._write()

    def _write(self) -> None:
        first, self.rows = self.rows, self.rows + self._count
        for array, held in zip(self._arrays, self._held, strict=True):
            array.resize((self.rows, *held.shape[1:]))
            array[first : self.rows] = held[: self._count]
            for name in [name for name in self._made if not name.endswith("zarr.json")]:
                self._put(name)
        self._count = 0

    def finish(self) -> None:
        """Write the rows that make up no whole piece, and what says what all of it is."""
        if self._count:
            self._write()
        for name in list(self._made):
            self._put(name)

    def _put(self, name: str) -> None:
        path = self._folder / name
        self._disk.make_dir(path.parent)
        self.folders.update(folder for folder in path.parents if folder.is_relative_to(self._folder))
        self._disk.put(path, self._made.pop(name).to_bytes())
        self.written.append(path)


def _power(most: int, limit: int) -> int:
    """Return the largest power of two that is at most this, and at least 1."""
    return min(limit, 1 << (max(1, most).bit_length() - 1))
