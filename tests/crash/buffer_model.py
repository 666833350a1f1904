"""What a buffer should hold, in plain Python: rows, priorities, episodes, fields that came, versions.

Used by tests/property/test_whole_buffer.py. It asks the library nothing; only where a load puts its ids it is
told, and says whether that may be.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from expstore.testing.model import Cell, Row

__all__ = ["CUT", "KEEP", "OPEN", "Episode", "Truth"]

OPEN, TERMINATED, TRUNCATED, CUT = range(4)
STATUS = {"": OPEN, "t": TERMINATED, "T": TRUNCATED}
#: So many versions are kept.
KEEP = 3


@dataclass(frozen=True)
class Episode:
    """What is known of an episode, also when its rows have left."""

    source: str | None  # None: the handle's own stream
    length: int = 0
    status: int = OPEN


@dataclass
class Truth:
    """What a store should hold.

    Args:
        capacity: Most readable rows; None: it grows.
    """

    capacity: int | None = None
    rows: dict[int, Row] = field(default_factory=dict)  # by id, the oldest first
    # What a row's priority may be after a kill: what it was when last written to the disk, or since.
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
    # Fields that have come: what later rows have there, and what each row has.
    late: dict[str, tuple[int, dict[int, int]]] = field(default_factory=dict)
    versions: dict[int, Truth] = field(default_factory=dict)
    number: int = 0  # of the newest version that ever was

    def copy(self) -> Truth:
        """Return one that goes its own way; what it holds is never changed in place."""
        twin = copy.copy(self)
        for name in ("rows", "priorities", "episodes", "going", "versions"):
            setattr(twin, name, dict(getattr(self, name)))
        twin.late = {name: (default, dict(held)) for name, (default, held) in self.late.items()}
        return twin

    @property
    def ids(self) -> list[int]:
        """The ids that can be read, the oldest first."""
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
        """Take rows in; return them."""
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
        """Give rows their next versions; return them."""
        changed = [replace(self.rows[id], version=self.rows[id].version + 1) for id in ids]
        self.rows |= {row.id: row for row in changed}
        return changed

    def prioritise(self, values: dict[int, float]) -> int:
        """Set priorities of the rows that are there; return how many."""
        here = {id: value for id, value in values.items() if id in self.rows}
        self.priorities |= {id: (*self.priorities[id], value) for id, value in here.items()}
        if here:
            self.largest = (*self.largest, max(self.largest[-1], *here.values()))
        return len(here)

    def settle(self, *, all_of_it: bool) -> None:
        """Have priorities on the disk; and, with the rest, the largest one."""
        self.priorities = {id: held[-1:] for id, held in self.priorities.items()}
        if all_of_it:
            self.largest = self.largest[-1:]

    def empty(self) -> None:
        """Forget all rows, which ends their episodes; ids go on at the next multiple of the capacity."""
        self.end_episodes()
        if self.rows and self.capacity is not None:
            self.last = -(-self.last // self.capacity) * self.capacity
        self._forget(self.ids)

    def retain(self, least: int) -> None:
        """Give up episodes that have ended and have no row with such a serial number or a later one."""
        stay = {row.episode for row in self.rows.values() if row.serial >= least}
        stay |= {number for number, held in self.episodes.items() if held.status == OPEN}
        self._forget([id for id, row in self.rows.items() if row.episode not in stay])

    def add_column(self, name: str, value: int, *, later: int | None = None) -> None:
        """Have one more field: of one value, or, with `later`, of values that follow from serial numbers."""
        held = {id: value if later is None else row.serial * value for id, row in self.rows.items()}
        self.late[name] = value if later is None else later, held

    def drop_column(self, name: str) -> None:
        """Have one field less."""
        del self.late[name]

    def dumps(self) -> None:
        """Have one more version."""
        kept = self.copy()
        kept.versions = {}
        kept.settle(all_of_it=True)
        self.number += 1
        self.versions = dict([*self.versions.items(), (self.number, kept)][-KEEP:])

    def loads(self, number: int, last: int) -> Truth:
        """Return what is there after a version was loaded, whose newest row has the id `last` now."""
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
        """Begin a new session: the open episodes of the one before are cut."""
        self.end_episodes()
        self.handle += 1

    def end_episodes(self) -> None:
        """End all open episodes."""
        for number in self.going.values():
            self.episodes[number] = replace(self.episodes[number], status=CUT)
        self.going.clear()
