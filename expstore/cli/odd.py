"""The commands `odd` and `changes`, which list episodes that need a look.

Used by `expstore.cli.app`, which reports errors. It opens the store as a reader and does not load torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from expstore.cli.output import Json, print_json, rows_of
from expstore.cli.paths import Store
from expstore.core.tables import cell_text, printable

if TYPE_CHECKING:
    from expstore.sql.sync import Catalog
    from expstore.storages.follower import FollowerStorage


@contextlib.contextmanager
def _read(store: Path) -> Iterator[tuple[FollowerStorage, Catalog]]:
    """Open a store for reading, with a catalog in memory."""
    from expstore.disk.files import Disk
    from expstore.sql.sync import Catalog
    from expstore.storages.follower import FollowerStorage
    from expstore.storages.snapshots.catalog import store_meant

    with contextlib.closing(FollowerStorage(store_meant(Disk(), store))) as storage:
        catalog = Catalog(storage)
        storage.index.use(catalog)
        try:
            yield storage, catalog
        finally:
            catalog.drop()


def odd(
    store: Store,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of episodes.")] = 20,
    as_json: Json = False,
) -> int:
    """List the episodes that differ most from their peers, and why."""
    from expstore.buffers.measuring import Meter
    from expstore.trajectories.odd import THRESHOLD

    with _read(store) as (storage, catalog):
        found, count, compared = Meter(storage, catalog).list_odd(limit, THRESHOLD)
    rows = [dict(zip(found.columns, row, strict=True)) for row in rows_of(found)]
    if as_json:
        print_json({"path": str(store), "compared": compared, "odd": count, "episodes": rows})
        return 0
    typer.echo(f"{count:,} of {compared:,} episodes are odd")
    lines = [("episode", "source", "score", "reason")] if rows else []
    lines += [
        (str(one["episode_id"]), cell_text(one["source"]), f"{one['score']:.1f}", one["reason"])
        for one in rows
    ]
    widths = [max((len(line[at]) for line in lines), default=0) for at in range(3)]
    for number, name, score, reason in lines:
        text = f"{number:>{widths[0]}}  {name:<{widths[1]}}  {score:>{widths[2]}}  {reason}"
        typer.echo(printable(text))
    return 0


def changes(
    store: Store,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of changes.")] = 20,
    as_json: Json = False,
) -> int:
    """List since when which episodes differ from those before, and how."""
    from expstore.buffers.changes import ChangeList

    with _read(store) as (storage, catalog):
        listed = ChangeList(storage, catalog)
        listed.measure()
        found, compared, _ = listed.find(limit)
    rows = [dict(zip(found.columns, row, strict=True)) for row in rows_of(found)]
    if as_json:
        print_json({"path": str(store), "compared": compared, "changes": rows})
        return 0
    typer.echo(f"{len(rows):,} {'change' if len(rows) == 1 else 'changes'} in {compared:,} episodes")
    for one in rows:
        since = one["since"].strftime("%Y-%m-%d %H:%M")
        text = f"since {since} (row {one['row_id']:,}), {one['reason']}"
        typer.echo(printable(f"{one['kind']:<11}  {one['score']:>6.1f}  {text}"))
        typer.echo(printable(f"{'':<21}{one['where']}"))
    return 0
