"""The background thread of a store on disk: writes priorities, and runs a checkpoint about once a second.

Used by the engine. References to the store are weak, so that a dropped store can be garbage-collected. The
thread never raises: a failed sync is recorded in the store's health, and the next write raises an error.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Protocol

from expstore.core import tuning
from expstore.errors import ExpStoreError

__all__ = ["Keeper", "Settled"]

#: The longest interval between two heartbeats for other processes.
BEAT_SECONDS = 0.25


class Settled(Protocol):
    """The interface of an engine that `Keeper` uses."""

    def beat(self) -> None:
        """Write a heartbeat for other processes."""

    def tend(self) -> None:
        """Write a heartbeat, changed priorities, and rows that the columns lack."""

    def checkpoint(self) -> None:
        """Sync everything that was committed."""


class Keeper:
    """Run a checkpoint some time after a store was written to.

    Any thread may call `note` and `hurry`; one background thread does the work. It refers to the store only
    while it works, so that a dropped store is garbage-collected between two operations, and never inside one,
    which holds locks that the store's `close` needs. A forked child has no such thread.

    Args:
        engine: The engine; the reference is weak.
    """

    def __init__(self, engine: Settled) -> None:
        self._engine = weakref.ref(engine)
        self._owner: Callable[[], object | None] = lambda: None
        self._awake = threading.Event()
        self._hurry = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="expstore-keeper", daemon=True)
        #: Whether the thread was started.
        self.running = False

    def start(self, owner: object) -> None:
        """Start the thread for an open store; the reference to `owner` is weak."""
        self._owner = weakref.ref(owner)
        self.running = True
        self._thread.start()

    def note(self) -> None:
        """Record that something was written: a checkpoint follows."""
        if not self._awake.is_set():
            self._awake.set()

    def hurry(self) -> None:
        """Run a checkpoint at once, because half of the spare slots are used."""
        # Setting an event takes a lock that the thread may hold while it waits for the GIL.
        if not self._hurry.is_set():
            self._hurry.set()
        if not self._awake.is_set():
            self._awake.set()

    def stop(self) -> None:
        """End the thread without another checkpoint."""
        self._stopped = True
        if self._thread is threading.current_thread():
            return  # the store is being garbage-collected here, perhaps inside a method of an event
        self.hurry()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped:
            if not self._awake.wait(BEAT_SECONDS):
                self._act(lambda engine: engine.beat())
                continue
            self._awake.clear()
            due = time.monotonic() + tuning.CHECKPOINT_SECONDS
            while (
                not self._stopped and time.monotonic() < due and not self._hurry.wait(tuning.PRIORITY_SECONDS)
            ):
                self._act(lambda engine: engine.tend())
            self._hurry.clear()
            if not self._stopped:
                self._act(lambda engine: engine.checkpoint())

    def _act(self, act: Callable[[Settled], None]) -> None:
        owner, engine = self._owner(), self._engine()
        if owner is None or engine is None:
            self._stopped = True
            return
        # A failure is recorded in the store's health: the next write raises it.
        with contextlib.suppress(ExpStoreError):
            act(engine)
        del owner  # the store may be garbage-collected here, where no lock is held
