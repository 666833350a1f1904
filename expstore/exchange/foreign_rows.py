"""Rows of files that other programs wrote: which column becomes which field, and where episodes begin.

Used by the imports of all flat formats (NPZ, HDF5, Parquet, Arrow, CSV). `SYNONYMS` has the names that
programs give to the parts of a transition. `plan_rows` decides by names, dtypes and shapes alone;
`ForeignRows` then converts the rows, piece by piece. `find_lanes` recognises files that hold a ring buffer:
only some rows are filled, and the oldest is not the first. This module opens no files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from expstore.core.bfloat16 import narrow_to_bfloat16, widen_bfloat16
from expstore.core.values import Array, IntArray, Key, key_name
from expstore.episodes.facts import pack_info
from expstore.episodes.segmentation import OPEN, RowFacts, to_trajectory_ids
from expstore.errors import SchemaError
from expstore.exchange.fill import Facts, NumberedRows, parse_field
from expstore.schema.arrow_types import describe
from expstore.schema.field_roles import Keys, find_keys
from expstore.schema.row_selection import pick
from expstore.schema.schema import ARROW, DTYPES, Field, Schema

# -- names --------------------------------------------------------------------------------------------

#: The field with the ids of episodes. A store takes it for the trajectory ids of its rows.
EPISODE: Key = ("episode",)
#: Each field, or group of fields, and its names in files, in lower case. Exports write the first name, which
#: is D4RL's if D4RL has the field. Other names are those of Gym, Spinning Up, Stable-Baselines3, Tianshou,
#: CleanRL, RLlib and TorchRL.
SYNONYMS: Mapping[Key, tuple[str, ...]] = {
    ("observation",): ("observations", "observation", "obs"),
    ("action",): ("actions", "action", "act", "acts"),
    ("next", "reward"): ("rewards", "reward", "rew", "rews"),
    ("next", "terminated"): ("terminals", "terminal", "terminated", "terminateds", "terminations"),
    ("next", "truncated"): ("timeouts", "timeout", "truncated", "truncateds", "truncations"),
    ("next", "observation"): (
        *("next_observations", "next_observation", "next_obs", "new_observations", "new_observation"),
        *("new_obs", "obs_next", "observations_next", "observation_next", "obs2"),
    ),
    ("info",): ("infos", "info"),
    # d3rlpy 1.x marks every end by episode_terminals, and some by terminals, too.
    ("next", "done"): ("dones", "done", "episode_terminals"),
    EPISODE: ("episode", "episodes", "episode_id", "episode_ids", "eps_id"),
}
#: Names that stand for a field only in files that have no other name for it: a robot's file may have
#: observations and, as another field, the state. `episode_index` is LeRobot's.
_FALLBACKS: Mapping[Key, tuple[str, ...]] = {
    ("observation",): ("state", "states"),
    ("next", "observation"): ("next_state", "next_states"),
    EPISODE: ("episode_index",),
}
#: Columns, in lower case, that count the steps: an episode begins where they are 0, or less than before.
TIMES = ("t", "step", "step_count")
#: Fields with one value per row: shape `(1,)` in a store, `()` in a file. All but the first are flags.
SCALARS: tuple[Key, ...] = (
    ("next", "reward"),
    ("next", "terminated"),
    ("next", "truncated"),
    ("next", "done"),
)
FLAGS = SCALARS[1:]
#: Spinning Up's arrays are called obs_buf, act_buf, ...
_BUFFER = "_buf"


def check_paths(paths: Iterable[Key], *, taken: str = "") -> None:
    """Raise SchemaError if two fields would have the same name in a file, or one the name of a group.

    Args:
        paths: Groups and name of each field.
        taken: A name that is taken.
    """
    names = ["/".join(path) for path in paths]
    for name in names:
        if name == taken or names.count(name) > 1 or any(other.startswith(name + "/") for other in names):
            raise SchemaError(
                f"two fields would both be named {name!r} in the file", hint="choose the fields to export"
            )


def split_name(path: Key) -> Key:
    """Return a path with dots in its names as groups: other programs write the column next.reward.

    >>> from expstore.exchange.foreign_rows import split_name
    >>> split_name(("next.reward",)), split_name(("v1.",))
    (('next', 'reward'), ('v1.',))
    """
    parts = tuple(part for name in path for part in name.split("."))
    return parts if all(parts) else path


def _invert(names: Mapping[Key, tuple[str, ...]]) -> dict[str, Key]:
    return {theirs: ours for ours, synonyms in names.items() for theirs in synonyms}


_FIELDS, _FALLBACK_FIELDS = _invert(SYNONYMS), _invert(_FALLBACKS)


def their_path(key: Key) -> Key:
    """Return the path of a field in files: groups, then the name.

    >>> from expstore.exchange.foreign_rows import their_path
    >>> their_path(("next", "observation", "pixels")), their_path(("next", "reward"))
    (('next_observations', 'pixels'), ('rewards',))
    """
    named = (ours for ours in SYNONYMS if ours != EPISODE and key[: len(ours)] == ours)
    best = max(named, key=len, default=None)
    return key if best is None else (SYNONYMS[best][0], *key[len(best) :])


def name_fields(paths: Sequence[Key], given: Mapping[str, str]) -> dict[Key, Key | None]:
    """Return the field of each path in a file; None for a path that the user leaves out.

    Names of the table are understood at the top of the file and in a group `next`, in any case. A name at the
    top keeps its meaning of TorchRL's layout, a value of the state before the step, if `next` has the value
    after it: with `next.done` in the file, `done` is the field `done`.

    Args:
        paths: The paths: groups, then the name.
        given: The user's mapping from names, or groups, to fields, as in `{"rew": "next.reward"}`; "": left
            out. The rest of the paths follows the table.

    Raises:
        SchemaError: The mapping contains a name that is not in the file, or two paths stand for one field.

    >>> from expstore.exchange.foreign_rows import name_fields
    >>> name_fields([("obs",), ("Done",), ("speed",)], {})
    {('obs',): ('observation',), ('Done',): ('next', 'done'), ('speed',): ('speed',)}
    """
    given = _find_names(given, paths)
    found: dict[Key, Key | None] = {}
    for path in paths:
        mapped, ours = _find_mapping(path, given)
        found[path] = ours if mapped else _by_table(path, _FIELDS)
    fields = set(found.values())
    after = {key for path, key in found.items() if path[0] == "next"}
    for path, key in found.items():
        if path[0] == "next" or key is None or _find_mapping(path, given)[0]:
            continue
        if key in after or (key in FLAGS and after.intersection(FLAGS)):
            found[path] = path  # TorchRL's layout: the value before the step
        elif key == path and (other := _by_table(path, _FALLBACK_FIELDS)) != path:
            top = other[:2] if other[0] == "next" else other[:1]
            if not any(one is not None and one[: len(top)] == top for one in fields):
                found[path] = other
    check_keys(key for key in found.values() if key is not None)
    return found


def _find_mapping(path: Key, given: Mapping[str, str]) -> tuple[bool, Key | None]:
    """Return whether the user mapped a path, and its field."""
    for length in range(len(path), 0, -1):
        name = "/".join(path[:length])
        if name in given:
            ours = given[name]
            return True, (*ours.split("."), *path[length:]) if ours else None
    return False, None


def _by_table(path: Key, table: Mapping[str, Key]) -> Key:
    """Return the field of a path according to a table of names; the path itself if no name fits."""
    place = 1 if path[0] == "next" and len(path) > 1 else 0
    name = path[place].lower()
    ours = table.get(name) or table.get(name.removesuffix(_BUFFER))
    if ours is None or (ours == EPISODE and (place or len(path) > 1)):
        return path
    if place and ours[0] != "next":
        ours = ("next", *ours)
    return (*ours, *path[place + 1 :])


def _find_names(given: Mapping[str, str], paths: Iterable[Key]) -> dict[str, str]:
    """Return the user's mapping with groups separated by /; users may write dots.

    Raises:
        SchemaError: A name is not in the file.
    """
    known = {"/".join(path[:length]) for path in paths for length in range(1, len(path) + 1)}
    found = {}
    for theirs, ours in given.items():
        name = next((one for one in (theirs, theirs.replace(".", "/")) if one in known), None)
        if name is None:
            raise SchemaError(f"there is no {theirs!r} to map", hint="there are " + ", ".join(sorted(known)))
        found[name] = ours
    return found


def check_keys(keys: Iterable[Key]) -> None:
    """Raise SchemaError if two names in the file stand for the same field."""
    seen: set[Key] = set()
    for key in keys:
        if key in seen:
            raise SchemaError(
                f"two of the file's names stand for {key_name(key)!r}",
                hint="map one to another field, or leave it out: --map NAME=",
            )
        seen.add(key)


# -- fields and episodes ------------------------------------------------------------------------------

_EXPORTED_EPISODE: Key = ("_episode",)
_EXPORTED_SPLIT: Key = ("_split",)
_TRAJECTORY: Key = ("collector", "traj_ids")
_MASK: Key = ("collector", "mask")
#: Fields that a batch has besides the rows' own: a stored field of this name would be replaced in batches.
_OF_BATCHES: tuple[Key, ...] = (("id",), ("index",))
_NUMERIC = {str(kind): name for name, kind in DTYPES.items() if kind.kind in "biufc" and name != "bfloat16"}
#: How many rows are read at a time to find the first end of an episode.
_SEAM_ROWS = 4096
#: From this number of values on, observations of integers are hardly equal by chance.
_MANY_VALUES = 16
#: A column of a vector: obs_0, obs.0 or obs[0].
_NUMBERED = re.compile(r"(.+?)[_.\[ ](\d+)\]?")


@dataclass(frozen=True)
class Column:
    """One column, or named array, of a file.

    Args:
        path: The groups that contain it, then its name.
        dtype: NumPy dtype of the values; object for text in HDF5 files and for variable-length values.
        shape: Shape of one row.
        arrow: Text of the Arrow type of variable-length values; "" for arrays of one shape.
    """

    path: Key
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    arrow: str = ""

    @property
    def name(self) -> str:
        """The path as users write it."""
        return "/".join(self.path)

    @property
    def row_bytes(self) -> int:
        """Number of bytes of a row."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class _FieldSource:
    """A field, and the positions of the columns that it is read from: several are joined into a vector."""

    field: Field
    columns: tuple[int, ...]


