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
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

__all__ = [
    "CORES",
    "copy_bytes",
    "crc32c",
    "fetch_add",
    "join_thread",
    "pack_blosc",
    "start_thread",
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

#: How many this process may use.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

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
start_thread: Any = types.ExternalFunction("pthread_create", _INT(_ADDRESS, _ADDRESS, _ADDRESS, _ADDRESS))
#: Its name, 0.
join_thread: Any = types.ExternalFunction("pthread_join", _INT(_ADDRESS, _ADDRESS))


def _fetch_add(_: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address, at once for all threads; return what it was."""

    def generate(_: Any, builder: Any, __: Any, given: Any) -> Any:
        pointer = builder.inttoptr(given[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, given[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


fetch_add: Any = intrinsic(_fetch_add)
