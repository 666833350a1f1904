"""Convert rows to Arrow record batches and back: the HTTP layer and its client exchange them.

A field is one column; its name is the parts of its key, joined by dots. A row of one value is a plain number;
other shapes are Arrow's `fixed_shape_tensor`, the only extension type used. complex64 has a last dim of two
float32, bfloat16 is widened to float32. Variable-length rows have the type of their segments. The schema's
metadata holds, under `expstore` as JSON, what Arrow's types do not express: key, dtype and shape of each
field, and the batch size. Readers that ignore the metadata can still read the rows. This module touches no
files and no sockets.
"""

from __future__ import annotations

import contextlib
import json
import math
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from tensordict import TensorDict, TensorDictBase

from expstore.core.bfloat16 import widen_bfloat16
from expstore.core.values import Array, Key, key_name
from expstore.data import containers
from expstore.data.batch import Batch, Builder, Layout
from expstore.data.leaves import leaves_of, to_columns
from expstore.errors import CorruptionError, SchemaError
from expstore.schema.arrow_types import to_type, type_text
from expstore.schema.schema import ARROW, DTYPES, OBJECT, Field, Schema
from expstore.wire.frames import HEAD_BYTES, Frame, FrameForm, frame_of, message_of

_ABOUT = b"expstore"
_WISHES = b"expstore.wishes"
#: The key of a note in the metadata of a message, and its length: longer than most.
NOTE = b"expstore.draw"
_NOTE_BYTES = 512
_FORMAT = 1
#: The Arrow type for one value of a dtype.
_ARROW: dict[str, Any] = {
    name: pa.from_numpy_dtype(dtype) for name, dtype in DTYPES.items() if dtype.kind in "biuf"
} | {"bfloat16": pa.float32(), "complex64": pa.float32()}
#: The NumPy dtype of the values in Arrow.
_WIRE = DTYPES | {"bfloat16": np.dtype("<f4"), "complex64": np.dtype("<f4")}
_NAMES = {kind: name for name, kind in _ARROW.items() if name not in ("bfloat16", "complex64")}
_LAYOUT = Layout(typed=True)
#: Number of kinds of batches that an encoder remembers.
_KINDS = 16


@dataclass(frozen=True)
class Coded:
    """The fields of a record batch.

    Args:
        schema: The fields.
        batch_size: Batch size from the metadata; (): the metadata has no batch size, use the number of rows.
        names: Names of the batch dims.
    """

    schema: Schema
    batch_size: tuple[int, ...] = ()
    names: tuple[str | None, ...] = ()


def columns_of(data: TensorDictBase, known: Schema | None = None) -> tuple[Schema, list[Any]]:
    """Return the fields of a batch, and their values with all batch dims flattened into one.

    Args:
        data: Rows; on any device.
        known: Schema of the store that the rows are from. It fixes the types of variable-length fields, which
            cannot always be inferred from a batch.

    Returns:
        The fields, and one column for each. Shapes `(n, *row shape)`; pyarrow Arrays for variable-length
        fields.

    Raises:
        SchemaError: An entry cannot be sent.
    """
    flat = data if data.ndim == 1 else data.reshape(-1)
    batch = containers.take(flat, _LAYOUT)
    schema = _schema_of(batch, known)
    if schema.objects:
        raise SchemaError(
            f"field {key_name(schema.objects[0])!r} holds objects, which cannot be sent",
            hint="send tensors, text, bytes, numbers, or lists and dicts of these",
        )
    return schema, batch.columns(schema)


def _schema_of(batch: Batch, known: Schema | None) -> Schema:
    if known is None or not known.variable:
        return Schema.infer(batch.signature())
    rest = [place for place, key in enumerate(batch.keys) if key not in known or not known[key].variable]
    others = Batch(
        [batch.keys[place] for place in rest], [batch.dtypes[place] for place in rest],
        [batch.arrays[place] for place in rest], batch.count,
    )  # fmt: skip
    found = {entry.key: entry for entry in Schema.infer(others.signature()).fields} if rest else {}
    # Values that are sent are values of a row, also of annotated fields.
    return Schema([found.get(key) or replace(known[key], annotated=False, like=()) for key in batch.keys])


