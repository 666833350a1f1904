"""Find out how Arrow tables, made by expstore or by other programs, represent rows, and read their columns.

Used by imports of Parquet and Arrow files. The layout follows from the metadata, or else from the types and
from a survey of the rows, which keeps two numbers per level of a list. This module opens no files.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from expstore.core.bfloat16 import narrow_to_bfloat16
from expstore.core.values import Array, Key, key_name
from expstore.errors import SchemaError
from expstore.exchange.fill import parse_about, parse_field
from expstore.exchange.tables import (
    ABOUT,
    OWN,
    VALUES,
    arrow_type,
    from_file,
    plain_array,
    row_values,
    suits,
    text_of,
)
from expstore.schema.arrow_types import ragged_text
from expstore.schema.schema import ARROW, Field, Schema

# -- surveys of rows ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """The values found in a column.

    Args:
        lacks: Whether a value, a list or an item is missing somewhere.
        rows: Number of rows that were read.
        filled: Whether a row has a value.
        lengths: The shortest and the longest list of each level, outermost first.
    """

    lacks: bool = False
    rows: int = 0
    filled: bool = False
    lengths: list[tuple[int, int]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """Whether there are rows, and none has a value."""
        return self.rows > 0 and not self.filled

    def size(self, depth: int) -> int | None:
        """Return the length of all lists of a level; None without lists, or if it is 0 or varies."""
        if depth >= len(self.lengths):
            return None
        shortest, longest = self.lengths[depth]
        return shortest if shortest == longest > 0 else None


class Survey:
    """Collects facts about columns, batch by batch; a column never seen counts as having no missing value."""

    def __init__(self) -> None:
        self._seen: dict[Key, Seen] = {}

    def look(self, batch: Any) -> None:
        """Add a record batch to the survey."""
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            self._look((name,), column)

    def note_full(self, name: str) -> None:
        """Add rows of a column that all have a value, without reading them."""
        self._seen.setdefault((name,), Seen()).filled = True

    def of(self, key: Key) -> Seen:
        """Return what was found in a column, or in a member of a struct column."""
        return self._seen.get(key, Seen())

    def _look(self, key: Key, array: Any) -> None:
        array = plain_array(array)
        seen = self._seen.setdefault(key, Seen())
        seen.lacks |= bool(array.null_count)
        seen.rows += len(array)
        seen.filled |= array.null_count < len(array)
        if pa.types.is_struct(array.type):
            for number, part in enumerate(array.type):
                self._look((*key, part.name), array.field(number))
            return
        depth = 0
        while hasattr(array.type, "list_size") or pa.types.is_list(array.type) or _is_large(array.type):
            found = pc.min_max(array.value_lengths()).as_py()
            if found["min"] is not None:
                if depth == len(seen.lengths):
                    seen.lengths.append((found["min"], found["max"]))
                shortest, longest = seen.lengths[depth]
                seen.lengths[depth] = min(shortest, found["min"]), max(longest, found["max"])
            array, depth = array.flatten(), depth + 1
            seen.lacks |= bool(array.null_count)


def _is_large(kind: Any) -> bool:
    return bool(pa.types.is_large_list(kind))


# -- layouts ------------------------------------------------------------------------------------------

#: Names that pandas gives to an index without a name, in Parquet and CSV files.
_INDEX = re.compile(r"__index_level_\d+__|Unnamed: \d+|")
_NAMES = {kind: name for name, kind in VALUES.items() if name not in ("bfloat16", "complex64")}


@dataclass(frozen=True)
class Layout:
    """How an Arrow schema represents rows.

    Args:
        fields: The fields, named like the columns.
        form: The kind of container that rows are returned as; see `Schema`.
        own: The store's own columns that are present.
        about: expstore's part of the metadata; {} without one.
        reasons: For each column that seems to have a fixed size but does not: the reason, in words.
        left_out: Columns that become no fields, with the reason.
    """

    fields: Sequence[Field]
    form: str
    own: tuple[str, ...]
    about: Mapping[str, Any]
    reasons: Mapping[Key, str]
    left_out: Mapping[Key, str]

    @property
    def schema(self) -> Schema:
        """The fields as a schema.

        Raises:
            SchemaError: A column has a name that no field can have.
        """
        return Schema(self.fields, self.form)

    @property
    def notes(self) -> tuple[str, ...]:
        """Descriptions of data that is imported in another way than one may expect."""
        return tuple(f"{key_name(key)!r} {why}" for key, why in {**self.left_out, **self.reasons}.items())

    def leaves_out(self, name: str) -> bool:
        """Return whether a column, or all columns of a group, became no fields."""
        path = tuple(name.split("/"))
        return any(key[: len(path)] == path for key in self.left_out) and not any(
            key[: len(path)] == path for key in (entry.key for entry in self.fields)
        )

    def check_fixed(self, schema: Schema) -> None:
        """Raise SchemaError if a field of the new store has variable-length rows."""
        for key in schema.variable:
            why = self.reasons.get(key, f"is {schema[key]}")
            raise SchemaError(
                f"column {key_name(key)!r} {why}: a zarr storage needs rows of fixed size",
                hint='import with storage="arrow" (--storage arrow), or leave that column out',
            )


def needs_survey(schema: Any) -> list[str]:
    """Return the columns of an Arrow schema whose types do not tell whether rows have a fixed size."""
    known = _read_known_fields(_read_about(schema))

    def unsure(key: Key, kind: Any, nullable: bool) -> bool:
        if key in known and (known[key]["dtype"] == ARROW or _is_as_said(kind, known[key])):
            return False
        if pa.types.is_struct(kind):
            return nullable or any(unsure((*key, part.name), part.type, part.nullable) for part in kind)
        return nullable or _has_lists(kind)

    return [
        part.name
        for part in schema
        if part.name not in OWN and unsure((part.name,), part.type, part.nullable)
    ]


def _has_lists(kind: Any) -> bool:
    while _is_list(kind := _plain(kind)):
        if not pa.types.is_fixed_size_list(kind):
            return True
        kind = kind.value_type
    return False


def read_layout(schema: Any, survey: Survey | None = None, given: Mapping[str, str] | None = None) -> Layout:
    """Find out which fields are in an Arrow schema.

    Args:
        schema: The schema.
        survey: The result for the columns that `needs_survey` names, over all rows; None if it names none.
        given: The user's mapping from names, or groups, to fields; "": left out.

    Raises:
        SchemaError: There are no fields, or a column has a type that no field can have.
    """
    about, survey = _read_about(schema), survey or Survey()
    known = _read_known_fields(about)
    fields: list[Field] = []
    reasons: dict[Key, str] = {}
    left_out: dict[Key, str] = {}
    for key, kind, _ in _leaves(schema, None, _whole(schema, known, survey)):
        if key[0] in OWN and len(key) == 1:
            continue
        if key not in known:
            above = {"/".join(key[:length]) for length in range(1, len(key) + 1)}
            mapped = [ours for theirs, ours in (given or {}).items() if theirs in above]
            if "" in mapped:
                left_out[key] = "is left out"
                continue
            if pa.types.is_null(_plain(kind)) or survey.of(key).empty:
                left_out[key] = "has no value in any row, and is left out"
                continue
            if not mapped and len(key) == 1 and _INDEX.fullmatch(key[0]):
                left_out[key] = "is the index of a pandas frame, and left out"
                continue
        entry, why = _field(key, kind, known.get(key), survey.of(key))
        fields.append(entry)
        if why:
            reasons[key] = why
    if not fields:
        why = "".join(f"; {key_name(key)!r} {reason}" for key, reason in left_out.items())
        raise SchemaError(f"no column can be a field{why}", hint="use numbers, text, or lists of these")
    own = tuple(name for name in OWN if name in schema.names)
    form = about.get("form", "") if len(known) == len(fields) else ""
    return Layout(fields, form, own, about, reasons, left_out)


def _read_known_fields(about: Mapping[str, Any]) -> dict[Key, Mapping[str, Any]]:
    """Return the metadata's description of each field, by key."""
    return {tuple(f["key"]): f for f in about.get("fields", ())}


