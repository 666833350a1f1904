"""Untrusted SQL over a store, run in child processes that can only read it and are killed at a deadline.

Used by the HTTP layer. Each child (`expstore.sql.sandbox.child`) follows the store by itself. Statements
cannot affect this process, which does not load DuckDB for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from expstore import errors
from expstore.disk.files import Disk
from expstore.disk.local_path import local_path
from expstore.errors import ExpStoreError, NotReadyError, QueryError, StateError
from expstore.sql.sandbox.pipes import PipeError, receive, send
from expstore.storages.snapshots.catalog import store_meant

#: Time limit for starting a child. Usually it takes half a second, longer on a busy machine.
_START_SECONDS = 60.0
#: Bytes that Arrow's framing and schema may add to an answer's rows.
_MARGIN = 16 << 20
_BOOT = """
import json, sys
told = json.loads(sys.argv[1])
sys.path[:] = told["libraries"]
from expstore.sql.sandbox.child import main
main(told)
"""
#: The child's whole environment. Arrow's default memory pool would reserve a gigabyte of address space, and
#: a thread that a library starts on import would not be restricted.
_ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SqlLimits:
    """Limit the resources of one statement.

    Args:
        text: Bytes of the statement, and of its parameters as JSON.
        seconds: Seconds from sending the statement until the answer has arrived.
        rows: Rows of an answer; further rows are left out.
        bytes: Bytes of an answer's rows; further rows are left out.
        memory: Bytes that the child may allocate for the statement, in addition to what it already uses.
        at_once: Number of statements that run at the same time; further statements wait.
        wait: Seconds that a statement waits before it is rejected.

    Raises:
        ValueError: A limit is not above 0, or `memory` is less than 64 MiB.
    """

    text: int = 16_384
    seconds: float = 3.0
    rows: int = 10_000
    bytes: int = 64 << 20
    memory: int = 512 << 20
    at_once: int = 2
    wait: float = 3.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"{name} must be above 0, got {value!r}")
        if self.memory < 64 << 20:
            raise ValueError(f"memory must be at least 64 MiB, got {self.memory}")


@dataclass(frozen=True, slots=True)
class Answer:
    """The rows that one statement returned.

    Args:
        data: An Arrow IPC stream: schema, batches, end mark.
        rows: Number of rows in `data`.
        truncated: Whether further rows were left out because of the limits.
        ms: Duration of the statement in milliseconds, with the transfer to the child and back.
    """

    data: bytes | bytearray
    rows: int
    truncated: bool
    ms: float


class SqlWorker:
    """Answer untrusted SQL.

    Each statement is one SELECT over the relations of `rb.sql`. It sees everything that was written before it
    arrived. It runs in a child process that can read the store's folder and nothing else. The child is
    killed at the deadline; another child is ready for the next statement.

    Threads: any number may query; `limits.at_once` statements run at the same time. Processes: a forked child
    may not use it. Crashes: the SQL processes end when this process ends, for any reason.

    Args:
        path: The store's folder, or a folder of snapshots made by `dumps` (the newest one is used). It may be
            read-only.
        limits: Resources that one statement may use.
        drain: Called before each statement, to write rows that the writer of this process holds back for up
            to 0.1 s to the files. Pass `rb.storage.drain` if this process has the store open for writing.

    Raises:
        NotFoundError: There is no store at `path`.
        ExpStoreError: The store cannot be opened for reading.

    Example:
        >>> import pyarrow as pa
        >>> from expstore.sql.sandbox.pool import SqlWorker
        >>> with expstore.open("run.exp") as rb:
        ...     index = rb.extend(batch)
        >>> with SqlWorker("run.exp") as worker:
        ...     answer = worker.query("SELECT count(*) AS n FROM transitions WHERE _id <= ?", [10])
        >>> pa.ipc.open_stream(answer.data).read_all().to_pylist()
        [{'n': 10}]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        limits: SqlLimits | None = None,
        drain: Callable[[], object] | None = None,
    ) -> None:
        self.path = local_path(path)
        self.limits = limits or SqlLimits()
        self._drain = drain
        self._pool = _Pool(store_meant(Disk(), self.path).absolute(), self.limits)
        self._end = weakref.finalize(self, self._pool.close)
        try:
            self._pool.wait_for_first()
        except BaseException:
            self._end()
            raise

    def query(
        self,
        sql: str,
        params: Sequence[object] | Mapping[str, object] | None = None,
        *,
        rows: int | None = None,
        size: int | None = None,
    ) -> Answer:
        """Run one SELECT.

        Args:
            sql: The statement.
            params: Values for `?` or `$1` (a sequence) or `$name` (a mapping). They must be representable as
                JSON.
            rows: Maximum number of rows; None: `limits.rows`. A larger value has no effect.
            size: Maximum number of bytes of the rows; None: `limits.bytes`. A larger value has no effect.

        Raises:
            QueryError: The statement is not a single SELECT that only reads, or DuckDB rejects it (kind
                "query"). It is too long ("too_long"), takes too long ("timeout"), needs too much memory
                ("memory"), has a row larger than an answer may be ("too_large"), or crashed its process
                ("died").
            NotReadyError: All `limits.at_once` places were busy for `limits.wait` seconds (kind "busy").
            StateError: The worker is closed, or the writer overwrote rows during the query, twice in a row.
            StorageError: The store cannot be read.
        """
        request = self._request(sql, params)
        if rows is not None:
            request["rows"] = min(rows, self.limits.rows)
        if size is not None:
            request["bytes"] = min(size, self.limits.bytes)
        self._pool.check_open()
        if self._drain is not None:
            self._drain()
        with self._pool.admit():
            return self._pool.ask(request)

    def _request(self, sql: str, params: Any) -> dict[str, Any]:
        limits = self.limits
        if isinstance(params, Mapping):
            params = {str(name): _plain(value) for name, value in params.items()}
        elif params is not None:
            params = [_plain(value) for value in params]
        try:
            size, parameters = len(sql.encode()), len(json.dumps(params))
        except (TypeError, ValueError, RecursionError) as exc:
            raise QueryError(
                f"the statement or its parameters cannot be sent: {exc}",
                hint="parameters are numbers, texts, booleans, None, and lists of them",
            ) from exc
        for what, found in (("statement", size), ("parameters", parameters)):
            if found > limits.text:
                raise QueryError(
                    f"the {what} has {found} bytes, and {limits.text} are allowed", kind="too_long"
                )
        return {
            "sql": sql,
            "params": params,
            "rows": limits.rows,
            "bytes": limits.bytes,
            "seconds": limits.seconds,
        }

    def stats(self) -> dict[str, Any]:
        """Return counts of answered, rejected, killed and crashed statements, and facts about the children.

        These are the running children, and how they are confined.
        """
        return self._pool.stats()

    def close(self) -> None:
        """End all children, also those that run a statement; a second call does nothing."""
        self._end()

    def __enter__(self) -> SqlWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


