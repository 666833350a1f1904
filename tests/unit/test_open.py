"""expstore.open: what becomes of a folder, contradictory arguments, and exclusive access."""

from __future__ import annotations

import gc
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expstore
from expstore.errors import CorruptionError, LockedError, QueryError, SchemaError, SnapshotError, StateError
from expstore.rate_limiters import MinSize
from expstore.schema.schema import Field, Schema
from expstore.storages.format.manifest import MANIFEST
from tests.support import warm_processes
from tests.support.batches import numbered_rows
from tests.support.stores import read_files

pytestmark = [pytest.mark.index, pytest.mark.usefixtures("no_syncs", "no_index_on_close")]


# ---------------------------------------------------------------------------------------------------
# Modes.


def test_a_opens_or_makes(store_path: Path) -> None:
    with expstore.open(store_path, capacity=10) as rb:
        rb.extend(numbered_rows(4, key="a"))
    with expstore.open(str(store_path), mode="a") as rb:
        assert len(rb) == 4
        assert rb.storage.capacity == 10
        assert rb.recovered is None


def test_x_only_makes(store_path: Path) -> None:
    with expstore.open(store_path, mode="x") as rb:
        rb.extend(numbered_rows(4, key="a"))
    before = read_files(store_path, "LOCK")
    with pytest.raises(StateError, match=rf"{store_path} exists already; open it with mode='a', or choose"):
        expstore.open(store_path, mode="x")
    assert read_files(store_path, "LOCK") == before


def test_w_moves_the_old_store(store_path: Path) -> None:
    for number in range(3):
        with expstore.open(store_path, mode="w") as rb:
            assert len(rb) == 0
            rb.extend(numbered_rows(number + 1, key="a"))
    for name, size in (("run.exp", 3), ("run.exp.old-1", 1), ("run.exp.old-2", 2)):
        with expstore.open(store_path.with_name(name)) as rb:
            assert len(rb) == size


def test_w_leaves_a_store_that_is_open_alone(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(4, key="a"))
        with pytest.raises(LockedError, match="this process .* has it open"):
            expstore.open(store_path, mode="w")
        rb.extend(numbered_rows(4, key="a"))
    assert os.listdir(store_path.parent) == ["run.exp"]


def test_meta_may_be_nested_a_hundred_levels_deep(store_path: Path) -> None:
    meta = _nested(99) | {"b": 1}
    with expstore.open(store_path, meta=meta) as rb:
        assert rb.meta == meta


def _nested(levels: int) -> dict[str, Any]:
    meta: dict[str, Any] = {}
    for _ in range(levels - 1):
        meta = {"a": meta}
    return meta


NO_SETTINGS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"mode": "r+"}, ValueError, "mode 'r\\+' is unknown; use 'a', 'x' or 'w'"),
    ({"capacity": 0}, ValueError, "capacity must be at least 1, got 0"),
    ({"capacity": True}, TypeError, "capacity must be a number of rows, got True"),
    (
        {"capacity": 2**40 + 1},
        ValueError,
        "capacity must be at most 2\\^40, got 1099511627777; omit capacity",
    ),
    ({"capacity": 2**80}, ValueError, "capacity must be at most"),
    ({"capacity": math.inf}, TypeError, "capacity must be an integer, got inf"),
    ({"seed": "x"}, TypeError, "integer"),
    ({"meta": {"a": object()}}, SchemaError, "meta has values that JSON cannot store; use"),
    ({"meta": {"a": math.nan}}, SchemaError, "meta"),
    ({"meta": {"\ud800": 1}}, SchemaError, "meta has values that JSON cannot store"),
    ({"meta": _nested(101)}, SchemaError, "meta is nested more than 100 levels deep; store the inner part"),
    ({"meta": _nested(100_000)}, SchemaError, "meta has values that JSON cannot store"),
    ({"batch_size": 0}, ValueError, "batch_size must be at least 1, got 0"),
    ({"batches": {"rate_limiter": "x"}}, StateError, "rate_limiter='x' is a str, not a RateLimiter; give"),
    ({"batches": {"rate_limiter": MinSize}}, StateError, "not a RateLimiter"),
    ({"retain": {"where": "((("}}, QueryError, r"'\(\(\(' is not an SQL expression"),
    ({"retain": {"where": "a > (SELECT 1)"}}, QueryError, "a subquery is not allowed"),
    ({"retain": {"where": "x > 1"}, "schema": {"a": "int64"}}, QueryError, "x"),
]


