"""`rb.columns.stats()`: rows that change meanwhile, which fields have statistics, and errors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import TensorDictReplayBuffer
from expstore.buffers import field_stats
from expstore.core.values import Array, IntArray
from expstore.errors import NotReadyError, SchemaError, StateError
from expstore.storages.read_view import ReadView, read_present
from tests.support.batches import numbered_rows
from tests.support.tuned import set_spare_slots

rows = partial(
    numbered_rows,
    observation=lambda number: number[:, None].expand(-1, 3).float().clone(),
    next=lambda number: {"reward": (number % 7).float()[:, None], "done": (number % 10 == 9)[:, None]},
)


class Reads:
    """Count the rows that are read for statistics, and act before each of the reads."""

    def __init__(self) -> None:
        self.count = 0
        self.before: Any = lambda: None

    def __call__(
        self, storage: ReadView, ids: IntArray, places: Sequence[int] | None = None
    ) -> tuple[IntArray, list[Array]]:
        self.before()
        self.count += ids.size
        return read_present(storage, ids, places)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads()
    monkeypatch.setattr(field_stats, "read_present", found)
    monkeypatch.setattr(field_stats, "_ROWS", 16)
    set_spare_slots(monkeypatch, 40)
    return found


@pytest.fixture
def ring(store_path: Path) -> Iterator[TensorDictReplayBuffer]:
    with expstore.open(store_path, capacity=1000, batch_size=8) as rb:
        rb.extend(rows(1000))
        yield rb


def test_rows_that_leave_during_a_call_are_missed_at_most(reads: Reads, ring: TensorDictReplayBuffer) -> None:
    more = iter([rows(600, start=1000)])

    def overtake() -> None:
        if reads.count > 200 and (batch := next(more, None)) is not None:
            ring.extend(batch)

    reads.before = overtake
    found = ring.columns.stats(fields=["number"])["number"]
    assert 400 <= found.count < 1000
    assert found.max == 999
    found = ring.columns.stats(fields=["number"])["number"]
    assert (found.count, found.min, found.max, found.mean) == (1000, 600, 1599, 1099.5)


@pytest.mark.slow
def test_content_that_is_replaced_during_a_call_is_not_mixed(
    reads: Reads, ring: TensorDictReplayBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(field_stats, "_ROWS", 250)
    ring.dumps(tmp_path / "versions")
    ring.extend(rows(1000, start=1000))
    acts = iter([lambda: ring.loads(tmp_path / "versions")])
    reads.before = lambda: next(acts, lambda: None)() if reads.count > 500 else None
    found = ring.columns.stats(fields=["number"])["number"]
    assert (found.count, found.min, found.max) == (1000, 0, 999)
    ring.extend(rows(1, start=1000))
    reads.before = lambda: ring.loads(tmp_path / "versions")
    with pytest.raises(StateError, match="replaced while it was read"):
        ring.columns.stats(fields=["number"])


def test_fields_are_chosen(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", layout="arrow", batch_size=4) as rb:
        rb.extend(
            TensorDict(
                {
                    "image": torch.full((6, 70, 70), 3, dtype=torch.uint8),
                    "phase": torch.zeros(6, dtype=torch.complex64),
                    "action": torch.arange(6),
                    "text": ["a", "bb", "c", "d", "e", "f"],
                    "next": {"reward": torch.arange(6.0)[:, None]},
                },
                [6],
            )
        )
        assert set(rb.columns.stats()) == {"action", ("next", "reward")}
        found = rb.columns.stats(fields=["image", ("next", "reward")])
        assert list(found) == ["image", ("next", "reward")]
        assert found["image"].mean.shape == (70, 70)
        assert (found["image"].max == 3).all()
        assert found["next", "reward"].std == pytest.approx(np.std(np.arange(6.0)))
        assert rb.columns.stats(fields=[]) == {}
        for name in ("text", "phase"):
            with pytest.raises(SchemaError, match=f"'{name}' is .* real numbers"):
                rb.columns.stats(fields=[name])
        with pytest.raises(SchemaError, match="no field 'nothing'"):
            rb.columns.stats(fields=["nothing"])
        for wrong in ("action", ("next", "reward")):
            with pytest.raises(TypeError, match="list of names"):
                rb.columns.stats(fields=wrong)


def test_packed_images_are_read_when_named(tmp_path: Path) -> None:
    frames = torch.arange(200, dtype=torch.uint8)[:, None, None].expand(-1, 84, 84).clone()
    with expstore.open(tmp_path / "run.exp", batch_size=4) as rb:
        rb.extend(TensorDict({"pixels": frames, "action": torch.arange(200)}, [200]))
        assert rb.storage.unviewed_places == {0}
        assert set(rb.columns.stats()) == {"action"}
        found = rb.columns.stats(fields=["pixels"])["pixels"]
        assert (found.mean == 99.5).all()
        assert (found.min == 0).all()
        assert (found.max == 199).all()


def test_a_store_without_rows_is_refused(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", batch_size=4) as rb:
        with pytest.raises(NotReadyError, match="no rows"):
            rb.columns.stats()
        rb.extend(rows(5))
        rb.empty()
        with pytest.raises(NotReadyError, match="no rows"):
            rb.columns.stats()
    with pytest.raises(StateError, match="closed"):
        rb.columns.stats()
