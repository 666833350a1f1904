"""Columns of a process that may have few files open: their files are opened again for each use."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

import expstore
from expstore.disk.files import Disk, ReopenedFile
from expstore.errors import StorageError
from expstore.maintenance.verify import verify
from tests.support.open_files import open_files

FIELDS = 20


@pytest.fixture(params=[0, 8], ids=["none stays open", "some stay open"])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let this process believe that it may have few files open; return how many of columns stay open."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4 * request.param, -1))
    return int(request.param)


@pytest.mark.parametrize("capacity", [None, 5000])
def test_a_store_of_many_columns_reads_and_writes_with_few_files_open(
    most: int, capacity: int | None, store_path: Path
) -> None:
    def rows(count: int, start: int = 0) -> dict[str, np.ndarray]:
        return {f"f{n:02d}": np.arange(start, start + count) * 100 + n for n in range(FIELDS)}

    expected = np.arange(6003)
    with expstore.open(store_path, capacity=capacity, batch_size=4) as rb:
        before = len(open_files())
        rb.extend(rows(6000))
        assert (
            len(open_files()) <= before + most + 3
        )  # and the files that the store opens with its first rows
        for n in range(3):
            rb.add({name: values[0] for name, values in rows(1, 6000 + n).items()})
        rb.update_priority(np.arange(0, 4000, 2), np.ones(2000))
        rb.flush()
        rb[[1, 3]] = rb[[3, 1]]
        rb.flush()
        kept = expected if capacity is None else expected[-capacity:]
        base = rb[:]["f00"].numpy() // 100
        assert sorted(base) == kept.tolist()
        for n in range(FIELDS):
            assert (rb[:][f"f{n:02d}"].numpy() == base * 100 + n).all()
    assert verify(store_path) == []
    with expstore.open(store_path) as rb:
        assert (rb[:]["f19"].numpy() == base * 100 + 19).all()
        rb.extend(rows(10))
    assert verify(store_path) == []


def test_a_file_that_was_replaced_is_not_written_to(tmp_path: Path) -> None:
    disk, path = Disk(), tmp_path / "a"
    path.write_bytes(b"before")
    file = ReopenedFile(disk.open(path))
    file.write(b"B", 0)
    assert file.read(0, 6) == b"Before"
    path.rename(tmp_path / "b")
    path.write_bytes(b"another")
    for act in (lambda: file.write(b"x", 0), lambda: file.read(0, 1), file.sync, lambda: file.truncate(0)):
        with pytest.raises(StorageError, match="was deleted, moved or replaced"):
            act()
    assert path.read_bytes() == b"another"


def test_sums_of_a_block_are_those_of_its_map(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with expstore.open(store_path) as rb:
        rb.extend({"x": np.arange(5000)})
        rb.flush()
        column = rb.storage.state.columns.flat[0]
        read = [column.sum_run(slot, 4096) for slot in (0, 4096)]
        monkeypatch.setattr("expstore.storages.columns.flat.KEEP_GIL_BYTES", 0)
        assert read == [column.sum_run(slot, 4096) for slot in (0, 4096)]
