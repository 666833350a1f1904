"""Sessions of a storage: end them and their open episodes, open them again, adopt their episodes.

Used by buffers, by storages that are closed, and when rows are appended. Changes are stored as records by
`Storage.annotate`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from expstore.core.values import IntArray
from expstore.episodes.sessions import End, Heir, SessionKey
from expstore.episodes.sources import lane_names
from expstore.errors import SchemaError, StateError
from expstore.storages.batch import now_us

if TYPE_CHECKING:
    from expstore.episodes.log import Episode
    from expstore.storages.base import Storage
    from expstore.storages.read_view import ReadView

_logger = logging.getLogger("expstore")


def end_episodes(storage: ReadView, source: str | None = None, *, session: SessionKey | None = None) -> None:
    """End open episodes: they become `cut`, and no row can continue truncated ones.

    Args:
        storage: The storage.
        source: Name of the stream; None: all streams, including unnamed ones.
        session: The session; None: all sessions.

    Raises:
        StateError: The storage cannot be written.
        StorageError: The disk failed; no episode is ended.
    """
    with storage.lock:
        writer = storage.writer()
        table = storage.episodes
        if source is not None:
            numbers: Sequence[int] | None = table.sources_named(source, session=session)
        elif session is None:
            numbers = None
        else:
            known = table.session_of(session)
            numbers = [] if known is None else known.numbers()
        _end(writer, numbers)


def end_unnamed(storage: ReadView, session: SessionKey | None = None) -> None:
    """End the open episodes of a session's unnamed stream, of all its lanes; see `end_episodes`.

    Args:
        storage: The storage.
        session: The session; None: the storage's own.
    """
    with storage.lock:
        _end(storage.writer(), storage.episodes.find_unnamed_sources(session or storage.episodes.session))


def end_stream(
    storage: ReadView,
    source: str | None,
    *,
    session: SessionKey | None = None,
    lanes: Collection[int] | None = None,
) -> None:
    """End the open episodes of one stream of a session; see `end_episodes`.

    Args:
        storage: Where they are.
        source: Name of the stream; None: the unnamed one.
        session: Which session; None: the own one.
        lanes: Numbers of the lanes whose episodes end; None: all lanes.
    """
    session = session or storage.episodes.session
    if lanes is not None:
        with storage.lock:
            _end(storage.writer(), storage.episodes.sources_of_lanes(source, lanes, session))
    elif source is None:
        end_unnamed(storage, session)
    else:
        end_episodes(storage, source, session=session)


def _end(storage: Storage, numbers: Sequence[int] | None) -> None:
    if storage.episodes.has_open(numbers):
        storage.annotate(End(now_us(), None if numbers is None else tuple(numbers)))


def end_sessions(storage: ReadView, sessions: Iterable[SessionKey]) -> None:
    """End sessions: their open episodes become `cut`.

    Sessions that have ended, or have written nothing, are skipped.

    Raises:
        StateError: The storage cannot be written.
        StorageError: The disk failed; no session is ended.
    """
    with storage.lock:
        writer = storage.writer()
        live = set(storage.episodes.live_sessions())
        over = tuple(key for key in sessions if key in live)
        if over:
            writer.annotate(End(now_us(), (), over))


def resume(
    storage: ReadView, source: str, *, session: SessionKey | None = None, check: bool = True
) -> IntArray:
    """Adopt the open episodes of the newest ended session that wrote a stream of this name.

    Args:
        storage: The storage.
        source: Name of the stream, to which this session has not written a row yet. Repeated calls before its
            first row return the same.
        session: The session that adopts the episodes; None: the storage's own.
        check: Whether the next row of each episode must match the episode's last row.

    Returns:
        Ids of the adopted episodes, ascending. Shape `(n,)`, int64.

    Raises:
        StateError: The session has written to the stream already, or the storage cannot be written.
        SchemaError: `check` is set, but an episode's last row is gone or rows have no observations to
            compare.
        StorageError: The disk failed; nothing is adopted.
    """
    to = session or storage.episodes.session
    with storage.lock:
        writer = storage.writer()
        table = storage.episodes
        lane_names(source, "", 1)  # raises if it is not a valid name
        written = set(table.sources_named(source, session=to))
        if written - table.waiting_heirs():
            raise StateError(
                f"this session has already written rows of source {source!r}",
                kind="resume",
                hint="call episodes.resume() before the first row of the source",
            )
        if written:  # a repeated call, perhaps because the answer was lost
            return np.sort(np.array([one.episode for one in table.open_of(written)], np.int64))
        ended = table.newest_ended(source)
        if ended is None:
            return np.zeros(0, np.int64)
        change = table.resumption(ended, source, to=to, time=now_us())
        adopted = [one for one in ended.cut.values() if one.source in change.numbers]
        if check:
            _require_checkable(storage, adopted)
        heirs = {}
        for number, new in zip(change.numbers, change.sources, strict=True):
            episodes = {one.episode for one in adopted if check and one.source == number}
            heirs[new.number] = Heir(unchecked=episodes)
        numbers = np.sort(np.array([one.episode for one in adopted], np.int64))
        writer.annotate(change)
        # The table may have been replaced: after an interruption the journal is read again.
        storage.episodes.heirs.update(heirs)
        return numbers


def _require_checkable(storage: ReadView, episodes: Sequence[Episode]) -> None:
    """Raise SchemaError unless the next row of each episode can be compared with its last row."""
    if not episodes:
        return
    last = np.array([episode.last_id for episode in episodes])
    gone = ~storage.stored.holds(last)
    pairs = storage.description.observations
    if gone.any() or not pairs:
        episode = episodes[int(gone.argmax()) if pairs else 0].episode
        raise SchemaError(
            f"cannot check which row continues episode {episode}: "
            + ("its last row is gone" if pairs else "the rows have no observations to compare"),
            hint="resume(..., check=False) adopts it without a check",
        )
