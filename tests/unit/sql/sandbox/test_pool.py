"""Untrusted SQL: what is answered, what is refused, and how attacks end."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest

import expstore
from expstore.errors import ExpStoreError, NotFoundError, NotReadyError, QueryError, StateError
from expstore.sql.sandbox import child as sandbox_child
from expstore.sql.sandbox import confine, pipes
from expstore.sql.sandbox.pool import Answer, SqlLimits, SqlWorker
from tests.support.hostile_sql import ARGUMENTS, CONTAINED, REFUSED, SLOW
from tests.support.waits import wait_until

if TYPE_CHECKING:
    from tensordict import TensorDict

pytestmark = pytest.mark.index

CANARY = "canary-7c1f"
ROWS = 600

#: On a busy machine a process gets its turn late, and the kernel takes its time to clear away a large one.
LATE_SECONDS = 20.0

QUERIES = (
    "SELECT count(*) AS n, sum(action) AS a, sum(next.reward) AS r FROM transitions",
    "SELECT * FROM transitions ORDER BY _id LIMIT 7",
    "SELECT * FROM episodes ORDER BY episode_id",
    "SELECT * FROM fragments ORDER BY first_id",
    "SELECT number, name, named FROM sources ORDER BY 1",
    "SELECT * FROM priorities ORDER BY id LIMIT 5",
    "SELECT e.status, count(*) n FROM transitions t JOIN episodes e ON e.episode_id = t._episode GROUP BY 1",
    "SELECT * FROM transitions WHERE false",
    "SELECT observation[1] AS x, [1, 2] AS l, {'a': 'b'} AS s, NULL AS n FROM transitions WHERE _id < 4",
)


@pytest.fixture(scope="module", autouse=True)
def _warm_sql() -> None:
    """The processes start as they do for users."""


def table(answer: Answer) -> pa.Table:
    found = pa.ipc.open_stream(answer.data).read_all()
    found.validate(full=True)
    assert len(found) == answer.rows
    return found


def digest(path: Path) -> str:
    """Hash all that is in a folder, its names and times too."""
    sums = hashlib.blake2b()
    for found in sorted(path.rglob("*")):
        state = found.stat()
        sums.update(f"{found} {state.st_mode} {state.st_size} {state.st_mtime_ns}".encode())
        if found.is_file():
            sums.update(found.read_bytes())
    return sums.hexdigest()


def gone(pid: int) -> bool:
    """Say whether a process has ended; what waits for its parent to ask has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.batches import transitions
    from tests.support.stores import build_store

    path: Path = tmp_path_factory.mktemp("sql") / "run.exp"
    return build_store(path, transitions(ROWS, episode_length=50), seed=0)


@pytest.fixture(scope="module")
def worker(store: Path) -> Iterator[SqlWorker]:
    with SqlWorker(store, limits=SqlLimits(seconds=20.0)) as worker:
        yield worker


@pytest.fixture(scope="module")
def strict(store: Path) -> Iterator[SqlWorker]:
    """A worker that gives nobody much."""
    with SqlWorker(store, limits=SqlLimits(seconds=2.0, memory=256 << 20, bytes=8 << 20)) as worker:
        yield worker


# -- what is answered --------------------------------------------------------------------------------


def test_answers_are_those_of_the_buffer(store: Path, worker: SqlWorker) -> None:
    with expstore.open(store, mode="r") as rb:
        for query in QUERIES:
            answer = worker.query(query)
            assert table(answer).equals(rb.sql(query).arrow()), query
            assert not answer.truncated
            assert answer.ms > 0


def test_parameters(worker: SqlWorker) -> None:
    counted = "SELECT count(*) AS n FROM transitions WHERE "
    for condition, params in (
        ("_step < ?", [10]),
        ("_step < $most", {"most": np.int64(10)}),
        ("_id IN (SELECT unnest(?::BIGINT[]))", [np.arange(1, 121)]),
    ):
        assert table(worker.query(counted + condition, params)).to_pylist() == [{"n": 120}], condition


