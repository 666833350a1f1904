"""How many slots a ring has beyond its capacity.

Used by storages when the fields are fixed. It knows numbers only.
"""

from __future__ import annotations

from expstore.core import tuning

__all__ = ["spare_slots"]

#: Bytes of rows that may wait for the disk in a store without capacity.
UNBOUNDED_SPARE_BYTES = 256 << 20


def spare_slots(capacity: int | None, row_bytes: int) -> int:
    """Return how many slots a store has beyond its capacity (for an unbounded one: rows not yet synced).

    The more spare slots, the longer a writer runs before it has to wait for the disk.

    >>> spare_slots(1000, 100), spare_slots(1_000_000, 100)
    (4096, 125000)
    """
    if capacity is None:
        return max(1, min(tuning.UNBOUNDED_SPARE_ROWS, UNBOUNDED_SPARE_BYTES // row_bytes))
    if tuning.SPARE_SLOTS is not None:
        return tuning.SPARE_SLOTS
    return max(-(-capacity // 8), min(4096, max(64, (64 << 20) // row_bytes)))
