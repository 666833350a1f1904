"""Public data sets of recorded experience, imported once into stores.

Used by programs and by the command line. Names are imported when they are first used.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
