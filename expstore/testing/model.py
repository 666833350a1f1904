"""A model of a store's rows in plain Python.

Used by the suite to check storages. The model does not call the library: it computes the id, episode and
step of each row before the row is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

OPEN, TERMINATED, TRUNCATED, CUT = "open", "terminated", "truncated", "cut"
_STATUS = {"": OPEN, "t": TERMINATED, "T": TRUNCATED}


@dataclass(frozen=True, slots=True)
class Cell:
    """Describe the collector's part of a row.

    Args:
        trajectory: The collector's trajectory id; not reused after the trajectory has ended.
        mark: "t" for terminated, "T" for truncated, "" for neither.
    """

    trajectory: int = 0
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Describe a row that was written.

    Args:
        id: Id of the row; ids are never reused.
        serial: Number of rows written before it. All values follow from the serial and the version.
        version: How often the row was changed.
        episode: Number of its episode.
        step: Step in the episode.
        cell: The collector's part of the row.
    """

    id: int
    serial: int
    episode: int
    step: int
    cell: Cell
    version: int = 0


@dataclass(slots=True)
class Episode:
    """Describe an episode.

    Args:
        number: The store's number of the episode.
        source: The store's name of the source (of a lane: with its suffix); None for the handle's own.
        length: Number of rows written so far.
        status: "open", "terminated", "truncated" or "cut".
    """

    number: int
    source: str | None
    length: int = 0
    status: str = OPEN


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
    priorities: dict[int, float] = field(default_factory=dict)
    episodes: dict[int, Episode] = field(default_factory=dict)
    last: int = 0
    serial: int = 0
    written: int = 0
    largest: float = 1.0
    handle: int = 0
    _going: dict[tuple[str | int, int, int], Episode] = field(default_factory=dict)

    # -- what happens ----------------------------------------------------------------------------

    def extend(self, cells: Sequence[Cell], source: str | None = None) -> list[Row]:
        """Append rows in the order of their ids: one cell per lane, then the next step.

        Args:
            cells: The cells of whole time steps.
            source: Name of the source; None for the handle's own.
        """
        placed: dict[int, tuple[int, int]] = {}
        for lane in range(self.lanes):  # episodes are numbered lane by lane
            for place in range(lane, len(cells), self.lanes):
                placed[place] = self._step(cells[place], lane, source)
        new = [
            Row(self.last + 1 + place, self.serial + place, *placed[place], cell)
            for place, cell in enumerate(cells)
        ]
        self.last, self.serial = self.last + len(new), self.serial + len(new)
        self.written += len(new)
        kept = new if self.capacity is None else new[-self.capacity :]
        self.rows |= {row.id: row for row in kept}
        self.priorities |= dict.fromkeys((row.id for row in kept), self.largest)
        if self.capacity is not None:
            self._retire(self.last - self.capacity)
        return new

    def _step(self, cell: Cell, lane: int, source: str | None) -> tuple[int, int]:
        stream = self.handle if source is None else source, lane, cell.trajectory * self.trajectories
        episode = self._going.get(stream)
        if episode is None:
            name = f"{source}//{lane}" if source and lane else source
            episode = self._going[stream] = Episode(len(self.episodes) + 1, name)
            self.episodes[episode.number] = episode
        step, episode.length = episode.length, episode.length + 1
        episode.status = _STATUS[cell.mark]
        if cell.mark:
            del self._going[stream]
        return episode.number, step

    def _retire(self, through: int) -> None:
        for id in [id for id in self.rows if id <= through]:
            del self.rows[id], self.priorities[id]

    def empty(self) -> None:
        """Delete all rows and end their episodes; the next id follows the next multiple of the capacity."""
        self._end_episodes()
        if self.rows and self.capacity is not None:
            self.last = -(-self.last // self.capacity) * self.capacity
        self.rows.clear()
        self.priorities.clear()

    def change(self, ids: Iterable[int]) -> list[Row]:
        """Change rows: increase their versions, and return them."""
        changed = [replace(self.rows[id], version=self.rows[id].version + 1) for id in ids]
        self.rows |= {row.id: row for row in changed}
        return changed

    def set_priorities(self, values: dict[int, float]) -> int:
        """Set priorities of existing rows; return how many were set."""
        here = {id: value for id, value in values.items() if id in self.rows}
        self.priorities |= here
        self.largest = max(self.largest, *here.values()) if here else self.largest
        return len(here)

    def reopen(self) -> None:
        """Begin a new session: cut the open episodes of the previous one."""
        self._end_episodes()
        self.handle += 1

    def _end_episodes(self) -> None:
        for episode in self._going.values():
            episode.status = CUT
        self._going.clear()

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

    def runs(self) -> list[list[Row]]:
        """Return the runs of consecutive steps of one episode among the readable rows."""
        found: list[list[Row]] = []
        for row in sorted(self.rows.values(), key=lambda row: (row.episode, row.step)):
            if found and (found[-1][-1].episode, found[-1][-1].step + 1) == (row.episode, row.step):
                found[-1].append(row)
            else:
                found.append([row])
        return found
