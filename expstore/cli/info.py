"""The output of `expstore info`.

Used by `expstore.cli.app`. It never changes a store, and does not load torch.
"""

from __future__ import annotations

import json
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from expstore.cli.output import iso_text, local_text, print_table
from expstore.core.tables import size_text

if TYPE_CHECKING:
    from expstore.storages.columns.column import FieldSize


def stores_in(path: Path) -> list[Path]:
    """Return the stores in a folder, by name; none for a store, a snapshot or a folder of snapshots."""
    from expstore.disk.files import Disk
    from expstore.storages.format.manifest import MANIFEST
    from expstore.storages.snapshots.catalog import is_snapshots

    disk = Disk()
    if not disk.is_dir(path) or disk.exists(path / MANIFEST) or is_snapshots(disk, path):
        return []
    return sorted(path / name for name in disk.names(path) if disk.exists(path / name / MANIFEST))


def facts_of(path: Path, *, lineage: bool = False) -> dict[str, Any]:
    """Return the facts about a store or a snapshot, as `expstore info --json` prints them.

    Args:
        path: The store.
        lineage: Whether to add its lineage.
    """
    from expstore.cold.ship_settings import Origins
    from expstore.core.values import key_name
    from expstore.disk.files import Disk
    from expstore.maintenance import survey
    from expstore.maintenance.disk_usage import store_size
    from expstore.schema.row_fields import ROW_FIELDS
    from expstore.schema.spec_text import unpack_specs
    from expstore.storages.format.paths import VERSION
    from expstore.storages.format.write_key_file import count_keys
    from expstore.storages.snapshots.catalog import store_meant

    path = store_meant(Disk(), path)
    found = survey(path)
    manifest, writer, disk = found.manifest, found.writer, Disk()
    fields = manifest.schema.fields if manifest.schema else ()
    slots, rows = manifest.slots, found.rows if disk.exists(path / VERSION) else found.written
    size = store_size(disk, path, manifest, rows if slots is None else min(rows, slots))
    return {
        "path": str(path),
        "rows": found.rows,
        "capacity": manifest.capacity,
        "window": manifest.window,
        "written": found.written,
        "generation": manifest.generation,
        "created": iso_text(manifest.created),
        "last_write": iso_text(found.last_write),
        "disk_bytes": size.disk_bytes,
        "free_bytes": size.free_bytes,
        "million_rows_bytes": _million(size.row_bytes),
        "more_rows_fit": size.more_rows,
        "ring_fits": size.ring_fits,
        "row_bytes": sum(entry.row_bytes for entry in (*fields, *ROW_FIELDS)) if fields else None,
        "fields": [
            {"name": key_name(entry.key), "dtype": entry.dtype, "shape": list(entry.shape)}
            | ({"type": str(entry)} if entry.variable else {})
            | {"row_bytes": None if entry.variable else entry.row_bytes}
            | _size_facts(one)
            for entry, one in zip(fields, size.fields, strict=True)
        ],
        "episodes": found.episodes,
        "open_in": writer and {"pid": writer.pid, "host": writer.host, "since": iso_text(writer.since)},
        "unclean_stop": found.unclean,
        "storage": manifest.storage,
        "compression": manifest.compression,
        "write_keys": count_keys(disk, path) if manifest.keyed else 0,
        "shipped_to": Origins.load(disk, path).url or None,
        "uuid": manifest.uuid,
        "meta": manifest.meta,
        "specs": unpack_specs(manifest.specs) if manifest.specs else None,
    } | ({"lineage": _read_lineage(path)} if lineage else {})


