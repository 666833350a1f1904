"""The formats of data sets by name, and the detection of a source's format.

Used by the command line. A reader's module is imported when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from expstore import datasets
from expstore.data.memory_maps import is_tensordict_folder
from expstore.datasets.atari_dqn import torchrl_checkpoints
from expstore.datasets.episode import Reader
from expstore.datasets.recognition import ARCHIVES, archive_format, folder_format
from expstore.disk.files import ReadingDisk
from expstore.disk.source_links import check_links

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

#: Names of formats that this package always reads. It also reads "hdf5" files with one group per episode.
DATASETS = tuple(name for name in _READERS if name != "hdf5")
#: Formats whose readers accept a capacity.
WITH_CAPACITY = ("minari",)


def make_reader(name: str, source: Path, **options: Any) -> Reader:
    """Return a reader of a source.

    Args:
        name: Name of the format.
        source: File or folder.
        options: Options of the reader.

    Raises:
        NotFoundError: The source does not exist.
        SchemaError: The source does not have this format.
    """
    make: Callable[..., Reader] = getattr(datasets, _READERS[name])
    return make(source, **options)


def data_set_format(source: Path) -> str | None:
    """Return the format of a data set; None if the source is a plain file of arrays."""
    disk = ReadingDisk()
    if not disk.is_dir(source):
        if source.name.lower().endswith(ARCHIVES) and disk.exists(source):
            return archive_format(source)
        return {".arff": "openml", ".xz": "gen-dgrl"}.get(source.suffix.lower())
    check_links(source)
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
    if is_tensordict_folder(source):
        return "tensordict"
    return None if disk.exists(source / "metadata.json") else folder_format(source)
