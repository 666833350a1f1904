"""Read Minari's data sets: a folder with an HDF5 file, or with Arrow or Parquet files per episode.

Source of the format: the storages of https://github.com/Farama-Foundation/Minari (0.5.4). HDF5 is read with
h5py, Arrow and Parquet with pyarrow. Minari itself is not used: its reader of Arrow and Parquet returns wrong
rows for episodes of more than 32,767 steps.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from expstore._settings import EpisodeKeys
from expstore.core.parsing import INVALID, parsing
from expstore.core.values import Array, Key
from expstore.datasets.download import HUGGING_FACE, RemoteFile, fetch_json, list_hub
from expstore.datasets.episode import End, Episode, Part, Reader, put_value
from expstore.datasets.kind import Kind, Request
from expstore.datasets.recognition import Source
from expstore.datasets.samples import make_walks, write_json
from expstore.datasets.source_paths import check_folder, parses_source
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import NotFoundError, SchemaError, StorageError
from expstore.exchange.base import import_library, open_to_read, piece_rows
from expstore.exchange.fill import settings_of
from expstore.exchange.foreign_rows import from_stored
from expstore.exchange.hdf5 import datasets_in, reading_hdf5, write_hdf5
from expstore.exchange.minari_export import (
    DATA,
    INFO_ATTRIBUTE,
    MAIN,
    METADATA,
    STATUS_ATTRIBUTE,
    find_stored_type,
)
from expstore.schema.schema import Field, Schema

_EPISODE = re.compile(r"episode_(\d+)")
_TUPLE_PART = re.compile(r"_index_(\d+)")
_NUMBER = re.compile(r"\d+")
_PIECE_BYTES = 16 << 20
_AUTHOR = "farama-minari"
_FLAGS = ("terminations", "truncations")
_STATES = ("observations", "state", "infos")
_NAMES = {"observations": "observation", "actions": "action", "infos": "info"}


class MinariReader(Reader):
    """Read the episodes of a Minari data set.

    - `observations`, `state` and `infos`: `observation`, `state` and `info` at the root and under "next".
      Infos with one row per step lack that of the reset; a row of zeros is put before them.
    - `actions`: `action`; `rewards`: `("next", "reward")`; `terminations`, `truncations`: the ends.
    - Parts of a Tuple are called "0", "1", ... Other arrays keep their names.
    - `episode`: the number of the episode, int64. Its seed, options and id are annotations of the episode.
    - Images that Minari stores as JPEG are decoded with Pillow.
    - Text is not stored as a field. Text that is equal in all rows of an episode is an annotation of it.
    - `metadata.json` is stored in `rb.meta["minari"]`.

    A data set that expstore exported has the fields, dtypes, annotations and capacity of the exported store.

    Args:
        source: The folder of the data set, or the folder `data` in it.
        capacity: Maximum number of rows of the store, which keeps the newest ones. None: unbounded, or the
            capacity of the exported store.

    Raises:
        NotFoundError: There is no Minari data set.
        StorageError: A file cannot be read.
        SchemaError: There are no episodes, or an episode lacks actions, rewards or observations.
        MissingExtraError: h5py is not installed, or Pillow is not installed and images are JPEG.

    Example:
        >>> from expstore.datasets import MinariReader, import_dataset, make_sample
        >>> source = make_sample("minari", "pen/human-v2")
        >>> done = import_dataset(MinariReader(source), "data.exp")
    """

    format: ClassVar[str] = "minari"

    @parses_source
    def __init__(self, source: str | Path, *, capacity: int | None = None) -> None:
        folder, disk = local_path(source), ReadingDisk()
        check_folder(folder)
        self._folder = folder / DATA if disk.is_dir(folder / DATA) else folder
        self._about = _read_metadata(self._folder)
        self._capacity = capacity
        form = self._about.get("data_format", "hdf5")
        if form not in ("hdf5", "arrow", "parquet"):
            raise SchemaError(f"the data set has the format {form!r}; hdf5, arrow and parquet can be read")
        files = _Hdf5Files if form == "hdf5" else _TableFiles
        self._files: _Files = files(self._folder, self._about)
        with self._files.episodes() as found:
            first = next(iter(found), None)
            if first is None:
                raise SchemaError(f"{self._files.where} contains no episodes")
            self._own = _read_own_fields(self._about, first)
            self._notes = _notes(first, self._own)
            if (self._about.get("expstore") or {}).get("group_key"):
                self._notes.append("episodes are in no groups: the data set has none")

    def parts(self) -> list[Part]:
        """Return the data set as one part."""
        name = str(self._about.get("dataset_id", "minari"))
        return [Part(name=name, files=[*self._files.paths(), self._folder / METADATA])]

    def options(self) -> Mapping[str, Any]:
        """Return the capacity, if one was passed."""
        return {} if self._capacity is None else {"capacity": self._capacity}

    def facts(self) -> Mapping[str, Any]:
        """Return the content of `metadata.json`."""
        return {"minari": {name: value for name, value in self._about.items() if name != "expstore"}}

    def settings(self) -> Mapping[str, Any]:
        """Return the capacity, and the fields and field roles of the exported store."""
        exported = self._about.get("expstore") or {}
        capacity = exported.get("capacity") if self._capacity is None else self._capacity
        if self._own is None:
            return {"capacity": capacity}
        schema = self._own.schema
        roles = settings_of(exported, schema)
        episodes = EpisodeKeys(
            traj=roles.get("traj_key"),
            done=roles.get("done_keys"),
            reward=roles.get("reward_key"),
            reward_reduce=roles.get("reward_reduce"),
            done_reduce=roles.get("done_reduce"),
        )
        return {"episodes": episodes, "capacity": capacity, "schema": schema}

    def notes(self) -> list[str]:
        """Return what is left out or changed."""
        return self._notes

    def count_rows(self, part: Part) -> int:
        """Return the number of steps in `metadata.json`."""
        return int(self._about.get("total_steps", 0))

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the episodes in the order of their numbers, long ones in pieces of about 16 MB."""
        with self._files.episodes() as found:
            for recorded in found:
                yield from self._own.pieces(recorded) if self._own else _pieces(recorded)


