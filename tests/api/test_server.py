"""The server as a separate process: its address, its shutdown, and which data it keeps."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from pathlib import Path

import httpx
import pytest

import expstore
from expstore.api import Settings
from expstore.api.server import ServerThread, local_url
from expstore.cli.app import run
from expstore.errors import LockedError
from expstore.wire.stream import END
from tests.support.arrow_bodies import ACCEPT_ARROW
from tests.support.asgi import api_client
from tests.support.batches import numbered_rows
from tests.support.servers import process, serving
from tests.support.stores import build_store

pytestmark = pytest.mark.index

PATIENCE = 60.0


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, str]]:
    """Run the command in this process, which it does not outlive; return its exit code and its error."""
    code = run(["serve", *map(str, arguments), "--json"])
    error: dict[str, str] = json.loads(capsys.readouterr().out)["error"]
    return code, error


def write_limits(folder: Path, seconds: int) -> Path:
    """Write a file of limits that says how long running requests have at the end; return it."""
    path = folder / "limits.toml"
    path.write_text(f"shutdown_seconds = {seconds}\n")
    return path


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), PATIENCE).close()
    except OSError:
        return False
    return True


def has_name() -> bool:
    """Return whether a server can listen on this machine's name."""
    try:
        socket.create_server((socket.gethostname(), 0)).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("read_only", [False, True])
def test_the_first_request_changes_no_filters_of_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    """They belong to the whole process, in which other threads warn or rely on them."""

    def change_filters(*_: object, **__: object) -> None:
        raise AssertionError("the filters are changed")

    with api_client(tmp_path, read_only=read_only) as client, monkeypatch.context() as patched:
        patched.setattr("warnings.catch_warnings", change_filters)
        assert client.get("/v1/stores").status_code == 200


@pytest.mark.guarantee(
    "server/end",
    "SIGTERM and SIGINT end the server in time, whatever clients do, and close its stores.",
)
@pytest.mark.slow
def test_a_folder_is_served_until_a_signal_comes(tmp_path: Path) -> None:
    build_store(tmp_path / "old.exp", numbered_rows(10, key="x"))
    with serving(tmp_path) as (child, facts):
        assert facts["stores"] == ["old"]
        assert (facts["read_only"], facts["token"], facts["pid"]) == (False, False, child.pid)
        with httpx.Client(base_url=facts["listening"], timeout=60) as client:
            assert client.get("/v1/stores/old").json()["rows"] == 10
            client.put("/v1/stores/new", json={"fields": {"x": "int64"}})
            assert client.post("/v1/stores/new/extend", json={"x": [1, 2]}).json()["count"] == 2
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=PATIENCE)
        assert (child.returncode, json.loads(out), err) == (0, {"stopped": True}, "")
    for name, rows in (("old", 10), ("new", 2)):
        with expstore.open(tmp_path / f"{name}.exp") as rb:
            assert len(rb) == rows
            assert not rb.recovered  # it was closed, not left


def test_others_are_answered_if_they_have_the_token(tmp_path: Path) -> None:
    build_store(tmp_path / "run.exp", numbered_rows(10, key="x"))
    token = tmp_path / "token"
    token.write_bytes(b"  secret-1 \n")
    token.chmod(0o644)
    options = ("--host", "0.0.0.0", "--port", 0, "--token-file", token, "--access-log")
    with process(tmp_path / "run.exp", *options) as child:
        assert child.stdout is not None
        line = child.stdout.readline()
        said = line.split()[-1]
        assert line == f"serving {tmp_path}/run.exp at {said}\n"
        url = said.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/stores", timeout=60).status_code == 401
        borne = {"Authorization": "Bearer secret-1"}
        assert httpx.get(f"{url}/v1/stores/run", headers=borne, timeout=60).json()["rows"] == 10
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=PATIENCE)
    assert (child.returncode, out) == (0, "")
    warning, *lines = err.splitlines()
    assert f"can read {token}: chmod 600" in warning
    assert [json.loads(line)["status"] for line in lines] == [401, 200]
    assert "secret-1" not in err


def test_a_local_url_names_an_address() -> None:
    for host, local in (("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]"), ("10.0.0.0", "10.0.0.0")):
        assert local_url(f"http://{host}:8420") == f"http://{local}:8420"


NAMED = pytest.param(socket.gethostname(), marks=pytest.mark.skipif(not has_name(), reason="no address"))


@pytest.mark.parametrize("host", ["0.0.0.0", NAMED])
def test_a_store_that_is_served_at_all_addresses_or_by_a_name_is_backed_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    build_store(tmp_path / "runs" / "run.exp", numbered_rows(10, key="x"))
    token = tmp_path / "token"
    token.write_text("secret-1")
    token.chmod(0o600)
    server = ServerThread(Settings(path=tmp_path / "runs", token=b"secret-1"), host=host, port=0)
    try:
        address = server.listening.url.replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(
            f"{address}/v1/stores/run", headers={"Authorization": "Bearer secret-1"}, timeout=60
        ).is_success
        store = str(tmp_path / "runs" / "run.exp")
        assert run(["versions", "create", store, "--token-file", str(token)]) == 0, capsys.readouterr().err
    finally:
        server.stop()
    with expstore.open(tmp_path / "runs" / "run.exp" / "versions", version=1) as rb:
        assert len(rb) == 10


