"""Fill a new store with imported rows; the store exists only once it is complete.

Used by all imports of files: each is a `RowSource`, whose rows `fill_store` writes. The store has a
temporary name until it is closed; an interrupted import leaves nothing behind. The summary says which fields
have which role, how episodes ended, and what seems wrong; imports of data sets have the same one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.parsing import INVALID
from expstore.core.values import Array, IntArray, Key, key_name
from expstore.disk.atomic_build import build_atomically
from expstore.disk.files import Disk
from expstore.episodes.facts import drop_end
from expstore.episodes.fragments import find_fragments
from expstore.episodes.log import NewFacts
from expstore.episodes.segmentation import (
    HAS_TRAJECTORY,
    NEW,
    NO_REWARD,
    OPEN,
    TERMINATED,
    TRUNCATED,
    RowFacts,
)
from expstore.episodes.sessions import NewSource
from expstore.episodes.sources import lane_names
from expstore.episodes.table import Assignment, Segment
from expstore.errors import ExpStoreError, SchemaError
from expstore.exchange.base import (
    FORMAT,
    Imported,
    Progress,
    Tell,
    describe_source,
    hash_file,
    names_of,
)
from expstore.schema.field_roles import Keys
from expstore.schema.schema import Field, Schema
from expstore.sql.sync import Catalog
from expstore.storages.batch import Rows, now_us
from expstore.storages.engine.open_settings import Settings
from expstore.storages.engine.store import Store
from expstore.storages.factory import open_storage
from expstore.storages.format.layout import ColumnLayout
from expstore.storages.format.lineage import IMPORT
from expstore.storages.format.manifest import check_target
from expstore.storages.read_view import keys_for


@dataclass(frozen=True, slots=True)
class Facts:
    """The known facts about an episode before its rows are imported.

    Args:
        length: Number of its steps.
        status: How it ended: `segmentation.OPEN`, ...
        source: Name of its source; None: the import's own source.
        named: Whether a user chose that name.
        trajectory: The collector's trajectory id, or None.
        info: Its info as JSON text.
    """

    length: int
    status: int
    source: str | None = None
    named: bool = False
    trajectory: int | None = None
    info: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberedRows:
    """Rows with the episodes they belong to, as the source numbers them.

    Args:
        columns: One array per field; Arrow arrays for variable-length fields. Shapes `(n, *row shape)`.
        episodes: The episode of each row. Shape `(n,)`, int64.
        steps: The step of each row. Shape `(n,)`, int64.
        done: Number of rows that were read from the source so far.
        facts: Returns the facts about an episode; None: nothing is known.
        last: Whether each row is the last of its episode: its flags then tell how the episode ends. None: the
            facts do. Shape `(n,)`, bool.
        times: When each row was written, in microseconds since 1970; None: now. Shape `(n,)`.
        priorities: Shape `(n,)`; None: the priority of new rows.
    """

    columns: Sequence[Any]
    episodes: IntArray
    steps: IntArray
    done: int = 0
    facts: Callable[[int], Facts] | None = None
    last: Array | None = None
    times: IntArray | None = None
    priorities: Array | None = None

    def cut(self, part: slice) -> NumberedRows:
        """Return some of the rows."""
        return dataclasses.replace(
            self,
            columns=[_cut(column, part) for column in self.columns],
            episodes=self.episodes[part],
            steps=self.steps[part],
            last=None if self.last is None else self.last[part],
            times=None if self.times is None else self.times[part],
            priorities=None if self.priorities is None else self.priorities[part],
        )


class RowSource(ABC):
    """The rows of files, to be imported by `fill_store`.

    Rows of different episodes may be interleaved. A data set whose episodes follow one another is a
    `datasets.Reader` instead, whose import continues after an interruption.
    """

    #: The fields.
    schema: Schema
    #: Number of rows; 0 if unknown.
    total: int = 0
    #: Descriptions of what is left out or changed.
    notes: Sequence[str] = ()
    #: Columns that became fields of another name; see `summarize_import`.
    names: Mapping[str, str] = {}
    #: Capacity of the store from which the rows were exported; None: none, or unknown.
    capacity: int | None = None
    #: Its settings, as `settings_of` returns them.
    settings: Mapping[str, Any] = {}
    #: Specs of the fields, as the JSON text that stores keep; "" if unknown.
    specs: str = ""
    #: Kind of the new store: "zarr", or "arrow", which also stores variable-length rows.
    storage: str = "zarr"
    #: A number above every episode id: episodes keep their ids; None: they get new ids.
    above: int | None = None

    @abstractmethod
    def pieces(self) -> Iterator[NumberedRows]:
        """Yield the rows, a few MB at a time."""

    def parsing(self) -> AbstractContextManager[None]:
        """Convert what is raised while rows are read and written because the files are damaged."""
        return contextlib.nullcontext()

    def warnings(self) -> Sequence[str]:
        """Return what seems wrong in the rows that were read."""
        return ()


@dataclass(frozen=True, slots=True)
class Target:
    """Where an import goes, and whom it tells.

    Args:
        path: The store's folder, which must not exist yet.
        capacity: Maximum number of readable rows; None: that of the source.
        progress: Called with the rows done and the rows in total.
        tell: Called with descriptions of what is left out or changed, before any row is written.
        disk: Access to the file system.
        source: What is imported, for the lineage.
        files: The files that are read, whose hashes the lineage gets.
    """

    path: Path
    capacity: int | None
    progress: Progress
    tell: Tell
    disk: Disk
    source: str | Path
    files: Sequence[Path]

    def describe_source(self) -> dict[str, Any]:
        """Hash the files that are read; return what the lineage says about them."""
        folder = Path(self.source)
        names = [
            str(file.relative_to(folder)) if file.is_relative_to(folder) else file.name for file in self.files
        ]
        hashes = {name: hash_file(file) for name, file in zip(names, self.files, strict=True)}
        return describe_source(folder.absolute() if self.files else self.source, hashes)


def fill_store(source: RowSource, target: Target) -> Imported:
    """Create a store with all rows of a source.

    Raises:
        StateError: The target exists, or would be inside a store.
        NotFoundError: The target's parent folder does not exist.
        LockedError: Another process creates the target at the same time.
        ExpStoreError: An error of the source, or of the new store. Nothing is left behind.
    """
    target.tell(source.notes)
    facts = target.describe_source()
    room = source.capacity if target.capacity is None else target.capacity
    with new_store(target.disk, target.path, room, source.settings, storage=source.storage) as filler:
        with source.parsing():
            filler.prepare(source.schema, facts, specs=source.specs, above=source.above)
        pieces = source.pieces()
        while True:
            with source.parsing():
                piece = next(pieces, None)
                if piece is None:
                    break
                filler.put(piece)
            target.progress(piece.done, max(piece.done, source.total))
        return filler.result(target.path, source)


@dataclass(slots=True)
class _EpisodeProgress:
    """Progress of one episode: its id in the new store, its rows so far, its next step in the source."""

    number: int
    rows: int
    follows: int


_NOTHING = Facts(-1, OPEN)


class Filler:
    """Write rows into a new store, in the order in which they are given.

    Threads, processes: one. Crashes: the store does not exist before `new_store` has ended.

    Args:
        storage: The store.
        catalog: The store's index.
    """

    def __init__(self, storage: Store, catalog: Catalog) -> None:
        self._storage, self._catalog = storage, catalog
        self._episodes: dict[int, _EpisodeProgress] = {}
        self._current: dict[tuple[int, int | None], int] = {}
        self._sources: dict[tuple[str, bool], int] = {}
        self._flags: RowFacts | None = None
        self._above: int | None = None
        self._highest = 0
        self.rows = 0

    def prepare(
        self, schema: Schema, facts: Mapping[str, Any], *, specs: str = "", above: int | None = None
    ) -> None:
        """Set the fields of the store, and the source of its rows.

        Args:
            schema: The fields.
            facts: What the lineage says about the source.
            specs: Specs of the fields, as the JSON text that stores keep; "" if unknown.
            above: A number above every episode id of the import: episodes keep their ids; None: they get new
                ids.
        """
        self._storage.settings.record_lineage(facts, IMPORT)
        self._storage.prepare(schema, keys_for(self._storage, schema))
        if specs:
            self._storage.settings.describe_fields(specs)
        self._above = above

    def put(self, rows: NumberedRows) -> None:
        """Append rows. Rows with the same time were written in one batch; they are written in one again."""
        if not rows.episodes.size:
            return
        cuts = [] if rows.times is None else (np.flatnonzero(np.diff(rows.times)) + 1).tolist()
        for start, stop in zip([0, *cuts], [*cuts, rows.episodes.size], strict=True):
            time = now_us() if rows.times is None else int(rows.times[start])
            self._put(rows.cut(slice(start, stop)), time)

    def _put(self, given: NumberedRows, time: int) -> None:
        storage = self._storage
        with storage.locks.extend, storage.lock:
            assignment, noted = self._assign(given)
            assignment.numbers[3] = time
            rows = Rows(storage.last + 1, given.episodes.size, given.columns, assignment, time)
            storage.write(rows)
            if noted:
                found = zip(self._catalog.find_episodes([number for number, _ in noted]), noted, strict=True)
                changed = (dataclasses.replace(entry, text=text) for entry, (_, text) in found)
                storage.annotate(NewFacts(tuple(changed)))
            priorities = given.priorities
            if priorities is not None and (priorities != np.float32(storage.priorities.largest)).any():
                storage.set_priorities(rows.ids, priorities)
        self.rows += given.episodes.size

    def _assign(self, given: NumberedRows) -> tuple[Assignment, list[tuple[int, str]]]:
        """Split a batch into segments; return them, and the infos of episodes that begin."""
        episodes, steps, ends = given.episodes, given.steps, given.last
        first_id = self._storage.last + 1
        segments: list[Segment] = []
        made = Assignment(segments, np.empty((4, episodes.size), np.int64))
        made.numbers[0] = np.arange(first_id, first_id + episodes.size)
        terminated, truncated, rewards = self._read_facts(given.columns)
        noted: list[tuple[int, str]] = []
        for name, step, count, first, stride in find_fragments(episodes, steps, made.numbers[0]).T.tolist():
            known = _NOTHING if given.facts is None else given.facts(name)
            source = self._source(known, made.sources)
            progress, begins = self._find(name, step, (source, known.trajectory))
            if begins and known.info:
                noted.append((progress.number, drop_end(known.info)))
            start, last = first - first_id, first - first_id + (count - 1) * stride
            rows = slice(start, last + 1, stride)
            status = known.status if step + count == known.length else OPEN
            if ends is not None and ends[last]:
                status = OPEN
                if terminated is not None and terminated[last]:
                    status = TERMINATED
                elif truncated is not None and truncated[last]:
                    status = TRUNCATED
            segments.append(
                Segment(
                    episode=progress.number,
                    trajectory=known.trajectory or 0,
                    step=progress.rows,
                    source=source,
                    start=start,
                    rows=count,
                    stride=stride,
                    ret=0.0 if rewards is None else float(np.sum(rewards[rows], dtype=np.float64)),
                    status=status,
                    flags=(HAS_TRAJECTORY if known.trajectory is not None else 0)
                    | (NEW if begins else 0)
                    | (NO_REWARD if rewards is None else 0),
                )
            )
            made.numbers[1, rows] = progress.number
            made.numbers[2, rows] = np.arange(progress.rows, progress.rows + count)
            progress.rows += count
            progress.follows += count
            if status != OPEN:
                self._episodes.pop(name)
                self._current.pop((source, known.trajectory))
        return made, noted

    def _find(self, name: int, step: int, key: tuple[int, int | None]) -> tuple[_EpisodeProgress, bool]:
        """Return the episode that a step belongs to, and whether it begins a new one."""
        progress = self._episodes.get(name)
        if progress is not None and progress.follows == step and self._current.get(key) == progress.number:
            return progress, False
        number = name
        if self._above is None or progress is not None:
            number = max(self._highest + 1, self._above or 0)
        self._highest = max(self._highest, number)
        self._episodes[name] = found = _EpisodeProgress(number, 0, step)
        self._current[key] = number
        return found, True

    def _read_facts(self, columns: Sequence[Array]) -> tuple[Array | None, Array | None, Array | None]:
        """Return which rows terminate an episode, which truncate it, and their rewards. Shapes `(n,)`."""
        if self._flags is None:
            self._flags = RowFacts(self._storage.require_schema(), self._storage.keys)
        return self._flags.read(columns)

    def result(self, path: Path, source: RowSource) -> Imported:
        """Return the result of the import of a source to a path."""
        return summarize_import(
            path,
            rows=self.rows,
            kept=self._storage.stored.rows,
            statuses=self._catalog.query(STATUSES, None).fetchall(),
            schema=self._storage.require_schema(),
            keys=self._storage.keys,
            notes=source.notes,
            names=source.names,
            warnings=source.warnings(),
        )

    def _source(self, known: Facts, new: list[NewSource]) -> int:
        """Return the number of an episode's source; a new source is appended to `new`."""
        name = known.source
        if name is None:
            (name,) = lane_names(None, f"@{self._storage.episodes.generation}", 1)
        key = name, known.named and known.source is not None
        number = self._sources.get(key)
        if number is None:
            number = self._sources[key] = self._storage.episodes.next_source + len(new)
            new.append(NewSource(number, *key, *self._storage.episodes.session))
        return number


