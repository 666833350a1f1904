"""Deletion of stores over HTTP: guards, errors, and the state after a crash."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

import expstore
from expstore.api import Settings, create_app
from expstore.api.stores import Stores
from expstore.disk.files import Disk
from expstore.errors import StorageError
from tests.support.arrow_bodies import batch_of, post_rows
from tests.support.asgi import api_client, refusal_of
from tests.support.batches import numbered_rows
from tests.support.servers import Serving, serving
from tests.support.stores import build_store
from tests.support.waits import wait_until

pytestmark = pytest.mark.index

RUN = "/v1/stores/run"


@pytest.fixture
def app(tmp_path: Path) -> FastAPI:
    (tmp_path / "runs").mkdir()
    return create_app(Settings(path=tmp_path / "runs", wait_seconds=60))


@pytest.fixture
def client(app: FastAPI) -> Iterator[httpx.Client]:
    with api_client(app) as client:
        yield client


def delete(client: httpx.Client, name: str = "run") -> httpx.Response:
    return client.delete(f"/v1/stores/{name}", params={"confirm": name})


def make_store(path: Path) -> None:
    build_store(path, numbered_rows(3, key="x"))


@pytest.mark.slow
def test_a_store_goes_with_its_folder(client: httpx.Client, tmp_path: Path) -> None:
    """Also if samplers, SQL and the index have opened it in several ways."""
    client.put(RUN, json={"seed": 1}).raise_for_status()
    client.put("/v1/stores/other", json={}).raise_for_status()
    post_rows(client, 30).raise_for_status()
    client.put(f"{RUN}/samplers/pass", json={"sampler": {"kind": "without_replacement"}}).raise_for_status()
    client.post(f"{RUN}/sample", json={"sampler": "pass"}).raise_for_status()
    client.post(f"{RUN}/sql", json={"query": "SELECT count(*) FROM transitions"}).raise_for_status()
    assert delete(client).json() == {"name": "run"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["other.exp"]
    assert client.get("/v1/stores").json()["stores"] == ["other"]
    assert refusal_of(client.get(RUN)) == refusal_of(delete(client)) == (404, "not_found")
    client.put(RUN, json={}).raise_for_status()  # the name is free
    assert post_rows(client, 5).json()["first_id"] == 1


def test_a_store_that_the_server_has_not_opened(client: httpx.Client, tmp_path: Path) -> None:
    make_store(tmp_path / "runs" / "run.exp")
    make_store(tmp_path / "runs" / "plain")
    for name in ("run", "plain"):
        assert delete(client, name).status_code == 200
    assert list((tmp_path / "runs").iterdir()) == []


def test_the_name_is_repeated(client: httpx.Client, tmp_path: Path) -> None:
    make_store(tmp_path / "runs" / "run.exp")
    assert client.delete(RUN).status_code == 422
    for confirm in ("", "Run", "run.exp", "other", "run/"):
        refused = client.delete(RUN, params={"confirm": confirm})
        assert refusal_of(refused) == (400, "confirm")
    assert client.get(RUN).json()["rows"] == 3


def test_a_store_in_use_is_kept(app: FastAPI, tmp_path: Path) -> None:
    with Serving(app.state.settings, app) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        client.put(RUN, json={}).raise_for_status()
        post_rows(client, 300).raise_for_status()
        with client.stream("POST", f"{RUN}/sample/stream", json={"batch_size": 256}) as endless:
            parts = endless.iter_raw()
            next(parts)
            assert refusal_of(delete(client)) == (409, "in_use")
            post_rows(client, 5, 300).raise_for_status()  # the store is served as before
        with expstore.connect(f"{server.url}/run") as rb:
            rb.extend(batch_of(5, 305))
            assert refusal_of(delete(client)) == (409, "in_use")
            rb.extend(batch_of(5, 310))
        # the server has yet to see that the stream's client is gone
        wait_until(lambda: delete(client).status_code == 200)


def test_a_waiting_request_is_a_use(app: FastAPI, client: httpx.Client) -> None:
    client.put(RUN, json={"fields": {"x": "int64"}}).raise_for_status()
    (served,) = app.state.stores.open_now()
    run, began = served.run, threading.Event()

    async def run_noticed(act: object) -> object:
        began.set()
        return await run(act)

    served.run = run_noticed
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.post, f"{RUN}/sample", json={"batch_size": 1, "wait": 60})
        assert began.wait(60)
        assert refusal_of(delete(client)) == (409, "in_use")
        client.post(f"{RUN}/extend", json={"x": [1]}).raise_for_status()
        assert waiting.result(60).status_code == 200
    assert delete(client).status_code == 200


def test_a_store_of_another_writer_is_kept(client: httpx.Client, tmp_path: Path) -> None:
    with expstore.open(tmp_path / "runs" / "run.exp") as rb:
        rb.extend(numbered_rows(3))
        assert refusal_of(delete(client)) == (423, "locked")
        rb.extend(numbered_rows(3))
    assert client.get(RUN).json()["rows"] == 6


def test_nothing_else_is_deleted(client: httpx.Client, tmp_path: Path) -> None:
    runs, outside = tmp_path / "runs", tmp_path / "outside.exp"
    make_store(outside)
    (runs / "linked.exp").symlink_to(outside)
    (runs / "folder").mkdir()
    (runs / "file.exp").write_text("no store")
    before = sorted(tmp_path.rglob("*"))
    for name in ("linked", "folder", "file", "outside", "..%2foutside", "%2e%2e", "run", ".", "a%00"):
        confirm = {"confirm": "../outside" if "%2f" in name else name}
        assert client.delete(f"/v1/stores/{name}", params=confirm).status_code in (400, 404, 405), name
    # What lies outside is not deleted through links within a store either.
    make_store(runs / "run.exp")
    (runs / "run.exp" / "versions").symlink_to(outside)
    assert delete(client).status_code == 200
    assert sorted(tmp_path.rglob("*")) == before
    with expstore.open(outside, mode="r") as rb:
        assert len(rb) == 3


def test_who_may_delete(tmp_path: Path) -> None:
    make_store(tmp_path / "run.exp")
    tokens = {"token": b"writes", "read_token": b"reads"}
    for path, settings, token, status in (
        (tmp_path / "run.exp", {}, "", 409),
        (tmp_path, {"read_only": True}, "", 405),
        (tmp_path, tokens, "reads", 403),
        (tmp_path, tokens, "wrong", 401),
        (tmp_path, tokens, "writes", 200),
    ):
        with api_client(path, headers={"Authorization": f"Bearer {token}"}, **settings) as client:
            assert delete(client).status_code == status
            assert (tmp_path / "run.exp").exists() is (status != 200)


@pytest.mark.parametrize("act", ["rename", "sync_dir", "rmtree"])
def test_a_crash_leaves_the_store_or_removes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """A store that is listed afterwards is whole, and the next start removes the rest."""
    make_store(tmp_path / "run.exp")

    def stop(self: Disk, found: str, path: Path) -> None:
        if found == act and path.parent == tmp_path:
            raise KeyboardInterrupt
        if found == act == "sync_dir" and path == tmp_path:
            raise KeyboardInterrupt

    stores = Stores(Settings(path=tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(Disk, "gate", stop)
        with pytest.raises(KeyboardInterrupt):
            stores._delete("run", None)
    assert len(list(tmp_path.iterdir())) == 1
    with api_client(tmp_path) as client:
        listed = client.get("/v1/stores").json()["stores"]
        assert listed == (["run"] if act == "rename" else [])
        assert [path.name for path in tmp_path.iterdir()] == (["run.exp"] if listed else [])
        if listed:
            assert client.get(RUN).json()["rows"] == 3


@pytest.mark.slow
def test_a_leftover_that_cannot_be_removed_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(tmp_path / "run.exp")

    def refuse(self: Disk, act: str, path: Path) -> None:
        if act == "rmtree":
            raise StorageError("no permission")

    with monkeypatch.context() as patched:
        patched.setattr(Disk, "gate", refuse)
        for _ in range(2):
            with api_client(tmp_path) as client:
                assert delete(client).status_code in (200, 404)
                assert client.get("/v1/stores").json()["stores"] == []
        assert len(list(tmp_path.iterdir())) == 1
    with api_client(tmp_path):
        assert list(tmp_path.iterdir()) == []


def test_names_of_leftovers_alone_are_removed_at_the_start(tmp_path: Path) -> None:
    kept = [".expstore-deleted-x", ".hidden.exp", "expstore-deleted-" + "0" * 32]
    for name in kept:
        (tmp_path / name).mkdir()
    outside = tmp_path.with_name(f"{tmp_path.name}-outside")
    make_store(outside)
    (tmp_path / (".expstore-deleted-" + "a" * 32)).symlink_to(outside)
    (tmp_path / (".expstore-deleted-" + "b" * 32)).mkdir()
    with api_client(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {*kept, ".expstore-deleted-" + "a" * 32}
    with expstore.open(outside, mode="r") as rb:
        assert len(rb) == 3


def test_a_killed_server_deletes_for_good(tmp_path: Path) -> None:
    with serving(tmp_path) as (child, facts), httpx.Client(base_url=facts["listening"], timeout=60) as client:
        client.put(RUN, json={}).raise_for_status()
        post_rows(client, 30).raise_for_status()
        assert delete(client).status_code == 200
        child.kill()
        child.wait(60)
    assert [path.name for path in tmp_path.iterdir()] == [".expstore-server"]  # the lock of the server
    assert create_app(Settings(path=tmp_path)).state.stores.names() == []
