"""Import Parquet, Arrow, CSV and JSON files as a new store.

Used by `expstore import` and programs. Rows that expstore exported are read in the order of their ids, with
their episodes; rows of other programs in the order of the file. A few batches are in memory at a time, and
nothing is unpickled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from expstore.core.parsing import parsing
from expstore.core.values import Array, IntArray, key_name
from expstore.disk.files import Disk, ReadingDisk
from expstore.disk.local_path import local_path
from expstore.disk.source_links import check_links
from expstore.episodes.facts import pack_stored_info
from expstore.episodes.segmentation import OPEN
from expstore.episodes.table import STATUS
from expstore.errors import ArgumentError, NotFoundError, SchemaError, StorageError
from expstore.exchange.base import (
    REGROUPED,
    Imported,
    Progress,
    Tell,
    ignore_notes,
    no_progress,
    open_to_read,
    piece_rows,
)
from expstore.exchange.fill import Facts, NumberedRows, RowSource, Target, fill_store, settings_of
from expstore.exchange.foreign_rows import Column, ForeignRows, RowPlan, plan_rows, split_name
from expstore.exchange.table_files import (
    ArrowPart,
    CsvPart,
    JsonPart,
    ParquetPart,
    Part,
    merge_types,
    reading_arrow,
)
from expstore.exchange.table_layout import Layout, Survey, Table, needs_survey, read_layout
from expstore.schema.arrow_types import describe
from expstore.schema.row_selection import pick
from expstore.schema.schema import Field, Schema
from expstore.storages.snapshots.restore import join_parts

#: Maximum number of rows that are read at a time if their lengths are unknown.
LOOSE_ROWS = 1024
Kind = Literal["zarr", "arrow"]
#: Columns that RLlib compresses, and the begin of an LZ4 frame in base64.
_PACKED_COLUMNS, _LZ4_FRAME = ("obs", "new_obs", "infos"), "BCJNGGh"
_FACTS = ("episode_id", "source", "named", "trajectory_id", "length", "status", "info")


def import_parquet(
    source: str | Path,
    target: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    capacity: int | None = None,
    storage: Kind | None = None,
    progress: Progress = no_progress,
    tell: Tell = ignore_notes,
    disk: Disk | None = None,
) -> Imported:
    """Create a store from Parquet files.

    From files of `export_parquet` it restores fields, episodes with their ids, sources, trajectory ids,
    statuses and infos, times and priorities; ids begin at 1. If rows of an episode are missing, the rows
    after the gap become a separate episode, whose steps begin at 0.

    From other Parquet files, columns of numbers, and lists of numbers that all have the same length, become
    fields of fixed size; structs become nested fields. Other lists of numbers become tensors of any length.
    Text, all other lists, and columns with missing values become variable-length fields, with None for
    missing values. Usual names become fields, and episodes begin, as described for `import_npz`, unless there
    are columns `_episode` and `_step`; then the steps of an episode must be in order. Columns of numbers with
    names such as `obs_0`, `obs_1`, ... become one vector. In files that pandas wrote, missing floats are NaN,
    and its index is left out, like columns without any value. The store is complete, or does not exist.

    Args:
        source: A folder made by `export_parquet`, a folder of Parquet files, or a Parquet file.
        target: The store's folder, which must not exist yet.
        names: Mapping from columns, or structs, in the file to fields, as in `{"rew": "next.reward"}`; a
            name that is mapped to "" is left out. The file is then read as that of another program.
        capacity: Maximum number of readable rows; None: that of the exported store, otherwise unbounded.
        storage: "arrow", which supports variable-length rows, or "zarr"; None: as the columns need it.
        progress: Called with the rows done and the rows in total.
        tell: Called with descriptions of what is left out or changed, before any row is written.
        disk: Access to the file system.

    Raises:
        NotFoundError: The source, or the parent folder of the store, does not exist.
        StorageError: A file cannot be read; or the disk failed or is full. Nothing is left behind.
        SchemaError: A column cannot be a field of this storage; or files have different columns; or the steps
            of an episode are not in order.
        StateError: The target exists, or would be inside a store.
        LockedError: Another process creates the store at the same time.

    Example:
        >>> from expstore.exchange import export_parquet, import_parquet
        >>> done = export_parquet(rb, "rows.parquet")
        >>> import_parquet("rows.parquet", "again.exp").rows
        200
    """
    source, target = local_path(source), local_path(target)
    parts = [ParquetPart(path) for path in parquet_files(source)]
    facts = _read_facts(source / "episodes.parquet", pq.read_table)
    files = [part.path for part in parts] + ([source / "episodes.parquet"] if facts else [])
    to = Target(target, capacity, progress, tell, disk or Disk(), source, files)
    return fill_store(_TableRows(parts, facts, names or {}, storage), to)


def import_arrow(
    source: str | Path,
    target: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    capacity: int | None = None,
    storage: Kind | None = None,
    progress: Progress = no_progress,
    tell: Tell = ignore_notes,
    disk: Disk | None = None,
) -> Imported:
    """Create a store from an Arrow IPC file. The columns are read as in `import_parquet`.

    Args:
        source: A folder made by `export_arrow`, or an Arrow IPC file.
        target: The store's folder, which must not exist yet.
        names: Mapping from columns, or structs, in the file to fields, as in `{"rew": "next.reward"}`; a
            name that is mapped to "" is left out. The file is then read as that of another program.
        capacity: Maximum number of readable rows; None: that of the exported store, otherwise unbounded.
        storage: "arrow", which supports variable-length rows, or "zarr"; None: as the columns need it.
        progress: Called with the rows done and the rows in total.
        tell: Called with descriptions of what is left out or changed, before any row is written.
        disk: Access to the file system.

    Raises:
        NotFoundError: The source, or the parent folder of the store, does not exist.
        StorageError: The file cannot be read; or the disk failed or is full. Nothing is left behind.
        SchemaError: A column cannot be a field of this storage, or the steps of an episode are not in order.
        StateError: The target exists, or would be inside a store.
        LockedError: Another process creates the store at the same time.

    Example:
        >>> from expstore.exchange import export_arrow, import_arrow
        >>> done = export_arrow(rb, "rows.arrow")
        >>> import_arrow("rows.arrow", "again.exp").rows
        200
    """
    source, target = local_path(source), local_path(target)
    part = ArrowPart(arrow_file(source))
    facts = _read_facts(source / "episodes.arrow", lambda file: pa.ipc.open_file(file).read_all())
    files = [part.path] + ([source / "episodes.arrow"] if facts else [])
    to = Target(target, capacity, progress, tell, disk or Disk(), source, files)
    return fill_store(_TableRows([part], facts, names or {}, storage), to)


def import_csv(
    source: str | Path,
    target: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    capacity: int | None = None,
    storage: Kind | None = None,
    progress: Progress = no_progress,
    tell: Tell = ignore_notes,
    disk: Disk | None = None,
) -> Imported:
    """Create a store from a CSV file whose first line has the names of the columns.

    Values are separated by commas, semicolons or tabs, whichever the first line has most of; with semicolons,
    numbers may have decimal commas. Types follow from all rows. Missing numbers become NaN. The columns are
    read as in `import_parquet`. The file is read into memory as a whole.

    Args:
        source: The file, UTF-8.
        target: The store's folder, which must not exist yet.
        names: Mapping from columns to fields, as in `{"rew": "next.reward"}`; a name that is mapped to "" is
            left out.
        capacity: Maximum number of readable rows; None: unbounded.
        storage: "arrow", which supports text, or "zarr"; None: as the columns need it.
        progress: Called with the rows done and the rows in total.
        tell: Called with descriptions of what is left out or changed, before any row is written.
        disk: Access to the file system.

    Raises:
        NotFoundError: The file, or the parent folder of the store, does not exist.
        StorageError: The file cannot be read; or the disk failed or is full. Nothing is left behind.
        SchemaError: The first line has no names, a name is there twice, or a column cannot be a field.
        StateError: The target exists, or would be inside a store.
        LockedError: Another process creates the store at the same time.

    Example:
        >>> from pathlib import Path
        >>> from expstore.exchange import import_csv
        >>> lines = "observation,action,reward,done", "0.5,1,1.0,false", "0.25,0,1.0,true"
        >>> length = Path("log.csv").write_text("\\n".join(lines))
        >>> import_csv("log.csv", "log.exp").rows
        2
    """
    source, target = local_path(source), local_path(target)
    parts = [CsvPart(source)]
    to = Target(target, capacity, progress, tell, disk or Disk(), source, [part.path for part in parts])
    return fill_store(_TableRows(parts, None, names or {}, storage), to)


def import_jsonl(
    source: str | Path,
    target: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    capacity: int | None = None,
    storage: Kind | None = None,
    progress: Progress = no_progress,
    tell: Tell = ignore_notes,
    disk: Disk | None = None,
) -> Imported:
    """Create a store from JSON lines: each line is an object with the values of a row.

    Types follow from all lines. Members that some lines lack are missing values. Objects become groups of
    fields; lists of objects, and members that are text in some lines and lists or objects in others, become
    JSON text. The columns are read as in `import_parquet`; use `import_rollouts` for rollouts of language
    models. The file is read three times, a few MB at a time.

    Args:
        source: The file, UTF-8, or a folder with files *.jsonl, which are read in the order of their names
            and numbers.
        target: The store's folder, which must not exist yet.
        names: Mapping from members, or objects, to fields, as in `{"rew": "next.reward"}`; a name that is
            mapped to "" is left out.
        capacity: Maximum number of readable rows; None: unbounded.
        storage: "arrow", which supports text, or "zarr"; None: as the columns need it.
        progress: Called with the rows done and the rows in total.
        tell: Called with descriptions of what is left out or changed, before any row is written.
        disk: Access to the file system.

    Raises:
        NotFoundError: The file, or the parent folder of the store, does not exist.
        StorageError: A line is not JSON, with its number; or the disk failed or is full. Nothing is left
            behind.
        SchemaError: A line is not an object, or its types are not those of earlier lines; or a column cannot
            be a field.
        StateError: The target exists, or would be inside a store.
        LockedError: Another process creates the store at the same time.

    Example:
        >>> from pathlib import Path
        >>> from expstore.exchange import import_jsonl
        >>> lines = '{"obs": [0.5], "action": 1, "reward": 1, "done": true}'
        >>> length = Path("log.jsonl").write_text(lines)
        >>> import_jsonl("log.jsonl", "log.exp").rows
        1
    """
    source, target = local_path(source), local_path(target)
    parts = json_parts(source, names or {})
    to = Target(target, capacity, progress, tell, disk or Disk(), source, [part.path for part in parts])
    return fill_store(_TableRows(parts, None, names or {}, storage), to)


def json_parts(source: Path, given: Mapping[str, str]) -> Sequence[Part]:
    """Return the files of JSON lines at a path, with the types that all of them share.

    Args:
        source: A file, or a folder with files *.jsonl.
        given: The user's mapping from members to fields; "": left out.
    """
    disk, paths = ReadingDisk(), [source]
    check_links(source)
    if disk.is_dir(source):
        names = [name for name in disk.names(source) if name.endswith(".jsonl")]
        # 2.jsonl before 10.jsonl
        names.sort(
            key=lambda name: [int(one) if one.isdecimal() else one for one in re.split(r"(\d+)", name)]
        )
        paths = [source / name for name in names]
    if not paths:
        raise NotFoundError(f"there are no files *.jsonl in {source}")
    left_out = [name for name, ours in given.items() if not ours]
    parts = [JsonPart(path, left_out) for path in paths]
    kind = parts[0].kind
    for part in parts[1:]:
        try:
            kind = merge_types(kind, part.kind)
        except TypeError as exc:
            raise SchemaError(
                f"{part.path} does not have the types of the files before: {exc}",
                hint="correct it, or leave the member out: --map NAME=",
            ) from exc
    for part in parts:
        part.use(kind)
    return parts


def arrow_file(source: Path) -> Path:
    """Return the file of rows of an export, or the path of another Arrow file."""
    disk = ReadingDisk()
    check_links(source)
    return source / "rows.arrow" if disk.is_dir(source) else source


def parquet_files(source: Path) -> list[Path]:
    """Return the files with the rows of an export, of a folder, or the path of another Parquet file."""
    disk = ReadingDisk()
    check_links(source)
    if not disk.is_dir(source):
        return [source]
    folder = source / "rows" if disk.is_dir(source / "rows") else source
    found = [folder / name for name in disk.names(folder) if name.endswith(".parquet")]
    if not found:
        raise NotFoundError(f"there are no Parquet files in {folder}")
    return found


# -- episodes -------------------------------------------------------------------------------------------


class _EpisodeFacts:
    """Look up facts in the file of episodes."""

    def __init__(self, table: Any) -> None:
        table = table.combine_chunks().sort_by("episode_id")
        self._ids: IntArray = table["episode_id"].to_numpy()
        self._length: IntArray = table["length"].to_numpy()
        self._status = table["status"]
        self._source = table["source"].combine_chunks().dictionary_encode()
        self._named = pc.fill_null(table["named"], False)
        self._trajectory = table["trajectory_id"]
        self._info = table["info"]

    @property
    def above(self) -> int:
        """A number above every episode id."""
        return int(self._ids[-1]) + 1 if self._ids.size else 1

    def __call__(self, episode: int) -> Facts:
        at = int(np.searchsorted(self._ids, episode))
        if at == self._ids.size or self._ids[at] != episode:
            raise SchemaError(
                f"there are rows of episode {episode}, which is missing in the file of episodes"
            )
        with parsing(f"episode {episode} in the file of episodes", StorageError):
            return self._unpack(episode, at)

    def _unpack(self, episode: int, at: int) -> Facts:
        status = self._status[at].as_py()
        text = self._info[at].as_py()
        info = json.loads(text) if text else {}
        if status not in STATUS:
            raise SchemaError(
                f"episode {episode} has status {status!r}", hint="there are " + ", ".join(STATUS)
            )
        return Facts(
            length=int(self._length[at]),
            status=STATUS.index(status) if status != "cut" else OPEN,  # becomes cut if nothing follows
            source=self._source[at].as_py(),
            named=self._named[at].as_py(),
            trajectory=self._trajectory[at].as_py(),
            info=pack_stored_info(info),
        )


def _read_facts(path: Path, read: Callable[[Any], Any]) -> _EpisodeFacts | None:
    """Return the facts about episodes, or None if the file does not exist."""
    disk = ReadingDisk()
    if not disk.exists(path):
        return None
    with open_to_read(path) as file, reading_arrow(path):
        table = read(file)
        if missing := [name for name in _FACTS if name not in table.schema.names]:
            raise SchemaError(
                f"{path} has no column {missing[0]!r}", hint="use the file of episodes that the export wrote"
            )
        table.validate(full=True)
        return _EpisodeFacts(table)


def _make_facts(episode: int) -> Facts:
    """Return facts for an unknown episode; its own trajectory id separates it from interleaved episodes."""
    return Facts(length=-1, status=OPEN, trajectory=episode)


class _Ends:
    """The last steps of the episodes, if no file describes the episodes."""

    def __init__(self, parts: Sequence[Part], layout: Layout) -> None:
        table = Table(layout)
        found: list[IntArray] = []
        for part in parts:
            for batch in part.batches(1 << 16, ["_episode", "_step"]):
                own = table.own(batch, ("_episode", "_step"))
                order = np.lexsort((own["_step"], own["_episode"]))
                episodes, steps = own["_episode"][order], own["_step"][order]
                stops = np.flatnonzero(np.diff(episodes, append=episodes[-1:] - 1))
                found.append(np.stack([episodes[stops], steps[stops]]))
        whole = np.concatenate(found, axis=1) if found else np.zeros((2, 0), np.int64)
        whole = whole[:, np.lexsort((whole[1], whole[0]))]
        self._last = whole[:, np.flatnonzero(np.diff(whole[0], append=whole[0, -1:] - 1))]

    def of(self, episodes: IntArray, steps: IntArray) -> Array:
        """Return whether each row is the last of its episode. Shape `(n,)`, bool."""
        last: Array = self._last[1, np.searchsorted(self._last[0], episodes)] == steps
        return last


# -- rows -----------------------------------------------------------------------------------------------


@dataclass
class _Stream:
    """A part that is being read, with the remaining rows of its current batch, ordered by id."""

    rest: Iterator[Any]
    table: Table
    ids: IntArray
    columns: list[Any]
    own: dict[str, Array]

    def take(self, through: int) -> tuple[list[Any], dict[str, Array]]:
        """Return the rows with ids up to `through`, and keep the others."""
        stop = int(np.searchsorted(self.ids, through, side="right"))
        columns = [column[:stop] for column in self.columns]
        own = {name: values[:stop] for name, values in self.own.items()}
        self._set([column[stop:] for column in self.columns], {n: v[stop:] for n, v in self.own.items()})
        return columns, own

    def _set(self, columns: list[Any], own: dict[str, Array]) -> None:
        self.columns, self.own, self.ids = columns, own, own["_id"]

    def load(self) -> bool:
        """Read batches until there are rows; return False at the end of the part."""
        while not self.ids.size:
            batch = next(self.rest, None)
            if batch is None:
                return False
            self._set(*_sort(self.table.columns(batch), self.table.own(batch)))
        return True


def _read_by_id(
    parts: Sequence[Part], layout: Layout, rows: int
) -> Iterator[tuple[list[Any], dict[str, Array]]]:
    """Yield the rows of all parts ordered by id. Each part is ordered by id; overlapping parts are merged."""
    table, nothing = Table(layout), np.zeros(0, np.int64)
    firsts = [part.first_id() for part in parts]
    waiting = sorted(
        zip([-1 if first is None else first for first in firsts], range(len(parts)), strict=True),
        reverse=True,
    )
    active: list[_Stream] = []
    while waiting or active:
        while waiting and (not active or waiting[-1][0] <= min(int(s.ids[-1]) for s in active)):
            part = parts[waiting.pop()[1]]
            stream = _Stream(part.batches(rows), table, nothing, [], {})
            if stream.load():
                active.append(stream)
        if not active:
            return
        through = min(int(stream.ids[-1]) for stream in active)
        taken = [stream.take(through) for stream in active]
        active = [stream for stream in active if stream.load()]
        own = {name: np.concatenate([one[name] for _, one in taken]) for name in taken[0][1]}
        columns = [join_parts([found[place] for found, _ in taken]) for place in range(len(taken[0][0]))]
        yield _sort(columns, own)


def _sort(columns: list[Any], own: dict[str, Array]) -> tuple[list[Any], dict[str, Array]]:
    """Return rows ordered by id."""
    if (np.diff(own["_id"]) > 0).all():
        return columns, own
    order = np.argsort(own["_id"], kind="stable")
    return [pick(column, order) for column in columns], {n: values[order] for n, values in own.items()}


def _read_in_order(
    parts: Sequence[Part], layout: Layout, rows: int
) -> Iterator[tuple[list[Any], dict[str, Array]]]:
    table = Table(layout)
    for part in parts:
        for batch in part.batches(rows):
            yield table.columns(batch), table.own(batch)


class _TableRows(RowSource):
    """The rows of tables.

    Args:
        parts: The files.
        facts: Facts about the episodes; None: no file describes them.
        given: The user's mapping from names, or groups, to fields; "": left out.
        storage: Kind of the new store; None: as the columns need it.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        facts: _EpisodeFacts | None,
        given: Mapping[str, str],
        storage: Kind | None,
    ) -> None:
        if storage not in (None, "zarr", "arrow"):
            raise ArgumentError(f"storage {storage!r} is unknown; there are 'zarr', 'arrow'")
        self._parts, self._facts = parts, facts
        with self.parsing():
            self._plan = plan = _plan(parts, given, storage)
            about = plan.layout.about
            self.total = sum(part.rows for part in parts) or int(about.get("rows", 0))
            self.settings = settings_of(about, plan.schema)
        self.schema, self.notes, self.storage = plan.schema, plan.notes, plan.storage
        if "group_key" in self.settings:
            self.notes = [*self.notes, REGROUPED]
        self.names = plan.foreign.names if plan.foreign else {}
        self.capacity = about.get("capacity")
        numbered = {"_episode", "_step"} <= set(plan.layout.own)
        self._foreign = ForeignRows(plan.foreign) if plan.foreign is not None and not numbered else None
        if self._foreign is None:
            self.specs = about.get("specs") or ""
            self.above = facts.above if facts and numbered else None

    def parsing(self) -> AbstractContextManager[None]:
        """Convert Arrow's errors to StorageError."""
        return reading_arrow(self._parts[0].path)

    def warnings(self) -> Sequence[str]:
        """Return what seems wrong in the rows that were read."""
        return self._foreign.warnings() if self._foreign else []

    def pieces(self) -> Iterator[NumberedRows]:
        """Yield the rows: by id, or in the order of the files if they have no ids."""
        plan, done = self._plan, 0
        ends = _Ends(self._parts, plan.layout) if self._foreign is None and self._facts is None else None
        for values, own in _read(self._parts, plan.layout):
            count = len(values[0])
            done += count
            if self._foreign is not None:
                yield self._foreign.number(dict(enumerate(values)), count, done)
                continue
            episodes, steps = own["_episode"], own["_step"]
            _check_order(episodes, steps)
            yield NumberedRows(
                columns=plan.foreign.read(dict(enumerate(values)), count) if plan.foreign else values,
                episodes=episodes,
                steps=steps,
                done=done,
                facts=self._facts or _make_facts,
                last=None if ends is None else ends.of(episodes, steps),
                times=own.get("_time"),
                priorities=own.get("_priority"),
            )


