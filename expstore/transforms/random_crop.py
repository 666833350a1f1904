"""A transform that crops a random sub-sequence from every trajectory of a batch.

Use it in buffers whose rows are trajectories, on slices, or alone. It does not read a store: its random
numbers come from the buffer's draw, or from a torch generator.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from expstore.core.values import key_name, to_key
from expstore.errors import ArgumentError, SchemaError


class RandomCropTensorDict(nn.Module):
    """Crop a sub-sequence of consecutive steps from every trajectory; each start has the same probability.

    As a transform of a buffer, its crops depend on the number of the draw only: they are the same after a
    restart. Transforms run in their order. Slices are concatenated in a batch: reshape them before
    (`lambda batch: batch.reshape(slices, -1)`).

    Threads: any number may call, unless they share a generator. Processes, crashes: it keeps no state.

    Args:
        sub_seq_len: Number of steps of a crop.
        sample_dim: The batch dim that is time; a negative one works for batches of any number of dims.
        mask_key: The bool field that is True for a trajectory's steps and False for the padding after them:
            crops contain steps only. If a batch does not have it, every position is a step.
        generator: The generator that is used outside a buffer, and for rows read by index; None for torch's
            global one.

    Raises:
        ArgumentError: `sub_seq_len` is not at least 1.

    Example:
        >>> from expstore import RandomCropTensorDict
        >>> data = TensorDict({"x": torch.arange(10).expand(3, 10)}, [3, 10])
        >>> crop = RandomCropTensorDict(4, generator=torch.Generator().manual_seed(0))
        >>> crop(data)["x"]
        tensor([[6, 7, 8, 9],
                [4, 5, 6, 7],
                [3, 4, 5, 6]])
    """

    #: Tells a buffer to pass the random generator of the draw to `forward`.
    draws = True

    def __init__(
        self,
        sub_seq_len: int,
        sample_dim: int = -1,
        mask_key: str | tuple[str, ...] | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if isinstance(sub_seq_len, bool) or not isinstance(sub_seq_len, int) or sub_seq_len < 1:
            raise ArgumentError(
                f"sub_seq_len must be the number of steps of a crop, at least 1, got {sub_seq_len!r}"
            )
        if sample_dim > 0:
            warnings.warn(
                "A positive shape has been passed to the RandomCropTensorDict constructor. This may have "
                "unexpected behaviors when the passed tensordicts have inconsistent batch dimensions. Time "
                "is the last batch dim by convention: -1",
                stacklevel=2,
            )
        self.sub_seq_len = sub_seq_len
        self.sample_dim = sample_dim
        self.mask_key = mask_key
        self.generator = generator

    def forward(
        self, tensordict: TensorDictBase, numbers: np.random.Generator | None = None
    ) -> TensorDictBase:
        """Return a new batch of crops.

        Args:
            tensordict: A batch with at least one batch dim. It is not changed.
            numbers: The random generator of the draw; None to use `generator`.

        Raises:
            RuntimeError: `sample_dim` is out of range, or a trajectory is shorter than `sub_seq_len`.
            SchemaError: The mask does not have the batch's shape.
        """
        shape, dim = tensordict.shape, self.sample_dim
        if not shape:
            raise RuntimeError("Cannot sub-sample from a tensordict with an empty shape.")
        if not -len(shape) <= dim < len(shape):
            raise RuntimeError(f"sample_dim={dim} is out of range for a batch of size {[*shape]}")
        if shape[dim] < self.sub_seq_len:
            raise RuntimeError(
                f"Cannot sample trajectories of length {self.sub_seq_len} along dimension {dim} given a "
                f"tensordict of shape {shape}. Consider reducing the sub_seq_len parameter or increase "
                "sample length."
            )
        starts = self._starts(tensordict, dim % len(shape), numbers)
        steps = torch.arange(self.sub_seq_len, device=starts.device)
        return tensordict.gather(dim, starts + steps.reshape(-1, *(1 for _ in shape[dim % len(shape) + 1 :])))

    def _starts(self, batch: TensorDictBase, dim: int, numbers: np.random.Generator | None) -> torch.Tensor:
        """Return the first step of each crop. Shape: the batch size, with 1 in the time dim; int64."""
        shape = (*batch.shape[:dim], 1, *batch.shape[dim + 1 :])
        device = torch.device("cpu") if batch.device is None else batch.device
        if numbers is not None:
            drawn = torch.from_numpy(numbers.random(shape)).to(device)
        else:
            source = device if self.generator is None else self.generator.device
            drawn = torch.rand(shape, dtype=torch.float64, device=source, generator=self.generator).to(device)
        lengths = self._lengths(batch, dim)
        return (drawn * (lengths - self.sub_seq_len + 1)).to(torch.int64)

    def _lengths(self, batch: TensorDictBase, dim: int) -> torch.Tensor | int:
        """Return the length of each trajectory: one number for all, or a tensor shaped as the starts."""
        size = int(batch.shape[dim])
        if self.mask_key is None:
            return size
        mask = batch.get(self.mask_key, None)
        if mask is None:
            return size
        if mask.shape != batch.shape:
            raise SchemaError(
                "Expected a mask of the same shape as the tensordict. Got "
                f"mask.shape={mask.shape} and tensordict.shape={batch.shape} instead.",
                hint=f"{key_name(to_key(self.mask_key))!r} must have one flag per step",
            )
        lengths: torch.Tensor = mask.sum(dim, keepdim=True)
        if lengths.numel() and int(lengths.min()) < self.sub_seq_len:
            raise RuntimeError(
                f"Cannot sample trajectories of length {self.sub_seq_len} when the minimum "
                f"trajectory length is {int(lengths.min())}."
            )
        return lengths

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"sub_seq_len={self.sub_seq_len}, sample_dim={self.sample_dim}, mask_key={self.mask_key!r}"
