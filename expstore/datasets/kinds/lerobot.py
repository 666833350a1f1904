"""Read LeRobot data sets, versions 2 and 3: Parquet files with one row per frame, and videos.

Source of the format: https://github.com/huggingface/lerobot (`datasets/utils.py`, `lerobot_dataset.py`) and
the data sets of https://huggingface.co/lerobot. Version 3 keeps many episodes in a file and describes them
in meta/episodes/**/*.parquet and meta/tasks.parquet; version 2 has a file per episode, meta/episodes.jsonl
and meta/tasks.jsonl. The package lerobot is not used.
"""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from expstore.core.parsing import INVALID
from expstore.core.values import Array, IntArray, Key, key_name, to_key
from expstore.datasets.download import HUGGING_FACE, RemoteFile, list_hub
from expstore.datasets.episode import End, Episode, Part, Reader, put_value
from expstore.datasets.frames import VideoFrames, decode_images
from expstore.datasets.kind import Kind, Request
from expstore.datasets.samples import make_walks, write_file, write_json
from expstore.datasets.source_paths import check_folder, parses_source
from expstore.datasets.steps import text_fact
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.episodes.facts import TRAIN
from expstore.errors import ExpStoreError, NotFoundError, SchemaError
from expstore.exchange.base import import_library, open_to_read
from expstore.exchange.lerobot_format import DONE_KEY, INFO, LEROBOT_KEYS, lerobot_key

_PIECE_BYTES = 16 << 20
_READ_BYTES = 1 << 20
_RANGE = re.compile(r"(\d{1,18}):(\d{1,18})")

#: Keys of columns that are not stored: the row's number in the store, and how the episode ends.
_NOT_STORED = (("index",), ("next", "terminated"), ("next", "truncated"))

#: Rows of columns, by the name of the column.
Rows = dict[str, Array]


