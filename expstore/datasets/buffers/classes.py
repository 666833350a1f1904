"""The data set classes with TorchRL's names: buffers over data sets of a kind, with TorchRL's arguments.

Used through `expstore.datasets`. What the classes have in common is `DatasetReplayBuffer`; what is known
about the data sets is the `Kind` of each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection

from expstore.core.nearest import suggest
from expstore.core.torchrl_keywords import keywords_of
from expstore.core.values import Array, Key, key_name, to_key
from expstore.datasets.buffers.base import DatasetReplayBuffer, choose_sampler
from expstore.datasets.buffers.episode_texts import EpisodeTexts
from expstore.datasets.d4rl_files import score_bounds
from expstore.datasets.kind import Kind
from expstore.datasets.kinds import (
    atari_dqn,
    d4rl,
    gen_dgrl,
    lerobot,
    minari,
    openml,
    openx,
    rlds,
    roboset,
    vd4rl,
)
from expstore.datasets.lerobot_columns import lerobot_columns_to_tensordict
from expstore.datasets.origin import Download
from expstore.datasets.steps import LastStep
from expstore.disk.files import ReadingDisk
from expstore.disk.local_path import local_path
from expstore.errors import ArgumentError, StateError
from expstore.exchange.lerobot_format import LEROBOT_KEYS, lerobot_key
from expstore.samplers.base import Sampler
from expstore.samplers.slices import SliceSampler
from expstore.samplers.without_replacement import SamplerWithoutReplacement
from expstore.specs.base import TensorSpec
from expstore.specs.bounded import Bounded, Unbounded
from expstore.specs.categorical import Categorical
from expstore.specs.composite import Composite
from expstore.transforms.next_state import NextStateReconstructor
from expstore.writers.writers import Writer

#: Keys of the fields that delimit the episodes of rows in memory.
_EPISODE_KEYS = (("episode",), ("collector", "traj_ids"))
_PIXELS: tuple[tuple[str, ...], ...] = (("pixels",), ("next", "pixels"))


class AtariDQNExperienceReplay(DatasetReplayBuffer):
    """Sample the 50 million steps that one of five DQN agents took in an Atari game, frame by frame.

    The public bucket of this data set no longer exists: a default call opens the store if it exists, or
    raises NotFoundError. Pass the folder of a run, or a folder of runs, as `source=`, or the address of a
    copy as `mirror=`.

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
        num_procs: Ignored; accepted for compatibility with TorchRL. Reading and writing use one thread each.
        num_slices: Number of slices of episodes per batch; excludes `slice_len`.
        slice_len: Number of steps per slice; excludes `num_slices`.
        strict_len: Whether episodes that are too short for a slice are left out.
        replacement: Whether to sample rows, or slices, with replacement.
        mp_start_method: Ignored, like `num_procs`.
        source: Folder of a run, with `$store$_observation_ckpt.0.gz` and so on, there or in `replay_logs`;
            or a folder that has it below the id, as `Pong/5`.
        strict_length: The same as `strict_len`: the name in TorchRL's documentation.
        checkpoints: Numbers of the checkpoints to read. None reads all; then none may be missing in the
            middle of the run.
        keywords: Arguments of `DatasetReplayBuffer`: `root`, `download`, `source`, `mirror`, `sampler`,
            `writer`, `transform` and so on.

    Attributes:
        available_datasets: All ids.

    Raises:
        UnknownDatasetError: The data set does not exist; an ArgumentError.
        NotFoundError: There are no files: neither `source` nor `mirror` is given.
        StateError: The store was made from other checkpoints.
        SchemaError: The path of the source names another game or run.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore.datasets import AtariDQNExperienceReplay, make_sample
        >>> source = make_sample("atari", "Pong/5")
        >>> data = AtariDQNExperienceReplay("Pong/5", batch_size=32, source=source)
        >>> data.sample().batch_size
        torch.Size([32])
    """

    kind = atari_dqn.KIND
    #: Number of checkpoints to read, from the first one on; None for all 50.
    _max_runs: int | None = None

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        sampler: Sampler | None = None,
        num_procs: int = 0,
        num_slices: int | None = None,
        slice_len: int | None = None,
        strict_len: bool = True,
        replacement: bool = True,
        mp_start_method: str = "fork",
        strict_length: bool | None = None,
        checkpoints: Sequence[int] | None = None,
        **keywords: Any,
    ) -> None:
        if strict_length is not None and not strict_len:
            raise ArgumentError("strict_len and strict_length mean the same; pass one of them")
        options: dict[str, Any] = {"runs": self._max_runs}
        if checkpoints is not None:
            options["checkpoints"] = sorted(set(checkpoints))
        strict = strict_len if strict_length is None else strict_length
        sampler = choose_sampler(sampler, num_slices, slice_len, strict, replacement)
        super().__init__(dataset_id, batch_size, options=options, sampler=sampler, **keywords)
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


class D4RLExperienceReplay(DatasetReplayBuffer):
    """Sample one of D4RL's data sets.

    A default call downloads the .hdf5 file from `http://rail.eecs.berkeley.edu/datasets/offline_rl`.

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
        >>> from expstore.datasets import D4RLExperienceReplay, make_sample
        >>> source = make_sample("d4rl", "hopper_medium-v2.hdf5")
        >>> data = D4RLExperienceReplay("hopper-medium-v2", batch_size=32, source=source)
        >>> data.sample().batch_size
        torch.Size([32])
    """

    kind = d4rl.KIND

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
        mirror: str | None = None,
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
        super().__init__(
            dataset_id,
            batch_size,
            root=root,
            download=download,
            source=source,
            mirror=mirror,
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


class GenDGRLExperienceReplay(DatasetReplayBuffer):
    """Sample one of Gen-DGRL's data sets: Procgen games, by level and skill.

    A default call downloads the .tar.xz archive from `https://dl.fbaipublicfiles.com/DGRL`.

    Unlike in TorchRL's class, the files, which are pickles, are read without running code; the trajectory
    that reaches the category's number of rows is kept whole; a trajectory without `dones` at its end is cut
    instead of running into the next one; rewards have the shape `(n, 1)`; new rows are refused unless a
    writer is given.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: One of `available_datasets`: game and category, for instance "bigfish-1M_E".
        batch_size: Batch size of `sample`.
        keywords: Arguments of `DatasetReplayBuffer`: `root`, `download`, `source`, `mirror`, `sampler`,
            `writer`, `transform` and so on.

    Raises:
        UnknownDatasetError: The data set does not exist; an ArgumentError.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore.datasets import GenDGRLExperienceReplay, make_sample
        >>> source = make_sample("gen_dgrl", "bigfish.tar")
        >>> data = GenDGRLExperienceReplay("bigfish-1M_E", batch_size=32, source=source)
        >>> data.sample().batch_size
        torch.Size([32])
    """

    kind = gen_dgrl.KIND


class LeRobotExperienceReplay(DatasetReplayBuffer):
    """Sample a LeRobot data set: state, action and cameras of a robot, and the task in words.

    A default call downloads the files of the repository from `https://huggingface.co`.

    Unlike in TorchRL's class:

    - The store has rows in TorchRL's layout (TED): `("next", "observation")`, which is 0 after the last frame
      of an episode, and the flags at the root and under "next". `next.done` of the files is
      `("next", "terminal")`.
    - Videos are decoded with av when the store is made, not with every sample; `from_columns` refuses
      references to videos.
    - Images are uint8 `(channels, height, width)`. The store keeps texts as annotations of episodes; samples
      have them by row, the task as `language_instruction`.
    - float64 columns stay float64; `index` is the number of the row in the store.
    - Slices follow the store's episodes, independently of `key_map`.
    - `rehydrate=True` changes only the value after the last frame of an episode: NaN instead of 0 for
      floats. Every row has its next frame, also at the end of a slice.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        repo_id: Repository on the Hugging Face Hub: "lerobot/pusht". The store is
            `ROOT/lerobot/pusht`, not `ROOT/lerobot_pusht` as in TorchRL.
        batch_size: Batch size of `sample`.
        num_slices: Number of slices of episodes per batch; excludes `slice_len`.
        slice_len: Number of steps per slice; excludes `num_slices`.
        sampler: Sampler of the batches. It overrides `num_slices` and `slice_len`.
        transform: As in `ReplayBuffer`. Its input includes the texts and the values that `rehydrate` writes.
        key_map: Keys of columns instead of the default ones: `{"action": ("arm", "action")}`.
        decode_video: Whether to store the frames of videos. This needs the package av.
        rehydrate: Whether to put NaN instead of 0 after the last frame of an episode. With `from_columns`,
            whose rows have no next observations: whether to add these.
        strict_length: Whether episodes shorter than a slice are left out.
        keywords: Arguments of `DatasetReplayBuffer`: `root`, `download`, `source`, `mirror`, `sampler`,
            `writer`, `transform` and so on.

    Raises:
        ArgumentError: Both `num_slices` and `slice_len` are given.
        StateError: The store exists and was made with another `key_map` or `decode_video`.
        MissingExtraError: The data set has videos, and av is not installed.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore.datasets import LeRobotExperienceReplay, make_sample
        >>> source = make_sample("lerobot", "pusht_image")
        >>> data = LeRobotExperienceReplay("lerobot/pusht_image", slice_len=2, batch_size=32, source=source)
        >>> data.sample().batch_size
        torch.Size([32])
    """

    kind = lerobot.KIND

    def __init__(
        self,
        repo_id: str,
        *,
        num_slices: int | None = None,
        slice_len: int | None = None,
        sampler: Sampler | None = None,
        key_map: Mapping[str, str | Key] | None = None,
        decode_video: bool = True,
        rehydrate: bool = False,
        strict_length: bool = True,
        _data: TensorDict | None = None,
        **keywords: Any,
    ) -> None:
        if num_slices is not None and slice_len is not None:
            raise ArgumentError("num_slices or slice_len can be passed, but not both.")
        self.repo_id = repo_id
        self.key_map = key_map
        self.num_slices = num_slices
        self.slice_len = slice_len
        self.strict_length = strict_length
        if _data is None:
            sampler = choose_sampler(sampler, num_slices, slice_len, strict_length, replacement=True)
        else:
            sampler = self._sampler_of(_data, sampler, rehydrate)
        keys = {name: to_key(key) for name, key in (key_map or {}).items()}
        options = {"key_map": keys, "decode_video": decode_video}
        super().__init__(repo_id, options=options, sampler=sampler, rows=_data, **keywords)
        if rehydrate:
            self._rehydrate()

    @classmethod
    def from_columns(
        cls,
        columns: Mapping[str, Any],
        *,
        repo_id: str = "local",
        key_map: Mapping[str, str | Key] | None = None,
        **kwargs: Any,
    ) -> LeRobotExperienceReplay:
        """Return a buffer over columns in memory, with the rows of `lerobot_columns_to_tensordict`.

        Nothing is written to disk. The rows have no next observations unless `rehydrate=True` adds them to
        samples.

        Args:
            columns: Columns by the names of a LeRobot data set: tensors, lists of numbers or texts.
            repo_id: Any name.
            key_map: Keys of columns instead of the default ones.
            kwargs: Other arguments of the class.

        Raises:
            ArgumentError: A column cannot be used, or `rehydrate=True` is given and the rows have no episode
                key.

        Example:
            >>> from expstore.datasets import LeRobotExperienceReplay
            >>> columns = {
            ...     "observation.state": torch.zeros(8, 7),
            ...     "action": torch.zeros(8, 7),
            ...     "episode_index": torch.arange(2).repeat_interleave(4),
            ...     "task": ["pick"] * 8,
            ... }
            >>> rb = LeRobotExperienceReplay.from_columns(columns, slice_len=4, batch_size=8)
            >>> rb.sample()["action"].shape
            torch.Size([8, 7])
        """
        if references := [name for name, value in columns.items() if is_tensor_collection(value)]:
            kind = type(columns[references[0]]).__name__
            raise ArgumentError(
                f"column {references[0]!r} is a {kind}, but rows need tensors or texts: decode it, or "
                "pass the folder of the data set as source="
            )
        data = lerobot_columns_to_tensordict(columns, key_map=key_map)
        return cls(repo_id, download=False, _data=data, key_map=key_map, **kwargs)

    def _sampler_of(self, data: TensorDict, sampler: Sampler | None, rehydrate: bool) -> Sampler | None:
        """Return the sampler of rows in memory, whose episodes are delimited by a field."""
        key = to_key(lerobot_key("episode_index", {**LEROBOT_KEYS, **(self.key_map or {})}))
        if rehydrate and (key not in _EPISODE_KEYS or key not in map(to_key, data.keys(True, True))):
            raise ArgumentError(
                "rehydrate=True requires the episode entry of every row, 'episode' or ('collector', "
                "'traj_ids'), to delimit trajectories, but it is not present in the dataset."
            )
        if sampler is None and (self.num_slices is not None or self.slice_len is not None):
            return SliceSampler(
                num_slices=self.num_slices,
                slice_len=self.slice_len,
                traj_key=key if len(key) > 1 else key[0],
                strict_length=self.strict_length,
            )
        return sampler

    def _make_texts(self, kind: Kind) -> list[Callable[[TensorDictBase], TensorDictBase]]:
        """Return the transforms that add task descriptions and text columns to samples."""
        meta = self.meta[kind.facts]
        found: list[Callable[[TensorDictBase], TensorDictBase]] = []
        keys = {**LEROBOT_KEYS, **(self.key_map or {})}
        episode, frame, number, task = (
            to_key(lerobot_key(name, keys)) for name in ("episode_index", "frame_index", "task_index", "task")
        )
        if names := meta["texts"]:
            rows = self.sql("SELECT info FROM episodes").fetchall()
            facts = [json.loads(info) for (info,) in rows]
            known = {said["episode_index"]: said for said in facts}
            found.append(EpisodeTexts(known, names, episode, frame))
        if meta["tasks"] and key_name(task) not in names:
            found.append(_Instructions(meta["tasks"], number, task))
        return found

    def _rehydrate(self) -> None:
        first = self[0] if len(self) else TensorDict({}, [])
        kinds: dict[bool, list[str | Key]] = {True: [], False: []}
        for key, value in first.items(include_nested=True, leaves_only=True):
            if to_key(key)[0] == "observation" and isinstance(value, torch.Tensor):
                kinds[value.is_floating_point()].append(key)
        for is_float, keys in kinds.items():
            if keys:
                fill = float("nan") if is_float else 0
                self.append_transform(NextStateReconstructor(keys, fill_value=fill))


class _Instructions:
    """Add the description of each row's task to a batch.

    Args:
        texts: The descriptions, by the task's number as a string.
        source: Key of the task number.
        target: Key of the description.
    """

    def __init__(self, texts: Mapping[str, str], source: Key, target: Key) -> None:
        self._texts = {int(number): text for number, text in texts.items()}
        self._source, self._target = source, target

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        numbers = batch.get(self._source, None)
        if numbers is None:
            return batch
        if numbers.ndim:
            found: Any = NonTensorStack.from_list([self._texts[number] for number in numbers.tolist()])
        else:
            found = NonTensorData(self._texts[int(numbers)])
        return batch.set(self._target, found)


class MinariExperienceReplay(DatasetReplayBuffer):
    """Sample one of Minari's data sets.

    A default call downloads the files from `https://huggingface.co/farama-minari`.

    Samples have `episode`, Minari's number of the episode. `metadata` of the buffer has Minari's metadata of
    the data set, with spaces as specs.

    Unlike in TorchRL's class, texts are left out; an info that some episodes lack is left out; the data set
    is read one episode at a time; the library minari is not needed for HDF5; a data set of
    `~/.minari/datasets` becomes a store once, not at each use.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: The id, for instance "D4RL/pen/human-v2".
        batch_size: Batch size of `sample`.
        load_from_local_minari: Whether to read the data set from Minari's own folder, `$MINARI_DATASETS_PATH`
            or `~/.minari/datasets`, as with `source=`.
        keywords: Arguments of `DatasetReplayBuffer`: `root`, `download`, `source`, `mirror`, `sampler`,
            `writer`, `transform` and so on.

    Attributes:
        available_datasets: The ids of the public data sets, fetched over the network.

    Raises:
        FileNotFoundError: `load_from_local_minari` is set, and Minari's folder does not have the data set.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore.datasets import MinariExperienceReplay, make_sample
        >>> source = make_sample("minari", "pen/human-v2")
        >>> data = MinariExperienceReplay("D4RL/pen/human-v2", batch_size=32, source=source)
        >>> data.sample().batch_size
        torch.Size([32])
    """

    kind = minari.KIND

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        load_from_local_minari: bool = False,
        source: str | Path | None = None,
        **keywords: Any,
    ) -> None:
        if load_from_local_minari:
            if source is not None:
                raise ArgumentError("load_from_local_minari and source exclude each other; pass one of them")
            source = _local_folder(dataset_id)
        super().__init__(dataset_id, batch_size, source=source, **keywords)
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


class OpenMLExperienceReplay(DatasetReplayBuffer):
    """Sample one of OpenML's classification data sets, for bandits: `X` `(n, features)` and `y` `(n,)`.

    A default call downloads the ARFF file from `https://www.openml.org`.

    Unlike in TorchRL's class, `download=False` never fetches, and new rows are refused unless a writer
    is given.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        name: One of `available_datasets`.
        batch_size: Batch size of `sample`.
        root: Folder of the collection; None for the default below `~/.cache/expstore`.
        sampler: Sampler of the batches; None for `SamplerWithoutReplacement`.
        writer: Writer for new rows; None refuses them.
        collate_fn: As in `ReplayBuffer`.
        pin_memory: As in `ReplayBuffer`.
        prefetch: As in `ReplayBuffer`.
        transform: As in `ReplayBuffer`.
        download: Whether to fetch a missing data set; "force" fetches it again.
        source: An ARFF or a CSV file. Nothing is fetched then.
        mirror: Address to use instead of `https://www.openml.org`.

    Attributes:
        max_outcome_val: The largest class.

    Raises:
        UnknownDatasetError: The data set does not exist; a RuntimeError, as in TorchRL.
        MissingExtraError: scikit-learn or pandas is not installed, and the store does not exist yet.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore.datasets import OpenMLExperienceReplay, make_sample
        >>> source = make_sample("openml", "shuttle.arff")
        >>> data = OpenMLExperienceReplay("shuttle", batch_size=32, source=source)
        >>> data.sample().batch_size
        torch.Size([32])
    """

    kind = openml.KIND

    def __init__(
        self,
        name: str,
        batch_size: int | None = None,
        root: str | Path | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        *,
        download: Download = True,
        source: str | Path | None = None,
        mirror: str | None = None,
    ) -> None:
        super().__init__(
            name,
            batch_size,
            root=root,
            download=download,
            source=source,
            mirror=mirror,
            sampler=SamplerWithoutReplacement() if sampler is None else sampler,
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
            transform=transform,
        )
        self.max_outcome_val: int = self.sql('SELECT max("y") FROM transitions').fetchall()[0][0]


class OpenXExperienceReplay(DatasetReplayBuffer):
    """Sample one of Open X-Embodiment's data sets: robots recorded by cameras.

    A default call downloads the archives from `https://huggingface.co/datasets/jxu124/OpenX-Embodiment`.

    Unlike in TorchRL's class, a data set is always kept as a store, so `streaming=True` and `pad`, which
    belongs to it, are refused. The files, which are pickles, are read without running code; the libraries
    datasets and torchvision are not needed; all images of an observation are decoded, not only the one called
    `image`; the store keeps texts as annotations of episodes, and samples have them by row.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: One of `available_datasets`.
        batch_size: Batch size of `sample`.
        shuffle: Whether to sample slices in random order; False requires `replacement=False`.
        num_slices: Number of slices of episodes per batch; excludes `slice_len`.
        slice_len: Number of steps per slice; excludes `num_slices`.
        pad: Not supported.
        replacement: Whether to sample slices with replacement. None: True.
        streaming: Must be None or False.
        download: Whether to fetch a missing data set; "force" fetches it again. None: True.
        sampler: Sampler of the batches. It excludes `num_slices` and `slice_len`.
        split_trajs: Must be False.
        strict_length: Whether to leave out episodes that are too short for a slice.
        trust_pickle: Whether to unpickle files that name other classes than NumPy's; see `OpenXReader`.
        keywords: Arguments of `DatasetReplayBuffer`: `root`, `download`, `source`, `mirror`, `sampler`,
            `writer`, `transform` and so on.

    Raises:
        UnknownDatasetError: The data set does not exist; an ArgumentError.
        ArgumentError: `streaming` is True, or arguments exclude each other.
        RuntimeError: `pad` is given, or `shuffle` is False with replacement.
        NotImplementedError: `split_trajs` is True.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore.datasets import OpenXExperienceReplay, make_sample
        >>> source = make_sample("openx", "cmu_stretch")
        >>> data = OpenXExperienceReplay("cmu_stretch", slice_len=2, batch_size=32, source=source)
        >>> data.sample().batch_size
        torch.Size([32])
    """

    kind = openx.KIND

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        num_slices: int | None = None,
        slice_len: int | None = None,
        pad: float | bool | None = None,
        replacement: bool | None = None,
        streaming: bool | None = None,
        download: Download | None = None,
        sampler: Sampler | None = None,
        split_trajs: bool = False,
        strict_length: bool = True,
        trust_pickle: bool = False,
        **keywords: Any,
    ) -> None:
        has_slices = num_slices is not None or slice_len is not None
        if num_slices is not None and slice_len is not None:
            raise ArgumentError("num_slices or slice_len can be not None, but not both.")
        if split_trajs:
            raise NotImplementedError("trajectories of Open X-Embodiment cannot be split into rows")
        if streaming:
            raise ArgumentError(
                "streaming=True is not supported: data sets are kept as stores. Leave it out to fetch the "
                "data set once"
            )
        if pad is not None:
            raise RuntimeError("the `pad` argument is to be used only with streaming datasets.")
        if has_slices and sampler is not None:
            raise ArgumentError("`num_slices` and `slice_len` are exclusive with the `sampler` argument.")
        replacement = True if replacement is None else replacement
        if has_slices and replacement and not shuffle:
            raise RuntimeError("shuffle=False can only be used when replacement=False.")
        if has_slices:
            sampler = choose_sampler(None, num_slices, slice_len, strict_length, replacement, shuffle)
        super().__init__(
            dataset_id,
            batch_size,
            options={"trust_pickle": trust_pickle},
            download=True if download is None else download,
            sampler=sampler,
            **keywords,
        )


class RLDSExperienceReplay(DatasetReplayBuffer):
    """Sample a data set in RLDS's format, as TensorFlow Datasets writes it. TensorFlow is not needed.

    A default call downloads the shards from `https://storage.googleapis.com/gresearch/robotics`.

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
        sampler: Sampler of the batches. It overrides `num_slices`, `slice_len` and `replacement`.
        strict_length: Whether to leave out episodes that are shorter than a slice.
        keywords: Arguments of `DatasetReplayBuffer`: `root`, `download`, `source`, `mirror`, `sampler`,
            `writer`, `transform` and so on.

    Raises:
        ArgumentError: Both `num_slices` and `slice_len` are given, or one of them with `split_trajs`.
        StateError: The store exists and was made with another `split` or `last_step`.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore.datasets import RLDSExperienceReplay, make_sample
        >>> source = make_sample("rlds", "cmu_play_fusion/0.1.0")
        >>> data = RLDSExperienceReplay("cmu_play_fusion/0.1.0", batch_size=32, source=source)
        >>> data.sample().batch_size
        torch.Size([32])
    """

    kind = rlds.KIND

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
        sampler: Sampler | None = None,
        split_trajs: bool = False,
        strict_length: bool = True,
        **keywords: Any,
    ) -> None:
        if num_slices is not None and slice_len is not None:
            raise ArgumentError("num_slices or slice_len can be passed, but not both.")
        if split_trajs and (num_slices is not None or slice_len is not None):
            raise ArgumentError(
                "rows of split_trajs=True are whole episodes: leave out num_slices and slice_len"
            )
        sampler = choose_sampler(sampler, num_slices, slice_len, strict_length, replacement)
        super().__init__(
            dataset_id,
            batch_size,
            options={"split": split, "last_step": last_step},
            sampler=sampler,
            split_trajs=split_trajs,
            **keywords,
        )


class RobosetExperienceReplay(DatasetReplayBuffer):
    """Sample one of RoboSet's simulated data sets: demonstrations with a robot hand or in a kitchen.

    A default call downloads .h5 files from `https://huggingface.co/datasets/jdvakil/RoboSet_Sim`.

    Unlike in TorchRL's class, the flags at the root are False, and a trial that does not end with `done` is
    cut instead of running into the next one.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: One of `available_datasets`.
        batch_size: Batch size of `sample`.
        keywords: Arguments of `DatasetReplayBuffer`: `root`, `download`, `source`, `mirror`, `sampler`,
            `writer`, `transform` and so on.

    Raises:
        UnknownDatasetError: The data set does not exist; an ArgumentError.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore.datasets import RobosetExperienceReplay, make_sample
        >>> source = make_sample("roboset", "door_v2d-v1.h5")
        >>> data = RobosetExperienceReplay("DAPG(expert)/door_v2d-v1", batch_size=32, source=source)
        >>> data.sample().batch_size
        torch.Size([32])
    """

    kind = roboset.KIND


class VD4RLExperienceReplay(DatasetReplayBuffer):
    """Sample one of V-D4RL's data sets: images of control tasks.

    A default call downloads the files from `https://huggingface.co/datasets/conglu/vd4rl`.

    Unlike in TorchRL's class, a row has the action and the reward of the step from its image to the next one.
    (In the files they are in the row of the image after the step, and TorchRL does not move them.) So an
    episode has one row less, its last step has its true next image, and `("next", "pixels")` never belongs to
    another episode. Images are stored in packed columns.

    For threads, processes and crashes see `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: One of `available_datasets`.
        batch_size: Batch size of `sample`.
        totensor: Whether to return images as float32 between 0 and 1, shape `(n, 3, height, width)`. False
            returns them as in the files, uint8.
        image_size: Height and width to resize images to, or one number for a square. None keeps their size.
        num_workers: Ignored; accepted for compatibility with TorchRL. Files are fetched one after another.
        keywords: Arguments of `DatasetReplayBuffer`: `root`, `download`, `source`, `mirror`, `sampler`,
            `writer`, `transform` and so on.

    Raises:
        UnknownDatasetError: The data set does not exist; an ArgumentError.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore.datasets import VD4RLExperienceReplay, make_sample
        >>> source = make_sample("vd4rl", "walker_walk/random/64px")
        >>> data = VD4RLExperienceReplay("main/walker_walk/random/64px", batch_size=32, source=source)
        >>> data.sample().batch_size
        torch.Size([32])
    """

    kind = vd4rl.KIND

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        totensor: bool = True,
        image_size: int | Sequence[int] | None = None,
        num_workers: int = 0,
        **keywords: Any,
    ) -> None:
        size = _size(image_size)
        super().__init__(dataset_id, batch_size, **keywords)
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