@dataclass(frozen=True)
class RowPlan:
    """What the columns of a file become.

    Args:
        columns: All columns of the file.
        sources: The fields with the columns that they are read from.
        ids: Position of the column with the ids of episodes, or None.
        names: The columns that become fields of another name, and their fields; "" for ids that are not
            stored with the rows.
        notes: Descriptions of what is left out.
    """

    columns: Sequence[Column]
    sources: Sequence[_FieldSource]
    ids: int | None
    names: Mapping[str, str]
    notes: Sequence[str]

    @property
    def schema(self) -> Schema:
        """The fields."""
        return Schema([source.field for source in self.sources])

    @property
    def positions(self) -> list[int]:
        """The positions of the columns that are read, in ascending order."""
        found = {place for source in self.sources for place in source.columns}
        return sorted(found if self.ids is None else {*found, self.ids})

    def read(self, columns: Mapping[int, Any], count: int) -> list[Any]:
        """Return the values of the fields, in their order. Shapes `(count, *row shape)`.

        Args:
            columns: The values of the wanted columns, by position.
            count: Number of rows.

        Raises:
            SchemaError: A flag is neither 0 nor 1.
        """
        found: list[Any] = []
        for source in self.sources:
            if len(source.columns) == 1:
                (place,) = source.columns
                found.append(from_stored(source.field, columns[place], count, self.columns[place].name))
            else:
                parts = [np.asarray(columns[place]).reshape(count) for place in source.columns]
                found.append(np.stack(parts, axis=1).astype(source.field.numpy_dtype))
        return found


