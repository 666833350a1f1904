"""RLDS data sets, such as those of Open X-Embodiment, as replay buffers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from expstore._open import open as open_store
from expstore.core.parsing import INVALID
from expstore.datasets.buffers.base import BaseDatasetExperienceReplay, choose_sampler
from expstore.datasets.buffers.episode_texts import EpisodeTexts
from expstore.datasets.download import RemoteFile, fetch_files
from expstore.datasets.origin import Download, Origin, data_folder
from expstore.datasets.rlds import LastStep, RLDSReader, list_shards
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.errors import ArgumentError, NotFoundError, SchemaError, StateError
from expstore.samplers.base import Sampler
from expstore.writers.writers import Writer

#: The folder of Open X-Embodiment, with the data sets as NAME/VERSION.
OPEN_X = "https://storage.googleapis.com/gresearch/robotics"

_INFO = ("dataset_info.json", "features.json")


class RLDSExperienceReplay(BaseDatasetExperienceReplay):
    """Sample a data set in RLDS's format, as TensorFlow Datasets writes it. TensorFlow is not needed.

    For the rows see `RLDSReader`. Samples have the texts of the steps, such as `language_instruction`, which
    the store keeps per episode.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: Name and version at `mirror`, for instance "bridge/0.1.0"; with `source=` any name.
        batch_size: Batch size of `sample`.
        num_slices: Number of slices of episodes per batch; excludes `slice_len`.
        slice_len: Number of steps per slice; excludes `num_slices`.
        replacement: Whether to sample rows, or slices, with replacement.
        split: The split to read. None reads all.
        last_step: Meaning of the last step of an episode: "observation" or "transition"; see `RLDSReader`. In
            many data sets of Open X-Embodiment it is a transition.
        root: Folder of the collection; None for the default below `~/.cache/expstore`.
        download: Whether to fetch a missing data set; "force" fetches it again.
        sampler: Sampler of the batches. It overrides `num_slices`, `slice_len` and `replacement`.
        writer: Writer for new rows; None refuses them.
        collate_fn: As in `ReplayBuffer`.
        pin_memory: As in `ReplayBuffer`.
        prefetch: As in `ReplayBuffer`.
        transform: As in `ReplayBuffer`. Its input includes the texts.
        split_trajs: Whether a row is a whole trajectory, padded with zeros and with a `mask`.
        strict_length: Whether to leave out episodes that are shorter than a slice.
        source: The folder with features.json and dataset_info.json. Nothing is fetched then.
        mirror: Address of a folder with data sets, instead of that of Open X-Embodiment.

    Raises:
        ArgumentError: Both `num_slices` and `slice_len` are given, or one of them with `split_trajs`.
        StateError: The store exists and was made with another `split` or `last_step`.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore import RLDSExperienceReplay
        >>> data = RLDSExperienceReplay(
        ...     "cmu_play_fusion/0.1.0", batch_size=32, source="cmu_play_fusion/0.1.0"
        ... )
        >>> data.sample().batch_size
        torch.Size([32])
    """

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        replacement: bool = True,
        split: str | None = None,
        last_step: LastStep = "observation",
        root: str | Path | None = None,
        download: Download = True,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        split_trajs: bool = False,
        strict_length: bool = True,
        source: str | Path | None = None,
        mirror: str = OPEN_X,
    ) -> None:
        if num_slices is not None and slice_len is not None:
            raise ArgumentError("num_slices or slice_len can be passed, but not both.")
        if split_trajs and (num_slices is not None or slice_len is not None):
            raise ArgumentError(
                "rows of split_trajs=True are whole episodes: leave out num_slices and slice_len"
            )
        collection = data_folder("rlds") if root is None else local_path(root)
        super().__init__(
            Origin(
                name="rlds",
                dataset_id=dataset_id,
                make_reader=partial(RLDSReader, split=split, last_step=last_step),
                list_files=partial(
                    _list_files, dataset_id, mirror, split, collection / ".downloads" / dataset_id
                ),
            ),
            batch_size,
            root=collection,
            download=download,
            source=source,
            split_trajs=split_trajs,
            sampler=choose_sampler(
                sampler,
                num_slices=num_slices,
                slice_len=slice_len,
                strict_length=strict_length,
                replacement=replacement,
            ),
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
        )
        self._check_options({"split": split, "last_step": last_step})
        if not split_trajs and (names := self.meta["rlds"]["texts"]):
            self.append_transform(EpisodeTexts(_facts(self), names))
        if transform is not None:
            self.append_transform(transform)

    def _check_options(self, wanted: dict[str, Any]) -> None:
        """Raise StateError if the store was made with other options."""
        if self.data_path == self.data_path_root:
            meta = self.meta
        else:  # a store of trajectories does not record how it was made
            with open_store(self.data_path_root, mode="r") as rb:
                meta = rb.meta
        if "rlds" not in meta:
            self.close()
            raise StateError(
                f"{self.data_path} was not made of an RLDS data set", hint="choose another root="
            )
        found = meta["import"]["options"]
        if found != wanted:
            self.close()
            raise StateError(
                f"{self.data_path} was made with {', '.join(f'{k}={v!r}' for k, v in found.items())}",
                hint='pass the same options, another root=, or download="force" to make it again',
            )


def _facts(data: BaseDatasetExperienceReplay) -> dict[int, dict[str, Any]]:
    """Return the annotations of every episode, by its number."""
    rows = data.sql("SELECT trajectory_id, info FROM episodes").fetchall()
    return {int(number): json.loads(info) for number, info in rows}


def _list_files(dataset_id: str, mirror: str, split: str | None, folder: Path) -> list[RemoteFile]:
    """Return the files of a data set. Fetches dataset_info.json, which names the shards."""
    base = f"{mirror.rstrip('/')}/{dataset_id}"
    described = [RemoteFile(url=f"{base}/{name}", name=name) for name in _INFO]
    fetch_files(described, folder)
    path = folder / _INFO[0]
    try:
        shards = list_shards(json.loads(Disk().read_whole(path.resolve())))
    except INVALID as exc:
        raise SchemaError(f"{base}/{_INFO[0]} is not JSON: {exc}") from exc
    names = [shard.name for shard in shards if split in (None, shard.split)]
    if not names:
        raise NotFoundError(f"{base} has no split {split!r}")
    # The reader requires the shards of all splits only if it reads all splits.
    return described + [RemoteFile(url=f"{base}/{name}", name=name) for name in names]
