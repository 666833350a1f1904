"""Rows by index and by id: read rows, and replace whole rows.

It draws no batches and does not decide where new rows are placed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDictBase, is_tensor_collection

from expstore.buffers.batch_builder import BatchBuilder
from expstore.buffers.ingest import Ingest
from expstore.buffers.read_limits import READ_LIMIT
from expstore.buffers.row_index import RowIndex
from expstore.buffers.store_handle import StoreHandle
from expstore.core.tables import elide
from expstore.core.values import IntArray, Key, Selection, key_name, to_key
from expstore.data.nested_tensors import to_values
from expstore.data.to_arrays import to_array
from expstore.errors import ArgumentError, NotFoundError, SchemaError
from expstore.schema.schema import OBJECT
from expstore.storages.base import replace_rows
from expstore.storages.episode_lookup import rows_of_episode
from expstore.storages.read_view import ReadView, find, layout_of, read_rows, read_stable


class StoredRows:
    """Read rows as users get them, and replace rows.

    Threads: any number may read; a replacement waits for the writer. Crashes: on disk a replacement is
    applied completely or not at all.

    Args:
        store: The store.
        index: Interprets indices.
        batches: Builds batches from columns.
        ingest: Converts batches to columns.
    """

    def __init__(self, store: StoreHandle, index: RowIndex, batches: BatchBuilder, ingest: Ingest) -> None:
        self._store = store
        self._index = index
        self._batches = batches
        self._ingest = ingest

    def get(self, index: Any) -> Any:
        """Return rows by index, or one field of all rows; see `ReplayBuffer.__getitem__`."""
        storage = self._store.storage
        if _is_key(index):
            return read_stable(storage, lambda: self._field(storage, to_key(index)))
        if self._is_within_rows(index):
            return self.get(slice(None))[index]
        return read_stable(storage, lambda: self._read(storage, index))

    def set(self, index: Any, data: Any) -> None:
        """Replace rows by index; see `ReplayBuffer.__setitem__`."""
        storage = self._store.storage
        if _is_key(index):
            raise SchemaError(
                f"rb[{index!r}] = sets no field",
                hint="set_(key, values), or rb[rows] = a batch of all fields",
            )
        if self._is_within_rows(index):
            raise SchemaError(
                f"rb[{index!r}] = would set parts of rows",
                hint="rb[rows] = rows, or set_at_()",
            )
        storage.writer()
        ids, shape = self._index.find(index)
        if self._batches.transform.transforms:
            data = self._ingest.invert(data, len(shape), single=shape == ())
            if data is None:
                return
        # The shape of the index counts here, not time and lanes.
        layout = replace(layout_of(storage, 0), ndim=max(1, len(shape)), all_dims=False)
        batch = self._ingest.read_columns(data, layout, single=shape == ())
        if batch.count == ids.size:
            self._ingest.add_new_fields(storage, batch)
        with storage.lock:
            replace_rows(storage.writer(), self._index.find(index)[0], batch)

    def by_id(self, ids: Any) -> TensorDictBase:
        """Return rows by id; see `ReplayBuffer.by_id`."""
        given = to_array(ids).reshape(-1)
        if given.dtype.kind not in "iu" and given.size:
            raise ArgumentError(
                f"ids must be integers, got {elide(repr(ids), 40)}",
                hint="samples have them as id",
            )
        wanted = given.astype(np.int64, copy=False)
        storage = self._store.storage

        def locate() -> IntArray:
            held = storage.stored.holds(wanted)
            if not held.all():
                first, last = storage.stored.low + 1, storage.stored.last
                raise NotFoundError(
                    f"there is no row with id {wanted[~held][0]}: the oldest is {first}, the newest {last}"
                )
            _check_limit(storage, wanted)
            return wanted

        def read() -> TensorDictBase:
            found, columns, view = self._batches.transform.read(storage, locate)
            return cast(TensorDictBase, self._batches.of_rows(storage, Selection(found), columns, view))

        return read_stable(storage, read)

    def trajectory(self, episode_id: int) -> TensorDictBase:
        """Return the rows of an episode; see `ReplayBuffer.trajectory`."""
        storage = self._store.storage

        def locate() -> IntArray:
            ids = rows_of_episode(storage, episode_id)
            _check_limit(storage, ids)
            return ids

        def read() -> TensorDictBase:
            found, columns, view = self._batches.transform.read(storage, locate)
            batch = self._batches.of_rows(storage, Selection(found), columns, view)
            if isinstance(batch, TensorDictBase) and batch.batch_dims == 1:
                batch.names = ["time"]
            return cast(TensorDictBase, batch)

        return read_stable(storage, read)

    def _read(self, storage: ReadView, index: Any) -> Any:
        shape: tuple[int, ...] = ()

        def locate() -> IntArray:
            nonlocal shape
            ids, shape = self._index.find(index)
            return ids

        _, columns, view = self._batches.transform.read(storage, locate)
        return self._batches.build(storage, columns, shape, {}, view=view)

    def _field(self, storage: ReadView, key: Key) -> Any:
        """Return one field of all rows, in the order of their indices."""
        plain = storage.ndim == 1 and not self._index.time_dim and not self._batches.transform.transforms
        if plain and storage.schema is not None and key in storage.schema:
            field = storage.schema[key]
            if field.dtype != OBJECT:
                places = [storage.require_schema().place_of(key)]
                _, (column,) = read_rows(storage, lambda: find(storage, slice(None))[0], places)
                if field.variable:
                    return self._batches.place(storage, to_values(column, field.arrow))
                tensor = torch.from_numpy(column)
                bits = field.dtype == "bfloat16"
                return self._batches.place(storage, tensor.view(torch.bfloat16) if bits else tensor)
        batch = self.get(slice(None))
        if not is_tensor_collection(batch) or key not in batch.keys(include_nested=True):
            raise NotFoundError(f"no field {key_name(key)!r}", hint=f"the store has {storage.schema!r}")
        return batch[key]

    def _is_within_rows(self, index: Any) -> bool:
        return isinstance(index, tuple) and len(index) > self._store.storage.ndim


def _is_key(index: Any) -> bool:
    return isinstance(index, str) or (
        isinstance(index, tuple) and bool(index) and all(isinstance(part, str) for part in index)
    )


def _check_limit(storage: ReadView, ids: IntArray) -> None:
    """Raise QueryError if these rows are more than this thread may read at once."""
    if (limit := READ_LIMIT.get()) is not None:
        limit.check(storage, ids)
