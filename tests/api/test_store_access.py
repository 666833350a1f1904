"""The list of stores says what its reader may do with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from expstore.api import Settings
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