def _read_lineage(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the relation `lineage` of a store."""
    from expstore.sql.row_source import read_lineage
    from expstore.storages.follower import FollowerStorage

    storage = FollowerStorage(path)
    try:
        rows: list[dict[str, Any]] = read_lineage(storage, storage.stored).to_pylist()
    finally:
        storage.close()
    return [
        row
        | {"time": iso_text(row["time"].replace(tzinfo=UTC).timestamp()), "facts": json.loads(row["facts"])}
        for row in rows
    ]


def _size_facts(size: FieldSize) -> dict[str, Any]:
    return {
        "layout": size.layout,
        "codec": size.codec,
        "chunk_rows": size.chunk_rows,
        "disk_bytes": size.disk_bytes,
        "million_rows_bytes": _million(size.row_bytes),
        "compression": size.compression and round(size.compression, 2),
        "shared": size.shared and round(size.shared, 4),
    }


def _million(row_bytes: float | None) -> int | None:
    return None if row_bytes is None else round(row_bytes * 1_000_000)


def show_facts(facts: dict[str, Any]) -> None:
    """Print the facts about a store as text."""
    from expstore.schema.spec_text import describe

    room = "unbounded" if facts["capacity"] is None else f"capacity {facts['capacity']:,}"
    if facts["window"] is not None:
        room += f", window {facts['window']:,}"
    writer = facts["open_in"]
    if writer:
        state = f"open in process {writer['pid']} on {writer['host']} since {local_text(writer['since'])}"
    elif facts["unclean_stop"]:
        state = "not closed: the last writer was stopped; opening the store recovers it"
    else:
        state = "closed"
    lines = {
        "rows": f"{facts['rows']:,} ({room}), {facts['written']:,} written in total",
        "episodes": ", ".join(f"{count:,} {status}" for status, count in facts["episodes"].items()),
        "state": state,
        "created": f"{local_text(facts['created'])}, generation {facts['generation']}",
        "last write": local_text(facts["last_write"]) if facts["last_write"] else "never",
        "on disk": f"{size_text(facts['disk_bytes'])}, {_room(facts)}",
        "per row": _row_text(facts),
    }
    if facts["shipped_to"]:
        lines["shipped to"] = facts["shipped_to"]
    if facts["write_keys"]:
        lines["keys"] = f"{facts['write_keys']:,} idempotency keys of writes at the last sync"
    if facts["specs"]:
        lines["specs"] = describe(facts["specs"])
    if facts["meta"]:
        lines["meta"] = json.dumps(facts["meta"])
    typer.echo(facts["path"])
    for name, line in lines.items():
        typer.echo(f"  {name:<10}  {line}")
    if facts["fields"]:
        # The longest column is last: a narrow terminal omits what does not fit.
        head = ["field", "dtype", "shape", "row bytes", "on disk", "per million", "layout"]
        print_table(head, [_line(field) for field in facts["fields"]])


def show_lineage(facts: dict[str, Any]) -> None:
    """Print the lineage of a store: a line for each step."""
    typer.echo(facts["path"])
    head = ["step", "time", "rows", "first id", "last id", "program", "commit", "what"]
    print_table(head, [_step_line(step) for step in facts["lineage"]])


def _step_line(step: dict[str, Any]) -> tuple[Any, ...]:
    known, commit = step["facts"], step["git_commit"]
    names = ("field", "sql", "function", "fill", "version", "tag", "capacity", "policy")
    what = [f"{name} {known[name]}" for name in names if known.get(name) is not None]
    what += [store["path"] for store in known.get("stores", ())]
    return (
        step["kind"],
        local_text(step["time"]),
        step["rows"],
        step["first_id"] or "",
        step["last_id"] or "",
        step["program"] or "",
        commit[:10] + ("+" if step["dirty"] else "") if commit else "",
        ", ".join([*([step["source"]] if step["source"] else []), *what]),
    )


def show_stores(found: list[dict[str, Any]]) -> None:
    """Print one line for each store."""
    print_table(
        ["store", "rows", "episodes", "on disk", "last write"],
        [
            [
                facts["path"],
                facts["rows"],
                sum(facts["episodes"].values()),
                size_text(facts["disk_bytes"]),
                local_text(facts["last_write"]) if facts["last_write"] else "never",
            ]
            for facts in found
        ],
    )


def _row_text(facts: dict[str, Any]) -> str:
    """Return the size of a row as text."""
    if facts["row_bytes"] is None:
        return "no fields yet"
    takes = f"a million take {size_text(facts['million_rows_bytes'])} on disk"
    packed = any(field["layout"] == "packed" for field in facts["fields"])
    return f"{size_text(facts['row_bytes'])}{' unpacked' if packed else ''}; {takes}"


def _room(facts: dict[str, Any]) -> str:
    """Return the free disk space as text."""
    free = f"{size_text(facts['free_bytes'])} free"
    if facts["more_rows_fit"] is None:
        return free
    if facts["ring_fits"]:
        return f"{free}: enough for the whole capacity"
    few = "" if facts["ring_fits"] is None else ", not for the whole capacity"
    return f"{free}: room for {facts['more_rows_fit']:,} more rows{few}"


def _line(field: dict[str, Any]) -> tuple[Any, ...]:
    sizes = (size_text(field["disk_bytes"]), size_text(field["million_rows_bytes"]))
    if field["row_bytes"] is None:
        return (field["name"], field["type"], "", "varies", *sizes, _describe_layout(field))
    return (
        field["name"],
        field["dtype"],
        field["shape"],
        field["row_bytes"],
        *sizes,
        _describe_layout(field),
    )


def _describe_layout(field: dict[str, Any]) -> str:
    """Return how a field is stored on disk, as text."""
    if field["layout"] == "segments":
        return "segments" + (f", {field['codec']}" if field["codec"] else "")
    ratio = f", 1/{field['compression']:.1f}" if field["compression"] else ""
    if field["shared"]:
        ratio += f", {field['shared']:.0%} shared"
    if field["layout"] != "packed":
        return f"{field['layout']}{ratio}" if field["layout"] else "damaged"
    return f"packed, {field['codec']}{ratio}"
