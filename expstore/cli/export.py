"""The commands `export` and `import`.

Used by `expstore.cli.app`, which reports errors. Neither command changes an existing store.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore import exchange
from expstore.cli.completion import complete_store
from expstore.cli.interrupt import stoppable
from expstore.cli.output import Json, print_json
from expstore.cli.paths import to_local
from expstore.core.tables import size_text
from expstore.exchange.base import no_progress, show_import, show_progress
from expstore.exchange.formats import LOSSES, LOST_BY_ALL, describe_losses

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from expstore.exchange import Exported, Imported

#: Paragraphs of the help.
EXPORT_NOTES = "\n\n".join(
    [
        "The export exists completely or not at all; Ctrl-C leaves nothing. Later rows are not exported. "
        "Only --lerobot leaves whole episodes behind, from which the same command continues.",
        f"No format contains {LOST_BY_ALL}. In addition, these formats do not contain:",
        *(f"--{name}: {lost}" for name, lost in LOSSES.items() if lost),
    ]
)
IMPORT_NOTES = (
    "The store exists when it is complete, not before. Ctrl-C leaves nothing, and the next attempt starts "
    "again; for data sets (all formats but arrow, csv, jsonl, npz, parquet, rollouts and flat hdf5) it "
    "leaves a hidden folder, .STORE.import, from which the next attempt continues. Ids begin at 1. Nothing "
    "is ever unpickled."
)


Store = Annotated[
    Path,
    typer.Argument(
        callback=to_local,
        autocompletion=complete_store,
        metavar="STORE",
        help="A store, which may be in use, a snapshot or a folder of snapshots.",
    ),
]
Out = Annotated[
    Path,
    typer.Argument(callback=to_local, metavar="OUT", help="The file or folder to write; must not exist."),
]
AsArrow = Annotated[
    bool, typer.Option("--arrow", help="A folder of Arrow IPC files: rows.arrow, episodes.arrow.")
]
AsHdf5 = Annotated[
    bool, typer.Option("--hdf5", help="An HDF5 file with D4RL's names: observations, actions, rewards, ...")
]
AsLeRobot = Annotated[
    bool,
    typer.Option(
        "--lerobot", help="A LeRobot data set: Parquet files and videos; the same command continues it."
    ),
]
AsMinari = Annotated[bool, typer.Option("--minari", help="A Minari dataset (HDF5).")]
AsNpz = Annotated[bool, typer.Option("--npz", help="A NumPy .npz file with the names of --hdf5.")]
AsChat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="JSON lines of messages, for supervised training: the conversations of expstore capture.",
    ),
]
AsParquet = Annotated[
    bool, typer.Option("--parquet", help="A folder: rows/*.parquet, sorted by episode, and episodes.parquet.")
]
Fields = Annotated[
    str | None,
    typer.Option(
        "--fields", metavar="NAMES", help="Export only these fields, such as observation,next.reward."
    ),
]
EpisodeRange = Annotated[
    str | None,
    typer.Option(
        "--episodes", metavar="RANGE", help="Export only episodes with these ids, such as 1-20,35,100-."
    ),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where", metavar="SQL", help="Export only episodes that match, such as \"status = 'terminated'\"."
    ),
]
OfVersion = Annotated[
    str | None,
    typer.Option(
        "--version",
        metavar="V",
        help="Number or tag of a snapshot; by default the store itself, or the newest snapshot.",
    ),
]
DatasetId = Annotated[
    str | None,
    typer.Option("--dataset-id", metavar="ID", help="Id of the Minari dataset, such as cartpole/random-v0."),
]
Fps = Annotated[
    int | None,
    typer.Option(
        "--fps",
        metavar="N",
        min=1,
        help="Frames per second of a LeRobot data set; by default those of the imported data set or of meta.",
    ),
]
Task = Annotated[
    str | None,
    typer.Option("--task", metavar="TEXT", help="Task of episodes without a task in a LeRobot data set."),
]
Robot = Annotated[
    str | None, typer.Option("--robot", metavar="TYPE", help="Type of the robot of a LeRobot data set.")
]
Images = Annotated[
    bool,
    typer.Option("--images", help="Store the pictures of a LeRobot data set exactly, instead of as videos."),
]
Codec = Annotated[
    str | None,
    typer.Option("--codec", metavar="NAME", help="Codec of LeRobot's videos: h264 (the default) or av1."),
]
OfDraws = Annotated[
    bool,
    typer.Option(
        "--draws", help="Export the draws of consumers instead of rows: a Parquet file with an order."
    ),
]
OfConsumer = Annotated[
    str | None,
    typer.Option("--consumer", metavar="NAME", help="With --draws: export only the draws of this consumer."),
]
AsStorage = Annotated[
    str | None,
    typer.Option(
        "--storage",
        metavar="KIND",
        help="Kind of store for parquet and arrow files: arrow keeps rows of any length, zarr rows of a "
        "fixed size. By default chosen from the columns.",
    ),
]


def export(
    store: Store,
    target: Out,
    as_arrow: AsArrow = False,
    as_hdf5: AsHdf5 = False,
    as_lerobot: AsLeRobot = False,
    as_minari: AsMinari = False,
    as_npz: AsNpz = False,
    as_parquet: AsParquet = False,
    as_chat: AsChat = False,
    fields: Fields = None,
    episodes: EpisodeRange = None,
    where: Where = None,
    version: OfVersion = None,
    dataset_id: DatasetId = None,
    fps: Fps = None,
    task: Task = None,
    robot: Robot = None,
    images: Images = False,
    codec: Codec = None,
    draws: OfDraws = False,
    consumer: OfConsumer = None,
    as_json: Json = False,
) -> int:
    """Write the rows of a store to files for other programs, or which rows its consumers have drawn."""
    asked = {
        "arrow": as_arrow,
        "hdf5": as_hdf5,
        "lerobot": as_lerobot,
        "minari": as_minari,
        "npz": as_npz,
        "parquet": as_parquet,
    }
    chosen = [name for name, wanted in asked.items() if wanted]
    options = {
        "dataset_id": ("minari", "--dataset-id", dataset_id),
        "fps": ("lerobot", "--fps", fps),
        "task": ("lerobot", "--task", task),
        "robot_type": ("lerobot", "--robot", robot),
        "images": ("lerobot", "--images", images or None),
        "codec": ("lerobot", "--codec", codec),
    }
    more: dict[str, Any] = {name: value for name, (_, _, value) in options.items() if value is not None}
    if draws:
        if chosen or more or not all(one is None for one in (fields, episodes, where, version)):
            raise typer.BadParameter("--draws takes --consumer and --json, and no option for rows")
        return _export_draws(store, target, consumer, as_json=as_json)
    if consumer is not None:
        raise typer.BadParameter("--consumer requires --draws")
    if as_chat:
        if chosen or not all(one is None for one in (fields, episodes, version, dataset_id)):
            raise typer.BadParameter("--chat takes --where and --json, and no option for rows")
        return _export_chat(store, target, where, as_json=as_json)
    if len(chosen) != 1:
        raise typer.BadParameter(f"choose one format: {', '.join(f'--{name}' for name in asked)}")
    if episodes is not None and where is not None:
        raise typer.BadParameter("--episodes and --where exclude each other: pass one of them")
    for name in more:
        form, option, _ = options[name]
        if chosen != [form]:
            raise typer.BadParameter(f"{option} requires --{form}")
    from expstore.disk.files import ReadingDisk
    from expstore.exchange.rows import parse_episodes

    disk = ReadingDisk()
    names = None if fields is None else [name.strip() for name in fields.split(",")]
    which = where if episodes is None else parse_episodes(episodes)
    if chosen == ["lerobot"]:
        more["tell"] = _note
    _note([f"the export will not contain {describe_losses(chosen[0])}"])
    try:
        with show_progress("exporting") as show, stoppable(show) as progress:
            done = getattr(exchange, f"export_{chosen[0]}")(
                store, target, fields=names, episodes=which, version=version, progress=progress, **more
            )
    except KeyboardInterrupt:
        if disk.exists(target):
            typer.echo("stopped; the same command continues the export", err=True)
        raise
    if as_json:
        print_json(dataclasses.asdict(done) | {"path": str(done.path), "fields": list(done.fields)})
    else:
        _tell(done)
    return 0


def _export_chat(store: Path, target: Path, where: str | None, *, as_json: bool) -> int:
    from expstore.cli.chats import export_chat

    count = export_chat(store, target, "true" if where is None else where)
    if as_json:
        print_json({"path": str(target), "conversations": count})
    else:
        typer.echo(f"{target} holds {count:,} conversations")
    return 0


def _export_draws(store: Path, target: Path, consumer: str | None, *, as_json: bool) -> int:
    from expstore.cli.query import ask
    from expstore.disk.atomic_build import build_atomically
    from expstore.disk.files import Disk
    from expstore.errors import NotFoundError
    from expstore.storages.format.manifest import check_target

    if target.suffix != ".parquet":
        raise typer.BadParameter(
            f"draws are exported to a Parquet file; name it {target.with_suffix('.parquet')}"
        )
    disk = Disk()
    check_target(disk, target)
    which = "" if consumer is None else "WHERE consumer = '{}'".format(consumer.replace("'", "''"))
    found = ask([store], f"SELECT * FROM draws {which} ORDER BY consumer, draw, place", None)
    if not len(found):
        whose = "consumers" if consumer is None else f"a consumer {consumer!r}"
        raise NotFoundError(f"{store} has no draws of {whose}", hint=f"see expstore consumers {store}")
    with build_atomically(disk, target, single=True) as folder:
        found.to_parquet(folder / target.name)
        with contextlib.closing(disk.open(folder / target.name)) as file:
            file.sync()
    if as_json:
        print_json({"path": str(target), "rows": len(found)})
    else:
        typer.echo(f"{target} holds {len(found):,} drawn rows")
    return 0


def _tell(done: Exported) -> None:
    """Print what was exported, and how many rows are missing."""
    typer.echo(
        f"{done.path} holds {done.rows:,} rows of {done.episodes:,} episodes, {size_text(done.disk_bytes)}"
    )
    if done.left_out:
        typer.echo(
            f"note: {done.left_out:,} rows are missing: newer rows replaced them during the export. To "
            "export all rows, make a snapshot with `expstore versions create` and export it",
            err=True,
        )


def import_(
    source: Annotated[
        Path, typer.Argument(callback=to_local, metavar="SOURCE", help="A file or folder of another format.")
    ],
    store: Annotated[
        Path | None,
        typer.Argument(
            callback=to_local,
            autocompletion=complete_store,
            metavar="STORE",
            help="The new store; must not exist. By default SOURCE's name with .exp, in this folder.",
        ),
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="NAME",
            help="arrow, atari-dqn, csv, d4rl, gen-dgrl, hdf5, jsonl, lerobot, minari, npz, openml, openx, "
            "parquet, rlds, robomimic, roboset, rollouts, sb3, tensordict, vd4rl. "
            "Default: recognized from SOURCE, if possible; rollouts (of language models) never are.",
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="THEIRS=OURS",
            help="In files with a row per transition or rollout: import the column THEIRS as the field OURS, "
            "such as obs_next=next.observation, or as a part of a rollout, such as answer_ids=tokens. "
            "THEIRS= skips the column. May be repeated.",
        ),
    ] = None,
    capacity: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Maximum number of rows; the newest are kept. By default the capacity of the exported "
            "store, or unlimited.",
        ),
    ] = None,
    storage: AsStorage = None,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            "--checkpoints",
            metavar="RANGE",
            help="In atari-dqn: import only these checkpoints, such as 0-9,20.",
        ),
    ] = None,
    as_json: Json = False,
) -> int:
    """Create a store from files of other programs, or from an export."""
    from expstore.datasets.formats import find_plain_format, has_format, list_formats, recognize
    from expstore.datasets.registry import find_kind
    from expstore.exchange.formats import IMPORTS, TABLES, format_of

    store = Path(f"{source.stem}.exp") if store is None else store
    choices = sorted({*IMPORTS, *list_formats()})
    if format is not None and format not in choices:
        raise typer.BadParameter(
            f"{format!r} is unknown; use one of {', '.join(choices)}", param_hint="--format"
        )
    recognized, notes = (None, []) if format is not None else recognize(source)
    _note(notes)
    asked, format = format, format or recognized or format_of(source, choices)
    is_dataset = recognized is not None or format in list_formats()
    if asked == "hdf5" and has_format(asked, source):
        is_dataset = True
    kind = find_kind(format) if is_dataset else None
    if checkpoints is not None and (kind is None or not kind.takes("checkpoints")):
        raise typer.BadParameter(f"does not apply to {format}", param_hint="--checkpoints")
    if kind is not None:
        options: dict[str, Any] = {}
        if capacity is not None and kind.takes("capacity"):
            options["capacity"] = capacity
        if checkpoints is not None:
            options["checkpoints"] = _numbers(checkpoints)
        refused = {"--map": names, "--capacity": "capacity" not in options and capacity, "--storage": storage}
        for name, value in refused.items():
            if value:
                plain = find_plain_format(source) if recognized else None
                advice = f"; --format {plain} reads {source} as plain rows" if plain else ""
                raise typer.BadParameter(f"does not apply to {format}{advice}", param_hint=name)
        done = _import_data_set(format, source, store, options)
    else:
        more: dict[str, Any] = {"names": _pairs(names)} if names else {}
        if more and format == "sb3":
            raise typer.BadParameter(
                "does not apply to sb3, whose fields are those of a model", param_hint="--map"
            )
        if storage is not None:
            more["storage"] = _kind(storage, format, TABLES)
        make = getattr(exchange, f"import_{format}")
        with show_progress("importing", "rows") as show, stoppable(show) as progress:
            done = make(source, store, capacity=capacity, progress=progress, tell=_note, **more)
    if as_json:
        facts = dataclasses.asdict(done) | {"path": str(done.path), "fields": list(done.fields)}
        print_json(facts | {"notes": list(done.notes)})
        return 0
    _tell_imported(done)
    return 0


def _import_data_set(format: str, source: Path, store: Path, options: Mapping[str, Any]) -> Imported:
    """Import a data set, or continue an interrupted import; print the reader's notes before it."""
    try:
        # From now on Ctrl-C ends the work between two pieces, also while the libraries are loaded.
        with stoppable(no_progress) as check:
            from expstore.datasets import import_dataset
            from expstore.datasets.formats import make_reader

            reader = make_reader(format, source, **options)
            check(0, 0)
            _note(reader.notes())
            with show_import(show_progress) as (checking, rows):

                def report_check(done: int, total: int) -> None:
                    checking(done, total)
                    check(done, total)

                def report_import(done: int, total: int) -> None:
                    rows(done, total)
                    check(done, total)

                return import_dataset(reader, store, progress=report_import, checking=report_check)
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues the import", err=True)
        raise


