"""The description of a storage in expstore.json."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.core.values import Ranking
from expstore.storages.description import Description
from expstore.storages.format.manifest import Manifest


def test_it_says_what_the_file_says(store_path: Path) -> None:
    with expstore.open(store_path, capacity=50, seed=7, episodes=expstore.EpisodeKeys(traj="robot")) as rb:
        rb.extend(TensorDict({"x": torch.zeros(4), "robot": torch.zeros(4, dtype=torch.int64)}, [4]))
        manifest = Manifest.load(rb.storage.disk, store_path)
        found = Description.of(manifest)
        assert (found.seed, found.uuid, found.geometry) == (7, manifest.uuid, manifest.geometry)
        assert found.keys.trajectory == ("robot",)
        assert found == rb.storage.description
        assert (rb.storage.schema, rb.storage.geometry) == (found.schema, found.geometry)
    assert found.schema is not None
    assert Description().with_fields(found.schema).keys.trajectory is None  # by their usual names


def test_it_is_replaced_and_never_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Description().seed = 3  # type: ignore[misc]
    storage = expstore.MemoryStorage(10)
    storage.settings.rank_by(Ranking(("x",), "max"))
    assert storage.ranking == storage.description.ranking == Ranking(("x",), "max")