def plan_rows(columns: Sequence[Column], given: Mapping[str, str]) -> RowPlan:
    """Decide what the columns of another program's file become.

    Args:
        columns: The columns of the file.
        given: The user's mapping from names, or groups, to fields; "": left out.

    Raises:
        SchemaError: A column cannot be a field, the mapping contains a name that is not in the file, or two
            columns stand for one field.
    """
    vectors = _find_vectors(columns, given)
    joined = {place for places in vectors.values() for place in places}
    places = {column.path: place for place, column in enumerate(columns) if place not in joined}
    stems: dict[Key, list[int]] = {(stem,): found for stem, found in vectors.items()}
    keys = name_fields([*places, *stems], given)
    ids = next((places[path] for path in (_EXPORTED_EPISODE, _TRAJECTORY) if path in places), None)
    sources: list[_FieldSource] = []
    names: dict[str, str] = {}
    notes: list[str] = []
    for path, key in keys.items():
        if key is None:
            notes.append(f"{'/'.join(path)!r} is left out")
            continue
        if path in stems:
            members = [columns[place] for place in stems[path]]
            whole = np.result_type(*(member.dtype for member in members))
            column = Column(path, whole, (len(members),))
            sources.append(_FieldSource(to_field(key, column), tuple(stems[path])))
            names[f"{members[0].name} ... {members[-1].name}"] = key_name(key)
            continue
        column = columns[places[path]]
        if key in _OF_BATCHES and key == path:
            notes.append(
                f"{column.name!r} is left out, as batches have an {key[0]!r} of their own; "
                f"--map {column.name}=row_{key[0]} keeps it"
            )
            continue
        if ids is None and key == EPISODE:
            ids = places[path]
        if path in (_EXPORTED_EPISODE, _EXPORTED_SPLIT):
            continue
        if key == EPISODE and places[path] == ids and not _is_integer(column):
            names[column.name] = ""  # each episode's info has the id
            continue
        sources.append(_FieldSource(to_field(key, column), (places[path],)))
        if key != path:
            names[column.name] = key_name(key)
    if not sources:
        raise SchemaError(
            "the file has no array that can be a field", hint="use numbers, text, or lists of these"
        )
    return RowPlan(columns, sources, ids, names, notes)


def _is_integer(column: Column) -> bool:
    """Return whether a column can be trajectory ids; pandas has ids as floats if one was missing once."""
    return column.dtype.kind in "iuf" and math.prod(column.shape) == 1


