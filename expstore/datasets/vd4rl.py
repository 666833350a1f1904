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
from expstore.datasets.episode import End, Episode, Part, Reader
from expstore.datasets.source_paths import check_exists, parses_source
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import NotFoundError, SchemaError
from expstore.exchange.hdf5 import members, reading_hdf5
from expstore.exchange.npz import read_npz

_SUFFIXES = (".npz", ".hdf5", ".h5")
_PIECE_BYTES = 16 << 20
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
        ModuleNotFoundError: A file is HDF5, and h5py is not installed.

    Example:
        >>> from expstore.datasets import VD4RLReader, import_dataset
        >>> done = import_dataset(VD4RLReader("walker_walk/random/64px"), "data.exp")
    """

    format: ClassVar[str] = "vd4rl"

    @parses_source
    def __init__(self, source: str | Path) -> None:
        path, disk = local_path(source), ReadingDisk()
        check_exists(path)
        self._files = [path]
        if disk.is_dir(path):
            self._files = [path / name for name in sorted(disk.names(path)) if name.endswith(_SUFFIXES)]
            if not self._files:
                raise NotFoundError(f"there is no .npz or .hdf5 file in {path}")

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
