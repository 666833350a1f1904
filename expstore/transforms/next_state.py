"""A transform that reads the next observation of a row from the next step's row.

Use it where ("next", ...) observations are not stored. It changes sampled batches only, never the rows that
are written.
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
from expstore.errors import ArgumentError
from expstore.transforms.base import (
    StepView,
    below_next,
    check_fill,
    check_keys,
    convert_fill,
    refuse_given,
)
from expstore.transforms.torchrl_twin import TwinTransform

NestedKey = str | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The fields of the next rows, and which rows have a next row. Shapes `(n, *row shape)`, `(n,)`."""

    values: list[torch.Tensor]
    valid: NDArray[np.bool_]


class NextStateReconstructor(TwinTransform):
    """Set ("next", key) of each row to the value of `key` in the next step of its episode.

    Next observations then need not be stored, which halves the size of a store of images. The next step is
    found wherever it is stored, also for rows sampled one by one; TorchRL's class reads the next row of the
    batch. ("next", key) is `fill_value` where there is no next step: in an episode's last step, in the newest
    step written so far, and before deleted rows. After a `MultiStepTransform` the next step is the one
    after the last step of the sum.

    Threads, processes and crashes as `StepTransform`.

    Args:
        keys: The fields at the root; a single name is one key.
        traj_key: Not supported, because steps follow the store's episodes: any other value than the default
            is refused.
        done_key: Not supported, like `traj_key`.
        step_count_key: Not supported, like `traj_key`.
        fill_value: The value where there is no next step.
        strict: Not supported, like `traj_key`.

    Raises:
        ArgumentError: A key is not a key, or `fill_value` is not a number; an argument that is not supported
            has another value than its default.

    Example:
        >>> from expstore import NextStateReconstructor
        >>> rb.append_transform(NextStateReconstructor(["observation"], fill_value=0))
        >>> rb.sample()["next", "observation"].shape
        torch.Size([32, 4])
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
            "the next step is found by the store's episodes: name the fields that identify and end them when "
            "you create the store (expstore.open(episodes=))",
            traj_key=(traj_key, ("collector", "traj_ids")),
            done_key=(done_key, ("next", "done")),
            step_count_key=(step_count_key, None),
            strict=(strict, True),
        )
        self.keys = tuple(check_keys("keys", keys))
        self.fill_value = convert_fill("fill_value", fill_value)
        self.in_keys: list[NestedKey] = []  # it reads the store
        self.out_keys: list[NestedKey] = [below_next(key) for key in self.keys]

    torchrl_name = "NextStateReconstructor"

    def torchrl_options(self) -> dict[str, Any]:
        """Return the keyword arguments of TorchRL's class for a transform with the same settings."""
        return {"keys": self.keys, "fill_value": self.fill_value}

    def look(self, view: StepView) -> _Seen:
        """Read the next steps.

        Raises:
            SchemaError: There is no such field, or its rows are not tensors.
            ArgumentError: The field has integers, and `fill_value` is NaN; the field cannot hold
                `fill_value`.
        """
        ids, valid = view.at(view.next_ids, [1])
        values = [view.tensor(ids[:, 0], to_key(key)) for key in self.keys]
        for key, value in zip(self.keys, values, strict=True):
            if not (value.is_floating_point() or value.is_complex()) and cmath.isnan(self.fill_value):
                raise ArgumentError(
                    f"NextStateReconstructor: root key {key!r} has non-floating dtype {value.dtype}; pass an "
                    "explicit integer `fill_value` for this key (NaN cannot be represented)."
                )
            check_fill("fill_value", self.fill_value, key, value.dtype)
        return _Seen(values, valid[:, 0])

    def apply(self, batch: Any, seen: _Seen) -> Any:
        """Write the next steps' values into the batch."""
        without = torch.from_numpy(np.flatnonzero(~seen.valid))
        for key, value in zip(self.out_keys, seen.values, strict=True):
            batch.set(key, value.index_fill_(0, without, self.fill_value))
        return batch

    def __repr__(self) -> str:
        return f"NextStateReconstructor(keys={self.keys}, fill_value={self.fill_value})"
