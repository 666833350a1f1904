"""The page `/docs` with its assets, and the headers that restrict what browsers do with responses.

Used by the application. The page is Swagger UI from the package fastapi-offline: it works without internet
access and loads nothing from other sites.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from importlib.resources import files

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles

CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
#: Headers of every response: it is data, not a page that may load, send or be framed.
BROWSER_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CLOSED,
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
#: Relative to the page, so that it works behind a proxy that serves the application below a path.
_ASSETS = "docs-assets"


def install(app: FastAPI) -> None:
    """Serve the page and its assets."""
    text = bytes(
        get_swagger_ui_html(
            openapi_url="openapi.json",
            title=f"{app.title} - API",
            swagger_js_url=f"{_ASSETS}/swagger-ui-bundle.js",
            swagger_css_url=f"{_ASSETS}/swagger-ui.css",
            swagger_favicon_url=f"{_ASSETS}/favicon.png",
        ).body
    ).decode()
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"{CLOSED}; script-src 'self' 'sha256-{digest}'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'"
    )

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    static = StaticFiles(directory=str(files("fastapi_offline") / "static"))
    app.mount(f"/{_ASSETS}", static, name="docs-assets")
