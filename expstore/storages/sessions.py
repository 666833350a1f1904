"""Sessions of a storage: end them and their open episodes, open them again, adopt their episodes.

Used by buffers, by storages that are closed, and when rows are appended. Changes are stored as records by
`Storage.annotate`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from expstore.core.values import Array, IntArray, key_name
from expstore.episodes.sessions import End, Heir, Resume, SessionKey
from expstore.episodes.sources import lane_names
from expstore.episodes.table import Observations
from expstore.errors import SchemaError, StateError
from expstore.storages.batch import now_us

if TYPE_CHECKING:
    from expstore.episodes.log import Episode
    from expstore.episodes.segmentation import Steps
    from expstore.episodes.table import Assignment
    from expstore.storages.base import Storage
    from expstore.storages.read_view import ReadView

_logger = logging.getLogger("expstore")


def observations_of(storage: ReadView, columns: Sequence[Array], steps: Steps) -> Observations | None:
    """Return the observations by which a batch is compared with stored rows; None: it is not compared.

    Args:
        storage: The storage of the rows.
        columns: The batch, in the schema's order. Shapes `(n, *row shape)`.
        steps: Its episode fields.
    """
    pairs = storage.description.observations
    if not pairs or not (storage.state.episodes.heirs or (steps.linked and steps.count > 1)):
        return None
    return Observations(columns, pairs, partial(_read_next, storage))


def _read_next(storage: ReadView, numbers: Sequence[int]) -> dict[int, list[Array]]:
    """Return the next observations of those rows that are still in the store, by id."""
    window, places = storage.stored, [after for _, after in storage.description.observations]
    held = [number for number in numbers if number > window.low]
    if window.deleted:
        held = [number for number in held if window.deleted.upto(number) == window.deleted.upto(number - 1)]
    if not held:
        return {}
    columns = storage.state.take_recent(held, places)
    if columns is None:
        columns = storage.take(storage.geometry.slot_of(np.array(held)), places)
    return {row: [column[at] for column in columns] for at, row in enumerate(held)}


def warn_of(
    storage: ReadView, assignment: Assignment, source: str | None, session: SessionKey | None
) -> None:
    """Log, once for each source, mistakes in how it is written to.

    Args:
        storage: The storage.
        assignment: Episodes and steps of rows that were written.
        source: Name of their stream.
        session: The session that has written them; None: the storage's own.
    """
    if assignment.restarted:
        stream = "rows without a source" if source is None else f"source {source}"
        if storage.keys.trajectory is None:
            names = ", ".join(
                key_name(storage.require_schema().fields[place].key)
                for place, _ in storage.description.observations
            )
            text = (
                f"{stream} began another episode: {names} of its newest row does not equal the next "
                "observation of the row before, and no row has ended the episode, which is cut; set "
                "terminated or truncated in the last row of an episode, or call episodes.end() after it"
            )
        else:
            text = (
                f"{stream} began another episode under the trajectory id of its open one, which is cut: "
                "two collectors write under one name, or one has restarted; give each its own source=, "
                "or call episodes.end() when one restarts"
            )
        warn_once(storage, text, ("restart", source))
    if source is not None and assignment.sources:
        table = storage.episodes
        own = table.sources_named(source, session=session or storage.episodes.session)
        if len(table.sources_named(source)) > len(own):
            warn_once(
                storage,
                f"several sessions write to source {source} at the same time: each has episodes of its "
                "own; give each its own source= to tell them apart",
                ("sessions", source),
            )


def warn_once(storage: ReadView, text: str, once: Hashable) -> None:
    """Log a warning about how a storage is written to, unless it was logged before.

    Args:
        storage: The storage.
        text: The warning.
        once: Its name.
    """
    if once not in storage.warned:
        storage.warned.add(once)
        _logger.warning(text)


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


def reopen_session(storage: Storage, session: SessionKey) -> None:
    """Open an ended session again, with the episodes that its end has cut; the caller holds the lock."""
    known = storage.episodes.session_of(session)
    if known is not None and known.ended:
        cut = tuple(one.episode for one in known.cut.values())
        storage.annotate(Resume(now_us(), session, episodes=cut))


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
