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
from expstore.datasets.episode import End, Episode, Part, Reader
from expstore.datasets.source_paths import check_exists, parses_source
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import ExpStoreError, NotFoundError, SchemaError, StorageError
from expstore.exchange.base import open_to_read
from expstore.exchange.numpy_unpickler import load_object_npy

_NAMES = ("observations", "actions", "rewards", "dones")
_PIECE_BYTES = 16 << 20


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
        >>> from expstore.datasets import GenDGRLReader, import_dataset
        >>> done = import_dataset(GenDGRLReader("bigfish.tar"), "data.exp")
    """

    format: ClassVar[str] = "gen-dgrl"

    @parses_source
    def __init__(self, source: str | Path, *, rows: int | None = None) -> None:
        self._path, disk = local_path(source), ReadingDisk()
        self._rows = rows
        check_exists(self._path)
        self._names: list[str] | None = None
        if disk.is_dir(self._path):
            self._names = sorted(name for name in disk.names(self._path) if name.endswith(".npy"))
            if not self._names:
                raise NotFoundError(f"there is no .npy file in {self._path}")

    def parts(self) -> list[Part]:
        """Return the archive, or the folder, as one part."""
        files = [self._path] if self._names is None else [self._path / name for name in self._names]
        return [Part(name=self._path.name, files=files)]

    def options(self) -> Mapping[str, Any]:
        """Return the limit of rows."""
        return {"rows": self._rows}

    def count_rows(self, part: Part) -> int | None:
        """Return the limit of rows, or None: an archive does not record its number of rows."""
        return self._rows

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the trajectories, long ones in pieces of about 16 MB."""
        done = 0
        for name, file in self._files():
            if self._rows is not None and done >= self._rows:
                return
            try:
                found = load_object_npy(file)
            except ExpStoreError as exc:
                raise type(exc)(f"{name}: {exc}") from exc
            except (tarfile.TarError, lzma.LZMAError) as exc:
                raise StorageError(f"cannot read {name}: {exc}") from exc
            arrays = _check_arrays(name, found)
            done += len(arrays["actions"])
            yield from _episodes(arrays)

    def _files(self) -> Iterator[tuple[str, BinaryIO]]:
        if self._names is not None:
            for name in self._names:
                with open_to_read(self._path / name) as file:
                    yield name, cast(BinaryIO, file)
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
