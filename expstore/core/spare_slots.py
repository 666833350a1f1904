"""Compute how many slots a ring has beyond its capacity.

Used by storages when the fields of a store become fixed.
"""

from __future__ import annotations

from expstore.core import tuning

#: Bytes of rows that may wait for a checkpoint in a store without a capacity.
UNBOUNDED_SPARE_BYTES = 256 << 20


def spare_slots(capacity: int | None, row_bytes: int) -> int:
    """Return the number of slots beyond the capacity (without a capacity: how many rows may be unsynced).

    With more spare slots, a writer can continue for longer before it has to wait for the disk.

    >>> from expstore.core.spare_slots import spare_slots
    >>> spare_slots(1000, 100), spare_slots(1_000_000, 100)
    (4096, 125000)
    """
    if capacity is None:
        return max(1, min(tuning.UNBOUNDED_SPARE_ROWS, UNBOUNDED_SPARE_BYTES // row_bytes))
    if tuning.SPARE_SLOTS is not None:
        return tuning.SPARE_SLOTS
    return max(-(-capacity // 8), min(4096, max(64, (64 << 20) // row_bytes)))
