"""The command `changes`.

Used by `expstore.cli.app`, which reports errors. It opens the store as a reader and does not load torch.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from expstore.cli.output import Json, print_json, rows_of
from expstore.cli.paths import Store
from expstore.core.tables import printable


def changes(
    store: Store,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of changes.")] = 20,
    as_json: Json = False,
) -> int:
    """List since when which episodes differ from those before, and how."""
    from expstore.buffers.changes import ChangeList
    from expstore.disk.files import Disk
    from expstore.sql.sync import Catalog
    from expstore.storages.follower import FollowerStorage
    from expstore.storages.snapshots.catalog import store_meant

    with contextlib.closing(FollowerStorage(store_meant(Disk(), store))) as storage:
        catalog = Catalog(storage)
        storage.index.use(catalog)
        try:
            listed = ChangeList(storage, catalog)
            listed.measure()
            found, compared, _ = listed.find(limit)
        finally:
            catalog.drop()
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
