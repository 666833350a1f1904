"""A reader of packed columns loads the compiled loop only when it reads much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.storages.columns.packed import column as packed_column


def make(path: Path) -> torch.Tensor:
    random = np.random.default_rng(3)
    frames = torch.from_numpy(random.integers(0, 4, (300, 40, 40), np.uint8))
    with expstore.open(path, layout="packed") as rb:
        rb.extend(TensorDict({"pixels": frames}, [300]))
    return frames


def column_of(rb: Any) -> Any:
    columns = rb.storage._source.columns
    return next(one for one in columns.columns if isinstance(one, packed_column.PackedRows))


def test_a_reader_that_reads_much_loads_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = make(tmp_path / "x.exp")
    monkeypatch.setattr(packed_column, "_WORTH_LOADING", 40)
    with expstore.open(tmp_path / "x.exp", mode="r", batch_size=64) as rb:
        column = column_of(rb)
        assert torch.equal(rb[:20]["pixels"], frames[:20])
        assert column._loader is None  # little was read
        while column._loader is None:
            rb.sample()
        column._loader.join()
        assert column._take_rows is not None
        before = column._unpacked_slowly
        assert torch.equal(rb[:]["pixels"], frames)
        assert column._unpacked_slowly == before
