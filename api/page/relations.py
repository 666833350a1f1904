"""Describe the relations that SQL sees: names, types and meanings of their columns, for completion.

Used by the route for relations. `docs/sql.md` has the same texts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.values import Key
from expstore.schema.schema import Schema
from expstore.sql.views import ROW_COLUMNS, call_tops, quote

_Columns = tuple[tuple[str, str, str], ...]
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: Words that are quoted, although DuckDB reads some of them without quotes.
_QUOTED = frozenset({"return", "returning"})

_ROW_COLUMNS: _Columns = (
    ("_id", "BIGINT", "identifies the row, from 1 on; never used again"),
    ("_index", "BIGINT", "TorchRL's index, from 0 to the capacity - 1"),
    ("_episode", "BIGINT", "the episode of the row"),
    ("_step", "BIGINT", "its step in the episode, from 0 on"),
    ("_time", "TIMESTAMP", "when the row was written (UTC)"),
    ("_priority", "FLOAT", "its priority; 1 until one is set"),
    ("_sampled", "UINTEGER", "how often the row was drawn; only where a sampler counts this"),
)
_ROWS = "One row per stored transition."
_RECENT = "The transitions that can be sampled: those of the window, or all."
_OTHERS: tuple[tuple[str, str, _Columns], ...] = (
    ("episodes", "All episodes, also those whose rows have left.", (
        ("episode_id", "BIGINT", "identifies the episode"),
        ("source", "VARCHAR", "the name of its source; `@1` and so on if it has none"),
        ("length", "BIGINT", "how many steps it has"),
        ("return", "DOUBLE", "the sum of its rewards"),
        ("status", "VARCHAR", "`open`, `terminated`, `truncated` or `cut`"),
        ("start_time", "TIMESTAMP", "when its first row was written (UTC)"),
        ("end_time", "TIMESTAMP", "when its last row was written (UTC)"),
        ("split", "VARCHAR", "its split: `train`, or the name that the writer gave"),
        ("selections", "VARCHAR[]", "the selections that it belongs to"),
        ("trajectory_id", "BIGINT", "the collector's trajectory id; NULL: it gave none"),
        ("live_rows", "BIGINT", "how many of its rows can still be read"),
        ("info", "JSON", "the facts noted about it; NULL: none"),
    )),
    ("fragments", "Where the rows of episodes are: runs of ids that are `stride` apart.", (
        ("episode_id", "BIGINT", "the episode"),
        ("first_step", "BIGINT", "the step of its first row"),
        ("length", "BIGINT", "how many rows it has"),
        ("first_id", "BIGINT", "the id of its first row"),
        ("stride", "BIGINT", "the distance between the ids of two rows"),
    )),
    ("sources", "The sources of rows, each of one session.", (
        ("number", "BIGINT", "identifies the source"),
        ("name", "VARCHAR", "its name"),
        ("named", "BOOLEAN", "whether the writer gave the name"),
        ("generation", "BIGINT", "the opening of the store in which it began"),
        ("session", "VARCHAR", "the session that wrote it"),
        ("started", "TIMESTAMP", "when the session began (UTC)"),
        ("ended", "TIMESTAMP", "when it ended; NULL: it may still write"),
    )),
    ("priorities", "The priorities that were set.", (
        ("id", "BIGINT", "the row"),
        ("priority", "FLOAT", "its priority"),
    )),
    ("commits", "How far the index has followed the store.", (
        ("generation", "BIGINT", "the opening of the store"),
        ("sequence", "BIGINT", "the newest journal record that the index knows"),
        ("low_id", "BIGINT", "rows up to this id have left"),
        ("last_id", "BIGINT", "the newest row"),
        ("time", "TIMESTAMP", "when this was (UTC)"),
    )),
    ("draws", "What consumers have drawn: a row for each row of a batch.", (
        ("consumer", "VARCHAR", "its name"),
        ("draw", "BIGINT", "number of the draw, from 0"),
        ("place", "BIGINT", "place in the batch, from 0"),
        ("id", "BIGINT", "the row; after a restore its present id"),
        ("weight", "DOUBLE", "`priority_weight`; NULL: the sampler has none"),
        ("time", "TIMESTAMP", "when it was drawn (UTC)"),
    )),
    ("annotations", "All values that annotated rows were given, the newest and the older ones.", (
        ("id", "BIGINT", "the row"),
        ("field", "VARCHAR", "the field"),
        ("value", "DOUBLE[]", "the values; integers beyond 2^53 are rounded"),
        ("author", "VARCHAR", "who has computed it: `by=`"),
        ("time", "TIMESTAMP", "when it was written (UTC)"),
        ("number", "BIGINT", "number of the call, ascending"),
    )),
    ("groups", "Groups of episodes; none without `EpisodeKeys(group=)`.", (
        ("group_id", "BIGINT", "identifies the group: the id of its first episode"),
        ("key", "VARCHAR", "the value that its episodes have in common"),
        ("split", "VARCHAR", "the split of its episodes"),
        ("status", "VARCHAR", "`open`, `complete`, `failed` or `discarded`"),
        ("reason", "VARCHAR", "why it failed or was discarded; otherwise NULL"),
        ("size", "BIGINT", "how many members it has"),
        ("members", "BIGINT[]", "its episodes"),
        ("ended", "BIGINT", "how many of them are terminated or truncated"),
        ("length", "BIGINT", "how many rows all members have together, also rows that were evicted"),
        ("mean_return", "DOUBLE", "the mean of their returns; NULL: they have no rewards"),
        ("std_return", "DOUBLE", "the standard deviation of their returns, divided by their number"),
        ("min_version", "BIGINT", "the oldest policy version of their first rows; NULL: they have none"),
        ("max_version", "BIGINT", "the newest policy version of their first rows"),
        ("start_time", "TIMESTAMP", "when its first row was written (UTC)"),
        ("end_time", "TIMESTAMP", "when the last row of an ended member was written (UTC)"),
    )),
    ("selections", "Selections: lists of episodes that have a name.", (
        ("name", "VARCHAR", "its name"),
        ("condition", "VARCHAR", "what its episodes met when it was created; NULL: they were named"),
        ("episodes", "BIGINT", "how many members it has"),
        ("excluded", "BIGINT", "how many episodes were excluded by hand"),
        ("missing", "BIGINT", "of how many members rows were evicted or deleted"),
        ("author", "VARCHAR", "who created it"),
        ("reason", "VARCHAR", "why; NULL: no reason was given"),
        ("created", "TIMESTAMP", "when it was created (UTC)"),
        ("version", "VARCHAR", "the newest journal record then: generation and sequence, as in `commits`"),
        ("store", "VARCHAR", "the UUID of the store in which it was created"),
    )),
    ("lineage", "Where the rows come from: the steps of the store, oldest first.", (
        ("number", "BIGINT", "the place of the step, from 1 on"),
        ("kind", "VARCHAR", "`collect`, `import`, `add_column`, `merge`, `restore`, `pull` or `resize`"),
        ("time", "TIMESTAMP", "when it began (UTC)"),
        ("first_id", "BIGINT", "the first row that it concerns; NULL: none is left after a restore"),
        ("last_id", "BIGINT", "the last row"),
        ("rows", "BIGINT", "how many of these rows can still be read"),
        ("store", "VARCHAR", "the uuid of the store in which it took place"),
        ("session", "VARCHAR", "the session that wrote the rows"),
        ("program", "VARCHAR", "the script or module that wrote them"),
        ("git_commit", "VARCHAR", "the commit of its checkout; NULL: it ran in none"),
        ("dirty", "BOOLEAN", "whether tracked files differed from the commit; NULL: unknown"),
        ("source", "VARCHAR", "what was imported, restored or pulled"),
        ("facts", "JSON", "what else is known, by the kind of the step"),
    )),
    ("meta", "The JSON values given as `meta=` to `expstore.open`.", (
        ("key", "VARCHAR", "the name"),
        ("value", "JSON", "the value"),
    )),
)  # fmt: skip


class ColumnFacts(BaseModel):
    """A column."""

    name: str = Field(description="Its name; parts of nested fields are joined by dots.")
    sql: str = Field(description="The name as a query writes it, with quotes where it needs them.")
    type: str = Field(description="Its type in DuckDB.")
    description: str = Field(description="What it means; empty for fields of the store.")


class RelationFacts(BaseModel):
    """A relation."""

    name: str = Field(description="Its name.")
    description: str = Field(description="What its rows are.")
    columns: list[ColumnFacts] = Field(description="Its columns.")


class Relations(BaseModel):
    """What SQL sees."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "relations": [
                        {
                            "name": "priorities",
                            "description": "The priorities that were set.",
                            "columns": [
                                {"name": "id", "sql": "id", "type": "BIGINT", "description": "the row"}
                            ],
                        }
                    ]
                }
            ]
        }
    )

    relations: list[RelationFacts] = Field(description="The relations.")


