"""The containers of rows: TensorDicts, tensors, tensorclasses, trees, objects.

Storages and buffers use it to convert them to columns and to build them again; `Schema.form` records how. It
does not read or write rows.
"""

from __future__ import annotations

import json
import math
import operator
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
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

from expstore.core.casts import find_lost
from expstore.core.values import Array, Key
from expstore.data.batch import Batch, Builder, Layout, flatten, gather
from expstore.data.leaves import as_tensor, check_unmasked, leaves_of_plain, to_objects
from expstore.data.nested_tensors import to_values
from expstore.data.to_arrays import to_arrays
from expstore.errors import ArgumentError, NoRowError, SchemaError, StackError
from expstore.schema.row_traits import DATA, RowTraits
from expstore.schema.schema import Schema, is_name


def take(data: Any, layout: Layout, *, single: bool = False, skip: frozenset[str] = frozenset()) -> Batch:
    """Convert data of a user to columns.

    A list has the rows, which are stacked. A tuple or a dict is a tree whose leaves share their first dims.

    Data for which TorchRL has `LazyStackStorage` becomes a variable-length column: a nested tensor, or
    tensors of different shapes in a lazy stack or in a list of rows. If values have types (`layout.typed`),
    NonTensorStack and NonTensorData become columns too, while TorchRL's storages keep them as objects: texts,
    bytes, numbers, lists; a dict is a struct, None is null. A list in a tree then has one value per row.

    Args:
        data: A batch, or one row.
        layout: Which dims make rows.
        single: Whether `data` is one row (one for each lane if `ndim` is larger than 1).
        skip: Root keys of a TensorDict to skip.

    Raises:
        SchemaError: The data cannot be stored: no batch dims, an unsupported dtype, or leaves of different
            lengths.
        ArgumentError: The type of the data is not supported.
    """
    if layout.objects:
        return _take_objects(data, single)
    if isinstance(data, list) and not single:
        if not data:
            return Batch([DATA], ["float32"], [np.zeros(0, np.float32)], 0)
        if layout.typed and (layout.ndim, layout.dim) == (1, 0):
            plain = leaves_of_plain(data, skip)
            if plain is not None:
                return gather(*plain, layout, single=False)
        try:
            data = stack(data, typed=layout.typed)
        except (RuntimeError, KeyError, IndexError, ValueError) as exc:
            raise StackError(
                f"Stacking the elements of the list resulted in an error: {exc}",
                hint='rows have the same fields and shapes; a store with layout="arrow", or a '
                "LazyStackStorage, stores others",
            ) from exc
    kind = type(data) if is_tensorclass(data) else None
    if kind is not None:
        try:
            data = data.to_tensordict()
        except RuntimeError:  # rows of a lazy stack differ in shape
            if not isinstance(data._tensordict, LazyStackedTensorDict):
                raise
            data = lazy_stack([row.to_tensordict() for row in data.unbind(0)])
    if isinstance(data, TensorDictBase):
        batch = flatten(data, layout, single=single, skip=skip)
        return batch if kind is None else replace(batch, kind=kind, form=_note_kind(kind, batch.form))
    return _take_tree(data, layout, single)


def _take_objects(data: Any, single: bool) -> Batch:
    if is_tensor_collection(data) or isinstance(data, torch.Tensor):
        data = data.clone()  # so that later changes by the user do not reach the store
    if single:
        items: Sequence[Any] = [data]
    elif is_tensor_collection(data) or isinstance(data, torch.Tensor):
        if not data.shape:
            raise SchemaError("extend() takes a batch, got a single row", hint="use add()")
        items = data.unbind(0)
    elif isinstance(data, (list, tuple, range, set, np.ndarray)):
        items = list(data)
    else:
        raise ArgumentError(
            f"Cannot extend a ListStorage with data of type {type(data)}. Provide a list, tuple, set, range, "
            "np.ndarray, tensor or tensordict subclass instead."
        )
    return Batch([DATA], ["object"], [to_objects(items)], len(items), form=json.dumps({"objects": True}))


def _take_tree(data: Any, layout: Layout, single: bool) -> Batch:
    keys: list[Key] = []
    leaves: list[Any] = []
    tree = _walk(data, (), keys, leaves, typed=layout.typed, single=single)
    return gather(keys, leaves, layout, single=single, form=json.dumps({"tree": tree}))


