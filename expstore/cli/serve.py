"""The commands that serve stores over HTTP: to programs, and as a page in the browser.

Used by `expstore.cli.app`. It reads options and token files, and prints; `expstore.api` serves.
"""

from __future__ import annotations

import difflib
import gc
import json
import logging
import math
import os
import signal
import threading
import tomllib
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from expstore.cli.completion import complete_store
from expstore.cli.paths import to_local
from expstore.cli.tokens import TokenHosts, read_token, read_tokens
from expstore.errors import StateError, StorageError

if TYPE_CHECKING:
    from expstore.api.server import Listening
    from expstore.api.settings import Capture, Settings

#: Names in a file of limits: fields of `expstore.api.settings.Settings`.
LIMITS = {
    "max_body": "bytes of a request body",
    "max_rows": "rows of a request, and of a batch",
    "max_answer": "bytes of an answer",
    "sql_seconds": "seconds of a statement",
    "sql_rows": "rows of its result",
    "rate": "requests per second of one client",
    "concurrency": "requests of one store at once",
    "connections": "connections at once",
    "head_seconds": "seconds until the head of a request is there",
    "body_seconds": "seconds until its body is there",
    "answer_seconds": "seconds in which a client reads nothing of its answer",
    "idle_seconds": "seconds between two requests of a connection",
    "wait_seconds": "seconds that a request waits for rows",
    "shutdown_seconds": "seconds that running requests have when the server ends",
    "session_timeout": "seconds of silence after which a client's open episodes are cut",
}
SERVE_NOTES = (
    "Without a token the server answers only this machine. Ctrl-C or SIGTERM waits for running requests, "
    "flushes and closes the stores; a second one ends the server at once and loses no acknowledged row. "
    "For TLS, put a proxy in front of it.\n\n"
    "The page is at /ui/, the routes are described at /docs: GET /v1/stores lists the stores.\n\n"
    "A file of limits is TOML, a line such as `max_rows = 100000` for each limit that is not the default:"
    "\n\n\b\n" + "\n".join(f"  {name:16} {what}" for name, what in LIMITS.items())
)
CAPTURE_NOTES = (
    "Give agents the address http://127.0.0.1:8500/episodes/NAME/v1: their calls become the rows of one "
    'episode. POST /episodes/NAME/reward and /end take {"reward": 1.0}. An episode '
    "without calls for the session_timeout of --limits is cut, and its next call resumes it.\n\n"
    "An answer ends when its call is in the store; of a call without an answer a row says so. The key of the "
    "model's server is passed on and not stored. The server has all routes of expstore serve, too."
)
UI_NOTES = (
    "Stores are only read, so another process may write to them meanwhile; the page shows what it adds. "
    "--nice gives it a lower priority than the writer; then it answers late while all cores are busy. "
    "Of a cluster file (expstore cluster init) it shows the shards, under the names shard-0 and so on. "
    "Only this machine can open the page. To look at stores of another machine, run `expstore serve` there: "
    "it has the same page at /ui/, which can also change facts of episodes."
)
#: Seconds that closing the stores may take, after the running requests had their time.
GRACE_SECONDS = 10.0
#: Thresholds of Python's garbage collector for `ui`. With the default ones it scans all objects of torch
#: several times while the episodes of a store are read: an eighth of the time of the first page.
_GC_THRESHOLDS = (50_000, 20, 50)
#: How much `ui` lowers its priority. Beside a learner on all cores and a writer of 2,000 rows/s, with ten
#: pages, 95% of the answers come within 0.1 s with 0, 0.25 s with 5, and 2 s with 10. The writer is as fast.
_NICE = 0


_Host = Annotated[str, typer.Option(help="The address to listen on.")]
_Port = Annotated[int, typer.Option(min=0, max=65535, help="The port to listen on; 0 chooses a free one.")]
_Token = Annotated[
    Path | None,
    typer.Option(
        callback=to_local, metavar="FILE", help="File with a token that permits reading and writing."
    ),
]
_ReadToken = Annotated[
    Path | None,
    typer.Option(callback=to_local, metavar="FILE", help="File with a token that permits reading."),
]
_ReadOnly = Annotated[
    bool, typer.Option("--read-only", help="Only read the stores; other processes may write to them.")
]
_Hosts = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="A host name that clients use for the server. May be repeated."),
]
_NoSQL = Annotated[bool, typer.Option("--no-sql", help="Reject SQL queries.")]
_NoUI = Annotated[bool, typer.Option("--no-ui", help="Do not serve the page at /ui/.")]
_Limits = Annotated[
    Path | None,
    typer.Option(
        callback=to_local,
        metavar="FILE",
        envvar="EXPSTORE_LIMITS",
        help="File with the server's limits, if they are not the defaults.",
    ),
]
_Ratio = Annotated[
    float | None, typer.Option(min=0, help="Average number of samples per row, over all clients.")
]
_Buffer = Annotated[
    float | None, typer.Option(min=0, help="Permitted deviation from --samples-per-insert, in samples.")
]
_OnError = Annotated[
    str,
    typer.Option(
        metavar="fail|pass",
        help="What happens to a call that cannot be recorded: fail withholds the end of its answer, pass "
        "answers it and counts it.",
    ),
]
_Omit = Annotated[
    list[str] | None,
    typer.Option(metavar="FIELD", help="A field that is left empty, such as messages. May be repeated."),
]
_Ask = Annotated[
    bool,
    typer.Option(
        "--ask-logprobs", help="Also ask for log-probabilities and token ids, as vLLM and SGLang return them."
    ),
]
_Log = Annotated[bool, typer.Option("--access-log", help="Print a line of JSON per request on stderr.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print lines of JSON.")]


