"""Ask the processor for memory that is about to be read: a line of its cache, or rows of columns.

Used by columns of narrow rows and by sum trees. Rows drawn at random lie apart from one another in memory,
and a copy would wait for one after the other; asked for beforehand, many are on their way at once. Nothing is
read: an address without memory behind it is passed over.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from expstore.kernels.file_loops import compiled

__all__ = ["prefetch_line", "prefetch_rows"]

Ints = NDArray[Any]


def _prefetch(_: Any, address: Any) -> Any:
    """Ask for the 64 bytes around an address, for reading, into all levels of the cache."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        pointer, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [pointer, word, word, word])
        # https://llvm.org/docs/LangRef.html#llvm-prefetch-intrinsic: address, read, all levels, data
        name = "llvm.prefetch.p0"
        function = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
        builder.call(function, [builder.inttoptr(given[0], pointer), word(0), word(3), word(1)])

    return types.void(types.int64), generate


#: Its address; to be called in compiled loops.
prefetch_line: Any = intrinsic(_prefetch)
_LINE = 64


@compiled("void(int64[::1], int64[::1], int64[::1])")
def prefetch_rows(columns: Ints, sizes: Ints, slots: Ints) -> None:
    """Ask for rows of columns.

    Args:
        columns: Where the first row of each begins. Shape `(columns,)`.
        sizes: How many bytes its rows have. Shape `(columns,)`.
        slots: The rows' places. Shape `(n,)`.
    """
    for row in range(slots.size):
        for column in range(columns.size):
            at = columns[column] + slots[row] * sizes[column]
            last = at + sizes[column] - 1
            while at < last:
                prefetch_line(at)
                at += _LINE
            prefetch_line(last)