class _Child:
    """One process, and the pipe to it. One thread at a time uses it."""

    def __init__(self, path: Path, limits: SqlLimits) -> None:
        package = str(Path(errors.__file__).parents[1])
        libraries = [package, *(entry for entry in sys.path if os.path.isabs(entry) and entry != package)]
        told = {"path": str(path), "memory": limits.memory, "parent": os.getpid(), "libraries": libraries,
                "code": sorted(_code_places())}  # fmt: skip
        began = time.monotonic()
        self.pipe, theirs = socket.socketpair()
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-B", "-c", _BOOT, json.dumps(told)],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=_ENVIRONMENT,
                    cwd="/",
                    start_new_session=True,  # so that Ctrl-C reaches the parent only
                )
        except BaseException:
            self.pipe.close()
            raise
        try:
            words, _ = receive(self.pipe, most=0, deadline=began + _START_SECONDS)
            if "error" in words:
                raise _unpack_error(words)
        except (PipeError, TimeoutError) as exc:
            code = self.end()
            raise StateError(
                f"the process for SQL has not started ({_describe_end(code)}): {exc}", kind="sandbox"
            ) from exc
        except BaseException:
            self.end()
            raise
        self.confined = str(words.get("ready"))
        self.seconds = time.monotonic() - began

    def ask(self, request: Mapping[str, Any], limits: SqlLimits) -> tuple[dict[str, Any], bytearray]:
        """Send a request and return the child's answer.

        Raises:
            TimeoutError: The answer did not arrive in time.
            PipeError: The child has ended, or sent an invalid message.
        """
        deadline = time.monotonic() + limits.seconds
        self.pipe.settimeout(limits.seconds)
        send(self.pipe, dict(request))
        return receive(self.pipe, most=limits.bytes + _MARGIN, deadline=deadline)

    @property
    def lives(self) -> bool:
        return self.process.poll() is None

    def end(self) -> int:
        """Kill the child and return its exit code."""
        self.process.kill()
        code: int = self.process.wait()
        self.pipe.close()
        return code


