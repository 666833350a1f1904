"""Minari's data sets as replay buffers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import torch

from expstore.datasets.buffers.base import BaseDatasetExperienceReplay
from expstore.datasets.download import HUGGING_FACE, RemoteFile, list_hugging_face
from expstore.datasets.minari_folder import MinariReader
from expstore.datasets.origin import Download, Origin
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import ArgumentError, NotFoundError, RemoteError
from expstore.samplers.base import Sampler
from expstore.specs.base import TensorSpec
from expstore.specs.bounded import Bounded, Unbounded
from expstore.specs.categorical import Categorical
from expstore.specs.composite import Composite
from expstore.writers.writers import Writer

_AUTHOR = "farama-minari"


class _Available:
    """List the ids at the public address when a class attribute is read."""

    def __get__(self, instance: object, owner: type[object]) -> list[str]:
        return list_minari()


def list_minari(endpoint: str = HUGGING_FACE) -> list[str]:
    """Return the ids of Minari's public data sets.

    Raises:
        RemoteError: The address does not answer.
    """
    base = endpoint.rstrip("/")
    found: list[str] = []
    with httpx.Client(follow_redirects=True, timeout=30.0) as client:
        try:
            answer = client.get(f"{base}/api/datasets", params={"author": _AUTHOR, "limit": 1000})
            answer.raise_for_status()
            for repository in json.loads(answer.content):
                name = repository["id"]
                said = client.get(f"{base}/datasets/{name}/resolve/main/namespace_metadata.json")
                if said.status_code == 404:  # a data set without a namespace
                    found.append(name.rpartition("/")[2])
                else:
                    said.raise_for_status()
                    found += json.loads(said.content).get("datasets", [])
        except httpx.HTTPError as exc:
            raise RemoteError(
                f"cannot list the data sets of {base}/{_AUTHOR}: {exc or type(exc).__name__}"
            ) from exc
    return sorted(found)


class MinariExperienceReplay(BaseDatasetExperienceReplay):
    """Sample one of Minari's data sets.

    Samples have `episode`, Minari's number of the episode. `metadata` of the buffer has Minari's metadata of
    the data set, with spaces as specs.

    Unlike in TorchRL's class, texts are left out; an info that some episodes lack is left out; the data set
    is read one episode at a time; the library minari is not needed for HDF5; a data set of
    `~/.minari/datasets` becomes a store once, not at each use.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: The id, for instance "D4RL/pen/human-v2".
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
        load_from_local_minari: Whether to read the data set from Minari's own folder, `$MINARI_DATASETS_PATH`
            or `~/.minari/datasets`, as with `source=`.
        source: Folder of the data set. Nothing is fetched then.
        mirror: Address to use instead of `https://huggingface.co`.

    Attributes:
        available_datasets: The ids of the public data sets, fetched over the network.

    Raises:
        FileNotFoundError: `load_from_local_minari` is set, and Minari's folder does not have the data set.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore import MinariExperienceReplay
        >>> data = MinariExperienceReplay("D4RL/pen/human-v2", batch_size=32, source="pen/human-v2")
        >>> data.sample().batch_size
        torch.Size([32])
    """

    available_datasets = _Available()

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
        load_from_local_minari: bool = False,
        source: str | Path | None = None,
        mirror: str = HUGGING_FACE,
    ) -> None:
        if load_from_local_minari:
            if source is not None:
                raise ArgumentError("load_from_local_minari and source exclude each other; pass one of them")
            source = _local_folder(dataset_id)
        super().__init__(
            Origin(
                name="minari",
                dataset_id=dataset_id,
                make_reader=MinariReader,
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
        said = dict(self.meta.get("minari", {}))
        for name in ("observation_space", "action_space"):
            if name in said:
                said[name] = _spec(json.loads(said[name]))
        #: Minari's metadata of the data set. Spaces are specs, or None if no spec describes their values
        #: (texts).
        self.metadata: dict[str, Any] = said


def _local_folder(dataset_id: str) -> Path:
    base = os.environ.get("MINARI_DATASETS_PATH") or "~/.minari/datasets"
    folder = local_path(base) / dataset_id
    disk = ReadingDisk()
    if not disk.exists(folder):
        raise FileNotFoundError(f"{folder} does not exist in local Minari cache!")
    return folder


def _list_files(dataset_id: str, mirror: str) -> list[RemoteFile]:
    repository, _, folder = dataset_id.partition("/")
    found = [
        replace(file, name=file.name.removeprefix(f"{folder}/"))
        for file in list_hugging_face(f"{_AUTHOR}/{repository}", folder, endpoint=mirror)
        if "/data/" in f"/{file.name}"
    ]
    if not found:
        raise NotFoundError(
            f"{mirror}/datasets/{_AUTHOR}/{repository} has no data set {folder or repository}"
        )
    return found


def _spec(space: dict[str, Any]) -> TensorSpec | None:
    """Return the spec of a space that Minari wrote as JSON; None if no spec has its type."""
    kind = space["type"]
    if kind in ("Dict", "Tuple"):
        below = space["subspaces"]
        named = below if kind == "Dict" else {str(place): one for place, one in enumerate(below)}
        specs = {name: _spec(one) for name, one in named.items()}
        return Composite({name: one for name, one in specs.items() if one is not None})
    if kind == "Discrete":
        return Categorical(space["n"], shape=(), dtype=torch.int64)
    if kind != "Box":
        return None
    dtype: torch.dtype = getattr(torch, space["dtype"])
    low, high = (torch.as_tensor(space[side], dtype=dtype) for side in ("low", "high"))
    shape = tuple(space["shape"])
    if bool((low == -torch.inf).all()) and bool((high == torch.inf).all()):
        return Unbounded(shape, dtype=dtype)
    return Bounded(low=low.expand(shape), high=high.expand(shape), shape=shape, dtype=dtype)
