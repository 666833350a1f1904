"""The common behaviour of all kinds of column: flat, packed, and variable-length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from expstore.core.id_set import NO_IDS, IdSet
from expstore.core.values import cut_run
from expstore.disk.checkpointed import Checkpoint
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, SchemaError
from expstore.schema.arrow_types import type_text
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import ARROW, Field
from expstore.storages.columns.column import Deleted
from expstore.storages.columns.column_set import ReadColumns
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.payload import payload_parts
from expstore.storages.format.chunk_encoding import Packing

pytestmark = [pytest.mark.usefixtures("no_syncs"), pytest.mark.some(4)]

PACKING = Packing("lz4hc", 4, 8)
LIST = pa.list_(pa.int32())


@dataclass
class Kind:
    """A kind of column, and how its rows are made and compared.

    Args:
        layout: What `Column.size` calls it.
        entry: A field.
        packing: How it is packed.
        change: What is raised where rows are to be changed; None: they can be.
    """

    layout: str
    entry: Field
    packing: Packing | None = None
    change: str | None = None

    def values(self, ids: Any) -> Any:
        if self.entry.variable:
            return pa.array([[int(one)] * (int(one) % 3) for one in ids], LIST)
        return (np.asarray(ids)[:, None] * [1, 7, 13] % 251).astype(np.uint8)

    def same(self, found: Any, ids: Any) -> None:
        wanted = self.values(ids)
        if self.entry.variable:
            assert found.to_pylist() == wanted.to_pylist()
        else:
            np.testing.assert_array_equal(found, wanted)


KINDS = {
    "flat": Kind("flat", Field(("a",), "uint8", (3,))),
    "packed": Kind("packed", Field(("a",), "uint8", (3,)), PACKING, "'a' is packed: rows cannot be changed"),
    "segments": Kind(
        "segments", Field(("a",), ARROW, (), type_text(LIST)), None, "'a' .* rows cannot be changed"
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@dataclass
class Store:
    """The columns of a store with one field of a kind, and 30 rows, of which a checkpoint covers 20."""

    folder: Path
    kind: Kind
    slots: int | None
    columns: WritableColumns
    crc: int = 0
    last: int = 0

    @classmethod
    def make(cls, folder: Path, kind: Kind, slots: int | None) -> Store:
        fields, packings = (kind.entry, *ROW_FIELDS), [kind.packing, *[None] * len(ROW_FIELDS)]
        WritableColumns.create(Disk(), folder / "columns", fields, slots, None, {}, packings)
        store = cls(folder, kind, slots, cls.open(folder, kind, slots))
        store.extend(20)
        store.checkpoint()
        store.extend(10)
        return store

    @staticmethod
    def open(folder: Path, kind: Kind, slots: int | None) -> WritableColumns:
        columns = WritableColumns(Disk(), folder / "columns", (kind.entry, *ROW_FIELDS), slots)
        columns.check_metadata()
        columns.open_shards()
        return columns

    def again(self) -> WritableColumns:
        """Close the columns, and open them anew; they are not settled."""
        self.columns.close()
        self.columns = self.open(self.folder, self.kind, self.slots)
        return self.columns

    def reader(self) -> ReadColumns:
        return ReadColumns(Disk(), self.folder / "columns", (self.kind.entry, *ROW_FIELDS), self.slots)

    def extend(self, count: int) -> None:
        ids = np.arange(self.last + 1, self.last + count + 1)
        numbers, pieces = np.stack([ids] * 4), cut_run(self.last + 1, count, self.slots)
        values = self.kind.values(ids)
        self.crc = self.columns.write(pieces, [values], numbers, np.ones(count, np.float32))
        self.last += count

    def checkpoint(self) -> None:
        self.columns.begin(Checkpoint(1, 1, self.last, cut_run(1, self.last, self.slots)))
        self.columns.synced()
        self.columns.completed(tidy=True)

    def slots_of(self, ids: Any) -> Any:
        return np.asarray(ids) - 1 if self.slots is None else (np.asarray(ids) - 1) % self.slots


@pytest.fixture(params=[None, 24], ids=["unbounded", "ring"])
def store(request: pytest.FixtureRequest, tmp_path: Path, kind: Kind) -> Iterator[Store]:
    made = Store.make(tmp_path, kind, request.param)
    yield made
    made.columns.close()


def test_rows_are_read_by_slot(store: Store, kind: Kind) -> None:
    column, ids = store.columns.columns[0], [29, 11, 30, 11, 25]
    kind.same(column.gather(store.slots_of(ids)), ids)
    kind.same(store.columns.gather_rows(store.slots_of(ids), [0])[0], ids)
    kind.same(column.part(12, 6), range(13, 19))
    kind.same(column.gather(np.empty(0, np.int64)), [])


def test_runs_of_rows_come_in_pieces(store: Store, kind: Kind) -> None:
    parts = store.columns.columns[0].views(9, 22)  # around the end of the ring
    at = 9
    for part in parts:
        kind.same(part, range(at, at + len(part)))
        at += len(part)
    assert at == 31
    is_view = kind.layout == "flat"
    assert store.columns.unviewed_places == (frozenset() if is_view else {0})


def test_a_reader_finds_the_same_rows(store: Store, kind: Kind) -> None:
    reader = store.reader()
    reader.look(store.slots or 30)
    reader.look_to(30)
    ids = [30, 12, 24, 25]
    kind.same(reader.gather_rows(store.slots_of(ids), [0])[0], ids)
    assert reader.damaged == []
    reader.end_at(27)
    kind.same(reader.gather_rows(store.slots_of([27, 12]), [0])[0], [27, 12])
    reader.close()


def test_rows_on_disk_have_the_checksum_that_was_returned(store: Store) -> None:
    assert store.columns.checksum(21, 10) == store.crc
    assert store.columns.checksum(20, 10) != store.crc
    assert store.again().checksum(21, 10) == store.crc


def test_rows_that_are_lacking_are_noticed(store: Store, kind: Kind) -> None:
    columns = store.again()
    columns.require_rows(9, 22)
    assert not columns.lacks(9, 22)
    if kind.layout != "flat":  # whose places are there before their rows
        assert columns.lacks(25, 7)
        with pytest.raises(CorruptionError, match="missing"):
            columns.require_rows(25, 7)


@pytest.mark.parametrize("last", [30, 27, 24, 20])
def test_an_opening_continues_behind_a_row(store: Store, kind: Kind, last: int) -> None:
    columns = store.again()
    columns.settle(last, 20)
    columns.begin_opening()
    columns.synced()
    columns.completed(tidy=True)
    store.last = last
    store.extend(5)
    ids = [*range(last - 3, last + 6)]
    kind.same(columns.columns[0].gather(store.slots_of(ids)), ids)
    assert columns.checksum(last + 1, 5) == store.crc


@pytest.mark.parametrize("there", [True, False])
def test_rows_of_a_record_are_there_once(store: Store, kind: Kind, there: bool) -> None:
    """An opening writes the rows that a record carries, whether they had come to the columns or not."""
    ids = np.arange(31, 35)
    parts = payload_parts(store.columns, [kind.values(ids)], np.stack([ids] * 4))
    if there:
        store.extend(4)
    columns = store.again()
    columns.write_parts(cut_run(31, 4, store.slots), parts, None, synced=20)
    columns.settle(34, 20)
    kind.same(columns.columns[0].gather(store.slots_of(range(28, 35))), range(28, 35))
    assert not columns.lacks(21, 14)


def test_rows_can_be_changed_or_say_that_they_cannot(store: Store, kind: Kind) -> None:
    column, slots = store.columns.columns[0], store.slots_of([25, 30])
    if kind.change is None:
        store.columns.check_changeable([0, 5])
        column.write_rows(slots, kind.values([7, 8]))
        kind.same(column.gather(store.slots_of([24, 25, 30])), [24, 7, 8])
        store.columns.check_replaceable()
        return
    with pytest.raises(SchemaError, match="cannot be changed"):
        column.write_rows(slots, np.zeros((2, 3), np.uint8))
    store.columns.check_changeable([5])
    with pytest.raises(SchemaError, match=kind.change):
        store.columns.check_changeable([0, 5])
    with pytest.raises(SchemaError, match="'a' .*rows cannot be replaced by better ones"):
        store.columns.check_replaceable()


def test_rows_in_memory_are_read_over_those_of_the_column(store: Store, kind: Kind) -> None:
    column, slots = store.columns.columns[0], store.slots_of([26, 27, 28])
    kind.same(column.mix(slots, np.array([-1, 1, -1]), kind.values([3, 4])), [26, 4, 28])
    kind.same(column.mix(slots[1:2], np.array([0]), kind.values([3])), [3])


def test_a_capture_stays_as_it_is(store: Store, kind: Kind) -> None:
    captures = store.columns.capture(6)
    assert [place for capture in captures for place in capture.places] == [*store.columns.unviewed_places]
    store.extend(4)  # in a ring, in the places of rows 7 to 10
    for capture in captures:
        at = 7
        for part in capture.rows(0, 7, 24):
            kind.same(part, range(at, at + len(part)))
            at += len(part)
        assert at == 31


@pytest.mark.parametrize("store", [None], indirect=True)
def test_space_is_given_back_and_other_rows_stay(store: Store, kind: Kind) -> None:
    store.checkpoint()
    rows = IdSet.of([(1, 16)])
    store.columns.free(Deleted(rows, rows, 16, NO_IDS))
    kind.same(store.columns.columns[0].gather(np.arange(16, 30)), range(17, 31))
    columns = store.again()
    columns.settle(30, 30)
    kind.same(columns.columns[0].gather(np.arange(16, 30)), range(17, 31))


def test_a_column_says_how_it_lies_on_disk(store: Store, kind: Kind) -> None:
    reader = store.reader()
    reader.look_briefly(store.slots or 30)
    size = reader.columns[0].size(30, reader.row_fields[0].peek)
    assert size.layout == kind.layout
    assert size.chunk_rows == (None if kind.packing is None else 4)
    assert size.row_bytes > 0
    assert reader.mean_bytes >= sum(entry.row_bytes for entry in ROW_FIELDS)
    reader.close()


def test_a_set_without_a_column_has_the_others_in_their_places(store: Store, kind: Kind) -> None:
    if kind.layout == "segments":
        with pytest.raises(SchemaError, match="'a' has variable length"):
            store.columns.check_removable(0)
        return
    store.columns.check_removable(0)
    kept = store.columns.without(0)
    assert [column.entry for column in kept.columns] == [*ROW_FIELDS]
    assert kept.unviewed_places == frozenset()
    store.columns.close_dropped(kept)
    np.testing.assert_array_equal(kept.columns[0].gather(store.slots_of([25])), [25])
