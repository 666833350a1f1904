"""The steps of all exports: select rows, read them piece by piece, build the target, report the result.

Used by the modules of the formats, which write the rows; this module knows no format. It leaves out rows that
are overwritten meanwhile, and never changes a store. A piece has a bounded size, even if the length of rows
is not known beforehand: of variable-length rows a few are read, their length is measured, and then as many
are read as fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from expstore.core import tuning
from expstore.core.values import IntArray, Window, key_name
from expstore.disk.atomic_build import build_atomically
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.episodes.fragments import all_ids
from expstore.episodes.selections import add_definitions
from expstore.errors import ArgumentError, NotFoundError, SchemaError, StateError
from expstore.exchange.base import FORMAT, Exported, Progress, names_of, sync_tree
from expstore.exchange.formats import describe_losses
from expstore.schema.row_fields import ROW_FIELDS, priority_place
from expstore.schema.row_selection import no_rows
from expstore.schema.schema import OBJECT, Field, Schema
from expstore.sql.sync import Catalog
from expstore.storages.follower import FollowerStorage
from expstore.storages.format.manifest import check_target
from expstore.storages.read_view import ReadView, read_present
from expstore.storages.snapshots.catalog import find_version, store_meant
from expstore.storages.snapshots.restore import join_parts
from expstore.storages.stats import meta_of

#: The source of an export: a buffer, its storage, or the path of a store.
Exchanged = Any
#: A selection of episodes: ids, or an SQL condition over the relation `episodes`.
Episodes = Sequence[int] | IntArray | str | None

_RANGE = re.compile(r"(\d{1,18})(-(\d{0,18}))?")
_BLOCK = 1 << 18
_FACTS = """
SELECT e.episode_id, s.name AS source, s.named, e.trajectory_id, e.start_time, e.end_time, e.length,
    e."return", e.status, e.info::VARCHAR AS info
