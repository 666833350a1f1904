"""Convert TensorDicts to columns, and columns to TensorDicts.

Used by `expstore.data.containers`. It avoids copies if possible, and does not use storages.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import (
    LazyStackedTensorDict,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.values import Array, IntArray, Key, key_name
from expstore.data.leaves import UNKNOWN, has_lazy, is_loose, leaves_of, leaves_of_rows, to_columns
from expstore.data.nested_tensors import JaggedLayouts, to_entry
from expstore.data.to_arrays import to_ragged_rows
from expstore.episodes.segmentation import RowFacts, Steps, to_trajectory_ids
from expstore.errors import SchemaError, StackError
from expstore.schema.field_roles import Keys
from expstore.schema.row_traits import DATA
from expstore.schema.schema import ARROW, Schema


@dataclass(slots=True)
class Batch:
    """A batch as columns, in the order of the TensorDict.

    Args:
        keys: Keys of the fields.
        dtypes: Names of their dtypes.
        arrays: Their values; bfloat16 as uint16 bits. Shapes `(n, *row shape)`. Variable-length fields are
            pyarrow Arrays.
        count: Number of rows.
        lanes: Lane of each row; None: one lane.
        lane_count: Number of lanes.
        arranged: The schema whose columns these are, checked; keys and dtypes are empty then. None: not
            checked.
        form: How rows are assembled, in the format of `expstore.data.containers`.
        dims: Sizes of the batch's dims beyond time, if each position along them is a row.
        kind: The tensorclass of the rows, if they have one.
        linked: As in `Steps`.
    """

    keys: list[Key]
    dtypes: list[str]
    arrays: list[Array]
    count: int
    lanes: IntArray | None = None
    lane_count: int = 1
    arranged: Schema | None = None
    form: str = ""
    dims: tuple[int, ...] = ()
    kind: type | None = None
    linked: bool = True

    def signature(self) -> dict[Key, tuple[str, tuple[int, ...]]]:
        """Return key -> (dtype, row shape).

        Raises:
            SchemaError: The type of a column cannot be inferred from its values.
        """
        if UNKNOWN in self.dtypes:
            name = key_name(self.keys[self.dtypes.index(UNKNOWN)])
            raise SchemaError(
                f"field {name!r} has only None or empty lists in the first batch, which do not "
                "determine its type",
                hint="give schema= when the store is created, or begin with rows that have a value",
            )
        return {
            key: (dtype, array.shape[1:] if isinstance(array, np.ndarray) else ())
            for key, dtype, array in zip(self.keys, self.dtypes, self.arrays, strict=True)
        }

    def columns(self, schema: Schema) -> list[Array]:
        """Return one array per field, in the schema's order.

        Raises:
            SchemaError: The batch does not fit.
        """
        known = self.arranged
        if known is None:
            return schema.arrange(self.keys, self.dtypes, self.arrays)
        if known is schema or known.fields == schema.fields:
            return self.arrays
        # A field was added or dropped since.
        return schema.arrange(known.keys, [entry.dtype for entry in known.fields], self.arrays)

    def select_columns(self, schema: Schema) -> tuple[list[int], list[Array]]:
        """Return the positions of the fields that the batch has, and one array for each.

        Raises:
            SchemaError: The batch does not fit; only added fields may be missing.
        """
        if self.arranged is not None or tuple(self.keys) == schema.keys:
            columns = self.columns(schema)
            places = [place for place, entry in enumerate(schema.fields) if not entry.annotated]
            return places, [columns[place] for place in places]
        keys = schema.find_given(self.keys)
        where = [self.keys.index(key) for key in keys]
        dtypes, arrays = [self.dtypes[at] for at in where], [self.arrays[at] for at in where]
        return [schema.place(key) for key in keys], schema.arrange(keys, dtypes, arrays, partial=True)

    def in_lanes(self, dims: tuple[int, ...]) -> Batch:
        """Return the batch with lanes: each time step has one row per position along `dims`."""
        count = math.prod(dims)
        lanes = np.tile(np.arange(count), self.count // count if count else 0)
        return replace(self, lanes=lanes, lane_count=count, dims=dims)

    def keep(self, rows: Array) -> Batch:
        """Return the batch without the rows where `rows` is False, and without columns."""
        lanes = None if self.lanes is None else self.lanes[rows]
        return replace(self, keys=[], dtypes=[], arrays=[], lanes=lanes, count=int(np.count_nonzero(rows)))


@dataclass(frozen=True, slots=True)
class Layout:
    """Which dims of a batch make rows.

    Args:
        all_dims: Whether all batch dims of a TensorDict do, as in stores of `expstore.open`: time is the dim
            named "time", otherwise the last; each position along the others is a lane.
        ndim: Otherwise, how many do; the first of them is time, each position along the others is a lane.
        dim: The dim of a batch that is time; it is swapped with the first.
        objects: Whether rows are objects of any kind, stored as they are.
        typed: Whether Python values become Arrow columns; otherwise they stay objects. In a tree a list is
            then a column with one value per row.
    """

    all_dims: bool = False
    ndim: int = 1
    dim: int = 0
    objects: bool = False
    typed: bool = False


def gather(keys: list[Key], leaves: Sequence[Any], layout: Layout, *, single: bool, form: str = "") -> Batch:
    """Convert leaves that share the dims that make rows to a batch.

    Args:
        keys: Keys of the fields.
        leaves: As `to_columns` accepts them.
        layout: Which dims make rows.
        single: Whether the leaves have no time: they are one row, or one for each lane.
        form: As in `Batch`.

    Raises:
        SchemaError: A leaf lacks these dims, the leaves differ in them, or one cannot be stored.
    """
    loose = list(map(is_loose, leaves))
    for key, leaf, is_one in zip(keys, leaves, loose, strict=True):
        if not is_one:
            _check_dims(tuple(leaf.shape), layout, single=single, key=key)
    if layout.dim and not single:
        leaves = [
            leaf if is_one else leaf.swapaxes(layout.dim, 0)
            for leaf, is_one in zip(leaves, loose, strict=True)
        ]
    shape = _find_shape(keys, leaves, layout.ndim - single)
    arrays, dtypes = to_columns(keys, leaves, shape, typed=layout.typed)
    batch = Batch(keys, dtypes, arrays, math.prod(shape), form=form)
    return batch.in_lanes(shape[1 - single :]) if layout.ndim > 1 else batch


def _find_shape(keys: Sequence[Key], leaves: Sequence[Any], dims: int) -> tuple[int, ...]:
    """Return the sizes of the first dims of leaves; a loose leaf has one value for each position along them.

    Raises:
        SchemaError: The leaves differ in these dims.
    """
    shapes = [_rows_of(leaf) if is_loose(leaf) else tuple(leaf.shape[:dims]) for leaf in leaves]
    tensors = (place for place, leaf in enumerate(leaves) if not is_loose(leaf))
    first = next(tensors, 0)
    shape = shapes[first][:dims] if shapes else (0,)[:dims]
    for key, leaf, own in zip(keys, leaves, shapes, strict=True):
        if is_loose(leaf):
            # `to_columns` refuses nested tensors where one dim of rows is not what is wanted.
            differs = (isinstance(leaf, list) or len(shape) == 1) and math.prod(own) != math.prod(shape)
        else:
            differs = own != shape
        if differs:
            raise SchemaError(
                f"field {key_name(key)!r} has {_describe_rows(own)}, {key_name(keys[first])!r} has "
                f"{_describe_rows(shape)}",
                hint="all fields must have one value per row; to pass single rows, use a list of rows",
            )
    return shape


def _rows_of(leaf: Any) -> tuple[int, ...]:
    return (len(leaf) if isinstance(leaf, list) else leaf.size(0),)


def _describe_rows(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} rows" if len(shape) == 1 else f"rows of shape {[*shape]}"


def flatten(
    data: TensorDictBase, layout: Layout, *, single: bool = False, skip: frozenset[str] = frozenset()
) -> Batch:
    """Convert a TensorDict to a batch.

    Args:
        data: The TensorDict.
        layout: Which dims make rows.
        single: Whether the TensorDict has no time: it is one row, or one for each lane.
        skip: Root keys to skip.

    Raises:
        SchemaError: `data` has too few batch dims, or a leaf is not a tensor of a supported dtype.
    """
    _check_dims(tuple(data.batch_size), layout, single=single)
    if layout.dim and not single:
        data = data.transpose(layout.dim, 0)
    all_dims, ndim, shape = layout.all_dims, layout.ndim, tuple(data.batch_size)
    if single and all_dims and shape:
        raise SchemaError(f"add() takes one transition, got batch size {list(shape)}", hint="use extend()")
    dims = len(shape) if all_dims else ndim - single
    _check_rectangular(shape)
    try:
        keys, leaves = leaves_of(data, skip)
    except RuntimeError:  # rows of a lazy stack differ in shape
        if not (dims and has_lazy(data)):
            raise
        try:
            keys, leaves = leaves_of_rows(data, dims, skip)
        except RuntimeError as exc:  # a row is a lazy stack itself
            raise StackError(
                f"the steps within a row have different shapes (batch size {list(shape)}, {dims} of its dims "
                "make rows)",
                hint="pad them, or use a ListStorage, which stores rows of any shape",
            ) from exc
    arrays, dtypes = to_columns(keys, leaves, shape[:dims], typed=layout.typed)
    _check_inner(keys, dtypes, shape[dims:])
    batch = Batch(keys, dtypes, arrays, math.prod(shape[:dims]), form=note_inner(shape[dims:], data))
    if all_dims and dims > 1:
        batch.lanes, batch.lane_count = _lanes(data, shape)
    return batch.in_lanes(shape[1 - single : dims]) if ndim > 1 else batch


def _check_rectangular(shape: tuple[int, ...]) -> None:
    if -1 in shape:
        raise SchemaError(
            f"the parts of the batch have different batch sizes: its shape is {list(shape)}",
            hint="extend() with each part, or let fields, not batch dims, differ in length",
        )


def _check_inner(keys: list[Key], dtypes: list[str], inner: tuple[int, ...]) -> None:
    """Raise SchemaError if rows have inner batch dims, and also variable-length fields."""
    found = [key for key, dtype in zip(keys, dtypes, strict=True) if dtype.startswith(ARROW)]
    if inner and found:
        raise SchemaError(
            f"field {key_name(found[0])!r} is variable-length, and rows have batch dims of their own, "
            f"{list(inner)}",
            hint="store steps as rows: flatten the batch",
        )


def batch_of(schema: Schema, columns: Sequence[Array]) -> Batch:
    """Convert columns to a batch of one lane. Shapes `(n, *row shape)`."""
    dtypes = [ARROW + ":" + entry.arrow if entry.variable else entry.dtype for entry in schema.fields]
    return Batch(list(schema.keys), dtypes, list(columns), len(columns[0]))


def tensordict_of(batch: Batch, *, single: bool) -> TensorDict:
    """Convert a batch of one lane to a TensorDict that shares its memory: rows, or one row without a dim."""
    schema = batch.arranged or Schema.infer(batch.signature())
    built = Builder(schema).build(batch.columns(schema), torch.Size((batch.count,)), {})
    return built[0] if single else built


def note_inner(shape: tuple[int, ...], data: TensorDictBase | None = None) -> str:
    """Return the form of TensorDicts whose rows, or nested TensorDicts, have batch dims of their own.

    Args:
        shape: Sizes of the inner batch dims of rows.
        data: The batch; the names of its dims, and of nested TensorDicts' dims, are also recorded.
    """
    noted: dict[str, Any] = {"batch_size": list(shape)} if shape else {}
    if data is not None:
        names = _names_of(data)[data.batch_dims - len(shape) :]
        if any(names):
            noted["names"] = names
        if nested := _find_nested_dims(data, (), data.batch_dims):
            noted["nested"] = nested
    return json.dumps(noted) if noted else ""


def is_plain(form: str) -> bool:
    """Return whether rows are TensorDicts without inner batch dims."""
    return not form or set(json.loads(form)) == {"nested"}


def _names_of(data: Any) -> list[str | None]:
    return list(data.names) if data._has_names() else [None] * data.batch_dims


def _find_nested_dims(data: Any, path: Key, known: int) -> list[tuple[Key, list[int], list[str | None]]]:
    """Return path, sizes and names of the dims that nested TensorDicts have beyond the first `known`."""
    found: list[tuple[Key, list[int], list[str | None]]] = []
    if isinstance(data, LazyStackedTensorDict):  # its rows may differ in shape
        known -= data.stack_dim < known
        data = data.tensordicts[0] if data.tensordicts else TensorDict({})
        return _find_nested_dims(data, path, known)
    for name, value in data.items():
        if isinstance(value, torch.Tensor) or is_non_tensor(value) or not is_tensor_collection(value):
            continue
        key = (*path, name)
        sizes = list(value.batch_size[known:])
        if sizes and -1 not in sizes:
            found.append((key, sizes, _names_of(value)[known:]))
        found += _find_nested_dims(value, key, known)
    return found


def _check_dims(shape: tuple[int, ...], layout: Layout, *, single: bool, key: Key = DATA) -> None:
    """Raise SchemaError if a batch, a single row or a leaf has too few dims."""
    ndim = 1 if layout.all_dims else layout.ndim
    leaf = "" if key == DATA else f"field {key_name(key)!r}"
    if layout.dim >= len(shape) and layout.dim and not single:
        raise SchemaError(f"{leaf or 'the batch'} has shape {list(shape)}, and dim {layout.dim} is time")
    if len(shape) >= ndim - single:
        return
    if ndim > 1:
        raise SchemaError(
            f"the storage has ndim={ndim}: {'add' if single else 'extend'}() takes at least {ndim - single} "
            f"batch dims, got shape {list(shape)}" + (f" in {leaf}" if leaf else "")
        )
    if leaf:
        raise SchemaError(
            f"{leaf} has shape {list(shape)}: extend() takes one value per row",
            hint="add() takes a single row",
        )
    raise SchemaError("extend() takes a batch, got one row without batch dims", hint="use add()")


def _lanes(data: TensorDictBase, shape: tuple[int, ...]) -> tuple[IntArray, int]:
    names = data.names if data._has_names() else []
    time = names.index("time") if "time" in names else len(shape) - 1
    others = [1 if dim == time else size for dim, size in enumerate(shape)]
    count = int(np.prod(others))
    lanes = np.broadcast_to(np.arange(count).reshape(others), shape).reshape(-1)
    return lanes, count


class Intake:
    """Fast conversion of batches whose keys, dtypes and shapes are exactly those of the schema.

    These are nearly all batches of a run; `flatten` and `Schema.arrange` handle the others.

    Args:
        schema: The fields.
    """

    def __init__(self, schema: Schema) -> None:
        tree = _Tree(schema)
        self._parents, self._sizes = tree.parents, [0] * (len(tree.parents) + 1)
        for parent, _ in tree.parents:
            self._sizes[parent] += 1
        for group, _ in tree.leaves:
            self._sizes[group] += 1
        self._leaves = tree.leaves
        self._schema, self._fields = schema, schema.fields
        self._wanted = self._wants(1)

    def _wants(self, count: int) -> tuple[int, list[tuple[np.dtype[Any], tuple[int, ...]]]]:
        return count, [(entry.numpy_dtype, (count, *entry.shape)) for entry in self._fields]

    def take(self, data: TensorDictBase, *, single: bool = False) -> Batch | None:
        """Return a batch of one lane as columns of the schema; None if it needs `flatten`."""
        if type(data) is not TensorDict or len(data.batch_size) != (0 if single else 1):
            return None
        count = 1 if single else data.batch_size[0]
        tables: list[dict[str, Any]] = [data._tensordict]
        try:
            for parent, name in self._parents:
                tables.append(tables[parent][name]._tensordict)
            if list(map(len, tables)) != self._sizes:
                return None
            arrays = [tables[group][name].numpy() for group, name in self._leaves]
            if single:
                arrays = [array[None] for array in arrays]
            known, wanted = self._wanted
            if known != count:
                _, wanted = self._wanted = self._wants(count)
            for array, (dtype, shape) in zip(arrays, wanted, strict=True):
                if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
                    return None
        except (KeyError, AttributeError, RuntimeError, TypeError):
            return None  # another key, a lazy stack, a tensor that requires gradients, a bfloat16
        return Batch([], [], arrays, count, arranged=self._schema)

    def take_arrays(self, data: dict[str, Any], *, single: bool = False) -> Batch | None:
        """Return nested dicts of arrays as columns of the schema; None if they need `take_mapping`.

        Args:
            data: Arrays of shape `(n, *row shape)`; of a single row arrays of its shape, and numbers.
            single: Whether `data` is one row.
        """
        tables: list[Any] = [data]
        try:
            for parent, name in self._parents:
                tables.append(tables[parent][name])
            if [len(table) for table in tables] != self._sizes:
                return None
            values = [tables[group][name] for group, name in self._leaves]
            count = 1 if single else len(values[0])
            known, wanted = self._wanted
            if known != count:
                _, wanted = self._wanted = self._wants(count)
            if single:
                values = [
                    value[None] if type(value) is np.ndarray else _number_to_column(value, *column)
                    for value, column in zip(values, wanted, strict=True)
                ]
            for array, (dtype, shape) in zip(values, wanted, strict=True):
                if (
                    type(array) is not np.ndarray
                    or array.shape != shape
                    or array.dtype != dtype
                    or not array.flags.c_contiguous
                ):
                    return None
        except (KeyError, IndexError, TypeError, ValueError, OverflowError):
            return None  # another key, not a dict, a number that the field's dtype cannot represent
        return Batch([], [], values, count, arranged=self._schema)


#: The largest finite float by its size in bytes.
_LARGEST = {size: float(np.finfo(f"f{size}").max) for size in (2, 4, 8)}


def _number_to_column(value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
    """Return a number as a column of one row; None if it needs a conversion. Floats are rounded."""
    if shape != (1,):
        return None
    kind = type(value)
    if kind is float:
        fits = dtype.kind == "f" and abs(value) <= _LARGEST[dtype.itemsize]
        return np.array([value], dtype) if fits else None
    if kind is bool:
        return np.array([value], dtype) if dtype.kind == "b" else None
    if kind is int:
        found = np.array([value], dtype) if dtype.kind in "iuf" else None
        return found if found is not None and int(found[0]) == value else None
    return np.array([value]) if isinstance(value, np.generic) else None


class StepReader:
    """Read the episode fields of rows: lanes, trajectory ids, ends and rewards.

    Args:
        schema: The schema of the store.
        keys: The fields' keys.
    """

    def __init__(self, schema: Schema, keys: Keys) -> None:
        def place(key: Key | None) -> int | None:
            return None if key is None else schema.place(key)

        self._facts, self._start = RowFacts(schema, keys), place(keys.start)
        self._trajectory, self._mask = place(keys.trajectory), place(keys.mask)
        self._keys = keys
        self._counts_steps = keys.start == ("step_count",)
        #: Whether rows can be marked as not being transitions.
        self.skips_rows = self._trajectory is not None or self._mask is not None

    def read(self, columns: Sequence[Array], batch: Batch) -> Steps:
        """Return the episode fields of the rows. `columns` are in the schema's order."""

        terminated, truncated, rewards = self._facts.read(columns)
        starts: Any = None
        if self._start is not None:
            starts = columns[self._start].reshape(-1)
            starts = starts == 0 if self._counts_steps else starts.astype(np.bool_, copy=False)
        trajectories = None
        if self._trajectory is not None:
            trajectories = to_trajectory_ids(self._keys, columns[self._trajectory])
        return Steps(
            count=batch.count,
            lanes=batch.lanes,
            lane_count=batch.lane_count,
            trajectories=trajectories,
            terminated=terminated,
            truncated=truncated,
            starts=starts,
            rewards=rewards,
            linked=batch.linked,
        )

    def transitions(self, columns: Sequence[Array]) -> Array | None:
        """Return which rows are transitions; None: all of them. Shape `(n,)`."""
        keep = None
        if self._trajectory is not None:
            strays = columns[self._trajectory].reshape(-1) == -1
            keep = ~strays if np.count_nonzero(strays) else None
        if self._mask is not None:
            mask = columns[self._mask].reshape(-1).astype(bool)
            if not mask.all():
                keep = mask if keep is None else keep & mask
        return keep


