"""Columns on disk: Zarr v3 arrays whose shard files are one memory map.

Used by sets of columns. A shard contains its rows in C order, then a chunk index that is known in advance
(Zarr v3 sharding codec, index at the end). Rows are written with pwrite and read through the map. zarr-python
creates the metadata and never runs when rows are written or read.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from expstore.core import tuning
from expstore.core.buffer_pool import Recycled
from expstore.core.id_set import IdSet
from expstore.core.values import Array, IntArray, cut_run
from expstore.disk.files import KEEP_GIL_BYTES, Disk, File, address_of
from expstore.disk.mapped_files import AddressRange
from expstore.disk.threads import Job, Threads, finish
from expstore.errors import CorruptionError, StorageError
from expstore.schema.schema import Field
from expstore.storages.columns.column import Column, Deleted, FieldSize, ReadPart, RowWriter, Run, WrittenPart
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.zarr_metadata import (
    CHUNK_ROWS,
    SEPARATOR,
    Layout,
    grow_shape,
    read_layout,
    shard_footer,
    shard_name,
)

SHARD_BYTES = 1 << 30
#: Below this row size np.take is the faster gather, above it torch.index_select.
WIDE_ROW = 512
#: Bytes written again at a time when a store is opened after a crash.
REWRITE_BYTES = 8 << 20
#: Bytes summed before other threads may run: a waiting thread would otherwise need 5 ms to get the GIL.
PIECE_BYTES = 1 << 20
#: Batches up to this many bytes are written by one compiled loop, which keeps the GIL.
DIRECT_BYTES = 512 * 1024
#: Longer writes are split into pieces of this many bytes, for several threads.
WRITE_BYTES = 2 << 20
_PAGE = 4096
#: Up to this many runs of rows are written one by one, more by a compiled loop.
_FEW_RUNS = 16
#: If a row has at most this many bytes, unchanged rows are not written.
_NARROW = 4


def shard_rows(row_bytes: int, slots: int | None) -> int:
    """Return how many rows a shard has: a multiple of 4096, so that its bytes fill whole pages."""
    rows = min(tuning.FLAT_SHARD_ROWS, max(CHUNK_ROWS, SHARD_BYTES // row_bytes // CHUNK_ROWS * CHUNK_ROWS))
    return rows if slots is None else min(rows, -(-slots // CHUNK_ROWS) * CHUNK_ROWS)


@cache
def zeros_sum(size: int) -> int:
    """Return the crc32c of `size` zero bytes."""
    crc, piece = 0, bytes(min(size, PIECE_BYTES))
    for start in range(0, size, PIECE_BYTES):
        crc = google_crc32c.extend(crc, piece[: size - start])
    return crc


#: So many missing shards in a row are not looked at one by one.
_LOST_SHARDS = 128


class FlatColumn(Column, ReadPart, WrittenPart):
    """Store one field of all rows, each row at a fixed place in a file.

    A shard is created when the first row needs it. Its file has its full length at once, and takes disk space
    as rows are written.

    Args:
        disk: The disk on which files are accessed.
        folder: The Zarr array's folder.
        entry: The field.
        slots: Number of slots of a ring; None: the column is unbounded.
        layout: Size and names of its shards; None: as in a new store.
        write: Whether shards are created and written to. If not, they are opened for reading (`look`), no
            descriptor stays open, and reading a damaged shard raises an error.
        fills: Whether reading a hole through a map allocates space, as in a file system in memory.
    """

    #: The packing of its chunks: flat columns have none.
    packing: Packing | None = None

    def __init__(
        self,
        disk: Disk,
        folder: Path,
        entry: Field,
        slots: int | None,
        *,
        layout: Layout | None = None,
        write: bool = True,
        fills: bool = False,
    ) -> None:
        super().__init__(entry, folder, slots, entry.row_bytes)
        self.rows = shard_rows(self.row_bytes, slots) if layout is None else layout.rows
        self.separator = SEPARATOR if layout is None else layout.separator
        self.files: list[File] = []
        #: Whether reading a hole through the map allocates space, of which there may be too little.
        self.fills = fills
        #: Whether only False was ever written: then no file is written or read at all.
        self.blank = write and entry.dtype == "bool" and not fills
        #: Shards that cannot be read, with the reason.
        self.damaged: dict[int, str] = {}
        #: Why the whole column is unreadable; None: it is readable.
        self.fault: str | None = None
        self.wide_row = WIDE_ROW
        self._looked = 0  # number of shards opened for reading only
        self._wide: tuple[AddressRange, Any] | None = None  # the rows as integers, once torch is needed
        self._recycled = Recycled()
        self._disk = disk
        self._limit = None if slots is None else -(-slots // self.rows)
        self._reserve(self._limit or 16)

    @property
    def ready(self) -> int:
        """Number of slots that have a place in a shard."""
        return (len(self.files) or self._looked) * self.rows

    def _reserve(self, shards: int) -> None:
        addresses = AddressRange(shards * self.rows * self.row_bytes)
        for number, kept in enumerate(self.files):
            with kept.use() as file:
                self._attach(addresses, number, file)
        for number in range(self._looked):
            self._look_at(addresses, number)
        shape = (shards * self.rows, *self.entry.shape)
        self._addresses, self._shards = addresses, shards
        self.view: Array = addresses.array(self.entry.numpy_dtype, shape)

    def _attach(self, addresses: AddressRange, number: int, file: File) -> None:
        size = self.rows * self.row_bytes
        addresses.attach(file, at=number * size, size=size)

    def shard_path(self, number: int) -> Path:
        """Return the path of a shard."""
        return self.folder / shard_name(number, len(self.entry.shape), self.separator)

    @property
    def file_bytes(self) -> int:
        """Length of a shard file, bytes."""
        return self.rows * self.row_bytes + 16 * (self.rows // CHUNK_ROWS) + 4

    def add_shard(self) -> list[Path]:
        """Create the next shard; return the folders whose names must be synced with its first rows."""
        number = len(self.files)
        path = self.shard_path(number)
        self._disk.make_dir(path.parent)
        temp = path.with_name(path.name + ".tmp")
        file = self._disk.open(temp, create=True)
        try:
            file.truncate(0)
            file.truncate(self.file_bytes)
            file.write(shard_footer(self.rows, self.row_bytes), self.rows * self.row_bytes)
            self._disk.rename(temp, path)
            file.path = path
            if self._limit is None and number:
                grow_shape(self._disk, self.folder, (number + 1) * self.rows)
            if number == self._shards:
                self._reserve(2 * self._shards)
            self._attach(self._addresses, number, file)
        except BaseException:
            file.close()
            raise
        self.files.append(self._disk.keep_open(file))
        parents = [path.parent]
        while parents[-1] != self.folder:
            parents.append(parents[-1].parent)
        return parents

    def open_files(self) -> None:
        """Open the existing shards, up to the first incomplete one."""
        while self._limit is None or len(self.files) < self._limit:
            number = len(self.files)
            path = self.shard_path(number)
            if self._disk.size(path) != self.file_bytes:
                break
            file = self._disk.open(path)
            if number == self._shards:
                self._reserve(2 * self._shards)
            self._attach(self._addresses, number, file)
            self.files.append(self._disk.keep_open(file))
        if self._limit is None and len(self.files) > 1:
            grow_shape(self._disk, self.folder, self.ready)
        self._look_for_true()

    def look(self, slots: int, *, due: bool = True) -> None:
        """Open the shards of slots 0 to `slots` - 1 for reading only; see `ReadPart`."""
        while self._looked * self.rows < slots:
            if not due and self._disk.size(self.shard_path(self._looked)) != self.file_bytes:
                break
            if self._looked == self._shards:
                self._reserve(2 * self._shards)
            self._look_at(self._addresses, self._looked)
            self._looked += 1
            if self.fault is None and self._looked % _LOST_SHARDS == 0:
                newest = range(self._looked - _LOST_SHARDS, self._looked)
                if all(number in self.damaged for number in newest):  # the number of rows is forged
                    raise CorruptionError(
                        f"{self.folder} should have {slots:,} rows, and has no shard from {newest[0]} on"
                    )

    def _look_at(self, addresses: AddressRange, number: int) -> None:
        if number in self.damaged:
            return
        if self.fault is not None:
            self.damaged[number] = self.fault
            return
        path = self.shard_path(number)
        try:
            size = self._disk.size(path)
            if size != self.file_bytes:
                raise self._unfit(path, size)
            file = self._disk.open(path, write=False)
            try:
                self._attach(addresses, number, file)
            finally:
                file.close()
        except StorageError as exc:
            self.damaged[number] = exc.message

    def _unfit(self, path: Path, size: int) -> CorruptionError:
        found = "is missing" if size < 0 else f"has {size} bytes"
        return CorruptionError(f"{path} {found}, {self.file_bytes} bytes are expected")

    def check(self, slots: IntArray) -> None:
        """Raise CorruptionError if one of these slots is in a damaged shard. Shape `(n,)`."""
        numbers = slots // self.rows
        for number, found in self.damaged.items():
            if (numbers == number).any():
                raise CorruptionError(f"rows of {self.folder} cannot be read: {found}")

    def part(self, slot: int, count: int) -> Array:
        """View a run of slots; unlike a slice of `view`, this never touches a damaged shard.

        Raises:
            CorruptionError: A shard of the run is damaged.
        """
        self._check_run(slot, count)
        return self.view[slot : slot + count]

    def _check_run(self, slot: int, count: int) -> None:
        if self.damaged and count:
            self.check(np.arange(slot // self.rows, (slot + count - 1) // self.rows + 1) * self.rows)

    def require(self, slots: int) -> None:
        """Check that slots 0 to `slots` - 1 have a place.

        Raises:
            CorruptionError: A shard with rows is missing or has another length.
        """
        if self.ready < slots:
            path = self.shard_path(len(self.files))
            raise self._unfit(path, self._disk.size(path))

    def require_rows(self, first_id: int, count: int) -> None:
        """Check that rows have a place: a row exists if its shard does.

        Raises:
            CorruptionError: A shard with rows is missing or has another length.
        """
        for slot, _, n in cut_run(first_id, count, self.slots):
            self.require(slot + n if n else 0)

    def _look_for_true(self) -> None:
        """Find out whether all values of the column are False."""
        step = REWRITE_BYTES // self.row_bytes or 1
        for start in range(0, self.ready if self.blank else 0, step):
            if self.read(start, min(step, self.ready - start)).any():
                self.blank = False
                return

    def read(self, slot: int, count: int) -> Array:
        """Copy a run of slots out of the files. Unlike the map, this is safe where there are holes."""
        parts = []
        for number, row, _, n in self._runs(slot, count):
            # A descriptor of its own: the thread holds no lock, and the writer's descriptors may be closed.
            with contextlib.closing(self._disk.open(self.shard_path(number), write=False)) as file:
                parts.append(file.read(row * self.row_bytes, n * self.row_bytes))
        values = np.frombuffer(b"".join(parts), self.entry.numpy_dtype)
        return values.reshape(count, *self.entry.shape)

    def copy(self, slot: int, count: int) -> Array:
        """Return a run of slots of which some may never have been written; a view where that is safe.

        Raises:
            CorruptionError: A shard of the run is damaged.
        """
        if not self.fills:
            return self.part(slot, count)
        self._check_run(slot, count)
        return self.read(slot, count)

    def peek(self, slots: IntArray) -> Array:
        """Copy rows out; zeros where none was written. Shapes as in `gather`."""
        found = np.zeros((slots.size, *self.entry.shape), self.entry.numpy_dtype)
        there = slots < self.ready
        # Not `gather`: rows may be holes. Only the requested rows are read, unless holes must not be mapped.
        found[there] = self.copy(0, int(slots[there].max(initial=-1)) + 1)[slots[there]]
        return found

    def spans(self, slot: int, count: int) -> Iterator[tuple[File, int, int, int]]:
        """Split a run of slots at shard ends: (file, byte offset in it, first row of the run, rows)."""
        for number, row, done, n in self._runs(slot, count):
            yield self.files[number], row * self.row_bytes, done, n

    def _runs(self, slot: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Split a run of slots at shard ends: (shard, first row in it, first row of the run, rows)."""
        done = 0
        while done < count:
            number, row = divmod(slot + done, self.rows)
            n = min(count - done, self.rows - row)
            yield number, row, done, n
            done += n

    @property
    def is_narrow(self) -> bool:
        """Whether the column can be read and has rows so short that finding them takes most of the time."""
        return not self.blank and self.row_bytes < self.wide_row

    @property
    def is_mapped(self) -> bool:
        """Whether all rows are read through the map: it has no damaged shards and no rows without a file."""
        return not self.blank and not self.damaged

    def gather(self, slots: IntArray) -> Array:
        """Copy rows out. `slots` has shape `(n,)`, the result `(n, *row shape)`."""
        if self.blank:
            return np.zeros((slots.size, *self.entry.shape), np.bool_)
        if self.damaged:
            self.check(slots)
        if self.row_bytes < self.wide_row:
            return self.view.take(slots, axis=0)
        return self._gather_wide(slots)

    def _gather_wide(self, slots: IntArray) -> Array:
        import torch  # imported here: only wide rows need torch, and this package must not import it

        addresses, wide = self._addresses, self._wide
        if wide is None or wide[0] is not addresses:  # the writer may have moved to a longer range
            # Torch copies single bytes at half the speed of larger integers.
            size = next(size for size in (8, 4, 2, 1) if self.row_bytes % size == 0)
            shape = (addresses.size // self.row_bytes, self.row_bytes // size)
            flat = addresses.array(np.dtype(f"i{size}"), shape, writable_flag=True)
            wide = self._wide = addresses, torch.from_numpy(flat)
        rows = wide[1]
        taken = self._recycled.empty((slots.size, *self.entry.shape), self.entry.numpy_dtype)
        out = torch.from_numpy(
            taken.reshape(slots.size, self.entry.row_items).view(f"i{rows.element_size()}")
        )
        torch.index_select(rows, 0, torch.from_numpy(slots), out=out)
        return taken

    def fill(self, pieces: Iterable[tuple[int, int, int]], values: Array) -> set[File]:
        """Write a run of rows of a new column; return the changed files. Zeros stay holes where that is safe.

        Args:
            pieces: Where the run is written: (first slot, offset in the run, number of rows).
            values: Shape `(n, *row shape)`.
        """
        touched: set[File] = set()
        if not self.fills and not values.reshape(-1).view(np.uint8).any():
            return touched  # holes read as zeros, and these were never written to
        self.blank = False
        for slot, offset, n in pieces:
            for file, at, row, some in self.spans(slot, n):
                file.write(values[offset + row : offset + row + some], at)
                touched.add(file)
        return touched

    def rewrite(self, slot: int, count: int) -> None:
        """Write a run of slots again as they read, so that a sync makes them durable for certain."""
        step = max(1, REWRITE_BYTES // self.row_bytes)
        for start in range(slot, slot + count, step):
            for file, at, row, n in self.spans(start, min(step, slot + count - start)):
                file.write(self.view[start + row : start + row + n].copy(), at)

    def write_rows(self, slots: IntArray, values: Array) -> list[File]:
        """Write single rows; return the changed files. Consecutive rows are written together."""
        if self.blank:
            if not values.any():
                return []
            self.blank = False
        touched: dict[File, None] = {}
        cuts = np.flatnonzero(np.diff(slots) != 1) + 1
        if cuts.size > _FEW_RUNS:
            if (
                self.entry.row_items == 1 and self.row_bytes <= _NARROW
            ):  # flags and priorities are mostly unchanged
                bits = f"u{self.row_bytes}"
                values = np.ascontiguousarray(values).reshape(-1)
                other = self.gather(slots).reshape(-1).view(bits) != values.view(bits)
                slots, values = slots[other], values[other]
            return self._scatter_rows(slots, values) if slots.size else []
        bounds = [0, *cuts.tolist(), slots.size]
        for start, stop in itertools.pairwise(bounds):
            for file, offset, row, n in self.spans(int(slots[start]), stop - start):
                file.write(np.ascontiguousarray(values[start + row : start + row + n]), offset)
                touched[file] = None
        return list(touched)

    def _scatter_rows(self, slots: IntArray, values: Array) -> list[File]:
        """Write single rows one by one, by a compiled loop."""
        rows, count = np.ascontiguousarray(values).reshape(slots.size, -1), slots.size
        numbers = slots // self.rows
        shards, places = np.unique(numbers, return_inverse=True)
        chosen = [self.files[number] for number in shards.tolist()]
        with contextlib.ExitStack() as opened:
            files = [opened.enter_context(file.use()) for file in chosen]
            self._disk.scatter(
                rows,
                [files[place] for place in places.tolist()],
                np.array([file.fd for file in files])[places],
                address_of(rows) + self.row_bytes * np.arange(count),
                np.full(count, self.row_bytes),
                (slots - numbers * self.rows) * self.row_bytes,
            )
        return chosen

    # -- sums and space --------------------------------------------------------------------------

    def extend_checksum(self, crc: int, first_id: int, count: int) -> int | None:
        """Extend a crc32c by a run of rows; return None if rows have no place."""
        for slot, _, n in cut_run(first_id, count, self.slots):
            if slot + n > self.ready:
                return None
            crc = google_crc32c.extend(crc, self.copy(slot, n).reshape(-1).view(np.uint8))
        return crc

    def sum_run(self, slot: int, count: int) -> int:
        """Return the crc32c of a run of slots, written or not."""
        size = count * self.row_bytes
        if self.blank:
            return zeros_sum(size)  # a hole: reading it would fill memory with zeros
        number, row = divmod(slot, self.rows)
        rows: NDArray[np.uint8]
        if self.files and size <= KEEP_GIL_BYTES and row + count <= self.rows:
            # A map reads ahead where a page is not in memory: megabytes, for a block with a few rows.
            rows = np.empty(size, np.uint8)
            if self.files[number].read_cached(row * self.row_bytes, rows):
                return int(google_crc32c.value(rows))
        rows = self.copy(slot, count).reshape(-1).view(np.uint8)
        if size <= PIECE_BYTES:
            crc: int = google_crc32c.value(rows)
            return crc
        crc = 0
        for start in range(0, size, PIECE_BYTES):
            crc = google_crc32c.extend(crc, rows[start : start + PIECE_BYTES])
            time.sleep(0)
        return crc

    def free(self, deleted: Deleted) -> set[File]:
        """Free the pages in which all rows are deleted; return the changed files."""
        return set() if self.blank else self._punch(deleted.near)

    def _punch(self, ids: IdSet) -> set[File]:
        size, shard = self.row_bytes, self.rows * self.row_bytes
        starts = -(-(ids.first - 1) * size // _PAGE) * _PAGE
        stops = np.minimum(ids.last * size // _PAGE * _PAGE, len(self.files) * shard)
        some = starts < stops
        files: set[File] = set()
        for start, stop in zip(starts[some].tolist(), stops[some].tolist(), strict=True):
            while start < stop:
                number = start // shard
                end = min(stop, (number + 1) * shard)
                self.files[number].punch(start - number * shard, end - number * shard)
                files.add(self.files[number])
                start = end
        return files

    def paths(self) -> list[Path]:
        """Return the files with rows."""
        return [file.path for file in self.files]

    def least_shards(self, rows: int) -> int:
        """Return the least number of shards of `rows` rows."""
        return -(-rows // self.rows)

    def size(self, held: int, ids: Callable[[IntArray], IntArray]) -> FieldSize:
        """Return how the field is stored on disk; see `Column`."""
        used = self._disk.measure_space(self.folder) if self._disk.exists(self.folder) else 0
        if self.fault is not None:
            return FieldSize(None, None, None, used, None, None, self.row_bytes)
        # Rows that were never written, for example flags that are never set, take less space.
        row_bytes = min(self.row_bytes, used / held) if held else self.row_bytes
        return FieldSize("flat", None, None, used, None, None, row_bytes)

    @property
    def mean_bytes(self) -> int:
        """The size of a row in memory, bytes."""
        return self.row_bytes

    def measure_row_bytes(self, rows: int) -> float:
        """Return the disk space of a row, bytes."""
        return self.row_bytes

    def rest(self) -> None:
        """Close the descriptors; see `WrittenPart`."""
        for file in self.files:
            file.rest()

    def close(self) -> None:
        """Close the files; the map is removed with the last array over it."""
        self._disk.close_kept(self.files)
        self.files = []


def find_flat(
    disk: Disk, folder: Path, entry: Field, slots: int | None, *, fills: bool, fault: str | None = None
) -> FlatColumn:
    """Return a column for reading; if its metadata cannot be read, the whole column counts as damaged.

    Args:
        disk: The disk on which files are accessed.
        folder: The folder of its Zarr array.
        entry: The field.
        slots: Number of slots of a ring; None: the column is unbounded.
        fills: Whether reading a hole through a map allocates space, as in a file system in memory.
        fault: Why its metadata cannot be read; None: read it.
    """
    layout = None
    if fault is None:
        try:
            layout = read_layout(disk, folder, entry)
        except StorageError as exc:
            fault = exc.message
    column = FlatColumn(disk, folder, entry, slots, layout=layout, write=False, fills=fills)
    column.fault = fault
    return column


@dataclass(frozen=True, slots=True)
class _Span:
    """Slots `low` to `high` - 1, which are in one shard of every column that is written.

    Columns with only False values are not written: a hole in a file already reads as False.
    """

    low: int
    high: int
    places: list[int]
    files: list[File]
    fds: IntArray
    widths: IntArray
    bases: IntArray  # first slot of each shard
    holes: list[int]
    wanted: int  # number of columns for which it was made

    @classmethod
    def around(cls, columns: Mapping[int, FlatColumn], slot: int, holes: list[int], wanted: int) -> _Span:
        places = [place for place in columns if place < wanted and place not in holes]
        chosen = [columns[place] for place in places]
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
            holes=holes,
            wanted=wanted,
        )


class FlatWriter(RowWriter):
    """Write runs of rows to flat columns.

    Threads: one thread writes.

    Args:
        disk: The disk on which files are accessed.
        columns: Columns by position, with room for all rows that are written.
        row_bytes: Size of a row in all columns of the store, bytes.
        threads: Threads that write long runs.
    """

    def __init__(
        self, disk: Disk, columns: Mapping[int, FlatColumn], row_bytes: int, threads: Threads
    ) -> None:
        self._disk, self._columns, self._row_bytes, self._threads = disk, columns, row_bytes, threads
        self._flags = [(place, column) for place, column in columns.items() if column.entry.dtype == "bool"]
        self._span: _Span | None = None

    def write(self, run: Run) -> list[int]:
        """Write rows; `run.jobs` has the writes that other threads have not finished."""
        holes, count = [], run.count
        for place, column in self._flags:
            if column.blank:
                # Never set again: a change in place may have written a True meanwhile.
                if np.count_nonzero(run.values[place]):
                    column.blank = False
                else:
                    holes.append(place)
        if count * self._row_bytes > DIRECT_BYTES:
            self._write_each(run, run.pieces, holes)
            return []
        arrays, wanted = run.values, len(run.values)
        span = self._span
        for slot, offset, n in run.pieces:
            if (
                span is None
                or span.wanted != wanted
                or span.holes != holes
                or not span.low <= slot <= slot + n <= span.high
            ):
                self._span = span = _Span.around(self._columns, slot, holes, wanted)
            if slot + n > span.high:
                self._write_each(run, [(slot, offset, n)], holes)
                finish(run.jobs)
                run.jobs.clear()
                continue
            starts = np.array([address_of(arrays[place]) for place in span.places])
            if offset:
                starts += span.widths * offset
            sizes = span.widths if n == 1 else span.widths * n
            keep = arrays if not offset and n == count else [array[offset : offset + n] for array in arrays]
            parts = [keep[place] for place in span.places]
            self._disk.scatter(parts, span.files, span.fds, starts, sizes, (slot - span.bases) * span.widths)
        return []

    def write_again(self, run: Run, synced: int) -> None:
        """Write rows, whether or not they are already on disk."""
        self.write(run)
        finish(run.jobs)

    def rest(self) -> None:
        """Forget descriptors; see `RowWriter`."""
        self._span = None

    def _write_each(self, run: Run, pieces: Sequence[tuple[int, int, int]], holes: Sequence[int]) -> None:
        """Write column by column: long runs, on several threads, and runs that cross a shard's end."""
        for place, column in self._columns.items():
            if place in holes or place >= len(run.values):
                continue
            array, rows = run.values[place], max(1, WRITE_BYTES // column.row_bytes)
            for slot, offset, n in pieces:
                for start in range(0, n, rows):
                    for file, at, row, some in column.spans(slot + start, min(rows, n - start)):
                        first = offset + start + row
                        self._write_some(file, array[first : first + some], at, run.jobs)

    def _write_some(self, file: File, part: Array, at: int, jobs: list[Job]) -> None:
        if part.nbytes <= KEEP_GIL_BYTES:
            file.write(part, at)
        elif (job := self._disk.write_beside(self._threads, file, part, at)) is not None:
            jobs.append(job)
