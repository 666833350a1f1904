"""The groups of a store: which episodes are together, and whether all of them have ended.

Owned by a catalog, used by `GroupSampler`, `rb.groups` and the relation `groups`. It follows from the facts
of episodes and from the readable rows; nothing of it is stored, except how a group was closed or discarded.
"""

from __future__ import annotations

import bisect
import contextlib
import heapq
import json
import logging
import math
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from expstore.core.id_set import NO_IDS
from expstore.core.values import IntArray
from expstore.episodes.facts import GROUP, TRAIN, merge_info, split_of
from expstore.episodes.log import NewFacts
from expstore.episodes.sessions import SessionKey
from expstore.errors import NotFoundError, QueryError, StateError
from expstore.sql.index import CONFIG
from expstore.sql.views import GROUPS, Relations, quote, select_rows

if TYPE_CHECKING:
    from expstore.sql.sync import Catalog
    from expstore.storages.read_view import ReadView
    from expstore.storages.run_index import Runs

_logger = logging.getLogger("expstore")
#: What is read of episodes; times are microseconds since 1970.
_KINDS = pa.schema(
    {
        "episode_id": pa.int64(),
        "info": pa.string(),
        "status": pa.string(),
        "length": pa.int64(),
        "return": pa.float64(),
        "start_time": pa.int64(),
        "end_time": pa.int64(),
    }
)
_FACTS = _KINDS.names
_ALL = f"SELECT {', '.join(map(quote, _FACTS))} FROM episodes WHERE info IS NOT NULL"
_ENDED = ("terminated", "truncated")
#: Numbers of places are smaller; JSON and JavaScript have them exactly.
_LARGEST_PLACE = 1 << 53


class Member(NamedTuple):
    """An episode of a group; `version` is that of its first row."""

    status: str
    length: int
    ret: float | None
    start: int
    end: int | None
    version: int | None


class DrawOrder(NamedTuple):
    """Where a group comes among others: the oldest policy version first, then what began first.

    Args:
        has_version: Whether a version is known; groups without one come first.
        version: The oldest policy version.
        began: Number of the place, or id of the first episode.
    """

    has_version: bool
    version: int
    began: int


class Place(NamedTuple):
    """A group that was started and is neither complete nor failed nor discarded.

    Args:
        id: The value that its episodes have in the group's field: the time in microseconds since 1970, or
            the next free number.
        version: The policy version of its rollouts.
        session: Who started it: when the session ends, the place is freed. None: this process.
    """

    id: int
    version: int
    session: SessionKey | None

    @property
    def order(self) -> DrawOrder:
        """Where its group comes among others."""
        return DrawOrder(True, self.version, self.id)


class Group:
    """Episodes of a split with the same key value.

    Args:
        id: Id of its first episode.
        key: The value.
        split: The split of all of them.
        place: Where it was started; None: it was not, or by a process that has ended.
    """

    __slots__ = ("end", "id", "key", "lost", "members", "oldest", "place", "reason", "split", "status")

    def __init__(self, id: int, key: int | str, split: str, place: Place | None = None) -> None:
        self.id, self.key, self.split, self.place = id, key, split, place
        self.members: dict[int, Member] = {}
        #: How it was closed or discarded; None: it was not.
        self.end: dict[str, Any] | None = None
        #: Whether a row of it cannot be read any more.
        self.lost = False
        self.oldest = 0
        self.status, self.reason = "open", ""

    def has_room(self, size: int | None) -> bool:
        """Return whether an episode that begins now belongs to it."""
        return self.end is None and (size is None or len(self.members) < size)

    def settle(self, size: int | None) -> None:
        """Compute status and reason."""
        status = {one.status for one in self.members.values()}
        if self.end is not None and self.end["status"] == "discarded":
            self.status, self.reason = "discarded", self.end["reason"]
        elif self.lost:
            self.status, self.reason = "failed", "evicted"
        elif self.end is None and "cut" in status:
            self.status, self.reason = "failed", "cut"
        elif self.end is not None or (status <= set(_ENDED) and not self.has_room(size)):
            self.status, self.reason = "complete", ""
        else:
            self.status, self.reason = "open", ""

    def versions(self) -> list[int]:
        """Return the policy versions of the members that have one."""
        return [one.version for one in self.members.values() if one.version is not None]

    def find_order(self) -> DrawOrder:
        """Return where it comes among others."""
        if self.place is not None:
            return self.place.order
        version = min(self.versions(), default=None)
        return DrawOrder(version is not None, version or 0, self.id)

    def describe(self) -> dict[str, Any]:
        """Return its row of the relation `groups`."""
        members = self.members.values()
        returns = [one.ret for one in members if one.ret is not None]
        ends, versions = [one.end for one in members if one.end is not None], self.versions()
        return {
            "group_id": self.id,
            "key": str(self.key),
            "split": self.split,
            "status": self.status,
            "reason": self.reason or None,
            "size": len(members),
            "members": list(self.members),
            "ended": sum(one.status in _ENDED for one in members),
            "length": sum(one.length for one in members),
            "mean_return": math.fsum(returns) / len(returns) if returns else None,
            "std_return": float(np.std(returns)) if returns else None,
            "min_version": min(versions, default=None),
            "max_version": max(versions, default=None),
            "start_time": min(one.start for one in members),
            "end_time": max(ends, default=None),
        }


