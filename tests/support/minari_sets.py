"""Data sets of Minari: written by Minari itself in each of its formats, and one as old versions wrote it."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

#: Steps of the episodes; the first two terminate, the last one is truncated.
LENGTHS = (4, 1, 11)


def make_episodes(*, images: bool = True, plain: bool = False) -> list[Any]:
    """Return episodes as Minari takes them; actions are pairs, with `plain` numbers."""
    from minari.data_collector import EpisodeBuffer

    found = []
    for number, count in enumerate(LENGTHS):
        at = np.arange(count + 1) + 100 * number
        observations: dict[str, Any] = {
            "pos": at[:, None].astype("f4") * np.ones((1, 2), "f4"),
            "grid": (at[:, None, None] + np.zeros((1, 2, 3))).astype("u1"),
            "kind": at % 5,
        }
        if images:
            frame = at[:, None, None, None] % 20 * 10 + np.zeros((1, 40, 40, 3))
            observations["frame"] = frame.astype("u1")
        found.append(
            EpisodeBuffer(
                id=number,
                seed=number + 5,
                options={"goal": {"x": number}},
                observations=observations,
                actions=at[:-1] % 3 if plain else (at[:-1] % 3, at[:-1, None] / 8),
                rewards=(at[:-1] / 3).tolist(),
                terminations=[False] * (count - 1) + [number < 2],
                truncations=[False] * (count - 1) + [number == 2],
                infos={"x": at[:, None] * 1.0, "deep": {"y": at[:, None] * 2}},
            )
        )
    return found


def create_minari(
    patch: pytest.MonkeyPatch,
    root: Path,
    name: str = "test/hop-v0",
    form: str = "hdf5",
    *,
    images: bool = True,
    jpeg: bool = False,
    plain: bool = False,
) -> Path:
    """Let Minari write `make_episodes` below `root`, its folder from now on; return the data set's."""
    import minari
    from gymnasium import spaces

    patch.setenv("MINARI_DATASETS_PATH", str(root))
    root.mkdir(exist_ok=True)
    inside: dict[str, Any] = {
        "pos": spaces.Box(-100, 1000, (2,), np.float32),
        "grid": spaces.Box(0, 255, (2, 3), np.uint8),
        "kind": spaces.Discrete(5),
    }
    if images:
        inside["frame"] = spaces.Box(0, 255, (40, 40, 3), np.uint8)
    choice = spaces.Discrete(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of facts that it was not given
        minari.create_dataset_from_buffers(
            name,
            buffer=make_episodes(images=images, plain=plain),
            observation_space=spaces.Dict(inside),
            action_space=choice if plain else spaces.Tuple((choice, spaces.Box(0, 100, (1,), np.float64))),
            algorithm_name="random",
            author="x",
            author_email="x@y",
            code_permalink="c",
            description="d",
            data_format=form,
            jpeg_encoding=jpeg,
        )
    return root / name


def write_old_minari(folder: Path) -> Path:
    """Write a data set as old ones of D4RL are: with states, and infos that lack the reset."""
    import h5py

    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data/main_data.hdf5", "w") as file:
        for number, count in {0: 4, 10: 2, 2: 5}.items():
            group = file.create_group(f"episode_{number}")
            at = np.arange(count + 1.0) + 100 * number
            group.attrs.update({"id": number, "total_steps": count, "seed": np.uint64(number)})
            group["observations"] = at[:, None].repeat(3, 1)
            group["actions"] = -at[:-1, None]
            group["rewards"] = at[:-1] / 7
            group["terminations"] = np.arange(count) == (count - 1 if number else -1)
            group["truncations"] = np.arange(count) == (count - 1 if not number else -1)
            group["state/qpos"] = at[:, None] + 0.5
            group["infos/success"] = np.arange(count) % 2 == 0
            group["infos/power"] = at + 0.25
    about = {
        "total_episodes": 3,
        "total_steps": 11,
        "dataset_id": folder.name,
        "observation_space": json.dumps(
            {"type": "Box", "dtype": "float64", "shape": [3], "low": [-9.0] * 3, "high": [9e9] * 3}
        ),
        "action_space": json.dumps(
            {"type": "Box", "dtype": "float64", "shape": [1], "low": [-9e9], "high": [9.0]}
        ),
        "minari_version": "0.5.3",
        "data_format": "hdf5",
        "env_spec": None,
    }
    (folder / "data/metadata.json").write_text(json.dumps(about))
    return folder
