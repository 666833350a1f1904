"""Lists of changes and of odd episodes, as routes return them.

Used by `expstore.api.stores`, which keeps one `Findings` per store. No text of a client is in a query.
"""

from __future__ import annotations

import datetime
import threading
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from expstore.api.recent_answers import RecentAnswers
from expstore.buffers.replay_buffer import ReplayBuffer

#: Seconds in which a request measures episodes, and for which an answer is kept at most.
_MEASURE_SECONDS, _KEEP_SECONDS = 0.2, 60.0
_EXAMPLE: dict[str, Any] = {
    "compared": 500, "measured": 500,
    "changes": [{
        "kind": "drop", "by": "source", "name": None, "value": "env-3",
        "where": "source = 'env-3' AND episode_id >= 325", "since": 1.7e12, "until": None, "episode_id": 325,
        "row_id": 81200, "version": 12, "episodes": 44, "score": 31.5,
        "reason": "source env-3: return 200 -> 35, 41 of 44 episodes end by terminated (before 20%)",
        "measure": "return", "field": None, "component": None, "before": 200.0, "after": 35.0,
    }],
}  # fmt: skip


class ChangeFacts(BaseModel):
    """A change: a group of episodes that differs from its own past, more than the others do."""

    kind: Literal["drop", "change", "improvement"] = Field(
        description="`drop`: the return falls. `improvement`: the return of all episodes, or of a policy "
        "version, rises."
    )
    by: Literal["all", "source", "version", "split", "lane", "fact"] = Field(
        description="What the episodes have in common."
    )
    name: str | None = Field(description="Name of the fact; null for other groups.")
    value: str | None = Field(
        description="The common value as text; null: all episodes, or those without one."
    )
    where: str = Field(description="A condition over `episodes` that selects the changed ones.")
    since: float = Field(description="When the first changed episode began, milliseconds since 1970 (UTC).")
    until: float | None = Field(description="When the last one ended; null: the change lasts.")
    episode_id: int = Field(description="The first changed episode.")
    row_id: int | None = Field(description="Its first row.")
    version: int | None = Field(description="Its fact `policy_version`, if it is a whole number.")
    episodes: int = Field(description="Number of changed episodes.")
    score: float = Field(description="The size of the change, in standard errors.")
    reason: str = Field(description="What changed, in words.")
    measure: str = Field(description="What changed most: `return`, `length`, `status`, `fact` or a measure.")
    field: str | None = Field(description="Name of the measured field, status or fact.")
    component: int | None = Field(description="Which value of the field.")
    before: float | None = Field(description="The measure before.")
    after: float | None = Field(description="The measure of the changed episodes.")


class Changes(BaseModel):
    """The changes in a store, the strongest first and improvements last."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    compared: int = Field(description="Number of compared episodes: the newest 20,000 that have ended.")
    measured: int = Field(description="How many of them have measures; later requests measure the others.")
    changes: list[ChangeFacts] = Field(description="The changes.")


class OddFacts(BaseModel):
    """An episode that differs from its peers."""

    episode_id: int = Field(description="The episode.")
    source: str | None = Field(description="Its source.")
    score: float = Field(description="How odd it is, in robust standard deviations.")
    reason: str = Field(description="What is odd, in words.")
    by: Literal["episode", "source", "version"] = Field(description="What differs from its peers.")
    measure: str = Field(description="The measure that differs most.")
    field: str | None = Field(description="Name of the measured field.")
    component: int | None = Field(description="Which value of the field.")
    step: int | None = Field(description="The first step that shows it.")
    value: float | None = Field(description="The measure.")
    usual: float | None = Field(description="The median of the peers.")
    copy_of: int | None = Field(description="The earlier episode, if it is a copy.")


class OddEpisodes(BaseModel):
    """Odd episodes, the oddest first."""

    model_config = ConfigDict(json_schema_extra={"examples": [{
        "compared": 500, "odd": 1, "episodes": [{
            "episode_id": 31, "source": "arm-1", "score": 6.73, "reason": "action[1] does not change in "
            "73% of the steps; usually in 0%", "by": "episode", "measure": "still", "field": "action",
            "component": 1, "step": 12, "value": 0.77, "usual": 0.0, "copy_of": None,
        }],
    }]})  # fmt: skip

    compared: int = Field(
        description="Number of compared episodes: those of the newest 20,000 with measures."
    )
    odd: int = Field(description="How many are odd.")
    episodes: list[OddFacts] = Field(description="The oddest ones.")


class Findings:
    """Find changes and odd episodes of one store.

    Episodes without measures are measured for `_MEASURE_SECONDS` at each answer, so that an answer does not
    take long, and kept in memory. An answer is kept for 20 times the time that it took, at most a minute.

    Threads: any number may call it; one of them computes, the others wait for it.

    Args:
        rb: The opened store.
    """

    def __init__(self, rb: ReplayBuffer) -> None:
        self._changes = rb.episodes.open_changes()
        self._lock = threading.Lock()
        self._answers = RecentAnswers(seconds=_KEEP_SECONDS)

    def list_changes(self, limit: int) -> bytes:
        """Return the JSON of `Changes`."""
        return self._answers.find(("changes", limit), lambda: self._compute_changes(limit))

    def list_odd(self, limit: int, threshold: float) -> bytes:
        """Return the JSON of `OddEpisodes`."""
        return self._answers.find(("odd", limit, threshold), lambda: self._compute_odd(limit, threshold))

    def _compute_changes(self, limit: int) -> bytes:
        with self._lock:
            self._changes.measure(_MEASURE_SECONDS)
            found, compared, measured = self._changes.find(limit)
        rows = [
            ChangeFacts(**(row | {name: _to_milliseconds(row[name]) for name in ("since", "until")}))
            for row in found.arrow().to_pylist()
        ]
        return Changes(compared=compared, measured=measured, changes=rows).model_dump_json().encode()

    def _compute_odd(self, limit: int, threshold: float) -> bytes:
        with self._lock:
            self._changes.measure(_MEASURE_SECONDS)
            found, odd, compared = self._changes.find_odd(limit, threshold)
        rows = [OddFacts(**row) for row in found.arrow().to_pylist()]
        return OddEpisodes(compared=compared, odd=odd, episodes=rows).model_dump_json().encode()


def _to_milliseconds(moment: datetime.datetime | None) -> float | None:
    return None if moment is None else moment.replace(tzinfo=datetime.UTC).timestamp() * 1000
