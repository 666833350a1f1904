"""Check who may send a request: host names, origins, tokens, rates.

Used by the gateway, before bodies are read and routes are called. It never reads a body, and its refusals
reveal nothing about the stores.
"""

from __future__ import annotations

import hmac
import ipaddress
import math
import re
import time
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from expstore.api.errors import Refusal
from expstore.api.openapi import Need
from expstore.api.rate_limits import Rates
from expstore.api.settings import Settings

#: A name or an address (IPv6 in brackets) and an optional port (RFC 9110, section 7.2).
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
_LOOPBACK_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})
_SAME_SITE = frozenset({"same-origin", "none"})
#: Header with the server's token in calls to a language model, whose Authorization is for the model's server.
TOKEN_HEADER = "x-expstore-token"


def is_loopback(address: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:  # not a network address, for example that of a Unix socket
        return True
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


class Access:
    """Decide who may send a request.

    Threads: the event loop's only.

    Args:
        settings: The server's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._hosts = _LOOPBACK_NAMES | {host.lower() for host in settings.hosts}
        self._rates = None if settings.rate is None else Rates(settings.rate)

    def check(self, scope: Scope, headers: Headers, need: str, *, is_relayed: bool = False) -> None:
        """Check a request; note in its scope, as `expstore.may`, what its token permits.

        Args:
            scope: The request's ASGI scope.
            headers: Its headers.
            need: The permission that it needs.
            is_relayed: Whether it is a call to a language model: its token is in a header of its own.

        Raises:
            Refusal: 400: the server does not have the host's name. 403: the request comes from another
                site's page, or the token does not permit it. 429: too many requests. 401: no valid token.
        """
        server = (scope.get("server") or ("", None))[0]
        host = headers.get("host", "")
        # Probes by HTTP/1.0 name no host; browsers always do.
        if need != Need.NOTHING or "host" in headers:
            self._check_host(host, server)
        if need != Need.NOTHING:
            _check_origin(headers, host)
        sent = headers.getlist("authorization")
        if is_relayed:
            sent = [f"Bearer {token}" for token in headers.getlist(TOKEN_HEADER)]
        may = self._find_role(sent, server)
        scope["expstore.may"] = may
        if self._rates is not None:
            client = (scope.get("client") or ("", None))[0]
            if wait := self._rates.wait((client, may), time.monotonic()):
                raise Refusal(429, "too many requests", headers={"Retry-After": str(math.ceil(wait))})
        if need != Need.NOTHING and may == Need.NOTHING:
            raise Refusal(
                401,
                "a valid token is needed",
                hint=f"send {TOKEN_HEADER}: TOKEN"
                if is_relayed
                else "send Authorization: Bearer TOKEN; in Python: expstore.connect(url, token=TOKEN)",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if need == Need.WRITE and may != Need.WRITE:
            raise Refusal(
                403,
                "this token only permits reading",
                hint="send the token for writing, which the server reads from --token-file",
            )

    def _check_host(self, host: str, server: str) -> None:
        """Reject host names that were not configured: a web page may let its own name resolve here."""
        name = _name_of(host)
        if not name or name not in self._hosts | {server, f"[{server}]"}:
            raise Refusal(400, f"the server does not have the name {host[:100]!r}", kind="host",
                          hint="start the server with --allow-host NAME")  # fmt: skip

    def _find_role(self, sent: list[str], server: str) -> str:
        """Return the permission that these Authorization headers grant; both tokens are always compared."""
        token, read_token = self._settings.token, self._settings.read_token
        if token is None and read_token is None:
            if not is_loopback(server):
                raise Refusal(
                    403,
                    "the server has no token, so it answers only this machine",
                    hint="start the server with --token-file, or use an address such as 127.0.0.1",
                )
            return Need.WRITE
        scheme, _, found = sent[0].partition(" ") if len(sent) == 1 else ("", "", "")
        borne = found.strip().encode("latin-1")
        writes = hmac.compare_digest(borne, token or b"") and token is not None
        reads = hmac.compare_digest(borne, read_token or b"") and read_token is not None
        if scheme.lower() != "bearer":
            return Need.NOTHING
        return Need.WRITE if writes else Need.READ if reads else Need.NOTHING


def _name_of(host: str) -> str:
    """Return the name in a Host header, without the port; "" if the header is invalid."""
    found = _HOST.fullmatch(host)
    return found["name"].lower() if found else ""


def _check_origin(headers: Headers, host: str) -> None:
    """Reject requests that a page of another site makes a browser send; only browsers send these headers.

    The rule is Datasette's (https://docs.datasette.io, "CSRF protection"), but for GET, too: a page of
    another site could embed frames as images, measure how long conditions take, or hold all event streams.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    foreign = site is not None and site.lower() not in _SAME_SITE
    if foreign or (origin is not None and _host_of(origin) != host.lower()):
        raise Refusal(403, "the request comes from another site's page", kind="origin",
                      hint="open the address in the browser itself, not by a link")  # fmt: skip


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