def test_invalid_settings_are_refused(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(4, key="a"))
    before = read_files(store_path, "LOCK")
    for number, (options, error, message) in enumerate(NO_SETTINGS):
        for path, modes in ((store_path, "aw"), (store_path.with_name("new.exp"), "wa")):
            with pytest.raises(error, match=message):
                expstore.open(path, **{"mode": modes[number % 2], **options})
        assert os.listdir(store_path.parent) == ["run.exp"], f"{options} touched the disk"
        assert read_files(store_path, "LOCK") == before, options
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(1, key="a"))  # nobody holds it


def test_a_retain_condition_is_checked_against_the_fields_that_are_there(store_path: Path) -> None:
    with expstore.open(store_path, retain={"where": "a > 1"}) as rb:  # fields are not known yet
        rb.extend(numbered_rows(4, key="a"))
    before = read_files(store_path, "LOCK")
    with pytest.raises(QueryError, match="nothing"):
        expstore.open(store_path, retain={"where": "nothing > 1"})
    assert read_files(store_path, "LOCK") == before
    with expstore.open(store_path, retain={"where": "a > 2"}) as rb:
        assert rb.retention.policy == expstore.Retain(where="a > 2")


@pytest.mark.parametrize("given", [b"run.exp", 3, None])
def test_a_path_that_is_not_text_is_refused(store_path: Path, given: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(store_path.parent)
    with pytest.raises(StateError, match="pass a str or a pathlib.Path") as caught:
        expstore.open(given)
    assert caught.value.kind == "path"
    assert os.listdir() == []


def test_numbers_of_numpy_are_numbers(store_path: Path) -> None:
    for _ in range(2):
        with expstore.open(store_path, capacity=np.int64(7), seed=np.uint32(5)) as rb:
            assert (rb.storage.capacity, rb.storage.seed) == (7, 5)


# ---------------------------------------------------------------------------------------------------
# As stored.


def test_settings_that_contradict_the_store_are_refused_with_both_values(store_path: Path) -> None:
    made: dict[str, Any] = {
        "capacity": 10,
        "seed": 3,
        "episodes": {"traj": "a", "done": ["end"], "reward": ("next", "r")},
        "meta": {"env": "x"},
    }
    schema = Schema(
        [Field(("a",), "int64", ()), Field(("end",), "bool", ()), Field(("next", "r"), "float32", ())]
    )
    with expstore.open(store_path, schema=schema, **made) as rb:
        assert rb.meta == {"env": "x"}
        assert rb.schema == schema
    before = read_files(store_path, "LOCK")
    others: dict[str, dict[str, Any]] = {
        "capacity": {"capacity": 11},
        "seed": {"seed": 4},
        "layout": {"layout": "arrow"},
        "traj": {"episodes": {"traj": ("b",)}},
        "done": {"episodes": {"done": ["end", "stop"]}},
        "reward": {"episodes": {"reward": "r"}},
        "meta": {"meta": {}},
        "schema": {"schema": Schema(schema.fields[:2])},
    }
    for name, other in others.items():
        with pytest.raises(
            StateError, match=rf"made with {name}=.*opened with {name}=.*leave {name} out"
        ) as caught:
            expstore.open(store_path, **other)
        assert caught.value.kind == "mismatch"
        assert str(store_path) in str(caught.value)
        if name in ("capacity", "seed"):
            assert f"{name}={made[name]!r}" in str(caught.value)
            assert f"{name}={other[name]!r}" in str(caught.value)
    assert read_files(store_path, "LOCK") == before
    with expstore.open(store_path, schema=schema, **made) as rb:
        assert rb.meta == {"env": "x"}


def test_an_unbounded_store_stays_unbounded(store_path: Path) -> None:
    expstore.open(store_path).close()
    with pytest.raises(StateError, match="made with capacity=None, opened with capacity=10"):
        expstore.open(store_path, capacity=10)


def test_a_new_store_keeps_the_seed_it_picks(store_path: Path) -> None:
    seeds = set()
    for name in ("a.exp", "b.exp"):
        for _ in range(2):
            with expstore.open(store_path.with_name(name)) as rb:
                seeds.add((name, rb.storage.seed))
    assert len(seeds) == 2
    assert len({seed for _, seed in seeds}) == 2


def test_a_schema_given_to_open_is_demanded(store_path: Path) -> None:
    schema = Schema([Field(("a",), "int64", ()), Field(("b",), "float32", (2,))])
    with expstore.open(store_path, schema=schema) as rb:
        with pytest.raises(SchemaError, match="lacks 'b'"):
            rb.extend(numbered_rows(3, key="a"))
        rb.extend(numbered_rows(3, key="a").set("b", torch.zeros(3, 2)))
    with pytest.raises(SchemaError, match="'nothing' is not a field"):
        expstore.open(
            store_path.with_name("other.exp"), schema=schema, episodes=expstore.EpisodeKeys(traj="nothing")
        )


# ---------------------------------------------------------------------------------------------------
# Folders.


def test_a_foreign_folder_is_refused_and_left_alone(store_path: Path) -> None:
    store_path.mkdir()
    (store_path / "notes.txt").write_text("mine")
    for mode in ("a", "x", "w"):
        with pytest.raises(
            StateError, match=rf"{store_path} is not empty and not a store: it holds notes.txt; choose"
        ):
            expstore.open(store_path, mode=mode)
    assert read_files(store_path, "LOCK") == {"notes.txt": b"mine"}
    file = store_path / "notes.txt"
    with pytest.raises(StateError, match=rf"{file} is a file, a store is a folder"):
        expstore.open(file)


def test_an_empty_folder_will_do(store_path: Path) -> None:
    store_path.mkdir()
    with expstore.open(store_path, mode="x") as rb:
        rb.extend(numbered_rows(2, key="a"))
    (store_path / "notes.txt").write_text("mine")  # what is added later disturbs nobody
    with expstore.open(store_path) as rb:
        assert len(rb) == 2


def test_files_of_a_killed_first_opening_are_ignored(store_path: Path) -> None:
    (store_path / "journal").mkdir(parents=True)
    for name in ("LOCK", "STATE", "PROBE.tmp", "expstore.json.tmp", "episodes.log"):
        (store_path / name).touch()
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(2, key="a"))
    with expstore.open(store_path) as rb:
        assert rb["a"].tolist() == [0, 1]


