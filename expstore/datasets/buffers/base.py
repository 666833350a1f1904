"""Replay buffers over the stores of data sets, which are made when a data set is first used.

`BaseDatasetExperienceReplay` is one over any source, `DatasetReplayBuffer` over a data set of a kind. Used by
the classes of this package, and by users for their own data sets. `expstore.datasets.origin` makes the
stores.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import NonTensorData, TensorDictBase

from expstore._open import open as open_store
from expstore.buffers.arguments import resolve_part
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.arguments import refuse_keywords
from expstore.core.torchrl_keywords import BUFFER, check_keywords, keywords_of
from expstore.datasets.buffers.episode_texts import EpisodeTexts
from expstore.datasets.buffers.preprocessing import map_rows
from expstore.datasets.buffers.split_store import make_split_store, split_path
from expstore.datasets.kind import Kind, Request
from expstore.datasets.origin import (
    Download,
    Origin,
    data_folder,
    download_folder,
    prepare_dataset,
    remove_dataset,
)
from expstore.datasets.registry import UnknownDatasetError
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import ArgumentError, StateError
from expstore.exchange.base import show_progress
from expstore.samplers.base import Sampler
from expstore.samplers.slices import SliceSampler
from expstore.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from expstore.samplers.torchrl_adapter import adapt
from expstore.samplers.without_replacement import SamplerWithoutReplacement
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import open_storage
from expstore.storages.follower import FollowerStorage
from expstore.storages.format.manifest import MANIFEST
from expstore.storages.torchrl_tensors import TensorStorage
from expstore.writers.writers import ImmutableDatasetWriter, Writer

if TYPE_CHECKING:
    from torch.multiprocessing.pool import Pool

    from expstore.storages.read_view import ReadView


#: Names of the argument that says which data set to use, in these classes and in older ones of TorchRL.
_ID_NAMES = ("dataset_id", "name", "repo_id")


def _refuse_wrong_calls(init: Callable[..., None]) -> Callable[..., None]:
    """Make a constructor raise ArgumentError without its first argument, and for an unknown keyword."""
    _, *parameters = inspect.signature(init).parameters.values()
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    known = [one.name for one in named if not one.name.startswith("_")]
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    needed = next(
        (one.name for one in named[:1] if one.kind is not one.KEYWORD_ONLY and one.default is one.empty), None
    )

    @functools.wraps(init)
    def check_and_init(self: Any, *args: Any, **keywords: Any) -> None:
        kind = type(self).__name__
        if needed is not None and not args and needed not in keywords:
            for name in _ID_NAMES:
                if name in keywords and name not in known:
                    raise ArgumentError(
                        f"{kind} got an unexpected keyword argument {name!r}",
                        hint=f"use {needed}={keywords[name]!r}; other versions of TorchRL's classes call it "
                        f"{name}",
                    )
            raise ArgumentError(f"{kind} needs {needed}", hint="pass it as the first argument")
        if not takes_all:
            public = {name: keywords[name] for name in keywords if not name.startswith("_")}
            refuse_keywords(kind, public, known)
        init(self, *args, **keywords)

    return check_and_init


class BaseDatasetExperienceReplay(TensorDictReplayBuffer):
    """Sample a data set from its store.

    The first use fetches the data set and makes the store, `ROOT/ID`; later ones open it. The store is like
    any other: `expstore.open(dataset.data_path, mode="r")`, SQL, the server and exports work on it. Samples
    are TensorDicts in TorchRL's layout (TED): `("next", "observation")`, `("next", "reward")` `(n, 1)`,
    and `done`, `terminated`, `truncated` `(n, 1)` bool at the root and under "next".

    Threads: as in `TensorDictReplayBuffer`. Processes: any number can use a data set; while one of them makes
    the store, the others get LockedError. With a prioritized sampler or a writer the store is opened for
    writing, which only one process can do. Crashes: the next use continues an interrupted download or import.

    Args:
        origin: The source of the data set.
        batch_size: Batch size of `sample`.
        root: Folder of the collection. None: `~/.cache/expstore/NAME`; `EXPSTORE_DATA` replaces
            `~/.cache/expstore`.
        download: Whether to fetch a missing data set; "force" makes it again.
        source: File or folder with the files of the public source; nothing is fetched then. An existing store
            must have been made from the same files.
        split_trajs: Whether rows are whole trajectories: fields of shape `(n, time, ...)`, padded with zeros
            to the longest one, and `mask` `(n, time)`, which is True for steps. They are kept in a second
            store, `ROOT/ID_split`.
        sampler: Chooses the rows of batches. None samples uniformly.
        writer: Writes new rows. None uses `ImmutableDatasetWriter`, which refuses them.
        metadata: Value of `metadata` in samples. None leaves it out.
        rows: Rows to sample from memory; nothing is fetched, read or written then. None uses the store.
        keywords: As in `TensorDictReplayBuffer`.

    Raises:
        NotFoundError: The data set does not exist, or it is missing and `download` is False.
        RemoteError: The public address does not answer; the message names it.
        SchemaError: The source does not have the format of the data set.
        StateError: The folder `ROOT/ID` exists and is not a store, or was made from other files.
        LockedError: Another process is making the store.

    Example:
        >>> from expstore.datasets import BaseDatasetExperienceReplay, D4RLExperienceReplay
        >>> from expstore.datasets import make_sample
        >>> source = make_sample("d4rl", "hopper_medium-v2.hdf5")
        >>> data = D4RLExperienceReplay("hopper-medium-v2", batch_size=32, source=source)
        >>> isinstance(data, BaseDatasetExperienceReplay)
        True
    """

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if "__init__" in vars(cls):
            cls.__init__ = _refuse_wrong_calls(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        origin: Origin,
        batch_size: int | None = None,
        *,
        root: str | Path | None = None,
        download: Download = True,
        source: str | Path | None = None,
        split_trajs: bool = False,
        sampler: Sampler | Callable[[], Sampler] | None = None,
        writer: Writer | Callable[[], Writer] | None = None,
        metadata: Mapping[str, Any] | None = None,
        rows: TensorDictBase | None = None,
        **keywords: Any,
    ) -> None:
        self._check_keywords(keywords)  # before anything is fetched
        self._dataset_id = origin.dataset_id
        self._collection = data_folder(origin.name) if root is None else local_path(root)
        self._is_split = split_trajs
        self._is_on_disk = rows is None
        drawing = None if sampler is None else adapt(resolve_part(sampler, "sample"))
        if rows is not None:
            storage: ReadView = TensorStorage(rows)
        else:
            path = prepare_dataset(
                origin, self._collection, source=source, download=download, show=show_progress
            )
            if split_trajs:
                path = make_split_store(path, again=download == "force")
            for_writing = writer is not None or (drawing is not None and drawing.prioritized)
            storage = _open_storage(path, for_writing=for_writing)
        self._finisher = _FinishBatch(is_split=split_trajs)
        super().__init__(
            storage=storage,
            sampler=drawing,
            writer=ImmutableDatasetWriter() if writer is None else writer,
            batch_size=batch_size,
            **keywords,
        )
        self._batches.add_finisher(self._finisher)
        self.set_metadata(metadata)

    def _check_keywords(self, keywords: Mapping[str, Any]) -> None:
        """Raise ArgumentError for a keyword that the buffer does not have."""
        known = keywords_of(TensorDictReplayBuffer)
        check_keywords(self, {name: keywords[name] for name in keywords if name not in known}, BUFFER)

    @property
    def dataset_id(self) -> str:
        """Name of the data set."""
        return self._dataset_id

    @property
    def root(self) -> Path:
        """Folder of the collection."""
        return self._collection

    @property
    def data_path_root(self) -> Path:
        """The store of the data set, with one row per step."""
        return self._collection / self.dataset_id

    @property
    def data_path(self) -> Path:
        """The sampled store: the store of trajectories with `split_trajs`, otherwise `data_path_root`."""
        return split_path(self.data_path_root) if self._is_split else self.data_path_root

    def _is_downloaded(self) -> bool:
        """Return whether the store exists."""
        disk = ReadingDisk()
        return disk.exists(self.data_path_root / MANIFEST)

    def preprocess(
        self,
        fn: Callable[[TensorDictBase], TensorDictBase],
        dim: int = 0,
        num_workers: int | None = None,
        *,
        chunksize: int | None = None,
        num_chunks: int | None = None,
        pool: Pool | None = None,
        generator: torch.Generator | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int = 1,
        index_with_generator: bool = False,
        pbar: bool = False,
        mp_start_method: str | None = None,
        num_frames: int | None = None,
        dest: str | Path,
    ) -> ReadView:
        """Apply a function to the rows and write what it returns to a new store.

        The new store has the episodes, the `meta` and the samples' `metadata` of this one; `meta["import"]`
        is renamed to `meta["preprocessed_from"]`. The store is written next to `dest`, in `DEST.tmp`,
        and renamed when it is complete, so an error or a crash leaves nothing at `dest`.

        Args:
            fn: Function that takes rows, batch size `[n]`, and returns as many. It treats each row
                separately.
            dim: The dim that is mapped; must be 0.
            num_workers: Number of processes that apply the function. 0 uses this process, None one per core.
            chunksize: Number of rows per call. None for 4,096, or as `num_chunks` says.
            num_chunks: Number of calls.
            pool: Processes to use.
            generator: Seeds the processes.
            max_tasks_per_child: Number of calls after which a process is replaced.
            worker_threads: Number of torch threads per process.
            index_with_generator: As in `TensorDict.map`: rows are read when a call needs them.
            pbar: Whether to show a progress bar.
            mp_start_method: How processes are started: "fork" or "spawn".
            num_frames: Number of rows to process, from the first one on. None processes all.
            dest: Folder of the new store. It may exist if it is empty.

        Returns:
            The store, for `ReplayBuffer(storage=...)`.

        Raises:
            ArgumentError: `dim` is not 0.
            StateError: `dest` exists and is not empty.
            LockedError: Another process or thread writes to `dest`.
            SchemaError: The function returns no TensorDict, or another number of rows.
        """
        if dim != 0:
            raise ArgumentError(f"dim={dim}: only the rows, dim 0, can be mapped")
        return map_rows(
            self,
            fn,
            local_path(dest),
            count=len(self) if num_frames is None else min(num_frames, len(self)),
            pbar=pbar,
            metadata=self._finisher.metadata,
            num_workers=num_workers,
            chunksize=chunksize,
            num_chunks=num_chunks,
            pool=pool,
            generator=generator,
            max_tasks_per_child=max_tasks_per_child,
            worker_threads=worker_threads,
            index_with_generator=index_with_generator,
            mp_start_method=mp_start_method,
        )

    def set_metadata(self, metadata: Mapping[str, Any] | None) -> None:
        """Set the `metadata` of samples; None removes it."""
        self._finisher.set_metadata(metadata)

    def delete(self) -> None:
        """Close the buffer and delete the data set from disk; rows in memory are not deleted."""
        self.close()
        if self._is_on_disk:
            remove_dataset(self._collection, self.dataset_id)


class _AvailableDatasets:
    """List the ids of a class's data sets when the attribute is read."""

    def __get__(self, instance: object, owner: type[DatasetReplayBuffer]) -> list[str]:
        kind: Kind | None = getattr(owner, "kind", None)
        return [] if kind is None else kind.available_datasets


