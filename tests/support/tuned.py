"""Set tunables for a test."""

from __future__ import annotations

import pytest

from expstore.core import tuning


def set_spare_slots(patch: pytest.MonkeyPatch, slots: int) -> None:
    """Give every new store this number of spare slots, whether it has a capacity or not."""
    patch.setattr(tuning, "SPARE_SLOTS", slots)
    patch.setattr(tuning, "UNBOUNDED_SPARE_ROWS", slots)


def few_rows_in_memory(patch: pytest.MonkeyPatch) -> None:
    """Keep batches of up to 8 rows in the memtable, so that few rows fill chunks and segments."""
    patch.setattr(tuning, "MEMTABLE_BATCH_ROWS", 8)
    patch.setattr(tuning, "MEMTABLE_ROWS", 128)
