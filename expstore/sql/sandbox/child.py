"""The child process that runs untrusted SQL: it follows a store and answers the statements sent to its pipe.

Started by `expstore.sql.sandbox.pool`, with a socket as its standard input, and killed at a deadline. It
drops the privileges it does not need before it reads the first statement. It writes no files and does not
load torch.
"""

from __future__ import annotations

import re
import resource
import signal
import socket
import sys
import sysconfig
import threading
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import pyarrow as pa

from expstore.disk.files import Disk, File
from expstore.errors import CorruptionError, ExpStoreError, QueryError, StateError
from expstore.kernels.loader import compiling
from expstore.sql.result import table_stream
from expstore.sql.sandbox.confine import bound, bound_data, die_with_parent, restrict
from expstore.sql.sandbox.pipes import PipeError, receive, send
from expstore.sql.sync import Catalog
from expstore.storages.follower import FollowerStorage, Origin
from expstore.storages.format.manifest import Manifest
from expstore.storages.format.paths import LOG

#: Largest body of a request, in bytes: statement and parameters are in the JSON part, so there is no body.
_NO_BODY = 0
#: If the parent does not kill the child at the deadline, the kernel does so this much later.
_GRACE_SECONDS = 1.0
#: Limit of open files: shards are closed after they were mapped, a few files remain open, DuckDB opens none.
_FILES = 256
#: Readable system folders: processes and the machine's resources. DuckDB aborts if it cannot read these.
_SYSTEM = (Path("/proc"), Path("/sys/fs/cgroup"), Path("/sys/devices/system/cpu"))
#: How many rows, and bytes of them, are fetched from DuckDB at a time; the smaller limit counts.
_STEP_ROWS, _STEP_BYTES = 2048, 4 << 20
#: Errors that no statement can cause: an unreadable file or module, or a bug in this code.
_FAULTS = (OSError, ImportError, AttributeError, NameError, AssertionError)
#: Estimated memory of the index in DuckDB: twice the size of its log, and these bytes per fragment and fixed.
_PER_FRAGMENT, _INDEX_BYTES = 128, 32 << 20