class DatasetReplayBuffer(BaseDatasetExperienceReplay):
    """Sample a data set of a kind, by its id. The classes with TorchRL's names are subclasses.

    The first use downloads the files from the public address of the kind, or reads those that `source=`
    names, and makes the store; later uses open it.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: Id of the data set: one of `available_datasets`, if the class lists them.
        batch_size: Batch size of `sample`.
        kind: The kind of the data set. A class with a `kind` of its own needs none.
        options: More options of the kind's reader, by name. An existing store must have been made with them.
        root: Folder of the collection; None for the default below `~/.cache/expstore`.
        download: Whether to fetch a missing data set; "force" fetches it again.
        source: Files of the data set, or a folder that has them below the id. Nothing is fetched then.
        mirror: Address to use instead of the public one.
        keywords: As in `BaseDatasetExperienceReplay`: `sampler`, `writer`, `transform` (whose input includes
            the texts), `collate_fn`, `pin_memory`, `prefetch`, `split_trajs` and so on.

    Attributes:
        available_datasets: All ids; empty if any id is accepted. For some kinds they are fetched over the
            network.

    Raises:
        UnknownDatasetError: The data set does not exist; an ArgumentError.
        NotFoundError: There are no files, and the public address does not have them; the message says what
            `source=` may be.
        StateError: The store exists and was made with other options.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore.datasets import DatasetReplayBuffer, load_dataset, make_sample
        >>> source = make_sample("roboset", "door_v2d-v1.h5")
        >>> data = load_dataset("roboset:DAPG(expert)/door_v2d-v1", batch_size=32, source=source)
        >>> isinstance(data, DatasetReplayBuffer)
        True
    """

    kind: ClassVar[Kind]
    available_datasets = _AvailableDatasets()

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        kind: Kind | None = None,
        options: Mapping[str, Any] | None = None,
        root: str | Path | None = None,
        mirror: str | None = None,
        **keywords: Any,
    ) -> None:
        kind, options = kind or type(self).kind, options or {}
        known = [*keywords_of(BaseDatasetExperienceReplay), *BUFFER]
        self._check_keywords({name: keywords[name] for name in keywords if name not in known})
        if kind.is_unknown(dataset_id):
            raise UnknownDatasetError.of(kind, dataset_id)
        folder = data_folder(kind.prefix) if root is None else local_path(root)
        request = Request(
            dataset_id=dataset_id,
            mirror=(kind.mirror if mirror is None else mirror).rstrip("/"),
            options=options,
            folder=download_folder(folder, dataset_id),
        )
        origin = Origin(
            name=kind.prefix,
            dataset_id=dataset_id,
            make_reader=partial(kind.open_source, dataset_id=dataset_id, options=options),
            list_files=partial(kind.list_public, request),
            sources=kind.describe_source(dataset_id),
        )
        super().__init__(origin, batch_size, root=folder, **keywords)
        if self._is_on_disk and kind.facts:
            self._check_store(kind, options)
            if not self._is_split:
                self._prepend_transforms(self._make_texts(kind))

    def _check_store(self, kind: Kind, options: Mapping[str, Any]) -> None:
        """Close the buffer and raise StateError if the store has another format or other options."""
        meta = self.meta
        if self._is_split:  # a store of trajectories does not record how it was made
            with open_store(self.data_path_root, mode="r") as rb:
                meta = rb.meta
        if kind.facts not in meta:
            self.close()
            raise StateError(
                f"{self.data_path} was not made of a data set of the format {kind.format}",
                hint="choose another root=",
            )
        found = kind.stored_options(meta)
        for name, value in options.items():
            if name in found and found[name] != value:
                self.close()
                raise StateError(
                    f"{self.data_path} was made with {name}={found[name]!r}, "
                    f"but {name}={value!r} is requested",
                    hint='pass the same option, another root=, or download="force" to make it again',
                )

    def _make_texts(self, kind: Kind) -> list[Callable[[TensorDictBase], TensorDictBase]]:
        """Return the transforms that add the texts of steps, which the store keeps per episode."""
        names = self.meta[kind.facts].get("texts")
        if not names:
            return []
        rows = self.sql("SELECT trajectory_id, info FROM episodes").fetchall()
        return [EpisodeTexts({int(number): json.loads(info) for number, info in rows}, names)]

    def _prepend_transforms(self, transforms: Sequence[Callable[[TensorDictBase], TensorDictBase]]) -> None:
        """Insert transforms before those of the user."""
        for place, transform in enumerate(transforms):
            self.insert_transform(place, transform)