@pytest.mark.guarantee("access/tokens")
def test_unservable_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refusal(capsys, tmp_path / "none") == (2, {
        "kind": "not_found", "message": f"{tmp_path}/none is neither a store nor a folder of stores",
        "hint": "create it first",
    })  # fmt: skip
    code, error = refusal(capsys, tmp_path, "--host", "0.0.0.0", "--port", 0)
    assert (code, error["kind"]) == (2, "unprotected")
    code, error = refusal(capsys, tmp_path, "--host", "no.such.name.invalid")
    assert (code, error["kind"]) == (2, "address")
    assert refusal(capsys, tmp_path, "--samples-per-insert", 2)[0] == 2
    for name in [one for one in os.environ if one.startswith("AWS_")]:
        monkeypatch.delenv(name)
    code, error = refusal(capsys, tmp_path, "--ship", "s3://bucket/runs")
    assert (code, error["kind"]) == (1, "unauthorized")
    with socket.create_server(("127.0.0.1", 0)) as other:
        code, error = refusal(capsys, tmp_path, "--port", other.getsockname()[1])
    assert (code, error["kind"]) == (2, "address")


def test_files_without_a_token_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    token = tmp_path / "token"
    for bad in (b"", b" \n ", b"two words", b"caf\xc3\xa9", b"nul\x00"):
        token.write_bytes(bad)
        code, error = refusal(capsys, tmp_path, "--token-file", token)
        assert (code, error["kind"]) == (2, "token"), bad
        assert bad.decode().strip() == "" or bad.decode() not in json.dumps(error)
    code, error = refusal(capsys, tmp_path, "--token-file", tmp_path / "missing")
    assert (code, error["kind"]) == (2, "not_found")
    assert "openssl rand" in error["hint"]


def test_a_store_with_a_writer_is_followed_or_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.exp"
    with expstore.open(path) as rb:
        rb.extend(numbered_rows(3, key="x"))
        code, error = refusal(capsys, path, "--port", 0)
        assert (code, error["kind"]) == (3, "locked")
        with (
            serving(path, "--read-only") as (_, facts),
            httpx.Client(base_url=facts["listening"], timeout=60) as client,
        ):
            assert facts["read_only"]
            assert client.get("/v1/stores/run").json()["rows"] == 3
            assert client.post("/v1/stores/run/extend", json={"x": [1]}).status_code in (404, 405)


@pytest.mark.guarantee("server/end")
@pytest.mark.slow
def test_a_client_that_holds_a_half_body_does_not_keep_it(tmp_path: Path) -> None:
    build_store(tmp_path / "run.exp", numbered_rows(10, key="x"))
    head = b"POST /v1/stores/run/extend HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving(tmp_path, "--limits", write_limits(tmp_path, 1)) as (child, facts):
        port = int(facts["listening"].rsplit(":")[-1])
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as half:
            half.sendall(head + b"Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n")
            assert half.recv(100).startswith(b"HTTP/1.1 100")  # its route waits for the body now
            half.sendall(b'{"x": [1')
            child.send_signal(signal.SIGTERM)
            answer = b"".join(iter(lambda: half.recv(1000), b""))
            out, err = child.communicate(timeout=PATIENCE)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"kind":"busy"' in answer
        assert (child.returncode, json.loads(out)) == (0, {"stopped": True}), err
    with expstore.open(tmp_path / "run.exp") as rb:
        assert len(rb) == 10
        assert not rb.recovered


def test_a_stream_without_an_end_keeps_no_server(tmp_path: Path) -> None:
    build_store(tmp_path / "run.exp", numbered_rows(10, key="x"))
    with serving(tmp_path, "--limits", write_limits(tmp_path, 1000)) as (child, facts):
        with httpx.Client(base_url=facts["listening"], timeout=PATIENCE) as client:
            path, asked = "/v1/stores/run/sample/stream", {"batch_size": 4}
            with client.stream("POST", path, json=asked, headers=ACCEPT_ARROW) as endless:
                parts = endless.iter_raw()
                last = next(parts)
                child.send_signal(signal.SIGTERM)
                for part in parts:
                    last = (last + part)[-len(END) :]
        assert last != END  # who reads it sees that more was to come
        out, err = child.communicate(timeout=PATIENCE)
        assert (child.returncode, json.loads(out)) == (0, {"stopped": True}), err


@pytest.mark.slow
def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    build_store(tmp_path / "run.exp", numbered_rows(10, key="x"))
    with serving(tmp_path, "--limits", write_limits(tmp_path, 1000)) as (child, facts):
        port = int(facts["listening"].rsplit(":")[-1])
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as half:
            half.sendall(
                b"POST /v1/stores/run/rows HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\n"
                b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
            )
            assert half.recv(100).startswith(b"HTTP/1.1 100")
            child.send_signal(signal.SIGTERM)
            while listens(port):  # then the first signal has been taken
                pass
            assert child.poll() is None
            child.send_signal(signal.SIGTERM)
            assert child.wait(PATIENCE) == -signal.SIGTERM


