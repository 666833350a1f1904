"""Several storages that are read together, with a transform for the rows of each.

Part of an ensemble of buffers, which reads through it. Nothing is written or drawn here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from expstore.core.members import Members
from expstore.core.torchrl_keywords import VoidAttribute
from expstore.errors import ArgumentError


class StorageEnsemble(Members):
    """The storages of an ensemble of buffers.

    `[number]` is one storage, `[numbers]` an ensemble of some of them, `[numbers, index]` a list of the rows
    at an index in each. Threads, processes and crashes: as the storages.

    Args:
        storages: One per member.
        transforms: A transform for the rows of each storage; None: rows are not transformed.

    Raises:
        ArgumentError: The number of transforms differs from the number of storages.

    Example:
        >>> from expstore import MemoryStorage
        >>> from expstore.storages import StorageEnsemble
        >>> storages = StorageEnsemble(MemoryStorage(10), MemoryStorage(20))
        >>> len(storages)
        2
    """

    #: TorchRL's attribute: `dumps` has one format.
    checkpointer = VoidAttribute()
    _word = "storages"

    def __init__(self, *storages: Any, transforms: Sequence[Any] | None = None) -> None:
        super().__init__(*storages)
        if transforms is not None and len(transforms) != len(storages):
            raise ArgumentError("transforms must have the same length as the storages provided.")
        self.transforms = None if transforms is None else list(transforms)

    def _select_members(self, numbers: list[int]) -> StorageEnsemble:
        transforms = None if self.transforms is None else [self.transforms[number] for number in numbers]
        return StorageEnsemble(*[self._members[number] for number in numbers], transforms=transforms)

    def __getitem__(self, index: Any) -> Any:
        """Return a storage, some storages, or rows of them."""
        if isinstance(index, tuple) and len(index) > 1:
            chosen, rows = self[index[0]], index[1:] if len(index) > 2 else index[1]
            if isinstance(chosen, StorageEnsemble):
                return [storage[rows] for storage in chosen]
            return chosen[rows]
        return super().__getitem__(index)

    @property
    def max_size(self) -> int:
        """The number of rows that all storages can hold together."""
        return sum(storage.max_size for storage in self._members)