class LeRobotReader(Reader):
    """Read a LeRobot data set, in the order of the column `index`.

    - `action`, `observation.state`, `observation.images.CAM`, `next.reward`: the fields `action`,
      `observation.state`, `observation.image.CAM`, `next.reward`. `episode_index` and `frame_index` become
      `episode` and `frame`. Dots in other names nest the fields. `index` orders the rows and is not stored.
      Columns below `next` with one value per row have the shape `(1,)`.
    - Images and videos become uint8 `(channels, height, width)`.
    - A frame's task is its `task_index`; `rb.meta["lerobot"]["tasks"]` has the texts. The tasks of an episode
      are annotations (`task`, or `tasks` if there are several), and so are columns of texts; a text that
      changes is a list of `{"step", "text"}`.
    - An episode whose last frame has `next.done` is terminated if `next.success` is set, otherwise truncated.
      Columns `next.terminated` and `next.truncated` take precedence. Without any of these columns the
      recording was cut. `next.done` of every frame is stored as `next.terminal`.
    - The files do not have the observation after the last frame.
    - An episode has the split whose range `"0:80"` in info.json has its number. Files of episodes from
      `total_episodes` on are ignored: an export that was killed had not added them yet.
    - `rb.meta["lerobot"]["left_out"]` names what is not stored (videos with `decode_video=False`, columns of
      other types).

    Args:
        source: The folder with `meta` and `data`.
        key_map: Keys of columns, instead of those above.
        decode_video: Whether to store the frames of videos.

    Raises:
        NotFoundError: The folder, meta/info.json or the data files are missing.
        SchemaError: The folder is not a LeRobot data set of version 2 or 3, or the files do not fit together.
        MissingExtraError: The data set has videos, and av is not installed.

    Example:
        >>> from expstore.datasets import LeRobotReader, import_dataset, make_sample
        >>> source = make_sample("lerobot", "pusht_image")
        >>> done = import_dataset(LeRobotReader(source), "data.exp")
    """

    format: ClassVar[str] = "lerobot"

    @parses_source
    def __init__(
        self,
        source: str | Path,
        *,
        key_map: Mapping[str, str | Key] | None = None,
        decode_video: bool = True,
    ) -> None:
        self._parquet = import_library("pyarrow.parquet")
        self._meta = _Metadata(local_path(source))
        self._key_map = dict(key_map or {})
        videos = self._meta.videos
        self._videos = videos if decode_video else []
        if self._videos:
            import_library("av")
        self._files = self._find_files()
        self._columns = self._find_columns()
        self._check_keys()
        self._left_out = sorted(
            column.name for column in self._columns.values() if column.kind == "other"
        ) + sorted(set(videos) - set(self._videos))

    # -- the contract ----------------------------------------------------------------------------------

    def parts(self) -> list[Part]:
        """Return the data files; for version 2, which has a file per episode, the folders."""
        found: list[Part] = []
        groups = itertools.groupby(self._files, lambda file: self._part_name(file.path))
        for place, (name, members) in enumerate(groups):
            files = list(members)
            paths = [file.path for file in files]
            # The metadata belong to the first part: any change of them makes another data set.
            paths += self._meta.files if not place else []
            numbers = [number for file in files for number in file.episodes]
            paths += sorted({self._meta.video(key, number)[0] for key in self._videos for number in numbers})
            found.append(Part(name=name, files=paths))
        return found

    def options(self) -> Mapping[str, Any]:
        """Return the keys of columns, and whether videos are stored."""
        keys = {name: list(to_key(key)) for name, key in sorted(self._key_map.items())}
        return {"key_map": keys, "videos": list(self._videos)}

    def facts(self) -> Mapping[str, Any]:
        """Return frames per second, robot, features, tasks, text columns, and what is left out."""
        info = self._meta.info
        return {
            "lerobot": {
                "version": info["codebase_version"],
                "fps": self._meta.fps,
                "robot_type": info.get("robot_type"),
                "features": info.get("features", {}),
                "tasks": {str(number): text for number, text in sorted(self._meta.tasks.items())},
                "texts": [
                    key_name(self.key(column.name))
                    for column in self._columns.values()
                    if column.kind == "text"
                ],
                "left_out": self._left_out,
            }
        }

    def count_rows(self, part: Part) -> int:
        """Return the number of frames."""
        return sum(file.rows for file in self._files_of(part))

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the episodes, in pieces if they are long or cross the edge of a batch of 16 MB."""
        files = self._files_of(part)
        texts = self._read_texts(files)
        with ExitStack() as opened:
            cutter = _Cutter(self, texts, _Videos(self._meta, self._videos, opened))
            for file in files:
                for rows in self._batches(file, [c.name for c in self._columns.values() if c.is_stored]):
                    yield from cutter.add(rows)
            yield from cutter.finish()

    # -- columns ---------------------------------------------------------------------------------------

    def key(self, name: str) -> Key:
        """Return the key of a column."""
        return to_key(lerobot_key(name, {**LEROBOT_KEYS, **self._key_map}))

    def facts_of(self, number: int, rows: Rows) -> dict[str, Any]:
        """Return annotations of an episode; without tasks in the metadata its first rows name them."""
        found: dict[str, Any] = {"episode_index": number}
        tasks = self._meta.tasks_of(number)
        if self._meta.tasks and "task_index" in rows:
            used = np.unique(rows["task_index"]).tolist()
            if unknown := set(used) - self._meta.tasks.keys():
                raise SchemaError(
                    f"episode {number} has task {min(unknown)}, which is missing in the metadata"
                )
            tasks = tasks or [self._meta.tasks[task] for task in used]
        if len(tasks) == 1:
            found["task"] = tasks[0]
        elif tasks:
            found["tasks"] = tasks
        return found

    def split_of(self, number: int) -> str | None:
        """Return the split of an episode: the name of a range in info.json that has its number."""
        for name, text in self._meta.splits.items():
            if (found := _RANGE.fullmatch(str(text))) and int(found[1]) <= number < int(found[2]):
                return None if name == TRAIN else name
        return None

    def check_length(self, number: int, rows: int) -> None:
        """Raise SchemaError if the metadata have another number of frames for an episode."""
        expected = self._meta.length_of(number)
        if expected is not None and rows != expected:
            raise SchemaError(
                f"episode {number} has {rows} rows, but the metadata say {expected}",
                hint="copy the data files again",
            )

    def _find_columns(self) -> dict[str, _Column]:
        first = self._files[0]
        found: dict[str, _Column] = {}
        with open_to_read(first.path) as raw:
            schema = self._open(first.path, raw).schema_arrow
        for column in schema:
            kind = _kind(column.type)
            shape = tuple(
                int(size) for size in (self._meta.features.get(column.name) or {}).get("shape") or ()
            )
            found[column.name] = _Column(column.name, kind, shape)
        if "episode_index" not in found:
            raise SchemaError(f"{first.path} has no column 'episode_index'")
        return found

    def _check_keys(self) -> None:
        """Raise SchemaError if the keys of two columns are equal, or one is inside the other."""
        stored = [column.name for column in self._columns.values() if column.is_stored]
        named: dict[Key, str] = {}
        for name in (*stored, *self._videos):
            key = self.key(name)
            if key in named:
                raise SchemaError(
                    f"columns {named[key]!r} and {name!r} are both stored as {key_name(key)!r}",
                    hint="pass another key for one of them in key_map",
                )
            named[key] = name
        for key, name in named.items():
            for depth in range(1, len(key)):
                if above := named.get(key[:depth]):
                    raise SchemaError(
                        f"column {above!r} is stored as {key_name(key[:depth])!r}, {name!r} inside it as "
                        f"{key_name(key)!r}",
                        hint="pass another key for one of them in key_map",
                    )

    def _read_texts(self, files: Sequence[_File]) -> dict[int, dict[str, Any]]:
        """Return the columns of texts as annotations, by episode."""
        names = [column.name for column in self._columns.values() if column.kind == "text"]
        found: dict[int, dict[str, Any]] = {}
        if not names:
            return found
        collected: dict[int, dict[str, list[str]]] = {}
        for file in files:
            for batch in self._arrow_batches(file, ["episode_index", *names], 1 << 14):
                numbers = batch.column("episode_index").to_pylist()
                for name in names:
                    for number, text in zip(numbers, batch.column(name).to_pylist(), strict=True):
                        collected.setdefault(number, {}).setdefault(name, []).append(str(text))
            last = max(file.episodes)
            for number in [number for number in collected if number != last]:
                found[number] = self._text_facts(collected.pop(number))
        found.update((number, self._text_facts(texts)) for number, texts in collected.items())
        return found

    def _text_facts(self, texts: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        return {key_name(self.key(name)): text_fact(values) for name, values in texts.items()}

    # -- files -----------------------------------------------------------------------------------------

    def _part_name(self, path: Path) -> str:
        inside = path.relative_to(self._meta.root)
        return (inside.parent if self._meta.major == 2 else inside).as_posix()

    def _files_of(self, part: Part) -> list[_File]:
        return [file for file in self._files if self._part_name(file.path) == part.name]

    def _find_files(self) -> list[_File]:
        """Return the data files in the order of their rows."""
        folder = self._meta.root / "data"
        paths = sorted(
            inside / name
            for inside, names in ReadingDisk().tree(folder)
            for name in names
            if name.endswith(".parquet")
        )
        if not paths:
            raise NotFoundError(f"there is no .parquet file in {folder}")
        files = [file for path in paths if (file := self._read_order(path)) is not None]
        files.sort(key=lambda file: file.first)
        for one, other in itertools.pairwise(files):
            if other.first <= one.last:
                raise SchemaError(f"{one.path} and {other.path} have rows of the same index {other.first}")
            if common := set(one.episodes) & set(other.episodes):
                raise SchemaError(f"episode {min(common)} has rows in {one.path} and in {other.path}")
        rows, total = sum(file.rows for file in files), self._meta.info.get("total_frames")
        if not rows:
            raise SchemaError(f"the files in {folder} have no rows")
        if total is not None and int(total) != rows:
            raise SchemaError(
                f"the files in {folder} have {rows} rows, but meta/info.json says {total}",
                hint="copy the data set again",
            )
        return files

    def _read_order(self, path: Path) -> _File | None:
        """Return the range of rows and the episodes of a file; None if it has no rows of the data set."""
        with open_to_read(path) as raw:
            file = self._open(path, raw)
            names = set(file.schema_arrow.names)
            if missing := [name for name in ("index", "episode_index") if name not in names]:
                raise SchemaError(f"{path} has no column {' and '.join(map(repr, missing))}")
            with _reading(path):
                table = file.read(columns=["index", "episode_index"])
        index: IntArray = table.column("index").to_numpy()
        if not index.size:
            return None
        episodes = np.unique(table.column("episode_index").to_numpy())
        if self._meta.major == 3 and episodes[0] >= self._meta.info.get("total_episodes", np.inf):
            return None  # an export was killed before it had added the file
        steps = np.diff(index)
        is_sorted = bool((steps > 0).all())
        if not is_sorted and not np.diff(np.sort(index)).all():
            raise SchemaError(f"{path} has two rows of the same index")
        return _File(path, int(index.min()), int(index.max()), index.size, is_sorted, episodes.tolist())

    def _open(self, path: Path, raw: Any) -> Any:
        with _reading(path):
            # Without a buffer, pyarrow reads a whole column of a row group at a time.
            return self._parquet.ParquetFile(raw, buffer_size=_READ_BYTES, pre_buffer=False)

    def _arrow_batches(self, file: _File, names: Sequence[str], size: int) -> Iterator[Any]:
        """Yield the rows of a file ordered by `index`. A file that is not in order is read as a whole."""
        arrow = import_library("pyarrow")
        with open_to_read(file.path) as raw:
            source = self._open(file.path, raw)
            if absent := [name for name in names if name not in source.schema_arrow.names]:
                raise SchemaError(f"{file.path} has no column {absent[0]!r}, which other files have")
            try:
                if file.is_sorted:
                    yield from source.iter_batches(batch_size=size, columns=list(names))
                    return
                wanted = list(dict.fromkeys(["index", *names]))
                table = source.read(columns=wanted).sort_by("index").select(list(names))
            except ExpStoreError:
                raise
            except (arrow.ArrowException, OSError, *INVALID) as exc:
                raise SchemaError(f"{file.path} is damaged: {exc}", hint="copy the file again") from exc
            yield from table.combine_chunks().to_batches(max_chunksize=size)

    def _batches(self, file: _File, names: Sequence[str]) -> Iterator[Rows]:
        row_bytes = sum(
            8 * prod(self._columns[name].shape or (1,))
            if self._columns[name].kind == "number"
            else prod(self._columns[name].shape)
            for name in names
        )
        row_bytes += sum(prod(self._meta.features[key].get("shape") or ()) for key in self._videos)
        size = max(1, min(1 << 14, _PIECE_BYTES // max(1, row_bytes)))
        for batch in self._arrow_batches(file, names, size):
            yield {name: self._values(batch.column(name), self._columns[name]) for name in names}

    @staticmethod
    def _values(array: Any, column: _Column) -> Array:
        if array.null_count:
            raise SchemaError(f"column {column.name!r} has missing values")
        if column.kind == "image":
            return _images(array, column.name)
        found = _numbers(array, column.name)
        if len(column.shape) > 1 or found.ndim > 1:
            size = prod(found.shape[1:])
            if column.shape and prod(column.shape) != size:
                raise SchemaError(
                    f"column {column.name!r} has {size} values per row, but meta/info.json says "
                    f"{list(column.shape)}"
                )
            if len(column.shape) > 1:
                found = found.reshape(len(found), *column.shape)
        return found


@dataclass(frozen=True, slots=True)
class _File:
    """Describe a data file: the rows from index `first` to `last`, and their episodes."""

    path: Path
    first: int
    last: int
    rows: int
    is_sorted: bool
    episodes: list[int]


@dataclass(frozen=True, slots=True)
class _Column:
    """Describe a column of the data files, with its shape in info.json."""

    name: str
    kind: Literal["number", "text", "image", "other"]
    shape: tuple[int, ...]

    @property
    def is_stored(self) -> bool:
        """Return whether the column is stored."""
        return self.kind in ("number", "image")


# -- rows of Arrow ---------------------------------------------------------------------------------------


def _kind(type_: Any) -> Literal["number", "text", "image", "other"]:
    types = import_library("pyarrow").types
    if types.is_struct(type_):
        return "image" if any(field.name == "bytes" for field in type_) else "other"
    if types.is_string(type_) or types.is_large_string(type_):
        return "text"
    while types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        type_ = type_.value_type
    is_number = types.is_integer(type_) or types.is_floating(type_) or types.is_boolean(type_)
    return "number" if is_number else "other"


def _numbers(array: Any, name: str) -> Array:
    """Return a column of numbers, or of lists of one length, as an array."""
    types = import_library("pyarrow").types
    compute = import_library("pyarrow.compute")
    dims = [len(array)]
    while types.is_nested(array.type):
        lengths = compute.min_max(compute.list_value_length(array)).as_py()
        if lengths["min"] != lengths["max"]:
            raise SchemaError(
                f"column {name!r} has between {lengths['min']} and {lengths['max']} values per row"
            )
        array = array.flatten()
        dims.append(lengths["max"] or 0)
        if array.null_count:
            raise SchemaError(f"column {name!r} has missing values")
    found: Array = array.to_numpy(zero_copy_only=False).reshape(dims)
    return found


def _images(array: Any, name: str) -> Array:
    data = array.field("bytes")
    if data.null_count:
        raise SchemaError(
            f"column {name!r} has images in separate files, which cannot be read",
            hint="embed the images in the Parquet files, as lerobot does when it saves episodes",
        )
    return decode_images(name, data.to_pylist())


# -- videos ----------------------------------------------------------------------------------------------


class _Videos:
    """Keep the open video of each camera. Rows are ordered, so each file is read once from start to end."""

    def __init__(self, meta: _Metadata, keys: Sequence[str], opened: ExitStack) -> None:
        self._meta, self._keys, self._opened = meta, keys, opened
        self._current: dict[str, tuple[Path, VideoFrames]] = {}

    def add_to(self, rows: Rows) -> None:
        """Add the frames of some rows to the rows, one column per camera."""
        if not self._keys:
            return
        numbers = rows["episode_index"]
        times = rows["timestamp"] if "timestamp" in rows else rows["frame_index"] / self._meta.fps
        bounds = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)]
        for key in self._keys:
            pieces = []
            for start, stop in itertools.pairwise(bounds):
                path, offset = self._meta.video(key, int(numbers[start]))
                pieces.append(self._open(key, path).read((times[start:stop] + offset).tolist()))
            try:
                rows[key] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            except ValueError as exc:
                raise SchemaError(f"{key!r} has videos of different sizes") from exc

    def _open(self, key: str, path: Path) -> VideoFrames:
        if key in self._current:
            opened, frames = self._current[key]
            if opened == path:
                return frames
            frames.close()
        frames = VideoFrames(path, self._meta.fps)
        self._opened.callback(frames.close)
        self._current[key] = path, frames
        return frames


# -- episodes --------------------------------------------------------------------------------------------


class _Cutter:
    """Cut rows into pieces of episodes. The newest row is kept back until its next observation arrives."""

    def __init__(
        self, reader: LeRobotReader, texts: Mapping[int, Mapping[str, Any]], videos: _Videos
    ) -> None:
        self._reader, self._texts, self._videos = reader, texts, videos
        self._held: Rows | None = None
        self._rows = 0

    def add(self, rows: Rows) -> Iterator[Episode]:
        """Append rows in order; yield the pieces that they complete."""
        self._videos.add_to(rows)
        if self._held is not None:
            held = self._held
            rows = {name: _join(name, held[name], values) for name, values in rows.items()}
        numbers = rows["episode_index"]
        start = 0
        for stop in (np.flatnonzero(np.diff(numbers)) + 1).tolist():
            yield self._piece({name: values[start:stop] for name, values in rows.items()}, None)
            start = stop
        rows = {name: values[start:] for name, values in rows.items()}
        # A copy, so that the row does not keep the whole batch in memory.
        self._held = {name: values[-1:].copy() for name, values in rows.items()}
        if len(numbers) - start > 1:
            yield self._piece({name: values[:-1] for name, values in rows.items()}, self._held)

    def finish(self) -> Iterator[Episode]:
        """Yield the end of the last episode."""
        if self._held is not None:
            yield self._piece(self._held, None)

    def _piece(self, rows: Rows, after: Rows | None) -> Episode:
        """Return rows of one episode as a piece.

        Args:
            rows: The rows.
            after: The next row, if it belongs to the same episode.
        """
        number, count = int(rows["episode_index"][0]), len(rows["episode_index"])
        facts = {**self._reader.facts_of(number, rows), **self._texts.get(number, {})}
        self._rows += count
        if after is None:
            self._reader.check_length(number, self._rows)
            self._rows = 0
        reward: Array | None = None
        trees: dict[str, Any] = {"observation": {}, "action": {}}
        fields: dict[str | Key, Array] = {}
        for name, values in rows.items():
            key = self._reader.key(name)
            if key[0] == "observation":
                states = values if after is None else np.concatenate([values, after[name]])
                put_value(trees, key, states)
            elif key[0] == "action":
                put_value(trees, key, values)
            elif key == ("next", "reward"):
                reward = values
            elif key not in _NOT_STORED:
                # The key `next.done` is used for the end of the episode.
                key = DONE_KEY if key == ("next", "done") else key
                fields[key] = values[:, None] if key[0] == "next" and values.ndim == 1 else values
        return Episode(
            observation=trees["observation"],
            action=trees["action"],
            reward=reward,
            end="open" if after is not None else _end(rows),
            fields=fields,
            facts=facts,
            split=self._reader.split_of(number),
        )


def _join(name: str, one: Array, other: Array) -> Array:
    if one.shape[1:] != other.shape[1:]:
        raise SchemaError(
            f"column {name!r} has rows of different shapes: {list(one.shape[1:])} and {list(other.shape[1:])}"
        )
    return np.concatenate([one, other])


def _end(rows: Rows) -> End:
    def last(name: str) -> bool:
        return name in rows and bool(np.any(rows[name][-1] > 0.5))

    if last("next.terminated") or (last("next.done") and last("next.success")):
        return "terminated"
    return "truncated" if last("next.truncated") or last("next.done") else "cut"


# -- metadata --------------------------------------------------------------------------------------------


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert what Arrow raises for a damaged file."""
    try:
        yield
    except ExpStoreError:
        raise
    except (OSError, *INVALID) as exc:  # Arrow's errors are ValueErrors, TypeErrors, KeyErrors and OSErrors
        raise SchemaError(f"{path} is not a Parquet file: {exc}") from exc


