"""The state of a storage's rows: everything known about them except their values.

Used by every storage. It uses no files and takes no lock.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Protocol

from expstore.core.draw_state import DrawState
from expstore.core.idempotency import WriteKey, WriteKeys
from expstore.core.values import Array, Window
from expstore.episodes.log import LogEntry, LogItem, NewFacts, flatten
from expstore.episodes.sessions import End, Resume
from expstore.episodes.table import EpisodeTable
from expstore.storages.batch import Rows
from expstore.storages.columns.annotated import Annotations
from expstore.storages.columns.priorities import Priorities
from expstore.storages.columns.sample_counts import Sampled


class Recovered(Protocol):
    """The parts of a recovered journal that `RowState` needs."""

    @property
    def retired(self) -> int:
        """The newest id that was removed other than by age."""

    @property
    def write_count(self) -> int:
        """The number of rows that were ever written."""

    @property
    def content(self) -> tuple[int, int]:
        """The position of the newest record that concerns rows."""

    @property
    def index_floor(self) -> tuple[int, int]:
        """An index older than this position must be rebuilt."""

    @property
    def max_priority(self) -> float:
        """The largest priority so far."""


class EpisodeList:
    """Entries of ended episodes, in RAM.

    Example:
        >>> from expstore.storages.row_state import EpisodeList
        >>> log = EpisodeList()
        >>> log.append([])
        >>> list(log.read())
        []
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Iterable[LogEntry] = ()) -> None:
        self._entries: list[LogItem] = list(entries)

    def append(self, entries: Iterable[LogItem]) -> None:
        """Append entries."""
        self._entries += entries

    def read(self) -> Iterator[LogEntry]:
        """Return every entry in order."""
        return flatten(self._entries)

    def capture(self) -> Callable[[], bytes]:
        """Return a function that reads the present entries, in the format of episodes.log."""
        entries, count = self._entries, len(self._entries)
        return lambda: b"".join([entry.pack() for entry in islice(entries, count)])


class EpisodeNotes(Protocol):
    """Where entries of ended episodes are stored: `EpisodeList`, or episodes.log."""

    def append(self, entries: Iterable[LogItem]) -> None:
        """Append entries."""

    def read(self) -> Iterator[LogEntry]:
        """Return every entry in order."""

    def capture(self) -> Callable[[], bytes]:
        """Return a function that reads the present entries, in the format of episodes.log.

        Call `capture` under the lock of the episodes. The function needs no lock, and may be slow.
        """


def _no_episodes() -> EpisodeTable:
    return EpisodeTable(session=uuid.uuid4().hex)


@dataclass(eq=False, kw_only=True)
class RowState:
    """The rows of a storage: which ids can be read, their episodes, priorities, counts and keys.

    A storage has one such object. When its content is replaced (a snapshot is restored, a store is opened
    again, a follower finds another writer), the object is replaced by one assignment.

    Invariants: `stored.last` <= `horizon`; `retired` <= `stored.low`.

    Threads: a thread that changes it, except the priorities, holds the storage's lock; `stored` and episodes
    change together under the lock of the episodes.

    Args:
        stored: The ids that can be read.
        horizon: The newest id whose slot may have been written to; set before the slot changes.
        retired: The newest id that was removed other than by age.
        write_count: The number of rows that were ever written.
        episodes: The episodes of the rows.
        log: Entries of ended episodes.
        priorities: Priorities by slot.
        write_keys: The idempotency keys under which rows were written.
        sampled: How often each row was sampled; None: samples are not counted.
        draws: The state of the draws. An opening after an interruption keeps the object.
        content: Position of the newest record that concerns rows: generation and LSN.
        index_floor: A SQL index that is older than this position must be rebuilt.
        annotations: The values of annotated fields; None: no field is annotated.
    """

    stored: Window = field(default_factory=lambda: Window(0, 0))
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
    annotations: Annotations | None = None

    @property
    def last(self) -> int:
        """The newest id that can be read."""
        return self.stored.last

    def recover(self, found: Recovered, stored: Window) -> None:
        """Adopt the journal's state of the rows, except the episodes; `stored` holds the readable ids."""
        self.stored, self.horizon, self.retired = stored, stored.last, found.retired
        self.write_count, self.content, self.index_floor = found.write_count, found.content, found.index_floor
        self.priorities.note_largest(found.max_priority)

    def commit(self, last: int, count: int, capacity: int | None, position: tuple[int, int]) -> None:
        """Make rows readable.

        Args:
            last: The newest id.
            count: How many of the rows are new.
            capacity: Most readable rows; None: unbounded.
            position: Generation and LSN of the record that commits them.
        """
        low = self.retired
        if capacity is not None and last - capacity > low:
            low = last - capacity
        self.stored = Window(min(low, last), last, self.stored.deleted)
        self.write_count += count
        self.content = position

    def note_replaced(self, count: int) -> None:
        """Count rows that replaced other rows."""
        self.write_count += count

    def retire(self, through: int) -> None:
        """Remove the rows with ids <= `through`."""
        self.retired = max(self.retired, through)
        self.stored = replace(self.stored, low=max(self.stored.low, self.retired))

    def delete(self, stored: Window) -> None:
        """Delete rows between the oldest and the newest one; `stored` has the remaining ids."""
        self.retired = max(self.retired, stored.low)
        self.stored = stored

    def forget(self, last: int) -> None:
        """Remove all rows; the next id is `last` + 1."""
        self.retired = self.horizon = last
        self.stored = Window(last, last)

    def note_content(self, position: tuple[int, int]) -> None:
        """Set the position of the newest record that concerns rows."""
        self.content = position

    def commit_rows(self, rows: Rows, capacity: int | None, position: tuple[int, int]) -> None:
        """Make written rows readable: update episodes, stored ids and key after the commit record.

        The caller holds the lock of the episodes.

        Args:
            rows: The rows that the record commits.
            capacity: Most readable rows; None: unbounded.
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

    def read_recent(self, ids: Sequence[int], places: Sequence[int]) -> list[Array] | None:
        """Copy a few rows in a shorter way than `ReadView.take`; None: there is none for these rows.

        The caller holds the storage's lock.

        Args:
            ids: Ids of the rows, at least one.
            places: Positions of fields of fixed size.
        """
        return None

    def annotate(self, change: NewFacts | End | Resume, position: tuple[int, int]) -> None:
        """Apply a record about episodes. The caller holds the lock of the episodes.

        Args:
            change: The change in the record.
            position: Generation and LSN of the record.
        """
        self.log.append(self.episodes.apply(change, position[1]))
        self.note_content(position)

    def clear(self, last: int, position: tuple[int, int]) -> None:
        """Remove all rows, and end all episodes; the next id is `last` + 1.

        The caller holds the lock of the episodes.

        Args:
            last: The newest id that is removed.
            position: Generation and LSN of the record of this change.
        """
        self.log.append(self.episodes.end_episodes(position[1]))
        self.forget(last)
        self.note_content(position)

    def note_key(self, rows: Rows, key: WriteKey) -> None:
        """Record the idempotency key of rows that were committed."""
        self.write_keys.note(key, rows.first_id, rows.count, rows.time)

    def count_sampled(self, sampled: Sampled) -> None:
        """Begin to count how often each row is sampled."""
        self.sampled = sampled

    def close(self) -> None:
        """Close open files; in RAM there are no files."""
