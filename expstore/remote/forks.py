"""Make copies of objects in a forked child, which lacks the threads that hold their locks or work for them.

Used by the buffers over served stores and by their parts.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol

from expstore.core.fork_hooks import call_each


class _Copyable(Protocol):
    """Has the state of a copy, as for pickle: without locks, threads and work that is under way."""

    def __getstate__(self) -> Any: ...

    def __setstate__(self, state: Any, /) -> None: ...


_objects: weakref.WeakSet[_Copyable] = weakref.WeakSet()


def copy_in_child(one: _Copyable) -> None:
    """Restore an object from its own state in every child that is forked while it exists."""
    _objects.add(one)


def _copy_all() -> None:
    call_each(_objects, lambda one: one.__setstate__(one.__getstate__()))


os.register_at_fork(after_in_child=_copy_all)