@pytest.mark.slow
def test_further_rows_are_left_out_and_reported(store: Path) -> None:
    with SqlWorker(store, limits=SqlLimits(rows=100, bytes=4000, seconds=20)) as worker:
        for rows, truncated in ((99, False), (100, False), (101, True), (10**12, True)):
            answer = worker.query(f"SELECT i FROM range({rows}) t(i)")
            assert (answer.rows, answer.truncated) == (min(rows, 100), truncated)
        # In the order that the statement asks for.
        ordered = table(worker.query("SELECT _id FROM transitions ORDER BY _id DESC"))
        assert ordered["_id"].to_pylist() == [*range(ROWS, ROWS - 100, -1)]
        answer = worker.query("SELECT repeat('x', 100 + i::INT) AS x FROM range(90) t(i)")
        texts = table(answer)["x"].to_pylist()
        assert answer.truncated
        assert texts == ["x" * (100 + n) for n in range(len(texts))]
        assert 4000 - 200 < sum(map(len, texts)) + 4 * len(texts) <= 4000
        with pytest.raises(QueryError, match="4000 bytes") as caught:
            worker.query("SELECT repeat('x', 5000)")
        assert caught.value.kind == "too_large"


@pytest.mark.slow
def test_rows_show_as_soon_as_they_are_written(
    store_path: Path, make_batch: Callable[..., TensorDict]
) -> None:
    with expstore.open(store_path, capacity=50, seed=0) as rb:
        rb.extend(make_batch(5))
        with SqlWorker(store_path, limits=SqlLimits(seconds=20), drain=lambda: rb.storage.drain()) as worker:
            query = "SELECT count(*) n, min(_id) low, max(_id) high, sum(next.reward) r FROM transitions"
            for cycle in range(1, 61):  # one row each, then more than the ring holds
                rb.extend(make_batch(1 if cycle < 40 else 7, start=rb.storage.last))
                assert table(worker.query(query)).equals(rb.sql(query).arrow()), cycle
                if cycle % 20 == 0:
                    assert table(worker.query(QUERIES[2])).equals(rb.sql(QUERIES[2]).arrow())
        assert rb.storage.last > 150


@pytest.mark.slow
def test_a_store_without_rows_and_one_that_is_reopened(
    store_path: Path, make_batch: Callable[..., TensorDict]
) -> None:
    with expstore.open(store_path, seed=0):
        pass
    with SqlWorker(store_path, limits=SqlLimits(seconds=20)) as worker:
        assert table(worker.query("SELECT count(*) AS n FROM episodes")).to_pylist() == [{"n": 0}]
        for cycle in range(3):
            with expstore.open(store_path) as rb:
                rb.extend(make_batch(20, episode_length=10))
            found = table(worker.query("SELECT count(*) AS n FROM transitions")).to_pylist()
            assert found == [{"n": 20 * cycle + 20}]


@pytest.mark.slow
def test_packed_images(store_path: Path) -> None:
    import torch
    from tensordict import TensorDict

    number = torch.arange(200)
    frames = (number % 256).to(torch.uint8)[:, None, None].expand(200, 40, 40)
    with expstore.open(store_path, seed=0) as rb:
        rb.extend(TensorDict({"observation": frames, "action": number}, [200]))
        expected = rb.sql("SELECT _id, observation FROM transitions WHERE _id % 50 = 0 ORDER BY 1").arrow()
    limits = SqlLimits(seconds=20, bytes=200_000)
    with SqlWorker(store_path, limits=limits) as worker:
        few = worker.query("SELECT _id, observation FROM transitions WHERE _id % 50 = 0 ORDER BY 1")
        assert table(few).equals(expected)
        many = worker.query("SELECT observation FROM transitions")
        assert many.truncated
        assert 100 < many.rows <= 200_000 // 1600


@pytest.mark.slow
def test_a_version_that_dumps_made(
    store_path: Path, tmp_path: Path, make_batch: Callable[..., TensorDict]
) -> None:
    with expstore.open(store_path, seed=0) as rb:
        rb.extend(make_batch(30))
        rb.dumps(tmp_path / "dumped")
    with SqlWorker(tmp_path / "dumped", limits=SqlLimits(seconds=20)) as worker:
        assert table(worker.query("SELECT count(*) AS n FROM transitions")).to_pylist() == [{"n": 30}]


