"""Rows as Parquet and Arrow files and back, bit by bit, also for other readers."""

from __future__ import annotations

import itertools
import json
import os
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
from tensordict import TensorDict

import expstore
from expstore.cli.app import run
from expstore.core import tuning
from expstore.errors import NotFoundError, SchemaError, StorageError
from expstore.exchange import export_arrow, export_parquet, import_arrow, import_parquet, table_files
from expstore.exchange.base import open_to_read
from tests.support.buffer_bytes import held
from tests.support.exchange_formats import TABLES
from tests.support.refusals import check_refusals
from tests.support.typed_rows import typed_buffer, typed_rows

pytestmark = pytest.mark.usefixtures("no_syncs")


@pytest.fixture(params=sorted(TABLES))
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
    out, back = TABLES[form]
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
        files = [pq.ParquetFile(path).metadata for path in (tmp_path / "out/rows").iterdir()]
        assert len(files) > 1
        assert max(one.row_group(n).num_rows for one in files for n in range(one.num_row_groups)) <= 64
    assert sorted(os.listdir(tmp_path)) == ["back.exp", "out", "run.exp"]
    assert run(["verify", str(tmp_path / "back.exp")]) == 0


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
        assert TABLES[form][0](rb, tmp_path / "two", episodes=[4, 5]).rows == 18
        with pytest.raises(NotFoundError, match="no rows of these episodes"):
            TABLES[form][0](rb, tmp_path / "none", episodes=[99])
        with pytest.raises(SchemaError, match="no field 'next.frames'"):
            TABLES[form][0](rb, tmp_path / "none", fields=["next.frames"])
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
        out, back = TABLES[form]
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
        TABLES[form][0](ram, tmp_path / "ram")
        TABLES[form][1](tmp_path / "ram", tmp_path / "ram.exp")
        with expstore.open(tmp_path / "ram.exp", mode="r") as again:
            assert held(ram) == held(again)


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
    out, back = TABLES[form]
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


BAD_COLUMNS: list[tuple[dict[str, Any], str]] = [
    ({"a": ["x", "y"]}, "'a' is string: a zarr"),
    ({"a": [1, None]}, "'a' has rows without a value"),
    ({"a": [[1], [1, 2]]}, "'a' has lists of any length"),
    ({"_id": [1, 2]}, "no column can be a field"),
    ({"_id": ["a", "b"], "x": [1, 2]}, "column '_id' is of type string, not int64; rename it"),
    ({"_id": [1.5, 2.5], "x": [1, 2]}, "column '_id' is of type double, not int64; rename it"),
    ({"a": [1], "_episode": ["x"], "_step": [1]}, "'_episode' is of type"),
    ({"a/b": [1, 2]}, "cannot be a path"),
]


def test_bad_files_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    (folder / "empty").mkdir(parents=True)
    (folder / "text.parquet").write_bytes(b"hello")
    (folder / "zero.parquet").write_bytes(b"")

    def load(name: str, **columns: Any) -> Callable[[], object]:
        def act() -> None:
            if columns:
                write(folder / name, **columns)
            import_parquet(folder / name, tmp_path / "back.exp", storage="zarr")

        return act

    check_refusals(
        [
            (load("none.parquet"), NotFoundError, "there is no file"),
            (load("empty"), NotFoundError, "no Parquet files"),
            (load("text.parquet"), StorageError, "cannot read"),
            (load("zero.parquet"), StorageError, "cannot read"),
            *((load("x.parquet", **columns), SchemaError, words) for columns, words in BAD_COLUMNS),
        ],
        absent=tmp_path / "back.exp",
    )
    assert os.listdir(tmp_path) == ["in"]


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, form: str) -> None:
    (tmp_path / "in").mkdir()
    write(tmp_path / "in/a.parquet", a=[1, 2])
    write(tmp_path / "in/b.parquet", b=[1, 2])
    with pytest.raises(SchemaError, match=r"b\.parquet has Schema\(b.*a\.parquet"):
        import_parquet(tmp_path / "in", tmp_path / "back.exp")
    out, back = TABLES[form]
    with typed_buffer(tmp_path / "run.exp", 60) as rb:
        out(rb, tmp_path / "all")
        out(rb, tmp_path / "few", episodes=[1, 2])
    name = f"episodes.{form}"
    (tmp_path / "all" / name).write_bytes((tmp_path / "few" / name).read_bytes())
    with pytest.raises(SchemaError, match="rows of episode 3, which is missing in the file of episodes"):
        back(tmp_path / "all", tmp_path / "back.exp")
    assert sorted(os.listdir(tmp_path)) == ["all", "few", "in", "run.exp"]


# -- whole or not at all --------------------------------------------------------------------------------


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
