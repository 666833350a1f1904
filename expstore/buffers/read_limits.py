"""Limit the bytes that one read of rows may return; checked before values are read.

Used by the HTTP layer, which limits its responses. The limit applies to one thread within a `with` block,
since one buffer answers requests of several kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import numpy as np

from expstore.core.values import IntArray
from expstore.errors import QueryError
from expstore.schema.schema import Schema
from expstore.storages.read_view import ReadView

#: Number of values per row besides the fields: `index` and `id`.
_OWN_VALUES = 2
_OWN_BYTES = 16
#: Largest number of JSON characters of a number, and of one byte of a text or list.
_NUMBER_CHARACTERS, _BYTE_CHARACTERS = 24, 6


@dataclass(frozen=True, slots=True)
class ReadLimit:
    """A limit of the bytes of rows.

    Args:
        size: Largest number of bytes.
        text: Whether rows are counted as JSON; otherwise as Arrow stores them.
    """

    size: int
    text: bool = False

    def row_bytes(self, schema: Schema) -> int:
        """Return the bytes per row of the fields of fixed size."""
        if self.text:
            return _NUMBER_CHARACTERS * (sum(entry.row_items for entry in schema.fields) + _OWN_VALUES)
        wider = sum(entry.row_bytes for entry in schema.fields if entry.dtype == "bfloat16")
        return schema.row_bytes + wider + _OWN_BYTES

    def check_count(self, schema: Schema | None, count: int) -> None:
        """Raise QueryError if the fields of fixed size of `count` rows are too large."""
        each = 0 if schema is None else self.row_bytes(schema)
        if count * each > self.size:
            raise self._build_size_error(count, count * each, self.size // each)

    def check(self, storage: ReadView, ids: IntArray, schema: Schema | None = None) -> None:
        """Raise QueryError (kind "too_large") if these rows are too large.

        Args:
            storage: Storage of the rows.
            ids: Their ids. Shape `(n,)`.
            schema: The fields that are read; None: all.
        """
        schema = storage.schema if schema is None else schema
        if schema is None:
            return
        self.check_count(schema, ids.size)
        if schema.variable:
            sizes = storage.sizes_of(ids) * (_BYTE_CHARACTERS if self.text else 1)
            ends = np.cumsum(sizes + self.row_bytes(schema))
            if ids.size and ends[-1] > self.size:
                fitting = int(np.searchsorted(ends, self.size, side="right"))
                raise self._build_size_error(ids.size, int(ends[-1]), fitting)

    def check_bytes(self, size: int) -> None:
        """Raise QueryError (kind "too_large") if a response of `size` bytes is too large."""
        if size > self.size:
            raise QueryError(
                f"the answer takes {size:,} bytes, and {self.size:,} are allowed",
                kind="too_large",
                hint="ask for less at once, or start the server with a larger max_answer (--limits)",
            )

    def _build_size_error(self, count: int, size: int, fitting: int) -> QueryError:
        return QueryError(
            f"{count:,} rows take {size:,} bytes, and an answer may take {self.size:,}: the largest "
            f"batch_size that fits is {fitting}",
            kind="too_large",
            hint=f"ask for {fitting} rows at once, or start the server with a larger max_answer (--limits)"
            if fitting
            else "start the server with a larger max_answer (--limits)",
        )


#: The limit of reads in this thread; None: no limit.
READ_LIMIT: ContextVar[ReadLimit | None] = ContextVar("expstore_read_limit", default=None)


@contextmanager
def limit_reads(size: int, *, text: bool = False) -> Iterator[ReadLimit]:
    """Limit what one sample, `by_id` or `trajectory` of this thread may return.

    Args:
        size: Largest number of bytes.
        text: Whether the rows will be sent as JSON.
    """
    limit = ReadLimit(size, text)
    token = READ_LIMIT.set(limit)
    try:
        yield limit
    finally:
        READ_LIMIT.reset(token)
