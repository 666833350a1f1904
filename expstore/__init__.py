"""Database-backed, persistent experience store for reinforcement learning.

Names are imported when they are first used: importing the package, the command line and SQL stay fast.
Nothing here imports torch.
"""

from __future__ import annotations

from expstore._lazy import attach

__version__ = "0.1.0"

__getattr__, __dir__ = attach(__name__)
