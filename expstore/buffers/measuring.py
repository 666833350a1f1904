"""Measure the episodes of a store, and list the odd ones.

Used by `rb.episodes` and by the command line. It reads rows as samplers do, in pieces of bounded size and
without a lock, and writes nothing itself. It does not import torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.values import Array, IntArray, key_name
from expstore.episodes.fragments import all_ids
from expstore.errors import ArgumentError, StateError
from expstore.schema.field_roles import Keys, find_observations
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import ARROW, OBJECT, Field, Schema
from expstore.sql.result import Result, build_result
from expstore.sql.sync import Catalog
from expstore.storages.read_view import ReadView, read_present, read_stable
from expstore.trajectories.measures import (
    VECTOR,
    Floats,
    Spans,
    equals_previous,
    find_breaks,
    find_not_finite,
    find_pauses,
    fingerprint,
    measure_signal,
)
from expstore.trajectories.odd import (
    SCALES,
    Episodes,
    Measures,
    Oddness,
    describe,
    locate,
    rank,
    read_measures,
)

#: The fact of an episode that has its measures.
MEASURES = "measures"
#: About how many rows of small fields, and bytes of a large field, are read at a time.
_ROWS, _BYTES = 1 << 15, 32 << 20
#: Position of the column of times among the store's own.
_TIME = [entry.key for entry in ROW_FIELDS].index(("_row", "time"))
#: Dtypes of fields that are not measured.
_UNMEASURED = frozenset({ARROW, OBJECT, "complex64"})
#: Last parts of keys of fields that are not measured: they mark steps, or name things.
_MARKS = frozenset({"done", "terminated", "truncated", "is_init", "step_count", "policy_version"})

#: A user's measure: a function of the columns of one episode.
Measure = Callable[[Mapping[str, Any]], float]

_EPISODES = """
FROM (SELECT episode_id, source, length, "return", status, split, live_rows,
    TRY_CAST(info->>'policy_version' AS BIGINT) AS version, (info->'measures')::VARCHAR AS measures
FROM episodes WHERE status != 'open' AND live_rows > 0 ORDER BY episode_id DESC LIMIT $newest)
ORDER BY episode_id
"""
_MISSING = """
SELECT episode_id, length FROM episodes
WHERE status != 'open' AND live_rows = length AND (
    TRY_CAST(info->>'$.measures.length' AS BIGINT) IS DISTINCT FROM length
    OR NOT coalesce(list_has_all(json_keys(info, '$.measures'), $names::VARCHAR[]), false)
) ORDER BY episode_id
"""
#: The columns of a list of odd episodes, with their Arrow types.
COLUMNS = {
    "episode_id": "int64",
    "source": "string",
    "score": "float64",
    "reason": "string",
    "by": "string",
    "measure": "string",
    "field": "string",
    "component": "int64",
    "step": "int64",
    "value": "float64",
    "usual": "float64",
    "copy_of": "int64",
}


class Measured(NamedTuple):
    """What `measure` did.

    Args:
        episodes: Number of episodes that were measured.
        rows: Number of their steps.
        skipped: Names of the fields without measures: they do not have a fixed number of real numbers.
    """

    episodes: int
    rows: int
    skipped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Fields:
    """The fields that are measured, by dotted name.

    Args:
        small: Positions of the fields that are measured as numbers, with the reward.
        large: Positions of the fields of which only equal rows are counted.
        reward: Name of the reward; "" for none.
        pairs: Positions of the next observations of small fields.
        skipped: Names of fields that are not measured.
    """

    small: Mapping[str, int]
    large: Mapping[str, int]
    reward: str
    pairs: Mapping[str, int]
    skipped: tuple[str, ...]

    @classmethod
    def of(cls, schema: Schema, keys: Keys) -> _Fields:
        """Return the fields of a schema."""
        roles = {getattr(keys, name) for name in Keys.__slots__} - {keys.reward}
        small: dict[str, int] = {}
        large: dict[str, int] = {}
        skipped = []
        for place, entry in enumerate(schema.fields):
            is_mark = entry.key in roles or entry.key[0] == "next" or entry.key[-1] in _MARKS
            if is_mark and entry.key != keys.reward:
                continue
            if entry.dtype in _UNMEASURED or entry.annotated:
                skipped.append(key_name(entry.key))
            elif entry.row_items:
                (small if entry.row_items <= VECTOR else large)[key_name(entry.key)] = place
        names = {place: name for name, place in small.items()}
        pairs = {names[one]: after for one, after in find_observations(schema, keys) if one in names}
        reward = "" if keys.reward is None else key_name(keys.reward)
        return cls(small, large, reward if reward in small else "", pairs, tuple(skipped))


class Meter:
    """Measure the episodes of a store, and compare them.

    Threads: any number may use it. Processes: another one may write the store. Crashes: it writes nothing.

    Args:
        storage: The store.
        catalog: Its SQL catalog.
        measures: The user's measures by name.

    Raises:
        ArgumentError: A measure is not a function, or has the name of one of the store's own.
    """

    def __init__(
        self, storage: ReadView, catalog: Catalog, measures: Mapping[str, Measure] | None = None
    ) -> None:
        self._storage, self._catalog, self._own = storage, catalog, dict(measures or {})
        for name, function in self._own.items():
            if not isinstance(name, str) or name in SCALES or not callable(function):
                raise ArgumentError(
                    f"measures={{{name!r}: ...}} is not a measure",
                    hint="give functions by name; names of the store's own are " + ", ".join(SCALES),
                )

    def list_skipped(self) -> tuple[str, ...]:
        """Return the names of the fields that have no measures."""
        schema = self._storage.schema
        return () if schema is None else _Fields.of(schema, self._storage.keys).skipped

    # -- measuring ---------------------------------------------------------------------------------------

    def measure(
        self, known: Mapping[int, Measures] | None = None, newest: int | None = None
    ) -> Iterator[dict[int, dict[str, Any]]]:
        """Yield the measures of episodes that have none, or of another length, by id, some at a time.

        Args:
            known: Measures by episode that are not in the store, and are not computed again.
            newest: Measure at most this many episodes, the newest first; None: all, the oldest first.
        """
        if self._storage.schema is None:
            return
        missing = self._catalog.query(_MISSING, {"names": list(self._own)}).arrow()
        episodes, lengths = (missing[name].to_numpy() for name in ("episode_id", "length"))
        if known:
            had = [known[one].length if one in known else -1 for one in episodes.tolist()]
            changed = np.array(had) != lengths
            episodes, lengths = episodes[changed], lengths[changed]
        if newest is not None:
            episodes, lengths = episodes[::-1][:newest], lengths[::-1][:newest]
        piece = np.cumsum(lengths) // _ROWS
        for some in np.split(episodes, np.flatnonzero(np.diff(piece)) + 1):
            if some.size:
                yield read_stable(self._storage, partial(self._measure, some))

    def _measure(self, episodes: IntArray) -> dict[int, dict[str, Any]]:
        """Return the measures of episodes, without those whose rows were removed meanwhile."""
        schema = self._storage.require_schema()
        fields = _Fields.of(schema, self._storage.keys)
        places = [*fields.small.values(), *fields.pairs.values(), len(schema.fields) + _TIME]
        episodes, ids, spans, columns = self._read(episodes, places)
        if not episodes.size:
            return {}
        stored = dict(zip(fields.small, columns, strict=False))
        small = {name: _widen(schema.fields[fields.small[name]], rows) for name, rows in stored.items()}
        whole = {
            "pause": find_pauses(columns[-1], spans),
            "not_finite": spans.shares(find_not_finite(small.values(), spans)),
        }
        if fields.pairs:
            after = zip(fields.pairs, columns[len(small) : -1], strict=True)
            whole["breaks"] = spans.sums(find_breaks([(stored[name], rows) for name, rows in after], spans))
        if fields.reward:
            whole["positive"] = spans.shares((small[fields.reward] > 0).reshape(ids.size, -1).any(1))
        parts: dict[str, dict[str, Array]] = {}
        for name, values in small.items():
            for measure, found in measure_signal(values, spans).items():
                parts.setdefault(measure, {})[name] = found
        for name, place in fields.large.items():
            parts.setdefault("still", {})[name] = self._count_equal(ids, spans, place)[:, None]
        prints = fingerprint([rows for name, rows in small.items() if name != fields.reward], spans)
        facts: dict[int, dict[str, Any]] = {}
        for number, episode in enumerate(episodes.tolist()):
            start, count = int(spans.starts[number]), int(spans.counts[number])
            facts[episode] = {
                "length": count,
                **{name: _round(values[number]) for name, values in whole.items()},
                **{
                    measure: {name: [_round(one) for one in values[number]] for name, values in some.items()}
                    for measure, some in parts.items()
                },
                **({"copy": prints[number]} if prints else {}),
                **self._run_own(ids[start : start + count]),
            }
        return facts

    def _read(
        self, episodes: IntArray, places: Sequence[int]
    ) -> tuple[IntArray, IntArray, Spans, list[Array]]:
        """Read all rows of episodes, without the episodes of which rows are gone.

        Returns:
            The episodes, the ids of their rows, where each begins among them, and the columns.
        """
        while True:
            with self._storage.locks.episodes:
                fragments = self._storage.episodes.fragments.capture()
            own = fragments.of(episodes)
            own = own[:, np.lexsort((own[1], own[0]))]
            ids, owner = all_ids(own), np.repeat(own[0], own[2])
            found, columns = read_present(self._storage, ids, places)
            starts = np.flatnonzero(np.diff(owner, prepend=-1))
            if found.size == ids.size:
                return owner[starts], ids, Spans(starts, ids.size), columns
            episodes = np.setdiff1d(owner, owner[np.isin(ids, found, invert=True)])

    def _count_equal(self, ids: IntArray, spans: Spans, place: int) -> Floats:
        """Return the share of steps at which a large field does not change. Shape `(episodes,)`."""
        same = np.zeros(ids.size, np.bool_)
        piece = max(1, _BYTES // self._storage.require_schema().fields[place].row_bytes)
        for start in range(0, ids.size, piece):
            some = ids[max(0, start - 1) : start + piece]
            found, (rows,) = read_present(self._storage, some, [place])
            if found.size == some.size:  # if not, the episodes are about to be gone
                same[start : start + piece] = equals_previous(rows)[min(start, 1) :]
        same[spans.starts] = False
        return spans.sums(same) / np.maximum(1, spans.counts - 1)

    def _run_own(self, ids: IntArray) -> dict[str, float | None]:
        """Return the user's measures of the episode with these rows; None for NaN and infinities."""
        columns = EpisodeColumns(self._storage, ids)
        found = {name: float(function(columns)) for name, function in self._own.items()}
        return {name: _round(value) if math.isfinite(value) else None for name, value in found.items()}

    # -- comparing ---------------------------------------------------------------------------------------

    def list_odd(
        self,
        limit: int | None,
        threshold: float,
        fresh: Mapping[int, Measures] | None = None,
        newest: int | None = None,
    ) -> tuple[Result, int, int]:
        """Return odd episodes as `Episodes.odd` does, how many there are, and how many were compared.

        Args:
            limit: Largest number of episodes; None: all.
            threshold: Smallest score.
            fresh: Measures by episode, besides those in the store; None: measure the episodes without any.
            newest: Compare at most this many ended episodes, the newest ones; None: all.
        """
        if fresh is None:
            fresh = {episode: one for some in self.measure() for episode, one in to_measures(some).items()}
        known = self._catalog.query(_EPISODES, {"newest": newest}).arrow().to_pylist()
        stored = read_measures(json.loads(one["measures"] or "null") for one in known)
        for one, own in zip(known, stored, strict=True):
            one["measures"] = fresh.get(one["episode_id"], own)
        known = [one for one in known if one["measures"] is not None]
        found: list[tuple[dict[str, Any], Oddness, int | None]] = []
        for split in dict.fromkeys(one["split"] for one in known):
            some = [one for one in known if one["split"] == split]
            found += [
                (one, odd, some[odd.copied]["episode_id"] if odd.copied >= 0 else None)
                for one, odd in zip(some, rank(_to_compared(some)), strict=True)
                if odd.score >= threshold
            ]
        found.sort(key=lambda each: (-each[1].score, each[0]["episode_id"]))
        rows = [read_stable(self._storage, partial(self._explain, *each)) for each in found[:limit]]
        return build_result(rows, COLUMNS), len(found), len(known)

    def _explain(self, one: Mapping[str, Any], odd: Oddness, copied: int | None) -> dict[str, Any]:
        """Return the row of the result for one episode."""
        measure, where = odd.measure, None
        single = not measure.field or one["measures"].width(measure.name, measure.field) == 1
        if odd.by == "episode" and one["live_rows"] == one["length"]:
            where = self._locate(one["episode_id"], odd)
        name = measure.field + ("" if single else f"[{measure.component}]")
        words = describe(odd, one["length"], one["status"], where, name)
        if measure.name == "copy":
            words = f"copy of episode {copied}"
        elif odd.by == "source":
            words = f"{one['source']} about this time: {words}"
        elif odd.by == "version":
            words = f"policy version {one['version']}: {words}"
        return {
            "episode_id": one["episode_id"],
            "source": one["source"],
            "score": round(odd.score, 2),
            "reason": words,
            "by": odd.by,
            "measure": measure.name,
            "field": measure.field or None,
            "component": None if single else measure.component,
            "step": None if where is None else where[0],
            "value": odd.value,
            "usual": odd.usual,
            "copy_of": copied,
        }

    def _locate(self, episode: int, odd: Oddness) -> tuple[int, int] | None:
        """Return the first and the last step that show what is odd about an episode; None if all do."""
        schema = self._storage.require_schema()
        fields = _Fields.of(schema, self._storage.keys)
        places = {
            "pause": [len(schema.fields) + _TIME],
            "breaks": [place for one, after in fields.pairs.items() for place in (fields.small[one], after)],
            "not_finite": list(fields.small.values()),
        }.get(odd.measure.name, [])
        named = fields.small.get(odd.measure.field, fields.large.get(odd.measure.field))
        places = places if named is None else [named]
        _, ids, spans, columns = self._read(np.array([episode]), places)
        if not ids.size or not places:
            return None
        if odd.measure.name == "breaks":
            return locate(find_breaks(zip(columns[::2], columns[1::2], strict=True), spans), odd)
        entries = (*schema.fields, *ROW_FIELDS)
        numbers = [_widen(entries[place], rows) for place, rows in zip(places, columns, strict=True)]
        return locate(numbers[0] if named is not None else find_not_finite(numbers, spans), odd)


