"""What the routes are, by the OpenAPI document: which path, which need of a token, which kind of body.

Used by the middleware, which has to know all this before a route is called. It answers nothing itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["ASKING", "SAFE", "TAGS", "Need", "RouteTable", "Routed", "add_security"]

#: Methods that change nothing.
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
#: Tags of routes that ask: the read token opens them, even if a long question has a body and is sent by POST.
#: Other methods than these, and POST to other routes, change something; so may what has no tag.
ASKING = frozenset({"reading", "sampling", "asking"})
#: Tag of routes that need no token.
_OPEN = "open"
#: Stands for paths that no route has: those of strangers must not fill the memory.
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
        "description": "List versions with the read token; make and restore them with the write token.",
    },
    {"name": "writing", "description": "Change stores. Needs the write token."},
    {"name": "open", "description": "Needs no token."},
]
_SCHEMES = {
    "read": {
        "type": "http", "scheme": "bearer",
        "description": "Token of `--read-token-file`: reads and samples. A server that was started without "
        "tokens answers its own machine only, and needs none.",
    },
    "write": {
        "type": "http", "scheme": "bearer",
        "description": "Token of `--token-file`: may do everything that the read token may, and write.",
    },
}  # fmt: skip


class Need:
    """What a route asks of who calls it."""

    NOTHING = "nothing"
    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Routed:
    """One route.

    Args:
        path: With names in braces, as the OpenAPI document has it.
        need: What a caller must be allowed to.
        parsed: Whether its body is parsed before it is called, in the event loop.
    """

    path: str
    need: str
    parsed: bool = False


class RouteTable:
    """Find the route of a request.

    The document is asked for with the first request, when all routes are there.

    Args:
        document: Returns the OpenAPI document.
    """

    def __init__(self, document: Callable[[], dict[str, Any]]) -> None:
        self._document = document
        self._routes: list[tuple[re.Pattern[str], dict[str, Routed], Routed]] | None = None

    def find(self, method: str, path: str) -> Routed:
        """Return the route of a request, or what stands for none.

        Args:
            method: Its method.
            path: Its path, decoded.
        """
        if self._routes is None:
            self._routes = [_read(path, acts) for path, acts in self._document()["paths"].items()]
        for pattern, acts, other in self._routes:
            if pattern.fullmatch(path):
                return acts.get(method) or (_reading(other) if method in SAFE else other)
        return Routed(_UNKNOWN, Need.READ if method in SAFE else Need.WRITE)


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
