"""Flat columns of which rows lie with the next ones: written, changed, read again and summed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from expstore.core import tuning
from expstore.core.values import cut_run
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Field
from expstore.storages.columns.checksums import BLOCK_ROWS, Checksums
from expstore.storages.columns.column_set import ColumnGroup
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.dedup import SharedColumn, runs_of

pytestmark = pytest.mark.usefixtures("no_syncs")

WIDTH = 24
FIELDS = (Field(("a",), "uint8", (WIDTH,)), Field(("next", "a"), "uint8", (WIDTH,)), *ROW_FIELDS)


class Rows:
    """Two columns in a folder, and what was written to them."""

    def __init__(self, folder: Path, slots: int | None, reach: int, fields: Any = FIELDS) -> None:
        self.folder, self.slots, self.reach, self.fields = folder / "columns", slots, reach, fields
        ColumnGroup.create(Disk(), self.folder, fields, slots, None, {}, (), {("a",)})
        self.group = self.open()
        self.last, self.rows = 0, dict[int, tuple[bytes, bytes]]()
        self.random = np.random.default_rng(3)

    def open(self) -> WritableColumns:
        group = WritableColumns(Disk(), self.folder, self.fields, self.slots, reach=self.reach)
        group.open_shards()
        return group

    @property
    def column(self) -> SharedColumn:
        return self.group.shared[0]

    def frame(self) -> bytes:
        return self.random.integers(0, 256, self.fields[0].row_bytes, np.uint8).tobytes()

    def extend(self, count: int, lanes: int = 1, new: float = 0.1) -> None:
        """Write rows, most of which are the next ones of those `lanes` before them."""
        made = []
        for row in range(self.last + 1, self.last + count + 1):
            before = self.rows.get(row - lanes)
            here = self.frame() if before is None or self.random.random() < new else before[1]
            self.rows[row] = here, self.frame()
            made.append(self.rows[row])
        self.put(made)

    def put(self, made: list[tuple[bytes, bytes]]) -> None:
        count, first = len(made), self.last + 1
        ids = np.arange(first, first + count)
        columns = [
            np.frombuffer(b"".join(part), np.uint8).reshape(count, *self.fields[0].shape)
            for part in zip(*made, strict=True)
        ]
        pieces = cut_run(first, count, self.slots)
        self.group.write(pieces, columns, np.stack([ids] * 4), np.ones(count, np.float32))
        self.last += count

    @property
    def kept(self) -> list[int]:
        """Rows that are still there, and those with which they lie."""
        low = 0 if self.slots is None else max(0, self.last - self.slots + self.reach)
        return list(range(low + 1, self.last + 1))

    def slots_of(self, ids: list[int]) -> Any:
        found = np.array(ids, np.int64) - 1
        return found if self.slots is None else found % self.slots

    def check(self, group: ColumnGroup) -> None:
        ids = self.random.permutation(self.kept).tolist()
        ids += ids[:3]
        slots = self.slots_of(ids)
        wanted = [b"".join(self.rows[one][n] for one in ids) for n in (0, 1)]
        assert [part.tobytes() for part in group.take(slots, [0, 1])] == wanted
        assert [part.tobytes() for part in group.take(slots, [1, 0])] == wanted[::-1]
        assert group.columns[0].take(slots).tobytes() == wanted[0]
        for slot, offset, n in cut_run(self.kept[0], len(self.kept), self.slots):
            ids = self.kept[offset : offset + n]
            for rows in (group.columns[0].part(slot, n), group.columns[0].copy(slot, n)):
                assert rows.tobytes() == b"".join(self.rows[one][0] for one in ids)

    def check_all(self) -> None:
        self.check(self.group)
        reader = ColumnGroup(Disk(), self.folder, self.fields, self.slots, write=False)
        reader.look(self.last if self.slots is None else min(self.last, self.slots))
        self.check(reader)
        reader.do_without_threads()
        self.check(reader)
        for column in reader.arrays:
            column.fills = True  # as where reading a hole takes space
        self.check(reader)
        reader.close()


@pytest.fixture
def no_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give back space byte by byte, and soon: a byte too much is a row that is lost."""
    monkeypatch.setattr(tuning, "DEDUP_PAGE_BYTES", 1)
    monkeypatch.setattr(tuning, "DEDUP_FREE_BYTES", 2 * WIDTH)


