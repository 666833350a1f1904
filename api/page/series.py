"""Series over time for charts: numbers of episodes in groups and bins, and rows per second.

Used by the route for series. Values of episodes are binned by SQL; the only text of a client in a query is
the condition of `Filters`, and such a query must run in the sandbox.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from expstore.api.page.episode_pages import Filters, fact_expression, fact_number, fact_path
from expstore.api.page.histograms import choose_ids, times_of
from expstore.api.page.relations import field_sql
from expstore.core.values import key_name, to_finite
from expstore.data.images import find_image
from expstore.errors import SchemaError
from expstore.schema.schema import Schema
from expstore.storages.read_view import ReadView

#: Number of groups, the last of which has all other values if there are more.
GROUPS = 20
#: Names of groups are cut to this many characters.
_NAME = 200
_FACT, _MEASURE, _FIELD = "info.", "measure.", "field."
#: Nothing, a column, or a fact.
BY_PATTERN = r"^(none|source|session|split|status|info\.[\s\S]{1,200})$"
#: A number of an episode, a fact, a measure, or the mean of a field over the episode's rows.
Y_PATTERN = r"^(return|length|throughput|(info|measure|field)\.[\s\S]{1,200})$"
_COMPONENT = re.compile(r"(.+):(\d{1,6})", re.DOTALL)
#: The field of the rows, or the fact, with the version of the policy that acted.
_VERSION = "policy_version"
X = Literal["episode", "time", "rows", "version"]
_X = {"episode": "e.episode_id", "time": "epoch_ms(e.end_time)", "rows": "r.last_id"}
_Y = {"return": 'e."return"', "length": "e.length"}
_GROUP = {
    "none": "NULL", "source": "e.source", "session": "s.session", "split": "e.split", "status": "e.status"
}  # fmt: skip
#: The bands of a bin.
_QUANTILES = "[0.1, 0.5, 0.9]"

_QUERY = """
WITH chosen AS (
    SELECT CAST({x} AS DOUBLE) AS x, CAST({y} AS DOUBLE) AS y, left({group}, {name}) AS name
    FROM {relation} AS e {joins}
    WHERE e.status <> 'open' AND isfinite(CAST({y} AS DOUBLE)) AND {x} IS NOT NULL
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
),
binned AS (
    SELECT place, bin, any_value(name) AS name, avg(x) AS x, avg(y) AS mean, min(y) AS low, max(y) AS high,
        quantile_cont(y, {quantiles}) AS parts, count(*) AS count, max(number) AS number
    FROM placed GROUP BY place, bin
)
SELECT place, name, x, mean, low, high, parts[1], parts[2], parts[3], count, number
FROM binned ORDER BY place, bin
"""


class Group(BaseModel):
    """The bins of one group of episodes."""

    name: str | None = Field(description="Its value; null: all episodes, those without a value, or `other`.")
    other: bool = Field(description="Whether it has all values that have no group of their own.")
    x: list[float | None] = Field(description="The mean x of each bin.")
    mean: list[float | None] = Field(description="The mean value of each bin.")
    min: list[float | None] = Field(description="The smallest value of each bin.")
    max: list[float | None] = Field(description="The largest value of each bin.")
    p10: list[float | None] = Field(description="The value below which a tenth of the bin's values are.")
    median: list[float | None] = Field(description="The median of each bin.")
    p90: list[float | None] = Field(description="The value above which a tenth of the bin's values are.")
    count: list[int] = Field(description="Number of episodes of each bin; of `throughput`, of rows.")


_EXAMPLE: dict[str, Any] = {
    "y": "return", "x": "episode", "truncated": False,
    "groups": [{"name": None, "other": False, "x": [1, 2], "mean": [200.0, 187.0], "min": [200.0, 187.0],
                "max": [200.0, 187.0], "p10": [200.0, 187.0], "median": [200.0, 187.0],
                "p90": [200.0, 187.0], "count": [1, 1]}],
}  # fmt: skip


class Series(BaseModel):
    """Values of ended episodes in bins, by groups."""

    model_config = ConfigDict(json_schema_extra={"examples": [_EXAMPLE]})

    y: str = Field(description="What the values are.")
    x: str = Field(description="What x is; times are milliseconds since 1970 (UTC).")
    groups: list[Group] = Field(description="At most 20 groups, the largest first.")
    truncated: bool = Field(description="Whether there are more groups, which are together in the last one.")


def is_over_rows(y: str) -> bool:
    """Return whether a value is computed from the rows of episodes, which may be many."""
    return y.startswith(_FIELD)


def build_query(
    filters: Filters, schema: Schema | None, y: str, x: X, by: str, points: int
) -> tuple[str, dict[str, Any]]:
    """Return the query for a series, and its parameters.

    Args:
        filters: Which episodes; only its condition is used.
        schema: The fields of the rows; None: there are no rows yet.
        y: The value: as `Y_PATTERN`, except `throughput`.
        x: The order: by id, by the time of the end, by the number of rows written until then, or by the
            version of the policy.
        by: What groups have in common: as `BY_PATTERN`.
        points: Most bins of a group.

    Raises:
        SchemaError: There is no such field, or it has no number of that place.
    """
    params: dict[str, Any] = {}
    joins = ""
    if by.startswith(_FACT):
        group, params["fact"] = fact_expression("fact", "e.info"), fact_path(by.removeprefix(_FACT))
    else:
        group = _GROUP[by]
    if y in _Y:
        value = _Y[y]
    elif y.startswith(_FIELD):
        value, joins = "v.value", _join_mean("v", _find_number(schema, y.removeprefix(_FIELD)))
    else:
        value = fact_number("value", "e.info")
        is_fact = y.startswith(_FACT)
        params["value"] = (
            fact_path(y.removeprefix(_FACT)) if is_fact else _measure_path(y.removeprefix(_MEASURE))
        )
    if x == "version":
        place, of_rows = _version_of(schema)
        joins += of_rows
    else:
        place = _X[x]
    if x == "rows" or by == "session":
        joins += (
            " JOIN episode_rows AS r ON r.episode_id = e.episode_id JOIN sources AS s ON s.number = r.source"
        )
    text = _QUERY.format(
        x=place, y=value, group=group, name=_NAME, relation=filters.relation(), joins=joins, groups=GROUPS,
        points=points, quantiles=_QUANTILES,
    )  # fmt: skip
    return text, params


def _measure_path(name: str) -> str:
    """Return the JSON pointer of a measure: of an episode, or after a dot of a field and a place in it."""
    kind, _, field = name.partition(".")
    if not field:
        return "/measures" + fact_path(kind)
    split = _COMPONENT.fullmatch(field)
    top, place = (field, "0") if split is None else split.groups()
    return f"/measures{fact_path(kind)}{fact_path(top)}/{place}"


def _join_mean(name: str, number: str, kind: str = "LEFT") -> str:
    """Return a join with the mean of a number over the rows of each episode."""
    return (
        f" {kind} JOIN (SELECT _episode, avg(number) AS value"
        f" FROM (SELECT _episode, CAST({number} AS DOUBLE) AS number FROM transitions) WHERE isfinite(number)"
        f" GROUP BY _episode) AS {name} ON {name}._episode = e.episode_id"
    )


def _version_of(schema: Schema | None) -> tuple[str, str]:
    """Return the SQL of an episode's policy version, and the join that it needs."""
    fact = "TRY_CAST(json_extract_string(e.info, '/policy_version') AS DOUBLE)"
    if schema is None or (_VERSION,) not in schema.keys:
        return fact, ""
    return f"coalesce({fact}, floor(w.value))", _join_mean("w", _find_number(schema, _VERSION))


