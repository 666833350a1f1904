"""A batch of rows with their ids, as storages write it.

Created by writers and passed to `Storage.write`. A plain data container.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from expstore.core.idempotency import WriteKey
from expstore.core.values import Array, IntArray
from expstore.episodes.table import Assignment


@dataclass(slots=True)
class Rows:
    """A batch with the ids that a writer has assigned.

    Args:
        first_id: Id of its first row; the other rows have consecutive ids.
        count: Number of rows.
        columns: One array per field, in the schema's order. Shapes `(n, *row shape)`.
        assignment: Ids, episodes and steps of the rows.
        time: Microseconds since 1970.
        info: Annotation of all their episodes, as JSON text.
        key: The idempotency key under which the rows are written; None: no key.
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
        """Id of the last row."""
        return self.first_id + self.count - 1

    @property
    def ids(self) -> IntArray:
        """The rows' ids. Shape `(n,)`."""
        ids: IntArray = self.assignment.numbers[0]
        return ids


@dataclass(frozen=True, slots=True)
class Payload:
    """The location of a batch's bytes before its commit record is appended.

    Args:
        crc: crc32c of all columns except the priorities; 0 in a storage without checksums.
        inline: The bytes that the record itself contains; b"" if they are elsewhere.
        in_columns: Whether the columns contain the rows. Otherwise the record and the memtable do.
    """

    crc: int = 0
    inline: bytes = b""
    in_columns: bool = True


def now_us() -> int:
    """Return the current time in microseconds since 1970."""
    return time.time_ns() // 1000
