"""Open files of followers: their number does not grow with openings and changes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.disk.files import File
from expstore.disk.mapped_files import AddressRange
from tests.support.open_files import open_files
from tests.support.tuned import few_rows_in_memory

pytestmark = pytest.mark.index


@pytest.fixture(autouse=True)
def _few_rows_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows_in_memory(monkeypatch)


KINDS: dict[str, dict[str, Any]] = {
    "packed": {"layout": "packed"},
    "flat": {"layout": "flat"},
    "arrow": {"layout": "arrow"},
}


def count_files() -> int:
    return len(open_files())


def check_constant(counts: list[int]) -> None:
    """Assert that no file more is open in the end; the writer beside the follower opens and closes some."""
    assert max(counts[3:]) <= max(counts[:3])


def rows(kind: str, count: int, start: int = 0) -> TensorDict:
    number = torch.arange(start, start + count)
    image = number[:, None].repeat(1, 300).to(torch.uint8)
    batch = TensorDict({"number": number, "image": image}, [count])
    if kind == "arrow":
        batch["text"] = NonTensorStack(*("t" * (n % 5) for n in number.tolist()))
    return batch


def make(path: Path, kind: str, count: int = 30) -> Path:
    """A closed store whose last chunk is not full, and one whose last shard has no name yet."""
    with open_new(path, kind) as rb:
        rb.extend(rows(kind, count))
    return path


def open_new(path: Path, kind: str) -> TensorDictReplayBuffer:
    return expstore.open(path, seed=0, **KINDS[kind])


def open_often(path: Path, times: int, *, close: bool) -> None:
    for _ in range(times):
        rb = expstore.open(path, mode="r")
        assert rb[29]["number"] == 29
        if close:
            rb.close()


@pytest.mark.some(4)
@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_an_opening_leaves_no_file_open(store_path: Path, kind: str, close: bool) -> None:
    """Also next to a writer."""
    make(store_path, kind)
    with contextlib.nullcontext() if close else expstore.open(store_path) as rb:
        if rb is not None:
            rb.storage.background.stop()  # it closes files that have not been used for a second
        open_often(store_path, 1, close=close)
        before = count_files()
        open_often(store_path, 5, close=close)
        assert count_files() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_follower_keeps_no_file_of_the_writers_before(store_path: Path, kind: str) -> None:
    make(store_path, kind)
    with expstore.open(store_path, mode="r") as follower:
        counts = []
        for cycle in range(5):
            with expstore.open(store_path) as rb:
                rb.extend(rows(kind, 20, start=30 + 20 * cycle))
                assert len(follower) == 50 + 20 * cycle
            follower.sample(3)
            assert follower[49 + 20 * cycle]["number"] == 49 + 20 * cycle
            counts.append(count_files())
    check_constant(counts)


@pytest.mark.parametrize("kind", ["packed", "flat"])
def test_a_follower_keeps_no_file_of_columns_before(store_path: Path, kind: str) -> None:
    make(store_path, kind)
    with expstore.open(store_path) as rb, expstore.open(store_path, mode="r") as follower:
        counts = []
        for cycle in range(4):
            rb.columns.add(f"more{cycle}", fill=cycle)
            assert follower[29][f"more{cycle}"] == cycle
            rb.columns.drop(f"more{cycle}")
            assert f"more{cycle}" not in follower[29].keys()  # noqa: SIM118
            counts.append(count_files())
    check_constant(counts)


def load_often(path: Path, version: Path, times: int) -> list[int]:
    """Load a version beneath a follower, again and again; return how many files were open each time."""
    counts = []
    with expstore.open(path) as rb, expstore.open(path, mode="r") as follower:
        rb.dumps(version)
        for _ in range(times):
            rb.loads(version)
            assert len(follower) == 30
            assert follower["number"].tolist() == list(range(30))
            counts.append(count_files())
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_follower_keeps_no_file_of_loads_before(store_path: Path, tmp_path: Path, kind: str) -> None:
    counts = load_often(make(store_path, kind), tmp_path / "version", 5)
    check_constant(counts)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_closed_source_can_still_be_read(store_path: Path, kind: str) -> None:
    make(store_path, kind)
    with expstore.open(store_path, mode="r") as follower:
        columns: Any = follower.storage._source.columns
        with expstore.open(store_path) as rb:
            rb.extend(rows(kind, 20, start=30))
            assert len(follower) == 50
            before = count_files()
            # As a thread does that began to read before the follower looked again.
            numbers, _ = columns.gather_rows(torch.arange(30).numpy(), [0, 1])
            assert list(numbers) == list(range(30))
            assert count_files() == before


def test_a_look_that_fails_leaves_no_file_open(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(store_path, "packed")
    failed: list[Exception] = []
    with monkeypatch.context() as patch:
        patch.setattr("expstore.storages.follower._Source.holds", lambda *_: False)
        try:
            expstore.open(store_path, mode="r")
        except expstore.errors.StorageError as exc:
            failed.append(exc)  # its traceback holds what the look opened
    assert failed
    assert open_files(store_path / "columns") == []


@pytest.mark.parametrize("kind", ["packed", "arrow"])
def test_a_file_may_be_ended_while_it_is_opened(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A writer that ends a file cuts it to its true length: just then a follower has looked at that."""
    monkeypatch.setattr(tuning, "UNBOUNDED_PACKED_SHARD_ROWS", 256)
    monkeypatch.setattr(tuning, "ARROW_SEGMENT_BYTES", 1 << 12)
    lengths: list[int] = []
    inner = AddressRange.attach

    def end_first(addresses: AddressRange, file: File, **options: Any) -> None:
        filling = file.path.name.startswith("open.") or os.path.getsize(file.path) == 1 << 12
        if not lengths and filling:
            lengths.append(os.path.getsize(file.path))
            extend(350, 600)
            lengths.append(os.path.getsize(file.path))
        inner(addresses, file, **options)

    def extend(first: int, last: int) -> None:
        for start in range(first, last, 10):
            rb.extend(rows(kind, 10, start=start))

    with open_new(store_path, kind) as rb:
        extend(0, 100)
        with expstore.open(store_path, mode="r") as follower:
            extend(100, 350)
            monkeypatch.setattr(AddressRange, "attach", end_first)
            assert follower["number"].tolist()[:350] == list(range(350))
            assert len(follower) == 600
            assert follower["number"].tolist() == list(range(600))
    assert lengths[1] < lengths[0]


@pytest.mark.torture
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_openings_leave_no_file_open(store_path: Path, kind: str) -> None:
    make(store_path, kind)
    open_often(store_path, 1, close=True)
    before = count_files()
    open_often(store_path, 1000, close=True)
    assert count_files() == before


@pytest.mark.torture
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_loads_leave_no_file_open(store_path: Path, tmp_path: Path, kind: str) -> None:
    counts = load_often(make(store_path, kind), tmp_path / "version", 100)
    check_constant(counts)
