"""The commands `add-column` and `drop-column`.

Used by `expstore.cli.app`, which reports errors. They open the store as a buffer does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore.cli.output import Json, print_json
from expstore.cli.paths import Store
from expstore.exchange.base import show_progress

if TYPE_CHECKING:
    from expstore.buffers.tensordict import TensorDictReplayBuffer
    from expstore.core.values import Key

Name = Annotated[str, typer.Argument(metavar="NAME", help="The field, such as next.reward.")]


def add_column(
    store: Store,
    name: Name,
    fill: Annotated[
        str | None,
        typer.Option(metavar="VALUE", help="Value of all rows: a number, true, false or [a list]."),
    ] = None,
    sql: Annotated[
        str | None,
        typer.Option(
            metavar="EXPRESSION", help="SQL expression over a row and its episode; instead of --fill."
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype, such as float32; by default the dtype of the values.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="N,N", help="Shape of one row; by default the shape of the values.")
    ] = None,
    default: Annotated[
        str | None,
        typer.Option(
            metavar="VALUE",
            help="Value of later rows that lack the field. By default the value of --fill; without both, "
            "such rows are rejected.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Add a field to all rows of a store."""
    if fill is None and sql is None:
        raise typer.BadParameter(f"field {name} has no value: pass --fill VALUE or --sql EXPRESSION")
    if fill is not None and sql is not None:
        raise typer.BadParameter(f"field {name} has two values: pass either --fill or --sql")
    asked: dict[str, Any] = {"sql": sql} if fill is None else {"fill": _value(fill, "--fill")}
    if default is not None:
        asked["default"] = _value(default, "--default")
    if shape is not None:
        asked["shape"] = _shape(shape)
    key = tuple(name.split("."))
    with _open(store) as rb, show_progress("filling", "rows") as progress:
        rb.columns.add(key, dtype=dtype, progress=progress, **asked)
        schema = rb.storage.require_schema()
        facts = {"path": str(store), "field": name, "dtype": schema[key].dtype, "rows": len(rb)}
        facts["shape"] = list(schema[key].shape)
    if as_json:
        print_json(facts)
    else:
        typer.echo(f"{store} has a field {name}: {schema[key]}, in {facts['rows']:,} rows")
    return 0


def drop_column(store: Store, name: Name, as_json: Json = False) -> int:
    """Drop a field of a store and delete its file."""
    with _open(store) as rb:
        rb.columns.drop(_require_field(rb, name))
        rows = len(rb)
    if as_json:
        print_json({"path": str(store), "field": name, "rows": rows})
    else:
        typer.echo(f"{store} no longer has the field {name}")
    return 0


def _require_field(rb: TensorDictReplayBuffer, name: str) -> Key:
    from expstore.core.values import key_name

    schema = rb.schema
    keys = () if schema is None else schema.keys
    return next((key for key in keys if key_name(key) == name), tuple(name.split(".")))


def _value(text: str, option: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as exc:
        raise typer.BadParameter(
            f"{text!r} is not a number, true, false or [a list]", param_hint=option
        ) from exc


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as exc:
        raise typer.BadParameter(
            f"{text!r} is not a list of sizes, such as 3,4", param_hint="--shape"
        ) from exc


@contextmanager
def _open(store: Path) -> Iterator[TensorDictReplayBuffer]:
    from expstore._open import open as open_store
    from expstore.disk.files import Disk
    from expstore.storages.format.manifest import Manifest

    Manifest.load(Disk(), store)  # raises if there is no store: opening must not create one
    with open_store(store) as rb:
        if rb.recovered:
            typer.echo(f"note: {rb.recovered}", err=True)
        yield rb
