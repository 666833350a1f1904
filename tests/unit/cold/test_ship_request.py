"""A command asks the process that writes to a store to ship it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("moto", reason="moto is not installed: there is no server to ask")

import expstore
from expstore import Ship
from expstore.cold import ship_request
from expstore.cold.ship import Shipper
from expstore.disk import message_socket
from expstore.errors import LockedError, RemoteError, StateError
from expstore.storages.format.paths import SHIP_REQUEST
from tests.support.batches import episode_rows
from tests.support.waits import wait_until

if TYPE_CHECKING:
    from tests.conftest import Cli
    from tests.support.s3_server import S3Server

pytestmark = pytest.mark.usefixtures("no_syncs", "no_index_on_close")

Buffer = expstore.TensorDictReplayBuffer

_WRITER = """
import sys, expstore
from tests.support.batches import episode_rows
with expstore.open(sys.argv[1], seed=0) as rb:
    rb.extend(episode_rows(20, length=10))
    print("open", flush=True)
    sys.stdin.read()
"""


def _restore(path: Path, url: str) -> list[int]:
    with expstore.open(path, ship=Ship(url, every=3600.0)) as rb:
        return rb[:]["number"].tolist()  # type: ignore[no-any-return]


@pytest.mark.guarantee(
    "ship/request",
    "`expstore ship` makes the process that writes to a store ship it until it closes it.",
)
def test_a_running_writer_ships_when_it_is_asked(
    rb: Buffer, tmp_path: Path, server: S3Server, url: str, cli: Cli
) -> None:
    path = tmp_path / "run.exp"
    told = cli("ship", str(path), url, "--json").json["shipped"]
    assert (told["url"], told["rows"], told["rows_behind"]) == (url, 50, 0)
    rb.extend(episode_rows(10, start=50, length=10))
    assert cli("ship", str(path), url).out.startswith(f"{path}: all 60 rows are at {url}")
    again = cli("ship", str(path), f"{url}-other")
    assert again.code != 0
    assert f"is already shipped to {url}" in again.err
    rb.extend(episode_rows(10, start=60, length=10))
    rb.close()  # ships the rest
    assert not (path / SHIP_REQUEST).exists()
    assert expstore.maintenance.verify(path) == []
    assert _restore(tmp_path / "restored.exp", url) == list(range(70))


def test_the_command_gets_the_writers_error_and_the_writer_continues(
    rb: Buffer, tmp_path: Path, server: S3Server, url: str
) -> None:
    with expstore.open(tmp_path / "other.exp", ship=Ship(url, every=3600.0)) as other:
        other.extend(episode_rows(5))
    with pytest.raises(StateError, match="has another store") as caught:
        ship_request.ask_writer(tmp_path / "run.exp", url)
    assert caught.value.kind == "mismatch"
    assert rb.stats()["shipped"] is None
    assert rb.extend(episode_rows(10, start=50, length=10)) is not None
    assert ship_request.ask_writer(tmp_path / "run.exp", f"{url}-2")["rows"] == 60
    with pytest.raises(StateError, match="s3://"):
        ship_request.ask_writer(tmp_path / "run.exp", "file:///tmp")


def test_requests_of_dead_commands_and_of_other_users_are_dropped(
    rb: Buffer, tmp_path: Path, server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = tmp_path / "run.exp" / SHIP_REQUEST
    for content in (b"expstore-of-a-dead-command", b"", b"\xff\x00", b"x" * 10_000):
        request.write_bytes(content)
        wait_until(lambda: not request.exists())
    monkeypatch.setattr(ship_request, "CONNECT_SECONDS", 1.0)
    monkeypatch.setattr(message_socket, "_is_own", lambda sock: False)
    with pytest.raises(LockedError, match="did not answer within 1 seconds"):
        ship_request.ask_writer(tmp_path / "run.exp", url)
    assert rb.stats()["shipped"] is None
    assert server.requests == []


def test_a_writer_that_takes_no_requests_is_named(
    rb: Buffer, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rb.storage.writer().holders.take_requests = None
    monkeypatch.setattr(ship_request, "CONNECT_SECONDS", 0.5)
    with pytest.raises(LockedError, match="did not answer") as caught:
        ship_request.ask_writer(tmp_path / "run.exp", url)
    assert "open the store there with" in caught.value.hint
    assert not (tmp_path / "run.exp" / SHIP_REQUEST).exists()


def test_a_store_that_is_closed_while_its_address_is_claimed_is_not_shipped(
    rb: Buffer, tmp_path: Path, server: S3Server, url: str
) -> None:
    reached, closed = threading.Event(), threading.Event()

    def before(request: object) -> None:
        reached.set()
        assert closed.wait(60)

    server.before = before
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            ship_request.ask_writer(tmp_path / "run.exp", url)
        except StateError as exc:
            errors.append(exc)

    command = threading.Thread(target=ask)
    command.start()
    assert reached.wait(60)
    rb.close()
    closed.set()
    command.join()
    assert "closed" in str(errors[0])
    assert "expstore-ship" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.filterwarnings("ignore:.*was forgotten without close:ResourceWarning")
def test_a_store_can_be_dropped_while_a_command_waits(
    tmp_path: Path, server: S3Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    over, told = threading.Event(), list[dict[str, object]]()
    monkeypatch.setattr(Shipper, "wait", lambda self, seconds: over.wait(60))
    rb = expstore.open(tmp_path / "run.exp", seed=0)
    rb.extend(episode_rows(20, length=10))
    kept = weakref.ref(rb.storage)
    command = threading.Thread(target=lambda: told.append(ship_request.ask_writer(tmp_path / "run.exp", url)))
    command.start()
    wait_until(lambda: (store := kept()) is not None and store.holders.shipping is not None)
    del rb
    wait_until(lambda: (gc.collect(), kept())[1] is None)
    over.set()
    command.join()
    assert told[0]["url"] == url
    assert _restore(tmp_path / "restored.exp", url) == list(range(20))


@pytest.mark.slow
def test_a_writer_that_is_killed_while_it_ships_is_no_success(
    tmp_path: Path, server: S3Server, url: str, cli: Cli
) -> None:
    path = tmp_path / "run.exp"
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"open\n"

    def before(request: object) -> None:
        writer.kill()

    server.before = before
    with pytest.raises(RemoteError, match="has ended"):
        ship_request.ask_writer(path, url)
    writer.communicate()
    server.before = lambda request: None
    assert cli("ship", str(path), url).code == 0
    assert _restore(tmp_path / "restored.exp", url) == list(range(20))
