"""What kinds of replay buffers do differently: which rows they accept, and what batches say of their rows.

A buffer gives one style to its parts. `PlainRows` is that of `ReplayBuffer`; `TensorDictRows` is in
`expstore.buffers.tensordict`. A style reads no storage and appends nothing.
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

__all__ = ["PlainRows", "RowStyle"]


class RowStyle(ABC):
    """Decide what rows are to a kind of buffer."""

    #: Whether dicts that come first are rows with fields, as TensorDicts are; otherwise they are trees.
    dicts_have_fields: bool

    @abstractmethod
    def default_writer(self, storage: ReadView) -> Writer:
        """Return the writer of a buffer that was given none."""

    @abstractmethod
    def check_data(self, data: Any, *, has_fields: bool) -> None:
        """Raise SchemaError if `extend` does not accept data of this type.

        Args:
            data: The rows.
            has_fields: Whether they are dicts or Arrow tables whose names are those of fields.
        """

    @abstractmethod
    def takes_priorities(self, asked: bool | None) -> bool:
        """Return whether priorities that come with rows are set.

        Args:
            asked: What the caller asks for; None: the default.

        Raises:
            NotImplementedError: The buffer does not know where priorities are, and the caller says something.
        """

    @abstractmethod
    def priority_place(self, sampler: Sampler, schema: Schema) -> int:
        """Return the place of the field with the priorities of new rows; -1: there is no such field."""

    @abstractmethod
    def priorities_in(self, sampler: Sampler, schema: Schema, columns: Sequence[Array]) -> Array | None:
        """Return the priorities that come with new rows, or None. Shape `(n,)`."""

    @abstractmethod
    def own_keys(self, sampler: Sampler, unit_keys: frozenset[str]) -> frozenset[str]:
        """Return root keys that samples carry besides the fields; `extend` skips them.

        Args:
            sampler: What draws.
            unit_keys: The root keys of the sample unit.
        """

    @abstractmethod
    def root(self, geometry: RingGeometry, selection: Selection, *, generations: bool) -> dict[str, Array]:
        """Return what a batch says of its rows at its root.

        Args:
            geometry: Of the storage.
            selection: The rows.
            generations: Whether `index_generation` is part of it.
        """

    @abstractmethod
    def mark(self, selection: Selection, schema: Schema, columns: list[Array]) -> dict[Key, Array]:
        """Write a sampler's flags into the columns of the schema; return the values of other keys."""


class PlainRows(RowStyle):
    """Any rows; batches hold what was stored, and `info` says which rows it is."""

    dicts_have_fields = False

    def default_writer(self, storage: ReadView) -> Writer:
        """Return the writer that fits the storage."""
        return default_writer(storage)

    def check_data(self, data: Any, *, has_fields: bool) -> None:
        """Accept all data."""

    def takes_priorities(self, asked: bool | None) -> bool:
        """Return False: nothing says where priorities are."""
        if asked is not None:
            raise NotImplementedError(
                "update_priority is not supported in this class, which does not know where priorities are; "
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
        """Return no key."""
        return frozenset()

    def root(self, geometry: RingGeometry, selection: Selection, *, generations: bool) -> dict[str, Array]:
        """Return nothing."""
        return {}

    def mark(self, selection: Selection, schema: Schema, columns: list[Array]) -> dict[Key, Array]:
        """Return nothing."""
        return {}
