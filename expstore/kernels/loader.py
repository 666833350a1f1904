"""How compiled loops are loaded: one thread at a time, and in no child that is forked meanwhile.

Used by whatever has loops of numba's. It knows none of them.
"""

from __future__ import annotations

import importlib
import os
import threading
from types import ModuleType

__all__ = ["load_compiled"]

# A child that is forked while the compiler runs would find it half way, and crash when it compiles itself.
_compiling = threading.Lock()
os.register_at_fork(
    before=_compiling.acquire, after_in_parent=_compiling.release, after_in_child=_compiling.release
)


def load_compiled(name: str) -> ModuleType:
    """Import a module of compiled loops; one thread at a time, since numba does not stand two."""
    with _compiling:
        return importlib.import_module(name)
