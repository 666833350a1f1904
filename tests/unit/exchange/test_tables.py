"""Rows as Parquet and Arrow files and back, bit by bit, also for other readers."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

import expstore
from expstore.cli.app import run
from expstore.core import tuning
from expstore.disk.files import Disk
from expstore.disk.writer_lock import WriterLock
from expstore.errors import LockedError, NotFoundError, SchemaError, StateError, StorageError
from expstore.exchange import export_arrow, export_parquet, import_arrow, import_parquet, table_files
from expstore.exchange.base import open_to_read
from tests.support.buffer_bytes import held
from tests.support.case_selection import in_full, share
from tests.support.typed_rows import typed_buffer, typed_rows

FORMATS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "parquet": (export_parquet, import_parquet),
    "arrow": (export_arrow, import_arrow),
}


pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.fixture(params=sorted(FORMATS))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


FACTS = (
    "SELECT _episode, _step, _time, _priority FROM transitions ORDER BY _id",
    # Streams without a name are nobody's afterwards: their open episodes are cut.
    "SELECT episode_id, source, trajectory_id, start_time, "
    "CASE WHEN status IN ('open', 'cut') THEN NULL ELSE end_time END, length, \"return\", "
    "CASE WHEN status = 'open' AND source LIKE '@%' THEN 'cut' ELSE status END, info "
    "FROM episodes WHERE live_rows > 0 ORDER BY episode_id",
)


def check_same(first: Any, second: Any, *, facts: bool = True) -> None:
    assert held(first) == held(second)
    assert first.schema == second.schema
    for query in FACTS[: 2 * facts]:
        assert first.sql(query).fetchall() == second.sql(query).fetchall()


def there_and_back(form: str, rb: Any, folder: Path, **options: Any) -> expstore.TensorDictReplayBuffer:
    out, back = FORMATS[form]
    done = out(rb, folder / "out", **options)
    made = back(folder / "out", folder / "back.exp")
    assert (made.rows, done.left_out) == (done.rows, 0)
    assert made.episodes == done.episodes
    return expstore.open(folder / "back.exp", mode="r")


@pytest.mark.slow
@pytest.mark.some(2)
@pytest.mark.parametrize("layout", ["flat", "auto"])
@pytest.mark.parametrize(("capacity", "count"), [(None, 230), (200, 500), (200, 0)])
def test_rows_come_back_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, capacity: int, count: int, layout: str
) -> None:
    """In several files and row groups; each of which other programs read."""
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 64)
    monkeypatch.setattr(tuning, "PARQUET_FILE_ROWS", 100)
    with typed_buffer(tmp_path / "run.exp", count or 50, capacity=capacity, layout=layout) as rb:
        if not count:
            rb.empty()
        else:
            rb.update_priority(id=torch.tensor([count, count - 70]), priority=torch.tensor([4.0, 0.5]))
        with there_and_back(form, rb, tmp_path) as again:
            facts = capacity is None
            check_same(rb, again, facts=facts)
            assert again.storage.capacity == capacity
            if not facts and count:
                query = "SELECT _time, _priority FROM transitions ORDER BY _id"
                assert rb.sql(query).fetchall() == again.sql(query).fetchall()
    if form == "parquet" and count:
        assert len(list((tmp_path / "out/rows").iterdir())) > 1
    assert sorted(os.listdir(tmp_path)) == ["back.exp", "out", "run.exp"]
    assert expstore_verify(tmp_path / "back.exp") == 0


def expstore_verify(path: Path) -> int:
    return run(["verify", str(path)])


def test_other_programs_read_it_unaided(tmp_path: Path) -> None:
    with typed_buffer(tmp_path / "run.exp", 120) as rb:
        export_parquet(rb, tmp_path / "out")
        export_arrow(rb, tmp_path / "arrow")
        expected = rb[:]
    where = str(tmp_path / "out/rows")
    number = list(range(120))
    for table in (pl.read_parquet(where).sort("_id"), pl.read_ipc(tmp_path / "arrow/rows.arrow")):
        assert table["number"].to_list() == number
        assert table["next"].struct.field("reward").to_list() == [float(n) for n in number]
        assert (table["frame"].to_numpy() == expected["frame"].flatten(1).numpy()).all()
        assert table["all"].struct.field("bfloat16").to_list() == [float(n % 100) for n in number]
        assert table["_step"].to_list() == [n % 9 for n in number]
    frame = pd.read_parquet(where).sort_values("_id")
    assert frame["number"].tolist() == number
    assert (np.stack(frame["frame"]) == expected["frame"].flatten(1).numpy()).all()
    query = f"SELECT next.reward, len(frame), all.float16, _priority FROM '{where}/*.parquet' ORDER BY _id"
    found = duckdb.sql(query.replace("all.", '"all".')).fetchall()
    assert found == [(float(n), 1600, float(n % 100), 1.0) for n in number]
    episodes = pl.read_parquet(tmp_path / "out/episodes.parquet")
    assert episodes["length"].to_list() == [9] * 13 + [3]
    assert episodes["status"].to_list() == ["terminated"] * 13 + ["open"]


@pytest.mark.slow
def test_a_file_has_whole_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes interleave in the store; each file has a range of episodes, in the order of ids."""
    monkeypatch.setattr(tuning, "PARQUET_FILE_ROWS", 40)
    with expstore.open(tmp_path / "run.exp") as rb:
        for first in range(0, 60, 4):
            lanes = torch.stack([typed_rows(4, first + 1000 * lane, every=9 + lane) for lane in range(3)])
            rb.extend(lanes, source="robot")
        rb.episodes.annotate(2, success=True, note='a "b"')
        export_parquet(rb, tmp_path / "out")
        ranges = []
        for path in sorted((tmp_path / "out/rows").iterdir()):
            table = pl.read_parquet(path)
            assert table["_id"].is_sorted()
            ranges.append((table["_episode"].min(), table["_episode"].max()))
        assert all(a[1] < b[0] for a, b in itertools.pairwise(ranges))
        assert len(ranges) > 3
        import_parquet(tmp_path / "out", tmp_path / "back.exp")
        rb.episodes.end()  # as the import's have ended
        with expstore.open(tmp_path / "back.exp") as again:
            check_same(rb, again)
            for buffer in (rb, again):
                buffer.extend(lanes, source="robot")
            query = FACTS[0].replace("_time, ", "")
            assert rb.sql(query).fetchall() == again.sql(query).fetchall()


