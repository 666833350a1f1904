"""A storage's rows by index: `get` and `set`, as torchrl's storages have them, and `[]`.

Used by storages and buffers. Rows are returned in the storage's container type. Writes go through
`Storage.change` or `Storage.write`, with the guarantees of these methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Array, IntArray, Window
from expstore.errors import ArgumentError, NoRowError, SchemaError, StateError
from expstore.schema.row_selection import in_shape, pick
from expstore.schema.schema import Schema
from expstore.storages.batch import Rows, now_us
from expstore.storages.read_view import keys_for
from expstore.storages.sessions import observations_of, reopen_session, warn_of, warn_once

if TYPE_CHECKING:
    import torch

    from expstore.core.idempotency import WriteKey
    from expstore.data.batch import Batch
    from expstore.data.containers import Layout
    from expstore.episodes.segmentation import Steps
    from expstore.storages.base import Storage
    from expstore.storages.read_view import ReadView

PATIENCE = 3  # reads that may find overwritten rows before the writer is blocked
OVERTAKEN = "the writer overwrites rows faster than they can be read"


def layout_of(storage: ReadView, dim: int | None = None) -> Layout:
    """Return which dims of a batch are rows of a storage; `dim` is time, by default the last of them."""
    from expstore.data.containers import Layout

    traits = storage.row_traits
    return Layout(
        all_dims=storage.description.flatten,
        ndim=storage.ndim,
        dim=storage.ndim - 1 if dim is None else dim,
        objects=traits.whole,
        typed=traits.variable and not traits.objects,
    )


def find(storage: ReadView, index: Any, dim: int = 0) -> tuple[IntArray, tuple[int, ...]]:
    """Return the ids of the rows that an index selects, and the shape of the selection.

    Args:
        storage: The storage with the rows.
        index: An index as for a tensor of all rows: integers, slices, arrays, masks, or tuples of them.
        dim: Which dim of that tensor is time: it is swapped with the first.

    Returns:
        Flat ids, and the shape of the selection; `()` for a single row.

    Raises:
        NotFoundError: There is no such row.
    """
    index = _plain(index)
    if storage.ndim == 1 and not dim:
        return _find_flat(storage, index)
    ids = _sort_ids(storage)
    grid = ids.reshape(-1, *storage.geometry.dims).swapaxes(0, dim)
    try:
        chosen = np.asarray(grid[index])
    except IndexError as exc:
        raise NoRowError(f"no rows at {index!r}: the store has them in shape {list(grid.shape)}") from exc
    return chosen.reshape(-1), chosen.shape


def _plain(index: Any) -> Any:
    """Convert an index to NumPy's types: torch tensors and ranges become arrays, `...` becomes a slice."""
    if isinstance(index, tuple):
        return tuple(map(_plain, index))
    if index is Ellipsis:
        return slice(None)
    if hasattr(index, "detach"):
        index = index.detach().cpu().numpy()
    elif isinstance(index, range):
        index = np.arange(index.start, index.stop, index.step)
    return index


def _sort_ids(storage: ReadView) -> IntArray:
    """Return the readable ids of whole steps, in the order of their indices. Shape `(rows,)`."""
    window = storage.window
    ids = window.ids()
    if window.deleted and storage.geometry.lanes > 1:  # a repair may have deleted some cells of a step
        _, step, cells = np.unique(
            (ids - 1) // storage.geometry.lanes, return_inverse=True, return_counts=True
        )
        ids = ids[cells[step] == storage.geometry.lanes]
    ordered: IntArray = ids[np.argsort(storage.geometry.index_of(ids), kind="stable")]
    return ordered


def _find_flat(storage: ReadView, index: Any) -> tuple[IntArray, tuple[int, ...]]:
    if isinstance(index, tuple) and len(index) == 1:
        index = index[0]
    if isinstance(index, slice):
        ids = _sort_ids(storage)[index]
        return ids, ids.shape
    numbers = np.asarray(index)
    if numbers.dtype == np.bool_:
        if numbers.shape != (len(storage),):
            raise NoRowError(f"the mask has shape {numbers.shape}, the store {len(storage)} rows")
        ids = _sort_ids(storage)[numbers.astype(bool)]
        return ids, ids.shape
    if numbers.size and numbers.dtype.kind not in "iu":
        raise ArgumentError(f"an index of rows must be integers, got {numbers.dtype}")
    shape, numbers = numbers.shape, numbers.reshape(-1).astype(np.int64)
    # Where rows were deleted and not replaced by newer ones, the newest row is still number -1.
    window, wrapped = storage.window, np.where(numbers < 0, numbers + _end_of(storage), numbers)
    if wrapped.size and wrapped.min() < 0:  # name the index that the caller passed
        raise storage.geometry.build_missing_error(int(numbers[np.argmin(wrapped)]), window)
    return storage.geometry.ids_at(wrapped, window), shape