def describe_relations(rb: TensorDictReplayBuffer) -> Relations:
    """Return the relations of a store.

    Args:
        rb: The opened store. Its own database tells the types of the fields; no text of a client is used.
    """
    storage = rb.storage
    storage.follow()
    reserved = _QUOTED | {
        word for (word,) in rb.sql(
            "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category = 'reserved'"
        ).fetchall()
    }  # fmt: skip
    rows = tuple(one for one in _ROW_COLUMNS if one[0] != "_sampled" or storage.state.sampled is not None)
    schema = storage.schema
    types = [] if schema is None else _find_types(rb, schema)
    found = [_describe("transitions", _ROWS, rows, reserved, schema, types, ROW_COLUMNS)]
    found += [_describe("recent", _RECENT, rows, reserved, schema, types, ROW_COLUMNS)]
    found += [_describe(name, text, columns, reserved) for name, text, columns in _OTHERS]
    return Relations(relations=found)


def _find_types(rb: TensorDictReplayBuffer, schema: Schema) -> list[str]:
    """Return DuckDB's names of the types of the fields."""
    names = [".".join(map(quote, path)) for path in _paths(schema, ROW_COLUMNS)]
    selected = ", ".join(f"{name} AS c{place}" for place, name in enumerate(names))
    rows = rb.sql(f"SELECT column_type FROM (DESCRIBE SELECT {selected} FROM transitions)").fetchall()
    return [kind for (kind,) in rows]


