"""Read access to a store: the same for its writer, for a process that only reads, and for rows in RAM.

Samplers, SQL, transforms and exports get a `ReadView`. `expstore.storages.base.Storage` adds writing. The
classes before it are its locks, the counters by which derived data is found to be stale, and the buffers that
use it; the functions after it read rows by index, in the storage's container type, and rows by id that other
threads may overwrite meanwhile.
"""

from __future__ import annotations

import threading
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from expstore.core.change_log import Changes
from expstore.core.counters import Counters
from expstore.core.draw_state import DrawState
from expstore.core.geometry import RingGeometry
from expstore.core.lock_order import LockOrder
from expstore.core.torchrl_keywords import VoidAttribute
from expstore.core.torchrl_members import find_member
from expstore.core.values import Array, IntArray, Ranking, Window
from expstore.disk.fair_lock import FairLock
from expstore.disk.files import Disk
from expstore.episodes.table import EpisodeTable
from expstore.errors import ArgumentError, NoRowError, StateError
from expstore.schema.arrow_sizes import row_sizes
from expstore.schema.field_roles import Keys, find_keys
from expstore.schema.row_selection import in_shape
from expstore.schema.row_traits import RowTraits
from expstore.schema.schema import Schema
from expstore.storages.columns.priorities import Priorities
from expstore.storages.description import Description
from expstore.storages.index_protocol import IndexLink
from expstore.storages.row_settings import ReadSettings
from expstore.storages.row_state import RowState
from expstore.storages.run_index import Runs

if TYPE_CHECKING:
    import torch

    from expstore.data.batch import Layout
    from expstore.storages.base import Storage
    from expstore.storages.capabilities import Shipping
    from expstore.storages.format.manifest import Manifest


_Found = TypeVar("_Found")

#: Number of rows whose sizes are found by one read.
_SOME_ROWS = 64


class Locks:
    """The locks that more than one object takes.

    Threads: one that holds a lock takes only locks after it. Processes: a forked child has its own copies,
    which may be held forever; it opens the store again for reading.
    """

    __slots__ = ("episodes", "extend", "order", "reshaping", "sampled", "storage")

    def __init__(self) -> None:
        #: The lock order of this storage.
        self.order = LockOrder()
        #: Held for a whole `extend`, so that batches are appended one after the other; short operations do
        #: not take it.
        self.extend = self.order.rank_lock("extend", FairLock())
        #: Lets one field be added or dropped at a time.
        self.reshaping = Reshaping(self.order)
        #: Held by the thread that writes.
        self.storage = self.order.rank_lock("storage", threading.RLock())
        #: Held while rows are drawn by their sample counts, and while these counts change.
        self.sampled = self.order.rank_lock("sampled", threading.RLock())
        #: Held while a record is appended, and while episodes and window are updated for it.
        self.episodes = self.order.rank_lock("episodes", threading.Lock())


class Reshaping:
    """Let one thread at a time add or drop a field.

    Args:
        order: The lock order of the storage.
    """

    def __init__(self, order: LockOrder) -> None:
        self._lock = order.rank_lock("reshaping", threading.RLock())
        self._inside = False

    @contextmanager
    def act(self) -> Iterator[None]:
        """Hold the right to add or drop a field during the block; wait for another thread that has it.

        Raises:
            StateError: This thread is already adding or dropping a field.
        """
        with self._lock:
            if self._inside:
                raise StateError(
                    "this thread is already adding or dropping a field", hint="finish that change first"
                )
            self._inside = True
            try:
                yield
            finally:
                self._inside = False


class ViewVersion(NamedTuple):
    """A version of a storage's rows and fields: equal versions have the same rows and fields.

    Appended rows, and rows that leave a ring by age, change only the window.

    Args:
        content: See `Epochs.content`.
        deleted: See `Epochs.deleted`.
        fields: See `Epochs.fields`.
        changes: Incremented when a change of rows in place begins and when it ends; odd during a change.
    """

    content: int
    deleted: int
    fields: int
    changes: int


