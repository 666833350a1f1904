"""The RoboSet reader: trials in the order of their numbers; comparison with TorchRL's class."""

from __future__ import annotations

import warnings
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

import expstore
from expstore.cli.app import run
from expstore.datasets import RobosetReader, import_dataset
from expstore.errors import NotFoundError, SchemaError

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of importing torchrl's collectors
    from torchrl.data.datasets.roboset import RobosetExperienceReplay

LENGTHS = {0: 4, 1: 3, 2: 5, 10: 2}


def write(path: Path, first: int = 0) -> Path:
    with h5py.File(path, "w") as file:
        for number, length in LENGTHS.items():
            group = file.create_group(f"Trial{number}")
            steps = first + 100.0 * number + np.arange(length)
            group["observations"] = steps[:, None].repeat(5, 1)
            group["actions"] = -steps[:, None].repeat(2, 1)
            group["rewards"] = steps / 7
            group["done"] = np.arange(length) == (length - 1 if number != 2 else -1)
            group["time"] = steps / 100
            group["env_infos/qpos"] = steps[:, None].repeat(3, 1) + 0.5
    return path


def test_trials_are_episodes(tmp_path: Path) -> None:
    folder = tmp_path / "raw"
    folder.mkdir()
    write(folder / "b.h5", 5000)
    write(folder / "a.h5")
    done = import_dataset(RobosetReader(folder), tmp_path / "a.exp")
    assert (done.rows, done.episodes) == (28, 8)
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        rows = rb[:]
        ends = rb.sql("SELECT length, status, source FROM episodes ORDER BY episode_id").fetchall()
    assert [(length, status) for length, status, _ in ends] == 2 * [
        (4, "terminated"),
        (3, "terminated"),
        (5, "cut"),
        (2, "terminated"),
    ]
    assert [source.split("@")[0] for *_, source in ends] == 4 * ["a.h5"] + 4 * ["b.h5"]
    assert rows["seed"].tolist() == 14 * [0] + 14 * [1]
    assert rows["episode"].tolist() == 2 * [n for n, length in LENGTHS.items() for _ in range(length)]
    last = np.cumsum(2 * list(LENGTHS.values())) - 1
    after = rows["observation"].numpy().copy()[1:]
    inside = np.setdiff1d(np.arange(28), last)
    np.testing.assert_array_equal(rows["next", "observation"].numpy()[inside], after[inside])
    assert not rows["next", "observation"][last].any()
    assert not rows["next", "info", "qpos"][last].any()


def test_rows_equal_torchrls(tmp_path: Path) -> None:
    file = write(tmp_path / "a.h5")
    theirs = object.__new__(RobosetExperienceReplay)
    theirs.__dict__["_root"], theirs.__dict__["dataset_id"] = tmp_path / "theirs", "x"
    theirs.__dict__["split_trajs"] = False
    found = theirs._preproc_h5([str(file)])
    import_dataset(RobosetReader(file), tmp_path / "a.exp")
    with expstore.open(tmp_path / "a.exp", mode="r") as rb:
        rows = rb[:]
    keys = ["observation", "action", "time", "episode", "seed", ("info", "qpos"), ("next", "observation")]
    for key in [*keys, ("next", "info", "qpos"), ("next", "done"), ("next", "terminated")]:
        torch.testing.assert_close(found[key], rows[key])
    torch.testing.assert_close(found["next", "reward"], rows["next", "reward"])
    # Theirs says in the row of the last step that the state before it was done.
    assert found["done"].any()
    assert not rows["done"].any()


def test_unsuitable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no file or folder"):
        RobosetReader(tmp_path / "none")
    with pytest.raises(NotFoundError, match=r"no \.h5 or \.hdf5 file"):
        RobosetReader(tmp_path)
    file = tmp_path / "a.h5"
    file.write_text("no HDF5")
    assert run(["import", str(file), str(tmp_path / "a.exp"), "--format", "roboset"]) == 1
    with h5py.File(file, "w") as other:
        other["x"] = np.zeros(3)
    with pytest.raises(SchemaError, match="no group Trial0"):
        import_dataset(RobosetReader(file), tmp_path / "a.exp")
    with h5py.File(file, "w") as other:
        other["Trial3/actions"] = np.zeros((3, 2))
    with pytest.raises(SchemaError, match=r"a\.h5, episode 0: Trial3 has no observations, rewards, done"):
        import_dataset(RobosetReader(file), tmp_path / "b.exp")
    assert run(["import", str(write(file)), str(tmp_path / "a.exp"), "--format", "roboset"]) == 0
