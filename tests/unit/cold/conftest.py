"""Stores, and object storage in memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import expstore
from tests.support.batches import episode_rows

pytest.importorskip("obstore", reason="the extra expstore[s3] is not installed")


@pytest.fixture
def storage() -> Any:
    from tests.support.object_stores import WatchedStorage

    return WatchedStorage()


@pytest.fixture
def rb(tmp_path: Path) -> Iterator[expstore.TensorDictReplayBuffer]:
    """A small store that is open for writing."""
    with expstore.open(tmp_path / "run.exp", batch_size=8, seed=0) as buffer:
        buffer.extend(episode_rows(50, length=10))
        yield buffer
