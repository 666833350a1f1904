"""How the fields of a store lie on disk: flat, or packed.

Settings of a new store; the Zarr storage asks when its first rows come. Afterwards each array's zarr.json
says how it lies, and this is not asked again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from expstore.core.values import Key, Ranking, key_name, to_key
from expstore.errors import SchemaError
from expstore.schema.schema import Field, Schema
from expstore.storages.format.chunk_encoding import MOST_BYTES, MOST_ROWS, Packing, packing_for, reach_for
from expstore.storages.format.codecs import CODECS, DEFAULT_CODEC
from expstore.storages.format.manifest import Manifest

__all__ = [
    "LAYOUTS",
    "WIDE_BYTES",
    "ColumnLayout",
    "LayoutName",
    "ask_layout",
    "layout_of",
    "refuse_objects",
]

LayoutName = Literal["flat", "packed", "auto"]
LAYOUTS = ("flat", "packed", "auto")
#: With "auto", fields with rows of at least this many bytes are packed.
WIDE_BYTES = 1024
_OPTIONS = {"layout", "codec", "rows", "share_next"}


@dataclass(frozen=True)
class ColumnLayout:
    """How fields are stored on disk.

    Args:
        layout: "flat": rows are stored one after another, each read by a copy, and can be changed in place.
            "packed": rows are stored in compressed chunks of a few rows, and are immutable. "auto": packed
            from 1 KiB per row on. None: not specified; columns are flat then.
        fields: Options of single fields, by name: their `layout`, `codec`, `rows` per chunk and `share_next`.
        share_next: Whether rows of a packed field are left out where `("next", name)` already has the same
            bytes. None: not specified; they are left out then.

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
        """Return how the columns of a store are made.

        Args:
            stored: What expstore.json says.
            ranking: By what it keeps the best rows: these come in the places of others, which needs places.
        """
        return cls() if ranking is not None else cls(**stored)

    def to_json(self) -> dict[str, Any]:
        """Return what expstore.json keeps: nothing of what is flat anyway."""
        if self.layout in (None, "flat") and not self.fields and self.share_next is not False:
            return {}
        kept: dict[str, Any] = {
            "layout": self.layout or "flat",
            "fields": {k: dict(v) for k, v in self.fields.items()},
        }
        return {**kept, "share_next": False} if self.share_next is False else kept

    def fill_from(self, other: ColumnLayout) -> ColumnLayout:
        """Return what this one says, and where it says nothing the other."""
        return ColumnLayout(
            self.layout or other.layout,
            self.fields or other.fields,
            other.share_next if self.share_next is None else self.share_next,
        )

    @staticmethod
    def words(stored: Mapping[str, Any], other: Mapping[str, Any]) -> str:
        """Return what `to_json` made in the words of the arguments, where the other one is not alike."""
        said = {"layout": "flat", **stored}
        return ", ".join(
            f"{name}={value!r}"
            for name, value in said.items()
            if value != {} and (name == "layout" or value != other.get(name))
        )

    def check(self, fields: tuple[Field, ...], capacity: int | None) -> None:
        """Check that what is asked of single fields has a meaning for these.

        Args:
            fields: Those that users have.
            capacity: Most readable rows; None: the store grows.

        Raises:
            SchemaError: There is no such field, an option has no effect on it, or its chunks are too large.
        """
        known = {key_name(entry.key): entry for entry in fields}
        for name, asked in self.fields.items():
            entry = known.get(name)
            if entry is None:
                raise SchemaError(
                    f"fields= speaks of {name!r}, which is no field",
                    hint=_add_recreate_hint(f"there are {', '.join(sorted(known))}"),
                )
            packed = self._packing(entry, None) is not None
            _refuse_idle(f"field {name!r}: ", asked, packed=packed, fault=self._fault(entry, fields))
            rows = asked.get("rows", 1)
            most = max(1, min(MOST_BYTES // max(1, entry.row_bytes), capacity or rows))
            if rows > most:
                raise SchemaError(
                    f"field {name!r}: chunks of {rows} rows of {entry.row_bytes} bytes are too large",
                    hint=_add_recreate_hint(
                        f"a chunk has {MOST_BYTES >> 20} MiB and the rows of a ring at most: here {most}"
                    ),
                )

    @property
    def asks_packed(self) -> bool:
        """Whether it asks for packed fields, rather than leave that to their width."""
        return "packed" in (self.layout, *(asked.get("layout") for asked in self.fields.values()))

    @property
    def _may_pack(self) -> bool:
        """Whether fields can be packed, by name or by their width."""
        asked = (self.layout, *(options.get("layout") for options in self.fields.values()))
        return "packed" in asked or "auto" in asked

    def packings(self, fields: tuple[Field, ...], slots: int | None, reach: int) -> list[Packing | None]:
        """Return how fields are packed; None: one is flat.

        Args:
            fields: All of a store.
            slots: How many rows a ring has; None: the store grows.
            reach: How many rows behind the oldest one stay, in a ring.
        """
        shared = self._find_shared(fields) if slots is None or reach else frozenset()
        return [self._packing(entry, slots, shares=entry.key in shared) for entry in fields]

    def reach(self, fields: tuple[Field, ...]) -> int:
        """Return how many rows behind the oldest one must stay for rows that lie with the next ones."""
        shared = self._find_shared(fields)
        return max((reach_for(entry) for entry in fields if entry.key in shared), default=0)

    def _find_shared(self, fields: tuple[Field, ...]) -> frozenset[Key]:
        """Return the packed fields of which rows may lie with the next ones."""
        found = set()
        for entry in fields:
            asked = self.fields.get(key_name(entry.key), {}).get("share_next", self.share_next)
            packed = self._packing(entry, None) is not None
            if packed and asked is not False and self._fault(entry, fields) is None:
                found.add(entry.key)
        return frozenset(found)

    def _fault(self, entry: Field, fields: tuple[Field, ...]) -> str | None:
        """Return why no rows of a packed field can lie with the next ones; None: some can."""
        kind = ("next", *entry.key), entry.dtype, entry.shape
        if any(
            (other.key, other.dtype, other.shape) == kind and self._packing(other, None) for other in fields
        ):
            return None
        return "it is packed, and among packed next ones has none of its dtype and shape"

    def _packing(self, entry: Field, slots: int | None, *, shares: bool = False) -> Packing | None:
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
        return packing_for(entry, slots, codec=codec, rows=rows, shares=shares)

    def packs(self, fields: tuple[Field, ...]) -> bool:
        """Return whether one of these fields is packed."""
        return any(self._packing(entry, None) is not None for entry in fields)

    def chunk_rows(self, fields: tuple[Field, ...]) -> int:
        """Return of how many rows the number of slots must be a multiple."""
        packings = [self._packing(entry, None) for entry in fields]
        return max((packing.rows for packing in packings if packing is not None), default=1)


def layout_of(manifest: Manifest) -> ColumnLayout:
    """Return how the columns of a store are made that is built anew."""
    layout, slots = ColumnLayout.of(manifest.layout, manifest.ranking), manifest.slots
    fields = () if manifest.schema is None else manifest.schema.fields
    if slots is not None and slots % layout.chunk_rows(fields):
        return ColumnLayout()  # a store that kept the best rows till now: its slots are no whole chunks
    return layout


def ask_layout(
    layout: LayoutName | None,
    fields: Mapping[str, Mapping[str, Any]] | None,
    share_next: bool | None = None,
) -> ColumnLayout | None:
    """Return the layout that was asked for; None if no option was given.

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
            raise SchemaError(f"field {name!r}: it is in fields= twice", hint="leave one out")
        named[name] = dict(asked)
    return named


def _refuse_idle(whose: str, asked: Mapping[str, Any], *, packed: bool, fault: str | None) -> None:
    """Raise SchemaError for an option without effect; `fault` says why rows cannot be shared."""
    for option in ("codec", "rows", "share_next"):
        if asked.get(option) and not packed:
            raise SchemaError(
                f"{whose}{option}={asked[option]!r} is of packed fields, and "
                f"{'this one is' if whose else 'all of these are'} flat",
                hint=_add_recreate_hint(f'leave {option} out, or ask for layout="packed"'),
            )
    if asked.get("share_next") and fault is not None:
        raise SchemaError(
            f"{whose}share_next=True has no meaning: {fault}", hint=_add_recreate_hint("leave share_next out")
        )


def _add_recreate_hint(hint: str) -> str:
    return f"{hint}; a store that was made already is made anew with mode='w', or in another folder"


def refuse_objects(schema: Schema) -> None:
    """Raise SchemaError for fields that cannot be stored on disk."""
    if schema.objects:
        raise SchemaError(
            f"field {key_name(schema.objects[0])!r} holds objects, which a store on disk cannot keep",
            hint='expstore.open(..., layout="arrow") keeps texts, numbers, lists and dicts; '
            "LazyTensorStorage, LazyStackStorage and ListStorage keep objects, in RAM",
        )
