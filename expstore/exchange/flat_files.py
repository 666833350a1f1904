"""Shared parts of the HDF5 and NPZ formats: flat files with one row per transition, ordered by episode.

Used by these formats, which write and read the files. One piece of the rows is in memory at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from expstore.core.bfloat16 import narrow_to_bfloat16, widen_bfloat16
from expstore.core.values import Array, IntArray, Key, key_name
from expstore.disk.files import Disk
from expstore.errors import SchemaError
from expstore.exchange.base import Imported, Progress, Tell, piece_rows
from expstore.exchange.export import Tally
from expstore.exchange.field_names import FLAGS, SCALARS, check_keys, check_map, our_key, their_path
from expstore.exchange.fill import new_store, settings_of
from expstore.exchange.row_pieces import Piece
from expstore.exchange.rows import Rows
from expstore.schema.schema import DTYPES, Field, Schema

__all__ = [
    "ABOUT",
    "Column",
    "FlatReader",
    "FlatWriter",
    "fill_flat",
    "from_stored",
    "plan_columns",
    "rows_differ",
    "to_field",
    "to_stored",
    "write_flat",
]

#: Name under which an export stores a description of its fields.
ABOUT = "expstore"
_EPISODE = ("_episode",)
_FORMAT = 1
_FIELDS = {str(kind): name for name, kind in DTYPES.items() if kind.kind in "biufc" and name != "bfloat16"}


@dataclass(frozen=True)
class Column:
    """One named array of a file.

    Args:
        path: The groups that contain it, then its name.
        dtype: NumPy dtype of the values.
        shape: Shape of one row.
    """

    path: Key
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return self.dtype.itemsize * int(np.prod(self.shape, dtype=np.int64))


class FlatWriter(Protocol):
    """Writes a file, piece by piece."""

    def add(self, columns: Sequence[Array]) -> None:
        """Append rows: one array per column. Shapes `(n, *row shape)`."""

    def finish(self, about: str) -> None:
        """Complete the file, and store `about` in it."""


class FlatReader(Protocol):
    """Reads a file from the beginning, piece by piece."""

    columns: list[Column]
    lengths: list[int]
    about: str
    notes: list[str]

    def read(self, wanted: Sequence[Column], count: int) -> list[Array]:
        """Return the next rows. Shapes `(n, *row shape)`."""


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


@dataclass(frozen=True)
class _Plan:
    """The mapping from columns to fields, and the column that identifies episodes."""

    columns: list[Column]
    fields: list[Field]
    episode: Column | None
    rows: int
    about: Mapping[str, Any]
    notes: list[str]


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
    plan = _plan(reader, given)
    schema = Schema(plan.fields, plan.about.get("form", ""))
    if capacity is None:
        capacity = plan.about.get("capacity")
    tell(plan.notes)
    wanted = plan.columns if plan.episode is None else [*plan.columns, plan.episode]
    with new_store(disk, target, capacity, settings_of(plan.about, schema)) as filler:
        filler.prepare(schema)
        cutter = _Cutter(schema)
        size, done = piece_rows(schema.row_bytes), 0
        while done < plan.rows:
            values = reader.read(wanted, min(size, plan.rows - done))
            count = len(values[0])
            columns = [
                from_stored(f, v, count) for f, v in zip(plan.fields, values[: len(plan.fields)], strict=True)
            ]
            named = None if plan.episode is None else values[-1].reshape(-1).astype(np.int64)
            done += count
            columns, episodes, steps, last = cutter.cut(columns, named, more=done < plan.rows)
            filler.put(columns, episodes, steps, last=last)
            progress(done, plan.rows)
        return filler.result(target, plan.notes)


def _plan(reader: FlatReader, given: Mapping[str, str]) -> _Plan:
    about = _parse_about(reader.about)
    # Fields of an exported store, by their names in the file. A mapping replaces what the export recorded.
    known = {} if given else {their_path(tuple(f["key"])): f for f in about.get("fields", ())}
    check_map(given, [column.path for column in reader.columns])
    columns, fields = [], []
    episode = None
    lengths: dict[str, int] = {}
    for column, rows in zip(reader.columns, reader.lengths, strict=True):
        if column.path == _EPISODE and not given:
            episode = column
            continue
        recorded = known.get(column.path)
        if known and recorded is None:
            continue  # flags of the ends of episodes, which do not become fields
        key = our_key(column.path, given) if recorded is None else tuple(recorded["key"])
        if key is not None:
            columns.append(column)
            fields.append(to_field(key, column, recorded))
            lengths["/".join(column.path)] = rows
    if not fields:
        raise SchemaError("the file has no array that can be a field")
    check_keys([entry.key for entry in fields])
    first, count = next(iter(lengths.items()))
    for name, rows in lengths.items():
        if rows != count:
            raise SchemaError(
                f"{name!r} has {rows} rows, and {first!r} has {count}",
                hint=f"an array without one row per transition can be left out: --map {name}=",
            )
    return _Plan(columns, fields, episode, count, {} if given else about, reader.notes)


def _parse_about(text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        found = dict(json.loads(text))
        if int(found["format"]) > _FORMAT:
            raise SchemaError(f"the file is in format {found['format']}, this version reads format {_FORMAT}")
        for entry in found["fields"]:
            Field(tuple(map(str, entry["key"])), str(entry["dtype"]), tuple(map(int, entry["shape"])))
    except (ValueError, KeyError, TypeError) as exc:
        if isinstance(exc, SchemaError):
            raise
        raise SchemaError(f"the description of the fields in the file cannot be read: {exc}") from exc
    return found


def to_field(key: Key, column: Column, known: Mapping[str, Any] | None) -> Field:
    """Return the field for a column of a file.

    Args:
        key: Key of the field in the store.
        column: The column of the file.
        known: The description of the field, if expstore exported the file.

    Raises:
        SchemaError: The column cannot be a field.
    """
    name = "/".join(column.path)
    kind = str(column.dtype.newbyteorder("<")) if column.dtype.kind in "biufc" else ""
    if known is not None:
        entry = Field(key, str(known["dtype"]), tuple(map(int, known["shape"])))
        stored = _column(entry)
        if (stored.dtype, stored.shape) == (column.dtype.newbyteorder("<"), column.shape):
            return entry
    shape = column.shape
    if key in SCALARS:
        if int(np.prod(shape, dtype=np.int64)) != 1:
            raise SchemaError(f"{name!r} has {list(shape)} values per row, but {key_name(key)!r} has one")
        shape = (1,)
        kind = "bool" if key in FLAGS and kind else kind
    if kind not in _FIELDS:
        raise SchemaError(
            f"{name!r} holds values of type {column.dtype}, which a field cannot have",
            hint=f"leave it out with --map {name}=",
        )
    return Field(key, _FIELDS[kind], shape)


def from_stored(entry: Field, values: Array, count: int) -> Array:
    """Convert values to the dtype and shape of their field."""
    if entry.dtype == "bfloat16":
        values = narrow_to_bfloat16(values)
    elif entry.dtype == "bool" and values.dtype != np.bool_:
        values = values.astype(np.float64) > 0.5
    return np.ascontiguousarray(values, entry.numpy_dtype).reshape(count, *entry.shape)


class _Cutter:
    """Assign episodes and steps to rows.

    A new episode begins at a new name; without names it begins after an end flag or a gap. The last row of a
    piece is held back, because only the next piece shows whether its episode continues.

    Args:
        schema: The fields.
    """

    def __init__(self, schema: Schema) -> None:
        places = {entry.key: place for place, entry in enumerate(schema.fields)}
        self._ends = [places[key] for key in FLAGS if key in places]
        # Rows are missing where a next observation differs from the observation of the next row.
        self._pairs = [
            (places[key], places["next", *key])
            for key in places
            if key[0] == "observation" and ("next", *key) in places
        ]
        self._kept: tuple[list[Array], IntArray | None, int, int] | None = None

    def cut(
        self, columns: list[Array], named: IntArray | None, *, more: bool
    ) -> tuple[list[Array], IntArray, IntArray, Array]:
        """Return the rows that are complete, their episodes and steps, and whether each ends its episode.

        Args:
            columns: Further rows. Shapes `(n, *row shape)`.
            named: The numbers of their episodes, or None if the file has none. Shape `(n,)`.
            more: Whether further rows follow.
        """
        episode, step = 0, 0
        if self._kept is not None:
            rows, names, episode, step = self._kept
            columns = [np.concatenate(both) for both in zip(rows, columns, strict=True)]
            named = None if named is None or names is None else np.concatenate([names, named])
        begins = self._begins(columns, named)
        episodes = episode + np.cumsum(begins)
        at = np.arange(begins.size)
        steps = at - np.maximum.accumulate(np.where(begins, at, 0))
        steps[episodes == episode] += step
        last = np.append(begins[1:], True)
        if not more:
            return columns, episodes, steps, last
        self._kept = (
            [column[-1:].copy() for column in columns],
            None if named is None else named[-1:],
            int(episodes[-1]),
            int(steps[-1]),
        )
        return [column[:-1] for column in columns], episodes[:-1], steps[:-1], last[:-1]

    def _begins(self, columns: Sequence[Array], named: IntArray | None) -> Array:
        """Return whether each row begins another episode than the previous row's. Shape `(n,)`."""
        begins = np.zeros(len(columns[0]), bool)
        if named is not None:
            begins[1:] = named[1:] != named[:-1]
            return begins
        for place in self._ends:
            flags = columns[place][:-1]
            begins[1:] |= flags.any(tuple(range(1, flags.ndim)))
        for now, following in self._pairs:
            begins[1:] |= rows_differ(columns[following][:-1], columns[now][1:])
        return begins


def rows_differ(first: Array, second: Array) -> Array:
    """Return which rows differ, compared byte by byte. Shape `(n,)`."""
    if not len(first):
        return np.zeros(0, bool)
    raw = [np.ascontiguousarray(part).reshape(len(part), -1).view(np.uint8) for part in (first, second)]
    different: Array = (raw[0] != raw[1]).any(1)
    return different
