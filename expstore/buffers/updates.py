"""Update stored rows: fields by index, conditional updates, and priorities.

It does not append, move or delete rows; the storage writes the changes.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase, is_non_tensor

from expstore.buffers.ingest import Ingest
from expstore.buffers.row_index import RowIndex
from expstore.buffers.sampling import Sampling
from expstore.buffers.store_handle import StoreHandle
from expstore.core.arguments import check_numbers
from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.casts import cast_floats, find_lost, find_rounded
from expstore.core.values import Array, IntArray, Key, key_name, to_key
from expstore.data.leaves import as_tensor, check_unmasked, fit_values
from expstore.data.to_arrays import to_array
from expstore.errors import ArgumentError, NotFoundError, SchemaError, StateError
from expstore.schema.row_selection import pick
from expstore.schema.schema import OBJECT, Field
from expstore.storages.columns.priorities import check_priorities
from expstore.storages.read_view import ReadView, ids_to_weigh
from expstore.writers.writers import Writer

Flags = NDArray[np.bool_]
Patch: TypeAlias = Mapping[Any, Any] | TensorDictBase


@dataclass(frozen=True, slots=True)
class ConditionalUpdateResult:
    """The result of `update_if_present` for each of the given rows.

    Args:
        updated: Whether the row was changed. Shape that of the given rows, bool.
        version_rejected: Whether the row exists and was skipped because of its version; None if versions were
            not compared. The same shape, bool.

    Example:
        >>> sample = rb.sample()
        >>> actions = torch.zeros(32, dtype=torch.int64)
        >>> result = rb.update_if_present(id=sample["id"], patch={"action": actions})
        >>> result.updated_count, result.stale_count
        (32, 0)
    """

    updated: torch.Tensor
    version_rejected: torch.Tensor | None = None

    @property
    def updated_count(self) -> int:
        """Number of rows that were changed."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """Number of rows that exist and were skipped because of their version."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """Number of rows that do not exist any more."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


