"""The command `retain`.

Used by `expstore.cli.app`, which reports errors.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from expstore.cli.output import Json, print_json
from expstore.cli.paths import Store
from expstore.core.tables import size_text


def retain(
    store: Store,
    size: Annotated[
        str | None,
        typer.Option("--bytes", metavar="SIZE", help="Maximum size of the remaining rows, such as 2GB."),
    ] = None,
    age: Annotated[
        str | None,
        typer.Option("--age", metavar="AGE", help="Delete episodes that ended longer ago, such as 7d."),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="SQL",
            help="Keep only episodes with at least one row that matches, such as 'episode.length >= 15'.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")] = False,
    as_json: Json = False,
) -> int:
    """Delete whole episodes of a store; no other process may write to it."""
    from expstore.buffers.policy_runner import make_runner
    from expstore.core.retention_policy import Retain
    from expstore.disk.files import Disk
    from expstore.sql.sync import Catalog
    from expstore.storages.factory import open_storage
    from expstore.storages.format.manifest import Manifest

    found = Manifest.load(Disk(), store)  # raises if there is no store: opening must not create one
    kept = found.retain
    given: dict[str, Any] = {"bytes": size, "age": age, "where": where}
    policy = Retain(**given) if any(value is not None for value in given.values()) else Retain(**kept)
    if not policy:
        raise typer.BadParameter("the store has no policy: pass --bytes, --age or --where")
    storage = open_storage(store)
    try:
        catalog = Catalog(storage)
        runner = make_runner(storage, catalog)
        runner.check(policy)
        gone = runner.apply(policy, dry_run=dry_run)
        rows, used = storage.stored.rows, storage.retention.columns_bytes()
        if dry_run:
            rows, used = rows - gone.rows, used - gone.bytes
        catalog.close()
    finally:
        storage.close()
    if as_json:
        print_json(gone._asdict() | {"path": str(store), "rows_left": rows, "dry_run": dry_run})
    else:
        would = "would be deleted from" if dry_run else "were deleted from"
        typer.echo(
            f"{gone.episodes:,} episodes with {gone.rows:,} rows {would} {store}, "
            f"which frees {size_text(gone.bytes)}; {rows:,} rows remain, {size_text(used)}"
        )
    return 0
