"""Read RoboSet's files: HDF5 with one group per trial, as RoboHive's recorder writes them.

Source of the format: https://github.com/vikashplus/robohive (logger) and the files of
https://huggingface.co/datasets/jdvakil/RoboSet_Sim.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from expstore.core.values import Array, Key
from expstore.datasets.episode import Episode, Part, Reader
from expstore.datasets.source_paths import check_exists, parses_source
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import NotFoundError, SchemaError
from expstore.exchange.hdf5 import datasets_in, reading_hdf5

_TRIAL = re.compile(r"^Trial(\d+)$")
_NAMES = ("observations", "actions", "rewards", "done")


class RobosetReader(Reader):
    """Read the trials of RoboSet files as episodes.

    `observations`, `actions` and `rewards` become `observation`, `action` and `next.reward`, `env_infos/*`
    becomes `info.*` and `next.info.*`, and other arrays with one row per step (`time`) keep their names.
    `episode` is the number of the trial in its file, `seed` the number of the file. A trial is terminated if
    `done` is set in its last row; the flags of all rows are stored as `next.terminal`. The files do not
    record the observation after the last step.

    Args:
        source: A file, or a folder of files, read in the order of their names.

    Raises:
        NotFoundError: The file does not exist, or the folder has no .h5 file.
        SchemaError: A file has no trials.
        StorageError: A file is not HDF5, or is damaged.
        ModuleNotFoundError: h5py is not installed.

    Example:
        >>> from expstore.datasets import RobosetReader, import_dataset
        >>> done = import_dataset(RobosetReader("door_v2d-v1.h5"), "data.exp")
    """

    format: ClassVar[str] = "roboset"

    @parses_source
    def __init__(self, source: str | Path) -> None:
        path, disk = local_path(source), ReadingDisk()
        check_exists(path)
        self._files = [path]
        if disk.is_dir(path):
            self._files = [
                path / name for name in sorted(disk.names(path)) if name.endswith((".h5", ".hdf5"))
            ]
            if not self._files:
                raise NotFoundError(f"there is no .h5 file in {path}")

    def parts(self) -> list[Part]:
        """Return the files."""
        return [Part(name=path.name, files=[path]) for path in self._files]

    def count_rows(self, part: Part) -> int:
        """Return the number of steps."""
        with self._open(part) as file:
            return sum(len(file[name].get("rewards", ())) for name in self._trials(part, file))

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the trials in the order of their numbers."""
        seed = self._files.index(Path(part.files[0]))
        with self._open(part) as file:
            for name in self._trials(part, file):
                yield self._episode(file[name], int(name.removeprefix("Trial")), seed)

    def _episode(self, group: Any, number: int, seed: int) -> Episode:
        found: dict[str, Array] = {
            name: one[()] for name, one in datasets_in(group) if one.shape and one.dtype.kind in "biuf"
        }
        if absent := [name for name in _NAMES if name not in found]:
            raise SchemaError(f"Trial{number} has no {', '.join(absent)}")
        count = len(found["rewards"])
        done = found.pop("done").reshape(count) > 0.5
        info: dict[str, Any] = {}
        fields: dict[str | Key, Array] = {
            "episode": np.full(count, number),
            "seed": np.full(count, seed),
            ("next", "terminal"): done[:, None],
        }
        for name, values in found.items():
            group_name, _, rest = name.partition("/")
            if group_name == "env_infos" and rest:
                _put(info, rest, values)
            elif name not in _NAMES:
                fields[tuple(name.split("/"))] = values
        return Episode(
            observation=found["observations"],
            action=found["actions"],
            reward=found["rewards"].reshape(count),
            end="terminated" if done[-1] else "cut",
            info=info,
            fields=fields,
        )

    def _open(self, part: Part) -> Any:
        return reading_hdf5(Path(part.files[0]))

    def _trials(self, part: Part, file: Mapping[str, Any]) -> list[str]:
        names = [name for name in file if _TRIAL.match(name)]
        if not names:
            raise SchemaError(f"{part.files[0]} is not a RoboSet file: it has no group Trial0, Trial1, ...")
        return sorted(names, key=lambda name: int(name.removeprefix("Trial")))


def _put(tree: dict[str, Any], path: str, values: Array) -> None:
    *groups, last = path.split("/")
    for name in groups:
        tree = tree.setdefault(name, {})
    tree[last] = values
