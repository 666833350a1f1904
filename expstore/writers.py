"""Where new rows go: their ids, and through them their places.

Buffers take one of these, and hand it rows of which is known what they are. It never looks at what users
handed over, and draws nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from expstore.episodes import Steps
from expstore.errors import StateError
from expstore.storages.base import Rows, Storage, now_us
from expstore.types import Array, IntArray

__all__ = ["ImmutableDatasetWriter", "RoundRobinWriter", "TensorDictRoundRobinWriter", "Writer"]


class Writer(ABC):
    """Place batches of rows."""

    def check(self) -> None:
        """Raise StateError if no rows are taken, or given up, at all."""

    @abstractmethod
    def write(
        self, storage: Storage, columns: Sequence[Array], steps: Steps, *, source: str | None, info: str
    ) -> IntArray:
        """Give every row of a batch its id, episode and step, and write it: all rows or none.

        Args:
            storage: Where the rows go; its lock is held.
            columns: One array per field, in the schema's order. Shapes `(n, *row shape)`.
            steps: What the rows are in the eyes of their collector.
            source: Name of the stream, or None for the handle's own.
            info: What is noted about all their episodes, as JSON text.

        Returns:
            Id of each row; -1 for rows that were not taken in. Shape `(n,)`, int64.
        """


class RoundRobinWriter(Writer):
    """Append rows; in a ring the newest take the places of the oldest.

    Example:
        >>> rb = ReplayBuffer(storage=MemoryStorage(100), writer=RoundRobinWriter(), batch_size=8)
    """

    def write(
        self, storage: Storage, columns: Sequence[Array], steps: Steps, *, source: str | None, info: str
    ) -> IntArray:
        """Give every row of a batch the next ids."""
        first, time = storage.last + 1, now_us()
        assignment = storage.episodes.assign(
            steps, source=source, low=storage.window.low, first_id=first, time=time
        )
        rows = Rows(first, steps.count, columns, assignment, time, info)
        storage.write(rows)
        return rows.ids

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

    def write(
        self, storage: Storage, columns: Sequence[Array], steps: Steps, *, source: str | None, info: str
    ) -> IntArray:
        """Refuse a batch.

        Raises:
            StateError: Always.
        """
        raise self._refusal()

    def __repr__(self) -> str:
        return "ImmutableDatasetWriter()"
