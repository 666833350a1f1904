"""Transforms of whole rollouts before they are stored: n-step rewards, and rewards to go.

Used as the `postproc` of collectors, under TorchRL's names. They see one batch at a time and never a store.
The transforms of the same kind in `expstore.transforms` find other steps of an episode in the store.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from tensordict import TensorDictBase
from torch import nn

from expstore.core.values import Key, key_name, to_key
from expstore.errors import ArgumentError, SchemaError
from expstore.trajectories.splitting import DEFAULT_DONE_KEYS


class MultiStep(nn.Module):
    """Sum rewards over the next steps, and replace the next observation by the one after these steps.

    Row t covers n = min(`n_steps`, steps up to the trajectory's end) steps, from its own on: ("next",
    "reward") is the sum of gamma^i * reward[t + i] for i < n. All other fields below "next" are those of row
    t + n - 1, except for the flags (`done_keys`), which remain those of row t, as in TorchRL. Trajectories
    end at ("next", "done"), at the end of the batch, and where ("collector", "mask") ends. Added fields:
    `steps_to_next_obs` (n), `gamma` (gamma^n), `nonterminal` (whether n is above 1; False where the mask is
    False) and ("next", "original_reward").

    Sutton 1988, "Learning to predict by the methods of temporal differences".

    Threads: any number may call. Processes, crashes: it stores nothing.

    Args:
        gamma: The discount, above 0 and at most 1.
        n_steps: The largest number of steps in a sum, at least 1.

    Raises:
        ArgumentError: `gamma` is not a number; a number is out of range.

    Example:
        >>> from expstore.trajectories import MultiStep
        >>> reward, done = torch.ones(4, 1), torch.tensor([[False], [False], [True], [False]])
        >>> data = TensorDict({"next": {"reward": reward, "done": done, "x": torch.arange(4)}}, [4])
        >>> made = MultiStep(gamma=0.5, n_steps=2)(data)
        >>> made["next", "reward"][:, 0], made["next", "x"]
        (tensor([1.5000, 1.5000, 1.0000, 1.0000]), tensor([1, 2, 2, 3]))
    """

    gammas: torch.Tensor

    def __init__(self, gamma: float, n_steps: int) -> None:
        super().__init__()
        if isinstance(n_steps, bool) or not isinstance(n_steps, int) or n_steps <= 0:
            raise ArgumentError(
                "n_steps must be a non-negative integer. More exactly, it must be positive, not "
                f"{n_steps!r}; 1 changes nothing."
            )
        try:
            inside = 0 < gamma <= 1
        except TypeError:
            raise ArgumentError(
                f"gamma is a discount, a number above 0 and at most 1, got {gamma!r}"
            ) from None
        if not inside:
            raise ArgumentError(f"got out-of-bounds gamma decay: gamma={gamma}")
        self.gamma = gamma
        self.n_steps = n_steps
        self.register_buffer(
            "gammas", torch.tensor([float(gamma) ** i for i in range(n_steps + 1)])[None, None]
        )
        self.done_key = "done"
        self.done_keys = DEFAULT_DONE_KEYS
        self.reward_keys: tuple[Any, ...] = ("reward",)
        self.mask_key: Any = ("collector", "mask")

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return a new batch with summed rewards; the given batch is not changed.

        Args:
            tensordict: The batch, with time as its last batch dim. The shape of ("next", "done") is the batch
                size, with a dim of 1 or with other dims after it. All fields below "next" must begin with the
                same dims; rewards may have more.

        Raises:
            SchemaError: The batch has no rewards or no flags.
            RuntimeError: The shape of the flags does not fit the batch.
        """
        batch = tensordict.clone(False)
        dim, mask = batch.ndim - 1, None if self.mask_key is None else batch.get(self.mask_key, None)
        done = _flags(batch, ("next", *to_key(self.done_key)))
        if mask is not None:
            mask = mask.reshape(batch.shape)
            done = done | _right(_last(mask, dim), done)
        steps = _to_end(done, dim).clamp_max(self.n_steps)
        place = torch.arange(done.shape[dim], device=done.device)
        following = _gather(
            batch.get("next").exclude(*self.reward_keys, *self.done_keys),
            steps + _right(place.reshape(*(1 for _ in range(dim)), -1), done) - 1,
            dim,
        )
        batch.set("steps_to_next_obs", steps)
        for name in self.reward_keys:
            key = ("next", *to_key(name))
            reward = _require(batch, key)
            batch.rename_key_(key, (*key[:-1], f"original_{key[-1]}"))
            batch.set(key, _sum(reward, steps, self.gamma, self.n_steps, dim))
        batch.get("next").update(following)
        batch.set("gamma", self.gamma**steps)
        nonterminal = steps != 1
        batch.set("nonterminal", nonterminal if mask is None else nonterminal & _right(mask, done))
        return batch

    def extra_repr(self) -> str:
        """Return the settings as text."""
        return f"gamma={self.gamma}, n_steps={self.n_steps}"


