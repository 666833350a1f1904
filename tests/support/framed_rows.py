"""Rows with frames, for tests of packed columns."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from tests.support.batches import noise_frames, numbered_rows


def framed_rows(
    count: int,
    start: int = 0,
    *,
    shape: tuple[int, ...],
    every: int = 7,
    step: int | None = None,
    **fields: Any,
) -> TensorDict:
    """Return numbered rows whose next frame is the frame of the following row. Batch size `[count]`.

    `number`, `frame` u8, and under `next`: `frame`, `reward` f32[1] (the number) and `done` bool[1].

    Args:
        count: Number of rows.
        start: Number of the first row.
        shape: Shape of a frame; frames are noise.
        every: Every `every`-th step is done.
        step: Step of the first row; None uses its number.
        fields: Further fields, as in `numbered_rows`.
    """
    number = torch.arange(start, start + count)
    steps = number if step is None else number - start + step
    after = {
        "frame": noise_frames(number + 1, *shape),
        "reward": number[:, None].float(),
        "done": (steps % every == every - 1)[:, None],
    }
    return numbered_rows(count, start, frame=noise_frames(number, *shape), **fields, next=after)


def half_noise_frames(numbers: Any) -> torch.Tensor:
    """Return frames of half noise and half zeros, which compress by half. uint8 `[n, 8, 16]`."""
    noise = noise_frames(numbers, 4, 16)
    return torch.cat([noise, torch.zeros_like(noise)], 1)
