"""Which rows a sampler may draw, and how much each counts: `where=` and `weight=`.

Held by samplers. It keeps one number per slot, follows what is new or has changed, and asks DuckDB of
nothing else; a thread of its own does so while others draw. It never draws.
"""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray, Key, Window
from expstore.episodes.fragments import all_ids, clip
from expstore.errors import ExpStoreError, NotReadyError, StateError
from expstore.sql.sync import Catalog
from expstore.storages.read_view import read_stable

if TYPE_CHECKING:
    from expstore.episodes.table import EpisodeTable
    from expstore.sql.expressions import ConditionLimits, Needs
    from expstore.storages.read_view import ReadView

__all__ = ["Filter", "Where", "split_where"]

Floats = NDArray[np.float64]
_NONE = np.empty(0, np.int64)

#: Between two evaluations in the background; what comes meanwhile is taken together.
_PAUSE_SECONDS = 0.05
#: After which the thread ends if nobody draws, or nothing is new.
_IDLE_SECONDS = 1.0
#: Rows, and their bytes, that are looked at in one query.
_ROWS, _BYTES = 1 << 17, 32 << 20
_TRIES = 3
_WAIT_SECONDS = 1.0
#: So many sets of slots that have moved are remembered.
_KEPT = 256
#: So many episodes' facts are kept, to tell those that have changed.
_FACTS_KEPT = 200_000


@dataclass(frozen=True, slots=True)
class _Seen:
    """Hold what an evaluation was of: the rows, and what tells that they are others now."""

    window: Window
    content: int
    changes: int
    table: EpisodeTable | None
    touched: int

    @classmethod
    def of(cls, storage: ReadView, *, episodes: bool) -> Self:
        """Look at a storage; rows and episodes that come from now on are not covered."""
        content, changes, table, count = storage.epochs.content, storage.changes.number & ~1, None, 0
        if episodes:
            storage.follow()
            with storage.locks.episodes:
                table = storage.episodes
                count = table.touched.count
        return cls(storage.query_window if episodes else storage.window, content, changes, table, count)

    def holds(self, storage: ReadView) -> bool:
        """Return whether nothing has come since."""
        window = storage.window
        table = self.table
        return (
            (window.last, window.deleted) == (self.window.last, self.window.deleted)
            and (storage.epochs.content, storage.changes.number) == (self.content, self.changes)
            and (table is None or (table is storage.episodes and table.touched.count == self.touched))
        )


