"""Rows of stores that followers read, with checks of rows and files."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict

from tests.support.batches import episode_rows


def rows(count: int, start: int = 0, *, length: int = 10) -> TensorDict:
    """Return numbered rows with a wide field; every `length`-th row ends an episode."""
    return episode_rows(count, start, length=length, key="a", wide=_wide)


def _wide(number: torch.Tensor) -> torch.Tensor:
    return (number[:, None] + torch.arange(200)).float()


def check_rows(batch: TensorDict, *, ahead: int = 1) -> None:
    """Assert that every field of every row fits the id of the row."""
    number = batch["id"] - ahead
    assert torch.equal(batch["a"], number)
    assert torch.equal(batch["wide"], _wide(number))
    assert torch.equal(batch["next", "reward"], number[:, None].float())


def contents(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return times, sizes and bytes of all files below a folder, by relative path."""
    found = {}
    for file in sorted(path.rglob("*")):
        stat = file.stat()
        data = file.read_bytes() if file.is_file() else b""
        found[str(file.relative_to(path))] = (stat.st_mtime_ns, stat.st_size, data)
    return found
