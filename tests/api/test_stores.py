"""Stores of a server: what opens one delays no other, and each name means one folder."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import httpx
import pytest

import expstore
from expstore.api import Settings, create_app
from expstore.api.errors import Refusal
from expstore.api.stores import Stores
from expstore.core.per_key import PerKey
from expstore.errors import NotFoundError, StateError
from tests.support.asgi import api_client, ask, refusal_of
from tests.support.batches import numbered_rows
from tests.support.stores import build_store

SECONDS = 60


class Gate:
    """Hold openings of a store in one mode until the test lets them go."""

    def __init__(self, name: str, mode: str) -> None:
        self._name, self._mode, self._open = name, mode, expstore.open
        self.begun, self.free = threading.Event(), threading.Event()
        self.openings: Counter[str] = Counter()

    def open(self, path: Path, **options: Any) -> Any:
        if options["mode"] == self._mode:
            self.openings[path.stem] += 1
            if path.stem == self._name:
                self.begun.set()
                assert self.free.wait(SECONDS)
        return self._open(path, **options)


def make_store(path: Path) -> None:
    build_store(path, numbered_rows(10, key="x"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("slow", "fast"):
        make_store(tmp_path / f"{name}.exp")
    return tmp_path


def test_one_opening_delays_no_other_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests wait for the slow store than there are threads; each store is opened once."""
    gate = Gate("slow", "a")
    monkeypatch.setattr(expstore, "open", gate.open)
    app = create_app(Settings(path=folder, connections=1000))

    async def check(asking: httpx.AsyncClient) -> None:
        first = asyncio.ensure_future(asking.get("/v1/stores/slow"))
        assert await asyncio.to_thread(gate.begun.wait, SECONDS)
        acts = [("GET", "/v1/stores/slow"), ("PUT", "/v1/stores/slow"),
                ("DELETE", "/v1/stores/slow?confirm=slow")]  # fmt: skip
        waiting = [asyncio.ensure_future(asking.request(*act, json={})) for act in acts * 30]
        async with asyncio.timeout(SECONDS):
            assert (await asking.get("/v1/stores/fast")).json()["rows"] == 10
            assert (await asking.put("/v1/stores/new", json={})).status_code == 201
            assert (await asking.delete("/v1/stores/new?confirm=new")).status_code == 200
            assert (await asking.get("/v1/stores/none")).status_code == 404
            assert (await asking.get("/v1/stores")).json()["stores"] == ["fast", "slow"]
        assert not first.done()
        gate.free.set()
        async with asyncio.timeout(SECONDS):
            assert (await first).json()["rows"] == 10
            answers = await asyncio.gather(*waiting)
        # Deletion found the store not yet open, and others have opened it meanwhile: it is in use.
        assert {answer.status_code for answer in answers} <= {200, 404, 409, 503}

    try:
        ask(app, check)
    finally:
        gate.free.set()
        app.state.stores.close()
    assert gate.openings["slow"] == gate.openings["fast"] == 1