def field_sql(schema: Schema, key: Key) -> str:
    """Return the name of a field as a query over `transitions` writes it."""
    tops = call_tops(schema.keys, ROW_COLUMNS)
    return ".".join(map(quote, (tops[key[0]], *key[1:])))


def _paths(schema: Schema, taken: Collection[str]) -> list[Key]:
    """Return the paths of the fields in a relation with row columns of some names."""
    tops = call_tops(schema.keys, taken)
    return [(tops[key[0]], *key[1:]) for key in schema.keys]


def _describe(
    name: str,
    description: str,
    columns: _Columns,
    reserved: Collection[str],
    schema: Schema | None = None,
    types: Sequence[str] = (),
    taken: Collection[str] = (),
) -> RelationFacts:
    entries: list[tuple[Key, str, str]] = [((column,), kind, text) for column, kind, text in columns]
    if schema is not None:
        entries += [(path, kind, "") for path, kind in zip(_paths(schema, taken), types, strict=True)]

    def write(part: str) -> str:
        is_plain = _PLAIN.fullmatch(part) and part.lower() not in reserved
        return part if is_plain else quote(part)

    facts: list[dict[str, Any]] = [
        {"name": ".".join(path), "sql": ".".join(map(write, path)), "type": kind, "description": text}
        for path, kind, text in entries
    ]
    return RelationFacts(name=name, description=description, columns=[ColumnFacts(**one) for one in facts])
