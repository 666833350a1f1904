"""The V-D4RL class: from a folder and from a hub; images as tensors and resized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from expstore.datasets import VD4RLExperienceReplay
from expstore.errors import NotFoundError
from tests.support.data_server import serving_files
from tests.unit.datasets.test_vd4rl import write

ID = "main/walker_walk/random/64px"


def test_images_of_a_source(tmp_path: Path) -> None:
    source = write(tmp_path / "raw")
    plain = VD4RLExperienceReplay(ID, 4, root=tmp_path / "root", source=source, totensor=False)
    assert plain.sample()["pixels"].dtype == torch.uint8
    data = VD4RLExperienceReplay(ID, 32, root=tmp_path / "root", image_size=50)
    for batch in data:
        assert batch["pixels"].shape == batch["next", "pixels"].shape == (32, 3, 50, 50)
        assert batch["pixels"].dtype == torch.float32
        assert 0 <= batch["pixels"].min() <= batch["pixels"].max() <= 1
        break
    data = VD4RLExperienceReplay(ID, 2, root=tmp_path / "root", transform=lambda td: td.exclude("state"))
    batch = data.sample()
    images = plain[:]["pixels"][batch["index"]]
    torch.testing.assert_close(batch["pixels"], images.movedim(-1, -3).float() / 255)
    assert "state" not in batch
    whole = VD4RLExperienceReplay(ID, 2, root=tmp_path / "root", split_trajs=True, image_size=(32, 16))
    assert whole.sample()["pixels"].shape == (2, 5, 3, 32, 16)


def test_a_mirror_replaces_the_hub(tmp_path: Path) -> None:
    write(tmp_path / "conglu" / "vd4rl" / "vd4rl" / ID)
    (tmp_path / "conglu" / "vd4rl" / "vd4rl" / "main/walker_walk/expert/64px").mkdir(parents=True)
    with serving_files(tmp_path) as server:
        data = VD4RLExperienceReplay(ID, 4, root=tmp_path / "root", mirror=server.url)
        assert len(data) == 8
        with pytest.raises(NotFoundError, match="has no files of main/walker_walk/expert"):
            VD4RLExperienceReplay(
                ID.replace("random", "expert"), 4, root=tmp_path / "root", mirror=server.url
            )


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="isn't part of the accepted datasets"):
        VD4RLExperienceReplay("nothing", 4, root=tmp_path)
    with pytest.raises(ValueError, match="image_size=0"):
        VD4RLExperienceReplay(ID, 4, root=tmp_path, image_size=0)
