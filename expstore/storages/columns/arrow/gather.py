"""The layout of Arrow columns in the buffers of a batch, and copies of runs of rows out of many batches.

Used by segments. This module knows addresses and types, but no ids and no files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from expstore.core.values import Array, IntArray
from expstore.disk.files import address_of
from expstore.errors import CorruptionError, SchemaError

#: The largest value of a 32-bit offset.
_MOST_VALUES = (1 << 31) - 1
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Node:
    """The layout of the values of a type.

    Args:
        kind: The Arrow type.
        node: Number of the node among all nodes, depth first.
        buffer: Number of its first buffer, the validity bitmap.
        width: Bytes of a value, 0 for bits; for a list the bytes of an offset, for a fixed-size list its
            length.
        inner: The nodes of the values that it contains.
        text: Whether it contains bytes, in a separate buffer.
    """

    kind: pa.DataType
    node: int
    buffer: int
    width: int
    inner: tuple[Node, ...] = ()
    text: bool = False


class Plan:
    """The positions of the nodes and buffers of some columns in a batch.

    Args:
        kinds: The columns' types.
    """

    def __init__(self, kinds: Sequence[pa.DataType]) -> None:
        self._nodes = self._buffers = 0
        self.columns = tuple(self._add(kind) for kind in kinds)
        #: Number of nodes and of buffers in a batch.
        self.nodes, self.buffers = self._nodes, self._buffers

    def _add(self, kind: pa.DataType) -> Node:
        node, buffer = self._nodes, self._buffers
        self._nodes += 1
        is_a = pa.types
        if is_a.is_struct(kind):
            self._buffers += 1
            return Node(kind, node, buffer, 0, tuple(self._add(part.type) for part in kind))
        if is_a.is_fixed_size_list(kind):
            self._buffers += 1
            return Node(kind, node, buffer, kind.list_size, (self._add(kind.value_type),))
        if is_a.is_map(kind):
            self._buffers += 2
            return Node(kind, node, buffer, 4, (self._add(pa.struct([kind.key_field, kind.item_field])),))
        if is_a.is_list(kind) or is_a.is_large_list(kind):
            self._buffers += 2
            return Node(kind, node, buffer, 4 if is_a.is_list(kind) else 8, (self._add(kind.value_type),))
        if is_a.is_string(kind) or is_a.is_binary(kind):
            self._buffers += 3
            return Node(kind, node, buffer, 4, text=True)
        if is_a.is_large_string(kind) or is_a.is_large_binary(kind):
            self._buffers += 3
            return Node(kind, node, buffer, 8, text=True)
        self._buffers += 2
        return Node(kind, node, buffer, 0 if is_a.is_boolean(kind) else kind.bit_width // 8)

    def fits(self, count: int, lengths: IntArray, buffers: IntArray, body: int) -> bool:
        """Return whether a batch has as many nodes and buffers, of the lengths, that the columns require.

        Args:
            count: Rows of the batch.
            lengths: Number of values of each node. Shape `(nodes,)`.
            buffers: Offset of each buffer in the body, and its length, bytes. Shape `(buffers, 2)`.
            body: Length of the body, bytes.
        """
        if len(lengths) != self.nodes or len(buffers) != self.buffers:
            return False
        if (buffers < 0).any() or (lengths < 0).any() or (buffers.sum(axis=1) > body).any():
            return False
        sizes = buffers[:, 1]
        return all(
            lengths[column.node] == count and _node_fits(column, lengths, sizes) for column in self.columns
        )


def _node_fits(node: Node, lengths: IntArray, sizes: IntArray) -> bool:
    count, valid, values = int(lengths[node.node]), int(sizes[node.buffer]), 0
    if valid and valid < (count + 7) // 8:
        return False
    if isinstance(node.kind, pa.StructType):
        return all(lengths[part.node] >= count and _node_fits(part, lengths, sizes) for part in node.inner)
    if isinstance(node.kind, pa.FixedSizeListType):
        (part,) = node.inner
        return bool(lengths[part.node] >= count * node.width) and _node_fits(part, lengths, sizes)
    values = int(sizes[node.buffer + 1])
    if node.text or node.inner:
        return (not count or values >= (count + 1) * node.width) and all(
            _node_fits(part, lengths, sizes) for part in node.inner
        )
    return values >= (count * node.width if node.width else (count + 7) // 8)


def unpack(
    loops: Any,
    columns: Sequence[Node],
    where: IntArray,
    sizes: IntArray,
    compressed: Array,
    *,
    offsets_only: bool = False,
) -> tuple[IntArray, IntArray, Array]:
    """Decompress the buffers of some columns.

    Args:
        loops: The module of compiled loops.
        columns: Columns of a plan.
        where: Address of each buffer of each batch; 0 for an empty one. Shape `(batches, buffers)`.
        sizes: Length of each buffer, bytes. Shape `(batches, buffers)`.
        compressed: Whether the buffers of each batch are compressed. Shape `(batches,)`.
        offsets_only: Decompress only the offsets of lists and texts.

    Returns:
        Addresses and lengths of all buffers afterwards, and the memory with the decompressed ones.

    Raises:
        CorruptionError: A buffer is damaged.
    """
    wanted = np.zeros(where.shape, bool)
    asked = np.array([buffer for column in columns for buffer in _buffers_of(column, offsets_only)], np.int64)
    wanted[np.ix_(np.flatnonzero(compressed), asked)] = True
    wanted &= sizes > 0
    sources, held = where[wanted], sizes[wanted]
    lengths = np.empty_like(held)
    loops.find_lengths(sources, held, lengths)
    if (lengths < 0).any():
        raise CorruptionError("buffers of a batch are damaged")
    room_for = (lengths + 7) // 8 * 8  # each begins at a multiple of 8
    room = np.empty(int(room_for.sum()), np.uint8)
    goals = address_of(room) + np.cumsum(room_for) - room_for
    if loops.unpack_buffers(sources, held, goals, lengths) >= 0:
        raise CorruptionError("buffers of a batch are damaged")
    where, sizes = where.copy(), sizes.copy()
    where[wanted], sizes[wanted] = np.where(lengths > 0, goals, 0), lengths
    return where, sizes, room


def _buffers_of(node: Node, offsets_only: bool) -> Iterator[int]:
    fixed = isinstance(node.kind, (pa.StructType, pa.FixedSizeListType))
    if not offsets_only:
        own = 3 if node.text else 1 if fixed else 2
        yield from range(node.buffer, node.buffer + own)
    elif node.text or (node.inner and not fixed):
        yield node.buffer + 1
    for part in node.inner:
        yield from _buffers_of(part, offsets_only)


@dataclass(slots=True)
class _Runs:
    """Runs of values in batches.

    Args:
        batches: Number of the batch of each run. Shape `(n,)`, like the next two arguments.
        starts: Number of each run's first value.
        lengths: Number of values of each run.
    """

    batches: IntArray
    starts: IntArray
    lengths: IntArray


class Gather:
    """Copy runs of rows out of batches with uncompressed buffers in memory.

    Threads: any number.

    Args:
        loops: The module of compiled loops.
        where: Address of each buffer of each batch; 0 for an empty one. Shape `(batches, buffers)`.
        sizes: Length of each buffer, bytes. Shape `(batches, buffers)`.
        lengths: Number of values of each node of each batch. Shape `(batches, nodes)`.
    """

    def __init__(self, loops: Any, where: IntArray, sizes: IntArray, lengths: IntArray) -> None:
        self._loops, self._where, self._sizes, self._lengths = loops, where, sizes, lengths

    def join_runs(self, column: Node, batches: IntArray, starts: IntArray, lengths: IntArray) -> pa.Array:
        """Return runs of rows, concatenated.

        Args:
            column: A column of a plan.
            batches: Number of the batch of each run. Shape `(n,)`.
            starts: Number of each run's first row in the batch. Shape `(n,)`.
            lengths: Number of rows of each run. Shape `(n,)`.

        Raises:
            CorruptionError: Offsets of a batch are damaged.
            SchemaError: The rows together are more than one Arrow array can hold.
        """
        return self._copy_node(column, _Runs(batches, starts, lengths), int(lengths.sum()))

    def sizes(self, column: Node, batches: IntArray, starts: IntArray, lengths: IntArray) -> IntArray:
        """Return the bytes of runs of rows, computed from offsets alone. Shape `(n,)`.

        Args:
            column: A column of a plan.
            batches: Number of the batch of each run. Shape `(n,)`.
            starts: Number of each run's first row in the batch. Shape `(n,)`.
            lengths: Number of rows of each run. Shape `(n,)`.

        Raises:
            CorruptionError: Offsets of a batch are damaged.
        """
        each: IntArray = lengths
        if isinstance(column.kind, pa.StructType):
            parts = [self.sizes(part, batches, starts, lengths) for part in column.inner]
            return sum(parts, np.zeros(lengths.size, np.int64))
        if isinstance(column.kind, pa.FixedSizeListType):
            width = column.width
            return self.sizes(column.inner[0], batches, starts * width, lengths * width)
        if not (column.text or column.inner):
            return each * max(1, column.width)
        first, last = self.bounds(column, batches, starts, lengths)
        inner = last - first if column.text else self.sizes(column.inner[0], batches, first, last - first)
        return each * column.width + inner

    def bounds(
        self, node: Node, batches: IntArray, starts: IntArray, lengths: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return the first value, and the end, of the values in runs of lists. Shapes `(n,)`.

        Args:
            node: Lists or texts.
            batches: Number of the batch of each run. Shape `(n,)`.
            starts: Number of each run's first list in the batch. Shape `(n,)`.
            lengths: Number of lists of each run. Shape `(n,)`.

        Raises:
            CorruptionError: Offsets of a batch are damaged.
        """
        some = lengths > 0
        sources = np.ascontiguousarray(self._where[batches[some], node.buffer + 1])
        if (sources == 0).any():
            raise CorruptionError("offsets of a batch are missing")
        ones = np.ones(sources.size, np.int64)
        found = []
        for at in (starts[some], (starts + lengths)[some]):
            out = np.empty(sources.size, f"i{node.width}")
            self._loops.copy_runs(sources, np.ascontiguousarray(at), ones, node.width, address_of(out))
            whole = np.zeros(lengths.size, np.int64)
            whole[some] = out
            found.append(whole)
        first, last = found
        wrong = (first < 0) | (last < first)
        if not node.text:
            wrong |= last > np.where(some, self._lengths[batches, node.inner[0].node], 0)
        if wrong.any():
            raise CorruptionError("offsets of a batch are damaged")
        return first, last

    def _copy_node(self, node: Node, runs: _Runs, count: int) -> pa.Array:
        """Return the values of runs, concatenated; `count` is their number."""
        valid, nulls = self._valid(node, runs, count)
        if isinstance(node.kind, pa.StructType):
            parts = [self._copy_node(part, runs, count) for part in node.inner]
            return pa.Array.from_buffers(node.kind, count, [valid], nulls, children=parts)
        if isinstance(node.kind, pa.FixedSizeListType):
            each = node.width
            inner = _Runs(runs.batches, runs.starts * each, runs.lengths * each)
            part = self._copy_node(node.inner[0], inner, count * each)
            return pa.Array.from_buffers(node.kind, count, [valid], nulls, children=[part])
        if node.text or node.inner:
            offsets, inner, items = self._follow(node, runs, count)
            if node.text:
                data = self._copy(node.buffer + 2, inner, items, 1)
                return pa.Array.from_buffers(node.kind, count, [valid, offsets, data], nulls)
            part = self._copy_node(node.inner[0], inner, items)
            return pa.Array.from_buffers(node.kind, count, [valid, offsets], nulls, children=[part])
        if not node.width:
            bits, _ = self._bits(node.buffer + 1, runs, count)
            return pa.Array.from_buffers(node.kind, count, [valid, bits], nulls)
        values = self._copy(node.buffer + 1, runs, count, node.width)
        return pa.Array.from_buffers(node.kind, count, [valid, values], nulls)

    def _valid(self, node: Node, runs: _Runs, count: int) -> tuple[pa.Buffer | None, int]:
        """Return the validity bitmap of values (None: all are valid), and the number of nulls."""
        if not np.count_nonzero(self._where[runs.batches, node.buffer]):
            return None, 0
        bits, unset = self._bits(node.buffer, runs, count)
        return (bits, unset) if unset else (None, 0)

    def _bits(self, buffer: int, runs: _Runs, count: int) -> tuple[pa.Buffer, int]:
        out = np.zeros(-(-count // 8), np.uint8)
        sources = np.ascontiguousarray(self._where[runs.batches, buffer])
        unset = self._loops.copy_bits(sources, runs.starts, runs.lengths, out)
        return pa.py_buffer(out), int(unset)

    def _copy(self, buffer: int, runs: _Runs, count: int, width: int) -> pa.Buffer:
        out = np.empty(count * width, np.uint8)
        if out.size:
            sources = np.ascontiguousarray(self._where[runs.batches, buffer])
            self._loops.copy_runs(sources, runs.starts, runs.lengths, width, address_of(out))
        return pa.py_buffer(out)

    def _follow(self, node: Node, runs: _Runs, count: int) -> tuple[pa.Buffer, _Runs, int]:
        """Return the offsets of lists, the runs of the values in them, and the number of these values."""
        sources = np.ascontiguousarray(self._where[runs.batches, node.buffer + 1])
        if node.text:
            limits = self._sizes[runs.batches, node.buffer + 2]
        else:
            limits = self._lengths[runs.batches, node.inner[0].node]
        offsets = np.empty(count + 1, np.int64)
        inner = _Runs(runs.batches, np.empty_like(runs.starts), np.empty_like(runs.starts))
        bad = self._loops.follow_lists(
            sources,
            runs.starts,
            runs.lengths,
            np.ascontiguousarray(limits),
            node.width,
            offsets,
            inner.starts,
            inner.lengths,
        )
        if bad >= 0:
            raise CorruptionError("offsets of a batch are damaged")
        items = int(offsets[-1])
        if node.width == 8:
            return pa.py_buffer(offsets), inner, items
        if items > _MOST_VALUES:
            raise SchemaError(
                f"these rows have {items} values, but an Arrow array has at most {_MOST_VALUES}",
                hint="read fewer rows at once",
            )
        short: Array = offsets.astype(np.int32)
        return pa.py_buffer(short), inner, items
