"""An opening creates a complete new `OpenStore`, or keeps the old one and leaves no file open."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

import expstore
from expstore.errors import StorageError
from expstore.storages.engine.opening import Opening
from tests.support.batches import numbered_rows
from tests.support.open_files import open_files

STEPS = (
    "_read_journal",
    "_open_columns",
    "_open_counts",
    "_recover_rows",
    "_load_priorities",
    "_load_counts",
    "_open_keys",
    "_make_durable",
    "_begin_generation",
    "_claim",
)


def fail(*given: Any, **keywords: Any) -> Any:
    raise StorageError("not now")


@pytest.mark.some(4)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("layout", ["flat", "packed"])
def test_an_opening_that_fails_leaves_what_was_open(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, layout: str
) -> None:
    with expstore.open(store_path, layout=layout) as rb:
        rb.extend(numbered_rows(40))
        rb.storage.settings.count_sampled()
        rb.flush()
        storage = rb.storage
        former = storage._state
        facts = storage.manifest, storage.draws, storage.schema, storage.epochs.content
        with monkeypatch.context() as patched:
            patched.setattr(Opening, step, fail)
            before = len(open_files(store_path))
            for _ in range(3):
                storage.health.note_interruption()
                with pytest.raises(StorageError, match="not now"):
                    rb.extend(numbered_rows(1))
            assert len(open_files(store_path)) == before
        assert storage._state is former
        assert (storage.manifest, storage.draws, storage.schema, storage.epochs.content) == facts
        rb.extend(numbered_rows(2))
        assert storage._state is not former
        assert len(rb) == 42


@pytest.mark.some(4)
@pytest.mark.parametrize("step", STEPS)
def test_a_first_opening_that_fails_lets_others_write(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(40))
        rb.storage.settings.count_sampled()
    before = len(open_files(store_path))
    with monkeypatch.context() as patched:
        patched.setattr(Opening, step, fail)
        with pytest.raises(StorageError, match="not now"):
            expstore.open(store_path)
    assert len(open_files(store_path)) == before
    with expstore.open(store_path) as rb:
        assert len(rb) == 40


def test_a_removed_segment_that_a_power_cut_brings_back_does_not_count(
    store_path: Path, tmp_path: Path
) -> None:
    """Its removal is not synced. Rows that were written after the opening must not depend on it."""
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(40))
        (former,) = (store_path / "journal").iterdir()
        content = former.read_bytes()
    with expstore.open(store_path) as rb:
        assert not former.exists()
        rb.extend(numbered_rows(2))
        killed = shutil.copytree(store_path, tmp_path / "killed.exp")
    (killed / "journal" / former.name).write_bytes(content)
    with expstore.open(killed) as rb:
        assert len(rb) == 42
