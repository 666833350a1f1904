"""What a storage keeps of its rows besides their values: what ranks them, their specs, and their counts.

`ReadView.settings` returns it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

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

__all__ = ["ReadSettings", "RowSettings"]


class ReadSettings:
    """Read the settings of rows. Threads and processes: as the storage.

    Args:
        view: Whose settings.
    """

    __slots__ = ("_view",)

    def __init__(self, view: ReadView) -> None:
        self._view = view

    def specs(self) -> str:
        """Return the text of the specs as it is now; "": nothing is known of the values."""
        return self._view.description.specs


class RowSettings(ReadSettings):
    """Change the settings of rows.

    Threads: each change takes the storage's lock. Crashes: of a store on disk a change that returned
    survives the machine.

    Args:
        storage: Whose settings.
        describe: Replaces the description of the storage in memory.
        count: Starts counting how often rows are handed out, from the first row on.
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
            SchemaError: They are not those of the specs, or this storage cannot keep one of them.
        """
        storage = self._storage
        storage.row_traits.check(schema, storage.kind)
        check_specs(storage.description.specs, schema)

    def rank_by(self, ranking: Ranking | None) -> None:
        """Set what ranks rows, of which only the best are to stay; None: the newest stay.

        Raises:
            StateError: Nothing can be written here.
            StorageError: The disk failed; nothing was changed.
        """
        with self._storage.lock:
            self._storage.writer()
            self._replace(replace(self._storage.description, ranking=ranking))

    def describe_fields(self, specs: str) -> None:
        """Replace the specs of the fields.

        Args:
            specs: Their text; "": nothing is known of the values.

        Raises:
            SchemaError: The rows have other fields.
            StateError: Nothing can be written here.
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
        """Count from now on how often each row is handed out; return the counts, None before the first rows.

        Raises:
            StateError: Nothing can be written here.
            StorageError: The disk failed.
        """
        storage = self._storage
        with storage.lock:
            storage.writer()
            if storage.ranking is not None:
                raise StateError(
                    "rows are not counted where better ones take their places, and would inherit the counts",
                    hint="draw the best rows with another sampler",
                )
            self._count()
            return storage.state.sampled

    def _replace(self, description: Description) -> None:
        self._save(description)
        self._describe(description)

    def _save(self, description: Description) -> None:
        """Keep the description beyond this process; in RAM nothing is kept."""


def _check_whole(specs: str, kind: str) -> None:
    """Raise SchemaError if specs name fields: a row is one object, and has none."""
    fields = [key_name(key) for key in leaves_of(specs) if key != DATA]
    if fields:
        raise SchemaError(
            f"the specs name {fields[0]!r}, and rows of a {kind} are objects without fields",
            hint="rows with fields are kept by LazyTensorStorage, MemoryStorage, or expstore.open()",
        )
