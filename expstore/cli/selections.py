"""The commands `selections list`, `create`, `include`, `exclude`, `diff` and `drop`.

Used by `expstore.cli.app`, which reports errors. None of the commands loads torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore.cli.groups import add_command, make_group, show_help
from expstore.cli.output import Json, print_json, print_table
from expstore.cli.paths import Store

if TYPE_CHECKING:
    from expstore.buffers.selections import Selections

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the selection.")]
Ids = Annotated[
    str, typer.Argument(metavar="IDS", help="Ids of episodes and ranges of ids, as in 1-20,35,100-.")
]
Reason = Annotated[str, typer.Option(metavar="TEXT", help="Why; it is stored with the episodes.")]
By = Annotated[
    str | None, typer.Option(metavar="NAME", help="Who; by default the user of the operating system.")
]
#: Columns of the list; `--json` prints all.
_LISTED = ["name", "condition", "episodes", "excluded", "missing", "author", "reason"]


def list_(store: Store, as_json: Json = False) -> int:
    """List the selections of a store."""
    with _read(store) as selections:
        found = selections()
    if as_json:
        rows = found.arrow().to_pylist()
        print_json({"selections": [row | {"created": row["created"].isoformat()} for row in rows]})
    elif len(found):
        rows = [[row[name] for name in _LISTED] for row in found.arrow().to_pylist()]
        print_table(_LISTED, rows)
    else:
        typer.echo(f"{store} has no selections")
    return 0


def create(
    store: Store,
    name: Name,
    where: Annotated[
        str | None,
        typer.Option(metavar="SQL", help="Select the ended episodes that match, such as 'length > 100'."),
    ] = None,
    episodes: Annotated[
        str | None,
        typer.Option(metavar="IDS", help="Select episodes by id, as in 1-20,35; not with --where."),
    ] = None,
    reason: Reason = "",
    by: By = None,
    as_json: Json = False,
) -> int:
    """Create a selection of the episodes that match now."""
    if (where is None) == (episodes is None):
        raise typer.BadParameter("pass either --where SQL or --episodes IDS")
    with _write(store) as selections:
        ids = None if episodes is None else _find(selections, episodes)
        found = selections.create(name, where, episodes=ids, reason=reason, by=by).episodes().size
    _report(
        store, as_json, f"{store} has a selection {name!r} of {found:,} episodes", name=name, episodes=found
    )
    return 0


def include(store: Store, name: Name, ids: Ids, reason: Reason, by: By = None, as_json: Json = False) -> int:
    """Add episodes to a selection by hand."""
    return _change(store, "include", name, ids, reason, by, as_json)


def exclude(store: Store, name: Name, ids: Ids, reason: Reason, by: By = None, as_json: Json = False) -> int:
    """Remove episodes from a selection by hand."""
    return _change(store, "exclude", name, ids, reason, by, as_json)


def diff(
    store: Store,
    first: Name,
    second: Annotated[str, typer.Argument(metavar="OTHER", help="Name of another selection.")],
    as_json: Json = False,
) -> int:
    """Compare the episodes of two selections."""
    with _read(store) as selections:
        found = selections.diff(first, second)
    if as_json:
        print_json({name: ids.tolist() for name, ids in found._asdict().items()})
    else:
        for text, ids in zip((f"only {first}", f"only {second}", "both"), found, strict=True):
            typer.echo(f"{text}: {', '.join(map(str, ids.tolist())) or 'none'}")
    return 0


def drop(store: Store, name: Name, as_json: Json = False) -> int:
    """Remove a selection; its episodes stay."""
    with _write(store) as selections:
        selections.drop(name)
    _report(store, as_json, f"{store} no longer has the selection {name!r}", name=name)
    return 0


def _change(store: Path, act: str, name: str, ids: str, reason: str, by: str | None, as_json: bool) -> int:
    with _write(store) as selections:
        getattr(selections, act)(name, _find(selections, ids), reason=reason, by=by)
        found = selections[name].episodes().size
    _report(store, as_json, f"selection {name!r} has {found:,} episodes", name=name, episodes=found)
    return 0


def _report(store: Path, as_json: bool, text: str, **facts: Any) -> None:
    if as_json:
        print_json({"path": str(store), **facts})
    else:
        typer.echo(text)


def _find(selections: Selections, ids: str) -> list[int]:
    """Return the episodes that a text such as `1-20,35` names.

    Raises:
        BadParameter: The store never had one of them.
    """
    from expstore.exchange.rows import parse_episodes

    found = selections.find_episodes(parse_episodes(ids))
    if not found:
        raise typer.BadParameter(f"the store has no episode {ids}")
    return found


@contextmanager
def _read(path: Path) -> Iterator[Selections]:
    from expstore.buffers.selections import Selections
    from expstore.exchange.rows import open_source
    from expstore.sql.sync import Catalog

    with open_source(path) as storage:
        yield Selections(storage, Catalog(storage))


@contextmanager
def _write(path: Path) -> Iterator[Selections]:
    from expstore.buffers.selections import Selections
    from expstore.disk.files import Disk
    from expstore.sql.sync import Catalog
    from expstore.storages.factory import open_storage
    from expstore.storages.format.manifest import Manifest

    Manifest.load(Disk(), path)  # raises if there is no store: opening must not create one
    storage = open_storage(path)
    try:
        catalog = Catalog(storage)
        yield Selections(storage, catalog)
        catalog.close()
    finally:
        storage.close()


selections = make_group(
    name="selections",
    help="Named lists of episodes, which do not change when rows are written.",
    invoke_without_command=True,
    callback=show_help,
)
add_command(
    selections,
    list_,
    name="list",
    notes="`missing` counts the episodes of which rows were evicted or deleted.",
    examples=("expstore selections list run.exp", "expstore selections list run.exp --json"),
)
add_command(
    selections,
    create,
    notes="`selection('NAME')` is a condition for --where and for SQL over episodes.",
    examples=(
        "expstore selections create run.exp clean-v1 --where 'length > 100' --reason demonstrations",
        "expstore selections create run.exp best --episodes 3,17-20 --reason 'the longest' --by ada",
    ),
)
add_command(
    selections,
    include,
    notes="Episodes that were excluded are members again.",
    examples=(
        "expstore selections include run.exp clean-v1 7 --reason 'short, but clean'",
        "expstore selections include run.exp clean-v1 1-20,35 --reason checked --by ada",
    ),
)
add_command(
    selections,
    exclude,
    notes="The episodes and their rows stay in the store.",
    examples=(
        "expstore selections exclude run.exp clean-v1 7 --reason 'wrong labels'",
        "expstore selections exclude run.exp clean-v1 1-20,35 --reason duplicates --by ada",
    ),
)
add_command(
    selections,
    diff,
    notes="Nothing in the store is changed.",
    examples=(
        "expstore selections diff run.exp clean-v1 clean-v2",
        "expstore selections diff run.exp clean-v1 clean-v2 --json",
    ),
)
add_command(
    selections,
    drop,
    notes="The record of its changes is removed, too.",
    examples=("expstore selections drop run.exp clean-v1", "expstore selections drop run.exp old --json"),
)
