"""Stores to be damaged: small ones in three shards, with rows that follow from their number.

Used by the tests of checks, checksums, repair and damaged files. It breaks nothing by itself but single bits.
"""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import files
from expstore.storages import columns

__all__ = [
    "BLOCK",
    "CAPACITY",
    "ROWS",
    "SLOTS",
    "batch",
    "fill",
    "flip",
    "in_child",
    "make_sound",
    "without_disk",
]

BLOCK = 4096
CAPACITY, SLOTS, ROWS = 5000, 9096, 12_000


def without_disk(monkeypatch: pytest.MonkeyPatch, *, shard_rows: int = BLOCK) -> None:
    """Sync nothing for real, and let a ring have several shards."""
    monkeypatch.setattr(files, "_sync_data", os.fstat)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setattr(columns, "SHARD_ROWS", shard_rows)


def make_sound(factory: pytest.TempPathFactory) -> Path:
    """Make a ring of three shards that has turned: ids 7001 to 12,000, the newest in slots 0 to 2903."""
    path = factory.mktemp("sound") / "sound.exp"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(columns, "SHARD_ROWS", BLOCK)
        fill(path)
    return path


def batch(count: int, first: int) -> TensorDict:
    """Rows whose values follow from a running number; one flag is False for ever."""
    number = torch.arange(first, first + count)
    return TensorDict(
        {
            "number": number,
            "wide": (number[:, None] * 7 + torch.arange(40)).to(torch.uint8),
            "never": torch.zeros(count, 1, dtype=torch.bool),
            "next": {
                "reward": number[:, None].float() / 8,
                "terminated": (number % 1000 == 999)[:, None],
            },
        },
        [count],
    )


def fill(path: Path, *, capacity: int | None = CAPACITY, rows: int = ROWS) -> None:
    """Make a store of these rows, of which two are changed and two have a priority; close it."""
    with expstore.open(path, capacity=capacity, seed=1) as rb:
        for first in range(0, rows, 1500):
            rb.extend(batch(min(1500, rows - first), first), source="arm")
        rb[[0, 1]] = batch(2, 77)
        rb.update_priority([1, 2], 3.0)
        rb.sql("SELECT 1")


def flip(path: Path, byte: int, bit: int) -> None:
    """Turn one bit of a file."""
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ 1 << bit]))


def in_child(work: Callable[[], list[str]]) -> list[str]:
    """Run `work` in a fork, where a signal is no more than another fault; return the faults."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(110)
        try:
            torch.set_num_threads(1)
            faults = work()
        except BaseException:
            faults = [traceback.format_exc()]
        os.write(write_end, "\0".join(faults).encode()[:60_000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"the child ended with {status}, after: {told}"
    return told.split("\0") if told else []
