"""Changes of a spec's shape, applied alike to the shape and to tensors with one value per element.

Used by the specs. This module does not depend on which values a spec allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch


def as_size(sizes: int | Iterable[int]) -> torch.Size:
    """Return sizes as a torch.Size of plain ints."""
    return torch.Size([int(n) for n in ([sizes] if isinstance(sizes, (int, np.integer)) else sizes)])


def sizes_of(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return sizes given as `f(2, 3)` or as `f((2, 3))`."""
    if len(sizes) == 1 and not isinstance(sizes[0], (int, np.integer)):
        sizes = sizes[0]
    return tuple(int(n) for n in sizes)


def safe(shape: Iterable[int]) -> torch.Size:
    """Return a shape in which dims of unknown size (-1) have size 1."""
    return torch.Size([n if n >= 0 else 1 for n in shape])


def broadcast(*shapes: torch.Size) -> torch.Size:
    """Return the shape that all of the shapes expand to; raise RuntimeError if they do not fit together."""
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def split_last(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Split the last dim into parts of these sizes."""
    return list(torch.split(tensor, list(sizes), -1))


@dataclass(frozen=True)
class Move:
    """Apply the same change to a shape and to tensors with values for its elements.

    Dims of unknown size (-1) remain unknown. It has no state; threads can share it.

    Args:
        act: Function that changes a tensor. Its second argument is the number that represents sizes of -1.
        sizes: The sizes that `act` uses itself.
        looks: Whether `act` must run on real memory, to detect indices that are out of range.
        dims: The former dim of each new dim, None for a new one. None: dims are merged, split or gathered.
        deep: Function that makes the same change to a spec with more dims behind those of the shape.

    Example:
        >>> from expstore.specs.shapes import Move
        >>> Move(lambda tensor, unknown: tensor.unsqueeze(0)).shape(torch.Size([-1, 3]))
        torch.Size([1, -1, 3])
    """

    act: Callable[[torch.Tensor, int], torch.Tensor]
    sizes: tuple[int, ...] = ()
    looks: bool = False
    dims: tuple[int | None, ...] | None = None
    deep: Callable[[Any], Any] = lambda spec: spec

    def shape(self, shape: torch.Size) -> torch.Size:
        """Return the changed shape."""
        if min((*shape, *self.sizes), default=0) >= 0:
            return self.act(self._blank(shape), 1).shape
        # Represent unknown sizes by a prime that divides no size: multiples of it are unknown afterwards.
        known = [n for n in (*shape, *self.sizes) if n > 0]
        unknown = next(n for n in count(1009, 2) if _is_prime(n) and all(k % n for k in known))
        sizes = [unknown if n < 0 else n for n in shape]
        acted = self.act(self._blank(sizes), unknown).shape
        return torch.Size([-1 if n and n % unknown == 0 else n for n in acted])

    def _blank(self, sizes: Sequence[int]) -> torch.Tensor:
        """Return a tensor without content; with `looks`, one byte of memory represents all elements."""
        if self.looks:
            return torch.zeros((), dtype=torch.bool, device="cpu").expand(tuple(sizes))
        return torch.empty(tuple(sizes), device="meta")

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a changed tensor that has one value per element, possibly as a view."""
        return self.act(tensor, 1)

    def rows(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return a changed tensor that has a value of any shape for each element of `shape`."""
        places = torch.arange(safe(shape).numel(), device=tensor.device).reshape(safe(shape))
        return tensor.reshape(places.numel(), *tensor.shape[len(shape) :])[self.act(places, 1)]


def _is_prime(number: int) -> bool:
    return all(number % n for n in range(3, int(number**0.5) + 1, 2))


def _replace_unknown(sizes: tuple[int, ...], unknown: int) -> tuple[int, ...]:
    return tuple(unknown if n < 0 else n for n in sizes)


def plan_expand(shape: torch.Size, sizes: tuple[int, ...]) -> Move:
    """Return the move for `expand`; raise ValueError if the shape cannot be expanded to these sizes."""
    n = len(shape)
    last = sizes[len(sizes) - n :]
    if len(sizes) < n or any(new != old != 1 for new, old in zip(last, shape, strict=True)):
        raise ValueError(
            f"The last {n} of the expanded shape {torch.Size(sizes)} must match the shape of the spec in "
            f"expand(): {shape}."
        )
    return Move(
        lambda tensor, unknown: tensor.expand(_replace_unknown(sizes, unknown)),
        sizes,
        dims=(*[None] * (len(sizes) - n), *range(n)),
        deep=lambda spec: spec.expand((*sizes, *spec.shape[n:])),
    )


def _plan_new_shape(
    shape: torch.Size, act: Callable[[torch.Tensor, int], torch.Tensor], sizes: tuple[int, ...] = ()
) -> Move:
    """Return a move that merges or splits dims."""
    after = Move(act, sizes).shape(shape)
    return Move(act, sizes, deep=lambda spec: spec.reshape((*after, *spec.shape[len(shape) :])))


def plan_reshape(shape: torch.Size, sizes: tuple[int, ...]) -> Move:
    """Return the move for `reshape`; -1 is computed from the rest if the shape has no unknown size."""
    if min(shape, default=0) >= 0:
        return _plan_new_shape(shape, lambda tensor, _: tensor.reshape(sizes))
    return _plan_new_shape(
        shape, lambda tensor, unknown: tensor.reshape(_replace_unknown(sizes, unknown)), sizes
    )


def plan_flatten(shape: torch.Size, start_dim: int, end_dim: int) -> Move:
    """Return the move for `flatten`."""
    return _plan_new_shape(shape, lambda tensor, _: tensor.flatten(start_dim, end_dim))


def plan_unflatten(shape: torch.Size, dim: int, sizes: Sequence[int]) -> Move:
    """Return the move for `unflatten`."""
    return _plan_new_shape(shape, lambda tensor, _: torch.unflatten(tensor, dim, tuple(sizes)))


def plan_squeeze(shape: torch.Size, dim: int | None) -> Move | None:
    """Return the move for `squeeze`; None if nothing changes. Without `dim`, shape `(1,)` is kept."""
    if dim is None:
        gone = [place for place, n in enumerate(shape) if n == 1] if len(shape) > 1 else []
    else:
        place = dim + len(shape) if dim < 0 else dim
        if not 0 <= place < len(shape):
            raise IndexError(f"squeeze: dim {dim} is out of range for a spec of shape {shape}")
        gone = [place] if shape[place] == 1 else []
    if not gone:
        return None
    return Move(
        lambda tensor, _: tensor.squeeze(tuple(gone)),
        dims=tuple(n for n in range(len(shape)) if n not in gone),
        deep=lambda spec: spec.squeeze(gone[0]),
    )


def plan_unsqueeze(shape: torch.Size, dim: int) -> Move:
    """Return the move for `unsqueeze`; raise ValueError if the dim is out of range."""
    n = len(shape)
    if not -(n + 1) <= dim <= n:
        raise ValueError(
            f"Dimension out of range, expected value in the range [{-(n + 1)}, {n}], but got {dim}"
        )
    place = dim % (n + 1)
    return Move(
        lambda tensor, _: tensor.unsqueeze(place),
        dims=(*range(place), None, *range(place, n)),
        deep=lambda spec: spec.unsqueeze(place),
    )


def plan_select(shape: torch.Size, place: int, number: int) -> Move:
    """Return the move for one position along a dim, without that dim."""
    return Move(
        lambda tensor, _: tensor.select(place, number),
        dims=tuple(n for n in range(len(shape)) if n != place),
        deep=lambda spec: spec._select(place, number),
    )


def plan_index_select(shape: torch.Size, dim: int, index: torch.Tensor) -> Move:
    """Return the move for `torch.index_select`; raise IndexError if an index is out of range."""
    place = dim + len(shape) if dim < 0 else dim
    if not 0 <= place < len(shape):
        raise IndexError(f"index_select: dim {dim} is out of range for a spec of shape {shape}")
    if ((index < 0) | (index >= shape[place])).any():
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {shape[place]}")
    return Move(
        lambda tensor, _: tensor.index_select(place, index.to(tensor.device)),
        dims=tuple(range(len(shape))),
        deep=lambda spec: torch.index_select(spec, place, index),
    )


def plan_index(shape: torch.Size, index: Any, *, whole: int = 0) -> Move:
    """Return the move for `spec[index]`.

    Args:
        shape: Shape of the spec.
        index: An index of tensors: ints, slices, ..., None, lists, ranges, arrays, tensors, or tuples of
            them.
        whole: Number of trailing dims that cannot be indexed.

    Raises:
        IndexError: Too many dims are indexed, a dim cannot be indexed, or its size is unknown.
    """
    parts = tuple(map(_part, index)) if isinstance(index, tuple) else (_part(index),)
    taken = sum(map(_count_dims, parts))
    if taken > len(shape) - whole:
        raise IndexError(
            f"shape is {len(shape) - whole}-dimensional, but {taken} dimensions were indexed"
            + (": the last one is the domain of the values and cannot be indexed" if whole else "")
        )
    place = next((i for i, part in enumerate(parts) if part is Ellipsis), None)
    if place is not None:
        parts = (*parts[:place], *[slice(None)] * (len(shape) - taken - whole), *parts[place + 1 :])
    safe_parts = _align_to_dims(shape, parts)
    return Move(
        lambda tensor, _: tensor[_move_to_device(safe_parts, tensor.device)],
        looks=True,
        dims=_list_dims(parts, len(shape)),
        deep=lambda spec: spec[parts],
    )


def _list_dims(parts: tuple[Any, ...], ndim: int) -> tuple[int | None, ...] | None:
    """Return the dims that remain after indexing, None for a new one; None if the index gathers."""
    dims: list[int | None] = []
    place = 0
    for part in parts:
        if part is None:
            dims.append(None)
        elif isinstance(part, (int, slice)):
            dims += [place] if isinstance(part, slice) else []
            place += 1
        else:
            return None
    return (*dims, *range(place, ndim))


def _part(part: Any) -> Any:
    """Return a part of an index in a form that tensors accept."""
    if isinstance(part, (range, tuple, list)):
        # Tensors treat only tensors of bools as masks reliably, not lists.
        return torch.as_tensor(list(part), dtype=None if len(part) else torch.int64)
    if isinstance(part, (np.integer, np.bool_)):
        return part.item()
    return torch.from_numpy(part) if isinstance(part, np.ndarray) else part


def _count_dims(part: Any) -> int:
    """Return the number of dims that a part of an index consumes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.ndim if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1


def _align_to_dims(shape: torch.Size, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the parts adapted to their dims: only whole dims of unknown size can be indexed."""
    place, found = 0, []
    for part in parts:
        sizes = shape[place : place + _count_dims(part)]
        if min(sizes, default=0) < 0:
            if isinstance(part, int):
                part = 0
            elif part != slice(None):
                raise IndexError(
                    f"cannot index dim {place} of shape {shape} with {part}: its size is unknown"
                )
        elif isinstance(part, slice) and (part.step or 1) < 0:
            part = torch.tensor(range(*part.indices(sizes[0])), dtype=torch.int64)
        place += len(sizes)
        found.append(part)
    return tuple(found)


def _move_to_device(parts: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Return the parts with tensors moved to the device of the indexed tensor."""
    return tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in parts)


#: The plan of each method that changes the shape of a spec: a function of the shape and the arguments.
PLANS: dict[str, Callable[..., Move | None]] = {
    "expand": plan_expand,
    "squeeze": plan_squeeze,
    "unsqueeze": plan_unsqueeze,
    "reshape": plan_reshape,
    "flatten": plan_flatten,
    "unflatten": plan_unflatten,
    "_select": plan_select,
    "_index_select": plan_index_select,
    "__getitem__": plan_index,
}
