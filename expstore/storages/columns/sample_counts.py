"""How often each row was handed out, by slot.

Kept by a storage once a sampler asks for it; samplers that give rows up after so many times draw by it.
It never chooses rows, and knows nothing of ids.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray
from expstore.schema.schema import Field

__all__ = ["SAMPLED", "Sampled"]

#: The column, in stores and versions that have it. As priorities it is no part of any checksum.
SAMPLED = Field(("_row", "sampled"), "uint32", ())


class Sampled:
    """Count in RAM.

    Threads: whoever calls holds the storage's `locks.sampled`. Processes: each has its own. Crashes:
    nothing outlives the process; `sample_counts_column.SampledColumn` keeps the same on disk.

    Args:
        size: How many slots to begin with; there are more when rows need them.

    Example:
        >>> sampled = Sampled(8)
        >>> sampled.add(np.array([1, 3]))
        >>> sampled.values.tolist()
        [0, 1, 0, 1, 0, 0, 0, 0]
    """

    def __init__(self, size: int) -> None:
        #: Shape `(slots,)`, uint32.
        self.values: NDArray[np.uint32] = np.zeros(size, np.uint32)
        #: Moves with every batch: whoever draws by the counts sees that somebody else did, too.
        self.moves = 0

    def add(self, slots: IntArray) -> None:
        """Count rows as handed out once more.

        Args:
            slots: Where they lie, each once. Shape `(n,)`.

        Raises:
            StorageError: The counts could not be kept; nothing was counted.
        """
        values = self.values[slots] + np.uint32(1)
        self._keep(slots, values)
        self.moves += 1  # before the values: an interruption between them has the drawer look at all of them
        self.values[slots] = values

    def renew(self, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Begin at 0 where new rows are about to be published.

        Args:
            pieces: Where they lie: (first slot, offset in the run, rows).

        Raises:
            StorageError: The counts could not be kept.
        """
        for slot, _, n in pieces:
            self._reach(slot + n)
            if self._is_counted(slot, n):
                self._keep_run(slot, np.zeros(n, np.uint32))
                self.values[slot : slot + n] = 0

    def put(self, pieces: Iterable[tuple[int, int, int]], values: Array) -> None:
        """Set the counts of a run of rows.

        Args:
            pieces: Where they lie: (first slot, offset in the run, rows).
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

    def _reach(self, size: int) -> None:
        """Have a count for slots 0 to `size` - 1."""
        if size > self.values.size:
            more = max(4096, 2 * size) - self.values.size
            self._extend(np.zeros(more, np.uint32))

    def _extend(self, counts: NDArray[np.uint32]) -> None:
        """Have counts of more slots, behind those that there are. Shape `(n,)`."""
        self.values = np.concatenate([self.values, counts])

    def _is_counted(self, slot: int, n: int) -> bool:
        """Return whether a run of slots may hold other counts than 0."""
        return bool(self.values[slot : slot + n].any())

    def _keep(self, slots: IntArray, values: NDArray[np.uint32]) -> None:
        """Keep the counts of single rows beyond this process."""

    def _keep_run(self, slot: int, values: NDArray[np.uint32]) -> None:
        """Keep the counts of a run of rows beyond this process."""
