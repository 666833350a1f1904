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
from expstore.datasets.download import HUGGING_FACE, RemoteFile, list_hub
from expstore.datasets.episode import Episode, Part, Reader, put_value
from expstore.datasets.kind import Kind, Request
from expstore.datasets.samples import make_walks
from expstore.datasets.source_paths import list_files, parses_source
from expstore.disk.local_path import local_path
from expstore.errors import SchemaError
from expstore.exchange.hdf5 import datasets_in, reading_hdf5, write_hdf5

_TRIAL = re.compile(r"^Trial(\d+)$")
_NAMES = ("observations", "actions", "rewards", "done")
_REPOSITORY = "jdvakil/RoboSet_Sim"
_TASKS = ("MicroOpen", "Knob2Off", "LdoorOpen", "SdoorOpen", "Knob1On")
_HUMAN = "FK1-v4(human)/human_demos_by_task"


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
        MissingExtraError: h5py is not installed.

    Example:
        >>> from expstore.datasets import RobosetReader, import_dataset, make_sample
        >>> source = make_sample("roboset", "door_v2d-v1.h5")
        >>> done = import_dataset(RobosetReader(source), "data.exp")
    """

    format: ClassVar[str] = "roboset"

    @parses_source
    def __init__(self, source: str | Path) -> None:
        self._files = list_files(local_path(source), (".h5", ".hdf5"))

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
                put_value(info, rest.split("/"), values)
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


def _has_trials(file: Any) -> bool:
    trial = next((name for name in file if name.startswith("Trial")), None)
    return trial is not None and set(_NAMES) <= set(file[trial])


def _list_files(request: Request) -> list[RemoteFile]:
    """Return the .h5 files whose path begins with the id."""
    name = request.dataset_id
    return list_hub(
        _REPOSITORY,
        name.rpartition("/")[0],
        request.mirror,
        keep=lambda path: path.startswith(name) and path.endswith(".h5"),
        missing=f"has no file {name}*.h5",
    )


def _make_sample(path: Path) -> None:
    values: dict[str, Array] = {}
    for walk in make_walks():
        columns = {
            "observations": walk.states[:-1],
            "actions": walk.actions,
            "rewards": walk.rewards,
            "done": walk.terminated,
            "time": np.arange(walk.steps) / 10,
            "env_infos/qpos": walk.states[:-1],
        }
        values |= {f"Trial{walk.number}/{name}": column for name, column in columns.items()}
    write_hdf5(path, values)


KIND = Kind(
    reader=RobosetReader,
    files="an .h5 file, or a folder of .h5 files",
    make_sample=_make_sample,
    endings="terminated if the last row of a trial has `done`, otherwise cut",
    recognize=lambda source: source.check_hdf5(_has_trials),
    prefix="roboset",
    buffer="RobosetExperienceReplay",
    ids=[
        *(
            f"DAPG({kind})/{task}_v2d-v1"
            for kind in ("expert", "human")
            for task in ("door", "relocate", "hammer", "pen")
        ),
        *(f"FK1-v4(expert)/FK1_{task}Random_v2d-v4" for task in _TASKS),
        "FK1-v4(human)/human_demos_by_playdata",
        f"{_HUMAN}/human_demo_singleTask_Fixed-v4",
        *(f"{_HUMAN}/FK1_{task}Random_v2d-v4" for task in _TASKS),
    ],
    unknown_id="The dataset_id {} isn't part of the accepted datasets",
    public=f"{HUGGING_FACE}/datasets/{_REPOSITORY}",
    mirror=HUGGING_FACE,
    list_files=_list_files,
)
