"""The command line: collect experience, inspect stores, query them in SQL.

Installed as `expstore`, and run by `python -m expstore`. A command imports what takes more than a few
milliseconds to load; only `collect` loads torch. `info` never changes a store.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore import __version__
from expstore.cli import (
    checks,
    consumers,
    export,
    object_storage,
    reshape,
    retain,
    selections,
    serve,
    snapshots,
)
from expstore.cli.cluster import cluster
from expstore.cli.columns import add_column, drop_column
from expstore.cli.completion import complete_store
from expstore.cli.datasets import datasets
from expstore.cli.episode import episode
from expstore.cli.exit_codes import DAMAGED, FAILED, INTERRUPTED, LOCKED, USAGE
from expstore.cli.groups import CHANGE, LOOK, MOVE, SERVE, VERSIONS, add_command, make_group
from expstore.cli.info import facts_of, show_facts, show_lineage, show_stores, stores_in
from expstore.cli.interrupt import Interrupts, end_at_once, handle_interrupts
from expstore.cli.odd import changes, odd
from expstore.cli.output import Json, print_csv, print_json, print_rows, print_table, rows_of, show_notes
from expstore.cli.paths import to_local
from expstore.disk.local_path import local_path
from expstore.errors import (
    CorruptionError,
    ExpStoreError,
    LockedError,
    MigrationError,
    NotFoundError,
    SchemaError,
    StateError,
    StorageError,
)

if TYPE_CHECKING:
    from expstore.buffers.replay_buffer import ReplayBuffer
    from expstore.collectors.environments import AnyVectorEnv
    from expstore.storages.format.layout import LayoutName

STEPS_PER_LANE = 32
TABLE_ROWS = 50
#: The key of a store's meta that names the environment from which it was collected.
_ENVIRONMENT = "environment"

app = make_group(
    name="expstore",
    help="Collect reinforcement-learning experience into stores on disk, inspect it and query it in SQL.",
    epilog="`expstore PATH` is `expstore info PATH`. Exit codes: 0 success, 1 findings or a failure, 2 wrong "
    "usage, 3 the store is locked, 4 the store is damaged, 130 interrupted.",
)

Stores = Annotated[
    list[Path],
    typer.Argument(
        callback=to_local, autocompletion=complete_store, metavar="PATH", help="The folders of the stores."
    ),
]


class Layout(StrEnum):
    """How the fields of a store are laid out on disk."""

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
    """Run the command given by this process's arguments, and exit."""
    try:
        code = run(sys.argv[1:])
        end_at_once()
    except KeyboardInterrupt:  # while the error of the command was printed
        code = INTERRUPTED
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as `head` does; closing keeps Python quiet
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.close()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command.

    Args:
        arguments: As typed, without the program's name.

    Returns:
        The exit code: 0 success, 1 findings or a failure, 2 wrong usage, 3 locked, 4 damaged, 130
        interrupted.

    Raises:
        SystemExit: The shell was answered: completion, or the script that installs it.
    """
    if not arguments:
        run(["--help"])
        return USAGE
    command = _build_command()
    arguments = _add_info(command, arguments)
    with handle_interrupts(1) as interrupts:
        try:
            return command.main(list(arguments), prog_name="expstore", standalone_mode=False) or 0
        except (KeyboardInterrupt, typer.Abort):
            trouble = _INTERRUPTED
        except Exception as exc:
            known = _INTERRUPTED if interrupts.seen else _trouble(exc, command, arguments)
            if known is None:
                raise
            trouble = known
    if "--json" in arguments:
        print_json({"error": trouble.body()})
    else:
        typer.echo(f"error: {trouble.line()}", err=True)
    return trouble.code


@functools.cache
def _build_command() -> Any:
    """Return the command line as Click's group of commands; to build it takes 30 ms."""
    return typer.main.get_command(app)


def _add_info(command: Any, arguments: Sequence[str]) -> Sequence[str]:
    """Return the arguments, with `info` before them if the first one is a path and not a command."""
    from expstore.disk.files import Disk
    from expstore.storages.format.manifest import MANIFEST

    disk, first = Disk(), arguments[0]
    if first.startswith("-") or first in command.commands:
        return arguments
    is_path = "/" in first or first.endswith(".exp")  # `info` says what is missing there
    return ["info", *arguments] if is_path or disk.exists(Path(first) / MANIFEST) else arguments


