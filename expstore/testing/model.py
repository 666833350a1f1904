"""A model of a store in plain Python: rows, priorities, episodes, added fields, snapshots.

The model does not call the library: it computes the id, episode and step of each row before the row is
written. Every value of a row follows from the row's serial number and version.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

OPEN, TERMINATED, TRUNCATED, CUT = range(4)
#: Names of the statuses in SQL.
STATUS_NAMES = ("open", "terminated", "truncated", "cut")
_STATUS_OF_MARK = {"": OPEN, "t": TERMINATED, "T": TRUNCATED}
#: Number of snapshots that are kept.
KEEP = 3


@dataclass(frozen=True, slots=True)
class Cell:
    """Describe the collector's part of a row.

    Args:
        trajectory: The collector's trajectory id; not reused after the trajectory has ended.
        mark: "t" for terminated, "T" for truncated, "" for neither.
        reward: The reward, for returns of episodes; None if the model does not follow returns.
    """

    trajectory: int = 0
    mark: str = ""
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Describe a row that was written.

    Args:
        id: Id of the row; ids are never reused.
        serial: Number of rows written before it.
        version: How often the row was changed.
        episode: Number of its episode.
        step: Step in the episode.
        cell: The collector's part of the row.
    """

    id: int
    serial: int
    episode: int
    step: int
    cell: Cell = Cell()
    version: int = 0


@dataclass(frozen=True, slots=True)
class Episode:
    """Describe an episode, also after its rows are deleted.

    Args:
        source: The store's name of the source (of a lane: with its suffix); None for the handle's own.
        length: Number of rows written so far.
        status: `OPEN`, `TERMINATED`, `TRUNCATED` or `CUT`.
        ret: Sum of the rewards; None if no row had a reward.
        last_id: Id of the newest row.
        info: Annotations.
    """

    source: str | None
    length: int = 0
    status: int = OPEN
    ret: float | None = None
    last_id: int = 0
    info: Mapping[str, int] = field(default_factory=dict)


#: A source, or the number of the handle; the lane; the trajectory.
Stream = tuple[str | int, int, int]


