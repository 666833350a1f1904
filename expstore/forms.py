"""What users hand over, and what they get back: TensorDicts, tensors, tensorclasses, trees, objects.

Used by storages and buffers to make columns of it and to put it together again; `Schema.form` keeps how.
It never reads or writes a row.
"""

from __future__ import annotations

import json
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_tensor_collection,
    is_tensorclass,
    lazy_stack,
)

from expstore.batches import (
    Batch,
    Builder,
    check_dims,
    flatten,
    to_columns,
    to_objects,
)
from expstore.errors import SchemaError, StackError
from expstore.schema import Schema, is_name
from expstore.types import Array, Key

__all__ = ["Form", "Layout", "check_form", "form_of", "stack", "take"]

#: The field of rows that are one tensor, or one object, each.
DATA: Key = ("_data",)


@dataclass(frozen=True, slots=True)
class Layout:
    """Say which dims of a batch make rows.

    Args:
        all_dims: All batch dims of a TensorDict do, as `expstore.open` has it.
        ndim: How many do otherwise, the first of them time.
        dim: Which dim of a batch is time: it is swapped with the first.
        objects: Rows are things of any kind, kept as they are.
    """

    all_dims: bool = False
    ndim: int = 1
    dim: int = 0
    objects: bool = False


def take(data: Any, layout: Layout, *, single: bool = False, skip: frozenset[str] = frozenset()) -> Batch:
    """Return what was handed over as columns.

    A list is rows to be stacked; a tuple or a dict is a tree, whose leaves share their first dims.

    Args:
        data: A batch, or one row.
        layout: Which dims make rows.
        single: It is one row (one for each lane where `ndim` is larger than 1).
        skip: Root keys of a TensorDict to leave out.

    Raises:
        SchemaError: It cannot be stored: no batch dims, a strange dtype, leaves of different lengths.
        TypeError: Rows cannot be made of such a thing at all.
    """
    if layout.objects:
        return _take_objects(data, single)
    if isinstance(data, list) and not single:
        if not data:
            return Batch([DATA], ["float32"], [np.zeros(0, np.float32)], 0)
        try:
            data = stack(data)
        except (RuntimeError, KeyError, IndexError, ValueError) as exc:
            raise StackError(
                f"Stacking the elements of the list resulted in an error: {exc}",
                hint="rows have the same fields and shapes; a LazyStackStorage keeps ragged ones",
            ) from exc
    kind = type(data) if is_tensorclass(data) else None
    if kind is not None:
        data = data.to_tensordict()
    if isinstance(data, TensorDictBase):
        if layout.dim and not single:
            check_dims(tuple(data.batch_size), layout.dim + 1, single=False)
            data = data.transpose(layout.dim, 0)
        batch = flatten(data, all_dims=layout.all_dims, ndim=layout.ndim, single=single, skip=skip)
        return batch if kind is None else replace(batch, kind=kind, form=_note_kind(kind, batch.form))
    return _take_tree(data, layout, single)


def _take_objects(data: Any, single: bool) -> Batch:
    if is_tensor_collection(data) or isinstance(data, torch.Tensor):
        data = data.clone()  # what the user does to it later is not to reach the store
    if single:
        items: Sequence[Any] = [data]
    elif is_tensor_collection(data) or isinstance(data, torch.Tensor):
        if not data.shape:
            raise SchemaError("extend() takes a batch, got a single row", hint="use add()")
        items = data.unbind(0)
    elif isinstance(data, (list, tuple, range, set, np.ndarray)):
        items = list(data)
    else:
        raise TypeError(
            f"Cannot extend a ListStorage with data of type {type(data)}. Provide a list, tuple, set, range, "
            "np.ndarray, tensor or tensordict subclass instead."
        )
    return Batch([DATA], ["object"], [to_objects(items)], len(items), form=json.dumps({"objects": True}))


