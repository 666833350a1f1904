"""Packed columns alone: committed rows remain readable, however the process ends."""

from __future__ import annotations

import errno
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expstore.core import tuning
from expstore.core.id_set import NO_IDS
from expstore.core.values import Array
from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError, StateError, StorageError
from expstore.kernels.blosc_encode import pack_chunks
from expstore.schema.schema import Field
from expstore.storages.columns.packed.appender import PackedAppender
from expstore.storages.columns.packed.open_chunk import PartialFile
from expstore.storages.columns.packed.reader import PackedReader
from expstore.storages.columns.packed.writer import PackedColumn
from expstore.storages.format.chunk_encoding import Packing, packing_for
from expstore.storages.format.chunk_file import (
    HEADER_BYTES,
    Chunks,
    find_lap,
    no_chunks,
    pack_chunk,
    pack_index,
    read_index,
    scan_chunks,
)
from expstore.storages.format.codecs import CODECS
from tests.support.gated_disk import GatedDisk
from tests.support.part_restarts import NEVER, Killed, MortalLife

pytestmark = pytest.mark.usefixtures("no_syncs")

WIDTH = 3
ENTRY = Field(("a",), "uint8", (WIDTH,))


@dataclass
class Life(MortalLife):
    """A column, and what of it was published and synced."""

    folder: Path
    slots: int | None
    packing: Packing
    spare: int
    salt: int = 0

    def __post_init__(self) -> None:
        (self.folder / "zarr.json").write_text(f'{{"shape": [1, {WIDTH}]}}')
        self.column = self.make()

    def make(self) -> PackedColumn:
        return PackedColumn(self.disk, self.folder, ENTRY, self.slots, self.packing)

    def extend(self, count: int) -> None:
        count = min(count, self.spare)
        if self.last + count - self.synced > self.spare:
            self.sync()
        self.salt += 1
        ids = np.arange(self.last + 1, self.last + count + 1)
        values = (ids[:, None] * [1, 7, 13] + self.salt * np.array([31, 5, 3])).astype(np.uint8)
        done = 0
        while done < count:
            first = self.last + done
            some = count - done if self.slots is None else min(count - done, self.slots - first % self.slots)
            self.column.append(first + 1, values[done : done + some])
            done += some
        self.rows.update(zip(ids.tolist(), values, strict=True))
        self.last += count

    def sync(self) -> None:
        last, finished = self.last, self.column.note_mark()
        self.column.name(finished)
        self.disk.gate("mark", self.folder)
        self.synced = last
        self.column.note_marked()
        self.column.touched.clear()

    def settle(self) -> None:
        self.column = self.make()
        self.column.open_files()
        self.column.settle(self.last, self.synced)
        self.sync()

    def check(self) -> None:
        """Read all that can be read, in any order and some twice, here and as a follower."""
        low = 0 if self.slots is None else max(0, self.last - (self.slots - self.spare))
        ids = np.array([one for one in range(low + 1, self.last + 1) if one in self.rows], np.int64)
        ids = np.random.default_rng(self.last).permutation(np.concatenate([ids, ids[:3]]))
        slots = ids - 1 if self.slots is None else (ids - 1) % self.slots
        expected = np.array([self.rows[one] for one in ids.tolist()], np.uint8).reshape(-1, WIDTH)
        np.testing.assert_array_equal(self.column.gather(slots), expected)
        if ids.size:
            readers = [PackedReader(Disk(), self.folder, ENTRY, self.slots, self.packing)]
            self.reader = self.reader or PackedReader(Disk(), self.folder, ENTRY, self.slots, self.packing)
            for reader in [*readers, self.reader]:
                reader.look(0)
                reader.look_to(self.last)
                np.testing.assert_array_equal(reader.gather(slots), expected)
            readers[0].close()


ACTS = st.one_of(
    st.tuples(st.just("extend"), st.integers(1, 40)),
    st.tuples(st.just("extend"), st.integers(1, 3)),
    st.tuples(st.just("sync")),
    st.tuples(st.just("open again")),
    st.tuples(st.just("jump"), st.integers(1, 60)),
    st.tuples(st.just("kill"), st.integers(0, 40), st.integers(1, 40), st.booleans(), st.integers(0, 30)),
)


