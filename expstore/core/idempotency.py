"""Idempotency keys: which writes were made, and which rows they wrote.

Used by buffers, which look up a key before they write, and by storages, which record a key with the rows
written under it. `expstore.storages.format.write_key_file` stores the keys of a store on disk. This module
has no access to rows.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import google_crc32c

from expstore.core import tuning
from expstore.errors import ArgumentError, StateError

#: How long a key is remembered, in microseconds: 24 hours.
KEPT_US = 24 * 3600 * 1_000_000

#: crc32c of the rest, rows (bit 31: rows of the batch were dropped), number, key, digest, first id, time.
ENTRY = struct.Struct("<IIQ16s16sQq")
#: The value in a record of a write without a key.
NO_KEY = bytes(16)
_DROPPED = 1 << 31
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class WriteKey:
    """Identify a write, so that a retry of it can be recognised.

    Args:
        name: blake2b of the user's key, 16 bytes.
        digest: Digest of the written data, 16 bytes; zeros: the user guarantees that equal keys mean equal
            rows.
        dropped: Whether rows of the batch were dropped; the answer has -1 in their places.
    """

    name: bytes
    digest: bytes = NO_KEY
    dropped: bool = False

    @classmethod
    def of(cls, key: str | bytes, digest: bytes | None) -> WriteKey:
        """Create a key from the values that a user passed.

        Raises:
            ArgumentError: The key is neither text nor bytes, or the digest is not bytes; the key is empty, or
                the digest does not have 16 bytes.
        """
        if not isinstance(key, str | bytes):
            raise ArgumentError(f"an idempotency key must be text or bytes, got {type(key).__name__}")
        if not key:
            raise ArgumentError("the idempotency key is empty; omit it, or use a new key for each write")
        if digest is not None and not isinstance(digest, bytes):
            raise ArgumentError(f"a digest must be bytes, got {type(digest).__name__}")
        if digest is not None and len(digest) != _DIGEST_BYTES:
            raise ArgumentError(f"a digest must have {_DIGEST_BYTES} bytes, got {len(digest)}")
        data = key.encode() if isinstance(key, str) else key
        return cls(hashlib.blake2b(data, digest_size=len(NO_KEY)).digest(), digest or NO_KEY)


@dataclass(frozen=True, slots=True)
class Written:
    """The rows written under a key.

    Args:
        first_id: Id of the first row that was written.
        count: Number of rows that were written.
        dropped: Whether rows of the batch were dropped.
    """

    first_id: int
    count: int
    dropped: bool

    @property
    def last_id(self) -> int:
        """Id of the last row that was written."""
        return self.first_id + self.count - 1


def pack_entry(number: int, key: WriteKey, first_id: int, count: int, time: int) -> bytes:
    """Return an entry of the ring as bytes."""
    rows = count | _DROPPED if key.dropped else count
    rest = ENTRY.pack(0, rows, number, key.name, key.digest, first_id, time)[4:]
    crc: int = google_crc32c.value(rest)
    return crc.to_bytes(4, "little") + rest


class WriteKeys:
    """The newest keys: the last 100,000, or the keys of the last 24 hours if these are fewer.

    Entries are numbered from 0 on and stored in a ring. One thread records keys, any number look them up; a
    key is known once its rows are published. This object is in memory only.
    """

    def __init__(self) -> None:
        self.slots, self._kept = tuning.IDEMPOTENCY_SLOTS, tuning.IDEMPOTENCY_KEYS
        #: Number of the next entry.
        self.number = 0
        self._oldest = 0  # entries before this one are not in `_numbers`
        self._numbers: dict[bytes, int] = {}
        self._ring = bytearray()  # grows up to its full length

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, key: WriteKey, now: int) -> Written | None:
        """Return the rows of the write with this key; None if the key is unknown or older than 24 hours.

        Args:
            key: The key to look up.
            now: The current time in microseconds since 1970.

        Raises:
            StateError: The key was used for a write of other data (kind "key_reused").
        """
        number = self._numbers.get(key.name)
        if number is None:
            return None
        _, rows, _, _, digest, first, time = ENTRY.unpack_from(self._ring, self._offset_of(number))
        if now - time > KEPT_US:
            return None
        found = Written(first, rows & ~_DROPPED, bool(rows & _DROPPED))
        if digest != key.digest:
            raise key_reused(found)
        return found

    def note(self, key: WriteKey, first_id: int, count: int, time: int) -> None:
        """Record a key whose rows are published."""
        number, at = self.number, self._offset_of(self.number)
        # A slice assignment after the last byte extends the bytearray.
        self._ring[at : at + ENTRY.size] = pack_entry(number, key, first_id, count, time)
        self._numbers[key.name] = number
        self.number = number + 1
        self._forget(time)

    def restore(self, ring: bytearray, numbers: dict[bytes, int], *, oldest: int, number: int) -> None:
        """Replace the content by keys that were stored elsewhere.

        Args:
            ring: The entries, each at its place.
            numbers: Entry numbers by key, without keys that are too old.
            oldest: Number of the oldest entry in use.
            number: Number of the next entry.
        """
        self._ring, self._numbers, self._oldest, self.number = ring, numbers, oldest, number

    def entries_since(self, number: int) -> bytes:
        """Return the entries from a number on that are still in the ring, in order."""
        return b"".join(
            bytes(self._ring[at : at + ENTRY.size])
            for at in map(self._offset_of, range(max(number, self.number - self.slots), self.number))
        )

    def _offset_of(self, number: int) -> int:
        return number % self.slots * ENTRY.size

    def _forget(self, now: int) -> None:
        """Forget keys beyond the limit and old keys; after the clock was set back, some are kept longer."""
        while self._oldest < self.number:
            entry = ENTRY.unpack_from(self._ring, self._offset_of(self._oldest))
            name, time = entry[3], entry[6]
            if self.number - self._oldest <= self._kept and now - time <= KEPT_US:
                return
            if self._numbers.get(name) == self._oldest:  # otherwise the key was used again
                del self._numbers[name]
            self._oldest += 1

    def close(self) -> None:
        """Do nothing: there are no resources to close."""


def key_reused(found: Written) -> StateError:
    """Return the error for a known key that is passed with other data."""
    return StateError(
        f"the idempotency key belongs to another write: {found.count} rows from id {found.first_id} on",
        kind="key_reused",
        hint="use a new key for each write; repeat a key only to retry the same write",
    )