def _note(notes: Iterable[str]) -> None:
    """Print what is lost or changed, before an import or an export starts."""
    for note in notes:
        typer.echo(f"note: {note}", err=True)


def _tell_imported(done: Imported) -> None:
    """Print what was imported."""
    typer.echo(done.summary)
    for warning in done.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if done.kept < done.rows:
        typer.echo(f"note: {done.rows - done.kept:,} older rows did not fit its capacity", err=True)


def _kind(storage: str, format: str, formats: Sequence[str]) -> str:
    """Return the value of `--storage`, if it is valid for this format."""
    if storage not in ("arrow", "zarr"):
        raise typer.BadParameter(f"{storage!r} is unknown; use arrow or zarr", param_hint="--storage")
    if format not in formats:
        raise typer.BadParameter(f"applies to {', '.join(formats)} only", param_hint="--storage")
    return storage


def _pairs(names: list[str]) -> dict[str, str]:
    """Return the values of `--map` as a mapping."""
    for name in names:
        if "=" not in name or name.startswith("="):
            raise typer.BadParameter(f"{name!r} is not of the form THEIRS=OURS", param_hint="--map")
    return {theirs: ours for theirs, _, ours in (name.partition("=") for name in names)}


def _numbers(text: str) -> list[int]:
    """Return the numbers in the value of `--checkpoints`."""
    found: list[int] = []
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise typer.BadParameter(
                f"{part!r} is not a number or a range, as in 0-9,20", param_hint="--checkpoints"
            )
        found += range(int(first), int(last or first) + 1)
    return found
