"""Show one episode of a store for the command line: its facts and rows, or a picture of it.

Used by `expstore.cli.app`. It opens the store as a reader, changes nothing in it, and does not load torch;
matplotlib is loaded for a picture only.
"""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore.cli.chats import has_calls, show_conversations
from expstore.cli.output import Json, print_json, print_table
from expstore.cli.paths import to_local
from expstore.core.tables import cell_text, elide, printable
from expstore.errors import NotFoundError

if TYPE_CHECKING:
    from expstore.storages.follower import FollowerStorage

#: Number of rows listed at either end of the episode.
_ENDS = 3
#: Number of characters of the facts; `--json` prints all.
_WIDTH = 100


def episode(
    path: Annotated[
        Path, typer.Argument(callback=to_local, metavar="STORE", help="The folder of the store.")
    ],
    number: Annotated[int, typer.Argument(metavar="ID", help="The id of the episode, as in SQL.")],
    png: Annotated[
        Path | None,
        typer.Option(callback=to_local, metavar="FILE", help="Write a picture of the episode to a PNG file."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Show an episode: its facts, its first and last rows; or write a picture of it."""
    from expstore.disk.files import Disk
    from expstore.storages.follower import FollowerStorage
    from expstore.storages.snapshots.catalog import store_meant

    with contextlib.closing(FollowerStorage(store_meant(Disk(), path))) as storage:
        facts = _find_facts(storage, number, path)
        if png is not None:
            _write_picture(storage, facts, png)
        if as_json:
            print_json(_to_json(facts) | {"path": str(path), "png": None if png is None else str(png)})
        elif png is not None:
            typer.echo(f"a picture of episode {number} was written to {png}")
        else:
            _show_facts(facts)
            if has_calls(storage.schema):
                show_conversations(path, number)
            _show_rows(storage, number)
    return 0


def _find_facts(storage: FollowerStorage, number: int, path: Path) -> dict[str, Any]:
    """Return the episode's row of the relation `episodes`, by column."""
    from expstore.sql.sync import Catalog
    from expstore.storages.episode_lookup import unknown_episode

    catalog = Catalog(storage)
    try:
        found = catalog.episodes("episode_id = ?", None, None, [number])
    finally:
        catalog.drop()
    if not len(found):
        raise NotFoundError(
            unknown_episode(storage, number).message,
            hint=f"expstore sql {path} 'SELECT * FROM episodes' lists them",
        )
    return dict(zip(found.columns, found.fetchall()[0], strict=True))


def _write_picture(storage: FollowerStorage, facts: dict[str, Any], png: Path) -> None:
    from expstore.disk.files import Disk
    from expstore.plot import draw_episode

    buffer = io.BytesIO()
    draw_episode(storage, facts).savefig(buffer, format="png")
    Disk().write_whole(png, buffer.getvalue())


def _to_json(facts: dict[str, Any]) -> dict[str, Any]:
    info = facts["info"]
    times = {name: facts[name].isoformat() for name in ("start_time", "end_time")}
    return facts | times | {"info": None if info is None else json.loads(info)}


def _show_facts(facts: dict[str, Any]) -> None:
    kept = "" if facts["live_rows"] == facts["length"] else f", {facts['live_rows']:,} rows are left"
    lines = {
        "episode": facts["episode_id"],
        "source": cell_text(facts["source"]),
        "status": facts["status"],
        "length": f"{facts['length']:,} steps{kept}",
        "return": "none" if facts["return"] is None else f"{facts['return']:.6g}",
        "written": f"{facts['start_time']:%Y-%m-%d %H:%M:%S} to {facts['end_time']:%Y-%m-%d %H:%M:%S} (UTC)",
        "facts": "none" if facts["info"] is None else elide(printable(facts["info"]), _WIDTH),
    }
    for name, text in lines.items():
        typer.echo(f"{name:8} {text}")


def _show_rows(storage: FollowerStorage, number: int) -> None:
    """Print the first and the last rows that are left."""
    import numpy as np

    from expstore.storages.episode_lookup import steps_of_episode
    from expstore.storages.preview import preview_rows
    from expstore.storages.read_view import read_stable

    try:
        ids, steps = steps_of_episode(storage, number)
    except NotFoundError:  # only the facts are left, as they say
        return
    places = np.arange(ids.size)
    listed = places[(places < _ENDS) | (places >= ids.size - _ENDS)]
    found, names, rows = read_stable(storage, lambda: preview_rows(storage, ids[listed]))
    step_of = dict(zip(ids[listed].tolist(), steps[listed].tolist(), strict=True))
    typer.echo("")
    print_table(
        ["_step", *names],
        [[step_of[row_id], *row] for row_id, row in zip(found.tolist(), rows, strict=True)],
    )
    if ids.size > listed.size:
        typer.echo(f"{ids.size - listed.size:,} rows between them are not listed")