def _end_of(storage: ReadView) -> int:
    """Return the index of the next row, before a ring wraps: from it negative indices are counted."""
    return storage.last if storage.capacity is None else storage.window.size


def ids_to_weigh(storage: ReadView, indices: IntArray) -> IntArray:
    """Return the ids of rows for whose indices priorities were computed. Shapes `(n,)`.

    Rows that have left the window meanwhile have ids, too: `Storage.set_priorities` ignores them.

    Raises:
        NotFoundError: There is no row with an index, or there never was one in a storage with a window.
    """
    has_window = storage.description.window_rows is not None
    return storage.geometry.ids_at(indices, Window(0, storage.last) if has_window else storage.window)


def read_rows(
    storage: ReadView,
    locate: Callable[[], IntArray],
    places: Sequence[int] | None = None,
    *,
    read: Callable[[IntArray], tuple[list[Array], bool]] | None = None,
) -> tuple[IntArray, list[Array]]:
    """Copy rows out that are not overwritten while they are copied.

    Args:
        storage: The storage with the rows.
        locate: Returns the ids of the rows; called again if rows were overwritten meanwhile.
        places: Positions of the fields to read; None: all.
        read: Copies rows and returns whether all of them are whole; None: `storage.read` and `intact`.

    Returns:
        Ids, and one array per field. Shapes `(n,)` and `(n, *row shape)`.

    Raises:
        NotFoundError: There is no such row.
        StateError: The storage is closed; or a writer in another process overwrites the rows too fast.
    """
    if storage.closed:
        raise StateError("the store is closed", hint="open it again with expstore.open()")

    def copy(ids: IntArray) -> tuple[list[Array], bool]:
        columns = storage.read(ids, places)
        return columns, storage.intact(ids)

    take = copy if read is None else read
    for _ in range(PATIENCE):
        ids = locate()
        columns, whole = take(ids)
        if whole:
            return ids, columns
    with storage.lock:
        ids = locate()
        columns, whole = take(ids)
    if storage.follows and not whole:
        raise StateError(OVERTAKEN, hint="read fewer rows at once, or give the store a larger capacity")
    return ids, columns


def read_present(
    storage: ReadView, ids: IntArray, places: Sequence[int] | None = None
) -> tuple[IntArray, list[Array]]:
    """Copy out the rows that are still in the store.

    Args:
        storage: The storage with the rows.
        ids: Ids of the rows. Shape `(n,)`.
        places: Positions of the fields to read; None: all.

    Returns:
        Ids, in the same order, and one array per field. Shapes `(m,)` and `(m, *row shape)`.

    Raises:
        StateError: The storage is closed; or a writer in another process overwrites the rows too fast.
    """
    return read_rows(storage, lambda: ids[storage.stored.holds(ids)], places)


def get(storage: ReadView, index: Any, dim: int = 0) -> Any:
    """Read rows by index, in the container type in which they were written.

    Args:
        storage: The storage with the rows.
        index: An index as for a tensor of all rows: integers, slices, arrays, masks, or tuples of them.
        dim: Which dim of that tensor is time: it is swapped with the first.
    """
    from expstore.data.containers import form_of

    shape: tuple[int, ...] = ()

    def locate() -> IntArray:
        nonlocal shape
        ids, shape = find(storage, index, dim)
        return ids

    _, columns = read_rows(storage, locate)
    form = form_of(storage)
    rows = form.build(in_shape(columns, shape), shape, {})
    return rows if storage.device is None or storage.device.type == "cpu" else _move(rows, storage.device)


def _move(rows: Any, device: torch.device) -> Any:
    from torch.utils._pytree import tree_map

    def can_move(thing: Any) -> bool:
        return hasattr(thing, "to")

    return tree_map(lambda thing: thing.to(device) if can_move(thing) else thing, rows, is_leaf=can_move)


