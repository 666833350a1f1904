"""The Gen-DGRL reader and class: archives of pickled dicts, read without running code."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from expstore.datasets import GenDGRLExperienceReplay, GenDGRLReader, import_dataset
from expstore.datasets.kinds import gen_dgrl
from expstore.errors import NotFoundError, SchemaError, StorageError
from tests.support.data_server import serving_files
from tests.support.imported_stores import import_rows
from tests.support.torchrl_names import module

OfTorchRL = module("torchrl.data.datasets.gen_dgrl").GenDGRLExperienceReplay

LENGTHS = (5, 3, 7)


def trajectory(number: int, count: int, *, done: bool = True) -> dict[str, Any]:
    random = np.random.default_rng(number)
    return {
        "observations": random.integers(0, 255, (count + 1, 3, 64, 64)),
        "actions": random.integers(0, 15, (count, 1)),
        "rewards": random.normal(size=(count, 1)).astype("f4"),
        "dones": (np.arange(count) == count - 1)[:, None] & done,
    }


def npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(value, object), allow_pickle=True)
    return file.getvalue()


def archive(path: Path, values: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz" if path.suffix == ".xz" else "w") as tar:
        for number, value in enumerate(values):
            data = value if isinstance(value, bytes) else npy(value)
            member = tarfile.TarInfo(f"expert/{number:03}.npy")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def trajectories() -> list[Any]:
    return [trajectory(number, count, done=number != 1) for number, count in enumerate(LENGTHS)]


def test_trajectories_are_episodes(tmp_path: Path) -> None:
    source = archive(tmp_path / "raw/bigfish.tar.xz", trajectories())
    rows, ends, *_ = import_rows(GenDGRLReader(source), tmp_path)
    assert ends == [(5, "terminated"), (3, "cut"), (7, "terminated")]
    start = 0
    for there in trajectories():
        part = rows[start : start + len(there["actions"])]
        start += len(there["actions"])
        np.testing.assert_array_equal(part["observation"].numpy(), there["observations"][:-1])
        np.testing.assert_array_equal(part["next", "observation"].numpy(), there["observations"][1:])
        np.testing.assert_array_equal(part["action"].numpy(), there["actions"])
        np.testing.assert_array_equal(part["next", "reward"].numpy(), there["rewards"])
    assert rows["observation"].dtype == torch.uint8


@pytest.mark.slow
def test_a_folder_and_a_limit(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    for number, value in enumerate(trajectories()):
        (tmp_path / "raw" / f"{number}.npy").write_bytes(npy(value))
    assert len(import_rows(GenDGRLReader(tmp_path / "raw"), tmp_path).rows) == 15
    assert import_rows(GenDGRLReader(tmp_path / "raw", rows=6), tmp_path).ends == [
        (5, "terminated"),
        (3, "cut"),
    ]


def test_rows_equal_those_of_torchrls_class(tmp_path: Path) -> None:
    values = [{**one, "dones": one["dones"][:, 0], "rewards": one["rewards"][:, 0]} for one in trajectories()]
    file = archive(tmp_path / "raw/bigfish.tar", values)
    theirs = object.__new__(OfTorchRL)
    theirs.__dict__.update({"_root": tmp_path / "torchrl", "dataset_id": "bigfish-level_1_E"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OfTorchRL, "_get_category_len", classmethod(lambda cls, name: 15))
        made = theirs._unpack_category_file(
            str(file.parent), False, "level_1_E", ("level_1_E", file.name, "")
        )
    rows = import_rows(GenDGRLReader(file), tmp_path).rows
    for key in made.keys(True, True):
        # Their rewards have no last dim of 1.
        wanted = made[key][:, None] if key == ("next", "reward") else made[key]
        torch.testing.assert_close(rows[key], wanted)


@pytest.mark.slow
def test_bad_archives_leave_nothing(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "evil"),)

    target = tmp_path / "x.exp"
    good = trajectory(1, 4)
    for number, (value, kind, text) in enumerate(
        [
            ({**good, "actions": Evil()}, SchemaError, "002.npy: the pickle names posix.mkdir"),
            ({**good, "rewards": good["rewards"][1:]}, SchemaError, r"'rewards' of shape \[3, 1\]"),
            ({"actions": good["actions"]}, SchemaError, "has no observations, rewards, dones"),
            ([1], SchemaError, "one Python object is expected"),
            (b"hello", StorageError, "cannot read a .npy file"),
        ]
    ):
        source = archive(tmp_path / f"raw/{number}.tar", [good, good, value])
        with pytest.raises(kind, match=text):
            import_dataset(GenDGRLReader(source), target)
    whole = archive(tmp_path / "raw/whole.tar.xz", trajectories()).read_bytes()
    (tmp_path / "raw/half.tar.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StorageError, match="cannot read"):
        import_dataset(GenDGRLReader(tmp_path / "raw/half.tar.xz"), target)
    assert not target.exists()
    assert not (tmp_path / "evil").exists()
    with pytest.raises(NotFoundError, match="no file or folder"):
        GenDGRLReader(tmp_path / "nothing.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"no .npy file"):
        GenDGRLReader(tmp_path / "empty")


@pytest.mark.slow
def test_the_class(tmp_path: Path) -> None:
    archive(tmp_path / "public/100k/level_40/suboptimal/bigfish.tar.xz", trajectories())
    with serving_files(tmp_path / "public") as server:
        data = GenDGRLExperienceReplay(
            "bigfish-level_40_S", batch_size=8, root=tmp_path / "root", mirror=server.url
        )
    for batch in data:
        assert batch["observation"].shape == (8, 3, 64, 64)
        break
    assert list(OfTorchRL.available_datasets) == GenDGRLExperienceReplay.available_datasets
    for name in OfTorchRL.available_datasets:
        game, category = name.split("-")
        address = OfTorchRL._build_urls_with_category_name(game, category)
        assert address.endswith(f"{gen_dgrl.CATEGORIES[category][0]}/{game}.tar.xz")
    with pytest.raises(ValueError, match="is not one of the data sets"):
        GenDGRLExperienceReplay("bigfish-2M", root=tmp_path)