class Groups:
    """Follow the groups of a storage. The cost of `look` is proportional to what changed since the last call.

    Threads: hold `lock` from `look` until its results are no longer used. Processes: each follows the store
    for itself. Crashes: it is computed again from the episodes, and all places are forgotten.

    Args:
        storage: The storage; the reference is weak.
    """

    def __init__(self, storage: ReadView) -> None:
        # In a follower `look` takes the storage's lock; as in `Runs`, which is used here.
        order = storage.locks.order
        self.lock: threading.RLock = (
            storage.lock if storage.follows else order.rank_lock("groups", threading.RLock())
        )
        self._storage = weakref.ref(storage)
        self._table: object | None = None
        #: Incremented when all groups are computed again: `changed` begins anew then.
        self.generation = 0
        #: The groups that were started, by the text of the value that their episodes have, in that order.
        self.places: dict[str, Place] = {}
        self._newest_place = 0
        self._reset()

    def _reset(self) -> None:
        self.generation += 1
        #: The groups by id.
        self.by_id: dict[int, Group] = {}
        #: Ids of groups in the order in which they changed.
        self.changed: list[int] = []
        #: The newest policy version of any episode; None: no episode has one.
        self.newest_version: int | None = None
        self._by_key: dict[tuple[int | str, str], list[Group]] = {}
        self._ages: list[tuple[int, int]] = []
        self._table, self._seen, self._content, self._deleted = None, 0, -1, NO_IDS

    def look(self, catalog: Catalog) -> None:
        """Follow new rows, ends of episodes and evictions; the caller holds the lock.

        Raises:
            StateError: The store has no groups.
        """
        storage = self._storage()
        if storage is None:
            raise StateError("the storage no longer exists")
        if storage.schema is None:
            return
        if storage.keys.group is None:
            raise StateError(
                "this store has no groups", hint="create it with episodes=EpisodeKeys(group=...)"
            )
        if storage.follows:
            storage.follow()
        size = storage.keys.group_size
        with storage.locks.episodes:
            table, count = storage.episodes, storage.episodes.touched.count
            is_known = table is self._table and storage.epochs.content == self._content
            changed = table.touched.since(self._seen) if is_known else None
        self._table = None  # until all is done: after an interruption the groups are computed again
        if changed is None:
            content = storage.epochs.content
            self._reset()
            self._content = content
            facts = catalog.catch_up().query(_ALL, None, Relations()).arrow()
        elif changed.size:
            facts = catalog.facts(_FACTS, changed)
        touched: dict[int, Group] = {}
        if changed is None or changed.size:
            facts = facts.sort_by("episode_id").select(_FACTS).cast(_KINDS)
            for values in zip(*(column.to_pylist() for column in facts.columns), strict=True):
                if (group := self._put(size, *values)) is not None:
                    touched[group.id] = group
        self._follow_rows(storage, list(touched.values()))
        for group in touched.values():
            self._settle(group, size)
        self._table, self._seen = table, count

    def _put(
        self,
        size: int | None,
        number: int,
        text: str | None,
        status: str,
        length: int,
        ret: float | None,
        start: int,
        end: int | None,
    ) -> Group | None:
        """Add an episode to its group, or update it there."""
        facts = json.loads(text).get(GROUP) if text and GROUP in text else None
        if facts is None:
            return None
        version = facts.get("version")
        if version is not None and (self.newest_version is None or version > self.newest_version):
            self.newest_version = version
        split = split_of(text or "")
        groups = self._by_key.setdefault((facts["key"], split), [])
        at = bisect.bisect_right(groups, number, key=lambda group: group.id) - 1
        group = groups[at] if at >= 0 else None
        if group is not None and number not in group.members:
            if group.end is not None and number <= group.id + group.end["last"]:
                if number - group.id not in group.end["members"]:
                    return None  # it had not ended when the group was closed
            elif not group.has_room(size):
                group = None
        if group is None:
            place = self.places.get(str(facts["key"])) if split == TRAIN else None
            group = self.by_id[number] = Group(number, facts["key"], split, place)
            groups.append(group)
            self._newest_place = max(self._newest_place, _number_of(facts["key"]))
        if number == group.id and "end" in facts:
            group.end = facts["end"]
            known = {group.id + offset for offset in group.end["members"]}
            group.members = {name: one for name, one in group.members.items() if name in known}
            if number not in known:
                return group
        group.members[number] = Member(status, length, ret, start, end, version)
        return group

    def _settle(self, group: Group, size: int | None) -> None:
        former = group.status
        group.settle(size)
        if group.status != former:
            self.changed.append(group.id)
            if group.status != "open" and group.place is not None:
                self.places.pop(str(group.key), None)

    def _follow_rows(self, storage: ReadView, touched: Sequence[Group]) -> None:
        """Find out which groups have lost rows: of these, of the oldest ones, and of all after a deletion."""
        size, runs = storage.keys.group_size, storage.runs
        with runs.lock:
            window = runs.look()
            whole = window.deleted != self._deleted
            self._deleted = window.deleted
            check = list(self.by_id.values()) if whole else touched
            members = [name for group in check for name in group.members]
            first, live = _find_rows(runs, np.array(members, np.int64))
        at = 0
        for group in check:
            stop = at + len(group.members)
            lengths = [one.length for one in group.members.values()]
            if not group.lost and (live[at:stop] < lengths).any():
                group.lost = True
                if whole:
                    self._settle(group, size)
            oldest = int(first[at:stop].min(initial=np.iinfo(np.int64).max))
            if not group.lost and (not group.oldest or oldest < group.oldest):
                group.oldest = oldest
                heapq.heappush(self._ages, (oldest, group.id))
            at = stop
        while self._ages and self._ages[0][0] <= window.low:
            group = self.by_id[heapq.heappop(self._ages)[1]]
            group.lost = True
            self._settle(group, size)

    def rows_of(self, storage: ReadView, group: Group) -> IntArray | None:
        """Return the ids of the rows of a group, by episode and step; None: some cannot be read any more."""
        members, runs = np.array(list(group.members)), storage.runs
        with runs.lock:
            runs.look()
            low, high = (np.searchsorted(runs.episode, members, side) for side in ("left", "right"))
            numbers = np.concatenate([np.arange(*ends) for ends in zip(low, high, strict=True)])
            first, stop = runs.first[numbers], runs.stop[numbers]
            live = np.bincount(np.repeat(np.arange(members.size), high - low), stop - first, members.size)
            if (live < [one.length for one in group.members.values()]).any():
                return None
            return runs.rows(numbers, first, stop - first)

    def table(self, ids: Iterable[int] | None = None) -> pa.Table:
        """Return the relation `groups`, or some rows of it."""
        groups = self.by_id.values() if ids is None else [self.by_id[id] for id in ids]
        return pa.Table.from_pylist([group.describe() for group in groups], GROUPS)

    # -- groups that are started before they have episodes ------------------------------------------

    def start(self, version: int, session: SessionKey | None) -> Place:
        """Let a group have a place among others before its first episode; the caller holds the lock."""
        now = time.time_ns() // 1000
        self._newest_place = number = max(now, self._newest_place + 1)  # also if the clock was set back
        place = self.places[str(number)] = Place(number, version, session)
        self.newest_version = max(version, version if self.newest_version is None else self.newest_version)
        return place

    def end_place(self, catalog: Catalog, number: int, status: str, reason: str = "") -> None:
        """Close or discard a group that was started; closing one that is complete does nothing.

        Args:
            catalog: The catalog that owns the groups.
            number: The value that its episodes have.
            status: "complete", "discarded", or "abandoned": discarded unless it is complete.
            reason: Why it is discarded.

        Raises:
            NotFoundError: It was not started by a process that is alive, and has no episode.
            StateError: No member has ended, or the group has another status.
        """
        with self.lock:
            self.look(catalog)
            found = self._by_key.get((number, TRAIN)) or self._by_key.get((str(number), TRAIN))
            if found is None and (place := self.places.get(str(number))) is not None:
                if status == "complete":
                    raise StateError(
                        f"group {number} has no episode, so it cannot be closed",
                        hint=f"write its rollouts with {number} in the field of the group, or discard it",
                    )
                del self.places[str(place.id)]
                return
        if found is None:
            raise NotFoundError(f"no group {number} was started, or it has ended")
        if status == "discarded" or found[0].status != "complete":
            self.end(catalog, found[0].id, "complete" if status == "complete" else "discarded", reason)

    def free(self, catalog: Catalog, sessions: Collection[SessionKey]) -> None:
        """Discard the groups that sessions have started and not completed, with reason "lost"."""
        with self.lock:
            lost = [place.id for place in self.places.values() if place.session in sessions]
        for number in lost:
            _logger.warning("group %d is lost: the worker that started it has ended", number)
            with contextlib.suppress(NotFoundError, StateError):  # it has ended meanwhile
                self.end_place(catalog, number, "abandoned", "lost")

    def end(self, catalog: Catalog, number: int, status: str, reason: str = "") -> Group:
        """Close or discard a group, durably.

        Args:
            catalog: The catalog that owns the groups.
            number: Id of the group.
            status: "complete" or "discarded".
            reason: Why it is discarded.

        Raises:
            NotFoundError: There is no such group.
            StateError: The group has another status, or no member has ended; the store cannot be written.
            StorageError: The disk failed; nothing has changed.
        """
        storage = self._storage()
        if storage is None:
            raise StateError("the storage no longer exists")
        with storage.lock:
            writer = storage.writer()
            with self.lock:
                self.look(catalog)
                group = self.by_id.get(number)
                if group is None:
                    raise NotFoundError(
                        f"there is no group {number!r}", hint="the relation groups has the ids of all groups"
                    )
                keeps = [
                    n for n, one in group.members.items() if status == "discarded" or one.status in _ENDED
                ]
                _check_end(group, status, keeps)
                end = {
                    "status": status,
                    "reason": reason,
                    "members": [name - number for name in keeps],
                    "last": max(group.members) - number,
                }
                [entry] = catalog.find_episodes([number])
                facts = json.loads(entry.text)[GROUP] | {"end": end}
                text = merge_info(entry.text, json.dumps({GROUP: facts}, ensure_ascii=False))
                writer.annotate(NewFacts((replace(entry, text=text),)))
                self.look(catalog)
                return group


