"""The replay buffers: storage, sampler and writer put together, TensorDicts in and out.

What users hold. The two data paths, `extend` and `sample`, read from top to bottom here; everything
they call is in the layers below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar, cast, overload

import numpy as np
import torch
from tensordict import TensorDictBase

from expstore.batches import Batch, Builder, Intake, StepReader, flatten
from expstore.drawing import DrawingHandle
from expstore.draws import Turn
from expstore.episodeinfo import pack_info
from expstore.errors import NotFoundError, SchemaError, StateError
from expstore.limiter import RateLimiter
from expstore.sample_units import SampleUnit, check_unit
from expstore.samplers.adapted import adapt
from expstore.samplers.base import Sampler
from expstore.samplers.consuming import consume_after
from expstore.schema import Schema
from expstore.storages.base import Storage
from expstore.storages.memory import MemoryStorage
from expstore.storages.trajectories import rows_of_episode
from expstore.types import Array, IntArray, Key, Selection, key_name, to_key
from expstore.writers import Writer, default_writer

__all__ = ["ReplayBuffer", "to_array"]

Index = int | slice | Sequence[int] | Array | torch.Tensor
_Placed = TypeVar("_Placed", TensorDictBase, torch.Tensor)
_PATIENCE = 3  # draws that may meet overwritten rows before the writer is asked to wait
_LIMIT = 1000  # draws after which a follower, which cannot ask, gives up
_OVERTAKEN = "the writer overwrites rows faster than they can be read"


class ReplayBuffer(DrawingHandle):
    """Store transitions and sample batches of them.

    Threads: any number may sample while one writes; writers wait for one another. Processes: one
    writer per store; in a forked child, and pickled into another process (a DataLoader's workers, say),
    the buffer follows: it reads what the writer writes, and draws batches of its own. Crashes: as the
    storage promises; on disk an `extend` that returned survives the process, a `flush` that returned
    survives the machine.

    Args:
        storage: Where rows are kept; `MemoryStorage(1000)` by default.
        sampler: What makes up a batch; uniform by default.
        writer: Where rows go; in a ring the newest replace the oldest by default, or as the store was filled.
        batch_size: Of `sample` and iteration; may be given to `sample` instead.
        device: Where batches are handed out; None: CPU.
        prefetch: How many batches are made ahead, in a thread: the next call finds its batch ready. A
            batch whose rows were overwritten or changed meanwhile, of another size, or drawn before the
            generator was seeded anew, is drawn again; priorities set in the last `prefetch` batches may
            not count yet.
        pin_memory: Hand out batches in pinned memory; with `device` they are copied there without waiting.
        generator: What all draws follow from; None: the store's seed. Its state is kept at every sync,
            and a store that keeps one goes on there.
        consume_after_n_samples: Hand each row out so many times; see `ConsumingSampler`.
        sample_unit: What every sampled row stands for: itself, or a `Sequence` of steps around it.
        rate_limiter: How many rows may be sampled for each that is written; `sample`, `extend` and `add`
            wait until they may go on. See `MinSize` and `SampleToInsertRatio`.

    Example:
        >>> rb = ReplayBuffer(storage=MemoryStorage(1000), batch_size=2)
        >>> rb.extend(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
        tensor([0, 1, 2, 3, 4])
        >>> rb.sample()["observation"].shape
        torch.Size([2, 3])
    """

    #: Root keys that samples carry beside the fields; not taken in again by `extend`.
    _own_keys: frozenset[str] = frozenset()
    _bound: ClassVar[tuple[str, ...]] = (*DrawingHandle._bound, "_builder", "_reader", "_intake")
    _builder: Builder | None = None
    _reader: StepReader | None = None
    _intake: Intake | None = None

    def __init__(
        self,
        *,
        storage: Storage | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        batch_size: int | None = None,
        device: torch.device | str | None = None,
        prefetch: int | None = None,
        pin_memory: bool = False,
        generator: torch.Generator | None = None,
        consume_after_n_samples: int | None = None,
        sample_unit: SampleUnit | None = None,
        rate_limiter: RateLimiter | None = None,
    ) -> None:
        check_drawing(batch_size, prefetch, pin_memory)
        sampler = None if sampler is None else adapt(sampler)
        self._unit = check_unit(sample_unit, sampler)
        super().__init__(
            MemoryStorage(1000) if storage is None else storage,
            consume_after(consume_after_n_samples, sampler, prefetch=prefetch),
            prefetch=prefetch or 0,
            generator=generator,
            limiter=rate_limiter,
        )
        self._writer = default_writer(self._storage) if writer is None else writer
        self._writer.register_storage(self._storage)
        self._batch_size = batch_size
        self._device = None if device is None else torch.device(device)
        self._pin_memory = pin_memory

    # -- the two data paths ----------------------------------------------------------------------

    def extend(
        self,
        data: TensorDictBase,
        *,
        source: str | None = None,
        return_ids: bool = False,
        episode_info: Mapping[str, Any] | None = None,
    ) -> torch.Tensor:
        """Append a batch of rows, all of them or none.

        Rows with trajectory id -1 or `("collector", "mask")` False are dropped.

        Args:
            data: Rows. For stores made by `expstore.open` all batch dims are rows, time is the dim
                named "time", else the last, and each place along the others is a stream of its own.
                Elsewhere only the first batch dim counts.
            source: Name of the stream of experience; a named one continues its open episodes after a
                restart. None: this handle's own.
            return_ids: Return ids, which are never used again, instead of indices.
            episode_info: Facts to note about every episode that has a row in the batch, as `annotate` does;
                they are there with the rows or not at all.

        Returns:
            Index, or id, of each row; -1 for dropped rows. Shape `(n,)`, int64.

        Raises:
            SchemaError: The batch does not fit the store, or JSON has no form for a fact.
            StateError: The store is closed or cannot be written.
            StorageError: The disk failed; nothing was added.
        """
        info = pack_info(episode_info)
        batch = self._flat(data)
        return torch.from_numpy(self._append(batch, source, return_ids, info))

    def _append(self, batch: Batch, source: str | None, return_ids: bool, info: str) -> IntArray:
        if self._limiter is None:
            return self._take_in(batch, source, return_ids, info)
        self._storage.check_writable()
        with self._limiter.inserting(batch.count):
            return self._take_in(batch, source, return_ids, info)

    def _take_in(self, batch: Batch, source: str | None, return_ids: bool, info: str) -> IntArray:
        storage = self._storage
        with storage.turn, storage.lock:
            storage.check_writable()
            self._writer.check()
            schema, reader = self._prepared(batch)
            columns = batch.columns(schema)
            kept = reader.transitions(columns)
            if kept is not None:
                batch, columns = batch.keep(kept), [column[kept] for column in columns]
            if batch.count == 0:
                return np.full(0 if kept is None else kept.size, -1)
            steps = reader.read(columns, batch)
            priorities = self._given_priorities(schema, columns)
            last = storage.last
            ids = self._writer.write(storage, columns, steps, source=source, info=info)
            run = storage.last - last == ids.size  # all were appended: their ids follow one another
            if priorities is not None:
                storage.set_priorities(ids, priorities)
            self._sampler.on_write(ids if run else ids[ids != -1])
        numbers = ids if return_ids else storage.numbers_of(ids, run=run)
        return numbers if kept is None else _spread(numbers, kept)

    def _given_priorities(self, schema: Schema, columns: Sequence[Array]) -> Array | None:
        """Return the priorities that come with new rows. Shape `(n,)`."""
        return None

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[False] = False
    ) -> TensorDictBase: ...

    @overload
    def sample(
        self, batch_size: int | None, return_info: Literal[True]
    ) -> tuple[TensorDictBase, dict[str | Key, torch.Tensor]]: ...

    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True]
    ) -> tuple[TensorDictBase, dict[str | Key, torch.Tensor]]: ...

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw a batch.

        Draw number k is the same whatever happened before it, so a restart goes on with the batches
        that would have come.

        Args:
            batch_size: How many rows; None: the buffer's.
            return_info: Return a pair: the batch, and a dict with each row's `index`, its `id`, and
                what the sampler has to say (`priority_weight`; the ends of slices).

        Returns:
            A TensorDict that owns its memory, batch size `[batch_size]`; fewer rows where the sampler says
            so.

        Raises:
            NotReadyError: The store is empty, or no row is left that may still be drawn.
        """
        batch, selection = self._next_batch(self._wanted(batch_size))
        return (batch, self._info(selection, batch)) if return_info else batch

    def _make(
        self, turn: Turn, size: int, instead: Selection | None = None
    ) -> tuple[TensorDictBase, Selection]:
        selection, columns = self._draw(turn, size, instead)
        root = self._root(selection)
        more = self._marked(selection, columns) if selection.marks or selection.info else {}
        batch = self._build().build(columns, torch.Size((selection.ids.size,)), root)
        for key, values in more.items():
            batch.set(key, values)
        return self._placed(batch), selection

    def _draw(
        self, turn: Turn, size: int, selection: Selection | None = None
    ) -> tuple[Selection, list[Array]]:
        storage = self._storage
        for redraw in range(_LIMIT):
            generator = self._draws.numbers(turn, redraw)
            if redraw == _PATIENCE:
                storage.lock.acquire()
            try:
                if selection is None:
                    selection = self._sampler.sample(storage, size, generator)
                else:
                    anchors = selection.anchors or selection
                    selection = self._sampler.sample_again(storage, anchors, generator)
                rows = selection if self._unit is None else self._unit.select(selection, storage)
                if rows is not None:
                    columns = storage.read(rows.ids)
                    if storage.intact(rows.ids):
                        return rows, columns
                storage.counters.redraws += 1
            finally:
                if redraw == _PATIENCE:
                    storage.lock.release()
        # Only a follower gets here: with the lock held nothing is overwritten in this process.
        raise StateError(_OVERTAKEN, hint="sample less at once, or give the store a larger capacity")

    def _root(self, selection: Selection) -> dict[str, torch.Tensor]:
        """Return what a sample carries beside the fields."""
        return {}

    def _marked(self, selection: Selection, columns: list[Array]) -> dict[Key, torch.Tensor]:
        """Write a sampler's flags into columns of the schema; return those of other fields."""
        return {}

    def _info(self, selection: Selection, batch: TensorDictBase) -> dict[str | Key, torch.Tensor]:
        info: dict[str | Key, Array] = {"index": self._storage.index_of(selection.ids), "id": selection.ids}
        info |= {key if len(key) > 1 else key[0]: values for key, values in selection.info.items()}
        for mark in selection.marks:
            stored = batch.get(mark.key)
            if stored is not None or mark.new:
                key = mark.key if len(mark.key) > 1 else mark.key[0]
                info[key] = mark.alone() if stored is None else mark.on(stored.cpu().numpy())
        told = {name: self._placed(torch.from_numpy(values)) for name, values in info.items()}
        return told | selection.notes

    # -- single rows -----------------------------------------------------------------------------

    def add(
        self,
        data: TensorDictBase,
        *,
        source: str | None = None,
        episode_info: Mapping[str, Any] | None = None,
    ) -> int:
        """Append one row; return its index, or -1 if it is dropped.

        Args:
            data: One row: a TensorDict without batch dims.
            source: As in `extend`.
            episode_info: As in `extend`.
        """
        info = pack_info(episode_info)
        batch = self._flat(data, single=True)
        return int(self._append(batch, source, False, info)[0])

    def __len__(self) -> int:
        return self._sampler.left(self._storage)

    def __getitem__(self, index: Index | str | tuple[str, ...]) -> Any:
        """Read rows by index, or one field of all rows by key."""
        if isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(k, str) for k in index)):
            return self._field(to_key(index))
        ids, columns = self._read(cast(Index, index))
        single = _is_single(index)
        size = torch.Size(() if single else (ids.size,))
        return self._placed(self._build().build(columns, size, {}, first_row=single))

    def _read(self, index: Index, places: Sequence[int] | None = None) -> tuple[IntArray, list[Array]]:
        return self._read_ids(lambda: self._ids(index), places)

    def _read_ids(
        self, find: Callable[[], IntArray], places: Sequence[int] | None = None
    ) -> tuple[IntArray, list[Array]]:
        storage = self._storage
        if storage.closed:
            raise StateError("the store is closed", hint="open it again with expstore.open()")
        for _ in range(_PATIENCE):
            ids = find()
            columns = storage.read(ids, places)
            if storage.intact(ids):
                return ids, columns
        with storage.lock:
            ids = find()
            columns = storage.read(ids, places)
        if storage.follows and not storage.intact(ids):
            raise StateError(_OVERTAKEN, hint="read fewer rows at once, or give the store a larger capacity")
        return ids, columns

    def _field(self, key: Key) -> Any:
        storage = self._storage
        if storage.schema is not None and key in storage.schema:
            _, (column,) = self._read(slice(None), [storage.place_of(key)])
            tensor = torch.from_numpy(column)
            return self._placed(
                tensor.view(torch.bfloat16) if storage.schema[key].dtype == "bfloat16" else tensor
            )
        batch = self[:]
        if key not in batch.keys(include_nested=True):
            raise NotFoundError(f"no field {key_name(key)!r}", hint=f"the store has {storage.schema!r}")
        return batch[key]

    def trajectory(self, episode_id: int) -> TensorDictBase:
        """Read the rows of an episode that are still there, in the order of its steps.

        Args:
            episode_id: Which one.

        Returns:
            A TensorDict with what samples carry (`index`, `id`), batch size `[rows]`, its dim named "time".

        Raises:
            NotFoundError: There never was such an episode, or all its rows have left.
            StateError: The store is closed; or a writer in another process overwrites the rows too fast.
        """
        ids, columns = self._read_ids(lambda: rows_of_episode(self._storage, episode_id))
        root = self._root(Selection(ids))
        batch = self._placed(self._build().build(columns, torch.Size((ids.size,)), root))
        batch.names = ["time"]
        return batch

    def __setitem__(self, index: Index, data: TensorDictBase) -> None:
        """Replace rows by index; neither length nor episodes change.

        On disk the change is there as a whole or not at all after any crash.
        """
        storage = self._storage
        with storage.lock:
            storage.check_writable()
            ids = self._ids(index)
            batch = self._flat(data, single=_is_single(index))
            if batch.count != ids.size:
                raise SchemaError(f"{ids.size} rows are to be replaced by {batch.count}")
            schema = storage.require_schema()
            columns = batch.columns(schema)
            if ids.size > 1:
                # Of a row given twice the last value counts.
                ids, last = np.unique(ids[::-1], return_index=True)
                columns = [column[::-1][last] for column in columns]
            storage.change(ids, range(len(columns)), columns)

    def _ids(self, index: Index) -> IntArray:
        storage = self._storage
        if isinstance(index, slice):
            window = storage.window
            ids = window.ids()
            ordered: IntArray = ids[np.argsort(storage.index_of(ids), kind="stable")]
            return ordered[index]
        numbers = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index)
        if numbers.dtype == np.bool_:
            if numbers.shape != (len(storage),):
                raise NotFoundError(f"the mask has shape {numbers.shape}, the store {len(storage)} rows")
            chosen: IntArray = self._ids(slice(None))[numbers.astype(bool)]
            return chosen
        if numbers.size and numbers.dtype.kind not in "iu":
            raise TypeError(f"rows are found by integers, not {numbers.dtype}")
        numbers = numbers.reshape(-1).astype(np.int64)
        # Where rows were given up without newer ones in their place, the newest is still number -1.
        end = storage.last if storage.capacity is None else storage.window.size
        wrapped: IntArray = np.where(numbers < 0, numbers + end, numbers)
        return storage.ids_at(wrapped)

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Yield batches, without end or until the sampler has run out of rows."""
        while True:
            yield self.sample()
            if self._sampler.ran_out:
                return

    def update_priority(self, index: Any = None, priority: Any = None, *, id: Any = None) -> int:
        """Set the priorities of rows that are still there.

        By id, a row that has left since it was sampled is skipped, never another one changed.

        Args:
            index: Which rows, by index; -1 stands for none. Shape `(n,)`; or give `id`.
            priority: Finite, not negative; one for all, or one or several each, of which the sampler's
                reduction makes one. Shape `()` or `(n, ...)`.
            id: Which rows, by id. Shape `(n,)`.

        Returns:
            How many were set.

        Raises:
            PriorityError: A priority is negative, NaN or infinite; none was set.
        """
        if (index is None) == (id is None) or priority is None:
            raise TypeError("update_priority takes a priority and either index or id")
        numbers = to_array(index if id is None else id).reshape(-1).astype(np.int64, copy=False)
        values = to_array(priority)
        if values.dtype != np.float32 or values.ndim > 1:
            values = self._sampler.reduce(values.astype(np.float64, copy=False))
        if values.size not in (1, numbers.size):
            raise SchemaError(f"{numbers.size} rows are given {values.size} priorities")
        if values.size != numbers.size:
            values = np.broadcast_to(values.reshape(-1), numbers.shape)
        if id is None and numbers.size and numbers.min() < 0:
            numbers, values = numbers[numbers != -1], values[numbers != -1]
        with self._storage.lock:
            ids = numbers if id is not None else self._storage.ids_at(numbers)
            count = self._storage.set_priorities(ids, values)
        self._sampler.on_priority_update(self._storage, ids, values)
        return count

    @property
    def batch_size(self) -> int | None:
        """Rows per batch, unless `sample` is told otherwise."""
        return self._batch_size

    def stats(self) -> dict[str, Any]:
        """Return facts about the buffer that JSON can keep."""
        return super().stats() | {"batch_size": self._batch_size}

    def __repr__(self) -> str:
        storage = self._storage
        room = "unbounded" if storage.capacity is None else f"capacity {storage.capacity}"
        return f"{type(self).__name__}({storage.kind}, {len(storage)} rows, {room}, {self._sampler!r})"

    # -- helpers ---------------------------------------------------------------------------------

    def _check_sampler(self, sampler: Sampler) -> None:
        check_unit(self._unit, sampler)
        consume_after(None, sampler, prefetch=self._prefetch)

    def empty(self) -> None:
        """Forget all rows; ids and episode ids go on, indices begin at 0 in a ring.

        Raises:
            StateError: The store is closed, or open for reading only; or its writer lets nothing change.
        """
        self._writer.check()
        super().empty()
        self._sampler.on_empty()

    @property
    def writer(self) -> Writer:
        """Where rows go."""
        return self._writer

    def set_writer(self, writer: Writer) -> Writer:
        """Place rows by another writer from now on; return the one before.

        Raises:
            TypeError: It is no writer.
        """
        if not isinstance(writer, Writer):
            raise TypeError(f"rows are placed by a Writer, not by {type(writer).__name__}")
        writer.register_storage(self._storage)
        with self._storage.lock:
            former, self._writer = self._writer, writer
        return former

    def _prepared(self, batch: Batch) -> tuple[Schema, StepReader]:
        """Return the schema, fixed by the first rows, and what reads steps."""
        storage = self._storage
        if storage.schema is None:
            schema = Schema.infer(batch.signature())
            self._writer.check_fields(schema)
            storage.prepare(schema, storage.resolve_keys(schema))
        schema = storage.require_schema()
        if self._reader is None:
            if self._limiter is None and storage.limits[1]:
                storage.note_limits(0, 0)  # what it had counted is not all any more
            self._reader, self._intake = StepReader(schema, storage.keys), Intake(schema)
        return schema, self._reader

    def _flat(self, data: TensorDictBase, *, single: bool = False) -> Batch:
        batch = None if self._intake is None else self._intake.take(data, single=single)
        if batch is None:
            return flatten(data, all_dims=self._storage.flatten, single=single, skip=self._own_keys)
        return batch

    def _wanted(self, batch_size: int | None) -> int:
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise ValueError("batch_size not specified; give it to sample() or to the buffer")
        check_batch_size(size)
        return int(size)

    def _build(self) -> Builder:
        if self._builder is None:
            self._builder = Builder(self._storage.require_schema())
        return self._builder

    def _placed(self, batch: _Placed) -> _Placed:
        if self._pin_memory:
            batch = batch.pin_memory()
        if self._device is None:
            return batch
        return batch.to(self._device, non_blocking=True) if self._pin_memory else batch.to(self._device)


def check_drawing(
    batch_size: int | None,
    prefetch: int | None,
    pin_memory: bool,
    *,
    limiter: RateLimiter | None = None,
    capacity: int | None = None,
) -> None:
    """Raise ValueError for what no buffer can do."""
    if limiter is not None:
        limiter.check(capacity)
    check_batch_size(batch_size)
    if prefetch is not None and prefetch < 0:
        raise ValueError(f"prefetch must be at least 0, got {prefetch}")
    if pin_memory and not torch.accelerator.is_available():
        raise ValueError("pin_memory is for copies to an accelerator, and there is none; leave it False")


def check_batch_size(size: int | None) -> None:
    """Raise ValueError for a batch without rows."""
    if size is not None and size < 1:
        raise ValueError(f"batch_size must be at least 1, got {size}")


def _is_single(index: Any) -> bool:
    return not isinstance(index, slice) and np.ndim(index) == 0


def to_array(values: Any) -> Array:
    """Return values, of a tensor on whichever device, as an array."""
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy()
    return np.asarray(values)


def _spread(numbers: IntArray, kept: Array) -> IntArray:
    spread = np.full(kept.size, -1, np.int64)
    spread[kept] = numbers
    return spread
