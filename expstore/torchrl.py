"""Stores in TorchRL's own objects: the storage of its replay buffers, and the buffer of its trainer.

Built on the buffers; needs torchrl. All its state is in the store.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from multiprocessing.context import get_spawning_popen
from pathlib import Path
from typing import Any

import numpy as np
import torch

from expstore._open import open as open_store
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.data.batch import Batch, StepReader
from expstore.data.containers import take
from expstore.datasets import offline_to_online
from expstore.errors import ArgumentError, MissingExtraError, SchemaError, StateError
from expstore.schema.schema import Schema
from expstore.storages.base import append_rows, prepare, replace_rows
from expstore.storages.read_view import ReadView, contains, find, get, layout_of

try:
    from torchrl.data.replay_buffers.offline_to_online import OfflineToOnlineReplayBuffer
    from torchrl.data.replay_buffers.samplers import ConsumingSampler
    from torchrl.data.replay_buffers.storages import TensorStorage
    from torchrl.data.replay_buffers.writers import ImmutableDatasetWriter, RoundRobinWriter
except ModuleNotFoundError as exc:
    raise MissingExtraError(
        "expstore.torchrl has classes for torchrl's buffers and trainers, and torchrl is not installed",
        hint="pip install torchrl (expstore's own buffers do not need it)",
    ) from exc

__all__ = ["ExpStorage", "TorchRLOfflineToOnline"]

#: Root keys that torchrl's buffers add to what they write and to what they sample.
_BESIDE = frozenset({"index", "index_generation"})

_COPIES = (
    "set_, set_at_ and update_ of torchrl's buffers change the rows that a storage returns, and this one "
    "returns copies: the store was not changed"
)


class ExpStorage(TensorStorage):  # type: ignore[misc]
    """Store the rows of torchrl's own `ReplayBuffer` or `TensorDictReplayBuffer` in an expstore store.

    Rows have the indices that torchrl's `RoundRobinWriter` gives them, which equal the store's own: the
    writer takes its cursor from the store, so a new buffer over an old store continues where the last one
    stopped. The rows have episodes and ids, and can be queried with SQL: `storage.buffer` is expstore's
    buffer over the same rows. Use it also to flush and close the store.

    torchrl's samplers draw with torch's random numbers, so draws continue after a restart only if the state
    of torch's generator is restored. torchrl's priorities exist only in the process. Its `SliceSampler` reads
    all rows again after each write. expstore's own buffers and samplers have none of these limits.

    Threads: as torchrl's buffers. Processes: one writer; in another process the storage follows the store,
    and cannot write. Crashes: rows survive the end of the process once `extend` has returned; a batch is
    complete or absent; after `storage.buffer.flush()` rows survive a power failure.

    Args:
        store: A folder, which is opened as by `expstore.open`; or an expstore buffer or storage.
        source: Name of the source of the rows, as in `extend`; a named source continues its open episodes
            after a restart.
        keywords: Arguments of `expstore.open`, if `store` is a folder.

    Raises:
        ArgumentError: `store` is not a store, or keywords are given with an open one.
        LockedError: Another process has the folder open for writing.
        StateError: As `expstore.open`; or the storage keeps objects, or the best rows only.

    Example:
        >>> import torchrl.data
        >>> from expstore.torchrl import ExpStorage
        >>> storage = ExpStorage("run.exp", capacity=100_000)
        >>> buffer = torchrl.data.TensorDictReplayBuffer(storage=storage, batch_size=256)
        >>> index = buffer.extend(batch)
        >>> buffer.sample().batch_size
        torch.Size([256])
        >>> storage.buffer.sql("SELECT count(*) FROM episodes").fetchall()
        [(4,)]
        >>> storage.buffer.close()
    """

    supports_conditional_update = False

    def __init__(
        self, store: str | Path | ReplayBuffer | ReadView, *, source: str | None = None, **keywords: Any
    ) -> None:
        if isinstance(store, str | Path):
            buffer: ReplayBuffer = open_store(store, **keywords)
        elif keywords:
            raise ArgumentError(
                f"{', '.join(keywords)}: settings are only allowed with a folder; this store is already open"
            )
        elif isinstance(store, ReadView):
            buffer = TensorDictReplayBuffer(storage=store)
        elif isinstance(store, ReplayBuffer):
            buffer = store
        else:
            raise ArgumentError(
                f"a store must be a folder, a buffer or a storage of expstore, not {type(store).__name__}"
            )
        kept = buffer.storage
        if kept.row_traits.whole or kept.ranking is not None:
            what = (
                "keeps objects"
                if kept.row_traits.whole
                else "keeps the best rows only, at places that it chooses"
            )
            raise StateError(
                f"this storage {what}, and torchrl's writers place rows by their cursor",
                hint="use it in an expstore.ReplayBuffer",
            )
        self.buffer = buffer
        self._source = source
        self._compilable = False
        self._reader: tuple[Schema, StepReader] | None = None
        self._attached_entities_list: list[Any] = []
        self._rng = None

    # -- the interface for torchrl's buffers, samplers and writers -------------------------------

    def set(self, cursor: Any, data: Any, *, set_cursor: bool = True) -> None:
        """Append rows at a writer's cursor, which follows the newest row; or change rows by index.

        Args:
            cursor: An integer, several, or a slice.
            data: One row for one integer, otherwise one row for each index.
            set_cursor: False: change existing rows, and leave episodes as they are.

        Raises:
            SchemaError: The rows do not fit, or their number differs from the number of indices.
            StateError: The cursor does not follow the newest row; or the store is closed, or is read-only.
            NotFoundError: A row to change does not exist.
        """
        with self.buffer.storage.locks.extend, self.buffer.storage.lock:
            kept = self.buffer.storage.writer()
            if not set_cursor:
                ids, shape = find(kept, cursor)
                layout = replace(layout_of(kept, 0), ndim=max(1, len(shape)), all_dims=False)
                replace_rows(kept, ids, take(data, layout, single=shape == (), skip=_BESIDE))
                return
            single = not isinstance(cursor, slice) and np.ndim(cursor) == 0
            batch = take(data, layout_of(kept, 0), single=single, skip=_BESIDE)
            self._check_cursor(kept, cursor, batch)
            schema = prepare(kept, batch)
            if self._reader is None or self._reader[0] is not schema:  # the schema changes after `loads`
                self._reader = schema, StepReader(schema, kept.keys)
            columns = batch.columns(schema)
            steps = self._reader[1].read(columns, batch)
            ids = append_rows(kept, columns, steps, source=self._source)
            if (sampler := self.buffer.sampler).hears_writes:
                sampler.on_write(ids)

    def _check_cursor(self, kept: ReadView, cursor: Any, batch: Batch) -> None:
        """Raise StateError unless the cursor is at the positions of the next rows."""
        lanes = int(np.prod(batch.dims, dtype=np.int64))
        steps = batch.count // lanes
        if isinstance(cursor, slice):
            cursor = range(*cursor.indices(self.max_size))
        numbers = np.atleast_1d(np.asarray(cursor))
        if numbers.size != steps:
            raise SchemaError(
                f"{numbers.size} rows were to be written, and the batch has {steps} for this store, in which "
                "all batch dims are rows",
                hint="flatten it first: rb.extend(batch.reshape(-1))",
            )
        most = -(-self.max_size // lanes)  # the capacity along time, which is rounded up with the first rows
        expected = (kept.last // lanes + np.arange(steps)) % most
        if not np.array_equal(numbers, expected):
            raise StateError(
                f"the writer's cursor is at {_format(numbers)}, but the store's next rows are at "
                f"{_format(expected)}: nothing was written",
                hint="after setting another writer, call storage.align(rb) to correct its cursor",
            )

    def get(self, index: Any) -> Any:
        """Return copies of rows by index.

        Args:
            index: An integer for one row; a slice, integers or a mask for several; or a tuple of them, one
                per dim.

        Raises:
            NotFoundError: There is no such row.
            StateError: Indices have gaps because rows were deleted, or the store has a window.
        """
        kept = self.buffer.storage
        window = kept.window
        if kept.description.window_rows is not None:
            raise StateError(
                "the store has a window, and torchrl's samplers need indices that begin at 0",
                hint="sample with expstore's own buffer, expstore.open(path)",
            )
        hole = window.low if kept.capacity is None else window.low % kept.capacity
        if window.deleted or (hole and window.size != kept.capacity):
            raise StateError(
                "rows between others are missing (after a repair, or a kill during an extend longer than the "
                "spare slots), and torchrl's samplers need indices without gaps",
                hint="sample with expstore's own buffer, expstore.open(path), until they are overwritten",
            )
        return get(kept, index)

    def __getitem__(self, item: Any) -> Any:
        return self.get(item)

    def __len__(self) -> int:
        return len(self.buffer.storage)

    def contains(self, item: Any) -> Any:
        """Return the indices at which rows can be read."""
        return contains(self.buffer.storage, item)

    @property
    def ndim(self) -> int:
        """The number of dims of a batch that are rows, the first of which is time."""
        return self.buffer.storage.ndim

    @property
    def device(self) -> torch.device:
        """The device of the returned rows."""
        return self.buffer.storage.device or torch.device("cpu")

    @property
    def max_size(self) -> int:
        """The largest number of readable rows."""
        return self.buffer.storage.max_size

    @property
    def initialized(self) -> bool:
        """Whether the store has fields."""
        return self.buffer.storage.schema is not None

    @property
    def _len(self) -> int:
        return len(self)

    @_len.setter
    def _len(self, value: int) -> None:
        if value != len(self):
            raise StateError(f"the store has {len(self)} rows, and only writing rows changes this")

    @property
    def _total_shape(self) -> torch.Size | None:
        kept = self.buffer.storage
        if kept.schema is None:
            return None
        return torch.Size([kept.max_size // kept.geometry.lanes, *kept.geometry.dims])

    @property
    def _last_cursor_index(self) -> int | None:
        kept = self.buffer.storage
        return (
            (kept.last // kept.geometry.lanes - 1) % (self.max_size // kept.geometry.lanes)
            if kept.last
            else None
        )

    @property
    def _last_cursor(self) -> int | None:
        return self._last_cursor_index

    @property
    def _mutation_revision(self) -> int:
        """A number that changes whenever rows are added, changed or removed."""
        kept = self.buffer.storage
        kept.follow()
        return kept.last + sum(kept.version)

    def _bump_mutation_revision(self) -> None:
        # torchrl's buffers call it after they have changed rows in place, which they take for views.
        raise StateError(_COPIES, hint="rb[index] = rows, or storage.buffer.set_at_(...)")

    def _empty(self) -> None:
        if self.buffer.storage.capacity is None and len(self):
            raise StateError(
                "a store without capacity never reuses indices, and torchrl's samplers need all from 0 on",
                hint="give the store a capacity, or create a new one",
            )
        self.buffer.empty()

    # -- the buffer of torchrl over this storage -------------------------------------------------

    def align(self, buffer: Any) -> None:
        """Make a buffer's writer read its cursor from the store from now on.

        Buffers do so when they are created; call it after setting another writer.

        Args:
            buffer: A torchrl `ReplayBuffer` over this storage.

        Raises:
            ArgumentError: The buffer's writer has no such cursor, or its sampler needs rows at other indices.
        """
        writer, sampler = buffer._writer, buffer._sampler
        if isinstance(sampler, ConsumingSampler):
            raise ArgumentError(
                "a ConsumingSampler of torchrl writes new rows at the places of used ones, in another order "
                "than that of the store's episodes; use expstore's own: expstore.open(path, "
                "sampler=expstore.ConsumingSampler(...))"
            )
        if isinstance(writer, ImmutableDatasetWriter):
            return
        if not isinstance(writer, RoundRobinWriter) or writer._compilable:
            raise ArgumentError(
                f"a {type(writer).__name__} places rows at other indices than the store, which is a ring: "
                "use a RoundRobinWriter that is not compilable, or expstore's own buffers and writers"
            )
        writer._cursor_value = _Cursor(self)
        writer._write_count_value = _WriteCount(self)

    @property
    def checkpointer(self) -> None:
        """Always None: `dumps` has one format."""
        return None

    @checkpointer.setter
    def checkpointer(self, value: Any) -> None:
        # A buffer sets it last in its constructor, when its writer is set.
        if value is not None:
            raise ArgumentError(
                "a checkpointer is not supported: dumps() writes snapshots of the store itself; leave it out"
            )
        for buffer in self._attached_entities_list:
            if getattr(buffer, "_storage", None) is self:
                self.align(buffer)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: of a store in RAM with the rows, of a store on disk without them."""
        return self.buffer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. Rows that were added to a store on disk since are kept.

        Raises:
            StateError: The state is of another store, or of rows that are missing here; nothing was changed.
        """
        self.buffer.load_state_dict(state_dict)

    def dumps(self, path: str | Path) -> None:
        """Create a version of the store; see `ReplayBuffer.dumps`."""
        self.buffer.dumps(path)

    def loads(self, path: str | Path) -> None:
        """Replace the store's content by a version's; see `ReplayBuffer.loads`."""
        self.buffer.loads(path)

    def register_save_hook(self, hook: Any) -> None:
        """Store the result of a hook in `state_dict`; see `PortableStorage`."""
        self.buffer.register_save_hook(hook)

    def register_load_hook(self, hook: Any) -> None:
        """Pass rows through a hook in `load_state_dict`; see `PortableStorage`."""
        self.buffer.register_load_hook(hook)

    @property
    def shared_init(self) -> bool:
        """Raise StateError: multi-process collectors, which read it before the first rows, cannot write."""
        raise _build_process_error()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which follows the store.

        Raises:
            StateError: The copy is made for a new process, as multi-process collectors do, to write there.
        """
        if get_spawning_popen() is not None and self.buffer.storage.can_write:
            raise _build_process_error()
        return self.__dict__ | {"_rng": None, "_reader": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.buffer!r})"


