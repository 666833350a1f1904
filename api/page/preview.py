"""Preview a sampler: what its batches would be made of, compared with what is stored.

Used by the route for previews. It changes nothing: neither draws, counts, limiters nor named samplers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.page.histograms import (
    Histogram,
    bins_of,
    choose_ids,
    count_in,
    episodes_of,
    priority_values,
    times_of,
)
from expstore.buffers.local_member import LocalMember
from expstore.buffers.member import Draw
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.values import Array, IntArray

_SOURCES = 50
_WEIGHT = ("priority_weight",)
#: Episodes of the drawn rows by source, and all rows that are stored.
_SOURCES_SQL = f"""
SELECT e.source, coalesce(sum(d.rows), 0), coalesce(sum(e.live_rows), 0), sum(sum(e.live_rows)) OVER ()
FROM episodes AS e LEFT JOIN (SELECT unnest($ids) AS id, unnest($rows) AS rows) AS d ON d.id = e.episode_id
GROUP BY e.source ORDER BY 2 DESC, 3 DESC, e.source LIMIT {_SOURCES}
"""


class Comparison(Histogram):
    """How often values of drawn rows are in each bin, and those of stored rows in the same bins."""

    counts: list[int] = Field(description="Number of drawn rows in each bin.")
    stored: list[int] = Field(
        description="Number of readable rows in each bin, of 65,536 evenly spaced ones if there are more."
    )


class DrawnEpisodes(BaseModel):
    """How many episodes were drawn from."""

    drawn: int = Field(description="Episodes with drawn rows.")
    of: int = Field(description="Episodes with readable rows.")


class DrawnSource(BaseModel):
    """A source's share."""

    name: str = Field(description="Its name.")
    share_drawn: float = Field(description="Its share of the drawn rows, from 0 to 1.")
    share_stored: float = Field(description="Its share of the readable rows, from 0 to 1.")


class Weights(BaseModel):
    """The range of `priority_weight`."""

    min: float = Field(description="The smallest.")
    max: float = Field(description="The largest.")


_EXAMPLE: dict[str, Any] = {
    "rows": 5120, "matching": None, "ages": None, "priorities": None,
    "episodes": {"drawn": 1, "of": 1}, "sources": [{"name": "actor-7", "share_drawn": 1, "share_stored": 1}],
    "weights": None, "seconds": 0.01,
}  # fmt: skip


class Preview(BaseModel):
    """What a sampler draws."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    rows: int = Field(description="Number of drawn rows.")
    matching: int | None = Field(description="Number of rows that meet `where`; null: there is no condition.")
    ages: Comparison | None = Field(description="Ages in seconds; null: unknown.")
    priorities: Comparison | None = Field(description="Priorities; null: all are equal.")
    episodes: DrawnEpisodes = Field(description="Number of episodes.")
    sources: list[DrawnSource] = Field(description="At most 50 sources, those drawn most often first.")
    weights: Weights | None = Field(description="Range of `priority_weight`; null: the sampler has none.")
    seconds: float = Field(description="How long drawing took.")


def preview(
    rb: TensorDictReplayBuffer,
    member: LocalMember,
    draw: Draw,
    size: int,
    batches: int,
) -> Preview:
    """Draw batches without reading their rows, and describe them.

    Args:
        rb: The opened store.
        member: Draws from the store.
        draw: Which rows, with a seed.
        size: Rows of a batch.
        batches: Number of batches.

    Raises:
        NotReadyError: There are too few rows that may be drawn.
    """
    storage = rb.storage
    storage.follow()
    began = time.perf_counter()
    with member.choose(draw, size, batches) as (drawn, sampler):
        seconds = time.perf_counter() - began
        matching = None
        if sampler.filter is not None:
            readable = sampler.filter.readable(storage).ids()
            matching = int(np.count_nonzero(sampler.filter.masses_of(storage, readable)))
    ids = np.concatenate([one.ids for one in drawn])
    stored, now = choose_ids(storage), time.time()
    weights = [one.info[_WEIGHT] for one in drawn if _WEIGHT in one.info]
    priorities = _compare(priority_values(storage, ids), priority_values(storage, stored))
    if priorities is not None and not storage.priorities.were_set and np.count_nonzero(priorities.stored) < 2:
        priorities = None
    episodes, rows = np.unique(episodes_of(storage, ids), return_counts=True)
    return Preview(
        rows=ids.size, matching=matching, priorities=priorities,
        ages=_compare(np.maximum(0.0, now - times_of(storage, ids)), now - times_of(storage, stored)),
        episodes=DrawnEpisodes(drawn=episodes.size, of=_count_episodes(rb)),
        sources=_share_by_source(rb, episodes, rows),
        weights=_find_range(weights),
        seconds=seconds,
    )  # fmt: skip


def _find_range(weights: Sequence[Array]) -> Weights | None:
    if not weights:
        return None
    return Weights(min=float(min(map(np.min, weights))), max=float(max(map(np.max, weights))))


def _compare(drawn: Array, stored: Array) -> Comparison | None:
    if not stored.size:
        return None
    edges = bins_of(np.maximum(stored, 0.0))
    return Comparison(
        edges=edges.tolist(), counts=count_in(drawn, edges).tolist(), stored=count_in(stored, edges).tolist()
    )


def _count_episodes(rb: TensorDictReplayBuffer) -> int:
    found: int = rb.sql("SELECT count(*) FROM episodes WHERE live_rows > 0").fetchall()[0][0]
    return found


def _share_by_source(rb: TensorDictReplayBuffer, episodes: IntArray, rows: IntArray) -> list[DrawnSource]:
    found = rb.sql(_SOURCES_SQL, {"ids": episodes.tolist(), "rows": rows.tolist()}).fetchall()
    drawn = int(rows.sum())
    return [
        DrawnSource(
            name=name, share_drawn=int(count) / drawn, share_stored=int(live) / max(1, int(stored or 0))
        )
        for name, count, live, stored in found
    ]
