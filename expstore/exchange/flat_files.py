"""Shared parts of the HDF5 and NPZ formats: flat files with one row per transition, ordered by episode.

Used by these formats, which write and read the files. One piece of the rows is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.parsing import INVALID, reading
from expstore.core.values import Array, IntArray
from expstore.disk.files import Disk
from expstore.episodes.sources import lane_names
from expstore.errors import SchemaError
from expstore.exchange.base import Imported, Progress, Tell, piece_rows
from expstore.exchange.fill import new_store, settings_of
from expstore.exchange.foreign_rows import (
    SCALARS,
    Column,
    ForeignRows,
    check_keys,
    from_stored,
    plan_rows,
    their_path,
    to_field,
)
from expstore.exchange.rows import Piece, Rows, Tally
from expstore.schema.schema import Field, Schema

#: Name under which an export stores a description of its fields.
ABOUT = "expstore"
_EPISODE = ("_episode",)
_FORMAT = 1


class FlatWriter(Protocol):
    """Writes a file, piece by piece."""

    def add(self, columns: Sequence[Array]) -> None:
        """Append rows: one array per column. Shapes `(n, *row shape)`."""

    def finish(self, about: str) -> None:
        """Complete the file, and store `about` in it."""


class FlatReader(Protocol):
    """Reads a file, piece by piece.

    `lanes` has ranges of rows (first, one after the last) for each environment, in the order of time, if the
    file is a ring buffer or some of its rows are empty; [] stands for all rows in the order of the file. An
    episode never continues in another lane.
    """

    columns: list[Column]
    lengths: list[int]
    lanes: list[list[tuple[int, int]]]
    about: str
    notes: list[str]

    def read(self, wanted: Sequence[Column], first: int, count: int) -> list[Array]:
        """Return rows, from row `first` of the file. Shapes `(count, *row shape)`."""


# -- writing --------------------------------------------------------------------------------------------


def plan_columns(rows: Rows) -> list[Column]:
    """Return the arrays of a file with these rows.

    Raises:
        SchemaError: Two fields would have the same name.
    """
    found = [_column(entry) for entry in rows.user_fields]
    paths = [column.path for column in found]
    for name in ("terminals", "timeouts"):
        if (name,) not in paths:
            found.append(Column((name,), np.dtype(bool), ()))
    found.append(Column(_EPISODE, np.dtype("<i8"), ()))
    seen: set[str] = set()
    for column in found:
        name = "/".join(column.path)
        parents = {"/".join(column.path[:n]) for n in range(1, len(column.path))}
        if name in seen or parents & {"/".join(p.path) for p in found} or name == ABOUT:
            raise SchemaError(
                f"two fields would both be named {name!r} in the file", hint="choose the fields to export"
            )
        seen.add(name)
    return found


def _column(entry: Field) -> Column:
    kind = np.dtype("<f4") if entry.dtype == "bfloat16" else entry.numpy_dtype
    shape = () if entry.key in SCALARS and entry.shape == (1,) else entry.shape
    return Column(their_path(entry.key), kind, shape)


def write_flat(rows: Rows, columns: Sequence[Column], writer: FlatWriter, progress: Progress) -> int:
    """Pass all rows to a writer, ordered by episode; return their number."""
    fields = rows.user_fields
    own = len(rows.schema.fields)
    places = [*rows.places[: len(fields)], own + 1]  # and `_row/episode`
    ends, tally = _Ends(rows), Tally(rows, progress)
    for ids in _iterate_by_episode(rows, piece_rows(rows.row_bytes)):
        found, values = rows.read(ids, places)
        if found.size:
            given = [to_stored(entry, column) for entry, column in zip(fields, values[:-1], strict=True)]
            names = values[-1].reshape(-1)
            for column in columns[len(fields) : -1]:
                given.append(ends.flags(column.path[0], found, names))
            shaped = [v.reshape(-1, *c.shape) for v, c in zip([*given, names], columns, strict=True)]
            writer.add(shaped)
        tally.add(Piece(ids.size, found, values))
    kept = [{"key": list(f.key), "dtype": f.dtype, "shape": list(f.shape)} for f in fields]
    about = {name: value for name, value in rows.about().items() if name != "specs"}
    writer.finish(json.dumps({"format": _FORMAT, "fields": kept, **about}))
    return tally.written


def _iterate_by_episode(rows: Rows, size: int) -> Iterator[IntArray]:
    """Yield the ids of all rows, ordered by episode and step, `size` at a time."""
    held: list[IntArray] = []
    count = 0
    for episode in rows.episode_ids.tolist():
        ids, _ = rows.episode_rows(episode)
        while count + ids.size >= size:
            head = size - count
            yield np.concatenate([*held, ids[:head]])
            held, count, ids = [], 0, ids[head:]
        held.append(ids)
        count += ids.size
    if count:
        yield np.concatenate(held)


def to_stored(entry: Field, column: Array) -> Array:
    """Convert values to the stored dtype: NumPy has no bfloat16."""
    if entry.dtype == "bfloat16":
        return widen_bfloat16(column)
    return column


class _Ends:
    """Compute end flags from the last rows of episodes, for stores without such fields."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._last: dict[int, int] | None = None

    def flags(self, name: str, ids: IntArray, episodes: IntArray) -> Array:
        """Return which rows end an episode: by termination for "terminals", in any other way for other names.

        An episode that is still open ends with its last row here.
        """
        if self._last is None:
            table = self._rows.facts
            status = table["status"].to_pylist()
            fragments = self._rows.by_episode
            stops = np.flatnonzero(np.diff(fragments[0], append=-1))
            last = fragments[3, stops] + (fragments[2, stops] - 1) * fragments[4, stops]
            ended = dict(zip(table["episode_id"].to_pylist(), status, strict=True))
            self._last = {
                row: ended[episode] == "terminated"
                for episode, row in zip(fragments[0, stops].tolist(), last.tolist(), strict=True)
            }
        wanted = name == "terminals"
        return np.array([self._last.get(row) is wanted for row in ids.tolist()], bool)


