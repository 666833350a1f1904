"""The Minari class: from Minari's own folder, from a hub, by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from expstore.datasets import MinariExperienceReplay, load_dataset
from expstore.datasets.kinds.minari import list_minari
from expstore.errors import NotFoundError, RemoteError
from expstore.specs import Bounded, Composite
from tests.support.data_server import serving_files
from tests.support.minari_sets import create_minari

ID = "test/hop-v0"


def test_minaris_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_minari(monkeypatch, tmp_path / "own")
    data = MinariExperienceReplay(ID, batch_size=32, root=tmp_path / "root", load_from_local_minari=True)
    for sample in data:
        assert sample["next", "reward"].shape == (32, 1)
        assert sample["observation", "pos"].dtype == torch.float32
        break
    space = data.metadata["observation_space"]
    assert isinstance(space, Composite)
    assert isinstance(space["pos"], Bounded)
    assert data.metadata["author"] == ["x"]
    slices = load_dataset(f"minari:{ID}", root=tmp_path / "root", batch_size=2, split_trajs=True)
    assert slices.sample().batch_size == (2, 11)
    with pytest.raises(FileNotFoundError, match="local Minari cache"):
        MinariExperienceReplay("nobody/x-v0", 8, root=tmp_path / "root", load_from_local_minari=True)
    with pytest.raises(ValueError, match="exclude each other"):
        MinariExperienceReplay(ID, source=tmp_path, root=tmp_path / "root", load_from_local_minari=True)


def test_a_mirror_replaces_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = create_minari(monkeypatch, tmp_path / "own")
    hub = tmp_path / "hub" / "farama-minari" / "test"
    hub.mkdir(parents=True)
    folder.rename(hub / "hop-v0")
    with serving_files(tmp_path / "hub") as server:
        data = MinariExperienceReplay(ID, 4, root=tmp_path / "root", mirror=server.url)
        assert len(data) == 16
        with pytest.raises(NotFoundError):
            MinariExperienceReplay("test/else-v0", 4, root=tmp_path / "root", mirror=server.url)


def test_the_ids_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "api").mkdir()
    (tmp_path / "farama-minari" / "D4RL").mkdir(parents=True)
    said = json.dumps({"datasets": ["D4RL/pen/human-v2", "D4RL/door/human-v2"]})
    (tmp_path / "farama-minari" / "D4RL" / "namespace_metadata.json").write_text(said)
    (tmp_path / "api" / "datasets").write_text(
        json.dumps([{"id": "farama-minari/D4RL"}, {"id": "farama-minari/a-v0"}])
    )
    with serving_files(tmp_path) as server:
        assert list_minari(server.url) == ["D4RL/door/human-v2", "D4RL/pen/human-v2", "a-v0"]
    with pytest.raises(RemoteError, match="cannot fetch http://127.0.0.1:1/api/datasets"):
        list_minari("http://127.0.0.1:1")
