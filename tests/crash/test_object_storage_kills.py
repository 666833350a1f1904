"""Kills before every request to an object storage: it has whole versions only, and a repeated call ends the
work.

A kill before a request is also one after the request before. The storage is in memory; no later request of
the killed call passes, whatever its threads do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("obstore", reason="the extra expstore[s3] is not installed")

import expstore
from expstore import cold
from expstore.cold.version_list import LIST, Manifest, manifest_key, part_key
from expstore.errors import RemoteError
from tests.support.batches import episode_rows
from tests.support.object_stores import Killed, WatchedStorage, check_whole, find_needed, find_shipped

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")


@pytest.fixture(scope="module")
def backup(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three versions."""
    folder = tmp_path_factory.mktemp("kills")
    with expstore.open(folder / "run.exp", seed=0) as rb:
        for number in range(3):
            rb.extend(episode_rows(20, start=20 * number, length=10))
            rb.dumps(folder / "backup")
    return folder / "backup"


def _names(storage: WatchedStorage) -> set[str]:
    import obstore

    return {item["path"] for item in obstore.list(storage.where).collect()}


def _kill_everywhere(
    prepare: Callable[[], WatchedStorage], act: Callable[[WatchedStorage], object]
) -> list[WatchedStorage]:
    """Kill a call before each of its requests; return the storages, and last one where it has ended."""
    found: list[WatchedStorage] = []
    for number in range(1000):
        storage = prepare()
        storage.kill_at(number)
        try:
            act(storage)
        except Killed:
            storage.calm()
            found.append(storage)
            continue
        storage.calm()
        return [*found, storage]
    raise AssertionError("the call does not end")


@pytest.mark.guarantee(
    "version/pushes",
    "After a kill at any request of `push`, `pull` or `prune`, an object storage has whole versions only,"
    " and a repeated push sends nothing twice.",
)
@pytest.mark.slow
def test_a_killed_push_leaves_whole_versions_and_its_repetition_ends_it(backup: Path) -> None:
    def prepare() -> WatchedStorage:
        storage = WatchedStorage()
        cold.push(backup, storage, version=1)
        return storage

    killed = _kill_everywhere(prepare, lambda storage: cold.push(backup, storage))
    assert len(killed) > 15
    (complete,) = check_whole(killed[-1])[1:]
    for storage in killed[:-1]:
        assert [version.number for version in check_whole(storage)] == [1]  # the last request is the commit
        there = {key.rpartition("/")[2] for key in _names(storage) if key.startswith("parts/")}
        before = len(storage.requests)
        version = cold.push(backup, storage)
        assert (version.number, version.rows, version.files) == (2, 60, complete.files)
        sent = [key for act, key in storage.requests[before:] if act == "put" and key.startswith("parts/")]
        assert not there & {key.rpartition("/")[2] for key in sent}  # nothing is sent again
        assert [version.number for version in check_whole(storage)] == [1, 2]


@pytest.mark.guarantee("version/pushes")
def test_a_killed_prune_leaves_whole_versions_and_the_next_ends_it(backup: Path) -> None:
    def prepare() -> WatchedStorage:
        storage = WatchedStorage()
        for version in (1, 2, 3):
            cold.push(backup, storage, version=version)
        return storage

    killed = _kill_everywhere(prepare, lambda storage: cold.prune(storage, keep=1))
    assert len(killed) > 5
    for storage in killed:
        assert [version.number for version in check_whole(storage)] in ([1, 2, 3], [3])
        cold.prune(storage, keep=1)
        (last,) = check_whole(storage)
        needed = {part_key(part) for part in Manifest.load(storage.connect(), last).parts}
        assert _names(storage) == {*needed, manifest_key(last), LIST, "probe"}


def test_what_a_killed_push_has_sent_is_pruned_later(backup: Path) -> None:
    storage = WatchedStorage()
    cold.push(backup, storage, version=1)
    whole = _names(storage)
    storage.kill_at(12)
    with pytest.raises(Killed):
        cold.push(backup, storage)
    storage.calm()
    assert _names(storage) > whole
    assert cold.prune(storage, keep=1).parts == 0  # the push may still run
    assert cold.prune(storage, keep=1, grace_seconds=0).parts > 0
    assert _names(storage) == whole