@pytest.mark.usefixtures("no_pages")
@settings(max_examples=60, deadline=None)
@given(
    slots=st.sampled_from([None, 40, 4096 + 17]),
    reach=st.integers(1, 9),
    acts=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 4), st.floats(0, 1)), min_size=1, max_size=20),
)
def test_rows_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, slots: int | None, reach: int, acts: list[Any]
) -> None:
    rows = Rows(tmp_path_factory.mktemp("rows"), slots, reach)
    for number, (count, lanes, new) in enumerate(acts):
        rows.extend(count, lanes, new)
        if number % 5 == 4:
            rows.group.close()
            rows.group = rows.open()
        rows.check_all()
    rows.group.close()


@pytest.mark.parametrize("slots", [None, 5000])
def test_a_row_that_comes_next_takes_no_place(tmp_path: Path, slots: int | None) -> None:
    rows = Rows(tmp_path, slots, 100)
    for _ in range(20):
        rows.extend(50, new=0)
    distances = rows.column.distances.view[:1000]
    np.testing.assert_array_equal(distances, [0, *[1] * 999])
    assert not rows.column.raw(1, 999).any()
    rows.check_all()
    rows.group.close()


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("away", ["next/a", "_row/distance/a", "_row/id", "a"])
def test_a_shard_that_is_gone_is_no_rows(tmp_path: Path, away: str, fills: bool) -> None:
    """Neither where it must be there nor where a power cut may have taken it."""
    rows = Rows(tmp_path, 40, 5)
    rows.extend(30)
    rows.group.close()
    (shard,) = (path for path in (rows.folder / away / "c").rglob("0") if path.is_file())
    shard.unlink()
    for due in (True, False):
        reader = ColumnGroup(Disk(), rows.folder, rows.fields, 40, write=False)
        for column in reader.arrays:
            column.fills = fills
        reader.look(30, due=due)
        if due:
            with pytest.raises(CorruptionError, match="is missing"):
                _ = [column.copy(0, 30) for column in reader.columns]
        else:
            assert reader.checksum(1, 30) == -1
            assert reader.ready == 0
        reader.close()


def used(column: SharedColumn) -> int:
    """How many bytes of the disk the rows of a column take."""
    return sum(os.stat(file.path).st_blocks * 512 for file in column.files)


def test_the_space_of_older_rows_is_given_back(tmp_path: Path) -> None:
    wide = (Field(("a",), "uint8", (3000,)), Field(("next", "a"), "uint8", (3000,)), *ROW_FIELDS)
    rows = Rows(tmp_path, 4096, 50, wide)
    for _ in range(40):
        rows.extend(100, new=1)  # each is new
    before = used(rows.column)
    if before < 4000 * 3000 or not _punches(tmp_path):
        pytest.skip("this file system does not give back parts of files")
    for _ in range(45):
        rows.extend(100, new=0.001)
    rows.column.give_back()
    assert used(rows.column) < before / 20
    rows.check_all()
    rows.group.close()


def _punches(folder: Path) -> bool:
    path = folder / "probe"
    path.write_bytes(bytes(range(256)) * 32)
    file = Disk().open(path)
    file.punch(0, 8192)
    file.close()
    return os.stat(path).st_blocks == 0


class _NoPunch(Disk):
    def open(self, path: Path, *, create: bool = False, write: bool = True) -> File:
        file = super().open(path, create=create, write=write)
        file.release = lambda start, stop: None  # type: ignore[method-assign]
        return file


@pytest.mark.usefixtures("no_pages")
@pytest.mark.parametrize("disk", [Disk, _NoPunch])
def test_sums_do_not_depend_on_what_is_left_in_slots(tmp_path: Path, disk: type[Disk]) -> None:
    """Rows that lie elsewhere count as zeros, whether or not the space of older ones is given back."""
    rows = Rows(tmp_path, 4096 + 200, 30)
    rows.group.close()
    rows.group = WritableColumns(disk(), rows.folder, FIELDS, rows.slots, reach=30)
    for _ in range(50):
        rows.extend(100, new=0.5)
    rows.column.give_back()
    sums = Checksums(Disk(), tmp_path / "checksums", rows.group)
    sums.update({0}, generation=1, sequence=1)
    own = rows.column.distances.view[:BLOCK_ROWS] == 0
    wanted = rows.column.raw(0, BLOCK_ROWS).copy()
    assert wanted[~own].any() == (disk is _NoPunch)
    wanted[~own] = 0
    entry = sums.entry(0)["sums"]
    assert int(entry[0]) == google_crc32c.value(wanted.tobytes())
    assert int(entry[-1]) == google_crc32c.value(rows.column.distances.view[:BLOCK_ROWS].tobytes())
    assert len(entry) == len(rows.group.columns)  # one for the distances, none for priorities
    sums.close()
    rows.group.close()