def test_closing_waits_for_an_opening(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate("slow", "a")
    monkeypatch.setattr(expstore, "open", gate.open)
    stores, found, ending = Stores(Settings(path=folder)), [], threading.Event()
    end = stores.end

    def note_end() -> None:
        end()
        ending.set()

    monkeypatch.setattr(stores, "end", note_end)
    opening = threading.Thread(target=lambda: found.append(stores.get("slow")))
    opening.start()
    assert gate.begun.wait(SECONDS)
    closing = threading.Thread(target=stores.close)
    closing.start()
    assert ending.wait(SECONDS)
    with pytest.raises(Refusal, match="shut down"):
        stores.get("fast")
    gate.free.set()
    for thread in (opening, closing):
        thread.join(SECONDS)
    assert found[0].rb.storage.closed
    assert found[0].ending


def test_keys_share_nothing_and_leave_nothing() -> None:
    locks = PerKey(threading.Lock)
    with locks.use("a") as first, locks.use("a") as same, locks.use("b") as other:
        assert first is same is not other
        assert locks.keys() == ["a", "b"]
    assert locks.keys() == []
    with pytest.raises(ZeroDivisionError), locks.use("a"):
        _ = 1 / 0
    assert locks.keys() == []


# -- names ---------------------------------------------------------------------------------------------


def test_two_folders_of_one_name_are_refused_at_the_start(tmp_path: Path) -> None:
    for name in ("demo", "demo.exp", "other"):
        make_store(tmp_path / name)
    with pytest.raises(
        StateError, match=r"two stores have the name 'demo': the folders 'demo.exp' and 'demo'"
    ):
        create_app(Settings(path=tmp_path))
    for name in ("demo", "demo.exp"):  # either of them can be served alone
        stores = Stores(Settings(path=tmp_path / name))
        assert stores.get("demo").path == tmp_path / name
        stores.close()


def test_a_second_folder_of_a_name_that_comes_later_is_refused(tmp_path: Path) -> None:
    make_store(tmp_path / "demo.exp")
    app = create_app(Settings(path=tmp_path))
    make_store(tmp_path / "demo")

    async def check(asking: httpx.AsyncClient) -> None:
        assert (await asking.get("/v1/stores")).json()["stores"] == ["demo"]
        for answer in (await asking.get("/v1/stores/demo"), await asking.put("/v1/stores/demo", json={})):
            assert refusal_of(answer) == (409, "exists")

    ask(app, check)


def test_a_store_has_one_name(tmp_path: Path) -> None:
    """`demo.exp` would be a second name of `demo`, and the server would be locked out by itself."""
    make_store(tmp_path / "demo.exp")
    make_store(tmp_path / "twice.exp.exp")
    stores = Stores(Settings(path=tmp_path))
    assert stores.names() == ["demo", "twice.exp"]
    with pytest.raises(NotFoundError, match="does not include .exp"):
        stores.get("demo.exp")
    assert len(stores.get("twice.exp").rb) == 10
    stores.close()


# -- what stores and their readers may have --------------------------------------------------------------


def test_access_follows_from_server_and_token(tmp_path: Path) -> None:
    tokens = {"token": b"w", "read_token": b"r"}
    for settings, token, access in (
        ({}, None, "write"),
        ({"read_only": True}, None, "read"),
        (tokens, "w", "write"),
        (tokens, "r", "read"),
        (tokens | {"read_only": True}, "w", "read"),
        ({"sql": False}, None, "write"),
    ):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        with api_client(tmp_path, headers=headers, **settings) as client:
            found = client.get("/v1/stores").json()
        assert found == {"stores": [], "access": access, "sql": settings.get("sql", True)}


def test_all_parts_of_all_stores_are_closed_although_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stores = Stores(Settings(path=tmp_path))
    first, second = (stores.create(name, {}) for name in "ab")

    def fail() -> NoReturn:
        raise RuntimeError("a part that fails")

    monkeypatch.setattr(first.member, "close", fail)
    with caplog.at_level(logging.ERROR, "expstore.api"):
        stores.close()
    assert [served.rb.storage.closed for served in (first, second)] == [True, True]
    assert "store a was not closed properly: a part that fails" in caplog.text


def test_invalid_row_shapes_are_refused(tmp_path: Path) -> None:
    with api_client(tmp_path) as client:
        for shape in ([1.5], ["x"], [-1], [[1]], [True], [10**20], [10**11], [1] * 201, [None, 1 << 70]):
            answer = client.put("/v1/stores/a", json={"fields": {"x": ["float32", shape]}})
            assert refusal_of(answer) == (422, "schema"), shape
        assert client.get("/v1/stores").json()["stores"] == []


def test_meta_that_utf8_cannot_represent_is_refused(tmp_path: Path) -> None:
    """Otherwise neither SQL nor an answer could contain it."""
    with api_client(tmp_path) as client:
        for body in (rb'{"meta": {"x": "\ud800"}}', rb'{"meta": {"x": NaN}}', rb'{"meta": {"x": 1e999}}'):
            answer = client.put("/v1/stores/a", content=body, headers={"Content-Type": "application/json"})
            assert refusal_of(answer) == (422, "schema"), body
        assert client.get("/v1/stores").json()["stores"] == []
