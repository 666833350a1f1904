"""The exit codes of the command line.

Used by all of its modules; the epilog of `expstore --help` says the same to people.
"""

from __future__ import annotations

__all__ = ["DAMAGED", "FAILED", "INTERRUPTED", "LOCKED", "USAGE"]

FAILED, USAGE, LOCKED, DAMAGED, INTERRUPTED = 1, 2, 3, 4, 130