def contains(storage: ReadView, item: Any) -> Any:
    """Return which indices can be read, as torchrl's storages do."""
    import torch

    numbers = np.asarray(_plain(item))
    if numbers.dtype.kind not in "iu":
        raise ArgumentError(f"an index of rows must be integers, got {type(item).__name__}")
    there = np.zeros(storage.max_size if storage.capacity is not None else storage.last, bool)
    there[storage.geometry.index_of(storage.window.ids())] = True
    wrapped = np.where(numbers < 0, numbers + _end_of(storage), numbers)
    inside = (wrapped >= 0) & (wrapped < there.size)
    found = inside & there[np.where(inside, wrapped, 0)] if there.size else inside
    return torch.from_numpy(np.asarray(found)) if isinstance(item, torch.Tensor) else bool(found)


def rows_of(storage: ReadView) -> Iterator[Any]:
    """Yield the rows in the order of their indices; steps of time if `ndim` is larger than 1."""
    ids = _sort_ids(storage)
    steps = np.arange(ids.size // storage.geometry.lanes)
    for number in (storage.geometry.index_of(ids) if storage.ndim == 1 else steps).tolist():
        yield get(storage, number)


def put(storage: Storage, index: Any, data: Any, *, appends: bool = True) -> None:
    """Replace rows by index; rows right after the last one are appended.

    Args:
        storage: The storage with the rows.
        index: One integer, several, or a slice; steps of time if `ndim` is larger than 1.
        data: One row for a single integer, otherwise one row per index.
        appends: Whether rows right after the last one are appended; False: such an index is an error.

    Raises:
        NotFoundError: There is no such row, and it would not be the next row.
        SchemaError: The rows do not fit the schema.
    """
    from expstore.data.containers import take

    index = _plain(index)
    single = not isinstance(index, (slice, tuple)) and np.ndim(index) == 0
    storage.writer()
    batch = take(data, layout_of(storage, 0), single=single)
    add_new_fields(storage, batch)
    with storage.lock:
        storage.writer()
        new = _next_rows(storage, index, batch) if appends else None
        if new is None:
            replace_rows(storage, find(storage, index)[0], batch)
        elif new.all():
            _append(storage, batch)
        else:
            former = find(storage, np.asarray(index).reshape(-1)[~new])[0]
            replace_rows(storage, former, _part_of(batch, ~new))
            _append(storage, _part_of(batch, new))


def _next_rows(storage: ReadView, index: Any, batch: Batch) -> Array | None:
    """Return which rows of a batch are appended after the last row; None: the index does not allow it.

    Shape `(n,)`, bool. If `ndim` is larger than 1, either all rows are appended or none.
    """
    if isinstance(index, (slice, tuple)) or np.asarray(index).dtype.kind not in "iu":
        return None
    lanes, numbers = math.prod(batch.dims), np.asarray(index).reshape(-1)
    have = _end_of(storage) // lanes
    new: Array = numbers >= have
    count = int(np.count_nonzero(new))
    fits = storage.capacity is None or storage.window.size + count * lanes <= storage.capacity
    if not count or not fits or numbers.size * lanes != batch.count:
        return None
    if lanes > 1 and count < numbers.size:
        return None
    if not np.array_equal(numbers[new], np.arange(have, have + count)):
        return None
    return np.repeat(new, lanes)


def _part_of(batch: Batch, rows: Array) -> Batch:
    """Return some rows of a batch. Shape of `rows` `(n,)`, bool."""
    arrays = [pick(array, rows) for array in batch.arrays]
    return replace(batch.keep(rows), keys=batch.keys, dtypes=batch.dtypes, arrays=arrays)


def rows_along(data: Any, ndim: int) -> tuple[int, ...]:
    """Return how many rows a batch has along its first dims.

    Args:
        data: Any value that `extend` accepts: a TensorDict, a tensor, a tree of tensors.
        ndim: How many dims are rows.

    Raises:
        SchemaError: The batch has fewer dims, or cannot be stored.
    """
    from expstore.data.containers import Layout, take

    batch = take(data, Layout(ndim=ndim))
    return (batch.count // math.prod(batch.dims), *batch.dims)


def append(storage: Storage, data: Any) -> None:
    """Append a batch without informing samplers; its first `ndim` dims are rows."""
    from expstore.data.containers import take

    with storage.lock:
        storage.writer()
        _append(storage, take(data, layout_of(storage, 0)))


def _append(storage: Storage, batch: Batch) -> None:
    """Append rows without informing samplers."""
    from expstore.data.batch import StepReader

    schema = prepare(storage, batch)
    columns = batch.columns(schema)
    steps = StepReader(schema, storage.keys).read(columns, batch)
    append_rows(storage, columns, steps)


def append_rows(
    storage: Storage,
    columns: Sequence[Array],
    steps: Steps,
    *,
    source: str | None = None,
    info: str = "",
    key: WriteKey | None = None,
) -> IntArray:
    """Write rows under the next ids; the storage's lock is held. Returns the ids. Shape `(n,)`."""
    if steps.session is not None:
        reopen_session(storage, steps.session)
    window, table, time = storage.state.stored, storage.state.episodes, now_us()
    first, observations = window.last + 1, observations_of(storage, columns, steps)
    assignment = table.assign(
        steps, source=source, observations=observations, low=window.low, first_id=first, time=time
    )
    rows = Rows(first, steps.count, columns, assignment, time, info, key)
    storage.write(rows)
    capacity = storage.geometry.capacity
    if capacity is not None and steps.count > capacity:
        warn_once(
            storage,
            f"a batch of {steps.count} rows was written to a store with capacity={capacity}: its first "
            f"{steps.count - capacity} rows are lost at once; use a larger capacity, or smaller batches",
            "long batch",
        )
    if assignment.sources or assignment.restarted:
        warn_of(storage, assignment, source, steps.session)
    ids: IntArray = assignment.numbers[0]
    return ids


def prepare(storage: Storage, batch: Batch) -> Schema:
    """Return the schema; the first batch of rows determines it.

    Raises:
        SchemaError: The batch has another container type than the rows in the storage.
    """
    from expstore.data.containers import check_form

    if storage.schema is None:
        schema = Schema.infer(batch.signature(), batch.form)
        storage.prepare(schema, keys_for(storage, schema), batch.dims, row_class=batch.kind)
        return storage.require_schema()
    check_form(batch, storage.schema)
    storage.geometry.check_dims(batch.dims)
    return storage.schema


def add_new_fields(storage: ReadView, batch: Batch) -> bool:
    """Add the fields of a batch that the storage lacks, if storages of this kind do so; return whether.

    Rows that exist get zeros, and so do later rows without the field. Nothing is changed unless the batch
    fits the storage with the fields. The caller holds no lock of the storage.

    Raises:
        SchemaError: The batch does not fit, or a field cannot be added.
        StateError: The storage cannot be written.
    """
    known = storage.schema
    if known is None or not storage.row_traits.grows or batch.arranged is not None:
        return False
    new = [place for place, key in enumerate(batch.keys) if key not in known]
    if not new or storage.settings.specs():
        return False
    from expstore.data.containers import check_form
    from expstore.storages.new_field import NewField, check_new_field

    check_form(batch, known)
    fields, grown = storage.writer().fields, known
    found = Schema.infer(batch.signature(), batch.form)
    added = []
    for place in new:
        entry = found[batch.keys[place]]
        check_new_field(storage, entry)
        zero = np.zeros(entry.shape, entry.numpy_dtype)
        grown = grown.grow(entry, zero)
        added.append(NewField(entry=entry, default=zero, fill=zero))
    batch.select_columns(grown)
    if fields is None:
        return False
    for new_field in added:
        fields.add(new_field)
    return True


def replace_rows(storage: Storage, ids: IntArray, batch: Batch) -> None:
    """Replace rows by a batch. The caller holds the storage's lock.

    Args:
        storage: The storage with the rows.
        ids: Ids of the rows; if an id occurs twice, its last row is used. Shape `(n,)`.
        batch: One row for each id. A field that was added later and is not in the batch is not changed.

    Raises:
        SchemaError: The number of rows differs from the number of ids, or the rows do not fit the schema.
    """
    if batch.count != ids.size:
        raise SchemaError(f"cannot replace {ids.size} rows by {batch.count} rows")
    from expstore.data.containers import check_form

    schema = storage.require_schema()
    check_form(batch, schema)
    places, columns = batch.select_columns(schema)
    if ids.size > 1:
        count = ids.size
        ids, last = np.unique(ids[::-1], return_index=True)
        columns = [pick(column, count - 1 - last) for column in columns]
    storage.change(ids, places, columns)
