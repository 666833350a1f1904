"""`rb.columns.stats()`: which rows are read again, which fields have statistics, and errors."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import ListStorage, MemoryStorage, ReplayBuffer, TensorDictReplayBuffer
from expstore.buffers import field_stats
from expstore.core.values import Array, IntArray
from expstore.errors import NotReadyError, SchemaError, StateError
from expstore.storages.indexing import read_present
from expstore.storages.read_view import ReadView
from tests.support.batches import numbered_rows
from tests.support.forks import in_child
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

    def of(self, rb: Any) -> int:
        """Return how many rows a call reads."""
        before = self.count
        rb.columns.stats(fields=["number"])
        return self.count - before


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads()
    monkeypatch.setattr(field_stats, "read_present", found)
    monkeypatch.setattr(field_stats, "_BLOCK_ROWS", 16)
    set_spare_slots(monkeypatch, 40)
    return found


@pytest.fixture
def ring(store_path: Path) -> Iterator[TensorDictReplayBuffer]:
    with expstore.open(store_path, capacity=1000, batch_size=8) as rb:
        rb.extend(rows(1000))
        yield rb


def test_only_blocks_with_other_rows_are_read_again(reads: Reads, ring: TensorDictReplayBuffer) -> None:
    assert reads.of(ring) == 1000
    assert reads.of(ring) == 0
    ring.extend(rows(10, start=1000))
    assert 10 <= reads.of(ring) <= 10 + 2 * 16
    assert ring.columns.stats(fields=["number"])["number"].min == 10
    ring.set_at_("number", torch.tensor([-5, -6]), torch.tensor([500, 501]))
    assert 2 <= reads.of(ring) <= 2 * 16
    assert ring.columns.stats(fields=["number"])["number"].min == -6
    ring.columns.add("late", fill=1.0)
    assert reads.of(ring) == 1000


def test_many_changes_are_read_as_if_all_were(reads: Reads, ring: TensorDictReplayBuffer) -> None:
    reads.of(ring)
    for number in range(300):
        ring.set_at_("number", torch.tensor([-number]), torch.tensor([500]))
    assert reads.of(ring) == 1000
    assert ring.columns.stats(fields=["number"])["number"].min == -299


def test_a_change_during_a_call_is_read_by_the_next(reads: Reads, ring: TensorDictReplayBuffer) -> None:
    changes = iter([lambda: ring.set_at_("number", torch.tensor([-1]), torch.tensor([3]))])
    reads.before = lambda: next(changes, lambda: None)() if reads.count > 500 else None
    reads.of(ring)
    assert reads.of(ring) == 16
    assert ring.columns.stats(fields=["number"])["number"].min == -1


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
    reads: Reads, ring: TensorDictReplayBuffer, tmp_path: Path
) -> None:
    ring.dumps(tmp_path / "versions")
    ring.extend(rows(1000, start=1000))
    acts = iter([lambda: ring.loads(tmp_path / "versions")])
    reads.before = lambda: next(acts, lambda: None)() if reads.count > 500 else None
    found = ring.columns.stats(fields=["number"])["number"]
    assert (found.count, found.min, found.max) == (1000, 0, 999)
    assert reads.of(ring) == 1000  # what was kept before the restore is forgotten
    ring.extend(rows(1, start=1000))
    reads.before = lambda: ring.loads(tmp_path / "versions")
    with pytest.raises(StateError, match="replaced while it was read"):
        ring.columns.stats(fields=["number"])


def test_many_blocks_are_merged(reads: Reads, monkeypatch: pytest.MonkeyPatch, store_path: Path) -> None:
    monkeypatch.setattr(field_stats, "_BLOCKS", 20)
    with expstore.open(store_path, batch_size=8) as rb:
        rb.extend(rows(310))
        assert reads.of(rb) == 310
        for start in range(310, 3000, 10):
            rb.extend(rows(10, start=start))
            assert reads.of(rb) <= 256 + 10  # blocks of 16 have become blocks of 256 in the end
        found = rb.columns.stats(fields=["number"])["number"]
        assert (found.count, found.mean, found.max) == (3000, 1499.5, 2999)
        blocks = rb._stats_keeper._known[rb.schema[("number",)]]._blocks
        assert len(blocks) <= 20


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


def test_objects_have_no_statistics() -> None:
    rb = ReplayBuffer(storage=ListStorage(10))
    rb.extend([object(), object()])
    assert rb.columns.stats() == {}


def test_another_storage_is_read_again() -> None:
    rb = TensorDictReplayBuffer(storage=MemoryStorage(10), batch_size=4)
    rb.extend(rows(10))
    other = MemoryStorage(10)
    second = TensorDictReplayBuffer(storage=other, batch_size=4)
    second.extend(rows(10, start=50))
    assert rb.columns.stats()["number"].min == 0
    rb.set_storage(other)
    assert rb.columns.stats()["number"].min == 50


def test_copies_and_forks_have_their_own(ring: TensorDictReplayBuffer) -> None:
    wanted = ring.columns.stats()["number"].mean

    def check() -> None:
        assert ring.columns.stats()["number"].mean == wanted

    twin = copy.copy(ring)
    assert twin.columns.stats()["number"].mean == wanted
    twin.close()
    held, ready = threading.Event(), threading.Event()

    def block() -> None:
        with ring._stats_keeper._lock:
            ready.set()
            held.wait()

    thread = threading.Thread(target=block)
    thread.start()
    ready.wait()
    try:
        in_child(check)
    finally:
        held.set()
        thread.join()


def test_results_belong_to_the_caller(ring: TensorDictReplayBuffer) -> None:
    found = ring.columns.stats()["observation"]
    for part in (found.mean, found.std, found.min, found.max):
        part[:] = -1
    found = ring.columns.stats()["observation"]
    assert found.mean.tolist() == [499.5] * 3
    assert found.max.tolist() == [999.0] * 3


def test_observations_are_normalised(ring: TensorDictReplayBuffer) -> None:
    found = ring.columns.stats(fields=["observation"])["observation"]
    mean, std = (torch.from_numpy(part).float() for part in (found.mean, found.std + 1e-6))
    ring.append_transform(lambda batch: batch.set("observation", (batch["observation"] - mean) / std))
    batch = ring.sample(1000)["observation"]
    assert batch.dtype == torch.float32
    assert batch.abs().max() < 1.8
