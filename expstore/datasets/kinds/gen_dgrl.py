"""Read Gen-DGRL's archives: trajectories of Procgen games, one pickled dict of arrays per file.

Source of the format: https://github.com/facebookresearch/gen_dgrl. A trajectory is a .npy file with a dict of
`observations` `(T + 1, ...)`, `actions`, `rewards` and `dones` `(T,)`; a tar archive contains many of them.
"""

from __future__ import annotations

import lzma
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, cast

import numpy as np

from expstore.core.values import Array
from expstore.datasets.download import RemoteFile
from expstore.datasets.episode import End, Episode, Part, Reader
from expstore.datasets.kind import Kind, Request
from expstore.datasets.samples import encode_npy, encode_tar, make_walks, write_file
from expstore.datasets.source_paths import list_files, parses_source
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import ExpStoreError, SchemaError, StorageError
from expstore.exchange.base import open_to_read
from expstore.exchange.numpy_unpickler import load_object_npy

_NAMES = ("observations", "actions", "rewards", "dones")
_PIECE_BYTES = 16 << 20
_ADDRESS = "https://dl.fbaipublicfiles.com/DGRL/Procgen/Datasets/Compressed"
_GAMES = [
    "bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot", "heist",
    "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot",
]  # fmt: skip
#: Folders and numbers of rows by category.
CATEGORIES = {
    "1M_E": ("1M/level_200/expert", 1_000_000),
    "1M_S": ("1M/level_200/suboptimal", 1_000_000),
    "10M": ("10M/level_200/expert", 10_000_000),
    "25M": ("25M/level_200/expert", 25_000_000),
    "level_1_E": ("100k/level_1/expert", 100_000),
    "level_1_S": ("100k/level_1/suboptimal", 100_000),
    "level_40_E": ("100k/level_40/expert", 100_000),
    "level_40_S": ("100k/level_40/suboptimal", 100_000),
}


