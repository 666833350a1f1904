"""The background thread of a store on disk: writes priorities, and runs a checkpoint about once a second.

Used by the engine. It holds a store weakly, so that a forgotten one can be collected. It never raises: a
failed sync is noted in the store's health, and the next write raises an error.
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

#: So often at least other processes are shown that this one lives.
BEAT_SECONDS = 0.25


class Settled(Protocol):
    """What `Keeper` needs of an engine."""

    def beat(self) -> None:
        """Show other processes that this one is alive."""

    def tend(self) -> None:
        """Do so, and write priorities that have changed, and rows that the columns lack."""

    def settle(self) -> None:
        """Run a checkpoint, and bring rows that have left to the archive."""


class Keeper:
    """Run a checkpoint a while after a store was written to.

    Threads: any may note or hurry; one thread of its own acts. It holds the store while it acts, and at no
    other time: a store that was forgotten is collected between two acts, never inside one, whose locks its
    `close` needs. Processes: none runs in a forked child.

    Args:
        engine: Whose checkpoints; held weakly.
    """

    def __init__(self, engine: Settled) -> None:
        self._engine = weakref.ref(engine)
        self._owner: Callable[[], object | None] = lambda: None
        self._awake = threading.Event()
        self._hurry = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="expstore-keeper", daemon=True)
        #: Whether it was started.
        self.running = False

    def start(self, owner: object) -> None:
        """Start the thread: a store is open, which is held weakly."""
        self._owner = weakref.ref(owner)
        self.running = True
        self._thread.start()

    def note(self) -> None:
        """Note that something was written: a checkpoint follows."""
        if not self._awake.is_set():
            self._awake.set()

    def hurry(self) -> None:
        """Run a checkpoint at once: the spare slots are half used up."""
        # Setting an event takes a lock that the thread may hold while it waits for the GIL.
        if not self._hurry.is_set():
            self._hurry.set()
        if not self._awake.is_set():
            self._awake.set()

    def stop(self) -> None:
        """End the thread; what is not synced stays so."""
        self._stopped = True
        if self._thread is threading.current_thread():
            return  # the storage was forgotten, and collected here, perhaps within one of the events
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
                self._act(lambda engine: engine.settle())

    def _act(self, act: Callable[[Settled], None]) -> None:
        owner, engine = self._owner(), self._engine()
        if owner is None or engine is None:
            self._stopped = True
            return
        # A failure is noted in the store's health: the next write raises it.
        with contextlib.suppress(ExpStoreError):
            act(engine)
        del owner  # here, where no lock is held, it may be collected
