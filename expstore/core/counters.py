"""Counters of a running storage.

Used by storages, which count, and by `stats`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """The counters that `stats` returns."""

    extends: int = 0
    samples: int = 0
    redraws: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    syncs: int = 0
    sync_seconds: float | None = None  # duration of the last sync
    synced_at: float | None = None  # its end, on the monotonic clock
    recovered: str | None = field(default=None)

    def note_wait(self, since: float) -> None:
        """Count a wait that began at this time of the monotonic clock."""
        self.waits += 1
        self.wait_seconds += time.monotonic() - since

    def note_sync(self, since: float) -> None:
        """Count a checkpoint that began at this time of the monotonic clock."""
        self.syncs += 1
        self.synced_at = time.monotonic()
        self.sync_seconds = self.synced_at - since
