"""The file `changes`: the ids of rows that were changed in place, for recorded draws that come again.

The writer of a store appends to it once the store has consumers. The number of a change is that of its record
in the journal. docs/format.md specifies the file. `core/change_log.py` is something else: it tells the caches
of one process which slots have changed.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import google_crc32c
import numpy as np

from expstore.core.id_set import IdSet
from expstore.core.values import Array, IntArray, Window
from expstore.disk.checkpointed import Checkpoint, Checkpointed, Dirty
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError
from expstore.storages.format.draw_log import CONSUMERS, find_oldest_change

_logger = logging.getLogger("expstore")
CHANGES = "changes"
#: A file that is longer is rewritten when it has twice the length that it had after the last time, bytes.
COMPACT_BYTES = 1 << 20
#: Length of the record, checksum of what follows, number of the change, ids, runs of ids (0: ids follow). The
#: record of number 0 has the numbers of all its ids, after them.
_HEADER = struct.Struct("<IIQII")
_FRONT = struct.Struct("<II")
#: The number of a change, and the ids of its rows.
Change = tuple[int, IntArray]
#: Ids, and the numbers of their changes. Shapes `(n,)`.
_Found = tuple[IntArray, IntArray]


class RowChanges(Checkpointed):
    """Record which rows were changed in place.

    Invariants: the ids of a change are in the file before another process can read its values. A checkpoint
    covers the journal's record of a change only when the ids are on the disk.

    Threads: writers hold the storage's lock. Processes: the writer of the store appends; any number read, by
    `ChangedRows`. Crashes: an opening adds the changes after the last checkpoint from the journal.

    Args:
        disk: The disk on which files are accessed.
        store: The store's folder.
    """

    def __init__(self, disk: Disk, store: Path) -> None:
        self._disk, self._store, self._path = disk, store, store / CHANGES
        self._consumers = store / CONSUMERS
        self._has_consumers = self._is_new = self._is_dirty = False
        self._file: File | None = None
        self._length = self._compacted = 0

    # -- appending ---------------------------------------------------------------------------------

    @contextmanager
    def record(self, number: int, ids: IntArray) -> Iterator[None]:
        """Record a change before the block, in which its values become readable in this process.

        Raises:
            StorageError: The disk failed.
        """
        is_recorded = self._append(number, ids)
        yield
        if not is_recorded:
            self._append(number, ids)  # the first consumer may have drawn the former values meanwhile

    def _append(self, number: int, ids: IntArray) -> bool:
        """Append a record; return False if there are no consumers."""
        if not self._has_consumers:
            self._has_consumers = self._disk.is_dir(self._consumers)
            if not self._has_consumers:
                return False
        file = self._file or self._open()
        frame = _pack(number, ids)
        file.write(frame, self._length)
        self._length += len(frame)
        self._is_dirty = True
        return True

    def _open(self) -> File:
        self._is_new = not self._disk.exists(self._path)
        self._file = file = self._disk.open(self._path, create=True)
        self._length = file.size()
        return file

    # -- syncing -----------------------------------------------------------------------------------

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return the file if it has bytes that no checkpoint covers, and the folder if the name is new."""
        if self._file is None or not self._is_dirty:
            return Dirty()
        dirty = Dirty({self._file}, {self._store} if self._is_new else set())
        self._is_dirty = self._is_new = False
        return dirty

    def abort(self, dirty: Dirty) -> None:
        """Mark the file and its name as unsynced again."""
        self._is_dirty = self._is_dirty or bool(dirty.files)
        self._is_new = self._is_new or bool(dirty.folders)

    # -- removing ----------------------------------------------------------------------------------

    @property
    def is_long(self) -> bool:
        """Whether `compact` should be called."""
        return self._length > max(COMPACT_BYTES, 2 * self._compacted)

    def compact(self, stored: Window) -> None:
        """Keep the newest change of each stored row. The caller excludes checkpoints.

        Raises:
            StorageError: The disk failed; the file is as before.
        """
        self._compacted = self._length  # of a damaged file, which readers report
        try:
            found, _ = _parse(self._disk.read_whole(self._path), self._path)
        except CorruptionError:
            return
        self._rewrite(*_find_newest(found), stored)

    def recover(self, end: int, find: Callable[[], Sequence[Change]] | None, stored: Window) -> None:
        """Add changes that a kill or a power failure may have kept out of the file, and remove others.

        An opening calls it before the journal loses records.

        Args:
            end: Number of the newest record of the journal. A power failure took later changes.
            find: Returns the changes after the last checkpoint; None: the writer closed the store.
            stored: The stored rows.

        Raises:
            StorageError: The disk failed; the file is as before.
        """
        if not self._disk.is_dir(self._consumers):
            return
        size, pending = self._disk.size(self._path), find() if find else []
        if size <= COMPACT_BYTES if find is None else size < 0 and not pending:
            return
        data = self._disk.read_whole(self._path) if size > 0 else b""
        try:
            found, _ = _parse(data, self._path, is_torn=find is not None)
        except CorruptionError as exc:
            _logger.warning("%s", exc)  # consumers raise the error when recorded draws come again
            return
        found += [(ids, np.full(ids.size, number)) for number, ids in pending]
        ids, numbers = _find_newest(found, end)
        needed = numbers > find_oldest_change(self._disk, self._store)
        self._rewrite(ids[needed], numbers[needed], stored)

    def _rewrite(self, ids: IntArray, numbers: IntArray, stored: Window) -> None:
        there = stored.holds(ids)
        frame = _pack(0, ids[there], numbers[there])
        self._disk.write_whole(self._path, frame)
        self._compacted = len(frame)
        self.close()
        self._is_dirty = False
        self._open()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class ChangedRows:
    """Find rows that were changed in place.

    The file is read when it has changed, from where it was read before. Memory has the changes since the
    oldest draw that was asked for. Threads: one at a time.

    Args:
        disk: The disk on which files are accessed.
        store: The store's folder.
    """

    def __init__(self, disk: Disk, store: Path) -> None:
        self._disk, self._path = disk, store / CHANGES
        self._newest: dict[int, int] = {}  # of the newest change, by id
        self._last = 0  # number of the newest change that was read
        self._since: int | None = None  # older changes are not in it
        self._stamp: tuple[int, ...] = ()
        self._head, self._at = b"", 0  # how the file began, and how far it was read

    def find(self, ids: IntArray, since: int, pending: Sequence[Change] | None) -> Array:
        """Return which rows were changed after the change of number `since`.

        Args:
            ids: Ids of the rows. Shape `(n,)`.
            since: Number of a change.
            pending: Changes that the file may lack; None: it lacks none.

        Returns:
            Shape `(n,)`, bool.

        Raises:
            CorruptionError: The file is damaged.
            StorageError: The disk failed.
        """
        if self._since is None or since < self._since:
            self._newest, self._since, self._stamp, self._head = {}, since, (), b""
        stamp = self._disk.read_stamp(self._path)
        if stamp and stamp != self._stamp:
            self._read(self._since, is_torn=pending is not None)
            self._stamp = stamp
        found, newest = np.zeros(ids.size, bool), self._newest
        if self._last > since:
            found = np.array([newest.get(id, 0) > since for id in ids.tolist()], bool)
        for number, changed in pending or ():
            if number > since:
                found |= np.isin(ids, changed)
        return found

    def _read(self, since: int, *, is_torn: bool) -> None:
        """Read what was appended; all of a file that was rewritten."""
        with closing(self._disk.open(self._path, write=False)) as file:
            if (head := file.read(0, _HEADER.size)) != self._head:  # its checksum is another one
                self._head, self._at = head, 0
            data = file.read(self._at, file.size() - self._at)
        found, length = _parse(data, self._path, is_torn=is_torn)
        self._at += length
        for ids, numbers in found:
            self._last = max(self._last, int(numbers.max(initial=0)))
            recent = numbers > since
            self._newest.update(zip(ids[recent].tolist(), numbers[recent].tolist(), strict=True))


