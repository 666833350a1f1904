"""The RLDS class: from a folder and from a server; texts of steps, slices, options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from expstore.datasets import RLDSExperienceReplay
from expstore.errors import NotFoundError, SchemaError, StateError
from tests.support.data_server import serving_files
from tests.unit.datasets.test_rlds import episode, example, small, write

ID = "my_env/1.0.0"


def opened(tmp_path: Path, source: Path | None = None, **options: Any) -> RLDSExperienceReplay:
    options.setdefault("batch_size", 8)
    return RLDSExperienceReplay(ID, root=tmp_path / "root", source=source, **options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small(tmp_path / "public" / ID)


def test_samples_of_a_source(tmp_path: Path, source: Path) -> None:
    seen: list[Any] = []

    def note(batch: TensorDictBase) -> TensorDictBase:
        seen.append(batch["language_instruction"])
        return batch

    data = opened(tmp_path, source, transform=note)
    assert len(data) == 10
    assert data.data_path == tmp_path / "root" / ID
    batch = data.sample()
    assert batch["action"].shape == (8, 2)
    assert batch["next", "reward"].shape == (8, 1)
    assert len(seen) == 1
    # In the first episode the text changes with the third step.
    assert data[:]["language_instruction"] == 2 * ["pick"] + ["place"] + 7 * ["pick"]
    assert data[2].get("language_instruction").data == "place"
    words = [
        ["pick", "place"][e == 0 and t == 2] for e, t in zip(batch["episode"], batch["frame"], strict=True)
    ]
    assert batch["language_instruction"] == words


@pytest.mark.slow
def test_slices_and_trajectories(tmp_path: Path, source: Path) -> None:
    data = opened(tmp_path, source, num_slices=2, batch_size=6)
    batch = data.sample()
    frames = batch["frame"].reshape(2, 3)
    assert torch.equal(frames, frames[:, :1] + torch.arange(3))
    data.close()
    data = opened(tmp_path, slice_len=2, replacement=False, batch_size=4)
    assert data.sample()["episode"].shape == (4,)
    data.close()
    data = opened(tmp_path, split_trajs=True, batch_size=2)
    assert len(data) == 3
    assert data[:]["mask"].sum(1).tolist() == [3, 5, 2]
    assert data.sample().batch_size == (2, 5)
    wrong: dict[str, Any]
    for wrong in ({"num_slices": 2, "slice_len": 2}, {"num_slices": 2, "split_trajs": True}):
        with pytest.raises(ValueError, match="num_slices"):
            opened(tmp_path, None, **wrong)


def test_download(tmp_path: Path) -> None:
    found = [example(episode(n, 2, True)) for n in range(3)]
    write(tmp_path / "public" / ID, [found[:1], found[1:]], train=[1], val=[2])
    with serving_files(tmp_path / "public") as server:
        data = opened(tmp_path, mirror=server.url, split="val")
        assert data[:]["episode"].tolist() == [1, 1, 2, 2]
        asked = [path.removeprefix(f"{ID}/") for path, _ in server.requests]
        assert asked == ["dataset_info.json", "features.json", "my_env-val.tfrecord-00000-of-00001"]
        data.close()
        opened(tmp_path, mirror=server.url, split="val").close()
        assert len(server.requests) == 3
        with pytest.raises(NotFoundError, match="has no split 'test'"):
            opened(tmp_path / "b", mirror=server.url, split="test")
        with pytest.raises(NotFoundError):
            RLDSExperienceReplay("none/1.0.0", root=tmp_path / "root", mirror=server.url)
        (tmp_path / "public" / ID / "dataset_info.json").write_text("no JSON")
        with pytest.raises(SchemaError, match="is not JSON"):
            opened(tmp_path / "c", mirror=server.url)
    with pytest.raises(NotFoundError, match="could not be found in"):
        opened(tmp_path / "d", download=False)


def test_options_of_a_store_that_is_there(tmp_path: Path, source: Path) -> None:
    assert len(opened(tmp_path, source, last_step="transition")) == 14
    for split in (False, True):
        with pytest.raises(StateError, match="made with last_step='transition', but last_step='observation'"):
            opened(tmp_path, split_trajs=split)
    with pytest.raises(StateError, match="was not imported from these files"):
        opened(tmp_path, source)
