"""The commands that check and repair stores.

Used by `expstore.cli.app`. They read options and print; the work is done in `expstore.maintenance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from expstore.cli.completion import complete_store
from expstore.cli.exit_codes import DAMAGED, FAILED
from expstore.cli.output import Json, print_json
from expstore.cli.paths import to_local
from expstore.exchange.base import show_progress

Store = Annotated[
    Path,
    typer.Argument(
        callback=to_local, autocompletion=complete_store, metavar="PATH", help="The store's folder."
    ),
]


def verify(path: Store, as_json: Json = False) -> int:
    """Check a store for damage."""
    from expstore import maintenance
    from expstore.disk.files import Disk
    from expstore.storages.snapshots.catalog import store_meant

    path = store_meant(Disk(), path)
    with show_progress("checking") as progress:
        found = maintenance.verify(path, progress=progress)
    fatal = any(finding.fatal for finding in found)
    if as_json:
        print_json({"path": str(path), "findings": [asdict(finding) for finding in found]})
    else:
        for finding in found:
            typer.echo(f"{finding.kind}: {finding.message}")
        typer.echo(f"{path}: {_count(found)}" + (", no row can be read" if fatal else ""))
    return DAMAGED if fatal else FAILED if found else 0


def repair(
    path: Store,
    drop_damaged: Annotated[
        bool,
        typer.Option(
            "--drop-damaged",
            help="Delete the rows of damaged blocks, up to 4,096 rows each, and damaged records.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    as_json: Json = False,
) -> int:
    """Rebuild derived files of a damaged store; with --drop-damaged also delete damaged rows."""
    from expstore import maintenance

    with show_progress("reading") as progress:
        done = maintenance.repair(path, drop_damaged=drop_damaged, dry_run=dry_run, progress=progress)
    if as_json:
        print_json(asdict(done) | {"path": str(path), "dry_run": dry_run})
    else:
        would = "would be: " if dry_run else ""
        for act in done.acts:
            typer.echo(f"{would}{act}")
        if done.lost:
            runs = ", ".join(f"{first} to {last}" for first, last in done.lost)
            typer.echo(f"{would}{done.lost_rows:,} rows dropped: ids {runs}")
        for finding in done.left:
            typer.echo(f"not repaired: {finding.kind}: {finding.message}")
        if done.left and not drop_damaged:
            typer.echo(
                "--drop-damaged deletes the damaged rows, if the store can be used without them", err=True
            )
    return DAMAGED if any(f.fatal for f in done.left) else FAILED if done.left else 0


def _count(found: Sequence[object]) -> str:
    return f"{len(found)} findings" if len(found) > 1 else "1 finding" if found else "nothing found"
