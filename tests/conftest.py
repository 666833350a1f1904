"""Fixtures for all tests: seeded generators, batches, a fresh store path.

Loaded by pytest before the tests. Nothing here imports torch before a test requests a batch, so single tests
start fast.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import numpy as np
import pytest

from tests.support.case_selection import leave_the_rest
from tests.support.jobs import is_forking, pytest_addoption, pytest_runtestloop  # noqa: F401 (hooks)
from tests.support.paths import find_memory

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start what runs in the background so, and it is inherited: no child could be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if TYPE_CHECKING:
    from tensordict import TensorDict

    from tests.support.commands import Cli

# Before torch is loaded: tests fork, and in a fork the threads of a pool that was used before are gone.
os.environ["OMP_NUM_THREADS"] = "1"


def _die_without_farewell() -> None:
    """Let stores be as a kill leaves them, in the children that tests fork and kill when their work returns.

    The kill comes after the last variable has gone, and a forgotten store closes in order.

    And what they inherit is no garbage of theirs: a collection would copy the parent's memory page by page.
    """
    if is_forking():
        return
    gc.freeze()
    if module := sys.modules.get("expstore.storages.engine.store"):
        module.Store.__del__ = lambda kept: None


os.register_at_fork(after_in_child=_die_without_farewell)

# Fixed examples everywhere but in the long runs, which look for new ones.
hypothesis.settings.register_profile("short", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("long", deadline=None, max_examples=300, print_blob=True)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


#: Files that take longest. They begin first: one that begins last keeps a single process busy at the end.
LONG_FILES = (
    "crash/test_kills_and_power_cuts.py",
    "crash/test_single_acts.py",
    "docs/test_examples.py",
    "fuzz/test_fuzz.py",
    "unit/on_ray/test_cluster.py",
    "crash/test_retention.py",
    "unit/sql/sandbox/test_pool.py",
    "unit/test_gym.py",
    "docs/test_docstrings.py",
    "unit/samplers/test_contract.py",
    "unit/cluster/test_member_contract.py",
)


#: Tests about file systems, rows that are not in memory, and the space of files. They need a disk.
ABOUT_DISKS = (
    *("unit/disk/", "unit/storages/columns/test_cold_rows.py"),
    "unit/storages/snapshots/test_rebuild.py",
)
#: Folders of tests about files, whose stores treat holes in files as they do on a disk.
ABOUT_FILES = ("crash/", "fuzz/", "property/", "unit/maintenance/", "unit/storages/")


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with long files, and leave to `make torture` what tests marked `some` do not need."""
    leave_the_rest(items)
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let collections pass over what was imported: that is a million objects, a third of a second each.

    Several jobs share the processes that fork programs, which take four seconds to start.
    """
    gc.collect()
    gc.freeze()
    if session.config.getoption("jobs") > 1 and session.items and not session.config.option.collectonly:
        from tests.support import warm_processes, warm_sql

        warm_processes.Forked.parent.start()
        warm_sql.PARENT.start()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[None]:
    """Exit a forked child that leaves the test function; otherwise it would run the next tests, too."""
    pid = os.getpid()
    try:
        return (yield)
    finally:
        if os.getpid() != pid:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)


def pytest_unconfigure() -> None:
    """Let the modules go at the end: DuckDB reports what is left of it then as leaked."""
    gc.unfreeze()


@pytest.fixture
def rng() -> np.random.Generator:
    """A seeded generator, the same in every test."""
    return np.random.default_rng(20_260_101)


@pytest.fixture(scope="module")
def forking() -> Iterator[None]:
    """Have workers forked: to spawn one, which is torchrl's default, takes six seconds."""
    import multiprocessing

    import torch

    before = multiprocessing.get_start_method(allow_none=True)
    threads = torch.get_num_threads()
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def no_syncs() -> Iterator[None]:
    """Nothing waits for the disk: whether bytes reach it is for the crash tests."""
    from expstore.disk import files

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_sync_data", os.fstat)  # which a closed descriptor does not pass
        patch.setattr(os, "fsync", lambda fd: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _no_index(request: pytest.FixtureRequest) -> Iterator[None]:
    """Closing makes no index where nobody has asked it: it is derived, and made when somebody does.

    That takes half of a small store's life. In modules marked `index` it is as for users.
    """
    if request.node.get_closest_marker("index"):
        yield
        return
    from expstore.core import tuning

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "INDEX_ON_CLOSE", False)
        yield


