"""How specs change their shape: one move, for the shape and for everything that is known per element.

Used by the specs. Nothing here knows what values a spec allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np
import torch

__all__ = [
    "Move",
    "as_size",
    "broadcast",
    "indexing",
    "plan_expand",
    "plan_flatten",
    "plan_index_select",
    "plan_reshape",
    "plan_squeeze",
    "plan_unbind",
    "plan_unflatten",
    "plan_unsqueeze",
    "safe",
    "sizes_of",
    "split_last",
]


def as_size(sizes: int | Iterable[int]) -> torch.Size:
    """Return sizes as a torch.Size of plain ints."""
    return torch.Size([int(n) for n in ([sizes] if isinstance(sizes, (int, np.integer)) else sizes)])


def sizes_of(sizes: Sequence[Any]) -> tuple[int, ...]:
    """Return what `f(2, 3)` and `f((2, 3))` both mean."""
    if len(sizes) == 1 and not isinstance(sizes[0], (int, np.integer)):
        sizes = sizes[0]
    return tuple(int(n) for n in sizes)


def safe(shape: Iterable[int]) -> torch.Size:
    """Return a shape in which each dim of unknown size (-1) has one place, for all of them."""
    return torch.Size([n if n >= 0 else 1 for n in shape])


def broadcast(*shapes: torch.Size) -> torch.Size:
    """Return the shape that all of the shapes expand to; raise RuntimeError if they do not fit together."""
    return torch.Size(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def split_last(tensor: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
    """Return the parts of the last dim, of these sizes."""
    return list(torch.split(tensor, list(sizes), -1))


@dataclass(frozen=True)
class Move:
    """Change a shape, and what is known of each of its elements, alike.

    Dims of unknown size (-1) stay so. Threads may use one at once; it holds no state.

    Args:
        act: What to do with a tensor. It gets a number, too, that stands for sizes of -1.
        sizes: The sizes that `act` names itself.
        looks: Whether `act` must see where elements lie, to refuse what is not there.

    Example:
        >>> from expstore.specs.shapes import Move
        >>> Move(lambda tensor, unknown: tensor.unsqueeze(0)).shape(torch.Size([-1, 3]))
        torch.Size([1, -1, 3])
    """

    act: Callable[[torch.Tensor, int], torch.Tensor]
    sizes: tuple[int, ...] = ()
    looks: bool = False

    def shape(self, shape: torch.Size) -> torch.Size:
        """Return the shape that comes of a shape."""
        if min((*shape, *self.sizes), default=0) >= 0:
            return self.act(self._blank(shape), 1).shape
        # A prime that divides none of the sizes: what it divides afterwards is unknown.
        known = [n for n in (*shape, *self.sizes) if n > 0]
        unknown = next(n for n in count(1009, 2) if _is_prime(n) and all(k % n for k in known))
        sizes = [unknown if n < 0 else n for n in shape]
        acted = self.act(self._blank(sizes), unknown).shape
        return torch.Size([-1 if n and n % unknown == 0 else n for n in acted])

    def _blank(self, sizes: Sequence[int]) -> torch.Tensor:
        """Return a tensor without content; one place in memory stands for all if they are looked at."""
        if self.looks:
            return torch.zeros((), dtype=torch.bool, device="cpu").expand(tuple(sizes))
        return torch.empty(tuple(sizes), device="meta")

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what comes of a tensor with one value per element: perhaps a view of it."""
        return self.act(tensor, 1)

    def rows(self, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return what comes of a tensor with something of any shape for each element of `shape`."""
        places = torch.arange(safe(shape).numel(), device=tensor.device).reshape(safe(shape))
        return tensor.reshape(places.numel(), *tensor.shape[len(shape) :])[self.act(places, 1)]


def _is_prime(number: int) -> bool:
    return all(number % n for n in range(3, int(number**0.5) + 1, 2))


def _replace_unknown(sizes: tuple[int, ...], unknown: int) -> tuple[int, ...]:
    return tuple(unknown if n < 0 else n for n in sizes)


def plan_expand(name: str, shape: torch.Size, sizes: tuple[int, ...]) -> Move:
    """Return the move of `expand`; a ValueError if the shape cannot become that large."""
    last = sizes[len(sizes) - len(shape) :]
    if len(sizes) < len(shape) or any(new != old != 1 for new, old in zip(last, shape, strict=True)):
        raise ValueError(
            f"The last {len(shape)} of the expanded shape {torch.Size(sizes)} must match the shape of the "
            f"{name} spec in expand(): {shape}."
        )
    return Move(lambda tensor, unknown: tensor.expand(_replace_unknown(sizes, unknown)), sizes)


def plan_reshape(shape: torch.Size, sizes: tuple[int, ...]) -> Move:
    """Return the move of `reshape`; where every size of the shape is known, -1 is what is left."""
    if min(shape, default=0) >= 0:
        return Move(lambda tensor, _: tensor.reshape(sizes))
    return Move(lambda tensor, unknown: tensor.reshape(_replace_unknown(sizes, unknown)), sizes)


def plan_flatten(start_dim: int, end_dim: int) -> Move:
    """Return the move of `flatten`."""
    return Move(lambda tensor, _: tensor.flatten(start_dim, end_dim))


def plan_unflatten(dim: int, sizes: tuple[int, ...]) -> Move:
    """Return the move of `unflatten`."""
    return Move(lambda tensor, _: torch.unflatten(tensor, dim, sizes))


def plan_squeeze(shape: torch.Size, dim: int | None) -> Move | None:
    """Return the move of `squeeze`; None where nothing changes: a single dim stays unless it is named."""
    if dim is None:
        gone = [place for place, n in enumerate(shape) if n == 1] if len(shape) > 1 else []
    else:
        place = dim + len(shape) if dim < 0 else dim
        if not 0 <= place < len(shape):
            raise IndexError(f"squeeze: dim {dim} is out of range for a spec of shape {shape}")
        gone = [place] if shape[place] == 1 else []
    return Move(lambda tensor, _: tensor.squeeze(tuple(gone))) if gone else None


def plan_unsqueeze(shape: torch.Size, dim: int) -> Move:
    """Return the move of `unsqueeze`; a ValueError if there is no such place."""
    n = len(shape)
    if not -(n + 1) <= dim <= n:
        raise ValueError(
            f"Dimension out of range, expected value in the range [{-(n + 1)}, {n}], but got {dim}"
        )
    return Move(lambda tensor, _: tensor.unsqueeze(dim))


def plan_unbind(shape: torch.Size, dim: int) -> list[Move]:
    """Return the moves of `unbind`, one for each place of a dim; a ValueError if its size is unknown."""
    place = dim + len(shape) if dim < 0 else dim
    if not 0 <= place < len(shape) or shape[place] < 0:
        raise ValueError(f"Cannot unbind along dim {dim} with shape {shape}.")

    def one(number: int) -> Move:
        return Move(lambda tensor, _: tensor.select(place, number))

    return [one(number) for number in range(shape[place])]


def plan_index_select(shape: torch.Size, dim: int, index: torch.Tensor) -> Move:
    """Return the move of `torch.index_select`; an IndexError if there is no such place."""
    place = dim + len(shape) if dim < 0 else dim
    if not 0 <= place < len(shape):
        raise IndexError(f"index_select: dim {dim} is out of range for a spec of shape {shape}")
    if ((index < 0) | (index >= shape[place])).any():
        raise IndexError(f"index {index} is out of bounds for dimension {dim} with size {shape[place]}")
    return Move(lambda tensor, _: tensor.index_select(place, index.to(tensor.device)))


def indexing(shape: torch.Size, index: Any, *, whole: int = 0) -> Move:
    """Return the move of `spec[index]`.

    Args:
        shape: The spec's.
        index: As for tensors: ints, slices, ..., None, lists, ranges, arrays, tensors, and tuples of these.
        whole: How many dims at the end cannot be indexed.

    Raises:
        IndexError: Too many dims, one that cannot be indexed, or a part of a dim of unknown size.
    """
    parts = tuple(map(_part, index)) if isinstance(index, tuple) else (_part(index),)
    taken = sum(_takes(part) for part in parts)
    if taken > len(shape) - whole:
        raise IndexError(
            f"shape is {len(shape) - whole}-dimensional, but {taken} dimensions were indexed"
            + (": the last one is the domain of the values, and stays whole" if whole else "")
        )
    if not any(part is Ellipsis for part in parts):
        parts = (*parts, Ellipsis)
    parts = (*parts, *[slice(None)] * whole)
    parts = _align_to_dims(shape, parts)
    return Move(lambda tensor, _: tensor[_move_to_device(parts, tensor.device)], looks=True)


def _part(part: Any) -> Any:
    """Return a part of an index as tensors take it."""
    if isinstance(part, (range, tuple, list)):
        # Not as they are: a list of bools is a mask, which only tensors are for sure.
        return torch.as_tensor(list(part), dtype=None if len(part) else torch.int64)
    if isinstance(part, (np.integer, np.bool_)):
        return part.item()
    return torch.from_numpy(part) if isinstance(part, np.ndarray) else part


def _takes(part: Any) -> int:
    """Return how many dims a part of an index stands for."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.ndim if isinstance(part, torch.Tensor) and part.dtype == torch.bool else 1


def _align_to_dims(shape: torch.Size, parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the parts as each dim takes them: whole where its size is unknown."""
    rest = len(shape) - sum(map(_takes, parts))
    place, found = 0, []
    for part in parts:
        dims = range(place, place + (rest if part is Ellipsis else _takes(part)))
        place = dims.stop
        if part is not Ellipsis and any(shape[dim] < 0 for dim in dims):
            if isinstance(part, int):
                part = 0
            elif part != slice(None):
                raise IndexError(
                    f"cannot index dim {dims.start} of shape {shape} with {part}: its size is unknown"
                )
        elif isinstance(part, slice) and (part.step or 1) < 0:
            part = torch.tensor(range(*part.indices(shape[dims.start])), dtype=torch.int64)
        found.append(part)
    return tuple(found)


def _move_to_device(parts: tuple[Any, ...], device: torch.device) -> tuple[Any, ...]:
    """Return the parts with tensors where those are that they choose from."""
    return tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in parts)
