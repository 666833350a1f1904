"""The file `checksums`: a crc32c per column for every block of 4096 slots, and the stamp of each block.

Used by stores on disk, which sums the blocks that changed since the last sync; by `verify`; and by
snapshots, which need not copy blocks with an unchanged stamp. This module does not check columns.
"""

from __future__ import annotations

import itertools
import logging
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.core.values import Array, IntArray
from expstore.disk.checkpointed import Checkpoint, Checkpointed, Dirty
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError
from expstore.storages.columns.annotated import AnnotatedColumn
from expstore.storages.columns.column_set import ColumnSet
from expstore.storages.columns.flat import PIECE_BYTES, FlatColumn
from expstore.storages.format.zarr_metadata import CHUNK_ROWS

_logger = logging.getLogger("expstore")

BLOCK_ROWS = CHUNK_ROWS
HEADER_BYTES = 4096
_MAGIC = b"EXPSUMS\0"
_FORMAT = 1
_HEADER = struct.Struct("<8sIIII")  # magic, format, slots per block, columns, crc32c of these

#: States of a block's entry.
NOTHING, SUMMED, GIVEN_UP, DAMAGED = range(4)

#: At most this many sums, or `PIECE_BYTES`, are computed before other threads get to run.
_PIECES = 64


def entry_dtype(columns: int) -> np.dtype[Any]:
    """Return the dtype of an entry in the file: stamp, check of the entry itself, one sum per column."""
    return np.dtype(
        [("sequence", "<u8"), ("generation", "<u4"), ("check", "<u4"), ("sums", "<u4", (columns,))]
    )


def no_entries(columns: int) -> Array:
    """Return an empty array of entries."""
    return np.zeros(0, entry_dtype(columns))


