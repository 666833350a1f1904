"""Writers assign ids to new rows, and so decide where the rows are stored.

A buffer has one writer and passes it validated rows as columns. A writer never sees the user's data and draws
no random numbers.
"""

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from expstore.core.members import Members
from expstore.core.torchrl_keywords import WRITER, check_keywords
from expstore.core.torchrl_members import find_member
from expstore.core.values import Array, IntArray, Ranking, key_name, to_key
from expstore.data.batch import StepReader
from expstore.data.containers import stack_index, take
from expstore.episodes.segmentation import Steps
from expstore.errors import ArgumentError, NotFoundError, SchemaError, StateError
from expstore.schema.ranking import rank_rows, reduce_values
from expstore.schema.row_selection import pick
from expstore.schema.schema import Schema
from expstore.storages.base import Storage, add_new_fields, append_rows, prepare
from expstore.storages.read_view import ReadView, layout_of

if TYPE_CHECKING:
    from expstore.core.idempotency import WriteKey
    from expstore.kernels.rank_tree import RankTree

#: Root keys that TorchRL's buffers add to written data and to samples.
_BESIDE = frozenset({"index", "index_generation"})

Reduction = Literal["sum", "max", "min", "mean", "median"]


class Writer(ABC):
    """Choose where the rows of a batch are written.

    A writer has no state beyond the rows, schema and settings of its storage: a new writer continues where
    the last one stopped.
    """

    #: Whether samples have `index_generation`: the number of rows that each index had before.
    tracks_generations = False
    #: Whether a batch is written as a whole, under one record, which can keep an idempotency key.
    keeps_keys = False
    _storage: weakref.ref[ReadView] | None = None
    _on_write: weakref.WeakMethod[Callable[[IntArray], None]] | None = None

    if not TYPE_CHECKING:  # mypy would accept any attribute
        __getattr__ = find_member

    def register_storage(self, storage: ReadView) -> None:
        """Attach the writer to the storage of a buffer.

        Raises:
            ArgumentError: The writer cannot be used with this storage.
        """
        self._storage = weakref.ref(storage)

    def tell_writes(self, on_write: Callable[[IntArray], None]) -> None:
        """Call a method of a buffer with the ids of the rows that `add` and `extend` write.

        Args:
            on_write: A bound method, called with ids of the shape `(n,)`; its object is held weakly.
        """
        self._on_write = weakref.WeakMethod(on_write)

    def add(self, data: Any) -> Any:
        """Write one row to the storage, without the transforms of a buffer.

        Args:
            data: One row; if `ndim` is larger than 1, one for each lane.

        Returns:
            Index of the row, or -1 if it was not stored. If `ndim` is larger than 1: shape `(lanes, ndim)`.

        Raises:
            SchemaError: The row does not fit the store.
            StateError: No storage is registered, or it cannot be written.
        """
        index = self._append(data, single=True)
        return index if index.ndim > 1 else int(index[0])

    def extend(self, data: Any) -> torch.Tensor:
        """Write rows to the storage, all of them or none, without the transforms of a buffer.

        Args:
            data: The rows, as `ReplayBuffer.extend` takes them; time is the first dim.

        Returns:
            Index of each row; -1 for rows that were not stored. Shape `(n,)`, int64; `(n, ndim)` if `ndim` is
            larger than 1.

        Raises:
            SchemaError: The rows do not fit the store.
            StateError: No storage is registered, it cannot be written, or there are no rows.

        Example:
            >>> from expstore import LazyTensorStorage, RoundRobinWriter
            >>> writer, storage = RoundRobinWriter(), LazyTensorStorage(4)
            >>> writer.register_storage(storage)
            >>> writer.extend(torch.arange(6))
            tensor([0, 1, 2, 3, 0, 1])
        """
        return self._append(data, single=False)

    def _require_storage(self) -> ReadView:
        storage = None if self._storage is None else self._storage()
        if storage is None:
            raise StateError("the writer has no storage", hint="call register_storage(storage) first")
        return storage

    def _append(self, data: Any, *, single: bool) -> torch.Tensor:
        storage = self._require_storage()
        self.check()
        batch = take(data, layout_of(storage, 0), single=single, skip=_BESIDE)
        add_new_fields(storage, batch)
        with storage.locks.extend, storage.lock:
            writable = storage.writer()
            if batch.count == 0:
                raise StateError("extend() of a writer got no rows", hint="pass at least one row")
            if writable.schema is None:
                self.check_fields(Schema.infer(batch.signature(), batch.form))
                self.begin(writable)
            schema = prepare(writable, batch)
            columns = batch.columns(schema)
            steps = StepReader(schema, writable.keys).read(columns, batch)
            ids = self.write(writable, columns, steps, source=None, info="")
            on_write = None if self._on_write is None else self._on_write()
            if on_write is not None:
                on_write(ids[ids != -1])
        index = storage.geometry.indices_of(ids, run=False)
        return torch.from_numpy(index if storage.ndim == 1 else storage.geometry.unravel(index))

    def generations_of(self, index: int | torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return how many rows were at each index before the row that is there now.

        Args:
            index: Indices, as `extend` returns them. Any shape. If `ndim` is larger than 1: `(..., ndim)`, or
                a tuple of `ndim` tensors, which are broadcast together.

        Returns:
            One number for each index, int64; -1 if there is no row, or if the writer does not track
            generations. Shape of `index`, without the last dim if `ndim` is larger than 1.
        """
        if isinstance(index, tuple):
            index = stack_index(index)
        numbers = torch.as_tensor(index)
        storage = None if self._storage is None else self._storage()
        if storage is not None and storage.ndim > 1 and numbers.ndim > 1:
            numbers = torch.from_numpy(storage.geometry.ravel(numbers.cpu().numpy(), storage.window)).to(
                numbers.device
            )
        if storage is None or not self.tracks_generations:
            return torch.full(numbers.shape, -1, dtype=torch.int64, device=numbers.device)
        found = storage.geometry.generations_at(numbers.cpu().numpy().astype(np.int64), storage.window)
        return torch.from_numpy(found).to(numbers.device)

    @property
    def _cursor(self) -> int:
        """Index of the next row that is appended, under TorchRL's name; 0 without a storage.

        If `ndim` is larger than 1, it is the next step of time.
        """
        storage = None if self._storage is None else self._storage()
        if storage is None:
            return 0
        geometry = storage.geometry
        return int(geometry.index_of(np.array([storage.last + 1]))[0]) // geometry.lanes

    def check(self) -> None:
        """Raise StateError if the writer lets no rows be written or removed."""

    def check_fields(self, schema: Schema) -> None:
        """Raise an error if the writer cannot store rows with these fields; called before the first rows."""

    def begin(self, storage: Storage) -> None:
        """Prepare a storage for its first rows, after which the way that it stores rows is fixed."""

    @abstractmethod
    def write(
        self,
        storage: Storage,
        columns: Sequence[Array],
        steps: Steps,
        *,
        source: str | None,
        info: str,
        key: WriteKey | None = None,
    ) -> IntArray:
        """Give every row of a batch its id, episode and step, and write it: all rows or none.

        Args:
            storage: The storage to write to; the caller holds its lock.
            columns: One array per field, in the schema's order. Shapes `(n, *row shape)`.
            steps: Lanes, trajectory ids, ends and rewards of the rows, as the collector knows them.
            source: Name of the source, or None for the buffer's own.
            info: Notes about all episodes of the batch, as JSON text.
            key: The idempotency key of the batch; only passed to writers that keep keys.

        Returns:
            Id of each row; -1 for rows that were not stored. Shape `(n,)`, int64.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the settings for `load_state_dict`. The write position follows from the storage."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that the state is of a writer with the same settings.

        Raises:
            ArgumentError: A setting differs.
        """
        own = self.state_dict()
        for name, value in own.items():
            if name in state_dict and state_dict[name] != value:
                raise ArgumentError(
                    f"this writer has {name}={value!r}, the state {name}={state_dict[name]!r}"
                )

    def dumps(self, path: str | Path) -> None:
        """Write nothing: a writer keeps its state in the storage."""

    def loads(self, path: str | Path) -> None:
        """Read nothing, as `dumps` writes nothing."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy; the buffer that gets the copy registers its storage."""
        own = ("_storage", "_on_write")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class RoundRobinWriter(Writer):
    """Append rows; in a ring, new rows overwrite the oldest.

    Args:
        compilable: Only False: `torch.compile` does not trace writers.
        track_generations: Whether samples have `index_generation`, for `update_if_present`; `id` serves the
            same purpose.

    Example:
        >>> from expstore import MemoryStorage, ReplayBuffer, RoundRobinWriter
        >>> rb = ReplayBuffer(storage=MemoryStorage(100), writer=RoundRobinWriter(), batch_size=8)
    """

    keeps_keys = True

    def __init__(self, compilable: bool = False, *, track_generations: bool = False) -> None:
        check_keywords(self, {"compilable": compilable}, WRITER)
        self.tracks_generations = track_generations

    def write(
        self,
        storage: Storage,
        columns: Sequence[Array],
        steps: Steps,
        *,
        source: str | None,
        info: str,
        key: WriteKey | None = None,
    ) -> IntArray:
        """Give every row of a batch the next ids. Arguments and result are those of `Writer.write`.

        Returns:
            Id of each row. Shape `(n,)`, int64.

        Raises:
            StateError: The storage keeps the best rows, which new rows would overwrite.
        """
        if storage.ranking is not None:
            _end_ranking(storage, storage.ranking)
        return append_rows(storage, columns, steps, source=source, info=info, key=key)

    def write_at(self, index: Any, data: Any) -> torch.Tensor:
        """Replace rows by index, as `rb[index] = data` does; the place of the next row stays the same.

        Args:
            index: An integer, or several, as `extend` returns them.
            data: One row for a single integer, otherwise one row per index.

        Returns:
            The indices, int64. Shape of `index`.

        Raises:
            NotFoundError: There is no row at an index.
            SchemaError: The rows do not fit.
            StateError: The writer is not registered with a storage, or tracks generations: they count rows
                that were appended, so that a row which is replaced keeps its own.

        Example:
            >>> from expstore import LazyTensorStorage, ReplayBuffer, RoundRobinWriter
            >>> writer = RoundRobinWriter()
            >>> rb = ReplayBuffer(storage=LazyTensorStorage(4), writer=writer)
            >>> index = rb.extend(torch.arange(4))
            >>> index = writer.write_at(torch.tensor([1]), torch.tensor([9]))
            >>> rb[:].tolist()
            [0, 9, 2, 3]
        """
        storage = self._require_storage()
        if self.tracks_generations:
            raise StateError(
                "write_at() would leave the rows' generations as they are: they count appended rows",
                hint="replace rows by rb[index] = data, and compare ids or a field of your own",
            )
        storage.writer().set(index, data, set_cursor=False)
        return torch.as_tensor(index)


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """The same as `RoundRobinWriter`, under torchrl's name for rows that are TensorDicts.

    Example:
        >>> from expstore import MemoryStorage, TensorDictReplayBuffer, TensorDictRoundRobinWriter
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(100), writer=TensorDictRoundRobinWriter())
    """


class ImmutableDatasetWriter(Writer):
    """Refuse new rows, for complete data sets.

    `rb.set_writer` returns the former writer; set that one again to write.

    Args:
        compilable: Only False: `torch.compile` does not trace writers.

    Example:
        >>> from expstore import ImmutableDatasetWriter
        >>> former = rb.set_writer(ImmutableDatasetWriter())
    """

    #: Message of the error that `extend` and `add` raise.
    WRITING_ERR = "This dataset doesn't allow writing."

    def __init__(self, compilable: bool = False) -> None:
        check_keywords(self, {"compilable": compilable}, WRITER)

    def check(self) -> None:
        """Raise an error: no rows can be written or removed.

        Raises:
            StateError: Always.
        """
        raise self._refusal()

    def _refusal(self) -> StateError:
        return StateError(self.WRITING_ERR, hint="call set_writer() with another writer to write")

    def write(
        self,
        storage: Storage,
        columns: Sequence[Array],
        steps: Steps,
        *,
        source: str | None,
        info: str,
        key: WriteKey | None = None,
    ) -> IntArray:
        """Refuse a batch: the rows of a data set do not change. Arguments are those of `Writer.write`.

        Raises:
            StateError: Always; nothing was written.
        """
        raise self._refusal()


def _facts(count: int, steps: Steps) -> Steps:
    """Return the steps of independent rows: without trajectories, with the session of the batch."""
    return Steps(count, session=steps.session, linked=False)


@dataclass(frozen=True, slots=True)
class _Known:
    """The ranks of a storage's rows, and the state of the storage for which they are valid."""

    storage: weakref.ref[ReadView]
    tree: RankTree
    last: int
    changes: int
    moves: tuple[int, int]


class TensorDictMaxValueWriter(Writer):
    """Keep the best rows: once the storage is full, a row that ranks above the worst replaces it.

    Rows that do not rank higher are not stored: `extend` and `add` return -1 for them. Of rows with equal
    ranks, the earlier row is kept. A row that replaces another one gets its index and its id. It starts with
    the largest priority.

    Rows are independent here: they have no trajectories, whatever their fields say, and each source is one
    endless episode. Slices of such a store have no meaning.

    Threads: as the storage; readers see rows that replaced others after the next sync. Crashes: a row is
    complete or absent, and is only replaced by a better one. All replacements of one `extend` happen at once;
    if the `extend` also appends rows to fill the storage, it appends them first. Ranks are read from the
    rows, so they are right after a restart, `loads` or `rb[i] =`. The storage stores how its rows are ranked:
    it refuses other writers until it is empty.

    Args:
        rank_key: The field by which rows are ranked; ("next", "reward") by default. Numbers are compared as
            float64, NaN ranks lowest.
        reduction: How several values of a row are reduced to one: "sum", "max", "min", "mean" or "median" (of
            an even number of values the lower median).
        torchrl: Keywords of TorchRL's class that have no effect here: accepted at their defaults, otherwise
            refused with the reason.

    Raises:
        ArgumentError: `reduction` is unknown.

    Example:
        >>> from expstore import MemoryStorage, TensorDictMaxValueWriter, TensorDictReplayBuffer
        >>> rb = TensorDictReplayBuffer(
        ...     storage=MemoryStorage(2), writer=TensorDictMaxValueWriter("score"), batch_size=2
        ... )
        >>> rb.extend(TensorDict({"score": torch.tensor([1.0, 5.0, 0.0, 3.0])}, [4]))
        tensor([-1,  1, -1,  0])
    """

    def __init__(
        self,
        rank_key: str | tuple[str, ...] | None = None,
        reduction: Reduction = "sum",
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, WRITER)
        if reduction not in get_args(Reduction):
            known = ", ".join(map(repr, get_args(Reduction)))
            raise ArgumentError(f"reduction {reduction!r} is unknown; use one of {known}")
        self._ranking = Ranking(("next", "reward") if rank_key is None else to_key(rank_key), reduction)
        self._known: _Known | None = None

    def register_storage(self, storage: ReadView) -> None:
        """Attach the writer to the storage of a buffer.

        Raises:
            ArgumentError: The storage has several dims.
        """
        if storage.ndim > 1:
            raise ArgumentError(
                "TensorDictMaxValueWriter is not compatible with storages with more than one dimension: "
                "a row would get the index of another lane; store whole trajectories as rows (ndim=1)"
            )
        super().register_storage(storage)

    def begin(self, storage: Storage) -> None:
        """Store in the storage how rows are ranked. Packed fields are not allowed, because rows get replaced.

        Raises:
            StateError: The storage was created with packed fields.
        """
        storage.settings.rank_by(self._ranking)

    def check_fields(self, schema: Schema) -> None:
        """Check that rows with these fields can be ranked.

        Raises:
            NotFoundError: The field `rank_key` does not exist.
            SchemaError: The field does not have numbers.
            StateError: The rows have no named fields.
        """
        key, form = self._ranking.key, json.loads(schema.form or "{}")
        if "objects" in form:
            return  # each row is checked when it is ranked
        if key not in schema and "tree" in form:
            raise self._no_collection()
        if key not in schema:
            raise self._no_key(f"the rows have {schema!r}")
        entry = schema[key]
        if entry.variable or entry.numpy_dtype.kind not in "fiub" or not entry.row_items:
            raise SchemaError(f"rows cannot be ranked by {key_name(key)!r}: {entry.dtype} {entry.shape}")

    def write(
        self,
        storage: Storage,
        columns: Sequence[Array],
        steps: Steps,
        *,
        source: str | None,
        info: str,
        key: WriteKey | None = None,
    ) -> IntArray:
        """Append rows until the storage is full, then replace the worst rows by better ones.

        Arguments are those of `Writer.write`.

        Returns:
            Id of each row; -1 for rows that are not among the best. Shape `(n,)`, int64.

        Raises:
            StateError: The storage has rows that are ranked differently or not at all, or counts how often
                rows are drawn.
            ArgumentError: `info` is not empty: the rows have no episodes.
        """
        self._check(storage, info)
        ranks = self._rank(storage.require_schema(), columns[self._place(storage)])
        if storage.ranking != self._ranking:
            storage.settings.rank_by(self._ranking)
        if storage.capacity is None:
            return append_rows(storage, columns, _facts(ranks.size, steps), source=source, info="")
        known = self._catch_up(storage, storage.capacity)
        self._known = None  # if the write fails, the tree has ranks of rows that were not stored
        batch = _Batch.place(storage, storage.capacity, known.tree, ranks)
        if batch.appended.size:
            chosen = [pick(column, batch.appended) for column in columns]
            append_rows(storage, chosen, _facts(batch.appended.size, steps), source=source, info="")
        if batch.displaced.size:
            storage.replace(batch.displaced, [pick(column, batch.replacing) for column in columns])
        self._known = self._stamp(storage, known.tree)
        return batch.ids

    def _check(self, storage: Storage, info: str) -> None:
        if info:
            raise ArgumentError(
                "episode_info is not supported by TensorDictMaxValueWriter, whose rows have no episodes of "
                "their own; leave it out"
            )
        if storage.state.sampled is not None:
            raise StateError(
                "the storage counts how often each row was drawn, and a row that replaces another one would "
                "inherit its count",
                hint="keep the best rows in a store of their own",
            )
        window_rows = storage.description.window_rows
        if window_rows is not None:
            raise StateError(
                f"the storage has a window of {window_rows} rows, but this writer keeps the best rows",
                hint="leave window= out, or use another writer",
            )
        if storage.ranking != self._ranking and storage.window.size:
            found = "newest rows" if storage.ranking is None else f"best rows by {storage.ranking}"
            raise StateError(
                f"the storage keeps the {found}, but this writer keeps the best by {self._ranking}",
                hint="use a writer like the one that filled it, or empty() it first",
            )

    def _place(self, storage: ReadView) -> int:
        """Return the position of the field by which rows are ranked; 0 if rows are objects."""
        return 0 if storage.row_traits.whole else storage.require_schema().place_of(self._ranking.key)

    def _rank(self, schema: Schema, column: Array) -> Array:
        """Return a number per row, -inf for NaN. Shapes `(n, *row shape)` in, `(n,)` out."""
        if column.dtype == object:
            reduction = self._ranking.reduction
            return np.array([reduce_values(self._values_of(row)[None], reduction)[0] for row in column])
        return rank_rows(schema[self._ranking.key], column, self._ranking.reduction)

    def _values_of(self, row: Any) -> Array:
        """Return the values by which a row that is an object is ranked. Shape `(values,)`."""
        from tensordict import is_tensor_collection

        if not is_tensor_collection(row):
            raise self._no_collection()
        found = row.get(self._ranking.key, None)
        if found is None:
            raise self._no_key(f"the row has {sorted(map(str, row.keys()))}")
        values: Array = found.detach().cpu().double().numpy().reshape(-1)
        return values

    def _no_collection(self) -> StateError:
        return StateError(
            "TensorDictMaxValueWriter expects data to be a tensor collection, whose field "
            f"{key_name(self._ranking.key)!r} ranks the rows; this one has no such field",
            hint="put it into a TensorDict",
        )

    def _no_key(self, hint: str) -> NotFoundError:
        return NotFoundError(f"Rank key {key_name(self._ranking.key)!r} not found in data.", hint=hint)

    def _catch_up(self, storage: Storage, capacity: int) -> _Known:
        """Return the ranks of all readable rows, by index."""
        known, window = self._known, storage.window
        now = (storage.epochs.deleted, storage.epochs.content)
        slots = None
        if (
            known is not None
            and known.storage() is storage
            and (known.tree.size, known.last, known.moves) == (capacity, storage.last, now)
        ):
            if known.changes == storage.changes.number:
                return known
            slots = storage.changes.since(known.changes)
        if known is None or slots is None:
            from expstore.kernels.rank_tree import (
                RankTree,  # imported late: it compiles, and other writers do not need it
            )

            known = self._stamp(storage, RankTree(capacity))
            for first, count in window.runs() if window.size else ():
                for start in range(first, first + count, _STEP):
                    ids = np.arange(start, min(start + _STEP, first + count))
                    self._read_ranks(storage, known.tree, ids)
            return known
        ids = np.unique(storage.geometry.ids_in(slots, window.last))
        self._read_ranks(storage, known.tree, ids[window.holds(ids)])
        return known

    def _read_ranks(self, storage: ReadView, tree: RankTree, ids: IntArray) -> None:
        (column,) = storage.read(ids, [self._place(storage)])
        tree.set(storage.geometry.index_of(ids), self._rank(storage.require_schema(), column))

    @staticmethod
    def _stamp(storage: ReadView, tree: RankTree) -> _Known:
        moves = (storage.epochs.deleted, storage.epochs.content)
        return _Known(weakref.ref(storage), tree, storage.last, storage.changes.number, moves)

    def state_dict(self) -> dict[str, Any]:
        """Return the settings for `load_state_dict`; ranks are read from the rows."""
        return {"rank_key": list(self._ranking.key), "reduction": self._ranking.reduction}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which reads ranks for itself."""
        return super().__getstate__() | {"_known": None}


#: Number of rows that are read at once to be ranked.
_STEP = 65_536


@dataclass(frozen=True, slots=True)
class _Batch:
    """Which rows of a batch are written where; rows are given by their numbers in the batch.

    Args:
        ids: Id of each row; -1 if it is not stored. Shape `(n,)`.
        appended: The rows that get the next ids, in their order.
        replacing: The rows that replace stored rows.
        displaced: The ids of the stored rows that are replaced.
    """

    ids: IntArray
    appended: IntArray
    replacing: IntArray
    displaced: IntArray

    @classmethod
    def place(cls, storage: Storage, capacity: int, tree: RankTree, ranks: Array) -> _Batch:
        """Choose where rows are written, one after the other, free slots first; update the tree, too."""
        room = min(capacity - storage.window.size, ranks.size)
        first = storage.last + 1
        appended, ids = np.arange(room), np.full(ranks.size, -1)
        ids[:room] = first + appended
        tree.set(storage.geometry.index_of(ids[:room]), ranks[:room])
        places = tree.take(ranks[room:])
        taken = np.flatnonzero(places >= 0)
        # If several rows were written to the same slot, the last one counts.
        held, at = np.unique(places[taken][::-1], return_index=True)
        rows = room + taken[::-1][at]
        offsets = (held - (first - 1)) % capacity
        new = offsets < room
        ids[appended[offsets[new]]] = -1
        appended[offsets[new]] = rows[new]
        displaced = storage.geometry.ids_at(held[~new], storage.window)
        ids[rows[new]], ids[rows[~new]] = first + offsets[new], displaced
        return cls(ids, appended, rows[~new], displaced)


def default_writer(storage: ReadView) -> Writer:
    """Return a writer for a storage: one that keeps the best rows if the storage does so."""
    ranking = storage.ranking
    if ranking is None:
        return RoundRobinWriter()
    return TensorDictMaxValueWriter(ranking.key, ranking.reduction)  # type: ignore[arg-type]


def _end_ranking(storage: Storage, ranking: Ranking) -> None:
    """Make an empty storage keep the newest rows again.

    Raises:
        StateError: The storage is not empty.
    """
    if storage.window.size:
        raise StateError(
            f"the storage keeps the best rows by {ranking}; appended rows would overwrite them",
            hint="use TensorDictMaxValueWriter, or empty() the store first",
        )
    storage.settings.rank_by(None)


class WriterEnsemble(Members):
    """Hold the writers of an ensemble of buffers.

    Threads, processes and crashes as the writers.

    Args:
        members: One writer per member.

    Example:
        >>> from expstore import RoundRobinWriter
        >>> from expstore.writers import WriterEnsemble
        >>> len(WriterEnsemble(RoundRobinWriter(), RoundRobinWriter()))
        2
    """

    _word = "writers"