def _read_metadata(folder: Path) -> dict[str, Any]:
    disk, path = ReadingDisk(), folder / METADATA
    if not disk.exists(path):
        raise NotFoundError(f"there is no Minari dataset in {folder}: it has no {METADATA}")
    with parsing(path, StorageError):
        return dict(json.loads(disk.read_whole(path.resolve())))


# -- what an episode holds -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Values:
    """Hold values of an episode, one per row.

    Args:
        rows: Number of rows.
        dtype: Dtype of a row: "O" for text.
        shape: Shape of a row.
        read: Function that reads the rows of a range.
        is_jpeg: Whether the values are decoded images.
    """

    rows: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    read: Callable[[int, int], Array]
    is_jpeg: bool = False

    @property
    def is_text(self) -> bool:
        return self.dtype.kind not in "biufc"


@dataclass(frozen=True)
class _Recorded:
    """Describe an episode in the files.

    Args:
        number: Number of the episode.
        name: Name in messages.
        values: Values by path, for instance "observations/pos".
        said: Attributes.
    """

    number: int
    name: str
    values: Mapping[str, _Values]
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Number of steps.

        Raises:
            SchemaError: The episode has no rewards.
        """
        if "rewards" not in self.values:
            raise SchemaError(
                f"{self.name} has no 'rewards'", hint="it is not an episode of a Minari data set"
            )
        return self.values["rewards"].rows

    @property
    def piece_rows(self) -> int:
        """Number of steps that are read at a time."""
        size = sum(one.dtype.itemsize * math.prod(one.shape) for one in self.values.values())
        return min(piece_rows(size), max(1, _PIECE_BYTES // max(1, size)))

    def check(self) -> None:
        """Check that there are observations and actions, and their numbers of rows.

        Raises:
            SchemaError: Something is missing, or has another number of rows.
        """
        steps = self.steps
        for group in ("observations", "actions"):
            found = [one for path, one in self.values.items() if path.split("/")[0] == group]
            if not found:
                raise SchemaError(f"{self.name} has no {group!r}")
            if all(one.is_text for one in found):
                raise SchemaError(f"{self.name} has no numbers in {group!r}")
        for path, values in self.values.items():
            states = path.split("/")[0] in _STATES
            if not self.is_stored(path):
                continue
            if values.rows != steps and not (states and values.rows == steps + 1):
                raise SchemaError(
                    f"{self.name} has {values.rows} {path!r} for {steps} rewards, not "
                    f"{f'{steps + 1} or {steps}' if states else steps}"
                )

    def is_stored(self, path: str) -> bool:
        """Return whether an array is stored: it is numeric, and an info has a row for every step."""
        values = self.values[path]
        is_partial = path.startswith("infos/") and values.rows not in (self.steps, self.steps + 1)
        return not values.is_text and not is_partial

    def end(self) -> End:
        """Return how the episode ends."""
        if self.said.get(STATUS_ATTRIBUTE) in ("open", "cut"):
            return "cut"
        for name, end in zip(_FLAGS, ("terminated", "truncated"), strict=True):
            flags = self.values.get(name)
            if flags is not None and flags.rows and flags.read(flags.rows - 1, flags.rows)[0]:
                return "terminated" if end == "terminated" else "truncated"
        return "cut"

    def facts(self) -> dict[str, Any]:
        """Return annotations of the episode."""
        said = {name: _plain(value) for name, value in self.said.items()}
        if INFO_ATTRIBUTE in said or STATUS_ATTRIBUTE in said:
            text = said.get(INFO_ATTRIBUTE)
            return dict(json.loads(text)) if text else {}
        found: dict[str, Any] = {"minari_id": said.pop("id", self.number)}
        said.pop("total_steps", None)
        for name, value in said.items():
            put_value(found, name.split("/"), value)
        for path, values in self.values.items():
            if values.is_text and values.rows and not values.shape:
                texts = {_plain(text) for text in values.read(0, values.rows)}
                if len(texts) == 1:
                    found[path] = texts.pop()
        return found


def _pieces(recorded: _Recorded) -> Iterator[Episode]:
    """Yield an episode in pieces."""
    recorded.check()
    steps, end, facts = recorded.steps, recorded.end(), recorded.facts()
    size = recorded.piece_rows
    for start in range(0, steps, size):
        stop = min(start + size, steps)
        yield _piece(recorded, start, stop, "open" if stop < steps else end, facts)


def _piece(recorded: _Recorded, start: int, stop: int, end: End, facts: Mapping[str, Any]) -> Episode:
    tree: dict[str, Any] = {}
    states: dict[str | Key, Any] = {}
    fields: dict[str | Key, Array] = {"episode": np.full(stop - start, recorded.number, np.int64)}
    for path, values in recorded.values.items():
        if path in (*_FLAGS, "rewards") or not recorded.is_stored(path):
            continue
        key = _key(path)
        if key[0] == "state":
            states[key] = _states(values, recorded.steps, start, stop)
        elif key[0] in ("observation", "info"):
            reset = key[0] == "info" and values.rows == recorded.steps
            put_value(tree, key, _states(values, recorded.steps, start, stop, lacks_reset=reset))
        elif key[0] == "action":
            put_value(tree, key, values.read(start, stop))
        else:
            fields[key] = values.read(start, stop)
    return Episode(
        observation=tree.get("observation", {}),
        action=tree["action"],
        reward=recorded.values["rewards"].read(start, stop),
        end=end,
        info=tree.get("info", {}),
        states=states,
        fields=fields,
        facts=facts,
    )


def _states(values: _Values, steps: int, start: int, stop: int, *, lacks_reset: bool = False) -> Array:
    """Return the values of the states for the steps of a range, and after the last of them."""
    if not lacks_reset:
        return values.read(start, min(stop + 1, values.rows))
    found = values.read(max(0, start - 1), stop)
    return found if start else np.concatenate([np.zeros_like(found[:1]), found])


def _key(path: str) -> Key:
    parts = [found[1] if (found := _TUPLE_PART.fullmatch(part)) else part for part in path.split("/")]
    return (_NAMES.get(parts[0], parts[0]), *parts[1:])


def _plain(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _notes(recorded: _Recorded, own: _Exported | None) -> list[str]:
    notes = []
    for path, values in recorded.values.items():
        if values.is_jpeg:
            notes.append(f"{path!r} are JPEG images, whose pixels differ slightly from the environment's")
        if own is None and not recorded.is_stored(path):
            notes.append(f"{path!r} has no number or array per step and is left out")
    return notes


# -- data sets that expstore exported --------------------------------------------------------------------


@dataclass(frozen=True)
class _Exported:
    """Describe the fields of the store from which a data set was exported.

    Args:
        schema: The fields.
        places: The field of an array, by the array's path.
    """

    schema: Schema
    places: Mapping[str, Field]

    def pieces(self, recorded: _Recorded) -> Iterator[Episode]:
        """Yield an episode in pieces, with only these fields."""
        recorded.check()
        if absent := [path for path in self.places if path not in recorded.values]:
            raise SchemaError(f"{recorded.name} has no {absent[0]!r}, which the first episode has")
        steps, facts = recorded.steps, recorded.facts()
        size = recorded.piece_rows
        for start in range(0, steps, size):
            stop = min(start + size, steps)
            columns: dict[Key, Array] = {}
            for path, entry in self.places.items():
                values, count = recorded.values[path], stop - start
                following = _is_followed(path, entry, values.rows, steps)
                read = values.read(start, stop + following)
                columns[entry.key] = from_stored(entry, read[:count], count)
                if following:
                    columns["next", *entry.key] = from_stored(entry, read[1:], count)
            # "cut", because flags among the fields say how the episode ends, and trajectory ids may be
            # reused.
            yield _StoredRows(
                observation={},
                action={},
                end="open" if stop < steps else "cut",
                facts=facts,
                stored=columns,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _StoredRows(Episode):
    """Hold rows of an episode that already have their keys."""

    stored: dict[Key, Array]

    def __len__(self) -> int:
        return len(next(iter(self.stored.values())))

    def columns(self) -> dict[Key, Array]:
        return self.stored


def _read_own_fields(about: Mapping[str, Any], first: _Recorded) -> _Exported | None:
    """Return the fields that expstore recorded in `metadata.json`; None if it did not write the file."""
    own = about.get("expstore")
    if not own:
        return None
    known = [Field(tuple(one["key"]), str(one["dtype"]), tuple(one["shape"])) for one in own["fields"]]
    steps = first.steps
    places = {}
    fields: list[Field] = []
    for path, place in own["paths"].items():
        entry, values = known[int(place)], first.values.get(str(path))
        if values is None:
            raise SchemaError(f"{first.name} has no {path!r}")
        if find_stored_type(entry, path) != (values.dtype.newbyteorder("<"), values.shape):
            raise SchemaError(f"{first.name} has other values of {path!r} than {METADATA} describes")
        places[str(path)] = entry
        fields.append(entry)
        if _is_followed(path, entry, values.rows, steps):
            fields.append(Field(("next", *entry.key), entry.dtype, entry.shape))
    return _Exported(Schema(fields), places)


def _is_followed(path: str, entry: Field, rows: int, steps: int) -> bool:
    """Return whether an array holds a field of the states, including those after the steps."""
    return rows == steps + 1 and (path.split("/")[0] == "observations" or entry.key[0] == "info")


# -- files -----------------------------------------------------------------------------------------------


class _Files(Protocol):
    """Interface of the files of a data set."""

    @property
    def where(self) -> Path:
        """Path for messages."""

    def paths(self) -> list[Path]:
        """Return the files with rows."""

    def episodes(self) -> AbstractContextManager[Iterator[_Recorded]]:
        """Open the files; yield the episodes in the order of their numbers."""


class _Hdf5Files:
    """Read a file with one group per episode."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.where, self._images = folder / MAIN, _image_shapes(about)

    def paths(self) -> list[Path]:
        return [self.where]

    @contextmanager
    def episodes(self) -> Iterator[Iterator[_Recorded]]:
        with reading_hdf5(self.where) as file:
            numbers = sorted(int(found[1]) for name in file if (found := _EPISODE.fullmatch(name)))
            yield (self._read_recorded(file[f"episode_{number}"], number) for number in numbers)

    def _read_recorded(self, group: Any, number: int) -> _Recorded:
        values = {path: self._values(path, one) for path, one in datasets_in(group) if one.shape}
        return _Recorded(number, f"episode_{number}", values, dict(group.attrs))

    def _values(self, path: str, dataset: Any) -> _Values:
        rows, shape = dataset.shape[0], dataset.shape[1:]
        image = self._images.get(path)
        if image is not None and (dataset.dtype.kind == "O" or len(shape) == 1):
            return _Values(rows, np.dtype("u1"), image, lambda a, b: _decode_images(dataset[a:b]), True)
        return _Values(rows, dataset.dtype, shape, lambda a, b: np.asarray(dataset[a:b]))


