"""How Arrow columns lie in the buffers of a batch, and how runs of their rows are copied out of many batches.

Used by segments. It knows addresses and types, and nothing of ids or files.
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

__all__ = ["Gather", "Plan", "unpack"]

#: What 32-bit offsets can say.
_MOST_VALUES = (1 << 31) - 1
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class _Node:
    """Say how the values of a type lie.

    Args:
        kind: Its type.
        node: Its number among all nodes, depth first.
        buffer: Number of its first buffer, the one that says which values there are.
        width: Bytes of a value, 0 for bits; of a list those of an offset, of a fixed-size list its length.
        inner: What it holds.
        text: Whether it holds bytes, in a buffer of its own.
    """

    kind: pa.DataType
    node: int
    buffer: int
    width: int
    inner: tuple[_Node, ...] = ()
    text: bool = False


class Plan:
    """Know where the nodes and buffers of some columns are in a batch.

    Args:
        kinds: The columns' types.
    """

    def __init__(self, kinds: Sequence[pa.DataType]) -> None:
        self._nodes = self._buffers = 0
        self.columns = tuple(self._add(kind) for kind in kinds)
        #: How many nodes and buffers a batch has.
        self.nodes, self.buffers = self._nodes, self._buffers

    def _add(self, kind: pa.DataType) -> _Node:
        node, buffer = self._nodes, self._buffers
        self._nodes += 1
        is_a = pa.types
        if is_a.is_struct(kind):
            self._buffers += 1
            return _Node(kind, node, buffer, 0, tuple(self._add(part.type) for part in kind))
        if is_a.is_fixed_size_list(kind):
            self._buffers += 1
            return _Node(kind, node, buffer, kind.list_size, (self._add(kind.value_type),))
        if is_a.is_map(kind):
            self._buffers += 2
            return _Node(kind, node, buffer, 4, (self._add(pa.struct([kind.key_field, kind.item_field])),))
        if is_a.is_list(kind) or is_a.is_large_list(kind):
            self._buffers += 2
            return _Node(kind, node, buffer, 4 if is_a.is_list(kind) else 8, (self._add(kind.value_type),))
        if is_a.is_string(kind) or is_a.is_binary(kind):
            self._buffers += 3
            return _Node(kind, node, buffer, 4, text=True)
        if is_a.is_large_string(kind) or is_a.is_large_binary(kind):
            self._buffers += 3
            return _Node(kind, node, buffer, 8, text=True)
        self._buffers += 2
        return _Node(kind, node, buffer, 0 if is_a.is_boolean(kind) else kind.bit_width // 8)

    def fits(self, count: int, lengths: IntArray, buffers: IntArray, body: int) -> bool:
        """Return whether the nodes and buffers of a batch are as many and as long as they must be.

        Args:
            count: Rows of the batch.
            lengths: How many values each node has. Shape `(nodes,)`.
            buffers: Where each begins in the body, and its length. Shape `(buffers, 2)`.
            body: Length of the body.
        """
        if len(lengths) != self.nodes or len(buffers) != self.buffers:
            return False
        if (buffers < 0).any() or (lengths < 0).any() or (buffers.sum(axis=1) > body).any():
            return False
        sizes = buffers[:, 1]
        return all(
            lengths[column.node] == count and _node_fits(column, lengths, sizes) for column in self.columns
        )


def _node_fits(node: _Node, lengths: IntArray, sizes: IntArray) -> bool:
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
    columns: Sequence[_Node],
    where: IntArray,
    sizes: IntArray,
    compressed: Array,
    *,
    offsets_only: bool = False,
) -> tuple[IntArray, IntArray, Array]:
    """Unpack the buffers of some columns; return where all buffers are then, how long, and what holds them.

    Args:
        loops: The module of compiled loops that do so.
        columns: Of a plan.
        where: Address of each buffer of each batch; 0: it is empty. Shape `(batches, buffers)`.
        sizes: Its length. Shape `(batches, buffers)`.
        compressed: Whether the batch's buffers are. Shape `(batches,)`.
        offsets_only: Unpack the offsets of lists and texts alone.

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


def _buffers_of(node: _Node, offsets_only: bool) -> Iterator[int]:
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
    """Hold which values of which batches are wanted: runs of them.

    Args:
        batches: In which batch each run lies. Shape `(n,)`, as the others.
        starts: Number of its first value.
        lengths: How many it has.
    """

    batches: IntArray
    starts: IntArray
    lengths: IntArray


