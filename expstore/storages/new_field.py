"""A field that is added to a storage which has rows already.

Used by storages and `expstore.storages.engine.backfill`. It computes nothing by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from expstore.core.values import Array, IntArray
from expstore.schema.schema import Field

__all__ = ["Compute", "NewField", "Progress"]

#: Returns those of some rows that are still there, and their values: ids of shape `(n,)`, ascending.
Compute = Callable[[IntArray], tuple[IntArray, Array]]
#: Is told how many rows have their value, and of how many.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class NewField:
    """Say which field comes.

    Args:
        entry: The field.
        default: What later rows have that come without it; None: they must not.
        fill: What all rows have that are there; None: `compute` says it. Of the field's row shape.
        compute: What each of them has. Shape `(n, *row shape)`.
        rows: How many rows at a time `compute` is asked of at most.
        specs: What values fields may have from then on, as `expstore.schema.spec_text` has it.
        progress: Is told how far it has come.
    """

    entry: Field
    default: Array | None = None
    fill: Array | None = None
    compute: Compute | None = None
    rows: int = 4096
    specs: str = ""
    progress: Progress | None = None