FROM episodes AS e LEFT JOIN (SELECT DISTINCT ON (name) name, named FROM sources) AS s ON s.name = e.source
WHERE e.episode_id IN (SELECT unnest(?::BIGINT[])) ORDER BY e.episode_id
"""


@contextmanager
def open_source(source: Exchanged, version: int | str | None = None) -> Iterator[ReadView]:
    """Yield the storage that holds the rows; if it is opened here, it is closed at the end.

    Args:
        source: A buffer, a storage, or the path of a store, a snapshot or a folder of snapshots.
        version: Number or tag of a snapshot; None: the store, or the newest snapshot.

    Raises:
        NotFoundError: There is no store.
        StateError: The store is closed.
    """
    if not isinstance(source, str | Path):
        storage = getattr(source, "storage", source)
        if not isinstance(storage, ReadView):
            raise ArgumentError(
                f"rows are exported from a buffer or a path, not from a {type(source).__name__}"
            )
        if storage.closed:
            raise StateError("the store is closed", hint="open it again with expstore.open()")
        with _keep_catalog(storage):
            yield storage
        return
    disk, path = Disk(), local_path(source)
    found = store_meant(disk, path) if version is None else find_version(disk, path, version)
    storage = FollowerStorage(found)
    try:
        with _keep_catalog(storage):
            yield storage
    finally:
        storage.close()


@contextmanager
def _keep_catalog(storage: ReadView) -> Iterator[None]:
    """Keep a catalog of the storage alive inside the block: the storage holds it only by a weak reference."""
    catalog = storage.index.catalog
    if not isinstance(catalog, Catalog):
        catalog = Catalog(storage)
        storage.index.use(catalog)
    storage.follow(priorities=True)
    yield
    del catalog


def _catalog(storage: ReadView) -> Catalog:
    catalog = storage.index.catalog
    if not isinstance(catalog, Catalog):
        raise StateError("these rows have no index", hint="export the buffer, or its path")
    return catalog


def parse_episodes(text: str) -> str:
    """Return the SQL condition for episodes given as ids and ranges, as in `1-20,35,100-`.

    Raises:
        ArgumentError: The text is not a list of ids and ranges.

    >>> from expstore.exchange.rows import parse_episodes
    >>> parse_episodes("1-20,35")
    'episode_id BETWEEN 1 AND 20 OR episode_id BETWEEN 35 AND 35'
    """
    found = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None or (match[3] and int(match[3]) < int(match[1])):
            raise ArgumentError(
                f"{text!r} names no episodes; write ids and ranges of ids, as in 1-20,35,100-"
            )
        first, last = match[1], match[1] if match[2] is None else match[3]
        found.append(f"episode_id BETWEEN {first} AND {last}" if last else f"episode_id >= {first}")
    return " OR ".join(found)


@dataclass(frozen=True)
class Rows:
    """The selected rows of an export.

    Threads: one. Processes: a writer in another process may overwrite rows, which are then left out.

    Args:
        storage: The storage that holds the rows.
        stored: The rows that were stored when this object was created.
        fragments: Fragments of the selected episodes at that time. Shape `(5, n)`.
        whole: Whether all episodes are selected.
        fields: The selected columns by position: first the user's fields, then the store's own.
        schema: All fields of the storage.
    """

    storage: ReadView
    stored: Window
    fragments: IntArray
    whole: bool
    fields: Mapping[int, Field]
    schema: Schema

    @classmethod
    def choose(
        cls, storage: ReadView, *, fields: Sequence[str] | None = None, episodes: Episodes = None
    ) -> Rows:
        """Select rows.

        Args:
            storage: The storage that holds them.
            fields: Names of the fields to read; None: all.
            episodes: Episode ids, or an SQL condition over the relation `episodes`; None: all episodes.

        Raises:
            StateError: The storage has no fields yet.
            SchemaError: A field does not exist.
            NotFoundError: An episode does not exist, or none of its rows is left.
            QueryError: `episodes` is not a valid condition.
        """
        schema = storage.require_schema()
        chosen = _choose_fields(schema, fields)
        wanted = None if episodes is None else _find_episodes(storage, episodes)
        storage.follow()
        with storage.locks.episodes:
            stored = storage.query_window
            captured = storage.episodes.fragments.capture()
        fragments = captured.columns() if wanted is None else captured.of(wanted)
        fragments = _clip(fragments, stored.low, stored.last)
        if wanted is not None and not fragments.size:
            raise NotFoundError("no rows of these episodes are left in the store")
        return cls(storage, stored, fragments, wanted is None, chosen, schema)

    @property
    def places(self) -> list[int]:
        """Positions of the selected columns."""
        return list(self.fields)

    @property
    def user_fields(self) -> tuple[Field, ...]:
        """The fields that are not the store's own."""
        return tuple(entry for entry in self.fields.values() if entry.key[0] != "_row")

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return sum(entry.row_bytes for entry in self.fields.values())

    @cached_property
    def count(self) -> int:
        """Number of rows."""
        return self.stored.rows if self.whole else int(self.fragments[2].sum())

    @cached_property
    def episode_ids(self) -> IntArray:
        """The episodes that have rows, ascending. Shape `(n,)`."""
        return np.unique(self.fragments[0])

    def refuse_objects(self, form: str, *, any_length: bool = False) -> None:
        """Raise SchemaError if a format cannot store one of the fields.

        Args:
            form: Name of the format.
            any_length: Whether the format supports variable-length rows.
        """
        for entry in self.fields.values():
            if entry.dtype == OBJECT:
                raise SchemaError(
                    f"field {key_name(entry.key)!r} holds objects, which {form} cannot store",
                    hint="choose the fields to export without it",
                )
            if entry.variable and not any_length:
                raise SchemaError(
                    f"field {key_name(entry.key)!r} is {entry}: exports to {form} need fields of fixed size",
                    hint="choose the fields to export without it; Parquet and Arrow store all of them",
                )

    # -- selection and order ----------------------------------------------------------------------

    def by_id(self, size: int) -> Iterator[IntArray]:
        """Yield the ids of all rows, ascending, at most `size` at a time. Shapes `(n,)`."""
        if self.whole:
            for start in range(0, self.count, size):
                yield self.stored.nth(np.arange(start, min(start + size, self.count)))
            return
        for low in range(self.stored.low, self.stored.last, _BLOCK):
            ids = np.sort(all_ids(_clip(self.fragments, low, min(low + _BLOCK, self.stored.last))))
            for start in range(0, ids.size, size):
                yield ids[start : start + size]

    def of_episodes(self, first: int, last: int) -> IntArray:
        """Return the ids of the rows of some episodes, ascending. Shape `(n,)`."""
        chosen = (self.fragments[0] >= first) & (self.fragments[0] <= last)
        ids: IntArray = np.sort(all_ids(self.fragments[:, chosen]))
        return ids

    def episode_rows(self, episode: int) -> tuple[IntArray, IntArray]:
        """Return ids and steps of an episode's rows, ordered by step. Shapes `(n,)`."""
        own = self.by_episode[:, slice(*np.searchsorted(self.by_episode[0], [episode, episode + 1]))]
        number = np.arange(int(own[2].sum())) - np.repeat(np.cumsum(own[2]) - own[2], own[2])
        return all_ids(own), np.repeat(own[1], own[2]) + number

    @cached_property
    def by_episode(self) -> IntArray:
        """The fragments ordered by episode and step. Shape `(5, n)`."""
        ordered: IntArray = self.fragments[:, np.lexsort((self.fragments[1], self.fragments[0]))]
        return ordered

    def episode_ranges(self, rows: int) -> list[tuple[int, int]]:
        """Split the episodes into ranges of about this many rows: first and last episode of each."""
        fragments = self.by_episode
        if not fragments.size:
            return []
        starts = np.flatnonzero(np.diff(fragments[0], prepend=-1))
        counts = np.add.reduceat(fragments[2], starts)
        ranges: list[tuple[int, int]] = []
        held = 0
        for episode, count in zip(fragments[0, starts].tolist(), counts.tolist(), strict=True):
            if ranges and held + count <= rows:
                ranges[-1] = ranges[-1][0], episode
                held += count
            else:
                ranges.append((episode, episode))
                held = count
        return ranges

    def about(self) -> dict[str, Any]:
        """Return the facts that an export stores with the rows for a later import, as JSON values."""
        storage = self.storage
        manifest = storage.manifest
        specs = storage.settings.specs()
        named = len(self.user_fields) == len(self.schema.fields)
        fields = [
            {"key": list(f.key), "dtype": f.dtype, "shape": list(f.shape)}
            | ({"arrow": f.arrow} if f.variable else {})
            for f in self.user_fields
        ]
        return {
            "format": FORMAT,
            "fields": fields,
            "rows": self.count,
            "form": self.schema.form if named else "",
            "capacity": storage.capacity,
            "meta": meta_of(storage),
            "specs": specs if named else "",
            **(manifest.key_settings if manifest else {}),
        }

    # -- reading -----------------------------------------------------------------------------------

    def read(self, ids: IntArray, places: Sequence[int] | None = None) -> tuple[IntArray, list[Any]]:
        """Copy rows, without those that were overwritten or deleted.

        Returns:
            Their ids, in the requested order, and one array per field; Arrow arrays for variable-length
            fields. Shapes `(n,)`, `(n, *row shape)`.
        """
        wanted = self.places if places is None else list(places)
        storage = self.storage
        if storage.schema != self.schema:
            raise StateError("columns were added or dropped during the export", hint="export again")
        # The process that writes the rows has newer priorities in memory than the column.
        here = (
            []
            if storage.follows
            else [n for n, place in enumerate(wanted) if place == priority_place(self.schema)]
        )
        stored = [place for n, place in enumerate(wanted) if n not in here]
        try:
            found, columns = read_present(storage, ids, stored)
        except NotFoundError:
            every = (*self.schema.fields, *ROW_FIELDS)
            found, columns = ids[:0], [no_rows(every[place]) for place in stored]
        for n in here:
            columns.insert(n, storage.priorities.values_at(storage.geometry.slot_of(found)))
        return found, columns

    @cached_property
    def facts(self) -> Any:
        """Facts about the episodes, ordered by id, as an Arrow table.

        Columns: `episode_id, source, named, trajectory_id, start_time, end_time, length, return, status,
        info`.
        """
        catalog = _catalog(self.storage)
        table = catalog.query(_FACTS, [self.episode_ids]).arrow()
        place = table.schema.get_field_index("info")
        infos = add_definitions(table["info"].to_pylist(), catalog.read_definitions)
        return table.set_column(
            place, table.schema.field(place), pa.array(infos, table.schema.field(place).type)
        )


