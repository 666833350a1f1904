"""An undamaged store of several shards, and copies of it that tests may damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.damaged_stores import make_sound


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed ring of three shards; tests only read it."""
    return make_sound(tmp_path_factory)


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    """A copy of `sound`."""
    return Path(shutil.copytree(sound, tmp_path / "run.exp"))