def _whole(schema: Any, known: Mapping[Key, Mapping[str, Any]], survey: Survey) -> set[Key]:
    """Return the structs that are single fields, not groups: the metadata says so, or rows lack them."""
    found: set[Key] = set()

    def look(key: Key, kind: Any) -> None:
        if pa.types.is_struct(kind):
            if known.get(key, {}).get("dtype") == ARROW or survey.of(key).lacks:
                found.add(key)
            for part in kind:
                look((*key, part.name), part.type)

    for part in schema:
        look((part.name,), part.type)
    return found


def _read_about(schema: Any) -> dict[str, Any]:
    return parse_about((schema.metadata or {}).get(ABOUT, b""), "metadata")


def _leaves(schema: Any, batch: Any, whole: Container[Key]) -> Iterator[tuple[Key, Any, Any]]:
    """Yield key, type and rows of every column that is not a struct, and of structs that are fields."""

    def below(key: Key, kind: Any, column: Any) -> Iterator[tuple[Key, Any, Any]]:
        if pa.types.is_struct(kind) and key not in whole:
            if column is not None and column.null_count:
                raise _build_missing_error(key)
            for part in kind:
                inside = None if column is None else column.field(part.name)
                yield from below((*key, part.name), part.type, inside)
        else:
            yield key, kind, column

    for place, entry in enumerate(schema):
        yield from below((entry.name,), entry.type, None if batch is None else batch.column(place))


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_as_said(kind: Any, known: Mapping[str, Any]) -> bool:
    """Return whether a column has the type that the metadata describes."""
    entry = parse_field(known)
    if entry.variable:
        return suits(entry, kind)
    return entry.dtype in VALUES and bool(_plain(kind) == arrow_type(entry))


