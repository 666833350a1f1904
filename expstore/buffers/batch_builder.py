"""Convert columns to batches: assemble, collate, transform, and move them to their device.

Used by sampling and by reading by index. It does not choose or read rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from tensordict import NonTensorData, TensorDictBase, is_tensor_collection, lazy_stack
from torch.utils._pytree import tree_map_only

from expstore.buffers.row_styles import RowStyle
from expstore.buffers.store_handle import StorePart
from expstore.core.values import Array, Key, Selection
from expstore.data.containers import Form, form_of, stack
from expstore.data.nested_rows import take_rows
from expstore.data.ragged_batches import to_dense
from expstore.data.to_arrays import put_entry, to_array, to_arrays
from expstore.errors import StackError
from expstore.samplers.token_budget import TokenBudget
from expstore.schema.ragged_fields import RaggedForm, check_fields
from expstore.schema.row_selection import in_shape
from expstore.schema.schema import Schema
from expstore.storages.read_view import ReadView
from expstore.transforms import Compose, StepView

_Placed = TypeVar("_Placed")


class Finisher(Protocol):
    """Function that changes a finished batch."""

    def __call__(self, batch: Any) -> Any:
        """Return the batch to return to the user."""


class BatchBuilder(StorePart):
    """Build batches from columns.

    Threads: any number may build batches.

    Args:
        style: Which entries batches have besides the fields.
        transform: Transforms of batches.
        collate_fn: Function that makes a batch from the rows that the storage returns; None: objects are
            stacked if possible.
        device: Device of the batches; None: the storage's.
        pin_memory: Whether to return batches in pinned memory.
        metadata: Value of the entry `metadata` of each batch; None: there is no such entry.
        ragged: What becomes of jagged tensors in drawn batches, after the transforms; see `to_dense`.
        budget: How many tokens a drawn batch may have; None: any number.
    """

    def __init__(
        self,
        style: RowStyle,
        transform: Compose,
        *,
        collate_fn: Callable[[Any], Any] | None,
        device: torch.device | str | None,
        pin_memory: bool,
        metadata: Any = None,
        ragged: RaggedForm = "jagged",
        budget: TokenBudget | None = None,
    ) -> None:
        #: Which entries batches have besides the fields.
        self.style = style
        #: The chain of transforms; the ingest uses the same object.
        self.transform = transform
        self._collate_fn = collate_fn
        self._asked_device = None if device is None else torch.device(device)
        self._pin_memory = pin_memory
        self._metadata = metadata
        self._ragged: RaggedForm = ragged
        #: How many tokens a drawn batch may have; None: any number.
        self.budget = budget
        #: Whether drawn batches have other shapes, or fewer rows, than were asked for.
        self.reshapes = ragged != "jagged" or budget is not None
        self._fitting: Schema | None = None  # whose fields fit the options
        self._generations = False
        self._finishers: tuple[Finisher, ...] = ()
        self._form: tuple[int, Form] | None = None  # (epoch of the fields, how rows are assembled)

    def attach(self, storage: ReadView) -> None:
        """Drop the cached form, as the storage may have other fields."""
        self._form = None

    def leave_parent(self) -> None:
        """Drop the cached form in a forked child."""
        self._form = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, without the cached form."""
        return vars(self) | {"_form": None}

    def set_collate(self, collate_fn: Callable[[Any], Any] | None) -> None:
        """Set the collate function; None: the default one."""
        self._collate_fn = collate_fn

    def collate(self, storage: ReadView, rows: Any) -> Any:
        """Return a batch of the rows that the storage returns."""
        if self._collate_fn is not None:
            return self._collate_fn(rows)
        return _stack_objects(rows) if isinstance(rows, list) and rows and storage.row_traits.whole else rows

    def label_generations(self, wanted: bool) -> None:
        """Set whether batches carry `index_generation`, which depends on the buffer's writer."""
        self._generations = wanted

    def add_finisher(self, finisher: Finisher) -> None:
        """Call a function on each batch after everything else, including earlier finishers."""
        self._finishers = (*self._finishers, finisher)

    # -- batches ---------------------------------------------------------------------------------

    def check_fields(self, schema: Schema | None) -> None:
        """Check, before rows are drawn, that the options fit the fields. None: no rows have come yet.

        Raises:
            SchemaError: There is no field of tensors of different lengths, or an entry would replace a field.
        """
        if schema is None or schema is self._fitting:
            return
        if self._ragged != "jagged":
            check_fields(schema, self._ragged)
        if self.budget is not None:
            self.budget.find_place(schema)
        self._fitting = schema

    def of_sample(
        self,
        storage: ReadView,
        rows: Selection,
        columns: list[Array],
        view: StepView | None,
        numbers: np.random.Generator | None,
        *,
        as_numpy: bool,
    ) -> Any:
        """Return the batch of a draw.

        Args:
            storage: Storage of the rows.
            rows: The rows, with the sampler's values about each.
            columns: Values of the fields. Shapes `(n, *row shape)`.
            view: The steps that step transforms have read; None: the chain has no step transform.
            numbers: Random numbers for the transforms; None: no transform uses any.
            as_numpy: Whether to return nested dicts of arrays.
        """
        root = self.style.root(storage.geometry, rows, generations=self._generations)
        more = None
        if rows.marks or rows.info:
            more = self.style.mark(rows, storage.require_schema(), columns)
        build = self._build_arrays if as_numpy else self.build
        return build(storage, columns, (rows.ids.size,), root, more, view, numbers, ragged=self._ragged)

    def of_rows(self, storage: ReadView, rows: Selection, columns: list[Array], view: StepView | None) -> Any:
        """Return rows that were read by id, with the entries that samples have."""
        root = self.style.root(storage.geometry, rows, generations=self._generations)
        return self.build(storage, columns, (rows.ids.size,), root, view=view)

    def build(
        self,
        storage: ReadView,
        columns: Sequence[Array],
        size: tuple[int, ...],
        arrays: dict[str, Array],
        more: dict[Key, Array] | None = None,
        view: StepView | None = None,
        numbers: np.random.Generator | None = None,
        *,
        ragged: RaggedForm = "jagged",
    ) -> Any:
        """Build the batch that the user gets.

        Args:
            storage: Storage of the rows.
            columns: Values of the fields, in the schema's order. Shapes `(prod(size), *row shape)`.
            size: Number of rows along each dim; `()`: one row.
            arrays: Root entries with one value per row, such as `index`.
            more: Additional entries, by key.
            view: The steps that step transforms have read.
            numbers: Random numbers for the transforms.
            ragged: What becomes of jagged tensors.
        """
        form = self._current_form(storage)
        root = dict(zip(arrays, map(torch.from_numpy, arrays.values()), strict=True))
        if view is None:
            batch = form.build(columns if len(size) == 1 else in_shape(columns, size), size, root)
        else:
            batch = self.transform.apply(form.build(columns, (view.ids.size,), root), view)
            if len(size) != 1:
                batch = _reshape(batch, size)
        if size and (self._collate_fn is not None or isinstance(batch, list)):
            batch = self.collate(storage, batch)
        if (more or not form.keyed) and isinstance(batch, TensorDictBase):
            for key, values in ({} if form.keyed else root).items():
                batch.set(key, repeat_along_dims(values, batch))
            for path, flags in (more or {}).items():
                batch.set(path, torch.from_numpy(flags))
        if self.transform.transforms:
            batch = self.transform.finish(batch, numbers)
            if root and isinstance(batch, TensorDictBase):
                _put_back(batch, root)
        if self._metadata is not None and isinstance(batch, TensorDictBase):
            batch.set("metadata", NonTensorData(self._metadata, batch_size=batch.batch_size))
        if ragged != "jagged":
            batch = to_dense(batch, ragged)
        batch = self.place(storage, batch)
        for finish in self._finishers:
            batch = finish(batch)
        return batch

    def _build_arrays(
        self,
        storage: ReadView,
        columns: Sequence[Array],
        size: tuple[int, ...],
        root: dict[str, Array],
        more: dict[Key, Array] | None = None,
        view: StepView | None = None,
        numbers: np.random.Generator | None = None,
        *,
        ragged: RaggedForm = "jagged",
    ) -> Any:
        """Build rows as `build` does, but as nested dicts of arrays in host memory."""
        changed = self.transform.transforms or self._collate_fn is not None or self._finishers
        if view is not None or changed or ragged != "jagged":
            return to_arrays(self.build(storage, columns, size, root, more, view, numbers, ragged=ragged))
        batch = self._current_form(storage).arrays(columns, size, root)
        if isinstance(batch, dict):
            for key, values in (more or {}).items():
                put_entry(batch, key, values)
            if self._metadata is not None:
                batch["metadata"] = self._metadata
        return batch

    def _current_form(self, storage: ReadView) -> Form:
        """Return how rows of the present fields are assembled; cached until the fields change."""
        fields, known = storage.epochs.fields, self._form
        if known is None or known[0] != fields:
            known = self._form = fields, form_of(storage)
        return known[1]

    # -- `info` of a batch -------------------------------------------------------------------------

    def info(
        self, storage: ReadView, rows: Selection, batch: Any, *, as_numpy: bool = False
    ) -> dict[str | Key, Any]:
        """Return the `info` of `sample(return_info=True)` for a batch."""
        geometry = storage.geometry
        index: Any = geometry.index_of(rows.ids)
        if geometry.ndim > 1:
            index = geometry.unravel(index)
        info: dict[str | Key, Array] = {"id": rows.ids}
        if self._generations:
            info["index_generation"] = geometry.generations_of(rows.ids)
        info |= {key if len(key) > 1 else key[0]: values for key, values in rows.info.items()}
        for mark in rows.marks:
            stored = _entry(batch, mark.key)
            if stored is not None or mark.new:
                key = mark.key if len(mark.key) > 1 else mark.key[0]
                info[key] = mark.alone() if stored is None else mark.on(to_array(stored))
        if as_numpy:
            parts = tuple(np.moveaxis(index, -1, 0)) if index.ndim > 1 else index
            return {"index": parts} | info | rows.notes
        placed: dict[str | Key, Any] = {k: self.place(storage, torch.from_numpy(v)) for k, v in info.items()}
        index = self.place(storage, torch.from_numpy(index))
        return {"index": tuple(index.unbind(-1)) if index.ndim > 1 else index} | placed | rows.notes

    # -- devices -----------------------------------------------------------------------------------

    def place(self, storage: ReadView, batch: _Placed) -> _Placed:
        """Return a batch on the buffer's device, in pinned memory if requested."""
        device = self._asked_device or storage.device
        if device is not None and device.type == "cpu":
            device = None  # the rows are on it already
        if device is None and not self._pin_memory:
            return batch

        def place_one(part: Any) -> Any:
            if self._pin_memory:
                part = part.pin_memory()
            if device is None:
                return part
            return part.to(device, non_blocking=True) if self._pin_memory else part.to(device)

        if isinstance(batch, torch.Tensor) or is_tensor_collection(batch):
            return cast(_Placed, place_one(batch))
        return cast(_Placed, tree_map_only(torch.Tensor, place_one, batch))


