"""Database-backed, persistent experience store for reinforcement learning.

Names load when first used, so that importing the package, the command line and SQL stay
instant; nothing here imports torch.
"""

from __future__ import annotations

from expstore._lazy import attach

__version__ = "0.1.0.dev0"

__getattr__, __dir__ = attach(__name__)