@pytest.mark.usefixtures("no_pages")
def test_a_row_that_is_written_lies_in_its_own_slot(tmp_path: Path) -> None:
    rows = Rows(tmp_path, 60, 10)
    for turn in range(4):
        rows.extend(50, new=0)
        ids = [rows.last - 3, rows.last - 20, rows.last]
        values = [rows.frame() for _ in ids]
        array = np.frombuffer(b"".join(values), np.uint8).reshape(-1, WIDTH)
        rows.column.write_rows(rows.slots_of(ids), array)
        for one, value in zip(ids, values, strict=True):
            rows.rows[one] = value, rows.rows[one][1]
        assert not rows.column.distances.take(rows.slots_of(ids)).any(), turn
        rows.check_all()
    rows.group.close()


def test_rows_that_were_told_are_forgotten(tmp_path: Path) -> None:
    rows = Rows(tmp_path, None, 10)
    rows.extend(5, new=0)
    rows.group.forget_next([1])
    rows.extend(1, new=0)
    np.testing.assert_array_equal(rows.column.distances.view[:6], [0, 1, 1, 1, 1, 0])
    rows.group.forget_next([0])  # who has none of the next ones
    rows.extend(1, new=0)
    assert rows.column.distances.view[6] == 1
    rows.group.close()


def test_other_readers_are_told_where_rows_are(tmp_path: Path) -> None:
    rows = Rows(tmp_path, 4096, 10)
    rows.extend(30, new=0.3)
    group: Any = zarr.open_group(rows.folder, mode="r")
    about = group["a"].attrs["expstore"]["shared"]
    assert about == {"with": "next/a", "distances": "_row/distance/a"}
    distances = group[about["distances"]][:30]
    lent = np.arange(30) - distances
    found = np.where((distances > 0)[:, None], group[about["with"]][:30][lent], group["a"][:30])
    assert found.tobytes() == b"".join(rows.rows[one][0] for one in range(1, 31))
    rows.group.close()


def test_rows_that_lie_nowhere_are_refused(tmp_path: Path) -> None:
    """As a power cut may leave distances of one turn beside rows of another, or without any."""
    rows = Rows(tmp_path, 3 * (1 << 20), 10)
    rows.extend(30, new=0)
    rows.column.distances.write_rows(np.array([0]), np.array([7], np.uint16))  # slot -7 is the ring's end
    assert rows.group.checksum(1, 30) == -1
    with pytest.raises(CorruptionError, match="rows that are not there"):
        rows.column.take(np.array([0, 1]))
    assert rows.column.take(np.array([1, 2])).tobytes() == rows.rows[2][0] + rows.rows[3][0]
    rows.group.close()


def test_a_partner_that_is_no_column_like_it_is_none(tmp_path: Path) -> None:
    rows = Rows(tmp_path, None, 10)
    rows.extend(3, new=0)
    rows.group.close()
    (rows.folder / "next/a/zarr.json").write_text("{}")
    reader = ColumnGroup(Disk(), rows.folder, FIELDS, None, write=False)
    reader.look(3)
    with pytest.raises(CorruptionError):
        reader.columns[0].take(np.array([1]))
    assert reader.columns[0].take(np.array([0])).tobytes() == rows.rows[1][0]
    reader.close()


@pytest.mark.parametrize(
    ("distances", "wanted"),
    [
        ([], []),
        ([0], [(5, 1, True)]),
        ([3], [(5, 1, False)]),
        ([0, 0, 2, 3, 0], [(5, 2, True), (7, 2, False), (9, 1, True)]),
    ],
)
def test_runs_of_slots(distances: list[int], wanted: list[Any]) -> None:
    assert list(runs_of(np.array(distances, np.int64), 5)) == wanted