def test_only_some_episodes_and_fields(tmp_path: Path, form: str) -> None:
    with typed_buffer(tmp_path / "run.exp", 120) as rb:
        where = "episode_id BETWEEN 3 AND 4 OR status = 'open'"
        with there_and_back(form, rb, tmp_path, episodes=where, fields=["number", "next.reward"]) as again:
            numbers = [*range(18, 36), *range(117, 120)]
            assert again[:]["number"].tolist() == numbers
            assert set(again.schema.keys) == {("number",), ("next", "reward")}
            found = again.sql("SELECT episode_id, length, status FROM episodes ORDER BY 1").fetchall()
            assert found == [(3, 9, "terminated"), (4, 9, "terminated"), (14, 3, "cut")]
        assert FORMATS[form][0](rb, tmp_path / "two", episodes=[4, 5]).rows == 18
        with pytest.raises(NotFoundError, match="no rows of these episodes"):
            FORMATS[form][0](rb, tmp_path / "none", episodes=[99])
        with pytest.raises(SchemaError, match="no field 'next.frames'"):
            FORMATS[form][0](rb, tmp_path / "none", fields=["next.frames"])
    assert sorted(os.listdir(tmp_path)) == ["back.exp", "out", "run.exp", "two"]


@pytest.mark.slow
@pytest.mark.some(1)
def test_an_episode_without_its_beginning_counts_from_zero(tmp_path: Path, form: str) -> None:
    """Its steps follow one another; where some are missing in between, another one begins."""
    with expstore.open(tmp_path / "run.exp", capacity=40) as rb:
        rb.extend(typed_rows(100, every=30))
        with there_and_back(form, rb, tmp_path) as again:
            query = "SELECT _episode, _step FROM transitions ORDER BY _id"
            assert rb.sql(query).fetchall()[0] == (3, 0)
            found = rb.sql(query).fetchall()
            assert again.sql(query).fetchall() == found
        rb.extend(typed_rows(10, 100, every=30))
        there_and_back(form, rb, (tmp_path / "b")) if (tmp_path / "b").mkdir() else None
        out, back = FORMATS[form]
        out(rb, tmp_path / "cut")
        back(tmp_path / "cut", tmp_path / "cut.exp")
        with expstore.open(tmp_path / "cut.exp", mode="r") as again:
            assert rb.sql(query).fetchall()[0] == (3, 10)
            assert again.sql(query).fetchall()[:2] == [(3, 0), (3, 1)]
            assert held(rb) == held(again)