def _command_name(command: Any, arguments: Sequence[str]) -> str:
    """Return the words of the command, such as `expstore datasets list`."""
    words = ["expstore"]
    for word in arguments:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        words.append(word)
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class _Trouble:
    """An error as the command line reports it."""

    code: int
    kind: str
    message: str
    hint: str = ""

    def line(self) -> str:
        """Return the error on one line, without the caret under a piece of SQL."""
        lines = [line.strip() for line in self.message.splitlines() if line.strip(" ^")]
        return " ".join(lines) + (f"; {self.hint}" if self.hint else "")

    def body(self) -> dict[str, str]:
        """Return the error for `--json`."""
        return {"kind": self.kind, "message": self.message, "hint": self.hint}


_INTERRUPTED = _Trouble(INTERRUPTED, "interrupted", "interrupted")


def _trouble(exc: Exception, command: Any, arguments: Sequence[str]) -> _Trouble | None:
    """Return how an error is reported, or None if it is a bug in the program.

    Args:
        exc: The error.
        command: The parser of the command line.
        arguments: As typed.
    """
    if isinstance(exc, ExpStoreError):
        return _Trouble(_exit_code(exc), exc.kind, exc.message, exc.hint)
    if hasattr(exc, "format_message"):  # the parser's own errors; their class depends on typer's version
        text = _name_value(exc, arguments)
        return _Trouble(USAGE, "usage", text, f"see {_command_name(command, arguments)} --help")
    if isinstance(exc, ValueError):
        return _Trouble(USAGE, "usage", str(exc))
    if isinstance(exc, OSError):
        return _Trouble(FAILED, "storage", str(exc))
    return None


def _name_value(exc: Any, arguments: Sequence[str]) -> str:
    """Return the message of the parser's error, with the refused value instead of the word Input."""
    text: str = exc.format_message().rstrip(".").replace("Value error, ", "")
    for option in getattr(getattr(exc, "param", None), "opts", ()):
        for at, word in enumerate(arguments):
            name, equals, value = word.partition("=")
            if name == option and (equals or at + 1 < len(arguments)):
                value = value if equals else arguments[at + 1]
                return text.replace("Input should", f"{value!r} should").partition(", unable to")[0]
    return text


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


def collect(
    env: Annotated[str, typer.Argument(metavar="ENV", help="A gymnasium id, such as CartPole-v1.")],
    path: Annotated[
        Path,
        typer.Argument(
            callback=to_local,
            autocompletion=complete_store,
            metavar="PATH",
            help="The store; created if it does not exist.",
        ),
    ],
    steps: Annotated[int, typer.Option(min=1, help="Number of transitions to add; a few more may be added.")],
    envs: Annotated[int, typer.Option(min=1, help="Number of environments.")] = 8,
    capacity: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of rows of a new store; unlimited without it.")
    ] = None,
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="Layout of a new store. auto, the default, compresses fields of 1 KiB and more per row; "
            "packed compresses all fields, flat none. Compressed fields cannot be changed in place."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Random seed for environments and actions.")] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="How actions are chosen: random, or module:function, which takes a batch of observations; "
            "the module may be in this folder.",
        ),
    ] = "random",
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that collect, each in --envs environments. 0: this one.")
    ] = 0,
    autoreset: Annotated[
        Autoreset, typer.Option(help="When an environment is reset after an episode; the rows are the same.")
    ] = Autoreset.next_step,
    as_json: Json = False,
) -> int:
    """Collect transitions from an environment into a store."""
    from expstore._open import open as open_store
    from expstore.disk.files import Disk
    from expstore.storages.format.manifest import MANIFEST, Manifest

    disk = Disk()
    chosen = _find_policy(policy)
    with (
        handle_interrupts(2) as interrupts,  # the second one does not wait for the environment
        contextlib.closing(_environments(env, envs, autoreset)) as lanes,
        show_notes(),
    ):
        new = not disk.exists(path / MANIFEST)
        if not new:
            _check_environment(path, Manifest.load(disk, path).meta.get(_ENVIRONMENT, env), env)
        asked: LayoutName | None = None if layout is None else layout.value
        meta = {_ENVIRONMENT: env} if new else None
        with open_store(path, capacity=capacity, layout=asked, seed=seed if new else None, meta=meta) as rb:
            if rb.recovered:
                typer.echo(f"note: {rb.recovered}", err=True)
            lane_count = max(1, workers) * envs
            typer.echo(
                f"collecting {env} in {lane_count} lanes into {path}, which holds {len(rb):,} rows", err=True
            )
            try:
                stored = _collect(env, lanes, chosen, rb, steps, seed, workers, interrupts)
            except SchemaError as exc:
                raise SchemaError(
                    f"{path} has other fields than {env}: {exc.message}", hint="choose another store"
                ) from exc
            rows = len(rb)
    if as_json:
        print_json({"path": str(path), "stored": stored, "rows": rows, "interrupted": interrupts.seen})
    else:
        head = "stopped: " if interrupts.seen else ""
        typer.echo(f"{head}{stored:,} transitions stored, {path} holds {rows:,} rows")
    return INTERRUPTED if interrupts.seen else 0


