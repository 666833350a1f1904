"""The command `export`.

Used by `cli`, which reports what it raises. It never changes a store.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from expstore.cli_print import print_json, show_progress, size_text

__all__ = ["export"]


def export(
    store: Annotated[
        Path,
        typer.Argument(metavar="STORE", help="A store, also one in use; a version; a folder of versions."),
    ],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="What is made; must not be there yet.")],
    as_zarr: Annotated[
        bool,
        typer.Option("--zarr", help="As a plain Zarr v3 group, an array per field; the one form there is."),
    ] = False,
    fields: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only these, as in observation,next.reward.")
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(metavar="V", help="Number or tag of a version; else the store, or the newest."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Write the rows that can be read for programs that do without expstore."""
    if not as_zarr:
        raise typer.BadParameter(
            "missing: it says in which form, and is the one there is", param_hint="--zarr"
        )
    from expstore.exchange import export_zarr
    from expstore.files import Disk
    from expstore.snapshots import find_version, store_meant
    from expstore.storages.follower import FollowerStorage

    disk = Disk()
    path = store_meant(disk, store) if version is None else find_version(disk, store, version)
    storage = FollowerStorage(path)
    try:
        storage.refresh()
        names = None if fields is None else [name.strip() for name in fields.split(",")]
        with show_progress("exporting") as show, _stoppable(show) as progress:
            done = export_zarr(storage, target, fields=names, progress=progress, disk=disk)
    finally:
        storage.close()
    if as_json:
        facts = {"rows": done.rows, "left_out": done.left_out, "fields": list(done.fields)}
        print_json({"path": str(done.path), **facts, "disk_bytes": done.disk_bytes})
    else:
        typer.echo(f"{target} holds {done.rows:,} rows, {size_text(done.disk_bytes)}")
        if done.left_out:
            typer.echo(
                f"note: {done.left_out:,} rows are not in it: others took their places meanwhile; a version "
                "has them all, see expstore dumps",
                err=True,
            )
    return 0


@contextmanager
def _stoppable(show: Callable[[int, int], None]) -> Iterator[Callable[[int, int], None]]:
    """Let Ctrl-C end the work between two pieces, and only there: what packs a piece runs in a thread.

    Args:
        show: Is told bytes done and bytes in all.

    Yields:
        What does that, and raises KeyboardInterrupt after a Ctrl-C.
    """
    seen: list[int] = []

    def progress(done: int, total: int) -> None:
        show(done, total)
        if seen:
            raise KeyboardInterrupt

    former = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        yield progress
    finally:
        if not seen:  # else the process is about to end, and nothing interrupts that
            signal.signal(signal.SIGINT, former)