# -- reading --------------------------------------------------------------------------------------------


def fill_flat(
    reader: FlatReader,
    target: Path,
    *,
    given: Mapping[str, str],
    capacity: int | None,
    progress: Progress,
    tell: Tell,
    disk: Disk,
) -> Imported:
    """Create a store from a flat file.

    Raises:
        SchemaError: An array in the file cannot be a field.
    """
    about = {} if given else _parse_about(reader.about)
    if about:
        return _fill_exported(reader, about, target, capacity, progress, tell, disk)
    with reading("the arrays of the file"):
        plan = plan_rows(reader.columns, given)
    rows = _check_lengths([(reader.columns[place], reader.lengths[place]) for place in plan.positions])
    notes = [*reader.notes, *plan.notes]
    tell(notes)
    with new_store(disk, target, capacity) as filler:
        writer = ForeignRows(plan, filler)
        size, done = piece_rows(plan.schema.row_bytes), 0

        def read(first: int, count: int) -> dict[int, Array]:
            values = reader.read([reader.columns[place] for place in plan.positions], first, count)
            return dict(zip(plan.positions, values, strict=True))

        lanes = reader.lanes
        if not lanes:
            begin = writer.find_seam(read, rows)
            lanes = [[(begin, rows), (0, begin)]] if begin else [[(0, rows)]]
        total = sum(stop - start for lane in lanes for start, stop in lane)
        sources = lane_names("env", "", len(lanes)) if len(lanes) > 1 else [None]
        for source, lane in zip(sources, lanes, strict=True):
            writer.begin_lane(source)
            for start, stop in lane:
                for first in range(start, stop, size):
                    count = min(size, stop - first)
                    with reading("the arrays of the file"):
                        writer.write(read(first, count), count)
                    done += count
                    progress(done, total)
        return filler.result(target, notes, names=plan.names, warnings=writer.warnings())


def _check_lengths(lengths: Sequence[tuple[Column, int]]) -> int:
    """Return the number of rows that all columns have."""
    first, count = lengths[0]
    for column, rows in lengths:
        if rows != count:
            raise SchemaError(
                f"{column.name!r} has {rows} rows, and {first.name!r} has {count}",
                hint=f"an array without one row per transition can be left out: --map {column.name}=",
            )
    return count


