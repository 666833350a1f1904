"""`rb.columns`: add and drop fields of a buffer in use, and compute statistics of fields.

This module determines a field's type and computes its values; the storage writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDictBase

from expstore.buffers.annotations import fit_rows, make_entry
from expstore.buffers.domain_checks import row_text, specs_of
from expstore.buffers.field_stats import FieldStats, compute_stats
from expstore.buffers.sampling import Sampling
from expstore.buffers.store_handle import StoreHandle
from expstore.buffers.updates import as_field
from expstore.core.casts import cast_floats, find_lost
from expstore.core.values import Array, IntArray, Key, key_name, to_key
from expstore.data.containers import form_of
from expstore.errors import ArgumentError, QueryError, SchemaError, StateError
from expstore.schema.row_fields import check_no_sample_entry
from expstore.schema.schema import DTYPES, Field
from expstore.schema.spec_text import check_specs, leaves_of
from expstore.specs import Composite, Unbounded
from expstore.specs.base import TensorSpec
from expstore.sql.sync import Catalog
from expstore.storages.base import Storage
from expstore.storages.capabilities import FieldChanges
from expstore.storages.engine.backfill import check_droppable
from expstore.storages.format.annotation_log import Part
from expstore.storages.new_field import NewField, Progress, check_new_field
from expstore.storages.read_view import ReadView, read_present, read_stable

if TYPE_CHECKING:
    from expstore.sql.expressions import Needs

#: Default of arguments for which None has a meaning.
_NOTHING: Any = object()
#: Largest number of bytes, and of rows, that a function gets at a time.
_BYTES, _ROWS = 64 << 20, 4096

#: The longest text of `fill=` in the lineage.
_FILL_TEXT = 200

Function = Callable[[TensorDictBase], Any]


class Columns:
    """Add and drop fields of the rows of a buffer, and compute statistics of fields.

    Threads: other threads may append and sample meanwhile; near the end of `add` or `drop` they wait.
    Processes: only the writing process may change fields; followers always see the current fields. Crashes: a
    field exists completely or not at all.

    Args:
        store: The store.
        sampling: The sampling part, whose sampler may need a field.

    Example:
        >>> rb.columns.add("advantage", sql="next.reward - 0.5", dtype=torch.float32)
        >>> rb.columns.drop("advantage")
    """

    def __init__(self, store: StoreHandle, sampling: Sampling) -> None:
        self._store = store
        self._sampling = sampling

    def add(
        self,
        name: str | tuple[str, ...],
        *,
        fill: Any = _NOTHING,
        function: Function | None = None,
        sql: str | None = None,
        dtype: Any = None,
        shape: int | tuple[int | None, ...] | None = None,
        default: Any = _NOTHING,
        spec: TensorSpec | None = None,
        like: str | tuple[str, ...] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Add a field to all stored and later rows. It is durable when this returns.

        Values of stored rows are computed while other threads append and sample; appends wait only while the
        last rows get their values. Other fields are not written, and are read only to compute values. The new
        field has the flat layout and is the last one of the schema.

        A field of any length, `shape=(None,)`, is annotated: later rows are written without it, and get their
        values by `rb.annotate`. It needs `dtype`, and `fill` or `function`; appends wait until it is added.

        Args:
            name: The field; a tuple for one inside a group.
            fill: The value of all stored rows: a number, or a tensor of the row's shape.
            function: Function that computes the values. It gets a TensorDict of up to 4096 rows as they are
                stored, with `index` and `id`, and returns a tensor or array of shape `(n, *shape)`. It must
                not write, and may be called more than once with the same row. For a field of any length it
                returns a nested tensor, or a list of n arrays.
            sql: An SQL expression over a row and its episode, as in `where=` of samplers. Give exactly one of
                `fill`, `function` and `sql`.
            dtype: Dtype of torch or NumPy, or its name; None: that of `spec` or of the values.
            shape: Shape of a row's value; None: that of `spec` or of the values. `(None,)`: any number of
                values.
            default: The value of later rows that lack the field; None: such rows are refused. By default
                `fill`, and None with `function` and `sql`.
            spec: Which values the field may have; None: all of its dtype.
            like: For a field of any length: the field of any length that has as many values in each row.
            progress: Called with the number of rows that have their value and the number of all rows.

        Raises:
            SchemaError: The field exists, a field cannot have this name or type, or values do not fit.
                Nothing was changed.
            QueryError: `sql` is not one expression over a row and its episode, or cannot be computed.
            StateError: The store has no rows yet, rows are objects, or the store cannot be written.
            StorageError: The disk failed.

        Example:
            >>> rb.columns.add("advantage", sql="next.reward - 0.5", dtype=torch.float32)
            >>> rb.columns.add(("next", "value"), fill=0.0)
        """
        storage, key = self._store.storage, to_key(name)
        check_no_sample_entry([key])
        if (fill is not _NOTHING) + (function is not None) + (sql is not None) != 1:
            raise ArgumentError("columns.add() takes one of fill=, function= and sql=")
        fields = _fields_of(storage)
        storage.require_schema()
        if sql is not None:
            origin = {"sql": sql}
        elif function is not None:
            origin = {"function": _describe_function(function)}
        else:
            origin = {"fill": repr(fill)[:_FILL_TEXT]}
        kind = None if dtype is None else _dtype_name(dtype)
        form: tuple[Any, ...] | None
        form = None if shape is None else ((shape,) if isinstance(shape, int) else tuple(shape))
        if form == (None,):
            if sql is not None or default is not _NOTHING or spec is not None or kind is None:
                raise ArgumentError(
                    f"field {key_name(key)!r} of any length takes dtype=, and fill= or function=, and "
                    "neither sql=, default= nor spec="
                )
            entry = make_entry(storage.require_schema(), key, kind, None, like)
            check_new_field(storage, entry)
            values = _annotate_all(storage.writer(), entry, fill, function, progress)
            fields.add(
                NewField(entry=entry, specs=storage.settings.specs(), annotations=values, origin=origin)
            )
            self._sampling.drop_prefetched()
            return
        if like is not None:
            raise ArgumentError("like= is for fields of any length", hint="pass shape=(None,), too")
        if spec is not None:
            kind = kind or str(spec.dtype).removeprefix("torch.")
            form = tuple(spec.shape) if form is None else form
        compute: _Values | None = None
        if function is not None:
            compute = _ByFunction(storage, function)
        elif sql is not None:
            compute = _ByFormula(storage, self._store.catalog, sql)
        entry = _entry_of(storage, key, kind, form, fill if compute is None else compute)
        check_new_field(storage, entry)
        value = None if compute is not None else _value_of(entry, fill)
        if default is _NOTHING:
            later = value
        else:
            later = None if default is None else _value_of(entry, default)
        rows = max(1, min(_ROWS, _BYTES // max(1, storage.require_schema().row_bytes)))
        fields.add(
            NewField(
                entry=entry,
                default=later,
                fill=value,
                compute=None if compute is None else compute.of(entry),
                rows=rows,
                specs=_specs_with(storage, entry, spec),
                progress=progress,
                origin=origin,
            )
        )
        self._sampling.drop_prefetched()

    def drop(self, name: str | tuple[str, ...]) -> None:
        """Drop a field of all rows. It is deleted from the disk when this returns; other files are unchanged.

        Args:
            name: The field; a tuple for one inside a group.

        Raises:
            SchemaError: There is no such field, it is the only one, or something needs it: episodes, the
                sampler, its `where` or `weight`.
            StateError: The writer ranks rows by the field, or the store cannot be written.
            StorageError: The disk failed; the store must be opened again.

        Example:
            >>> rb.columns.add("advantage", fill=0.0)
            >>> rb.columns.drop("advantage")
        """
        storage, key = self._store.storage, to_key(name)
        fields = _fields_of(storage)
        check_droppable(storage, key)
        for who in self._sampling.users_of(key):
            raise SchemaError(
                f"field {key_name(key)!r} cannot be dropped: {who} needs it", hint="set another one first"
            )
        specs, text = specs_of(storage), storage.settings.specs()
        if specs is not None and key in leaves_of(text):
            text = _remove_spec(specs, key)
        fields.drop(key, text)
        self._sampling.drop_prefetched()

    def stats(
        self, *, fields: list[str | tuple[str, ...]] | None = None, split: str | None = "train"
    ) -> dict[str | Key, FieldStats]:
        """Return count, mean, standard deviation, minimum and maximum of each element of fields.

        Every call reads all rows of the fields once. Values are summed in float64; none is skipped. As in
        NumPy, if an element has a NaN, all its statistics are NaN; if it has an infinity, `mean` and `std`
        are NaN. A bool counts as 0 or 1.

        Args:
            fields: A list of names, with tuples for fields inside groups. None: all fields of bools and real
                numbers with at most 4096 values per row; larger fields, such as images, must be named.
                Objects, complex numbers and variable-length fields have no statistics.
            split: The split whose rows count; None for the rows of all splits.

        Returns:
            Statistics by name, or by tuple for a field inside a group: `count`, `mean`, `std`, `min` and
            `max`. Rows that are appended during the call are not counted; rows that are removed during it may
            be missing.

        Raises:
            NotReadyError: The store has no rows, or none of the split.
            ArgumentError: `split` is not the name of a split.
            SchemaError: A named field does not exist, or has no statistics.
            StateError: The store is closed, or its writer overwrites rows faster than they can be read.

        Example:
            >>> found = rb.columns.stats(fields=["observation"])["observation"]
            >>> mean, std = (torch.from_numpy(part).float() for part in (found.mean, found.std + 1e-6))
            >>> rb.append_transform(
            ...     lambda batch: batch.set("observation", (batch["observation"] - mean) / std)
            ... )
        """
        storage = self._store.check_open()
        storage.follow()
        return read_stable(storage, lambda: compute_stats(storage, fields, split))


def _annotate_all(
    storage: Storage, entry: Field, fill: Any, function: Function | None, progress: Progress | None
) -> Iterator[tuple[IntArray, Part]]:
    """Yield the ids of all rows in parts, each with the values of a new field of any length."""
    window = storage.stored
    ids = window.ids()
    step = max(1, min(_ROWS, _BYTES // max(1, storage.require_schema().row_bytes)))
    for start in range(0, ids.size, step):
        found = ids[start : start + step]
        if function is None:
            values: Any = [fill] * found.size
        else:
            _, batch = _read_stored(storage, found)
            values = function(batch)
        yield found, fit_rows(storage, entry, found, values)
        if progress is not None:
            progress(start + found.size, ids.size)


def _read_stored(storage: ReadView, ids: IntArray) -> tuple[IntArray, TensorDictBase]:
    """Return the rows of `ids` that still exist, as they are stored, with `index` and `id`."""
    found, columns = read_present(storage, ids)
    index = torch.from_numpy(storage.geometry.index_of(found))
    root = {"index": index, "id": torch.from_numpy(found)}
    return found, form_of(storage).build(columns, (found.size,), root)


def _specs_with(storage: ReadView, entry: Field, spec: TensorSpec | None) -> str:
    """Return the text of the specs with the spec of a new field."""
    text = storage.settings.specs()
    if spec is None:
        if not text:
            return text
        spec = Unbounded(entry.shape, dtype=getattr(torch, entry.dtype))
    if not isinstance(spec, TensorSpec):
        raise ArgumentError(f"spec is a {type(spec).__name__}; give a spec of expstore")
    specs = specs_of(storage) or Composite()
    specs[entry.key if len(entry.key) > 1 else entry.key[0]] = spec
    text = row_text(specs)
    check_specs(text, storage.require_schema().grow(entry, None))
    return text


def _remove_spec(specs: Composite, key: Key) -> str:
    """Return the text of the specs without the spec of a field."""
    del specs[key if len(key) > 1 else key[0]]
    left = any(spec is not None for spec in specs.values(include_nested=True, leaves_only=True))
    return row_text(specs) if left else ""


def _dtype_name(dtype: Any) -> str:
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else None
    if name is None:
        name = dtype if isinstance(dtype, str) else str(np.dtype(dtype))
    if name not in DTYPES:
        raise SchemaError(f"a field cannot have dtype {dtype!r}", hint="supported are " + ", ".join(DTYPES))
    return name


def _entry_of(
    storage: ReadView, key: Key, dtype: str | None, shape: tuple[int, ...] | None, given: Any
) -> Field:
    """Return the field; a dtype or shape that was not given is taken from the values."""
    if isinstance(given, _Values):
        if dtype is not None and shape is not None:
            return Field(key, dtype, shape)
        window = storage.stored
        ids = window.ids()[:_FEW]
        if not ids.size:
            raise SchemaError(
                f"field {key_name(key)!r}: there are no rows to compute it from",
                hint="give dtype= and shape=",
            )
        _, found = given.ask(ids)
        return Field(key, dtype or _name_of(found), tuple(found.shape[1:]) if shape is None else shape)
    if isinstance(given, float) and dtype is None:
        dtype = "float32"
    value = given if isinstance(given, torch.Tensor | np.ndarray | np.generic) else np.asarray(given)
    return Field(key, dtype or _name_of(value), tuple(value.shape) if shape is None else shape)


#: Number of rows that are read to determine the dtype and shape of values.
_FEW = 8


def _name_of(value: Any) -> str:
    return _dtype_name(value.dtype)


def _value_of(entry: Field, value: Any) -> Array:
    """Return one row's value as a column stores it. Shape the field's."""
    array = as_field(entry, value)
    try:
        return np.array(np.broadcast_to(array, entry.shape), entry.numpy_dtype)
    except ValueError as exc:
        raise SchemaError(
            f"field {key_name(entry.key)!r}: a value of shape {list(array.shape)} does not fit {entry}"
        ) from exc


class _Values:
    """Compute values of rows. `ask` returns the ids of the rows that still exist, and their values."""

    def ask(self, ids: IntArray) -> tuple[IntArray, Any]:
        raise NotImplementedError

    def of(self, entry: Field) -> Callable[[IntArray], tuple[IntArray, Array]]:
        """Return a function that computes values as a column stores them."""

        def compute(ids: IntArray) -> tuple[IntArray, Array]:
            found, values = self.ask(ids)
            if not found.size:
                return found, np.empty((0, *entry.shape), entry.numpy_dtype)
            array = self.cast(entry, values)
            wanted = (found.size, *entry.shape)
            if array.shape != wanted:
                raise SchemaError(
                    f"field {key_name(entry.key)!r}: values of {found.size} rows have shape "
                    f"{list(array.shape)}, expected {list(wanted)}",
                    hint="give shape=, or return values of the expected shape",
                )
            return found, np.ascontiguousarray(array, entry.numpy_dtype)

        return compute

    def cast(self, entry: Field, values: Any) -> Array:
        """Convert values to the field's dtype."""
        return as_field(entry, values)


class _ByFunction(_Values):
    def __init__(self, storage: ReadView, function: Function) -> None:
        self._storage, self._function = storage, function

    def ask(self, ids: IntArray) -> tuple[IntArray, Any]:
        found, batch = read_stable(self._storage, lambda: _read_stored(self._storage, ids))
        if not found.size:
            return found, np.empty(0)
        values = self._function(batch)
        if not isinstance(values, torch.Tensor | np.ndarray):
            raise SchemaError(
                f"the function returned a {type(values).__name__}", hint="return a tensor, one value per row"
            )
        if not values.shape or values.shape[0] != found.size:
            raise SchemaError(
                f"the function returned values of shape {list(values.shape)} for {found.size} rows"
            )
        return found, values


class _ByFormula(_Values):
    def __init__(self, storage: ReadView, catalog: Catalog, text: str) -> None:
        from expstore.sql.expressions import Formula

        self._storage, self._catalog, self._text, self._formula = storage, catalog, text, Formula(text)
        self._needs: Needs | None = None

    def ask(self, ids: IntArray) -> tuple[IntArray, Any]:
        return read_stable(self._storage, lambda: self._ask(ids))

    def _ask(self, ids: IntArray) -> tuple[IntArray, Any]:
        storage, formula = self._storage, self._formula
        schema, needs = storage.require_schema(), self._needs
        if needs is None or needs.schema is not schema:
            self._catalog.check_selections(formula.selections)
            needs = self._needs = formula.bind(schema)
        row_places = {"_episode": 1, "_step": 2, "_time": 3}
        places = [*needs.fields, *(len(schema.fields) + row_places[name] for name in needs.rows)]
        found, columns = read_present(storage, ids, places)
        needs.mark_missing(storage, found, columns)
        facts = None
        if formula.facts:
            episodes = np.unique(columns[len(needs.fields) + needs.rows.index("_episode")])
            facts = self._catalog.facts(formula.facts, episodes)
        return found, formula.values(needs, found, columns, facts, storage.capacity)

    def cast(self, entry: Field, values: Any) -> Array:
        if entry.dtype == "bfloat16":
            return as_field(entry, torch.from_numpy(np.array(values)).to(torch.bfloat16))
        found = cast_floats(values, entry.numpy_dtype)
        lost = find_lost(values, found)
        if lost is not None or (
            entry.numpy_dtype.kind in "iub" and not np.array_equal(found.astype(values.dtype), values)
        ):
            example = "" if lost is None else f": {lost}"
            raise QueryError(
                f"{self._text!r} has values that {entry.dtype} cannot represent{example}",
                hint="give another dtype=",
            )
        return found.reshape(len(found), *entry.shape) if found[:1].size == entry.row_items else found


def _describe_function(function: Function) -> str:
    """Return the module and the name of a function, for the lineage."""
    kind = function if hasattr(function, "__qualname__") else type(function)
    return f"{kind.__module__}.{kind.__qualname__}"


def _fields_of(storage: ReadView) -> FieldChanges:
    """Return the interface by which fields of a storage are added and dropped.

    Raises:
        StateError: The storage cannot be written, or storages of this kind have fixed fields.
    """
    fields = storage.writer().fields
    if fields is None:
        raise StateError(f"a {storage.kind} storage cannot add or drop fields", hint="create another store")
    return fields
