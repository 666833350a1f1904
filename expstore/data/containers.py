"""What users hand over, and what they get back: TensorDicts, tensors, tensorclasses, trees, objects.

Used by storages and buffers to make columns of it and to put it together again; `Schema.form` keeps how.
It never reads or writes a row.
"""

from __future__ import annotations

import json
import math
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

from expstore.core.values import Array, Key
from expstore.data.batch import (
    Batch,
    Builder,
    check_dims,
    flatten,
)
from expstore.data.leaves import to_columns, to_objects
from expstore.data.nested_tensors import to_values
from expstore.data.to_arrays import to_arrays
from expstore.data.variable_rows import columns_of, is_loose
from expstore.errors import NoRowError, SchemaError, StackError
from expstore.schema.row_traits import DATA, RowTraits
from expstore.schema.schema import Schema, is_name

__all__ = ["Form", "Layout", "check_form", "form_of", "is_tree", "stack", "stack_index", "take"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Say which dims of a batch make rows.

    Args:
        all_dims: All batch dims of a TensorDict do, as `expstore.open` has it.
        ndim: How many do otherwise, the first of them time.
        dim: Which dim of a batch is time: it is swapped with the first.
        objects: Rows are things of any kind, kept as they are.
        typed: Values of Python become columns of Arrow; otherwise they stay objects. In a tree a list is a
            column then, one value per row.
    """

    all_dims: bool = False
    ndim: int = 1
    dim: int = 0
    objects: bool = False
    typed: bool = False


def take(data: Any, layout: Layout, *, single: bool = False, skip: frozenset[str] = frozenset()) -> Batch:
    """Return what was handed over as columns.

    A list is rows to be stacked; a tuple or a dict is a tree, whose leaves share their first dims.

    What TorchRL has `LazyStackStorage` for becomes a column of rows without a fixed size: a nested tensor,
    tensors of different shapes in a lazy stack, or in a list of rows. Where values have types
    (`layout.typed`), so do NonTensorStack and NonTensorData, which TorchRL's storages keep as objects: texts,
    bytes, numbers, lists; a dict is a struct, None is null. A list in a tree is one value per row then.

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
            data = stack(data, typed=layout.typed)
        except (RuntimeError, KeyError, IndexError, ValueError) as exc:
            raise StackError(
                f"Stacking the elements of the list resulted in an error: {exc}",
                hint='rows have the same fields and shapes; a store with layout="arrow", or a '
                "LazyStackStorage, keeps others",
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
        if layout.dim and not single:
            check_dims(tuple(data.batch_size), layout.dim + 1, single=False)
            data = data.transpose(layout.dim, 0)
        batch = flatten(
            data,
            all_dims=layout.all_dims,
            ndim=layout.ndim,
            single=single,
            skip=skip,
            typed=layout.typed,
        )
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
    leaves: list[Any] = []
    tree = _walk(data, (), keys, leaves, typed=layout.typed, single=single)
    dims = layout.ndim - single
    loose = list(map(is_loose, leaves))
    for leaf, is_one in zip(leaves, loose, strict=True):
        if not is_one:
            check_dims(tuple(leaf.shape), layout.ndim, single=single)
    if layout.dim and not single:
        leaves = [
            leaf if is_one else leaf.transpose(layout.dim, 0)
            for leaf, is_one in zip(leaves, loose, strict=True)
        ]
    plain = [leaf for leaf, is_one in zip(leaves, loose, strict=True) if not is_one]
    shape = tuple(plain[0].shape[:dims]) if plain else _shape_of(leaves, dims)
    for key, leaf, is_one in zip(keys, leaves, loose, strict=True):
        if is_one:
            _check_length(key, leaf, shape)
        elif tuple(leaf.shape[:dims]) != shape:
            raise SchemaError(
                f"leaf {'.'.join(key)!r} has shape {list(leaf.shape)}, another one begins with {list(shape)}",
                hint="all leaves of a tree share their first dims; for rows one by one give a list",
            )
    count = int(np.prod(shape))
    if any(loose):
        arrays, dtypes = columns_of(keys, leaves, shape, typed=layout.typed)
    else:
        arrays, dtypes = to_columns(keys, leaves)
        if dims != 1:
            arrays = [array.reshape(count, *array.shape[dims:]) for array in arrays]
    batch = Batch(keys, dtypes, arrays, count, form=json.dumps({"tree": tree}))
    return batch.in_lanes(shape[1 - single :]) if layout.ndim > 1 else batch


def _shape_of(leaves: Sequence[Any], dims: int) -> tuple[int, ...]:
    """Return the dims that make rows where no leaf is a plain tensor."""
    rows = len(leaves[0]) if leaves and isinstance(leaves[0], list) else leaves[0].size(0) if leaves else 0
    return (rows,) if dims else ()


def _check_length(key: Key, leaf: Any, shape: tuple[int, ...]) -> None:
    rows, wanted = len(leaf) if isinstance(leaf, list) else leaf.size(0), int(np.prod(shape))
    if rows != wanted:
        raise SchemaError(
            f"leaf {'.'.join(key)!r} has {rows} rows, another one has {wanted}",
            hint="a list in a tree has one value per row; a list in one row is its value in a list",
        )


def _walk(data: Any, path: Key, keys: list[Key], leaves: list[Any], *, typed: bool, single: bool) -> Any:
    """Collect the leaves of a tree; return its shape as JSON keeps it."""
    if isinstance(data, dict):
        wrong = [key for key in data if not isinstance(key, (str, int)) or isinstance(key, bool)]
        if wrong:
            raise SchemaError(f"a tree has the key {wrong[0]!r}", hint="use text or integers")
        named = {k: str(k) for k in data if is_name(str(k)) and (isinstance(k, str) or str(k) not in data)}
        names = {k: named.get(k, f"key{place}") for place, k in enumerate(data)}
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
            hint="a column of values is a list"
            if typed
            else "objects of other kinds are kept by a ListStorage",
        )
    keys.append(path or DATA)
    leaves.append(torch.as_tensor(data) if leaf is None else leaf)
    return {"field": list(path or DATA)}


def _loose_leaf(data: Any, single: bool) -> Any:
    """Return the values of a leaf, one per row; None: it is a tensor, a number, or nothing that is kept."""
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
    """Stack rows: TensorDicts (lazily, if shapes differ), tensors, trees of them; others stay a list.

    Args:
        items: The rows.
        typed: Tensors of different shapes, and lists, stay a list, too: of one value per row.
    """
    first = items[0]
    if is_tensor_collection(first):
        return LazyStackedTensorDict.maybe_dense_stack(list(items))
    if typed and not isinstance(first, (dict, tuple)) and not _are_alike(items):
        return list(items)
    if isinstance(first, torch.Tensor):
        return torch.stack(list(items))
    if isinstance(first, dict):
        other = next((item for item in items if typed and set(item) != set(first)), None)
        if other is not None:
            raise KeyError(f"not all rows have {sorted(map(str, set(other) ^ set(first)))}")
        return {key: stack([item[key] for item in items], typed=typed) for key in first}
    if type(first) in (list, tuple):
        return type(first)(stack([item[i] for item in items], typed=typed) for i in range(len(first)))
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(stack([item[i] for item in items], typed=typed) for i in range(len(first))))
    if isinstance(first, (np.ndarray, np.generic, bool, int, float)):
        return torch.as_tensor(np.stack([np.asarray(item) for item in items]))
    return list(items)


