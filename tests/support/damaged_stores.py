"""Stores for damage tests: small, in three shards, with rows that follow from their numbers.

Used by tests of checks, checksums, repair and damaged files. `Broken` damages copies of a given store, and
reports errors of reading and repairing them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.core import tuning
from expstore.errors import CorruptionError
from expstore.maintenance import repair, verify
from tests.support.stores import copy_folder

BLOCK = 4096
CAPACITY, SLOTS, ROWS = 5000, 9096, 12_000


def make_sound(factory: pytest.TempPathFactory) -> Path:
    """Make a ring of three shards that has wrapped: ids 7001 to 12,000, the newest in slots 0 to 2903."""
    path = factory.mktemp("sound") / "sound.exp"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "FLAT_SHARD_ROWS", BLOCK)
        fill(path)
    return path


def batch(count: int, first: int) -> TensorDict:
    """Return rows whose values follow from a running number; one flag is always False."""
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
    """Make a store of these rows, two of them changed and two with a priority; close it."""
    with expstore.open(path, capacity=capacity, seed=1) as rb:
        for first in range(0, rows, 1500):
            rb.extend(batch(min(1500, rows - first), first), source="arm")
        rb[[0, 1]] = batch(2, 77)
        rb.update_priority([1, 2], 3.0)
        rb.sql("SELECT 1")


def flip(path: Path, byte: int, bit: int) -> None:
    """Flip one bit of a file."""
    with path.open("r+b") as file:
        file.seek(byte)
        old = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([old ^ 1 << bit]))


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file; return a description of the damage."""
    size, act = path.stat().st_size, rng.random()
    if act < 0.1:
        path.unlink()
        return f"{path} removed"
    if act < 0.2:
        os.truncate(path, at := rng.randrange(size))
        return f"{path} cut to {at}"
    if act < 0.3:
        at, noise = rng.randrange(size), rng.randbytes(40)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(noise)
        return f"noise in {path} at {at}"
    flip(path, at := rng.randrange(size), bit := rng.randrange(8))
    return f"bit {bit} of byte {at} of {path}"


def lost_ids(store: Path) -> set[int]:
    """Return the rows that findings name, as numbers counted from 0."""
    runs = [run for finding in verify(store) for run in finding.ids]
    return {row for first, last in runs for row in range(first - 1, last)}


@dataclass(frozen=True)
class Broken:
    """Copies of a store, each with one damaged file.

    Args:
        sound: The undamaged store.
        columns: Folders in `columns/`; one of their files is damaged.
        right: Function that returns whether rows are as written.
        numbers: Numbers of all readable rows.
    """

    sound: Path
    columns: Sequence[str]
    right: Callable[[TensorDict], bool]
    numbers: range

    def _damaged(self, folder: Path, count: int, seed: int) -> Iterator[tuple[Path, str]]:
        rng = random.Random(seed)
        for number in range(count):
            copy = folder / f"broken-{number}.exp"
            copy_folder(self.sound, copy)
            held = [path for name in self.columns for path in (copy / "columns" / name).iterdir()]
            yield copy, damage(rng.choice(sorted(path for path in held if path.is_file())), rng)
            shutil.rmtree(copy)

    def faults(self, folder: Path, count: int, seed: int) -> list[str]:
        """Damage `count` copies and read every row in each mode; return the errors."""
        found, refused = [], 0
        for copy, done in self._damaged(folder, count, seed):
            for mode in ("r", "a"):
                try:
                    with expstore.open(copy, mode=mode) as rb:
                        for place in range(0, len(rb), 10):
                            try:
                                if not self.right(rb[place : place + 10]):
                                    found.append(f"{done}: rows read wrong with mode {mode}")
                            except CorruptionError:
                                refused += 1
                except CorruptionError:
                    refused += 1
                except Exception as exc:
                    found.append(f"{done}: mode {mode} raises {exc!r}")
        return found if refused > count // 4 else [*found, f"only {refused} reads were refused"]

    def repairs(self, folder: Path, count: int, seed: int) -> list[str]:
        """Damage and repair `count` copies; return the errors."""
        found = []
        for copy, done in self._damaged(folder, count, seed):
            named = lost_ids(copy)
            repair(copy, drop_damaged=True)
            found += [f"{done}: left {finding}" for finding in verify(copy)]
            for mode in ("r", "a"):
                with expstore.open(copy, mode=mode) as rb:
                    data = rb[:]
                    if set(data["number"].tolist()) != set(self.numbers) - named:
                        found.append(f"{done}: other rows are lost than were named")
                    if not self.right(data):
                        found.append(f"{done}: rows read wrong with mode {mode}")
        return found


def in_child(work: Callable[[], list[str]]) -> list[str]:
    """Run `work` in a fork, where a signal is reported as another error; return the errors."""
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