class DensifyReward(nn.Module):
    """Give each step the sum of the rewards from it to the end of its trajectory.

    If only the last step of a trajectory has a reward, every step gets this reward. Trajectories end at the
    flag and at the end of the batch.

    Threads: any number may call. Processes, crashes: it stores nothing.

    Args:
        reward_key: The field with rewards, below "next".
        done_key: The flag that is True in the last step of each trajectory, below "next".
        reward_key_out: The field for the sums, below "next"; None to replace the rewards.
        time_dim: The dim of rewards that is time. The default, 2, means the last dim but one, as every value
            does in TorchRL.
        discount: The factor for a reward that is one step later.

    Example:
        >>> from expstore.trajectories import DensifyReward
        >>> reward, done = torch.tensor([[0.0], [0.0], [3.0]]), torch.tensor([[False], [False], [True]])
        >>> data = TensorDict({"next": {"reward": reward, "done": done}}, [3])
        >>> DensifyReward()(data)["next", "reward"][:, 0]
        tensor([3., 3., 3.])
    """

    def __init__(
        self,
        *,
        reward_key: str | tuple[str, ...] = "reward",
        done_key: str | tuple[str, ...] = "done",
        reward_key_out: str | tuple[str, ...] | None = None,
        time_dim: int = 2,
        discount: float = 1.0,
    ) -> None:
        super().__init__()
        self.in_keys = [reward_key, done_key]
        self.out_keys = [reward_key if reward_key_out is None else reward_key_out]
        self.time_dim = time_dim
        self.discount = discount

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the sums of rewards into a batch, and return the batch.

        Args:
            tensordict: The batch; it is changed in place.

        Raises:
            SchemaError: The batch has no rewards or no flags.
            RuntimeError: Rewards and flags have different shapes, or no dim `time_dim`.
        """
        reward, done = (_require(tensordict, ("next", *to_key(key))) for key in self.in_keys)
        if reward.shape != done.shape:
            raise RuntimeError(
                f"reward and done state are expected to have the same shape. Got reward.shape={reward.shape} "
                f"and done.shape={done.shape}."
            )
        dim = -2 if self.time_dim == 2 else self.time_dim
        if not -reward.ndim <= dim < reward.ndim:
            raise RuntimeError(
                f"time_dim={self.time_dim} is dim {dim}, but rewards have shape {[*reward.shape]}; pass the "
                "dim that is time"
            )
        sums = _to_go(reward, done.bool(), self.discount, dim % reward.ndim)
        return tensordict.set(("next", *to_key(self.out_keys[0])), sums)

    def extra_repr(self) -> str:
        """Return the settings as text."""
        return f"reward_key={self.in_keys[0]!r}, done_key={self.in_keys[1]!r}, discount={self.discount}"


def _require(batch: TensorDictBase, key: Key) -> torch.Tensor:
    values = batch.get(key, None)
    if values is None:
        there = sorted(key_name(to_key(name)) for name in batch.keys(True, True))
        raise SchemaError(f"the batch has no {key_name(key)!r}; its fields are {there}")
    return cast(torch.Tensor, values)


def _flags(batch: TensorDictBase, key: Key) -> torch.Tensor:
    """Return the flags of the steps of a batch. Shape: the batch size, and further dims other than 1."""
    done, shape = _require(batch, key).bool(), batch.shape
    if done.shape[: len(shape)] != shape or not shape:
        raise RuntimeError(
            "tensordict shape must be compatible with the done's shape (trailing singleton dimension "
            f"excluded): {key_name(key)!r} has shape {[*done.shape]} in a batch of size {[*shape]}."
        )
    return done.squeeze(-1) if done.shape == (*shape, 1) else done


def _right(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return values with trailing dims of 1, so that they broadcast with a tensor of more dims."""
    return values.reshape(*values.shape, *(1 for _ in range(like.ndim - values.ndim)))


