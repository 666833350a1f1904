"""The list of stores says what its reader may do with them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

import pytest

from expstore.api import Settings
from expstore.api.stores import Stores
from tests.support.asgi import api_client, refusal_of


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