def _are_alike(items: Sequence[Any]) -> bool:
    """Return whether rows are tensors, arrays or numbers of one shape."""
    if not all(isinstance(item, (torch.Tensor, np.ndarray, np.generic, bool, int, float)) for item in items):
        return False
    first = items[0]
    if isinstance(first, torch.Tensor):
        return all(isinstance(item, torch.Tensor) and item.shape == first.shape for item in items)
    return len({np.shape(item) for item in items}) == 1 and not isinstance(first, np.character)


def check_form(batch: Batch, schema: Schema) -> None:
    """Raise SchemaError if rows of a batch are put together otherwise than those that a store keeps.

    A batch size within rows may differ where the fields fit, and a tensorclass may stand for its TensorDict.
    """
    if batch.form == schema.form or batch.arranged is not None:
        return
    if {"tree", "objects"} & {*json.loads(batch.form or "{}"), *json.loads(schema.form or "{}")}:
        raise SchemaError(f"the store keeps {_describe(schema.form)}, the batch is {_describe(batch.form)}")


def is_tree(form: str) -> bool:
    """Return whether rows are trees or objects, and no TensorDicts."""
    return bool(form) and not {"tree", "objects"}.isdisjoint(json.loads(form))


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
            columns: In the schema's order. Shapes `(*size, *row shape)`; of rows without a fixed size pyarrow
                Arrays, flat, which own their memory.
            size: Shape of what is returned; `()` is one row.
            root: More entries for the root of a TensorDict; left out otherwise.
        """

    @abstractmethod
    def arrays(self, columns: Sequence[Array], size: Sequence[int], root: dict[str, Array]) -> Any:
        """Return rows as `build` does, of NumPy arrays: dicts for TensorDicts; no tensor is made.

        Args:
            columns: As of `build`.
            size: As of `build`.
            root: More arrays for the outermost dict; left out where rows are no TensorDicts.
        """

    #: Whether `root` is put into what is built.
    keyed = False


class Kept(Protocol):
    """What `form_of` asks of a storage."""

    row_traits: RowTraits

    def require_schema(self) -> Schema:
        """Return the schema."""


def form_of(storage: Kept) -> Form:
    """Return how a storage's rows are put together.

    Args:
        storage: Its schema says it; a tensorclass that it does not know is looked up in imported modules.

    Raises:
        StateError: No rows have come yet.
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
        """Return rows of several dims as a lazy stack: no nested tensor has rows in more than one."""
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
        """Return rows of no fixed size: of several dims in lists of lists."""
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
        # A row of its own has no such dim yet: counted from the end, it is one of the stack's.
        return lazy_stack(items, self._dim if self._dim >= 0 else items[0].ndim + 1 + self._dim)


def stack_index(parts: tuple[Any, ...]) -> torch.Tensor:
    """Return the parts of an index, one per dim, as one tensor; they are broadcast as in torch indexing.

    Args:
        parts: Positions along each dim. Any shapes that broadcast together.

    Returns:
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
            f"the parts of the index have the shapes {shapes}, which do not broadcast together",
            hint="give one tensor per dim, of shapes that broadcast, as torch indexing takes them",
        ) from exc
    return torch.stack([part.expand(shape) for part in found], -1)
