"""Import rollouts of language models, as trainers write them, as a new store.

Used by `expstore import --format rollouts` and programs. `NAMES` has the names that trainers give to the
parts of a rollout. Files are read as by the other imports of tables; this module only turns columns into the
fields of `expstore.specs.Rollout`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from expstore.core.values import Array, IntArray, Key, key_name
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.episodes.segmentation import TERMINATED
from expstore.errors import SchemaError
from expstore.exchange.base import DiskFile, Imported, Progress, Tell, ignore_notes, no_progress
from expstore.exchange.fill import Facts, NumberedRows, RowSource, Target, fill_store
from expstore.exchange.foreign_rows import check_keys, split_name
from expstore.exchange.formats import format_of
from expstore.exchange.table_files import ArrowPart, ParquetPart, Part, reading_arrow
from expstore.exchange.table_import import arrow_file, find_layout, json_parts, parquet_files, rows_at_once
from expstore.exchange.table_layout import Layout, Table
from expstore.exchange.tables import (
    VALUES,
    file_type,
    from_file,
    plain_array,
)
from expstore.schema.field_parser import schema_of
from expstore.schema.schema import Field, Schema
from expstore.specs.rollout import Rollout

#: The parts of a rollout, and their names in files: the first one that a file has is taken. The names are
#: those of `Rollout`; of TRL (`prompt_ids`, `completion_ids`, and its tables of completions); of verl's
#: batches and dumped generations (`prompts`, `responses`, `token_level_scores`; `input`, `output`, `score`);
#: and of prime-rl and verifiers (`completion_logprobs`, `group_id`, `example_id`).
NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "input"),
    "response": ("response", "completion", "output"),
    "prompt_tokens": ("prompt_tokens", "prompt_ids", "prompts"),
    "tokens": ("tokens", "completion_ids", "response_ids", "responses"),
    "loss_mask": ("loss_mask", "completion_mask", "response_mask"),
    "logprobs": ("logprobs", "completion_logprobs", "rollout_log_probs"),
    "policy_version": ("policy_version",),
    "group": ("group", "group_id", "uid", "example_id"),
    "reward": ("reward", "score", "rewards", "token_level_scores"),
}
#: With this column, prompts are padded at their begin and responses at their end.
_PADDING = "attention_mask"
#: Parts with a value for each token of the response.
_OF_TOKENS = ("tokens", "loss_mask", "logprobs")
#: Names of columns that batches have themselves.
_OF_BATCHES = ("id", "index")


def import_rollouts(
    source: str | Path,
    target: str | Path,
    *,
    names: Mapping[str, str] | None = None,
    rollout: Rollout | None = None,
    capacity: int | None = None,
    progress: Progress = no_progress,
    tell: Tell = ignore_notes,
    disk: Disk | None = None,
) -> Imported:
    """Create a store from rollouts of a language model: JSON lines, Parquet or Arrow files, a rollout a row.

    Columns with the names of a trainer become the fields of a `Rollout`, see `NAMES`; all other columns
    become fields of their own names. Each row is an episode of one step that terminated.

    - Prompts and responses that are messages become JSON text.
    - A reward that is an object or a list, or that several columns are mapped to, is the sum of its numbers;
      the columns themselves become fields, too.
    - With a column `attention_mask`, as long as the tokens of prompt and response together, the padding of
      `prompts`, `responses` and the values for each token of the response is removed; other columns keep it.
    - Texts may be missing in some rows. Numbers and lists may not: fill them in, map the column to another
      field, or leave it out.

    Args:
        source: A file of JSON lines, Parquet or Arrow, or a folder of files *.jsonl or *.parquet.
        target: The store's folder, which must not exist yet.
        names: Mapping from columns to parts of a rollout, or to other fields, as in `{"answer_ids": "tokens",
            "info.score": "reward"}`; dots lead into objects. A column that is mapped to "" is left out.
        rollout: The fields; None: `Rollout()`. Parts that the files lack become no fields.
        capacity: Maximum number of readable rows; None: unbounded.
        progress: Called with the rows done and the rows in total.
        tell: Called with descriptions of what is missing, left out or changed, before any row is written.
        disk: Access to the file system.

    Raises:
        NotFoundError: The source, or the parent folder of the store, does not exist.
        StorageError: A file cannot be read, or a line is not JSON, with its number; or the disk failed or is
            full. Nothing is left behind.
        SchemaError: The files have no part of a rollout, a column does not have the type of its part, or a
            row lacks a value; or a mapped column does not exist. The message has the row.
        StateError: The target exists, or would be inside a store.
        LockedError: Another process creates the store at the same time.

    Example:
        >>> from pathlib import Path
        >>> from expstore.exchange import import_rollouts
        >>> line = '{"prompt": "1 + 1?", "answer_ids": [5, 2], "score": 1}\\n'
        >>> length = Path("trained.jsonl").write_text(line)
        >>> import_rollouts("trained.jsonl", "trained.exp", names={"answer_ids": "tokens"}).fields
        ('prompt', 'tokens', 'next.reward', 'next.done')
    """
    source, target = local_path(source), local_path(target)
    parts = _open_parts(source, names or {})
    for part in parts:
        part.forget_description()
    files = [part.path for part in parts]
    to = Target(target, capacity, progress, tell, disk or Disk(), source, files)
    return fill_store(_RolloutRows(parts, names or {}, rollout or Rollout()), to)


def _open_parts(source: Path, given: Mapping[str, str]) -> Sequence[Part]:
    form = format_of(source)
    if form == "jsonl":
        return json_parts(source, given)
    if form == "parquet":
        return [ParquetPart(path) for path in parquet_files(source)]
    if form == "arrow":
        return [ArrowPart(arrow_file(source))]
    raise SchemaError(
        f"{source} is of format {form}, which has no rollouts", hint="use JSON lines, Parquet or Arrow"
    )


def _one_step(episode: int) -> Facts:
    return Facts(length=1, status=TERMINATED)


class _RolloutRows(RowSource):
    """The rollouts of tables.

    Args:
        parts: The files.
        given: The user's mapping from columns to parts or fields; "": left out.
        rollout: The fields.
    """

    storage = "arrow"

    def __init__(self, parts: Sequence[Part], given: Mapping[str, str], rollout: Rollout) -> None:
        self._parts = parts
        with self.parsing():
            layout = find_layout(parts, given)
        self.total = sum(part.rows for part in parts)
        keys, table = rollout.keys, parts[0].schema
        self._sources, fields = _match(table, layout, given, keys)
        if not self._sources:
            raise SchemaError(
                f"{parts[0].path} has no part of a rollout, but {', '.join(table.names)}",
                hint="map columns to parts: --map THEIRS=PART; parts are " + ", ".join(NAMES),
            )
        found = [name for name in keys if name in (*self._sources, "done")]
        known = schema_of(rollout.settings(found)["schema"])
        assert known is not None
        self._fields = dict(zip(found, known.fields, strict=True))
        extras, extra_notes = _find_extras(layout, fields, self._find_used(table))
        check_keys(entry.key for entry in (*known.fields, *extras.values()))
        self.schema = Schema([*known.fields, *extras.values()])
        here = [entry for entry in layout.fields if entry.key in extras]
        self._table = Table(dataclasses.replace(layout, fields=here)) if here else None
        self._has_padding = bool(
            _PADDING in table.names
            and (_PADDING,) not in layout.left_out
            and self._top("prompt_tokens")
            and self._top("tokens")
        )
        missing = [name for name in keys if name not in found]
        notes = [
            *(note for part in parts for note in part.notes),
            *extra_notes,
            *([f"there is no {', '.join(missing)}, which become no fields"] if missing else []),
            *self._describe(),
        ]
        self.notes = list(dict.fromkeys(notes))
        self.settings = {"done_keys": (keys["done"],)}
        if "reward" in found:
            self.settings["reward_key"] = keys["reward"]
        self.names = {
            key_name(path): key_name(self._fields[name].key)
            for name, paths in self._sources.items()
            for path in paths
            if path != self._fields[name].key
        } | {key_name(key): key_name(entry.key) for key, entry in extras.items() if entry.key != key}

    @property
    def part_fields(self) -> Sequence[Field]:
        """The fields of the parts."""
        return list(self._fields.values())

    def parsing(self) -> AbstractContextManager[None]:
        """Convert Arrow's errors to StorageError."""
        return reading_arrow(self._parts[0].path)

    def _top(self, name: str) -> list[str]:
        """Return the names of the columns of a part that are not inside objects."""
        return [path[0] for path in self._sources.get(name, ()) if len(path) == 1]

    def _sums(self, table: Any) -> bool:
        """Return whether the reward is a sum."""
        paths = self._sources.get("reward", [])
        return len(paths) > 1 or any(_is_list(_type_at(table, path)) for path in paths)

    def _find_used(self, table: Any) -> set[str]:
        """Return the columns that become no fields of their own, because a part has their values."""
        sums = self._sums(table)
        return {top for name in self._sources for top in self._top(name) if not (sums and name == "reward")}

    def _describe(self) -> Iterator[str]:
        paths = self._sources.get("reward", [])
        if self._sums(self._parts[0].schema):
            yield f"the reward is the sum of {', '.join(map(key_name, paths))}"
        if self._has_padding:
            yield f"padding of prompts and responses is removed, by {_PADDING!r}"

    def pieces(self) -> Iterator[NumberedRows]:
        """Yield the rows in the order of the files."""
        done, size = 0, rows_at_once(self._parts, 0, loose=True)
        for part in self._parts:
            for batch in part.batches(size):
                count = batch.num_rows
                found = self._read(batch, done)
                extras = self._table.columns(batch) if self._table else []
                episodes = np.arange(done, done + count)
                done += count
                yield NumberedRows(
                    columns=[*found, *extras],
                    episodes=episodes,
                    steps=np.zeros(count, np.int64),
                    done=done,
                    facts=_one_step,
                )

    def _read(self, batch: Any, first: int) -> list[Any]:
        """Return the columns of the parts.

        Args:
            batch: Rows of a file.
            first: Number of the rows before them.
        """
        strip = None
        if self._has_padding:
            strip = _Padding(batch, self._top("prompt_tokens")[0], self._top("tokens")[0], first)
        found: dict[str, Any] = {}
        for name, entry in self._fields.items():
            if name == "done":
                found[name] = np.ones(batch.num_rows, np.bool_)
                continue
            arrays = []
            for path in self._sources[name]:
                array = _column(batch, path)
                if array.null_count and name not in ("prompt", "response", "group"):
                    row = first + int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
                    raise _build_row_error(row, key_name(path), "has no value")
                arrays.append(array if strip is None else strip(name, array))
            theirs = ", ".join(map(key_name, self._sources[name]))
            try:
                found[name] = _convert(name, entry, arrays)
            except (pa.ArrowException, TypeError, ValueError) as exc:
                raise SchemaError(
                    f"column {theirs!r} is {arrays[0].type}, which cannot be {name} ({entry}): {exc}",
                    hint=f"map another column, or leave it out: --map {theirs}=",
                ) from exc
        self._check_lengths(found, first)
        return list(found.values())

    def _check_lengths(self, found: Mapping[str, Any], first: int) -> None:
        """Raise SchemaError if a response does not have one value for each of its tokens."""
        lengths = {name: pc.list_value_length(found[name]).to_numpy() for name in _OF_TOKENS if name in found}
        names = list(lengths)
        for name in names[1:]:
            wrong = np.flatnonzero(lengths[name] != lengths[names[0]])
            if wrong.size:
                row = int(wrong[0])
                raise _build_row_error(
                    first + row,
                    key_name(self._sources[name][0]),
                    f"has {lengths[name][row]} values, and {names[0]} has {lengths[names[0]][row]}",
                )


