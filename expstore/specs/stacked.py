"""Stacks of unequal specs, for instance of several tasks or agents with their own specs.

`torch.stack` of specs returns a stack; equal specs become one spec of a larger shape instead. A stack holds
references to the specs, and delegates drawing and checking to them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from textwrap import indent
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from tensordict import LazyStackedTensorDict

from expstore.core.values import to_key
from expstore.specs.base import GroupSpec, TensorSpec
from expstore.specs.composite import Composite, NestedKey
from expstore.specs.shapes import PLANS, as_size, plan_expand, sizes_of

_Part = TypeVar("_Part", bound=TensorSpec)
#: Properties that stacked specs of tensors share.
_ALIKE = ["device", "dtype", "ndim"]


class _Stack(GroupSpec, Generic[_Part]):
    """Base class of both kinds of stacks: methods apply to every part, and stack the results."""

    def __init__(self, *specs: _Part, dim: int) -> None:
        self._parts = list(specs)
        self.dim = _stack_place(dim, len(specs[0].shape))

    @property
    def parts(self) -> list[_Part]:
        """The specs in their order."""
        return list(self._parts)

    @property
    def stack_dim(self) -> int:
        """The dim along which the specs are stacked."""
        return self.dim

    @property
    def shape(self) -> torch.Size:
        """Shape of a stack of values; -1 where the parts differ."""
        sizes = [n[0] if len(set(n)) == 1 else -1 for n in zip(*(p.shape for p in self._parts), strict=True)]
        sizes.insert(self.dim, len(self._parts))
        return torch.Size(sizes)

    @shape.setter
    def shape(self, value: Sequence[int]) -> None:
        raise self._refuse("setting the shape")

    def __len__(self) -> int:
        return self.shape[0]

    def _iterate_parts(self, value: Any) -> Iterator[tuple[_Part, Any]]:
        """Yield each part with its value in a stack of values; values may have more dims in front."""
        if isinstance(value, np.ndarray):
            value = torch.as_tensor(value.copy())
        if isinstance(value, (tuple, list)):
            values: Sequence[Any] = value
        elif not hasattr(value, "unbind"):
            raise TypeError(
                f"a stack of specs takes a stack of values, or a list; got a {type(value).__name__}"
            )
        elif self._locate(value) < 0:
            raise ValueError(
                f"a stack of specs of shape {tuple(self.shape)} has no place for a value of shape "
                f"{tuple(value.shape)}"
            )
        else:
            values = value.unbind(self._locate(value))
        if len(values) != len(self._parts):
            raise ValueError(f"a stack of {len(self._parts)} specs needs as many values; got {len(values)}")
        return zip(self._parts, values, strict=True)

    def _locate(self, value: Any) -> int:
        """Return the dim of a stack of values along which the specs are stacked; negative if it lacks it."""
        # A nested tensor has a known first dim only; otherwise the dim is counted from the end.
        nested = isinstance(value, torch.Tensor) and value.is_nested
        return 0 if nested else int(self.dim - self.ndim + value.ndim)

    def _fits_stack(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return len(value) == len(self._parts)
        if not hasattr(value, "unbind") or (place := self._locate(value)) < 0:
            return False
        return bool(value.size(place) == len(self._parts))

    def is_in(self, val: Any) -> bool:
        """Return whether each value of a stack is in its spec."""
        return self._fits_stack(val) and all(part.is_in(value) for part, value in self._iterate_parts(val))

    def type_check(self, value: Any, key: Any = None) -> None:
        """Raise TypeError if a value has another dtype."""
        for part, own in self._iterate_parts(value):
            part.type_check(own, key)

    @abstractmethod
    def _join(self, values: Sequence[Any], lead: int) -> Any:
        """Return values, one per part, as a stack with `lead` dims in front."""

    def _project(self, val: Any, generator: torch.Generator | None = None) -> Any:
        projected = [part.project(value, generator=generator) for part, value in self._iterate_parts(val)]
        lead = 0 if isinstance(val, (tuple, list)) else max(0, val.ndim - self.ndim)
        return self._join(projected, lead)

    def _combine(self, shape: Sequence[int] | int | None, make: Callable[[Any], Any]) -> Any:
        """Return values of the parts, stacked; a nested tensor if their shapes differ."""
        lead = len(as_size(() if shape is None else shape))
        return self._join([make(part) for part in self._parts], lead)

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Return values of environments, one per part, as a stack."""
        encoded = [
            part.encode(value, ignore_device=ignore_device) for part, value in self._iterate_parts(val)
        ]
        return self._join(encoded, 0)

    def enumerate(self, use_mask: bool = False) -> Any:
        """Return all values of each part, stacked; raise RuntimeError if the numbers of values differ."""
        return self._join([part.enumerate(use_mask) for part in self._parts], 1)

    cardinality = TensorSpec.cardinality

    def clear_device_(self) -> Self:
        """Remove the device of composites."""
        for part in self._parts:
            part.clear_device_()
        return self

    def to(self, dest: Any) -> Any:
        """Return the stack for another device or dtype; the same object for None."""
        return self if dest is None else stack_specs([part.to(dest) for part in self._parts], self.dim)

    def clone(self) -> Self:
        """Return a copy."""
        return self._restack([part.clone() for part in self._parts])

    def _restack(self, parts: list[_Part]) -> Self:
        """Return a stack of other parts along the same dim."""
        return type(self)(*parts, dim=self.dim)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Stack) or type(self) is not type(other):
            return NotImplemented
        return self.dim == other.dim and self._parts == other._parts

    def expand(self, *shape: Any) -> Any:
        """Return the stack expanded to a larger shape: new dims in front, and dims of size 1 expanded."""
        sizes = sizes_of(shape)
        n = max(len(sizes) - self.ndim, 0)
        own = [old if new == -1 else new for new, old in zip(sizes[n:], self.shape, strict=False)]
        plan_expand(self.shape, (*sizes[:n], *own))  # checks the sizes
        count = own.pop(self.dim)
        parts = self._parts * count if len(self._parts) == 1 else self._parts
        grown = [
            part.expand((*sizes[:n], *(s if n == -1 else n for n, s in zip(own, part.shape, strict=True))))
            for part in parts
        ]
        return stack_specs(grown, self.dim + n)

    def squeeze(self, dim: int | None = None) -> Any:
        """Return the stack without a dim of size 1, or without all of them."""
        if dim is not None and not -self.ndim <= dim < self.ndim:
            raise RuntimeError(
                f"squeezing is allowed for dims comprised between 0 and spec.ndim only. Got dim={dim} and "
                f"shape={self.shape}."
            )
        return super().squeeze(dim)

    def _change(self, name: str, *args: Any) -> Any:
        if name in ("reshape", "flatten", "unflatten"):
            raise self._refuse(name)  # the positions along the stack have different specs
        if name == "__getitem__":
            return self._index(*args)
        if name == "_index_select":
            dim, index = args
            return self._index((*[slice(None)] * (dim % self.ndim), index))
        move = PLANS[name](self.shape, *args)
        if move is None or move.dims is None:
            return self
        place = args[0] % (self.ndim + (name == "unsqueeze"))
        if name != "unsqueeze" and place == self.dim:
            return self._parts[args[1] if name == "_select" else 0]
        inner = place - (place > self.dim)
        parts = [getattr(part, name)(inner, *args[1:]) for part in self._parts]
        return stack_specs(parts, move.dims.index(self.dim))

    def _index(self, index: Any) -> Any:
        """Return the indexed parts; only the dim of the stack can be indexed."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if any(part is None for part in parts):
            raise IndexError(f"Cannot index a {type(self).__name__} with None values")
        if Ellipsis in [part for part in parts if not isinstance(part, torch.Tensor)]:
            place = next(i for i, part in enumerate(parts) if part is Ellipsis)
            parts[place : place + 1] = [slice(None)] * (self.ndim - len(parts) + 1)
        for place, part in enumerate(parts):
            if place != self.dim and part != slice(None):
                raise IndexError(
                    f"Trying to index a {type(self).__name__} along dimension {place} when the stack "
                    f"dimension is {self.dim}."
                )
        chosen = parts[self.dim] if len(parts) > self.dim else slice(None)
        if isinstance(chosen, (int, slice)):
            found = self._parts[chosen]
            return stack_specs(found, self.dim) if isinstance(found, list) else found
        numbers = torch.arange(len(self._parts))[torch.as_tensor(chosen)].tolist()
        return stack_specs([self._parts[number] for number in numbers], self.dim)


class Stacked(_Stack[TensorSpec]):
    """Stack specs of tensors whose shapes or spaces differ.

    For threads, processes and crashes see TensorSpec. The stack shares its parts: a change of a part is
    visible in the stack.

    Args:
        specs: Specs of one class, dtype, device and number of dims.
        dim: The dim of a stack of values along which the specs are stacked.

    Example:
        >>> from expstore import Bounded
        >>> spec = torch.stack([Bounded(-1, 1, shape=(2,)), Bounded(0, 5, shape=(2,))])
        >>> spec.shape, spec.is_in(torch.tensor([[0.0, 0.0], [3.0, 3.0]]))
        (torch.Size([2, 2]), True)
    """

    def __init__(self, *specs: TensorSpec, dim: int) -> None:
        _check_alike(specs)
        super().__init__(*specs, dim=dim)
        first = specs[0]
        TensorSpec.__init__(self, (), None, first.device, first.dtype, first.domain)

    @property
    def _specs(self) -> list[TensorSpec]:
        """The specs, by the name under which TorchRL's ParallelEnv reads them."""
        return self._parts

    def _join(self, values: Sequence[Any], lead: int) -> Any:
        if len({value.shape for value in values}) == 1:
            return torch.stack(list(values), self.dim + lead)
        if self.dim + lead:
            raise RuntimeError(
                "Cannot create a nested tensor with a stack dimension other than 0. "
                f"Got dim={self.dim + lead}"
            )
        return torch.nested.nested_tensor(list(values))

    def __repr__(self) -> str:
        facts = f"shape={self.shape}, device={self.device}, dtype={self.dtype}, domain={self.domain}"
        return f"Stacked{type(self._parts[0]).__name__}(\n    {facts})"


