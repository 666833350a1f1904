"""The sampler of an ensemble of buffers: it chooses the members that a batch is drawn from.

Each member draws its rows with a sampler of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from expstore.core.members import Members
from expstore.core.values import Array, IntArray
from expstore.data.to_arrays import to_array
from expstore.errors import ArgumentError, NotReadyError


class SamplerEnsemble(Members):
    """Hold the samplers of an ensemble of buffers, and choose the members of each batch.

    A batch consists of `num_buffer_sampled` parts of the same size. For each part a member is drawn: with
    equal probabilities, by `p`, or by the number of rows (or starts of slices) that each member has.

    Threads: `p` may be set while others sample. Crashes: it stores nothing; the members store their state.

    Args:
        samplers: One sampler per member.
        p: Probabilities of the members, or numbers proportional to them, at least 0. "sampleable" for numbers
            proportional to the rows, or starts of slices, that each member has now. None for equal
            probabilities.
        sample_from_all: Whether a batch has one part of each member, in the members' order.
        num_buffer_sampled: Number of parts in a batch; None for the number of members.

    Raises:
        RuntimeError: Both `p` and `sample_from_all` are given.
        ArgumentError: `p` is not one number per member, at least 0, with a sum above 0; or
            `num_buffer_sampled` is below 1.

    Example:
        >>> from expstore import RandomSampler
        >>> from expstore.samplers import SamplerEnsemble
        >>> samplers = SamplerEnsemble(RandomSampler(), RandomSampler(), p=[1, 3])
        >>> samplers.p
        tensor([0.2500, 0.7500])
    """

    _word = "samplers"

    def __init__(
        self,
        *samplers: Any,
        p: Sequence[float] | torch.Tensor | Literal["sampleable"] | None = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ) -> None:
        super().__init__(*samplers)
        if sample_from_all and p is not None:
            raise RuntimeError("Cannot pass both `p` argument and `sample_from_all=True`.")
        if num_buffer_sampled is not None and num_buffer_sampled < 1:
            raise ArgumentError(f"num_buffer_sampled must be at least 1, got {num_buffer_sampled}")
        self.sample_from_all = sample_from_all
        self._parts = num_buffer_sampled
        self.p = p

    @property
    def p(self) -> Any:
        """The probabilities of the members as a tensor whose sum is 1; or "sampleable"; or None."""
        return (
            self._chances if self._chances is None or self._by_rows else torch.tensor(self._chances).float()
        )

    @p.setter
    def p(self, value: Any) -> None:
        if isinstance(value, str) and value != "sampleable":
            raise ArgumentError(
                f"The only dynamic SamplerEnsemble probability is 'sampleable', got {value!r}."
            )
        self._by_rows = isinstance(value, str)
        if value is not None and not self._by_rows:
            value = to_array(value).astype(np.float64)
            total = float(value.sum()) if value.shape == (len(self),) and (value >= 0).all() else 0.0
            if not 0 < total < np.inf:
                raise ArgumentError(
                    f"p must be {len(self)} numbers >= 0 with a sum above 0, one per member; got {value}"
                )
            value = value / total
        self._chances: Any = value

    @property
    def num_buffer_sampled(self) -> int:
        """The number of parts in a batch."""
        return len(self) if self._parts is None or self.sample_from_all else self._parts

    @num_buffer_sampled.setter
    def num_buffer_sampled(self, value: int | None) -> None:
        self._parts = value

    def part_size(self, batch_size: int) -> int:
        """Return the number of rows in each part of a batch.

        Raises:
            ArgumentError: The batch size is not a multiple of the number of parts.
        """
        if batch_size % self.num_buffer_sampled:
            raise ArgumentError(
                "The batch size must be divisible by num_buffer_sampled. Got "
                f"batch_size={batch_size} and num_buffer_sampled={self.num_buffer_sampled}."
            )
        return batch_size // self.num_buffer_sampled

    def choose(self, counts: Callable[[], Sequence[int]], generator: np.random.Generator) -> IntArray:
        """Choose the member for each part of a batch. Shape `(num_buffer_sampled,)`, int64.

        Args:
            counts: Returns the number of rows, or of starts of slices, of each member.
            generator: The random generator of this draw.

        Raises:
            NotReadyError: No member has any rows to draw from.
        """
        parts = self.num_buffer_sampled
        if self.sample_from_all:
            return np.arange(parts)
        if self._chances is None:
            return generator.integers(0, len(self), parts)
        weights = self._weights(counts)
        if not weights.any():
            raise NotReadyError(
                "None of the replay-buffer ensemble members can be sampled.", hint="extend() one first"
            )
        # side="right" finds the last of equal sums, so a member of weight 0 is never found.
        ends = np.cumsum(weights)
        found = np.searchsorted(ends, generator.random(parts) * ends[-1], side="right")
        chosen: IntArray = np.minimum(found, np.flatnonzero(weights)[-1])
        return chosen

    def _weights(self, counts: Callable[[], Sequence[int]]) -> Array:
        return np.asarray(counts(), np.float64) if self._by_rows else np.asarray(self._chances)

    def can_choose(self, ready: Sequence[bool]) -> bool:
        """Return whether a batch can be drawn, given which members can draw a part."""
        if self.sample_from_all:
            return all(ready)
        if self._chances is None or self._by_rows:
            return any(ready)
        return any(one and chance > 0 for one, chance in zip(ready, self._chances, strict=True))

    def _select_members(self, numbers: list[int]) -> SamplerEnsemble:
        fixed = self._chances is not None and not self._by_rows
        return SamplerEnsemble(
            *[self._members[number] for number in numbers],
            p=self._chances[numbers] if fixed else self._chances,
            sample_from_all=self.sample_from_all,
            num_buffer_sampled=self._parts,
        )
