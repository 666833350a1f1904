"""What a process does that is killed the moment it is done: a store stays as a kill leaves it.

Used by tests that go on in the parent with what must be there. What is done is theirs.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

import torch

__all__ = ["in_child"]


def in_child(act: Callable[[], object]) -> None:
    """Act in a forked child, which is killed at the end."""
    pid = os.fork()
    if not pid:
        try:
            torch.set_num_threads(1)
            act()
            os.kill(os.getpid(), signal.SIGKILL)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "the child failed"
