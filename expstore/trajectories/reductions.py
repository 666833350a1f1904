"""Reduce a field of many trajectories to one number each, such as the sum over its steps.

Used by the search for trajectories that meet a condition. Every result equals, to the last bit, what torch
computes for that trajectory alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from expstore.core.values import Array, IntArray

#: Up to this many values torch sums in one thread. It sums more of them in parts, which rounds differently.
_ONE_THREAD = 1 << 15

_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda values: values.sum(1),
    "mean": lambda values: values.double().mean(1),
    "max": lambda values: values.amax(1),
    "min": lambda values: values.amin(1),
    "first": lambda values: values[:, 0],
    "last": lambda values: values[:, -1],
}


def reduce_runs(values: torch.Tensor, starts: IntArray, lengths: IntArray, word: str) -> Array | None:
    """Reduce the values of runs of rows to one number each.

    Args:
        values: Values of all rows. Shape `(rows, *row shape)`, with a dtype that NumPy has.
        starts: The first row of each run. Shape `(runs,)`.
        lengths: Number of rows of each run, at least 1. Shape `(runs,)`.
        word: The reduction: "sum", "mean", "max", "min", "first" or "last".

    Returns:
        Shape `(runs,)`. None if a run has no such number, or if the last bits could differ from torch's
        result.
    """
    items = values.shape[1:].numel()
    single = word in ("first", "last")
    if (
        not items
        or (single and items != 1)
        or values.dtype in (torch.bfloat16, torch.complex64, torch.complex128)
    ):
        return None
    if int(lengths.max(initial=0)) * items > _ONE_THREAD:
        return None
    flat = values.detach().reshape(values.shape[0], items).numpy()
    found: Array | None = None
    for length in np.unique(lengths).tolist():
        same = np.flatnonzero(lengths == length)
        most = _ONE_THREAD // (length * items)
        for runs in (same[first : first + most] for first in range(0, same.size, most)):
            rows = flat[starts[runs][:, None] + np.arange(length)]
            reduced = _REDUCTIONS[word](torch.from_numpy(rows.reshape(runs.size, length * items))).numpy()
            if found is None:
                found = np.empty(lengths.size, reduced.dtype)
            found[runs] = reduced
    return found
