"""Verify and repair include a store's archive; a damaged archive prevents opening."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.errors import CorruptionError, StateError
from expstore.maintenance import repair, verify
from tests.support.damaged_stores import flip
from tests.support.tuned import set_spare_slots

pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.fixture
def ring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A closed ring of 20 rows whose older ones are in `old.exp`."""
    set_spare_slots(monkeypatch, 10)
    path = tmp_path / "run.exp"
    with expstore.open(path, capacity=20, archive=tmp_path / "old.exp", seed=1) as rb:
        for first in range(0, 60, 5):
            rb.extend(TensorDict({"x": torch.arange(first, first + 5)}, [5]))
    assert verify(path) == []
    return path


def test_a_damaged_archive_is_named_and_repaired(ring: Path, tmp_path: Path) -> None:
    (shard,) = [p for p in (tmp_path / "old.exp" / "columns" / "x" / "c").rglob("*") if p.is_file()]
    flip(shard, 3, 1)
    (finding,) = verify(ring)
    assert finding.path.startswith("../old.exp/columns/x/c/")
    assert (finding.kind, finding.fatal, finding.ids) == ("payload", False, ())
    assert "in the archive ../old.exp:" in finding.message
    assert [left.path for left in repair(ring).left] == [finding.path]
    done = repair(ring, drop_damaged=True)
    assert not done.left
    assert not done.lost  # of the store's own rows
    assert any("rows dropped: its ids 1 to" in act for act in done.acts)
    assert verify(ring) == []
    with expstore.open(ring) as rb:
        assert len(rb) == 20


def test_what_keeps_an_opening_out_is_found(ring: Path, tmp_path: Path) -> None:
    flip(tmp_path / "old.exp" / "expstore.json", 40, 2)
    with pytest.raises(CorruptionError, match="expstore verify"):
        expstore.open(ring)
    (finding,) = verify(ring)
    assert (finding.kind, finding.path) == ("manifest", "../old.exp/expstore.json")
    with expstore.open(ring, mode="r") as rb:
        assert len(rb) == 20


def test_an_archive_that_is_gone_or_anothers_is_found(ring: Path, tmp_path: Path) -> None:
    (tmp_path / "old.exp").rename(tmp_path / "elsewhere.exp")
    (finding,) = verify(ring)
    assert (finding.kind, finding.path) == ("archive", "../old.exp")
    assert "archive=False" in finding.message
    shutil.copytree(ring, tmp_path / "old.exp")
    (finding,) = verify(ring)
    assert "a store, but not an archive" in finding.message
    with pytest.raises(StateError, match="a store, but not an archive"):
        expstore.open(ring)
