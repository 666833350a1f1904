"""JSON that is nested deeper than Python's parser goes is damage, in whichever file it is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import expstore
from expstore.errors import ExpStoreError
from expstore.maintenance import verify
from tests.support.batches import numbered_rows

pytestmark = pytest.mark.usefixtures("no_syncs", "short_flat_shards")

DEEP = "[" * 100_000


@pytest.fixture
def store(store_path: Path) -> Path:
    """A closed store with a version in its folder."""
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(10))
        rb.snapshots.tag("first")
    return store_path


def _uses(store: Path) -> list[Callable[[], object]]:
    return [
        lambda: verify(store),
        lambda: expstore.open(store, mode="r").close(),
        lambda: expstore.open(store).close(),
        lambda: expstore.open(store / "versions", version="first").close(),
        lambda: expstore.versions(store / "versions"),
    ]


def test_json_files_of_a_store(store: Path, tmp_path: Path) -> None:
    """Each file alone: what reads it says that it is damaged, or does without it."""
    names = {str(path.relative_to(store)) for path in store.rglob("*.json")} | {"LOCK", "versions/LOCK"}
    assert {"expstore.json", "columns/zarr.json", "versions/v0001/version.json"} < names
    for number, name in enumerate(sorted(names)):
        copy = tmp_path / f"{number}.exp"
        shutil.copytree(store, copy)
        (copy / name).write_text(DEEP)
        found = 0
        for act in _uses(copy):
            try:
                found += bool(act())
            except ExpStoreError:
                found += 1
        assert found or name.endswith("LOCK"), name
