"""How the fields of a store are stored on disk: flat, or packed.

Settings of a new store, which the Zarr storage applies when its first rows are written. Afterwards each
array's zarr.json describes its layout, and these settings are not used again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from expstore.core.values import Key, Ranking, key_name, to_key
from expstore.errors import CorruptionError, SchemaError
from expstore.schema.schema import Field, Schema
from expstore.storages.format.chunk_encoding import (
    MOST_BYTES,
    MOST_ROWS,
    Packing,
    count_parts,
    packing_for,
    reach_for,
)
from expstore.storages.format.codecs import CODECS, DEFAULT_CODEC
from expstore.storages.format.manifest import Manifest

LayoutName = Literal["flat", "packed", "auto"]
LAYOUTS = ("flat", "packed", "auto")
#: With "auto", fields with rows of at least this many bytes are packed.
WIDE_BYTES = 1024
_OPTIONS = {"layout", "codec", "rows", "share_next"}


@dataclass(frozen=True)
class ColumnLayout:
    """The layout of fields on disk.

    Args:
        layout: "flat": rows are stored one after another, each read by a copy, and can be changed in place.
            "packed": rows are stored in compressed chunks of a few rows, and are immutable. "auto": packed
            from 1 KiB per row on. None: not specified, which means flat.
        fields: Options of single fields, by name: their `layout`, `codec`, `rows` per chunk and `share_next`.
        share_next: Whether rows of a packed field are not stored where `("next", name)` already has the same
            bytes. None: not specified, which means True.

    Raises:
        SchemaError: There is no such layout, codec or option, or an option has no effect.
    """

    layout: LayoutName | None = None
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    share_next: bool | None = None

    def __post_init__(self) -> None:
        of_all = {} if self.layout is None else {"layout": self.layout}
        for name, asked in (("", of_all), *self.fields.items()):
            whose = f"field {name!r}: " if name else ""
            if unknown := asked.keys() - _OPTIONS:
                raise SchemaError(
                    f"{whose}no option {min(unknown, key=str)!r}",
                    hint="there are " + ", ".join(sorted(_OPTIONS)),
                )
            if asked.get("layout", "flat") not in LAYOUTS:
                raise SchemaError(
                    f"{whose}no layout {asked['layout']!r}", hint="there are " + ", ".join(LAYOUTS)
                )
            codec = asked.get("codec", DEFAULT_CODEC)
            if not isinstance(codec, str) or codec not in CODECS:
                raise SchemaError(f"{whose}no codec {codec!r}", hint="there are " + ", ".join(CODECS))
            shared = asked.get("share_next", self.share_next)
            if not isinstance(shared, bool | None):
                raise SchemaError(f"{whose}share_next must be True or False, got {shared!r}")
            if name and asked.get("layout") == "flat":
                _refuse_idle(whose, asked, packed=False, fault=None)
            rows = asked.get("rows", 1)
            whole = isinstance(rows, int) and not isinstance(rows, bool)
            if not whole or not 1 <= rows <= MOST_ROWS or rows & (rows - 1):
                raise SchemaError(
                    f"{whose}rows per chunk must be a power of two, got {rows!r}",
                    hint=f"use a whole number from 1 to {MOST_ROWS}, or leave rows out",
                )
        if self.share_next and self.layout == "flat" and not self._may_pack:
            _refuse_idle("", {"share_next": True}, packed=False, fault=None)

    @classmethod
    def of(cls, stored: Mapping[str, Any], ranking: Ranking | None) -> ColumnLayout:
        """Return the layout of a store's columns.

        Args:
            stored: The layout in expstore.json.
            ranking: How the best rows are ranked, if only they are kept: they replace other rows, which is
                only possible in flat columns.

        Raises:
            CorruptionError: The store has no such layout.
        """
        if ranking is not None:
            return cls()
        try:
            return cls(**stored)
        except (TypeError, ValueError, AttributeError) as exc:
            raise CorruptionError(f"the layout of the columns cannot be read: {exc}") from exc

    def to_json(self) -> dict[str, Any]:
        """Return the value for expstore.json: {} for the defaults, with which all fields are flat."""
        if self.layout in (None, "flat") and not self.fields and self.share_next is not False:
            return {}
        kept: dict[str, Any] = {
            "layout": self.layout or "flat",
            "fields": {k: dict(v) for k, v in self.fields.items()},
        }
        return {**kept, "share_next": False} if self.share_next is False else kept

    def fill_from(self, other: ColumnLayout) -> ColumnLayout:
        """Return this layout, with the other layout's values for everything that is not specified here."""
        return ColumnLayout(
            self.layout or other.layout,
            self.fields or other.fields,
            other.share_next if self.share_next is None else self.share_next,
        )

    @staticmethod
    def words(stored: Mapping[str, Any], other: Mapping[str, Any]) -> str:
        """Return a value of `to_json` as arguments, without those that are equal in `other`."""
        said = {"layout": "flat", **stored}
        return ", ".join(
            f"{name}={value!r}"
            for name, value in said.items()
            if value != {} and (name == "layout" or value != other.get(name))
        )

    def check(self, fields: tuple[Field, ...], capacity: int | None) -> None:
        """Check that the options of single fields have an effect.

        Args:
            fields: The user's fields.
            capacity: Most readable rows; None: unbounded.

        Raises:
            SchemaError: There is no such field, an option has no effect on it, or its chunks are too large.
        """
        known = {key_name(entry.key): entry for entry in fields}
        for name, asked in self.fields.items():
            entry = known.get(name)
            if entry is None:
                raise SchemaError(
                    f"fields= names {name!r}, which is not a field",
                    hint=_add_recreate_hint(f"the fields are {', '.join(sorted(known))}"),
                )
            packed = self._packing(entry, None) is not None
            _refuse_idle(f"field {name!r}: ", asked, packed=packed, fault=self._fault(entry, fields))
            rows = asked.get("rows", 1)
            most = max(1, min(MOST_BYTES // max(1, entry.row_bytes), capacity or rows))
            if rows > most:
                raise SchemaError(
                    f"field {name!r}: chunks of {rows} rows of {entry.row_bytes} bytes are too large",
                    hint=_add_recreate_hint(
                        f"a chunk has at most {MOST_BYTES >> 20} MiB and the rows of a ring: here {most}"
                    ),
                )

    @property
    def asks_packed(self) -> bool:
        """Whether packed fields were requested explicitly, not only depending on their width."""
        return "packed" in (self.layout, *(asked.get("layout") for asked in self.fields.values()))

    @property
    def _may_pack(self) -> bool:
        """Whether fields can be packed, by name or by their width."""
        asked = (self.layout, *(options.get("layout") for options in self.fields.values()))
        return "packed" in asked or "auto" in asked

    def packings(self, fields: tuple[Field, ...], slots: int | None, reach: int) -> list[Packing | None]:
        """Return how fields are packed; None for a flat field.

        Args:
            fields: All fields of a store.
            slots: Number of slots of a ring; None: the store is unbounded.
            reach: Number of overwritten rows that a ring keeps for packed rows that refer to them.
        """
        shared = self._find_shared(fields) if slots is None or reach else frozenset()
        stacks = {
            entry.key: count_parts(entry)
            for entry in fields
            if entry.key in shared and entry.key[0] != "next" and self._has_blocks(entry, fields)
        }
        lenders = {("next", *key): parts for key, parts in stacks.items() if parts > 1}
        return [
            self._packing(
                entry,
                slots,
                shares=entry.key in shared or entry.key in lenders,
                parts=(stacks | lenders).get(entry.key, 1),
                within=entry.key in lenders,
            )
            for entry in fields
        ]

    def _has_blocks(self, entry: Field, fields: tuple[Field, ...]) -> bool:
        """Return whether images of a field and of its next values can be unpacked one by one."""
        both = [
            self._packing(other, None) for other in fields if other.key in (entry.key, ("next", *entry.key))
        ]
        return all(packing is not None and packing.means.has_blocks for packing in both)

    def reach(self, fields: tuple[Field, ...]) -> int:
        """Return how many overwritten rows a ring must keep for rows that are stored in the next column."""
        shared = self._find_shared(fields)
        return max((reach_for(entry) for entry in fields if entry.key in shared), default=0)

    def _find_shared(self, fields: tuple[Field, ...]) -> frozenset[Key]:
        """Return the packed fields whose rows may be stored in the column of the next observations."""
        found = set()
        for entry in fields:
            asked = self.fields.get(key_name(entry.key), {}).get("share_next", self.share_next)
            packed = self._packing(entry, None) is not None
            if packed and asked is not False and self._fault(entry, fields) is None:
                found.add(entry.key)
        return frozenset(found)

    def _fault(self, entry: Field, fields: tuple[Field, ...]) -> str | None:
        """Return why no rows of a packed field can be stored in the next column; None if they can."""
        kind = ("next", *entry.key), entry.dtype, entry.shape
        if any(
            (other.key, other.dtype, other.shape) == kind and self._packing(other, None) for other in fields
        ):
            return None
        return "there is no packed next field of the same dtype and shape"

    def _packing(self, entry: Field, slots: int | None, **how: Any) -> Packing | None:
        own = self.fields.get(key_name(entry.key), {})
        layout = own.get("layout", self.layout or "flat")
        if (
            entry.variable
            or entry.key[0] == "_row"
            or layout == "flat"
            or (layout == "auto" and entry.row_bytes < WIDE_BYTES)
        ):
            return None
        codec, rows = own.get("codec", DEFAULT_CODEC), own.get("rows")
        return packing_for(entry, slots, codec=codec, rows=rows, **how)

    def packs(self, fields: tuple[Field, ...]) -> bool:
        """Return whether any of these fields is packed."""
        return any(self._packing(entry, None) is not None for entry in fields)

    def chunk_rows(self, fields: tuple[Field, ...]) -> int:
        """Return a number of rows that must divide the number of slots."""
        packings = [self._packing(entry, None) for entry in fields]
        return max((packing.rows for packing in packings if packing is not None), default=1)


def layout_of(manifest: Manifest) -> ColumnLayout:
    """Return the layout for building the columns of an existing store again."""
    layout, slots = ColumnLayout.of(manifest.layout, manifest.ranking), manifest.slots
    fields = () if manifest.schema is None else manifest.schema.fields
    if slots is not None and slots % layout.chunk_rows(fields):
        return ColumnLayout()  # a store that kept the best rows: its slots are not whole chunks
    return layout


def ask_layout(
    layout: LayoutName | None,
    fields: Mapping[str, Mapping[str, Any]] | None,
    share_next: bool | None = None,
) -> ColumnLayout | None:
    """Return the requested layout; None if no option was passed.

    Raises:
        SchemaError: There is no such layout, codec or option.
    """
    if layout is None and fields is None and share_next is None:
        return None
    return ColumnLayout(layout, {} if fields is None else _parse_fields(fields), share_next)


def _parse_fields(fields: Any) -> dict[str, dict[str, Any]]:
    """Return the options of single fields, by their names; raise SchemaError if they are malformed."""
    form = "it is a dict like {'pixels': {'layout': 'packed'}}"
    if not isinstance(fields, Mapping):
        raise SchemaError(f"fields= must be a dict, got {fields!r}", hint=form)
    named: dict[str, dict[str, Any]] = {}
    for key, asked in fields.items():
        try:
            name = key_name(to_key(key))
        except TypeError as exc:
            raise SchemaError(f"fields=: {exc}", hint=form) from None
        if not isinstance(asked, Mapping):
            raise SchemaError(f"field {name!r}: options must be a dict, got {asked!r}", hint=form)
        if name in named:
            raise SchemaError(f"field {name!r} is in fields= twice", hint="leave one out")
        named[name] = dict(asked)
    return named


def _refuse_idle(whose: str, asked: Mapping[str, Any], *, packed: bool, fault: str | None) -> None:
    """Raise SchemaError for an option without effect; `fault` says why rows cannot be shared."""
    for option in ("codec", "rows", "share_next"):
        if asked.get(option) and not packed:
            raise SchemaError(
                f"{whose}{option}={asked[option]!r} is an option of packed fields, but "
                f"{'this field is' if whose else 'all fields are'} flat",
                hint=_add_recreate_hint(f'omit {option}, or use layout="packed"'),
            )
    if asked.get("share_next") and fault is not None:
        raise SchemaError(
            f"{whose}share_next=True has no effect: {fault}", hint=_add_recreate_hint("omit share_next")
        )


def _add_recreate_hint(hint: str) -> str:
    return f"{hint}; to create an existing store again, use mode='w' or another folder"


def refuse_objects(schema: Schema) -> None:
    """Raise SchemaError for fields that cannot be stored on disk."""
    if schema.objects:
        raise SchemaError(
            f"field {key_name(schema.objects[0])!r} has objects, which cannot be stored on disk",
            hint='expstore.open(..., layout="arrow") stores text, numbers, lists and dicts; '
            "LazyTensorStorage, LazyStackStorage and ListStorage store objects in RAM",
        )