def _take_tree(data: Any, layout: Layout, single: bool) -> Batch:
    keys: list[Key] = []
    leaves: list[torch.Tensor] = []
    tree = _walk(data, (), keys, leaves)
    dims = layout.ndim - single
    for leaf in leaves:
        check_dims(tuple(leaf.shape), layout.ndim, single=single)
    if layout.dim and not single:
        leaves = [leaf.transpose(layout.dim, 0) for leaf in leaves]
    shape = tuple(leaves[0].shape[:dims]) if leaves else ()
    for key, leaf in zip(keys, leaves, strict=True):
        if tuple(leaf.shape[:dims]) != shape:
            raise SchemaError(
                f"leaf {'.'.join(key)!r} has shape {list(leaf.shape)}, another one begins with {list(shape)}",
                hint="all leaves of a tree share their first dims; for rows one by one give a list",
            )
    arrays, dtypes = to_columns(keys, leaves)
    count = int(np.prod(shape))
    if dims != 1:
        arrays = [array.reshape(count, *array.shape[dims:]) for array in arrays]
    batch = Batch(keys, dtypes, arrays, count, form=json.dumps({"tree": tree}))
    return batch.in_lanes(shape[1 - single :]) if layout.ndim > 1 else batch


def _walk(data: Any, path: Key, keys: list[Key], leaves: list[torch.Tensor]) -> Any:
    """Collect the leaves of a tree; return its shape as JSON keeps it."""
    if isinstance(data, dict):
        wrong = [key for key in data if not isinstance(key, (str, int)) or isinstance(key, bool)]
        if wrong:
            raise SchemaError(f"a tree has the key {wrong[0]!r}", hint="use text or integers")
        named = {k: str(k) for k in data if is_name(str(k)) and (isinstance(k, str) or str(k) not in data)}
        names = {k: named.get(k, f"key{place}") for place, k in enumerate(data)}
        return {"dict": [[k, _walk(value, (*path, names[k]), keys, leaves)] for k, value in data.items()]}
    if type(data) in (list, tuple):
        kind = "list" if isinstance(data, list) else "tuple"
        return {kind: [_walk(value, (*path, str(i)), keys, leaves) for i, value in enumerate(data)]}
    if not isinstance(data, (torch.Tensor, np.ndarray, np.generic, bool, int, float)):
        where = f" at {'.'.join(path)!r}" if path else ""
        raise SchemaError(
            "expected a TensorDict, a tensor, or a tree (dict or tuple) of tensors, "
            f"got {type(data).__name__}{where}",
            hint="objects of other kinds are kept by a ListStorage",
        )
    keys.append(path or DATA)
    leaves.append(torch.as_tensor(data))
    return {"field": list(path or DATA)}


def _note_kind(kind: type, form: str) -> str:
    inner = json.loads(form)["batch_size"] if form else []
    return json.dumps({"class": f"{kind.__module__}:{kind.__qualname__}", "batch_size": inner})


def stack(items: Sequence[Any]) -> Any:
    """Stack rows: TensorDicts (lazily, if shapes differ), tensors, trees of them; others stay a list."""
    first = items[0]
    if is_tensor_collection(first):
        return LazyStackedTensorDict.maybe_dense_stack(list(items))
    if isinstance(first, torch.Tensor):
        return torch.stack(list(items))
    if isinstance(first, dict):
        return {key: stack([item[key] for item in items]) for key in first}
    if type(first) in (list, tuple):
        return type(first)(stack([item[i] for item in items]) for i in range(len(first)))
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(stack([item[i] for item in items]) for i in range(len(first))))
    if isinstance(first, (np.ndarray, np.generic, bool, int, float)):
        return torch.as_tensor(np.stack([np.asarray(item) for item in items]))
    return list(items)


def check_form(batch: Batch, schema: Schema) -> None:
    """Raise SchemaError if rows of a batch are put together otherwise than those that a store keeps.

    A batch size within rows may differ where the fields fit, and a tensorclass may stand for its TensorDict.
    """
    if batch.form == schema.form or batch.arranged:
        return
    if {"tree", "objects"} & {*json.loads(batch.form or "{}"), *json.loads(schema.form or "{}")}:
        raise SchemaError(f"the store keeps {_describe(schema.form)}, the batch is {_describe(batch.form)}")


def _describe(form: str) -> str:
    data = json.loads(form or "{}")
    if "objects" in data:
        return "objects"
    if "tree" in data:
        return "tensors" if "field" in data["tree"] else f"trees {_sketch(data['tree'])}"
    return f"TensorDicts ({data['class']})" if "class" in data else "TensorDicts"


def _sketch(tree: Any) -> str:
    """Return a tree as its containers are written, a dot for each leaf."""
    ((kind, parts),) = tree.items()
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_sketch(part)}" for key, part in parts) + "}"
    if kind in ("list", "tuple"):
        inner = ", ".join(map(_sketch, parts))
        return f"[{inner}]" if kind == "list" else f"({inner})"
    return "."


