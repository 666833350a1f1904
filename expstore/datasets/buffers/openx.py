"""Open X-Embodiment's data sets as replay buffers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from expstore.datasets.buffers.base import BaseDatasetExperienceReplay, choose_sampler
from expstore.datasets.buffers.episode_texts import EpisodeTexts
from expstore.datasets.download import HUGGING_FACE, RemoteFile, list_hugging_face
from expstore.datasets.openx import OpenXReader
from expstore.datasets.origin import Download, Origin
from expstore.datasets.registry import UnknownDatasetError
from expstore.errors import ArgumentError, NotFoundError
from expstore.samplers.base import Sampler
from expstore.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from expstore.writers.writers import Writer

_REPOSITORY = "jxu124/OpenX-Embodiment"
_CONVERTED = "_converted_externally_to_rlds"


class OpenXExperienceReplay(BaseDatasetExperienceReplay):
    """Sample one of Open X-Embodiment's data sets: robots recorded by cameras.

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
        root: Folder of the collection; None for the default below `~/.cache/expstore`.
        download: Whether to fetch a missing data set; "force" fetches it again. None: True.
        sampler: Sampler of the batches. It excludes `num_slices` and `slice_len`.
        writer: Writer for new rows; None refuses them.
        collate_fn: As in `ReplayBuffer`.
        pin_memory: As in `ReplayBuffer`.
        prefetch: As in `ReplayBuffer`.
        transform: As in `ReplayBuffer`. Its input includes the texts.
        split_trajs: Must be False.
        strict_length: Whether to leave out episodes that are too short for a slice.
        source: A .tar archive or a folder of them. Nothing is fetched then.
        mirror: Address to use instead of `https://huggingface.co`.
        trust_pickle: Whether to unpickle files that name other classes than NumPy's; see `OpenXReader`.

    Raises:
        UnknownDatasetError: The data set does not exist; an ArgumentError.
        ArgumentError: `streaming` is True, or arguments exclude each other.
        RuntimeError: `pad` is given, or `shuffle` is False with replacement.
        NotImplementedError: `split_trajs` is True.
        ExpStoreError: The errors of `BaseDatasetExperienceReplay`.

    Example:
        >>> from expstore import OpenXExperienceReplay
        >>> data = OpenXExperienceReplay("cmu_stretch", slice_len=2, batch_size=32, source="cmu_stretch")
        >>> data.sample().batch_size
        torch.Size([32])
    """

    available_datasets: ClassVar[list[str]] = [
        *("fractal20220817_data", "kuka", "bridge", "taco_play", "jaco_play", "berkeley_cable_routing"),
        *("roboturk", "nyu_door_opening_surprising_effectiveness", "viola", "berkeley_autolab_ur5", "toto"),
        *("language_table", "columbia_cairlab_pusht_real"),
        *(
            name + _CONVERTED
            for name in (
                *("stanford_kuka_multimodal_dataset", "nyu_rot_dataset", "stanford_hydra_dataset"),
                *("austin_buds_dataset", "nyu_franka_play_dataset", "maniskill_dataset"),
                *("furniture_bench_dataset", "cmu_franka_exploration_dataset", "ucsd_kitchen_dataset"),
                *("ucsd_pick_and_place_dataset", "austin_sailor_dataset", "austin_sirius_dataset"),
            )
        ),
        "bc_z",
        *(
            name + _CONVERTED
            for name in (
                *("usc_cloth_sim", "utokyo_pr2_opening_fridge", "utokyo_pr2_tabletop_manipulation"),
                *("utokyo_saytap", "utokyo_xarm_pick_and_place", "utokyo_xarm_bimanual"),
            )
        ),
        "robo_net",
        *(
            name + _CONVERTED
            for name in (
                *("berkeley_mvp", "berkeley_rpt", "kaist_nonprehensile", "stanford_mask_vit"),
                *("tokyo_u_lsmo", "dlr_sara_pour", "dlr_sara_grid_clamp", "dlr_edan_shared_control"),
                *("asu_table_top", "stanford_robocook"),
            )
        ),
        *("eth_agent_affordances", "imperialcollege_sawyer_wrist_cam"),
        "iamlab_cmu_pickup_insert" + _CONVERTED,
        *("uiuc_d3field", "utaustin_mutex", "berkeley_fanuc_manipulation", "cmu_playing_with_food"),
        *("cmu_play_fusion", "cmu_stretch", "berkeley_gnm_recon", "berkeley_gnm_cory_hall"),
        "berkeley_gnm_sac_son",
    ]

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
        root: str | Path | None = None,
        download: Download | None = None,
        sampler: Sampler | None = None,
        writer: Writer | None = None,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        prefetch: int | None = None,
        transform: Any = None,
        split_trajs: bool = False,
        strict_length: bool = True,
        source: str | Path | None = None,
        mirror: str = HUGGING_FACE,
        trust_pickle: bool = False,
    ) -> None:
        if dataset_id not in self.available_datasets:
            raise UnknownDatasetError.of(
                type(self), dataset_id, f"{dataset_id!r} is not one of the data sets"
            )
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
        replacement = True if replacement is None else replacement
        super().__init__(
            Origin(
                name="openx",
                dataset_id=dataset_id,
                make_reader=partial(OpenXReader, trust_pickle=trust_pickle),
                list_files=partial(_list_files, dataset_id, mirror),
            ),
            batch_size,
            root=root,
            download=True if download is None else download,
            source=source,
            sampler=_sampler(sampler, num_slices, slice_len, strict_length, replacement, shuffle),
            writer=writer,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch=prefetch,
        )
        if names := self.meta["openx"]["texts"]:
            rows = self.sql("SELECT trajectory_id, info FROM episodes").fetchall()
            facts = {int(number): json.loads(info) for number, info in rows}
            self.append_transform(EpisodeTexts(facts, names))
        if transform is not None:
            self.append_transform(transform)


def _sampler(
    sampler: Sampler | None,
    num_slices: int | None,
    slice_len: int | None,
    strict_length: bool,
    replacement: bool,
    shuffle: bool,
) -> Sampler | None:
    if num_slices is None and slice_len is None:
        return sampler
    if sampler is not None:
        raise ArgumentError("`num_slices` and `slice_len` are exclusive with the `sampler` argument.")
    if not shuffle:
        if replacement:
            raise RuntimeError("shuffle=False can only be used when replacement=False.")
        return SliceSamplerWithoutReplacement(
            num_slices=num_slices, slice_len=slice_len, strict_length=strict_length, shuffle=False
        )
    return choose_sampler(
        None,
        num_slices=num_slices,
        slice_len=slice_len,
        strict_length=strict_length,
        replacement=replacement,
    )


def _list_files(dataset_id: str, mirror: str) -> list[RemoteFile]:
    found = [
        replace(file, name=file.name.rpartition("/")[2])
        for file in list_hugging_face(_REPOSITORY, dataset_id, endpoint=mirror)
        if file.name.endswith(".tar")
    ]
    if not found:
        raise NotFoundError(f"{mirror}/datasets/{_REPOSITORY} has no archives of {dataset_id}")
    return found
