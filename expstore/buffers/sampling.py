"""How batches are drawn: draw number to sampler, sampler to rows, rows to a batch.

`Sampling.next` is the whole path. Draw k is the same after a restart. It does not write rows.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from expstore.buffers.arguments import check_generator, resolve_part
from expstore.buffers.batch_builder import BatchBuilder
from expstore.buffers.draw_masses import MASSES
from expstore.buffers.prefetch import Made, Prefetcher, Request
from expstore.buffers.read_limits import READ_LIMIT
from expstore.buffers.rng import GivenDraws, set_state
from expstore.buffers.row_styles import RowStyle
from expstore.buffers.sample_units import SampleUnit, check_unit
from expstore.buffers.store_handle import Life, StoreHandle, StorePart
from expstore.core.draws import DrawNumber, Draws
from expstore.core.values import Array, Key, Selection
from expstore.errors import ArgumentError, ExpStoreError, StateError
from expstore.rate_limiters import RateLimiter
from expstore.samplers.base import Sampler
from expstore.samplers.consuming import consume_after
from expstore.samplers.torchrl_adapter import adapt, unwrap
from expstore.storages.read_view import OVERTAKEN, PATIENCE, ReadView, build_closed_error, forget_frames
from expstore.transforms import StepView

_LIMIT = 1000  # how often other rows are drawn before an error: a reader cannot make the writer wait
_UNLOCKED = contextlib.nullcontext()
_TRANSFORMS = 1 << 40  # the redraw number for transforms' random numbers; draws of rows never reach it


class Relabeling(Protocol):
    """Give rows of a batch other values than the stored ones, such as new goals."""

    #: Counts changes of the settings: batches that were made before the last one are stale.
    changes: int

    def look(
        self, storage: ReadView, rows: Selection, generator: np.random.Generator, view: StepView | None
    ) -> StepView | None:
        """Return a view that has read the rows for the new values; None: no row gets new values.

        Args:
            storage: Storage of the rows.
            rows: The rows of the batch.
            generator: The random numbers of this draw.
            view: The steps that step transforms have read; None: the chain has no step transform.
        """

    def user_of(self, key: Key) -> str | None:
        """Return a description of the user of a field; None: the relabeling does not use the field."""


class Sampling(StorePart):
    """Draw batches from a store.

    Threads: any number may draw. Processes: a forked or copied buffer draws its own batches, by the store's
    seed. Crashes: after a kill, sampling continues with the batch that would have followed; after a power
    failure, with the batch after the last sync.

    Args:
        store: The store.
        batches: Builds batches from columns.
        style: Which entries batches have besides the fields.
        sampler: Chooses rows; it may be written for torchrl.
        unit: What a sampled row is extended to; None: the row alone.
        limiter: Limits how fast rows may be sampled; None: no limit.
        prefetch: Number of batches that a background thread prepares.
        generator: Random generator of all draws; None: draws follow from the store's seed.
        draws: Random numbers to use instead of both; batches are then drawn by number.

    Raises:
        ArgumentError: A follower is given a limiter.
    """

    def __init__(
        self,
        store: StoreHandle,
        batches: BatchBuilder,
        style: RowStyle,
        sampler: Sampler,
        *,
        unit: SampleUnit | None = None,
        limiter: RateLimiter | None = None,
        prefetch: int = 0,
        generator: torch.Generator | None = None,
        draws: Draws | None = None,
    ) -> None:
        if limiter is not None and store.storage.follows:
            raise ArgumentError(
                "a follower cannot have a rate limiter; pass rate_limiter to the writing buffer"
            )
        self._store = store
        self._batches = batches
        self._style = style
        #: Chooses the rows of batches.
        self.sampler = adapt(sampler)
        self.sampler.limit_tokens(batches.budget)
        #: What a sampled row is extended to; None: the row alone.
        self.unit = unit
        #: Limits how fast rows may be sampled; None: no limit.
        self.limiter = limiter
        self._prefetch = prefetch
        #: Gives rows of batches other values than the stored ones; None: nothing does.
        self.relabeling: Relabeling | None = None
        self._fixed_draws = draws
        #: Random generator of all draws; None: draws follow from the store's seed.
        self.generator = generator
        self._draws: Draws | None = None
        self._prefetcher: Prefetcher | None = None
        self._of_parent: object = None  # samplers that a forked child keeps, like the parent's storage
        self._resumes = False  # whether the generator takes its state from the storage: from a loaded version

    def relabel_by(self, relabeling: Relabeling) -> None:
        """Relabel rows of all batches from now on."""
        self.relabeling = relabeling

    # -- the path of a sample ----------------------------------------------------------------------

    def next(self, request: Request) -> tuple[Any, Selection]:
        """Return the next batch and its rows.

        Raises:
            NotReadyError: The store is empty, or no more rows may be drawn.
        """
        storage, limiter = self._store.storage, self.limiter
        if limiter is None or storage.follows:
            return self._next(storage, request)
        with limiter.sampling(request.size) as count:
            batch, rows = self._next(storage, request)
            count((rows.anchors or rows).ids.size)
        return batch, rows

    def _next(self, storage: ReadView, request: Request) -> tuple[Any, Selection]:
        self.check_readable(storage)
        if self._prefetch:
            made = self._require_prefetcher().next(self, request)
            return made.batch, made.selection
        draw = (self._draws or self._require_draws()).next(storage.draws)
        batch, rows = self.draw(storage, draw, request, [])
        self.sampler.hand_out(storage, rows)
        return batch, rows

    def draw(
        self, storage: ReadView, draw: DrawNumber, request: Request, tried: list[Selection]
    ) -> tuple[Any, Selection]:
        """Make the batch of a draw; it does not count as returned.

        Others write to the store meanwhile, so a batch is made again for two reasons:

        - Fields were added or dropped: what was read by position may be values of another field. The same
          random numbers are used again.
        - Rows were overwritten by newer ones before they were copied, or a sample unit found that its anchors
          are gone: other rows are drawn, by the next random numbers of this draw. The fourth time, the writer
          is blocked.

        A row that is changed in place while it is copied is copied again by `ReadView.read`.

        Args:
            storage: The storage with the rows.
            draw: The draw.
            request: What was asked for.
            tried: The selections that were made for this draw, to which new ones are appended. A sampler is
                told of the last one, since it does not return the same rows twice.

        Raises:
            NotReadyError: No row can be drawn.
            StateError: A follower cannot read as fast as the writer overwrites rows.
        """
        draws, epochs, batches = self._draws or self._require_draws(), storage.epochs, self._batches
        redraw = declined = 0  # how often other rows were drawn, and how often the unit returned no rows
        while redraw < _LIMIT:
            fields = epochs.fields
            if fields & 1:
                with storage.lock:  # held for a moment, while fields are replaced in memory
                    continue
            try:
                generator = draws.numbers(draw, redraw)
                with storage.lock if redraw == PATIENCE else _UNLOCKED:
                    rows, columns, view = self._read(storage, generator, request.size, tried)
                if columns is not None and rows is not None:
                    numbers = draws.numbers(draw, _TRANSFORMS) if batches.transform.draws else None
                    batch = batches.of_sample(
                        storage, rows, columns, view, numbers, as_numpy=request.as_numpy
                    )
                    if epochs.fields == fields:
                        return batch, rows
            except Exception as exc:
                if epochs.fields == fields:
                    raise
                forget_frames(exc)
            if epochs.fields != fields:
                redraw = declined = 0
                continue
            redraw += 1
            declined += rows is None
            storage.counters.redraws += 1
        if declined == _LIMIT:
            raise StateError(
                f"the sample unit {self.unit!r} returned None {declined:,} times in a row",
                hint="`select` may return None only if anchors were removed; otherwise raise an error",
            )
        raise StateError(OVERTAKEN, hint="sample less at once, or give the store a larger capacity")

    def _read(
        self, storage: ReadView, generator: np.random.Generator, size: int, tried: list[Selection]
    ) -> tuple[Selection | None, list[Array] | None, StepView | None]:
        """Choose rows, and copy them.

        Returns:
            The rows, None if the sample unit finds none for what was drawn; their columns, None if some rows
            were overwritten meanwhile; and the view that step transforms need.
        """
        transform, limit, masses = self._batches.transform, READ_LIMIT.get(), MASSES.get()
        former, chosen = (tried[-1].anchors or tried[-1]) if tried else None, None
        sampler, epochs = self.sampler, storage.epochs
        is_kept = sampler.filter is not None and sampler.keeps_to_split
        if is_kept or not epochs.has_splits:
            if former is None:
                chosen = sampler.sample(storage, size, generator)
            else:
                chosen = sampler.sample_again(storage, former, generator)
        if chosen is None or (epochs.has_splits and not is_kept):  # the storage may just have got a split
            chosen = sampler.choose(storage, size, chosen or former, generator)
        tried.append(chosen)
        rows = chosen if self.unit is None else self.unit.select(chosen, storage)
        if masses is not None:
            masses.append(chosen.mass)
        if rows is None:
            return None, None, None
        if limit is not None:
            limit.check(storage, rows.ids)
        view = transform.look(storage, rows.ids, generator, newest=rows.newest) if transform.steps else None
        if self.relabeling is not None:
            view = self.relabeling.look(storage, rows, generator, view)
        if view is None:
            columns = storage.read(rows.ids)
            return rows, columns if storage.intact(rows.ids) else None, None
        columns = view.columns()
        if not view.intact:
            return rows, None, None
        return replace(rows, oldest=view.oldest, around=view.others), columns, view

    def check_readable(self, storage: ReadView) -> None:
        """Raise an error if no row can be drawn.

        Raises:
            NotReadyError: No row can be drawn.
            SchemaError: An option of batches does not fit the fields.
            StateError: The store is closed.
        """
        if storage.closed:
            raise build_closed_error()
        if self._batches.reshapes:
            self._batches.check_fields(storage.schema)
        if not self.sampler.count_left(storage):
            raise self.sampler.build_no_rows_error(storage)

    # -- random numbers ------------------------------------------------------------------------------

    def _require_draws(self) -> Draws:
        draws = self._draws
        if draws is None:
            draws = self._draws = self._fixed_draws or self._make_draws()
        return draws

    def _make_draws(self) -> Draws:
        worker, storage = torch.utils.data.get_worker_info(), self._store.storage
        storage.draws.watch(None)
        return Draws(storage.seed, storage.draws.stream() if worker is None else worker.seed)

    def set_rng(self, generator: torch.Generator | None) -> None:
        """Draw by another generator, in its present state, from the next batch on; None: by the seed."""
        check_generator(generator)
        self.drop_prefetched()
        self._draws, self.generator = None, generator
        if generator is not None:
            self._use(GivenDraws(generator, self._store.storage.draws, resume=False))

    def _use(self, draws: GivenDraws) -> None:
        self._draws = draws
        self._store.storage.draws.watch(draws)

    # -- prefetched batches: the methods that `Prefetcher` calls --------------------------------------

    def _require_prefetcher(self) -> Prefetcher:
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._prefetch)
        return self._prefetcher

    def drop_prefetched(self) -> None:
        """Drop the prefetched batches."""
        if self._prefetcher is not None:
            self._prefetcher.drop(self)

    def draw_ahead(self, number: int) -> DrawNumber:
        """Return the draw of the batch after `number` prefetched batches."""
        return self._require_draws().ahead(self._store.storage.draws, number)

    def make(self, draw: DrawNumber, request: Request, instead: Selection | None = None) -> Made:
        """Make the batch of a turn; `instead` is an earlier selection for it whose rows were overwritten."""
        storage = self._store.storage
        self.check_readable(storage)
        changes = self._changes()
        tried = [] if instead is None else [instead]
        return Made(*self.draw(storage, draw, request, tried), changes)

    def stands(self, made: Made | None) -> bool:
        """Return whether batches of the same age as this one (None: any batches) may still be returned."""
        if made is None:
            return self._require_draws().in_step
        return made.changes == self._changes() and self.sampler.stands(self._store.storage, made.selection)

    def readable(self, made: Made) -> bool:
        """Return whether all rows that were read for the batch are still readable."""
        ids = made.selection.ids
        oldest = made.selection.oldest or (int(ids.min()) if ids.size else 0)
        storage = self._store.storage
        here = storage.description.window_rows is None or not ids.size or int(ids.min()) > storage.window.low
        return not oldest or (here and oldest > storage.stored.low)

    def hand_out(self, made: Made) -> None:
        """Count the oldest prefetched batch as returned."""
        storage = self._store.storage
        self._require_draws().hand_out(storage.draws)
        self.sampler.hand_out(storage, made.selection)

    def give_back(self) -> None:
        """Reset the generator and the sampler to the last returned batch."""
        self._require_draws().give_back()
        self.sampler.rewind(self._store.storage)

    def _changes(self) -> object:
        """Return a token that changes when earlier batches become stale."""
        storage, relabeling = self._store.storage, self.relabeling
        return (
            storage.changes.number,
            storage.epochs.fields,
            [step.settings for step in self._batches.transform.steps],
            0 if relabeling is None else relabeling.changes,
        )

    # -- the sampler ---------------------------------------------------------------------------------

    @property
    def own_keys(self) -> frozenset[str]:
        """Root keys that samples carry besides the fields."""
        unit_keys: frozenset[str] = frozenset() if self.unit is None else self.unit.root_keys
        return self._style.own_keys(self.sampler, unit_keys)

    def set_sampler(self, sampler: Any) -> Any:
        """Draw by another sampler from the next batch on; see `ReplayBuffer.set_sampler`."""
        storage, former = self._store.check_open(), self.sampler
        sampler = former if sampler is unwrap(former) else adapt(resolve_part(sampler, "sample"))
        check_unit(self.unit, sampler)
        consume_after(None, sampler, prefetch=self._prefetch)
        sampler.limit_tokens(self._batches.budget)
        self.drop_prefetched()
        priorities = storage.priorities
        within, priorities.within = priorities.within, False  # the previous sampler may have set it
        try:
            sampler.attach(storage)
        except BaseException:
            priorities.within = within
            raise
        if sampler is not former:
            former.detach()
        self.sampler = sampler
        return unwrap(former)

    def users_of(self, key: Key) -> list[str]:
        """Return the parts of the buffer that read a field, as texts for a message."""
        users, sampler = [], self.sampler
        if sampler.filter is not None and key in sampler.filter.fields(self._store.storage):
            users.append(f"the sampler's filter ({sampler.filter})")
        if key in sampler.reads:
            users.append(f"the sampler ({sampler!r})")
        if self.unit is not None and key in self.unit.reads:
            users.append(f"the sample unit ({self.unit!r})")
        if self.relabeling is not None and (user := self.relabeling.user_of(key)) is not None:
            users.append(user)
        return users

    def refresh(self) -> None:
        """Evaluate `where` and `weight` of the sampler for all current rows."""
        if self.sampler.filter is not None:
            self.sampler.refresh(self._store.storage)
            self.drop_prefetched()

    def stats(self) -> dict[str, Any]:
        """Return statistics as values that JSON can store."""
        storage, limiter = self._store.storage, self.limiter
        limited = limiter is not None and not (storage.follows or storage.closed)
        return {
            "prefetch_queue_size": 0 if self._prefetcher is None else len(self._prefetcher),
            "rate_limiter": limiter.describe() if limiter is not None and limited else None,
        }

    # -- state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`; of storages in RAM with the rows."""
        storage, draws = self._store.storage, self._draws
        drawn = {"seed": storage.seed, "draw": storage.draws.number, "progress": list(storage.draws.progress)}
        return {
            "_storage": storage.state_dict(),
            "_sampler": self.sampler.state_dict(),
            "_rng": draws.state_now(storage.draws) if isinstance(draws, GivenDraws) else None,
            "_draws": drawn | {"last_id": storage.last},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`, which `check_state` has accepted."""
        storage = self._store.storage
        writer = storage.writer()
        if self.generator is not None:
            set_state(self.generator, state["_rng"])
        if "rows" in state["_storage"]:
            writer.load_state_dict(state["_storage"])
        self.drop_prefetched()
        if self.generator is not None:
            self.set_rng(self.generator)
        self.sampler.load_state_dict(state["_sampler"])
        if "rows" not in state["_storage"]:  # otherwise the storage has restored them
            writer.draws.set(int(state["_draws"]["draw"]), state["_draws"]["progress"])
            writer.sync()

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise StateError if a state does not fit."""
        storage, own = self._store.storage, self.sampler.state_dict()
        if (
            not isinstance(state, Mapping)
            or not {"_storage", "_sampler", "_rng", "_draws"} <= state.keys()
            or state["_sampler"].keys() != own.keys()
        ):
            raise StateError(
                f"this is not a state of a buffer with {self.sampler!r}",
                hint="pass what state_dict() of a buffer with the same sampler returned",
            )
        for name in own.keys() & {"where", "weight"}:
            if state["_sampler"][name] != own[name]:
                raise StateError(f"the state is of a sampler with {name}={state['_sampler'][name]!r}")
        if (state["_rng"] is None) != (self.generator is None):
            having, lacking = ("state", "buffer") if self.generator is None else ("buffer", "state")
            raise StateError(f"the {having} draws by a generator, the {lacking} by the store's seed")
        seed, last = state["_draws"]["seed"], state["_draws"]["last_id"]
        if "rows" in state["_storage"]:
            return
        if (seed, last) != (storage.seed, min(last, storage.last)):
            raise StateError(
                f"the state is of a store with seed {seed} and rows up to id {last}, "
                f"this one has seed {storage.seed} and rows up to id {storage.last}",
                hint="open the store of the state, or copy its rows here with dumps() and loads()",
            )

    # -- life ------------------------------------------------------------------------------------------

    def attach(self, storage: ReadView) -> None:
        """Draw from a storage from now on; it may have another schema and seed."""
        self.drop_prefetched()
        self._draws = self._prefetcher = None
        self.sampler.attach(storage)
        if self.limiter is not None and not storage.follows:
            self.limiter.check(storage.description.window_rows)
            self.limiter.attach(storage)
        if self.generator is not None:
            self._use(GivenDraws(self.generator, storage.draws, resume=self._resumes))
            self._resumes = True

    def before_fork(self) -> None:
        """Pause the evaluation of the sampler's conditions."""
        if self.sampler.filter is not None:
            self.sampler.filter.rest()

    def after_fork(self) -> None:
        """Resume the evaluation of the sampler's conditions."""
        if self.sampler.filter is not None:
            self.sampler.filter.go_on()

    def leave_parent(self) -> None:
        """Draw by the seed, by a copy of the sampler; drop the batches that the parent has prefetched."""
        self._draws = self._prefetcher = self.generator = None
        # A child does not have the parent's threads, but a lock of the sampler that one held stays locked.
        self._of_parent = self._of_parent, self.sampler
        self.sampler = copy.copy(self.sampler)
        if self._store.life is Life.OPEN:
            with contextlib.suppress(ExpStoreError):  # a filter that does not fit is refused by the next draw
                self.sampler.attach(self._store.storage)

    def close(self) -> None:
        """Stop prefetching and end all waits for the limiter."""
        if self.limiter is not None:
            self.limiter.close()
        if self._prefetcher is not None:
            self._prefetcher.close(self)
        self.sampler.detach()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy; a copy with rows in RAM continues with its own generator."""
        copied, draws = None, self._draws
        if self.generator is not None and self._store.is_in_memory:
            # Prefetched batches have advanced the generator; the copy makes them again.
            state = self.generator.get_state()
            if isinstance(draws, GivenDraws):
                state = draws.state_now(self._store.storage.draws)
            copied = state, str(self.generator.device)
        dropped = dict.fromkeys(("_draws", "_prefetcher", "_of_parent"))
        return vars(self) | dropped | {"generator": copied}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the result of `__getstate__`."""
        vars(self).update(state)
        if state["generator"] is not None:
            values, device = state["generator"]
            self._resumes = False
            self.generator = torch.Generator(device)
            self.generator.set_state(values)
