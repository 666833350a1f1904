"""Evaluate the `where=` and `weight=` of a sampler for all rows.

Samplers own a filter, which has one number per slot. DuckDB evaluates new and changed rows only, in a
background thread, while other threads draw. A filter never draws.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from expstore.core.geometry import RingGeometry
from expstore.core.values import Array, IntArray, Key, Window
from expstore.episodes.facts import TRAIN, check_split
from expstore.episodes.fragments import all_ids, clip
from expstore.errors import ArgumentError, ExpStoreError, NotReadyError, StateError
from expstore.sql.sync import Catalog
from expstore.storages.read_view import read_stable

if TYPE_CHECKING:
    from expstore.episodes.table import EpisodeTable
    from expstore.sql.expressions import ConditionLimits, Conditions, Needs
    from expstore.storages.read_view import ReadView

Floats = NDArray[np.float64]
_NONE = np.empty(0, np.int64)

#: Pause between two evaluations in the background, so that rows written meanwhile are evaluated together.
_PAUSE_SECONDS = 0.05
#: The background thread ends if no draw finds anything new for this long.
_IDLE_SECONDS = 1.0
#: Limits of one query: rows, and the bytes of their columns.
_ROWS, _BYTES = 1 << 17, 32 << 20
_TRIES = 3
_WAIT_SECONDS = 1.0
#: Number of changes for which the changed slots are remembered.
_KEPT = 256
#: Number of episodes whose facts are kept, to find those that have changed.
_FACTS_KEPT = 200_000


@dataclass(frozen=True, slots=True)
class _Seen:
    """The state of a storage that an evaluation covered: its rows, and counters of their changes."""

    window: Window
    content: int
    changes: int
    table: EpisodeTable | None
    touched: int

    @classmethod
    def of(cls, storage: ReadView, *, facts: bool, splits: bool, rows: int | None) -> Self:
        """Return the present state of the newest `rows` rows of a storage (None: all), without later ones.

        Args:
            storage: The storage.
            facts: Whether the facts of episodes matter.
            splits: Whether the splits of episodes matter.
            rows: Number of rows.
        """
        content, changes, table, count = storage.epochs.content, storage.changes.number & ~1, None, 0
        if facts or splits:
            storage.follow()
        if facts:
            with storage.locks.episodes:
                table = storage.episodes
                count = table.touched.count
        window = storage.query_window if facts or splits else storage.stored
        return cls(window.newest(rows), content, changes, table, count)

    def holds(self, storage: ReadView) -> bool:
        """Return whether nothing was written or changed since."""
        window, table = storage.stored, self.table
        return (
            (window.last, window.deleted) == (self.window.last, self.window.deleted)
            and (storage.epochs.content, storage.changes.number) == (self.content, self.changes)
            and (table is None or (table is storage.episodes and table.touched.count == self.touched))
        )


@dataclass(frozen=True)
class Where:
    """Select the rows that a sampler draws, and multiply the probability of each.

    Samplers accept it as `where=`, in place of a condition alone.

    Args:
        condition: Boolean SQL expression over a row and its `episode`; None for all rows.
        weight: Numeric SQL expression by which probabilities are multiplied, at least 0; None for 1.

    Raises:
        ArgumentError: An expression is not a string.

    Example:
        >>> where = expstore.Where("episode.return > 0", weight="episode.return")
        >>> sampler = expstore.PrioritizedSliceSampler(slice_len=4, where=where)
    """

    condition: str | None = None
    _: KW_ONLY
    weight: str | None = None

    def __post_init__(self) -> None:
        for name in ("condition", "weight"):
            if not isinstance(value := getattr(self, name), str | None):
                raise ArgumentError(f"{name} must be an SQL expression, got {value!r}")


def split_where(where: str | Where | None, weight: str | None) -> tuple[str | None, str | None]:
    """Return the condition and the weight that a sampler was given.

    Raises:
        ArgumentError: Both `weight` and `where` have a weight.
    """
    if not isinstance(where, Where):
        return where, weight
    if weight is not None and where.weight is not None:
        raise ArgumentError(f"pass one weight: either weight={weight!r} or the weight of {where!r}")
    return where.condition, where.weight if weight is None else weight


class Filter:
    """Compute the mass of each row: the factor by which `where` and `weight` multiply its probability.

    A mass is 0 for rows that do not match or are in another split, and otherwise 1 or the value of `weight`.
    A sampler calls `attach` with its storage, and `look` at each draw. Then `masses` has the masses of the
    rows in `window`, by place; newer rows are not drawn yet. The masses of evicted rows remain in `masses`,
    so draw only rows that `readable` returns. To follow changes, hold `lock`, remember `version`, and pass it
    to `moved` at the next draw, which returns the places whose masses have changed since then (None for all).

    New and changed rows and episodes are evaluated in the background, within 0.1 s of a `look` that finds
    them; `look` waits for the first evaluation only. Without expressions `look` evaluates them itself, which
    takes microseconds. `refresh` evaluates everything before it returns; then
    the masses of readable rows follow from the rows alone.

    Threads: any number may draw during an evaluation. Processes: a fork or a copy evaluates for itself.
    Crashes: nothing is stored. The background thread keeps neither the filter nor the storage alive while it
    waits. It ends after `detach`, and after a second in which no draw found anything new.

    Args:
        where: Boolean SQL expression; None for all rows.
        weight: Numeric SQL expression; None for 1.
        split: The split of the rows; None for all splits.
        whole: Whether to evaluate all stored rows, not only those that samplers see.

    Raises:
        QueryError: An expression is not valid.
        ArgumentError: `split` is not the name of a split.

    Example:
        >>> from expstore.samplers.filter import Filter
        >>> filter = Filter("next.reward > 0", None)
        >>> filter.attach(storage)
        >>> filter.look(storage)
        >>> filter.masses_of(storage, filter.readable(storage).ids()).sum()
        np.float64(199.0)
    """

    def __init__(
        self, where: str | None, weight: str | None, *, split: str | None = TRAIN, whole: bool = False
    ) -> None:
        self.where, self.weight, self._whole = where, weight, whole
        self.split = None if split is None else check_split(split)
        self._conditions: Conditions | None = None
        #: Whether masses depend on more than splits.
        self.has_expressions = where is not None or weight is not None
        if self.has_expressions:
            from expstore.sql.expressions import Conditions  # loads DuckDB

            self._conditions = Conditions(where, weight)
        self._renew()

    def _renew(self) -> None:
        self._pid = os.getpid()
        #: Held while masses and version are read or changed.
        self.lock = threading.Lock()
        self._evaluating = threading.Lock()
        self._resting = 0  # id of the thread that is about to fork; 0: none
        self._seen: _Seen | None = None
        self._sees_splits = False  # whether the evaluation took splits into account
        self._needs: Needs | None = None
        self._known: dict[int, tuple[Any, ...]] = {}
        self._trouble: Exception | None = None
        self._worker: _Worker | None = None
        self._catalog: Catalog | None = None
        self.masses: Floats = np.zeros(0)
        #: Number of evaluations. Values derived from the masses are valid for one evaluation.
        self.evaluation = getattr(self, "evaluation", 0) + 1
        #: Incremented when masses change.
        self.version = getattr(self, "version", 0) + 1
        self._moved: deque[tuple[int, IntArray | None]] = deque(maxlen=_KEPT)

    def limit(self, limits: ConditionLimits) -> None:
        """Limit the resources of each query, for untrusted expressions. Call it before `attach`."""
        if self._conditions is not None:
            self._conditions.limit(limits)

    def fields(self, storage: ReadView) -> frozenset[Key]:
        """Return the keys of the fields that the expressions use."""
        if self._conditions is None:
            return frozenset()
        needs = self._bound(storage, self._conditions)
        return frozenset(needs.schema.fields[place].key for place in needs.fields)

    # -- interface of samplers -------------------------------------------------------------------

    def attach(self, storage: ReadView) -> None:
        """Start over with a storage.

        Raises:
            QueryError: An expression names a field that the storage does not have.
        """
        self.detach()
        self._renew()
        if storage.schema is not None and self._conditions is not None:
            self._bound(storage, self._conditions)

    @property
    def is_active(self) -> bool:
        """Whether some masses are not 1; False: samplers need not look at them.

        Without expressions it is False until `refresh` has found rows of another split than "train".
        """
        return self._conditions is not None or self._sees_splits or self.split not in (TRAIN, None)

    def detach(self) -> None:
        """Stop evaluating; called before the storage is closed."""
        worker, self._worker = self._worker, None
        if worker is not None and self._pid == os.getpid():
            worker.end()

    @property
    def window(self) -> Window:
        """The rows whose masses are known; some may have been evicted since."""
        seen = self._seen
        return Window(0, 0) if seen is None else seen.window

    def readable(self, storage: ReadView) -> Window:
        """Return the rows whose masses are known and that can still be read."""
        window = storage.window
        return replace(window, last=max(window.low, min(window.last, self.window.last)))

    def _ring(self, storage: ReadView) -> RingGeometry:
        """How ids correspond to places in `masses`."""
        return storage.geometry if self._whole else storage.description.window_ring

    def look(self, storage: ReadView) -> None:
        """Request an evaluation of new rows in the background; wait for the first evaluation.

        Raises:
            QueryError: A weight is not a number of at least 0, or DuckDB cannot evaluate an expression.
        """
        if self._pid != os.getpid():
            self._renew()
        seen = self._seen
        if seen is None:
            self.refresh(storage)
        elif self._conditions is None:
            if not seen.holds(storage):
                self.refresh(storage)
        elif self._trouble is not None or not seen.holds(storage):
            self._hurry(storage)
            if self._trouble is not None:
                raise copy.copy(self._trouble)

    def refresh(self, storage: ReadView) -> None:
        """Evaluate new and changed rows now.

        Raises:
            QueryError: A weight is not a number of at least 0, or DuckDB cannot evaluate an expression.
                Masses are unchanged.
        """
        if self._pid != os.getpid():
            self._renew()
        with self._evaluating:
            self._evaluate_all(storage)

    def find_more(self, storage: ReadView) -> bool:
        """Evaluate new rows after a draw that found none; return whether the draw should be repeated.

        The caller may hold the storage's lock, for which a running evaluation may wait. So this method waits
        for that evaluation for a limited time only.
        """
        if not self._evaluating.acquire(timeout=_WAIT_SECONDS):
            return False
        try:
            seen = self._seen
            if seen is None or not seen.holds(storage):
                self._evaluate_all(storage)
        finally:
            self._evaluating.release()
        return True

    def find_moved(self, version: int) -> IntArray | None:
        """Return the places whose masses have changed since `version`; None for all. Shape `(n,)`."""
        if version == self.version:
            return _NONE
        found = [places for number, places in self._moved if number > version]
        if len(found) != self.version - version:
            return None
        known = [places for places in found if places is not None]
        if len(known) != len(found):
            return None
        return np.concatenate(known)

    def masses_of(self, storage: ReadView, ids: IntArray) -> Floats:
        """Return the masses of readable rows; 0 for rows that are not evaluated yet. Shapes `(n,)`."""
        with self.lock:
            known = ids <= self.window.last
            masses: Floats = np.zeros(ids.size)
            masses[known] = self.masses[self._ring(storage).slot_of(ids[known])]
        return masses

    def build_no_rows_error(self, storage: ReadView) -> NotReadyError:
        """Return the error for a draw that finds no matching row."""
        return NotReadyError(
            f"none of the {len(storage)} rows can be drawn with {str(self) or f'split={self.split!r}'}",
            hint="extend() it with rows that match, or use another filter",
        )

    def __str__(self) -> str:
        split = self.split or "None"
        texts = (("where", self.where), ("weight", self.weight), ("split", None if split == TRAIN else split))
        return ", ".join(f"{name}={text!r}" for name, text in texts if text is not None)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, which evaluates for itself."""
        names = ("where", "weight", "split", "has_expressions", "_whole")
        own = {name: getattr(self, name) for name in names}
        return own | {"_conditions": copy.copy(self._conditions)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what `__getstate__` returned."""
        self.__dict__.update(state)
        self._renew()

    # -- in the background -----------------------------------------------------------------------

    def rest(self) -> None:
        """Pause evaluation until this thread calls `go_on`.

        Called before a fork: a lock that an evaluation holds at that moment would stay locked in the child.
        """
        if self._pid == os.getpid() and self._evaluating.acquire(timeout=_WAIT_SECONDS):
            self._resting = threading.get_ident()

    def go_on(self) -> None:
        """Resume evaluation."""
        if self._resting == threading.get_ident():
            self._resting = 0
            self._evaluating.release()

    def _hurry(self, storage: ReadView) -> None:
        worker = self._worker
        if worker is None or not worker.hurry():
            with self.lock:
                if self._worker is worker:
                    self._worker = _Worker(self, storage)
            if worker is not None:
                worker.end()

    def work(self, storage: ReadView) -> None:
        """Evaluate new rows. A failure is kept for the next draw, which raises it."""
        try:
            self.refresh(storage)
        except Exception as exc:
            self._trouble = None if storage.closed else exc

    # -- evaluating ------------------------------------------------------------------------------

    def _bound(self, storage: ReadView, conditions: Conditions) -> Needs:
        needs, schema = self._needs, storage.require_schema()
        if needs is None or needs.schema is not schema:
            needs = self._needs = conditions.bind(schema)
        return needs

    def _evaluate_all(self, storage: ReadView) -> None:
        try:
            for _ in range(_TRIES):
                if self._evaluate(storage):
                    self._trouble = None
                    return
            raise StateError(f"the store's content was replaced while {self} was evaluated", hint="try again")
        except ExpStoreError as exc:
            self._trouble = exc
            raise

    def _evaluate(self, storage: ReadView) -> bool:
        """Evaluate new and changed rows; return False if the storage's content was replaced meanwhile."""
        rows = None if self._whole else storage.description.window_rows
        conditions = self._conditions
        names = () if conditions is None else conditions.facts
        splits = self.split is not None and storage.epochs.has_splits
        now, before = _Seen.of(storage, facts=bool(names), splits=splits, rows=rows), self._seen
        if splits != (self.split is not None and storage.epochs.has_splits):
            return False  # these may have the first rows of another split, whose episode may not be known
        if storage.schema is None:
            return True
        facts = _Facts(self._catalog_of(storage) if names else None, names)
        ids = None if before is None else self._find_changed(storage, before, now, facts)
        whole = ids is None
        if ids is None:
            if conditions is not None and conditions.selections:
                self._catalog_of(storage).check_selections(conditions.selections)
            self._known.clear()
            facts.fill()
            ids = now.window.ids()
        found = [self._ask(storage, chunk, facts) for chunk in self._chunks(storage, ids)]
        masses = np.concatenate(found) if found else np.zeros(0)
        if storage.epochs.content != now.content:
            return False
        # Rows that were overwritten while they were read may be torn.
        kept = storage.stored.newest(rows).holds(ids)
        if not kept.all():
            ids, masses = ids[kept], masses[kept]
        if conditions is not None:
            conditions.check(ids, masses)
        self._show(storage, now, self._ring(storage).slot_of(ids), masses, whole=whole)
        self._sees_splits = splits
        return True

    def _show(self, storage: ReadView, now: _Seen, places: IntArray, masses: Floats, *, whole: bool) -> None:
        last = now.window.last
        size = self._ring(storage).slots or 1 << max(12, (last - 1).bit_length())
        with self.lock:
            held = self.masses
            if whole or held.size < size:
                held = np.zeros(size)
                if not whole:
                    held[: self.masses.size] = self.masses
            if whole or places.size:
                self._moved.append((self.version + 1, None if whole else places))
                held[places] = masses
                self.masses = held
                self.version += 1
            self.evaluation += 1
            self._seen = now

    def _find_changed(self, storage: ReadView, before: _Seen, now: _Seen, facts: _Facts) -> IntArray | None:
        """Return the rows to evaluate, in ascending order; None for all rows. Shape `(n,)`."""
        window, last = now.window, before.window.last
        if (before.content, before.table) != (now.content, now.table) or window.last < last:
            return None
        found = [replace(window, low=max(window.low, last)).ids()] if window.last > last else []
        if now.changes != before.changes:
            slots = storage.changes.since(before.changes)
            if slots is None:
                return None
            found.append(storage.geometry.ids_in(slots, before.window.last))
        if now.table is not None and now.touched != before.touched:
            with storage.locks.episodes:
                episodes = now.table.touched.since(before.touched)
            if episodes is None:
                return None
            found.append(_rows_of(storage, now.table, self._find_other(episodes, facts), window.low))
        ids = np.unique(np.concatenate(found)) if len(found) > 1 else (*found, _NONE)[0]
        return ids[window.holds(ids)]

    def _find_other(self, episodes: IntArray, facts: _Facts) -> IntArray:
        """Return the episodes, out of these, whose facts have changed. Shapes `(n,)`."""
        facts.add(episodes)
        found = dict(zip(facts.ids.tolist(), facts.rows(), strict=True))
        changed = [episode for episode, row in found.items() if self._known.get(episode) != row]
        if len(self._known) > _FACTS_KEPT:
            self._known.clear()
        self._known |= found
        return np.array(changed, np.int64)

    def _chunks(self, storage: ReadView, ids: IntArray) -> Iterator[IntArray]:
        rows = _ROWS
        if self._conditions is not None:
            rows = max(1, min(_ROWS, _BYTES // self._bound(storage, self._conditions).row_bytes))
        for start in range(0, ids.size, rows):
            yield ids[start : start + rows]

    def _ask(self, storage: ReadView, ids: IntArray, facts: _Facts) -> Floats:
        masses = np.ones(ids.size)
        if (conditions := self._conditions) is not None:
            masses = read_stable(storage, lambda: self._ask_weights(storage, ids, facts, conditions))
        return masses * self.find_split(storage, ids)

    def find_split(self, storage: ReadView, ids: IntArray) -> NDArray[np.bool_]:
        """Return whether rows are in the split. Shapes `(n,)`."""
        if self.split is None:
            return np.ones(ids.size, np.bool_)
        found: NDArray[np.bool_] = self.number_splits(storage, ids) == _number(self.split)
        return found

    def number_splits(self, storage: ReadView, ids: IntArray) -> IntArray:
        """Return numbers that are equal for rows of the same split, and 0 for "train". Shapes `(n,)`.

        In a follower the episodes of the rows must be known; see `ReadView.query_window`.
        """
        if not storage.epochs.has_splits:
            return np.zeros(ids.size, np.int64)
        table, place = storage.episodes, len(storage.require_schema().fields) + _PLACES["_episode"]
        if not table.knows_splits:
            found = self._catalog_of(storage).facts(("episode_id", "split"), None)
            pairs = zip(*(column.to_pylist() for column in found.columns), strict=True)
            with storage.locks.episodes:
                table.add_splits({episode: split for episode, split in pairs if split != TRAIN})
        (episodes,) = read_stable(storage, lambda: storage.read(ids, [place]))
        names, at = np.unique(episodes.reshape(-1), return_inverse=True)
        splits = table.splits
        return np.array([_number(splits.get(name, TRAIN)) for name in names.tolist()], np.int64)[at]

    def _ask_weights(self, storage: ReadView, ids: IntArray, facts: _Facts, conditions: Conditions) -> Floats:
        needs = self._bound(storage, conditions)
        places = [*needs.fields, *(len(needs.schema.fields) + _PLACES[name] for name in needs.rows)]
        columns = storage.read(ids, places) if places else []
        needs.mark_missing(storage, ids, columns)
        table = None
        if conditions.facts:
            table = facts.of(columns[len(needs.fields) + needs.rows.index("_episode")])
        return conditions.ask(needs, ids, columns, table, storage.capacity)

    def _catalog_of(self, storage: ReadView) -> Any:
        if storage.index.catalog is not None:
            return storage.index.catalog
        self._catalog = Catalog(storage)
        storage.index.use(self._catalog)
        return self._catalog


@functools.cache
def _number(split: str) -> int:
    digest = hashlib.blake2b(split.encode(), digest_size=8).digest()
    return 0 if split == TRAIN else int.from_bytes(digest, "little", signed=True)


#: Positions of the row columns, counted after the fields.
_PLACES = {"_episode": 1, "_step": 2, "_time": 3}


class _Facts:
    """The facts about episodes that one evaluation uses.

    Args:
        catalog: The SQL catalog of the storage.
        names: Names of the facts.
    """

    def __init__(self, catalog: Any, names: tuple[str, ...]) -> None:
        self._catalog, self._names = catalog, names
        self.ids: IntArray = np.empty(0, np.int64)
        self._table: Any = None

    def fill(self) -> None:
        """Load the facts of all episodes that have rows."""
        if self._names:
            self._take(self._catalog.facts(self._names, None))

    def add(self, episodes: IntArray) -> None:
        """Load the facts of these episodes, in place of those that were loaded before."""
        self._take(self._catalog.facts(self._names, episodes))

    def _take(self, table: Any) -> None:
        self._table = table.sort_by("episode_id")
        self.ids = self._table.column("episode_id").to_numpy()

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the facts of each episode as a tuple."""
        return list(zip(*(column.to_pylist() for column in self._table.columns), strict=True))

    def of(self, episodes: Array) -> Any:
        """Return an Arrow table with the facts of the episodes of some rows."""
        wanted = np.unique(episodes)
        at = np.searchsorted(self.ids, wanted)
        there = at < self.ids.size
        there[there] = self.ids[at[there]] == wanted[there]
        if not there.all():
            self.add(np.union1d(self.ids, wanted))
            return self._table
        return self._table.take(at)


def _rows_of(storage: ReadView, table: EpisodeTable, episodes: IntArray, low: int) -> IntArray:
    """Return the ids above `low` of the rows of some episodes. Shape `(n,)`."""
    if not episodes.size:
        return _NONE
    with storage.locks.episodes:
        fragments = table.fragments.capture()
    return all_ids(clip(fragments.of(episodes), low))


class _Worker:
    """The background thread of a filter.

    It refers weakly to the filter and the storage, so that both can be freed while it waits.
    """

    def __init__(self, filter: Filter, storage: ReadView) -> None:
        self._pid = os.getpid()
        self._wanted, self._ended = threading.Event(), threading.Event()
        self._wanted.set()
        self._thread = threading.Thread(
            target=_work,
            args=(weakref.ref(filter), weakref.ref(storage), self._wanted, self._ended),
            name="expstore-filter",
            daemon=True,
        )
        self._thread.start()
        # Also at interpreter exit: a thread that still evaluates then could abort the process.
        self._finalizer = weakref.finalize(filter, self.end)

    def hurry(self) -> bool:
        """Request an evaluation; return whether the thread is alive to make it."""
        if not self._wanted.is_set():
            self._wanted.set()
        return self._thread.is_alive() and not self._ended.is_set()

    def end(self) -> None:
        """End the thread, and wait until it has ended."""
        if self._pid != os.getpid():
            return  # the thread does not exist in a forked child
        self._finalizer.detach()
        self._ended.set()
        self._wanted.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _work(
    filter_ref: weakref.ref[Filter],
    storage_ref: weakref.ref[ReadView],
    wanted: threading.Event,
    ended: threading.Event,
) -> None:
    while wanted.wait(_IDLE_SECONDS) and not ended.is_set():
        wanted.clear()
        filter, storage = filter_ref(), storage_ref()
        if filter is None or storage is None or storage.closed:
            break
        filter.work(storage)
        del filter, storage
        ended.wait(_PAUSE_SECONDS)
    ended.set()