def _check_environment(path: Path, held: str, env: str) -> None:
    """Raise StateError if a store has transitions of another environment."""
    if held != env:
        raise StateError(
            f"{path} holds transitions of {held}, not of {env}",
            hint="choose another store for each environment",
        )


def _environments(env: str, lanes: int, autoreset: Autoreset) -> AnyVectorEnv:
    from expstore.collectors.environments import make_lanes, maker_of

    try:
        return make_lanes(maker_of(env), lanes, autoreset.value.title().replace("-", ""))
    except Exception as exc:  # the environment's own code may raise anything
        raise typer.BadParameter(f"cannot make {env}: {exc}", param_hint="ENV") from exc


def _find_policy(name: str) -> Any:
    """Return the policy of this name; None: random actions."""
    from expstore.collectors.policies import load_policy

    if name == "random":
        return None
    # Modules in the working directory, as `python -m` finds them; not as "", which workers would not resolve.
    sys.path.insert(0, str(Path().absolute()))
    try:
        return load_policy(name)
    except NotFoundError as exc:
        raise typer.BadParameter(
            f"{exc.message}; {exc.hint}" if exc.hint else exc.message, param_hint="--policy"
        ) from exc


def _collect(
    env: str,
    lanes: AnyVectorEnv,
    policy: Any,
    rb: ReplayBuffer,
    steps: int,
    seed: int | None,
    workers: int,
    interrupts: Interrupts,
) -> int:
    """Store at least `steps` transitions, fewer if interrupted; return their number."""
    import numpy as np

    from expstore.collectors import Collector
    from expstore.exchange.base import show_progress

    if seed is not None and rb.write_count:
        # With the same seed the same episodes would be collected again.
        seed = int(np.random.SeedSequence([seed, rb.write_count]).generate_state(1)[0])
    before, stored = rb.write_count, 0
    block = lanes.num_envs * STEPS_PER_LANE
    source: Any = env if workers else lanes
    mode = lanes.metadata["autoreset_mode"]
    with (
        show_progress("collecting", "rows") as tell,
        Collector(
            source, policy, rb, workers=workers, lanes=lanes.num_envs if workers else None,
            steps_per_lane=STEPS_PER_LANE, autoreset_mode=mode, seed=seed,
        ) as collector,
    ):  # fmt: skip
        blocks = iter(collector)
        while stored < steps and not interrupts.seen:
            left = steps - stored
            if workers:  # some blocks at a time, between which Ctrl-C is seen
                stored += collector.collect(min(left, 8 * workers * block))
            else:
                stored += next(blocks) if left >= block else collector.collect(left)
            tell(min(stored, steps), steps)
    return rb.write_count - before


# -- info ------------------------------------------------------------------------------------------


def info(
    paths: Stores,
    lineage: Annotated[
        bool, typer.Option("--lineage", help="Show where the rows come from, step by step.")
    ] = False,
    as_json: Json = False,
) -> int:
    """Show what stores contain, who has them open, and whether they were closed properly."""
    found: list[dict[str, Any]] = []
    worst: _Trouble | None = None
    wanted = [store for path in paths for store in stores_in(path) or [path]]
    for path in wanted:
        try:
            found.append(facts_of(path, lineage=lineage))
        except ExpStoreError as exc:
            trouble = _Trouble(_exit_code(exc), exc.kind, exc.message, exc.hint)
            found.append({"path": str(path), "error": trouble.body()})
            worst = trouble if worst is None or trouble.code > worst.code else worst
    if as_json:
        print_json({"stores": found} | ({"error": worst.body()} if worst else {}))
    if len(wanted) > len(paths) and not (as_json or worst or lineage):
        show_stores(found)
        return 0
    for facts in () if as_json else found:
        if "error" in facts:
            typer.echo(f"error: {_Trouble(0, **facts['error']).line()}", err=True)
        elif lineage:
            show_lineage(facts)
        else:
            show_facts(facts)
    return worst.code if worst else 0


