"""The list of stores says what its reader may do with them."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import httpx
import pytest

from expstore.api import Settings
from expstore.api.stores import Stores
from tests.support.servers import Serving


@pytest.mark.parametrize(
    ("settings", "token", "access"),
    [
        ({}, None, "write"),
        ({"read_only": True}, None, "read"),
        ({"token": b"w", "read_token": b"r"}, "w", "write"),
        ({"token": b"w", "read_token": b"r"}, "r", "read"),
        ({"token": b"w", "read_token": b"r", "read_only": True}, "w", "read"),
    ],
)
def test_access_follows_from_server_and_token(
    tmp_path: Path, settings: dict[str, object], token: str | None, access: str
) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    with Serving(replace(Settings(path=tmp_path), **settings)) as server:  # type: ignore[arg-type]
        found = httpx.get(f"{server.url}/v1/stores", headers=headers).json()
    assert found == {"stores": [], "access": access, "sql": True}


def test_servers_without_sql_say_so(tmp_path: Path) -> None:
    with Serving(Settings(path=tmp_path, sql=False)) as server:
        assert httpx.get(f"{server.url}/v1/stores").json()["sql"] is False


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
    with Serving(Settings(path=tmp_path)) as server, httpx.Client(base_url=server.url) as client:
        for shape in ([1.5], ["x"], [-1], [[1]], [True], [10**20], [10**11], [1] * 201, [None, 1 << 70]):
            answer = client.put("/v1/stores/a", json={"fields": {"x": ["float32", shape]}})
            assert (answer.status_code, answer.json()["error"]["kind"]) == (422, "schema"), shape
        assert client.get("/v1/stores").json()["stores"] == []


def test_meta_that_utf8_cannot_represent_is_refused(tmp_path: Path) -> None:
    """Otherwise neither SQL nor an answer could contain it."""
    with Serving(Settings(path=tmp_path)) as server, httpx.Client(base_url=server.url) as client:
        for body in (rb'{"meta": {"x": "\ud800"}}', rb'{"meta": {"x": NaN}}', rb'{"meta": {"x": 1e999}}'):
            answer = client.put("/v1/stores/a", content=body, headers={"Content-Type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["kind"]) == (422, "schema"), body
        assert client.get("/v1/stores").json()["stores"] == []
