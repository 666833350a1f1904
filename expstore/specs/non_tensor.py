"""Specs of values that are not tensors, and of alternatives between specs.

Use them for texts and objects. A spec of objects accepts any object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from tensordict import (
    NonTensorData,
    NonTensorStack,
    TensorDictBase,
    is_non_tensor,
    lazy_stack,
    set_capture_non_tensor_stack,
)

from expstore.specs.base import LeafSpec, TensorSpec, keep
from expstore.specs.integers import as_tensor
from expstore.specs.shapes import as_size, safe


class NonTensor(LeafSpec):
    """Spec of a field that holds objects.

    For threads, processes and crashes see TensorSpec.

    Args:
        shape: Shape of a value.
        device: Device of the TensorDicts that hold the objects; None: no device.
        dtype: None; it is ignored.
        example_data: The object that `rand`, `zero` and `one` return.
        batched: Whether each element has its own object; otherwise one object is shared by all elements.
        feature_dims: Number of trailing dims that share one object; by default all.

    Raises:
        ValueError: Both `batched` and `feature_dims` are given.

    Example:
        >>> from expstore.specs import NonTensor
        >>> spec = NonTensor(shape=(), example_data="go")
        >>> spec.rand().data
        'go'
    """

    _arguments: ClassVar = {"example_data": keep, "feature_dims": keep}
    _facts = (*LeafSpec._facts, "example_data")

    def __init__(
        self,
        shape: torch.Size | tuple[int, ...] | list[int] | int = (1,),
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        example_data: Any = None,
        batched: bool | None = None,
        feature_dims: int | None = None,
    ) -> None:
        TensorSpec.__init__(self, shape, None, device, dtype, None)
        if batched is not None and feature_dims is not None:
            raise ValueError("Cannot specify both batched and feature_dims.")
        if feature_dims is None:
            feature_dims = 0 if batched else self.ndim
        self.example_data = example_data
        self.batched = bool(batched)
        self.feature_dims = feature_dims

    def _rebuild(self, arguments: dict[str, Any]) -> Any:
        n = len(arguments["shape"])
        shared = n if self.feature_dims == self.ndim else min(self.feature_dims, n)
        return super()._rebuild({**arguments, "feature_dims": shared})

    def _fill(self, data: Any, shape: torch.Size) -> Any:
        """Return an object for all elements of a shape, shared along the trailing dims."""
        split = len(shape) - self.feature_dims
        with set_capture_non_tensor_stack(False):
            made: Any = NonTensorData(data, batch_size=shape[split:], device=self.device)
            for n in reversed(shape[:split]):
                made = lazy_stack([made.copy() for _ in range(n)])
        return made

    def rand(self, shape: Any = None, *, generator: torch.Generator | None = None) -> Any:
        """Return the example; nothing is drawn.

        Args:
            shape: Dims to put in front of the spec's shape.
            generator: Ignored.
        """
        return self._fill(self.example_data, self._draw_shape(shape))

    zero = one = rand

    def is_in(self, val: Any) -> bool:
        """Return whether a value is not a tensor; objects in a TensorDict must also have the shape."""
        if not isinstance(val, (torch.Tensor, TensorDictBase)) and not is_non_tensor(val):
            return True
        if not is_non_tensor(val) or len(val.shape) < self.ndim:
            return False
        last = safe(val.shape)[len(val.shape) - self.ndim :]
        return all(n in (1, have) for n, have in zip(safe(self.shape), last, strict=True))

    def within(self, val: torch.Tensor) -> torch.Tensor:
        """Refuse the call for any `val`: objects are not tensors, so they have no bounds and no shape.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("a NonTensor spec has no elements: `within` is not implemented")

    def _project(self, val: Any, generator: torch.Generator | None = None) -> Any:
        raise NotImplementedError("Cannot project a NonTensor spec.")

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Wrap an object for a TensorDict, for all elements.

        Args:
            val: Any object.
            ignore_device: Ignored.
        """
        return self._fill(val, safe(self.shape))

    def _to_numpy(self, val: Any) -> Any:
        return val

    def type_check(self, value: Any, key: Any = None) -> None:
        """Raise TypeError if the value is a tensor."""
        if isinstance(value, torch.Tensor):
            raise TypeError(f"a NonTensor spec describes objects; got a tensor of {value.dtype}")

    def _refuse(self, name: str) -> NotImplementedError:
        text = "Cannot use index with" if name == "index" else "Cannot enumerate"
        return NotImplementedError(f"{text} a NonTensor spec.")


class Choice(TensorSpec):
    """Spec of values that belong to one of several specs, or are one of several objects.

    For threads, processes and crashes see TensorSpec.

    Args:
        choices: Specs, NonTensorData or NonTensorStacks, all of one class, shape, dtype and device.

    Raises:
        TypeError: The choices are of different classes, or of an unsupported class.
        ValueError: The choices differ in shape, dtype or device, or there are no choices.

    Example:
        >>> from expstore import Bounded
        >>> from expstore.specs import Choice
        >>> spec = Choice([Bounded(0, 1, shape=()), Bounded(5, 6, shape=())])
        >>> spec.is_in(torch.tensor(5.5)), spec.is_in(torch.tensor(3.0))
        (True, False)
    """

    def __init__(self, choices: list[Any]) -> None:
        if not isinstance(choices, list):
            raise TypeError(f"'choices' must be a list, got {type(choices)}")
        if not choices:
            raise ValueError("Choice takes at least one spec or object; got an empty list")
        first = choices[0]
        if not isinstance(first, (TensorSpec, NonTensorData, NonTensorStack)):
            raise TypeError(
                "Each choice must be either a TensorSpec, NonTensorData, or NonTensorStack, but got "
                f"{type(first)}"
            )
        if not all(isinstance(one, type(first)) for one in choices):
            raise TypeError("All choices must be the same type")
        for name in ("shape", "dtype", "device"):
            if any(getattr(one, name) != getattr(first, name) for one in choices):
                raise ValueError(f"All choices must have the same {name}")
        super().__init__(first.shape, None, first.device, first.dtype, None)
        self._choices = tuple(one.clone() for one in choices)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The specs or objects."""
        return self._choices

    @property
    def num_choices(self) -> int:
        """Number of choices."""
        return len(self._choices)

    @property
    def _of_specs(self) -> bool:
        return isinstance(self._choices[0], TensorSpec)

    def _combine(self, shape: Any, make: Callable[[Any], Any], place: int = 0) -> Any:
        """Return a value drawn from one of the specs, or one of the objects."""
        one = self._choices[place]
        if self._of_specs:
            return make(one)
        lead = as_size(() if shape is None else shape)
        return one.expand(*lead, *one.shape) if lead else one

    def rand(self, shape: Any = None, *, generator: torch.Generator | None = None) -> Any:
        """Draw a spec, all equally likely, and a value of it; or draw an object.

        Args:
            shape: Dims to put in front of the spec's shape.
            generator: Random generator; torch's default generator if None.
        """
        place = int(torch.randint(self.num_choices, (), generator=generator))
        return self._combine(shape, lambda one: one.rand(shape, generator=generator), place)

    def one(self, shape: Any = None) -> Any:
        """Return ones, or the second object; the first if it is the only one."""
        return self._combine(shape, lambda one: one.one(shape), min(1, self.num_choices - 1))

    def is_in(self, val: Any) -> bool:
        """Return whether a value is in one of the specs, or is one of the objects."""
        if self._of_specs:
            return any(one.is_in(val) for one in self._choices)
        return is_non_tensor(val) and any(_are_equal(one, val) for one in self._choices)

    def _project(self, val: Any, generator: torch.Generator | None = None) -> Any:
        if not self._of_specs or isinstance(val, TensorDictBase):
            raise NotImplementedError(
                "project is not implemented for a Choice of objects: objects have no distance."
            )
        found = [one.project(val, generator=generator) for one in self._choices]
        given = as_tensor(val).double()
        return min(found, key=lambda one: float((one.double() - given).abs().sum()))

    def encode(self, val: Any, *, ignore_device: bool = False) -> Any:
        """Encode a value with the first spec that accepts the result; wrap an object for a TensorDict.

        Args:
            val: A value of an environment.
            ignore_device: Leave a tensor on its device.
        """
        if not self._of_specs:
            return (
                val if is_non_tensor(val) else NonTensorData(val, batch_size=self.shape, device=self.device)
            )
        made = [one.encode(val, ignore_device=ignore_device) for one in self._choices]
        fitting = [value for one, value in zip(self._choices, made, strict=True) if one.is_in(value)]
        return (fitting or made)[0]

    def _to_numpy(self, val: Any) -> Any:
        if not self._of_specs:
            return val
        fitting = [one for one in self._choices if one.is_in(val)]
        return fitting[0].to_numpy(val) if fitting else super()._to_numpy(val)

    def type_check(self, value: Any, key: Any = None) -> None:
        """Raise TypeError if a value has another dtype."""
        if self._of_specs:
            self._choices[0].type_check(value, key)

    def cardinality(self) -> Any:
        """Return the number of values of all specs, or of objects."""
        return sum(one.cardinality() for one in self._choices) if self._of_specs else self.num_choices

    def enumerate(self, use_mask: bool = False) -> list[Any]:
        """Return the values of all specs, or all objects, as a list."""
        if not self._of_specs:
            return list(self._choices)
        return [value for one in self._choices for value in one.enumerate(use_mask)]

    def _change_each(self, change: Callable[[Any], Any]) -> Self:
        return type(self)([change(one) for one in self._choices])

    def to(self, dest: Any) -> Self:
        """Return the spec for another device or dtype."""
        return self._change_each(lambda one: one.to(dest))

    def clone(self) -> Self:
        """Return a copy."""
        return self._change_each(lambda one: one)

    def _change(self, name: str, *args: Any) -> Self:
        return self._change_each(lambda one: getattr(one, name)(*args))

    # Objects do not have these two methods.

    def _select(self, place: int, number: int) -> Self:
        return self._change_each(lambda one: one.unbind(place)[number])

    def _index_select(self, dim: int, index: torch.Tensor) -> Self:
        return self._change_each(lambda one: torch.index_select(one, dim, index))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Choice):
            return NotImplemented
        if self.num_choices != other.num_choices or self._of_specs != other._of_specs:
            return False
        pairs = zip(self._choices, other._choices, strict=True)
        return all(bool(mine == his) if self._of_specs else _are_equal(mine, his) for mine, his in pairs)


def _are_equal(mine: Any, other: Any) -> bool:
    """Return whether two objects, or stacks of them, are equal."""
    return bool(mine.tolist() == other.tolist()) and mine.shape == other.shape
