"""The replay buffer: it combines a storage, a sampler and a writer.

A buffer owns its parts and passes each call to one of them: `Ingest` appends, `Sampling` draws, `StoredRows`
reads by index, `RowUpdates` changes rows. All of them share one `StoreHandle`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, overload

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch.utils._pytree import tree_leaves

from expstore.buffers import torchrl_service
from expstore.buffers.annotations import annotate
from expstore.buffers.arguments import (
    MOST_BATCH_ROWS,
    check_batch_size,
    check_drawing,
    check_generator,
    check_positional,
    check_predictable,
    check_ragged,
    resolve_part,
    resolve_part_of,
)
from expstore.buffers.batch_builder import BatchBuilder
from expstore.buffers.columns import Columns
from expstore.buffers.consumer import Consumer, Consumers, Keep, Place
from expstore.buffers.domain_checks import row_text, specs_of
from expstore.buffers.episodes import Episodes
from expstore.buffers.groups import Groups
from expstore.buffers.indexing import StoredRows
from expstore.buffers.ingest import Ingest
from expstore.buffers.prefetch import Request
from expstore.buffers.recorder import Recorder
from expstore.buffers.retention import Retention
from expstore.buffers.row_index import RowIndex
from expstore.buffers.row_styles import PlainRows, RowStyle
from expstore.buffers.sample_units import SampleUnit, check_unit
from expstore.buffers.sampling import Sampling
from expstore.buffers.selections import Selections
from expstore.buffers.sharing import Sharing
from expstore.buffers.snapshots import Snapshots
from expstore.buffers.store_handle import Life, StoreHandle, StorePart
from expstore.buffers.torch_dataset import RowKind, RowsDataset, SlicesDataset, make_dataset
from expstore.buffers.torchrl_dump import is_torchrl_dump, load_torchrl_dump
from expstore.buffers.updates import ConditionalUpdateResult, Patch, RowUpdates, leaves_of
from expstore.core.torchrl_keywords import BUFFER, check_keywords
from expstore.core.torchrl_members import find_member
from expstore.core.values import to_key
from expstore.data.sample_metadata import SAMPLE_METADATA, decode_metadata
from expstore.disk.local_path import local_path
from expstore.episodes.facts import pack_info
from expstore.errors import ArgumentError, SchemaError, StateError
from expstore.rate_limiters import RateLimiter
from expstore.samplers.base import Sampler
from expstore.samplers.consuming import consume_after
from expstore.samplers.given_order import GivenOrder, Missing
from expstore.samplers.names import SamplerName
from expstore.samplers.torchrl_adapter import adapt, unwrap
from expstore.schema.ragged_fields import RaggedForm
from expstore.schema.schema import Schema
from expstore.storages.base import Hook
from expstore.storages.format.lineage import OWN_FACTS
from expstore.storages.memory import MemoryStorage
from expstore.storages.preview import render_view
from expstore.storages.read_view import ReadView, build_closed_error, read_stable
from expstore.storages.sessions import end_episodes
from expstore.storages.snapshots.catalog import Version
from expstore.storages.stats import describe, meta_of
from expstore.trajectories.search import find_trajectories
from expstore.transforms import Compose
from expstore.writers.writers import Writer

if TYPE_CHECKING:
    from expstore.specs import Composite
    from expstore.sql.result import Result

_Part = TypeVar("_Part", bound=StorePart)


class ReplayBuffer:
    """Store transitions and sample batches of them.

    Threads: any number may sample while others write; writers wait for one another. Processes: a store has
    one writer. In a forked child, and in a pickled copy (as in a worker of a DataLoader), the buffer is a
    follower: it reads what the writer writes, and draws its own batches. After `share` it
    also writes, through the process that has the store open. A copy of a buffer in RAM has its
    own rows. Crashes: on disk, rows survive the end of the process once `extend` has returned, and a power
    failure once a later `flush` has returned.

    Args:
        storage: Where rows are stored, or a function that returns the storage; `MemoryStorage(1000)` by
            default.
        sampler: Chooses the rows of a batch: a sampler, its name, or a function that returns it; uniform by
            default.
        writer: Places new rows: a writer, or a function that returns it. By default the newest rows of a ring
            replace the oldest; a store that another kind of writer filled continues with that kind.
        collate_fn: Function that makes a batch from what the storage returns: a list of objects, or rows that
            form a batch already. None: objects are stacked if possible.
        transform: A callable that changes samples, or a torchrl Transform, which may also change written
            rows.
        transform_factory: A function that returns the transform.
        dim_extend: The dim of a batch given to `extend` that is time; None: the last of the dims that make
            rows.
        batch_size: Rows per batch; may be given to `sample` instead.
        device: Device of the batches; None: the storage's.
        prefetch: Number of batches that a background thread prepares. A prefetched batch is drawn again if
            its rows were overwritten or changed, if another size is requested, or if the generator was
            seeded. Priorities that were set during the last `prefetch` batches may not be used yet.
        pin_memory: Whether to return batches in pinned memory; with `device` they are copied without waiting.
        generator: Random generator of all draws; None: draws follow from the store's seed. Each sync stores
            the generator's state, and the next opening continues from it.
        consume_after_n_samples: Return each row this number of times at most; see `ConsumingSampler`.
        sample_unit: What a sampled row is extended to: None for the row alone, or a `Sequence` of steps
            around it.
        rate_limiter: How many rows may be sampled for each row that is written. `sample`, `extend` and `add`
            wait until it permits them. See `MinSize` and `SampleToInsertRatio`.
        as_numpy: Whether `sample` and iteration return NumPy arrays by default.
        ragged: How batches have tensors of different lengths; see `Batches`.
        batch_tokens: How many tokens a batch may have; see `Batches`.
        tokens_key: The field whose lengths `batch_tokens` counts; see `Batches`.
        shared: Whether to call `share`, so that other processes can write through copies of the buffer.
        torchrl: Keywords of TorchRL's class that have no effect here: accepted with their default values,
            otherwise refused with the reason.

    Example:
        >>> from expstore import MemoryStorage, ReplayBuffer
        >>> rb = ReplayBuffer(storage=MemoryStorage(1000), batch_size=2)
        >>> rb.extend(TensorDict({"observation": torch.zeros(5, 3)}, [5]))
        tensor([0, 1, 2, 3, 4])
        >>> rb.sample()["observation"].shape
        torch.Size([2, 3])
    """

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        """Refuse positional arguments, which Stable-Baselines3 passes to its buffers."""
        if args:
            check_positional(cls, args)
        return super().__new__(cls)

    if not TYPE_CHECKING:  # mypy would accept any attribute
        __getattr__ = find_member

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
        ragged: RaggedForm = "jagged",
        batch_tokens: int | None = None,
        tokens_key: str | tuple[str, ...] | None = None,
        shared: bool = False,
        _style: RowStyle | None = None,
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, BUFFER)
        if transform is not None and transform_factory is not None:
            raise ArgumentError("transform and transform_factory are mutually exclusive; give one of them")
        check_drawing(batch_size, prefetch, pin_memory, device=device)
        check_generator(generator)
        chosen = None if sampler is None else adapt(resolve_part(sampler, "sample"))
        check_predictable(batch_size, chosen)
        check_unit(sample_unit, chosen)
        budget = check_ragged(ragged, batch_tokens, tokens_key, sample_unit)
        opened = (
            MemoryStorage(1000) if storage is None else resolve_part_of(storage, ReadView, "get", "storage")
        )
        style = PlainRows() if _style is None else _style
        placing = (
            style.default_writer(opened)
            if writer is None
            else resolve_part_of(writer, Writer, "write", "writer")
        )
        drawing = consume_after(consume_after_n_samples, chosen, prefetch=prefetch)
        chain = Compose.of(transform if transform_factory is None else transform_factory())

        stored = meta_of(opened).get(SAMPLE_METADATA)
        metadata = None if stored is None else decode_metadata(stored)

        self._batch_size = check_batch_size(batch_size)
        self._as_numpy = as_numpy
        self._iterating = False  # whether `next` has returned a batch of the current pass
        self._store = store = StoreHandle(opened)
        self._index = RowIndex(store, dim_extend)
        self._batches = BatchBuilder(
            style,
            chain,
            collate_fn=collate_fn,
            device=device,
            pin_memory=pin_memory,
            metadata=metadata,
            ragged=ragged,
            budget=budget,
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
        self._sharing = Sharing(store, self._sampling, self._ingest, self._updates)
        self._batches.label_generations(placing.tracks_generations)
        #: What buffers over several stores draw from; it has samplers of its own, so it is made when needed.
        self._member: Any = None
        self._consumers: list[Consumer] = []
        self._connect()
        if shared:
            self.share()

    def _connect(self) -> None:
        """Attach the parts to the storage."""
        for part in (self._ingest, self._batches, self._sampling, self._sharing):
            self._store.add_part(part)

    def _keep_member(self, make: Callable[[], _Part]) -> _Part:
        """Return the part that draws for buffers over several stores; made once, closed with the buffer."""
        if self._member is None or self._member.is_closed:
            self._member = make()
            self._store.add_part(self._member)
        part: _Part = self._member
        return part

    # -- the two data paths ----------------------------------------------------------------------

    def extend(
        self,
        data: Any = None,
        *,
        tensordicts: Any = None,
        source: str | None = None,
        return_ids: bool = False,
        episode_info: Mapping[str, Any] | None = None,
        split: str | None = None,
        update_priority: bool | None = None,
        validate: Literal["schema", "domain"] = "schema",
        idempotency_key: str | bytes | None = None,
        digest: bytes | None = None,
        session: str | None = None,
    ) -> torch.Tensor:
        """Append a batch of rows, all of them or none.

        Rows with trajectory id -1 or `("collector", "mask")` False are dropped.

        A call with an idempotency key that was used before writes nothing and returns the result of the first
        call, also after a restart and after its rows were evicted. On disk a key is as durable as its rows.
        The last 100,000 keys are remembered, for 24 hours. Of two concurrent calls with the same key one
        writes and the other waits for it.

        Args:
            data: Rows: a TensorDict, a tensor, a tensorclass, or a tree (tuple or dict) of tensors. Buffers
                that `expstore.open` returns, and others whose rows have fields, also take (nested) dicts of
                arrays with one value per row, and Arrow tables whose columns are named with dots
                (`next.reward`). A list has one item per row. Variable-length rows (in an `ArrowStorage`) may
                differ in shape, and may have nested tensors and Python values. In stores created by
                `expstore.open` all batch dims make rows: time is the dim named "time", otherwise the last
                one, and each position along the others is a separate stream. In other stores the first `ndim`
                dims make rows, and `dim_extend` is time.
            tensordicts: Alias of `data`, for TorchRL's TensorDictReplayBuffer.
            source: Name of the stream of experience within the session. None: the session's unnamed stream.
                Rows of two sessions never share an episode: after a restart the same source begins new
                episodes, unless `episodes.resume` adopts the earlier ones. If writers alternate row by row
                under one source, their rows share an episode: single rows are not compared.
            return_ids: Whether to return ids, which are never reused, instead of indices.
            episode_info: Facts to attach to every episode that has a row in the batch, as by
                `episodes.annotate`. They are committed with the rows.
            split: The split of the episodes, such as "eval". Samplers draw rows of the split "train", unless
                they were made with another one. Rows of another split without a `source` are a stream of the
                split's name. None: "train", or the split of the episode that the rows continue.
            update_priority: Whether to set the priorities that come with the rows, in a buffer with a
                priority key. None: set them.
            validate: "domain": also check values against `specs`, and append nothing if one is not allowed.
            idempotency_key: A name for this write that no other write has.
            digest: 16 bytes that identify the rows, such as a hash of a request's body. A repeated key with
                another digest is refused. None: a repeated key means the same rows.
            session: Id of the remote session that writes, by which a server names its clients. None: the
                local session, which ends when the store is closed or opened for writing again.
                `episodes.end_session` ends a remote session; later rows reopen it.

        Returns:
            Index, or id, of each row; -1 for dropped rows. Shape `(n,)`, int64. If `ndim` is larger than 1,
            indices have shape `(n, ndim)`.

        Raises:
            SchemaError: The batch does not fit the store or its specs, or a fact cannot be stored as JSON;
                the rows continue an episode of another split.
            ArgumentError: Both `data` and `tensordicts` are given; `split` is not a name.
            StateError: The store is closed or cannot be written; `validate="domain"` is given and there are
                no specs; the key belongs to another write (kind "key_reused"); or the writer does not support
                keys (kind "no_keys").
            StorageError: The disk failed; nothing was appended.
        """
        if tensordicts is not None:
            if data is not None:
                raise ArgumentError("data and tensordicts are two names of one argument; give one of them")
            data = tensordicts
        options = self._ingest.options(
            source=source, episode_info=episode_info, split=split, update_priority=update_priority,
            validate=validate,
            idempotency_key=idempotency_key, digest=digest, session=session, return_ids=return_ids,
        )  # fmt: skip
        numbers = self._ingest.append(data, options)
        return torch.from_numpy(numbers) if return_ids else self._index.to_tensor(numbers)

    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True], as_numpy: bool | None = None
    ) -> tuple[Any, dict[str, Any]]: ...

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, as_numpy: bool | None = None
    ) -> Any: ...

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, as_numpy: bool | None = None
    ) -> Any:
        """Draw a batch.

        Draw number k does not depend on what happened in the process before: after a restart, sampling
        continues with the batches that would have followed.

        Args:
            batch_size: Number of rows; None: the buffer's `batch_size`.
            return_info: Whether to return a pair: the batch, and a dict with each row's `index` and `id`, and
                the sampler's values about it (`priority_weight`, the ends of slices).
            as_numpy: Whether to return NumPy arrays in nested dicts instead of TensorDicts, also in `info`.
                They are in host memory, whatever the buffer's device. bfloat16 becomes float32;
                variable-length fields are arrays of objects, one per row. JAX accepts them by
                `jax.numpy.asarray` or `jax.dlpack.from_dlpack`. None: the buffer's setting.

        Returns:
            A TensorDict that owns its memory, batch size `[batch_size]`; or tensors, trees or objects if
            these are the rows. Some samplers return fewer rows. Variable-length fields are nested tensors and
            `NonTensorStack`s. With `as_numpy` a dict of arrays by field name. Shapes `(batch_size, *row
            shape)`.

        Raises:
            NotReadyError: The store is empty, or no more rows may be drawn.
        """
        as_numpy = self._as_numpy if as_numpy is None else as_numpy
        batch, rows = self._sampling.next(Request(self._size(batch_size, self._sampling.sampler), as_numpy))
        return (
            (batch, self._batches.info(self._store.storage, rows, batch, as_numpy=as_numpy))
            if return_info
            else batch
        )

    def _size(self, batch_size: int | None, sampler: Any) -> int:
        """Return the number of rows of a batch.

        Raises:
            StateError: Neither the call nor the buffer has a batch size.
            ArgumentError: As in `check_batch_size`; the sampler decides how many rows a batch has.
        """
        if getattr(sampler, "sizes_batches", False):
            if batch_size is not None:
                raise ArgumentError(
                    f"batch_size={batch_size} cannot be used: {sampler!r} decides how many rows a batch has",
                    hint="leave batch_size out",
                )
            return 1
        size = self._batch_size if batch_size is None else batch_size
        if type(size) is int and 0 < size <= MOST_BATCH_ROWS:
            return size
        if size is None:
            raise StateError("batch_size not specified", hint="give it to sample(), or to the buffer")
        return check_batch_size(size)

    def consumer(
        self,
        name: str,
        *,
        sampler: Sampler | SamplerName | Callable[[], Sampler] | None = None,
        batch_size: int | None = None,
        manifest: str | Path | None = None,
        seed: int | None = None,
        at: Place = "committed",
        missing: Missing = "raise",
        keep: Keep = "uncommitted",
        rank: int | None = None,
        world: int | None = None,
        timeout: float = 600.0,
        prefetch: int | None = None,
        lease_rows: int | None = None,
    ) -> Consumer:
        """Open a consumer: a reader with a name, whose draws are written down. It is created if it is new.

        A learner that saves `consumer.position` with its checkpoint can go back to it: `seek` lets the draws
        since then come again. A store may have any number of consumers, and each may have any sampler.

        Args:
            name: 1 to 100 letters, digits or `. _ -`.
            sampler: Chooses the rows of new draws: a sampler, its name, or a function that returns it;
                uniform by default. A `ConsumingSampler` counts the draws of this consumer.
            batch_size: Rows per batch; None: the buffer's.
            manifest: A Parquet file with the rows to draw, in this order, instead of a sampler: columns
                `draw` and `id`, and perhaps `place` and `weight`, as in the relation `draws`. A draw has as
                many rows as it has in the file. After the last one `sample` raises NotReadyError.
            seed: Seed of the draws of a new consumer; None: the store's.
            at: Where to begin, as for `seek`. Draws that were recorded after the last commit come again,
                unless it is "end".
            missing: What happens when a row of a recorded draw was changed, deleted or overwritten: "raise"
                for a `RowsChangedError`, "skip" to leave it out.
            keep: Which draws the log keeps: "uncommitted" for those after the last `commit`, "all", or the
                last so many and those after the last `commit`.
            rank: Which part of each batch this process gets, from 0; None: the environment variable RANK, or
                0. Rank 0 decides the draws; the others, on the same machine, read them from the log.
            world: Number of processes that share the batches; None: the environment variable WORLD_SIZE, or
                1. `batch_size` is the rows of all their parts. Another number than before begins a new
                generation: the processes of the former one can neither draw nor commit any more.
            timeout: How long a rank other than 0 waits for rank 0, seconds.
            prefetch: Number of batches that a background thread prepares. Their draws are recorded; the
                position counts the batches that were returned.
            lease_rows: How many rows that are drawn and not committed a retention policy keeps, if the
                sampler draws each row a fixed number of times; the newest draws have them. None: a tenth of
                the rows that samplers see. It replaces the value of earlier openings.

        Raises:
            ArgumentError: An argument is not allowed; the sampler draws for something else; the consumer has
                another seed; `at` is a position of another one; `manifest` is not an order, has ids that the
                store never had, or is another one than before.
            NotFoundError: There is no file `manifest`.
            LockedError: Another process, or another object of this one, draws for the consumer.
            RowsChangedError: A row of a draw after `at` was deleted or overwritten, and its sampler draws
                each row a fixed number of times; `missing="skip"` and `at="end"` open the consumer.
            StateError: The store is in RAM, a version, or closed; the buffer has a sample unit or a rate
                limiter; the draws after `at` are not kept.
            NotReadyError: Rank 0 did not open the consumer in time.
            StorageError: The disk failed, the store's folder cannot be written to, or `manifest` cannot be
                read.
        """
        if self._sampling.unit is not None or self._sampling.limiter is not None:
            raise StateError(
                "a buffer with a sample unit or a rate limiter has no consumers",
                hint="open the store without them; SliceSampler draws steps around a row",
            )
        if manifest is not None:
            if sampler is not None:
                raise ArgumentError("sampler and manifest exclude each other: pass one of them")
            sampler = order = GivenOrder(manifest, missing=missing)
            order.check(self._store.check_open().last, batch_size)
            batch_size = order.batch_size
        size = self._size(batch_size, sampler)
        self._consumers = [one for one in self._consumers if not one.closed]
        others = [self._sampling.sampler, *(one.sampler for one in self._consumers)]
        consumer = Consumer(
            name, self._store, self._batches, sampler, others, batch_size=size, as_numpy=self._as_numpy,
            seed=seed, at=at, missing=missing, keep=keep, rank=rank, world=world, timeout=timeout,
            prefetch=prefetch, lease_rows=lease_rows, relabeling=self._sampling.relabeling,
        )  # fmt: skip
        self._consumers.append(consumer)
        return consumer

    # -- single rows and single batches ------------------------------------------------------------

    def add(
        self,
        data: Any,
        *,
        source: str | None = None,
        episode_info: Mapping[str, Any] | None = None,
        split: str | None = None,
        validate: Literal["schema", "domain"] = "schema",
        idempotency_key: str | bytes | None = None,
        digest: bytes | None = None,
    ) -> Any:
        """Append one row; return its index, or -1 if it is dropped.

        Args:
            data: One row, such as a TensorDict without batch dims. If `ndim` is larger than 1: one row for
                each lane; their indices are returned. Shape `(lanes, ndim)`, int64.
            source: As in `extend`.
            episode_info: As in `extend`.
            split: As in `extend`.
            validate: As in `extend`.
            idempotency_key: As in `extend`.
            digest: As in `extend`.
        """
        is_plain = all(one is None for one in (episode_info, split, idempotency_key, digest))
        if is_plain and type(data) in (dict, TensorDict) and validate == "schema":
            index = self._ingest.add_plain(data, source)
            if index >= 0:
                return index
        options = self._ingest.options(
            source=source, episode_info=episode_info, split=split, validate=validate,
            idempotency_key=idempotency_key, digest=digest,
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
        split: str | None = None,
    ) -> Recorder:
        """Record the steps of an environment loop, one call per step.

        It takes half of the time of `add` of a TensorDict: values are copied into preallocated arrays,
        and no objects are built. An open episode of the source is cut, unless `episodes.resume` has adopted
        it.

        Args:
            source: Name of the stream, as in `extend`.
            lanes: Number of environments that step together; the first dim of every value has this size.
                None: one environment, and values have no such dim.
            flush_steps: Number of steps that are published together. With 1 each step survives the end of the
                process once `step` has returned; with n, up to n - 1 steps are lost.
            autoreset_mode: How the environment resets, by gymnasium's names. "NextStep", the default of
                `gymnasium.make_vec`: the step after one that ended an episode only resets, and is not
                recorded. "SameStep", "Disabled" or None: every step is recorded.
            split: The split of the episodes, as in `extend`; None for "train".

        Raises:
            ArgumentError: `lanes` or `flush_steps` is less than 1, or there is no such mode or split.
            StateError: The store is closed, or open for reading only.

        Example:
            >>> observation, following = np.zeros(4, np.float32), np.ones(4, np.float32)
            >>> with rb.record("env-0") as episode:
            ...     episode.step(observation, 1, 0.5, following, terminated=True, truncated=False)
        """
        return Recorder(
            self._ingest,
            source,
            lanes=lanes,
            flush_steps=flush_steps,
            autoreset_mode=autoreset_mode,
            split=split,
        )

    def __len__(self) -> int:
        return self._sampling.sampler.count_left(self._store.storage)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches, without end or until the sampler has no more rows.

        Raises:
            StateError: The buffer has no batch size.
        """
        self._check_iterable()
        while True:
            yield self.sample()
            if self._sampling.sampler.ran_out:
                return

    def _check_iterable(self) -> None:
        if self._batch_size is None and not self._sampling.sampler.sizes_batches:
            raise StateError(
                "Cannot iterate over the replay buffer. Batch_size was not specified during construction of "
                "the replay buffer",
                hint="give it to the constructor, or to sample()",
            )

    def next(self) -> Any:
        """Return the next batch of an iteration that continues from call to call; None at its end."""
        self._check_iterable()
        if self._iterating and self._sampling.sampler.ran_out:
            self._iterating = False
            return None
        self._iterating = True
        return self.sample()

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether `sample` would find rows to draw.

        Raises:
            StateError: Neither the call nor the buffer has a batch size.
        """
        sampler = self._sampling.sampler
        return sampler.can_sample(self._store.storage, self._size(batch_size, sampler))

    # -- rows by index, id and episode -------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Read rows by index, or one field of all rows by key.

        Args:
            index: An index as for a tensor of all rows: an integer, a slice, integers, a mask, or a tuple of
                these; or the key of a field.

        Raises:
            NotFoundError: There is no such row, or no such field.
            StateError: The store is closed, or the writer overwrites rows faster than they can be read.
        """
        return self._rows.get(index)

    def __setitem__(self, index: Any, data: Any) -> None:
        """Replace rows by index; neither length nor episodes change.

        After a crash, all of the change or none of it is on disk.

        Raises:
            NotFoundError: There is no such row.
            SchemaError: The rows do not fit.
        """
        self._rows.set(index, data)

    def read_all_in_order(self, end: int | None = None) -> Any:
        """Read all rows, or the first `end`, in the order of their indices."""
        return self[:end]

    def write_all(self, data: Any, end: int | None = None) -> None:
        """Replace the first `end` rows, in the order of their indices; None: as many as `data` has."""
        if end is None:
            end = len(data if is_tensor_collection(data) or isinstance(data, list) else tree_leaves(data)[0])
        self[:end] = data

    def by_id(self, ids: Any) -> TensorDictBase:
        """Read rows by id, in the given order.

        Args:
            ids: Ids of the rows. Shape `(n,)`, int64.

        Returns:
            A TensorDict with the entries of samples (also `index`, `id`), batch size `[n]`.

        Raises:
            NotFoundError: A row was removed, or never existed; the message names it.
            StateError: The store is closed, or the writer overwrites rows faster than they can be read.
        """
        return self._rows.by_id(ids)

    def trajectory(self, episode_id: int) -> TensorDictBase:
        """Read the rows of an episode that still exist, in the order of steps.

        Args:
            episode_id: Id of the episode.

        Returns:
            A TensorDict with the entries of samples (also `index`, `id`), batch size `[rows]`, its dim named
            "time".

        Raises:
            NotFoundError: There never was such an episode, or all its rows were removed.
            StateError: The store is closed, or the writer overwrites rows faster than they can be read.
        """
        return self._rows.trajectory(episode_id)

    def query(
        self,
        predicate: Callable[[Any], Any] | None = None,
        trajectory_key: str | tuple[str, ...] | None = None,
    ) -> list[Any]:
        """Return the trajectories that meet a condition, oldest first.

        For a condition built with `expstore.trajectories.traj` only the fields that it names are read;
        complete rows are read only for the trajectories that meet it. `sql` and `episodes` also include
        episodes whose rows were removed.

        Args:
            predicate: A condition built with `traj`, or a function of a `Trajectory`; None: all trajectories.
            trajectory_key: The field with trajectory ids; None: the store's episodes.

        Returns:
            One `Trajectory` for each of them: a sample of its rows, in the order of steps.

        Raises:
            NotFoundError: There is no such field, or no field ends trajectories.
            ArgumentError: Rows are not TensorDicts, or the condition has one value per step instead of one
                per trajectory.

        Example:
            >>> from expstore.trajectories import traj
            >>> rb.query((traj.reward.sum() > 100) & (traj.length >= 50))
        """
        storage, batches = self._store.storage, self._batches
        return read_stable(
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
        """Return the buffer as a `Dataset` of torch, for a `DataLoader` with any number of workers.

        Workers follow the store: they take no lock, and see rows that the writer appends meanwhile.

        Args:
            slice_len: None: the items are rows by index. Otherwise slices of this number of steps of one
                episode; each slice is returned once per pass, by one of the workers.
            stride: Number of steps from the start of a slice to the start of the next; None: `slice_len`.
            strict_length: Whether to skip shorter slices at the end of episodes.
            shuffle: Whether to return slices in random order, by torch's seed. The order of rows is set in
                the `DataLoader`.
            rows: "tensordict": pass the data set's `collate` as `collate_fn` of the `DataLoader`. "dict":
                nested dicts of tensors, which a `DataLoader` collates itself.

        Raises:
            ArgumentError: The value of an argument is not allowed, or the argument requires `slice_len`.

        Example:
            >>> from torch.utils.data import DataLoader
            >>> dataset = rb.to_torch_dataset()
            >>> loader = DataLoader(dataset, 256, shuffle=True, num_workers=2, collate_fn=dataset.collate)
        """
        return make_dataset(self, slice_len, stride, strict_length, shuffle, rows)

    # -- changes of stored rows ----------------------------------------------------------------------

    def update_priority(self, index: Any = None, priority: Any = None, *, id: Any = None) -> int:
        """Set the priorities of rows that still exist.

        With `id`, a row that was removed since it was sampled is skipped, and no other row is changed.

        Args:
            index: Indices of the rows; -1 is skipped. Shape `(n,)`. If `ndim` is larger than 1, the shape is
                `(..., ndim)`, or it is a tuple of `ndim` tensors, which are broadcast together. Give either
                `index` or `id`.
            priority: Finite, not negative: one for all rows, or one or several per row, which the sampler
                reduces to one. Shape `()` or `(n, ...)`. If `ndim` is larger than 1, one value per row in the
                order of `index` may have any shape, such as `(time, lane)`.
            id: Ids of the rows. Any shape.

        Returns:
            Number of rows whose priority was set.

        Raises:
            PriorityError: A priority is negative, NaN or infinite; none was set.
        """
        return self._updates.update_priority(index, priority, id)

    def annotate(
        self,
        ids: Any,
        values: Mapping[Any, Any],
        *,
        by: str | None = None,
        like: str | tuple[str, ...] | None = None,
    ) -> None:
        """Add values that are computed after the rows, such as advantages, to stored rows.

        Nothing is overwritten: the newest value of a row is in batches, `where=` and SQL, the older ones are
        in the SQL relation `annotations`. A field that does not exist is added: an array gives all rows
        values of one shape, and a list of arrays or lists gives each row values of any length. The values
        survive the process when this returns, and a power failure after the next `flush`; a killed call has
        written all of its values or none.

        Args:
            ids: Ids of the rows, as batches have them; former ids of restored rows are
                translated. If an id occurs twice, its last value is the newest. Shape `(n,)`.
            values: Values by field: arrays or tensors of shape `(n, *row shape)`, lists of n numbers, or
                lists of n arrays of any length; nested tensors, too.
            by: Name of what has computed them, for the relation `annotations`.
            like: For new fields of any length: the field of any length that has as many values in each row,
                such as the tokens. Each later call is checked, too.

        Raises:
            SchemaError: Values have another shape, length or dtype than the field, or the field is written
                with its rows.
            NotFoundError: A row is not in the store.
            StateError: The store has no rows yet, is open for reading only, or keeps the best rows.
            StorageError: The disk failed. Whatever is raised, no value was written.

        Example:
            >>> sample = rb.sample()
            >>> rb.annotate(sample["id"], {"advantage": torch.zeros(32)}, by="trainer-3")
        """
        annotate(self._store, ids, values, by, like)

    def mark_update(self, index: Any) -> None:
        """Notify the sampler that rows were changed; prioritized samplers give them the largest priority.

        Args:
            index: Indices of the rows, as `extend` returns them.
        """
        self._sampling.sampler.mark_update(index, storage=self._store.storage)

    def set_at_(self, key: str | tuple[str, ...], value: Any, index: Any) -> Self:
        """Set a field of some rows; return the buffer.

        Args:
            key: The field.
            value: Its values. Shape `(*index shape, *row shape)`, or one that can be broadcast to it.
            index: The rows, as for `rb[index]`.

        Raises:
            NotFoundError: There is no such field, or no such row.
            SchemaError: The values do not fit; nothing was changed.
        """
        self._updates.set_fields({to_key(key): value}, index)
        return self

    def set_(self, key: str | tuple[str, ...], value: Any) -> Self:
        """Set a field of all rows, in the order of their indices; return the buffer.

        Args:
            key: The field.
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
            input_dict_or_td: Values by key. Shapes `(rows, *row shape)`, or ones that can be broadcast to
                them.
            clone: Has no effect: values are always copied.
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
        """Change fields of those of the given rows that still exist, and of no other row.

        Args:
            index: Indices of the rows, from a sample. Shape `(n,)`. If `ndim` is larger than 1, the shape is
                `(..., ndim)`, or it is a tuple of `ndim` tensors.
            generation: Their `index_generation`, which samples have if the writer tracks generations. One per
                row.
            patch: New values by key. Shapes `(n, *row shape)`. If `ndim` is larger than 1, the `n` rows may
                have as many dims: `(time, lane, *row shape)`.
            version_key: A field with one number per row, which is set to `version`; rows with a larger number
                are skipped.
            version: The version of this patch, one for all rows or one each. Shape `()` or `(n,)`.
            require_newer: Whether to skip rows with the same version too.
            id: Ids of the rows, instead of index and generation. Any shape. If a row is named twice, the
                values with the highest version are written, or without versions the last ones.

        Returns:
            The result for each row, in the shape of the rows.

        Raises:
            NotFoundError: There is no such field (a KeyError).
            SchemaError: Values do not fit (a ValueError); nothing was changed.
            StateError: There are no rows yet; `index` is given and the writer does not track generations; or
                the writer keeps the best rows, where a new row takes over the id of the row that it replaces.

        Example:
            >>> sample = rb.sample()
            >>> reward = torch.zeros(32, 1)
            >>> rb.update_if_present(id=sample["id"], patch={("next", "reward"): reward}).updated_count
            32
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
        """Call `update_if_present`; return its result or error as a completed future.

        Other calls need not wait for it: a prefetched batch is drawn again if its rows were changed.

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
        """Delete all rows. Ids and episode ids are not reused; indices of a ring begin at 0 again.

        Args:
            empty_write_count: Must be False or None: `write_count` always counts all rows ever written.

        Raises:
            ArgumentError: `empty_write_count` is True.
            StateError: The store is closed, open for reading only, or its writer refuses changes.
        """
        if empty_write_count:
            raise ArgumentError(
                "empty_write_count=True is not supported: write_count is the number of rows ever written; "
                "leave it out"
            )
        self._updates.empty()

    # -- groups of methods ---------------------------------------------------------------------------

    @property
    def episodes(self) -> Episodes:
        """Query episodes by calling it; its methods annotate, end, resume and delete episodes.

        Example:
            >>> rb.episodes("length > $n", order_by='"return" DESC', limit=10, params={"n": 100})
            >>> rb.episodes.end("robot-1")
        """
        return Episodes(self._store)

    @property
    def groups(self) -> Groups:
        """Query groups of episodes by calling it; its methods start, close and discard groups.

        Example:
            >>> rb.groups("status = 'complete'", order_by="std_return DESC")
        """
        return Groups(self._store)

    @property
    def selections(self) -> Selections:
        """Query selections of episodes by calling it; its methods create, change, compare and drop them.

        Example:
            >>> clean = rb.selections.create("clean-v1", where="length > 3")
            >>> rb.sql("SELECT count(*) FROM episodes WHERE selection('clean-v1')").fetchall()
            [(10,)]
        """
        return Selections(self._store.storage, self._store.catalog, self._store.proxy)

    @property
    def columns(self) -> Columns:
        """Add and drop fields, and compute their statistics."""
        return Columns(self._store, self._sampling)

    @property
    def snapshots(self) -> Snapshots:
        """Create, tag, list and restore versions of the store."""
        return Snapshots(self._store, self._sampling)

    @property
    def consumers(self) -> Consumers:
        """List the store's consumers, and end them."""
        return Consumers(self._store)

    @property
    def retention(self) -> Retention:
        """Set which rows a store without a capacity keeps."""
        return Retention(self._store)

    # -- the whole store -----------------------------------------------------------------------------

    def sql(self, query: str, params: Sequence[object] | Mapping[str, object] | None = None) -> Result:
        """Run one read-only SELECT over transitions, episodes and the other relations of docs/sql.md.

        A query sees all earlier writes of this process. Nested keys are written with dots, as in
        `next.reward`.

        Args:
            query: The statement.
            params: Values for `?` (a sequence) or `$name` (a mapping).

        Returns:
            A result with `df()`, `arrow()`, `pl()`, `fetchall()` and `to_parquet(file)`.

        Raises:
            QueryError: The statement is not one SELECT, or DuckDB refuses it.
            StateError: The store is closed; or, in a follower, the writer kept overwriting the query's rows
                for two seconds.
        """
        return self._store.catalog.query(query, params)

    def flush(self, *, shipped: bool = False, timeout: float = 60.0) -> None:
        """Sync rows, priorities, the number of the next draw, and the draws of open consumers to the disk.

        Args:
            shipped: Whether to wait until all of it is shipped, too: it survives the loss of this machine.
            timeout: How long to wait for that, seconds.

        Raises:
            StorageError: The disk failed; the store must be opened again.
            LockedError: Another machine has taken over the address to which the store is shipped.
            RemoteError: It was not shipped in time; it will be later.
            StateError: `shipped` is set, and this buffer does not ship its store.
        """
        proxy = self._store.proxy
        if proxy is not None:
            proxy.flush()
        else:
            self._store.storage.writer().sync()
        for consumer in self._consumers:
            if not consumer.closed:
                consumer.flush()
        if shipped:
            shipping = None if proxy is not None else self._store.storage.writer().holders.shipping
            if shipping is None:
                raise StateError(
                    "this buffer does not ship its store",
                    hint="call it of the buffer that expstore.open(path, ship=...) has returned",
                )
            shipping.wait(timeout)

    def refresh(self) -> None:
        """Update what is derived from rows: `where` and `weight` of the sampler, and a follower's episodes.

        `where` and `weight` are evaluated for all present rows. The next batches then equal those of any
        other process or run with the same rows, seed and draw number. A follower also reads new episodes and,
        after the writer has stopped, its last rows. While the writer runs, new rows appear without `refresh`;
        small batches (up to 64 rows, 16 KiB together) appear within 0.1 s. `sql` and `stats` refresh too.

        Raises:
            QueryError: `where` or `weight` cannot be computed, or a weight is negative or not finite.
            StorageError: The store cannot be read.
        """
        self._store.storage.follow(priorities=True)
        self._sampling.refresh()

    def dumps(self, path: str | Path, *, keep: int = 5) -> Version:
        """Create a version: a complete, closed copy of the current store in `path`/vNNNN.

        Other threads append and sample meanwhile; a write waits if it would overwrite or change a row that is
        not copied yet. Files that have not changed since the previous version are shared with it (hard
        links). After a crash the version is complete or does not exist. A buffer that only reads its store,
        such as a data set, opens the store for writing meanwhile.

        Args:
            path: Folder of versions; created if it is missing.
            keep: Number of versions to keep; tagged versions are always kept.

        Returns:
            The version: number, rows, bytes.

        Raises:
            SnapshotError: The folder holds something else.
            LockedError: Another process creates a version there; or this buffer only reads the store, and
                another one writes to it.
            StateError: The store is closed, or it is a version itself.
            CorruptionError: Rows that would be copied do not have their checksum. Blocks of 4096 rows that
                are not full, or were changed since the last sync, are not compared.
            StorageError: The disk failed or is full; earlier versions are unchanged.

        Example:
            >>> version = rb.dumps("backup")
            >>> with expstore.open("backup", mode="r") as backup:
            ...     len(backup) == len(rb)
            True
        """
        return self.snapshots.create(path, keep=keep)

    def dump(self, path: str | Path, *, keep: int = 5) -> Version:
        """Create a version in a folder: TorchRL's other name of `dumps`, with its arguments and errors."""
        return self.dumps(path, keep=keep)

    def save(self, path: str | Path, *, keep: int = 5) -> Version:
        """Create a version in a folder: TorchRL's other name of `dumps`, with its arguments and errors."""
        return self.dumps(path, keep=keep)

    def loads(self, path: str | Path, version: int | str | None = None) -> None:
        """Replace the store's content by a version's.

        After a crash the store has either the old or the new content. Rows, priorities, counts, episodes,
        seed, and `alpha` and `beta` of a prioritized sampler become the version's. The next batches are those
        that would have followed the version. Capacity and retention policy do not change. Ids and episode ids
        continue above those of both (a store that never had rows continues the version's); recorded draws of
        consumers follow the rows of a version of this store. Indices are the same if the capacities are.
        Versions in the store's folder are kept. If the version is of this store, fields that were added or
        dropped since are restored to the version's state.

        A buffer without rows also loads the rows that `dumps` of a TorchRL buffer wrote, the oldest row
        first; a warning names what is not loaded, such as the sampler's state. After an interruption the rows
        that were loaded so far remain: call `empty` before the next attempt.

        Args:
            path: The folder that `dumps` was given, or a store that has tagged versions.
            version: Number or tag; None: the newest.

        Raises:
            SnapshotError: There is no such version, and the message lists the versions; or TorchRL's rows are
                not TensorDicts.
            SchemaError: This store has other fields; or TorchRL's rows have several dims.
            CorruptionError: The version is damaged: all rows are compared with their checksums. The store has
                its former content.
            StateError: The store is closed, or open for reading only; or it has rows, and TorchRL wrote
                `path`.
        """
        folder = local_path(path)
        if version is None and is_torchrl_dump(folder):
            load_torchrl_dump(self._store.check_open().writer(), self._ingest.writer, folder)
        else:
            self.snapshots.restore(path, version)

    def load(self, path: str | Path, version: int | str | None = None) -> None:
        """Restore a version in a folder: TorchRL's other name of `loads`, with its arguments and errors."""
        self.loads(path, version)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`, under torchrl's names; of storages in RAM with the rows.

        The state of a store on disk only identifies its rows; `dumps` copies them.
        """
        return self._sampling.state_dict() | {
            "_writer": self._ingest.writer.state_dict(),
            "_transforms": self._batches.transform.state_dict(),
            "_batch_size": self._batch_size,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue with the batch that followed `state_dict`, provided that the rows are the same.

        Rows in the state replace those of the storage, as by `loads`; without rows in the state the storage
        must have them. The batch size and the state of transforms become the state's. Open episodes end.

        Raises:
            StateError: The state does not fit, and nothing was changed: it is of another sampler, other
                transforms, another `where` or `weight`, a store with another seed, rows that are missing
                here, or only one of both draws by a generator, or their generators are for different devices.
            SchemaError: The rows have other fields; nothing was changed.
            ArgumentError: The writer has other settings; nothing was changed.
        """
        self._sampling.check_state(state_dict)
        if not {"_writer", "_transforms", "_batch_size"} <= state_dict.keys():
            raise StateError(f"this is not a state of a {type(self).__name__}")
        self._ingest.writer.load_state_dict(state_dict["_writer"])
        self._batches.transform.load_state_dict(state_dict["_transforms"])
        self._sampling.load_state_dict(state_dict)
        end_episodes(self._store.storage)
        self._batch_size = state_dict["_batch_size"]

    def register_save_hook(self, hook: Hook) -> None:
        """Store the result of a hook in the storage's `state_dict`; see `PortableStorage`."""
        self._store.storage.writer().register_save_hook(hook)

    def register_load_hook(self, hook: Hook) -> None:
        """Pass rows through a hook in the storage's `load_state_dict`; see `PortableStorage`."""
        self._store.storage.writer().register_load_hook(hook)

    def close(self) -> None:
        """Flush, update the index for other programs, and release the store."""
        self._sampling.close()
        self._sharing.stop()
        for consumer in self._consumers:
            consumer.close()
        if self._member is not None:
            self._member.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- facts -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return statistics of the buffer, as values that JSON can store.

        Returns:
            storage: The kind of storage: "zarr", "arrow" or "memory".
            uuid: Identifies a store on disk; it never changes, and versions have the same one. Save it with
                the weights of a model to check later that both belong together. None: in RAM.
            size: Number of readable rows.
            capacity: Largest number of readable rows; None: unbounded.
            utilization: size / capacity; only with a capacity.
            window, stored: Most rows that samplers see, and number of stored rows; only with a window.
            spare: Number of slots beyond the capacity.
            write_count: Number of rows that were ever written.
            last_id: Id of the newest row.
            draws: Number of batches that were drawn.
            extends, redraws, waits, wait_seconds, syncs: Since this opening: batches written; draws repeated
                because rows were overwritten; how often and how long writers waited; syncs.
            write_keys: Number of known idempotency keys; None: unknown in a reader.
            prefetch_queue_size: Number of prefetched batches.
            rate_limiter: Its counts; None: there is no limiter.
            batch_size: The buffer's rows per batch.
            initialized: Always True; for TorchRL.

            On disk also
            path: The folder.
            generation: How often the store was opened for writing.
            recovered: What this opening recovered after a crash; None: nothing.
            durability: "sync" or "process". This and the following only while open for writing.
            unsynced_rows: Number of rows that a power failure would lose.
            fsyncs, last_sync_seconds, last_sync_age: Number of fsyncs; duration of the last sync, and time
                since then, in seconds.
            free_bytes: Free space of the file system.
            poisoned: The disk failure after which nothing can be written; None: there was none.
            shipped: What is shipped, see docs/shipping.md; None: the store is not shipped.
            packed: Compression ratio of each packed field.
            live, damaged: Only of a reader: whether a writer has the store open, and which files are damaged.
        """
        storage = self._store.current()
        mine: dict[str, Any] = {"batch_size": self._batch_size, "initialized": self.initialized}
        if storage.capacity is not None:
            mine["utilization"] = len(storage) / storage.capacity
        if storage.description.window_rows is not None:
            mine |= {"window": storage.description.window_rows, "stored": storage.stored.rows}
        return describe(storage) | storage.more_stats() | self._sampling.stats() | mine

    @property
    def schema(self) -> Schema | None:
        """The fields; None before the first rows."""
        return self._store.storage.schema

    @property
    def specs(self) -> Composite | None:
        """A copy of the specs of the fields' values, as far as they were set; None: none were set."""
        return specs_of(self._store.storage)

    def set_specs(self, specs: Composite | None) -> None:
        """Set which values the fields of a row may have; None: remove the specs.

        Only the schema is checked: it must have these fields with these dtypes and shapes. The values of
        stored rows are not checked. Later rows with other dtypes or shapes are refused;
        `extend(validate="domain")` also checks values. The specs are stored like the schema.

        Args:
            specs: Specs of some or all fields, nested like the rows, without batch dims.

        Raises:
            SchemaError: The rows have other fields, or the specs cannot be stored as text; nothing was
                changed.
            StateError: The store is closed, or open for reading only.

        Example:
            >>> from expstore import Categorical, Composite, Unbounded
            >>> rb.set_specs(Composite(action=Categorical(2), next=Composite(reward=Unbounded((1,)))))
        """
        self._store.storage.writer().settings.describe_fields(row_text(specs))

    @property
    def meta(self) -> dict[str, Any]:
        """The user's facts that were given when the store was created."""
        return meta_of(self._store.storage)

    def record_lineage(self, **facts: Any) -> None:
        """Record where the rows come from that this process writes from now on, such as the policy.

        The facts are in the relation `lineage` of SQL, in the step of these rows. Rows that were written
        before keep their step. The facts are durable when this returns, and end with the buffer. Each call
        rewrites expstore.json: call this once for each policy, not for each batch.

        Args:
            **facts: The facts, as values that JSON can store; None removes one.

        Raises:
            SchemaError: JSON cannot store a value, or expstore itself records a fact of this name.
            StateError: The rows are in RAM, or the store is closed or open for reading only.
            StorageError: The disk failed; nothing was recorded.

        Example:
            >>> rb.record_lineage(policy="sha256:9f86d081")
            >>> index = rb.extend(batch)
        """
        if taken := OWN_FACTS & facts.keys():
            raise SchemaError(
                f"expstore itself records {min(taken)!r} in the lineage", hint="use another name"
            )
        self._store.storage.writer().settings.record_lineage(json.loads(pack_info(facts) or "{}"))

    @property
    def recovered(self) -> str | None:
        """One line that describes what opening recovered after an unclean stop; None: nothing."""
        return self._store.storage.counters.recovered

    @property
    def write_count(self) -> int:
        """The number of rows ever written; if `ndim` is larger than 1, counted along time."""
        storage = self._store.current()
        return storage.write_count // storage.geometry.lanes

    @property
    def initialized(self) -> bool:
        """Always True: the buffer is complete once it is constructed."""
        return True

    @property
    def batch_size(self) -> int | None:
        """Rows per batch, unless `sample` gets another number."""
        return self._batch_size

    @property
    def dim_extend(self) -> int:
        """The dim of a batch given to `extend` that is time."""
        return self._index.time_dim

    def __repr__(self) -> str:
        storage = self._store.storage
        room = "unbounded" if storage.capacity is None else f"capacity {storage.capacity}"
        room = room if storage.description.window_rows is None else f"the window of {storage.stored.rows}"
        sampler = self._sampling.sampler
        return f"{type(self).__name__}({storage.kind}, {len(storage)} rows, {room}, {sampler!r})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: fields, sizes and the first rows."""
        storage = self._store.current()
        return render_view(storage, type(self).__name__, [storage.kind, repr(self._sampling.sampler)])

    # -- storage, sampler, writer, transforms and random numbers ----------------------------------------

    @property
    def storage(self) -> ReadView:
        """The storage of the rows."""
        return self._store.storage

    @property
    def _storage(self) -> ReadView:
        """The storage; TorchRL's multi-process collectors read it under this name."""
        return self._store.storage

    def set_storage(self, storage: ReadView, collate_fn: Callable[[Any], Any] | None = None) -> ReadView:
        """Use another storage from now on; return the previous one, which stays open.

        Args:
            storage: The new storage.
            collate_fn: Replaces the collate function; None: the default one.

        Raises:
            StateError: The buffer is closed.
            ArgumentError: It is not a storage; the sampler does not fit it; nothing was changed.
        """
        self._store.check_open()
        if not isinstance(storage, ReadView):
            raise ArgumentError(f"the storage must be a Storage, got a {type(storage).__name__}")
        self._sharing.stop()
        former = self._store.replace(storage)
        self._batches.set_collate(collate_fn)
        return former

    @property
    def sampler(self) -> Any:
        """The sampler, as it was given."""
        return unwrap(self._sampling.sampler)

    @property
    def _sampler(self) -> Any:
        """The sampler, under the name by which TorchRL's collectors of several processes read it."""
        return self.sampler

    def set_sampler(self, sampler: Any) -> Any:
        """Draw by another sampler from the next batch on; return the previous one.

        Draw numbers continue. A sampler with a position in the store starts again, unless the previous one
        was of the same kind.

        Raises:
            StateError: The store is closed.
            ArgumentError: The argument is not a sampler; the sampler does not fit this buffer; nothing was
                changed.
            QueryError: The rows lack fields that its `where` or `weight` names.
        """
        return self._sampling.set_sampler(sampler)

    @property
    def writer(self) -> Writer:
        """The writer, which places new rows."""
        return self._ingest.writer

    @property
    def _writer(self) -> Writer:
        """The writer, under the name by which programs written for TorchRL read it."""
        return self._ingest.writer

    @property
    def _limiter(self) -> RateLimiter | None:
        """The rate limiter, which a collector opens while its workers end."""
        return self._sampling.limiter

    def set_writer(self, writer: Writer) -> Writer:
        """Place rows by another writer from now on; return the previous one.

        Raises:
            ArgumentError: The argument is not a writer.
        """
        former = self._ingest.set_writer(writer)
        self._batches.label_generations(writer.tracks_generations)
        return former

    @property
    def transform(self) -> Compose:
        """The transforms of written rows and of samples."""
        return self._batches.transform

    @property
    def _transform(self) -> Compose:
        """The transforms, under the name by which TorchRL's ensembles read them."""
        return self._batches.transform

    @property
    def _collate_fn(self) -> Callable[[Any], Any]:
        """What makes a batch of rows, under the name by which TorchRL's ensembles read it."""
        return partial(self._batches.collate, self._store.storage)

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform after the others; return the buffer.

        Args:
            transform: A callable that changes samples, or a torchrl Transform.
            invert: Whether to change written rows instead.

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
            transform: A callable that changes samples, or a torchrl Transform.
            invert: Whether to change written rows instead.

        Raises:
            StateError: The buffer is closed.
        """
        if self._store.life is Life.CLOSED:
            raise build_closed_error()
        self._batches.transform.insert(index, transform, invert=invert)
        self._sampling.drop_prefetched()
        return self

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw by another generator, in its present state, from the next batch on; None: by the seed.

        Raises:
            ArgumentError: It is not a `torch.Generator`.
        """
        self._sampling.set_rng(generator)

    # -- TorchRL's service API ------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the buffer is open."""
        return not self._store.storage.closed

    service_backend = property(torchrl_service.service_backend)
    start = torchrl_service.start
    client = torchrl_service.client

    @property
    def shared(self) -> bool:
        """Whether copies of the buffer in other processes may write; see `share`."""
        return self._sharing.is_on

    def share(self, shared: bool = True) -> Self:
        """Let forked and pickled copies of the buffer write to the store, through this process.

        `extend`, `add`, `record`, `update_priority`, `empty`, `dumps`, `snapshots.tag` and the methods of
        `episodes` that annotate, end and resume then return in the other process when this one has done what
        they ask; `sample` and all other reads follow the store there, and other changes are refused. Rows in
        RAM stay in this process: copies can write them, but not read them. Each process is a session of its
        own: its rows share no episode with those of others, and if it dies its open episodes are cut. A
        thread of this process does the writing; `close` ends it. Copies that were made before `share` only
        read. A buffer over a `LazyMemmapStorage` is shared when it is first pickled, copied or forked.

        Args:
            shared: False: let no other process write any more, once calls in progress are done; calls that
                wait for the rate limiter are then allowed.

        Returns:
            The buffer.

        Raises:
            StateError: The rows are objects, or the store is open for reading only or closed.

        Example:
            >>> rb.share()
            >>> processes = torch.multiprocessing.get_context("fork")
            >>> worker = processes.Process(target=rb.extend, args=(batch,))
            >>> worker.start()
            >>> worker.join()
            >>> len(rb)
            264
        """
        if shared:
            self._sharing.start()
        else:
            self._sharing.stop()
        return self

    synchronize = torchrl_service.synchronize
    shutdown = torchrl_service.shutdown

    # -- copies --------------------------------------------------------------------------------------------

    def __copy__(self) -> Self:
        """Return a buffer with its own parts over the same storage; over a store on disk it is a follower."""
        shared = [self._store.storage] if self._store.is_in_memory else []
        return copy.deepcopy(self, {id(storage): storage for storage in shared})

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy in another process: it follows the store, or gets the rows in RAM.

        Raises:
            StateError: The store is closed.
        """
        return vars(self) | {"_iterating": False, "_member": None, "_consumers": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the result of `__getstate__`; a store on disk is opened when it is first used."""
        vars(self).update(state)
        self._connect()
