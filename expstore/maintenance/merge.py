"""`expstore.merge`: copy the rows of several stores into a new one.

Used by the command line. The sources are read as a reader does, and never changed. The new store is built
under a temporary name and renamed when it is complete.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.arguments import check_capacity
from expstore.core.draw_state import NO_PROGRESS
from expstore.core.values import Array, IntArray, Window, key_name
from expstore.disk.atomic_build import build_atomically
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.episodes.log import LogEntry
from expstore.episodes.selections import definitions_of
from expstore.episodes.sessions import End
from expstore.errors import ArgumentError, LockedError, SchemaError, StateError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Schema
from expstore.schema.spec_text import same_specs
from expstore.storages.batch import now_us
from expstore.storages.columns.annotated import Annotations
from expstore.storages.columns.checksums import BlockCheck, read_entries
from expstore.storages.columns.column_set import ReadColumns
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import open_storage
from expstore.storages.follower import FollowerStorage
from expstore.storages.format.layout import ColumnLayout, LayoutName, ask_layout
from expstore.storages.format.lineage import MERGE, Lineage
from expstore.storages.format.manifest import Manifest, check_target
from expstore.storages.format.paths import CHECKSUMS, COLUMNS
from expstore.storages.format.swap import current_path
from expstore.storages.read_view import read_present
from expstore.storages.snapshots.catalog import store_meant
from expstore.storages.snapshots.resize import Progress
from expstore.storages.snapshots.restore import join_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedRun:
    """What was copied from one store.

    Args:
        path: The store's folder.
        name: The prefix of the names of its sources.
        rows: Number of rows copied.
        episodes: Number of episodes that the store ever had.
    """

    path: Path
    name: str
    rows: int
    episodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The result of a merge.

    Args:
        path: The new store's folder.
        rows: Number of readable rows in it.
        given_up: Number of rows dropped because of its capacity.
        runs: What was copied from each store.
    """

    path: Path
    rows: int
    given_up: int
    runs: tuple[MergedRun, ...]


