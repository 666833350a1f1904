"""Where rows are kept: in RAM, in Zarr columns and Arrow segments on disk, also under TorchRL's names.

Buffers take one of these; the classes load when first used.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
