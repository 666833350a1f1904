"""The rows of the benchmarks, as frozen descriptions; frames of real games are in `atari.py`.

Used by the programs of this folder. Contents follow from a seed; creating them is never part of a
measurement. torch is imported when the first batch is created.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch
    from tensordict import TensorDict

TRAJECTORY = ("collector", "traj_ids")


@dataclass(frozen=True)
class Leaf:
    """One field of a row: key, dtype and row shape."""

    key: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        return np.dtype(self.dtype).itemsize * prod(self.shape)


@dataclass(frozen=True)
class Workload:
    """The rows of a store.

    Args:
        name: Name in the table.
        rows: Capacity of the full ring.
        extend_rows: Rows per call of `extend`.
        episode: Steps per episode; every other episode terminates, the others are truncated.
        leaves: The fields.
    """

    name: str
    rows: int
    extend_rows: int
    episode: int
    leaves: tuple[Leaf, ...]

    @property
    def row_bytes(self) -> int:
        return sum(leaf.row_bytes for leaf in self.leaves)

    def scaled(self, *, rows: int, extend_rows: int) -> Workload:
        """Return the same kind of rows with other numbers of rows."""
        return replace(self, rows=rows, extend_rows=extend_rows)

    def batch(self, rows: int, *, start: int = 0, seed: int = 0) -> TensorDict:
        """Create rows number `start` to `start + rows - 1` of a run. Batch size `[rows]`."""
        import torch
        from tensordict import TensorDict

        generator = torch.Generator().manual_seed(seed)
        number = torch.arange(start, start + rows)
        batch = TensorDict({}, [rows])
        for leaf in self.leaves:
            batch[leaf.key] = self._values(leaf, number, generator)
        return batch

    def _values(self, leaf: Leaf, number: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        import torch

        shape = (number.numel(), *leaf.shape)
        dtype: torch.dtype = getattr(torch, leaf.dtype)
        if leaf.key == TRAJECTORY:
            return (number // self.episode).reshape(shape)
        if dtype is torch.bool:
            # Root flags describe the observation before the step: they never mark an end.
            last = (number + 1) % self.episode == 0
            second = number // self.episode % 2 == 1
            ends: dict[tuple[str, ...], torch.Tensor] = {
                ("next", "done"): last,
                ("next", "terminated"): last & ~second,
                ("next", "truncated"): last & second,
            }
            return ends.get(leaf.key, torch.zeros_like(last)).reshape(shape).clone()
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=dtype)
        return torch.randint(0, 256 if leaf.shape else 6, shape, generator=generator, dtype=dtype)


class Stream:
    """Yield batches endlessly: prepared batches in turn, with increasing trajectory ids.

    Args:
        workload: The kind of rows.
        rows: Rows per batch; 0 for single rows without a batch dim.
        pool: Number of prepared batches.
        seed: Random seed of their contents.
    """

    def __init__(self, workload: Workload, rows: int, *, pool: int, seed: int = 0) -> None:
        total = max(1, rows) * pool
        whole = workload.batch(total, seed=seed)
        if rows:
            self._pool = [whole[start : start + rows].clone() for start in range(0, total, rows)]
        else:
            self._pool = [whole[number].clone() for number in range(total)]
        self._episodes = -(-total // workload.episode)
        self._has_trajectories = any(leaf.key == TRAJECTORY for leaf in workload.leaves)
        self._next = 0

    def __iter__(self) -> Iterator[TensorDict]:
        return self

    def __next__(self) -> TensorDict:
        lap, place = divmod(self._next, len(self._pool))
        self._next += 1
        batch = self._pool[place]
        if lap and self._has_trajectories:
            batch[TRAJECTORY].add_(self._episodes)
        return batch


def _flags(*groups: tuple[str, ...]) -> tuple[Leaf, ...]:
    names = ("done", "terminated", "truncated")
    return tuple(Leaf((*group, name), "bool", (1,)) for group in groups for name in names)


LOCOMOTION = Workload(
    name="locomotion",
    rows=1_000_000,
    extend_rows=1000,
    episode=250,
    leaves=(
        Leaf(("observation",), "float32", (17,)),
        Leaf(("action",), "float32", (6,)),
        Leaf(TRAJECTORY, "int64", ()),
        Leaf(("next", "observation"), "float32", (17,)),
        Leaf(("next", "reward"), "float32", (1,)),
        *_flags((), ("next",)),
    ),
)

PIXELS = Workload(
    name="pixels",
    rows=60_000,
    extend_rows=1000,
    episode=250,
    leaves=(
        Leaf(("observation",), "uint8", (84, 84)),
        Leaf(("action",), "int64", ()),
        Leaf(("next", "observation"), "uint8", (84, 84)),
        Leaf(("next", "reward"), "float32", (1,)),
        *_flags(("next",)),
    ),
)