def serve(
    path: Annotated[
        Path,
        typer.Argument(
            callback=to_local,
            autocompletion=complete_store,
            metavar="PATH",
            help="A store, or a folder of stores.",
        ),
    ],
    host: _Host = "127.0.0.1",
    port: _Port = 8420,
    token_file: _Token = None,
    read_token_file: _ReadToken = None,
    read_only: _ReadOnly = False,
    allow_host: _Hosts = None,
    no_sql: _NoSQL = False,
    no_ui: _NoUI = False,
    limits: _Limits = None,
    min_size: Annotated[
        int, typer.Option(min=1, help="Number of rows a store needs before it can be sampled.")
    ] = 1,
    samples_per_insert: _Ratio = None,
    error_buffer: _Buffer = None,
    capture_url: Annotated[
        str | None,
        typer.Option(
            "--capture",
            metavar="URL",
            help="Also record calls of agents to the language model at this address, as expstore capture.",
        ),
    ] = None,
    on_error: _OnError = "fail",
    omit: _Omit = None,
    ask_logprobs: _Ask = False,
    ship: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ship each store to an object storage, under its name below this URL: s3://bucket/runs.",
        ),
    ] = None,
    access_log: _Log = False,
    as_json: _AsJson = False,
) -> int:
    """Serve stores over HTTP."""
    from expstore.api.settings import Settings

    if capture_url is None and (on_error != "fail" or omit or ask_logprobs):
        raise typer.BadParameter(
            "it is missing, and --on-error, --omit and --ask-logprobs need it", param_hint="--capture"
        )
    settings = Settings(
        path=path, token=_read(token_file), read_token=_read(read_token_file), read_only=read_only,
        hosts=tuple(allow_host or ()), sql=not no_sql, ui=not no_ui, min_size=min_size,
        samples_per_insert=samples_per_insert, error_buffer=error_buffer,
        capture=None if capture_url is None else _build_capture(capture_url, on_error, omit, ask_logprobs),
        ship=ship,
        **_read_limits(limits),
    )  # fmt: skip
    return _serve(settings, host, port, access_log=access_log, as_json=as_json)


def capture(
    path: Annotated[
        Path,
        typer.Argument(
            callback=to_local, metavar="STORE", help="The store of the calls; created if it does not exist."
        ),
    ],
    upstream: Annotated[
        str, typer.Option(metavar="URL", help="Address of the language model's server, up to /v1.")
    ],
    host: _Host = "127.0.0.1",
    port: _Port = 8500,
    token_file: _Token = None,
    allow_host: _Hosts = None,
    on_error: _OnError = "fail",
    omit: _Omit = None,
    ask_logprobs: _Ask = False,
    group_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of episodes of a group, for a new store."),
    ] = None,
    limits: _Limits = None,
    access_log: _Log = False,
    as_json: _AsJson = False,
) -> int:
    """Record the calls of agents to a language model: a proxy with the API of OpenAI."""
    import expstore
    from expstore.api.capture.recorder import store_settings
    from expstore.api.settings import Settings
    from expstore.disk.files import ReadingDisk

    settings = Settings(
        path=path, token=_read(token_file), hosts=tuple(allow_host or ()),
        capture=_build_capture(upstream, on_error, omit, ask_logprobs), **_read_limits(limits),
    )  # fmt: skip
    disk = ReadingDisk()
    if not disk.exists(path):
        expstore.open(path, mode="x", **store_settings(group_size)).close()
    elif group_size is not None:
        raise typer.BadParameter(f"{path} exists, and its groups have their size", param_hint="--group-size")
    return _serve(settings, host, port, access_log=access_log, as_json=as_json)


def _build_capture(upstream: str, on_error: str, omit: list[str] | None, ask_logprobs: bool) -> Capture:
    from expstore.api.settings import Capture

    return Capture(upstream=upstream, on_error=on_error, omit=tuple(omit or ()), ask_logprobs=ask_logprobs)