def test_settings_of_a_store_come_back(tmp_path: Path, form: str) -> None:
    specs = expstore.Composite(action=expstore.Categorical(3))
    with expstore.open(
        tmp_path / "run.exp",
        capacity=90,
        meta={"who": ["a", 1]},
        schema=specs,
        episodes=expstore.EpisodeKeys(traj="run", done=["over"], reward="gain"),
    ) as rb:
        number = torch.arange(60)
        data = {"action": number % 3, "gain": number.float(), "run": number // 20, "over": number % 20 == 19}
        rb.extend(TensorDict(data, [60]), source="a")
        with there_and_back(form, rb, tmp_path) as again:
            check_same(rb, again)
            assert again.specs == rb.specs
            assert again.meta == {"who": ["a", 1]}
            manifests = again.storage.manifest, rb.storage.manifest
            for name in ("capacity", "reward_key", "traj_key", "done_keys"):
                assert getattr(manifests[0], name) == getattr(manifests[1], name)


@pytest.mark.parametrize("steps", [[2, 1, 0, 0], [0, 2, 1, 0], [1, 0, 3, 0]])
def test_steps_out_of_order_are_refused(tmp_path: Path, steps: list[int]) -> None:
    table = pa.table({"_episode": [7, 7, 7, 3], "_step": steps, "x": [1, 2, 3, 4]})
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(SchemaError, match=r"step \d of episode 7 comes after step \d; sort the rows by"):
        import_parquet(tmp_path / "x.parquet", tmp_path / "x.exp")
    assert sorted(os.listdir(tmp_path)) == ["x.parquet"]
    pq.write_table(table.sort_by([("_episode", "ascending"), ("_step", "ascending")]), tmp_path / "x.parquet")
    assert import_parquet(tmp_path / "x.parquet", tmp_path / "x.exp").rows == 4


@pytest.mark.parametrize("ids", [[], ["_id"]])
def test_files_are_open_only_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ids: list[str]
) -> None:
    (tmp_path / "in").mkdir()
    for number in range(30):
        table = pa.table({"_id": [number], "x": [number]}).select([*ids, "x"])
        pq.write_table(table, tmp_path / f"in/{number:02}.parquet")
    files: list[Any] = []
    counts: list[int] = []

    def open_and_note(path: Path) -> Any:
        files.append(open_to_read(path))
        return files[-1]

    def count_open(*_: int) -> None:
        counts.append(sum(not file.closed for file in files))

    monkeypatch.setattr(table_files, "open_to_read", open_and_note)
    assert import_parquet(tmp_path / "in", tmp_path / "x.exp", progress=count_open).rows == 30
    assert max(counts) <= 2


@pytest.mark.parametrize("ids", [["a", "b"], [1.5, 2.5]])
def test_an_id_of_another_program_is_refused(tmp_path: Path, ids: list[Any]) -> None:
    pq.write_table(pa.table({"_id": ids, "x": [1, 2]}), tmp_path / "x.parquet")
    with pytest.raises(SchemaError, match="column '_id' is of type (string|double), not int64; rename it"):
        import_parquet(tmp_path / "x.parquet", tmp_path / "x.exp")


def test_fields_that_describe_episodes_may_be_left_out(tmp_path: Path, form: str) -> None:
    keys = expstore.EpisodeKeys(traj="robot", done=[("next", "fell")], reward=("next", "score"))
    with expstore.open(tmp_path / "run.exp", episodes=keys) as rb:
        fell = torch.tensor([0, 0, 1, 0, 0, 1]).bool()[:, None]
        following = {"score": torch.ones(6, 1), "fell": fell}
        rb.extend(TensorDict({"x": torch.arange(6), "robot": torch.zeros(6).long(), "next": following}, [6]))
        with there_and_back(form, rb, tmp_path, fields=["x", "next.score"]) as again:
            assert again.sql('SELECT length, status, "return" FROM episodes').fetchall() == [
                (3, "terminated", 3.0),
                (3, "terminated", 3.0),
            ]
            assert again.schema.keys == (("x",), ("next", "score"))


