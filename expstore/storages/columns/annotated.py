"""Annotated fields: columns whose values are written after their rows, by number of the newest record.

Used by the set of columns and by storages in RAM. The values of all annotated fields of a store are in its
records of annotations, in the order in which they were written; memory has the place of the newest value of
each row. A row that has no value reads as NaN, 0, False, or as a list of length 0.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray, Key
from expstore.disk.checkpointed import Checkpoint, Checkpointed, Dirty
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError
from expstore.schema.schema import DTYPES, Field, build_annotated_error
from expstore.storages.columns.capture import Capture, Target
from expstore.storages.columns.column import Column, FieldSize
from expstore.storages.format.annotation_log import (
    FILE_BYTES,
    FILE_SHIFT,
    Head,
    Part,
    file_path,
    find_files,
    pack,
    parse_own,
    read_head,
    read_heads,
)
from expstore.storages.format.chunk_encoding import Packing
from expstore.storages.format.paths import ANNOTATIONS

if TYPE_CHECKING:
    import pyarrow as pa

Flags = NDArray[np.bool_]
_OFFSET = (1 << FILE_SHIFT) - 1
#: The newest values of fields with rows of up to this size are in memory, bytes.
SMALL_BYTES = 32
_NONE = np.empty(0, np.int64)


class _Newest:
    """The newest value of each row of one field, by slot: id of the row, address, and number of items.

    Args:
        entry: The field, if its values are small: then they are here, too, because addresses take longer to
            follow; None: it is ragged, or has larger values.
    """

    def __init__(self, entry: Field | None = None) -> None:
        self.ids, self.at, self.items = _NONE, _NONE, _NONE
        self.entry, self.values = entry, None if entry is None else make_missing(entry, 0)

    def put(self, slots: IntArray, ids: IntArray, at: IntArray, items: IntArray) -> None:
        size = int(slots.max(initial=-1)) + 1
        if size > self.ids.size:
            more = np.zeros(max(1024, 2 * size) - self.ids.size, np.int64)
            self.ids, self.at, self.items = (
                np.concatenate([old, more]) for old in (self.ids, self.at, self.items)
            )
            if self.entry is not None and self.values is not None:
                self.values = np.concatenate([self.values, make_missing(self.entry, more.size)])
        self.ids[slots], self.at[slots], self.items[slots] = ids, at, items


class Annotations:
    """Find and copy the newest values of annotated fields.

    Threads: one adds records, any number read.

    Args:
        slots: Number of slots of a ring; None: the store is unbounded.
    """

    def __init__(self, slots: int | None) -> None:
        self.slots = slots
        #: The newest id that a slot may have: rows of lower ids in the same slot are gone.
        self.last = 0
        self._lock = threading.RLock()
        self._fields: dict[Key, _Newest] = {}

    def _follow(self) -> None:
        """Add the records that another process has written; the lock is held."""

    def _view(self, number: int, end: int) -> memoryview:
        """Return the bytes of a file, at least up to `end`; the lock is held."""
        raise NotImplementedError

    def records(self) -> Iterator[tuple[int, Head]]:
        """Yield the heads of all records, the oldest first, each with its address."""
        raise NotImplementedError

    def add(
        self, time: int, by: str | None, ids: IntArray, parts: Sequence[Part], declared: Key | None = None
    ) -> Callable[[], None]:
        """Add a record; return a function that makes its values the newest ones here.

        Raises:
            StorageError: The disk failed; nothing was added.
        """
        raise NotImplementedError

    def save(self, target: Target, end: int) -> list[tuple[Path, int]]:
        """Bring the records up to an address into a snapshot; return the files written, and their lengths."""
        raise NotImplementedError

    @property
    def end(self) -> int:
        """The address after the newest record."""
        raise NotImplementedError

    def write_copy(
        self, source: Annotations, keys: Container[Key], rename: Callable[[IntArray], IntArray]
    ) -> None:
        """Append the records of other annotations, for their rows that remain.

        Args:
            source: The other annotations.
            keys: The present fields.
            rename: Returns the new ids of rows; 0: the row does not remain. Shapes `(n,)`.
        """
        for at, head, places in source.valid_records(keys):
            ids = rename(head.ids)
            kept = ids > 0
            if kept.any():
                parts = [source.read_part(at, head, place, kept) for place in places]
                self.add(head.time, head.by, ids[kept], parts)()

    def _show(self, at: int, head: Head) -> None:
        """Make the values of a record the newest ones; the lock is held."""
        if head.declared is not None:
            self._fields[head.declared] = _Newest()
        slots = head.ids - 1 if self.slots is None else (head.ids - 1) % self.slots
        for field in head.fields:
            if (known := self._fields.get(field.key)) is None or not known.ids.size:
                entry = None if field.shape is None else Field(field.key, field.dtype, field.shape)
                is_small = entry is not None and entry.row_bytes <= SMALL_BYTES
                known = self._fields[field.key] = _Newest(entry if is_small else None)
            places = at + head.size + field.starts
            known.put(slots, head.ids, places, field.items)
            if known.values is not None and known.entry is not None and places.size:
                known.values[slots] = self._copy_rows(known.entry, places)

    def find(self, key: Key, slots: IntArray) -> tuple[IntArray, IntArray]:
        """Return the address of the newest value of each slot, 0 without one, and its number of items."""
        with self._lock:
            self._follow()
            known = self._fields.get(key) or _Newest()
            at, items = np.zeros(slots.size, np.int64), np.zeros(slots.size, np.int64)
            here = np.flatnonzero(slots < known.ids.size)
            slots = slots[here]
            ids = slots + 1
            if self.slots is not None:
                ids = self.last - (self.last - ids) % self.slots
            there = known.ids[slots] == ids
            at[here[there]], items[here[there]] = known.at[slots[there]], known.items[slots[there]]
        return at, items

    def gather(self, entry: Field, slots: IntArray) -> Any:
        """Copy the newest values of rows. Shape `(n, *row shape)`; a pyarrow Array of a ragged field.

        Raises:
            CorruptionError: A file has lost values.
        """
        if not entry.variable and entry.row_bytes <= SMALL_BYTES:
            small = self._gather_small(entry, slots)
            if small is not None:
                return small
        at, items = self.find(entry.key, slots)
        if entry.variable:
            return _to_lists(entry, self.copy(at, items * _item_bytes(entry)), items, at > 0)
        values = make_missing(entry, slots.size)
        here = at > 0
        if here.any():
            values[here] = self._copy_rows(entry, at[here])
        return values

    def _gather_small(self, entry: Field, slots: IntArray) -> Array | None:
        """Copy values that are in memory; None: they are not, or slots were never annotated."""
        with self._lock:
            self._follow()
            known = self._fields.get(entry.key)
            if known is None or known.values is None:
                return None
            try:
                values = known.values.take(slots, axis=0)
            except IndexError:
                return None
            if self.slots is not None:  # a slot may have a newer row
                stale = known.ids[slots] != self.last - (self.last - 1 - slots) % self.slots
                if stale.any():
                    values[stale] = make_missing(entry, 1)
        return values

    def _copy_rows(self, entry: Field, at: IntArray) -> Array:
        """Copy values of a fixed size. Shape `(n, *row shape)`."""
        found = np.empty((at.size, entry.row_items), entry.numpy_dtype)
        width = entry.numpy_dtype.itemsize
        for number in np.unique(at >> FILE_SHIFT).tolist():
            here = at >> FILE_SHIFT == number
            starts = at[here] & _OFFSET
            with self._lock:
                view = self._view(number, int(starts.max()) + entry.row_bytes)
            flat = np.frombuffer(view, entry.numpy_dtype, len(view) // width)
            rows = np.lib.stride_tricks.sliding_window_view(flat, entry.row_items)
            found[here] = rows[starts // width]
        return found.reshape(at.size, *entry.shape)

    def copy(self, at: IntArray, sizes: IntArray) -> bytearray:
        """Copy bytes, one after another.

        Args:
            at: Their addresses; 0: nothing is copied. Shape `(n,)`.
            sizes: How many bytes each. Shape `(n,)`.
        """
        numbers, starts = at >> FILE_SHIFT, at & _OFFSET
        views: dict[int, memoryview] = {}
        with self._lock:
            for number in np.unique(numbers[at > 0]).tolist():
                here = numbers == number
                views[number] = self._view(number, int((starts[here] + sizes[here]).max()))
        views[0] = memoryview(b"")
        rows = zip(numbers.tolist(), starts.tolist(), (starts + sizes).tolist(), strict=True)
        return bytearray().join([views[number][start:stop] for number, start, stop in rows])

    def valid_records(self, keys: Container[Key]) -> Iterator[tuple[int, Head, list[int]]]:
        """Yield the heads of records with values that are valid, each with its address and places in it.

        Values of a field before its newest declaration are void: a field of its name was dropped.

        Args:
            keys: The present fields.
        """
        begins = {head.declared: head.number for _, head in self.records() if head.declared is not None}
        for at, head in self.records():
            places = [
                place
                for place, field in enumerate(head.fields)
                if field.key in keys and begins.get(field.key, 0) < head.number
            ]
            if places:
                yield at, head, places

    def read_part(self, at: int, head: Head, place: int, rows: Flags) -> Part:
        """Copy the values that a record has of one field, for some of its rows."""
        field = head.fields[place]
        dtype, items = DTYPES[field.dtype], field.items[rows]
        data = self.copy(at + head.size + field.starts[rows], items * dtype.itemsize)
        lengths = items if field.shape is None else None
        return Part(field.key, field.dtype, field.shape, np.frombuffer(data, dtype), lengths)

    def close(self) -> None:
        """Close the files; a map is removed with the last array over it."""


def _item_bytes(entry: Field) -> int:
    return DTYPES[item_dtype(entry)].itemsize


def item_dtype(entry: Field) -> str:
    """Return the dtype of one value of an annotated field."""
    from expstore.schema.arrow_types import ragged_of

    found = ragged_of(entry.arrow) if entry.variable else None
    return entry.dtype if found is None else found.dtype


def make_missing(entry: Field, count: int) -> Array:
    """Return what rows without a value of a fixed size read as. Shape `(count, *row shape)`."""
    value = np.nan if entry.numpy_dtype.kind == "f" else 0
    return np.full((count, *entry.shape), value, entry.numpy_dtype)


def _to_lists(entry: Field, data: bytearray, items: IntArray, present: Flags) -> pa.Array:
    """Return ragged rows as a pyarrow Array; rows without a value are null, and of length 0."""
    import pyarrow as pa

    from expstore.schema.arrow_types import to_type

    kind = to_type(entry.arrow)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(items)]).astype(np.int32)
    values = np.frombuffer(data, DTYPES[item_dtype(entry)])
    buffers = [None, pa.py_buffer(offsets)]
    if not present.all():
        buffers[0] = pa.py_buffer(np.packbits(present, bitorder="little").tobytes())
    children = [pa.array(values, kind.value_type)]
    return pa.ListArray.from_buffers(kind, items.size, buffers, children=children)


class MemoryAnnotations(Annotations):
    """Annotations in RAM: a "file" for each record.

    Args:
        slots: Number of slots of a ring; None: the store is unbounded.
        data: Records, as `pack` returns them.
    """

    def __init__(self, slots: int | None, data: bytes = b"") -> None:
        super().__init__(slots)
        self._records: list[tuple[Head, memoryview]] = []
        at = 0
        while at < len(data):
            head = parse_own(data[at:])
            self._keep(head, memoryview(data)[at : at + head.size + head.body])
            at += head.size + head.body

    def _keep(self, head: Head, data: memoryview) -> None:
        with self._lock:
            self._records.append((head, data))
            self._show(len(self._records) << FILE_SHIFT, head)

    def add(
        self, time: int, by: str | None, ids: IntArray, parts: Sequence[Part], declared: Key | None = None
    ) -> Callable[[], None]:
        """Prepare a record; return a function that makes its values the newest ones."""
        packed, body = pack(len(self._records) + 1, time, by, ids, parts, declared)
        return partial(self._keep, parse_own(packed), memoryview(packed + body))

    def _view(self, number: int, end: int) -> memoryview:
        return self._records[number - 1][1]

    def records(self) -> Iterator[tuple[int, Head]]:
        """Yield the heads of all records, the oldest first, each with its address."""
        for number, (head, _) in enumerate(list(self._records), start=1):
            yield number << FILE_SHIFT, head

    @property
    def data(self) -> bytes:
        """All records, one after another."""
        return b"".join(data for _, data in self._records)

    @property
    def end(self) -> int:
        """The address after the newest record in the file of a snapshot."""
        return (1 << FILE_SHIFT) + sum(len(data) for _, data in self._records)

    def save(self, target: Target, end: int) -> list[tuple[Path, int]]:
        """Write the records to one file of a snapshot."""
        path = file_path(target.folder / ANNOTATIONS, 1)
        target.make_folder(path.parent)
        target.disk.put(path, self.data[: end & _OFFSET])
        return [(path, end & _OFFSET)]


class AnnotationReader(Annotations):
    """Annotations in files, which a writer may append to meanwhile.

    Processes: any number read while one appends. A record is read once its head is whole; its values are
    written before it.

    Args:
        disk: The disk on which files are accessed.
        store: The folder of the store, or of a snapshot.
        slots: Number of slots of a ring; None: the store is unbounded.
    """

    def __init__(self, disk: Disk, store: Path, slots: int | None) -> None:
        super().__init__(slots)
        self._disk, self._store, self.folder = disk, store, store / ANNOTATIONS
        #: The number of the newest record, and the address after it.
        self.number, self._end = 0, 0
        #: Values after this address are compared with their checksums, because a power failure may have taken
        #: some of them; None: no value is in doubt.
        self.covered: int | None = None
        self._file: File | None = None
        self._views: dict[int, memoryview] = {}

    @property
    def end(self) -> int:
        """The address after the newest record."""
        return self._end

    def save(self, target: Target, end: int) -> list[tuple[Path, int]]:
        """Link the finished files into a snapshot, and copy the newest one."""
        disk, folder, written = target.disk, target.folder / ANNOTATIONS, []
        newest, size = end >> FILE_SHIFT, end & _OFFSET
        target.make_folder(folder)
        for number in find_files(disk, self.folder):
            path, copy = file_path(self.folder, number), file_path(folder, number)
            if number > newest or (number < newest and disk.link(path, copy)):
                continue
            disk.put(copy, disk.read_whole(path)[: size if number == newest else None])
            written.append((copy, disk.size(copy)))
        return written

    def _follow(self) -> None:
        while True:
            if self._file is None:
                files = [n for n in find_files(self._disk, self.folder) if n >= self.end >> FILE_SHIFT]
                if not files:
                    return
                if files[0] > self.end >> FILE_SHIFT:
                    self._end = files[0] << FILE_SHIFT
                self._file = self._disk.open(file_path(self.folder, files[0]), write=False)
            at = self.end & _OFFSET
            head = read_head(self._file, at)
            if head is not None and self.number in (0, head.number - 1) and self._is_sound(self.end, head):
                self._show(self.end, head)
                self._end, self.number = self._end + head.size + head.body, head.number
                continue
            following = (self.end >> FILE_SHIFT) + 1
            if at < FILE_BYTES or not self._disk.exists(file_path(self.folder, following)):
                return
            self._file.close()
            self._file, self._end = None, following << FILE_SHIFT

    def _is_sound(self, at: int, head: Head) -> bool:
        """Return whether the values of a record are not in doubt, or have their checksum."""
        if self.covered is None or at < self.covered:
            return True
        data = self.copy(np.array([at + head.size]), np.array([head.body]))
        return bool(google_crc32c.value(bytes(data)) == head.crc)

    def _view(self, number: int, end: int) -> memoryview:
        known = self._views.get(number)
        if known is None or len(known) < end:
            path = file_path(self.folder, number)
            file = self._disk.open(path, write=False)
            try:
                size = file.size()
                if size < end:
                    raise CorruptionError(
                        f"{path} has {size} bytes, and values of annotated fields are in its first {end}",
                        hint="restore a version of the store",
                    )
                known = self._views[number] = memoryview(file.map_readable(size))
            finally:
                file.close()
        return known

    def records(self) -> Iterator[tuple[int, Head]]:
        """Yield the heads of all records, the oldest first, each with its address."""
        return read_heads(self._disk, self.folder)

    def find_damage(self) -> str | None:
        """Compare all values with their checksums; return what is damaged, or None."""
        end = number = self.covered = 0
        for at, head in self.records():
            end, number = at + head.size + head.body, head.number
            if not self._is_sound(at, head):
                return f"the values of record {head.number} do not have their checksum"
        files = find_files(self._disk, self.folder)
        if files and (end >> FILE_SHIFT, end & _OFFSET) != (
            files[-1],
            self._disk.size(file_path(self.folder, files[-1])),
        ):
            return f"it cannot be read after record {number}"
        return None

    def close(self) -> None:
        """Close the files; a map is removed with the last array over it."""
        if self._file is not None:
            self._file.close()
            self._file = None


class AnnotationLog(AnnotationReader, Checkpointed):
    """Append annotations.

    Invariants: a record names only rows that are committed before it is written; a checkpoint that covers a
    record covers its rows. Crashes: a record whose call returned survives the process, and a power failure
    after the next checkpoint. An opening cuts the records from the first one on that is not whole, or names
    a row that was lost (`recover`). Threads: writers have the storage's lock. Processes: one writes.
    """

    def __init__(self, disk: Disk, store: Path, slots: int | None) -> None:
        super().__init__(disk, store, slots)
        self._newest: dict[int, int] = {}  # the newest id in each file
        self._begun = self._low = 0  # the address that the newest checkpoint covers, and its `low`
        self._is_new = self._has_failed = False
        self._full: deque[File] = deque()  # a checkpoint may be syncing them

    def _follow(self) -> None:
        """Do nothing: only this object appends."""

    # -- opening ---------------------------------------------------------------------------------------

    def recover(self, covered: int, last: int, *, is_sure: bool) -> None:
        """Read the records, and cut what a kill or a power failure has left incomplete.

        Args:
            covered: The address up to which a checkpoint covers the records.
            last: The newest id of the store.
            is_sure: Whether no power failure can have lost values.

        Raises:
            CorruptionError: A record that a checkpoint covers is damaged.
            StorageError: The disk failed.
        """
        self.last, self.covered = last, None if is_sure else covered
        files = find_files(self._disk, self.folder)
        self._end = (files[0] if files else 1) << FILE_SHIFT
        for at, head in self.records():
            if head.ids.max(initial=0) > last or not self._is_sound(at, head):
                break
            self._show(at, head)
            self._count_record(at, head)
        if self.end < covered and files:
            raise CorruptionError(
                f"{file_path(self.folder, self.end >> FILE_SHIFT)} is damaged at byte {self.end & _OFFSET}: "
                "a record of annotations is not whole",
                hint="restore a version of the store",
            )
        self._cut([number for number in files if number > self.end >> FILE_SHIFT])
        self._begun = self.end

    def _cut(self, surplus: Sequence[int]) -> None:
        """Remove what follows the last valid record."""
        path = file_path(self.folder, self.end >> FILE_SHIFT)
        for number in reversed(surplus):
            self._disk.unlink(file_path(self.folder, number))
        if self._disk.size(path) > self.end & _OFFSET:
            self._open().truncate(self.end & _OFFSET)
            self._views.pop(self.end >> FILE_SHIFT, None)
            self._open().sync()
        if surplus:
            self._disk.sync_dir(self.folder)

    def _count_record(self, at: int, head: Head) -> None:
        number = at >> FILE_SHIFT
        self._newest[number] = max(self._newest.get(number, 0), int(head.ids.max(initial=0)))
        self._end, self.number = at + head.size + head.body, head.number

    # -- appending -------------------------------------------------------------------------------------

    def add(
        self, time: int, by: str | None, ids: IntArray, parts: Sequence[Part], declared: Key | None = None
    ) -> Callable[[], None]:
        """Append a record; return a function that makes its values the newest ones here.

        Raises:
            StorageError: The disk failed; nothing was appended.
        """
        packed, body = pack(self.number + 1, time, by, ids, parts, declared)
        if self.end & _OFFSET >= FILE_BYTES:
            full = self._open()
            full.sync()  # only the newest file may have a record that is not whole
            self._full.append(full)
            self._file, self._end = None, ((self.end >> FILE_SHIFT) + 1) << FILE_SHIFT
        file, at = self._open(), self.end & _OFFSET
        if self._has_failed:
            file.truncate(at)  # what is left of the failed record must not look like a later one
        self._has_failed = True
        if body:
            file.write(body, at + len(packed))
        file.write(packed, at)
        head = parse_own(packed)
        self._has_failed = False

        def show() -> None:
            with self._lock:
                self._show(address, head)

        address = self.end
        self._count_record(address, head)
        return show

    def _open(self) -> File:
        if self._file is None:
            self._end = self.end or 1 << FILE_SHIFT
            path = file_path(self.folder, self.end >> FILE_SHIFT)
            self._is_new = self._is_new or not self._disk.exists(path)
            self._disk.make_dir(self.folder)
            self._file = self._disk.open(path, create=True)
        return self._file

    def sync(self) -> None:
        """Bring all records to the disk.

        Raises:
            StorageError: The disk failed.
        """
        dirty = self._take_dirty()
        self._disk.sync_all(dirty.files, sorted(dirty.folders), None)

    # -- checkpoints -----------------------------------------------------------------------------------

    def _take_dirty(self) -> Dirty:
        if self._file is None or self._begun == self.end:
            return Dirty()
        self._begun = self.end
        folders = {self.folder, self._store} if self._is_new else set()
        self._is_new = False
        return Dirty({self._file}, folders)

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return the file if it has records that no checkpoint covers, and the folders with new names."""
        self._low = checkpoint.low
        self._close_full()
        return self._take_dirty()

    def _close_full(self) -> None:
        while self._full:
            self._full.popleft().close()

    def close(self) -> None:
        """Close the files; a map is removed with the last array over it."""
        self._close_full()
        super().close()

    def abort(self, dirty: Dirty) -> None:
        """Mark the file and its name as unsynced again."""
        if dirty.files:
            self._begun = 0
        self._is_new = self._is_new or bool(dirty.folders)

    def completed(self, *, tidy: bool) -> None:
        """Remove the oldest files while all their rows are gone."""
        for number in sorted(self._newest):
            if not tidy or number >= self._begun >> FILE_SHIFT or self._newest[number] > self._low:
                return
            self._disk.unlink(file_path(self.folder, number))
            del self._newest[number]
            with self._lock:
                self._views.pop(number, None)

    def paths(self) -> list[Path]:
        """Return the files."""
        return [file_path(self.folder, number) for number in find_files(self._disk, self.folder)]