def _code_places() -> set[str]:
    """Return the paths of the code that this process imports or may import, which the child must read too.

    A folder of `sys.path` counts if packages are installed in it, wherever it is (a `.pth` file, PYTHONPATH,
    --system-site-packages). Of other folders, such as the folder of a script, only the modules that were
    imported count.
    """
    disk = Disk()
    folders = [Path(entry) for entry in sys.path if os.path.isabs(entry) and disk.is_dir(Path(entry))]
    found = {
        str(folder)
        for folder in folders
        if any(name.endswith((".dist-info", ".egg-info")) for name in disk.names(folder))
    }
    for name, module in sys.modules.copy().items():  # at once: a collection may import modules
        if "." not in name and name != "__main__":
            file = getattr(module, "__file__", None)
            found.update(map(str, getattr(module, "__path__", [file] if file else [])))
    return {place for place in found if os.path.isabs(place)}


@dataclass(slots=True)
class _Counts:
    """Count the outcomes of statements, and the processes that were started."""

    started: int = 0
    answered: int = 0
    refused: int = 0
    killed: int = 0
    died: int = 0
    startup_ms: float = 0.0


@dataclass(slots=True)
class _Seats:
    """Hold the idle children, the busy children, and the number of statements that wait for a child."""

    idle: list[_Child] = field(default_factory=list)
    busy: set[_Child] = field(default_factory=set)
    running: int = 0
    waiting: int = 0