def _number_of(key: int | str) -> int:
    """Return the number of the place that a value names; 0: it names none."""
    if isinstance(key, str):
        key = int(key) if len(key) <= 16 and key.isascii() and key.isdigit() else 0
    return key if key < _LARGEST_PLACE else 0


def _check_end(group: Group, status: str, members: Collection[int]) -> None:
    """Raise StateError if a group cannot be closed or discarded."""
    if status == "discarded":
        if group.status == "discarded":
            raise StateError(f"group {group.id} was discarded already: {group.reason}")
    elif group.status != "open" and group.reason != "cut":
        raise StateError(
            f"group {group.id} is {group.status} {group.reason}".rstrip() + ", and cannot be closed",
            hint="close a group that is open, or that failed because a member was cut",
        )
    elif not members:
        raise StateError(
            f"no member of group {group.id} has ended, so it cannot be closed", hint="wait, or discard it"
        )


def _find_rows(runs: Runs, episodes: IntArray) -> tuple[IntArray, IntArray]:
    """Return the id of the first readable row of each episode, 0 without one, and how many can be read."""
    low, high = (np.searchsorted(runs.episode, episodes, side) for side in ("left", "right"))
    live, first = np.zeros(episodes.size, np.int64), np.zeros(episodes.size, np.int64)
    there = np.flatnonzero(high > low)
    if there.size:
        first[there] = runs.ids(low[there], runs.first[low[there]])
    while there.size:  # once, unless rows of an episode were deleted between others
        live[there] += runs.stop[low[there]] - runs.first[low[there]]
        low[there] += 1
        there = there[high[there] > low[there]]
    return first, live


class Condition:
    """A condition on groups, which is evaluated apart from the store.

    Args:
        where: A boolean SQL expression over the columns of the relation `groups`.

    Raises:
        QueryError: It is not one, or names no such column.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._sql = select_rows("groups", "group_id", where, None, None)
        self._con: duckdb.DuckDBPyConnection | None = None
        self.match(GROUPS.empty_table())

    def match(self, table: pa.Table) -> list[int]:
        """Return the ids of the groups in a part of the relation that meet the condition.

        Raises:
            QueryError: DuckDB cannot evaluate it.
        """
        if self._con is None:
            self._con = duckdb.connect(config=CONFIG)
        try:
            found = self._con.register("groups", table).execute(self._sql).fetchall()
        except duckdb.Error as exc:
            raise QueryError(f"where={self.where!r} cannot be used: {exc}") from exc
        return [row[0] for row in found]