# -- sql -------------------------------------------------------------------------------------------


def sql(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            callback=to_local,
            autocompletion=complete_store,
            metavar="STORE",
            help="The folders of the stores.",
        ),
    ] = None,
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="One SELECT statement, in quotes.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            help="Read the statement from a file instead; - reads standard input.",
        ),
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV.")] = False,
    as_json: Json = False,
    parquet: Annotated[
        Path | None, typer.Option(callback=to_local, metavar="FILE", help="Write the rows to a Parquet file.")
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(min=1, help=f"Maximum number of rows; {TABLE_ROWS} in a table, otherwise all."),
    ] = None,
) -> int:
    """Query stores in SQL."""
    if as_csv and (as_json or parquet):
        raise typer.BadParameter("--csv excludes --json and --parquet: choose one of them")
    from expstore.cli.query import ask, check_order, read_query

    if file is None:
        stores, query = check_order(paths or [], query)
    else:  # then the last argument is a store, too
        stores, query = read_query([*(paths or []), *([] if query is None else [local_path(query)])], file)
    most = limit if as_csv or as_json or parquet else limit or TABLE_ROWS
    result = ask(stores, query, most)
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
        print_table(result.columns, list(rows_of(result)))
        if more and limit is None:
            typer.echo(f"there are more than {most} rows; --limit N shows more, --csv shows all", err=True)
    return 0


# -- the commands ----------------------------------------------------------------------------------

add_command(
    app,
    info,
    heading=LOOK,
    notes="Nothing is changed. A store can be inspected while another process writes to it. Of a folder of "
    "stores, each store is listed.",
    examples=("expstore info run.exp", "expstore info runs --json"),
)
add_command(
    app,
    consumers.consumers,
    heading=LOOK,
    notes="A consumer is a reader with a name, whose draws are written down. `open` says whether a process "
    "draws for it now.",
    examples=("expstore consumers run.exp", "expstore consumers run.exp --json"),
)
add_command(
    app,
    sql,
    heading=LOOK,
    notes="The relations are transitions, episodes, fragments, sources, priorities, commits, draws and meta; "
    "DESCRIBE episodes lists the columns of one. transitions has the fields, nested ones as next.reward, "
    "and _id, _episode, _step, _time and _priority. episodes has episode_id, source, length, return, "
    "start_time, end_time, info and status: open, terminated, truncated, or cut (stopped before its end). "
    "The query runs on each store separately, so an aggregate returns one row per store; with several stores "
    "the first column, store, names the store.",
    examples=(
        'expstore sql run.exp "SELECT episode_id, length, return FROM episodes ORDER BY return DESC LIMIT 5"',
        "expstore sql run.exp other.exp -f query.sql --csv",
    ),
)
add_command(
    app,
    episode,
    heading=LOOK,
    notes="Nothing in the store is changed. A picture shows frames of image fields and the numbers over the "
    "steps; it needs matplotlib: pip install 'expstore[plot]'.",
    examples=("expstore episode run.exp 1", "expstore episode run.exp 1 --png episode.png"),
)
add_command(
    app,
    changes,
    heading=LOOK,
    notes="Nothing in the store is changed. Episodes without the facts that rb.episodes.measure() writes are "
    "measured each time. A change has a score of 6 standard errors or more: docs/changes.md.",
    examples=("expstore changes run.exp", "expstore changes run.exp --limit 5 --json"),
)
add_command(
    app,
    odd,
    heading=LOOK,
    notes="Nothing in the store is changed. Episodes without the facts that rb.episodes.measure() writes are "
    "measured each time. An episode is odd if a measure of it, of its source or of its policy version is 6 "
    "robust standard deviations from that of its peers: docs/odd.md.",
    examples=("expstore odd run.exp", "expstore odd run.exp --limit 5 --json"),
)
add_command(
    app,
    serve.ui,
    heading=LOOK,
    notes=serve.UI_NOTES,
    examples=("expstore ui run.exp", "expstore ui runs --port 8080 --no-browser"),
)
add_command(
    app,
    checks.verify,
    heading=LOOK,
    notes="Nothing is changed. Priorities have no checksum and are not checked. Exit codes: 0 no damage, "
    "1 findings, 3 another process writes to the store, 4 no row can be read.",
    examples=("expstore verify run.exp", "expstore verify run.exp --json"),
)

