"""The formats of data sets by name, and how a source is recognised.

Used by the command line. It loads a reader's module when that reader is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from expstore import datasets
from expstore.datasets.episode import Reader
from expstore.disk.files import ReadingDisk

__all__ = ["DATASETS", "is_atari_dqn", "make_reader"]

_READERS = {"atari-dqn": "AtariDQNReader", "d4rl": "D4RLReader", "roboset": "RobosetReader"}

#: Names of the formats.
DATASETS = tuple(_READERS)


def make_reader(name: str, source: Path) -> Reader:
    """Return a reader of a source.

    Raises:
        NotFoundError: The source does not exist.
        SchemaError: The source does not have this format.
    """
    make: Callable[[Path], Reader] = getattr(datasets, _READERS[name])
    return make(source)


def is_atari_dqn(source: Path) -> bool:
    """Return whether a path is a folder of checkpoints of the Atari DQN data set, or of a run."""
    disk = ReadingDisk()
    return any(
        name.startswith("$store$_observation_ckpt.")
        for folder in (source, source / "replay_logs")
        if disk.is_dir(folder)
        for name in disk.names(folder)
    )
