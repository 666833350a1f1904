"""Hand rows to other programs, in forms that they read without expstore, and make stores of theirs.

Used by the command line and by programs. Every name loads what it needs when it is first asked for.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
