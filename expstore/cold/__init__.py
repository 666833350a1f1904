"""Versions of stores on object storage such as S3: push, pull, list, remove, and read through a local cache.

Used by programs, by `expstore.open` and by the command line. Needs obstore: `pip install 'expstore[s3]'`.
Names are imported when they are first used.
"""

from __future__ import annotations

from expstore._lazy import attach

__getattr__, __dir__ = attach(__name__)
