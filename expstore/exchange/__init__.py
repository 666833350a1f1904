"""Export rows to formats that other programs read without expstore, and import such files as stores.

Used by the command line and by programs. Each name loads its module when it is first used.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
