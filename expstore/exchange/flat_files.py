"""Shared parts of the HDF5 and NPZ formats: flat files with one row per transition, ordered by episode.

Used by these formats, which write and read the files. One piece of the rows is in memory at a time.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from expstore.core.parsing import reading
from expstore.core.values import Array, IntArray
from expstore.episodes.facts import SPLIT, check_split, pack_stored_info, split_of
from expstore.episodes.segmentation import OPEN
from expstore.episodes.sources import lane_names
from expstore.errors import SchemaError
from expstore.exchange.base import Imported, Progress, piece_rows
from expstore.exchange.fill import (
    Facts,
    NumberedRows,
    RowSource,
    Target,
    fill_store,
    parse_about,
    settings_of,
)
from expstore.exchange.foreign_rows import (
    Column,
    ForeignRows,
    check_keys,
    check_paths,
    from_stored,
    plan_rows,
    their_path,
    to_column,
    to_field,
    to_stored,
)
from expstore.exchange.rows import Piece, Rows, Tally
from expstore.schema.schema import Schema

#: Name under which an export stores a description of its fields.
ABOUT = "expstore"
_EPISODE = ("_episode",)
#: The split of each row, as a place in the list `splits` of the description; only if there are several.
_SPLIT = ("_split",)


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
    found = [to_column(entry) for entry in rows.user_fields]
    paths = [column.path for column in found]
    for name in ("terminals", "timeouts"):
        if (name,) not in paths:
            found.append(Column((name,), np.dtype(bool), ()))
    if rows.storage.epochs.has_splits:
        found.append(Column(_SPLIT, np.dtype("<i4"), ()))
    found.append(Column(_EPISODE, np.dtype("<i8"), ()))
    check_paths((column.path for column in found), taken=ABOUT)
    return found


def write_flat(rows: Rows, columns: Sequence[Column], writer: FlatWriter, progress: Progress) -> int:
    """Pass all rows to a writer, ordered by episode; return their number."""
    fields = rows.user_fields
    own = len(rows.schema.fields)
    places = [*rows.places[: len(fields)], own + 1]  # and `_row/episode`
    ends, tally = _Ends(rows), Tally(rows, progress)
    splits = _Splits(rows) if any(column.path == _SPLIT for column in columns) else None
    for ids in _iterate_by_episode(rows, piece_rows(rows.row_bytes)):
        found, values = rows.read(ids, places)
        if found.size:
            given = [to_stored(entry, column) for entry, column in zip(fields, values[:-1], strict=True)]
            names = values[-1].reshape(-1)
            for column in columns[len(fields) : -1]:
                if splits is not None and column.path == _SPLIT:
                    given.append(splits.of(names))
                else:
                    given.append(ends.flags(column.path[0], found, names))
            shaped = [v.reshape(-1, *c.shape) for v, c in zip([*given, names], columns, strict=True)]
            writer.add(shaped)
        tally.add(Piece(ids.size, found, values))
    about = {name: value for name, value in rows.about().items() if name != "specs"}
    writer.finish(json.dumps(about if splits is None else about | {"splits": splits.names}))
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


class _Splits:
    """Look up the splits of episodes."""

    def __init__(self, rows: Rows) -> None:
        table = rows.facts
        self._episodes: IntArray = table["episode_id"].to_numpy()
        found = [split_of(info or "") for info in table["info"].to_pylist()]
        self.names, self._places = np.unique(found, return_inverse=True)
        self.names = self.names.tolist()

    def of(self, episodes: IntArray) -> Array:
        """Return the split of each row, as a place in `names`. Shapes `(n,)`."""
        places: Array = self._places[np.searchsorted(self._episodes, episodes)].astype("<i4")
        return places


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


def import_flat(reader: FlatReader, given: Mapping[str, str], target: Target) -> Imported:
    """Create a store from a flat file.

    Args:
        reader: Reads the file.
        given: The user's mapping from names, or groups, to fields; the file is then read as that of another
            program.
        target: Where the import goes.

    Raises:
        SchemaError: An array in the file cannot be a field.
    """
    about = {} if given else parse_about(reader.about, "file")
    return fill_store(_ExportedRows(reader, about) if about else _ForeignFile(reader, given), target)


class _ForeignFile(RowSource):
    """The rows of a file that another program wrote."""

    def __init__(self, reader: FlatReader, given: Mapping[str, str]) -> None:
        self._reader = reader
        with self.parsing():
            self._plan = plan = plan_rows(reader.columns, given)
        wanted = [(reader.columns[place], reader.lengths[place]) for place in plan.positions]
        self._count = _check_lengths(wanted)
        self.total = sum(stop - start for lane in reader.lanes for start, stop in lane) or self._count
        self.schema, self.names, self.notes = plan.schema, plan.names, [*reader.notes, *plan.notes]
        self._rows = ForeignRows(plan)

    def parsing(self) -> AbstractContextManager[None]:
        """Convert errors of NumPy to StorageError."""
        return reading("the arrays of the file")

    def warnings(self) -> Sequence[str]:
        """Return what seems wrong in the rows that were read."""
        return self._rows.warnings()

    def pieces(self) -> Iterator[NumberedRows]:
        """Yield the rows of one environment after the other."""
        lanes, size, done = self._reader.lanes, piece_rows(self.schema.row_bytes), 0
        if not lanes:
            begin = self._rows.find_seam(self._read, self._count)
            lanes = [[(begin, self._count), (0, begin)]] if begin else [[(0, self._count)]]
        sources = lane_names("env", "", len(lanes)) if len(lanes) > 1 else [None]
        for source, lane in zip(sources, lanes, strict=True):
            self._rows.begin_lane(source)
            for start, stop in lane:
                for first in range(start, stop, size):
                    count = min(size, stop - first)
                    done += count
                    yield self._rows.number(self._read(first, count), count, done)

    def _read(self, first: int, count: int) -> dict[int, Array]:
        """Return the wanted columns of some rows, by position."""
        positions = self._plan.positions
        values = self._reader.read([self._reader.columns[place] for place in positions], first, count)
        return dict(zip(positions, values, strict=True))


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


class _ExportedRows(RowSource):
    """The rows of a file that expstore exported, whose episodes follow one another."""

    def __init__(self, reader: FlatReader, about: Mapping[str, Any]) -> None:
        self._reader = reader
        with reading("the file: what it says of its fields does not fit"):
            known = {their_path(tuple(f["key"])): f for f in about["fields"]}
            columns = [column for column in reader.columns if column.path in known]
            episode = next((column for column in reader.columns if column.path == _EPISODE), None)
            if not columns or episode is None:
                raise SchemaError(
                    f"the file describes an export of expstore, but has no "
                    f"{'fields' if episode else '_episode'}",
                    hint="export the store again, or map a name, which reads the file as that of another "
                    "program",
                )
            fields = [to_field(tuple(known[one.path]["key"]), one, known[one.path]) for one in columns]
            check_keys([entry.key for entry in fields])
            lengths = dict(zip([column.path for column in reader.columns], reader.lengths, strict=True))
            #: The splits of the episodes; [] if the file does not tell them.
            self._splits = [check_split(name) for name in about.get("splits", ())]
            split = [column for column in reader.columns if column.path == _SPLIT and self._splits]
            self._splits = self._splits if split else []
            self._wanted = [*columns, *split, episode]
            self.total = _check_lengths([(column, lengths[column.path]) for column in self._wanted])
            self.schema = Schema(fields, about.get("form", ""))
            self.settings = settings_of(about, self.schema)
        self.notes, self.capacity = list(reader.notes), about.get("capacity")
        if self.settings.pop("group_key", None) is not None:
            self.settings.pop("group_size", None)
            self.notes.append("episodes are in no groups: the file has none")

    def pieces(self) -> Iterator[NumberedRows]:
        """Yield the rows. The last one of a piece is kept back until the next piece shows what follows."""
        numbers, size = _Numbers(), piece_rows(self.schema.row_bytes)
        for first in range(0, self.total, size):
            count = min(size, self.total - first)
            values = self._reader.read(self._wanted, first, count)
            with reading("the arrays of the file"):
                pairs = zip(self.schema.fields, values[: len(self.schema.fields)], strict=True)
                columns = [from_stored(entry, stored, count) for entry, stored in pairs]
                columns += [places.reshape(-1).astype(np.int64) for places in values[len(columns) : -1]]
                named = values[-1].reshape(-1).astype(np.int64)
                found = numbers.cut(columns, named, first + count, self.total)
                yield self._add_splits(found) if self._splits else found

    def _add_splits(self, rows: NumberedRows) -> NumberedRows:
        """Return rows without their last column, which has their splits, with facts about the episodes."""
        *columns, places = rows.columns
        infos = [pack_stored_info({SPLIT: name}) for name in self._splits]
        known = dict(zip(rows.episodes.tolist(), places.tolist(), strict=True))
        wrong = [place for place in known.values() if not 0 <= place < len(infos)]
        if wrong:
            raise SchemaError(f"the file has rows of split {wrong[0]}, but lists {len(infos)} splits")

        def describe(episode: int) -> Facts:
            return Facts(length=-1, status=OPEN, info=infos[known[episode]])

        return dataclasses.replace(rows, columns=columns, facts=describe)


class _Numbers:
    """Number the steps of exported rows, whose episodes are named and contiguous.

    The last row of a piece is kept back: only the next piece shows whether its episode continues.
    """

    def __init__(self) -> None:
        self._kept: tuple[list[Array], IntArray] | None = None
        self._episode = self._step = 0

    def cut(self, columns: list[Array], named: IntArray, done: int, total: int) -> NumberedRows:
        """Return the rows that are complete.

        Args:
            columns: Further rows. Shapes `(n, *row shape)`.
            named: The numbers of their episodes in the exported store. Shape `(n,)`.
            done: Number of rows so far, with these.
            total: Number of all rows.
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
        found = NumberedRows(columns=columns, episodes=episodes, steps=steps, done=done, last=last)
        if done == total:
            return found
        self._kept = [column[-1:].copy() for column in columns], named[-1:]
        return found.cut(slice(None, -1))
