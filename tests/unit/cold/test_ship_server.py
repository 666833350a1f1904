"""Shipping to a server with S3's interface: storms, lost and late answers, wrong clocks, no conditions."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("moto", reason="moto is not installed: there is no server to ask")

import expstore
from expstore import Ship
from expstore.cold.ship_log import EPOCHS
from expstore.cold.version_list import STATES
from expstore.errors import LockedError, RemoteError, StateError
from tests.support.batches import episode_rows
from tests.support.s3_server import Request, S3Server

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")


def _open(path: Path, url: str, **settings: Any) -> expstore.TensorDictReplayBuffer:
    return expstore.open(path, ship=Ship(url, every=3600.0), seed=0, **settings)


def _make_trouble(kind: str, server: S3Server) -> None:
    """Spoil a third of the requests, before the server has seen them or after.

    None is spoiled more than four times in a row: an opening repeats each request five times, and then fails.
    """
    rng, in_a_row = random.Random(7), Counter[tuple[str, str]]()

    def spoils(request: Request) -> bool:
        key = request.method, request.path
        in_a_row[key] = in_a_row[key] + 1 if rng.random() < 0.3 and in_a_row[key] < 4 else 0
        return in_a_row[key] > 0

    def before(request: Request) -> int | None:
        if kind == "late":
            time.sleep(rng.random() * 0.05)  # not to synchronize: answers come late, in another order
        return int(kind) if kind.isdigit() and spoils(request) else None

    def after(request: Request) -> int | None:
        return 500 if kind == "lost" and spoils(request) else None

    server.before, server.after = before, after


@pytest.mark.guarantee("ship/fencing")
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["429", "503", "lost", "late"])
def test_troubles_lose_nothing_and_fence_no_writer(
    kind: str, tmp_path: Path, server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three disks one after another, each of which restores; each clock is 400 days off the one before."""
    _make_trouble(kind, server)
    now = time.time
    for life in range(3):
        monkeypatch.setattr(time, "time", lambda life=life: now() - 400 * 86_400 * life)
        rb = _open(tmp_path / f"{life}.exp", url)
        assert len(rb) == 60 * life
        for start in range(60 * life, 60 * life + 60, 20):
            rb.extend(episode_rows(20, start=start, length=10))
            rb.flush(shipped=True, timeout=120)
        rb.close()
    with _open(tmp_path / "new.exp", url) as rb:
        assert rb[:]["number"].tolist() == list(range(180))


@pytest.mark.slow
def test_a_partition_fences_the_writer_that_comes_back(tmp_path: Path, server: S3Server, url: str) -> None:
    first = _open(tmp_path / "first.exp", url)
    first.extend(episode_rows(20, length=10))
    first.flush(shipped=True)
    server.before = lambda request: 503
    first.extend(episode_rows(10, start=20, length=10))
    with pytest.raises(RemoteError, match="not shipped"):
        first.flush(shipped=True, timeout=3)
    first.extend(episode_rows(10, start=30, length=10))  # training continues
    server.before = lambda request: None
    second = _open(tmp_path / "second.exp", url)
    second.extend(episode_rows(10, start=100, length=10))
    with pytest.raises(LockedError, match="another writer ships"):
        first.flush(shipped=True)
    first.close()
    second.close()
    with expstore.open(tmp_path / "first.exp", mode="r") as reader:
        assert len(reader) == 40
    with _open(tmp_path / "new.exp", url) as rb:
        assert rb[:]["number"].tolist() == [*range(20), *range(100, 110)]


@pytest.mark.guarantee(
    "ship/conditions",
    "Shipping refuses an object storage that ignores conditional creates, before it writes.",
)
def test_a_server_without_conditions_is_refused(tmp_path: Path, server: S3Server, url: str) -> None:
    server.unconditional = True
    with pytest.raises(StateError, match=r"ignores conditional writes \(If-None-Match\)") as caught:
        _open(tmp_path / "run.exp", url)
    assert caught.value.kind == "no_conditional_put"
    assert not (tmp_path / "run.exp").exists()
    written = {request.path for request in server.requests if request.method == "PUT"}
    assert not [path for path in written if f"/{EPOCHS}/" in path or f"/{STATES}/" in path]
    server.unconditional = False
    with _open(tmp_path / "run.exp", url) as rb:
        rb.extend(episode_rows(20, length=10))
    # Only creates are conditional: servers that know no If-Match will do.
    assert not [request for request in server.requests if "if-match" in map(str.lower, request.headers)]


def test_closing_takes_a_bounded_time_without_a_server(
    tmp_path: Path,
    server: S3Server,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("expstore.cold.ship._CLOSE_SECONDS", 0.2)
    monkeypatch.setattr("expstore.cold.ship._REQUEST_SECONDS", 0.2)
    rb = _open(tmp_path / "run.exp", url)
    rb.extend(episode_rows(20, length=10))
    release = threading.Event()
    server.before = lambda request: release.wait(60) and None
    rb.close()
    assert rb.storage.closed
    assert "20 rows are missing there" in caplog.text
    release.set()
    server.before = lambda request: None
    with _open(tmp_path / "run.exp", url) as rb:
        rb.flush(shipped=True)
    with _open(tmp_path / "new.exp", url) as rb:
        assert len(rb) == 20
