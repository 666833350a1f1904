"""The fields of a row: names, dtypes and row shapes.

Used by buffers to check a batch, by storages to lay out columns and by SQL to name them. This module never
reads values and never imports torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from expstore.core.casts import find_lost
from expstore.core.parsing import INVALID
from expstore.core.tables import Table, build_table, render_card, size_text
from expstore.core.values import Array, Key, key_name, to_key
from expstore.errors import CorruptionError, SchemaError
from expstore.schema.arrow_types import MOST_DIMS, check_text, describe
from expstore.schema.casting import fit_arrow
from expstore.schema.continued import check_parent, parent_of

#: Dtype of a variable-length field: a string, a list, a tensor whose shape differs between rows, or a
#: nullable value. The Arrow type says which. Its columns are pyarrow Arrays of n rows, not chunked.
ARROW = "arrow"
#: Prefix of that type's text where the dtypes of a batch's columns are named.
_ARROW = ARROW + ":"

#: Dtype of a field that holds any Python object. Objects are kept in RAM, by reference.
OBJECT = "object"

#: Field dtype -> dtype of its bytes in a column (little-endian). NumPy has no bfloat16: its bits are stored.
DTYPES: dict[str, np.dtype[Any]] = {
    "bool": np.dtype("?"),
    "uint8": np.dtype("u1"),
    "int8": np.dtype("i1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "uint64": np.dtype("<u8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "complex64": np.dtype("<c8"),
    OBJECT: np.dtype("O"),
}

_MORE_DIMS = "extend() stores the rows of a batch of one dim; reshape(-1) makes one of more dims"
#: Most values of a field in one row: stores allocate memory for a row when they are opened.
_MOST_ITEMS = 1 << 30
#: Number of fields that a notebook lists.
_LISTED_FIELDS = 30

#: Blanks are allowed only inside: some file systems strip them at the end of a name.
_COMPONENT = re.compile(r"(?! )[A-Za-z0-9_.\- ]{1,100}(?<! )")


@dataclass(frozen=True, slots=True)
class Field:
    """Describe one field of a row.

    Args:
        key: Path of the leaf, for instance `("next", "reward")`.
        dtype: One of `DTYPES`, or `ARROW`.
        shape: Shape of one row's value; `()` and `(1,)` are scalars in SQL. `()` for objects and for
            variable-length fields.
        arrow: Text of the Arrow type of a variable-length field, in the notation of
            `expstore.schema.arrow_types`.
        annotated: Whether its values are written after the rows, by `rb.annotate`. Rows are written without
            it.
        like: Of an annotated field of variable length: the field that has as many items in each row; () if
            any number is allowed.
    """

    key: Key
    dtype: str
    shape: tuple[int, ...]
    arrow: str = ""
    annotated: bool = False
    like: Key = ()

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of the values in memory and on disk; variable-length fields have none."""
        return DTYPES[self.dtype]

    @property
    def variable(self) -> bool:
        """Whether the field is of variable length."""
        return self.dtype == ARROW

    @property
    def row_items(self) -> int:
        """Number of values per row; 0 for a variable-length field."""
        return 0 if self.variable else math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes: the reference for an object, 0 for a variable-length field."""
        return 0 if self.variable else self.row_items * self.numpy_dtype.itemsize

    @property
    def path(self) -> str:
        """Path of the column below `columns/`."""
        return "/".join(self.key)

    def __str__(self) -> str:
        return describe(self.arrow) if self.variable else f"{self.dtype}{list(self.shape)}"


class Schema:
    """The fields of a store in their order. Immutable.

    Args:
        fields: At least one field. Names are checked.
        form: The kind of container that rows are returned as, in the notation of `expstore.data.containers`;
            "" for TensorDicts.
        late: Fields that were added to a store with rows, each with the value for rows that are written
            without the field; None if rows must have it. The value has the field's row shape and the dtype
            of its column.

    Raises:
        SchemaError: A name cannot be a path, two names clash, a dtype is not supported, or a field has no
            values, more than 63 dims, or more than 2^30 values per row.

    Example:
        >>> from expstore import Field, Schema
        >>> schema = Schema([Field(("observation",), "float32", (4,)), Field(("action",), "int64", ())])
        >>> schema.row_bytes
        24
    """

    def __init__(
        self, fields: Iterable[Field], form: str = "", late: Mapping[Key, Array | None] | None = None
    ) -> None:
        self.fields = tuple(fields)
        self.form = form
        self.late: dict[Key, Array | None] = dict(late or {})
        if not self.fields:
            raise SchemaError("a row needs at least one field, this batch has none")
        seen: dict[str, Field] = {}
        for entry in self.fields:
            _check_name(entry.key)
            _check_dtype(entry)
            _check_shape(entry)
            if entry.dtype == OBJECT and entry.shape:
                raise SchemaError(
                    f"field {key_name(entry.key)!r} has row shape {list(entry.shape)}, and dtype {OBJECT}",
                    hint="a row has one object: its shape is ()",
                )
            clash = seen.setdefault(key_name(entry.key).lower(), entry)
            if clash is not entry:
                raise SchemaError(
                    f"fields {key_name(clash.key)!r} and {key_name(entry.key)!r} have one name on some disks",
                    hint="rename one of them",
                )
        for name in seen:
            parents = name.split(".")[:-1]
            for cut in range(1, len(parents) + 1):
                if ".".join(parents[:cut]) in seen:
                    raise SchemaError(f"{'.'.join(parents[:cut])!r} is both a field and a group of fields")
        for entry in self.fields:
            if entry.arrow and (parent := parent_of(entry.arrow)):
                other = self[parent] if parent in self else Field(parent, "", ())
                check_parent(entry.key, parent, other.dtype, other.shape)

    @classmethod
    def infer(cls, columns: Mapping[Key, tuple[str, tuple[int, ...]]], form: str = "") -> Schema:
        """Return the schema of columns given as key -> (dtype, row shape).

        Args:
            columns: For a variable-length column the dtype is the result of `arrow_dtype`, and the row shape
                `()`.
            form: The kind of container of the rows, as for the class.
        """
        return cls([_to_field(key, dtype, shape) for key, (dtype, shape) in columns.items()], form)

    @cached_property
    def keys(self) -> tuple[Key, ...]:
        """The keys in the order of the fields."""
        return tuple(entry.key for entry in self.fields)

    @cached_property
    def row_bytes(self) -> int:
        """Size of the user's fields of a row in bytes."""
        return sum(entry.row_bytes for entry in self.fields)

    @cached_property
    def objects(self) -> tuple[Key, ...]:
        """The keys of fields that hold objects."""
        return tuple(entry.key for entry in self.fields if entry.dtype == OBJECT)

    @cached_property
    def variable(self) -> tuple[Key, ...]:
        """The keys of variable-length fields."""
        return tuple(entry.key for entry in self.fields if entry.variable)

    @cached_property
    def annotated(self) -> tuple[Field, ...]:
        """The fields whose values are written after the rows."""
        return tuple(entry for entry in self.fields if entry.annotated)

    @cached_property
    def written(self) -> Schema:
        """The schema of rows that are written: without annotated fields."""
        if not self.annotated:
            return self
        return Schema([entry for entry in self.fields if not entry.annotated], self.form, self.late)

    @cached_property
    def _defaults(self) -> dict[Key, Array]:
        return {key: value for key, value in self.late.items() if value is not None}

    @cached_property
    def _by_key(self) -> dict[Key, int]:
        return {entry.key: place for place, entry in enumerate(self.fields)}

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    def __getitem__(self, key: Key) -> Field:
        return self.fields[self._by_key[key]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and set(self.fields) == set(other.fields)

    def __hash__(self) -> int:
        return hash(frozenset(self.fields))

    def __repr__(self) -> str:
        return "Schema(" + ", ".join(f"{key_name(f.key)}: {f}" for f in self.fields) + ")"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the fields."""
        facts = [f"{len(self.fields)} fields", f"{size_text(self.row_bytes)} a row"]
        if self.variable:
            facts.append(f"and {len(self.variable)} fields of variable length")
        return render_card(type(self).__name__, facts, [self.tabulate()])

    def tabulate(self) -> Table:
        """Return the fields as a table for people; of many fields the first ones."""
        rows = [
            (key_name(entry.key), str(entry), "", None)
            if entry.variable
            else (key_name(entry.key), entry.dtype, str(list(entry.shape)), entry.row_bytes)
            for entry in self.fields[:_LISTED_FIELDS]
        ]
        names = ("field", "dtype", "shape", "bytes a row")
        return build_table(names, rows, total=len(self.fields), what="fields")

    def place(self, key: Key) -> int:
        """Return the position of a field, or -1 if the schema does not have it."""
        return self._by_key.get(key, -1)

    def place_of(self, key: Key) -> int:
        """Return the position of a field.

        Raises:
            SchemaError: There is no such field.
        """
        place = self.place(key)
        if place < 0:
            raise SchemaError(f"no field {key_name(key)!r}", hint=f"the store has {self!r}")
        return place

    def same(self, other: Schema | None) -> bool:
        """Return whether another schema has the same layout of rows; the order of fields counts."""
        return other is not None and (self.fields, self.form) == (other.fields, other.form)

    def grow(self, entry: Field, default: Array | None) -> Schema:
        """Return the schema with one more field, after the others.

        Args:
            entry: The field.
            default: The value for rows that are written without the field, of its row shape; None if rows
                must have it.

        Raises:
            SchemaError: The field's name clashes with another one, or the default has another shape.
        """
        if default is not None:
            default = np.array(default, entry.numpy_dtype)
            if default.shape != entry.shape:
                raise SchemaError(f"the default of {key_name(entry.key)!r} has shape {list(default.shape)}")
        late = self.late if entry.annotated else {**self.late, entry.key: default}
        return Schema((*self.fields, entry), self.form, late)

    def without(self, key: Key) -> Schema:
        """Return the schema without one of its fields.

        Raises:
            SchemaError: It is the only field.
        """
        rest = [entry for entry in self.fields if entry.key != key]
        if not rest:
            raise SchemaError(
                f"{key_name(key)!r} is the only field, and a row needs one", hint="remove the store instead"
            )
        return Schema(rest, self.form, {name: value for name, value in self.late.items() if name != key})

    def find_given(self, keys: Sequence[Key]) -> tuple[Key, ...]:
        """Return the fields of a batch that may lack late fields, in the schema's order.

        Raises:
            SchemaError: Another field is missing, or a key is unknown.
        """
        self._check_keys(keys, self.late)
        here = set(keys)
        return tuple(key for key in self.keys if key in here)

    def _check_keys(self, keys: Sequence[Key], optional: Container[Key]) -> None:
        """Raise SchemaError if a field is unknown, or missing and not optional."""
        here = set(keys)
        unknown = [key for key in keys if key not in self._by_key]
        missing = [key for key in self.written.keys if key not in here and key not in optional]
        if given := [entry for entry in self.annotated if entry.key in here]:
            raise build_annotated_error(given)
        if not (unknown or missing):
            return
        hint = f"the store has {self!r}"
        if unknown:
            hint += "; rb.columns.add(name, fill=...) adds a field"
        later = [key_name(key) for key in missing if key in self.late]
        if later:
            hint += f"; {', '.join(map(repr, later))} was added later, without a default: give it"
        raise SchemaError(_key_trouble(unknown, missing), hint=hint)

    def arrange(
        self, keys: Sequence[Key], dtypes: Sequence[str], columns: Sequence[Array], *, partial: bool = False
    ) -> list[Array]:
        """Check a batch and return its columns in the order of the fields.

        Args:
            keys: The batch's keys, in any order.
            dtypes: Field dtype of each column (bfloat16 columns are uint16 bits).
            columns: Arrays of shape `(n, *row shape)`. For variable-length fields pyarrow Arrays, or arrays
                if all rows have one size.
            partial: Allow fields to be missing; the result then has the order of `keys`.

        Returns:
            C-contiguous arrays with the schema's dtypes, not copied if they fit already; for variable-length
            fields pyarrow Arrays of the field's type. Late fields that are missing are filled with their
            defaults.

        Raises:
            SchemaError: A field is missing or unknown, or has another row shape or a dtype that cannot be
                converted without loss.
        """
        if tuple(keys) == self.keys and not partial and not self.annotated:
            return [
                column
                if dtype == entry.dtype and column.shape[1:] == entry.shape and column.flags.c_contiguous
                else _fit(entry, dtype, column)
                for entry, dtype, column in zip(self.fields, dtypes, columns, strict=True)
            ]
        self._check_keys(keys, self._by_key if partial else self._defaults)
        fitted = {
            key: _fit(self[key], dtype, column)
            for key, dtype, column in zip(keys, dtypes, columns, strict=True)
        }
        if partial:
            return [fitted[key] for key in keys]
        count = len(columns[0]) if columns else 0
        return [fitted[key] if key in fitted else self._fill_default(key, count) for key in self.keys]

    def _fill_default(self, key: Key, count: int) -> Array:
        entry = self[key]
        if entry.annotated:
            return np.empty((count, 0), np.uint8)  # a row that is written has no bytes of it
        return np.ascontiguousarray(np.broadcast_to(self._defaults[key], (count, *entry.shape)))

    def to_json(self) -> list[dict[str, Any]] | dict[str, Any]:
        """Return the schema for `expstore.json`: the fields, and the form unless rows are TensorDicts."""
        fields = []
        for f in self.fields:
            known: dict[str, Any] = {"key": list(f.key), "dtype": f.dtype, "shape": list(f.shape)}
            if f.variable:
                known["arrow"] = f.arrow
            if f.annotated:
                known["annotated"] = list(f.like)
            if f.key in self.late:
                default = self.late[f.key]
                known["late"] = {"default": None if default is None else _to_hex(f, default)}
            fields.append(known)
        return {"fields": fields, "form": self.form} if self.form else fields

    @classmethod
    def from_json(cls, data: Any) -> Schema:
        """Read what `to_json` returned.

        Raises:
            CorruptionError: The data are no schema.
        """
        try:
            fields, form = (data["fields"], str(data["form"])) if isinstance(data, dict) else (data, "")
            found = [
                Field(
                    to_key(f["key"]), str(f["dtype"]), tuple(map(int, f["shape"])), str(f.get("arrow", "")),
                    "annotated" in f, tuple(map(str, f.get("annotated", ()))),
                )
                for f in fields
            ]  # fmt: skip
            late = {
                entry.key: _from_hex(entry, f["late"]["default"])
                for entry, f in zip(found, fields, strict=True)
                if "late" in f
            }
            if form and not isinstance(json.loads(form), dict):
                raise ValueError(f"{form[:80]!r} is no kind of container")
            return cls(found, form, late)
        except INVALID as exc:
            raise CorruptionError(f"the stored schema cannot be read: {exc}") from exc


def build_annotated_error(entries: Iterable[Field]) -> SchemaError:
    """Return the error for values of annotated fields in rows that are written or changed."""
    names = ", ".join(repr(key_name(entry.key)) for entry in entries)
    return SchemaError(
        f"rows are written without the annotated field {names}",
        hint="leave it out, and write its values by rb.annotate(ids, values)",
    )


def arrow_dtype(text: str) -> str:
    """Return the dtype that marks a variable-length column of a batch.

    Args:
        text: Text of its Arrow type, in the notation of `expstore.schema.arrow_types`.
    """
    return _ARROW + text


def _to_field(key: Key, dtype: str, shape: tuple[int, ...]) -> Field:
    """Return the field for a dtype in the notation of a batch's columns."""
    if dtype.startswith(_ARROW):
        return Field(key, ARROW, shape, dtype.removeprefix(_ARROW))
    return Field(key, dtype, shape)


def _check_shape(entry: Field) -> None:
    name, dims = key_name(entry.key), len(entry.shape)
    for side in entry.shape:
        if type(side) is not int or side < 0:
            raise SchemaError(
                f"field {name!r} has {str(side)[:40]!r} in its row shape", hint="use integers of at least 1"
            )
    if 0 in entry.shape:
        raise SchemaError(f"field {name!r} has no values: {entry}", hint="leave the field out")
    if dims > MOST_DIMS:
        raise SchemaError(
            f"field {name!r} has {dims} dims, and a row has at most {MOST_DIMS}", hint="reshape its rows"
        )
    size = math.prod(entry.shape)
    if size > _MOST_ITEMS:
        raise SchemaError(
            f"field {name!r} has {size:,} values per row, and {_MOST_ITEMS:,} are allowed",
            hint="divide them among several rows or fields",
        )


def _check_dtype(entry: Field) -> None:
    name = key_name(entry.key)
    if entry.variable:
        check_text(entry.arrow)
        if entry.shape:
            raise SchemaError(
                f"field {name!r} has row shape {list(entry.shape)}, but is of variable length",
                hint="the Arrow type describes the rows: use the shape ()",
            )
    elif entry.arrow:
        raise SchemaError(
            f"field {name!r} has dtype {entry.dtype} and an Arrow type",
            hint=f"use the dtype {ARROW!r}, or leave the type out",
        )
    elif entry.dtype not in DTYPES:
        raise SchemaError(
            f"field {name!r} has dtype {entry.dtype}", hint="supported are " + ", ".join((*DTYPES, ARROW))
        )


def _to_hex(entry: Field, value: Array) -> str:
    """Return the bytes of one row's value as hex; a single value if all values are equal."""
    items = np.ascontiguousarray(value, entry.numpy_dtype).reshape(-1)
    first = items[:1].tobytes()
    return (first if items.tobytes() == first * items.size else items.tobytes()).hex()


def _from_hex(entry: Field, text: str | None) -> Array | None:
    """Return the value that `_to_hex` wrote."""
    if text is None:
        return None
    items = np.frombuffer(bytes.fromhex(text), entry.numpy_dtype)
    if items.size not in (1, entry.row_items):
        raise ValueError(f"the default of {key_name(entry.key)!r} has {items.size} values")
    return np.broadcast_to(items[0] if items.size == 1 else items.reshape(entry.shape), entry.shape)


def is_name(part: object) -> bool:
    """Return whether a part of a key can be a part of a path."""
    return isinstance(part, str) and bool(_COMPONENT.fullmatch(part)) and part not in ("..", ".", "zarr.json")


def _check_name(key: Key) -> None:
    for part in key:
        if not is_name(part):
            raise SchemaError(
                f"key {key!r} cannot be a path: {part!r}",
                hint="each part is 1 to 100 letters, digits, _ . - or inner blanks, not '..' or 'zarr.json'",
            )
    if key[0].startswith(("_row", "__")):
        raise SchemaError(f"key {key!r} starts with a reserved name", hint="avoid '_row' and '__' in front")


def _key_trouble(unknown: Sequence[Key], missing: Sequence[Key]) -> str:
    parts = []
    if missing:
        parts.append("lacks " + ", ".join(repr(key_name(key)) for key in missing))
    if unknown:
        parts.append("has unknown " + ", ".join(repr(key_name(key)) for key in unknown))
    return "the batch " + " and ".join(parts)


def _fit(entry: Field, dtype: str, column: Array) -> Array:
    if entry.variable:
        fitted: Any = fit_arrow(entry.key, entry.arrow, column, dtype)
        return fitted  # type: ignore[no-any-return]
    if dtype.startswith(_ARROW):
        text = dtype.removeprefix(_ARROW)
        raise SchemaError(
            f"field {key_name(entry.key)!r}: expected {entry}, got {describe(text) if text else 'None'}",
            hint="all rows of a fixed-size field have one shape; pass schema= to a new store for others",
        )
    if column.shape[1:] != entry.shape:
        raise SchemaError(
            f"field {key_name(entry.key)!r}: expected {entry}, got {dtype}{list(column.shape[1:])}",
            hint=_MORE_DIMS if column.shape[2:] == entry.shape else "",
        )
    if dtype != entry.dtype:
        other = {"bfloat16", OBJECT} & {dtype, entry.dtype}
        if other or not np.can_cast(column.dtype, entry.numpy_dtype, "safe"):
            raise SchemaError(
                f"field {key_name(entry.key)!r}: expected {entry}, got {dtype}, which may lose values",
                hint=f"convert it to {entry.dtype} yourself",
            )
    cast: Array = np.ascontiguousarray(column, dtype=entry.numpy_dtype).reshape(column.shape)
    if dtype != entry.dtype and (lost := find_lost(column, cast)) is not None:
        raise SchemaError(
            f"field {key_name(entry.key)!r}: expected {entry}, got {dtype} with {lost}, which {entry.dtype} "
            "would round",
            hint=f"convert it to {entry.dtype} yourself, or store it in a field of integers",
        )
    return cast