def _find_vectors(columns: Sequence[Column], given: Mapping[str, str]) -> dict[str, list[int]]:
    """Return numbered columns of numbers that are one vector, by their common name, in their order.

    Only names that stand for observations and actions count (obs_0, obs_1, ...), from 0 or 1 without holes,
    and only if the user maps none of them.
    """
    numbered: dict[str, dict[int, int]] = {}
    for place, column in enumerate(columns):
        parts = _NUMBERED.fullmatch(column.name)
        if parts and column.name not in given:
            numbered.setdefault(parts[1], {})[int(parts[2])] = place
    tops = {column.path[0] for column in columns}
    found: dict[str, list[int]] = {}
    for stem, places in numbered.items():
        (key,) = name_fields([(stem,)], {}).values()
        first, last = min(places), max(places)
        whole = last - first + 1 == len(places) > 1 and first in (0, 1)
        named = stem not in tops and key in (("observation",), ("action",), ("next", "observation"))
        members = [columns[places[number]] for number in sorted(places)]
        if whole and named and not any(member.shape for member in members):
            for member in members:
                if member.dtype.kind not in "biuf":
                    raise SchemaError(
                        f"{member.name!r} is not a number in every row, but part of the vector {stem!r}",
                        hint=f"correct the file, or leave the column out: --map {member.name}=",
                    )
            found[stem] = [places[number] for number in sorted(places)]
    return found


def to_field(key: Key, column: Column, known: Mapping[str, Any] | None = None) -> Field:
    """Return the field for a column of a file.

    Args:
        key: Key of the field in the store.
        column: The column of the file.
        known: The description of the field, if expstore exported the file.

    Raises:
        SchemaError: The column cannot be a field.
    """
    kind = str(column.dtype.newbyteorder("<")) if column.dtype.kind in "biufc" else ""
    if known is not None:
        entry = parse_field(known)
        stored = to_column(entry)
        if (stored.dtype, stored.shape) == (column.dtype.newbyteorder("<"), column.shape):
            return entry
    shape = column.shape
    if key in SCALARS:
        if column.arrow:
            raise SchemaError(
                f"{column.name!r} holds {describe(column.arrow)} or rows without a value, but "
                f"{key_name(key)!r} is a number in every row",
                hint=f"correct the file, or import the column as it is: --map {column.name}=its_{key[-1]}",
            )
        if math.prod(shape) != 1:
            raise SchemaError(
                f"{column.name!r} has {list(shape)} values per row, but {key_name(key)!r} has one",
                hint="a row is one step: if rows are episodes, unnest their lists first",
            )
        shape = (1,)
        kind = "bool" if key in FLAGS and kind else kind
    elif column.arrow:
        return Field(key, ARROW, (), column.arrow)
    elif key == EPISODE and _is_integer(column):
        shape, kind = (), "int64" if column.dtype.kind == "f" else kind
    if kind not in _NUMERIC:
        raise SchemaError(
            f"{column.name!r} holds values of type {column.dtype}, which a field cannot have",
            hint=f"leave it out with --map {column.name}=",
        )
    return Field(key, _NUMERIC[kind], shape)


def to_column(entry: Field) -> Column:
    """Return the column that a flat file has for a field."""
    shape = () if entry.key in SCALARS and entry.shape == (1,) else entry.shape
    return Column(their_path(entry.key), dtype_in_files(entry), shape)


def dtype_in_files(entry: Field) -> np.dtype[Any]:
    """Return the dtype that a field has in files: NumPy has no bfloat16."""
    return np.dtype("<f4") if entry.dtype == "bfloat16" else entry.numpy_dtype


def to_stored(entry: Field, column: Array) -> Array:
    """Convert values of a field to the dtype that it has in files."""
    return widen_bfloat16(column) if entry.dtype == "bfloat16" else column


def from_stored(entry: Field, values: Any, count: int, name: str = "") -> Any:
    """Convert values of a file to the dtype and shape of their field.

    Args:
        entry: The field.
        values: The values; an Arrow array for a variable-length field. Shape `(count, ...)`.
        count: Number of rows.
        name: Name of the column in the file, for messages.

    Raises:
        SchemaError: A flag is neither 0 nor 1.
    """
    if entry.variable:
        return values
    if entry.dtype == "bfloat16":
        values = narrow_to_bfloat16(values)
    elif entry.dtype == "bool" and values.dtype != np.bool_:
        wrong = ~((values == 0) | (values == 1))
        if wrong.any():
            raise SchemaError(
                f"{name or key_name(entry.key)!r} is read as a flag, but has the value {values[wrong][0]}",
                hint=f"flags are 0 or 1; --map {name}=its_{entry.key[-1]} imports the column as it is",
            )
        values = values == 1
    return np.ascontiguousarray(values, entry.numpy_dtype).reshape(count, *entry.shape)


def is_text(arrow: str) -> bool:
    """Return whether a variable-length field has text, by its type."""
    return arrow != "" and describe(arrow) in ("string", "large_string")


