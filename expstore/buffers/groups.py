"""`rb.groups`: query groups of episodes, and start, close or discard one.

Used by users. `sql/groups.py` says which episodes are a group; `samplers/groups.py` draws them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from expstore.buffers.consumer import Consumer
from expstore.core.arguments import check_whole
from expstore.errors import ArgumentError, NotReadyError, StateError

if TYPE_CHECKING:
    from expstore.buffers.store_handle import StoreHandle
    from expstore.episodes.sessions import SessionKey
    from expstore.sql.result import Result
    from expstore.storages.read_view import ReadView

#: Seconds between two attempts to start a group.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.1


class Ending(NamedTuple):
    """What ends a group.

    Args:
        number: Id of the group; or of one that was started, the value for the field of the group.
        status: "complete", "discarded", or "abandoned": discarded unless it is complete.
        reason: Why it is discarded.
        started: Whether the number is that of a group that was started.
    """

    number: int
    status: Literal["complete", "discarded", "abandoned"]
    reason: str = ""
    started: bool = False


class StartedGroup:
    """A group that was started: write its rollouts with `id` in the field of the group.

    At the end of a `with` block an open group is closed; after an exception it is discarded, unless it is
    complete.

    Threads: any number may use it. Processes: `id` may be sent to others that write its rollouts; this object
    ends it. Crashes: see `Groups.start`.
    """

    def __init__(self, id: int, version: int, lag: int, end: Callable[[Ending], None]) -> None:
        #: The value for the field of the group, an int; `str(id)` for a field of texts.
        self.id = id
        #: The policy version that it was started with.
        self.version = version
        #: How many versions it, or a group after it, will be behind at its turn, if none before it fails.
        self.lag = lag
        self._end = end

    def close(self) -> None:
        """Complete it with the members that have ended; a complete group does not change.

        Raises:
            NotFoundError: It has ended, and has no episode.
            StateError: No member has ended; it was discarded, or rows of it were evicted.
            StorageError: The disk failed; nothing has changed.
        """
        self._end(Ending(self.id, "complete", started=True))

    def discard(self, *, reason: str) -> None:
        """Never draw it, and let others be started instead; see `Groups.discard`.

        Args:
            reason: Why; it is in the relation `groups`, if an episode has begun.

        Raises:
            ArgumentError: The reason is not text, or is empty.
            NotFoundError: It has ended, and has no episode.
            StateError: It was discarded already.
            StorageError: The disk failed; nothing has changed.
        """
        self._end(Ending(self.id, "discarded", _check_reason(reason), started=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._end(Ending(self.id, "abandoned", f"exception: {kind.__name__}", started=True))

    def __repr__(self) -> str:
        return f"StartedGroup({self.id}, version={self.version}, lag={self.lag})"


class Groups:
    """Query groups by calling it; its methods start, close and discard groups.

    The episodes of a split with the same value of `EpisodeKeys(group=...)` are a group, in the order in which
    they began: the first `group_size` of them, then the next. A group is `complete` when all of them have
    ended, that is terminated or truncated, or when it was closed; `failed` if one was cut or a row was
    evicted or deleted; `discarded`; and otherwise `open`.

    Threads: any number may use it. Crashes: a change survives the end of the process when its call returns,
    and a power failure after the next `flush`. Processes: the process that writes may change groups, and the
    workers of `rb.share()`.

    Args:
        store: The store.

    Example:
        >>> rb = expstore.open("run.exp", episodes={"group": "prompt_id", "group_size": 8})
        >>> rb.groups("status = 'complete' AND std_return > 0").arrow().num_rows
        0
    """

    def __init__(self, store: StoreHandle) -> None:
        self._store = store

    def __call__(
        self,
        where: str | None = None,
        order_by: str | None = None,
        limit: int | None = None,
        *,
        params: Sequence[object] | Mapping[str, object] | None = None,
    ) -> Result:
        """Return the relation `groups`, or a part of it. docs/groups.md describes its columns.

        Args:
            where: An SQL expression over its columns that selects groups; None: all.
            order_by: SQL expressions, as after ORDER BY; `group_id` is always appended as the last one.
            limit: Largest number of groups; None: all.
            params: Values for `?` (a sequence) or `$name` (a mapping) in the expressions.

        Raises:
            QueryError: `where` is not one expression, `order_by` is not a list of them, or DuckDB refuses
                them.
        """
        from expstore.sql.views import select_rows

        return self._query(select_rows("groups", "group_id", where, order_by, limit), params, limit)

    def _query(
        self, sql: str, params: Sequence[object] | Mapping[str, object] | None, limit: int | None
    ) -> Result:
        return self._store.catalog.query(sql, params)

    def start(
        self,
        *,
        version: int | Callable[[], int],
        consumer: str | None = None,
        timeout: float = 0.0,
    ) -> StartedGroup:
        """Start a group, unless it or one after it would be more than `max_lag` behind when it is drawn.

        A learner has version n when its consumer has drawn n batches, and the batch with number n is drawn
        then. Groups are drawn in the order of their versions, so the batch of a group is known when it is
        started. `groups_per_batch` and `max_lag` are those of the consumer's `GroupSampler`.

        A place is freed when the group is complete, fails or is discarded, or when the worker that started it
        has ended: then its group is discarded with reason "lost". Places are in the memory of the process
        that writes; after its end they are forgotten, and groups that are not complete are never drawn.

        Args:
            version: The version of the policy that samples the rollouts: `learner.position["draw"]` when its
                weights were saved. A function is called before each attempt, and may return a newer one.
            consumer: Name of the consumer that draws the group; None: the only one with a `max_lag`.
            timeout: How long to wait until the group may be started, in seconds.

        Returns:
            The group, which may be used in a `with` statement.

        Raises:
            ArgumentError: A value is not allowed, the learner does not have this version yet, or several
                consumers limit the lag.
            NotReadyError: The group would be too far behind: `version` and `lag` of the error say how far. Or
                no consumer with a `GroupSampler` that has a `max_lag` and the order "oldest" is open in the
                process that writes.
            StateError: The store has no groups, is closed, or is open for reading only.

        Example:
            >>> rb = expstore.open("run.exp", episodes={"group": "prompt_id", "group_size": 8})
            >>> sampler = expstore.GroupSampler(groups_per_batch=4, max_lag=2)
            >>> learner = rb.consumer("learner", sampler=sampler)
            >>> rb.groups.start(version=learner.position["draw"]).lag
            0
        """
        if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
            raise ArgumentError(f"timeout must be a number of seconds from 0 on, got {timeout!r}")
        if not isinstance(consumer, str | None):
            raise ArgumentError(f"consumer must be a name, got {consumer!r:.100}")
        until, pause = time.monotonic() + timeout, _FIRST_PAUSE
        while True:
            number = check_whole("version", version() if callable(version) else version)
            if number < 0:
                raise ArgumentError(f"version must be at least 0, got {number}")
            try:
                id, lag = self._try_start(number, consumer)
            except NotReadyError as exc:  # the consumer is not open yet
                error = exc
            else:
                if id is not None:
                    return StartedGroup(id, number, lag, self._end)
                error = NotReadyError(
                    f"no group of version {number} can be started: it, or one after it, would lag {lag} "
                    "versions when it is drawn, more than max_lag of the consumer",
                    hint="use newer weights: version= may be a function, and timeout= the seconds to wait",
                )
                error.version, error.lag = number, lag
            if (left := until - time.monotonic()) <= 0:
                raise error
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _try_start(self, version: int, consumer: str | None) -> tuple[int | None, int]:
        """Start a group; return the value that its episodes have, None if it is not started, and the lag."""
        proxy = self._store.proxy
        if proxy is not None:
            id, lag = json.loads(proxy.start_group(version, consumer))
            return id, lag
        return self.start_for(None, version, consumer)

    def start_for(
        self, session: SessionKey | None, version: int, consumer: str | None
    ) -> tuple[int | None, int]:
        """Start a group for a worker; see `start`. The arguments and results are those of one attempt."""
        storage = self._store.check_open()
        storage.writer()
        if not _has_groups(storage):
            raise StateError(
                "this store has no groups", hint="create it with episodes=EpisodeKeys(group=...)"
            )
        found = [one for one in self._store.find_parts(Consumer) if one.admits]
        if consumer is not None:
            found = [one for one in found if one.name == consumer]
        if not found:
            which = "consumer" if consumer is None else f"consumer {consumer!r}"
            raise NotReadyError(
                f"no {which} that limits the lag of groups is open in the process that writes",
                hint="open it there, with GroupSampler(..., max_lag=) and the order 'oldest'",
            )
        if len(found) > 1:
            names = ", ".join(one.name for one in found)
            raise ArgumentError(
                f"{len(found)} open consumers limit the lag of groups: {names}",
                hint="pass the name: start(version=..., consumer=...)",
            )
        return found[0].start_group(version, session)

    def free(self, sessions: Collection[SessionKey]) -> None:
        """Discard the groups that sessions have started and not completed; they have ended."""
        if _has_groups(self._store.check_open()):
            self._store.catalog.groups.free(self._store.catalog, sessions)

    def find_sessions(self) -> set[SessionKey]:
        """Return the sessions that have started groups which have not ended."""
        if not _has_groups(self._store.check_open()):
            return set()
        groups = self._store.catalog.groups
        with groups.lock:
            return {place.session for place in groups.places.values() if place.session is not None}

    def close(self, group_id: int, /) -> None:
        """Complete a group with the members that have ended. Its other members never belong to a group.

        Args:
            group_id: Id of a group that is open, or that failed because a member was cut.

        Raises:
            NotFoundError: There is no such group.
            StateError: The group has another status, or no member has ended; the store has no groups, is
                closed, or is open for reading only.
            StorageError: The disk failed; nothing has changed.

        Example:
            >>> for group_id in rb.groups("status = 'open' AND ended >= 4").arrow()["group_id"].to_pylist():
            ...     rb.groups.close(group_id)
        """
        self._end(Ending(_check_id(group_id), "complete"))

    def discard(self, group_id: int, /, *, reason: str) -> None:
        """Never draw a group. Episodes with the same value that begin later are another group.

        Args:
            group_id: Id of a group, which may be open, complete or failed; or the `id` of a group that was
                started and is not complete.
            reason: Why; it is in the relation `groups`.

        Raises:
            ArgumentError: The reason is not text, or is empty.
            NotFoundError: There is no such group.
            StateError: The group was discarded already; the store has no groups, is closed, or is open for
                reading only.
            StorageError: The disk failed; nothing has changed.

        Example:
            >>> for group_id in rb.groups("std_return = 0").arrow()["group_id"].to_pylist():
            ...     rb.groups.discard(group_id, reason="no signal")
        """
        self._end(Ending(_check_id(group_id), "discarded", _check_reason(reason)))

    def _end(self, ending: Ending) -> None:
        if self._store.proxy is not None:
            self._store.proxy.end_group(ending)
        else:
            self.end(ending)

    def end(self, ending: Ending) -> None:
        """Close or discard a group in the process that writes."""
        self._store.check_open().writer()
        catalog = self._store.catalog
        number, status, reason, started = ending
        if started or str(number) in catalog.groups.places:
            catalog.groups.end_place(catalog, number, status, reason)
        else:
            catalog.groups.end(catalog, number, status, reason)


def _has_groups(storage: ReadView) -> bool:
    return storage.manifest is not None and storage.manifest.group_key is not None


def _check_id(group_id: Any) -> int:
    return check_whole("group_id", group_id, hint="use an id of the relation groups")


def _check_reason(reason: str) -> str:
    if not isinstance(reason, str) or not reason:
        raise ArgumentError(f"reason must be text, got {reason!r:.100}", hint='such as reason="no signal"')
    return reason
