"""Specs of choices among n: as numbers from 0 to n - 1, or as one-hot rows; of one choice, or of several.

Use them for discrete actions and for flags. The specs do not know what a choice means.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from expstore.specs.base import LeafSpec, are_same, create, keep, per_element, per_row
from expstore.specs.boxes import Box, BoxList, CategoricalBox
from expstore.specs.integers import as_count, saturate
from expstore.specs.shapes import Move, as_size, broadcast, safe, split_last


class ChoiceSpec(LeafSpec):
    """Base class of specs of choices, as numbers or as one-hot rows; a mask hides some choices.

    For threads, processes and crashes see Categorical.

    Example:
        >>> from expstore import Categorical, OneHot
        >>> OneHot(3).to_categorical_spec() == Categorical(3)
        True
    """

    _mask: torch.Tensor | None = None

    @property
    def mask(self) -> torch.Tensor | None:
        """Which choices are allowed; None allows all. Shape `(*shape, n)` for numbers, the spec's for rows.

        For several choices it has the masks of a row's elements, concatenated along the last dim.
        """
        return self._mask

    def update_mask(self, mask: Any) -> None:
        """Hide some choices from `rand`, `is_in` and `project`. Changes this spec.

        Args:
            mask: True where a choice is allowed; expands to the shape of `mask`. bool. None allows all.

        Raises:
            RuntimeError: The mask does not expand to that shape.
            ValueError: Rows have different numbers of choices.
        """
        self._mask = None if mask is None else as_mask(mask, safe(self._mask_shape), self.device)

    @property
    @abstractmethod
    def _mask_shape(self) -> tuple[int, ...]:
        """The shape of a mask."""

    def _check_length(self, shape: torch.Size, name: str, n: int) -> None:
        """Raise ValueError if the last dim of a shape is not n; `name` says what n is."""
        if not shape or shape[-1] != n:
            raise ValueError(
                f"The last value of the shape must match {name} for transform of type {type(self)}. "
                f"Got {name}={n} and shape={shape}."
            )

    def to_one_hot(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return choices as one-hot rows: bools that are True at the chosen position.

        Several choices become the one-hot rows of a row's elements, concatenated. One-hot rows are returned
        unchanged.

        Args:
            val: A value of this spec.
            safe: Raise an AssertionError if `val` is not in the spec.

        Returns:
            A bool tensor. Shape `(*val.shape, n)`; of several choices `(*val.shape[:-1], nvec.sum())`, or a
            nested tensor if the rows differ.

        Raises:
            ValueError: The rows differ, and the spec or the value does not have two dims.
        """
        if safe:
            self.assert_is_in(val)
        return self._to_rows(val)

    def _to_rows(self, val: torch.Tensor) -> torch.Tensor:
        """Return a value of this spec as one-hot rows."""
        return val

    @abstractmethod
    def to_one_hot_spec(self) -> Any:
        """Return the spec of the same choices as one-hot rows; a stack of specs if the rows differ."""

    def to_categorical(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return choices as numbers, which are returned unchanged.

        Args:
            val: A value of this spec.
            safe: Raise an AssertionError if `val` is not in the spec.

        Returns:
            Of one-hot rows an int64 tensor with the shape of `val` without the last dim; the last dim of
            several rows has one element per row.
        """
        if safe:
            self.assert_is_in(val)
        return self._to_numbers(val)

    def _to_numbers(self, val: torch.Tensor) -> torch.Tensor:
        """Return a value of this spec as numbers."""
        return val

    @abstractmethod
    def to_categorical_spec(self) -> Any:
        """Return the spec of the same choices as numbers."""


class Categorical(ChoiceSpec):
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

    _arguments: ClassVar = {"n": keep, "mask": per_row}

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
    def _mask_shape(self) -> tuple[int, ...]:
        return (*self.shape, int(self.space.n))

    def set_provisional_n(self, n: int) -> None:
        """Set a provisional number of choices if it is unknown. Changes this spec."""
        self._provisional_n = as_count(n, "set_provisional_n: n")

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
        if self.mask is not None and self.mask.shape[-1] != self.n:
            raise ValueError(
                "The last dimension of the mask must match the number of action allowed by the Categorical "
                f"spec. Got mask.shape={self.mask.shape} and n={self.n}."
            )
        return draw_choices(self.n, size, self.mask, self.device, generator).to(self.dtype)

    def _count_choices(self, device: torch.device) -> torch.Tensor | None:
        """Return the number of choices of each element, or of all, on a device; None if it is unknown."""
        return torch.tensor(self.space.n, device=device) if self.space.n >= 0 else None

    def _list_choices(self) -> torch.Tensor | None:
        """Return the mask of each element. Shape `(*shape, largest number of choices)`."""
        return self.mask

    def within(self, val: torch.Tensor) -> torch.Tensor:
        """Return for each element whether it is an allowed choice.

        Returns:
            A bool tensor with the shape of `val`.
        """
        fits = val == torch.floor(val) if val.is_floating_point() else torch.ones_like(val, dtype=torch.bool)
        whole = val if val.is_floating_point() else val.long()
        counts, allowed = self._count_choices(val.device), self._list_choices()
        if counts is not None:
            fits = fits & (whole >= 0) & (whole < counts)
        if allowed is not None:
            shape = broadcast(allowed.shape[:-1], fits.shape)
            chosen = whole.expand(fits.shape).masked_fill(~fits, 0).long().expand(shape).unsqueeze(-1)
            allowed = allowed.to(val.device).expand(*shape, allowed.shape[-1])
            fits = fits & allowed.gather(-1, chosen).squeeze(-1)
        return fits if val.ndim or fits.numel() != 1 else fits.reshape(())

    def _project(self, val: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        shape = val.shape
        val = saturate(val.double().round() if val.is_floating_point() else val, torch.int64, val.device)
        val = val.clamp(min=0)
        counts, allowed = self._count_choices(val.device), self._list_choices()
        if counts is not None:
            val = torch.minimum(val, counts - 1)
        fits = self.within(val)
        if allowed is not None and not fits.all():
            allowed = allowed.to(val.device).expand(*val.shape, allowed.shape[-1])
            val = val.masked_scatter(~fits, draw_allowed(allowed[~fits], generator))
        return val.to(self.dtype).reshape(shape)

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

    def _rebuild(self, arguments: dict[str, Any]) -> Any:
        made = super()._rebuild(arguments)
        made._provisional_n = self._provisional_n
        return made

    def _to_rows(self, val: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(val.long(), self.n).bool()

    def to_one_hot_spec(self) -> OneHot:
        """Return the spec of the same choices as one-hot rows."""
        return OneHot(self.n, (*self.shape, self.n), self.device, mask=self.mask)

    def to_categorical_spec(self) -> Any:
        """Return the spec itself."""
        return self


class OneHot(ChoiceSpec):
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

    _arguments: ClassVar = {"n": keep, "mask": per_element}
    _fixed = frozenset({"squeeze", "unsqueeze", "reshape", "_select", "_index_select", "__getitem__"})

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
        self._check_length(size, "n", space.n)
        super().__init__(size, space, device, dtype, "discrete")
        self.update_mask(mask)

    @property
    def n(self) -> int:
        """Number of choices."""
        return int(self.space.n)

    @property
    def _mask_shape(self) -> tuple[int, ...]:
        return self.shape

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
        size = self._draw_shape(shape)[:-1]
        return self._row(draw_choices(self.n, size, self.mask, self.device, generator))

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

    def _to_numpy(self, val: torch.Tensor) -> Any:
        """Return the number of the choice of each row. int64, without the last dim."""
        return self._to_numbers(val).cpu().numpy()

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
        _check_tensor(self, index)
        chosen = index.long().argmax(-1, keepdim=True)
        lead = broadcast(chosen.shape[:-1], tensor_to_index.shape[:-1])
        return tensor_to_index.expand(*lead, -1).gather(-1, chosen.expand(*lead, 1))

    def _to_numbers(self, val: torch.Tensor) -> torch.Tensor:
        return val.long().argmax(-1)

    def to_categorical_spec(self) -> Any:
        """Return the spec of the same choices as integers."""
        return Categorical(self.n, self.shape[:-1], self.device, mask=self.mask)

    def to_one_hot_spec(self) -> Any:
        """Return the spec itself."""
        return self


class Binary(Categorical):
    """Spec whose elements are zero or one.

    The last dim cannot be indexed. A Binary equals a Categorical with n=2. For threads, processes and
    crashes see Categorical.

    Args:
        n: Size of the last dim (not the number of choices).
        shape: Shape of a value; `(n,)` by default.
        device: Device of the values.
        dtype: Dtype of the values.

    Raises:
        TypeError: Both n and shape are missing.
        ValueError: The last dim differs from n, or n is negative.

    Example:
        >>> from expstore import Binary
        >>> spec = Binary(3)
        >>> spec.is_in(torch.tensor([0, 1, 1], dtype=torch.int8))
        True
    """

    _arguments: ClassVar = {"mask": per_row}
    _fixed = frozenset({"_select", "_index_select", "__getitem__"})

    def __init__(
        self,
        n: int | None = None,
        shape: torch.Size | tuple[int, ...] | list[int] | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.int8,
    ) -> None:
        if shape is None:
            if n is None:
                raise TypeError("Must provide either n or shape.")
            if n < 0:
                raise ValueError(f"Binary: n is the size of the last dim and must be 0 or more; got {n!r}")
            shape = (n,)
        size = as_size(shape)
        if not size and n:
            raise ValueError(f"'n' must be zero for spec {type(self)} when using an empty shape. Got n={n}.")
        if size and n is not None and size[-1] != n:
            raise ValueError(
                f"The last value of the shape must match 'n' for spec {type(self)}. Got n={n} and "
                f"shape={size}."
            )
        super().__init__(2, size, device, dtype)

    def __getitem__(self, idx: Any) -> Any:
        if not self.ndim:
            raise ValueError("Cannot index a Binary spec with an empty shape")
        return super().__getitem__(idx)

    def __eq__(self, other: object) -> bool:
        if type(other) is not Categorical:
            return super().__eq__(other)
        return self.space == other.space and self._lies_like(other) and are_same(self.mask, other.mask)


#: Why a mask is refused.
_ONE_MASK = "Only homogeneous MultiDiscrete specs can be masked"


def _read_row(nvec: torch.Tensor) -> list[int] | None:
    """Return the numbers of options of a row; None if the rows differ, or if there are no rows."""
    rows = nvec.flatten(0, -2) if nvec.ndim > 1 else nvec[None]
    return rows[0].tolist() if len(rows) and (rows == rows[:1]).all() else None


def _require_row(nvec: torch.Tensor, reason: str) -> list[int]:
    """Return the numbers of options of a row; raise ValueError if the rows differ."""
    row = _read_row(nvec)
    if row is None:
        raise ValueError(f"{reason}, got nvec={nvec}.")
    return row


def _per_option(move: Move, mask: torch.Tensor, spec: MultiCategorical) -> torch.Tensor | None:
    """Return the mask of a MultiCategorical after a change of its shape."""
    nvec, allowed = move.values(spec.nvec), spec._list_choices()
    if not nvec.numel() or allowed is None:
        return None  # without options there is nothing to hide
    allowed = move.rows(allowed, spec.shape)
    if not nvec.ndim:
        return allowed[: int(nvec)]
    row = _require_row(nvec, _ONE_MASK)
    return torch.cat([allowed[..., place, :n] for place, n in enumerate(row)], -1)


class MultiCategorical(Categorical):
    """Spec whose elements are choices, each among its own number of options.

    A mask hides some options, if their numbers differ along the last dim only: see `update_mask`. For
    threads, processes and crashes see Categorical.

    Args:
        nvec: Number of options of each element: along the last dim, or with the shape of a value.
        shape: Shape of a value; by default that of `nvec`.
        device: Device of the values.
        dtype: Dtype of the values.
        mask: Which options are allowed.
        remove_singleton: Whether `rand` leaves out the dim of a spec of shape `(1,)`.

    Raises:
        ValueError: The last dims of shape and `nvec` differ, a mask is given although the numbers differ
            along other dims, or a number is not an integer of at least 1.
        RuntimeError: `nvec` or the mask have another shape.

    Example:
        >>> from expstore import MultiCategorical
        >>> spec = MultiCategorical((3, 2))
        >>> spec.is_in(torch.tensor([2, 1])), spec.is_in(torch.tensor([1, 2]))
        (True, False)
    """

    _arguments: ClassVar = {"nvec": per_element, "mask": _per_option, "remove_singleton": keep}
    _fixed = frozenset({"squeeze", "unsqueeze", "_select"})

    def __init__(
        self,
        nvec: Sequence[int] | torch.Tensor | int,
        shape: torch.Size | tuple[int, ...] | list[int] | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = torch.int64,
        mask: torch.Tensor | None = None,
        remove_singleton: bool = True,
    ) -> None:
        counts = _with_a_dim(_as_counts(nvec))
        size = as_size(counts.shape if shape is None else shape)
        self._check_length(size, "nvec.shape[-1]", counts.shape[-1])
        LeafSpec.__init__(self, size, None, device, dtype, "discrete")
        self._nvec = counts.to(self.device).expand(safe(size)).clone()
        self.remove_singleton = remove_singleton
        self.update_mask(mask)

    @property
    def nvec(self) -> torch.Tensor:
        """Number of options of each element. The spec's shape."""
        return self._nvec

    @property
    def n(self) -> int:
        """Raise AttributeError: each element has its own number of options, see `nvec`."""
        raise AttributeError(f"{type(self).__name__} has one number per element: see nvec")

    @property
    def space(self) -> Box:
        """The options of each element: nested lists, the last dim outermost."""
        return BoxList.from_nvec(self.nvec)

    @property
    def _counts(self) -> list[int] | None:
        """Number of options of each element of a row; None if the rows differ, or if there are no rows."""
        return _read_row(self.nvec)

    @property
    def _mask_shape(self) -> tuple[int, ...]:
        return (*self.shape[:-1], sum(_require_row(self.nvec, _ONE_MASK)))

    def set_provisional_n(self, n: int) -> None:
        """Raise ValueError: the numbers of options are known."""
        raise ValueError(f"{type(self).__name__} knows how many choices there are: nvec={self.nvec}")

    def cardinality(self) -> int:
        """Return the number of possible rows, including hidden ones; of all elements if the rows differ."""
        return math.prod(self._counts or self.nvec.flatten().tolist())

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Return all rows. Shape `(cardinality, *shape)`.

        Raises:
            ValueError: Rows have different numbers of options, or, with `use_mask`, different masks.
        """
        row = _require_row(self.nvec, "Cannot call enumerate on heterogeneous nvecs")
        parts = [torch.arange(n, device=self.device) for n in row]
        if use_mask and self.mask is not None:
            masks = split_last(list_allowed(self.mask), row)
            parts = [part[mask] for part, mask in zip(parts, masks, strict=True)]
        found = torch.cartesian_prod(*parts).reshape(-1, *[1] * (self.ndim - 1), len(row))
        return found.to(self.dtype).expand(-1, *safe(self.shape))

    def rand(self, shape: Any = None, *, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw a choice for each element; all allowed choices are equally likely.

        Args:
            shape: Dims to put in front of the spec's shape. With `remove_singleton` a spec of shape `(1,)`
                without a mask returns this shape only.
            generator: Random generator; torch's default generator if None.

        Raises:
            RuntimeError: All options of an element are hidden.
        """
        size = self._draw_shape(shape)
        row = self._counts
        if row is None:
            share = torch.rand(size, dtype=torch.float64, device=self.device, generator=generator)
            return torch.minimum((share * self.nvec).long(), self.nvec - 1).to(self.dtype)
        masks = [None] * len(row) if self.mask is None else split_last(self.mask, row)
        drawn = [
            draw_choices(n, size[:-1], mask, self.device, generator)
            for n, mask in zip(row, masks, strict=True)
        ]
        made = torch.stack(drawn, -1).to(self.dtype)
        bare = self.remove_singleton and self.shape == (1,) and self.mask is None
        return made.squeeze(-1) if bare else made

    def _takes(self, shape: torch.Size) -> bool:
        """Return whether a shape fits; a spec of shape `(1,)` also accepts values without that dim."""
        return super()._takes(shape or torch.Size([1]))

    def _count_choices(self, device: torch.device) -> torch.Tensor | None:
        return self.nvec.to(device)

    def _list_choices(self) -> torch.Tensor | None:
        if self.mask is None:
            return None
        row = _require_row(self.nvec, _ONE_MASK)
        made = self.mask.new_zeros(*safe(self.shape), max(row))
        for place, mask in enumerate(split_last(self.mask, row)):
            made[..., place, : row[place]] = mask
        return made

    def _rebuild(self, arguments: dict[str, Any]) -> Any:
        if arguments["shape"]:
            return create(MultiCategorical, arguments)
        settings = {name: arguments[name] for name in ("device", "dtype", "mask")}
        return Categorical(int(arguments["nvec"]), **settings)

    def _to_rows(self, val: torch.Tensor) -> torch.Tensor:
        val, row = _with_a_dim(val).long(), self._counts
        if row is None:
            if self.ndim != 2 or val.ndim != 2:
                raise ValueError(
                    "to_one_hot: rows of different lengths need a spec and a value of two dims; "
                    f"got {self.shape} and {val.shape}. Call it on each spec of unbind()"
                )
            pairs = zip(self.unbind(0), val.unbind(0), strict=True)
            rows = [spec.to_one_hot(part) for spec, part in pairs]
            return torch.nested.nested_tensor(rows, layout=torch.jagged)
        parts = zip(val.unbind(-1), row, strict=True)
        return torch.cat([torch.nn.functional.one_hot(part, n).bool() for part, n in parts], -1)

    def to_one_hot_spec(self) -> Any:
        """Return the spec of the same choices as one-hot rows; a stack of specs if the rows differ."""
        row = self._counts
        if row is None:
            return torch.stack([spec.to_one_hot_spec() for spec in self.unbind(0)])
        return MultiOneHot(row, (*self.shape[:-1], sum(row)), self.device, mask=self.mask)


class MultiOneHot(OneHot):
    """Spec whose rows are several one-hot rows, concatenated.

    The last dim cannot be indexed or moved. For threads, processes and crashes see Categorical.

    Args:
        nvec: Lengths of the one-hot rows.
        shape: Shape of a value; the last dim is the sum of `nvec`.
        device: Device of the values.
        dtype: Dtype of the values.
        use_register: Not supported, as for OneHot.
        mask: Which choices are allowed.

    Raises:
        ValueError: The last dim differs from the sum, or a length is not an integer of at least 1.
        RuntimeError: The mask has another shape.

    Example:
        >>> from expstore import MultiOneHot
        >>> spec = MultiOneHot((3, 2))
        >>> spec.is_in(torch.tensor([False, False, True, True, False]))
        True
        >>> spec.is_in(torch.tensor([False, False, True, False, False]))
        False
    """

    _arguments: ClassVar = {"nvec": keep, "mask": per_element}

    def __init__(
        self,
        nvec: Sequence[int] | torch.Tensor,
        shape: torch.Size | tuple[int, ...] | list[int] | None = None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype = torch.bool,
        use_register: bool = False,
        mask: torch.Tensor | None = None,
    ) -> None:
        refuse_register(use_register)
        self._nvec = tuple(as_count(n, "MultiOneHot: nvec") for n in nvec)
        size = as_size((sum(self._nvec),) if shape is None else shape)
        self._check_length(size, "sum(nvec)", sum(self._nvec))
        space = BoxList([CategoricalBox(n) for n in self._nvec])
        LeafSpec.__init__(self, size, space, device, dtype, "discrete")
        self.update_mask(mask)

    @property
    def nvec(self) -> tuple[int, ...]:
        """Lengths of the one-hot rows."""
        return self._nvec

    @property
    def n(self) -> int:
        """Raise AttributeError: each row has its own length, see `nvec`."""
        raise AttributeError(f"{type(self).__name__} has one number per row: see nvec")

    def cardinality(self) -> int:
        """Return the number of values, including hidden ones."""
        return math.prod(self.nvec)

    def _parts(self) -> list[OneHot]:
        """Return the spec of each row."""
        masks = [None] * len(self.nvec) if self.mask is None else split_last(self.mask, self.nvec)
        return [
            OneHot(n, (*self.shape[:-1], n), self.device, self.dtype, mask=mask)
            for n, mask in zip(self.nvec, masks, strict=True)
        ]

    def _pair(self, val: torch.Tensor) -> Iterator[tuple[OneHot, torch.Tensor]]:
        """Yield the spec of each row with the row's part of a value."""
        return zip(self._parts(), split_last(val, self.nvec), strict=True)

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Return all values. Shape `(cardinality, *shape)`.

        Raises:
            ValueError: `use_mask` is set, and rows have different masks.
        """
        spec: MultiCategorical = self.to_categorical_spec()
        return spec.to_one_hot(spec.enumerate(use_mask)).to(self.dtype)

    def rand(self, shape: Any = None, *, generator: torch.Generator | None = None) -> torch.Tensor:
        """Draw a choice for each row; all allowed choices are equally likely.

        Args:
            shape: Dims to put in front of the spec's shape.
            generator: Random generator; torch's default generator if None.

        Raises:
            RuntimeError: All choices of a row are hidden.
        """
        parts: list[torch.Tensor] = [spec.rand(shape, generator=generator) for spec in self._parts()]
        return torch.cat(parts, -1)

    def within(self, val: torch.Tensor) -> torch.Tensor:
        """Return for each value whether all its one-hot rows are allowed choices.

        Returns:
            A bool tensor with the shape of `val` without the last dim.
        """
        return torch.stack([spec.within(part) for spec, part in self._pair(val)]).all(0)

    def _project(self, val: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.cat([spec._project(part, generator) for spec, part in self._pair(val)], -1)

    def encode(self, val: Any, *, ignore_device: bool = False) -> torch.Tensor:
        """Return integers, one for each one-hot row, as concatenated rows.

        Args:
            val: The integers, along the last dim.
            ignore_device: Leave a tensor on its device.

        Returns:
            A tensor of the spec's dtype.

        Raises:
            RuntimeError: A number is out of range, or the result does not fit the spec's shape.
            ValueError: The last dim has too few or too many numbers.
        """
        numbers = torch.as_tensor(val, device=None if ignore_device else self.device)
        if numbers.ndim < 1 or numbers.shape[-1] != len(self.nvec):
            raise ValueError(
                f"MultiOneHot.encode takes {len(self.nvec)} numbers along the last dim, one for each row; "
                f"got shape {tuple(numbers.shape)}"
            )
        rows = []
        for number, spec in zip(numbers.unbind(-1), self._parts(), strict=True):
            if ((number < 0) | (number >= spec.n)).any():
                raise RuntimeError(f"value {number} is greater than the allowed max {spec.n - 1}, or below 0")
            rows.append(spec.encode(number, ignore_device=ignore_device))
        return torch.cat(rows, -1).reshape(self.shape)

    def index(self, index: torch.Tensor, tensor_to_index: torch.Tensor) -> torch.Tensor:
        """Select one element from each part of a tensor's last dim with the part's one-hot row.

        Args:
            index: A value of this spec. Shape `(*batch, sum(nvec))`.
            tensor_to_index: A tensor whose last dim has the same size.

        Returns:
            One element per part. Shape `(*batch, len(nvec))`, the dtype of `tensor_to_index`.

        Raises:
            ValueError: `index` is not a tensor, or one of the tensors has another length.
        """
        _check_tensor(self, index)
        size = sum(self.nvec)
        if any(one.shape[-1:] != (size,) for one in (index, tensor_to_index)):
            raise ValueError(f"index takes tensors whose last dims have size {size}")
        parts = split_last(tensor_to_index, self.nvec)
        pairs = zip(self._pair(index), parts, strict=True)
        return torch.cat([spec.index(row, part) for (spec, row), part in pairs], -1)

    def _to_numbers(self, val: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [super(MultiOneHot, self)._to_numbers(part) for part in split_last(val, self.nvec)], -1
        )

    def to_categorical_spec(self) -> Any:
        """Return the spec of the same choices as integers."""
        shape = (*self.shape[:-1], len(self.nvec))
        return MultiCategorical(self.nvec, shape, self.device, mask=self.mask)


def _check_tensor(spec: OneHot, index: Any) -> None:
    """Raise ValueError if an index is not a tensor."""
    if not isinstance(index, torch.Tensor):
        raise ValueError(
            f"Only tensors are allowed for indexing using {type(spec).__name__}.index(...): got {index!r}"
        )


def refuse_register(use_register: bool) -> None:
    """Raise ValueError if `use_register` is set."""
    if use_register:
        raise ValueError(
            "use_register=True is not supported: TorchRL's register is shared by all specs of a program, and "
            "cannot map numbers back to values. Number your values yourself, and encode the numbers"
        )


def as_mask(given: Any, size: torch.Size, device: torch.device) -> torch.Tensor:
    """Return a mask with a shape; raise RuntimeError if it does not expand to that shape."""
    mask: torch.Tensor = torch.as_tensor(given, device=device).bool()
    if mask.numel() == size[-1] and mask.shape != size:
        mask = mask.reshape(size[-1])
    try:
        return mask.expand(size).clone()
    except RuntimeError as exc:
        raise RuntimeError(
            f"Cannot expand mask to the desired shape: it has {tuple(mask.shape)}, {tuple(size)} is needed."
        ) from exc


def draw_choices(
    n: int,
    size: torch.Size,
    mask: torch.Tensor | None,
    device: torch.device,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Draw choices among n that a mask allows, which expands to `(*size, n)`. int64."""
    if mask is None:
        return torch.randint(n, size, device=device, generator=generator)
    return draw_allowed(mask.expand(*size, n), generator)


def draw_allowed(mask: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """Draw, for each row, one of the positions along the last dim where the mask is True.

    Returns int64 with the mask's shape without the last dim.

    Raises:
        RuntimeError: A row of the mask has no True.
    """
    if not mask.any(-1).all():
        raise RuntimeError(f"cannot draw a choice: the mask hides all {mask.shape[-1]} choices")
    flat: torch.Tensor = mask.reshape(-1, mask.shape[-1]).float()
    if not flat.numel():
        return torch.zeros(mask.shape[:-1], dtype=torch.int64, device=mask.device)
    return torch.multinomial(flat, 1, generator=generator).reshape(mask.shape[:-1])


def list_allowed(mask: torch.Tensor) -> torch.Tensor:
    """Return the choices that all rows of a mask allow alike. Shape `(mask.shape[-1],)`, bool.

    Raises:
        ValueError: The rows differ.
    """
    rows = mask.reshape(-1, mask.shape[-1])
    if (rows != rows[0]).any():
        raise ValueError(
            "enumerate(use_mask=True) needs the same mask for all elements, and these differ: enumerate each "
            "spec of unbind()"
        )
    return rows[0]


def _with_a_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with at least one dim."""
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def _as_counts(nvec: Any) -> torch.Tensor:
    """Return numbers of options as integers; raise ValueError if one is not an integer of at least 1."""
    counts = torch.as_tensor(nvec)
    for n in counts.reshape(-1).tolist():
        as_count(n, "MultiCategorical: nvec")
    return counts.long() if counts.is_floating_point() else counts
