"""Which members of an ensemble of buffers a batch is drawn from.

Part of such an ensemble; each member draws its rows by a sampler of its own. It never chooses rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from expstore.core.members import Members
from expstore.core.values import Array, IntArray
from expstore.errors import NotReadyError

__all__ = ["SamplerEnsemble"]


class SamplerEnsemble(Members):
    """Hold the samplers of an ensemble of buffers, and the law by which members are chosen.

    A batch consists of `num_buffer_sampled` parts of one size. Each part is of a member that is drawn for it:
    with the same chance, by `p`, or by how many rows (or slices) each member has to draw from.

    Threads: `p` may be set while others sample. Crashes: what is drawn follows from the members.

    Args:
        samplers: One per member.
        p: Chances of the members, or numbers in proportion to them, at least 0; "sampleable": in proportion
            to the rows, or places where a slice can begin, that each has now; None: the same for all.
        sample_from_all: One part of each member, in their order.
        num_buffer_sampled: How many parts; None: as many as there are members.

    Raises:
        RuntimeError: Both `p` and `sample_from_all` are given.
        ValueError: `p` are no chances, or not as many as members.

    Example:
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
            raise ValueError(f"num_buffer_sampled must be at least 1, got {num_buffer_sampled}")
        self.sample_from_all = sample_from_all
        self._parts = num_buffer_sampled
        self.p = p

    @property
    def p(self) -> Any:
        """The chances of the members, a tensor whose sum is 1; or "sampleable"; or None."""
        return (
            self._chances if self._chances is None or self._by_rows else torch.tensor(self._chances).float()
        )

    @p.setter
    def p(self, value: Any) -> None:
        if isinstance(value, str) and value != "sampleable":
            raise ValueError(f"The only dynamic SamplerEnsemble probability is 'sampleable', got {value!r}.")
        self._by_rows = isinstance(value, str)
        if value is not None and not self._by_rows:
            if isinstance(value, torch.Tensor):
                value = value.detach().cpu().numpy()
            value = np.asarray(value, np.float64)
            total = float(value.sum()) if value.shape == (len(self),) and (value >= 0).all() else 0.0
            if not 0 < total < np.inf:
                raise ValueError(
                    f"p must be {len(self)} numbers from 0 on with a sum above 0, one per member; got {value}"
                )
            value = value / total
        self._chances: Any = value

    @property
    def num_buffer_sampled(self) -> int:
        """How many parts a batch has."""
        return len(self) if self._parts is None or self.sample_from_all else self._parts

    @num_buffer_sampled.setter
    def num_buffer_sampled(self, value: int | None) -> None:
        self._parts = value

    def part_size(self, batch_size: int) -> int:
        """Return how many rows a part of a batch has.

        Raises:
            ValueError: The batch cannot be cut so.
        """
        if batch_size % self.num_buffer_sampled:
            raise ValueError(
                "The batch size must be divisible by num_buffer_sampled. Got "
                f"batch_size={batch_size} and num_buffer_sampled={self.num_buffer_sampled}."
            )
        return batch_size // self.num_buffer_sampled

    def choose(self, counts: Callable[[], Sequence[int]], generator: np.random.Generator) -> IntArray:
        """Choose the member of each part of a batch. Shape `(num_buffer_sampled,)`, int64.

        Args:
            counts: Returns how many rows each member has to draw from.
            generator: The random numbers of this draw.

        Raises:
            NotReadyError: No member has any.
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
        # Of equal sums the last is found: a member of weight 0 never.
        ends = np.cumsum(weights)
        found = np.searchsorted(ends, generator.random(parts) * ends[-1], side="right")
        chosen: IntArray = np.minimum(found, np.flatnonzero(weights)[-1])
        return chosen

    def _weights(self, counts: Callable[[], Sequence[int]]) -> Array:
        return np.asarray(counts(), np.float64) if self._by_rows else np.asarray(self._chances)

    def can_choose(self, ready: Sequence[bool]) -> bool:
        """Return whether a batch can be drawn, given which members could draw a part of it."""
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
