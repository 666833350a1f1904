"""Specs of the values that a field may have: the TensorSpec family, under TorchRL's names.

Use them to describe environments. A store keeps the specs of its fields. This package never reads a store.
Names are imported when they are first used.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
