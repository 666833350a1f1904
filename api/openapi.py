"""Look up routes as the OpenAPI document describes them: path, token that they need, kind of body.

Used by the middleware, which needs this before a route is called. It sends no responses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fastapi.routing import APIRoute
from starlette._utils import get_route_path
from starlette.types import Scope

#: Methods that change nothing.
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
#: Tags of routes that only read: the read token suffices, also for POST, which long queries use. Other routes
#: with other methods than SAFE, and routes without a tag, are taken to change something.
ASKING = frozenset({"reading", "sampling", "asking"})
#: Tag of routes that need no token.
_OPEN = "open"
#: Stands for all unknown paths: otherwise arbitrary paths from clients could fill the memory.
_UNKNOWN = "(none)"


#: Descriptions of the tags.
TAGS = [
    {"name": "reading", "description": "Read stores, rows, episodes and figures. Needs the read token."},
    {
        "name": "sampling",
        "description": "Draw batches. POST needs the read token, PUT and DELETE the write token.",
    },
    {"name": "asking", "description": "Query episodes and SQL. Needs the read token."},
    {
        "name": "versions",
        "description": "List snapshots with the read token; make and restore them with the write token.",
    },
    {"name": "writing", "description": "Change stores. Needs the write token."},
    {"name": "open", "description": "Needs no token."},
]
_SCHEMES = {
    "read": {
        "type": "http", "scheme": "bearer",
        "description": "Token of `--read-token-file`: permits reading and sampling. A server without tokens "
        "accepts requests from its own machine only, and needs none.",
    },
    "write": {
        "type": "http", "scheme": "bearer",
        "description": "Token of `--token-file`: permits writing, and everything the read token permits.",
    },
}  # fmt: skip


class Need:
    """The permission that a route needs."""

    NOTHING = "nothing"
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Routed:
    """One route.

    Args:
        path: The path with names in braces, as in the OpenAPI document.
        need: The permission that a client needs.
        parsed: Whether its body is parsed in the event loop before the route is called.
    """

    path: str
    need: str
    parsed: bool = False


class RouteTable:
    """Find the route of a request.

    The document is read at the first request, when all routes are registered.

    Args:
        document: Returns the OpenAPI document, or its outline.
        open_folder: Path of static files that need no token, and to which `/` redirects; None: there are
            none.
    """

    def __init__(self, document: Callable[[], dict[str, Any]], open_folder: str | None = None) -> None:
        self._document = document
        self._open_folder = open_folder
        self._routes: list[tuple[re.Pattern[str], dict[str, Routed], Routed]] | None = None

    def find(self, scope: Scope) -> Routed:
        """Return the route of a request; for an unknown path, a route that stands for all of these.

        Args:
            scope: The request's ASGI scope. Starlette's own function splits its path, so that an application
                below a prefix (`Mount`, a proxy's `root_path`) is looked up as Starlette routes it.
        """
        method, path = scope["method"], get_route_path(scope)
        folder = self._open_folder
        if folder and method in SAFE and (path in ("/", folder) or path.startswith(f"{folder}/")):
            return Routed(folder, Need.NOTHING)
        acts, other = self._find_path(path)
        if other is None:
            return Routed(_UNKNOWN, Need.READ if method in SAFE else Need.WRITE)
        return acts.get(method) or (_reading(other) if method in SAFE else other)

    def methods(self, scope: Scope) -> list[str]:
        """Return the methods that the path of a request has, sorted; empty for an unknown path."""
        return sorted(self._find_path(get_route_path(scope))[0])

    def _find_path(self, path: str) -> tuple[dict[str, Routed], Routed | None]:
        """Return the routes of a path by method, and the one for other methods; None for an unknown path."""
        if self._routes is None:
            paths = self._document()["paths"]
            # Fixed paths first, since `episodes/{episode}` also matches `episodes/end`.
            self._routes = [_read(path, paths[path]) for path in sorted(paths, key=lambda it: it.count("{"))]
        for pattern, acts, other in self._routes:
            if pattern.fullmatch(path):
                return acts, other
        return {}, None


def outline(routes: Iterable[tuple[str, object]]) -> dict[str, Any]:
    """Return the part of the OpenAPI document that a `RouteTable` reads: paths, methods, tags, body types.

    The whole document has the schemas of all models, which takes half a second of CPU.

    Args:
        routes: Routes of the application, each with the prefix of its router. Those that the document does
            not describe are left out.
    """
    paths: dict[str, dict[str, Any]] = {}
    for prefix, route in routes:
        if not (isinstance(route, APIRoute) and route.include_in_schema):
            continue
        content: dict[str, Any] = {"application/json": {}} if route.body_field is not None else {}
        content |= (route.openapi_extra or {}).get("requestBody", {}).get("content", {})
        act = {"tags": [*route.tags], "requestBody": {"content": content}}
        known = paths.setdefault(prefix + route.path_format, {})
        known.update((method.lower(), act) for method in route.methods or ())
    return {"paths": paths}


def _reading(route: Routed) -> Routed:
    return Routed(route.path, Need.READ)


def _read(path: str, acts: dict[str, Any]) -> tuple[re.Pattern[str], dict[str, Routed], Routed]:
    pieces = re.split(r"\{\w+\}", path)
    pattern = re.compile("[^/]+".join(re.escape(piece) for piece in pieces), re.DOTALL)
    found = {method.upper(): _build_route(path, method.upper(), act) for method, act in acts.items()}
    return pattern, found, Routed(path, Need.WRITE)


def _build_route(path: str, method: str, act: dict[str, Any]) -> Routed:
    tags = set(act.get("tags", ()))
    reads = bool(tags) if method in SAFE else method == "POST" and bool(tags & ASKING)
    need = Need.NOTHING if _OPEN in tags else Need.READ if reads else Need.WRITE
    content = act.get("requestBody", {}).get("content", {})
    return Routed(path, need, parsed=set(content) == {"application/json"})


def add_security(document: dict[str, Any]) -> None:
    """Add to an OpenAPI document which token each route needs."""
    document.setdefault("components", {})["securitySchemes"] = _SCHEMES
    for path, acts in document["paths"].items():
        for method, act in acts.items():
            need = _build_route(path, method.upper(), act).need
            names = {Need.NOTHING: [], Need.READ: ["read", "write"], Need.WRITE: ["write"]}[need]
            act["security"] = [{name: []} for name in names]
