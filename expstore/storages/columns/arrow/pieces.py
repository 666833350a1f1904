"""Rows that continue earlier rows: which elements a row takes from which rows, as bytes and as arrays.

Used by segments. A row of a continued field is stored as a struct of `own`, the list of its last elements,
and `pieces`, bytes: the crc32c of its whole value (4 bytes, little-endian), then two varints (LEB128) for
each piece, the distance from the owner of the piece before to its owner and the number of elements. The first
distance is counted back from the row's id. A piece is the first elements of the owner's `own`. The whole
value is all pieces and then `own`. `pieces` of a row that is None has no bytes. This module uses no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import google_crc32c
import numpy as np
import pyarrow as pa

from expstore.core.values import Array, IntArray
from expstore.errors import CorruptionError

_CRC_BYTES = 4
#: Most bytes of a varint: 63 bits.
_MOST_DIGITS = 9


def to_stored_type(kind: pa.DataType) -> pa.StructType:
    """Return the type of the stored rows of a continued field whose whole values have a type."""
    return pa.struct([("own", kind), ("pieces", pa.binary())])


class Piece(NamedTuple):
    """The elements that a row takes from another row: the first ones of its `own`.

    Args:
        owner: Id of the other row.
        size: Number of elements.
    """

    owner: int
    size: int


def pack_pieces(row: int, pieces: Sequence[Piece], crc: int) -> bytes:
    """Return the pieces of a row as bytes.

    Args:
        row: The row's id.
        pieces: Its pieces; their owners are ascending, and smaller than the row's id.
        crc: The checksum of its whole value.
    """
    data = bytearray(crc.to_bytes(_CRC_BYTES, "little"))
    before = 0
    for owner, count in pieces:
        for number in (owner - before if before else row - owner, count):
            while number > 127:
                data.append(number & 127 | 128)
                number >>= 7
            data.append(number)
        before = owner
    return bytes(data)


class Pieces(NamedTuple):
    """The pieces of several rows.

    Args:
        rows: Number of the row of each piece, ascending. Shape `(p,)`, like the next two arguments.
        owners: Id of the row with its elements.
        counts: Number of its elements.
        crcs: Checksum of each row's whole value. Shape `(n,)`; n is the number of rows.
        some: Whether each row has a value. Shape `(n,)`.
    """

    rows: IntArray
    owners: IntArray
    counts: IntArray
    crcs: IntArray
    some: Array

    @classmethod
    def read(cls, ids: IntArray, packed: pa.BinaryArray) -> Self:
        """Return what `pack_pieces` packed.

        Args:
            ids: Ids of the rows. Shape `(n,)`.
            packed: The bytes of each row; None or no bytes: the row has no value. Length n.

        Raises:
            CorruptionError: The bytes are damaged.
        """
        ends, data = text_buffers(packed.fill_null(b""))
        sizes = np.diff(ends, prepend=0)
        some = sizes > 0
        heads = (ends - sizes)[some]
        if (sizes[some] < _CRC_BYTES).any():
            raise _build_error()
        places = heads[:, None] + np.arange(_CRC_BYTES)
        crcs = np.zeros(ids.size, np.int64)
        crcs[some] = np.ascontiguousarray(data[places]).view("<u4")[:, 0]
        inside = np.ones(data.size, bool)
        inside[places.reshape(-1)] = False
        digits, of_row = data[inside], np.repeat(np.arange(ids.size), np.where(some, sizes - _CRC_BYTES, 0))
        last = digits < 128
        starts = np.flatnonzero(np.append(True, last[:-1])) if digits.size else np.zeros(0, np.int64)
        spans = np.diff(np.append(starts, digits.size))
        if starts.size % 2 or (digits.size and (not last[-1] or spans.max() > _MOST_DIGITS)):
            raise _build_error()
        numbers = (digits[starts] & 127).astype(np.int64)
        for place in range(1, int(spans.max(initial=0))):
            longer = np.flatnonzero(spans > place)
            numbers[longer] |= (digits[starts[longer] + place] & 127).astype(np.int64) << 7 * place
        rows, counts = of_row[starts[::2]], numbers[1::2]
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        steps = numbers[::2].copy()
        steps[first] = ids[rows[first]] - steps[first]
        total = np.cumsum(steps)
        owners = total - np.repeat((total - steps)[first], np.diff(np.append(first, rows.size)))
        wrong = (owners < 1) | (owners >= ids[rows]) | (counts < 1) | (rows != of_row[starts[1::2]])
        if wrong.any():
            raise _build_error()
        return cls(rows, owners, counts, crcs, some)

    def of_row(self, number: int) -> list[Piece]:
        """Return the pieces of one row."""
        low, high = np.searchsorted(self.rows, [number, number + 1])
        return list(map(Piece, self.owners[low:high].tolist(), self.counts[low:high].tolist()))

    def weave(self, ids: IntArray) -> tuple[IntArray, IntArray, IntArray]:
        """Return the runs of elements that make up the whole values, in their order.

        Args:
            ids: Ids of the rows. Shape `(n,)`.

        Returns:
            The number of the row of each run; the id of the row with the elements; and how many of the first
            elements of its `own` are in the run, -1 for all. Shapes `(r,)`.
        """
        mine = np.flatnonzero(self.some)
        rows = np.append(self.rows, mine)
        order = np.argsort(rows, kind="stable")  # the row's own elements after its pieces
        owners, counts = np.append(self.owners, ids[mine]), np.append(self.counts, np.full(mine.size, -1))
        return rows[order], owners[order], counts[order]


def _build_error() -> CorruptionError:
    return CorruptionError("the pieces of a row are damaged")


class Elements:
    """The elements of one whole value, to be compared by their bits.

    Args:
        data: The elements: unsigned integers; or the bytes of all texts.
        ends: The end of each text in `data`, with 0 in front; None: elements have a fixed size.
    """

    __slots__ = ("data", "ends")

    def __init__(self, data: Array, ends: IntArray | None) -> None:
        self.data, self.ends = data, ends

    def __len__(self) -> int:
        return len(self.data) if self.ends is None else len(self.ends) - 1

    @property
    def nbytes(self) -> int:
        """The size in memory, bytes."""
        return self.data.nbytes + (0 if self.ends is None else self.ends.nbytes)

    def size(self, count: int) -> int:
        """Return the size of the first elements, bytes."""
        return count * self.data.itemsize if self.ends is None else int(self.ends[count])

    def copy(self) -> Elements:
        """Return a copy that shares no memory."""
        return Elements(self.data.copy(), None if self.ends is None else self.ends.copy())

    def common(self, other: Elements) -> int:
        """Return how many of the first elements are equal."""
        if self.ends is None or other.ends is None:
            return _equal(self.data, other.data)
        count = _equal(self.ends[1:], other.ends[1:])
        same = _equal(self.data[: self.ends[count]], other.data[: self.ends[count]])
        return min(count, int(np.searchsorted(self.ends, same, side="right")) - 1)

    def checksums(self, counts: Sequence[int]) -> list[int]:
        """Return the checksums of the first elements, for ascending counts.

        The checksum is the crc32c of the elements as they are in memory, little-endian, a bool as one byte.
        For texts it is the crc32c of their bytes, combined by xor with that of their ends (int64).
        """
        found, crc, crc_ends, done = [], 0, 0, 0
        for count in counts:
            data, ends = self.data, self.ends
            if ends is None:
                crc = google_crc32c.extend(crc, data[done:count])
            else:
                crc = google_crc32c.extend(crc, data[ends[done] : ends[count]])
                crc_ends = google_crc32c.extend(crc_ends, ends[done + 1 : count + 1])
            done = count
            found.append(crc ^ crc_ends)
        return found


def _equal(one: Array, other: Array) -> int:
    """Return how many of the first items are equal."""
    count = min(len(one), len(other))
    differs = one[:count] != other[:count]
    return int(differs.argmax()) if differs.any() else count


def split_elements(column: pa.ListArray) -> list[Elements]:
    """Return the elements of each row of a column of whole values; no elements for None."""
    bounds = np.cumsum(np.append(0, column.value_lengths().fill_null(0).to_numpy()))
    leaf = column.flatten()
    pairs = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    if pa.types.is_string(leaf.type) or pa.types.is_binary(leaf.type):
        ends, data = text_buffers(leaf)
        ends = np.append(0, ends)
        return [Elements(data[ends[a] : ends[b]], ends[a : b + 1] - ends[a]) for a, b in pairs]
    values = _bits_of(leaf)
    return [Elements(values[a:b], None) for a, b in pairs]


def text_buffers(texts: pa.Array) -> tuple[IntArray, Array]:
    """Return the end of each text or bytes, and the bytes of all; none may be None."""
    _, ends, data = texts.buffers()
    if not len(texts):
        return np.zeros(0, np.int64), np.zeros(0, np.uint8)
    found = np.frombuffer(ends, np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    whole = np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8)
    return found[1:] - found[0], whole[found[0] : found[-1]]


def _bits_of(leaf: pa.Array) -> Array:
    """Return elements of a fixed size as unsigned integers. Shape `(n,)`."""
    if pa.types.is_boolean(leaf.type):
        return np.ascontiguousarray(leaf.to_numpy(zero_copy_only=False)).view(np.uint8)
    count, each = len(leaf), 1
    if pa.types.is_fixed_size_list(leaf.type):
        each, leaf = leaf.type.list_size, leaf.flatten()
    width, data = leaf.type.bit_width // 8, leaf.buffers()[1]
    if not count:
        return np.zeros(0, f"u{width * each}")
    flat = np.frombuffer(data, np.uint8)[leaf.offset * width : (leaf.offset + len(leaf)) * width]
    found: Array = flat.view(f"<u{width * each}")
    return found


def join_lists(kind: Any, counts: IntArray, values: Any, missing: Array) -> pa.ListArray:
    """Return lists of consecutive values.

    Args:
        kind: Type of the lists.
        counts: Number of values of each list. Shape `(n,)`.
        values: The values of all lists.
        missing: Which lists are None. Shape `(n,)`.
    """
    ends = pa.array(np.append(0, np.cumsum(counts)), pa.int32())
    return pa.ListArray.from_arrays(ends, values, kind, mask=pa.array(missing) if missing.any() else None)
