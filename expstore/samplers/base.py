"""What every sampler does: choose ids out of the readable ones.

Buffers call it with a generator that belongs to this one draw; it never reads rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.errors import NotReadyError
from expstore.types import Array, Selection, Window

if TYPE_CHECKING:
    from expstore.storages.base import Rows, Storage

__all__ = ["Sampler", "readable"]


class Sampler(ABC):
    """Choose ids. Threads may sample at once."""

    #: Whether priorities that come with new rows are to be taken in.
    prioritized = False
    #: Whether its rows are windows of steps already, around which there can be no others.
    windowed = False

    def attach(self, storage: Storage) -> None:
        """Be told which storage it will sample from; a buffer does it once."""

    def reduce(self, priorities: Array) -> Array:
        """Return one priority per row. Shapes `(n, ...)` in, `(n,)` out."""
        return priorities.reshape(-1)

    @abstractmethod
    def sample(self, storage: Storage, batch_size: int, generator: np.random.Generator) -> Selection:
        """Choose `batch_size` readable rows.

        Args:
            storage: What holds the rows; at least one is readable.
            batch_size: How many.
            generator: The random numbers of this draw.
        """

    def left(self, storage: Storage) -> int:
        """Return how many rows can still be drawn: the length of a buffer."""
        return len(storage)

    def sample_again(
        self, storage: Storage, selection: Selection, generator: np.random.Generator
    ) -> Selection:
        """Choose rows in the place of some that were overwritten while they were read."""
        return self.sample(storage, selection.ids.size, generator)

    def hand_out(self, storage: Storage, selection: Selection) -> None:
        """Be told that a selection it made goes to the user now, in the order of the selections."""

    def stands(self, storage: Storage, selection: Selection) -> bool:
        """Say whether a selection made some time ago would still be made; rows are looked at elsewhere."""
        return True

    def rewind(self, storage: Storage) -> None:
        """Be told that selections made since the last one that was handed out will not be."""

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` takes: settings, and what does not follow from the rows."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""

    @property
    def ran_out(self) -> bool:
        """Whether every row has been drawn that is to be drawn: iteration ends here."""
        return False

    def on_write(self, rows: Rows) -> None:
        """Be told of rows that were just published."""


def readable(storage: Storage) -> Window:
    """Return the ids that can be read now, at least one.

    Raises:
        NotReadyError: There is none: a very long extend, or `empty`, has given up all rows at this moment.
    """
    window = storage.window
    if window.low >= window.last or (window.gaps and not window.rows):
        raise NotReadyError("Cannot sample from an empty storage", hint="extend() it first")
    return window