class RowUpdates:
    """Change fields and priorities of stored rows.

    On disk each call is durable when it returns; after a crash before that, all of it is applied or nothing.
    Threads: a change waits for the writer; priorities do not. Processes: only the writing process may change
    rows; it deletes them all, and sets priorities, for workers of a shared buffer, too.

    Args:
        store: The store.
        index: Interprets indices.
        sampling: The sampling part, whose sampler is notified of priorities.
        ingest: The part with the writer, which determines which updates are possible.
    """

    def __init__(self, store: StoreHandle, index: RowIndex, sampling: Sampling, ingest: Ingest) -> None:
        self._store = store
        self._index = index
        self._sampling = sampling
        self._ingest = ingest

    def set_fields(self, fields: Mapping[Key, Any], index: Any) -> None:
        """Set fields of the rows at an index; see `ReplayBuffer.set_at_`."""
        storage = self._store.storage
        with storage.lock:
            storage.writer()
            storage.require_schema()
            ids, shape = self._index.find(index)
            self._apply(ids, {key: self._fit(key, value, shape) for key, value in fields.items()})

    def update_priority(self, index: Any, priority: Any, id: Any) -> int:
        """Set the priorities of rows that still exist; see `ReplayBuffer.update_priority`."""
        if (index is None) == (id is None) or priority is None:
            raise ArgumentError("update_priority takes a priority and either index or id")
        storage, sampler = self._store.storage, self._sampling.sampler
        numbers = self._index.ravel(index) if id is None else to_array(id)
        values = to_array(priority)
        check_numbers("index" if id is None else "id", numbers)
        check_numbers("priority", values)
        if values.size == numbers.size and (storage.ndim > 1 or values.shape == numbers.shape):
            values = values.reshape(-1)
        numbers = numbers.reshape(-1).astype(np.int64, copy=False)
        if values.dtype != np.float32 or values.ndim > 1:
            values = sampler.reduce(values.astype(np.float64, copy=False))
        if values.size not in (1, numbers.size):
            raise SchemaError(f"got {values.size} priorities for {numbers.size} rows")
        if values.size != numbers.size:
            values = np.broadcast_to(values.reshape(-1), numbers.shape)
        if id is None and numbers.size and numbers.min() < 0:
            numbers, values = numbers[numbers != -1], values[numbers != -1]
        proxy = self._store.proxy
        if proxy is not None:
            return proxy.set_priorities(numbers, check_priorities(values), by_id=id is not None)
        return self.set_priorities(numbers, values, by_id=id is not None)

    def set_priorities(self, numbers: IntArray, values: Array, *, by_id: bool) -> int:
        """Set the priorities of rows that are still there; return how many were set.

        Args:
            numbers: Ids or indices. Shape `(n,)`.
            values: One for each. Shape `(n,)`.
            by_id: Whether numbers are ids.

        Raises:
            PriorityError: A value is negative, NaN or infinite; none was set.
        """
        storage = self._store.storage
        ids = numbers if by_id else ids_to_weigh(storage, numbers)
        count = storage.writer().set_priorities(ids, values)
        self._sampling.sampler.on_priority_update(storage, ids, values)
        return count

    def empty(self) -> None:
        """Delete all rows; see `ReplayBuffer.empty`."""
        proxy = self._store.proxy
        if proxy is not None:
            proxy.empty()
            self._store.current()
            return
        self._ingest.writer.check()
        self._store.storage.writer().clear()
        self._sampling.sampler.on_empty()

    def update_if_present(
        self,
        *,
        index: Any,
        generation: Any,
        patch: Patch,
        version_key: str | tuple[str, ...] | None,
        version: Any,
        require_newer: bool,
        id: Any,
    ) -> ConditionalUpdateResult:
        """Change fields of rows that still exist; see `ReplayBuffer.update_if_present`."""
        storage = self._store.storage
        check_can_update(storage, self._ingest.writer, by_index=id is None)
        with storage.lock:
            storage.writer()
            if storage.schema is None:
                raise StateError(
                    "Conditional updates require an initialized storage", hint="extend() it first"
                )
            ids, shape = self._find_ids(index, generation, id)
            if (version_key is None) != (version is None):
                raise SchemaError("version_key and version must be provided together")
            fields = {key: self._to_column(key, value, ids.size) for key, value in leaves_of(patch).items()}
            live = storage.stored.holds(ids)
            rejected: Flags | None = None
            if version_key is not None:
                key = _version_key(version_key, fields)
                fields[key] = self._versions(key, version, ids.size)
                rejected = live & ~self._compare_versions(key, fields[key], ids, live, require_newer)
                live &= ~rejected
            self._apply(ids[live], {key: pick(values, live) for key, values in fields.items()})
        return ConditionalUpdateResult(
            torch.from_numpy(live.reshape(shape)),
            None if rejected is None else torch.from_numpy(rejected.reshape(shape)),
        )

    def _apply(self, ids: IntArray, fields: Mapping[Key, Array]) -> None:
        """Change rows; if a row is named twice, the last values are written."""
        if not (ids.size and fields):
            return
        names, last = np.unique(ids[::-1], return_index=True)
        columns = [pick(values, ids.size - 1 - last) for values in fields.values()]
        self._store.storage.writer().change(
            names, [self._store.storage.require_schema().place_of(key) for key in fields], columns
        )

    def _to_column(self, key: Key, value: Any, count: int) -> Array:
        """Return the column of a patch of `count` rows; as many leading dims as make rows are allowed."""
        dims, shape = self._store.storage.ndim, np.shape(value)
        if dims > 1 and len(shape) >= dims and math.prod(shape[:dims]) == count:
            value = value.reshape(count, *shape[dims:])
        return self._fit(key, value, (count,), spread=False)

    def _fit(self, key: Key, value: Any, shape: tuple[int, ...], *, spread: bool = True) -> Array:
        """Convert values to a column of rows of this shape; with `spread` one value for all rows is accepted.

        Shape `(n, *row shape)`.
        """
        entry = self._field_of(key)
        if entry.variable:
            loose: Any = fit_values(entry, value, math.prod(shape), spread=spread)
            return loose  # type: ignore[no-any-return]
        array = as_field(entry, value)
        wanted = (*shape, *entry.shape)
        if _narrow(array.shape) == _narrow(wanted):
            array = array.reshape(wanted)
        elif spread:
            with contextlib.suppress(ValueError):
                array = np.broadcast_to(array, wanted)
        if array.shape != wanted:
            raise SchemaError(
                f"shape mismatch for {key_name(key)!r}: got {list(array.shape)}, expected {list(wanted)}",
                hint=f"the field has {entry} per row",
            )
        return array.reshape(math.prod(shape), *entry.shape)

    def _field_of(self, key: Key) -> Field:
        schema = self._store.storage.require_schema()
        if key not in schema:
            raise NotFoundError(
                f"Key {key_name(key)!r} does not exist in the storage", hint=f"it has {schema!r}"
            )
        if schema[key].dtype == OBJECT:
            raise SchemaError(f"{key_name(key)!r} holds objects", hint="set whole rows: rb[index] = rows")
        return schema[key]

    def _find_ids(self, index: Any, generation: Any, id: Any) -> tuple[IntArray, tuple[int, ...]]:
        """Return the ids of the rows to patch, 0 for rows that never existed, and the shape of the rows.

        Shape of the ids `(n,)`.
        """
        if (index is None) != (generation is None) or (index is None) == (id is None):
            raise ArgumentError("update_if_present takes index and generation, or id")
        if id is not None:
            named = _whole_numbers(id)
            return named.reshape(-1), named.shape or (1,)
        storage = self._store.storage
        given = _whole_numbers(self._index.ravel(index))
        numbers = given.reshape(-1)
        generations = _whole_numbers(generation).reshape(-1)
        if numbers.size != generations.size:
            raise SchemaError(
                "index and generation must address the same number of records, got "
                f"{numbers.size} indices and {generations.size} generations"
            )
        ids = numbers + 1 if storage.capacity is None else generations * storage.capacity + numbers + 1
        wrong = (generations < 0) | (numbers < 0) | (numbers >= storage.max_size)
        if storage.capacity is None:
            wrong |= generations > 0
        ids[wrong] = 0
        return ids, given.shape or (1,)

    def _versions(self, key: Key, version: Any, count: int) -> Array:
        """Return the versions of a patch in the field's dtype and shape. Shape `(count, *row shape)`."""
        entry = self._field_of(key)
        if entry.row_items != 1 or entry.dtype in ("bfloat16", "complex64"):
            raise SchemaError(
                f"version_key {key_name(key)!r} must be one number per row, and is {entry}",
            )
        values = version if isinstance(version, torch.Tensor) else np.asarray(version)
        if values.ndim > 0 and int(np.prod(values.shape)) != count:
            raise SchemaError(
                f"version is one number, or one for each of {count} rows, not of shape {list(values.shape)}"
            )
        return self._fit(key, version if values.ndim == 0 else values.reshape(-1), (count,))

    def _compare_versions(
        self, key: Key, versions: Array, ids: IntArray, live: Flags, require_newer: bool
    ) -> Flags:
        """Return which of the existing rows accept a patch of these versions. Shapes `(n,)`."""
        accepted = np.zeros(ids.size, np.bool_)
        rows = np.flatnonzero(live)
        if rows.size:
            (stored,) = self._store.storage.read(
                ids[rows], [self._store.storage.require_schema().place_of(key)]
            )
            incoming, stored = versions.reshape(-1)[rows], stored.reshape(-1)
            better = incoming > stored if require_newer else incoming >= stored
            # If a row is named twice, the highest version is used, and the last of equal versions.
            order = np.lexsort((rows, incoming, ids[rows]))
            best = np.append(np.diff(ids[rows][order]) != 0, True)
            highest = np.zeros(rows.size, np.bool_)
            highest[order[best]] = True
            accepted[rows] = better & highest
        return accepted


