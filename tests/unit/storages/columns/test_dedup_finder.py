"""Rows stored with the next observations of earlier rows are unchanged in every history, byte for byte."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expstore.core.values import cut_run
from expstore.disk.files import Disk
from expstore.errors import CorruptionError
from expstore.schema.row_fields import ROW_FIELDS
from expstore.schema.schema import Field
from expstore.storages.columns.column_set import ReadColumns
from expstore.storages.columns.column_set_writer import WritableColumns
from expstore.storages.columns.dedup_finder import NextRows, NextStacks
from expstore.storages.columns.packed.column import PackedRows
from expstore.storages.format.chunk_encoding import Packing, reach_for
from expstore.storages.format.chunk_file import read_index
from tests.support.part_restarts import MortalLife

pytestmark = pytest.mark.usefixtures("no_syncs")

WIDTH = 3


def fields(parts: int = 1) -> tuple[Field, ...]:
    """Return the fields of rows, which are stacks of several images if `parts` is not 1."""
    shape = (WIDTH,) if parts == 1 else (parts, 1, WIDTH)
    return Field(("a",), "uint8", shape), Field(("next", "a"), "uint8", shape), *ROW_FIELDS


FIELDS = fields()


class Frames:
    """Give steps of some environments, one after another or in any order, few of them alike by chance."""

    def __init__(self, parts: int = 1) -> None:
        self.parts, self.shape = parts, fields(parts)[0].shape
        self.count = 0
        self.now: dict[int, Any] = {}
        self.random = np.random.default_rng(1)

    def fresh(self) -> Any:
        self.count += 1
        return np.array([self.count % 251, self.count // 251, self.count % 7], np.uint8)

    def step(self, lane: int) -> tuple[Any, Any]:
        if self.parts == 1:
            before, self.now[lane] = self.now.get(lane, self.fresh()), self.fresh()
            return before, self.now[lane]
        before = self.now.get(lane)
        if before is None:
            before = np.stack([self.fresh()[None]] * self.parts)
        self.now[lane] = np.concatenate([before[1:], self.fresh()[None, None]])
        return before, self.now[lane]

    def rows(self, kind: str, count: int, lanes: int) -> tuple[Any, Any]:
        pairs = []
        for row in range(count):
            if kind == "noise":  # alike by chance, near and far
                pairs.append((self.random.integers(0, 2, self.shape), self.random.integers(0, 2, self.shape)))
            elif kind == "still":
                pairs.append((np.zeros(self.shape), np.zeros(self.shape)))
            else:
                if kind == "resets" and self.random.integers(0, 4) == 0:
                    self.now.pop(row % lanes, None)
                lane = row % lanes if kind != "workers" else row * lanes // count
                both = np.stack(self.step(lane))
                if kind == "flips":  # one byte of one image, which may be the next row's image, too
                    both.reshape(-1)[self.random.integers(0, both.size)] ^= 1
                elif kind == "masked" and self.random.integers(0, 3) == 0:
                    both[1] = 0
                    self.now.pop(lane)
                pairs.append((both[0], both[1]))
        observed, following = zip(*pairs, strict=True)
        return np.array(observed, np.uint8), np.array(following, np.uint8)


@dataclass
class Life(MortalLife):
    """Two columns, and what of them was published and synced."""

    folder: Path
    capacity: int | None
    spare: int
    reach: int
    each: tuple[int, int]
    chunks: int
    parts: int = 1
    now: list[tuple[dict[int, PackedRows], Any, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slots = None if self.capacity is None else self.capacity + self.spare + self.reach
        stacked, parts = self.parts > 1, self.parts
        packings = [
            Packing("lz4hc", self.each[0], self.each[0] * self.chunks, shares=True, parts=parts),
            Packing("lz4hc", self.each[1], self.each[1] * self.chunks, stacked, parts, within=stacked),
            *[None] * len(ROW_FIELDS),
        ]
        self.fields = fields(self.parts)
        WritableColumns.create(Disk(), self.folder / "columns", self.fields, self.slots, None, {}, packings)
        self.frames = Frames(self.parts)
        self.columns = self.make()

    def make(self) -> WritableColumns:
        return WritableColumns(self.disk, self.folder / "columns", self.fields, self.slots, reach=self.reach)

    def extend(self, count: int, kind: str = "steps", lanes: int = 1) -> None:
        count = min(count, self.spare)
        if self.last + count - self.synced > self.spare:
            self.sync()
        observed, following = self.frames.rows(kind, count, lanes)
        ids = np.arange(self.last + 1, self.last + count + 1)
        numbers = np.stack([ids, ids, ids, ids])
        pieces = cut_run(self.last + 1, count, self.slots)
        self.columns.write(pieces, [observed, following], numbers, np.ones(count, np.float32))
        both = zip(observed, following, strict=True)
        self.rows.update(zip(ids.tolist(), both, strict=True))
        self.last += count

    def sync(self) -> None:
        last = self.last
        self.columns.begin_opening()
        self.columns.synced()
        self.disk.gate("mark", self.folder)
        self.synced = last
        self.columns.completed(tidy=False)

    def end(self) -> None:
        self.columns.close()
        super().end()

    def settle(self) -> None:
        self.columns = self.make()
        self.columns.open_shards()
        first = max(self.first, self.low + 1)
        assert not self.columns.lacks(first, self.last + 1 - first)
        self.columns.require_rows(first, self.last + 1 - first)
        self.columns.settle(self.last, self.synced)
        self.sync()

    def kill(self, acts: int, count: int, *how: Any, in_sync: bool, again: int) -> None:
        super().kill(acts, count, *how, in_sync=in_sync, again=again)
        self.frames.now.clear()

    @property
    def low(self) -> int:
        return 0 if self.capacity is None else max(0, self.last - self.capacity)

    def wanted(self) -> tuple[Any, list[Any]]:
        """Slots of all rows that can be read, in any order and some twice, and their values."""
        ids = np.array([one for one in range(self.low + 1, self.last + 1) if one in self.rows], np.int64)
        ids = np.random.default_rng(self.last).permutation(np.concatenate([ids, ids[:3]]))
        values = [np.array([self.rows[one][n] for one in ids.tolist()], np.uint8) for n in (0, 1)]
        slots = ids - 1 if self.slots is None else (ids - 1) % self.slots
        return slots, [value.reshape(-1, *self.fields[0].shape) for value in values]

    def keep(self) -> None:
        """Keep the rows as they are now: whoever writes goes on, and these stay."""
        (capture,) = self.columns.capture(self.low)
        self.now.append((capture.columns, *self.wanted()))

    def check(self) -> None:
        slots, values = self.wanted()
        same(self.columns.gather_rows(slots, [0, 1]), values)
        same(self.columns.gather_rows(slots, [1, 0])[::-1], values)
        same([column.gather(slots) for column in self.columns.columns[:2]], values)
        for kept, places, held in self.now:
            same([kept[0].gather(places), kept[1].gather(places)], held)
        if not slots.size:
            return
        fresh = ReadColumns(Disk(), self.folder / "columns", self.fields, self.slots)
        self.reader = self.reader or ReadColumns(Disk(), self.folder / "columns", self.fields, self.slots)
        for reader in (fresh, self.reader):
            reader.look(0)
            reader.look_to(self.last)
            same(reader.gather_rows(slots, [0, 1]), values)


def same(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


KINDS = st.sampled_from(["steps", "resets", "noise", "still", "workers", "flips", "masked"])
ACTS = st.one_of(
    st.tuples(st.just("extend"), st.integers(1, 40), KINDS, st.integers(1, 4)),
    st.tuples(st.just("extend"), st.integers(1, 3), KINDS, st.integers(1, 4)),
    st.tuples(st.just("sync")),
    st.tuples(st.just("keep")),
    st.tuples(st.just("open again")),
    st.tuples(st.just("jump"), st.integers(1, 60)),
    st.tuples(
        st.just("kill"), st.integers(0, 60), st.integers(1, 40), KINDS, st.booleans(), st.integers(0, 40)
    ),
)


@pytest.mark.guarantee("rows/bits")
@pytest.mark.slow
@settings(deadline=None, max_examples=40)
@given(
    each=st.tuples(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8])),
    chunks=st.integers(1, 4),
    capacity=st.one_of(st.none(), st.integers(1, 12)),
    reach=st.integers(1, 6),
    parts=st.sampled_from([1, 2, 4]),
    acts=st.lists(ACTS, min_size=1, max_size=25),
)
def test_every_life_keeps_both(
    each: tuple[int, int],
    chunks: int,
    capacity: int | None,
    reach: int,
    parts: int,
    acts: list[tuple[Any, ...]],
) -> None:
    most = max(each)
    room = None if capacity is None else capacity * most
    with tempfile.TemporaryDirectory() as name:
        life = Life(Path(name), room, 3 * most, (reach + 1) * most, each, chunks, parts)
        for act, *numbers in acts:
            if act == "extend":
                life.extend(*numbers)
            elif act == "kill":
                left, count, kind, in_sync, again = numbers
                life.kill(left, count, kind, in_sync=in_sync, again=again)
            elif act == "open again":
                life.reader = None
                life.open_again()
            elif act == "jump":
                life.jump(*numbers)
            else:
                getattr(life, act)()
            life.check()
        life.end()


@settings(deadline=None, max_examples=60)
@given(
    parts=st.sampled_from([2, 3, 4]),
    reach=st.integers(1, 30),
    acts=st.lists(
        st.tuples(st.integers(1, 40), KINDS, st.integers(1, 4), st.integers(0, 9)), min_size=1, max_size=8
    ),
)
def test_images_are_found_where_they_are_stored(
    parts: int, reach: int, acts: list[tuple[int, str, int, int]]
) -> None:
    """A reference leads to the same bytes, near enough, and to no other one; also after repeated calls."""
    frames, known = Frames(parts), NextStacks(parts * WIDTH, reach, parts)
    images, stored = np.zeros((0, WIDTH), np.uint8), np.zeros(0, bool)
    for count, kind, lanes, again in acts:
        rows = frames.rows(kind, count, lanes)
        place = len(stored) // parts
        found = known.find(place, *rows)
        if (
            again < 2
        ):  # the write failed, and is repeated in other parts: columns may have what was found first
            count = count if again else max(1, count // 2)
            rows = rows[0][:count].copy(), rows[1][:count].copy()
            first, found = found, known.find(place, *rows)
            if any((one[:count] != other).any() for one, other in zip(first, found, strict=True)):
                assert not np.any(found), "what is stored is unknown, and nothing may refer to it"
                found[1][:] = -1
        images = np.concatenate([images, rows[1].reshape(-1, WIDTH)])
        stored = np.append(stored, (found[1] == 0).reshape(-1))
        for values, numbers in zip(rows, found, strict=True):
            own = values.reshape(-1, WIDTH)
            for image in np.flatnonzero(numbers > 0).tolist():
                back = int(numbers.reshape(-1)[image])
                there = place * parts + image - back
                assert back <= reach * parts
                assert there >= 0
                assert stored[there]
                np.testing.assert_array_equal(images[there], own[image])


@pytest.fixture
def life(tmp_path: Path) -> Iterator[Life]:
    """80 rows of two lanes, of which 64 can be read; all but the first of each lie with the next ones."""
    made = Life(tmp_path, 64, 24, 24, (4, 8), 4)
    for _ in range(5):
        made.extend(16, lanes=2)
    made.sync()
    yield made
    made.end()


def test_rows_are_stored_once(life: Life) -> None:
    column = life.columns.columns[0]
    np.testing.assert_array_equal(column.distances(np.arange(80)), [0, 0, *[2] * 78])
    life.check()
    files = {path.name: path.stat().st_size for path in column.paths() if path.name.startswith("c.")}
    # Headers, tables and two indexes; no frame.
    assert files["c.2.0"] == 4 * (16 + 4 + 8) + 2 * (4 * 16 + 4)
    assert files["c.0.0"] > files["c.2.0"]


def test_rows_of_the_open_chunk_do_not_have_the_distances_of_the_previous_lap(life: Life) -> None:
    """A store that has only these rows does not need older ones, which a power cut may have taken."""
    slots = life.slots
    assert slots == 112
    for count in (16, 16, 6):
        life.extend(count, lanes=2)
    column = life.columns.columns[0]
    np.testing.assert_array_equal(column.distances(np.arange(4, 8)), [0, 0, 2, 2])
    first = slots + 5
    assert column._older(first, 2)[1] == 0
    life.check()


def test_other_readers_find_the_same_or_zeros(life: Life) -> None:
    import zarr

    group = zarr.open_group(life.folder / "columns", mode="r")
    observed, following = group["a"], group["next/a"]
    assert observed.attrs["expstore"]["shared"]["with"] == "next/a"
    distances = life.columns.columns[0].distances(np.arange(80))
    wanted = np.array([life.rows[one][0] for one in range(1, 81)])
    wanted[distances > 0] = 0
    np.testing.assert_array_equal(observed[:80], wanted)
    np.testing.assert_array_equal(following[:64], [life.rows[one][1] for one in range(1, 65)])


def test_other_readers_find_the_images_of_stacks_or_zeros(tmp_path: Path) -> None:
    import zarr

    life = Life(tmp_path, 64, 24, 24, (4, 8), 4, parts=4)
    for _ in range(4):
        life.extend(16, lanes=2)
    life.sync()
    group = zarr.open_group(tmp_path / "columns", mode="r")
    for place, name in enumerate(("a", "next/a")):
        distances = life.columns.packed[place].distances(np.arange(64)).reshape(64, 4)
        wanted = np.array([life.rows[one][place] for one in range(1, 65)])
        wanted[distances > 0] = 0
        np.testing.assert_array_equal(group[name][:64], wanted)
        assert (distances == 0).sum() == (2 * 4 if place == 0 else 64 + 2 * 3)
    life.end()


def test_rows_that_lie_with_lost_ones_are_refused(life: Life) -> None:
    """The chunk of next rows 33 to 40 is gone: that costs rows 35 to 42, and no other."""
    life.end()
    path = life.folder / "columns/next/a/c.1.0"
    data = bytearray(path.read_bytes())
    with path.open("rb") as file:
        opened = Disk().open(path, write=False)
        chunks = read_index(opened, 4)
        opened.close()
        assert file.read(4)
    data[int(chunks.offsets[0]) + 20] ^= 1
    path.write_bytes(data)
    reader = ReadColumns(Disk(), life.folder / "columns", FIELDS, life.slots)
    reader.look(0)
    reader.look_to(80)
    for one in range(17, 81):
        slots = np.array([one - 1])
        for place, lost in ((0, range(35, 43)), (1, range(33, 41))):
            if one in lost:
                with pytest.raises(CorruptionError, match="next/a"):
                    reader.columns[place].gather(slots)
            else:
                np.testing.assert_array_equal(reader.columns[place].gather(slots)[0], life.rows[one][place])
        if 33 <= one < 43:
            with pytest.raises(CorruptionError, match="next/a"):
                reader.gather_rows(slots, [0, 1])


@pytest.mark.parametrize("loaded", [False, True])
def test_a_bit_in_a_table_is_noticed(life: Life, loaded: bool) -> None:
    life.end()
    path = life.folder / "columns/a/c.2.0"
    clean = path.read_bytes()
    for at in range(16, 28):
        data = bytearray(clean)
        data[at] ^= 4
        path.write_bytes(data)
        reader = ReadColumns(Disk(), life.folder / "columns", FIELDS, life.slots)
        column = reader.columns[0]
        if loaded:
            column._load()
        reader.look(0)
        reader.look_to(80)
        with pytest.raises(CorruptionError, match="/a"):
            reader.gather_rows(np.arange(32, 36), [0, 1])
        same(reader.gather_rows(np.arange(48, 64), [0, 1]), life_rows(life, 48, 16))


def life_rows(life: Life, first: int, count: int) -> list[Any]:
    return [
        np.array([life.rows[one][n] for one in range(first + 1, first + count + 1)], np.uint8) for n in (0, 1)
    ]


def test_rows_before_the_oldest_one_must_be_there(life: Life) -> None:
    """Next rows 1 to 32 are gone: rows 33 and 34 lie with the last two of them."""
    life.end()
    (life.folder / "columns/next/a/c.0.0").unlink()
    columns = life.make()
    columns.open_shards()
    for first in (17, 33, 34):
        with pytest.raises(CorruptionError, match="next/a"):
            columns.require_rows(first, 81 - first)
    columns.require_rows(35, 46)
    columns.close()


@settings(deadline=None, max_examples=200)
@given(
    reach=st.integers(1, 9),
    width=st.sampled_from([1, 3, 8]),
    letters=st.integers(1, 6),
    parts=st.lists(st.tuples(st.integers(1, 30), st.booleans()), min_size=1, max_size=6),
)
def test_found_duplicates_are_duplicates(
    reach: int, width: int, letters: int, parts: list[tuple[int, bool]]
) -> None:
    random, known = np.random.default_rng(7), NextRows(width, reach)
    place, told, missed = 100, {}, 0
    for count, skipped in parts:
        if skipped:
            place, told = place + 50, {}
        rows, following = random.integers(0, letters, (2, count, width), np.uint8)
        told.update(zip(range(place, place + count), following, strict=True))
        for row, distance in enumerate(known.find(place, rows, following)[0][:, 0].tolist()):
            at = place + row
            if distance:
                assert 1 <= distance <= reach
                np.testing.assert_array_equal(told[at - distance], rows[row])
            else:
                near = [told[n] for n in range(max(place - 500, at - reach), at) if n in told]
                missed += any((rows[row] == one).all() for one in near)
        place += count
    assert missed == 0


def test_wide_rows_are_looked_for_among_few() -> None:
    """They are kept in memory, and a ring has as many slots more."""
    wanted = {64: 1024, 7056: 594, 1 << 20: 16, 8 << 20: 4, 1 << 30: 1}
    assert {width: reach_for(Field(("a",), "uint8", (width,))) for width in wanted} == wanted


def test_stacks_that_come_once_more_are_not_referred_to() -> None:
    """A write of them failed: the columns may have either what was found first or what was found then."""
    frames = np.arange(80, dtype=np.uint16).reshape(20, 2, 2)
    frames[:, 1] = np.roll(frames[:, 0], -1, 0)
    known = NextStacks(8, 4, 2)

    def find(place: int, first: int, count: int) -> list[int]:
        rows = frames[first : first + count], frames[first + 1 : first + count + 1]
        return known.find(place, *rows)[0][:, 1].tolist()

    assert find(7, 0, 3) == [0, 2, 2]
    assert find(10, 3, 3) == [2, 2, 2]
    assert find(10, 3, 3) == [0, 0, 0]
    assert find(10, 3, 6) == [0, 0, 0, 0, 2, 2]
    assert find(16, 9, 1) == [2]
    assert find(20, 12, 2) == [0, 2]  # others were written in between
