"""Numbers that move when what was derived from a storage's rows must be derived anew.

Used by storages; indices, samplers and filters compare the numbers that they have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

__all__ = ["Epochs", "ViewVersion"]


class ViewVersion(NamedTuple):
    """Which rows, and which fields of them, a storage has: equal versions have the same ones.

    Rows that are appended, and those that leave a ring by age, move the window alone.

    Args:
        content: As `Epochs.content`.
        deleted: As `Epochs.deleted`.
        fields: As `Epochs.fields`.
        changes: Moves, twice, when rows are changed in place; odd meanwhile.
    """

    content: int
    deleted: int
    fields: int
    changes: int


class Epochs:
    """Count what happens to rows and fields other than by appending and by age.

    Threads: the storage's lock is held while a number moves, but for `note_deleted` of a follower; any
    number read. Crashes: nothing is kept.

    Example:
        >>> epochs = Epochs()
        >>> with epochs.changing_fields():
        ...     epochs.fields
        1
        >>> epochs.fields
        2
    """

    __slots__ = ("content", "deleted", "fields")

    def __init__(self) -> None:
        #: Moves when ids may name other rows than before: a snapshot is restored, a journal is read again.
        self.content = 0
        #: Moves when rows leave other than by age (delete, clear, restore), or must all be looked at anew.
        self.deleted = 0
        #: Moves, twice, when fields are added or dropped: their places are others then. Odd meanwhile.
        self.fields = 0

    def note_deleted(self) -> None:
        """Note that rows have left other than by age."""
        self.deleted += 1

    def note_content(self) -> None:
        """Note that ids may name other rows from now on."""
        self.content += 1
        self.deleted += 1

    @contextmanager
    def changing_fields(self, changes: bool = True) -> Iterator[None]:
        """Note that the places of fields change in this block, if they do."""
        self.fields += changes
        try:
            yield
        finally:
            self.fields += changes
