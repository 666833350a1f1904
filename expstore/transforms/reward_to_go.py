"""A transform that computes the reward to go: the discounted sum of all rewards from a row on.

It changes sampled batches only: rows stay stored as they were collected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from expstore.core.values import Array, IntArray, Key, check_key, key_name, to_key
from expstore.errors import ArgumentError, NotFoundError
from expstore.kernels.loader import compiling
from expstore.storages.new_field import inner_dims
from expstore.transforms.base import StepView, below_next, check_discount, keys_of
from expstore.transforms.torchrl_twin import TwinTransform

if TYPE_CHECKING:
    from expstore.storages.read_view import ReadView

NestedKey = str | tuple[str, ...]


class Reward2GoTransform(TwinTransform):
    """Compute the reward to go: the discounted sum of a row's reward and all rewards after it.

    A sum ends at the first row that is done or truncated, or else at the last step of the episode that can be
    read: in an open episode it grows as steps are written. Steps follow their episode across batches,
    interleaved workers and the end of a ring. So rows may be sampled one by one, and episodes written in
    pieces; TorchRL's class needs whole episodes in each batch that is written. Stored rows are not changed.

    Each batch reads the rewards from its rows to the ends of their episodes.

    Where rows are trajectories (batches of several dims in a storage with `ndim=1`), sums stay within the
    row: time is the last batch dim, and a sum ends at a flag `done_key`, or at the row's last step.

    Threads, processes and crashes as `StepTransform`.

    Args:
        gamma: The discount, from 0 to 1.
        in_keys: The rewards; `[("next", "reward")]` by default. A name, or a tuple of names, is one key.
        out_keys: The fields for the sums; `in_keys` by default. They have the rewards' shapes and dtypes; the
            sums of integers have torch's default dtype.
        done_key: The field below "next" that ends a sum, with or without "next"; "done" means every field
            that ends episodes of the store.

    Raises:
        ArgumentError: `gamma` is not a number, or a key is not a key; the numbers of `in_keys` and `out_keys`
            differ, or `gamma` is out of range.

    Example:
        >>> from expstore import Reward2GoTransform
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
        if to_key(self.done_key)[0] == "next":
            self.done_key = to_key(self.done_key)[1:]

    torchrl_name = "Reward2GoTransform"

    def torchrl_options(self) -> dict[str, Any]:
        """Return the keyword arguments of TorchRL's class for a transform with the same settings."""
        return {name: getattr(self, name) for name in ("gamma", "in_keys", "out_keys", "done_key")}

    def stays_within(self, storage: ReadView) -> bool:
        """Return whether rows are trajectories."""
        return _has_steps(storage)

    def look(self, view: StepView) -> list[Array] | None:
        """Sum the rewards from each row on; return an array for each of `in_keys`, of the reward's shape.

        Returns None if rows are trajectories: `apply` then sums within them.

        Raises:
            SchemaError: A field of `in_keys`, or `done_key`, does not exist.
        """
        if _has_steps(view.storage):
            return None
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

    def apply(self, batch: Any, seen: list[Array] | None) -> Any:
        """Write the sums into the batch.

        Raises:
            NotFoundError: Rows are trajectories, and the batch lacks a field of `in_keys`, or `done_key`.
        """
        if seen is None:
            seen = [self._sum_within(batch, to_key(key)) for key in self.in_keys]
        for key, out, sums in zip(self.in_keys, self.out_keys, seen, strict=True):
            dtype = batch.get(key).dtype
            dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
            batch.set(out, torch.from_numpy(sums).to(dtype))
        return batch

    def _sum_within(self, batch: Any, key: Key) -> Array:
        """Return the sums along the last batch dim, of rows that are trajectories. Shape of the reward."""
        with compiling:
            from expstore.kernels import step_sums
        rewards, done = (_field(batch, one) for one in (key, below_next(self.done_key)))
        steps, dims = batch.batch_size[-1], batch.batch_dims
        values = rewards.reshape(-1, math.prod(rewards.shape[dims:])).astype(np.float64)
        ends: Array = np.any(done.reshape(-1, steps, math.prod(done.shape[dims:])), axis=-1)
        ends[:, -1:] = True
        return step_sums.sum_from_each(values, ends.reshape(-1), self.gamma).reshape(rewards.shape)

    def __repr__(self) -> str:
        return f"Reward2GoTransform(gamma={self.gamma}, in_keys={self.in_keys}, out_keys={self.out_keys})"


def _has_steps(storage: ReadView) -> bool:
    """Return whether each row has several steps."""
    return bool(inner_dims(storage.require_schema().form))


def _field(batch: Any, key: Key) -> Array:
    values = batch.get(key, None)
    if values is None:
        raise NotFoundError(f"the batch has no field {key_name(key)!r}", hint="store it, or name another one")
    array: Array = values.detach().cpu().double().numpy()
    return array


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