class _Tree:
    """The nesting of a schema's fields, with groups numbered from the root (0)."""

    def __init__(self, schema: Schema) -> None:
        groups: dict[Key, int] = {(): 0}
        self.paths: list[Key] = [()]  # of each group
        self.parents: list[tuple[int, str]] = []  # parent and name of each group except the root
        self.leaves: list[tuple[int, str]] = []  # group and name of each field
        for entry in schema.fields:
            for depth in range(1, len(entry.key)):
                path = entry.key[:depth]
                if path not in groups:
                    groups[path] = len(groups)
                    self.paths.append(path)
                    self.parents.append((groups[path[:-1]], path[-1]))
            self.leaves.append((groups[entry.key[:-1]], entry.key[-1]))


class Builder:
    """Build TensorDicts of one schema.

    Args:
        schema: The fields.
    """

    def __init__(self, schema: Schema) -> None:
        tree = _Tree(schema)
        self._parents = tree.parents
        self._dims = _group_dims(schema, tree)
        self._leaves = [
            (group, name, entry.dtype if entry.dtype in ("bfloat16", "object", ARROW) else "", entry.arrow)
            for (group, name), entry in zip(tree.leaves, schema.fields, strict=True)
        ]
        # If all fields are plain tensors: their names and positions, by group.
        self._tensors = None if any(special for _, _, special, _ in self._leaves) else _group_places(tree)

    def build(
        self,
        columns: Iterable[Array],
        size: torch.Size,
        root: dict[str, torch.Tensor],
        names: Sequence[str | None] = (),
    ) -> TensorDict:
        """Build a TensorDict that owns the columns.

        Args:
            columns: Values in the schema's order. Shapes `(*size, *row shape)`.
            size: Batch size.
            root: Additional tensors at the root.
            names: Names of the last dims.
        """
        groups = self._fill_groups(columns, size)
        groups[0].update(root)
        # Backwards, as a group follows its parent. Nothing needs validation, which would take longer than
        # reading the rows.
        for number in range(len(self._parents), 0, -1):
            parent, name = self._parents[number - 1]
            if self._dims is None:
                groups[parent][name] = TensorDict._new_unsafe(groups[number], size, device=None)
            else:
                groups[parent][name] = _tensordict(groups[number], size, names, *self._dims[number])
        if any(names):
            return _tensordict(groups[0], size, names, (), ())
        batch: TensorDict = TensorDict._new_unsafe(groups[0], size, device=None)
        return batch

    def _fill_groups(self, columns: Iterable[Array], size: torch.Size) -> list[dict[str, Any]]:
        """Return the tensors of each group by name."""
        groups: list[dict[str, Any]] = []
        if self._tensors is not None:
            tensors = list(map(torch.from_numpy, columns))
            for fields in self._tensors:
                group: dict[str, Any] = {}
                for name, place in fields:
                    group[name] = tensors[place]
                groups.append(group)
            return groups
        groups, layouts = [{} for _ in range(len(self._parents) + 1)], JaggedLayouts()
        for (number, name, special, arrow), column in zip(self._leaves, columns, strict=True):
            if special:
                groups[number][name] = _special(special, arrow, column, size, layouts)
            else:
                groups[number][name] = torch.from_numpy(column)
        return groups

    def nest(self, columns: Iterable[Array], size: Sequence[int], root: dict[str, Array]) -> dict[str, Any]:
        """Build nested dicts of arrays, which own the columns.

        Args:
            columns: Values in the schema's order. Shapes `(*size, *row shape)`.
            size: Number of rows along each dim.
            root: Additional arrays for the outermost dict.
        """
        groups: list[dict[str, Any]] = [{}]
        for (group, name, special, arrow), column in zip(self._leaves, columns, strict=True):
            while len(groups) <= group:  # at a group's first field, as dicts keep the order of the fields
                parent, inner = self._parents[len(groups) - 1]
                groups[parent][inner] = {}
                groups.append(groups[parent][inner])
            if special == "bfloat16":
                groups[group][name] = widen_bfloat16(column)
            elif special == ARROW:
                groups[group][name] = to_ragged_rows(column, arrow, size)
            else:
                groups[group][name] = column
        groups[0].update(root)
        return groups[0]