class _Padding:
    """Remove the padding of prompts and responses, as verl's batches have it.

    Args:
        batch: Rows of a file.
        prompts: The column of the tokens of prompts.
        responses: The column of the tokens of responses.
        first: Number of the rows before.
    """

    def __init__(self, batch: Any, prompts: str, responses: str, first: int) -> None:
        self._sizes: list[IntArray] = [
            pc.list_value_length(_column(batch, (name,))).fill_null(0).to_numpy()
            for name in (prompts, responses)
        ]
        self._masks = [np.asarray(mask, bool) for mask in _column(batch, (_PADDING,)).to_pylist()]
        for row, (mask, size) in enumerate(zip(self._masks, np.add(*self._sizes), strict=True)):
            if mask.size != size:
                raise _build_row_error(
                    first + row, _PADDING, f"has {mask.size} values, and prompt and response have {size}"
                )

    def __call__(self, name: str, array: Any) -> Any:
        """Return the values of a part without those of padding."""
        if not _is_list(array.type):
            return array
        rows, sizes = array.to_pylist(), zip(*self._sizes, strict=True)
        for row, (values, mask, (prompt, _)) in enumerate(zip(rows, self._masks, sizes, strict=True)):
            mask = mask[:prompt] if name == "prompt_tokens" else mask[prompt:]
            if len(values) == mask.size:
                rows[row] = [value for value, keep in zip(values, mask.tolist(), strict=True) if keep]
        return pa.array(rows, array.type)


