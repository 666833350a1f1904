"""D4RL's data sets as replay buffers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from expstore.core.nearest import suggest
from expstore.core.torchrl_keywords import keywords_of
from expstore.core.values import Array
from expstore.datasets.buffers.base import BaseDatasetExperienceReplay
from expstore.datasets.d4rl import D4RLReader
from expstore.datasets.d4rl_files import D4RL_ADDRESS, d4rl_files, score_bounds
from expstore.datasets.download import RemoteFile
from expstore.datasets.origin import Download, Origin
from expstore.datasets.registry import UnknownDatasetError
from expstore.errors import ArgumentError, StateError
from expstore.samplers.base import Sampler
from expstore.writers.writers import Writer


class D4RLExperienceReplay(BaseDatasetExperienceReplay):
    """Sample one of D4RL's data sets.

    Unlike in TorchRL's class, the last row of a file is kept; `("next", "observation")` of the last step of
    an episode is the true one if the file has it; the flags at the root are False; an episode ends where the
    next row does not continue it; kitchen and antmaze, whose flags are floats, can be read. Only D4RL's files
    are read: `from_env` and `direct_download=False`, which need the package d4rl, are refused.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: One of `available_datasets`.
        batch_size: Batch size of `sample`.
        sampler: Sampler of the batches; None for uniform sampling.
        writer: Writer for new rows; None refuses them.
        collate_fn: As in `ReplayBuffer`.
        pin_memory: As in `ReplayBuffer`.
        prefetch: As in `ReplayBuffer`.
        transform: As in `ReplayBuffer`.
        split_trajs: Whether a row is a whole trajectory, padded with zeros and with a `mask`.
        from_env: Must be False.
        use_truncated_as_done: Whether `("next", "done")` is also set where an episode is truncated.
        direct_download: Must be None or True.
        terminate_on_end: Must be None or True.
        download: Whether to fetch a missing data set; "force" fetches it again.
        root: Folder of the collection; None for the default below `~/.cache/expstore`.
        source: The HDF5 file. Nothing is fetched then.
        mirror: Address to use instead of `http://rail.eecs.berkeley.edu/datasets/offline_rl`.
        env_kwargs: Not supported.

    Raises:
        UnknownDatasetError: The data set does not exist; a KeyError, as in TorchRL.
        StateError: `env_kwargs` are given.
        ArgumentError: `from_env` is True, or `direct_download` or `terminate_on_end` False.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore import D4RLExperienceReplay
        >>> data = D4RLExperienceReplay("hopper-medium-v2", batch_size=32, source="hopper_medium-v2.hdf5")
        >>> data.sample().batch_size
        torch.Size([32])
    """

    available_datasets: ClassVar[list[str]] = list(d4rl_files())

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        split_trajs: bool = False,
        from_env: bool = False,
        use_truncated_as_done: bool = True,
        direct_download: bool | None = None,
        terminate_on_end: bool | None = None,
        download: Download = True,
        root: str | Path | None = None,
        *,
        source: str | Path | None = None,
        mirror: str = D4RL_ADDRESS,
        **env_kwargs: Any,
    ) -> None:
        if env_kwargs:
            raise StateError(
                f"Cannot pass env_kwargs when `direct_download=True`. Got env_kwargs keys: {[*env_kwargs]}",
                hint=suggest(next(iter(env_kwargs)), keywords_of(type(self)), "the arguments are"),
            )
        if from_env or direct_download is False:
            raise ArgumentError(
                "data sets are read from D4RL's files: leave out from_env and direct_download"
            )
        if terminate_on_end is False:
            raise ArgumentError("terminate_on_end=False needs the package d4rl, which is not used")
        if dataset_id not in d4rl_files():
            raise UnknownDatasetError.of(type(self), dataset_id, f"Env {dataset_id} not found")
        super().__init__(
            Origin(
                name="d4rl",
                dataset_id=dataset_id,
                make_reader=partial(D4RLReader, split_on=_split_on(dataset_id)),
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
        if not use_truncated_as_done:
            self._batches.add_finisher(_take_terminated_as_done)
        #: Metadata of the file, for instance the algorithm and its iteration.
        self.metadata: dict[str, Any] = dict(self.meta.get("d4rl", {}))

    def normalized_score(self, returns: float | Array) -> Any:
        """Return D4RL's normalized score of returns: 0 for a random policy, 1 for an expert.

        Args:
            returns: Returns of episodes, any shape.

        Raises:
            StateError: D4RL has no reference returns for this data set.
        """
        bounds = score_bounds(self.dataset_id)
        if bounds is None:
            raise StateError(f"D4RL has no reference returns for {self.dataset_id}")
        low, high = bounds
        return (np.asarray(returns, np.float64) - low) / (high - low)


def _take_terminated_as_done(batch: Any) -> Any:
    """Return a batch in which steps are done only if they are terminated."""
    batch["next", "done"] = batch["next", "terminated"].clone()
    return batch


def _split_on(dataset_id: str) -> Any:
    """Return the flags that end an episode: in antmaze and maze2d reaching the goal does not."""
    return ("timeouts",) if dataset_id.startswith(("antmaze", "maze2d", "bullet-maze2d")) else None


def _list_files(dataset_id: str, mirror: str) -> list[RemoteFile]:
    path = d4rl_files()[dataset_id]
    return [RemoteFile(url=f"{mirror.rstrip('/')}/{path}", name=path.rpartition("/")[2])]
