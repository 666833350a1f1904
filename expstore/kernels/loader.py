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
from collections.abc import Callable

__all__ = ["compiling", "load_in_background"]

#: Hold this lock while importing a module of compiled loops.
compiling = threading.Lock()
os.register_at_fork(
    before=compiling.acquire, after_in_parent=compiling.release, after_in_child=compiling.release
)


def load_in_background(load: Callable[[], object]) -> threading.Thread:
    """Call a function that imports compiled loops in a daemon thread; return the thread.

    A failed import is reported like any exception of a thread, unless the interpreter is shutting down, when
    no import succeeds.
    """

    def run() -> None:
        try:
            load()
        except ImportError:
            if not sys.is_finalizing():
                raise

    thread = threading.Thread(target=run, name="expstore-warm", daemon=True)
    thread.start()
    return thread
