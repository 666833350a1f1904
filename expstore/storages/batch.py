"""A batch of rows that a writer has placed, as storages take it.

Made by writers, handed to `Storage.write`. It holds, and decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from expstore.core.idempotency import WriteKey
from expstore.core.values import Array, IntArray
from expstore.episodes.table import Assignment

__all__ = ["Payload", "Rows", "now_us"]


@dataclass(slots=True)
class Rows:
    """Hold a batch that a writer has placed.

    Args:
        first_id: Id of its first row; the others follow.
        count: How many rows.
        columns: One array per field, in the schema's order. Shapes `(n, *row shape)`.
        assignment: Ids, episodes and steps.
        time: Microseconds since 1970.
        info: What is noted about all their episodes, as JSON text.
        key: The idempotency key under which they are written; None: there is none.
    """

    first_id: int
    count: int
    columns: Sequence[Array]
    assignment: Assignment
    time: int
    info: str = ""
    key: WriteKey | None = None

    @property
    def last_id(self) -> int:
        """Id of its last row."""
        return self.first_id + self.count - 1

    @property
    def ids(self) -> IntArray:
        """The rows' ids. Shape `(n,)`."""
        ids: IntArray = self.assignment.numbers[0]
        return ids


@dataclass(frozen=True, slots=True)
class Payload:
    """Where the bytes of a batch are before its commit record is appended.

    Args:
        crc: crc32c of all columns but the priorities; 0 in a storage without checksums.
        inline: The bytes that the record carries itself; b"": none.
        in_columns: Whether the columns hold the rows. Otherwise the record and the memtable do.
    """

    crc: int = 0
    inline: bytes = b""
    in_columns: bool = True


def now_us() -> int:
    """Return the time, microseconds since 1970."""
    return time.time_ns() // 1000
