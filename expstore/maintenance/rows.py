"""The part of `verify` that checks ids, episodes, steps and the index against the journal and episodes.log.

It reads `_row/id`, `_row/episode` and `_row/step`, never the user's fields.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.values import IntArray, key_name
from expstore.episodes.fragments import find_fragments, last_ids
from expstore.episodes.log import LogEntry, read_log
from expstore.episodes.table import EpisodeTable
from expstore.errors import CorruptionError, LockedError, MigrationError, StorageError
from expstore.maintenance.blocks import read_column
from expstore.maintenance.findings import Finding, Inspection, runs_of
from expstore.schema.row_fields import ROW_FIELDS
from expstore.sql.sync import Catalog
from expstore.storages.follower import FollowerStorage
from expstore.storages.format.paths import INDEX, LOG, index_path
from expstore.storages.format.records import Publish
from expstore.storages.recovery.recover import Past, rebuild_episodes

_NAMES = [entry.key[1] for entry in ROW_FIELDS]


def check_ids(inspection: Inspection) -> None:
    """Check that each slot has its id in `_row/id`, for the rows that a checkpoint covers."""
    wrong = [
        start + np.flatnonzero(ids != np.arange(start, start + ids.size))
        for first, count in inspection.find_settled_runs()
        for start, ids in read_column(inspection, _place("id"), first, count)
    ]
    _note_rows(inspection, "ids", "id", wrong, "does not have the ids that these rows must have")


def check_rows(inspection: Inspection) -> None:
    """Check `_row/episode` and `_row/step` against the commit records that still exist."""
    past = inspection.past
    if past is None:
        return
    runs = inspection.find_settled_runs()
    for name, part in (("episode", 0), ("step", 1)):
        wrong: list[IntArray] = []
        for publish, (first, count) in itertools.product(past.publishes, runs):
            wanted = _numbers_of(publish)[part]
            start = max(publish.first_id, first)
            n = min(publish.last_id, first + count - 1) - start + 1
            if n > 0:
                for at, found in read_column(inspection, _place(name), start, n):
                    expected = wanted[at - publish.first_id :][: found.size]
                    wrong.append(at + np.flatnonzero(found != expected))
        _note_rows(inspection, "episodes", name, wrong, "does not match the journal for these rows")


def _place(name: str) -> int:
    return _NAMES.index(name) - len(_NAMES)


def _numbers_of(publish: Publish) -> tuple[IntArray, IntArray]:
    episodes, steps = np.zeros((2, publish.count), np.int64)
    for segment in publish.segments:
        rows = slice(segment.start, segment.start + (segment.rows - 1) * segment.stride + 1, segment.stride)
        episodes[rows] = segment.episode
        steps[rows] = np.arange(segment.step, segment.step + segment.rows)
    return episodes, steps


def _note_rows(inspection: Inspection, kind: str, name: str, wrong: Iterable[IntArray], text: str) -> None:
    """Record a finding for rows with these ids, one per shard."""
    if inspection.group is None:
        return
    column = inspection.group.row_fields[_place(name)]
    ids = np.concatenate([np.empty(0, np.int64), *wrong])
    slots = ids - 1 if inspection.slots is None else (ids - 1) % inspection.slots
    for shard in np.unique(slots // column.rows).tolist():
        here = slots // column.rows == shard
        runs = runs_of(np.sort(ids[here]))
        path = inspection.relative(column.shard_path(shard))
        listed = ", ".join(f"{a} to {b}" for a, b in runs[:3]) + (", ..." if len(runs) > 3 else "")
        inspection.note(
            Finding(
                kind=kind,
                path=path,
                message=f"{path} {text}: ids {listed}",
                column=key_name(column.entry.key),
                shard=shard,
                slots=(int(slots[here].min()), int(slots[here].max())),
                ids=runs,
            )
        )


def check_log(inspection: Inspection) -> None:
    """Check episodes.log against its own checksums, the journal and the rows."""
    past, path = inspection.past, inspection.path / LOG
    if past is None:
        return
    size, length = inspection.disk.size(path), past.log_length
    if size < 0:
        if length:
            inspection.note(Finding(kind="missing", path=LOG, message=f"{LOG} is missing"))
        return
    if past.clean and size > length:
        text = f"{LOG} has {size} bytes, the journal says {length}"
        inspection.note(Finding(kind="length", path=LOG, message=text))
    try:
        entries = list(read_log(inspection.disk, path, length))
    except (CorruptionError, UnicodeDecodeError) as exc:
        text = exc.message if isinstance(exc, CorruptionError) else str(exc)
        inspection.note(Finding(kind="episodes.log", path=LOG, message=text.replace(str(path), LOG)))
        return
    _check_ends(inspection, past, entries)


def _check_ends(inspection: Inspection, past: Past, entries: list[LogEntry]) -> None:
    """Check the episodes in log and journal against the last rows of these episodes."""
    found = read_fragments(inspection)
    if found is None:
        return  # a shard is missing, which was recorded before
    last = min(past.synced, inspection.stored.last)
    table = EpisodeTable()
    new = rebuild_episodes(past, table, inspection.stored.low, lambda first_id, rows: None)
    latest = {entry.episode: entry for entry in [*entries, *new, *table.open_entries()]}
    wrong = []
    for episode, end in ends_of(found).items():
        entry = latest.get(episode)
        # An episode whose last rows were deleted ends after its last readable row.
        hidden = entry is not None and not inspection.stored.holds(np.array([entry.last_id]))[0]
        if entry is None or (entry.last_id <= last and not hidden and (entry.last_id, entry.length) != end):
            wrong.append(episode)
    if wrong:
        listed = ", ".join(map(str, sorted(wrong)[:5])) + (", ..." if len(wrong) > 5 else "")
        inspection.note(
            Finding(
                kind="episodes",
                path=LOG,
                message=f"{LOG} and the rows disagree on the length of {len(wrong)} episodes: {listed}",
            )
        )


def read_fragments(inspection: Inspection) -> IntArray | None:
    """Return the fragments of the readable rows that a checkpoint covers; None if a row cannot be read."""
    fragments = [np.zeros((5, 0), np.int64)]
    for first, count in inspection.find_settled_runs():
        columns = []
        for name in ("episode", "step"):
            parts = [part for _, part in read_column(inspection, _place(name), first, count)]
            columns.append(np.concatenate([np.empty(0, np.int64), *parts]))
            if columns[-1].size != count:
                return None
        fragments.append(find_fragments(columns[0], columns[1], np.arange(first, first + count)))
    return np.concatenate(fragments, axis=1)


def ends_of(fragments: IntArray) -> dict[int, tuple[int, int]]:
    """Return the last id and the length of each episode, by its last fragment."""
    ends: dict[int, tuple[int, int]] = {}
    for episode, last_id, length in zip(
        fragments[0].tolist(),
        last_ids(fragments).tolist(),
        (fragments[1] + fragments[2]).tolist(),
        strict=True,
    ):
        ends[episode] = max(ends.get(episode, (0, 0)), (last_id, length))
    return ends


def check_index(inspection: Inspection) -> None:
    """Check the tables of an up-to-date index.duckdb against tables built from columns and log.

    Only for a store without other findings: otherwise these tables cannot be built.
    """
    path = index_path(inspection.path)
    if path is None or inspection.past is None or inspection.found or not inspection.disk.exists(path):
        return
    try:
        text = _index_trouble(inspection, path)
    except (LockedError, MigrationError, StorageError) as exc:
        text = exc.message.splitlines()[0].replace(str(path), "it")
    if text:
        inspection.note(
            Finding(kind="index", path=INDEX, message=f"{INDEX}: {text}; `expstore repair` rebuilds it")
        )


def _index_trouble(inspection: Inspection, path: Path) -> str | None:
    from expstore.sql.index import COMPARED, read_tables  # loads DuckDB

    position, held = read_tables(path, store_uuid=inspection.manifest.uuid)
    follower = FollowerStorage(inspection.path, disk=inspection.disk)
    catalog = Catalog(follower)
    try:
        if position > follower.state.content:
            return f"it covers the journal up to {position}, which ends at {follower.state.content}"
        if position < follower.state.content:
            return None  # an index may lag behind
        for name, rows in held.items():
            told = catalog.query(f"SELECT {COMPARED[name]} FROM {name} ORDER BY ALL", None).fetchall()
            are_same = _have_same_rows if name == "fragments" else _are_equal
            if told != rows and not are_same(told, rows):
                return f"the relation {name} does not match the columns and {LOG}"
    finally:
        catalog.drop()
        follower.close()
    return None


def _are_equal(one: Sequence[tuple[Any, ...]], other: Sequence[tuple[Any, ...]]) -> bool:
    """Return whether two lists have the same rows; unlike in Python, NaN equals NaN, as in returns."""
    first, second = (
        [["NaN" if value != value else value for value in row] for row in rows] for rows in (one, other)
    )
    return first == second


def _have_same_rows(one: Sequence[tuple[int, ...]], other: Sequence[tuple[int, ...]]) -> bool:
    """Return whether two lists of fragments have the same rows, even if they are split into other runs."""
    return np.array_equal(_rows_in(one), _rows_in(other))


def _rows_in(fragments: Sequence[tuple[int, ...]]) -> IntArray:
    """Return id, episode and step of each row of fragments, sorted by id. Shape `(rows, 3)`."""
    table = np.array(fragments, np.int64).reshape(-1, 5)
    episodes, steps, counts, ids, strides = table.T
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    found = np.stack(
        [
            np.repeat(ids, counts) + inside * np.repeat(strides, counts),
            np.repeat(episodes, counts),
            np.repeat(steps, counts) + inside,
        ],
        axis=1,
    )
    return found[np.argsort(found[:, 0], kind="stable")]