# -- what is refused ---------------------------------------------------------------------------------


def outcome(worker: SqlWorker, sql: str) -> str:
    """Ask; return the kind of what came, after a look at whether it tells what it should not."""
    try:
        answer = worker.query(sql)
    except QueryError as exc:
        told, kind = str(exc).encode(), exc.kind
    else:
        told, kind = bytes(answer.data), "answered"
    assert CANARY.encode() not in told
    return kind


@pytest.fixture(scope="module")
def ground(store: Path) -> Iterator[dict[str, str]]:
    """What attacks aim at; at the end all is as it was."""
    folder = store.parent
    canary = folder / "canary.csv"
    canary.write_text(f"a,b\n{CANARY},1\n")
    before = digest(folder)
    yield {"canary": str(canary), "store": str(store), "out": str(folder / "out.file")}
    assert digest(folder) == before


def aimed(sql: str, ground: dict[str, str]) -> str:
    return sql.format(**ground) if "{" in sql else sql


@pytest.mark.guarantee("access/sql")
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_harmful_sql_is_refused(strict: SqlWorker, ground: dict[str, str], number: int) -> None:
    assert outcome(strict, aimed(REFUSED[number], ground)) in {"query", "too_long"}
    assert table(strict.query("SELECT 42 AS a")).to_pylist() == [{"a": 42}]


@pytest.mark.guarantee("access/sql")
@pytest.mark.some(25)
@pytest.mark.parametrize("number", range(len(CONTAINED)))
def test_harmful_sql_is_contained(strict: SqlWorker, ground: dict[str, str], number: int) -> None:
    began = time.monotonic()
    kinds = {"query", "too_large", "memory", "timeout", "died", "answered"}
    assert outcome(strict, aimed(CONTAINED[number], ground)) in kinds
    assert time.monotonic() - began < strict.limits.seconds + LATE_SECONDS
    assert table(strict.query("SELECT count(*) AS n FROM transitions")).to_pylist() == [{"n": ROWS}]


@pytest.mark.slow
@pytest.mark.some(1)
@pytest.mark.parametrize("sql", SLOW)
def test_endless_queries_are_ended(strict: SqlWorker, sql: str) -> None:
    began = time.monotonic()
    assert outcome(strict, sql) in {"timeout", "memory"}
    assert time.monotonic() - began < strict.limits.seconds + LATE_SECONDS
    assert table(strict.query("SELECT count(*) AS n FROM transitions")).to_pylist() == [{"n": ROWS}]


@pytest.mark.guarantee(
    "access/sql-limits",
    "Untrusted SQL has a deadline and bounded memory, and the death of its process affects no other request.",
)
@pytest.mark.slow
def test_the_deadline_kills_and_says_so(store: Path) -> None:
    with SqlWorker(store, limits=SqlLimits(seconds=0.5)) as worker:
        before = worker.stats()
        began = time.monotonic()
        with pytest.raises(QueryError, match=r"more than 0\.5 s") as caught:
            worker.query(SLOW[3])
        assert caught.value.kind == "timeout"
        assert 0.5 <= time.monotonic() - began < LATE_SECONDS
        after = worker.stats()
        assert after["killed"] == before["killed"] + 1
        assert [pid for pid in before["pids"] if gone(pid)]


@pytest.mark.guarantee("access/sql-limits")
def test_a_death_is_contained(strict: SqlWorker) -> None:
    before = strict.stats()["died"]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(strict.query, SLOW[3])
        wait_until(lambda: strict._pool._seats.busy)
        for child in list(strict._pool._seats.busy):
            os.kill(child.process.pid, signal.SIGKILL)
        with pytest.raises(QueryError, match="SIGKILL") as caught:
            asked.result()
    assert caught.value.kind == "died"
    assert strict.stats()["died"] == before + 1
    assert table(strict.query("SELECT 1 AS a")).to_pylist() == [{"a": 1}]


