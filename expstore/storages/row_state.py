"""Which rows a storage has at one moment, and all that is known of them but their values.

Used by every storage. It touches no file, and takes no lock.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from expstore.core.draw_state import DrawState
from expstore.core.idempotency import WriteKey, WriteKeys
from expstore.core.values import Window
from expstore.episodes.log import LogEntry
from expstore.episodes.sessions import End, Resume
from expstore.episodes.table import EpisodeTable
from expstore.storages.batch import Rows
from expstore.storages.columns.priorities import Priorities
from expstore.storages.columns.sample_counts import Sampled

__all__ = ["EpisodeList", "RowState"]


class Recovered(Protocol):
    """What `RowState` needs of what a journal says."""

    @property
    def retired(self) -> int:
        """The newest id that left otherwise than by age."""

    @property
    def write_count(self) -> int:
        """How many rows were ever written."""

    @property
    def content(self) -> tuple[int, int]:
        """The position of the newest record that says something of rows."""

    @property
    def index_floor(self) -> tuple[int, int]:
        """The position below which an index must be built anew."""

    @property
    def max_priority(self) -> float:
        """The largest priority so far."""


class EpisodeList:
    """What was noted about episodes that ended, in RAM.

    Example:
        >>> log = EpisodeList()
        >>> log.append([])
        >>> list(log.read())
        []
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[LogEntry] = ()) -> None:
        self._entries = list(entries)

    def append(self, entries: Iterable[LogEntry]) -> None:
        """Keep entries behind those that there are."""
        self._entries += entries

    def read(self) -> Iterator[LogEntry]:
        """Return every entry in order."""
        return iter(self._entries)


class EpisodeNotes(Protocol):
    """Where entries of ended episodes go: `EpisodeList`, or episodes.log."""

    def append(self, entries: list[LogEntry]) -> None:
        """Keep entries behind those that there are."""

    def read(self) -> Iterator[LogEntry]:
        """Return every entry in order."""


def _no_episodes() -> EpisodeTable:
    return EpisodeTable(session=uuid.uuid4().hex)


@dataclass(eq=False, kw_only=True)
class RowState:
    """The rows of a storage: which ids can be read, their episodes, priorities, counts and keys.

    A storage has one. Where its content becomes another (a snapshot is restored, a store is opened again, a
    follower finds another writer) it gets a new one, by one assignment.

    Invariants: `window.last` <= `horizon`; `retired` <= `window.low`.

    Threads: the storage's lock is held by who changes it; window and episodes change together under its lock
    of the episodes.

    Args:
        window: The ids that can be read.
        horizon: The newest id whose slot may have been written to.
        retired: The newest id that left otherwise than by age.
        write_count: How many rows were ever written.
        episodes: Of the rows.
        log: What was noted about episodes that ended.
        priorities: By slot.
        write_keys: Under which idempotency keys rows were written.
        sampled: How often each row was handed out; None: it is not counted.
        draws: The next draw. An opening that follows an interruption keeps the object.
        content: Position of the newest record that says something of rows: generation and LSN.
        index_floor: An index of SQL that is older than this position must be built anew.
    """

    window: Window = field(default_factory=lambda: Window(0, 0))
    horizon: int = 0
    retired: int = 0
    write_count: int = 0
    episodes: EpisodeTable = field(default_factory=_no_episodes)
    log: EpisodeNotes = field(default_factory=EpisodeList)
    priorities: Priorities = field(default_factory=Priorities)
    write_keys: WriteKeys = field(default_factory=WriteKeys)
    sampled: Sampled | None = None
    draws: DrawState = field(default_factory=DrawState)
    content: tuple[int, int] = (0, 0)
    index_floor: tuple[int, int] = (0, 0)

    @property
    def last(self) -> int:
        """The newest id that can be read."""
        return self.window.last

    def recover(self, found: Recovered, window: Window) -> None:
        """Take over what the journal says of rows, episodes apart; `window` has those that can be read."""
        self.window, self.horizon, self.retired = window, window.last, found.retired
        self.write_count, self.content, self.index_floor = found.write_count, found.content, found.index_floor
        self.priorities.note_largest(found.max_priority)

    def reserve(self, last: int) -> None:
        """Note that slots up to the one of id `last` are about to be written."""
        self.horizon = last

    def commit(self, last: int, count: int, capacity: int | None, position: tuple[int, int]) -> None:
        """Let rows be read.

        Args:
            last: The newest id.
            count: How many of the rows are new.
            capacity: How many can be read at most; None: any number.
            position: Generation and LSN of the record that commits them.
        """
        low = self.retired
        if capacity is not None and last - capacity > low:
            low = last - capacity
        self.window = Window(min(low, last), last, self.window.gaps)
        self.write_count += count
        self.content = position

    def note_replaced(self, count: int) -> None:
        """Count rows that were written in the places of others."""
        self.write_count += count

    def retire(self, through: int) -> None:
        """Give up the rows with ids <= `through`."""
        self.retired = max(self.retired, through)
        self.window = replace(self.window, low=max(self.window.low, self.retired))

    def delete(self, window: Window) -> None:
        """Give up rows inside the window, of which this is left."""
        self.retired = max(self.retired, window.low)
        self.window = window

    def forget(self, last: int) -> None:
        """Give up all rows; the next id is `last` + 1."""
        self.retired = self.horizon = last
        self.window = Window(last, last)

    def note_content(self, position: tuple[int, int]) -> None:
        """Keep the position of the newest record that says something of rows."""
        self.content = position

    def commit_rows(self, rows: Rows, capacity: int | None, position: tuple[int, int]) -> None:
        """Let rows be read that are written: episodes, window and key follow their commit record.

        The lock of the episodes is held.

        Args:
            rows: What it commits.
            capacity: How many rows can be read at most; None: any number.
            position: Generation and LSN of the record.
        """
        entries = self.episodes.commit(
            rows.assignment.segments,
            rows.assignment.sources,
            first_id=rows.first_id,
            time=rows.time,
            sequence=position[1],
            info=rows.info,
        )
        self.log.append(entries)
        self.commit(rows.last_id, rows.count, capacity, position)
        if rows.key is not None:
            self.note_key(rows, rows.key)

    def annotate(self, change: LogEntry | End | Resume, position: tuple[int, int]) -> None:
        """Follow a record about episodes; the lock of the episodes is held.

        Args:
            change: What it says.
            position: Generation and LSN of the record.
        """
        self.log.append(self.episodes.apply(change, position[1]))
        self.note_content(position)

    def clear(self, last: int, position: tuple[int, int]) -> None:
        """Give up all rows, and end all episodes; the next id is `last` + 1.

        The lock of the episodes is held.

        Args:
            last: The newest id that is given up.
            position: Generation and LSN of the record that says so.
        """
        self.log.append(self.episodes.end_episodes(position[1]))
        self.forget(last)
        self.note_content(position)

    def note_key(self, rows: Rows, key: WriteKey) -> None:
        """Know the idempotency key of rows that were committed."""
        self.write_keys.note(key, rows.first_id, rows.count, rows.time)

    def count_sampled(self, sampled: Sampled) -> None:
        """Keep from now on how often each row is handed out."""
        self.sampled = sampled

    def close(self) -> None:
        """Close what is open; in RAM nothing is."""