@dataclass(frozen=True)
class Where:
    """Which rows a sampler draws, and by what it multiplies the chance of each row.

    Every sampler takes it as `where=`, instead of a condition alone.

    Args:
        condition: Boolean SQL expression over a row and its `episode`; None: every row.
        weight: Numeric SQL expression; None: 1.

    Raises:
        TypeError: An expression is not text.

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
                raise TypeError(f"{name} must be an SQL expression, got {value!r}")


def split_where(where: str | Where | None, weight: str | None) -> tuple[str | None, str | None]:
    """Return condition and weight, however a sampler was given them.

    Raises:
        TypeError: There are two weights.
    """
    if not isinstance(where, Where):
        return where, weight
    if weight is not None and where.weight is not None:
        raise TypeError(f"give one weight, either {weight!r} or the one of {where!r}")
    return where.condition, where.weight if weight is None else weight


class Filter:
    """Say for each row whether it may be drawn, and by which factor its chance is multiplied.

    A sampler calls `attach` with its storage and `look` at each draw. `masses` is then the factor by slot
    (0: not drawn; 1, or what `weight` says) for the rows of `window`; newer rows are not drawn yet. The
    masses of rows that have left stay behind: whoever draws takes the rows in `readable`. To follow, hold
    `lock`, keep `version`, and ask `moved(version)` next time which slots have other masses than then
    (None: any may).

    What is new or changed, rows and episodes, is evaluated in the background within 0.1 s of a `look` that
    finds it; `look` waits for the first evaluation only. `refresh` evaluates everything there is before it
    returns; masses of readable rows then follow from the rows alone.

    Threads: any number may draw while one evaluates. Processes: a fork or a copy evaluates for itself.
    Crashes: nothing is kept. The thread holds neither filter nor storage while it waits, ends after a
    second in which nobody draws or nothing is new, and with `detach`.

    Args:
        where: Boolean SQL expression; None: every row.
        weight: Numeric SQL expression; None: 1.

    Raises:
        QueryError: They are not what they have to be.

    Example:
        >>> filter = Filter("next.reward > 0", None)
        >>> filter.attach(storage)
        >>> filter.look(storage)
        >>> filter.masses[storage.slot_of(filter.readable(storage).ids())].sum()
    """

    def __init__(self, where: str | None, weight: str | None) -> None:
        from expstore.sql.expressions import Conditions  # loads DuckDB

        self.where, self.weight = where, weight
        self._conditions = Conditions(where, weight)
        self._renew()

    def _renew(self) -> None:
        self._pid = os.getpid()
        #: Held while masses and version are read or changed.
        self.lock = threading.Lock()
        self._evaluating = threading.Lock()
        self._resting = 0  # the thread that forks
        self._seen: _Seen | None = None
        self._needs: Needs | None = None
        self._known: dict[int, tuple[Any, ...]] = {}
        self._trouble: Exception | None = None
        self._worker: _Worker | None = None
        self._catalog: Catalog | None = None
        self.masses: Floats = np.zeros(0)
        #: Counts evaluations: what is made of the masses of one is the same wherever it is made.
        self.evaluation = getattr(self, "evaluation", 0) + 1
        #: Moves when masses do.
        self.version = getattr(self, "version", 0) + 1
        self._moved: deque[tuple[int, IntArray | None]] = deque(maxlen=_KEPT)

    def limit(self, limits: ConditionLimits) -> None:
        """Bound what one query of the expressions may take: they are not trusted. Call it before `attach`."""
        self._conditions.limit(limits)

    def fields(self, storage: ReadView) -> frozenset[Key]:
        """Return the fields of a storage's rows that the expressions speak of."""
        needs = self._bound(storage)
        return frozenset(needs.schema.fields[place].key for place in needs.fields)

    # -- what samplers ask -----------------------------------------------------------------------

    def attach(self, storage: ReadView) -> None:
        """Begin anew, with a storage.

        Raises:
            QueryError: Its rows have no such fields.
        """
        self.detach()
        self._renew()
        if storage.schema is not None:
            self._bound(storage)

    def detach(self) -> None:
        """Be told that the storage is to be closed: nothing is evaluated from now on."""
        worker, self._worker = self._worker, None
        if worker is not None and self._pid == os.getpid():
            worker.end()

    @property
    def window(self) -> Window:
        """The rows of which masses are known; some may have left since."""
        seen = self._seen
        return Window(0, 0) if seen is None else seen.window

    def readable(self, storage: ReadView) -> Window:
        """Return the rows that can be read now and of which masses are known."""
        window = storage.window
        return replace(window, last=max(window.low, min(window.last, self.window.last)))

    def look(self, storage: ReadView) -> None:
        """Have what is new evaluated soon; wait for the first evaluation.

        Raises:
            QueryError: A weight is no number from 0 on, or DuckDB cannot compute one of the expressions.
        """
        if self._pid != os.getpid():
            self._renew()
        seen = self._seen
        if seen is None:
            self.refresh(storage)
        elif self._trouble is not None or not seen.holds(storage):
            self._hurry(storage)
            if self._trouble is not None:
                raise copy.copy(self._trouble)

    def refresh(self, storage: ReadView) -> None:
        """Evaluate what is new, now.

        Raises:
            QueryError: As `look`; masses are what they were.
        """
        if self._pid != os.getpid():
            self._renew()
        with self._evaluating:
            self._evaluate_all(storage)

    def find_more(self, storage: ReadView) -> bool:
        """Evaluate what is new because a draw has found no candidate; say whether there may be one now.

        The caller may hold the storage's lock, for which another evaluation may wait: so it does not wait
        long for that.
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
        """Return the slots whose masses have moved since `version`; None: any may. Shape `(n,)`."""
        if version == self.version:
            return _NONE
        found = [slots for number, slots in self._moved if number > version]
        if len(found) != self.version - version:
            return None
        known = [slots for slots in found if slots is not None]
        if len(known) != len(found):
            return None
        return np.concatenate(known)

    def masses_of(self, storage: ReadView, ids: IntArray) -> Floats:
        """Return the masses of readable rows, 0 for those that are too new. Shapes `(n,)`."""
        with self.lock:
            known = ids <= self.window.last
            masses: Floats = np.zeros(ids.size)
            masses[known] = self.masses[storage.geometry.slot_of(ids[known])]
        return masses

    def build_no_rows_error(self, storage: ReadView) -> NotReadyError:
        """Return the error of a draw that has no candidate."""
        return NotReadyError(
            f"none of the {len(storage)} rows can be drawn with {self._conditions}",
            hint="extend() it with rows that match, or use another filter",
        )

    def __str__(self) -> str:
        texts = (("where", self.where), ("weight", self.weight))
        return ", ".join(f"{name}={text!r}" for name, text in texts if text is not None)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs; it evaluates by itself."""
        return {"where": self.where, "weight": self.weight, "_conditions": copy.copy(self._conditions)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what `__getstate__` returned."""
        self.__dict__.update(state)
        self._renew()

    # -- in the background -----------------------------------------------------------------------

    def rest(self) -> None:
        """Evaluate nothing until this thread calls `go_on`.

        It is about to fork: in the child a lock that an evaluation holds just then would stay locked.
        """
        if self._pid == os.getpid() and self._evaluating.acquire(timeout=_WAIT_SECONDS):
            self._resting = threading.get_ident()

    def go_on(self) -> None:
        """Evaluate again."""
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
        """Evaluate what is new; a failure is raised by the next draw."""
        try:
            self.refresh(storage)
        except Exception as exc:
            self._trouble = None if storage.closed else exc

    # -- evaluating ------------------------------------------------------------------------------

    def _bound(self, storage: ReadView) -> Needs:
        needs, schema = self._needs, storage.require_schema()
        if needs is None or needs.schema is not schema:
            needs = self._needs = self._conditions.bind(schema)
        return needs

    def _evaluate_all(self, storage: ReadView) -> None:
        try:
            for _ in range(_TRIES):
                if self._evaluate(storage):
                    self._trouble = None
                    return
            raise StateError("the store kept changing hands while it was looked at", hint="try again")
        except ExpStoreError as exc:
            self._trouble = exc
            raise

    def _evaluate(self, storage: ReadView) -> bool:
        """Evaluate what is new; say whether all of it is of one storage's rows."""
        now, before = _Seen.of(storage, episodes=bool(self._conditions.facts)), self._seen
        if storage.schema is None:
            return True
        facts = _Facts(self._catalog_of(storage), self._conditions.facts)
        ids = None if before is None else self._find_changed(storage, before, now, facts)
        whole = ids is None
        if ids is None:
            self._known.clear()
            facts.fill()
            ids = now.window.ids()
        found = [self._ask(storage, chunk, facts) for chunk in self._chunks(storage, ids)]
        masses = np.concatenate(found) if found else np.zeros(0)
        if storage.epochs.content != now.content:
            return False
        # Rows that were overwritten while they were read may have come out torn.
        kept = storage.window.holds(ids)
        if not kept.all():
            ids, masses = ids[kept], masses[kept]
        self._conditions.check(ids, masses)
        self._show(storage, now, storage.geometry.slot_of(ids), masses, whole=whole)
        return True

    def _show(self, storage: ReadView, now: _Seen, slots: IntArray, masses: Floats, *, whole: bool) -> None:
        last = now.window.last
        size = storage.geometry.slots or 1 << max(12, (last - 1).bit_length())
        with self.lock:
            held = self.masses
            if whole or held.size < size:
                held = np.zeros(size)
                if not whole:
                    held[: self.masses.size] = self.masses
            if whole or slots.size:
                self._moved.append((self.version + 1, None if whole else slots))
                held[slots] = masses
                self.masses = held
                self.version += 1
            self.evaluation += 1
            self._seen = now

    def _find_changed(self, storage: ReadView, before: _Seen, now: _Seen, facts: _Facts) -> IntArray | None:
        """Return the rows to be looked at, ascending; None: all. Shape `(n,)`."""
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
        """Return those of some episodes whose facts are not those that were known. Shapes `(n,)`."""
        facts.add(episodes)
        found = dict(zip(facts.ids.tolist(), facts.rows(), strict=True))
        changed = [episode for episode, row in found.items() if self._known.get(episode) != row]
        if len(self._known) > _FACTS_KEPT:
            self._known.clear()
        self._known |= found
        return np.array(changed, np.int64)

    def _chunks(self, storage: ReadView, ids: IntArray) -> Iterator[IntArray]:
        rows = max(1, min(_ROWS, _BYTES // self._bound(storage).row_bytes))
        for start in range(0, ids.size, rows):
            yield ids[start : start + rows]

    def _ask(self, storage: ReadView, ids: IntArray, facts: _Facts) -> Floats:
        return read_stable(storage, lambda: self._ask_weights(storage, ids, facts))

    def _ask_weights(self, storage: ReadView, ids: IntArray, facts: _Facts) -> Floats:
        needs = self._bound(storage)
        places = [*needs.fields, *(len(needs.schema.fields) + _PLACES[name] for name in needs.rows)]
        columns = storage.read(ids, places) if places else []
        table = None
        if self._conditions.facts:
            table = facts.of(columns[len(needs.fields) + needs.rows.index("_episode")])
        return self._conditions.ask(needs, ids, columns, table, storage.capacity)

    def _catalog_of(self, storage: ReadView) -> Any:
        if not self._conditions.facts or storage.index.catalog is not None:
            return storage.index.catalog
        self._catalog = Catalog(storage)
        storage.index.use(self._catalog)
        return self._catalog


#: Where row columns stand behind the fields.
_PLACES = {"_episode": 1, "_step": 2, "_time": 3}


class _Facts:
    """Hold what is known of episodes, in one evaluation.

    Args:
        catalog: Whom to ask.
        names: What is asked.
    """

    def __init__(self, catalog: Any, names: tuple[str, ...]) -> None:
        self._catalog, self._names = catalog, names
        self.ids: IntArray = np.empty(0, np.int64)
        self._table: Any = None

    def fill(self) -> None:
        """Take in all episodes that have rows."""
        if self._names:
            self._take(self._catalog.facts(self._names, None))

    def add(self, episodes: IntArray) -> None:
        """Take in these episodes; others that were known are not any more."""
        self._take(self._catalog.facts(self._names, episodes))

    def _take(self, table: Any) -> None:
        self._table = table.sort_by("episode_id")
        self.ids = self._table.column("episode_id").to_numpy()

    def rows(self) -> list[tuple[Any, ...]]:
        """Return the facts of each episode."""
        return list(zip(*(column.to_pylist() for column in self._table.columns), strict=True))

    def of(self, episodes: Array) -> Any:
        """Return an Arrow table of the facts of some rows' episodes."""
        wanted = np.unique(episodes)
        at = np.searchsorted(self.ids, wanted)
        there = at < self.ids.size
        there[there] = self.ids[at[there]] == wanted[there]
        if not there.all():
            self.add(np.union1d(self.ids, wanted))
            return self._table
        return self._table.take(at)


def _rows_of(storage: ReadView, table: EpisodeTable, episodes: IntArray, low: int) -> IntArray:
    """Return the ids above `low` of the rows of episodes. Shape `(n,)`."""
    if not episodes.size:
        return _NONE
    with storage.locks.episodes:
        rows = table.fragments.rows
        chosen = rows[:, np.isin(rows[0], episodes)].copy()
    return all_ids(clip(chosen, low))


class _Worker:
    """The thread of a filter.

    It holds filter and storage weakly, so that both can go while it waits.
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
        # At the process's end, too: a thread that is computing then would end it otherwise.
        self._finalizer = weakref.finalize(filter, self.end)

    def hurry(self) -> bool:
        """Ask for an evaluation; say whether the thread is there to make it."""
        if not self._wanted.is_set():
            self._wanted.set()
        return self._thread.is_alive() and not self._ended.is_set()

    def end(self) -> None:
        """Let it end, and wait for it."""
        if self._pid != os.getpid():
            return  # a fork, in which there is no such thread
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
