"""The command `odd`.

Used by `expstore.cli.app`, which reports errors. It opens the store as a reader and does not load torch.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from expstore.cli.output import Json, print_json, rows_of
from expstore.cli.paths import Store
from expstore.core.tables import cell_text, printable


def odd(
    store: Store,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of episodes.")] = 20,
    as_json: Json = False,
) -> int:
    """List the episodes that differ most from their peers, and why."""
    from expstore.buffers.measuring import Meter
    from expstore.disk.files import Disk
    from expstore.sql.sync import Catalog
    from expstore.storages.follower import FollowerStorage
    from expstore.storages.snapshots.catalog import store_meant
    from expstore.trajectories.odd import THRESHOLD

    with contextlib.closing(FollowerStorage(store_meant(Disk(), store))) as storage:
        catalog = Catalog(storage)
        storage.index.use(catalog)
        try:
            found, count, compared = Meter(storage, catalog).list_odd(limit, THRESHOLD)
        finally:
            catalog.drop()
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