@pytest.mark.guarantee(
    "server/rows",
    "Writes and facts that a server acknowledged survive `kill -9`, and exist once; so do those of "
    "shards, also on Ray.",
)
@pytest.mark.slow
def test_acknowledged_rows_survive_a_kill(tmp_path: Path) -> None:
    with serving(tmp_path) as (child, facts), httpx.Client(base_url=facts["listening"], timeout=60) as client:
        client.put("/v1/stores/run", json={"fields": {"x": "int64"}})
        acknowledged = 0
        enough = threading.Event()
        killer = threading.Thread(target=lambda: (enough.wait(), child.kill()), daemon=True)
        killer.start()
        try:
            while True:
                rows = list(range(acknowledged, acknowledged + 7))
                answer = client.post("/v1/stores/run/extend", json={"x": rows})
                acknowledged += answer.json()["count"]
                if acknowledged > 700:
                    enough.set()  # the kill comes at any moment of the next requests
        except httpx.TransportError:
            killer.join()
        assert child.wait(PATIENCE) == -signal.SIGKILL
    assert acknowledged > 700
    with expstore.open(tmp_path / "run.exp") as rb:
        values = rb[:]["x"].tolist()
    assert values[:acknowledged] == list(range(acknowledged))
    assert len(values) in (acknowledged, acknowledged + 7)


def test_answers_wait_for_nothing(tmp_path: Path) -> None:
    took = 1.0
    with serving(tmp_path) as (_, facts), httpx.Client(base_url=facts["listening"], timeout=60) as client:
        # A head that waits for the acknowledgement of what was sent before takes 40 ms, each time.
        while took > 0.03:
            started = time.perf_counter()
            client.get("/healthz")
            took = time.perf_counter() - started


@pytest.mark.slow
def test_others_that_want_to_write_are_told_who_serves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second server of a folder, one of a store that is open, and `expstore versions create`."""
    folder = tmp_path / "runs"
    folder.mkdir()
    build_store(folder / "run.exp")
    with serving(folder) as (child, told):
        url, who = told["listening"], f"process {child.pid} on "
        code, error = refusal(capsys, folder, "--port", 0)
        assert (code, error["kind"]) == (3, "locked")
        assert error["message"].startswith(f"cannot open {folder} for writing: {who}")
        assert error["message"].endswith(f"and serves it at {url}")
        assert httpx.get(f"{url}/v1/stores/run", timeout=60).status_code == 200  # opens the store
        code, error = refusal(capsys, folder / "run.exp", "--port", 0)
        assert (code, error["kind"]) == (3, "locked")
        assert error["message"].endswith(f"and serves it at {url}/run")
        assert run(["versions", "create", str(folder / "run.exp"), str(tmp_path / "backup"), "--json"]) == 3
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["message"].startswith(f"{url}/run serves ")
        assert error["hint"] == f"leave PATH and --keep out: expstore versions create {folder / 'run.exp'}"
        assert run(["versions", "create", str(folder / "run.exp"), "--json"]) == 0
        made = json.loads(capsys.readouterr().out)
        assert (made["number"], made["path"]) == (1, str(folder / "run.exp/versions/v0001"))
        assert run(["versions", "create", str(folder / "run.exp"), "--tag", "night"]) == 0
        assert capsys.readouterr().out.startswith("snapshot 2 (night): ")
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE) == 0
    settings = Settings(path=folder)
    server = ServerThread(settings, host="127.0.0.1", port=0)  # the folder is free again
    try:
        with pytest.raises(LockedError, match="this process"):
            ServerThread(settings, host="127.0.0.1", port=0)
        ServerThread(Settings(path=folder, read_only=True), host="127.0.0.1", port=0).stop()
    finally:
        server.stop()


@pytest.mark.slow
def test_clients_that_have_gone_leave_few_threads(tmp_path: Path) -> None:
    """Each database of DuckDB 2 starts eight threads by default: of the index, and of every condition."""
    rows = {"x": list(range(200))}
    with serving(tmp_path) as (_, told):
        for client_id in range(3):
            with httpx.Client(base_url=told["listening"], timeout=PATIENCE) as client:
                for name in "ab":
                    run_url = f"/v1/stores/{name}"
                    client.put(run_url, json={"fields": {"x": "int64"}})
                    headers = {"X-Session": f"actor-{client_id}"}
                    assert client.post(f"{run_url}/extend", json=rows, headers=headers).is_success
                    sampled = {"batch_size": 8, "where": f"x > {client_id}", "seed": client_id}
                    assert client.post(f"{run_url}/sample", json=sampled).is_success
                    assert client.get(f"{run_url}/summary").is_success
                    assert client.post(f"{run_url}/session/end", headers=headers).is_success
        text = httpx.get(f"{told['listening']}/metrics", timeout=60).text
        (threads,) = [line.split()[1] for line in text.splitlines() if line.startswith("process_threads ")]
    assert float(threads) <= 40