add_command(
    app,
    export.export,
    heading=MOVE,
    notes=export.EXPORT_NOTES,
    examples=(
        "expstore export run.exp rows --parquet",
        "expstore export run.exp long.npz --npz --where 'length > 10' --fields observation,action",
    ),
)
add_command(
    app,
    export.import_,
    name="import",
    heading=MOVE,
    notes=export.IMPORT_NOTES,
    examples=("expstore import rows new.exp", "expstore import steps.csv steps.exp --map obs=observation"),
)
add_command(
    app,
    object_storage.ship,
    heading=MOVE,
    notes=object_storage.SHIP_NOTES,
    examples=("expstore ship run.exp s3://bucket/run", "expstore ship run.exp s3://bucket/run --json"),
)
app.add_typer(datasets, rich_help_panel=MOVE)

app.add_typer(snapshots.versions, rich_help_panel=VERSIONS)

add_command(
    app,
    collect,
    heading=CHANGE,
    notes="Rows are added to a store that exists. Ctrl-C keeps the rows collected so far and closes the "
    "store; a second Ctrl-C does not wait for the environment.",
    examples=(
        "expstore collect CartPole-v1 run.exp --steps 1000",
        "expstore collect Pendulum-v1 pendulum.exp --steps 200 --envs 2 --capacity 10000 --seed 1",
    ),
)
add_command(
    app,
    add_column,
    heading=CHANGE,
    notes="Other fields are not changed. After a crash the field exists completely or not at all.",
    examples=(
        "expstore add-column run.exp mark --fill 0",
        "expstore add-column run.exp share --sql 'next.reward / episode.length' --dtype float32",
    ),
)
add_command(
    app,
    drop_column,
    heading=CHANGE,
    notes="Fields that mark the episodes of a store cannot be dropped.",
    examples=("expstore drop-column run.exp mark", "expstore drop-column run.exp share --json"),
)
add_command(
    app,
    retain.retain,
    heading=CHANGE,
    notes="Without options the store's own policy is applied. Deleted rows cannot be restored; the relation "
    "episodes keeps its rows.",
    examples=(
        "expstore retain run.exp --where 'episode.length > 1' --dry-run",
        "expstore retain run.exp --bytes 2GB --age 7d",
    ),
)
app.add_typer(selections.selections, rich_help_panel=CHANGE)
add_command(
    app,
    reshape.resize,
    heading=CHANGE,
    notes="Rows keep their ids. After a crash the store has its former capacity or the new one; Ctrl-C keeps "
    "the former one.",
    examples=("expstore resize run.exp --capacity 100000", "expstore resize run.exp --unbounded"),
)
add_command(
    app,
    reshape.merge,
    heading=CHANGE,
    notes="All stores must have the same fields: add-column and drop-column make them equal. The name of a "
    "source is prefixed with the name of its store. The new store exists completely or not at all.",
    examples=(
        "expstore merge run.exp other.exp --out both.exp",
        "expstore merge run.exp other.exp --out newest.exp --capacity 500",
    ),
)
add_command(
    app,
    checks.repair,
    heading=CHANGE,
    notes="Without --drop-damaged no row is deleted. If the command is interrupted, run it again. Exit "
    "codes: 0 repaired, 1 some damage is left, 3 another process writes to the store, 4 no row can be read.",
    examples=("expstore repair run.exp", "expstore repair run.exp --drop-damaged"),
)

add_command(
    app,
    serve.serve,
    heading=SERVE,
    notes=serve.SERVE_NOTES,
    examples=(
        "expstore serve runs",
        "expstore serve runs --host 0.0.0.0 --token-file token --limits limits.toml",
    ),
)
add_command(
    app,
    serve.capture,
    heading=SERVE,
    notes=serve.CAPTURE_NOTES,
    examples=(
        "expstore capture run.exp --upstream http://127.0.0.1:8000/v1",
        "expstore capture run.exp --upstream https://api.openai.com/v1 --on-error pass --omit messages",
    ),
)
app.add_typer(cluster, rich_help_panel=SERVE)
