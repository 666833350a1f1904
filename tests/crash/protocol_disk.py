"""The simulated machine: files whose pages reach the disk one by one, a journal of records, and a ledger.

Used by protocol_recovery.py, protocol_writer.py and protocol_model.py. The writer and the recovery implement
the protocol, that is the order of writes; this module does not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Steps = Iterator[None]  # every yield is a point at which the machine may stop


class Refused(Exception):
    """The opening reports a corrupt store."""


class Poisoned(Exception):
    """An fsync failed: the handle cannot be used any more."""


class Facts(NamedTuple):
    """The state in the records without the columns, which a base record contains."""

    last: int = 0
    retired: int = 0  # ids up to this one are not readable, independent of the window
    deleted: frozenset[int] = frozenset()
    log_length: int = 0

    def readable(self, capacity: int) -> list[int]:
        first = max(self.last - capacity, self.retired, 0) + 1
        return [i for i in range(first, self.last + 1) if i not in self.deleted]


@dataclass(slots=True, eq=False)
class Record:
    """One journal entry; it gets its sequence when it is appended, a base that of the record before it."""

    sequence: int = field(default=0, init=False)

    @property
    def cells(self) -> int:
        return 1

    def apply(self, facts: Facts, capacity: int) -> Facts:
        return facts


@dataclass(slots=True, eq=False)
class Base(Record):
    facts: Facts
    generation: int
    opening: bool  # written by an opening after syncing everything: it needs no older segment

    @property
    def cells(self) -> int:
        return 4


@dataclass(slots=True, eq=False)
class Publish(Record):
    first: int
    last: int
    rows: dict[int, tuple[int, int]]  # represents the payload's checksum, or the payload
    payload: bool
    entry: int | None

    @property
    def cells(self) -> int:
        return 3 if self.payload else 2

    def apply(self, facts: Facts, capacity: int) -> Facts:
        deleted = facts.deleted
        if deleted:
            deleted = frozenset(i for i in deleted if i > self.last - capacity)
        return Facts(self.last, facts.retired, deleted, facts.log_length + (self.entry is not None))


@dataclass(slots=True, eq=False)
class Redo(Record):
    rows: dict[int, tuple[int | None, int | None]]  # None: this column is unchanged

    @property
    def cells(self) -> int:
        return 2


@dataclass(slots=True, eq=False)
class Delete(Record):
    ids: frozenset[int]

    def apply(self, facts: Facts, capacity: int) -> Facts:
        return facts._replace(deleted=facts.deleted | self.ids)


@dataclass(slots=True, eq=False)
class Empty(Record):
    next_id: int

    def apply(self, facts: Facts, capacity: int) -> Facts:
        return Facts(self.next_id - 1, self.next_id - 1, frozenset(), facts.log_length)


@dataclass(slots=True, eq=False)
class Retire(Record):
    upto: int

    def apply(self, facts: Facts, capacity: int) -> Facts:
        return facts._replace(retired=max(facts.retired, self.upto))


@dataclass(slots=True, eq=False)
class Annotate(Record):
    entry: int

    def apply(self, facts: Facts, capacity: int) -> Facts:
        return facts._replace(log_length=facts.log_length + 1)


@dataclass(slots=True, eq=False)
class Mark(Record):
    covers: int
    log_length: int


class Snapshot(NamedTuple):
    """The store from its user's view: columns a and b of readable ids, and entries of episodes.log."""

    rows: dict[int, tuple[int, int]]
    entries: tuple[int, ...]


class Ledger:
    """A record of the operations outside of the machine: the state after each record, and the promises."""

    def __init__(self) -> None:
        self.snapshots = [Snapshot({}, ())]  # by sequence
        self.acked = 0  # calls up to here returned: kill -9 must keep them
        self.durable = 0  # flushed up to here: a power cut must keep it
        self.given_up: list[tuple[int, int]] = []  # retire and publish record of long extends that returned
        self._token = 0

    def token(self) -> int:
        self._token += 1
        return self._token

    def __getitem__(self, sequence: int) -> Snapshot:
        return self.snapshots[sequence]

    def now(self) -> Snapshot:
        return self.snapshots[-1]

    def restart(self, sequence: int) -> None:
        """Forget what a stop has lost; the rest is durable."""
        del self.snapshots[sequence + 1 :]
        self.acked = self.durable = sequence
        self.given_up.clear()


