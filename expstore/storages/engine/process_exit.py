"""Close or flush open stores when the program ends, gets SIGTERM, or forks.

Used by stores: they register when they are open and unregister when they are closed. It closes or flushes
what is open; it never opens anything, and leaves handlers of the program alone.
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
from expstore.errors import ExpStoreError

__all__ = ["Departure", "register", "unregister"]

_logger = logging.getLogger("expstore")


@dataclass(frozen=True, eq=False)
class Departure:
    """Say what becomes of an open store; its methods are held weakly.

    Args:
        path: The store's folder.
        flushes: Whether SIGTERM flushes it.
        leave: Closes it when the program ends.
        depart: Does what can be done before the process dies of a signal; other threads still run.
        drain: Writes to the columns what only the journal has, before a fork.
    """

    path: Path
    flushes: bool
    leave: Callable[[], object]
    depart: Callable[[], object]
    drain: Callable[[], object]

    def weakly(self) -> Departure:
        """Return the same with methods that do nothing once the store is gone."""
        return replace(self, leave=_weak(self.leave), depart=_weak(self.depart), drain=_weak(self.drain))


def _weak(method: Callable[[], object]) -> Callable[[], object]:
    held = weakref.WeakMethod(method)

    def call() -> None:
        if (found := held()) is not None:
            found()

    return call


#: The one piece of state that belongs to the process: its end, a signal and a fork come to nobody else.
_open: weakref.WeakKeyDictionary[object, Departure] = weakref.WeakKeyDictionary()
#: The signals that a thread had blocked before it forked.
_blocked = threading.local()


def register(store: object, departure: Departure) -> None:
    """Note that a store is open; handle SIGTERM if the program does not, and allows it."""
    _open[store] = departure.weakly()
    here = threading.current_thread() is threading.main_thread()
    if departure.flushes and here and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _Farewell())


def unregister(store: object) -> None:
    """Note that a store is closed; with the last one the handler is removed."""
    _open.pop(store, None)
    here = threading.current_thread() is threading.main_thread()
    if not _open and here and isinstance(signal.getsignal(signal.SIGTERM), _Farewell):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Farewell:
    """Handle SIGTERM: flush what is open, then die of it as if there were no handler.

    The main thread goes on meanwhile: it may hold a lock that flushing needs. A second signal is not
    waited for, nor is a disk that takes too long.
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
                with contextlib.suppress(Exception):  # whatever it is: the process is dying
                    departure.depart()
        _die()


def _die() -> None:
    """Die of SIGTERM; from any thread, which signal.signal() does not allow."""
    ctypes.pythonapi.PyOS_setsig(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


def _close_all() -> None:
    for departure in list(_open.values()):
        try:
            departure.leave()
        except Exception as exc:  # the others are to be closed, too
            _logger.warning("%s could not be closed: %s", departure.path, exc)


def _before_fork() -> None:
    """Let a child find all rows in the columns: it must not write those that were kept back."""
    for departure in list(_open.values()):
        with contextlib.suppress(ExpStoreError):
            departure.drain()
    # Python forgets in a child what its handler was told: the child would outlive a signal that came first.
    _blocked.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _in_parent() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _blocked.before)


def _in_child() -> None:
    _open.clear()  # they are the parent's
    if isinstance(signal.getsignal(signal.SIGTERM), _Farewell):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _blocked.before)


atexit.register(_close_all)
os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
