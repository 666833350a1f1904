"""The file `keys`: the newest idempotency keys of a store, a ring of entries of 64 bytes.

Used by storages on disk. A key is first stored in the commit record of its rows; a checkpoint writes it to
this file before the record can be removed. docs/format.md has the byte table. This module does not access
records or rows.
"""

from __future__ import annotations

import logging
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np

from expstore.core import tuning
from expstore.core.idempotency import ENTRY, KEPT_US, WriteKeys
from expstore.core.values import Array
from expstore.disk.checkpointed import Checkpoint, Checkpointed, Dirty
from expstore.disk.files import Disk, File

_logger = logging.getLogger("expstore")

KEYS = "keys"
HEADER_BYTES = ENTRY.size
_MAGIC, _FORMAT = b"EXPKEYS\0", 1
_HEADER = struct.Struct("<8sIII")  # magic, format, entries in the ring, crc32c of these
_DTYPE = np.dtype(
    [
        ("check", "<u4"),
        ("rows", "<u4"),
        ("number", "<u8"),
        ("key", "V16"),
        ("digest", "V16"),
        ("first", "<u8"),
        ("time", "<i8"),
    ]
)


def _header(slots: int) -> bytes:
    head = _HEADER.pack(_MAGIC, _FORMAT, slots, 0)[:-4]
    crc: int = google_crc32c.value(head)
    return (head + crc.to_bytes(4, "little")).ljust(HEADER_BYTES, b"\0")


@dataclass(frozen=True, slots=True)
class KeysFound:
    """The content of a file of keys.

    Args:
        entries: The valid entries, by their numbers, which are consecutive in an undamaged file.
        number: Number of the next entry.
        stale: Slots of entries that must never become valid: of rows that a power failure may have undone.
        damage: What is wrong with the file; "" if it is sound.
    """

    entries: Array
    number: int
    stale: list[int]
    damage: str


def read_keys(data: bytes | None, *, slots: int, kept: int, covered: int, known: int) -> KeysFound:
    """Decide which entries of a file of keys are valid.

    Args:
        data: The file's bytes; None: the file is missing.
        slots: Number of entries in the ring.
        kept: Maximum number of valid keys.
        covered: Newest id that a durable checkpoint covers; keys of later rows are in the journal.
        known: How many keys had been written to the file when the journal began.
    """
    found = _read(data, slots, kept, covered, known)
    damage, lost = "", min(max(known, found.number), kept) - found.entries.size
    if data is None:
        damage = "is missing" if known else ""
    elif data[:HEADER_BYTES] != _header(slots):
        damage = "is damaged: it does not begin as a file of keys"
    elif lost:
        damage = f"is damaged: {lost} keys are lost"
    return replace(found, damage=damage)