class StackedComposite(_Stack[Composite], Composite):
    """Stack composites of one shape that differ in keys or specs.

    It shows the keys that all parts have. Setting or removing a key applies to each part. Values are stacks
    of TensorDicts, lazy if these differ. For threads, processes and crashes see Composite.

    Args:
        specs: Composites of one shape.
        dim: The dim of a batch along which they are stacked.

    Example:
        >>> from expstore import Bounded, Categorical, Composite
        >>> one = Composite(observation=Bounded(-1, 1, shape=(3,)), hint=Categorical(2))
        >>> two = Composite(observation=Bounded(-1, 1, shape=(4,)))
        >>> spec = torch.stack([one, two])
        >>> list(spec.keys()), spec["observation"].shape
        (['observation'], torch.Size([2, -1]))
        >>> spec.is_in(spec.rand())
        True
    """

    def __init__(self, *specs: Composite, dim: int) -> None:
        _check_alike(specs)
        _Stack.__init__(self, *specs, dim=dim)
        devices = {spec.device for spec in specs} - {None}
        Composite.__init__(self)
        self._device = devices.pop() if len(devices) == 1 else None

    batch_size = _Stack.shape

    def _join(self, values: Sequence[Any], lead: int) -> Any:
        return LazyStackedTensorDict.maybe_dense_stack(list(values), self.dim + lead)

    def entries(self) -> Iterator[tuple[str, TensorSpec | None]]:
        """Yield the entries that all parts have, in the order of the first part's keys."""
        common = set.intersection(*(set(part) for part in self._parts))
        for name in self._parts[0]:
            found = [part.get(name) for part in self._parts]
            if name in common and all(spec is not None for spec in found):
                yield name, stack_specs(found, self.dim)
            elif name in common and all(spec is None for spec in found):
                yield name, None

    def _branches(self) -> Iterator[Composite]:
        yield from self._parts

    def _entry(self, key: tuple[str, ...]) -> TensorSpec | None:
        found = [part._entry(key) for part in self._parts]
        kept = [spec for spec in found if spec is not None]
        if not kept:
            return None
        if len(kept) < len(found):
            raise KeyError(f"not all parts have a spec {key!r}")
        made: TensorSpec = stack_specs(kept, self.dim)
        return made

    def set(self, name: NestedKey, spec: TensorSpec | None) -> Self:
        """Set the specs of a key in all parts: the spec is unbound along the dim of the stack."""
        if len(to_key(name)) == 1:
            self._check_unlocked()
        own = [None] * len(self._parts) if spec is None else spec.unbind(self.dim)
        if len(own) != len(self._parts):
            raise ValueError(f"a stack of {len(self._parts)} specs needs as many positions; got {len(own)}")
        for part, one in zip(self._parts, own, strict=True):
            part.set(name, one)
        return self

    def __delitem__(self, key: NestedKey) -> None:
        found = [part for part in self._parts if part.get(key, self) is not self]
        if not found:
            raise KeyError(f"Key {key} must be present in at least one of the stacked specs.")
        for part in found:
            del part[key]

    def update(self, specs: Mapping[Any, Any] | Composite) -> Self:
        """Set all specs of a dict or a composite; return the stack."""
        for key, spec in specs.items():
            self[key] = spec
        return self

    def is_empty(self, recurse: bool = False) -> bool:
        """Return whether no part has entries."""
        return all(part.is_empty(recurse) for part in self._parts)

    def empty(self) -> Self:
        """Return a stack of parts without entries."""
        return self._restack([part.empty() for part in self._parts])

    def project(self, val: Any, *, generator: torch.Generator | None = None) -> Any:
        """Return a stack in which each invalid value is replaced by a valid one."""
        joined = self._project(val, generator)
        return joined if isinstance(val, LazyStackedTensorDict) else joined.to_tensordict()

    def to_numpy(self, val: Any, safe: bool | None = None) -> dict[str, Any]:
        """Return a stack as a dict of arrays with the same nesting, for the keys that all parts have."""
        if safe:
            self.assert_is_in(val)
        return {key: self[key].to_numpy(val.get(key)) for key, _ in self.entries()}

    def __repr__(self) -> str:
        shared = ",\n".join(f"{key}: {spec!r}" for key, spec in self.entries())
        common = {key for key, _ in self.entries()}
        own = []
        for number, part in enumerate(self._parts):
            lines = [f"{key}: {spec!r}" for key, spec in part.entries() if key not in common]
            if lines:
                own.append(f"{number} ->\n" + indent(",\n".join(lines), " " * 4))
        facts = [
            "fields={\n" + indent(shared, " " * 4) + "}",
            "exclusive_fields={\n" + indent(",\n".join(own), " " * 4) + "}",
            f"device={self.device}",
            f"shape={self.shape}",
            f"stack_dim={self.dim}",
        ]
        return "StackedComposite(\n" + indent(",\n".join(facts), " " * 4) + ")"