def blocks_of(pieces: Iterable[tuple[int, int, int]]) -> set[int]:
    """Return the blocks that contain runs of slots: (first slot, ignored, number of slots)."""
    blocks: set[int] = set()
    for slot, _, n in pieces:
        if n > 0:
            blocks.update(range(slot // BLOCK_ROWS, (slot + n - 1) // BLOCK_ROWS + 1))
    return blocks


def _header(columns: int) -> bytes:
    head = _HEADER.pack(_MAGIC, _FORMAT, BLOCK_ROWS, columns, 0)[:-4]
    crc: int = google_crc32c.value(head)
    return (head + crc.to_bytes(4, "little")).ljust(HEADER_BYTES, b"\0")


def _check(entry: Array) -> int:
    data = entry.tobytes()
    crc: int = google_crc32c.value(data[:12] + data[16:])
    return crc


def seal_entry(entry: Array, *, generation: int, sequence: int) -> None:
    """Set the stamp of an entry whose sums are set, and the check over both."""
    entry["sequence"], entry["generation"] = sequence, generation
    entry["check"] = _check(entry)


def pack_entries(entries: Array) -> bytes:
    """Return a whole file of these entries, one per block."""
    return _header(entries["sums"].shape[1]) + entries.tobytes()


def state_of(entry: Array) -> int:
    """Return the state of a block's entry.

    Returns:
        NOTHING (never written), SUMMED, GIVEN_UP (the block holds no readable row, and its bytes are
        unknown), or DAMAGED (the entry itself is).
    """
    if int(entry["check"]) != _check(entry):
        return DAMAGED if entry.tobytes().strip(b"\0") else NOTHING
    return SUMMED if int(entry["sequence"]) else GIVEN_UP


def read_entries(data: bytes, columns: int, path: Path) -> Array:
    """Return the entries of a file, one per block; check each with `state_of`.

    Args:
        data: The file's bytes.
        columns: How many columns are summed.
        path: The file's path, for error messages.

    Raises:
        CorruptionError: The file is not a checksums file, or is for another number of columns.
    """
    if data[:HEADER_BYTES] != _header(columns):
        raise CorruptionError(
            f"{path} is damaged: it does not begin as a file of checksums of {columns} columns"
        )
    dtype = entry_dtype(columns)
    body = data[HEADER_BYTES:]
    body = body.ljust(-(-len(body) // dtype.itemsize) * dtype.itemsize, b"\0")  # a truncated entry is damaged
    return np.frombuffer(body, dtype).copy()


class BlockCheck:
    """Compare blocks with their checksums, each once, before their rows are copied to another place.

    Without it, the copy would get valid checksums of wrong bytes. Only flat columns are compared: packed rows
    and segments are compared with checksums of their own whenever they are read.

    Args:
        group: The columns.
        entries: The entries of the blocks; those without sums (zeros) are not compared.
    """

    def __init__(self, group: ColumnSet, entries: Array) -> None:
        summed = range(len(group.summed))
        self._columns = {place: column for place, column in group.flat.items() if place in summed}
        self._slots, self._entries = group.slots, entries
        self._checked: set[int] = set()

    def check(self, ids: IntArray) -> None:
        """Check the blocks that contain rows, whose slots must not be written to meanwhile.

        Args:
            ids: Ids of the rows. Shape `(n,)`.

        Raises:
            CorruptionError: A block, or its entry, is damaged.
        """
        blocks = (ids - 1 if self._slots is None else (ids - 1) % self._slots) // BLOCK_ROWS
        for block in np.unique(blocks).tolist():
            if block in self._checked or block >= self._entries.size:
                continue
            entry = self._entries[block]
            state = state_of(entry)
            for place, column in self._columns.items() if state in (SUMMED, DAMAGED) else ():
                slot = block * BLOCK_ROWS
                if state == DAMAGED or column.sum_run(slot, BLOCK_ROWS) != int(entry["sums"][place]):
                    found = ids[blocks == block]
                    path = column.shard_path(slot // column.rows)
                    raise CorruptionError(f"{path} is damaged in the rows with ids {found[0]} to {found[-1]}")
            self._checked.add(block)


class Checksums(Checkpointed):
    """Maintain the sums of a store's blocks, on disk and in memory.

    Threads: one at a time, the thread that syncs or opens the store. Crashes: only entries of blocks touched
    since the last durable checkpoint may be lost, or may describe bytes that were lost. An opening sums those
    again.

    Args:
        disk: The disk on which files are accessed.
        path: The file; created again if it is missing or is not a checksums file.
        group: The columns; all but the last (priority) are summed.
    """

    def __init__(self, disk: Disk, path: Path, group: ColumnSet) -> None:
        self._columns = group.summed
        #: Blocks whose sums no longer match their bytes, and those of them without a row.
        self._changed: set[int] = set()
        self._emptied: set[int] = set()
        self._due: set[int] = set()  # the blocks that the running checkpoint sums or gives up
        self._due_empty: set[int] = set()
        width = len(self._columns)
        new = not disk.exists(path)
        self.file: File = disk.open(path, create=True)
        try:
            data = self.file.read(0, self.file.size())
            try:
                self._entries = read_entries(data, width, path)
            except CorruptionError as exc:
                if not new:
                    _logger.warning("%s; it is created again", exc.message)
                # The sums can be computed again from the columns; the damage that they show is lost.
                self._entries = no_entries(width)
                self.file.truncate(0)
                self.file.write(_header(width), 0)
                self.file.sync()
                disk.sync_dir(path.parent)
        except BaseException:
            self.file.close()
            raise

    def stamps(self) -> IntArray:
        """Return (generation, sequence) per block; equal stamps mean that no byte has changed in between.

        The stamps are from the last sync. A block without sums has (0, 0), which must not be compared. Shape
        `(blocks, 2)`.
        """
        entries = self._entries
        found = np.stack([entries["generation"], entries["sequence"]], axis=1).astype(np.int64)
        found[entries["sequence"] == 0] = 0
        return found

    @property
    def blocks(self) -> int:
        """The number of blocks that have an entry."""
        return int(self._entries.size)

    def entry(self, block: int) -> Array:
        """Return a block's entry, with the dtype `entry_dtype`."""
        entry: Array = self._entries[block]
        return entry

    def entries(self) -> Array:
        """Return a copy of all entries, one per block, as they were at the last sync."""
        return self._entries.copy()

    def find_missing(self, blocks: Iterable[int]) -> set[int]:
        """Return the blocks of `blocks` that have no sums."""
        return {
            block
            for block in blocks
            if block >= self._entries.size or state_of(self._entries[block]) != SUMMED
        }

    # -- checkpoints -----------------------------------------------------------------------------

    def note_changed(self, blocks: Iterable[int], *, emptied: Iterable[int] = ()) -> None:
        """Make the next checkpoint sum blocks. The caller holds the lock of the episodes.

        Args:
            blocks: Blocks whose bytes were changed in place.
            emptied: The blocks among them that no longer have a row, and need not be read.
        """
        self._changed.update(blocks)
        self._emptied.update(emptied)

    @property
    def changed(self) -> set[int]:
        """The blocks that the next checkpoint sums in addition to those of new rows."""
        return self._changed

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return the file if there are blocks to be summed."""
        self._due, self._changed = self._changed | blocks_of(checkpoint.runs), set()
        self._due_empty, self._emptied = self._emptied & self._due, self._emptied - self._due
        return Dirty({self.file} if self._due else set())

    def prepare(self, checkpoint: Checkpoint) -> None:
        """Sum the blocks that are about to be synced.

        They may contain rows that are still being written; committing those rows sums the blocks again.
        """
        empty = self._due_empty
        self.give_up(empty, generation=checkpoint.generation)
        self.update(self._due - empty, generation=checkpoint.generation, sequence=checkpoint.lsn)

    def abort(self, dirty: Dirty) -> None:
        """Undo `begin` after a failed sync."""
        self._changed |= self._due
        self._emptied |= self._due_empty

    # -- sums --------------------------------------------------------------------------------------

    def update(self, blocks: Iterable[int], *, generation: int, sequence: int) -> None:
        """Sum blocks as they are now and write their entries; the caller syncs the file.

        Args:
            blocks: Numbers of the blocks.
            generation: For the stamp: the writer's generation.
            sequence: For the stamp: LSN of the last record whose rows are in the columns.
        """
        todo = sorted(blocks)
        if not todo:
            return
        self._grow(todo[-1] + 1)
        worked = 0
        for block in todo:
            entry = self._entries[block]
            for place, column in enumerate(self._columns):
                entry["sums"][place] = column.sum_run(block * BLOCK_ROWS, BLOCK_ROWS)
                worked += column.row_bytes * BLOCK_ROWS + PIECE_BYTES // _PIECES
                if worked > PIECE_BYTES:
                    worked = 0
                    time.sleep(0)
            seal_entry(entry, generation=generation, sequence=sequence)
        self._write(todo)

    def give_up(self, blocks: Iterable[int], *, generation: int) -> None:
        """Record that the contents of these blocks are unknown. No row in them may be readable."""
        todo = sorted(blocks)
        if not todo:
            return
        self._grow(todo[-1] + 1)
        for block in todo:
            entry = self._entries[block]
            entry["sums"] = 0
            seal_entry(entry, generation=generation, sequence=0)
        self._write(todo)

    def rearrange(self, places: Sequence[int], new: FlatColumn | AnnotatedColumn | None = None) -> bytes:
        """Return a whole file for other columns. Sums and stamps are kept; only `new` is read.

        Args:
            places: For each column of the new file, its position in this one; -1 for `new`.
            new: A column that is not summed yet.
        """
        found = np.zeros(self._entries.size, entry_dtype(len(places)))
        for block, (old, entry) in enumerate(zip(self._entries, found, strict=True)):
            state = state_of(old)
            known = new is None or (block + 1) * BLOCK_ROWS <= new.ready
            if state == NOTHING or (state == SUMMED and not known):
                continue
            if state == SUMMED:
                entry["sums"] = [
                    new.sum_run(block * BLOCK_ROWS, BLOCK_ROWS)
                    if place < 0 and new is not None
                    else old["sums"][place]
                    for place in places
                ]
            seal_entry(entry, generation=int(old["generation"]), sequence=int(old["sequence"]))
            if state == DAMAGED:
                entry["check"] ^= 1  # stays damaged: the block's former contents are unknown
        return pack_entries(found)

    def _grow(self, blocks: int) -> None:
        if blocks > self._entries.size:
            more = np.zeros(blocks - self._entries.size, self._entries.dtype)
            self._entries = np.concatenate([self._entries, more])

    def _write(self, blocks: list[int]) -> None:
        size = self._entries.dtype.itemsize
        for _, run in itertools.groupby(enumerate(blocks), lambda pair: pair[1] - pair[0]):
            members = [block for _, block in run]
            data = self._entries[members[0] : members[-1] + 1].tobytes()
            self.file.write(data, HEADER_BYTES + members[0] * size)

    def close(self) -> None:
        """Close the file."""
        self.file.close()
