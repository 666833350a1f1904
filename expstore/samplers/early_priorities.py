"""Priorities that a sampler gets before it has a storage, as TorchRL's samplers do.

They are kept by index, and moved to the first storage that the sampler is attached to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from expstore.core.values import Array, IntArray
from expstore.storages.columns.priorities import check_priorities

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView


class EarlyPriorities:
    """Keep the priorities of rows by index until there is a storage.

    Threads: one at a time. Processes: a copy is independent. Crashes: they are lost.

    Args:
        within: Whether new rows get the largest priority of the rows that have one, not the largest ever.

    Example:
        >>> from expstore.samplers.early_priorities import EarlyPriorities
        >>> early = EarlyPriorities()
        >>> early.set(np.array([3, 4]), np.array([0.5, 2.0]))
        >>> early.largest
        2.0
    """

    def __init__(self, within: bool = False) -> None:
        self._within = within
        self._values: dict[int, float] = {}
        self._largest: float | None = None

    @property
    def largest(self) -> float:
        """The priority of new rows: the largest so far; 1 before any was set."""
        if self._within:
            return max(self._values.values(), default=1.0)
        return 1.0 if self._largest is None else self._largest

    def set(self, index: IntArray, values: Array) -> None:
        """Set the priorities of rows. Shapes `(n,)`.

        Raises:
            PriorityError: A value is negative, NaN or infinite; no priority was set.
        """
        checked = check_priorities(values).tolist()
        self._values |= zip(index.tolist(), checked, strict=True)
        if checked:
            self._largest = max(checked) if self._largest is None else max(*checked, self._largest)

    def forget(self, index: IntArray) -> None:
        """Drop the priorities of rows that are overwritten. Shape `(n,)`."""
        for number in index.tolist():
            self._values.pop(number, None)

    def move_to(self, storage: ReadView) -> None:
        """Set the priorities of the storage's rows; new rows get at least the largest priority set so far.

        Raises:
            StateError: The storage cannot be written.
        """
        writable, geometry = storage.writer(), storage.geometry
        with writable.lock:
            ids = writable.window.ids()
            index = geometry.index_of(ids)
            early = np.array([number in self._values for number in index.tolist()], bool)
            values = np.array([self._values[number] for number in index[early].tolist()], np.float32)
            if values.size:
                writable.set_priorities(ids[early], values)
            if not self._within:
                writable.priorities.note_largest(max(self.largest, writable.priorities.largest))
