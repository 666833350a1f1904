"""Small files in the formats of data sets, under the names that examples in docstrings give them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.support.atari_files import LoggedRing, play


def write_named_files(text: str, folder: Path) -> None:
    """Write the files whose names a text quotes.

    Args:
        text: The examples of a docstring.
        folder: The folder that the names are relative to.
    """
    for name, write in FILES.items():
        if f'"{name}"' in text:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder / name)


def _write_d4rl(path: Path) -> None:
    from tests.unit.datasets.test_d4rl import arrays, write

    write(path, arrays())


def _write_dopamine(path: Path) -> None:
    ring = LoggedRing(path)
    play(ring, 120, seed=3, shortest=7, longest=40)
    ring.finish()


def _write_gen_dgrl(path: Path) -> None:
    from tests.unit.datasets.test_gen_dgrl import archive, trajectories

    archive(path, trajectories())


def _write_lerobot(path: Path) -> None:
    from tests.unit.datasets.test_lerobot import write_v3

    write_v3(path)


def _write_minari(path: Path) -> None:
    from tests.unit.datasets.test_minari_folder import plain

    plain(path)


def _write_openml(path: Path) -> None:
    from tests.unit.datasets.test_openml import table, write_arff

    write_arff(path, table("shuttle"))


def _write_openx(path: Path) -> None:
    from tests.unit.datasets.test_openx import archive, episodes

    archive(path / "cmu_stretch_00000.tar", episodes())


def _write_rlds(path: Path) -> None:
    from tests.unit.datasets.test_rlds import small

    small(path)


def _write_robomimic(path: Path) -> None:
    from tests.unit.datasets.test_hdf5_episodes import robomimic

    robomimic(path)


def _write_roboset(path: Path) -> None:
    from tests.unit.datasets.test_roboset import write

    write(path)


def _write_sb3(path: Path) -> None:
    from gymnasium import spaces
    from stable_baselines3.common.buffers import ReplayBuffer

    buffer = ReplayBuffer(100, spaces.Box(-5, 5, (4,)), spaces.Discrete(2))
    for step in range(100):
        first, following = np.full((1, 4), step / 50), np.full((1, 4), (step + 1) / 50)
        done = np.array([step % 20 == 19])
        buffer.add(first, following, np.zeros((1, 1)), np.ones(1), done, [{}])
    path.write_bytes(pickle.dumps(buffer))


def _write_tensordict(path: Path) -> None:
    from tests.unit.datasets.test_tensordict_folder import rows

    rows(0, 20).memmap(path)


def _write_vd4rl(path: Path) -> None:
    from tests.unit.datasets.test_vd4rl import write

    write(path)


FILES: dict[str, Callable[[Path], None]] = {
    "Pong/5/replay_logs": _write_dopamine,
    "bigfish.tar": _write_gen_dgrl,
    "cmu_play_fusion/0.1.0": _write_rlds,
    "cmu_stretch": _write_openx,
    "door_v2d-v1.h5": _write_roboset,
    "hopper_medium-v2.hdf5": _write_d4rl,
    "lift/low_dim.hdf5": _write_robomimic,
    "pen/human-v2": _write_minari,
    "pen/torchrl": _write_tensordict,
    "pusht_image": _write_lerobot,
    "replay_buffer.pkl": _write_sb3,
    "shuttle.arff": _write_openml,
    "walker_walk/random/64px": _write_vd4rl,
}