class Epochs:
    """Count changes of rows and fields other than appending and eviction by age.

    Threads: the storage's lock is held while a counter is incremented, except for `note_deleted` of a
    follower; any number read. Crashes: nothing is stored.

    Example:
        >>> from expstore.storages.read_view import Epochs
        >>> epochs = Epochs()
        >>> with epochs.note_field_change():
        ...     epochs.fields
        1
        >>> epochs.fields
        2
    """

    __slots__ = ("content", "deleted", "fields", "has_splits")

    def __init__(self) -> None:
        #: Incremented when ids may name other rows than before: after a restore, or when a journal is read
        #: again.
        self.content = 0
        #: Incremented when rows are removed other than by age (delete, clear, restore), or must all be read
        #: again.
        self.deleted = 0
        #: Schema epoch: odd while a field is added or dropped. Positions of fields are valid for one even
        #: value.
        self.fields = 0
        #: Whether an episode of a row that can be read, or could be, is not in split "train". It is set
        #: before the first such row can be read.
        self.has_splits = False

    def note_deleted(self) -> None:
        """Record that rows were removed other than by age."""
        self.deleted += 1

    def note_content(self) -> None:
        """Record that ids may name other rows from now on."""
        self.content += 1
        self.deleted += 1

    @contextmanager
    def note_field_change(self, changes: bool = True) -> Iterator[None]:
        """Record that the positions of fields change in this block, if `changes` is set."""
        self.fields += changes
        try:
            yield
        finally:
            self.fields += changes


class Holder(Protocol):
    """An object that uses a storage and caches data about its rows."""

    def _note_renewal(self, storage: Any) -> None:
        """Drop cached data: the content of the storage was replaced."""


class Holders:
    """What uses a storage: buffers, which it notifies when its content is replaced, and what ships it.

    The storage's lock is held during calls. References to buffers are weak, so that a dropped buffer can be
    garbage-collected.
    """

    __slots__ = ("_known", "shipping", "take_requests")

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Holder] = weakref.WeakSet()
        #: Ships the rows to an object storage; None: they are not shipped.
        self.shipping: Shipping | None = None
        #: Takes what other processes ask of the writer, and returns at once. The background work calls it
        #: with the storage several times a second. None: nothing can be asked.
        self.take_requests: Callable[[Any], object] | None = None

    def add(self, holder: Holder) -> None:
        """Notify an object from now on."""
        self._known.add(holder)

    def tell(self, storage: Any) -> None:
        """Notify all objects that the content of the storage was replaced."""
        for holder in list(self._known):
            holder._note_renewal(storage)


