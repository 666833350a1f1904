"""Select the rows of an export, and read them with the facts about their episodes.

Used by the formats. It reads one piece at a time, leaves out rows that are overwritten meanwhile, and never
changes a store.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.values import IntArray, Window, key_name
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.episodes.fragments import all_ids
from expstore.errors import ArgumentError, NotFoundError, SchemaError, StateError
from expstore.schema.row_fields import ROW_FIELDS, priority_place
from expstore.schema.row_selection import no_rows
from expstore.schema.schema import OBJECT, Field, Schema
from expstore.sql.sync import Catalog
from expstore.storages.follower import FollowerStorage
from expstore.storages.read_view import ReadView, read_present
from expstore.storages.snapshots.catalog import find_version, store_meant
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
        return {
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
        return _catalog(self.storage).query(_FACTS, [self.episode_ids]).arrow()


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