def test_rows_other_than_tensordicts_are_read_back(tmp_path: Path, form: str) -> None:
    storage = expstore.ZarrStorage(tmp_path / "run.exp", 100)
    with expstore.ReplayBuffer(storage=storage) as rb:
        rb.extend((torch.arange(30), {"a": torch.ones(30, 2, dtype=torch.bfloat16)}))
        with there_and_back(form, rb, tmp_path) as again:
            first, second = rb[:], again[:]
            assert isinstance(second, tuple)
            assert (first[0] == second[0]).all()
            assert torch.equal(first[1]["a"], second[1]["a"])


@pytest.mark.slow
@pytest.mark.some(1)
def test_storages_with_lanes_are_flattened(tmp_path: Path, form: str) -> None:
    storage = expstore.ZarrStorage(tmp_path / "run.exp", 400, ndim=2)
    with expstore.TensorDictReplayBuffer(storage=storage) as rb:
        lanes = torch.stack([typed_rows(40), typed_rows(40, 500, every=7)], 1)
        rb.extend(lanes)
        with there_and_back(form, rb, tmp_path) as again:
            assert again.storage.ndim == 1
            assert len(again) == 80
            for query in FACTS:
                assert rb.sql(query).fetchall() == again.sql(query).fetchall()
    with expstore.TensorDictReplayBuffer(storage=expstore.MemoryStorage(100)) as ram:
        ram.extend(typed_rows(60))
        FORMATS[form][0](ram, tmp_path / "ram")
        FORMATS[form][1](tmp_path / "ram", tmp_path / "ram.exp")
        with expstore.open(tmp_path / "ram.exp", mode="r") as again:
            assert held(ram) == held(again)


VALUES = {
    "bool": np.bool_,
    "uint8": np.uint8,
    "int64": np.int64,
    "uint64": np.uint64,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
}


@st.composite
def tables(draw: st.DrawFn) -> TensorDict:
    """Fields of any names, dtypes and shapes, of any bits."""
    count = draw(st.integers(1, 30))
    names = st.text("abZ_.- 9", min_size=1, max_size=4).filter(
        lambda n: n.strip() == n and n.strip(".") and not n.startswith("_")
    )
    data = TensorDict({}, [count])
    taken: set[str] = set()
    for depth in draw(st.lists(st.integers(0, 2), min_size=1, max_size=4)):
        key = ("f", *draw(st.lists(names, min_size=depth, max_size=depth)), f"x{len(taken)}")
        taken.add(str(key))
        shape = draw(st.sampled_from([(), (1,), (3,), (2, 2), (1, 1), (1, 2, 1)]))
        dtype = np.dtype(VALUES[draw(st.sampled_from(sorted(VALUES)))])
        rng = np.random.default_rng(draw(st.integers(0, 1000)))
        raw = rng.integers(0, 256, (count, *shape, dtype.itemsize), dtype=np.uint8)
        if dtype == np.bool_:
            raw &= 1
        data[key] = torch.from_numpy(raw.view(dtype).reshape(count, *shape))
    return data


@pytest.mark.slow
@share(0.25, of=20)  # each makes two stores
@given(data=tables(), form=st.sampled_from(sorted(FORMATS)))
def test_whatever_bits_come_back(
    tmp_path_factory: pytest.TempPathFactory, data: TensorDict, form: str
) -> None:
    folder = tmp_path_factory.mktemp("bits")
    try:
        rb = expstore.open(folder / "run.exp", seed=0)
        rb.extend(data)
    except SchemaError:  # names that no store takes
        return
    with rb, there_and_back(form, rb, folder) as again:
        assert held(rb) == held(again)


test_whatever_bits_come_back_in_full = pytest.mark.torture(in_full(test_whatever_bits_come_back))


# -- files of others ------------------------------------------------------------------------------------


