"""The buffer of a served store, which `expstore.connect` returns.

Names are imported when they are first used.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
