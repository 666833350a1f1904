"""What a storage under test can do, and how the suite creates one.

Base class of the suite's parts; it has no tests of its own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expstore.maintenance import verify
from expstore.storages.follower import FollowerStorage
from expstore.storages.read_view import ReadView
from expstore.testing.buffer_and_model import Life


class Declared:
    """Declare what a storage can do. It must refuse everything else with an error of expstore.

    Example:
        >>> from expstore import MemoryStorage
        >>> from expstore.testing.suite import StorageSuite
        >>> class TestMine(StorageSuite):
        ...     patches = True  # rb[i] = rows works
        ...     def make(self, path, capacity, *, ndim, seed):
        ...         return MemoryStorage(capacity, ndim=ndim, seed=seed)
    """

    #: Whether rows survive the end of the process and a kill: `make` with the same path finds them.
    persistent = False
    #: Whether readers can follow while one process writes; otherwise a copy of a buffer has its own rows.
    follows = False
    #: Whether fixed-size fields of stored rows can be changed.
    patches = True
    #: Whether the storage can keep the best rows instead of the newest.
    ranks = True
    #: Whether fields may be of variable length, and whether such fields can be changed.
    variable = False
    variable_patches = False
    #: Whether fields can be added and dropped while the storage has rows.
    late_fields = True
    #: Whether a copy of a buffer, pickled or in another process, has the rows; otherwise copying is refused.
    copies = True
    #: Whether snapshots can be loaded. Every storage without object fields can be dumped.
    versions = True
    #: Number of runs of the state machine; None for a twentieth of the Hypothesis profile's `max_examples`.
    lives: int | None = None

    _made = 0

    @abstractmethod
    def make(self, path: Path, capacity: int | None, *, ndim: int, seed: int) -> ReadView:
        """Create a storage, or open the persistent one in the folder.

        Args:
            path: A folder for the storage; it may not exist yet.
            capacity: Maximum number of readable rows; None for an unbounded storage.
            ndim: Number of dims of a batch that index rows.
            seed: Seed of the draws.
        """

    def follow(self, storage: ReadView) -> ReadView:
        """Return a storage that reads what another one writes, as a reader in another process would."""
        if storage.path is None:
            raise NotImplementedError(f"override follow() to return a reader of a {type(storage).__name__}")
        return FollowerStorage(storage.path)

    def verify(self, storage: ReadView) -> Sequence[object]:
        """Return the problems that a check of a closed storage's files finds."""
        return [] if storage.path is None else verify(storage.path)

    def life(self, path: Path, capacity: int | None = 20, **options: Any) -> Life:
        """Return a buffer over a new storage, with its model.

        Args:
            path: Folder of the test.
            capacity: Maximum number of readable rows; None for an unbounded storage.
            options: Further arguments of `Life`.
        """
        self._made += 1
        return Life(self, path / f"life{self._made}", capacity, **options)
