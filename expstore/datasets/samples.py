"""Random walks as episodes, and writers of small files: what samples of data sets are made of.

Used by the modules of `expstore.datasets.kinds`, whose `make_sample` writes files of their format.
"""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.values import Array
from expstore.disk.files import Disk

#: Steps of the episodes.
_LENGTHS = (20, 32, 24)
_SQUARE = 8


class Walk:
    """An episode: a random walk in three dimensions. The second of three ends at a time limit.

    Args:
        number: Number of the episode, from 0.

    Attributes:
        states: The positions before each step and after the last one. Shape `(steps + 1, 3)`, float32.
        actions: The steps. Shape `(steps, 3)`, float32.
        rewards: Minus the distance from the start. Shape `(steps,)`, float32.
        terminated: Whether the episode ends by each step. Shape `(steps,)`, bool.
        truncated: Whether each step reaches the time limit. Shape `(steps,)`, bool.
    """

    def __init__(self, number: int) -> None:
        steps = _LENGTHS[number]
        random = np.random.default_rng(number)
        self.number, self.steps = number, steps
        self.actions = random.normal(size=(steps, 3)).astype(np.float32)
        self.states = np.concatenate([np.zeros((1, 3), np.float32), np.cumsum(self.actions, 0)])
        self.rewards = -np.linalg.norm(self.states[1:], axis=1).astype(np.float32)
        last, is_terminal = np.arange(steps) == steps - 1, number != 1
        self.terminated, self.truncated = last & is_terminal, last & (not is_terminal)

    def draw_frames(self, size: int) -> Array:
        """Return a picture of each position. Shape `(steps + 1, size, size, 3)`, uint8."""
        pixels = np.zeros((self.steps + 1, size, size, 3), np.uint8)
        places = (np.abs(self.states[:, :2]) * 4 % (size - _SQUARE)).astype(int).tolist()
        for picture, (row, column) in zip(pixels, places, strict=True):
            picture[row : row + _SQUARE, column : column + _SQUARE] = 255
        return pixels


def make_walks() -> list[Walk]:
    """Return the episodes of a sample."""
    return [Walk(number) for number in range(len(_LENGTHS))]


def write_file(path: Path, data: bytes) -> None:
    """Write a file, and create its folder."""
    disk = Disk()
    disk.make_dir(path.parent)
    disk.put(path, data)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON document."""
    write_file(path, json.dumps(value).encode())


def encode_npy(value: Any) -> bytes:
    """Return a .npy file; an object that is no array is pickled."""
    file = io.BytesIO()
    array = value if isinstance(value, np.ndarray) else np.array(value, object)
    np.lib.format.write_array(file, array)
    return file.getvalue()


def encode_npz(arrays: Mapping[str, Array]) -> bytes:
    """Return a .npz file of arrays by name."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, array in arrays.items():
            archive.writestr(f"{name}.npy", encode_npy(array))
    return file.getvalue()


def encode_tar(members: Mapping[str, bytes]) -> bytes:
    """Return a tar archive of files by name."""
    file = io.BytesIO()
    with tarfile.TarFile(fileobj=file, mode="w") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()
