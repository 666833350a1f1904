"""Specs of choices among n, as numbers from 0 to n - 1.

Used by whoever describes discrete actions. What is chosen has no meaning here.
"""

from __future__ import annotations

from typing import Any

import torch

from expstore.specs.base import LeafSpec
from expstore.specs.boxes import CategoricalBox
from expstore.specs.shapes import Move, broadcast, safe

__all__ = ["Categorical", "draw_allowed", "same_mask"]


class Categorical(LeafSpec):
    """Say that each element is a number from 0 to n - 1.

    A mask hides some of them: see `update_mask`. Threads may use one at once while none changes its mask;
    processes and crashes: see TensorSpec.

    Args:
        n: How many there are; -1: not known yet, see `set_provisional_n`.
        shape: Of a value.
        device: Where values lie.
        dtype: What a value is made of.
        mask: Which are allowed.

    Raises:
        RuntimeError: The mask has another shape.

    Example:
        >>> spec = Categorical(3, shape=(2,))
        >>> spec.is_in(torch.tensor([0, 2])), spec.is_in(torch.tensor([0, 3]))
        (True, False)
    """

    def __init__(
        self,
        n: int,
        shape: torch.Size | tuple[int, ...] | list[int] | int | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.long,
        mask: Any = None,
    ) -> None:
        super().__init__(() if shape is None else shape, CategoricalBox(n), device, dtype, "discrete")
        self._provisional_n: int | None = None
        self.update_mask(mask)

    @property
    def n(self) -> int:
        """How many choices there are.

        Raises:
            RuntimeError: It is not known.
        """
        n = self._n
        if n is None:
            raise RuntimeError(
                f"Undefined cardinality for {type(self)}. Please call spec.set_provisional_n(int)."
            )
        return n

    @property
    def _n(self) -> int | None:
        return int(self.space.n) if self.space.n >= 0 else self._provisional_n

    @property
    def mask(self) -> torch.Tensor | None:
        """Which choices are allowed. Shape `(*shape, n)`, bool; None: all of them."""
        return self._mask

    def set_provisional_n(self, n: int) -> None:
        """Say how many choices there are for now, where it was not known. Changes this spec."""
        self._provisional_n = int(n)

    def update_mask(self, mask: Any) -> None:
        """Hide some choices from `rand`, `is_in` and `project`. Changes this spec.

        Args:
            mask: True where a choice is allowed; expands to `(*shape, n)`. bool. None: all are.

        Raises:
            RuntimeError: It does not expand to that.
        """
        if mask is not None:
            size = safe((*self.shape, int(self.space.n)))
            mask = as_mask(mask, size, self.device)
        self._mask: torch.Tensor | None = mask

    def cardinality(self) -> int:
        """Return how many choices there are, hidden ones included."""
        return self.n

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Return all choices, each for all elements. Shape `(n, *shape)`.

        Raises:
            ValueError: `use_mask`, and the elements have different masks.
        """
        found = torch.arange(self.n, dtype=self._counting, device=self.device).to(self.dtype)
        if use_mask and self.mask is not None:
            rows = self.mask.reshape(-1, self.mask.shape[-1])
            if (rows != rows[0]).any():
                raise ValueError(
                    "Categorical: enumerate(use_mask=True) takes one mask for all elements, these differ: "
                    "ask each spec of unbind()"
                )
            found = found[rows[0]]
        return found.reshape(-1, *[1] * self.ndim).expand(-1, *safe(self.shape))

    @property
    def _counting(self) -> torch.dtype:
        return torch.uint8 if self.dtype == torch.bool else self.dtype

    def rand(self, shape: Any = None, *, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw a choice for each element: each one allowed is as likely.

        Args:
            shape: Dims to be put in front.
            generator: What draws; torch's own otherwise.

        Raises:
            RuntimeError: It is not known how many there are, or all of them are hidden.
        """
        if self._n is None:
            raise RuntimeError(
                "Cannot generate random categorical samples for undefined cardinality (n=-1). To sample from "
                "this class, first call Categorical.set_provisional_n(n) before calling rand()."
            )
        size = self._drawn(shape)
        if self.mask is None:
            return torch.randint(
                0, self.n, size, device=self.device, dtype=self._counting, generator=generator
            ).to(self.dtype)
        if self.mask.shape[-1] != self.n:
            raise ValueError(
                "The last dimension of the mask must match the number of action allowed by the Categorical "
                f"spec. Got mask.shape={self.mask.shape} and n={self.n}."
            )
        return draw_allowed(self.mask.expand(*size, self.n), generator).to(self.dtype)

    def within(self, val: torch.Tensor) -> torch.Tensor:
        """Say of each element whether it is a choice that is allowed.

        Returns:
            bool. The shape of `val`.
        """
        fits = val == torch.floor(val) if val.is_floating_point() else torch.ones_like(val, dtype=torch.bool)
        if val.dtype == torch.bool:
            val = val.to(torch.uint8)
        if self.space.n >= 0:
            fits = fits & (val >= 0) & (val < self.space.n)
        if self.mask is None:
            return fits
        mask = self.mask.to(val.device)
        mask = mask.expand(*broadcast(mask.shape[:-1], val.shape), mask.shape[-1])
        chosen = val.masked_fill(~fits, 0).long().unsqueeze(-1)
        return fits & mask.gather(-1, chosen).squeeze(-1)

    def _project(self, val: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        val = val.round() if val.is_floating_point() else val.long()
        val = val.clamp(min=0, max=None if self.space.n < 0 else self.space.n - 1)
        fits = self.within(val)
        if self.mask is not None and not fits.all():
            mask = self.mask.to(val.device).expand(*val.shape, self.mask.shape[-1])
            val = val.masked_scatter(~fits, draw_allowed(mask[~fits], generator).to(val.dtype))
        return val.to(self.dtype)

    def index(self, index: torch.Tensor, tensor_to_index: torch.Tensor) -> torch.Tensor:
        """Return what choices, taken as indices, choose from a tensor's last dim.

        Args:
            index: A value of this spec.
            tensor_to_index: Any tensor with n places in its last dim.
        """
        index = index.long()
        if self.ndim == 0:
            return tensor_to_index.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        lead = tensor_to_index.shape[: -self.ndim]
        return tensor_to_index.gather(-1, index.expand(*lead, *[-1] * self.ndim))

    def _remade(
        self,
        move: Move | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        mask = self.mask
        if mask is not None:
            mask = move.rows(mask, self.shape) if move else mask.clone()
        made = Categorical(
            self.space.n,
            move.shape(self.shape) if move else self.shape,
            device or self.device,
            dtype or self.dtype,
            mask,
        )
        made._provisional_n = self._provisional_n
        return made

    def to_one_hot(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return choices as rows of n bools, True where the choice is.

        Args:
            val: A value of this spec.
            safe: Raise an AssertionError if it is none.

        Returns:
            bool. Shape `(*val.shape, n)`.
        """
        if safe:
            self.assert_is_in(val)
        return torch.nn.functional.one_hot(val.long(), self.n).bool()

    def to_categorical(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return what is given, a number already; with `safe`, an AssertionError if it is not in the spec."""
        if safe:
            self.assert_is_in(val)
        return val

    def to_categorical_spec(self) -> Categorical:
        """Return itself."""
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Categorical):
            return NotImplemented
        return (
            type(self) is type(other)
            and self.shape == other.shape
            and self.space == other.space
            and self.dtype == other.dtype
            and self.device == other.device
            and same_mask(self.mask, other.mask)
        )


def as_mask(given: Any, size: torch.Size, device: torch.device) -> torch.Tensor:
    """Return a mask of a size; a RuntimeError if it does not expand to that."""
    mask: torch.Tensor = torch.as_tensor(given, device=device).bool()
    if mask.numel() == size[-1] and mask.shape != size:
        mask = mask.reshape(size[-1])
    try:
        return mask.expand(size).clone()
    except RuntimeError as exc:
        raise RuntimeError(
            f"Cannot expand mask to the desired shape: it has {tuple(mask.shape)}, {tuple(size)} is needed."
        ) from exc


def same_mask(mine: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Say whether two masks hide the same."""
    if mine is None or other is None:
        return mine is other
    return torch.equal(mine, other)


def draw_allowed(mask: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Draw one of the places of the last dim where a mask is True. Shape without it, int64.

    Raises:
        RuntimeError: There is none.
    """
    if not mask.any(-1).all():
        raise RuntimeError(f"all {mask.shape[-1]} choices are hidden by the mask: there is none to be drawn")
    flat: torch.Tensor = mask.reshape(-1, mask.shape[-1]).float()
    if not flat.numel():
        return torch.zeros(mask.shape[:-1], dtype=torch.int64, device=mask.device)
    return torch.multinomial(flat, 1, generator=generator).reshape(mask.shape[:-1])
