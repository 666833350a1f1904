"""Stores with variable-length rows, and batches for them; shared by the tests of such rows."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import NonTensorStack, TensorDict, is_non_tensor

from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.schema.row_traits import RowTraits
from expstore.storages.memory import MemoryStorage


class TypedMemory(MemoryStorage):
    """Rows in RAM whose values have types, like those of a store on disk."""

    row_traits = RowTraits(variable=True)


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def rollouts(first: int, count: int) -> TensorDict:
    """Return rows that follow from their number: prompts, tokens, images of several sizes, dicts."""
    numbers = range(first, first + count)
    return TensorDict(
        {
            "prompt": NonTensorStack(*[None if n % 5 == 4 else f"prompt {n % 7}" for n in numbers]),
            "tokens": jagged([torch.arange(n, n + n % 6, dtype=torch.int32) for n in numbers]),
            "image": NonTensorStack(*[torch.full((1 + n % 2, 2 + n % 3), n) for n in numbers]),
            "facts": NonTensorStack(*[{"n": n, "tags": ["é"] * (n % 3)} for n in numbers]),
            "number": torch.arange(first, first + count),
            "version": torch.arange(first, first + count) // 10,
            "next": {
                "text": NonTensorStack(*[bytes([n % 256]) * (n % 4) for n in numbers]),
                "reward": torch.arange(first, first + count)[:, None].float(),
                "done": torch.arange(first, first + count)[:, None] % 10 == 9,
            },
        },
        [count],
    )


def plain(batch: Any) -> list[dict[str, Any]]:
    """Return rows as dicts of lists, texts and numbers, with only the fields."""
    return [_plain(row) for row in batch.unbind(0)]


def _plain(row: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        if is_non_tensor(value) or isinstance(value, torch.Tensor):
            value = value.data
            found[name] = value.tolist() if isinstance(value, torch.Tensor) else value
        else:
            found |= {f"{name}.{inner}": one for inner, one in _plain(value).items()}
    return {name: value for name, value in found.items() if name not in ("index", "id", "priority_weight")}


def buffer(**options: Any) -> TensorDictReplayBuffer:
    """Return a buffer of 40 rows in RAM."""
    rb = TensorDictReplayBuffer(storage=TypedMemory(100, seed=3), batch_size=8, **options)
    for first in range(0, 40, 10):
        rb.extend(rollouts(first, 10))
    return rb