@settings(deadline=None)
@given(
    each=st.sampled_from([1, 2, 4, 8]),
    chunks=st.integers(1, 4),
    ring=st.one_of(st.none(), st.integers(6, 20)),
    acts=st.lists(ACTS, min_size=1, max_size=25),
)
def test_every_life_keeps_what_was_published(
    each: int, chunks: int, ring: int | None, acts: list[tuple[Any, ...]]
) -> None:
    slots = None if ring is None else ring * each
    with tempfile.TemporaryDirectory() as name:
        life = Life(
            Path(name), slots, Packing("lz4hc", each, each * chunks), max(2 * each, (slots or 40) // 3)
        )
        for act, *numbers in acts:
            if act == "extend":
                life.extend(*numbers)
            elif act == "sync":
                life.sync()
            elif act == "open again":
                life.reader = None
                life.open_again()
            elif act == "jump":
                life.jump(*numbers)
            else:
                acts_left, count, in_sync, again = numbers
                life.kill(acts_left, count, in_sync=in_sync, again=again)
            life.check()
        life.end()


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("slots", [None, 48])
def test_killed_at_every_act(tmp_path: Path, slots: int | None) -> None:
    """One run of writes and syncs over several shards and turns, killed at each of its acts in turn."""
    killed = acts = 0
    while killed == acts:
        folder = tmp_path / str(acts)
        folder.mkdir()
        life = Life(folder, slots, Packing("lz4hc", 4, 16), 16)
        life.disk.left = acts
        try:
            for count in (3, 13, 1, 16, 7, 16, 2, 14, 5, 12):
                life.extend(count)
                if count % 2:
                    life.sync()
        except Killed:
            killed += 1
        life.disk.left = NEVER
        life.open_again()
        life.check()
        life.extend(9)
        life.check()
        life.open_again()
        life.check()
        life.end()
        acts += 1
    assert acts > 60


def test_a_chunk_whose_packed_form_was_lost_is_packed_again(tmp_path: Path) -> None:
    """A power cut may leave the raw rows of a chunk alone, which were written earlier."""
    life = Life(tmp_path, None, Packing("lz4hc", 4, 16), 16)
    life.extend(7)
    life.sync()
    life.extend(1)
    life.end()
    path = tmp_path / "open.0.0"
    chunks = scan_chunks(Disk().open(path), 4, 0)
    with path.open("r+b") as file:
        file.truncate(int(chunks.offsets[1]) - 16)
    life.open_again()
    life.check()
    for count in (2, 9, 11):
        life.extend(count)
        life.sync()
        life.reader = None
        life.open_again()
        life.check()
    life.end()


def test_former_laps_of_a_ring_are_not_mapped_any_more(tmp_path: Path) -> None:
    life = Life(tmp_path, 48, Packing("lz4hc", 4, 16), 16)
    for _ in range(60):
        life.extend(12)
        life.check()
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert 0 < sum(str(tmp_path) in line for line in maps) <= 3 * 4  # the writer's and a follower's
    life.end()


# -- packing -----------------------------------------------------------------------------------------


@pytest.mark.some(2)
@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
def test_packed_rows_come_out_as_they_were(codec: str, data: Any) -> None:
    rows, width = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 300))
    seed, noise = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1, 4, 256]))
    values = np.random.default_rng(seed).integers(0, noise, (rows, width)).astype(np.uint8)
    packing = Packing(codec, rows, rows)
    chunk = packing.pack(values)
    assert len(chunk) <= packing.most_bytes(values.nbytes)
    assert packing.unpack(chunk, values.nbytes).tobytes() == values.tobytes()
    at, bit = data.draw(st.integers(0, len(chunk) - 1)), data.draw(st.integers(0, 7))
    damaged = bytearray(chunk)
    damaged[at] ^= 1 << bit
    with pytest.raises(CorruptionError):
        packing.unpack(bytes(damaged), values.nbytes)
    with pytest.raises(CorruptionError):
        packing.unpack(chunk, values.nbytes + 1)
    with pytest.raises(CorruptionError):
        packing.unpack(chunk[: data.draw(st.integers(0, len(chunk) - 1))], values.nbytes)


