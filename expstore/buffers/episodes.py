"""`rb.episodes`: query, annotate and delete episodes, end open ones, and resume those of earlier sessions.

Used by users and by the HTTP server. It appends no rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expstore.buffers.changes import ChangeList
from expstore.buffers.groups import Groups
from expstore.buffers.measuring import MEASURES, Measure, Measured, Meter
from expstore.core.arguments import check_whole
from expstore.episodes.facts import merge_info, pack_info
from expstore.episodes.log import NewFacts
from expstore.episodes.sessions import SessionKey
from expstore.errors import SchemaError, StateError
from expstore.storages.episode_lookup import check_episode
from expstore.storages.sessions import end_episodes, end_sessions, end_unnamed, resume
from expstore.trajectories.odd import THRESHOLD

if TYPE_CHECKING:
    from expstore.buffers.store_handle import StoreHandle
    from expstore.sql.result import Result
    from expstore.storages.capabilities import GivenUp

_LONGEST = 128


def remote_session(name: str) -> SessionKey:
    """Return the key of a remote session.

    Raises:
        SchemaError: The name does not have 1 to 128 printable ASCII characters.
    """
    if not (isinstance(name, str) and 0 < len(name) <= _LONGEST and name.isascii() and name.isprintable()):
        raise SchemaError(
            f"{name!r:.150} is not a valid name of a session",
            hint=f"give 1 to {_LONGEST} printable ASCII characters, such as a random id",
        )
    return SessionKey(name, remote=True)


def annotate_episodes(store: StoreHandle, changes: Mapping[int, str]) -> dict[int, str]:
    """Merge new facts into those of episodes, by one record; return all facts about these episodes.

    Args:
        store: The store.
        changes: New facts as JSON text, by the id of the episode.

    Raises:
        NotFoundError: There never was one of these episodes; nothing was changed.
        StateError: The store is closed, or open for reading only.
    """
    storage = store.storage
    with storage.lock:
        writer = storage.writer()
        entries = store.catalog.find_episodes(list(changes))
        merged = [replace(one, text=merge_info(one.text, changes[one.episode])) for one in entries]
        changed = [new for new, old in zip(merged, entries, strict=True) if new.text != old.text]
        if changed:
            writer.annotate(NewFacts(tuple(changed)))
    return {entry.episode: entry.text for entry in merged}


class Episodes:
    """Query episodes by calling it; its methods annotate, end, resume and delete episodes.

    Threads: any number may use it. Crashes: a change survives the end of the process when its call
    returns, and a power failure after the next `flush`.

    Args:
        store: The store.

    Example:
        >>> with expstore.open("run.exp") as rb:
        ...     index = rb.extend(batch[:10], source="robot-1")
        >>> rb = expstore.open("run.exp")  # a restart, while the robot's episode continued
        >>> rb.episodes.resume("robot-1")
        tensor([1])
        >>> rb.episodes.end("robot-1")
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
        """Return the relation `episodes`, or a part of it; it also has episodes whose rows were removed.

        Columns: `episode_id, source, trajectory_id, start_time, end_time, length, return, status, live_rows,
        info`. `return` is NULL if rows have no reward.

        Args:
            where: An SQL expression over these columns that selects episodes; None: all.
            order_by: SQL expressions, as after ORDER BY; `episode_id` is always appended as the last one.
            limit: Largest number of episodes; None: all.
            params: Values for `?` (a sequence) or `$name` (a mapping) in the expressions.

        Raises:
            QueryError: `where` is not one expression, `order_by` is not a list of them, or DuckDB refuses
                them.

        Example:
            >>> rb.episodes("length > $n", order_by='"return" DESC', limit=10, params={"n": 100})
        """
        return self._store.catalog.episodes(where, order_by, limit, params)

    def annotate(self, episode_id: int, /, **info: Any) -> dict[str, Any]:
        """Attach facts to an episode; it may be open, ended, or without rows.

        The facts are in the column `info` of the relation `episodes`. They survive the end of the process
        when this returns, and a power failure after the next `flush`.

        Args:
            episode_id: Id of the episode, as in samples and SQL.
            info: Facts by name: text, numbers, booleans, or lists and dicts of them. A fact replaces the
                earlier fact of the same name; None removes it.

        Returns:
            All facts about the episode.

        Raises:
            NotFoundError: There never was such an episode.
            SchemaError: A value cannot be stored as JSON; nothing was changed.
            StateError: The store is closed, or open for reading only.

        Example:
            >>> rb.episodes.annotate(3, success=True, operator="ada")
            {'success': True, 'operator': 'ada'}
        """
        number = check_episode(episode_id)
        return self.annotate_each({number: info})[number]

    def annotate_each(self, facts: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Attach facts to several episodes, as `annotate` does: to all of them, or after a crash to none.

        Args:
            facts: New facts by name, by the id of the episode.

        Returns:
            All facts about each of these episodes.

        Raises:
            NotFoundError: There never was one of these episodes; nothing was changed.
            SchemaError: A value cannot be stored as JSON; nothing was changed.
            StateError: The store is closed, or open for reading only.

        Example:
            >>> rb.episodes.annotate_each({3: {"success": True}, 4: {"success": False}})
            {3: {'success': True}, 4: {'success': False}}
        """
        return self.annotate_texts({check_episode(number): pack_info(info) for number, info in facts.items()})

    def annotate_texts(self, changes: Mapping[int, str]) -> dict[int, dict[str, Any]]:
        """Attach facts that are JSON objects as text already; see `annotate_each`."""
        proxy = self._store.proxy
        texts = annotate_episodes(self._store, changes) if proxy is None else proxy.annotate(changes)
        return {number: json.loads(text) if text else {} for number, text in texts.items()}

    def measure(self, measures: Mapping[str, Measure] | None = None) -> Measured:
        """Measure ended episodes, and attach the result to each as the fact `measures`, which SQL sees.

        Only episodes that have no measures yet, or have become longer, are measured. Other threads and
        processes may write and sample meanwhile. After a crash the episodes measured so far have their facts.
        docs/odd.md lists the measures.

        Args:
            measures: Functions by name, besides the store's own measures. Each takes the columns of an
                episode, arrays by dotted name, and returns a number; NaN if it cannot be measured.

        Returns:
            Number of measured episodes and of their rows, and the fields that have no measures.

        Raises:
            ArgumentError: A measure is not a function, or has the name of one of the store's own.
            StateError: The store is closed, or open for reading only.
            StorageError: The disk failed.

        Example:
            >>> rb.episodes.measure({"effort": lambda columns: abs(columns["action"]).mean()}).episodes
            10
            >>> lively = rb.episodes("(info->>'$.measures.effort')::DOUBLE > 0.5")
        """
        store = self._store
        storage = store.check_open()
        if store.proxy is None:
            storage.writer()
        meter = Meter(storage, store.catalog, measures)
        episodes = rows = 0
        for found in meter.measure():
            self.annotate_each({episode: {MEASURES: facts} for episode, facts in found.items()})
            episodes += len(found)
            rows += sum(facts["length"] for facts in found.values())
        return Measured(episodes, rows, meter.list_skipped())

    def odd(self, limit: int | None = 20, *, threshold: float = THRESHOLD) -> Result:
        """List the episodes that differ most from their peers, the oddest first, with the reason in words.

        Episodes are compared within their split. Those that `measure` has not measured are measured for this
        call, which stores nothing.

        Columns: `episode_id, source, score, reason, by, measure, field, component, step, value, usual,
        copy_of`. `by` says what differs from its peers: the `episode`, its `source` about this time, or its
        policy `version`. docs/odd.md explains the score.

        Args:
            limit: Largest number of episodes; None: all.
            threshold: Smallest score, in robust standard deviations. 0 ranks all episodes.

        Raises:
            StateError: The store is closed.

        Example:
            >>> rb.episodes.odd(limit=3).arrow()["reason"].to_pylist()
            []
        """
        number = None if limit is None else check_whole("limit", limit)
        return Meter(self._store.check_open(), self._store.catalog).list_odd(number, threshold)[0]

    def changes(self, limit: int | None = 20) -> Result:
        """List since when which episodes differ from those before, the strongest change first, and how.

        A group of episodes, such as those of one source, changes if it differs from its own past, more than
        the other groups do at the same time. The newest 20,000 ended episodes are compared; those that
        `measure` has not measured are measured for this call, which stores nothing.

        Columns: `kind, by, name, value, where, since, until, episode_id, row_id, version, episodes, score,
        reason, measure, field, component, before, after`. `kind` is `drop` (of the return), `change` or,
        last, `improvement`. `where` selects the changed episodes. docs/changes.md explains the columns.

        Args:
            limit: Largest number of changes; None: all.

        Raises:
            StateError: The store is closed.

        Example:
            >>> rb.episodes.changes(limit=3).arrow()["reason"].to_pylist()
            []
        """
        number = None if limit is None else check_whole("limit", limit)
        listed = self.open_changes()
        listed.measure()
        return listed.find(number)[0]

    def open_changes(self) -> ChangeList:
        """Return what lists changes and odd episodes, and keeps the measures that it has computed."""
        return ChangeList(self._store.check_open(), self._store.catalog)

    def delete(
        self,
        where: str,
        *,
        params: Sequence[object] | Mapping[str, object] | None = None,
        dry_run: bool = False,
    ) -> GivenUp:
        """Delete the rows of all ended episodes that meet a condition. Open episodes are never deleted.

        The episodes and their facts stay in the relation `episodes`, and ids are never reused. The deletion
        is durable when this returns; after a crash before that, all of these rows are deleted or none.

        Args:
            where: An SQL expression over the columns of the relation `episodes`.
            params: Values for `?` (a sequence) or `$name` (a mapping) in the expression.
            dry_run: Delete nothing; only return what would be deleted.

        Returns:
            Number of deleted episodes and rows, and how many bytes less the columns take on disk.

        Raises:
            QueryError: `where` is not one expression, or DuckDB refuses it.
            StateError: The store has a capacity, or is in RAM, closed, or open for reading only.
            StorageError: The disk failed.

        Example:
            >>> rb.episodes.delete('"return" < 0', dry_run=True).episodes
            0
        """
        storage, runner = self._store.storage, self._store.runner
        if storage.capacity is not None:
            raise StateError(
                "a store with a capacity deletes no episodes: its oldest rows are evicted",
                hint="use a store without a capacity",
            )
        found = self._store.catalog.episodes(where, None, None, params).arrow()
        ended = [
            episode
            for episode, status, rows in zip(
                *(found[name].to_pylist() for name in ("episode_id", "status", "live_rows")), strict=True
            )
            if status != "open" and rows
        ]
        return runner.delete(np.array(ended, np.int64), dry_run=dry_run)

    def end(self, source: str | None = None, *, session: str | None = None) -> None:
        """End open episodes: their status becomes `cut`. Truncated ones keep it, but get no more rows.

        Call it when an environment is reset although its last step was not marked as done. In a process that
        writes through another one only episodes of its own session are ended.

        Args:
            source: Name of the stream; None: all open episodes, also those of unnamed streams.
            session: Id of a remote session, to end only its episodes; None: those of all sessions.

        Raises:
            StateError: The store is closed, or open for reading only.
            StorageError: The disk failed; no episode is ended.
        """
        proxy = self._store.proxy
        if proxy is not None and session is None:
            proxy.end(source)
            return
        end_episodes(
            self._store.storage, source, session=None if session is None else remote_session(session)
        )

    def end_of(self, session: str | None, source: str | None, *, unnamed: bool = False) -> None:
        """End the open episodes of one session, as `end` does.

        Args:
            session: Id of a remote session; None: this handle's own session.
            source: Name of the stream; None: all streams.
            unnamed: Without a source: end only the unnamed stream's.
        """
        proxy = self._store.proxy
        if proxy is not None and session is None:
            proxy.end(source, unnamed=unnamed)
            return
        key = self._store.storage.episodes.session if session is None else remote_session(session)
        if unnamed:
            end_unnamed(self._store.storage, key)
        else:
            end_episodes(self._store.storage, source, session=key)

    def end_stream(self, source: str | None) -> None:
        """End the open episodes of one stream of this handle's own session, as `end` does.

        Args:
            source: The `source` of `extend`; None: the unnamed stream.

        Raises:
            StateError: The store is closed, or open for reading only.
            StorageError: The disk failed; no episode is ended.
        """
        self.end_of(None, source, unnamed=source is None)

    def resume(self, source: str, *, check: bool = True, session: str | None = None) -> torch.Tensor:
        """Resume the open episodes of the newest ended session that wrote to a source.

        Their status becomes `open` again, and later rows of this session continue them, matched by trajectory
        id. Call it before the first row of the source.

        Args:
            source: Name of the stream.
            check: Whether the first row of each episode must continue it: its observation must equal the last
                next observation, otherwise `extend` raises SchemaError and appends nothing. False: nothing is
                compared.
            session: Id of the remote session that resumes them; None: this handle's own session.

        Returns:
            Ids of the resumed episodes; empty if no session that wrote to the source has ended, or it left no
            episode open. Shape `(n,)`, int64.

        Raises:
            StateError: This session has written rows of the source already, or the store is closed, or open
                for reading only.
            SchemaError: `check` is set, but the rows have no observations to compare, or the last row was
                removed.
            StorageError: The disk failed; no episode is resumed.
        """
        proxy = self._store.proxy
        if proxy is not None and session is None:
            return torch.from_numpy(proxy.resume(source, check=check))
        to = None if session is None else remote_session(session)
        return torch.from_numpy(resume(self._store.storage, source, session=to, check=check))

    def find_open(self, source: str | None, *, session: str | None = None) -> torch.Tensor:
        """Return the open episodes of a stream.

        Args:
            source: Name of the stream, in all sessions that have not ended; None: the unnamed stream of one
                session.
            session: Id of the remote session whose unnamed stream it is; None: this handle's own session.

        Returns:
            Ids of the episodes. Shape `(n,)`, int64.
        """
        storage = self._store.storage
        with storage.locks.episodes:
            table = storage.episodes
            if source is None:
                key = table.session if session is None else remote_session(session)
                numbers = table.find_unnamed_sources(key)
            else:
                numbers = table.sources_named(source)
            found = sorted(one.episode for one in table.open_of(numbers))
        return torch.tensor(found, dtype=torch.int64)

    def end_session(self, sessions: Collection[str]) -> None:
        """End remote sessions: the status of their open episodes becomes `cut`. Later rows reopen a session.

        The groups that they have started and not completed are discarded.

        Args:
            sessions: Ids of the sessions. Sessions that have ended or have written nothing are skipped.

        Raises:
            StateError: The store is closed, or open for reading only.
            StorageError: The disk failed; no session is ended.
        """
        keys = [remote_session(name) for name in sessions]
        end_sessions(self._store.storage, keys)
        Groups(self._store).free(keys)

    def remote_sessions(self) -> list[str]:
        """Return the ids of the remote sessions that have not ended, and have rows or have started groups."""
        started = Groups(self._store).find_sessions()
        with self._store.storage.locks.episodes:
            live = started.union(self._store.storage.episodes.live_sessions())
        return [key.id for key in live if key.remote]
