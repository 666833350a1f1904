"""Several served stores behind one buffer: `expstore.connect` of a list of addresses, or of a cluster file.

`expstore.cluster.ray` starts them on Ray.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
