"""Changes of rows that are there: fields by index, and patches that reach no row but their own.

Buffers are built on it. It never adds a row, moves one or takes one away; what a change does to a file is
the storage's business.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase, is_non_tensor

from expstore.core.values import Array, IntArray, Key, key_name, to_key
from expstore.data.variable_rows import fit_values
from expstore.errors import NotFoundError, SchemaError, StateError
from expstore.samplers.base import Sampler
from expstore.schema.row_selection import pick
from expstore.schema.schema import OBJECT, Field
from expstore.storages.indexing import find
from expstore.storages.read_view import ReadView
from expstore.writers.writers import Writer

__all__ = ["ConditionalUpdateResult", "Patch", "Patching", "leaves_of"]

Flags = NDArray[np.bool_]
Patch: TypeAlias = Mapping[Any, Any] | TensorDictBase


@dataclass(frozen=True, slots=True)
class ConditionalUpdateResult:
    """Say what `update_if_present` did with each of the rows that it was given.

    Args:
        updated: Whether it was changed. Shape that of the rows given, bool.
        version_rejected: Whether it is there and was left as it is because of its version; None where
            versions were not compared. The same shape, bool.

    Example:
        >>> result = rb.update_if_present(id=sample["id"], patch={"value": values})
        >>> result.updated_count, result.stale_count
        (32, 0)
    """

    updated: torch.Tensor
    version_rejected: torch.Tensor | None = None

    @property
    def updated_count(self) -> int:
        """How many rows were changed."""
        return int(self.updated.sum())

    @property
    def version_rejected_count(self) -> int:
        """How many are there and were left as they are because of their version."""
        return 0 if self.version_rejected is None else int(self.version_rejected.sum())

    @property
    def stale_count(self) -> int:
        """How many are not there any more."""
        return self.updated.numel() - self.updated_count - self.version_rejected_count


class Patching:
    """Change fields of rows that are there.

    On disk each call is there as a whole or not at all after any crash, and lasts when it returns. Threads:
    a change waits for the writer. Processes: only the one that writes may change rows.
    """

    _storage: ReadView
    _sampler: Sampler
    _writer: Writer
    dim_extend: int

    @abstractmethod
    def _numbers(self, index: Any) -> Array:
        """Return rows' numbers, given as users know them."""

    def set_at_(self, key: str | tuple[str, ...], value: Any, index: Any) -> Self:
        """Set a field of some rows; return the buffer.

        Args:
            key: Which field.
            value: Its values; what can be broadcast counts for all of them. Shape `(*index shape, *row
                shape)`.
            index: Which rows, as for `[]`.

        Raises:
            NotFoundError: There is no such field, or no such row.
            SchemaError: The values do not fit; nothing was changed.
        """
        self._assign({to_key(key): value}, index)
        return self

    def set_(self, key: str | tuple[str, ...], value: Any) -> Self:
        """Set a field of all rows, in the order of their indices; return the buffer.

        Args:
            key: Which field.
            value: Its values. Shape `(rows, *row shape)`, or what can be broadcast to it.

        Raises:
            NotFoundError: There is no such field.
            SchemaError: The values do not fit; nothing was changed.
        """
        return self.set_at_(key, value, slice(None))

    def update_(
        self, input_dict_or_td: Patch, clone: bool = False, *, keys_to_update: Sequence[Any] | None = None
    ) -> Self:
        """Set several fields of all rows, in the order of their indices; return the buffer.

        Args:
            input_dict_or_td: Values by key. Shapes `(rows, *row shape)`, or what can be broadcast to it.
            clone: As in TorchRL; values are copied in any case.
            keys_to_update: Leave the others out; None: none.

        Raises:
            NotFoundError: There is no such field.
            SchemaError: Values do not fit; nothing was changed.
        """
        fields = leaves_of(input_dict_or_td)
        if keys_to_update is not None:
            wanted = [to_key(key) for key in keys_to_update]
            fields = {k: v for k, v in fields.items() if any(k[: len(key)] == key for key in wanted)}
        self._assign(fields, slice(None))
        return self

    def mark_update(self, index: Any) -> None:
        """Tell the sampler that rows were changed: by priority they begin anew, at the largest one so far.

        Args:
            index: Which rows, as `extend` returns it.
        """
        self._sampler.mark_update(index, storage=self._storage)

    def update_if_present(
        self,
        *,
        index: Any = None,
        generation: Any = None,
        patch: Patch,
        version_key: str | tuple[str, ...] | None = None,
        version: Any = None,
        require_newer: bool = False,
        id: Any = None,
    ) -> ConditionalUpdateResult:
        """Change fields of those rows that are still there; no other row is ever reached.

        Args:
            index: Which rows, as samples say. Shape `(n,)`, or `(..., ndim)` or a tuple of `ndim` where that
                is larger than 1.
            generation: Their `index_generation`, which samples carry if the writer tracks it. One per row.
            patch: New values by key. Shapes `(n, *row shape)`; where `ndim` is larger than 1 the `n` rows may
                have as many dims: `(time, lane, *row shape)`.
            version_key: A field with one number per row, which is set to `version`; only rows whose number
                is not larger are changed.
            version: The version of this patch, one for all rows or one each. Shape `()` or `(n,)`.
            require_newer: Leave rows as they are whose version is the same, too.
            id: Which rows, in the place of index and generation. Any shape. Of a row that is named twice
                the highest version counts, else the last one.

        Returns:
            What was done with each row, in the shape in which rows were given.

        Raises:
            NotFoundError: There is no such field (a KeyError).
            SchemaError: Values do not fit (a ValueError); nothing was changed.
            StateError: There are no rows yet; the writer does not track generations and `index` is given; or
                rows take over the ids of others, as where the best ones stay.

        Example:
            >>> rb.update_if_present(id=sample["id"], patch={"advantage": advantages})
        """
        storage = self._storage
        self._check_patching(id is None)
        with storage.lock:
            storage.writer()
            if storage.schema is None:
                raise StateError(
                    "Conditional updates require an initialized storage", hint="extend() it first"
                )
            ids, shape = self._patched_ids(index, generation, id)
            if (version_key is None) != (version is None):
                raise SchemaError("version_key and version must be provided together")
            fields = {key: self._patched(key, value, ids.size) for key, value in leaves_of(patch).items()}
            live = storage.window.holds(ids)
            rejected: Flags | None = None
            if version_key is not None:
                key = _version_key(version_key, fields)
                fields[key] = self._versions(key, version, ids.size)
                rejected = live & ~self._accepted(key, fields[key], ids, live, require_newer)
                live &= ~rejected
            self._apply(ids[live], {key: pick(values, live) for key, values in fields.items()})
        return ConditionalUpdateResult(
            torch.from_numpy(live.reshape(shape)),
            None if rejected is None else torch.from_numpy(rejected.reshape(shape)),
        )

    def submit_update_if_present(
        self,
        *,
        index: Any = None,
        generation: Any = None,
        patch: Patch,
        version_key: str | tuple[str, ...] | None = None,
        version: Any = None,
        require_newer: bool = False,
        id: Any = None,
    ) -> Future[ConditionalUpdateResult]:
        """Do as `update_if_present`, and return a future that is done.

        Nothing has to be put in order after it: a batch made ahead is drawn again if its rows were changed.

        Args:
            index: As there, and so are the others.
            generation: See there.
            patch: See there.
            version_key: See there.
            version: See there.
            require_newer: See there.
            id: See there.
        """
        done: Future[ConditionalUpdateResult] = Future()
        options: dict[str, Any] = {
            "version_key": version_key,
            "version": version,
            "require_newer": require_newer,
        }
        try:
            result = self.update_if_present(index=index, generation=generation, patch=patch, id=id, **options)
        except Exception as exc:
            done.set_exception(exc)
        else:
            done.set_result(result)
        return done

    # -- helpers ---------------------------------------------------------------------------------

    def _assign(self, fields: Mapping[Key, Any], index: Any) -> None:
        storage = self._storage
        with storage.lock:
            storage.writer()
            storage.require_schema()
            ids, shape = find(storage, index, self.dim_extend)
            self._apply(ids, {key: self._fitted(key, value, shape) for key, value in fields.items()})

    def _apply(self, ids: IntArray, fields: Mapping[Key, Array]) -> None:
        """Change rows; of one that is named twice the last values count."""
        if not (ids.size and fields):
            return
        names, last = np.unique(ids[::-1], return_index=True)
        columns = [pick(values, ids.size - 1 - last) for values in fields.values()]
        self._storage.writer().change(
            names, [self._storage.require_schema().place_of(key) for key in fields], columns
        )

    def _patched(self, key: Key, value: Any, count: int) -> Array:
        """Return the column of a patch of so many rows, which may be given in as many dims as make rows."""
        dims, shape = self._storage.ndim, np.shape(value)
        if dims > 1 and len(shape) >= dims and math.prod(shape[:dims]) == count:
            value = value.reshape(count, *shape[dims:])
        return self._fitted(key, value, (count,), spread=False)

    def _fitted(self, key: Key, value: Any, shape: tuple[int, ...], *, spread: bool = True) -> Array:
        """Return the column that values make for rows of this shape; with `spread` one for all is enough.

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
        schema = self._storage.require_schema()
        if key not in schema:
            raise NotFoundError(
                f"Key {key_name(key)!r} does not exist in the storage", hint=f"it has {schema!r}"
            )
        if schema[key].dtype == OBJECT:
            raise SchemaError(f"{key_name(key)!r} holds objects", hint="set whole rows: rb[index] = rows")
        return schema[key]

    def _check_patching(self, by_index: bool) -> None:
        storage, writer = self._storage, self._writer
        if storage.ranking is not None:
            raise StateError(
                "a row that takes the place of another takes over its id, so that a patch may reach another "
                "row than it was made for",
                hint="rb[index] = and set_at_() change the rows that are there now",
            )
        if storage.row_traits.whole or (by_index and not writer.tracks_generations):
            raise StateError(
                f"Conditional updates are not supported by {type(storage).__name__} with "
                f"{type(writer).__name__}: rows are tensors by key, and by index only with a writer that "
                "tracks generations",
                hint="give id=, or use RoundRobinWriter(track_generations=True)",
            )

    def _patched_ids(self, index: Any, generation: Any, id: Any) -> tuple[IntArray, tuple[int, ...]]:
        """Return the ids of the rows that are meant, 0 for those that were never there; and the rows' shape.

        Shape of the ids `(n,)`.
        """
        if (index is None) != (generation is None) or (index is None) == (id is None):
            raise TypeError("update_if_present takes index and generation, or id")
        if id is not None:
            named = _whole_numbers(id)
            return named.reshape(-1), named.shape or (1,)
        storage = self._storage
        given = _whole_numbers(self._numbers(index))
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
        """Return the versions of a patch as the field keeps them. Shape `(count, *row shape)`."""
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
        return self._fitted(key, version if values.ndim == 0 else values.reshape(-1), (count,))

    def _accepted(self, key: Key, versions: Array, ids: IntArray, live: Flags, require_newer: bool) -> Flags:
        """Return which of the rows that are there take a patch of these versions. Shapes `(n,)`."""
        accepted = np.zeros(ids.size, np.bool_)
        rows = np.flatnonzero(live)
        if rows.size:
            (stored,) = self._storage.read(ids[rows], [self._storage.require_schema().place_of(key)])
            coming, stored = versions.reshape(-1)[rows], stored.reshape(-1)
            better = coming > stored if require_newer else coming >= stored
            # Of a row that is named twice the highest version counts, of equal ones the last.
            order = np.lexsort((rows, coming, ids[rows]))
            best = np.append(np.diff(ids[rows][order]) != 0, True)
            highest = np.zeros(rows.size, np.bool_)
            highest[order[best]] = True
            accepted[rows] = better & highest
        return accepted


def leaves_of(fields: Patch) -> dict[Key, Any]:
    """Return values by key, nested mappings unfolded."""
    found: dict[Key, Any] = {}
    for name, value in fields.items():
        key = to_key(name)
        if isinstance(value, (Mapping, TensorDictBase)) and not is_non_tensor(value):
            found |= {(*key, *rest): leaf for rest, leaf in leaves_of(value).items()}
        else:
            found[key] = value
    return found


def as_field(entry: Field, value: Any) -> Array:
    """Return values with a field's dtype.

    Raises:
        SchemaError: They might lose something. A number of Python's own has no width, and may be rounded.
    """
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        tensor = torch.as_tensor(value).detach().cpu()
        dtype = str(tensor.dtype).removeprefix("torch.")
        bits = tensor.dtype is torch.bfloat16
        array = tensor.view(torch.uint16).numpy() if bits else tensor.numpy()
        fits = dtype == entry.dtype or (
            "bfloat16" not in (dtype, entry.dtype) and np.can_cast(array.dtype, entry.numpy_dtype, "safe")
        )
    else:
        array = np.asarray(value)
        dtype, kind = str(array.dtype), entry.numpy_dtype.kind
        if entry.dtype == "bfloat16" and array.dtype.kind in "bif":
            array = torch.as_tensor(value, dtype=torch.bfloat16).view(torch.uint16).numpy()
        same = array.dtype.kind in "biuf" and np.array_equal(array.astype(entry.numpy_dtype), array)
        fits = same or (array.dtype.kind == "f" and kind in "fc")
    if not fits:
        raise SchemaError(
            f"dtype mismatch for {key_name(entry.key)!r}: got {dtype}, the storage holds {entry.dtype}",
            hint=f"convert it to {entry.dtype} yourself",
        )
    return array.astype(entry.numpy_dtype, copy=False)


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
        raise TypeError(f"rows are found by whole numbers, not by {array.dtype}")
    return array.astype(np.int64)
