"""Base classes of all specs: shape, dtype, device and space of a value.

Specs describe values wherever they are stored; this module never reads a store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
import torch

from expstore.core.torchrl_members import find_member
from expstore.errors import ArgumentError
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
from expstore.specs.torchrl_classes import register_with_torchrl

_Handler = TypeVar("_Handler", bound=Callable[..., Any])

#: Functions of torch that accept specs. Filled while these modules are imported, and then constant.
_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}


def implements(function: Callable[..., Any]) -> Callable[[_Handler], _Handler]:
    """Return a decorator for the function that torch calls when it gets specs instead of `function`."""

    def keep(handler: _Handler) -> _Handler:
        _HANDLERS[function] = handler
        return handler

    return keep


def as_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return a device with its index: "cuda" becomes the current CUDA device."""
    if device is None:
        return None
    found = torch.device(device)
    if str(found) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return found


class TensorSpec(ABC):
    """Describe the values that a field may have: shape, dtype, device, and space.

    Create specs with the subclasses. `shape` includes the batch dims; -1 is a dim of any size. Only methods
    whose description says so change a spec, so threads can share it. Specs can be pickled. They are not
    stored anywhere by themselves: a crash loses them.

    Args:
        shape: Shape of a value.
        space: The set of allowed values.
        device: Device of the values.
        dtype: Dtype of the values.
        domain: "continuous", "discrete", or neither.

    Example:
        >>> from expstore import Bounded, TensorSpec
        >>> spec = Bounded(-1, 1, shape=(3,))
        >>> isinstance(spec, TensorSpec), spec.shape, spec.dtype
        (True, torch.Size([3]), torch.float32)
        >>> spec.is_in(spec.rand())
        True
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Create a spec that TorchRL's environments accept."""
        # Not in __init__, which does not run when a spec is unpickled.
        register_with_torchrl()
        return super().__new__(cls)

    if not TYPE_CHECKING:  # mypy would accept any attribute
        __getattr__ = find_member

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
        """Shape of a value; -1 is a dim of any size."""
        return self._shape

    @property
    def _safe_shape(self) -> torch.Size:
        """The shape of a value that `zero` makes; TorchRL's InitTracker reads it."""
        return safe(self.shape)

    @property
    def space(self) -> Any:
        """The space of allowed values; None if it is unknown."""
        return self._space

    @property
    def device(self) -> Any:
        """Device of the values."""
        return self._device

    @property
    def dtype(self) -> Any:
        """Dtype of the values; None if they are not tensors."""
        return self._dtype

    @property
    def domain(self) -> str | None:
        """The domain of the values: "continuous", "discrete", or None."""
        return self._domain

    @property
    def ndim(self) -> int:
        """Number of dims of a value."""
        return len(self.shape)

    def ndimension(self) -> int:
        """Return the number of dims of a value."""
        return self.ndim

    def clear_device_(self) -> Self:
        """Return the spec itself; only a Composite can have no device."""
        return self

    # -- values

    @abstractmethod
    def is_in(self, val: Any) -> bool:
        """Return whether a value belongs to this spec: dtype, shape and space fit.

        The value may have more dims in front. A dim of size 1 (or -1) of the spec matches any size.
        """

    def contains(self, item: Any) -> bool:
        """Return the same as `is_in`."""
        return self.is_in(item)

    def assert_is_in(self, value: Any) -> None:
        """Raise AssertionError if a value is not in the spec."""
        if not self.is_in(value):
            raise AssertionError(
                f"Encoding failed because value is not in space. Consider calling project(val) first. "
                f"value was = {value} and spec was {self}."
            )

    def project(self, val: Any, *, generator: torch.Generator | None = None) -> Any:
        """Return a value of the spec close to the given one, which is not changed.

        Args:
            val: A tensor, an array or numbers of the spec's shape; it may have more dims in front. A value in
                the spec is returned unchanged. NaN remains NaN, which no space contains; for integer dtypes
                it becomes the smallest integer, for bool it follows torch's conversion.
            generator: Random generator, used if a mask hides the value and a new one is drawn.

        Returns:
            A value of the spec's dtype.

        Raises:
            TypeError: The value does not consist of numbers.
            RuntimeError: The value has another shape.
        """
        return val if self.is_in(val) else self._project(val, generator)

    @abstractmethod
    def _project(self, val: Any, generator: torch.Generator | None = None) -> Any:
        """Return the value of the spec that replaces a value outside of it."""

    @abstractmethod
    def rand(
        self, shape: Sequence[int] | int | None = None, *, generator: torch.Generator | None = None
    ) -> Any:
        """Draw a value: uniformly between bounds, or normally distributed without bounds.

        Args:
            shape: Dims to put in front of the spec's shape.
            generator: Random generator; torch's default generator if None.
        """

    def sample(
        self, shape: Sequence[int] | int | None = None, *, generator: torch.Generator | None = None
    ) -> Any:
        """Draw a value; the same as `rand`, with its arguments."""
        return self.rand(shape, generator=generator)

    @abstractmethod
    def zero(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return zeros, even if the space does not contain them; `shape` is put in front."""

    def zeros(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return zeros; the same as `zero`."""
        return self.zero(shape)

    @abstractmethod
    def one(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return ones, even if the space does not contain them; `shape` is put in front."""

    def ones(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return ones; the same as `one`."""
        return self.one(shape)

    @abstractmethod
    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Return a value of an environment (numbers, lists, arrays) as a tensor of the spec.

        Args:
            val: A value with the spec's shape, or with as many elements. Tensors are returned unchanged.
            ignore_device: Leave a tensor on its device.

        Raises:
            RuntimeError: The value has another number of elements.
        """

    @abstractmethod
    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Return a value in the form that an environment expects; the reverse of `encode`.

        Args:
            val: The value.
            safe: Whether to raise AssertionError if the value is not in the spec.
        """

    @abstractmethod
    def index(self, index: Any, tensor_to_index: Any) -> Any:
        """Index the last dim of a tensor with a value of this spec.

        Args:
            index: A value of this spec. Shape `(*batch, *spec)`.
            tensor_to_index: The tensor; the size of its last dim is the number of choices.

        Raises:
            NotImplementedError: Values of this kind of spec are not indices.
        """

    @abstractmethod
    def type_check(self, value: Any, key: Any = None) -> None:
        """Raise TypeError if a value has another dtype.

        Args:
            value: The value.
            key: For composites: check only the entry of this key.
        """

    @abstractmethod
    def cardinality(self) -> Any:
        """Return the number of values."""

    @abstractmethod
    def enumerate(self, use_mask: bool = False) -> Any:
        """Return all values, stacked along a new first dim; with `use_mask`, without the hidden ones."""

    # -- other specs

    @abstractmethod
    def to(self, dest: Any) -> Any:
        """Return the spec for another device or dtype; the same object if nothing changes."""

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
        """Return the spec expanded to a larger shape: new dims in front, and dims of size 1 expanded.

        Raises:
            ValueError: A dim whose size is not 1 would change.
        """

    @abstractmethod
    def squeeze(self, dim: int | None = None) -> Any:
        """Return the spec without a dim of size 1; by default without all, but shape `(1,)` is kept."""

    @abstractmethod
    def unsqueeze(self, dim: int) -> Any:
        """Return the spec with an additional dim of size 1."""

    @abstractmethod
    def reshape(self, *shape: Any) -> Any:
        """Return the spec with another shape that has the same number of elements."""

    def view(self, *shape: Any) -> Any:
        """Return the spec with another shape that has the same number of elements."""
        return self.reshape(*shape)

    @abstractmethod
    def flatten(self, start_dim: int, end_dim: int) -> Any:
        """Return the spec with the dims `start_dim` to `end_dim` as one dim, like `torch.flatten`."""

    @abstractmethod
    def unflatten(self, dim: int, sizes: Sequence[int]) -> Any:
        """Return the spec with the dim `dim` split into dims of `sizes`, like `torch.unflatten`."""

    @abstractmethod
    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return a spec for each position along a dim, without that dim.

        Raises:
            ValueError: The dim does not exist, its size is unknown, or it is the domain of the values.
        """

    @abstractmethod
    def __getitem__(self, idx: Any) -> Any: ...

    @abstractmethod
    def __eq__(self, other: object) -> bool: ...

    def _lies_like(self, other: TensorSpec) -> bool:
        """Return whether another spec has the same shape, dtype and device."""
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
    """Return a description of a spec with some of its properties, one per line."""
    lines = [indent(f"{name}={getattr(spec, name)}", " " * 4) for name in names]
    return f"{type(spec).__name__}(\n" + ",\n".join(lines) + ")"


def _refusal(name: str) -> ArgumentError:
    # An AttributeError would be hidden by the __getattr__ of TorchRL's TransformedEnv.
    return ArgumentError(
        f"the {name} of a spec cannot be set, as some transforms of TorchRL try",
        hint="give the environment expstore.specs.to_torchrl(spec), or create another spec",
    )


class LeafSpec(TensorSpec):
    """Base class of specs of one tensor. Subclasses implement changes of the shape in `_remade`.

    For threads, processes and crashes see TensorSpec.

    Example:
        >>> from expstore import Categorical
        >>> from expstore.specs.base import LeafSpec
        >>> isinstance(Categorical(3), LeafSpec)
        True
    """

    #: Number of trailing dims that form one value; these cannot be indexed or moved.
    _whole: ClassVar[int] = 0
    #: Whether the last dim cannot be unbound.
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
                f"specs need ordered numbers, and {dtype} has no order: use two values of {dtype.to_real()}"
            )
        super().__init__(
            shape, space, torch.get_default_device() if device is None else device, dtype, domain
        )

    @property
    def shape(self) -> torch.Size:
        """The shape of a value; -1 is a dim of any size."""
        return self._shape

    @shape.setter
    def shape(self, value: Sequence[int]) -> None:
        raise _refusal("shape")

    @property
    def dtype(self) -> Any:
        """Dtype of the values."""
        return self._dtype

    @dtype.setter
    def dtype(self, value: torch.dtype) -> None:
        raise _refusal("dtype")

    @abstractmethod
    def _remake(
        self,
        move: Move | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return a copy with another shape, device or dtype."""

    @abstractmethod
    def within(self, val: torch.Tensor) -> torch.Tensor:
        """Return for each element whether it is in the space; dtype and shape are not checked.

        Args:
            val: A tensor whose shape fits the spec.

        Returns:
            A bool tensor with the shape of `val`, without the trailing dims that form one value.
        """

    def is_in(self, val: Any) -> bool:
        """Return whether a tensor is a value of this spec: dtype, shape and space fit.

        The tensor may have more dims in front. A dim of size 1 (or -1) of the spec matches any size.
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
        """Return a value of the spec close to the given one, which is not changed. See TensorSpec."""
        found = self._fit_shape(self._as_tensor(val))
        return found if self.is_in(found) else self._project(found, generator)

    def _as_tensor(self, val: Any) -> torch.Tensor:
        """Return a tensor unchanged, and arrays and numbers as tensors; raise TypeError otherwise."""
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
        """Return a value if its shape fits; raise RuntimeError otherwise."""
        if self._takes(val.shape):
            return val
        raise RuntimeError(
            f"{type(self).__name__}.project takes values of shape {tuple(self.shape)}, and dims in front of "
            f"it; got shape {tuple(val.shape)}"
        )

    def zero(self, shape: Sequence[int] | int | None = None) -> torch.Tensor:
        """Return zeros, even if the space does not contain them; `shape` is put in front."""
        return torch.zeros(self._draw_shape(shape), dtype=self.dtype, device=self.device)

    def one(self, shape: Sequence[int] | int | None = None) -> torch.Tensor:
        """Return ones, even if the space does not contain them; `shape` is put in front."""
        return torch.ones(self._draw_shape(shape), dtype=self.dtype, device=self.device)

    def _draw_shape(self, shape: Sequence[int] | int | None) -> torch.Size:
        """Return the spec's shape with dims put in front."""
        return as_size(() if shape is None else shape) + safe(self.shape)

    def encode(self, val: Any, *, ignore_device: bool = False) -> torch.Tensor:
        """Return a value of an environment (numbers, lists, arrays) as a tensor of the spec.

        Args:
            val: A value with the spec's shape, or with as many elements. Tensors are returned unchanged.
            ignore_device: Leave a tensor on its device.

        Raises:
            RuntimeError: The value has another number of elements.
        """
        if isinstance(val, torch.Tensor):
            return val
        if isinstance(val, (list, tuple)):
            # Older environments return a single value in a list.
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
        """Return a value as an array; with `safe`, raise AssertionError if it is not in the spec."""
        if safe:
            self.assert_is_in(val)
        return val.detach().cpu().numpy()

    def type_check(self, value: torch.Tensor, key: Any = None) -> None:
        """Raise TypeError if a tensor has another dtype; `key` is ignored, it selects keys of composites."""
        if value.dtype is not self.dtype:
            raise TypeError(f"value.dtype={value.dtype} but {type(self).__name__}.dtype={self.dtype}")

    def index(self, index: Any, tensor_to_index: Any) -> Any:
        """Raise NotImplementedError: values of this spec cannot be used as indices."""
        raise NotImplementedError(
            f"`index` is not implemented for {type(self).__name__} specs: their values are not indices."
        )

    def enumerate(self, use_mask: bool = False) -> torch.Tensor:
        """Raise NotImplementedError: the values cannot be listed."""
        raise NotImplementedError(
            f"enumerate is not implemented for {type(self).__name__} specs: their values cannot be listed."
        )

    # -- other specs

    def to(self, dest: torch.dtype | torch.device | str | int | None) -> Any:
        """Return the spec for another device or dtype; the same object if nothing changes."""
        if isinstance(dest, torch.dtype):
            return self if dest == self.dtype else self._remake(dtype=dest)
        device = as_device(dest)
        return self if device in (None, self.device) else self._remake(device=device)

    def clone(self) -> Self:
        """Return a copy."""
        made: Self = self._remake()
        return made

    def _move(self, move: Move) -> Any:
        """Return a copy with another shape; raise ValueError if its domain would change."""
        if self._whole and move.shape(self.shape)[-self._whole :] != self.shape[-self._whole :]:
            raise ValueError(
                f"Final dimension of {type(self)} must remain unchanged: it is the domain of the values. "
                f"Got shape {self.shape}, and {move.shape(self.shape)} of it."
            )
        return self._remake(move)

    def _keep_whole(self, dim: int | None, n: int) -> None:
        """Raise ValueError if a dim belongs to the domain; n is the number of dims."""
        if dim is not None and self._whole and (dim + n if dim < 0 else dim) >= n - self._whole:
            raise ValueError(
                f"Final dimension of {type(self)} must remain unchanged: it is the domain of the values. "
                f"Got dim={dim} for shape {self.shape}."
            )

    def expand(self, *shape: Any) -> Self:
        """Return the spec expanded to a larger shape: new dims in front, and dims of size 1 expanded.

        Raises:
            ValueError: A dim whose size is not 1 would change.
        """
        made: Self = self._move(plan_expand(type(self).__name__, self.shape, sizes_of(shape)))
        return made

    def squeeze(self, dim: int | None = None) -> Any:
        """Return the spec without a dim of size 1; by default without all, but shape `(1,)` is kept."""
        if self._whole and self.shape[-1] == 1:
            self._keep_whole(-1 if dim is None else dim, self.ndim)
        move = plan_squeeze(self.shape, dim)
        return self if move is None else self._move(move)

    def unsqueeze(self, dim: int) -> Any:
        """Return the spec with an additional dim of size 1."""
        move = plan_unsqueeze(self.shape, dim)
        self._keep_whole(dim, self.ndim + 1)
        return self._move(move)

    def reshape(self, *shape: Any) -> Any:
        """Return the spec with another shape of the same number of elements; -1 is computed."""
        return self._move(plan_reshape(self.shape, sizes_of(shape)))

    def flatten(self, start_dim: int, end_dim: int) -> Any:
        """Return the spec with the dims `start_dim` to `end_dim` as one dim, like `torch.flatten`."""
        return self._move(plan_flatten(start_dim, end_dim))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Any:
        """Return the spec with the dim `dim` split into dims of `sizes`, like `torch.unflatten`."""
        return self._move(plan_unflatten(dim, tuple(sizes)))

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return a spec for each position along a dim, without that dim.

        Raises:
            ValueError: The dim does not exist, its size is unknown, or it is the domain of the values.
        """
        moves = plan_unbind(self.shape, dim)
        self._keep_whole(dim, self.ndim)
        return tuple(self._remake(move) for move in moves)

    def _pick(self, dim: int, index: torch.Tensor) -> Any:
        """Return the spec of some positions along a dim."""
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