class _FinishBatch:
    """Add metadata to batches of a data set, and a time dim to batches of whole trajectories.

    Args:
        is_split: Whether rows are whole trajectories.
    """

    def __init__(self, *, is_split: bool) -> None:
        self.metadata: dict[str, Any] | None = None
        self._is_split = is_split

    def set_metadata(self, metadata: Mapping[str, Any] | None) -> None:
        self.metadata = None if metadata is None else dict(metadata)

    def __call__(self, batch: Any) -> Any:
        if isinstance(batch, TensorDictBase):
            if self._is_split and batch.batch_dims == 1:
                time = batch["mask"].shape[-1]
                if (index := batch.get("index", None)) is not None:
                    batch["index"] = index[:, None].expand(-1, time).clone()
                batch.batch_size = [*batch.batch_size, time]
            if self.metadata is not None:
                batch.set("metadata", NonTensorData(self.metadata, batch_size=batch.batch_size))
        return batch


def _open_storage(path: Path, *, for_writing: bool) -> ReadView:
    if for_writing:
        return open_storage(path, settings=Settings(flatten=True))
    return FollowerStorage(path, None, settings=Settings(mode="r", flatten=True))


def choose_sampler(
    sampler: Sampler | None,
    num_slices: int | None,
    slice_len: int | None,
    strict_length: bool,
    replacement: bool,
    shuffle: bool = True,
) -> Sampler | None:
    """Return the sampler for the arguments of a data set class.

    Args:
        sampler: Sampler given by the user; it overrides the other arguments.
        num_slices: Number of slices per batch; excludes `slice_len`.
        slice_len: Number of steps per slice; excludes `num_slices`.
        strict_length: Whether to leave out episodes that are too short.
        replacement: Whether to sample rows, or slices, with replacement.
        shuffle: Whether slices without replacement are in random order.
    """
    if sampler is not None:
        return sampler
    if num_slices is None and slice_len is None:
        return None if replacement else SamplerWithoutReplacement()
    if replacement:
        return SliceSampler(num_slices=num_slices, slice_len=slice_len, strict_length=strict_length)
    return SliceSamplerWithoutReplacement(
        num_slices=num_slices, slice_len=slice_len, strict_length=strict_length, shuffle=shuffle
    )