@pytest.mark.slow
def test_children_that_died_while_idle_are_replaced(store: Path) -> None:
    with SqlWorker(store, limits=SqlLimits(seconds=20)) as worker:
        wait_until(lambda: len(worker.stats()["pids"]) == 2)
        for child in list(worker._pool._seats.idle):
            os.kill(child.process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOWAIT)
        assert table(worker.query("SELECT 1 AS a")).to_pylist() == [{"a": 1}]
        assert worker.stats()["died"] == 0


def test_bad_requests(worker: SqlWorker) -> None:
    for sql, params, kind in (
        ("SELECT '" + "x" * 16_384 + "'", None, "too_long"),
        ("SELECT ?", ["x" * 16_384], "too_long"),
        ("SELECT ?", [object()], "query"),
        ("SELECT ?", [b"x"], "query"),
        ("SELECT ?", None, "query"),
        ("SELECT 1", [1], "query"),
    ):
        with pytest.raises(QueryError) as caught:
            worker.query(sql, params)
        assert caught.value.kind == kind


def test_parameters_nested_without_end(worker: SqlWorker) -> None:
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(QueryError, match="cannot be sent"):
        worker.query("SELECT ?", nested)


FUNCTIONS = """
SELECT DISTINCT function_name AS name, function_type AS type FROM duckdb_functions() ORDER BY ALL
"""


def calls(worker: SqlWorker, ground: dict[str, str], count: int, seed: int) -> Iterator[str]:
    """Write calls of all functions, or of some, with arguments by chance."""
    rng = np.random.default_rng(seed)
    found = table(worker.query(FUNCTIONS)).to_pylist()
    assert len(found) > 500
    arguments = [aimed(text, ground) for text in ARGUMENTS]
    for cycle in range(count):
        one = found[cycle % len(found) if count > len(found) else rng.integers(len(found))]
        given = ", ".join(rng.choice(arguments, rng.integers(4)))
        name = '"' + one["name"].replace('"', '""') + '"'
        yield f"SELECT {'* FROM ' if one['type'].startswith('table') else ''}{name}({given})"


def fuzz(store: Path, ground: dict[str, str], count: int, seed: int) -> dict[str, int]:
    kinds: dict[str, int] = {}
    with SqlWorker(store, limits=SqlLimits(seconds=1.0, memory=256 << 20, bytes=8 << 20)) as worker:
        for sql in calls(worker, ground, count, seed):
            kind = outcome(worker, sql)
            kinds[kind] = kinds.get(kind, 0) + 1
        assert table(worker.query("SELECT count(*) AS n FROM transitions")).to_pylist() == [{"n": ROWS}]
    return kinds


@pytest.mark.guarantee("access/sql")
@pytest.mark.slow
def test_functions_with_any_arguments(store: Path, ground: dict[str, str]) -> None:
    assert sum(fuzz(store, ground, 300, seed=7).values()) == 300


@pytest.mark.guarantee("access/sql")
@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_all_functions_with_any_arguments(
    store: Path, ground: dict[str, str], long_seed: int, count_cases: Callable[..., None]
) -> None:
    count_cases(7000)
    kinds = fuzz(store, ground, 7000, seed=8 + long_seed)
    assert sum(kinds.values()) == 7000


# -- what it takes -----------------------------------------------------------------------------------


def run(code: str, *arguments: str) -> dict[str, Any]:
    """Run code in an interpreter of its own and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


BOMBS = """
import json, resource, sys
from expstore.errors import QueryError
from expstore.sql.sandbox.pool import SqlLimits, SqlWorker
kinds = []
with SqlWorker(sys.argv[1], limits=SqlLimits(seconds=4.0, memory=256 << 20)) as worker:
    for sql in json.loads(sys.argv[2]):
        try:
            worker.query(sql)
            kinds.append("answered")
        except QueryError as exc:
            kinds.append(exc.kind)
peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
loaded = [name for name in ("torch", "duckdb") if name in sys.modules]
print(json.dumps({"kinds": kinds, "peak": peak, "loaded": loaded}))
"""


@pytest.mark.guarantee("access/sql-limits")
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux bounds what a process keeps in memory")
def test_memory_is_bounded(store: Path) -> None:
    bombs = [
        "SELECT lpad('x', 2000000000, 'y')",
        "SELECT len(range(1000000000))",
        "SELECT repeat('a', 2000000000)",
        "SELECT repeat('a', 100000000) FROM range(100)",
        "SELECT array_agg(i) FROM range(1000000000) t(i)",
        "SELECT i, random() FROM range(1000000000) t(i) ORDER BY 2",
    ]
    found = run(BOMBS, str(store), json.dumps(bombs))
    assert "answered" not in found["kinds"]
    # What a child has before the first query is some 150 MB.
    assert found["peak"] < (256 + 250) * 1024
    assert found["loaded"] == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_child_has_neither_torch_nor_an_environment(worker: SqlWorker) -> None:
    for pid in worker.stats()["pids"]:
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "duckdb" in maps
        assert "torch" not in maps.replace(sys.prefix, "")
        assert "pandas" not in maps
        names = {entry.split(b"=")[0] for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}
        assert b"PATH" not in names
        assert b"HOME" not in names
        status = Path(f"/proc/{pid}/status").read_text()
        assert "NoNewPrivs:\t1" in status
        limits = Path(f"/proc/{pid}/limits").read_text()
        for name in ("Max file size", "Max processes", "Max core file size"):
            line = next(line for line in limits.splitlines() if line.startswith(name))
            assert line.removeprefix(name).split()[:2] == ["0", "0"]


CONFINED = """
import json, os, pathlib, socket, subprocess, sys
from expstore.sql.sandbox.confine import restrict
inside, outside, parent = map(pathlib.Path, sys.argv[1:4])
said = restrict([inside, pathlib.Path("/proc")])
def works(act):
    try:
        act()
    except OSError as exc:
        return exc.errno
    return "done"
print(json.dumps({
    "said": said,
    "inside": works((inside / "expstore.json").read_bytes),
    "list": works(lambda: os.listdir(inside)),
    "outside": works(outside.read_bytes),
    "made": works(lambda: (inside / "new").touch()),
    "written": works(lambda: (inside / "LOCK").open("r+b")),
    "removed": works((inside / "LOCK").unlink),
    "above": works(lambda: os.listdir(inside.parent)),
    "environ": works((parent / "environ").read_bytes),
    "program": works(lambda: os.execv(sys.executable, [sys.executable, "-c", "print(1)"])),
    "tcp": works(lambda: socket.create_connection(("127.0.0.1", 9), 1)),
    "signal": works(lambda: os.kill(int(parent.name), 0)),
}))
"""


@pytest.mark.guarantee(
    "access/sql",
    "Untrusted SQL can read this store and nothing else: no file, network or process; if the system "
    "cannot enforce that, the server says so.",
)
@pytest.mark.skipif(
    sys.platform != "linux" or int(os.uname().release.split(".")[0]) < 6, reason="Landlock is Linux's"
)
def test_files_network_and_processes_are_out_of_reach(store: Path, ground: dict[str, str]) -> None:
    found = run(CONFINED, str(store), ground["canary"], f"/proc/{os.getpid()}")
    if not found["said"].startswith("landlock"):
        pytest.skip(found["said"])
    denied = {"outside", "made", "written", "removed", "above", "environ", "program"}
    version = int(found["said"].split()[1])
    denied |= {"tcp"} if version >= 4 else set()
    denied |= {"signal"} if version >= 6 else set()
    assert {name: found[name] for name in denied if found[name] not in {1, 13}} == {}
    assert (found["inside"], found["list"]) == ("done", "done")


def test_whether_files_are_protected_is_reported(worker: SqlWorker) -> None:
    said = worker.stats()["confined"]
    assert said.startswith(("landlock ", "no landlock: "))
    assert "threads" not in said


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_loops_for_groups_are_loaded_before_the_process_is_restricted(tmp_path: Path) -> None:
    """Afterwards numba finds no cache that it could use, and compiles them for ten seconds."""
    ends = np.ones(2, bool)
    path = tmp_path / "groups.exp"
    with expstore.open(path, episodes={"group": "group", "traj": "traj"}) as rb:
        rb.extend({"group": np.full(2, 5), "traj": np.arange(2), "next": {"terminated": ends, "done": ends}})
    with SqlWorker(path) as worker:
        worker.query("SELECT 1")
        child = worker._pool._seats.idle[0]
        assert "llvmlite" in Path(f"/proc/{child.process.pid}/maps").read_text()
        assert table(worker.query("SELECT group_id FROM groups"))["group_id"].to_pylist() == [1]
        assert "threads" not in worker.stats()["confined"]


@pytest.mark.guarantee("access/sql")
def test_missing_landlock_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "_prctl", lambda option, value: None)
    monkeypatch.setattr(confine, "_CREATE", 100_000)
    assert confine.restrict([]).startswith("no landlock: Function not implemented")


# -- processes and threads ---------------------------------------------------------------------------

LONELY = """
import sys, threading, time
from expstore.sql.sandbox.pool import SqlLimits, SqlWorker
worker = SqlWorker(sys.argv[1], limits=SqlLimits(seconds=1000.0))
while len(worker.stats()["pids"]) < 2:
    time.sleep(0.01)
