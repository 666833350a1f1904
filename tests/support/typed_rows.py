"""Rows with a field of every dtype, for tests of exports, imports and other readers of a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

import expstore
from tests.support.batches import counted_frames, episode_rows
from tests.support.stores import extend_all

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
]


def columns_of_every_dtype(number: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return `number % 100` in every dtype, by the dtype's name."""
    return {str(dtype).removeprefix("torch."): (number % 100).to(dtype) for dtype in DTYPES}


def typed_rows(count: int, start: int = 0, *, every: int = 9) -> TensorDict:
    """Return numbered rows whose next frame is the frame of the following row. Batch size `[count]`.

    `number`, `frame` u8[40, 40], under `all` and `wide` a field of every dtype, of shapes [] and [2, 3], and
    under `next`: `frame`, `odd` f32[3] with negative zeros, NaNs and infinities, `reward` f32[1],
    `terminated` and `truncated` bool[1].

    Args:
        count: Number of rows.
        start: Number of the first row.
        every: Every `every`-th row terminates.
    """
    data = episode_rows(
        count,
        start,
        length=every,
        frame=lambda number: counted_frames(number, 40, 40),
        all=columns_of_every_dtype,
        wide=lambda number: {
            name: (number[:, None, None] % torch.arange(1, 7).reshape(2, 3)).to(getattr(torch, name))
            for name in columns_of_every_dtype(number)
        },
    )
    odd = torch.tensor([0x7FC00001, -0x3FFFFF, 0x7F800000], dtype=torch.int32).view(torch.float32)
    data["next", "frame"] = data["frame"] + 1
    data["next", "odd"] = torch.where(data["number"][:, None] % 3 == 0, -0.0, odd)
    return data


def typed_buffer(path: Path, count: int, **options: Any) -> Any:
    """Open a store and append typed rows, 50 at a time; options are those of `expstore.open`."""
    parts = (typed_rows(min(50, count - first), first) for first in range(0, count, 50))
    return extend_all(expstore.open(path, seed=0, **options), *parts)
