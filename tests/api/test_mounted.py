"""The application below a prefix, mounted into another one or behind a proxy: everything is as without."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from expstore.api import Settings, create_app
from expstore.api.gateway import JSON_BYTES
from expstore.api.openapi import Need
from tests.support.asgi import ask, client, routes_of

READ, WRITE = ({"Authorization": f"Bearer {token}"} for token in ("reads", "writes"))


def app_of(path: Path, **settings: Any) -> FastAPI:
    return create_app(Settings(path=path, token=b"writes", read_token=b"reads", **settings))


def below(app: Any, *prefixes: str) -> Any:
    for prefix in reversed(prefixes):
        app = Starlette(routes=[Mount(prefix, app)])
    return app


@pytest.mark.guarantee("access/tokens")
@pytest.mark.parametrize(
    ("prefixes", "root_path", "before"),
    [
        ((), "", ""),
        (("/exp",), "", "/exp"),
        (("/a", "/{team}"), "", "/a/blue"),
        ((), "/exp", "/exp"),  # as uvicorn --root-path has it: the path includes the prefix
        ((), "/exp", ""),  # as other servers have it
        (("/in",), "/out", "/out/in"),
    ],
)
def test_a_prefix_changes_no_permission_limit_or_label(
    tmp_path: Path, prefixes: tuple[str, ...], root_path: str, before: str
) -> None:
    app = app_of(tmp_path)

    async def check(asking: httpx.AsyncClient) -> None:
        assert (await asking.get(f"{before}/healthz")).status_code == 200
        created = await asking.put(f"{before}/v1/stores/run", json={"fields": {"x": "int64"}}, headers=WRITE)
        assert created.status_code == 201, created.text
        assert (await asking.post(f"{before}/v1/stores/run/add", json={"x": [1]}, headers=WRITE)).is_success
        drawn = await asking.post(f"{before}/v1/stores/run/sample", json={"batch_size": 1}, headers=READ)
        assert drawn.json()["rows"]["x"] == [1], drawn.text
        refused = await asking.post(f"{before}/v1/stores/run/add", json={"x": [1]}, headers=READ)
        assert refused.status_code == 403
        assert (await asking.get(f"{before}/v1/stores")).status_code == 401
        large = await asking.post(
            f"{before}/v1/stores/run/rows", content=b"0" * (JSON_BYTES + 1), headers=READ
        )
        assert large.status_code == 413
        if before.startswith(root_path):  # Starlette does not serve files otherwise
            page = await asking.get(f"{before}/", follow_redirects=True)
            assert page.status_code == 200
            assert page.url.path == f"{before}/ui/"
        counted = (await asking.get(f"{before}/metrics", headers=READ)).text
        sampled = 'expstore_requests_total{method="POST",route="/v1/stores/{name}/sample",status="200"} 1.0'
        assert sampled in counted.splitlines()
        assert "(none)" not in counted

    ask(below(app, *prefixes), check, root_path=root_path)
    app.state.stores.close()


@pytest.mark.guarantee("access/tokens")
@pytest.mark.parametrize("prefix", ["", "/exp"])
def test_every_route_needs_the_same_token_below_a_prefix(tmp_path: Path, prefix: str) -> None:
    """The token that the OpenAPI document names."""
    app = app_of(tmp_path)

    async def check(asking: httpx.AsyncClient) -> None:
        for method, path, told in routes_of(app.openapi()):
            needs = [next(iter(one)) for one in told["security"]]
            without, reading, writing = [
                (
                    await asking.request(method, prefix + path, headers=headers, params={"count": 1})
                ).status_code
                for headers in ({}, READ, WRITE)
            ]
            assert (without == 401) == bool(needs), path
            assert (reading == 403) == (needs == [Need.WRITE]), path
            assert writing not in (401, 403), path

    ask(below(app, prefix) if prefix else app, check)
    app.state.stores.close()


def test_paths_that_only_begin_like_the_prefix_need_a_token(tmp_path: Path) -> None:
    """`/expo/healthz` is not `/healthz` below `/exp`."""

    async def check(asking: httpx.AsyncClient) -> list[int]:
        paths = ("/expo/healthz", "/exp/healthz/", "/exp", "/exp/exp/healthz")
        return [(await asking.get(path)).status_code for path in paths]

    assert ask(app_of(tmp_path), check, root_path="/exp") == [401] * 4


def test_silent_sessions_end_although_no_lifespan_runs(tmp_path: Path) -> None:
    """Starlette runs no lifespan of a mounted application; its first request starts the upkeep."""
    now = [0.0]
    app = create_app(Settings(path=tmp_path, session_timeout=0.04, clock=lambda: now[0]))
    leftover = tmp_path / f".expstore-deleted-{'0' * 32}"
    leftover.mkdir()

    async def check(asking: httpx.AsyncClient) -> None:
        await asking.put("/exp/v1/stores/run", json={"fields": {"x": "int64"}})
        headers = {"X-Session": "actor"}
        await asking.post("/exp/v1/stores/run/add", json={"x": [1]}, headers=headers)
        (served,) = app.state.stores.open_now()
        assert list(served.rb.episodes.remote_sessions()) == ["actor"]
        now[0] = 1.0
        async with asyncio.timeout(60):
            while served.rb.episodes.remote_sessions():
                await asyncio.sleep(0.001)
        assert not leftover.exists()

    ask(below(app, "/exp"), check)
    ask(below(app, "/exp"), check_answers)  # an event loop that comes later has an upkeep of its own
    app.state.stores.close()


async def check_answers(asking: httpx.AsyncClient) -> None:
    assert (await asking.get("/exp/healthz")).status_code == 200


def test_the_outer_lifespan_closes_the_stores(tmp_path: Path) -> None:
    """As the documentation of `create_app` says."""
    app = create_app(Settings(path=tmp_path))

    @asynccontextmanager
    async def lifespan(outer: FastAPI) -> AsyncIterator[None]:
        async with app.router.lifespan_context(app):
            yield

    outer = FastAPI(lifespan=lifespan)
    outer.mount("/exp", app)

    async def check() -> Any:
        async with outer.router.lifespan_context(outer), client(outer) as asking:
            assert (await asking.put("/exp/v1/stores/run", json={})).status_code == 201
            (served,) = app.state.stores.open_now()
            assert not served.rb.storage.closed
        return served

    served = asyncio.run(check())
    assert served.rb.storage.closed
    gc.collect()  # a task that was not awaited would warn
