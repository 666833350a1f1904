"""The repr of a storage: kind, path, rows, capacity."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import expstore

ROWS = {"a": np.arange(5)}


def test_a_store_on_disk_says_kind_path_and_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with expstore.open(path, capacity=10, batch_size=2) as rb:
        rb.extend(ROWS)
        rb.flush()
        storage = rb.storage
        assert repr(storage) == f"ZarrStorage('{path}', 5 rows, capacity 10)"
        with expstore.open(path, mode="r", batch_size=2) as reader:
            assert repr(reader.storage) == f"FollowerStorage('{path}', 5 rows, capacity 10)"
    assert repr(storage) == f"ZarrStorage('{path}', closed, capacity 10)"


def test_rows_in_memory_have_no_path() -> None:
    rb = expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage())
    rb.extend(ROWS)
    assert repr(rb.storage) == "MemoryStorage(5 rows)"