@pytest.fixture(scope="module", autouse=True)
def _warm_sql() -> Iterator[None]:
    """Processes for untrusted SQL do not import everything again; tests of the sandbox override this."""
    from expstore.sql.sandbox import pool
    from tests.support.warm_sql import WARM

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "subprocess", WARM)
        yield


@pytest.fixture
def no_index_on_close(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close stores without bringing their index up to date, also one that was opened."""
    from expstore.sql.sync import Catalog

    monkeypatch.setattr(Catalog, "close", Catalog.drop)


@pytest.fixture
def checked_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let storages that are opened assert the order in which threads take their locks."""
    from expstore.core import tuning

    monkeypatch.setattr(tuning, "CHECK_LOCK_ORDER", True)


@pytest.fixture
def short_flat_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give flat columns shards of one block, so that small stores have several."""
    from expstore.core import tuning

    monkeypatch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)


@pytest.fixture(scope="module")
def small_files() -> Iterator[None]:
    """Set short shards and segments, few spare slots, and no background syncs."""
    from expstore.core import tuning
    from expstore.storages.engine import store
    from tests.support.stores import NoKeeper
    from tests.support.tuned import set_spare_slots

    with pytest.MonkeyPatch.context() as patch:
        for name in ("PACKED_SHARD_ROWS", "UNBOUNDED_PACKED_SHARD_ROWS"):
            patch.setattr(tuning, name, 16)
        patch.setattr(tuning, "ARROW_SEGMENT_BATCHES", 2)
        patch.setattr(tuning, "FLAT_SHARD_ROWS", 4096)
        set_spare_slots(patch, 16)
        patch.setattr(store, "Keeper", NoKeeper)
        yield


@pytest.fixture
def long_seed() -> int:
    """What the seeds of long tests start from: `make torture` gives each run another one."""
    return int(os.environ.get("SEED", "0")) % (1 << 31)


@pytest.fixture
def count_cases(record_property: Callable[[str, object], None]) -> Iterator[Callable[..., None]]:
    """Note how many cases a long test has tried; `make torture` adds them up.

    Called before each case, or with how many come.
    """
    tried = 0

    def note(cases: int = 1) -> None:
        nonlocal tried
        tried += cases

    yield note
    record_property("cases", tried)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder in memory, where a store costs a third less CPU than on a disk; on a disk in `ABOUT_DISKS`."""
    place = request.path.relative_to(Path(__file__).parent).as_posix()
    memory = None if place.startswith(ABOUT_DISKS) else find_memory()
    if memory is None:
        yield request.getfixturevalue("tmp_path")
        return
    # Patched by a context of its own: the test may undo its own patches, or break what removes the folder.
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(dir=memory, prefix="tests-") as name,
    ):
        if place.startswith(ABOUT_FILES):
            patch.setattr("expstore.disk.filesystem._MEMORY", frozenset())
        yield Path(name)


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    """Where a test may make its store; nothing is there yet."""
    return tmp_path / "run.exp"


@pytest.fixture
def make_batch() -> Callable[..., TensorDict]:
    """A factory of [T] batches whose every value follows from its row's number.

    `make_batch(5, start=100)` is rows 100 to 104. `observation` f32[4], `action` i64 [], and under
    `next`: `observation` of the row after, `reward` f32[1], `terminated` and `truncated` bool[1].
    Every `episode_length`-th row terminates (0: none does).
    """

    from tests.support.batches import transitions

    return transitions


@pytest.fixture
def store(store_path: Path, make_batch: Callable[..., TensorDict]) -> Path:
    """A closed store of 30 rows, three episodes, with room for 50."""
    from tests.support.stores import build_store

    return build_store(store_path, make_batch(30, episode_length=10), capacity=50)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process: `cli("info", path, "--json")`."""
    from expstore.cli.app import run
    from tests.support.commands import Done

    def call(*arguments: object) -> Done:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return call
