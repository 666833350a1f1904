"""What a storage is, apart from its rows: its fields, its ring, and how rows are drawn and kept.

Used by every storage. On disk it comes from expstore.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from expstore.core.geometry import RingGeometry
from expstore.core.values import Ranking
from expstore.schema.field_roles import Keys, find_keys
from expstore.schema.schema import Schema

if TYPE_CHECKING:
    from expstore.storages.format.manifest import Manifest

__all__ = ["Description"]


@dataclass(frozen=True, kw_only=True)
class Description:
    """Say what a storage is. It is replaced as a whole, by one assignment.

    Args:
        geometry: How ids, slots and indices correspond.
        schema: The fields; None: no rows have come yet.
        keys: Which fields say what a row is to its episode.
        seed: Key of all draws.
        flatten: Whether all dims of a batch are rows of streams of their own.
        ranking: By what rows are ranked, of which only the best stay; None: the newest stay.
        specs: What values fields may have, as `expstore.schema.spec_text` writes it; "": nothing is known.
        uuid: The store's; zeros in RAM.
    """

    geometry: RingGeometry = field(default_factory=lambda: RingGeometry(None, 1))
    schema: Schema | None = None
    keys: Keys = field(default_factory=Keys)
    seed: int = 0
    flatten: bool = False
    ranking: Ranking | None = None
    specs: str = ""
    uuid: str = "0" * 32

    @classmethod
    def of(cls, manifest: Manifest) -> Description:
        """Return what expstore.json says."""
        schema = manifest.schema
        return cls(
            geometry=manifest.geometry,
            schema=schema,
            keys=Keys() if schema is None else manifest.find_keys(schema),
            seed=manifest.seed,
            flatten=manifest.flatten,
            ranking=manifest.ranking,
            specs=manifest.specs,
            uuid=manifest.uuid,
        )

    def with_fields(self, schema: Schema, keys: Keys | None = None) -> Description:
        """Return the same with other fields; without `keys` these are found by their usual names."""
        return replace(self, schema=schema, keys=keys or find_keys(schema))
