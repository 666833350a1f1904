"""The changes in a store since a position, and how to apply them to the tables of the index.

Made by storages, applied by the index. This module knows tables and transactions, not files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import duckdb
import numpy as np
import pyarrow as pa

from expstore.core.values import Array, IntArray
from expstore.episodes.log import LogEntry

#: (generation, sequence) of a record in the journal.
Position = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Delta:
    """The changes in a store since a position; applying them twice has the same effect as once.

    Args:
        position: The last journal record that the delta covers.
        last_id: The newest readable id.
        low_id: Ids up to this one are no longer readable.
        time: When the delta was made, in microseconds since 1970 (UTC).
        sources: (number, name, whether the user named it, generation, session, start of the session, its end
            or None) of each new or changed source.
        episodes: Columns of equal length, one row per new or changed episode: `episode_id`, `source`,
            `trajectory_id`, `start_time`, `end_time` (-1: still open), `length`, `last_id` (int64, times
            in microseconds), `has_trajectory`, `has_return` (bool), `return` (float64), `status` (0 open,
            1 terminated, 2 truncated, 3 cut) and `info` (objects: JSON text or None).
        fragments: Columns of equal length, int64: `episode_id`, `first_step`, `length`, `first_id`,
            `stride`; one row per new or longer fragment.
        live: `episode_id` and `live_rows`, int64: episodes whose number of readable rows may have
            changed.
        anew: Ids of episodes whose fragments in the index are replaced by those in `fragments`, int64. Rows
            of these episodes were removed.
        complete: Whether the delta contains the whole store and replaces the content of the index.
    """

    position: Position
    last_id: int
    low_id: int
    time: int
    sources: Sequence[tuple[int, str, bool, int, str, int, int | None]]
    episodes: Mapping[str, Array]
    fragments: Mapping[str, Array]
    live: Mapping[str, Array]
    anew: Array = field(default_factory=lambda: np.empty(0, np.int64))
    complete: bool = False


def fill(con: duckdb.DuckDBPyConnection, delta: Delta, meta: Mapping[str, str]) -> None:
    """Fill empty tables, in the caller's transaction.

    Args:
        con: A connection that nothing else uses.
        delta: The whole content of the store.
        meta: Keys and their values as JSON texts.
    """
    made = {
        "sources": _source_table(delta),
        "episode_rows": _episode_table(delta, _live_rows(None, delta)[0]),
        "fragment_rows": _fragment_table(delta),
        "meta": pa.table({"key": _texts(list(meta)), "value": _texts(list(meta.values()))}),
    }
    for name, rows in made.items():
        if rows.num_rows:  # skip empty tables: each statement takes half a millisecond
            con.register("new_rows", rows)
            con.execute(f"INSERT INTO {name} SELECT * FROM new_rows")
            con.unregister("new_rows")
    _commit(con, delta)


def apply(con: duckdb.DuckDBPyConnection, delta: Delta) -> None:
    """Write a delta in one transaction.

    Args:
        con: A connection that nothing else uses, with no open transaction.
        delta: The changes.
    """
    live, rest = _live_rows(con, delta)
    tables = {
        "new_sources": _source_table(delta),
        "new_episodes": _episode_table(delta, live),
        "new_fragments": _fragment_table(delta),
        "new_live": rest,
        "cut": pa.table({"episode_id": _column(delta.anew, pa.int64())}),
    }
    for name, rows in tables.items():
        con.register(name, rows)
    with transaction(con):
        for name, statement in _STATEMENTS:
            if tables[name].num_rows:  # each statement takes half a millisecond
                con.execute(statement)
        con.execute("DELETE FROM commits WHERE generation = ? AND sequence = ?", list(delta.position))
        _commit(con, delta)
    for name in tables:
        con.unregister(name)


def _commit(con: duckdb.DuckDBPyConnection, delta: Delta) -> None:
    """Delete the entries of rows that are no longer readable, and record the position."""
    if delta.low_id:
        con.execute("DELETE FROM fragment_rows WHERE last_id <= ?", [delta.low_id])
        con.execute(_FADE, [delta.low_id])
    con.execute(
        "INSERT INTO commits VALUES (?, ?, ?, ?, make_timestamp(?))",
        [*delta.position, delta.low_id, delta.last_id, delta.time],
    )


# How the rows of each new table are applied, in this order.
# DELETE and INSERT, not UPDATE: entries that still change then are close together at the end of the table.
_STATEMENTS = (
    ("new_sources", "DELETE FROM sources USING new_sources AS n WHERE sources.number = n.number"),
    (
        "new_episodes",
        "DELETE FROM episode_rows USING new_episodes AS n WHERE episode_rows.episode_id = n.episode_id",
    ),
    (
        # After a restart, a fragment may begin later than before because its first rows are gone.
        "new_fragments",
        "DELETE FROM fragment_rows AS f USING new_fragments AS n "
        "WHERE f.episode_id = n.episode_id AND f.first_id <= n.last_id AND f.last_id >= n.first_id",
    ),
    ("cut", "DELETE FROM fragment_rows USING cut WHERE fragment_rows.episode_id = cut.episode_id"),
    (
        "new_live",
        "UPDATE episode_rows SET live_rows = n.live_rows FROM new_live AS n "
        "WHERE episode_rows.episode_id = n.episode_id",
    ),
    ("new_sources", "INSERT INTO sources SELECT * FROM new_sources"),
    ("new_episodes", "INSERT INTO episode_rows SELECT * FROM new_episodes"),
    ("new_fragments", "INSERT INTO fragment_rows SELECT * FROM new_fragments"),
)
# This includes episodes that the delta does not name: after a crash the store may not know of them.
_FADE = "UPDATE episode_rows SET live_rows = 0 WHERE live_rows > 0 AND last_id <= ?"


def last_position(con: duckdb.DuckDBPyConnection) -> Position:
    """Return the position of the last commit, (0, 0) if there was none."""
    found = con.execute(
        "SELECT generation, sequence FROM commits ORDER BY generation DESC, sequence DESC LIMIT 1"
    ).fetchall()
    return (int(found[0][0]), int(found[0][1])) if found else (0, 0)


def find_episodes(con: duckdb.DuckDBPyConnection, numbers: Sequence[int]) -> list[LogEntry]:
    """Return the episodes that have these ids, in any order."""
    return [LogEntry(*found) for found in con.execute(_FIND, [list(numbers)]).fetchall()]


# In the order of LogEntry's fields. An open episode has no end time here (0): only its rows have it.
_FIND = """
SELECT episode_id, source, trajectory_id, epoch_us(start_time), coalesce(epoch_us(end_time), 0), "return",
    length, last_id, status, 0, 0, coalesce(info::VARCHAR, '')
