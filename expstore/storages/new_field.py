"""A field that is added to a storage with existing rows.

Used by storages and `expstore.storages.engine.backfill`. A plain data container.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from expstore.core.values import Array, IntArray
from expstore.schema.schema import Field

__all__ = ["Compute", "NewField", "Progress"]

#: Gets ids of rows; returns the ids of those that still exist, ascending, and their values. Shapes `(n,)` and
#: `(n, *row shape)`.
Compute = Callable[[IntArray], tuple[IntArray, Array]]
#: Called with the number of rows that have their value, and the number of all rows.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class NewField:
    """A field to be added.

    Args:
        entry: The field.
        default: The value of later rows that are written without the field; None: they must have it.
        fill: The value of all existing rows, of the field's row shape; None: `compute` returns their values.
        compute: Computes the values of existing rows.
        rows: The most rows that are passed to `compute` at a time.
        specs: The specs of all fields including this one, as `expstore.schema.spec_text` writes them.
        progress: Called with the progress.
    """

    entry: Field
    default: Array | None = None
    fill: Array | None = None
    compute: Compute | None = None
    rows: int = 4096
    specs: str = ""
    progress: Progress | None = None
