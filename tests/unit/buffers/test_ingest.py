"""The path of a write, with a sampler and a row style that record their calls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore import MemoryStorage
from expstore.buffers.ingest import Ingest
from expstore.buffers.row_index import RowIndex
from expstore.buffers.row_styles import PlainRows
from expstore.buffers.store_handle import StoreHandle
from expstore.buffers.write_options import WriteOptions
from expstore.core.values import Array
from expstore.errors import NotReadyError, SchemaError
from expstore.rate_limiters import SampleToInsertRatio
from expstore.schema.schema import Schema
from expstore.transforms import Compose
from expstore.writers import RoundRobinWriter


class Style(PlainRows):
    """Take priorities from `p`; refuse data that says so."""

    def check_data(self, data: Any, *, has_fields: bool) -> None:
        if "refused" in data:
            raise SchemaError("refused")

    def takes_priorities(self, asked: bool | None) -> bool:
        return bool(asked)

    def priorities_in(self, sampler: Any, schema: Schema, columns: Any) -> Array:
        found: Array = columns[schema.place(("p",))].astype(np.float32)
        return found


class Writes:
    """An ingest with what it needs.

    Args:
        transform: What is done to rows.
        limiter: How fast rows may come.
    """

    def __init__(self, *, transform: Any = None, limiter: Any = None) -> None:
        self.written: list[list[int]] = []
        sampler = SimpleNamespace(hears_writes=True, on_write=lambda ids: self.written.append(ids.tolist()))
        sampling: Any = SimpleNamespace(sampler=sampler, own_keys=frozenset({"index"}))
        self.store = StoreHandle(MemoryStorage(10))
        self.ingest = Ingest(
            self.store,
            RowIndex(self.store, None),
            sampling,
            Style(),
            Compose.of(transform),
            RoundRobinWriter(),
            limiter,
            skips_metadata=False,
        )
        self.store.add_part(self.ingest)
        if limiter is not None:
            limiter.attach(self.store.storage)


def rows(count: int, first: int = 0, **more: Any) -> TensorDict:
    numbers = torch.arange(first, first + count)
    return TensorDict({"number": numbers, "p": numbers + 1.0, **more}, [count])


def test_rows_get_indices_and_the_sampler_hears_of_their_ids() -> None:
    writes = Writes()
    assert writes.ingest.append(rows(8), WriteOptions()).tolist() == [*range(8)]
    assert writes.ingest.append(rows(4), WriteOptions()).tolist() == [8, 9, 0, 1]
    assert writes.ingest.append(rows(1), WriteOptions(return_ids=True)).tolist() == [13]
    assert writes.written == [[*range(1, 9)], [9, 10, 11, 12], [13]]


def test_root_keys_of_samples_are_skipped() -> None:
    writes = Writes()
    writes.ingest.append(rows(3, index=torch.zeros(3)), WriteOptions())
    assert writes.store.storage.require_schema().keys == (("number",), ("p",))


def test_the_style_decides_about_data_and_priorities() -> None:
    writes = Writes()
    with pytest.raises(SchemaError, match="refused"):
        writes.ingest.append(rows(3, refused=torch.zeros(3)), WriteOptions())
    writes.ingest.append(rows(3), writes.ingest.options(update_priority=True))
    writes.ingest.append(rows(2), writes.ingest.options())
    assert writes.store.storage.priorities.values[:3].tolist() == [1.0, 2.0, 3.0]
    assert writes.written == [[1, 2, 3], [4, 5]]


def test_rows_that_are_not_transitions_are_dropped() -> None:
    writes = Writes()
    mask = torch.tensor([True, False, True])
    batch = rows(3).set(("collector", "mask"), mask)
    assert writes.ingest.append(batch, WriteOptions()).tolist() == [0, -1, 1]
    batch[("collector", "mask")][:] = False
    assert writes.ingest.append(batch, WriteOptions()).tolist() == [-1, -1, -1]
    assert writes.written == [[1, 2]]


def test_a_transform_may_keep_everything_back() -> None:
    writes = Writes(transform=SimpleNamespace(forward=lambda batch: batch, inv=lambda batch: None))
    assert writes.ingest.append(rows(3), WriteOptions()).tolist() == []
    assert (len(writes.store.storage), writes.written) == (0, [])


def test_a_repeated_write_returns_what_the_first_one_did() -> None:
    writes = Writes()
    options = writes.ingest.options(idempotency_key="once")
    assert writes.ingest.append(rows(3), options).tolist() == [0, 1, 2]
    assert writes.ingest.append(rows(3), options).tolist() == [0, 1, 2]
    unread = object()  # the answer is known before the rows are looked at
    assert writes.ingest.append(unread, options._replace(return_ids=True)).tolist() == [1, 2, 3]
    assert writes.written == [[1, 2, 3]]


def test_a_write_waits_for_its_limiter() -> None:
    limiter = SampleToInsertRatio(1, 2, 4, timeout=0)
    writes = Writes(limiter=limiter)
    writes.ingest.append(rows(6), WriteOptions())
    with pytest.raises(NotReadyError, match="insert"):
        writes.ingest.append(rows(1), WriteOptions())
    assert writes.written == [[1, 2, 3, 4, 5, 6]]


def test_another_schema_is_read_by_another_reader() -> None:
    writes = Writes()
    writes.ingest.append(rows(3), WriteOptions())
    former = writes.store.replace(MemoryStorage(10))
    wide = TensorDict({"wide": torch.zeros(2, 5)}, [2])
    assert writes.ingest.append(wide, WriteOptions()).tolist() == [0, 1]
    assert (len(former), len(writes.store.storage)) == (3, 2)


@pytest.mark.parametrize("single", [True, False])
def test_the_bits_of_bfloat16_are_no_values_of_it(tmp_path: Path, single: bool) -> None:
    with expstore.open(tmp_path / "a.exp", capacity=10) as rb:
        for _ in range(2):  # the first rows fix what later ones are compared with
            rb.extend(TensorDict({"a": torch.ones(2, 3, dtype=torch.bfloat16)}, [2]))
        bits = torch.ones((3,) if single else (1, 3), dtype=torch.uint16)
        write = rb.add if single else rb.extend
        for rows in ({"a": bits.numpy()}, TensorDict({"a": bits}, [] if single else [1])):
            with pytest.raises(expstore.errors.SchemaError, match="uint16"):
                write(rows)
        assert rb[:]["a"].tolist() == [[1.0] * 3] * 4
