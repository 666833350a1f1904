"""The replay buffer whose batches include the rows' indices. `expstore.open` returns it.

`TensorDictRows` has its differences from a `ReplayBuffer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from expstore.buffers.arguments import check_sample
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.row_styles import RowStyle
from expstore.buffers.sample_units import reduce_to_anchors
from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.geometry import RingGeometry
from expstore.core.values import Array, Key, Selection, to_key
from expstore.data.to_arrays import to_array
from expstore.errors import SchemaError
from expstore.samplers.base import Sampler
from expstore.schema.schema import Schema
from expstore.storages.columns.priorities import check_priorities
from expstore.storages.read_view import ReadView
from expstore.writers.writers import TensorDictRoundRobinWriter, Writer, default_writer


class TensorDictReplayBuffer(ReplayBuffer):
    """Store transitions and sample batches that include the rows' indices.

    Rows are TensorDicts, nested dicts of arrays, or Arrow tables. Samples have `index` at the root, and `id`
    if `with_ids` is set; `extend` skips these keys. Threads, processes and crashes: as `ReplayBuffer`.

    Args:
        priority_key: The field from which `extend` and `update_tensordict_priority` read priorities.
        with_ids: Whether samples have `id`; `expstore.open` sets it.
        keywords: As in `ReplayBuffer`: `storage`, `sampler` (uniform by default), `writer` (in a ring the
            newest rows replace the oldest by default), `batch_size`, `device` (the storage's by default),
            `consume_after_n_samples`, and all others.
    """

    def __init__(self, *, priority_key: str = "td_error", with_ids: bool = False, **keywords: Any) -> None:
        self._style = TensorDictRows(type(self).__name__, priority_key=priority_key, with_ids=with_ids)
        super().__init__(**keywords, _style=self._style)

    @property
    def priority_key(self) -> str:
        """The field with the priorities of new rows and of samples."""
        return self._style.priority_key

    @priority_key.setter
    def priority_key(self, key: str) -> None:
        self._style.set_priority_key(key)

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: Literal[False] = False,
        include_info: bool | None = None,
        *,
        as_numpy: Literal[True],
    ) -> dict[str, Any]: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        *,
        return_info: Literal[True],
        include_info: bool | None = None,
        as_numpy: Literal[True],
    ) -> tuple[dict[str, Any], dict[str, Any]]: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: Literal[False] = False,
        include_info: bool | None = None,
        *,
        as_numpy: Literal[False] | None = None,
    ) -> TensorDict: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        *,
        return_info: Literal[True],
        include_info: bool | None = None,
        as_numpy: Literal[False] | None = None,
    ) -> tuple[TensorDict, dict[str, Any]]: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        as_numpy: bool | None = None,
    ) -> Any: ...

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        as_numpy: bool | None = None,
    ) -> Any:
        """Draw a batch; see `ReplayBuffer.sample`.

        Args:
            batch_size: Number of rows; None: the buffer's `batch_size`.
            return_info: Whether to return a pair: the batch, and a dict of the sampler's values about each
                row.
            include_info: False: leave out the entries that are not fields, such as `index`.
            as_numpy: Whether to return nested dicts of NumPy arrays, in host memory, instead of a TensorDict.
                None: the buffer's setting.
        """
        as_numpy = self._as_numpy if as_numpy is None else as_numpy
        found = super().sample(batch_size, return_info, as_numpy=as_numpy)
        if include_info is not False:
            return found
        batch, *info = found if return_info else (found,)
        own = self._sampling.own_keys
        if as_numpy:
            batch = {name: values for name, values in batch.items() if name not in own}
        else:
            batch = batch.exclude(*own)
        return (batch, *info) if return_info else batch

    def __iter__(self) -> Iterator[TensorDict]:
        """Yield batches; see `ReplayBuffer.__iter__`."""
        return super().__iter__()

    def update_priority(self, index: Any = None, priority: Any = None, *, id: Any = None) -> int:
        """Set priorities of rows by index or id; see `ReplayBuffer.update_priority`.

        For priorities that are an entry of the sample, use `update_tensordict_priority`.

        Args:
            index: As `ReplayBuffer.update_priority`; or a sample, as `update_tensordict_priority` takes.
            priority: Finite, not negative. Shape `()` or `(n, ...)`.
            id: Ids of the rows. Any shape.

        Returns:
            Number of rows whose priority was set.

        Raises:
            PriorityError: A priority is negative, NaN or infinite; none was set.
        """
        if isinstance(index, TensorDictBase) and priority is None and id is None:
            return self.update_tensordict_priority(index)
        return super().update_priority(index, priority, id=id)

    def update_tensordict_priority(self, data: TensorDictBase) -> int:
        """Set the priorities of a sample's rows from its `priority_key`; return how many were set.

        Args:
            data: A sample with the entry `priority_key`. Shape of that entry `(n,)` or `(n, 1)`. With a
                `Sequence` unit the anchors' priorities are set, each to the largest of its valid rows.
                Without that entry the rows get the priority of new rows if the sampler draws by priority;
                otherwise nothing is set.

        Raises:
            ArgumentError: `data` is not a TensorDict.
            SchemaError: The sample lacks the entry that identifies its rows.
            PriorityError: A priority is negative, NaN or infinite; none was set.
        """
        check_sample(data)
        with_ids, sampling = self._style.with_ids, self._sampling
        key, name = to_key(self.priority_key), "id" if with_ids else "index"
        priority = data.get(key)
        if priority is None:
            if not sampling.sampler.prioritized:
                return 0
            priority = torch.full(data.shape[:1], self.storage.priorities.largest)
        rows = data.get(f"anchor_{name}") if sampling.unit is not None else None
        if rows is None:
            rows = data.get(name)
            if rows is None:
                raise SchemaError(f"the sample has no {name!r}, which identifies its rows")
            if rows.ndim > 1 and self.storage.ndim == 1:  # repeated along dims inside the rows
                rows = rows.reshape(rows.shape[0], -1)[:, 0]
        else:
            values = sampling.sampler.reduce(to_array(priority).astype(np.float64))
            numbers = to_array(rows) if with_ids else self._index.ravel(rows)
            anchors, priority = reduce_to_anchors(numbers, values, to_array(data["validity_mask"]))
            rows = torch.from_numpy(anchors) if with_ids else self._index.to_tensor(anchors)
        if with_ids:
            return self.update_priority(id=rows, priority=priority)
        return self.update_priority(rows, priority)


class TensorDictRows(RowStyle):
    """TensorDicts, dicts of arrays and Arrow tables; batches include the rows' indices.

    Args:
        owner: Name of the buffer's class, for messages.
        priority_key: The field of new rows with their priorities.
        with_ids: Whether batches have `id`.
    """

    dicts_have_fields = True

    def __init__(self, owner: str, *, priority_key: str, with_ids: bool) -> None:
        self.priority_key = priority_key
        self.with_ids = with_ids
        self._owner = owner

    def set_priority_key(self, key: str) -> None:
        """Read priorities from another field from now on."""
        self.priority_key = key

    def default_writer(self, storage: ReadView) -> Writer:
        """Return the writer that fits the storage."""
        return TensorDictRoundRobinWriter() if storage.ranking is None else default_writer(storage)

    def check_data(self, data: Any, *, has_fields: bool) -> None:
        """Accept TensorDicts, dicts of arrays, Arrow tables, and lists of TensorDicts or dicts."""
        first = data[0] if isinstance(data, list) and data else data
        if has_fields or isinstance(first, TensorDictBase) or (isinstance(data, list) and not data):
            return
        hint = "use a ReplayBuffer"
        if hasattr(first, "columns"):  # a data frame
            hint = "pass {name: frame[name].to_numpy() for name in frame.columns}"
        elif first is None:
            hint = "pass a TensorDict or a dict of arrays"
        raise SchemaError(
            f"{self._owner} only accepts TensorDictBase subclasses, dicts of arrays and Arrow "
            f"tables, got {type(first).__name__}",
            hint=hint,
        )

    def takes_priorities(self, asked: bool | None) -> bool:
        """Return True unless the caller asked not to."""
        return asked is not False

    def priority_place(self, sampler: Sampler, schema: Schema) -> int:
        """Return the position of `priority_key` if the sampler draws by priority and the rows have it."""
        return schema.place(to_key(self.priority_key)) if sampler.prioritized else -1

    def priorities_in(self, sampler: Sampler, schema: Schema, columns: Sequence[Array]) -> Array | None:
        """Return the values of `priority_key`, if the sampler draws by priority and the rows have it."""
        place = schema.place(to_key(self.priority_key)) if sampler.prioritized else -1
        if place < 0:
            return None
        column = columns[place]
        if schema.fields[place].dtype == "bfloat16":
            column = widen_bfloat16(column)
        return check_priorities(sampler.reduce(column.astype(np.float64)))

    def own_keys(self, sampler: Sampler, unit_keys: frozenset[str]) -> frozenset[str]:
        """Return the root keys of samples about rows, weights, and those of the sample unit."""
        own = {"index", "index_generation"}
        if self.with_ids:
            own.add("id")
        if self.with_ids or sampler.prioritized:
            own.add("priority_weight")
        return unit_keys | own

    def root(self, geometry: RingGeometry, selection: Selection, *, generations: bool) -> dict[str, Array]:
        """Return `index`, `id` if requested, and the sampler's values about each row."""
        index = geometry.index_of(selection.ids)
        root: dict[str, Array] = {"index": index if geometry.ndim == 1 else geometry.unravel(index)}
        if self.with_ids:
            root["id"] = selection.ids
        if generations:
            root["index_generation"] = geometry.generations_of(selection.ids)
        for key, values in selection.info.items():
            if len(key) == 1 and (self.with_ids or key != ("anchor_id",)):
                root[key[0]] = values
        return root

    def mark(self, selection: Selection, schema: Schema, columns: list[Array]) -> dict[Key, Array]:
        """Write flags into their columns; return nested entries and flags of fields that are not stored."""
        more = {key: values for key, values in selection.info.items() if len(key) > 1}
        for mark in selection.marks:
            place = schema.place(mark.key)
            if place >= 0:
                columns[place] = mark.on(columns[place])
            elif mark.new:
                more[mark.key] = mark.alone()
        return more
