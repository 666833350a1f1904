"""Read RLDS data sets: folders that TensorFlow Datasets wrote, with one record per episode.

TensorFlow is not used.

Source of the format: https://github.com/google-research/rlds (steps and their flags) and
https://github.com/tensorflow/datasets (`feature.proto` for features.json, `dataset_info.proto`,
`example_serializer.py`: the values of the steps are concatenated under `steps/NAME`; sequences in a step are
`NAME/ragged_flat_values` with `NAME/ragged_row_lengths_N`).
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from expstore.core.parsing import INVALID
from expstore.core.values import Array, Key, key_name
from expstore.datasets.download import RemoteFile, fetch_files
from expstore.datasets.episode import Episode, Part, Reader
from expstore.datasets.frames import decode_images
from expstore.datasets.kind import Kind, Request
from expstore.datasets.samples import make_walks, write_file, write_json
from expstore.datasets.source_paths import check_folder, parses_source
from expstore.datasets.steps import LastStep, Steps
from expstore.datasets.tfrecord import Example, encode_example, encode_records, parse_example, read_records
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import NotFoundError, SchemaError
from expstore.exchange.base import import_library

_PIECE_BYTES = 16 << 20
#: The folder of Open X-Embodiment, with the data sets as NAME/VERSION.
OPEN_X = "https://storage.googleapis.com/gresearch/robotics"
_INFO = ("dataset_info.json", "features.json")
#: Metadata of an episode with more values than this are left out, because annotations are JSON.
_FACT_VALUES = 1000
_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
_FORMATS = ("tfrecord", "array_record")
#: Fields whose name differs from the feature's, following TorchRL's OpenXExperienceReplay.
_KEYS: dict[str, Key] = {"is_first": ("is_init",)}


@dataclass(frozen=True, slots=True)
class Shard:
    """Describe a file of records.

    Args:
        name: Name of the file.
        split: Its split.
        first: Number of its first episode in the data set.
        episodes: Number of episodes.
    """

    name: str
    split: str
    first: int
    episodes: int


def list_shards(info: Mapping[str, Any]) -> list[Shard]:
    """Return the shards that dataset_info.json lists.

    Raises:
        SchemaError: The files have another format, or are not listed.
    """
    if _file_format(info) not in _FORMATS:
        raise SchemaError(
            f"files of the format {_file_format(info)!r} cannot be read; {' and '.join(_FORMATS)} can"
        )
    found: list[Shard] = []
    first = 0
    try:
        for split in info["splits"]:
            lengths = [int(length) for length in split["shardLengths"]]
            for place, length in enumerate(lengths):
                found.append(
                    Shard(_file_name(info, split, place, len(lengths)), str(split["name"]), first, length)
                )
                first += length
    except (KeyError, TypeError, ValueError) as exc:
        raise SchemaError(f"the splits and their shards are not listed: {exc!r}") from exc
    return found


def _file_format(info: Mapping[str, Any]) -> str:
    return str(info.get("fileFormat") or "tfrecord")


def _file_name(info: Mapping[str, Any], split: Mapping[str, Any], place: int, shards: int) -> str:
    name = str(split.get("filepathTemplate") or _TEMPLATE)
    values = {
        "DATASET": str(info.get("name", "")),
        "SPLIT": str(split["name"]),
        "FILEFORMAT": _file_format(info),
        "SHARD_INDEX": f"{place:05d}",
        "NUM_SHARDS": f"{shards:05d}",
        "SHARD_X_OF_Y": f"{place:05d}-of-{shards:05d}",
    }
    for key, value in values.items():
        name = name.replace(f"{{{key}}}", value)
    # A name with a path could refer to a file outside of the data set.
    if "/" in name or "{" in name:
        raise ValueError(f"{name!r} is not the name of a file")
    return name


class RLDSReader(Reader):
    """Read the episodes of an RLDS data set, in the order of its shards.

    - `observation`, `action`, `reward` of a step become `observation`, `action`, `next.reward`. Other numbers
      (`discount`, `language_embedding`) keep their names, `is_first` becomes `is_init`.
    - Images become `(channels, height, width)`, usually uint8. Tensors keep their declared shape and dtype.
    - Texts of a step (`language_instruction`) become annotations of the episode; a text that changes is a
      list of `{"step", "text"}`. Numbers and texts outside of the steps (`episode_metadata`, `episode_id`)
      and the split are annotations too.
    - `episode` is the number of the episode in the folder, `frame` the number of the step in its episode.
    - The last step determines how an episode ends: terminated if `is_terminal` is set, cut if the data set
      has `is_last` and it is not set, otherwise truncated. Both flags are used only in the last step.
    - `rb.meta["rlds"]["left_out"]` names what cannot be stored (videos, audio, lists of texts).

    Args:
        source: The folder of one version, with features.json and dataset_info.json.
        split: The split to read. None reads all, in the order of dataset_info.json.
        last_step: Meaning of the last step of an episode. "observation", as in RLDS: only its observation is
            used, as the one after the last action; episodes of one step have no rows. "transition", as in
            many data sets of Open X-Embodiment: it has an action and a reward like the others, and the
            observation after it is not recorded.

    Raises:
        NotFoundError: The folder, features.json, dataset_info.json, a shard or the split is missing.
        SchemaError: The features cannot be read, or the files are neither TFRecord nor ArrayRecord.
        MissingExtraError: The shards are ArrayRecord files, and array_record is not installed.

    Example:
        >>> from expstore.datasets import RLDSReader, import_dataset, make_sample
        >>> source = make_sample("rlds", "cmu_play_fusion/0.1.0")
        >>> done = import_dataset(RLDSReader(source), "data.exp")
    """

    format: ClassVar[str] = "rlds"

    @parses_source
    def __init__(
        self, source: str | Path, *, split: str | None = None, last_step: LastStep = "observation"
    ) -> None:
        if last_step not in ("observation", "transition"):
            raise SchemaError(f"last_step={last_step!r} is not one of 'observation' and 'transition'")
        self._folder = local_path(source)
        self._split, self._last_step = split, last_step
        features = self._read_json("features.json")
        self._info = self._read_json("dataset_info.json")
        self._leaves, self._metadata, self._left_out = _read_features(features, self._folder)
        self._shards = self._find_shards()
        if _file_format(self._info) == "array_record":
            import_library("array_record.python.array_record_module")

    def parts(self) -> list[Part]:
        """Return the shards, each with the files that describe it."""
        described = [self._folder / "features.json", self._folder / "dataset_info.json"]
        return [
            Part(name=shard.name, files=[self._folder / shard.name, *described]) for shard in self._shards
        ]

    def options(self) -> Mapping[str, Any]:
        """Return the split and the meaning of the last step."""
        return {"split": self._split, "last_step": self._last_step}

    def facts(self) -> Mapping[str, Any]:
        """Return the data set's name, version and splits, the texts of steps, and the features left out."""
        splits: dict[str, int] = {}
        for shard in self._shards:
            splits[shard.split] = splits.get(shard.split, 0) + shard.episodes
        return {
            "rlds": {
                "name": str(self._info.get("name", "")),
                "version": str(self._info.get("version", "")),
                "splits": splits,
                "texts": [".".join(leaf.key) for leaf in self._leaves if leaf.kind == "text"],
                "left_out": self._left_out,
            }
        }

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the episodes of a shard, long ones in pieces of 16 MB."""
        shard = next(shard for shard in self._shards if shard.name == part.name)
        count = 0
        for record in self._read(self._folder / shard.name):
            example = parse_example(record)
            facts = {"split": shard.split, **_facts_of(self._metadata, example)}
            steps = _read_steps(self._leaves, example)
            yield from steps.pieces(shard.first + count, self._last_step, _PIECE_BYTES, facts)
            count += 1
        if count != shard.episodes:
            raise SchemaError(
                f"the shard has {count} episodes, but dataset_info.json says {shard.episodes}",
                hint="copy the file again",
            )

    def _read(self, path: Path) -> Iterator[bytes]:
        if _file_format(self._info) == "tfrecord":
            yield from read_records(path)
            return
        module = import_library("array_record.python.array_record_module")
        try:
            reader = module.ArrayRecordReader(str(path))
        except (RuntimeError, ValueError) as exc:
            raise SchemaError(f"{path.name} is not an ArrayRecord file: {exc}") from exc
        try:
            for place in range(reader.num_records()):
                yield reader.read([place])[0]
        except RuntimeError as exc:
            raise SchemaError(f"{path.name} is damaged: {exc}", hint="copy the file again") from exc
        finally:
            reader.close()

    # -- the folder ------------------------------------------------------------------------------------

    def _read_json(self, name: str) -> dict[str, Any]:
        disk, path = ReadingDisk(), self._folder / name
        check_folder(self._folder)
        if not disk.exists(path):
            versions = [one for one in disk.names(self._folder) if disk.exists(self._folder / one / name)]
            raise NotFoundError(
                f"there is no file {path}",
                hint=f"pass the folder of a version: {', '.join(versions)}" if versions else "",
            )
        try:
            found = json.loads(disk.read_whole(path.resolve()))
        except INVALID as exc:
            raise SchemaError(f"{path} is not JSON: {exc}") from exc
        if not isinstance(found, dict):
            raise SchemaError(f"{path} is not a JSON object")
        return found

    def _find_shards(self) -> list[Shard]:
        path = self._folder / "dataset_info.json"
        try:
            found = list_shards(self._info)
        except SchemaError as exc:
            raise exc.at(path) from exc
        names = list(dict.fromkeys(shard.split for shard in found))
        if self._split is not None:
            found = [shard for shard in found if shard.split == self._split]
        if not found:
            raise NotFoundError(
                f"{self._folder} has no split {self._split!r}; it has {', '.join(names) or 'none'}"
            )
        disk = ReadingDisk()
        for shard in found:
            if not disk.exists(self._folder / shard.name):
                raise NotFoundError(
                    f"there is no file {self._folder / shard.name}", hint="dataset_info.json names it"
                )
        return found


# -- features.json ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Leaf:
    """Describe a feature with values.

    Args:
        key: Its path, without "steps".
        kind: How the values are stored.
        shape: Shape of one value; -1 for sizes that are not declared.
        dtype: Dtype of tensors and images.
        encoding: Encoding of tensors stored as bytes: "bytes" or "zlib".
        ranks: Number of sequences between a step and a value.
    """

    key: Key
    kind: Literal["tensor", "image", "text"]
    shape: tuple[int, ...] = ()
    dtype: np.dtype[Any] | None = None
    encoding: str = "none"
    ranks: int = 0

    def nest(self) -> _Leaf:
        """Return the feature as values of a sequence."""
        return _Leaf(self.key, self.kind, self.shape, self.dtype, self.encoding, self.ranks + 1)


def _read_features(features: Mapping[str, Any], folder: Path) -> tuple[list[_Leaf], list[_Leaf], list[str]]:
    """Return the features of a step, the features outside of the steps, and the names of those left out."""
    path = folder / "features.json"
    left_out: list[str] = []
    try:
        children = dict(features["featuresDict"]["features"])
        steps = children.pop("steps")["sequence"]["feature"]
        of_steps = list(_walk(steps, (), ("steps",), left_out))
        outside = [leaf for name, node in children.items() for leaf in _walk(node, (name,), (), left_out)]
    except (KeyError, TypeError, AttributeError) as exc:
        raise SchemaError(
            f"{path} does not describe episodes: {exc!r}",
            hint='the features of RLDS have a data set "steps"',
        ) from exc
    kept: list[_Leaf] = []
    for leaf in of_steps:
        if leaf.kind == "text" and leaf.ranks:
            left_out.append(".".join(("steps", *leaf.key)))
        else:
            kept.append(leaf)
    metadata: list[_Leaf] = []
    for leaf in outside:
        if leaf.kind == "image" or leaf.ranks or prod(leaf.shape) > _FACT_VALUES or -1 in leaf.shape:
            left_out.append(".".join(leaf.key))
        else:
            metadata.append(leaf)
    for name in ("observation", "action"):
        if not any(leaf.key[0] == name for leaf in kept):
            raise SchemaError(f"{path} has no feature 'steps/{name}'")
    return kept, metadata, left_out


def _walk(node: Mapping[str, Any], key: Key, above: Key, left_out: list[str]) -> Iterator[_Leaf]:
    name = ".".join((*above, *key))
    if "featuresDict" in node:
        for child, below in (node["featuresDict"].get("features") or {}).items():
            yield from _walk(below, (*key, child), above, left_out)
    elif "sequence" in node:
        for leaf in _walk(node["sequence"]["feature"], key, above, left_out):
            yield leaf.nest()
    elif "text" in node:
        yield _Leaf(key, "text")
    elif "image" in node:
        yield _Leaf(key, "image", _shape(node["image"]), np.dtype(node["image"].get("dtype") or np.uint8))
    elif "classLabel" in node:
        yield _Leaf(key, "tensor", (), np.dtype(np.int64))
    elif "boundingBox" in node:
        yield _Leaf(key, "tensor", (4,), np.dtype(np.float32))
    elif "tensor" in node:
        yield from _tensor(node["tensor"], key, name, left_out)
    elif "type" in node:
        raise SchemaError(
            f"feature {name!r} is described in the format of TensorFlow Datasets before 4.4",
            hint="write features.json again with a current version",
        )
    else:
        left_out.append(name)


def _tensor(node: Mapping[str, Any], key: Key, name: str, left_out: list[str]) -> Iterator[_Leaf]:
    shape, text = _shape(node), str(node.get("dtype", ""))
    if text in ("string", "object"):
        if shape:
            left_out.append(name)
        else:
            yield _Leaf(key, "text")
        return
    try:
        dtype = np.dtype(text)
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind not in "biuf":
        raise SchemaError(f"feature {name!r} has the type {text!r}, which cannot be read")
    encoding = str(node.get("encoding") or "none").lower()
    if encoding not in ("none", "bytes", "zlib"):
        raise SchemaError(f"feature {name!r} has the encoding {encoding!r}, which cannot be read")
    if -1 in shape:
        raise SchemaError(
            f"feature {name!r} has the shape {list(shape)}: values of several shapes cannot be read"
        )
    yield _Leaf(key, "tensor", shape, dtype, encoding)


def _shape(node: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(size) for size in (node.get("shape") or {}).get("dimensions") or ())


# -- the values of a record ------------------------------------------------------------------------------


def _read_steps(leaves: Sequence[_Leaf], example: Example) -> Steps:
    """Return the steps of one record."""
    numbers: dict[Key, Array | Sequence[bytes]] = {}
    images: dict[Key, Sequence[bytes]] = {}
    texts: dict[Key, list[str]] = {}
    lengths: dict[str, int] = {}
    for leaf in leaves:
        name = "/".join(("steps", *leaf.key))
        key = _KEYS.get(".".join(leaf.key), leaf.key)
        dims = _sequence_dims(leaf, name, example) if leaf.ranks else ()
        flat = f"{name}/ragged_flat_values" if leaf.ranks else name
        if flat not in example:
            raise SchemaError(f"the record has no feature {flat!r}")
        if leaf.kind == "tensor":
            numbers[key] = _shape_values(leaf, flat, dims, example)
            lengths[name] = len(numbers[key])
            continue
        found = _bytes_of(flat, example)
        lengths[name] = len(found)
        if leaf.kind == "text":
            texts[key] = [_text(value) for value in found]
        elif dims:
            raise SchemaError(f"{flat!r} has several images per step, which is not supported")
        else:
            images[key] = found
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{count} of {name}" for name, count in lengths.items())
        raise SchemaError(f"the features have different numbers of steps: {listed}")
    dtypes = {key_name(leaf.key): leaf.dtype for leaf in leaves if leaf.kind == "image"}
    return Steps({**numbers, **images}, texts, lambda name, images: _pixels(name, images, dtypes[name]))


def _shape_values(leaf: _Leaf, name: str, dims: tuple[int, ...], example: Example) -> Array:
    """Return the numbers of a feature, one row per step."""
    values = _numbers_of(leaf, name, example)
    size = prod((*dims, *leaf.shape))
    if not size or values.size % size:
        raise SchemaError(
            f"{name!r} has {values.size} values; steps of the shape {[*dims, *leaf.shape]} need "
            f"a multiple of {size}"
        )
    return values.reshape(-1, *dims, *leaf.shape)


def _pixels(name: str, images: Sequence[bytes], dtype: np.dtype[Any] | None) -> Array:
    """Decode images of a declared dtype; float32 images are stored as four channels of bytes."""
    found = decode_images(name, images)
    if dtype is None or found.dtype == dtype:
        return found
    if dtype == np.float32:
        if found.dtype != np.uint8 or found.shape[1] != 4:
            raise SchemaError(f"{name!r} has images of float32, which need four channels of bytes")
        return np.ascontiguousarray(np.moveaxis(found, 1, -1)).view("<f4").transpose(0, 3, 1, 2)
    # Pillow reads 16-bit PNG files with several channels as 8 bits, which changes the values.
    if dtype.kind not in "iu" or found.dtype.kind not in "biu" or found.dtype.itemsize < dtype.itemsize:
        raise SchemaError(f"{name!r} has images of {found.dtype}, but features.json says {dtype}")
    return found.astype(dtype)


def _sequence_dims(leaf: _Leaf, name: str, example: Example) -> tuple[int, ...]:
    """Return the lengths of the sequences in a step, which must be equal."""
    dims = []
    for rank in range(leaf.ranks):
        lengths = example.get(f"{name}/ragged_row_lengths_{rank}")
        if not isinstance(lengths, np.ndarray) or lengths.dtype.kind != "i" or not lengths.size:
            raise SchemaError(f"the record has no feature '{name}/ragged_row_lengths_{rank}'")
        if lengths.min() != lengths.max():
            raise SchemaError(
                f"{name!r} is ragged: it has between {lengths.min()} and {lengths.max()} values per step, "
                "and a field needs one shape"
            )
        dims.append(int(lengths[0]))
    return tuple(dims)


def _numbers_of(leaf: _Leaf, name: str, example: Example) -> Array:
    found = example[name]
    assert leaf.dtype is not None
    if found is None:
        return np.zeros(0, leaf.dtype)
    if leaf.encoding == "none":
        if isinstance(found, list) or (found.dtype.kind == "f") != (leaf.dtype.kind == "f"):
            kind = "bytes" if isinstance(found, list) else found.dtype
            raise SchemaError(f"{name!r} has values of {kind}, but features.json says {leaf.dtype}")
        return found != 0 if leaf.dtype.kind == "b" else found.astype(leaf.dtype, copy=False)
    values = _bytes_of(name, example)
    if leaf.encoding == "zlib":
        most = max(1, prod(leaf.shape)) * leaf.dtype.itemsize
        # One byte more than declared is enough to detect a wrong length.
        values = [zlib.decompressobj().decompress(value, most + 1) for value in values]
    return np.frombuffer(b"".join(values), leaf.dtype)


def _bytes_of(name: str, example: Example) -> list[bytes]:
    found = example[name]
    if found is None:
        return []
    if not isinstance(found, list):
        raise SchemaError(f"{name!r} has values of {found.dtype}; bytes are expected")
    return found


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _facts_of(metadata: Sequence[_Leaf], example: Example) -> dict[str, Any]:
    """Return the numbers and texts outside of the steps; names do not include `episode_metadata`."""
    found: dict[str, Any] = {}
    for leaf in metadata:
        name = "/".join(leaf.key)
        if example.get(name) is None:
            continue
        key = leaf.key[1:] if len(leaf.key) > 1 and leaf.key[0] == "episode_metadata" else leaf.key
        if leaf.kind == "text":
            texts = [_text(value) for value in _bytes_of(name, example)]
            found[".".join(key)] = texts[0] if len(texts) == 1 else texts
        else:
            values = _numbers_of(leaf, name, example)
            if values.size != prod(leaf.shape):
                raise SchemaError(f"{name!r} has {values.size} values, but its shape is {list(leaf.shape)}")
            found[".".join(key)] = values.reshape(leaf.shape).tolist()
    return found


# -- data sets by name -----------------------------------------------------------------------------------


def _list_files(request: Request) -> list[RemoteFile]:
    """Return the files of a data set. Fetches dataset_info.json, which names the shards."""
    base, split = f"{request.mirror}/{request.dataset_id}", request.options["split"]
    described = [RemoteFile(url=f"{base}/{name}", name=name) for name in _INFO]
    fetch_files(described, request.folder)
    path = request.folder / _INFO[0]
    try:
        shards = list_shards(json.loads(ReadingDisk().read_whole(path.resolve())))
    except INVALID as exc:
        raise SchemaError(f"{base}/{_INFO[0]} is not JSON: {exc}") from exc
    names = [shard.name for shard in shards if split in (None, shard.split)]
    if not names:
        raise NotFoundError(f"{base} has no split {split!r}")
    # The reader requires the shards of all splits only if it reads all splits.
    return described + [RemoteFile(url=f"{base}/{name}", name=name) for name in names]


def _make_sample(path: Path) -> None:
    """Write a data set whose last steps are observations alone."""
    walks = make_walks()
    records = []
    for walk in walks:
        steps = np.arange(walk.steps + 1)
        values: dict[str, Any] = {
            "steps/observation/state": walk.states,
            "steps/action": np.pad(walk.actions, ((0, 1), (0, 0))),
            "steps/reward": np.pad(walk.rewards, (0, 1)),
            "steps/is_first": steps == 0,
            "steps/is_last": steps == walk.steps,
            "steps/is_terminal": np.pad(walk.terminated, (1, 0)),
            "steps/language_instruction": [b"walk about"] * len(steps),
        }
        records.append(encode_example(values))

    def tensor(dtype: str, *shape: int) -> dict[str, Any]:
        return {"tensor": {"dtype": dtype, "shape": {"dimensions": list(map(str, shape))}}}

    def group(**features: Any) -> dict[str, Any]:
        return {"featuresDict": {"features": features}}

    flags = {name: tensor("bool") for name in ("is_first", "is_last", "is_terminal")}
    step = group(
        observation=group(state=tensor("float32", 3)),
        action=tensor("float32", 3),
        reward=tensor("float32"),
        language_instruction={"text": {}},
        **flags,
    )
    write_json(path / "features.json", group(steps={"sequence": {"feature": step}}))
    splits = [{"name": "train", "shardLengths": [str(len(walks))]}]
    write_json(path / "dataset_info.json", {"name": "walk", "version": "1.0.0", "splits": splits})
    write_file(path / "walk-train.tfrecord-00000-of-00001", encode_records(records))


KIND = Kind(
    reader=RLDSReader,
    files="the folder of a version, with features.json and dataset_info.json",
    make_sample=_make_sample,
    endings="terminated if the last step has `is_terminal`, cut if it has no `is_last`, otherwise truncated",
    recognize=lambda source: source.has("features.json"),
    prefix="rlds",
    buffer="RLDSExperienceReplay",
    public=OPEN_X,
    mirror=OPEN_X,
    list_files=_list_files,
    facts="rlds",
)
