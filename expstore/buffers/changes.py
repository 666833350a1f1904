"""List what changed in a store: read what is known of its episodes, and say in words what was found.

Used by `rb.episodes`, by the command line and by the server. It writes nothing, and does not import torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from expstore.buffers.measuring import MEASURES, Meter, to_measures
from expstore.core.values import Array
from expstore.sql.result import Result, build_result
from expstore.sql.sync import Catalog
from expstore.storages.read_view import ReadView
from expstore.trajectories.changes import By, Change, Group, describe, find_changes
from expstore.trajectories.measures import Floats
from expstore.trajectories.odd import Measure, Measures, find_copied, read_measures, tabulate

#: The newest ended episodes are compared, at most this many.
MOST = 20_000
#: Facts that are not compared: versions are groups, origins are programs.
_APART = frozenset({"origin", "policy_version"})
#: A fact with at most this many values, each of at most this many characters, makes groups; of sources and
#: lanes at most this many.
_FEW_VALUES, _LONGEST, _MOST_GROUPS = 20, 200, 200
#: A fact that is correlated with time like this counts something, such as iterations.
_COUNTS = 0.95

_EPISODES = """
SELECT * FROM (
    SELECT episode_id, source, length, "return", status, split, trajectory_id, start_time, end_time,
        info::VARCHAR AS info
    FROM episodes WHERE status != 'open' ORDER BY episode_id DESC LIMIT $most
) ORDER BY episode_id
"""
_FIRST_ROWS = """
SELECT e.episode_id, coalesce(min(f.first_id), any_value(e.last_id - e.length + 1))
FROM episode_rows AS e LEFT JOIN fragment_rows AS f ON f.episode_id = e.episode_id
WHERE e.episode_id IN (SELECT unnest($episodes::BIGINT[])) GROUP BY e.episode_id
"""
#: The columns of a list of changes, with their Arrow types.
COLUMNS = {
    "kind": "string",
    "by": "string",
    "name": "string",
    "value": "string",
    "where": "string",
    "since": "timestamp[us]",
    "until": "timestamp[us]",
    "episode_id": "int64",
    "row_id": "int64",
    "version": "int64",
    "episodes": "int64",
    "score": "float64",
    "reason": "string",
    "measure": "string",
    "field": "string",
    "component": "int64",
    "before": "float64",
    "after": "float64",
}


class ChangeList:
    """List the changes in a store.

    Measures of episodes without the fact `measures` are computed by `measure`, and kept here.

    Threads: one at a time. Processes: another one may write the store. Crashes: it writes nothing.

    Args:
        storage: The store.
        catalog: Its SQL catalog.
    """

    def __init__(self, storage: ReadView, catalog: Catalog) -> None:
        self._catalog = catalog
        self._meter = Meter(storage, catalog)
        self._fresh: dict[int, Measures] = {}

    def find_odd(self, limit: int, threshold: float) -> tuple[Result, int, int]:
        """Return odd episodes as `Meter.list_odd` does, of the newest ones that are measured."""
        return self._meter.list_odd(limit, threshold, self._fresh, MOST)

    def measure(self, seconds: float | None = None) -> None:
        """Measure the newest episodes without measures; after `seconds` no more of them, None: all."""
        until = None if seconds is None else time.monotonic() + seconds
        for some in self._meter.measure(self._fresh, MOST):
            self._fresh |= to_measures(some)
            if until is not None and time.monotonic() >= until:
                break
        for episode in sorted(self._fresh)[:-MOST]:
            del self._fresh[episode]

    def find(self, limit: int | None) -> tuple[Result, int, int]:
        """Return changes as `Episodes.changes` does, and how many episodes were compared and are measured."""
        known = self._catalog.query(_EPISODES, {"most": MOST}).arrow().to_pylist()
        for one in known:
            found = json.loads(one["info"] or "null")
            one["info"] = found if isinstance(found, dict) else {}
        own = read_measures(one["info"].pop(MEASURES, None) for one in known)
        for number, one in enumerate(known):
            fresh = self._fresh.get(one["episode_id"])
            if fresh is not None and fresh.length == one["length"]:
                own[number] = fresh
        measures, values, groups = tabulate_episodes(known, own)
        changes = find_changes(values, measures, groups, MOST if limit is None else limit)
        rows = [_to_row(change, known) for change in changes]
        query = self._catalog.query(_FIRST_ROWS, {"episodes": [row["episode_id"] for row in rows]})
        first = dict(query.fetchall())
        for row in rows:
            row["row_id"] = first.get(row["episode_id"])
        return build_result(rows, COLUMNS), len(known), len(known) - own.count(None)


def _to_row(change: Change, known: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of the result for a change."""
    first, last = (known[int(change.members[end])] for end in (0, -1))
    group, strongest = change.group, change.shifts[0]
    version = first["info"].get("policy_version")
    measure = strongest.measure
    single = not measure.field or measure.name in ("status", "fact") or change.widths.get(measure[:2], 1) == 1
    return {
        "kind": change.kind,
        "by": group.by,
        "name": group.name or None,
        "value": group.value,
        "where": _build_where(group, first["episode_id"], last["episode_id"] if change.is_over else None),
        "since": first["start_time"],
        "until": last["end_time"] if change.is_over or group.by == "version" else None,
        "episode_id": first["episode_id"],
        "version": version if type(version) is int else None,
        "episodes": len(change.members),
        "score": round(change.score, 2),
        "reason": describe(change),
        "measure": measure.name,
        "field": measure.field or None,
        "component": None if single else measure.component,
        "before": strongest.before,
        "after": strongest.after,
    }