def test_a_store_without_its_manifest_is_damaged(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(2, key="a"))
    (store_path / MANIFEST).unlink()
    with pytest.raises(CorruptionError, match=rf"{store_path} has columns but no expstore.json"):
        expstore.open(store_path)


def test_a_store_without_its_journal_is_damaged(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(2, key="a"))
    for path in (store_path / "journal").iterdir():
        path.unlink()
    for _ in range(2):  # a failed opening holds no lock
        with pytest.raises(CorruptionError, match="journal has no segment"):
            expstore.open(store_path)


def test_a_store_inside_a_store_is_refused(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(4, key="a"))
    before = read_files(store_path, "LOCK")
    makers: list[Any] = [expstore.open, expstore.ZarrStorage, expstore.ArrowStorage]
    for make, below in itertools.product(makers, ("versions", "x", "columns/a", "a/b/c")):
        with pytest.raises(
            StateError, match=f"would lie inside the store {store_path}; choose a path"
        ) as caught:
            make(store_path / below)
        assert caught.value.kind == "path"
        assert read_files(store_path, "LOCK") == before
    with expstore.open(store_path) as rb:
        rb.snapshots.tag("t")
        with expstore.open(store_path, version="t", mode="r") as tagged:
            assert len(tagged) == 4
        with expstore.open(store_path / "versions", mode="r") as tagged:
            assert len(tagged) == 4


