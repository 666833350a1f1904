"""Storages: rows in RAM, or on disk in Zarr columns and Arrow segments; also under TorchRL's names.

A buffer uses one of these. The classes are imported when they are first used.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