class PagedFile:
    """A file whose pages reach the disk one by one, in any order, unless they are synced."""

    __slots__ = ("_disk", "_per_page", "_versions", "cells")

    def __init__(self, size: int, per_page: int) -> None:
        self.cells: list[Any] = [None] * size
        self._disk: list[Any] = [None] * size
        self._per_page = per_page
        self._versions: dict[int, list[list[Any]]] = {}  # versions of each page since its last sync

    def write(self, at: int, values: list[Any]) -> None:
        cells, per = self.cells, self._per_page
        cells[at : at + len(values)] = values
        for page in range(at // per, (at + len(values) - 1) // per + 1):
            self._versions.setdefault(page, []).append(cells[page * per : (page + 1) * per])

    def sync(self) -> None:
        per = self._per_page
        for page, versions in self._versions.items():
            self._disk[page * per : (page + 1) * per] = versions[-1]
        self._versions.clear()

    def reach_disk(self, rng: random.Random, keep: float) -> None:
        """Write some version of each page to the disk; cached pages remain, and count as clean."""
        per = self._per_page
        for page, versions in self._versions.items():
            newest = len(versions)
            version = newest if rng.random() < keep else rng.randint(0, newest)
            if version:
                self._disk[page * per : (page + 1) * per] = versions[version - 1]
        self._versions.clear()

    def cut(self, rng: random.Random, keep: float) -> None:
        self.reach_disk(rng, keep)
        self.cells = self._disk[:]


class Column:
    """One value per slot, repeated over `width` cells so that a row may span two pages."""

    __slots__ = ("file", "width")

    def __init__(self, slots: int, per_page: int, width: int) -> None:
        self.file = PagedFile(slots * width, per_page)
        self.width = width

    def put(self, slot: int, value: int) -> None:
        self.file.write(slot * self.width, [value] * self.width)

    def get(self, slot: int) -> int | None:
        """Return the slot's value; None if it is torn."""
        cells = self.file.cells[slot * self.width : (slot + 1) * self.width]
        value: int | None = cells[0]
        return value if cells.count(value) == len(cells) else None


class Segment:
    """One file of the journal; a record takes one or more cells."""

    __slots__ = ("end", "file", "number")

    def __init__(self, number: int, cells: int) -> None:
        self.number = number
        self.file = PagedFile(cells, per_page=3)
        self.end = 0  # known only to the writer

    def has_room(self, cells: int) -> bool:
        return self.end + cells <= len(self.file.cells)

    def append(self, record: Record) -> None:
        cells = record.cells
        self.file.write(self.end, [(record, part) for part in range(cells)])
        self.end += cells

    def read(self) -> tuple[Base | None, list[Record], list[Mark]]:
        """Return the base (None if bad), the records up to the first bad one, and the marks after it."""
        cells, records, at = self.file.cells, list[Record](), 0
        while at < len(cells) and cells[at] is not None and cells[at][1] == 0:
            record: Record = cells[at][0]
            wanted = [(record, part) for part in range(record.cells)]
            if cells[at : at + len(wanted)] != wanted:
                break
            records.append(record)
            at += len(wanted)
        behind = [cell[0] for cell in cells[at:] if cell is not None and isinstance(cell[0], Mark)]
        if records and isinstance(records[0], Base):
            return records[0], records[1:], behind
        return None, [], behind


class Directory:
    """The names of the journal's segments, which are durable after an fsync of the directory."""

    def __init__(self) -> None:
        self.entries: dict[int, Segment] = {}
        self._disk: dict[int, Segment] = {}
        self.pending: dict[int, list[Segment | None]] = {}

    def create(self, segment: Segment) -> None:
        self.entries[segment.number] = segment
        self.pending.setdefault(segment.number, []).append(segment)

    def unlink(self, number: int) -> None:
        del self.entries[number]
        self.pending.setdefault(number, []).append(None)

    def sync(self) -> None:
        self._disk = dict(self.entries)
        self.pending.clear()

    def cut(self, rng: random.Random, keep: float) -> None:
        for number, versions in self.pending.items():
            version = rng.randint(0, len(versions))
            if version:
                kept = versions[version - 1]
                if kept is None:
                    self._disk.pop(number, None)
                else:
                    self._disk[number] = kept
        self.pending.clear()
        self.entries = dict(self._disk)
        for segment in self.entries.values():
            segment.file.cut(rng, keep)


class Disk:
    """All files of one store, and the machine that may stop."""

    def __init__(self, rng: random.Random, capacity: int, spare: int, reach: int = 0) -> None:
        self.rng = rng
        self.capacity = capacity
        self.spare = spare
        self.slots = capacity + spare + reach
        self.segment_cells = rng.choice((9, 14, 24, 60))
        self.id = Column(self.slots, per_page=8, width=1)
        self.a = Column(self.slots, per_page=4, width=1)
        self.b = Column(self.slots, per_page=3, width=2)
        self.away = Column(self.slots, per_page=5, width=1)  # distance to the row whose b is this row's a
        self.log = PagedFile(64, per_page=2)
        self.journal = Directory()
        self.generation = 0
        self.index: tuple[int, int, Snapshot] | None = None  # generation, sequence, content
        self.fsync_failures = 0.0  # failure probability of each fsync

    def files(self) -> list[PagedFile]:
        """Return the files that a sync covers in addition to the journal, in random order, like threads."""
        files = [self.id.file, self.a.file, self.b.file, self.away.file, self.log]
        self.rng.shuffle(files)
        return files

    def fsync(self, file: PagedFile) -> None:
        if self.fsync_failures and self.rng.random() < self.fsync_failures:
            file.reach_disk(self.rng, keep=0.3)
            raise Poisoned
        file.sync()

    def put(self, rows: dict[int, tuple[int, int]], away: dict[int, int] | None = None) -> Steps:
        """Write whole rows, the columns in any order; `away`: distances of rows whose a is elsewhere."""
        order = [0, 1, 2, 3]
        self.rng.shuffle(order)
        for column in order:
            for i, (a, b) in rows.items():
                slot, distance = (i - 1) % self.slots, (away or {}).get(i, 0)
                if column == 0:
                    self.id.put(slot, i)
                elif column == 1 and not distance:
                    self.a.put(slot, a)
                elif column == 1 and self.rng.random() < 0.5:
                    self.a.put(slot, 0)  # space is given back
                elif column == 2:
                    self.b.put(slot, b)
                elif column == 3:
                    self.away.put(slot, distance)
            yield

    def read(self, i: int) -> tuple[int | None, int | None]:
        """Return the columns a and b of a row from where they are stored."""
        slot = (i - 1) % self.slots
        distance = self.away.get(slot)
        if distance is None:
            return None, self.b.get(slot)
        a = self.b.get((slot - distance) % self.slots) if distance else self.a.get(slot)
        return a, self.b.get(slot)

    def holds(self, i: int, row: tuple[int, int]) -> bool:
        """Return whether the slot of an id holds these bytes: the payload's checksum fits."""
        return self.id.get((i - 1) % self.slots) == i and self.read(i) == row

    def rewrite(self, i: int) -> None:
        """Write the slot of a row again unchanged: pages that are not on the disk may count as clean."""
        slot = (i - 1) % self.slots
        for column in (self.id, self.a, self.b, self.away):
            first = slot * column.width
            column.file.write(first, column.file.cells[first : first + column.width])

    def change(self, i: int, change: tuple[int | None, int | None]) -> Steps:
        """Change some columns of a row in place; its a is then stored in its own slot."""
        slot = (i - 1) % self.slots
        if change[0] is not None:
            self.a.put(slot, change[0])
            yield
            self.away.put(slot, 0)
        if change[1] is not None:
            yield
            self.b.put(slot, change[1])

    def commit_index(self, sequence: int, content: Snapshot) -> None:
        """Commit the index; DuckDB makes it durable independently of the journal."""
        self.index = (self.generation, sequence, content)

    def cut(self) -> None:
        keep = self.rng.choice((0.0, 0.0, 0.6, 0.9))
        for file in self.files():
            file.cut(self.rng, keep)
        self.journal.cut(self.rng, keep)
