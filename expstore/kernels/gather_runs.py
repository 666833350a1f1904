"""Compiled loops that copy runs of values out of Arrow buffers, many at a time, without the GIL.

Used by columns whose rows have no fixed size; imported in the background when rows come, since that loads
numba: until then pyarrow does the same work batch by batch. It reads addresses it is given.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from expstore.kernels.file_loops import compiled
from expstore.kernels.native import copy_bytes

__all__ = ["copy_bits", "copy_runs", "follow_lists", "widen_runs"]

Ints = NDArray[np.int64]
Bytes = NDArray[np.uint8]


@compiled("void(int64[::1], int64[::1], int64[::1], int64, int64)", nogil=True)
def copy_runs(sources: Ints, starts: Ints, lengths: Ints, width: int, out: int) -> None:
    """Copy runs of values one behind another.

    Args:
        sources: Where the values begin of which each is a run. Shape `(n,)`, as the next two.
        starts: Number of its first value.
        lengths: How many it has.
        width: Bytes of a value.
        out: Where they go.
    """
    for run in range(sources.size):
        size = lengths[run] * width
        if size > 0:
            copy_bytes(out, sources[run] + starts[run] * width, size)
            out += size


def _build_signature(out: str) -> str:
    return f"void(int64[::1], int64[::1], int64[::1], int64[::1], {out}[::1])"


@compiled([_build_signature(out) for out in ("int16", "int32", "int64")], nogil=True)
def widen_runs(
    sources: Ints, starts: Ints, lengths: Ints, codes: Ints, out: NDArray[np.signedinteger]
) -> None:
    """Copy runs of integers one behind another, those of fewer bytes than `out` has widened.

    Args:
        sources: As `copy_runs`.
        starts: As `copy_runs`.
        lengths: As `copy_runs`.
        codes: Bytes of each run's values, less than zero if they have a sign; 0: as many as `out` has. Shape
            `(n,)`.
        out: Where they go; what has no sign goes there bit by bit. Shape `(sum of lengths,)`.
    """
    held = np.empty(16384, np.uint8)
    at = 0
    for run in range(sources.size):
        code, done = codes[run], 0
        if code == 0:
            size = out.itemsize
            copy_bytes(out.ctypes.data + at * size, sources[run] + starts[run] * size, lengths[run] * size)
            at += lengths[run]
            continue
        size = abs(code)
        while done < lengths[run]:
            some = min(lengths[run] - done, held.size // size)
            copy_bytes(held.ctypes.data, sources[run] + (starts[run] + done) * size, some * size)
            goal = out[at : at + some]
            if code == 1:
                goal[:] = held[:some]
            elif code == 2:
                goal[:] = held.view(np.uint16)[:some]
            elif code == 4:
                goal[:] = held.view(np.uint32)[:some]
            elif code == -1:
                goal[:] = held.view(np.int8)[:some]
            elif code == -2:
                goal[:] = held.view(np.int16)[:some]
            else:
                goal[:] = held.view(np.int32)[:some]
            at += some
            done += some


@compiled("int64(int64[::1], int64[::1], int64[::1], uint8[::1])", nogil=True)
def copy_bits(sources: Ints, starts: Ints, lengths: Ints, out: Bytes) -> int:
    """Copy runs of bits one behind another.

    Args:
        sources: Where the bits begin, the lowest of each byte first; 0: all of them are set.
        starts: Number of a run's first bit.
        lengths: How many it has.
        out: Zeros, as many as are needed.

    Returns:
        How many of them are not set.
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
    """Find what runs of lists hold: one run of values each.

    Args:
        sources: Where the offsets begin, of `width` bytes each. Shape `(n,)`, as the next three.
        starts: Number of a run's first list.
        lengths: How many it has.
        limits: How many values there are.
        width: 4 or 8.
        offsets: Is filled with those of all lists, one behind another. Shape `(sum of lengths + 1,)`.
        inner_starts: Is filled with the number of each run's first value. Shape `(n,)`.
        inner_lengths: Is filled with how many it has. Shape `(n,)`.

    Returns:
        The first run whose offsets are damaged; -1: none.
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