class _TableFiles:
    """Read one folder per episode, with an Arrow IPC or Parquet file, and `metadata.json`."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.where, self._about, self._images = folder, about, _image_shapes(about)
        self._shapes = _row_shapes(about)
        disk = ReadingDisk()
        self._numbers = sorted(
            int(name) for name in disk.names(folder) if _NUMBER.fullmatch(name) and disk.is_dir(folder / name)
        )

    def paths(self) -> list[Path]:
        return [
            path for number in self._numbers for path in [*self._tables(number), self._metadata_path(number)]
        ]

    @contextmanager
    def episodes(self) -> Iterator[Iterator[_Recorded]]:
        yield (self._read_recorded(number) for number in self._numbers)

    def _metadata_path(self, number: int) -> Path:
        return self.where / str(number) / METADATA

    def _tables(self, number: int) -> list[Path]:
        folder = self.where / str(number)
        suffix = "." + str(self._about["data_format"])
        names = [name for name in ReadingDisk().names(folder) if name.endswith(suffix)]
        return [folder / name for name in sorted(names)]

    def _read_recorded(self, number: int) -> _Recorded:
        said = _read_metadata(self._metadata_path(number).parent)
        tables = self._tables(number)
        if len(tables) != 1:
            raise SchemaError(
                f"{self._metadata_path(number).parent} has {len(tables)} files of rows; 1 is expected"
            )
        table = _read_table(tables[0])
        steps = int(said["total_steps"])
        if table.num_rows not in (steps, steps + 1):
            raise SchemaError(f"{tables[0]} has {table.num_rows} rows for {steps} steps")
        values: dict[str, _Values] = {}
        for name in table.column_names:
            if name != "episode_id":
                # Columns of steps are padded to the number of states.
                rows = table.num_rows if name in _STATES else steps
                self._add(values, name, table.column(name), table.schema.field(name), rows)
        return _Recorded(number, f"episode {number}", values, said)

    def _add(self, values: dict[str, _Values], path: str, column: Any, entry: Any, rows: int) -> None:
        """Add a column, or the columns of a struct."""
        types = importlib.import_module("pyarrow").types
        kind = column.type
        if types.is_struct(kind):
            for place in range(kind.num_fields):
                part = kind.field(place)
                inside = _field_of(column, place)
                self._add(values, f"{path}/{part.name}", inside, part, rows)
        elif types.is_fixed_size_list(kind):
            dtype = np.dtype(kind.value_type.to_pandas_dtype())
            shape = self._shapes.get(path, _read_shape(entry, kind.list_size))

            def read(start: int, stop: int) -> Array:
                found = column.slice(start, stop - start).combine_chunks()
                return _numpy(found.flatten()).reshape(stop - start, *shape)

            values[path] = _Values(rows, dtype, shape, read)
        elif path in self._images and types.is_binary(kind):
            image = self._images[path]
            values[path] = _Values(
                rows,
                np.dtype("u1"),
                image,
                lambda a, b: _decode_images(column.slice(a, b - a).to_pylist()),
                True,
            )
        elif types.is_boolean(kind) or types.is_integer(kind) or types.is_floating(kind):
            dtype = np.dtype(kind.to_pandas_dtype())
            values[path] = _Values(rows, dtype, (), lambda a, b: _numpy(column.slice(a, b - a)))
        else:
            values[path] = _Values(
                rows, np.dtype("O"), (), lambda a, b: np.array(column.slice(a, b - a).to_pylist(), "O")
            )


def _read_table(path: Path) -> Any:
    """Return the rows of an episode. Those of an Arrow file stay on disk until they are used."""
    pyarrow = importlib.import_module("pyarrow")
    try:
        if path.suffix == ".parquet":
            with open_to_read(path) as file:
                return importlib.import_module("pyarrow.parquet").ParquetFile(file).read()
        found = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        found.validate(full=True)  # otherwise forged offsets are followed
        return found
    except (pyarrow.ArrowException, OSError, *INVALID) as exc:
        raise StorageError(f"cannot read {path}: {exc}") from exc


def _field_of(column: Any, place: int) -> Any:
    """Return a column of a column of structs."""
    pyarrow = importlib.import_module("pyarrow")
    kind = column.type.field(place).type
    return pyarrow.chunked_array([chunk.field(place) for chunk in column.chunks], type=kind)


def _numpy(values: Any) -> Array:
    found: Array = values.to_numpy(zero_copy_only=False) if hasattr(values, "buffers") else values.to_numpy()
    return found


def _read_shape(entry: Any, size: int) -> tuple[int, ...]:
    """Return the row shape of a list, which Minari records in the type of an info."""
    text = (entry.metadata or {}).get(b"shape")
    if text is None:
        return (size,)
    return tuple(int(part) for part in text.split(b",") if part)


def _row_shapes(about: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the row shapes of observations and actions by path."""
    found: dict[str, tuple[int, ...]] = {}
    for path, space in _spaces(about):
        if space.get("type") == "Box":
            found[path.replace("_index_", "")] = tuple(space["shape"])
        elif space.get("type") == "MultiBinary":
            found[path.replace("_index_", "")] = tuple(np.atleast_1d(space["n"]).tolist())
        elif space.get("type") == "MultiDiscrete":
            found[path.replace("_index_", "")] = np.shape(space["nvec"])
    return found


