"""Apply the policy of a store without a capacity: the thread, and the choice of episodes.

Used by `expstore.buffers.store_handle` and the command line. This module queries the index, evaluates
conditions and selects episodes; the storage deletes their rows.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from expstore.core import tuning
from expstore.core.id_set import IdSet
from expstore.core.retention_policy import Retain
from expstore.core.values import IntArray
from expstore.episodes.fragments import all_ids
from expstore.errors import ExpStoreError, StateError
from expstore.storages.capabilities import GivenUp
from expstore.storages.capabilities import Retention as Deletion
from expstore.storages.format.draw_log import Leases, find_leases, stop_leasing
from expstore.storages.read_view import ReadView

if TYPE_CHECKING:
    from expstore.samplers.filter import Filter
    from expstore.sql.sync import Catalog

_log = logging.getLogger("expstore")
_FACTS = ("episode_id", "status", "end_time")


def load_policy(storage: ReadView) -> Retain | None:
    """Return the policy of a store; None: all rows are kept."""
    manifest = storage.manifest
    return Retain(**manifest.retain) if manifest is not None and manifest.retain else None


class PolicyRunner:
    """Apply retention policies to a store.

    Threads: one thread applies a policy at a time; others write and read meanwhile. The background thread has
    a weak reference to this object, and ends with it. Processes: only the store's writer applies policies.
    Crashes: as `expstore.storages.engine.delete.Deletion`.

    Args:
        storage: The storage.
        deletion: Deletes its rows.
        catalog: Its SQL index.

    Example:
        >>> from expstore import Retain
        >>> rb.retention.set(Retain(age="7d"))
        >>> rb.retention.apply(dry_run=True).rows
        0
    """

    def __init__(self, storage: ReadView, deletion: Deletion, catalog: Catalog) -> None:
        self._storage, self._deletion, self._catalog = storage, deletion, catalog
        self._lock = storage.locks.order.rank_lock("retention", threading.Lock())
        self._filter: Filter | None = None
        self._told = ""  # the last problem that was logged
        self._warned: dict[Path, int] = {}  # consumers whose leases ended, and their committed draws then
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    # -- in the background -----------------------------------------------------------------------

    def start(self) -> None:
        """Start to apply the stored policy every few seconds."""
        if self._thread is None and not self._ended.is_set():
            self._thread = threading.Thread(
                target=_rounds, args=(weakref.ref(self), self._ended), name="expstore-retention", daemon=True
            )
            self._thread.start()
            # Also at the end of the process: a thread that calls DuckDB then would crash it.
            weakref.finalize(self, _end, self._ended, self._thread, os.getpid())

    def stop(self) -> None:
        """Stop the background thread; wait for a run in progress."""
        self._ended.set()
        if self._thread is not None:
            _end(self._ended, self._thread, os.getpid())

    def go_round(self) -> None:
        """Apply the stored policy; log each problem once."""
        try:
            self.apply(self._deletion.policy or Retain())
            self._told = ""
        except ExpStoreError as exc:
            if not self._storage.closed and str(exc) != self._told:
                self._told = str(exc)
                _log.warning("the retention policy could not be applied: %s", exc)

    def keep(self, policy: Retain) -> None:
        """Store a policy; it is durable when this returns.

        Raises:
            StateError: The store has a capacity, is closed, or cannot be written.
            StorageError: The disk failed; nothing was changed.
        """
        self._deletion.keep_policy(policy.to_json())

    # -- selecting and deleting ------------------------------------------------------------------

    def check(self, policy: Retain) -> None:
        """Check that the store's rows have the fields that a policy names.

        Raises:
            QueryError: A field is missing, or `where` is not a boolean expression.
        """
        filter = self._filter_of(policy.where)
        schema = self._storage.schema
        if filter is not None and schema is not None:
            filter.fields(self._storage)

    def apply(self, policy: Retain, *, dry_run: bool = False) -> GivenUp:
        """Delete the rows that a policy does not keep and that no consumer has leased.

        Args:
            policy: Which rows are kept.
            dry_run: Delete nothing; return what would be deleted, with the size of these rows as `bytes`.

        Raises:
            QueryError: The condition cannot be computed.
            StateError: The store is closed, or cannot be written.
            StorageError: The disk failed.
        """
        with self._lock:
            storage = self._storage
            if storage.schema is None or not policy:
                return GivenUp()
            going = self._find(policy)
            if dry_run or not going.size or storage.path is None:
                return self.delete(self._leave_leased(going, dry_run), dry_run=dry_run)
            with stop_leasing(storage.disk, storage.path):
                return self.delete(self._leave_leased(going, dry_run))

    def delete(self, episodes: IntArray, *, dry_run: bool = False) -> GivenUp:
        """Delete the rows of ended episodes.

        Args:
            episodes: Ids of the episodes. Shape `(n,)`.
            dry_run: Delete nothing; return what would be deleted, with the size of these rows as `bytes`.

        Raises:
            StateError: The store is closed, or cannot be written.
            StorageError: The disk failed.
        """
        if not dry_run:
            return self._deletion.delete(episodes) if episodes.size else GivenUp()
        with self._storage.lock:
            rows = self._deletion.rows_of(episodes).ids
        return GivenUp(int(episodes.size), rows, int(rows * self._deletion.bytes_per_row()))

    def _find(self, policy: Retain) -> IntArray:
        """Return the episodes to delete, ascending. Shape `(n,)`."""
        table = self._catalog.facts(_FACTS, None).sort_by("episode_id")
        ended = np.array([status != "open" for status in table["status"].to_pylist()], np.bool_)
        episodes = table["episode_id"].to_numpy()[ended]
        going = np.zeros(episodes.size, np.bool_)
        if policy.age is not None:
            ends = table["end_time"].cast("int64").to_numpy(zero_copy_only=False)[ended]
            going |= ends < (time.time() - policy.age) * 1e6
        if policy.where is not None:
            going |= ~self._match(policy.where, episodes)
        if policy.bytes is not None:
            going |= self._find_surplus(policy.bytes, episodes, going)
        found: IntArray = episodes[going]
        return found

    def _leave_leased(self, episodes: IntArray, dry_run: bool) -> IntArray:
        """Return the episodes that have no leased rows. Shapes `(n,)`."""
        storage = self._storage
        if not episodes.size or storage.path is None:
            return episodes
        leases = list(find_leases(storage.disk, storage.path, storage.window.rows))
        if not leases:
            return episodes
        fragments, places = self._fragments(episodes)
        ids, owners = all_ids(fragments), np.repeat(places, fragments[2])
        kept = np.zeros(episodes.size, np.bool_)
        kept[owners[np.isin(ids, np.concatenate([one.ids for one in leases]))]] = True
        if not dry_run:
            self._warn(leases, IdSet.of_ids(ids[~kept[owners]]))
        return episodes[~kept]

    def _warn(self, leases: list[Leases], gone: IdSet) -> None:
        """Log, once for each consumer and commit, that rows of uncommitted draws are deleted."""
        for one in leases:
            committed = one.log.committed
            if self._warned.get(one.folder) == committed:
                continue
            for number, ids in one.ended:
                if gone.holds(ids).any():
                    self._warned[one.folder] = committed
                    _log.warning(
                        "the retention policy deletes rows of draw %d of consumer %r, which cannot go back "
                        "before it: it has drawn more rows than its lease_rows since its last commit; "
                        "commit more often, or open it with a larger lease_rows",
                        number,
                        one.folder.name,
                    )
                    break

    def _fragments(self, episodes: IntArray) -> tuple[IntArray, IntArray]:
        """Return the fragments of episodes, and the position of each fragment's episode in the argument."""
        storage = self._storage
        with storage.locks.episodes:
            fragments, low = storage.episodes.fragments.capture(), storage.stored.low
        chosen = fragments.of(episodes)
        chosen = chosen[:, chosen[3] > low]
        return chosen, np.searchsorted(episodes, chosen[0])

    def _match(self, where: str, episodes: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return for each episode whether a condition is true for at least one of its rows."""
        storage, filter = self._storage, self._filter_of(where)
        matched = np.zeros(episodes.size, np.bool_)
        if filter is None or not episodes.size:
            return matched
        filter.refresh(storage)
        fragments, places = self._fragments(episodes)
        ids = all_ids(fragments)
        known = ids <= filter.window.last
        masses = np.zeros(ids.size)
        masses[known] = filter.masses_of(storage, ids[known])
        owners = np.repeat(places, fragments[2])
        matched[owners[masses > 0]] = True
        matched[owners[~known]] = True  # rows newer than the filter's last evaluation
        return matched

    def _find_surplus(
        self, most: int, episodes: IntArray, going: np.ndarray[tuple[int], np.dtype[np.bool_]]
    ) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Return which of the oldest episodes to delete for the size, besides those already selected."""
        storage = self._storage
        fragments, places = self._fragments(episodes)
        rows = np.bincount(places, weights=fragments[2], minlength=episodes.size)
        each = self._deletion.bytes_per_row()
        excess = storage.stored.rows - float(rows[going].sum()) - most / each
        rows[going] = 0
        before = np.cumsum(rows) - rows
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (before < excess) & ~going
        return found

    def _filter_of(self, where: str | None) -> Filter | None:
        if where is None:
            return None
        if self._filter is None or self._filter.where != where:
            from expstore.samplers.filter import Filter  # loads DuckDB

            filter = Filter(where, None, split=None, whole=True)
            filter.attach(self._storage)
            self._filter = filter
        return self._filter


def _rounds(held: weakref.ref[PolicyRunner], ended: threading.Event) -> None:
    while not ended.wait(tuning.RETENTION_SECONDS):
        runner = held()
        if runner is None:
            return
        runner.go_round()
        del runner


def _end(ended: threading.Event, thread: threading.Thread, process: int) -> None:
    if os.getpid() != process:
        return  # a forked child, which does not have this thread
    ended.set()
    if thread is not threading.current_thread():
        thread.join()


def make_runner(storage: ReadView, catalog: Catalog) -> PolicyRunner:
    """Return a runner of policies for a storage.

    Raises:
        StateError: The storage does not delete rows by a policy.
    """
    deletion = None if storage.follows else storage.writer().retention
    if deletion is None:
        raise StateError(
            "only the writer of a store on disk deletes episodes",
            hint="do it in the process that opened it with expstore.open(path), without a capacity",
        )
    return PolicyRunner(storage, deletion, catalog)
