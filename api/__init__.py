"""The HTTP layer: stores served to other processes and machines.

Used by the command line and by ASGI servers, always under the name `expstore.api`; it never
touches a file of a store, only the public buffer.
"""

from __future__ import annotations

from expstore.api.app import create_app
from expstore.api.settings import Settings

__all__ = ["Settings", "create_app"]
