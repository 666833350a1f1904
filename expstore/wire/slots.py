"""A call between two processes in memory that they share: a header, a text, and columns as raw arrays.

Used by a buffer that other processes write through. A slot holds one call at a time. The caller writes the
columns first, then the text, and the header last; only then it sends a message. The other side uses the
columns where they are, without a copy, writes its answer over them and sends a message back. So a slot is
not written to while the other side reads it.

    0      header: what the text and the columns are, with the checksum of header and text
    128    text: JSON
           columns: arrays of a fixed dtype and row shape, each from a multiple of 64 on
           tail: columns without a fixed size, as an Arrow stream

The checksum finds a header that is not the call's. It does not cover the columns: the store computes a
checksum of its own of each batch, from these bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from expstore.core.values import Array, IntArray, Key, key_name
from expstore.data.batch import Batch
from expstore.errors import SchemaError, StorageError
from expstore.schema.schema import OBJECT, Schema

_MAGIC = b"expslot1"
#: Magic, checksum of the rest and the text, bytes of the text, number of the call, all bytes, rows, bytes of
#: the tail, key.
_HEADER = struct.Struct("<8sIIQQQQ32s")
_CHECKED = 12  # from here on the header is part of the checksum
#: Where the text begins, and where an answer does.
_TEXT_AT = 128
_ALIGNMENT = 64
NO_KEY = bytes(32)


class ColumnLayout(NamedTuple):
    """How one column lies in a slot.

    Args:
        dtype: NumPy's.
        shape: Of a row.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def bytes_of(self, rows: int) -> int:
        """Return how many bytes so many rows take."""
        return rows * math.prod(self.shape) * self.dtype.itemsize


class Call(NamedTuple):
    """What the header and the text of a slot say.

    Args:
        text: What is asked for, as JSON.
        rows: How many rows each column has.
        tail: How many bytes the tail has.
        key: 32 bytes: name and digest of an idempotency key; zeros: none.
    """

    text: bytes
    rows: int = 0
    tail: int = 0
    key: bytes = NO_KEY


