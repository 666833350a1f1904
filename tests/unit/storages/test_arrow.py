"""The Arrow storage: segments through reopening, rings, followers, snapshots, loads, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

import expstore
from expstore.core import tuning
from expstore.core.values import Ranking
from expstore.episodes.segmentation import Steps
from expstore.errors import CorruptionError, SchemaError, StateError, StorageError
from expstore.maintenance import repair, verify
from expstore.schema.arrow_sizes import row_sizes
from expstore.schema.arrow_types import ragged_text
from expstore.schema.field_roles import find_keys
from expstore.schema.schema import ARROW, Field, Schema
from expstore.storages.base import Storage
from expstore.storages.columns.arrow import writer
from expstore.storages.engine.open_settings import Settings
from expstore.storages.factory import ArrowStorage, ZarrStorage
from expstore.storages.follower import FollowerStorage
from expstore.storages.memory import MemoryStorage
from expstore.writers.writers import RoundRobinWriter
from tests.support.case_selection import in_full, share
from tests.support.damaged_stores import flip
from tests.support.gated_disk import GatedDisk, refuse
from tests.support.stores import prepare, window_ids
from tests.support.tuned import few_rows_in_memory, set_spare_slots
from tests.support.variable_fields import SCHEMA, check, columns_of, put

pytestmark = pytest.mark.usefixtures("no_syncs")  # nothing here is about what a power cut leaves


@pytest.fixture(autouse=True)
def _few_rows_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows_in_memory(monkeypatch)


@pytest.fixture(params=[None, "lz4", "zstd"])
def compression(request: pytest.FixtureRequest) -> Any:
    return request.param


def small(patch: pytest.MonkeyPatch) -> None:
    """Make segments, batches and merges so small that some hundred rows have all of them."""
    patch.setattr(tuning, "ARROW_SEGMENT_BYTES", 16_000)
    patch.setattr(tuning, "ARROW_SEGMENT_BATCHES", 20)
    patch.setattr(tuning, "ARROW_BATCH_BYTES", 3000)
    patch.setattr(tuning, "ARROW_COMPRESSED_BATCH_BYTES", 900)
    patch.setattr(tuning, "ARROW_WRITE_BYTES", 6000)
    patch.setattr(tuning, "ARROW_COMPACTED_BYTES", 2000)
    patch.setattr(tuning, "ARROW_COMPACTION_BATCHES", 4)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


def new(path: Path, capacity: int | None = None, **options: Any) -> ArrowStorage:
    return prepare(ArrowStorage(path, capacity, **options), SCHEMA)


def check_reopened(storage: ArrowStorage) -> None:
    """Close a store, open it again, and check its rows."""
    storage.close()
    again = new(storage.path)
    check(again, window_ids(again))
    again.close()


def segments(path: Path) -> list[Path]:
    return sorted((path / "segments").iterdir())


def rows_in(path: Path) -> int:
    """Read a segment as any other program would."""
    with pa.ipc.open_stream(path) as reader:
        table = reader.read_all()
    table.validate(full=True)
    return int(table.num_rows)


acts = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 9)),
    st.tuples(st.just("put"), st.integers(10, 70)),
    st.tuples(st.sampled_from(["clear", "sync", "sync", "reopen", "dumps", "loads", "change"]), st.just(0)),
)


@pytest.mark.guarantee(
    "rows/variable",
    "Texts, lists and tensors of any shape are read back unchanged after rings that wrap, reopenings, "
    "kills and power cuts.",
)
@pytest.mark.slow
@share(0.4, of=20, deadline=None)
@given(
    plan=st.lists(acts, min_size=1, max_size=20),
    capacity=st.sampled_from([None, 7, 40]),
    compression=st.sampled_from([None, "lz4", "zstd"]),
    seed=st.integers(0, 2**31),
)
def test_rows_against_a_model(
    tmp_path_factory: pytest.TempPathFactory,
    plan: list[tuple[str, int]],
    capacity: int | None,
    compression: Any,
    seed: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        small(patch)
        set_spare_slots(patch, 6)
        folder = tmp_path_factory.mktemp("model")
        path, rng = folder / "run.exp", np.random.default_rng(seed)
        storage = new(path, capacity, compression=compression)
        born: dict[int, int] = {}  # id -> the number that its values follow from
        kept: dict[int, int] | None = None
        for act, number in plan:
            if act == "put":
                born |= {id: id for id in put(storage, number).tolist()}
            elif act == "clear":
                storage.clear()
                born.clear()
            elif act == "sync":
                storage.sync()
            elif act == "reopen":
                storage.close()
                storage = new(path)
            elif act == "dumps":
                storage.dumps(folder / "versions")
                kept = dict(born)
            elif act == "loads" and kept is not None:
                storage.loads(folder / "versions")
                last = storage.last
                born = {last - max(kept) + id: number for id, number in kept.items()} if kept else {}
            elif act == "change" and born:
                chosen = np.array(sorted(born)[:2])
                storage.change(chosen, [0], [np.zeros((chosen.size, 3), np.float32)])
                storage.change(chosen, [0], [columns_of(np.array([born[i] for i in chosen.tolist()]))[0]])
            if capacity is not None:
                born = {id: n for id, n in born.items() if id > storage.last - capacity}
            ids = np.array(sorted(born), np.int64)
            np.testing.assert_array_equal(window_ids(storage), ids)
            drawn = rng.choice(ids, min(ids.size, 12)) if ids.size else ids
            numbers = np.array([born[i] for i in drawn.tolist()], np.int64)
            for found, expected in zip(storage.read(drawn), columns_of(numbers), strict=True):
                assert found.tolist() == expected.tolist()
        storage.close()
        with_follower = FollowerStorage(path)
        numbers = np.array([born[i] for i in ids.tolist()], np.int64)
        for found, expected in zip(with_follower.read(ids), columns_of(numbers), strict=True):
            assert found.tolist() == expected.tolist()
        with_follower.close()


test_rows_against_a_model_in_full = pytest.mark.torture(in_full(test_rows_against_a_model))


# ---------------------------------------------------------------------------------------------------
# Segments.


@pytest.mark.guarantee("exchange/readers")
def test_segments_can_be_read_by_any_program_open_or_sealed(
    tmp_path: Path, tiny: None, compression: Any
) -> None:
    storage = new(tmp_path / "a.exp", compression=compression)
    for count in (30, 40, 1, 1, 25, 60):
        put(storage, count)
    storage.sync()
    paths = segments(tmp_path / "a.exp")
    assert len(paths) > 2
    assert sum(map(rows_in, paths)) == storage.last == 157
    assert [path.name for path in paths] == sorted(path.name for path in paths)
    storage.close()
    assert sum(map(rows_in, segments(tmp_path / "a.exp"))) == 157


@pytest.mark.guarantee("rows/variable")
def test_segments_whose_rows_have_left_a_ring_go_after_the_mark(
    tmp_path: Path, tiny: None, monkeypatch: Any
) -> None:
    set_spare_slots(monkeypatch, 10)
    storage = new(tmp_path / "a.exp", 30)
    storage.background.stop()
    names = set()
    for _ in range(20):
        put(storage, 9)
        names |= {path.name for path in segments(storage.path)}
    storage.sync()
    storage.sync()
    assert len(segments(storage.path)) <= 3 < len(names)
    assert storage.geometry.slots is not None
    kept = storage.state.columns.shared[0].segments
    assert all(segment.last > storage.last - storage.geometry.slots for segment in kept)
    check(storage, window_ids(storage))
    check_reopened(storage)


def test_empty_frees_segments(tmp_path: Path, tiny: None) -> None:
    storage = new(tmp_path / "a.exp")
    for _ in range(8):
        put(storage, 30)
    storage.sync()
    assert len(segments(storage.path)) > 3
    storage.clear()
    put(storage, 60)
    storage.sync()
    storage.sync()
    assert sum(map(rows_in, segments(storage.path))) < 120
    check(storage, window_ids(storage))
    storage.close()


def test_merging_that_the_disk_refuses_costs_nothing(tmp_path: Path, tiny: None, monkeypatch: Any) -> None:
    monkeypatch.setattr(tuning, "ARROW_COMPACTED_BYTES", 12_000)
    disk = GatedDisk()
    storage = new(tmp_path / "a.exp", disk=disk)
    storage.background.stop()
    disk.before = refuse("write", where=writer.AGAIN)
    for _ in range(60):
        put(storage, 1)
        storage.drain()
    storage.sync()
    storage.sync()
    check(storage, window_ids(storage))
    disk.relax()
    batches = sum(len(segment.headers) for segment in storage.state.columns.shared[0].segments)
    for _ in range(4):  # one segment per sync
        put(storage, 1)
        storage.sync()
    assert sum(len(segment.headers) for segment in storage.state.columns.shared[0].segments) < batches - 20
    check(storage, window_ids(storage))
    storage.close()


# ---------------------------------------------------------------------------------------------------
# What a writer leaves that nobody closed.


def leave(storage: ArrowStorage, tmp_path: Path) -> Path:
    """Return a copy of a store as a kill would leave it."""
    import shutil

    path = tmp_path / "left.exp"
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(storage.path, path)
    return path


LEFT = [(1,), (3, 2, 1), (20,), (1, 30, 1), (30, 1, 1), (1, 1, 200)]


@pytest.mark.guarantee("rows/variable")
@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("counts", "durability"),
    [
        *((counts, "process") for counts in LEFT),
        ((1, 30, 1), "sync"),
        *(pytest.param(counts, "sync", marks=pytest.mark.torture) for counts in LEFT if counts != (1, 30, 1)),
    ],
)
def test_returned_rows_survive_without_close(
    tmp_path: Path, tiny: None, compression: Any, counts: tuple[int, ...], durability: Any
) -> None:
    storage = new(
        tmp_path / "a.exp", compression=compression, settings=Settings(durability=durability, storage="arrow")
    )
    storage.background.stop()  # a copy is to be of one moment
    for count in (5, *counts):
        put(storage, count)
        path = leave(storage, tmp_path)
        follower = FollowerStorage(path)
        np.testing.assert_array_equal(window_ids(follower), window_ids(storage))
        check(follower, window_ids(storage))
        follower.close()
        other = new(path)
        np.testing.assert_array_equal(window_ids(other), window_ids(storage))
        check(other, window_ids(storage))
        put(other, 4)
        check(other, window_ids(other))
        other.close()
    storage.close()


@pytest.mark.guarantee("rows/variable")
@pytest.mark.some(2)
@pytest.mark.parametrize("lost", [1, 3, 8])
def test_rows_that_were_never_published_are_cut(tmp_path: Path, tiny: None, lost: int) -> None:
    """A batch that was drained may hold rows of records that a power cut took."""
    storage = new(tmp_path / "a.exp")
    storage.background.stop()
    put(storage, 30)
    storage.sync()
    for _ in range(12):
        put(storage, 1)
    storage.drain()
    (found,) = storage.state.columns.shared
    for last in (42 - lost, 30, 29):
        path = leave(storage, tmp_path)
        copied = writer.SegmentWriter(storage.disk, path / "segments", found.fields, None, compression=None)
        copied.open_files()
        copied.settle(last, 25)
        ids = np.arange(1, last + 1)
        for number, rows in enumerate(copied.gather_ids(ids, range(len(found.fields)))):
            assert rows.to_pylist() == columns_of(ids)[1 + number].to_pylist()
        assert not copied.covers(last + 1, 1)
        copied.append(
            last + 1, [c for c in columns_of(np.arange(last + 1, last + 9)) if isinstance(c, pa.Array)]
        )
        assert not copied.lacks(1, last + 8)
        copied.close()
    storage.close()


def test_a_full_disk_leaves_the_store_as_it_was(tmp_path: Path, tiny: None) -> None:
    disk = GatedDisk()
    storage = new(tmp_path / "a.exp", disk=disk)
    put(storage, 30)
    for count in (40, 2):
        disk.before = refuse("write", "truncate", where="/segments/")
        before = storage.last
        if count > 8:
            with pytest.raises(StorageError):
                put(storage, count)
            assert storage.last == before
        else:
            put(storage, count)  # in the journal
        check(storage, window_ids(storage))
        disk.relax()
        put(storage, count)
        check(storage, window_ids(storage))
    check_reopened(storage)


# ---------------------------------------------------------------------------------------------------
# Readers, versions, what is refused.


def test_versions_share_finished_segments(tmp_path: Path, tiny: None) -> None:
    storage = new(tmp_path / "a.exp")
    for _ in range(6):
        put(storage, 40)
    storage.sync()
    storage.sync()
    first = storage.dumps(tmp_path / "versions")
    put(storage, 20)
    second = storage.dumps(tmp_path / "versions")
    own, links = ({p.name: p.stat().st_ino for p in segments(at)} for at in (storage.path, first.path))
    shared = [name for name in links if own.get(name) == links[name]]
    assert len(shared) >= len(links) - 1 > 1
    assert second.new_bytes < first.new_bytes * 3
    for version, rows in ((first, 240), (second, 260)):
        with expstore.open(version.path, mode="r") as rb:
            assert rb.storage.last == rows
            check(rb.storage, np.arange(1, rows + 1))
    put(storage, 100)
    storage.loads(tmp_path / "versions", version=1)
    numbers = np.arange(1, 241)
    for found, expected in zip(storage.read(window_ids(storage)), columns_of(numbers), strict=True):
        assert found.tolist() == expected.tolist()
    memory = MemoryStorage()
    memory.loads(tmp_path / "versions")
    check(memory, window_ids(memory))
    flat = ZarrStorage(tmp_path / "flat.exp")
    with pytest.raises(SchemaError, match='="arrow"'):
        flat.loads(tmp_path / "versions")
    flat.close()
    storage.close()


def test_stores_of_the_best_rows_keep_no_such_fields(tmp_path: Path) -> None:
    storage = new(tmp_path / "a.exp", 10)
    with pytest.raises(SchemaError, match="better ones"):
        storage.settings.rank_by(Ranking(("x",), "sum"))
    storage.close()
    storage = ArrowStorage(tmp_path / "b.exp", 10)
    storage.settings.rank_by(Ranking(("x",), "sum"))
    with pytest.raises(SchemaError, match="better ones"):
        storage.prepare(SCHEMA, find_keys(SCHEMA))
    storage.close()


def test_a_store_is_opened_as_what_it_was_made(tmp_path: Path) -> None:
    path = tmp_path / "a.exp"
    with expstore.open(path, layout=expstore.Layout(kind="arrow", compression="zstd"), schema=SCHEMA) as rb:
        assert isinstance(rb.storage, ArrowStorage)
    with expstore.open(path) as rb:
        assert isinstance(rb.storage, ArrowStorage)
        assert rb.storage.manifest.compression == "zstd"
    with pytest.raises(StateError, match="layout='arrow', opened with layout='zarr'; leave layout out"):
        expstore.open(path, layout="zarr")
    with pytest.raises(StateError, match="compression='zstd', opened with compression='lz4'"):
        expstore.open(path, layout=expstore.Layout(compression="lz4"))
    with pytest.raises(SchemaError, match="'gzip'"):
        ArrowStorage(tmp_path / "b.exp", compression="gzip")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match='="arrow"'):
        expstore.open(tmp_path / "c.exp", schema=SCHEMA)
    with pytest.raises(SchemaError, match="compression"):
        expstore.open(tmp_path / "d.exp", layout=expstore.Layout(kind="zarr", compression="lz4"))
    with expstore.open(path, mode="w") as rb:
        assert type(rb.storage) is ZarrStorage


def test_a_lost_segment_is_damage(tmp_path: Path, tiny: None) -> None:
    storage = new(tmp_path / "a.exp")
    for _ in range(5):
        put(storage, 40)
    storage.close()
    path = segments(tmp_path / "a.exp")[1]
    held = path.read_bytes()
    path.unlink()
    with pytest.raises(CorruptionError, match="are missing in"):
        ArrowStorage(tmp_path / "a.exp")
    follower = FollowerStorage(tmp_path / "a.exp")
    follower.read(np.arange(1, 200), [0])
    follower.read(np.arange(1, 5), [1])
    with pytest.raises(CorruptionError, match="is missing in"):
        follower.read(np.arange(1, 200), [1])
    follower.close()
    path.write_bytes(held)
    storage = new(tmp_path / "a.exp")
    check(storage, window_ids(storage))
    storage.close()


# ---------------------------------------------------------------------------------------------------
# Checks.


@pytest.mark.some(2)
@pytest.mark.parametrize("where", ["body", "header", "missing", "first"])
def test_damage_is_found_and_repaired_at_the_cost_of_its_rows(
    tmp_path: Path, tiny: None, compression: Any, where: str
) -> None:
    storage = new(tmp_path / "a.exp", compression=compression)
    for _ in range(6):
        put(storage, 30)
    (found,) = storage.state.columns.shared
    chosen = found.segments[0 if where == "first" else 1]
    number = len(chosen.headers) // 2
    header, at = chosen.headers[number], chosen.offsets[number]
    storage.close()
    assert verify(tmp_path / "a.exp") == []
    if where == "missing":
        chosen.path.unlink()
        lost = {id for one in chosen.headers for id in range(one.first, one.last + 1)}
    else:
        flip(chosen.path, at + (20 if where == "header" else header.size - 8), 4)
        lost = set(range(header.first, header.last + 1))
    findings = verify(tmp_path / "a.exp")
    ids = {id for finding in findings for a, b in finding.ids for id in range(a, b + 1)}
    assert ids == lost
    assert {finding.path for finding in findings} == {f"segments/{chosen.path.name}"}
    left = repair(tmp_path / "a.exp")
    assert left.left == findings
    outcome = repair(tmp_path / "a.exp", drop_damaged=True)
    assert outcome.lost_rows == len(lost)
    assert not outcome.left
    assert verify(tmp_path / "a.exp") == []
    storage = new(tmp_path / "a.exp")
    ids_left = np.array(sorted(set(range(1, 181)) - lost))
    np.testing.assert_array_equal(storage.window.ids(), ids_left)
    check(storage, ids_left)
    put(storage, 20)
    check(storage, storage.window.ids())
    storage.close()


# ---------------------------------------------------------------------------------------------------
# Integers in as few bytes as they need.

TOKENS = Schema([Field(("tokens",), ARROW, (), ragged_text("int32", (None,)))])


def put_tokens(storage: ArrowStorage, rows: list[list[int]]) -> None:
    with storage.lock:
        columns = [pa.array(rows, pa.list_(pa.int32()))]
        RoundRobinWriter().write(storage, columns, Steps(len(rows)), source=None, info="")


def test_a_damaged_schema_of_a_segment_is_damage(tmp_path: Path) -> None:
    storage = prepare(ArrowStorage(tmp_path / "a.exp"), TOKENS)
    put_tokens(storage, [[300, 40_000]] * 40)
    storage.close()
    (path,) = segments(storage.path)
    data = path.read_bytes()
    with pa.ipc.open_stream(path) as reader:
        plain = reader.schema
    # Its types are others now, which could be read as well.
    shorter = plain.set(0, plain.field("tokens").with_type(pa.list_(pa.int16()))).serialize().to_pybytes()
    head = plain.serialize().to_pybytes()
    assert data.startswith(head)
    assert len(shorter) == len(head)
    path.write_bytes(shorter + data[len(head) :])
    findings = verify(storage.path)
    assert [finding.ids for finding in findings] == [((1, 40),)]
    with pytest.raises(CorruptionError):
        ArrowStorage(storage.path)
    path.write_bytes(data)
    assert verify(storage.path) == []


def test_a_segment_whose_first_write_failed_is_used_by_the_next(tmp_path: Path) -> None:
    disk, writes = GatedDisk(), []
    storage = prepare(ArrowStorage(tmp_path / "a.exp", disk=disk), TOKENS)

    def refuse_the_second(act: str, path: Path) -> None:
        if path.parent.name == "segments" and act == "write":
            writes.append(path)
            if len(writes) > 1:
                raise StorageError("no space", kind="disk_full")

    disk.before = refuse_the_second
    with pytest.raises(StorageError):
        put_tokens(storage, [[7]] * 40)
    disk.relax()
    put_tokens(storage, [[300]] * 40)
    assert len(segments(storage.path)) == 1
    (found,) = storage.read(np.arange(1, 41))
    assert found.to_pylist() == [[300]] * 40
    storage.close()
    storage = ArrowStorage(storage.path)
    (found,) = storage.read(np.arange(1, 41))
    assert found.to_pylist() == [[300]] * 40
    storage.close()


# ---------------------------------------------------------------------------------------------------
# Compressed batches, unpacked by compiled loops.


@pytest.mark.parametrize("packing", ["lz4", "zstd"])
def test_compressed_rows_are_unpacked_without_pyarrow(tmp_path: Path, monkeypatch: Any, packing: Any) -> None:
    storage = new(tmp_path / "a.exp", 400, compression=packing)
    ids = put(storage, 300)
    long = [[7 * number % 90_000 for number in range(size)] for size in (70_000, 1, 90_000, 0)]
    columns = columns_of(np.arange(301, 305))
    columns[2] = pa.array(long, pa.list_(pa.int32()))
    with storage.lock:
        RoundRobinWriter().write(storage, columns, Steps(4), source=None, info="")
    (found,) = storage.state.columns.shared
    found._load()
    monkeypatch.setattr(found, "_decode", lambda *given: pytest.fail("pyarrow was asked"))
    rng = np.random.default_rng(0)
    for count in (1, 7, 300):
        check(storage, rng.choice(ids, count))
    assert storage.read(np.array([304, 301, 5, 303, 302]), [2])[0].to_pylist() == [
        long[3],
        long[0],
        columns_of(np.array([5]))[2][0].as_py(),
        long[2],
        long[1],
    ]
    storage.close()


@pytest.mark.parametrize("packing", ["lz4", "zstd"])
def test_a_damaged_compressed_batch_is_not_unpacked(tmp_path: Path, packing: Any) -> None:
    storage = new(tmp_path / "a.exp", compression=packing)
    put(storage, 300)
    (found,) = storage.state.columns.shared
    chosen = found.segments[0]
    assert len(chosen.headers) > 2
    header, at = chosen.headers[1], chosen.offsets[1]
    flip(chosen.path, at + header.size - 20, 4)  # what is mapped changes with it
    found._load()
    check(storage, np.array([1, header.last + 1]))
    with pytest.raises(CorruptionError, match=f"rows {header.first} to {header.last} "):
        storage.read(np.array([1, header.first]), [2])
    storage.close()


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_sizes_of_rows_follow_from_offsets(tmp_path: Path, compression: Any) -> None:
    """By the loops, by pyarrow, in a follower, and with rows that are in the journal alone, alike."""
    rng = np.random.default_rng(3)
    rows = 300
    texts = ["x" * int(size) for size in rng.integers(0, 3000, rows)]
    lists = [[["ab"] * int(size), []] for size in rng.integers(0, 20, rows)]
    dicts = [{"a": text[:5], "b": [1, 2]} if number % 3 else None for number, text in enumerate(texts)]
    with expstore.open(
        tmp_path / "run.exp", layout=expstore.Layout(kind="arrow", compression=compression)
    ) as rb:
        for start in range(0, rows, 7):
            some = slice(start, min(start + 7, rows))
            parts = {"text": texts, "lists": lists, "dicts": dicts}
            data = {name: NonTensorStack(*values[some]) for name, values in parts.items()}
            count = len(texts[some])
            rb.extend(TensorDict({**data, "n": torch.arange(count)}, [count]))
        storage: Any = rb.storage
        ids = rng.integers(1, rows + 1, 500)
        places = [storage.require_schema().place_of((name,)) for name in parts]
        wanted = sum(row_sizes(column) for column in storage.read(ids, places))
        (segments,) = storage.state.columns.shared
        segments._load()
        assert (storage.sizes_of(ids) == wanted).all()
        segments._loops = segments._unpacking = None
        assert (storage.sizes_of(ids) == wanted).all()
        assert (Storage.sizes_of(storage, ids) == wanted).all()
        assert storage.sizes_of(ids[:0]).shape == (0,)
        with expstore.open(tmp_path / "run.exp", mode="r") as reader:
            assert (reader.storage.sizes_of(ids) == wanted).all()
    with expstore.ReplayBuffer(storage=MemoryStorage(10)) as ram:
        ram.extend(TensorDict({"n": torch.arange(3)}, [3]))
        assert ram.storage.sizes_of(np.arange(1, 4)).tolist() == [0, 0, 0]
