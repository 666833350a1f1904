"""Rewards summed up over several steps, and the next observations after them.

Buffers are given it as a transform. It acts on what is sampled: what is stored stays as it was collected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expstore.core.values import Array, IntArray, Key, given_key, key_name, to_key
from expstore.errors import NotFoundError
from expstore.kernels.loader import compiling
from expstore.schema.schema import Schema
from expstore.transforms.base import (
    StepTransform,
    StepView,
    below_next,
    given_discount,
    given_keys,
)

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

__all__ = ["MultiStepTransform"]

NestedKey = str | tuple[str, ...]

#: What is left as it is, where rows have it.
_DONE_KEYS = ("done", "truncated", "terminated")


@dataclass(frozen=True, slots=True)
class _Seen:
    """How many steps rewards are summed up over, and the sums. Shapes `(n,)`, `(n, *row shape)`."""

    steps: IntArray
    sums: list[Array]


class MultiStepTransform(StepTransform):
    """Make n-step transitions of sampled rows (Sutton 1988).

    The reward becomes the sum of the next `n_steps` rewards, each discounted by `gamma` once more than the
    one before; fields below "next" are those of the last of these steps. A sum goes on to a row that says
    that it is done, or truncated, at the latest to the last step of the episode that is there:
    `steps_to_next_obs` says how far. Steps follow their episode across batches, interleaved workers and the
    end of a ring. What is stored stays as it is, and the number of steps can be changed at any time.

    Beside these a batch has, as TorchRL's: `steps_to_next_obs` (int64) and `gamma` to the power of it (the
    discount of what follows), `nonterminal` (bool: it is more than one step), shape `[n]` each, and
    ("next", "original_reward"), of several reward keys that of the last one.

    As TorchRL's it leaves the `done_keys` as they are in the row itself. With `done_keys=[]` they, too, are
    those of the last step: what is computed from ("next", "observation") then knows whether that is an end.

    Threads, processes and crashes as `StepTransform`.

    Args:
        n_steps: How many steps, 1 or more.
        gamma: The discount, from 0 to 1.
        reward_keys: What is summed up, below "next"; `["reward"]` by default.
        done_key: What ends a sum, below "next"; "done" by default, which means every field that ends episodes
            of the store.
        done_keys: What is left as it is, below "next"; done, terminated, truncated by default.
        mask_key: A field in which rows are False that count as terminal in `nonterminal`; "mask" by default.

    Raises:
        TypeError: `gamma` is no number, or something is no key.
        ValueError: `n_steps` is no positive integer, `gamma` is out of its bounds, or there are no rewards.

    Example:
        >>> rb.append_transform(MultiStepTransform(n_steps=3, gamma=0.99))
        >>> rb.sample()["steps_to_next_obs"].max()
        tensor(3)
    """

    moves = True

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
        self.gamma = given_discount("MultiStepTransform", gamma)
        self.reward_keys = given_keys("reward_keys", ["reward"] if reward_keys is None else reward_keys)
        if not self.reward_keys:
            raise ValueError('reward_keys=[] leaves nothing to sum up; leave it out for ["reward"]')
        self.done_key = "done" if done_key is None else done_key
        self.done_keys = given_keys("done_keys", list(_DONE_KEYS) if done_keys is None else done_keys)
        self.mask_key = "mask" if mask_key is None else mask_key
        given_key("done_key", self.done_key)
        given_key("mask_key", self.mask_key)
        self._moved: tuple[Schema, tuple[NestedKey, ...], frozenset[int]] | None = None

    @property
    def n_steps(self) -> int:
        """How many steps rewards are summed up over."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError("The value of n_steps must be a strictly positive integer.")
        self._n_steps = value

    @property
    def settings(self) -> object:
        """The number of steps, and the discount."""
        return self.n_steps, self.gamma

    def look(self, view: StepView) -> _Seen:
        """Sum up rewards, and have the fields below "next" taken from the last step.

        Raises:
            SchemaError: There is no such reward, or end, or other field that is to be left as it is.
        """
        with compiling:
            from expstore.kernels import step_sums
        ids, there = view.at(view.ids, np.arange(self.n_steps))
        steps = step_sums.count_steps(there, view.ends(ids, below_next(self.done_key)))
        rewards = (view.floats(ids, below_next(key)) for key in self.reward_keys)
        found = [step_sums.sum_steps(values, steps, self.gamma) for values in rewards]
        view.next_ids = ids[np.arange(steps.size), steps - 1]
        view.moved |= self._moved_in(view.storage)
        return _Seen(steps, found)

    def _moved_in(self, storage: ReadView) -> frozenset[int]:
        """Return the positions of the fields that are those of the last step."""
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
        """Write the sums, and what they are.

        Raises:
            NotFoundError: A mask is asked for that rows do not have.
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
                f"there is no mask {key_name(to_key(self.mask_key))!r} in what was read",
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