def _stack_objects(rows: list[Any]) -> Any:
    """Stack rows that a storage keeps as objects.

    Raises:
        StackError: They have different types or shapes.
    """
    try:
        return stack(rows)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as exc:
        raise StackError(
            f"the sampled rows do not make a batch: {exc.args[0] if exc.args else exc}",
            hint="pass collate_fn=, a function that makes a batch of a list of rows; list leaves it a list",
        ) from exc


def _reshape(batch: TensorDictBase, size: tuple[int, ...]) -> Any:
    """Reshape rows; rows with nested tensors, which cannot be reshaped, become a lazy stack."""
    if not size:
        return batch[0]
    if not any(isinstance(leaf, torch.Tensor) and leaf.is_nested for leaf in batch.values(True, True)):
        return batch.reshape(size)
    parts = [take_rows(batch, slice(at, at + size[-1])) for at in range(0, math.prod(size), size[-1])]
    for length in reversed(size[1:-1]):
        parts = [lazy_stack(parts[at : at + length]) for at in range(0, len(parts), length)]
    return lazy_stack(parts)


def repeat_along_dims(values: Any, batch: TensorDictBase) -> Any:
    """Repeat one value per row along the additional batch dims that rows have."""
    beyond = batch.batch_size[values.ndim :]
    return values.reshape(*values.shape, *(1 for _ in beyond)).expand(*values.shape, *beyond)


def _put_back(batch: TensorDictBase, root: dict[str, torch.Tensor]) -> None:
    """Set root entries that transforms have dropped, if the batch still has the same rows."""
    for key, values in root.items():
        if batch.batch_size[:1] == values.shape[:1] and key not in batch.keys():  # noqa: SIM118 - see TensorDict
            with batch.unlock_():
                batch.set(key, repeat_along_dims(values, batch))


def _entry(batch: Any, key: Key) -> Any:
    """Return an entry of a TensorDict or of nested dicts, or None if it is missing."""
    if is_tensor_collection(batch):
        return batch.get(key)
    for name in key:
        batch = batch.get(name) if isinstance(batch, dict) else None
    return batch