def test_files_of_other_programs_become_stores(tmp_path: Path) -> None:
    number = np.arange(40)
    tensor = pa.fixed_shape_tensor(pa.float32(), [2, 3])
    values = np.arange(40 * 6, dtype=np.float32)
    table = pa.table(
        {
            "step": number,
            "next": pa.StructArray.from_arrays(
                [pa.array(number.astype("f4")), pa.array(number % 10 == 9)], ["reward", "terminated"]
            ),
            "vector": pa.array([[float(n), 1.0] for n in number]),
            "tensor": pa.FixedShapeTensorArray.from_storage(
                tensor, pa.FixedSizeListArray.from_arrays(pa.array(values), 6)
            ),
        }
    )
    (tmp_path / "data").mkdir()
    pq.write_table(table.slice(0, 25), tmp_path / "data/a.parquet")
    pq.write_table(table.slice(25), tmp_path / "data/b.parquet")
    pl.from_arrow(table.drop_columns(["tensor"])).write_ipc(tmp_path / "polars.arrow")
    for source, back in ((tmp_path / "data", import_parquet), (tmp_path / "polars.arrow", import_arrow)):
        done = back(source, tmp_path / f"{source.name}.exp", capacity=30)
        assert (done.rows, done.kept, done.episodes) == (40, 30, 3)
        with expstore.open(tmp_path / f"{source.name}.exp") as rb:
            found = rb[:]
            assert sorted(found["step"].tolist()) == list(range(10, 40))
            assert found["vector"].shape == (30, 2)
            if source.name == "data":
                assert found["tensor"].shape == (30, 2, 3)
                assert (found["tensor"] == torch.from_numpy(values.reshape(40, 2, 3))[found["step"]]).all()
            status = rb.sql("SELECT status, count(*) FROM episodes GROUP BY 1").fetchall()
            assert status == [("terminated", 4)]


