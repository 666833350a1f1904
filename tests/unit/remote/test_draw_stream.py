"""Draws over one connection that stays open: the same batches, whatever happens to the connection."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import expstore
from expstore.api import Settings
from expstore.errors import NotReadyError, RemoteError, StateError
from expstore.remote import RemoteReplayBuffer, Retries, draw_stream
from expstore.remote.http_member import HttpMember
from tests.support.arrow_bodies import batch_of
from tests.support.forks import forked
from tests.support.servers import Serving
from tests.support.tcp_proxy import Proxy
from tests.support.waits import wait_until

SOON = Retries(seconds=20, first=0.01, longest=0.05, seed=3)
SAMPLER = {"kind": "prioritized"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Serving]:
    with expstore.open(folder / "run.exp", seed=1) as rb:
        rb.extend(batch_of(200))
    with Serving(Settings(path=folder)) as server:
        yield server


@pytest.fixture(autouse=True)
def requests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list with an entry for each draw that took a request of its own."""
    made: list[int] = []
    request = HttpMember._request

    def count(self: HttpMember, *arguments: Any) -> Any:
        made.append(1)
        return request(self, *arguments)

    monkeypatch.setattr(HttpMember, "_request", count)
    return made


def connect(port: int, **options: Any) -> RemoteReplayBuffer:
    options = {"batch_size": 16, "seed": 7, "sampler": SAMPLER, "retries": SOON} | options
    return expstore.connect(f"http://127.0.0.1:{port}/run", **options)


def draw(rb: RemoteReplayBuffer, count: int) -> list[list[int]]:
    return [rb.sample()["id"].tolist() for _ in range(count)]


@pytest.fixture
def wanted(server: Serving, monkeypatch: pytest.MonkeyPatch, requests: list[int]) -> list[list[int]]:
    """Return the batches that requests draw."""
    with monkeypatch.context() as patch:
        patch.setattr(draw_stream, "_FIRST", 1000)
        with connect(server.port) as rb:
            found = draw(rb, 12)
    assert len(requests) == 12
    requests.clear()
    return found


def test_the_third_draw_opens_the_connection(
    server: Serving, requests: list[int], wanted: list[list[int]]
) -> None:
    with connect(server.port) as rb:
        assert draw(rb, 12) == wanted
        assert rb.sample(as_numpy=True)["priority_weight"].shape == (16,)
    assert len(requests) == 2


@pytest.mark.guarantee("server/streams")
@pytest.mark.parametrize("trouble", ["cut", "half", "answer", "refuse"])
def test_a_broken_connection_loses_no_draw(
    server: Serving, requests: list[int], wanted: list[list[int]], trouble: str
) -> None:
    """The third connection is that of draws: two were opened for requests, by `connect` and by `sample`."""
    broken = {number for number in range(1, 30) if trouble != "cut" and number % 2}
    with (
        Proxy(server.port, lambda number: trouble if number in broken else "") as proxy,
        connect(proxy.port) as rb,
    ):
        found = draw(rb, 6)
        if trouble == "cut":
            proxy.cut()
        assert found + draw(rb, 6) == wanted
    assert len(requests) > 2


def test_a_proxy_that_collects_bodies_gets_requests(
    server: Serving, requests: list[int], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draw_stream, "_OPENING_SECONDS", 0.1)
    silent = socket.create_server(("127.0.0.1", 0))
    with silent, connect(server.port) as rb:
        connection = rb.member.connection
        open_draws = connection.open_draws
        opened: list[int] = []

        def go_elsewhere(*arguments: Any, **options: Any) -> None:
            opened.append(1)
            address = connection.address
            connection.address = type(address)(f"http://127.0.0.1:{silent.getsockname()[1]}", address.name)
            try:
                open_draws(*arguments, **options)
            finally:
                connection.address = address

        monkeypatch.setattr(connection, "open_draws", go_elsewhere)
        assert draw(rb, 12) == wanted
        assert len(opened) == 1  # it is not asked for again at once
    assert len(requests) == 12


def test_a_batch_that_cannot_be_drawn_says_why(server: Serving, folder: Path) -> None:
    expstore.open(folder / "empty.exp").close()
    with expstore.connect(f"http://127.0.0.1:{server.port}/empty", batch_size=4) as rb:
        for _ in range(5):
            with pytest.raises(NotReadyError, match="empty"):
                rb.sample()
        rb.extend(batch_of(10))
        assert len(rb.sample()) == len(rb.sample()) == 4


def test_new_fields_come_with_the_next_batch(tmp_path: Path, requests: list[int]) -> None:
    with Serving(Settings(path=tmp_path)) as server:
        httpx.put(f"{server.url}/v1/stores/run", json={}, timeout=60).raise_for_status()
        with expstore.connect(f"http://127.0.0.1:{server.port}/run", batch_size=4) as rb:
            rb.extend(batch_of(10))
            assert all("extra" not in rb.sample().keys() for _ in range(5))  # noqa: SIM118
            made = len(requests)
            local = server.app.state.stores.get("run").rb
            local.columns.add("extra", fill=0.5)
            assert "extra" in rb.sample().keys()  # noqa: SIM118 - a TensorDict yields values
            assert len(requests) == made + 1
            rb.sample()
            assert len(requests) == made + 1