class ReadView(ABC):
    """Read rows by id, and know which ids are readable.

    The last `capacity` committed ids are readable, or all of them. Rows are copied without a lock, and
    checked afterwards (`intact`): a row that was overwritten meanwhile may be torn.

    Threads: any number read without a lock; take `lock` for a consistent state. Processes: one process writes
    to a store, any number read it. Crashes: a view writes nothing, so it loses nothing.

    Args:
        description: The description of the storage.
        disk: The disk on which files are accessed.
        path: The store's folder; None: rows are in RAM.
        index_path: The file of the SQL index; None: in memory.
    """

    kind = "abstract"
    #: Whether another process writes the rows; the locks of this object do not block it.
    follows = False
    #: Which rows are allowed, and how batches are built from them.
    row_traits = RowTraits()
    #: The device on which rows are returned, though they are stored in host memory; None: CPU.
    device: torch.device | None = None
    #: TorchRL's attribute: `dumps` has one format.
    checkpointer = VoidAttribute()
    #: The store's folder; None: rows are in RAM.
    path: Path | None
    #: The description of the storage; replaced as a whole.
    description: Description
    #: How ids, slots and indices correspond. This and the next three attributes are copied from the
    #: description, because they are read for every batch.
    geometry: RingGeometry
    #: The fields; None: no rows were written yet.
    schema: Schema | None
    #: The fields that mark trajectories, ends and rewards.
    keys: Keys
    #: How rows are ranked, if only the best are kept; None: the newest are kept.
    ranking: Ranking | None
    #: The record of slots that were changed in place.
    changes: Changes
    #: The number of the next batch, and the other state that a restart needs to draw the same batches.
    draws: DrawState
    #: The contents of expstore.json; None: rows are in RAM.
    manifest: Manifest | None = None

    if not TYPE_CHECKING:  # mypy would accept any attribute
        __getattr__ = find_member

    def __init__(
        self,
        description: Description,
        *,
        disk: Disk | None = None,
        path: Path | None = None,
        index_path: Path | None = None,
    ) -> None:
        self.path, self.disk = path, disk or Disk()
        self.locks = Locks()
        #: Counters that tell when data derived from rows is stale.
        self.epochs = Epochs()
        self._describe(description)
        self._adopt(RowState(draws=DrawState(order=self.locks.order)))
        #: Held by the thread that writes.
        self.lock = self.locks.storage
        self.counters = Counters()
        #: The readable steps of episodes.
        self.runs = Runs(self)
        #: Objects that are notified when the content is replaced.
        self.holders = Holders()
        #: Names of the warnings that were logged; see `warn_once`.
        self.warned: set[Hashable] = set()
        #: The link to the SQL index.
        self.index = IndexLink(index_path)
        self._closed = False

    def _describe(self, description: Description) -> None:
        """Set the description."""
        self.description = description
        self.geometry, self.schema = description.geometry, description.schema
        self.keys, self.ranking = description.keys, description.ranking

    def _adopt(self, state: RowState) -> None:
        """Replace the rows and their draws."""
        self.epochs.has_splits |= bool(state.episodes.split_names)
        self._state, self.draws = state, state.draws

    def _note_closed(self) -> None:
        self._closed = True

    # -- description -------------------------------------------------------------------------------

    @property
    def capacity(self) -> int | None:
        """The largest number of readable rows; None: unbounded."""
        return self.geometry.capacity

    @property
    def ndim(self) -> int:
        """How many dims of a batch are rows; TorchRL's name for it."""
        return self.geometry.ndim

    @property
    def max_size(self) -> int:
        """The largest number of readable rows; 2^63 - 1 in a storage without a capacity."""
        return self.geometry.max_size

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of rows along each dim: steps of time so far, then the sizes of the other dims."""
        return self.geometry.shape(self.window.size)

    @property
    def seed(self) -> int:
        """Key of all draws."""
        return self.description.seed

    def require_schema(self) -> Schema:
        """Return the schema.

        Raises:
            StateError: No rows were written yet.
        """
        schema = self.schema
        if schema is None:
            raise StateError("the store has no fields yet", hint="extend() it first")
        return schema

    # -- readable rows -----------------------------------------------------------------------------

    @property
    def state(self) -> RowState:
        """The current state of the rows; a restore or a recovery replaces the object."""
        return self._state

    @property
    def stored(self) -> Window:
        """The ids that can be read now: trajectories, retention, snapshots and exports see them; SQL almost.

        SQL sees those of `query_window`.
        """
        return self._state.stored

    @property
    def window(self) -> Window:
        """The ids that samplers, `len` and indices see: those of `stored`, or the newest of them."""
        rows = self.description.window_rows
        return self._state.stored if rows is None else self._state.stored.newest(rows)

    @property
    def query_window(self) -> Window:
        """The ids that SQL sees: those of `stored` whose episodes are known."""
        return self.stored

    @property
    def last(self) -> int:
        """The newest id that can be read."""
        return self._state.stored.last

    def __len__(self) -> int:
        return self.window.rows

    def __repr__(self) -> str:
        """Return kind, path, rows and capacity as text."""
        path = getattr(self, "path", None)
        parts = [] if path is None else [repr(str(path))]
        parts.append("closed" if self._closed else f"{len(self)} rows")
        if self.capacity is not None:
            parts.append(f"capacity {self.capacity}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: fields, sizes and the first rows."""
        from expstore.storages.preview import render_view

        return render_view(self, type(self).__name__)

    @property
    def write_count(self) -> int:
        """The number of rows that were ever written."""
        return self._state.write_count

    @property
    def episodes(self) -> EpisodeTable:
        """The episodes of the rows."""
        return self._state.episodes

    @property
    def priorities(self) -> Priorities:
        """The priorities of the rows, by slot."""
        return self._state.priorities

    # -- changes -----------------------------------------------------------------------------------

    @property
    def version(self) -> ViewVersion:
        """The version of rows and fields: data derived from one version is valid for an equal one."""
        epochs = self.epochs
        return ViewVersion(epochs.content, epochs.deleted, epochs.fields, self.changes.number)

    # -- reading -----------------------------------------------------------------------------------

    @abstractmethod
    def read(self, ids: IntArray, places: Sequence[int] | None = None) -> list[Array]:
        """Copy rows out. Call `intact` afterwards to check that none was overwritten meanwhile.

        Args:
            ids: Ids of the rows. Shape `(n,)`.
            places: Positions of the fields to read; None: all.

        Returns:
            One array per field. Shapes `(n, *row shape)`.
        """

    @abstractmethod
    def take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        """Copy rows out by slot, whichever rows are in the slots; use `read` for ids.

        Args:
            slots: Shape `(n,)`.
            places: Positions of the columns; those of `ROW_FIELDS` follow the schema's. None: all fields of
                the schema.

        Returns:
            One array per column. Shapes `(n, *row shape)`.
        """

    @abstractmethod
    def intact(self, ids: IntArray) -> bool:
        """Return whether no slot of these ids has been overwritten by a later row or given to other rows.

        `ids`: shape `(n,)`, int64.
        """

    @abstractmethod
    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids without copying: per field one or two arrays.

        The arrays show later changes of the rows, and other rows once these are overwritten: check the ids
        with `intact` after using them.

        Args:
            places: Positions of the columns; those of `ROW_FIELDS` follow the schema's.
            first_id: Id of the first row.
            count: Number of rows; all of them must be readable.

        Returns:
            For each place its arrays, in the order of ids: two if the run wraps around the end of the ring.
            Shapes `(m, *row shape)`, whose m add up to `count`.
        """

    @property
    def unviewed_places(self) -> frozenset[int]:
        """Fields whose rows are unpacked or assembled when they are read, so that viewing them copies."""
        return frozenset()

    def sizes_of(self, ids: IntArray) -> IntArray:
        """Return the bytes of rows in variable-length fields.

        Args:
            ids: Ids of the rows; a row that is no longer in the store counts 0 bytes. Shape `(n,)`.

        Returns:
            Shape `(n,)`, int64.
        """
        places = [place for place, entry in enumerate(self.require_schema().fields) if entry.variable]
        sizes = np.zeros(ids.size, np.int64)
        for start in range(0, ids.size if places else 0, _SOME_ROWS):
            some = slice(start, start + _SOME_ROWS)
            for column in self.read(ids[some], places):
                sizes[some] += row_sizes(column)
        return sizes

    # -- rows by index, as in TorchRL's storages -----------------------------------------------------

    def get(self, index: Any) -> Any:
        """Read rows by index, in their original container: TensorDicts, tensors, trees of tensors, objects.

        Args:
            index: An integer for one row (one step of time if `ndim` is larger than 1); a slice, integers, or
                a mask for several rows.

        Returns:
            One row, or as many rows as the index selects; objects in a list.

        Raises:
            NotFoundError: There is no such row.
            StateError: The storage is closed, or has no fields yet.
        """
        return get(self, index)

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def contains(self, item: Any) -> Any:
        """Return which indices can be read.

        Args:
            item: An integer, or a tensor of them; negative ones count from the end.

        Returns:
            A bool, or a tensor of bools.
        """
        return contains(self, item)

    def __contains__(self, item: object) -> bool:
        return bool(self.contains(item))

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows in the order of their indices."""
        return rows_of(self)

    # -- the writer's side ---------------------------------------------------------------------------

    @abstractmethod
    def writer(self) -> Storage:
        """Return the storage to write to.

        Raises:
            StateError: The storage is closed, or cannot be written here; the message says why.
        """

    @property
    def can_write(self) -> bool:
        """Whether the storage is open for writing and has not failed."""
        return False

    def drain(self) -> None:
        """Write rows that are only in the journal to the columns, if this object is the store's writer."""

    def follow(self, *, priorities: bool = False) -> None:
        """Read the changes that another process has made; does nothing in the writer.

        Args:
            priorities: Whether to assume that priorities were set, too.
        """

    # -- closing ---------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @abstractmethod
    def close(self) -> None:
        """Sync what was written here, and close all files; a second call does nothing."""

    # -- facts ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the store's uuid and last id. The rows are in its folder and are saved by `dumps`."""
        return {"uuid": self.description.uuid, "last": self.last}

    @property
    def settings(self) -> ReadSettings:
        """The settings of the rows, such as their specs."""
        return ReadSettings(self)

    def more_stats(self) -> dict[str, Any]:
        """Return the statistics that only this kind of storage has."""
        return {}


