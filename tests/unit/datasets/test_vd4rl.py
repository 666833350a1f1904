"""The V-D4RL reader: steps from one image to the next, compared with TorchRL's rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from expstore.datasets import VD4RLReader, import_dataset
from expstore.errors import NotFoundError, SchemaError, StorageError
from tests.support.imported_stores import import_rows
from tests.support.torchrl_names import module

VD4RLExperienceReplay = module("torchrl.data.datasets.vd4rl").VD4RLExperienceReplay
_from_npz = module("torchrl.data.datasets.vd4rl")._from_npz


def episode(count: int, seed: int, *, terminal: bool = False) -> dict[str, Any]:
    """Return an episode of `count` images as the files have it: what led to image t stands in row t."""
    random = np.random.default_rng(seed)
    rows = np.arange(count)
    return {
        "image": random.integers(0, 255, (count, 64, 64, 3), np.uint8),
        "action": np.where(rows[:, None] > 0, 100 * seed + rows[:, None], 0) * np.ones((1, 6), "f4"),
        "reward": np.where(rows > 0, rows / 7, 0).astype("f4"),
        "discount": np.ones(count, "f4"),
        "is_first": rows == 0,
        "is_last": rows == count - 1,
        "is_terminal": (rows == count - 1) & terminal,
        "height": rows.astype("f4")[:, None],
    }


def write(folder: Path) -> Path:
    folder.mkdir(parents=True)
    np.savez(folder / "a.npz", **episode(6, 1))
    np.savez(folder / "b.npz", **episode(4, 2, terminal=True))
    return folder


def test_several_episodes_in_one_hdf5_file(tmp_path: Path) -> None:
    parts = [episode(5, 1), episode(3, 2), episode(4, 3)]
    kinds = [np.array([0] + [1] * (count - 2) + [2]) for count in (5, 3, 4)]
    kinds[2][-1] = 1  # the recording stops
    with h5py.File(tmp_path / "all.hdf5", "w") as file:
        images = np.concatenate([part["image"] for part in parts]).transpose(0, 3, 1, 2)
        file["observation"] = images
        for name in ("action", "reward"):
            file[name] = np.concatenate([part[name] for part in parts])
        discount = np.ones(12, "f4")
        discount[7] = 0
        file["discount"], file["step_type"] = discount, np.concatenate(kinds)
    rows, ends, *_ = import_rows(VD4RLReader(tmp_path / "all.hdf5"), tmp_path)
    assert ends == [(4, "truncated"), (2, "terminated"), (3, "cut")]
    assert rows["pixels"].shape == (9, 3, 64, 64)
    np.testing.assert_array_equal(rows["next", "pixels"][4:6].numpy(), images[6:8])


def test_rows_equal_those_of_torchrls_class(tmp_path: Path) -> None:
    """TorchRL takes actions and rewards as they stand: a row late, with a row too many per episode."""
    folder = write(tmp_path / "raw")
    rows, ends, *_ = import_rows(VD4RLReader(folder), tmp_path)
    assert ends == [(5, "truncated"), (3, "terminated")]
    start = 0
    for name, count in (("a", 6), ("b", 4)):
        theirs = VD4RLExperienceReplay._process_data(_from_npz(folder / f"{name}.npz"))
        ours = rows[start : start + count - 1]
        start += count - 1
        torch.testing.assert_close(ours["pixels"], theirs["pixels"][:-1])
        torch.testing.assert_close(ours["next", "pixels"], theirs["pixels"][1:])
        torch.testing.assert_close(ours["state", "height"], theirs["state", "height"][:-1])
        torch.testing.assert_close(ours["next", "state", "height"], theirs["state", "height"][1:])
        torch.testing.assert_close(ours["is_init"].ravel(), theirs["is_init"][:-1])
        for key in (("action",), ("next", "reward"), ("next", "done"), ("next", "terminated")):
            torch.testing.assert_close(ours[key], theirs[key][1:])
        assert not theirs["action"][0].any()  # the placeholder, as the first step's action


def test_bad_files_leave_nothing(tmp_path: Path) -> None:
    target = tmp_path / "x.exp"
    good = episode(5, 1)
    for name, change, text in (
        ("action", None, "no action"),
        ("image", None, "no image or observation"),
        ("reward", np.zeros(4), "4 rows of 'reward' and 5 images"),
        ("image", np.zeros((5, 64, 64), "u1"), r"images of shape \[5, 64, 64\]"),
    ):
        arrays = dict(good)
        if change is None:
            del arrays[name]
        else:
            arrays[name] = change
        np.savez(tmp_path / "bad.npz", **arrays)
        with pytest.raises(SchemaError, match=text):
            import_dataset(VD4RLReader(tmp_path / "bad.npz"), target)
    np.savez(tmp_path / "bad.npz", **{**good, "x": np.array([{}] * 5, object)})
    with pytest.raises(SchemaError, match=r"bad.npz holds Python objects"):
        import_dataset(VD4RLReader(tmp_path / "bad.npz"), target)
    np.savez(tmp_path / "good.npz", **good)
    (tmp_path / "bad.npz").write_bytes((tmp_path / "good.npz").read_bytes()[:9000])
    with pytest.raises(StorageError, match="cannot read"):
        import_dataset(VD4RLReader(tmp_path / "bad.npz"), target)
    (tmp_path / "bad.hdf5").write_bytes(b"x")
    with pytest.raises(StorageError, match="as HDF5"):
        import_dataset(VD4RLReader(tmp_path / "bad.hdf5"), target)
    assert not target.exists()
    with pytest.raises(NotFoundError, match="no file or folder"):
        VD4RLReader(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"no .npz or .hdf5"):
        VD4RLReader(tmp_path / "empty")
