"""SQL over stores with packed fields unpacks only needed fields, and gives the same results as flat ones."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core import tuning
from expstore.errors import CorruptionError, QueryError
from expstore.sql import arrow_dataset
from expstore.sql.projection import find_members
from expstore.storages.columns.packed import column
from expstore.storages.format.layout import ColumnLayout
from tests.support.batches import counted_frames, memory_buffer, numbered_rows
from tests.support.stores import extend_all, open_zarr

pytestmark = pytest.mark.usefixtures("no_syncs")

ROWS = 700
CAPACITY = 500


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of few rows."""
    monkeypatch.setattr(tuning, "PACKED_SHARD_ROWS", 64)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count rows that are taken out of packed columns, by field."""
    counts: dict[str, int] = {}
    gather = column.PackedRows.gather

    def counted(self: column.PackedRows, slots: Any) -> Any:
        name = ".".join(self.entry.key)
        counts[name] = counts.get(name, 0) + slots.size
        return gather(self, slots)

    monkeypatch.setattr(column.PackedRows, "gather", counted)
    return counts


def layout() -> ColumnLayout:
    packed = {"layout": "packed", "rows": 4}
    return ColumnLayout(fields={"image": packed, "next.image": packed, "half": packed})


def batches(rows: int) -> Iterator[TensorDict]:
    """Yield numbered rows, 50 at a time."""
    for first in range(0, rows, 50):
        number = torch.arange(first, first + 50)
        image = counted_frames(3 * number, 2, 3)
        after = {"image": image + 1, "reward": number[:, None].float(), "done": (number % 9 == 8)[:, None]}
        half = number[:, None].to(torch.float16) * torch.tensor([1.0, 0.5]).to(torch.float16)
        yield numbered_rows(50, first, image=image, half=half, next=after)


def make(path: Path, columns: ColumnLayout | None = None, *, times: int = 1) -> TensorDictReplayBuffer:
    return extend_all(open_zarr(path, times * CAPACITY, layout=columns or layout()), *batches(times * ROWS))


def make_flat() -> TensorDictReplayBuffer:
    return extend_all(memory_buffer(CAPACITY, seed=0), *batches(ROWS))


SAME = [
    "SELECT _id, image, half, next FROM transitions ORDER BY _id",
    "SELECT * EXCLUDE (_time) FROM transitions",
    "SELECT next.image[1][2], half[2] FROM transitions WHERE number % 7 = 1",
    "SELECT sum(image[2][3]), sum(half[1]) FROM transitions WHERE next.reward > 300",
    "SELECT number, image FROM transitions WHERE number > 290 AND _id < 400",
    "SELECT number FROM transitions WHERE image[1][1] = 7",
    "SELECT image FROM transitions WHERE _id IN (401, 500, 3, 699)",
    "SELECT a.number, b.image FROM transitions a JOIN transitions b ON b._id = a._id + 1 ORDER BY 1",
    "SELECT transitions.next.image FROM transitions WHERE number < 0",
    "SELECT t.next FROM transitions t WHERE number = 650",
    "FROM (SELECT next AS n FROM transitions) SELECT n.image ORDER BY n.reward LIMIT 3",
]


@pytest.mark.guarantee("exchange/packed")
@pytest.mark.parametrize("layout_of_rows", [layout(), ColumnLayout("packed")], ids=["some", "all"])
def test_answers_are_those_of_a_flat_store(
    store_path: Path, monkeypatch: pytest.MonkeyPatch, layout_of_rows: ColumnLayout
) -> None:
    """By a writer and a reader, also if rows are read in many batches."""
    flat = make_flat()
    with make(store_path, layout_of_rows) as rb, expstore.open(store_path, mode="r") as follower:
        packed = {".".join(rb.schema.fields[place].key) for place in rb.storage.unviewed_places}
        assert packed >= {"image", "half", "next.image"}
        for number, query in enumerate(SAME):
            if number == len(SAME) // 2:
                monkeypatch.setattr(tuning, "SQL_BATCH_ROWS", 64)
                monkeypatch.setattr(tuning, "SQL_BATCH_BYTES", 200)
            expected = flat.sql(query).arrow()
            for reader in (rb, follower):
                found = reader.sql(query).arrow()
                assert found.schema == expected.schema, query
                assert found.to_pylist() == expected.to_pylist(), query


NOTHING = [
    "SELECT count(*) FROM transitions",
    "SELECT avg(number), max(_priority) FROM transitions WHERE next.reward > 3",
    "SELECT t.next.reward FROM transitions t ORDER BY t.next.done",
    "SELECT sum(next.reward) AS total FROM transitions GROUP BY _episode ORDER BY total",
    "SELECT * FROM (SELECT next.reward, _id FROM transitions)",
    "SELECT * EXCLUDE (image, half, next), next.reward FROM transitions",
    "SELECT * FROM episodes",
    "SELECT image FROM transitions WHERE number > 10000",
]


def test_scalars_unpack_nothing(store_path: Path, unpacked: dict[str, int]) -> None:
    with make(store_path) as rb:
        unpacked.clear()
        for query in NOTHING:
            rb.sql(query)
            assert sum(unpacked.values()) == 0, query


@pytest.mark.guarantee("exchange/packed")
def test_only_rows_that_pass_are_unpacked(store_path: Path, unpacked: dict[str, int]) -> None:
    with make(store_path) as rb:
        unpacked.clear()
        rb.sql("SELECT image FROM transitions WHERE number BETWEEN 300 AND 309 AND _priority > 0")
        assert unpacked == {"image": 10}
        unpacked.clear()
        rb.sql("SELECT next.image, next.reward FROM transitions WHERE _id IN (400, 500, 3)")
        assert unpacked == {"next.image": 2}


def test_a_limit_ends_the_unpacking(
    store_path: Path, unpacked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "SQL_BATCH_BYTES", 6 * 4)
    with make(store_path, times=10) as rb:  # on a busy machine threads read some hundred rows ahead
        unpacked.clear()
        assert len(rb.sql("SELECT image FROM transitions LIMIT 3").fetchall()) == 3
        assert unpacked["image"] < 10 * CAPACITY / 2


def test_too_much_at_once_is_refused(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "SQL_PACKED_BYTES", 100 * 6)
    monkeypatch.setattr(tuning, "SQL_BATCH_BYTES", 10 * 6)
    with make(store_path) as rb:
        with pytest.raises(QueryError, match="more than 100 rows of image, which are packed") as caught:
            rb.sql("SELECT sum(image[1][1]) FROM transitions")
        assert "rb[index]" in str(caught.value.hint)
        assert len(rb.sql("SELECT image FROM transitions WHERE number >= 600").fetchall()) == 100
        assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(CAPACITY,)]


def test_damage_is_reported_when_rows_are_needed(store_path: Path) -> None:
    with make(store_path) as rb:
        assert rb.schema is not None
    shard = next((store_path / "columns/image").glob("c.*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with expstore.open(store_path, mode="r") as rb:
        with pytest.raises(CorruptionError):
            rb.sql("SELECT image FROM transitions")
        assert rb.sql("SELECT count(next.image), sum(number) FROM transitions").fetchall()[0][0] == CAPACITY


#: Statement, and the members that it may need.
MEMBERS = [
    ("SELECT next.reward, t.NEXT.pixels FROM transitions t", "next.pixels"),
    ("SELECT next FROM transitions", "next.pixels next.state"),
    ("SELECT a.b FROM transitions", "a.b.c"),
    ("SELECT a.b.c[1], a.b.d, a.x FROM transitions", "a.b.c"),
    ("SELECT a.b.d FROM transitions", ""),
    ("SELECT t FROM transitions t", "all"),
    ("SELECT transitions FROM transitions", "all"),
    ("SELECT * FROM transitions", "all"),
    ("FROM transitions", "all"),
    ("SELECT next.* FROM transitions", "all"),
    ("SELECT * EXCLUDE (a, Next), next.reward, a.b.d FROM transitions", ""),
    ("SELECT t.* EXCLUDE (next, a), next.pixels FROM transitions t", "next.pixels"),
    ("SELECT * EXCLUDE (next) FROM transitions", "all"),
    ("SELECT * REPLACE (1 AS next) FROM transitions", "all"),
    ("SELECT COLUMNS(c -> c = 'x') FROM transitions", "all"),
    ("SELECT COLUMNS('n.*') FROM transitions", "all"),
    ("SELECT #3 FROM transitions", "all"),
    ("SELECT p FROM transitions AS t(q, p)", "all"),
    ("SELECT 1 FROM transitions NATURAL JOIN episodes", "all"),
    ("SELECT 1 FROM transitions t JOIN transitions u USING (a)", "a.b.c"),
    ("WITH t AS (SELECT * FROM transitions) SELECT t.next.reward FROM t", "all"),
    ("SELECT next.reward FROM (FROM transitions)", "all"),
    ("SELECT 1 FROM episodes e, LATERAL (SELECT * FROM transitions)", "all"),
    ("FROM query('SELECT * FROM transitions')", "all"),
    ("PIVOT transitions ON _episode", "all"),
    ("SUMMARIZE transitions", "all"),
    ("SELECT FROM FROM", "all"),
]


def test_members_that_a_statement_may_need() -> None:
    members = {"next.pixels", "next.state", "a.b.c"}
    with duckdb.connect() as con:
        for query, expected in MEMBERS:
            found = find_members(con, query, [tuple(name.split(".")) for name in members])
            wanted = members if expected == "all" else set(expected.split())
            assert {".".join(key) for key in found} == wanted, query


def test_the_oldest_rows_are_those_of_the_window(store_path: Path) -> None:
    with make(store_path) as rb:
        found = rb.sql("SELECT number, image[1][1] FROM transitions WHERE _id < 210 ORDER BY _id").fetchall()
        assert found == [(number, number * 3 % 256) for number in range(200, 209)]


def test_a_query_with_a_limit_leaves_no_reader_behind(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What reads ahead in a thread of Arrow's would end the process if the interpreter ended before it."""
    monkeypatch.setattr(tuning, "SQL_BATCH_BYTES", 200)
    read: list[int] = []
    alive: set[int] = set()
    ahead = threading.Event()
    unpacked = arrow_dataset.ViewDataset._add_packed

    def watched(self: Any, *arguments: Any) -> Iterator[Any]:
        alive.add(number := len(read))
        read.append(0)
        try:
            for batch in unpacked(self, *arguments):
                if read[number]:
                    ahead.wait(2)  # long after the query has its rows
                read[number] += 1
                yield batch
        finally:
            alive.discard(number)

    monkeypatch.setattr(arrow_dataset.ViewDataset, "_add_packed", watched)
    with make(store_path) as rb, expstore.open(store_path, mode="r") as follower:
        for reader in (rb, follower):
            for query in (
                "SELECT image FROM transitions LIMIT 2",
                "SELECT image FROM transitions WHERE _id > 300 LIMIT 1",
            ):
                assert len(reader.sql(query)) <= 2
                assert not alive
    ahead.set()
    assert read == [1, 1, 1, 1]


