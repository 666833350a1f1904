"""How often each row was sampled, by slot.

A storage begins to count when a sampler requests it. Samplers that drop rows after a number of uses draw by
the counts. This module chooses no rows, and uses slots only.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from expstore.core.geometry import RingGeometry
from expstore.core.touched import Touched
from expstore.core.values import Array, IntArray
from expstore.schema.schema import Field

#: The column, in stores and snapshots that have it. Like priorities, it is not part of any checksum.
SAMPLED = Field(("_row", "sampled"), "uint32", ())


class Sampled:
    """Count in RAM.

    Threads: the caller holds the storage's `locks.sampled`. Processes: each process has its own counts.
    Crashes: nothing survives the process; `sample_counts_column.SampledColumn` also stores the counts on
    disk.

    Args:
        size: Initial number of slots; the counts grow when rows need more.

    Example:
        >>> from expstore.storages.columns.sample_counts import Sampled
        >>> sampled = Sampled(8)
        >>> sampled.add(np.array([1, 3]))
        >>> sampled.values.tolist()
        [0, 1, 0, 1, 0, 0, 0, 0]
    """

    def __init__(self, size: int) -> None:
        #: Shape `(slots,)`, uint32.
        self.values: NDArray[np.uint32] = np.zeros(size, np.uint32)
        #: Incremented with every batch, so that a sampler sees that another one has counted, too.
        self.moves = 0
        #: The slots that were counted since a capture; None: nothing was captured.
        self.tracked: Touched | None = None

    def add(self, slots: IntArray) -> None:
        """Increment the counts of rows.

        Args:
            slots: Slots of the rows, each at most once. Shape `(n,)`.

        Raises:
            StorageError: The counts could not be stored; nothing was counted.
        """
        values = self.values[slots] + np.uint32(1)
        self._keep(slots, values)
        self.moves += 1  # before the values: after an interruption in between, samplers read all counts again
        self.values[slots] = values
        if self.tracked is not None:
            self.tracked.add(slots)

    def renew(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Set the counts to 0 where new rows are about to be committed.

        Args:
            pieces: Runs of slots: (first slot, offset in the run, number of rows).

        Raises:
            StorageError: The counts could not be stored.
        """
        for slot, _, n in pieces:
            self._reach(slot + n)
            if self._is_counted(slot, n):
                self._keep_run(slot, np.zeros(n, np.uint32))
                self.values[slot : slot + n] = 0

    def put(self, pieces: Iterable[tuple[int, int, int]], values: Array) -> None:
        """Set the counts of a run of rows.

        Args:
            pieces: Runs of slots: (first slot, offset in the run, number of rows).
            values: Shape `(n,)`, uint32.
        """
        for slot, offset, n in pieces:
            self._reach(slot + n)
            run = np.ascontiguousarray(values[offset : offset + n], np.uint32)
            self._keep_run(slot, run)
            self.values[slot : slot + n] = run

    def views(self, pieces: Iterable[tuple[int, int, int]]) -> list[Array]:
        """View the counts of runs of rows without copying. Shapes `(n,)`, uint32."""
        return [self.values[slot : slot + n] for slot, _, n in pieces]

    def values_at(self, slots: IntArray) -> Array:
        """Copy the counts of rows. Shapes `(n,)`, uint32."""
        found: Array = self.values[slots]
        return found

    def _reach(self, size: int) -> None:
        """Make sure that slots 0 to `size` - 1 have a count."""
        if size > self.values.size:
            more = max(4096, 2 * size) - self.values.size
            self._extend(np.zeros(more, np.uint32))

    def _extend(self, counts: NDArray[np.uint32]) -> None:
        """Append counts of more slots. Shape `(n,)`."""
        self.values = np.concatenate([self.values, counts])

    def _is_counted(self, slot: int, n: int) -> bool:
        """Return whether a run of slots may have counts other than 0."""
        return bool(self.values[slot : slot + n].any())

    def _keep(self, slots: IntArray, values: NDArray[np.uint32]) -> None:
        """Store the counts of single rows outside this process. Does nothing here."""

    def _keep_run(self, slot: int, values: NDArray[np.uint32]) -> None:
        """Store the counts of a run of rows outside this process. Does nothing here."""


class ConsumerCounts(Sampled):
    """How often a consumer's draws had each row; its log has the draws, and no file has the counts.

    Threads: one at a time; the consumer has a lock. Processes: one draws for a consumer. Crashes: the counts
    are computed again from the log.

    Args:
        geometry: Maps ids to slots.
        last: The newest id of the storage.
        first: Id of the first count.
        counts: The counts of this row and those after it. Shape `(n,)`.

    Example:
        >>> from expstore.core.geometry import RingGeometry
        >>> from expstore.storages.columns.sample_counts import ConsumerCounts
        >>> counts = ConsumerCounts(RingGeometry(4), 6, 2, np.array([1, 1, 2]))
        >>> counts.values.tolist()  # of the rows 5, 6, 3 and 4
        [0, 0, 1, 2]
        >>> counts.follow(RingGeometry(4), 7)
        >>> counts.values.tolist()
        [0, 0, 0, 2]
    """

    def __init__(self, geometry: RingGeometry, last: int, first: int, counts: Array) -> None:
        super().__init__(geometry.slots or last)
        self._last = last
        ids = np.arange(first, first + counts.size)
        there = (ids <= last) & (ids > last - self.values.size)
        self.values[geometry.slot_of(ids[there])] = counts[there]

    def follow(self, geometry: RingGeometry, last: int) -> None:
        """Set the counts of new rows to 0.

        Args:
            geometry: Maps ids to slots.
            last: The newest id that may be drawn.
        """
        first = self._last + 1 if geometry.slots is None else max(self._last, last - geometry.slots) + 1
        if first <= last:
            self.renew(geometry.runs(first, last + 1 - first))
            self._last = last
