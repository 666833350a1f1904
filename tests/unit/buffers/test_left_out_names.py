"""Names that samples add to rows: first rows lose them with a warning, and no field has one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.errors import SchemaError
from expstore.schema.row_fields import SAMPLE_ENTRIES

COLUMNS = {"x": np.zeros(2, np.float32), "index": np.arange(2), "id": np.arange(2)}


WAYS: dict[str, Callable[[TensorDictReplayBuffer], Any]] = {
    "dict": lambda rb: rb.extend(COLUMNS),
    "TensorDict": lambda rb: rb.extend(TensorDict({k: torch.from_numpy(v) for k, v in COLUMNS.items()}, [2])),
    "list": lambda rb: rb.extend([{name: values[0] for name, values in COLUMNS.items()}]),
    "table": lambda rb: rb.extend(pa.table(COLUMNS)),
    "add": lambda rb: rb.add({name: values[0] for name, values in COLUMNS.items()}),
}


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if "leaves out" in text]


@pytest.mark.parametrize("way", WAYS)
def test_first_rows_with_names_of_samples_warn_once(
    way: str, store_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "expstore"), expstore.open(store_path, batch_size=2) as rb:
        WAYS[way](rb)
        WAYS[way](rb)
        assert rb.storage.schema is not None
        assert rb.storage.schema.keys == (("x",),)
    (text,) = _warnings(caplog)
    assert "the first rows have 'id', 'index', which the store leaves out" in text
    assert "rename them" in text


def test_samples_are_written_again_without_a_warning(
    store_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "expstore"), expstore.open(store_path, batch_size=2) as rb:
        rb.extend({"x": np.zeros(2, np.float32)})
        rb.extend(rb.sample())
        assert len(rb) == 4
    assert not _warnings(caplog)


def test_no_field_has_the_name_of_an_entry_of_samples(store_path: Path) -> None:
    other = store_path.with_name("other.exp")
    with expstore.open(store_path) as rb:
        for number, name in enumerate(SAMPLE_ENTRIES):
            spec = expstore.Composite({name: expstore.Unbounded(shape=())})
            for schema in ({name: "int64", "x": "float32"}, spec):
                with pytest.raises(SchemaError, match=f"no field can be named '{name}'"):
                    expstore.open(other, schema=schema)
                assert not other.exists()
            if not number:
                rb.extend({"x": np.zeros(2, np.float32), "inner": {name: np.zeros(2)}})
            with pytest.raises(SchemaError, match=f"no field can be named '{name}'"):
                rb.columns.add(name, fill=0)
