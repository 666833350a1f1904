"""What some storages can do apart from reading and writing rows: objects, or None where they cannot.

`Storage.fields`, `Storage.retention` and `Storage.row_appender` return them. Nothing here does anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from expstore.core.id_set import Gaps
from expstore.core.retention_policy import Retain
from expstore.core.values import Array, IntArray, Key
from expstore.episodes.table import Run
from expstore.storages.new_field import Coming

__all__ = ["FieldChanges", "GivenUp", "Retention", "RowAppending"]


class FieldChanges(Protocol):
    """Add and drop the fields of a storage: each call does all of it, or nothing.

    Threads: one field is added or dropped at a time; others write and read meanwhile, and wait for its end.
    """

    def add(self, coming: Coming) -> None:
        """Have one more field.

        Args:
            coming: Which one, and the values of the rows that are there.

        Raises:
            SchemaError: Rows cannot have such a field.
            StateError: Nothing can be written here, or the storage has another content by now.
            StorageError: The disk failed; nothing was changed.
        """

    def drop(self, key: Key, specs: str) -> None:
        """Have one field less.

        Args:
            key: Which one.
            specs: What values fields may have from then on, as `expstore.schema.spec_text` writes it.

        Raises:
            SchemaError: There is no such field, or rows cannot be without it.
            StateError: Nothing can be written here; or rows are ranked by the field.
            StorageError: The disk failed; the store must be opened again.
        """


class RowAppending(Protocol):
    """Append rows of one stream, so many at a time.

    Threads: one at a time uses it; others may use the storage.
    """

    #: The rows, field by field in the schema's order. Shape `(bytes,)`, uint8.
    fields: Array

    def append(self, source: str | None, runs: Sequence[Run], *, linked: bool = False) -> int:
        """Append the rows in `fields`; return the id of the first one, 0 if they are not taken.

        Rows that are not taken leave nothing behind.

        Args:
            source: Name of the stream, in the storage's own session; None: the unnamed one.
            runs: How the rows lie in episodes, with rewards in the precision of their field.
            linked: Whether the observation of a row is compared with the next observation of the row before
                it in its episode. There is a single row then.

        Raises:
            StateError: Nothing can be written here.
            StorageError: The disk failed; nothing is published.
        """


class GivenUp(NamedTuple):
    """Say what has left.

    Args:
        episodes: How many.
        rows: How many.
        bytes: How much space the columns take less than before.
    """

    episodes: int = 0
    rows: int = 0
    bytes: int = 0


class Retention(Protocol):
    """Delete whole episodes of a store.

    Threads: others write and read meanwhile. Crashes: rows are gone when a call returns, or a record says so.
    """

    @property
    def policy(self) -> Retain | None:
        """Which rows are to stay; None: all of them."""

    def keep_policy(self, policy: Mapping[str, Any]) -> None:
        """Keep which rows are to stay, as `expstore.core.retention_policy` writes it.

        Raises:
            StateError: Rows leave by age here; or the store is closed, or cannot be written.
            StorageError: The disk failed; nothing was changed.
        """

    def rows_of(self, episodes: IntArray) -> Gaps:
        """Return the ids of the readable rows of episodes, but for those that are open. The lock is held."""

    def bytes_per_row(self) -> float:
        """Return how much space a row takes in the columns, on average."""

    def columns_bytes(self) -> int:
        """Return how much space the columns take."""

    def delete(self, episodes: IntArray) -> GivenUp:
        """Delete all rows of episodes that have ended, for good; their facts stay.

        Args:
            episodes: Their ids. Shape `(n,)`.

        Raises:
            StateError: Rows leave by age here; or the store is closed, or cannot be written.
            StorageError: The disk failed. What it says of the rows is what the next opening finds.
        """
