"""Read the DQN replay data set of Atari games: rings of frames that Dopamine wrote, checkpoint by checkpoint.

Source of the format: Dopamine's `circular_replay_buffer.py` of 2019 and `logged_replay_buffer.py` of
https://github.com/google-research/batch_rl. A checkpoint N is six files,
`$store$_{observation,action,reward,terminal}_ckpt.N.gz`, `add_count_ckpt.N.gz` and
`invalid_range_ckpt.N.gz`, each one gzip stream of one .npy array. TorchRL keeps the same arrays in a folder N
per checkpoint, as memory maps of tensordict.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np

from expstore.core.values import Array
from expstore.datasets.download import RemoteFile
from expstore.datasets.episode import End, Episode, Part, Reader
from expstore.datasets.kind import Kind, Request
from expstore.datasets.recognition import Source
from expstore.datasets.samples import encode_npy, make_walks, write_file
from expstore.datasets.source_paths import check_folder, parses_source
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import ExpStoreError, NotFoundError, SchemaError, StorageError
from expstore.exchange.base import open_to_read

_COLUMNS = ("observation", "action", "reward", "terminal")
#: The files of a checkpoint, without `_ckpt.N.gz`.
CHECKPOINT_FILES = (*(f"$store$_{name}" for name in _COLUMNS), "add_count", "invalid_range")
_FILE = re.compile(r"^(.+)_ckpt\.(\d+)\.gz$")
#: Number of zero rows that Dopamine puts before every episode: the frame stack minus one.
_PADDING = 3
#: A run of the public data set has the checkpoints 0 to 49.
_CHECKPOINTS = 50
_SLAB_BYTES = 8 << 20
_READ_BYTES = 1 << 20
_PUBLIC = "gs://atari-replay-datasets/dqn"
_RUNS = ("1", "2", "3", "4", "5")
_GAMES = [
    "AirRaid", "Alien", "Amidar", "Assault", "Asterix", "Asteroids", "Atlantis", "BankHeist", "BattleZone",
    "BeamRider", "Berzerk", "Bowling", "Boxing", "Breakout", "Carnival", "Centipede", "ChopperCommand",
    "CrazyClimber", "DemonAttack", "DoubleDunk", "ElevatorAction", "Enduro", "FishingDerby", "Freeway",
    "Frostbite", "Gopher", "Gravitar", "Hero", "IceHockey", "Jamesbond", "JourneyEscape", "Kangaroo",
    "Krull", "KungFuMaster", "MontezumaRevenge", "MsPacman", "NameThisGame", "Phoenix", "Pitfall", "Pong",
    "Pooyan", "PrivateEye", "Qbert", "Riverraid", "RoadRunner", "Robotank", "Seaquest", "Skiing", "Solaris",
    "SpaceInvaders",
]  # fmt: skip


class AtariDQNReader(Reader):
    """Read one run of one game of the Atari DQN data set.

    The checkpoints of a run are snapshots of one ring buffer. The reader restores the order in which rows
    were written, drops the zero rows that pad every episode, and joins episodes that continue in the next
    checkpoint. If rows are missing between two checkpoints, the episode is cut there. Two observations are
    not recorded and are zeros: the one after the last step of an episode, and the one after the last row
    before a cut, whose `next.done` is False. Time limits are recorded as terminal.

    A row is `observation` `(84, 84)` uint8, one frame, `action` int64, `next.reward` `(1,)` float32,
    clipped to [-1, 1], and the fields of every data set.

    Args:
        source: Folder of the files, as in `Pong/1/replay_logs`, or of the run, `Pong/1`; or the folder in
            which TorchRL keeps a run, `~/.cache/torchrl/atari/Pong/1`.
        runs: Number of checkpoints to read, from the first one on. None reads all.
        checkpoints: Numbers of the checkpoints to read, in ascending order. None reads all; then none may be
            missing between the first and the last one.

    Raises:
        NotFoundError: The folder does not exist, has no checkpoint, or lacks one that `checkpoints` names.
        SchemaError: A checkpoint is missing in the middle, or lacks one of its six files; or both `runs` and
            `checkpoints` are given.

    Example:
        >>> from expstore.datasets import AtariDQNReader, import_dataset, make_sample
        >>> source = make_sample("atari-dqn", "Pong/5")
        >>> done = import_dataset(AtariDQNReader(source), "data.exp")
    """

    format: ClassVar[str] = "atari-dqn"

    @parses_source
    def __init__(
        self, source: str | Path, *, runs: int | None = None, checkpoints: Sequence[int] | None = None
    ) -> None:
        folder, disk = local_path(source), ReadingDisk()
        check_folder(folder)
        self._folder = folder / "replay_logs" if disk.is_dir(folder / "replay_logs") else folder
        found = torchrl_checkpoints(self._folder)
        for name in disk.names(self._folder):
            if (match := _FILE.match(name)) and match[1] in CHECKPOINT_FILES:
                found.setdefault(int(match[2]), {})[match[1]] = self._folder / name
        if not found:
            raise NotFoundError(
                f"there is no checkpoint in {self._folder}",
                hint="files are called $store$_observation_ckpt.0.gz, ...; quote the $ in a shell",
            )
        if runs is not None and runs < 1:
            raise SchemaError(f"runs={runs} is not a positive number of checkpoints")
        if runs is not None and checkpoints is not None:
            raise SchemaError("runs and checkpoints exclude each other", hint="pass one of them")
        self._runs = runs
        self._checkpoints = None if checkpoints is None else sorted({int(number) for number in checkpoints})
        chosen = self._choose(sorted(found))
        for number in chosen:
            if absent := [name for name in CHECKPOINT_FILES if name not in found[number]]:
                raise SchemaError(f"checkpoint {number} in {self._folder} has no {', '.join(absent)}")
        self._found = {number: found[number] for number in chosen}

    def _choose(self, there: list[int]) -> list[int]:
        """Return the numbers of the checkpoints to read."""
        if self._checkpoints is not None:
            absent = sorted({*self._checkpoints} - {*there})
            if absent or not self._checkpoints:
                raise NotFoundError(
                    f"{self._folder} has no checkpoint {as_ranges(absent)}; it has {as_ranges(there)}"
                )
            return self._checkpoints
        chosen = there[: self._runs]
        if absent := sorted({*range(chosen[0], chosen[-1])} - {*chosen}):
            raise SchemaError(
                f"checkpoint {as_ranges(absent)} is missing in {self._folder}, which has {as_ranges(there)}",
                hint="add its files, or import without it: pass checkpoints=, on the command line "
                f"--checkpoints {as_ranges(chosen)}",
            )
        return chosen

    def parts(self) -> list[Part]:
        """Return the checkpoints as one part: their episodes continue from one to the next."""
        files = [path for files in self._found.values() for _, path in sorted(files.items())]
        return [Part(name=run_name(self._folder), files=files)]

    def options(self) -> Mapping[str, Any]:
        """Return which checkpoints are read."""
        chosen = {} if self._checkpoints is None else {"checkpoints": self._checkpoints}
        return {"runs": self._runs, **chosen}

    def notes(self) -> list[str]:
        """Return a note about missing checkpoints of a run, unless `runs` or `checkpoints` limit it."""
        numbers = list(self._found)
        if self._runs or self._checkpoints or (numbers[0] == 0 and numbers[-1] >= _CHECKPOINTS - 1):
            return []
        return [
            f"{self._folder} has the checkpoints {as_ranges(numbers)}; a whole run has 0-{_CHECKPOINTS - 1}"
        ]

    def facts(self) -> Mapping[str, Any]:
        """Return `add_count` and `invalid_range` of the checkpoints, which TorchRL's samples contain."""
        counts = {str(number): self._read_count(number) for number in self._found}
        return {"atari": {number: {"add_count": a, "invalid_range": i} for number, (a, i) in counts.items()}}

    def count_rows(self, part: Part) -> int:
        """Return the number of rows of all episodes, assuming that no rows were lost between checkpoints."""
        rows, left, former = 0, _PADDING, None
        for number, files in self._found.items():
            added, _ = self._read_count(number)
            flags = _read_whole(files["$store$_terminal"]).reshape(-1) > 0
            cursor = added % len(flags)
            is_last_dump = former is not None and added < former
            if is_last_dump and cursor == len(flags) - 1:
                continue
            joins = is_last_dump or (former is not None and added - former == len(flags))
            if former is not None and not joins:
                left = 0
            read = np.concatenate([flags[-1:], flags[:cursor]]) if joins else flags[:cursor]
            # Padding rows: the rest of those before the first episode, and three after every end.
            ends = np.flatnonzero(read)
            padding = min(left, len(read))
            left -= padding
            if ends.size:
                behind = min(_PADDING, len(read) - 1 - int(ends[-1]))
                padding += _PADDING * (ends.size - 1) + behind
                left = _PADDING - behind
            rows += len(read) - padding
            former = added
        return rows

    def episodes(self, part: Part) -> Iterator[Episode]:
        """Yield the episodes in pieces of at most 8 MB."""
        cutter = _Cutter()
        former: int | None = None
        former_number = -1
        for number in self._found:
            added, _ = self._read_count(number)
            with _Checkpoint(self._found[number], number) as checkpoint:
                slots = checkpoint.slots
                cursor = added % slots
                is_last_dump = former is not None and added < former
                if is_last_dump and cursor == slots - 1:
                    continue  # dumped right after another one: it has the same rows
                if is_last_dump:
                    joins = self._have_same_rows(former_number, number, cursor)
                else:
                    joins = former is not None and added - former == slots
                if former is not None and not joins:
                    yield from cutter.cut()
                if joins:  # the last slot was written after the previous dump, just before slot 0
                    yield from cutter.add(checkpoint.last_row())
                for rows in checkpoint.read(cursor):
                    yield from cutter.add(rows)
                checkpoint.finish()
            former, former_number = added, number
        yield from cutter.cut()

    def _have_same_rows(self, former: int, last: int, cursor: int) -> bool:
        """Return whether two checkpoints have the same rows from a slot on, except for the last slot.

        The dump at the end of a run counts from 0, so its `add_count` does not tell whether rows were lost
        before it. If none were lost, its slots from the cursor on still hold the rows of the previous
        checkpoint.
        """
        with _Checkpoint(self._found[former], former) as one, _Checkpoint(self._found[last], last) as other:
            if one.slots != other.slots:
                return False
            at = 0
            for rows, others in zip(one.read(one.slots - 1), other.read(one.slots - 1), strict=True):
                start = max(0, cursor - at)
                if start < len(rows) and not rows.part(start, len(rows)).equals(
                    others.part(start, len(rows))
                ):
                    return False
                at += len(rows)
        return True

    def _read_count(self, number: int) -> tuple[int, list[int]]:
        files = self._found[number]
        count, invalid = (_read_whole(files[name]) for name in ("add_count", "invalid_range"))
        return int(count.reshape(-1)[0]), [int(slot) for slot in invalid.reshape(-1)]


