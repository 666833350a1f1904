"""The description of a storage, without its rows: fields, ring, seed, ranking and specs.

Used by every storage. On disk it comes from expstore.json.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from expstore.core.geometry import RingGeometry, round_up
from expstore.core.values import Ranking
from expstore.schema.field_roles import Keys, find_keys, find_observations
from expstore.schema.schema import Schema

if TYPE_CHECKING:
    from expstore.storages.format.manifest import Manifest


@dataclass(frozen=True, kw_only=True)
class Description:
    """The description of a storage. Immutable; a change replaces the whole object by one assignment.

    Args:
        geometry: How ids, slots and indices correspond.
        schema: The fields; None: no rows were written yet.
        keys: The fields that mark trajectories, ends and rewards.
        seed: Key of all draws.
        flatten: Whether all dims of a batch are rows, and each index of the other dims is a separate stream.
        ranking: The criterion by which only the best rows are kept; None: the newest rows are kept.
        specs: The specs of the fields, as `expstore.schema.spec_text` writes them; "": there are no specs.
        uuid: The store's uuid; zeros in RAM.
        window_rows: How many of the newest ids samplers see in a storage without a capacity, whole steps of
            time; None: all of them.
    """

    geometry: RingGeometry = field(default_factory=lambda: RingGeometry(None, 1))
    schema: Schema | None = None
    keys: Keys = field(default_factory=Keys)
    seed: int = 0
    flatten: bool = False
    ranking: Ranking | None = None
    specs: str = ""
    uuid: str = "0" * 32
    window_rows: int | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> Description:
        """Return the description in expstore.json."""
        schema, geometry, rows = manifest.schema, manifest.geometry, manifest.window
        return cls(
            geometry=geometry,
            schema=schema,
            keys=Keys() if schema is None else manifest.find_keys(schema),
            seed=manifest.seed,
            flatten=manifest.flatten,
            ranking=manifest.ranking,
            specs=manifest.specs,
            uuid=manifest.uuid,
            window_rows=None if rows is None else round_up(rows, geometry.lanes),
        )

    @cached_property
    def window_ring(self) -> RingGeometry:
        """The places of the rows that samplers see in an array with a value for each, such as a sum tree."""
        return self.geometry if self.window_rows is None else RingGeometry(self.window_rows)

    @cached_property
    def observations(self) -> list[tuple[int, int]]:
        """Positions of each observation field and of its next observation; see `find_observations`."""
        return [] if self.schema is None else find_observations(self.schema, self.keys)

    def with_fields(self, schema: Schema, keys: Keys | None = None) -> Description:
        """Return a copy with other fields; without `keys`, the keys are found by their usual names."""
        return replace(self, schema=schema, keys=keys or find_keys(schema))
