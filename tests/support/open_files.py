"""Files that this process has open."""

from __future__ import annotations

import os
from pathlib import Path


def open_files(folder: Path | str = "/") -> list[str]:
    """Return the paths below a folder that this process has open, one for each descriptor."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the descriptor that lists the others
            continue
    return [path for path in found if path.startswith(str(folder))]
