"""Small files of other programs, under the names that examples in docstrings give them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np


def write_named_files(text: str, folder: Path) -> None:
    """Write the files whose names a text quotes.

    Args:
        text: The examples of a docstring.
        folder: The folder that the names are relative to.
    """
    for name, write in FILES.items():
        if f'"{name}"' in text:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder / name)


def _write_sb3(path: Path) -> None:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    buffer = ReplayBuffer(100, spaces.Box(-5, 5, (4,)), spaces.Discrete(2))
    for step in range(100):
        first, following = np.full((1, 4), step / 50), np.full((1, 4), (step + 1) / 50)
        done = np.array([step % 20 == 19])
        buffer.add(first, following, np.zeros((1, 1)), np.ones(1), done, [{}])
    path.write_bytes(pickle.dumps(buffer))


FILES: dict[str, Callable[[Path], None]] = {"replay_buffer.pkl": _write_sb3}