@dataclass
class Model:
    """Hold the readable rows, their priorities, and all episodes ever written.

    Args:
        capacity: Maximum number of readable rows; None for an unbounded store.
        lanes: Number of rows per time step.
        trajectories: Whether rows have trajectory ids.
    """

    capacity: int | None = None
    lanes: int = 1
    trajectories: bool = True
    rows: dict[int, Row] = field(default_factory=dict)  # by id, the oldest first
    # Possible priorities of a row after a kill: the value that was last written to disk, or a later one.
    priorities: dict[int, tuple[float, ...]] = field(default_factory=dict)
    largest: tuple[float, ...] = (1.0,)
    episodes: dict[int, Episode] = field(default_factory=dict)
    next_episode: int = 1
    open: dict[Stream, int] = field(default_factory=dict)
    next_trajectory: int = 1  # 0 never ends
    last: int = 0
    serial: int = 0
    write_count: int = 0
    draw: int = 0
    handle: int = 0
    # Added fields: the value of later rows, and of each row.
    late: dict[str, tuple[int, dict[int, int]]] = field(default_factory=dict)
    versions: dict[int, Any] = field(default_factory=dict)  # snapshots by number

    def copy(self) -> Self:
        """Return an independent copy."""
        twin = copy.copy(self)
        for name in ("rows", "priorities", "episodes", "open", "versions"):
            setattr(twin, name, dict(getattr(self, name)))
        twin.late = {name: (default, dict(values)) for name, (default, values) in self.late.items()}
        return twin

    # -- what can be seen ------------------------------------------------------------------------

    @property
    def live(self) -> list[Row]:
        """The readable rows, the oldest first."""
        return list(self.rows.values())

    @property
    def by_index(self) -> list[Row]:
        """The readable rows in the order of their indices."""
        return sorted(self.rows.values(), key=lambda row: self.index_of(row.id))

    def index_of(self, id: int) -> int:
        """Return the index of an id."""
        return id - 1 if self.capacity is None else (id - 1) % self.capacity

    def sql_rows(self) -> list[tuple[int, int, int, int]]:
        """Return id, serial number, episode and step of the readable rows."""
        return [(row.id, row.serial, row.episode, row.step) for row in self.rows.values()]

    def sql_episodes(self) -> list[tuple[int, str | None, int, str, int]]:
        """Return number, source, length, status and readable rows of all episodes."""
        live = [row.episode for row in self.rows.values()]
        return [
            (number, one.source, one.length, STATUS_NAMES[one.status], live.count(number))
            for number, one in sorted(self.episodes.items())
        ]

    # -- what happens ----------------------------------------------------------------------------

    def name_cells(self, cells: Sequence[Cell]) -> list[Cell]:
        """Return cells with trajectory ids that are not reused after the trajectory has ended.

        Args:
            cells: Cells with trajectory ids 0 to 2.
        """
        named: list[Cell] = []
        ended: set[int] = set()
        for cell in cells:
            if cell.trajectory in ended:
                self.next_trajectory, ended = self.next_trajectory + 3, set()
            named.append(replace(cell, trajectory=self.next_trajectory + cell.trajectory))
            if cell.mark:
                ended.add(cell.trajectory)
        self.next_trajectory += 3 if ended else 0
        return named

    def extend(
        self, cells: Sequence[Cell], source: str | None = None, *, lanes: Sequence[range] | None = None
    ) -> list[Row]:
        """Append rows in the order of their ids.

        Args:
            cells: One cell per row.
            source: Name of the source; None for the handle's own.
            lanes: Places of the rows of each lane; None: one row per lane, then the next time step.
        """
        if lanes is None:
            lanes = [range(lane, len(cells), self.lanes) for lane in range(self.lanes)]
        rows: dict[int, Row] = {}
        for lane, places in enumerate(lanes):  # episodes are numbered lane by lane
            for place in places:
                id, cell = self.last + 1 + place, cells[place]
                episode, step = self._step(id, cell, lane, source)
                rows[place] = Row(id, self.serial + place, episode, step, cell)
        new = [rows[place] for place in range(len(cells))]
        self.last, self.serial = self.last + len(new), self.serial + len(new)
        self.write_count += len(new)
        self.rows |= {row.id: row for row in new}
        self.priorities |= dict.fromkeys((row.id for row in new), self.largest[-1:])
        for default, values in self.late.values():
            values.update((row.id, default) for row in new)
        if self.capacity is not None:
            self.forget([id for id in self.rows if id <= self.last - self.capacity])
        return new

    def _step(self, id: int, cell: Cell, lane: int, source: str | None) -> tuple[int, int]:
        """Append a row to the episode of its stream; return the episode's number and the row's step."""
        stream = self.handle if source is None else source, lane, cell.trajectory * self.trajectories
        number = self.open.get(stream)
        if number is None:
            number = self.open[stream] = self.next_episode
            self.next_episode += 1
            self.episodes[number] = Episode(f"{source}//{lane}" if source and lane else source)
        episode = self.episodes[number]
        ret = episode.ret if cell.reward is None else (episode.ret or 0.0) + cell.reward
        self.episodes[number] = replace(
            episode, length=episode.length + 1, status=_STATUS_OF_MARK[cell.mark], ret=ret, last_id=id
        )
        if cell.mark:
            del self.open[stream]
        return number, episode.length

    def forget(self, ids: Iterable[int]) -> None:
        """Remove rows."""
        for id in ids:
            del self.rows[id], self.priorities[id]
            for _, values in self.late.values():
                del values[id]

    def empty(self) -> None:
        """Delete all rows and end their episodes; the next id follows the next multiple of the capacity."""
        self.cut_episodes()
        if self.rows and self.capacity is not None:
            self.last = -(-self.last // self.capacity) * self.capacity
        self.forget(list(self.rows))

    def retain(self, least: int) -> None:
        """Delete ended episodes that have no row with a serial number of at least `least`."""
        stay = {row.episode for row in self.rows.values() if row.serial >= least}
        stay |= {number for number, one in self.episodes.items() if one.status == OPEN}
        self.forget([id for id, row in self.rows.items() if row.episode not in stay])

    def change(self, ids: Iterable[int]) -> list[Row]:
        """Change rows: increase their versions, and return them."""
        changed = [replace(self.rows[id], version=self.rows[id].version + 1) for id in ids]
        self.rows |= {row.id: row for row in changed}
        return changed

    def set_priorities(self, values: Mapping[int, float]) -> int:
        """Set priorities of existing rows; return how many were set."""
        live = {id: value for id, value in values.items() if id in self.rows}
        self.priorities |= {id: (*self.priorities[id], value) for id, value in live.items()}
        if live:
            self.largest = (*self.largest, max(self.largest[-1], *live.values()))
        return len(live)

    def mark_written(self, *, largest: bool = True) -> None:
        """Mark priorities as written to disk.

        Args:
            largest: Whether the largest priority is written, too.
        """
        self.priorities = {id: values[-1:] for id, values in self.priorities.items()}
        if largest:
            self.largest = self.largest[-1:]

    def add_column(self, name: str, value: int, *, later: int | None = None) -> None:
        """Add a field: with one value, or, with `later`, with values that follow from serial numbers."""
        values = {id: value if later is None else row.serial * value for id, row in self.rows.items()}
        self.late[name] = value if later is None else later, values

    def drop_column(self, name: str) -> None:
        """Drop a field."""
        del self.late[name]

    def dumps(self) -> int:
        """Make a snapshot, and return its number."""
        snapshot = self.copy()
        snapshot.versions = {}
        snapshot.mark_written()
        number = max(self.versions, default=0) + 1
        self.versions = {**self.versions, number: snapshot}
        for old in list(self.versions)[:-KEEP]:
            del self.versions[old]
        return number

    def loads(self, number: int, last: int) -> Self:
        """Return the content after a snapshot was loaded whose newest row now has the id `last`."""
        loaded: Self = self.versions[number].copy()
        shift, beyond = last - loaded.last, max(self.next_episode, loaded.next_episode) - 1
        first = min(loaded.rows, default=loaded.last + 1) + shift
        if first <= self.last:
            raise AssertionError(f"id {first} is used again, {self.last} was used before")
        if loaded.capacity is not None and shift % loaded.capacity:
            raise AssertionError(f"indices have moved by {shift} of {loaded.capacity}")
        loaded.rows = {
            id + shift: replace(row, id=id + shift, episode=row.episode + beyond)
            for id, row in loaded.rows.items()
        }
        loaded.priorities = {id + shift: values for id, values in loaded.priorities.items()}
        loaded.late = {
            name: (default, {id + shift: value for id, value in values.items()})
            for name, (default, values) in loaded.late.items()
        }
        loaded.episodes = {
            number + beyond: replace(one, last_id=one.last_id + shift)
            for number, one in loaded.episodes.items()
        }
        loaded.open = {stream: number + beyond for stream, number in loaded.open.items()}
        loaded.last, loaded.next_episode = last, loaded.next_episode + beyond
        for name in ("serial", "handle", "next_trajectory", "versions"):
            setattr(loaded, name, getattr(self, name))
        loaded.reopen()
        return loaded

    def reopen(self) -> None:
        """Begin a new session: cut the open episodes of the previous one."""
        self.cut_episodes()
        self.handle += 1

    def cut_episodes(self) -> None:
        """End all open episodes."""
        for number in self.open.values():
            self.episodes[number] = replace(self.episodes[number], status=CUT)
        self.open.clear()
