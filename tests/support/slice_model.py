"""A model of the slices that a store offers, in plain Python, and batches whose rows identify themselves.

Used by tests of slice samplers. The model does not call the library: it computes the episode and step of
every row before the row is written, so that a sampled batch can be checked from its rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

OPEN, TERMINATED, TRUNCATED = "open", "terminated", "truncated"

#: Episode, first step, number of steps.
Slice = tuple[int, int, int]
#: Owner of rows: a source name or a handle's number, the lane, and the collector's trajectory id.
Stream = tuple[str | int, int, int | None]


@dataclass(frozen=True)
class Fields:
    """Describe the fields of a store's rows, in addition to those that identify the row.

    Args:
        trajectories: The collector's trajectory ids; a row with -1 is dropped.
        starts: Field that marks the start of an episode: "is_init", "step_count" or nothing.
        mask: Rows where it is False are dropped.
    """

    trajectories: bool = True
    starts: str = ""
    mask: bool = False


@dataclass(frozen=True)
class Cell:
    """One row from the collector's view."""

    mark: str = "."  # t: terminated, T: truncated, d: both, s: an episode starts, x: not a transition
    trajectory: int = 0


@dataclass(frozen=True)
class Batch:
    """Rows of one `extend`: cells of lane 0 in time order, then those of lane 1, and so on.

    Args:
        cells: The cells, as many for each lane.
        lanes: Number of lanes.
        source: Name of the source; None for the handle's own.
        time_first: Whether the first dim of the TensorDict is time, and named so; otherwise the last one is.
    """

    cells: tuple[Cell, ...]
    lanes: int = 1
    source: str | None = None
    time_first: bool = False

    @property
    def times(self) -> int:
        return len(self.cells) // self.lanes

    def arrival(self) -> list[int]:
        """Return the positions of the cells in the order in which the rows get their ids."""
        places = np.arange(len(self.cells)).reshape(self.lanes, self.times)
        order: list[int] = (places.T if self.time_first else places).reshape(-1).tolist()
        return order


@dataclass
class Told:
    """An episode that may be continued."""

    number: int
    length: int = 0
    last: int = 0
    status: str = OPEN


@dataclass(frozen=True)
class Row:
    """A stored row: its serial number, episode and step."""

    serial: int
    episode: int
    step: int


