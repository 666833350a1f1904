"""Capabilities that not every storage has: interfaces of objects, or None for a storage without them.

`Storage.fields`, `Storage.retention` and `Storage.row_appender` return them; `Holders` has a `Shipping`. This
module has no implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from expstore.core.id_set import IdSet
from expstore.core.retention_policy import Retain
from expstore.core.values import Array, IntArray, Key
from expstore.episodes.segmentation import Run
from expstore.storages.format.annotation_log import Part
from expstore.storages.new_field import NewField


class FieldChanges(Protocol):
    """Add and drop fields of a storage: each call takes effect completely, or not at all.

    Threads: one field is added or dropped at a time. Other threads write and read meanwhile, and wait at the
    end of the change.
    """

    def add(self, new_field: NewField) -> None:
        """Add a field.

        Args:
            new_field: The field, and its values for existing rows.

        Raises:
            SchemaError: Rows cannot have such a field.
            StateError: The storage cannot be written, or its content was replaced meanwhile.
            StorageError: The disk failed; nothing was changed.
        """

    def annotate(self, by: str | None, ids: IntArray, parts: Sequence[Part]) -> None:
        """Add values of annotated fields to rows.

        Args:
            by: Who adds them; None: unknown.
            ids: Ids of the rows; if an id occurs twice, its last value is the newest. Shape `(n,)`.
            parts: The values, which fit the fields.

        Raises:
            NoRowError: Rows are not in the store.
            StateError: The storage cannot be written, or has no annotated fields.
            StorageError: The disk failed. Whatever is raised, nothing was added.
        """

    def drop(self, key: Key, specs: str) -> None:
        """Drop a field.

        Args:
            key: The field.
            specs: The specs of the remaining fields, as `expstore.schema.spec_text` writes them.

        Raises:
            SchemaError: There is no such field, or rows cannot be without it.
            StateError: The storage cannot be written, or rows are ranked by the field.
            StorageError: The disk failed; the store must be opened again.
        """


class RowAppending(Protocol):
    """Append a fixed number of rows of one stream at a time.

    Threads: one at a time uses the object; others may use the storage.
    """

    #: The rows, field by field in the schema's order. Shape `(bytes,)`, uint8.
    fields: Array

    def append(self, source: str | None, runs: Sequence[Run]) -> int:
        """Append the rows in `fields`; return the id of the first row, or 0 if they were not appended.

        If rows are not appended, nothing has changed; the caller then uses `Storage.write`.

        Args:
            source: Name of the stream, in the storage's own session; None: the unnamed one.
            runs: The rows' episodes and steps, with rewards in the precision of their field.

        Raises:
            StateError: The storage cannot be written.
            StorageError: The disk failed; no row becomes readable.
        """


class GivenUp(NamedTuple):
    """What was deleted.

    Args:
        episodes: Number of episodes.
        rows: Number of rows.
        bytes: Number of bytes that the columns are smaller than before.
    """

    episodes: int = 0
    rows: int = 0
    bytes: int = 0


class Retention(Protocol):
    """Delete whole episodes of a store.

    Threads: others write and read meanwhile. Crashes: when a call returns, the rows are deleted or a record
    of the deletion is stored.
    """

    @property
    def policy(self) -> Retain | None:
        """The policy that says which rows to keep; None: all rows."""

    def keep_policy(self, policy: Mapping[str, Any]) -> None:
        """Store the policy that says which rows to keep, as `expstore.core.retention_policy` writes it.

        Raises:
            StateError: The store has a capacity and evicts rows by age, is closed, or cannot be written.
            StorageError: The disk failed; nothing was changed.
        """

    def rows_of(self, episodes: IntArray) -> IdSet:
        """Return the ids of the readable rows of episodes that have ended. The caller holds the lock."""

    def bytes_per_row(self) -> float:
        """Return the average space of a row in the columns, in bytes."""

    def columns_bytes(self) -> int:
        """Return the space of the columns, in bytes."""

    def delete(self, episodes: IntArray) -> GivenUp:
        """Delete all rows of episodes that have ended, permanently; facts about the episodes remain.

        Args:
            episodes: Ids of the episodes. Shape `(n,)`.

        Raises:
            StateError: The store has a capacity and evicts rows by age, is closed, or cannot be written.
            StorageError: The disk failed. The next opening decides whether the rows are deleted.
        """


class Shipping(Protocol):
    """Ship a store to an object storage while it is open; see `expstore.cold.ship.Shipper`.

    Threads: any number may call the methods.
    """

    def stats(self) -> dict[str, Any]:
        """Return `rb.stats()["shipped"]`."""

    def wait(self, seconds: float) -> None:
        """Wait until all that was written before this call is shipped.

        Raises:
            LockedError: Another writer has claimed the address.
            RemoteError: It was not shipped in time.
        """

    def close(self) -> None:
        """Ship once more, for a limited time; the store is still open, and its lock is not held."""
