"""What stands between users' batches and columns: forms, transforms, collation; reading and replacing.

Buffers are built on it. It never draws, and never decides where new rows go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
import torch
from tensordict import NonTensorData, TensorDictBase, is_tensor_collection, lazy_stack
from torch.utils._pytree import tree_leaves, tree_map_only

from expstore.buffers.read_limits import READ_LIMIT
from expstore.buffers.sampling import DrawingHandle
from expstore.core.rate_limiters import RateLimiter
from expstore.core.values import Array, IntArray, Key, Selection, key_name, to_key
from expstore.data.batch import Batch, Intake, batch_of, tensordict_of
from expstore.data.containers import Form, Layout, form_of, is_tree, stack, take
from expstore.data.mappings import take_mapping, take_mappings
from expstore.data.nested_rows import take_rows
from expstore.data.nested_tensors import to_values
from expstore.data.sample_metadata import SAMPLE_METADATA, decode_metadata
from expstore.data.to_arrays import put_entry, to_arrays
from expstore.errors import NotFoundError, SchemaError, StateError
from expstore.samplers.base import Sampler
from expstore.schema.row_selection import in_shape
from expstore.schema.schema import OBJECT
from expstore.storages.episode_lookup import rows_of_episode
from expstore.storages.indexing import find, layout_of, read_rows, replace_rows
from expstore.storages.read_view import ReadView, unmoved
from expstore.storages.stats import meta_of
from expstore.transforms import Compose, StepView
from expstore.wire.codec import Codec
from expstore.wire.tables import is_table, take_table

__all__ = ["ShapingHandle", "to_array"]

_Placed = TypeVar("_Placed")


class ShapingHandle(DrawingHandle):
    """Read rows in the form in which they came, and take rows in.

    Threads, processes and crashes as `DrawingHandle`.

    Args:
        storage: What is held.
        sampler: What makes up a batch.
        collate_fn: Makes a batch of what the storage gives; None: objects are stacked where that can be done.
        transform: What is done to rows and batches.
        dim_extend: Which dim of a batch is time; None: the last of those that make rows.
        device: Where batches are handed out; None: where the storage says.
        pin_memory: Hand them out in pinned memory.
        prefetch: As `DrawingHandle`, and so are the others.
        generator: See there.
        limiter: See there.
    """

    _bound: ClassVar[tuple[str, ...]] = (*DrawingHandle._bound, "_form", "_intake")
    _form: tuple[int, Form] | None = None  # and when fields were those that it knows
    _intake: Intake | None = None
    _kept_metadata: Any = None  # the store's own, for samples

    def __init__(
        self,
        storage: ReadView,
        sampler: Sampler,
        *,
        collate_fn: Callable[[Any], Any] | None,
        transform: Any,
        dim_extend: int | None,
        device: torch.device | str | None,
        pin_memory: bool,
        prefetch: int,
        generator: torch.Generator | None,
        limiter: RateLimiter | None,
    ) -> None:
        if dim_extend is not None and dim_extend < 0:
            raise ValueError(f"dim_extend must be a positive value, got {dim_extend}")
        self._collate_fn = collate_fn
        self._transform = Compose.of(transform)
        self._dim_extend = dim_extend
        self._asked_device = None if device is None else torch.device(device)
        self._pin_memory = pin_memory
        kept = meta_of(storage).get(SAMPLE_METADATA)
        self._kept_metadata = None if kept is None else decode_metadata(kept)
        super().__init__(storage, sampler, prefetch=prefetch, generator=generator, limiter=limiter)

    # -- in --------------------------------------------------------------------------------------

    def _taken(self, data: Any, *, single: bool = False) -> Batch | None:
        """Return what is to be written as columns; None: the transforms say that nothing is."""
        if len(self._transform):
            data = self._invert(data, self._storage.ndim - single, single=single)
            if data is None:
                return None
        return self._to_batch(data, single=single)

    def _invert(self, data: Any, dims: int, *, single: bool) -> Any:
        """Return rows as the transforms have them stored; None: nothing is to be written.

        Args:
            data: The rows; transforms are given TensorDicts for dicts and tables.
            dims: How many dims of it are rows.
            single: It is one row, or one for each lane.
        """
        if self._has_fields(data):
            layout = replace(layout_of(self._storage), ndim=1, dim=0, all_dims=True)
            data = tensordict_of(self._read_columns(data, layout, single=not dims), single=not dims)
            if dims > 1:
                data.batch_size = next(iter(data.values(True, True))).shape[:dims]
        return self._transform.inverse(data, single=single)

    def _to_batch(self, data: Any, *, single: bool) -> Batch:
        intake, batch = self._intake, None
        if intake is not None:
            quick = intake.take_arrays if type(data) is dict else intake.take
            batch = quick(data, single=single)
        if batch is not None:
            return batch
        return self._read_columns(data, layout_of(self._storage, self._dim_extend), single=single)

    def _read_columns(self, data: Any, layout: Layout, *, single: bool) -> Batch:
        """Return rows of any kind as columns."""
        skip = self._skipped_keys()
        if not self._has_fields(data):
            return take(data, layout, single=single, skip=skip)
        schema = self._storage.schema
        if isinstance(data, Mapping):  # no TensorDict, which would be one, too
            return take_mapping(data, layout, single=single, skip=skip, schema=schema)
        if single:
            raise SchemaError(f"add() takes a single row, got a {type(data).__name__}", hint="use extend()")
        if isinstance(data, list):
            return take_mappings(data, layout, skip=skip, schema=schema)
        told, columns = take_table(data, schema, skip=skip)
        if len(told.batch_size) > 1:
            built = Codec(told.schema).build(columns, told.batch_size, told.names)
            return take(built, layout, skip=skip)
        return batch_of(told.schema, columns)

    def _has_fields(self, data: Any) -> bool:
        """Return whether rows come in dicts, or in an Arrow table, whose names are those of fields.

        Dicts have none where rows are trees or objects.
        """
        if is_table(data):
            return True
        first = data[0] if isinstance(data, list) and data else data
        if is_tensor_collection(first) or not isinstance(first, Mapping) or self._storage.row_traits.whole:
            return False
        schema = self._storage.schema
        return self._dicts_have_fields if schema is None else not is_tree(schema.form)

    #: Whether dicts that come first are rows with fields, as TensorDicts are; otherwise they are trees.
    _dicts_have_fields = False

    def _own_keys(self) -> frozenset[str]:
        """Return root keys that samples carry beside the fields: `extend` does not take them in again."""
        return frozenset()

    def _skipped_keys(self) -> frozenset[str]:
        """Return root keys that writes ignore."""
        own = self._own_keys()
        return own if self._kept_metadata is None else own | {"metadata"}

    def __setitem__(self, index: Any, data: Any) -> None:
        """Replace rows by index; neither length nor episodes change.

        On disk the change is there as a whole or not at all after any crash.

        Raises:
            NotFoundError: There is no such row.
            SchemaError: The rows do not fit.
        """
        storage = self._storage
        if _is_key(index):
            raise SchemaError(
                f"rb[{index!r}] = sets no field",
                hint="set_(key, values), or rb[rows] = a batch of all fields",
            )
        if self._goes_into_rows(index):
            raise SchemaError(
                f"rb[{index!r}] = would set parts of rows",
                hint="rb[rows] = rows, or set_at_()",
            )
        with storage.lock:
            writer = storage.writer()
            ids, shape = find(storage, index, self.dim_extend)
            if len(self._transform):
                data = self._invert(data, len(shape), single=shape == ())
            if data is not None:
                # As the index has it, not as time and lanes have it.
                layout = replace(layout_of(storage, 0), ndim=max(1, len(shape)), all_dims=False)
                replace_rows(writer, ids, self._read_columns(data, layout, single=shape == ()))

    # -- out -------------------------------------------------------------------------------------

    def _changes(self) -> object:
        steps = self._transform.steps
        return (super()._changes(), [step.settings for step in steps]) if steps else super()._changes()

    def _given(
        self,
        columns: Sequence[Array],
        size: tuple[int, ...],
        arrays: dict[str, Array],
        more: dict[Key, Array] | None = None,
        view: StepView | None = None,
        numbers: np.random.Generator | None = None,
    ) -> Any:
        """Return rows as users get them: put together, collated, transformed, in their place."""
        form = self._current_form()
        root = dict(zip(arrays, map(torch.from_numpy, arrays.values()), strict=True))
        if view is None:
            batch = form.build(columns if len(size) == 1 else in_shape(columns, size), size, root)
        else:
            batch = self._transform.apply(form.build(columns, (view.ids.size,), root), view)
            if len(size) != 1:
                batch = _in_shape(batch, size)
        if size:
            batch = self._collated(batch)
        if (more or not form.keyed) and isinstance(batch, TensorDictBase):
            for key, values in ({} if form.keyed else root).items():
                batch.set(key, along(values, batch))
            for path, flags in (more or {}).items():
                batch.set(path, torch.from_numpy(flags))
        if len(self._transform):
            batch = self._transform.finish(batch, numbers)
            if root and isinstance(batch, TensorDictBase):
                _put_back(batch, root)
        if self._kept_metadata is not None and isinstance(batch, TensorDictBase):
            batch.set("metadata", NonTensorData(self._kept_metadata, batch_size=batch.batch_size))
        return self._placed(batch)

    def _current_form(self) -> Form:
        """Return how rows of the fields that there are now are put together."""
        fields, known = self._storage.epochs.fields, self._form
        if known is None or known[0] != fields:
            known = self._form = fields, form_of(self._storage)
        return known[1]

    #: Whether nothing but transforms and collation changes what `_given` puts together.
    _gives_rows_as_they_are = True

    def _build_arrays(
        self,
        columns: Sequence[Array],
        size: tuple[int, ...],
        root: dict[str, Array],
        more: dict[Key, Array] | None = None,
        view: StepView | None = None,
        numbers: np.random.Generator | None = None,
    ) -> Any:
        """Return rows as `_given` does, as nested dicts of arrays in host memory."""
        changes = view is not None or len(self._transform) or self._collate_fn is not None
        if changes or not self._gives_rows_as_they_are:
            return to_arrays(self._given(columns, size, root, more, view, numbers))
        batch = self._current_form().arrays(columns, size, root)
        if isinstance(batch, dict):
            for key, values in (more or {}).items():
                put_entry(batch, key, values)
            if self._kept_metadata is not None:
                batch["metadata"] = self._kept_metadata
        return batch

    def _collated(self, batch: Any) -> Any:
        if self._collate_fn is not None:
            return self._collate_fn(batch)
        objects = isinstance(batch, list) and bool(batch) and self._storage.row_traits.whole
        return stack(batch) if objects else batch

    def __getitem__(self, index: Any) -> Any:
        """Read rows by index, or one field of all rows by key.

        Args:
            index: As for a tensor of all rows: an integer, a slice, integers, a mask, or a tuple of them; or
                a field's key.

        Raises:
            NotFoundError: There is no such row, or no such field.
            StateError: The store is closed; or a writer in another process overwrites the rows too fast.
        """
        if _is_key(index):
            return unmoved(self._storage, lambda: self._field(to_key(index)))
        if self._goes_into_rows(index):
            return self[:][index]
        return unmoved(self._storage, lambda: self._read(index))

    def _read(self, index: Any) -> Any:
        shape: tuple[int, ...] = ()

        def locate() -> IntArray:
            nonlocal shape
            ids, shape = find(self._storage, index, self.dim_extend)
            return ids

        _, columns, view = self._transform.read(self._storage, locate)
        return self._given(columns, shape, {}, view=view)

    def _goes_into_rows(self, index: Any) -> bool:
        return isinstance(index, tuple) and len(index) > self._storage.ndim

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Read rows in the order of their indices: all, or the first `end`."""
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Replace rows in the order of their indices: the first `end`; None: as many as `data` has."""
        if end is None:
            end = len(data if is_tensor_collection(data) or isinstance(data, list) else tree_leaves(data)[0])
        self[:end] = data

    def _field(self, key: Key) -> Any:
        storage = self._storage
        plain = storage.ndim == 1 and not self.dim_extend and not len(self._transform)
        if plain and storage.schema is not None and key in storage.schema:
            field = storage.schema[key]
            if field.dtype != OBJECT:
                places = [storage.require_schema().place_of(key)]
                _, (column,) = read_rows(storage, lambda: find(storage, slice(None))[0], places)
                if field.variable:
                    return self._placed(to_values(column, field.arrow))
                tensor = torch.from_numpy(column)
                return self._placed(tensor.view(torch.bfloat16) if field.dtype == "bfloat16" else tensor)
        batch = self[:]
        if not is_tensor_collection(batch) or key not in batch.keys(include_nested=True):
            raise NotFoundError(f"no field {key_name(key)!r}", hint=f"the store has {storage.schema!r}")
        return batch[key]

    def trajectory(self, episode_id: int) -> TensorDictBase:
        """Read the rows of an episode that are still there, in the order of its steps.

        Args:
            episode_id: Which one.

        Returns:
            A TensorDict with what samples carry (`index`, `id`), batch size `[rows]`, its dim named "time".

        Raises:
            NotFoundError: There never was such an episode, or all its rows have left.
            StateError: The store is closed; or a writer in another process overwrites the rows too fast.
        """
        return unmoved(self._storage, lambda: self._trajectory(episode_id))

    def by_id(self, ids: Any) -> TensorDictBase:
        """Read rows by id, in the order in which they are asked for.

        Args:
            ids: Which ones. Shape `(n,)`, int64.

        Returns:
            A TensorDict with what samples carry (`index`, `id`), batch size `[n]`.

        Raises:
            NotFoundError: One of them has left, or never was; the message names it.
            StateError: As `trajectory`.
        """
        wanted = to_array(ids).reshape(-1).astype(np.int64, copy=False)
        return unmoved(self._storage, lambda: self._by_id(wanted))

    def _by_id(self, wanted: IntArray) -> TensorDictBase:
        storage = self._storage

        def locate() -> IntArray:
            held = storage.window.holds(wanted)
            if not held.all():
                first, last = storage.window.low + 1, storage.window.last
                raise NotFoundError(
                    f"there is no row with id {wanted[~held][0]}: the oldest is {first}, the newest {last}"
                )
            _check_limit(storage, wanted)
            return wanted

        ids, columns, view = self._transform.read(storage, locate)
        batch = self._given(columns, (ids.size,), self._root(Selection(ids)), view=view)
        return cast(TensorDictBase, batch)

    def _trajectory(self, episode_id: int) -> TensorDictBase:
        storage = self._storage

        def locate() -> IntArray:
            ids = rows_of_episode(storage, episode_id)
            _check_limit(storage, ids)
            return ids

        ids, columns, view = self._transform.read(storage, locate)
        batch = self._given(columns, (ids.size,), self._root(Selection(ids)), view=view)
        if isinstance(batch, TensorDictBase) and batch.batch_dims == 1:
            batch.names = ["time"]
        return cast(TensorDictBase, batch)

    def _root(self, selection: Selection) -> dict[str, Array]:
        """Return what a sample carries beside the fields."""
        return {}

    def _placed(self, batch: _Placed) -> _Placed:
        device = self._device
        if device is None and not self._pin_memory:
            return batch
        if isinstance(batch, torch.Tensor) or is_tensor_collection(batch):
            return cast(_Placed, self._place_one(batch))
        return cast(_Placed, tree_map_only(torch.Tensor, self._place_one, batch))

    def _place_one(self, batch: Any) -> Any:
        if self._pin_memory:
            batch = batch.pin_memory()
        if self._device is None:
            return batch
        return batch.to(self._device, non_blocking=True) if self._pin_memory else batch.to(self._device)

    @property
    def _device(self) -> torch.device | None:
        device = self._asked_device or self._storage.device
        return None if device is None or device.type == "cpu" else device  # there they are

    # -- parts -----------------------------------------------------------------------------------

    @property
    def dim_extend(self) -> int:
        """Which dim of a batch given to `extend` is time."""
        return self._storage.ndim - 1 if self._dim_extend is None else self._dim_extend

    @property
    def transform(self) -> Compose:
        """What is done to rows on their way in, and to batches on their way out."""
        return self._transform

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform behind the others; return the buffer.

        Args:
            transform: A callable, which acts on samples, or a torchrl Transform.
            invert: It acts on what is written instead.

        Raises:
            StateError: The buffer is closed.

        Example:
            >>> rb.append_transform(lambda batch: batch.exclude("pixels"))
        """
        return self.insert_transform(len(self._transform), transform, invert=invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform before the one of this number; return the buffer.

        Args:
            index: Which number it is to have.
            transform: As `append_transform`.
            invert: As there.

        Raises:
            StateError: The buffer is closed.
        """
        held = self.__dict__.get("_storage")  # what a copy has not opened yet is not opened for this
        if held is not None and held.closed:
            raise StateError("the store is closed", hint="open it again with expstore.open()")
        self._transform.insert(index, transform, invert=invert)
        self._forget_ahead()
        return self

    def set_storage(self, storage: ReadView, collate_fn: Callable[[Any], Any] | None = None) -> ReadView:
        """Read and write another storage from now on; return the one before, which stays open.

        Args:
            storage: The new one.
            collate_fn: Takes the place of the former; None: the default.

        Raises:
            StateError: The buffer is closed.
            TypeError: It is no storage.
            ValueError: The sampler does not fit it; nothing was changed.
        """
        former = self._storage
        if former.closed:
            raise StateError("the store is closed", hint="open it again with expstore.open()")
        if not isinstance(storage, ReadView):
            raise TypeError(f"rows are kept by a Storage, not by {type(storage).__name__}")
        self._hold(storage)
        self._collate_fn = collate_fn
        return former


def _in_shape(batch: TensorDictBase, size: tuple[int, ...]) -> Any:
    """Return rows in a shape: nested tensors have none, so that with them it is made row by row."""
    if not size:
        return batch[0]
    if not any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in batch.values(True, True)):
        return batch.reshape(size)
    parts = [take_rows(batch, slice(at, at + size[-1])) for at in range(0, math.prod(size), size[-1])]
    for length in reversed(size[1:-1]):
        parts = [lazy_stack(parts[at : at + length]) for at in range(0, len(parts), length)]
    return lazy_stack(parts)


def along(values: Any, batch: TensorDictBase) -> Any:
    """Return what is said of each row along the dims that rows have themselves."""
    beyond = batch.batch_size[values.ndim :]
    return values.reshape(*values.shape, *(1 for _ in beyond)).expand(*values.shape, *beyond)


def _put_back(batch: TensorDictBase, root: dict[str, torch.Tensor]) -> None:
    """Set what transforms have left out of what is said of each row, if the rows are still these."""
    for key, values in root.items():
        if batch.batch_size[:1] == values.shape[:1] and key not in batch.keys():  # noqa: SIM118 - see TensorDict
            with batch.unlock_():
                batch.set(key, along(values, batch))


def _is_key(index: Any) -> bool:
    return isinstance(index, str) or (
        isinstance(index, tuple) and bool(index) and all(isinstance(part, str) for part in index)
    )


def to_array(values: Any) -> Array:
    """Return values, of a tensor on whichever device, as an array."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    return np.asarray(values)


def _check_limit(storage: ReadView, ids: IntArray) -> None:
    """Raise QueryError if these rows are more than this thread may read at once."""
    if (limit := READ_LIMIT.get()) is not None:
        limit.check(storage, ids)