def merge(
    paths: Sequence[str | Path],
    *,
    out: str | Path,
    capacity: int | None = None,
    layout: LayoutName | None = None,
    fields: Mapping[str, Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> Merged:
    """Create a new store with the rows of several stores.

    The rows of each store follow those of the store before. Rows keep their step, time and priority; ids and
    episode ids are new. The name of a source gets the name of its store as a prefix, as in `run-1/arm`, so
    that trajectory ids of different stores never collide. Episodes keep their facts; open episodes are cut.
    Selections with the same name and condition are united.
    `meta` of the new store lists the stores with their `meta`; settings that draws depend on are new. If a
    store keeps the best rows, these rows are copied; the new store keeps the newest. It has no consumers.

    Crashes: the new store is complete or does not exist. Processes: no process may write to the stores
    meanwhile.

    Args:
        paths: Folders of the stores, in the order of their rows. A snapshot is accepted too, and a folder of
            snapshots, which means the newest.
        out: The new store's folder, which must not exist yet.
        capacity: Most readable rows of the new store, which keeps the newest; None: unbounded.
        layout: How the fields are stored on disk, as in `expstore.open`.
        fields: Layouts of single fields, as in `expstore.open`.
        progress: Called between two pieces with the bytes copied and the bytes in total.
        disk: Access to files.

    Returns:
        What was copied.

    Raises:
        ArgumentError: `paths` is empty or names a store twice, or the capacity is below 1.
        NotFoundError: A store is missing, or the parent folder of `out` is.
        StateError: `out` exists, or would be inside a store; or a store has no fields yet.
        SchemaError: The stores do not fit together; the message names the first difference. Or they have
            selections of one name with different conditions.
        LockedError: A process writes to one of the stores, or creates the same new store now.
        CorruptionError: A store is damaged; rows of closed stores are compared with their checksums.
        StorageError: The disk failed or is full; the new store was removed.

    Example:
        >>> for name in ("a.exp", "b.exp"):
        ...     with expstore.open(name) as rb:
        ...         index = rb.extend(batch)
        >>> expstore.merge(["a.exp", "b.exp"], out="both.exp").rows
        128
    """
    disk, target = disk or Disk(), local_path(out)
    capacity = None if capacity is None else check_capacity(capacity)
    found = [store_meant(disk, local_path(path)) for path in paths]
    _check_paths(found)
    check_target(disk, target)
    with ExitStack() as stack:
        runs: list[_Run] = []
        for path, name in zip(found, _names(found), strict=True):
            storage = FollowerStorage(path)
            stack.callback(storage.close)
            runs.append(_Run.of(storage, name, runs))
        _check_alike(runs)
        _check_selections(runs)
        with build_atomically(disk, target, single=True, doing="makes") as folder:
            first = runs[0].storage.manifest
            kinds = {run.storage.manifest.storage for run in runs}
            settings = Settings(
                mode="x", storage="arrow" if "arrow" in kinds else None, on_sigterm="ignore",
                layout=ask_layout(layout, fields), new_layout=ColumnLayout("auto"),
                flatten=first.flatten, ndim=first.ndim, **first.key_settings,
                meta={"merged": [run.facts(meta=run.storage.manifest.meta) for run in runs]},
            )  # fmt: skip
            made = open_storage(folder / target.name, capacity, settings=settings, disk=disk)
            try:
                content = _Joined(runs, made.manifest, progress or (lambda done, total: None))
                made.snapshots.adopt(content)
                kept = len(made)
            finally:
                made.close()
            for run in runs:
                run.check_alone()
    return Merged(
        path=target,
        rows=kept,
        given_up=content.total - kept,
        runs=tuple(
            MergedRun(path=run.storage.path, name=run.name, rows=run.ids.size, episodes=run.episodes)
            for run in runs
        ),
    )


# -- checks of the arguments ----------------------------------------------------------------------


def _check_paths(paths: Sequence[Path]) -> None:
    if not paths:
        raise ArgumentError("there is nothing to merge: name at least one store")
    seen: set[Path] = set()
    for path in paths:
        if path.resolve() in seen:
            raise ArgumentError(f"{path} is given twice")
        seen.add(path.resolve())


def _names(paths: Sequence[Path]) -> list[str]:
    """Return name prefixes for the stores' sources: their folders' names, numbered if equal."""
    names: list[str] = []
    for path in paths:
        name = base = path.resolve().name.removesuffix(".exp").strip() or "run"
        if not base.isprintable():
            name = base = "run"
        number = 2
        while name in names:
            name, number = f"{base}-{number}", number + 1
        names.append(name)
    return names


def _check_alike(runs: Sequence[_Run]) -> None:
    """Raise SchemaError unless all stores have the same fields, settings and specs."""
    first = runs[0]
    asked = {entry.key: entry for entry in first.schema.fields}
    for run in runs[1:]:
        found = {entry.key: entry for entry in run.schema.fields}
        for key in [*asked, *(key for key in found if key not in asked)]:
            if asked.get(key) != found.get(key):
                here, there = found.get(key, "missing"), asked.get(key, "missing")
                raise _unlike(run, first, f"field {key_name(key)}", here, there)
        ours, theirs = run.storage.manifest, first.storage.manifest
        for name in ("dims", "flatten", *ours.key_settings):
            here, there = getattr(ours, name), getattr(theirs, name)
            if here != there:
                raise _unlike(run, first, name, here, there)
        if _form_of(first.schema) != _form_of(run.schema):
            raise _unlike(run, first, "the container of rows", run.schema.form, first.schema.form)
        specs = run.storage.description.specs, first.storage.description.specs
        if bool(specs[0]) != bool(specs[1]) or (specs[0] and not same_specs(*specs)):
            raise _unlike(run, first, "specs", specs[0] or "none", specs[1] or "none")


def _check_selections(runs: Sequence[_Run]) -> None:
    """Raise SchemaError if two stores have selections of one name and different conditions."""
    known: dict[str, tuple[_Run, Any]] = {}
    for run in runs:
        latest = {entry.episode: entry.text for entry in run.entries if entry.episode}
        for name, definition in definitions_of(latest.values()).items():
            first, condition = known.setdefault(name, (run, definition["condition"]))
            if condition != definition["condition"]:
                raise SchemaError(
                    f"selection {name!r} has another condition in {run.storage.path} than in "
                    f"{first.storage.path}: {definition['condition']!r}, not {condition!r}",
                    hint="drop one of them, or create it anew under another name",
                )


def _form_of(schema: Schema) -> dict[str, Any]:
    """Return the container that rows are returned in, without the dim names of nested TensorDicts."""
    form = json.loads(schema.form or "{}")
    return {name: value for name, value in form.items() if name not in ("names", "nested")}


def _unlike(run: _Run, first: _Run, what: str, here: object, there: object) -> SchemaError:
    return SchemaError(
        f"{run.storage.path} does not match {first.storage.path}: {what} is {here} here, {there} there",
        hint="only stores of the same fields and settings can be merged",
    )


# -- the stores ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Run:
    """One of the stores, and its mapping to numbers of the new store.

    Args:
        storage: The opened store.
        name: Prefix for the names of its sources.
        ids: Ids of its rows. Shape `(n,)`.
        before: Number of rows before them in the new store.
        episode: Number added to its episode ids.
        source: Number added to its source numbers.
        entries: Log entries of its episodes, with its own numbers; open episodes are cut.
        numbers: The counters of its episode table.
        sums: Compares rows with its checksums; None: it was not closed, or has no checksums.
    """

    storage: FollowerStorage
    name: str
    ids: IntArray
    before: int
    episode: int
    source: int
    entries: Sequence[LogEntry]
    numbers: Mapping[str, Any]
    sums: BlockCheck | None

    @classmethod
    def of(cls, storage: FollowerStorage, name: str, former: Sequence[_Run]) -> _Run:
        """Read the state of a store whose rows come after those of the stores in `former`.

        Raises:
            LockedError: A process has the store open for writing.
            StateError: It has no fields yet.
        """
        storage.follow(priorities=True)
        if storage.schema is None:
            raise StateError(f"{storage.path} has no rows and no fields yet", hint="leave it out")
        numbers, last = storage.episodes.to_base(), former[-1] if former else None
        entries = list(storage.state.log.read())
        entries += storage.episodes.apply(End(now_us(), None, tuple(storage.episodes.live_sessions())), 0)
        run = cls(
            storage=storage,
            name=name,
            ids=_whole_steps(storage),
            before=last.before + last.ids.size if last else 0,
            episode=last.episode + last.episodes if last else 0,
            source=last.source + last.numbers["next_source"] - 1 if last else 0,
            entries=entries,
            numbers=numbers,
            sums=_read_sums(storage),
        )
        run.check_alone()
        return run

    @property
    def schema(self) -> Schema:
        """The fields of the store."""
        return self.storage.require_schema()

    @property
    def episodes(self) -> int:
        """Number of episodes that the store ever had."""
        return int(self.numbers["next_episode"]) - 1

    def facts(self, **more: Any) -> dict[str, Any]:
        """Return facts about this store for the new store, and more."""
        return {"name": self.name, "uuid": self.storage.manifest.uuid, "rows": self.ids.size, **more}

    def lineage(self) -> Lineage:
        """Return the steps of the store, with the ids that its rows get."""
        lineage = self.storage.manifest.lineage
        return lineage.move(
            lambda id: int(np.searchsorted(self.ids, id, side="right")), self.before, self.storage.last
        )

    def check_alone(self) -> None:
        """Raise LockedError if a process has the store open for writing."""
        self.storage.follow()
        owner = self.storage.owner
        if owner is not None:
            raise LockedError(
                f"{self.storage.path} is being written to by process {owner.pid} on {owner.host}",
                hint="close it there first, or merge a snapshot of it",
            )

    def read(self, start: int, count: int, places: Sequence[int]) -> list[Array]:
        """Copy rows of the store, with their new numbers.

        Raises:
            LockedError: A process overwrote rows while they were copied.
            CorruptionError: Rows do not have their checksum.
        """
        ids = self.ids[start : start + count]
        if self.sums is not None:
            self.sums.check(ids)
        found, columns = read_present(self.storage, ids, places)
        if found.size < ids.size:
            raise LockedError(
                f"rows of {self.storage.path} were overwritten while they were copied", hint="try again"
            )
        first = self.before + start + 1
        columns[-5] = np.arange(first, first + ids.size)
        columns[-4] = columns[-4] + self.episode
        return columns

    def locate(self, ids: IntArray) -> IntArray:
        """Return the ids of rows in the new store, 0 for rows that are not copied. Shapes `(n,)`."""
        at = np.searchsorted(self.ids, ids)
        there = self.ids[np.minimum(at, self.ids.size - 1)] == ids if self.ids.size else ids < 0
        return np.where(there, self.before + at + 1, 0)

    def renumber(self) -> Iterator[LogEntry]:
        """Yield the log entries of its episodes and sources, with the numbers of the new store."""
        for entry in self.entries:
            if not (entry.episode or entry.source):
                continue  # it fills a gap in a repaired log
            text, last_id = entry.text, 0
            if entry.episode:
                # A row that was deleted is replaced by the newest readable row before it.
                last_id = self.before + int(np.searchsorted(self.ids, entry.last_id, side="right"))
            else:
                text = f"{self.name}/{text}"
            yield dataclasses.replace(
                entry,
                episode=entry.episode and entry.episode + self.episode,
                source=entry.source and entry.source + self.source,  # 0: a repair has lost the source
                last_id=last_id,
                sequence=0,
                generation=0,
                text=text,
            )


def _read_sums(storage: FollowerStorage) -> BlockCheck | None:
    """Return the checksums of a store; None if an opening would have to compute some of them."""
    path = current_path(storage.disk, storage.path, CHECKSUMS)
    if storage.counters.recovered is not None or not storage.disk.exists(path):
        return None
    slots, last = storage.geometry.slots, storage.last
    fields = (*storage.require_schema().fields, *ROW_FIELDS)
    columns = ReadColumns(storage.disk, storage.path / COLUMNS, fields, slots)
    for column in columns.flat.values():
        column.look(last if slots is None else min(last, slots))
    return BlockCheck(columns, read_entries(storage.disk.read_whole(path), len(columns.summed), path))


def _whole_steps(storage: FollowerStorage) -> IntArray:
    """Return the ids of all readable rows, without the rows of incomplete steps."""
    ids = storage.stored.ids()
    if storage.geometry.lanes == 1 or not ids.size:
        return ids
    steps, counts = np.unique((ids - 1) // storage.geometry.lanes, return_counts=True)
    kept: IntArray = ids[
        np.isin((ids - 1) // storage.geometry.lanes, steps[counts == storage.geometry.lanes])
    ]
    return kept


class _Joined:
    """Present the rows of all stores as the content of a snapshot, from which the new store is built.

    Args:
        runs: The stores.
        manifest: Manifest of the new store, without fields.
        progress: Called with the bytes read so far and the bytes in total.
    """

    name = "the merged stores"
    low = 0
    counted = False

    def __init__(self, runs: Sequence[_Run], manifest: Manifest, progress: Progress) -> None:
        first, last = runs[0], runs[-1]
        schema = first.schema
        self._runs, self._progress = runs, progress
        self.total = last.before + last.ids.size
        self._skipped = 0 if manifest.capacity is None else max(0, self.total - manifest.capacity)
        steps = [step for run in runs for step in run.lineage().steps]
        lineage = Lineage(tuple(sorted(steps, key=lambda step: step.time)))
        stores = [run.facts(path=str(run.storage.path.absolute())) for run in runs]
        self.manifest = manifest.replace(
            lineage=lineage.add(MERGE, now_us(), Window(0, self.total), stores=stores),
            capacity=None,
            schema=schema,
            dims=first.storage.manifest.dims,
            specs=first.storage.description.specs,
        )
        entries = (*schema.fields, *ROW_FIELDS)
        self.row_bytes = sum(entry.row_bytes for entry in entries)
        own = range(len(schema.fields), len(entries))
        #: Column positions in each store, in the order of the new store's columns.
        self._places = [[*(run.schema.place(entry.key) for entry in schema.fields), *own] for run in runs]
        self.entries = [entry for run in runs for entry in run.renumber()]
        splits = sorted({name for run in runs for name in run.numbers.get("splits", ())})
        self.base: dict[str, Any] = {
            "last": self.total,
            "retired": 0,
            "draw": 0,
            "progress": NO_PROGRESS,
            "limits": (0, 0),
            "randomness": None,
            "max_priority": max(run.storage.priorities.largest for run in runs),
            "write_count": self.total,
            "episodes": {
                "next_episode": last.episode + last.episodes + 1,
                "next_source": last.source + last.numbers["next_source"],
                "sessions": [],
                "open": [],
            }
            | ({"splits": splits} if splits else {}),
        }

    def rows(self, first_id: int, count: int) -> list[Array]:
        """Copy all columns of a run of rows."""
        parts: list[list[Array]] = []
        for run, places in zip(self._runs, self._places, strict=True):
            start = max(0, first_id - 1 - run.before)
            stop = min(run.ids.size, first_id - 1 + count - run.before)
            if start < stop:
                parts.append(run.read(start, stop - start, places))
        done = first_id - 1 + count - self._skipped
        self._progress(done * self.row_bytes, (self.total - self._skipped) * self.row_bytes)
        if len(parts) == 1:
            return parts[0]
        return [join_parts(columns) for columns in zip(*parts, strict=True)]

    def annotations(self) -> Iterator[tuple[Annotations, Callable[[IntArray], IntArray]]]:
        """Yield the records of annotations of all stores; see `ContentLike`."""
        for run in self._runs:
            if (found := run.storage.state.annotations) is not None:
                yield found, run.locate

    def counts(self, first_id: int, count: int) -> Array:
        """Return zeros: no row of the new store has been sampled yet. Shape `(count,)`, uint32."""
        return np.zeros(count, np.uint32)
