"""Users' storages, writers and samplers, derived from the abstract classes, work in buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from expstore import (
    MemoryStorage,
    ReplayBuffer,
    RoundRobinWriter,
    Sampler,
    Storage,
    TensorDictReplayBuffer,
    Writer,
)
from expstore.core.values import Array, IntArray
from tests.support.batches import numbered_rows


class EverySecond(Writer):
    """Take in the rows at even places of a batch."""

    def write(
        self, storage: Storage, columns: Sequence[Array], steps: Any, *, source: str | None, info: str
    ) -> IntArray:
        kept = np.arange(0, steps.count, 2)
        found = np.full(steps.count, -1)
        chosen = [np.ascontiguousarray(column[kept]) for column in columns]
        found[kept] = RoundRobinWriter().write(
            storage, chosen, type(steps)(kept.size), source=source, info=info
        )
        return found


class Doubled(MemoryStorage):
    """Keep numbers, and hand out twice their value."""

    kind = "doubled"

    def take(self, slots: IntArray, places: Sequence[int] | None) -> list[Array]:
        return [2 * column for column in super().take(slots, places)]


class Oldest(Sampler):
    """Draw the oldest rows, as a sampler for TorchRL would."""

    def __init__(self) -> None:
        self.told: list[list[int]] = []

    def sample(self, storage: Storage, batch_size: int) -> tuple[torch.Tensor, dict[str, Any]]:  # type: ignore[override]
        return torch.arange(batch_size) % len(storage), {"age": torch.zeros(batch_size)}

    def extend(self, index: torch.Tensor) -> None:
        self.told.append(index.tolist())


def test_a_custom_writer() -> None:
    with ReplayBuffer(storage=MemoryStorage(10), writer=EverySecond(), batch_size=3) as rb:
        assert rb.extend(numbered_rows(5, key="a")).tolist() == [0, -1, 1, -1, 2]
        assert rb[:]["a"].tolist() == [0, 2, 4]
        assert rb.extend(numbered_rows(3, key="a"), return_ids=True).tolist() == [4, -1, 5]


def test_a_custom_storage() -> None:
    with ReplayBuffer(storage=Doubled(10), batch_size=3) as rb:
        rb.extend(numbered_rows(5, key="a"))
        assert rb[:]["a"].tolist() == [0, 2, 4, 6, 8]
        assert rb.stats()["storage"] == "doubled"


def test_a_sampler_written_for_torchrl() -> None:
    sampler = Oldest()
    with TensorDictReplayBuffer(storage=MemoryStorage(10), sampler=sampler, batch_size=3) as rb:
        rb.extend(numbered_rows(5, key="a"))
        batch = rb.sample()
        assert batch["a"].tolist() == batch["index"].tolist() == [0, 1, 2]
        assert batch["age"].tolist() == [0, 0, 0]
        assert rb.sampler is sampler
        assert sampler.told == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("name", ["storage", "sampler", "writer"])
def test_parts_may_be_made_by_functions_and_must_be_parts(name: str) -> None:
    made = {"storage": lambda: MemoryStorage(7), "sampler": Oldest, "writer": EverySecond}[name]
    with ReplayBuffer(**{name: made}, batch_size=2) as rb:
        rb.extend(numbered_rows(4, key="a"))
        assert len(rb.sample()) == 2
    with pytest.raises(TypeError, match=r"got (\[\]|list)"):
        ReplayBuffer(**{name: []})
