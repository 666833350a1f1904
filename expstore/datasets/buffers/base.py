"""The base of the data set classes: a replay buffer over the store of a data set.

Used by the classes of this package and by users, for data sets of their own. It makes the store when the data
set is first used; how that is done is in `expstore.datasets.origin`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tensordict import NonTensorData, TensorDictBase

from expstore.buffers.arguments import resolve_part
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.datasets.buffers.preprocessing import map_rows
from expstore.datasets.buffers.split_store import make_split_store, split_path
from expstore.datasets.origin import Download, Origin, data_folder, prepare_dataset, remove_dataset
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.exchange.progress_bar import show_progress
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

__all__ = ["BaseDatasetExperienceReplay", "choose_sampler"]


class BaseDatasetExperienceReplay(TensorDictReplayBuffer):
    """Sample a data set, which is kept as a store.

    The first use fetches the data set and makes the store, `ROOT/ID`; later ones open it. The store is like
    any other: `expstore.open(dataset.data_path, mode="r")`, SQL, the server and exports work on it. Samples
    are TensorDicts in TorchRL's layout (TED): `("next", "observation")`, `("next", "reward")` `(n, 1)`,
    and `done`, `terminated`, `truncated` `(n, 1)` bool at the root and under "next".

    Threads: as `TensorDictReplayBuffer`. Processes: any number may use a data set at a time; one of them
    makes the store, meanwhile others get LockedError. With a prioritized sampler or a writer the store is
    opened for writing, which one process can do. Crashes: an interrupted download or import is continued by
    the next use.

    Args:
        origin: Where the data set comes from.
        batch_size: Of `sample`.
        root: Folder of the collection. None: `~/.cache/expstore/NAME`; `EXPSTORE_DATA` replaces
            `~/.cache/expstore`.
        download: Whether to fetch the data set if it is not there; "force" makes it again.
        source: File or folder that has the files of the public source; nothing is fetched then. A store that
            is there already must be made of the same files.
        split_trajs: Rows are whole trajectories: fields of shape `(n, time, ...)`, padded with zeros to the
            longest one, and `mask` `(n, time)`, which is True for steps. They are kept in a second store,
            `ROOT/ID_split`.
        sampler: Makes up batches. None: uniform.
        writer: Takes new rows. None: `ImmutableDatasetWriter`, which refuses them.
        metadata: What samples carry as `metadata`. None: nothing.
        rows: Rows to sample, in memory; nothing is fetched, read or written then. None: those of the store.
        keywords: As `TensorDictReplayBuffer`.

    Raises:
        NotFoundError: There is no such data set, or it is not there and `download` is False.
        RemoteError: The public address does not answer; the message names it.
        SchemaError: The source does not have the format of the data set.
        StateError: The folder `ROOT/ID` is there and is not a store, or was made of other files.
        LockedError: Another process makes the store.

    Example:
        >>> data = D4RLExperienceReplay("hopper-medium-v2", batch_size=256, source="hopper_medium-v2.hdf5")
        >>> data.sample()["next", "observation"].shape
        torch.Size([256, 11])
    """

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
        self._data_origin = origin
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

    @property
    def dataset_id(self) -> str:
        """Name of the data set."""
        return self._data_origin.dataset_id

    @property
    def root(self) -> Path:
        """Folder of the collection."""
        return self._collection

    @property
    def data_path_root(self) -> Path:
        """The store of the data set, a row per step."""
        return self._collection / self.dataset_id

    @property
    def data_path(self) -> Path:
        """The store that is sampled: of trajectories with `split_trajs`, else `data_path_root`."""
        return split_path(self.data_path_root) if self._is_split else self.data_path_root

    def _is_downloaded(self) -> bool:
        """Return whether the store is there."""
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

        The store has the episodes, the `meta` and, on samples, the `metadata` of this one; `meta["import"]`
        is `meta["preprocessed_from"]` there. It is written in a hidden folder next to `dest` and renamed when
        it is complete; an error or a crash leaves nothing at `dest`.

        Args:
            fn: Takes rows, batch size `[n]`, and returns as many. It works on each row by itself.
            dim: The dim that is mapped; only 0.
            num_workers: How many processes apply it. 0: this one. None: one per core.
            chunksize: How many rows a call gets. None: 4,096, or by `num_chunks`.
            num_chunks: In how many calls it is done.
            pool: Processes to use.
            generator: Seeds the processes.
            max_tasks_per_child: After how many calls a process is replaced.
            worker_threads: Threads of torch per process.
            index_with_generator: As in `TensorDict.map`: rows are looked up when a call needs them.
            pbar: Show a progress bar.
            mp_start_method: How processes are started: "fork" or "spawn".
            num_frames: Only the first rows, as many.
            dest: Folder of the new store. It may exist if it is empty.

        Returns:
            The store, for `ReplayBuffer(storage=...)`.

        Raises:
            ValueError: `dim` is not 0.
            StateError: There is something at `dest`.
            SchemaError: The function returns no TensorDict, or another number of rows.
        """
        if dim != 0:
            raise ValueError(f"dim={dim}: only the rows, dim 0, can be mapped")
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
        """Set what samples carry as `metadata`; None: nothing."""
        self._finisher.set_metadata(metadata)

    def delete(self) -> None:
        """Close the buffer and remove the data set from disk, unless its rows are in memory."""
        self.close()
        if self._is_on_disk:
            remove_dataset(self._collection, self.dataset_id)


class _FinishBatch:
    """Give batches of a data set their metadata, and batches of whole trajectories a dim for time.

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
    *,
    num_slices: int | None,
    slice_len: int | None,
    strict_length: bool,
    replacement: bool,
) -> Sampler | None:
    """Return the sampler that the arguments of a data set class ask for.

    Args:
        sampler: Given by the user; it overrules the others. None: as the others say.
        num_slices: How many slices a batch has; it or `slice_len`.
        slice_len: How many steps a slice has.
        strict_length: Whether episodes that are too short are left out.
        replacement: Whether rows, or slices, may come again before all others came.
    """
    if sampler is not None:
        return sampler
    if num_slices is not None or slice_len is not None:
        make = SliceSampler if replacement else SliceSamplerWithoutReplacement
        return make(num_slices=num_slices, slice_len=slice_len, strict_length=strict_length)
    return None if replacement else SamplerWithoutReplacement()
