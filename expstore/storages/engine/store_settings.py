"""Settings of a store's rows besides their values, stored in expstore.json.

A service of the store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from expstore.errors import SchemaError, StateError
from expstore.schema.schema import Schema
from expstore.storages.description import Description
from expstore.storages.format.layout import ColumnLayout
from expstore.storages.format.manifest import Manifest
from expstore.storages.row_settings import RowSettings

if TYPE_CHECKING:
    from expstore.storages.engine.store import Store


class StoreSettings(RowSettings):
    """Change the settings of a store's rows.

    Threads and crashes: as `RowSettings`.

    Args:
        store: The store.
        describe: Replaces the description of the storage in memory.
        count: Begins to count how often rows are sampled, from the first row on.
        save: Writes expstore.json.
    """

    __slots__ = ("_save_manifest",)
    _storage: Store

    def __init__(
        self,
        store: Store,
        describe: Callable[[Description], None],
        count: Callable[[], None],
        save: Callable[[Manifest], None],
    ) -> None:
        super().__init__(store, describe, count)
        self._save_manifest = save

    def check(self, schema: Schema) -> None:
        """Check that rows may have these fields; see `RowSettings.check`."""
        super().check(schema)
        if self._storage.ranking is not None and schema.variable:
            raise _no_ranking_of(schema)

    def _save(self, description: Description) -> None:
        store = self._storage
        if description.ranking not in (None, store.ranking):
            self._check_ranking()
        self._save_manifest(store.manifest.replace(ranking=description.ranking, specs=description.specs))

    def _check_ranking(self) -> None:
        """Raise an error if better rows cannot replace others in this store."""
        store = self._storage
        columns, schema = store.state.columns, store.schema
        if schema is not None and schema.variable:
            raise _no_ranking_of(schema)
        if columns is not None:
            columns.check_replaceable()
        if ColumnLayout(**store.manifest.layout).asks_packed:
            raise StateError(
                "this store has packed fields, whose rows cannot be replaced by better ones",
                hint="create a store with layout='flat', or use a writer that keeps the newest rows",
            )


def _no_ranking_of(schema: Schema) -> SchemaError:
    from expstore.storages.columns.arrow.column import in_place  # imported here, because it loads pyarrow

    fields = [entry for entry in schema.fields if entry.variable]
    return in_place(fields, "rows cannot be replaced by better ones")