def _build_where(group: Group, first: int, last: int | None) -> str:
    """Return a condition over the relation `episodes` that selects the changed ones."""
    fact = {"version": "policy_version", "fact": group.name}.get(group.by)
    column = {"source": "source", "split": "split", "lane": "trajectory_id"}.get(group.by)
    if fact is not None:
        column = f"json_extract_string(info, {_quote('/' + fact.replace('~', '~0').replace('/', '~1'))})"
    parts = []
    if column is not None:
        parts.append(f"{column} IS NULL" if group.value is None else f"{column} = {_quote(group.value)}")
    if group.by != "version":
        parts.append(f"episode_id >= {first}")
    if last is not None:
        parts.append(f"episode_id <= {last}")
    return " AND ".join(parts)


def _quote(text: str) -> str:
    """Return a text as a literal of SQL."""
    return "'" + text.replace("'", "''") + "'"


def tabulate_episodes(
    known: Sequence[Mapping[str, Any]], measured: Sequence[Measures | None]
) -> tuple[list[Measure], Floats, list[Group]]:
    """Return the measures of episodes, their values and groups. Values have the shape `(n, measures)`.

    Args:
        known: Rows of the relation `episodes`, with `info` as a dict, without the measures.
        measured: Their measures; None: it was not measured.
    """
    order = np.arange(len(known))
    facts: dict[str, list[Any]] = {}
    for number, one in enumerate(known):
        for name, value in one["info"].items():
            is_huge = isinstance(value, int) and abs(value) >= 1 << 63
            is_plain = isinstance(value, (bool, int, float, str)) and not is_huge
            if is_plain and name not in _APART and not name.startswith("_"):
                facts.setdefault(name, [None] * len(known))[number] = value
    columns: dict[Measure, Array] = {
        Measure(name): np.array([one[name] for one in known], np.float64) for name in ("length", "return")
    }
    for status in dict.fromkeys(one["status"] for one in known):
        columns[Measure("status", status)] = np.array([one["status"] == status for one in known], np.float64)
    groups = [
        *_group("source", "", [one["source"] for one in known], _MOST_GROUPS),
        *_group("split", "", [one["split"] for one in known], _MOST_GROUPS),
        *_group("lane", "", [one["trajectory_id"] for one in known], _MOST_GROUPS),
        *_group("version", "", [one["info"].get("policy_version") for one in known], len(known)),
    ]
    for name, some in facts.items():
        if len(set(some)) <= _FEW_VALUES:
            groups += _group("fact", name, some, _FEW_VALUES)
        if not any(isinstance(value, str) for value in some):
            column = np.array(some, np.float64)
            finite = np.isfinite(column)
            varies = finite.sum() > 1 and np.ptp(column[finite]) > 0
            if varies and abs(np.corrcoef(order[finite], column[finite])[0, 1]) < _COUNTS:
                columns[Measure("fact", name)] = column
    copied = find_copied(measured)[0] >= 0
    columns[Measure("copy")] = np.where([one is not None for one in measured], copied, np.nan)
    places, table = tabulate(measured)
    values = np.concatenate([np.stack(list(columns.values()), axis=1), table], axis=1)
    values[~np.isfinite(values)] = np.nan
    return [*columns, *places], values, groups


def _group(by: By, name: str, values: Sequence[Any], most: int) -> list[Group]:
    """Return the groups of equal values, the largest first; none if there is one value only."""
    members: dict[str | None, list[int]] = {}
    for number, value in enumerate(values):
        text = value if value is None or isinstance(value, str) else json.dumps(value)
        if text is None or len(text) <= _LONGEST:
            members.setdefault(text, []).append(number)
    if len(members) < 2:
        return []
    largest = sorted(members.items(), key=lambda one: -len(one[1]))[:most]
    return [
        Group(by, name, text, np.array(some)) for text, some in largest if text is not None or by != "version"
    ]
