"""The commands `ship`, `versions push`, `pull` and `prune`, and the list of versions on an object storage.

Used by `expstore.cli.snapshots` and `expstore.cli.app`. None of the commands loads torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore.cli.completion import complete_store
from expstore.cli.output import Json, iso_text, print_json, print_versions
from expstore.cli.paths import to_local
from expstore.core.tables import size_text

if TYPE_CHECKING:
    from expstore.cold.version_list import RemoteVersion

_ENVIRONMENT = (
    "Credentials come from the environment: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, and "
    "AWS_ENDPOINT_URL for other servers than Amazon's."
)
#: How long the command may take, seconds.
PUSH_NOTES = (
    "What the server has is not sent again, also after an interruption: run the command again. Of a store "
    "that was shipped to URL, only what is not shipped yet is sent; the command claims the address. A store "
    f"that another process writes to cannot be pushed; push a snapshot that it has made. {_ENVIRONMENT}"
)
PULL_NOTES = (
    "Every file is compared with its checksum. The store exists completely or not at all. Twice the size of "
    f"the version must be free. {_ENVIRONMENT}"
)
PRUNE_NOTES = (
    "Also removes what interrupted pushes have sent more than a day ago. Other programs may push, pull, ship "
    f"and read meanwhile; the newest state of a shipped store remains. {_ENVIRONMENT}"
)

SHIP_NOTES = (
    "Also makes the store of what was shipped before, if its folder is empty or missing. If another process "
    "has the store open, that process ships it until it closes it, with the credentials of its own "
    "environment; the command returns once everything is shipped. The next opening does not ship by itself: "
    f'use expstore.open(path, ship="s3://...") or expstore serve --ship there. {_ENVIRONMENT}'
)

Url = Annotated[
    str, typer.Argument(metavar="URL", help="Where the versions are, such as s3://bucket/prefix.")
]


def push(
    store: Annotated[
        Path,
        typer.Argument(
            callback=to_local,
            autocompletion=complete_store,
            metavar="STORE",
            help="The folder of a store, or of snapshots.",
        ),
    ],
    url: Url,
    version: Annotated[
        str | None,
        typer.Option(
            metavar="V",
            help="Number or tag of a snapshot; by default the newest of a folder, and a new one of a store.",
        ),
    ] = None,
    tag: Annotated[
        str | None, typer.Option(metavar="TAG", help="Name of the new version, which prune keeps.")
    ] = None,
    any_store: Annotated[
        bool, typer.Option("--any-store", help="Push although the address has versions of another store.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Send a version of a store to an object storage such as S3."""
    from expstore import cold

    sent = cold.push(store, url, version=version, tag=tag, any_store=any_store)
    if as_json:
        print_json(_facts(sent))
    else:
        parts = f"{sent.new_parts} parts" if sent.state else f"{sent.new_parts} of {sent.files} files"
        typer.echo(
            f"version {sent.number}{_tag(sent)}: {sent.rows:,} rows, {parts}, "
            f"{size_text(sent.new_bytes)} sent to {url}"
        )
    return 0


def pull(
    url: Url,
    store: Annotated[
        Path,
        typer.Argument(
            callback=to_local, metavar="STORE", help="The new store's folder, which must not exist."
        ),
    ],
    version: Annotated[
        str | None,
        typer.Option(metavar="V", help="Number or tag of the version; by default the newest."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Create a store from a version on an object storage."""
    from expstore import cold

    found = cold.pull(url, store, version=version)
    if as_json:
        print_json({"path": str(store), "version": _facts(found)})
    else:
        typer.echo(f"{store} has the {found.rows:,} rows of version {found.number}{_tag(found)} in {url}")
    return 0


def prune(
    url: Url,
    keep: Annotated[
        int | None, typer.Option(min=1, help="How many of the newest versions without a tag remain.")
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(metavar="V", help="Number or tag of a version to remove; may be repeated."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Remove versions from an object storage, and what no remaining version needs."""
    from expstore import cold

    if keep is None and not drop:
        raise typer.BadParameter("say what to remove: --keep N or --drop V")
    done = cold.prune(url, keep=keep, drop=drop or ())
    if as_json:
        versions = [_facts(version) for version in done.versions]
        print_json({"versions": versions, "parts": done.parts, "bytes": done.bytes})
    else:
        names = ", ".join(f"{version.number}{_tag(version)}" for version in done.versions) or "none"
        typer.echo(f"versions removed: {names}; {done.parts} files, {size_text(done.bytes)} deleted")
    return 0


def list_remote(url: str, as_json: bool) -> int:
    """Print the versions on an object storage, oldest first."""
    from expstore import cold

    found = cold.versions(url)
    sizes = {"size": "bytes", "sent": "new_bytes"}
    print_versions(found, [_facts(version) for version in found], sizes, as_json=as_json)
    return 0


def _tag(version: RemoteVersion) -> str:
    return f" ({version.tag})" if version.tag else ""


def _facts(version: RemoteVersion) -> dict[str, Any]:
    return dataclasses.asdict(version) | {"time": iso_text(version.time)}


def ship(
    store: Annotated[
        Path,
        typer.Argument(
            callback=to_local, autocompletion=complete_store, metavar="STORE", help="The folder of a store."
        ),
    ],
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to ship it, such as s3://bucket/run.")],
    as_json: Json = False,
) -> int:
    """Ship a store to an object storage, also one that a program writes to, or restore it from there."""
    from contextlib import closing

    from expstore.cold.ship import Shipper
    from expstore.cold.ship_request import SHIP_SECONDS, ask_writer
    from expstore.cold.ship_settings import Ship
    from expstore.disk.files import Disk
    from expstore.errors import LockedError, NotFoundError
    from expstore.storages.factory import open_storage
    from expstore.storages.format.manifest import MANIFEST

    disk, shipper = Disk(), None
    if not disk.exists(store / MANIFEST):
        shipper = Shipper(Ship(url))
        shipper.restore_missing(store)
        if not disk.exists(store / MANIFEST):
            raise NotFoundError(
                f"{store} has no store, and nothing was shipped to {url}", hint="correct the path"
            )
    try:
        storage = open_storage(store)
    except LockedError:
        facts = ask_writer(store, url)  # which has credentials of its own
    else:
        with closing(storage):
            shipper = shipper or Shipper(Ship(url))
            shipper.start(storage)
            shipper.wait(SHIP_SECONDS)
            facts = shipper.stats()
    if as_json:
        print_json({"path": str(store), "shipped": facts})
    else:
        typer.echo(f"{store}: all {facts['rows']:,} rows are at {url}, {size_text(facts['bytes'])} were sent")
    return 0
