"""Counts of episodes by source, status, split and the values of their facts, for filters.

Used by the route for facets. The only text of a client in a query is the condition of `Filters`, and such a
query must run in the sandbox.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from expstore.api.page.episode_pages import Filters

#: Most facts, and most characters of a value.
FACTS, _LENGTH = 30, 200

_QUERY = """
WITH chosen AS (SELECT episode_id, source, status, split, info FROM {relation}),
names AS (
    SELECT unnest(json_keys(info)) AS name, info, episode_id FROM chosen WHERE info IS NOT NULL
),
facts AS (
    SELECT name, json_extract(info, '/' || replace(replace(name, '~', '~0'), '/', '~1')) AS fact, episode_id
    FROM names
    WHERE NOT starts_with(name, '_') AND name NOT IN ('measures', 'note') AND length(name) <= {length}
),
pairs AS (
    SELECT 'source' AS name, source AS value, episode_id FROM chosen
    UNION ALL SELECT 'status', status, episode_id FROM chosen
    UNION ALL SELECT 'split', split, episode_id FROM chosen
    UNION ALL SELECT 'info.' || name, left(json_extract_string(fact, '$'), {length}), episode_id
    FROM facts WHERE json_type(fact) NOT IN ('OBJECT', 'ARRAY', 'NULL')
),
counted AS (SELECT name, value, count(*) AS count, min(episode_id) AS first FROM pairs GROUP BY name, value),
placed AS (
    SELECT *, row_number() OVER (PARTITION BY name ORDER BY count DESC, value) AS place,
        count(*) OVER (PARTITION BY name) AS distinct_values, sum(count) OVER (PARTITION BY name) AS episodes
    FROM counted
),
chosen_names AS (
    SELECT name FROM placed WHERE place = 1
    ORDER BY name IN ('source', 'status', 'split') DESC, episodes DESC, name LIMIT {facts} + 3
)
SELECT name, value, count, first, distinct_values, CAST(episodes AS BIGINT)
FROM placed JOIN chosen_names USING (name) WHERE place <= {values} ORDER BY name, place
"""


class FacetValue(BaseModel):
    """A value, and how many episodes have it."""

    value: str = Field(description="The value as text; of more than 200 characters the first 200.")
    count: int = Field(description="How many episodes have it.")
    first: int = Field(description="The first of these episodes.")


class Facet(BaseModel):
    """A column or fact of episodes, and its values."""

    name: str = Field(description="`source`, `status`, `split`, or `info.` and the name of a fact.")
    distinct: int = Field(description="How many values it has.")
    episodes: int = Field(description="How many episodes have a value.")
    values: list[FacetValue] = Field(description="Its values, the most frequent first.")


_VALUE: dict[str, Any] = {"value": "actor-7", "count": 2, "first": 1}


class Facets(BaseModel):
    """Counts of episodes by the values of their facts."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [{"facets": [{"name": "source", "distinct": 1, "episodes": 2, "values": [_VALUE]}]}]
        }
    )

    facets: list[Facet] = Field(
        description="`source`, `split`, `status`, and the 30 facts that most episodes have, by name."
    )


def count_facts(filters: Filters, values: int) -> tuple[str, dict[str, Any]]:
    """Return the query for facets, and its parameters.

    Args:
        filters: Which episodes; only its condition is used.
        values: Most values of each facet.
    """
    return _QUERY.format(relation=filters.relation(), length=_LENGTH, facts=FACTS, values=values), {}


def facets_of(table: Any) -> Facets:
    """Return the facets in the result of their query, a pyarrow Table."""
    found: dict[str, Facet] = {}
    for name, value, count, first, distinct, episodes in zip(
        *(column.to_pylist() for column in table.columns), strict=True
    ):
        facet = found.setdefault(name, Facet(name=name, distinct=distinct, episodes=episodes, values=[]))
        facet.values.append(FacetValue(value=value, count=count, first=first))
    return Facets(facets=list(found.values()))