def _last(mask: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the steps of a mask that are followed by a step outside of it, or by none."""
    after = torch.zeros_like(mask)
    after.narrow(dim, 0, mask.shape[dim] - 1).copy_(mask.narrow(dim, 1, mask.shape[dim] - 1))
    return mask & ~after


def _to_end(done: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the number of steps from each step to the next flag or the last step, both included. Int64."""
    size = done.shape[dim]
    place = torch.arange(size, device=done.device).reshape(*(1 for _ in range(dim)), -1)
    place = _right(place, done).expand(done.shape)
    end = torch.where(done, place, size - 1).flip(dim).cummin(dim).values.flip(dim)
    return end - place + 1


def _gather(batch: TensorDictBase, index: torch.Tensor, dim: int) -> TensorDictBase:
    """Return the fields below "next" at other steps.

    Args:
        batch: The fields below "next".
        index: The step to take for each step. Its shape must be the first dims of all fields.
        dim: The dim that is time.
    """
    shape = batch.batch_size
    try:
        batch.batch_size = index.shape
    except RuntimeError as exc:
        raise RuntimeError(
            "tensordict shape must be compatible with the done's shape (trailing singleton dimension "
            f"excluded): fields below 'next' do not all begin with {[*index.shape]}."
        ) from exc
    made = batch.gather(dim, index)
    made.batch_size = shape
    return made


def _sum(reward: torch.Tensor, steps: torch.Tensor, gamma: float, most: int, dim: int) -> torch.Tensor:
    """Return the sums of discounted rewards over a number of steps from each step on.

    Args:
        reward: The rewards.
        steps: The number of steps in each sum.
        gamma: The discount.
        most: The largest number of steps.
        dim: The dim that is time.
    """
    if not reward.is_floating_point():
        reward = reward.to(torch.get_default_dtype())
    if reward.ndim < steps.ndim:
        raise RuntimeError(
            f"rewards of shape {[*reward.shape]} do not fit flags of shape {[*steps.shape]}: rewards need "
            "the dims of the flags, and may have more"
        )
    size, steps = reward.shape[dim], _right(steps, reward)
    total = reward.clone()
    for later in range(1, min(most, size)):
        part = reward.narrow(dim, later, size - later) * gamma**later
        there = steps.narrow(dim, 0, size - later) > later
        total.narrow(dim, 0, size - later).add_(part.where(there, part.new_zeros(())))
    return total


def _to_go(reward: torch.Tensor, done: torch.Tensor, discount: float, dim: int) -> torch.Tensor:
    """Return the sums of discounted rewards from each step on, with a scan in log2(steps) rounds."""
    total = reward if reward.is_floating_point() else reward.to(torch.get_default_dtype())
    factor = torch.full_like(total, discount).masked_fill(done, 0.0)
    size, ahead = total.shape[dim], 1
    while ahead < size:
        # `total` has the sums over up to `ahead` steps, `factor` the discount of the rewards after them.
        rest, end = size - ahead, torch.zeros_like(total.narrow(dim, 0, ahead))
        later = torch.cat([total.narrow(dim, ahead, rest), end], dim)
        # Rewards beyond the end of a trajectory do not count, even if they are infinite or NaN.
        total = total + torch.where(factor == 0, 0.0, factor * later)
        factor = factor * torch.cat([factor.narrow(dim, ahead, rest), end], dim)
        ahead *= 2
    return total