def _match(
    table: Any, layout: Layout, given: Mapping[str, str], keys: Mapping[str, Key]
) -> tuple[dict[str, list[Key]], dict[Key, Key]]:
    """Return the columns of each part, and the fields of columns that the user maps to other fields."""
    parts = {key_name(key): name for name, key in keys.items()} | {name: name for name in keys}
    sources: dict[str, list[Key]] = {}
    fields: dict[Key, Key] = {}
    for theirs, ours in given.items():
        path = (theirs,) if theirs in table.names else tuple(theirs.split("."))
        if _type_at(table, path) is None:
            raise SchemaError(f"there is no {theirs!r} to map", hint="there are " + ", ".join(table.names))
        if ours == "done" or parts.get(ours) == "done":
            raise SchemaError(
                f"{theirs!r} cannot be done, which is True in every row", hint="map it to a field"
            )
        if ours in parts:
            sources.setdefault(parts[ours], []).append(path)
        elif ours:
            fields[path] = tuple(ours.split("."))
    for name, synonyms in NAMES.items():
        free = [one for one in synonyms if one in table.names and one not in given]
        free = [one for one in free if (one,) not in layout.left_out]
        if name in keys and name not in sources and free:
            sources[name] = [(free[0],)]
    for name, paths in sources.items():
        if len(paths) > 1 and name != "reward":
            check_keys([keys[name] for _ in paths])
    sources["reward"] = [leaf for path in sources.get("reward", ()) for leaf in _leaves(table, path)]
    return {name: paths for name, paths in sources.items() if paths}, fields


