"""Settings of a storage's rows besides their values: their ranking, their specs, and sample counts.

`ReadView.settings` returns them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from expstore.core.values import Ranking, key_name
from expstore.errors import SchemaError, StateError
from expstore.schema.row_traits import DATA
from expstore.schema.schema import Schema
from expstore.schema.spec_text import check_specs, leaves_of
from expstore.storages.columns.sample_counts import Sampled
from expstore.storages.description import Description

if TYPE_CHECKING:
    from expstore.storages.base import Storage
    from expstore.storages.read_view import ReadView


class ReadSettings:
    """Read the settings of rows. Threads and processes: as the storage.

    Args:
        view: The storage.
    """

    __slots__ = ("_view",)

    def __init__(self, view: ReadView) -> None:
        self._view = view

    def specs(self) -> str:
        """Return the current text of the specs; "" if there are no specs."""
        return self._view.description.specs


class RowSettings(ReadSettings):
    """Change the settings of rows.

    Threads: each change takes the storage's lock. Crashes: in a store on disk, a change is durable when the
    call returns.

    Args:
        storage: The storage.
        describe: Replaces the description of the storage in memory.
        count: Begins to count how often rows are sampled, from the first row on.
    """

    __slots__ = ("_count", "_describe", "_storage")

    def __init__(
        self, storage: Storage, describe: Callable[[Description], None], count: Callable[[], None]
    ) -> None:
        super().__init__(storage)
        self._storage, self._describe, self._count = storage, describe, count

    def check(self, schema: Schema) -> None:
        """Check that rows may have these fields.

        Raises:
            SchemaError: The fields do not match the specs, or this storage cannot store one of them.
        """
        storage = self._storage
        storage.row_traits.check(schema, storage.kind)
        check_specs(storage.description.specs, schema)

    def rank_by(self, ranking: Ranking | None) -> None:
        """Set the criterion by which only the best rows are kept; None: the newest rows are kept.

        Raises:
            StateError: The storage cannot be written.
            StorageError: The disk failed; nothing was changed.
        """
        with self._storage.lock:
            self._storage.writer()
            self._replace(replace(self._storage.description, ranking=ranking))

    def describe_fields(self, specs: str) -> None:
        """Replace the specs of the fields.

        Args:
            specs: The text of the specs; "" for no specs.

        Raises:
            SchemaError: The rows have other fields.
            StateError: The storage cannot be written.
            StorageError: The disk failed; nothing was changed.
        """
        storage = self._storage
        if storage.row_traits.whole:
            _check_whole(specs, type(storage).__name__)
        with storage.lock:
            storage.writer()
            if storage.schema is not None:
                check_specs(specs, storage.schema)
            self._replace(replace(storage.description, specs=specs))

    def count_sampled(self) -> Sampled | None:
        """Count from now on how often each row is sampled; return the counts, None before the first rows.

        Raises:
            StateError: The storage cannot be written.
            StorageError: The disk failed.
        """
        storage = self._storage
        with storage.lock:
            storage.writer()
            if storage.ranking is not None:
                raise StateError(
                    "a store that keeps the best rows cannot count samples: new rows would inherit counts",
                    hint="use a sampler that does not count samples",
                )
            self._count()
            return storage.state.sampled

    def _replace(self, description: Description) -> None:
        self._save(description)
        self._describe(description)

    def record_lineage(self, facts: Mapping[str, Any], kind: str | None = None) -> None:
        """Add facts to the lineage, about the rows that this session writes from now on.

        Args:
            facts: The facts, as values that JSON can store; None removes one.
            kind: What the session does, as in `expstore.storages.format.lineage`; None: as before.

        Raises:
            StateError: The rows are in RAM, where no lineage is kept.
        """
        raise StateError("a store in RAM keeps no lineage", hint="open a path: expstore.open(path)")

    def _save(self, description: Description) -> None:
        """Store the description beyond this process; in RAM nothing is stored."""


def _check_whole(specs: str, kind: str) -> None:
    """Raise SchemaError if specs name fields: in this storage a row is one object without fields."""
    fields = [key_name(key) for key in leaves_of(specs) if key != DATA]
    if fields:
        raise SchemaError(
            f"the specs name the field {fields[0]!r}, but rows of a {kind} are objects without fields",
            hint="use LazyTensorStorage, MemoryStorage or expstore.open() for rows with fields",
        )
