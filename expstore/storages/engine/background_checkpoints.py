"""The background work of stores on disk: writes priorities, and runs a checkpoint about once a second.

Used by stores on disk. One thread per process decides what is due in which store, and never touches a file; a
thread of the pool does it. If the work of one store takes long, another thread works for the other stores.
References to a store are weak, so that a dropped store can be garbage-collected. The work never raises: a
failed sync is recorded in the store's health, and the next write raises an error.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Protocol

from expstore.core import tuning
from expstore.disk.threads import Job, Threads
from expstore.errors import ExpStoreError
from expstore.storages.engine.checkpointer import Checkpointable, Checkpointer
from expstore.storages.read_view import Holders

#: The longest interval between two heartbeats for other processes.
BEAT_SECONDS = 0.25
#: Descriptors are closed if nothing was written for so long after a checkpoint.
REST_SECONDS = 1.0
#: If due work has waited for so long, one more thread is started.
PATIENCE_SECONDS = 0.1
#: The shortest interval between two looks, unless a store asks for one.
LOOK_SECONDS = 0.05


class Settled(Checkpointable, Protocol):
    """The interface of a store that `Keeper` uses."""

    #: What uses the store, and takes requests of other processes.
    holders: Holders

    @property
    def checkpoints(self) -> Checkpointer:
        """Syncs the store."""

    def sync(self) -> None:
        """Sync everything that was committed."""


class Keeper:
    """Run a checkpoint some time after a store was written to.

    Threads: any thread may call `note`, `hurry` and `stop`; one at a time works for a store. It refers to the
    store only while it works, so that a dropped store is garbage-collected between two operations, and never
    inside one, which holds locks that the store's `close` needs. A forked child does no such work.

    Args:
        store: The store; the reference is weak.
    """

    def __init__(self, store: Settled) -> None:
        self._store = weakref.ref(store)
        self._noted = self._hurried = self._stopped = self._rests = False
        self._rest_due = 0.0
        self._checkpoint_due: float | None = None
        #: What a thread does or will do, and when it became due.
        self.job: Job | None = None
        self.since = 0.0
        #: The time of the next work, in seconds of the monotonic clock.
        self.due = 0.0
        #: Whether the work was started.
        self.running = False

    def start(self) -> None:
        """Start the work; the store is open."""
        self.running = True
        now = time.monotonic()
        self.due, self._rest_due = now + BEAT_SECONDS, now + REST_SECONDS
        _scheduler.add(self)

    def note(self) -> None:
        """Record that something was written: a checkpoint follows."""
        if not self._noted:
            self._noted = True
            if self._checkpoint_due is None:
                _scheduler.wake()

    def hurry(self) -> None:
        """Run a checkpoint at once, because half of the spare slots are used."""
        if not self._hurried:
            self._noted = self._hurried = True
            _scheduler.wake()

    def stop(self) -> None:
        """End the work without another checkpoint, and wait for what is running."""
        self._stopped = True
        _scheduler.remove(self)
        # If the store is being garbage-collected inside its own work, that work ends after this.
        if self.job is not None and not self.job.is_own:
            self.job.wait()

    def choose(self, now: float) -> Job | None:
        """Return the work that is due, or None; set when to ask again."""
        act: Callable[[Settled], object] | None = None
        if self._checkpoint_due is None and self._noted:
            self._noted = self._rests = False
            self._checkpoint_due, self.due = now + tuning.CHECKPOINT_SECONDS, now + tuning.PRIORITY_SECONDS
        if self._checkpoint_due is None:
            if now >= self.due:
                act = _send_heartbeat if self._rests or now < self._rest_due else self._rest
                self.due = now + BEAT_SECONDS
        elif self._hurried or now >= self._checkpoint_due:
            act, self.due = _sync, now + BEAT_SECONDS
            # What is noted from now on may be newer than the checkpoint.
            self._noted = self._hurried = self._rests = False
            self._checkpoint_due, self._rest_due = None, now + REST_SECONDS
        elif now >= self.due:
            act, self.due = _write_values, now + tuning.PRIORITY_SECONDS
        if act is None:
            return None
        self.since, self.job = now, Job(partial(self._work, act))
        return self.job

    def _rest(self, store: Settled) -> None:
        store.shared.beat()
        self._rests = store.checkpoints.rest(store)

    def _work(self, act: Callable[[Settled], object]) -> None:
        if self._stopped:
            return
        store = self._store()
        if store is None:
            self._stopped = True
            _scheduler.remove(self)
            return
        # A failure is recorded in the store's health: the next write raises it.
        with contextlib.suppress(ExpStoreError):
            act(store)
            if store.holders.take_requests is not None:
                store.holders.take_requests(store)
        del store  # the store may be garbage-collected here, where no lock is held
        if self._hurried or (self._noted and self._checkpoint_due is None):
            self.due = 0.0  # the scheduler does not look at a store while something is done for it
            _scheduler.wake()


def _send_heartbeat(store: Settled) -> None:
    store.shared.beat()


def _write_values(store: Settled) -> None:
    store.shared.beat()
    store.write_values()


def _sync(store: Settled) -> None:
    store.sync()


class _Scheduler:
    """A thread that starts the work of all stores of this process; it lives as long as there are stores.

    `remove` and `wake` take no lock: a store may be garbage-collected at any allocation.
    """

    def __init__(self) -> None:
        self._keepers: set[Keeper] = set()
        self.restart()

    def restart(self) -> None:
        """Forget all stores, which belong to the parent of a forked child."""
        for keeper in self._keepers:
            keeper.job = None  # no thread of the child ends it
        self._keepers = set()
        self._wakeups: SimpleQueue[None] = SimpleQueue()
        self._threads = Threads(1)
        self._starting = threading.Lock()
        self._runs = False
        self._grown = 0.0  # when a thread was added

    def add(self, keeper: Keeper) -> None:
        """Work for a store from now on."""
        with self._starting:
            self._keepers.add(keeper)
            if not self._runs:
                threading.Thread(target=self._run, name="expstore-keeper", daemon=True).start()
                self._runs = True
        self.wake()

    def remove(self, keeper: Keeper) -> None:
        """Work no more for a store."""
        self._keepers.discard(keeper)
        self.wake()

    def wake(self) -> None:
        """Look again what is due."""
        self._wakeups.put(None)

    def _run(self) -> None:
        while True:
            with self._starting:
                if not self._keepers:
                    self._runs = False
                    return
            with contextlib.suppress(Empty):
                self._wakeups.get(timeout=max(0.0, self._start_due()))
                while True:
                    self._wakeups.get_nowait()

    def _start_due(self) -> float:
        """Start the work that is due; return the seconds until more can be due."""
        now = time.monotonic()
        soon, late = now + BEAT_SECONDS, now - PATIENCE_SECONDS
        for keeper in list(self._keepers):
            if keeper.job is None or keeper.job.done:
                job = keeper.choose(now)
                if job is not None:
                    self._threads.add(job)
            elif not keeper.job.begun and max(keeper.since, self._grown) < late:
                self._grown = now
                self._threads.grow()
            soon = min(soon, keeper.due)
        return max(soon, now + LOOK_SECONDS) - now


_scheduler = _Scheduler()
os.register_at_fork(after_in_child=_scheduler.restart)
