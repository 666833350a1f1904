"""Prefetch memory that is about to be read: a cache line, or rows of columns.

Used by columns of narrow rows and by sum trees. Random rows are far apart in memory, and a copy waits for
each of them in turn; prefetched, many are loaded at the same time. A prefetch never faults: an address
without memory is ignored.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from expstore.kernels.file_loops import compiled

Ints = NDArray[Any]


def _prefetch(_: Any, address: Any) -> Any:
    """Prefetch the cache line of an address for reading, into all levels of the cache."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        # https://llvm.org/docs/LangRef.html#llvm-prefetch-intrinsic: address, read, all levels, data
        name = "llvm.prefetch.p0"
        function = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
        builder.call(function, [builder.inttoptr(given[0], pointer), word(0), word(3), word(1)])

    return types.void(types.int64), generate


#: Prefetch the cache line of an address; for compiled loops only.
prefetch_line: Any = intrinsic(_prefetch)
_LINE = 64


@compiled("void(int64[::1], int64[::1], int64[::1])")
def prefetch_rows(columns: Ints, sizes: Ints, slots: Ints) -> None:
    """Prefetch rows of columns.

    Args:
        columns: Address of the first row of each column. Shape `(columns,)`.
        sizes: Bytes per row of each column. Shape `(columns,)`.
        slots: The rows. Shape `(n,)`.
    """
    for row in range(slots.size):
        for column in range(columns.size):
            at = columns[column] + slots[row] * sizes[column]
            last = at + sizes[column] - 1
            while at < last:
                prefetch_line(at)
                at += _LINE
            prefetch_line(last)