def _find_number(schema: Schema | None, name: str) -> str:
    """Return the SQL of a number of a row: a scalar, or after a colon the place in a vector.

    Raises:
        SchemaError: There is no such number.
    """
    fields = {} if schema is None else {key_name(entry.key): entry for entry in schema.fields}
    split = None if name in fields else _COMPONENT.fullmatch(name)
    top, place = (name, None) if split is None else (split[1], int(split[2]))
    entry = fields.get(top)
    if entry is None or schema is None:
        raise SchemaError(
            f"no field {name[:100]!r}", hint=f"the fields are {', '.join(fields) or 'not known yet'}"
        )
    size = None if entry.shape in ((), (1,)) else entry.shape[0] if len(entry.shape) == 1 else 0
    is_plain = not entry.variable and entry.dtype != "object" and not find_image(entry)
    if not is_plain or (place is None) != (size is None) or (size is not None and (place or 0) >= size):
        raise SchemaError(
            f"field {name[:100]!r} is {entry}, no number", hint="name a scalar, or NAME:PLACE of a vector"
        )
    return field_sql(schema, entry.key) + ("" if place is None else f"[{place + 1}]")


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
                name=name, other=truncated and place == GROUPS, x=[], mean=[], min=[], max=[], p10=[],
                median=[], p90=[], count=[],
            )  # fmt: skip
        columns = (group.x, group.mean, group.min, group.max, group.p10, group.median, group.p90)
        for column, value in zip(columns, values, strict=True):
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
    group = Group(name=None, other=False, x=middles, mean=rates, min=rates, max=rates, p10=rates,
                  median=rates, p90=rates, count=np.rint(rows).astype(np.int64).tolist())  # fmt: skip
    return Series(y="throughput", x="time", groups=[group], truncated=False)
