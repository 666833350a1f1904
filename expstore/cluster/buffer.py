"""A replay buffer over several served stores: `expstore.connect` of a list of addresses or a cluster file.

`ShardedReplayBuffer.sample` and `extend` are the two paths. This module keeps no rows except batches that
were drawn ahead.
"""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from os import PathLike
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_tensor_collection

from expstore.buffers.local_member import LocalMember
from expstore.buffers.member import Draw, Member
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.cluster.batch_queue import BatchQueue
from expstore.cluster.cluster_limit import ClusterLimit
from expstore.cluster.many import MISSING, Drawn, Many
from expstore.cluster.members import FixedMembers, Members, ShardEntry
from expstore.cluster.shard import Reach, Shard
from expstore.cluster.shard_set import ShardSet
from expstore.cluster.versions import ClusterVersion, read_version, write_version
from expstore.core.values import IntArray
from expstore.data.nested_rows import join_rows, take_rows
from expstore.data.to_arrays import to_array, to_arrays
from expstore.disk.local_path import local_path
from expstore.errors import (
    ArgumentError,
    NotFoundError,
    QueryError,
    RemoteError,
    SchemaError,
    SnapshotError,
    StateError,
    StorageError,
)
from expstore.remote.client import RemoteReplayBuffer
from expstore.remote.connect_options import ConnectOptions
from expstore.remote.http_member import HttpMember
from expstore.remote.local_only import LocalEpisodes
from expstore.remote.served_buffer import ServedBuffer
from expstore.remote.tokens import Token, Tokens
from expstore.remote.transport import Address, Connection, Retries
from expstore.remote.worker import run_together
from expstore.schema.schema import Schema
from expstore.sql.parts import join_parts, query_parts
from expstore.sql.result import Result
from expstore.sql.views import quote, select_episodes

_Result = TypeVar("_Result")
#: Sequences of draws: of batches of the buffer's size, and of other sizes.
_MAIN, _OTHER = 0, 1
#: Seconds after which a shard that did not answer is asked for its largest priority before a write.
_STALE_SECONDS = 5.0


