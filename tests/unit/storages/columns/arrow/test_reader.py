"""Segments that are read while a writer appends: what other threads read in the middle of a look."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from expstore.disk.files import Disk
from expstore.schema.arrow_types import type_text
from expstore.schema.schema import ARROW, Field
from expstore.storages.columns.arrow.reader import SegmentReader
from expstore.storages.columns.arrow.segments import Segments
from expstore.storages.columns.arrow.writer import SegmentWriter

FIELDS = [Field(("text",), ARROW, (), type_text(pa.string()))]
SLOTS = 64


def texts(first: int, last: int) -> list[str]:
    return [f"row {number}" for number in range(first, last + 1)]


@pytest.mark.parametrize("look", ["look_to", "gather_ids"])
def test_a_ring_stays_readable_while_uncommitted_rows_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """Ids of slots follow from the newest id, which must not change while later batches are dropped."""
    folder = tmp_path / "segments"
    folder.mkdir()
    writer = SegmentWriter(Disk(), folder, FIELDS, SLOTS)
    reader = SegmentReader(Disk(), folder, FIELDS, SLOTS)
    found: list[list[str]] = []

    def read() -> list[str]:
        ids = reader.ids_of(np.arange(20))
        values: list[str] = Segments.gather_ids(reader, ids, [0])[0].to_pylist()
        return values

    with ThreadPoolExecutor(1) as pool:

        def put(self: Segments, *args: Any) -> Any:
            if self is reader:  # in the middle of show_all or show
                found.append(pool.submit(read).result())
            return place(self, *args)

        def show_all(self: Segments, *args: Sequence[Any], **options: Any) -> None:
            show(self, *args, **options)
            found.append(pool.submit(read).result())

        writer.append(1, [pa.array(texts(1, 20))])
        reader.look()
        reader.look_to(20)
        place, show = Segments._put, Segments.show_all
        monkeypatch.setattr(Segments, "_put", put)
        monkeypatch.setattr(SegmentReader, "show_all", show_all)
        # The newest rows are in the file before their record is; they take the slots of the oldest.
        writer.append(21, [pa.array(texts(21, 50))])
        writer.append(51, [pa.array(texts(51, SLOTS + 10))])
        if look == "look_to":
            reader.look_to(50)
        else:
            reader.gather_ids(np.array([0]), [0])  # a missing row, which makes the reader look again
    assert found
    assert found == [texts(1, 20)] * len(found)
    assert read() == texts(1, 20)
    reader.close()
    writer.close()
