"""Import compiled loops late, one thread at a time.

The modules of this package import numba, which takes a second, so every other package imports them where they
are first needed, by an import statement under the lock `compiling`:

    with compiling:
        from expstore.kernels.sum_tree import SumTree

numba cannot compile in two threads at once, and a child that is forked while the compiler runs crashes when
it compiles itself: the lock prevents both.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable

#: Hold this lock while importing a module of compiled loops.
compiling = threading.Lock()
os.register_at_fork(
    before=compiling.acquire, after_in_parent=compiling.release, after_in_child=compiling.release
)


class _Loader:
    """A daemon thread that calls functions one after another, and ends with the last one."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all calls: a forked child has no such thread."""
        self._lock = threading.Lock()
        self._loads: deque[Callable[[], object]] = deque()
        self._thread: threading.Thread | None = None

    def add(self, load: Callable[[], object]) -> threading.Thread:
        with self._lock:
            self._loads.append(load)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="expstore-warm", daemon=True)
                self._thread.start()
            return self._thread

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._loads:
                    self._thread = None
                    return
                load = self._loads.popleft()
            try:
                load()
            except Exception as exc:
                if not (isinstance(exc, ImportError) and sys.is_finalizing()):
                    threading.excepthook(
                        threading.ExceptHookArgs(
                            (type(exc), exc, exc.__traceback__, threading.current_thread())
                        )
                    )


_loader = _Loader()
os.register_at_fork(after_in_child=_loader.restart)


def load_in_background(load: Callable[[], object]) -> threading.Thread:
    """Call a function that imports compiled loops in a daemon thread; return the thread.

    One thread of the process calls all of these functions, as only one at a time can compile. A failed import
    is reported like any exception of a thread, unless the interpreter is shutting down, when no import
    succeeds.
    """
    return _loader.add(load)