@dataclass(frozen=True)
class _Plan:
    """What becomes of the columns of the files.

    `foreign` says which columns become which fields, unless the files describe expstore's fields.
    """

    layout: Layout
    schema: Schema
    storage: Kind
    notes: list[str]
    foreign: RowPlan | None


def _plan(parts: Sequence[Part], given: Mapping[str, str], storage: Kind | None) -> _Plan:
    if given:
        for part in parts:
            part.forget_description()
    layout = find_layout(parts, given)
    notes = [*layout.notes, *(note for part in parts for note in part.notes)]
    foreign = None
    if layout.about:
        schema = layout.schema
    else:
        _refuse_packed(parts, layout.fields)
        columns = [
            Column(split_name(f.key), np.dtype(object) if f.variable else f.numpy_dtype, f.shape, f.arrow)
            for f in layout.fields
        ]
        kept = {name: ours for name, ours in given.items() if not layout.leaves_out(name)}
        foreign = plan_rows(columns, kept)
        schema = foreign.schema
        notes += foreign.notes
    if storage == "zarr":
        layout.check_fixed(schema)
    elif schema.variable:
        storage = "arrow"
    return _Plan(layout, schema, storage or "zarr", list(dict.fromkeys(notes)), foreign)


def _read(parts: Sequence[Part], layout: Layout) -> Iterator[tuple[list[Any], dict[str, Array]]]:
    """Yield the rows of all parts: by id, or in the order of the files if they have no ids."""
    row_bytes = sum(entry.row_bytes for entry in layout.fields)
    size = rows_at_once(parts, row_bytes, loose=any(entry.variable for entry in layout.fields))
    yield from (_read_by_id if "_id" in layout.own else _read_in_order)(parts, layout, size)