class AnnotatedColumn(Column):
    """An annotated field as a column. The rows that are written have no value of it.

    Threads: as `Annotations`.

    Args:
        entry: The field.
        annotations: The values.
        folder: The folder that a Zarr array of the field would have.
    """

    #: All slots have room.
    ready = 1 << 62

    def __init__(self, entry: Field, annotations: Annotations, folder: Path) -> None:
        super().__init__(entry, folder, annotations.slots, 0)
        self.annotations = annotations

    def gather(self, slots: IntArray) -> Any:
        """Copy the newest values out. `slots` has shape `(n,)`."""
        return self.annotations.gather(self.entry, slots)

    def part(self, slot: int, count: int) -> Any:
        """Copy the newest values of a run of slots out."""
        return self.gather(np.arange(slot, slot + count))

    def mix(self, slots: IntArray, newer: Array, rows: Any) -> Any:
        """Return the newest values: rows that are only in memory have none of their own."""
        return self.gather(slots)

    def write_rows(self, slots: IntArray, values: Array) -> list[File]:
        """Raise SchemaError: values are only added."""
        raise build_annotated_error([self.entry])

    def size(self, held: int, ids: Callable[[IntArray], IntArray]) -> FieldSize:
        """Return how the field is stored on disk; see `Column`."""
        used, width = 0, _item_bytes(self.entry)
        for _, head in self.annotations.records():
            used += sum(int(one.items.sum()) * width for one in head.fields if one.key == self.entry.key)
        return FieldSize("annotations", None, None, used, None, None, used / max(1, held))

    def sum_run(self, slot: int, count: int) -> int:
        """Return 0: records have checksums of their own."""
        return 0


