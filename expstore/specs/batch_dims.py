"""Changes of a composite's batch shape, applied to the shape, the names and all specs.

Base class of the composite specs. This module does not depend on keys and values.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch

from expstore.specs.base import TensorSpec
from expstore.specs.shapes import (
    Move,
    indexing,
    plan_expand,
    plan_flatten,
    plan_index_select,
    plan_reshape,
    plan_squeeze,
    plan_unbind,
    plan_unflatten,
    plan_unsqueeze,
    sizes_of,
)

#: The entries of a composite: a spec, or None, for each name.
Entries = dict[str, TensorSpec | None]


class BatchDims(TensorSpec):
    """Base of groups of specs that share their leading dims; methods change only these dims.

    For threads, processes and crashes see TensorSpec.

    Example:
        >>> from expstore import Bounded, Composite
        >>> spec = Composite(observation=Bounded(-1, 1, shape=(4, 3)), shape=(4,))
        >>> spec.expand(2, 4).shape, spec.expand(2, 4)["observation"].shape
        (torch.Size([2, 4]), torch.Size([2, 4, 3]))
        >>> spec[0]["observation"].shape
        torch.Size([3])
    """

    _names: list[str | None] | None
    #: Whether TorchRL's `step_mdp` keeps the values unchanged.
    step_mdp_static: bool = False

    @abstractmethod
    def entries(self) -> Iterator[tuple[str, TensorSpec | None]]:
        """Yield the names and specs of the first level."""

    @abstractmethod
    def _make(self, specs: Entries, shape: Sequence[int], names: Sequence[str | None] | None) -> Self:
        """Return a copy with other specs, shape and names."""

    def _take_at(self, index: Any) -> Self:
        """Return the composite of an indexed part of the batch."""
        move, leading = indexing(self.shape, index), _index_leading(index, len(self.shape))
        names = None if self._names is None else _names_at(self._names, leading)
        return self._with(move, lambda spec: spec[leading], names)

    def _pick(self, dim: int, index: torch.Tensor) -> Self:
        place = dim % len(self.shape)
        move = plan_index_select(self.shape, dim, index)
        return self._with(move, lambda spec: torch.index_select(spec, place, index), self._names)

    def _with(
        self,
        move: Move | None,
        act: Callable[[Any], Any],
        names: Sequence[str | None] | None = None,
    ) -> Self:
        """Return a composite with `act` applied to each spec, and `move` to the shape."""
        shape = self.shape if move is None else move.shape(self.shape)
        return self._make(
            {key: None if spec is None else act(spec) for key, spec in self.entries()}, shape, names
        )

    def _rest(self, spec: TensorSpec) -> torch.Size:
        return spec.shape[len(self.shape) :]

    def expand(self, *shape: Any) -> Self:
        """Return the composite expanded to a larger batch: new dims in front, and dims of size 1 expanded."""
        sizes = sizes_of(shape)
        names = None if self._names is None else [*[None] * (len(sizes) - len(self._names)), *self._names]
        move = plan_expand(type(self).__name__, self.shape, sizes)
        return self._with(move, lambda spec: spec.expand((*sizes, *self._rest(spec))), names)

    def _reshape(self, move: Move) -> Self:
        shape = move.shape(self.shape)
        return self._with(move, lambda spec: spec.reshape((*shape, *self._rest(spec))))

    def reshape(self, *shape: Any) -> Self:
        """Return the composite with another batch shape."""
        return self._reshape(plan_reshape(self.shape, sizes_of(shape)))

    view = reshape

    def flatten(self, start_dim: int, end_dim: int) -> Self:
        """Return the composite with several batch dims flattened into one."""
        return self._reshape(plan_flatten(start_dim, end_dim))

    def unflatten(self, dim: int, sizes: Sequence[int]) -> Self:
        """Return the composite with a batch dim split into several."""
        return self._reshape(plan_unflatten(dim, tuple(sizes)))

    def squeeze(self, dim: int | None = None) -> Self:
        """Return the composite without a batch dim of size 1, or without all of them."""
        if dim is None:
            return self.squeeze(self.shape.index(1)).squeeze() if 1 in self.shape else self
        move = plan_squeeze(self.shape, dim)
        if move is None:
            return self
        place = dim % len(self.shape)
        names = None if self._names is None else [n for i, n in enumerate(self._names) if i != place]
        return self._with(move, lambda spec: spec.squeeze(place), names)

    def unsqueeze(self, dim: int) -> Self:
        """Return the composite with an additional batch dim of size 1."""
        move, place = plan_unsqueeze(self.shape, dim), dim % (len(self.shape) + 1)
        names = None if self._names is None else [*self._names[:place], None, *self._names[place:]]
        return self._with(move, lambda spec: spec.unsqueeze(place), names)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        """Return one composite for each position along a batch dim."""
        moves = plan_unbind(self.shape, dim)
        place = dim % len(self.shape)
        names = None if self._names is None else [n for i, n in enumerate(self._names) if i != place]
        parts = {key: None if spec is None else spec.unbind(place) for key, spec in self.entries()}
        return tuple(
            self._make(
                {k: None if p is None else p[i] for k, p in parts.items()}, move.shape(self.shape), names
            )
            for i, move in enumerate(moves)
        )


def _index_leading(index: Any, ndim: int) -> tuple[Any, ...]:
    """Return an index for the first `ndim` dims with `...` expanded, for specs with more dims."""
    parts = index if isinstance(index, tuple) else (index,)
    if not any(part is Ellipsis for part in parts):
        return parts
    place = next(i for i, part in enumerate(parts) if part is Ellipsis)
    rest = (*parts[:place], *parts[place + 1 :])
    taken = sum(_dims_of(part) for part in rest)
    return (*parts[:place], *[slice(None)] * (ndim - taken), *parts[place + 1 :])


def _dims_of(part: Any) -> int:
    if part is None:
        return 0
    is_mask = getattr(part, "dtype", None) in (torch.bool, bool)
    return int(part.ndim) if is_mask else 1


def _names_at(names: Sequence[str | None], index: tuple[Any, ...]) -> list[str | None] | None:
    """Return the names of the dims after indexing; None if the index gathers."""
    found: list[str | None] = []
    place = 0
    for part in index:
        if part is None:
            found.append(None)
        elif isinstance(part, (int, slice)):
            found += [names[place]] if isinstance(part, slice) else []
            place += 1
        else:
            return None
    return [*found, *names[place:]]
