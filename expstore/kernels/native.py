"""Native functions that compiled loops call: blosc, crc32c, memcpy, threads.

Used by the loops that compress and decompress. Importing this module loads numba and registers the symbols of
numcodecs' blosc with it. It raises ImportError if numcodecs does not export the functions that are needed.
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

# The libraries that Python calls too: their functions are found by name when a loop is linked.
llvmlite.binding.load_library_permanently(numcodecs.blosc.__file__)
llvmlite.binding.load_library_permanently(importlib.import_module("google_crc32c._crc32c").__file__)
for _name in (
    "crc32c_extend",
    "blosc_compress_ctx",
    "blosc_decompress_ctx",
    "LZ4_decompress_safe_partial",
):
    if llvmlite.binding.address_of_symbol(_name) is None:  # then numcodecs is called from Python instead
        raise ImportError(f"google_crc32c or numcodecs does not export {_name}")

_CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
#: The most threads that share the work of a call; fewer on machines with fewer cores.
MOST_THREADS = 4
THREADS = min(MOST_THREADS, _CORES)

_INT, _SIZE, _ADDRESS = types.int32, types.uintp, types.intp
#: Level, shuffle, bytes per item, length, source, target, its length, compressor, length of a block, threads.
pack_blosc: Any = types.ExternalFunction(
    "blosc_compress_ctx",
    _INT(_INT, _INT, _SIZE, _SIZE, _ADDRESS, _ADDRESS, _SIZE, _ADDRESS, _SIZE, _INT),
)
#: Source, target, its length, threads.
unpack_blosc: Any = types.ExternalFunction("blosc_decompress_ctx", _INT(_ADDRESS, _ADDRESS, _SIZE, _INT))
#: Source, target, length, number of bytes wanted, length of the target.
unpack_lz4: Any = types.ExternalFunction(
    "LZ4_decompress_safe_partial", _INT(_ADDRESS, _ADDRESS, _INT, _INT, _INT)
)
#: The crc32c of the bytes before, source, length.
crc32c: Any = types.ExternalFunction("crc32c_extend", types.uint32(types.uint32, _ADDRESS, _SIZE))
#: Target, source, length.
copy_bytes: Any = types.ExternalFunction("memcpy", _ADDRESS(_ADDRESS, _ADDRESS, _SIZE))
#: Address for the thread's handle, 0, address of a function, its argument.
_start_thread: Any = types.ExternalFunction("pthread_create", _INT(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS))
#: The thread's handle, 0.
_join_thread: Any = types.ExternalFunction("pthread_join", _INT(_ADDRESS, _ADDRESS))


def _fetch_add(_: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address atomically; return its value before."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        pointer = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, given[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


fetch_add: Any = intrinsic(_fetch_add)


@compiled("int64[::1](int64, int64, int64)", nogil=True)
def start_helpers(count: int, function: int, told: int) -> NDArray[np.int64]:
    """Start threads, up to the first that cannot be started.

    The caller must `join_helpers` in a compiled loop.

    Args:
        count: Number of threads.
        function: Address of the function that each thread runs.
        told: Argument of the function.

    Returns:
        Handles of the started threads. Shape `(started,)`.
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
