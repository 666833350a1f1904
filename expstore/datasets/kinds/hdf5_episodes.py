"""Read HDF5 files with one group per episode: robomimic, LIBERO, d3rlpy, and similar layouts.

Source of the formats: https://robomimic.github.io/docs/datasets/overview.html, the files of LIBERO, which
have the same layout without `next_obs`, and `d3rlpy.dataset.io` (2.1), which numbers arrays instead of
groups.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from expstore.core.values import Array, Key
from expstore.datasets.episode import End, Episode, Part, Reader, put_value
from expstore.datasets.kind import Kind
from expstore.datasets.samples import make_walks
from expstore.disk.local_path import local_path
from expstore.errors import SchemaError
from expstore.exchange.flat_files import ABOUT
from expstore.exchange.foreign_rows import SYNONYMS
from expstore.exchange.hdf5 import datasets_in, find_episodes, members, reading_hdf5, write_hdf5

_SLAB_BYTES = 16 << 20

#: Names of the arrays of an episode, by meaning. The first name that an episode has is used.
_NAMES = {
    "observation": SYNONYMS[("observation",)],
    "next": SYNONYMS["next", "observation"],
    "action": SYNONYMS[("action",)],
    "reward": SYNONYMS["next", "reward"],
    "terminated": SYNONYMS["next", "terminated"],
    "truncated": SYNONYMS["next", "truncated"],
    "done": SYNONYMS["next", "done"],
    "info": (*SYNONYMS[("info",)], "env_infos"),
}
#: The flags that end an episode. Some files have them as attributes of its group.
_FLAGS = ("terminated", "truncated", "done")


class _GroupedReader(Reader):
    """Base class of readers of files with one group per episode."""

    def __init__(self, source: str | Path) -> None:
        self._path = local_path(source)
        with reading_hdf5(self._path) as file:
            self._names = self._find(file)
            self._facts = self._read_facts(file)
            self._notes = self._describe(self._arrays(file, self._names[0]))

    def _find(self, file: Any) -> list[str]:
        """Return the names of the episodes in their order."""
        raise NotImplementedError

    def _arrays(self, file: Any, name: str) -> dict[str, Any]:
        """Return the arrays of an episode by path."""
        return dict(datasets_in(file[name]))

    def _read_facts(self, file: Any) -> dict[str, Any]:
        return {name: _plain(value) for name, value in file.attrs.items()}

    def _episode_facts(self, file: Any, name: str) -> dict[str, Any]:
        return {key: _plain(value) for key, value in file[name].attrs.items()}

    def _end(self, found: Mapping[str, Any], steps: int) -> End:
        """Return how an episode ends, judging by its last flags."""
        if _last(found.get("terminated"), steps):
            return "terminated"
        if _last(found.get("truncated"), steps):
            return "truncated"
        # If a file has only `dones`, the reason of an end is unknown; done means terminated, as in old Gym
        # versions.
        return "terminated" if _last(found.get("done"), steps) else "cut"

    def parts(self) -> list[Part]:
        """Return the file."""
        return [Part(name=self._path.name, files=[self._path])]

    def facts(self) -> Mapping[str, Any]:
        """Return the attributes of the file."""
        return {self.format: self._facts} if self._facts else {}

    def notes(self) -> list[str]:
        """Return which arrays are left out."""
        return self._notes

    def count_rows(self, part: Part) -> int:
        """Return the number of steps."""
        with reading_hdf5(self._path) as file:
            return sum(_steps(name, _sort(self._arrays(file, name))) for name in self._names)

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the episodes, long ones in pieces of about 16 MB."""
        with reading_hdf5(self._path) as file:
            for number, name in enumerate(self._names):
                yield from self._pieces(file, name, number)

    def _pieces(self, file: Any, name: str, number: int) -> Iterator[Episode]:
        arrays = self._arrays(file, name)
        found = _sort(arrays)
        steps = _steps(name, found)
        facts = self._episode_facts(file, name)
        flags = {kind: facts[one] for kind in _FLAGS for one in _NAMES[kind] if one in facts}
        end = self._end(
            found | {kind: np.asarray(flag) for kind, flag in flags.items() if kind not in found}, steps
        )
        row_bytes = sum(one.dtype.itemsize * math.prod(one.shape[1:]) for one in arrays.values())
        size = max(1, _SLAB_BYTES // max(1, row_bytes))
        for start in range(0, steps, size):
            stop = min(start + size, steps)
            yield self._piece(name, found, number, steps, (start, stop), end, facts)

    def _piece(
        self,
        name: str,
        found: Mapping[str, Any],
        number: int,
        steps: int,
        rows: tuple[int, int],
        end: End,
        facts: Mapping[str, Any],
    ) -> Episode:
        start, stop = rows
        last = stop == steps
        fields: dict[str | Key, Array] = {"episode": np.full(stop - start, number, np.int64)}
        for path, array in found["other"].items():
            key = tuple(path.split("/"))
            if len(array) == steps:
                fields[key] = array[start:stop]
        terminal = found.get("terminated", found.get("done"))
        if terminal is not None and terminal.shape:
            fields["next", "terminal"] = np.asarray(terminal[start:stop]).reshape(stop - start, -1) > 0.5
        observation = _read(found["observation"], start, stop + 1)
        after = found.get("next")
        if last and after is not None:
            observation = _append_last(observation, _read(after, steps - 1, steps), stop - start)
        reward = found.get("reward")
        return Episode(
            observation=observation,
            action=_read(found["action"], start, stop),
            reward=None if reward is None else np.asarray(reward[start:stop]).reshape(stop - start),
            end=end if last else "open",
            info=_read(found["info"], start, stop + 1) if found["info"] is not None else {},
            fields=fields,
            facts=facts,
        )

    def _describe(self, arrays: Mapping[str, Any]) -> list[str]:
        found = _sort(arrays)
        steps = _steps(self._names[0], found)
        notes = [f"{path!r} is not numeric and is left out" for path in found["text"]]
        return notes + [
            f"{path!r} does not have one row per step and is left out"
            for path, array in found["other"].items()
            if len(array) != steps
        ]


class Hdf5EpisodesReader(_GroupedReader):
    """Read a file with one group per episode, or with numbered arrays, as d3rlpy 2.1 writes.

    - `observations`, `observation` or `obs`: `observation`, T or T + 1 rows. The last row of
      `next_observations` or `next_obs` is the observation after the last step.
    - `actions`, `action`: `action`. `rewards`, `reward`: `("next", "reward")`.
    - An episode is terminated if the last row of `terminals`, `terminations` or `terminated` is set,
      otherwise truncated if that of `timeouts`, `truncations` or `truncated` is set; without these, `dones`
      means terminated. Flags in earlier rows do not end the episode; the flags of all rows are
      `next.terminal`.
    - `infos/*`, `env_infos/*`: `info.*` and `next.info.*`. Other arrays with one row per step keep their
      names; other values and text are left out.
    - `episode`: number of the episode, from 0. Attributes of a group are annotations of its episode.

    Groups are called `Trial0`, `episode_0`, `demo_0` and the like, or are plain numbers, at the top of the
    file or in one group there.

    Args:
        source: The file.

    Raises:
        NotFoundError: The file does not exist.
        StorageError: The file is not an HDF5 file, or is damaged.
        SchemaError: The file has no group per episode, or an episode lacks observations or actions.
        MissingExtraError: h5py is not installed.

    Example:
        >>> from expstore.datasets import Hdf5EpisodesReader, import_dataset, make_sample
        >>> source = make_sample("hdf5", "episodes.hdf5")
        >>> done = import_dataset(Hdf5EpisodesReader(source), "data.exp")
    """

    format: ClassVar[str] = "hdf5"

    def _find(self, file: Any) -> list[str]:
        self._is_d3rlpy = _is_d3rlpy(file)
        if self._is_d3rlpy:
            found = (re.fullmatch(r"actions_(\d+)(_\d+)?", name) for name in file)
            return [str(number) for number in sorted({int(one[1]) for one in found if one})]
        names = find_episodes(file)
        if not names:
            raise SchemaError(f"{self._path} has no group per episode")
        return sorted(names, key=_last_number)

    def _arrays(self, file: Any, name: str) -> dict[str, Any]:
        if not self._is_d3rlpy:
            return super()._arrays(file, name)
        arrays: dict[str, Any] = {}
        for top, item in members(file):
            # A tuple of observations is observations_EPISODE_PART, a dict a group.
            parts = re.fullmatch(rf"(\D+?)_{name}(?:_(\d+))?", top)
            if parts and hasattr(item, "shape"):
                arrays[parts[1] if parts[2] is None else f"{parts[1]}/{parts[2]}"] = item
            elif parts:
                arrays |= {f"{parts[1]}/{path}": one for path, one in datasets_in(item)}
        return arrays

    def _episode_facts(self, file: Any, name: str) -> dict[str, Any]:
        return {} if self._is_d3rlpy else super()._episode_facts(file, name)

    def _end(self, found: Mapping[str, Any], steps: int) -> End:
        if self._is_d3rlpy:  # one flag: an episode that is not terminated was truncated
            return "terminated" if _last(found.get("terminated"), steps) else "truncated"
        return super()._end(found, steps)


class RobomimicReader(_GroupedReader):
    """Read the demonstrations of a robomimic or LIBERO file: groups `data/demo_0`, `data/demo_1`, ...

    - `obs/*`: `observation.*`. The last row of `next_obs/*`, if the file has it, is the observation after the
      last step.
    - `actions`, `rewards`: `action`, `("next", "reward")`. `states` and other arrays with one row per step
      keep their names.
    - A demonstration is terminated if the last row of `dones` is set and the last reward is above 0,
      otherwise truncated: in most files `dones` is set at the end of every demonstration. `dones` is stored
      as `next.terminal`.
    - `episode`: the number of the demonstration. Its annotations are its attributes, and `filters`: the names
      in the group `mask` that list it, such as "train".
    - `rb.meta["robomimic"]` has the attributes of `data`, such as `env_args`. The text `model_file` is stored
      there once if it is the same for all demonstrations, otherwise as an annotation of each.

    Args:
        source: The file.

    Raises:
        NotFoundError: The file does not exist.
        StorageError: The file is not an HDF5 file, or is damaged.
        SchemaError: The file has no demonstrations, or one lacks observations or actions.
        MissingExtraError: h5py is not installed.

    Example:
        >>> from expstore.datasets import RobomimicReader, import_dataset, make_sample
        >>> source = make_sample("robomimic", "lift/low_dim.hdf5")
        >>> done = import_dataset(RobomimicReader(source), "data.exp")
    """

    format: ClassVar[str] = "robomimic"

    def _find(self, file: Any) -> list[str]:
        if not is_robomimic(file):
            raise SchemaError(f"{self._path} is not a robomimic file: it has no group data/demo_0, ...")
        names = [name for name in file["data"] if re.fullmatch(r"demo_\d+", name)]
        self._filters: dict[str, list[str]] = {}
        for mask, listed in datasets_in(file.get("mask", {})):
            for name in listed[()].tolist():
                self._filters.setdefault(_text(name), []).append(mask)
        return [f"data/{name}" for name in sorted(names, key=_last_number)]

    def _read_facts(self, file: Any) -> dict[str, Any]:
        found = {name: _plain(value) for name, value in file["data"].attrs.items()}
        for name, value in found.items():
            if isinstance(value, str) and value.startswith("{"):
                try:
                    found[name] = json.loads(value)
                except (ValueError, RecursionError):
                    continue
        models = {str(_plain(file[name].attrs.get("model_file", ""))) for name in self._names}
        self._one_model = len(models) == 1
        if self._one_model and (model := models.pop()):
            found["model_file"] = model
        return found

    def _episode_facts(self, file: Any, name: str) -> dict[str, Any]:
        found = super()._episode_facts(file, name)
        if self._one_model:
            found.pop("model_file", None)
        if filters := self._filters.get(name.removeprefix("data/")):
            found["filters"] = filters
        return found

    def _end(self, found: Mapping[str, Any], steps: int) -> End:
        reward = found.get("reward")
        succeeded = reward is not None and float(np.max(reward[steps - 1])) > 0
        return "terminated" if _last(found.get("done"), steps) and succeeded else "truncated"


def is_robomimic(file: Any) -> bool:
    """Return whether an HDF5 file has demonstrations in robomimic's layout."""
    data = dict(members(file)).get("data")
    if not hasattr(data, "items"):
        return False
    return any(re.fullmatch(r"demo_\d+", name) and "obs" in item for name, item in members(data))


def has_episodes(file: Any) -> bool:
    """Return whether an HDF5 file has one group per episode; files that expstore exports do not."""
    return ABOUT not in file.attrs and (_is_d3rlpy(file) or bool(find_episodes(file)))


def _is_d3rlpy(file: Any) -> bool:
    return "terminated_0" in file and ("actions_0" in file or "actions_0_0" in file)


def _sort(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arrays of an episode by meaning: an array, or arrays by the rest of their path."""
    found: dict[str, Any] = {"other": {}, "text": [], "observation": None, "action": None, "info": None}
    tops = {path.split("/")[0] for path in arrays}
    known = {
        next(name for name in names if name in tops): kind
        for kind, names in _NAMES.items()
        if tops.intersection(names)
    }
    for path, array in arrays.items():
        top, _, rest = path.partition("/")
        kind = known.get(top)
        if array.dtype.kind not in "biuf":
            found["text"].append(path)
        elif kind is not None and not rest:
            found[kind] = {"": array} if kind == "info" else array
        elif kind in ("observation", "next", "action", "info"):
            group = found[kind] if isinstance(found.get(kind), dict) else {}
            found[kind] = group | {rest: array}
        elif array.shape:
            found["other"][path] = array
    if isinstance(found["info"], dict) and "" in found["info"]:
        found["other"] |= {"info": found["info"].pop("")}
        found["info"] = found["info"] or None
    return found


def _steps(name: str, found: Mapping[str, Any]) -> int:
    for kind in ("observation", "action"):
        if found[kind] is None:
            raise SchemaError(
                f"{name} has no {kind}",
                hint=f"the group of an episode needs one of {', '.join(_NAMES[kind])}",
            )
    action = found["action"]
    first = next(iter(action.values())) if isinstance(action, dict) else action
    steps = len(first)
    for kind in ("reward", "terminated", "truncated", "done"):
        array = found.get(kind)
        if array is not None and array.shape and len(array) != steps:
            raise SchemaError(f"{name} has {len(array)} rows of {array.name!r} for {steps} actions")
    return steps


def _last(flags: Any, steps: int) -> bool:
    if flags is None:
        return False
    value = flags[()] if not flags.shape else flags[steps - 1]
    return bool(np.max(value) > 0.5)


def _read(arrays: Any, start: int, stop: int) -> Any:
    if not isinstance(arrays, dict):
        return np.asarray(arrays[start:stop])
    tree: dict[str, Any] = {}
    for path, array in arrays.items():
        put_value(tree, path.split("/"), np.asarray(array[start:stop]))
    return tree


def _append_last(states: Any, after: Any, count: int) -> Any:
    """Return states with the state after the last step appended if it is missing."""
    if isinstance(states, dict):
        return {
            name: _append_last(values, after[name], count) if name in after else values
            for name, values in states.items()
        }
    return np.concatenate([states, after]) if len(states) == count else states


def _last_number(name: str) -> int:
    return int(re.findall(r"\d+", name)[-1])


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value


def _make_episodes_sample(path: Path) -> None:
    values: dict[str, Array] = {}
    for walk in make_walks():
        columns = {
            "observations": walk.states,
            "actions": walk.actions,
            "rewards": walk.rewards,
            "terminals": walk.terminated,
            "timeouts": walk.truncated,
        }
        values |= {f"episode_{walk.number}/{name}": column for name, column in columns.items()}
    write_hdf5(path, values)


def _make_robomimic_sample(path: Path) -> None:
    values: dict[str, Array] = {}
    attributes: dict[str, Mapping[str, Any]] = {"data": {"env_args": json.dumps({"env_name": "Walk"})}}
    for walk in make_walks():
        demo = f"data/demo_{walk.number}"
        columns = {
            "obs/position": walk.states[:-1],
            "next_obs/position": walk.states[1:],
            "actions": walk.actions,
            "rewards": walk.terminated.astype(np.float32),
            "dones": (walk.terminated | walk.truncated).astype(np.int64),
        }
        values |= {f"{demo}/{name}": column for name, column in columns.items()}
        attributes[demo] = {"num_samples": walk.steps}
    write_hdf5(path, {**values, "mask/train": np.array([b"demo_0", b"demo_1"])}, attributes)


EPISODES = Kind(
    reader=Hdf5EpisodesReader,
    files="the .hdf5 file",
    make_sample=_make_episodes_sample,
    endings="terminated or truncated by the flags of the last row; `dones` alone means terminated; cut "
    "without a flag. In d3rlpy's files an episode that is not terminated is truncated",
    recognize=lambda source: not source.is_dir and source.check_hdf5(has_episodes),
    is_general=True,
)
ROBOMIMIC = Kind(
    reader=RobomimicReader,
    files="the .hdf5 file",
    make_sample=_make_robomimic_sample,
    endings="terminated if the last row has `dones` and a reward above 0, otherwise truncated",
    recognize=lambda source: not source.is_dir and source.check_hdf5(is_robomimic),
)
