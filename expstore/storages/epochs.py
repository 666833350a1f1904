"""Counters that tell when data derived from a storage's rows is stale.

Used by storages. Indices, samplers and filters compare the counters with the values that they have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class ViewVersion(NamedTuple):
    """A version of a storage's rows and fields: equal versions have the same rows and fields.

    Appended rows, and rows that leave a ring by age, change only the window.

    Args:
        content: See `Epochs.content`.
        deleted: See `Epochs.deleted`.
        fields: See `Epochs.fields`.
        changes: Incremented when a change of rows in place begins and when it ends; odd during a change.
    """

    content: int
    deleted: int
    fields: int
    changes: int


class Epochs:
    """Count changes of rows and fields other than appending and eviction by age.

    Threads: the storage's lock is held while a counter is incremented, except for `note_deleted` of a
    follower; any number read. Crashes: nothing is stored.

    Example:
        >>> from expstore.storages.epochs import Epochs
        >>> epochs = Epochs()
        >>> with epochs.note_field_change():
        ...     epochs.fields
        1
        >>> epochs.fields
        2
    """

    __slots__ = ("content", "deleted", "fields")

    def __init__(self) -> None:
        #: Incremented when ids may name other rows than before: after a restore, or when a journal is read
        #: again.
        self.content = 0
        #: Incremented when rows are removed other than by age (delete, clear, restore), or must all be read
        #: again.
        self.deleted = 0
        #: Schema epoch: odd while a field is added or dropped. Positions of fields are valid for one even
        #: value.
        self.fields = 0

    def note_deleted(self) -> None:
        """Record that rows were removed other than by age."""
        self.deleted += 1

    def note_content(self) -> None:
        """Record that ids may name other rows from now on."""
        self.content += 1
        self.deleted += 1

    @contextmanager
    def note_field_change(self, changes: bool = True) -> Iterator[None]:
        """Record that the positions of fields change in this block, if `changes` is set."""
        self.fields += changes
        try:
            yield
        finally:
            self.fields += changes