def _field(key: Key, kind: Any, known: Mapping[str, Any] | None, seen: Seen) -> tuple[Field, str]:
    """Return the field for a column, from the metadata or else from its type and its rows.

    Returns:
        The field, and the reason if it is variable-length although its type suggests a fixed size.
    """
    if known is not None and _is_as_said(kind, known):
        return parse_field(known), ""
    shape: list[int | None] = []
    inner = _plain(kind)
    while _is_list(inner):
        fixed = pa.types.is_fixed_size_list(inner)
        shape.append(inner.list_size if fixed else seen.size(len(shape)))
        inner = _plain(inner.value_type)
    if inner in _NAMES and not seen.lacks:
        if None not in shape:
            return Field(key, _NAMES[inner], tuple(size for size in shape if size is not None)), ""
        if shape[0] is None and None not in shape[1:]:
            return Field(key, ARROW, (), ragged_text(_NAMES[inner], tuple(shape))), "has lists of any length"
    if seen.lacks and (inner in _NAMES or pa.types.is_struct(kind)):
        return Field(key, ARROW, (), text_of(key, kind)), "has rows without a value"
    return Field(key, ARROW, (), text_of(key, kind)), ""


def _plain(kind: Any) -> Any:
    """Return the type without names: storage types of extensions, value types of dictionaries."""
    if isinstance(kind, pa.BaseExtensionType):
        shape = getattr(kind, "shape", None)
        plain = kind.storage_type
        if shape is not None and len(shape) > 1:  # a fixed_shape_tensor: nested lists express the same
            plain = kind.value_type
            for size in reversed(shape):
                plain = pa.list_(plain, size)
        return plain
    if pa.types.is_dictionary(kind):
        return kind.value_type
    if pa.types.is_fixed_size_list(kind):  # other programs give the items another name
        return pa.list_(kind.value_type, kind.list_size)
    return kind


class Table:
    """Split record batches into columns, which are copies or views of them.

    Args:
        layout: How the batches represent rows.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout

    def columns(self, batch: Any) -> list[Any]:
        """Return one array per field; Arrow arrays for variable-length fields. Shapes `(n, *row shape)`.

        Raises:
            SchemaError: A value is missing, or rows do not match the layout.
        """
        whole = {entry.key for entry in self._layout.fields if entry.variable}
        found = {key: column for key, _, column in _leaves(batch.schema, batch, whole)}
        missing = [entry.key for entry in self._layout.fields if entry.key not in found]
        if missing:
            raise SchemaError(f"column {key_name(missing[0])!r} is missing in some of the files")
        return [_to_column(entry, found[entry.key], batch.num_rows) for entry in self._layout.fields]

    def own(self, batch: Any, names: Sequence[str] | None = None) -> dict[str, Array]:
        """Return the store's own columns that are present, or only those in `names`. Shapes `(n,)`."""
        found = {}
        for name in self._layout.own if names is None else names:
            column = batch.column(batch.schema.get_field_index(name))
            try:
                wanted = column.cast(OWN[name])
                wanted = wanted.cast(pa.int64()) if name == "_time" else wanted
            except pa.ArrowException as exc:
                raise SchemaError(
                    f"column {name!r} is of type {column.type}, not {OWN[name]}",
                    hint="rename it if it is a field: exports of expstore have their own column of this name",
                ) from exc
            found[name] = _to_numpy((name,), wanted)
        return found


def _to_column(entry: Field, array: Any, rows: int) -> Any:
    if entry.variable:
        return from_file(entry, array)
    while True:
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        elif _is_list(array.type):
            if array.null_count:
                raise _build_missing_error(entry.key)
            array = array.flatten()
        else:
            break
    values = _to_numpy(entry.key, array)
    wanted = VALUES[entry.dtype].to_pandas_dtype()
    if values.dtype != wanted:
        raise SchemaError(
            f"column {key_name(entry.key)!r} is {values.dtype} in some rows, and {entry} in others"
        )
    if values.size != rows * row_values(entry):
        raise SchemaError(f"column {key_name(entry.key)!r} has rows that are not {entry}")
    if entry.dtype == "bfloat16":
        values = narrow_to_bfloat16(values)
    elif entry.dtype == "complex64":
        values = values.view(np.complex64)
    return np.ascontiguousarray(values, entry.numpy_dtype).reshape(rows, *entry.shape)


def _to_numpy(key: Key, array: Any) -> Array:
    if array.null_count:
        raise _build_missing_error(key)
    values: Array = array.to_numpy(zero_copy_only=False)
    return values


def _build_missing_error(key: Key) -> SchemaError:
    return SchemaError(
        f"column {key_name(key)!r} has rows without a value", hint="fill them in, or leave the column out"
    )