def _group_places(tree: _Tree) -> list[list[tuple[str, int]]]:
    """Return names and positions of the fields of each group."""
    groups: list[list[tuple[str, int]]] = [[] for _ in range(len(tree.parents) + 1)]
    for place, (group, name) in enumerate(tree.leaves):
        groups[group].append((name, place))
    return groups


#: Sizes and names of the dims that a group has in addition to its root's.
Dims = tuple[tuple[int, ...], tuple[str | None, ...]]


def _group_dims(schema: Schema, tree: _Tree) -> list[Dims] | None:
    """Return the dims that each group of fields has in addition to the root's; None: no group has any.

    A group with a later added field that lacks these dims has the dims of its parent.

    Raises:
        SchemaError: The schema's form is damaged; it may have been written by another process.
    """
    if not schema.form:
        return None
    try:
        form = json.loads(schema.form)
        inner = len(form.get("batch_size", ()))
        noted: dict[Key, Dims] = {
            tuple(path): (tuple(sizes), tuple(names)) for path, sizes, names in form.get("nested", ())
        }
        if any(len(sizes) != len(names) or not _are_names(names) for sizes, names in noted.values()):
            raise ValueError(f"dims {noted}")
    except (ValueError, TypeError, AttributeError, RecursionError) as exc:
        raise SchemaError(f"the schema's description of nested TensorDicts cannot be read: {exc}") from exc
    if not noted:
        return None
    found: list[Dims] = [((), ())]
    for path, (parent, _) in zip(tree.paths[1:], tree.parents, strict=True):
        sizes, names = noted.get(path, found[parent])
        shapes = [entry.shape[inner:] for entry in schema.fields if entry.key[: len(path)] == path]
        fits = all(shape[: len(sizes)] == sizes for shape in shapes)
        found.append((sizes, names) if fits else found[parent])
    return found


