"""Read V-D4RL's files: images, actions and rewards of control tasks, as .npz or HDF5.

Source of the format: https://huggingface.co/datasets/conglu/vd4rl and the replay buffers of
https://github.com/conglu1997/v-d4rl, whose `action[t]` and `reward[t]` belong to the step that leads to
`observation[t]`; those of an episode's first row are placeholders.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from expstore.core.values import Array, Key
from expstore.datasets.download import HUGGING_FACE, RemoteFile, list_hub
from expstore.datasets.episode import End, Episode, Part, Reader
from expstore.datasets.kind import Kind, Request
from expstore.datasets.recognition import Source
from expstore.datasets.samples import encode_npz, make_walks, write_file
from expstore.datasets.source_paths import list_files, parses_source
from expstore.disk.local_path import local_path
from expstore.errors import SchemaError
from expstore.exchange.hdf5 import members, reading_hdf5
from expstore.exchange.npz import read_npz

_SUFFIXES = (".npz", ".hdf5", ".h5")
_PIECE_BYTES = 16 << 20
_REPOSITORY = "conglu/vd4rl"
#: A genuine file has at least one of these, besides `image`, `action` and `reward`.
_OF_VD4RL_ALONE = ("discount", "is_first", "is_last", "is_terminal", "step_type")
#: Values of dm_control's `step_type`.
_FIRST, _LAST = 0, 2


class VD4RLReader(Reader):
    """Read the episodes of V-D4RL files.

    An episode of T + 1 rows has T steps: step t goes from image t to image t + 1 by action t + 1, and has
    reward t + 1. `image` or `observation` becomes `pixels` and `next.pixels`, with the shape in the file;
    `is_first` becomes `is_init`; `discount` is that of the step; other arrays except `step_type` become
    `state.*` and `next.state.*`. An episode is terminated if `is_terminal` is set in its last row, or, in
    files with `step_type`, if the discount is 0 there. Otherwise it is truncated if `is_last` is set in its
    last row, or `step_type` marks it as the last one. Otherwise it is cut.

    Args:
        source: A file, or a folder of .npz or .hdf5 files, read in the order of their names.

    Raises:
        NotFoundError: The file does not exist, or the folder has none.
        SchemaError: A file does not have these arrays.
        MissingExtraError: A file is HDF5, and h5py is not installed.

    Example:
        >>> from expstore.datasets import VD4RLReader, import_dataset, make_sample
        >>> source = make_sample("vd4rl", "walker_walk/random/64px")
        >>> done = import_dataset(VD4RLReader(source), "data.exp")
    """

    format: ClassVar[str] = "vd4rl"

    @parses_source
    def __init__(self, source: str | Path) -> None:
        self._files = list_files(local_path(source), _SUFFIXES)

    def parts(self) -> list[Part]:
        """Return the files."""
        return [Part(name=path.name, files=[path]) for path in self._files]

    def count_rows(self, part: Part) -> int | None:
        """Return the number of steps, one less than rows; None if files have several episodes."""
        with _arrays(Path(part.files[0])) as arrays:
            bounds = _bounds(arrays)
            return sum(stop - start - 1 for start, stop in bounds)

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the episodes in pieces of about 16 MB."""
        with _arrays(Path(part.files[0])) as arrays:
            row_bytes = sum(one.dtype.itemsize * math.prod(one.shape[1:]) for one in arrays.values())
            size = max(1, _PIECE_BYTES // max(1, row_bytes))
            for first, stop in _bounds(arrays):
                for start in range(first, stop - 1, size):
                    last = min(start + size, stop - 1)
                    end: End = "open" if last < stop - 1 else _end(arrays, stop - 1)
                    yield _piece(arrays, start, last, end)


@contextmanager
def _arrays(path: Path) -> Iterator[Mapping[str, Any]]:
    """Open a file and yield its arrays with one row per image."""
    if path.suffix == ".npz":
        yield _check_arrays(path, read_npz(path))
        return
    with reading_hdf5(path) as file:
        yield _check_arrays(path, {name: one for name, one in members(file) if hasattr(one, "shape")})


def _check_arrays(path: Path, arrays: dict[str, Any]) -> Mapping[str, Any]:
    """Return the arrays with one row per image; images are called `pixels`."""
    pixels = arrays.pop("image", None)
    if pixels is None:
        pixels = arrays.pop("observation", None)
    absent = [name for name in ("action", "reward") if name not in arrays]
    if pixels is None or absent:
        raise SchemaError(
            f"{path} is not a V-D4RL file: it has no {', '.join(absent) or 'image or observation'}"
        )
    if len(pixels.shape) != 4 or pixels.dtype != np.uint8:
        raise SchemaError(f"{path} has images of shape {list(pixels.shape)}, {pixels.dtype}")
    kept = {"pixels": pixels}
    for name, one in arrays.items():
        if one.dtype.kind not in "biuf" or not one.shape:
            continue
        if one.shape[0] != pixels.shape[0]:
            raise SchemaError(f"{path} has {one.shape[0]} rows of {name!r} and {pixels.shape[0]} images")
        kept[name] = one
    return kept


def _bounds(arrays: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return start and end of each episode of a file."""
    count = arrays["pixels"].shape[0]
    starts = np.zeros(count, bool)
    if "is_first" in arrays:
        starts = np.asarray(arrays["is_first"][:]).reshape(count) > 0.5
    elif "step_type" in arrays:
        starts = np.asarray(arrays["step_type"][:]).reshape(count) == _FIRST
    starts[:1] = True
    places = [*np.flatnonzero(starts).tolist(), count]
    return [(start, stop) for start, stop in pairwise(places) if stop - start > 1]


def _end(arrays: Mapping[str, Any], last: int) -> End:
    """Return how the episode ends whose last image is in row `last`."""

    def read_last(name: str) -> float | None:
        return float(np.asarray(arrays[name][last]).reshape(-1)[0]) if name in arrays else None

    terminal, over, kind = read_last("is_terminal"), read_last("is_last"), read_last("step_type")
    if terminal is None and kind == _LAST:
        terminal = float(read_last("discount") == 0)
    if terminal:
        return "terminated"
    return "truncated" if over or kind == _LAST else "cut"


def _piece(arrays: Mapping[str, Any], start: int, stop: int, end: End) -> Episode:
    """Return the steps from image `start` to image `stop`."""
    states: dict[str | Key, Array] = {}
    fields: dict[str | Key, Array] = {}
    for name, one in arrays.items():
        if name == "pixels":
            states["pixels"] = one[start : stop + 1]
        elif name == "is_first":
            fields["is_init"] = np.asarray(one[start:stop]).reshape(-1, 1) > 0.5
        elif name == "discount":
            fields["discount"] = one[start + 1 : stop + 1]
        elif name not in ("action", "reward", "is_last", "is_terminal", "step_type"):
            states["state", name] = one[start : stop + 1]
    return Episode(
        observation={},
        action=arrays["action"][start + 1 : stop + 1],
        reward=np.asarray(arrays["reward"][start + 1 : stop + 1]).reshape(stop - start),
        end=end,
        states=states,
        fields=fields,
    )


def _recognize(source: Source) -> bool | str:
    arrays = source.arrays
    image = arrays.get("image")
    if image is None and "step_type" in arrays:
        image = arrays.get("observation")
    if image is None or "action" not in arrays or "reward" not in arrays:
        return False
    if len(image.shape) != 4 or image.dtype != np.uint8:
        return False
    if any(name in arrays for name in _OF_VD4RL_ALONE):
        return True
    return not source.is_dir and (
        f"{source.path} may be a V-D4RL file, in which actions and rewards belong to the row before; "
        "if it is, import it with --format vd4rl"
    )


def _list_files(request: Request) -> list[RemoteFile]:
    return list_hub(
        _REPOSITORY,
        f"vd4rl/{request.dataset_id}",
        request.mirror,
        keep=lambda path: path.endswith((".npz", ".hdf5")),
        missing=f"has no files of {request.dataset_id}",
    )


def _make_sample(path: Path) -> None:
    for walk in make_walks():
        rows = np.arange(walk.steps + 1)
        values = {
            "image": walk.draw_frames(64),
            # The row of an image has the action and the reward of the step that leads to it.
            "action": np.pad(walk.actions, ((1, 0), (0, 0))),
            "reward": np.pad(walk.rewards, (1, 0)),
            "discount": np.ones(len(rows), np.float32),
            "is_first": rows == 0,
            "is_last": rows == walk.steps,
            "is_terminal": np.pad(walk.terminated, (1, 0)),
        }
        write_file(path / f"episode_{walk.number}.npz", encode_npz(values))


KIND = Kind(
    reader=VD4RLReader,
    files="an .npz or .hdf5 file, or a folder of them",
    make_sample=_make_sample,
    endings="terminated or truncated by the flags of the last image, otherwise cut",
    recognize=_recognize,
    prefix="vd4rl",
    buffer="VD4RLExperienceReplay",
    ids=[
        *(f"distracting/walker_walk_random/64px/{level}" for level in ("easy", "medium", "hard")),
        *(
            f"main/{task}/{kind}/64px"
            for task in ("cheetah_run", "humanoid_walk", "walker_walk")
            for kind in ("expert", "medium", "medium_expert", "medium_replay", "random")
        ),
        *(f"multitask/{task}_random/64px" for task in ("cheetah_run", "walker_walk")),
    ],
    unknown_id="The dataset_id {} isn't part of the accepted datasets",
    public=f"{HUGGING_FACE}/datasets/{_REPOSITORY}",
    mirror=HUGGING_FACE,
    list_files=_list_files,
)
