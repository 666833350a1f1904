"""The DQN replay data set of Atari games as replay buffers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np
import torch

from expstore.datasets.atari_dqn import CHECKPOINT_FILES, AtariDQNReader, as_ranges, run_name
from expstore.datasets.buffers.base import BaseDatasetExperienceReplay, choose_sampler
from expstore.datasets.download import RemoteFile
from expstore.datasets.origin import Download, Origin
from expstore.datasets.registry import UnknownDatasetError
from expstore.errors import ArgumentError, NotFoundError, SchemaError, StateError
from expstore.samplers.base import Sampler
from expstore.writers.writers import Writer

_GAMES = [
    "AirRaid",
    "Alien",
    "Amidar",
    "Assault",
    "Asterix",
    "Asteroids",
    "Atlantis",
    "BankHeist",
    "BattleZone",
    "BeamRider",
    "Berzerk",
    "Bowling",
    "Boxing",
    "Breakout",
    "Carnival",
    "Centipede",
    "ChopperCommand",
    "CrazyClimber",
    "DemonAttack",
    "DoubleDunk",
    "ElevatorAction",
    "Enduro",
    "FishingDerby",
    "Freeway",
    "Frostbite",
    "Gopher",
    "Gravitar",
    "Hero",
    "IceHockey",
    "Jamesbond",
    "JourneyEscape",
    "Kangaroo",
    "Krull",
    "KungFuMaster",
    "MontezumaRevenge",
    "MsPacman",
    "NameThisGame",
    "Phoenix",
    "Pitfall",
    "Pong",
    "Pooyan",
    "PrivateEye",
    "Qbert",
    "Riverraid",
    "RoadRunner",
    "Robotank",
    "Seaquest",
    "Skiing",
    "Solaris",
    "SpaceInvaders",
]

_PUBLIC = "gs://atari-replay-datasets/dqn"
_CHECKPOINTS = 50
_RUNS = ("1", "2", "3", "4", "5")


class AtariDQNExperienceReplay(BaseDatasetExperienceReplay):
    """Sample the 50 million steps that one of five DQN agents took in an Atari game, frame by frame.

    The public bucket of this data set no longer exists. Pass the files of a run as `source=`, or the address
    of a copy as `mirror=`.

    Samples have `observation` and `("next", "observation")` `(n, 84, 84)` uint8, `action` `(n,)` int64,
    `("next", "reward")` `(n, 1)` float32 and `metadata`: `dataset_id`, and of every checkpoint `add_count`
    `(checkpoints,)` and `invalid_range` `(checkpoints, 5)`. `("next", "observation")` of the last step of an
    episode is 0, because the data set does not contain it.

    Unlike in TorchRL's class, rows are in the order in which the agent made them; a batch has them in the
    requested order; the last step belongs to its own episode; the zero rows before each episode are left out;
    episodes continue across checkpoints but never across missing rows; flags and rewards have the shape
    `(n, 1)`; frames are stored compressed, at 1/20 to 1/60 of the size.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: One of `available_datasets`: game and run, for instance "Pong/5".
        batch_size: Batch size of `sample`.
        root: Folder of the collection; None for the default below `~/.cache/expstore`.
        download: Whether to fetch a missing data set; "force" fetches it again.
        sampler: Sampler of the batches. It overrides the four options below.
        writer: Writer for new rows; None refuses them.
        transform: As in `ReplayBuffer`.
        num_procs: Ignored; accepted for compatibility with TorchRL. Reading and writing use one thread each.
        num_slices: Number of slices of episodes per batch; excludes `slice_len`.
        slice_len: Number of steps per slice; excludes `num_slices`.
        strict_len: Whether episodes that are too short for a slice are left out.
        replacement: Whether to sample rows, or slices, with replacement.
        mp_start_method: Ignored, like `num_procs`.
        source: Folder `replay_logs` of a run, with `$store$_observation_ckpt.0.gz` and so on. Nothing is
            fetched then.
        mirror: Address of a copy of the bucket's folder `dqn`.
        strict_length: The same as `strict_len`: the name in TorchRL's documentation.
        checkpoints: Numbers of the checkpoints to read. None reads all; then none may be missing in the
            middle of the run.
        keywords: As in `ReplayBuffer`.

    Attributes:
        available_datasets: All ids.

    Raises:
        UnknownDatasetError: The data set does not exist; an ArgumentError.
        NotFoundError: There are no files: neither `source` nor `mirror` is given.
        StateError: The store was made from other checkpoints.
        SchemaError: The path of the source names another game or run.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore import AtariDQNExperienceReplay
        >>> data = AtariDQNExperienceReplay("Pong/5", batch_size=32, source="Pong/5/replay_logs")
        >>> data.sample().batch_size
        torch.Size([32])
    """

    available_datasets: ClassVar[list[str]] = [f"{game}/{run}" for game in _GAMES for run in range(1, 6)]
    #: Number of checkpoints to read, from the first one on; None for all 50.
    _max_runs: ClassVar[int | None] = None

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        root: str | Path | None = None,
        download: Download = True,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        transform: Any = None,
        num_procs: int = 0,
        num_slices: int | None = None,
        slice_len: int | None = None,
        strict_len: bool = True,
        replacement: bool = True,
        mp_start_method: str = "fork",
        source: str | Path | None = None,
        mirror: str | None = None,
        strict_length: bool | None = None,
        checkpoints: Sequence[int] | None = None,
        **keywords: Any,
    ) -> None:
        if dataset_id not in self.available_datasets:
            raise UnknownDatasetError.of(
                type(self),
                dataset_id,
                f"{dataset_id!r} is not part of the available datasets. The dataset should be named "
                "<game_name>/<run>, with a run between 1 and 5",
            )
        if strict_length is not None and not strict_len:
            raise ArgumentError("strict_len and strict_length mean the same; pass one of them")
        super().__init__(
            Origin(
                name="atari",
                dataset_id=dataset_id,
                make_reader=partial(_make_reader, dataset_id, self._max_runs, checkpoints),
                list_files=partial(_list_files, dataset_id, mirror, self._max_runs, checkpoints),
            ),
            batch_size,
            root=root,
            download=download,
            source=source,
            sampler=choose_sampler(
                sampler,
                num_slices=num_slices,
                slice_len=slice_len,
                strict_length=strict_len if strict_length is None else strict_length,
                replacement=replacement,
            ),
            writer=writer,
            transform=transform,
            **keywords,
        )
        runs = self.meta["import"]["options"]["runs"]
        if runs != self._max_runs:
            self.close()
            raise StateError(
                f"{self.data_path} was made of {runs or 'all'} checkpoints, but "
                f"{self._max_runs or 'all'} are requested",
                hint='pass download="force" to make it again, or another root=',
            )
        numbers = [int(number) for number in self.meta["atari"]]
        if checkpoints is not None and numbers != sorted(set(checkpoints)):
            self.close()
            raise StateError(
                f"{self.data_path} was made of the checkpoints {as_ranges(numbers)}, but "
                f"{as_ranges(sorted(set(checkpoints)))} are requested",
                hint='pass download="force" to make it again, or another root=',
            )
        facts = list(self.meta["atari"].values())
        self.set_metadata(
            {
                "invalid_range": torch.tensor([one["invalid_range"] for one in facts]),
                "add_count": torch.tensor([one["add_count"] for one in facts]),
                "dataset_id": dataset_id,
            }
        )

    @property
    def episodes(self) -> torch.Tensor:  # type: ignore[override]  # TorchRL's name
        """Number of each row's episode, counted from 0. Shape `(rows,)`, int64."""
        lengths = self.sql("SELECT length FROM episodes ORDER BY episode_id").fetchall()
        counts = np.array([length for (length,) in lengths], np.int64)
        return torch.from_numpy(np.repeat(np.arange(counts.size), counts))


