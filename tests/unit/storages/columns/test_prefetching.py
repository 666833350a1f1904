"""Prefetching of rows before they are copied changes only the time of a copy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from expstore.kernels.prefetch_rows import prefetch_rows
from expstore.storages.columns import prefetching
from expstore.storages.columns.prefetching import RowPrefetcher


class Asked:
    """Stands for the compiled loop, and notes what it is asked for."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[int], list[int], int]] = []

    def __call__(self, starts: np.ndarray, sizes: np.ndarray, slots: np.ndarray) -> None:
        prefetch_rows(starts, sizes, slots)
        self.calls.append((starts.tolist(), sizes.tolist(), slots.size))


def loaded() -> tuple[RowPrefetcher, Asked]:
    found, asked = RowPrefetcher(), Asked()
    found._loop = asked
    return found, asked


def test_asks_for_the_rows_of_the_columns_wanted() -> None:
    columns = [np.zeros((100, 3), np.float32), np.zeros(100, np.int64), np.zeros((100, 1), np.bool_)]
    prefetcher, asked = loaded()

    def views(places: Sequence[int]) -> list[np.ndarray]:
        return [columns[place] for place in places]

    prefetcher.ask(np.arange(32), range(3), views)
    prefetcher.ask(np.arange(20), [1], views)
    assert asked.calls == [
        ([column.ctypes.data for column in columns], [12, 8, 1], 32),
        ([columns[1].ctypes.data], [8], 20),
    ]


@pytest.mark.parametrize("slots", [np.arange(15), np.arange(100_000), np.arange(64)[::2]])
def test_does_not_ask_where_it_would_not_help(slots: np.ndarray) -> None:
    column = np.zeros((100_000, 3), np.float32)
    prefetcher, asked = loaded()
    prefetcher.ask(slots, range(1), lambda places: [column])
    assert asked.calls == []


def test_passes_over_addresses_without_memory() -> None:
    prefetch_rows(np.array([0, 1 << 46]), np.array([200, 7]), np.arange(100))


def test_samples_are_the_same_with_and_without(tmp_path: Path) -> None:
    import expstore

    rows = {"a": np.arange(3000, dtype=np.float32).reshape(1000, 3), "b": np.arange(1000)}
    batches: list[list[np.ndarray]] = []
    for number, loop in enumerate((None, prefetch_rows)):
        with expstore.open(tmp_path / f"{number}.exp", capacity=1000, batch_size=64, seed=1) as rb:
            rb.extend(rows)
            rb.storage._state.columns._prefetcher._loop = loop
            batches.append([rb.sample(as_numpy=True)["a"] for _ in range(5)])
    np.testing.assert_array_equal(batches[0], batches[1])


def test_it_keeps_no_storage_alive() -> None:
    """A forgotten store closes at once, without the garbage collector."""
    import weakref

    from expstore import MemoryStorage, TensorDictReplayBuffer

    rb = TensorDictReplayBuffer(storage=MemoryStorage(100), batch_size=32)
    rb.extend({"a": np.arange(100)})
    for _ in range(prefetching._BATCHES + 1):
        rb.sample()
    held = weakref.ref(rb.storage)
    del rb
    assert held() is None
