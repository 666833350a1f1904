"""Read TensorDict's memory-map folders and the dumps of TorchRL's buffers in place, without unpickling.

Source of the formats: `TensorDict.memmap` of tensordict 0.14 and `ReplayBuffer.dumps` of torchrl 0.14. A
folder has `meta.json`, a raw file `NAME.memmap` per tensor, and a folder per nested TensorDict. A dump has
such a folder, `storage`, with the number of rows in `storage/storage_metadata.json` and the position of the
next row in `writer/metadata.json`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from expstore.core.parsing import INVALID
from expstore.core.values import Array, Key, key_name
from expstore.disk.files import ReadingDisk
from expstore.errors import NotFoundError, SchemaError, StorageError
from expstore.schema.schema import DTYPES

_META, _STORAGE = "meta.json", "storage"
#: TorchRL's own fields that a store keeps itself.
_OWN: tuple[Key, ...] = (("index",), ("_weight",), ("priority_weight",))
_DTYPES = {f"torch.{name}": name for name, dtype in DTYPES.items() if dtype.kind in "biuf"}
del _DTYPES["torch.bfloat16"]  # NumPy only has its bits


def is_tensordict_folder(path: Path) -> bool:
    """Return whether a path is a memory-map folder of a TensorDict, or a dump of a TorchRL buffer."""
    disk = ReadingDisk()
    if not disk.is_dir(path):
        return False
    folder = path / _STORAGE if disk.exists(path / _STORAGE / _META) else path
    if not disk.exists(folder / _META):
        return False
    try:
        return "_type" in json.loads(disk.read_whole((folder / _META).resolve()))
    except INVALID:
        return False


class MemoryMapFolder:
    """The rows of a TensorDict's memory-map folder, or of a dump of a TorchRL buffer, mapped for reading.

    Args:
        path: The folder, for which `is_tensordict_folder` returns True.

    Attributes:
        tensors: The tensors, mapped for reading, without TorchRL's own fields such as `index`. Shapes
            `(places, ...)`.
        order: The positions of the rows in the tensors, the oldest row first; slots that were never written
            are left out. Shape `(n,)`.
        constants: Values that are not tensors and are equal for all rows, by the name of the field.
        left_out: Names of the fields that are pickled.
        files: The files that belong to the rows.

    Raises:
        NotFoundError: A file does not exist.
        SchemaError: A dump has rows of several dims, or tensors that no field can hold.
        StorageError: A file is shorter than its shape says.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._disk = path, ReadingDisk()
        is_dump = self._disk.exists(self._path / _STORAGE / _META)
        self._folder = self._path / _STORAGE if is_dump else self._path
        dims = self._read_json(self._folder / _META).get("shape", [0])
        if is_dump and len(dims) > 1:
            raise SchemaError(
                f"{self._path} is a dump of a storage with {len(dims)} dims, {dims}; one dim is supported",
                hint="load it with torchrl, and extend a store with rb[:]",
            )
        self.constants: dict[str, Any] = {}
        self.left_out: list[str] = []
        self.files: list[Path] = [self._folder / _META]
        self.tensors = {
            key: tensor
            for key, tensor in self._find((), self._folder)
            if key not in _OWN and key != ("_data",)
        }
        if not self.tensors:
            raise SchemaError(f"{self._folder} has no tensors")
        lengths = {key: (tensor.shape or (0,))[0] for key, tensor in self.tensors.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{key_name(key)} {count}" for key, count in list(lengths.items())[:4])
            raise SchemaError(f"{self._folder} has tensors of different lengths: {listed}")
        self.order = self._find_order(next(iter(lengths.values())), is_dump)

    @property
    def row_bytes(self) -> int:
        """The size of a row, bytes."""
        return sum(one.dtype.itemsize * math.prod(one.shape[1:]) for one in self.tensors.values())

    def read(self, start: int, stop: int) -> dict[Key, Array]:
        """Copy a run of rows, counted from the oldest one. Shapes `(n, ...)`."""
        places = self.order[start:stop]
        return {key: np.ascontiguousarray(tensor[places]) for key, tensor in self.tensors.items()}

    def _find(self, above: Key, folder: Path) -> Iterator[tuple[Key, Array]]:
        """Yield the memory-mapped tensors below a folder."""
        for name, about in self._read_json(folder / _META).items():
            if "/" in name or name in ("", ".", ".."):
                raise SchemaError(f"{folder / _META} names {name!r}, which is not a valid field name")
            key = (*above, name)
            if isinstance(about, Mapping) and "dtype" in about and "shape" in about:
                yield key, self._map(key, folder / f"{name}.memmap", about)
            elif isinstance(about, Mapping) and "type" in about:
                below = folder / name
                self.files.append(below / _META)
                if about["type"] in ("NonTensorData", "NonTensorStack"):
                    self._note(key, below)
                else:
                    yield from self._find(key, below)

    def _map(self, key: Key, path: Path, about: Mapping[str, Any]) -> Array:
        dtype = _DTYPES.get(str(about["dtype"]))
        if dtype is None or about.get("is_nested"):
            kind = "a nested tensor" if about.get("is_nested") else about["dtype"]
            raise SchemaError(f"{key_name(key)!r} is {kind}, which cannot be read")
        shape = _shape(key, about["shape"])
        size = math.prod(shape) * np.dtype(dtype).itemsize  # NumPy's product would overflow
        if not self._disk.exists(path):
            raise NotFoundError(f"there is no file {path}")
        if self._disk.size(path) < size:
            raise StorageError(
                f"{path} has {self._disk.size(path)} bytes; {list(shape)} {dtype} needs {size}"
            )
        self.files.append(path)
        if not size:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", shape=shape)

    def _note(self, key: Key, folder: Path) -> None:
        """Record a value that is not a tensor."""
        about = self._read_json(folder / _META)
        if "data" in about:
            self.constants[key_name(key)] = about["data"]
        else:
            self.left_out.append(key_name(key))

    def _find_order(self, places: int, is_dump: bool) -> Array:
        """Return the positions of the rows, the oldest row first."""
        if not is_dump:
            return np.arange(places)
        count = self._number(self._folder / "storage_metadata.json", "len", places, places)
        writer = self._path / "writer" / "metadata.json"
        cursor = self._number(writer, "cursor", 0, places) if self._disk.exists(writer) else 0
        found = np.arange(count)
        return np.roll(found, -cursor) if count == places else found

    def _number(self, path: Path, name: str, default: int, most: int) -> int:
        """Return a number of rows from a metadata file."""
        said = self._read_json(path).get(name, default)
        if not isinstance(said, int) or isinstance(said, bool) or not 0 <= said <= most:
            raise SchemaError(f"{path} has {name} = {said!r}; a number from 0 to {most} is expected")
        return said

    def _read_json(self, path: Path) -> dict[str, Any]:
        if not self._disk.exists(path):
            raise NotFoundError(f"there is no file {path}")
        try:
            return dict(json.loads(self._disk.read_whole(path.resolve())))
        except INVALID as exc:
            raise StorageError(f"cannot read {path}: {exc}") from exc


def _shape(key: Key, said: Any) -> tuple[int, ...]:
    """Return the shape of a tensor in `meta.json`."""
    if not isinstance(said, list) or not all(isinstance(one, int) and one >= 0 for one in said):
        raise SchemaError(f"{key_name(key)!r} has the invalid shape {said!r}")
    return tuple(said)
