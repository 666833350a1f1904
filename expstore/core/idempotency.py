"""Idempotency keys: which writes are known, and which rows came of them.

Used by buffers, which ask before they write, and by storages, which note a key with the rows that were
written under it; `expstore.storages.format.write_key_file` keeps the keys of a store on disk. It never sees a
row.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import google_crc32c

from expstore.core import tuning
from expstore.errors import StateError

__all__ = ["ENTRY", "NO_KEY", "WriteKey", "WriteKeys", "Written", "key_reused", "pack_entry"]

#: A key is remembered for 24 hours, in microseconds.
KEPT_US = 24 * 3600 * 1_000_000

#: crc32c of the rest, rows (bit 31: rows of the batch were dropped), number, key, digest, first id, time.
ENTRY = struct.Struct("<IIQ16s16sQq")
#: What a record has in the place of a key if it was written under none.
NO_KEY = bytes(16)
_DROPPED = 1 << 31
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class WriteKey:
    """Name a write, so that it can be told from another one and is not done twice.

    Args:
        name: blake2b of the user's key, 16 bytes.
        digest: Of what is written, 16 bytes; zeros: the user says that the same key means the same rows.
        dropped: Whether rows of the batch were not taken in: the answer has -1 in their places.
    """

    name: bytes
    digest: bytes = NO_KEY
    dropped: bool = False

    @classmethod
    def of(cls, key: str | bytes, digest: bytes | None) -> WriteKey:
        """Make one of what a user gave.

        Raises:
            TypeError: The key is neither text nor bytes, or the digest no bytes.
            ValueError: The key is empty, or the digest not of 16 bytes.
        """
        if not isinstance(key, str | bytes):
            raise TypeError(f"an idempotency key is text or bytes, not {type(key).__name__}")
        if not key:
            raise ValueError("the idempotency key is empty; leave it out, or give each write its own")
        if digest is not None and not isinstance(digest, bytes):
            raise TypeError(f"a digest is bytes, not {type(digest).__name__}")
        if digest is not None and len(digest) != _DIGEST_BYTES:
            raise ValueError(f"a digest has {_DIGEST_BYTES} bytes, not {len(digest)}")
        data = key.encode() if isinstance(key, str) else key
        return cls(hashlib.blake2b(data, digest_size=len(NO_KEY)).digest(), digest or NO_KEY)


@dataclass(frozen=True, slots=True)
class Written:
    """Say what a write under a key has come to.

    Args:
        first_id: Id of the first row that was written.
        count: How many were.
        dropped: Whether rows of the batch were not taken in.
    """

    first_id: int
    count: int
    dropped: bool

    @property
    def last_id(self) -> int:
        """Id of the last row that was written."""
        return self.first_id + self.count - 1


def pack_entry(number: int, key: WriteKey, first_id: int, count: int, time: int) -> bytes:
    """Return an entry of the ring."""
    rows = count | _DROPPED if key.dropped else count
    rest = ENTRY.pack(0, rows, number, key.name, key.digest, first_id, time)[4:]
    crc: int = google_crc32c.value(rest)
    return crc.to_bytes(4, "little") + rest


class WriteKeys:
    """Know the newest keys: the last 100,000, or those of the last 24 hours if these are fewer.

    They lie in a ring of entries, numbered from 0 on. Threads: one notes, any number ask; a key is known
    when its rows are published. Processes and crashes: these are in memory only.
    """

    def __init__(self) -> None:
        self.slots, self._kept = tuning.IDEMPOTENCY_SLOTS, tuning.IDEMPOTENCY_KEYS
        #: Of the next key.
        self.number = 0
        self._oldest = 0  # no entry before this one is in `_numbers`
        self._numbers: dict[bytes, int] = {}
        self._ring = bytearray()  # grows up to its length

    def __len__(self) -> int:
        return len(self._numbers)

    def find(self, key: WriteKey, now: int) -> Written | None:
        """Return what has come of the write with this key; None: nothing is known of it.

        Args:
            key: Which one.
            now: Microseconds since 1970.

        Raises:
            StateError: It was another write (kind "key_reused").
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
        """Know a key from now on; its rows are published."""
        number, at = self.number, self._offset_of(self.number)
        # Behind the last byte this makes it longer.
        self._ring[at : at + ENTRY.size] = pack_entry(number, key, first_id, count, time)
        self._numbers[key.name] = number
        self.number = number + 1
        self._forget(time)

    def restore(self, ring: bytearray, numbers: dict[bytes, int], *, oldest: int, number: int) -> None:
        """Know what was kept elsewhere, in the place of what there is.

        Args:
            ring: The entries, each at its place.
            numbers: Of the keys that are not too old.
            oldest: No entry before this one is known.
            number: Of the next key.
        """
        self._ring, self._numbers, self._oldest, self.number = ring, numbers, oldest, number

    def _offset_of(self, number: int) -> int:
        return number % self.slots * ENTRY.size

    def _forget(self, now: int) -> None:
        """Forget keys that are one too many, or too old; a clock that was set back keeps some for longer."""
        while self._oldest < self.number:
            entry = ENTRY.unpack_from(self._ring, self._offset_of(self._oldest))
            name, time = entry[3], entry[6]
            if self.number - self._oldest <= self._kept and now - time <= KEPT_US:
                return
            if self._numbers.get(name) == self._oldest:  # else it was used again
                del self._numbers[name]
            self._oldest += 1

    def close(self) -> None:
        """Let go."""


def key_reused(found: Written) -> StateError:
    """Return what to raise where a known key comes with something else."""
    return StateError(
        f"the idempotency key is that of another write: of {found.count} rows from id {found.first_id} on",
        kind="key_reused",
        hint="give each write a key of its own, and the same one only when it is tried again",
    )
