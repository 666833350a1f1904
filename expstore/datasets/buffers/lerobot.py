"""LeRobot's data sets as replay buffers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, is_tensor_collection

from expstore.core.values import Key, key_name, to_key
from expstore.datasets.buffers.base import BaseDatasetExperienceReplay, choose_sampler
from expstore.datasets.buffers.episode_texts import EpisodeTexts
from expstore.datasets.download import HUGGING_FACE, RemoteFile, list_hugging_face
from expstore.datasets.lerobot import LEROBOT_KEYS, LeRobotReader, lerobot_key, map_option
from expstore.datasets.lerobot_columns import lerobot_columns_to_tensordict
from expstore.datasets.origin import Download, Origin
from expstore.errors import ArgumentError, NotFoundError, StateError
from expstore.samplers.base import Sampler
from expstore.samplers.slices import SliceSampler
from expstore.transforms.next_state import NextStateReconstructor
from expstore.writers.writers import Writer

#: Keys of the fields that delimit the episodes of rows in memory.
_EPISODE_KEYS = (("episode",), ("collector", "traj_ids"))


class LeRobotExperienceReplay(BaseDatasetExperienceReplay):
    """Sample a LeRobot data set: state, action and cameras of a robot, and the task in words.

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
        root: Folder of the collection; None for the default below `~/.cache/expstore`.
        download: Whether to fetch a missing data set; "force" fetches it again.
        batch_size: Batch size of `sample`.
        num_slices: Number of slices of episodes per batch; excludes `slice_len`.
        slice_len: Number of steps per slice; excludes `num_slices`.
        sampler: Sampler of the batches. It overrides `num_slices` and `slice_len`.
        writer: Writer for new rows; None refuses them.
        collate_fn: As in `ReplayBuffer`.
        transform: As in `ReplayBuffer`. Its input includes the texts and the values that `rehydrate` writes.
        key_map: Keys of columns instead of the default ones: `{"action": ("arm", "action")}`.
        decode_video: Whether to store the frames of videos. This needs the package av.
        rehydrate: Whether to put NaN instead of 0 after the last frame of an episode. With `from_columns`,
            whose rows have no next observations: whether to add these.
        strict_length: Whether episodes shorter than a slice are left out.
        pin_memory: As in `ReplayBuffer`.
        prefetch: As in `ReplayBuffer`.
        source: The folder with `meta` and `data`. Nothing is fetched then.
        mirror: Address to use instead of `https://huggingface.co`.

    Raises:
        ArgumentError: Both `num_slices` and `slice_len` are given.
        StateError: The store exists and was made with another `key_map` or `decode_video`.
        ModuleNotFoundError: The data set has videos, and av is not installed.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore import LeRobotExperienceReplay
        >>> data = LeRobotExperienceReplay(
        ...     "lerobot/pusht_image", slice_len=2, batch_size=32, source="pusht_image"
        ... )
        >>> data.sample().batch_size
        torch.Size([32])
    """

    def __init__(
        self,
        repo_id: str,
        *,
        root: str | Path | None = None,
        download: Download = True,
        batch_size: int | None = None,
        num_slices: int | None = None,
        slice_len: int | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        transform: Any = None,
        key_map: Mapping[str, str | Key] | None = None,
        decode_video: bool = True,
        rehydrate: bool = False,
        strict_length: bool = True,
        pin_memory: bool = False,
        prefetch: int | None = None,
        source: str | Path | None = None,
        mirror: str = HUGGING_FACE,
        _data: TensorDict | None = None,
    ) -> None:
        if num_slices is not None and slice_len is not None:
            raise ArgumentError("num_slices or slice_len can be passed, but not both.")
        self.repo_id = repo_id
        self.key_map = key_map
        self.num_slices = num_slices
        self.slice_len = slice_len
        self.strict_length = strict_length
        if _data is None:
            sampler = choose_sampler(
                sampler,
                num_slices=num_slices,
                slice_len=slice_len,
                strict_length=strict_length,
                replacement=True,
            )
        else:
            sampler = self._sampler_of(_data, sampler, rehydrate)
        super().__init__(
            Origin(
                name="lerobot",
                dataset_id=repo_id,
                make_reader=partial(LeRobotReader, key_map=key_map, decode_video=decode_video),
                list_files=partial(_list_files, repo_id, mirror, decode_video),
            ),
            batch_size,
            root=root,
            download=download,
            source=source,
            sampler=sampler,
            writer=writer,
            rows=_data,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
        )
        if _data is None:
            self._check_options(decode_video)
            self._append_texts()
        if rehydrate:
            self._rehydrate()
        if transform is not None:
            self.append_transform(transform)

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
            >>> from expstore import LeRobotExperienceReplay
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

    def _check_options(self, decode_video: bool) -> None:
        """Raise StateError if the store was made with other options."""
        if "lerobot" not in self.meta:
            self.close()
            raise StateError(
                f"{self.data_path} was not made of a LeRobot data set", hint="choose another root="
            )
        options = self.meta["import"]["options"]
        left_out = set(self.meta["lerobot"]["left_out"])
        features = self.meta["lerobot"]["features"]
        videos = sorted(name for name in left_out if features.get(name, {}).get("dtype") == "video")
        if options["key_map"] != map_option(self.key_map):
            found = f"key_map={options['key_map']}"
        elif decode_video and videos:
            found = "decode_video=False"
        elif not decode_video and options["videos"]:
            found = "decode_video=True"
        else:
            return
        self.close()
        raise StateError(
            f"{self.data_path} was made with {found}",
            hint='pass the same options, another root=, or download="force" to make it again',
        )

    def _append_texts(self) -> None:
        """Append a transform that adds task descriptions and text columns to samples."""
        meta = self.meta["lerobot"]
        keys = {**LEROBOT_KEYS, **(self.key_map or {})}
        episode, frame, number, task = (
            to_key(lerobot_key(name, keys)) for name in ("episode_index", "frame_index", "task_index", "task")
        )
        if names := meta["texts"]:
            rows = self.sql("SELECT info FROM episodes").fetchall()
            facts = [json.loads(info) for (info,) in rows]
            known = {said["episode_index"]: said for said in facts}
            self.append_transform(EpisodeTexts(known, names, episode, frame))
        if meta["tasks"] and key_name(task) not in names:
            self.append_transform(_Instructions(meta["tasks"], number, task))

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


def _list_files(repo_id: str, mirror: str, decode_video: bool) -> list[RemoteFile]:
    """Return the repository's files that the reader uses."""
    folders = ("meta/", "data/", "videos/") if decode_video else ("meta/", "data/")
    found = [file for file in list_hugging_face(repo_id, endpoint=mirror) if file.name.startswith(folders)]
    if not found:
        raise NotFoundError(f"{mirror}/datasets/{repo_id} is not a LeRobot data set: it has no folder meta")
    return found