class _Absent(MetaPathFinder):
    """Hide pandas from imports: DuckDB and pyarrow would load it to check whether a value is a DataFrame."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError(name)


def main(told: Mapping[str, Any]) -> None:
    """Serve statements until the parent closes the pipe.

    Args:
        told: The store's `path`, the `memory` of a query in bytes, the process id of the `parent`, and the
            `code` folders: where the modules are that the parent can import.
    """
    die_with_parent(told["parent"])
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.meta_path.insert(0, _Absent())
    path, own = Path(told["path"]), Path(__file__).parent.parent.parent
    _load()
    _load_loops(path)
    # Threads that libraries have already started would not be restricted.
    alone = len(Disk().names(Path("/proc/self/task"))) <= 1
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "platlib", "purelib")]
    code = [*libraries, *map(Path, told["code"]), own, own / "migrations"]
    places = [path, *_SYSTEM, *code]
    confined = restrict(places) if alone else "no landlock: a library has started threads"
    # Not in the main thread: there the index would run each query in a second thread, to allow Ctrl-C.
    thread = threading.Thread(target=_serve, args=(path, told["memory"], confined))
    thread.start()
    thread.join()


def _serve(path: Path, memory: int, confined: str) -> None:
    with socket.socket(fileno=0) as pipe:
        try:
            child = _Child(path, memory)
        except Exception as exc:
            send(pipe, _pack_error(_as_ours(exc)))
            return
        send(pipe, {"ready": confined})
        child.serve(pipe)


class _Child:
    """Follow a store and answer statements about it, in one thread.

    Args:
        path: The store's folder.
        memory: Bytes that a query may take in addition to what the process had before it.
    """

    def __init__(self, path: Path, memory: int) -> None:
        self._memory = memory
        self._sizes = _Sizes()
        self._storage = FollowerStorage(path, origin=Origin(path, forked=True))
        self._storage.follow()
        self._room = 2 * self._index_bytes()
        limit = (memory * 3 // 4 + self._room) >> 20
        self._catalog = Catalog(
            self._storage,
            config={"threads": "1", "memory_limit": f"{limit}MiB", "lock_configuration": "true"},
        )
        self._warm()
        bound(files=_FILES)
        self._began = self._sizes.data()

    def _warm(self) -> None:
        """Start the threads that queries need; `bound` forbids starting threads later."""
        pa.set_cpu_count(1)
        pa.set_io_thread_count(1)
        self._catalog.query("SELECT 1", None)

    def _index_bytes(self) -> int:
        """Estimate the memory of the index, in bytes."""
        storage = self._storage
        log = storage.path / LOG
        entries = storage.disk.size(log) if storage.disk.exists(log) else 0
        return _INDEX_BYTES + 2 * entries + _PER_FRAGMENT * len(storage.episodes.fragments)

    def serve(self, pipe: socket.socket) -> None:
        """Answer statements until the other side closes the pipe."""
        while True:
            try:
                asked, _ = receive(pipe, most=_NO_BODY)
            except PipeError:
                return
            signal.setitimer(signal.ITIMER_REAL, asked["seconds"] + _GRACE_SECONDS)
            pipe.settimeout(None)
            try:
                words, body = self._answer(asked)
            except Exception as exc:
                words, body = _pack_error(_as_ours(exc)), b""
            words["retire"] = words.get("kind", "query") != "query" or self._is_outgrown()
            signal.setitimer(signal.ITIMER_REAL, 0)
            send(pipe, words, body)

    def _answer(self, asked: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        # Memory for the store's own growth must not count against the query.
        self._catalog.catch_up()
        bound_data(self._sizes.data() + self._memory)
        try:
            take = _Take(asked["rows"], asked["bytes"])
            table = self._catalog.query(asked["sql"], asked["params"], take).arrow()
            return {"rows": len(table), "truncated": take.truncated}, table_stream(table)
        finally:
            bound_data(None)

    def _is_outgrown(self) -> bool:
        """Return whether to restart the process, because it retains much memory or its index has grown."""
        return self._sizes.data() > self._began + self._memory // 2 or self._index_bytes() > self._room


class _Take:
    """Fetch the first rows of a relation, up to a limit, without computing many more rows.

    Args:
        rows: Maximum number of rows.
        size: Maximum number of bytes.
    """

    def __init__(self, rows: int, size: int) -> None:
        self._rows = rows
        self._size = size
        self.truncated = False

    def __call__(self, relation: Any) -> pa.Table:
        """Return the first rows as one table.

        Raises:
            QueryError: The first row alone is larger than the limit (kind "too_large").
        """
        self.truncated = False
        reader = relation.to_arrow_reader(min(_step(map(str, relation.dtypes)), self._rows + 1))
        schema: pa.Schema = reader.schema
        batches: list[pa.RecordBatch] = []
        rows, room = self._rows, self._size
        try:
            for batch in reader:
                part = _cut_to_fit(batch.slice(0, rows), room)
                rows, room = rows - len(part), room - part.nbytes
                batches.append(part)
                if len(part) < len(batch):
                    self.truncated = True
                    break
        finally:
            reader.close()
        if self.truncated and rows == self._rows:
            raise QueryError(
                f"a row of the result takes more than the {self._size} bytes allowed for an answer",
                kind="too_large",
                hint="ask for fewer or smaller columns",
            )
        return pa.Table.from_batches(batches, schema)


def _step(types: Any) -> int:
    """Return how many rows to fetch from DuckDB at a time, given the types of the columns."""
    width = 0
    for text in types:
        count = 8
        for size in re.findall(r"\[(\d+)\]", text):
            count *= int(size)
        width += count
    return max(1, min(_STEP_ROWS, _STEP_BYTES // max(1, width)))


def _cut_to_fit(batch: pa.RecordBatch, room: int) -> pa.RecordBatch:
    """Return the longest run of first rows that takes no more than `room` bytes."""
    low, high = 0, len(batch)
    if batch.nbytes <= room:
        return batch
    while low < high:
        middle = (low + high + 1) // 2
        if batch.slice(0, middle).nbytes <= room:
            low = middle
        else:
            high = middle - 1
    return batch.slice(0, low)


class _Sizes:
    """Measure this process's private memory."""

    def __init__(self) -> None:
        path = Path("/proc/self/statm")
        disk = Disk()
        self._file: File | None = disk.open(path, write=False) if disk.exists(path) else None

    def data(self) -> int:
        """Return the private memory in bytes, as RLIMIT_DATA counts it; 0 if the system does not tell."""
        return 0 if self._file is None else int(self._file.read(0, 256).split()[5]) * resource.getpagesize()


#: Longest error message, in characters: messages of DuckDB may repeat the statement.
_MESSAGE = 2000


def _pack_error(error: ExpStoreError) -> dict[str, Any]:
    """Serialize an error so that the parent can raise it again."""
    return {
        "error": type(error).__name__,
        "message": error.message[:_MESSAGE],
        "kind": error.kind,
        "hint": error.hint,
    }


def _as_ours(error: Exception) -> ExpStoreError:
    """Convert a failure to the expstore error that is sent to the parent."""
    if isinstance(error, MemoryError):
        return QueryError("the query needs more memory than is allowed", kind="memory")
    if isinstance(error, CorruptionError) and error.kind == "index":
        # The index is in this process's memory, so only the statement can have damaged it.
        return QueryError(f"DuckDB failed while running the query: {error.message}", kind="died")
    if isinstance(error, ExpStoreError):
        return error
    # Arrow raises OSError without an errno for DuckDB's errors while its result is read.
    if isinstance(error, _FAULTS) and not (isinstance(error, OSError) and error.errno is None):
        return StateError(f"the process for SQL failed: {type(error).__name__}: {error}", kind="sandbox")
    return QueryError(
        f"{type(error).__name__}: {error}"
    )  # DuckDB's client and Arrow have their own error classes


def _load() -> None:
    """Import the modules that are otherwise imported on first use."""
    import pyarrow.dataset

    import expstore.sql.arrow_dataset
    import expstore.sql.expressions
    import expstore.sql.index

    _ = (pyarrow.dataset, expstore.sql.expressions, expstore.sql.arrow_dataset, expstore.sql.index)


def _load_loops(path: Path) -> None:
    """Import the loops that queries of groups need, if the store has groups.

    Once the process is restricted, numba cannot use its cache, and compiles them for seconds: longer than a
    query may take.
    """
    try:
        has_groups = Manifest.load(Disk(), path).group_key is not None
    except ExpStoreError:
        return  # `_serve` reports it
    if has_groups:
        with compiling:
            import expstore.kernels.step_runs  # noqa: F401