class TorchRLOfflineToOnline(
    offline_to_online.OfflineToOnlineReplayBuffer,
    OfflineToOnlineReplayBuffer,  # type: ignore[misc]
):
    """Do what expstore's `OfflineToOnlineReplayBuffer` does, in the type hierarchy of TorchRL.

    TorchRL's `OfflineToOnlineTrainer` checks by `isinstance` that it gets TorchRL's class. Created by
    `expstore.trainers.to_torchrl`, with the state of a buffer.

    Example:
        >>> from expstore.datasets import OfflineToOnlineReplayBuffer
        >>> both = OfflineToOnlineReplayBuffer(rb, online_capacity=100, batch_size=32)
        >>> type(expstore.trainers.to_torchrl(both)).__name__
        'TorchRLOfflineToOnline'
    """


def _build_process_error() -> StateError:
    return StateError(
        "a store has one writer, and in another process this storage could only read: multi-process "
        "collectors cannot write to it",
        hint="iterate over the collector and extend the buffer here; to read elsewhere, open the store "
        "there: ExpStorage(path, mode='r')",
    )


def _format(numbers: np.ndarray[Any, Any]) -> str:
    return str(numbers[0]) if numbers.size == 1 else f"{numbers[0]} to {numbers[-1]}"


@dataclass(slots=True)
class _Cursor:
    """A stand-in for the shared number with a torchrl writer's cursor, which is read from the store."""

    storage: ExpStorage

    @property
    def value(self) -> int:
        """Return the index along time of the next row."""
        kept = self.storage.buffer.storage
        return kept.last // kept.geometry.lanes % (-(-kept.max_size // kept.geometry.lanes))

    @value.setter
    def value(self, value: int) -> None:
        """Ignore the value: the store moves the cursor with the rows."""


@dataclass(slots=True)
class _WriteCount:
    """A stand-in for torchrl's shared count of written rows, which is read from the store."""

    storage: ExpStorage

    @property
    def value(self) -> int:
        """Return the number of rows ever written."""
        kept = self.storage.buffer.storage
        return kept.write_count // kept.geometry.lanes

    @value.setter
    def value(self, value: int) -> None:
        """Ignore the value: the store counts rows."""
