"""A place where rows of a buffer over several stores live, and what such a buffer asks of it.

`LocalMember` is a store that a buffer of this machine has open, `expstore.remote.http_member.HttpMember` a
served one. Rows are columns here, not TensorDicts: a buffer over several members joins those of all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from expstore.core.values import IntArray, Mass
from expstore.errors import SchemaError
from expstore.rate_limiters import Counts
from expstore.wire.codec import Codec

#: The column that ends slices.
_ENDS = "next.truncated"


class Draw(NamedTuple):
    """Which rows to draw.

    Args:
        sampler: A sampler's description with its `kind`, or the name of one that the member keeps; None:
            uniform.
        where: SQL condition on the rows; None: all rows.
        seed: Seed of draws that are independent of the store's; None: the store's draws.
        number: Number of the draw of this seed: equal numbers give equal rows while the member is at rest.
            None: the next one of this seed and sampler.
    """

    sampler: str | Mapping[str, Any] | None = None
    where: str | None = None
    seed: int | None = None
    number: int | None = None


def find_largest(values: NDArray[np.float64], count: int) -> float:
    """Return a lower bound of the largest priority that was set; 0 if none was.

    Args:
        values: The priorities of the rows of a call of `set_priorities`. Shape `(n,)`.
        count: Number of these rows that are still there.
    """
    return float(np.partition(values, count - 1)[count - 1]) if count else 0.0


class Limits(NamedTuple):
    """What the rate limiter of a member counts.

    Args:
        counts: The rows that it has counted.
        samples_per_insert: The ratio of its settings.
    """

    counts: Counts
    samples_per_insert: float


class Status(NamedTuple):
    """What every answer of a member says about it.

    Args:
        largest_priority: The priority that its new rows get.
        limits: What its rate limiter counts; None if it has none.
    """

    largest_priority: float
    limits: Limits | None


class Facts(NamedTuple):
    """What a member is.

    Args:
        uuid: Uuid of its store.
        status: Its status.
    """

    uuid: str
    status: Status


class Weight(NamedTuple):
    """What a member would draw from.

    Args:
        mass: The mass; None if draws of this sampler do not follow from weights alone.
        unit: Number of rows that are drawn together; None if it depends on the number of rows of each draw.
        status: The member's status.
    """

    mass: Mass | None
    unit: int | None
    status: Status


class Part(NamedTuple):
    """Rows that a member has drawn.

    Args:
        codec: The codec of the rows.
        columns: In the codec's order. Shapes `(rows, *row shape)`; pyarrow Arrays for variable-length fields.
        rows: Number of rows.
        mass: What they were drawn from; None if the sampler has no mass.
        status: The member's status after the draw.
    """

    codec: Codec
    columns: list[Any]
    rows: int
    mass: Mass | None
    status: Status

    def find_stops(self) -> IntArray:
        """Return the row after the last of each slice. Shape `(slices,)`.

        Raises:
            SchemaError: The rows do not say where slices end.
        """
        if _ENDS not in self.codec.names:
            raise SchemaError(f"slices of several lengths cannot be told apart without {_ENDS!r}")
        flags = np.asarray(self.columns[self.codec.names.index(_ENDS)]).reshape(self.rows, -1)[:, 0]
        return np.flatnonzero(flags) + 1

    def count_units(self, unit: int) -> int:
        """Return the number of slices of `unit` rows, or of rows if it is 1."""
        return self.rows if unit == 1 else self.find_stops().size


class Member(ABC):
    """A store as one of several.

    It chooses rows and knows their weights. Appending rows, reading them by id, queries and versions are
    methods of the buffer over the store, which are the same for every place.

    Threads: any number may use it. Processes: a copy in another process, and a forked child, reach the same
    store. Errors: those of `ReplayBuffer`; a member that does not answer raises RemoteError of kind
    "unreachable". Idempotency: an operation that may have been done although its answer was lost is repeated
    with the same key, so it is done once; a draw that is repeated with the same seed and number gives the
    same rows.
    """

    @property
    @abstractmethod
    def place(self) -> str:
        """Where the rows live, for messages: an address or a path."""

    @abstractmethod
    def read_facts(self) -> Facts:
        """Return what it is, and its status."""

    @abstractmethod
    def begin(self, draw: Draw, rows: int) -> Callable[[], Part]:
        """Begin to draw rows; the function that is returned waits for them.

        Draws that were begun at several members take place at the same time where members are other
        processes.

        Args:
            draw: Which rows.
            rows: Number of rows; some samplers return fewer.

        Raises:
            NotReadyError: There are no rows that may be drawn. The function that is returned raises it, like
                every error.
        """

    @abstractmethod
    def weigh(self, draw: Draw, rows: int) -> Weight:
        """Return what `rows` rows would be drawn from now."""

    @abstractmethod
    def set_priorities(self, ids: IntArray, values: NDArray[np.float64]) -> int:
        """Set the priorities of rows; return how many are still there.

        Args:
            ids: Ids of the rows. Shape `(n,)`.
            values: Their priorities. Shape `(n,)`.
        """

    @abstractmethod
    def name_sampler(
        self, name: str, sampler: Mapping[str, Any], where: str | None, seed: int | None
    ) -> None:
        """Keep a sampler under a name, for everybody who draws from this store by the name.

        Raises:
            StateError: There is a different sampler of this name. Repeating a call changes nothing.
        """

    @abstractmethod
    def forget_sampler(self, name: str) -> None:
        """Forget a named sampler; draws that use it end normally.

        Raises:
            NotFoundError: There is no sampler of this name.
        """

    @abstractmethod
    def samplers(self) -> dict[str, dict[str, Any]]:
        """Return the descriptions of the named samplers, by name."""

    @abstractmethod
    def close(self) -> None:
        """End what the member has opened, and not the store."""
