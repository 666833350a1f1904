"""The stores of a server: found by name below one folder, opened once, closed with the server.

Used by the routes, through `get`. Names never lead out of the folder. Only the library accesses files.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio
import anyio.to_thread
import numpy as np
from anyio import CapacityLimiter

import expstore
from expstore.api.consumers import ServedConsumers
from expstore.api.deletion import remove_folder, remove_leftovers, rename_for_deletion
from expstore.api.done_keys import DoneKeys
from expstore.api.errors import Refusal
from expstore.api.page.findings import Findings
from expstore.api.page.histograms import times_of
from expstore.api.page.summary import Summarizer
from expstore.api.recent_answers import RecentAnswers
from expstore.api.samplers import make_limited
from expstore.api.sessions import SessionActivity
from expstore.api.settings import Settings
from expstore.api.sql_workers import SqlWorkers
from expstore.buffers.local_member import LocalMember
from expstore.buffers.tensordict import TensorDictReplayBuffer
from expstore.core.per_key import PerKey
from expstore.disk.files import Disk, ReadingDisk
from expstore.errors import ExpStoreError, NotFoundError, NotReadyError, StateError
from expstore.rate_limiters import RateLimiter
from expstore.sql.sandbox.pool import Answer, SqlLimits, SqlWorker
from expstore.storages.engine.store import Store
from expstore.storages.format.manifest import MANIFEST
from expstore.wire.codec import Codec, Encoder

_log = logging.getLogger("expstore.api")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SUFFIX = ".exp"
#: Device names of Windows, to which a folder of stores may be copied.
_RESERVED = {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}
_Answer = TypeVar("_Answer")
#: Number of streams of events of a server.
_LISTENERS = 32
#: Seconds between two attempts of a request that waits for rows.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.1


class Pulse(NamedTuple):
    """Numbers that change when a store grows.

    Args:
        rows: Number of readable rows.
        written: Number of rows ever written.
        episodes: Number of episodes ever begun.
        generation: Number of times the store was opened for writing.
    """

    rows: int
    written: int
    episodes: int
    generation: int


class Served:
    """One open store, and the number of its requests.

    Threads: routes call `run` to work in worker threads.

    Args:
        name: Name of the store.
        path: Path of the store.
        rb: The buffer.
        settings: The server's settings.
        limiter: The rate limiter; None: there is no limit.
        sql_workers: The processes that answer SQL.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        rb: TensorDictReplayBuffer,
        settings: Settings,
        limiter: RateLimiter | None,
        sql_workers: SqlWorkers,
    ) -> None:
        self.name, self.path, self.rb = name, path, rb
        self.heard = SessionActivity(settings.clock, rb.episodes.remote_sessions())
        self._sql_workers = sql_workers
        make = partial(make_limited, seconds=settings.sql_seconds)
        self.member = LocalMember(rb, limiter=limiter, make=make)
        #: The open consumers; the buffer closes them.
        self.consumers = ServedConsumers(rb, make)
        self.summarizer = Summarizer(name, path, rb, lambda: self.member.rows_drawn)
        #: Numbers of rows whose priorities were set, or that were annotated, by the keys of the requests.
        self.updates: DoneKeys[int] = DoneKeys()
        #: Answers to requests that have changed groups or selections, by their keys.
        self.group_acts: DoneKeys[Any] = DoneKeys()
        #: Answers of the route for series.
        self.charts = RecentAnswers()
        #: Changes and odd episodes.
        self.findings = Findings(rb)
        self.encoder = Encoder(lambda: rb.schema)
        self.streams = CapacityLimiter(settings.concurrency)
        #: Whether the server is shutting down: endless streams must stop.
        self.ending = False
        #: Sessions with calls that are being made (`expstore.api.capture`): they are not silent.
        self.running: Collection[str] = ()
        self._settings = settings
        self._workers = CapacityLimiter(settings.concurrency)
        self._requests = 0
        self._retired = False
        self._codec: Codec | None = None

    async def run(self, act: Callable[[], _Answer]) -> _Answer:
        """Run a slow function in a thread; raise Refusal if too many requests are waiting already.

        Raises:
            Refusal: 503.
        """
        if self._retired:
            raise Refusal(503, f"store {self.name!r} is being deleted", hint="ask again later")
        if self._workers.statistics().tasks_waiting >= self._settings.concurrency:
            raise Refusal(
                503, f"too many requests are waiting for store {self.name!r}", hint="ask again later"
            )
        with self._count_request():
            return await anyio.to_thread.run_sync(act, limiter=self._workers)

    @contextlib.contextmanager
    def _count_request(self) -> Iterator[None]:
        self._requests += 1
        try:
            yield
        finally:
            self._requests -= 1

    async def run_patiently(self, act: Callable[[], _Answer], seconds: float) -> _Answer:
        """Run a function that may find too few rows; repeat it until there are enough or the time is over.

        It also stops when the server shuts down.

        Raises:
            NotReadyError: There still are too few rows.
            Refusal: 503.
        """
        until, pause = anyio.current_time() + seconds, _FIRST_PAUSE
        with self._count_request():
            while True:
                try:
                    return await self.run(act)
                except NotReadyError:
                    left = until - anyio.current_time()
                    if left <= 0 or self.ending:
                        raise
                    await anyio.sleep(min(pause, left))
                    pause = min(2 * pause, _LONGEST_PAUSE)

    def retire(self) -> None:
        """Accept no more requests, because the store will be deleted.

        Call it in the event loop, where requests begin. Then no request can begin between the check and the
        end of this method.

        Raises:
            StateError: Requests or streams use the store (kind `in_use`).
        """
        if self._retired:
            raise _build_in_use_error(self.name, "another request deletes it")
        if self.streams.borrowed_tokens:
            raise _build_in_use_error(self.name, f"{self.streams.borrowed_tokens} streams read from it")
        if self._requests:
            raise _build_in_use_error(self.name, f"{self._requests} requests use it")
        self._retired = True

    def check_sessions(self) -> None:
        """If a client's session is open, accept requests again and raise StateError (kind `in_use`)."""
        sessions = self.rb.episodes.remote_sessions()
        if sessions:
            self._retired = False
            raise _build_in_use_error(self.name, f"{len(sessions)} sessions write to it")

    @property
    def is_over(self) -> bool:
        """Whether endless streams must stop: the server shuts down, or the store is deleted."""
        return self.ending or self._retired

    async def feel_pulse(self) -> Pulse:
        """Return the numbers that change when the store grows.

        In the writer this takes no thread and does not count as a request, so that streams of events do not
        keep a store from being deleted.

        Raises:
            Refusal: 503.
        """
        return await self.run(self._take_pulse) if self.rb.storage.follows else self._take_pulse()

    def _take_pulse(self) -> Pulse:
        storage = self.rb.storage
        storage.follow()
        episodes = storage.episodes.next_episode - 1
        return Pulse(len(storage), storage.write_count, episodes, self.generation)

    def query(self, sql: str, params: Any, *, rows: int, size: int) -> Answer:
        """Run one untrusted SELECT in a separate process; the arguments are those of `SqlWorker.query`."""
        with self._sql_workers.use(self, self._start_sql) as worker:
            return worker.query(sql, params, rows=rows, size=size)

    def _start_sql(self) -> SqlWorker:
        settings = self._settings
        limits = SqlLimits(seconds=settings.sql_seconds, rows=settings.sql_rows)
        storage = self.rb.storage
        # The process reads the files: they must have the priorities that were set before the query, too.
        drain = storage.write_values if isinstance(storage, Store) else storage.drain
        return SqlWorker(self.path, limits=limits, drain=drain)

    def end_silent(self) -> None:
        """End the remote sessions that have been silent for `session_timeout` seconds."""
        episodes = self.rb.episodes
        for session in tuple(self.running):
            self.heard.note(session)
        silent = self.heard.silent(episodes.remote_sessions(), self._settings.session_timeout)
        if silent:
            _log.info("store %s: %d silent sessions were ended", self.name, len(silent))
            episodes.end_session(silent)

    def close(self) -> None:
        """Close the store, its named samplers and its SQL worker; a failure is logged.

        If one of them fails, the others are closed nevertheless.
        """
        try:
            with contextlib.ExitStack() as parts:
                parts.callback(self.rb.close)
                parts.callback(self.member.close)
                parts.callback(self._sql_workers.end, self)
        except Exception as exc:
            is_ours = isinstance(exc, ExpStoreError)
            _log.error("store %s was not closed properly: %s", self.name, exc, exc_info=not is_ours)

    def last_write(self) -> float | None:
        """Return when the newest readable row was written, in seconds since 1970; None: there is no row."""
        storage = self.rb.storage
        storage.follow()
        window = storage.window
        times = times_of(storage, window.nth(np.arange(window.rows)[-1:]))
        return float(times[-1]) if times.size else None

    @property
    def uuid(self) -> str:
        """The uuid of the store, which it keeps for ever."""
        uuid: str = self.rb.storage.description.uuid
        return uuid

    @property
    def generation(self) -> int:
        """Number of times the store was opened for writing: within one generation an id is never reused."""
        manifest = self.rb.storage.manifest
        assert manifest is not None, "a served store has a folder"
        return manifest.generation

    @property
    def codec(self) -> Codec:
        """The codec for the store's rows.

        Raises:
            StateError: The store has no fields yet, because nothing was written.
        """
        schema = self.rb.schema
        if schema is None:
            raise StateError(f"store {self.name!r} has no fields yet", hint="extend it first")
        known = self._codec
        if known is None or known.schema is not schema:
            known = self._codec = Codec(schema)
        return known

    def codec_of(self, names: Collection[str]) -> Codec:
        """Return the codec for rows with columns of these names: fields added later may be missing.

        Raises:
            StateError: The store has no fields yet, because nothing was written.
        """
        return self.codec.with_fields(names)


