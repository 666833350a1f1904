"""Series over time for charts: returns or lengths of episodes in groups and bins, and rows per second.

Used by the route for series. Values of episodes are binned by SQL; the only text of a client in a query is
the condition of `Filters`, and such a query must run in the sandbox.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.page.episode_pages import Filters, fact_expression, fact_path
from expstore.api.page.histograms import choose_ids, times_of
from expstore.core.values import to_finite
from expstore.storages.read_view import ReadView

#: Number of groups, the last of which has all other values if there are more.
GROUPS = 20
#: Names of groups are cut to this many characters.
_NAME = 200
_FACT = "info."
#: Nothing, a column, or a fact.
BY_PATTERN = r"^(none|source|session|split|status|info\.[\s\S]{1,200})$"
_X = {"episode": "e.episode_id", "time": "epoch_ms(e.end_time)", "rows": "r.last_id"}
_Y = {"return": 'e."return"', "length": "e.length"}
_GROUP = {
    "none": "NULL", "source": "e.source", "session": "s.session", "split": "e.split", "status": "e.status"
}  # fmt: skip

_QUERY = """
WITH chosen AS (
    SELECT CAST({x} AS DOUBLE) AS x, CAST({y} AS DOUBLE) AS y, left({group}, {name}) AS name
    FROM {relation} AS e {joins}
    WHERE e.status <> 'open' AND isfinite(CAST({y} AS DOUBLE))
),
sized AS (
    SELECT name, row_number() OVER (ORDER BY count(*) DESC, name) AS place, count(*) OVER () AS number
    FROM chosen GROUP BY name
),
bounds AS (SELECT min(x) AS low, max(x) - min(x) + 1 AS width FROM chosen),
placed AS (
    SELECT
        c.x, c.y, g.number,
        CASE WHEN g.number > {groups} THEN least(g.place, {groups}) ELSE g.place END AS place,
        CASE WHEN g.number > {groups} AND g.place >= {groups} THEN NULL ELSE c.name END AS name,
        floor((c.x - b.low) * {points} / b.width) AS bin
    FROM chosen AS c JOIN sized AS g ON c.name IS NOT DISTINCT FROM g.name CROSS JOIN bounds AS b
)
SELECT place, any_value(name), avg(x), avg(y), min(y), max(y), count(*), max(number)
FROM placed GROUP BY place, bin ORDER BY place, bin
"""


class Group(BaseModel):
    """The bins of one group of episodes."""

    name: str | None = Field(description="Its value; null: all episodes, those without a value, or `other`.")
    other: bool = Field(description="Whether it has all values that have no group of their own.")
    x: list[float | None] = Field(description="The mean x of each bin.")
    mean: list[float | None] = Field(description="The mean value of each bin.")
    min: list[float | None] = Field(description="The smallest value of each bin.")
    max: list[float | None] = Field(description="The largest value of each bin.")
    count: list[int] = Field(description="Number of episodes of each bin; of `throughput`, of rows.")


_EXAMPLE: dict[str, Any] = {
    "y": "return", "x": "episode", "truncated": False,
    "groups": [{"name": None, "other": False, "x": [1, 2], "mean": [200.0, 187.0], "min": [200.0, 187.0],
                "max": [200.0, 187.0], "count": [1, 1]}],
}  # fmt: skip


class Series(BaseModel):
    """Values of ended episodes in bins, by groups."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    y: str = Field(description="What the values are.")
    x: str = Field(description="What x is; times are milliseconds since 1970 (UTC).")
    groups: list[Group] = Field(description="At most 20 groups, the largest first.")
    truncated: bool = Field(description="Whether there are more groups, which are together in the last one.")


def build_query(
    filters: Filters,
    y: Literal["return", "length"],
    x: Literal["episode", "time", "rows"],
    by: str,
    points: int,
) -> tuple[str, dict[str, Any]]:
    """Return the query for a series, and its parameters.

    Args:
        filters: Which episodes; only its condition is used.
        y: The value.
        x: The order: by id, by the time of the end, or by the number of rows written until then.
        by: What groups have in common: as `BY_PATTERN`.
        points: Most bins of a group.
    """
    params: dict[str, Any] = {}
    if by.startswith(_FACT):
        group, params["fact"] = fact_expression("fact", "e.info"), fact_path(by.removeprefix(_FACT))
    else:
        group = _GROUP[by]
    joins = ""
    if x == "rows" or by == "session":
        joins = (
            "JOIN episode_rows AS r ON r.episode_id = e.episode_id JOIN sources AS s ON s.number = r.source"
        )
    text = _QUERY.format(
        x=_X[x], y=_Y[y], group=group, name=_NAME, relation=filters.relation(), joins=joins, groups=GROUPS,
        points=points,
    )  # fmt: skip
    return text, params


def series_of(y: str, x: str, table: Any) -> Series:
    """Return the series in the result of its query, a pyarrow Table."""
    groups: dict[int, Group] = {}
    truncated = False
    for place, name, *values, count, number in zip(
        *(column.to_pylist() for column in table.columns), strict=True
    ):
        truncated = number > GROUPS
        group = groups.get(place)
        if group is None:
            group = groups[place] = Group(
                name=name, other=truncated and place == GROUPS, x=[], mean=[], min=[], max=[], count=[]
            )
        for column, value in zip((group.x, group.mean, group.min, group.max), values, strict=True):
            column.append(None if value is None else to_finite(value))
        group.count.append(count)
    return Series(y=y, x=x, groups=list(groups.values()), truncated=truncated)


def throughput_of(storage: ReadView, points: int) -> Series:
    """Return the rows written per second, from the times of the readable rows.

    Args:
        storage: The storage. Of many rows, evenly spaced ones are counted, and stand for the others.
        points: Number of bins.
    """
    storage.follow()
    ids = choose_ids(storage)
    times = times_of(storage, ids)
    low, high = (float(times.min()), float(times.max())) if times.size else (0.0, 0.0)
    if high <= low:
        return Series(y="throughput", x="time", groups=[], truncated=False)
    counts, edges = np.histogram(times, points, (low, high))
    rows = counts * (len(storage) / times.size)
    rates = (rows * (points / (high - low))).tolist()
    middles = ((edges[1:] + edges[:-1]) * 500).tolist()
    group = Group(name=None, other=False, x=middles, mean=rates, min=rates, max=rates,
                  count=np.rint(rows).astype(np.int64).tolist())  # fmt: skip
    return Series(y="throughput", x="time", groups=[group], truncated=False)