class Gather:
    """Copy runs of rows out of batches whose buffers lie in memory as they are.

    Threads: any number.

    Args:
        loops: The module of compiled loops.
        where: Address of each buffer of each batch; 0: it is empty. Shape `(batches, buffers)`.
        sizes: Its length. Shape `(batches, buffers)`.
        lengths: How many values each node of each batch has. Shape `(batches, nodes)`.
        ways: Which row of `codes` is each batch's. Shape `(batches,)`.
        codes: Bytes of each node's integers, as `Widths.codes`. Shape `(ways, nodes)`.
    """

    def __init__(
        self,
        loops: Any,
        where: IntArray,
        sizes: IntArray,
        lengths: IntArray,
        ways: IntArray,
        codes: IntArray,
    ) -> None:
        self._loops, self._where, self._sizes, self._lengths = loops, where, sizes, lengths
        self._ways, self._codes = ways, codes

    def take(self, column: _Node, batches: IntArray, starts: IntArray, lengths: IntArray) -> pa.Array:
        """Return runs of rows one behind another.

        Args:
            column: Of a plan.
            batches: In which batch each run lies. Shape `(n,)`.
            starts: Number of its first row there. Shape `(n,)`.
            lengths: How many rows it has. Shape `(n,)`.

        Raises:
            CorruptionError: Offsets of a batch are damaged.
            SchemaError: The rows together are more than one Arrow array can hold.
        """
        return self._take(column, _Runs(batches, starts, lengths))

    def sizes(self, column: _Node, batches: IntArray, starts: IntArray, lengths: IntArray) -> IntArray:
        """Return how many bytes runs of rows take, by offsets alone. Shape `(n,)`.

        Args and CorruptionError as `take`.
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
        first, last = self._bounds(column, batches, starts, lengths)
        inner = last - first if column.text else self.sizes(column.inner[0], batches, first, last - first)
        return each * column.width + inner

    def _bounds(
        self, node: _Node, batches: IntArray, starts: IntArray, lengths: IntArray
    ) -> tuple[IntArray, IntArray]:
        """Return where the values begin that runs of lists hold, and where they end. Shapes `(n,)`."""
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

    def _take(self, node: _Node, runs: _Runs) -> pa.Array:
        count = int(runs.lengths.sum())
        valid, nulls = self._valid(node, runs, count)
        if isinstance(node.kind, pa.StructType):
            parts = [self._take(part, runs) for part in node.inner]
            return pa.Array.from_buffers(node.kind, count, [valid], nulls, children=parts)
        if isinstance(node.kind, pa.FixedSizeListType):
            each = node.width
            part = self._take(node.inner[0], _Runs(runs.batches, runs.starts * each, runs.lengths * each))
            return pa.Array.from_buffers(node.kind, count, [valid], nulls, children=[part])
        if node.text or node.inner:
            offsets, inner = self._follow(node, runs, count)
            if node.text:
                data = self._copy(node.buffer + 2, inner, 1)
                return pa.Array.from_buffers(node.kind, count, [valid, offsets, data], nulls)
            part = self._take(node.inner[0], inner)
            return pa.Array.from_buffers(node.kind, count, [valid, offsets], nulls, children=[part])
        if not node.width:
            bits, _ = self._bits(node.buffer + 1, runs, count)
            return pa.Array.from_buffers(node.kind, count, [valid, bits], nulls)
        values = self._widen(node, runs) if self._codes[:, node.node].any() else None
        if values is None:
            values = self._copy(node.buffer + 1, runs, node.width)
        return pa.Array.from_buffers(node.kind, count, [valid, values], nulls)

    def _valid(self, node: _Node, runs: _Runs, count: int) -> tuple[pa.Buffer | None, int]:
        """Return which values are there, and how many are not; None: all are."""
        if not self._where[runs.batches, node.buffer].any():
            return None, 0
        bits, unset = self._bits(node.buffer, runs, count)
        return (bits, unset) if unset else (None, 0)

    def _bits(self, buffer: int, runs: _Runs, count: int) -> tuple[pa.Buffer, int]:
        out = np.zeros(-(-count // 8), np.uint8)
        sources = np.ascontiguousarray(self._where[runs.batches, buffer])
        unset = self._loops.copy_bits(sources, runs.starts, runs.lengths, out)
        return pa.py_buffer(out), int(unset)

    def _copy(self, buffer: int, runs: _Runs, width: int) -> pa.Buffer:
        out = np.empty(int(runs.lengths.sum()) * width, np.uint8)
        if out.size:
            sources = np.ascontiguousarray(self._where[runs.batches, buffer])
            self._loops.copy_runs(sources, runs.starts, runs.lengths, width, address_of(out))
        return pa.py_buffer(out)

    def _widen(self, node: _Node, runs: _Runs) -> pa.Buffer | None:
        """Return integers of which some lie in fewer bytes than they are to have; None: none do."""
        codes = self._codes[self._ways[runs.batches], node.node]
        if not codes.any():
            return None
        out = np.empty(int(runs.lengths.sum()), f"i{node.width}")
        sources = np.ascontiguousarray(self._where[runs.batches, node.buffer + 1])
        self._loops.widen_runs(sources, runs.starts, runs.lengths, codes, out)
        return pa.py_buffer(out)

    def _follow(self, node: _Node, runs: _Runs, count: int) -> tuple[pa.Buffer, _Runs]:
        """Return the offsets of lists, and the runs of what they hold."""
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
        if node.width == 8:
            return pa.py_buffer(offsets), inner
        if offsets[-1] > _MOST_VALUES:
            raise SchemaError(
                f"these rows hold {offsets[-1]} values, and an Arrow array {_MOST_VALUES}",
                hint="read fewer rows at once",
            )
        short: Array = offsets.astype(np.int32)
        return pa.py_buffer(short), inner
