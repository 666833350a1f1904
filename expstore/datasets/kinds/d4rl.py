"""Read D4RL's files: HDF5 with one row per transition and flags at the ends of episodes.

Source of the format: the generators and loaders of https://github.com/Farama-Foundation/D4RL. Files differ in
their arrays, so each one is looked up: `next_observations`, `timeouts` and `infos` may be missing, and flags
may be floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from expstore.core.values import Array, Key
from expstore.datasets.d4rl_files import D4RL_ADDRESS, d4rl_files
from expstore.datasets.download import RemoteFile
from expstore.datasets.episode import End, Episode, Part, Reader, put_value
from expstore.datasets.kind import Kind, Request
from expstore.datasets.recognition import Source
from expstore.datasets.samples import make_walks
from expstore.datasets.source_paths import check_file
from expstore.disk.local_path import local_path
from expstore.errors import SchemaError
from expstore.exchange.foreign_rows import rows_differ
from expstore.exchange.hdf5 import datasets_in, reading_hdf5, write_hdf5

Flag = Literal["terminals", "timeouts"]

_NAMES = ("observations", "actions", "rewards", "terminals")
#: A genuine file has all of `_NAMES`, and nothing else, or also one of these.
_OF_D4RL_ALONE = ("timeouts", "infos", "metadata")
_SLAB_BYTES = 16 << 20


class D4RLReader(Reader):
    """Read the episodes of one D4RL file.

    Unlike TorchRL's class it keeps every row, keeps the observation after a terminal step if the file has it,
    accepts flags that are floats (kitchen, antmaze), and ends an episode where `next_observations` shows that
    the next row does not continue it.

    - `observations`, `actions`, `rewards`: the fields `observation`, `action`, `next.reward`.
    - `infos/*`: `info.*` and `next.info.*`; other arrays with one row per transition keep their names.
    - `metadata/*`: numbers and texts are stored in `rb.meta["d4rl"]`; policy weights are left out.

    Args:
        source: The file.
        split_on: The flags that end an episode. None uses both; for antmaze and maze2d, recognised by the
            file's name, only `timeouts`, because `terminals` there means that the agent is near the goal
            while the episode continues. Flags that do not end an episode are stored as `next.terminal`.

    Raises:
        NotFoundError: The file does not exist.
        SchemaError: The file does not have these arrays.
        StorageError: It is not an HDF5 file, or is damaged.
        StorageError: The file is damaged.
        MissingExtraError: h5py is not installed.

    Example:
        >>> from expstore.datasets import D4RLReader, import_dataset, make_sample
        >>> source = make_sample("d4rl", "hopper_medium-v2.hdf5")
        >>> done = import_dataset(D4RLReader(source), "data.exp")
    """

    format: ClassVar[str] = "d4rl"

    def __init__(self, source: str | Path, *, split_on: Sequence[Flag] | None = None) -> None:
        self._path = local_path(source)
        check_file(self._path)
        wrong = [name for name in split_on or () if name not in ("terminals", "timeouts")]
        if wrong or (split_on is not None and not split_on):
            raise SchemaError(f"split_on={split_on!r} is not a choice of 'terminals' and 'timeouts'")
        self._split_on = tuple(split_on) if split_on is not None else _default_split(self._path.name)
        with self._open() as file:
            arrays = self._arrays(file)
            absent = [name for name in _NAMES if name not in arrays]
            if absent:
                raise SchemaError(
                    f"{self._path} is not a D4RL file: it has no {', '.join(absent)}",
                    hint=f"it has {', '.join(sorted(arrays)[:10]) or 'no arrays'}",
                )
            self._rows = len(file["observations"])
            self._facts = self._read_metadata(file)

    def parts(self) -> list[Part]:
        """Return the file."""
        return [Part(name=self._path.name, files=[self._path])]

    def options(self) -> Mapping[str, Any]:
        """Return the flags that end an episode."""
        return {"split_on": list(self._split_on)}

    def facts(self) -> Mapping[str, Any]:
        """Return the file's metadata."""
        return {"d4rl": self._facts}

    def count_rows(self, part: Part) -> int:
        """Return the number of transitions."""
        return self._rows

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the episodes, in pieces if they are long or cross the edge of a slab of 16 MB."""
        with self._open() as file:
            arrays = self._arrays(file)
            count = self._rows
            flags: dict[str, Array] = {
                name: _flags(arrays[name], count) for name in ("terminals", "timeouts") if name in arrays
            }
            ends = np.zeros(count, bool)
            for name in self._split_on:
                if name in flags:
                    ends |= flags[name]
            ends[-1] = True
            row_bytes = sum(one.dtype.itemsize * math.prod(one.shape[1:]) for one in arrays.values())
            size = max(1, _SLAB_BYTES // max(1, row_bytes))
            for start in range(0, count, size):
                stop = min(start + size, count)
                yield from self._slab(arrays, flags, ends, start, stop)

    def _slab(
        self, arrays: Mapping[str, Any], flags: Mapping[str, Array], ends: Array, start: int, stop: int
    ) -> Iterator[Episode]:
        """Yield the pieces of episodes in a slab of rows."""
        # One row more, for the observation after the slab's last step.
        read = {
            name: one[start : min(stop + 1, len(ends))] for name, one in arrays.items() if name not in flags
        }
        own_ends = ends[start:stop].copy()
        after = read.pop("next_observations", None)
        if after is not None:
            rows = min(len(own_ends), len(read["observations"]) - 1)
            own_ends[:rows] |= rows_differ(after[:rows], read["observations"][1 : rows + 1])
        first = 0
        for last in [*np.flatnonzero(own_ends).tolist(), None]:
            piece = slice(first, stop - start if last is None else last + 1)
            if piece.stop == piece.start:
                continue
            end: End = "open" if last is None else _end(flags, start + last)
            yield self._piece(read, after, flags, piece, start, end)
            first = piece.stop

    def _piece(
        self,
        read: Mapping[str, Array],
        after: Array | None,
        flags: Mapping[str, Array],
        rows: slice,
        offset: int,
        end: End,
    ) -> Episode:
        states = slice(rows.start, rows.stop + (end == "open"))
        observation = read["observations"][states]
        if end != "open" and after is not None:
            observation = np.concatenate([observation, after[rows.stop - 1 : rows.stop]])
        info: dict[str, Any] = {}
        fields: dict[str | Key, Array] = {}
        for name, values in read.items():
            group, _, rest = name.partition("/")
            if group == "infos" and rest:
                put_value(info, rest.split("/"), values[states])
            elif name not in _NAMES:
                fields[("info",) if name == "infos" else tuple(name.split("/"))] = values[rows]
        if "terminals" not in self._split_on:
            inside = flags["terminals"][offset + rows.start : offset + rows.stop]
            fields[("next", "terminal")] = inside[:, None]
        return Episode(
            observation=observation,
            action=read["actions"][rows],
            reward=read["rewards"][rows].reshape(rows.stop - rows.start),
            end=end,
            info=info,
            fields=fields,
        )

    def _open(self) -> Any:
        return reading_hdf5(self._path)

    def _arrays(self, file: Any) -> dict[str, Any]:
        """Return the arrays with one row per transition, by path."""
        found = {
            name: one for name, one in datasets_in(file) if one.shape and not name.startswith("metadata/")
        }
        count = len(found["observations"]) if "observations" in found else 0
        if not count and "observations" in found:
            raise SchemaError(f"{self._path} has no rows")
        for name in _NAMES:
            if name in found and len(found[name]) != count:
                raise SchemaError(
                    f"{self._path} has {len(found[name])} rows of {name!r} and {count} of 'observations'"
                )
        kept = {name: one for name, one in found.items() if len(one) == count and one.dtype.kind in "biuf"}
        return kept if "observations" in kept else {}

    def _read_metadata(self, file: Any) -> dict[str, Any]:
        said: dict[str, Any] = {}
        for name, item in datasets_in(file.get("metadata", {})):
            if not item.shape:
                value = item[()]
                value = value.decode(errors="replace") if isinstance(value, bytes) else value
                said[name] = value.item() if isinstance(value, np.generic) else str(value)
        return said


def _default_split(name: str) -> tuple[Flag, ...]:
    plain = name.lower().replace("_", "").replace("-", "")
    return ("timeouts",) if plain.startswith(("antmaze", "maze2d")) else ("terminals", "timeouts")


def _flags(array: Any, count: int) -> Array:
    found: Array = np.asarray(array[()]).reshape(count) > 0.5
    return found


def _end(flags: Mapping[str, Array], row: int) -> End:
    for name, end in (("terminals", "terminated"), ("timeouts", "truncated")):
        if name in flags and flags[name][row]:
            return "terminated" if end == "terminated" else "truncated"
    return "cut"


def _recognize(source: Source) -> bool | str:
    if source.is_dir or not source.is_hdf5:
        return False
    arrays = source.arrays
    if any(name not in arrays or not arrays[name].shape for name in _NAMES):
        return False
    is_flat = len({arrays[name].shape[0] for name in _NAMES}) == 1
    if not is_flat or any(arrays[name].dtype.kind not in "biuf" for name in _NAMES):
        return False
    groups = {name.partition("/")[0] for name in arrays}
    if groups.intersection(_OF_D4RL_ALONE) or groups == set(_NAMES):
        return True
    return f"{source.path} may be a D4RL file; if it is, import it with --format d4rl"


def _read_options(dataset_id: str) -> dict[str, Any]:
    """Return the flags that end an episode: in antmaze and maze2d reaching the goal does not."""
    is_maze = dataset_id.startswith(("antmaze", "maze2d", "bullet-maze2d"))
    return {"split_on": ("timeouts",) if is_maze else None}


def _list_files(request: Request) -> list[RemoteFile]:
    path = d4rl_files()[request.dataset_id]
    return [RemoteFile(url=f"{request.mirror}/{path}", name=path.rpartition("/")[2])]


def _make_sample(path: Path) -> None:
    walks = make_walks()
    columns = {
        "observations": [walk.states[:-1] for walk in walks],
        "next_observations": [walk.states[1:] for walk in walks],
        "actions": [walk.actions for walk in walks],
        "rewards": [walk.rewards for walk in walks],
        "terminals": [walk.terminated for walk in walks],
        "timeouts": [walk.truncated for walk in walks],
    }
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    write_hdf5(path, {**joined, "metadata/algorithm": "random walk"})


KIND = Kind(
    reader=D4RLReader,
    files="the .hdf5 file",
    make_sample=_make_sample,
    endings="terminated by `terminals`, truncated by `timeouts`; cut where the next row does not continue "
    "the episode. In antmaze and maze2d only `timeouts` end episodes",
    recognize=_recognize,
    prefix="d4rl",
    buffer="D4RLExperienceReplay",
    ids=list(d4rl_files()),
    unknown_id="Env {} not found",
    public=D4RL_ADDRESS,
    mirror=D4RL_ADDRESS,
    list_files=_list_files,
    options=_read_options,
)