def _walk(data: Any, path: Key, keys: list[Key], leaves: list[Any], *, typed: bool, single: bool) -> Any:
    """Collect the leaves of a tree; return its structure as values for JSON."""
    if isinstance(data, dict):
        wrong = [key for key in data if not isinstance(key, (str, int)) or isinstance(key, bool)]
        if wrong:
            raise SchemaError(f"a tree has the key {wrong[0]!r}", hint="use text or integers")
        names = _name_parts(data)
        parts = [
            [k, _walk(value, (*path, names[k]), keys, leaves, typed=typed, single=single)]
            for k, value in data.items()
        ]
        return {"dict": parts}
    if type(data) is tuple or (type(data) is list and not typed):
        kind = "list" if isinstance(data, list) else "tuple"
        within = [
            _walk(value, (*path, str(i)), keys, leaves, typed=typed, single=single)
            for i, value in enumerate(data)
        ]
        return {kind: within}
    leaf = _loose_leaf(data, single) if typed else None
    if leaf is None and not isinstance(data, (torch.Tensor, np.ndarray, np.generic, bool, int, float)):
        where = f" at {'.'.join(path)!r}" if path else ""
        raise SchemaError(
            "expected a TensorDict, a tensor, or a tree (dict or tuple) of tensors, "
            f"got {type(data).__name__}{where}",
            hint="a column of values is a list" if typed else "a ListStorage stores other kinds of objects",
        )
    check_unmasked(path or DATA, data)
    keys.append(path or DATA)
    leaves.append(as_tensor(data) if leaf is None else leaf)
    return {"field": list(path or DATA)}


def _name_parts(data: Any) -> dict[Any, str]:
    """Return a different name, which can be a part of a path, for each key of a dict."""
    names = {k: str(k) for k in data if is_name(str(k)) and (isinstance(k, str) or str(k) not in data)}
    taken = set(names.values())
    for place, k in enumerate(data):
        if k not in names:
            name = f"key{place}"
            while name in taken:
                name += "_"
            names[k] = name
            taken.add(name)
    return names


def _loose_leaf(data: Any, single: bool) -> Any:
    """Return the values of a leaf, one per row; None if it is a tensor, a number or not supported."""
    numbers = (bool, int, float, np.generic)
    if isinstance(data, (torch.Tensor, np.ndarray, *numbers)) and not isinstance(data, np.character):
        return None
    if single:
        return [data]
    if not isinstance(data, list):
        return None
    kinds = {type(value) for value in data}
    if kinds and all(issubclass(kind, numbers) and not issubclass(kind, np.character) for kind in kinds):
        return torch.as_tensor(np.asarray(data))
    return data


def _note_kind(kind: type, form: str) -> str:
    noted = {"class": f"{kind.__module__}:{kind.__qualname__}", "batch_size": []}
    return json.dumps(noted | json.loads(form or "{}"))


def stack(items: Sequence[Any], *, typed: bool = False) -> Any:
    """Stack rows: TensorDicts (lazily, if shapes differ), tensors, and trees of them; other rows stay a list.

    Args:
        items: The rows.
        typed: Whether tensors of different shapes, and lists, also stay a list with one value per row.
    """
    first = items[0]
    if is_tensor_collection(first):
        return LazyStackedTensorDict.maybe_dense_stack(list(items))
    if typed and not isinstance(first, (dict, tuple)) and not _are_alike(items):
        return list(items)
    if isinstance(first, torch.Tensor):
        return _stack_tensors(items)
    if isinstance(first, dict):
        other = next((item for item in items if set(item) != set(first)), None)
        if other is not None:
            raise KeyError(f"not all rows have {sorted(map(str, set(other) ^ set(first)))}")
        return {key: stack([item[key] for item in items], typed=typed) for key in first}
    if isinstance(first, (list, tuple)) and any(len(item) != len(first) for item in items):
        sizes = sorted({len(item) for item in items})
        raise ValueError(f"some rows have {sizes[0]} parts, others {sizes[-1]}")
    if type(first) in (list, tuple):
        return type(first)(stack([item[i] for item in items], typed=typed) for i in range(len(first)))
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(stack([item[i] for item in items], typed=typed) for i in range(len(first))))
    if isinstance(first, (np.ndarray, np.generic, bool, int, float)):
        check_unmasked((), list(items))
        return _stack_arrays([np.asarray(item) for item in items])
    return list(items)


