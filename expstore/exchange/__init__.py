"""Hand rows to other programs, in forms that they read without expstore.

Used by the command line and by programs. It never changes a store.
"""

from expstore.exchange.zarr_group import Exported, export_zarr

__all__ = ["Exported", "export_zarr"]
