"""The ranks of a consumer: how many processes share its batches, and which draws each has committed.

Rank 0 decides draws and owns the log; the others read the log. A draw is committed when all ranks have
committed it. docs/format.md specifies the files.
"""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import google_crc32c

from expstore.core.arguments import check_whole
from expstore.core.parsing import parsing
from expstore.disk.files import Disk, File
from expstore.errors import ArgumentError, StateError

_RANKS = "ranks.json"
#: Checksum of the rest of the file `commit-<rank>`; then the generation, and the number of committed draws.
_CRC, _BODY = struct.Struct("<I"), struct.Struct("<QQ")


class Ranks:
    """What the ranks of a consumer tell one another in its folder.

    A generation is the time during which the number of ranks is the same. Rank 0 begins one; the ranks of a
    former one can neither draw nor commit any more.

    Threads: one at a time. Processes: each rank has an object of its own, and writes a file of its own; rank
    0 has the lock of the folder. Crashes: `commit` is durable when it returns; a file that was torn counts
    as no commit.

    Args:
        disk: The disk on which files are accessed.
        folder: The consumer's folder.
        rank: This process, from 0.
        world: Number of ranks.
    """

    def __init__(self, disk: Disk, folder: Path, rank: int, world: int) -> None:
        self._disk, self._folder = disk, folder
        self.rank, self.world = rank, world
        self._generation, self._members = 0, 1  # that were found, with its number of ranks
        self._stamp: tuple[int, ...] = ()
        self._file: File | None = None

    def join(self) -> bool:
        """Read the present generation; return whether it has this number of ranks."""
        self._stamp = self._read_stamp()
        self._generation, self._members = read_generation(self._disk, self._folder)
        return self._members == self.world

    def begin(self) -> None:
        """Begin a generation if the number of ranks has changed since the last one. Rank 0 calls it.

        Raises:
            StorageError: The disk failed.
        """
        if not self.join():
            facts = {"generation": self._generation + 1, "world": self.world}
            self._disk.write_whole(self._folder / _RANKS, json.dumps(facts).encode())
            self.join()

    def check(self) -> None:
        """Refuse to continue in a former generation.

        Raises:
            StateError: Rank 0 has begun another generation.
        """
        if self._read_stamp() == self._stamp:
            return
        generation, world = read_generation(self._disk, self._folder)
        if generation != self._generation:
            raise StateError(
                f"the consumer has {world} ranks now; this was rank {self.rank} of {self.world}",
                hint="end this process: others have taken its place",
            )

    def _read_stamp(self) -> tuple[int, ...]:
        path = self._folder / _RANKS
        return self._disk.read_stamp(path) if self._disk.exists(path) else ()

    def commit(self, count: int) -> None:
        """Record durably that this rank's safe checkpoint covers the first `count` draws.

        Raises:
            StorageError: The disk failed.
        """
        body = _BODY.pack(self._generation, count)
        is_new = self._file is None
        if self._file is None:
            self._file = self._disk.open(self._folder / _name(self.rank), create=True)
        self._file.write(_CRC.pack(google_crc32c.value(body)) + body, 0)
        self._file.sync()
        if is_new:
            self._disk.sync_dir(self._folder)

    def count_committed(self, floor: int) -> int:
        """Return how many draws all ranks have committed.

        Args:
            floor: What the log says; it counts for a rank that has not committed in this generation.
        """
        return max(floor, min(self._read(rank, floor) for rank in range(self._members)))

    def count_own(self, floor: int) -> int:
        """Return how many draws this rank has committed, at least `floor`."""
        return max(floor, self._read(self.rank, floor))

    def _read(self, rank: int, floor: int) -> int:
        path = self._folder / _name(rank)
        data = self._disk.read_whole(path) if self._disk.exists(path) else b""
        body = data[_CRC.size :]
        if len(body) != _BODY.size or _CRC.unpack_from(data) != (google_crc32c.value(body),):
            return floor
        generation, count = _BODY.unpack(body)
        return int(count) if generation == self._generation else floor

    def close(self) -> None:
        """Close the file of this rank."""
        if self._file is not None:
            self._file.close()
            self._file = None


def find_rank(rank: int | None, world: int | None) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks.

    Args:
        rank: What the user passed; None: the environment variable RANK, or 0 without it.
        world: What the user passed; None: the environment variable WORLD_SIZE, or 1 without it.

    Raises:
        ArgumentError: They are not a rank and a number of ranks.
    """
    if (rank is None) != (world is None):
        raise ArgumentError(f"pass both rank and world, or neither; got rank={rank}, world={world}")
    if rank is None:
        rank, world = _read_environment("RANK", 0), _read_environment("WORLD_SIZE", 1)
    rank, world = check_whole("rank", rank), check_whole("world", world)
    if not 0 <= rank < world:
        raise ArgumentError(f"rank must be from 0 to world - 1; got rank={rank}, world={world}")
    return rank, world


def _read_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise ArgumentError(
            f"the environment variable {name} must be a number, got {text!r}", hint="pass rank= and world="
        )
    return int(text)


def _name(rank: int) -> str:
    return f"commit-{rank}"


def read_committed(disk: Disk, folder: Path, floor: int) -> int:
    """Return how many draws all ranks of a consumer have committed; `floor` is what its log says."""
    ranks = Ranks(disk, folder, 0, 1)
    ranks.join()
    return ranks.count_committed(floor)


def read_generation(disk: Disk, folder: Path) -> tuple[int, int]:
    """Return the generation and its number of ranks; without a file there is one rank."""
    path = folder / _RANKS
    if not disk.exists(path):
        return 0, 1
    with parsing(path):
        facts = json.loads(disk.read_whole(path))
        return int(facts["generation"]), int(facts["world"])