@pytest.mark.guarantee("version/pushes")
@pytest.mark.slow
@pytest.mark.parametrize("shipped", ["", "flat", "packed", "arrow"])
def test_a_killed_pull_leaves_no_store(shipped: str, backup: Path, tmp_path: Path) -> None:
    """Also one of a version of a shipped store, which names the parts of a state."""
    storage = WatchedStorage()
    if shipped:
        with expstore.open(
            tmp_path / "a.exp", ship=expstore.Ship(storage, every=3600.0), layout=shipped
        ) as rb:
            for start in range(0, 60, 4):  # a part or more each
                rb.extend(episode_rows(4, start=start, length=10))
                rb.flush(shipped=True)
            assert cold.push(rb, storage).files == 0
    else:
        cold.push(backup, storage)
    target = tmp_path / "new.exp"
    killed = 0
    for number in range(1000):
        storage.kill_at(number)
        try:
            cold.pull(storage, target)
            break
        except Killed:
            assert not target.exists()
            killed += 1
    assert killed > 15
    with expstore.open(target) as rb:
        assert len(rb) == 60


@pytest.mark.guarantee("version/pushes")
def test_a_killed_opening_leaves_a_cache_that_fits(backup: Path, tmp_path: Path) -> None:
    storage = WatchedStorage(cache=tmp_path / "cache")
    cold.push(backup, storage)
    for number in range(1000):
        storage.kill_at(number)
        try:
            with expstore.open(storage, mode="r") as rb:
                assert rb[:]["number"].tolist() == list(range(60))
            break
        except Killed:
            pass
    assert number > 5  # what an opening has fetched is not fetched again
    assert not list((tmp_path / "cache").rglob("*.tmp"))


@pytest.mark.guarantee("ship/versions")
@pytest.mark.slow
@pytest.mark.parametrize("act", ["push", "prune"])
def test_no_request_after_which_a_shipped_store_is_lost_lacks_parts(act: str, tmp_path: Path) -> None:
    """All requests from the N-th on fail, for every N; then another disk continues the store."""
    for number in range(1000):
        storage, path = WatchedStorage(), tmp_path / f"{number}.exp"
        with expstore.open(path, ship=expstore.Ship(storage, every=3600.0), capacity=40, seed=0) as rb:
            for start in (0, 20, 40):
                rb.extend(episode_rows(20, start=start, length=10))
                cold.push(rb, storage)
            rb.extend(episode_rows(20, start=60, length=10))
            _fail_at(storage, number)
            try:
                cold.push(rb, storage) if act == "push" else cold.prune(storage, keep=1, grace_seconds=0.0)
                is_over = True
            except RemoteError:
                is_over = False
            storage.before = _fail  # the store is not closed, but lost
        storage.calm()
        listed = [version.number for version in cold.versions(storage)]
        assert listed in ([1, 2, 3], [1, 2, 3, 4] if act == "push" else [3])
        assert find_needed(storage) <= find_shipped(storage)
        new = tmp_path / f"{number}-new.exp"
        with expstore.open(new, ship=expstore.Ship(storage, every=3600.0), seed=0) as rb:
            assert sorted(rb[:]["number"].tolist())[-20:] in ([*range(40, 60)], [*range(60, 80)])
            cold.push(rb, storage)
            rb.flush(shipped=True)
            cold.prune(storage, keep=2, grace_seconds=0.0)
            assert find_needed(storage) == find_shipped(storage)
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
        if is_over:
            break
    assert number > 4


def _fail(number: int, act: str, key: str) -> None:
    raise RemoteError("the server does not answer")


def _fail_at(storage: WatchedStorage, number: int) -> None:
    first = len(storage.requests) + number
    storage.before = lambda at, act, key: _fail(at, act, key) if at >= first else None


_SHIPPER = """
import sys
import expstore
from expstore import cold
from tests.support.batches import episode_rows
rb = expstore.open(sys.argv[1], ship=expstore.Ship(sys.argv[2], every=0.05), capacity=60, seed=0)
while True:
    start = rb.write_count
    rb.extend(episode_rows(20, start=start, length=10))
    print(cold.push(rb, sys.argv[2]).number, start + 20, flush=True)
    cold.prune(sys.argv[2], keep=2, grace_seconds=0.0)
"""


