"""Processes for untrusted SQL that are forked from one that has imported what they need.

A server starts such a process with the first query over a store, which takes half a second of CPU for
imports. Tests of the sandbox itself start the processes as users do.
"""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from expstore.sql.sandbox import pool
from tests.support.warm_processes import Forked, Parent

#: Modules that `expstore.sql.sandbox.child` loads before it confines itself.
_IMPORTS = (
    "expstore.sql.sandbox.child",
    "expstore.sql.arrow_dataset",
    "expstore.sql.expressions",
    "expstore.sql.index",
    "pyarrow.dataset",
)
#: The process that forks is the parent: the child ends with it.
_BOOT = """
import json, os, sys
sys.argv[1] = json.dumps(json.loads(sys.argv[1]) | {"parent": os.getppid()})
"""


#: The process that has imported what the processes for untrusted SQL need.
PARENT = Parent(_IMPORTS, pool._ENVIRONMENT)


class _Child(Forked):
    parent = PARENT

    def __init__(self, args: list[str], **more: Any) -> None:
        *_, boot, told = args
        super().__init__([sys.executable, "-c", _BOOT + boot, told], **more)


_POPEN = _Child if sys.platform == "linux" else subprocess.Popen
#: In the place of `subprocess` in `expstore.sql.sandbox.pool`.
WARM = SimpleNamespace(Popen=_POPEN, DEVNULL=subprocess.DEVNULL)
