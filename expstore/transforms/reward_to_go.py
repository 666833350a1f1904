"""The discounted sum of all rewards that are still to come.

Buffers are given it as a transform. It acts on what is sampled: what is stored stays as it was collected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from expstore.core.values import Array, IntArray, given_key, to_key
from expstore.kernels.loader import compiling
from expstore.transforms.base import StepTransform, StepView, below_next, given_discount, keys_of

__all__ = ["Reward2GoTransform"]

NestedKey = str | tuple[str, ...]


class Reward2GoTransform(StepTransform):
    """Write the reward to go: the discounted sum of a row's reward and of all that come after it.

    A sum goes on to a row that says that it is done, or truncated, at the latest to the last step of the
    episode that is there: of an episode that is still open it grows as steps come. Steps follow their episode
    across batches, interleaved workers and the end of a ring, so that rows may be sampled one by one, and
    episodes come in pieces, where TorchRL's needs whole ones in each batch that is written. What is stored
    stays as it is.

    A batch costs reading the rewards from its rows to their episodes' ends.

    Threads, processes and crashes as `StepTransform`.

    Args:
        gamma: The discount, from 0 to 1.
        in_keys: The rewards; `[("next", "reward")]` by default. A name, or a tuple of names, is one key.
        out_keys: Where the sums go; `in_keys` by default. Shapes and dtypes are the rewards'; of integers
            torch's default dtype.
        done_key: What ends a sum, below "next"; "done" means every field that ends episodes of the store.

    Raises:
        TypeError: `gamma` is no number, or something is no key.
        ValueError: There are not as many `out_keys` as `in_keys`, or `gamma` is out of its bounds.

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
            raise ValueError("gamma=None is no discount; leave it out for none (1.0)")
        self.gamma = given_discount("Reward2GoTransform", gamma)
        self.in_keys, self.out_keys = keys_of(in_keys, out_keys, [("next", "reward")])
        self.done_key: NestedKey = "done" if done_key is None else done_key
        given_key("done_key", self.done_key)

    def look(self, view: StepView) -> list[Array]:
        """Sum up the rewards from each row on.

        Raises:
            SchemaError: There is no such reward, or end.
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
        """Write the sums."""
        for key, out, sums in zip(self.in_keys, self.out_keys, seen, strict=True):
            dtype = batch.get(key).dtype
            batch.set(out, torch.from_numpy(sums).to(dtype if dtype.is_floating_point else None))
        return batch

    def __repr__(self) -> str:
        return f"Reward2GoTransform(gamma={self.gamma}, in_keys={self.in_keys}, out_keys={self.out_keys})"


def _starts(view: StepView) -> tuple[IntArray, IntArray, IntArray]:
    """Return the first row of the batch in each run; of every row the run, and how far in it is.

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
