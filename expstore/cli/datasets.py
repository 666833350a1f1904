"""The commands `datasets list`, `fetch`, `info` and `delete`: data sets by name.

Used by `expstore.cli.app`, which reports errors. Only `fetch` loads torch.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore.cli.groups import add_command, make_group, show_help
from expstore.cli.info import facts_of, show_facts
from expstore.cli.output import Json, print_json, print_table
from expstore.cli.paths import to_local
from expstore.core.tables import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

datasets = make_group(
    name="datasets",
    invoke_without_command=True,
    callback=show_help,
    help="Public data sets by name, such as d4rl:hopper-medium-v2. Each is a store below ~/.cache/expstore, "
    "or below the folder in EXPSTORE_DATA.",
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name of a data set, such as d4rl:hopper-medium-v2.")
]
Root = Annotated[
    Path | None,
    typer.Option(
        "--root",
        callback=to_local,
        metavar="FOLDER",
        help="Folder of the collection; by default below ~/.cache/expstore.",
    ),
]


def list_(
    prefix: Annotated[
        str | None, typer.Argument(metavar="PREFIX", help="Show only this collection, such as d4rl.")
    ] = None,
    available: Annotated[
        bool, typer.Option("--available", help="List all names of PREFIX, downloaded or not.")
    ] = False,
    root: Root = None,
    as_json: Json = False,
) -> int:
    """List the downloaded data sets."""
    if available:
        _list_available(prefix, as_json)
        return 0
    if root is not None and prefix is None:
        raise typer.BadParameter("--root is the folder of one collection: also pass PREFIX, such as d4rl")
    folder = None if prefix is None else _collection(prefix)
    found = list(_stores(folder, root))
    if folder is not None and not found:
        _check_prefix(folder)
    if as_json:
        print_json(found)
        return 0
    if not found:
        name = folder or "d4rl"
        typer.echo(f"none is downloaded; expstore datasets list {name} --available shows names")
        return 0
    rows = [[facts["name"], facts["rows"], size_text(facts["disk_bytes"]), facts["path"]] for facts in found]
    print_table(["name", "rows", "on disk", "path"], rows)
    return 0


def _list_available(prefix: str | None, as_json: bool) -> None:
    from expstore.datasets.registry import dataset_class, prefixes

    if prefix is None:
        raise typer.BadParameter(f"choose a collection: {', '.join(prefixes())}", param_hint="PREFIX")
    _check_prefix(prefix)
    names = list(getattr(dataset_class(prefix), "available_datasets", []))
    if as_json:
        print_json(names)
    elif names:
        typer.echo("\n".join(names))
    else:
        any_id = f"{_collection(prefix)}:ID"
        typer.echo(
            f"this collection has no list of names; fetch an id with: expstore datasets fetch {any_id}"
        )


def _check_prefix(prefix: str) -> None:
    """Raise a usage error if no collection has a prefix."""
    from expstore.datasets.registry import prefixes

    if prefix.strip().lower() not in prefixes():  # without importing the class, and torch with it
        raise typer.BadParameter(
            f"Unknown dataset source {prefix!r}. Supported prefixes: {', '.join(prefixes())}",
            param_hint="PREFIX",
        )


def _stores(collection: str | None, root: Path | None) -> Iterator[dict[str, Any]]:
    """Yield name, path, rows and size of the downloaded data sets.

    Args:
        collection: Name of a collection; None for all.
        root: Folder of the collection; None: the usual one.
    """
    from expstore.datasets.origin import data_folder
    from expstore.disk.files import Disk
    from expstore.maintenance import survey
    from expstore.storages.format.manifest import MANIFEST

    base, disk = data_folder() if root is None else root, Disk()
    if not disk.exists(base):
        return
    for folder, names in sorted(disk.tree(base)):
        parts = folder.relative_to(base).parts
        if root is not None and collection is not None:
            parts = (collection, *parts)
        if MANIFEST not in names or any(part.startswith(".") for part in parts) or len(parts) < 2:
            continue
        if collection not in (None, parts[0]):
            continue
        facts = survey(folder)
        size = sum(disk.measure_space(inside / name) for inside, files in disk.tree(folder) for name in files)
        yield {
            "name": f"{parts[0]}:{'/'.join(parts[1:])}",
            "path": str(folder),
            "rows": facts.rows,
            "disk_bytes": size,
        }


def fetch(
    name: Name,
    source: Annotated[
        Path | None,
        typer.Option(
            "--source",
            callback=to_local,
            metavar="PATH",
            help="Files of the public source; nothing is downloaded then.",
        ),
    ] = None,
    mirror: Annotated[
        str | None,
        typer.Option("--mirror", metavar="URL", help="Address to download from instead of the public one."),
    ] = None,
    root: Root = None,
    force: Annotated[bool, typer.Option("--force", help="Import it again if it exists.")] = False,
    as_json: Json = False,
) -> int:
    """Download a data set into a store, or continue an interrupted download."""
    more = {} if mirror is None else {"mirror": mirror}
    try:
        from expstore.datasets.registry import load_dataset

        with _bad_name(name):
            data = load_dataset(name, source=source, root=root, download="force" if force else True, **more)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues", err=True)
        raise
    facts = {"name": name, "path": str(data.data_path), "rows": len(data)}
    data.close()
    if as_json:
        print_json(facts)
    else:
        typer.echo(f"{facts['path']} holds {facts['rows']:,} rows")
    return 0


def info(name: Name, root: Root = None, as_json: Json = False) -> int:
    """Show what a downloaded data set contains, and the files it was made from."""
    from expstore.disk.files import Disk
    from expstore.storages.format.manifest import Manifest

    path = _path(name, root)
    facts = facts_of(path)
    meta = Manifest.load(Disk(), path).meta
    if as_json:
        print_json(facts | {"meta": meta})
        return 0
    show_facts(facts)
    made_of = meta.get("import", {})
    for part in made_of.get("parts", []):
        typer.echo(f"made of {part['name']}, {size_text(part['bytes'])}, sha256 {part['sha256']}")
    if options := {key: value for key, value in made_of.get("options", {}).items() if value is not None}:
        typer.echo(f"read with {json.dumps(options)}")
    return 0


def delete(name: Name, root: Root = None) -> int:
    """Delete a downloaded data set."""
    from expstore.datasets.origin import remove_dataset

    path = _path(name, root)
    folder, dataset_id = _split(name, root)
    remove_dataset(folder, dataset_id)
    typer.echo(f"removed {path}")
    return 0


def _split(name: str, root: Path | None) -> tuple[Path, str]:
    """Return the folder of a data set's collection, and the id of the data set."""
    from expstore.datasets.origin import data_folder

    prefix, colon, dataset_id = name.partition(":")
    if not (prefix and colon and dataset_id) or ".." in dataset_id.split("/") or dataset_id.startswith("/"):
        raise typer.BadParameter(f"{name!r} is not of the form PREFIX:ID", param_hint="NAME")
    return (data_folder(_collection(prefix)) if root is None else root), dataset_id


