"""What a collector has done so far.

Used by `expstore.Collector` for this process, and by its workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

#: Returns of how many episodes make the mean.
_RECENT = 100


@dataclass
class Progress:
    """What a collector has done so far.

    Threads: one at a time.

    Args:
        rows: Stored transitions.
        episodes: Episodes that ended.
        restarts: Workers that were replaced.
        recent: Returns of the last episodes that ended.
    """

    rows: int = 0
    episodes: int = 0
    restarts: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def add(self, rows: int, returns: Sequence[float]) -> None:
        """Count stored transitions, and episodes that ended, by their returns."""
        self.rows += rows
        self.episodes += len(returns)
        self.recent.extend(returns)

    @property
    def mean_return(self) -> float | None:
        """Mean return of recent episodes; None: none has ended."""
        return sum(self.recent) / len(self.recent) if self.recent else None

    def describe(self) -> dict[str, Any]:
        """Return the counts, and the mean return of recent episodes."""
        return {
            "rows": self.rows,
            "episodes": self.episodes,
            "mean_return": self.mean_return,
            "restarts": self.restarts,
        }