class Stores:
    """Open stores at their first request.

    Opening, creating and deleting a store delays only requests for the same name.

    Threads: any number may use it; coroutines belong to one event loop.

    Args:
        settings: The server's settings.

    Raises:
        StateError: Two folders have the same name but for `.exp`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        #: Held while the store of a name is opened, created, deleted or closed.
        self._locks = PerKey(threading.Lock)
        #: Let one request for a name use a thread; otherwise those that wait would use up the threads.
        self._queues = PerKey(lambda: CapacityLimiter(1))
        self._open: dict[str, Served] = {}
        self._sql_workers = SqlWorkers(settings.clock)
        self._ending = False
        #: URL of the server, which other processes that want to write are told; "" if it is unknown.
        self.address = ""
        #: The streams of events of all stores.
        self.listeners = CapacityLimiter(_LISTENERS)
        self._disk = ReadingDisk()
        self.single = self._is_store(settings.path) or settings.path.suffix == _SUFFIX
        if not self.single and self._disk.is_dir(settings.path):
            for name in self.names():
                self._find(name)

    @property
    def root(self) -> Path:
        """The folder that contains the stores."""
        path = self._settings.path
        return path.parent if self.single else path

    def names(self) -> list[str]:
        """Return the names of all existing stores."""
        if self.single:
            return [_name_of(self._settings.path)]
        found = [self.root / name for name in self._disk.names(self.root)]
        return sorted(
            {_name_of(path) for path in found if _NAME.fullmatch(_name_of(path)) and self._is_store(path)}
        )

    @property
    def is_ending(self) -> bool:
        """Whether the server is shutting down, so that no store can be opened."""
        return self._ending

    def get(self, name: str) -> Served:
        """Return a store; open it if necessary, which may take minutes after a power failure.

        Raises:
            NotFoundError: There is no store of this name.
            LockedError: Another process writes to the store.
        """
        with self._lock_name(name):
            served = self._open.get(name)
            return self._open_store(name, self._path(name)) if served is None else served

    async def reach(self, name: str) -> Served:
        """Return a store; open it in a thread if necessary.

        Raises:
            NotFoundError: There is no store of this name.
            LockedError: Another process writes to the store.
        """
        served = self._open.get(name)
        if served is not None:
            return served
        await anyio.to_thread.run_sync(self._path, name)  # only names of stores get threads of their own
        return await self.run_queued(name, lambda: self.get(name))

    async def check_readiness(self) -> None:
        """Open the store of a server with one store; otherwise look for the folder.

        Raises:
            ExpStoreError: Stores cannot be read, or the server is shutting down.
        """
        if self.single:
            await self.reach(_name_of(self._settings.path))
        elif not await anyio.to_thread.run_sync(self._disk.is_dir, self.root):
            raise NotFoundError(f"there is no folder {self.root}")
        if self._ending:
            raise Refusal(503, "the server is being shut down")

    async def run_queued(self, name: str, act: Callable[[], _Answer]) -> _Answer:
        """Run a function that opens, creates or deletes a store in a thread, after others for this name."""
        with self._queues.use(name) as queue:
            return await anyio.to_thread.run_sync(act, limiter=queue)

    @contextlib.contextmanager
    def _lock_name(self, name: str) -> Iterator[None]:
        """Wait until no other thread opens, creates, deletes or closes this store, and keep them out."""
        with self._locks.use(name) as lock, lock:
            yield

    def create(self, name: str, options: dict[str, Any]) -> Served:
        """Create a store, and open it.

        Raises:
            StateError: A store of this name exists, or the server serves a single store.
            Refusal: 400: the name is invalid.
        """
        if self.single:
            raise StateError("this server has one store", hint="serve a folder to make more")
        reserved = name.partition(".")[0].lower() in _RESERVED or name.endswith((".", _SUFFIX))
        if not _NAME.fullmatch(name) or ".." in name or reserved:
            raise Refusal(400, f"{name[:120]!r} is not a name for a store", kind="name",
                          hint="use at most 100 letters, digits, '.', '_' and '-'")  # fmt: skip
        with self._lock_name(name):
            if name in self._open or self._find(name) is not None:
                raise StateError(f"there is already a store {name!r}", kind="exists", hint="use another name")
            path = self.root / f"{name}{_SUFFIX}"
            if self._disk.is_link(path):  # a link could lead anywhere
                raise StateError(
                    f"{path.name!r} is a link, not a store", kind="exists", hint="use another name"
                )
            return self._open_store(name, path, mode="x", **options)

    async def delete(self, name: str) -> None:
        """Close a store and remove its folder.

        If the server crashes before the answer, the store remains or the next start removes it; never a part
        of it.

        Raises:
            NotFoundError: There is no store of this name.
            StateError: The server has one store, or requests, streams or sessions use it (kind `in_use`).
            LockedError: Another process writes to it.
        """
        if self.single:
            raise StateError(
                "this server serves one store, which it does not delete",
                hint="serve the folder that holds the store, or stop the server and remove its folder",
            )
        served = self._open.get(name)
        if served is not None:
            served.retire()
        await self.run_queued(name, lambda: self._delete(name, served))

    def _delete(self, name: str, served: Served | None) -> None:
        disk = Disk()
        with self._lock_name(name):
            if self._open.get(name) is not served:
                raise _build_in_use_error(name, "another request opened or deleted it")
            if served is not None:
                served.check_sessions()
                served.close()  # the store is deleted even if this fails
                del self._open[name]
            deleted = rename_for_deletion(disk, self._path(name))
        remove_folder(disk, deleted)

    def remove_leftovers(self) -> None:
        """Remove files of stores whose deletion a crash interrupted; a failure is logged."""
        if self.single:
            return
        try:
            remove_leftovers(Disk(), self.root)
        except ExpStoreError as exc:
            _log.error("files of deleted stores could not be removed: %s", exc)

    def open_now(self) -> list[Served]:
        """Return the open stores."""
        return list(self._open.values())

    def end_idle(self) -> None:
        """End silent sessions of all open stores, and idle processes for SQL; a failure is logged."""
        self._sql_workers.end_idle()
        for served in [] if self._settings.read_only else self.open_now():
            try:
                served.end_silent()
            except Exception as exc:
                is_ours = isinstance(exc, ExpStoreError)
                text = "store %s: sessions could not be ended: %s"
                _log.error(text, served.name, exc, exc_info=not is_ours)

    def end(self) -> None:
        """Open no more stores, and stop endless streams."""
        self._ending = True
        for served in self.open_now():
            served.ending = True

    def close(self) -> None:
        """Flush and close all stores; a failure is logged and does not affect the other stores."""
        self.end()
        for name in {*self._open, *map(str, self._locks.keys())}:  # those that are being opened, too
            with self._lock_name(name):
                if (served := self._open.get(name)) is not None:
                    served.close()

    def _open_store(self, name: str, path: Path, **options: Any) -> Served:
        if self._ending:
            raise Refusal(503, "the server is being shut down")
        options.setdefault("mode", "r" if self._settings.read_only else "a")
        limiter = self._settings.limiter()
        if self._settings.ship is not None:
            options["ship"] = f"{self._settings.ship.rstrip('/')}/{name}"
        rb = expstore.open(path, batches=expstore.Batches(rate_limiter=limiter), **options)
        if self.address and isinstance(rb.storage, Store):
            rb.storage.lock_file.announce(f"{self.address}/{name}")
        served = self._open[name] = Served(name, path, rb, self._settings, limiter, self._sql_workers)
        served.ending = self._ending
        return served

    def _path(self, name: str) -> Path:
        if self.single:
            if name != _name_of(self._settings.path):
                raise _unknown(name)
            return self._settings.path
        path = self._find(name) if _NAME.fullmatch(name) and ".." not in name else None
        if path is None:
            raise _unknown(name)
        return path

    def _find(self, name: str) -> Path | None:
        """Return the folder of a store; None if it does not exist.

        Raises:
            StateError: Two folders have this name.
        """
        paths = (self.root / f"{name}{_SUFFIX}", self.root / name)
        found = [path for path in paths if _name_of(path) == name and self._is_store(path)]
        if len(found) > 1:
            raise StateError(
                f"two stores have the name {name!r}: the folders {found[0].name!r} and {found[1].name!r}",
                kind="exists",
                hint="rename one of the folders",
            )
        return found[0] if found else None

    def _is_store(self, path: Path) -> bool:
        """Return whether a path is a store and not a link, which could lead anywhere."""
        return not self._disk.is_link(path) and self._disk.exists(path / MANIFEST)


def _name_of(path: Path) -> str:
    return path.name.removesuffix(_SUFFIX)


def _build_in_use_error(name: str, why: str) -> StateError:
    return StateError(
        f"store {name!r} is in use: {why}", kind="in_use",
        hint="end the streams, close the connections that write, then delete it again",
    )  # fmt: skip


def _unknown(name: str) -> NotFoundError:
    hint = "a store's name does not include .exp" if name.endswith(_SUFFIX) else "GET /v1/stores lists them"
    return NotFoundError(f"there is no store {name[:120]!r}", hint=hint)