def _are_names(names: Sequence[Any]) -> bool:
    """Return whether these are valid names of dims: each is a text or None, and no text occurs twice."""
    texts = [name for name in names if name is not None]
    return all(isinstance(name, str) for name in texts) and len(set(texts)) == len(texts)


def _tensordict(
    entries: dict[str, Any],
    size: torch.Size,
    names: Sequence[str | None],
    sizes: tuple[int, ...],
    own: tuple[str | None, ...],
) -> TensorDict:
    """Build a TensorDict with additional batch dims of these sizes and names, without validation."""
    named = None
    if any(names) or any(own):
        named = [*[None] * (len(size) - len(names)), *names, *own]
    made: TensorDict = TensorDict._new_unsafe(
        entries, torch.Size((*size, *sizes)) if sizes else size, device=None, names=named
    )
    return made


def _special(dtype: str, arrow: str, column: Any, size: torch.Size, layouts: JaggedLayouts) -> Any:
    """Convert a column that NumPy cannot pass to torch: bfloat16, variable-length rows, objects."""
    if dtype == "bfloat16":
        return torch.from_numpy(np.asarray(column)).view(torch.bfloat16)
    if dtype == ARROW:
        return to_entry(column, arrow, size, layouts)
    return to_non_tensor(column, size)


def to_non_tensor(values: Any, size: torch.Size) -> NonTensorData | NonTensorStack:
    """Convert an array of objects of shape `size` to an entry of a TensorDict of that batch size."""
    if len(size) and size[0]:
        return NonTensorStack(*[to_non_tensor(value, size[1:]) for value in values])
    value = values.item() if isinstance(values, np.ndarray) and values.dtype == object else values
    return NonTensorData(None if len(size) else value, batch_size=size)
