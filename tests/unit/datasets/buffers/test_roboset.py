"""The RoboSet class: from a folder and from a hub."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrl.data.datasets.roboset import RobosetExperienceReplay as OfTorchRL

from expstore.datasets import RobosetExperienceReplay
from expstore.errors import NotFoundError
from tests.support.data_server import serving_files
from tests.unit.datasets.test_roboset import LENGTHS, write

ID = "DAPG(expert)/door_v2d-v1"


@pytest.mark.slow
def test_from_the_hub_and_from_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "jdvakil" / "RoboSet_Sim" / "DAPG(expert)"
    (folder / "door_v2d-v1").mkdir(parents=True)
    write(folder / "door_v2d-v1" / "b.h5", 5000)
    write(folder / "door_v2d-v1" / "a.h5")
    write(folder / "pen_v2d-v1_a.h5")
    with serving_files(tmp_path) as server:
        data = RobosetExperienceReplay(ID, 4, root=tmp_path / "root", mirror=server.url)
        asked = [path for path, _ in server.requests]
        assert [path.rpartition("/")[2] for path in asked[1:]] == ["a.h5", "b.h5"]
        with pytest.raises(NotFoundError, match="has no file DAPG"):
            RobosetExperienceReplay("DAPG(expert)/hammer_v2d-v1", root=tmp_path / "r", mirror=server.url)
        with pytest.raises(NotFoundError, match="there is no file at"):
            RobosetExperienceReplay("DAPG(human)/pen_v2d-v1", root=tmp_path / "r", mirror=server.url)
    assert len(data) == 2 * sum(LENGTHS.values())
    assert data.sample()["observation"].shape == (4, 5)
    whole = RobosetExperienceReplay(
        ID, 2, root=tmp_path / "other", source=folder / "door_v2d-v1", split_trajs=True
    )
    assert whole.sample().batch_size == (2, 5)


def test_the_ids_are_torchrls(tmp_path: Path) -> None:
    assert sorted(RobosetExperienceReplay.available_datasets) == sorted(OfTorchRL.available_datasets)
    with pytest.raises(ValueError, match="isn't part of the accepted datasets"):
        RobosetExperienceReplay("nothing", root=tmp_path)