def test_a_store_inside_a_version_is_refused(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(4, key="a"))
        version = rb.dumps(store_path.with_name("backup"))
    with pytest.raises(StateError, match=f"would lie inside the store {version.path}"):
        expstore.open(version.path / "x")


def test_versions_inside_another_store_are_refused(store_path: Path) -> None:
    expstore.open(store_path).close()
    other = store_path.with_name("other.exp")
    with expstore.open(other) as rb:
        rb.extend(numbered_rows(4, key="a"))
        for folder in (store_path / "x", other / "x", other / "versions" / "x"):
            with pytest.raises(SnapshotError, match="would lie inside the store"):
                rb.dumps(folder)
        rb.dumps(other / "versions")
        rb.snapshots.tag("t")
    assert len(expstore.versions(other)) == 2


# ---------------------------------------------------------------------------------------------------
# Who has it.


def test_a_second_open_here_says_since_when(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        for _ in range(2):
            with pytest.raises(
                LockedError,
                match=rf"{store_path} for writing: this process .* has it open since 20.*close\(\)",
            ):
                expstore.open(store_path)
        rb.extend(numbered_rows(2, key="a"))
    expstore.open(store_path).close()


WRITER = """
import sys
from expstore.storages.factory import ZarrStorage
storage = ZarrStorage(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
storage.close()
"""


SECOND = """
import sys
from expstore.errors import LockedError
from expstore.storages.factory import ZarrStorage
try:
    ZarrStorage(sys.argv[1])
except LockedError as exc:
    print(exc)
"""


@pytest.mark.guarantee(
    "process/one-writer",
    "A second writer gets a `LockedError` that names the first, even if the LOCK file was removed; no id "
    "is acknowledged twice.",
)
def test_a_second_process_learns_who_has_it(store_path: Path) -> None:
    import socket

    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(2, key="a"))
        out = warm_processes.run(
            [sys.executable, "-c", SECOND, store_path], capture_output=True, text=True, check=True
        )
        assert f"process {os.getpid()} on {socket.gethostname()} has it open since" in out.stdout
    child = warm_processes.Popen(
        [sys.executable, "-c", WRITER, store_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    with pytest.raises(
        LockedError, match=rf"process {child.pid} on {socket.gethostname()} has it open since"
    ):
        expstore.open(store_path)
    child.communicate()
    with expstore.open(store_path) as rb:
        assert rb.recovered is None
        assert len(rb) == 2


def test_a_fork_leaves_the_parents_garbage_alone(store_path: Path) -> None:
    """To free in a child what DuckDB's threads share with the parent ends the child."""
    with expstore.open(store_path):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if gc.get_freeze_count() else 1)
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.guarantee(
    "process/forks",
    "A forked child and an unpickled buffer read what the parent writes, and never write.",
)
def test_a_fork_follows_and_does_not_write(store_path: Path) -> None:
    with expstore.open(store_path, batch_size=4) as rb:
        rb.extend(numbered_rows(20, key="a"))
        rb.add(numbered_rows(1, 20, key="a")[0])
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            text = ""
            try:
                for act in (
                    lambda: rb.extend(numbered_rows(1, key="a")),
                    lambda: rb.update_priority([0], 2.0),
                    rb.flush,
                    rb.empty,
                    lambda: rb.__setitem__(0, numbered_rows(1, key="a")[0]),
                ):
                    with pytest.raises(StateError, match="fork"):
                        act()
                assert rb["a"].tolist() == list(range(21))
                batch = rb.sample()
                assert torch.equal(batch["a"], batch["id"] - 1)
                assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(21,)]
                rb.close()
            except BaseException as exc:
                text = repr(exc)
            os.write(write_end, text.encode())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(write_end)
        assert os.read(read_end, 10_000) == b""
        os.close(read_end)
        assert not (store_path / "index.duckdb").exists()
        rb.extend(numbered_rows(3, 21, key="a"))
        assert rb.sql("SELECT count(*) FROM transitions").fetchall() == [(24,)]
        with pytest.raises(LockedError):
            expstore.open(store_path)


