"""Compiled loops: most keep the GIL, syncing gives it away once.

Used by `files` and `episodes`. Loading this module loads numba, so it is imported in the background
when rows come; until then plain Python does the same work.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

__all__ = ["find_runs", "spread_runs", "sync_files", "write_pieces"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# libc's, found by name when the loop is linked.
_pwrite: Any = types.ExternalFunction("pwrite", types.intp(types.int32, types.intp, types.intp, types.int64))
_fdatasync: Any = types.ExternalFunction("fdatasync", types.int32(types.int32))


@numba.njit("int64(int64[::1], int64[::1], int64[::1], int64[::1])", cache=True)
def write_pieces(fds: Ints, addresses: Ints, sizes: Ints, offsets: Ints) -> int:
    """Write arrays to one file each.

    Args:
        fds: Descriptors. Shape `(n,)`.
        addresses: Where each array's bytes begin. Shape `(n,)`.
        sizes: How many bytes it has. Shape `(n,)`.
        offsets: Where they go in the file. Shape `(n,)`.

    Returns:
        The number of the first array that was not written whole, or n.
    """
    for i in range(fds.size):
        if _pwrite(np.int32(fds[i]), addresses[i], sizes[i], offsets[i]) != sizes[i]:
            return i
    return fds.size


@numba.njit("int64(int64[::1])", cache=True, nogil=True)
def sync_files(fds: Ints) -> int:
    """Bring files to the disk, without taking the GIL between them.

    Args:
        fds: Descriptors. Shape `(n,)`.

    Returns:
        The number of the first one that failed, or n.
    """
    for i in range(fds.size):
        if _fdatasync(np.int32(fds[i])) != 0:
            return i
    return fds.size


@numba.njit(
    "int64(boolean[::1], boolean[::1], int64[::1], boolean[::1], float64[::1], int64[::1], float64[::1])",
    cache=True,
)
def find_runs(
    terminated: Bools,
    truncated: Bools,
    trajectories: Ints,
    starts: Bools,
    rewards: Floats,
    first: Ints,
    returns: Floats,
) -> int:
    """Cut the rows of one lane into runs that lie in one episode each.

    Arrays that say nothing are empty. All others have one entry per row, as has `first`, whose length
    is the number of rows.

    Args:
        terminated: Rows after which an episode is over.
        truncated: Rows after which it was stopped.
        trajectories: Trajectory ids.
        starts: Rows that begin an episode.
        rewards: What is summed up.
        first: Is filled with the first row of each run.
        returns: Is filled with the sum of each run's rewards.

    Returns:
        How many runs there are.
    """
    runs = 0
    for row in range(first.size):
        cut = row == 0
        if not cut:
            cut = (
                (terminated.size > 0 and terminated[row - 1])
                or (truncated.size > 0 and truncated[row - 1])
                or (trajectories.size > 0 and trajectories[row] != trajectories[row - 1])
                or (starts.size > 0 and starts[row])
            )
        if cut:
            first[runs] = row
            returns[runs] = 0.0
            runs += 1
        if rewards.size > 0:
            returns[runs - 1] += rewards[row]
    return runs


@numba.njit("void(int64[:, ::1], int64[::1], int64[::1])", cache=True)
def spread_runs(runs: Ints, episodes: Ints, steps: Ints) -> None:
    """Fill in the episodes and steps of rows that lie run behind run.

    Args:
        runs: Episode, first step and rows of each run. Shape `(runs, 3)`.
        episodes: Is filled with each row's episode. Shape `(n,)`.
        steps: Is filled with each row's step. Shape `(n,)`.
    """
    row = 0
    for run in range(runs.shape[0]):
        for i in range(runs[run, 2]):
            episodes[row] = runs[run, 0]
            steps[row] = runs[run, 1] + i
            row += 1