def _find_extras(
    layout: Layout, fields: Mapping[Key, Key], used: set[str]
) -> tuple[dict[Key, Field], list[str]]:
    """Return the fields of the columns that are no parts, by their keys in the file, and notes."""
    notes = [f"{name!r} is left out: rows of a store have their own" for name in layout.own]
    found: dict[Key, Field] = {}
    for entry in layout.fields:
        key = entry.key
        if len(key) == 1 and key[0] in used:
            continue
        if len(key) == 1 and key[0] in _OF_BATCHES and key not in fields:
            notes.append(
                f"{key[0]!r} is left out, as batches have an {key[0]!r} of their own; "
                f"--map {key[0]}=row_{key[0]} keeps it"
            )
            continue
        found[key] = dataclasses.replace(entry, key=fields.get(key) or split_name(key))
    about = {**layout.left_out, **layout.reasons}
    notes += [f"{key_name(key)!r} {why}" for key, why in about.items() if key[0] not in used]
    return found, notes


def _type_at(table: Any, path: Key) -> Any:
    """Return the type of a column, or of a member of objects; None if it has no type."""
    kind = pa.struct(list(table))
    for name in path:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return kind


def _leaves(table: Any, path: Key) -> list[Key]:
    """Return the members of an object that are not objects; the path itself if it is no object."""
    kind = _type_at(table, path)
    if not pa.types.is_struct(kind):
        return [path]
    return [leaf for part in kind for leaf in _leaves(table, (*path, part.name))]


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _column(batch: Any, path: Key) -> Any:
    array = batch.column(batch.schema.get_field_index(path[0]))
    return plain_array(pc.struct_field(array, list(path[1:])) if len(path) > 1 else array)