class ShardedReplayBuffer(ServedBuffer[tuple[int, int]]):
    """A replay buffer over several served stores, its shards, each of which holds different rows.

    Batches are drawn as from one store with all rows. The number of rows that each shard draws is multinomial
    in the masses of the shards: their numbers of rows, the sums of their priorities, or what else the sampler
    draws by. `priority_weight` follows from the probability with which each row was drawn, also while others
    write: masses are those of the shards' last answers. The rows of a shard are adjacent in a batch.

    `ahead` batches are drawn together, by one request for each shard. A larger number takes less time per
    batch; priorities take effect later. Up to two times as many batches are in memory.

    Rows are identified by pairs: the number of the shard and the id there. `id` of batches, the results of
    `extend`, and the arguments of `by_id` and `update_priority` have shape `(n, 2)`.

    Rows of a source go to one shard, chosen by a hash of the source's name, so all clients with the same
    shards agree without a coordinator. An episode is never divided. Rows without a source go to the shard
    that the id of this buffer selects.

    The list of shards may change while the buffer is used. A new list is taken up between requests for
    batches, and in any case within about a second. A new shard gets sources that are new to this buffer,
    unless another shard has an open episode of the source. A retired shard is sampled as before, and sources
    leave it when it has no open episode of them. New rows get the largest priority of all shards, as far as
    this buffer knows it: from answers, at most about 5 seconds old.

    Threads: any number may use it. Processes: in a forked child, and in a process that unpickles it, it opens
    new connections, and continues to count draws where the original was. Crashes: as for one store: rows
    survive a crash of a server once `extend` has returned. Writes that got no answer are repeated for `wait`
    seconds and applied once. With `seed`, draw k of shards at rest is the same after restarts of servers and
    clients, for the same order of shards, `batch_size` and `ahead`.

    Args:
        members: Says which shards there are.
        token: The access token of all servers, or a dict from hosts to tokens, as for `connect`; None to send
            none.
        timeout: Seconds that connecting, the answer, and each part of it may take.
        retries: Pauses between repeated requests, and if `wait` is None, how long they are repeated.
        options: What is drawn, and how; `expstore.connect` describes it.

    Raises:
        RemoteError: A shard does not answer when the buffer is made. With `down="partial"`, a list that says
            which stores the shards have (a cluster file, Ray) needs only one that does; other lists need all.
        StateError: A shard has another store than `members` says, or does not count for `rate_limiter`.
        ArgumentError: An argument is out of range, or two addresses lead to the same store.

    Example:
        >>> shards = ["http://a:8420/run", "http://b:8420/run"]
        >>> with expstore.connect(shards, batch_size=256, seed=0) as rb:
        ...     rb.sample()["id"].shape
        torch.Size([256, 2])
    """

    def __init__(
        self,
        members: Members,
        options: ConnectOptions | None = None,
        *,
        token: Token = None,
        timeout: float = 30.0,
        retries: Retries | None = None,
    ) -> None:
        options = options or ConnectOptions()
        super().__init__(options)
        options.check_several()
        shares, seed = options.read_shares(), options.seed
        self._wanted = options.build_draw()._replace(seed=None)
        self._seed = uuid.uuid4().int >> 65 if seed is None else seed
        self._client = uuid.uuid4().hex
        tokens = Tokens(token, members.named)
        alone = ConnectOptions(
            sampler=options.sampler, where=options.where, priority_key=options.priority_key,
            device=options.device,
        )  # fmt: skip
        reaches = partial(
            _reach, tokens=tokens, timeout=timeout, retries=options.choose_retries(retries), options=alone,
            here=members.here if isinstance(members, FixedMembers) else {},
        )  # fmt: skip
        make = partial(_make_shard, reach=reaches, tokens=tokens, skips=options.skips)
        self._shards = ShardSet(members, make)
        try:
            if shares and len(shares) != len(self._shards.all):
                raise ArgumentError(
                    f"p must be {len(self._shards.all)} numbers, one per shard; got {options.p}"
                )
            limiter = options.rate_limiter
            self._limit = None if limiter is None else ClusterLimit(limiter, self._shards)
        except BaseException:
            self._shards.close()
            raise
        self._macro = Many(
            self._shards, self._seed, self._describe, shares=shares, skips=options.skips,
            limit=self._limit,
        )  # fmt: skip
        self._drawing = threading.Lock()
        self._ahead, self._others = options.ahead or 4, 0
        is_named = isinstance(self._wanted.sampler, str)
        self._queue = BatchQueue(self._fetch, ahead=self._ahead, draw=options.draw, is_aligned=not is_named)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy in another process."""
        return {name: value for name, value in super().__getstate__().items() if name != "_drawing"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state that `__getstate__` returned."""
        super().__setstate__(state)
        self._client, self._drawing = uuid.uuid4().hex, threading.Lock()

    # -- sampling --------------------------------------------------------------------------------

    def _sample(self, size: int, return_info: bool, include_info: bool | None, as_numpy: bool | None) -> Any:
        if size == self._batch_size:
            drawn = self._queue.take()
        else:
            with self._drawing:
                (drawn,) = self._macro.fetch(_OTHER, self._others, 1, size)
                self._others += 1
        batch = self._convert(drawn)
        batch, info = self._split_info(batch, return_info, include_info)
        batch = self._to_numpy(batch, as_numpy)
        return (batch, self._to_numpy(info, as_numpy) | {"draw": drawn.draw}) if return_info else batch

    def _fetch(self, first: int) -> list[Drawn]:
        assert self._batch_size is not None
        with self._drawing:
            return self._macro.fetch(_MAIN, first, self._ahead, self._batch_size)

    def _describe(self, size: int) -> Draw:
        """Return which rows batches of a size are drawn from: a shard must know the length of slices."""
        sampler = self._wanted.sampler
        if isinstance(sampler, dict) and sampler.get("num_slices") is not None:
            count = sampler["num_slices"]
            if size % count:
                raise StateError(f"the batch size must be a multiple of num_slices, got {size} and {count}")
            sampler = sampler | {"num_slices": None, "slice_len": size // count}
        return self._wanted._replace(sampler=sampler)

    def _convert(self, drawn: Drawn) -> TensorDict:
        return drawn.rows if self._device is None else drawn.rows.to(self._device)

    def _to_numpy(self, batch: Any, as_numpy: bool | None) -> Any:
        if not (self._as_numpy if as_numpy is None else as_numpy):
            return batch
        if not isinstance(batch, TensorDictBase):
            return to_arrays(batch)
        missing = batch.get(MISSING, None)
        if missing is None:
            return to_arrays(batch)
        return to_arrays(batch.exclude(MISSING)) | {MISSING: list(batch[MISSING])}

    def _stream(self, size: int, batches: int | None, as_numpy: bool | None) -> Generator[Any]:
        given = 0
        while batches is None or given < batches:
            if size == self._batch_size:
                is_more = batches is None or batches - given > 1
                # Rows that are drawn once would be lost in batches that are not taken.
                drawn = self._queue.take(prefetch=partial(self._may_prefetch, is_more))
                yield self._to_numpy(self._convert(drawn), as_numpy)
            else:
                yield self.sample(size, as_numpy=as_numpy)
            given += 1

    def _may_prefetch(self, is_more: bool) -> bool:
        return is_more and not self._macro.draws_once

    # -- writing ---------------------------------------------------------------------------------

    def _extend(self, data: Any, source: str | None, options: dict[str, Any]) -> torch.Tensor:
        with self._wait_to_insert(data):
            shard = self._route(source)
            ids: torch.Tensor = shard.call(
                lambda buffer: buffer.extend(data, source=source, return_ids=True, **options)
            )
        self._raise_priorities(shard, ids, data, options["update_priority"])
        return _pair(shard.number, ids)

    def _add(self, data: Any, source: str | None, options: dict[str, Any]) -> tuple[int, int]:
        with self._wait_to_insert([data]):
            shard = self._route(source)
            row = shard.add(data, source=source, **options)
        self._raise_priorities(shard, torch.tensor([row]), data, None)
        return shard.number, row

    def _wait_to_insert(self, data: Any) -> AbstractContextManager[None]:
        """Return a context that waits until the rate limiter allows to write rows."""
        return contextlib.nullcontext() if self._limit is None else self._limit.inserting(_count_rows(data))

    def _route(self, source: str | None) -> Shard:
        """Return the shard of a source."""
        return self._shards.route(source, self._client)

    def _resume(self, source: str, check: bool) -> tuple[Shard, torch.Tensor]:
        """Resume the episodes of a source in the shard that has them, to which the source stays bound.

        It is another shard than that of the source's name if there were other shards at that time.
        """
        first = self._route(source)
        for shard in [first, *(one for one in self._shards.all if one is not first)]:
            ids = shard.call(lambda buffer: buffer.episodes.resume(source, check=check))
            if ids.numel():
                self._shards.bind(source, shard)
                return shard, ids
        return first, ids

    def _raise_priorities(
        self, shard: Shard, ids: torch.Tensor, data: Any, update_priority: bool | None
    ) -> None:
        """Give new rows the largest priority of all shards, unless they have priorities of their own."""
        for other in self._shards.all:
            if other is not shard or other.is_local:
                other.refresh(_STALE_SECONDS)
        largest = max(other.largest for other in self._shards.all)
        stored = ids[ids > 0]
        if largest > shard.largest and stored.numel() and not _has_priorities(data, update_priority):
            # The rows are stored: if the shard fails now, they keep the largest priority of their own shard.
            with contextlib.suppress(StorageError):
                shard.raise_priorities(stored.numpy(), largest)

    # -- priorities ------------------------------------------------------------------------------

    def _set_priorities(self, ids: IntArray, values: NDArray[np.float64]) -> int:
        def update(number: int, rows: IntArray) -> int:
            try:
                shard = self._shards.find(number)
            except NotFoundError:  # it was removed, and its rows with it
                return 0
            return shard.set_priorities(ids[rows, 1], values[rows])

        return sum(self._each_of(ids, update).values())

    # -- reading ---------------------------------------------------------------------------------

    def _read_rows(self, ids: IntArray) -> TensorDict:
        if not len(ids):
            return TensorDict({}, [0])
        places: list[IntArray] = []
        parts: list[TensorDict] = []

        def read(number: int, rows: IntArray) -> tuple[IntArray, TensorDict]:
            return rows, self._shards.find(number).call(lambda buffer: buffer.by_id(ids[rows, 1]))

        for number, (rows, part) in self._each_of(ids, read).items():
            places.append(rows)
            parts.append(_with_pairs(part, number))
        return take_rows(join_rows(parts), np.argsort(np.concatenate(places)))

    def _read_episode(self, episode: tuple[int, int]) -> TensorDict:
        (pair,) = self._to_ids([episode])
        shard = self._shards.find(int(pair[0]))
        return _with_pairs(shard.call(lambda buffer: buffer.trajectory(int(pair[1]))), shard.number)

    def sql_each(
        self,
        query: str,
        params: Sequence[object] | Mapping[str, object] | None = None,
        *,
        limit: int | None = None,
    ) -> Result:
        """Run one read-only SELECT on every shard; return all rows, with the shard's number as `_shard`.

        A shard to which nothing was written yet has no columns of data: where it refuses the query and
        another shard does not, it adds no rows.

        Args:
            query: The statement, over the relations of the store's `rb.sql`.
            params: Values for `?` (a sequence) or `$name` (a mapping).
            limit: The most rows to return of each shard; None for all.

        Raises:
            QueryError: A shard refuses the query, or without a limit, its result has more rows than a server
                returns (kind "truncated").
        """

        def ask(shard: Shard) -> Result | QueryError:
            try:
                found = shard.query(query, params, limit)
            except QueryError as exc:
                if shard.call(lambda buffer: buffer.schema) is not None:
                    raise
                return exc
            return found

        found = self._shards.each(ask)
        parts = {number: part for number, part in found.items() if isinstance(part, Result)}
        for refusal in found.values():
            if isinstance(refusal, QueryError) and not parts:
                raise refusal
        return join_parts(parts)

    def sql(
        self,
        query: str,
        params: Sequence[object] | Mapping[str, object] | None = None,
        *,
        each: str,
        limit: int | None = None,
    ) -> Result:
        """Run a SELECT over the results of another one on every shard.

        Args:
            query: The statement, over the relation `parts`: the result of `sql_each(each)`.
            params: Values for `?` (a sequence) or `$name` (a mapping) in `query`.
            each: The statement that every shard runs.
            limit: The most rows that a shard returns; None for all.

        Raises:
            QueryError: A query is refused.

        Example:
            >>> rb = expstore.connect(["http://a:8420/run", "http://b:8420/run"])
            >>> rb.sql("SELECT sum(n) FROM parts", each="SELECT count(*) AS n FROM transitions").fetchone()
            (400,)
        """
        return query_parts(query, self.sql_each(each, limit=limit), params)

    @property
    def episodes(self) -> ShardedEpisodes:
        """Call it to query episodes; its methods end open episodes or resume those of earlier sessions."""
        return ShardedEpisodes(self)

    # -- the shards ------------------------------------------------------------------------------

    @property
    def shards(self) -> dict[int, RemoteReplayBuffer | ReplayBuffer]:
        """The buffer over each shard alone, by the shard's number; an open buffer is returned itself."""
        return {number: shard.buffer for number, shard in self._shards.by_number.items()}

    @property
    def shards_missing(self) -> tuple[int, ...]:
        """Numbers of the shards from which draws do not wait for an answer at present."""
        return tuple(shard.number for shard in self._shards.all if shard.is_down)

    def _ask_each(self, act: Callable[[Member], _Result]) -> list[_Result]:
        return self._each(lambda shard: shard.ask(act))

    def flush(self, *, shipped: bool = False, timeout: float = 60.0) -> None:
        """Sync all shards: rows written before survive a power failure of the servers' machines.

        Args:
            shipped: Whether to wait until each shard is shipped, too: what a lost shard is restored from has
                all rows that were acknowledged before the call.
            timeout: How long to wait for that, seconds; at most 600.

        Raises:
            RemoteError: A shard did not answer, or was not shipped in time (kind "not_shipped").
            StateError: `shipped` is set, and a shard is not shipped.
        """
        self._each(lambda shard: shard.call(lambda buffer: buffer.flush(shipped=shipped, timeout=timeout)))

    def stats(self) -> dict[str, Any]:
        """Return statistics: `shards`, those of each shard by its number, and sums of some of them."""
        found = self._shards.each(lambda shard: shard.call(lambda buffer: buffer.stats()))
        return {"shards": found, "write_count": sum(int(each["write_count"]) for each in found.values())}

    def __len__(self) -> int:
        return sum(self._each(lambda shard: shard.call(len)))

    @property
    def schema(self) -> Schema | None:
        """The fields, of the first shard that has any; None before the first rows."""
        found = self._each(lambda shard: shard.call(lambda buffer: buffer.schema))
        return next((schema for schema in found if schema is not None), None)

    @property
    def meta(self) -> dict[int, dict[str, Any]]:
        """The user's metadata of each shard, by its number."""
        return self._shards.each(lambda shard: shard.call(lambda buffer: buffer.meta))

    @property
    def seed(self) -> int:
        """Seed of the draws."""
        return self._seed

    @property
    def draw(self) -> int:
        """Number of the next draw of the buffer's batch size."""
        return self._queue.draw

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        """Return where the draws are, for `load_state_dict`. The rows are in the shards."""
        return {
            "seed": self._seed, "draw": self._queue.draw, "others": self._others, "ahead": self._ahead,
            "batch_size": self._batch_size, "passed": sorted(self._macro.passed),
            "shards": {str(number): shard.uuid for number, shard in self._shards.by_number.items()},
        }  # fmt: skip

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Continue with the draw after the last one before `state_dict` was called.

        If shards were added or removed since, the batches are drawn from the shards of now.

        Args:
            state_dict: The result of `state_dict` of a buffer with the same seed, shards, batch size and
                `ahead`.

        Raises:
            StateError: The state is of a buffer with another seed, other shards, or another batch size.
        """
        mine = self.state_dict()
        if set(state_dict) != set(mine):
            raise StateError("this is not a state of a buffer over several shards")
        same = {name: state_dict[name] == mine[name] for name in ("seed", "ahead", "batch_size")}
        same["shards"] = self._shards.can_follow(state_dict["shards"])
        for name, is_same in same.items():
            if not is_same:
                raise StateError(
                    f"the state has {name} {state_dict[name]!r}, and this buffer {mine[name]!r}",
                    hint=f"connect with the same {name}",
                )
        self._queue.reset(int(state_dict["draw"]))
        self._others, self._macro.passed = int(state_dict["others"]), set(state_dict["passed"])

    def annotate(self, *_: Any, **__: Any) -> NoReturn:
        """Not available: each shard is annotated by itself.

        Raises:
            RemoteError: Always (kind "local_only").
        """
        raise _build_local_error("annotate", "connect() to the store of the rows")

    def consumer(self, *_: Any, **__: Any) -> NoReturn:
        """Not available: the log of a consumer is in the folder of one store.

        Raises:
            RemoteError: Always (kind "local_only").
        """
        raise _build_local_error(
            "consumer", "connect() to one store; state_dict() keeps the place of draws from several"
        )

    @property
    def consumers(self) -> NoReturn:
        """Not available: each shard has consumers of its own.

        Raises:
            RemoteError: Always (kind "local_only").
        """
        raise _build_local_error("consumers", "connect() to each store")

    @property
    def groups(self) -> NoReturn:
        """Not available: the groups of each store have ids of their own.

        Raises:
            RemoteError: Always (kind "local_only").
        """
        raise _build_local_error("groups", "use sql(): FROM groups; or connect() to each store")

    @property
    def selections(self) -> NoReturn:
        """Not available: the episodes of each store have ids of their own.

        Raises:
            RemoteError: Always (kind "local_only").
        """
        raise _build_local_error("selections", "use sql(): FROM selections; or connect() to each store")

    @property
    def snapshots(self) -> NoReturn:
        """Not available: other versions than those of `dumps` are of one store each.

        Raises:
            RemoteError: Always (kind "local_only").
        """
        raise _build_local_error(
            "snapshots", "use dumps(path) and loads(path), or the versions of each: rb.shards[0].snapshots"
        )

    def dumps(self, path: str | PathLike[str]) -> ClusterVersion:
        """Make a version of every shard, and write to a local folder which versions belong together.

        The version of each shard has all rows that were acknowledged before the call, and possibly some that
        are written meanwhile. The versions are in the folders of the shards, under a new name, until they are
        removed there. `CLUSTER.json` in the local folder is replaced when all of them are complete.

        Args:
            path: The local folder; created if it does not exist.

        Raises:
            RemoteError: A shard did not answer; the local folder is unchanged.
            StorageError: The file cannot be written.
        """
        tag, folder, draws = f"cluster-{uuid.uuid4().hex[:12]}", local_path(path), self.state_dict()
        made = self._each(lambda shard: (shard.uuid, shard.call(lambda buffer: buffer.snapshots.tag(tag))))
        shards, rows = [shard for shard, _ in made], [version.rows for _, version in made]
        return write_version(folder, tag, shards, rows, draws)

    def loads(self, path: str | PathLike[str]) -> ClusterVersion:
        """Replace the content of every shard by its version of the last `dumps`, for all users of the stores.

        Each shard is replaced completely or not at all; if the call fails, repeat it. With the seed, batch
        size and `ahead` of the buffer that made the version, the draws continue with the number that was the
        next one at `dumps`. If the shards were at rest since the last but one request for batches, these are
        the batches that would have followed. Otherwise batches that were drawn ahead are drawn again, from
        the rows and priorities of the version.

        Args:
            path: The local folder.

        Raises:
            SnapshotError: There is no version in the folder, it is of other shards, or a shard lacks it.
            RemoteError: A shard did not answer.
        """
        version, mine = read_version(local_path(path)), self.state_dict()
        shards = list(mine["shards"].values())
        if version.shards != shards:
            raise SnapshotError(
                f"the version in {path} is of the shards {version.shards}, and these are {shards}",
                hint="connect to a list of the same shards in the same order",
            )
        self._each(lambda shard: shard.call(lambda buffer: buffer.snapshots.restore(version=version.tag)))
        same = all(version.draws[name] == mine[name] for name in ("seed", "ahead", "batch_size"))
        self._queue.reset(int((version.draws if same else mine)["draw"]))
        with self._drawing:
            draws = version.draws if same else mine
            self._others, self._macro.passed = int(draws["others"]), set(draws["passed"])
            for shard in self._shards.all:
                shard.mass = None
        return version

    dump = save = dumps
    load = loads

    def _close(self) -> None:
        self._shards.close()
        self._queue.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({[shard.place for shard in self._shards.all]})"

    # -- helpers ---------------------------------------------------------------------------------

    def _each(self, act: Callable[[Shard], _Result]) -> list[_Result]:
        """Call a function for all shards at once; return the results in the order of the shards."""
        return list(self._shards.each(act).values())

    def _each_of(self, pairs: IntArray, act: Callable[[int, IntArray], _Result]) -> dict[int, _Result]:
        """Call a function for all shards of some rows at once: number of the shard, places of its rows."""
        numbers = np.unique(pairs[:, 0]).tolist()
        places = [np.flatnonzero(pairs[:, 0] == number) for number in numbers]
        acts = [partial(act, number, rows) for number, rows in zip(numbers, places, strict=True)]
        return dict(zip(numbers, run_together(acts), strict=True))

    def _to_ids(self, given: Any) -> IntArray:
        """Return pairs of shards and ids as an array. Shape `(n, 2)`.

        Raises:
            SchemaError: The values are not pairs of integers.
        """
        pairs = to_array(given)
        if pairs.size == 0:
            return np.zeros((0, 2), np.int64)
        if pairs.ndim != 2 or pairs.shape[1] != 2 or pairs.dtype.kind not in "iu":
            raise SchemaError(
                f"rows of shards are identified by integers of shape (n, 2), got {pairs.dtype}"
                f"{list(pairs.shape)}",
                hint="pass pairs of shard and id, as in the entry 'id' of a sample",
            )
        return pairs.astype(np.int64, copy=False)


class ShardedEpisodes(LocalEpisodes):
    """Query episodes of all shards, end those of this buffer, resume those of earlier sessions.

    Args:
        owner: The buffer.
    """

    def __init__(self, owner: ShardedReplayBuffer) -> None:
        self._owner = owner

    def __call__(
        self,
        where: str | None = None,
        order_by: str | None = None,
        limit: int | None = None,
        *,
        params: Sequence[object] | Mapping[str, object] | None = None,
    ) -> Result:
        """Return rows of the relation `episodes` of all shards; `_shard` is the number of the shard.

        Args:
            where: SQL condition over its columns; None for all episodes.
            order_by: SQL expressions over its columns to sort by; ties are sorted by `episode_id`.
            limit: The most episodes to return; None for all.
            params: Values for `?` (a sequence) or `$name` (a mapping) in `where`.

        Raises:
            QueryError: An expression is invalid, takes too long or is refused; or, without a limit, there are
                more episodes than a server returns (kind "truncated").
        """
        each = select_episodes(where, order_by, limit)
        found = self._owner.sql_each(each, params, limit=limit or None)
        names = ", ".join(map(quote, found.columns))
        merged = select_episodes(None, order_by, limit).replace("FROM episodes", "FROM parts AS episodes", 1)
        return query_parts(merged.replace("SELECT *", f"SELECT {names}", 1), found)

    def changes(self, limit: int = 20) -> NoReturn:
        """Not available: the episodes of each store are compared with one another.

        Raises:
            RemoteError: Always (kind "local_only").
        """
        raise _build_local_error("episodes.changes", "connect() to each store")

    def odd(self, limit: int = 20, *, threshold: float = 6.0) -> NoReturn:
        """Not available: the episodes of each store are compared with one another.

        Raises:
            RemoteError: Always (kind "local_only").
        """
        raise _build_local_error("episodes.odd", "connect() to each store")

    def end(self, source: str | None = None) -> None:
        """End open episodes of this buffer's sessions: their status becomes `cut`.

        Args:
            source: Name of the stream; None for all streams, including the unnamed one.
        """
        owner = self._owner
        if source is None:
            owner._each(lambda shard: shard.call(lambda buffer: buffer.episodes.end()))
        else:
            owner._route(source).call(lambda buffer: buffer.episodes.end(source))

    def end_stream(self, source: str | None) -> None:
        """End the open episodes of one stream of this buffer's sessions.

        Args:
            source: The `source` that was passed to `extend`; None for the unnamed stream.
        """
        self._owner._route(source).call(lambda buffer: buffer.episodes.end_stream(source))

    def find_open(self, source: str) -> torch.Tensor:
        """Return the open episodes of a source, of all sessions that have not ended.

        Args:
            source: Name of the stream.

        Returns:
            Shard and id of the episodes. Shape `(n, 2)`, int64.
        """
        found = self._owner._shards.each(
            lambda shard: shard.call(lambda buffer: buffer.episodes.find_open(source))
        )
        return torch.cat([_pair(number, ids) for number, ids in found.items()])

    def resume(self, source: str, *, check: bool = True) -> torch.Tensor:
        """Continue the open episodes of the newest ended session that wrote to a source of this name.

        Args:
            source: Name of the stream.
            check: Whether the next row of each episode must continue it.

        Returns:
            Shard and id of the resumed episodes. Shape `(n, 2)`, int64.
        """
        shard, ids = self._owner._resume(source, check)
        return _pair(shard.number, ids)


def _reach(
    entry: ShardEntry,
    *,
    tokens: Tokens,
    timeout: float,
    retries: Retries,
    options: ConnectOptions,
    here: Mapping[int, ReplayBuffer],
) -> Reach:
    """Return the ways to reach the store of an entry.

    Args:
        entry: The entry.
        tokens: The access tokens of the servers.
        timeout: Seconds that connecting, the answer, and each part of it may take.
        retries: How long requests are repeated.
        options: Options of the buffer over this store alone.
        here: Buffers of this process, by the numbers of their entries.
    """
    if entry.number in here:
        member = LocalMember.of(here[entry.number])
        return Reach(member, member, here[entry.number])
    address = Address.of(entry.url)
    token = tokens.of(address)
    patient, quick = (
        Connection(address, token, timeout=timeout, retries=how)
        for how in (retries, replace(retries, seconds=0.0))
    )
    buffer = RemoteReplayBuffer(patient, options)
    return Reach(buffer.member, HttpMember(quick), buffer)


def _make_shard(
    entry: ShardEntry, *, reach: Callable[[ShardEntry], Reach], tokens: Tokens, skips: bool
) -> Shard:
    return Shard(entry, reach(entry), tokens, skips=skips)


def _count_rows(data: Any) -> int:
    """Return how many rows `extend` is given; 1 for what it refuses."""
    while isinstance(data, Mapping) and not is_tensor_collection(data) and data:
        data = next(iter(data.values()))
    if is_tensor_collection(data):
        return int(data.numel())
    return len(data) if hasattr(data, "__len__") else 1


def _has_priorities(data: Any, update_priority: bool | None) -> bool:
    """Return whether the server takes the priorities of new rows from the rows."""
    if update_priority is False:
        return False
    first = data[0] if isinstance(data, list) and data else data
    try:
        return "td_error" in (first.column_names if hasattr(first, "column_names") else first.keys())
    except (AttributeError, TypeError):
        return False


def _pair(number: int, ids: torch.Tensor) -> torch.Tensor:
    """Return pairs of a shard and ids there. Shape `(n, 2)`."""
    return torch.stack([torch.full_like(ids, number), ids], dim=1)


def _with_pairs(rows: TensorDict, number: int) -> TensorDict:
    """Return rows of a shard whose entry `id` has pairs."""
    ids = rows.get("id", None)
    if ids is not None:
        rows.set("id", _pair(number, ids))
    return rows


def _build_local_error(name: str, hint: str) -> RemoteError:
    return RemoteError(f"{name} is not available for several shards together", kind="local_only", hint=hint)