def test_a_forgotten_writer_in_a_dead_thread_does_not_stop_the_next(store_path: Path) -> None:
    """Closing in whatever order and as often as one likes."""
    rb = expstore.open(store_path)
    rb.extend(numbered_rows(2, key="a"))
    rb.storage.close()
    rb.close()
    with expstore.open(store_path) as rb:
        assert len(rb) == 2


def test_making_a_store_is_logged_once(store_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="expstore")
    for mode in ("a", "a", "w", "r"):
        expstore.open(store_path, mode=mode).close()
    made = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert made == [f"created a new store: {store_path}"] * 2


# ---------------------------------------------------------------------------------------------------
# Stores that nobody wants.


_WRONG: list[dict[str, Any]] = [
    {"sampler": 3},
    {"writer": 3},
    {"batches": {"generator": 3}},
    {"batches": {"device": "no-such-device"}},
    {"schema": {"a": str}},
    {"schema": {"a": "float32"}, "episodes": {"traj": "b"}},
]


def test_an_opening_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("run.exp")
    for wrong in _WRONG:
        for mode in ("a", "x", "w"):
            with pytest.raises((TypeError, SchemaError, StateError)):
                expstore.open("new/deep/run.exp", mode=mode, **wrong)
        with pytest.raises((TypeError, SchemaError, StateError)):
            expstore.open("run.exp", **wrong)
        assert os.listdir(tmp_path) == ["run.exp"], wrong
        assert os.listdir("run.exp") == [], wrong


def test_w_that_fails_brings_the_old_store_back(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(4, key="a"))
        uuid = rb.storage.description.uuid
    with pytest.raises(TypeError, match="sampler must be a name"):
        expstore.open(store_path, mode="w", sampler=3)  # type: ignore[arg-type]
    assert os.listdir(store_path.parent) == [store_path.name]
    with expstore.open(store_path) as rb:
        assert (rb.storage.description.uuid, len(rb)) == (uuid, 4)


def test_a_store_that_is_there_stays_where_an_opening_fails(store_path: Path) -> None:
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(4, key="a"))
    with pytest.raises(TypeError, match="sampler must be a name"):
        expstore.open(store_path, sampler=3)  # type: ignore[arg-type]
    with expstore.open(store_path) as rb:
        assert len(rb) == 4


@pytest.mark.slow
def test_a_store_that_another_program_makes_meanwhile_stays(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may even have been closed again: its lock is free then."""
    make = "import sys, expstore; expstore.open(sys.argv[1]).close()"

    def fail(*_: Any, **__: Any) -> None:
        subprocess.run([sys.executable, "-c", make, str(store_path)], check=True)
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr("expstore._open.open_storage", fail)
        with pytest.raises(RuntimeError, match="no"):
            expstore.open(store_path)
        patch.undo()
    expstore.open(store_path, mode="r").close()


def test_a_missing_device_is_refused(store_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be returned on device 'no-such-device'") as caught:
        expstore.open(store_path, batches=expstore.Batches(device="no-such-device"))
    assert caught.value.kind == "device"
    if not torch.cuda.is_available():
        with pytest.raises(StateError, match="cuda"):
            expstore.open(store_path, batches=expstore.Batches(device="cuda"))
    assert not store_path.exists()


def test_a_folder_of_versions_is_not_opened_for_writing(store_path: Path, tmp_path: Path) -> None:
    versions = tmp_path / "versions"
    with expstore.open(store_path) as rb:
        rb.extend(numbered_rows(4, key="a"))
        rb.dumps(versions)
    before = read_files(versions)
    for path in (versions, versions / "v0001"):
        with pytest.raises(StateError, match=r"loads\("):
            expstore.open(path)
    assert read_files(versions) == before
    for options in ({"mode": "r"}, {"version": 1}):
        with expstore.open(versions, **options) as rb:
            assert len(rb) == 4
