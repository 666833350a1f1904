"""The command that upgrades a store to the current format.

Used by `expstore.cli.app`. It reads options and prints; the work is done in `expstore.maintenance.upgrade`.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from expstore.cli.completion import complete_store
from expstore.cli.output import print_json
from expstore.cli.paths import to_local

__all__ = ["migrate"]


def migrate(
    path: Annotated[
        Path,
        typer.Argument(
            callback=to_local, autocompletion=complete_store, metavar="PATH", help="The store's folder."
        ),
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Convert a store to the format of this version; replaced files are kept."""
    from expstore.maintenance.upgrade import upgrade

    done = upgrade(path, dry_run=dry_run)
    if as_json:
        print_json(asdict(done) | {"path": str(path), "dry_run": dry_run})
        return 0
    index = "no index" if done.index_found is None else f"index at step {done.index_found}"
    typer.echo(
        f"{path}: format {done.format_found}, {index}; "
        f"this version knows format {done.format_known} and {done.index_known} steps"
    )
    for act in done.acts:
        typer.echo(f"would be: {act}" if dry_run else act)
    if not done.acts:
        typer.echo("nothing to do")
    return 0