def _collection(prefix: str) -> str:
    """Return the folder name of a collection. As in `load_dataset`, case does not matter."""
    from expstore.datasets.registry import list_kinds

    name = prefix.strip().lower()
    return next((kind.prefix for kind in list_kinds() if name in kind.aliases), name)


def _path(name: str, root: Path | None) -> Path:
    """Return the store of a data set.

    Raises:
        NotFoundError: The data set is not downloaded.
    """
    from expstore.disk.files import ReadingDisk
    from expstore.errors import NotFoundError
    from expstore.storages.format.manifest import MANIFEST

    folder, dataset_id = _split(name, root)
    path, disk = folder / dataset_id, ReadingDisk()
    if not disk.exists(path / MANIFEST):
        raise NotFoundError(
            f"{name} is not downloaded: there is no store {path}",
            hint=f"expstore datasets list shows the downloaded ones, expstore datasets fetch {name} gets it",
        )
    return path


@contextlib.contextmanager
def _bad_name(name: str) -> Iterator[None]:
    """Report a name that no data set has as a usage error."""
    from expstore.datasets.registry import UnknownDatasetError
    from expstore.errors import ExpStoreError

    try:
        yield
    except UnknownDatasetError as exc:
        raise typer.BadParameter(f"{exc.message}. {_describe_names(name)}", param_hint=name) from exc
    except (ValueError, KeyError) as exc:
        if isinstance(exc, ExpStoreError):
            raise
        text = exc.args[0] if exc.args else str(exc)
        raise typer.BadParameter(f"{text} {_describe_names(name)}", param_hint=name) from exc


def _describe_names(name: str) -> str:
    """Return similar names of the same collection, and the command that lists all of them."""
    from expstore.datasets.registry import dataset_class

    prefix, _, dataset_id = name.partition(":")
    names = list(getattr(dataset_class(prefix), "available_datasets", []))
    near = ", ".join(f"{prefix}:{known}" for known in difflib.get_close_matches(dataset_id, names))
    return (f"Similar names: {near}. " if near else "") + (
        f"expstore datasets list {_collection(prefix)} --available shows all names"
    )


add_command(
    datasets,
    list_,
    name="list",
    examples=("expstore datasets list", "expstore datasets list d4rl --available"),
)
add_command(
    datasets,
    fetch,
    examples=(
        "expstore datasets fetch atari:Pong/5 --source downloads/Pong/5",
        "expstore datasets fetch minari:cartpole/random-v0 --source downloads/cartpole --root data",
    ),
)
add_command(
    datasets,
    info,
    examples=("expstore datasets info atari:Pong/5", "expstore datasets info atari:Pong/5 --json"),
)
add_command(
    datasets,
    delete,
    examples=(
        "expstore datasets delete atari:Pong/5",
        "expstore datasets delete minari:cartpole/random-v0 --root data",
    ),
)