class _Pool:
    """Keep children ready: one more than the running statements need.

    One thread, which lives as long as the pool, starts all children: the kernel kills a child when the thread
    that started it ends.
    """

    def __init__(self, path: Path, limits: SqlLimits) -> None:
        self._path = path
        self._limits = limits
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._seats = _Seats()
        self._counts = _Counts()
        self._failure: ExpStoreError | None = None
        self._closed = False
        self._confined = ""
        self._keeper = threading.Thread(target=self._keep, name="expstore-sql", daemon=True)
        self._keeper.start()

    # -- the keeper's thread ---------------------------------------------------------------------

    def _keep(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_ended() or self._lacks_child())
                if self._is_ended():
                    return
            child, failure = None, None
            try:
                child = _Child(self._path, self._limits)
            except ExpStoreError as exc:
                failure = exc
            except Exception as exc:
                failure = StateError(f"the process for SQL cannot be started: {exc}", kind="sandbox")
            with self._changed:
                self._failure = failure
                if child is not None:
                    self._counts.started += 1
                    self._counts.startup_ms = round(child.seconds * 1e3, 1)
                    self._confined = child.confined
                    self._seats.idle.append(child)
                    if self._is_ended():
                        self._end_idle()
                self._changed.notify_all()

    def _lacks_child(self) -> bool:
        """Return whether another child should be started."""
        seats = self._seats
        if self._failure is not None:
            return False  # until the next statement arrives
        alive, needed = len(seats.idle) + len(seats.busy), len(seats.busy) + seats.waiting
        return alive < min(max(needed, 1), self._limits.at_once) + 1

    # -- statements ------------------------------------------------------------------------------

    def check_open(self) -> None:
        if self._closed:
            raise StateError("the SQL worker is closed", hint="make another one")
        if os.getpid() != self._pid:
            raise StateError("the SQL worker belongs to the process that made it, and this is a fork of it")

    @contextlib.contextmanager
    def admit(self) -> Iterator[None]:
        """Wait until fewer than `at_once` statements run."""
        limits = self._limits
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._closed or self._seats.running < limits.at_once, limits.wait
            )
            self.check_open()
            if not free:
                raise NotReadyError(
                    f"{limits.at_once} queries have been running for {limits.wait:g} s",
                    kind="busy",
                    hint="try again",
                )
            self._seats.running += 1
        try:
            yield
        finally:
            with self._changed:
                self._seats.running -= 1
                self._changed.notify_all()

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """Send a request to a child and return its answer."""
        child = self._take()
        keep = False
        began = time.monotonic()
        try:
            words, body = child.ask(request, self._limits)
            keep = not words.get("retire", True)
        except TimeoutError:
            self._count("killed")
            raise self._build_timeout_error() from None
        except PipeError:
            self._fall(child)
        finally:
            self._give_back(child, keep=keep)
        if "error" in words:
            self._count("refused")
            raise _unpack_error(words)
        self._count("answered")
        ms = round((time.monotonic() - began) * 1e3, 3)
        return Answer(body, int(words["rows"]), bool(words["truncated"]), ms)

    def _fall(self, child: _Child) -> NoReturn:
        """Raise the error that explains why a child ended."""
        code = child.end()
        self.check_open()  # `close` may have ended the child
        if code == -signal.SIGALRM:  # this process was stopped and did not kill the child in time
            self._count("killed")
            raise self._build_timeout_error() from None
        self._count("died")
        raise QueryError(
            f"the process that ran the query crashed ({_describe_end(code)})",
            kind="died",
            hint="the next query runs in a new process",
        ) from None

    def _build_timeout_error(self) -> QueryError:
        return QueryError(
            f"the query took more than {self._limits.seconds:g} s",
            kind="timeout",
            hint="ask for less: fewer rows (WHERE _id ...), fewer columns",
        )

    def _take(self) -> _Child:
        """Take a running child; wait for one that is being started."""
        seats = self._seats
        with self._changed:
            self._failure = None
            seats.waiting += 1
            self._changed.notify_all()
            try:
                while True:
                    self._changed.wait_for(lambda: self._closed or seats.idle or self._failure)
                    self.check_open()
                    if not seats.idle and self._failure is not None:
                        raise self._failure
                    child = seats.idle.pop()
                    if child.lives:
                        seats.busy.add(child)
                        return child
                    child.end()
            finally:
                seats.waiting -= 1
                self._changed.notify_all()

    def _give_back(self, child: _Child, *, keep: bool) -> None:
        if not keep:
            child.end()
        with self._changed:
            self._seats.busy.discard(child)
            if keep:
                self._seats.idle.append(child)
            if self._is_ended():
                self._end_idle()
            self._changed.notify_all()

    def _count(self, what: str) -> None:
        with self._changed:
            setattr(self._counts, what, getattr(self._counts, what) + 1)

    # -- life ------------------------------------------------------------------------------------

    def wait_for_first(self) -> None:
        """Wait until the first child has started; raise the error if it cannot start."""
        with self._changed:
            self._changed.wait_for(lambda: self._seats.idle or self._failure)
            if self._failure is not None:
                raise self._failure

    def stats(self) -> dict[str, Any]:
        with self._changed:
            children = sorted(child.process.pid for child in (*self._seats.idle, *self._seats.busy))
            return {**asdict(self._counts), "pids": children, "confined": self._confined}

    def _is_ended(self) -> bool:
        return self._closed

    def _end_idle(self) -> None:
        while self._seats.idle:
            self._seats.idle.pop().end()

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # the children belong to the parent
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for child in self._seats.busy:
                child.process.kill()  # the thread that waits for its answer collects the exit code
            self._end_idle()
            self._changed.notify_all()
        self._keeper.join()


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def _unpack_error(words: Mapping[str, Any]) -> ExpStoreError:
    """Return the error that a child reported; only errors of expstore's tree are possible."""
    kind = getattr(errors, str(words["error"]), None) if words["error"] in errors.__all__ else None
    kind = kind or ExpStoreError
    made: ExpStoreError = kind(
        str(words.get("message")), kind=str(words.get("kind")), hint=str(words.get("hint"))
    )
    return made
