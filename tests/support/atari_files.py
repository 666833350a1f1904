"""Atari DQN files in Dopamine's format: a small ring buffer with paddings, dumps and invalid ranges.

Used by tests of the reader. Source: `circular_replay_buffer.py` of Dopamine in 2019, and the
`logged_replay_buffer.py` of batch_rl.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

STACK = 4


@dataclass(frozen=True)
class Step:
    """Observation and action of an agent."""

    observation: np.ndarray[Any, Any]
    action: int
    reward: float
    terminal: bool


@dataclass
class LoggedRing:
    """A ring buffer of frames that dumps its arrays once per lap.

    Args:
        folder: Folder for dumps.
        slots: Number of rows of the ring.
        shape: Shape of a frame.
    """

    folder: Path
    slots: int = 50
    shape: tuple[int, int] = (84, 84)
    added: int = 0
    dumps: int = 0
    lost_rounds: int = 0
    invalid: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.columns = {
            "observation": np.zeros((self.slots, *self.shape), np.uint8),
            "action": np.zeros(self.slots, np.int32),
            "reward": np.zeros(self.slots, np.float32),
            "terminal": np.zeros(self.slots, np.uint8),
        }

    def _put(self, observation: Any, action: int, reward: float, terminal: bool) -> None:
        slot = self.added % self.slots
        given = (observation, action, reward, terminal)
        for column, value in zip(self.columns.values(), given, strict=True):
            column[slot] = value
        self.added += 1
        cursor = self.added % self.slots
        self.invalid = [(cursor - 1 + n) % self.slots for n in range(STACK + 1)]

    def add(self, step: Step) -> None:
        before = self.added % self.slots
        if not self.added or self.columns["terminal"][(self.added - 1) % self.slots]:
            for _ in range(STACK - 1):
                self._put(0, 0, 0.0, False)
        self._put(step.observation, step.action, step.reward, step.terminal)
        cursor = self.added % self.slots
        if cursor == self.slots - 1:
            self.dump()
        elif cursor < before != self.slots - 1:
            self.lost_rounds += 1

    def dump(self) -> None:
        arrays = {f"$store$_{name}": column for name, column in self.columns.items()}
        arrays |= {"add_count": np.array(self.added), "invalid_range": np.array(self.invalid)}
        for name, array in arrays.items():
            path = self.folder / f"{name}_ckpt.{self.dumps}.gz"
            with path.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as stream:
                np.save(stream, array, allow_pickle=False)
        self.dumps += 1

    def finish(self) -> None:
        """Dump the rest, like an agent at its end: `add_count` is the cursor then."""
        added, self.added = self.added, self.added % self.slots
        self.dump()
        self.added = added


def play(ring: LoggedRing, steps: int, seed: int, *, shortest: int = 4, longest: int = 16) -> list[Step]:
    """Play episodes into a ring for a number of steps; return all steps."""
    random = np.random.default_rng(seed)
    played: list[Step] = []
    while len(played) < steps:
        length = int(random.integers(shortest, longest + 1))
        for number in range(length):
            frame = np.full(ring.shape, 1 + len(played) % 250, np.uint8)
            done = number == length - 1
            step = Step(frame, int(random.integers(6)), float(random.integers(-1, 2)), done)
            played.append(step)
            ring.add(step)
    return played