def keys_for(storage: ReadView, schema: Schema) -> Keys:
    """Return the fields that mark trajectories, ends and rewards in rows of this schema."""
    return find_keys(schema) if storage.manifest is None else storage.manifest.find_keys(schema)


def read_stable(storage: ReadView, act: Callable[[], _Found]) -> _Found:
    """Return the result of a function that reads fields by position, while positions do not change.

    If a field was added or dropped meanwhile, the result or error of the function is discarded, and it is
    called again.

    Args:
        storage: The storage whose fields are read.
        act: The function. Calling it again must be harmless.
    """
    while True:
        before = storage.epochs.fields
        if before & 1:
            with storage.lock:  # held for a moment, while memory changes
                continue
        try:
            found = act()
        except Exception as exc:
            if storage.epochs.fields == before:
                raise
            forget_frames(exc)
        else:
            if storage.epochs.fields == before:
                return found


def forget_frames(exc: BaseException | None) -> None:
    """Free the frames of an error: they may hold cursors of a query, which would keep a file open."""
    while exc is not None:
        traceback.clear_frames(exc.__traceback__)
        exc = exc.__cause__ or exc.__context__


def build_closed_error() -> StateError:
    """Return the error of a call to a closed storage."""
    return StateError("the store is closed", hint="open it again with expstore.open()")


