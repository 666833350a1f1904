"""Variable-length rows as Parquet and Arrow files and back, and such files of other programs."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable
from decimal import Decimal
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

import expstore
from expstore.cli.app import run
from expstore.core import tuning
from expstore.episodes.segmentation import Steps
from expstore.errors import SchemaError
from expstore.exchange import export_arrow, export_parquet, import_arrow, import_parquet
from expstore.exchange.rows import Rows, mean_bytes, read_pieces
from expstore.exchange.tables import file_type, from_file, to_file
from expstore.schema.arrow_types import Ragged, ragged_of, ragged_text, to_type, type_text
from expstore.schema.schema import ARROW, DTYPES, Field, Schema
from expstore.schema.variable_tensors import join
from expstore.storages.factory import ArrowStorage
from expstore.writers.writers import RoundRobinWriter
from tests.support.case_selection import in_full, share
from tests.support.exchange_formats import TABLES
from tests.support.stores import prepare
from tests.support.variable_length import buffer, plain, rollouts

pytestmark = pytest.mark.usefixtures("no_syncs")  # nothing here is about what a power cut leaves


@pytest.fixture(params=sorted(TABLES))
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# -- any types, any values ------------------------------------------------------------------------------

DAY, TIME = datetime.date(2024, 2, 29), datetime.time(1, 2, 3)
STAMP = datetime.datetime(2024, 2, 29, 1, 2, 3)
#: Types, and values of them that differ.
VALUES: dict[str, tuple[pa.DataType, list[Any]]] = {
    "text": (pa.string(), ["", "é" * 9, "a\0b", " "]),
    "long_text": (pa.large_string(), ["", "x"]),
    "blob": (pa.binary(), [b"", b"\0\xff", b"abc"]),
    "long_blob": (pa.large_binary(), [b"", b"\0"]),
    "four": (pa.binary(4), [b"abcd", b"\0\0\0\0"]),
    "number": (pa.int64(), [0, -1, 2**63 - 1]),
    "small": (pa.int8(), [0, -128]),
    "flag": (pa.bool_(), [True, False]),
    "float": (pa.float64(), [0.0, -0.0, float("inf"), 1e-310]),
    "half": (pa.float16(), [0.5, -0.0]),
    "texts": (pa.list_(pa.string()), [[], ["", None, "é"], [None]]),
    "long_list": (pa.large_list(pa.int16()), [[], [1, None]]),
    "pair": (pa.list_(pa.int32(), 2), [[1, 2], [3, None]]),
    "deep": (pa.list_(pa.list_(pa.list_(pa.uint8()))), [[], [[]], [[[]], [[1], None], None]]),
    "facts": (
        pa.struct([("a", pa.string()), ("b", pa.struct([("c", pa.list_(pa.float32())), ("d", pa.int64())]))]),
        [
            {"a": None, "b": None},
            {"a": "", "b": {"c": [], "d": None}},
            {"a": "x", "b": {"c": [1.0, None], "d": 3}},
        ],
    ),
    "log": (
        pa.list_(pa.struct([("who", pa.string()), ("n", pa.int32())])),
        [[], [None], [{"who": "", "n": None}, {"who": "u", "n": 2}]],
    ),
    "map": (pa.map_(pa.string(), pa.list_(pa.int64())), [[], [("a", [1]), ("b", None)], [("", [])]]),
    "day": (pa.date32(), [DAY]),
    "date": (pa.date64(), [DAY]),
    "days": (pa.list_(pa.date64()), [[DAY, None], []]),
    "time": (pa.time32("s"), [TIME]),
    "fine_time": (pa.time64("ns"), [TIME]),
    "stamp": (pa.timestamp("s"), [STAMP]),
    "stamps": (pa.struct([("at", pa.list_(pa.timestamp("s")))]), [{"at": [STAMP, None]}, {"at": None}]),
    "zoned": (pa.timestamp("ns", "Europe/Berlin"), [STAMP]),
    "span": (pa.duration("ms"), [datetime.timedelta(1, 5)]),
    "money": (pa.decimal128(9, 2), [Decimal("1.25"), Decimal("-0.01")]),
}
SHAPES = [(None,), (None, 3), (None, None), (2, None), (None, 2, 2), (None, None, None), (2, None, 1)]


def tensors(rng: np.random.Generator, found: Ragged, count: int) -> pa.Array:
    """Return tensors of any bits and shapes, some of them empty, some missing."""
    shapes = np.stack(
        [rng.integers(0, 4, count) if n is None else np.full(count, n) for n in found.shape], 1
    ).astype(np.int64)
    items = int(shapes.prod(1).sum())
    if found.dtype == "bool":
        flat = rng.integers(0, 2, items).astype(bool)
    else:
        kind = DTYPES[found.dtype]
        flat = rng.integers(0, 256, items * kind.itemsize, dtype=np.uint8).view(kind)
    column = join(found, flat, shapes)
    return column.take(pa.array([None if rng.random() < 0.15 else n for n in range(count)], pa.int64()))


@st.composite
def tables(draw: st.DrawFn) -> tuple[Schema, list[Any]]:
    """Fields of many types, and rows."""
    count, rng = draw(st.integers(1, 60)), np.random.default_rng(draw(st.integers(0, 2**31)))
    fields, columns = [Field(("n",), "int64", ())], [np.arange(count)]
    for name in draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=4, unique=True)):
        kind, values = VALUES[name]
        key = draw(st.sampled_from([(name,), ("next", name), ("a", "b", name)]))
        fields.append(Field(key, ARROW, (), type_text(kind)))
        chosen = rng.integers(0, len(values) + 1, count).tolist()
        columns.append(pa.array([[*values, None][n] for n in chosen], kind))
    dtypes = st.sampled_from(sorted(set(DTYPES) - {"object"}))
    for number, dtype in enumerate(draw(st.lists(dtypes, min_size=1, max_size=3))):
        shape = draw(st.sampled_from(SHAPES))
        fields.append(Field((f"t{number}",), ARROW, (), ragged_text(dtype, shape)))
        columns.append(tensors(rng, Ragged(dtype, shape), count))
    return Schema(fields), columns


def bits(array: Any) -> Any:
    """Return what a column holds, to the bit: numbers that are none differ by theirs."""
    if isinstance(array, np.ndarray):
        return array.tobytes()
    kind, valid = array.type, array.drop_null()
    if isinstance(kind, pa.StructType):
        inside = [bits(part) for part in valid.flatten()]
    elif isinstance(kind, (pa.ListType, pa.LargeListType, pa.FixedSizeListType)):
        inside = [valid.value_lengths().to_pylist(), bits(valid.flatten())]
    elif pa.types.is_floating(kind):
        inside = [valid.to_numpy(zero_copy_only=False).tobytes()]
    else:
        inside = [valid.to_pylist()]
    return str(kind), array.is_null().to_pylist(), inside


def make(path: Path, schema: Schema, columns: list[Any], **options: Any) -> ArrowStorage:
    storage = prepare(ArrowStorage(path, **options), schema)
    with storage.locks.extend, storage.lock:
        RoundRobinWriter().write(storage, columns, Steps(len(columns[0])), source=None, info="")
    return storage


@pytest.mark.guarantee("exchange/exports")
@pytest.mark.slow
@share(0.3, of=15)  # each makes two stores
@given(table=tables(), form=st.sampled_from(sorted(TABLES)), compression=st.sampled_from([None, "zstd"]))
def test_whatever_rows_come_back(
    tmp_path_factory: pytest.TempPathFactory, table: tuple[Schema, list[Any]], form: str, compression: Any
) -> None:
    """In several pieces, by their bits and their types."""
    folder = tmp_path_factory.mktemp("rows")
    schema, columns = table
    storage = make(folder / "run.exp", schema, columns, compression=compression)
    out, back = TABLES[form]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "EXCHANGE_ROWS", 16)
        patch.setattr(tuning, "EXCHANGE_VARIABLE_ROWS", 7)
        rb = expstore.ReplayBuffer(storage=storage)
        assert out(rb, folder / "out").left_out == 0
        rb.close()
        assert back(folder / "out", folder / "back.exp").notes == ()
    again = ArrowStorage(folder / "back.exp")
    assert again.schema == schema
    found = dict(zip(again.require_schema().keys, again.read(again.window.ids()), strict=True))
    for key, expected in zip(schema.keys, columns, strict=True):
        assert bits(found[key]) == bits(expected), key
    again.close()
    assert run(["verify", str(folder / "back.exp")]) == 0


test_whatever_rows_come_back_in_full = pytest.mark.torture(in_full(test_whatever_rows_come_back))


@pytest.mark.some(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["bfloat16", "complex64", "int16"])
def test_tensors_are_read_as_numbers_and_come_back(dtype: str, shape: tuple[int | None, ...]) -> None:
    """Also from a part of a batch, and where there is no tensor."""
    column = tensors(np.random.default_rng(3), Ragged(dtype, shape), 40)
    assert column.null_count
    entry = Field(("t",), ARROW, (), ragged_text(dtype, shape))
    there = to_file(entry, column)
    assert there.type == file_type(entry)
    there.validate(full=True)
    for part in (slice(0, 40), slice(7, 31), slice(9, 9)):
        assert bits(from_file(entry, there[part])) == bits(column[part])
    if dtype == "bfloat16":
        with pytest.raises(SchemaError, match="'t' is string, which is not bfloat16"):
            from_file(entry, pa.array(["x"]))


@pytest.mark.guarantee("exchange/readers")
def test_others_read_it_unaided(tmp_path: Path) -> None:
    """pyarrow, DuckDB and pandas, texts and lists as such, tensors as lists, bfloat16 as numbers."""
    points = torch.nested.nested_tensor(
        [torch.arange(3.0 * (n % 3)).reshape(-1, 3).bfloat16() + n for n in range(30)], layout=torch.jagged
    )
    with expstore.open(tmp_path / "run.exp", layout="arrow") as rb:
        data = rollouts(0, 30)
        data["points"] = points
        rb.extend(data)
        export_parquet(rb, tmp_path / "out")
        export_arrow(rb, tmp_path / "arrow")
    texts = [None if n % 5 == 4 else f"prompt {n % 7}" for n in range(30)]
    lists = [list(range(n, n + n % 6)) for n in range(30)]
    facts = [{"n": n, "tags": ["é"] * (n % 3)} for n in range(30)]
    corners = [[[float(i + n) for i in range(3 * k, 3 * k + 3)] for k in range(n % 3)] for n in range(30)]
    with pa.ipc.open_file(tmp_path / "arrow/rows.arrow") as file:
        ours = file.read_all()
    for table in (pq.read_table(tmp_path / "out/rows"), ours):
        assert table["prompt"].to_pylist() == texts
        assert table["tokens"].type == pa.list_(pa.int32())
        assert table["tokens"].to_pylist() == lists
        assert table["facts"].to_pylist() == facts
        assert table["points"].to_pylist() == corners
        image = table["image"].to_pylist()[5]
        assert image == {"data": [5] * 8, "shape": [2, 4]}
        assert [row["text"] for row in table["next"].to_pylist()] == [bytes([n]) * (n % 4) for n in range(30)]
    query = "SELECT prompt, tokens, facts, points, image.shape, next.reward FROM '{}' ORDER BY _id"
    found = duckdb.sql(query.format(tmp_path / "out/rows/*.parquet")).fetchall()
    assert [row[0] for row in found] == texts
    assert [row[1] for row in found] == lists
    assert [row[2] for row in found] == facts
    assert [row[3] for row in found] == corners
    assert [tuple(row[4]) for row in found] == [(1 + n % 2, 2 + n % 3) for n in range(30)]
    frame = pd.read_parquet(tmp_path / "out/rows").sort_values("_id")
    assert [None if value is None or value != value else value for value in frame["prompt"]] == texts
    assert [values.tolist() for values in frame["tokens"]] == lists
    assert pl.read_parquet(tmp_path / "out/rows/*.parquet").sort("_id")["tokens"].to_list() == lists


QUERIES = (
    "SELECT _episode, _step, _time, _priority FROM transitions ORDER BY _id",
    "SELECT episode_id, source, length, \"return\", replace(status, 'open', 'cut') FROM episodes "
    "WHERE live_rows > 0 ORDER BY episode_id",
)


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("capacity", [None, 130])
def test_episodes_files_and_row_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, capacity: int | None
) -> None:
    monkeypatch.setattr(tuning, "EXCHANGE_ROWS", 32)
    monkeypatch.setattr(tuning, "PARQUET_FILE_ROWS", 50)
    out, back = TABLES[form]
    with expstore.open(tmp_path / "run.exp", layout="arrow", capacity=capacity) as rb:
        for first in range(0, 200, 25):
            rb.extend(rollouts(first, 25), source="a")
            rb.extend(rollouts(first + 1000, 10), source="b")
        rb.update_priority(id=torch.tensor([250, 280]), priority=torch.tensor([3.0, 0.5]))
        done = out(rb, tmp_path / "all")
        made = back(tmp_path / "all", tmp_path / "all.exp")
        assert (made.rows, made.episodes) == (done.rows, done.episodes)
        with expstore.open(tmp_path / "all.exp", mode="r") as again:
            ids = [
                b.sql("SELECT _id FROM transitions ORDER BY _id").df()["_id"].to_numpy() for b in (rb, again)
            ]
            pair = [b[b.storage.geometry.index_of(i)] for b, i in zip((rb, again), ids, strict=True)]
            assert plain(pair[0]) == plain(pair[1])
            assert again.storage.capacity == capacity
            assert again.storage.manifest.storage == "arrow"
            if capacity is None:
                for query in QUERIES:
                    assert rb.sql(query).fetchall() == again.sql(query).fetchall()
    if form == "parquet":
        paths = sorted((tmp_path / "all/rows").iterdir())
        assert len(paths) > 2
        groups = [pq.ParquetFile(path).metadata for path in paths]
        assert max(group.num_row_groups for group in groups) > 1
        assert all(g.row_group(n).num_rows <= 32 for g in groups for n in range(g.num_row_groups))
    assert run(["verify", str(tmp_path / "all.exp")]) == 0


def test_rows_in_memory_are_exported_too(tmp_path: Path, form: str) -> None:
    out, back = TABLES[form]
    with buffer() as rb:
        out(rb, tmp_path / "out")
        back(tmp_path / "out", tmp_path / "back.exp")
        with expstore.open(tmp_path / "back.exp", mode="r") as again:
            assert plain(again[:]) == plain(rb[:])


def test_rows_of_any_length_are_read_in_pieces_that_fit(tmp_path: Path) -> None:
    """Short ones many at a time, long ones few, also where long ones come unannounced."""
    lengths = [10] * 600 + [20_000] * 600 + [0] * 300 + [3_000_000]
    schema = Schema([Field(("text",), ARROW, (), type_text(pa.binary()))])
    column = pa.array([bytes([n % 251]) * size for n, size in enumerate(lengths)], pa.binary())
    storage = make(tmp_path / "run.exp", schema, [column])
    rb = expstore.ReplayBuffer(storage=storage)
    rows = Rows.choose(storage)
    most = 1 << 20
    pieces = list(read_pieces(rows, rows.by_id(65_536), most))
    assert np.concatenate([piece.ids for piece in pieces]).tolist() == list(range(1, len(lengths) + 1))
    assert pa.concat_arrays([piece.columns[0] for piece in pieces]) == column
    sizes = [int(piece.columns[0].nbytes) for piece in pieces]
    long = [size for size, piece in zip(sizes, pieces, strict=True) if 600 < piece.ids[-1] <= 1200]
    assert max(long[1:]) <= 2 * most  # the first of them came unannounced
    assert 4 < len(pieces) < 60
    whole = sum(lengths) / len(lengths)
    assert 0.3 * whole < mean_bytes(rows) < 30 * whole
    done = export_parquet(rb, tmp_path / "out")
    assert done.rows == len(lengths)
    rb.close()
    import_parquet(tmp_path / "out", tmp_path / "back.exp")
    again = ArrowStorage(tmp_path / "back.exp")
    assert again.read(again.window.ids())[0] == column
    again.close()


def test_rows_that_are_more_than_an_arrow_array_holds_are_read_by_fewer(tmp_path: Path) -> None:
    schema = Schema([Field(("text",), ARROW, (), type_text(pa.string()))])
    storage = make(tmp_path / "run.exp", schema, [pa.array([str(n) for n in range(50)])])
    rb = expstore.ReplayBuffer(storage=storage)
    rows, asked = Rows.choose(storage), []

    class Narrow:
        fields, count = rows.fields, rows.count

        def read(self, ids: Any, places: Any = None) -> Any:
            asked.append(ids.size)
            if ids.size > 3:
                raise SchemaError("these rows hold too many values")
            return rows.read(ids, places)

    pieces = list(read_pieces(Narrow(), rows.by_id(65_536)))  # type: ignore[arg-type]
    assert np.concatenate([piece.ids for piece in pieces]).tolist() == list(range(1, 51))
    assert sum(piece.asked for piece in pieces) == 50
    assert max(asked) > 3

    class Never(Narrow):
        def read(self, ids: Any, places: Any = None) -> Any:
            raise SchemaError("these rows hold too many values")

    with pytest.raises(SchemaError, match="too many values"):
        list(read_pieces(Never(), rows.by_id(65_536)))  # type: ignore[arg-type]
    rb.close()


def test_types_without_a_parquet_form_are_refused_by_name(tmp_path: Path) -> None:
    kind = pa.struct([])
    schema = Schema([Field(("n",), "int64", ()), Field(("far",), ARROW, (), type_text(kind))])
    storage = make(tmp_path / "run.exp", schema, [np.arange(2), pa.array([{}, None], kind)])
    rb = expstore.ReplayBuffer(storage=storage)
    with pytest.raises(SchemaError, match="'far' is struct<>, which Parquet cannot store"):
        export_parquet(rb, tmp_path / "out")
    assert os.listdir(tmp_path) == ["run.exp"]
    assert export_parquet(rb, tmp_path / "out", fields=["n"]).rows == 2
    export_arrow(rb, tmp_path / "arrow")
    rb.close()
    import_arrow(tmp_path / "arrow", tmp_path / "back.exp")
    again = ArrowStorage(tmp_path / "back.exp")
    assert again.schema == schema
    assert again.read(again.window.ids())[1].to_pylist() == [{}, None]
    again.close()


# -- files of others ------------------------------------------------------------------------------------

COUNT = 40


def column(value: Callable[[int], Any], kind: pa.DataType | None = None) -> pa.Array:
    return pa.array([value(n) for n in range(COUNT)], kind)


ANY_LENGTH, HOLES = "has lists of any length", "has rows without a value"
PAIRS, RAGGED = pa.list_(pa.list_(pa.float32())), pa.list_(pa.list_(pa.int64()))
#: Columns of others: what they are, the field that they become, and why it is noted.
FOREIGN: dict[str, tuple[pa.Array, str, str]] = {
    "text": (column(lambda n: f"t{n}"), "string", ""),
    "view": (column(lambda n: f"t{n}", pa.string_view()), "string", ""),
    "word": (column(lambda n: "a" if n % 2 == 0 else None).dictionary_encode(), "string", ""),
    "words": (column(lambda n: ["a", "b"][: n % 3], pa.list_(pa.large_string())), "list<large_string>", ""),
    "tokens": (column(lambda n: list(range(n % 4)), pa.list_(pa.int32())), "int32[?]", ANY_LENGTH),
    "pairs": (column(lambda n: [[1.0, 2.0]] * (n % 3), PAIRS), "float32[?, 2]", ANY_LENGTH),
    "ragged": (column(lambda n: [[1] * (n % 2)] * (n % 3), RAGGED), "list<list<int64>>", ""),
    "holes": (column(lambda n: [n, None][: 1 + n % 2], pa.list_(pa.int16())), "list<int16>", HOLES),
    "score": (column(lambda n: None if n == COUNT - 1 else n / 2), "float64", HOLES),
    "facts": (
        column(lambda n: None if n == 7 else {"a": n, "b": "x"}), "struct<a: int64, b: string>", HOLES
    ),
    "map": (column(lambda n: [("k", n)], pa.map_(pa.string(), pa.int64())), "map<string, int64>", ""),
    "vector": (column(lambda n: [float(n), 1.0]), "float64[2]", ""),
    "number": (column(lambda n: n), "int64[]", ""),
}  # fmt: skip


def table_of(names: list[str]) -> pa.Table:
    return pa.table({name: FOREIGN[name][0] for name in names})


def write(folder: Path, form: str, table: pa.Table) -> Path:
    """Write a table as others do: in two Parquet files of several row groups, or one file of Arrow."""
    folder.mkdir()
    if form == "parquet":
        pq.write_table(table.slice(0, 25), folder / "a.parquet", row_group_size=10)
        pq.write_table(table.slice(25), folder / "b.parquet", row_group_size=10)
        return folder
    with pa.ipc.new_file(folder / "x.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=10)
    return folder / "x.arrow"


def test_columns_of_others_become_fields(tmp_path: Path, form: str) -> None:
    """Whatever has no fixed size, in an Arrow store; what has one stays of fixed size there."""
    names = [name for name in FOREIGN if form == "arrow" or name != "view"]
    source = write(tmp_path / "in", form, table_of(names))
    back = TABLES[form][1]
    done = back(source, tmp_path / "back.exp")
    expected = [f"{name!r} {FOREIGN[name][2]}" for name in names if FOREIGN[name][2]]
    assert list(done.notes) == expected
    storage = ArrowStorage(tmp_path / "back.exp")
    fields = {entry.key[0]: str(entry) for entry in storage.require_schema().fields}
    assert fields == {name: FOREIGN[name][1] for name in names}
    for entry, found in zip(storage.require_schema().fields, storage.read(storage.window.ids()), strict=True):
        assert found.tolist() == FOREIGN[entry.key[0]][0].to_pylist(), entry
    storage.close()
    assert run(["verify", str(tmp_path / "back.exp")]) == 0


def test_the_storage_is_as_asked_or_as_needed(tmp_path: Path, form: str) -> None:
    """A zarr store refuses columns without a fixed size by name."""
    back, target = TABLES[form][1], tmp_path / "x.exp"
    source = write(tmp_path / "in", form, table_of(["number", "vector"]))
    for asked, kind in ((None, "zarr"), ("zarr", "zarr"), ("arrow", "arrow")):
        back(source, tmp_path / f"{asked}.exp", storage=asked)
        with expstore.open(tmp_path / f"{asked}.exp", mode="r") as rb:
            assert rb.storage.manifest.storage == kind
            assert rb[:]["vector"].shape == (COUNT, 2)
    with pytest.raises(ValueError, match="storage 'duckdb' is unknown"):
        back(source, target, storage="duckdb")
    for name, (_, field, why) in FOREIGN.items():
        if name not in ("number", "vector"):
            with pytest.raises(SchemaError) as caught:
                back(write(tmp_path / name, form, table_of(["number", name])), target, storage="zarr")
            assert f"column {name!r} {why or 'is ' + field}: a zarr storage needs" in str(caught.value)
            assert 'storage="arrow"' in str(caught.value.hint)
            assert not target.exists()


def test_structs_of_others_are_groups_of_fields_and_flags_end_episodes(tmp_path: Path, form: str) -> None:
    """A struct that is always there is a group of fields, as ever; what lies in it may have no fixed size."""
    inside = [FOREIGN["text"][0], FOREIGN["tokens"][0], pa.array([n % 10 == 9 for n in range(COUNT)])]
    group = pa.StructArray.from_arrays(inside, ["text", "tokens", "terminated"])
    mask = pa.array([n % 4 != 0 for n in range(COUNT)])
    table = pa.table({"next": group, "collector": pa.StructArray.from_arrays([mask], ["mask"])})
    TABLES[form][1](write(tmp_path / "in", form, table), tmp_path / "back.exp")
    with expstore.open(tmp_path / "back.exp", mode="r") as rb:
        found = rb.sql("SELECT next.text, next.tokens, _episode FROM transitions ORDER BY _id").fetchall()
        kept = [n for n in range(COUNT) if n % 4]
        assert [row[0] for row in found] == [f"t{n}" for n in kept]
        assert [row[1] for row in found] == [list(range(n % 4)) for n in kept]
        assert found[0][2] < found[-1][2]
        assert isinstance(rb[:]["next", "tokens"], torch.Tensor)


def test_files_of_no_rows_have_the_fields_of_their_types(tmp_path: Path, form: str) -> None:
    table = table_of(["text", "tokens", "number", "ragged"]).slice(0, 0)
    done = TABLES[form][1](write(tmp_path / "in", form, table), tmp_path / "back.exp")
    assert (done.rows, done.fields) == (0, ("text", "tokens", "number", "ragged"))
    with expstore.open(tmp_path / "back.exp", mode="r") as rb:
        assert str(rb.schema[("tokens",)]) == "int32[?]"
        assert str(rb.schema[("number",)]) == "int64[]"


@pytest.mark.slow
def test_changed_exports_are_imported_or_refused(tmp_path: Path) -> None:
    """Rows taken out, columns without our notes: types say then what fields are. Rows that do not fit."""
    with expstore.open(tmp_path / "run.exp", layout="arrow") as rb:
        rb.extend(rollouts(0, 30))
        export_parquet(rb, tmp_path / "out")
    path = tmp_path / "out/rows/00000.parquet"
    table = pq.read_table(path)
    image = [{"data": [1, 2, 3], "shape": [2, 2]}, *table["image"].to_pylist()[1:]]
    at = table.schema.get_field_index("image")
    pq.write_table(table.set_column(at, table.schema.field(at), pa.array(image, table["image"].type)), path)
    with pytest.raises(SchemaError, match="'image': expected int64") as caught:
        import_parquet(tmp_path / "out", tmp_path / "back.exp")
    assert "shape does not match its number of values" in str(caught.value.hint)
    pq.write_table(table.set_column(at, "image", pa.array(["x"] * 30)), path)
    import_parquet(tmp_path / "out", tmp_path / "other.exp")
    with expstore.open(tmp_path / "other.exp", mode="r") as rb:
        assert str(rb.schema[("image",)]) == "string"
        assert str(rb.schema[("tokens",)]) == "int32[?]"
    pq.write_table(table.replace_schema_metadata(None), path)
    import_parquet(tmp_path / "out", tmp_path / "plain.exp")
    with expstore.open(tmp_path / "plain.exp", mode="r") as rb:
        assert str(rb.schema[("image", "data")]) == "int64[?]"
        assert rb[:]["next", "reward"].shape == (30, 1)
    about = json.loads(table.schema.metadata[b"expstore"])
    assert about["format"] == 1
    for change, words in (
        ({"format": 2}, "in format 2, this version reads format 1"),
        ({"fields": [{"key": ["x"], "dtype": "arrow", "shape": [], "arrow": "{}"}]}, "cannot be read"),
        ({"fields": 3}, "cannot be read"),
    ):
        text = json.dumps(about | change).encode()
        pq.write_table(table.replace_schema_metadata({b"expstore": text}), path)
        with pytest.raises(SchemaError, match=words):
            import_parquet(tmp_path / "out", tmp_path / "back.exp")
    assert sorted(os.listdir(tmp_path)) == ["other.exp", "out", "plain.exp", "run.exp"]


def test_types_that_no_field_has_are_refused_by_name(tmp_path: Path) -> None:
    for number, (column, words) in enumerate(
        (
            (pa.array([None, None]), "'odd' has no value in any row"),
            (
                pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval()),
                "'odd' is of type month_day_nano_interval, which a field cannot have",
            ),
        )
    ):
        with pa.ipc.new_file(tmp_path / f"{number}.arrow", pa.schema([("odd", column.type)])) as file:
            file.write_table(pa.table({"odd": column}))
        with pytest.raises(SchemaError, match=words):
            import_arrow(tmp_path / f"{number}.arrow", tmp_path / "back.exp")
    assert sorted(os.listdir(tmp_path)) == ["0.arrow", "1.arrow"]


@pytest.mark.slow
def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with expstore.open(tmp_path / "run.exp", layout="arrow") as rb:
        rb.extend(rollouts(0, 30))
    paths = [str(tmp_path / name) for name in ("run.exp", "out", "back.exp")]
    source = str(write(tmp_path / "in", "arrow", table_of(["tokens", "text"])))
    assert run(["import", source, str(tmp_path / "x.exp")]) == 0
    assert "note: 'tokens' has lists of any length" in capsys.readouterr().err
    for options, words in (
        (["--storage", "zarr"], "a zarr storage needs rows of fixed size"),
        (["--storage", "sqlite"], "use arrow or zarr"),
        (["--storage", "arrow", "--format", "npz"], "applies to arrow, csv, jsonl, parquet only"),
    ):
        assert run(["import", source, str(tmp_path / "y.exp"), *options]) == 2
        assert words in capsys.readouterr().err
    assert run(["export", paths[0], str(tmp_path / "z"), "--npz"]) == 2
    said = capsys.readouterr().err
    assert "field 'prompt' is string: exports to NPZ need fields of fixed size" in said
    assert "Parquet and Arrow store all" in said


def test_texts_of_types_are_kept_by_name(tmp_path: Path) -> None:
    """What the notes of an export say is what the schema of a store says."""
    for name, (kind, _) in VALUES.items():
        assert to_type(type_text(kind)) == kind, name
        assert ragged_of(type_text(kind)) is None
