"""A store that a buffer of this process has open, as a member: it draws by descriptions of samplers.

Used by the HTTP server and by buffers over several stores. A sampler with state from draw to draw has a name
and is shared by all who draw by it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.buffers.draw_masses import record_masses
from expstore.buffers.member import Draw, Facts, Limits, Member, Part, Status, Weight, find_largest
from expstore.buffers.replay_buffer import ReplayBuffer
from expstore.buffers.seeded_buffer import SeededReplayBuffer
from expstore.buffers.store_handle import StorePart
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.per_key import PerKey
from expstore.core.values import IntArray, Mass, Selection
from expstore.errors import ArgumentError, NotFoundError, RemoteError, StateError
from expstore.rate_limiters import RateLimiter
from expstore.samplers.base import Sampler
from expstore.samplers.names import SAMPLERS, make_sampler
from expstore.storages.engine.open_settings import Settings
from expstore.storages.follower import FollowerStorage
from expstore.storages.read_view import ReadView, build_closed_error
from expstore.wire.codec import Encoder

#: Samplers that remember which rows they have drawn: they need a name.
WITH_STATE = frozenset({"without_replacement", "slices_without_replacement", "streaming_slices", "consuming"})
#: Samplers that may be given by name only, with default parameters.
PLAIN = frozenset(SAMPLERS) - WITH_STATE
_KEPT = 32
#: Seconds within which the owner of a shared store writes priorities to the store.
_OWNER_SECONDS = 0.1
#: A buffer that draws batches for requests.
_Drawer = TensorDictReplayBuffer | SeededReplayBuffer
_Buffer = TypeVar("_Buffer", bound=_Drawer)
#: A sampler's description as JSON, its condition, and its seed.
_Wanted = tuple[str, str | None, int | None]
_NO_IDS = np.zeros(0, np.int64)


def make_described(description: Mapping[str, Any], where: str | None) -> Sampler:
    """Return the sampler of a description.

    Args:
        description: Its `kind`, and keyword arguments of its class.
        where: Condition on the rows; None: all rows.

    Raises:
        ArgumentError: There is no such kind, or its class does not accept these arguments.
    """
    options = {name: value for name, value in description.items() if name != "kind"}
    if where is not None:
        options["where"] = where
    return make_sampler(str(description.get("kind")), **options)


class _Shared(Generic[_Buffer]):
    """A buffer that several requests draw with.

    Args:
        wanted: What it was made for.
        buffer: The buffer.
        end: Called when it is no longer kept, and no thread draws with it.
    """

    def __init__(self, wanted: _Wanted, buffer: _Buffer, end: Callable[[], None]) -> None:
        self.wanted, self.buffer, self.end = wanted, buffer, end
        #: Number of threads that draw with it, and 1 while it is kept; `LocalMember` counts.
        self.users = 1


class Drawn(NamedTuple):
    """A batch.

    Args:
        batch: The rows.
        mass: What they were drawn from; None if the sampler has no mass.
    """

    batch: Any
    mass: Mass | None


class LocalMember(Member, StorePart):
    """A store that a buffer of this process has open.

    The buffer may also be a worker's copy of one that `share()` lets other processes write to: the copy reads
    the store and writes through its owner.

    Threads: any number may use it. Processes: a copy has a copy of the buffer, and no named samplers.
    Crashes: named samplers are kept in memory only.

    Args:
        buffer: The buffer.
        limiter: The rate limiter that `buffer` also uses; None: there is no limit.
        make: Makes a sampler of its description and condition.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        *,
        limiter: RateLimiter | None = None,
        make: Callable[[Mapping[str, Any], str | None], Sampler] = make_described,
    ) -> None:
        self.buffer, self._limiter, self._make_sampler = buffer, limiter, make
        self._begin()

    @classmethod
    def of(cls, buffer: ReplayBuffer) -> LocalMember:
        """Return the member of a buffer, always the same: all who draw from the buffer share its samplers."""

        def make() -> LocalMember:
            return cls(buffer, limiter=None if buffer.storage.follows else buffer._limiter)

        return buffer._keep_member(make)

    def _begin(self) -> None:
        #: Held while samplers are looked up, and never while one is made or draws.
        self._lock = Lock()
        #: Held while one sampler is made, by its description or name.
        self._making = PerKey(Lock)
        self._kept: OrderedDict[_Wanted, _Shared[_Drawer]] = OrderedDict()
        self._named: OrderedDict[str, _Shared[TensorDictReplayBuffer]] = OrderedDict()
        self._closed = False
        self._drawn_from: ReadView | None = None
        #: The largest priority that was set here: a copy does not know the largest one of its owner.
        self._largest = 0.0
        #: When a shared copy has set priorities that it may not have read yet, and when it read them last.
        self._set: float | None = None
        self._followed = float("-inf")
        self._counting = Lock()
        self._encoder = Encoder(lambda: self.buffer.schema)
        #: Number of rows drawn since the member was made.
        self.rows_drawn = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy."""
        own = ("buffer", "_limiter", "_make_sampler")
        return {name: self.__dict__[name] for name in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__dict__.update(state)
        self._begin()

    @property
    def place(self) -> str:
        """The folder of the store; "memory" for rows in RAM."""
        path = self.buffer.storage.path
        return "memory" if path is None else str(path)

    def read_facts(self) -> Facts:
        """Return the uuid of the store, and its status."""
        storage = self._check_open()
        uuid = storage.description.uuid
        return Facts(uuid if int(uuid, 16) else f"memory-{id(storage):x}", self.read_status())

    def read_status(self) -> Status:
        """Return the largest priority, and what the rate limiter counts."""
        largest = max(float(self.buffer.storage.priorities.largest), self._largest)
        return Status(largest, self.read_limits())

    def read_limits(self) -> Limits | None:
        """Return what the rate limiter counts; None if there is no limiter."""
        limiter = self._limiter
        return None if limiter is None else Limits(limiter.count(), limiter.samples_per_insert)

    @property
    def is_closed(self) -> bool:
        """Whether it was closed; the buffer may be open, and makes another member then."""
        return self._closed

    def _check_open(self) -> ReadView:
        """Return the storage.

        Raises:
            StateError: The member or the store is closed.
        """
        if self._closed:
            raise StateError("the member is closed", hint="make a new one of the open buffer")
        storage = self.buffer.storage
        if storage.closed:
            raise build_closed_error()
        return storage

    # -- drawing ---------------------------------------------------------------------------------

    def begin(self, draw: Draw, rows: int) -> Callable[[], Part]:
        """Return a function that draws rows."""
        return lambda: self._draw_columns(draw, rows)

    def _draw_columns(self, draw: Draw, rows: int) -> Part:
        self._check_open()
        self._follow_priorities()
        batch, mass = self.sample(draw, rows)
        codec, columns = self._encoder.columns(batch)
        return Part(codec, list(columns), len(columns[0]), mass, self.read_status())

    def sample(self, draw: Draw, rows: int) -> Drawn:
        """Return a batch, and what it was drawn from.

        Args:
            draw: Which rows.
            rows: Number of rows.

        Raises:
            NotFoundError: There is no sampler of this name.
            NotReadyError: There are too few rows that may be drawn, or other clients must write or sample
                first.
            ArgumentError: A named sampler is asked for with settings that it has already.
        """
        with record_masses() as masses:
            if draw.sampler is None and draw.where is None and draw.seed is None:
                batch = self.buffer.sample(rows)
            elif self._limiter is None:
                batch = self._draw(draw, rows)
            else:
                with self._limiter.sampling(rows) as count:
                    batch = self._draw(draw, rows)
                    count(batch.numel())
        with self._counting:
            self.rows_drawn += batch.numel()
        return Drawn(batch, masses[-1] if masses else None)

    def _draw(self, draw: Draw, rows: int) -> Any:
        sampler = _resolve(draw.sampler)
        if isinstance(sampler, str):
            _refuse_settings(draw.where, draw.seed, draw.number)
            storage = self.buffer.storage
            with self._use_named(sampler) as named:
                if named.buffer.storage is not storage:
                    storage.drain()  # otherwise small batches would become visible a moment later
                return named.buffer.sample(rows)
        with self._use_buffer(sampler, draw.where, draw.seed) as buffer:
            if isinstance(buffer, SeededReplayBuffer):
                return buffer.draw(draw.number, rows)
            return buffer.sample(rows)

    def weigh(self, draw: Draw, rows: int) -> Weight:
        """Return what a batch would be drawn from now.

        Raises:
            NotFoundError: There is no sampler of this name.
        """
        sampler, storage = _resolve(draw.sampler), self._check_open()
        self._follow_priorities()
        if isinstance(sampler, str):
            _refuse_settings(draw.where, draw.seed)
            with self._use_named(sampler) as named:
                options = json.loads(named.wanted[0])
                unit = None if options.get("num_slices") else options.get("slice_len") or 1
                mass = named.buffer.sampler.mass(named.buffer.storage, rows)
                return Weight(mass, unit, self.read_status())
        with self._use_buffer(sampler, draw.where, draw.seed) as buffer:
            mass = buffer.sampler.mass(storage, rows)
            return Weight(mass, None if mass is None else mass.unit, self.read_status())

    @contextlib.contextmanager
    def choose(self, draw: Draw, rows: int, draws: int) -> Iterator[tuple[list[Selection], Sampler]]:
        """Yield the rows of some draws without reading or counting them, and the sampler that chose them.

        The rate limiter is not asked, and no other draw changes.

        Args:
            draw: Which rows, with a seed; the numbers of the draws are 0, 1 and so on.
            rows: Number of rows of a draw.
            draws: Number of draws.

        Raises:
            ArgumentError: A named sampler is asked for.
            NotReadyError: There are too few rows that may be drawn.
        """
        sampler = _resolve(draw.sampler)
        if isinstance(sampler, str):
            raise ArgumentError(f"sampler {sampler[:100]!r} is not the name of a kind without state",
                                kind="request",
                                hint=f"describe a sampler, or use {', '.join(sorted(PLAIN))}")  # fmt: skip
        with self._use_buffer(sampler, draw.where, draw.seed) as buffer:
            assert isinstance(buffer, SeededReplayBuffer), "it has a seed"
            yield [buffer.choose(number, rows) for number in range(draws)], buffer.sampler

    # -- samplers that are kept --------------------------------------------------------------------

    @contextlib.contextmanager
    def _use_buffer(
        self, sampler: Mapping[str, Any], where: str | None, seed: int | None
    ) -> Iterator[_Drawer]:
        """Yield the buffer that draws with a described sampler, which is made if it is not kept."""
        key = _write(sampler), where, seed
        shared = self._take(self._kept, key)
        if shared is None:
            with self._making.use(key) as making, making:
                shared = self._take(self._kept, key) or self._keep(key, self._make(sampler, where, seed))
        try:
            yield shared.buffer
        finally:
            self._drop(shared)

    @contextlib.contextmanager
    def _use_named(self, name: str) -> Iterator[_Shared[TensorDictReplayBuffer]]:
        """Yield a named sampler.

        Raises:
            NotFoundError: There is no sampler of this name.
        """
        shared = self._take(self._named, name)
        if shared is None:
            raise self._build_unknown_error(name)
        try:
            yield shared
        finally:
            self._drop(shared)

    def _take(self, samplers: OrderedDict[Any, _Shared[_Buffer]], key: Any) -> _Shared[_Buffer] | None:
        """Count a use of a sampler, and return it; None if it is unknown. The use ends with `_drop`."""
        with self._lock:
            shared = samplers.get(key)
            if shared is not None:
                shared.users += 1
                samplers.move_to_end(key)
            return shared

    def _drop(self, shared: _Shared[Any] | None) -> None:
        """End a use of a sampler; the last one ends the sampler."""
        if shared is None:
            return
        with self._lock:
            shared.users -= 1
            is_last = not shared.users
        if is_last:
            shared.end()

    def _keep(self, key: _Wanted, shared: _Shared[_Drawer]) -> _Shared[_Drawer]:
        """Keep a new sampler in place of the one that was not used for the longest time; count a use."""
        oldest = None
        with self._lock:
            if self._closed:
                return shared
            shared.users += 1
            self._kept[key] = shared
            if len(self._kept) > _KEPT:
                _, oldest = self._kept.popitem(last=False)
        self._drop(oldest)
        return shared

    def _make(self, description: Mapping[str, Any], where: str | None, seed: int | None) -> _Shared[_Drawer]:
        if description.get("kind") in WITH_STATE:
            raise ArgumentError(
                f"sampler {description['kind']!r} remembers which rows it has drawn, so it needs a name",
                hint="name_sampler(NAME, ...), then draw by the name",
            )
        sampler, storage = self._make_sampler(description, where), self.buffer.storage
        buffer: _Drawer
        if seed is None:
            buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, with_ids=True)
        else:
            buffer = SeededReplayBuffer(storage, sampler, seed=seed)
        return _Shared((_write(description), where, seed), buffer, sampler.detach)

    # -- named samplers --------------------------------------------------------------------------

    def name_sampler(
        self, name: str, sampler: Mapping[str, Any], where: str | None, seed: int | None
    ) -> None:
        """Make a sampler that all share who draw by its name.

        Raises:
            ArgumentError: The name is that of a kind, or a consuming sampler gets a seed.
            StateError: There is a different sampler of this name, there are too many named samplers, or rows
                cannot be drawn this way here.
        """
        if name in SAMPLERS:
            raise ArgumentError(f"{name!r} is a kind of samplers, so no sampler can have this name",
                                kind="request", hint="use another name")  # fmt: skip
        wanted = _write(sampler), where, seed
        with self._making.use(name) as making, making:
            if self._is_named(name, wanted):
                return
            buffer = self._build(sampler, where, seed)
            is_own = buffer.storage is self.buffer.storage
            shared = _Shared(wanted, buffer, buffer.sampler.detach if is_own else buffer.close)
            try:
                with self._lock:
                    self._check_room()
                    self._named[name] = shared
            except StateError:
                shared.end()
                raise

    def _is_named(self, name: str, wanted: _Wanted) -> bool:
        """Return whether there is this sampler; raise StateError if it is different, or cannot be made."""
        with self._lock:
            known = self._named.get(name)
            if known is None:
                self._check_room()
                return False
        if known.wanted != wanted:
            raise StateError(
                f"there is already another sampler {name!r}",
                kind="exists",
                hint="delete it first, with DELETE",
            )
        return True

    def _check_room(self) -> None:
        if self._closed:
            raise StateError("the store is closed")
        if len(self._named) >= _KEPT:
            raise StateError(
                f"there are already {_KEPT} named samplers", hint="delete one first, with DELETE"
            )

    def _build(
        self, description: Mapping[str, Any], where: str | None, seed: int | None
    ) -> TensorDictReplayBuffer:
        storage = self.buffer.storage
        if description.get("kind") == "consuming":
            if storage.follows:
                raise StateError(
                    "a read-only server does not count rows",
                    hint="send the request to the server that writes",
                )
            if seed is not None:
                raise ArgumentError("sampler 'consuming' does not take a seed: leave it out", kind="request")
            sampler = self._make_sampler(description, where)
            return TensorDictReplayBuffer(storage=storage, sampler=sampler, with_ids=True)
        if storage.manifest is None or storage.path is None:
            raise StateError(
                "rows in RAM have no named samplers: passes over them belong to their buffer's own sampler",
                hint="use a store on disk: expstore.open(path)",
            )
        # Passes belong to this sampler alone: it opens the store as another process would.
        sampler = self._make_sampler(description, where)
        reader = FollowerStorage(storage.path, settings=Settings(mode="r", seed=seed))
        try:
            return TensorDictReplayBuffer(storage=reader, sampler=sampler, with_ids=True)
        except BaseException:
            reader.close()
            raise

    def _build_unknown_error(self, name: str) -> NotFoundError:
        with self._lock:
            names = ", ".join(sorted(self._named))
        hint = f"the named samplers are {names}" if names else "no sampler is named yet"
        return NotFoundError(f"there is no sampler {name[:120]!r}", hint=hint)

    def forget_sampler(self, name: str) -> None:
        """Forget a named sampler; draws that use it end normally.

        Raises:
            NotFoundError: There is no sampler of this name.
        """
        with self._lock:
            shared = self._named.pop(name, None)
        if shared is None:
            raise self._build_unknown_error(name)
        self._drop(shared)

    def samplers(self) -> dict[str, dict[str, Any]]:
        """Return the descriptions of the named samplers, by name."""
        with self._lock:
            return {name: json.loads(shared.wanted[0]) for name, shared in sorted(self._named.items())}

    # -- life --------------------------------------------------------------------------------------

    def attach(self, storage: ReadView) -> None:
        """Drop the samplers if the buffer has another storage."""
        if self._drawn_from is not storage:
            self._end_samplers()
            self._drawn_from = storage

    def leave_parent(self) -> None:
        """Drop the samplers in a forked child; the parent's threads may hold the locks."""
        self._begin()

    # -- rows --------------------------------------------------------------------------------------

    def set_priorities(self, ids: IntArray, values: NDArray[np.float64]) -> int:
        """Set the priorities of rows; return how many are still there.

        Raises:
            RemoteError: The process that owns the store of a shared copy does not answer.
        """
        storage = self._check_open()
        try:
            found = self.buffer.update_priority(id=torch.from_numpy(ids), priority=torch.from_numpy(values))
        except RemoteError as exc:
            raise RemoteError(exc.message, kind="unreachable", hint=exc.hint) from exc
        count = int(found)
        if storage.follows:
            with self._counting:
                self._set = time.monotonic()
                self._largest = max(self._largest, find_largest(values, count))
        return count

    def _follow_priorities(self) -> None:
        """Read the priorities that this shared copy has set: its owner writes them a moment later."""
        if self._set is None:
            return
        with self._counting:
            now, since = time.monotonic(), self._set
            if since is None or now - self._followed < _OWNER_SECONDS:
                return
            self._set = None if now - since > 5 * _OWNER_SECONDS else since
            self._followed = now
        self.buffer.storage.follow(priorities=True)

    def note_write(self) -> None:
        """Notify the samplers that draw from the same storage that rows were written."""
        for shared in list(self._named.values()):
            if shared.buffer.storage is self.buffer.storage:
                shared.buffer.sampler.on_write(_NO_IDS)

    def close(self) -> None:
        """End all samplers, and close the readers of the store; the buffer stays open."""
        self._closed = True
        self._end_samplers()

    def _end_samplers(self) -> None:
        with self._lock:
            dropped: list[_Shared[Any]] = [*self._kept.values(), *self._named.values()]
            self._kept.clear()
            self._named.clear()
        with contextlib.ExitStack() as ends:
            for shared in dropped:
                ends.callback(self._drop, shared)


def _resolve(sampler: str | Mapping[str, Any] | None) -> str | Mapping[str, Any]:
    """Return a description if there is no sampler, or its name is that of a kind."""
    if sampler is None:
        return {"kind": "uniform"}
    return {"kind": sampler} if isinstance(sampler, str) and sampler in PLAIN else sampler


def _write(description: Mapping[str, Any]) -> str:
    return json.dumps(description, separators=(",", ":"))


def _refuse_settings(*given: object) -> None:
    """Raise ArgumentError if a request for a named sampler has settings of its own."""
    if any(value is not None for value in given):
        raise ArgumentError(
            "a named sampler has its own where and seed: leave where, seed and draw out", kind="request"
        )
