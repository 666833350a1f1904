"""Read access to a store: the same for its writer, for a process that only reads, and for rows in RAM.

Samplers, SQL, transforms and exports get a `ReadView`. `expstore.storages.base.Storage` adds writing.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from expstore.core.change_log import Changes
from expstore.core.draw_state import DrawState
from expstore.core.geometry import RingGeometry
from expstore.core.torchrl_keywords import VoidAttribute
from expstore.core.torchrl_members import find_member
from expstore.core.values import Array, IntArray, Ranking, Window
from expstore.disk.files import Disk
from expstore.episodes.table import EpisodeTable
from expstore.errors import StateError
from expstore.schema.arrow_sizes import row_sizes
from expstore.schema.field_roles import Keys, find_keys
from expstore.schema.row_traits import RowTraits
from expstore.schema.schema import Schema
from expstore.storages.columns.priorities import Priorities
from expstore.storages.description import Description
from expstore.storages.epochs import Epochs, ViewVersion
from expstore.storages.holders import Holders
from expstore.storages.index_protocol import IndexLink
from expstore.storages.locks import Locks
from expstore.storages.row_settings import ReadSettings
from expstore.storages.row_state import RowState
from expstore.storages.run_index import Runs
from expstore.storages.stats import Counters

if TYPE_CHECKING:
    import torch

    from expstore.storages.base import Storage
    from expstore.storages.format.manifest import Manifest

_Found = TypeVar("_Found")

#: Number of rows whose sizes are found by one read.
_SOME_ROWS = 64


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
        self._describe(description)
        self._adopt(RowState(draws=DrawState(order=self.locks.order)))
        #: Held by the thread that writes.
        self.lock = self.locks.storage
        self.counters = Counters()
        #: Counters that tell when data derived from rows is stale.
        self.epochs = Epochs()
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
        """The ids that can be read now: SQL, trajectories, retention, snapshots and exports see them."""
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
        from expstore.storages.indexing import get

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
        from expstore.storages.indexing import contains

        return contains(self, item)

    def __contains__(self, item: object) -> bool:
        return bool(self.contains(item))

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows in the order of their indices."""
        from expstore.storages.indexing import rows_of

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
            _forget(exc)
        else:
            if storage.epochs.fields == before:
                return found


def _forget(exc: BaseException | None) -> None:
    """Free the frames of an error: they may hold cursors of a query, which would keep a file open."""
    while exc is not None:
        traceback.clear_frames(exc.__traceback__)
        exc = exc.__cause__ or exc.__context__


def build_closed_error() -> StateError:
    """Return the error of a call to a closed storage."""
    return StateError("the store is closed", hint="open it again with expstore.open()")
