"""Start the harness, which forks children from a process that has opened no store (pytest may have).

Loaded by pytest before the crash tests. It only runs harness.py and reads its output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.paths import ROOT, find_memory

Reports = dict[str, dict[str, Any]]

#: Large pages make the many forks cheap (ignored on other systems).
ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def start(*arguments: str, folder: str) -> subprocess.Popen[str]:
    """Start the harness; it creates its stores in a folder."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.crash.harness", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRONMENT, "TMPDIR": folder},
    )


def finish(processes: list[subprocess.Popen[str]], *, seconds: float) -> Reports:
    """Wait for the harness; return task -> report."""
    reports: Reports = {}
    for process in processes:
        out, err = process.communicate(timeout=seconds)
        assert process.returncode == 0, err[-4000:]
        for line in out.splitlines():
            report = json.loads(line)
            reports[report["task"]] = report
    return reports


@pytest.fixture(scope="session")
def harness() -> Callable[..., Reports]:
    """Run the harness with several lists of arguments in parallel, by default on files in memory."""

    def run(lists: list[list[str]], *, memory: bool = True) -> Reports:
        with tempfile.TemporaryDirectory(dir=find_memory() if memory else None) as folder:
            processes = [start(*arguments, folder=folder) for arguments in lists]
            try:
                return finish(processes, seconds=3600)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()

    return run
