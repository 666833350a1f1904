"""The command `consumers`.

Used by `expstore.cli.app`, which reports errors. It does not load torch.
"""

from __future__ import annotations

import dataclasses

import typer

from expstore.cli.output import Json, print_json, print_table
from expstore.cli.paths import Store
from expstore.core.tables import size_text


def consumers(store: Store, as_json: Json = False) -> int:
    """List the consumers of a store: how far they have come, and what is committed."""
    from expstore.disk.files import Disk
    from expstore.storages.follower import FollowerStorage
    from expstore.storages.format.draw_log import describe_consumers
    from expstore.storages.format.manifest import Manifest

    disk = Disk()
    Manifest.load(disk, store)  # raises if there is no store
    storage = FollowerStorage(store)
    try:
        found = describe_consumers(disk, store, storage.window.rows)
    finally:
        storage.close()
    if as_json:
        print_json({"consumers": [dataclasses.asdict(one) for one in found]})
    elif found:
        rows = [
            (
                one.name,
                one.draws,
                one.committed,
                one.leased,
                size_text(one.log_bytes),
                "yes" if one.is_open else "no",
            )
            for one in found
        ]
        print_table(["name", "draws", "committed", "leased", "log", "open"], rows)
        for one in found:
            if one.damage is not None:
                typer.echo(f"{one.name} is damaged: {one.damage}")
    else:
        typer.echo(f"{store} has no consumers")
    return 0
