"""Compiled loops that copy runs of values out of many Arrow buffers without the GIL.

Used by variable-length columns. Importing it loads numba; it is imported in the background when rows are read
or written, and until then pyarrow does the same work batch by batch. The loops work on addresses.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expstore.kernels.file_loops import compiled
from expstore.kernels.native import copy_bytes

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@compiled("void(int64[::1], int64[::1], int64[::1], int64, int64)", nogil=True)
def copy_runs(sources: Ints, starts: Ints, lengths: Ints, width: int, out: int) -> None:
    """Copy runs of values, concatenated.

    Args:
        sources: Address of the values that contain each run. Shape `(n,)`, like the next two arguments.
        starts: Number of each run's first value.
        lengths: Number of values of each run.
        width: Bytes of a value.
        out: Address at which the values are written.
    """
    for run in range(sources.size):
        size = lengths[run] * width
        if size > 0:
            copy_bytes(out, sources[run] + starts[run] * width, size)
            out += size


@compiled("int64(int64[::1], int64[::1], int64[::1], uint8[::1])", nogil=True)
def copy_bits(sources: Ints, starts: Ints, lengths: Ints, out: Bytes) -> int:
    """Copy runs of bits, concatenated.

    Args:
        sources: Address of the bits that contain each run, lowest bit of a byte first; 0: all bits are set.
            Shape `(n,)`, like the next two arguments.
        starts: Number of each run's first bit.
        lengths: Number of bits of each run.
        out: Receives the bits; must be zeros, with room for all bits.

    Returns:
        The number of bits that are not set.
    """
    held = np.empty(4096, np.uint8)
    at, unset = 0, 0
    for run in range(sources.size):
        done = 0
        while done < lengths[run]:
            first = starts[run] + done
            some = min(lengths[run] - done, held.size * 8 - 8)
            if sources[run] != 0:
                size = (first % 8 + some + 7) // 8
                copy_bytes(held.ctypes.data, sources[run] + first // 8, size)
            for bit in range(some):
                place = first % 8 + bit
                if sources[run] == 0 or held[place // 8] >> (place % 8) & 1:
                    out[at // 8] |= np.uint8(1 << (at % 8))
                else:
                    unset += 1
                at += 1
            done += some
    return unset


@compiled(
    "int64(int64[::1], int64[::1], int64[::1], int64[::1], int64, int64[::1], int64[::1], int64[::1])",
    nogil=True,
)
def follow_lists(
    sources: Ints,
    starts: Ints,
    lengths: Ints,
    limits: Ints,
    width: int,
    offsets: Ints,
    inner_starts: Ints,
    inner_lengths: Ints,
) -> int:
    """Convert runs of lists to runs of the lists' values, one for each run of lists.

    Args:
        sources: Address of the offsets, of `width` bytes each. Shape `(n,)`, like the next three arguments.
        starts: Number of each run's first list.
        lengths: Number of lists of each run.
        limits: Number of values in the buffer of each run.
        width: Bytes of an offset, 4 or 8.
        offsets: Receives the offsets of all lists, concatenated. Shape `(sum of lengths + 1,)`.
        inner_starts: Receives the number of each run's first value. Shape `(n,)`.
        inner_lengths: Receives the number of values of each run. Shape `(n,)`.

    Returns:
        The number of the first run with damaged offsets; -1 if all are sound.
    """
    most = 0
    for run in range(lengths.size):
        most = max(most, lengths[run])
    short, wide = np.empty(most + 1, np.int32), np.empty(most + 1, np.int64)
    at, total = 0, 0
    offsets[0] = 0
    for run in range(sources.size):
        count = lengths[run]
        if count == 0:
            inner_starts[run] = inner_lengths[run] = 0
            continue
        if width == 8:
            copy_bytes(wide.ctypes.data, sources[run] + starts[run] * 8, (count + 1) * 8)
        else:
            copy_bytes(short.ctypes.data, sources[run] + starts[run] * 4, (count + 1) * 4)
            for place in range(count + 1):
                wide[place] = short[place]
        if wide[0] < 0 or wide[count] > limits[run]:
            return run
        for place in range(count):
            size = wide[place + 1] - wide[place]
            if size < 0:
                return run
            total += size
            at += 1
            offsets[at] = total
        inner_starts[run] = wide[0]
        inner_lengths[run] = wide[count] - wide[0]
    return -1
