"""How the fields of a store lie on disk: flat, or packed.

Settings of a new store; the Zarr storage asks when its first rows come. Afterwards each array's zarr.json
says how it lies, and this is not asked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from expstore.errors import SchemaError
from expstore.schema import Field
from expstore.storages.packing import CODECS, DEFAULT_CODEC, Packing, packing_for
from expstore.types import Ranking, key_name

__all__ = ["LAYOUTS", "WIDE_BYTES", "ColumnLayout", "LayoutName", "ask_layout"]

LayoutName = Literal["flat", "packed", "auto"]
LAYOUTS = ("flat", "packed", "auto")
#: With "auto" rows of at least so many bytes are packed.
WIDE_BYTES = 1024
_OPTIONS = {"layout", "codec", "rows"}


@dataclass(frozen=True)
class ColumnLayout:
    """Say how fields lie on disk.

    Args:
        layout: "flat": rows one behind another, read by a copy each, changed in place. "packed": chunks of
            a few rows, compressed, which stay as they are. "auto": packed from 1 KiB per row on. None: nobody
            has said; columns are flat then.
        fields: The same for single fields, by name: their `layout`, `codec` (every reader of Zarr v3 knows
            those that there are) and `rows` per chunk.

    Raises:
        SchemaError: There is no such layout, codec or option.
    """

    layout: LayoutName | None = None
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        of_all = {} if self.layout is None else {"layout": self.layout}
        for name, asked in (("", of_all), *self.fields.items()):
            whose = f"field {name!r}: " if name else ""
            if unknown := asked.keys() - _OPTIONS:
                raise SchemaError(f"{whose}no option {min(unknown)!r}", hint="there are layout, codec, rows")
            if asked.get("layout", "flat") not in LAYOUTS:
                raise SchemaError(
                    f"{whose}no layout {asked['layout']!r}", hint="there are " + ", ".join(LAYOUTS)
                )
            if asked.get("codec", DEFAULT_CODEC) not in CODECS:
                raise SchemaError(
                    f"{whose}no codec {asked['codec']!r}", hint="there are " + ", ".join(CODECS)
                )
            rows = asked.get("rows", 1)
            if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1 or rows & (rows - 1):
                raise SchemaError(f"{whose}rows per chunk must be a power of two, got {rows!r}")

    @classmethod
    def of(cls, stored: Mapping[str, Any], ranking: Ranking | None) -> ColumnLayout:
        """Return how the columns of a store are made.

        Args:
            stored: What expstore.json says.
            ranking: By what it keeps the best rows: these come in the places of others, which needs places.
        """
        return cls() if ranking is not None else cls(**stored)

    def to_json(self) -> dict[str, Any]:
        """Return what expstore.json keeps: nothing of what is flat anyway."""
        if self.layout in (None, "flat") and not self.fields:
            return {}
        return {
            "layout": self.layout or "flat",
            "fields": {k: dict(v) for k, v in self.fields.items()},
        }

    def filled(self, other: ColumnLayout) -> ColumnLayout:
        """Return what this one says, and where it says nothing the other."""
        return ColumnLayout(self.layout or other.layout, self.fields or other.fields)

    @property
    def asks_packed(self) -> bool:
        """Whether it asks for packed fields, rather than leave that to their width."""
        return "packed" in (self.layout, *(asked.get("layout") for asked in self.fields.values()))

    def packing(self, entry: Field, slots: int | None) -> Packing | None:
        """Return how a field is packed; None: it is flat."""
        own = self.fields.get(key_name(entry.key), {})
        layout = own.get("layout", self.layout or "flat")
        if entry.key[0] == "_row" or layout == "flat" or (layout == "auto" and entry.row_bytes < WIDE_BYTES):
            return None
        return packing_for(entry, slots, codec=own.get("codec", DEFAULT_CODEC), rows=own.get("rows"))

    def chunk_rows(self, fields: tuple[Field, ...]) -> int:
        """Return of how many rows the number of slots must be a multiple."""
        packings = [self.packing(entry, None) for entry in fields]
        return max((packing.rows for packing in packings if packing is not None), default=1)


def ask_layout(
    layout: LayoutName | None, fields: Mapping[str, Mapping[str, Any]] | None
) -> ColumnLayout | None:
    """Return what was asked for; None: nothing, as stored.

    Raises:
        SchemaError: There is no such layout, codec or option.
    """
    if layout is None and fields is None:
        return None
    return ColumnLayout(layout, fields or {})
