"""Where new rows go: their ids, and through them their places.

Buffers take one of these. It decides before anything is written and changes nothing itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from expstore.episodes import Steps
from expstore.errors import StateError
from expstore.storages.base import Rows, Storage, now_us
from expstore.types import Array

__all__ = ["ImmutableDatasetWriter", "RoundRobinWriter", "TensorDictRoundRobinWriter", "Writer"]


class Writer(ABC):
    """Place batches of rows."""

    def check(self) -> None:
        """Raise StateError if no rows are taken, or given up, at all."""

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


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """Do as `RoundRobinWriter`, under the name that torchrl has for rows that are TensorDicts.

    Example:
        >>> rb = TensorDictReplayBuffer(storage=MemoryStorage(100), writer=TensorDictRoundRobinWriter())
    """

    def __repr__(self) -> str:
        return "TensorDictRoundRobinWriter()"


class ImmutableDatasetWriter(Writer):
    """Refuse new rows, for data that is complete; `set_writer` returns the writer that takes some.

    Example:
        >>> former = rb.set_writer(ImmutableDatasetWriter())
    """

    def check(self) -> None:
        """Refuse.

        Raises:
            StateError: Always.
        """
        raise self._refusal()

    def _refusal(self) -> StateError:
        return StateError(
            "This dataset doesn't allow writing.", hint="set_writer() another writer, if it is to change"
        )

    def place(self, storage: Storage, columns: Sequence[Array], steps: Steps, *, source: str | None) -> Rows:
        """Refuse a batch.

        Raises:
            StateError: Always.
        """
        raise self._refusal()

    def __repr__(self) -> str:
        return "ImmutableDatasetWriter()"
