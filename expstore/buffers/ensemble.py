"""Several buffers sampled as one, and written to by a key that says which.

Members are buffers, and can be used by themselves. An ensemble keeps no rows and no files of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from textwrap import indent
from typing import Any, Literal, Self

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
from expstore.buffers.rng import Draws
from expstore.buffers.updates import ConditionalUpdateResult, Patch, check_can_update, leaves_of
from expstore.core.members import find_members
from expstore.core.torchrl_keywords import ENSEMBLE, check_keywords
from expstore.core.values import IntArray, key_name
from expstore.data.containers import stack
from expstore.data.to_arrays import to_arrays
from expstore.disk.local_path import local_path
from expstore.errors import SchemaError, StateError
from expstore.samplers.ensemble import SamplerEnsemble
from expstore.storages.ensemble import StorageEnsemble
from expstore.transforms import Compose
from expstore.writers.writers import WriterEnsemble

__all__ = ["ReplayBufferEnsemble"]

#: The second word of the key by which members are chosen: no stream of a storage has it.
_CHOICE = 1 << 62


class ReplayBufferEnsemble:
    """Sample several buffers as one.

    A batch has two batch dims: parts, and the rows of each part, which come from one member.
    `("index", "buffer_ids")` names the member and `("index", "index")` the row; what members' samplers say of
    rows has keys of its own.

    The members' seeds, and how many batches they have returned, decide which members a batch is drawn from:
    after a restart the next batch is the one that would have come. With a generator, that decides, and the
    members draw by it, too.

    Threads: any number may sample, one after another; members may be used meanwhile. Processes: a copy has
    copies of the members, which follow their stores. Crashes: as the members; `dumps` makes a version of each
    of them, one after another.

    Args:
        rbs: The members. Without them `storages`, `samplers` and `writers` are given.
        storages: Storages of the members, with their transforms.
        samplers: Samplers of the members.
        writers: Writers of the members.
        transform: Transforms of batches, which act after the members' own.
        batch_size: Rows per batch, all parts together.
        collate_fn: Makes a batch of a list of parts; None: they are stacked.
        collate_fns: One function per member, which makes a part of the member's batch.
        p: How often each member is drawn from; see `SamplerEnsemble`.
        sample_from_all: Draw from all members; see `SamplerEnsemble`.
        num_buffer_sampled: How many parts a batch has; see `SamplerEnsemble`.
        routing_key: The field that names the member which each row is written to.
        routing_dim: The batch dim whose places are the members, instead of a routing key.
        generator: Random numbers of all draws; None: the members' seeds.
        as_numpy: Whether `sample` and iteration return NumPy arrays unless `sample` is told otherwise,
            whatever the members do.
        torchrl: Keywords of TorchRL's class that have no effect here: accepted at their defaults, otherwise
            refused with the reason.

    Raises:
        RuntimeError: Members are given, and parts of them, too.
        TypeError: Neither are; or there is no such keyword.
        ValueError: Both a routing key and a dim are given; the transform looks at other steps of a store's
            episodes; or see `SamplerEnsemble`.

    Example:
        >>> rb = ReplayBufferEnsemble(demonstrations, online, p=[1, 3], batch_size=32)
        >>> rb.sample().shape
        torch.Size([2, 16])
    """

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
                raise TypeError("give buffers, or all of storages=, samplers= and writers=")
            rbs = _assemble(storages, samplers, writers, collate_fns)
            self._collate_fns = None
        self._rbs = tuple(rbs)
        self._samplers = samplers
        self._transform = _joint(Compose.of(transform))
        self._collate_fn = stack if collate_fn is None else collate_fn
        self._batch_size = batch_size
        self._generator = generator
        self._as_numpy = as_numpy
        self._lock = threading.RLock()
        if generator is not None:
            self.set_rng(generator)

    # -- sampling --------------------------------------------------------------------------------

    def sample(
        self, batch_size: int | None = None, return_info: bool = False, *, as_numpy: bool | None = None
    ) -> Any:
        """Draw a batch.

        Args:
            batch_size: How many rows, all parts together; None: the ensemble's.
            return_info: Return a pair: the batch, and a TensorDict of what is known of its rows.
            as_numpy: Return nested dicts of NumPy arrays instead of TensorDicts. None: as the ensemble was
                made.

        Returns:
            A TensorDict, batch size `[num_buffer_sampled, batch_size // num_buffer_sampled]`, or whatever
            collation makes of the parts.

        Raises:
            NotReadyError: A member that was drawn is empty; or none can be sampled.
            StateError: A transform has changed the shape, so that rows cannot be told from one another.
            ValueError: The batch cannot be cut into parts of one size.
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
                    hint="transform members instead, or take collate_fn= of parts of one shape",
                )
            with batch.unlock_():
                for key in info.keys():  # noqa: SIM118 - a TensorDict yields values
                    if key != "id":
                        batch.set(key, repeat_along_dims(info.get(key), batch))
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
        return [rb.count_candidates(size) for rb in self._rbs]

    def _parts(self, chosen: IntArray, size: int) -> tuple[list[Any], list[TensorDict]]:
        """Draw the parts of a batch, those of one member by one draw."""
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
        """Draw rows of a member, again where its sampler gives fewer at once."""
        batches, infos, missing = [], [], size
        while missing:
            batch, info = self._rbs[member].sample(missing, return_info=True, as_numpy=False)
            rows = info["index"].shape[0]
            if not 0 < rows <= missing:
                raise StateError(
                    f"the sampler of member {member} gave {rows} rows where {missing} were asked for"
                )
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
            StateError: No batch size is known.
        """
        size = self._require_size(batch_size)
        if size % self._samplers.num_buffer_sampled:
            return False
        part = size // self._samplers.num_buffer_sampled
        return self._samplers.can_choose([rb.can_sample(part) for rb in self._rbs])

    def __iter__(self) -> Iterator[Any]:
        """Yield batches without end.

        Raises:
            StateError: No batch size is known.
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
        """Write each row to the member that the routing key, or dim, says; to each member all rows or none.

        Args:
            data: Rows, in any number of batch dims.
            update_priority: As the members' `extend`.
            idempotency_key: As the members' `extend`: each keeps it with its rows, so that a call that came
                half way can be made again.
            digest: Likewise.

        Returns:
            `buffer_ids` and `index` of each row, in the order of `data.reshape(-1)`; -1 for one that its
            member did not take in; `index_generation`, too, if all writers track generations. Batch size
            `[n]`.

        Raises:
            SchemaError: Rows do not fit a member; those of members before it are written.
            StateError: Neither routing key nor dim was given.
            TypeError: Members are not named by integers, or it is no TensorDict.
            ValueError: There is no such member; nothing is written.
        """
        data = self._transform.inverse(data)
        if data is None:
            data = TensorDict({}, [0])
            return self._metadata(data, np.zeros(0, np.int64), None, {})
        rows, members = self._route.of_rows(data, len(self._rbs))
        key: dict[str, Any] = {"idempotency_key": idempotency_key, "digest": digest}
        for member in np.unique(members).tolist():
            make_key(self._rbs[member].writer, idempotency_key, digest)  # before one of them writes
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
        """Write one row to the member that the routing key says; return what `extend` returns of it.

        Raises:
            StateError: There is no routing key.
            ValueError: It is more than one row.
        """
        if self._route.dim is not None:
            raise StateError("Use extend() for routing_dim writes.")
        if data.ndim:
            raise ValueError("add() expects a scalar TensorDict record.")
        found: TensorDict = self.extend(data.unsqueeze(0))[0]
        return found

    def update_priority(self, index: TensorDictBase, priority: Any) -> int:
        """Set the priorities of rows that are still there; return how many.

        Args:
            index: Which rows: `buffer_ids` and `index`, as samples have them below `"index"`.
            priority: One for all, or one each, in the shape of these.
        """
        members, rows = pairs(index, len(self._rbs))
        values = np.broadcast_to(torch.as_tensor(priority).detach().cpu().numpy().reshape(-1), members.shape)
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
        """Change fields of those rows that are still there; no other row is ever reached.

        Args:
            index: Which rows: `buffer_ids` and `index`, as samples have them below `"index"`, and as `extend`
                returns them.
            generation: Their `index_generation`. In the shape of `buffer_ids`.
            patch: New values by key. In that shape, then that of the field.
            version_key: As the members' `update_if_present`.
            version: As the members' `update_if_present`.
            require_newer: As the members' `update_if_present`.

        Returns:
            What was done with each row, in that shape.

        Raises:
            NotFoundError: There is no such field.
            SchemaError: Values do not fit; patches of members before are applied.
            StateError: A member's writer does not track generations; nothing was changed.
            TypeError: Members are not named by integers.
            ValueError: There is no such member; nothing was changed.
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
        """Call `update_if_present`, and return its result or error as a future that is done.

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
        """End the open episodes of members' unnamed streams, before collectors begin anew.

        The newest row of every open episode becomes done, and truncated unless it is terminated. Later rows
        belong to new episodes, whatever their trajectory ids. Named streams (`source=`) stay open. No other
        thread may write meanwhile.

        Args:
            end_key: The field that ends an episode.
            terminated_key: The field that marks a terminated episode; never changed.
            truncated_key: The field that marks a truncated episode; None: rows have no such field.

        Raises:
            SchemaError: There is no such field; nothing was changed.
            StateError: A member's sampler goes by trajectory ids that may come again; nothing was changed.
            TypeError: It is no field of booleans; nothing was changed.
            ValueError: Two keys are the same.
        """
        tails = Tails(end_key, terminated_key, truncated_key)
        for rb in self._rbs:
            tails.check(rb.storage, rb.sampler)
        for rb in self._rbs:
            if len(rb.storage):
                tails.close(rb.storage)

    def empty(self) -> None:
        """Forget the rows of all members."""
        for rb in self._rbs:
            rb.empty()

    # -- members ---------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Any:
        """Return a member, some members as an ensemble, or rows.

        `rb[2]` is a member, `rb[:2]` and `rb[[0, 2]]` are ensembles, `rb[2, rows]` are rows of a member as it
        gives them, `rb[:, rows]` the same rows of all members as they are stored, collated.

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
        """How many members there are."""
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
        """What is done to batches, after the members' own transforms."""
        return self._transform

    @property
    def batch_size(self) -> int | None:
        """Rows per batch, unless `sample` is told otherwise."""
        return self._batch_size

    def append_transform(self, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform behind the ensemble's others; return the ensemble.

        Args:
            transform: A callable, which acts on batches, or a torchrl Transform.
            invert: It acts on what is written instead.
        """
        self._transform.append(_joint(Compose(transform)), invert=invert)
        return self

    def insert_transform(self, index: int, transform: Any, *, invert: bool = False) -> Self:
        """Add a transform before the ensemble's one of this number; return the ensemble.

        Args:
            index: Its number.
            transform: As `append_transform`.
            invert: Change what is written instead.
        """
        self._transform.insert(index, _joint(Compose(transform)), invert=invert)
        return self

    # -- life ------------------------------------------------------------------------------------

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw by another generator from the next batch on, and the members too; None: by their seeds."""
        self._generator = generator
        for rb in self._rbs:
            rb.set_rng(generator)

    def stats(self) -> dict[str, Any]:
        """Return facts about all members together that JSON can keep."""
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
        """Return what the members' `state_dict` return, by their numbers, and what the transforms keep."""
        members = {str(number): rb.state_dict() for number, rb in enumerate(self._rbs)}
        return members | {"_transforms": self._transform.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Hand the members what `state_dict` returned.

        Raises:
            StateError: It is of another number of members (nothing was changed), or of others.
        """
        if len(state_dict) != len(self._rbs) + 1 or "_transforms" not in state_dict:
            raise StateError(f"that is no state of an ensemble of {len(self._rbs)} buffers")
        for number, rb in enumerate(self._rbs):
            rb.load_state_dict(state_dict[str(number)])
        self._transform.load_state_dict(state_dict["_transforms"])

    def dumps(self, path: str | Path) -> None:
        """Make a version of each member, in a folder below `path` that is named by its number."""
        path = local_path(path)
        for number, rb in enumerate(self._rbs):
            rb.dumps(path / str(number))

    def loads(self, path: str | Path) -> None:
        """Put the newest version of each member below `path` in the place of what it holds."""
        path = local_path(path)
        for number, rb in enumerate(self._rbs):
            rb.loads(path / str(number))

    dump, save, load = dumps, dumps, loads

    def flush(self) -> None:
        """Return when all that was written to any member survives a power cut."""
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
        """Return what a copy needs."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_generator")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned; draws follow from the members' seeds."""
        self.__dict__.update(state, _lock=threading.RLock(), _generator=None)

    def __repr__(self) -> str:
        parts = ",\n".join(map(str, [*self._rbs, self._samplers]))
        return f"ReplayBufferEnsemble(\n{indent(parts, '    ')},\n    batch_size={self._batch_size})"


def _joint(transform: Compose) -> Compose:
    """Return a chain that acts on parts of several stores.

    Raises:
        ValueError: One of it looks at other steps.
    """
    if transform.steps:
        raise ValueError(
            f"{type(transform.steps[0]).__name__} reads other steps of one store's episodes: give it to "
            "the members, not to their ensemble"
        )
    return transform


def _check_buffers(rbs: Sequence[Any]) -> Sequence[ReplayBuffer]:
    for rb in rbs:
        if not isinstance(rb, ReplayBuffer):
            raise TypeError(f"an ensemble is made of ReplayBuffers, not of {type(rb).__name__}")
    return rbs


def _assemble(
    storages: StorageEnsemble,
    samplers: SamplerEnsemble,
    writers: WriterEnsemble,
    collate_fns: Sequence[Callable[[Any], Any]] | None,
) -> tuple[ReplayBuffer, ...]:
    """Return buffers made of these parts."""
    if not len(storages) == len(samplers) == len(writers):
        raise ValueError(
            "storages, samplers and writers must be of the same number of members, got "
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
    """Return values of rows in one dim."""
    values = torch.as_tensor(value).cpu()
    if values.shape[: len(shape)] != shape:
        raise SchemaError(
            f"Patch entry {name!r} must start with shape {tuple(shape)}, got {tuple(values.shape)}."
        )
    return values.reshape(shape.numel(), *values.shape[len(shape) :])
