"""The exit codes of the command line.

Used by all modules of the command line; `expstore --help` describes them.
"""

from __future__ import annotations

__all__ = ["DAMAGED", "FAILED", "INTERRUPTED", "LOCKED", "USAGE"]

FAILED, USAGE, LOCKED, DAMAGED, INTERRUPTED = 1, 2, 3, 4, 130