def _fill_exported(
    reader: FlatReader,
    about: Mapping[str, Any],
    target: Path,
    capacity: int | None,
    progress: Progress,
    tell: Tell,
    disk: Disk,
) -> Imported:
    """Create a store from a file that expstore exported."""
    with reading("the file: what it says of its fields does not fit"):
        known = {their_path(tuple(f["key"])): f for f in about["fields"]}
        columns = [column for column in reader.columns if column.path in known]
        episode = next((column for column in reader.columns if column.path == _EPISODE), None)
        if not columns or episode is None:
            raise SchemaError(
                f"the file describes an export of expstore, but has no {'fields' if episode else '_episode'}",
                hint="export the store again, or map a name, which reads the file as that of another program",
            )
        fields = [to_field(tuple(known[one.path]["key"]), one, known[one.path]) for one in columns]
        check_keys([entry.key for entry in fields])
        lengths = dict(zip([column.path for column in reader.columns], reader.lengths, strict=True))
        wanted = [*columns, episode]
        rows = _check_lengths([(column, lengths[column.path]) for column in wanted])
        schema = Schema(fields, about.get("form", ""))
        settings = settings_of(about, schema)
    tell(reader.notes)
    room = about.get("capacity") if capacity is None else capacity
    with new_store(disk, target, room, settings) as filler:
        filler.prepare(schema)
        numbers = _Numbers()
        size = piece_rows(schema.row_bytes)
        for first in range(0, rows, size):
            count = min(size, rows - first)
            values = reader.read(wanted, first, count)
            with reading("the arrays of the file"):
                shaped = [from_stored(f, v, count) for f, v in zip(fields, values[:-1], strict=True)]
                named = values[-1].reshape(-1).astype(np.int64)
            shaped, episodes, steps, last = numbers.cut(shaped, named, more=first + count < rows)
            filler.put(shaped, episodes, steps, last=last)
            progress(first + count, rows)
        return filler.result(target, reader.notes)


def _parse_about(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = dict(json.loads(text))
        if int(found["format"]) > _FORMAT:
            raise SchemaError(f"the file is in format {found['format']}, this version reads format {_FORMAT}")
        for entry in found["fields"]:
            Field(tuple(map(str, entry["key"])), str(entry["dtype"]), tuple(map(int, entry["shape"])))
    except INVALID as exc:
        if isinstance(exc, SchemaError):
            raise
        raise SchemaError(f"the description of the fields in the file cannot be read: {exc}") from exc
    return found


class _Numbers:
    """Number the steps of exported rows, whose episodes are named and contiguous.

    The last row of a piece is kept back: only the next piece shows whether its episode continues.
    """

    def __init__(self) -> None:
        self._kept: tuple[list[Array], IntArray] | None = None
        self._episode = self._step = 0

    def cut(
        self, columns: list[Array], named: IntArray, *, more: bool
    ) -> tuple[list[Array], IntArray, IntArray, Array]:
        """Return the rows that are complete, their episodes and steps, and whether each ends its episode.

        Args:
            columns: Further rows. Shapes `(n, *row shape)`.
            named: The numbers of their episodes in the exported store. Shape `(n,)`.
            more: Whether further rows follow.
        """
        if self._kept is not None:
            rows, names = self._kept
            columns = [np.concatenate(both) for both in zip(rows, columns, strict=True)]
            named = np.concatenate([names, named])
        begins = np.append(False, named[1:] != named[:-1])
        at = np.arange(begins.size)
        steps = at - np.maximum.accumulate(np.where(begins, at, 0))
        episodes = self._episode + np.cumsum(begins)
        steps[episodes == self._episode] += self._step
        last = np.append(begins[1:], True)
        self._episode, self._step = int(episodes[-1]), int(steps[-1])
        if not more:
            return columns, episodes, steps, last
        self._kept = [column[-1:].copy() for column in columns], named[-1:]
        return [column[:-1] for column in columns], episodes[:-1], steps[:-1], last[:-1]
