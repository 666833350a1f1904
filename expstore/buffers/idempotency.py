"""Writes under idempotency keys: which one a call names, and what one that was made before has come to.

Used by buffers, before they write. It writes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from expstore.core.idempotency import WriteKey, Written, key_reused
from expstore.core.values import Array, IntArray
from expstore.errors import StateError
from expstore.storages.batch import now_us

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView
    from expstore.writers.writers import Writer

__all__ = ["find_write", "is_known", "known_numbers", "make_key", "numbers_in_part", "numbers_of", "spread"]


def make_key(writer: Writer, key: str | bytes | None, digest: bytes | None) -> WriteKey | None:
    """Return the key that a call names; None: it names none.

    Raises:
        StateError: The writer keeps no keys.
        TypeError: There is a digest, but no key; or they are no bytes.
        ValueError: The key is empty, or the digest not of 16 bytes.
    """
    if key is None:
        if digest is not None:
            raise TypeError("a digest is of a write with an idempotency key; give both, or neither")
        return None
    if not writer.keeps_keys:
        raise StateError(
            f"{writer!r} keeps no idempotency keys: what it writes is no batch that stays together",
            kind="no_keys",
            hint="write without one",
        )
    return WriteKey.of(key, digest)


def find_write(storage: ReadView, key: WriteKey) -> Written | None:
    """Return what has come of the write with a key; None: it was not made.

    Raises:
        StateError: The key is that of another write, or the storage cannot be written.
    """
    storage.writer()  # after an interruption only the journal knows what was written
    return storage.state.write_keys.find(key, now_us())


def is_known(storage: ReadView, key: WriteKey | None) -> bool:
    """Return whether the write with a key was made: by another thread, perhaps, while this one waited."""
    return key is not None and storage.state.write_keys.find(key, now_us()) is not None


def known_numbers(storage: ReadView, key: WriteKey, return_ids: bool) -> IntArray | None:
    """Return indices, or ids, of the rows that were written under a key.

    None: there are none, or rows of the batch were dropped, and it must be looked at again. Shape `(n,)`.
    """
    known = find_write(storage, key)
    return None if known is None or known.dropped else numbers_of(storage, known, return_ids)


def numbers_in_part(storage: ReadView, known: Written, kept: Array | None, return_ids: bool) -> IntArray:
    """Do as `known_numbers` for a batch of which rows were dropped: -1 stands for these.

    Args:
        storage: Where the others are.
        known: What was written.
        kept: Which rows of the batch are not to be dropped; None: all are kept. Shape `(n,)`.
        return_ids: Whether ids are asked for.

    Raises:
        StateError: They are not as many as were written.
    """
    if kept is None or np.count_nonzero(kept) != known.count:
        raise key_reused(known)
    return spread(numbers_of(storage, known, return_ids), kept)


def numbers_of(storage: ReadView, known: Written, return_ids: bool) -> IntArray:
    """Return indices, or ids, of the rows that a write has come to. Shape `(n,)`."""
    ids = np.arange(known.first_id, known.last_id + 1)
    return ids if return_ids else storage.geometry.indices_of(ids, run=True)


def spread(numbers: IntArray, kept: Array) -> IntArray:
    """Put numbers in the places of the rows that were kept, and -1 in the others. Shape `kept.shape`."""
    found = np.full(kept.size, -1, np.int64)
    found[kept] = numbers
    return found
