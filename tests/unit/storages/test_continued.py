"""Continued fields store elements once, and every reader gets whole values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

import expstore
from expstore.core import tuning
from expstore.errors import CorruptionError, SchemaError
from expstore.maintenance import repair, verify
from expstore.schema.field_parser import schema_of
from expstore.schema.schema import Schema
from expstore.specs import Continued
from expstore.storages.columns.arrow import writer
from expstore.storages.columns.arrow.pieces import Piece, Pieces, pack_pieces
from expstore.storages.columns.arrow.segments import Segments
from expstore.storages.engine import store
from tests.support.conversations import Talks, check_rows, open_talks, segment_bytes
from tests.support.stores import NoKeeper

pytestmark = pytest.mark.index


@pytest.fixture(params=["compiled", "decoded"])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read rows by the compiled loops, or as before they are loaded."""
    if request.param == "decoded":
        monkeypatch.setattr(Segments, "warm", lambda self: None)
        monkeypatch.setattr(Segments, "_load", lambda self: None)
    else:
        monkeypatch.setattr(Segments, "warm", Segments._load)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few rows fill a segment and a slot, and run checkpoints only when a test asks for one."""
    monkeypatch.setattr(tuning, "ARROW_SEGMENT_BYTES", 1 << 15)
    monkeypatch.setattr(tuning, "SPARE_SLOTS", 60)
    monkeypatch.setattr(store, "Keeper", NoKeeper)


def tokens(*sizes: int, seed: int = 0) -> list[list[int]]:
    """Return the talks of a conversation: each row has the tokens of the row before, and more."""
    chance, rows = np.random.default_rng(seed), list[list[int]]()
    for size in sizes:
        rows.append([*(rows[-1] if rows else []), *chance.integers(0, 50_000, size).tolist()])
    return rows


def table(kind: Any = None, **columns: Any) -> pa.Table:
    """Return rows; lists have int32 elements, or elements of another type."""
    made = {name.replace("__", "."): value for name, value in columns.items()}
    for name in made.keys() & {"x", "y", "tokens"}:
        made[name] = pa.array(made[name], pa.list_(kind or pa.int32()))
    return pa.table(made)


def write(path: Path, kind: Any, talks: list[list[list[int]]], compression: str | None, **more: Any) -> int:
    """Write conversations step by step, each in an episode of its own; return the bytes of the segments."""
    layout = expstore.Layout(kind="arrow", compression=compression)
    schema = {"talk": "int64", "tokens": kind, **more}
    with expstore.open(path, layout=layout, schema=schema, episodes={"traj": "talk"}) as rb:
        for step in zip(*talks, strict=True):
            rows = {"talk": np.arange(len(talks)), "tokens": pa.array(step, pa.list_(pa.int32()))}
            if "parent" in more:
                rows["parent"] = np.full(len(talks), rb.storage.last > 0)
            rb.extend(pa.table(rows))
    return segment_bytes(path)


@pytest.mark.guarantee(
    "rows/once",
    "A field of the type `Continued` stores the elements that a row shares with earlier rows once: 32 turns "
    "of 500 random tokens take a fifteenth of whole rows, 64 turns after a prompt that a group of 8 shares a "
    "thirtieth.",
)
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_32_steps_take_a_fifteenth(tmp_path: Path, compression: str | None) -> None:
    talks = [tokens(*[500] * 32, seed=seed) for seed in range(8)]
    whole = write(tmp_path / "whole", ("int32", (None,)), talks, compression)
    once = write(tmp_path / "once", Continued("int32"), talks, compression)
    assert whole >= 15 * once


@pytest.mark.guarantee("rows/once")
def test_a_prompt_of_a_group_is_stored_once(tmp_path: Path) -> None:
    prompt = np.random.default_rng(99).integers(0, 50_000, 2000).tolist()
    talks = [[prompt + row for row in tokens(*[500] * 64, seed=seed)] for seed in range(8)]
    schema = {"talk": "int64", "parent": "int64", "tokens": Continued("int32", parent="parent")}
    with expstore.open(tmp_path / "once", layout="arrow", schema=schema, episodes={"traj": "talk"}) as rb:
        (root,) = rb.extend(table(talk=[9], parent=[0], tokens=[prompt]), return_ids=True)
        for number, step in enumerate(zip(*talks, strict=True)):
            parents = np.full(8, 0 if number else int(root))
            rb.extend(table(talk=np.arange(8), parent=parents, tokens=list(step)))
        assert rb.storage.read(rb.storage.stored.ids(), [2])[0][-8:].to_pylist() == list(step)
    assert write(tmp_path / "whole", ("int32", (None,)), talks, None) >= 30 * segment_bytes(tmp_path / "once")


@pytest.mark.guarantee(
    "rows/continued",
    "Rows that continue other rows read back bit by bit as they were written, also after `kill -9` or a "
    "power cut of the writer; a value that does not have its checksum is an error.",
)
@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_trees_read_back_exactly(tmp_path: Path, compression: str | None) -> None:
    path, talks = tmp_path / "a.exp", Talks(seed=1)
    rb = open_talks(path, compression)
    for number in range(40):
        rb.extend(talks.batch())
        if number % 20 == 10:
            rb.close()
            rb = expstore.open(path)
    assert check_rows(rb.storage, talks.rows) == len(talks.rows)
    with expstore.open(path, mode="r") as reader:
        rb.extend(talks.batch())
        rb.storage.drain()
        reader.refresh()
        assert check_rows(reader.storage, talks.rows) == len(talks.rows)
    slots = np.arange(len(talks.rows))
    sizes = rb.storage.state.sizes_of(slots)
    texts = [sum(4 + len(text.encode()) for text in row["messages"]) + 4 for row in talks.rows]
    raws = [sum(4 + len(data) for data in row["raw"]) + 4 for row in talks.rows]
    plain = [4 * (len(row["tokens"]) + len(row["logprobs"])) + len(row["mask"]) + 12 for row in talks.rows]
    np.testing.assert_array_equal(sizes, np.array(texts) + np.array(raws) + np.array(plain))
    rb.close()
    with expstore.open(path, mode="r") as reader:
        assert check_rows(reader.storage, talks.rows) == len(talks.rows)
    assert verify(path) == []


@pytest.mark.guarantee("rows/continued")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [2000, pytest.param(10_000, marks=pytest.mark.torture)])
def test_thousands_of_trees_read_back_exactly(tmp_path: Path, count: int) -> None:
    talks = Talks(seed=2, talks=40)
    with open_talks(tmp_path / "a.exp") as rb:
        while talks._number < count:
            rb.extend(talks.batch(most=400))
            talks._open.clear()
        assert check_rows(rb.storage, talks.rows) == len(talks.rows)


@pytest.mark.guarantee("rows/continued")
def test_readers_see_whole_values(tmp_path: Path) -> None:
    path, talks = tmp_path / "a.exp", Talks(seed=3)
    with open_talks(path, batches={"as_numpy": True}, batch_size=16) as rb:
        rb.extend(talks.batch(most=60))
        lists = [row["tokens"] for row in talks.rows]
        assert [row.tolist() for row in rb[:]["tokens"]] == lists
        batch, info = rb.sample(return_info=True)
        assert [row.tolist() for row in batch["tokens"]] == [lists[n - 1] for n in info["id"].tolist()]
        assert [row for (row,) in rb.sql("SELECT tokens FROM transitions ORDER BY _id").fetchall()] == lists
        expstore.exchange.export_parquet(rb, tmp_path / "out")
        stored = pyarrow.parquet.read_table(tmp_path / "out" / "rows")
        assert stored["messages"].to_pylist() == [row["messages"] for row in talks.rows]
        assert stored["tokens"].to_pylist() == lists


def owns(storage: Any, ids: list[int], number: int = 0) -> list[int]:
    """Return the number of elements that rows store themselves."""
    segments = storage.state.columns.shared[0]
    storage.drain()
    return [len(row["own"]) for row in segments.gather_stored(np.array(ids), [number])[0].to_pylist()]


def test_forks_share_what_they_begin_with(tmp_path: Path) -> None:
    a, ab, abc = tokens(100, 100, 100)
    ad = [*a, *range(60)]
    rows = [a, ab, abc, ad, [*ab, *range(50)], [*ad, 1], abc[:250], a, [7] * 80]
    with expstore.open(tmp_path / "a.exp", layout="arrow", schema={"x": Continued("int32")}) as rb:
        for row in rows:
            rb.extend(table(x=[row]))
        assert owns(rb.storage, list(range(1, 10))) == [100, 100, 100, 60, 50, 1, 50, 0, 80]
        assert rb.storage.read(rb.storage.stored.ids())[0].to_pylist() == rows


def test_floats_are_compared_by_their_bits(tmp_path: Path) -> None:
    value = [0.0, float("nan"), 1.0] * 20
    with expstore.open(tmp_path / "a.exp", layout="arrow", schema={"x": Continued("float32")}) as rb:
        rb.extend(table(pa.float32(), x=[value, [*value, 2.0], [-0.0, *value]]))
        assert owns(rb.storage, [1, 2, 3]) == [60, 1, 61]


def test_rows_that_save_nothing_are_whole(tmp_path: Path) -> None:
    rows = tokens(*[1] * 40)
    with expstore.open(tmp_path / "a.exp", layout="arrow", schema={"x": Continued("int32")}) as rb:
        rb.extend(table(x=rows))
        assert owns(rb.storage, [1, 2, 3]) == [1, 2, 3]
        assert sum(owns(rb.storage, list(range(1, 41)))) < sum(map(len, rows)) / 2


@pytest.mark.parametrize("cache", [0, 64 << 20])
def test_an_episode_is_continued_after_an_opening(
    tmp_path: Path, cache: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "CONTINUED_BYTES", cache)
    a, ab, abc, abcd = tokens(100, 100, 100, 100)
    path = tmp_path / "a.exp"
    with expstore.open(path, layout="arrow", schema={"x": Continued("int32")}) as rb:
        rb.extend(table(x=[a, ab]), source="one")
    with expstore.open(path) as rb:
        rb.episodes.resume("one", check=False)
        rb.extend(table(x=[[*a, 5], abc, abcd]), source="one")
        assert owns(rb.storage, [1, 2, 3, 4, 5]) == [100, 100, 1, 100, 100]
        assert rb.storage.read(rb.storage.stored.ids())[0].to_pylist() == [a, ab, [*a, 5], abc, abcd]


def test_each_field_decides_alone(tmp_path: Path) -> None:
    schema = {"x": Continued("int32"), "y": Continued("int32")}
    a, ab = tokens(50, 10)
    with expstore.open(tmp_path / "a.exp", layout="arrow", schema=schema) as rb:
        rb.extend(table(x=[a, ab], y=[a, a[::-1]]))
        assert (owns(rb.storage, [2], 0), owns(rb.storage, [2], 1)) == ([10], [50])


def test_none_is_no_empty_list(tmp_path: Path) -> None:
    rows = [[1] * 30, None, [], [1] * 31, None]
    with expstore.open(tmp_path / "a.exp", layout="arrow", schema={"x": Continued("int32")}) as rb:
        rb.extend(table(x=rows))
        rb.storage.drain()
        assert rb.storage.read(rb.storage.stored.ids())[0].to_pylist() == rows
        assert owns(rb.storage, [4]) == [1]


def test_a_failed_write_leaves_no_row_to_continue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, ab = tokens(50, 50)
    with expstore.open(tmp_path / "a.exp", layout="arrow", schema={"x": Continued("int32")}) as rb:
        rb.extend(table(x=[[1]]))
        rb.storage.drain()
        (segments,) = rb.storage.state.columns.shared
        with monkeypatch.context() as patch:
            patch.setattr(segments, "_append", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                rb.extend(table(x=[a] * 100))
        rb.extend(table(x=[[2] * 50, ab]))
        assert rb.storage.read(np.array([2, 3]))[0].to_pylist() == [[2] * 50, ab]


# -- rows that leave ------------------------------------------------------------------------------------


@pytest.mark.guarantee(
    "keep/continued",
    "Deleted and evicted rows disappear at once; elements that remaining rows continue stay until no row "
    "needs them, in versions and merged stores, too.",
)
@pytest.mark.usefixtures("short")
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_rows_keep_what_they_continue_when_other_rows_are_deleted(
    tmp_path: Path, compression: str | None
) -> None:
    path, talks = tmp_path / "a.exp", Talks(seed=4)
    rb = open_talks(path, compression)
    reader: Any = None
    for number in range(60):
        rb.extend(talks.batch())
        if number % 10 == 5:
            rb.episodes.delete(f"episode_id % 3 = {number % 3}")
            rb.flush()
            reader = reader or expstore.open(path, mode="r")
            reader.refresh()
            assert check_rows(rb.storage, talks.rows) == check_rows(reader.storage, talks.rows) > 0
        if number == 30:
            rb.close()
            rb = expstore.open(path)
    reader.close()
    rb.dumps(tmp_path / "versions")
    ids = rb.storage.stored.nth(np.arange(rb.storage.stored.rows))
    rb.close()
    assert verify(path) == []
    with expstore.open(tmp_path / "versions", mode="r") as version:
        check_rows(version.storage, talks.rows)
    with open_talks(tmp_path / "b.exp") as other:
        other.loads(tmp_path / "versions")
        assert check_rows(other.storage, talks.rows, ids) == ids.size
    expstore.merge([path], out=tmp_path / "c.exp")
    with expstore.open(tmp_path / "c.exp") as merged:
        assert check_rows(merged.storage, talks.rows, ids) == ids.size


@pytest.mark.guarantee("keep/continued")
@pytest.mark.usefixtures("short")
def test_a_segment_goes_when_no_row_needs_it(tmp_path: Path) -> None:
    path, prompt = tmp_path / "a.exp", tokens(3000)[0]
    schema = {"parent": "int64", "x": Continued("int32", parent="parent"), "next": {"done": "bool"}}

    def extend(parent: int, *rows: list[int]) -> int:
        ends = [*[False] * (len(rows) - 1), True]
        data = table(parent=[parent] * len(rows), x=list(rows), next__done=ends)
        return int(rb.extend(data, return_ids=True)[-1])

    def names() -> list[int]:
        return [int(one.stem) for one in (path / "segments").iterdir()]

    with expstore.open(path, layout="arrow", schema=schema) as rb:
        root = extend(0, prompt)
        extend(0, *tokens(4000, 4000, 4000, seed=1))
        child = extend(root, [*prompt, 1])
        extend(0, *tokens(4000, 4000, 4000, seed=2))
        rb.flush()
        assert owns(rb.storage, [root, child], 0) == [3000, 1]
        rb.episodes.delete("episode_id IN (1, 2)")
        assert 1 not in rb.storage.stored.ids()
        assert rb.storage.read(np.array([child]), [1])[0].to_pylist() == [[*prompt, 1]]
        assert 1 in names()
        rb.episodes.delete("episode_id = 3")
        assert 1 not in names()
        rb.extend(table(parent=[root], x=[[*prompt, 2]], next__done=[True]))
        rb.storage.drain()
        assert owns(rb.storage, [rb.storage.last], 0) == [3001]


@pytest.mark.guarantee("keep/continued")
@pytest.mark.usefixtures("short")
def test_a_ring_keeps_a_bounded_number_of_rows(tmp_path: Path) -> None:
    path, chance, sizes = tmp_path / "a.exp", np.random.default_rng(5), list[int]()
    rows: dict[int, list[int]] = {}
    value: list[int] = []
    with expstore.open(path, capacity=100, layout="arrow", schema={"x": Continued("int32")}) as rb:
        for number in range(800):
            value = [*value[:4000], *chance.integers(0, 50_000, 40).tolist()]
            (row,) = rb.extend(table(x=[value]), return_ids=True).tolist()
            rows[row] = value
            if number % 50 == 49:
                rb.flush()
                sizes.append(segment_bytes(path))
                ids = rb.storage.stored.ids()
                assert rb.storage.read(ids)[0].to_pylist() == [rows[n] for n in ids.tolist()]
        assert max(sizes[8:]) <= 1.5 * max(sizes[4:8])
        assert min(owns(rb.storage, rb.storage.stored.ids().tolist())) == 40
    assert verify(path) == []


@pytest.mark.guarantee("keep/continued")
@pytest.mark.usefixtures("short")
def test_a_limit_of_bytes_counts_what_deleted_rows_leave(tmp_path: Path) -> None:
    path, written, root = tmp_path / "a.exp", dict[int, list[int]](), 0
    schema = {"parent": "int64", "x": Continued("int32", parent="parent"), "next": {"done": "bool"}}
    with expstore.open(path, layout="arrow", schema=schema, retain={"bytes": 400_000}) as rb:
        for number in range(40):
            prompt = tokens(2000, seed=number)[0]
            for member in range(8):
                rows = [prompt + row for row in tokens(100 * bool(member), 100, seed=100 * number + member)]
                data = table(parent=[root if member else 0, 0], x=rows, next__done=[False, True])
                ids = rb.extend(data, return_ids=True).tolist()
                root = root if member else ids[0]
                written |= zip(ids, rows, strict=True)
            if number % 8 == 7:
                rb.flush()
                rb.retention.apply()
        ids = rb.storage.stored.nth(np.arange(rb.storage.stored.rows))
        assert rb.storage.read(ids, [1])[0].to_pylist() == [written[row] for row in ids.tolist()]
        assert 200 < ids.size < len(written)
    assert segment_bytes(path) < 1.2 * 400_000


# -- damage ---------------------------------------------------------------------------------------------


@pytest.mark.guarantee("rows/continued")
@pytest.mark.usefixtures("loops")
def test_wrong_pieces_are_never_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, ab = tokens(50, 50)
    path = tmp_path / "a.exp"

    def pack(row: int, pieces: list[Piece], crc: int) -> bytes:
        return pack_pieces(row, [Piece(1, 50) for _ in pieces], crc)

    with expstore.open(path, layout="arrow", schema={"x": Continued("int32")}) as rb:
        rb.extend(table(x=[[9] * 50, a]))
        with monkeypatch.context() as patch:
            patch.setattr("expstore.storages.columns.arrow.prefixes.pack_pieces", pack)
            rb.extend(table(x=[ab]))
            rb.storage.drain()
        with pytest.raises(CorruptionError, match="does not have its checksum"):
            rb.storage.read(np.array([3]))
        assert rb.storage.read(np.array([1, 2]))[0].to_pylist() == [[9] * 50, a]


@pytest.mark.guarantee("rows/continued")
def test_rows_of_damaged_rows_are_lost_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "MEMTABLE_BATCH_BYTES", 0)  # a message for each row
    monkeypatch.setattr(writer, "_has_short_batches", lambda *_: False)
    a, ab, abc = tokens(50, 50, 50)
    path = tmp_path / "a.exp"
    with expstore.open(path, layout="arrow", schema={"x": Continued("int32")}) as rb:
        for row in (a, ab, abc, [3] * 50):
            rb.extend(table(x=[row]))
    (segment,) = (path / "segments").iterdir()
    data = bytearray(segment.read_bytes())
    at = data.index(np.array(ab[60:70], np.int32).tobytes())
    data[at] ^= 1
    segment.write_bytes(data)
    with expstore.open(path, mode="r") as rb, pytest.raises(CorruptionError):
        rb.storage.read(np.array([3]))
    (found,) = verify(path)
    assert found.ids == ((2, 3),)
    repair(path, drop_damaged=True)
    assert verify(path) == []
    with expstore.open(path) as rb:
        ids = rb.storage.stored.nth(np.arange(rb.storage.stored.rows))
        assert ids.tolist() == [1, 4]
        assert rb.storage.read(ids)[0].to_pylist() == [a, [3] * 50]


@pytest.mark.parametrize(
    "packed", [b"123", b"1234\x80", b"1234\x01", b"1234\x09\x01", b"1234\x01\x00", b"1234" + b"\x80" * 10]
)
def test_damaged_pieces_are_refused(packed: bytes) -> None:
    with pytest.raises(CorruptionError, match="pieces of a row are damaged"):
        Pieces.read(np.array([5, 9]), pa.array([pack_pieces(5, [Piece(2, 3)], 0), packed], pa.binary()))


def test_pieces_read_as_they_were_packed() -> None:
    pieces = [[], [Piece(5, 500), Piece(9, 1), Piece(299, 70_000)], [Piece(1 << 40, 1 << 31)]]
    ids = np.array([5, 300, (1 << 40) + 1])
    packed = [pack_pieces(row, some, 7) for row, some in zip(ids.tolist(), pieces, strict=True)]
    found = Pieces.read(ids, pa.array([*packed], pa.binary()))
    assert [found.of_row(number) for number in range(3)] == pieces
    assert found.crcs.tolist() == [7, 7, 7]


# -- declarations ---------------------------------------------------------------------------------------


def test_types_are_read_from_what_a_store_has() -> None:
    schema = schema_of({"parent": "int64", "x": Continued("int32", parent="parent"), "y": Continued(str)})
    assert schema is not None
    assert Schema.from_json(schema.to_json()) == schema
    assert str(schema["x",]) == "continued int32[?]"


@pytest.mark.parametrize(
    "fields",
    [
        {"x": Continued("int32", parent="parent")},
        {"x": Continued("int32", parent="parent"), "parent": "int32"},
        {"x": Continued("int32", parent="parent"), "parent": ("int64", (2,))},
        {"x": Continued("no dtype")},
        {"x": Continued(object)},
    ],
)
def test_wrong_declarations_are_refused(fields: Any) -> None:
    with pytest.raises(SchemaError):
        schema_of(fields)


def test_elements_of_none_are_refused(tmp_path: Path) -> None:
    with expstore.open(tmp_path / "a.exp", layout="arrow", schema={"x": Continued(str)}) as rb:
        with pytest.raises(SchemaError, match="continued list<string>"):
            rb.extend(table(pa.string(), x=[["a", None]]))
        assert len(rb) == 0


def test_the_field_of_parents_cannot_be_dropped(tmp_path: Path) -> None:
    schema = {"x": Continued("int32", parent="parent"), "parent": "int64"}
    with expstore.open(tmp_path / "a.exp", layout="arrow", schema=schema) as rb:
        rb.extend(table(x=[[1]], parent=[0]))
        with pytest.raises(SchemaError, match="'parent'"):
            rb.columns.drop("parent")
        assert len(rb[:]) == 1


def test_other_layouts_refuse_the_type(tmp_path: Path) -> None:
    with (
        pytest.raises(SchemaError, match="arrow"),
        expstore.open(tmp_path / "a.exp", layout="zarr", schema={"x": Continued("int32")}) as rb,
    ):
        rb.extend(table(x=[[1]]))
