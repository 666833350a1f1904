"""Slow, silent and broken connections: each ends in time and blocks no other client."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from expstore.api import Settings
from expstore.api.gateway import JSON_BYTES
from tests.support.asgi import api_client
from tests.support.batches import numbered_rows
from tests.support.servers import Serving
from tests.support.stores import build_store
from tests.support.waits import wait_until

HEAD, BODY, IDLE, ANSWER = 0.6, 1.0, 1.0, 1.0
#: Of what has to end after a deadline; the machine may be busy.
PATIENCE = 60.0
POST = b"POST /v1/stores/run/extend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    settings = Settings(
        path=tmp_path_factory.mktemp("runs"), head_seconds=HEAD, body_seconds=BODY, idle_seconds=IDLE,
        answer_seconds=ANSWER, connections=600, max_body=1 << 20,
    )  # fmt: skip
    with Serving(settings) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        client.put("/v1/stores/run", json={"fields": {"x": "int64"}})
        assert client.post("/v1/stores/run/extend", json={"x": list(range(10_000))}).status_code == 200
        yield server
        assert client.get("/v1/stores/run").json()["rows"] == 10_000


def connect(server: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), PATIENCE)


def read_until_closed(one: socket.socket, more: Callable[[], bytes] = bytes) -> tuple[bytes, float]:
    """Read until the other side ends, sending a byte now and then; return what came, and after how long."""
    began, found = time.monotonic(), b""
    while time.monotonic() - began < PATIENCE:
        ready, _, _ = select.select([one], [], [], 0.05)
        try:
            if ready:
                part = one.recv(1 << 16)
                if not part:
                    return found, time.monotonic() - began
                found += part
            one.sendall(more())
        except (ConnectionResetError, BrokenPipeError):
            return found, time.monotonic() - began
    raise AssertionError("the connection stays open")


def ask(one: socket.socket) -> None:
    """Ask whether the server lives; it does."""
    one.sendall(GET)
    found = b""
    while not found.endswith(b'{"status":"ok"}'):
        part = one.recv(1 << 16)
        assert part, found
        found += part
    assert found.startswith(b"HTTP/1.1 200"), found


def error_in(answer: bytes) -> tuple[int, dict[str, str]]:
    """Return the last answer's status and error."""
    assert b"\r\n\r\n{" in answer, answer
    head, _, body = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    error: dict[str, str] = json.loads(body)["error"]
    assert set(error) == {"kind", "message", "hint"}
    return int(head.split()[1]), error


# -- heads ---------------------------------------------------------------------------------------------


@pytest.mark.guarantee("access/limits")
@pytest.mark.parametrize(
    ("first", "more"),
    [(b"", b""), (b"G", b""), (b"GET /healthz HTTP/1.1\r\nHost: local", b""), (GET[:-2], b"a"),
     (GET[:-2] + b"X: ", b"y")],
    ids=["no byte", "one byte", "half a head", "a byte now and then", "a long field"],
)  # fmt: skip
def test_a_head_has_its_deadline(server: Serving, first: bytes, more: bytes) -> None:
    with connect(server) as one:
        one.sendall(first)
        _, seconds = read_until_closed(one, lambda: more)
    assert seconds > HEAD * 0.9


@pytest.mark.slow
def test_the_next_head_has_its_deadline(server: Serving) -> None:
    """Bytes behind an answer do not put it off, whether they are a head or not."""
    with connect(server) as one:
        ask(one)
        _, seconds = read_until_closed(one)
        assert seconds > IDLE * 0.9
    with connect(server) as one:
        ask(one)
        one.sendall(b"GET /healthz HTT")
        found, seconds = read_until_closed(one, lambda: b"P")
        assert seconds > HEAD * 0.9
        assert b"200" not in found


@pytest.mark.slow
def test_many_requests_share_a_connection(server: Serving) -> None:
    with connect(server) as one:
        began = time.monotonic()
        while time.monotonic() - began < 2 * HEAD:  # the deadline is each head's, not the connection's
            ask(one)
        one.sendall(GET * 5)
        found, _ = read_until_closed(one)
        assert found.count(b"HTTP/1.1 200") == 5


def test_invalid_http_gets_an_error_of_the_usual_form(server: Serving) -> None:
    bad = [
        b"NONSENSE\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",  # no host
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 20_000,
        b"GET /" + b"x" * 20_000,
        POST + b"Content-Length: -1\r\n\r\n",
        POST + b"Content-Length: 1e3\r\n\r\n",
        POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n",
        POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello-and-more\r\n",
        bytes(range(256)),
    ]
    for sent in bad:
        with connect(server) as one:
            one.sendall(sent)
            found, seconds = read_until_closed(one)
        assert error_in(found)[0] in (400, 501), sent[:100]
        assert seconds < HEAD
        assert found.count(b"HTTP/1.1") == 1


# -- bodies --------------------------------------------------------------------------------------------


@pytest.mark.guarantee("access/limits")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "dribbling"),
    [(b"extend", False), (b"extend", True), (b"rows", False), (b"rows", True), (b"sql", False)],
)
def test_a_body_has_its_deadline(server: Serving, path: bytes, dribbling: bool) -> None:
    """Whoever reads it, a route or FastAPI; each part has a tenth of the time."""
    with connect(server) as one:
        one.sendall(POST.replace(b"extend", path) + b"Content-Length: 100000\r\n\r\n[")
        found, seconds = read_until_closed(one, lambda: b"1" if dribbling else b"")
    assert error_in(found) == (
        408,
        {"kind": "timeout", "message": "the body did not arrive in time", "hint": ""},
    )
    assert (BODY if dribbling else BODY / 10) * 0.9 < seconds


