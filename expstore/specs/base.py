"""Base classes of all specs: shape, dtype, device and space of a value.

Specs describe values wherever they are stored; this module never reads a store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from textwrap import indent
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import torch

from expstore.core.torchrl_members import find_member
from expstore.errors import ArgumentError
from expstore.specs.boxes import Box
from expstore.specs.integers import as_tensor
from expstore.specs.shapes import PLANS, Move, as_size, safe, sizes_of
from expstore.specs.torchrl_classes import register_with_torchrl


def _stack(tensors: Sequence[Any], dim: int = 0, *, out: Any = None) -> Any:
    from expstore.specs.stacked import stack_specs

    return stack_specs(tensors, dim, out=out)


#: Functions of torch that accept specs, each with the function that it calls for them.
_HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.squeeze: lambda spec, dim=None: spec.squeeze(dim),
    torch.unsqueeze: lambda spec, dim: spec.unsqueeze(dim),
    torch.index_select: lambda input, dim, index: input._index_select(dim, index),
    torch.stack: _stack,
}


def as_device(device: torch.device | str | int | None) -> torch.device | None:
    """Return a device with its index: "cuda" becomes the current CUDA device."""
    if device is None:
        return None
    found = torch.device(device)
    if str(found) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return found


def _refuse_change(name: str) -> ArgumentError:
    # An AttributeError would be hidden by the __getattr__ of TorchRL's TransformedEnv.
    return ArgumentError(
        f"the {name} of a spec cannot be set, as some transforms of TorchRL try",
        hint="give the environment expstore.specs.to_torchrl(spec), or create another spec",
    )


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
        >>> from expstore import Bounded
        >>> from expstore.specs import TensorSpec
        >>> spec = Bounded(-1, 1, shape=(3,))
        >>> isinstance(spec, TensorSpec), spec.shape, spec.dtype
        (True, torch.Size([3]), torch.float32)
        >>> spec.is_in(spec.rand())
        True
    """

    #: The properties in a spec's description.
    _facts: ClassVar[tuple[str, ...]] = ("shape", "space", "device", "dtype", "domain")

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

    @shape.setter
    def shape(self, value: Sequence[int]) -> None:
        raise _refuse_change("shape")

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

    @dtype.setter
    def dtype(self, value: torch.dtype) -> None:
        raise _refuse_change("dtype")

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

    def rand(
        self, shape: Sequence[int] | int | None = None, *, generator: torch.Generator | None = None
    ) -> Any:
        """Draw a value: uniformly between bounds, or normally distributed without bounds.

        Args:
            shape: Dims to put in front of the spec's shape.
            generator: Random generator; torch's default generator if None.
        """
        return self._combine(shape, lambda spec: spec.rand(shape, generator=generator))

    def sample(
        self, shape: Sequence[int] | int | None = None, *, generator: torch.Generator | None = None
    ) -> Any:
        """Draw a value; the same as `rand`, with its arguments."""
        return self.rand(shape, generator=generator)

    def zero(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return zeros, even if the space does not contain them; `shape` is put in front."""
        return self._combine(shape, lambda spec: spec.zero(shape))

    def zeros(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return zeros; the same as `zero`."""
        return self.zero(shape)

    def one(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return ones, even if the space does not contain them; `shape` is put in front."""
        return self._combine(shape, lambda spec: spec.one(shape))

    def ones(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return ones; the same as `one`."""
        return self.one(shape)

    @abstractmethod
    def _combine(self, shape: Sequence[int] | int | None, make: Callable[[Any], Any]) -> Any:
        """Return a value that consists of a value of each spec in this one.

        Args:
            shape: Dims that `make` puts in front of the shape of a spec.
            make: Function that returns a value of a spec.
        """

    @abstractmethod
    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Return a value of an environment (numbers, lists, arrays) as a tensor of the spec.

        Args:
            val: A value with the spec's shape, or with as many elements. Tensors are returned unchanged.
            ignore_device: Leave a tensor on its device.

        Raises:
            RuntimeError: The value has another number of elements.
        """

    def to_numpy(self, val: Any, safe: bool | None = None) -> Any:
        """Return a value in the form that an environment expects; the reverse of `encode`.

        Args:
            val: The value.
            safe: Whether to raise AssertionError if the value is not in the spec.
        """
        if safe:
            self.assert_is_in(val)
        return self._to_numpy(val)

    def _to_numpy(self, val: Any) -> Any:
        """Return a value in the form that an environment expects."""
        return val.detach().cpu().numpy()

    def index(self, index: Any, tensor_to_index: Any) -> Any:
        """Index the last dim of a tensor with a value of this spec.

        Args:
            index: A value of this spec. Shape `(*batch, *spec)`.
            tensor_to_index: The tensor; the size of its last dim is the number of choices.

        Raises:
            NotImplementedError: Values of this kind of spec are not indices.
        """
        raise self._refuse("index")

    @abstractmethod
    def type_check(self, value: Any, key: Any = None) -> None:
        """Raise TypeError if a value has another dtype.

        Args:
            value: The value.
            key: For composites: check only the entry of this key.
        """

    def cardinality(self) -> Any:
        """Return the number of values; raise NotImplementedError if they cannot be counted."""
        raise self._refuse("`cardinality`")

    def enumerate(self, use_mask: bool = False) -> Any:
        """Return all values, stacked along a new first dim; with `use_mask`, without the hidden ones.

        Raises:
            NotImplementedError: The values cannot be listed.
        """
        raise self._refuse("enumerate")

    def _refuse(self, name: str) -> NotImplementedError:
        return NotImplementedError(f"{name} is not implemented for {type(self).__name__} specs")

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

    # Methods that change the shape; `PLANS` says what each of them does.

    @abstractmethod
    def _change(self, name: str, *args: Any) -> Any:
        """Return the spec with another shape.

        Args:
            name: The method that changes the shape, a key of `PLANS`.
            args: Its arguments.
        """

    def expand(self, *shape: Any) -> Self:
        """Return the spec expanded to a larger shape: new dims in front, and dims of size 1 expanded.

        Raises:
            ValueError: A dim whose size is not 1 would change.
        """
        made: Self = self._change("expand", sizes_of(shape))
        return made

    def squeeze(self, dim: int | None = None) -> Any:
        """Return the spec without a dim of size 1; by default without all, but shape `(1,)` is kept."""
        return self._change("squeeze", dim)

    def unsqueeze(self, dim: int) -> Any:
        """Return the spec with an additional dim of size 1."""
        return self._change("unsqueeze", dim)

    def reshape(self, *shape: Any) -> Any:
        """Return the spec with another shape of the same number of elements; -1 is computed."""
        return self._change("reshape", sizes_of(shape))

    def view(self, *shape: Any) -> Any:
        """Return the spec with another shape; the same as `reshape`."""
        return self.reshape(*shape)

    def flatten(self, start_dim: int, end_dim: int) -> Any:
        """Return the spec with the dims `start_dim` to `end_dim` as one dim, like `torch.flatten`."""
        return self._change("flatten", start_dim, end_dim)

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Any:
        """Return the spec with the dim `dim` split into dims of `sizes`, like `torch.unflatten`."""
        return self._change("unflatten", dim, sizes)

    def unbind(self, dim: int = 0) -> tuple[Any, ...]:
        """Return a spec for each position along a dim, without that dim.

        Raises:
            ValueError: The dim does not exist, its size is unknown, or it is the domain of the values.
        """
        place = dim + self.ndim if dim < 0 else dim
        if not 0 <= place < self.ndim or self.shape[place] < 0:
            raise ValueError(f"Cannot unbind along dim {dim} with shape {self.shape}.")
        return tuple(self._select(place, number) for number in range(self.shape[place]))

    def _select(self, place: int, number: int) -> Any:
        """Return the spec of one position along a dim, without that dim."""
        return self._change("_select", place, number)

    def _index_select(self, dim: int, index: torch.Tensor) -> Any:
        """Return the spec of some positions along a dim."""
        return self._change("_index_select", dim, index)

    def __getitem__(self, idx: Any) -> Any:
        return self._change("__getitem__", idx)

    @abstractmethod
    def __eq__(self, other: object) -> bool: ...

    def _lies_like(self, other: TensorSpec) -> bool:
        """Return whether another spec has the same shape, dtype and device."""
        return self.shape == other.shape and self.dtype == other.dtype and self.device == other.device

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        lines = [indent(f"{name}={getattr(self, name)}", " " * 4) for name in self._facts]
        return f"{type(self).__name__}(\n" + ",\n".join(lines) + ")"

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


#: Function (move, argument, spec) that returns the argument of a constructor after a change of the shape.
Carry = Callable[[Move, Any, Any], Any]

#: Arguments that do not change which values belong to a spec.
_UNCOMPARED = ("domain", "remove_singleton")


def keep(move: Move, value: Any, spec: Any) -> Any:
    """Return an argument that does not depend on the shape."""
    return value


def per_element(move: Move, value: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return an argument that has a value for each element, after a change of the shape."""
    return move.values(value)


def per_row(move: Move, value: torch.Tensor, spec: Any) -> torch.Tensor:
    """Return an argument that has a row of values for each element, after a change of the shape."""
    return move.rows(value, spec.shape)


def read_argument(spec: Any, name: str) -> Any:
    """Return an argument of the constructor of a spec, also of one of TorchRL's."""
    # Bounds and n are in the space: if n is unknown, `spec.n` is provisional or raises.
    value = getattr(spec.space if name in ("low", "high", "n") else spec, name)
    return int(value) if name == "n" else value


def create(kind: Any, arguments: Mapping[str, Any]) -> Any:
    """Return a spec of a class of ours or TorchRL's; not all of them take a mask as an argument."""
    made = kind(**{name: value for name, value in arguments.items() if name != "mask"})
    if arguments.get("mask") is not None:
        made.update_mask(arguments["mask"])
    return made


def are_same(mine: Any, other: Any) -> bool:
    """Return whether two arguments are equal; tensors, if all their values are."""
    if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(mine, other)
    return bool(mine == other)


class LeafSpec(TensorSpec):
    """Base class of specs of one tensor. `_arguments` says what a subclass consists of.

    For threads, processes and crashes see TensorSpec.

    Example:
        >>> from expstore import Categorical
        >>> from expstore.specs.base import LeafSpec
        >>> isinstance(Categorical(3), LeafSpec)
        True
    """

    #: The arguments of the constructor besides shape, device and dtype, each with the function that applies
    #: a change of the shape to it: `keep`, `per_element` or `per_row`.
    _arguments: ClassVar[Mapping[str, Carry]] = {}
    #: The methods, keys of `PLANS`, that cannot change the last dim. `reshape`: none of them can.
    _fixed: ClassVar[frozenset[str]] = frozenset()

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

    def _remake(
        self,
        move: Move | None = None,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Return a copy with another shape, device or dtype."""
        arguments = {name: read_argument(self, name) for name in self._arguments}
        if move:
            for name, carry in self._arguments.items():
                if arguments[name] is not None:
                    arguments[name] = carry(move, arguments[name], self)
        shape = move.shape(self.shape) if move else self.shape
        settings = {"shape": shape, "device": device or self.device, "dtype": dtype or self.dtype}
        return self._rebuild(settings | arguments)

    def _rebuild(self, arguments: dict[str, Any]) -> Any:
        """Return a spec of this kind with arguments of the constructor."""
        return create(next(kind for kind in type(self).__mro__ if "_arguments" in vars(kind)), arguments)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LeafSpec) or type(self) is not type(other):
            return NotImplemented
        return self._lies_like(other) and all(
            are_same(read_argument(self, name), read_argument(other, name))
            for name in self._arguments
            if name not in _UNCOMPARED
        )

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

    def _combine(self, shape: Sequence[int] | int | None, make: Callable[[Any], Any]) -> Any:
        return make(self)

    def zero(self, shape: Sequence[int] | int | None = None) -> Any:
        """Return zeros, even if the space does not contain them; `shape` is put in front."""
        return torch.zeros(self._draw_shape(shape), dtype=self.dtype, device=self.device)

    def one(self, shape: Sequence[int] | int | None = None) -> Any:
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

    def type_check(self, value: torch.Tensor, key: Any = None) -> None:
        """Raise TypeError if a tensor has another dtype; `key` is ignored, it selects keys of composites."""
        if value.dtype is not self.dtype:
            raise TypeError(f"value.dtype={value.dtype} but {type(self).__name__}.dtype={self.dtype}")

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

    def _change(self, name: str, *args: Any) -> Any:
        if name in self._fixed:
            self._check_last(name, args)
        whole = {"whole": 1} if name == "__getitem__" and name in self._fixed else {}
        move = PLANS[name](self.shape, *args, **whole)
        if move is None:
            return self
        if "reshape" in self._fixed and (after := move.shape(self.shape))[-1:] != self.shape[-1:]:
            raise ValueError(
                f"Final dimension of {type(self)} must remain unchanged: it is the domain of the values. "
                f"Got shape {self.shape}, and {after} of it."
            )
        return self._remake(move)

    def _check_last(self, name: str, args: tuple[Any, ...]) -> None:
        """Raise ValueError if a change would move or remove the last dim."""
        dim = -1 if args[0] is None else args[0]
        if name == "_index_select" and dim in (-1, self.ndim - 1):
            raise ValueError(
                f"Cannot index_select along the last dimension of {type(self).__name__} spec, "
                "as it represents the domain."
            )
        moves = name in ("unsqueeze", "_select") or (name == "squeeze" and self.shape[-1:] == (1,))
        if moves and dim in (-1, self.ndim - (name != "unsqueeze")):
            raise ValueError(
                f"Final dimension of {type(self)} must remain unchanged: it is the domain of the values. "
                f"Got dim={dim} for shape {self.shape}."
            )


class GroupSpec(TensorSpec):
    """Base class of specs of several specs: composites and stacks.

    For threads, processes and crashes see TensorSpec.

    Example:
        >>> from expstore import Composite
        >>> from expstore.specs.base import GroupSpec
        >>> isinstance(Composite(), GroupSpec)
        True
    """

    def squeeze(self, dim: int | None = None) -> Any:
        """Return the spec without a dim of size 1, or without all of them."""
        if dim is not None:
            return super().squeeze(dim)
        return self.squeeze(self.shape.index(1)).squeeze() if 1 in self.shape else self