def _stack_place(dim: int, ndim: int) -> int:
    if not -ndim - 1 <= dim <= ndim:
        raise ValueError(f"specs of {ndim} dims cannot be stacked along dim {dim}")
    return dim % (ndim + 1)


def _check_alike(specs: Sequence[Any]) -> None:
    """Raise an error unless specs can be stacked.

    Raises:
        RuntimeError: The specs are of different classes, dtypes, devices, or numbers of dims; composites of
            different shapes.
        ValueError: `specs` is empty.
    """
    if not specs:
        raise ValueError("Cannot stack an empty list of specs.")
    first = specs[0]
    kind, names = (Composite, ["shape"]) if isinstance(first, Composite) else (type(first), _ALIKE)
    for one in specs[1:]:
        if not isinstance(one, kind):
            raise RuntimeError("Stacking specs cannot occur: Found more than one type of specs in the list.")
        for name in names:
            mine, other = getattr(first, name), getattr(one, name)
            if mine != other:
                raise RuntimeError(f"{name.capitalize()}s differ, got {mine} and {other}")


def stack_specs(tensors: Sequence[Any], dim: int = 0, *, out: Any = None) -> Any:
    """Return the spec of stacked values: one spec if all are equal, otherwise a stack."""
    if out is not None:
        raise NotImplementedError("torch.stack of specs returns a new spec: omit the argument `out`")
    _check_alike(tensors)
    first = tensors[0]
    place = _stack_place(dim, len(first.shape))
    if any(spec != first for spec in tensors[1:]):
        kind = StackedComposite if isinstance(first, Composite) else Stacked
        return kind(*tensors, dim=place)
    sizes = list(first.shape)
    sizes.insert(place, len(tensors))
    return first.unsqueeze(place).expand(sizes)