@pytest.mark.guarantee("access/bodies")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "chunked"),
    [(b"extend", False), (b"extend", True), (b"rows", False), (b"rows", True), (b"flush", False)],
)
def test_a_body_may_only_be_so_long(tmp_path: Path, path: bytes, chunked: bool) -> None:
    build_store(tmp_path / "run.exp", numbered_rows(3, key="x"))
    head = POST.replace(b"extend", path)
    with Serving(Settings(path=tmp_path, max_body=1 << 20)) as server, connect(server) as one:
        if not chunked:
            one.sendall(head + b"Content-Length: 1048577\r\n\r\n")
            found, _ = read_until_closed(one)
        else:
            one.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            chunk = b"90000\r\n" + b" " * 0x90000 + b"\r\n"  # two are too much
            found, _ = read_until_closed(one, lambda: chunk)
    assert error_in(found)[0] == 413
    assert found.count(b"HTTP/1.1 ") == 1


def test_a_body_that_is_parsed_at_once_is_shorter(tmp_path: Path) -> None:
    with api_client(tmp_path) as client:
        client.put("/v1/stores/run", json={"fields": {"x": "int64"}})
        body = b" " * JSON_BYTES + b'{"x": [1]}'
        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/stores/run/rows", content=body, headers=headers).status_code == 413
        assert client.post("/v1/stores/run/rows", content=iter([body]), headers=headers).status_code == 413
        assert client.post("/v1/stores/run/add", content=body, headers=headers).status_code == 200


@pytest.mark.slow
def test_the_rest_of_a_refused_body_is_read_for_a_while(server: Serving) -> None:
    """A client that sends all before it reads still gets its answer; one that never ends does not stay."""
    with connect(server) as one:
        one.sendall(POST + b"Content-Length: 4000000\r\n\r\n" + b" " * 4_000_000)
        answer = b""
        while not answer.endswith(b"}}"):
            answer += one.recv(1 << 16)
        assert error_in(answer)[0] == 413
        ask(one)
    with connect(server) as one:
        one.sendall(POST.replace(b"localhost", b"evil.example") + b"Content-Length: 100000\r\n\r\n")
        found, seconds = read_until_closed(one, lambda: b" ")
        assert error_in(found)[1]["kind"] == "host"
        assert seconds > 1


@pytest.mark.guarantee("access/bodies")
def test_half_a_body_stores_nothing(server: Serving) -> None:
    body = json.dumps({"x": list(range(100))}).encode()
    lacking = POST + b"Content-Length: %d\r\n\r\n" % (len(body) + 1) + body
    unended = POST + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % len(body) + body + b"\r\n"
    for sent in (lacking, unended):
        for ended in (False, True):
            with connect(server) as one:
                one.sendall(sent)
                if ended:
                    one.shutdown(socket.SHUT_WR)
    wait_until(lambda: not server.connections)


# -- answers -------------------------------------------------------------------------------------------


@pytest.mark.guarantee("access/limits")
@pytest.mark.slow
@pytest.mark.parametrize("asked", [
    (b"sample", b'{"batch_size": 100000}', 4), (b"sample/stream", b'{"batch_size": 1000}', 1)
], ids=["whole", "stream"])  # fmt: skip
def test_an_unread_answer_is_abandoned(server: Serving, asked: tuple[bytes, bytes, int]) -> None:
    path, body, times = asked
    head = POST.replace(b"extend", path) + b"Content-Length: %d\r\n\r\n" % len(body)
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(PATIENCE)
        one.connect(("127.0.0.1", server.port))
        one.sendall((head + body) * times)
        wait_until(lambda: any(each.transport.get_write_buffer_size() for each in server.connections))
        wait_until(lambda: not server.connections)


@pytest.mark.slow
def test_an_answer_that_is_taken_slowly_comes_whole(server: Serving) -> None:
    body = b'{"batch_size": 400000}'
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        one.settimeout(PATIENCE)
        one.connect(("127.0.0.1", server.port))
        one.sendall(POST.replace(b"extend", b"sample") + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        head = one.recv(4096).lower()
        length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
        found, began = len(head) - head.index(b"\r\n\r\n") - 4, time.monotonic()
        while found < length:
            part = len(one.recv(1 << 17))
            assert part, f"closed after {found} of {length} bytes"
            found += part
            while time.monotonic() - began < 3 * ANSWER * found / length:
                pass
        assert time.monotonic() - began > 2 * ANSWER


# -- crowds --------------------------------------------------------------------------------------------


@pytest.mark.guarantee("access/limits")
def test_idle_connections_block_no_others(server: Serving) -> None:
    crowd = [connect(server) for _ in range(500)]
    try:
        for one in crowd[::2]:
            one.sendall(b"POST /v1/st")
        began = time.monotonic()
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            for _ in range(20):
                assert client.post("/v1/stores/run/sample", json={"batch_size": 8}).status_code == 200
        assert time.monotonic() - began < 5
        wait_until(lambda: len(server.connections) < 2)  # all of them have had their time
    finally:
        for one in crowd:
            one.close()


def test_the_longest_idle_connection_makes_room(tmp_path: Path) -> None:
    settings = Settings(path=tmp_path, connections=20)
    with Serving(settings) as server:
        crowd = [connect(server) for _ in range(60)]
        try:
            with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
                assert client.get("/healthz").status_code == 200
            wait_until(lambda: len(server.connections) <= 20)
            for one in crowd[:30]:
                assert read_until_closed(one)[0] == b""
            ask(crowd[-1])
        finally:
            for one in crowd:
                one.close()