@given(
    width=st.integers(1, 1 << 22),
    slots=st.one_of(st.none(), st.integers(1, 1 << 24)),
    rows=st.one_of(st.none(), st.sampled_from([1, 2, 16, 64])),
)
def test_sizes_fit_one_another(width: int, slots: int | None, rows: int | None) -> None:
    packing = packing_for(Field(("a",), "uint8", (width,)), slots, rows=rows)
    assert packing.shard % packing.rows == 0
    assert packing.rows == (rows or packing.rows)
    assert rows or packing.rows == 1 or packing.rows * width <= 256 * 1024
    if slots is not None:
        assert packing.shard < slots + packing.rows


# -- the file of chunks ------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Iterator[File]:
    opened = Disk().open(tmp_path / "chunks", create=True)
    yield opened
    opened.close()


def append(file: File, number: int, lap: int, chunk: bytes, chunks: Chunks) -> Chunks:
    data = pack_chunk(number, lap, chunk)
    file.write(data, chunks.end)
    return Chunks(chunks.offsets, chunks.sizes, chunks.end + len(data))


@settings(deadline=None)
@given(data=st.data())
def test_a_scan_finds_the_chunks_before_the_first_damage(data: Any) -> None:
    lap = data.draw(st.integers(0, 5))
    numbers = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=12))
    bodies = [bytes([place]) * data.draw(st.integers(1, 40)) for place in range(len(numbers))]
    with tempfile.TemporaryDirectory() as name:
        file = Disk().open(Path(name) / "chunks", create=True)
        ends, chunks = [0], no_chunks(8)
        for number, body in zip(numbers, bodies, strict=True):
            chunks = append(file, number, lap, body, chunks)
            ends.append(chunks.end)
        file.truncate(chunks.end + 500)  # as far as the file is made before it is full
        damage = data.draw(st.one_of(st.none(), st.integers(0, chunks.end - 1)))
        whole = len(numbers)
        if damage is not None:
            byte = file.read(damage, 1)[0]
            file.write(bytes([byte ^ (1 << data.draw(st.integers(0, 7)))]), damage)
            whole = next(place for place, end in enumerate(ends[1:]) if damage < end)
        found = scan_chunks(file, 8, lap)
        assert found.end == ends[whole]
        for number in range(8):
            mine = [body for n, body in zip(numbers[:whole], bodies, strict=False) if n == number]
            assert (found.offsets[number] >= 0) == bool(mine)
            if mine:  # of two with one number the later counts
                assert file.read(int(found.offsets[number]), int(found.sizes[number])) == mine[-1]
        # In two steps as in one; and nothing of another turn.
        file.truncate(found.end)
        later = append(file, 3, lap, b"later", found)
        np.testing.assert_array_equal(scan_chunks(file, 8, lap, found).offsets[3], later.end - 5)
        assert scan_chunks(file, 8, lap + 1).end == 0
        file.close()


def test_chunks_of_one_length_are_told_apart(file: File) -> None:
    """Each ends with its own checksum: another one in its place is found all the same."""
    packing = Packing("lz4hc", 4, 16)
    one, other = (packing.pack(np.full((4, 64), value, np.uint8)) for value in (1, 2))
    assert len(one) == len(other)
    chunks = append(file, 0, 0, one, no_chunks(4))
    file.write(other, HEADER_BYTES)
    assert scan_chunks(file, 4, 0).end == 0
    file.write(one, HEADER_BYTES)
    assert scan_chunks(file, 4, 0).end == chunks.end