def _serve(settings: Settings, host: str, port: int, *, access_log: bool, as_json: bool) -> int:
    """Serve until a signal arrives."""
    from expstore.api.server import serve as run

    if access_log:
        _log_requests()

    def ready(listening: Listening) -> None:
        typer.echo(json.dumps(_facts(settings, listening)) if as_json else _line(settings, listening))

    run(settings, host=host, port=port, ready=ready, stopping=lambda: _limit_end(settings.shutdown_seconds))
    if as_json:
        typer.echo(json.dumps({"stopped": True}))
    return 0


def _read_limits(path: Path | None) -> dict[str, Any]:
    """Return the limits in a file; none without a file.

    Raises:
        BadParameter: The file is missing or no TOML, it has an unknown name, or a value is not a number above
            0.
    """
    from expstore.api.settings import Settings
    from expstore.disk.files import ReadingDisk

    if path is None:
        return {}
    try:
        found = tomllib.loads(ReadingDisk().read_whole(path).decode())
    except (StorageError, ValueError) as exc:
        raise typer.BadParameter(f"{path} cannot be read: {exc}", param_hint="--limits") from exc
    for name, value in found.items():
        if name not in LIMITS:
            near = difflib.get_close_matches(name, LIMITS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(LIMITS)}"
            raise typer.BadParameter(f"{path} has {name!r}, which is no limit; {hint}", param_hint="--limits")
        is_whole = isinstance(getattr(Settings, name), int)
        if type(value) not in ((int,) if is_whole else (int, float)) or not 0 < value < math.inf:
            kind = "a whole number" if is_whole else "a number"
            raise typer.BadParameter(
                f"{path} has {name} = {value!r}, which is not {kind} above 0", param_hint="--limits"
            )
    return found


def ui(
    path: Annotated[
        Path,
        typer.Argument(
            callback=to_local,
            autocompletion=complete_store,
            metavar="PATH",
            help="A store, a folder of stores, or a cluster file.",
        ),
    ] = Path("."),
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen on; 0 chooses a free one.")
    ] = 0,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Only print the address of the page.")
    ] = False,
    token_file: Annotated[
        Path | None,
        typer.Option(
            callback=to_local,
            metavar="FILE",
            help="File with the token of the shards, for a cluster file. Without it the page asks for one.",
        ),
    ] = None,
    token_host: TokenHosts = None,
    nice: Annotated[
        int,
        typer.Option(min=0, max=19, help="Priority of the page: 0 as other programs, 19 only idle time."),
    ] = _NICE,
) -> int:
    """Look at stores, or at the shards of a cluster, in the browser."""
    from expstore.api.page.files import PATH
    from expstore.api.server import run
    from expstore.api.server import serve as serve_stores
    from expstore.api.settings import Settings
    from expstore.api.shards_app import create_shards_app
    from expstore.cluster.members import FileMembers
    from expstore.disk.files import ReadingDisk

    def ready(listening: Listening) -> None:
        os.nice(nice)
        gc.set_threshold(*_GC_THRESHOLDS)
        address = f"{listening.url}{PATH}/"
        typer.echo(f"showing {path} at {address} (Ctrl-C ends it)")
        if not no_browser and not webbrowser.open_new_tab(address):
            typer.echo("no browser was found; open the address yourself", err=True)

    disk = ReadingDisk()
    is_cluster = disk.exists(path) and not disk.is_dir(path)
    if token_file is not None and not is_cluster:
        raise StateError(
            f"{path} is not a cluster file, so no token is sent to shards", hint="leave --token-file out"
        )
    options: Any = {"port": port, "ready": ready, "stopping": lambda: _limit_end(5.0)}
    if is_cluster:
        settings = Settings(path=path.parent, read_only=True)
        app = create_shards_app(FileMembers(path), settings, read_tokens(token_file, token_host))
        run(app, settings, host="127.0.0.1", **options)
    else:
        serve_stores(Settings(path=path, read_only=True), **options)
    return 0


def _facts(settings: Settings, listening: Listening) -> dict[str, object]:
    return {
        "listening": listening.url,
        "path": str(settings.path),
        "stores": listening.stores,
        "read_only": settings.read_only,
        "token": settings.token is not None or settings.read_token is not None,
        "pid": os.getpid(),
    }


def _line(settings: Settings, listening: Listening) -> str:
    stores = listening.stores
    what = f"{settings.path}" if len(stores) == 1 else f"{settings.path} ({len(stores)} stores)"
    calls = f", calls go to {settings.capture.upstream}" if settings.capture else ""
    return f"serving {what} at {listening.url}{calls}" + (", read-only" if settings.read_only else "")


def _read(path: Path | None) -> bytes | None:
    """Return the token in a file; None without a file."""
    token = read_token(path)
    return None if token is None else token.encode()


def _log_requests() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("expstore.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _limit_end(seconds: float) -> None:
    """Kill the process if it does not end in time, for example because a disk hangs."""
    thread = threading.Timer(seconds + GRACE_SECONDS, os.kill, (os.getpid(), signal.SIGKILL))
    thread.daemon = True
    thread.start()