def _make_reader(
    dataset_id: str, runs: int | None, checkpoints: Sequence[int] | None, source: Path
) -> AtariDQNReader:
    """Return the reader of a run.

    Raises:
        SchemaError: The path names another game, or another run of the game.
    """
    found = run_name(source)
    game, _, run = found.partition("/")
    wanted = dataset_id.partition("/")[0]
    # The files may be in a folder of the game that has no folder of the run.
    if run in _GAMES:
        game, run = run, ""
    if game in _GAMES and (game != wanted or (f"{game}/{run}" != dataset_id and run in _RUNS)):
        raise SchemaError(
            f"{dataset_id} is requested, but the path {source} names {found if run else game}",
            hint=f"pass the folder of {dataset_id}, or rename this one if its name is wrong",
        )
    return AtariDQNReader(source, runs=runs, checkpoints=checkpoints)


def _list_files(
    dataset_id: str, mirror: str | None, runs: int | None, checkpoints: Sequence[int] | None
) -> Sequence[RemoteFile]:
    """Return the files of a run at a mirror.

    Raises:
        NotFoundError: No mirror is given.
    """
    if mirror is None:
        raise NotFoundError(
            f"the data set {dataset_id} is missing, and its public bucket, {_PUBLIC}, no longer exists",
            hint="pass source=, a folder with files like $store$_observation_ckpt.0.gz, or mirror=, the "
            "address of a copy of the bucket's folder dqn",
        )
    base = f"{mirror.rstrip('/')}/{dataset_id}/replay_logs"
    numbers = range(runs or _CHECKPOINTS) if checkpoints is None else sorted(set(checkpoints))
    names = [f"{name}_ckpt.{number}.gz" for number in numbers for name in CHECKPOINT_FILES]
    return [RemoteFile(url=f"{base}/{quote(name)}", name=name) for name in names]