def test_threads_share_a_buffer(server: Serving) -> None:
    with connect(server.port) as rb, ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: tuple(rb.sample()["id"].tolist()), range(80)))
    with connect(server.port) as rb:
        alone = [tuple(ids) for ids in draw(rb, 80)]
    assert sorted(found) == sorted(alone)


def test_a_forked_child_draws_over_a_connection_of_its_own(server: Serving, wanted: list[list[int]]) -> None:
    with connect(server.port) as rb:
        assert draw(rb, 6) == wanted[:6]
        with forked(lambda: draw(rb, 4)) as drawn:
            assert drawn() == wanted[6:10]
        assert draw(rb, 6) == wanted[6:]


@pytest.mark.guarantee("server/streams")
def test_an_answer_that_is_not_taken_does_not_become_the_next_one(
    server: Serving, wanted: list[list[int]]
) -> None:
    """As after Ctrl-C between the two. With other fields than before the server would end the stream."""
    other = json.dumps({"batch_size": 3, "sampler": SAMPLER, "seed": 1, "draw": 0})
    with connect(server.port) as rb:
        found = draw(rb, 4)
        assert rb.member._stream.ask(other.encode())
        assert found + draw(rb, 8) == wanted


def test_closing_wakes_a_thread_that_waits(tmp_path: Path) -> None:
    settings = Settings(path=tmp_path, samples_per_insert=1.0, error_buffer=64.0)
    with Serving(settings) as server:
        httpx.put(f"{server.url}/v1/stores/run", json={}, timeout=60).raise_for_status()
        rb = expstore.connect(f"{server.url}/run", batch_size=16, wait=60)
        rb.extend(batch_of(60))
        with ThreadPoolExecutor(1) as pool:
            drawing = pool.submit(draw, rb, 20)
            wait_until(
                lambda: rb.member._stream._asking is not None and rb.stats()["rate_limiter"] is not None
            )
            rb.close()
            with pytest.raises(StateError):
                drawing.result(60)


def test_one_attempt_is_one_attempt(server: Serving) -> None:
    """A connection that repeats nothing says that there was no answer in time."""
    with connect(server.port, retries=Retries(seconds=0)) as rb:
        draw(rb, 4)
        stream = rb.member._stream._link
        assert stream._download is not None

        def wait_in_vain() -> Any:
            raise TimeoutError("timed out")
            yield

        stream._frames = wait_in_vain()
        with pytest.raises(RemoteError, match="timed out"):
            rb.sample()


def test_an_idle_connection_ends_and_delays_neither_deletion_nor_shutdown(
    tmp_path: Path, requests: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    with Serving(Settings(path=tmp_path, idle_seconds=0.2)) as server:
        for name in ("run", "other"):
            httpx.put(f"{server.url}/v1/stores/{name}", json={}, timeout=60).raise_for_status()
        with expstore.connect(f"{server.url}/run", batch_size=4) as writer:
            writer.extend(batch_of(10))
        rb = expstore.connect(f"{server.url}/run", batch_size=4)
        for _ in range(4):
            rb.sample()
        made, in_flight = len(requests), server.app.state.metrics.in_flight
        wait_until(lambda: in_flight._value.get() == 0)
        assert len(rb.sample()) == 4
        assert len(requests) == made + 1
        assert len(rb.sample()) == 4
        answer = httpx.delete(f"{server.url}/v1/stores/run", params={"confirm": "run"}, timeout=60)
        assert answer.status_code == 200, answer.text
        rb.close()
        other = expstore.connect(f"{server.url}/other", batch_size=4)
        other.extend(batch_of(10))
        for _ in range(4):
            other.sample()
    assert "Cancel" not in caplog.text
    other.close()


def test_a_draw_waits_once(
    server: Serving, folder: Path, monkeypatch: pytest.MonkeyPatch, requests: list[int]
) -> None:
    """The request after an answer that did not come asks for the rest of the time only."""
    waits: list[float] = []
    request = HttpMember._request

    def note(self: HttpMember, draw: Any, rows: int, wait: float) -> Any:
        waits.append(wait)
        return request(self, draw, rows, wait)

    expstore.open(folder / "waits.exp").close()
    with expstore.connect(f"http://127.0.0.1:{server.port}/waits", batch_size=4, wait=0.2) as rb:
        rb.extend(batch_of(10))
        for _ in range(4):
            rb.sample()
        server.app.state.stores.get("waits").rb.empty()
        monkeypatch.setattr(HttpMember, "_request", note)
        with pytest.raises(NotReadyError):
            rb.sample()
        with pytest.raises(NotReadyError):
            next(rb.stream())
    assert waits == [0.0, 0.0]