@pytest.mark.slow
@pytest.mark.some(1)
def test_rows_without_their_file_of_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Lanes that interleave stay apart, by the columns that say so; ends follow from flags."""
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 64)
    out, back = FORMATS[form]
    with expstore.open(tmp_path / "run.exp") as rb:
        for first in range(0, 80, 8):
            data = torch.stack([typed_rows(8, first + 1000 * lane, every=9 + lane) for lane in range(3)])
            data["collector", "traj_ids"] = data["number"] // torch.tensor([[9], [10], [11]])
            data["next", "truncated"] = (data["number"] % 5 == 0)[..., None]
            rb.extend(data)
        out(rb, tmp_path / "out")
        (tmp_path / f"out/episodes.{form}").unlink()
        back(tmp_path / "out", tmp_path / "back.exp")
        lengths = (
            "SELECT length, \"return\", replace(status, 'open', 'cut') FROM episodes ORDER BY start_time, 2"
        )
        with expstore.open(tmp_path / "back.exp", mode="r") as again:
            assert held(rb) == held(again)
            assert rb.sql(FACTS[0]).fetchall() == again.sql(FACTS[0]).fetchall()
            assert rb.sql(lengths).fetchall() == again.sql(lengths).fetchall()


def test_rows_that_others_took_out_leave_no_episode_that_seems_whole(tmp_path: Path) -> None:
    with typed_buffer(tmp_path / "run.exp", 18) as rb:
        export_parquet(rb, tmp_path / "out", fields=["number", "next.reward"])
    path = tmp_path / "out/rows/00000.parquet"
    pl.read_parquet(path).filter(pl.col("_step") != 4).write_parquet(path)
    assert import_parquet(tmp_path / "out", tmp_path / "back.exp").episodes == 4
    with expstore.open(tmp_path / "back.exp", mode="r") as rb:
        found = rb.sql(
            "SELECT _episode, min(number), count(*), max(_step) FROM transitions GROUP BY 1 ORDER BY 2"
        )
        assert found.fetchall() == [(1, 0, 4, 3), (3, 5, 4, 3), (2, 9, 4, 3), (4, 14, 4, 3)]
        found = rb.sql("SELECT episode_id, status FROM episodes ORDER BY 1").fetchall()
        assert found == [(1, "cut"), (2, "cut"), (3, "terminated"), (4, "terminated")]


def write(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


BAD: dict[str, tuple[Callable[[Path], Path], type[Exception], str]] = {
    "missing": (lambda f: f / "none.parquet", NotFoundError, "there is no file"),
    "no Parquet": (
        lambda f: Path(f / "x.parquet").write_bytes(b"hello") and f / "x.parquet",
        StorageError,
        "cannot read",
    ),
    "zero": (
        lambda f: [Path(f / "x.parquet").write_bytes(b""), f / "x.parquet"][1],
        StorageError,
        "cannot read",
    ),
    "folder": (lambda f: [(f / "x").mkdir(), f / "x"][1], NotFoundError, "no Parquet files"),
    "text": (lambda f: write(f / "x.parquet", a=["x", "y"]), SchemaError, "'a' is string: a zarr"),
    "null": (lambda f: write(f / "x.parquet", a=[1, None]), SchemaError, "'a' has rows without a value"),
    "lengths": (
        lambda f: write(f / "x.parquet", a=[[1], [1, 2]]),
        SchemaError,
        "'a' has lists of any length",
    ),
    "no columns": (
        lambda f: write(f / "x.parquet", _id=[1, 2]),
        SchemaError,
        "no column can be a field",
    ),
    "own": (
        lambda f: write(f / "x.parquet", a=[1], _episode=["x"], _step=[1]),
        SchemaError,
        "'_episode' is of type",
    ),
    "name": (lambda f: write(f / "x.parquet", **{"a/b": [1, 2]}), SchemaError, "cannot be a path"),
}


@pytest.mark.parametrize("case", sorted(BAD))
def test_bad_files_are_refused_and_leave_nothing(tmp_path: Path, case: str) -> None:
    prepare, kind, words = BAD[case]
    (tmp_path / "in").mkdir()
    source = prepare(tmp_path / "in")
    with pytest.raises(kind, match=words):
        import_parquet(source, tmp_path / "back.exp", storage="zarr")
    assert os.listdir(tmp_path) == ["in"]


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, form: str) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a.parquet", a=[1, 2])
    write(tmp_path / "in/b.parquet", b=[1, 2])
    with pytest.raises(SchemaError, match=r"b\.parquet has Schema\(b.*a\.parquet"):
        import_parquet(tmp_path / "in", tmp_path / "back.exp")
    out, back = FORMATS[form]
    with typed_buffer(tmp_path / "run.exp", 60) as rb:
        out(rb, tmp_path / "all")
        out(rb, tmp_path / "few", episodes=[1, 2])
    name = f"episodes.{form}"
    (tmp_path / "all" / name).write_bytes((tmp_path / "few" / name).read_bytes())
    with pytest.raises(SchemaError, match="rows of episode 3, which is missing in the file of episodes"):
        back(tmp_path / "all", tmp_path / "back.exp")
    assert sorted(os.listdir(tmp_path)) == ["all", "few", "in", "run.exp"]


# -- whole or not at all --------------------------------------------------------------------------------


class FullDisk(Disk):
    """Have no space for rows."""

    def gate(self, act: str, path: Path) -> None:
        if (act == "write" and "00000.parquet" in path.name + str(path)) or path.name == "rows.arrow":
            raise OSError(28, "No space left on device")


@pytest.mark.slow
@pytest.mark.some(1)
def test_nothing_is_left_of_what_ended_early(tmp_path: Path, form: str) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    out, back = FORMATS[form]
    with typed_buffer(tmp_path / "run.exp", 60) as rb:
        with pytest.raises(KeyboardInterrupt):
            out(rb, tmp_path / "out", progress=stop)
        with pytest.raises(StorageError, match="No space"):
            out(rb, tmp_path / "out", disk=FullDisk())
        assert os.listdir(tmp_path) == ["run.exp"]
        (tmp_path / "out.tmp/rows").mkdir(parents=True)  # of one that was killed
        lock = WriterLock(Disk(), tmp_path / "out.tmp/LOCK")
        with pytest.raises(LockedError, match="another process or thread exports to"):
            out(rb, tmp_path / "out")
        lock.release()
        out(rb, tmp_path / "out")
        with pytest.raises(StateError, match="out exists already"):
            out(rb, tmp_path / "out")
        with pytest.raises(StateError, match="would lie inside the store"):
            out(rb, tmp_path / "run.exp/out")
        with pytest.raises(KeyboardInterrupt):
            back(tmp_path / "out", tmp_path / "back.exp", progress=stop)
        assert sorted(os.listdir(tmp_path)) == ["out", "run.exp"]
        for target in (tmp_path / "run.exp", tmp_path / "run.exp/x"):
            with pytest.raises(StateError):
                back(tmp_path / "out", target)
        (tmp_path / "back.exp.tmp/journal").mkdir(parents=True)
        lock = WriterLock(Disk(), tmp_path / "back.exp.tmp/LOCK")
        with pytest.raises(LockedError, match="another process or thread imports to"):
            back(tmp_path / "out", tmp_path / "back.exp")
        lock.release()
        back(tmp_path / "out", tmp_path / "back.exp")
    assert sorted(os.listdir(tmp_path)) == ["back.exp", "out", "run.exp"]


STOPPED = """
import os, signal, sys
from expstore.cli import app
from expstore.core import tuning
from expstore.exchange import rows, tables, fill

