"""What can be read of a store: the same for its writer, for a process that only reads, and for rows in RAM.

Samplers, SQL, transforms and exports are given a `ReadView`. `expstore.storages.base.Storage` adds writing.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from expstore.core.change_log import Changes
from expstore.core.draw_state import DrawState
from expstore.core.geometry import RingGeometry
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

__all__ = ["ReadView", "closed_error", "keys_for", "unmoved"]

_Found = TypeVar("_Found")

#: Rows whose sizes are found by one read.
_SOME_ROWS = 64


class ReadView(ABC):
    """Read rows under ever-growing ids, and know which of them can be read.

    Readable are the last `capacity` committed ids, or all of them. Rows are gathered first, without a lock,
    and validated afterwards (`intact`): a row that was overwritten meanwhile may come out torn.

    Threads: any number read without a lock; take `lock` for a consistent state. Processes: one
    writes to a store, any number read it. Crashes: a view loses nothing.

    Args:
        description: What the storage is.
        disk: Where files are touched.
        path: The store's folder; None: rows are in RAM.
        index_path: Where the index of SQL is kept; None: in memory.
    """

    kind = "abstract"
    #: Whether another process writes the rows, which no lock of this object stops.
    follows = False
    #: What rows may be, and how they are put together.
    row_traits = RowTraits()
    #: Where rows are handed out, though they lie in host memory; None: CPU.
    device: torch.device | None = None
    #: The store's folder; None: rows are in RAM.
    path: Path | None
    #: What the storage is; replaced as a whole.
    description: Description
    #: How ids, slots and indices correspond. This and the next three are read for every batch: they are those
    #: of the description, and change with it.
    geometry: RingGeometry
    #: The fields; None: no rows have come yet.
    schema: Schema | None
    #: Which fields say what a row is to its episode.
    keys: Keys
    #: By what rows are ranked, of which only the best stay; None: the newest stay.
    ranking: Ranking | None
    #: Which rows were changed in place.
    changes: Changes
    #: The number of the next batch, and what else a restart needs to draw the same ones.
    draws: DrawState
    #: What expstore.json says; None: rows are in RAM.
    manifest: Manifest | None = None

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
        #: Numbers that move when what was derived from rows must be derived anew.
        self.epochs = Epochs()
        #: The steps of episodes that can be read.
        self.runs = Runs(self)
        #: Who must hear of another content.
        self.holders = Holders()
        #: Where the index of SQL is, and who keeps it.
        self.index = IndexLink(index_path)
        self._closed = False

    def _describe(self, description: Description) -> None:
        """Adopt a description."""
        self.description = description
        self.geometry, self.schema = description.geometry, description.schema
        self.keys, self.ranking = description.keys, description.ranking

    def _adopt(self, state: RowState) -> None:
        """Replace the rows and their draws."""
        self._state, self.draws = state, state.draws

    def _note_closed(self) -> None:
        self._closed = True

    # -- what the storage is -----------------------------------------------------------------------

    @property
    def capacity(self) -> int | None:
        """The largest number of readable rows; None: unbounded."""
        return self.geometry.capacity

    @property
    def ndim(self) -> int:
        """How many dims of a batch are rows; TorchRL's word."""
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
            StateError: No rows have come yet.
        """
        schema = self.schema
        if schema is None:
            raise StateError("the store has no fields yet", hint="extend() it first")
        return schema

    # -- what can be read --------------------------------------------------------------------------

    @property
    def state(self) -> RowState:
        """The rows of this moment; another object after a restore or a recovery."""
        return self._state

    @property
    def window(self) -> Window:
        """The ids that can be read now."""
        return self._state.window

    @property
    def query_window(self) -> Window:
        """The ids that SQL sees: those whose episodes are known, too."""
        return self.window

    @property
    def last(self) -> int:
        """The newest id that can be read."""
        return self._state.window.last

    def __len__(self) -> int:
        return self._state.window.rows

    def __repr__(self) -> str:
        """Say kind, path, rows and capacity."""
        path = getattr(self, "path", None)
        parts = [] if path is None else [repr(str(path))]
        parts.append("closed" if self._closed else f"{len(self)} rows")
        if self.capacity is not None:
            parts.append(f"capacity {self.capacity}")
        return f"{type(self).__name__}({', '.join(parts)})"

    @property
    def given_up(self) -> int:
        """The newest id that was given up for other reasons than age."""
        return self._state.retired

    @property
    def write_count(self) -> int:
        """How many rows were ever written."""
        return self._state.write_count

    @property
    def episodes(self) -> EpisodeTable:
        """The episodes of the rows."""
        return self._state.episodes

    @property
    def priorities(self) -> Priorities:
        """The priorities of the rows, by slot."""
        return self._state.priorities

    # -- what has changed --------------------------------------------------------------------------

    @property
    def version(self) -> ViewVersion:
        """Which rows and fields there are: what was derived from equal versions holds for both."""
        epochs = self.epochs
        return ViewVersion(epochs.content, epochs.deleted, epochs.fields, self.changes.number)

    # -- reading -----------------------------------------------------------------------------------

    @abstractmethod
    def read(self, ids: IntArray, places: Sequence[int] | None = None) -> list[Array]:
        """Copy rows out; ask `intact` afterwards whether none of them was overwritten meanwhile.

        Args:
            ids: Which rows. Shape `(n,)`.
            places: Positions of the fields wanted; None: all.

        Returns:
            One array per field. Shapes `(n, *row shape)`.
        """

    @abstractmethod
    def take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        """Copy rows out by slot, whatever rows these are; `read` is for ids.

        Args:
            slots: Shape `(n,)`.
            places: Of the columns, those of `ROW_FIELDS` behind the schema's; None: all of the schema.

        Returns:
            One array per column. Shapes `(n, *row shape)`.
        """

    @abstractmethod
    def intact(self, ids: IntArray) -> bool:
        """Return whether no slot of these ids has been written to for a later row, or given to other rows."""

    @abstractmethod
    def views(self, places: Sequence[int], first_id: int, count: int) -> list[list[Array]]:
        """View columns over a run of ids without copying: per field one or two arrays.

        Places from `len(schema.fields)` on are those of `ROW_FIELDS`.
        """

    @property
    def unviewed_places(self) -> frozenset[int]:
        """Fields whose rows are unpacked or put together when they are read: viewing them costs a copy."""
        return frozenset()

    def sizes_of(self, ids: IntArray) -> IntArray:
        """Return how many bytes the fields without a fixed size take in some rows.

        Args:
            ids: Which rows; of one that has left it is 0. Shape `(n,)`.

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

    # -- rows as TorchRL's lists have them -----------------------------------------------------------

    def get(self, index: Any) -> Any:
        """Read rows by index, put together as they came: TensorDicts, tensors, trees of them, objects.

        Args:
            index: An integer for one row (of time, where `ndim` is larger than 1); a slice, integers, or a
                mask for several.

        Returns:
            One row, or as many as asked for; objects in a list.

        Raises:
            NotFoundError: There is no such row.
            StateError: The storage is closed, or has no fields yet.
        """
        from expstore.storages.indexing import get

        return get(self, index)

    def __getitem__(self, index: Any) -> Any:
        return self.get(index)

    def contains(self, item: Any) -> Any:
        """Return which indices rows can be read at.

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
        """Yield row after row, in the order of their indices."""
        from expstore.storages.indexing import rows_of

        return rows_of(self)

    # -- the writer's side ---------------------------------------------------------------------------

    @abstractmethod
    def writer(self) -> Storage:
        """Return the storage to write to.

        Raises:
            StateError: It is closed, or nothing can be written here; the message says why.
        """

    @property
    def can_write(self) -> bool:
        """Whether the storage is open for writing and sound."""
        return False

    def drain(self) -> None:
        """Write to the columns the rows that only a journal has, if they are written here."""

    def follow(self, *, priorities: bool = False) -> None:
        """Take in what another process has written; does nothing where rows are written here.

        Args:
            priorities: Whether priorities may have been set, too.
        """

    def archived(self) -> ReadView | None:
        """Return where rows are that have left; None: nowhere."""
        return None

    # -- life ----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @abstractmethod
    def close(self) -> None:
        """Sync what was written here, and close all files; a second call does nothing."""

    # -- facts ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return which store this is, and its last row: the rows are in its folder, for `dumps`."""
        return {"uuid": self.description.uuid, "last": self.window.last}

    @property
    def settings(self) -> ReadSettings:
        """What is known of the rows besides their values."""
        return ReadSettings(self)

    def more_stats(self) -> dict[str, Any]:
        """Return what only this kind of storage has to say."""
        return {}


def keys_for(storage: ReadView, schema: Schema) -> Keys:
    """Return which fields say what a row is to its episode, if rows have this schema."""
    return find_keys(schema) if storage.manifest is None else storage.manifest.find_keys(schema)


def unmoved(storage: ReadView, act: Callable[[], _Found]) -> _Found:
    """Return what an act finds, which reads fields by their places, while these do not change.

    Where a field has come or gone meanwhile, whatever the act has found or raised is of no account: it is
    asked again.

    Args:
        storage: Whose fields count.
        act: Changes nothing, or the same each time.
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
    """Free what an error holds: cursors of a query that would keep a file open."""
    while exc is not None:
        traceback.clear_frames(exc.__traceback__)
        exc = exc.__cause__ or exc.__context__


def closed_error() -> StateError:
    """Return the error of a call to a storage that was closed."""
    return StateError("the store is closed", hint="open it again with expstore.open()")