def check_can_update(storage: ReadView, writer: Writer, *, by_index: bool) -> None:
    """Raise StateError if a storage does not support conditional updates.

    Args:
        storage: The storage.
        writer: The writer of the buffer.
        by_index: Whether rows are identified by index and generation instead of id.
    """
    if storage.ranking is not None:
        raise StateError(
            "a new row takes over the id of the row that it replaces, so that a patch could change the "
            "wrong row",
            hint="rb[index] = ... and set_at_() change the current rows",
        )
    if storage.row_traits.whole or (by_index and not writer.tracks_generations):
        raise StateError(
            f"Conditional updates are not supported by {type(storage).__name__} with "
            f"{type(writer).__name__}: rows are tensors by key, and by index only with a writer that "
            "tracks generations",
            hint="give id=, or use RoundRobinWriter(track_generations=True)",
        )


def leaves_of(fields: Patch) -> dict[Key, Any]:
    """Return values by key, with nested mappings flattened."""
    found: dict[Key, Any] = {}
    for name, value in fields.items():
        key = to_key(name)
        if isinstance(value, (Mapping, TensorDictBase)) and not is_non_tensor(value):
            found |= {(*key, *rest): leaf for rest, leaf in leaves_of(value).items()}
        else:
            found[key] = value
    return found