@pytest.mark.guarantee("ship/versions")
@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_a_process_that_pushes_versions_of_a_shipped_store_is_killed(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    """SIGKILL from the server amid a request, 8 times, each on another disk; then all versions are read."""
    pytest.importorskip("moto", reason="moto is not installed")
    from tests.support.s3_server import Request, S3Server, start_moto

    url, storage = "s3://bucket/run", cold.ObjectStorage("s3://bucket/run")
    with start_moto() as port, S3Server(port, "bucket") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        ends: dict[int, int] = {}
        for life in range(8):
            before, stop = len(server.requests), int(rng.integers(8, 120))
            command = [sys.executable, "-c", _SHIPPER, str(tmp_path / f"{life}.exp"), url]
            process = subprocess.Popen(command, env=os.environ | server.environment, stdout=subprocess.PIPE)

            def kill(request: Request, first: int = before, stop: int = stop, pid: int = process.pid) -> None:
                if len(server.requests) - first >= stop:
                    os.kill(pid, signal.SIGKILL)

            server.before, server.after = (kill, server.after) if life % 2 else (server.before, kill)
            out, _ = process.communicate(timeout=300)
            server.before = server.after = lambda request: None
            for line in out.decode().splitlines():
                number, end = map(int, line.split())
                ends[number] = end
            with expstore.open(tmp_path / "check.exp", ship=expstore.Ship(url, every=3600.0)) as rb:
                assert sorted(rb[:]["number"].tolist()) == [
                    *range(max(0, rb.write_count - 60), rb.write_count)
                ]
                cold.prune(url, keep=3, grace_seconds=0.0)
                assert find_needed(storage) == find_shipped(storage)
            shutil.rmtree(tmp_path / "check.exp", ignore_errors=True)
        assert ends
        for version in cold.versions(url):
            with expstore.open(
                cold.ObjectStorage(url, cache=tmp_path / "c"), mode="r", version=version.number
            ) as rb:
                end = ends.get(version.number, rb.write_count)
                assert sorted(rb[:]["number"].tolist()) == [*range(max(0, end - 60), end)]


_PUSHER = """
import sys
from expstore import cold
print(cold.push(sys.argv[1], sys.argv[2]).number)
"""


def _run_pusher(backup: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _PUSHER, str(backup), "s3://bucket/run"]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.guarantee("version/pushes")
@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_processes_are_killed_at_random_requests(
    backup: Path, tmp_path: Path, rng: np.random.Generator
) -> None:
    """SIGKILL from the server amid a request of a process, 25 times; then the push ends."""
    pytest.importorskip("moto", reason="moto is not installed")
    from tests.support.s3_server import Request, S3Server, start_moto

    with start_moto() as port, S3Server(port, "bucket") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        for _ in range(25):
            before, stop = len(server.requests), int(rng.integers(1, 40))
            process = _run_pusher(backup, server.environment)

            def kill(request: Request, first: int = before, stop: int = stop, pid: int = process.pid) -> None:
                if len(server.requests) - first >= stop:
                    os.kill(pid, signal.SIGKILL)

            if rng.random() < 0.5:
                server.before = kill
            else:
                server.after = kill
            process.communicate(timeout=300)
            server.before = server.after = lambda request: None
            found = cold.versions("s3://bucket/run")
            assert len(found) <= 1
            if found:
                cold.prune("s3://bucket/run", drop=[found[0].number])
        cold.push(backup, "s3://bucket/run")
        cold.pull("s3://bucket/run", tmp_path / "new.exp")
        with expstore.open(tmp_path / "new.exp", mode="r") as rb:
            assert len(rb) == 60


@pytest.mark.guarantee("version/races")
@pytest.mark.torture
@pytest.mark.timeout(1800)
def test_races_of_processes_have_one_winner_each(tmp_path: Path) -> None:
    """Eight processes push to one address at once, three times: each number is given once."""
    pytest.importorskip("moto", reason="moto is not installed")
    from tests.support.s3_server import S3Server, start_moto

    places = []
    with expstore.open(tmp_path / "run.exp", seed=0) as rb:
        for number in range(24):
            rb.extend(episode_rows(20, start=20 * number, length=10))
            rb.dumps(tmp_path / f"backup-{number}")
            places.append(tmp_path / f"backup-{number}")
    with start_moto() as port, S3Server(port, "bucket") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        numbers = []
        for start in range(0, 24, 8):
            racers = [_run_pusher(place, server.environment) for place in places[start : start + 8]]
            for process in racers:
                out, error = process.communicate(timeout=600)
                assert process.returncode == 0, error
                numbers.append(int(out))
        assert sorted(numbers) == list(range(1, 25))
        found = cold.versions("s3://bucket/run")
        assert [version.number for version in found] == list(range(1, 25))
        assert sorted(version.rows for version in found) == list(range(20, 500, 20))
        for version in found[::6]:
            cold.pull("s3://bucket/run", tmp_path / f"{version.number}.exp", version=version.number)
            with expstore.open(tmp_path / f"{version.number}.exp", mode="r") as reader:
                assert len(reader) == version.rows
