"""A buffer as a torch dataset: next to a writer, in workers, each row or slice once and whole."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import expstore
from expstore.errors import NoRowError
from tests.support.batches import episode_rows

FORK = {"num_workers": 2, "multiprocessing_context": "fork"}


#: Rows that show whether they are whole: `frame` repeats the number 300 times.
rows = partial(episode_rows, frame=lambda number: number[:, None].expand(-1, 300).contiguous())


def check_whole(batch: Any) -> None:
    assert (batch["frame"] == batch["number"][..., None]).all()
    assert (batch["next"]["reward"][..., 0] == batch["number"]).all()


class Writer:
    """Write until told to stop."""

    def __init__(self, rb: Any, first: int, count: int) -> None:
        self._rb, self._first, self._count = rb, first, count
        self._stop = threading.Event()
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self.written = 0

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._rb.extend(rows(self._count, self._first + self.written))
                self.written += self._count
        except BaseException as exc:
            self.failure = exc

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        assert self.failure is None
        assert self.written


@pytest.mark.guarantee(
    "draw/epochs",
    "In a `DataLoader`, each row is returned once per epoch, by one worker.",
)
@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("capacity", [None, 400])
def test_each_row_comes_once_per_epoch_during_writes(tmp_path: Path, capacity: int | None) -> None:
    with expstore.open(tmp_path / "run.exp", capacity=capacity) as rb:
        rb.extend(rows(400))
        dataset = rb.to_torch_dataset()
        loader = DataLoader(dataset, 32, shuffle=True, collate_fn=dataset.collate, **FORK)
        for _ in range(2):
            seen: list[int] = []
            count = dataset.refresh()
            with Writer(rb, int(rb.storage.last), 10):
                for batch in loader:
                    check_whole(batch)
                    seen += batch["number"].tolist()
            # In a ring newer rows may stand at an index; each index comes once.
            assert sorted(number % (capacity or 1 << 40) for number in seen) == list(range(count))
        assert capacity or count > 400


@pytest.mark.guarantee("draw/epochs")
@pytest.mark.some(1)
@pytest.mark.parametrize("workers", [0, 2])
def test_each_slice_is_one_workers(tmp_path: Path, workers: int) -> None:
    """Workers that know of other slices, because a writer goes on, repeat none and miss none."""
    options = FORK if workers else {}
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(rows(400))
        dataset = rb.to_torch_dataset(5)
        loader: Any = DataLoader(dataset, 4, collate_fn=dataset.collate, **options)
        orders = []
        for _ in range(2):
            first = len(rb)
            with Writer(rb, first, 10):
                seen = []
                for batch in loader:
                    check_whole(batch)
                    assert (batch["number"].diff(dim=1) == 1).all()
                    seen += batch["number"][:, 0].tolist()
            assert len(set(seen)) == len(seen)
            assert set(range(0, first, 5)) <= set(seen)
            orders.append([number for number in seen if number < 400])
        assert orders[0] != orders[1]
        assert orders[0] != sorted(orders[0])


@pytest.mark.slow
def test_the_order_follows_from_torchs_seed(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(rows(200))
        found = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            loader = DataLoader(rb.to_torch_dataset(5, rows="dict"), 4, **FORK)
            found.append([number for batch in loader for number in batch["number"][:, 0].tolist()])
        assert found[0] == found[1] != found[2]
        plain = [s["number"][0].item() for s in rb.to_torch_dataset(5, shuffle=False)]
        assert plain == list(range(0, 200, 5))


@pytest.mark.slow
def test_slices_that_are_overwritten_are_left_out(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", capacity=300) as rb:
        rb.extend(rows(300))
        with Writer(rb, 300, 7):
            for _ in range(3):
                for batch in DataLoader(rb.to_torch_dataset(4, rows="dict"), 2, drop_last=True, **FORK):
                    check_whole(batch)
                    assert (batch["number"].diff(dim=1) == 1).all()


def test_slices_by_stride_and_length(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(torch.stack([rows(23, length=10), rows(23, 1000, length=1000)]))

        def slices(*arguments: Any, **options: Any) -> list[list[int]]:
            return [s["number"].tolist() for s in rb.to_torch_dataset(*arguments, shuffle=False, **options)]

        def expected(length: int, stride: int, strict: bool) -> list[list[int]]:
            found = []
            for first, count in ((0, 10), (1000, 23), (10, 10), (20, 3)):
                for start in range(0, count, stride):
                    one = list(range(first + start, first + min(start + length, count)))
                    if len(one) == length or not strict:
                        found.append(one)
            return sorted(found)

        for length, stride in ((4, 4), (4, 2), (3, 5), (30, 7), (1, 1)):
            for strict in (True, False):
                found = slices(length, stride=stride, strict_length=strict)
                assert sorted(found) == expected(length, stride, strict)


def test_rows_one_by_one(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp", capacity=50) as rb:
        rb.extend(rows(30))
        dataset = rb.to_torch_dataset(rows="dict")
        assert len(dataset) == 30
        assert dataset[3]["number"].item() == dataset[-27]["number"].item() == 3
        for wrong in (30, -31):
            with pytest.raises(NoRowError, match=f"no row {wrong}: there are 30"):
                dataset[wrong]
        batches = list(DataLoader(dataset, 8))
        assert torch.cat([batch["next"]["reward"] for batch in batches])[:, 0].tolist() == list(range(30))
        rb.empty()
        assert (len(dataset), dataset.refresh(), len(dataset)) == (30, 0, 0)
        rb.extend(rows(20, 500))
        assert dataset.refresh() == 20
        assert [dataset[number]["number"].item() for number in range(20)] == list(range(500, 520))
    with expstore.open(tmp_path / "grown.exp") as rb:
        rb.extend(rows(30))
        rb.empty()
        rb.extend(rows(5, 100))
        assert [row["number"].item() for row in DataLoader(rb.to_torch_dataset(rows="dict"), 1)] == list(
            range(100, 105)
        )


def test_rows_of_small_batches_are_seen_by_workers(tmp_path: Path) -> None:
    """They are on their way to the columns when `add` returns, and are waited for."""
    with expstore.open(tmp_path / "run.exp") as rb:
        for number in range(40):
            rb.add(rows(1, number)[0])
        dataset = rb.to_torch_dataset(rows="dict")
        found = [number for batch in DataLoader(dataset, 8, **FORK) for number in batch["number"].tolist()]
        assert found == list(range(40))


def test_meaningless_arguments_are_refused(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "run.exp") as rb:
        rb.extend(rows(30))
        for options in ({"stride": 2}, {"shuffle": False}, {"strict_length": False}):
            with pytest.raises(ValueError, match="apply to slices only"):
                rb.to_torch_dataset(**options)
        with pytest.raises(ValueError, match="rows is 'list'"):
            rb.to_torch_dataset(rows="list")
        for wrong in (0, 2.0, True):
            with pytest.raises(ValueError, match="slice_len must be an integer"):
                rb.to_torch_dataset(wrong)
    storage = expstore.MemoryStorage(100, ndim=2)
    lanes = expstore.TensorDictReplayBuffer(storage=storage)
    lanes.extend(torch.stack([rows(30), rows(30, 100)]))
    dataset = lanes.to_torch_dataset()
    assert len(dataset) == 60
    assert sorted(row["number"].item() for row in dataset) == [*range(30), *range(100, 130)]
    assert dataset.__getitems__([0, 59])["number"].tolist() == [0, 129]
    with pytest.raises(ValueError, match="ndim > 1"):
        lanes.to_torch_dataset(3)