def as_field(entry: Field, value: Any) -> Array:
    """Convert values to a field's dtype.

    Raises:
        SchemaError: The conversion could lose information. A Python number has no width: a float is rounded,
            but does not become infinite. Elements of a NumPy array are masked.
    """
    name = key_name(entry.key)
    check_unmasked(entry.key, value)
    from_tensor = isinstance(value, (torch.Tensor, np.ndarray, np.generic))
    dtype, cast, lost = _cast_tensor(entry, value) if from_tensor else _cast_numbers(entry, value)
    if cast is None:
        raise SchemaError(
            f"dtype mismatch for {name!r}: got {dtype}, the storage holds {entry.dtype}",
            hint=f"convert it to {entry.dtype} yourself",
        )
    if lost is not None:
        raise SchemaError(
            f"{name!r} is {entry}, which cannot hold {lost}", hint=f"give numbers that {entry.dtype} can hold"
        )
    return cast


#: The dtype of values; the values in the dtype of a field, or None if that needs another kind of number; and
#: the first number that the conversion has lost, or None.
_Cast = tuple[str, Array | None, Any]


def _cast_tensor(entry: Field, value: Any) -> _Cast:
    tensor = as_tensor(value).detach().cpu()
    dtype = str(tensor.dtype).removeprefix("torch.")
    array: Array = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    if dtype == entry.dtype:
        return dtype, array, None
    if "bfloat16" in (dtype, entry.dtype) or not np.can_cast(array.dtype, entry.numpy_dtype, "safe"):
        return dtype, None, None
    cast = cast_floats(array, entry.numpy_dtype)
    return dtype, cast, find_lost(array, cast)


def _cast_numbers(entry: Field, value: Any) -> _Cast:
    array = np.asarray(value)
    given, kind = array.dtype.kind, entry.numpy_dtype.kind
    if given not in "biuf":
        return str(array.dtype), None, None
    if entry.dtype == "bfloat16":
        rounded = torch.from_numpy(cast_floats(array, np.float32)).to(torch.bfloat16)
        cast: Array = rounded.view(torch.uint16).numpy()
        lost = find_lost(array, widen_bfloat16(cast))
    else:
        cast = cast_floats(array, entry.numpy_dtype)
        if kind not in "fc" and not np.array_equal(cast, array):
            return str(array.dtype), None, None
        lost = find_lost(array, cast)
    if lost is None and (kind in "fc" or entry.dtype == "bfloat16"):
        lost = find_rounded(value, array, entry.dtype)
    return str(array.dtype), cast, lost


def _narrow(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _version_key(name: str | tuple[str, ...], fields: Mapping[Key, Any]) -> Key:
    if isinstance(name, str) and "." in name:
        raise SchemaError(
            f"Dotted-string version keys are not supported: got {name!r}",
            hint=f"give the key as a tuple: {tuple(name.split('.'))!r}",
        )
    key = to_key(name)
    if key in fields:
        raise SchemaError(f"version_key {key_name(key)!r} may not appear in patch")
    return key


def _whole_numbers(values: Any) -> IntArray:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise ArgumentError(f"numbers of rows must be integers, got {array.dtype}")
    return array.astype(np.int64)
