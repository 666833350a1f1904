"""RoboSet's data sets as replay buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from expstore.datasets.buffers.base import BaseDatasetExperienceReplay
from expstore.datasets.download import HUGGING_FACE, RemoteFile, list_hugging_face
from expstore.datasets.origin import Download, Origin
from expstore.datasets.registry import UnknownDatasetError
from expstore.datasets.roboset import RobosetReader
from expstore.errors import NotFoundError
from expstore.samplers.base import Sampler
from expstore.writers.writers import Writer

_REPOSITORY = "jdvakil/RoboSet_Sim"
_TASKS = ("MicroOpen", "Knob2Off", "LdoorOpen", "SdoorOpen", "Knob1On")


class RobosetExperienceReplay(BaseDatasetExperienceReplay):
    """Sample one of RoboSet's simulated data sets: demonstrations with a robot hand or in a kitchen.

    Unlike in TorchRL's class, the flags at the root are False, and a trial that does not end with `done` is
    cut instead of running into the next one.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: One of `available_datasets`.
        batch_size: Batch size of `sample`.
        root: Folder of the collection; None for the default below `~/.cache/expstore`.
        download: Whether to fetch a missing data set; "force" fetches it again.
        sampler: Sampler of the batches; None for uniform sampling.
        writer: Writer for new rows; None refuses them.
        collate_fn: As in `ReplayBuffer`.
        pin_memory: As in `ReplayBuffer`.
        prefetch: As in `ReplayBuffer`.
        transform: As in `ReplayBuffer`.
        split_trajs: Whether a row is a whole trajectory, padded with zeros and with a `mask`.
        source: An .h5 file, or a folder of .h5 files. Nothing is fetched then.
        mirror: Address to use instead of `https://huggingface.co`.

    Raises:
        UnknownDatasetError: The data set does not exist; an ArgumentError.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore import RobosetExperienceReplay
        >>> data = RobosetExperienceReplay(
        ...     "DAPG(expert)/door_v2d-v1", batch_size=32, source="door_v2d-v1.h5"
        ... )
        >>> data.sample().batch_size
        torch.Size([32])
    """

    available_datasets: ClassVar[list[str]] = [
        *(
            f"DAPG({kind})/{task}_v2d-v1"
            for kind in ("expert", "human")
            for task in ("door", "relocate", "hammer", "pen")
        ),
        *(f"FK1-v4(expert)/FK1_{task}Random_v2d-v4" for task in _TASKS),
        "FK1-v4(human)/human_demos_by_playdata",
        "FK1-v4(human)/human_demos_by_task/human_demo_singleTask_Fixed-v4",
        *(f"FK1-v4(human)/human_demos_by_task/FK1_{task}Random_v2d-v4" for task in _TASKS),
    ]

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        root: str | Path | None = None,
        download: Download = True,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        split_trajs: bool = False,
        source: str | Path | None = None,
        mirror: str = HUGGING_FACE,
    ) -> None:
        if dataset_id not in self.available_datasets:
            raise UnknownDatasetError.of(
                type(self), dataset_id, f"The dataset_id {dataset_id} isn't part of the accepted datasets"
            )
        super().__init__(
            Origin(
                name="roboset",
                dataset_id=dataset_id,
                make_reader=RobosetReader,
                list_files=partial(_list_files, dataset_id, mirror),
            ),
            batch_size,
            root=root,
            download=download,
            source=source,
            split_trajs=split_trajs,
            sampler=sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
        )


def _list_files(dataset_id: str, mirror: str) -> list[RemoteFile]:
    """Return the .h5 files whose path begins with the id."""
    folder = dataset_id.rpartition("/")[0]
    found = [
        replace(file, name=file.name.rpartition("/")[2])
        for file in list_hugging_face(_REPOSITORY, folder, endpoint=mirror)
        if file.name.startswith(dataset_id) and file.name.endswith(".h5")
    ]
    if not found:
        raise NotFoundError(f"{mirror}/datasets/{_REPOSITORY} has no file {dataset_id}*.h5")
    return found
