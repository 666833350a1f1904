"""The trajectories of a data set as rows, each padded to the longest one, with a mask.

Used by data set classes with `split_trajs=True`. The result equals TorchRL's `split_trajectories` of the
whole data set, but is made one episode at a time.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict, TensorDictBase

from expstore._open import open as open_store
from expstore._settings import EpisodeKeys
from expstore.disk.atomic_build import build_atomically
from expstore.disk.files import Disk
from expstore.errors import LockedError
from expstore.storages.format.manifest import MANIFEST


def split_path(path: Path) -> Path:
    """Return the path of the store of a data set's trajectories."""
    return path.with_name(path.name + "_split")


def make_split_store(path: Path, *, again: bool = False) -> Path:
    """Make the store of a data set's trajectories if it is not there; return its path.

    Rows have the fields of the data set, shape `(time, *shape)`, with zeros after the last step, and `mask`
    `(time,)` bool, which is True for steps. `("next", "done")` is True at the last position of every row.

    Processes and threads: one makes the store. Crashes: the store is complete, or does not exist.

    Args:
        path: The store of the data set.
        again: Whether to make the store again if it exists.

    Raises:
        LockedError: Another process or thread is making the store.
    """
    disk, target = Disk(), split_path(path)
    if disk.exists(target / MANIFEST) and not again:
        return target
    with build_atomically(disk, target, single=True, doing="makes") as folder:
        if disk.exists(target / MANIFEST) and not again:
            raise LockedError(
                f"another process or thread was making {target}", hint="open the data set again"
            )
        reduced = EpisodeKeys(done_reduce="any", reward_reduce="sum")
        with (
            open_store(path, mode="r") as rows,
            open_store(folder / target.name, mode="x", episodes=reduced) as made,
        ):
            episodes = rows.sql("SELECT episode_id, length FROM episodes ORDER BY episode_id").fetchall()
            longest = max(length for _, length in episodes)
            for episode, _ in episodes:
                made.extend(_pad(rows.trajectory(episode), longest))
        disk.remove_tree(target)
    return target


def _pad(rows: TensorDictBase, length: int) -> TensorDict:
    """Return a trajectory as one row, padded to `length` steps."""
    count = rows.batch_size[0]
    found = TensorDict({}, [1])
    for key, values in rows.items(include_nested=True, leaves_only=True):
        if key in ("id", "index"):
            continue
        padded = values.new_zeros((1, length, *values.shape[1:]))
        padded[0, :count] = values
        found.set(key, padded)
    found.set("mask", (torch.arange(length) < count)[None])
    if ("next", "done") in found.keys(True):
        found["next", "done"][:, -1] = True
    return found
