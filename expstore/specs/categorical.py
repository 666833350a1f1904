"""Specs of choices among n: as numbers from 0 to n - 1, or as one-hot rows.

Use them for discrete actions. The specs do not know what a choice means.
"""

from __future__ import annotations

from typing import Any

import torch

from expstore.specs.base import LeafSpec
from expstore.specs.boxes import CategoricalBox
from expstore.specs.integers import as_count, saturate
from expstore.specs.masks import as_mask, draw_allowed, list_allowed, same_mask
from expstore.specs.shapes import Move, as_size, broadcast, safe


class Categorical(LeafSpec):
    """Spec whose elements are integers from 0 to n - 1.

    A mask hides some choices, see `update_mask`. Threads can share a spec while no thread changes its mask.
    For processes and crashes see TensorSpec.

    Args:
        n: Number of choices; -1 if it is not known yet, see `set_provisional_n`.
        shape: Shape of a value.
        device: Device of the values.
        dtype: Dtype of the values.
        mask: Which choices are allowed.

    Raises:
        ValueError: n is not an integer, or is less than 1 and not -1.
        RuntimeError: The mask has another shape.

    Example:
        >>> from expstore import Categorical
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
        space = CategoricalBox(as_count(n, "Categorical: n", unknown=True))
        super().__init__(() if shape is None else shape, space, device, dtype, "discrete")
        self._provisional_n: int | None = None
        self.update_mask(mask)

    @property
    def n(self) -> int:
        """Number of choices.

        Raises:
            RuntimeError: It is unknown.
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
        """Which choices are allowed. Shape `(*shape, n)`, bool; None allows all."""
        return self._mask

    def set_provisional_n(self, n: int) -> None:
        """Set a provisional number of choices if it is unknown. Changes this spec."""
        self._provisional_n = as_count(n, "set_provisional_n: n")

    def update_mask(self, mask: Any) -> None:
        """Hide some choices from `rand`, `is_in` and `project`. Changes this spec.

        Args:
            mask: True where a choice is allowed; expands to `(*shape, n)`. bool. None allows all.

        Raises:
            RuntimeError: The mask does not expand to that shape.
        """
        if mask is not None:
            size = safe((*self.shape, int(self.space.n)))
            mask = as_mask(mask, size, self.device)
        self._mask: torch.Tensor | None = mask

    def cardinality(self) -> int:
        """Return the number of choices, including hidden ones."""
        return self.n

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Return all choices, each for all elements. Shape `(n, *shape)`.

        Raises:
            ValueError: `use_mask` is set, and the elements have different masks.
        """
        found = torch.arange(self.n, device=self.device).to(self.dtype)
        if use_mask and self.mask is not None:
            found = found[list_allowed(self.mask)]
        return found.reshape(-1, *[1] * self.ndim).expand(-1, *safe(self.shape))

    def rand(self, shape: Any = None, *, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw a choice for each element; all allowed choices are equally likely.

        Args:
            shape: Dims to put in front of the spec's shape.
            generator: Random generator; torch's default generator if None.

        Raises:
            RuntimeError: The number of choices is unknown, or all choices are hidden.
        """
        if self._n is None:
            raise RuntimeError(
                "Cannot generate random categorical samples for undefined cardinality (n=-1). To sample from "
                "this class, first call Categorical.set_provisional_n(n) before calling rand()."
            )
        size = self._draw_shape(shape)
        if self.mask is None:
            return torch.randint(self.n, size, device=self.device, generator=generator).to(self.dtype)
        if self.mask.shape[-1] != self.n:
            raise ValueError(
                "The last dimension of the mask must match the number of action allowed by the Categorical "
                f"spec. Got mask.shape={self.mask.shape} and n={self.n}."
            )
        return draw_allowed(self.mask.expand(*size, self.n), generator).to(self.dtype)

    def within(self, val: torch.Tensor) -> torch.Tensor:
        """Return for each element whether it is an allowed choice.

        Returns:
            A bool tensor with the shape of `val`.
        """
        fits = val == torch.floor(val) if val.is_floating_point() else torch.ones_like(val, dtype=torch.bool)
        if not val.is_floating_point():
            val = val.long()
        if self.space.n >= 0:
            fits = fits & (val >= 0) & (val < self.space.n)
        if self.mask is None:
            return fits
        mask = self.mask.to(val.device)
        mask = mask.expand(*broadcast(mask.shape[:-1], val.shape), mask.shape[-1])
        chosen = val.masked_fill(~fits, 0).long().unsqueeze(-1)
        return fits & mask.gather(-1, chosen).squeeze(-1)

    def _project(self, val: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        val = saturate(val.double().round() if val.is_floating_point() else val, torch.int64, val.device)
        val = val.clamp(min=0, max=None if self.space.n < 0 else self.space.n - 1)
        fits = self.within(val)
        if self.mask is not None and not fits.all():
            mask = self.mask.to(val.device).expand(*val.shape, self.mask.shape[-1])
            val = val.masked_scatter(~fits, draw_allowed(mask[~fits], generator).to(val.dtype))
        return val.to(self.dtype)

    def index(self, index: torch.Tensor, tensor_to_index: torch.Tensor) -> torch.Tensor:
        """Index the last dim of a tensor with choices.

        Args:
            index: A value of this spec. Shape `(*batch, *shape)`, int64.
            tensor_to_index: Any tensor whose last dim has size n.

        Returns:
            The chosen elements. The shape of `index`, the dtype of `tensor_to_index`.
        """
        index = index.long()
        if self.ndim == 0:
            return tensor_to_index.gather(-1, index.unsqueeze(-1)).squeeze(-1)
        lead = tensor_to_index.shape[: -self.ndim]
        return tensor_to_index.gather(-1, index.expand(*lead, *[-1] * self.ndim))

    def _remake(
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
        """Return choices as rows of n bools that are True at the chosen position.

        Args:
            val: A value of this spec.
            safe: Raise an AssertionError if `val` is not in the spec.

        Returns:
            A bool tensor. Shape `(*val.shape, n)`.
        """
        if safe:
            self.assert_is_in(val)
        return torch.nn.functional.one_hot(val.long(), self.n).bool()

    def to_categorical(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return `val` unchanged, because it is a number already; with `safe`, check it first.

        Raises:
            AssertionError: With `safe`: the value is not in the spec.
        """
        if safe:
            self.assert_is_in(val)
        return val

    def to_one_hot_spec(self) -> OneHot:
        """Return the spec of the same choices as one-hot rows."""
        return OneHot(self.n, (*self.shape, self.n), self.device, mask=self.mask)

    def to_categorical_spec(self) -> Categorical:
        """Return the spec itself."""
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Categorical):
            return NotImplemented
        return (
            type(self) is type(other)
            and self._lies_like(other)
            and self.space == other.space
            and same_mask(self.mask, other.mask)
        )


class OneHot(LeafSpec):
    """Spec of one-hot rows: n elements, one of which is 1 and the others 0.

    The last dim is the row; it cannot be indexed or moved. For threads, processes and crashes see
    Categorical.

    Args:
        n: Number of choices.
        shape: Shape of a value; the last dim is n.
        device: Device of the values.
        dtype: Dtype of the values.
        use_register: Not supported. TorchRL numbers values in a register that all specs of a program share,
            and cannot map the numbers back. Number your values yourself, and encode the numbers.
        mask: Which choices are allowed.

    Raises:
        ValueError: The last dim differs from n, or n is not an integer of at least 1.
        RuntimeError: The mask has another shape.

    Example:
        >>> from expstore import OneHot
        >>> spec = OneHot(3)
        >>> spec.encode(1)
        tensor([False,  True, False])
        >>> spec.is_in(torch.tensor([True, True, False]))
        False
    """

    _whole = 1
    _last_stays = True

    def __init__(
        self,
        n: int,
        shape: torch.Size | tuple[int, ...] | list[int] | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.bool,
        use_register: bool = False,
        mask: Any = None,
    ) -> None:
        refuse_register(use_register)
        space = CategoricalBox(as_count(n, "OneHot: n"))
        size = as_size((space.n,) if shape is None else shape)
        if not size or size[-1] != space.n:
            raise ValueError(
                f"The last value of the shape must match n for transform of type {type(self)}. "
                f"Got n={space.n} and shape={size}."
            )
        super().__init__(size, space, device, dtype, "discrete")
        self.update_mask(mask)

    @property
    def n(self) -> int:
        """Number of choices."""
        return int(self.space.n)

    @property
    def mask(self) -> torch.Tensor | None:
        """Which choices are allowed. The spec's shape, bool; None allows all."""
        return self._mask

    def update_mask(self, mask: Any) -> None:
        """Hide some choices from `rand`, `is_in` and `project`. Changes this spec.

        Args:
            mask: True where a choice is allowed; expands to the spec's shape. bool. None allows all.

        Raises:
            RuntimeError: The mask does not expand to that shape.
        """
        self._mask = None if mask is None else as_mask(mask, safe(self.shape), self.device)

    def cardinality(self) -> int:
        """Return the number of choices, including hidden ones."""
        return self.n

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Return all choices, each for all rows. Shape `(n, *shape)`.

        Raises:
            ValueError: `use_mask` is set, and the rows have different masks.
        """
        found = torch.eye(self.n, dtype=torch.bool, device=self.device).to(self.dtype)
        if use_mask and self.mask is not None:
            found = found[list_allowed(self.mask)]
        return found.reshape(-1, *[1] * (self.ndim - 1), self.n).expand(-1, *safe(self.shape))

    def rand(self, shape: Any = None, *, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw a choice for each row; all allowed choices are equally likely.

        Args:
            shape: Dims to put in front of the spec's shape.
            generator: Random generator; torch's default generator if None.

        Raises:
            RuntimeError: All choices are hidden.
        """
        size = self._draw_shape(shape)
        if self.mask is None:
            drawn = torch.randint(self.n, size[:-1], device=self.device, generator=generator)
        else:
            drawn = draw_allowed(self.mask.expand(size), generator)
        return self._row(drawn)

    def _row(self, choices: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(choices, self.n).to(self.dtype)

    def within(self, val: torch.Tensor) -> torch.Tensor:
        """Return for each row whether it is an allowed choice.

        Returns:
            A bool tensor with the shape of `val` without the last dim.
        """
        ones = val == 1
        fits = (ones.sum(-1) == 1) & (ones | (val == 0)).all(-1)
        return fits if self.mask is None else fits & (ones & self.mask.to(val.device)).any(-1)

    def _project(self, val: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Replace invalid rows by a choice drawn in proportion to the row's values."""
        fits = self.within(val)
        weights = val.nan_to_num(0).double().clamp(min=0)
        allowed = torch.ones_like(val, dtype=torch.bool)
        if self.mask is not None:
            allowed = allowed & self.mask.to(val.device)
        weights = weights * allowed
        weights = torch.where(weights.sum(-1, keepdim=True) > 0, weights, allowed.double())[~fits]
        chosen = (val == 1).long().argmax(-1)
        if len(weights):
            chosen[~fits] = torch.multinomial(weights, 1, generator=generator).squeeze(-1)
        return self._row(chosen)

    def encode(self, val: Any, *, ignore_device: bool = False) -> torch.Tensor:
        """Return integers from 0 to n - 1 as one-hot rows.

        Args:
            val: The numbers. Any shape.
            ignore_device: Leave a tensor on its device.

        Returns:
            A tensor of the spec's dtype. Shape `(*val.shape, n)`.

        Raises:
            AssertionError: A number is outside of 0 to n - 1.
        """
        numbers = torch.as_tensor(val, device=None if ignore_device else self.device)
        if ((numbers < 0) | (numbers >= self.n)).any():
            raise AssertionError(
                f"Value must be less than action space. Got {val}, expected 0 to {self.n - 1}."
            )
        return self._row(numbers.long())

    def to_numpy(self, val: torch.Tensor, safe: bool | None = None) -> Any:
        """Return the choices of one-hot rows.

        Args:
            val: One-hot rows. Shape `(*batch, n)`.
            safe: Raise an AssertionError if a row is not in the spec.

        Returns:
            The number of the choice of each row. Shape `(*batch)`, int64.

        Raises:
            AssertionError: With `safe`: a row is not in the spec.
        """
        return self.to_categorical(val, safe).cpu().numpy()

    def index(self, index: torch.Tensor, tensor_to_index: torch.Tensor) -> torch.Tensor:
        """Index the last dim of a tensor with rows; the dim is kept, with size 1.

        Args:
            index: One-hot rows. Shape `(*batch, n)`.
            tensor_to_index: A tensor whose last dim has size n.

        Returns:
            The chosen elements. Shape `(*batch, 1)`, the dtype of `tensor_to_index`.

        Raises:
            ValueError: `index` is not a tensor.
        """
        if not isinstance(index, torch.Tensor):
            raise ValueError(
                f"Only tensors are allowed for indexing using {type(self).__name__}.index(...): got {index!r}"
            )
        chosen = index.long().argmax(-1, keepdim=True)
        lead = broadcast(chosen.shape[:-1], tensor_to_index.shape[:-1])
        return tensor_to_index.expand(*lead, -1).gather(-1, chosen.expand(*lead, 1))

    def _remake(
        self,
        move: Move | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        mask = self.mask
        return OneHot(
            self.n,
            move.shape(self.shape) if move else self.shape,
            device or self.device,
            dtype or self.dtype,
            mask=move.values(mask) if move and mask is not None else mask,
        )

    def to_categorical(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return rows as integers; with `safe`, raise AssertionError if one is not in the spec.

        Returns:
            An int64 tensor with the shape of `val` without the last dim.
        """
        if safe:
            self.assert_is_in(val)
        return val.long().argmax(-1)

    def to_categorical_spec(self) -> Categorical:
        """Return the spec of the same choices as integers."""
        return Categorical(self.n, self.shape[:-1], self.device, mask=self.mask)

    def to_one_hot(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return `val` unchanged, because it is a one-hot row already; with `safe`, check it first.

        Raises:
            AssertionError: With `safe`: the value is not in the spec.
        """
        if safe:
            self.assert_is_in(val)
        return val

    def to_one_hot_spec(self) -> Any:
        """Return the spec itself."""
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OneHot):
            return NotImplemented
        return (
            type(self) is type(other)
            and self._lies_like(other)
            and self.space == other.space
            and same_mask(self.mask, other.mask)
        )


def refuse_register(use_register: bool) -> None:
    """Raise ValueError if `use_register` is set."""
    if use_register:
        raise ValueError(
            "use_register=True is not supported: TorchRL's register is shared by all specs of a program, and "
            "cannot map numbers back to values. Number your values yourself, and encode the numbers"
        )