# -- rows by index, as TorchRL's storages have them --------------------------------------------------------


PATIENCE = 3  # reads that may find overwritten rows before the writer is blocked
OVERTAKEN = "the writer overwrites rows faster than they can be read"


def layout_of(storage: ReadView, dim: int | None = None) -> Layout:
    """Return which dims of a batch are rows of a storage; `dim` is time, by default the last of them."""
    from expstore.data.batch import Layout

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
    index = plain_index(index)
    if storage.ndim == 1 and not dim:
        return _find_flat(storage, index)
    ids = _sort_ids(storage)
    grid = ids.reshape(-1, *storage.geometry.dims).swapaxes(0, dim)
    try:
        chosen = np.asarray(grid[index])
    except IndexError as exc:
        raise NoRowError(f"no rows at {index!r}: the store has them in shape {list(grid.shape)}") from exc
    return chosen.reshape(-1), chosen.shape


def plain_index(index: Any) -> Any:
    """Convert an index to NumPy's types: torch tensors and ranges become arrays, `...` becomes a slice."""
    if isinstance(index, tuple):
        return tuple(map(plain_index, index))
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
    window, wrapped = storage.window, np.where(numbers < 0, numbers + end_of(storage), numbers)
    if wrapped.size and wrapped.min() < 0:  # name the index that the caller passed
        raise storage.geometry.build_missing_error(int(numbers[np.argmin(wrapped)]), window)
    return storage.geometry.ids_at(wrapped, window), shape


def end_of(storage: ReadView) -> int:
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

    numbers = np.asarray(plain_index(item))
    if numbers.dtype.kind not in "iu":
        raise ArgumentError(f"an index of rows must be integers, got {type(item).__name__}")
    there = np.zeros(storage.max_size if storage.capacity is not None else storage.last, bool)
    there[storage.geometry.index_of(storage.window.ids())] = True
    wrapped = np.where(numbers < 0, numbers + end_of(storage), numbers)
    inside = (wrapped >= 0) & (wrapped < there.size)
    found = inside & there[np.where(inside, wrapped, 0)] if there.size else inside
    return torch.from_numpy(np.asarray(found)) if isinstance(item, torch.Tensor) else bool(found)


def rows_of(storage: ReadView) -> Iterator[Any]:
    """Yield the rows in the order of their indices; steps of time if `ndim` is larger than 1."""
    ids = _sort_ids(storage)
    steps = np.arange(ids.size // storage.geometry.lanes)
    for number in (storage.geometry.index_of(ids) if storage.ndim == 1 else steps).tolist():
        yield get(storage, number)
