"""The commands `versions create`, `restore` and `list`, and the group with those of object storage.

Used by `expstore.cli.app`, which reports errors. None of the commands loads torch.
"""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore.cli import object_storage
from expstore.cli.completion import complete_store, complete_version
from expstore.cli.groups import add_command, make_group, show_help
from expstore.cli.output import Json, iso_text, print_json, print_versions
from expstore.cli.paths import Store, to_local
from expstore.cli.tokens import read_token
from expstore.core.tables import size_text
from expstore.errors import LockedError
from expstore.storages.format.paths import LOCK
from expstore.storages.snapshots.catalog import OWN_FOLDER, version_name

if TYPE_CHECKING:
    from expstore.storages.base import Storage
    from expstore.storages.snapshots.catalog import Version

KEEP = 5
#: How long a server may take to make a snapshot, in seconds.
_SERVER_SECONDS = 3600.0

Place = Annotated[
    Path,
    typer.Argument(
        callback=to_local, autocompletion=complete_store, metavar="PATH", help="The folder of snapshots."
    ),
]


def create(
    store: Store,
    path: Annotated[
        Path | None,
        typer.Argument(
            callback=to_local,
            autocompletion=complete_store,
            metavar="PATH",
            help="The folder of snapshots; by default the one in the store's own folder.",
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            min=1, help=f"How many untagged snapshots to keep; {KEEP} by default, all if this one has a tag."
        ),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the snapshot; a tagged snapshot is never deleted automatically."
        ),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(
            callback=to_local,
            metavar="FILE",
            help="File with the token of the server that has the store open.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Save a snapshot of a store. If a server has the store open, the server makes it."""
    from expstore.disk.files import Disk
    from expstore.storages.format.manifest import Manifest
    from expstore.storages.snapshots.create import dump

    Manifest.load(Disk(), store)  # raises if there is no store: opening must not create one
    place = store / OWN_FOLDER if path is None or path.resolve() == store.resolve() else path
    try:
        kept = _open(store)
    except LockedError as exc:
        made = _ask_server(store, place, keep, tag, token_file, exc)
    else:
        with closing(kept):
            made = dump(kept, place, keep=keep or (None if tag else KEEP), tag=tag)
    if as_json:
        print_json(_facts(made))
    else:
        name = f" ({made.tag})" if made.tag else ""
        size = size_text(made.new_bytes)
        typer.echo(f"snapshot {made.number}{name}: {made.rows:,} rows, {size} written to {place}")
    return 0


def _ask_server(
    store: Path, place: Path, keep: int | None, tag: str | None, token_file: Path | None, locked: LockedError
) -> Version:
    """Let the server that has a store open make a snapshot of it.

    Raises:
        LockedError: The process that has it open is no server, or keeps its snapshots elsewhere.
    """
    from expstore.disk.files import Disk
    from expstore.disk.writer_lock import read_owner
    from expstore.remote.snapshots import RemoteSnapshots
    from expstore.remote.transport import Address, Connection

    disk = Disk()
    owner = read_owner(disk, store / LOCK)
    if owner is None or not owner.address or not owner.lives(disk):
        hint = "let that process make the snapshot: rb.dumps(PATH)"
        raise LockedError(locked.message, hint=hint) from locked
    if keep is not None or place.resolve() != (store / OWN_FOLDER).resolve():
        raise LockedError(
            f"{owner.address} serves {store}; a server keeps its snapshots in the store's own folder",
            hint=f"leave PATH and --keep out: expstore versions create {store}",
        ) from locked

    def ask(method: str, route: str, body: Any, *, once: bool) -> Any:
        return connection.request(method, route, body=body, once=once).json()

    token = read_token(token_file)
    with closing(Connection(Address.of(owner.address), token, timeout=_SERVER_SECONDS)) as connection:
        snapshots = RemoteSnapshots(ask)
        made = snapshots.create() if tag is None else snapshots.tag(tag)
    return dataclasses.replace(made, path=place / version_name(made.number))  # a server tells no paths


def restore(
    store: Store,
    path: Place,
    version: Annotated[
        str | None,
        typer.Option(
            autocompletion=complete_version,
            metavar="V",
            help="Number or tag of the snapshot; by default the newest.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Replace the rows of a store by those of a snapshot, or create a store from a snapshot."""
    from expstore.cold import download
    from expstore.disk.files import Disk
    from expstore.maintenance import survey
    from expstore.storages.format.manifest import MANIFEST
    from expstore.storages.snapshots.catalog import find_version

    disk = Disk()
    folder = find_version(disk, path, version)
    if disk.exists(store / MANIFEST):
        kept = _open(store)
        try:
            kept.snapshots.restore(folder)
            rows = len(kept)
        finally:
            kept.close()
    else:
        download.restore(folder, store)
        rows = survey(store).rows
    if as_json:
        print_json({"path": str(store), "rows": rows, "version": str(folder)})
    else:
        typer.echo(f"{store} holds the {rows:,} rows of {folder}")
    return 0


def list_(
    path: Annotated[
        str,
        typer.Argument(
            autocompletion=complete_store,
            metavar="PATH",
            help="The folder of snapshots, or s3://bucket/prefix for versions on an object storage.",
        ),
    ],
    as_json: Json = False,
) -> int:
    """List the snapshots in a folder, or the versions on an object storage, oldest first."""
    from expstore.cold.object_storage import is_object_url
    from expstore.storages.snapshots import catalog

    if is_object_url(path):
        return object_storage.list_remote(path, as_json)
    found = catalog.versions(path)
    sizes = {"on disk": "disk_bytes", "written": "new_bytes"}
    print_versions(found, [_facts(version) for version in found], sizes, as_json=as_json)
    return 0


def _open(path: Path) -> Storage:
    from expstore.storages.factory import open_storage

    kept = open_storage(path)
    if kept.counters.recovered:
        typer.echo(f"note: {kept.counters.recovered}", err=True)
    return kept


def _facts(version: Version) -> dict[str, Any]:
    facts = dataclasses.asdict(version) | {"time": iso_text(version.time), "path": str(version.path)}
    return facts if version.disk_bytes else {name: facts[name] for name in facts if name != "disk_bytes"}


versions = make_group(
    name="versions",
    help="Snapshots of stores, in folders and on object storages such as S3.",
    invoke_without_command=True,
    callback=show_help,
)
add_command(
    versions,
    create,
    notes="Files that have not changed since the previous snapshot are shared with it.",
    examples=("expstore versions create run.exp", "expstore versions create run.exp backup --tag best"),
)
add_command(
    versions,
    restore,
    notes="After a crash the store has either its former rows or the rows of the snapshot.",
    examples=(
        "expstore versions restore new.exp backup",
        "expstore versions restore run.exp backup --version best",
    ),
)
add_command(
    versions,
    list_,
    name="list",
    notes="For a store, lists the snapshots in its own folder.",
    examples=("expstore versions list backup", "expstore versions list s3://bucket/run --json"),
)
add_command(
    versions,
    object_storage.push,
    notes=object_storage.PUSH_NOTES,
    examples=(
        "expstore versions push run.exp s3://bucket/run",
        "expstore versions push backup s3://bucket/run --version best",
    ),
)
add_command(
    versions,
    object_storage.pull,
    notes=object_storage.PULL_NOTES,
    examples=(
        "expstore versions pull s3://bucket/run copy.exp",
        "expstore versions pull s3://bucket/run best.exp --version best",
    ),
)
add_command(
    versions,
    object_storage.prune,
    notes=object_storage.PRUNE_NOTES,
    examples=(
        "expstore versions prune s3://bucket/run --keep 1",
        "expstore versions prune s3://bucket/run --drop best",
    ),
)
