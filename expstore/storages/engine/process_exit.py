"""Close or flush open stores when the program ends, gets SIGTERM, or forks.

Used by stores: they register when they are opened and unregister when they are closed. This module closes or
flushes open stores. It never opens one, and does not replace the program's own signal handlers.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import ctypes
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from expstore.core import tuning
from expstore.core.fork_hooks import call_each
from expstore.errors import ExpStoreError

_logger = logging.getLogger("expstore")


@dataclass(frozen=True, eq=False)
class Departure:
    """How to close, flush or drain an open store; `weakly` holds the methods weakly.

    Args:
        path: The store's folder.
        flushes: Whether SIGTERM flushes the store.
        leave: Closes the store when the program ends.
        depart: Flushes what it can before the process dies of a signal; other threads still run.
        drain: Writes the rows that only the journal has to the columns, before a fork.
    """

    path: Path
    flushes: bool
    leave: Callable[[], object]
    depart: Callable[[], object]
    drain: Callable[[], object]

    def weakly(self) -> Departure:
        """Return a copy whose methods do nothing once the store has been freed."""
        return replace(self, leave=_weak(self.leave), depart=_weak(self.depart), drain=_weak(self.drain))


def _weak(method: Callable[[], object]) -> Callable[[], object]:
    held = weakref.WeakMethod(method)

    def call() -> None:
        if (found := held()) is not None:
            found()

    return call


#: Global to the process, because its exit, its signals and its forks concern all stores.
_open: weakref.WeakKeyDictionary[object, Departure] = weakref.WeakKeyDictionary()
#: The signals that a thread had blocked before it forked.
_blocked = threading.local()


def register(store: object, departure: Departure) -> None:
    """Register an open store; install a SIGTERM handler if allowed and the program has none."""
    _open[store] = departure.weakly()
    here = threading.current_thread() is threading.main_thread()
    if departure.flushes and here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _Farewell())


def unregister(store: object) -> None:
    """Unregister a store that is closed; remove the handler with the last store."""
    _open.pop(store, None)
    here = threading.current_thread() is threading.main_thread()
    if not _open and here and isinstance(signal.getsignal(signal.SIGTERM), _Farewell):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Farewell:
    """Handle SIGTERM: flush all open stores, then die of the signal as if there were no handler.

    The flush runs in another thread while the main thread continues, because the main thread may hold a lock
    that flushing needs. The process dies without waiting at a second signal, or after
    `tuning.SIGTERM_SECONDS` if the disk is slow.
    """

    def __init__(self) -> None:
        self._begun = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._begun or not _open:
            _die()
        self._begun = True
        # Not threading.Thread: the main thread may be inside that module's own lock.
        _thread.start_new_thread(self._wait, ())
        _thread.start_new_thread(self._flush, ())

    def _wait(self) -> None:
        threading.Event().wait(tuning.SIGTERM_SECONDS)
        _die()

    def _flush(self) -> None:
        for departure in list(_open.values()):
            if departure.flushes:
                with contextlib.suppress(Exception):  # the process is dying, whatever the error is
                    departure.depart()
        _die()


def _die() -> None:
    """Die of SIGTERM. Works in any thread, where `signal.signal()` would need the main thread."""
    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


def _close_all() -> None:
    for departure in list(_open.values()):
        try:
            departure.leave()
        except Exception as exc:  # the other stores must still be closed
            _logger.warning("%s could not be closed: %s", departure.path, exc)


def _before_fork() -> None:
    """Drain all stores, so that a child finds all rows in the columns: it must not write pending ones."""
    call_each(_open, _drain)
    # Python in a child forgets pending signals: without the mask, it would survive one sent before the fork.
    _blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _drain(store: object) -> None:
    departure = _open.get(store)
    if departure is not None:  # otherwise another thread has closed the store meanwhile
        with contextlib.suppress(ExpStoreError):
            departure.drain()


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _blocked.before)


def _in_child() -> None:
    _open.clear()  # the stores belong to the parent
    if isinstance(signal.getsignal(signal.SIGTERM), _Farewell):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _blocked.before)


atexit.register(_close_all)
os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