def count_keys(disk: Disk, path: Path) -> int:
    """Return the number of valid keys in the file of a store; the newest keys may not be in it yet."""
    data = disk.read_whole(path / KEYS) if disk.exists(path / KEYS) else None
    found = _read(data, tuning.IDEMPOTENCY_SLOTS, tuning.IDEMPOTENCY_KEYS, 1 << 62, 0)
    return int(np.count_nonzero(time.time_ns() // 1000 - found.entries["time"] <= KEPT_US))


def _read(data: bytes | None, slots: int, kept: int, covered: int, known: int) -> KeysFound:
    body = (data or b"")[HEADER_BYTES : HEADER_BYTES + slots * ENTRY.size]
    entries = np.frombuffer(body[: len(body) // ENTRY.size * ENTRY.size], _DTYPE)
    sums = google_crc32c.value
    checks = [sums(body[at + 4 : at + ENTRY.size]) for at in range(0, entries.nbytes, ENTRY.size)]
    places = np.arange(entries.size)
    last = entries["first"].astype(np.int64) + (entries["rows"] & 0x7FFFFFFF) - 1
    whole = entries["check"] == np.array(checks, np.uint32)
    whole &= (entries["number"] % slots).astype(np.int64) == places
    counts = whole & (last <= covered)
    numbers = entries["number"].astype(np.int64)
    number = int(numbers[counts].max()) + 1 if counts.any() else 0
    stale = np.flatnonzero(whole & ~counts).tolist()
    chosen = np.flatnonzero(counts & (numbers >= max(known, number) - kept))
    return KeysFound(entries[chosen[np.argsort(numbers[chosen])]], number, stale, "")


class KeyFile(WriteKeys, Checkpointed):
    """Store keys in memory and in a file: the file has the keys of rows that a checkpoint covers.

    Threads: as `WriteKeys`; one thread at a time syncs. Crashes: `flush` writes the keys since the last
    checkpoint. The next opening keeps those that a surviving checkpoint covers, and takes later keys from the
    commit records. The file is created for the first key.

    Args:
        disk: The disk on which files are accessed.
        path: The file.
        expected: Whether the store has keys; if not, there is no file, or only one without valid keys.
        covered: Newest id that a durable checkpoint covers.
        known: How many keys had been written to the file when the journal began.
        now: Microseconds since 1970.
    """

    def __init__(self, disk: Disk, path: Path, *, expected: bool, covered: int, known: int, now: int) -> None:
        super().__init__()
        self._disk, self._path = disk, path
        self._file: File | None = None
        self._stale: list[int] = []
        self._written = self._safe = 0  # entries with lower numbers are written, or durable
        if not expected:
            return
        data = disk.read_whole(path) if disk.exists(path) else None
        found = read_keys(data, slots=self.slots, kept=self._kept, covered=covered, known=known)
        if found.damage:
            _logger.warning("%s %s; it is created again", path, found.damage)
            found = _renumber(found)
            disk.write_whole(path, _header(self.slots) + found.entries.tobytes())
        elif data is None:
            return
        self._take(found, now)
        self._file = disk.open(path)

    def _take(self, found: KeysFound, now: int) -> None:
        """Use the file's entries; older entries stay in the file until they are overwritten."""
        entries, self._stale = found.entries, found.stale
        data = bytearray(ENTRY.size * min(found.number, self.slots))
        ring = np.frombuffer(data, _DTYPE)
        ring[entries["number"].astype(np.int64) % self.slots] = entries
        del ring  # a bytearray with views cannot grow
        known = entries[now - entries["time"] <= KEPT_US]
        numbers = dict(zip(known["key"].tolist(), known["number"].tolist(), strict=True))
        self.restore(data, numbers, oldest=found.number - entries.size, number=found.number)
        self._written = self._safe = found.number

    @property
    def spare(self) -> int:
        """How many keys may be added between two checkpoints."""
        return self.slots - self._kept

    @property
    def room(self) -> int:
        """How many keys may be added before the next checkpoint."""
        return self.spare - (self.number - self._safe)

    @property
    def waiting(self) -> bool:
        """Whether there are keys that no checkpoint covers."""
        return self.number > self._safe

    @property
    def unsynced(self) -> set[File]:
        """The file, if it has bytes that no checkpoint covers."""
        dirty = self._file is not None and (self._written > self._safe or self._stale)
        return {self._file} if self._file is not None and dirty else set()

    def flush(self) -> None:
        """Write the entries that no checkpoint covers; a repeated call writes the same bytes."""
        if self._safe == self.number and not self._stale:
            return
        if self._file is None:
            self._disk.write_whole(self._path, _header(self.slots))
            self._file = self._disk.open(self._path)
        for slot in self._stale:
            self._file.write(bytes(ENTRY.size), HEADER_BYTES + slot * ENTRY.size)
        number = self._safe
        while number < self.number:
            start = number % self.slots
            count = min(self.number - number, self.slots - start)
            at = start * ENTRY.size
            self._file.write(bytes(self._ring[at : at + count * ENTRY.size]), HEADER_BYTES + at)
            number += count
        self._written = self.number

    def begin(self, checkpoint: Checkpoint) -> Dirty:
        """Return the file if it has bytes that no checkpoint covers."""
        return Dirty(self.unsynced)

    def completed(self, *, tidy: bool) -> None:
        """Record that a checkpoint covers what `flush` wrote, after the fsync of its record."""
        self._safe, self._stale = self._written, []

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


def pack_keys(entries: bytes, count: int) -> bytes:
    """Return a file of keys.

    Args:
        entries: Entries, older ones first; of several with one number, the last counts.
        count: Number of the next entry: those from it on do not count.
    """
    slots = tuning.IDEMPOTENCY_SLOTS
    found = np.frombuffer(entries, _DTYPE)
    found = found[found["number"] < count]
    ring = np.zeros(min(count, slots), _DTYPE)
    ring[found["number"].astype(np.int64) % slots] = found
    return _header(slots) + ring.tobytes()


def _renumber(found: KeysFound) -> KeysFound:
    """Return entries for a new file, numbered from 0 on."""
    entries = found.entries
    packed = b"".join(_pack(number, entry) for number, entry in enumerate(entries.tolist()))
    return KeysFound(np.frombuffer(packed, _DTYPE), len(entries), [], "")


def _pack(number: int, entry: tuple[Any, ...]) -> bytes:
    rest = ENTRY.pack(0, entry[1], number, *entry[3:])[4:]
    crc: int = google_crc32c.value(rest)
    return crc.to_bytes(4, "little") + rest
