"""The differences between kinds of replay buffers: which rows they accept, and which entries batches have.

A buffer gives one style to its parts. `PlainRows` is for `ReplayBuffer`, `TensorDictRows` in
`expstore.buffers.tensordict` for `TensorDictReplayBuffer`. A style does not use the storage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from expstore.core.geometry import RingGeometry
from expstore.core.values import Array, Key, Selection
from expstore.samplers.base import Sampler
from expstore.schema.schema import Schema
from expstore.storages.read_view import ReadView
from expstore.writers.writers import Writer, default_writer


class RowStyle(ABC):
    """How a kind of buffer treats rows."""

    #: Whether dicts that are written first are rows with fields, like TensorDicts; otherwise they are trees.
    dicts_have_fields: bool

    @abstractmethod
    def default_writer(self, storage: ReadView) -> Writer:
        """Return the default writer of a buffer."""

    @abstractmethod
    def check_data(self, data: Any, *, has_fields: bool) -> None:
        """Raise SchemaError if `extend` does not accept data of this type.

        Args:
            data: The rows.
            has_fields: Whether they are dicts or Arrow tables, whose names are names of fields.
        """

    @abstractmethod
    def takes_priorities(self, asked: bool | None) -> bool:
        """Return whether to set the priorities that come with rows.

        Args:
            asked: The caller's `update_priority`; None: the default.

        Raises:
            NotImplementedError: The buffer has no priority key, and `asked` is not None.
        """

    @abstractmethod
    def priority_place(self, sampler: Sampler, schema: Schema) -> int:
        """Return the position of the field with the priorities of new rows, or -1."""

    @abstractmethod
    def priorities_in(self, sampler: Sampler, schema: Schema, columns: Sequence[Array]) -> Array | None:
        """Return the priorities that come with new rows, or None. Shape `(n,)`."""

    @abstractmethod
    def own_keys(self, sampler: Sampler, unit_keys: frozenset[str]) -> frozenset[str]:
        """Return root keys of samples that are not fields; `extend` skips them.

        Args:
            sampler: The sampler.
            unit_keys: The root keys of the sample unit.
        """

    @abstractmethod
    def root(self, geometry: RingGeometry, selection: Selection, *, generations: bool) -> dict[str, Array]:
        """Return the root entries of a batch about its rows, such as `index`.

        Args:
            geometry: Geometry of the storage.
            selection: The rows.
            generations: Whether to include `index_generation`.
        """

    @abstractmethod
    def mark(self, selection: Selection, schema: Schema, columns: list[Array]) -> dict[Key, Array]:
        """Write a sampler's flags into columns of the schema; return those of keys that are not stored."""


class PlainRows(RowStyle):
    """Rows of any kind; batches have only what was stored, and `info` has the rows' indices."""

    dicts_have_fields = False

    def default_writer(self, storage: ReadView) -> Writer:
        """Return the writer that fits the storage."""
        return default_writer(storage)

    def check_data(self, data: Any, *, has_fields: bool) -> None:
        """Accept all data."""

    def takes_priorities(self, asked: bool | None) -> bool:
        """Return False: the buffer has no priority key."""
        if asked is not None:
            raise NotImplementedError(
                "update_priority is not supported in this class, which has no priority key; "
                "use a TensorDictReplayBuffer, or update_priority(index, priority)"
            )
        return False

    def priority_place(self, sampler: Sampler, schema: Schema) -> int:
        """Return -1."""
        return -1

    def priorities_in(self, sampler: Sampler, schema: Schema, columns: Sequence[Array]) -> Array | None:
        """Return None."""
        return None

    def own_keys(self, sampler: Sampler, unit_keys: frozenset[str]) -> frozenset[str]:
        """Return no keys."""
        return frozenset()

    def root(self, geometry: RingGeometry, selection: Selection, *, generations: bool) -> dict[str, Array]:
        """Return no entries."""
        return {}

    def mark(self, selection: Selection, schema: Schema, columns: list[Array]) -> dict[Key, Array]:
        """Return no entries."""
        return {}
