"""The expected state of a buffer in plain Python: rows, priorities, episodes, added fields, snapshots.

Used by tests/property/test_whole_buffer.py. The model does not call the library. It is told only the ids that
a load assigns, and checks that they are allowed.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from expstore.testing.model import Cell, Row

OPEN, TERMINATED, TRUNCATED, CUT = range(4)
STATUS = {"": OPEN, "t": TERMINATED, "T": TRUNCATED}
#: Number of snapshots that are kept.
KEEP = 3


@dataclass(frozen=True)
class Episode:
    """What is known of an episode, also after its rows are deleted."""

    source: str | None  # None for the handle's own stream
    length: int = 0
    status: int = OPEN


@dataclass
class Truth:
    """The expected content of a store.

    Args:
        capacity: Maximum number of readable rows; None for an unbounded store.
    """

    capacity: int | None = None
    rows: dict[int, Row] = field(default_factory=dict)  # by id, the oldest first
    # Possible priorities of a row after a kill: the value that was last written to the disk, or a later one.
    priorities: dict[int, tuple[float, ...]] = field(default_factory=dict)
    largest: tuple[float, ...] = (1.0,)
    episodes: dict[int, Episode] = field(default_factory=dict)
    next_episode: int = 1
    last: int = 0
    serial: int = 0
    written: int = 0
    draw: int = 0
    handle: int = 0
    going: dict[tuple[str | int, int], int] = field(default_factory=dict)
    # Added fields: the value of later rows, and of each row.
    late: dict[str, tuple[int, dict[int, int]]] = field(default_factory=dict)
    versions: dict[int, Truth] = field(default_factory=dict)
    number: int = 0  # of the newest snapshot ever made

    def copy(self) -> Truth:
        """Return an independent copy; the values are never changed in place."""
        twin = copy.copy(self)
        for name in ("rows", "priorities", "episodes", "going", "versions"):
            setattr(twin, name, dict(getattr(self, name)))
        twin.late = {name: (default, dict(held)) for name, (default, held) in self.late.items()}
        return twin

    @property
    def ids(self) -> list[int]:
        """The ids of readable rows, the oldest first."""
        return list(self.rows)

    def index_of(self, id: int) -> int:
        """Return the index of an id."""
        return id - 1 if self.capacity is None else (id - 1) % self.capacity

    @property
    def by_index(self) -> list[Row]:
        """The rows in the order of their indices."""
        return sorted(self.rows.values(), key=lambda row: self.index_of(row.id))

    # -- what happens --------------------------------------------------------------------------------

    def extend(self, cells: Sequence[Cell], source: str | None) -> list[Row]:
        """Append rows; return them."""
        new = []
        for place, cell in enumerate(cells):
            stream = self.handle if source is None else source, cell.trajectory
            number = self.going.get(stream)
            if number is None:
                number = self.going[stream] = self.next_episode
                self.next_episode += 1
                self.episodes[number] = Episode(source)
            held = self.episodes[number]
            new.append(Row(self.last + 1 + place, self.serial + place, number, held.length, cell))
            self.episodes[number] = replace(held, length=held.length + 1, status=STATUS[cell.mark])
            if cell.mark:
                del self.going[stream]
        self.last, self.serial = self.last + len(new), self.serial + len(new)
        self.written += len(new)
        self.rows |= {row.id: row for row in new}
        self.priorities |= {row.id: (self.largest[-1],) for row in new}
        for default, held in self.late.values():
            held.update((row.id, default) for row in new)
        if self.capacity is not None:
            self._forget([id for id in self.rows if id <= self.last - self.capacity])
        return new

    def _forget(self, ids: Iterable[int]) -> None:
        for id in ids:
            del self.rows[id], self.priorities[id]
            for _, held in self.late.values():
                del held[id]

    def change(self, ids: Iterable[int]) -> list[Row]:
        """Change rows to their next versions; return them."""
        changed = [replace(self.rows[id], version=self.rows[id].version + 1) for id in ids]
        self.rows |= {row.id: row for row in changed}
        return changed

    def prioritise(self, values: dict[int, float]) -> int:
        """Set priorities of existing rows; return their number."""
        here = {id: value for id, value in values.items() if id in self.rows}
        self.priorities |= {id: (*self.priorities[id], value) for id, value in here.items()}
        if here:
            self.largest = (*self.largest, max(self.largest[-1], *here.values()))
        return len(here)

    def settle(self, *, all_of_it: bool) -> None:
        """Mark priorities as written to the disk; with `all_of_it` also the largest one."""
        self.priorities = {id: held[-1:] for id, held in self.priorities.items()}
        if all_of_it:
            self.largest = self.largest[-1:]

    def empty(self) -> None:
        """Delete all rows and end their episodes; the next id follows the next multiple of the capacity."""
        self.end_episodes()
        if self.rows and self.capacity is not None:
            self.last = -(-self.last // self.capacity) * self.capacity
        self._forget(self.ids)

    def retain(self, least: int) -> None:
        """Delete ended episodes that have no row with a serial number of at least `least`."""
        stay = {row.episode for row in self.rows.values() if row.serial >= least}
        stay |= {number for number, held in self.episodes.items() if held.status == OPEN}
        self._forget([id for id, row in self.rows.items() if row.episode not in stay])

    def add_column(self, name: str, value: int, *, later: int | None = None) -> None:
        """Add a field: with one value, or, with `later`, with values that follow from serial numbers."""
        held = {id: value if later is None else row.serial * value for id, row in self.rows.items()}
        self.late[name] = value if later is None else later, held

    def drop_column(self, name: str) -> None:
        """Drop a field."""
        del self.late[name]

    def dumps(self) -> None:
        """Make a snapshot."""
        kept = self.copy()
        kept.versions = {}
        kept.settle(all_of_it=True)
        self.number += 1
        self.versions = dict([*self.versions.items(), (self.number, kept)][-KEEP:])

    def loads(self, number: int, last: int) -> Truth:
        """Return the content after a snapshot was loaded whose newest row now has the id `last`."""
        kept = self.versions[number].copy()
        shift, beyond = last - kept.last, self.next_episode - 1
        beyond = max(self.next_episode, kept.next_episode) - 1
        first = min(kept.rows, default=kept.last + 1)
        assert first + shift > self.last, f"id {first + shift} comes again, {self.last} was given before"
        if kept.capacity is not None:
            assert shift % kept.capacity == 0, f"indices have moved by {shift} of {kept.capacity}"
        kept.rows = {
            id + shift: replace(row, id=id + shift, episode=row.episode + beyond)
            for id, row in kept.rows.items()
        }
        kept.priorities = {id + shift: held for id, held in kept.priorities.items()}
        kept.late = {
            name: (default, {id + shift: value for id, value in held.items()})
            for name, (default, held) in kept.late.items()
        }
        kept.episodes = {number + beyond: held for number, held in kept.episodes.items()}
        kept.going = {stream: number + beyond for stream, number in kept.going.items()}
        kept.last, kept.next_episode = last, kept.next_episode + beyond
        kept.serial, kept.handle = self.serial, self.handle
        kept.versions, kept.number = self.versions, self.number
        kept.reopen()
        return kept

    def reopen(self) -> None:
        """Begin a new session: cut the open episodes of the previous one."""
        self.end_episodes()
        self.handle += 1

    def end_episodes(self) -> None:
        """End all open episodes."""
        for number in self.going.values():
            self.episodes[number] = replace(self.episodes[number], status=CUT)
        self.going.clear()