#: How many processes each part of the long tests starts, 8 at a time, and the number of parts.
ENDINGS, PARTS = 100, 5
#: A process that takes so long hangs: eight that load torch at once take minutes on a busy machine.
HANG_SECONDS = 900

_SCRIPT = """
import sys
import expstore
rb = expstore.open(sys.argv[1], mode="r")
print(len(rb.sql("SELECT * FROM transitions LIMIT 2")))
"""


def run_sql(path: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "expstore",
        "sql",
        str(path),
        "SELECT * FROM transitions LIMIT 2",
        "--json",
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)


def run_script(path: Path) -> subprocess.CompletedProcess[str]:
    """Run a program that asks in SQL and ends without close()."""
    command = [sys.executable, "-c", _SCRIPT, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)


@pytest.fixture
def packed_images(store_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A closed store of packed images, with shards as long as ever."""
    monkeypatch.undo()
    with expstore.open(store_path, layout="packed") as rb:
        rb.extend(TensorDict({"image": torch.arange(4000)[:, None].repeat(1, 7056).to(torch.uint8)}, [4000]))
    return store_path


@pytest.mark.torture
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_processes_end_after_a_query_with_a_limit(packed_images: Path, part: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        for done in pool.map(run_sql, [packed_images] * ENDINGS):
            assert (done.returncode, done.stderr, len(json.loads(done.stdout))) == (0, "", 2)


@pytest.mark.torture
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_many_programs_end_after_a_query_without_a_close(packed_images: Path, part: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        for done in pool.map(run_script, [packed_images] * ENDINGS):
            assert (done.returncode, done.stderr, done.stdout) == (0, "", "2\n")