threading.Thread(target=worker.query, args=(sys.argv[2],), daemon=True).start()
while not worker._pool._seats.busy:
    time.sleep(0.01)
print(*worker.stats()["pids"], flush=True)
time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children with their parent")
def test_children_end_with_their_parent(store: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LONELY, str(store), SLOW[3]], stdout=subprocess.PIPE
    ) as parent:
        try:
            assert parent.stdout is not None
            pids = [int(word) for word in parent.stdout.readline().split()]
            assert len(pids) >= 2
            assert not any(map(gone, pids))
        finally:
            parent.kill()
            parent.wait()
    for pid in pids:
        wait_until(lambda pid=pid: gone(pid))


def test_children_outlive_the_thread_that_asked(store: Path) -> None:
    made: list[SqlWorker] = []
    maker = threading.Thread(target=lambda: made.append(SqlWorker(store, limits=SqlLimits(seconds=20))))
    maker.start()
    maker.join()
    with made[0] as worker:
        asker = threading.Thread(target=worker.query, args=("SELECT 1",))
        asker.start()
        asker.join()
        pids = set(worker.stats()["pids"])
        worker.query("SELECT 1")
        assert pids <= set(worker.stats()["pids"])
        assert not any(map(gone, pids))


def test_nothing_is_left_behind(store: Path) -> None:
    worker = SqlWorker(store)
    pids = worker.stats()["pids"]
    worker.close()
    worker.close()
    assert worker.stats()["pids"] == []
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(StateError, match="closed"):
        worker.query("SELECT 1")


def test_one_that_is_forgotten_closes(store: Path) -> None:
    worker = SqlWorker(store)
    pids = worker.stats()["pids"]
    del worker
    assert pids
    assert all(map(gone, pids))


def test_closing_ends_a_query(store: Path) -> None:
    worker = SqlWorker(store, limits=SqlLimits(seconds=100))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(worker.query, SLOW[3])
        wait_until(lambda: worker._pool._seats.busy)
        worker.close()
        with pytest.raises(StateError, match="closed"):
            asked.result()


@pytest.mark.slow
def test_many_threads(store: Path) -> None:
    with SqlWorker(store, limits=SqlLimits(seconds=30, wait=60)) as worker, ThreadPoolExecutor(8) as pool:

        def ask(number: int) -> int:
            if number % 17 == 0:
                with pytest.raises(QueryError):
                    worker.query("SELECT len(range(1000000000))")
            return int(table(worker.query("SELECT ? AS n", [number]))["n"][0].as_py())

        assert list(pool.map(ask, range(120))) == [*range(120)]
        assert len(worker.stats()["pids"]) <= worker.limits.at_once + 1


@pytest.mark.slow
def test_waiting_too_long_raises(store: Path) -> None:
    limits = SqlLimits(seconds=100, at_once=1, wait=0.05)
    with SqlWorker(store, limits=limits) as worker, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(worker.query, SLOW[3])
        wait_until(lambda: worker._pool._seats.busy)
        with pytest.raises(NotReadyError, match="try again") as caught:
            worker.query("SELECT 1")
        assert caught.value.kind == "busy"
        for child in list(worker._pool._seats.busy):
            child.process.kill()
        assert isinstance(asked.exception(), QueryError)
        worker.query("SELECT 1")


