"""The replay buffers: storage, sampler and writer put together, batches in and out.

What users hold. A buffer owns its parts and passes each call to one of them: `Ingest` appends, `Sampling`
draws, `StoredRows` reads by index, `RowUpdates` changes rows, all of them on one `StoreHandle`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch.utils._pytree import tree_leaves

from expstore.buffers import torchrl_service
from expstore.buffers.arguments import (
    called,
    check_batch_size,
    check_drawing,
    check_predictable,
    made,
)
from expstore.buffers.batch_builder import BatchBuilder
from expstore.buffers.columns import Columns
from expstore.buffers.domain_checks import row_text, specs_of
from expstore.buffers.episodes import Episodes
from expstore.buffers.field_stats import StatsKeeper
from expstore.buffers.indexing import RowIndex, StoredRows
from expstore.buffers.ingest import Ingest
from expstore.buffers.prefetch import Request
from expstore.buffers.recorder import Recorder
from expstore.buffers.retention import Retention
from expstore.buffers.row_styles import PlainRows, RowStyle
from expstore.buffers.sample_units import SampleUnit, check_unit
from expstore.buffers.sampling import Sampling
from expstore.buffers.snapshots import Snapshots
from expstore.buffers.store_handle import Life, StoreHandle
from expstore.buffers.torch_dataset import RowKind, RowsDataset, SlicesDataset, make_dataset
from expstore.buffers.updates import ConditionalUpdateResult, Patch, RowUpdates, leaves_of
from expstore.core.rate_limiters import RateLimiter
from expstore.core.torchrl_keywords import BUFFER, check_keywords
from expstore.core.values import to_key
from expstore.data.sample_metadata import SAMPLE_METADATA, decode_metadata
from expstore.errors import StateError
from expstore.samplers.base import Sampler
from expstore.samplers.consuming import consume_after
from expstore.samplers.names import SamplerName
from expstore.samplers.torchrl_adapter import adapt, given
from expstore.schema.schema import Schema
from expstore.storages.base import Hook
from expstore.storages.memory import MemoryStorage
from expstore.storages.read_view import ReadView, closed_error, unmoved
from expstore.storages.sessions import end_episodes
from expstore.storages.snapshots.catalog import Version
from expstore.storages.stats import describe, meta_of
from expstore.trajectories.search import find_trajectories
from expstore.transforms import Compose
from expstore.writers.writers import Writer

if TYPE_CHECKING:
    from expstore.specs import Composite
    from expstore.sql.index import Result

__all__ = ["ReplayBuffer"]


class ReplayBuffer:
    """Store transitions and sample batches of them.

    Threads: any number may sample while others write; writers wait for one another. Processes: a store has
    one writer. In a forked child, and in a pickled copy (in a DataLoader's worker, say), the buffer is a
    follower: it reads what the writer writes, and draws batches of its own. A copy of a buffer in RAM has
    rows of its own. Crashes: on disk, rows of an `extend` that returned survive the process, and rows written
    before a `flush` that returned survive the machine.

    Args:
        storage: Where rows are kept, or a function that returns it; `MemoryStorage(1000)` by default.
        sampler: Chooses the rows of a batch, or a function that returns the sampler; uniform by default.
        writer: Gives rows their places, or a function that returns the writer. By default the newest rows of
            a ring replace the oldest; a store that was filled by another writer keeps its rule.
        collate_fn: Makes a batch of what the storage returns: a list of objects, or rows that are a batch
            already. None: objects are stacked if they can be.
        transform: A callable that changes samples, or a torchrl Transform, which may change writes, too.
        transform_factory: A function that returns the transform.
        dim_extend: Which dim of a batch given to `extend` is time; None: the last of those that make rows.
        batch_size: Rows per batch; may be given to `sample` instead.
        device: Device of the batches; None: the storage's.
        prefetch: How many batches a thread makes ahead. A batch is drawn again if its rows were overwritten
            or changed, if another size is asked for, or if the generator was seeded. Priorities set during
            the last `prefetch` batches may not count yet.
        pin_memory: Return batches in pinned memory; with `device` they are copied without waiting.
        generator: Random numbers of all draws; None: the store's seed. Each sync stores its state, and the
            next opening continues from the stored state.
        consume_after_n_samples: Return each row so many times, and no more; see `ConsumingSampler`.
        sample_unit: What every sampled row stands for: itself, or a `Sequence` of steps around it.
        rate_limiter: How many rows may be sampled for each row that is written. `sample`, `extend` and `add`
            wait for it. See `MinSize` and `SampleToInsertRatio`.
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

    def __init__(
        self,
        *,
        storage: ReadView | Callable[[], ReadView] | None = None,
        sampler: Sampler | SamplerName | Callable[[], Sampler] | None = None,
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
        _style: RowStyle | None = None,
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, BUFFER)
        if transform is not None and transform_factory is not None:
            raise TypeError("transform and transform_factory are mutually exclusive; give one of them")
        check_drawing(batch_size, prefetch, pin_memory, device=device)
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {generator!r}")
        chosen = None if sampler is None else adapt(called(sampler, "sample"))
        check_predictable(batch_size, chosen)
        check_unit(sample_unit, chosen)
        opened = MemoryStorage(1000) if storage is None else made(storage, ReadView, "get")
        style = PlainRows() if _style is None else _style
        placing = style.default_writer(opened) if writer is None else made(writer, Writer, "write")
        drawing = consume_after(consume_after_n_samples, chosen, prefetch=prefetch)
        chain = Compose.of(transform if transform_factory is None else transform_factory())

        stored = meta_of(opened).get(SAMPLE_METADATA)
        metadata = None if stored is None else decode_metadata(stored)

        #: TorchRL's word for a buffer that other processes write to.
        self.shared = False
        self._batch_size = check_batch_size(batch_size)
        self._as_numpy = as_numpy
        self._iterating = False  # `next` has returned a batch of the present pass
        self._store = store = StoreHandle(opened)
        self._index = RowIndex(store, dim_extend)
        self._batches = BatchBuilder(
            style,
            chain,
            collate_fn=collate_fn,
            device=device,
            pin_memory=pin_memory,
            metadata=metadata,
        )
        self._sampling = Sampling(
            store, self._batches, style, drawing,
            unit=sample_unit, limiter=rate_limiter, prefetch=prefetch or 0, generator=generator,
        )  # fmt: skip
        self._ingest = Ingest(
            store, self._index, self._sampling, style, chain, placing, rate_limiter,
            skips_metadata=metadata is not None,
        )  # fmt: skip
        self._rows = StoredRows(store, self._index, self._batches, self._ingest)
        self._updates = RowUpdates(store, self._index, self._sampling, self._ingest)
        self._stats_keeper = StatsKeeper(store)
        self._batches.label_generations(placing.tracks_generations)
        self._connect()

    def _connect(self) -> None:
        """Attach the parts to the storage."""
        for part in (self._ingest, self._batches, self._sampling, self._stats_keeper):
            self._store.add_part(part)

    # -- the two data paths ----------------------------------------------------------------------

    def extend(
        self,
        data: Any = None,
        *,
        tensordicts: Any = None,
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

        A call that repeats an idempotency key writes nothing and returns what the first call returned, also
        after a restart and after its rows were evicted: on disk a key survives what its rows survive. The
        last 100,000 keys are known, for 24 hours. Of two concurrent calls with the same key one writes and
        the other waits for it.

        Args:
            data: Rows: a TensorDict, a tensor, a tensorclass, or a tree (tuple or dict) of tensors. A dict
                of arrays, nested, is one value per row for each field; buffers that `expstore.open`
                returns, and others whose rows have fields, take these, and Arrow tables whose columns are
                named with dots (`next.reward`). A list holds one row per item. Variable-length rows (in an
                `ArrowStorage`) may differ in shape, and hold nested tensors and Python values. In stores made
                by `expstore.open` all batch dims make rows: time is the dim named "time", else the last one,
                and each place along the others is a stream of its own. Elsewhere the first `ndim` dims make
                rows, and `dim_extend` is time.
            tensordicts: `data`, under the name that TorchRL's TensorDictReplayBuffer has for it.
            source: Name of the stream of experience, within the session. None: the session's unnamed stream.
                Rows of two sessions never share an episode: after a restart the same name begins new
                episodes, unless `episodes.resume` adopts the former ones. Writers that alternate row by row
                under one source look like n-step rows, and share an episode.
            return_ids: Return ids, which are never used again, instead of indices.
            episode_info: Facts to note about every episode that has a row in the batch, as
                `episodes.annotate` does. They are committed with the rows.
            update_priority: Whether to set the priorities that come with the rows, in a buffer that knows
                where they are; None: set them.
            validate: "domain": also check values against `specs`, and append nothing if one is not allowed.
            idempotency_key: The name of this write, and of no other one.
            digest: 16 bytes that follow from the rows, such as a hash of a request's body. The same key with
                another digest is refused. None: the same key means the same rows.
            session: Id of the remote session that writes, as a server names its clients. None: the local
                session, which ends when the store is closed or opened for writing again. A remote session
                ends by `episodes.end_session`; later rows reopen it.

        Returns:
            Index, or id, of each row; -1 for dropped rows. Shape `(n,)`, int64. If `ndim` is larger than 1,
            indices have shape `(n, ndim)`.

        Raises:
            SchemaError: The batch does not fit the store or its specs, or JSON has no form for a fact.
            TypeError: Both `data` and `tensordicts` are given.
            StateError: The store is closed or cannot be written; it has no specs to validate by; the key is
                that of another write (kind "key_reused"); or the writer keeps no keys (kind "no_keys").
            StorageError: The disk failed; nothing was appended.
        """
        if tensordicts is not None:
            if data is not None:
                raise TypeError("data and tensordicts are the same argument; give one of them")
            data = tensordicts
        options = self._ingest.options(
            source=source, episode_info=episode_info, update_priority=update_priority, validate=validate,
            idempotency_key=idempotency_key, digest=digest, session=session, return_ids=return_ids,
        )  # fmt: skip
        numbers = self._ingest.append(data, options)
        return torch.from_numpy(numbers) if return_ids else self._index.to_tensor(numbers)

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, as_numpy: bool | None = None
    ) -> Any:
        """Draw a batch.

        Draw number k is the same whatever happened before it: after a restart the next batches are those that
        would have come without it.

        Args:
            batch_size: How many rows; None: the buffer's `batch_size`.
            return_info: Return a pair: the batch, and a dict with each row's `index`, its `id`, and
                what the sampler says of it (`priority_weight`, the ends of slices).
            as_numpy: Return NumPy arrays in nested dicts instead of TensorDicts, also in `info`. They are in
                host memory, whatever the buffer's device. bfloat16 becomes float32; variable-length fields
                are arrays of objects, one per row. JAX takes them by `jax.numpy.asarray` or
                `jax.dlpack.from_dlpack`. None: as the buffer was made.

        Returns:
            A TensorDict that owns its memory, batch size `[batch_size]`, or whatever rows are; some samplers
            return fewer rows. Variable-length fields are nested tensors and `NonTensorStack`s. With
            `as_numpy` field name -> array. Shapes `(batch_size, *row shape)`.

        Raises:
            NotReadyError: The store is empty, or no row is left that may still be drawn.
        """
        as_numpy = self._as_numpy if as_numpy is None else as_numpy
        batch, rows = self._sampling.next(Request(self._size(batch_size), as_numpy))
        return (
            (batch, self._batches.info(self._store.storage, rows, batch, as_numpy=as_numpy))
            if return_info
            else batch
        )

    def _size(self, batch_size: int | None) -> int:
        """Return the number of rows of a batch.

        Raises:
            StateError: No batch size is known.
        """
        size = self._batch_size if batch_size is None else batch_size
        if type(size) is int and size > 0:
            return size
        if size is None:
            raise StateError("batch_size not specified", hint="give it to sample(), or to the buffer")
        return check_batch_size(size)

    # -- single rows and single batches ------------------------------------------------------------

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
        """Append one row; return its index, or -1 if it is dropped.

        Args:
            data: One row: a TensorDict without batch dims, for instance. If `ndim` is larger than 1: one row
                for each lane, and their indices are returned. Shape `(lanes, ndim)`, int64.
            source: As in `extend`.
            episode_info: As in `extend`.
            validate: As in `extend`.
            idempotency_key: As in `extend`.
            digest: As in `extend`.
        """
        is_plain = episode_info is None and idempotency_key is None and digest is None
        if is_plain and type(data) in (dict, TensorDict) and validate == "schema":
            index = self._ingest.add_plain(data, source)
            if index >= 0:
                return index
        options = self._ingest.options(
            source=source, episode_info=episode_info, validate=validate, idempotency_key=idempotency_key,
            digest=digest,
        )  # fmt: skip
        numbers = self._ingest.append(data, options, single=True)
        if self._store.storage.ndim == 1 and numbers.size:
            return int(numbers[0])
        return self._index.to_tensor(numbers)

    def record(
        self,
        source: str | None = None,
        *,
        lanes: int | None = None,
        flush_steps: int = 1,
        autoreset_mode: Any = None,
    ) -> Recorder:
        """Record the steps of an environment loop, one call per step.

        It takes half of the time of `add` of a TensorDict: values go to arrays that are allocated once,
        and nothing is built. An episode of the source that is open is cut, unless it was adopted by
        `episodes.resume`.

        Args:
            source: Name of the stream, as in `extend`.
            lanes: How many environments step together: every value has a first dim of that size then. None:
                one, whose values have no such dim.
            flush_steps: So many steps are published together. With 1 what `step` returned survives the
                process; with n up to n - 1 steps are lost.
            autoreset_mode: How the environment resets, as gymnasium names it. "NextStep", which is what
                `gymnasium.make_vec` makes: the step after one that ended an episode only resets, and is left
                out. "SameStep" and "Disabled", or None: every step counts.

        Raises:
            ValueError: `lanes` or `flush_steps` is less than 1, or there is no such mode.
            StateError: The store is closed, or open for reading only.

        Example:
            >>> with rb.record("env-0") as episode:
            ...     episode.step(observation, action, reward, following, terminated, truncated)
        """
        return Recorder(
            self._ingest, source, lanes=lanes, flush_steps=flush_steps, autoreset_mode=autoreset_mode
        )

    def __len__(self) -> int:
        return self._sampling.sampler.left(self._store.storage)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, for ever or until the sampler has run out of rows.

        Raises:
            StateError: No batch size is known.
        """
        self._check_iterable()
        while True:
            yield self.sample()
            if self._sampling.sampler.ran_out:
                return

    def _check_iterable(self) -> None:
        if self._batch_size is None:
            raise StateError(
                "Cannot iterate over the replay buffer. Batch_size was not specified during construction of "
                "the replay buffer",
                hint="give it to the constructor, or to sample()",
            )

    def next(self) -> Any:
        """Return the next batch of an iteration that continues from call to call; None: it has ended."""
        self._check_iterable()
        if self._iterating and self._sampling.sampler.ran_out:
            self._iterating = False
            return None
        self._iterating = True
        return self.sample()

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether `sample` would find rows to draw.

        Raises:
            StateError: No batch size is known.
        """
        return self._sampling.sampler.can_sample(self._store.storage, self._size(batch_size))

    def count_candidates(self, batch_size: int) -> int:
        """Return from how many rows, or slices, a batch would be drawn; `where` is not evaluated."""
        return self._sampling.sampler.sampleable(self._store.storage, batch_size)

    # -- rows by index, id and episode -------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Read rows by index, or one field of all rows by key.

        Args:
            index: As for a tensor of all rows: an integer, a slice, integers, a mask, or a tuple of them; or
                a field's key.

        Raises:
            NotFoundError: There is no such row, or no such field.
            StateError: The store is closed; or a writer in another process overwrites the rows too fast.
        """
        return self._rows.get(index)

    def __setitem__(self, index: Any, data: Any) -> None:
        """Replace rows by index; neither length nor episodes change.

        On disk a crash leaves the whole change or none of it.

        Raises:
            NotFoundError: There is no such row.
            SchemaError: The rows do not fit.
        """
        self._rows.set(index, data)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Read rows in the order of their indices: all, or the first `end`."""
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Replace rows in the order of their indices: the first `end`; None: as many as `data` has."""
        if end is None:
            end = len(data if is_tensor_collection(data) or isinstance(data, list) else tree_leaves(data)[0])
        self[:end] = data

    def by_id(self, ids: Any) -> TensorDictBase:
        """Read rows by id, in the order in which they are asked for.

        Args:
            ids: Which ones. Shape `(n,)`, int64.

        Returns:
            A TensorDict with what samples carry (`index`, `id`), batch size `[n]`.

        Raises:
            NotFoundError: A row has left, or never was; the message names it.
            StateError: The store is closed; or a writer in another process overwrites the rows too fast.
        """
        return self._rows.by_id(ids)

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
        return self._rows.trajectory(episode_id)

    def query(
        self,
        predicate: Callable[[Any], Any] | None = None,
        trajectory_key: str | tuple[str, ...] | None = None,
    ) -> list[Any]:
        """Return the trajectories that meet a condition, the oldest first.

        Of a condition made of `expstore.traj` only the fields that it names are read; whole rows are read for
        the trajectories that meet it. `sql` and `episodes` also know episodes whose rows have left.

        Args:
            predicate: Made of `traj`, or a function of a `Trajectory`; None: all trajectories.
            trajectory_key: The field that names trajectories; None: the store's episodes.

        Returns:
            A `Trajectory` for each: a sample of its rows, in the order of its steps.

        Raises:
            NotFoundError: There is no such field, or no field ends trajectories.
            TypeError: Rows are not TensorDicts, or the condition has a value per step.

        Example:
            >>> rb.query((traj.reward.sum() > 100) & (traj.length >= 50))
        """
        storage, batches = self._store.storage, self._batches
        return unmoved(
            storage,
            lambda: find_trajectories(
                storage, batches.transform, predicate, trajectory_key, partial(batches.place, storage)
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

        Workers follow the store: they take no lock, and see what the writer appends meanwhile.

        Args:
            slice_len: None: rows by index; otherwise slices of so many steps of one episode, each of them
                once per pass, in one of the workers.
            stride: Steps from the first one of a slice to the first one of the next; None: `slice_len`.
            strict_length: Skip shorter slices at the end of episodes.
            shuffle: Return slices in random order, by torch's seed. The order of rows is the `DataLoader`'s.
            rows: "tensordict": the `DataLoader` needs the data set's `collate` as its `collate_fn`. "dict":
                nested dicts of tensors, which the `DataLoader` collates by itself.

        Raises:
            ValueError: An argument has no valid value, or needs `slice_len`.

        Example:
            >>> dataset = rb.to_torch_dataset()
            >>> loader = DataLoader(dataset, 256, shuffle=True, num_workers=2, collate_fn=dataset.collate)
        """
        return make_dataset(self, slice_len, stride, strict_length, shuffle, rows)

    # -- changes of stored rows ----------------------------------------------------------------------

    def update_priority(self, index: Any = None, priority: Any = None, *, id: Any = None) -> int:
        """Set the priorities of rows that are still there.

        With `id`, a row that has left since it was sampled is skipped, and no other row is changed.

        Args:
            index: Which rows, by index; -1 is skipped. Shape `(n,)`. If `ndim` is larger than 1, the shape is
                `(..., ndim)`, or it is a tuple of `ndim` tensors, which are broadcast together. Either
                `index` or `id` is given.
            priority: Finite, not negative: one for all rows, or one or several per row, which the sampler
                reduces to one. Shape `()` or `(n, ...)`. If `ndim` is larger than 1, one value per row in the
                order of `index` may have any shape, such as `(time, lane)`.
            id: Which rows, by id. Any shape.

        Returns:
            How many were set.

        Raises:
            PriorityError: A priority is negative, NaN or infinite; none was set.
        """
        return self._updates.update_priority(index, priority, id)

    def mark_update(self, index: Any) -> None:
        """Tell the sampler that rows were changed; a sampler by priority gives them the largest priority.

        Args:
            index: Which rows, as `extend` returns it.
        """
        self._sampling.sampler.mark_update(index, storage=self._store.storage)

    def set_at_(self, key: str | tuple[str, ...], value: Any, index: Any) -> Self:
        """Set a field of some rows; return the buffer.

        Args:
            key: Which field.
            value: Its values. Shape `(*index shape, *row shape)`, or one that can be broadcast to it.
            index: Which rows, as for `[]`.

        Raises:
            NotFoundError: There is no such field, or no such row.
            SchemaError: The values do not fit; nothing was changed.
        """
        self._updates.set_fields({to_key(key): value}, index)
        return self

    def set_(self, key: str | tuple[str, ...], value: Any) -> Self:
        """Set a field of all rows, in the order of their indices; return the buffer.

        Args:
            key: Which field.
            value: Its values. Shape `(rows, *row shape)`, or one that can be broadcast to it.

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
            input_dict_or_td: Values by key. Shapes `(rows, *row shape)`, or such that can be broadcast to it.
            clone: Has no effect: values are copied in any case.
            keys_to_update: Set only these fields; None: all.

        Raises:
            NotFoundError: There is no such field.
            SchemaError: Values do not fit; nothing was changed.
        """
        fields = leaves_of(input_dict_or_td)
        if keys_to_update is not None:
            wanted = [to_key(key) for key in keys_to_update]
            fields = {k: v for k, v in fields.items() if any(k[: len(key)] == key for key in wanted)}
        self._updates.set_fields(fields, slice(None))
        return self

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
        """Change fields of those rows that are still there, and of no other row.

        Args:
            index: Which rows, as samples say. Shape `(n,)`. If `ndim` is larger than 1, the shape is
                `(..., ndim)`, or it is a tuple of `ndim` tensors.
            generation: Their `index_generation`, which samples carry if the writer tracks it. One per row.
            patch: New values by key. Shapes `(n, *row shape)`. If `ndim` is larger than 1, the `n` rows may
                have as many dims: `(time, lane, *row shape)`.
            version_key: A field with one number per row, which is set to `version`; only rows whose number
                is not larger are changed.
            version: The version of this patch, one for all rows or one each. Shape `()` or `(n,)`.
            require_newer: Also skip rows whose version is the same.
            id: Which rows, instead of index and generation. Any shape. Of a row that is named twice the
                highest version counts, or without versions the last one.

        Returns:
            What was done with each row, in the shape in which rows were given.

        Raises:
            NotFoundError: There is no such field (a KeyError).
            SchemaError: Values do not fit (a ValueError); nothing was changed.
            StateError: There are no rows yet; `index` is given and the writer does not track generations; or
                the store keeps the best rows, which take over the ids of others.

        Example:
            >>> rb.update_if_present(id=sample["id"], patch={"advantage": advantages})
        """
        return self._updates.update_if_present(
            index=index, generation=generation, patch=patch, version_key=version_key, version=version,
            require_newer=require_newer, id=id,
        )  # fmt: skip

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
        """Call `update_if_present`, and return its result or error as a future that is done.

        Nothing has to be put in order after it: a batch made ahead is drawn again if its rows were changed.

        Args:
            index: As in `update_if_present`.
            generation: As in `update_if_present`.
            patch: As in `update_if_present`.
            version_key: As in `update_if_present`.
            version: As in `update_if_present`.
            require_newer: As in `update_if_present`.
            id: As in `update_if_present`.
        """
        done: Future[ConditionalUpdateResult] = Future()
        try:
            result = self.update_if_present(
                index=index, generation=generation, patch=patch, version_key=version_key, version=version,
                require_newer=require_newer, id=id,
            )  # fmt: skip
        except Exception as exc:
            done.set_exception(exc)
        else:
            done.set_result(result)
        return done

    def empty(self, empty_write_count: bool | None = None) -> None:
        """Delete all rows. Ids and episode ids are not used again; indices of a ring begin at 0.

        Args:
            empty_write_count: Only False or None: `write_count` is the number of rows ever written.

        Raises:
            ValueError: `empty_write_count` is True.
            StateError: The store is closed, or open for reading only; or its writer refuses changes.
        """
        if empty_write_count:
            raise ValueError(
                "empty_write_count=True is not supported: write_count is the number of rows ever written; "
                "leave it out"
            )
        self._ingest.writer.check()
        self._store.storage.writer().clear()
        self._sampling.sampler.on_empty()

    # -- groups of methods ---------------------------------------------------------------------------

    @property
    def episodes(self) -> Episodes:
        """Query episodes by calling it; its methods annotate, end, adopt and delete episodes.

        Example:
            >>> rb.episodes("length > $n", order_by='"return" DESC', limit=10, params={"n": 100})
            >>> rb.episodes.end("robot-1")
        """
        return Episodes(self._store)

    @property
    def columns(self) -> Columns:
        """Add and drop fields, and compute their statistics."""
        return Columns(self._store, self._sampling, self._stats_keeper)

    @property
    def snapshots(self) -> Snapshots:
        """Create, tag, list and restore versions of the store."""
        return Snapshots(self._store, self._sampling)

    @property
    def retention(self) -> Retention:
        """Say which rows of a store without a capacity stay."""
        return Retention(self._store)

    # -- the whole store -----------------------------------------------------------------------------

    def sql(self, query: str, params: Sequence[object] | Mapping[str, object] | None = None) -> Result:
        """Run one read-only SELECT over transitions, episodes, fragments, sources, priorities, commits.

        A query sees all earlier writes of this process. Nested keys are written as in `next.reward`. A store
        with an archive also has `history`: `transitions` and all evicted rows, with a column `_archived`.

        Args:
            query: The statement.
            params: Values for `?` (a sequence) or `$name` (a mapping).

        Returns:
            The rows: `df()`, `arrow()`, `pl()`, `fetchall()`, `to_parquet(file)`.

        Raises:
            QueryError: It is not one SELECT, or DuckDB refuses it.
            StateError: The store is closed; or, in a follower, the writer overwrote rows under the query for
                two seconds.
        """
        return self._store.catalog.query(query, params)

    def flush(self) -> None:
        """Sync rows, priorities and the number of the next draw to the disk.

        Raises:
            StorageError: The disk failed; the store must be opened again.
        """
        self._store.storage.writer().sync()

    def refresh(self) -> None:
        """Update what is derived from rows: `where` and `weight` of the sampler, and a follower's episodes.

        `where` and `weight` are evaluated for all present rows. The next batches are then those of any other
        process, or run, with the same rows, seed and draw number. A follower also reads new episodes and,
        after the writer has stopped, its last rows. While the writer runs, new rows appear without `refresh`;
        small batches (up to 64 rows, 16 KiB together) appear within 0.1 s. `sql` and `stats` refresh, too.

        Raises:
            QueryError: `where` or `weight` cannot be computed, or a weight is negative or not finite.
            StorageError: The store cannot be read.
        """
        self._store.storage.follow(priorities=True)
        self._sampling.refresh()

    def dumps(self, path: str | Path, *, keep: int = 5) -> Version:
        """Create a version: the store as it is now, complete and closed, in `path`/vNNNN.

        Other threads append and sample meanwhile; a write that would overwrite or change a row which is not
        copied yet waits. Files that have not changed since the version before are shared with it (hard
        links). A crash leaves the whole version or none of it.

        Args:
            path: A folder for versions; made if it is missing.
            keep: How many versions remain; those with a tag always do.

        Returns:
            The version: number, rows, bytes.

        Raises:
            SnapshotError: The folder holds something else.
            LockedError: Another process creates a version there.
            StateError: The store is closed, or open for reading only.
            StorageError: The disk failed or is full; earlier versions are unchanged.

        Example:
            >>> rb.dumps("backup")
            >>> expstore.open("backup").sample(32)
        """
        return self.snapshots.create(path, keep=keep)

    def dump(self, path: str | Path, *, keep: int = 5) -> Version:
        """Call `dumps`."""
        return self.dumps(path, keep=keep)

    def save(self, path: str | Path, *, keep: int = 5) -> Version:
        """Call `dumps`."""
        return self.dumps(path, keep=keep)

    def loads(self, path: str | Path, version: int | str | None = None) -> None:
        """Replace the store's content by a version's. A crash leaves one or the other, whole.

        Rows, priorities, counts, episodes and seed become the version's, and so do `alpha` and `beta` of a
        sampler by priority. The next batches are those that would have followed the version. The capacity
        stays. Ids and episode ids continue above those of both (a store that never had rows takes over the
        version's); indices are the same if the capacities are. Versions in the folder stay. Fields that were
        added or dropped since a version of this store was made are as they were then.

        Args:
            path: What `dumps` was given, or a store that has tagged versions.
            version: Number or tag; None: the newest.

        Raises:
            SnapshotError: There is no such version; the message lists the versions.
            SchemaError: This store has other fields.
            CorruptionError: The version is damaged.
            StateError: The store is closed, or open for reading only.
        """
        self.snapshots.restore(path, version)

    def load(self, path: str | Path, version: int | str | None = None) -> None:
        """Call `loads`."""
        self.loads(path, version)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, under torchrl's names: of storages in RAM the rows, too.

        Rows of a store on disk are not part of it (`dumps` copies them); the state only says which they are.
        """
        return self._sampling.state_dict() | {
            "_writer": self._ingest.writer.state_dict(),
            "_transforms": self._batches.transform.state_dict(),
            "_batch_size": self._batch_size,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the batch that followed `state_dict`, as far as the rows are the same.

        Rows in the state replace those of the storage, as by `loads`; without rows in the state the storage
        must have them. The batch size, and what transforms keep, become the state's. Open episodes end.

        Raises:
            StateError: The state is of another sampler or other transforms, of another `where` or `weight`,
                of a store with another seed or rows that are not here, or of a buffer that draws by a
                generator where this one does not, or by one for another device; nothing was changed.
            SchemaError: The rows have other fields; nothing was changed.
            ValueError: The writer has other settings; nothing was changed.
        """
        self._sampling.check_state(state_dict)
        if not {"_writer", "_transforms", "_batch_size"} <= state_dict.keys():
            raise StateError(f"that is no state of a {type(self).__name__}")
        self._ingest.writer.load_state_dict(state_dict["_writer"])
        self._batches.transform.load_state_dict(state_dict["_transforms"])
        self._sampling.load_state_dict(state_dict)
        end_episodes(self._store.storage)
        self._batch_size = state_dict["_batch_size"]

    def register_save_hook(self, hook: Hook) -> None:
        """Have the storage's `state_dict` keep what a hook returns; see `PortableStorage`."""
        self._store.storage.writer().register_save_hook(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Have the storage's `load_state_dict` pass its rows through a hook; see `PortableStorage`."""
        self._store.storage.writer().register_load_hook(hook)

    def close(self) -> None:
        """Flush, bring the index up to date for other programs, and release the store."""
        self._sampling.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- facts -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return facts about the buffer, as values that JSON can keep.

        Returns:
            storage: The kind of storage: "zarr", "arrow" or "memory".
            uuid: Identifies a store on disk; it never changes, and versions have the same one. Save it with
                the weights of a model to check later that both belong together. None: in RAM.
            size: How many rows can be read.
            capacity: How many at most; None: the store grows.
            utilization: size / capacity; only with a capacity.
            spare: Slots beyond the capacity.
            write_count: How many rows were written in all.
            last_id: The id of the newest row.
            draws: How many batches were drawn.
            extends, redraws, waits, wait_seconds, syncs: Of this opening: batches written; draws repeated
                because rows were overwritten; how often and for how long writers waited; syncs.
            write_keys: How many idempotency keys are known; None: a reader does not know.
            prefetch_queue_size: How many batches are made ahead.
            rate_limiter: Its counts; None: there is no limiter.
            batch_size: Rows per batch, unless `sample` is told otherwise.
            initialized: Always true, as TorchRL's name for it.

            On disk also
            path: The folder.
            generation: How often the store was opened for writing.
            recovered: What this opening recovered after a crash; None: nothing.
            durability: "sync" or "process". Only while writing, as are the following ones.
            unsynced_rows: How many rows a power cut would take.
            fsyncs, last_sync_seconds, last_sync_age: How many fsyncs there were, how long the last sync
                took, and how long ago it was, in seconds.
            free_bytes: Free space of the file system.
            poisoned: The failure of the disk after which nothing can be written; None: there was none.
            packed: By which factor each packed field is smaller than its rows.
            live, damaged: Of a reader: whether a writer has the store open, and which files are damaged.
        """
        storage = self._store.current()
        mine: dict[str, Any] = {"batch_size": self._batch_size, "initialized": self.initialized}
        if storage.capacity is not None:
            mine["utilization"] = len(storage) / storage.capacity
        return describe(storage) | storage.more_stats() | self._sampling.stats() | mine

    @property
    def schema(self) -> Schema | None:
        """The fields; None before the first rows."""
        return self._store.storage.schema

    @property
    def specs(self) -> Composite | None:
        """What values the fields may have, as far as that was set; a copy. None: nothing was set."""
        return specs_of(self._store.storage)

    def set_specs(self, specs: Composite | None) -> None:
        """Set what values the fields of a row may have; None: remove the specs.

        Values of stored rows are not checked, only that the schema has these fields, with these dtypes and
        shapes. Later rows with other dtypes or shapes are refused; `extend(validate="domain")` checks values.
        The specs are kept in the store, like the schema.

        Args:
            specs: Of some or all fields, nested like the rows; without batch dims.

        Raises:
            SchemaError: The rows have other fields, or text cannot keep the specs; nothing was changed.
            StateError: The store is closed, or open for reading only.

        Example:
            >>> rb.set_specs(Composite(action=Categorical(2), next=Composite(reward=Unbounded((1,)))))
        """
        self._store.storage.writer().settings.describe_fields(row_text(specs))

    @property
    def meta(self) -> dict[str, Any]:
        """The user's own facts, given when the store was made."""
        return meta_of(self._store.storage)

    @property
    def recovered(self) -> str | None:
        """One line that says what opening recovered after an unclean stop; None otherwise."""
        return self._store.storage.counters.recovered

    @property
    def write_count(self) -> int:
        """The number of rows that were ever written; of time, where `ndim` is larger than 1."""
        storage = self._store.current()
        return storage.write_count // storage.geometry.lanes

    @property
    def initialized(self) -> bool:
        """True: nothing is made later than the buffer itself."""
        return True

    @property
    def batch_size(self) -> int | None:
        """Rows per batch, unless `sample` is told otherwise."""
        return self._batch_size

    @property
    def dim_extend(self) -> int:
        """Which dim of a batch given to `extend` is time."""
        return self._index.time_dim

    def __repr__(self) -> str:
        storage = self._store.storage
        room = "unbounded" if storage.capacity is None else f"capacity {storage.capacity}"
        sampler = self._sampling.sampler
        return f"{type(self).__name__}({storage.kind}, {len(storage)} rows, {room}, {sampler!r})"

    # -- storage, sampler, writer, transforms and random numbers ----------------------------------------

    @property
    def storage(self) -> ReadView:
        """Where the rows are."""
        return self._store.storage

    @property
    def _storage(self) -> ReadView:
        """The storage, under the name by which TorchRL's collectors of several processes read it."""
        return self._store.storage

    def set_storage(self, storage: ReadView, collate_fn: Callable[[Any], Any] | None = None) -> ReadView:
        """Read and write another storage from now on; return the one before, which stays open.

        Args:
            storage: The new one.
            collate_fn: Replaces the former function; None: the default.

        Raises:
            StateError: The buffer is closed.
            TypeError: It is not a storage.
            ValueError: The sampler does not fit it; nothing was changed.
        """
        self._store.check_open()
        if not isinstance(storage, ReadView):
            raise TypeError(f"rows are kept by a Storage, not by {type(storage).__name__}")
        former = self._store.replace(storage)
        self._batches.set_collate(collate_fn)
        return former

    @property
    def sampler(self) -> Any:
        """What chooses the rows of batches, as it was given."""
        return given(self._sampling.sampler)

    def set_sampler(self, sampler: Any) -> Any:
        """Draw by another sampler from the next batch on; return the one before.

        Draw numbers continue. A sampler that keeps a place in the store begins anew, unless the one before
        was of its kind.

        Raises:
            StateError: The store is closed.
            TypeError: It is not a sampler.
            ValueError: It does not fit this buffer; nothing was changed.
            QueryError: The rows lack the fields that its `where` or `weight` names.
        """
        return self._sampling.set_sampler(sampler)

    @property
    def writer(self) -> Writer:
        """What gives rows their places."""
        return self._ingest.writer

    def set_writer(self, writer: Writer) -> Writer:
        """Place rows by another writer from now on; return the one before.

        Raises:
            TypeError: It is not a writer.
        """
        former = self._ingest.set_writer(writer)
        self._batches.label_generations(writer.tracks_generations)
        return former

    @property
    def transform(self) -> Compose:
        """The transforms of written rows and of samples."""
        return self._batches.transform

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform after the others; return the buffer.

        Args:
            transform: A callable, which changes samples, or a torchrl Transform.
            invert: Change what is written instead.

        Raises:
            StateError: The buffer is closed.

        Example:
            >>> rb.append_transform(lambda batch: batch.exclude("pixels"))
        """
        return self.insert_transform(len(self._batches.transform), transform, invert=invert)

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Insert a transform at a position; return the buffer.

        Args:
            index: Its position in the chain.
            transform: As `append_transform`.
            invert: Change what is written instead.

        Raises:
            StateError: The buffer is closed.
        """
        if self._store.life is Life.CLOSED:
            raise closed_error()
        self._batches.transform.insert(index, transform, invert=invert)
        self._sampling.drop_prefetched()
        return self

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw by another generator, in its present state, from the next batch on; None: by the seed."""
        self._sampling.set_rng(generator)

    # -- names that TorchRL has for a service ------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether it has not been closed."""
        return not self._store.storage.closed

    service_backend = property(torchrl_service.service_backend)
    start = torchrl_service.start
    client = torchrl_service.client
    share = torchrl_service.share
    synchronize = torchrl_service.synchronize
    shutdown = torchrl_service.shutdown

    # -- copies --------------------------------------------------------------------------------------------

    def __copy__(self) -> Self:
        """Return a buffer with parts of its own over the same storage; over a store on disk it follows."""
        shared = [self._store.storage] if self._store.is_in_memory else []
        return copy.deepcopy(self, {id(storage): storage for storage in shared})

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy in another process needs: it follows the store, or has its rows in RAM, too.

        Raises:
            StateError: The store is closed.
        """
        return vars(self) | {"_iterating": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned; a store on disk is opened when it is first needed."""
        vars(self).update(state)
        self._connect()