def _refuse_packed(parts: Sequence[Part], fields: Sequence[Field]) -> None:
    """Raise SchemaError for files in which RLlib packed values that only it can read.

    Source: ray.rllib.offline.offline_env_runner (2.x), with `output_write_episodes`, whose rows are episodes
    in MessagePack, and `output_compress_columns`, whose values are pickles compressed by LZ4, in base64.
    """
    recipe = "record with config.offline_data(output_write_episodes=False, output_compress_columns=[])"
    kinds = {key_name(f.key): describe(f.arrow) for f in fields if f.variable}
    if len(fields) == 1 and kinds.get("item") in ("binary", "large_binary"):
        raise SchemaError(f"{parts[0].path} holds packed episodes of RLlib, which are not read", hint=recipe)
    names = [name for name in _PACKED_COLUMNS if kinds.get(name) in ("string", "large_string")]
    if not names:
        return
    for batch in parts[0].batches(1, names):
        for name in names:
            if str(batch.column(batch.schema.get_field_index(name))[0].as_py()).startswith(_LZ4_FRAME):
                raise SchemaError(
                    f"{name!r} holds compressed pickles of RLlib, which are not read", hint=recipe
                )
        return


def _check_order(episodes: IntArray, steps: IntArray) -> None:
    """Raise SchemaError if a step of an episode comes after a later one; episodes may interleave."""
    order = np.argsort(episodes, kind="stable")
    same = episodes[order[1:]] == episodes[order[:-1]]
    wrong = np.flatnonzero(same & (steps[order[1:]] < steps[order[:-1]]))
    if wrong.size:
        before, after = order[wrong[0]], order[wrong[0] + 1]
        raise SchemaError(
            f"step {steps[after]} of episode {episodes[after]} comes after step {steps[before]}",
            hint="sort the rows by _episode and _step, or leave the column _step out",
        )


def find_layout(parts: Sequence[Part], given: Mapping[str, str]) -> Layout:
    """Return the common layout of all parts.

    Args:
        parts: The files.
        given: The user's mapping from names to fields.

    Raises:
        SchemaError: A column cannot be a field, or parts have different columns.
    """
    survey = Survey()
    for part in parts:
        names = []
        for name in needs_survey(part.schema):
            if part.is_full(name):
                survey.note_full(name)
            else:
                names.append(name)
        if names:
            for batch in part.batches(rows_at_once(parts, 0, loose=True), names):
                survey.look(batch.select(names))
    layout = read_layout(parts[0].schema, survey, given)
    for part in parts[1:]:
        other = read_layout(part.schema, survey, given)
        if other.fields != layout.fields:
            raise SchemaError(f"{part.path} has {other.schema!r}, and {parts[0].path} {layout.schema!r}")
    return layout


def rows_at_once(parts: Sequence[Part], row_bytes: int, *, loose: bool) -> int:
    """Return how many rows to read at a time."""
    size = max(1, piece_rows(max(row_bytes, *(part.row_bytes() for part in parts), 0)) // 4)
    return min(size, LOOSE_ROWS) if loose else size