class AnnotatedCells(AnnotatedColumn):
    """An annotated field of a storage in RAM; has the methods of its other columns."""

    def __len__(self) -> int:
        return self.ready

    def put(self, slots: IntArray, values: Any) -> None:
        """Do nothing: rows that are written have no value."""

    def grow(self, size: int) -> AnnotatedCells:
        """Return itself: any number of slots has room."""
        return self

    def forget(self, count: int) -> None:
        """Do nothing: values are found by the ids of their rows."""


class AnnotationCapture(Capture):
    """The annotations of a snapshot, as they are now.

    Args:
        annotations: The annotations.
        columns: The annotated columns, by position.
    """

    def __init__(self, annotations: Annotations, columns: Mapping[int, AnnotatedColumn]) -> None:
        self.places, self.packings = sorted(columns), dict[int, Packing]()
        self._annotations, self._columns, self.end = annotations, columns, annotations.end

    def rows(self, place: int, first_id: int, count: int) -> list[Any]:
        """Return a run of rows of a field."""
        return self._columns[place].views(first_id, count)

    def begin(self, target: Target) -> list[tuple[Path, int]]:
        """Link and copy the files."""
        return self._annotations.save(target, self.end)

    def complete(self) -> list[tuple[Path, int]]:
        """Return no file: `begin` has brought in all of them."""
        return []
