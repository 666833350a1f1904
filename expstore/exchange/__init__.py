"""Hand rows to other programs, in forms that they read without expstore, and make stores of theirs.

Used by the command line and by programs. Every name loads what it needs when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expstore.exchange.arrow import export_arrow
    from expstore.exchange.base import Exported, Imported
    from expstore.exchange.hdf5 import export_hdf5, import_hdf5
    from expstore.exchange.minari import export_minari
    from expstore.exchange.minari_import import import_minari
    from expstore.exchange.npz import export_npz, import_npz
    from expstore.exchange.parquet import export_parquet
    from expstore.exchange.table_import import import_arrow, import_parquet
    from expstore.exchange.zarr_group import export_zarr

__all__ = [
    "Exported",
    "Imported",
    "export_arrow",
    "export_hdf5",
    "export_minari",
    "export_npz",
    "export_parquet",
    "export_zarr",
    "import_arrow",
    "import_hdf5",
    "import_minari",
    "import_npz",
    "import_parquet",
]

_HOMES = {
    "Exported": "base",
    "Imported": "base",
    "export_arrow": "arrow",
    "export_hdf5": "hdf5",
    "export_minari": "minari",
    "export_npz": "npz",
    "export_parquet": "parquet",
    "export_zarr": "zarr_group",
    "import_arrow": "table_import",
    "import_hdf5": "hdf5",
    "import_minari": "minari_import",
    "import_npz": "npz",
    "import_parquet": "table_import",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
