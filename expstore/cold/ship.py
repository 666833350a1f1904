"""Ship a running store to an object storage, and restore it on an empty disk.

Used by `expstore.open(path, ship=...)` and by the command line. `expstore.storages.engine.increment` says
what has changed in a store, `expstore.storages.snapshots.rebuild` builds a store from it, and
`expstore.cold.ship_log` has the protocol. This module has the thread that ships, and what an opening decides.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import threading
import time
import weakref
from collections import deque
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from expstore.cold.object_storage import ObjectStorage
from expstore.cold.parts import fetch_part, make_pool
from expstore.cold.ship_log import Claim, ShipLog, ShippedState, state_part_key
from expstore.cold.ship_settings import Origins, Ship
from expstore.core.tables import size_text
from expstore.disk.atomic_build import build_atomically
from expstore.disk.files import Disk
from expstore.errors import CorruptionError, LockedError, RemoteError, StateError
from expstore.storages.engine.increment import Increment, capture
from expstore.storages.format.paths import LOCK
from expstore.storages.snapshots.rebuild import build, parts_of

if TYPE_CHECKING:
    from expstore.storages.engine.store import Store

_log = logging.getLogger("expstore")
#: The longest pause after a failed round, seconds.
_PAUSE_SECONDS = 30.0
#: How long `close` waits for the last round, and then for the request that is under way, seconds.
_CLOSE_SECONDS, _REQUEST_SECONDS = 30.0, 10.0
#: How long a push of a version waits for the upload of what is not shipped yet, seconds.
_PIN_SECONDS = 86_400.0
#: The shortest time between two deletions of parts, and between two lines about a restore, seconds.
_SWEEP_SECONDS, _LINE_SECONDS = 60.0, 5.0
#: Parts that are uploaded at the same time.
_UPLOADS = 4


class Pinned(NamedTuple):
    """A shipped state that stays until the push that pinned it is over.

    Args:
        state: The state.
        episodes: How many episodes have rows in it.
        parts: How many parts were sent since the push has begun.
        bytes: How many bytes these have.
    """

    state: ShippedState
    episodes: int
    parts: int
    bytes: int


class _Stopped(Exception):
    """The store is closed, and the time for its last upload is over."""


class _Pace:
    """Let amounts pass at a limited rate.

    Args:
        rate: Most of them a second; None: no limit.
        stop: Ends a wait.
    """

    def __init__(self, rate: float | None, stop: threading.Event) -> None:
        self._rate, self._stop = rate, stop
        self._lock = threading.Lock()
        self._free_at = 0.0
        #: The sum of all amounts.
        self.total = 0

    def wait(self, amount: int = 1) -> None:
        """Wait until an amount may pass."""
        with self._lock:
            self.total += amount
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + (0.0 if self._rate is None else amount / self._rate)
        if self._stop.is_set() or (start > now and self._stop.wait(start - now)):
            raise _Stopped


class Shipper:
    """Ship one store.

    Threads: one thread of its own captures and uploads; it holds the store only while it does. Any thread may
    call `wait`, `stats` and `close`. Processes: a forked child does not ship. Crashes: what was confirmed is
    restored; parts of an interrupted upload are deleted by a later writer. Failures never reach the program:
    they are counted, logged once for each message, and repeated with growing pauses. While the server is away
    nothing is captured, so nothing piles up.

    Args:
        ship: The settings.

    Raises:
        MissingExtraError: obstore is not installed.
        RemoteError: The environment has no credentials.
    """

    def __init__(self, ship: Ship) -> None:
        self._ship, self._bucket = ship, ship.connect()
        self._abort = threading.Event()
        self._requests = _Pace(ship.requests and ship.requests / 60, self._abort)
        self._bytes = _Pace(ship.bandwidth, self._abort)  # type: ignore[arg-type]
        self._bucket.pace = self._requests.wait
        self._log = ShipLog(self._bucket)
        #: Pushes that wait for a state, and the states that they have got.
        self._pushes: set[str] = set()
        self._pinned: dict[str, Pinned] = {}
        self._parts = 0
        self._pages: dict[str, bytes] = {}
        self._storage: weakref.ref[Store] | None = None
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._changed = threading.Condition()
        # Written under the condition. Numbers of `wait`: how many were asked for, tried and done.
        self._asked = self._tried = self._done = 0
        self._is_closing = self._is_over = False
        self._fence: LockedError | None = None
        self._rows, self._last_id, self._at = 0, 0, time.monotonic()
        self._failures, self._failed_in_row, self._problem = 0, 0, ""
        self._swept_at = -math.inf

    # -- opening ---------------------------------------------------------------------------------

    def restore_missing(self, path: Path) -> None:
        """Build the newest shipped state if a folder has no store; a store is left alone.

        Args:
            path: The folder, empty or missing.

        Raises:
            LockedError: Another writer claims the address at the same time.
            RemoteError: The server does not answer, or refuses a request. There is no store.
            CorruptionError: A part is missing or damaged. There is no store.
            StorageError: The disk failed or is full. There is no store.
        """
        disk = Disk()
        if disk.is_dir(path) and set(disk.names(path)) - {LOCK}:
            return
        former, newest = self._log.find()
        if newest is None or newest.state is None:
            return
        disk.make_dir(path.parent)
        with build_atomically(disk, path, single=True, doing="restores") as temporary:
            claim = Claim.make()
            newest = self._log.claim(former, claim)
            state = newest.state
            if state is None:
                return
            begun, line = time.monotonic(), _ProgressLine(self._bucket.name, path)
            try:
                build(
                    temporary / path.name, state, partial(fetch_part, self._bucket), disk=disk, progress=line
                )
            except CorruptionError:
                self._log.check()  # the next writer may have deleted parts meanwhile
                raise
            Origins(self._bucket.name, (newest.origin, claim.nonce)).save(disk, temporary / path.name)
            if disk.is_dir(path):
                disk.remove_tree(path)
        _log.info(
            "%s has the %d rows that were shipped to %s; it took %.1f s",
            path, state["rows"], self._bucket.name, time.monotonic() - begun,
        )  # fmt: skip

    def start(self, storage: Store) -> None:
        """Claim the address for an open store, and begin to ship it.

        Raises:
            StateError: The address has another store, another folder has shipped to it, or the folder is
                older than what it has shipped; the server ignores conditional writes; or the store was closed
                meanwhile.
            LockedError: Another writer claims the address at the same time.
            RemoteError: The server does not answer, or refuses a request.
        """
        if not self._log.epoch:
            self._claim(storage)
        newest = self._log.newest
        if newest is not None and newest.state is not None:
            self._check_fits(storage, newest)
            self._rows, self._last_id = newest.state["rows"], newest.state["last"]
        self._storage = weakref.ref(storage)
        with storage.lock:
            storage.writer()  # it may have been closed meanwhile
            storage.holders.shipping = self
        self._thread = threading.Thread(target=self._run, name="expstore-ship", daemon=True)
        self._thread.start()

    def _claim(self, storage: Store) -> None:
        disk, path, claim = storage.disk, storage.path, Claim.make()
        origins = Origins.load(disk, path).nonces
        former, newest = self._log.find()
        if newest is not None and newest.state is not None:
            self._check_fits(storage, newest)
            origins = origins[origins.index(newest.origin) :]
        # Before the claim: what is shipped under it must be known as this folder's.
        Origins(self._bucket.name, (*origins, claim.nonce)).save(disk, path)
        self._log.claim(former, claim)

    def _check_fits(self, storage: Store, newest: ShippedState) -> None:
        """Raise StateError unless a store has all that a shipped state has."""
        name, path, state = self._bucket.name, storage.path, newest.state or {}
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(newest.time))
        if newest.uuid != storage.manifest.uuid:
            raise StateError(
                f"{name} has another store ({newest.uuid}, shipped {when}) than {path} "
                f"({storage.manifest.uuid})",
                kind="mismatch",
                hint="ship to another address; open an empty folder to restore the other store",
            )
        restore = (
            "open an empty folder with the same ship= to restore what was shipped, and combine both with "
            "`expstore merge` if rows of this folder are missing there"
        )
        if newest.origin not in Origins.load(storage.disk, path).nonces:
            raise StateError(
                f"{name} has rows that {path} lacks: another folder has continued the store (shipped {when})",
                kind="diverged", hint=restore,
            )  # fmt: skip
        if tuple(storage.state.content) < tuple(state["content"]):
            raise StateError(
                f"{path} is older than what it has shipped to {name}: it ends at row {storage.last}, and row "
                f"{state['last']} was shipped {when}",
                kind="diverged", hint=restore,
            )  # fmt: skip

    # -- shipping --------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = self._ship.every
        while not self._is_over:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._asked > self._tried, pause)
                is_last, asked = self._is_closing, self._asked
            begun = time.monotonic()
            is_shipped = self._work(begun)
            with self._changed:
                self._tried = asked
                if is_shipped:
                    self._done = asked
                self._is_over = self._is_over or is_last
                self._changed.notify_all()
            if is_shipped:
                pause = max(0.0, begun + self._ship.every - time.monotonic())
            else:
                longest = min(_PAUSE_SECONDS, self._ship.every * 2 ** min(self._failed_in_row, 10))
                pause = longest * random.uniform(0.5, 1.0)

    def _work(self, begun: float) -> bool:
        """Ship what has changed; return whether all earlier writes are shipped now."""
        storage = None if self._storage is None else self._storage()
        if storage is None or storage.closed:  # it is being garbage-collected, or was closed meanwhile
            self._is_over = True
            return False
        try:
            if self._failed_in_row:
                self._log.check()  # whether the server answers, before anything is captured
            self._ship_changes(storage)
        except LockedError as exc:
            self._fence = exc
            self._is_over = True
            storage.health.fence = exc
            _log.warning("%s can no longer be written: %s", storage.path, exc)
            return False
        except _Stopped:
            return False
        except Exception as exc:  # the program continues, whatever the error is
            self._note_failure(exc)
            return False
        self._failed_in_row, self._problem, self._at = 0, "", begun
        if begun - self._swept_at > _SWEEP_SECONDS:
            self._swept_at = begun
            try:
                self._sweep()
            except _Stopped:
                pass
            except Exception as exc:  # what was shipped is shipped; the next sweep deletes the rest
                self._note_failure(exc)
        return True

    def _ship_changes(self, storage: Store) -> None:
        newest, captured = self._log.newest, time.time()
        former = None if newest is None else newest.state
        pushes, sent = [*self._pushes], (self._parts, self._bytes.total)
        found = capture(
            storage,
            former,
            name=self._log.name_part,
            part_bytes=int(self._ship.part_bytes),
            renew=bool(pushes),
        )
        if found is None:
            self._log.check()
            return
        with contextlib.closing(found):
            self._upload(found)
            self._log.commit(found.state, storage.manifest.uuid, captured, pushes)
        self._rows, self._last_id = found.state["rows"], found.through
        if pushes and self._log.newest is not None:
            counts = found.count_episodes(), self._parts - sent[0], self._bytes.total - sent[1]
            self._pinned |= dict.fromkeys(pushes, Pinned(self._log.newest, *counts))

    def _upload(self, found: Increment) -> None:
        """Upload the parts, a few at a time; one by one when the program ends, which starts no threads."""
        pool = make_pool("ship")
        sent = deque[Future[None]]()
        try:
            for name, data in found.parts:
                self._bytes.wait(len(data))
                self._parts += 1
                if self._is_closing:
                    self._bucket.write(state_part_key(name), data)
                    continue
                sent.append(pool.submit(self._bucket.write, state_part_key(name), data))
                if len(sent) >= _UPLOADS:
                    sent.popleft().result()
            for one in sent:
                one.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _sweep(self) -> None:
        """Delete what is not needed; keep the pages that this reads for the next time."""
        pages: dict[str, bytes] = {}

        def fetch(name: str) -> bytes:
            page = self._pages.get(name)
            pages[name] = fetch_part(self._bucket, name) if page is None else page
            return pages[name]

        self._log.sweep(lambda state: parts_of(state, fetch))
        self._pages = pages

    def _note_failure(self, exc: Exception) -> None:
        self._log.forget_parts()
        self._failures += 1
        self._failed_in_row += 1
        text = str(exc) or repr(exc)
        if text != self._problem:
            _log.warning("could not ship to %s, and will try again: %s", self._bucket.name, text)
        self._problem = text

    # -- what programs call ----------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return `rb.stats()["shipped"]`."""
        storage = None if self._storage is None else self._storage()
        return {
            "url": self._bucket.name,
            "epoch": self._log.epoch,
            "rows": self._rows,
            "last_id": self._last_id,
            "rows_behind": 0 if storage is None else max(0, storage.last - self._last_id),
            "seconds_behind": round(time.monotonic() - self._at, 3),
            "bytes": self._bytes.total,
            "requests": self._requests.total,
            "failures": self._failures,
            "last_error": str(self._fence) if self._fence is not None else self._problem or None,
        }

    def ships_to(self, where: Any) -> bool:
        """Return whether an address is the one to which the store is shipped."""
        return bool(ObjectStorage.of(self._ship.url).where == ObjectStorage.of(where).where)

    def pin(self, push: str) -> Pinned:
        """Ship the present state for a version; it stays until its push is over: rule 5 of the protocol.

        Raises:
            LockedError: Another writer has claimed the address.
            RemoteError: The server does not answer, or refuses a request.
            StateError: The store is closed.
        """
        self._pushes.add(push)
        try:
            self.wait(_PIN_SECONDS, once=True)
            return self._pinned.pop(push)
        finally:
            self._pushes.discard(push)

    def wait(self, seconds: float, *, once: bool = False) -> None:
        """Ship now, and wait until all that was written before this call is shipped.

        Args:
            seconds: How long.
            once: Whether to raise the error of the first attempt; otherwise it is repeated.

        Raises:
            LockedError: Another writer has claimed the address.
            RemoteError: It was not shipped in time; the message says why.
            StateError: The store is closed.
        """
        with self._changed:
            self._asked += 1
            number = self._asked
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._done >= number or self._is_over or (once and self._tried >= number), seconds
            )
            if self._done >= number:
                return
            is_late = self._tried < number
        if self._fence is not None:
            raise self._fence.with_hint(self._fence.hint)
        if self._is_over:
            raise StateError("the store was closed while it was shipped", hint="call flush before close")
        raise RemoteError(
            f"rows were not shipped to {self._bucket.name}"
            + (f" within {seconds:g} seconds" if is_late or not once else "")
            + (f": {self._problem}" if self._problem else ""),
            kind="not_shipped",
            hint="they are in the store, and will be shipped; call it again, or with a longer timeout",
        )

    def close(self) -> None:
        """Ship once more, for at most 30 seconds, and end the thread; a second call does nothing.

        If it fails, a warning says how many rows are not shipped.
        """
        if self._process != os.getpid():
            return  # a forked child, which does not have the thread
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        self._thread = None
        thread.join(_CLOSE_SECONDS)
        if thread.is_alive():
            self._problem = self._problem or f"it took more than {_CLOSE_SECONDS:g} seconds"
            self._abort.set()
            thread.join(_REQUEST_SECONDS)
        if self._problem and self._fence is None:
            _log.warning(
                "the store was closed before all of it was shipped to %s (%d rows are missing there): %s; "
                "open it again with the same ship= to ship the rest",
                self._bucket.name, self.stats()["rows_behind"], self._problem,
            )  # fmt: skip


class _ProgressLine:
    """Log how much of a restore is done, every few seconds."""

    def __init__(self, source: str, path: Path) -> None:
        self._source, self._path, self._said_at = source, path, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._said_at > _LINE_SECONDS:
            self._said_at = time.monotonic()
            _log.info("%s: %s of %s from %s", self._path, size_text(done), size_text(total), self._source)
