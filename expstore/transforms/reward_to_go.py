"""A transform that computes the reward to go: the discounted sum of all rewards from a row on.

It changes sampled batches only: rows stay stored as they were collected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from expstore.core.values import Array, IntArray, check_key, to_key
from expstore.errors import ArgumentError
from expstore.kernels.loader import compiling
from expstore.transforms.base import StepTransform, StepView, below_next, check_discount, keys_of

__all__ = ["Reward2GoTransform"]

NestedKey = str | tuple[str, ...]


class Reward2GoTransform(StepTransform):
    """Compute the reward to go: the discounted sum of a row's reward and all rewards after it.

    A sum ends at the first row that is done or truncated, or else at the last step of the episode that can be
    read: in an open episode it grows as steps are written. Steps follow their episode across batches,
    interleaved workers and the end of a ring. So rows may be sampled one by one, and episodes written in
    pieces; TorchRL's class needs whole episodes in each batch that is written. Stored rows are not changed.

    Each batch reads the rewards from its rows to the ends of their episodes.

    Threads, processes and crashes as `StepTransform`.

    Args:
        gamma: The discount, from 0 to 1.
        in_keys: The rewards; `[("next", "reward")]` by default. A name, or a tuple of names, is one key.
        out_keys: The fields for the sums; `in_keys` by default. They have the rewards' shapes and dtypes; the
            sums of integers have torch's default dtype.
        done_key: The field below "next" that ends a sum; "done" means every field that ends episodes of the
            store.

    Raises:
        ArgumentError: `gamma` is not a number, or a key is not a key; the numbers of `in_keys` and `out_keys`
            differ, or `gamma` is out of range.

    Example:
        >>> rb.append_transform(Reward2GoTransform(gamma=0.99, out_keys=["reward_to_go"]))
    """

    def __init__(
        self,
        gamma: float | torch.Tensor | None = 1.0,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        done_key: NestedKey | None = "done",
    ) -> None:
        if gamma is None:
            raise ArgumentError("gamma=None is not a discount; leave gamma out for no discount (1.0)")
        self.gamma = check_discount("Reward2GoTransform", gamma)
        self.in_keys, self.out_keys = keys_of(in_keys, out_keys, [("next", "reward")])
        self.done_key: NestedKey = "done" if done_key is None else done_key
        check_key("done_key", self.done_key)

    def look(self, view: StepView) -> list[Array]:
        """Sum the rewards from each row on; return an array for each of `in_keys`, of the reward's shape.

        Raises:
            SchemaError: A field of `in_keys`, or `done_key`, does not exist.
        """
        with compiling:
            from expstore.kernels import step_sums
        starts, run, beyond = _starts(view)
        ids, lengths = view.ahead(starts)
        stops = np.cumsum(lengths)
        ends = view.ends(ids, below_next(self.done_key))
        ends[stops - 1] = True
        place = (stops - lengths)[run] + beyond
        found = []
        for key in self.in_keys:
            rewards = view.floats(ids, to_key(key))
            total = step_sums.sum_from_each(
                rewards.reshape(ids.size, math.prod(rewards.shape[1:])).astype(np.float64), ends, self.gamma
            )
            found.append(total[place].reshape(view.ids.size, *rewards.shape[1:]))
        return found

    def apply(self, batch: Any, seen: list[Array]) -> Any:
        """Write the sums into the batch."""
        for key, out, sums in zip(self.in_keys, self.out_keys, seen, strict=True):
            dtype = batch.get(key).dtype
            dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
            batch.set(out, torch.from_numpy(sums).to(dtype))
        return batch

    def __repr__(self) -> str:
        return f"Reward2GoTransform(gamma={self.gamma}, in_keys={self.in_keys}, out_keys={self.out_keys})"


def _starts(view: StepView) -> tuple[IntArray, IntArray, IntArray]:
    """Return the id of each run's first row in the batch, and each row's run and number of steps after it.

    Shapes `(runs,)`, `(n,)`, `(n,)`.
    """
    _, ahead = view.reach(view.ids)
    last, _ = view.at(view.ids, [np.iinfo(np.int32).max])
    _, first, run = np.unique(last[:, 0], return_index=True, return_inverse=True)
    most = np.full(first.size, -1)
    np.maximum.at(most, run, ahead)
    starts = np.empty(first.size, np.int64)
    begins = ahead == most[run]
    starts[run[begins]] = view.ids[begins]
    return starts, run, most[run] - ahead
