"""The formats of data sets by name, and how a source is recognised.

Used by the command line. It loads a reader's module when that reader is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from expstore import datasets
from expstore.datasets.atari_dqn import torchrl_checkpoints
from expstore.datasets.episode import Reader
from expstore.datasets.tensordict_folder import is_tensordict_folder
from expstore.disk.files import ReadingDisk

__all__ = ["DATASETS", "WITH_CAPACITY", "data_set_format", "episodes_format", "make_reader"]

_READERS = {
    "atari-dqn": "AtariDQNReader",
    "d4rl": "D4RLReader",
    "gen-dgrl": "GenDGRLReader",
    "hdf5": "Hdf5EpisodesReader",
    "lerobot": "LeRobotReader",
    "minari": "MinariReader",
    "openml": "OpenMLReader",
    "openx": "OpenXReader",
    "rlds": "RLDSReader",
    "robomimic": "RobomimicReader",
    "roboset": "RobosetReader",
    "tensordict": "TensorDictReader",
    "vd4rl": "VD4RLReader",
}

#: Names of the formats that are always read here. "hdf5" is, too, if the file has a group per episode.
DATASETS = tuple(name for name in _READERS if name != "hdf5")
#: Those whose readers take a capacity.
WITH_CAPACITY = ("minari",)


def make_reader(name: str, source: Path, **options: Any) -> Reader:
    """Return a reader of a source.

    Args:
        name: Of the format.
        source: File or folder.
        options: Of the reader.

    Raises:
        NotFoundError: The source does not exist.
        SchemaError: The source does not have this format.
    """
    make: Callable[..., Reader] = getattr(datasets, _READERS[name])
    return make(source, **options)


def data_set_format(source: Path) -> str | None:
    """Return the format of a data set that can be told from the names of its files; None: another one."""
    disk = ReadingDisk()
    if not disk.is_dir(source):
        return {".arff": "openml", ".xz": "gen-dgrl"}.get(source.suffix.lower())
    for folder in (source, source / "replay_logs"):
        if disk.is_dir(folder) and any(
            name.startswith("$store$_observation_ckpt.") for name in disk.names(folder)
        ):
            return "atari-dqn"
    if torchrl_checkpoints(source):
        return "atari-dqn"
    if disk.exists(source / "meta" / "info.json"):
        return "lerobot"
    if disk.exists(source / "features.json"):
        return "rlds"
    if any(name.endswith(".data.pickle") for name in disk.names(source)):
        return "openx"
    return "tensordict" if is_tensordict_folder(source) else None


def episodes_format(source: Path) -> str | None:
    """Return the format of an HDF5 file with a group per episode: "robomimic", "roboset" or "hdf5".

    Returns:
        None: the file has a row per transition.

    Raises:
        NotFoundError: There is no such file.
        StorageError: It is not an HDF5 file.
    """
    from expstore.datasets.hdf5_episodes import has_episodes, is_robomimic
    from expstore.exchange.hdf5 import reading_hdf5

    with reading_hdf5(source) as file:
        if is_robomimic(file):
            return "robomimic"
        trial = next((name for name in file if name.startswith("Trial")), None)
        if trial is not None and {"observations", "actions", "rewards", "done"} <= set(file[trial]):
            return "roboset"
        return "hdf5" if has_episodes(file) else None
