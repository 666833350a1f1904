"""The commands `resize` and `merge`.

Used by `expstore.cli.app`, which reports errors. Neither command loads torch.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expstore.cli.completion import complete_store
from expstore.cli.exit_codes import FAILED
from expstore.cli.interrupt import stoppable
from expstore.cli.output import Json, print_json
from expstore.cli.paths import Store, to_local
from expstore.errors import StateError
from expstore.exchange.base import show_progress

if TYPE_CHECKING:
    from expstore.maintenance.resize import Resized


def resize(
    store: Store,
    capacity: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="New maximum number of rows.")
    ] = None,
    unbounded: Annotated[bool, typer.Option("--unbounded", help="Remove the limit.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete the oldest rows if not all fit, without asking.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Change the capacity of a store; no process may write to it meanwhile."""
    if (capacity is None) != unbounded:
        raise typer.BadParameter("pass either --capacity N or --unbounded")
    from expstore.maintenance.resize import open_for_resize

    with open_for_resize(store, capacity=capacity) as (outcome, run):
        if outcome.recovered:
            typer.echo(f"note: {outcome.recovered}", err=True)
        if outcome.given_up and not yes:
            _ask(outcome)
        with show_progress("resizing") as show, stoppable(show) as progress:
            run(progress)
    if as_json:
        facts = {"former": outcome.former, "capacity": outcome.capacity, "rows": outcome.rows}
        print_json({"path": str(store), **facts, "given_up": outcome.given_up})
    else:
        told = f", {outcome.given_up:,} were deleted" if outcome.given_up else ""
        typer.echo(
            f"{store} holds {outcome.rows:,} rows{told}; capacity {_text(outcome.capacity)}, "
            f"before {_text(outcome.former)}"
        )
    return 0


def merge(
    stores: Annotated[
        list[Path],
        typer.Argument(
            callback=to_local,
            autocompletion=complete_store,
            metavar="STORE...",
            help="Stores, snapshots or folders of snapshots, in the order of their rows.",
        ),
    ],
    out: Annotated[
        Path, typer.Option(callback=to_local, metavar="OUT", help="The new store; must not exist.")
    ],
    capacity: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Maximum number of rows; the last are kept. By default all."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Merge the rows of several stores into a new store; no process may write to them meanwhile."""
    from expstore.maintenance.merge import merge as join

    with show_progress("merging") as show, stoppable(show) as progress:
        made = join(stores, out=out, capacity=capacity, progress=progress)
    if as_json:
        runs = [{**dataclasses.asdict(run), "path": str(run.path)} for run in made.runs]
        print_json({"path": str(out), "rows": made.rows, "given_up": made.given_up, "runs": runs})
        return 0
    for run in made.runs:
        told = f"{run.rows:,} rows, {run.episodes:,} episodes (with those that have no rows left)"
        typer.echo(f"{run.path}: {told}; sources {run.name}/...")
    told = f", {made.given_up:,} older rows did not fit" if made.given_up else ""
    typer.echo(f"{out} holds {made.rows:,} rows{told}")
    return 0


def _ask(outcome: Resized) -> None:
    """Ask the user to confirm that rows are deleted; without a terminal raise StateError."""
    what = f"the oldest {outcome.given_up:,} of {outcome.rows + outcome.given_up:,} rows do not fit"
    if not sys.stdin.isatty():
        raise StateError(f"{what}; nothing was changed", hint="pass --yes to delete them")
    if not typer.confirm(f"{what} and will be deleted. Continue?", err=True):
        typer.echo("nothing was changed", err=True)
        raise typer.Exit(FAILED)


def _text(capacity: int | None) -> str:
    return "unbounded" if capacity is None else f"{capacity:,}"