class Codec:
    """Convert rows of one schema to record batches and back.

    Threads may share a codec.

    Args:
        schema: The fields.

    Raises:
        SchemaError: A field holds objects.
    """

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.names = [key_name(entry.key) for entry in schema.fields]  # unique in a schema
        self._types = [_type_of(entry) for entry in schema.fields]
        self._builder = Builder(schema)
        #: Values per row, with the type that Arrow gives them.
        self._items = [
            math.prod(entry.shape) * (2 if entry.dtype == "complex64" else 1) for entry in schema.fields
        ]

    def with_fields(self, names: Collection[str]) -> Codec:
        """Return the codec for rows that have only these columns: fields added later may be missing."""
        given, schema = set(names), self.schema
        fields = [
            entry
            for entry, name in zip(schema.fields, self.names, strict=True)
            if name in given or not (entry.annotated or schema.late.get(entry.key) is not None)
        ]
        return self if len(fields) == len(schema.fields) else Codec(Schema(fields))

    def arrow_schema(self, batch_size: Sequence[int] = (), names: Sequence[str | None] = ()) -> Any:
        """Return the schema of record batches.

        Args:
            batch_size: Batch size, if the batch has more than one dim.
            names: Names of the batch dims.
        """
        facts: dict[str, Any] = {"format": _FORMAT, "fields": self.schema.to_json()}
        if len(batch_size) > 1 or any(names):
            facts |= {"batch_size": list(batch_size), "names": list(names)}
        fields = [
            pa.field(name, kind, nullable=entry.variable)
            for name, kind, entry in zip(self.names, self._types, self.schema.fields, strict=True)
        ]
        return pa.schema(fields, metadata={_ABOUT: json.dumps(facts).encode()})

    def encode(self, columns: Sequence[Any], arrow_schema: Any) -> Any:
        """Return rows as a record batch, which may share their memory.

        Args:
            columns: In the schema's order. Shapes `(n, *row shape)`.
            arrow_schema: The result of `arrow_schema`.
        """
        arrays = [
            _to_arrow(entry, kind, column)
            for entry, kind, column in zip(self.schema.fields, self._types, columns, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema)

    def decode(self, batch: Any, memory: Any = None) -> list[Any]:
        """Return the columns of a record batch, in the schema's order.

        Args:
            batch: A record batch with a schema that `check` accepts.
            memory: The writable memory that holds the batch: the columns are views of it. None: they are
                copies.

        Returns:
            Shapes `(n, *row shape)`; pyarrow Arrays for variable-length fields.

        Raises:
            SchemaError: A value is missing, or is not a bfloat16 in a field of that dtype.
        """
        base = None if memory is None else _Memory(memory)
        found, columns = batch.schema.names, batch.columns
        if found != self.names:
            columns = [columns[found.index(name)] for name in self.names]
        return [
            _from_arrow(entry, column, base)
            for entry, column in zip(self.schema.fields, columns, strict=True)
        ]

    def decode_all(self, batches: Sequence[Any], memory: Any = None) -> list[Any]:
        """Return the columns of several record batches, one batch after another.

        Args:
            batches: At least one, as `decode` takes them.
            memory: As in `decode`.
        """
        parts = [self.decode(batch, memory) for batch in batches]
        return parts[0] if len(parts) == 1 else [join_columns(part) for part in zip(*parts, strict=True)]

    def buffers(self, arrow_schema: Any) -> list[int] | None:
        """Return the number of the buffer with each field's values; None if a field has several buffers.

        Args:
            arrow_schema: A schema that `check` accepts.
        """
        if self.schema.variable:
            return None
        values, count = {}, 0
        for column in arrow_schema:
            # Validity buffers, of the rows and of each of their dims, come before the values
            # (https://arrow.apache.org/docs/format/Columnar.html, "Fixed-Size List Layout").
            count += _depth(column.type) + 2
            values[column.name] = count - 1
        return [values[name] for name in self.names]

    def read(self, frame: Frame, buffers: Sequence[int]) -> list[Array]:
        """Return the columns of a plain record batch, in the schema's order, as views of its memory.

        Args:
            frame: A frame with a schema that `check` accepts.
            buffers: The result of `buffers` for that schema.

        Returns:
            Shapes `(n, *row shape)`.

        Raises:
            SchemaError: A value is not a bfloat16 in a field of that dtype, or there are fewer values than
                rows.
        """
        body, rows, bounds = frame.memory[frame.body :], frame.rows, frame.bounds.tolist()
        columns = []
        for entry, number, items in zip(self.schema.fields, buffers, self._items, strict=True):
            begin, size = bounds[number]
            part, count = body[begin : begin + size], rows * items
            wire = _WIRE[entry.dtype]
            if len(part) < (-(-count // 8) if wire.kind == "b" else count * wire.itemsize):
                raise SchemaError(f"the values of {key_name(entry.key)!r} end before their last row")
            if wire.kind == "b":  # Arrow stores a boolean in one bit
                values = np.unpackbits(part, count=count, bitorder="little").view(wire)
            else:
                values = part[: count * wire.itemsize].view(wire)
            columns.append(_to_rows(entry, values, rows))
        return columns

    def check(self, arrow_schema: Any) -> None:
        """Check that record batches of this schema have all fields, each with its type.

        Raises:
            SchemaError: A column is missing, unknown or of another type; the message names it.
        """
        found = list(arrow_schema.names)
        if sorted(found) != sorted(self.names):
            missing, surplus = set(self.names) - set(found), set(found) - set(self.names)
            trouble = [f"column {min(missing)!r} is missing"] if missing else []
            trouble += [f"column {min(surplus)!r} is not a field"] if surplus else []
            raise SchemaError(
                " and ".join(trouble) or "a column appears twice", hint=f"send {', '.join(self.names)}"
            )
        for name, kind, entry in zip(self.names, self._types, self.schema.fields, strict=True):
            got = arrow_schema.field(name).type
            if not _suits(got, kind, entry):
                raise SchemaError(
                    f"column {name!r} is {_describe(got)}",
                    hint=f"the field is {entry}, its Arrow type {kind}",
                )

    def build(
        self, columns: Sequence[Any], batch_size: Sequence[int] = (), names: Sequence[str | None] = ()
    ) -> TensorDict:
        """Return columns as a TensorDict that shares their memory.

        Args:
            columns: In the schema's order. Shapes `(n, *row shape)`.
            batch_size: Batch size of the result; (): `(n,)`.
            names: Names of the batch dims.

        Raises:
            SchemaError: The number of rows does not match the batch size.
        """
        count = len(columns[0])
        size = torch.Size(batch_size or (count,))
        if size.numel() != count:
            raise SchemaError(f"the batch size is {list(size)}, and there are {count} rows")
        if len(size) > 1:
            columns = [
                column.reshape(*size, *entry.shape) if isinstance(column, np.ndarray) else column
                for column, entry in zip(columns, self.schema.fields, strict=True)
            ]
        built = self._builder.build(columns, size, {})
        if any(names):
            built.names = list(names)
        return built


class Message(NamedTuple):
    """A record batch as it is sent.

    Args:
        schema: The Arrow schema.
        data: The bytes of the message.
    """

    schema: Any
    data: Any


class _Kind:
    """What an encoder remembers for batches that differ only in their values."""

    def __init__(self, schema: Schema, data: TensorDictBase) -> None:
        self.codec = Codec(schema)
        self.arrow_schema = self.codec.arrow_schema(data.batch_size, _names_of(data))
        #: Of messages without a note, and with a note of each length.
        self._templates: dict[int | None, FrameForm | None] = {}

    def message(self, columns: Sequence[Any], note: bytes | None) -> Any:
        """Return the bytes of the message for these rows, with a note in its metadata."""
        length = None if note is None else len(note)
        form = self._templates.get(length)
        if form is not None:
            return form.write(columns, note)
        notes = None if note is None else {NOTE: note}
        data = message_of(self.codec.encode(columns, self.arrow_schema), notes)
        if length not in self._templates:
            self._templates[length] = self._make_form(data, columns, note)
        return data

    def _make_form(self, data: Any, columns: Sequence[Any], note: bytes | None) -> FrameForm | None:
        """Return a template of such messages; None if they do not follow one."""
        buffers = self.codec.buffers(self.arrow_schema)
        if buffers is not None:
            memory, (head,) = np.frombuffer(data, np.uint8), struct.unpack_from("<i", data, 4)
            form = FrameForm(frame_of(self.arrow_schema, memory, HEAD_BYTES + head), buffers, note)
            with contextlib.suppress(ValueError):
                # The bytes differ for bfloat16, which is sent as float32.
                if np.array_equal(form.write(columns, note), memory):
                    return form
        return None


class Encoder:
    """Convert batches to record batches; fast for a batch of the same kind as an earlier one.

    Threads may share an encoder.

    Args:
        schema: Returns the schema of the store that the batches are from; None: it is inferred from the
            batch.
    """

    def __init__(self, schema: Callable[[], Schema | None] = lambda: None) -> None:
        self._schema = schema
        self._known: dict[Any, _Kind] = {}

    def encode(self, data: TensorDictBase) -> Any:
        """Return rows as a record batch whose schema metadata describes the fields.

        Args:
            data: Rows; on any device.

        Raises:
            SchemaError: An entry cannot be sent.
        """
        kind, columns = self._take_columns(data)
        return kind.codec.encode(columns, kind.arrow_schema)

    def message(self, data: TensorDictBase, note: bytes | None = None) -> Message:
        """Return rows as the bytes of the record batch that `encode` returns, but faster.

        Args:
            data: Rows; on any device.
            note: The result of `write_note`, which is sent with the batch; None to send none.

        Raises:
            SchemaError: An entry cannot be sent.
        """
        kind, columns = self._take_columns(data)
        return Message(kind.arrow_schema, kind.message(columns, note))

    def columns(self, data: TensorDictBase) -> tuple[Codec, Sequence[Any]]:
        """Return the codec of rows, and their columns in its order, which may share their memory.

        Args:
            data: Rows; on any device.

        Raises:
            SchemaError: An entry cannot be sent.
        """
        kind, columns = self._take_columns(data)
        return kind.codec, columns

    def _take_columns(self, data: TensorDictBase) -> tuple[_Kind, Sequence[Any]]:
        """Return the kind of a batch, and its columns."""
        dims = data.ndim
        try:
            keys, leaves = leaves_of(data)  # raises for rows that differ in shape
            alike = (
                data.batch_size,
                tuple(data.names),
                *zip(
                    keys, [leaf.dtype for leaf in leaves], [leaf.shape[dims:] for leaf in leaves], strict=True
                ),
            )
            store = self._schema()
            loose = store is not None and bool(store.variable)
            plain = not loose and not any(leaf.is_nested for leaf in leaves)
        except (AttributeError, RuntimeError):
            plain = False
        if not plain:
            schema, columns = columns_of(data, self._schema())
            return _Kind(schema, data), columns
        kind = self._known.get(alike)
        if kind is None:
            schema, _ = columns_of(data)
            if len(self._known) >= _KINDS:
                self._known.clear()
            kind = self._known[alike] = _Kind(schema, data)
        return kind, to_columns(keys, leaves, data.batch_size)[0]


def _names_of(data: TensorDictBase) -> Sequence[str | None]:
    return data.names if any(data.names) else ()


def with_wishes(batch: Any, wishes: Mapping[str, Any]) -> Any:
    """Return a record batch whose schema metadata says how to process its rows.

    Args:
        batch: The rows.
        wishes: Options by name; the values must be representable as JSON.
    """
    return batch.replace_schema_metadata({**(batch.schema.metadata or {}), _WISHES: json.dumps(wishes)})


def write_note(facts: Mapping[str, Any]) -> bytes:
    """Return facts about a batch as a note that is sent with it, nearly always of the same length.

    Args:
        facts: Numbers, texts and None by name.
    """
    return json.dumps(facts, separators=(",", ":")).encode().ljust(_NOTE_BYTES)


def note_of(frame: Frame) -> dict[str, Any]:
    """Return the facts in the note that was sent with a batch; empty if it has no note.

    Raises:
        SchemaError: The note is not a JSON object.
    """
    try:
        found = json.loads(frame.notes.get(NOTE, b"{}"))
        if isinstance(found, dict):
            return found
    except (ValueError, struct.error):
        pass
    raise SchemaError("the metadata of the batch cannot be read")


def wishes_of(arrow_schema: Any) -> dict[str, Any]:
    """Return the options that `with_wishes` has added.

    Raises:
        SchemaError: The metadata is not a JSON object.
    """
    try:
        found = json.loads((arrow_schema.metadata or {}).get(_WISHES, b"{}"))
        if isinstance(found, dict):
            return found
    except (ValueError, RecursionError):
        pass
    raise SchemaError("the options in the schema's metadata cannot be read")


class _Known(NamedTuple):
    """What a decoder remembers for batches of one schema."""

    schema: Any
    told: Coded
    codec: Codec
    buffers: list[int] | None


class Decoder:
    """Convert record batches to TensorDicts as their schemas describe; the last schemas are cached.

    Threads may share a decoder.
    """

    def __init__(self) -> None:
        self._last: tuple[_Known, ...] = ()

    def decode(self, batch: Any, memory: Any = None) -> TensorDict:
        """Return the rows of a record batch.

        Args:
            batch: A batch made by an `Encoder`, or one with plain columns.
            memory: As in `Codec.decode`.

        Raises:
            SchemaError: The columns are not rows that can be read.
        """
        known = self._find_known(batch.schema)
        return known.codec.build(known.codec.decode(batch, memory), known.told.batch_size, known.told.names)

    def read(self, frame: Frame) -> TensorDict:
        """Return the rows of a batch received in a stream, as views of its memory.

        Raises:
            SchemaError: The columns are not rows that can be read.
        """
        known = self._find_known(frame.schema)
        codec, columns = self.read_columns(frame)
        return codec.build(columns, known.told.batch_size, known.told.names)

    def read_columns(self, frame: Frame) -> tuple[Codec, list[Any]]:
        """Return the codec of a batch received in a stream, and its columns as views of its memory.

        Raises:
            SchemaError: The columns are not rows that can be read.
        """
        known = self._find_known(frame.schema)
        if known.buffers is not None and frame.plain:
            return known.codec, list(known.codec.read(frame, known.buffers))
        return known.codec, known.codec.decode(frame.batch(), frame.memory if frame.plain else None)

    def _find_known(self, schema: Any) -> _Known:
        for known in self._last:
            if known.schema is schema or known.schema.equals(schema, check_metadata=True):
                return known
        told = meaning_of(schema)
        codec = Codec(told.schema)
        made = _Known(schema, told, codec, codec.buffers(schema))
        self._last = (*self._last[-7:], made)
        return made


def join_columns(parts: Sequence[Any]) -> Any:
    """Concatenate the parts of a column; one part is copied, too."""
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else pa.concat_arrays(parts)


def plain_columns(batch: Any) -> list[list[Any]]:
    """Return the columns of a record batch as lists of Python values.

    Dates and times that Python cannot represent are returned as text.
    """
    return [_plain_column(column) for column in batch.columns]


def _plain_column(column: Any) -> list[Any]:
    if isinstance(column, pa.FixedShapeTensorArray):
        found: list[Any] = column.to_numpy_ndarray().tolist()
        return found
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):  # the year 290000, nanoseconds without pandas, duplicate member names
        return [_plain_value(value) for value in column]


def _plain_value(value: Any) -> Any:
    """Convert an Arrow scalar to a Python value."""
    if not value.is_valid:
        return None
    if isinstance(value, pa.ListScalar | pa.LargeListScalar | pa.FixedSizeListScalar):
        return [_plain_value(item) for item in value.values]
    if isinstance(value, pa.StructScalar):
        return {field.name: _plain_value(value[n]) for n, field in enumerate(value.type)}
    if isinstance(value, pa.ExtensionScalar | pa.DictionaryScalar | pa.UnionScalar):
        return _plain_value(value.value)
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        unit: Any = "D" if pa.types.is_date(value.type) else value.type.unit
        return str(np.datetime64(value.value, unit)).replace("T", " ")


def meaning_of(arrow_schema: Any, known: Codec | None = None) -> Coded:
    """Return the fields of a record batch, from its metadata or else from names and types.

    Args:
        arrow_schema: Schema of the batch.
        known: The codec of the fields that the rows must have; None: the schema decides.

    Raises:
        SchemaError: A column has a type that no field can have, or not the type of its field; or the metadata
            does not match the columns.
    """
    if known is not None:
        known.check(arrow_schema)
    text = (arrow_schema.metadata or {}).get(_ABOUT)
    if text is None:
        found = known and known.schema
        return Coded(found or Schema([_field_of(entry.name, entry.type) for entry in arrow_schema]))
    try:
        facts = json.loads(text)
        if int(facts["format"]) > _FORMAT:
            raise SchemaError(
                f"the rows are in format {facts['format']}, this version reads format {_FORMAT}",
                hint="upgrade expstore in this process",
            )
        schema = Schema.from_json(facts["fields"]) if known is None else known.schema
        size = tuple(int(part) for part in facts.get("batch_size", ()))
        names = tuple(None if name is None else str(name) for name in facts.get("names", ()))
        if any(part < 0 for part in size) or len(names) not in (0, len(size)):
            raise ValueError(f"a batch of size {size} with dims {names}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, CorruptionError) as exc:
        if isinstance(exc, SchemaError):
            raise
        raise SchemaError(f"the columns' metadata cannot be read: {exc}") from exc
    if known is None:
        Codec(schema).check(arrow_schema)
    return Coded(schema, size, names)


def _type_of(entry: Field) -> Any:
    """Return the Arrow type of a field's column."""
    if entry.dtype == OBJECT:
        raise SchemaError(f"field {key_name(entry.key)!r} holds objects, which cannot be sent")
    if entry.variable:
        return to_type(entry.arrow)
    kind = _ARROW[entry.dtype]
    shape = (*entry.shape, 2) if entry.dtype == "complex64" else entry.shape
    return kind if shape in ((), (1,)) else pa.fixed_shape_tensor(kind, shape)


def _field_of(name: str, kind: Any) -> Field:
    """Infer a field from an Arrow column that expstore did not write.

    Raises:
        SchemaError: A field cannot have the type.
    """
    key: Key = tuple(name.split("."))
    if _is_permuted(kind):
        raise SchemaError(f"column {name!r} is of type {kind}", hint="send its values in C order")
    value, shape = _split_type(kind)
    if value in _NAMES:
        return Field(key, _NAMES[value], shape)
    if isinstance(value, pa.BaseExtensionType) or shape:
        raise SchemaError(f"column {name!r} is of type {kind}, which a field cannot have")
    return Field(key, ARROW, (), type_text(value))


def _split_type(kind: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the type of the values of a column, and the row shape."""
    shape: tuple[int, ...] = ()
    if isinstance(kind, pa.FixedShapeTensorType):
        kind, shape = kind.value_type, tuple(kind.shape)
    while pa.types.is_fixed_size_list(kind):
        kind, shape = kind.value_type, (*shape, kind.list_size)
    return kind, shape


def _suits(kind: Any, wanted: Any, entry: Field) -> bool:
    """Return whether a column's type is that of a field, with its values in C order; a flat list can be."""
    if entry.variable:
        return bool(kind == wanted)
    (value, shape), (wanted_value, wanted_shape) = _split_type(kind), _split_type(wanted)
    if value != wanted_value or math.prod(shape) != math.prod(wanted_shape) or _is_permuted(kind):
        return False
    dims, wanted_dims = ([size for size in sizes if size != 1] for sizes in (shape, wanted_shape))
    return len(dims) < 2 or dims == wanted_dims


def _is_permuted(kind: Any) -> bool:
    """Return whether a type is a tensor whose dims are stored in another order than C's."""
    if not isinstance(kind, pa.FixedShapeTensorType) or kind.permutation is None:
        return False
    return list(kind.permutation) != sorted(kind.permutation)


def _describe(kind: Any) -> str:
    """Return a type for a message: a tensor as the schema writes it, any other type as Arrow does."""
    if isinstance(kind, pa.FixedShapeTensorType) and not _is_permuted(kind):
        value, is_a = kind.value_type, pa.types
        if is_a.is_boolean(value) or is_a.is_integer(value) or is_a.is_floating(value):
            return f"{np.dtype(value.to_pandas_dtype()).name}{list(kind.shape)}"
    return str(kind)


def _depth(kind: Any) -> int:
    """Return the number of nested fixed-size lists in a type."""
    depth = 0
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    while pa.types.is_fixed_size_list(kind):
        depth, kind = depth + 1, kind.value_type
    return depth


def to_plain_array(values: Array) -> Any:
    """Return numbers or flags as an Arrow array that shares memory of numbers. Shape `(n,)`, contiguous.

    Arrow's own conversion loads pandas if it is installed: half a second, and 45 MB of a server's memory.
    """
    kind = pa.from_numpy_dtype(values.dtype)
    data = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else values
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(data)])


def _to_arrow(entry: Field, kind: Any, column: Any) -> Any:
    if entry.variable:
        return column if column.type == kind else column.cast(kind)
    flat = np.ascontiguousarray(column).reshape(-1)
    if entry.dtype == "bfloat16":
        flat = widen_bfloat16(flat)
    elif entry.dtype == "complex64":
        flat = flat.view(np.float32)
    values = to_plain_array(flat)
    if not isinstance(kind, pa.FixedShapeTensorType):
        return values
    storage = pa.FixedSizeListArray.from_arrays(values, kind.storage_type.list_size)
    return pa.ExtensionArray.from_storage(kind, storage)


class _Memory:
    """Find the position of Arrow arrays in the writable memory that holds them."""

    def __init__(self, memory: Any) -> None:
        self._bytes = np.frombuffer(memory, np.uint8)
        self._start = self._bytes.ctypes.data

    def view(self, array: Any, dtype: np.dtype[Any]) -> Array:
        """Return a plain Arrow array as a NumPy view of the memory."""
        at = array.buffers()[1].address - self._start + array.offset * dtype.itemsize
        inside: Array = self._bytes[at : at + len(array) * dtype.itemsize].view(dtype)
        return inside


def _from_arrow(entry: Field, array: Any, base: _Memory | None) -> Any:
    if entry.variable:
        return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    count = len(array)
    while True:
        if array.null_count:
            raise SchemaError(f"column {key_name(entry.key)!r} has rows without a value")
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        elif isinstance(array, pa.FixedSizeListArray):
            inner = array.values  # of all rows in the memory; a slice has fewer
            whole = not array.offset and len(inner) == len(array) * array.type.list_size
            array = inner if whole else array.flatten()
        else:
            break
    return _to_rows(entry, _values(array, _WIRE[entry.dtype], base), count)


def _to_rows(entry: Field, values: Array, count: int) -> Array:
    """Return `count` rows of a field from their values in Arrow."""
    if entry.dtype == "bfloat16":
        bits = values.view(np.uint32)
        if (bits & np.uint32(0xFFFF)).any():
            raise SchemaError(
                f"column {key_name(entry.key)!r} has values bfloat16 cannot hold", hint="round them first"
            )
        values = (bits >> np.uint32(16)).astype(np.uint16)
    elif entry.dtype == "complex64":
        values = values.view(np.complex64)
    return values.reshape(count, *entry.shape)


def _values(array: Any, dtype: np.dtype[Any], base: _Memory | None) -> Array:
    """Return plain values as a writable array, without pandas (see `to_plain_array`)."""
    count, start = len(array), array.offset
    if not count:
        return np.zeros(0, dtype)
    memory = array.buffers()[1]
    if isinstance(array, pa.BooleanArray):  # Arrow stores a boolean in one bit
        bits = np.unpackbits(np.frombuffer(memory, np.uint8), count=start + count, bitorder="little")
        return bits[start:].view(np.bool_)
    if base is not None:
        return base.view(array, dtype)
    return np.frombuffer(memory, dtype, count, start * dtype.itemsize).copy()