def test_a_fork_may_not_ask(worker: SqlWorker) -> None:
    pid = os.fork()
    if not pid:
        code = 1
        try:
            worker.query("SELECT 1")
        except StateError:
            worker.close()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert worker.query("SELECT 1").rows == 1


# -- bad beginnings ----------------------------------------------------------------------------------


def test_there_must_be_a_store(tmp_path: Path) -> None:
    threads = threading.active_count()
    with pytest.raises(NotFoundError):
        SqlWorker(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ExpStoreError):
        SqlWorker(tmp_path / "empty")
    assert threading.active_count() == threads


@pytest.mark.slow
def test_a_store_that_goes_and_comes_back(store_path: Path, make_batch: Callable[..., TensorDict]) -> None:
    def make(rows: int) -> None:
        with expstore.open(store_path, seed=0) as rb:
            rb.extend(make_batch(rows))

    make(10)
    with SqlWorker(store_path, limits=SqlLimits(seconds=20)) as worker:
        assert table(worker.query("SELECT count(*) AS n FROM transitions"))["n"].to_pylist() == [10]
        store_path.rename(store_path.with_name("elsewhere"))
        for _ in range(5):
            with pytest.raises(ExpStoreError):
                worker.query("SELECT count(*) AS n FROM transitions")
        make(20)

        def answers() -> bool:
            try:
                found = table(worker.query("SELECT count(*) AS n FROM transitions"))["n"].to_pylist()
            except ExpStoreError:
                return False
            assert found == [20]
            return True

        wait_until(answers)


def test_bad_limits() -> None:
    for name, value in {
        "seconds": 0,
        "rows": 0,
        "bytes": -1,
        "memory": 1000,
        "at_once": 0,
        "text": 0,
    }.items():
        with pytest.raises(ValueError, match=name):
            SqlLimits(**{name: value})


def test_foreign_messages_are_refused() -> None:
    import socket

    for sent in (b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{", b"\x02\0\0\0\x09\0\0\0{}"):
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                theirs.sendall(sent)
            with pytest.raises(pipes.PipeError):
                pipes.receive(ours, most=8)


def test_rows_are_taken_in_small_steps() -> None:
    assert sandbox_child._step(["BIGINT"]) == 2048
    assert sandbox_child._step(["UTINYINT[84][84]", "VARCHAR"]) == (4 << 20) // (84 * 84 * 8 + 8)
    assert sandbox_child._step(["FLOAT[100000000]"]) == 1


OUTSIDE = """
import sys
from pathlib import Path
from expstore.sql.sandbox.pool import SqlLimits, SqlWorker
with SqlWorker(Path(sys.argv[1]), limits=SqlLimits(seconds=60)) as worker:
    answer = worker.query("SELECT * FROM transitions")
    print(answer.rows, worker.stats()["confined"])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.prefix == sys.base_prefix, reason="packages lie in the interpreter's own folder")
def test_packages_may_lie_outside_the_interpreters_folders(store: Path) -> None:
    """As with a .pth, PYTHONPATH or --system-site-packages: sysconfig names other folders."""
    python = getattr(sys, "_base_executable", sys.executable)
    folders = [
        str(Path(expstore.__file__).parents[1]),
        *(entry for entry in sys.path if "-packages" in entry),
    ]
    found = subprocess.run(
        [python, "-c", OUTSIDE, str(store)],
        env={"PYTHONPATH": os.pathsep.join(folders), "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.split()[0] == str(ROWS)


def test_a_fault_of_the_child_is_not_the_statements() -> None:
    for fault in (PermissionError(13, "x.py"), ModuleNotFoundError("x"), AttributeError("x")):
        told = sandbox_child._as_ours(fault)
        assert isinstance(told, StateError)
        assert told.kind == "sandbox"
    for statement in (ValueError("no such type"), OSError("Out of Memory Error: while Arrow reads")):
        assert isinstance(sandbox_child._as_ours(statement), QueryError)
