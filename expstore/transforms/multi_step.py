"""A transform that makes n-step transitions: summed rewards, and the observation after the last step.

It changes sampled batches only: rows stay stored as they were collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expstore.core.values import Array, IntArray, Key, check_key, key_name, to_key
from expstore.errors import ArgumentError, NotFoundError
from expstore.kernels.loader import compiling
from expstore.schema.schema import Schema
from expstore.transforms.base import (
    StepView,
    below_next,
    check_discount,
    check_keys,
)
from expstore.transforms.torchrl_twin import TwinTransform

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

NestedKey = str | tuple[str, ...]

#: The fields below "next" that keep the row's own value by default, where rows have them.
_DONE_KEYS = ("done", "truncated", "terminated")


@dataclass(frozen=True, slots=True)
class _Seen:
    """The number of steps in each sum, and the sums. Shapes `(n,)`, `(n, *row shape)`."""

    steps: IntArray
    sums: list[Array]


class MultiStepTransform(TwinTransform):
    """Make n-step transitions of sampled rows (Sutton 1988).

    The reward becomes the sum of the next `n_steps` rewards, each discounted by `gamma` once more than the
    one before; fields below "next" are those of the last of these steps. A sum stops early at a row that is
    done or truncated, and at the last step of the episode that can be read; `steps_to_next_obs` is the number
    of steps in the sum. Steps follow their episode across batches, interleaved workers and the end of a ring.
    Stored rows are not changed, and `n_steps` can be changed at any time.

    As with TorchRL's class, the batch also gets `steps_to_next_obs` (int64), `gamma` to the power of it (the
    discount of the next state's value), `nonterminal` (bool: whether the sum has more than one step), shape
    `[n]` each, and ("next", "original_reward"): with several reward keys, the last key's.

    As with TorchRL's class, the `done_keys` keep the values of the row itself. With `done_keys=[]` they also
    are those of the last step, so that they tell whether ("next", "observation") ends the episode.

    Threads, processes and crashes as `StepTransform`.

    Args:
        n_steps: Number of steps, 1 or more.
        gamma: The discount, from 0 to 1.
        reward_keys: The fields below "next" to sum; `["reward"]` by default.
        done_key: The field below "next" that ends a sum. The default, "done", means every field that ends
            episodes of the store.
        done_keys: The fields below "next" that keep the row's own values; done, terminated and truncated by
            default.
        mask_key: A bool field; rows where it is False count as terminal in `nonterminal`. "mask" by default.

    Raises:
        ArgumentError: `gamma` is not a number, or a key is not a key; `n_steps` is not a positive integer,
            `gamma` is out of range, or `reward_keys` is empty.

    Example:
        >>> from expstore import MultiStepTransform
        >>> rb.append_transform(MultiStepTransform(n_steps=3, gamma=0.99))
        >>> rb.sample()["steps_to_next_obs"].max()
        tensor(3)
    """

    moves = True
    torchrl_name = "MultiStepTransform"

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: Sequence[NestedKey] | None = None,
        done_key: NestedKey | None = None,
        done_keys: Sequence[NestedKey] | None = None,
        mask_key: NestedKey | None = None,
    ) -> None:
        self.n_steps = n_steps
        self.gamma = check_discount("MultiStepTransform", gamma)
        self.reward_keys = check_keys("reward_keys", ["reward"] if reward_keys is None else reward_keys)
        if not self.reward_keys:
            raise ArgumentError('reward_keys=[] leaves nothing to sum up; leave it out for ["reward"]')
        self.done_key = "done" if done_key is None else done_key
        self.done_keys = check_keys("done_keys", list(_DONE_KEYS) if done_keys is None else done_keys)
        self.mask_key = "mask" if mask_key is None else mask_key
        check_key("done_key", self.done_key)
        check_key("mask_key", self.mask_key)
        self._moved: tuple[Schema, tuple[NestedKey, ...], frozenset[int]] | None = None

    @property
    def n_steps(self) -> int:
        """Number of steps over which rewards are summed."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ArgumentError("The value of n_steps must be a strictly positive integer.")
        self._n_steps = value

    @property
    def settings(self) -> object:
        """The number of steps and the discount."""
        return self.n_steps, self.gamma

    def torchrl_options(self) -> dict[str, Any]:
        """Return the keyword arguments of TorchRL's class for a transform with the same settings."""
        names = ("n_steps", "gamma", "reward_keys", "done_key", "done_keys", "mask_key")
        return {name: getattr(self, name) for name in names}

    def look(self, view: StepView) -> _Seen:
        """Sum rewards, and make the view read the fields below "next" from the last step.

        Raises:
            SchemaError: A field of `reward_keys`, `done_key` or `done_keys` does not exist.
        """
        with compiling:
            from expstore.kernels import step_sums
        ids, there = view.at(view.ids, np.arange(self.n_steps))
        steps = step_sums.count_steps(there, view.ends(ids, below_next(self.done_key)))
        rewards = (view.floats(ids, below_next(key)) for key in self.reward_keys)
        found = [step_sums.sum_steps(values, steps, self.gamma) for values in rewards]
        view.next_ids = ids[np.arange(steps.size), steps - 1]
        view.moved |= self._find_moved(view.storage)
        return _Seen(steps, found)

    def _find_moved(self, storage: ReadView) -> frozenset[int]:
        """Return the positions of the fields that are read from the last step."""
        schema = storage.require_schema()
        known, asked = self._moved, (*self.reward_keys, *self.done_keys)
        if known is None or known[0] is not schema or known[1] != asked:
            for key in self.done_keys:
                if key not in _DONE_KEYS:
                    storage.require_schema().place_of(below_next(key))  # raises an error that names it
            own = {below_next(key) for key in asked}
            moved = (
                n for n, entry in enumerate(schema.fields) if _is_next(entry.key) and entry.key not in own
            )
            known = self._moved = schema, asked, frozenset(moved)
        return known[2]

    def apply(self, batch: Any, seen: _Seen) -> Any:
        """Write the sums, their numbers of steps, discounts and `nonterminal` into the batch.

        Raises:
            NotFoundError: Rows do not have the field `mask_key`, and it is not the default.
        """
        steps = torch.from_numpy(seen.steps)
        batch.set("steps_to_next_obs", steps)
        for key, sums in zip(self.reward_keys, seen.sums, strict=True):
            reward = batch.get(below_next(key))
            batch.set(("next", "original_reward"), reward)
            dtype = reward.dtype if reward.is_floating_point() else torch.get_default_dtype()
            batch.set(below_next(key), torch.from_numpy(sums).to(dtype))
        batch.set("gamma", self.gamma**steps)
        nonterminal = steps != 1
        mask = batch.get(self.mask_key, None)
        if mask is None and self.mask_key != "mask":
            raise NotFoundError(
                f"there is no mask {key_name(to_key(self.mask_key))!r} in the batch",
                hint="store it, or leave mask_key out",
            )
        if mask is not None:
            nonterminal &= mask.reshape(nonterminal.shape).bool()
        batch.set("nonterminal", nonterminal)
        return batch

    def __repr__(self) -> str:
        return f"MultiStepTransform(n_steps={self.n_steps}, gamma={self.gamma})"


def _is_next(key: Key) -> bool:
    return key[0] == "next" and len(key) > 1
