"""The page over the shards of a cluster: an application that passes what pages read to the servers of shards.

Used by `expstore ui CLUSTER_FILE`. It opens no store and keeps no rows; a shard that does not answer is an
error of its own requests only.
"""

from __future__ import annotations

import functools
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anyio.to_thread
import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from expstore.api import errors
from expstore.api.app import READING, describe_reading
from expstore.api.errors import Refusal
from expstore.api.gateway import Gateway
from expstore.api.metrics import Metrics
from expstore.api.page import files as page_files
from expstore.api.routes import health
from expstore.api.routes.read import StoreNames
from expstore.api.settings import Settings
from expstore.cluster.members import Members, ShardEntry
from expstore.remote.tokens import Token, Tokens
from expstore.remote.transport import Address

#: Routes that are asked by POST and change nothing.
_QUESTIONS = frozenset({"sql", "sample/preview"})
_NAME = re.compile(r"shard-([0-9]{1,9})")
#: Headers of a request that a shard gets; of an answer, that the page gets. Others belong to one connection,
#: or are set by each server for itself.
_SENT = frozenset({"accept", "accept-encoding", "authorization", "content-type", "last-event-id"})
_RETURNED = re.compile(r"content-(type|length|encoding)|retry-after|cache-control|x-(?!request-id)[a-z-]+")
#: Seconds until a shard counts as gone. A stream of events may be silent for longer.
_TIMEOUT, _STREAM = httpx.Timeout(30.0, connect=5.0), httpx.Timeout(30.0, connect=5.0, read=None)


@dataclass
class _ShardStores:
    """The shards, by the names that the page shows. The server asks it for what `Stores` has, too.

    Args:
        members: Where the list of shards is read.
        root: The folder of the cluster file.
    """

    members: Members
    root: Path
    single: bool = False

    def names(self) -> list[str]:
        """Return the names of all shards."""
        return [f"shard-{member.number}" for member in self.members.read().members]

    def find(self, name: str) -> ShardEntry:
        """Return a shard.

        Raises:
            Refusal: 404: there is no such shard.
        """
        found = _NAME.fullmatch(name)
        for member in self.members.read().members:
            if found is not None and member.number == int(found[1]):
                return member
        raise Refusal(404, f"there is no shard {name[:80]!r}", kind="not_found", hint="GET /v1/stores")

    async def check_readiness(self) -> None:
        """Read the list of shards.

        Raises:
            ExpStoreError: It cannot be read.
        """
        await anyio.to_thread.run_sync(self.members.read)

    def open_now(self) -> list[Any]:
        """Return the stores that are open here: none."""
        return []

    def end(self) -> None:
        """Do nothing: there is no store to end."""


def create_shards_app(members: Members, settings: Settings, token: Token = None) -> FastAPI:
    """Return an application with the page, whose stores are the shards of a cluster.

    Args:
        members: Where the list of shards is read; it may change while the application runs.
        settings: Who may use the application, and its limits. Its path is the folder of the cluster file.
        token: Sent to the shards, as by `expstore.connect`: hosts that only a cluster file names need a dict
            from hosts to tokens. None: the token that the page asks for, if they need one; it is sent to the
            same hosts as one token would be.

    Example:
        >>> from pathlib import Path
        >>> from expstore.api.settings import Settings
        >>> from expstore.api.shards_app import create_shards_app
        >>> from expstore.cluster.members import FixedMembers
        >>> app = create_shards_app(FixedMembers(["http://a:8420/run"]), Settings(path=Path(".")))
    """
    stores = _ShardStores(members, settings.path)
    tokens = Tokens(token, members.named)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False) as client:
            app.state.client = client
            yield

    app = FastAPI(
        title="expstore", lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None,
        redirect_slashes=False,
    )  # fmt: skip
    metrics = Metrics(stores.open_now, stores.root)
    app.state.settings, app.state.stores, app.state.metrics = settings, stores, metrics
    errors.install(app)
    page_files.install(app)
    # A path that is passed to a shard needs the permission of the shard's own route.
    app.add_middleware(Gateway, routes=[*app.routes, *READING], settings=settings, metrics=metrics)
    app.routes.extend(health.router.routes)

    describe = functools.cache(describe_reading)

    @app.get("/openapi.json")
    async def document() -> JSONResponse:
        """Return what a shard's server takes: the page reads the kinds of samplers in it."""
        return JSONResponse(await anyio.to_thread.run_sync(describe))

    @app.get("/v1/stores")
    async def names() -> StoreNames:
        found = await anyio.to_thread.run_sync(stores.names)
        return StoreNames(stores=found, access="read", sql=True)

    @app.api_route("/v1/stores/{name}", methods=["GET", "POST"])
    @app.api_route("/v1/stores/{name}/{rest:path}", methods=["GET", "POST"])
    async def forward(request: Request, name: str) -> StreamingResponse:
        rest = request.path_params.get("rest", "")
        if rest and not {"", ".", ".."}.isdisjoint(rest.split("/")):  # it would lead to another store
            raise Refusal(404, "a part of the path is empty or dots", kind="not_found")
        if request.method == "POST" and rest not in _QUESTIONS:
            raise Refusal(403, "this page only reads", hint="write to the shard's own server")
        member = await anyio.to_thread.run_sync(stores.find, name)
        return await _forward(app.state.client, request, member, rest, tokens)

    return app


async def _forward(
    client: httpx.AsyncClient, request: Request, member: ShardEntry, rest: str, tokens: Tokens
) -> StreamingResponse:
    """Pass a request to a shard, and its answer back while it arrives.

    Raises:
        Refusal: 502: the shard does not answer.
        StateError: The token is not sent to its host.
    """
    server, _, store = member.url.rpartition("/")
    url = httpx.URL(f"{server}/v1/stores/{store}" + (f"/{quote(rest)}" if rest else ""))
    headers = {name: request.headers[name] for name in _SENT if name in request.headers}
    if tokens.given is None and "authorization" in headers:  # of the page
        tokens = Tokens(headers["authorization"].removeprefix("Bearer "), tokens.named)
    headers.pop("authorization", None)
    if (token := tokens.of(Address.of(member.url))) is not None:
        headers["authorization"] = f"Bearer {token}"
    sent = client.build_request(
        request.method,
        url.copy_with(query=request.scope["query_string"]),
        headers=headers,
        content=await request.body(),
        timeout=_STREAM if rest == "events" else _TIMEOUT,
    )
    try:
        answer = await client.send(sent, stream=True)
    except httpx.HTTPError as exc:
        raise Refusal(502, f"shard {member.number} ({server}) does not answer: {type(exc).__name__}",
                      kind="shard_down", hint="is its server running?") from exc  # fmt: skip
    returned = {name: value for name, value in answer.headers.items() if _RETURNED.fullmatch(name)}
    return StreamingResponse(_read(answer), answer.status_code, returned)


async def _read(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Yield the parts of an answer as they arrive, compressed as they are."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()
