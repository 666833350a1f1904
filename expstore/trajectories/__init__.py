"""Conditions on trajectories, and batches split into trajectories.

Names are imported on first use.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