def _pack(number: int, ids: IntArray, numbers: IntArray | None = None) -> bytes:
    """Return a record: of one change, or of the newest change of each row."""
    size, runs = ids.size, 0
    if numbers is None and size > 2:
        found = IdSet.of_ids(ids)
        if 2 * found.first.size < size:
            runs = found.first.size
            ids = np.stack([found.first, found.last], axis=1)
    body = ids.tobytes() if numbers is None else ids.tobytes() + numbers.tobytes()
    rest = _HEADER.pack(_HEADER.size + len(body), 0, number, size, runs)[_FRONT.size :] + body
    return _FRONT.pack(_FRONT.size + len(rest), google_crc32c.value(rest)) + rest


def _parse(data: bytes, path: Path, *, is_torn: bool = False) -> tuple[list[_Found], int]:
    """Return the ids and the numbers of their changes in each record, and the length of these records.

    Args:
        data: Records, and perhaps the beginning of one that is being written.
        path: The file, for error messages.
        is_torn: Whether a power failure may have torn what follows the last sound record.

    Raises:
        CorruptionError: A whole record does not match its checksum.
    """
    found: list[_Found] = []
    at = 0
    while at + _HEADER.size <= len(data):
        size, crc, number, rows, runs = _HEADER.unpack_from(data, at)
        is_sound = size == _HEADER.size + (8 * rows if number and not runs else 16 * (runs or rows))
        if is_sound and at + size > len(data):
            break
        if not is_sound or google_crc32c.value(data[at + _FRONT.size : at + size]) != crc:
            if is_torn:
                break
            raise CorruptionError(
                f"{path} is damaged at byte {at}, so it is unknown which rows were changed",
                hint="remove the file; then rows that were changed before are not noticed",
            )
        values = np.frombuffer(data, "<i8", (size - _HEADER.size) // 8, at + _HEADER.size)
        if not number:
            found.append((values[:rows], values[rows:]))
        else:
            ids = np.concatenate([np.arange(a, b + 1) for a, b in values.reshape(-1, 2)]) if runs else values
            found.append((ids, np.full(ids.size, number)))
        at += size
    return found, at


def _find_newest(found: Iterable[_Found], end: int | None = None) -> _Found:
    """Return all ids, each once, with the number of its newest change up to number `end`."""
    pairs = [*found, (np.empty(0, np.int64), np.empty(0, np.int64))]
    ids, numbers = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    if end is not None:
        ids, numbers = ids[numbers <= end], numbers[numbers <= end]
    order = np.lexsort((numbers, ids))
    ids, numbers = ids[order], numbers[order]
    last = np.append(ids[1:] != ids[:-1], True)[: ids.size]
    return ids[last], numbers[last]
