"""Which batch comes next: a handle's sampler, its random numbers, and batches made ahead.

Buffers are built on it and say how a batch is made. It keeps the promise that draw k is the same after a
restart; it never reads a row.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import Any, ClassVar

import torch

from expstore.buffers.prefetch import Made, Prefetcher, Request
from expstore.buffers.rng import Draws, GivenDraws, Turn, set_state
from expstore.buffers.store_handle import StoreHandle
from expstore.core.rate_limiters import RateLimiter
from expstore.core.values import Selection
from expstore.errors import StateError
from expstore.samplers.base import Sampler
from expstore.samplers.torchrl_adapter import adapt, given
from expstore.storages.read_view import ReadView

__all__ = ["DrawingHandle"]


class DrawingHandle(StoreHandle):
    """Draw from a storage.

    Threads: any number may draw. Processes: a forked or pickled handle draws batches of its own, by the
    store's seed. Crashes: after a kill the next batch is the next one; after a power cut the one after the
    last sync.

    Args:
        storage: What is held.
        sampler: What makes up a batch; one written for torchrl, too.
        limiter: How fast rows come and go; None: as fast as they can.
        prefetch: How many batches are made ahead.
        generator: What all draws follow from; None: the store's seed.
    """

    _bound: ClassVar[tuple[str, ...]] = ("_draws", "_generator", "_ahead")
    _generator: torch.Generator | None = None

    def __init__(
        self,
        storage: ReadView,
        sampler: Sampler,
        *,
        prefetch: int,
        generator: torch.Generator | None,
        limiter: RateLimiter | None = None,
    ) -> None:
        if limiter is not None and storage.follows:
            raise ValueError("a follower is not limited: give the rate_limiter to the buffer that writes")
        super().__init__(storage)
        self._sampler = adapt(sampler)
        self._limiter = limiter
        self._prefetch = prefetch
        self._generator = generator
        self._attached(storage)

    def _attached(self, storage: ReadView) -> None:
        self._forget_ahead()
        generator = self._generator
        self._unbind()  # schema and seed may be others
        self._generator = generator
        self._sampler.attach(storage)
        if self._limiter is not None and not storage.follows:
            self._limiter.attach(storage)
        if self._generator is not None:
            self._draws = GivenDraws(self._generator, storage.draws, resume=True)
            storage.draws.watch(self._draws)

    def _rest(self) -> None:
        if "_sampler" in self.__dict__ and self._sampler.filter is not None:
            self._sampler.filter.rest()

    def _go_on(self) -> None:
        if "_sampler" in self.__dict__ and self._sampler.filter is not None:
            self._sampler.filter.go_on()

    def _part(self) -> None:
        ahead = "_ahead" in self.__dict__
        super()._part()
        if ahead:
            # The thread that made batches is not here, but a lock that it held then would be.
            self._parents_sampler = self._sampler  # kept, as the parent's storage is
            self._sampler = copy.copy(self._sampler)
            if "_storage" in self.__dict__:
                self._sampler.attach(self._storage)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; one that has its rows in RAM goes on by a generator of its own."""
        state = super().__getstate__()
        if "_storage" in state and self._generator is not None:
            given, draws = self._generator, self._draws
            # Batches that are made ahead have moved the generator; the copy makes them itself.
            now = draws.state_now(self._storage.draws) if isinstance(draws, GivenDraws) else given.get_state()
            state["_copied"] = now, str(given.device)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        copied = state.pop("_copied", None)
        super().__setstate__(state)
        if copied is not None:
            generator = torch.Generator(copied[1])
            generator.set_state(copied[0])
            self.set_rng(generator)

    @cached_property
    def _draws(self) -> Draws:
        worker = torch.utils.data.get_worker_info()
        self._storage.draws.watch(None)
        return Draws(self._storage.seed, self._storage.draws.stream() if worker is None else worker.seed)

    @cached_property
    def _ahead(self) -> Prefetcher:
        return Prefetcher(self._prefetch)

    def _changes(self) -> object:
        """Return what is another value when batches made before are not those of now."""
        return self._storage.changes.number, self._storage.epochs.fields

    def _forget_ahead(self) -> None:
        if "_ahead" in self.__dict__:
            self._ahead.drop(_Batches(self))

    @abstractmethod
    def _make(self, turn: Turn, request: Request, instead: Selection | None = None) -> tuple[Any, Selection]:
        """Make the batch of a turn, if need be instead of rows that have left."""

    def _next_batch(self, request: Request) -> tuple[Any, Selection]:
        """Return the next batch and its rows."""
        if self._limiter is None or self._storage.follows:
            return self._hand_out(request)
        with self._limiter.sampling(request.size) as count:
            batch, selection = self._hand_out(request)
            count((selection.anchors or selection).ids.size)
        return batch, selection

    def _hand_out(self, request: Request) -> tuple[Any, Selection]:
        self._check_readable()
        if self._prefetch:
            made = self._ahead.next(_Batches(self), request)
            return made.batch, made.selection
        batch, selection = self._make(self._draws.next(self._storage.draws), request)
        self._sampler.hand_out(self._storage, selection)
        return batch, selection

    def _check_readable(self) -> None:
        if self._storage.closed:
            raise StateError("the store is closed", hint="open it again with expstore.open()")
        if not self._sampler.left(self._storage):
            raise self._sampler.nothing(self._storage)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw by another generator, as it stands, from the next batch on; None: by the store's seed."""
        self._forget_ahead()
        self.__dict__.pop("_draws", None)
        self._generator = generator
        if generator is not None:
            self._draws = GivenDraws(generator, self._storage.draws, resume=False)
            self._storage.draws.watch(self._draws)

    def _sampler_settings(self) -> dict[str, Any]:
        return self._sampler.settings()

    def _set_sampler(self, settings: Mapping[str, Any]) -> None:
        self._sampler.set_settings(settings)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes, under torchrl's names: of storages in RAM the rows, too.

        Rows of a store on disk stay where they are (`dumps`); of those it says which they are.
        """
        storage, draws = self._storage, self.__dict__.get("_draws")  # to ask is not to draw
        generator = None
        if isinstance(draws, GivenDraws):
            generator = draws.state_now(storage.draws)
        drawn = {"seed": storage.seed, "draw": storage.draws.number, "progress": list(storage.draws.progress)}
        return {
            "_storage": storage.state_dict(),
            "_sampler": self._sampler.state_dict(),
            "_rng": generator,
            "_draws": drawn | {"last_id": storage.last},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; buffers say more."""
        storage, state = self._storage, state_dict
        self._check_state(state)
        writer = storage.writer()
        generator = state["_rng"]
        if self._generator is not None:
            set_state(self._generator, generator)
        if "rows" in state["_storage"]:
            writer.load_state_dict(state["_storage"])
        self._forget_ahead()
        if self._generator is not None:
            self.set_rng(self._generator)
        self._sampler.load_state_dict(state["_sampler"])
        if "rows" not in state["_storage"]:  # else the storage has them again
            writer.draws.set(int(state["_draws"]["draw"]), state["_draws"]["progress"])
            writer.sync()

    def _check_state(self, state: Mapping[str, Any]) -> None:
        """Raise an error if a state does not fit."""
        storage, own = self._storage, self._sampler.state_dict()
        if (
            not {"_storage", "_sampler", "_rng", "_draws"} <= state.keys()
            or state["_sampler"].keys() != own.keys()
        ):
            raise StateError(f"that is no state of a buffer with {self._sampler!r}")
        for name in own.keys() & {"where", "weight"}:
            if state["_sampler"][name] != own[name]:
                raise StateError(f"the state is of a sampler with {name}={state['_sampler'][name]!r}")
        if (state["_rng"] is None) != (self._generator is None):
            having, lacking = ("state", "buffer") if self._generator is None else ("buffer", "state")
            raise StateError(f"the {having} draws by a generator, the {lacking} by the store's seed")
        seed, last = state["_draws"]["seed"], state["_draws"]["last_id"]
        if "rows" in state["_storage"]:
            return
        if (seed, last) != (storage.seed, min(last, storage.last)):
            raise StateError(
                f"the state is of a store with seed {seed} and rows up to id {last}, "
                f"this one has seed {storage.seed} and rows up to id {storage.last}",
                hint="open the store that it was taken of, or bring its rows here with dumps() and loads()",
            )

    def close(self) -> None:
        """Flush, bring the index up to date for other programs, let others open the store."""
        if self._limiter is not None:
            self._limiter.close()
        if "_ahead" in self.__dict__:
            self._ahead.close(_Batches(self))
        self._sampler.detach()
        super().close()

    def refresh(self) -> None:
        """Have what is derived from rows follow them: `where`, `weight`, and in a follower episodes.

        `where` and `weight` of the sampler are evaluated for all rows as they are now: the next batches are
        those of any other process, or run, with the same rows, seed and number of the draw. In a follower
        this also brings episodes, and, after the writer has stopped, its last rows. While it writes new rows
        show by themselves, those of small batches (up to 8 rows of 16 KiB together) within 0.1 s: they are
        not waited for. `sql` and `stats` do that, too.

        Raises:
            QueryError: `where` or `weight` cannot be computed, or a weight is not a number from 0 on.
            StorageError: The store cannot be read.
        """
        super().refresh()
        if self._sampler.filter is not None:
            self._sampler.refresh(self._storage)
            self._forget_ahead()

    def stats(self) -> dict[str, Any]:
        """Return facts about the store that JSON can keep."""
        ahead = len(self._ahead) if "_ahead" in self.__dict__ else 0
        limited = self._limiter is not None and not (self._storage.follows or self._storage.closed)
        limits = self._limiter.describe() if self._limiter is not None and limited else None
        return super().stats() | {"prefetch_queue_size": ahead, "rate_limiter": limits}

    @property
    def sampler(self) -> Any:
        """What makes up a batch, as it was given."""
        return given(self._sampler)

    def set_sampler(self, sampler: Any) -> Any:
        """Draw by another sampler from the next batch on; return the one before.

        Draws are counted on; a sampler that keeps a place in the store begins anew, unless the one before
        was of its kind.

        Raises:
            StateError: The store is closed.
            TypeError: It is no sampler.
            ValueError: It does not fit this buffer; nothing was changed.
            QueryError: The rows have no such fields as its `where` or `weight` name.
        """
        storage, former = self._storage, self._sampler
        if storage.closed:
            raise StateError("the store is closed", hint="open it again with expstore.open()")
        if sampler is not given(former):
            sampler = adapt(sampler)
        else:
            sampler = former
        self._check_sampler(sampler)
        self._forget_ahead()
        priorities = storage.priorities
        within, priorities.within = priorities.within, False  # what the former one may have asked for
        try:
            sampler.attach(storage)
        except BaseException:
            priorities.within = within
            raise
        if sampler is not former:
            former.detach()
        self._sampler = sampler
        return given(former)

    def _check_sampler(self, sampler: Sampler) -> None:
        """Raise ValueError for one that does not fit."""


class _Batches:
    """What a `Prefetcher` asks of a handle."""

    def __init__(self, handle: DrawingHandle) -> None:
        self._handle = handle

    def turn_ahead(self, number: int) -> Turn:
        return self._handle._draws.ahead(self._handle._storage.draws, number)

    def make(self, turn: Turn, request: Request, instead: Selection | None = None) -> Made:
        handle = self._handle
        handle._check_readable()
        changes = handle._changes()
        return Made(*handle._make(turn, request, instead), changes)

    def stands(self, made: Made | None) -> bool:
        handle = self._handle
        if made is None:
            return handle._draws.in_step
        storage = handle._storage
        return made.changes == handle._changes() and handle._sampler.stands(storage, made.selection)

    def readable(self, made: Made) -> bool:
        ids = made.selection.ids
        oldest = made.selection.oldest or (int(ids.min()) if ids.size else 0)
        return not oldest or oldest > self._handle._storage.window.low

    def hand_out(self, made: Made) -> None:
        self._handle._draws.hand_out(self._handle._storage.draws)
        self._handle._sampler.hand_out(self._handle._storage, made.selection)

    def give_back(self) -> None:
        self._handle._draws.give_back()
        self._handle._sampler.rewind(self._handle._storage)
