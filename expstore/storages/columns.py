"""Columns on disk: Zarr v3 arrays whose shard files are one memory map.

Used by `ZarrStorage`. A shard is all its rows in C order, then a chunk index that is known beforehand
(Zarr v3 sharding codec, index at the end); rows are written with pwrite and read through the map.
zarr-python makes the metadata and never runs when rows are written or read.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.errors import CorruptionError
from expstore.files import AddressRange, Disk, File, address_of
from expstore.schema import Field
from expstore.types import Array, IntArray

__all__ = ["Column", "ColumnGroup"]

CHUNK_ROWS = 4096
SHARD_ROWS = 1 << 20
SHARD_BYTES = 1 << 30
#: Below this row size np.take is the faster gather, above it torch.index_select.
WIDE_ROW = 512
#: Batches up to this many bytes are written by one compiled loop, which keeps the GIL.
DIRECT_BYTES = 512 * 1024
#: So many bytes at a time are written again when a store is opened after a crash.
REWRITE_BYTES = 8 << 20


def shard_rows(row_bytes: int, slots: int | None) -> int:
    """Return how many rows a shard has: a multiple of 4096, so that its bytes fill whole pages."""
    rows = min(SHARD_ROWS, max(CHUNK_ROWS, SHARD_BYTES // row_bytes // CHUNK_ROWS * CHUNK_ROWS))
    return rows if slots is None else min(rows, -(-slots // CHUNK_ROWS) * CHUNK_ROWS)


class Column:
    """Keep one field of all rows.

    Shards are made when the first row comes that needs them; the file has its full length at once and
    takes disk space as rows are written.

    Args:
        disk: Where files are touched.
        folder: The Zarr array's folder.
        entry: The field.
        slots: How many rows a ring has; None: the column grows.
    """

    def __init__(self, disk: Disk, folder: Path, entry: Field, slots: int | None) -> None:
        self.entry = entry
        self.folder = folder
        self.row_bytes = entry.row_bytes
        self.rows = shard_rows(self.row_bytes, slots)
        self.files: list[File] = []
        #: Nothing but False was ever written: then nothing is written or read at all.
        self.blank = entry.dtype == "bool"
        self._wide: tuple[AddressRange, Any] | None = None  # the rows as bytes, when torch is first needed
        self._disk = disk
        self._limit = None if slots is None else -(-slots // self.rows)
        self._reserve(self._limit or 16)

    @property
    def ready(self) -> int:
        """How many slots have a place in a shard."""
        return len(self.files) * self.rows

    def _reserve(self, shards: int) -> None:
        addresses = AddressRange(shards * self.rows * self.row_bytes)
        for number, file in enumerate(self.files):
            self._attach(addresses, number, file)
        shape = (shards * self.rows, *self.entry.shape)
        self._addresses, self._shards = addresses, shards
        self.view: Array = addresses.array(self.entry.numpy_dtype, shape)

    def _attach(self, addresses: AddressRange, number: int, file: File) -> None:
        size = self.rows * self.row_bytes
        addresses.attach(file, at=number * size, size=size)

    def shard_path(self, number: int) -> Path:
        """Return where a shard lies."""
        return self.folder.joinpath("c", str(number), *["0"] * len(self.entry.shape))

    @property
    def file_bytes(self) -> int:
        """Length of a shard file."""
        return self.rows * self.row_bytes + 16 * (self.rows // CHUNK_ROWS) + 4

    def _footer(self) -> bytes:
        chunk = CHUNK_ROWS * self.row_bytes
        index = np.empty((self.rows // CHUNK_ROWS, 2), "<u8")
        index[:, 0] = np.arange(index.shape[0]) * chunk
        index[:, 1] = chunk
        data = index.tobytes()
        crc: int = google_crc32c.value(data)
        return data + crc.to_bytes(4, "little")

    def add_shard(self) -> list[Path]:
        """Make the next shard; return the folders whose names must be synced with its first rows."""
        number = len(self.files)
        path = self.shard_path(number)
        self._disk.make_dir(path.parent)
        temp = path.with_name(path.name + ".tmp")
        file = self._disk.open(temp, create=True)
        try:
            file.truncate(0)
            file.truncate(self.file_bytes)
            file.write(self._footer(), self.rows * self.row_bytes)
            self._disk.rename(temp, path)
            file.path = path
            if self._limit is None and number:
                self._grow_shape(number + 1)
            if number == self._shards:
                self._reserve(2 * self._shards)
            self._attach(self._addresses, number, file)
        except BaseException:
            file.close()
            raise
        self.files.append(file)
        parents = [path.parent]
        while parents[-1] != self.folder:
            parents.append(parents[-1].parent)
        return parents

    def _grow_shape(self, shards: int) -> None:
        path = self.folder / "zarr.json"
        data = json.loads(self._disk.read_whole(path))
        if data["shape"][0] < shards * self.rows:
            data["shape"][0] = shards * self.rows
            self._disk.write_whole(path, json.dumps(data, indent=1).encode())

    def open_shards(self) -> None:
        """Open the shards that are there, up to the first one that is not whole."""
        while self._limit is None or len(self.files) < self._limit:
            number = len(self.files)
            path = self.shard_path(number)
            if self._disk.size(path) != self.file_bytes:
                break
            file = self._disk.open(path)
            if number == self._shards:
                self._reserve(2 * self._shards)
            self._attach(self._addresses, number, file)
            self.files.append(file)
        if self._limit is None and len(self.files) > 1:
            self._grow_shape(len(self.files))

    def require(self, slots: int) -> None:
        """Check that slots 0 to `slots` - 1 have a place.

        Raises:
            CorruptionError: A shard that holds rows is missing or has another length.
        """
        if self.ready < slots:
            path = self.shard_path(len(self.files))
            size = self._disk.size(path)
            found = "is missing" if size < 0 else f"has {size} bytes"
            raise CorruptionError(
                f"{path} {found}, {self.file_bytes} are expected", hint="restore the store from a snapshot"
            )

    def look_for_true(self) -> None:
        """Find out whether the column holds nothing but False."""
        self.blank = self.blank and not self.view[: self.ready].any()

    def spans(self, slot: int, count: int) -> Iterator[tuple[File, int, int, int]]:
        """Cut a run of slots at shard ends: (file, byte offset in it, first row of the run, rows)."""
        done = 0
        while done < count:
            number, row = divmod(slot + done, self.rows)
            n = min(count - done, self.rows - row)
            yield self.files[number], row * self.row_bytes, done, n
            done += n

    def take(self, slots: IntArray) -> Array:
        """Copy rows out. `slots` has shape `(n,)`, the result `(n, *row shape)`."""
        if self.blank:
            return np.zeros((slots.size, *self.entry.shape), np.bool_)
        if self.row_bytes < WIDE_ROW:
            return self.view.take(slots, axis=0)
        return self._take_wide(slots)

    def _take_wide(self, slots: IntArray) -> Array:
        import torch  # only wide rows need it; this layer stays importable without

        addresses, wide = self._addresses, self._wide
        if wide is None or wide[0] is not addresses:  # the writer may have moved to a longer range
            shape = (addresses.size // self.row_bytes, self.row_bytes)
            flat = addresses.array(np.dtype(np.uint8), shape, writable_flag=True)
            wide = self._wide = addresses, torch.from_numpy(flat)
        rows = torch.index_select(wide[1], 0, torch.from_numpy(slots)).numpy()
        taken: Array = rows.view(self.entry.numpy_dtype).reshape(slots.size, *self.entry.shape)
        return taken

    def write_rows(self, slots: IntArray, values: Array) -> list[File]:
        """Write single rows; return the files touched. Neighbours in order go in one write."""
        if self.blank and values.any():
            self.blank = False
        touched: dict[File, None] = {}
        cuts = np.flatnonzero(np.diff(slots) != 1) + 1
        bounds = [0, *cuts.tolist(), slots.size]
        for start, stop in itertools.pairwise(bounds):
            for file, offset, row, n in self.spans(int(slots[start]), stop - start):
                file.write(np.ascontiguousarray(values[start + row : start + row + n]), offset)
                touched[file] = None
        return list(touched)

    def close(self) -> None:
        """Close the files; the map goes when no array is over it any more."""
        for file in self.files:
            file.close()
        self.files = []


@dataclass(frozen=True, slots=True)
class _Span:
    """Slots `low` to `high` - 1, which lie in one shard of every column that is written.

    Columns that hold nothing but False are not: a hole in a file reads as False already.
    """

    low: int
    high: int
    places: list[int]
    files: list[File]
    fds: IntArray
    widths: IntArray
    bases: IntArray  # first slot of each shard
    blank: list[int]
    wanted: int  # how many columns it was made for

    @classmethod
    def around(cls, group: ColumnGroup, slot: int, blank: list[int], wanted: int) -> _Span:
        places = [place for place in range(wanted) if place not in blank]
        chosen = [group.columns[place] for place in places]
        numbers = [slot // column.rows for column in chosen]
        files = [column.files[number] for column, number in zip(chosen, numbers, strict=True)]
        bases = np.array([number * column.rows for column, number in zip(chosen, numbers, strict=True)])
        return cls(
            low=int(bases.max()),
            high=min(int(base) + column.rows for column, base in zip(chosen, bases, strict=True)),
            places=places,
            files=files,
            fds=np.array([file.fd for file in files]),
            widths=np.array([column.row_bytes for column in chosen]),
            bases=bases,
            blank=blank,
            wanted=wanted,
        )


class ColumnGroup:
    """Keep all columns of a store below one folder.

    Args:
        disk: Where files are touched.
        folder: `columns/`.
        fields: The user's fields, then the row fields, priority last.
        slots: How many rows a ring has; None: it grows.
    """

    def __init__(self, disk: Disk, folder: Path, fields: Sequence[Field], slots: int | None) -> None:
        self._disk = disk
        self.folder = folder
        self.columns = [Column(disk, folder.joinpath(*entry.key), entry, slots) for entry in fields]
        self.new_folders: set[Path] = set()
        self._ready = 0
        self._flags = [(p, column) for p, column in enumerate(self.columns) if column.entry.dtype == "bool"]
        self.row_bytes = sum(column.row_bytes for column in self.columns)
        self._span: _Span | None = None

    @staticmethod
    def create(
        disk: Disk,
        folder: Path,
        fields: Sequence[Field],
        slots: int | None,
        pool: ThreadPoolExecutor | None,
        attributes: dict[str, Any],
    ) -> None:
        """Make the Zarr metadata of empty columns aside, sync it, and rename it in."""
        aside = folder.with_name(folder.name + ".tmp")
        disk.remove_tree(aside)
        disk.remove_tree(folder)
        folders = {aside}
        files = []
        try:
            for name, data in _metadata(fields, slots, attributes).items():
                path = aside / name
                disk.make_dir(path.parent)
                folders.update(p for p in path.parents if p.is_relative_to(aside))
                file = disk.open(path, create=True)
                files.append(file)
                file.write(data, 0)
            disk.sync_all(files, sorted(folders), pool)
        finally:
            for file in files:
                file.close()
        disk.rename(aside, folder)
        disk.sync_dir(folder.parent)

    @property
    def ready(self) -> int:
        """How many slots have a place in a shard of every column."""
        return self._ready

    def open_shards(self) -> None:
        """Open what is there."""
        for column in self.columns:
            column.open_shards()
        for _, column in self._flags:
            column.look_for_true()
        self._ready = min(column.ready for column in self.columns)

    def require(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Check that these slots have a place; raise CorruptionError if not."""
        for slot, _, n in pieces:
            for column in self.columns:
                column.require(slot + n if n else 0)

    def ensure(self, slots: int) -> None:
        """Make shards so that slots 0 to `slots` - 1 have a place."""
        if slots <= self._ready:
            return
        for column in self.columns:
            while column.ready < slots:
                made = column.add_shard()  # takes a while, in which the set may be emptied
                self.new_folders.update(made)
        self._ready = min(column.ready for column in self.columns)

    def write(self, pieces: Sequence[tuple[int, int, int]], arrays: Sequence[Array]) -> int:
        """Write a run of rows to all columns; return the crc32c of all but the last (priority).

        Args:
            pieces: Where the run lies: (first slot, offset in the run, rows).
            arrays: One per column, C-contiguous. Shapes `(n, *row shape)`.
        """
        for slot, _, n in pieces:
            self.ensure(slot + n)
        crc = 0
        for array in arrays[:-1]:
            crc = google_crc32c.extend(crc, array)
        self._write_at(pieces, arrays, arrays[0].shape[0])
        return crc

    def write_parts(
        self, pieces: Sequence[tuple[int, int, int]], parts: Sequence[bytes], priorities: Array | None
    ) -> None:
        """Write a run of rows given as bytes, priorities first.

        Args:
            pieces: Where the run lies: (first slot, offset in the run, rows).
            parts: The bytes of every column but priority.
            priorities: Shape `(n,)`; None leaves them as they are.
        """
        arrays: list[Array] = []
        count = sum(n for _, _, n in pieces)
        for column, part in zip(self.columns[:-1], parts, strict=True):
            values = np.frombuffer(part, column.entry.numpy_dtype)
            arrays.append(values.reshape(count, *column.entry.shape))
        for slot, offset, n in pieces:
            self.ensure(slot + n)
            if priorities is not None:
                for file, at, row, rows in self.columns[-1].spans(slot, n):
                    file.write(priorities[offset + row : offset + row + rows].copy(), at)
        self._write_at(pieces, arrays, count)

    def _write_at(self, pieces: Sequence[tuple[int, int, int]], arrays: Sequence[Array], count: int) -> None:
        """Write arrays for all columns, or for all but priority."""
        blank = []
        for place, column in self._flags:
            if column.blank:
                # Never set again: a change in place may have written a True meanwhile.
                if np.count_nonzero(arrays[place]):
                    column.blank = False
                else:
                    blank.append(place)
        if count * self.row_bytes > DIRECT_BYTES:
            self._write_each(pieces, arrays, blank)
            return
        wanted = len(arrays)
        span = self._span
        for slot, offset, n in pieces:
            if (
                span is None
                or span.wanted != wanted
                or span.blank != blank
                or not span.low <= slot <= slot + n <= span.high
            ):
                self._span = span = _Span.around(self, slot, blank, wanted)
            if slot + n > span.high:
                self._write_each([(slot, offset, n)], arrays, blank)
                continue
            starts = np.array([address_of(arrays[place]) for place in span.places])
            if offset:
                starts += span.widths * offset
            sizes = span.widths if n == 1 else span.widths * n
            keep = arrays if not offset and n == count else [array[offset : offset + n] for array in arrays]
            parts = [keep[place] for place in span.places]
            self._disk.scatter(parts, span.files, span.fds, starts, sizes, (slot - span.bases) * span.widths)

    def _write_each(
        self, pieces: Sequence[tuple[int, int, int]], arrays: Sequence[Array], blank: Sequence[int]
    ) -> None:
        """Write column by column: long runs, and those that cross the end of a shard."""
        for place, array in enumerate(arrays):
            if place in blank:
                continue
            for slot, offset, n in pieces:
                for file, at, row, rows in self.columns[place].spans(slot, n):
                    file.write(array[offset + row : offset + row + rows], at)

    def checksum(self, pieces: Iterable[tuple[int, int, int]]) -> int:
        """Return the crc32c that `write` returned for these rows, from what stands on disk."""
        runs = list(pieces)
        crc = 0
        for column in self.columns[:-1]:
            for slot, _, n in runs:
                if slot + n > column.ready:
                    return -1
                crc = google_crc32c.extend(crc, column.view[slot : slot + n].reshape(-1).view(np.uint8))
        return crc

    def rewrite(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Write rows again as they read, so that a sync brings them to the disk for sure."""
        for slot, _, n in pieces:
            for column in self.columns:
                step = max(1, REWRITE_BYTES // column.row_bytes)
                for start in range(slot, slot + n, step):
                    for file, at, row, rows in column.spans(start, min(step, slot + n - start)):
                        file.write(column.view[start + row : start + row + rows].copy(), at)

    def files_of(self, pieces: Iterable[tuple[int, int, int]]) -> set[File]:
        """Return the files that hold these slots, as far as they were ever written to."""
        return {
            file
            for slot, _, n in pieces
            for column in self.columns
            for file, _, _, _ in column.spans(slot, min(n, column.ready - slot))
        }

    def close(self) -> None:
        """Close all files."""
        for column in self.columns:
            column.close()


def _metadata(fields: Sequence[Field], slots: int | None, attributes: dict[str, Any]) -> dict[str, bytes]:
    """Return the files of the Zarr v3 group: relative name -> bytes."""
    import zarr
    from zarr.core.sync import sync
    from zarr.storage import MemoryStore

    store = MemoryStore()
    group = zarr.create_group(store=store, attributes=attributes)
    for entry in fields:
        rows = shard_rows(entry.row_bytes, slots)
        group.create_array(
            entry.path,
            shape=(slots or rows, *entry.shape),
            chunks=(CHUNK_ROWS, *entry.shape),
            shards=(rows, *entry.shape),
            dtype=entry.numpy_dtype,
            compressors=None,
            filters=None,
            attributes={"expstore": {"dtype": entry.dtype}},
        )

    async def collect() -> dict[str, bytes]:
        found = {}
        async for name in store.list():
            data = await store.get(name, zarr.core.buffer.default_buffer_prototype())
            if data is not None:
                found[name] = data.to_bytes()
        return found

    return sync(collect())