def interrupted(call):
    def wrapped(*args, **named):
        os.kill(os.getpid(), number)
        return call(*args, **named)
    return wrapped

number = int(sys.argv.pop())
tuning.EXCHANGE_ROWS = 64
if sys.argv[1] == "export":
    rows.Rows.read = interrupted(rows.Rows.read)
else:
    fill.Filler.put = interrupted(fill.Filler.put)
app.main()
"""


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_or_killed_from_the_command_line(tmp_path: Path, form: str, number: int) -> None:
    typed_buffer(tmp_path / "run.exp", 300).close()
    store, out, again = (str(tmp_path / name) for name in ("run.exp", "out", "back.exp"))

    def stopped(*arguments: str) -> int:
        command = [sys.executable, "-c", STOPPED, *arguments, str(int(number))]
        return subprocess.run(command, capture_output=True).returncode

    expected = 130 if number == signal.SIGINT else -9
    assert stopped("export", store, out, f"--{form}") == expected
    assert not (tmp_path / "out").exists()
    assert run(["export", store, out, f"--{form}"]) == 0
    assert stopped("import", out, again) == expected
    assert not (tmp_path / "back.exp").exists()
    assert run(["import", out, again]) == 0
    assert sorted(os.listdir(tmp_path)) == ["back.exp", "out", "run.exp"]
    with expstore.open(store, mode="r") as first, expstore.open(again, mode="r") as second:
        assert held(first) == held(second)


@pytest.mark.slow
@pytest.mark.some(1)
def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    typed_buffer(tmp_path / "run.exp", 120).close()
    out = tmp_path / "out"
    asked = ["export", str(tmp_path / "run.exp"), str(out), f"--{form}"]
    assert run([*asked, "--episodes", "1-3, 10-", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["rows"], facts["episodes"]) == (27 + 39, 3 + 5)
    assert "how often rows were sampled" in facts["lost"]
    assert run(["import", str(out), str(tmp_path / "back.exp"), "--capacity", "20"]) == 0
    said = capsys.readouterr()
    assert "holds 20 rows of 3 episodes" in said.out
    assert "46 older rows did not fit its capacity" in said.err
    for wrong, words in (
        (["--episodes", "1-x"], "names no episodes"),
        (["--episodes", "9-1"], "names no episodes"),
        (["--episodes", "1", "--where", "true"], "--episodes and --where exclude each other"),
        (["--where", "lenght > 1"], "lenght"),
        (["--npz"], "choose one format"),
    ):
        assert run([*asked[:2], str(tmp_path / "x"), asked[3], *wrong]) == 2
        assert words in capsys.readouterr().err
    (tmp_path / "text").write_text("hello")
    for source, words in (("text", "looks like none"), ("none", "there is nothing at")):
        assert run(["import", str(tmp_path / source), str(tmp_path / "x")]) == 2
        assert words in capsys.readouterr().err
    assert run(["import", str(out), str(tmp_path / "x"), "--format", "csv"]) == 2
    assert sorted(os.listdir(tmp_path)) == ["back.exp", "out", "run.exp", "text"]


ALONE = """
import sys
from expstore.cli.app import run
assert run(["export", sys.argv[1], sys.argv[2], "--parquet"]) == 0
assert run(["import", sys.argv[2], sys.argv[3]]) == 0
print("torch" in sys.modules)
"""


@pytest.mark.slow
def test_neither_needs_torch(tmp_path: Path) -> None:
    typed_buffer(tmp_path / "run.exp", 60).close()
    paths = [str(tmp_path / name) for name in ("run.exp", "out", "back.exp")]
    done = subprocess.run([sys.executable, "-c", ALONE, *paths], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")