class Slot:
    """Write and read calls and answers in shared memory.

    Threads: one at a time. Processes: the two that share the memory; one of them writes at a time.

    Args:
        memory: The bytes. Shape `(size,)`.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory = memory
        #: How many bytes it has.
        self.size = memory.size
        # Views of the columns of the last call, and where they end: calls of one worker are mostly alike.
        self._last: tuple[int, int, Sequence[ColumnLayout]] = (0, 0, ())
        self._views: list[Array] = []
        self._end = _TEXT_AT

    @staticmethod
    def space_for(call: Call, layouts: Sequence[ColumnLayout]) -> int:
        """Return how many bytes a slot needs for a call and its answer."""
        at = _align(_TEXT_AT + len(call.text))
        for layout in layouts:
            at = _align(at + layout.bytes_of(call.rows))
        return max(at + call.tail, _TEXT_AT + 8 * call.rows)

    def has_space_for(self, call: Call, layouts: Sequence[ColumnLayout]) -> bool:
        """Return whether the slot is long enough for a call and its answer."""
        if self._is_like_last(call, layouts):
            return self._end + call.tail <= self.size
        return self.space_for(call, layouts) <= self.size

    def _is_like_last(self, call: Call, layouts: Sequence[ColumnLayout]) -> bool:
        text, rows, known = self._last
        return known is layouts and rows == call.rows and text == len(call.text)

    # -- the caller ----------------------------------------------------------------------------------

    def write_call(
        self,
        number: int,
        call: Call,
        layouts: Sequence[ColumnLayout] = (),
        columns: Sequence[Array] = (),
        tail: bytes = b"",
    ) -> int:
        """Write a call; return its length in bytes. The slot must have `space_for` it.

        Args:
            number: Of the call.
            call: What is asked for.
            layouts: Of the columns.
            columns: Their values. Shapes `(rows, *row shape)`.
            tail: What follows the columns.
        """
        end = _TEXT_AT + len(call.text)
        for view, column in zip(self.columns(call, layouts), columns, strict=True):
            self._put(view, column)
        start = self._end
        if tail:
            self._put(self._memory[start : start + len(tail)], np.frombuffer(tail, np.uint8))
        self._put(self._memory[_TEXT_AT:end], np.frombuffer(call.text, np.uint8))
        length = start + len(tail)
        header = _HEADER.pack(_MAGIC, 0, len(call.text), number, length, call.rows, call.tail, call.key)
        crc = google_crc32c.extend(google_crc32c.value(header[_CHECKED:]), call.text)
        header = _MAGIC + struct.pack("<I", crc) + header[_CHECKED:]
        self._put(self._memory[: _HEADER.size], np.frombuffer(header, np.uint8))
        return length

    def _put(self, target: Array, values: Array) -> None:
        """Copy values into the memory: every write of a caller goes through here."""
        target[...] = values

    def numbers_answer(self, count: int) -> IntArray:
        """Return the numbers of an answer. Shape `(count,)`, int64."""
        found: IntArray = self._memory[_TEXT_AT : _TEXT_AT + 8 * count].view(np.int64).copy()
        return found

    def text_answer(self, size: int) -> bytes:
        """Return the text of an answer."""
        return self._memory[_TEXT_AT : _TEXT_AT + size].tobytes()

    # -- the other side ------------------------------------------------------------------------------

    def read_call(self, number: int, length: int) -> Call:
        """Return a call, as the message that announces it says.

        Args:
            number: Of the call.
            length: In bytes.

        Raises:
            StorageError: The slot does not hold this call.
        """
        header = self._memory[: _HEADER.size].tobytes()
        magic, crc, text_bytes, given, size, rows, tail, key = _HEADER.unpack(header)
        text = self._memory[_TEXT_AT : _TEXT_AT + text_bytes].tobytes()
        if (magic, given, size) != (_MAGIC, number, length) or crc != google_crc32c.extend(
            google_crc32c.value(header[_CHECKED:]), text
        ):
            raise StorageError(f"the shared memory does not hold call {number} of {length} bytes")
        return Call(text, rows, tail, key)

    def columns(self, call: Call, layouts: Sequence[ColumnLayout]) -> list[Array]:
        """Return the columns of a call as views of the memory. Shapes `(rows, *row shape)`.

        Raises:
            StorageError: The memory is too short for them.
        """
        if self._is_like_last(call, layouts):
            return self._views
        views, at = [], _align(_TEXT_AT + len(call.text))
        for layout in layouts:
            size = layout.bytes_of(call.rows)
            if at + size > self.size:
                raise StorageError(f"{call.rows} rows do not fit into {self.size} bytes of shared memory")
            views.append(self._memory[at : at + size].view(layout.dtype).reshape(call.rows, *layout.shape))
            at = _align(at + size)
        self._last, self._views, self._end = (len(call.text), call.rows, layouts), views, at
        return views

    def tail(self, call: Call, layouts: Sequence[ColumnLayout]) -> bytes:
        """Return a copy of what follows the columns of a call."""
        self.columns(call, layouts)
        return self._memory[self._end : self._end + call.tail].tobytes()

    def answer_numbers(self, numbers: IntArray) -> int:
        """Write numbers as an answer, over the call; return how many. Shape `(n,)`."""
        self._answer(np.ascontiguousarray(numbers, np.int64).view(np.uint8))
        return numbers.size

    def answer_text(self, text: bytes) -> int:
        """Write a text as an answer, over the call; return its size.

        Raises:
            StorageError: The slot is too short.
        """
        if len(text) > self.size - _TEXT_AT:
            raise StorageError(f"an answer of {len(text)} bytes does not fit into {self.size} bytes")
        self._answer(np.frombuffer(text, np.uint8))
        return len(text)

    def _answer(self, values: Array) -> None:
        """Copy values into the memory: every write of an answer goes through here."""
        self._memory[_TEXT_AT : _TEXT_AT + values.size] = values


def _align(at: int) -> int:
    return -(-at // _ALIGNMENT) * _ALIGNMENT


# -- batches --------------------------------------------------------------------------------------------


def columns_of(batch: Batch) -> tuple[list[Key], list[str], list[Array], list[Any]]:
    """Return keys, dtypes, arrays of a fixed size, and pyarrow Arrays, of the columns of a batch.

    Columns of a fixed size come first.

    Raises:
        SchemaError: A field holds objects, or has no values.
    """
    schema = batch.arranged
    keys = list(schema.keys) if schema is not None else batch.keys
    dtypes = _dtypes_of(schema) if schema is not None else batch.dtypes
    if OBJECT in dtypes:
        raise SchemaError(
            f"field {key_name(keys[dtypes.index(OBJECT)])!r} holds objects, which no other process can store",
            hint="store tensors, or values of Python in a store with layout='arrow'",
        )
    fixed = [isinstance(array, np.ndarray) for array in batch.arrays]
    for key, array in zip(keys, batch.arrays, strict=True):
        if isinstance(array, np.ndarray) and 0 in array.shape[1:]:
            raise SchemaError(f"field {key_name(key)!r} has no values", hint="leave the field out")
    if all(fixed):
        return keys, dtypes, batch.arrays, []
    order = [*np.flatnonzero(fixed).tolist(), *np.flatnonzero(~np.array(fixed)).tolist()]
    arrays = [batch.arrays[place] for place in order]
    count = sum(fixed)
    return [keys[at] for at in order], [dtypes[at] for at in order], arrays[:count], arrays[count:]


def _dtypes_of(schema: Schema) -> list[str]:
    return [f"{entry.dtype}:{entry.arrow}" if entry.variable else entry.dtype for entry in schema.fields]


def describe_batch(batch: Batch, keys: Sequence[Key], dtypes: Sequence[str]) -> dict[str, Any]:
    """Return what `BatchReader` needs to know of a batch besides its columns and their layouts."""
    schema = batch.arranged
    return {
        "keys": keys,
        "dtypes": dtypes,
        "form": batch.form if schema is None else schema.form,
        "dims": batch.dims,
        "has_lanes": batch.lanes is not None,
        "lane_count": batch.lane_count,
        "linked": batch.linked,
    }


def layouts_of(columns: Sequence[Array]) -> tuple[ColumnLayout, ...]:
    """Return how columns lie in a slot."""
    return tuple(ColumnLayout(column.dtype, column.shape[1:]) for column in columns)


def describe_layouts(layouts: Sequence[ColumnLayout]) -> list[tuple[str, tuple[int, ...]]]:
    """Return layouts as JSON keeps them."""
    return [(layout.dtype.str, layout.shape) for layout in layouts]


def read_layouts(told: Any) -> tuple[ColumnLayout, ...]:
    """Return the layouts that `describe_layouts` has described.

    Raises:
        ValueError: A column cannot lie in shared memory.
        TypeError: They are no layouts.
    """
    layouts = tuple(ColumnLayout(np.dtype(dtype), tuple(map(int, shape))) for dtype, shape in told)
    if any(layout.dtype.hasobject or min(layout.shape, default=1) < 1 for layout in layouts):
        raise ValueError(f"columns that cannot lie in shared memory: {told}")
    return layouts


class BatchReader:
    """Make batches of the columns of calls that have one text.

    Args:
        told: As `describe_batch` returned it.
        layouts: Of the columns in the slot.
    """

    def __init__(self, told: dict[str, Any], layouts: Sequence[ColumnLayout]) -> None:
        self._keys: list[Key] = [tuple(key) for key in told["keys"]]
        self._dtypes: list[str] = list(told["dtypes"])
        self._form, self._dims = str(told["form"]), tuple(told["dims"])
        self._has_lanes, self._linked = bool(told["has_lanes"]), bool(told["linked"])
        #: How many lanes the batches have.
        self.lane_count = int(told["lane_count"])
        self._shapes = [layout.shape for layout in layouts[: len(layouts) - self._has_lanes]]
        self._fitting: Schema | None = None

    def read(self, columns: list[Array], tail: bytes, schema: Schema | None) -> Batch:
        """Return the batch.

        Args:
            columns: Those in the slot; the last one is the lanes if there are several.
            tail: The columns without a fixed size, as `write_tail` returned them.
            schema: Of the store; the caller may have seen another one.
        """
        lanes = None
        if self._has_lanes:
            *columns, lanes = columns
        if tail:
            with pa.ipc.open_stream(tail) as stream:
                columns = [*columns, *stream.read_next_batch().columns]
        batch = Batch(
            [], [], columns, len(columns[0]), lanes, self.lane_count,
            form=self._form, dims=self._dims, linked=self._linked,
        )  # fmt: skip
        if schema is not None and self._fits(schema):
            batch.arranged = schema
        else:
            batch.keys, batch.dtypes = self._keys, self._dtypes
        return batch

    def _fits(self, schema: Schema) -> bool:
        """Return whether the columns are those of a schema, in its order."""
        if self._fitting is schema:
            return True
        fits = (
            not self._dims
            and self._form == schema.form
            and tuple(self._keys) == schema.keys
            and not schema.annotated
            and self._dtypes == _dtypes_of(schema)
            and self._shapes == [entry.shape for entry in schema.fields if not entry.variable]
        )
        self._fitting = schema if fits else None
        return fits


def write_tail(columns: Sequence[Any]) -> bytes:
    """Return pyarrow Arrays as an Arrow stream; b"" if there are none."""
    if not columns:
        return b""
    batch = pa.RecordBatch.from_arrays(list(columns), names=[str(place) for place in range(len(columns))])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    found: bytes = sink.getvalue().to_pybytes()
    return found
