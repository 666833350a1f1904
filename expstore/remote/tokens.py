"""Which access token is sent to which server.

A token that a user passes is for the servers that the user names. Addresses in a file are names that the
file's author chose: they get a token only if the user names their hosts, too, or if they are on this machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from expstore.errors import ArgumentError, StateError
from expstore.remote.transport import Address

#: What users pass as `token=`: the token, or the token of each host.
Token = str | Mapping[str, str] | None


@dataclass(frozen=True)
class Tokens:
    """The tokens of the servers. Immutable and picklable.

    Args:
        given: One token; tokens by host, in which "*.example.com" stands for all hosts below it and "*" for
            all hosts; or None to send none.
        named: Whether the user named the addresses; False if they are read from a file.

    Raises:
        ArgumentError: The value is neither a token nor a mapping of hosts to tokens.
    """

    given: Token = field(repr=False)
    named: bool

    def __post_init__(self) -> None:
        given: Any = self.given
        if isinstance(given, Mapping):
            for host, token in given.items():
                if not isinstance(host, str) or not isinstance(token, str) or "/" in host:
                    raise ArgumentError(
                        f"token= has the entry {host!r}, which is not a host with its token",
                        hint='pass {"host": "TOKEN"}, without http:// and port',
                    )
        elif given is not None and not isinstance(given, str):
            raise ArgumentError(f"token must be a string or a mapping of hosts, got a {type(given).__name__}")

    def of(self, address: Address) -> str | None:
        """Return the token for a server; None to send none.

        Raises:
            StateError: There is one token, and a file chose the server (kind "token").
        """
        host = (urlsplit(address.root).hostname or "").lower()
        if isinstance(self.given, Mapping):
            known = {name.lower().strip("[]"): token for name, token in self.given.items()}
            parts = host.split(".")
            above = ("*." + ".".join(parts[cut:]) for cut in range(1, len(parts)))
            return next((known[name] for name in (host, *above, "*") if name in known), None)
        if self.given is None or self.named or _is_this_machine(host):
            return self.given
        raise StateError(
            f"{address} is an address from the cluster file, so the access token is not sent there",
            kind="token",
            hint=f'if you trust it, name the hosts: token={{"{host}": ...}} or --token-host {host}',
        )


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