class GenDGRLReader(Reader):
    """Read the trajectories of a Gen-DGRL archive.

    Rows have `observation` and `next.observation` uint8 with the shape in the file, `action`, `next.reward`.
    A trajectory is terminated if `dones` is set in its last row, otherwise cut; if several rows have `dones`
    set, each of them ends an episode. The dicts are pickles, which `numpy_unpickler` reads without running
    code.

    Args:
        source: A .tar or .tar.xz archive, or a folder of .npy files, read in the order of their names.
        rows: Read about this many rows, rounded up to whole trajectories. None reads all.

    Raises:
        NotFoundError: The archive does not exist, or the folder has no .npy file.
        SchemaError: A file does not contain such a dict.

    Example:
        >>> from expstore.datasets import GenDGRLReader, import_dataset, make_sample
        >>> source = make_sample("gen-dgrl", "bigfish.tar")
        >>> done = import_dataset(GenDGRLReader(source), "data.exp")
    """

    format: ClassVar[str] = "gen-dgrl"

    @parses_source
    def __init__(self, source: str | Path, *, rows: int | None = None) -> None:
        self._path, self._rows = local_path(source), rows
        self._files = list_files(self._path, (".npy",))

    def parts(self) -> list[Part]:
        """Return the archive, or the folder, as one part."""
        return [Part(name=self._path.name, files=self._files)]

    def options(self) -> Mapping[str, Any]:
        """Return the limit of rows."""
        return {"rows": self._rows}

    def count_rows(self, part: Part) -> int | None:
        """Return the limit of rows, or None: an archive does not record its number of rows."""
        return self._rows

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the trajectories, long ones in pieces of about 16 MB."""
        done = 0
        for name, file in self._open_files():
            if self._rows is not None and done >= self._rows:
                return
            try:
                found = load_object_npy(file)
            except ExpStoreError as exc:
                raise exc.at(name) from exc
            except (tarfile.TarError, lzma.LZMAError) as exc:
                raise StorageError(f"cannot read {name}: {exc}") from exc
            arrays = _check_arrays(name, found)
            done += len(arrays["actions"])
            yield from _episodes(arrays)

    def _open_files(self) -> Iterator[tuple[str, BinaryIO]]:
        disk = ReadingDisk()
        if disk.is_dir(self._path):
            for path in self._files:
                with open_to_read(path) as file:
                    yield path.name, cast(BinaryIO, file)
            return
        with open_to_read(self._path) as raw:
            try:
                with tarfile.open(fileobj=cast(BinaryIO, raw), mode="r|*") as archive:
                    for member in archive:
                        if member.isfile() and member.name.endswith(".npy"):
                            yield member.name, cast(BinaryIO, archive.extractfile(member))
            except (tarfile.TarError, lzma.LZMAError, EOFError) as exc:
                raise StorageError(f"cannot read {self._path} as a tar archive: {exc}") from exc


def _check_arrays(name: str, found: Any) -> dict[str, Array]:
    """Return the arrays of a trajectory."""
    if not isinstance(found, dict):
        raise SchemaError(f"{name} contains a {type(found).__name__}; a dict of arrays is expected")
    if absent := [key for key in _NAMES if key not in found]:
        raise SchemaError(f"{name} has no {', '.join(absent)}")
    try:
        arrays = {key: np.asarray(found[key]) for key in _NAMES}
    except ValueError as exc:  # lists of different lengths
        raise SchemaError(f"{name} has rows of different shapes: {exc}") from exc
    count = len(arrays["actions"])
    for key, array in arrays.items():
        wanted = count + (key == "observations")
        if array.dtype.kind not in "biuf" or not array.ndim or len(array) != wanted:
            raise SchemaError(
                f"{name} has {key!r} of shape {list(array.shape)}, {array.dtype}, for {count} actions"
            )
    for key in ("rewards", "dones"):
        if arrays[key].size != count:
            raise SchemaError(f"{name} has {key!r} of shape {list(arrays[key].shape)} for {count} actions")
    pixels = arrays["observations"]
    if pixels.dtype != np.uint8 and (pixels.min() < 0 or pixels.max() > 255):
        raise SchemaError(f"{name} has observations from {pixels.min()} to {pixels.max()}, not from 0 to 255")
    return arrays


def _episodes(arrays: Mapping[str, Array]) -> Iterator[Episode]:
    """Yield the episodes of a trajectory, in pieces."""
    count = len(arrays["actions"])
    done = arrays["dones"].reshape(count) > 0.5
    observations = arrays["observations"].astype(np.uint8, copy=False)
    row_bytes = observations[:1].nbytes + 64
    size = max(1, _PIECE_BYTES // row_bytes)
    first = 0
    for last in [*np.flatnonzero(done).tolist(), count - 1]:
        for start in range(first, last + 1, size):
            stop = min(start + size, last + 1)
            end: End = "open" if stop <= last else "terminated" if done[last] else "cut"
            yield Episode(
                observation=observations[start : stop + 1],
                action=arrays["actions"][start:stop],
                reward=arrays["rewards"][start:stop].reshape(stop - start),
                end=end,
            )
        first = last + 1


def _list_files(request: Request) -> list[RemoteFile]:
    game, category = request.dataset_id.split("-")
    name = f"{game}.tar.xz"
    return [RemoteFile(url=f"{request.mirror}/{CATEGORIES[category][0]}/{name}", name=name)]


def _make_sample(path: Path) -> None:
    members = {}
    for walk in make_walks():
        values = {
            "observations": walk.draw_frames(64).transpose(0, 3, 1, 2),
            "actions": np.argmax(walk.actions, 1)[:, None],
            "rewards": walk.rewards[:, None],
            "dones": walk.terminated[:, None],
        }
        members[f"expert/{walk.number:03}.npy"] = encode_npy(values)
    write_file(path, encode_tar(members))


KIND = Kind(
    reader=GenDGRLReader,
    files="the .tar.xz archive, or the folder of its .npy files",
    make_sample=_make_sample,
    endings="terminated by `dones`; a trajectory without `dones` at its end is cut",
    recognize=lambda source: source.suffix == ".xz" or (not source.is_dir and source.record.endswith(".npy")),
    prefix="gen_dgrl",
    buffer="GenDGRLExperienceReplay",
    ids=[f"{game}-{category}" for category in CATEGORIES for game in _GAMES],
    public=_ADDRESS,
    mirror=_ADDRESS,
    list_files=_list_files,
    options=lambda dataset_id: {"rows": CATEGORIES[dataset_id.split("-")[1]][1]},
)
