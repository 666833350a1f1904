"""The command line: what it prints, its exit codes, how long it takes.

Run with the other tests. Most commands run in this process; those whose exit code, locks or time matter run
in a separate one.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from tensordict import TensorDict

import expstore
from expstore.disk.files import Disk
from expstore.maintenance import survey
from expstore.storages.format import manifest
from tests.support.commands import Cli, Done
from tests.support.stores import copy_folder
from tests.support.tuned import few_rows_in_memory

pytestmark = pytest.mark.index

#: CPU seconds for `info` and `sql` over a million rows: a third of that on a quiet machine.
BOUND = 3.0
COUNT = "SELECT count(*) AS n FROM transitions"
HOLDER = """
import sys
from expstore.storages.factory import ZarrStorage
storage = ZarrStorage(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
storage.close()
"""


def apart(*arguments: object) -> Done:
    """Run a command in a process of its own."""
    command = [sys.executable, "-m", "expstore", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return Done(done.returncode, done.stdout, done.stderr)


def rows(count: int, *, start: int = 0, length: int = 10, wide: bool = False) -> TensorDict:
    """Rows whose values follow from their number; every `length`-th ends an episode."""
    number = torch.arange(start, start + count)
    ended = ((number + 1) % length == 0)[:, None]
    after = {"reward": number[:, None].float() / 4, "terminated": ended, "truncated": torch.zeros_like(ended)}
    batch: dict[str, Any] = {"observation": number[:, None].float() + torch.arange(5), "next": after}
    if wide:
        batch["frame"] = torch.zeros(count, 24, 24, dtype=torch.uint8)
    return TensorDict(batch, [count])


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores to copy: `closed`, and `killed`, which is what a killed writer of `closed` leaves."""
    folder = tmp_path_factory.mktemp("models")
    with expstore.open(folder / "work", capacity=100, meta={"by": "a test"}) as rb:
        rb.extend(rows(25))
    copy_folder(folder / "work", folder / "closed")
    with expstore.open(folder / "work") as rb:
        rb.extend(rows(5, start=100), source="a")
        copy_folder(folder / "work", folder / "killed")
    with expstore.open(folder / "wide", capacity=100) as rb:
        rb.extend(rows(60, wide=True))
    return folder


@pytest.fixture
def store(models: Path, tmp_path: Path) -> Path:
    """A closed store of 25 rows: two episodes that terminated, one that the close cut."""
    return copy_folder(models / "closed", tmp_path / "run.exp")


@pytest.fixture
def wide(models: Path, tmp_path: Path) -> Path:
    """A closed store of 60 rows, with one field more, of images."""
    return copy_folder(models / "wide", tmp_path / "wide.exp")


@pytest.fixture
def left_open(models: Path, tmp_path: Path) -> Path:
    """A store of 30 rows whose writer was killed."""
    return copy_folder(models / "killed", tmp_path / "killed.exp")


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("million") / "run.exp"
    with expstore.open(path) as rb:
        for start in range(0, 1_000_000, 100_000):
            rb.extend(rows(100_000, start=start, length=250))
    return path


@pytest.fixture
def holder(store: Path) -> Iterator[int]:
    """Another process that has the store open; its id."""
    command = [sys.executable, "-c", HOLDER, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process.pid
        process.communicate()
    assert process.returncode == 0


def contents(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def damage(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def is_one_error(done: Done, *words: str) -> bool:
    lines = done.err.splitlines()
    return len(lines) == 1 and lines[0].startswith("error: ") and all(word in lines[0] for word in words)


# -- the whole -------------------------------------------------------------------------------------


def test_without_arguments_it_shows_help(cli: Cli) -> None:
    done = cli()
    assert done.code == 2
    assert "Usage" in done.out


def test_the_version(cli: Cli) -> None:
    assert cli("--version") == Done(0, f"expstore {expstore.__version__}\n", "")


def test_a_path_alone_is_info_and_a_command_is_no_path(
    cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def show(*arguments: object) -> tuple[int, str, str]:
        """Run a command; of its output, leave out the free space, which other processes change."""
        done = cli(*arguments)
        return done.code, re.sub(r"[\d.]+ \w+ free", "", done.out), done.err

    code, info, _ = first = show("info", store)
    assert code == 0
    assert "rows" in info
    assert show(store) == first
    store.rename(store.with_name("verify"))
    monkeypatch.chdir(store.parent)
    assert show("./verify")[:2] == (0, info.replace(str(store), "verify"))
    assert cli("verify", "verify").out == "verify: nothing found\n"


def test_wrong_usage_exits_2(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    collect = ("collect", "CartPole-v1", "run.exp", "--steps")
    for arguments in (
        ("burn",), ("--burn",), ("info",), ("sql",), ("sql", "SELECT 1"),
        ("sql", "run.exp", "SELECT 1", "--limit", "0"), ("sql", "run.exp", "SELECT 1", "--csv", "--json"),
        collect[:2], collect[:3], collect, (*collect, "many"), (*collect, "9", "--policy", "wise"),
        (*collect, "9", "--policy", "no_such_module:f"), (*collect, "9", "--policy", "os:no_such_function"),
        (*collect, "9", "--workers", "-1"),
    ):  # fmt: skip
        done = cli(*arguments)
        assert done.code == 2, arguments
        if "--json" in arguments:
            assert done.json["error"]["kind"] == "usage"
        else:
            assert is_one_error(done)
    assert list(tmp_path.iterdir()) == []


def test_the_process_exits_with_the_code(store: Path) -> None:
    done = apart("sql", store, "SELEC 1")
    assert done.code == 2
    assert is_one_error(done, "SELEC")
    assert done.out == ""


def test_a_closed_pipe_is_not_an_error(store: Path) -> None:
    command = [sys.executable, "-m", "expstore", "sql", str(store), "SELECT repeat('x', 1000000)", "--csv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.mark.parametrize("kind", ["missing", "folder", "file"])
def test_folders_that_are_not_stores_stay_unchanged(cli: Cli, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a"
    if kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.write_text("mine")
    before = contents(tmp_path)
    for command, *others in (("info",), ("sql", "SELECT 1"), ("sql", "SELECT 1", "--parquet", "x")):
        done = cli(command, path, *others)
        assert done.code == 2
        assert is_one_error(done, "is not a store")
    assert contents(tmp_path) == before
    assert path.exists() == (kind != "missing")


def test_a_damaged_store_exits_4(cli: Cli, store: Path) -> None:
    file = store / "expstore.json"
    damage(file, file.read_bytes().index(b"capacity"))
    for command in (
        ("info", store), ("sql", store, "SELECT 1"), ("collect", "CartPole-v1", store, "--steps", "9")
    ):  # fmt: skip
        done = cli(*command)
        assert done.code == 4
        assert "damaged" in done.err
        done = cli(*command, "--json")
        assert (done.code, done.json["error"]["kind"]) == (4, "corruption")


def test_a_damaged_journal_exits_4(cli: Cli, store: Path) -> None:
    (segment,) = (store / "journal").iterdir()
    damage(segment, 40)
    assert cli("info", store).code == 4
    assert cli("sql", store, "SELECT 1").code == 4


def test_a_newer_store_is_not_called_damaged(cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = manifest.Manifest.load(Disk(), store)
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "FORMAT", 99)
        kept.save(Disk(), store)
    done = cli("info", store)
    assert done.code == 1
    assert is_one_error(done, "99", "newer expstore")


def test_a_locked_store(cli: Cli, store: Path, holder: int) -> None:
    collect = ("collect", "CartPole-v1", store, "--steps", 9)
    done = cli(*collect)
    assert done.code == 3
    assert is_one_error(done, str(holder), socket.gethostname())
    done = cli(*collect, "--json")
    assert (done.code, done.json["error"]["kind"]) == (3, "locked")
    assert cli("sql", store, COUNT, "--json").json == [{"n": 25}]
    done = cli("info", store)
    assert f"open in process {holder} on {socket.gethostname()}" in done.out
    (facts,) = cli("info", store, "--json").json["stores"]
    assert facts["open_in"]["pid"] == holder
    assert facts["rows"] == 25


# -- info ------------------------------------------------------------------------------------------


def test_info_in_json(cli: Cli, store: Path) -> None:
    (facts,) = cli("info", store, "--json").json["stores"]
    assert facts["path"] == str(store)
    assert facts["rows"] == facts["written"] == 25
    assert facts["capacity"] == 100
    assert facts["generation"] == 1
    assert facts["episodes"] == {"open": 0, "terminated": 2, "truncated": 0, "cut": 1}
    first = facts["fields"][0]
    assert first.pop("disk_bytes") > 0
    assert first.pop("million_rows_bytes") == 20_000_000
    assert first == {
        "name": "observation", "dtype": "float32", "shape": [5], "row_bytes": 20, "layout": "flat",
        "codec": None, "chunk_rows": None, "compression": None, "shared": None,
    }  # fmt: skip
    assert facts["row_bytes"] == sum(field["row_bytes"] for field in facts["fields"]) + 36
    assert facts["disk_bytes"] > 25 * facts["row_bytes"]
    assert facts["free_bytes"] > 0
    assert facts["million_rows_bytes"] <= 1_000_000 * facts["row_bytes"]
    assert facts["more_rows_fit"] > 1000
    assert facts["ring_fits"] is True
    assert facts["created"] <= facts["last_write"]
    assert facts["open_in"] is None
    assert facts["unclean_stop"] is False
    assert facts["meta"] == {"by": "a test"}


def test_info_for_people(cli: Cli, store: Path) -> None:
    done = cli("info", store)
    assert done.code == 0
    for words in (
        "25 (capacity 100), 25 written in total", "0 open, 2 terminated, 0 truncated, 1 cut", "closed",
        "next.reward", "free: enough for the whole capacity",
    ):  # fmt: skip
        assert words in done.out


def test_info_says_for_how_many_rows_there_is_room(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of it takes 10 kB and 36 bytes of the store's own."""
    for name, capacity in (("ring", 1000), ("endless", None)):
        with expstore.open(tmp_path / name, capacity=capacity, layout="flat") as rb:
            rb.extend(TensorDict({"noise": torch.rand(100, 2500)}, [100]))
    monkeypatch.setattr(Disk, "free", lambda disk, path: 1_000_000)
    ring, endless = cli("info", tmp_path / "ring", tmp_path / "endless", "--json").json["stores"]
    for facts in (ring, endless):
        assert facts["more_rows_fit"] == 99
        assert facts["fields"][0]["million_rows_bytes"] == 10_000_000_000
        assert facts["million_rows_bytes"] == pytest.approx(10_036_000_000, rel=1e-3)
    assert (ring["ring_fits"], endless["ring_fits"]) == (False, None)
    done = cli("info", tmp_path / "ring", tmp_path / "endless")
    assert "1 MB free: room for 99 more rows, not for the whole capacity\n" in done.out
    assert "1 MB free: room for 99 more rows\n" in done.out
    monkeypatch.setattr(Disk, "free", lambda disk, path: 90_000_000)  # 4096 spare slots, too
    assert "90 MB free: enough for the whole capacity" in cli("info", tmp_path / "ring").out


def test_info_counts_as_the_store_does(cli: Cli, store: Path) -> None:
    with expstore.open(store) as rb:
        rb.extend(rows(90, start=1000), source="a")
        rb.extend(rows(2, start=2000), source="b")
        rb.add(rows(1, start=2002)[0], source="b")
        held, written = len(rb), rb.write_count
        rb.episodes.end()  # as the close does
        rb.flush()  # other processes see rows of small batches 0.1 s later without it
        episodes = dict(rb.sql("SELECT status, count(*) FROM episodes GROUP BY 1").fetchall())
        (running,) = cli("info", store, "--json").json["stores"]
    (closed,) = cli("info", store, "--json").json["stores"]
    for facts in (running, closed):
        assert (facts["rows"], facts["written"]) == (held, written) == (100, 118)
        assert {name: count for name, count in facts["episodes"].items() if count} == episodes
    assert running["open_in"]["pid"] == os.getpid()
    assert running["unclean_stop"] is None
    assert closed["unclean_stop"] is False


def test_info_without_rows(cli: Cli, store: Path, tmp_path: Path) -> None:
    with expstore.open(store) as rb:
        rb.empty()
    expstore.open(tmp_path / "new.exp").close()
    emptied, new = cli("info", store, tmp_path / "new.exp", "--json").json["stores"]
    assert (emptied["rows"], emptied["written"]) == (0, 25)
    assert (new["rows"], new["capacity"], new["fields"], new["last_write"]) == (0, None, [], None)
    done = cli("info", tmp_path / "new.exp")
    assert (done.code, done.err) == (0, "")
    assert "never" in done.out


def test_info_changes_nothing_after_a_kill(cli: Cli, left_open: Path) -> None:
    before = contents(left_open)
    (facts,) = cli("info", left_open, "--json").json["stores"]
    assert facts["unclean_stop"] is True
    assert facts["open_in"] is None
    assert facts["rows"] == 30
    assert contents(left_open) == before
    done = cli("sql", left_open, COUNT, "--json")
    assert done.json == [{"n": 30}]
    assert done.err.startswith("note: ")
    assert "did not close" in done.err
    assert contents(left_open) == before


def test_info_of_several_shows_the_good_ones(cli: Cli, store: Path, tmp_path: Path) -> None:
    done = cli("info", tmp_path / "none", store)
    assert done.code == 2
    assert "25 (capacity 100)" in done.out
    assert is_one_error(done, "none")
    done = cli("info", tmp_path / "none", store, "--json")
    assert done.code == 2
    assert done.json["error"]["kind"] == done.json["stores"][0]["error"]["kind"] == "not_found"
    assert done.json["stores"][1]["rows"] == 25


def test_a_writer_may_work_while_it_is_looked_at(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows_in_memory(monkeypatch)
    with expstore.open(store) as rb:
        for number in range(20):
            rb.extend(rows(10, start=10 * number), source="a")
            found = survey(store)
            assert found.written == rb.write_count
            assert found.writer is not None


# -- sql -------------------------------------------------------------------------------------------


def test_bad_sql_exits_2(cli: Cli, store: Path) -> None:
    for query, *words in (
        ("SELEC 1", "SELEC"), ("SELECT nope FROM episodes", "nope"),
        ("SELECT * FROM nope", "nope", "transitions"), ("SELECT 1; SELECT 2", "2 statements"),
        ("DROP TABLE episode_rows", "DROP"), ("", "0 statements"),
    ):  # fmt: skip
        done = cli("sql", store, query)
        assert done.code == 2
        assert is_one_error(done, *words)
        done = cli("sql", store, query, "--json")
        assert (done.code, done.err, sorted(done.json["error"])) == (2, "", ["hint", "kind", "message"])
        assert done.json["error"]["kind"] == "query"


def test_a_result_is_printed_as_a_table(cli: Cli, store: Path) -> None:
    done = cli(
        "sql", store, 'SELECT episode_id AS e, status, "return" AS r, end_time FROM episodes ORDER BY 1'
    )
    assert done.code == 0
    lines = [line.split() for line in done.out.splitlines()]
    assert lines[0] == ["e", "status", "r", "end_time"]
    assert lines[1][:3] == ["1", "terminated", "11.25"]
    assert lines[3][:3] == ["3", "cut", "27.5"]


def test_a_table_shortens_what_is_wide(cli: Cli, wide: Path) -> None:
    done = cli("sql", wide, "SELECT *, repeat('x', 999) FROM transitions")
    assert done.code == 0
    assert len(done.out.splitlines()) == 51
    assert max(map(len, done.out.splitlines())) < 500
    assert "... 24]" in done.out
    assert "--limit" in done.err


def test_a_table_has_no_control_characters(cli: Cli, store: Path) -> None:
    query = "SELECT concat('a', chr(27), '[31m', chr(13), chr(7), 'b') AS text, [chr(155), chr(27)] AS texts"
    done = cli("sql", store, query)
    assert done.out.splitlines()[-1].split() == ["a\ufffd[31m", "\ufffdb", "[\ufffd,", "\ufffd]"]


def test_dates_that_python_cannot_represent_are_an_error(cli: Cli, store: Path) -> None:
    for date in ("'infinity'::TIMESTAMP", "'44-03-15 (BC)'::DATE"):
        for form in ((), ("--csv",), ("--json",)):
            done = cli("sql", store, f"SELECT {date} AS date", *form)
            assert done.code == 2
            assert "cast dates to VARCHAR" in done.out + done.err
            if form == ("--json",):
                assert done.json["error"]["kind"] == "query"


def test_a_terminal_gets_what_fits(cli: Cli, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    done = cli("sql", store, "SELECT 1 AS a, NULL AS b, '[x]' AS c, repeat('x', 30) AS d")
    assert done.code == 0
    assert "NULL" in done.out
    assert "[x]" in done.out
    assert "too narrow for d" in done.err


def test_the_limit(cli: Cli, store: Path) -> None:
    ids = "SELECT _id FROM transitions ORDER BY _id"
    for query, expected in (
        (f"{ids} DESC", [25, 24, 23]),
        (f"{ids} LIMIT 2;", [1, 2]),
        (f"{ids} DESC LIMIT 20 -- the newest", [25, 24, 23]),
        (f"{ids} OFFSET 20;", [21, 22, 23]),
        ("VALUES (1), (2), (3), (4)", [1, 2, 3]),
    ):
        done = cli("sql", store, query, "--limit", 3, "--json")
        assert [next(iter(row.values())) for row in done.json] == expected, query


def test_a_result_is_printed_as_csv(cli: Cli, store: Path) -> None:
    query = "SELECT _id, next.reward, observation, 'a,\"b\"\n' AS t, '' AS e, NULL AS n FROM transitions"
    done = cli("sql", store, query, "--csv")
    assert done.out.splitlines()[0] == "_id,reward,observation,t,e,n"
    assert '"",\n' in done.out  # an empty text is not NULL
    many = cli("sql", store, "SELECT * FROM range(10001)", "--csv").out  # they are converted in batches
    assert many.splitlines() == ["range", *map(str, range(10_001))]
    _, *read = csv.reader(io.StringIO(done.out))
    assert len(read) == 25
    for number, row in enumerate(read):
        expected = [number + 1, number / 4, [number + k for k in range(5)]]
        assert [int(row[0]), float(row[1]), json.loads(row[2])] == expected
        assert row[3:] == ['a,"b"\n', "", ""]


def test_json_rows(cli: Cli, store: Path) -> None:
    query = (
        "SELECT 1 AS a, 2 AS a, NULL AS n, 'NaN'::DOUBLE AS x, '-inf'::DOUBLE AS y, DATE '2026-01-02' AS d"
    )
    assert cli("sql", store, query, "--json").json == [
        {"a": 1, "a_": 2, "n": None, "x": None, "y": None, "d": "2026-01-02"}
    ]
    assert cli("sql", store, "SELECT 1 WHERE false", "--json").json == []
    (row,) = cli("sql", store, "SELECT observation, next FROM transitions LIMIT 1", "--json").json
    assert row["observation"] == [0, 1, 2, 3, 4]
    assert row["next"] == {"reward": 0, "terminated": False, "truncated": False}


def test_a_result_is_written_as_parquet(cli: Cli, store: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    query = "SELECT _id, observation, next.reward AS r FROM transitions ORDER BY _id"
    done = cli("sql", store, query, "--parquet", file)
    assert done.out == f"25 rows written to {file}\n"
    table = pq.read_table(file)
    with expstore.open(store) as rb:
        assert table.to_pylist() == rb.sql(query).arrow().to_pylist()
    done = cli("sql", store, query, "--parquet", file, "--limit", 4, "--json")
    assert done.json == {"file": str(file), "rows": 4, "columns": ["_id", "observation", "r"]}
    assert pq.read_table(file).num_rows == 4


def test_a_file_that_cannot_be_written(cli: Cli, store: Path, tmp_path: Path) -> None:
    done = cli("sql", store, "SELECT 1", "--parquet", tmp_path / "no" / "x")
    assert done.code == 1
    assert is_one_error(done, "cannot write")


def test_several_stores(cli: Cli, store: Path, wide: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.exp"
    expstore.open(new).close()
    done = cli("sql", store, wide, new, COUNT, "--json")
    names = map(str, (store, wide, new))
    assert done.json == [{"store": name, "n": n} for name, n in zip(names, (25, 60, 0), strict=True)]
    query = "SELECT _id, next.reward FROM transitions WHERE _id > 24"
    done = cli("sql", wide, store, query, "--limit", 37, "--csv")
    read = list(csv.reader(io.StringIO(done.out)))
    assert [row[0] for row in read] == ["store", *[str(wide)] * 36, str(store)]
    assert [int(row[1]) for row in read[1:]] == [*range(25, 61), 25]
    done = cli("sql", store, store, "SELECT _id FROM transitions WHERE _id = 0")
    assert (done.code, done.out.split()) == (0, ["store", "_id"])


def test_stores_that_differ(cli: Cli, store: Path, wide: Path) -> None:
    for query, *words in (
        ("SELECT * FROM transitions", "run.exp", "wide.exp", "frame"),
        ("SELECT frame FROM transitions", "run.exp: ", "frame"),
    ):
        done = cli("sql", store, wide, query)
        assert done.code == 2
        assert is_one_error(done, *words)


@pytest.mark.slow
def test_ctrl_c_ends_a_long_query(store: Path) -> None:
    query = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(1000000) b"
    command = [sys.executable, "-m", "expstore", "sql", str(store), query]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            while not _may_ask(process.pid):
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert process.wait() in (-signal.SIGINT, 130)
        finally:
            process.kill()


def _may_ask(pid: int) -> bool:
    """Return whether a process has opened its store for a query, or has confined itself, which comes next."""
    try:
        return "_row/priority/c/0" in Path(f"/proc/{pid}/maps").read_text()
    except PermissionError:
        return True


def test_ctrl_c_ends_a_query_whichever_thread_receives_it() -> None:
    code = """
import signal, sys, threading, time
from expstore.cli import query

def place():
    frame = sys._current_frames()[threading.main_thread().ident]
    return frame.f_code.co_name, frame.f_lasti

def ask():
    found, looks = None, 0
    while looks < 1000:  # until the main thread stands still, in a wait
        time.sleep(0)
        found, looks = place(), looks + 1 if place() == found and found[0] == "wait" else 0
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    threading.Event().wait(300)

query._ask_in_thread(ask)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == -signal.SIGINT


# -- time ------------------------------------------------------------------------------------------


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "arguments", [("info",), ("sql", "SELECT count(*), avg(next.reward) FROM transitions")]
)
def test_a_million_rows(million: Path, arguments: tuple[str, ...]) -> None:
    command, *others = arguments
    took = []
    while not took or (len(took) < 3 and min(took) > BOUND):
        began = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = apart(command, million, *others)
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        took.append(ended.ru_utime - began.ru_utime + ended.ru_stime - began.ru_stime)
        assert (done.code, "error" in done.err) == (0, False)
    assert min(took) < BOUND


LIGHT = """
import sys
from expstore.cli.app import run

store, folder = sys.argv[1:]

def do(*words):
    assert run(list(words)) == 0, words

do("info", store)
assert not {"duckdb", "pyarrow"} & set(sys.modules)
do("datasets", "list", "d4rl", "--root", folder)
do("sql", store, "SELECT * FROM transitions")
do("episode", store, "2", "--png", folder + "/a.png")
do("resize", store, "--capacity", "99")
do("merge", store, "--out", folder + "/merged.exp")
do("versions", "create", store, folder + "/versions")
do("versions", "restore", store, folder + "/versions")
heavy = {"torch", "tensordict", "gymnasium", "zarr", "matplotlib.pyplot"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.slow
def test_only_collect_loads_torch(store: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, store, tmp_path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# -- collect ---------------------------------------------------------------------------------------


class Alarm(gymnasium.Env[Any, Any]):
    """Presses Ctrl-C `times` times at step 100."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, times: int = 1) -> None:
        self.steps, self.times = 0, times

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 100:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)
        return np.zeros(2, np.float32), 1.0, self.steps % 20 == 0, False, {}


@pytest.fixture(scope="module", autouse=True)
def alarms() -> Iterator[None]:
    for times in (1, 2):
        gymnasium.register(f"Alarm{times}-v0", Alarm, kwargs={"times": times}, disable_env_checker=True)
    yield
    for times in (1, 2):
        gymnasium.registry.pop(f"Alarm{times}-v0")


def test_collect_continues_an_existing_store(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    command = ("collect", "CartPole-v1", path, "--envs", 4, "--seed", 7)
    done = cli(*command, "--steps", 300, "--capacity", 1000)
    assert done.code == 0
    assert f"note: created a new store: {path}" in done.err.splitlines()
    first = survey(path)
    assert 300 <= first.rows < 304
    assert f"{first.rows} transitions stored" in done.out
    done = cli(*command, "--steps", 200, "--json", "--autoreset", "same-step")
    second = survey(path)
    stored = second.rows - first.rows
    assert done.json == {"path": str(path), "stored": stored, "rows": second.rows, "interrupted": False}
    assert "note: created" not in done.err
    assert 200 <= second.rows - first.rows < 204
    # The same seed does not store the same episodes again.
    query = "SELECT count(DISTINCT observation) = count(*) AS distinct FROM transitions WHERE _step = 0"
    assert cli("sql", path, query, "--json").json == [{"distinct": True}]


POLICY = """
import numpy as np

def push_right(observation):
    return np.ones(len(observation), np.int64)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_collect_takes_a_policy_and_workers(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """The policy is a function of a module in the working directory."""
    (tmp_path / f"policy_{workers}.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    policy = ("--policy", f"policy_{workers}:push_right", "--workers", workers)
    options = ("--steps", 100, "--envs", 2, "--seed", 1)
    done = cli("collect", "CartPole-v1", "run.exp", *options, *policy, "--json")
    assert done.code == 0
    assert done.json["stored"] >= 100
    query = "SELECT DISTINCT action FROM transitions"
    assert cli("sql", "run.exp", query, "--json").json == [{"action": 1}]
    query = "SELECT count(DISTINCT source) AS sources FROM episodes"
    (found,) = cli("sql", "run.exp", query, "--json").json
    assert found["sources"] in ((2, 4) if workers else (2,))  # one worker may be quicker than the other


def test_collect_makes_the_layout_that_is_asked_for(cli: Cli, tmp_path: Path) -> None:
    """Rows of CartPole are narrow: without an option none of their fields is packed."""
    command = ("--steps", 50, "--envs", 2, "--seed", 0)
    for name, *asked in (("auto",), ("packed", "--layout", "packed")):
        assert cli("collect", "CartPole-v1", tmp_path / name, *command, *asked).code == 0
    auto, packed = cli("info", tmp_path / "auto", tmp_path / "packed", "--json").json["stores"]
    assert {field["layout"] for field in auto["fields"]} == {"flat"}
    assert {field["layout"] for field in packed["fields"]} == {"packed"}
    done = cli("collect", "CartPole-v1", tmp_path / "packed", *command, "--layout", "flat")
    assert (done.code, "layout" in done.err) == (2, True)
    assert cli("collect", "CartPole-v1", tmp_path / "packed", *command).code == 0


def test_the_seed_decides(cli: Cli, tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        path = tmp_path / name
        assert cli("collect", "CartPole-v1", path, "--steps", 100, "--envs", 2, "--seed", 7).code == 0
        found.append(cli("sql", path, "SELECT action, observation, next FROM transitions", "--json").json)
    assert found[0] == found[1]


def test_ctrl_c_keeps_what_was_collected(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    done = cli("collect", "Alarm1-v0", path, "--steps", 10_000, "--envs", 1)
    found = survey(path)
    assert done.code == 130
    assert found.rows >= 100
    assert found.unclean is False
    assert f"stopped: {found.rows} transitions stored" in done.out
    done = cli("collect", "Alarm1-v0", path, "--steps", 10_000, "--envs", 1, "--json")
    assert done.code == 130
    assert done.json["interrupted"] is True
    assert done.json["rows"] == survey(path).rows == done.json["stored"] + found.rows


def test_a_second_ctrl_c_does_not_wait(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.exp"
    assert cli("collect", "Alarm2-v0", path, "--steps", 10_000, "--envs", 1).code == 130
    found = survey(path)
    assert found.rows == 99  # the step that was interrupted is not known to have happened
    assert found.unclean is False


def test_ctrl_c_does_not_end_a_collection_that_ignores_it(cli: Cli, tmp_path: Path) -> None:
    """A shell lets programs ignore Ctrl-C that it starts in the background."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert cli("collect", "Alarm1-v0", tmp_path / "run.exp", "--steps", 200, "--envs", 1).code == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, former)
    assert survey(tmp_path / "run.exp").rows >= 200


def test_an_unknown_environment_makes_no_store(cli: Cli, tmp_path: Path) -> None:
    done = cli("collect", "Nowhere-v0", tmp_path / "run.exp", "--steps", 9)
    assert done.code == 2
    assert is_one_error(done, "Nowhere")
    assert not (tmp_path / "run.exp").exists()


def test_without_gymnasium_it_says_what_to_install(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "expstore.collectors.environments", raising=False)
    done = cli("collect", "CartPole-v1", tmp_path / "run.exp", "--steps", 9)
    assert done.code == 2
    assert is_one_error(done, "expstore[gym]")
    assert not (tmp_path / "run.exp").exists()


def test_settings_and_fields_that_contradict_the_store(cli: Cli, store: Path) -> None:
    done = cli("collect", "CartPole-v1", store, "--steps", 9, "--capacity", 7)
    assert done.code == 2
    assert is_one_error(done, "capacity=100", "capacity=7")
    done = cli("collect", "CartPole-v1", store, "--steps", 9, "--json")
    assert (done.code, done.json["error"]["kind"]) == (2, "schema")
    assert survey(store).rows == 25


def test_a_query_without_quotes(cli: Cli, store: Path) -> None:
    done = cli("sql", store, "SELECT", "1")
    assert done.code == 2
    assert is_one_error(done, "put the query in quotes; expstore sql STORE")


def test_a_dry_run_of_retain_says_what_would_remain(cli: Cli, tmp_path: Path) -> None:
    store = tmp_path / "run.exp"
    with expstore.open(store) as rb:
        rb.extend(rows(25))
    words = ("retain", store, "--where", "episode.length > 5", "--json")
    dry = cli(*words, "--dry-run").json
    done = cli(*words).json
    assert dry["rows_left"] == done["rows_left"] == survey(store).rows == 20


def test_a_dry_run_refuses_what_the_command_refuses(cli: Cli, store: Path) -> None:
    """The fixture's store has a capacity."""
    words = ("retain", store, "--where", "episode.length > 5")
    for more in ((), ("--dry-run",)):
        done = cli(*words, *more)
        assert done.code == 2
        assert is_one_error(done, "has a capacity: its rows are evicted by age, not deleted")


def test_consumers(cli: Cli, store: Path) -> None:
    assert cli("consumers", store).out.endswith("has no consumers\n")
    with expstore.open(store, batch_size=4) as rb, rb.consumer("learner") as learner:
        learner.sample()
        learner.commit()
        learner.sample()
        found = cli("consumers", store)
        assert found.code == 0
        assert found.out.splitlines()[-1].split() == ["learner", "2", "1", "0", "330", "bytes", "yes"]
    (known,) = cli("consumers", store, "--json").json["consumers"]
    assert (known["draws"], known["committed"], known["is_open"]) == (2, 1, False)
    with (
        expstore.open(store, batch_size=4) as rb,
        rb.consumer("learner", sampler="consuming", lease_rows=9) as learner,
    ):
        for _ in range(4):
            learner.sample()
    (known,) = cli("consumers", store, "--json").json["consumers"]
    assert known["leased"] == 8
    (store / "consumers" / "learner" / "consumer.json").write_text("{")
    found = cli("consumers", store)
    assert found.code == 0
    assert "learner is damaged: " in found.out
    assert cli("consumers", store.parent).code == 2
