"""Tags of the routes, the permission that they stand for, and its description in the OpenAPI document.

Used by the application and the gateway. It sends no responses.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

#: Methods that change nothing.
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
#: Tags of routes that only read: the read token suffices, also for POST, which long queries use. Other routes
#: with other methods than SAFE, and routes without a tag, are taken to change something.
ASKING = frozenset({"reading", "sampling", "asking"})
#: Tag of routes that need no token.
_OPEN = "open"


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


def find_need(method: str, tags: Collection[object]) -> str:
    """Return the permission that a route needs.

    Args:
        method: The method by which it is called.
        tags: Its tags.
    """
    if _OPEN in tags:
        return Need.NOTHING
    reads = bool(tags) if method in SAFE else method == "POST" and not ASKING.isdisjoint(tags)
    return Need.READ if reads else Need.WRITE


def add_security(document: dict[str, Any]) -> None:
    """Add to an OpenAPI document which token each route needs."""
    document.setdefault("components", {})["securitySchemes"] = _SCHEMES
    for acts in document["paths"].values():
        for method, act in acts.items():
            need = find_need(method.upper(), act.get("tags", ()))
            names = {Need.NOTHING: [], Need.READ: ["read", "write"], Need.WRITE: ["write"]}[need]
            act["security"] = [{name: []} for name in names]
