"""Specs of several choices, each with its own number of options: as integers, or as joined one-hot rows.

Use them for actions of several parts. For a single choice use Categorical or OneHot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from expstore.specs.base import LeafSpec
from expstore.specs.boxes import Box, BoxList, CategoricalBox
from expstore.specs.categorical import Categorical, OneHot, refuse_register
from expstore.specs.integers import as_count
from expstore.specs.masks import as_mask, draw_allowed, list_allowed, same_mask
from expstore.specs.shapes import Move, as_size, indexing, safe, split_last


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
        if not size or size[-1] != counts.shape[-1]:
            raise ValueError(
                f"The last value of the shape must match nvec.shape[-1] for transform of type {type(self)}. "
                f"Got nvec.shape[-1]={counts.shape[-1]} and shape={size}."
            )
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
        rows = self.nvec.flatten(0, -2) if self.ndim > 1 else self.nvec[None]
        return rows[0].tolist() if len(rows) and (rows == rows[:1]).all() else None

    def _counts_or_refuse(self, what: str) -> list[int]:
        row = self._counts
        if row is None:
            raise ValueError(f"{what}, got nvec={self.nvec}.")
        return row

    @property
    def mask(self) -> torch.Tensor | None:
        """Which options are allowed: the masks of a row's elements, concatenated; None allows all.

        Shape `(*shape[:-1], sum(nvec))`, bool.
        """
        return self._mask

    def update_mask(self, mask: Any) -> None:
        """Hide some options from `rand`, `is_in` and `project`. Changes this spec.

        Args:
            mask: True for allowed options: the masks of a row's elements, concatenated. Expands to
                `(*shape[:-1], nvec.sum())`. bool. None allows all.

        Raises:
            RuntimeError: The mask does not expand to that shape.
            ValueError: Rows have different numbers of options.
        """
        self._mask = None
        if mask is not None:
            row = self._counts_or_refuse("Only homogeneous MultiDiscrete specs can be masked")
            self._mask = as_mask(mask, safe((*self.shape[:-1], sum(row))), self.device)

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
        row = self._counts_or_refuse("Cannot call enumerate on heterogeneous nvecs")
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
        if self.mask is None:
            lead = size[:-1]
            drawn = [torch.randint(n, lead, device=self.device, generator=generator) for n in row]
        else:
            masks = split_last(self.mask.expand(*size[:-1], -1), row)
            drawn = [draw_allowed(mask, generator) for mask in masks]
        made = torch.stack(drawn, -1).to(self.dtype)
        bare = self.remove_singleton and self.shape == (1,) and self.mask is None
        return made.squeeze(-1) if bare else made

    def _takes(self, shape: torch.Size) -> bool:
        """Return whether a shape fits; a spec of shape `(1,)` also accepts values without that dim."""
        return super()._takes(shape or torch.Size([1]))

    def _choices(self) -> torch.Tensor | None:
        """Return the mask of each element. Shape `(*shape, largest number of options)`."""
        if self.mask is None:
            return None
        row = self._counts_or_refuse("Only homogeneous MultiDiscrete specs can be masked")
        made = self.mask.new_zeros(*safe(self.shape), max(row))
        for place, mask in enumerate(split_last(self.mask, row)):
            made[..., place, : row[place]] = mask
        return made

    def within(self, val: torch.Tensor) -> torch.Tensor:
        """Return for each element whether it is an allowed option.

        Returns:
            A bool tensor with the shape of `val`.
        """
        fits = val == torch.floor(val) if val.is_floating_point() else torch.ones_like(val, dtype=torch.bool)
        val = val if val.is_floating_point() else val.long()
        fits = fits & (val >= 0) & (val < self.nvec.to(val.device))
        allowed = self._choices()
        if allowed is None:
            return fits.reshape(val.shape) if val.ndim == 0 else fits
        allowed = allowed.to(val.device).expand(*fits.shape, -1)
        chosen = val.expand(fits.shape).masked_fill(~fits, 0).long().unsqueeze(-1)
        return fits & allowed.gather(-1, chosen).squeeze(-1)

    def _project(self, val: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        shape = val.shape
        val = _with_a_dim(val.nan_to_num().round() if val.is_floating_point() else val.long())
        nvec = self.nvec.to(val.device).expand_as(val)
        val = torch.minimum(val.clamp(min=0), (nvec - 1).to(val.dtype))
        fits, allowed = self.within(val), self._choices()
        if allowed is not None and not fits.all():
            drawn = draw_allowed(allowed.to(val.device).expand(*val.shape, -1)[~fits], generator)
            val = val.masked_scatter(~fits, drawn.to(val.dtype))
        return val.to(self.dtype).reshape(shape)

    def _remake(
        self,
        move: Move | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        nvec, shape = self.nvec, self.shape
        allowed: torch.Tensor | None = None
        if move:
            allowed = self._choices()
            allowed = None if allowed is None else move.rows(allowed, shape)
            nvec, shape = move.values(nvec), move.shape(shape)
        settings: dict[str, Any] = {"device": device or self.device, "dtype": dtype or self.dtype}
        if not shape:
            n = int(nvec)
            return Categorical(n, **settings, mask=None if allowed is None else allowed[:n])
        made = MultiCategorical(nvec, shape, **settings, remove_singleton=self.remove_singleton)
        if not made.nvec.numel():
            return made  # without options there is nothing to hide
        if allowed is not None:
            row = made._counts_or_refuse("Only homogeneous MultiDiscrete specs can be masked")
            made.update_mask(torch.cat([allowed[..., place, :n] for place, n in enumerate(row)], -1))
        elif self.mask is not None:
            made.update_mask(self.mask)
        return made

    def squeeze(self, dim: int | None = None) -> Any:
        """Return the spec without a dim of size 1 other than the last; by default without all of them."""
        if self.shape[-1] == 1:
            self._keep_last(-1 if dim is None else dim, self.ndim)
        return super().squeeze(dim)

    def unsqueeze(self, dim: int) -> Any:
        """Return the spec with an additional dim of size 1, which cannot be the last."""
        self._keep_last(dim, self.ndim + 1)
        return super().unsqueeze(dim)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return a spec for each position along a dim, without that dim.

        Raises:
            ValueError: The dim does not exist, its size is unknown, or it is the last one.
        """
        self._keep_last(dim, self.ndim)
        return super().unbind(dim)

    def _keep_last(self, dim: int, n: int) -> None:
        """Raise ValueError if a dim is the last; n is the number of dims."""
        if dim in (-1, n - 1):
            raise ValueError(f"Final dimension of {type(self)} must remain unchanged. Got dim={dim}.")

    def __getitem__(self, idx: Any) -> Any:
        return self._remake(indexing(self.shape, idx))

    def to_one_hot(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return choices as rows of bools: the one-hot rows of a row's elements, concatenated.

        Args:
            val: A value of this spec.
            safe: Raise an AssertionError if `val` is not in the spec.

        Returns:
            A bool tensor. Shape `(*val.shape[:-1], nvec.sum())`; a nested tensor if the rows differ.

        Raises:
            ValueError: The rows differ, and the spec or the value does not have two dims.
        """
        if safe:
            self.assert_is_in(val)
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiCategorical):
            return False if isinstance(other, Categorical) else NotImplemented
        return (
            self._lies_like(other) and torch.equal(self.nvec, other.nvec) and same_mask(self.mask, other.mask)
        )


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
        if not size or size[-1] != sum(self._nvec):
            raise ValueError(
                f"The last value of the shape must match sum(nvec) for transform of type {type(self)}. "
                f"Got sum(nvec)={sum(self._nvec)} and shape={size}."
            )
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

    def _split(self, val: torch.Tensor) -> list[torch.Tensor] | None:
        """Return the one-hot rows of a value; None if its length does not fit."""
        if val.ndim < 1 or val.shape[-1] != sum(self.nvec):
            return None
        return split_last(val, self.nvec)

    def _parts(self) -> list[OneHot]:
        """Return the spec of each row."""
        masks = [None] * len(self.nvec) if self.mask is None else split_last(self.mask, self.nvec)
        return [
            OneHot(n, (*self.shape[:-1], n), self.device, self.dtype, mask=mask)
            for n, mask in zip(self.nvec, masks, strict=True)
        ]

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
        pairs = zip(self._parts(), split_last(val, self.nvec), strict=True)
        return torch.stack([spec.within(part) for spec, part in pairs]).all(0)

    def _project(self, val: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        pairs = zip(self._parts(), split_last(val, self.nvec), strict=True)
        return torch.cat([spec._project(part, generator) for spec, part in pairs], -1)

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
        if not isinstance(index, torch.Tensor):
            raise ValueError(
                f"Only tensors are allowed for indexing using {type(self).__name__}.index(...): got {index!r}"
            )
        rows, parts = self._split(index), self._split(tensor_to_index)
        if rows is None or parts is None:
            raise ValueError(f"index takes tensors whose last dims have size {sum(self.nvec)}")
        found = [spec.index(row, part) for spec, row, part in zip(self._parts(), rows, parts, strict=True)]
        return torch.cat(found, -1)

    def _remake(
        self,
        move: Move | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        mask = self.mask
        return MultiOneHot(
            self.nvec,
            move.shape(self.shape) if move else self.shape,
            device or self.device,
            dtype or self.dtype,
            mask=move.values(mask) if move and mask is not None else mask,
        )

    def to_categorical(self, val: torch.Tensor, safe: bool | None = None) -> torch.Tensor:
        """Return rows as integers; with `safe`, raise AssertionError if one is not in the spec.

        Returns:
            An int64 tensor with the shape of `val`; the last dim has one element per one-hot row.
        """
        if safe:
            self.assert_is_in(val)
        return torch.stack([part.long().argmax(-1) for part in split_last(val, self.nvec)], -1)

    def to_categorical_spec(self) -> Any:
        """Return the spec of the same choices as integers."""
        shape = (*self.shape[:-1], len(self.nvec))
        return MultiCategorical(self.nvec, shape, self.device, mask=self.mask)


def _with_a_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with at least one dim."""
    return tensor.reshape(1) if tensor.ndim == 0 else tensor


def _as_counts(nvec: Any) -> torch.Tensor:
    """Return numbers of options as integers; raise ValueError if one is not an integer of at least 1."""
    counts = torch.as_tensor(nvec)
    for n in counts.reshape(-1).tolist():
        as_count(n, "MultiCategorical: nvec")
    return counts.long() if counts.is_floating_point() else counts
