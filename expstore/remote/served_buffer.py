"""What a buffer over one served store and one over several have in common.

Base class of `RemoteReplayBuffer` and `ShardedReplayBuffer`. It sends no requests: they do.
"""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, Generic, Literal, Self, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

from expstore.buffers.arguments import check_batch_size, check_sample
from expstore.buffers.member import Member
from expstore.core.arguments import check_numbers
from expstore.core.values import IntArray, key_name, to_key
from expstore.data.to_arrays import to_array
from expstore.errors import ArgumentError, RemoteError, SchemaError, StateError
from expstore.remote.connect_options import ConnectOptions
from expstore.remote.forks import copy_in_child
from expstore.remote.local_only import LocalOnly
from expstore.schema.row_fields import SAMPLE_ENTRIES
from expstore.storages.columns.priorities import check_priorities
from expstore.storages.torchrl_options import check_device

#: What identifies a row or an episode: an id, or a pair of the store's number and an id.
_Id = TypeVar("_Id")
_Result = TypeVar("_Result")


class ServedBuffer(LocalOnly, Generic[_Id]):
    """The parts of a replay buffer that do not depend on how many served stores it is over.

    Args:
        options: What is drawn, and how it is returned.
    """

    #: The field in which `update_priority` finds the priorities of a sample.
    priority_key = "td_error"

    def __init__(self, options: ConnectOptions) -> None:
        self._batch_size = check_batch_size(options.batch_size)
        if options.device is not None:
            check_device(options.device, "batches")
        self._device = None if options.device is None else torch.device(options.device)
        self.priority_key, self._as_numpy = options.priority_key, options.as_numpy
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

    # -- writing ---------------------------------------------------------------------------------

    def extend(
        self,
        data: Any,
        *,
        source: str | None = None,
        return_ids: bool = True,
        episode_info: Mapping[str, Any] | None = None,
        split: str | None = None,
        update_priority: bool | None = None,
        validate: Literal["schema", "domain"] = "schema",
    ) -> torch.Tensor:
        """Append a batch of rows, all of them or none, and only once even if the request is repeated.

        Args:
            data: The rows: a TensorDict, a nested dict of arrays or an Arrow table; or a list of TensorDicts
                or dicts, one per row.
            source: Name of the stream of experience; see `ReplayBuffer.extend`. Of several stores it selects
                the one that gets the rows.
            return_ids: Must be True: only ids can be returned, not indices.
            episode_info: Facts to record for every episode that has a row in the batch.
            split: The split of the episodes; see `ReplayBuffer.extend`.
            update_priority: Whether to use priorities in the data; None means True.
            validate: "domain": the server also checks the values against the specs of the store.

        Returns:
            Id of each row; -1 for rows that were not stored. Shape `(n,)`, int64. Over several stores pairs
            of the store's number and the id there, shape `(n, 2)`.

        Raises:
            SchemaError: The batch does not fit the store, or its specs.
            NotReadyError: The time limit of a rate limiter passed (kind "rate_limited").
            StateError: The store cannot be written, or is no longer one of several (kind "removed").
            RemoteError: The server did not answer. It is unknown then whether the rows were stored; calling
                `extend` again would append them again.
        """
        if not return_ids:
            raise RemoteError(
                "a served store does not return indices", kind="local_only", hint="use ids: return_ids=True"
            )
        options = {
            "episode_info": episode_info, "split": split, "update_priority": update_priority,
            "validate": validate,
        }  # fmt: skip
        return self._extend(data, source, options)

    @abstractmethod
    def _extend(self, data: Any, source: str | None, options: dict[str, Any]) -> torch.Tensor:
        """Append rows; `options` are the other keywords of `extend`."""

    def add(
        self,
        data: Any,
        *,
        source: str | None = None,
        episode_info: Mapping[str, Any] | None = None,
        split: str | None = None,
        validate: Literal["schema", "domain"] = "schema",
    ) -> _Id:
        """Append one row; return its id, which is -1 if it was not stored.

        Args:
            data: One row: a TensorDict without batch dims, or a nested dict of values.
            source: Name of the stream of experience, as in `extend`.
            episode_info: Facts to record for the row's episode.
            split: As in `extend`.
            validate: "domain": the server also checks the values against the specs of the store.

        Returns:
            The id; over several stores a pair, the store's number and the id there.

        Raises:
            SchemaError: The data has batch dims, or does not fit the store or its specs.
            StateError: The store cannot be written.
            RemoteError: The server did not answer. It is unknown then whether the row was stored.
        """
        return self._add(data, source, {"episode_info": episode_info, "split": split, "validate": validate})

    @abstractmethod
    def _add(self, data: Any, source: str | None, options: dict[str, Any]) -> _Id:
        """Append one row; `options` are the other keywords of `add`."""

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

    # -- reading ---------------------------------------------------------------------------------

    def by_id(self, ids: Any) -> TensorDict:
        """Return rows by id, in the order of `ids`.

        Args:
            ids: Ids of the rows. Shape `(n,)`; of several stores pairs of number and id, shape `(n, 2)`.

        Raises:
            NotFoundError: One of the rows was overwritten or deleted, or never existed.
        """
        return self._read_rows(self._to_ids(ids))

    @abstractmethod
    def _read_rows(self, ids: IntArray) -> TensorDict:
        """Return rows by id, in the order of `ids`."""

    def trajectory(self, episode: _Id) -> TensorDict:
        """Return the rows of an episode that can still be read, in the order of its steps.

        Args:
            episode: Id of the episode, as in `rb.episodes()`; over several stores the store's number and the
                id there.

        Returns:
            The rows with their fields as stored. Batch size `[n]`.

        Raises:
            NotFoundError: There is no such episode, or all of its rows were overwritten or deleted.
        """
        return self._read_episode(episode)

    @abstractmethod
    def _read_episode(self, episode: _Id) -> TensorDict:
        """Return the rows of an episode."""

    # -- named samplers --------------------------------------------------------------------------

    def name_sampler(
        self,
        name: str,
        sampler: Mapping[str, Any],
        *,
        where: str | None = None,
        seed: int | None = None,
    ) -> None:
        """Make every store keep a sampler that is shared by all who connect with `sampler=name`.

        Args:
            name: Its name: letters, digits, ".", "_" and "-".
            sampler: Its description, as for `connect`. `kind` can also be "consuming",
                "without_replacement", "slices_without_replacement" or "streaming_slices": kinds that remember
                which rows were drawn.
            where: SQL condition of the rows to draw.
            seed: Seed of its draws; None for the store's.

        Raises:
            StateError: A different sampler of this name is kept. Repeating a call changes nothing.
        """
        self._ask_each(lambda member: member.name_sampler(name, sampler, where, seed))

    def forget_sampler(self, name: str) -> None:
        """Make every store forget a named sampler.

        Raises:
            NotFoundError: No sampler of this name is kept.
        """
        self._ask_each(lambda member: member.forget_sampler(name))

    def samplers(self) -> dict[str, dict[str, Any]]:
        """Return the descriptions of the samplers that all stores keep, by name."""
        found = self._ask_each(lambda member: member.samplers())
        descriptions = {}
        for name in set(found[0]).intersection(*found):
            each = [one[name] for one in found]
            whole = {key: value for one in each for key, value in one.items()}
            if all(whole == whole | one for one in each):  # servers add the parameters that have defaults
                descriptions[name] = whole
        return descriptions

    @abstractmethod
    def _ask_each(self, act: Callable[[Member], _Result]) -> list[_Result]:
        """Return the results of a function of every store, in their order."""

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
