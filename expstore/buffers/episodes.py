"""Episodes of a buffer, `rb.episodes`: query, annotate and delete them, end open ones, adopt earlier ones.

Used by users and by the server. It appends no rows.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expstore.episodes.annotations import merge_info, pack_info
from expstore.episodes.sessions import SessionKey
from expstore.errors import SchemaError, StateError
from expstore.storages.episode_lookup import check_episode
from expstore.storages.sessions import end_episodes, end_sessions, end_unnamed, resume

if TYPE_CHECKING:
    from expstore.buffers.store_handle import StoreHandle
    from expstore.sql.result import Result
    from expstore.storages.capabilities import GivenUp

__all__ = ["Episodes", "remote_session"]

_LONGEST = 128


def remote_session(name: str) -> SessionKey:
    """Return the key of a remote session.

    Raises:
        SchemaError: The name is not 1 to 128 printable characters.
    """
    if not (isinstance(name, str) and 0 < len(name) <= _LONGEST and name.isascii() and name.isprintable()):
        raise SchemaError(
            f"{name!r:.150} is no name of a session",
            hint=f"give 1 to {_LONGEST} printable ASCII characters, a random id say",
        )
    return SessionKey(name, remote=True)


class Episodes:
    """Query episodes by calling it; its methods annotate, end, adopt and delete episodes.

    Threads: any number may use it. Crashes: what returned survives what `annotate` survives.

    Args:
        store: Where the episodes are.

    Example:
        >>> rb.episodes.resume("robot-1")  # after a restart, where the robot has gone on
        tensor([7])
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
        """Return episodes, also those whose rows have left: the relation `episodes`, or some of it.

        Columns: `episode_id, source, trajectory_id, start_time, end_time, length, return, status, live_rows,
        info`. `return` is NULL where rows have no reward.

        Args:
            where: Which ones: an SQL expression over these columns; None: all.
            order_by: In which order: SQL expressions, as behind ORDER BY; the last is always `episode_id`.
            limit: At most so many; None: all.
            params: Values for `?` (a sequence) or `$name` (a mapping) in the expressions.

        Raises:
            QueryError: `where` is not one expression, `order_by` no list of them, or DuckDB refuses them.

        Example:
            >>> rb.episodes("length > $n", order_by='"return" DESC', limit=10, params={"n": 100})
        """
        return self._store.catalog.episodes(where, order_by, limit, params)

    def annotate(self, episode_id: int, /, **info: Any) -> dict[str, Any]:
        """Note facts about an episode: an open one, an ended one, or one whose rows have left.

        They are in the column `info` of the relation `episodes`. A call that has returned survives the
        process, and the machine after the next `flush`.

        Args:
            episode_id: Which one; samples and `sql` say it.
            info: Text, numbers, booleans, lists and dicts of them: each replaces the fact of its name; None
                removes the fact.

        Returns:
            All facts about the episode now.

        Raises:
            NotFoundError: There never was such an episode.
            SchemaError: JSON has no form for a value; nothing was changed.
            StateError: The store is closed, or open for reading only.

        Example:
            >>> rb.episodes.annotate(3, success=True, operator="ada")
            {'success': True, 'operator': 'ada'}
        """
        changes, proxy = pack_info(info), self._store.proxy
        if proxy is not None:
            found: dict[str, Any] = json.loads(proxy.annotate(check_episode(episode_id), changes))
            return found
        storage = self._store.storage
        with storage.lock:
            writer = storage.writer()
            entry = self._store.catalog.find_episode(check_episode(episode_id))
            text = merge_info(entry.text, changes)
            if text != entry.text:
                writer.annotate(replace(entry, text=text))
        return dict(json.loads(text)) if text else {}

    def delete(
        self,
        where: str,
        *,
        params: Sequence[object] | Mapping[str, object] | None = None,
        dry_run: bool = False,
    ) -> GivenUp:
        """Delete the rows of all ended episodes that meet a condition; open episodes keep theirs.

        The facts of the episodes stay in the relation `episodes`, and ids are never used again. Rows are gone
        for good when this returns; a crash before that deletes all of them or none.

        Args:
            where: Which episodes: an SQL expression over the columns of the relation `episodes`.
            params: Values for `?` (a sequence) or `$name` (a mapping) in the expression.
            dry_run: Delete nothing; only return what would be deleted.

        Returns:
            How many episodes and rows were deleted, and how much less space the columns take.

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
        """End open episodes: they become `cut`, and truncated ones take no more rows.

        Call it where an environment is reset without its last step saying so. In a process that writes
        through another one only episodes of its own session are ended.

        Args:
            source: Name of the stream; None: all open episodes, those of unnamed streams too.
            session: Only those of this remote session; None: of all sessions.

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
            session: A remote session; None: this handle's own.
            source: Name of the stream; None: all of them.
            unnamed: Without a source: only the unnamed stream.
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
            source: As `extend` was given it; None: the unnamed stream.

        Raises:
            StateError: The store is closed, or open for reading only.
            StorageError: The disk failed; no episode is ended.
        """
        self.end_of(None, source, unnamed=source is None)

    def resume(self, source: str, *, check: bool = True, session: str | None = None) -> torch.Tensor:
        """Adopt the open episodes of the newest ended session that wrote to a source of this name.

        They are `open` again, and the rows of this session continue them, by their trajectory ids. Call it
        before the first row of the source.

        Args:
            source: Name of the stream.
            check: The first row of each episode must continue it: its observation equals the last next
                observation. Otherwise `extend` raises SchemaError and adds nothing. False: nothing is
                compared.
            session: The remote session that adopts them; None: this handle's own.

        Returns:
            Ids of the adopted episodes; none if no session of that name has ended, or it left none open.
            Shape `(n,)`, int64.

        Raises:
            StateError: This session has written rows of the source already; or the store is closed, or open
                for reading only.
            SchemaError: `check` is set, but the rows have no observations to compare, or the last row is
                gone.
            StorageError: The disk failed; nothing is adopted.
        """
        proxy = self._store.proxy
        if proxy is not None and session is None:
            return torch.from_numpy(proxy.resume(source, check=check))
        to = None if session is None else remote_session(session)
        return torch.from_numpy(resume(self._store.storage, source, session=to, check=check))

    def end_session(self, sessions: Collection[str]) -> None:
        """End remote sessions: their open episodes become `cut`. Rows that come later open them again.

        Args:
            sessions: Their ids. Those that have ended, or have written nothing, are skipped.

        Raises:
            StateError: The store is closed, or open for reading only.
            StorageError: The disk failed; no session is ended.
        """
        end_sessions(self._store.storage, [remote_session(name) for name in sessions])

    def remote_sessions(self) -> list[str]:
        """Return the ids of the remote sessions that are live."""
        with self._store.storage.locks.episodes:
            return [key.id for key in self._store.storage.episodes.live_sessions() if key.remote]