class Form(ABC):
    """Put columns together: one way for all rows of a store."""

    @abstractmethod
    def build(self, columns: Sequence[Array], size: Sequence[int], root: dict[str, torch.Tensor]) -> Any:
        """Return rows as users know them; they own their memory.

        Args:
            columns: In the schema's order. Shapes `(*size, *row shape)`.
            size: Shape of what is returned; `()` is one row.
            root: More entries for the root of a TensorDict; left out otherwise.
        """

    #: Whether `root` is put into what is built.
    keyed = False


class Kept(Protocol):
    """What `form_of` asks of a storage."""

    row_class: type | None
    stack_dim: int | None

    def require_schema(self) -> Schema:
        """Return the schema."""


def form_of(storage: Kept) -> Form:
    """Return how a storage's rows are put together.

    Args:
        storage: Its schema says it; `row_class` is looked up among what is imported if it is None.

    Raises:
        StateError: No rows have come yet.
    """
    schema, kind = storage.require_schema(), storage.row_class
    data = json.loads(schema.form or "{}")
    if "objects" in data:
        return _Objects(storage.stack_dim)
    if "tree" in data:
        return _Tree(schema, data["tree"])
    inner = tuple(data.get("batch_size", ()))
    if "class" in data:
        return _Class(schema, inner, kind or _find_class(data["class"]))
    return _TensorDicts(schema, inner)


def _find_class(name: str) -> type | None:
    """Return a tensorclass by name, if its module is imported: opening a store runs no code of others."""
    module, _, path = name.partition(":")
    try:
        found = operator.attrgetter(path)(sys.modules[module])
    except (KeyError, AttributeError):
        return None
    return found if isinstance(found, type) and is_tensorclass(found) else None


class _TensorDicts(Form):
    keyed = True

    def __init__(self, schema: Schema, inner: tuple[int, ...]) -> None:
        self._builder, self._inner = Builder(schema), inner

    def build(
        self, columns: Sequence[Array], size: Sequence[int], root: dict[str, torch.Tensor]
    ) -> TensorDict:
        if self._inner and root:
            root = {key: self._spread(values, size) for key, values in root.items()}
        return self._builder.build(columns, torch.Size((*size, *self._inner)), root)

    def _spread(self, values: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        """Return what is said of each row along the dims that rows have themselves."""
        head, rest = values.shape[: len(size)], values.shape[len(size) :]
        return values.reshape(*head, *(1 for _ in self._inner), *rest).expand(*head, *self._inner, *rest)


class _Class(_TensorDicts):
    def __init__(self, schema: Schema, inner: tuple[int, ...], kind: type | None) -> None:
        super().__init__(schema, inner)
        self._kind: Callable[[TensorDict], Any] | None = getattr(kind, "from_tensordict", None)
        self.keyed = self._kind is None

    def build(self, columns: Sequence[Array], size: Sequence[int], root: dict[str, torch.Tensor]) -> Any:
        batch = super().build(columns, size, {} if self._kind else root)
        return self._kind(batch) if self._kind else batch


class _Tree(Form):
    def __init__(self, schema: Schema, tree: Any) -> None:
        self._schema, self._tree = schema, tree

    def build(self, columns: Sequence[Array], size: Sequence[int], root: dict[str, torch.Tensor]) -> Any:
        return self._grow(self._tree, columns)

    def _grow(self, tree: Any, columns: Sequence[Array]) -> Any:
        ((kind, parts),) = tree.items()
        if kind == "dict":
            return {key: self._grow(part, columns) for key, part in parts}
        if kind in ("list", "tuple"):
            grown = [self._grow(part, columns) for part in parts]
            return grown if kind == "list" else tuple(grown)
        place = self._schema.place(tuple(parts))
        tensor = torch.from_numpy(np.asarray(columns[place]))
        return tensor.view(torch.bfloat16) if self._schema.fields[place].dtype == "bfloat16" else tensor


class _Objects(Form):
    def __init__(self, stack_dim: int | None) -> None:
        self._dim = stack_dim

    def build(self, columns: Sequence[Array], size: Sequence[int], root: dict[str, torch.Tensor]) -> Any:
        if not size:
            return columns[0].item()
        items = columns[0].tolist()
        if self._dim is None or not items:
            return items
        # A row of its own has no such dim yet: counted from the end, it is one of the stack's.
        return lazy_stack(items, self._dim if self._dim >= 0 else items[0].ndim + 1 + self._dim)
