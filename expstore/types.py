"""Small shared types: keys, column batches, what a sampler selects.

Used by every layer above; holds no behaviour beyond simple arithmetic on ids.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Array", "IntArray", "Key", "Selection", "Window", "cut_run", "key_name", "to_key"]

Array = NDArray[Any]
IntArray = NDArray[np.int64]

#: A field's name: the path of its leaf in the TensorDict, always a tuple.
Key = tuple[str, ...]


def to_key(name: str | tuple[str, ...] | list[str]) -> Key:
    """Return a nested key as a tuple.

    >>> to_key("reward"), to_key(("next", "reward"))
    (('reward',), ('next', 'reward'))
    """
    return (name,) if isinstance(name, str) else tuple(name)


def key_name(key: Key) -> str:
    """Return a key as users read it in messages and in SQL.

    >>> key_name(("next", "reward"))
    'next.reward'
    """
    return ".".join(key)


def cut_run(first_id: int, count: int, slots: int | None) -> list[tuple[int, int, int]]:
    """Cut a run of ids at the end of a ring: (first slot, offset in the run, rows).

    Args:
        first_id: Of the run.
        count: How many rows.
        slots: How many the ring has; None: it never ends.
    """
    if slots is None:
        return [(first_id - 1, 0, count)]
    start = (first_id - 1) % slots
    head = min(count, slots - start)
    return [(start, 0, head)] if head == count else [(start, 0, head), (0, head, count - head)]


@dataclass(frozen=True, slots=True)
class Window:
    """The readable ids: those in (`low`, `last`].

    Args:
        low: The newest id that can no longer be read; 0 at first.
        last: The newest id that is published; 0 in an empty store.
    """

    low: int
    last: int

    @property
    def size(self) -> int:
        """How many ids the window holds."""
        return self.last - self.low


@dataclass(frozen=True, slots=True)
class Selection:
    """What a sampler drew.

    Args:
        ids: Row ids. Shape `(n,)`, int64; repeated where drawn more than once.
        info: More columns for the batch, each of length n (weights, for instance).
    """

    ids: IntArray
    info: dict[Key, Array] = field(default_factory=dict)
