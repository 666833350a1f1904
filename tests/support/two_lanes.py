"""Rows of two lanes whose next frames are frames of later rows, for tests of deduplication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.storages.format.layout import ColumnLayout
from tests.support.stores import open_zarr

#: Capacity of the rings.
CAPACITY = 60


def after(numbers: Any) -> Any:
    """Return the number of the next frame: of two lanes, sometimes of another episode."""
    numbers = np.asarray(numbers)
    return np.where(numbers % 17 == 5, 1_000_000 + numbers, numbers + 2)


@dataclass(frozen=True)
class TwoLanes:
    """Such rows, and stores of them.

    Args:
        frames: Function that returns frames for running numbers.
        layout: Layout of the stores.
    """

    frames: Callable[[Any], torch.Tensor]
    layout: ColumnLayout

    def batch(self, first: int, count: int) -> TensorDict:
        numbers = np.arange(first, first + count)
        following = {"frame": self.frames(after(numbers)), "done": torch.zeros(count, 1, dtype=torch.bool)}
        values = {"frame": self.frames(numbers), "next": following, "number": torch.from_numpy(numbers)}
        return TensorDict(values, [count])

    def parts(self, count: int, size: int = 20) -> Iterator[TensorDict]:
        """Yield `count` rows, `size` at a time."""
        for first in range(0, count, size):
            yield self.batch(first, min(size, count - first))

    def buffer(
        self, path: Path, capacity: int | None = CAPACITY, layout: ColumnLayout | None = None
    ) -> TensorDictReplayBuffer:
        return open_zarr(path, capacity, layout=layout or self.layout)

    def right(self, data: TensorDict) -> bool:
        """Return whether rows have the frames that follow from their numbers."""
        numbers = data["number"]
        both = torch.equal(data["frame"], self.frames(numbers))
        return both and torch.equal(data["next", "frame"], self.frames(after(numbers)))

    def numbers_in(self, rb: Any) -> list[int]:
        """Return the numbers of all rows, after checking the rows as a whole and column by column."""
        data = rb[:]
        assert self.right(data)
        ids = rb.storage.window.ids()
        for place, entry in enumerate(rb.storage.schema.fields):
            alone = torch.from_numpy(rb.storage.read(ids, [place])[0])
            assert torch.equal(alone, torch.from_numpy(rb.storage.read(ids)[place])), entry
        return sorted(data["number"].tolist())
