"""The page at `/ui/`: static files that show stores through the routes of this server.

Used by the application. The files hold no data, so they need no token; the page sends its token with each
request for data.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from fastapi import FastAPI
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response
from starlette.types import Scope

from expstore.api.docs_page import CLOSED

#: Path of the page.
PATH = "/ui"
#: Name of its routes, which need no token. It is not the name of a function, as other routes have.
NAME = "expstore.page"
#: What the page may load: only files and data of this server, and frames that it has fetched itself.
_POLICY = f"{CLOSED}; script-src 'self'; style-src 'self'; img-src 'self' blob:; connect-src 'self'"


class _Files(StaticFiles):
    """Static files under the policy of the page; browsers ask each time whether a file has changed."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Content-Security-Policy"] = _POLICY
        response.headers["Cache-Control"] = "no-cache"
        return response


def install(app: FastAPI) -> None:
    """Serve the page, and redirect `/` to it."""

    @app.get("/", name=NAME, include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse(f"{PATH[1:]}/")

    @app.get(PATH, name=NAME, include_in_schema=False)
    async def without_slash() -> RedirectResponse:
        return RedirectResponse(f"{PATH[1:]}/")

    static: Any = _Files(directory=str(files("expstore.api") / "static"), html=True)
    app.mount(PATH, static, name=NAME)