def _cut(column: Any, rows: slice) -> Any:
    """Return a contiguous part of a column."""
    found = column[rows]
    return np.ascontiguousarray(found) if isinstance(found, np.ndarray) else found


@contextmanager
def new_store(
    disk: Disk,
    target: Path,
    capacity: int | None,
    settings: Mapping[str, Any] | None = None,
    *,
    storage: str = "zarr",
) -> Iterator[Filler]:
    """Create a store under a temporary name, to be filled; it is closed and renamed at the end of the block.

    Args:
        disk: Access to the file system.
        target: The store's folder, which must not exist yet.
        capacity: Maximum number of readable rows; None: unbounded.
        settings: Further settings, as attributes of `Settings`.
        storage: "zarr", or "arrow", which also stores variable-length rows.

    Raises:
        StateError: The target exists, or would be inside a store.
        NotFoundError: The target's parent folder does not exist.
        LockedError: Another process creates the target at the same time.
    """
    check_target(disk, target)
    how = ColumnLayout("auto")
    more = Settings(
        mode="x", storage=storage, flatten=True, new_layout=how, on_sigterm="ignore", **dict(settings or {})
    )
    with build_atomically(disk, target, single=True, doing="imports to") as folder, ExitStack() as opened:
        made = open_storage(folder / target.name, capacity, settings=more, disk=disk)
        opened.callback(_close_quietly, made)
        catalog = Catalog(made)
        made.index.use(catalog)
        yield Filler(made, catalog)
        catalog.close()
        made.close()
        _end_open_episodes(disk, folder / target.name)