def _choose_fields(schema: Schema, names: Sequence[str] | None) -> dict[int, Field]:
    """Return the selected fields, followed by the store's own, by position."""
    known = {key_name(entry.key): place for place, entry in enumerate(schema.fields)}
    if unknown := [name for name in names or () if name not in known]:
        raise SchemaError(f"no field {unknown[0]!r}", hint="there are " + ", ".join(known))
    wanted = [place for name, place in known.items() if names is None or name in names]
    every = (*schema.fields, *ROW_FIELDS)
    return {place: every[place] for place in (*wanted, *range(len(schema.fields), len(every)))}


def _find_episodes(storage: ReadView, episodes: Sequence[int] | IntArray | str) -> IntArray:
    """Return the ids of the selected episodes, ascending."""
    if isinstance(episodes, str):
        found: IntArray = (
            _catalog(storage).episodes(episodes, None, None, None).arrow()["episode_id"].to_numpy()
        )
        return found
    return np.unique(np.asarray(episodes, np.int64))


def _clip(fragments: IntArray, low: int, high: int) -> IntArray:
    """Return the parts of fragments with ids in (`low`, `high`]; fragments without any are left out."""
    first, stride = fragments[3], np.maximum(1, fragments[4])
    head = np.maximum(0, -(-(low + 1 - first) // stride))
    stop = np.minimum(fragments[2], (high - first) // stride + 1)
    kept = fragments.copy()
    kept[1] += head
    kept[2] = stop - head
    kept[3] += head * fragments[4]
    return kept[:, kept[2] > 0]


# -- pieces -------------------------------------------------------------------------------------------

#: Number of variable-length rows that are read first; later pieces grow to `tuning.EXCHANGE_VARIABLE_ROWS`.
FIRST_ROWS = 16
#: Number of rows that are read to estimate the mean row length, and how many are read at a time.
_SAMPLED, _TOGETHER = 64, 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that were read.

    Args:
        asked: Number of rows requested; some may have been removed from the store meanwhile.
        ids: Ids of the rows that were read. Shape `(n,)`.
        columns: One per field. Shapes `(n, *row shape)`; Arrow arrays for variable-length fields.
    """

    asked: int
    ids: IntArray
    columns: list[Any]


def mean_bytes(rows: Rows) -> int:
    """Estimate the average number of bytes of a row."""
    fields = list(rows.fields.items())
    loose = [place for place, entry in fields if entry.variable]
    if not loose or not rows.count:
        return rows.row_bytes
    ends = np.cumsum(rows.fragments[2])
    number = np.unique(np.linspace(0, ends[-1] - 1, _SAMPLED).astype(np.int64))
    place = np.searchsorted(ends, number, side="right")
    ids = (
        rows.fragments[3, place]
        + (number - ends[place] + rows.fragments[2, place]) * rows.fragments[4, place]
    )
    found = size = 0
    for start in range(0, ids.size, _TOGETHER):
        here, columns = rows.read(ids[start : start + _TOGETHER], loose)
        found += here.size
        size += sum(column.nbytes for column in columns)
    return rows.row_bytes + -(-size // max(1, found))


def read_pieces(rows: Rows, wanted: Iterable[IntArray], most: int | None = None) -> Iterator[Piece]:
    """Read rows in the given order.

    Args:
        rows: The selected rows.
        wanted: Arrays of ids; each is small enough that its fixed-size fields fit in memory. Shapes `(n,)`.
        most: Approximate maximum size of a piece in bytes; a single row may exceed it. None:
            `tuning.EXCHANGE_BYTES`.
    """
    pace = (
        _Pace(rows, most or tuning.EXCHANGE_BYTES)
        if any(entry.variable for entry in rows.fields.values())
        else None
    )
    for ids in wanted:
        if pace is None:
            yield Piece(ids.size, *rows.read(ids))
        else:
            yield from pace.read(ids)


class _Pace:
    """Choose how many rows to read next, from the size of the previous rows."""

    def __init__(self, rows: Rows, most: int) -> None:
        self._rows, self._most = rows, most
        self._next, self._each = FIRST_ROWS, 1

    def read(self, ids: IntArray) -> Iterator[Piece]:
        """Yield rows in pieces that fit in memory."""
        held: list[Piece] = []
        size = at = 0
        while at < ids.size:
            piece = self._read_some(ids[at : at + self._next])
            at += piece.asked
            held.append(piece)
            size += sum(column.nbytes for column in piece.columns)
            if 2 * size >= self._most:
                yield _join(held)
                held, size = [], 0
        if held:
            yield _join(held)

    def _read_some(self, ids: IntArray) -> Piece:
        """Read rows, or only the first of them if all together exceed the limits of an Arrow array."""
        while True:
            try:
                piece = Piece(ids.size, *self._rows.read(ids))
                break
            except SchemaError:
                if ids.size == 1:
                    raise
                ids = ids[: ids.size // 2]
        each = sum(column.nbytes for column in piece.columns) // max(1, piece.ids.size)
        self._each = max(1, each, self._each // 2)  # more long rows may follow a long one
        self._next = max(1, min(self._most // (4 * self._each), 2 * ids.size, tuning.EXCHANGE_VARIABLE_ROWS))
        return piece


def _join(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    columns = zip(*(piece.columns for piece in pieces), strict=True)
    return Piece(
        sum(piece.asked for piece in pieces),
        np.concatenate([piece.ids for piece in pieces]),
        [join_parts(parts) for parts in columns],
    )


# -- one export ---------------------------------------------------------------------------------------

#: Names of the formats in messages.
_TITLES = {
    "arrow": "Arrow",
    "hdf5": "HDF5",
    "lerobot": "LeRobot",
    "minari": "Minari",
    "npz": "NPZ",
    "parquet": "Parquet",
}


@dataclass(frozen=True)
class Export:
    """An export in progress: its rows and its target.

    Threads, processes: one. Crashes: an unfinished target keeps its temporary name; the next export to the
    same target removes it.

    Args:
        name: Name of the format.
        rows: The rows to export.
        target: The file or folder to create.
        disk: Access to the file system.
    """

    name: str
    rows: Rows
    target: Path
    disk: Disk

    @contextmanager
    def build_target(self, *, single: bool = False, sync: bool = True) -> Iterator[Path]:
        """Build the target under a temporary name; it is renamed at the end of the block.

        Args:
            single: Whether the target is a file: the file of its name inside the yielded folder.
            sync: Sync the files in the folder at the end; False: the caller does so.

        Yields:
            The temporary folder.

        Raises:
            StateError: The target exists, or would be inside a store.
            NotFoundError: The target's parent folder does not exist.
            LockedError: Another process creates the target at the same time.
        """
        check_target(self.disk, self.target)
        with build_atomically(self.disk, self.target, single=single) as temporary:
            yield temporary
            if sync:
                sync_tree(self.disk, temporary)

    def summarize(self, written: int, *, episodes: int | None = None) -> Exported:
        """Return the result of the export.

        Args:
            written: Number of rows written.
            episodes: Number of episodes written; None: all selected episodes.
        """
        rows = self.rows
        return Exported(
            path=self.target,
            rows=written,
            left_out=rows.count - written,
            fields=names_of([entry.key for entry in rows.user_fields]),
            disk_bytes=self.disk.measure_space(self.target),
            episodes=rows.episode_ids.size if episodes is None else episodes,
            lost=describe_losses(self.name),
        )


@contextmanager
def open_export(
    name: str,
    source: Exchanged,
    target: str | Path,
    *,
    fields: Sequence[str] | None,
    episodes: Episodes,
    version: int | str | None,
    disk: Disk | None,
    any_length: bool = False,
) -> Iterator[Export]:
    """Select the rows of an export, and keep their storage open.

    Args:
        name: Name of the format.
        source: A buffer, or the path of a store, a snapshot or a folder of snapshots.
        target: The file or folder to create.
        fields: Names of the fields to export; None: all.
        episodes: Export only these episodes: ids, or an SQL condition over the relation `episodes`; None:
            all.
        version: Number or tag of a snapshot, if `source` is a path.
        disk: Access to the file system; None: the default.
        any_length: Whether the format supports variable-length rows.

    Raises:
        SchemaError: A field does not exist, or the format cannot store it.
        ExpStoreError: An error of `rows.open_source` or `Rows.choose`.
    """
    path = local_path(target)
    with open_source(source, version) as storage:
        rows = Rows.choose(storage, fields=fields, episodes=episodes)
        rows.refuse_objects(_TITLES[name], any_length=any_length)
        yield Export(name, rows, path, disk or Disk())


class Tally:
    """Count the rows that are written and report the progress.

    Args:
        rows: All rows of the export.
        progress: Called with the bytes done and the bytes in total.
    """

    def __init__(self, rows: Rows, progress: Progress) -> None:
        self.written = self._asked = 0
        self.row_bytes, self._count, self._progress = mean_bytes(rows), rows.count, progress

    def add(self, piece: Piece) -> None:
        """Count a piece that was written, and report the progress."""
        self.written += piece.ids.size
        self._asked += piece.asked
        self._progress(self._asked * self.row_bytes, self._count * self.row_bytes)