def _image_shapes(about: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the arrays that are JPEG images, with their shapes."""
    if not about.get("jpeg_encoding", True):
        return {}
    is_hdf5 = about.get("data_format", "hdf5") == "hdf5"
    return {
        path if is_hdf5 else path.replace("_index_", ""): tuple(space["shape"])
        for path, space in _spaces(about)
        if space.get("type") == "Box" and space.get("dtype") == "uint8" and len(space["shape"]) in (2, 3)
    }


def _spaces(about: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the spaces of observations and actions that have no parts, by path."""

    def below(path: str, space: Any) -> Iterator[tuple[str, Any]]:
        parts = space.get("subspaces")
        if isinstance(parts, dict):
            for name, part in parts.items():
                yield from below(f"{path}/{name}", part)
        elif isinstance(parts, list):
            for number, part in enumerate(parts):
                yield from below(f"{path}/_index_{number}", part)
        else:
            yield path, space

    for group in ("observation", "action"):
        text = about.get(f"{group}_space")
        if isinstance(text, str):
            yield from below(f"{group}s", json.loads(text))


def _decode_images(images: Iterable[Any]) -> Array:
    image = import_library("PIL.Image")
    found = [
        np.asarray(image.open(io.BytesIO(one if isinstance(one, bytes) else np.asarray(one).tobytes())))
        for one in images
    ]
    return np.stack(found)


# -- data sets by name -----------------------------------------------------------------------------------


def list_minari(endpoint: str = HUGGING_FACE) -> list[str]:
    """Return the ids of Minari's public data sets.

    Raises:
        RemoteError: The address does not answer.
    """
    base = endpoint.rstrip("/")
    found: list[str] = []
    for repository in fetch_json(f"{base}/api/datasets?author={_AUTHOR}&limit=1000"):
        name = repository["id"]
        try:
            said = fetch_json(f"{base}/datasets/{name}/resolve/main/namespace_metadata.json")
        except NotFoundError:  # a data set without a namespace
            found.append(name.rpartition("/")[2])
        else:
            found += said.get("datasets", [])
    return sorted(found)


def _recognize(source: Source) -> bool:
    return source.has(METADATA) or source.has(f"{DATA}/{METADATA}")


def _list_files(request: Request) -> list[RemoteFile]:
    repository, _, folder = request.dataset_id.partition("/")
    return list_hub(
        f"{_AUTHOR}/{repository}",
        folder,
        request.mirror,
        keep=lambda path: "/data/" in f"/{path}",
        missing=f"has no data set {folder or repository}",
        is_flat=False,
    )


def _make_sample(path: Path) -> None:
    walks = make_walks()
    values: dict[str, Array] = {}
    for walk in walks:
        columns = {
            "observations": walk.states,
            "actions": walk.actions,
            "rewards": walk.rewards,
            "terminations": walk.terminated,
            "truncations": walk.truncated,
        }
        values |= {f"episode_{walk.number}/{name}": column for name, column in columns.items()}
    box = {"type": "Box", "dtype": "float32", "shape": [3], "low": [-100.0] * 3, "high": [100.0] * 3}
    about = {
        "dataset_id": path.name,
        "data_format": "hdf5",
        "total_episodes": len(walks),
        "total_steps": sum(walk.steps for walk in walks),
        "observation_space": json.dumps(box),
        "action_space": json.dumps(box),
        "minari_version": "0.5.4",
    }
    write_json(path / DATA / METADATA, about)
    attributes = {f"episode_{walk.number}": {"id": walk.number, "total_steps": walk.steps} for walk in walks}
    write_hdf5(path / DATA / MAIN, values, attributes)


KIND = Kind(
    reader=MinariReader,
    files="the folder of the data set, as in ~/.minari/datasets",
    make_sample=_make_sample,
    endings="terminated or truncated by the flags of the last step, otherwise cut",
    recognize=_recognize,
    prefix="minari",
    buffer="MinariExperienceReplay",
    ids=list_minari,
    public=f"{HUGGING_FACE}/{_AUTHOR}",
    mirror=HUGGING_FACE,
    list_files=_list_files,
)
