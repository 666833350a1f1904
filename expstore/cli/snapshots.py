"""The commands `dumps`, `loads` and `versions`.

Used by `expstore.cli.app`, which reports errors. None of the commands loads torch.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore.cli.completion import complete_store, complete_version
from expstore.cli.object_storage import list_remote
from expstore.cli.output import iso_text, print_json, print_versions, size_text
from expstore.cli.paths import Store, to_local
from expstore.errors import LockedError

if TYPE_CHECKING:
    from expstore.storages.base import Storage
    from expstore.storages.snapshots.catalog import Version

__all__ = ["dumps", "loads", "versions"]

KEEP = 5

Place = Annotated[
    Path,
    typer.Argument(
        callback=to_local, autocompletion=complete_store, metavar="PATH", help="The folder of snapshots."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def dumps(
    store: Store,
    path: Place,
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
    as_json: Json = False,
) -> int:
    """Save a snapshot of a store; no other process may write to it meanwhile."""
    from expstore.disk.files import Disk
    from expstore.storages.format.manifest import Manifest
    from expstore.storages.snapshots.create import dump

    Manifest.load(Disk(), store)  # raises if there is no store: opening must not create one
    try:
        kept = _open(store)
    except LockedError as exc:
        hint = (
            "let that process make the snapshot: rb.dumps(PATH), or POST /v1/stores/NAME/dumps to its server"
        )
        raise LockedError(exc.message, hint=hint) from exc
    try:
        made = dump(kept, path, keep=keep or (None if tag else KEEP), tag=tag)
    finally:
        kept.close()
    if as_json:
        print_json(_facts(made))
    else:
        name = f" ({made.tag})" if made.tag else ""
        typer.echo(
            f"snapshot {made.number}{name}: {made.rows:,} rows, {size_text(made.new_bytes)} written to {path}"
        )
    return 0


def loads(
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
    from expstore.cold.download import restore
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
        restore(folder, store)
        rows = survey(store).rows
    if as_json:
        print_json({"path": str(store), "rows": rows, "version": str(folder)})
    else:
        typer.echo(f"{store} holds the {rows:,} rows of {folder}")
    return 0


def versions(
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
    from expstore.storages.snapshots.catalog import versions as list_versions

    if is_object_url(path):
        return list_remote(path, as_json)
    found = list_versions(path)
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
