"""V-D4RL's data sets as replay buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from tensordict import TensorDictBase

from expstore.datasets.buffers.base import BaseDatasetExperienceReplay
from expstore.datasets.download import HUGGING_FACE, RemoteFile, list_hugging_face
from expstore.datasets.origin import Download, Origin
from expstore.datasets.registry import UnknownDatasetError
from expstore.datasets.vd4rl import VD4RLReader
from expstore.errors import ArgumentError, NotFoundError
from expstore.samplers.base import Sampler
from expstore.writers.writers import Writer

_REPOSITORY = "conglu/vd4rl"
_PIXELS: tuple[tuple[str, ...], ...] = (("pixels",), ("next", "pixels"))


class VD4RLExperienceReplay(BaseDatasetExperienceReplay):
    """Sample one of V-D4RL's data sets: images of control tasks.

    Unlike in TorchRL's class, a row has the action and the reward of the step from its image to the next one.
    (In the files they are in the row of the image after the step, and TorchRL does not move them.) So an
    episode has one row less, its last step has its true next image, and `("next", "pixels")` never belongs to
    another episode. Images are stored in packed columns.

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
        totensor: Whether to return images as float32 between 0 and 1, shape `(n, 3, height, width)`. False
            returns them as in the files, uint8.
        image_size: Height and width to resize images to, or one number for a square. None keeps their size.
        num_workers: Ignored; accepted for compatibility with TorchRL. Files are fetched one after another.
        source: A file or folder. Nothing is fetched then.
        mirror: Address to use instead of `https://huggingface.co`.

    Raises:
        UnknownDatasetError: The data set does not exist; an ArgumentError.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore import VD4RLExperienceReplay
        >>> data = VD4RLExperienceReplay(
        ...     "main/walker_walk/random/64px", batch_size=32, source="walker_walk/random/64px"
        ... )
        >>> data.sample().batch_size
        torch.Size([32])
    """

    available_datasets: ClassVar[list[str]] = [
        *(f"distracting/walker_walk_random/64px/{level}" for level in ("easy", "medium", "hard")),
        *(
            f"main/{task}/{kind}/64px"
            for task in ("cheetah_run", "humanoid_walk", "walker_walk")
            for kind in ("expert", "medium", "medium_expert", "medium_replay", "random")
        ),
        *(f"multitask/{task}_random/64px" for task in ("cheetah_run", "walker_walk")),
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
        totensor: bool = True,
        image_size: int | Sequence[int] | None = None,
        num_workers: int = 0,
        source: str | Path | None = None,
        mirror: str = HUGGING_FACE,
    ) -> None:
        if dataset_id not in self.available_datasets:
            raise UnknownDatasetError.of(
                type(self), dataset_id, f"The dataset_id {dataset_id} isn't part of the accepted datasets"
            )
        size = _size(image_size)
        super().__init__(
            Origin(
                name="vd4rl",
                dataset_id=dataset_id,
                make_reader=VD4RLReader,
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
        if totensor:
            self.append_transform(to_tensor_images)
        if size is not None:
            self.append_transform(partial(resize_images, size=size))


def to_tensor_images(batch: TensorDictBase) -> TensorDictBase:
    """Convert images of a batch to float32 between 0 and 1, channels first."""
    for key in _PIXELS:
        images = batch[key]
        if images.shape[-1] in (1, 3):
            images = images.movedim(-1, -3)
        batch[key] = images.to(torch.float32) / 255
    return batch


def resize_images(batch: TensorDictBase, *, size: tuple[int, int]) -> TensorDictBase:
    """Resize images of a batch with bilinear interpolation."""
    for key in _PIXELS:
        images = batch[key]
        flat = images.reshape(-1, *images.shape[-3:])
        made = torch.nn.functional.interpolate(flat.float(), size, mode="bilinear", antialias=True)
        if not images.is_floating_point():
            made = made.round().to(images.dtype)
        batch[key] = made.reshape(*images.shape[:-2], *size)
    return batch


def _size(size: int | Sequence[int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    pair = (size, size) if isinstance(size, int) else tuple(size)
    if len(pair) != 2 or min(pair) < 1:
        raise ArgumentError(f"image_size={size!r} is not a height and a width")
    return pair[0], pair[1]


def _list_files(dataset_id: str, mirror: str) -> list[RemoteFile]:
    found = [
        replace(file, name=file.name.rpartition("/")[2])
        for file in list_hugging_face(_REPOSITORY, f"vd4rl/{dataset_id}", endpoint=mirror)
        if file.name.endswith((".npz", ".hdf5"))
    ]
    if not found:
        raise NotFoundError(f"{mirror}/datasets/{_REPOSITORY} has no files of {dataset_id}")
    return found
