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
from expstore.errors import NotFoundError
from expstore.samplers.base import Sampler
from expstore.samplers.slices_without_replacement import SliceSamplerWithoutReplacement
from expstore.writers.writers import Writer

__all__ = ["OpenXExperienceReplay"]

_REPOSITORY = "jxu124/OpenX-Embodiment"
_CONVERTED = "_converted_externally_to_rlds"


class OpenXExperienceReplay(BaseDatasetExperienceReplay):
    """Sample one of Open X-Embodiment's data sets: robots, seen by cameras.

    Other than in TorchRL's class, a data set is always kept as a store: `streaming=True` and `pad`, which
    belongs to it, are refused. Its files, which are pickles, are read without running anything; the
    libraries datasets and torchvision are not needed; all images of an observation are decoded, not that
    called `image` alone; the store keeps texts as facts about episodes, samples carry them by row.

    Threads, processes, crashes: as `BaseDatasetExperienceReplay`.

    Args:
        dataset_id: One of `available_datasets`.
        batch_size: Of `sample`.
        shuffle: Whether slices come in random order; False needs `replacement=False`.
        num_slices: How many slices of episodes a batch has; it or `slice_len`.
        slice_len: How many steps a slice has.
        pad: Refused.
        replacement: Whether slices may come again before all others came. None: True.
        streaming: None or False.
        root: As in the base.
        download: As in the base; None: True.
        sampler: As in the base. It excludes `num_slices` and `slice_len`.
        writer: As in the base.
        collate_fn: As `ReplayBuffer`.
        pin_memory: As `ReplayBuffer`.
        prefetch: As `ReplayBuffer`.
        transform: As `ReplayBuffer`. It gets the texts.
        split_trajs: Only False.
        strict_length: Whether episodes that are too short for a slice are left out.
        source: A .tar archive or a folder of them. As in the base.
        mirror: Address to use in place of `https://huggingface.co`.
        trust_pickle: As `OpenXReader`.

    Raises:
        ValueError: There is no such data set; `streaming` is True; or arguments exclude each other.
        RuntimeError: `pad` is given, or `shuffle` is False with replacement.
        NotImplementedError: `split_trajs` is True.
        ExpStoreError: As in the base.

    Example:
        >>> data = OpenXExperienceReplay("cmu_stretch", num_slices=8, download=True)
        >>> data.sample(128).batch_size
        torch.Size([128])
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
            raise ValueError(
                f"{dataset_id!r} is not one of the data sets. All ids: "
                "OpenXExperienceReplay.available_datasets"
            )
        if num_slices is not None and slice_len is not None:
            raise ValueError("num_slices or slice_len can be not None, but not both.")
        if split_trajs:
            raise NotImplementedError("trajectories of Open X-Embodiment cannot be split into rows")
        if streaming:
            raise ValueError(
                "streaming=True is not possible: data sets are kept as stores; leave it out, and the data "
                "set is fetched once"
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
        raise ValueError("`num_slices` and `slice_len` are exclusive with the `sampler` argument.")
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
