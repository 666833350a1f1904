"""Samplers in requests: a kind and its parameters, validated before a sampler is made.

Used by the sampling routes, which keep the samplers. A sampler with state from draw to draw has a name and is
shared by all clients that use it.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar, get_args

import numpy as np
from pydantic import BaseModel, Field

import expstore
from expstore.api.errors import Refusal
from expstore.api.per_key import PerKey
from expstore.api.request_models import RequestModel
from expstore.api.where_conditions import check_condition, limit_condition
from expstore.buffers.draw_masses import record_masses
from expstore.buffers.seeded_buffer import SeededReplayBuffer
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.values import Mass, Selection
from expstore.errors import NotFoundError, StateError
from expstore.rate_limiters import RateLimiter
from expstore.samplers.base import Sampler
from expstore.samplers.names import make_sampler

Rows = Annotated[int, Field(ge=1, le=1_000_000)]


class _Described(RequestModel):
    """A sampler described in a request."""

    kind: str = Field(description="Kind of the sampler.")

    def make(self, where: str | None) -> Sampler:
        """Return a new sampler."""
        return make_sampler(self.kind, **self.model_dump(exclude={"kind"}), where=where)


class _Sliced(_Described):
    """Samplers of slices: consecutive steps of one episode."""

    slice_len: Rows | None = Field(None, description="Steps of a slice; or give `num_slices`.")
    num_slices: Rows | None = Field(None, description="Slices of a batch; or give `slice_len`.")
    strict_length: bool = Field(True, description="Whether to skip shorter episodes.")

    def make(self, where: str | None) -> Sampler:
        """Return a new sampler."""
        if (self.slice_len is None) == (self.num_slices is None):
            raise Refusal(422, f"sampler {self.kind!r} takes either slice_len or num_slices")
        return super().make(where)


class _ByPriority(_Described):
    """Samplers with probabilities that follow priorities."""

    alpha: float = Field(0.6, ge=0, le=10, description="Exponent of priorities; 0: uniform.")
    beta: float = Field(0.4, ge=0, le=10, description="Exponent of `priority_weight`; 1: no bias.")
    eps: float = Field(1e-8, ge=0, le=1, description="Added to priorities, so that 0 can be drawn.")


class _InPasses(_Described):
    """Samplers that draw everything once per pass."""

    shuffle: bool = Field(True, description="Whether the order is random.")
    drop_last: bool = Field(False, description="Whether to skip a smaller last batch.")


class Uniform(_Described):
    """Draw every row with the same probability."""

    kind: Literal["uniform"] = Field(default="uniform", description="Kind of the sampler.")


class Prioritized(_ByPriority):
    """Draw rows with probabilities that follow priorities (Schaul et al. 2016)."""

    kind: Literal["prioritized"] = Field(description="Kind of the sampler.")


class Slices(_Sliced):
    """Draw slices: consecutive steps of one episode each."""

    kind: Literal["slices"] = Field(description="Kind of the sampler.")
    by: Literal["trajectory", "start"] = Field(
        "trajectory", description="What has equal probability: every episode, or every start of a slice."
    )


class PrioritizedSlices(_Sliced, _ByPriority):
    """Draw slices; the probability of their first steps follows priorities."""

    kind: Literal["prioritized_slices"] = Field(description="Kind of the sampler.")


class Recent(_Described):
    """Draw newer rows with a higher probability."""

    kind: Literal["recency"] = Field(description="Kind of the sampler.")
    half_life: float | None = Field(None, gt=0, le=1e15, description="Rows after which the chance is halved.")
    newest: int | None = Field(None, ge=1, le=1 << 62, description="Draw only from this many newest rows.")


class WithoutReplacement(_InPasses):
    """Draw every row once per pass."""

    kind: Literal["without_replacement"] = Field(description="Kind of the sampler.")


class SlicesWithoutReplacement(_Sliced, _InPasses):
    """Draw one slice of every trajectory per pass."""

    kind: Literal["slices_without_replacement"] = Field(description="Kind of the sampler.")


class StreamingSlices(_Described):
    """Draw each slice once, the new ones first."""

    kind: Literal["streaming_slices"] = Field(description="Kind of the sampler.")
    slice_len: Rows = Field(description="Steps of a slice.")
    strict_length: bool = Field(True, description="Whether to skip shorter episodes.")

    def make(self, where: str | None) -> Sampler:
        """Return a new sampler."""
        if where is not None:
            raise Refusal(422, "streaming_slices does not take where: leave it out")
        return make_sampler(self.kind, **self.model_dump(exclude={"kind"}))


class Consuming(_Described):
    """Draw every row `max_sample_count` times, counted by the store over all clients."""

    kind: Literal["consuming"] = Field(description="Kind of the sampler.")
    max_sample_count: int = Field(1, ge=1, le=1 << 31, description="How often each row is drawn.")


_Stateless = Uniform | Prioritized | Slices | PrioritizedSlices | Recent
_WithState = WithoutReplacement | SlicesWithoutReplacement | StreamingSlices | Consuming
#: Samplers without state from draw to draw.
Spec = Annotated[_Stateless, Field(discriminator="kind")]
#: All samplers.
AnySpec = Annotated[_Stateless | _WithState, Field(discriminator="kind")]


def _by_kind(models: Any) -> dict[str, type[_Described]]:
    """Return the models of a union, by the kind of their samplers."""
    return {get_args(model.model_fields["kind"].annotation)[0]: model for model in get_args(models)}


#: Samplers that a request may give by name only, with default parameters.
_PLAIN = _by_kind(_Stateless)
#: Names that no named sampler may have.
_KINDS = frozenset(_PLAIN | _by_kind(_WithState))
_KEPT = 32
#: A buffer that draws batches for requests.
_Drawer = TensorDictReplayBuffer | SeededReplayBuffer
_Buffer = TypeVar("_Buffer", bound=_Drawer)
#: A sampler's description as JSON, its condition, and its seed.
_Wanted = tuple[str, str | None, int | None]
_NO_IDS = np.zeros(0, np.int64)


class _Shared(Generic[_Buffer]):
    """A buffer that several requests draw with.

    Args:
        wanted: What it was made for.
        buffer: The buffer.
        end: Called when it is no longer kept, and no thread draws with it.
    """

    def __init__(self, wanted: _Wanted, buffer: _Buffer, end: Callable[[], None]) -> None:
        self.wanted, self.buffer, self.end = wanted, buffer, end
        #: Number of threads that draw with it, and 1 while it is kept; `SamplerCache` counts.
        self.users = 1


class Limited(BaseModel):
    """What the rate limiter of a store counts."""

    rows: int = Field(description="Number of readable rows.")
    inserted: int = Field(description="Number of rows that were ever written.")
    sampled: int = Field(description="Number of rows that were sampled.")
    samples_per_insert: float = Field(description="Average number of samples per row that it permits.")


class Drawn(NamedTuple):
    """A batch.

    Args:
        batch: The rows.
        facts: What they were drawn from, as the result of `SamplerCache.weigh`.
    """

    batch: Any
    facts: dict[str, Any]


class SamplerCache:
    """Keep the samplers of one store, and draw batches with them.

    Threads: any number may use it. Crashes: named samplers are kept in memory only.

    Args:
        path: The store's folder.
        rb: The opened store.
        limiter: The rate limiter that `rb` also uses; None: there is no limit.
        seconds: Maximum duration of a query of a condition in seconds.
    """

    def __init__(
        self, path: Path, rb: TensorDictReplayBuffer, limiter: RateLimiter | None, *, seconds: float
    ) -> None:
        self._path, self._rb, self._limiter, self._seconds = path, rb, limiter, seconds
        #: Held while samplers are looked up, and never while one is made or draws.
        self._lock = Lock()
        #: Held while one sampler is made, by its description or name.
        self._making = PerKey(Lock)
        self._kept: OrderedDict[_Wanted, _Shared[_Drawer]] = OrderedDict()
        self._named: OrderedDict[str, _Shared[TensorDictReplayBuffer]] = OrderedDict()
        self._closed = False
        self._counting = Lock()
        #: Number of rows drawn since the server opened the store.
        self.rows_drawn = 0

    def draw(
        self, spec: Any, where: str | None, seed: int | None, number: int | None, batch_size: int
    ) -> Drawn:
        """Return a batch, and what it was drawn from.

        Args:
            spec: A sampler's description or name; None: uniform.
            where: Condition on the rows; None: all rows.
            seed: Seed of draws that are independent of the store's; None: the store's draws.
            number: Number of the draw of this seed; None: the next one of this seed and sampler.
            batch_size: Number of rows.

        Raises:
            NotFoundError: There is no sampler of this name.
            NotReadyError: There are too few rows that may be drawn, or other clients must write or sample
                first.
        """
        drawn = self._draw_limited(spec, where, seed, number, batch_size)
        with self._counting:
            self.rows_drawn += drawn.batch.numel()
        return drawn

    def _draw_limited(
        self, spec: Any, where: str | None, seed: int | None, number: int | None, batch_size: int
    ) -> Drawn:
        with record_masses() as masses:
            if spec is None and where is None and seed is None:
                batch = self._rb.sample(batch_size)
            elif self._limiter is None:
                batch = self._draw(spec, where, seed, number, batch_size)
            else:
                with self._limiter.sampling(batch_size) as count:
                    batch = self._draw(spec, where, seed, number, batch_size)
                    count(batch.numel())
        return Drawn(batch, self._describe(masses[-1] if masses else None))

    def weigh(self, spec: Any, where: str | None, seed: int | None, batch_size: int) -> dict[str, Any]:
        """Return what a batch would be drawn from now, as facts by name. The arguments are those of `draw`.

        Raises:
            NotFoundError: There is no sampler of this name.
        """
        spec = self._resolve(spec)
        if isinstance(spec, str):
            _refuse_settings(where, seed)
            with self._use_named(spec) as named:
                told = json.loads(named.wanted[0])
                unit = None if told.get("num_slices") else told.get("slice_len") or 1
                mass = named.buffer.sampler.mass(named.buffer.storage, batch_size)
                return self._describe(mass) | {"unit": unit}
        with self._use_buffer(spec, where, seed) as buffer:
            return self._describe(buffer.sampler.mass(self._rb.storage, batch_size))

    def _describe(self, mass: Mass | None) -> dict[str, Any]:
        """Return what a batch is drawn from as facts by name; `mass` is None if the sampler has no mass."""
        facts: dict[str, Any] = {"mass": None} if mass is None else {"mass": mass.total}
        if mass is not None:
            facts |= {name: getattr(mass, name) for name in ("rows", "smallest", "beta", "unit")}
        limits = self.read_limits()
        return facts | {
            "largest_priority": float(self._rb.storage.priorities.largest),
            "limits": None if limits is None else limits.model_dump(),
        }

    def read_limits(self) -> Limited | None:
        """Return the counts of the rate limiter and its ratio; None if there is no limiter."""
        if self._limiter is None:
            return None
        return Limited(**self._limiter.count()._asdict(), samples_per_insert=self._limiter.samples_per_insert)

    def _resolve(self, spec: Any) -> Any:
        """Return a description if the name is that of a kind."""
        if isinstance(spec, str) and spec in _PLAIN:
            return _PLAIN[spec].model_validate({"kind": spec})
        return spec

    def _draw(
        self, spec: Any, where: str | None, seed: int | None, number: int | None, batch_size: int
    ) -> Any:
        spec = self._resolve(spec)
        if isinstance(spec, str):
            _refuse_settings(where, seed, number)
            storage = self._rb.storage
            with self._use_named(spec) as named:
                if named.buffer.storage is not storage:
                    storage.drain()  # otherwise small batches would become visible a moment later
                return named.buffer.sample(batch_size)
        with self._use_buffer(spec, where, seed) as buffer:
            if isinstance(buffer, SeededReplayBuffer):
                return buffer.draw(number, batch_size)
            return buffer.sample(batch_size)

    @contextlib.contextmanager
    def _use_buffer(self, spec: Any, where: str | None, seed: int | None) -> Iterator[_Drawer]:
        """Yield the buffer that draws with a described sampler, which is made if it is not kept."""
        spec = Uniform() if spec is None else spec
        key = spec.model_dump_json(), where, seed
        shared = self._take(self._kept, key)
        if shared is None:
            with self._making.use(key) as making, making:
                shared = self._take(self._kept, key) or self._keep(key, self._make(spec, where, seed))
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

    def _make(self, spec: Any, where: str | None, seed: int | None) -> _Shared[_Drawer]:
        sampler, storage = self._sampler(spec, where), self._rb.storage
        buffer: _Drawer
        if seed is None:
            buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, with_ids=True)
        else:
            buffer = SeededReplayBuffer(storage, sampler, seed=seed)
        return _Shared((spec.model_dump_json(), where, seed), buffer, sampler.detach)

    def _sampler(self, spec: Any, where: str | None) -> Sampler:
        sampler: Sampler = spec.make(None if where is None else check_condition(where))
        limit_condition(sampler, self._seconds)
        return sampler

    @contextlib.contextmanager
    def choose(
        self, spec: Any, where: str | None, seed: int, batch_size: int, batches: int
    ) -> Iterator[tuple[list[Selection], Sampler]]:
        """Yield the rows of some draws without reading or counting them, and the sampler that chose them.

        The rate limiter is not asked, and no other draw changes.

        Args:
            spec: A sampler's description, or the name of a kind; None: uniform.
            where: Condition on the rows; None: all rows.
            seed: Seed of the draws; their numbers are 0, 1 and so on.
            batch_size: Number of rows of a draw.
            batches: Number of draws.

        Raises:
            Refusal: 422: a named sampler is asked for.
            NotReadyError: There are too few rows that may be drawn.
        """
        if isinstance(spec, str):
            if spec not in _PLAIN:
                raise Refusal(422, f"sampler {spec[:100]!r} is not the name of a kind without state",
                              hint=f"describe a sampler, or use {', '.join(_PLAIN)}")  # fmt: skip
            spec = _PLAIN[spec].model_validate({"kind": spec})
        with self._use_buffer(spec, where, seed) as buffer:
            assert isinstance(buffer, SeededReplayBuffer), "it has a seed"
            yield [buffer.choose(number, batch_size) for number in range(batches)], buffer.sampler

    # -- named samplers --------------------------------------------------------------------------

    def name(self, name: str, spec: Any, where: str | None, seed: int | None) -> None:
        """Make a sampler that all clients share by its name.

        Raises:
            Refusal: 422: the name is that of a kind.
            StateError: There is a different sampler of this name, there are too many named samplers, or a
                read-only server cannot use this kind.
        """
        if name in _KINDS:
            raise Refusal(422, f"{name!r} is a kind of samplers, so no sampler can have this name",
                          hint="use another name")  # fmt: skip
        wanted = spec.model_dump_json(), where, seed
        with self._making.use(name) as making, making:
            if self._is_named(name, wanted):
                return
            buffer = self._build(spec, self._sampler(spec, where), seed)
            is_own = buffer.storage is self._rb.storage
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

    def _build(self, spec: Any, sampler: Sampler, seed: int | None) -> TensorDictReplayBuffer:
        storage = self._rb.storage
        if isinstance(spec, Consuming):
            if storage.follows:
                raise StateError(
                    "a read-only server does not count rows",
                    hint="send the request to the server that writes",
                )
            if seed is not None:
                raise Refusal(422, "sampler 'consuming' does not take a seed: leave it out")
            return TensorDictReplayBuffer(storage=storage, sampler=sampler, with_ids=True)
        # Passes belong to this sampler alone: it opens the store as another process would.
        return expstore.open(self._path, mode="r", sampler=sampler, seed=seed)

    def _build_unknown_error(self, name: str) -> NotFoundError:
        with self._lock:
            names = ", ".join(sorted(self._named))
        hint = f"the named samplers are {names}" if names else "no sampler is named yet"
        return NotFoundError(f"there is no sampler {name[:120]!r}", hint=hint)

    def forget(self, name: str) -> None:
        """Delete a named sampler; draws that use it end normally.

        Raises:
            NotFoundError: There is no sampler of this name.
        """
        with self._lock:
            shared = self._named.pop(name, None)
        if shared is None:
            raise self._build_unknown_error(name)
        self._drop(shared)

    def describe(self) -> dict[str, str]:
        """Return the named samplers: name -> description as JSON."""
        with self._lock:
            return {name: shared.wanted[0] for name, shared in sorted(self._named.items())}

    def note_write(self) -> None:
        """Notify the samplers that draw from the same storage that rows were written."""
        for shared in list(self._named.values()):
            if shared.buffer.storage is self._rb.storage:
                shared.buffer.sampler.on_write(_NO_IDS)

    def close(self) -> None:
        """End all samplers, and close the readers of the store."""
        with self._lock:
            self._closed = True
            dropped: list[_Shared[Any]] = [*self._kept.values(), *self._named.values()]
            self._kept.clear()
            self._named.clear()
        with contextlib.ExitStack() as ends:
            for shared in dropped:
                ends.callback(self._drop, shared)


def _refuse_settings(*given: object) -> None:
    """Raise Refusal if a request for a named sampler has settings of its own."""
    if any(value is not None for value in given):
        raise Refusal(422, "a named sampler has its own where and seed: leave where, seed and draw out")