FROM episode_rows WHERE episode_id IN (SELECT unnest(?::BIGINT[]))
"""


def replace_priorities(con: duckdb.DuckDBPyConnection, ids: Array, priorities: Array) -> None:
    """Replace the content of the table `priorities`."""
    rows = {"id": _column(ids, pa.int64()), "priority": _column(priorities, pa.float32())}
    con.register("new_priorities", pa.table(rows))
    with transaction(con):
        con.execute("DELETE FROM priorities")
        con.execute("INSERT INTO priorities SELECT id, priority FROM new_priorities")
    con.unregister("new_priorities")


def read_meta(con: duckdb.DuckDBPyConnection) -> dict[str, str]:
    """Return the content of the table `meta`: keys and JSON texts."""
    return dict(con.execute("SELECT key, value FROM meta").fetchall())


def replace_meta(con: duckdb.DuckDBPyConnection, meta: Mapping[str, str]) -> None:
    """Replace the content of the table `meta` with these keys and JSON texts."""
    with transaction(con):
        con.execute("DELETE FROM meta")
        if meta:
            con.executemany("INSERT INTO meta VALUES (?, ?)", [list(item) for item in meta.items()])


@contextlib.contextmanager
def transaction(con: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Run the body in a transaction: commit at the end, roll back on an exception."""
    con.begin()
    try:
        yield
        con.commit()
    except BaseException:
        rollback(con)
        raise


def rollback(con: duckdb.DuckDBPyConnection) -> None:
    """Roll back the open transaction, if any; an earlier failure may have ended it already."""
    with contextlib.suppress(duckdb.Error):
        con.rollback()


def _live_rows(con: duckdb.DuckDBPyConnection | None, delta: Delta) -> tuple[IntArray, pa.Table]:
    """Return the number of live rows of each changed episode, and those of other episodes as a table.

    If the delta has no count for a changed episode, the index has it; without a connection it is 0.
    """
    ids = np.asarray(delta.episodes["episode_id"], np.int64)
    said = np.asarray(delta.live["episode_id"], np.int64)
    rows = np.asarray(delta.live["live_rows"], np.int64)
    others = ~np.isin(said, ids)
    rest = pa.table(
        {"episode_id": _column(said[others], pa.int64()), "live_rows": _column(rows[others], pa.int64())}
    )
    unsaid = ids[~np.isin(ids, said)]
    if len(unsaid) and con is not None:
        # Episodes that changed in another way keep their count.
        con.register("unsaid", pa.table({"episode_id": _column(unsaid, pa.int64())}))
        kept = con.sql(
            "SELECT episode_id, live_rows FROM episode_rows SEMI JOIN unsaid USING (episode_id)"
        ).to_arrow_table()
        con.unregister("unsaid")
        said = np.concatenate([kept["episode_id"].to_numpy(), said])
        rows = np.concatenate([kept["live_rows"].to_numpy(), rows])
    return _look_up(ids, said, rows), rest