def test_an_index_says_where_chunks_are(file: File) -> None:
    chunks = no_chunks(4)
    for number in (2, 0):
        chunks = append(file, number, 7, b"x" * (5 + number), chunks)
    found = scan_chunks(file, 4, 7)
    file.write(pack_index(found), found.end)
    read = read_index(file, 4)
    assert read.offsets.tolist() == [16 + 7 + 16, -1, 16, -1]
    assert read.sizes.tolist() == [5, 0, 7, 0]
    assert find_lap(file, read) == 7
    assert find_lap(file, no_chunks(4)) == -1
    for at in range(found.end, file.size()):
        byte = file.read(at, 1)
        file.write(bytes([byte[0] ^ 4]), at)
        with pytest.raises(CorruptionError, match="index"):
            read_index(file, 4)
        file.write(byte, at)
    with pytest.raises(CorruptionError, match="index"):
        read_index(file, 400)
    file.write(pack_index(found._replace(sizes=found.sizes + 1000)), found.end)
    with pytest.raises(CorruptionError, match="beyond its end"):
        read_index(file, 4)


# -- rows of the chunk that is not full --------------------------------------------------------------


def some_rows(salt: int, count: int) -> Any:
    return (np.arange(count)[:, None] * [3, 5, 7] + salt).astype(np.uint8)


def test_areas_on_which_a_mark_depends_are_left_alone(tmp_path: Path) -> None:
    partial = PartialFile(Disk(), tmp_path / "partial", 8, WIDTH)
    assert partial.begin(0, 0)
    partial.write(0, some_rows(1, 4))
    partial.note_mark()
    partial.note_marked()  # the first four rows of chunk 0
    partial.write(4, some_rows(2, 4))
    partial.end()
    partial.begin(0, 1)
    partial.write(0, some_rows(3, 2))
    partial.note_mark()  # on its way: the first two of chunk 1
    partial.end()
    for chunk in range(2, 12):
        assert not partial.begin(0, chunk)
        partial.write(0, some_rows(chunk, 3))
        partial.end()
        np.testing.assert_array_equal(partial.find(0, 0, 4), some_rows(1, 4))
        np.testing.assert_array_equal(partial.find(0, 1, 2), some_rows(3, 2))
        np.testing.assert_array_equal(partial.find(0, chunk, 3), some_rows(chunk, 3))
        assert partial.find(1, chunk, 3) is None
        assert partial.find(0, chunk, 4) is None  # not written
    partial.note_marked()
    for chunk in range(12, 16):
        partial.begin(0, chunk)
    assert partial.find(0, 0, 4) is None
    np.testing.assert_array_equal(partial.find(0, 1, 2), some_rows(3, 2))
    partial.close()


@pytest.mark.guarantee("power/sync-mode")
def test_an_opening_keeps_rows_that_were_synced_without_a_checkpoint(tmp_path: Path) -> None:
    life = Life(tmp_path, 48, Packing("lz4hc", 4, 8), 16)
    life.extend(6)
    life.column.close()
    life.column = life.make()
    life.column.open_files()
    life.column.settle(6, 2)
    rows = life.column.part(4, 2).copy()
    for _ in range(8):  # of later records, before the opening syncs the shard
        life.extend(1)
    partial = PartialFile(Disk(), tmp_path / "partial", 4, WIDTH)
    np.testing.assert_array_equal(partial.find(0, 1, 2), rows)
    partial.close()
    life.sync()
    life.check()
    life.end()


def test_files_are_synced_again_after_a_checkpoint_that_failed(tmp_path: Path) -> None:
    column = make_column(tmp_path)
    column.append(1, numbered(0, 14))
    appender = PackedAppender({0: column}, [], None)
    dirty = appender.begin_opening(0, NO_IDS)
    assert not appender.touched_files
    appender.abort(dirty)
    assert appender.touched_files == dirty.files
    column.close()


