"""The page /docs works without internet; security headers restrict what browsers may do."""

from __future__ import annotations

import base64
import hashlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from expstore.api import Settings
from tests.support.asgi import api_client
from tests.support.servers import Serving

HEADERS = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
KINDS = {".js": "text/javascript", ".css": "text/css", ".png": "image/png"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[httpx.Client]:
    with api_client(tmp_path, max_body=1000) as client:
        yield client


def test_the_page_loads_nothing_from_elsewhere(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.headers["content-type"].startswith("text/html")
    assets = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {Path(name).name for name in assets} >= {"swagger-ui-bundle.js", "swagger-ui.css"}
    assert not re.findall(r"https?://", page.text)
    for name in assets:
        found = client.get(urljoin("/docs", name))
        assert found.status_code == 200, name
        assert found.headers["content-type"].startswith(KINDS[Path(name).suffix]), name
        assert len(found.content) > 100
    assert b"SwaggerUIBundle" in client.get("/docs-assets/swagger-ui-bundle.js").content
    described = re.search(r"url: '([^']+)'", page.text)
    assert described
    document = client.get(urljoin("/docs", described[1])).json()
    assert "/v1/stores/{name}/sample" in document["paths"]
    for path in ("/redoc", "/docs-assets/../core.py", "/docs-assets/%2e%2e/core.py", "/docs-assets/no.js"):
        assert client.get(path).status_code == 404


def test_the_pages_policy_allows_its_own_script_alone(client: httpx.Client) -> None:
    page = client.get("/docs")
    (script,) = re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == f"'self' 'sha256-{digest}'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"


def test_every_answer_says_what_it_may_do(client: httpx.Client) -> None:
    statuses = set()
    for method, path, more in (
        ("GET", "/healthz", {}),
        ("GET", "/metrics", {}),
        ("GET", "/docs", {}),
        ("GET", "/docs-assets/swagger-ui.css", {}),
        ("GET", "/nowhere", {}),
        ("GET", "/v1/stores/none", {}),
        ("DELETE", "/v1/stores", {}),
        ("GET", "/healthz", {"headers": {"Host": "evil.example"}}),
        ("PUT", "/v1/stores/x", {"headers": {"Origin": "http://evil.example"}}),
        ("PUT", "/v1/stores/x", {"content": b"x" * 2000}),
        ("PUT", "/v1/stores/x", {"json": {"capacity": 0}}),
    ):
        answer = client.request(method, path, **more)
        statuses.add(answer.status_code)
        assert HEADERS.items() <= dict(answer.headers).items(), answer.url
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert statuses >= {200, 400, 403, 404, 405, 413, 422}


def test_an_answer_to_what_is_no_request_says_so_too(tmp_path: Path) -> None:
    with Serving(Settings(path=tmp_path)) as server:
        with socket.create_connection(("127.0.0.1", server.port), 60) as one:
            one.sendall(b"no HTTP\r\n\r\n")
            raw = b"".join(iter(lambda: one.recv(1 << 16), b"")).lower()
    for name in (*HEADERS, "content-security-policy"):
        assert f"\r\n{name}: ".encode() in raw
