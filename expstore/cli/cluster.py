"""The commands `cluster init`, `add`, `retire`, `move`, `remove` and `show`: the file that lists the shards.

Used by `expstore.cli.app`, which reports errors. None of the commands loads torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore.cli.groups import add_command, make_group, show_help
from expstore.cli.output import Json, print_json, print_table
from expstore.cli.paths import to_local
from expstore.cli.tokens import TokenHosts, read_token, read_tokens
from expstore.errors import StorageError

if TYPE_CHECKING:
    from expstore.cluster.members import ClusterFile

cluster = make_group(
    name="cluster",
    invoke_without_command=True,
    callback=show_help,
    help="The shards of a cluster: served stores that clients use as one buffer, listed in a file. Clients "
    "notice changes of the file within about a second.",
)
#: Seconds that a server has to answer.
_TIMEOUT = 10.0

File = Annotated[
    Path, typer.Argument(callback=to_local, metavar="FILE", help="The cluster file, such as cluster.json.")
]
Url = Annotated[
    str, typer.Argument(metavar="URL", help="Address of a served store, such as http://host:8420/run.")
]
Number = Annotated[int, typer.Argument(metavar="NUMBER", min=0, help="Number of the shard.")]
TokenFile = Annotated[
    Path | None,
    typer.Option(callback=to_local, metavar="FILE", help="File with the token of the servers."),
]


def init(
    file: File,
    urls: Annotated[list[str], typer.Argument(metavar="URL...", help="Addresses of the served stores.")],
    token_file: TokenFile = None,
    as_json: Json = False,
) -> int:
    """Make the file of a new cluster."""
    from expstore.cluster.members import ClusterFile

    token = read_token(token_file)
    stores = [(url, _ask(url, token)["uuid"]) for url in urls]
    return _tell(file, ClusterFile.create(file, stores), "has", as_json)


def add(file: File, url: Url, token_file: TokenFile = None, as_json: Json = False) -> int:
    """Add a served store as a new shard."""
    from expstore.cluster.members import ClusterFile

    store = _ask(url, read_token(token_file))["uuid"]
    return _tell(file, ClusterFile.change(file, lambda known: known.add(url, store)), "now has", as_json)


def retire(file: File, number: Number, as_json: Json = False) -> int:
    """Let a shard accept no new sources."""
    from expstore.cluster.members import ClusterFile

    return _tell(file, ClusterFile.change(file, lambda known: known.retire(number)), "now has", as_json)


def move(file: File, number: Number, url: Url, token_file: TokenFile = None, as_json: Json = False) -> int:
    """Note that the store of a shard is served at another address."""
    from expstore.cluster.members import ClusterFile

    store = _ask(url, read_token(token_file))["uuid"]
    changed = ClusterFile.change(file, lambda known: known.move(number, url, store))
    return _tell(file, changed, "now has", as_json)


def remove(file: File, number: Number, as_json: Json = False) -> int:
    """Remove a retired shard: its rows are no longer sampled."""
    from expstore.cluster.members import ClusterFile

    return _tell(file, ClusterFile.change(file, lambda known: known.remove(number)), "now has", as_json)


def show(
    file: File, token_file: TokenFile = None, token_host: TokenHosts = None, as_json: Json = False
) -> int:
    """List the shards, and ask each for its number of rows."""
    from expstore.cluster.members import ClusterFile
    from expstore.remote.tokens import Tokens
    from expstore.remote.transport import Address

    known, tokens = ClusterFile.load(file), Tokens(read_tokens(token_file, token_host), named=False)
    addresses = [Address.of(member.url) for member in known.list.members]
    sent = [tokens.of(address) for address in addresses]  # raises before anything is sent
    found = [
        asdict(member) | _look(member.url, token, member.uuid)
        for member, token in zip(known.list.members, sent, strict=True)
    ]
    if as_json:
        print_json({"uuid": known.uuid, "revision": known.list.revision, "shards": found})
    else:
        rows = [
            (one["number"], one["url"], "yes" if one["accepts"] else "retired", one["rows"], one["error"])
            for one in found
        ]
        print_table(["shard", "url", "accepts", "rows", "error"], rows)
    return int(any(one["error"] for one in found))


def _look(url: str, token: str | None, store: str | None) -> dict[str, Any]:
    """Return the number of rows of a store, or why it is unknown."""
    try:
        facts = _ask(url, token)
    except StorageError as exc:  # it does not answer, or cannot read its store
        return {"rows": None, "error": exc.message}
    if facts["uuid"] != store:
        return {"rows": None, "error": f"this is store {facts['uuid']}, not {store}"}
    return {"rows": facts["rows"], "error": None}


def _ask(url: str, token: str | None) -> dict[str, Any]:
    """Return the facts of a served store.

    Raises:
        NotFoundError: The server has no such store.
        RemoteError: It does not answer, or does not accept the token.
        ValueError: It is not the address of a store.
    """
    from expstore.remote.transport import Address, Connection, Retries

    connection = Connection(Address.of(url), token, timeout=_TIMEOUT, retries=Retries(seconds=0.0))
    try:
        facts: dict[str, Any] = connection.request("GET", "").json()
    finally:
        connection.close()
    return facts


def _tell(file: Path, known: ClusterFile, verb: str, as_json: bool) -> int:
    members: Sequence[Any] = known.list.members
    if as_json:
        shards = [asdict(member) for member in members]
        print_json({"uuid": known.uuid, "revision": known.list.revision, "shards": shards})
    else:
        accepting = [str(member.number) for member in members if member.accepts]
        retired = [str(member.number) for member in members if not member.accepts]
        text = f"; retired: {', '.join(retired)}" if retired else ""
        typer.echo(f"{file} {verb} {len(members)} shards; accepting sources: {', '.join(accepting)}{text}")
    return 0


add_command(
    cluster,
    init,
    notes="The servers must answer: the file has the uuid of each store.",
    examples=(
        "expstore cluster init cluster.json http://host-a:8420/run http://host-b:8420/run",
        "expstore cluster init cluster.json http://host-a:8420/run --token-file token",
    ),
)
add_command(
    cluster,
    add,
    notes="Sources that are new go to it, and batches have rows of it as soon as it has any.",
    examples=(
        "expstore cluster add cluster.json http://host-c:8420/run",
        "expstore cluster add cluster.json http://host-c:8420/run --json",
    ),
)
add_command(
    cluster,
    retire,
    notes="The shard is sampled as before. Sources leave it when their episodes end. `cluster show` says "
    "how many rows it has; `cluster remove` ends its part.",
    examples=(
        "expstore cluster retire cluster.json 0",
        "expstore cluster retire cluster.json 1 --json",
    ),
)
add_command(
    cluster,
    move,
    notes="Requests that wait for the former address are sent to the new one.",
    examples=(
        "expstore cluster move cluster.json 1 http://host-d:8420/run",
        "expstore cluster move cluster.json 1 http://host-d:8420/run --token-file token",
    ),
)
add_command(
    cluster,
    remove,
    notes="The store remains where it is. Its number is not used again.",
    examples=(
        "expstore cluster remove cluster.json 0",
        "expstore cluster remove cluster.json 1 --json",
    ),
)
add_command(
    cluster,
    show,
    notes="Exit codes: 0 all shards answer, 1 some do not.",
    examples=(
        "expstore cluster show cluster.json",
        "expstore cluster show cluster.json --json",
    ),
)