def _look_up(wanted: IntArray, keys: IntArray, values: IntArray) -> IntArray:
    """Return the value of each wanted key, 0 if it is missing. For duplicate keys the last value counts."""
    if not len(keys):
        return np.zeros(len(wanted), np.int64)
    order = np.argsort(keys, kind="stable")
    at = order[np.maximum(np.searchsorted(keys, wanted, side="right", sorter=order) - 1, 0)]
    return np.where(keys[at] == wanted, values[at], 0)


def _source_table(delta: Delta) -> pa.Table:
    count = len(delta.sources)
    numbers, names, named, generations, sessions, started, ended = (
        zip(*delta.sources, strict=True) if count else ((),) * 7
    )
    live = np.array([end is None for end in ended], bool)
    times = pa.timestamp("us")
    is_named = pa.py_buffer(np.packbits(np.array(named, bool), bitorder="little"))
    return pa.table(
        {
            "number": _column(np.array(numbers, np.int64), pa.int64()),
            "name": _texts(names),
            "named": pa.Array.from_buffers(pa.bool_(), count, [None, is_named]),
            "generation": _column(np.array(generations, np.int64), pa.int64()),
            "session": _texts(sessions),
            "started": _column(np.array(started, np.int64), times),
            "ended": _column(np.array([end or 0 for end in ended], np.int64), times, missing=live),
        }
    )


def _episode_table(delta: Delta, live: IntArray) -> pa.Table:
    given = delta.episodes
    unnamed, still_open = ~given["has_trajectory"].astype(bool), given["end_time"] < 0
    unrewarded = ~given["has_return"].astype(bool)
    times = pa.timestamp("us")
    return pa.table(
        {
            "episode_id": _column(given["episode_id"], pa.int64()),
            "source": _column(given["source"], pa.int64()),
            "trajectory_id": _column(given["trajectory_id"], pa.int64(), missing=unnamed),
            "start_time": _column(given["start_time"], times),
            "end_time": _column(given["end_time"], times, missing=still_open),
            "length": _column(given["length"], pa.int64()),
            "return": _column(given["return"], pa.float64(), missing=unrewarded),
            "status": _column(given["status"], pa.uint8()),
            "live_rows": _column(live, pa.int64()),
            "last_id": _column(given["last_id"], pa.int64()),
            "info": _texts(given["info"].tolist()),
        }
    )


def _fragment_table(delta: Delta) -> pa.Table:
    fragments = delta.fragments
    last_ids = fragments["first_id"] + (fragments["length"] - 1) * fragments["stride"]
    return pa.table(
        {
            "episode_id": _column(fragments["episode_id"], pa.int64()),
            "first_step": _column(fragments["first_step"], pa.int64()),
            "length": _column(fragments["length"], pa.int64()),
            "first_id": _column(fragments["first_id"], pa.int64()),
            "stride": _column(fragments["stride"], pa.int64()),
            "last_id": _column(last_ids, pa.int64()),
        }
    )


def _column(values: Array, kind: pa.DataType, *, missing: Array | None = None) -> pa.Array:
    """Convert an array to an Arrow column; `missing` is True where a value is missing.

    Arrow's own conversion loads pandas if it is installed, which takes half a second.
    """
    data = np.ascontiguousarray(values, _STORED.get(str(kind)))
    present = None if missing is None else pa.py_buffer(np.packbits(~missing, bitorder="little"))
    return pa.Array.from_buffers(kind, len(data), [present, pa.py_buffer(data)])


def _texts(values: Sequence[str | None]) -> pa.Array:
    """Convert texts to an Arrow column, without pandas; None: a missing value."""
    parts = [(value or "").encode() for value in values]
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    missing = np.array([value is None for value in values], bool)
    buffers = [
        pa.py_buffer(np.packbits(~missing, bitorder="little")), pa.py_buffer(offsets),
        pa.py_buffer(b"".join(parts)),
    ]  # fmt: skip
    return pa.Array.from_buffers(pa.large_string(), len(parts), buffers)


_STORED = {"int64": "<i8", "timestamp[us]": "<i8", "double": "<f8", "float": "<f4", "uint8": "u1"}