class EpisodeColumns(Mapping[str, Any]):
    """The columns of one episode by dotted name, in the order of the steps; each is read when it is accessed.

    Args:
        storage: The store.
        ids: Ids of the rows. Shape `(steps,)`.
    """

    def __init__(self, storage: ReadView, ids: IntArray) -> None:
        self._storage, self._ids = storage, ids
        fields = storage.require_schema().fields
        self._places = {key_name(entry.key): place for place, entry in enumerate(fields)}

    def __getitem__(self, name: str) -> Any:
        place = self._places[name]
        found, (rows,) = read_present(self._storage, self._ids, [place])
        if found.size != self._ids.size:
            raise StateError("rows of this episode were removed while it was measured", hint="measure again")
        return _widen(self._storage.require_schema().fields[place], rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _widen(entry: Field, rows: Any) -> Any:
    """Return the rows of a field with values that NumPy computes with."""
    return widen_bfloat16(rows) if entry.dtype == "bfloat16" else rows


def to_measures(facts: Mapping[int, Mapping[str, Any]]) -> dict[int, Measures]:
    """Return what `Meter.measure` yields in the form in which episodes are compared, by episode."""
    found = zip(facts, read_measures(facts.values()), strict=True)
    return {episode: one for episode, one in found if one is not None}


def _to_compared(known: list[dict[str, Any]]) -> Episodes:
    """Return what is known of episodes as `rank` takes it."""
    return Episodes(
        measures=[one["measures"] for one in known],
        length=np.array([one["length"] for one in known]),
        returns=np.array([one["return"] for one in known], np.float64),
        ended=np.array([one["status"] == "terminated" for one in known]),
        source=[one["source"] for one in known],
        version=[one["version"] for one in known],
    )


def _round(value: float) -> float:
    """Return a number with four significant digits."""
    return float(f"{value:.4g}")
