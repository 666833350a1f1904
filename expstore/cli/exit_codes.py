"""The exit codes of the command line.

Used by all modules of the command line; `expstore --help` describes them.
"""

from __future__ import annotations

FAILED, USAGE, LOCKED, DAMAGED, INTERRUPTED = 1, 2, 3, 4, 130
