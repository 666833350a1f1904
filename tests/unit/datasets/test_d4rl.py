"""The D4RL reader keeps every row and ends episodes like the file; comparison with TorchRL's class."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from tensordict import PersistentTensorDict

from expstore.datasets import D4RLReader
from expstore.errors import NotFoundError, SchemaError, StorageError
from tests.support.imported_stores import import_rows
from tests.support.refusals import check_refusals
from tests.support.torchrl_names import module

D4RLExperienceReplay = module("torchrl.data.datasets.d4rl").D4RLExperienceReplay

LENGTHS = [4, 5, 3]


def arrays(lengths: list[int] = LENGTHS) -> dict[str, Any]:
    """Return what a file of gym-mujoco v2 has: one terminal end, one time limit, one that is cut."""
    count = sum(lengths)
    last = np.cumsum(lengths) - 1
    states = [np.arange(100 * n, 100 * n + length + 1) for n, length in enumerate(lengths, 1)]

    def wide(parts: list[Any]) -> Any:
        return np.concatenate(parts)[:, None].repeat(3, 1).astype("f4")

    observations = wide([one[:-1] for one in states])
    terminals, timeouts = np.zeros(count, bool), np.zeros(count, bool)
    terminals[last[::3]], timeouts[last[1::3]] = True, True
    return {
        "observations": observations,
        "next_observations": wide([one[1:] for one in states]),
        "actions": np.arange(2 * count, dtype="f4").reshape(count, 2),
        "rewards": np.arange(count, dtype="f4"),
        "terminals": terminals,
        "timeouts": timeouts,
        "infos/qpos": observations[:, :2],
        "infos/action_log_probs": np.zeros(count, "f4"),
        "metadata/algorithm": np.bytes_("SAC"),
        "metadata/iteration": np.int32(999),
        "metadata/policy/fc0/weight": np.zeros((2, 3), "f4"),
    }


def write(path: Path, values: dict[str, Any]) -> Path:
    with h5py.File(path, "w") as file:
        for name, value in values.items():
            more = {"compression": "gzip"} if np.ndim(value) else {}
            file.create_dataset(name, data=value, **more)
    return path


def test_every_row_and_the_true_last_observation(tmp_path: Path) -> None:
    there = arrays()
    rows, episodes, _, meta = import_rows(D4RLReader(write(tmp_path / "hopper-v2.hdf5", there)), tmp_path)
    assert episodes == [(4, "terminated"), (5, "truncated"), (3, "cut")]
    np.testing.assert_array_equal(rows["observation"].numpy(), there["observations"])
    np.testing.assert_array_equal(rows["next", "observation"].numpy(), there["next_observations"])
    np.testing.assert_array_equal(rows["action"].numpy(), there["actions"])
    np.testing.assert_array_equal(rows["next", "reward"].numpy()[:, 0], there["rewards"])
    np.testing.assert_array_equal(rows["next", "terminated"].numpy()[:, 0], there["terminals"])
    np.testing.assert_array_equal(rows["next", "truncated"].numpy()[:, 0], there["timeouts"])
    np.testing.assert_array_equal(rows["info", "qpos"].numpy(), there["infos/qpos"])
    assert meta["d4rl"] == {"algorithm": "SAC", "iteration": 999}
    assert meta["import"]["options"] == {"split_on": ["terminals", "timeouts"]}


@pytest.mark.slow
def test_unmarked_seams_end_an_episode(tmp_path: Path) -> None:
    there = arrays()
    there["timeouts"][:] = False
    episodes = import_rows(D4RLReader(write(tmp_path / "a.hdf5", there)), tmp_path).ends
    assert episodes == [(4, "terminated"), (5, "cut"), (3, "cut")]
    there["next_observations"][:] = np.nan
    there["observations"][:] = np.nan  # no seam: NaN equals NaN
    episodes = import_rows(D4RLReader(write(tmp_path / "b.hdf5", there)), tmp_path).ends
    assert episodes == [(4, "terminated"), (8, "cut")]


def test_without_next_observations_the_last_one_is_zero(tmp_path: Path) -> None:
    there = arrays()
    after = there.pop("next_observations")
    rows, episodes, *_ = import_rows(D4RLReader(write(tmp_path / "a.hdf5", there)), tmp_path)
    assert [length for length, _ in episodes] == LENGTHS
    after[np.cumsum(LENGTHS) - 1] = 0
    np.testing.assert_array_equal(rows["next", "observation"].numpy(), after)


def test_kitchen_has_flags_of_floats_no_timeouts_and_infos_of_numbers(tmp_path: Path) -> None:
    there = {name: value for name, value in arrays().items() if "infos" not in name}
    del there["timeouts"], there["next_observations"]
    there["terminals"] = there["terminals"].astype("f4")
    there["terminals"][8] = 1
    there["infos"] = np.arange(12)
    rows, episodes, *_ = import_rows(D4RLReader(write(tmp_path / "kitchen.hdf5", there)), tmp_path)
    assert episodes == [(4, "terminated"), (5, "terminated"), (3, "cut")]
    assert rows["info"].tolist() == list(range(12))


@pytest.mark.slow
def test_antmaze_episodes_continue_near_the_goal(tmp_path: Path) -> None:
    there = arrays()
    del there["next_observations"]
    there["terminals"] = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 0, 0], "f4")
    there["timeouts"] = np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], bool)
    file = write(tmp_path / "Ant_maze_u-maze_noisy.hdf5", there)
    rows, episodes, *_ = import_rows(D4RLReader(file), tmp_path)
    assert episodes == [(9, "terminated"), (3, "cut")]
    assert rows["next", "terminal"][:, 0].tolist() == there["terminals"].astype(bool).tolist()
    episodes = import_rows(D4RLReader(file, split_on=["terminals"]), tmp_path).ends
    assert [length for length, _ in episodes] == [3, 1, 4, 1, 3]


def test_rows_equal_torchrls(tmp_path: Path) -> None:
    """Equal in every row that TorchRL keeps, but for the observation after an end, which it sets to 0."""
    file = write(tmp_path / "hopper-v2.hdf5", arrays())
    theirs = object.__new__(D4RLExperienceReplay)
    theirs.use_truncated_as_done = True
    loaded = PersistentTensorDict.from_h5(str(file)).to_tensordict()
    with loaded.unlock_():
        found = theirs._process_data_from_env(loaded)
    rows = import_rows(D4RLReader(file), tmp_path).rows
    assert (found.shape[0], rows.shape[0]) == (11, 12)  # theirs lacks the last row
    kept = rows[:11]
    keys = ["observation", "action", ("next", "reward"), ("next", "terminated"), ("next", "truncated")]
    for key in [*keys, ("next", "done"), ("next", "observation"), ("info", "qpos")]:
        torch.testing.assert_close(found[key], kept[key])
    # Theirs says of the first row of an episode that the state before it was done.
    assert found["done"].any()
    assert not kept["done"].any()


def test_unsuitable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.hdf5").write_text("no HDF5")
    short = write(tmp_path / "a.hdf5", arrays() | {"rewards": np.zeros(11)})
    none = write(tmp_path / "b.hdf5", {name: one for name, one in arrays().items() if name != "rewards"})
    good = write(tmp_path / "c.hdf5", arrays())
    wrong: Any = ["dones"]
    check_refusals(
        [
            (lambda: D4RLReader(tmp_path), NotFoundError, "is a folder, but a file is needed"),
            (lambda: D4RLReader(tmp_path / "none.hdf5"), NotFoundError, "there is no file"),
            (lambda: D4RLReader(tmp_path / "text.hdf5"), StorageError, "as HDF5"),
            (lambda: D4RLReader(short), SchemaError, "has 11 rows of 'rewards' and 12 of 'observations'"),
            (lambda: D4RLReader(none), SchemaError, "is not a D4RL file: it has no rewards"),
            (lambda: D4RLReader(good, split_on=wrong), SchemaError, "split_on="),
        ]
    )
