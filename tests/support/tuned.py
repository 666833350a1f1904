"""Set tunables for a test."""

from __future__ import annotations

import pytest

from expstore.core import tuning

__all__ = ["set_spare_slots"]


def set_spare_slots(patch: pytest.MonkeyPatch, slots: int) -> None:
    """Give every store made from now on so many spare slots, whether it has a capacity or not."""
    patch.setattr(tuning, "SPARE_SLOTS", slots)
    patch.setattr(tuning, "UNBOUNDED_SPARE_ROWS", slots)