class _Metadata:
    """Read the folder `meta`.

    Args:
        root: The folder of the data set.
    """

    def __init__(self, root: Path) -> None:
        disk = ReadingDisk()
        check_folder(root)
        self.root = root
        self.files = [root / INFO]
        if not disk.exists(self.files[0]):
            raise NotFoundError(
                f"there is no file {self.files[0]}", hint="pass the folder that contains `meta`"
            )
        self.info = self._json(self.files[0])
        version = str(self.info.get("codebase_version", ""))
        try:
            self.major = int(version.removeprefix("v").split(".")[0])
            self.fps = float(self.info["fps"])
            self.features: dict[str, dict[str, Any]] = dict(self.info.get("features") or {})
            self.splits: dict[str, Any] = dict(self.info.get("splits") or {})
            self.videos = sorted(
                name for name, feature in self.features.items() if feature.get("dtype") == "video"
            )
        except (KeyError, TypeError, ValueError, AttributeError) as exc:
            raise SchemaError(f"{self.files[0]} does not describe a LeRobot data set: {exc!r}") from exc
        if self.major not in (2, 3) or self.fps <= 0:
            raise SchemaError(
                f"{self.files[0]} has version {version!r} and {self.fps} frames per second; "
                "versions 2 and 3 can be read"
            )
        self.tasks = self._read_tasks()
        self._episodes = self._read_episodes()

    def tasks_of(self, number: int) -> list[str]:
        """Return the tasks of an episode."""
        found = self._episodes.get(number, {}).get("tasks") or []
        return [str(task) for task in found] if isinstance(found, list) else [str(found)]

    def length_of(self, number: int) -> int | None:
        """Return the number of frames of an episode; None if the metadata do not have it."""
        found = self._episodes.get(number, {}).get("length")
        return None if found is None else int(found)

    def video(self, key: str, number: int) -> tuple[Path, float]:
        """Return the video file of an episode, and the time of its first frame in the file."""
        row = self._episodes.get(number)
        template = self.info.get("video_path")
        if row is None or not template:
            raise SchemaError(f"the metadata do not say where the frames {key!r} of episode {number} are")
        try:
            if self.major == 2:
                chunk = number // int(self.info.get("chunks_size", 1000))
                name = template.format(episode_chunk=chunk, video_key=key, episode_index=number)
                start = 0.0
            else:
                place = f"videos/{key}"
                name = template.format(
                    video_key=key,
                    chunk_index=int(row[f"{place}/chunk_index"]),
                    file_index=int(row[f"{place}/file_index"]),
                )
                start = float(row[f"{place}/from_timestamp"])
        except (KeyError, IndexError, TypeError, ValueError) as exc:
            raise SchemaError(
                f"the metadata do not say where the frames {key!r} of episode {number} are: {exc!r}"
            ) from exc
        disk, path = ReadingDisk(), self.root / name
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise SchemaError(f"the video {name} lies outside of {self.root}")
        if not disk.exists(path):
            raise NotFoundError(
                f"there is no file {path}",
                hint="copy the videos, or pass decode_video=False to leave them out",
            )
        return path, start

    def _read_tasks(self) -> dict[int, str]:
        found: dict[int, str] = {}
        for row in self._table("tasks.parquet", "tasks.jsonl"):
            text = row.get("task", row.get("__index_level_0__"))
            if row.get("task_index") is not None and isinstance(text, str):
                found[int(row["task_index"])] = text
        return found

    def _read_episodes(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        for row in self._table("episodes", "episodes.jsonl"):
            try:
                found[int(row["episode_index"])] = row
            except (KeyError, TypeError, ValueError) as exc:
                raise SchemaError(
                    f"an episode in {self.root / 'meta'} has no number 'episode_index': {exc!r}"
                ) from exc
        return found

    def _table(self, parquet: str, lines: str) -> list[dict[str, Any]]:
        """Return the rows of a Parquet file or folder, or of a file with one JSON object per line."""
        disk, folder = ReadingDisk(), self.root / "meta"
        path = folder / parquet
        if disk.is_dir(path):
            paths = sorted(
                inside / name
                for inside, names in disk.tree(path)
                for name in names
                if name.endswith(".parquet")
            )
        else:
            paths = [path] if disk.exists(path) else []
        if paths:
            self.files += paths
            return [row for one in paths for row in self._parquet_rows(one)]
        path = folder / lines
        if not disk.exists(path):
            return []
        self.files.append(path)
        try:
            found = [
                json.loads(line) for line in disk.read_whole(path.resolve()).splitlines() if line.strip()
            ]
        except INVALID as exc:
            raise SchemaError(f"{path} is not JSON: {exc}") from exc
        if any(not isinstance(row, dict) for row in found):
            raise SchemaError(f"{path} has a line that is not a JSON object")
        return found

    @staticmethod
    def _parquet_rows(path: Path) -> list[dict[str, Any]]:
        with open_to_read(path) as raw, _reading(path):
            file = import_library("pyarrow.parquet").ParquetFile(raw)
            # The statistics of the features are most of the file, and are not needed.
            wanted = [name for name in file.schema_arrow.names if not name.startswith(("stats/", "meta/"))]
            found: list[dict[str, Any]] = file.read(columns=wanted).to_pylist()
        return found

    @staticmethod
    def _json(path: Path) -> dict[str, Any]:
        try:
            found = json.loads(ReadingDisk().read_whole(path.resolve()))
        except INVALID as exc:
            raise SchemaError(f"{path} is not JSON: {exc}") from exc
        if not isinstance(found, dict):
            raise SchemaError(f"{path} is not a JSON object")
        return found


# -- data sets by name -----------------------------------------------------------------------------------


def _list_files(request: Request) -> list[RemoteFile]:
    """Return the repository's files that the reader uses."""
    folders = ("meta/", "data/", "videos/") if request.options["decode_video"] else ("meta/", "data/")
    return list_hub(
        request.dataset_id,
        "",
        request.mirror,
        keep=lambda path: path.startswith(folders),
        missing="is not a LeRobot data set: it has no folder meta",
        is_flat=False,
    )


def _read_stored_options(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a store; without `decode_video` if the data set has no videos."""
    options, about = meta["import"]["options"], meta["lerobot"]
    found: dict[str, Any] = {"key_map": {name: tuple(key) for name, key in options["key_map"].items()}}
    is_video = {name: feature.get("dtype") == "video" for name, feature in about["features"].items()}
    if any(is_video.get(name) for name in about["left_out"]):
        found["decode_video"] = False
    elif options["videos"]:
        found["decode_video"] = True
    return found


def _make_sample(path: Path) -> None:
    walks = make_walks()
    columns = {
        "observation.state": [walk.states[:-1] for walk in walks],
        "action": [walk.actions for walk in walks],
        "next.reward": [walk.rewards for walk in walks],
        "next.done": [walk.terminated | walk.truncated for walk in walks],
        "next.success": [walk.terminated for walk in walks],
        "timestamp": [np.arange(walk.steps, dtype=np.float32) / 10 for walk in walks],
        "frame_index": [np.arange(walk.steps) for walk in walks],
        "episode_index": [np.full(walk.steps, walk.number) for walk in walks],
        "task_index": [np.zeros(walk.steps, np.int64) for walk in walks],
    }
    rows = {name: np.concatenate(parts) for name, parts in columns.items()}
    rows["index"] = np.arange(len(rows["action"]))
    features = {name: {"dtype": str(one.dtype), "shape": one.shape[1:] or (1,)} for name, one in rows.items()}
    tables = {
        "data/chunk-000/file-000": {name: list(values) for name, values in rows.items()},
        "meta/tasks": {"task_index": [0], "task": ["walk about"]},
        "meta/episodes/chunk-000/file-000": {
            "episode_index": [walk.number for walk in walks],
            "tasks": [["walk about"] for _ in walks],
            "length": [walk.steps for walk in walks],
        },
    }
    arrow, parquet = import_library("pyarrow"), import_library("pyarrow.parquet")
    for name, table in tables.items():
        file = io.BytesIO()
        parquet.write_table(arrow.table(table), file)
        write_file(path / f"{name}.parquet", file.getvalue())
    info = {"codebase_version": "v3.0", "fps": 10, "features": features, "total_frames": len(rows["index"])}
    write_json(path / INFO, info)


KIND = Kind(
    reader=LeRobotReader,
    files="the folder with `meta` and `data`",
    make_sample=_make_sample,
    endings="terminated if the last frame has `next.done` and `next.success`, truncated if it has "
    "`next.done` alone; `next.terminated` and `next.truncated` take precedence; otherwise cut",
    recognize=lambda source: source.has(INFO),
    prefix="lerobot",
    buffer="LeRobotExperienceReplay",
    public=f"{HUGGING_FACE}/datasets/ID",
    mirror=HUGGING_FACE,
    list_files=_list_files,
    facts="lerobot",
    stored_options=_read_stored_options,
)
