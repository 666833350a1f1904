"""Where new rows go: their ids, and through them their places.

Buffers take one of these. It decides before anything is written and changes nothing itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from expstore.episodes import Steps
from expstore.storages.base import Rows, Storage, now_us
from expstore.types import Array

__all__ = ["RoundRobinWriter", "Writer"]


class Writer(ABC):
    """Place batches of rows."""

    @abstractmethod
    def place(self, storage: Storage, columns: Sequence[Array], steps: Steps, *, source: str | None) -> Rows:
        """Give every row of a batch its id, episode and step, without changing anything.

        Args:
            storage: Where the rows will go; its lock is held.
            columns: One array per field, in the schema's order. Shapes `(n, *row shape)`.
            steps: What the rows are in the eyes of their collector.
            source: Name of the stream, or None for the handle's own.
        """


class RoundRobinWriter(Writer):
    """Append rows; in a ring the newest take the places of the oldest.

    Example:
        >>> rb = ReplayBuffer(storage=MemoryStorage(100), writer=RoundRobinWriter(), batch_size=8)
    """

    def place(self, storage: Storage, columns: Sequence[Array], steps: Steps, *, source: str | None) -> Rows:
        """Give every row of a batch the next ids."""
        first, time = storage.last + 1, now_us()
        assignment = storage.episodes.assign(
            steps, source=source, low=storage.window.low, first_id=first, time=time
        )
        return Rows(first, steps.count, columns, assignment, time)

    def __repr__(self) -> str:
        return "RoundRobinWriter()"
