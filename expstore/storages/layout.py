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
from expstore.storages.codecs import CODECS, DEFAULT_CODEC
from expstore.storages.packing import Packing, packing_for, reach_for
from expstore.types import Key, Ranking, key_name

__all__ = ["LAYOUTS", "WIDE_BYTES", "ColumnLayout", "LayoutName", "ask_layout"]

LayoutName = Literal["flat", "packed", "auto"]
LAYOUTS = ("flat", "packed", "auto")
#: With "auto" rows of at least so many bytes are packed.
WIDE_BYTES = 1024
_OPTIONS = {"layout", "codec", "rows", "share_next"}


@dataclass(frozen=True)
class ColumnLayout:
    """Say how fields lie on disk.

    Args:
        layout: "flat": rows one behind another, read by a copy each, changed in place. "packed": chunks of
            a few rows, compressed, which stay as they are. "auto": packed from 1 KiB per row on. None: nobody
            has said; columns are flat then.
        fields: The same for single fields, by name: their `layout`, `codec` (its `interop` says who reads
            it), `rows` per chunk and `share_next`.
        share_next: Whether rows of a packed field are left out where the field's next rows, those of
            `("next", name)`, have them already.

    Raises:
        SchemaError: There is no such layout, codec or option.
    """

    layout: LayoutName | None = None
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    share_next: bool = True

    def __post_init__(self) -> None:
        of_all = {} if self.layout is None else {"layout": self.layout}
        for name, asked in (("", of_all), *self.fields.items()):
            whose = f"field {name!r}: " if name else ""
            if unknown := asked.keys() - _OPTIONS:
                raise SchemaError(
                    f"{whose}no option {min(unknown)!r}", hint="there are " + ", ".join(sorted(_OPTIONS))
                )
            if asked.get("layout", "flat") not in LAYOUTS:
                raise SchemaError(
                    f"{whose}no layout {asked['layout']!r}", hint="there are " + ", ".join(LAYOUTS)
                )
            if asked.get("codec", DEFAULT_CODEC) not in CODECS:
                raise SchemaError(
                    f"{whose}no codec {asked['codec']!r}", hint="there are " + ", ".join(CODECS)
                )
            shared = asked.get("share_next", self.share_next)
            if not isinstance(shared, bool):
                raise SchemaError(f"{whose}share_next must be True or False, got {shared!r}")
            if asked.get("layout") == "flat" and asked.get("share_next"):
                raise SchemaError(f"{whose}share_next is of packed fields, flat ones are stored as they are")
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
        kept: dict[str, Any] = {
            "layout": self.layout or "flat",
            "fields": {k: dict(v) for k, v in self.fields.items()},
        }
        return kept if self.share_next else {**kept, "share_next": False}

    def filled(self, other: ColumnLayout) -> ColumnLayout:
        """Return what this one says, and where it says nothing the other."""
        return ColumnLayout(
            self.layout or other.layout, self.fields or other.fields, self.share_next and other.share_next
        )

    @property
    def asks_packed(self) -> bool:
        """Whether it asks for packed fields, rather than leave that to their width."""
        return "packed" in (self.layout, *(asked.get("layout") for asked in self.fields.values()))

    def packings(self, fields: tuple[Field, ...], slots: int | None, reach: int) -> list[Packing | None]:
        """Return how fields are packed; None: one is flat.

        Args:
            fields: All of a store.
            slots: How many rows a ring has; None: the store grows.
            reach: How many rows behind the oldest one stay, in a ring.
        """
        shared = self._shared(fields) if slots is None or reach else frozenset()
        return [self._packing(entry, slots, shares=entry.key in shared) for entry in fields]

    def reach(self, fields: tuple[Field, ...]) -> int:
        """Return how many rows behind the oldest one must stay for rows that lie with the next ones."""
        shared = self._shared(fields)
        return max((reach_for(entry) for entry in fields if entry.key in shared), default=0)

    def _shared(self, fields: tuple[Field, ...]) -> frozenset[Key]:
        """Return the fields of which rows may lie with the next ones."""
        kinds = {
            entry.key: (entry.dtype, entry.shape)
            for entry in fields
            if self._packing(entry, None) is not None
        }
        return frozenset(
            key
            for key, kind in kinds.items()
            if kinds.get(("next", *key)) == kind
            and self.fields.get(key_name(key), {}).get("share_next", self.share_next)
        )

    def _packing(self, entry: Field, slots: int | None, *, shares: bool = False) -> Packing | None:
        own = self.fields.get(key_name(entry.key), {})
        layout = own.get("layout", self.layout or "flat")
        if entry.key[0] == "_row" or layout == "flat" or (layout == "auto" and entry.row_bytes < WIDE_BYTES):
            return None
        codec, rows = own.get("codec", DEFAULT_CODEC), own.get("rows")
        return packing_for(entry, slots, codec=codec, rows=rows, shares=shares)

    def chunk_rows(self, fields: tuple[Field, ...]) -> int:
        """Return of how many rows the number of slots must be a multiple."""
        packings = [self._packing(entry, None) for entry in fields]
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
