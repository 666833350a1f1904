"""The replay buffers: storage, sampler and writer put together, batches in and out.

What users hold. The two data paths, `extend` and `sample`, read from top to bottom here; everything
they call is in the layers below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from tensordict import is_tensor_collection

from expstore.buffers import idempotency
from expstore.buffers.add_column import LateFields
from expstore.buffers.arguments import (
    called,
    check_batch_size,
    check_drawing,
    check_predictable,
    made,
)
from expstore.buffers.domain_checks import NO_DOMAIN, asks_for_domain, check_domain
from expstore.buffers.episodes import remote_session
from expstore.buffers.indexing import ShapingHandle, to_array
from expstore.buffers.prefetch import Request
from expstore.buffers.read_limits import READ_LIMIT
from expstore.buffers.recorder import Recorder
from expstore.buffers.rng import Turn
from expstore.buffers.sample_units import SampleUnit, check_unit
from expstore.buffers.torch_dataset import RowKind, RowsDataset, SlicesDataset, make_dataset
from expstore.buffers.torchrl_service import Direct
from expstore.buffers.updates import Patching
from expstore.core.idempotency import WriteKey
from expstore.core.rate_limiters import RateLimiter
from expstore.core.torchrl_keywords import BUFFER, check_keywords
from expstore.core.values import Array, IntArray, Key, Selection
from expstore.data.batch import Batch, Intake, StepReader, is_plain
from expstore.data.containers import stack_index
from expstore.episodes.annotations import pack_info
from expstore.errors import SchemaError, StateError
from expstore.samplers.base import Sampler
from expstore.samplers.consuming import consume_after
from expstore.samplers.torchrl_adapter import adapt
from expstore.schema.row_selection import pick
from expstore.schema.schema import Schema
from expstore.storages.base import Storage
from expstore.storages.capabilities import RowAppending
from expstore.storages.indexing import OVERTAKEN, PATIENCE, layout_of, prepare
from expstore.storages.memory import MemoryStorage
from expstore.storages.read_view import ReadView, unmoved
from expstore.storages.sessions import end_episodes
from expstore.trajectories.search import find_trajectories
from expstore.transforms import StepView
from expstore.writers.writers import RoundRobinWriter, Writer, default_writer

__all__ = ["ReplayBuffer"]

_LIMIT = 1000  # draws after which a follower, which cannot ask, gives up
_TRANSFORMS = 1 << 40  # stands where a redraw has its number: what transforms draw is of no draw of rows


class ReplayBuffer(Patching, LateFields, Direct):
    """Store transitions and sample batches of them.

    Threads: any number may sample while one writes; writers wait for one another. Processes: one
    writer per store; in a forked child, and pickled into another process (a DataLoader's workers, say),
    the buffer follows: it reads what the writer writes, and draws batches of its own. A copy of one in RAM
    has rows of its own. Crashes: as the storage promises; on disk an `extend` that returned survives the
    process, a `flush` that returned survives the machine.

    Args:
        storage: Where rows are kept, or a function that makes it; `MemoryStorage(1000)` by default.
        sampler: What makes up a batch, or such a function; uniform by default.
        writer: Where rows go, or such a function; in a ring the newest replace the oldest by default,
            or as the store was filled.
        collate_fn: Makes a batch of what the storage gives: rows that are objects, in a list, or what is a
            batch already. None: objects are stacked where that can be done.
        transform: What is done to batches on their way out (a callable), or both ways (a torchrl Transform).
        transform_factory: A function that makes it.
        dim_extend: Which dim of a batch given to `extend` is time; None: the last of those that make rows.
        batch_size: Of `sample` and iteration; may be given to `sample` instead.
        device: Where batches are handed out; None: where the storage says.
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
        as_numpy: Whether `sample` and iteration return NumPy arrays unless `sample` is told otherwise.
        torchrl: Keywords of TorchRL's class that have no effect here: accepted at their defaults, otherwise
            refused with the reason.

    Example:
        >>> rb = ReplayBuffer(storage=MemoryStorage(1000), batch_size=2)
        >>> rb.extend(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
        tensor([0, 1, 2, 3, 4])
        >>> rb.sample()["observation"].shape
        torch.Size([2, 3])
    """

    _bound: ClassVar[tuple[str, ...]] = (*ShapingHandle._bound, "_reader", "_read_of", "_iterator")
    _reader: StepReader | None = None
    _read_of: Schema | None = None  # what it reads rows of
    _iterator: Iterator[Any] | None = None

    def __init__(
        self,
        *,
        storage: ReadView | Callable[[], ReadView] | None = None,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Any = None,
        transform_factory: Callable[[], Any] | None = None,
        dim_extend: int | None = None,
        batch_size: int | None = None,
        device: torch.device | str | None = None,
        prefetch: int | None = None,
        pin_memory: bool = False,
        generator: torch.Generator | None = None,
        consume_after_n_samples: int | None = None,
        sample_unit: SampleUnit | None = None,
        rate_limiter: RateLimiter | None = None,
        as_numpy: bool = False,
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, BUFFER)
        self.shared = False
        self._domain = NO_DOMAIN
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory are mutually exclusive; give one of them")
        check_drawing(batch_size, prefetch, pin_memory, device=device)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
        drawing = None if sampler is None else adapt(called(sampler, "sample"))
        check_predictable(batch_size, drawing)
        self._unit = check_unit(sample_unit, drawing)
        kept = MemoryStorage(1000) if storage is None else made(storage, ReadView, "get")
        self._writer = self._default_writer(kept) if writer is None else made(writer, Writer, "write")
        super().__init__(
            kept,
            consume_after(consume_after_n_samples, drawing, prefetch=prefetch),
            collate_fn=collate_fn,
            transform=transform if transform_factory is None else transform_factory(),
            dim_extend=dim_extend,
            device=device,
            pin_memory=pin_memory,
            prefetch=prefetch or 0,
            generator=generator,
            limiter=rate_limiter,
        )
        self._batch_size = batch_size
        self._as_numpy = as_numpy

    # -- the two data paths ----------------------------------------------------------------------

    def extend(
        self,
        data: Any,
        *,
        source: str | None = None,
        return_ids: bool = False,
        episode_info: Mapping[str, Any] | None = None,
        update_priority: bool | None = None,
        validate: Literal["schema", "domain"] = "schema",
        idempotency_key: str | bytes | None = None,
        digest: bytes | None = None,
        session: str | None = None,
    ) -> torch.Tensor:
        """Append a batch of rows, all of them or none.

        Rows with trajectory id -1 or `("collector", "mask")` False are dropped.

        With an idempotency key a call that is made again writes nothing and returns what the first one did,
        also after a restart, and when its rows have left: of a store on disk a key survives what its rows
        survive. The last 100,000 keys are known, for 24 hours. Two calls at once with the same key: one
        writes, the other one waits for it.

        Args:
            data: Rows: a TensorDict, a tensor, a tensorclass, or a tree (tuple or dict) of tensors. A dict
                of arrays, nested, is one value per row for each field; buffers that `expstore.open`
                returns, and others whose rows have fields, take these, and Arrow tables whose columns are
                named with dots (`next.reward`). A list is rows one by one. Rows of no fixed size (of an
                `ArrowStorage`) may differ in shape, have nested tensors, and values of Python's own. For
                stores made by `expstore.open` all batch dims are rows, time is the dim named "time", else
                the last, and each place along the others is a stream of its own. Elsewhere the storage's
                `ndim` first dims are, of which `dim_extend` is time.
            source: Name of the stream of experience, within the session. None: the session's unnamed stream.
                Rows of two sessions never share an episode: after a restart, the same name begins new
                episodes, unless `episodes.resume` adopts the former ones. Writers that alternate row by row
                under one source cannot be told from n-step rows, and share an episode.
            return_ids: Return ids, which are never used again, instead of indices.
            episode_info: Facts to note about every episode that has a row in the batch, as `annotate` does;
                they are there with the rows or not at all.
            update_priority: Whether priorities that come with the rows count, in a buffer that knows where
                they are; None: they do.
            validate: "domain": look at the values, too, and add nothing if one is not as `specs` say.
            idempotency_key: What names this write, whoever makes it, and no other one.
            digest: 16 bytes that follow from what is written: a hash of a request's body, say. The same key
                with another digest is refused. None: the same key is taken to mean the same rows.
            session: Id of the remote session that writes, as a server names its clients. None: this handle's
                own session, which ends when the store is closed or opened for writing again. A remote session
                ends by `episodes.end_session`; rows that come later open it again.

        Returns:
            Index, or id, of each row; -1 for rows that were not taken in. Shape `(n,)`, int64; of indices
            `(n, ndim)` where `ndim` is larger than 1.

        Raises:
            SchemaError: The batch does not fit the store, or its specs, or JSON has no form for a fact.
            StateError: The store is closed or cannot be written; or it has no specs to validate by; or the
                key is that of another write (kind "key_reused"); or the writer lets rows take the places of
                others, and keeps no keys (kind "no_keys").
            StorageError: The disk failed; nothing was added.
        """
        info, domain = pack_info(episode_info), validate != "schema" and asks_for_domain(validate)
        key = idempotency.make_key(self._writer, idempotency_key, digest)
        known = None if key is None else idempotency.known_numbers(self._storage, key, return_ids)
        if known is not None:
            return self._indices(known, flat=return_ids)
        batch = self._taken(data)
        if batch is None:
            return self._indices(np.zeros(0, np.int64), flat=return_ids)
        batch.prioritized = self._counts_priorities(update_priority)
        batch.validated = domain
        batch.session = None if session is None else remote_session(session)
        return self._indices(self._append(batch, source, return_ids, info, key), flat=return_ids)

    def _counts_priorities(self, asked: bool | None) -> bool:
        if asked is not None:
            raise NotImplementedError(
                "update_priority is not supported in this class, which does not know where priorities are; "
                "use a TensorDictReplayBuffer, or update_priority(index, priority)"
            )
        return False

    def _indices(self, numbers: IntArray, *, flat: bool = False) -> torch.Tensor:
        """Return rows' numbers as users know them: one for each dim that makes rows."""
        flat = flat or self._storage.geometry.ndim == 1
        return torch.from_numpy(numbers if flat else self._unravel(numbers))

    def _unravel(self, numbers: IntArray) -> IntArray:
        """Return one number for each dim that makes rows. Shape `(n,)`, or `(n, ndim)`."""
        geometry = self._storage.geometry
        return numbers if geometry.ndim == 1 else geometry.unravel(numbers)

    def _append(
        self, batch: Batch, source: str | None, return_ids: bool, info: str, key: WriteKey | None
    ) -> IntArray:
        if self._limiter is None:
            return self._take_in(batch, source, return_ids, info, key)
        self._storage.writer()
        with self._limiter.inserting(batch.count, needless=partial(idempotency.is_known, self._storage, key)):
            return self._take_in(batch, source, return_ids, info, key)

    def _take_in(
        self, batch: Batch, source: str | None, return_ids: bool, info: str, key: WriteKey | None
    ) -> IntArray:
        storage = self._storage
        with storage.locks.extend, storage.lock:
            writable = storage.writer()
            self._writer.check()
            written = None if key is None else idempotency.find_write(storage, key)
            if written is not None and not written.dropped:
                return idempotency.numbers_of(storage, written, return_ids)
            if batch.count == 0:
                return np.zeros(0, np.int64)
            if batch.validated:
                self._domain = check_domain(storage, batch, self._domain)
            schema, reader = self._prepared(writable, batch)
            columns = batch.columns(schema)
            kept = reader.transitions(columns)
            if written is not None:
                return idempotency.numbers_in_part(storage, written, kept, return_ids)
            more: dict[str, Any] = {} if key is None else {"key": replace(key, dropped=kept is not None)}
            if kept is not None:
                batch, columns = batch.keep(kept), [pick(column, kept) for column in columns]
            if batch.count == 0:
                return np.full(0 if kept is None else kept.size, -1)
            steps = reader.read(columns, batch)
            steps.session = batch.session
            priorities = self._given_priorities(schema, columns) if batch.prioritized else None
            last = storage.window.last
            ids = self._writer.write(writable, columns, steps, source=source, info=info, **more)
            run = storage.window.last - last == ids.size  # all were appended: their ids follow one another
            if priorities is not None:
                writable.set_priorities(ids, priorities)
            self._sampler.on_write(ids if run else ids[ids != -1])
        numbers = ids if return_ids else storage.geometry.indices_of(ids, run=run)
        return numbers if kept is None else idempotency.spread(numbers, kept)

    def _given_priorities(self, schema: Schema, columns: Sequence[Array]) -> Array | None:
        """Return the priorities that come with new rows. Shape `(n,)`."""
        return None

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, as_numpy: bool | None = None
    ) -> Any:
        """Draw a batch.

        Draw number k is the same whatever happened before it, so a restart goes on with the batches
        that would have come.

        Args:
            batch_size: How many rows; None: the buffer's.
            return_info: Return a pair: the batch, and a dict with each row's `index`, its `id`, and
                what the sampler has to say (`priority_weight`; the ends of slices).
            as_numpy: Return NumPy arrays instead of tensors, in nested dicts instead of TensorDicts; `info`
                has arrays, too. They lie in host memory, whatever the buffer's device. bfloat16 becomes
                float32; fields without a fixed size are arrays of objects, one for each row. JAX takes them
                by `jax.numpy.asarray` or `jax.dlpack.from_dlpack`. None: as the buffer was made.

        Returns:
            A TensorDict that owns its memory, batch size `[batch_size]`, or whatever rows are; fewer rows
            where the sampler says so. Fields without a fixed size are nested tensors and `NonTensorStack`s.
            With `as_numpy` field name -> array. Shapes `(batch_size, *row shape)`.

        Raises:
            NotReadyError: The store is empty, or no row is left that may still be drawn.
        """
        as_numpy = self._as_numpy if as_numpy is None else as_numpy
        batch, selection = self._next_batch(Request(self._wanted(batch_size), as_numpy))
        return (batch, self._info(selection, batch, as_numpy=as_numpy)) if return_info else batch

    def _make(self, turn: Turn, request: Request, instead: Selection | None = None) -> tuple[Any, Selection]:
        return unmoved(self._storage, partial(self._build, turn, request, instead))

    def _build(self, turn: Turn, request: Request, instead: Selection | None) -> tuple[Any, Selection]:
        selection, columns, view = self._draw(turn, request.size, instead)
        root = self._root(selection)
        more = self._marked(selection, columns) if selection.marks or selection.info else None
        numbers = self._draws.numbers(turn, _TRANSFORMS) if self._transform.draws else None
        give = self._build_arrays if request.as_numpy else self._given
        return give(columns, (selection.ids.size,), root, more, view, numbers), selection

    def _draw(
        self, turn: Turn, size: int, selection: Selection | None = None
    ) -> tuple[Selection, list[Array], StepView | None]:
        storage = self._storage
        for redraw in range(_LIMIT):
            generator = self._draws.numbers(turn, redraw)
            if redraw == PATIENCE:
                storage.lock.acquire()
            try:
                if selection is None:
                    selection = self._sampler.sample(storage, size, generator)
                else:
                    anchors = selection.anchors or selection
                    selection = self._sampler.sample_again(storage, anchors, generator)
                rows = selection if self._unit is None else self._unit.select(selection, storage)
                if rows is not None:
                    if (limit := READ_LIMIT.get()) is not None:
                        limit.check(storage, rows.ids)
                    view = self._look(rows.ids, generator)
                    if view is None:
                        columns = storage.read(rows.ids)
                        if storage.intact(rows.ids):
                            return rows, columns, None
                    else:
                        columns = view.columns()
                        if view.intact:
                            return replace(rows, oldest=view.oldest), columns, view
                storage.counters.redraws += 1
            finally:
                if redraw == PATIENCE:
                    storage.lock.release()
        # Only a follower gets here: with the lock held nothing is overwritten in this process.
        raise StateError(OVERTAKEN, hint="sample less at once, or give the store a larger capacity")

    def _look(self, ids: IntArray, generator: np.random.Generator) -> StepView | None:
        """Look at other steps than those of a batch, where something asks for them."""
        return self._transform.look(self._storage, ids, generator)

    def _marked(self, selection: Selection, columns: list[Array]) -> dict[Key, Array]:
        """Write a sampler's flags into columns of the schema; return those of other fields."""
        return {}

    def _info(self, selection: Selection, batch: Any, *, as_numpy: bool = False) -> dict[str | Key, Any]:
        index: Any = self._unravel(self._storage.geometry.index_of(selection.ids))
        info: dict[str | Key, Array] = {"id": selection.ids}
        if self._writer.tracks_generations:
            info["index_generation"] = self._storage.geometry.generations_of(selection.ids)
        info |= {key if len(key) > 1 else key[0]: values for key, values in selection.info.items()}
        for mark in selection.marks:
            stored = _entry(batch, mark.key)
            if stored is not None or mark.new:
                key = mark.key if len(mark.key) > 1 else mark.key[0]
                info[key] = mark.alone() if stored is None else mark.on(to_array(stored))
        if as_numpy:
            parts = tuple(np.moveaxis(index, -1, 0)) if index.ndim > 1 else index
            return {"index": parts} | info | selection.notes
        told: dict[str | Key, Any] = {k: self._placed(torch.from_numpy(v)) for k, v in info.items()}
        index = self._placed(torch.from_numpy(index))
        return {"index": tuple(index.unbind(-1)) if index.ndim > 1 else index} | told | selection.notes

    # -- single rows -----------------------------------------------------------------------------

    def add(
        self,
        data: Any,
        *,
        source: str | None = None,
        episode_info: Mapping[str, Any] | None = None,
        validate: Literal["schema", "domain"] = "schema",
        idempotency_key: str | bytes | None = None,
        digest: bytes | None = None,
    ) -> Any:
        """Append one row; return its index, or -1 if it is not taken in.

        Args:
            data: One row: a TensorDict without batch dims, for instance. Where `ndim` is larger than 1 it is
                one row for each lane, and their indices are returned. Shape `(lanes, ndim)`, int64.
            source: As in `extend`.
            episode_info: As in `extend`.
            validate: As in `extend`.
            idempotency_key: As in `extend`.
            digest: As in `extend`.
        """
        info, domain = pack_info(episode_info), validate != "schema" and asks_for_domain(validate)
        key = idempotency.make_key(self._writer, idempotency_key, digest)
        numbers = None if key is None else idempotency.known_numbers(self._storage, key, return_ids=False)
        if numbers is None:
            batch = self._taken(data, single=True)
            if batch is None:
                return self._indices(np.zeros(0, np.int64))
            batch.prioritized = self._counts_priorities(None)
            batch.validated = domain
            numbers = self._append(batch, source, False, info, key)
        return int(numbers[0]) if self._storage.ndim == 1 else self._indices(numbers)

    def record(
        self, source: str | None = None, *, lanes: int | None = None, flush_steps: int = 1
    ) -> Recorder:
        """Record the steps of an environment loop, one call per step.

        It takes a fraction of the time of `add`: values go to arrays that are allocated once, and nothing is
        built. An episode of the source that is open is cut, unless it was adopted by `episodes.resume`.

        Args:
            source: Name of the stream, as in `extend`.
            lanes: How many environments step together: every value has a first dim of that size then. None:
                one, whose values have no such dim.
            flush_steps: So many steps are published together. With 1 what `step` returned survives the
                process; with n up to n - 1 steps are lost.

        Raises:
            ValueError: `lanes` or `flush_steps` is less than 1.
            StateError: The store is closed, or open for reading only.

        Example:
            >>> with rb.record("env-0") as episode:
            ...     episode.step(observation, action, reward, following, terminated, truncated)
        """
        return Recorder(_RecorderTarget(self), source, lanes=lanes, flush_steps=flush_steps)

    def __len__(self) -> int:
        return self._sampler.left(self._storage)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, without end or until the sampler has run out of rows.

        Raises:
            StateError: No batch size is known.
        """
        if self._batch_size is None:
            raise StateError(
                "Cannot iterate over the replay buffer. Batch_size was not specified during construction of "
                "the replay buffer",
                hint="give it to the constructor, or to sample()",
            )
        while True:
            yield self.sample()
            if self._sampler.ran_out:
                return

    def next(self) -> Any:
        """Return the next batch of an iteration that goes on from call to call; None: it is at its end."""
        if self._iterator is None:
            self._iterator = iter(self)
        batch = next(self._iterator, None)
        if batch is None:
            self._iterator = None
        return batch

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether `sample` would find rows to draw.

        Raises:
            StateError: No batch size is known.
        """
        return self._sampler.can_sample(self._storage, self._wanted(batch_size))

    def query(
        self,
        predicate: Callable[[Any], Any] | None = None,
        trajectory_key: str | tuple[str, ...] | None = None,
    ) -> list[Any]:
        """Return the trajectories that meet a condition, the oldest first.

        A condition made of `expstore.traj` has only the fields read that it names; whole rows are read where
        it is met. `sql` and `episodes` ask about what is not in the rows any more, too.

        Args:
            predicate: Made of `traj`, or a function of a `Trajectory`; None: all of them.
            trajectory_key: The field that names trajectories; None: as the store knows its episodes.

        Returns:
            A `Trajectory` for each: what samples would be of its rows, in the order of its steps.

        Raises:
            NotFoundError: There is no such field; or nothing says where trajectories end.
            TypeError: Rows are no TensorDicts; or the condition has a value per step.

        Example:
            >>> rb.query((traj.reward.sum() > 100) & (traj.length >= 50))
        """
        return unmoved(
            self._storage,
            lambda: find_trajectories(
                self._storage, self._transform, predicate, trajectory_key, self._placed
            ),
        )

    def to_torch_dataset(
        self,
        slice_len: int | None = None,
        *,
        stride: int | None = None,
        strict_length: bool = True,
        shuffle: bool = True,
        rows: RowKind = "tensordict",
    ) -> RowsDataset | SlicesDataset:
        """Return the buffer as torch's `Dataset`, for a `DataLoader` with any number of workers.

        Workers follow the store: they read beside the writer, take no lock, and see what it goes on writing.

        Args:
            slice_len: None: row by row, by index; otherwise slices of so many steps of one episode, each
                once per pass, by one of the workers.
            stride: From the first step of a slice to that of the next; None: `slice_len`.
            strict_length: Leave out shorter slices at the end of episodes.
            shuffle: Slices come in random order, by torch's seed. Rows come as the `DataLoader` asks.
            rows: What comes: a "tensordict", for which the `DataLoader` needs the data set's `collate` as
                its `collate_fn`, or a "dict" of tensors, nested, which it collates by itself.

        Raises:
            ValueError: An argument has no meaning, or none without `slice_len`.

        Example:
            >>> dataset = rb.to_torch_dataset()
            >>> loader = DataLoader(dataset, 256, shuffle=True, num_workers=2, collate_fn=dataset.collate)
        """
        return make_dataset(self, slice_len, stride, strict_length, shuffle, rows)

    def update_priority(self, index: Any = None, priority: Any = None, *, id: Any = None) -> int:
        """Set the priorities of rows that are still there.

        By id, a row that has left since it was sampled is skipped, never another one changed.

        Args:
            index: Which rows, by index; -1 stands for none. Shape `(n,)`; `(..., ndim)`, or a tuple of `ndim`
                tensors, which are broadcast together, where that is larger than 1; or give `id`.
            priority: Finite, not negative; one for all, or one or several each, of which the sampler's
                reduction makes one. Shape `()` or `(n, ...)`; where `ndim` is larger than 1 as many values as
                rows are one each, in the order of `index`, whatever their shape: `(time, lane)`, say.
            id: Which rows, by id. Any shape.

        Returns:
            How many were set.

        Raises:
            PriorityError: A priority is negative, NaN or infinite; none was set.
        """
        if (index is None) == (id is None) or priority is None:
            raise TypeError("update_priority takes a priority and either index or id")
        numbers = self._numbers(index) if id is None else to_array(id)
        values = to_array(priority)
        if values.size == numbers.size and (self._storage.ndim > 1 or values.shape == numbers.shape):
            values = values.reshape(-1)
        numbers = numbers.reshape(-1).astype(np.int64, copy=False)
        if values.dtype != np.float32 or values.ndim > 1:
            values = self._sampler.reduce(values.astype(np.float64, copy=False))
        if values.size not in (1, numbers.size):
            raise SchemaError(f"{numbers.size} rows are given {values.size} priorities")
        if values.size != numbers.size:
            values = np.broadcast_to(values.reshape(-1), numbers.shape)
        if id is None and numbers.size and numbers.min() < 0:
            numbers, values = numbers[numbers != -1], values[numbers != -1]
        with self._storage.lock:
            ids = numbers if id is not None else self._storage.geometry.ids_at(numbers, self._storage.window)
            count = self._storage.writer().set_priorities(ids, values)
        self._sampler.on_priority_update(self._storage, ids, values)
        return count

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, under torchrl's names: of storages in RAM the rows, too.

        Rows of a store on disk stay where they are (`dumps`); of those it says which they are.
        """
        return super().state_dict() | {
            "_writer": self._writer.state_dict(),
            "_transforms": self._transform.state_dict(),
            "_batch_size": self._batch_size,
        }

    def _check_state(self, state: Mapping[str, Any]) -> None:
        super()._check_state(state)
        if not {"_writer", "_transforms", "_batch_size"} <= state.keys():
            raise StateError(f"that is no state of a {type(self).__name__}")
        self._writer.load_state_dict(state["_writer"])

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on with the batch that would have come after `state_dict`, as far as the rows are the same.

        Rows that the state holds take the place of those in the storage, as `loads` says; for others the
        storage must have them. The batch size, and what transforms keep, are the state's. Open episodes end:
        who wrote them begins anew.

        Raises:
            StateError: The state is of another kind of sampler or of other transforms, of a store with
                another seed or with rows that are not here, of another `where` or `weight`, or the draws
                follow from a generator in one of both only, or one for another device; nothing was changed.
            SchemaError: The rows have other fields; nothing was changed.
            ValueError: The writer was set up otherwise; nothing was changed.
        """
        self._check_state(state_dict)
        self._transform.load_state_dict(state_dict["_transforms"])
        super().load_state_dict(state_dict)
        end_episodes(self._storage)
        self._batch_size = state_dict["_batch_size"]

    def _numbers(self, index: Any) -> Array:
        """Return rows' numbers, given as users know them."""
        if isinstance(index, tuple):
            index = stack_index(index)
        numbers = to_array(index)
        return (
            numbers
            if self._storage.ndim == 1
            else self._storage.geometry.ravel(numbers, self._storage.window)
        )

    @property
    def batch_size(self) -> int | None:
        """Rows per batch, unless `sample` is told otherwise."""
        return self._batch_size

    def stats(self) -> dict[str, Any]:
        """Return facts about the buffer that JSON can keep."""
        storage = self._storage
        mine: dict[str, Any] = {"batch_size": self._batch_size, "initialized": self.initialized}
        if storage.capacity is not None:
            mine["utilization"] = len(storage) / storage.capacity
        return super().stats() | mine

    def __repr__(self) -> str:
        storage = self._storage
        room = "unbounded" if storage.capacity is None else f"capacity {storage.capacity}"
        return f"{type(self).__name__}({storage.kind}, {len(storage)} rows, {room}, {self._sampler!r})"

    # -- helpers ---------------------------------------------------------------------------------

    def _attached(self, storage: ReadView) -> None:
        self._writer.register_storage(storage)
        super()._attached(storage)

    def _users_of(self, key: Key) -> list[str]:
        read = self._unit is not None and key in self._unit.reads
        return [*super()._users_of(key), *([f"the sample unit ({self._unit!r})"] if read else [])]

    def _check_sampler(self, sampler: Sampler) -> None:
        check_unit(self._unit, sampler)
        consume_after(None, sampler, prefetch=self._prefetch)

    def empty(self, empty_write_count: bool | None = None) -> None:
        """Forget all rows; ids and episode ids go on, indices begin at 0 in a ring.

        Args:
            empty_write_count: False or None: `write_count` says how many rows were ever written.

        Raises:
            ValueError: It is True.
            StateError: The store is closed, or open for reading only; or its writer lets nothing change.
        """
        if empty_write_count:
            raise ValueError(
                "empty_write_count=True means nothing here: write_count says how many rows were ever "
                "written; leave it out"
            )
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

    def _prepared(self, storage: Storage, batch: Batch) -> tuple[Schema, StepReader]:
        """Return the schema, fixed by the first rows, and what reads steps."""
        if storage.schema is None:
            self._writer.check_fields(Schema.infer(batch.signature(), batch.form))
            self._writer.begin(storage)
        schema = prepare(storage, batch) if batch.arranged is None else storage.require_schema()
        if self._reader is None or self._read_of is not schema:
            if self._limiter is None and storage.draws.limits[1]:
                storage.draws.note_limits(0, 0)  # what it had counted is not all any more
            self._reader, self._read_of = StepReader(schema, storage.keys), schema
            self._intake = None
            if (
                is_plain(schema.form)
                and not schema.variable
                and storage.geometry.ndim == 1
                and not self.dim_extend
            ):
                self._intake = Intake(schema)
        return schema, self._reader

    def _wanted(self, batch_size: int | None) -> int:
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise StateError("batch_size not specified", hint="give it to sample(), or to the buffer")
        check_batch_size(size)
        return int(size)

    def _default_writer(self, storage: ReadView) -> Writer:
        return default_writer(storage)


class _RecorderTarget:
    """Write the rows of a recorder to a buffer.

    Args:
        buffer: The buffer.
    """

    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer

    def schema(self) -> Schema | None:
        """Return the fields; None: no rows have come yet."""
        return self._buffer._storage.schema

    def prepare(self, row: Mapping[str, Any]) -> Schema:
        """Fix the fields by those of one row, which is not written; return them."""
        rb = self._buffer
        if rb._storage.row_traits.whole:
            raise SchemaError(
                f"rows of a {type(rb._storage).__name__} are objects without fields, which a step has",
                hint="use a LazyTensorStorage, a MemoryStorage, or expstore.open()",
            )
        with rb._storage.lock:
            writer = rb._storage.writer()
            batch = rb._read_columns(dict(row), layout_of(rb._storage, rb._dim_extend), single=True)
            return rb._prepared(writer, batch)[0]

    def append(self, batch: Batch, source: str | None) -> None:
        """Append rows in the columns of the schema."""
        rb = self._buffer
        if len(rb._transform):
            rows = rb._current_form().build(batch.arrays, (batch.count,), {})
            changed = rb._taken(rows)
            if changed is None:
                return
            batch = replace(changed, lanes=batch.lanes, lane_count=batch.lane_count)
        batch.linked = bool(
            rb._storage.episodes.joins.awaiting
        )  # of adopted episodes the first row is checked
        batch.prioritized = rb._counts_priorities(None)
        rb._append(batch, source, True, "", None)

    def row_appender(self, source: str | None, schema: Schema) -> RowAppending | None:
        """Return what appends single rows faster than `append`; None: nothing does."""
        rb = self._buffer
        heard = type(rb._sampler).on_write is not Sampler.on_write
        appends = type(rb._writer).write is RoundRobinWriter.write
        if heard or rb._limiter is not None or len(rb._transform) or not appends:
            return None
        if rb._counts_priorities(None) and rb._given_priorities(schema, _empty(schema)) is not None:
            return None
        return rb._storage.writer().row_appender(source, schema)

    def cut(self, source: str | None) -> None:
        """End the open episodes of a stream of this session; see `RecorderTarget`."""
        storage = self._buffer._storage
        with storage.lock:
            table = storage.episodes
            own = () if source is None else table.sources_named(source, session=table.session)
            if table.joins.awaiting.isdisjoint(own):
                self._buffer.episodes.end_stream(source)


def _empty(schema: Schema) -> list[Array]:
    """Return columns without rows."""
    return [np.empty((0, *entry.shape), entry.numpy_dtype) for entry in schema.fields]


def _entry(batch: Any, key: Key) -> Any:
    """Return an entry of a TensorDict, or of nested dicts; None: it has no such one."""
    if is_tensor_collection(batch):
        return batch.get(key)
    for name in key:
        batch = batch.get(name) if isinstance(batch, dict) else None
    return batch