def _close_quietly(storage: Store) -> None:
    """Close a storage that is about to be removed; ignore errors and a storage that is closed."""
    with contextlib.suppress(ExpStoreError):
        storage.close()


def parse_about(text: str | bytes, where: str) -> dict[str, Any]:
    """Return the facts that an export has stored with its rows; {} for a file of another program.

    Args:
        text: The facts as JSON; "" without facts.
        where: Where they are, for messages.

    Raises:
        SchemaError: They cannot be read, or are in a newer format.
    """
    if not text:
        return {}
    try:
        found = dict(json.loads(text))
        is_newer = int(found["format"]) > FORMAT
        for facts in () if is_newer else found["fields"]:
            Schema([parse_field(facts)])
    except INVALID as exc:
        raise SchemaError(f"the description of the fields in the {where} cannot be read: {exc}") from exc
    if is_newer:
        raise SchemaError(
            f"the rows are in format {found['format']}, this version reads format {FORMAT}",
            hint="upgrade expstore and import them again",
        )
    return found


def parse_field(facts: Mapping[str, Any]) -> Field:
    """Return a field that an export has described."""
    shape = tuple(map(int, facts["shape"]))
    return Field(tuple(map(str, facts["key"])), str(facts["dtype"]), shape, str(facts.get("arrow", "")))


