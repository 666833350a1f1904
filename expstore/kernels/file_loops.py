"""Compiled loops over files and rows. Loops over many files release the GIL; the others keep it.

Used by `expstore.disk` and `expstore.episodes`. Importing this module loads numba, so it is imported in the
background when rows are written; until then plain Python does the same work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from numba.core import types
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def compiled(signatures: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function for these signatures at once; cache the result if a folder for it is writable."""

    def compile_it(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(signatures, cache=True, **options)(function)
        except RuntimeError:  # neither this package's folder nor the user's cache can be written
            return numba.njit(signatures, **options)(function)

    return compile_it


def compiled_for_c(signature: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function that C calls through its `address`; cached like those of `compiled`."""

    def compile_it(function: Callable[..., Any]) -> Any:
        try:
            return numba.cfunc(signature, cache=True)(function)
        except RuntimeError:
            return numba.cfunc(signature)(function)

    return compile_it


# Functions of libc, found by name when the loop is linked.
_pwrite: Any = types.ExternalFunction("pwrite", types.intp(types.int32, types.intp, types.intp, types.int64))
_fdatasync: Any = types.ExternalFunction("fdatasync", types.int32(types.int32))
_linkat: Any = types.ExternalFunction(
    "linkat", types.int32(types.int32, types.intp, types.int32, types.intp, types.int32)
)
_unlinkat: Any = types.ExternalFunction("unlinkat", types.int32(types.int32, types.intp, types.int32))
#: Linux only, like what follows and the loops that use it.
_errno: Any = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())  # type: ignore[no-untyped-call]
_statx: Any = types.ExternalFunction(
    "statx", types.int32(types.int32, types.intp, types.int32, types.uint32, types.intp)
)
_STATX_SIZE, _SIZE_WORD = 0x200, 5  # the requested field, and the 8-byte word of the answer that contains it


@compiled("int64(int64[::1], int64[::1], int64[::1], int64[::1])")
def write_pieces(fds: Ints, addresses: Ints, sizes: Ints, offsets: Ints) -> int:
    """Write arrays to one file each.

    Args:
        fds: Descriptors of the files. Shape `(n,)`.
        addresses: Address of each array's first byte. Shape `(n,)`.
        sizes: Number of bytes of each array. Shape `(n,)`.
        offsets: Position of each array in its file. Shape `(n,)`.

    Returns:
        The number of the first array that was not written completely, or n.
    """
    for i in range(fds.size):
        if _pwrite(np.int32(fds[i]), addresses[i], sizes[i], offsets[i]) != sizes[i]:
            return i
    return fds.size


@compiled("UniTuple(int64, 2)(int64[::1])", nogil=True)
def sync_files(fds: Ints) -> tuple[int, int]:
    """Sync files without taking the GIL between them.

    Args:
        fds: Descriptors. Shape `(n,)`.

    Returns:
        The number of the first file that failed and the system's error number; (n, 0) if none failed.
    """
    for i in range(fds.size):
        if _fdatasync(np.int32(fds[i])) != 0:
            return i, numba.carray(_errno(), 1)[0]  # type: ignore[attr-defined]
    return fds.size, 0


@compiled("void(int64[::1], int64[::1], int64[::1], int64[::1], uint8[::1], int64[::1])", nogil=True)
def link_files(
    old: Ints, new: Ints, sizes: Ints, codes: Ints, names: NDArray[np.uint8], starts: Ints
) -> None:
    """Hard-link files into other folders under the same names.

    Args:
        old: Descriptors of the folders that contain the files. Shape `(n,)`.
        new: Descriptors of the folders for the links. Shape `(n,)`.
        sizes: Expected lengths in bytes: files of another length are skipped. Shape `(n,)`.
        codes: Receives 0 for a link that was made, the system's error number, or -1 for another length. Shape
            `(n,)`.
        names: The names, concatenated, each with a zero byte at its end.
        starts: Position of each name in `names`. Shape `(n,)`.
    """
    facts = np.zeros(32, np.int64)  # struct statx, which is the same on all machines
    for i in range(starts.size):
        name, here, there = names.ctypes.data + starts[i], np.int32(old[i]), np.int32(new[i])
        codes[i] = 0
        if _statx(here, name, np.int32(0), np.uint32(_STATX_SIZE), facts.ctypes.data) != 0:
            codes[i] = numba.carray(_errno(), 1)[0]  # type: ignore[attr-defined]
        elif facts[_SIZE_WORD] != sizes[i]:
            codes[i] = -1
        elif _linkat(here, name, there, name, np.int32(0)) != 0:
            codes[i] = numba.carray(_errno(), 1)[0]  # type: ignore[attr-defined]


@compiled("void(int64[::1], uint8[::1], int64[::1])", nogil=True)
def unlink_files(folders: Ints, names: NDArray[np.uint8], starts: Ints) -> None:
    """Remove files; files that cannot be removed are skipped.

    Args:
        folders: Descriptors of the folders that contain the files. Shape `(n,)`.
        names: The names, concatenated, each with a zero byte at its end.
        starts: Position of each name in `names`. Shape `(n,)`.
    """
    for i in range(starts.size):
        _unlinkat(np.int32(folders[i]), names.ctypes.data + starts[i], np.int32(0))


_CUT = "int64(boolean[::1], boolean[::1], int64[::1], boolean[::1], {}[::1], int64[:, ::1], float64[::1])"


@compiled([_CUT.format("float32"), _CUT.format("float64")])
def find_runs(
    terminated: Bools,
    truncated: Bools,
    trajectories: Ints,
    starts: Bools,
    rewards: NDArray[Any],
    runs: Ints,
    returns: Floats,
) -> int:
    """Split the rows of one lane into runs of rows of one episode.

    Arrays have one entry per row, or none if there is no such field.

    Args:
        terminated: Whether the episode terminates after the row.
        truncated: Whether the episode is truncated after the row.
        trajectories: Trajectory ids.
        starts: Whether the row begins an episode.
        rewards: Rewards, which are summed per run.
        runs: Receives first row, number of rows, status (0 open, 1 terminated, 2 truncated), trajectory id
            and whether the run begins an episode. Shape `(n, 5)`.
        returns: Receives the sum of each run's rewards. Shape `(n,)`.

    Returns:
        The number of runs.
    """
    run = -1
    status = 0
    for row in range(runs.shape[0]):
        cut = row == 0 or status != 0
        if not cut and trajectories.size > 0:
            cut = trajectories[row] != trajectories[row - 1]
        if not cut and starts.size > 0:
            cut = starts[row]
        if cut:
            run += 1
            returns[run] = 0.0
            runs[run, 0] = row
            runs[run, 1] = 0
            runs[run, 3] = trajectories[row] if trajectories.size > 0 else 0
            runs[run, 4] = starts[row] if starts.size > 0 else 0
        status = 0
        if terminated.size > 0 and terminated[row]:
            status = 1
        elif truncated.size > 0 and truncated[row]:
            status = 2
        runs[run, 1] += 1
        runs[run, 2] = status
        if rewards.size > 0:
            returns[run] += rewards[row]
    return run + 1


@compiled("void(int64[:, ::1], int64, int64, int64[:, ::1])")
def spread_runs(runs: Ints, first_id: int, time: int, numbers: Ints) -> None:
    """Fill in ids, episodes, steps and times of rows that consist of consecutive runs.

    Args:
        runs: Episode, first step and number of rows of each run. Shape `(runs, 3)`.
        first_id: Id of the first row.
        time: Time of all rows.
        numbers: Receives ids, episodes, steps and times. Shape `(4, n)`.
    """
    row = 0
    for run in range(runs.shape[0]):
        for i in range(runs[run, 2]):
            numbers[0, row] = first_id + row
            numbers[1, row] = runs[run, 0]
            numbers[2, row] = runs[run, 1] + i
            numbers[3, row] = time
            row += 1