def _stack_tensors(items: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack tensors; of different dtypes in a dtype for all of them.

    Raises:
        ValueError: The shapes differ, or an integer would be rounded.
    """
    try:
        stacked = torch.stack(list(items))
    except (RuntimeError, TypeError):
        raise ValueError(_describe_difference(items)) from None
    if stacked.is_floating_point() and any(item.dtype != stacked.dtype for item in items):
        for item, part in zip(items, stacked, strict=True):
            floats = part.float() if part.dtype is torch.bfloat16 else part
            if not item.is_floating_point():
                _check_kept(item.detach().cpu().numpy(), floats.detach().cpu().numpy())
    return stacked


def _stack_arrays(items: Sequence[Array]) -> torch.Tensor:
    """Stack arrays as `_stack_tensors` stacks tensors."""
    try:
        stacked = np.stack(items)
    except ValueError:
        raise ValueError(_describe_difference(items)) from None
    for item, part in zip(items, stacked, strict=True):
        if item.dtype != stacked.dtype:
            _check_kept(item, np.asarray(part))
    return as_tensor(stacked)


def _describe_difference(items: Sequence[Any]) -> str:
    """Return how rows differ that cannot be stacked."""
    first = items[0]
    other = next((item for item in items if not hasattr(item, "shape")), None)
    if other is not None:
        return f"some rows are {type(first).__name__}, others {type(other).__name__}"
    shapes = list(dict.fromkeys(str(tuple(item.shape)) for item in items))
    return f"rows have the shapes {', '.join(shapes[:4])}" + (", ..." if len(shapes) > 4 else "")


def _check_kept(values: Array, cast: Array) -> None:
    lost = find_lost(values, cast)
    if lost is not None:
        raise ValueError(f"rows have different dtypes, and {cast.dtype} would round {lost}")


def _are_alike(items: Sequence[Any]) -> bool:
    """Return whether rows are tensors, arrays or numbers of one shape."""
    if not all(isinstance(item, (torch.Tensor, np.ndarray, np.generic, bool, int, float)) for item in items):
        return False
    first = items[0]
    if isinstance(first, torch.Tensor):
        return all(isinstance(item, torch.Tensor) and item.shape == first.shape for item in items)
    return len({np.shape(item) for item in items}) == 1 and not isinstance(first, np.character)


def check_form(batch: Batch, schema: Schema) -> None:
    """Raise SchemaError if rows of a batch have another form than the rows of a store.

    Inner batch sizes may differ if the fields fit, and a tensorclass is accepted for its TensorDict.
    """
    if batch.form == schema.form or batch.arranged is not None:
        return
    if {"tree", "objects"} & {*json.loads(batch.form or "{}"), *json.loads(schema.form or "{}")}:
        raise SchemaError(f"the store keeps {_describe(schema.form)}, the batch is {_describe(batch.form)}")


def is_tree(form: str) -> bool:
    """Return whether rows are trees or objects instead of TensorDicts."""
    return bool(form) and not {"tree", "objects"}.isdisjoint(json.loads(form))


def _describe(form: str) -> str:
    data = json.loads(form or "{}")
    if "objects" in data:
        return "objects"
    if "tree" in data:
        return "tensors" if "field" in data["tree"] else f"trees {_sketch(data['tree'])}"
    return f"TensorDicts ({data['class']})" if "class" in data else "TensorDicts"


def _sketch(tree: Any) -> str:
    """Return the text of a tree's containers, with a dot for each leaf."""
    ((kind, parts),) = tree.items()
    if kind == "dict":
        return "{" + ", ".join(f"{key!r}: {_sketch(part)}" for key, part in parts) + "}"
    if kind in ("list", "tuple"):
        inner = ", ".join(map(_sketch, parts))
        return f"[{inner}]" if kind == "list" else f"({inner})"
    return "."


class Form(ABC):
    """How rows are built from columns; the same for all rows of a store."""

    @abstractmethod
    def build(self, columns: Sequence[Array], size: Sequence[int], root: dict[str, torch.Tensor]) -> Any:
        """Build rows as users get them; they own their memory.

        Args:
            columns: Values in the schema's order. Shapes `(*size, *row shape)`; variable-length columns are
                pyarrow Arrays, flat, which own their memory.
            size: Shape of the result; `()` is one row.
            root: Additional root entries of a TensorDict; ignored for other rows.
        """

    @abstractmethod
    def arrays(self, columns: Sequence[Array], size: Sequence[int], root: dict[str, Array]) -> Any:
        """Build rows as `build` does, but from NumPy arrays: dicts instead of TensorDicts, and no tensors.

        Args:
            columns: As in `build`.
            size: As in `build`.
            root: Additional arrays for the outermost dict; ignored if rows are not TensorDicts.
        """

    #: Whether `build` uses `root`.
    keyed = False


class Kept(Protocol):
    """The attributes of a storage that `form_of` uses."""

    row_traits: RowTraits

    def require_schema(self) -> Schema:
        """Return the schema."""


def form_of(storage: Kept) -> Form:
    """Return the form of a storage's rows.

    Args:
        storage: The storage. If it does not know the tensorclass, imported modules are searched.

    Raises:
        StateError: There are no rows yet.
    """
    schema, kind = storage.require_schema(), storage.row_traits.row_class
    data = json.loads(schema.form or "{}")
    if "objects" in data:
        return _Objects(storage.row_traits.stack_dim)
    if "tree" in data:
        return _Tree(schema, data["tree"])
    inner = tuple(data.get("batch_size", ()))
    if "class" in data:
        return _Class(schema, inner, kind or _find_class(data["class"]))
    return _TensorDicts(schema, inner)


def _find_class(name: str) -> type | None:
    """Return a tensorclass by name if its module is imported; opening a store must not import code."""
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
        self._names = tuple(json.loads(schema.form or "{}").get("names", ()))
        self._variable = bool(schema.variable)

    def build(
        self, columns: Sequence[Array], size: Sequence[int], root: dict[str, torch.Tensor]
    ) -> TensorDict:
        if self._variable and len(size) > 1:
            return self._build_stack(columns, size, root)
        if self._inner and root:
            root = {key: self._spread(values, size) for key, values in root.items()}
        return self._builder.build(columns, torch.Size((*size, *self._inner)), root, self._names)

    def arrays(self, columns: Sequence[Array], size: Sequence[int], root: dict[str, Array]) -> dict[str, Any]:
        return self._builder.nest(columns, size, root)

    def _build_stack(
        self, columns: Sequence[Any], size: Sequence[int], root: dict[str, torch.Tensor]
    ) -> TensorDict:
        """Build rows of several dims as a lazy stack: nested tensors can have rows in one dim only."""
        rows = math.prod(size[1:])
        parts = [
            self.build(
                [
                    column[place] if isinstance(column, np.ndarray) else column.slice(place * rows, rows)
                    for column in columns
                ],
                size[1:],
                {key: values[place] for key, values in root.items()},
            )
            for place in range(size[0])
        ]
        stacked: TensorDict = lazy_stack(parts)
        return stacked

    def _spread(self, values: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
        """Repeat one value per row along the inner dims of rows."""
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
        return self._grow(self._tree, columns, tuple(size))

    def arrays(self, columns: Sequence[Array], size: Sequence[int], root: dict[str, Array]) -> Any:
        return to_arrays(self._grow(self._tree, columns, tuple(size)))

    def _grow(self, tree: Any, columns: Sequence[Any], size: tuple[int, ...]) -> Any:
        ((kind, parts),) = tree.items()
        if kind == "dict":
            return {key: self._grow(part, columns, size) for key, part in parts}
        if kind in ("list", "tuple"):
            grown = [self._grow(part, columns, size) for part in parts]
            return grown if kind == "list" else tuple(grown)
        place = self._schema.place(tuple(parts))
        if self._schema.fields[place].variable:
            return self._loose(place, columns[place], size)
        tensor = torch.from_numpy(np.asarray(columns[place]))
        return tensor.view(torch.bfloat16) if self._schema.fields[place].dtype == "bfloat16" else tensor

    def _loose(self, place: int, column: Any, size: tuple[int, ...]) -> Any:
        """Build a variable-length leaf; with several dims as nested lists."""
        if len(size) > 1:
            rows = math.prod(size[1:])
            return [self._loose(place, column.slice(n * rows, rows), size[1:]) for n in range(size[0])]
        values = to_values(column, self._schema.fields[place].arrow)
        return values if size else values[0]


class _Objects(Form):
    def __init__(self, stack_dim: int | None) -> None:
        self._dim = stack_dim

    def arrays(self, columns: Sequence[Array], size: Sequence[int], root: dict[str, Array]) -> Any:
        return to_arrays(columns[0].tolist() if size else columns[0].item())

    def build(self, columns: Sequence[Array], size: Sequence[int], root: dict[str, torch.Tensor]) -> Any:
        if not size:
            return columns[0].item()
        items = columns[0].tolist()
        if self._dim is None or not items:
            return items
        # A row does not have the stack's dim yet, which a negative number counts.
        return lazy_stack(items, self._dim if self._dim >= 0 else items[0].ndim + 1 + self._dim)


def stack_index(parts: tuple[Any, ...]) -> torch.Tensor:
    """Combine the parts of an index, one per dim, in one tensor; they are broadcast as in torch indexing.

    Args:
        parts: Positions along each dim. Any shapes that broadcast together.

    Returns:
        Shape `(..., len(parts))`.
        Shape `(..., len(parts))`.

    Raises:
        NoRowError: The shapes do not broadcast together.
    """
    found = [torch.as_tensor(part) for part in parts]
    try:
        shape = np.broadcast_shapes(*(part.shape for part in found))
    except ValueError as exc:
        shapes = ", ".join(str(list(part.shape)) for part in found)
        raise NoRowError(
            f"the parts of the index have the shapes {shapes}, which cannot be broadcast",
            hint="give one tensor per dim, with shapes that can be broadcast, as in torch indexing",
        ) from exc
    return torch.stack([part.expand(shape) for part in found], -1)
