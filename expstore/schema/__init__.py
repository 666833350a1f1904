"""What fields rows have.

Names load when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from expstore.schema.schema import ARROW, DTYPES, OBJECT, Field, Schema, arrow_dtype, is_name

__all__ = [
    "ARROW",
    "DTYPES",
    "OBJECT",
    "Field",
    "Schema",
    "arrow_dtype",
    "is_name",
]

_HOME = {
    "ARROW": "schema",
    "DTYPES": "schema",
    "Field": "schema",
    "OBJECT": "schema",
    "Schema": "schema",
    "arrow_dtype": "schema",
    "is_name": "schema",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
