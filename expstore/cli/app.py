"""The command line: collect experience, look at stores, ask them in SQL.

Installed as `expstore`, and run by `python -m expstore`. What needs more than a few milliseconds to load
is loaded by the command that needs it, torch by `collect` alone; `info` never changes a store.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from expstore import __version__
from expstore.cli import checks, export, migrate, reshape, retain, serve, snapshots
from expstore.cli.columns import add_column, drop_column
from expstore.cli.datasets import datasets
from expstore.cli.exit_codes import DAMAGED, FAILED, INTERRUPTED, LOCKED, USAGE
from expstore.cli.info import facts_of, show_facts
from expstore.cli.output import print_csv, print_json, print_rows, print_table, show_notes
from expstore.cli.paths import to_local
from expstore.errors import (
    CorruptionError,
    ExpStoreError,
    LockedError,
    MigrationError,
    StorageError,
)

if TYPE_CHECKING:
    from expstore.buffers.replay_buffer import ReplayBuffer
    from expstore.collectors.gymnasium import AnyVectorEnv
    from expstore.storages.format.layout import LayoutName

__all__ = ["main", "run"]

STEPS_PER_LANE = 32
TABLE_ROWS = 50

app = typer.Typer(
    name="expstore",
    help="Keep reinforcement-learning experience on disk: collect it, look at it, ask it in SQL.",
    epilog="Exit codes: 0 all is well, 1 findings or a failure, 2 wrong usage, 3 the store is locked, "
    "4 it is damaged.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Stores = Annotated[list[Path], typer.Argument(callback=to_local, metavar="PATH", help="The stores' folders.")]


class Policy(StrEnum):
    """How `collect` chooses actions."""

    random = "random"


class Layout(StrEnum):
    """How the fields of a store lie on disk."""

    auto = "auto"
    flat = "flat"
    packed = "packed"


class Autoreset(StrEnum):
    """When a vector environment resets a lane whose episode has ended."""

    next_step = "next-step"
    same_step = "same-step"
    disabled = "disabled"


# -- running ---------------------------------------------------------------------------------------


def main() -> None:
    """Run the command of this process's arguments and exit."""
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read this has gone, as `head` does; closing keeps Python quiet
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.close()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: As typed, without the program's name.

    Returns:
        The exit code: 0 all is well, 1 findings or a failure, 2 wrong usage, 3 locked, 4 damaged, 130
        interrupted.
    """
    if not arguments:
        run(["--help"])
        return USAGE
    try:
        command = typer.main.get_command(app)
        return command.main(list(arguments), prog_name="expstore", standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        trouble = _Trouble(INTERRUPTED, "interrupted", "interrupted")
    except Exception as exc:
        known = _trouble(exc)
        if known is None:
            raise
        trouble = known
    if "--json" in arguments:
        print_json({"error": trouble.body()})
    else:
        typer.echo(f"error: {trouble.line()}", err=True)
    return trouble.code


@dataclass(frozen=True, slots=True)
class _Trouble:
    """An error as the command line reports it."""

    code: int
    kind: str
    message: str
    hint: str = ""

    def line(self) -> str:
        """Return all of it on one line; the caret below a piece of SQL says nothing there."""
        lines = [line.strip() for line in self.message.splitlines() if line.strip(" ^")]
        return " ".join(lines) + (f"; {self.hint}" if self.hint else "")

    def body(self) -> dict[str, str]:
        """Return it for programs."""
        return {"kind": self.kind, "message": self.message, "hint": self.hint}


def _trouble(exc: Exception) -> _Trouble | None:
    """Return how an error is reported; None if it is a fault of the program."""
    if isinstance(exc, ExpStoreError):
        return _Trouble(_exit_code(exc), exc.kind, exc.message, exc.hint)
    if hasattr(exc, "format_message"):  # the parser's own errors, whose home depends on typer's version
        return _Trouble(USAGE, "usage", exc.format_message().rstrip("."), "see expstore --help")
    if isinstance(exc, ModuleNotFoundError) and exc.name == "gymnasium":
        return _Trouble(
            USAGE, "usage", "collecting needs gymnasium, which is missing", "pip install 'expstore[gym]'"
        )
    if isinstance(exc, ModuleNotFoundError) and exc.name == "h5py":
        return _Trouble(
            USAGE, "usage", "this format needs h5py, which is missing", "pip install 'expstore[h5]'"
        )
    if isinstance(exc, ValueError):
        return _Trouble(USAGE, "usage", str(exc))
    if isinstance(exc, OSError):
        return _Trouble(FAILED, "storage", str(exc))
    return None


def _exit_code(exc: ExpStoreError) -> int:
    if isinstance(exc, LockedError):
        return LOCKED
    if isinstance(exc, CorruptionError):
        return DAMAGED
    return FAILED if isinstance(exc, StorageError | MigrationError) else USAGE


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"expstore {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# -- collect ---------------------------------------------------------------------------------------


@app.command(
    epilog="A store that is there goes on growing, or turning. Ctrl-C keeps what was collected and closes "
    "the store; a second Ctrl-C does not wait for the environment."
)
def collect(
    env: Annotated[str, typer.Argument(metavar="ENV", help="A gymnasium id, such as CartPole-v1.")],
    path: Annotated[
        Path, typer.Argument(callback=to_local, metavar="PATH", help="The store; made if it is missing.")
    ],
    steps: Annotated[int, typer.Option(min=1, help="Transitions to add, or a few more.")],
    envs: Annotated[int, typer.Option(min=1, help="Environments that run side by side.")] = 8,
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Most rows of a new store; it grows without one.")
    ] = None,
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="Of a new store: auto, as without it, packs fields of 1 KiB and more per row (images take a "
            "fiftieth, and cannot be changed in place), packed all, flat none."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of environments and actions.")] = None,
    policy: Annotated[Policy, typer.Option(help="How actions are chosen.")] = Policy.random,
    autoreset: Annotated[
        Autoreset, typer.Option(help="When ended episodes begin anew; the rows are the same.")
    ] = Autoreset.next_step,
    as_json: Json = False,
) -> int:
    """Collect transitions from an environment into a store."""
    from expstore._open import open as open_store
    from expstore.disk.files import Disk
    from expstore.storages.format.manifest import MANIFEST

    disk = Disk()
    with (
        _Interrupts() as interrupts,
        contextlib.closing(_environments(env, envs, autoreset)) as lanes,
        show_notes(),
    ):
        new = not disk.exists(path / MANIFEST)
        asked: LayoutName | None = None if layout is None else layout.value
        with open_store(path, capacity=capacity, layout=asked, seed=seed if new else None) as rb:
            if rb.recovered:
                typer.echo(f"note: {rb.recovered}", err=True)
            typer.echo(
                f"collecting {env} in {envs} lanes into {path}, which holds {len(rb):,} rows", err=True
            )
            stored = _collect(lanes, rb, steps, seed, interrupts)
            rows = len(rb)
    if as_json:
        print_json({"path": str(path), "stored": stored, "rows": rows, "interrupted": interrupts.seen})
    else:
        head = "stopped: " if interrupts.seen else ""
        typer.echo(f"{head}{stored:,} transitions stored, {path} holds {rows:,} rows")
    return INTERRUPTED if interrupts.seen else 0


def _environments(env: str, lanes: int, autoreset: Autoreset) -> AnyVectorEnv:
    import gymnasium
    from gymnasium.vector import AutoresetMode

    try:
        return gymnasium.make_vec(
            env,
            num_envs=lanes,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode[autoreset.name.upper()]},
        )
    except Exception as exc:  # whatever the environment's own code raises
        raise typer.BadParameter(f"cannot make {env}: {exc}", param_hint="ENV") from exc


def _collect(
    lanes: AnyVectorEnv, rb: ReplayBuffer, steps: int, seed: int | None, interrupts: _Interrupts
) -> int:
    """Store at least `steps` transitions unless interrupted; return how many."""
    import numpy as np
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from expstore.collectors.gymnasium import Collector

    if seed is not None and rb.write_count:
        # The same seed again would store the same episodes again.
        seed = int(np.random.SeedSequence([seed, rb.write_count]).generate_state(1)[0])
    columns = (TextColumn("collecting"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    before = rb.write_count
    block = lanes.num_envs * STEPS_PER_LANE
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=steps)
        # None: random actions, the only policy there is yet
        with Collector(lanes, None, rb, steps_per_lane=STEPS_PER_LANE, seed=seed) as collector:
            blocks = iter(collector)
            stored = 0
            while stored < steps and not interrupts.seen:
                left = steps - stored
                stored += next(blocks) if left >= block else collector.collect(left)
                progress.update(task, completed=min(stored, steps))
    return rb.write_count - before


class _Interrupts:
    """Note the first Ctrl-C, so that work ends between two writes; let the second one through."""

    def __init__(self) -> None:
        self.seen = False
        self._former: Any = None

    def __enter__(self) -> Self:
        self._former = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            raise KeyboardInterrupt
        self.seen = True


# -- info ------------------------------------------------------------------------------------------


@app.command(epilog="Nothing is changed: a store that is being written to can be looked at, too.")
def info(paths: Stores, as_json: Json = False) -> int:
    """Say what stores hold, who has them open, and how they were left."""
    found: list[dict[str, Any]] = []
    worst: _Trouble | None = None
    for path in paths:
        try:
            found.append(facts_of(path))
        except ExpStoreError as exc:
            trouble = _Trouble(_exit_code(exc), exc.kind, exc.message, exc.hint)
            found.append({"path": str(path), "error": trouble.body()})
            worst = trouble if worst is None or trouble.code > worst.code else worst
    if as_json:
        print_json({"stores": found} | ({"error": worst.body()} if worst else {}))
    for facts in () if as_json else found:
        if "error" in facts:
            typer.echo(f"error: {_Trouble(0, **facts['error']).line()}", err=True)
        else:
            show_facts(facts)
    return worst.code if worst else 0


# -- verify ----------------------------------------------------------------------------------------

app.command(
    epilog="Nothing is changed. Priorities have no checksum; STATE and LOCK hold nothing that is missed. "
    "Exit codes: 0 nothing found, 1 findings, 3 somebody writes to the store, 4 no row can be read."
)(checks.verify)

app.command(
    epilog="Without --drop-damaged nothing is lost. Killed in the middle it can be run again. "
    "Exit codes: 0 all is repaired, 1 something is left, 3 somebody writes there, 4 no row can be read."
)(checks.repair)


# -- retain ----------------------------------------------------------------------------------------

app.command(
    epilog="Without options the policy that the store has is applied. What has left is gone for good; facts "
    "of episodes stay."
)(retain.retain)


# -- sql -------------------------------------------------------------------------------------------


@app.command(
    epilog="The relations are transitions, episodes, fragments, sources, priorities, commits and meta, and "
    "where there is an archive history: transitions and all rows that have left. Nested fields are written "
    "as in next.reward. Of several stores each answers for itself, so an aggregate is one row per store; a "
    "column store in front says whose."
)
def sql(
    paths: Stores,
    query: Annotated[str, typer.Argument(metavar="QUERY", help="One SELECT.")],
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Json = False,
    parquet: Annotated[
        Path | None, typer.Option(callback=to_local, metavar="FILE", help="Write a Parquet file instead.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help=f"Most rows; {TABLE_ROWS} in a table, else all.")
    ] = None,
) -> int:
    """Ask stores in SQL."""
    if as_csv and (as_json or parquet):
        raise typer.BadParameter("leave out --json and --parquet, or this", param_hint="--csv")
    from expstore.cli.query import ask

    most = limit if as_csv or as_json or parquet else limit or TABLE_ROWS
    result = ask(paths, query, most)
    more = most is not None and len(result) > most
    if more:
        result = type(result)(result.arrow().slice(0, most))
    if parquet:
        result.to_parquet(parquet)
        if as_json:
            print_json({"file": str(parquet), "rows": len(result), "columns": result.columns})
        else:
            typer.echo(f"{len(result):,} rows written to {parquet}")
    elif as_json:
        print_rows(result)
    elif as_csv:
        print_csv(result)
    else:
        print_table(result.columns, result.fetchall())
        if more and limit is None:
            typer.echo(f"there are more than {most} rows; --limit N shows more, --csv all", err=True)
    return 0


# -- fields ----------------------------------------------------------------------------------------

app.command(epilog="Other fields are not touched; after any crash the field is there whole or not at all.")(
    add_column
)
app.command(epilog="Fields by which rows are cut into episodes have to stay.")(drop_column)

# -- versions --------------------------------------------------------------------------------------

app.command(epilog="Opening a store does this by itself, without keeping the old index.")(migrate.migrate)
app.command(epilog="What has not changed since the version before is shared with it.")(snapshots.dumps)
app.command(epilog="After any crash the store holds its former rows or the version's.")(snapshots.loads)
app.command(epilog="Of a store, those that were made inside it with a tag.")(snapshots.versions)

# -- resize, merge ---------------------------------------------------------------------------------

app.command(
    epilog="Rows keep their ids. After any crash the store has its former capacity or the new one; Ctrl-C "
    "leaves the former one."
)(reshape.resize)
app.command(
    epilog="Fields must be the same. Sources keep their names, each behind its store's. The new store is "
    "there whole or not at all."
)(reshape.merge)

# -- export ----------------------------------------------------------------------------------------

app.command(epilog=export.EXPORT_NOTES)(export.export)
app.command("import", epilog=export.IMPORT_NOTES)(export.import_)
app.add_typer(datasets)

# -- serve -----------------------------------------------------------------------------------------

app.command(epilog=serve.SERVE_NOTES)(serve.serve)
