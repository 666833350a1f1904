"""A random stretch of every trajectory of a batch.

Used in buffers whose rows are trajectories, on slices, or alone. It never looks at a store: what is drawn
follows from the buffer's draw, or from a generator.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import nn

from expstore.core.values import key_name, to_key
from expstore.errors import SchemaError

__all__ = ["RandomCropTensorDict"]


class RandomCropTensorDict(nn.Module):
    """Take a stretch of steps of every trajectory, which begins anywhere with the same chance.

    In a buffer that has it as a transform, a sample's stretches follow from its draw: they are the same after
    a restart. It acts where it stands among the transforms: slices, which come one behind another, first
    need dims of their own (`lambda batch: batch.reshape(slices, -1)`).

    Threads: any number may call, unless they share a generator. Processes, crashes: it keeps nothing.

    Args:
        sub_seq_len: How many steps a stretch has.
        sample_dim: The batch dim that is time; those counted from the end bear batches of any dims.
        mask_key: The field that is True in a trajectory's steps, which come first, and False behind them:
            stretches have steps only. Where a batch has none, every step counts.
        generator: What is drawn by, alone or where a buffer's rows are read by index; None: torch's own.

    Raises:
        ValueError: `sub_seq_len` is not at least 1.

    Example:
        >>> data = TensorDict({"x": torch.arange(10).expand(3, 10)}, [3, 10])
        >>> crop = RandomCropTensorDict(4, generator=torch.Generator().manual_seed(0))
        >>> crop(data)["x"]
        tensor([[6, 7, 8, 9],
                [4, 5, 6, 7],
                [3, 4, 5, 6]])
    """

    #: What a buffer asks for: it hands the numbers of the draw to `forward`.
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
            raise ValueError(f"sub_seq_len is how many steps a stretch has, at least 1, not {sub_seq_len!r}")
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
        """Return a batch of stretches; the one given stays as it is.

        Args:
            tensordict: At least one batch dim.
            numbers: What is drawn by; None: the generator.

        Raises:
            RuntimeError: There is no such dim, or a trajectory is shorter than a stretch.
            SchemaError: The mask is not of the batch's shape.
        """
        shape, dim = tensordict.shape, self.sample_dim
        if not shape:
            raise RuntimeError("Cannot sub-sample from a tensordict with an empty shape.")
        if not -len(shape) <= dim < len(shape):
            raise RuntimeError(f"sample_dim={dim} is no dim of a batch of size {[*shape]}; give one that is")
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
        """Return the first step of each stretch. Shape: the batch size, 1 where time is; int64."""
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
        """Return how many steps each trajectory has: one number for all, or as the starts are shaped."""
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
                hint=f"{key_name(to_key(self.mask_key))!r} says of each step whether there is one",
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
