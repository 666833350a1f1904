"""Read TensorDict's memory-map folders and the dumps of TorchRL's buffers in place, without unpickling.

Source of the formats: `TensorDict.memmap` of tensordict 0.14 and `ReplayBuffer.dumps` of torchrl 0.14. A
folder has `meta.json`, a raw file `NAME.memmap` per tensor, and a folder per nested TensorDict. A dump has
such a folder, `storage`, with the number of rows in `storage/storage_metadata.json` and the position of the
next row in `writer/metadata.json`. TorchRL keeps its data sets below `~/.cache/torchrl` in the same format.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from expstore.core.parsing import INVALID
from expstore.core.values import Array, Key, key_name
from expstore.datasets.episode import End, Part, Reader, Rows
from expstore.datasets.seams import rows_differ
from expstore.datasets.source_paths import check_folder, parses_source
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import NotFoundError, SchemaError, StorageError

__all__ = ["TensorDictReader", "is_tensordict_folder"]

_META, _STORAGE = "meta.json", "storage"
_PIECE_BYTES = 16 << 20
_TRAJECTORY: Key = ("collector", "traj_ids")
#: TorchRL's own fields that a store keeps itself.
_OWN: tuple[Key, ...] = (("index",), ("_weight",), ("priority_weight",))
#: Fields whose next values show whether the next row continues an episode.
_OBSERVATIONS = ("observation", "pixels")
_DTYPES = {
    f"torch.{name}": name
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("uint16", "uint32", "uint64", "float16", "float32", "float64"),
    )
}


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


class TensorDictReader(Reader):
    """Read the rows of a TensorDict's memory-map folder, or of a dump of a TorchRL buffer.

    Rows are stored unchanged, except for `index`; if a batch has several dims, the first one counts the rows.
    Rows of a ring are read oldest first, and slots that were never written are left out. An episode ends
    where `("next", "done")`, `terminated` or `truncated` is True; it is cut where the next `observation` or
    `pixels` of a row differs from that of the following row. With trajectory ids,
    `("collector", "traj_ids")`, these determine the episodes instead.

    Texts and other objects that are equal for all rows are stored in `rb.meta["tensordict"]` if the folder
    has them as JSON; those kept as pickles, `other.pickle`, are left out and named there.

    Args:
        source: The folder.

    Raises:
        NotFoundError: The folder does not exist.
        SchemaError: The folder has another format, or tensors that no field can hold.
        StorageError: A file is shorter than its shape says.

    Example:
        >>> import_dataset(TensorDictReader("~/.cache/torchrl/minari/D4RL/pen/human-v2"), "pen.exp")
    """

    format: ClassVar[str] = "tensordict"

    @parses_source
    def __init__(self, source: str | Path) -> None:
        self._path, self._disk = local_path(source), ReadingDisk()
        check_folder(self._path)
        if not is_tensordict_folder(self._path):
            raise SchemaError(
                f"{self._path} is neither a memory-map folder of a TensorDict nor a dump of a TorchRL buffer"
            )
        is_dump = self._disk.exists(self._path / _STORAGE / _META)
        self._folder = self._path / _STORAGE if is_dump else self._path
        dims = self._read_json(self._folder / _META).get("shape", [0])
        if is_dump and len(dims) > 1:
            raise SchemaError(
                f"{self._path} is a dump of a storage with {len(dims)} dims, {dims}; one dim is supported",
                hint="load it with torchrl, and extend a store with rb[:]",
            )
        self._facts: dict[str, Any] = {}
        self._left_out: list[str] = []
        self._files: list[Path] = [self._folder / _META]
        self._tensors = {
            key: tensor
            for key, tensor in self._find((), self._folder)
            if key not in _OWN and key != ("_data",)
        }
        if not self._tensors:
            raise SchemaError(f"{self._folder} has no tensors")
        lengths = {key: (tensor.shape or (0,))[0] for key, tensor in self._tensors.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{key_name(key)} {count}" for key, count in list(lengths.items())[:4])
            raise SchemaError(f"{self._folder} has tensors of different lengths: {listed}")
        self._order = self._find_order(next(iter(lengths.values())), is_dump)

    def parts(self) -> list[Part]:
        """Return the folder."""
        return [Part(name=self._path.name, files=sorted(self._files))]

    def facts(self) -> Mapping[str, Any]:
        """Return the values that are not tensors, and the names of those that are left out."""
        return {"tensordict": {"values": self._facts, "left_out": self._left_out}}

    def count_rows(self, part: Part) -> int:
        """Return the number of rows."""
        return len(self._order)

    def episodes(self, part: Part) -> Iterator[Rows]:
        """Yield the rows, cut at the ends of episodes."""
        row_bytes = sum(one.dtype.itemsize * int(np.prod(one.shape[1:])) for one in self._tensors.values())
        size = max(1, _PIECE_BYTES // max(1, row_bytes))
        count = len(self._order)
        for start in range(0, count, size):
            # One row more, to see whether it continues the last one.
            places = self._order[start : start + size + 1]
            columns = {key: np.ascontiguousarray(tensor[places]) for key, tensor in self._tensors.items()}
            here = min(size, count - start)
            first = 0
            for last, end in self._ends(columns, here):
                if last >= first:
                    yield self._rows(columns, slice(first, last + 1), end)
                    first = last + 1
            if first < here:
                yield self._rows(columns, slice(first, here), "open")

    def _rows(self, columns: Mapping[Key, Array], rows: slice, end: End) -> Rows:
        return Rows(columns_by_key={key: values[rows] for key, values in columns.items()}, end=end)

    def _ends(self, columns: Mapping[Key, Array], count: int) -> list[tuple[int, End]]:
        """Return the positions of episode ends among the first rows, and how each episode ends."""
        if _TRAJECTORY in columns:
            return []
        has_next = any(key[0] == "next" for key in columns)
        keys: dict[str, Key] = {
            name: ("next", name) if has_next else (name,) for name in ("terminated", "truncated", "done")
        }
        flags = {name: _find_flagged(columns[key], count) for name, key in keys.items() if key in columns}
        ended = np.zeros(count, bool)
        for flag in flags.values():
            ended |= flag
        seams = np.zeros(count, bool)
        for key in columns:
            after = columns.get(("next", *key)) if key[0] in _OBSERVATIONS else None
            if after is not None and after.shape == columns[key].shape:
                rows = min(count, len(after) - 1)
                seams[:rows] |= rows_differ(after[:rows], columns[key][1 : rows + 1])
        found: list[tuple[int, End]] = []
        for row in np.flatnonzero(ended | seams).tolist():
            if not ended[row]:
                found.append((row, "cut"))
            elif "truncated" in flags and flags["truncated"][row]:
                found.append((row, "truncated"))
            else:
                found.append((row, "terminated"))
        return found

    # -- files -------------------------------------------------------------------------------------------

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
                self._files.append(below / _META)
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
        size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        if not self._disk.exists(path):
            raise NotFoundError(f"there is no file {path}")
        if self._disk.size(path) < size:
            raise StorageError(
                f"{path} has {self._disk.size(path)} bytes; {list(shape)} {dtype} needs {size}"
            )
        self._files.append(path)
        if not size:
            return np.zeros(shape, dtype)
        return np.memmap(path, dtype, "r", shape=shape)

    def _note(self, key: Key, folder: Path) -> None:
        """Record a value that is not a tensor."""
        about = self._read_json(folder / _META)
        if "data" in about:
            self._facts[key_name(key)] = about["data"]
        else:
            self._left_out.append(key_name(key))

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


def _find_flagged(values: Array, count: int) -> Array:
    """Return a mask of the first rows in which a flag is set."""
    return np.asarray(values[:count].reshape(count, -1).any(axis=1))
