"""Conditions on trajectories, batches split into trajectories, and transforms of rollouts.

Names are imported on first use.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