def rows_differ(first: Array, second: Array) -> Array:
    """Return a mask of the rows in which two arrays differ; NaN equals NaN. Shape `(n,)`, bool."""
    if first.dtype != second.dtype:  # the narrower one was rounded
        kind = min(first.dtype, second.dtype, key=lambda one: one.itemsize)
        first, second = first.astype(kind), second.astype(kind)
    different = first != second
    if first.dtype.kind in "fc":
        different &= ~((first != first) & (second != second))
    return np.asarray(different.any(axis=tuple(range(1, different.ndim))))


@dataclass(slots=True)
class _Last:
    """The last row of an episode that may continue: episode, step, and value of the step counter."""

    episode: int
    step: int
    time: float


class ForeignRows:
    """Convert rows of another program, and find the episodes they belong to.

    An episode begins at another id of the column with ids; after an end flag; where the step counter is 0 or
    less than before; where a flag says so (`is_init`); and, without ids, where the next observation of a row
    is not the observation of the following row. Rows with one id may be interleaved with others.

    Threads, processes: one.

    Args:
        plan: What the columns become.
    """

    def __init__(self, plan: RowPlan) -> None:
        self._plan, schema = plan, plan.schema
        places = {entry.key: place for place, entry in enumerate(schema.fields)}
        self._roles = find_keys(schema)
        self._flags = RowFacts(schema, self._roles)
        starts = [(key,) for key in ("is_init", "is_first")]
        self._start = next((places[key] for key in starts if self._is_scalar(schema, key)), None)
        times = [
            entry.key for entry in schema.fields if entry.key[0].lower() in TIMES and len(entry.key) == 1
        ]
        self._time = next((places[key] for key in times if self._is_scalar(schema, key)), None)
        named = plan.ids is not None
        self._pairs = [] if named else _find_pairs(schema, places)
        self._trajectory, self._mask = places.get(_TRAJECTORY), places.get(_MASK)
        self._open: dict[int, _Last] = {}
        self._labels: dict[str, int] = {}
        self._texts: list[str] = []
        self._episode_codes: list[int] = [0]
        self._after: list[Array] | None = None
        self._previous = 0
        self._source: str | None = None
        self._rows = self._apart = self._returns = self._skips = self._left_out = self._zeros = 0
        self._warnings: list[str] = []

    @staticmethod
    def _is_scalar(schema: Schema, key: Key) -> bool:
        return key in schema and schema[key].row_items == 1 and schema[key].numpy_dtype.kind in "biuf"

    def begin_lane(self, source: str | None) -> None:
        """Begin the rows of another environment, which continue no episode.

        Args:
            source: Name of the source of the rows; None: the import's own source.
        """
        self._source = source
        self._open.clear()
        self._after = None

    def find_seam(self, read: Callable[[int, int], Mapping[int, Any]], rows: int) -> int:
        """Return the row after the first end of an episode, if the last row continues in the first one.

        The file is then a ring buffer whose position is unknown. Read from a row after an end, its episodes
        are whole. Only observations of floats, or of many values, tell: others are equal by chance.

        Args:
            read: Returns the wanted columns of some rows: from a row, a number of rows.
            rows: Number of rows of the file.

        Returns:
            0 if the file is read from its first row.
        """
        if not self._pairs or rows < 3:
            return 0
        first, last = self._plan.read(read(0, 1), 1), self._plan.read(read(rows - 1, 1), 1)
        for now, after in self._pairs:
            entry = self._plan.sources[now].field
            if entry.numpy_dtype.kind != "f" and entry.row_items < _MANY_VALUES:
                return 0
            same = rows_differ(first[now], last[now])  # a constant observation tells nothing
            if rows_differ(last[after], first[now])[0] or not same[0]:
                return 0
        for start in range(0, rows, _SEAM_ROWS):
            count = min(_SEAM_ROWS, rows - start)
            ends = np.flatnonzero(self._read_ends(self._plan.read(read(start, count), count)))
            if ends.size:
                begin = start + int(ends[0]) + 1
                if begin < rows:
                    self._warnings.append(
                        "the last row continues in the first one, as in a ring buffer that is full: the rows "
                        f"are read from row {begin:,} on, which follows the first end of an episode"
                    )
                return begin % rows
        return 0

    def number(self, columns: Mapping[int, Any], count: int, done: int) -> NumberedRows:
        """Return the next rows with their episodes, without those that are no transitions.

        Args:
            columns: The values of the wanted columns, by position. Shapes `(count, *row shape)`.
            count: Number of rows.
            done: Number of rows that were read so far, with these.
        """
        plan = self._plan
        fields = plan.read(columns, count)
        ids = None if plan.ids is None else self._read_ids(columns[plan.ids])
        keep = self._transitions(fields, count)
        if keep is not None:
            self._left_out += count - int(np.count_nonzero(keep))
            fields = [pick(column, keep) for column in fields]
            ids, count = None if ids is None else ids[keep], int(np.count_nonzero(keep))
        if not count:
            nothing = np.zeros(0, np.int64)
            return NumberedRows(columns=fields, episodes=nothing, steps=nothing, done=done)
        self._rows += count
        ends = self._read_ends(fields)
        self._count_zeros(fields)
        episodes, steps = self._number(fields, ids, ends)
        return NumberedRows(
            columns=fields, episodes=episodes, steps=steps, done=done, facts=self._facts, last=ends
        )

    def warnings(self) -> list[str]:
        """Return what in the rows seems wrong or was left out."""
        found = list(self._warnings)
        if self._zeros > 1:
            found.append(
                f"the last {self._zeros:,} rows are 0 in every field: if they are unused room of a buffer, "
                "save the filled rows alone"
            )
        if self._left_out:
            found.append(
                f"{self._left_out:,} rows are no transitions (trajectory id -1, or mask 0) and left out"
            )
        if self._apart > max(1, self._rows // 2):
            found.append(
                f"in {self._apart:,} of {self._rows:,} rows the next observation is not the "
                "observation of the following row: the rows are shuffled or n-step transitions, and each "
                "became an episode"
            )
        certain = (
            self._time is not None or self._roles.terminated or self._roles.truncated or self._roles.done
        )
        for source in self._plan.sources:
            key = source.field.key
            if key[0] in ("observation", "action") and is_text(source.field.arrow):
                found.append(f"{key_name(key)!r} is text, not numbers")
        if self._returns and not certain:
            found.append(
                f"ids of episodes come again after other ids in {self._returns:,} places: rows of one id are "
                "one episode. If programs used the same ids, import their rows separately"
            )
        if self._skips:
            found.append(
                f"the step counter skips values in {self._skips:,} places: rows of these episodes are missing"
            )
        return found

    def _read_ends(self, fields: Sequence[Any]) -> Array:
        """Return which rows end an episode. Shape `(n,)`, bool."""
        terminated, truncated, _ = self._flags.read(fields)
        ends = np.zeros(len(fields[0]), bool)
        for flags in (terminated, truncated):
            if flags is not None:
                ends |= flags
        return ends

    def _count_zeros(self, fields: Sequence[Any]) -> None:
        """Count the rows at the end in which all values are 0."""
        arrays = [column for column in fields if isinstance(column, np.ndarray)]
        if len(arrays) < len(fields) or any(column[-1].any() for column in arrays):
            self._zeros = 0
            return
        filled = np.zeros(len(arrays[0]), bool)
        for column in arrays:
            filled |= column.reshape(len(column), -1).any(1)
        rows = np.flatnonzero(filled)
        self._zeros = len(filled) - 1 - int(rows[-1]) if rows.size else self._zeros + len(filled)

    # -- columns -------------------------------------------------------------------------------

    def _transitions(self, fields: Sequence[Any], count: int) -> Array | None:
        """Return which rows are transitions, by fields of TorchRL's collectors; None: all. Shape `(n,)`."""
        keep = np.ones(count, bool)
        if self._trajectory is not None:
            keep &= fields[self._trajectory].reshape(-1) != -1
        if self._mask is not None:
            keep &= fields[self._mask].reshape(-1).astype(bool)
        return None if keep.all() else keep

    def _read_ids(self, values: Any) -> IntArray:
        """Return a number for the id of each row. Shape `(n,)`, int64."""
        place = self._plan.ids or 0
        column = self._plan.columns[place]
        if isinstance(values, pa.Array | pa.ChunkedArray):
            if values.null_count:
                raise SchemaError(
                    f"{column.name!r} has rows without an id of an episode",
                    hint=f"fill them in, or do not use the column: --map {column.name}=its_episode",
                )
            values = np.asarray(values.to_pylist(), object)
        values = np.asarray(values).reshape(-1)
        if values.dtype.kind in "biuf":
            return to_trajectory_ids(Keys(trajectory=column.path), values)
        texts = [
            one.decode(errors="replace") if isinstance(one, bytes) else str(one) for one in values.tolist()
        ]
        for text in texts:
            if text not in self._labels:
                self._labels[text] = len(self._texts)
                self._texts.append(text)
        return np.array([self._labels[text] for text in texts], np.int64)

    def _facts(self, episode: int) -> Facts:
        """Return what is known about an episode: its id, which keeps it apart from interleaved episodes."""
        if self._plan.ids is None:
            return Facts(length=-1, status=OPEN, source=self._source)
        code = self._episode_codes[episode]
        info = ""
        if self._texts:
            info = pack_info({self._plan.columns[self._plan.ids].path[-1]: self._texts[code]})
        return Facts(length=-1, status=OPEN, source=self._source, trajectory=code, info=info)

    # -- episodes ------------------------------------------------------------------------------

    def _number(self, fields: Sequence[Any], ids: IntArray | None, ends: Array) -> tuple[IntArray, IntArray]:
        """Return the episode and the step of each row. Shapes `(n,)`, int64."""
        count = len(ends)
        codes = np.zeros(count, np.int64) if ids is None else ids
        order = np.argsort(codes, kind="stable")  # rows of one id side by side
        codes = codes[order]
        heads = np.append(True, codes[1:] != codes[:-1])
        begins = np.append(False, ends[order][:-1]) & ~heads
        time = None if self._time is None else fields[self._time].reshape(-1)[order].astype(np.float64)
        if self._start is not None:
            begins |= fields[self._start].reshape(-1)[order].astype(bool)
        if time is not None:
            before = np.append(time[:1], time[:-1])
            falls = ~heads & ~begins & (time < before)
            # With ids, a counter that falls to 0 or 1 begins another episode; else rows are out of order.
            if ids is not None and (wrong := np.flatnonzero(falls & (time > 1))).size:
                raise self._build_order_error(int(codes[wrong[0]]), time[wrong[0]], before[wrong[0]])
            begins |= falls | ((time == 0) & time.any())
            self._skips += int(np.count_nonzero(~heads & ~begins & (time > before + self._stride(time))))
        if self._pairs:  # without ids all rows are in their order
            apart = self._find_apart(fields)
            self._apart += int(np.count_nonzero(apart & ~begins))
            begins |= apart
        # Numbers of new episodes, in this order; the first run of an id may continue one.
        runs = heads | begins
        first = np.flatnonzero(runs)
        episodes, offsets = np.empty(first.size, np.int64), np.zeros(first.size, np.int64)
        stops = np.append(first[1:], count) - 1
        for run, (row, stop) in enumerate(zip(first.tolist(), stops.tolist(), strict=True)):
            code = int(codes[row])
            last = self._open.get(code)
            if last is not None and time is not None and time[row] < last.time and not begins[row]:
                if ids is not None and time[row] > 1:
                    raise self._build_order_error(code, time[row], last.time)
                last = None
            if last is None or begins[row]:
                episodes[run] = len(self._episode_codes)
                self._episode_codes.append(code)
            else:
                episodes[run], offsets[run] = last.episode, last.step + 1
                self._returns += order[row] != 0 or code != self._previous
            if ends[order[stop]]:
                self._open.pop(code, None)
            else:
                reached = 0.0 if time is None else float(time[stop])
                self._open[code] = _Last(int(episodes[run]), int(offsets[run]) + stop - row, reached)
        lengths = stops - first + 1
        steps = np.arange(count) - np.repeat(first - offsets, lengths)
        self._returns += int(np.count_nonzero((np.diff(order) != 1) & ~runs[1:]))
        self._previous = int(codes[np.argmax(order)])
        found, at = np.empty(count, np.int64), np.empty(count, np.int64)
        found[order], at[order] = np.repeat(episodes, lengths), steps
        return found, at

    def _build_order_error(self, code: int, step: float, before: float) -> SchemaError:
        episode = repr(self._texts[code]) if self._texts else code
        return SchemaError(
            f"step {step:g} of episode {episode} comes after its step {before:g}",
            hint="sort the rows by episode and step; or do not use the ids: "
            f"--map {self._plan.columns[self._plan.ids or 0].name}=its_episode",
        )

    def _stride(self, time: Array) -> float:
        """Return the usual distance of the step counter; infinite for a counter that is a clock."""
        steps = np.diff(time)
        steps = steps[steps > 0]
        if not steps.size:
            return np.inf
        usual = float(np.median(steps))
        return usual if np.count_nonzero(steps == usual) > 0.9 * steps.size else np.inf

    def _find_apart(self, fields: Sequence[Any]) -> Array:
        """Return the rows whose observation is not the next observation of the row before. Shape `(n,)`."""
        apart = np.zeros(len(fields[0]), bool)
        for number, (now, after) in enumerate(self._pairs):
            before = fields[after][:-1]
            if self._after is not None:
                before = np.concatenate([self._after[number], before])
            apart[len(apart) - len(before) :] |= rows_differ(before, fields[now][len(apart) - len(before) :])
        self._after = [fields[after][-1:].copy() for _, after in self._pairs]
        return apart


def _find_pairs(schema: Schema, places: Mapping[Key, int]) -> list[tuple[int, int]]:
    """Return the positions of observations and of the next observations that belong to them."""
    found = []
    for key, place in places.items():
        after = places.get(("next", *key))
        if key[0] != "observation" or after is None:
            continue
        now, then = schema[key], schema["next", *key]
        if not now.variable and not then.variable and now.shape == then.shape:
            found.append((place, after))
    return found


# -- ring buffers -------------------------------------------------------------------------------------
#
# Files of NPZ and HDF5 hold them in these forms:
#
# - Spinning Up, `ReplayBuffer` (spinup/algos/pytorch/sac/sac.py): single values `ptr`, `size`, `max_size`;
# - Stable-Baselines3, `ReplayBuffer`: `pos` and `full`, and arrays of shape `(rows, environments, ...)`;
# - Tianshou, `ReplayBuffer.save_hdf5` (2.0): arrays in the group `_meta`, with the attributes `_size` and
#   `_insertion_idx` (1.x: `_index`) of the file; a `VectorReplayBuffer` has one ring after the other, whose
#   first rows, lengths and last written rows are `_offset`, `_lengths` and `last_index`.

#: Ranges of filled rows (first, one after the last) in the order of time, for each environment.
Lanes = list[list[tuple[int, int]]]
#: Names of the next row to write, and of the number of filled rows.
_POSITIONS = ("ptr", "pos", "_insertion_idx", "_index")
_SIZES = ("size", "_size")


def find_lanes(scalars: Mapping[str, float], rows: int) -> Lanes:
    """Return the filled rows of a ring buffer.

    Args:
        scalars: The single values in the file by name.
        rows: Number of rows of the arrays.

    Returns:
        [] if the file holds no ring buffer.

    Raises:
        SchemaError: The values do not fit the arrays.
    """
    position = next((int(scalars[name]) for name in _POSITIONS if name in scalars), None)
    size = next((int(scalars[name]) for name in _SIZES if name in scalars), None)
    if size is None and "full" in scalars and position is not None:
        size = rows if scalars["full"] else position
    if size is None or (position is None and size >= rows):
        return []
    return [_fit(0, rows, size if position is None else position, size)]


def tianshou_lanes(facts: Mapping[str, Any], rows: int) -> Lanes:
    """Return the filled rows of a buffer of Tianshou.

    Args:
        facts: The attributes and arrays of the file outside of `_meta`, by name.
        rows: Number of rows of the arrays.

    Raises:
        SchemaError: The values do not fit the arrays.
    """
    if "_offset" not in facts:
        return find_lanes(
            {name: float(facts[name]) for name in (*_POSITIONS, *_SIZES) if name in facts}, rows
        )
    offsets, sizes, newest = (
        [int(value) for value in facts[name]] for name in ("_offset", "_lengths", "last_index")
    )
    ends = [*offsets[1:], rows]
    return [
        _fit(offset, end, last + 1 - offset, size)
        for offset, end, size, last in zip(offsets, ends, sizes, newest, strict=True)
        if size
    ]


def describe_lanes(lanes: Lanes, scalars: Iterable[str]) -> list[str]:
    """Return notes: that a ring buffer is read from its oldest row, or which single values are left out."""
    if not lanes:
        return [f"{name!r} is one value for all rows, and left out" for name in scalars]
    rows = sum(stop - start for lane in lanes for start, stop in lane)
    found = [f"the file is a ring buffer: its {rows:,} filled rows are read, the oldest first"]
    rest = [name for name in scalars if name not in (*_POSITIONS, *_SIZES, "full", "max_size", "maxsize")]
    return [*found, *describe_lanes([], rest)]


def _fit(offset: int, end: int, position: int, size: int) -> list[tuple[int, int]]:
    """Return the filled rows of the ring in rows `offset` to `end` - 1, the oldest first."""
    room = end - offset
    if not (0 < size <= room and 0 <= position <= room and size in (room, position)):
        raise SchemaError(
            f"the file has a ring buffer of {room} rows with {size} filled, but its next row is {position}",
            hint="save the filled rows alone, the oldest first",
        )
    position %= room
    ranges = [(position, room), (0, position)] if size == room else [(0, size)]
    return [(offset + start, offset + stop) for start, stop in ranges if start < stop]


def has_environments(scalars: Mapping[str, float], columns: Sequence[Column]) -> bool:
    """Return whether arrays have the shape `(rows, environments, ...)`, as those of Stable-Baselines3 do."""
    shapes = [column.shape for column in columns]
    first = shapes[0][:1] if shapes else ()
    return {"pos", "full"} <= set(scalars) and first != () and all(shape[:1] == first for shape in shapes)


class SplitEnvironments:
    """Read the rows of environments one after the other, from arrays that have them side by side.

    Args:
        reader: Reads the arrays: a `FlatReader`.
    """

    def __init__(self, reader: Any) -> None:
        self._reader = reader
        count = reader.columns[0].shape[0]
        self._rows = reader.lengths[0]
        self._whole = {column.path: column for column in reader.columns}
        self.columns = [Column(one.path, one.dtype, one.shape[1:]) for one in reader.columns]
        self.lengths = [length * count for length in reader.lengths]
        (lane,) = reader.lanes or [[(0, self._rows)]]
        self.lanes: Lanes = [
            [(start + number * self._rows, stop + number * self._rows) for start, stop in lane]
            for number in range(count)
        ]
        self.about, self.notes = reader.about, reader.notes

    def read(self, wanted: Sequence[Column], first: int, count: int) -> list[Array]:
        """Return rows of one environment. Shapes `(count, *row shape)`."""
        number, row = divmod(first, self._rows)
        found = self._reader.read([self._whole[column.path] for column in wanted], row, count)
        return [values[:, number] for values in found]
