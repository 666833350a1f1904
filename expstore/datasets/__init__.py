"""Data sets of recorded experience: made into stores once, then used like any other store.

Used by programs and by the command line. Every name loads what it needs when it is first asked for.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