def settings_of(about: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    """Return the settings for a new store from the facts that an export has stored.

    Args:
        about: The facts.
        schema: The fields of the new store. Roles of fields that were not exported are left out.
    """
    names = (
        *("meta", "traj_key", "done_keys", "reward_key", "reward_reduce", "done_reduce"),
        *("group_key", "group_size"),
    )
    found = {name: _to_tuples(about[name]) for name in names if about.get(name) is not None}
    for name in ("traj_key", "reward_key"):
        if name in found and found[name] not in schema:
            del found[name]
    if not all(key in schema for key in found.get("done_keys", ())):
        del found["done_keys"]
    return found


def _to_tuples(value: Any) -> Any:
    """Convert JSON lists to tuples, recursively: keys are tuples."""
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def _end_open_episodes(disk: Disk, path: Path) -> None:
    """Open and close the store: opening it cuts the open episodes, which cannot be continued."""
    storage = open_storage(path, settings=Settings(on_sigterm="ignore"), disk=disk)
    catalog = Catalog(storage)
    storage.index.use(catalog)
    catalog.close()
    storage.close()


# -- summaries ----------------------------------------------------------------------------------------

#: Counts the episodes by status; an open episode is cut when the store is closed.
STATUSES = (
    "SELECT replace(status, 'open', 'cut') AS how, count(*) FROM episodes WHERE live_rows > 0 "
    "GROUP BY how ORDER BY how = 'cut', how"
)
_OBSERVATION, _NEXT = ("observation",), ("next", "observation")


def summarize_import(
    path: Path,
    *,
    rows: int,
    kept: int,
    statuses: Iterable[tuple[str, int]],
    schema: Schema,
    keys: Keys,
    notes: Sequence[str],
    names: Mapping[str, str],
    warnings: Sequence[str] = (),
) -> Imported:
    """Return the result of an import.

    Args:
        path: The store.
        rows: Number of rows read.
        kept: Number of readable rows.
        statuses: The result of the query `STATUSES`.
        schema: The fields of the store.
        keys: The fields with a role in episodes.
        notes: Descriptions of what was left out or changed.
        names: Columns of the source that became fields of another name; "": an episode's info has the values.
        warnings: What in the rows seems wrong.
    """
    counts = dict(statuses)
    episodes = sum(counts.values())
    roles = _find_roles(schema, keys, names)
    found = list(warnings)
    if not roles["reward"]:
        found.append("there is no reward: returns are 0")
    if not roles["end flags"]:
        found.append("there is no end flag: episodes that ended count as cut")
    if episodes == 1 and kept == rows > 1:
        found.append(f"one episode holds all {rows:,} rows")
    return Imported(
        path=path,
        rows=rows,
        kept=kept,
        episodes=episodes,
        fields=names_of(schema.keys),
        notes=tuple(notes),
        statuses=counts,
        roles=roles,
        warnings=tuple(found),
    )


def _find_roles(schema: Schema, keys: Keys, names: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the fields of each role, each with its name in the source."""
    ends = {keys.terminated, keys.truncated, keys.done}
    found: dict[str, list[str]] = {
        role: []
        for role in (
            *("observation", "next observation", "action", "reward"),
            *("end flags", "episode", "plain fields"),
        )
    }
    origins: dict[str, list[str]] = {}
    for theirs, ours in names.items():
        if ours:
            origins.setdefault(ours, []).append(theirs)
        else:
            found["episode"].append(f"{theirs} (in the info of episodes)")
    for key in schema.keys:
        name = key_name(key)
        text = f"{name} ({', '.join(origins[name])})" if name in origins else name
        found[_role_of(key, keys, ends)].append(text)
    return {role: tuple(texts) for role, texts in found.items()}


def _role_of(key: Key, keys: Keys, ends: set[Key | None]) -> str:
    if key == keys.reward:
        return "reward"
    if key in ends:
        return "end flags"
    if key == keys.trajectory:
        return "episode"
    if key[:2] == _NEXT:
        return "next observation"
    if key[:1] == _OBSERVATION:
        return "observation"
    return "action" if key[0] == "action" else "plain fields"