def torchrl_checkpoints(folder: Path) -> dict[int, dict[str, Path]]:
    """Return the arrays of the checkpoints that TorchRL keeps in a folder, by number and name."""
    disk = ReadingDisk()
    found: dict[int, dict[str, Path]] = {}
    for name in disk.names(folder):
        if name.isdecimal() and disk.exists(folder / name / "add_count.memmap"):
            data = folder / name / "data"
            paths = {
                "$store$_observation": data / "observation.memmap",
                "$store$_action": data / "action.memmap",
                "$store$_reward": data / "next" / "reward.memmap",
                "$store$_terminal": data / "next" / "terminated.memmap",
                "add_count": folder / name / "add_count.memmap",
                "invalid_range": folder / name / "invalid_range.memmap",
            }
            found[int(name)] = {key: path for key, path in paths.items() if disk.exists(path)}
    return found


def as_ranges(numbers: Sequence[int]) -> str:
    """Format sorted numbers as ranges, for instance "0-4,7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def run_name(folder: Path) -> str:
    """Return the game and the run, for instance "Pong/1"."""
    above = folder.resolve()
    above = above.parent if above.name == "replay_logs" else above
    return f"{above.parent.name}/{above.name}"


@dataclass(frozen=True, slots=True)
class _Rows:
    """Hold rows in the order in which they were written.

    Args:
        observation: Shape `(n, height, width)`, uint8.
        action: Shape `(n,)`.
        reward: Shape `(n,)`.
        terminal: Shape `(n,)`, bool.
    """

    observation: Array
    action: Array
    reward: Array
    terminal: Array

    def __len__(self) -> int:
        return len(self.action)

    @property
    def columns(self) -> tuple[Array, Array, Array, Array]:
        """The four columns in their order."""
        return self.observation, self.action, self.reward, self.terminal

    def part(self, start: int, stop: int) -> _Rows:
        """Return a slice of the rows."""
        return _Rows(*(column[start:stop] for column in self.columns))

    def equals(self, other: _Rows) -> bool:
        """Return whether the rows equal other rows."""
        return all(map(np.array_equal, self.columns, other.columns))

    @staticmethod
    def join_rows(parts: Sequence[_Rows]) -> _Rows:
        """Concatenate rows."""
        if len(parts) == 1:
            return parts[0]
        return _Rows(*map(np.concatenate, zip(*(part.columns for part in parts), strict=True)))

    def is_padding(self) -> Array:
        """Return a mask of the rows that are all zero. Shape `(n,)`, bool."""
        maybe: Array = (self.action == 0) & (self.reward == 0) & ~self.terminal
        places = np.flatnonzero(maybe)
        if places.size:
            maybe[places] = ~self.observation[places].reshape(len(places), -1).any(1)
        return maybe


class _Checkpoint:
    """Read the four columns of a checkpoint, decompressed in pieces."""

    def __init__(self, files: Mapping[str, Path], number: int) -> None:
        self._files = files
        self._number = number
        self._opened = ExitStack()
        self._arrays: list[_ArrayFile] = []

    def __enter__(self) -> _Checkpoint:
        try:
            self._open()
        except BaseException:
            self._opened.close()
            raise
        return self

    def _open(self) -> None:
        for name in _COLUMNS:
            path = self._files[f"$store$_{name}"]
            array = self._opened.enter_context(_open_array(path))
            wanted = 3 if name == "observation" else 1
            if len(array.shape) != wanted or array.dtype.kind not in "biuf":
                raise SchemaError(
                    f"{path}: {name} of checkpoint {self._number} has shape {list(array.shape)} and dtype "
                    f"{array.dtype}; numbers with {wanted} dims are expected"
                )
            self._arrays.append(array)
        if len({array.shape[0] for array in self._arrays}) != 1:
            sizes = ", ".join(f"{one.path.name} {one.shape[0]}" for one in self._arrays)
            raise SchemaError(f"the arrays of checkpoint {self._number} differ in length: {sizes}")
        self.slots = self._arrays[0].shape[0]

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def read(self, count: int) -> Iterator[_Rows]:
        """Yield the rows of the first slots."""
        size = max(1, _SLAB_BYTES // max(1, self._arrays[0].row_bytes))
        for start in range(0, count, size):
            rows = min(size, count - start)
            yield self._rows([array.read(rows) for array in self._arrays])

    def finish(self) -> None:
        """Read the files to the end and check their checksums."""
        for array in self._arrays:
            array.finish()

    def last_row(self) -> _Rows:
        """Return the row of the last slot, in a second pass over the files."""
        found = []
        for name in _COLUMNS:
            with _open_array(self._files[f"$store$_{name}"]) as array:
                array.skip(array.shape[0] - 1)
                found.append(array.read(1))
        return self._rows(found)

    @staticmethod
    def _rows(values: Sequence[Array]) -> _Rows:
        observation, action, reward, terminal = values
        return _Rows(observation, action.astype(np.int64), reward.astype(np.float32), terminal > 0)


@contextmanager
def _name_file(path: Path) -> Iterator[None]:
    """Add the path to errors that reading a file raises."""
    try:
        yield
    except ExpStoreError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as exc:
        raise StorageError(f"cannot read {path}: {exc or type(exc).__name__}") from exc


@dataclass(frozen=True, slots=True)
class _ArrayFile:
    """Read an array from a file, from the first row to the last.

    Args:
        path: The file.
        stream: Yields the bytes of the rows.
        shape: Shape of the array.
        dtype: Dtype of the array.
    """

    path: Path
    stream: Any
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        """Size of a row in bytes."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, count: int) -> Array:
        """Return the next rows. Shape `(count, *shape[1:])`."""
        data = self._read(count * self.row_bytes)
        return np.frombuffer(data, self.dtype).reshape(count, *self.shape[1:])

    def read_whole(self) -> Array:
        """Return the whole array and check its checksum."""
        found = np.frombuffer(self._read(math.prod(self.shape) * self.dtype.itemsize), self.dtype)
        self.finish()
        return found.reshape(self.shape)

    def skip(self, count: int) -> None:
        """Skip rows."""
        left = count * self.row_bytes
        while left:
            left -= len(self._read(min(left, _READ_BYTES)))

    def finish(self) -> None:
        """Read the file to its end: the checksum of a .gz file follows the last byte of data."""
        if isinstance(self.stream, gzip.GzipFile):
            with _name_file(self.path):
                while self.stream.read(_READ_BYTES):
                    continue

    def _read(self, size: int) -> bytes:
        with _name_file(self.path):
            data: bytes = self.stream.read(size)
        if len(data) != size:
            raise StorageError(f"cannot read {self.path}: the file is {size - len(data)} bytes too short")
        return data


