"""The next observation of a row, from the row after it.

Buffers are given it as a transform, where ("next", ...) observations are not stored. It acts on what is
sampled and never on what is written.
"""

from __future__ import annotations

import cmath
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from expstore.core.values import to_key
from expstore.transforms.base import (
    StepTransform,
    StepView,
    below_next,
    check_fill,
    given_fill,
    given_keys,
    refuse_given,
)

__all__ = ["NextStateReconstructor"]

NestedKey = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The fields of the rows after, and which rows have one. Shapes `(n, *row shape)`, `(n,)`."""

    values: list[torch.Tensor]
    valid: NDArray[np.bool_]


class NextStateReconstructor(StepTransform):
    """Write ("next", key) of rows as `key` stands in the next step of their episode.

    So next observations need not be stored, and half of a store of images is saved. The next step is found
    wherever it lies, for rows sampled one by one, too, where TorchRL's looks at the next row of the batch.
    Where there is none (the episode's last step, or the newest that has come), and where rows between were
    given up, stands `fill_value`. After a `MultiStepTransform` it is the step after the last one that is
    summed up.

    Threads, processes and crashes as `StepTransform`.

    Args:
        keys: Which fields, at the root; a name alone is one.
        traj_key: Means nothing here, where steps follow the store's episodes: refused if given.
        done_key: See there.
        step_count_key: See there.
        fill_value: What stands where there is no next step.
        strict: See there.

    Raises:
        TypeError: Something is no key, or no number.
        ValueError: An argument is given that means nothing here.

    Example:
        >>> rb.append_transform(NextStateReconstructor(["pixels"], fill_value=0))
        >>> rb.sample()["next", "pixels"]
    """

    def __init__(
        self,
        keys: Sequence[NestedKey] = ("observation",),
        *,
        traj_key: NestedKey | None = ("collector", "traj_ids"),
        done_key: NestedKey | None = ("next", "done"),
        step_count_key: NestedKey | None = None,
        fill_value: float = float("nan"),
        strict: bool = True,
    ) -> None:
        refuse_given(
            "NextStateReconstructor",
            "the next step is found by the store's episodes: say what names and ends them when the store is "
            "made (expstore.open(episodes=))",
            traj_key=(traj_key, ("collector", "traj_ids")),
            done_key=(done_key, ("next", "done")),
            step_count_key=(step_count_key, None),
            strict=(strict, True),
        )
        self.keys = tuple(given_keys("keys", keys))
        self.fill_value = given_fill("fill_value", fill_value)
        self.in_keys: list[NestedKey] = []  # it reads the store
        self.out_keys: list[NestedKey] = [below_next(key) for key in self.keys]

    def look(self, view: StepView) -> _Seen:
        """Read the next steps.

        Raises:
            SchemaError: There is no such field, or it is no tensor.
            TypeError: It has whole numbers, and `fill_value` is NaN.
            ValueError: It cannot hold `fill_value`.
        """
        ids, valid = view.at(view.next_ids, [1])
        values = [view.tensor(ids[:, 0], to_key(key)) for key in self.keys]
        for key, value in zip(self.keys, values, strict=True):
            if not (value.is_floating_point() or value.is_complex()) and cmath.isnan(self.fill_value):
                raise TypeError(
                    f"NextStateReconstructor: root key {key!r} has non-floating dtype {value.dtype}; pass an "
                    "explicit integer `fill_value` for this key (NaN cannot be represented)."
                )
            check_fill("fill_value", self.fill_value, key, value.dtype)
        return _Seen(values, valid[:, 0])

    def apply(self, batch: Any, seen: _Seen) -> Any:
        """Write them."""
        without = torch.from_numpy(np.flatnonzero(~seen.valid))
        for key, value in zip(self.out_keys, seen.values, strict=True):
            batch.set(key, value.index_fill_(0, without, self.fill_value))
        return batch

    def __repr__(self) -> str:
        return f"NextStateReconstructor(keys={self.keys}, fill_value={self.fill_value})"
