"""Gen-DGRL's data sets as replay buffers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from expstore.datasets.buffers.base import BaseDatasetExperienceReplay
from expstore.datasets.download import RemoteFile
from expstore.datasets.gen_dgrl import GenDGRLReader
from expstore.datasets.origin import Download, Origin
from expstore.datasets.registry import UnknownDatasetError

_ADDRESS = "https://dl.fbaipublicfiles.com/DGRL/Procgen/Datasets/Compressed"
_GAMES = (
    *("bigfish", "bossfight", "caveflyer", "chaser", "climber", "coinrun", "dodgeball", "fruitbot"),
    *("heist", "jumper", "leaper", "maze", "miner", "ninja", "plunder", "starpilot"),
)
#: Folders and numbers of rows by category.
_CATEGORIES = {
    "1M_E": ("1M/level_200/expert", 1_000_000),
    "1M_S": ("1M/level_200/suboptimal", 1_000_000),
    "10M": ("10M/level_200/expert", 10_000_000),
    "25M": ("25M/level_200/expert", 25_000_000),
    "level_1_E": ("100k/level_1/expert", 100_000),
    "level_1_S": ("100k/level_1/suboptimal", 100_000),
    "level_40_E": ("100k/level_40/expert", 100_000),
    "level_40_S": ("100k/level_40/suboptimal", 100_000),
}


class GenDGRLExperienceReplay(BaseDatasetExperienceReplay):
    """Sample one of Gen-DGRL's data sets: Procgen games, by level and skill.

    Unlike in TorchRL's class, the files, which are pickles, are read without running code; the trajectory
    that reaches the category's number of rows is kept whole; a trajectory without `dones` at its end is cut
    instead of running into the next one; rewards have the shape `(n, 1)`; new rows are refused unless a
    writer is given.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: One of `available_datasets`: game and category, for instance "bigfish-1M_E".
        batch_size: Batch size of `sample`.
        download: Whether to fetch a missing data set; "force" fetches it again.
        root: Folder of the collection; None for the default below `~/.cache/expstore`.
        source: The archive, or a folder of its .npy files. Nothing is fetched then.
        mirror: Address to use instead of the public one.
        keywords: Arguments of the base class: `sampler`, `writer`, `transform` and so on.

    Raises:
        UnknownDatasetError: The data set does not exist; an ArgumentError.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore import GenDGRLExperienceReplay
        >>> data = GenDGRLExperienceReplay("bigfish-1M_E", batch_size=32, source="bigfish.tar")
        >>> data.sample().batch_size
        torch.Size([32])
    """

    available_datasets: ClassVar[list[str]] = [f"{game}-{name}" for name in _CATEGORIES for game in _GAMES]

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        download: Download = True,
        root: str | Path | None = None,
        source: str | Path | None = None,
        mirror: str = _ADDRESS,
        **keywords: Any,
    ) -> None:
        if dataset_id not in self.available_datasets:
            raise UnknownDatasetError.of(
                type(self), dataset_id, f"{dataset_id!r} is not one of the data sets"
            )
        game, category = dataset_id.split("-")
        folder, rows = _CATEGORIES[category]
        file = RemoteFile(url=f"{mirror.rstrip('/')}/{folder}/{game}.tar.xz", name=f"{game}.tar.xz")
        super().__init__(
            Origin(
                name="gen_dgrl",
                dataset_id=dataset_id,
                make_reader=partial(GenDGRLReader, rows=rows),
                list_files=lambda: [file],
            ),
            batch_size,
            download=download,
            root=root,
            source=source,
            **keywords,
        )