@contextmanager
def _open_array(path: Path) -> Iterator[_ArrayFile]:
    """Open an array file."""
    if path.suffix == ".gz":
        with open_to_read(path) as raw, io.BufferedReader(raw, _READ_BYTES) as file:
            with gzip.GzipFile(str(path), "rb", fileobj=file) as stream:
                with _name_file(path):
                    shape, dtype = _read_header(path, stream)
                yield _ArrayFile(path, stream, shape, dtype)
        return
    with _name_file(path):
        about = json.loads(ReadingDisk().read_whole((path.parent / "meta.json").resolve()))[path.stem]
        shape = tuple(int(one) for one in about["shape"])
        dtype = np.dtype(str(about["dtype"]).removeprefix("torch."))
    if path.stem == "observation":
        shape = (shape[0] - 1, *shape[1:])  # TorchRL appends a frame of zeros
    with open_to_read(path) as file:
        yield _ArrayFile(path, file, shape, dtype)


def _read_whole(path: Path) -> Array:
    """Return the whole array of a file."""
    with _open_array(path) as array:
        return array.read_whole()


def _read_header(path: Path, stream: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Read the header of a .npy stream; refuse object arrays, which would be unpickled."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(stream)
    if is_fortran or dtype.hasobject:
        raise SchemaError(
            f"{path} cannot be read: it is an array of {dtype} in {'Fortran' if is_fortran else 'C'} order"
        )
    return shape, dtype


class _Cutter:
    """Cut rows into pieces of episodes, without the padding before each episode.

    The newest row is kept back until the next row, which has its next observation, arrives.
    """

    def __init__(self) -> None:
        self._held: _Rows | None = None
        self._padding = 0
        self._begins = True

    def add(self, rows: _Rows) -> Iterator[Episode]:
        """Append rows; yield the pieces of episodes that they complete."""
        for start, stop in self._runs(rows):
            piece = rows.part(start, stop)
            parts = [piece] if self._held is None else [self._held, piece]
            self._held = None
            if piece.terminal[-1]:
                yield _episode(_Rows.join_rows(parts), "terminated", None)
                continue
            joined = _Rows.join_rows(parts)
            self._held = joined.part(len(joined) - 1, len(joined))
            if len(joined) > 1:
                body = joined.part(0, len(joined) - 1)
                yield _episode(body, "open", self._held.observation)

    def cut(self) -> Iterator[Episode]:
        """End the open episode: the next rows do not continue it."""
        if self._held is not None:
            yield _episode(self._held, "cut", None)
        self._held, self._begins, self._padding = None, True, 0

    def _runs(self, rows: _Rows) -> list[tuple[int, int]]:
        """Return the runs of rows between padding and ends."""
        padding = rows.is_padding()
        ends = np.flatnonzero(rows.terminal)
        found: list[tuple[int, int]] = []
        start = 0
        while start < len(rows):
            if self._begins:
                while start < len(rows) and self._padding < _PADDING and padding[start]:
                    start += 1
                    self._padding += 1
                if start == len(rows):
                    break  # the next rows may be padding too
            place = np.searchsorted(ends, start)
            stop = int(ends[place]) + 1 if place < len(ends) else len(rows)
            found.append((start, stop))
            self._begins = bool(rows.terminal[stop - 1])
            if self._begins:
                self._padding = 0
            start = stop
        return found


def _episode(rows: _Rows, end: End, after: Array | None) -> Episode:
    observation = rows.observation if after is None else np.concatenate([rows.observation, after])
    return Episode(observation=observation, action=rows.action, reward=rows.reward, end=end)


def _recognize(source: Source) -> bool:
    folders = (source.path, source.path / "replay_logs") if source.is_dir else ()
    disk = ReadingDisk()
    names = [name for folder in folders if disk.is_dir(folder) for name in disk.names(folder)]
    is_dopamine = any(name.startswith("$store$_observation_ckpt.") for name in names)
    return is_dopamine or (source.is_dir and bool(torchrl_checkpoints(source.path)))


def _check_source(source: Path, dataset_id: str) -> None:
    """Raise SchemaError if the path names another game, or another run of the game."""
    found = run_name(source)
    game, _, run = found.partition("/")
    # The files may be in a folder of the game that has no folder of the run.
    if run in _GAMES:
        game, run = run, ""
    is_other = game != dataset_id.partition("/")[0] or (f"{game}/{run}" != dataset_id and run in _RUNS)
    if game in _GAMES and is_other:
        raise SchemaError(
            f"{dataset_id} is requested, but the path {source} names {found if run else game}",
            hint=f"pass the folder of {dataset_id}, or rename this one if its name is wrong",
        )


def _list_files(request: Request) -> list[RemoteFile]:
    base = f"{request.mirror}/{request.dataset_id}/replay_logs"
    numbers = request.options.get("checkpoints") or range(request.options.get("runs") or _CHECKPOINTS)
    names = [f"{name}_ckpt.{number}.gz" for number in sorted({*numbers}) for name in CHECKPOINT_FILES]
    return [RemoteFile(url=f"{base}/{quote(name)}", name=name) for name in names]


def _read_stored_options(meta: Mapping[str, Any]) -> dict[str, Any]:
    numbers = [int(number) for number in meta["atari"]]
    return {"runs": meta["import"]["options"]["runs"], "checkpoints": numbers}


def _make_sample(path: Path) -> None:
    """Write two checkpoints of a ring of 40 rows, as Dopamine does each time that all but one are new."""
    slots, empty = 40, (np.zeros((84, 84), np.uint8), 0, 0.0, False)
    rows: list[tuple[Any, ...]] = []
    for walk in make_walks():
        frames, actions = walk.draw_frames(84)[:-1, ..., 0], np.argmax(walk.actions, 1)
        ends = walk.terminated | walk.truncated
        rows += [empty] * _PADDING
        rows += zip(frames, actions, np.sign(walk.rewards), ends, strict=True)
    for number in range(2):
        stop = slots * (number + 1) - 1
        # The last slot still has the row of the lap before, or none.
        ring = [*rows[slots * number : stop], rows[slots * number - 1] if number else empty]
        observation, action, reward, terminal = zip(*ring, strict=True)
        arrays = {
            "$store$_observation": np.stack(observation),
            "$store$_action": np.array(action, np.int32),
            "$store$_reward": np.array(reward, np.float32),
            "$store$_terminal": np.array(terminal, np.uint8),
            "add_count": np.array(stop),
            "invalid_range": np.arange(slots - 2, slots + 3) % slots,
        }
        for name, array in arrays.items():
            write_file(path / "replay_logs" / f"{name}_ckpt.{number}.gz", gzip.compress(encode_npy(array)))


KIND = Kind(
    reader=AtariDQNReader,
    files="the folder of a run, which has files like $store$_observation_ckpt.0.gz",
    make_sample=_make_sample,
    endings="terminated by the flag of the files, which includes time limits; cut where rows are missing",
    recognize=_recognize,
    prefix="atari",
    aliases=("atari_dqn",),
    buffer="AtariDQNExperienceReplay",
    ids=[f"{game}/{run}" for game in _GAMES for run in _RUNS],
    unknown_id="{!r} is not part of the available datasets. The dataset should be named "
    "<game_name>/<run>, with a run between 1 and 5",
    public=f"its public bucket, {_PUBLIC}, no longer exists",
    list_files=_list_files,
    check_source=_check_source,
    facts="atari",
    stored_options=_read_stored_options,
)
