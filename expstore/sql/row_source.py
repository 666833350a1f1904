"""Columns of a storage for SQL: views where the rows are contiguous, otherwise functions that copy rows.

Used by `expstore.sql.sync` for a query. It decides neither which rows are visible nor their column names.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from expstore.core.values import Array, IntArray, Key, Window, key_name
from expstore.errors import CorruptionError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Field
from expstore.storages.columns.sample_counts import SAMPLED, Sampled
from expstore.storages.read_view import ReadView

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from expstore.disk.files import Disk
    from expstore.sql.views import Column, Relations
    from expstore.storages.format.draw_log import Draw

#: Rows that are read at a time to assemble a column for a query.
_PIECE_ROWS = 65_536
#: If the readable rows form more runs than this, runs are not viewed one by one,
_MANY_RUNS = 256
#: except for rows longer than this.
_NARROW_BYTES = 256


def relations_of(storage: ReadView, window: Window, sql: str) -> Relations:
    """Return the columns of the rows in a window; no columns if a statement cannot read rows."""
    from expstore.sql.arrow_values import nullable_text
    from expstore.sql.views import MAY_READ_ROWS, Column, Relations

    schema, draws, lineage = storage.schema, None, None
    if storage.path is not None and storage.manifest is not None:
        draws = partial(_read_draws, storage.disk, storage.path)
        lineage = partial(read_lineage, storage, window)
    if schema is None or not MAY_READ_ROWS.search(sql.lower()):
        return Relations(window=window, draws=draws, lineage=lineage)
    fields = len(schema.fields)
    kinds: list[tuple[Key, str, tuple[int, ...]]] = [
        *((entry.key, entry.dtype, entry.shape) for entry in schema.fields),
        *(((f"_{entry.key[1]}",), entry.dtype, ()) for entry in ROW_FIELDS),
    ]
    apart = {n for n, entry in enumerate(schema.fields) if entry.variable or entry.annotated}
    unviewed = storage.unviewed_places | apart
    places = [place for place in range(len(kinds)) if place not in unviewed]
    runs = window.runs()
    scattered = _Scattered(storage, window) if len(window.deleted) > _MANY_RUNS else None
    columns: dict[int, Column] = {}
    if scattered is not None:
        for place in places:
            columns[place] = Column(*kinds[place], (), gather=partial(scattered.rows, place))
    else:
        try:
            views = [storage.views(places, first, count) for first, count in runs]
            for number, place in enumerate(places):
                columns[place] = Column(*kinds[place], [part for run in views for part in run[number]])
        except CorruptionError:
            for place in places:
                columns[place] = _view_alone(storage, place, runs, kinds[place])
    for place in unviewed:
        entry = schema.fields[place]
        read = _make_reader(storage, place, entry, window)
        text = nullable_text(entry) if entry.annotated else entry.arrow  # a packed field has none
        columns[place] = Column(*kinds[place], (), take=read, arrow=text)
    found = [columns[place] for place in range(fields, len(kinds))]
    sampled = storage.state.sampled
    if sampled is not None:
        key = (f"_{SAMPLED.key[1]}",)
        if scattered is not None:
            counts = Column(key, SAMPLED.dtype, (), (), gather=partial(scattered.counts, sampled))
        else:
            pieces = (piece for first, count in runs for piece in storage.geometry.runs(first, count))
            counts = Column(key, SAMPLED.dtype, (), sampled.views(pieces))
        found.append(counts)
    names = [column.key[0] for column in found]
    found += [columns[place] for place in range(fields)]
    recent = window.newest(storage.description.window_rows).low
    return Relations(found, window, storage.capacity, rows=names, recent=recent, draws=draws, lineage=lineage)


def _read_draws(disk: Disk, path: Path) -> pa.Table:
    """Return the relation `draws`: a row for each row that a consumer has drawn."""
    import pyarrow as pa

    from expstore.sql.views import DRAWS
    from expstore.storages.format.draw_log import read_draws
    from expstore.storages.format.renumbering import Renumbering

    table, batches = Renumbering.load(disk, path), []
    for name, draws in itertools.groupby(read_draws(disk, path), key=lambda one: one[0]):
        found = [draw for _, draw in draws]
        sizes = np.array([draw.selection.ids.size for draw in found])
        starts = np.cumsum(sizes) - sizes
        weights = [draw.selection.info.get(("priority_weight",), _none(draw)) for draw in found]
        columns = [
            pa.repeat(name, int(sizes.sum())),
            np.repeat([draw.number for draw in found], sizes),
            np.arange(sizes.sum()) - np.repeat(starts, sizes),
            table.present(np.concatenate([draw.selection.ids for draw in found])),
            pa.array(np.concatenate(weights).astype(np.float64), from_pandas=True),  # NaN: NULL
            pa.array(np.repeat([draw.at for draw in found], sizes)).cast(pa.timestamp("us")),
        ]
        batches.append(pa.table(columns, schema=DRAWS))
    return pa.concat_tables(batches) if batches else DRAWS.empty_table()


def read_lineage(storage: ReadView, window: Window) -> pa.Table:
    """Return the relation `lineage`: by which steps the store got the rows of a window."""
    import pyarrow as pa

    from expstore.sql.views import LINEAGE
    from expstore.storages.format.manifest import Manifest

    manifest = storage.manifest
    if storage.follows and storage.path is not None:  # the writer may have added steps since it was read
        manifest = Manifest.load(storage.disk, storage.path)
    found = []
    for number, step in enumerate(() if manifest is None else manifest.lineage.steps, start=1):
        last = window.last if step.last is None else step.last
        here = Window(max(window.low, step.first - 1), min(window.last, last), window.deleted)
        rows = max(0, here.rows) if step.first else 0
        if step.last is None and not rows:
            continue  # a session that has not written rows yet
        rest = {name: value for name, value in step.facts.items() if name not in LINEAGE.names}
        found.append(
            {name: step.facts.get(name) for name in ("program", "git_commit", "dirty", "source")}
            | {"number": number, "kind": step.kind, "time": step.time, "rows": rows}
            | {"first_id": step.first or None, "last_id": last or None, "store": step.store}
            | {"session": step.session, "facts": json.dumps(rest, ensure_ascii=False)}
        )
    return pa.Table.from_pylist(found, schema=LINEAGE)


def _none(draw: Draw) -> Array:
    return np.full(draw.selection.ids.size, np.nan)


def _make_reader(storage: ReadView, place: int, entry: Field, window: Window) -> Callable[[IntArray], Array]:
    """Return a function that copies rows of a column, given their numbers (0: the oldest row)."""
    if not entry.annotated:
        return lambda numbers: storage.read(window.nth(numbers), [place])[0]

    from expstore.sql.arrow_values import find_present, to_nullable

    def read(numbers: IntArray) -> Any:
        ids = window.nth(numbers)
        (values,) = storage.read(ids, [place])
        return to_nullable(entry, values, find_present(storage, entry, ids))

    return read


def read_annotations(storage: ReadView, window: Window, *, values: bool) -> pa.Table:
    """Return the relation `annotations`: all values that rows in a window were given, newest or not.

    Args:
        storage: The storage.
        window: The readable ids.
        values: Whether to read the values; otherwise they are NULL.
    """
    import pyarrow as pa

    from expstore.sql.views import ANNOTATIONS

    annotations, batches = storage.state.annotations, list[pa.Table]()
    if annotations is None:
        return ANNOTATIONS.empty_table()
    for at, head, places in annotations.valid_records(storage.require_schema()):
        here = window.holds(head.ids)
        rows = int(np.count_nonzero(here))
        for place in places if rows else ():
            field = head.fields[place]
            found: Any = pa.nulls(rows, ANNOTATIONS.field("value").type)
            if values:
                ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(field.items[here])])
                part = annotations.read_part(at, head, place, here)
                found = pa.LargeListArray.from_arrays(ends, part.values.astype(np.float64))
            columns = [
                head.ids[here],
                pa.repeat(key_name(field.key), rows),
                found,
                pa.nulls(rows, pa.string()) if head.by is None else pa.repeat(head.by, rows),
                pa.repeat(pa.scalar(head.time, pa.timestamp("us")), rows),
                np.full(rows, head.number),
            ]
            batches.append(pa.table(columns, schema=ANNOTATIONS))
    return pa.concat_tables(batches) if batches else ANNOTATIONS.empty_table()


class _Scattered:
    """Assemble columns whose readable rows form many short runs between deleted rows.

    A column is read when a query names it, for all runs at once: each run viewed separately would cost 85 us
    in a query, whatever its length. Narrow rows are therefore copied.

    Args:
        storage: The storage to read.
        window: The readable ids; some are deleted.
    """

    def __init__(self, storage: ReadView, window: Window) -> None:
        self._storage, self._window = storage, window

    @cached_property
    def _numbers(self) -> IntArray:
        """Offsets of the readable ids from the first id above the window's low. Shape `(rows,)`."""
        numbers: IntArray = self._window.nth(np.arange(self._window.rows)) - (self._window.low + 1)
        return numbers

    def rows(self, place: int) -> list[Array]:
        """Return the readable rows of a column that can be viewed."""
        window = self._window
        return self._pick(self._storage.views([place], window.low + 1, window.size)[0])

    def counts(self, sampled: Sampled) -> list[Array]:
        """Return how often each readable row was sampled."""
        window = self._window
        return self._pick(sampled.views(self._storage.geometry.runs(window.low + 1, window.size)))

    def _pick(self, parts: Sequence[Array]) -> list[Array]:
        """Select the readable rows from views of all rows; wide rows are viewed run by run."""
        found, behind = [], 0
        for part in parts:
            low, high = np.searchsorted(self._numbers, [behind, behind + len(part)])
            numbers = self._numbers[low:high] - behind
            behind += len(part)
            if part[:1].nbytes <= _NARROW_BYTES:
                found.append(part[numbers])
                continue
            cuts = np.flatnonzero(np.diff(numbers, prepend=-2) > 1)
            starts, counts = numbers[cuts], np.diff(cuts, append=numbers.size)
            found += [part[at : at + n] for at, n in zip(starts.tolist(), counts.tolist(), strict=True)]
        return found


def _view_alone(
    storage: ReadView, place: int, runs: Sequence[tuple[int, int]], kind: tuple[Key, str, tuple[int, ...]]
) -> Column:
    """Return a column with its parts, or with the error if it is damaged."""
    from expstore.sql.views import Column

    try:
        parts = [part for first, count in runs for part in storage.views([place], first, count)[0]]
    except CorruptionError as exc:
        return Column(*kind, (), fault=exc)
    return Column(*kind, parts)
