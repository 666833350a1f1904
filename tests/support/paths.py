"""Paths of the checkout, for tests that run programs or read documents; and the folder of files in memory."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Where files are in memory, on systems that have it.
MEMORY = Path("/dev/shm")


def find_memory() -> Path | None:
    """Return the folder of files in memory; None: it is missing, or has less than 2 GiB of free space.

    For tests that really sync nothing. Stores in memory do not save the space of flags that are never set
    (`expstore.disk.filesystem.fills_holes`).
    """
    return MEMORY if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 << 30 else None
