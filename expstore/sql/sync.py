"""Open a store's SQL index when it is first needed, keep it up to date, and query it.

Used by buffers for SQL, and by storages before they truncate the journal. The index may lag behind the
store. Before a query the missing changes are committed to it, so that users read their own writes.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from expstore.core import tuning
from expstore.core.values import Array, IntArray, Window
from expstore.episodes.fragments import Fragments, count_live
from expstore.episodes.log import LogColumns, LogEntry
from expstore.episodes.segmentation import OPEN
from expstore.episodes.selections import DEFINITION
from expstore.episodes.table import Changes
from expstore.errors import ArgumentError, CorruptionError, ExpStoreError, StateError
from expstore.sql.row_source import read_annotations, relations_of
from expstore.storages.batch import now_us
from expstore.storages.episode_lookup import unknown_episode
from expstore.storages.read_view import ReadView, read_stable
from expstore.storages.stats import meta_relation

if TYPE_CHECKING:
    import pyarrow as pa

    from expstore.sql.delta import Delta
    from expstore.sql.groups import Groups
    from expstore.sql.index import Index
    from expstore.sql.result import Result

_Arguments = ParamSpec("_Arguments")
_Answer = TypeVar("_Answer")
_log = logging.getLogger("expstore")
_DEFINITIONS = """
SELECT name, condition, store, version, epoch_us(created), coalesce(author, ''), coalesce(reason, '')
FROM selections
"""
#: After this many changed episodes the index is updated in the background, to bound memory.
MANY_CHANGES = 20_000


def _retry_damaged_index(
    ask: Callable[Concatenate[Catalog, _Arguments], _Answer],
) -> Callable[Concatenate[Catalog, _Arguments], _Answer]:
    """Make a method of an open store's catalog run again, with a new index, if it finds the index damaged."""

    @functools.wraps(ask)
    def ask_again(catalog: Catalog, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Answer:
        if catalog._storage.closed:
            raise StateError("the store is closed", hint="open it again with expstore.open()")
        try:
            return ask(catalog, *args, **kwargs)
        except CorruptionError as exc:
            if exc.kind != "index":
                raise
            _log.warning("%s", exc)
            return ask(catalog, *args, **kwargs)

    return ask_again


class Catalog:
    """Bring the index up to date and query it.

    Threads may query at the same time; only one of them updates the index at a time.

    Args:
        storage: The storage whose rows and episodes are indexed.
        config: DuckDB settings in addition to those of every index.
    """

    def __init__(self, storage: ReadView, *, config: Mapping[str, str] | None = None) -> None:
        self._storage = storage
        self._config = config
        self._lock = storage.locks.order.rank_lock("catalog", threading.RLock())
        self._index: Index | None = None
        self._closed = False
        self._whole = False  # whether the next commit must contain the whole store
        self._content = storage.epochs.content
        self._pid = os.getpid()
        self._groups: Groups | None = None

    @property
    def groups(self) -> Groups:
        """The groups of episodes; hold their `lock` and call `look` first."""
        from expstore.sql.groups import Groups

        if self._groups is None:
            with self._lock:
                self._groups = self._groups or Groups(self._storage)
        return self._groups

    @_retry_damaged_index
    def query(
        self,
        sql: str,
        params: Sequence[object] | Mapping[str, object] | None,
        read: Callable[[Any], Any] | None = None,
    ) -> Result:
        """Run one SELECT over the rows that are readable when it begins.

        Args:
            sql: The statement.
            params: Values for its parameters.
            read: See `Index.query`. Called again if rows were overwritten while the query ran.

        Raises:
            QueryError: `sql` is not a single SELECT, or DuckDB rejects it.
            StateError: The store is closed.
        """
        if not isinstance(sql, str):
            raise ArgumentError(f"the query must be a string of SQL, got {sql!r}")
        from expstore.sql.selections import expand_calls

        sql = expand_calls(sql, "selections", check=self.check_selections)
        storage, until, attempt = self._storage, time.monotonic() + tuning.QUERY_RETRY_SECONDS, 0

        def answer() -> Result:
            relations = relations_of(storage, window, sql)
            notes = partial(read_annotations, storage, window)
            return index.query(sql, params, replace(relations, groups=groups, annotations=notes), read)

        while True:
            # If rows were overwritten during the query, run it again while holding the writer's lock. A
            # writer in another process cannot be locked out: retry until the time limit.
            attempt += 1
            alone = attempt > 1 and not storage.follows
            with storage.lock if alone else contextlib.nullcontext():
                groups = self._read_groups() if "groups" in sql.lower() else None
                index = self.catch_up()
                window, changes = storage.query_window, storage.changes.number
                result = read_stable(storage, answer)
                oldest = np.array([window.low + 1])
                moved = (
                    changes != storage.changes.number
                    or changes & 1
                    or window.deleted != storage.query_window.deleted
                )
                if alone or (storage.intact(oldest) and not moved):
                    return result
            if attempt > 1 and time.monotonic() > until:
                raise StateError(
                    f"the writer overwrote rows while the query read them, {attempt} times in a row",
                    hint="ask for less at once, or give the store a larger capacity",
                )

    def _read_groups(self) -> pa.Table | None:
        """Return the relation `groups`; None if the store has no groups."""
        if self._storage.keys.group is None:
            return None
        with self.groups.lock:
            self.groups.look(self)
            return self.groups.table()

    def episodes(
        self,
        where: str | None,
        order_by: str | None,
        limit: int | None,
        params: Sequence[object] | Mapping[str, object] | None,
    ) -> Result:
        """Return rows of the relation `episodes`, filtered and sorted.

        Raises:
            QueryError: `where` or `order_by` is not a valid expression, or DuckDB cannot evaluate it.
            StateError: The store is closed.
        """
        from expstore.sql.views import select_episodes

        return self.query(select_episodes(where, order_by, limit), params)

    def find_episodes(self, numbers: Sequence[int]) -> list[LogEntry]:
        """Return the log entries of episodes, also of those whose rows are gone; the caller holds the lock.

        Args:
            numbers: Ids of the episodes.

        Raises:
            NotFoundError: No episode ever had one of these ids.
        """
        storage = self._storage
        with storage.locks.episodes:
            recent = {number: storage.episodes.find(number) for number in numbers}
        found = {number: one.entry(0, 0) for number, one in recent.items() if one is not None}
        rest = [number for number, one in recent.items() if one is None]
        if rest:
            try:
                older = self._update_index().find_episodes(rest)
            except CorruptionError as exc:
                if exc.kind != "index":
                    raise
                _log.warning("%s", exc)
                older = self.catch_up().find_episodes(rest)
            found |= {entry.episode: entry for entry in older}
        for number in numbers:
            if number not in found:
                raise unknown_episode(storage, number)
        return [found[number] for number in numbers]

    def _update_index(self) -> Index:
        """Return the index if the changes it lacks are all known in memory; otherwise update it first."""
        with self._lock:
            index, storage = self._index, self._storage
            if index is None or self._lacks_changes(index, storage.state.content):
                return self.catch_up()
            return index

    def _lacks_changes(self, index: Index, content: tuple[int, int]) -> bool:
        """Return whether the index lacks changes that are no longer known in memory."""
        storage = self._storage
        # A store in RAM may have had an earlier index, to which changes were committed that are now lost.
        nothing = index.position == (0, 0) and storage.write_count > 0
        return self._whole or nothing or not storage.state.index_floor <= index.position <= content

    def catch_up(self, last: Mapping[str, object] | None = None) -> Index:
        """Commit the missing changes to the index and return it; `last` is passed to `Index.commit`."""
        self._storage.follow()
        with self._lock:
            index = self._index or self._open()
            storage = self._storage
            with storage.locks.episodes:
                content = storage.state.content
                # After the content was replaced, no journal record names the rows that the index lacks.
                anew = storage.epochs.content != self._content and index.position > (0, 0)
                self._content = storage.epochs.content
                if index.position == content and not (self._whole or anew):
                    return index
                whole = anew or self._lacks_changes(index, content)
                window, table = storage.query_window, storage.episodes
                read_log = storage.state.log.capture() if whole else None
                self._whole = True
                table.evict(window.low)
                changes = table.take_changes(whole=whole)
            # Without the lock: this reads all fragments, and perhaps the whole log.
            log = None if read_log is None else LogColumns(read_log(), "episodes.log")
            delta = _build_delta(content, window, changes, log)
            index.commit(delta, last=last)
            self._whole = False
            return index

    def keep_up(self) -> None:
        """Update the index before the journal is truncated; does nothing once the catalog is closed."""
        with self._lock:
            if not self._closed:
                self.catch_up()

    @_retry_damaged_index
    def facts(self, names: Sequence[str], episodes: IntArray | None) -> Any:
        """Return facts about episodes as an Arrow table, in no particular order.

        Args:
            names: Columns of the relation `episodes`; must include `episode_id`.
            episodes: Ids of the episodes, without duplicates. Shape `(n,)`. None: all episodes with rows.

        Raises:
            StateError: The store is closed.
        """
        from expstore.sql.expressions import table_of_facts
        from expstore.sql.views import Relations, quote

        select = "SELECT " + ", ".join(map(quote, names)) + " FROM episodes WHERE "
        if episodes is None:
            return self.catch_up().query(select + "live_rows > 0", None, Relations()).arrow()
        select += "episode_id IN (SELECT unnest(?::BIGINT[]))"
        if "source" in names:  # the names of some sources are only in the index
            return self.catch_up().query(select, [episodes], Relations()).arrow()
        with self._lock:
            table, entries, rest = self._storage.episodes, [], []
            with self._storage.locks.episodes:
                for number in episodes.tolist():
                    known = table.find(number)
                    if known is None:
                        rest.append(number)
                    else:
                        entries.append(known.entry(0, 0))
            found = None
            if rest:
                found = self._update_index().query(select, [rest], Relations()).arrow()
            return table_of_facts(names, entries, found)

    def check_selections(self, names: Collection[str]) -> None:
        """Raise QueryError if the store has no selection of one of these names.

        Args:
            names: The names of which a condition uses the selections.
        """
        from expstore.sql.selections import check_names

        if names:
            found = self.query("SELECT name FROM selections ORDER BY name", None).fetchall()
            check_names(names, [name for (name,) in found])

    def read_definitions(self) -> dict[str, Any]:
        """Return the definitions of the selections, by name, as facts of episodes have them."""
        found = self.query(_DEFINITIONS, None).fetchall()
        return {name: dict(zip(DEFINITION, values, strict=True)) for name, *values in found}

    def busy(self) -> bool:
        """Return whether many changes are waiting to be committed to the index."""
        return self._storage.episodes.waiting > MANY_CHANGES

    def close(self) -> None:
        """Bring the index up to date for other programs and close it.

        With `tuning.INDEX_ON_CLOSE` off, an index that was never opened is not updated.
        """
        with self._lock:
            self._closed = True  # otherwise the storage's final sync would reopen the index and leave it open
            if self._index is None and not tuning.INDEX_ON_CLOSE:
                return
            storage = self._storage
            try:
                weighed = storage.priorities.were_set and storage.schema is not None
                index = self.catch_up(None if weighed else meta_relation(storage))
                if weighed:
                    ids = storage.stored.ids()
                    index.write_priorities(ids, storage.priorities.values_at(storage.geometry.slot_of(ids)))
                if not index.complete:
                    index.write_meta(meta_relation(storage))
            except ExpStoreError as exc:
                # The index is derived data: the next query updates or rebuilds it.
                _log.warning("the index could not be brought up to date: %s", exc)
            try:
                self.drop()
            except ExpStoreError as exc:
                _log.warning("the index could not be completed: %s", exc)

    def drop(self) -> None:
        """Close the index without committing the newest changes to it."""
        with self._lock:
            if self._index is not None:
                self._index.close()
                self._index = None

    def _open(self) -> Index:
        from expstore.sql.index import Index  # loads DuckDB, which sampling does not need

        storage = self._storage
        if storage.index.path is not None and os.getpid() != self._pid:
            raise StateError(
                "the index belongs to the process that opened the store, and this is a fork of it"
            )
        index = Index.open(
            storage.index.path, disk=storage.disk, store_uuid=storage.description.uuid,
            meta=meta_relation(storage), config=self._config,
        )  # fmt: skip
        if index.notice:
            _log.warning("%s", index.notice)
        self._index = index
        return index


def _build_delta(content: tuple[int, int], window: Window, changes: Changes, log: LogColumns | None) -> Delta:
    """Build a delta; with `log`, the log of the store, it contains the whole store."""
    from expstore.sql.delta import Delta

    sources, episodes = changes.sources, _columns_of(changes.episodes)
    if log is not None:
        sources, ended = _latest(log)
        episodes = {name: np.concatenate((ended[name], episodes[name])) for name in ended}
        touched = episodes["episode_id"]
        fragments = chosen = changes.fragments.columns()
    else:
        touched = changes.find_touched(window.low)
        fragments = changes.fragments.of(touched)
        chosen = changes.fragments.of(np.append(episodes["episode_id"], changes.cut))
    return Delta(
        position=content,
        last_id=window.last,
        low_id=window.low,
        time=now_us(),
        sources=[
            (s.source, s.text, s.named, s.generation, s.session, s.start, s.end or None) for s in sources
        ],
        episodes=episodes,
        fragments=dict(zip(("episode_id", *Fragments.COLUMNS[1:]), chosen, strict=True)),
        live={"episode_id": touched, "live_rows": count_live(fragments, touched, window.low)},
        anew=changes.cut,
        complete=log is not None,
    )


def _latest(log: LogColumns) -> tuple[list[LogEntry], dict[str, Array]]:
    """Return the sources, and the columns of the last entry of every episode that has ended."""
    sources = {entry.source: entry for entry in log.sources()}
    sources.pop(0, None)  # `repair` uses source 0 to fill pieces of a log
    last = log.latest()
    return list(sources.values()), _episode_columns(log, last[log.heads["status"][last] != OPEN])


def _episode_columns(log: LogColumns, chosen: IntArray) -> dict[str, Array]:
    """Return the columns of `Delta.episodes` for the entries at some positions."""
    heads = log.heads[chosen]
    with_trajectory, with_return = log.has_trajectory()[chosen], log.has_return()[chosen]
    return {
        "episode_id": heads["episode"],
        "source": heads["source"].astype(np.int64),
        "trajectory_id": heads["trajectory"],
        "has_trajectory": with_trajectory,
        "start_time": heads["start"],
        "end_time": np.where(heads["status"] == OPEN, -1, heads["end"]),
        "length": heads["length"],
        "return": heads["ret"],
        "has_return": with_return,
        "status": heads["status"],
        "last_id": heads["last_id"],
        "info": np.array([text or None for text in log.texts(chosen)], object),
    }


def _columns_of(entries: Sequence[LogEntry]) -> dict[str, Array]:
    """Return the columns of `Delta.episodes` for entries of episodes."""
    return {
        "episode_id": np.array([entry.episode for entry in entries], np.int64),
        "source": np.array([entry.source for entry in entries], np.int64),
        "trajectory_id": np.array([entry.trajectory or 0 for entry in entries], np.int64),
        "has_trajectory": np.array([entry.trajectory is not None for entry in entries], bool),
        "start_time": np.array([entry.start for entry in entries], np.int64),
        "end_time": np.array([-1 if entry.status == OPEN else entry.end for entry in entries], np.int64),
        "length": np.array([entry.length for entry in entries], np.int64),
        "return": np.array([entry.ret or 0.0 for entry in entries], np.float64),
        "has_return": np.array([entry.ret is not None for entry in entries], bool),
        "status": np.array([entry.status for entry in entries], np.uint8),
        "last_id": np.array([entry.last_id for entry in entries], np.int64),
        "info": np.array([entry.text or None for entry in entries], object),
    }
