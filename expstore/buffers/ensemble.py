"""Several buffers that are sampled as one, and written to by a routing key.

Members are ordinary buffers and can be used directly. An ensemble stores no rows and has no files.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any, Literal, Self, overload

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from expstore.buffers import torchrl_service
from expstore.buffers.arguments import check_batch_size
from expstore.buffers.batch_builder import repeat_along_dims
from expstore.buffers.ensemble_batches import columns_of, cut, describe_rows, join, pairs
from expstore.buffers.ensemble_routing import Route
from expstore.buffers.ingest import make_key
from expstore.buffers.open_streams import Tails
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.updates import ConditionalUpdateResult, Patch, check_can_update, leaves_of
from expstore.core.draws import Draws
from expstore.core.fork_hooks import call_each
from expstore.core.members import find_members
from expstore.core.torchrl_keywords import ENSEMBLE, check_keywords
from expstore.core.torchrl_members import find_member
from expstore.core.values import IntArray, key_name
from expstore.data.containers import stack
from expstore.data.to_arrays import to_array, to_arrays
from expstore.disk.local_path import local_path
from expstore.errors import ArgumentError, SchemaError, StateError
from expstore.samplers.ensemble import SamplerEnsemble
from expstore.storages.ensemble import StorageEnsemble
from expstore.transforms import Compose
from expstore.writers.writers import WriterEnsemble

#: Second word of the random key that chooses members; no stream of a storage uses it.
_CHOICE = 1 << 62


class ReplayBufferEnsemble:
    """Sample several buffers as one.

    A batch has two batch dims: parts, and the rows of each part, all from one member. `("index",
    "buffer_ids")` names the member and `("index", "index")` the row. Values that the members' samplers return
    about rows have their own keys.

    The members' seeds, and how many batches they have returned, determine which members a batch is drawn
    from: after a restart the next batch is the one that would have followed. With a generator, the generator
    determines the members and the members' draws.

    Threads: any number may sample, one after another; members may be used meanwhile. Processes: a copy has
    copies of the members, which follow their stores. Crashes: as the members; `dumps` creates a version of
    each member, one after another.

    Args:
        rbs: The members. Without them give `storages`, `samplers` and `writers`.
        storages: Storages of the members, with their transforms.
        samplers: Samplers of the members.
        writers: Writers of the members.
        transform: Transforms of batches, applied after the members' own.
        batch_size: Rows per batch, over all parts.
        collate_fn: Function that makes a batch from a list of parts; None: parts are stacked.
        collate_fns: One function per member, which makes a part from the member's batch.
        p: How often each member is drawn from; see `SamplerEnsemble`.
        sample_from_all: Whether to draw from all members; see `SamplerEnsemble`.
        num_buffer_sampled: Number of parts of a batch; see `SamplerEnsemble`.
        routing_key: The field that holds, for each written row, the number of its member.
        routing_dim: Alternative to `routing_key`: the batch dim whose positions are the members.
        generator: Random generator of all draws; None: draws follow from the members' seeds.
        as_numpy: Whether `sample` and iteration return NumPy arrays by default, whatever the members'
            setting.
        torchrl: Keywords of TorchRL's class that have no effect here: accepted with their default values,
            otherwise refused with the reason.

    Raises:
        RuntimeError: Both members and `storages`, `samplers` or `writers` are given.
        ArgumentError: Neither is given, or there is no such keyword; both a routing key and a dim are given;
            the transform reads other steps of a store's episodes; or a setting of `SamplerEnsemble` is wrong.

    Example:
        >>> from expstore import LazyTensorStorage, ReplayBuffer, ReplayBufferEnsemble
        >>> demonstrations = ReplayBuffer(storage=LazyTensorStorage(1000))
        >>> online = ReplayBuffer(storage=LazyTensorStorage(1000))
        >>> for part in (demonstrations, online):
        ...     index = part.extend(batch)
        >>> ensemble = ReplayBufferEnsemble(demonstrations, online, p=[1, 3], batch_size=32)
        >>> ensemble.sample().shape
        torch.Size([2, 16])
    """

    if not TYPE_CHECKING:  # mypy would accept any attribute
        __getattr__ = find_member

    def __init__(
        self,
        *rbs: ReplayBuffer,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: Any = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        collate_fns: Sequence[Callable[[Any], Any]] | None = None,
        p: Sequence[float] | torch.Tensor | Literal["sampleable"] | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        routing_key: str | tuple[str, ...] | None = None,
        routing_dim: int | None = None,
        generator: torch.Generator | None = None,
        as_numpy: bool = False,
        **torchrl: Any,
    ) -> None:
        check_keywords(self, torchrl, ENSEMBLE)
        batch_size = check_batch_size(batch_size)
        self.shared = False
        self._route = Route.of(routing_key, routing_dim)
        if rbs:
            if storages is not None or samplers is not None or writers is not None:
                raise RuntimeError("give buffers, or storages=, samplers= and writers=, not both")
            samplers = SamplerEnsemble(
                *[rb.sampler for rb in _check_buffers(rbs)],
                p=p,
                sample_from_all=sample_from_all,
                num_buffer_sampled=num_buffer_sampled,
            )
            self._collate_fns = None if collate_fns is None else list(collate_fns)
        else:
            if storages is None or samplers is None or writers is None:
                raise ArgumentError("give buffers, or all of storages=, samplers= and writers=")
            rbs = _assemble(storages, samplers, writers, collate_fns)
            self._collate_fns = None
        self._rbs = tuple(rbs)
        self._samplers = samplers
        self._transform = _joint(Compose.of(transform))
        self._collate_fn = stack if collate_fn is None else collate_fn
        self._batch_size = batch_size
        self._generator = generator
        self._as_numpy = as_numpy
        self._renew_lock()
        if generator is not None:
            self.set_rng(generator)

    def _renew_lock(self) -> None:
        """Make a lock of this process; in a forked child, a thread of the parent may hold the last one."""
        self._lock = threading.RLock()
        _ensembles.add(self)

    # -- sampling --------------------------------------------------------------------------------

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: Literal[False] = False, *, as_numpy: Literal[True]
    ) -> dict[str, Any]: ...

    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True], as_numpy: Literal[True]
    ) -> tuple[dict[str, Any], dict[str, Any]]: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        return_info: Literal[False] = False,
        *,
        as_numpy: Literal[False] | None = None,
    ) -> TensorDict: ...

    @overload
    def sample(
        self,
        batch_size: int | None = None,
        *,
        return_info: Literal[True],
        as_numpy: Literal[False] | None = None,
    ) -> tuple[TensorDict, TensorDict]: ...

    @overload
    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, as_numpy: bool | None = None
    ) -> Any: ...

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, as_numpy: bool | None = None
    ) -> Any:
        """Draw a batch.

        Args:
            batch_size: Rows per batch, over all parts; None: the ensemble's.
            return_info: Whether to return a pair: the batch, and a TensorDict with `index` and the samplers'
                values about its rows.
            as_numpy: Whether to return nested dicts of NumPy arrays instead of TensorDicts. None: the
                ensemble's setting.

        Returns:
            A TensorDict, batch size `[num_buffer_sampled, batch_size // num_buffer_sampled]`, or the result
            of `collate_fn`.

        Raises:
            NotReadyError: A drawn member is empty, or no member can be sampled.
            StateError: A transform has changed the shape, so that `info` cannot be matched with rows.
            ArgumentError: The batch size is not a multiple of the number of parts.
        """
        size = self._samplers.part_size(self._require_size(batch_size))
        with self._lock:
            numbers = self._choice()
            chosen = self._samplers.choose(lambda: self._counts(size), numbers)
            parts, infos = self._parts(chosen, size)
        batch = self._transform.forward(self._collate_fn(parts), numbers)
        info = stack(infos)
        if isinstance(batch, TensorDictBase):
            if batch.shape[:2] != info.shape:
                raise StateError(
                    "Failed to set the metadata (e.g., indices or weights) in the sampled tensordict: a "
                    f"transform has changed its shape from {list(info.shape)} to {list(batch.shape)}",
                    hint="transform the members instead, or use a collate_fn whose parts have one shape",
                )
            with batch.unlock_():
                batch.update(repeat_along_dims(info.exclude("id"), batch))
        found = (batch, info) if return_info else batch
        return to_arrays(found) if (self._as_numpy if as_numpy is None else as_numpy) else found

    def _choice(self) -> np.random.Generator:
        """Return the random numbers that choose members."""
        given = self._generator
        if given is not None:
            words = torch.randint(1 << 62, (2,), generator=given, device=given.device).tolist()
            return Draws(0, _CHOICE).numbers((words[0], words[1]))
        seeds = [rb.storage.seed % (1 << 64) for rb in self._rbs]
        key = int(np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0])
        return Draws(key, _CHOICE).generator(sum(rb.storage.draws.number for rb in self._rbs))

    def _counts(self, size: int) -> list[int]:
        return [rb.sampler.sampleable(rb.storage, size) for rb in self._rbs]

    def _parts(self, chosen: IntArray, size: int) -> tuple[list[Any], list[TensorDict]]:
        """Draw the parts of a batch, with one draw per member."""
        parts: list[Any] = [None] * chosen.size
        infos: list[Any] = [None] * chosen.size
        for member in np.unique(chosen).tolist():
            places = np.flatnonzero(chosen == member).tolist()
            batch, told = self._draw_rows(member, size * len(places))
            for number, place in enumerate(places):
                rows = slice(number * size, (number + 1) * size)
                part = batch if len(places) == 1 else cut(batch, rows)
                parts[place] = part if self._collate_fns is None else self._collate_fns[member](part)
                infos[place] = describe_rows(told, rows, member, size)
        return parts, infos

    def _draw_rows(self, member: int, size: int) -> tuple[Any, dict[Any, torch.Tensor]]:
        """Draw rows of a member, in several draws if its sampler returns fewer rows at once."""
        batches, infos, missing = [], [], size
        while missing:
            batch, info = self._rbs[member].sample(missing, return_info=True, as_numpy=False)
            rows = info["index"].shape[0]
            if not 0 < rows <= missing:
                raise StateError(f"the sampler of member {member} returned {rows} rows of {missing}")
            batches.append(batch)
            infos.append(info)
            missing -= rows
        if len(batches) == 1:
            return batches[0], columns_of(infos[0], size)
        keys = set.intersection(*[set(columns_of(info, info["index"].shape[0])) for info in infos])
        return join(batches), {key: torch.cat([info[key] for info in infos]) for key in keys}

    def can_sample(self, batch_size: int | None = None) -> bool:
        """Return whether `sample` would find rows to draw.

        Raises:
            StateError: Neither the call nor the ensemble has a batch size.
        """
        size = self._require_size(batch_size)
        if size % self._samplers.num_buffer_sampled:
            return False
        part = size // self._samplers.num_buffer_sampled
        return self._samplers.can_choose([rb.can_sample(part) for rb in self._rbs])

    def __iter__(self) -> Iterator[TensorDict]:
        """Yield batches without end.

        Raises:
            StateError: The ensemble has no batch size.
        """
        if self._batch_size is None:
            raise StateError(
                "Cannot iterate over the replay buffer. Batch_size was not specified in the constructor."
            )
        while True:
            yield self.sample()

    def next(self) -> Any:
        """Return the next batch."""
        return self.sample()

    def _require_size(self, batch_size: int | None) -> int:
        size = self._batch_size if batch_size is None else batch_size
        if size is None:
            raise StateError("batch_size not specified", hint="give it to sample(), or to the ensemble")
        return check_batch_size(size)

    # -- writing ---------------------------------------------------------------------------------

    def extend(
        self,
        data: TensorDictBase,
        *,
        update_priority: bool | None = None,
        idempotency_key: str | bytes | None = None,
        digest: bytes | None = None,
    ) -> TensorDict:
        """Write each row to the member that the routing key or dim names.

        Each member gets all its rows or none.

        Args:
            data: Rows, in any number of batch dims.
            update_priority: As in the members' `extend`.
            idempotency_key: As in the members' `extend`. Each member stores the key with its rows, so a call
                that failed half-way can be repeated.
            digest: As in the members' `extend`.

        Returns:
            `buffer_ids` and `index` of each row, in the order of `data.reshape(-1)`; -1 for a row that its
            member dropped; also `index_generation` if all writers track generations. Batch size `[n]`.

        Raises:
            SchemaError: Rows do not fit a member; rows of earlier members are written.
            StateError: The ensemble has neither a routing key nor a dim.
            ArgumentError: Member numbers are not integers, or `data` is not a TensorDict; there is no such
                member; nothing is written.
        """
        data = self._transform.inverse(data)
        if data is None:
            data = TensorDict({}, [0])
            return self._metadata(data, np.zeros(0, np.int64), None, {})
        rows, members = self._route.of_rows(data, len(self._rbs))
        key: dict[str, Any] = {"idempotency_key": idempotency_key, "digest": digest}
        for member in np.unique(members).tolist():
            make_key(self._rbs[member].writer, idempotency_key, digest)  # before any of them writes
        return self._metadata(rows, members, update_priority, key)

    def _metadata(
        self, rows: TensorDictBase, members: IntArray, priorities: bool | None, key: dict[str, Any]
    ) -> TensorDict:
        tracked = bool(members.size) and all(rb.writer.tracks_generations for rb in self._rbs)
        index, generation = np.full((2, members.size), -1)
        for member, rb in enumerate(self._rbs):
            places = np.flatnonzero(members == member)
            if places.size:
                part = rows[torch.from_numpy(places)]
                ids = rb.extend(part, return_ids=True, update_priority=priorities, **key).numpy()
                taken = ids > 0
                index[places[taken]] = rb.storage.geometry.index_of(ids[taken])
                if tracked:
                    generation[places[taken]] = rb.storage.geometry.generations_of(ids[taken])
        found = {"buffer_ids": torch.from_numpy(members), "index": torch.from_numpy(index)}
        if tracked:
            found["index_generation"] = torch.from_numpy(generation)
        return TensorDict(found, [members.size])

    def add(self, data: TensorDictBase) -> TensorDict:
        """Write one row to the member that the routing key names; return the row's result of `extend`.

        Args:
            data: One row. Batch size `[]` or `[1]`.

        Raises:
            StateError: The ensemble has no routing key.
            ArgumentError: `data` has more than one row.
        """
        if self._route.dim is not None:
            raise StateError("Use extend() for routing_dim writes.")
        if data.ndim:
            raise ArgumentError("add() expects a scalar TensorDict record.")
        found: TensorDict = self.extend(data.unsqueeze(0))[0]
        return found

    def update_priority(self, index: TensorDictBase, priority: Any) -> int:
        """Set the priorities of rows that still exist; return how many were set.

        Args:
            index: The rows: `buffer_ids` and `index`, as in the entry `"index"` of samples.
            priority: One value for all rows, or one each, in the shape of `buffer_ids`.
        """
        members, rows = pairs(index, len(self._rbs))
        values = np.broadcast_to(to_array(priority).reshape(-1), members.shape)
        count = 0
        for member in np.unique(members).tolist():
            mine = members == member
            count += self._rbs[member].update_priority(rows[mine], np.array(values[mine], np.float32))
        return count

    def update_if_present(
        self,
        *,
        index: TensorDictBase,
        generation: torch.Tensor,
        patch: Patch,
        version_key: str | tuple[str, ...] | None = None,
        version: Any = None,
        require_newer: bool = False,
    ) -> ConditionalUpdateResult:
        """Change fields of those of the given rows that still exist, and of no other row.

        Args:
            index: The rows: `buffer_ids` and `index`, as in the entry `"index"` of samples and as `extend`
                returns them.
            generation: Their `index_generation`. Shape as `buffer_ids`.
            patch: New values by key. Shapes: that of `buffer_ids`, then that of the field.
            version_key: As in the members' `update_if_present`.
            version: As in the members' `update_if_present`.
            require_newer: As in the members' `update_if_present`.

        Returns:
            The result for each row, in the shape of `buffer_ids`.

        Raises:
            NotFoundError: There is no such field.
            SchemaError: Values do not fit; patches of earlier members are applied.
            StateError: A member's writer does not track generations; nothing was changed.
            ArgumentError: Member numbers are not integers; there is no such member; nothing was changed.
        """
        members, rows = pairs(index, len(self._rbs))
        shape = index.get("buffer_ids").shape
        generations = torch.as_tensor(generation).reshape(-1).cpu().numpy()
        if generations.size != members.size:
            raise SchemaError(
                "generation and routed index metadata must address the same number of records, got "
                f"{generations.size} and {members.size}"
            )
        fields = {key: _flat(key_name(key), value, shape) for key, value in leaves_of(patch).items()}
        several = torch.as_tensor(version).numel() > 1 if version is not None else False
        versions = torch.as_tensor(version).reshape(-1) if several else version
        for rb in self._rbs:
            check_can_update(rb.storage, rb.writer, by_index=True)
        updated = torch.zeros(members.size, dtype=torch.bool)
        rejected = None if version_key is None else torch.zeros_like(updated)
        for member in np.unique(members).tolist():
            mine = torch.from_numpy(np.flatnonzero(members == member))
            found = self._rbs[member].update_if_present(
                index=rows[mine.numpy()],
                generation=generations[mine.numpy()],
                patch={key: values[mine] for key, values in fields.items()},
                version_key=version_key,
                version=versions[mine] if several else version,
                require_newer=require_newer,
            )
            updated[mine] = found.updated
            if rejected is not None and found.version_rejected is not None:
                rejected[mine] = found.version_rejected
        return ConditionalUpdateResult(
            updated.reshape(shape), None if rejected is None else rejected.reshape(shape)
        )

    def submit_update_if_present(self, **patch: Any) -> Future[ConditionalUpdateResult]:
        """Call `update_if_present`; return its result or error as a completed future.

        Args:
            patch: As in `update_if_present`.
        """
        done: Future[ConditionalUpdateResult] = Future()
        try:
            done.set_result(self.update_if_present(**patch))
        except Exception as exc:
            done.set_exception(exc)
        return done

    def end_streams(
        self,
        *,
        end_key: str | tuple[str, ...] = ("next", "done"),
        terminated_key: str | tuple[str, ...] | None = ("next", "terminated"),
        truncated_key: str | tuple[str, ...] | None = ("next", "truncated"),
    ) -> None:
        """End the open episodes of members' unnamed streams, before collectors start again.

        The newest row of every open episode becomes done, and truncated unless it is terminated. Later rows
        belong to new episodes, whatever their trajectory ids. Named streams (`source=`) stay open. No other
        thread may write meanwhile.

        Args:
            end_key: The field that ends an episode.
            terminated_key: The field that marks a terminated episode; never changed.
            truncated_key: The field that marks a truncated episode; None: rows have no such field.

        Raises:
            SchemaError: There is no such field; nothing was changed.
            StateError: A member's sampler uses trajectory ids that later rows may reuse; nothing was changed.
            ArgumentError: The field is not boolean; nothing was changed; two keys are the same.
        """
        tails = Tails(end_key, terminated_key, truncated_key)
        for rb in self._rbs:
            tails.check(rb.storage, rb.sampler)
        for rb in self._rbs:
            if len(rb.storage):
                tails.close(rb.storage)

    def empty(self) -> None:
        """Delete the rows of all members."""
        for rb in self._rbs:
            rb.empty()

    # -- members ---------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Return a member, an ensemble of some members, or rows.

        `rb[2]` is a member; `rb[:2]` and `rb[[0, 2]]` are ensembles; `rb[2, rows]` are rows of a member as
        the member returns them; `rb[:, rows]` are the same rows of all members as they are stored, collated.

        Raises:
            IndexError: There is no such member.
        """
        if isinstance(index, tuple) and len(index) > 1:
            chosen, rows = self[index[0]], index[1:] if len(index) > 2 else index[1]
            if not isinstance(chosen, ReplayBufferEnsemble):
                return chosen[rows]
            parts = [rb.storage[rows] for rb in chosen._rbs]
            own = chosen._collate_fns
            return chosen._collate_fn(
                parts if own is None else [collate(part) for collate, part in zip(own, parts, strict=True)]
            )
        if isinstance(index, tuple):
            index = index[0]
        if index is Ellipsis or (isinstance(index, slice) and index == slice(None)):
            return self
        found = find_members(index, len(self), type(self).__name__)
        return self._rbs[found] if isinstance(found, int) else self._select_members(found)

    def _select_members(self, numbers: list[int]) -> ReplayBufferEnsemble:
        samplers, fns = self._samplers[numbers], self._collate_fns
        some = ReplayBufferEnsemble(
            *[self._rbs[number] for number in numbers],
            transform=self._transform,
            batch_size=self._batch_size,
            collate_fn=self._collate_fn,
            collate_fns=None if fns is None else [fns[number] for number in numbers],
            as_numpy=self._as_numpy,
        )
        some._samplers, some._generator = samplers, self._generator
        return some

    def __len__(self) -> int:
        """Return the number of members."""
        return len(self._rbs)

    @property
    def storage(self) -> StorageEnsemble:
        """The members' storages."""
        return StorageEnsemble(
            *[rb.storage for rb in self._rbs], transforms=[rb.transform for rb in self._rbs]
        )

    @property
    def sampler(self) -> SamplerEnsemble:
        """The members' samplers, and how members are chosen."""
        return self._samplers

    @property
    def writer(self) -> WriterEnsemble:
        """The members' writers."""
        return WriterEnsemble(*[rb.writer for rb in self._rbs])

    @property
    def transform(self) -> Compose:
        """Transforms of batches, applied after the members' own."""
        return self._transform

    @property
    def batch_size(self) -> int | None:
        """Rows per batch, unless `sample` gets another number."""
        return self._batch_size

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform after the ensemble's others; return the ensemble.

        Args:
            transform: A callable that changes batches, or a torchrl Transform.
            invert: Whether to change written rows instead.
        """
        self._transform.append(_joint(Compose(transform)), invert=invert)
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Insert a transform at a position in the ensemble's chain; return the ensemble.

        Args:
            index: Its position in the chain.
            transform: As in `append_transform`.
            invert: Whether to change written rows instead.
        """
        self._transform.insert(index, _joint(Compose(transform)), invert=invert)
        return self

    # -- life ------------------------------------------------------------------------------------

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw by another generator, also in the members, from the next batch on; None: by their seeds."""
        self._generator = generator
        for rb in self._rbs:
            rb.set_rng(generator)

    def stats(self) -> dict[str, Any]:
        """Return statistics of all members together, as values that JSON can store."""
        each = [rb.stats() for rb in self._rbs]
        capacities = [rb.storage.capacity for rb in self._rbs]
        size = sum(one["size"] for one in each)
        facts: dict[str, Any] = {
            "size": size,
            "write_count": sum(rb.write_count for rb in self._rbs),
            "prefetch_queue_size": sum(one["prefetch_queue_size"] for one in each),
            "initialized": True,
        }
        if None not in capacities:
            room = sum(capacity or 0 for capacity in capacities)
            facts |= {"capacity": room, "utilization": size / room}
        return facts | {"num_buffers": len(self._rbs)}

    def state_dict(self) -> dict[str, Any]:
        """Return the members' `state_dict`s by their numbers, and the state of the transforms."""
        members = {str(number): rb.state_dict() for number, rb in enumerate(self._rbs)}
        return members | {"_transforms": self._transform.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of `state_dict` in the members.

        Raises:
            StateError: The state has another number of members (nothing was changed), or does not fit a
                member.
        """
        if len(state_dict) != len(self._rbs) + 1 or "_transforms" not in state_dict:
            raise StateError(f"this is not a state of an ensemble of {len(self._rbs)} buffers")
        for number, rb in enumerate(self._rbs):
            rb.load_state_dict(state_dict[str(number)])
        self._transform.load_state_dict(state_dict["_transforms"])

    def dumps(self, path: str | Path) -> None:
        """Create a version of each member, in a folder below `path` that is named by the member's number."""
        path = local_path(path)
        for number, rb in enumerate(self._rbs):
            rb.dumps(path / str(number))

    def loads(self, path: str | Path) -> None:
        """Replace the content of each member by its newest version below `path`."""
        path = local_path(path)
        for number, rb in enumerate(self._rbs):
            rb.loads(path / str(number))

    dump, save, load = dumps, dumps, loads

    def flush(self) -> None:
        """Sync all members: written rows survive a power failure when this returns."""
        for rb in self._rbs:
            rb.flush()

    def close(self) -> None:
        """Close all members."""
        for rb in self._rbs:
            rb.close()

    @property
    def is_alive(self) -> bool:
        """Whether no member has been closed."""
        return all(rb.is_alive for rb in self._rbs)

    service_backend = property(torchrl_service.service_backend)
    start = torchrl_service.start
    client = torchrl_service.client
    share = torchrl_service.share
    synchronize = torchrl_service.synchronize
    shutdown = torchrl_service.shutdown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_generator")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the result of `__getstate__`; draws follow from the members' seeds."""
        self.__dict__.update(state, _generator=None)
        self._renew_lock()

    def __repr__(self) -> str:
        parts = ",\n".join(map(str, [*self._rbs, self._samplers]))
        return f"ReplayBufferEnsemble(\n{indent(parts, '    ')},\n    batch_size={self._batch_size})"


_ensembles: weakref.WeakSet[ReplayBufferEnsemble] = weakref.WeakSet()


def _leave_parent() -> None:
    call_each(_ensembles, ReplayBufferEnsemble._renew_lock)


os.register_at_fork(after_in_child=_leave_parent)


def _joint(transform: Compose) -> Compose:
    """Return the chain of an ensemble's transforms.

    Raises:
        ArgumentError: A transform reads other steps of an episode.
    """
    if transform.steps:
        raise ArgumentError(
            f"{type(transform.steps[0]).__name__} reads other steps of one store's episodes: give it to "
            "the members, not to their ensemble"
        )
    return transform


def _check_buffers(rbs: Sequence[Any]) -> Sequence[ReplayBuffer]:
    for rb in rbs:
        if not isinstance(rb, ReplayBuffer):
            name, package = type(rb).__name__, type(rb).__module__.partition(".")[0]
            raise ArgumentError(
                f"members of an ensemble must be ReplayBuffers, got a {name}",
                hint="use the class of the same name in expstore" if package == "torchrl" else "",
            )
        if rb._batches.reshapes:
            raise ArgumentError(
                "batches of a member with ragged= or batch_tokens= cannot be joined with those of others",
                hint="open the members without these settings",
            )
    return rbs


def _assemble(
    storages: StorageEnsemble,
    samplers: SamplerEnsemble,
    writers: WriterEnsemble,
    collate_fns: Sequence[Callable[[Any], Any]] | None,
) -> tuple[ReplayBuffer, ...]:
    """Return buffers built from these parts."""
    if not len(storages) == len(samplers) == len(writers):
        raise ArgumentError(
            "storages, samplers and writers must have the same number of members, got "
            f"{len(storages)}, {len(samplers)} and {len(writers)}"
        )
    count = len(storages)
    transforms = storages.transforms or [None] * count
    fns = [None] * count if collate_fns is None else collate_fns
    return tuple(
        ReplayBuffer(storage=storage, sampler=sampler, writer=writer, transform=transform, collate_fn=fn)
        for storage, sampler, writer, transform, fn in zip(
            storages, samplers, writers, transforms, fns, strict=True
        )
    )


def _flat(name: str, value: Any, shape: torch.Size) -> torch.Tensor:
    """Flatten the leading dims of values to one dim of rows."""
    values = torch.as_tensor(value).cpu()
    if values.shape[: len(shape)] != shape:
        raise SchemaError(
            f"Patch entry {name!r} must start with shape {tuple(shape)}, got {tuple(values.shape)}."
        )
    return values.reshape(shape.numel(), *values.shape[len(shape) :])
