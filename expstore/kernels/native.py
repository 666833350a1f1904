"""What compiled loops call without Python: blosc, crc32c, memcpy, threads.

Used by the loops that pack and unpack. Loading this module loads numba and makes numcodecs' own blosc known
to it; it raises ImportError where that does not show what is needed. It keeps nothing and starts nothing.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import llvmlite.binding
import numcodecs.blosc
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from expstore.kernels.file_loops import compiled

__all__ = [
    "MOST_THREADS",
    "THREADS",
    "copy_bytes",
    "crc32c",
    "fetch_add",
    "join_helpers",
    "pack_blosc",
    "start_helpers",
    "unpack_blosc",
    "unpack_lz4",
]

# The very libraries that Python calls: their functions are found by name when a loop is linked.
llvmlite.binding.load_library_permanently(numcodecs.blosc.__file__)
llvmlite.binding.load_library_permanently(importlib.import_module("google_crc32c._crc32c").__file__)
for _name in (
    "crc32c_extend",
    "blosc_compress_ctx",
    "blosc_decompress_ctx",
    "LZ4_decompress_safe_partial",
):
    if llvmlite.binding.address_of_symbol(_name) is None:  # then numcodecs goes on alone
        raise ImportError(f"google_crc32c or numcodecs does not show {_name}")

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
#: So many threads share the work of a call, on machines with as many cores.
MOST_THREADS = 4
THREADS = min(MOST_THREADS, _CORES)

_INT, _SIZE, _ADDRESS = types.int32, types.uintp, types.intp
#: Level, shuffle, bytes per item, length, source, goal, its length, compressor, length of a block, threads.
pack_blosc: Any = types.ExternalFunction(
    "blosc_compress_ctx",
    _INT(_INT, _INT, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _INT),
)
#: Source, goal, its length, threads.
unpack_blosc: Any = types.ExternalFunction("blosc_decompress_ctx", _INT(_ADDRESS, _ADDRESS, _SIZE, _INT))
#: Source, goal, length, how many bytes are wanted, length of the goal.
unpack_lz4: Any = types.ExternalFunction(
    "LZ4_decompress_safe_partial", _INT(_ADDRESS, _ADDRESS, _INT, _INT, _INT)
)
#: What goes before, source, length.
crc32c: Any = types.ExternalFunction("crc32c_extend", types.uint32(types.uint32, _ADDRESS, _SIZE))
#: Goal, source, length.
copy_bytes: Any = types.ExternalFunction("memcpy", _ADDRESS(_ADDRESS, _ADDRESS, _SIZE))
#: Where its name goes, 0, address of a function, what that gets.
_start_thread: Any = types.ExternalFunction("pthread_create", _INT(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS))
#: Its name, 0.
_join_thread: Any = types.ExternalFunction("pthread_join", _INT(_ADDRESS, _ADDRESS))


def _fetch_add(_: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address, at once for all threads; return what it was."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        pointer = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, given[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


fetch_add: Any = intrinsic(_fetch_add)


@compiled("int64[::1](int64, int64, int64)", nogil=True)
def start_helpers(count: int, function: int, told: int) -> NDArray[np.int64]:
    """Begin threads, as far as they can be begun; whoever does so must `join_helpers`, in a compiled loop.

    Args:
        count: How many.
        function: Address of what each of them runs.
        told: What that gets.

    Returns:
        Their names. Shape `(begun,)`.
    """
    threads = np.zeros(count, np.int64)
    begun = 0
    while begun < count and _start_thread(threads.ctypes.data + 8 * begun, 0, function, told) == 0:
        begun += 1
    return threads[:begun]


@compiled("void(int64[::1])", nogil=True)
def join_helpers(threads: NDArray[np.int64]) -> None:
    """Wait until threads have ended."""
    for thread in threads:
        _join_thread(thread, 0)