def test_torn_rows_are_known(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    partial = PartialFile(Disk(), path, 8, WIDTH)
    partial.begin(2, 5)
    partial.write(0, some_rows(1, 6))
    partial.close()
    data = bytearray(path.read_bytes())
    data[4096 + 2 * WIDTH] ^= 1
    path.write_bytes(data)
    partial = PartialFile(Disk(), path, 8, WIDTH)
    (area,) = partial.areas()
    assert (area.lap, area.chunk) == (2, 5)
    assert area.whole[:6].tolist() == [True, True, False, True, True, True]
    assert partial.find(2, 5, 3) is None
    np.testing.assert_array_equal(partial.find(2, 5, 2), some_rows(1, 2))
    assert not partial.go_on(2, 5, some_rows(1, 3))
    assert not partial.go_on(2, 5, some_rows(2, 2))
    assert partial.go_on(2, 5, some_rows(1, 2))
    partial.close()


# -- after a failure ---------------------------------------------------------------------------------


def fail_at(at: int, number: int) -> None:
    if number == at:
        raise OSError(errno.ENOSPC, "No space left on device")


def make_column(
    folder: Path, slots: int | None = 48, packing: Packing | None = None, disk: Disk | None = None
) -> PackedColumn:
    folder.mkdir(exist_ok=True)
    (folder / "zarr.json").write_text(f'{{"shape": [1, {WIDTH}]}}')
    return PackedColumn(disk or Disk(), folder, ENTRY, slots, packing or Packing("lz4hc", 4, 8))


def numbered(first: int, count: int) -> Any:
    return np.random.default_rng(1).integers(0, 256, (first + count, WIDTH)).astype(np.uint8)[first:]


@pytest.mark.guarantee("rows/bits")
@pytest.mark.parametrize("slots", [None, 48])
def test_rows_that_could_not_be_written_come_once_more(tmp_path: Path, slots: int | None) -> None:
    """Those of them that are there stay as they are, in memory and in the files, wherever it failed."""
    failed, at = True, 0
    while failed:
        at += 1
        acts, disk = itertools.count(1), GatedDisk()
        column = make_column(tmp_path / str(at), slots, disk=disk)
        column.append(1, numbered(0, 3))
        disk.before = lambda act, path, at=at, acts=acts: fail_at(at, next(acts))  # type: ignore[misc]
        try:
            column.append(4, numbered(3, 19))
            failed = False
        except StorageError:
            column.append(4, numbered(3, 19))
        disk.relax()
        column.append(23, numbered(22, 7))
        np.testing.assert_array_equal(column.part(0, 29), numbered(0, 29))
        column.close()
        again = make_column(column.folder, slots)
        again.open_files()
        np.testing.assert_array_equal(again.part(0, 29), numbered(0, 29))
        again.close()
    assert at > 12


class FailingRenames(Disk):
    """Fail the first rename, before or after it is done."""

    def __init__(self, *, done: bool) -> None:
        super().__init__()
        self.done, self.failed = done, False

    def rename(self, old: Path, new: Path) -> None:
        if self.failed:
            super().rename(old, new)
            return
        self.failed = True
        if self.done:
            super().rename(old, new)
            raise KeyboardInterrupt
        raise StorageError("No space left on device")


@pytest.mark.guarantee("rows/bits")
@pytest.mark.parametrize("done", [False, True])
def test_shards_that_could_not_be_renamed_are_renamed_by_the_next_checkpoint(
    tmp_path: Path, done: bool
) -> None:
    disk, columns = FailingRenames(done=done), {}
    for place in range(2):
        columns[place] = make_column(tmp_path / str(place), disk=disk)
        columns[place].append(1, numbered(0, 20))
    appender = PackedAppender(columns, [], None)
    appender.begin_opening(0, NO_IDS)
    with pytest.raises((StorageError, KeyboardInterrupt)):
        appender.synced()
    appender.begin_opening(0, NO_IDS)
    appender.synced()
    for column in columns.values():
        assert sorted(name for name in disk.names(column.folder) if name.startswith(("c.", "open."))) == [
            "c.0.0",
            "c.1.0",
            "open.2.0",
        ]
        column.close()


@pytest.mark.guarantee("rows/bits")
@pytest.mark.parametrize("laps", [[0], [9, 10]])
def test_unnamed_shards_of_former_laps_replace_no_newer_ones(tmp_path: Path, laps: list[int]) -> None:
    """They are there if renames failed, and the writer was killed then."""
    life, kept = Life(tmp_path, 48, Packing("lz4hc", 4, 8), 16), {}
    end = 48 + 12 if laps == [0] else 48 * 10 + 12
    while life.last < end:
        life.extend(4)
        lap, inside = divmod(life.last, 48)
        if inside == 8 and lap in laps:
            kept[lap] = (tmp_path / f"open.0.{lap}").read_bytes()
        life.sync()
    life.column.close()
    if laps == [9, 10]:  # the name of 10 comes before that of 9
        (tmp_path / "c.0.0").unlink()
    for lap, data in kept.items():
        (tmp_path / f"open.0.{lap}").write_bytes(data)
    for _ in range(2):
        life.settle()
        life.check()
    life.end()


def test_other_rows_in_the_places_of_some_are_refused(tmp_path: Path) -> None:
    column = make_column(tmp_path)
    column.append(1, numbered(0, 11))
    with pytest.raises(StateError, match="already has other rows in these slots"):
        column.append(7, numbered(1, 9))
    np.testing.assert_array_equal(column.part(0, 11), numbered(0, 11))
    column.close()


@pytest.mark.guarantee("rows/bits")
@pytest.mark.parametrize("last", [13, 14, 15])
def test_a_reader_of_a_truncated_chunk_keeps_its_rows(tmp_path: Path, last: int) -> None:
    """An opening drops rows that were never published; others may be reading those before them."""
    life = Life(tmp_path, 48, Packing("lz4hc", 4, 16), 16)
    life.extend(last)
    reader = PackedReader(Disk(), tmp_path, ENTRY, 48, life.packing)
    former = life.column
    former.append(last + 1, numbered(0, 5))  # never published
    reader.look(0)
    reader.look_to(last)
    life.column = life.make()
    life.column.open_files()
    life.column.settle(last, 0)
    expected = np.array([life.rows[one] for one in range(1, last + 1)])
    for column in (former, reader, life.column):
        np.testing.assert_array_equal(column.gather(np.arange(last)), expected)
        column.close()
    life.end()


@pytest.mark.parametrize("last", [13, 15])
def test_unpublished_rows_of_the_next_lap_hide_no_published_ones(tmp_path: Path, last: int) -> None:
    """A chunk of the next turn, never published, lies where the newest rows that count do."""
    life = Life(tmp_path, 48, Packing("lz4hc", 4, 16), 16)
    life.extend(last)
    life.sync()
    former = life.column
    former.append(48 + 13, numbered(0, 4))
    reader = PackedReader(Disk(), tmp_path, ENTRY, 48, life.packing)
    reader.look(0)
    reader.end_at(last)
    life.column = life.make()
    life.column.open_files()
    life.column.settle(last, last)
    expected = np.array([life.rows[one] for one in range(1, last + 1)])
    for column in (reader, life.column):
        np.testing.assert_array_equal(column.gather(np.arange(last)), expected)
    life.extend(5)
    life.check()
    former.close()
    reader.close()
    life.end()


def test_an_opening_changes_nothing_before_it_knows_that_all_is_there(tmp_path: Path) -> None:
    """What lies behind a damaged chunk is there still for a repair."""
    life = Life(tmp_path, None, Packing("lz4hc", 4, 16), 16)
    life.extend(15)
    life.sync()
    life.end()
    path = tmp_path / "open.0.0"
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)
    column = life.make()
    column.open_files()
    with pytest.raises(CorruptionError, match="chunk 0 .* is missing"):
        column.require_rows(1, 15)
    column.close()
    assert path.read_bytes() == data
    life.end()


def test_chunks_are_the_same_compiled_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "PACKED_CHUNKS_TOGETHER", 3)
    packing, rng = Packing("lz4hc", 4, 16), np.random.default_rng(1)
    runs = [rng.integers(0, 3, (count, WIDTH), np.uint8) for count in (1, 9, 4, 70, 3, 41)]
    found, calls = [], []
    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        column = make_column(folder, None, packing)
        if compiled:

            def pack(rows: Array, count: int, *codec: Any, block: int) -> list[bytes]:
                calls.append(count)
                return pack_chunks(rows, count, *codec, block=block)

            column._pack_chunks = pack
        at = 0
        for rows in runs:
            column.append(at + 1, rows)
            at += len(rows)
        assert (column.gather(np.arange(at)) == np.concatenate(runs)).all()
        column.name(column.note_mark())
        column.close()
        found.append({path.name: path.read_bytes() for path in folder.iterdir()})
    assert found[0] == found[1]
    assert max(calls) == 3
    assert sum(calls) > 20
