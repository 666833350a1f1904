"""What a buffer over one served store and one over several have in common.

Base class of `RemoteReplayBuffer` and `ShardedReplayBuffer`. It sends no requests: they do.
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Generator, Iterator
from typing import Any, Literal, Self, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from expstore.buffers.arguments import check_batch_size, check_sample
from expstore.core.arguments import check_numbers
from expstore.core.values import IntArray, key_name, to_key
from expstore.data.to_arrays import to_array
from expstore.errors import ArgumentError, RemoteError, SchemaError, StateError
from expstore.remote.forks import copy_in_child
from expstore.remote.local_only import LocalOnly
from expstore.schema.row_fields import SAMPLE_ENTRIES
from expstore.storages.columns.priorities import check_priorities
from expstore.storages.torchrl_options import check_device


class ServedBuffer(LocalOnly):
    """The parts of a replay buffer that do not depend on how many served stores it is over.

    Args:
        batch_size: Rows per batch of `sample` and iteration.
        device: Device of the returned batches.
        priority_key: The entry of a sample in which `update_priority` finds priorities.
        as_numpy: Whether to return nested dicts of NumPy arrays instead of TensorDicts.
    """

    #: The field in which `update_priority` finds the priorities of a sample.
    priority_key = "td_error"

    def __init__(
        self,
        *,
        batch_size: int | None,
        device: torch.device | str | None,
        priority_key: str,
        as_numpy: bool,
    ) -> None:
        self._batch_size = check_batch_size(batch_size)
        if device is not None:
            check_device(device, "batches")
        self._device = None if device is None else torch.device(device)
        self.priority_key, self._as_numpy = priority_key, as_numpy
        self._iterator: Generator[Any] | None = None
        self._next_lock = threading.Lock()
        copy_in_child(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy in another process, without the current iteration and its lock."""
        state = {name: value for name, value in self.__dict__.items() if name != "_next_lock"}
        return state | {"_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state that `__getstate__` returned."""
        self.__dict__.update(state)
        self._next_lock = threading.Lock()
        copy_in_child(self)

    # -- sampling --------------------------------------------------------------------------------

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: Literal[False] = False,
        include_info: bool | None = None,
        *,
        as_numpy: Literal[True],
    ) -> dict[str, Any]: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        *,
        return_info: Literal[True],
        include_info: bool | None = None,
        as_numpy: Literal[True],
    ) -> tuple[dict[str, Any], dict[str, Any]]: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: Literal[False] = False,
        include_info: bool | None = None,
        *,
        as_numpy: Literal[False] | None = None,
    ) -> TensorDict: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        *,
        return_info: Literal[True],
        include_info: bool | None = None,
        as_numpy: Literal[False] | None = None,
    ) -> tuple[TensorDict, dict[str, Any]]: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        as_numpy: bool | None = None,
    ) -> Any: ...

    def sample(
        self,
        batch_size: int | None = None,
        return_info: bool = False,
        include_info: bool | None = None,
        *,
        as_numpy: bool | None = None,
    ) -> Any:
        """Draw a batch.

        Args:
            batch_size: Number of rows; None for the buffer's. A buffer over shards draws batches of other
                sizes singly.
            return_info: Whether to return a pair: the batch, and a dict with each row's `index`, `id`, and
                `priority_weight`, if the sampler has weights. Over shards it also has `draw`, a `ShardDraw`
                that says from which masses the batch was drawn.
            include_info: False to leave the entries of rows out of the batch.
            as_numpy: Whether to return nested dicts of NumPy arrays instead of a TensorDict. None for the
                buffer's `as_numpy`.

        Returns:
            A TensorDict that owns its memory, batch size `[batch_size]`; some samplers return fewer rows.
            With `as_numpy` field name -> array. Shapes `(batch_size, *row shape)`.

        Raises:
            NotReadyError: There are no rows that can be drawn, the sampler has none left, or the time limit
                of a rate limiter passed (kind "rate_limited").
            RemoteError: A server did not answer; over shards with `down="partial"`, none did.
            StateError: The sampler cannot draw from several stores; the message says what to do.
        """
        return self._sample(self._require_size(batch_size), return_info, include_info, as_numpy)

    def _split_info(
        self, batch: TensorDict, return_info: bool, include_info: bool | None
    ) -> tuple[TensorDict, dict[str, Any]]:
        """Return a batch, without the entries about its rows if they are not wanted, and these entries."""
        info: dict[str, Any] = {}
        if return_info:
            info = {name: entry for name in SAMPLE_ENTRIES if (entry := batch.get(name)) is not None}
        return batch if include_info is not False else batch.exclude(*SAMPLE_ENTRIES), info

    @abstractmethod
    def _sample(self, size: int, return_info: bool, include_info: bool | None, as_numpy: bool | None) -> Any:
        """Draw a batch of a size."""

    @overload
    def stream(
        self, batches: int | None = None, *, batch_size: int | None = None, as_numpy: Literal[True]
    ) -> Generator[dict[str, Any]]: ...

    @overload
    def stream(
        self,
        batches: int | None = None,
        *,
        batch_size: int | None = None,
        as_numpy: Literal[False] | None = None,
    ) -> Generator[TensorDict]: ...

    @overload
    def stream(
        self, batches: int | None = None, *, batch_size: int | None = None, as_numpy: bool | None
    ) -> Generator[Any]: ...

    def stream(
        self, batches: int | None = None, *, batch_size: int | None = None, as_numpy: bool | None = None
    ) -> Generator[Any]:
        """Yield batches; a thread draws the next ones meanwhile, which is much faster than `sample`.

        With a seed, they are the batches that `sample` would have drawn.

        Args:
            batches: Number of batches; None for an endless stream.
            batch_size: Rows per batch; None for the buffer's.
            as_numpy: Whether to yield nested dicts of NumPy arrays; None for the buffer's `as_numpy`.

        Raises:
            NotReadyError: There are no rows that can be drawn.
            RemoteError: A server did not answer.
        """
        size = self._require_size(batch_size)
        if batches is not None and batches < 1:
            raise ArgumentError(f"batches must be at least 1, got {batches!r}")
        return self._stream(size, batches, as_numpy)

    @abstractmethod
    def _stream(self, size: int, batches: int | None, as_numpy: bool | None) -> Generator[Any]:
        """Yield batches of a size."""

    def __iter__(self) -> Iterator[TensorDict]:
        """Yield batches without end, as `stream` does.

        Raises:
            StateError: The buffer has no batch size.
        """
        return self.stream()

    def next(self) -> Any:
        """Return the next batch of one iteration that is shared by all calls; None at its end.

        Threads take turns: a call waits until the one before it has returned.
        """
        with self._next_lock:
            iterator = self._iterator = self._iterator or self.stream()
            batch = next(iterator, None)
            if batch is None:
                self._iterator = None
            return batch

    # -- priorities ------------------------------------------------------------------------------

    def update_priority(self, index: Any = None, priority: Any = None, *, id: Any = None) -> int:
        """Set the priorities of rows by id, or of the rows of a sample. Rows that were removed are skipped.

        Each store sets the priorities of its rows at once; several stores do so independently. Rows of
        stores that are no longer shards are skipped, too.

        Args:
            index: A sample with `priority_key` added. Indices are refused, because an index may belong to
                another row by now.
            priority: Finite and not negative; one for all rows, or one per row. Shape `()`, `(n,)` or `(n,
                1)`.
            id: Ids of the rows. Shape `(n,)`; of several shards, pairs of shard and id, shape `(n, 2)`.

        Returns:
            The number of rows whose priority was set.

        Raises:
            PriorityError: A priority is negative, NaN or infinite; none was set.
            SchemaError: There are other numbers of priorities and ids, or ids have another shape.
        """
        if isinstance(index, TensorDictBase) and priority is None and id is None:
            return self.update_tensordict_priority(index)
        if index is not None:
            raise RemoteError(
                "served stores do not set priorities by index, which may belong to another row by now",
                kind="local_only", hint="pass id=, or the sample itself",
            )  # fmt: skip
        if id is None or priority is None:
            raise ArgumentError("update_priority takes a priority and an id, or a sample")
        check_numbers("id", to_array(id))
        check_numbers("priority", to_array(priority))
        ids = self._to_ids(id)
        values = to_array(priority).astype(np.float64, copy=False).reshape(-1)
        if values.size not in (1, len(ids)):
            raise SchemaError(
                f"got {values.size} priorities for {len(ids)} rows", hint="pass one per row, or one for all"
            )
        return self._set_priorities(ids, np.broadcast_to(check_priorities(values), (len(ids),)))

    @abstractmethod
    def _to_ids(self, given: Any) -> IntArray:
        """Return what identifies rows as an array, one entry or row per row."""

    @abstractmethod
    def _set_priorities(self, ids: IntArray, values: NDArray[np.float64]) -> int:
        """Set the priorities of rows; return how many rows are still there."""

    def update_tensordict_priority(self, data: TensorDictBase) -> int:
        """Set the priorities of a sample's rows from its `priority_key`; return how many were set.

        Args:
            data: A sample with `priority_key` added. Shape of that entry `(n,)` or `(n, 1)`.
        """
        check_sample(data)
        key, ids = to_key(self.priority_key), data.get("id")
        priority = data.get(key)
        if priority is None:
            raise SchemaError(f"the sample has no entry {key_name(key)!r} with priorities")
        if ids is None:
            raise SchemaError("the sample has no entry 'id' with the ids of its rows")
        return self.update_priority(id=ids, priority=priority)

    # -- the buffer ------------------------------------------------------------------------------

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return statistics, as JSON values."""

    @property
    def write_count(self) -> int:
        """Number of rows that were ever written."""
        return int(self.stats()["write_count"])

    @property
    def initialized(self) -> bool:
        """Always True: served stores exist."""
        return True

    @property
    def shared(self) -> bool:
        """Always True: copies in other processes write over connections of their own."""
        return True

    def share(self, shared: bool = True) -> Self:
        """Return the buffer: its copies in other processes can write as they are.

        Args:
            shared: Must be True.

        Raises:
            RemoteError: It is False.
        """
        if not shared:
            raise RemoteError(
                "a connection cannot forbid other processes to write", kind="local_only",
                hint="give them no token that may write",
            )  # fmt: skip
        return self

    @property
    def batch_size(self) -> int | None:
        """Rows per batch, unless `sample` gets a `batch_size`."""
        return self._batch_size

    def close(self) -> None:
        """Close the connections of this process; the servers keep the stores open.

        Threads that wait for a batch are woken, and raise StateError.
        """
        iterator, self._iterator = self._iterator, None
        self._close()
        if iterator is not None:
            with contextlib.suppress(ValueError):  # it runs in a thread that `_close` has woken
                iterator.close()

    @abstractmethod
    def _close(self) -> None:
        """Close the connections."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_size(self, batch_size: int | None) -> int:
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise StateError("batch_size not specified", hint="give it to sample(), or to connect()")
        return check_batch_size(size)
