"""What all specs have in common: shape, dtype, device and space of a field, and what follows from these.

Used by every spec. It never looks at a store: specs are about values, wherever these lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import torch

from expstore.specs.boxes import Box
from expstore.specs.integers import as_tensor
from expstore.specs.shapes import (
    Move,
    as_size,
    indexing,
    plan_expand,
    plan_flatten,
    plan_index_select,
    plan_reshape,
    plan_squeeze,
    plan_unbind,
    plan_unflatten,
    plan_unsqueeze,
    safe,
    sizes_of,
)

__all__ = ["LeafSpec", "TensorSpec", "as_device", "describe_spec", "implements", "stack_equal"]

_Handler = TypeVar("_Handler", bound=Callable[..., Any])

#: Functions of torch that take specs; filled while these modules are imported, and then the same for ever.
_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}


def implements(function: Callable[..., Any]) -> Callable[[_Handler], _Handler]:
    """Give specs to a function of torch: the decorated one is called in its place."""

    def keep(handler: _Handler) -> _Handler:
        _HANDLERS[function] = handler
        return handler

    return keep


def as_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return a device with its number: "cuda" is the one that is current."""
    if device is None:
        return None
    found = torch.device(device)
    if str(found) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return found


class TensorSpec(ABC):
    """Describe which values a field may have: shape, dtype, device, and their space.

    Specs are made by their subclasses; this is what all of them can do. `shape` has the batch dims, too; -1
    is a dim of any size. No method changes a spec but those that say so; threads may use one at once. Specs
    can be pickled. They keep nothing anywhere: a crash loses what the program has made.

    Args:
        shape: Of a value.
        space: The values it may have.
        device: Where values lie.
        dtype: What a value is made of.
        domain: "continuous", "discrete", or nothing.

    Example:
        >>> spec = Bounded(-1, 1, shape=(3,))
        >>> isinstance(spec, TensorSpec), spec.shape, spec.dtype
        (True, torch.Size([3]), torch.float32)
        >>> spec.is_in(spec.rand())
        True
    """

    def __init__(
        self,
        shape: torch.Size | Sequence[int] | int,
        space: Box | None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = torch.float32,
        domain: str | None = "",
    ) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"a spec's dtype is one of torch's, such as torch.float32; got {dtype!r}")
        self._shape = as_size(shape)
        self._space = space
        self._device = as_device(device)
        self._dtype = dtype
        self._domain = domain

    @property
    def shape(self) -> torch.Size:
        """The shape of a value; -1 is a dim of any size."""
        return self._shape

    @property
    def space(self) -> Any:
        """The space of allowed values; None if it is not known."""
        return self._space

    @property
    def device(self) -> Any:
        """Where values lie."""
        return self._device

    @property
    def dtype(self) -> Any:
        """What a value is made of; None where it is no tensor."""
        return self._dtype

    @property
    def domain(self) -> str | None:
        """ "continuous" or "discrete"; None where it is neither."""
        return self._domain

    @property
    def ndim(self) -> int:
        """How many dims a value has."""
        return len(self.shape)

    def ndimension(self) -> int:
        """Return how many dims a value has."""
        return self.ndim

    def clear_device_(self) -> Self:
        """Return itself: only a Composite can be without a device."""
        return self

    # -- values

    @abstractmethod
    def is_in(self, val: Any) -> bool:
        """Return whether a value could have been drawn from this spec: dtype, shape and space fit.

        A value may have more dims in front; a dim of size 1 (or -1) of the spec takes any size there.
        """

    def contains(self, item: Any) -> bool:
        """Say the same as `is_in`."""
        return self.is_in(item)

    def assert_is_in(self, value: Any) -> None:
        """Raise an AssertionError if a value is not in the spec."""
        if not self.is_in(value):
            raise AssertionError(
                f"Encoding failed because value is not in space. Consider calling project(val) first. "
                f"value was = {value} and spec was {self}."
            )

    def project(self, val: Any, *, generator: torch.Generator | None = None) -> Any:
        """Return a value of the spec near a given one, which stays as it is.

        Args:
            val: Any value of the shape, with more dims in front or not: a tensor, an array, numbers. One in
                the spec is returned as it is. NaN stays NaN, in no space; as a whole number it is the
                smallest, as a bool what torch makes of it.
            generator: Where a new value has to be drawn, because a mask hides the old one: what draws it.

        Returns:
            A value of the spec's dtype.

        Raises:
            TypeError: It is made of no numbers.
            RuntimeError: It has another shape.
        """
        return val if self.is_in(val) else self._project(val, generator)

    @abstractmethod
    def _project(self, val: Any, generator: torch.Generator | None = None) -> Any:
        """Return the value of the spec that stands for one that is not in it."""

    @abstractmethod
    def rand(
        self, shape: Sequence[int] | int | None = None, *, generator: torch.Generator | None = None
    ) -> Any:
        """Draw a value: each one of the space is as likely; normally distributed where there are no bounds.

        Args:
            shape: Dims to be put in front.
            generator: What draws; torch's own otherwise, as `torch.rand`.
        """

    def sample(
        self, shape: Sequence[int] | int | None = None, *, generator: torch.Generator | None = None
    ) -> Any:
        """Draw a value, as `rand`."""
        return self.rand(shape, generator=generator)

    @abstractmethod
    def zero(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return zeros, even where the space has none; `shape` comes in front."""

    def zeros(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return zeros, as `zero`."""
        return self.zero(shape)

    @abstractmethod
    def one(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return ones, even where the space has none; `shape` comes in front."""

    def ones(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return ones, as `one`."""
        return self.one(shape)

    @abstractmethod
    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Return what an environment gives (numbers, lists, arrays) as a tensor of the spec.

        Args:
            val: Of the spec's shape, or with as many elements. A tensor is returned as it is.
            ignore_device: Let it lie where it is.

        Raises:
            RuntimeError: It has another number of elements.
        """

    @abstractmethod
    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Return a value as an environment takes it; the reverse of `encode`.

        Args:
            val: The value.
            safe: Raise an AssertionError if it is not in the spec.
        """

    @abstractmethod
    def index(self, index: Any, tensor_to_index: Any) -> Any:
        """Return what a value of this spec, taken as an index, chooses from a tensor's last dim."""

    @abstractmethod
    def type_check(self, value: Any, key: Any = None) -> None:
        """Raise a TypeError if a value's dtype is another."""

    @abstractmethod
    def cardinality(self) -> Any:
        """Return how many values there are."""

    @abstractmethod
    def enumerate(self, use_mask: bool = False) -> Any:
        """Return all values, one behind another along a new first dim; with `use_mask`, those not hidden."""

    # -- other specs

    @abstractmethod
    def to(self, dest: Any) -> Any:
        """Return the spec for another device or dtype; itself if nothing changes."""

    def cpu(self) -> Any:
        """Return the spec for values on the CPU."""
        return self.to("cpu")

    def cuda(self, device: int | None = None) -> Any:
        """Return the spec for values on a GPU."""
        return self.to("cuda" if device is None else f"cuda:{device}")

    @abstractmethod
    def clone(self) -> Self:
        """Return a copy."""

    @abstractmethod
    def expand(self, *shape: Any) -> Self:
        """Return the spec of a larger shape: dims come in front, and those of size 1 grow.

        Raises:
            ValueError: A dim of another size would change.
        """

    @abstractmethod
    def squeeze(self, dim: int | None = None) -> Any:
        """Return the spec without a dim of size 1; without all of them by default, a single one stays."""

    @abstractmethod
    def unsqueeze(self, dim: int) -> Any:
        """Return the spec with a dim of size 1 more."""

    @abstractmethod
    def reshape(self, *shape: Any) -> Any:
        """Return the spec of another shape with as many elements."""

    def view(self, *shape: Any) -> Any:
        """Return the spec of another shape with as many elements."""
        return self.reshape(*shape)

    @abstractmethod
    def flatten(self, start_dim: int, end_dim: int) -> Any:
        """Return the spec with several dims made one, as `torch.flatten`."""

    @abstractmethod
    def unflatten(self, dim: int, sizes: Sequence[int]) -> Any:
        """Return the spec with a dim made several, as `torch.unflatten`."""

    @abstractmethod
    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return a spec for each place of a dim, without it.

        Raises:
            ValueError: There is no such dim, its size is unknown, or it is the domain of the values.
        """

    @abstractmethod
    def __getitem__(self, idx: Any) -> Any: ...

    @abstractmethod
    def __eq__(self, other: object) -> bool: ...

    def _lies_like(self, other: TensorSpec) -> bool:
        """Return whether values have the same shape, dtype and device."""
        return self.shape == other.shape and self.dtype == other.dtype and self.device == other.device

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return describe_spec(self, ("shape", "space", "device", "dtype", "domain"))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None or not all(issubclass(one, TensorSpec) for one in types):
            return NotImplemented
        return handler(*args, **(kwargs or {}))


def describe_spec(spec: TensorSpec, names: Sequence[str]) -> str:
    """Return a spec with some of its properties, a line each."""
    lines = [indent(f"{name}={getattr(spec, name)}", " " * 4) for name in names]
    return f"{type(spec).__name__}(\n" + ",\n".join(lines) + ")"


class LeafSpec(TensorSpec):
    """Base of the specs of one tensor. All changes of a shape end in the method `_remake` of the subclasses.

    Threads, processes and crashes: see TensorSpec.

    Example:
        >>> from expstore.specs.base import LeafSpec
        >>> isinstance(Categorical(3), LeafSpec)
        True
    """

    #: How many dims at the end are the domain of one value, and cannot be indexed or moved.
    _whole: ClassVar[int] = 0
    #: Whether the last dim can be taken apart.
    _last_stays: ClassVar[bool] = False

    def __init__(
        self,
        shape: torch.Size | Sequence[int] | int,
        space: Box | None,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        domain: str | None = "",
    ) -> None:
        if dtype is None:
            dtype = torch.get_default_dtype()
        if isinstance(dtype, torch.dtype) and dtype.is_complex:
            raise TypeError(
                f"specs are of numbers in an order; {dtype} has none: take two of {dtype.to_real()}"
            )
        super().__init__(
            shape, space, torch.get_default_device() if device is None else device, dtype, domain
        )

    @abstractmethod
    def _remake(
        self,
        move: Move | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return a copy, moved, on another device, or of another dtype."""

    @abstractmethod
    def within(self, val: torch.Tensor) -> torch.Tensor:
        """Return for each element of a tensor whether it is in the space; dtype and shape are not checked.

        Args:
            val: Of a shape that the spec has or takes.

        Returns:
            bool. The shape of `val`, without the dims at the end that make one value.
        """

    def is_in(self, val: Any) -> bool:
        """Return whether a tensor could have been drawn from this spec: dtype, shape and space fit.

        It may have more dims in front; a dim of size 1 (or -1) of the spec takes any size there.
        """
        return self._fits(val) and bool(self.within(val).all())

    def _fits(self, val: Any) -> bool:
        """Return whether shape and dtype fit."""
        return isinstance(val, torch.Tensor) and val.dtype == self.dtype and self._takes(val.shape)

    def _takes(self, shape: torch.Size) -> bool:
        """Return whether a shape fits."""
        if len(shape) < self.ndim:
            return False
        last = shape[len(shape) - self.ndim :]
        return all(n in (1, have) for n, have in zip(safe(self.shape), last, strict=True))

    def project(self, val: Any, *, generator: torch.Generator | None = None) -> Any:
        """Return a value of the spec near a given one, which stays as it is. See TensorSpec."""
        found = self._fit_shape(self._as_tensor(val))
        return found if self.is_in(found) else self._project(found, generator)

    def _as_tensor(self, val: Any) -> torch.Tensor:
        """Return arrays and numbers as a tensor of their own dtype; a TypeError of anything else."""
        if isinstance(val, torch.Tensor):
            return val
        try:
            return as_tensor(val).to(self.device)
        except (TypeError, ValueError, RuntimeError) as exc:
            raise TypeError(
                f"{type(self).__name__}.project takes a tensor, an array, or numbers; got a "
                f"{type(val).__name__}"
            ) from exc

    def _fit_shape(self, val: torch.Tensor) -> torch.Tensor:
        """Return a value, if its shape fits; a RuntimeError otherwise."""
        if self._takes(val.shape):
            return val
        raise RuntimeError(
            f"{type(self).__name__}.project takes values of shape {tuple(self.shape)}, and dims in front of "
            f"it; got shape {tuple(val.shape)}"
        )

    def zero(self, shape: Sequence[int] | int | None = None) -> torch.Tensor:
        """Return zeros, even where the space has none; `shape` comes in front."""
        return torch.zeros(self._draw_shape(shape), dtype=self.dtype, device=self.device)

    def one(self, shape: Sequence[int] | int | None = None) -> torch.Tensor:
        """Return ones, even where the space has none; `shape` comes in front."""
        return torch.ones(self._draw_shape(shape), dtype=self.dtype, device=self.device)

    def _draw_shape(self, shape: Sequence[int] | int | None) -> torch.Size:
        """Return the shape of a value with dims in front."""
        return as_size(() if shape is None else shape) + safe(self.shape)

    def encode(self, val: Any, *, ignore_device: bool = False) -> torch.Tensor:
        """Return what an environment gives (numbers, lists, arrays) as a tensor of the spec.

        Args:
            val: Of the spec's shape, or with as many elements. A tensor is returned as it is.
            ignore_device: Let it lie where it is.

        Raises:
            RuntimeError: It has another number of elements.
        """
        if isinstance(val, torch.Tensor):
            return val
        if isinstance(val, (list, tuple)):
            # Environments of some ages put a single value into a list.
            val = val[0] if len(val) == 1 else np.asarray(val)
        if isinstance(val, np.ndarray) and min(val.strides, default=1) < 0:
            val = val.copy()
        found = torch.as_tensor(val, device=None if ignore_device else self.device, dtype=self.dtype)
        try:
            sizes = zip(self.shape, found.shape, strict=False)
            same = found.ndim == self.ndim and all(n in (-1, have) for n, have in sizes)
            return found if same else found.reshape(self.shape)
        except RuntimeError as exc:
            raise RuntimeError(
                f"Shape mismatch: the value has shape {found.shape} which is incompatible with the spec "
                f"shape {self.shape}."
            ) from exc

    def to_numpy(self, val: torch.Tensor, safe: bool | None = None) -> Any:
        """Return a value as an array; with `safe`, an AssertionError if it is not in the spec."""
        if safe:
            self.assert_is_in(val)
        return val.detach().cpu().numpy()

    def type_check(self, value: torch.Tensor, key: Any = None) -> None:
        """Raise a TypeError if a tensor's dtype is another; `key` is for specs with keys."""
        if value.dtype is not self.dtype:
            raise TypeError(f"value.dtype={value.dtype} but {type(self).__name__}.dtype={self.dtype}")

    def index(self, index: Any, tensor_to_index: Any) -> Any:
        """Refuse: no value of this spec is an index."""
        raise NotImplementedError(
            f"`index` is not implemented for {type(self).__name__} specs: their values are no indices."
        )

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Refuse: there is no end to the values."""
        raise NotImplementedError(
            f"enumerate is not implemented for spec of class {type(self).__name__}: it has no list of values."
        )

    # -- other specs

    def to(self, dest: torch.dtype | torch.device | str | int | None) -> Any:
        """Return the spec for another device or dtype; itself if nothing changes."""
        if isinstance(dest, torch.dtype):
            return self if dest == self.dtype else self._remake(dtype=dest)
        device = as_device(dest)
        return self if device in (None, self.device) else self._remake(device=device)

    def clone(self) -> Self:
        """Return a copy."""
        made: Self = self._remake()
        return made

    def _move(self, move: Move) -> Any:
        """Return a copy of another shape; a ValueError if its domain would change."""
        if self._whole and move.shape(self.shape)[-self._whole :] != self.shape[-self._whole :]:
            raise ValueError(
                f"Final dimension of {type(self)} must remain unchanged: it is the domain of the values. "
                f"Got shape {self.shape}, and {move.shape(self.shape)} of it."
            )
        return self._remake(move)

    def _keep_whole(self, dim: int | None, n: int) -> None:
        """Raise a ValueError if a dim of n is one of the domain."""
        if dim is not None and self._whole and (dim + n if dim < 0 else dim) >= n - self._whole:
            raise ValueError(
                f"Final dimension of {type(self)} must remain unchanged: it is the domain of the values. "
                f"Got dim={dim} for shape {self.shape}."
            )

    def expand(self, *shape: Any) -> Self:
        """Return the spec of a larger shape: dims come in front, and those of size 1 grow.

        Raises:
            ValueError: A dim of another size would change.
        """
        made: Self = self._move(plan_expand(type(self).__name__, self.shape, sizes_of(shape)))
        return made

    def squeeze(self, dim: int | None = None) -> Any:
        """Return the spec without a dim of size 1; without all of them by default, a single one stays."""
        if self._whole and self.shape[-1] == 1:
            self._keep_whole(-1 if dim is None else dim, self.ndim)
        move = plan_squeeze(self.shape, dim)
        return self if move is None else self._move(move)

    def unsqueeze(self, dim: int) -> Any:
        """Return the spec with a dim of size 1 more."""
        move = plan_unsqueeze(self.shape, dim)
        self._keep_whole(dim, self.ndim + 1)
        return self._move(move)

    def reshape(self, *shape: Any) -> Any:
        """Return the spec of another shape with as many elements; -1 is what is left."""
        return self._move(plan_reshape(self.shape, sizes_of(shape)))

    def flatten(self, start_dim: int, end_dim: int) -> Any:
        """Return the spec with several dims made one, as `torch.flatten`."""
        return self._move(plan_flatten(start_dim, end_dim))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Any:
        """Return the spec with a dim made several, as `torch.unflatten`."""
        return self._move(plan_unflatten(dim, tuple(sizes)))

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return a spec for each place of a dim, without it.

        Raises:
            ValueError: There is no such dim, its size is unknown, or it is the domain of the values.
        """
        moves = plan_unbind(self.shape, dim)
        self._keep_whole(dim, self.ndim)
        return tuple(self._remake(move) for move in moves)

    def _pick(self, dim: int, index: torch.Tensor) -> Any:
        """Return the spec of some places of a dim."""
        if self._last_stays and dim in (self.ndim - 1, -1):
            raise ValueError(
                f"Cannot index_select along the last dimension of {type(self).__name__} spec, "
                "as it represents the domain."
            )
        return self._remake(plan_index_select(self.shape, dim, index))

    def __getitem__(self, idx: Any) -> Any:
        return self._remake(indexing(self.shape, idx, whole=self._whole))


def stack_equal(specs: Sequence[TensorSpec], dim: int) -> TensorSpec | None:
    """Return the spec of a stack of values, one of each spec; None if the specs are not equal.

    Raises:
        RuntimeError: The specs are of different classes, dtypes, devices, or numbers of dims.
        ValueError: `specs` is empty.
    """
    if not specs:
        raise ValueError("Cannot stack an empty list of specs.")
    first = specs[0]
    for one in specs[1:]:
        if not isinstance(one, type(first)):
            raise RuntimeError("Stacking specs cannot occur: Found more than one type of specs in the list.")
        for name in ("device", "dtype", "ndim"):
            mine, other = getattr(first, name), getattr(one, name)
            if mine != other:
                raise RuntimeError(f"{name.capitalize()}s differ, got {mine} and {other}")
    if any(one != first for one in specs[1:]):
        return None
    made = first.unsqueeze(dim)
    sizes = list(made.shape)
    sizes[dim] = len(specs)
    grown: TensorSpec = made.expand(sizes)
    return grown


@implements(torch.squeeze)
def _squeeze(spec: TensorSpec, dim: int | None = None) -> Any:
    return spec.squeeze(dim)


@implements(torch.unsqueeze)
def _unsqueeze(spec: TensorSpec, dim: int) -> Any:
    return spec.unsqueeze(dim)


@implements(torch.index_select)
def _index_select(input: Any, dim: int, index: torch.Tensor) -> Any:
    return input._pick(dim, index)
