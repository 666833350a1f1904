"""The replay buffer whose batches say which rows they are.

What `expstore.open` returns. It adds keys to what `ReplayBuffer` draws, and takes priorities out of
TensorDicts; everything else is done there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from expstore.buffers.indexing import to_array
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.sample_units import reduce_to_anchors
from expstore.core.values import Array, Key, Selection, key_name, to_key
from expstore.data.batch import Batch
from expstore.errors import SchemaError
from expstore.schema.schema import Schema
from expstore.storages.columns.priorities import check_priorities
from expstore.storages.read_view import ReadView
from expstore.writers.writers import TensorDictRoundRobinWriter, Writer, default_writer

__all__ = ["TensorDictReplayBuffer"]


class TensorDictReplayBuffer(ReplayBuffer):
    """Store transitions and sample batches that say which rows they are.

    Rows are TensorDicts, nested dicts of arrays, or Arrow tables. Samples carry `index` at the root, and `id`
    where `with_ids` is set; `extend` leaves these keys out. Threads, processes and crashes as `ReplayBuffer`.

    Args:
        priority_key: Where `update_tensordict_priority` finds priorities.
        with_ids: Write `id` into samples; `expstore.open` does.
        storage: Where rows are kept.
        sampler: What makes up a batch; uniform by default.
        writer: Where rows go; in a ring the newest replace the oldest by default.
        batch_size: Rows per batch, if `sample` is not told otherwise.
        device: Where batches are handed out; None: where the storage says.
        consume_after_n_samples: Hand each row out so many times; see `ConsumingSampler`.
        keywords: Those and all others of `ReplayBuffer`, which describes them.
    """

    _dicts_have_fields = True

    def __init__(self, *, priority_key: str = "td_error", with_ids: bool = False, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.priority_key = priority_key
        self._with_ids = with_ids

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        as_numpy: bool | None = None,
    ) -> Any:
        """Do as `ReplayBuffer.sample`.

        Args:
            batch_size: How many rows; None: the buffer's `batch_size`.
            return_info: Return a pair: the batch, and a dict of what is known of each row.
            include_info: False: leave out the entries that are no fields (`index`, and so on).
            as_numpy: Return nested dicts of NumPy arrays, in host memory, instead of a TensorDict. None: as
                the buffer was made.
        """
        as_numpy = self._as_numpy if as_numpy is None else as_numpy
        found = super().sample(batch_size, return_info, as_numpy=as_numpy)
        if include_info is not False:
            return found
        batch, *info = found if return_info else (found,)
        own = self._own_keys()
        if as_numpy:
            batch = {name: values for name, values in batch.items() if name not in own}
        else:
            batch = batch.exclude(*own)
        return (batch, *info) if return_info else batch

    def _own_keys(self) -> frozenset[str]:
        own = {"index", "index_generation"}
        if self._with_ids:
            own.add("id")
        if self._with_ids or self._sampler.prioritized:
            own.add("priority_weight")
        return frozenset(own) if self._unit is None else frozenset(own) | self._unit.root_keys

    def _counts_priorities(self, asked: bool | None) -> bool:
        return asked is not False

    def _default_writer(self, storage: ReadView) -> Writer:
        return TensorDictRoundRobinWriter() if storage.ranking is None else default_writer(storage)

    def _to_batch(self, data: Any, *, single: bool) -> Batch:
        first = data[0] if isinstance(data, list) and data else data
        fits = isinstance(first, TensorDictBase) or (isinstance(data, list) and not data)
        if not fits and not self._has_fields(data):
            raise SchemaError(
                f"{type(self).__name__} only accepts TensorDictBase subclasses, dicts of arrays and Arrow "
                f"tables, got {type(first).__name__}",
                hint="use a ReplayBuffer",
            )
        return super()._to_batch(data, single=single)

    def _root(self, selection: Selection) -> dict[str, Array]:
        geometry = self._storage.geometry
        root: dict[str, Array] = {"index": self._unravel(geometry.index_of(selection.ids))}
        if self._with_ids:
            root["id"] = selection.ids
        if self._writer.tracks_generations:
            root["index_generation"] = geometry.generations_of(selection.ids)
        for key, values in selection.info.items():
            if len(key) == 1 and (self._with_ids or key != ("anchor_id",)):
                root[key[0]] = values
        return root

    def _marked(self, selection: Selection, columns: list[Array]) -> dict[Key, Array]:
        schema = self._storage.require_schema()
        more = {key: values for key, values in selection.info.items() if len(key) > 1}
        for mark in selection.marks:
            place = schema.place(mark.key)
            if place >= 0:
                columns[place] = mark.on(columns[place])
            elif mark.new:
                more[mark.key] = mark.alone()
        return more

    def _given_priorities(self, schema: Schema, columns: Sequence[Array]) -> Array | None:
        place = schema.place(to_key(self.priority_key)) if self._sampler.prioritized else -1
        if place < 0:
            return None
        values = self._sampler.reduce(columns[place].astype(np.float64))
        return check_priorities(values)

    def update_priority(self, index: Any = None, priority: Any = None, *, id: Any = None) -> int:
        """Do as `ReplayBuffer.update_priority`, or, given a sample alone, as `update_tensordict_priority`."""
        if isinstance(index, TensorDictBase) and priority is None and id is None:
            return self.update_tensordict_priority(index)
        return super().update_priority(index, priority, id=id)

    def update_tensordict_priority(self, data: TensorDictBase) -> int:
        """Set the priorities of a sample's rows from its `priority_key`; return how many were set.

        Args:
            data: A sample with `priority_key` added. Shape of that entry `(n,)` or `(n, 1)`. Of sequences
                the anchors' priorities are set, each to the largest of its valid rows.
        """
        key, name = to_key(self.priority_key), "id" if self._with_ids else "index"
        priority = data.get(key)
        if priority is None:
            raise SchemaError(f"the sample has no {key_name(key)!r} to take priorities from")
        rows = data.get(f"anchor_{name}") if self._unit is not None else None
        if rows is None:
            rows = data.get(name)
            if rows is None:
                raise SchemaError(f"the sample has no {name!r}, which says which rows it holds")
            if rows.ndim > 1 and self._storage.ndim == 1:  # the same along the dims that rows have themselves
                rows = rows.reshape(rows.shape[0], -1)[:, 0]
        else:
            values = self._sampler.reduce(to_array(priority).astype(np.float64))
            numbers = to_array(rows) if self._with_ids else self._numbers(rows)
            anchors, priority = reduce_to_anchors(numbers, values, to_array(data["validity_mask"]))
            rows = torch.from_numpy(anchors) if self._with_ids else self._indices(anchors)
        if self._with_ids:
            return self.update_priority(id=rows, priority=priority)
        return self.update_priority(rows, priority)