@dataclass
class Model:
    """Keep the last `capacity` rows, with the episode and step of each.

    Args:
        capacity: Maximum number of rows; None for all.
        fields: The fields of the rows.
    """

    capacity: int | None = None
    fields: Fields = field(default_factory=Fields)
    rows: list[Row] = field(default_factory=list)
    going: dict[Stream, Told] = field(default_factory=dict)
    serial: int = 0
    low: int = 0  # serial of the newest row that was evicted, or was deleted with all rows before it
    episodes: int = 0
    handle: int = 1

    # -- what happens ----------------------------------------------------------------------------

    def extend(self, batch: Batch) -> TensorDict:
        """Append a batch; return it as a TensorDict for the store."""
        facts = np.full((len(batch.cells), 3), -1, np.int64)
        kept = [place for place in batch.arrival() if not self._dropped(batch.cells[place])]
        serials = {place: self.serial + n for n, place in enumerate(kept, 1)}
        for place in range(len(batch.cells)):  # lane by lane
            if place in serials:
                row = self._row(batch, place, serials[place])
                facts[place] = row.serial, row.episode, row.step
                self.rows.append(row)
        self.serial += len(kept)
        if self.capacity is not None:
            self.low = max(self.low, self.serial - self.capacity)
        self.rows = sorted((row for row in self.rows if row.serial > self.low), key=lambda row: row.serial)
        return self._tensordict(batch, facts)

    def _dropped(self, cell: Cell) -> bool:
        return cell.mark == "x" and (self.fields.trajectories or self.fields.mask)

    def _row(self, batch: Batch, place: int, serial: int) -> Row:
        cell = batch.cells[place]
        source = self.handle if batch.source is None else batch.source
        stream = source, place // batch.times, cell.trajectory if self.fields.trajectories else None
        told = self.going.get(stream)
        if told is not None and told.status == TRUNCATED and told.last <= self.low:
            told = None  # no row of it is left to continue from
        if told is None or (cell.mark == "s" and self.fields.starts):
            self.episodes += 1
            told = self.going[stream] = Told(self.episodes)
        row = Row(serial, told.number, told.length)
        told.length, told.last = told.length + 1, serial
        told.status = {"t": TERMINATED, "d": TERMINATED, "T": TRUNCATED}.get(cell.mark, OPEN)
        if told.status == TERMINATED or (told.status == TRUNCATED and not self.fields.trajectories):
            del self.going[stream]
        return row

    def empty(self) -> None:
        """Delete all rows and end their episodes."""
        self.retire(len(self.rows))
        self.going.clear()

    def retire(self, count: int) -> None:
        """Delete the oldest rows."""
        if count:
            self.low = self.rows[count - 1].serial
            self.rows = self.rows[count:]

    def give_up(self, first: int, count: int) -> None:
        """Delete rows in the middle; `first` counts the live rows from 0."""
        del self.rows[first : first + count]

    def reopen(self) -> None:
        """Start with a new handle: no row continues an episode of the previous one."""
        self.going.clear()
        self.handle += 1

    # -- what can be drawn -----------------------------------------------------------------------

    def runs(self) -> list[list[Row]]:
        """Return the runs of consecutive steps of one episode among the live rows."""
        found: list[list[Row]] = []
        for row in sorted(self.rows, key=lambda row: (row.episode, row.step)):
            if found and (found[-1][-1].episode, found[-1][-1].step + 1) == (row.episode, row.step):
                found[-1].append(row)
            else:
                found.append([row])
        return found

    def chances(
        self,
        length: int,
        *,
        by: str = "start",
        strict: bool = True,
        span: tuple[int, int] = (0, 0),
        mass: Callable[[Row], float] = lambda row: 1.0,
    ) -> dict[Slice, float]:
        """Return every slice that may be drawn, with its probability.

        Args:
            length: Length of a slice; a short run, if allowed, is a whole slice.
            by: "trajectory": each run is equally likely, then each position in it; "start": each position.
            strict: Whether to leave out shorter runs.
            span: Number of steps that may be missing on the left and on the right, beyond the run.
            mass: How likely a position is, of its first row. Runs without a likely position are left out.
        """
        found: dict[Slice, float] = {}
        for run in self.runs():
            if len(run) < length and strict:
                continue
            whole = min(length, len(run))
            left, right = (min(side, whole - 1) for side in span)
            slices = [
                run[max(0, place) : place + whole] for place in range(-left, len(run) - whole + right + 1)
            ]
            masses = [mass(rows[0]) for rows in slices]
            scale = 1 / math.fsum(masses) if by == "trajectory" and any(masses) else 1.0
            for rows, one in zip(slices, masses, strict=True):
                if one:
                    key = rows[0].episode, rows[0].step, len(rows)
                    found[key] = found.get(key, 0.0) + one * scale
        total = math.fsum(found.values())
        return {key: chance / total for key, chance in found.items()}

    # -- batches ---------------------------------------------------------------------------------

    def _tensordict(self, batch: Batch, facts: NDArray[np.int64]) -> TensorDict:
        shape = (batch.lanes, batch.times)

        def laid(values: Iterable[Any] | NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.as_tensor(np.asarray(values), dtype=dtype).reshape(shape)
            if batch.lanes == 1:
                return tensor[0]
            return tensor.T.contiguous() if batch.time_first else tensor

        marks = [cell.mark for cell in batch.cells]
        data: dict[str, Any] = {
            "truth": {
                name: laid(facts[:, place], torch.int64)
                for place, name in enumerate(("serial", "episode", "step"))
            }
        }
        ends = {
            "terminated": laid([mark in "td" for mark in marks], torch.bool),
            "truncated": laid([mark in "Td" for mark in marks], torch.bool),
        }
        ends["done"] = ends["terminated"] | ends["truncated"]
        data["next"] = {name: values.unsqueeze(-1) for name, values in ends.items()}
        fields = self.fields
        if fields.trajectories:
            ids = [-1 if cell.mark == "x" and not fields.mask else cell.trajectory for cell in batch.cells]
            data["collector"] = {"traj_ids": laid(ids, torch.int64)}
        if fields.mask:
            data.setdefault("collector", {})["mask"] = laid([mark != "x" for mark in marks], torch.bool)
        if fields.starts == "is_init":
            data["is_init"] = laid([mark == "s" for mark in marks], torch.bool).unsqueeze(-1)
        if fields.starts == "step_count":
            # The collector's own count, of which only the value 0 is used.
            data["step_count"] = laid([7 * (mark != "s") for mark in marks], torch.int64).unsqueeze(-1)
        if batch.lanes == 1:
            return TensorDict(data, [batch.times])
        if batch.time_first:
            return TensorDict(data, [batch.times, batch.lanes], names=["time", None])
        return TensorDict(data, [batch.lanes, batch.times])


# -- what was drawn ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Drawn:
    """The slices of a batch, read from their rows. Arrays have one entry per slice."""

    episodes: NDArray[np.int64]
    steps: NDArray[np.int64]
    lengths: NDArray[np.int64]

    @classmethod
    def read(cls, batch: Any, live: Iterable[int]) -> Drawn:
        """Read the slices of a batch of rows that a model has created.

        Args:
            batch: A sampled batch; its truncated flags mark only the last row of each slice.
            live: Serials of the readable rows.

        Raises:
            AssertionError: A slice is invalid: rows of two episodes, steps that are not consecutive, or a
                deleted row.
        """
        truth = {name: batch["truth", name].numpy() for name in ("serial", "episode", "step")}
        ends = np.flatnonzero(batch["next", "truncated"].numpy().reshape(-1))
        size = truth["step"].size
        assert ends.size, "no slice has an end"
        assert ends[-1] == size - 1, "rows after the last slice"
        starts = np.concatenate([[0], ends[:-1] + 1])
        inside = np.ones(size, bool)
        inside[starts] = False
        inside = inside[1:]
        assert (np.diff(truth["episode"])[inside] == 0).all(), "a slice of two episodes"
        assert (np.diff(truth["step"])[inside] == 1).all(), "a slice with steps that do not follow"
        assert np.isin(truth["serial"], np.fromiter(live, np.int64)).all(), "a row that has left"
        return cls(truth["episode"][starts], truth["step"][starts], ends - starts + 1)

    def counts(self) -> dict[Slice, int]:
        """Return how often each slice was drawn."""
        found, counts = np.unique(
            np.stack([self.episodes, self.steps, self.lengths]), axis=1, return_counts=True
        )
        return dict(zip(zip(*found.tolist(), strict=True), counts.tolist(), strict=True))


def cover(draw: Callable[[], Any], live: Iterable[int], there: Collection[Slice], *, most: int) -> set[Slice]:
    """Draw until all possible slices have been drawn, at most `most` batches; return the drawn ones.

    Raises:
        AssertionError: A slice was drawn that is not possible.
    """
    live, seen = list(live), set[Slice]()
    for _ in range(most):
        seen |= Drawn.read(draw(), live).counts().keys()
        strange = seen - set(there)
        assert not strange, f"slices that there are not: {strange}; there are {there}"
        if len(seen) == len(there):
            break
    return seen