def _convert(name: str, entry: Field, arrays: Sequence[Any]) -> Any:
    """Return the values of a part. Shape `(n,)`; an Arrow array for texts and lists.

    Raises:
        pa.ArrowException: The values do not have the type of the part.
        ValueError: A list lacks a value.
    """
    if name == "reward":
        return sum(map(_totals, arrays)).astype(np.float32)  # type: ignore[union-attr]
    (array,) = arrays
    if not entry.variable:
        return array.cast(VALUES[entry.dtype]).to_numpy()
    kind = file_type(entry)
    if not pa.types.is_string(kind):
        array = array.cast(kind)
        if array.flatten().null_count:
            raise ValueError("a list lacks a value")
    elif pa.types.is_nested(array.type):
        texts = [None if one is None else json.dumps(one, ensure_ascii=False) for one in array.to_pylist()]
        array = pa.array(texts, kind)
    else:
        array = array.cast(kind)
    return from_file(entry, array)


def _totals(array: Any) -> Array:
    """Return numbers, or the sums of lists of numbers. Shape `(n,)`, float64."""
    if _is_list(array.type):
        return np.array([sum(row) for row in array.to_pylist()], np.float64)
    if pa.types.is_string(array.type):
        raise TypeError("a reward is a number")
    found: Array = array.cast(pa.float64()).to_numpy()
    return found


def _build_row_error(row: int, theirs: str, what: str) -> SchemaError:
    return SchemaError(
        f"row {row + 1:,}: {theirs!r} {what}",
        hint=f"correct the row; --map {theirs}=its_{theirs.split('.')[-1]} keeps the column as it is, and "
        f"--map {theirs}= leaves it out",
    )


class _BatchPart(Part):
    """Rollouts in memory.

    Args:
        batch: The rollouts: the values of each column, for all rollouts.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.path = Path("the batch")
        columns = {name: one.tolist() if hasattr(one, "tolist") else one for name, one in batch.items()}
        try:
            self._batch = pa.RecordBatch.from_pydict(columns)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
            raise SchemaError(
                f"the batch is no table: {exc}", hint="give each column one value, or list, for each rollout"
            ) from exc
        self.schema, self.rows = self._batch.schema, self._batch.num_rows

    def _read_metadata(self, file: DiskFile) -> None:
        """Do nothing: there is no file."""

    def batches(self, rows: int, columns: list[str] | None = None) -> Iterator[Any]:
        """Yield record batches, as `Part.batches`."""
        batch = self._batch if columns is None else self._batch.select(columns)
        for start in range(0, batch.num_rows, rows):
            yield batch.slice(start, rows)


def read_rollouts(
    batch: Mapping[str, Any], *, names: Mapping[str, str] | None = None, rollout: Rollout | None = None
) -> pa.Table:
    """Return a trainer's batch of rollouts as a table for `rb.extend`.

    Columns are found and converted as in `import_rollouts`. The table has the parts that the batch has, and
    columns that `names` maps to other fields; all other columns are left out.

    Args:
        batch: The values of each column, for all rollouts: lists, NumPy arrays or tensors, such as what a
            rollout function of TRL returns, or the tensors of a batch of verl.
        names: Mapping from columns to parts or fields; see `import_rollouts`.
        rollout: The fields; None: `Rollout()`.

    Raises:
        SchemaError: The columns do not have one value for each rollout; or as for `import_rollouts`.

    Example:
        >>> from expstore.exchange import read_rollouts
        >>> batch = {"prompt_ids": [[5], [6, 7]], "completion_ids": [[1, 2], [3]], "rewards": [1.0, 0.0]}
        >>> read_rollouts(batch).column_names
        ['prompt_tokens', 'tokens', 'next.reward', 'next.done']
    """
    rows = _RolloutRows([_BatchPart(batch)], names or {}, rollout or Rollout())
    wanted = {entry.key for entry in rows.part_fields} | {
        tuple(ours.split(".")) for ours in (names or {}).values()
    }
    pieces = [piece.columns for piece in rows.pieces()]
    found = {}
    for place, entry in enumerate(rows.schema.fields):
        if entry.key in wanted:
            chunks = [pa.array(list(one) if np.ndim(one) > 1 else one) for one in (c[place] for c in pieces)]
            found[key_name(entry.key)] = pa.chunked_array(chunks)
    return pa.table(found)
